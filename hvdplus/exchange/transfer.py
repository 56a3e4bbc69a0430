"""One bucket's step in an eager framework: fill, encode and send the bucket, decode its sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from hvdplus.compression import Compressor, Context
from hvdplus.exchange import passes, two_level
from hvdplus.exchange.backend import EagerArray
from hvdplus.exchange.bucket import BucketState, wide
from hvdplus.exchange.codec import receive_bucket, send_bucket
from hvdplus.exchange.residual import left_after_flush
from hvdplus.transport import Grouping

if TYPE_CHECKING:
    from hvdplus.exchange.eager import EagerExchange


def mark_ready(state: BucketState[EagerArray], i: int) -> None:
    """The gradient of parameter ``i`` is ready."""
    state.pending, state.handed_over, state.waits = None, False, False  # of a step that was never taken
    state.missing.discard(i)


def complete(x: EagerExchange[EagerArray], state: BucketState[EagerArray]) -> None:
    """The backward pass is over: send the bucket, with zeros for gradients that it did not deliver."""
    for i in tuple(state.missing):
        mark_ready(state, i)
    send(x, state)


def send_full(x: EagerExchange[EagerArray], state: BucketState[EagerArray]) -> None:
    """Send the bucket if it is full. Without negotiation, buckets leave in the same order on every rank."""
    if x.wire.negotiates:
        if not state.missing:
            send(x, state)
        return
    states = x.now.states
    while x.next_bucket < len(states) and not states[x.next_bucket].missing:
        x.next_bucket += 1
        send(x, states[x.next_bucket - 1])


def send(x: EagerExchange[EagerArray], state: BucketState[EagerArray]) -> None:
    """Encode a full bucket, and begin its all-reduce, or the first of several."""
    if x.now.in_place and not state.is_table:
        state.summed = _in_place(x, state)
        state.handle = cast(Grouping, x.transport).start_all(state.summed, x.tensor_name(state), x.scale)
        x.sum_begins(id(state), x.wire, state.handle)
        return
    parts = x.backend.parts(state.bucket)
    if not x.two_level:  # which measures the hosts' sums
        x.reporter.note_gradients(x, state.bucket.parameters, parts)
        if x.together and not x.plan.asks and _send_parts(x, state, parts):
            return
    packed = _pack(x, state, parts)
    if x.two_level:
        two_level.sum_over_host(x, state, packed, functools.partial(_send_vector, x, state))
    else:
        _send_vector(x, state, packed)


def _send_parts(x: EagerExchange[EagerArray], state: BucketState[EagerArray], parts: Sequence[EagerArray]) -> bool:
    """Send gradients that are not joined; returns whether the compressor can encode them so."""
    with x.backend.named("hvdplus.encode"):
        payload = x.compressor(state.bucket, x.plan.level).encode_parts(x.ops, x.context(state), parts)
    if payload is None:
        return False
    state.payload = payload
    _start(x, state)
    return True


def _pack(x: EagerExchange[EagerArray], state: BucketState[EagerArray], parts: Sequence[EagerArray]) -> EagerArray:
    """The bucket's vector: its gradients, and a share of the residual. Compressors that read tensor by tensor have them
    added up as they read."""
    fraction, flat = x.plan.flush_fraction, vector(x, state)
    # Residuals are in units of the unscaled loss, and so are sent values at levels that keep residuals or contexts.
    share = fraction * (x.loss_scale / x.sent_scale)
    as_read = not x.two_level and x.compressor(state.bucket, x.plan.level).reads_by_tensor
    return x.backend.join(parts, flat, x.sent_scale, state.residual if fraction else None, share, as_read=as_read)


def _send_vector(x: EagerExchange[EagerArray], state: BucketState[EagerArray], vector: EagerArray) -> None:
    """Encode a bucket's vector and begin the all-reduce of the next pass, which is usually the only one."""
    compressor, ctx = x.compressor(state.bucket, x.plan.level), x.context(state)
    if x.plan.asks and compressor.asks and not state.asked:

        def learn(total: EagerArray) -> None:
            with x.backend.named("hvdplus.decode"):
                state.asked, state.taught = True, compressor.learn(x.ops, ctx, total)
            _send_vector(x, state, whole)

        with x.backend.named("hvdplus.encode"):
            told, whole = compressor.ask(x.ops, ctx, vector), _whole(vector)
        _teach(x, state, told, f"{x.tensor_name(state)}.ask", learn)
        return
    if ctx.side < compressor.passes - 1:

        def go_on(total: EagerArray) -> None:
            with x.backend.named("hvdplus.decode"):
                state.taught = compressor.advance(x.ops, ctx, total)._replace(side=ctx.side + 1)
            state.asked = False
            _send_vector(x, state, whole)

        payload, whole = _encode(x, state, compressor, ctx, vector), _whole(vector)
        _teach(x, state, payload, x.tensor_name(state), go_on)
        return
    check = x.checks and state.bucket.compressible
    fraction = x.plan.flush_fraction
    residual = state.residual if fraction else None
    if x.two_level and not x.two_level.owns(state.bucket.number):
        state.payload = _encode(x, state, compressor, ctx, vector)
        state.handed_over = compressor.keeps_residual
        state.pending = None
        if residual is not None and not compressor.keeps_residual:
            state.pending = left_after_flush(residual, fraction)
        _start(x, state)
        return
    with x.backend.named("hvdplus.encode"):
        out = send_bucket(x.ops, compressor, ctx, vector, residual, fraction, check)
    state.payload, state.pending, state.finite, state.overflow = out
    _start(x, state)


