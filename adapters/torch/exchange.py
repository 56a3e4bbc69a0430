"""The exchange in PyTorch: hooks fill buckets while the backward pass runs, ``finish`` brings the means back.

A gradient is copied once, into its bucket's flat buffer, together with its share of the residual; what comes back
is written to ``.grad``. Nothing else of the user's is touched.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hvdplus.adapters.torch.ops import TorchOps
from hvdplus.adapters.torch.rows import SharedRows, as_sparse, rows_used
from hvdplus.buckets import DENSE_ONLY, SPARSE, Bucket, compressor_for, make_buckets
from hvdplus.calibration import codec_seconds
from hvdplus.compression import Compressor, Context
from hvdplus.costmodel import LevelCost, level_costs
from hvdplus.exchange import Ladder, Plan, SideSlot, read_side, side_tensor, split_checksum
from hvdplus.meter import StepMeter
from hvdplus.pilot import Pilot
from hvdplus.residual import unreleased
from hvdplus.runlog import RunLog
from hvdplus.settings import Settings
from hvdplus.transport import Transport


class _Side:
    """A side tensor under way; ``total`` waits for it once."""

    def __init__(self, transport: Transport, array: torch.Tensor, name: str) -> None:
        self._transport = transport
        self._handle = transport.start(array, name)
        self._total: np.ndarray | None = None

    def total(self) -> np.ndarray:
        """The sum over all ranks, on the host."""
        if self._total is None:
            self._total = np.asarray(self._transport.wait(self._handle))
        return self._total


@dataclass
class _Lane:
    """One bucket on this rank, from step to step."""

    bucket: Bucket
    flat: torch.Tensor
    """What is sent before encoding: gradients plus released residual."""
    contexts: dict[int, Context] = field(default_factory=dict)
    """Level -> context, made when the level is first used."""
    residual: torch.Tensor | None = None
    """What encoding lost so far; None where nothing is outstanding."""
    pending: torch.Tensor | None = None
    """The next residual, until the optimizer has taken the step."""
    waiting: set[int] = field(default_factory=set)
    """Parameters whose gradient of this step is not here yet."""
    payload: torch.Tensor | None = None
    handle: Any = None
    total: Any = None
    """Sum of all ranks' payloads."""
    sum: Any = None
    """Sum of all ranks' gradients, decoded."""
    nonfinite: bool = False


