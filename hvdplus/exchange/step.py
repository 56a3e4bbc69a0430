"""One step of the exchange: read this file first.

    backward fills a bucket ─► + residual ─► encode ─► all-reduce, asynchronous ─┐ (other buckets go on computing)
             residual (pending) ◄── the part that was not sent                   ▼
    finish: wait ─► decode ─► all ranks agree that it went well ─► mean gradient ─► the user's own optimizer ─► commit

This is the order of a step in an eager framework (NumPy, PyTorch). In a compiled graph (TensorFlow) the order follows
from the data, and the same pure functions of ``codec.py`` do the work. Read on: ``transfer.py`` sends one bucket,
``passes.py`` one that takes several sums, ``sparse.py`` one embedding, ``reporter.py`` the metadata; ``outcome.py``
commits or rolls back the step (``ahead.py``: on a device), ``schedule.py`` plans the next, and ``preview.py`` now and
then tries levels beside the training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdplus.exchange import ahead, checkpoint, outcome, passes, preview, sparse, transfer
from hvdplus.exchange.backend import EagerArray
from hvdplus.exchange.metadata import check_agreement

if TYPE_CHECKING:
    from hvdplus.exchange.eager import EagerExchange


def gradient_ready(x: EagerExchange[EagerArray], i: int) -> None:
    """The backward pass has delivered a gradient: send its bucket once that is full."""
    if not x.begun:
        x.begin()
    if x.idle:
        return
    if not x.agreed:
        x.ready.append(i)
    elif i in x.now.place_of:  # a table waits for the end of the backward pass
        state = x.now.place_of[i][0]
        transfer.mark_ready(state, i)
        x.meter.look()
        if not state.missing:
            with x.meter.codec():
                transfer.send_full(x, state)


def finish(x: EagerExchange[EagerArray], learning_rate: float = 0.0, added: int = 0, missing: float = 0.0) -> None:
    """The backward pass is over: exchange the rest, and deliver the means. All ranks call it once a step.

    Args:
        learning_rate: of the coming step; 0: unknown.
        added: number of parameters that are not in the exchange yet.
        missing: see ``Slot``.
    """
    x.begin()
    agree_on_first_step(x)
    used = send_rest(x)
    if not (x.idle or x.runs_ahead):
        x.backend.wait_for_device()
    tried = preview.look(x)
    x.reporter.start(x, used, learning_rate, added, missing)
    x.reporter.observe_last(x)
    receive(x)
    healthy = agree(x)
    if added:
        check_agreement(x.reporter.metadata.read(), x.ladder.names[x.plan.level], x.coordinator.note)
        x.exchange_added()
    probe(x)
    with x.meter.codec():
        outcome.deliver(x, used)
    x.end_exchange(healthy)
    preview.try_levels(x, tried)


def agree_on_first_step(x: EagerExchange[EagerArray]) -> None:
    """In the first step, before anything is sent, agree on the order in which gradients become ready, on the sparse
    gradients and on the loaded state.

    Raises:
        RuntimeError: ranks resume from different states; on every rank.
    """
    if x.agreed or x.idle:
        return
    x.agreed = True
    mine = x.backend.sparse(), x.resumed, x.ready
    told = x.transport.gather_objects(mine, f"first step of {x.prefix}")
    x.ready = []
    checkpoint.check_same([digest for _, digest, _ in told])
    if x.order_known:
        return
    x.order_known = True
    # A script may run several backward passes before its first step: a gradient keeps the place of its first one.
    before, x.order = x.order, list(dict.fromkeys([*told[0][2], *x.order]))
    x.sparse = set().union(*(theirs for theirs, *_ in told))
    if not x.sparse_as_dense:
        x.tables = sorted(i for i in x.sparse if x.backend.may_share_rows(i))
    if x.tables or x.order != before:
        residuals = checkpoint.residuals(x)  # of a state saved before any step
        x.cut_anew()
        for i, residual in residuals.items():
            x.hold(i, residual)
        x.follow(x.coordinator.plan)


def send_rest(x: EagerExchange[EagerArray]) -> list[bool]:
    """Send everything that has not left during the backward pass; return which parameters have a gradient here."""
    if x.idle:
        return [True] * len(x.shapes)
    used = x.backend.present()
    with x.meter.codec():
        for state in x.now.states:
            if state.handle is None and not passes.is_under_way(x, state):
                transfer.complete(x, state)
        passes.go_on_with_all(x)
        for table in x.tables_now:  # in the same order on all ranks: every bucket has left
            sparse.start_mask(x, table)
    for table in x.tables_now:
        sparse.send_table(x, table)
    return used


def receive(x: EagerExchange[EagerArray]) -> None:
    """Wait for every sum, and decode it."""
    if x.now.in_place:
        with x.meter.awaited(*map(id, x.now.states)), x.backend.named("hvdplus.wait"):
            for state in x.now.states:
                state.summed = x.transport.wait(state.handle)
    for state in (*(() if x.now.in_place else x.now.states), *x.tables_now):
        if state.handle is not None:
            with x.meter.awaited(id(state)), x.backend.named("hvdplus.wait"):
                state.total = (x.transport if state.is_table else x.wire).wait(state.handle)
        with x.meter.codec():
            if isinstance(state, sparse.Table) and state.union is not None:
                sparse.receive_rows(x, state)
            else:
                transfer.decode(x, state)
    with x.meter.codec():
        outcome.send_overflowed_again(x, x.states)


def agree(x: EagerExchange[EagerArray]) -> bool:
    """Commit the step's contexts if all ranks' values were finite, else roll the step back; return whether they were.

    If nothing depends on the metadata, ranks read them one step later. Where the host runs ahead, the device decides,
    and nobody here knows: the answer is yes.
    """
    if x.reporter.read_in_step:
        with x.meter.exposed_comm():
            x.reporter.metadata.read()
        outcome.turned_sparse(x)
    if not x.checks:
        return True
    with x.meter.codec():
        if x.runs_ahead:
            ahead.settle(x)
            return True
        metadata = x.reporter.metadata.read()
        healthy = not metadata.nonfinite and outcome.sums_are_finite(x)
        if healthy and metadata.overflow:
            outcome.send_left(x)
            healthy = outcome.sums_are_finite(x)
        learns = healthy and (x.coordinator.schedule.learns(metadata.overflow) or x.plan.asks)
        for state in x.states:
            outcome.settle(x, state, healthy, learns)
    return healthy


def probe(x: EagerExchange[EagerArray]) -> None:
    """If the plan asks for a bandwidth probe, time an all-reduce of zeros while no other sum is in flight."""
    if x.plan.probe_bytes:
        zeros = x.backend.zeros(x.plan.probe_bytes // 4)
        with x.meter.exposed_comm():  # once the metadata are here, all ranks have sent everything
            x.reporter.metadata.read()
        with x.meter.probe():
            x.wire.wait(x.wire.start(zeros, f"{x.prefix}.probe"))