def _whole(vector: EagerArray) -> EagerArray:
    """The vector, added up before the script may change a gradient."""
    return vector[:]


def _teach(
    x: EagerExchange[EagerArray],
    state: BucketState[EagerArray],
    payload: EagerArray,
    name: str,
    go_on: Callable[[EagerArray], None],
) -> None:
    """Begin a sum that delivers nothing, and is followed by another one: see ``passes.py``."""
    if not len(payload):  # no tensor of this bucket has anything to learn
        go_on(payload)
        return
    handle = _begin(x, state, payload, name)
    x.sum_begins(id(state), x.wire, handle)
    passes.follow(x, passes.Stage(state, x.wire, handle, go_on))


def _start(x: EagerExchange[EagerArray], state: BucketState[EagerArray]) -> None:
    state.handle = _begin(x, state, state.payload, x.tensor_name(state))
    x.sum_begins(id(state), x.wire, state.handle)


def _encode(
    x: EagerExchange[EagerArray],
    state: BucketState[EagerArray],
    compressor: Compressor,
    ctx: Context[EagerArray],
    vector: EagerArray,
) -> EagerArray:
    """Payload of a vector. Of two levels, ranks that do not own the bucket only need to know its form."""
    owns = x.two_level is None or x.two_level.owns(state.bucket.number)
    form = x.plan.level, ctx.side, state.flat_type
    if not owns and form in state.forms:
        return state.forms[form]
    with x.backend.named("hvdplus.encode"):
        payload = compressor.encode(x.ops, ctx, vector)
    if not owns:
        state.forms[form] = payload
    return payload


def _begin(x: EagerExchange[EagerArray], state: BucketState[EagerArray], payload: EagerArray, name: str) -> Any:
    """Begin the sum of a payload; returns its handle."""
    if x.two_level:
        return x.two_level.start(payload, name, bucket=state.bucket.number)
    return x.wire.start(payload, name)


def decode(x: EagerExchange[EagerArray], state: BucketState[EagerArray]) -> None:
    """Sum of payloads -> mean of gradients, and the next context."""
    compressor, check = x.compressor(state.bucket, x.plan.level), x.checks and state.bucket.compressible
    with x.backend.named("hvdplus.decode"):
        into = _places(x, state, compressor)
        got = receive_bucket(x.ops, compressor, x.context(state), state.total, x.scale * x.sent_scale, check, into)
        state.mean, state.next_context, state.sum_finite = got


def _places(
    x: EagerExchange[EagerArray], state: BucketState[EagerArray], compressor: Compressor
) -> Sequence[EagerArray]:
    """Where the bucket's mean can be written at once; empty: it is delivered later."""
    if x.runs_ahead or not x.sparse.isdisjoint(state.bucket.parameters):
        return ()
    if compressor.keeps_residual:
        # The last bits of a product may depend on where it is written: only a reducer's buckets are alike on all ranks.
        at_once = not x.backend.may_adopt
    else:
        # float16 is the same wherever it is, once the host has seen that its sum is finite. But metadata that are read
        # in the step may tell that a gradient has to become sparse, as it is on another rank.
        at_once = compressor.may_overflow and x.backend.on_host and not x.reporter.observed_in_step
    return x.backend.places(state.bucket) if at_once else ()


def wire_type(x: EagerExchange[EagerArray], state: BucketState[EagerArray]) -> str:
    """Type of a bucket's vector: the gradients' own in plain dense steps, if the transport can add it up."""
    own = state.bucket.dtype
    return own if x.ladder.plain(x.plan) and x.sums(own) else wide(own)


def vector(x: EagerExchange[EagerArray], state: BucketState[EagerArray]) -> EagerArray:
    """The bucket's flat vector; its memory is kept from step to step."""
    dtype = wire_type(x, state)
    if state.flat is None or state.flat_type != dtype:
        state.flat, state.flat_type = x.backend.empty(state.bucket.spec.size, dtype), dtype
    return state.flat


def _in_place(x: EagerExchange[EagerArray], state: BucketState[EagerArray]) -> list[EagerArray]:
    """The gradients themselves, to be summed in place."""
    arrays = x.backend.summable(state.bucket, wire_type(x, state))
    x.reporter.note_gradients(x, state.bucket.parameters, arrays)
    return arrays
