"""``Ops`` in TensorFlow, eager and inside compiled graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Array = Any


class TensorFlowOps:
    """See ``hvdplus.compression.ops.Ops`` for what each method promises."""

    def from_numpy(self, values: np.ndarray) -> Array:
        return tf.constant(values)

    def to_numpy(self, values: Array) -> np.ndarray:
        return np.array(values)

    def reshape(self, values: Array, shape: tuple[int, ...]) -> Array:
        return tf.reshape(values, shape)

    def concat(self, parts: Sequence[Array]) -> Array:
        if len(parts) == 1:
            return tf.identity(parts[0])
        return tf.concat(list(parts), axis=0) if parts else tf.zeros(0)

    def matmul(self, a: Array, b: Array, transpose_a: bool = False, transpose_b: bool = False) -> Array:
        return tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)

    def orthonormal(self, columns: Array) -> Array:
        q, r = tf.linalg.qr(columns)
        return q * tf.where(tf.linalg.diag_part(r) < 0, -1.0, 1.0)

    def half(self, values: Array) -> Array:
        return tf.cast(values, tf.float16)

    def single(self, values: Array) -> Array:
        return tf.cast(values, tf.float32)

    def max_abs(self, values: Array) -> Array:
        return tf.maximum(tf.reduce_max(tf.abs(values)), 0)  # the maximum of nothing is minus infinity

    def all_finite(self, values: Array) -> Array:
        return tf.reduce_all(tf.math.is_finite(values))

    def checksum(self, values: Array) -> Array:
        return tf.reduce_sum(tf.cast(tf.bitcast(values, tf.int32), tf.int64))
