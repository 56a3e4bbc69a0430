"""``Ops`` in PyTorch, on whatever device the arrays live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Array = Any


class TorchOps:
    """See ``hvdplus.compression.ops.Ops`` for what each method promises."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def from_numpy(self, values: np.ndarray) -> Array:
        return torch.from_numpy(np.array(values)).to(self._device)

    def to_numpy(self, values: Array) -> np.ndarray:
        return np.array(values.detach().cpu().numpy())

    def reshape(self, values: Array, shape: tuple[int, ...]) -> Array:
        return values.reshape(shape)

    def concat(self, parts: Sequence[Array]) -> Array:
        if len(parts) == 1:
            return parts[0]
        return torch.cat(list(parts)) if parts else torch.zeros(0, device=self._device)

    def matmul(self, a: Array, b: Array, transpose_a: bool = False, transpose_b: bool = False) -> Array:
        return torch.matmul(a.t() if transpose_a else a, b.t() if transpose_b else b)

    def orthonormal(self, columns: Array) -> Array:
        q, r = torch.linalg.qr(columns)
        return q * torch.where(r.diagonal() < 0, -1.0, 1.0)

    def half(self, values: Array) -> Array:
        return values.to(torch.float16)

    def single(self, values: Array) -> Array:
        return values.to(torch.float32)

    def max_abs(self, values: Array) -> Array:
        return values.abs().amax() if values.numel() else values.new_zeros(())

    def all_finite(self, values: Array) -> Array:
        # One pass and no temporary of the gradient's size: a norm is finite unless an element is not or it overflows,
        # and only then is it worth looking closely.
        if bool(torch.isfinite(torch.linalg.vector_norm(values))):
            return torch.ones((), dtype=torch.bool)
        return torch.isfinite(values).all()

    def checksum(self, values: Array) -> Array:
        return values.contiguous().view(torch.int32).sum(dtype=torch.int64)
