"""The exchange in PyTorch: hooks fill buckets while the backward pass runs, ``finish`` brings the means back.

A gradient is copied once, into its bucket's flat buffer, together with its share of the residual; what comes back
is written to ``.grad``. Plain dense steps over Horovod need no bucket: a large gradient is summed where it is.
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

from hvdplus.adapters.torch.memory import alone_in_memory
from hvdplus.adapters.torch.ops import TorchOps
from hvdplus.adapters.torch.rows import SharedRows, as_sparse, rows_used
from hvdplus.buckets import DENSE_ONLY, SPARSE, Bucket, compressor_for, make_buckets
from hvdplus.calibration import codec_seconds
from hvdplus.compression import Array, Compressor, Context
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
    """What is sent before encoding: gradients plus released residual; or the bucket's only gradient itself."""
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
    reduced: Any = None
    """Mean of all ranks' gradients, or their sum where that is asked for, decoded."""
    nonfinite: bool = False


@dataclass
class _Cut:
    """All gradients, cut into lanes."""

    lanes: list[_Lane]
    prefix: str
    """Of the sums' names."""
    in_place: bool = False
    """Whether a gradient that has a lane of its own is summed where it is, if it can be, and comes back as a mean."""

    def __post_init__(self) -> None:
        self.place_of = {
            i: (lane, slice(*lane.bucket.offsets[place : place + 2]), lane.bucket.shapes[place])
            for lane in self.lanes
            for place, i in enumerate(lane.bucket.parameters)
        }

    def alone(self, lane: _Lane) -> bool:
        """Whether the lane is for one gradient, which is summed where it is."""
        return self.in_place and len(lane.bucket.parameters) == 1


