"""The time for exploring: trials of levels that are not expected to be better, bandwidth probes, previews of levels.

Trials and probes may take a share of the time, ``Config.explore``, and probes half of it, unless one after another says
that the link has changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvdplus.control.blocks import Block
from hvdplus.control.meter import StepTimes

PROBE_STEPS = 40
"""Least steps between two bandwidth probes, unless one says that the link is another."""
PROBES = 0.5
"""What probes may take, as a share of the time for exploring."""
HORIZON = 0.25
"""How long what a trial shows is of use, as a share of the time so far: errors, link and machine change."""


@dataclass
class Exploring:
    """What was spent of it."""

    elapsed: float = 0.0
    """Seconds of all observed steps."""
    spent: float = 0.0
    """Seconds that trials and probes took beyond the level held."""
    probed: float = 0.0
    """Those of bandwidth probes."""
    until_probe: int = PROBE_STEPS
    """Steps until the next probe may come."""

    @property
    def horizon(self) -> float:
        """Seconds for which what a trial shows is of use."""
        return HORIZON * self.elapsed

    def see(self, times: StepTimes) -> None:
        """A step was observed, perhaps with a probe or a preview."""
        self.elapsed += times.step
        self.spent += times.probe
        self.until_probe = max(0, self.until_probe - 1)

    def see_trial(self, times: StepTimes, held: Block) -> None:
        """It ran at the level that is tried. ``times``: without the probe; ``held``: the held level's last block."""
        # What its sums and codecs take more: an evaluation between two steps is nobody's.
        longer = min(times.step - held.step, times.codec + times.exposed_comm - held.rest)
        self.spent = max(0.0, self.spent + longer)

    def affords(self, seconds: float, share: float) -> bool:
        """Whether so many seconds more fit into this share of the time."""
        return self.spent + seconds <= share * self.elapsed

    def affords_probe(self, seconds: float, share: float) -> bool:
        """Whether a probe fits into what probes may take of this share of the time, and those so far into all of it."""
        return seconds <= PROBES * share * self.elapsed and self.probed <= share * self.elapsed

    def see_probe(self, seconds: float, share: float, *, step: float, again: bool) -> None:
        """A probe took so long beside steps of ``step`` seconds. ``again``: another is due at once."""
        self.probed += seconds
        if share and not again:  # a log may be replayed with none
            self.until_probe = max(PROBE_STEPS, math.ceil(seconds / (PROBES * share * step)))
