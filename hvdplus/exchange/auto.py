"""``auto``: the controller, and its lines in the run log.

What the controller is told stands in the log, with as many digits, so that a replay decides the same. All ranks tell it
the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hvdplus.control.config import Config
from hvdplus.control.controller import Controller, Decision, Observation
from hvdplus.control.link import LevelCost
from hvdplus.exchange.form import require_fields
from hvdplus.exchange.journal import Journal
from hvdplus.exchange.plan import Ladder
from hvdplus.settings import Settings

PREVIEWS = 2
"""Steps that may try a level, on average."""
NO_STEP = -1, ()
"""No step tries levels."""
LOSS_SCALING = "loss scaling would mix the units of residual and gradient"


class Auto:
    """Asks the controller. ``steps``: number of steps observed so far."""

    def __init__(self, ladder: Ladder, settings: Settings, costs: Sequence[LevelCost], journal: Journal) -> None:
        self.controller = Controller(ladder.names, tuple(costs), _config(settings))
        self._names, self._journal = ladder.names, journal
        self._probes: list[tuple[int, float]] = []
        """What sums took before training began: (bytes, seconds)."""
        self._previews_left = PREVIEWS * len(ladder.names)
        self._unforeseen: tuple[int, tuple[int, ...]] = NO_STEP
        """The first of two steps that try levels, and the levels."""

    @property
    def level(self) -> int:
        """That the controller wants to run."""
        return self.controller.level

    def describe(self) -> dict[str, Any]:
        """For the log's first line."""
        probes = [[size, round(seconds * 1e6)] for size, seconds in self._probes]
        return {"limits": asdict(self.controller.config), "probes": probes}

    def begin(self, probes: Sequence[tuple[int, float]]) -> None:
        """Before the first step: sums of so many bytes took so many seconds."""
        self._probes = [(size, whole_microseconds(seconds)) for size, seconds in probes]
        self.controller.begin(self._probes)

    def resize(self, costs: Sequence[LevelCost], steps: int) -> None:
        """Take over the ``costs`` of buckets that were cut anew."""
        self.controller.costs = tuple(costs)
        self._journal.write_trace(steps)

    def observe(self, level: int, seen: Observation, steps: int) -> Decision | None:
        """Take in a step that ran at ``level``. Returns a decision, if one is due."""
        self._journal.add_observation(level, seen)
        decision = self.controller.observe(level, seen)
        if decision or self._journal.trace_is_full:
            self._journal.write_trace(steps)
        return decision

    def unforeseen(self, step: int, first: int) -> tuple[int, ...]:
        """Levels to try at ``step``, which is the ``first`` of two or the one after it, see ``preview.py``. The second
        tries what the first did."""
        if step == first != self._unforeseen[0]:
            self._unforeseen = first, self.controller.unforeseen() if self._previews_left > 0 else ()
        return self._unforeseen[1] if self._unforeseen[0] == first else ()

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Go on with a controller's memory; the steps that come may have had their numbers before."""
        self.controller.recall(memory)
        self._unforeseen = NO_STEP

    def foresee(self, errors: Sequence[float], steps: int) -> None:
        """A preview: error of every level, see ``Preview.see``."""
        self._previews_left -= 1
        known = {level: seven_digits(error) for level, error in enumerate(errors) if math.isfinite(error)}
        if known:
            self._unforeseen = self._unforeseen[0], ()
            self._journal.write_trace(steps)
            shown = {self._names[level]: error for level, error in known.items()}
            self._journal.log.write("preview", step=steps, errors=shown)
            self.controller.foresee(known)

    def forbid(self, level: int, why: str, steps: int) -> bool:
        """Never again run ``level`` or one above it. Returns whether that is new."""
        if self.controller.refused.get(level) == why:
            return False
        self._journal.write_trace(steps)
        self._unforeseen = NO_STEP
        self._journal.log.write("forbid", step=steps, level=self._names[level], reason=why)
        self.controller.forbid(level, why)
        return True

    def stretch(self, every: int, factor: float, steps: int) -> None:
        """So many local steps, ``factor`` times as many as before, come before each exchange that is observed now."""
        self._journal.write_trace(steps)
        self._journal.log.write("stretch", step=steps, every=every, factor=factor)
        self._unforeseen = NO_STEP
        self.controller.stretch(factor)


def check_memory(memory: Any, controller: Controller) -> None:
    """Raise ValueError unless a controller like this one can go on with ``memory``."""
    require_fields(memory, list(controller.memory()), "its controller")
    try:
        Controller(controller.names, controller.costs, controller.config).recall(memory)
    except ValueError as error:
        raise ValueError(f"The state of hvdplus is damaged: its controller: {error}") from None


def asked_anew(memory: Mapping[str, Any]) -> dict[str, Any]:
    """A controller's memory without what a loss scaler has forbidden: one that is still there forbids it again."""
    return {**memory, "refused": {level: why for level, why in memory["refused"].items() if why != LOSS_SCALING}}


def whole_microseconds(seconds: float) -> float:
    """Rounded as in the log."""
    return round(seconds * 1e6) / 1e6


def seven_digits(value: float) -> float:
    """Rounded as in the log."""
    return float(f"{value:.7g}")


def _config(settings: Settings) -> Config:
    return Config(
        dense_steps=settings.dense_steps, delay_price=settings.delay_price, error_budget=settings.error_budget
    )
