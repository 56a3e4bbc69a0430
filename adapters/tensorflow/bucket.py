"""One bucket's exchange in the graph: one branch for each step variant, all with results of the same types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from hvdplus.adapters.tensorflow import tensors
from hvdplus.adapters.tensorflow.variables import GraphState
from hvdplus.compression import Context
from hvdplus.exchange.bucket import wide
from hvdplus.exchange.codec import receive_bucket, send_bucket
from hvdplus.exchange.plan import Plan, Variant
from hvdplus.exchange.residual import add
from hvdplus.exchange.sparse import few, mask_bytes, mask_counts, mask_words

if TYPE_CHECKING:
    from hvdplus.adapters.tensorflow.graph import GraphExchange


class Exchanged(NamedTuple):
    """What a step makes of one bucket."""

    summed: Any
    """Sum of all ranks' gradients, decoded: 1-D, float32 or float64."""
    left: Any
    """1-D: the next residual; empty: it stays as it is."""
    context: Any
    """1-D: the level's next context; empty: there is none."""
    finite: Any
    overflow: Any
    sum_finite: Any
    """0-d booleans, see ``Outgoing`` and ``Incoming``."""
    checksum: Any
    """Of all contexts that were used, int64."""
    sent_bytes: Any


def exchange_bucket(
    x: GraphExchange, state: GraphState, variant: tf.Tensor, fraction: Any, vector: tf.Tensor, union: tf.Tensor | None
) -> Exchanged:
    """Send and receive a bucket.

    Args:
        variant: index in ``x.ladder.variants``.
        fraction: of the residual that is flushed.
        vector: gradients, 1-D, in their own type.
        union: rows that any rank used; None: the gradients are dense.
    """
    # A table's gradient whose rows are known only when the step runs has no shape before.
    vector = tf.ensure_shape(vector, (state.bucket.spec.size,))
    # Variables are read outside, so that no branch is stateful: TensorFlow runs stateful branches one by one.
    residual = None if state.held is None else state.held.read_value()
    values = {level: known.variable.read_value() for level, known in state.contexts.items()}
    fraction = tf.cast(fraction, tf.float32)
    branches = [_branch(x, state, used, fraction, vector, union, residual, values) for used in x.ladder.variants]
    part: Exchanged = tf.switch_case(variant, branches)
    part.summed.set_shape([state.bucket.spec.size])
    return part


def _branch(
    x: GraphExchange,
    state: GraphState,
    used: Variant,
    fraction: tf.Tensor,
    vector: tf.Tensor,
    union: tf.Tensor | None,
    residual: tf.Tensor | None,
    values: Mapping[int, tf.Tensor],
) -> Callable[[], Exchanged]:
    ops, bucket = x.ops, state.bucket
    plan = Plan(used.level, used.side, float(used.flushes), used.asks)
    compressor = x.compressor(bucket, used.level)
    check = bucket.compressible and x.ladder.needs_finite_check(plan)
    held = residual if compressor.keeps_residual or used.flushes else None
    own_type = x.ladder.plain(plan) and x.sums(bucket.dtype)
    yes, no, nothing = tf.constant(True), tf.constant(False), tf.zeros(0)

    def name(side: int) -> str:
        return x.ladder.tensor_name(x.prefix, bucket.number, used._replace(side=side))

    def checksum() -> tf.Tensor:
        return ops.checksum(values[used.level]) if check and used.level in values else tf.constant(0, tf.int64)

    def context() -> Context[tf.Tensor]:
        known = state.contexts.get(used.level)
        return Context(bucket.spec, used.side, ()) if known is None else known.context(used.side, values[used.level])

    def sum_of(payload: tf.Tensor, number: int, asked: bool) -> tf.Tensor:
        return x.sum(payload, name(used.side + number) + ".ask" * asked)

    def run() -> Exchanged:
        sent = vector if own_type else tf.cast(vector, wide(bucket.dtype))
        if held is not None:
            sent = add(sent, held, 1.0 if compressor.keeps_residual else fraction)
        ctx = compressor.taught(ops, context(), sent, sum_of, used.asks)
        out = send_bucket(ops, compressor, ctx, sent, held, fraction, check)
        total = x.sum(out.payload, name(ctx.side))
        summed, after, sum_finite = receive_bucket(ops, compressor, ctx, total, 1.0, check)
        if compressor.may_overflow:
            # Every rank holds this same sum, so every rank sends the bucket again, in full width.
            summed = tf.cond(sum_finite, lambda decoded=summed: decoded, lambda: x.sum(sent, f"{name(ctx.side)}.again"))
            sum_finite = ops.all_finite(summed)
        return Exchanged(
            tf.cast(summed, wide(bucket.dtype)),
            nothing if out.left is None else out.left,
            tensors.flat(after.state) if after and check else nothing,
            yes if out.finite is None else out.finite,
            no if out.overflow is None else out.overflow,
            sum_finite if check else yes,
            checksum(),
            tf.size(out.payload) * out.payload.dtype.size + compressor.earlier_bytes(bucket.spec),
        )

    def share() -> Exchanged:
        """Exchange rows: exact, so the residual waits. Contexts learn only what ranks ask."""
        dense, rows_name = tf.cast(vector, wide(bucket.dtype)), f"{name(used.side)}.rows"
        total, sent_bytes = _sum_of_rows(x, dense, union, state.height, rows_name)
        after = values.get(used.level, nothing) if check else nothing
        if used.asks and check:
            after = tensors.flat(compressor.asked(ops, context(), dense, lambda told: sum_of(told, 0, True)).state)
        sum_finite = ops.all_finite(total) if check else yes
        return Exchanged(total, nothing, after, yes, no, sum_finite, checksum(), sent_bytes)

    if union is None or used.flushes:
        return run
    sparse: Any = tf.shape(union)[0]
    return lambda: tf.cond(few(sparse, state.height), share, run)


def used_rows(x: GraphExchange, state: GraphState, grads: Sequence[Any]) -> tf.Tensor:
    """Rows (int64, ascending) of a table that any rank used."""
    (i,) = state.bucket.parameters
    if isinstance(grads[i], tf.IndexedSlices):
        places = tf.cast(grads[i].indices, tf.int64)[:, None]
    else:
        places = tf.where(tf.reduce_any(tf.reshape(grads[i], (state.height, -1)) != 0, axis=1))
    mask = tf.tensor_scatter_nd_update(tf.zeros(state.height), places, tf.ones(tf.shape(places)[0]))
    ranks = x.transport.size
    words = x.sum(mask_words(x.ops, mask, ranks), f"{x.prefix}.{state.bucket.number}.mask")
    return tf.where(mask_counts(x.ops, words, state.height, ranks) > 0)[:, 0]


def mask_size(x: GraphExchange, state: GraphState) -> int:
    """Bytes that the mask takes."""
    return mask_bytes(state.height, x.transport.size)


def _sum_of_rows(x: GraphExchange, flat: tf.Tensor, union: Any, height: int, name: str) -> tuple[tf.Tensor, tf.Tensor]:
    """(sum over all ranks of a gradient that is zero outside ``union``, bytes that this rank sent)."""
    width = int(flat.shape[0]) // height
    count = tf.shape(union)[0]
    padding = tensors.padded(count) - count
    values = tf.pad(tf.gather(tf.reshape(flat, (height, width)), union), [[0, padding], [0, 0]])
    total = tf.reshape(x.sum(tf.reshape(values, [-1]), name), (-1, width))[:count]
    summed = tf.scatter_nd(union[:, None], total, tf.constant((height, width), tf.int64))
    return tf.reshape(summed, [-1]), tf.size(values) * flat.dtype.size
