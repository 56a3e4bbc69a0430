"""Sparse gradients (IndexedSlices): the rows that any rank used, agreed on and added up, exact.

The ranks first add up a mask of a few bits a row, which tells each of them the union of all rows; then, if the union is
small, the union's rows, in one order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdplus.adapters.tensorflow.ops import TensorFlowOps
from hvdplus.compression.integer import fewest_bits
from hvdplus.compression.ops import Packed

WORD = 32

Sum = Callable[[tf.Tensor, str], tf.Tensor]
"""(this rank's array, name) -> the sum over all ranks."""


def union_of_rows(ops: TensorFlowOps, grad: Any, height: int, ranks: int, add: Sum, name: str) -> tf.Tensor:
    """Rows (int64, ascending) that a rank used; the same on all ranks.

    Args:
        grad: this rank's gradient, IndexedSlices or dense; (height, ...).
    """
    if isinstance(grad, tf.IndexedSlices):
        places = tf.cast(grad.indices, tf.int64)[:, None]
    else:
        places = tf.where(tf.reduce_any(tf.reshape(grad, (height, -1)) != 0, axis=1))
    mask = tf.tensor_scatter_nd_update(tf.zeros(height), places, tf.ones(tf.shape(places)[0]))
    one, bits = tf.zeros(1, tf.int32), fewest_bits(ranks)
    total = add(ops.pack(mask, one, 1, bits, WORD).words, name)
    return tf.where(ops.assemble([Packed(total, one, bits, height)]) > 0)[:, 0]


def mask_bytes(height: int, ranks: int) -> int:
    """What the mask takes."""
    lanes = WORD // fewest_bits(ranks)
    return -(-height // lanes) * WORD // 8


def sum_of_rows(flat: tf.Tensor, union: tf.Tensor, height: int, add: Sum, name: str) -> tuple[tf.Tensor, tf.Tensor]:
    """(sum over all ranks of a gradient that is zero outside ``union``, bytes that this rank sent).

    Args:
        flat: this rank's gradient, 1-D.
    """
    width = int(flat.shape[0]) // height
    count = tf.shape(union)[0]
    # A new length is negotiated anew: round it up by an eighth at most, so that few lengths occur.
    octave = tf.cast(tf.math.log(tf.cast(tf.maximum(count, 1), tf.float32) + 0.5) / tf.math.log(2.0), tf.int32)
    step = tf.bitwise.left_shift(1, tf.maximum(octave - 3, 0))
    padding = -count % step
    values = tf.pad(tf.gather(tf.reshape(flat, (height, width)), union), [[0, padding], [0, 0]])
    total = tf.reshape(add(tf.reshape(values, [-1]), name), (-1, width))[:count]
    summed = tf.scatter_nd(union[:, None], total, tf.constant((height, width), tf.int64))
    return tf.reshape(summed, [-1]), tf.size(values) * flat.dtype.size
