"""A rank's metadata in the graph: times, norms, checksums; and the bandwidth probe, which the next step reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvdplus.adapters.tensorflow import private, tensors
from hvdplus.adapters.tensorflow.bucket import Exchanged
from hvdplus.adapters.tensorflow.timing import timed
from hvdplus.adapters.tensorflow.variables import Coming
from hvdplus.exchange.metadata import Slot, Sums, hash_flags

if TYPE_CHECKING:
    from hvdplus.adapters.tensorflow.graph import GraphExchange


def metadata(
    x: GraphExchange,
    coming: Coming,
    parts: Sequence[Exchanged],
    loss: Any,
    rate: Any,
    norms: tuple[tf.Tensor, tf.Tensor],
    weights: tf.Tensor,
    absent: Sequence[bool],
) -> tf.Tensor:
    """This rank's metadata tensor, laid out as ``metadata.pack`` does, with no flags.

    Args:
        norms: see ``norms``; weights: see ``weights``.
        absent: which variables have no gradient, on no rank.
    """
    times = Coming(*(tf.cast(value, tf.float32) for value in coming))
    loss = tensors.number(math.nan if loss is None else loss)
    unknown = tf.math.is_nan(loss)
    checksum = tf.add_n([part.checksum for part in parts] or [tf.constant(0, tf.int64)])
    sums = Sums(
        nonfinite=tf.where(tf.reduce_all([part.finite for part in parts] or [True]), 0.0, 1.0),
        overflow=tf.where(tf.reduce_any([part.overflow for part in parts] or [False]), 1.0, 0.0),
        step=times.step,
        loss=tf.where(unknown, 0.0, loss),
        losses=tf.where(unknown, 0.0, 1.0),
    )
    slot = Slot(
        times.codec,
        times.exposed_comm,
        times.comm,
        times.input_wait,
        times.probe,
        norms[0],
        norms[1],
        tensors.number(rate),
        contexts=tensors.fold24(checksum),
        weights=tensors.fold24(tensors.weighed(weights)),
        missing=tf.constant(hash_flags(absent)),
        added=tf.constant(0.0),
    )
    rank, size = x.transport.rank, x.transport.size
    before, after = (tf.zeros(ranks * len(slot)) for ranks in (rank, size - 1 - rank))
    return tf.concat([tf.stack(list(sums)), before, tf.stack(list(slot)), after], axis=0)


def norms(
    x: GraphExchange, coming: Coming, variant: tf.Tensor, dense: Sequence[tf.Tensor], parts: Sequence[Exchanged]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Norms of this rank's gradients and of its next residual, in steps that measure them; else zeros."""
    keeps = tf.constant([x.ladder.compressors[each.level].keeps_residual for each in x.ladder.variants])

    def measured() -> tuple[tf.Tensor, tf.Tensor]:
        left = tf.linalg.global_norm([part.left for part in parts])
        gradient = tf.linalg.global_norm([tf.cast(grad, tf.float32) for grad in dense])
        return gradient, tf.where(tf.gather(keeps, variant), left, 0.0)

    nothing = tf.constant(0.0), tf.constant(0.0)
    return tf.cond(coming.measure_norms > 0, measured, lambda: nothing) if parts else nothing


def weights(x: GraphExchange, coming: Coming) -> tf.Tensor:
    """A checksum of every variable (int64, one-dimensional), in steps that compare them; else none."""
    variables, nothing = x.variables(), tf.zeros(0, tf.int64)
    if x.transport.size == 1 or not variables or not x.settings.weights_check_steps:
        return nothing

    def checksums() -> tf.Tensor:
        return tf.stack([tensors.checksum(variable) for variable in variables])

    return tf.cond(coming.check_weights > 0, checksums, lambda: nothing)


def probe(x: GraphExchange, coming: Coming, done: Sequence[tf.Tensor]) -> tf.Tensor:
    """Seconds that a sum takes once all others are ``done``; 0 where the plan asks for none."""

    def run() -> tf.Tensor:
        with tf.control_dependencies(done):
            zeros, began = timed(tf.zeros([tf.cast(coming.probe_bytes, tf.int32) // 4]))
        total = x.sum(zeros, f"{x.prefix}.probe")
        # A sum whose value nobody uses would be optimized away.
        return private.timestamp([total]) - began + tf.cast(total[0], tf.float64)

    nothing = tf.constant(0.0, tf.float64)
    return nothing if x.transport.size == 1 else tf.cond(coming.probe_bytes > 0, run, lambda: nothing)
