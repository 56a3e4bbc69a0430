"""Which plan comes next: asking at a level's first steps, flushing the residual after it, alternating sides.

    before the step           its plan                               the step counts (all ranks were finite)
    ------------------------  -------------------------------------  ---------------------------------------
    level keeps a residual    level, its side, fraction 1            the other side
    flush left: f > 0         level, fraction 1/f                    f - 1; at 0 nothing is outstanding
    else                      level                                  -
    asking left: a > 0        as above, and it asks first            a - 1

If a step was exchanged but not taken, its share of the flush is still outstanding: f + 1 (``repeat``). If any rank's
gradient was not finite, the step does not count (where the host runs ahead of a device it does). Changes of level take
effect with the next plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdplus.exchange.form import is_count, is_list, require, require_fields
from hvdplus.exchange.plan import Ladder, Plan
from hvdplus.exchange.residual import flush_fraction

PATIENCE = 8
"""Overflowing steps in a row after which contexts learn from them."""


class Schedule:
    """The present level, its first steps, and the flush after it. Equal on every rank."""

    def __init__(self, ladder: Ladder, *, flush_steps: int) -> None:
        self.ladder = ladder
        self.level = 0
        self._flush_steps = flush_steps
        self._sides = [0] * len(ladder.names)
        self._flush_left, self._asking_left = 0, ladder.compressors[0].asking_steps
        self._context_source: int | None = None
        """The level whose contexts, and so whose side, the present one reuses in the coming plan."""
        self._overflows = 0
        """Counter: ``PATIENCE`` up for every step that overflowed, one down for every other."""

    def learns(self, overflow: bool) -> bool:
        """Whether contexts learn from the step's sums; asked once in every step that was finite on all ranks.

        They do not learn from an overflow, as the next step's values will be in scale again. But from the
        ``PATIENCE``-th overflow in a row on they do: gradients have grown for good.
        """
        self._overflows = min(self._overflows + PATIENCE, PATIENCE**2) if overflow else max(self._overflows - 1, 0)
        return not overflow or self._overflows == PATIENCE**2

    @property
    def transitional(self) -> bool:
        """Whether the coming step asks, or flushes a residual that the present level does not keep."""
        return self._flush_left > 0 or self._asking_left > 0

    def set_level(self, level: int) -> None:
        """Run ``level`` from the next plan on."""
        if self.level == level:
            return
        before, compressor = self.ladder.compressors[self.level], self.ladder.compressors[level]
        if compressor.keeps_residual:
            self._flush_left = 0
        elif before.keeps_residual:
            self._flush_left = self._flush_steps
        self._asking_left = compressor.asking_steps
        if compressor.can_reuse(before):  # the exchange hands the contexts over
            self._context_source, self._asking_left = self.level, 0
        self.level = level

    def ask(self) -> None:
        """Contexts were dropped: the coming steps ask as the level's first ones do."""
        self._asking_left = self.ladder.compressors[self.level].asking_steps

    def flush(self) -> None:
        """A residual came from elsewhere: if the level keeps none, send it over the coming steps."""
        if not self.ladder.compressors[self.level].keeps_residual:
            self._flush_left = self._flush_steps

    def repeat(self) -> None:
        """The last step was exchanged but not taken: its share of the flush is still outstanding."""
        if not self.ladder.compressors[self.level].keeps_residual:  # else the level sends it anyway
            self._flush_left += 1

    def commit(self, plan: Plan) -> None:
        """Count a step that ran ``plan``."""
        compressor = self.ladder.compressors[plan.level]
        self._sides[plan.level] = (plan.side + 1) % compressor.turns
        # The level may have changed while the step ran, which ended a flush early.
        if self.ladder.flushes(plan) and self._flush_left:
            self._flush_left -= 1
        if plan.asks and plan.level == self.level and self._asking_left:
            self._asking_left -= 1

    def next_plan(self) -> Plan:
        """The coming step's plan, without norms and probe."""
        if self._context_source is not None:
            turns = self.ladder.compressors[self.level].turns
            self._sides[self.level], self._context_source = self._sides[self._context_source] % turns, None
        keeps = self.ladder.compressors[self.level].keeps_residual
        fraction = 1.0 if keeps else flush_fraction(self._flush_left)
        return Plan(self.level, self._sides[self.level], fraction, self._asking_left > 0)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain values."""
        return {
            "level": self.level,
            "sides": list(self._sides),
            "flush_left": self._flush_left,
            "asking_left": self._asking_left,
            "overflows": self._overflows,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state`` that ``state()`` returned.

        Raises:
            ValueError: a value is missing or impossible.
        """
        self.check(state)
        self.level, self._sides = state["level"], list(state["sides"])
        # Settings of another job may have asked for more steps.
        self._flush_left = min(state["flush_left"], self._flush_steps)
        self._asking_left, self._overflows = state["asking_left"], state["overflows"]
        self._context_source = None

    def check(self, state: Any) -> None:
        """Raise ValueError where a value is missing or impossible."""
        require_fields(state, ("level", "sides", "flush_left", "asking_left", "overflows"), "its schedule")
        sides = [compressor.turns for compressor in self.ladder.compressors]
        require(is_count(state["level"], len(sides)), "the schedule's level", f"below {len(sides)}", state["level"])
        fits = is_list(state["sides"], is_count) and len(state["sides"]) == len(sides)
        fits = fits and all(map(is_count, state["sides"], sides))
        require(fits, "the schedule's sides", f"one a level, below {sides}", state["sides"])
        for name in ("flush_left", "asking_left"):
            require(is_count(state[name]), f"the schedule's {name}", "a number of steps", state[name])
        most = PATIENCE**2
        require(
            is_count(state["overflows"], most + 1), "the schedule's overflows", f"at most {most}", state["overflows"]
        )
        most = self.ladder.compressors[state["level"]].asking_steps
        require(state["asking_left"] <= most, "the schedule's asking_left", f"at most {most}", state["asking_left"])
