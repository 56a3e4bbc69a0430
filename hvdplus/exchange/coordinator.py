"""Between two steps: read the metadata, ask the controller, keep the run log, make the next plan.

All ranks do so with the same values in the same order, so their plans agree without communication.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdplus.control.controller import Observation
from hvdplus.control.link import PROBE_MOST, LevelCost
from hvdplus.control.meter import StepTimes
from hvdplus.exchange.auto import LOSS_SCALING, Auto, asked_anew, check_memory, seven_digits, whole_microseconds
from hvdplus.exchange.form import is_count, is_list, require, require_fields
from hvdplus.exchange.journal import Journal, check_facts, costs_of_levels, label
from hvdplus.exchange.metadata import Metadata, check_agreement
from hvdplus.exchange.plan import Ladder, Plan
from hvdplus.exchange.schedule import Schedule
from hvdplus.log.runlog import RunLog
from hvdplus.settings import Settings
from hvdplus.transport import World

NORM_STEPS, REST_STEPS = 5, 20
"""Steps between two measurements of gradients and residuals, which cost passes over memory; and where a level holds
nothing back, so that no error is read. Gradients that grow (``control/phases.py``) are noticed later there: within some
60 steps, not 15. Levels are tried beside the training as often, at first and later."""
ALONE = "one rank has nobody to send to"
_open: weakref.WeakSet[Coordinator] = weakref.WeakSet()
"""Coordinators whose run logs are open."""


class Coordinator:
    """Makes the plan of every step. ``auto`` follows the controller, anything else stays at one level."""

    def __init__(
        self, ladder: Ladder, settings: Settings, *, auto: bool, ranks: int, costs: Sequence[LevelCost], log: RunLog
    ) -> None:
        """``costs``: of every level, for network and processor; equal on all ranks.

        Without ``auto`` the ladder's last level runs throughout.
        """
        self.ladder = ladder
        self.ranks = ranks
        self.log = log
        self.costs = _rounded(costs)
        self.schedule = Schedule(ladder, flush_steps=settings.drain_steps)
        self._journal = Journal(log, settings.window_steps)
        self.auto = Auto(ladder, settings, self.costs, self._journal) if auto else None
        lossy = any(compressor.keeps_residual for compressor in ladder.compressors)
        self._batch_size = settings.batch_size
        self._measures_norms = ranks > 1 and (auto or lossy) and not settings.secure_aggregation  # else nobody asks
        if not auto:
            self.schedule.set_level(len(ladder.names) - 1)
        self.listener: Callable[[StepTimes, float], tuple[int, float] | None] = lambda times, learning_rate: None
        """Called once a step, on all ranks alike, with the times and the learning rate of a step that is over."""
        self.note = ""
        """Ends messages that name ranks."""
        self.rates_may_differ = False
        """Whether ranks' learning rates may differ: of local steps some may be skipped on one rank alone."""
        self.row_bytes = 0
        """Bytes that the last step sent for tables, besides the buckets' payloads."""
        self.steps = 0
        """Steps observed so far, including those before a loaded checkpoint."""
        self._steps_before = 0
        """Steps before the loaded checkpoint."""
        self.unread_steps = 0
        """Steps that are over, but not observed yet."""
        self._measured = Plan(self.schedule.level)
        """Plan of the step whose times come next."""
        self._known = Observation(StepTimes())
        """The rest of the metadata of that step."""
        self._gradient_bytes = 0
        self._running = False
        """Whether the log is open."""
        self.plan = Plan(self.schedule.level)
        """The coming step's plan."""
        self.advance()

    def succeed(self, before: Coordinator) -> None:
        """Take over what was asked of the coordinator ``before``, whose ranks have changed."""
        self.listener, self.rates_may_differ = before.listener, before.rates_may_differ
        self._journal.succeed(before._journal)

    def tell_rhythm(self, **rhythm: Any) -> None:
        """Say in the log how often the exchanges come, if not every step's gradients are exchanged."""
        self._journal.write_rhythm(rhythm)

    @property
    def payload_bytes(self) -> tuple[int, ...]:
        """Bytes that one rank sends a step at every level."""
        return tuple(cost.payload_bytes for cost in self.costs)

    def begin(self, probes: Sequence[tuple[int, float]]) -> None:
        """Before the first step of ``auto``: sums of so many bytes took so many seconds, on all ranks alike."""
        assert self.auto is not None
        self.auto.begin(probes)
        self.set_level(self.auto.level)
        self.advance()

    def resize(self, costs: Sequence[LevelCost]) -> None:
        """Take over the ``costs`` (as above) of buckets that were cut anew."""
        self.costs = _rounded(costs)
        if self.auto:
            self.auto.resize(self.costs, self.steps)
        self.log.write("resize", levels=costs_of_levels(self.ladder.names, self.costs))

    @property
    def previews(self) -> bool:
        """Whether levels may ever be tried beside the training."""
        return self.auto is not None and self._measures_norms

    def unforeseen(self) -> tuple[int, ...]:
        """Levels to try in the step that runs the present plan, see ``preview.py``: in two steps in a row of every
        five, later of every twenty, as it takes time to ask."""
        every = NORM_STEPS if self.steps < REST_STEPS else REST_STEPS
        place = self.steps % every - (every - 2)
        if place < 0 or not (self.auto and self.previews) or self.schedule.transitional or self.plan.probe_bytes:
            return ()
        return self.auto.unforeseen(self.steps, self.steps - place)

    def foresee(self, total: np.ndarray) -> None:
        """Take in what a preview has shown: every level's error (see ``Preview.see``), added up over ranks."""
        assert self.auto is not None
        self.auto.foresee([error / self.ranks for error in total.tolist()], self.steps)

    def ask(self) -> None:
        """Contexts were dropped: the coming steps ask as a level's first ones do."""
        self.schedule.ask()
        self.plan = self.plan._replace(asks=self.ladder.compressors[self.plan.level].asks)

    def state(self) -> dict[str, Any]:
        """All that coming plans depend on, as plain values, equal on every rank. Call it between two steps."""
        return {
            "levels": list(self.ladder.names),
            "schedule": self.schedule.state(),
            "steps": self.steps,
            "plan": list(self.plan),
            "controller": self.auto.controller.memory() if self.auto else None,
        }

    def load(self, state: Mapping[str, Any]) -> bool:
        """Continue from a ``state`` that ``state()`` returned, if its levels were the same; return whether they were.

        Raises:
            ValueError: the state is damaged.
        """
        if not self.fits(state):
            return False
        self._journal.write_trace(self.steps)
        self._close_window()
        self.schedule.load(state["schedule"])
        self._steps_before += state["steps"] - self.steps
        self.steps, self.plan = state["steps"], Plan(*state["plan"])
        # The next times are of a step whose beginning was not timed, and do not count.
        self._measured, self._known = Plan(self.schedule.level), Observation(StepTimes())
        controller = None
        if self.auto:
            controller = asked_anew(state["controller"])
            self.auto.recall(controller)
        name = self.ladder.names[self.schedule.level]
        self.log.write("resume", step=self.steps, level=name, controller=controller)
        return True

    def fits(self, state: Any) -> bool:
        """Whether ``load`` can take over a state, because its levels were the same. Changes nothing.

        Raises:
            ValueError: the state is damaged.
        """
        if _checked_plan(state, self.ladder, self.auto) is None:
            return False
        self.schedule.check(state["schedule"])
        return True

    def flush(self) -> None:
        """A residual came from elsewhere: if the level keeps none, send it over the coming steps."""
        self.schedule.flush()
        self._forbid_if_alone()
        self.advance()

    def observe(self, plan: Plan, metadata: Metadata, counts: bool = True) -> None:
        """Process the metadata of a step that ran ``plan``; every rank does so at the same point.

        Args:
            counts: whether the schedule counts the step now. It does not where sums were not finite, so that residuals
                and contexts were rolled back, and where it has counted the step already.

        Raises:
            RuntimeError: ranks differ in contexts, parameters or learning rates; on every rank.
        """
        if self.rates_may_differ:
            metadata.odd.pop("learning_rate", None)
        check_agreement(metadata, self.ladder.names[plan.level], self.note)
        if counts and not metadata.nonfinite:
            self.schedule.commit(plan)
        times = StepTimes(*map(whole_microseconds, metadata.times))
        longer = self.listener(times, _known_rate(metadata))
        if longer and self.auto:
            self.auto.stretch(*longer, self.steps)
            self.set_level(self.auto.level)
        self._measure(self._known._replace(times=times), metadata)
        if label(self.ladder, plan) != label(self.ladder, self._measured):
            self._close_window()
        # The next metadata bring this step's times.
        self._measured, self._known = plan, _observed(plan, metadata)

    def advance(self) -> Plan:
        """Make the next step's plan."""
        self.plan = self._next_plan()
        return self.plan

    def repeat(self) -> Plan:
        """The last step was exchanged but not taken: its flush is still outstanding. Returns the next step's plan."""
        self.schedule.repeat()
        return self.advance()

    def set_level(self, level: int) -> None:
        """Run ``level`` from the next plan on, on all ranks alike."""
        self.schedule.set_level(level)

    def figures(self) -> dict[str, float]:
        """Numbers for a training log: times of the last complete window in milliseconds (NaN before it), position of
        the present level in the ladder, and its ratio of gradient bytes to bytes sent, rows of tables
        as in the last step."""
        sent = self.payload_bytes[self.schedule.level] + self.row_bytes
        ratio = self._gradient_bytes / sent if sent else 1.0
        return {**self._journal.last_times(), "level": float(self.schedule.level), "ratio": ratio}

    def on_window(self, callback: Callable[[dict[str, Any]], None]) -> None:
        """Call ``callback`` on this rank with every window of steps from now on; ``docs/log-format.md`` has its fields.

        It is called between two steps, about every ten; an error in it ends the training.
        """
        self._journal.callbacks.append(callback)

    @property
    def status(self) -> str:
        """Level and times of the last complete window, in a few words."""
        return self._journal.status

    def describe_run(self, world: World, framework: str, parameters: int, gradient_bytes: int) -> None:
        """Open the run log with the job's description.

        Args:
            parameters: number of trainable values.
            gradient_bytes: bytes of all gradients in their own types.
        """
        self._gradient_bytes = gradient_bytes
        self._journal.write_run(
            world,
            framework=framework,
            compression="auto" if self.auto else self.ladder.names[self.schedule.level],
            names=self.ladder.names,
            costs=self.costs,
            parameters=parameters,
            gradient_bytes=gradient_bytes,
            batch_size=self._batch_size,
            **(self.auto.describe() if self.auto else {"limits": None, "probes": []}),
        )
        self._running = True
        _open.add(self)
        self._forbid_if_alone()

    def leave_out_residuals(self) -> bool:
        """From now on, run only levels that keep no residual; all ranks call it at the same step. A second call does
        nothing. Returns whether the coming plan, which is made already, has to be made anew.

        Raises:
            ValueError: the user asked for a level that keeps a residual, not for ``auto``.
        """
        lossy = [level for level, compressor in enumerate(self.ladder.compressors) if compressor.keeps_residual]
        if not lossy:
            return False
        if self.auto is None:
            raise ValueError(
                f"{self.ladder.names[self.schedule.level]} keeps a residual: {LOSS_SCALING}. Use "
                "fp16 or none, or train in bfloat16, which needs no loss scaling."
            )
        before = self.schedule.level
        self._forbid(lossy[0], LOSS_SCALING)
        return self.schedule.level != before

    def _forbid_if_alone(self) -> None:
        """On one rank ``auto`` stays dense: no link is known, and all levels would promise something for ever."""
        if self.auto and self.ranks == 1 and len(self.ladder.names) > 1:
            self._forbid(1, ALONE)

    def _forbid(self, level: int, reason: str) -> None:
        assert self.auto is not None
        if self.auto.forbid(level, reason, self.steps):
            self.set_level(self.auto.level)

    def finish(self, **facts: Any) -> dict[str, Any]:
        """Close the run log with the user's ``facts`` (accuracy, ...); return the run's figures.

        Times are medians over the windows at the last level, in milliseconds.

        Raises:
            ValueError: a fact has the name of another field.
        """
        check_facts(facts)
        self._running = False
        _open.discard(self)
        self._journal.write_trace(self.steps)
        self._close_window()
        steps = self.steps - self._steps_before + self.unread_steps
        return self._journal.write_end(self.ladder.names[self.schedule.level], steps, facts)

    def __del__(self) -> None:
        """Complete the log of an optimizer that was dropped."""
        if getattr(self, "_running", False):
            with contextlib.suppress(Exception):  # it may be too late to write
                self.finish()

    def _next_plan(self) -> Plan:
        plan = self.schedule.next_plan()
        due = self._measures_norms and self.steps % (NORM_STEPS if plan.flush_fraction else REST_STEPS) == 0
        measurement = 1 + self.steps // NORM_STEPS if due else 0
        # What the last step's probe took is not known yet.
        may_probe = not (self.schedule.transitional or self._known.probe_bytes or self.plan.probe_bytes)
        probe = self.auto.controller.probe_bytes() if self.auto and may_probe else 0
        return plan._replace(measurement=measurement, probe_bytes=probe)

    def _measure(self, seen: Observation, metadata: Metadata) -> None:
        self.steps += 1
        if not seen.times.step:  # the first step has no step before it
            return
        self._journal.add_step(seen, metadata.loss, metadata.compute)
        if self._journal.window_is_full:
            self._close_window()
        if not self.auto:
            return
        seen = seen._replace(flushes=self.ladder.flushes(self._measured))
        if decision := self.auto.observe(self._measured.level, seen, self.steps):
            self._close_window()
            self._journal.write_decision(self.steps, self.ladder.names, self.schedule.level, decision)
            self.set_level(decision.level)

    def _close_window(self) -> None:
        sent = self.payload_bytes[self._measured.level] + self.row_bytes
        self._journal.write_window(self.steps, label(self.ladder, self._measured), sent)


