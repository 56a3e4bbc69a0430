"""Small functions of tensors that the compiled exchange is made of; nothing here has an effect."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdplus.exchange.bucket import Bucket

SAMPLES = 16
"""Elements of a variable that a fingerprint looks at; up to twice as many where the size is no multiple."""
_BITS = {2: tf.int16, 4: tf.int32, 8: tf.int64}
_ODD = 0x1E3779B97F4A7C15
"""Factors of checksums are its odd multiples, so that every bit counts."""


def flat(arrays: Sequence[Any]) -> tf.Tensor:
    """Arrays of 32-bit elements, end to end, as one float32 vector of the same bits."""
    parts = [tf.bitcast(tf.reshape(array, [-1]), tf.float32) for array in arrays]
    return tf.concat(parts, axis=0) if parts else tf.zeros(0)


def packed(bucket: Bucket, grads: Sequence[tf.Tensor]) -> tf.Tensor:
    """A bucket's gradients, end to end, in the bucket's type; 1-D."""
    parts = [tf.reshape(tf.cast(grads[i], bucket.dtype), [-1]) for i in bucket.parameters]
    return tf.concat(parts, axis=0) if len(parts) > 1 else parts[0]


def parts_of(vector: tf.Tensor, bucket: Bucket) -> list[tf.Tensor]:
    """The opposite of ``packed``: a tensor for every parameter of the bucket."""
    # Slices, because tf.split would copy.
    pairs = itertools.pairwise(bucket.offsets)
    return [tf.reshape(vector[a:b], shape) for (a, b), shape in zip(pairs, bucket.shapes, strict=True)]


def with_parts(new: tf.Tensor, old: tf.Tensor, bucket: Bucket, of: Sequence[bool]) -> tf.Tensor:
    """``new``, but with the parts of ``old`` for the parameters whose flag in ``of`` is true; both 1-D."""
    if not any(of[i] for i in bucket.parameters):
        return new
    pairs = zip(bucket.parameters, parts_of(old, bucket), parts_of(new, bucket), strict=True)
    return tf.concat([tf.reshape(one if of[i] else other, [-1]) for i, one, other in pairs], axis=0)


def divided(grad: Any, scale: Any) -> Any:
    """A gradient, dense or sparse, divided by ``scale``."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values / tf.cast(scale, grad.dtype), grad.indices, grad.dense_shape)
    return grad / tf.cast(scale, grad.dtype)


def number(value: Any) -> tf.Tensor:
    """``value`` as 0-d float32; None: 0."""
    return tf.constant(0.0) if value is None else tf.cast(tf.reshape(tf.convert_to_tensor(value), []), tf.float32)


def padded(count: tf.Tensor) -> tf.Tensor:
    """``sparse.padded`` of a 0-d int32 of at least 0, by integers alone."""
    bits = tf.reduce_sum(tf.cast(count >= tf.constant([1 << bit for bit in range(31)]), tf.int32))
    step = tf.bitwise.left_shift(1, tf.maximum(bits - 4, 0))
    return (count + step - 1) // step * step


def fold24(checksum: tf.Tensor) -> tf.Tensor:
    """``metadata.fold24`` of a 0-d int64, as float32."""
    folded = tf.constant(0, tf.int64)
    for shift, bits in ((0, 24), (24, 24), (48, 16)):
        part = tf.bitwise.right_shift(checksum, tf.constant(shift, tf.int64))
        folded = tf.bitwise.bitwise_xor(folded, tf.bitwise.bitwise_and(part, (1 << bits) - 1))
    return tf.cast(folded, tf.float32)


def weighed(numbers: tf.Tensor) -> tf.Tensor:
    """Sum of int64 numbers, each times another odd factor, modulo 2**64: a hash that depends on their order."""
    odd = 2 * tf.range(tf.size(numbers, tf.int64), dtype=tf.int64) + 1
    return tf.reduce_sum(numbers * (odd * tf.constant(_ODD, tf.int64)))


def checksum(variable: Any) -> tf.Tensor:
    """Sum of a variable's bits as integers, 0-d int64: of eight bytes each, and of the elements that are left over."""
    values = tf.reshape(tf.convert_to_tensor(variable), [-1])
    per_word = 8 // values.dtype.size
    words = tf.size(values) // per_word
    # Elements by themselves would have to be made wider first, which takes five times as long.
    whole = tf.reshape(values[: words * per_word], [-1, per_word] if per_word > 1 else [-1])
    return tf.reduce_sum(tf.bitcast(whole, tf.int64)) + tf.reduce_sum(_bits(values[words * per_word :]))


def fingerprint(variable: Any, *, whole: bool) -> tf.Tensor:
    """A hash, 0-d int64, that almost certainly changes when an optimizer changes the variable.

    Args:
        whole: hash all elements, because an optimizer may change few rows; else some.
    """
    values = tf.reshape(tf.convert_to_tensor(variable), [-1])
    if not whole:
        values = values[:: max(1, (values.shape[0] or 1) // SAMPLES)]
    return weighed(_bits(values))


def _bits(values: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.bitcast(values, _BITS[values.dtype.size]), tf.int64)
