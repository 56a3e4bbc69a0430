"""All that happens to one bucket in a step, as pure functions: the same text for frameworks that compute at once and
for compiled graphs.

    vector (gradient + residual) ─► send_bucket ─► payload ─► all-reduce ─► receive_bucket ─► mean, next context
                                        └► left: the next residual
"""

from __future__ import annotations

from typing import Generic, NamedTuple

from hvdplus.compression import Array, Compressor, Context, Ops
from hvdplus.exchange.residual import left_after_flush


class Outgoing(NamedTuple, Generic[Array]):
    """What a rank makes of one bucket before the sum."""

    payload: Array
    left: Array | None
    """The next residual; None: there is none."""
    finite: Array | None
    """0-d boolean: all that was sent is finite; None: not looked at."""
    overflow: Array | None
    """0-d boolean: the residual would need many steps to send what is left; None: it would not."""


class Incoming(NamedTuple, Generic[Array]):
    """What a rank makes of one bucket's sum."""

    mean: Array
    next_context: Context[Array] | None
    """None: nothing was learned."""
    sum_finite: Array | None
    """0-d boolean, the same on every rank; None: not looked at."""


def send_bucket(
    ops: Ops[Array],
    compressor: Compressor,
    ctx: Context[Array],
    vector: Array,
    residual: Array | None,
    fraction: Array | float,
    check: bool,
) -> Outgoing[Array]:
    """Encode a bucket.

    Args:
        vector: gradients plus ``fraction`` of the residual (1-D); may be overwritten.
        residual: what earlier steps left; None: nothing.
        check: whether to look for values that are not finite.
    """
    if compressor.keeps_residual:
        return Outgoing(*compressor.send(ops, ctx, vector, residual))
    payload = compressor.encode(ops, ctx, vector)
    # A payload that may overflow tells by its sum, and is sent again.
    finite = compressor.is_finite(ops, vector, payload) if check and not compressor.may_overflow else None
    left = None if residual is None else left_after_flush(residual, fraction)
    return Outgoing(payload, left, finite, None)


def receive_bucket(
    ops: Ops[Array], compressor: Compressor, ctx: Context[Array], total: Array, scale: float, check: bool
) -> Incoming[Array]:
    """Decode the sum of all ranks' payloads, and learn from it. ``scale``: 1/N for means."""
    mean = compressor.mean(ops, ctx, total, scale)
    if not check:
        return Incoming(mean, None, ops.all_finite(total) if compressor.may_overflow else None)
    # Finite payloads can still have a sum beyond float32.
    return Incoming(mean, compressor.advance(ops, ctx, total), ops.all_finite(total))
