"""``Ops`` in NumPy, in the plainest words there are: this is the reference."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from hvdplus.compression.hashing import WEYL, scramble
from hvdplus.compression.ops import HALF_LIMIT, Halves, Packed, Packing, Piece, Product, Rows

Array = Any


class NumpyOps:
    """See ``hvdplus.compression.ops.Ops`` for what each method promises."""

    def from_numpy(self, values: np.ndarray) -> Array:
        return np.array(values)

    def constant(self, key: Hashable, make: Callable[[], np.ndarray]) -> Array:
        return make()

    def to_numpy(self, values: Array) -> np.ndarray:
        return np.array(values)

    def reshape(self, values: Array, shape: tuple[int, ...]) -> Array:
        return values.reshape(shape)

    def concat(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(list(parts)) if parts else np.zeros(0, np.float32)

    def assemble(self, pieces: Sequence[Piece], scale: float = 1.0) -> Array:
        whole = self.concat([self._dense(piece) for piece in pieces])
        return whole if scale == 1 else whole * np.float32(scale)

    def subtract(self, values: Array, pieces: Sequence[Piece]) -> Array:
        return values - self.assemble(pieces)

    def matmul(self, a: Array, b: Array, transpose_a: bool = False) -> Array:
        return np.matmul(a.swapaxes(-1, -2) if transpose_a else a, b)

    def orthonormal(self, columns: Array) -> Array:
        q, r = np.linalg.qr(columns)
        signs = np.where(np.diagonal(r, axis1=-2, axis2=-1) < 0, -1.0, 1.0).astype(columns.dtype)
        return q * signs[..., None, :]

    def largest(self, batch: Array) -> Array:
        return np.max(np.abs(batch), axis=(1, 2), keepdims=True)

    def half(self, parts: Sequence[Array], factor: float, saturate: bool = False) -> Array:
        values = self.concat(parts)
        if saturate:
            values = np.clip(values, -np.float32(HALF_LIMIT), np.float32(HALF_LIMIT)) + values * np.float32(0)
        with np.errstate(over="ignore"):
            return values.astype(np.float16) * np.float16(factor)

    def rms(self, values: Array) -> Array:
        wide = values.astype(np.float64)
        return np.sqrt(np.square(wide).sum() / max(1, wide.size)).astype(np.float32)

    def row_rms(self, matrix: Array, other: Array | None = None, factor: float = 1.0) -> Array:
        whole = matrix if other is None else matrix + other * np.float32(factor)
        return np.sqrt(np.square(whole.astype(np.float64)).sum(axis=1) / max(1, whole.shape[1])).astype(np.float32)

    def top(self, values: Array, count: int) -> Array:
        return np.sort(np.argsort(-values, kind="stable")[:count]).astype(np.int32)

    def take_rows(self, matrix: Array, rows: Array) -> Array:
        return matrix[rows]

    def put_values(self, values: Array, places: Array, new: Array) -> Array:
        changed = values.copy()
        changed[places] = new
        return changed

    def log2(self, values: Array) -> Array:
        return np.log2(values)

    def power_of_two(self, exponent: Array) -> Array:
        return ((np.maximum(exponent, -127) + np.int32(127)) << np.int32(23)).astype(np.int32).view(np.float32)

    def integers(self, values: Array, bits: int = 32) -> Array:
        with np.errstate(invalid="ignore"):
            return np.rint(values).astype(np.int32 if bits == 32 else np.int64)

    def scramble(self, values: Array) -> Array:
        return scramble(values)

    def pack(
        self,
        values: Array,
        exponent: Array,
        levels: int,
        bits: int,
        word: int,
        noise: Array | None = None,
        left_exponent: Array | None = None,
    ) -> Packing:
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = values * _inverse(exponent, self)
            if noise is not None:
                places = np.arange(values.size, dtype=np.int32)
                drawn = scramble((places * np.int32(WEYL) + noise) ^ np.ascontiguousarray(values).view(np.int32))
                scaled = np.floor(
                    scaled + (drawn.view(np.uint32) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
                )
            else:
                scaled = np.rint(scaled)
            clipped = np.count_nonzero(np.abs(scaled) > levels)
            lanes = word // bits
            dtype = np.int32 if word == 32 else np.int64
            scaled = np.clip(scaled, -np.float32(levels), np.float32(levels))
            left = None if left_exponent is None else values - scaled * self.power_of_two(left_exponent)
            rounded = np.zeros(-(-values.size // lanes) * lanes, dtype)
            rounded[: values.size] = scaled
        table = rounded.reshape(-1, lanes) if bits in (8, 16) else rounded.reshape(lanes, -1).T
        words = (table << (bits * np.arange(lanes, dtype=dtype))).sum(axis=1, dtype=dtype)
        largest = np.max(np.abs(values), initial=0).astype(np.float32)
        return Packing(words, np.int32(clipped), self.rms(values), left, largest)

    def all_finite(self, values: Array) -> Array:
        return np.isfinite(values).all()

    def checksum(self, values: Array) -> Array:
        return np.ascontiguousarray(values).view(np.int32).sum(dtype=np.int64)

    def _dense(self, piece: Piece) -> Array:
        """The piece as a 1-D float32 array."""
        if isinstance(piece, Product):
            return (piece.left @ piece.right.T).reshape(-1)
        if isinstance(piece, Rows):
            matrix = np.zeros((piece.height, piece.values.shape[1]), np.float32)
            matrix[piece.rows] = piece.values
            return matrix.reshape(-1)
        if isinstance(piece, Packed):
            return self._unpacked(piece) * self.power_of_two(piece.exponent)
        if isinstance(piece, Halves):
            return piece.values.astype(np.float32) * np.float32(piece.factor)
        return piece

    def _unpacked(self, piece: Packed) -> Array:
        lanes, rest = 8 * piece.words.itemsize // piece.bits, piece.words
        unpacked = np.zeros((rest.size, lanes), np.float32)
        unused = 8 * piece.words.itemsize - piece.bits
        for lane in range(lanes):
            lowest = rest << unused >> unused  # the lane's bits, with its sign
            unpacked[:, lane] = lowest
            rest = (rest - lowest) >> piece.bits
        return (unpacked if piece.bits in (8, 16) else unpacked.T).reshape(-1)[: piece.length]


def _inverse(exponent: Array, ops: NumpyOps) -> Array:
    return np.where(exponent > -127, ops.power_of_two(-exponent), np.float32(0))
