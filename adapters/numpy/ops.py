"""``Ops`` in NumPy, in the plainest words there are: this is the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = Any


class NumpyOps:
    """See ``hvdplus.compression.ops.Ops`` for what each method promises."""

    def from_numpy(self, values: np.ndarray) -> Array:
        return np.array(values)

    def to_numpy(self, values: Array) -> np.ndarray:
        return np.array(values)

    def reshape(self, values: Array, shape: tuple[int, ...]) -> Array:
        return values.reshape(shape)

    def concat(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(list(parts)) if parts else np.zeros(0, np.float32)

    def matmul(self, a: Array, b: Array, transpose_a: bool = False, transpose_b: bool = False) -> Array:
        return np.matmul(a.T if transpose_a else a, b.T if transpose_b else b)

    def orthonormal(self, columns: Array) -> Array:
        q, r = np.linalg.qr(columns)
        return q * np.where(np.diag(r) < 0, -1.0, 1.0).astype(columns.dtype)

    def half(self, values: Array) -> Array:
        with np.errstate(over="ignore"):
            return values.astype(np.float16)

    def single(self, values: Array) -> Array:
        return values.astype(np.float32)

    def max_abs(self, values: Array) -> Array:
        return np.max(np.abs(values), initial=np.float32(0))

    def all_finite(self, values: Array) -> Array:
        return np.isfinite(values).all()

    def checksum(self, values: Array) -> Array:
        return np.ascontiguousarray(values).view(np.int32).sum(dtype=np.int64)
