"""The coordinator's lines of the run log: windows of steps, the controller's observations, costs of levels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from hvdplus.control.controller import Decision, Observation
from hvdplus.control.link import LevelCost
from hvdplus.control.meter import median_times
from hvdplus.exchange.plan import Ladder, Plan
from hvdplus.log.facts import DRAINING
from hvdplus.log.runlog import TIMES, RunLog
from hvdplus.transport import World

TRACE_STEPS = 50
"""Steps of the controller's observations in one line of the run log."""
MOST_RANKS = 64
"""On more ranks than this, a window has the computation of the slowest and of the middle one alone."""
TAKEN = {"kind", "keep", "steps", "wall_seconds"}
"""Names that a fact of the user's cannot have in the log's last line."""


class Journal:
    """Collects steps until a line of the log is full."""

    def __init__(self, log: RunLog, window_steps: int) -> None:
        self.log = log
        self._window_steps = window_steps
        self._window: list[tuple[Observation, float, np.ndarray]] = []
        self._trace: list[list[float | None]] = []
        self.callbacks: list[Callable[[dict[str, Any]], None]] = []
        """Called with every window."""
        self._rhythm: Mapping[str, Any] = {}
        self._began = time.monotonic()

    def succeed(self, before: Journal) -> None:
        """Go on for one whose ranks have changed, in a log of its own."""
        self.callbacks = before.callbacks
        self.write_rhythm(before._rhythm)

    def write_rhythm(self, rhythm: Mapping[str, Any]) -> None:
        """Write how often exchanges come; empty: every step."""
        self._rhythm = rhythm
        if rhythm:
            self.log.write("local", **rhythm)

    def write_run(
        self,
        world: World,
        *,
        framework: str,
        compression: str,
        names: Sequence[str],
        costs: Sequence[LevelCost],
        parameters: int,
        gradient_bytes: int,
        batch_size: int,
        limits: Mapping[str, Any] | None,
        probes: Sequence[Sequence[int]],
    ) -> None:
        """Open the log with the job's description."""
        self.log.write(
            "run",
            framework=framework,
            ranks=world.transport.size,
            hosts=world.hosts,
            transport=world.transport.name,
            collective=world.collective,
            compression=compression,
            ladder=list(names),
            parameters=parameters,
            gradient_bytes=gradient_bytes,
            batch_size=batch_size,
            payload_bytes={name: cost.payload_bytes for name, cost in zip(names, costs, strict=True)},
            levels=costs_of_levels(names, costs),
            limits=limits,
            probes=probes,
        )

    @property
    def window_is_full(self) -> bool:
        """Whether the window has as many steps as the settings say."""
        return len(self._window) >= self._window_steps

    @property
    def trace_is_full(self) -> bool:
        """Whether the observations fill a line."""
        return len(self._trace) >= TRACE_STEPS

    def add_step(self, seen: Observation, loss: float, compute: np.ndarray) -> None:
        """Add a step to the window. ``loss``: NaN if none was reported; ``compute``: (ranks,), seconds of each."""
        self._window.append((seen, loss, compute))

    def add_observation(self, level: int, seen: Observation) -> None:
        """Add a step that the controller observes to the trace."""
        norms = (None if math.isnan(value) else value for value in (seen.error, seen.gradient_norm))
        known = *norms, seen.learning_rate, seen.probe_bytes, int(seen.flushes)
        self._trace.append([level, *(round(value * 1e6) for value in seen.times), *known])

    def write_trace(self, steps: int) -> None:
        """Write the observations up to now. ``steps``: number of steps observed so far."""
        if self._trace:
            self.log.write("trace", keep=False, last_step=steps - 1, steps=self._trace)
            self._trace = []

    def write_window(self, steps: int, label: str, payload_bytes: int) -> None:
        """Write the window up to now.

        Args:
            steps: number of steps observed so far.
            label: of the window's steps, see ``label``.
            payload_bytes: bytes that one rank sent in the window's last step.
        """
        if not self._window:
            return
        observed = [seen for seen, *_ in self._window]
        times = median_times([seen.times for seen in observed])
        losses = [loss for _, loss, _ in self._window if math.isfinite(loss)]
        errors = [seen.error for seen in observed if not math.isnan(seen.error)]
        cosines = [seen.cosine for seen in observed if not math.isnan(seen.cosine)]
        ranks = np.round(np.median([compute for *_, compute in self._window], axis=0) * 1e3, 3)
        slowest = int(ranks.argmax())
        self.log.write(
            "window",
            first_step=steps - len(self._window),
            last_step=steps - 1,
            steps=len(self._window),
            level=label,
            step_ms=times.step * 1e3,
            compute_ms=times.compute * 1e3,
            codec_ms=times.codec * 1e3,
            exposed_comm_ms=times.exposed_comm * 1e3,
            overlapped_comm_ms=times.overlapped_comm * 1e3,
            input_wait_ms=times.input_wait * 1e3,
            payload_bytes=payload_bytes,
            error=median(errors) if errors else None,
            cosine=sum(cosines) / len(cosines) if cosines else None,
            loss=sum(losses) / len(losses) if losses else None,
            slowest_rank=slowest,
            slowest_compute_ms=float(ranks[slowest]),
            middle_compute_ms=float(np.median(ranks)),
            compute_ms_by_rank=ranks.tolist() if len(ranks) <= MOST_RANKS else None,
        )
        self._window = []
        for callback in self.callbacks:
            callback(dict(self.log.last_window or {}))

    def write_decision(self, steps: int, names: Sequence[str], level: int, decision: Decision) -> None:
        """Write the controller's decision. ``level``: the present one, of ``names``."""
        fields: dict[str, Any] = {"from": names[level], "to": names[decision.level]}
        self.log.write("decision", step=steps, **fields, reason=decision.reason, evidence=decision.evidence)

    def write_end(self, level: str, steps: int, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Close the log with the user's ``facts``; return the run's figures, times of ``level``, which was the last."""
        figures = self.log.medians(level)
        self.log.write("end", steps=steps, wall_seconds=round(time.monotonic() - self._began, 3), **facts)
        return {"level": level, "steps": steps, **figures}

    def last_times(self) -> dict[str, float]:
        """Times of the last complete window in milliseconds, NaN before it."""
        last = self.log.last_window or {}
        return {name: last.get(name, math.nan) for name in TIMES}

    @property
    def status(self) -> str:
        """Level and times of the last complete window, in a few words."""
        last = self.log.last_window
        if last is None:
            return "measuring"
        return (
            f"level {last['level']}  step {last['step_ms']:.2f} ms, of which {last['exposed_comm_ms']:.2f} ms "
            "waiting for the network"
        )


def check_facts(facts: Mapping[str, Any]) -> None:
    """Raise ValueError if a fact of the user's has the name of another field."""
    if taken := TAKEN & facts.keys():
        raise ValueError(f"The report has {', '.join(sorted(TAKEN))} itself. Received: {', '.join(sorted(taken))}")


def label(ladder: Ladder, plan: Plan) -> str:
    """Name in the run log of a step that runs ``plan``: its level, or ``DRAINING``."""
    return DRAINING if ladder.flushes(plan) else ladder.names[plan.level]


def costs_of_levels(names: Sequence[str], costs: Sequence[LevelCost]) -> dict[str, dict[str, float]]:
    """Costs in the run log's form."""
    return {
        name: {
            "payload_bytes": cost.payload_bytes,
            "last_bytes": cost.last_bytes,
            "messages": cost.messages,
            "codec_ms": round(cost.codec * 1e6) / 1e3,
            "keeps_residual": cost.keeps_residual,
            "passes": cost.passes,
            "delay_weight": cost.delay_weight,
        }
        for name, cost in zip(names, costs, strict=True)
    }