PLAIN_BUCKET_BYTES = 64 << 10
"""Horovod sums what is ready at the same time as one: only small gradients are worth a copy into a bucket before."""


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
        self.buckets = self._make_buckets()
        self._codec_seconds: tuple[float, ...] = (0.0,) * len(ladder.names)
        """Of every level, for all parameters; 0: not tried."""
        if auto and transport.size > 1:  # with contexts and memory of its own
            ops = TorchOps(self._device)
            self._codec_seconds = codec_seconds(ops, self.buckets, ladder.compressors, transport)
        self.pilot = Pilot(ladder, settings, auto=auto, ranks=transport.size, costs=self._costs(), log=log)
        self._make_lanes()
        self._follow(self.pilot.plan)
        self._passes_left = [passes] * len(self.parameters)
        self._versions: dict[int, int] = {}
        self._next_lane = 0
        self._late: tuple[Plan, _Side] | None = None
        self._norms: list[torch.Tensor] = []
        """Of the gradients of this step, where the plan gauges them."""
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

    def leave_out_residuals(self) -> None:
        """From the coming step on; see ``Pilot.leave_out_residuals``."""
        if self.pilot.leave_out_residuals():
            self._follow(self.pilot.advance())

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
        for lane in self._now.lanes:
            with self.meter.awaited(lane.bucket.number):
                lane.total = lane.reduced = self.transport.wait(lane.handle)
            if not self._now.in_place:
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
        for lane in self._now.lanes:
            lane.waiting = set(lane.bucket.parameters)
            lane.payload = lane.handle = lane.total = lane.reduced = None  # memory that the forward pass can have
            if self._now.alone(lane):
                lane.flat = lane.flat.new_empty(0)
        self._versions.clear()
        self._next_lane = 0
        self.restart()
        self.loss = math.nan
        self._unpaid = healthy and any(
            lane.pending is not None and not self._compressor(lane).keeps_residual for lane in self._now.lanes
        )
        before = self.plan
        self._follow(self.pilot.advance())
        self._hand_over(before.level)

    def _follow(self, plan: Plan) -> None:
        """The coming step's."""
        self.plan = plan
        self._now = self._plain if self._plain and self._ladder.plain(plan) else self._joined

    def _pay_again(self) -> None:
        """Before a step begins: did the script skip one that paid out a residual? All ranks skip alike."""
        if self._unpaid:
            self._unpaid = False
            self._follow(self.pilot.repeat())

    def commit(self) -> None:
        """The optimizer has taken the step: pending residuals become residuals."""
        self._unpaid = False
        for lane in self._joined.lanes:
            if lane.pending is not None:
                if lane.pending.data_ptr() == lane.flat.data_ptr():
                    # What was sent became its own remainder, in place: the old residual's memory is free instead.
                    lane.flat = torch.empty_like(lane.flat) if lane.residual is None else lane.residual
                # Neither released nor waiting in the coming plan: this step has paid out the last of it.
                outstanding = self.plan.release or self.plan.warms
                lane.residual, lane.pending = (lane.pending if outstanding else None), None
        self.meter.end_step()

    def _make_buckets(self, bucket_bytes: int = 0) -> tuple[Bucket, ...]:
        """Buckets of all parameters but those whose rows are shared. ``bucket_bytes``: 0 is what the settings say."""
        dense = [i for i in range(len(self.parameters)) if i not in self._rows]
        buckets = make_buckets(
            [tuple(self.parameters[i].shape) for i in dense],
            [str(self.parameters[i].dtype).removeprefix("torch.") for i in dense],
            bucket_bytes=bucket_bytes or self._settings.bucket_bytes,
            ranks=self.transport.size,
            seed=self._settings.seed,
        )
        return tuple(bucket._replace(parameters=tuple(dense[i] for i in bucket.parameters)) for bucket in buckets)

    def _costs(self) -> tuple[LevelCost, ...]:
        """What every level costs, with parameters whose rows are shared left out. At ``none`` Horovod makes sums as it
        likes: as many as buckets is what comes nearest."""
        total = sum(p.numel() for p in self.parameters)
        share = sum(bucket.spec.size for bucket in self.buckets) / total if total else 0.0
        return level_costs(self.buckets, self._ladder.compressors, [share * s for s in self._codec_seconds])

    def _make_lanes(self) -> None:
        self._joined = _Cut([] if self.idle else [self._make_lane(bucket) for bucket in self.buckets], self._prefix)
        self._plain: _Cut | None = None
        """Lanes of plain dense steps, where nothing has to be joined or encoded."""
        if self.transport.negotiates and not self.idle:
            lanes = [self._make_lane(bucket) for bucket in self._make_buckets(PLAIN_BUCKET_BYTES)]
            self._plain = _Cut(lanes, f"{self._prefix}.plain", in_place=True)

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
            self.buckets = self._make_buckets()
            self.pilot.resize(self._costs())
            self._make_lanes()
            self._follow(self.plan)

    def _make_lane(self, bucket: Bucket) -> _Lane:
        dtype = torch.float64 if bucket.dtype == DENSE_ONLY else torch.float32
        flat = torch.zeros(0, dtype=dtype, device=self._device)  # its memory comes with the first gradient
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
            for lane in self._now.lanes:
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
            with self.meter.codec():
                self._send_full(self._pack(i, parameter.grad))

    def _pack(self, i: int, grad: torch.Tensor | None) -> _Lane:
        """Copy one gradient into its bucket, together with its share of the residual, or let it be its own lane's."""
        lane, part, shape = self._now.place_of[i]
        lane.pending = None  # of a step that was never taken
        lane.waiting.discard(i)
        if grad is not None and grad.is_sparse:
            grad = grad.to_dense()
        if self.plan.gauge and grad is not None:
            self._norms.append(_norm(grad))
        if self._now.alone(lane):
            if grad is None:
                grad = lane.flat.new_zeros(shape)
            # The backward pass may still read memory that is not the gradient's alone. As ``data``, because Horovod may
            # count its writing as a change of the gradient.
            own = grad if alone_in_memory(grad) else grad.clone()
            lane.flat = own.data.to(lane.flat.dtype).contiguous()
            return lane
        if not lane.flat.numel():
            lane.flat = lane.flat.new_zeros(lane.bucket.spec.size)
        target = lane.flat[part].view(shape)
        residual = lane.residual[part].view(shape) if lane.residual is not None and self.plan.release else None
        with torch.no_grad():
            if grad is None:
                target.zero_()
            elif residual is not None and grad.dtype == target.dtype:
                torch.add(grad, residual, alpha=self.plan.release, out=target)
                residual = None
            else:
                target.copy_(grad)
            if residual is not None:
                target.add_(residual, alpha=self.plan.release)
        return lane

    def _send_full(self, lane: _Lane) -> None:
        """Send a lane that nothing is missing from. Without negotiation their order is the same on every rank."""
        if self.transport.negotiates:
            if not lane.waiting:
                self._send(lane)
            return
        while self._next_lane < len(self._now.lanes) and not self._now.lanes[self._next_lane].waiting:
            self._next_lane += 1
            self._send(self._now.lanes[self._next_lane - 1])

    def _send(self, lane: _Lane) -> None:
        lane.payload = lane.flat if self._now.in_place else self._encode(lane)
        name = self._ladder.tensor_name(self._now.prefix, lane.bucket.number, self.plan)
        lane.handle = self.transport.start(lane.payload, name, self._scale if self._now.in_place else 1.0)
        self.meter.sum_begins(lane.bucket.number, functools.partial(self.transport.done, lane.handle))

    def _encode(self, lane: _Lane) -> Array:
        """The payload. All that is read of what is sent is read here: its sum may be made in place."""
        compressor, ctx = self._compressor(lane), self._context(lane)
        if compressor.keeps_residual:
            payload, lane.pending, sound = compressor.send(self.ops, ctx, lane.flat, lane.residual)
            lane.nonfinite = not bool(sound)
            return payload
        payload = compressor.encode(self.ops, ctx, lane.flat)
        if self._ladder.settles(self.plan) and lane.bucket.dtype != DENSE_ONLY and not compressor.narrow:
            # A narrow payload may overflow: it is sent again, and the sum tells.
            lane.nonfinite = not bool(compressor.sound(self.ops, lane.flat, payload))
        if lane.residual is not None and self.plan.release:
            lane.pending = unreleased(lane.residual, self.plan.release)
        return payload

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
            for lane in self._now.lanes:
                if lane.handle is None:
                    for i in tuple(lane.waiting):
                        self._pack(i, self.parameters[i].grad)
                    self._send(lane)
        return used

    def _slot(self, learning_rate: float) -> SideSlot:
        checksum = 0
        if not self.idle and not self._now.in_place:
            for lane in self._now.lanes:
                if lane.bucket.dtype != DENSE_ONLY:
                    checksum += sum(int(self.ops.checksum(array)) for array in self._context(lane).state)
        times = self.meter.last
        loss = float(self.loss)
        return SideSlot(
            float(any(lane.nonfinite for lane in self._now.lanes)),
            *split_checksum(checksum),
            *times,
            loss=0.0 if math.isnan(loss) else loss,
            has_loss=float(not math.isnan(loss)),
            learning_rate=learning_rate,
            **self._gauged(),
        )

    def _gauged(self) -> dict[str, float]:
        """Norms of this rank's own gradients, taken when they were packed, and of what sending leaves behind."""
        if not self.plan.gauge or self.idle:
            return {}
        with self.meter.codec():
            grads = [self.parameters[i].grad for i in self._rows]
            rows = [_norm(grad.coalesce().values()) for grad in grads if grad is not None]
            left = [_norm(lane.pending) for lane in self._now.lanes if lane.pending is not None]
            keeps = self._ladder.compressors[self.plan.level].keeps_residual
            gradient, self._norms = _together([*self._norms, *rows]), []
            return {"gradient_norm": gradient, "residual_norm": _together(left if keeps else [])}

    def _decode(self, lane: _Lane) -> None:
        """Sum of payloads -> mean of gradients, in ``lane.reduced``."""
        compressor = self._compressor(lane)
        if compressor.narrow and not bool(self.ops.all_finite(lane.total)):
            # Every rank holds this same sum, so every rank sends the bucket again, in full width.
            name = self._ladder.tensor_name(self._now.prefix, lane.bucket.number, self.plan) + ".again"
            handle = self.transport.start(lane.flat, name, self._scale)
            lane.total = lane.reduced = self.transport.wait(handle)
            return
        lane.reduced = compressor.mean(self.ops, self._context(lane), lane.total, self._scale)

    def _sums_are_finite(self) -> bool:
        return all(bool(self.ops.all_finite(lane.total)) for lane in self._now.lanes if lane.bucket.dtype != DENSE_ONLY)

    def _settle(self, healthy: bool) -> None:
        """Advance contexts, or undo the step where a rank's gradient was not finite."""
        for lane in self._now.lanes:
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
                    lane.reduced = torch.full_like(lane.reduced, math.nan)

    def _deliver(self, used: np.ndarray, users: np.ndarray, reduced_rows: dict[int, torch.Tensor]) -> None:
        """Write means to ``.grad``; a parameter that nobody used keeps ``grad=None``.

        As in Horovod, a gradient keeps its identity and gets the mean's memory, where neither is anybody else's.
        """
        with torch.no_grad():
            free = set()  # lanes whose means lie in memory that was made for them
            for lane in self._now.lanes if not self._now.in_place else ():
                sent = [array.data_ptr() for array in (lane.flat, lane.payload) if array is not None]
                if lane.reduced.data_ptr() not in sent:
                    free.add(lane.bucket.number)
            for i, reduced in reduced_rows.items():
                if users[i]:
                    self.parameters[i].grad = reduced
            for i, (lane, part, shape) in self._now.place_of.items():
                if not users[i]:
                    continue
                parameter = self.parameters[i]
                mean = lane.reduced if self._now.alone(lane) else lane.reduced[part].view(shape)
                grad = parameter.grad
                if grad is None or grad.is_sparse or i in self._sparse:
                    reduced = mean.to(parameter.dtype, copy=True)
                    # One form on all ranks: optimizers tell them apart.
                    if i in self._sparse:
                        every = torch.arange(len(reduced), device=reduced.device)
                        reduced = as_sparse(every, reduced, reduced.shape)
                    parameter.grad = reduced
                elif grad.data_ptr() == mean.data_ptr():
                    pass  # was summed where it is
                elif lane.bucket.number in free and _takes(grad, mean):
                    grad.set_(mean)
                else:
                    grad.copy_(mean)


def _takes(grad: torch.Tensor, mean: torch.Tensor) -> bool:
    """Whether ``grad`` can have the memory of ``mean``: it is alike, and its own memory is no part of a buffer."""
    like = grad.dtype == mean.dtype and grad.is_contiguous()
    return like and grad.untyped_storage().nbytes() == grad.nbytes and alone_in_memory(grad)


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    """Euclidean norm; not in half precision, where it may be infinite already."""
    with torch.no_grad():
        wide = torch.promote_types(tensor.dtype, torch.float32)
        norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=wide)
        return norm.float()


def _together(norms: Sequence[torch.Tensor]) -> float:
    """Norm of all elements of tensors with ``norms``."""
    return float(torch.linalg.vector_norm(torch.stack(list(norms)))) if norms else 0.0
