"""The exchange of frameworks that compute at once: what ``step.py`` calls, bucket by bucket."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from hvdplus.compression import Array, Context
from hvdplus.exchange import checkpoint
from hvdplus.exchange.backend import Backend
from hvdplus.exchange.bucket import BucketSet, BucketState, wide
from hvdplus.exchange.engine import Exchange
from hvdplus.exchange.metadata import Metadata, Report, Slot, Sums, flag, fold24, hash24, pack, read, weights_differ
from hvdplus.exchange.plan import Ladder, Plan
from hvdplus.exchange.sparse import Table, few, mask_bytes, mask_counts, mask_words, padded
from hvdplus.exchange.step import receive_bucket, send_bucket
from hvdplus.meter import StepMeter
from hvdplus.runlog import RunLog
from hvdplus.settings import Settings
from hvdplus.transport import Grouping, Transport


class MetadataInFlight:
    """The metadata of one step under way; read once."""

    def __init__(self, wait: Callable[[], np.ndarray], ranks: int, checksums: Sequence[int]) -> None:
        self._wait, self._ranks = wait, ranks
        self._read: Metadata | None = None
        self.checksums = checksums
        """Of this rank's parameters, in steps that check them."""

    def read(self) -> Metadata:
        """Wait for the sum, the first time."""
        if self._read is None:
            self._read = read(self._wait(), self._ranks)
        return self._read


