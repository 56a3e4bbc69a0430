"""What every rank does between two steps: read the side tensor, ask the controller, keep the run log, make the plan.

All ranks call it with the same values in the same order, so their plans agree without a word.
"""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np

from hvdplus.controller import Controller, Limits, Observation
from hvdplus.costmodel import LevelCost
from hvdplus.exchange import Ladder, Plan, SideSlot, check_absent, check_newcomers, read_side
from hvdplus.log.runlog import DRAINING, WARMING, RunLog
from hvdplus.meter import StepTimes, median_times, reduce_times
from hvdplus.residual import release_factor
from hvdplus.settings import Settings
from hvdplus.transport import World

GAUGE_STEPS = 5
"""In every so manieth step ranks say how large gradients and residuals are: it costs passes over memory."""
TIMES = ("step_ms", "compute_ms", "codec_ms", "exposed_comm_ms", "overlapped_comm_ms", "input_wait_ms")
"""Of a window in the run log."""
LOSS_SCALING = "loss scaling would mix the units of residual and gradient"
ALONE = "one rank has nobody to send to"
TRACE_STEPS = 50
"""Steps of what the controller saw in one line of the run log."""


class Pilot:
    """Makes the plan of every step. ``auto`` follows the controller, anything else stays at one level."""

    def __init__(
        self, ladder: Ladder, settings: Settings, *, auto: bool, ranks: int, costs: Sequence[LevelCost], log: RunLog
    ) -> None:
        """``costs``: what every level of the ladder asks of wire and processor, equal on all ranks.

        Without ``auto`` the ladder's last level runs throughout.
        """
        self.ladder = ladder
        self.ranks = ranks
        self.log = log
        self.costs = _rounded(costs)
        self._window_steps = settings.window_steps
        self._drain_steps = settings.drain_steps
        self._warm_steps = settings.warm_steps
        limits = Limits(
            dense_steps=settings.dense_steps, drain_steps=settings.drain_steps, error_budget=settings.error_budget
        )
        self._controller = Controller(ladder.names, self.costs, limits) if auto else None
        lossy = any(compressor.keeps_residual for compressor in ladder.compressors)
        self._gauges = ranks > 1 and (auto or lossy)  # else nobody wants to know
        self._level = 0
        self._phases = [0] * len(ladder.names)
        self._drain_left = self._warm_left = 0
        self._heir_of: int | None = None
        """The level whose contexts, and so whose phase, the present one takes over in the coming plan."""
        if not auto:
            self.set_level(len(ladder.names) - 1)
        self.row_bytes = 0
        """Bytes that the last step sent besides, for rows of sparse gradients."""
        self.steps = 0
        """Steps observed so far, those of the job that a checkpoint is from among them."""
        self._steps_before = 0
        """Those of that job."""
        self.unread_steps = 0
        """Steps that are over, and not observed yet."""
        self._measured = Plan(self._level)
        """What the step did that the next times are of."""
        self._gauged = Observation(StepTimes())
        """What else is known of that step."""
        self._window: list[tuple[Observation, float]] = []
        self._trace: list[list[float | None]] = []
        """What the controller saw since the log's last line of it."""
        self._began = time.monotonic()
        self._gradient_bytes = 0
        self._finished = False
        self.plan = self._next_plan()
        """The coming step's plan."""

    @property
    def payload_bytes(self) -> tuple[int, ...]:
        """Bytes that one rank sends a step at every level."""
        return tuple(cost.payload_bytes for cost in self.costs)

    def resize(self, costs: Sequence[LevelCost]) -> None:
        """Buckets have been cut anew: ``costs`` as above."""
        self.costs = _rounded(costs)
        if self._controller:
            self._controller.costs = self.costs
            self._write_trace()
        self.log.write("resize", levels=self._levels())

    def state(self) -> dict[str, Any]:
        """What coming plans depend on, as plain values, equal on every rank; between two steps."""
        return {
            "levels": list(self.ladder.names),
            "level": self._level,
            "phases": list(self._phases),
            "drain_left": self._drain_left,
            "warm_left": self._warm_left,
            "steps": self.steps,
            "plan": list(self.plan),
            "controller": self._controller.memory() if self._controller else None,
        }

    def load(self, state: Mapping[str, Any]) -> bool:
        """Go on where the pilot was that gave ``state``, if it had the same levels to choose from; returns whether."""
        if list(state["levels"]) != list(self.ladder.names) or (state["controller"] is None) != (not self._controller):
            return False
        self._write_trace()
        self._close_window()
        self._level, self._phases = state["level"], list(state["phases"])
        self._drain_left, self._warm_left, self._heir_of = state["drain_left"], state["warm_left"], None
        self._steps_before += state["steps"] - self.steps
        self.steps, self.plan = state["steps"], Plan(*state["plan"])
        # The next times are those of a step without a beginning, and count for nothing.
        self._measured, self._gauged = Plan(self._level), Observation(StepTimes())
        if self._controller:
            self._controller.recall(state["controller"])
        self.log.write("resume", step=self.steps, level=self.ladder.names[self._level], controller=state["controller"])
        return True

    def pay_out(self) -> None:
        """A residual came from elsewhere: if the level keeps none, send it over the coming steps."""
        if not self.ladder.compressors[self._level].keeps_residual:
            self._drain_left = self._drain_steps
        if self._controller and self.ranks == 1 and len(self.ladder.names) > 1:
            self._forbid(1, ALONE)
        self.advance()

    def observe(self, plan: Plan, total: list[float] | np.ndarray, healthy: bool = True) -> None:
        """Take in the summed side tensor of a step that ran ``plan``; every rank does so at the same point.

        ``healthy``: all sums were finite, so that residuals and contexts were kept.

        Raises:
            RuntimeError: the ranks' contexts differ, so that what was reduced has no meaning; or their parameters do,
                or which of them have gradients.
        """
        slots, _ = read_side(total, self.ranks)
        check_newcomers(slots)
        check_absent(slots)
        self._check_contexts(plan, slots)
        if healthy and not any(slot.nonfinite for slot in slots):
            self._commit(plan)
        times = StepTimes(*map(_whole_microseconds, reduce_times([slot.times for slot in slots])))
        self._measure(self._gauged._replace(times=times), _mean_loss(slots))
        if self._label(plan) != self._label(self._measured):
            self._close_window()
        # The next side tensor brings this step's times.
        self._measured, self._gauged = plan, _gauged(plan, slots)

    def advance(self) -> Plan:
        """Make the next step's plan."""
        self.plan = self._next_plan()
        return self.plan

    def set_level(self, level: int) -> None:
        """Run ``level`` from the next plan on, on all ranks alike."""
        if self._level != level:
            before, compressor = self.ladder.compressors[self._level], self.ladder.compressors[level]
            if compressor.keeps_residual:
                self._drain_left = 0
            elif before.keeps_residual:
                self._drain_left = self._drain_steps
            if compressor.follows(before) and not self._warm_left:  # the exchange hands its contexts over
                self._heir_of = self._level
            else:
                self._warm_left = self._warm_steps if compressor.warms else 0
            self._level = level

    def figures(self) -> dict[str, float]:
        """Numbers for a training log: times of the last complete window in milliseconds (NaN before it), position of
        the present level in the ladder, and by how much it sends less than the gradients have."""
        last = self._last_window() or {}
        times = {name: last.get(name, math.nan) for name in TIMES}
        sent = self.payload_bytes[self._level]
        return {**times, "level": float(self._level), "ratio": self._gradient_bytes / sent if sent else 1.0}

    def _last_window(self) -> dict[str, Any] | None:
        # From the end: a progress display may ask every step of a long run.
        return next((record for record in reversed(self.log.records) if record["kind"] == "window"), None)

    @property
    def status(self) -> str:
        """Level and times of the last complete window, in a few words."""
        last = self._last_window()
        if last is None:
            return "measuring"
        return (
            f"level {last['level']}  step {last['step_ms']:.2f} ms, of which {last['exposed_comm_ms']:.2f} ms "
            "waiting for the network"
        )

    def describe_run(self, world: World, framework: str, parameters: int) -> None:
        """Open the run log with what the job is. ``parameters``: number of trainable values."""
        self._gradient_bytes = 4 * parameters
        self.log.write(
            "run",
            framework=framework,
            ranks=self.ranks,
            hosts=world.hosts,
            transport=world.transport.name,
            collective=world.collective,
            compression="auto" if self._controller else self.ladder.names[self._level],
            ladder=list(self.ladder.names),
            parameters=parameters,
            gradient_bytes=self._gradient_bytes,
            payload_bytes=dict(zip(self.ladder.names, self.payload_bytes, strict=True)),
            levels=self._levels(),
            limits=asdict(self._controller.limits) if self._controller else None,
        )
        atexit.register(self._finish_at_exit)

    def leave_out_residuals(self) -> bool:
        """From now on, run only levels that keep no residual; all ranks call it at the same step. A second call does
        nothing. Returns whether the coming plan, which is made already, has to be made anew.

        Raises:
            ValueError: a level that keeps one was asked for by name.
        """
        lossy = [level for level, compressor in enumerate(self.ladder.compressors) if compressor.keeps_residual]
        if not lossy:
            return False
        if self._controller is None:
            raise ValueError(
                f"{self.ladder.names[self._level]} keeps a residual: {LOSS_SCALING}. Use "
                "fp16 or none, or train in bfloat16, which needs no loss scaling."
            )
        if self._controller.refused.get(lossy[0]) == LOSS_SCALING:
            return False
        self._forbid(lossy[0], LOSS_SCALING)
        if self._level < lossy[0]:
            return False
        self.set_level(0)
        return True

    def _forbid(self, level: int, reason: str) -> None:
        assert self._controller is not None
        self._write_trace()
        self.log.write("forbid", step=self.steps, level=self.ladder.names[level], reason=reason)
        self._controller.forbid(level, reason)

    def finish(self, **facts: Any) -> dict[str, Any]:
        """Close the run log with ``facts`` of the user's (accuracy, ...); returns what the run came to.

        Times are medians over the windows at the last level, in milliseconds.
        """
        self._finished = True
        self._write_trace()
        self._close_window()
        windows = [record for record in self.log.records if record["kind"] == "window"]
        last = [record for record in windows if record["level"] == self.ladder.names[self._level]] or windows
        figures = {key: median(record[key] for record in last) if last else math.nan for key in TIMES}
        seconds = time.monotonic() - self._began
        steps = self.steps - self._steps_before + self.unread_steps
        self.log.write("end", steps=steps, wall_seconds=round(seconds, 3), **facts)
        return {"level": self.ladder.names[self._level], "steps": steps, **figures}

    def _finish_at_exit(self) -> None:
        """A script that asks for no report has a complete log all the same; one that failed by an
        exception has none to complete."""
        if not self._finished and not hasattr(sys, "last_value"):
            self.finish()

    def repeat(self) -> Plan:
        """The last step was exchanged, but not taken: what it was to pay out is still outstanding. The coming plan."""
        self._drain_left += 1
        return self.advance()

    def _next_plan(self) -> Plan:
        if self._heir_of is not None:
            self._phases[self._level], self._heir_of = self._phases[self._heir_of], None
        gauge = self._gauges and self.steps % GAUGE_STEPS == 0
        if self._warm_left:
            return Plan(warms=self._level, gauge=gauge)
        release = 1.0 if self.ladder.compressors[self._level].keeps_residual else release_factor(self._drain_left)
        sounding = self._controller.sounding() if self._controller and not self._drain_left else 0
        return Plan(self._level, self._phases[self._level], release, gauge=gauge, sounding=sounding)

    def _levels(self) -> dict[str, dict[str, float]]:
        """The costs, for the log."""
        return {
            name: {
                "payload_bytes": cost.payload_bytes,
                "last_bytes": cost.last_bytes,
                "messages": cost.messages,
                "codec_ms": round(cost.codec * 1e6) / 1e3,
            }
            for name, cost in zip(self.ladder.names, self.costs, strict=True)
        }

    def _check_contexts(self, plan: Plan, slots: Sequence[SideSlot]) -> None:
        sums = [(slot.checksum_high, slot.checksum_low) for slot in slots]
        if len(set(sums)) > 1:
            odd = [rank for rank, value in enumerate(sums) if value != sums[0]]
            raise RuntimeError(
                f"The contexts of {self.ladder.names[plan.level]} differ between rank 0 and rank(s) "
                f"{', '.join(map(str, odd))}, so their sum has no meaning. This happens when ranks run other library "
                "versions or CPUs of other capability: make them equal, or set HVDPLUS_COMPRESSION=fp16."
            )

    def _commit(self, plan: Plan) -> None:
        compressor = self.ladder.compressors[plan.level]
        if compressor.phases > 1:
            self._phases[plan.level] = (plan.phase + 1) % compressor.phases
        # A step that was under way when the level changed counts for nothing that was called off meanwhile.
        if self._label(plan) == DRAINING and self._drain_left:
            self._drain_left -= 1
        if plan.warms == self._level and self._warm_left:
            self._warm_left -= 1

    def _label(self, plan: Plan) -> str:
        """What the run log calls such a step."""
        if plan.warms:
            return WARMING
        drains = plan.release > 0 and not self.ladder.compressors[plan.level].keeps_residual
        return DRAINING if drains else self.ladder.names[plan.level]

    def _measure(self, seen: Observation, loss: float) -> None:
        self.steps += 1
        if not seen.times.step:  # the first step has no step before it
            return
        self._window.append((seen, loss))
        if len(self._window) >= self._window_steps:
            self._close_window()
        # A step that pays out a residual, or learns, is dearer than a dense one: it says nothing about dense.
        if not self._controller or self._label(self._measured) != self.ladder.names[self._measured.level]:
            return
        level = self._measured.level
        gauged = (None if math.isnan(value) else value for value in (seen.error, seen.gradient_norm))
        known = *gauged, seen.learning_rate, seen.sounding_bytes
        self._trace.append([level, *(round(value * 1e6) for value in seen.times), *known])
        decision = self._controller.observe(level, seen)
        if decision or len(self._trace) >= TRACE_STEPS:
            self._write_trace()
        if decision:
            self._close_window()
            record: dict[str, Any] = {
                "step": self.steps,
                "from": self.ladder.names[self._level],
                "to": self.ladder.names[decision.level],
                "reason": decision.reason,
                "evidence": decision.evidence,
            }
            self.log.write("decision", **record)
            self.set_level(decision.level)

    def _write_trace(self) -> None:
        if self._trace:
            self.log.write("trace", keep=False, last_step=self.steps - 1, steps=self._trace)
            self._trace = []

    def _close_window(self) -> None:
        if not self._window:
            return
        times = median_times([seen.times for seen, _ in self._window])
        losses = [loss for _, loss in self._window if math.isfinite(loss)]
        errors = [seen.error for seen, _ in self._window if not math.isnan(seen.error)]
        self.log.write(
            "window",
            first_step=self.steps - len(self._window),
            last_step=self.steps - 1,
            steps=len(self._window),
            level=self._label(self._measured),
            step_ms=times.step * 1e3,
            compute_ms=times.compute * 1e3,
            codec_ms=times.codec * 1e3,
            exposed_comm_ms=times.exposed_comm * 1e3,
            overlapped_comm_ms=times.overlapped_comm * 1e3,
            input_wait_ms=times.input_wait * 1e3,
            payload_bytes=self.payload_bytes[self._measured.level] + self.row_bytes,
            error=median(errors) if errors else None,
            loss=sum(losses) / len(losses) if losses else None,
        )
        self._window = []


