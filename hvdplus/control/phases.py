"""Phases of a training in which a residual would be missed most: gradients grow, or the learning rate falls at once.

After Agarwal et al., Accordion (MLSys 2021), whose rule compresses less in such phases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

CRITICAL_STEPS = 50
"""Length of a critical phase."""
CRITICAL_CHANGE = 2.0
"""Factor by which gradient norms rise, or a learning rate falls, as one begins."""
READINGS = 4
"""Gradient norms whose median is held against that of as many before."""


@dataclass
class Phases:
    """What was seen of the training."""

    left: int = 0
    """Steps that are left of a critical phase; 0: it is none."""
    _norms: list[float] = field(default_factory=list)
    _learning_rate: float = 0.0

    def observe(self, gradient_norm: float, learning_rate: float) -> None:
        """Take in one step. NaN: the norm was not measured; 0: the learning rate is unknown."""
        self.left = max(0, self.left - 1)
        last = self._learning_rate
        self._learning_rate = learning_rate or last
        fell = 0 < learning_rate * CRITICAL_CHANGE <= last
        if not math.isnan(gradient_norm):
            self._norms = [*self._norms[1 - 2 * READINGS :], gradient_norm]
        before, now = self._norms[:READINGS], self._norms[READINGS:]
        grew = len(now) == READINGS and median(now) > CRITICAL_CHANGE * median(before)
        if grew:  # the same rise begins no other phase
            self._norms = now
        if fell or grew:
            self.left = CRITICAL_STEPS
