"""One bucket's step as pure functions, the same for eager frameworks (NumPy, PyTorch) and for compiled graphs
(TensorFlow).

    vector (gradient + residual) ─► send_bucket ─► payload ─► all-reduce ─► receive_bucket ─► mean, next context
                                        └► left: the next residual
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple

from hvdplus.compression import Array, Compressor, Context, Ops
from hvdplus.compression.contract import Piecewise
from hvdplus.exchange.residual import left_after_flush


class Outgoing(NamedTuple, Generic[Array]):
    """One encoded bucket of this rank, before the all-reduce."""

    payload: Array
    left: Array | None
    """The next residual; None: there is none."""
    finite: Array | None
    """0-d boolean: all sent values are finite; None: not checked."""
    overflow: Array | None
    """0-d boolean: the residual would need many steps to send ``left``; None: the level keeps no residual."""


class Incoming(NamedTuple, Generic[Array]):
    """One bucket, decoded from the sum of all ranks' payloads."""

    mean: Array | None
    """None: it is where it shall be."""
    next_context: Context[Array] | None
    """None: nothing was learned."""
    sum_finite: Array | None
    """0-d boolean, the same on every rank; None: not checked."""


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
        residual: what earlier steps have not sent; None: there is none.
        check: whether to look for values that are not finite.
    """
    if compressor.keeps_residual:
        return Outgoing(*compressor.send(ops, ctx, vector, residual))
    payload = compressor.encode(ops, ctx, vector)
    # If a payload may overflow, its sum shows that, and the bucket is sent again.
    finite = compressor.is_finite(ops, vector, payload) if check and not compressor.may_overflow else None
    left = None if residual is None else left_after_flush(residual, fraction)
    return Outgoing(payload, left, finite, None)


def receive_bucket(
    ops: Ops[Array],
    compressor: Compressor,
    ctx: Context[Array],
    total: Array,
    scale: float,
    check: bool,
    into: Sequence[Array] = (),
) -> Incoming[Array]:
    """Decode the sum of all ranks' payloads, and learn from it.

    Args:
        scale: 1/N for means.
        check: as of ``send_bucket``.
        into: the bucket's tensors (1-D, float32), where the mean shall be written if that saves a copy. Not if it
            is not finite and the gradients, which may be there, are sent again.
    """
    # Finite payloads can still have a sum beyond float32; and integers are finite, but say whether gradients were.
    finite = compressor.is_finite(ops, total, total) if check else None
    if compressor.may_overflow and not check:
        finite = ops.all_finite(total)
        if into and not finite:  # the gradients, which are there, are sent again
            into = ()
    written = into and isinstance(compressor, Piecewise) and compressor.mean_into(ops, ctx, total, scale, into)
    mean = None if written else compressor.mean(ops, ctx, total, scale)
    return Incoming(mean, compressor.advance(ops, ctx, total) if check else None, finite)