class TorchExchange:
    """Exchanges the gradients of ``parameters`` once a step."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        transport: Transport,
        settings: Settings,
        *,
        ladder: Ladder,
        auto: bool,
        log: RunLog,
        prefix: str,
        average: bool,
        passes: int,
        sparse_as_dense: bool = False,
    ) -> None:
        """``parameters``: those that have gradients, in the same order on every rank. ``prefix`` begins all names."""
        self.parameters = list(parameters)
        self.transport = transport
        self.passes = passes
        self.meter = StepMeter()
        self.loss = math.nan
        """Loss of the current step for the run log; NaN: not reported."""
        self._prefix = prefix
        self._ladder = ladder
        self._scale = 1.0 / transport.size if average else 1.0
        self.idle = transport.size == 1 and (auto or ladder.names == ("none",))
        """Alone there is nobody to exchange with: gradients stay untouched unless a level is asked for by name."""
        self._device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.ops = TorchOps(self._device)
        self._settings = settings
        self._sparse_as_dense = sparse_as_dense
        self._sorted = False
        """Whether sparse gradients have been told from dense ones, which the first step shows."""
        self._sparse: set[int] = set()
        """Parameters whose gradients are sparse on some rank, and so come back sparse on all."""
        self._rows: dict[int, SharedRows] = {}
        """Those of them whose rows are shared."""
        self.buckets = self._cut()
        self._codec_seconds: tuple[float, ...] = (0.0,) * len(ladder.names)
        """Of every level, for all parameters; 0: not tried."""
        if auto and transport.size > 1:  # with contexts and memory of its own
            ops = TorchOps(self._device)
            self._codec_seconds = codec_seconds(ops, self.buckets, ladder.compressors, transport)
        self.pilot = Pilot(ladder, settings, auto=auto, ranks=transport.size, costs=self._costs(), log=log)
        self.plan = self.pilot.plan
        self._make_lanes()
        self._passes_left = [passes] * len(self.parameters)
        self._versions: dict[int, int] = {}
        self._next_lane = 0
        self._late: tuple[Plan, _Side] | None = None
        self._unpaid = False
        """Whether a residual's share was sent in a step that was not taken (yet)."""
        self._side_count = 0
        if not self.idle:
            for i, parameter in enumerate(self.parameters):
                parameter.register_post_accumulate_grad_hook(self._make_hook(i))  # type: ignore[no-untyped-call]

    @property
    def in_flight(self) -> bool:
        """Whether gradients of the current step are on their way."""
        return bool(self._versions)

    def restart(self) -> None:
        """Count backward passes anew, after their number or the optimizer's state changed between two steps."""
        self._passes_left = [self.passes] * len(self.parameters)

    def finish(self, learning_rate: float = 0.0) -> None:
        """Send what is left, wait, and write the reduced gradients to ``.grad``. All ranks call it once a step.

        ``learning_rate``: of the coming step, for the pilot; 0: unknown.
        """
        self._pay_again()
        if self._late:  # begun one step ago: here by now
            plan, side = self._late
            self.pilot.observe(plan, side.total())
        self._sort_out_sparse()
        used = self._send_rest()
        with self.meter.codec():
            for rows in self._rows.values():
                rows.start()
        slot = self._slot(learning_rate)
        # Two names alternate: the last one may still be in flight where it was not awaited.
        self._side_count += 1
        side = _Side(
            self.transport,
            torch.from_numpy(side_tensor(self.transport.rank, self.transport.size, slot, used)),
            f"{self._prefix}.side.{self._side_count % 2}",
        )
        for lane in self._lanes:
            with self.meter.awaited(lane.bucket.number):
                lane.total = self.transport.wait(lane.handle)
            with self.meter.codec():
                self._decode(lane)
        with self.meter.exposed_comm():
            for rows in self._rows.values():
                rows.send()
        self.pilot.row_bytes = sum(rows.sent_bytes for rows in self._rows.values())
        awaited = self._ladder.settles(self.plan) and not self.idle
        users, healthy = used, True
        if awaited or not used.all():  # whether anybody used it is only of interest to those who did not
            with self.meter.exposed_comm():
                slots, users = read_side(side.total(), self.transport.size)
            if awaited:
                with self.meter.codec():
                    # Finite payloads can still have a sum beyond float32; it is the same on every rank.
                    healthy = not any(slot.nonfinite for slot in slots) and self._sums_are_finite()
                    self._settle(healthy)
        with self.meter.exposed_comm():
            reduced_rows = {i: rows.receive(self._scale) for i, rows in self._rows.items()}
        with self.meter.codec():
            self._deliver(used, users, reduced_rows)
        if awaited:
            self.pilot.observe(self.plan, side.total(), healthy)
            self._late = None
        else:
            self._late = (self.plan, side)
        for lane in self._lanes:
            lane.waiting = set(lane.bucket.parameters)
            lane.payload = lane.handle = lane.total = lane.sum = None  # memory that the forward pass can have
        self._versions.clear()
        self._next_lane = 0
        self.restart()
        self.loss = math.nan
        self._unpaid = healthy and any(
            lane.pending is not None and not self._compressor(lane).keeps_residual for lane in self._lanes
        )
        before, self.plan = self.plan, self.pilot.advance()
        self._hand_over(before.level)

    def _pay_again(self) -> None:
        """Before a step begins: did the script skip one that paid out a residual? All ranks skip alike."""
        if self._unpaid:
            self._unpaid = False
            self.plan = self.pilot.repeat()

    def commit(self) -> None:
        """The optimizer has taken the step: pending residuals become residuals."""
        self._unpaid = False
        for lane in self._lanes:
            if lane.pending is not None:
                if lane.pending.data_ptr() == lane.flat.data_ptr():
                    # What was sent became its own remainder, in place: the old residual's memory is free instead.
                    lane.flat = torch.empty_like(lane.flat) if lane.residual is None else lane.residual
                # Neither released nor waiting in the coming plan: this step has paid out the last of it.
                outstanding = self.plan.release or self.plan.warms
                lane.residual, lane.pending = (lane.pending if outstanding else None), None
        self.meter.end_step()

    def _cut(self) -> tuple[Bucket, ...]:
        """Buckets of all parameters but those whose rows are shared."""
        dense = [i for i in range(len(self.parameters)) if i not in self._rows]
        buckets = make_buckets(
            [tuple(self.parameters[i].shape) for i in dense],
            [str(self.parameters[i].dtype).removeprefix("torch.") for i in dense],
            bucket_bytes=self._settings.bucket_bytes,
            ranks=self.transport.size,
            seed=self._settings.seed,
        )
        return tuple(bucket._replace(parameters=tuple(dense[i] for i in bucket.parameters)) for bucket in buckets)

    def _costs(self) -> tuple[LevelCost, ...]:
        """What every level costs, with parameters whose rows are shared left out."""
        total = sum(p.numel() for p in self.parameters)
        share = sum(bucket.spec.size for bucket in self.buckets) / total if total else 0.0
        return level_costs(self.buckets, self._ladder.compressors, [share * s for s in self._codec_seconds])

    def _make_lanes(self) -> None:
        self._lanes = [] if self.idle else [self._make_lane(bucket) for bucket in self.buckets]
        self._place_of = {
            i: (lane, slice(*lane.bucket.offsets[place : place + 2]), lane.bucket.shapes[place])
            for lane in self._lanes
            for place, i in enumerate(lane.bucket.parameters)
        }

    def _sort_out_sparse(self) -> None:
        """In the first step, before anything is sent: which gradients are so sparse that only rows are exchanged?"""
        if self._sorted or self.idle:
            return
        self._sorted = True
        rows = {} if self._sparse_as_dense else {i: rows_used(p) for i, p in enumerate(self.parameters)}
        used = self.transport.gather_objects({i: count for i, count in rows.items() if count is not None})
        self._sparse = set().union(*used)
        for i in sorted(self._sparse):
            parameter = self.parameters[i]
            if sum(theirs.get(i, 0) for theirs in used) <= SPARSE * len(parameter):
                self._rows[i] = SharedRows(parameter, self.transport, self.ops, f"{self._prefix}.rows.{i}")
        if self._rows:
            self.buckets = self._cut()
            self.pilot.resize(self._costs())
            self._make_lanes()

    def _make_lane(self, bucket: Bucket) -> _Lane:
        dtype = torch.float64 if bucket.dtype == DENSE_ONLY else torch.float32
        flat = torch.zeros(bucket.spec.size, dtype=dtype, device=self._device)
        return _Lane(bucket, flat, waiting=set(bucket.parameters))

    def _compressor(self, lane: _Lane) -> Compressor:
        return compressor_for(lane.bucket, self._ladder.compressors[self.plan.level])

    def _context(self, lane: _Lane, level: int | None = None) -> Context:
        level = self.plan.level if level is None else level
        if level not in lane.contexts:
            compressor = compressor_for(lane.bucket, self._ladder.compressors[level])
            lane.contexts[level] = compressor.init(self.ops, lane.bucket.spec)
        return lane.contexts[level]._replace(phase=self.plan.phase)

    def _hand_over(self, before: int) -> None:
        """Where the coming level follows the last one, it takes over its contexts."""
        old, new = self._ladder.compressors[before], self._ladder.compressors[self.plan.level]
        if self.plan.level != before and new.follows(old):
            for lane in self._lanes:
                if lane.bucket.dtype != DENSE_ONLY:
                    fresh = new.init(self.ops, lane.bucket.spec)
                    lane.contexts[self.plan.level] = new.inherit(self.ops, fresh, self._context(lane, before))

    def _make_hook(self, i: int) -> Callable[[torch.Tensor], None]:
        me = weakref.ref(self)  # an optimizer that is gone must not go on exchanging

        def hook(parameter: torch.Tensor) -> None:
            exchange = me()
            if exchange is not None:
                exchange._gradient_ready(i, parameter)

        return hook

    def _gradient_ready(self, i: int, parameter: torch.Tensor) -> None:
        self._pay_again()
        self._passes_left[i] -= 1
        if self._passes_left[i] < 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                f"Received: {self.passes - self._passes_left[i]} passes with backward_passes_per_step="
                f"{self.passes}. Increase it to accumulate gradients locally."
            )
        if self._passes_left[i] == 0 and parameter.grad is not None:
            self._versions[i] = parameter.grad._version
        if self._passes_left[i] == 0 and self._sorted and i not in self._rows:
            self.meter.look()
            with self.meter.codec(), torch.no_grad():
                self._pack(i, parameter.grad)
                self._send_ready()

    def _pack(self, i: int, grad: torch.Tensor | None) -> None:
        """Copy one gradient into its bucket, together with its share of the residual."""
        lane, part, shape = self._place_of[i]
        target = lane.flat[part].view(shape)
        lane.pending = None  # of a step that was never taken
        residual = lane.residual[part].view(shape) if lane.residual is not None and self.plan.release else None
        if grad is not None and grad.is_sparse:
            grad = grad.to_dense()
        if grad is None:
            target.zero_()
        elif residual is not None and grad.dtype == target.dtype:
            torch.add(grad, residual, alpha=self.plan.release, out=target)
            residual = None
        else:
            target.copy_(grad)
        if residual is not None:
            target.add_(residual, alpha=self.plan.release)
        lane.waiting.discard(i)

    def _send_ready(self) -> None:
        """Send full buckets in their order: without negotiation that order has to be the same on every rank."""
        while self._next_lane < len(self._lanes) and not self._lanes[self._next_lane].waiting:
            lane = self._lanes[self._next_lane]
            self._next_lane += 1
            compressor, ctx = self._compressor(lane), self._context(lane)
            # All before the sum begins, because it may be made in place, on the very buffer that was encoded.
            if compressor.keeps_residual:
                lane.payload, lane.pending, sound = compressor.send(self.ops, ctx, lane.flat, lane.residual)
                lane.nonfinite = not bool(sound)
            else:
                lane.payload = compressor.encode(self.ops, ctx, lane.flat)
                if self._ladder.settles(self.plan) and lane.bucket.dtype != DENSE_ONLY and not compressor.narrow:
                    # A narrow payload may overflow: it is sent again, and the sum tells.
                    lane.nonfinite = not bool(compressor.sound(self.ops, lane.flat, lane.payload))
                if lane.residual is not None and self.plan.release:
                    lane.pending = unreleased(lane.residual, self.plan.release)
            name = self._ladder.tensor_name(self._prefix, lane.bucket.number, self.plan)
            lane.handle = self.transport.start(lane.payload, name)
            self.meter.sum_begins(lane.bucket.number, functools.partial(self.transport.done, lane.handle))

    def _send_rest(self) -> np.ndarray:
        """Fill in what the backward pass did not deliver, and send; returns which parameters have a gradient here."""
        used = np.array([parameter.grad is not None for parameter in self.parameters])
        if self.idle:
            return np.ones_like(used)
        for i, version in self._versions.items():
            grad = self.parameters[i].grad
            if grad is None or grad._version != version:
                raise RuntimeError(
                    "A gradient was changed after backward() and before the ranks' gradients were exchanged, so the "
                    "change would be lost. Call optimizer.synchronize() first, then clip or unscale, then "
                    "`with optimizer.skip_synchronize(): optimizer.step()`."
                )
        with self.meter.codec(), torch.no_grad():
            for lane in self._lanes:
                for i in tuple(lane.waiting):
                    self._pack(i, self.parameters[i].grad)
            self._send_ready()
        return used

    def _slot(self, learning_rate: float) -> SideSlot:
        checksum = 0
        if not self.idle:
            for lane in self._lanes:
                if lane.bucket.dtype != DENSE_ONLY:
                    checksum += sum(int(self.ops.checksum(array)) for array in self._context(lane).state)
        times = self.meter.last
        loss = float(self.loss)
        return SideSlot(
            float(any(lane.nonfinite for lane in self._lanes)),
            *split_checksum(checksum),
            *times,
            loss=0.0 if math.isnan(loss) else loss,
            has_loss=float(not math.isnan(loss)),
            learning_rate=learning_rate,
            **self._norms(),
        )

    def _norms(self) -> dict[str, float]:
        """Norms of the gradients, which are still this rank's own, and of what sending leaves behind."""
        if not self.plan.gauge or self.idle:
            return {}
        with self.meter.codec():
            fresh = [
                p.grad.coalesce().values() if p.grad.is_sparse else p.grad
                for p in self.parameters
                if p.grad is not None
            ]
            left = [lane.pending for lane in self._lanes if lane.pending is not None]
            keeps = self._ladder.compressors[self.plan.level].keeps_residual
            return {"gradient_norm": _norm(fresh), "residual_norm": _norm(left if keeps else [])}

    def _decode(self, lane: _Lane) -> None:
        """Sum of payloads -> sum of gradients, in ``lane.sum``."""
        compressor = self._compressor(lane)
        if compressor.narrow and not bool(self.ops.all_finite(lane.total)):
            # Every rank holds this same sum, so every rank sends the bucket again, in full width.
            name = self._ladder.tensor_name(self._prefix, lane.bucket.number, self.plan) + ".again"
            lane.total = lane.sum = self.transport.wait(self.transport.start(lane.flat, name))
            return
        lane.sum = compressor.decode(self.ops, self._context(lane), lane.total)

    def _sums_are_finite(self) -> bool:
        return all(bool(self.ops.all_finite(lane.total)) for lane in self._lanes if lane.bucket.dtype != DENSE_ONLY)

    def _settle(self, healthy: bool) -> None:
        """Advance contexts, or undo the step where a rank's gradient was not finite."""
        for lane in self._lanes:
            lane.nonfinite = False
            if lane.bucket.dtype == DENSE_ONLY:
                continue
            compressor = self._compressor(lane)
            if healthy:
                ctx = compressor.advance(self.ops, self._context(lane), lane.total)
                lane.contexts[self.plan.level] = ctx
                if self.plan.warms:
                    learner = self._ladder.compressors[self.plan.warms]
                    ctx = learner.warm(self.ops, self._context(lane, self.plan.warms), lane.total)
                    lane.contexts[self.plan.warms] = ctx
            else:
                lane.pending = None
                if compressor.settles:  # a plain all-reduce would have delivered it: so does this
                    lane.sum = torch.full_like(lane.sum, math.nan)

    def _deliver(self, used: np.ndarray, users: np.ndarray, reduced_rows: dict[int, torch.Tensor]) -> None:
        """Write means to ``.grad``; a parameter that nobody used keeps ``grad=None``."""
        with torch.no_grad():
            for i, reduced in reduced_rows.items():
                if users[i]:
                    self.parameters[i].grad = reduced
            for i, (lane, part, shape) in self._place_of.items():
                if not users[i]:
                    continue
                parameter = self.parameters[i]
                mean = lane.sum[part].view(shape)
                grad = parameter.grad
                if grad is None or grad.is_sparse or i in self._sparse:
                    reduced = (mean * self._scale).to(parameter.dtype)
                    # One form on all ranks: optimizers tell them apart.
                    if i in self._sparse:
                        every = torch.arange(len(reduced), device=reduced.device)
                        reduced = as_sparse(every, reduced, reduced.shape)
                    parameter.grad = reduced
                elif grad.dtype == mean.dtype:
                    torch.mul(mean, self._scale, out=grad)
                else:
                    grad.copy_(mean * self._scale)


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    """Euclidean norm of all elements together."""
    if not tensors:
        return 0.0
    with torch.no_grad():
        # In half precision the norm of one tensor may be infinite already.
        norms = [
            torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)).float() for t in tensors
        ]
        return float(torch.linalg.vector_norm(torch.stack(norms)))
