"""Memory for large intermediate arrays, kept from step to step.

On the CPU, PyTorch gives large blocks back to the system, and the first touch of every new page costs more than a copy
of what is written to it (measured: filling a new array of 100 MB takes 2.6 times as long as an old one). CUDA has a
caching allocator of its own.
"""

from __future__ import annotations

import torch

from hvdplus.adapters.torch import private

SMALLEST = 1 << 16
"""Bytes below which the system's allocator is as good."""
SPARE = 1.25
"""A block serves arrays down to its size divided by this."""
MOST = 64
"""Most blocks that are kept; the least recently used are given back."""


def alone_in_memory(tensor: torch.Tensor) -> bool:
    """Whether certainly no other tensor shares ``tensor``'s memory."""
    found = private.uses(tensor.untyped_storage())
    return found is not None and found <= 2  # the tensor, and the storage asked for


class Pool:
    """Blocks that are handed out again once no array holds them any more."""

    def __init__(self) -> None:
        self._blocks: list[torch.UntypedStorage] = []  # least recently used first

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised 1-D array."""
        size = count * dtype.itemsize
        if not private.counts_uses() or device.type != "cpu" or size < SMALLEST:
            return torch.empty(count, dtype=dtype, device=device)
        fitting = (
            i
            for i in reversed(range(len(self._blocks)))  # blocks of levels no longer used stand in front
            if size <= (block := self._blocks[i]).nbytes() <= size * SPARE and private.uses(block) == 1
        )
        found = next(fitting, None)
        block = torch.UntypedStorage(size) if found is None else self._blocks.pop(found)  # type: ignore[no-untyped-call]
        self._blocks = [*self._blocks[-MOST:], block]
        return torch.empty(0, dtype=dtype, device=block.device).set_(block, 0, (count,))  # type: ignore[call-overload, no-any-return]
