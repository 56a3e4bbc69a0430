"""A rank's metadata in the graph: times, measurements of gradients, checksums; and the bandwidth probe, which the next
step reports, and the preview of levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdplus.adapters.tensorflow import private, tensors
from hvdplus.adapters.tensorflow.bucket import Exchanged
from hvdplus.adapters.tensorflow.timing import timed
from hvdplus.adapters.tensorflow.variables import Coming
from hvdplus.exchange.metadata import Slot, Sums, hash_flags
from hvdplus.exchange.sketch import CELLS, part_of, signs

if TYPE_CHECKING:
    from hvdplus.adapters.tensorflow.graph import GraphExchange


def metadata(
    x: GraphExchange,
    coming: Coming,
    parts: Sequence[Exchanged],
    loss: Any,
    rate: Any,
    measured: Measured,
    weights: tf.Tensor,
    absent: Sequence[bool],
) -> tf.Tensor:
    """This rank's metadata tensor, laid out as ``metadata.pack`` does, with no flags.

    Args:
        measured: see ``measured``; weights: see ``weights``.
        absent: which variables have no gradient, on no rank.
    """
    times = Coming(*(tf.cast(value, tf.float32) for value in coming))
    loss = tensors.number(math.nan if loss is None else loss)
    unknown = tf.math.is_nan(loss)
    checksum = tf.add_n([part.checksum for part in parts] or [tf.constant(0, tf.int64)])
    far = 0.0 if x.settings.secure_aggregation else 1.0  # what overflows stays in the residual
    sums = Sums(
        nonfinite=tf.where(tf.reduce_all([part.finite for part in parts] or [True]), 0.0, 1.0),
        overflow=tf.where(tf.reduce_any([part.overflow for part in parts] or [False]), far, 0.0),
        step=times.step,
        loss=tf.where(unknown, 0.0, loss),
        losses=tf.where(unknown, 0.0, 1.0),
        sketch_square=tf.reduce_sum(measured.sketch**2),
        sketched_square=measured.sketched_square,
        residual_sketch_square=tf.reduce_sum(measured.residual_sketch**2),
    )
    slot = Slot(
        codec=times.codec,
        exposed_comm=times.exposed_comm,
        input_wait=times.input_wait,
        probe=times.probe,
        comm=times.comm,
        gradient_norm=measured.gradient_norm,
        residual_norm=measured.residual_norm,
        learning_rate=tensors.number(rate),
        contexts=tensors.fold24(checksum),
        weights=tensors.fold24(tensors.weighed(weights)),
        missing=tf.constant(hash_flags(absent)),
        added=tf.constant(0.0),
    )
    rank, size = x.transport.rank, x.transport.size
    before, after = (tf.zeros(ranks * len(slot)) for ranks in (rank, size - 1 - rank))
    sketches = [measured.sketch, measured.residual_sketch]
    return tf.concat([tf.stack(list(sums)), *sketches, before, tf.stack(list(slot)), after], axis=0)


class Measured(NamedTuple):
    """Of this rank's gradients and of its next residual."""

    gradient_norm: tf.Tensor
    residual_norm: tf.Tensor
    sketch: tf.Tensor
    sketched_square: tf.Tensor
    residual_sketch: tf.Tensor


def measured(
    x: GraphExchange, coming: Coming, variant: tf.Tensor, dense: Sequence[tf.Tensor], parts: Sequence[Exchanged]
) -> Measured:
    """Norms and sketch, in steps that measure them; else zeros."""
    keeps = tf.constant([x.ladder.compressors[each.level].keeps_residual for each in x.ladder.variants])

    def measure() -> tuple[tf.Tensor, ...]:
        left = tf.linalg.global_norm([part.left for part in parts])
        gradient = tf.linalg.global_norm([tf.cast(grad, tf.float32) for grad in dense])
        kept = tf.cast(tf.gather(keeps, variant), tf.float32)
        held, _ = sketch(x, coming, _by_parameter(x, parts))
        return Measured(gradient, left * kept, *sketch(x, coming, dense), held * kept)

    nothing = Measured(tf.constant(0.0), tf.constant(0.0), tf.zeros(CELLS), tf.constant(0.0), tf.zeros(CELLS))
    return Measured(*tf.cond(coming.measurement > 0, measure, lambda: nothing)) if parts else nothing


