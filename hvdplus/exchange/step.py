"""One step of the exchange: read this file first.

    backward fills a bucket ─► + residual ─► encode ─► all-reduce, asynchronous ─┐ (other buckets go on computing)
             residual (pending) ◄── the part that was not sent                   ▼
    finish: wait ─► decode ─► all ranks agree that it went well ─► mean gradient ─► the user's own optimizer ─► commit

``send_bucket`` and ``receive_bucket`` are all that happens to a bucket, the same text for frameworks that compute at
once and for compiled graphs. The other functions are the order of a step where the framework computes at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hvdplus.compression import Array, Compressor, Context, Ops
from hvdplus.exchange import outcome, sparse
from hvdplus.exchange.bucket import BucketState
from hvdplus.exchange.metadata import check_agreement
from hvdplus.exchange.residual import left_after_flush

if TYPE_CHECKING:
    from hvdplus.exchange.eager import EagerExchange


class Outgoing(NamedTuple):
    """What a rank makes of one bucket before the sum."""

    payload: Array
    left: Array | None
    """The next residual; None: there is none."""
    finite: Array | None
    """0-d boolean: all that was sent is finite; None: not looked at."""
    overflow: Array | None
    """0-d boolean: the residual would need many steps to send what is left; None: it would not."""


class Incoming(NamedTuple):
    """What a rank makes of one bucket's sum."""

    mean: Array
    next_context: Context | None
    """None: nothing was learned."""
    sum_finite: Array | None
    """0-d boolean, the same on every rank; None: not looked at."""


def send_bucket(
    ops: Ops, compressor: Compressor, ctx: Context, vector: Array, residual: Array | None, fraction: Array | float, check: bool
) -> Outgoing:
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
    finite = compressor.sound(ops, vector, payload) if check and not compressor.narrow else None
    left = None if residual is None else left_after_flush(residual, fraction)
    return Outgoing(payload, left, finite, None)


def receive_bucket(
    ops: Ops, compressor: Compressor, ctx: Context, total: Array, scale: float, check: bool
) -> Incoming:
    """Decode the sum of all ranks' payloads, and learn from it. ``scale``: 1/N for means."""
    mean = compressor.mean(ops, ctx, total, scale)
    if not check:
        return Incoming(mean, None, ops.all_finite(total) if compressor.narrow else None)
    # Finite payloads can still have a sum beyond float32.
    return Incoming(mean, compressor.advance(ops, ctx, total), ops.all_finite(total))


def gradient_ready(x: EagerExchange, i: int) -> None:
    """The backward pass has delivered a gradient: pack it, and send its bucket if nothing is missing from it."""
    x.begin()
    if not x.agreed:
        x.ready.append(i)
    elif i in x.now.place_of:  # a table waits for the end of the backward pass
        add_gradient(x, x.now.place_of[i][0], i)


def add_gradient(x: EagerExchange, state: BucketState, i: int) -> None:
    """Pack a gradient, and send its bucket if it is full."""
    x.mark_ready(state, i)
    if x.together and (state.missing or state is x.now.carrier):
        return
    x.meter.look()
    with x.meter.codec():
        if not x.together:
            x.fill(state, i)
        x.send_full(state)


def finish(x: EagerExchange, learning_rate: float = 0.0, added: int = 0, missing: float = 0.0) -> None:
    """The backward pass is over: exchange the rest, and deliver the means. All ranks call it once a step.

    Args:
        learning_rate: of the coming step; 0: unknown.
        added: parameters that are not in the exchange yet.
        missing: see ``Slot``.
    """
    x.begin()
    x.agree_on_first_step()
    used = send_rest(x)
    x.wait_for_device()
    x.reporter.start(x, used, learning_rate, added, missing)
    x.reporter.observe_last(x)
    receive(x)
    healthy = agree(x)
    if added:
        check_agreement(x.reporter.metadata.read(), x.ladder.names[x.plan.level])
        x.exchange_added()
    x.probe()
    with x.meter.codec():
        outcome.deliver(x, used)
    x.end_exchange(healthy)


def send_rest(x: EagerExchange) -> list[bool]:
    """Send all that has not left during the backward pass; returns which parameters have a gradient here."""
    if x.idle:
        return [True] * len(x.shapes)
    used = [x.backend.gradient(i) is not None for i in range(len(x.shapes))]
    with x.meter.codec():
        for state in x.now.states:
            if state.handle is None:
                x.complete(state)
        for table in x.tables_now:  # in one order on all ranks: now all that could leave earlier has left
            sparse.start_mask(x, table)
    for table in x.tables_now:
        sparse.send_table(x, table)
    return used


def receive(x: EagerExchange) -> None:
    """Wait for every sum, and decode it."""
    if x.now.in_place:
        with x.meter.awaited(*(state.bucket.number for state in x.now.states)):
            for state in x.now.states:
                state.mean = x.transport.wait(state.handle)
    states = [*(() if x.now.in_place else x.now.states), *x.tables_now]
    for state in states:
        if state.handle is not None:
            with x.meter.awaited(state.bucket.number):
                state.total = x.transport.wait(state.handle)
        with x.meter.codec():
            x.decode(state)
    with x.meter.codec():
        outcome.send_overflowed_again(x, states)


def agree(x: EagerExchange) -> bool:
    """Let residuals and contexts of the step count, if every rank says that its values were finite; returns whether.

    Where nothing depends on it, ranks read each other's metadata one step later.
    """
    if not x.reporter.read_in_step:
        return True
    with x.meter.exposed_comm():
        metadata = x.reporter.metadata.read()
    with x.meter.codec():
        outcome.turned_sparse(x)
        if not x.checks:
            return True
        healthy = not metadata.nonfinite and outcome.sums_are_finite(x)
        if healthy and metadata.overflow:
            outcome.send_left(x)
        for state in x.states:
            outcome.settle(x, state, healthy)
    return healthy
