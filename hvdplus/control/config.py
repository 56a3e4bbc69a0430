"""The numbers of the controller's decisions that a run's log holds, so that a replay may change them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """The numbers of all decisions."""

    dense_steps: int = 0
    """Dense steps at the start; 0: a few, at the level that is expected to lose least."""
    block_steps: int = 8
    """Steps that a level is measured for at a time."""
    settle_steps: int = 3
    """Steps after a change that are not counted: new buffers, new names."""
    pairs: int = 3
    """Most turns of a level in one trial."""
    margin: float = 0.02
    """Share of the cost that counts as a difference between levels."""
    certainty: float = 2.0
    """Standard deviations between an estimate and its bound."""
    explore: float = 0.02
    """Share of the time that trials of levels that are not expected to be better may cost, and bandwidth probes."""
    delay_price: float = 0.25
    """κ; 0: only time counts. Fitted by ``benchmarks/delay.py`` to trainings of 200 steps from the start: 0.17 for
    integers, 0.28 for ``topk``, 0.32 for ``lowrank``; where they are longer, delay costs less. A kind of level that is
    far from it has a weight of its own, see ``LevelCost``."""
    critical_price: float = 2.0
    """Factor of κ in a critical phase, see ``phases.py``."""
    error_budget: float = 5.0
    """Largest error of a level, whatever it saves."""

    def __post_init__(self) -> None:
        for name in ("block_steps", "pairs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} has to be at least 1. Received: {getattr(self, name)}")
