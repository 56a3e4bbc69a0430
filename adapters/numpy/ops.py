"""``Ops`` in NumPy, in its plainest form: the reference for every framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from hvdplus.compression.hashing import WEYL, scramble
from hvdplus.compression.ops import HALF_LIMIT, Halves, Packed, Packing, Piece, Product, Rows


class NumpyOps:
    """See ``hvdplus.compression.ops.Ops`` for what each method promises."""

    def from_numpy(self, values: np.ndarray) -> np.ndarray:
        return np.array(values)

    def constant(self, key: Hashable, make: Callable[[], np.ndarray]) -> np.ndarray:
        return make()

    def to_numpy(self, values: np.ndarray) -> np.ndarray:
        return np.array(values)

    def reshape(self, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return values.reshape(shape)

    def concat(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(list(parts)) if parts else np.zeros(0, np.float32)

    def assemble(self, pieces: Sequence[Piece[np.ndarray]], scale: float = 1.0) -> np.ndarray:
        whole = self.concat([self._dense(piece) for piece in pieces])
        return whole if scale == 1 else whole * np.promote_types(whole.dtype, np.float32).type(scale)

    def assemble_into(self, pieces: Sequence[Piece[np.ndarray]], scale: float, parts: Sequence[np.ndarray]) -> bool:
        ends = np.cumsum([len(part) for part in parts])
        for part, values in zip(parts, np.split(self.assemble(pieces, scale), ends), strict=False):
            part[:] = values
        return True

    def subtract(self, values: np.ndarray, pieces: Sequence[Piece[np.ndarray]]) -> np.ndarray:
        return values - self.assemble(pieces)

    def matmul(self, a: np.ndarray, b: np.ndarray, transpose_a: bool = False) -> np.ndarray:
        return np.matmul(a.swapaxes(-1, -2) if transpose_a else a, b)

    def project(
        self, bucket: np.ndarray, start: int, shape: tuple[int, int], basis: np.ndarray, transpose: bool = False
    ) -> np.ndarray:
        return self.matmul(bucket[start : start + math.prod(shape)].reshape(shape), basis, transpose)

    def orthonormal(self, columns: np.ndarray) -> np.ndarray:
        q, r = np.linalg.qr(columns)
        signs = np.where(np.diagonal(r, axis1=-2, axis2=-1) < 0, -1.0, 1.0).astype(columns.dtype)
        return q * signs[..., None, :]

    def largest(self, batch: np.ndarray) -> np.ndarray:
        return np.max(np.abs(batch), axis=(1, 2), keepdims=True)

    def half(self, parts: Sequence[np.ndarray], factor: float, saturate: bool = False) -> np.ndarray:
        values = self.concat(parts)
        if saturate:
            values = np.clip(values, -np.float32(HALF_LIMIT), np.float32(HALF_LIMIT)) + values * np.float32(0)
        with np.errstate(over="ignore"):
            return values.astype(np.float16) * np.float16(factor)

    def rms(self, values: np.ndarray) -> np.ndarray:
        wide = values.astype(np.float64)
        return np.sqrt(np.square(wide).sum() / max(1, wide.size)).astype(np.float32)

    def row_rms(self, matrix: np.ndarray, other: np.ndarray | None = None, factor: float = 1.0) -> np.ndarray:
        whole = matrix if other is None else matrix + other * np.float32(factor)
        return np.sqrt(np.square(whole.astype(np.float64)).sum(axis=1) / max(1, whole.shape[1])).astype(np.float32)

    def top(self, values: np.ndarray, count: int) -> np.ndarray:
        values = np.where(np.isnan(values), np.inf, values)
        return np.sort(np.argsort(-values, kind="stable")[:count]).astype(np.int32)

    def take_rows(self, matrix: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return matrix[rows]

    def put_values(self, values: np.ndarray, places: np.ndarray, new: np.ndarray) -> np.ndarray:
        changed = values.copy()
        changed[places] = new
        return changed

    def log2(self, values: np.ndarray) -> np.ndarray:
        return np.log2(values)

    def power_of_two(self, exponent: np.ndarray) -> np.ndarray:
        return ((np.maximum(exponent, -127) + np.int32(127)) << np.int32(23)).astype(np.int32).view(np.float32)

    def integers(self, values: np.ndarray, bits: int = 32) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return np.rint(values).astype(np.int32 if bits == 32 else np.int64)

    def floats(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(values, np.float32)

    def scramble(self, values: np.ndarray) -> np.ndarray:
        return scramble(values)

    def pack(
        self,
        values: np.ndarray,
        exponent: np.ndarray,
        levels: int,
        bits: int,
        word: int,
        noise: np.ndarray | None = None,
        left_exponent: np.ndarray | None = None,
        runs: tuple[int, ...] = (),
    ) -> Packing[np.ndarray]:
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = values * _each(_inverse(exponent, self), runs)
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
            left = None if left_exponent is None else values - scaled * _each(self.power_of_two(left_exponent), runs)
            rounded: np.ndarray = np.zeros(-(-values.size // lanes) * lanes, dtype)
            rounded[: values.size] = scaled
        table = rounded.reshape(-1, lanes) if bits in (8, 16) else rounded.reshape(lanes, -1).T
        words = (table << (bits * np.arange(lanes, dtype=dtype))).sum(axis=1, dtype=dtype)
        largest = np.max(np.abs(values), initial=0).astype(np.float32)
        rms = np.array([self.rms(run) for run in np.split(values, np.cumsum(runs)[:-1])]) if runs else self.rms(values)
        return Packing(words, np.int32(clipped), rms, left, largest)

    def all_finite(self, values: np.ndarray) -> np.ndarray:
        return np.isfinite(values).all()

    def checksum(self, values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values).view(np.int32).sum(dtype=np.int64)

    def _dense(self, piece: Piece[np.ndarray]) -> np.ndarray:
        """The piece as a 1-D float32 array."""
        if isinstance(piece, Product):
            return (piece.left @ piece.right.T).reshape(-1)
        if isinstance(piece, Rows):
            matrix = np.zeros((piece.height, piece.values.shape[1]), np.float32)
            matrix[piece.rows] = piece.values
            return matrix.reshape(-1)
        if isinstance(piece, Packed):
            return self._unpacked(piece) * _each(self.power_of_two(piece.exponent), piece.runs)
        if isinstance(piece, Halves):
            return piece.values.astype(np.float32) * np.float32(piece.factor)
        return piece

    def _unpacked(self, piece: Packed[np.ndarray]) -> np.ndarray:
        lanes, rest = 8 * piece.words.itemsize // piece.bits, piece.words
        unpacked = np.zeros((rest.size, lanes), np.float32)
        unused = 8 * piece.words.itemsize - piece.bits
        for lane in range(lanes):
            lowest = rest << unused >> unused  # the lane's bits, with its sign
            unpacked[:, lane] = lowest
            rest = (rest - lowest) >> piece.bits
        return (unpacked if piece.bits in (8, 16) else unpacked.T).reshape(-1)[: piece.length]


def _inverse(exponent: np.ndarray, ops: NumpyOps) -> np.ndarray:
    return np.where(exponent > -127, ops.power_of_two(-exponent), np.float32(0))


def _each(factors: np.ndarray, runs: tuple[int, ...]) -> np.ndarray:
    """A factor a run as one an element; without runs, as it is."""
    return np.repeat(factors, runs) if runs else factors