def _by_parameter(x: GraphExchange, parts: Sequence[Exchanged]) -> list[tf.Tensor]:
    """The next residual of every parameter; zeros where there is none."""
    found: list[tf.Tensor] = [tf.zeros(shape) for shape in x.shapes]
    for state, part in zip(x.states, parts, strict=True):
        # These zeros where there is none. A tf.cond on the size came to the wrong side in compiled steps.
        left = tf.concat([part.left, tf.zeros(state.bucket.spec.size)], axis=0)
        for i, (place, shape) in state.places.items():
            found[i] = tf.reshape(left[place], shape)
    return found


def sketch(x: GraphExchange, coming: Coming, dense: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Of all gradients, see ``hvdplus.exchange.sketch``; the square of the norm of those that it shows."""
    all_signs, total, square = tf.constant(signs()), tf.zeros(CELLS), tf.constant(0.0)
    measurement = tf.cast(coming.measurement, tf.int64)
    for parameter, (gradient, shape) in enumerate(zip(dense, x.shapes, strict=True)):
        if part := part_of(shape, parameter, measurement):
            rows = tf.reshape(tf.reshape(gradient, [-1])[: CELLS * part.rows], [CELLS, part.rows])
            cells = tf.cast(rows[:, part.column : part.column + part.width], tf.float32)
            total += tf.linalg.matvec(cells, all_signs[part.sign : part.sign + part.width]) * part.scale
            square += tf.reduce_sum(tf.square(tf.cast(gradient, tf.float32)))
    return total, square


def weights(x: GraphExchange, coming: Coming) -> tf.Tensor:
    """A checksum of every variable (int64, one-dimensional), in steps that compare them; else none."""
    variables, nothing = x.variables(), tf.zeros(0, tf.int64)
    if x.transport.size == 1 or not variables or not x.settings.weights_check_steps:
        return nothing

    def checksums() -> tf.Tensor:
        return tf.stack([tensors.checksum(variable) for variable in variables])

    return tf.cond(coming.check_weights > 0, checksums, lambda: nothing)


def preview(
    x: GraphExchange,
    coming: Coming,
    dense: Sequence[tf.Tensor],
    parts: Sequence[Exchanged],
    done: Sequence[tf.Tensor],
) -> tuple[tf.Tensor, tf.Tensor]:
    """What levels show that are tried on the step's gradients, once all sums are ``done``: errors, added up over ranks,
    see ``Preview.see``; and the seconds that it takes. NaN and 0 in all other steps."""
    levels = len(x.ladder.names)
    nothing = tf.fill([levels], math.nan), tf.constant(0.0, tf.float64)
    if not (x.coordinator.previews and parts and x.preview.parameters):
        return nothing
    tried = x.preview
    places = {i: (number, place) for number, state in enumerate(x.states) for i, (place, _) in state.places.items()}

    def see(*gradients: np.ndarray) -> np.ndarray:
        return tried.see(x.ops, x.ladder.compressors, x.coordinator.unforeseen(), gradients)

    def own(i: int) -> tf.Tensor:
        return tf.cast(tf.reshape(dense[i], [-1])[: tried.elements(i)], tf.float32)

    def mean(i: int) -> tf.Tensor:
        number, place = places[i]
        return tf.cast(parts[number].summed[place.start : place.start + tried.elements(i)], tf.float32)

    def run() -> tuple[tf.Tensor, tf.Tensor]:
        with tf.control_dependencies(done):
            first, began = timed(tf.zeros(1))
        sees_own, those = coming.preview > 1, tried.parameters
        gradients = tf.cond(sees_own, lambda: [own(i) for i in those], lambda: [mean(i) for i in those])
        with tf.control_dependencies([first]):
            shown = tf.numpy_function(see, gradients, tf.float32)
        shown.set_shape([levels])
        total = x.sum(shown, f"{x.prefix}.preview")
        return total, private.timestamp([total]) - began

    return tf.cond(coming.preview > 0, run, lambda: nothing)


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