def _checked_plan(state: Any, ladder: Ladder, auto: Auto | None) -> Plan | None:
    """The plan of a coordinator's state; None: its levels were different. Raises ValueError: damaged."""
    require_fields(state, ("levels", "schedule", "steps", "plan", "controller"), "its coordinator")
    levels, memory, steps, plan = (state[name] for name in ("levels", "controller", "steps", "plan"))
    require(is_list(levels, lambda name: isinstance(name, str)), "the coordinator's levels", "names", levels)
    if list(levels) != list(ladder.names) or (memory is None) != (not auto):
        return None
    require(is_count(steps), "the number of steps", "a whole number of at least 0", steps)
    wanted = f"one of {len(Plan._fields)} values that the levels allow"
    known = isinstance(plan, list | tuple) and len(plan) == len(Plan._fields) and ladder.allows(Plan(*plan))
    most = PROBE_MOST if auto else 0
    require(known and Plan(*plan).probe_bytes <= most, "its plan", wanted, plan)
    if auto:
        check_memory(memory, auto.controller)
    return Plan(*plan)


@atexit.register
def _finish_at_exit() -> None:
    """Complete the logs of a script that asked for no report, unless it failed by an exception."""
    if not hasattr(sys, "last_value"):
        for coordinator in list(_open):
            coordinator._journal.callbacks.clear()  # whatever they write to may have been closed
            coordinator.finish()


def _rounded(costs: Sequence[LevelCost]) -> tuple[LevelCost, ...]:
    return tuple(cost._replace(codec=whole_microseconds(cost.codec)) for cost in costs)


def _observed(plan: Plan, metadata: Metadata) -> Observation:
    """The observation of a step without its times, which come with the next metadata."""
    learning_rate = seven_digits(_known_rate(metadata))
    unmeasured = Observation(StepTimes(), learning_rate=learning_rate, probe_bytes=plan.probe_bytes)
    gradient, residual = metadata.gradient_norm, metadata.residual_norm
    if not plan.measurement or not (math.isfinite(gradient) and math.isfinite(residual)):  # the step was not taken
        return unmeasured
    error, gradient, cosine = map(seven_digits, (metadata.error, gradient, metadata.cosine))
    return unmeasured._replace(error=error, gradient_norm=gradient, cosine=cosine)


def _known_rate(metadata: Metadata) -> float:
    """The learning rate; 0: it is not known."""
    return metadata.learning_rate if math.isfinite(metadata.learning_rate) else 0.0
