"""What every rank does between two steps: read the side tensor, ask the controller, keep the run log, make the plan.

All ranks call it with the same values in the same order, so their plans agree without a word.
"""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from hvdplus.controller import Controller, Limits
from hvdplus.exchange import Ladder, Plan, SideSlot, read_side
from hvdplus.meter import StepTimes, median_times, reduce_times
from hvdplus.residual import release_factor
from hvdplus.runlog import RunLog
from hvdplus.settings import Settings
from hvdplus.transport import World

DRAINING = "draining"
"""What the run log calls dense steps that pay out a residual: neither a level of the ladder nor plain dense."""
WARMING = "warming"
"""What it calls dense steps from which a level's contexts learn before it begins."""


class Pilot:
    """Makes the plan of every step. ``auto`` follows the controller, anything else stays at one level."""

    def __init__(
        self, ladder: Ladder, settings: Settings, *, auto: bool, ranks: int, payload_bytes: Sequence[int], log: RunLog
    ) -> None:
        """``payload_bytes``: bytes that one rank sends a step, one entry a level of the ladder.

        Without ``auto`` the ladder's last level runs throughout.
        """
        self.ladder = ladder
        self.ranks = ranks
        self.log = log
        self.payload_bytes = tuple(payload_bytes)
        self._window_steps = settings.window_steps
        self._drain_steps = settings.drain_steps
        self._warm_steps = settings.warm_steps
        limits = Limits(dense_steps=settings.dense_steps)
        self._controller = Controller(ladder.names, limits, payload_bytes=self.payload_bytes) if auto else None
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
        """Steps observed so far."""
        self._measured = Plan(self._level)
        """What the step did that the next times are of."""
        self._window: list[tuple[StepTimes, float]] = []
        self._began = time.monotonic()
        self._finished = False
        self.plan = self._next_plan()
        """The coming step's plan."""

    def resize(self, payload_bytes: Sequence[int]) -> None:
        """Buckets have been cut anew: ``payload_bytes`` as above."""
        self.payload_bytes = tuple(payload_bytes)
        if self._controller:
            self._controller.payload_bytes = self.payload_bytes

    def observe(self, plan: Plan, total: np.ndarray, healthy: bool = True) -> None:
        """Take in the summed side tensor of a step that ran ``plan``; every rank does so at the same point.

        ``healthy``: all sums were finite, so that residuals and contexts were kept.

        Raises:
            RuntimeError: the ranks' contexts differ, so that what was reduced has no meaning.
        """
        slots, _ = read_side(total, self.ranks)
        self._check_contexts(plan, slots)
        if healthy and not any(slot.nonfinite for slot in slots):
            self._commit(plan)
        self._measure(reduce_times([slot.times for slot in slots]), _mean_loss(slots))
        if self._label(plan) != self._label(self._measured):
            self._close_window()
        self._measured = plan  # the next side tensor brings this step's times

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

    @property
    def status(self) -> str:
        """Level and times of the last complete window, in a few words."""
        # From the end: a progress display may ask every step of a long run.
        last = next((record for record in reversed(self.log.records) if record["kind"] == "window"), None)
        if last is None:
            return "measuring"
        return (
            f"level {last['level']}  step {last['step_ms']:.2f} ms, of which {last['exposed_comm_ms']:.2f} ms "
            "waiting for the network"
        )

    def describe_run(self, world: World, framework: str, parameters: int) -> None:
        """Open the run log with what the job is. ``parameters``: number of trainable values."""
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
            gradient_bytes=4 * parameters,
            payload_bytes=dict(zip(self.ladder.names, self.payload_bytes, strict=True)),
        )
        atexit.register(self._finish_at_exit)

    def leave_out_residuals(self) -> None:
        """From now on, run only levels that keep no residual; all ranks call it at the same step.

        Raises:
            ValueError: a level that keeps one was asked for by name.
        """
        lossy = [level for level, compressor in enumerate(self.ladder.compressors) if compressor.keeps_residual]
        if not lossy:
            return
        if self._controller is None:
            raise ValueError(
                f"{self.ladder.names[self._level]} keeps a residual, which loss scaling would mix units in. Use "
                "fp16 or none, or train in bfloat16, which needs no loss scaling."
            )
        self._controller.forbid(lossy[0])
        if self._level >= lossy[0]:
            self.set_level(0)

    def finish(self, **facts: Any) -> dict[str, Any]:
        """Close the run log with ``facts`` of the user's (accuracy, ...); returns what the run came to.

        Times are medians over the windows at the last level, in milliseconds.
        """
        self._finished = True
        self._close_window()
        windows = [record for record in self.log.records if record["kind"] == "window"]
        last = [record for record in windows if record["level"] == self.ladder.names[self._level]] or windows
        figures = {
            key: median(record[key] for record in last) if last else math.nan
            for key in ("step_ms", "compute_ms", "codec_ms", "exposed_comm_ms", "input_wait_ms")
        }
        seconds = time.monotonic() - self._began
        self.log.write("end", steps=self.steps, wall_seconds=round(seconds, 3), **facts)
        return {"level": self.ladder.names[self._level], "steps": self.steps, **figures}

    def _finish_at_exit(self) -> None:
        """A script that asks for no report has a complete log all the same; one that failed has none to complete."""
        if not self._finished and not hasattr(sys, "last_value"):
            self.finish()

    def repeat(self) -> Plan:
        """The last step was exchanged, but not taken: what it was to pay out is still outstanding. The coming plan."""
        self._drain_left += 1
        return self.advance()

    def _next_plan(self) -> Plan:
        if self._heir_of is not None:
            self._phases[self._level], self._heir_of = self._phases[self._heir_of], None
        if self._warm_left:
            return Plan(warms=self._level)
        release = 1.0 if self.ladder.compressors[self._level].keeps_residual else release_factor(self._drain_left)
        return Plan(self._level, self._phases[self._level], release)

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

    def _measure(self, times: StepTimes, loss: float) -> None:
        self.steps += 1
        if not times.step:  # the first step has no step before it
            return
        self._window.append((times, loss))
        if len(self._window) >= self._window_steps:
            self._close_window()
        # A step that pays out a residual, or learns, is dearer than a dense one: it says nothing about dense.
        decision = None
        if self._controller and self._label(self._measured) == self.ladder.names[self._measured.level]:
            decision = self._controller.observe(self._measured.level, times)
        if decision:
            self._close_window()
            self.log.write(
                "decision",
                step=self.steps,
                **{"from": self.ladder.names[self._level]},
                to=self.ladder.names[decision.level],
                reason=decision.reason,
                evidence=decision.evidence,
            )
            self.set_level(decision.level)

    def _close_window(self) -> None:
        if not self._window:
            return
        times = median_times([times for times, _ in self._window])
        losses = [loss for _, loss in self._window if math.isfinite(loss)]
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
            input_wait_ms=times.input_wait * 1e3,
            payload_bytes=self.payload_bytes[self._measured.level] + self.row_bytes,
            loss=sum(losses) / len(losses) if losses else None,
        )
        self._window = []


def _mean_loss(slots: Sequence[SideSlot]) -> float:
    """Mean over the ranks that reported one; NaN if none did."""
    losses = [slot.loss for slot in slots if slot.has_loss]
    return sum(losses) / len(losses) if losses else math.nan
