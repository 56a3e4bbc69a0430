"""The exchange in PyTorch: hooks fill buckets while the backward pass runs, ``finish`` brings the means back.

A gradient is copied once, into its bucket's flat buffer, together with its share of the residual; what comes back
is written to ``.grad``. Plain dense steps over Horovod need no bucket: every gradient is summed where it is.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from hvdplus import saved
from hvdplus.adapters.torch.lanes import Cut, Lane, Side
from hvdplus.adapters.torch.memory import alone_in_memory
from hvdplus.adapters.torch.ops import make_ops
from hvdplus.adapters.torch.rows import SharedRows, rows_in_use, rows_used
from hvdplus.adapters.torch.tensors import all_true, like, norm, norm_of_all, real_view, takes, type_name
from hvdplus.buckets import DENSE_ONLY, SPARSE, Bucket, bytes_per_step, compressor_for, make_buckets
from hvdplus.calibration import codec_seconds
from hvdplus.compression import Array, Compressor, Context, NoCompression
from hvdplus.costmodel import LevelCost, level_costs
from hvdplus.exchange import Ladder, Plan, SideSlot, check_newcomers, read_side, side_tensor, split_checksum
from hvdplus.log.runlog import RunLog
from hvdplus.meter import StepMeter
from hvdplus.pilot import Pilot
from hvdplus.residual import unreleased
from hvdplus.settings import Settings
from hvdplus.transport import Grouping, Transport

FRAMEWORK = "torch"
"""Whose states these are."""
PLAIN_BUCKET_BYTES = 2 << 20
"""Of gradients that are handed to Horovod together. A sum costs some 0.15 ms of processor wherever the link is fast."""


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
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """``parameters``: those that have gradients, in the same order on every rank. ``prefix`` begins all names.

        ``grad_scaler``: what scales the script's losses, and so its gradients.
        """
        self.parameters = list(parameters)
        self._place = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        self.transport = transport
        self.passes = passes
        self.meter = StepMeter()
        self.loss = math.nan
        """Loss of the current step for the run log; NaN: not reported."""
        self._prefix = prefix
        self._ladder = ladder
        self._average = average
        self._scale = 1.0 / transport.size if average else 1.0
        self._alone = transport.size == 1 and (auto or ladder.names == ("none",))
        self.idle = self._alone
        """Alone there is nobody to exchange with: gradients stay untouched unless a level is asked for by name, or a
        checkpoint of more ranks brings what is still to be paid out."""
        self._device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.ops = make_ops(self._device)
        self._settings = settings
        self._sparse_as_dense = sparse_as_dense
        self._agreed = False
        """Whether ranks have told each other what the first step has to know: which gradients are sparse, and whether
        all go on from the same state."""
        self._sorted = False
        """Whether sparse gradients have been told from dense ones, and in which order gradients become ready, which the
        first step shows."""
        self._order = list(reversed(range(len(self.parameters))))
        """Parameters as their gradients become ready on rank 0; before the first step, last to first."""
        self._ready: list[int] = []
        """As they do on this rank, in the first step."""
        self._sparse: set[int] = set()
        """Parameters whose gradients are sparse on some rank, and so come back sparse on all."""
        self._rows: dict[int, SharedRows] = {}
        """Those of them whose rows are shared."""
        self.buckets = self._make_buckets()
        self._codec_seconds: tuple[float, ...] = (0.0,) * len(ladder.names)
        """Of every level, for all parameters; 0: not tried."""
        if auto and transport.size > 1:  # with contexts and memory of its own
            ops = make_ops(self._device)
            self._codec_seconds = codec_seconds(ops, self.buckets, ladder.compressors, transport)
        self.pilot = Pilot(ladder, settings, auto=auto, ranks=transport.size, costs=self._costs(), log=log)
        self._make_lanes()
        self._follow(self.pilot.plan)
        self._passes_left = [passes] * len(self.parameters)
        self._versions: dict[int, tuple[torch.Tensor, int]] = {}
        """Parameter -> gradient that is on its way, and how often it had been written to: how a change is noticed."""
        self._next_lane = 0
        self._late: tuple[Plan, Side] | None = None
        self._norms: list[torch.Tensor] = []
        """Of the gradients of this step, where the plan gauges them."""
        self._unpaid = False
        """Whether a residual's share was sent in a step that was not taken (yet)."""
        self._side_count = 0
        self.grad_scaler = grad_scaler
        self._loss_scale = 1.0
        """Of the present step."""
        self._resumed = ""
        """Digest of what was loaded and is not yet known to be the same on all ranks."""
        self._consolidated = False
        """Whether residuals are all ranks' mean, so that one rank's state is everybody's."""
        self._hooks: dict[int, Any] = {}
        """By the ids of their parameters."""
        self._listen(self.parameters)

    @property
    def in_flight(self) -> bool:
        """Whether gradients of the current step are on their way."""
        return bool(self._versions)

    def leave_out_residuals(self) -> None:
        """From the coming step on; see ``Pilot.leave_out_residuals``."""
        if self.pilot.leave_out_residuals():
            self._follow(self.pilot.advance())

    def abandon(self) -> None:
        """Forget what is on its way, as the transport has failed or has ended."""
        self._late, self._norms, self._ready, self._next_lane = None, [], [], 0
        self._versions.clear()
        self.restart()
        self.meter = StepMeter()
        for lane in (*self._joined.lanes, *(self._plain.lanes if self._plain else ())):
            lane.waiting, lane.sound = set(lane.bucket.parameters), None
            lane.payload = lane.handle = lane.total = lane.reduced = lane.pending = None

    def close(self) -> None:
        """Let gradients be: another exchange takes over."""
        self.abandon()
        for hook in self._hooks.values():
            hook.remove()

    def restart(self) -> None:
        """Count backward passes anew, after their number or the optimizer's state changed between two steps."""
        self._passes_left = [self.passes] * len(self.parameters)

    def state(self) -> dict[str, Any]:
        """All that coming steps depend on, besides weights and the optimizer's own state; between two steps.

        Tensors, numbers, text, and lists and dictionaries of them. Residuals are this rank's own, unless they were
        consolidated; all else is the same on every rank.
        """
        contexts = [
            {
                "parameters": list(lane.bucket.parameters),
                "levels": {
                    self._ladder.names[level]: [array.clone() for array in ctx.state]
                    for level, ctx in lane.contexts.items()
                },
            }
            for lane in self._joined.lanes
        ]
        return {
            "format": saved.FORMAT,
            "framework": FRAMEWORK,
            "ranks": self.transport.size,
            "rank": None if self._consolidated else self.transport.rank,
            "shapes": [list(parameter.shape) for parameter in self.parameters],
            "first_step": (
                {"order": list(self._order), "sparse": sorted(self._sparse), "rows": sorted(self._rows)}
                if self._sorted
                else None
            ),
            "pilot": self.pilot.state(),
            "unpaid": self._unpaid,
            "contexts": contexts,
            "residuals": self._residuals(),
        }

    def consolidate(self) -> None:
        """Give every rank the mean of all ranks' residuals, which changes nothing in what they come to."""
        lanes = [lane for lane in self._joined.lanes if lane.residual is not None]
        handles = [
            self.transport.start(lane.residual, f"{self._prefix}.mean.{lane.bucket.number}", 1.0 / self.transport.size)
            for lane in lanes
        ]
        for lane, handle in zip(lanes, handles, strict=True):
            lane.residual = self.transport.wait(handle)
        self._consolidated = True

    def load(self, state: Mapping[str, Any]) -> str:
        """Go on where the exchange was that gave ``state``; returns what has to be the same on all ranks, of which the
        next step makes sure.

        From a job with other levels, or another number of ranks, come the residuals alone, so that what was held
        back is not lost, but for that of ranks that are gone.

        Raises:
            ValueError: the state is of another model, or of another version of hvdplus.
            RuntimeError: gradients are on their way.
        """
        if self.in_flight:
            raise RuntimeError(
                "load_state_dict() was called between backward() and step(), with gradients on their way."
            )
        saved.check(state, [list(parameter.shape) for parameter in self.parameters])
        same_ranks, mine, share = saved.claim(state, self.transport, average=self._average)
        if self.idle:
            if not (mine and saved.holds_back(state)):
                return ""
            self.idle = False  # until all is paid out; without hooks, as nobody waits for this rank
        everybodys = state["rank"] is None
        own = state.get("framework", FRAMEWORK) == FRAMEWORK
        shown = (own and state["first_step"]) or {
            "order": reversed(range(len(self.parameters))),
            "sparse": (),
            "rows": (),
        }
        self._sorted = own and state["first_step"] is not None
        self._order, self._sparse = list(shown["order"]), set(shown["sparse"])
        self._rows = {i: self._shared_rows(i) for i in shown["rows"]}
        self._cut_anew()
        if self._late:
            self._late[1].total()
        self._late, self._norms, self._ready = None, [], []
        self._consolidated = everybodys
        resumed = own and same_ranks and self.pilot.load(state["pilot"])
        self._unpaid = resumed and state.get("unpaid", False)
        contexts = {tuple(each["parameters"]): each["levels"] for each in state["contexts"]} if resumed else {}
        for lane in self._joined.lanes:
            for name, arrays in contexts.get(lane.bucket.parameters, {}).items():
                arrays = tuple(array.to(self._device, copy=True) for array in arrays)
                lane.contexts[self._ladder.names.index(name)] = Context(lane.bucket.spec, 0, arrays)
        for i, residual in state["residuals"].items():
            self._hold_back(i, residual if mine else None, share)
        if state["residuals"] and not resumed:
            self.pilot.pay_out()
        self._follow(self.pilot.plan)
        arrays = [array.cpu().numpy() for levels in contexts.values() for those in levels.values() for array in those]
        plain = state["ranks"], everybodys, resumed, state["pilot"], self._sorted and state["first_step"], self._unpaid
        self._agreed, self._resumed = False, saved.digest(*plain, arrays=arrays)
        return self._resumed

    def finish(
        self, learning_rate: float = 0.0, newcomers: Sequence[torch.nn.Parameter] = (), absent: float = 0.0
    ) -> None:
        """Send what is left, wait, and write the reduced gradients to ``.grad``. All ranks call it once a step.

        ``learning_rate``: of the coming step, for the pilot; 0: unknown. ``newcomers``: parameters that are not among
        ``parameters`` yet; their gradients are summed besides, dense (see ``admit``). ``absent``: as in ``SideSlot``.
        """
        if not self._versions:
            self._begin()
        self._sort_out_sparse()
        used = self._send_rest()
        with self.meter.codec():
            for rows in self._rows.values():
                rows.start()
        if self._device.type == "cuda" and not self.idle:
            # All gradients are on their way, and the host has nothing left to do but to look at the device for the side
            # tensor. What the device still computes is neither that nor waiting for sums, which wait for it, too.
            torch.cuda.current_stream(self._device).synchronize()
        slot = self._slot(learning_rate)._replace(newcomers=len(newcomers), absent=absent)
        turned, mark = self._turned_sparse(), self.transport.size + 1
        told = [mark if turns else has for has, turns in zip(used, turned, strict=True)]
        side = self._start_side(torch.from_numpy(side_tensor(self.transport.rank, self.transport.size, slot, told)))
        if self._late:  # begun one step ago, read while there is something else to wait for
            plan, late = self._late
            self.pilot.observe(plan, late.total())
        if self._now.in_place:
            with self.meter.awaited(*(lane.bucket.number for lane in self._now.lanes)):
                for lane in self._now.lanes:
                    lane.reduced = self.transport.wait(lane.handle)
        else:
            for lane in self._now.lanes:
                with self.meter.awaited(lane.bucket.number):
                    lane.total = self.transport.wait(lane.handle)
                with self.meter.codec():
                    self._decode(lane)
            with self.meter.codec():
                self._send_overflowed_again()
        with self.meter.exposed_comm():
            for rows in self._rows.values():
                rows.send()
        self.pilot.row_bytes = sum(rows.sent_bytes for rows in self._rows.values())
        awaited = self._ladder.settles(self.plan) and not self.idle
        here = awaited or self._now.carrier is not None
        users, healthy = used, True
        if here or not all(used):  # whether anybody used it is only of interest to those who did not
            with self.meter.exposed_comm():
                slots, counts = read_side(side.total(), self.transport.size)
            # More than all ranks' ones: a rank's mark is among them, whatever scaling there and back has rounded.
            turned, users = [count > mark - 0.5 for count in counts], [count > 0 for count in counts]
            if awaited:
                with self.meter.codec():
                    # Finite payloads can still have a sum beyond float32; it is the same on every rank.
                    healthy = not any(slot.nonfinite for slot in slots) and self._sums_are_finite()
                    self._settle(healthy)
        if newcomers:
            check_newcomers(read_side(side.total(), self.transport.size)[0])
            self._exchange_newcomers(newcomers)
        with self.meter.exposed_comm():
            reduced_rows = {i: rows.receive(self._scale) for i, rows in self._rows.items()}
        if self.plan.sounding:
            self._sound(side)
        self._sparse.update(i for i, turns in enumerate(turned) if turns)
        with self.meter.codec():
            self._deliver(users, reduced_rows)
        if here:
            self.pilot.observe(self.plan, side.total(), healthy)
            self._late = None
        else:
            self._late = (self.plan, side)
        self.pilot.unread_steps = int(not here)
        for lane in self._now.lanes:
            lane.waiting = set(lane.bucket.parameters)
            lane.payload = lane.handle = lane.total = lane.reduced = None  # memory that the forward pass can have
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

    def _exchange_newcomers(self, newcomers: Sequence[torch.nn.Parameter]) -> None:
        """As ``_deliver``, but one by one; as newcomers are rare, ranks just tell each other who has gradients."""
        forms = [(p.grad is not None, p.grad is not None and p.grad.is_sparse) for p in newcomers]
        used, sparse = np.any(self.transport.gather_objects(forms), axis=0).T
        handles = []
        for number, parameter in enumerate(newcomers):
            grad = real_view(
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().to_dense()
            )
            wide = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True).contiguous().view(-1)
            handles.append(self.transport.start(wide, f"{self._prefix}.new.{number}", self._scale))
        with torch.no_grad():
            for parameter, handle, anybody, rows_only in zip(newcomers, handles, used, sparse, strict=True):
                mean = like(self.transport.wait(handle).view(real_view(parameter).shape), parameter)
                if rows_only:
                    parameter.grad = rows_in_use(mean)
                elif parameter.grad is None or parameter.grad.is_sparse or parameter.is_complex():
                    parameter.grad = mean if anybody else None
                else:
                    parameter.grad.copy_(mean)

    def admit(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """``parameters``, those of before among them, are exchanged from the coming step on. All ranks call it alike.

        What was held back of a parameter stays with it, and goes with it, too; buckets that stay the same keep what
        their levels have learned.
        """
        before, residuals, learned = self.parameters, self._residuals(), {}
        for lane in self._joined.lanes:
            learned[tuple(id(before[i]) for i in lane.bucket.parameters)] = lane.contexts
        known = sum(p.numel() for p in before)
        self.parameters = list(parameters)
        self._place = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        moved = {i: self._place[id(p)] for i, p in enumerate(before) if id(p) in self._place}  # others are gone
        for gone in self._hooks.keys() - self._place.keys():
            self._hooks.pop(gone).remove()
        stayed = set(moved.values())
        self._listen(p for i, p in enumerate(self.parameters) if i not in stayed)
        late = [i for i in reversed(range(len(self.parameters))) if i not in stayed]
        self._order = [*(moved[i] for i in self._order if i in moved), *late]
        self._sparse = {moved[i] for i in self._sparse if i in moved}
        self._rows = {moved[i]: self._shared_rows(moved[i]) for i in self._rows if i in moved}
        more = sum(p.numel() for p in self.parameters) / max(known, 1)
        self._codec_seconds = tuple(seconds * more for seconds in self._codec_seconds)
        self._cut_anew()
        for lane in self._joined.lanes:
            contexts = learned.get(tuple(id(self.parameters[i]) for i in lane.bucket.parameters), {})
            lane.contexts = {level: ctx._replace(spec=lane.bucket.spec) for level, ctx in contexts.items()}
        for i in residuals.keys() & moved.keys():
            self._hold_back(moved[i], residuals[i])
        self.restart()
        self._follow(self.plan)

    def _residuals(self) -> dict[int, torch.Tensor]:
        """Parameter -> what is held back of it."""
        return {
            i: lane.residual[part].view(shape).clone()
            for i, (lane, part, shape) in self._joined.place_of.items()
            if lane.residual is not None
        }

    def _hold_back(self, i: int, residual: torch.Tensor | None, share: float = 1.0) -> None:
        """None: nothing, but there is a residual; whether there is one has to be the same on all ranks."""
        lane, part, _ = self._joined.place_of[i]
        if lane.residual is None:
            lane.residual = torch.zeros(lane.bucket.spec.size, dtype=lane.flat.dtype, device=self._device)
        if residual is not None:
            lane.residual[part].copy_(residual.reshape(-1)).mul_(share)

    def _follow(self, plan: Plan) -> None:
        """The coming step's."""
        self.plan = plan
        self._now = self._plain if self._plain and self._ladder.plain(plan) else self._joined
        self._together = not (plan.release or self._ladder.compressors[plan.level].keeps_residual)
        """Whether a bucket's gradients, as nothing is added to them, are taken at once when the last one is ready."""

    def _begin(self) -> None:
        """Before a step begins: how large are losses, and did the script skip a step that paid out a residual?

        All ranks scale and skip alike.
        """
        if self.grad_scaler:
            self._loss_scale = self.grad_scaler.get_scale()
        if self._unpaid:
            self._unpaid = False
            self._follow(self.pilot.repeat())

    def commit(self) -> None:
        """The optimizer has taken the step: pending residuals become residuals."""
        self._unpaid = self._consolidated = False
        for lane in self._joined.lanes:
            if lane.pending is not None:
                if lane.pending.data_ptr() == lane.flat.data_ptr():
                    # What was sent became its own remainder, in place: the old residual's memory is free instead.
                    lane.flat = torch.empty_like(lane.flat) if lane.residual is None else lane.residual
                # Neither released nor waiting in the coming plan: this step has paid out the last of it.
                outstanding = self.plan.release or self.plan.warms
                lane.residual, lane.pending = (lane.pending if outstanding else None), None
        if self._alone and not self.idle and all(lane.residual is None for lane in self._joined.lanes):
            self.idle = True
            self._make_lanes()
            self._follow(self.plan)
        self.meter.end_step()

    def _make_buckets(self, *, plain: bool = False) -> tuple[Bucket, ...]:
        """Buckets of all parameters but those whose rows are shared; of plain dense steps, or of all others."""
        dense = [i for i in reversed(self._order) if i not in self._rows]
        buckets = make_buckets(
            [tuple(real_view(self.parameters[i]).shape) for i in dense],
            [DENSE_ONLY if self.parameters[i].is_complex() else type_name(self.parameters[i]) for i in dense],
            bucket_bytes=PLAIN_BUCKET_BYTES if plain else self._settings.bucket_bytes,
            ranks=self.transport.size,
            seed=self._settings.seed,
            tapering=plain,
        )
        return tuple(bucket._replace(parameters=tuple(dense[i] for i in bucket.parameters)) for bucket in buckets)

    def _costs(self) -> tuple[LevelCost, ...]:
        """What every level costs, with parameters whose rows are shared left out. At ``none`` Horovod makes sums as it
        likes: as many as buckets is what comes nearest, but the last that leaves is that of plain dense steps."""
        total = sum(p.numel() for p in self.parameters)
        share = sum(bucket.spec.size for bucket in self.buckets) / total if total else 0.0
        dense, *others = level_costs(self.buckets, self._ladder.compressors, [share * s for s in self._codec_seconds])
        if self.transport.negotiates and self._ladder.plain(Plan()):
            last = self._make_buckets(plain=True)[-1:]
            dense = dense._replace(last_bytes=bytes_per_step(last, NoCompression()))
        return dense, *others

    def _make_lanes(self) -> None:
        self._joined = Cut([] if self.idle else [self._make_lane(bucket) for bucket in self.buckets], self._prefix)
        self._plain: Cut | None = None
        """Lanes of plain dense steps, where nothing has to be joined or encoded."""
        if self.transport.negotiates and not self.idle:
            lanes = [self._make_lane(bucket) for bucket in self._make_buckets(plain=True)]
            self._plain = Cut(lanes, f"{self._prefix}.plain", in_place=True)

    def _sort_out_sparse(self) -> None:
        """In the first step, before anything is sent: in which order do gradients become ready, and which are so sparse
        that only rows are exchanged?

        Raises:
            RuntimeError: on every rank, if ranks would go on from different states.
        """
        if self._agreed or self.idle:
            return
        self._agreed = True
        rows = {i: rows_used(p) for i, p in enumerate(self.parameters)}
        counts = {i: count for i, count in rows.items() if count is not None}
        told = self.transport.gather_objects((counts, self._resumed, self._ready))
        saved.check_same([digest for _, digest, _ in told])
        if self._sorted:
            return
        self._sorted = True
        used, ready = [counts for counts, *_ in told], told[0][2]
        # A script may have gone back over its first steps: what was ready twice counts as it first was.
        before, self._order, self._ready = self._order, list(dict.fromkeys([*ready, *self._order])), []
        self._sparse = set().union(*used)
        residuals = self._residuals()  # of a state that knew nothing of a first step
        for i in sorted(self._sparse - residuals.keys()) if not self._sparse_as_dense else ():
            parameter = self.parameters[i]
            few = sum(theirs.get(i, 0) for theirs in used) <= SPARSE * len(parameter)
            if few and not parameter.is_complex():  # rows are added up as real numbers
                self._rows[i] = self._shared_rows(i)
        if self._rows or self._order != before:
            self._cut_anew()
            for i, residual in residuals.items():
                self._hold_back(i, residual)
            self._follow(self.plan)

    def _turned_sparse(self) -> list[bool]:
        """Which gradients are sparse here and were not in the first step."""
        if self.idle:
            return [False] * len(self.parameters)
        grads = [parameter.grad for parameter in self.parameters]
        return [g is not None and g.is_sparse and i not in self._sparse for i, g in enumerate(grads)]

    def _cut_anew(self) -> None:
        """Buckets without the parameters whose rows are shared."""
        self.buckets = self._make_buckets()
        self.pilot.resize(self._costs())
        self._make_lanes()

    def _shared_rows(self, i: int) -> SharedRows:
        return SharedRows(self.parameters[i], self.transport, self.ops, f"{self._prefix}.rows.{i}")

    def _make_lane(self, bucket: Bucket) -> Lane:
        dtype = torch.float64 if bucket.dtype == DENSE_ONLY else torch.float32
        flat = torch.zeros(0, dtype=dtype, device=self._device)  # its memory comes with the first gradient
        return Lane(bucket, flat, waiting=set(bucket.parameters))

    def _compressor(self, lane: Lane) -> Compressor:
        return compressor_for(lane.bucket, self._ladder.compressors[self.plan.level])

    def _context(self, lane: Lane, level: int | None = None) -> Context:
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

    def _listen(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        if not self._alone:
            # One that is frozen now takes part without a hook.
            listening = [p for p in parameters if p.requires_grad]
            for p in listening:
                self._hooks[id(p)] = p.register_post_accumulate_grad_hook(self._make_hook())  # type: ignore[no-untyped-call]

    def _make_hook(self) -> Callable[[torch.Tensor], None]:
        me = weakref.ref(self)  # an optimizer that is gone must not go on exchanging

        def hook(parameter: torch.Tensor) -> None:
            exchange = me()
            if exchange is not None:
                exchange._gradient_ready(exchange._place[id(parameter)], parameter)

        return hook

    def _gradient_ready(self, i: int, parameter: torch.Tensor) -> None:
        if not self._versions:
            self._begin()
        left = self._passes_left[i] = self._passes_left[i] - 1
        if left < 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                f"Received: {self.passes - left} passes with backward_passes_per_step={self.passes}. Increase it to "
                "accumulate gradients locally."
            )
        if left:
            return
        grad = parameter.grad
        if grad is not None:
            self._versions[i] = grad, grad._version
            if not self._sorted:
                self._ready.append(i)
        if self._agreed and i not in self._rows:
            lane = self._now.place_of[i][0]
            if self._together and (self._still_waiting(lane, i) or lane is self._now.carrier):
                return
            self.meter.look()
            with self.meter.codec():
                if not self._together:
                    self._pack(i, grad)
                self._send_full(lane)

    @staticmethod
    def _still_waiting(lane: Lane, i: int) -> bool:
        """Whether the lane waits for more than parameter ``i``, which has its gradient now."""
        lane.pending = None  # of a step that was never taken
        lane.waiting.discard(i)
        return bool(lane.waiting)

    def _pack(self, i: int, grad: torch.Tensor | None) -> None:
        """Copy one gradient into its bucket, together with its share of the residual."""
        lane, part, shape = self._now.place_of[i]
        lane.pending = None  # of a step that was never taken
        lane.waiting.discard(i)
        if grad is not None and grad.is_sparse:
            grad = grad.to_dense()
        if self.plan.gauge and grad is not None:
            self._norms.append(norm(grad))
        if grad is not None:
            grad = real_view(grad)
        if not lane.flat.numel():
            lane.flat = lane.flat.new_zeros(lane.bucket.spec.size)
        target = lane.flat[part].view(shape)
        residual = lane.residual[part].view(shape) if lane.residual is not None and self.plan.release else None
        # Residuals are in units of the loss, whatever its scale; so is what is sent where a level keeps anything.
        share = self.plan.release * (self._loss_scale / self._sent_scale)
        with torch.no_grad():
            if grad is None:
                target.zero_()
            elif residual is not None and grad.dtype == target.dtype and self._sent_scale == 1:
                torch.add(grad, residual, alpha=share, out=target)
                residual = None
            else:
                target.copy_(grad)
                if self._sent_scale != 1:
                    target.mul_(1 / self._sent_scale)
            if residual is not None:
                target.add_(residual, alpha=share)

    @property
    def _sent_scale(self) -> float:
        """By how much what is sent is smaller than the scaled gradient. float16 alone is what scaling is made for."""
        return self._loss_scale if self._ladder.compressors[self.plan.level].settles else 1.0

    def _send_full(self, lane: Lane) -> None:
        """Send a lane that nothing is missing from. Without negotiation their order is the same on every rank."""
        if self.transport.negotiates:
            if not lane.waiting:
                self._send(lane)
            return
        while self._next_lane < len(self._now.lanes) and not self._now.lanes[self._next_lane].waiting:
            self._next_lane += 1
            self._send(self._now.lanes[self._next_lane - 1])

    def _send(self, lane: Lane) -> None:
        if self._now.in_place:
            self._start_all(lane, self._themselves(lane))
            return
        lane.payload = self._take_together(lane) if self._together else self._encode(lane)
        name = self._ladder.tensor_name(self._now.prefix, lane.bucket.number, self.plan)
        lane.handle = self.transport.start(lane.payload, name)
        self.meter.sum_begins(lane.bucket.number, functools.partial(self.transport.done, lane.handle))

    def _start_all(self, lane: Lane, arrays: list[torch.Tensor]) -> None:
        """Send gradients as they are."""
        name = self._ladder.tensor_name(self._now.prefix, lane.bucket.number, self.plan)
        lane.handle = cast(Grouping, self.transport).start_all(arrays, name, self._scale)
        self.meter.sum_begins(lane.bucket.number, functools.partial(self.transport.done, lane.handle))

    def _start_side(self, array: torch.Tensor) -> Side:
        # What waits must not hold this exchange, which holds it: one that is dropped has to be gone at once.
        carrier, scale, transport = self._now.carrier, self._scale, self.transport
        if carrier is not None:
            with self.meter.codec():
                self._start_all(carrier, [*carrier.payload, array])
            # In place: here when the carrier's sums are.
            return Side(lambda: (array / scale).tolist())
        # Two names alternate: the last one may still be in flight where it was not awaited.
        self._side_count += 1
        handle = transport.start(array, f"{self._prefix}.side.{self._side_count % 2}")
        return Side(lambda: transport.wait(handle).tolist())

    def _sound(self, side: Side) -> None:
        """See how long a sum takes that nothing else goes along with; what it is of does not matter."""
        zeros = torch.zeros(self.plan.sounding // 4, device=self._device)
        with self.meter.exposed_comm():  # with the side tensor ranks have all sent everything
            side.total()
        with self.meter.sounding():
            self.transport.wait(self.transport.start(zeros, f"{self._prefix}.sounding"))

    def _themselves(self, lane: Lane) -> list[torch.Tensor]:
        """This rank's gradients, for sums in place."""
        parts = []
        for i, shape in zip(lane.bucket.parameters, lane.bucket.shapes, strict=True):
            grad = self.parameters[i].grad
            if grad is None:
                grad = lane.flat.new_zeros(shape)
            elif grad.is_sparse or grad.is_complex():
                grad = real_view(grad.to_dense())
            if self.plan.gauge:
                self._norms.append(norm(grad))
            # The backward pass may still read memory that is not the gradient's alone.
            own = grad if alone_in_memory(grad) else grad.detach().clone()
            parts.append(own.to(lane.flat.dtype).contiguous())
        return parts

    def _take_together(self, lane: Lane) -> Array:
        """The payload of a lane to whose gradients nothing is added, joined only where encoding asks for it."""
        parts = self._parts(lane)
        if self.plan.gauge:
            self._norms += [norm(part) for part in parts]
        payload = self._compressor(lane).encode_parts(self.ops, self._context(lane), parts)
        if payload is not None:
            return payload
        if not lane.flat.numel():
            lane.flat = lane.flat.new_empty(lane.bucket.spec.size)
        torch.cat(parts, out=lane.flat)
        if self._sent_scale != 1:
            lane.flat.mul_(1 / self._sent_scale)
        return self._encode(lane)

    def _parts(self, lane: Lane) -> list[torch.Tensor]:
        """This rank's gradients, in the bucket's order, one-dimensional; zeros where there is none."""
        parts = []
        for i, shape in zip(lane.bucket.parameters, lane.bucket.shapes, strict=True):
            grad = self.parameters[i].grad
            if grad is None:
                parts.append(lane.flat.new_zeros(math.prod(shape)))
            else:
                dense = real_view(grad.detach().to_dense() if grad.is_sparse else grad.detach())
                parts.append(dense.reshape(-1))
        return parts

    def _encode(self, lane: Lane) -> Array:
        """The payload. All that is read of what is sent is read here: its sum may be made in place."""
        compressor, ctx = self._compressor(lane), self._context(lane)
        if compressor.keeps_residual:
            payload, lane.pending, lane.sound, _ = compressor.send(self.ops, ctx, lane.flat, lane.residual)
            return payload
        payload = compressor.encode(self.ops, ctx, lane.flat)
        if self._ladder.settles(self.plan) and lane.bucket.dtype != DENSE_ONLY and not compressor.narrow:
            # A narrow payload may overflow: it is sent again, and the sum tells.
            lane.sound = compressor.sound(self.ops, lane.flat, payload)
        if lane.residual is not None and self.plan.release:
            lane.pending = unreleased(lane.residual, self.plan.release)
        return payload

    def _send_rest(self) -> list[bool]:
        """Fill in what the backward pass did not deliver, and send; returns which parameters have a gradient here."""
        if self.idle:
            return [True] * len(self.parameters)
        used = [parameter.grad is not None for parameter in self.parameters]
        for i, (grad, version) in self._versions.items():
            if self.parameters[i].grad is not grad or grad._version != version:
                raise RuntimeError(
                    "A gradient was changed after backward() and before the ranks' gradients were exchanged, so the "
                    "change would be lost. Call optimizer.synchronize() first, then clip or unscale, then "
                    "`with optimizer.skip_synchronize(): optimizer.step()`."
                )
        with self.meter.codec(), torch.no_grad():
            for lane in self._now.lanes:
                if lane.handle is None:
                    for i in tuple(lane.waiting):
                        if self._together:
                            self._still_waiting(lane, i)
                        else:
                            self._pack(i, self.parameters[i].grad)
                    if lane is self._now.carrier:
                        lane.payload = self._themselves(lane)
                    else:
                        self._send(lane)
        return used

    def _slot(self, learning_rate: float) -> SideSlot:
        states: list[Array] = []
        if not self.idle and not self._now.in_place:
            for lane in self._now.lanes:
                if lane.bucket.dtype != DENSE_ONLY:
                    states += self._context(lane).state
        checksum = int(sum(self.ops.checksum(array) for array in states))
        times = self.meter.last
        loss = float(self.loss)
        return SideSlot(
            float(not all_true([lane.sound for lane in self._now.lanes if lane.sound is not None])),
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
            rows = [norm(g.coalesce().values() if g.is_sparse else g) for g in grads if g is not None]
            left = [norm(lane.pending) for lane in self._now.lanes if lane.pending is not None]
            keeps = self._ladder.compressors[self.plan.level].keeps_residual
            gradient, self._norms = norm_of_all([*self._norms, *rows]), []
            residual = norm_of_all(left if keeps else [])
            return {"gradient_norm": gradient / self._loss_scale, "residual_norm": residual}

    def _decode(self, lane: Lane) -> None:
        """Sum of payloads -> mean of gradients, in ``lane.reduced``."""
        compressor = self._compressor(lane)
        lane.sum_finite = self.ops.all_finite(lane.total) if compressor.narrow else None
        lane.reduced = compressor.mean(self.ops, self._context(lane), lane.total, self._scale * self._sent_scale)

    def _send_overflowed_again(self) -> None:
        """Every rank holds the same sums, so every rank sends the same buckets again, in full width."""
        narrow = [(lane, lane.sum_finite) for lane in self._now.lanes if lane.sum_finite is not None]
        if all_true([finite for _, finite in narrow]):
            return
        for lane in (lane for lane, finite in narrow if not finite):
            name = self._ladder.tensor_name(self._now.prefix, lane.bucket.number, self.plan) + ".again"
            flat = torch.cat(self._parts(lane)).to(lane.flat.dtype) if self._together else lane.flat
            handle = self.transport.start(flat, name, self._scale)
            lane.total = lane.reduced = self.transport.wait(handle)

    def _sums_are_finite(self) -> bool:
        return all_true(
            [self.ops.all_finite(lane.total) for lane in self._now.lanes if lane.bucket.dtype != DENSE_ONLY]
        )

    def _settle(self, healthy: bool) -> None:
        """Advance contexts, or undo the step where a rank's gradient was not finite."""
        for lane in self._now.lanes:
            lane.sound = None
            if lane.bucket.dtype == DENSE_ONLY:
                continue
            compressor = self._compressor(lane)
            if healthy:
                ctx = compressor.advance(self.ops, self._context(lane), lane.total)
                lane.contexts[self.plan.level] = ctx
                if self.plan.warms:
                    learner = self._ladder.compressors[self.plan.warms]
                    total = lane.total if self._loss_scale == 1 else lane.total / self._loss_scale
                    ctx = learner.warm(self.ops, self._context(lane, self.plan.warms), total)
                    lane.contexts[self.plan.warms] = ctx
            else:
                lane.pending = None
                if compressor.settles:  # a plain all-reduce would have delivered it: so does this
                    lane.reduced = torch.full_like(lane.reduced, math.nan)

    def _deliver(self, users: Sequence[bool], reduced_rows: dict[int, torch.Tensor]) -> None:
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
            means = {}  # of gradients summed in place, that are not yet where they belong
            for lane in self._now.lanes if self._now.in_place else ():
                for i, mean in zip(lane.bucket.parameters, lane.reduced, strict=False):  # the side tensor comes last
                    if mean is not self.parameters[i].grad:
                        means[i] = mean
            for i in means if self._now.in_place else self._now.place_of:
                lane, part, shape = self._now.place_of[i]
                if not users[i]:
                    if lane.pending is not None and lane.residual is not None:  # nobody takes what was sent of it
                        lane.pending[part].copy_(lane.residual[part])
                    continue
                parameter = self.parameters[i]
                mean = means[i] if self._now.in_place else lane.reduced[part].view(shape)
                grad = parameter.grad
                if grad is None or grad.is_sparse or grad.is_complex() or i in self._sparse:
                    reduced = like(mean, parameter)
                    # One form on all ranks: optimizers tell them apart.
                    parameter.grad = rows_in_use(reduced) if i in self._sparse else reduced
                elif grad.data_ptr() == mean.data_ptr():
                    pass  # was summed where it is
                elif lane.bucket.number in free and takes(grad, mean):
                    grad.set_(mean)
                else:
                    grad.copy_(mean)
