"""A bucket's vector that is added up as it is read.

Its gradients and what the residual adds to them are read once, and each block of the sum is multiplied while it is
still in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch

from hvdplus.adapters.torch.packing import CHUNK


class Joint:
    """Gradients plus a share of the residual: 1-D, float32, on the CPU. What is read of it is added up by then."""

    def __init__(
        self, parts: Sequence[torch.Tensor], residual: torch.Tensor, share: float, whole: torch.Tensor
    ) -> None:
        """``parts``: 1-D, float32. ``whole``: where the sum is put."""
        lengths = [part.numel() for part in parts]
        starts = accumulate(lengths, initial=0)
        addends = zip(parts, torch.split(residual, lengths), torch.split(whole, lengths), strict=True)
        self._share, self._whole = share, whole
        self._open = dict(zip(starts, addends, strict=False))
        """Of tensors that are not added up, by their start: gradient, residual, sum."""

    def __getitem__(self, place: slice) -> torch.Tensor:
        """A stretch of the sum."""
        start, stop, _ = place.indices(len(self._whole))
        for first, (part, left, out) in list(self._open.items()):
            if first < stop and start < first + len(part):
                torch.add(part, left, alpha=self._share, out=out)
                del self._open[first]
        return self._whole[start:stop]

    def project(self, start: int, shape: tuple[int, int], basis: torch.Tensor, transpose: bool) -> torch.Tensor | None:
        """``Ops.project`` of a matrix, if that is what stands there and is not added up: it is by then, in blocks of
        rows. None: it is added up, or so small that it stays in the cache."""
        count = math.prod(shape)
        if count <= CHUNK or start not in self._open or len(self._open[start][0]) != count:
            return None
        rows = max(1, CHUNK // shape[1])
        blocks = zip(*(torch.split(each.view(shape), rows) for each in self._open.pop(start)), strict=True)
        sums = (torch.add(part, left, alpha=self._share, out=out) for part, left, out in blocks)
        if transpose:
            product = basis.new_zeros(basis.shape[1], shape[1])
            for block, own in zip(sums, torch.split(basis, rows), strict=True):
                product.addmm_(own.t(), block)
        else:
            product = basis.new_empty(basis.shape[1], shape[0])
            for block, own in zip(sums, torch.split(product, rows, dim=1), strict=True):
                torch.mm(basis.t(), block.t(), out=own)
        return product.t()
