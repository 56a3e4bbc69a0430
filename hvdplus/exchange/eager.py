"""The exchange for eager frameworks (NumPy, PyTorch): its buckets, and the parts of a step.

``step.py`` has their order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdplus.compression import Context
from hvdplus.exchange import outcome, two_level
from hvdplus.exchange.backend import Backend, EagerArray
from hvdplus.exchange.bucket import BucketSet, BucketState, wide
from hvdplus.exchange.engine import Exchange
from hvdplus.exchange.passes import Stage
from hvdplus.exchange.plan import Ladder, Plan
from hvdplus.exchange.preview import Preview
from hvdplus.exchange.reporter import Reporter
from hvdplus.exchange.sparse import Table
from hvdplus.exchange.two_level import TwoLevel
from hvdplus.log.runlog import RunLog
from hvdplus.settings import Settings
from hvdplus.transport import Transport


class EagerExchange(Exchange[EagerArray]):
    """Exchanges the gradients of a backend."""

    def __init__(
        self,
        backend: Backend[EagerArray],
        transport: Transport,
        settings: Settings,
        *,
        ladder: Ladder,
        auto: bool,
        log: RunLog,
        prefix: str,
        average: bool,
        sparse_as_dense: bool = False,
    ) -> None:
        """See ``Exchange``. ``sparse_as_dense``: sparse gradients travel in buckets with dense ones."""
        self.backend = backend
        self.framework = backend.framework
        super().__init__(
            backend.ops,
            backend.shapes,
            backend.dtypes,
            transport,
            settings,
            ladder=ladder,
            auto=auto,
            log=log,
            prefix=prefix,
            average=average,
            tries_codecs=auto,
        )
        self.runs_ahead = self.wire.waits_on_device and not backend.on_host
        """Whether the host runs ahead of the device; see ``ahead.py``."""
        self.meter = backend.make_meter(runs_ahead=self.runs_ahead)
        self.reporter: Reporter[EagerArray] = Reporter(len(self.shapes))
        self.get_loss_scale: Callable[[], float] | None = None
        """Returns the factor by which the script scales its losses, and so its gradients; None: no scaling."""
        self.loss_scale = 1.0
        """Of the current step."""
        self.sparse_as_dense = sparse_as_dense or self.two_level is not None or self.settings.secure_aggregation
        self.preview: Preview | None = None
        """Of levels that have not run, while they are tried."""
        self.stages: list[Stage] = []
        """Buckets whose first of several sums is in flight, in the order of their sums."""
        self.agreed = False
        """Whether ranks have agreed, in the first step, which gradients are sparse, in which order gradients become
        ready, and that all resume from the same state."""
        self.ready: list[int] = []
        """Parameters as they become ready on this rank, in the first step."""
        self.resumed = ""
        """Digest of a loaded state that is not yet known to be the same on all ranks."""
        self.begun = False
        """Whether a gradient of the current step is here."""
        self.next_bucket = 0
        """Without negotiation: the bucket that leaves next."""
        self.make_sets()
        self.follow(self.coordinator.plan)

    # -- plans and buckets

    def choose_two_level(self) -> TwoLevel | None:
        """As offered by the transport; if the user leaves it open, only if measurements say that it is faster."""
        return two_level.choose(self)

    @property
    def sums_in_place(self) -> bool:
        """Whether the transport negotiates and sums groups: gradients then need no agreed order, and so no bucket."""
        return self.wire.negotiates and hasattr(self.wire, "start_all")

    def make_sets(self) -> None:
        """Make new states of all buckets."""
        dense = len(self.buckets) - len(self.tables)
        self._tables: list[Table[EagerArray]] = [Table(bucket) for bucket in self.buckets[dense:]]
        self.joined: BucketSet[EagerArray]
        self.joined = BucketSet([] if self.idle else [BucketState(b) for b in self.buckets[:dense]], self.prefix)
        self._plain: BucketSet[EagerArray] | None = None
        """Buckets of plain dense steps, where nothing has to be joined or encoded."""
        if self.sums_in_place and not self.idle:
            states: list[BucketState[EagerArray]] = [BucketState(bucket) for bucket in self.make_buckets(plain=True)]
            self._plain = BucketSet(states, f"{self.prefix}.plain", True)

    def cut_anew(self) -> None:
        """Cut new buckets for changed order, tables or parameters; drop the old residuals and contexts."""
        self.buckets = self.make_buckets()
        self.preview = None
        self.coordinator.resize(self.costs())
        self.coordinator.ask()
        self.make_sets()

    @property
    def states(self) -> list[BucketState[EagerArray]]:
        """All buckets that keep residuals and contexts."""
        return [*self.joined.states, *self.tables_now]

    @property
    def tables_now(self) -> list[Table[EagerArray]]:
        """Tables; none while the exchange is idle."""
        return [] if self.idle else self._tables

    def follow(self, plan: Plan) -> None:
        """The coming step runs ``plan``."""
        self.plan = plan
        self.now = self._plain if self._plain and self.ladder.plain(plan) else self.joined
        self.together = not (plan.flush_fraction or self.ladder.keeps_residual(plan))
        """Whether no residual is added to the gradients, so that a compressor may take them one by one."""
        self.checks = self.ladder.needs_finite_check(plan) and not self.idle

    def context(self, state: BucketState[EagerArray], level: int | None = None) -> Context[EagerArray]:
        """The context of a bucket at ``level``; None: the step's, as its passes so far have taught it."""
        if state.taught is not None and level in (None, self.plan.level):
            return state.taught
        level = self.plan.level if level is None else level
        return state.context(self.ops, level, self.compressor(state.bucket, level), self.plan.side)

    def tensor_name(self, state: BucketState[EagerArray]) -> str:
        """Name of a bucket's next all-reduce."""
        plan = self.plan if state.taught is None else self.plan._replace(side=state.taught.side)
        return self.ladder.tensor_name(self.now.prefix, state.bucket.number, plan)

    @property
    def sent_scale(self) -> float:
        """Divisor of the scaled gradient before it is sent; 1 where the loss scale serves float16 on the wire."""
        return self.loss_scale if self.ladder.compressors[self.plan.level].needs_finite_check else 1.0

    # -- before a step

    def begin(self) -> None:
        """Once a step, before anything is sent: read the loss scale, and repeat a flush if the script skipped its step.
        All ranks scale and skip alike."""
        if self.begun:
            return
        self.begun = True
        if self.get_loss_scale:
            self.loss_scale = self.get_loss_scale()
        if self.not_taken:
            self.not_taken = False
            self.follow(self.coordinator.repeat())

    # -- the end of a step

    def sum_begins(self, key: int, transport: Transport, handle: Any) -> None:
        """Measure a bucket's sum, which is in flight; ``key``: by which it is awaited."""
        self.meter.sum_begins(key, functools.partial(transport.done, handle), transport.ended(handle))

    def exchange_added(self) -> None:
        """Exchange gradients of parameters that are not in the exchange yet."""
        raise NotImplementedError

    def end_exchange(self, healthy: bool) -> None:
        """After delivery: observe the metadata, forget the step, and make the next plan."""
        self.coordinator.row_bytes = sum(table.sent_bytes for table in self.tables_now)
        self.reporter.end_step(self, healthy)
        self.not_taken = healthy and self.ladder.flushes(self.plan)
        for state in [*self.now.states, *self.tables_now]:
            state.forget_step()
        self.begun, self.next_bucket = False, 0
        before = self.plan.level
        self.follow(self.coordinator.advance())
        outcome.hand_over(self, before)

    def commit(self) -> None:
        """The optimizer has taken the step: pending residuals become residuals."""
        self.not_taken = self.consolidated = False
        self.reporter.taken()
        # If the coming plan adds none of the residual, this step has sent the last of it.
        outstanding = self.plan.flush_fraction
        for state in self.states:
            if state.pending is not None or state.handed_over:
                if self.backend.shares_memory(state.pending, state.flat):
                    # The vector became the residual in place, so it takes the old residual's memory instead.
                    state.flat = state.residual
                state.residual = state.pending if outstanding or (state.waits and not self.alone) else None
                state.pending, state.handed_over = None, False
        if self.alone and not self.idle and all(state.residual is None for state in self.states):
            self.idle = True
            self.make_sets()
            self.follow(self.plan)
        self.meter.end_step()

    # -- between steps

    def leave_out_residuals(self) -> None:
        """Stop using levels that keep a residual; see ``Coordinator.leave_out_residuals``."""
        if self.coordinator.leave_out_residuals():
            self.follow(self.coordinator.advance())

    def abandon(self) -> None:
        """Forget all sums in flight after the transport has failed or ended."""
        self.ready, self.stages, self.next_bucket, self.begun = [], [], 0, False
        self.reporter.forget()
        self.meter = self.backend.make_meter(runs_ahead=self.runs_ahead)
        for state in (*self.joined.states, *self._tables, *(self._plain.states if self._plain else ())):
            state.forget_step()
            state.pending, state.handed_over = None, False

    def change_members(self, order: Sequence[int], moved: Mapping[int, int]) -> None:
        """Follow a change of the backend's gradients. ``moved``: old number -> new number of those that stay."""
        self.shapes, self.dtypes = list(self.backend.shapes), list(self.backend.dtypes)
        self.order = list(order)
        self.sparse = {moved[i] for i in self.sparse if i in moved}
        self.tables = sorted(moved[i] for i in self.tables if i in moved)
        self.reporter.members_changed(len(self.shapes), moved)
        self.cut_anew()

    # -- checkpoints

    def know_gradients(self, order: Sequence[int], sparse: Sequence[int], tables: Sequence[int]) -> None:
        """Take over from a checkpoint the order and sparsity that a first step would show."""
        tables = [] if self.two_level or self.settings.secure_aggregation else tables
        self.order, self.sparse, self.tables, self.order_known = list(order), set(sparse), list(tables), True
        self._start_anew()

    def know_nothing(self) -> None:
        """Forget order and sparsity: the next step is a first step."""
        self.order, self.sparse, self.tables = list(reversed(range(len(self.shapes)))), set(), []
        self.order_known = False
        self._start_anew()

    def _start_anew(self) -> None:
        self.cut_anew()
        self.reporter.finish_last()
        self.meter = self.backend.make_meter(runs_ahead=self.runs_ahead)  # the step in which this happens takes longer
        self.ready, self.agreed = [], False

    def hold(self, i: int, residual: Any, share: float = 1.0) -> None:
        """Make ``residual``, times ``share``, the residual of a parameter. None: zeros; whether there is a residual has
        to be the same on all ranks."""
        state = next(state for state in self.states if i in state.bucket.parameters)
        if state.residual is None:
            state.residual = self.backend.zeros(state.bucket.spec.size, wide(state.bucket.dtype))
        if residual is not None:
            part, _ = state.places[i]
            state.residual[part] = self.backend.restore(residual).reshape(-1) * share

    def arrays(self, ctx: Context[EagerArray]) -> list[EagerArray]:
        """Copies of a context's arrays."""
        return [self.backend.clone(array) for array in ctx.state]

    def put_context(self, state: BucketState[EagerArray], level: int, arrays: Sequence[Any]) -> None:
        """Make ``arrays`` of a checkpoint the context of a bucket at ``level``."""
        state.contexts[level] = Context(state.bucket.spec, 0, tuple(self.backend.restore(array) for array in arrays))

    def copied(self, array: EagerArray) -> EagerArray:
        """A copy."""
        return self.backend.clone(array)

    def on_host(self, array: Any) -> np.ndarray:
        """An array of a checkpoint, for its digest."""
        return self.backend.to_host(self.backend.restore(array))
