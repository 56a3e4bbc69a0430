"""The array operations that compressors are written in.

A compressor never imports a framework; it is handed an ``Ops``. NumPy (``hvdplus.adapters.numpy``) is the
reference, torch and TensorFlow are held against it. Keep this surface tiny: every method here is written once
per framework. Plain arithmetic, comparison and slicing of arrays (``a + b``, ``a * 2.0``, ``a[i:j]``) is common
to all of them and needs no method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Array = Any
"""An array of the framework in use (``numpy.ndarray``, ``torch.Tensor``, ``tf.Tensor``)."""


class Ops(Protocol):
    """What a compressor may ask of a framework. All arrays are float32 unless stated."""

    def from_numpy(self, values: np.ndarray) -> Array:
        """Copy a NumPy array to the framework, bit for bit, same shape and dtype."""

    def to_numpy(self, values: Array) -> np.ndarray:
        """Copy an array to NumPy, bit for bit, same shape and dtype."""

    def reshape(self, values: Array, shape: tuple[int, ...]) -> Array:
        """The same elements in row-major order under another shape; no copy where the framework can avoid it."""

    def concat(self, parts: Sequence[Array]) -> Array:
        """Join 1-D arrays end to end."""

    def matmul(self, a: Array, b: Array, transpose_a: bool = False, transpose_b: bool = False) -> Array:
        """Matrix product of two 2-D arrays, either of them transposed first."""

    def orthonormal(self, columns: Array) -> Array:
        """Orthonormal basis of the columns of an (n, r) array, n >= r, by Householder QR with R's diagonal >= 0.

        The sign convention makes the result unique for full rank, so that frameworks agree. Rank-deficient and
        zero input yields an orthonormal basis that contains the column space. Scale the columns to a largest
        magnitude of about 1 first: tiny ones, whose squares underflow, may be taken for zeros.
        """

    def half(self, values: Array) -> Array:
        """Cast to float16, rounding to nearest even; beyond 65504 becomes infinite."""

    def single(self, values: Array) -> Array:
        """Cast to float32."""

    def max_abs(self, values: Array) -> Array:
        """Largest magnitude as a 0-d array; 0 for an empty array."""

    def all_finite(self, values: Array) -> Array:
        """0-d boolean array: no element is NaN or infinite."""

    def checksum(self, values: Array) -> Array:
        """Sum of the elements' 32-bit patterns as signed integers, as a 0-d int64 array (wrapping)."""
