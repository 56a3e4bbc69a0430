"""What follows a step's sums in the graph, once the host knows whether all ranks were finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvdplus.adapters.tensorflow import tensors
from hvdplus.adapters.tensorflow.bucket import Exchanged
from hvdplus.adapters.tensorflow.variables import GraphState
from hvdplus.exchange.plan import Variant

if TYPE_CHECKING:
    from hvdplus.adapters.tensorflow.graph import GraphExchange

AS_IS, NOT_FINITE, SEND_LEFT = range(3)
"""Remedies: deliver the sums; deliver NaN, where a payload hides that a gradient was not finite; send what encoding
left in full width, and deliver it with the sums."""


def remedy(x: GraphExchange, used: Variant, healthy: bool, overflow: bool) -> int:
    """The step's remedy; the same on every rank."""
    compressor = x.ladder.compressors[used.level]
    if healthy:
        return SEND_LEFT if overflow else AS_IS
    return NOT_FINITE if compressor.needs_finite_check else AS_IS


def mended(x: GraphExchange, which: tf.Tensor, parts: Sequence[Exchanged]) -> Sequence[Exchanged]:
    """``parts`` after remedy ``which``: the sums to deliver, and the next residuals."""
    compressors = x.ladder.compressors
    if not parts or not any(compressor.needs_finite_check for compressor in compressors):
        return parts

    def as_is() -> list[tuple[Any, Any]]:
        return [(tf.identity(part.summed), tf.identity(part.left)) for part in parts]

    def not_finite() -> list[tuple[Any, Any]]:
        return [
            (tf.fill(tf.shape(part.summed), math.nan) if state.bucket.compressible else part.summed, part.left)
            for state, part in zip(x.states, parts, strict=True)
        ]

    def send_left() -> list[tuple[Any, Any]]:
        return [_with_left(x, state, part) for state, part in zip(x.states, parts, strict=True)]

    branches = [as_is, not_finite]
    if any(compressor.keeps_residual for compressor in compressors):
        branches.append(send_left)
    pairs = tf.switch_case(which, branches)
    for state, (summed, _) in zip(x.states, pairs, strict=True):
        summed.set_shape([state.bucket.spec.size])
    return [part._replace(summed=summed, left=left) for part, (summed, left) in zip(parts, pairs, strict=True)]


def _with_left(x: GraphExchange, state: GraphState, part: Exchanged) -> tuple[tf.Tensor, tf.Tensor]:
    """(sum that includes what encoding left, next residual)."""
    if state.held is None:
        return part.summed, part.left

    def send() -> tuple[tf.Tensor, tf.Tensor]:
        left = tf.ensure_shape(part.left, [state.bucket.spec.size])
        rest = x.sum(left, f"{x.prefix}.{state.bucket.number}.left")
        # A sum beyond float32 is delivered, as by a plain all-reduce, and the residual stays as it was.
        summed = part.summed + rest
        stays = tf.cond(x.ops.all_finite(summed), lambda: tf.zeros_like(left), state.held.read_value)
        return summed, stays

    if not state.height:
        return send()
    return tf.cond(tf.size(part.left) > 0, send, lambda: (part.summed, part.left))  # rows that were shared left nothing


def keep(
    x: GraphExchange,
    variant: tf.Tensor,
    healthy: tf.Tensor,
    learns: tf.Tensor,
    parts: Sequence[Exchanged],
    absent: Sequence[bool],
) -> None:
    """Unless some rank's gradient was not finite: take over contexts, if the step ``learns``, and make residuals
    pending. Variables that are ``absent`` in this step keep their residuals, because no mean of theirs is delivered.
    """

    def store(used: Variant) -> Callable[[], tf.Tensor]:
        residuals = x.ladder.compressors[used.level].keeps_residual or used.flushes

        def run() -> tf.Tensor:
            pends = False
            for state, part in zip(x.states, parts, strict=True):
                if state.held is not None and residuals:
                    state.next_held.assign(_pending(state, part, absent))
                    pends = True
                known = state.contexts.get(used.level)
                if known is not None:
                    learned = tf.ensure_shape(part.context, known.variable.shape)
                    known.variable.assign(tf.cond(learns, lambda new=learned: new, known.variable.read_value))
            if pends:
                x.pends.assign(True)
            return tf.constant(0)

        return run

    if parts:
        branches = [store(used) for used in x.ladder.variants]
        nothing = len(branches)
        tf.switch_case(tf.where(healthy, variant, nothing), [*branches, lambda: tf.constant(0)])


def _pending(state: GraphState, part: Exchanged, absent: Sequence[bool]) -> tf.Tensor:
    left = part.left
    if state.height:
        left = tf.cond(tf.size(left) > 0, lambda: part.left, state.held.read_value)
    left = tf.ensure_shape(left, state.held.shape)
    if not any(absent[i] for i in state.bucket.parameters):
        return left
    return tensors.with_parts(left, state.held.read_value(), state.bucket, absent)


def hand_over(x: GraphExchange, variant: tf.Tensor, following: tf.Tensor) -> None:
    """If the coming level can reuse the last level's contexts, it takes them over."""
    levels = tf.constant([used.level for used in x.ladder.variants])
    last, coming = tf.gather(levels, variant), tf.gather(levels, following)
    compressors = x.ladder.compressors

    def take(old: int, new: int) -> Callable[[], tf.Tensor]:
        def run() -> tf.Tensor:
            for state in x.states:
                if new in state.contexts and old in state.contexts:
                    before, after = state.contexts[old], state.contexts[new]
                    fresh = compressors[new].init(x.ops, state.bucket.spec)
                    ctx = compressors[new].reuse_context(x.ops, fresh, before.context(0, before.variable.read_value()))
                    after.variable.assign(tensors.flat(ctx.state))
            return tf.constant(0)

        return run

    for new, compressor in enumerate(compressors):
        for old, other in enumerate(compressors):
            if old != new and compressor.can_reuse(other) and x.states:
                both = tf.logical_and(tf.equal(last, old), tf.equal(coming, new))
                tf.cond(both, take(old, new), lambda: tf.constant(0))


def delivered(
    x: GraphExchange, parts: Sequence[Exchanged], dense: Sequence[tf.Tensor], absent: Sequence[bool]
) -> list[tf.Tensor | None]:
    """A mean for every variable that has a gradient.

    Sums are scaled here, variable by variable. Scaling whole buckets made Keras' steps 3 % longer at ``none``
    (``benchmarks/transparency.py``), presumably because an optimizer cannot compute in the memory of a bucket's part.
    """
    means = list(dense)
    for state, part in zip(x.states, parts, strict=True):
        for i, summed in zip(state.bucket.parameters, tensors.parts_of(part.summed, state.bucket), strict=True):
            mean = summed if x.scale == 1 else summed * tf.cast(x.scale, summed.dtype)
            means[i] = tf.cast(mean, dense[i].dtype)
    return [None if none else mean for none, mean in zip(absent, means, strict=True)]
