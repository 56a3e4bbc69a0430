"""``Ops`` in TensorFlow, eager and inside compiled graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import tensorflow as tf

from hvdplus.compression.hashing import SCRAMBLE, WEYL
from hvdplus.compression.ops import HALF_LIMIT, Halves, Packed, Packing, Piece, Product, Rows, sign_bits

BYTES = {8: tf.int8, 16: tf.int16}
"""Lanes that are a type of their own."""


class TensorFlowOps:
    """See ``hvdplus.compression.ops.Ops`` for what each method promises."""

    def from_numpy(self, values: np.ndarray) -> tf.Tensor:
        return tf.constant(values)

    def constant(self, key: Hashable, make: Callable[[], np.ndarray]) -> tf.Tensor:
        return self.from_numpy(make())  # it belongs to the graph that is being traced, where it is stored once

    def to_numpy(self, values: tf.Tensor) -> np.ndarray:
        return np.array(values)

    def reshape(self, values: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
        return tf.reshape(values, shape)

    def concat(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        if len(parts) == 1:
            return tf.identity(parts[0])
        return tf.concat(list(parts), axis=0) if parts else tf.zeros(0)

    def assemble(self, pieces: Sequence[Piece[tf.Tensor]], scale: float = 1.0) -> tf.Tensor:
        whole = self.concat([self._dense(piece) for piece in pieces])
        return whole if scale == 1 else whole * scale

    def assemble_into(self, pieces: Sequence[Piece[tf.Tensor]], scale: float, parts: Sequence[tf.Tensor]) -> bool:
        return False

    def subtract(self, values: tf.Tensor, pieces: Sequence[Piece[tf.Tensor]]) -> tf.Tensor:
        if not any(isinstance(piece, Rows) for piece in pieces):
            return values - self.assemble(pieces)
        # Only the rows that are sent change: no dense copy of them is made.
        left, start = [], 0
        for piece in pieces:
            if isinstance(piece, Rows):
                width = int(piece.values.shape[1])
                part = tf.reshape(values[start : start + piece.height * width], (piece.height, width))
                left.append(tf.reshape(tf.tensor_scatter_nd_sub(part, piece.rows[:, None], piece.values), [-1]))
            else:
                dense = self._dense(piece)
                left.append(values[start : start + int(dense.shape[0])] - dense)
            start += int(left[-1].shape[0])
        return self.concat(left)

    def matmul(self, a: tf.Tensor, b: tf.Tensor, transpose_a: bool = False) -> tf.Tensor:
        return tf.matmul(a, b, transpose_a=transpose_a)

    def project(
        self, bucket: tf.Tensor, start: int, shape: tuple[int, int], basis: tf.Tensor, transpose: bool = False
    ) -> tf.Tensor:
        return self.matmul(tf.reshape(bucket[start : start + math.prod(shape)], shape), basis, transpose)

    def orthonormal(self, columns: tf.Tensor) -> tf.Tensor:
        q, r = tf.linalg.qr(columns)
        return q * tf.where(tf.linalg.diag_part(r) < 0, -1.0, 1.0)[..., None, :]

    def largest(self, batch: tf.Tensor) -> tf.Tensor:
        return tf.reduce_max(tf.abs(batch), axis=(1, 2), keepdims=True)

    def half(self, parts: Sequence[tf.Tensor], factor: float, saturate: bool = False) -> tf.Tensor:
        values = self.concat(parts)
        if saturate:
            values = tf.clip_by_value(values, -HALF_LIMIT, HALF_LIMIT) + values * 0.0
        return tf.cast(values, tf.float16) * tf.constant(factor, tf.float16)

    def rms(self, values: tf.Tensor) -> tf.Tensor:
        return self._rms(values, self._largest(values))

    def _largest(self, values: tf.Tensor) -> tf.Tensor:
        return tf.maximum(tf.reduce_max(tf.abs(values)), 0)  # the maximum of nothing is minus infinity

    def _rms(self, values: tf.Tensor, largest: tf.Tensor) -> tf.Tensor:
        # In units of the largest, so that no square leaves float32.
        unit = tf.maximum(largest, 2.0**-126)
        mean = tf.reduce_sum(tf.square(values / unit)) / max(1, int(values.shape[0]))
        return tf.sqrt(mean) * unit

    def row_rms(self, matrix: tf.Tensor, other: tf.Tensor | None = None, factor: float = 1.0) -> tf.Tensor:
        whole = matrix if other is None else matrix + other * factor
        largest = tf.reduce_max(tf.abs(whole), axis=1, keepdims=True)
        unit = tf.maximum(largest, 2.0**-126)
        return tf.sqrt(tf.reduce_mean(tf.square(whole / unit), axis=1)) * unit[:, 0]

    def top(self, values: tf.Tensor, count: int) -> tf.Tensor:
        values = tf.where(tf.math.is_nan(values), tf.constant(np.inf, values.dtype), values)
        return tf.sort(tf.math.top_k(values, count, sorted=False).indices)

    def take_rows(self, matrix: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        return tf.gather(matrix, rows)

    def put_values(self, values: tf.Tensor, places: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
        return tf.tensor_scatter_nd_update(values, places[:, None], new)

    def log2(self, values: tf.Tensor) -> tf.Tensor:
        return tf.math.log(values) / float(np.log(2.0))

    def power_of_two(self, exponent: tf.Tensor) -> tf.Tensor:
        return tf.bitcast(tf.bitwise.left_shift(tf.maximum(exponent, -127) + 127, 23), tf.float32)

    def integers(self, values: tf.Tensor, bits: int = 32) -> tf.Tensor:
        values = tf.round(values) if values.dtype.is_floating else values
        return tf.cast(values, tf.int32 if bits == 32 else tf.int64)

    def floats(self, values: tf.Tensor) -> tf.Tensor:
        return tf.cast(values, tf.float32)

    def scramble(self, values: tf.Tensor) -> tf.Tensor:
        values = tf.bitcast(values, tf.uint32)
        for shift, factor in SCRAMBLE:
            values = tf.bitwise.bitwise_xor(values, tf.bitwise.right_shift(values, tf.constant(shift, tf.uint32)))
            values = values * tf.constant(factor, tf.uint32)
        return tf.bitcast(values, tf.int32)

    def pack(
        self,
        values: tf.Tensor,
        exponent: tf.Tensor,
        levels: int,
        bits: int,
        word: int,
        noise: tf.Tensor | None = None,
        left_exponent: tf.Tensor | None = None,
        runs: tuple[int, ...] = (),
    ) -> Packing[tf.Tensor]:
        dtype, lanes, count = tf.int32 if word == 32 else tf.int64, word // bits, int(values.shape[0])
        parts = tf.split(values, runs) if runs else [values]
        highest = [self._largest(part) for part in parts]
        norms = [self._rms(part, most) for part, most in zip(parts, highest, strict=True)]
        rms, largest = (tf.stack(norms), tf.reduce_max(tf.stack(highest))) if runs else (norms[0], highest[0])
        scaled = _times(values, tf.where(exponent > -127, self.power_of_two(-exponent), 0.0), runs)
        if noise is not None:
            drawn = self.scramble((tf.range(count) * WEYL + noise) ^ tf.bitcast(values, tf.int32))
            unsigned = tf.bitwise.right_shift(tf.bitcast(drawn, tf.uint32), tf.constant(8, tf.uint32))
            scaled = tf.floor(scaled + tf.cast(unsigned, tf.float32) * 2.0**-24)
        else:
            scaled = tf.round(scaled)
        clipped = tf.math.count_nonzero(tf.abs(scaled) > levels, dtype=tf.int32)
        scaled = tf.clip_by_value(scaled, -float(levels), float(levels))
        left = None if left_exponent is None else values - _times(scaled, self.power_of_two(left_exponent), runs)
        scaled = tf.pad(scaled, [[0, -count % lanes]])
        if bits in BYTES:
            signs = tf.constant(sign_bits(bits, word), dtype)
            numbers = tf.bitcast(tf.reshape(tf.cast(scaled, BYTES[bits]), (-1, lanes)), dtype)
            return Packing(tf.bitwise.bitwise_xor(numbers, signs) - signs, clipped, rms, left, largest)
        numbers = tf.reshape(tf.cast(scaled, dtype), (lanes, -1))
        shifts = tf.constant(bits * np.arange(lanes)[:, None], dtype)
        return Packing(tf.reduce_sum(tf.bitwise.left_shift(numbers, shifts), axis=0), clipped, rms, left, largest)

    def all_finite(self, values: tf.Tensor) -> tf.Tensor:
        return tf.reduce_all(tf.math.is_finite(values)) if values.dtype.is_floating else tf.constant(True)

    def checksum(self, values: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.cast(tf.bitcast(values, tf.int32), tf.int64))

    def _dense(self, piece: Piece[tf.Tensor]) -> tf.Tensor:
        """The piece as a 1-D float32 array."""
        if isinstance(piece, Product):
            return tf.reshape(tf.matmul(piece.left, piece.right, transpose_b=True), [-1])
        if isinstance(piece, Rows):
            shape = (piece.height, int(piece.values.shape[1]))
            return tf.reshape(tf.scatter_nd(piece.rows[:, None], piece.values, shape), [-1])
        if isinstance(piece, Packed):
            return _times(self._unpacked(piece), self.power_of_two(piece.exponent), piece.runs)
        if isinstance(piece, Halves):
            return tf.cast(piece.values, tf.float32) * piece.factor
        return piece

    def _unpacked(self, piece: Packed[tf.Tensor]) -> tf.Tensor:
        dtype, bits = piece.words.dtype, piece.bits
        word = 8 * dtype.size
        if bits in BYTES:
            signs = tf.constant(sign_bits(bits, word), dtype)
            numbers = tf.bitcast(tf.bitwise.bitwise_xor(piece.words + signs, signs), BYTES[bits])
            return tf.cast(tf.reshape(numbers, [-1]), tf.float32)[: piece.length]
        rest, numbers = piece.words, []
        unused = tf.constant(word - bits, dtype)
        for _ in range(word // bits):
            lowest = tf.bitwise.right_shift(tf.bitwise.left_shift(rest, unused), unused)  # with its sign
            numbers.append(tf.cast(lowest, tf.float32))
            rest = tf.bitwise.right_shift(rest - lowest, tf.constant(min(bits, word - 1), dtype))
        return tf.concat(numbers, axis=0)[: piece.length]


def _times(values: tf.Tensor, factors: tf.Tensor, runs: tuple[int, ...]) -> tf.Tensor:
    """Every run times its factor; without runs, all times the one there is. (``tf.repeat`` would fill a table of as
    many rows as there are runs, each as long as the longest.)"""
    if not runs:
        return values * factors
    return tf.concat([part * factors[number] for number, part in enumerate(tf.split(values, runs))], axis=0)