def _rounded(costs: Sequence[LevelCost]) -> tuple[LevelCost, ...]:
    return tuple(cost._replace(codec=_whole_microseconds(cost.codec)) for cost in costs)


def _whole_microseconds(seconds: float) -> float:
    """Rounded, so that the log holds exactly what decisions are made from."""
    return round(seconds * 1e6) / 1e6


def _gauged(plan: Plan, slots: Sequence[SideSlot]) -> Observation:
    """What the ranks said of a step besides its times, which come with the next."""
    learning_rate = float(f"{slots[0].learning_rate:.7g}")
    ungauged = Observation(StepTimes(), learning_rate=learning_rate, sounding_bytes=plan.sounding)
    if not plan.gauge:
        return ungauged
    gradient, residual = (
        math.sqrt(sum(norm * norm for norm in norms) / len(slots))
        for norms in zip(*((slot.gradient_norm, slot.residual_norm) for slot in slots), strict=True)
    )
    if not (math.isfinite(gradient) and math.isfinite(residual)):  # a step that is not taken
        return ungauged
    error = residual / gradient if gradient else math.nan
    return ungauged._replace(error=float(f"{error:.7g}"), gradient_norm=float(f"{gradient:.7g}"))


def _mean_loss(slots: Sequence[SideSlot]) -> float:
    """Mean over the ranks that reported one; NaN if none did."""
    losses = [slot.loss for slot in slots if slot.has_loss]
    return sum(losses) / len(losses) if losses else math.nan