class EagerExchange(Exchange):
    """Exchanges the gradients that a backend finds."""

    def __init__(
        self,
        backend: Backend,
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
        """See ``Exchange``. ``sparse_as_dense``: sparse gradients travel in the buckets of all others."""
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
        self.meter = StepMeter()
        self.loss = math.nan
        """Loss of the current step for the run log; NaN: not reported."""
        self.get_loss_scale: Callable[[], float] | None = None
        """Tells by how much the script scales its losses, and so its gradients; None: not at all."""
        self._loss_scale = 1.0
        self._sparse_as_dense = sparse_as_dense
        self.agreed = False
        """Whether ranks have told each other, in the first step, which gradients are sparse, in which order gradients
        become ready, and that all go on from the same state."""
        self.ready: list[int] = []
        """Parameters as they become ready on this rank, in the first step."""
        self.resumed = ""
        """Digest of a loaded state that is not yet known to be the same on all ranks."""
        self.begun = False
        """Whether gradients of the current step are on their way."""
        self._finished_steps = 0
        self._unseen = set(range(len(self.shapes)))
        """Parameters that no rank has had a gradient of so far: until then ranks read metadata in their own step."""
        self._turned: list[bool] = []
        self._metadata_count = self._next_bucket = 0
        self._late: tuple[Plan, MetadataInFlight] | None = None
        self._norms: list[Array] = []
        self.make_sets()
        self.follow(self.coordinator.plan)

    # -- plans and buckets

    @property
    def sums_in_place(self) -> bool:
        """Where the transport negotiates, gradients need no agreed order, and so no bucket."""
        return self.transport.negotiates and hasattr(self.transport, "start_all")

    def make_sets(self) -> None:
        """The states of all buckets, anew."""
        tables = len(self.tables)
        states: list[BucketState] = [BucketState(bucket) for bucket in self.buckets[: len(self.buckets) - tables]]
        self._tables: list[Table] = [Table(bucket) for bucket in self.buckets[len(self.buckets) - tables :]]
        self.joined = BucketSet([] if self.idle else states, self.prefix)
        self._plain: BucketSet | None = None
        """Buckets of plain dense steps, where nothing has to be joined or encoded."""
        if self.sums_in_place and not self.idle:
            states = [BucketState(bucket) for bucket in self.make_buckets(plain=True)]
            last = states[-1] if states else None
            on_host = last is not None and last.bucket.dtype == "float32" and self.backend.on_host
            self._plain = BucketSet(states, f"{self.prefix}.plain", True, last if on_host else None)

    def cut_anew(self) -> None:
        """Buckets, after order, tables or parameters have changed; residuals and contexts go with the old ones."""
        self.buckets = self.make_buckets()
        self.coordinator.resize(self.costs())
        self.make_sets()

    @property
    def states(self) -> list[BucketState]:
        """All buckets that keep residuals and contexts."""
        return [*self.joined.states, *self.tables_now]

    @property
    def tables_now(self) -> list[Table]:
        """Tables, if anything is exchanged at all."""
        return [] if self.idle else self._tables

    def follow(self, plan: Plan) -> None:
        """The coming step runs ``plan``."""
        self.plan = plan
        self.now = self._plain if self._plain and self.ladder.plain(plan) else self.joined
        self.together = not (plan.flush_fraction or self.ladder.keeps_residual(plan))
        """Whether a bucket's gradients, as nothing is added to them, are taken at once when the last one is ready."""
        self.checks = self.ladder.needs_finite_check(plan) and not self.idle

    def context(self, state: BucketState, level: int | None = None) -> Context:
        """Of a bucket, at the level of the step unless another is given."""
        level = self.plan.level if level is None else level
        return state.context(self.ops, level, self.compressor(state.bucket, level), self.plan.side)

    # -- before a step

    def begin(self) -> None:
        """Once a step, before anything is sent: how large are losses, and did the script skip a step that flushed a
        residual? All ranks scale and skip alike."""
        if self.begun:
            return
        self.begun = True
        if self.get_loss_scale:
            self._loss_scale = self.get_loss_scale()
        if self.not_taken:
            self.not_taken = False
            self.follow(self.coordinator.repeat())

    def agree_on_first_step(self) -> None:
        """In the first step, before anything is sent: in which order do gradients become ready, and which are sparse?

        Raises:
            RuntimeError: on every rank, if ranks would go on from different states.
        """
        if self.agreed or self.idle:
            return
        self.agreed = True
        mine = [i for i in range(len(self.shapes)) if self.backend.is_sparse(i)]
        told = self.transport.gather_objects((mine, self.resumed, self.ready))
        checkpoint.check_same([digest for _, digest, _ in told])
        if self.order_known:
            return
        self.order_known = True
        # A script may have gone back over its first steps: what was ready twice counts as it first was.
        before, self.order, self.ready = self.order, list(dict.fromkeys([*told[0][2], *self.order])), []
        self.sparse = set().union(*(theirs for theirs, *_ in told))
        if not self._sparse_as_dense:
            self.tables = sorted(i for i in self.sparse if self.backend.may_share_rows(i))
        if self.tables or self.order != before:
            residuals = checkpoint.residuals(self)  # of a state that knew nothing of a first step
            self.cut_anew()
            for i, residual in residuals.items():
                self.hold(i, residual)
            self.follow(self.plan)

    # -- sending

    @property
    def _sent_scale(self) -> float:
        """By how much sent values are smaller than the scaled gradient. float16 alone is what scaling is made for."""
        return self._loss_scale if self.ladder.compressors[self.plan.level].settles else 1.0

    def wire_type(self, state: BucketState) -> str:
        """Type of a bucket's vector: the gradients' own in plain dense steps, if the transport can add it up."""
        own = state.bucket.dtype
        return own if self.ladder.plain(self.plan) and self.sums(own) else wide(own)

    def mark_ready(self, state: BucketState, i: int) -> None:
        """A gradient is there."""
        state.pending = None  # of a step that was never taken
        state.missing.discard(i)

    def vector(self, state: BucketState) -> Array:
        """Memory for the bucket, kept from step to step."""
        dtype = self.wire_type(state)
        if state.flat is None or state.flat_type != dtype:
            state.flat, state.flat_type = self.backend.empty(state.bucket.spec.size, dtype), dtype
        return state.flat

    def fill(self, state: BucketState, i: int) -> None:
        """Pack one gradient into its bucket, together with its share of the residual."""
        part, _ = state.places[i]
        residual = state.residual[part] if state.residual is not None and self.plan.flush_fraction else None
        # Residuals are in units of the loss, whatever its scale; so is what is sent where a level keeps anything.
        fraction = self.plan.flush_fraction * (self._loss_scale / self._sent_scale)
        self.backend.fill(i, self.vector(state)[part], residual, fraction, self._sent_scale)
        if self.plan.measure_norms:
            self._norms.append(self.backend.gradient_norm(i))

    def note_norms(self, parts: Sequence[Array]) -> None:
        """Norms of gradients, where the plan measures them."""
        if self.plan.measure_norms:
            self._norms += [self.backend.norm(part) for part in parts]

    def send_full(self, state: BucketState) -> None:
        """Send a bucket that nothing is missing from. Without negotiation their order is the same on every rank."""
        if self.transport.negotiates:
            if not state.missing:
                self.send(state)
            return
        states = self.now.states
        while self._next_bucket < len(states) and not states[self._next_bucket].missing:
            self._next_bucket += 1
            self.send(states[self._next_bucket - 1])

    def send(self, state: BucketState) -> None:
        """Encode a full bucket, and begin its all-reduce."""
        name = self.ladder.tensor_name(self.now.prefix, state.bucket.number, self.plan)
        if self.now.in_place and not isinstance(state, Table):
            state.payload = self.backend.summable(state.bucket, self.wire_type(state))
            self.note_norms(state.payload)
            state.handle = cast(Grouping, self.transport).start_all(state.payload, name, self.scale)
        else:
            self._encode(state)
            state.handle = self.transport.start(state.payload, name)
        self.meter.sum_begins(state.bucket.number, functools.partial(self.transport.done, state.handle))

    def _encode(self, state: BucketState) -> None:
        compressor, ctx = self.compressor(state.bucket, self.plan.level), self.context(state)
        if self.together:  # joined only where encoding asks for it
            parts = self.backend.parts(state.bucket)
            self.note_norms(parts)
            state.payload = compressor.encode_parts(self.ops, ctx, parts)
            if state.payload is not None:
                return
            self.backend.join(parts, self.vector(state), self._sent_scale)
        check = self.checks and state.bucket.compressible
        flushed = state.residual if self.plan.flush_fraction else None
        fraction = self.plan.flush_fraction
        out = send_bucket(self.ops, compressor, ctx, self.vector(state), flushed, fraction, check)
        state.payload, state.pending, state.finite, state.overflow = out

    # -- tables

    def start_mask(self, table: Table) -> None:
        """Tell the other ranks which rows this rank used."""
        table.pending = None
        table.rows, table.values = self.backend.rows(table.parameter)
        words = mask_words(self.ops, self.backend.mask(table.rows, table.height), self.transport.size)
        table.mask = self.transport.start(words, f"{self.prefix}.{table.bucket.number}.mask")

    def send_table(self, table: Table) -> None:
        """Hear which rows any rank used, and send them, or the whole table as a bucket."""
        with self.meter.exposed_comm():
            words = self.transport.wait(table.mask)
        with self.meter.codec():
            counts = mask_counts(self.ops, words, table.height, self.transport.size)
            union = self.backend.rows_in_use(counts)
            table.sent_bytes = mask_bytes(table.height, self.transport.size)
            if self.ladder.flushes(self.plan) or not few(len(union), table.height):
                table.rows = table.values = None
                self.mark_ready(table, table.parameter)
                if not self.together:
                    self.fill(table, table.parameter)
                self.send(table)
                table.sent_bytes += self.ops_bytes(table.payload)
                return
            table.union = union
            self.note_norms([table.values])
            length = padded(len(union))
            if length:
                values = self.backend.place(union, table.rows, table.values, length, wide(table.bucket.dtype))
                table.sent_bytes += self.ops_bytes(values)
                name = f"{self.prefix}.{table.bucket.number}.rows.{length}"
                table.handle = self.transport.start(values, name)

    @staticmethod
    def ops_bytes(array: Array) -> int:
        """Size of an array."""
        return int(array.nbytes)

    # -- receiving

    def decode(self, state: BucketState) -> None:
        """Sum of payloads -> mean of gradients."""
        if isinstance(state, Table) and state.union is not None:
            self._receive_rows(state)
            return
        compressor = self.compressor(state.bucket, self.plan.level)
        check = self.checks and state.bucket.compressible
        scale = self.scale * self._sent_scale
        got = receive_bucket(self.ops, compressor, self.context(state), state.total, scale, check)
        state.mean, state.next_context, state.sum_finite = got
        if check and self.plan.warms:
            state.next_context = self._learned(state, state.total)

    def _learned(self, state: BucketState, total: Array) -> Context:
        """The context of the level that this dense step warms up."""
        total = total if self._loss_scale == 1 else total / self._loss_scale
        learner = self.ladder.compressors[self.plan.warms]
        return learner.warm(self.ops, self.context(state, self.plan.warms), total)

    def _receive_rows(self, table: Table) -> None:
        width = table.bucket.spec.size // max(1, table.height)
        if table.handle is None:
            table.mean = self.backend.empty(0, wide(table.bucket.dtype))
            return
        table.mean = table.total[: len(table.union) * width]
        table.sum_finite = self.ops.all_finite(table.mean) if self.checks else None
        if self.checks and self.plan.warms and table.bucket.compressible:
            table.next_context = self._learned(table, self.backend.spread(table.union, table.mean, table.height))
        table.mean = table.mean * self.scale

    def send_overflowed_again(self, states: Sequence[BucketState]) -> None:
        """Every rank holds the same sums, so every rank sends the same buckets again, in full width."""
        narrow = [s for s in states if s.sum_finite is not None and self.compressor(s.bucket, self.plan.level).narrow]
        if self.backend.all_true([state.sum_finite for state in narrow]):
            return
        for state in (state for state in narrow if not state.sum_finite):
            name = self.ladder.tensor_name(self.now.prefix, state.bucket.number, self.plan) + ".again"
            if self.together:
                self.backend.join(self.backend.parts(state.bucket), self.vector(state), 1.0)
            state.total = state.mean = self.transport.wait(self.transport.start(self.vector(state), name, self.scale))
            state.sum_finite = self.ops.all_finite(state.mean)
            if self.checks and self.plan.warms:
                state.next_context = self._learned(state, state.total / self.scale)

    def sums_are_finite(self) -> bool:
        """Of all buckets that may be compressed; the same on every rank."""
        flags = [state.sum_finite for state in self.states if state.sum_finite is not None]
        return self.backend.all_true(flags)

    def send_left(self) -> None:
        """Some rank's values lie far beyond its level's scale: all ranks send what is left in full width, and nothing
        stays. The whole gradient arrives in its own step, and no later one pays for it."""
        states = [state for state in self.states if state.pending is not None and state.handle is not None]
        handles = []
        for state in states:
            name = self.ladder.tensor_name(self.now.prefix, state.bucket.number, self.plan) + ".left"
            handles.append(self.transport.start(self.backend.clone(state.pending), name, self.scale * self._sent_scale))
        for state, handle in zip(states, handles, strict=True):
            state.mean = state.mean + self.transport.wait(handle)
            state.pending = self.backend.filled_like(state.pending, 0.0)

    def not_finite(self, mean: Array) -> Array:
        """An array of NaN of the same length."""
        return self.backend.filled_like(mean, math.nan)

    # -- metadata

    def start_metadata(self, used: Sequence[bool], learning_rate: float, added: int, missing: float) -> None:
        """Tell the other ranks about this step; read at once if the step depends on it."""
        ranks = self.transport.size
        grads = range(len(self.shapes)) if not self.idle else ()
        self._turned = [self.backend.is_sparse(i) and i not in self.sparse for i in grads] or [False] * len(self.shapes)
        flags = [flag(has, turned, ranks) for has, turned in zip(used, self._turned, strict=True)]
        checksums = self.backend.checksums() if self._checks_weights() else []
        report = self._report(learning_rate, added, missing, checksums)
        wait = self._start_metadata_sum(self.backend.metadata_array(pack(self.transport.rank, ranks, report, flags)))
        self.metadata = MetadataInFlight(wait, ranks, checksums)
        self.observes_now = self.checks or self.now.carrier is not None or bool(self._unseen and not self.idle)
        """Whether every rank reads the metadata in this step."""
        # Who uses a parameter only matters to those who do not.
        self.reads_now = self.observes_now or bool(added) or not all(used)

    def _start_metadata_sum(self, array: Array) -> Callable[[], np.ndarray]:
        # What waits must not hold this exchange, which holds it: one that is dropped has to be gone at once.
        carrier, scale, transport = self.now.carrier, self.scale, self.transport
        to_host = self.backend.to_host
        if carrier is not None:
            with self.meter.codec():
                name = self.ladder.tensor_name(self.now.prefix, carrier.bucket.number, self.plan)
                arrays = [*carrier.payload, array]
                carrier.handle = cast(Grouping, transport).start_all(arrays, name, scale)
                self.meter.sum_begins(carrier.bucket.number, functools.partial(transport.done, carrier.handle))
            return lambda: to_host(array) / np.float32(scale)  # in place: here when the carrier's sums are
        # Two names alternate: the last sum may still be in flight where it was not awaited.
        self._metadata_count += 1
        handle = transport.start(array, f"{self.prefix}.metadata.{self._metadata_count % 2}")
        return lambda: to_host(transport.wait(handle))

    def _report(self, learning_rate: float, added: int, missing: float, checksums: Sequence[int]) -> Report:
        states = [] if self.idle or self.now.in_place else self.now.states
        states = [*states, *self.tables_now] if self.checks else states
        finite = [state.finite for state in states if state.finite is not None]
        overflow = [state.overflow for state in states if state.overflow is not None]
        contexts = 0
        for state in states:
            if state.bucket.compressible:
                for level in {self.plan.level, self.plan.warms or self.plan.level}:
                    contexts += sum(int(self.ops.checksum(array)) for array in self.context(state, level).state)
        times, loss = self.meter.last, float(self.loss)
        gradient_norm, residual_norm = self._measured_norms()
        return Report(
            Sums(
                nonfinite=float(not self.backend.all_true(finite)),
                overflow=float(self.backend.any_true(overflow)),
                step=times.step,
                loss=0.0 if math.isnan(loss) else loss,
                losses=float(not math.isnan(loss)),
            ),
            Slot(
                times.codec,
                times.exposed_comm,
                times.comm,
                times.input_wait,
                times.sounding,
                gradient_norm,
                residual_norm,
                learning_rate,
                contexts=fold24(contexts),
                weights=hash24(np.array(checksums, np.int64).tobytes()) if checksums else 0.0,
                missing=missing,
                added=added,
            ),
        )

    def _measured_norms(self) -> tuple[float, float]:
        """Of this rank's own gradients, taken when they were packed, and of its next residual."""
        if not self.plan.measure_norms or self.idle:
            return 0.0, 0.0
        with self.meter.codec():
            left = [self.backend.norm(state.pending) for state in self.states if state.pending is not None]
            gradient, self._norms = self.backend.norm_of_all(self._norms), []
            residual = self.backend.norm_of_all(left if self.ladder.keeps_residual(self.plan) else [])
            return gradient / self._loss_scale, residual

    def _checks_weights(self) -> bool:
        """After the first step, and every so often: ranks that train apart would not notice otherwise."""
        every = self.settings.weights_check_steps
        due = self._finished_steps == 1 or (self._finished_steps > 0 and every and self._finished_steps % every == 0)
        return bool(every and due and self.transport.size > 1)

    def observe_late(self) -> None:
        """Read the last step's metadata, if that step did not depend on them."""
        if self._late:
            (plan, metadata), self._late = self._late, None
            self._observe(plan, metadata)

    def _observe(self, plan: Plan, in_flight: MetadataInFlight, healthy: bool = True) -> None:
        metadata = in_flight.read()
        if "weights" in metadata.odd:
            self._raise_weights_differ(metadata.odd["weights"], in_flight.checksums)
        self.coordinator.observe(plan, metadata, healthy)
        if self._unseen:
            self._unseen -= set(np.flatnonzero(metadata.used > 0).tolist())
        if metadata.turned.any():
            self.sparse.update(np.flatnonzero(metadata.turned).tolist())

    def _raise_weights_differ(self, ranks: Sequence[int], checksums: Sequence[int]) -> None:
        everyone = self.transport.gather_objects(list(checksums))
        raise RuntimeError(weights_differ(ranks, everyone, self.backend.names))

    # -- the end of a step

    def exchange_added(self) -> None:
        """Exchange gradients of parameters that are not in the exchange yet."""
        raise NotImplementedError

    def probe(self) -> None:
        """See how long a sum takes that nothing else goes along with; its values do not matter."""
        if self.plan.probe_bytes:
            zeros = self.backend.zeros(self.plan.probe_bytes // 4)
            with self.meter.exposed_comm():  # with the metadata ranks have all sent everything
                self.metadata.read()
            with self.meter.sounding():
                self.transport.wait(self.transport.start(zeros, f"{self.prefix}.probe"))

    def deliver(self, used: Sequence[bool]) -> None:
        """Write means to the gradients; a parameter that no rank used keeps none."""
        users: Sequence[bool] = used
        if self.reads_now:
            metadata = self.metadata.read()
            users = (metadata.used > 0).tolist()
            if self.observes_now and metadata.turned.any():
                self.sparse.update(np.flatnonzero(metadata.turned).tolist())
        for state in (*self.now.states, *self.tables_now):
            if self.now.in_place and not isinstance(state, Table):
                # The metadata come last.
                for i, mean in zip(state.bucket.parameters, state.mean, strict=False):
                    if users[i]:
                        self.backend.deliver_summed(i, mean, sparse=i in self.sparse)
                continue
            if isinstance(state, Table) and state.union is not None:
                if users[state.parameter]:
                    self.backend.deliver_rows(state.parameter, state.union, state.mean)
                continue
            sent = [array for array in (state.flat, state.payload) if array is not None]
            adopt = not any(self.backend.shares_memory(state.mean, array) for array in sent)
            for i, (part, _) in state.places.items():
                if users[i]:
                    self.backend.deliver(i, state.mean[part], adopt=adopt, sparse=i in self.sparse)
                elif state.pending is not None and state.residual is not None:  # nobody takes what was sent of it
                    state.pending[part] = state.residual[part]

    def end_exchange(self, healthy: bool) -> None:
        """All is delivered: observe, forget the step, and make the next plan."""
        self.coordinator.row_bytes = sum(table.sent_bytes for table in self.tables_now)
        if self.observes_now:
            self._observe(self.plan, self.metadata, healthy)
        else:
            self._late = self.plan, self.metadata
        self.coordinator.unread_steps = int(not self.observes_now)
        states = self.states if self.now is self.joined else [*self.now.states, *self.tables_now]
        self.not_taken = healthy and not self.ladder.keeps_residual(self.plan) and any(
            state.pending is not None for state in states
        )
        for state in states:
            state.forget_step()
        self.begun = False
        self._next_bucket = 0
        self._finished_steps += 1
        self.loss = math.nan
        before = self.plan
        self.follow(self.coordinator.advance())
        self._hand_over(before.level)

    def _hand_over(self, before: int) -> None:
        """Where the coming level can reuse the last one's contexts, it takes them over."""
        old, new = self.ladder.compressors[before], self.ladder.compressors[self.plan.level]
        if self.plan.level != before and new.follows(old):
            for state in self.states:
                if state.bucket.compressible:
                    fresh = new.init(self.ops, state.bucket.spec)
                    state.contexts[self.plan.level] = new.inherit(self.ops, fresh, self.context(state, before))

    def commit(self) -> None:
        """The optimizer has taken the step: pending residuals become residuals."""
        self.not_taken = self.consolidated = False
        for state in self.states:
            if state.pending is not None:
                if self.backend.shares_memory(state.pending, state.flat):
                    # The vector became its own remainder, in place: the old residual's memory is free instead.
                    state.flat = state.residual
                # Neither flushed nor waiting in the coming plan: this step has sent the last of it.
                outstanding = self.plan.flush_fraction or self.plan.warms
                state.residual, state.pending = (state.pending if outstanding else None), None
        if self.alone and not self.idle and all(state.residual is None for state in self.states):
            self.idle = True
            self.make_sets()
            self.follow(self.plan)
        self.meter.end_step()

    # -- between steps

    def leave_out_residuals(self) -> None:
        """From the coming step on; see ``Coordinator.leave_out_residuals``."""
        if self.coordinator.leave_out_residuals():
            self.follow(self.coordinator.advance())

    def hold(self, i: int, residual: Any, share: float = 1.0) -> None:
        """Make ``residual``, times ``share``, the residual of a parameter. None: zeros; whether there is a residual has
        to be the same on all ranks."""
        state = next(state for state in self.states if i in state.bucket.parameters)
        if state.residual is None:
            state.residual = self.backend.zeros(state.bucket.spec.size, wide(state.bucket.dtype))
        if residual is not None:
            part, _ = state.places[i]
            state.residual[part] = self.backend.restore(residual).reshape(-1) * share

    def know_gradients(self, order: Sequence[int], sparse: Sequence[int], tables: Sequence[int]) -> None:
        """A checkpoint tells what the first step would show."""
        self.order, self.sparse, self.tables, self.order_known = list(order), set(sparse), list(tables), True
        self._start_anew()

    def know_nothing(self) -> None:
        """The next step is a first one."""
        self.order, self.sparse, self.tables = list(reversed(range(len(self.shapes)))), set(), []
        self.order_known = False
        self._start_anew()

    def _start_anew(self) -> None:
        self.cut_anew()
        if self._late:
            self._late[1].read()
        self._late, self._norms, self.ready, self.agreed = None, [], [], False

    def change_members(self, order: Sequence[int], moved: Mapping[int, int]) -> None:
        """The backend has other gradients now. ``moved``: old number -> new number of those that stay."""
        self.shapes, self.dtypes = list(self.backend.shapes), list(self.backend.dtypes)
        self.order = list(order)
        self.sparse = {moved[i] for i in self.sparse if i in moved}
        self.tables = sorted(moved[i] for i in self.tables if i in moved)
        self._unseen = (set(range(len(self.shapes))) - set(moved.values())) | {moved[i] for i in self._unseen if i in moved}
        self.cut_anew()

    def arrays(self, ctx: Context) -> list[Array]:
        """Copies of a context's arrays, for a checkpoint."""
        return [self.backend.clone(array) for array in ctx.state]

    def put_context(self, state: BucketState, level: int, arrays: Sequence[Any]) -> None:
        """Take over a context of a checkpoint."""
        state.contexts[level] = Context(state.bucket.spec, 0, tuple(self.backend.restore(array) for array in arrays))

    def copied(self, array: Array) -> Array:
        """A copy, for a checkpoint."""
        return self.backend.clone(array)

    def on_host(self, array: Any) -> np.ndarray:
        """For a digest."""
        return self.backend.to_host(self.backend.restore(array))

    def abandon(self) -> None:
        """Forget what is on its way, as the transport has failed or has ended."""
        self._late, self._norms, self.ready, self._next_bucket, self.begun = None, [], [], 0, False
        self.meter = StepMeter()
        for state in (*self.joined.states, *self._tables, *(self._plain.states if self._plain else ())):
            state.forget_step()
            state.pending = None
