"""Which level to run: a pure function of measurements that every rank shares.

No clock, no MPI, no framework: numbers in, decisions out, so that it is tested with numbers alone and can be replayed
from a run log. Every rank runs it on the same figures and so decides the same at the same step.

    dense ──(communication is a bottleneck)──► try the next level ──► keep the fastest tried, if it beats dense
      ▲                                                                   │
      └───────────────(step time or exposed communication changed)────────┘ hold and watch

The least compression that removes the bottleneck wins: levels are tried from the least upwards, and the walk ends at
the first under which communication is no bottleneck any more. A level that does not beat dense by a margin is given
up and not tried again while the link stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from hvdplus.meter import StepTimes, median_times


class Decision(NamedTuple):
    """One decision, with its reason and the evidence behind it; times in milliseconds."""

    level: int
    reason: str
    evidence: dict[str, float]


class Mode(Enum):
    """What the controller is busy with."""

    DENSE = "measuring dense steps"
    TRIAL = "trying a level"
    HOLD = "holding a level"


@dataclass(frozen=True)
class Limits:
    """The numbers that decisions hang on."""

    dense_steps: int = 15
    """Steps at level 0 before anything else is tried; the first ``settle_steps`` are not counted in medians."""
    trial_steps: int = 12
    """Steps that a level is measured for."""
    settle_steps: int = 4
    """Steps after a change that are not counted: new buffers, new names, figures that arrive late."""
    bottleneck: float = 0.05
    """Share of the step above which exposed communication is a bottleneck."""
    margin: float = 0.03
    """Share of the dense step that a level must save to be kept."""
    drift: float = 0.3
    """Relative change of the step time that makes the controller measure anew."""
    watch_steps: int = 25
    """Steps between two looks at the drift; two in a row must agree."""
    probe_steps: int = 400
    """Steps after which a compressed run looks at dense again: a faster link cannot be seen through compression.
    Doubles after every look that changed nothing."""


@dataclass
class Controller:
    """State of the decision maker. Levels are indices of the ladder, least compression first; 0 is dense."""

    names: tuple[str, ...]
    limits: Limits = field(default_factory=Limits)
    payload_bytes: tuple[int, ...] = ()
    """Bytes that a rank sends a step at every level, as estimated; a level that sends no less than the one below it is
    passed over. Empty: unknown."""
    mode: Mode = Mode.DENSE
    level: int = 0
    measured: dict[int, StepTimes] = field(default_factory=dict)
    """Median times of every level measured since the last look at dense."""
    steps_at_level: int = 0
    steps_held: int = 0
    window: list[StepTimes] = field(default_factory=list)
    drifted: int = 0
    probe_after: int = 0
    chosen_before: int | None = None

    def __post_init__(self) -> None:
        self.probe_after = self.limits.probe_steps

    def forbid(self, level: int) -> None:
        """Never again run ``level`` or one above it (1 or more)."""
        if len(self.names) > level:
            self.names = self.names[:level]
            if self.level >= level:
                self.measured.clear()
                self._measure_anew("")

    def observe(self, level: int, times: StepTimes) -> Decision | None:
        """Take in one step that ran at ``level``; times are reduced over ranks. Returns a decision, if one is due."""
        if level != self.level:  # a step that was under way when the level changed
            return None
        self.steps_at_level += 1
        if self.steps_at_level <= self.limits.settle_steps:
            return None
        self.window.append(times)
        if self.mode is Mode.DENSE:
            return self._after_dense() if self.steps_at_level >= self._dense_wanted() else None
        if self.mode is Mode.TRIAL:
            return self._after_trial() if len(self.window) >= self.limits.trial_steps else None
        return self._while_holding()

    def _dense_wanted(self) -> int:
        """A later look at dense is as long as a trial, the first as long as the user wants."""
        later = self.limits.settle_steps + self.limits.trial_steps
        return later if self.chosen_before is not None else max(self.limits.dense_steps, self.limits.settle_steps + 3)

    def _after_dense(self) -> Decision:
        dense = self.measured[0] = median_times(self.window)
        share = _share(dense)
        if share <= self.limits.bottleneck:
            return self._hold(
                0,
                f"communication is no bottleneck: {dense.exposed_comm * 1e3:.2f} ms exposed are {share:.0%} of a "
                f"{dense.step * 1e3:.2f} ms step (limit {self.limits.bottleneck:.0%})",
            )
        first = self._above(0)
        if first is None:
            return self._hold(
                0,
                f"communication holds up {share:.0%} of a {dense.step * 1e3:.2f} ms step, and there is no level that "
                "sends less",
            )
        return self._try(
            first,
            f"communication holds up {share:.0%} of a {dense.step * 1e3:.2f} ms step "
            f"({dense.exposed_comm * 1e3:.2f} ms exposed, limit {self.limits.bottleneck:.0%})",
        )

    def _after_trial(self) -> Decision:
        times = self.measured[self.level] = median_times(self.window)
        dense = self.measured[0]
        share, name = _share(times), self.names[self.level]
        following = self._above(self.level)
        if following is not None:
            if share > self.limits.bottleneck:
                return self._try(
                    following,
                    f"at {name} communication still holds up {share:.0%} of a {times.step * 1e3:.2f} ms step "
                    f"({times.exposed_comm * 1e3:.2f} ms exposed)",
                )
            if times.step > (1 - self.limits.margin) * dense.step:
                return self._try(
                    following,
                    f"{name} hides communication, but its {times.step * 1e3:.2f} ms step saves less than "
                    f"{self.limits.margin:.0%} of the dense {dense.step * 1e3:.2f} ms",
                )
        fastest = min(times.step for times in self.measured.values())
        # The least compression that is as good as the fastest: a margin is the least that counts as a difference.
        best = min(level for level, times in self.measured.items() if times.step * (1 - self.limits.margin) <= fastest)
        tried = ", ".join(f"{self.names[i]} {times.step * 1e3:.2f} ms" for i, times in sorted(self.measured.items()))
        if best == 0:
            return self._hold(
                0, f"compression does not pay: no level saves {self.limits.margin:.0%} of the dense step ({tried})"
            )
        saved = 1 - self.measured[best].step / dense.step
        return self._hold(best, f"{self.names[best]} saves {saved:.0%} of the dense step ({tried})")

    def _above(self, level: int) -> int | None:
        """The next level that sends less than ``level``."""
        sent = self.payload_bytes or range(len(self.names), 0, -1)
        return next((i for i in range(level + 1, len(self.names)) if sent[i] < sent[level]), None)

    def _while_holding(self) -> Decision | None:
        self.steps_held += 1
        if len(self.window) < self.limits.watch_steps:
            return None
        now, self.window = median_times(self.window), []
        before = self.measured[self.level]
        change = now.step / before.step - 1 if before.step else 0.0
        # A step that got longer or shorter for other reasons than the wire is none of our business.
        wire = abs(now.exposed_comm - before.exposed_comm) > self.limits.margin * before.step
        self.drifted = self.drifted + 1 if abs(change) > self.limits.drift and wire else 0
        if self.drifted >= 2:
            return self._measure_anew(
                f"the step changed by {change:+.0%} to {now.step * 1e3:.2f} ms, with {now.exposed_comm * 1e3:.2f} ms "
                f"of exposed communication instead of {before.exposed_comm * 1e3:.2f} ms"
            )
        if self.level and self.steps_held >= self.probe_after:
            return self._measure_anew(f"{self.steps_held} steps at {self.names[self.level]}: is it still needed?")
        return None

    def _measure_anew(self, why: str) -> Decision:
        self.chosen_before = self.level
        self.mode = Mode.DENSE
        self.steps_at_level = 0  # also where level 0 goes on: a look at dense is never a look at a single step
        return self._change(0, why)

    def _try(self, level: int, why: str) -> Decision:
        self.mode = Mode.TRIAL
        return self._change(level, why)

    def _hold(self, level: int, why: str) -> Decision:
        # A look at dense that changed nothing was not worth much: wait twice as long for the next.
        same = level == self.chosen_before
        self.probe_after = 2 * self.probe_after if same else self.limits.probe_steps
        self.chosen_before = level
        self.mode = Mode.HOLD
        self.steps_held = self.drifted = 0
        return self._change(level, why)

    def _change(self, level: int, why: str) -> Decision:
        # The evidence behind the decision, before a new look at dense makes it old.
        evidence = {
            f"{self.names[i]}.{figure}_ms": round(getattr(times, figure) * 1e3, 4)
            for i, times in sorted(self.measured.items())
            for figure in ("step", "exposed_comm", "codec")
        }
        if self.mode is Mode.DENSE:
            self.measured.clear()
        if level != self.level:
            self.steps_at_level = 0
        self.level = level
        self.window = []
        return Decision(level, why, evidence)


def _share(times: StepTimes) -> float:
    """Exposed communication as a share of the step."""
    return times.exposed_comm / times.step if times.step else 0.0
