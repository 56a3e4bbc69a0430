"""The ladder of levels, their step variants, and the plan that picks the variant of a step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from hvdplus.compression import Compressor, NoCompression, parse
from hvdplus.exchange.form import is_count, is_share


class Variant(NamedTuple):
    """A step variant: fixed code that a plan picks. Every rank has the same variants in the same order."""

    level: int
    side: int
    flushes: bool
    """Whether a residual is flushed on the way back to dense."""
    asks: bool = False
    """Whether ranks first sum what they have to know to encode, as the level has just begun."""


class Plan(NamedTuple):
    """One step's choices; equal on every rank, because they are made from shared values only."""

    level: int = 0
    """Position in the ladder."""
    side: int = 0
    """Which of the compressor's alternating sides is sent."""
    flush_fraction: float = 0.0
    """Share of the residual that joins the gradient; 0: no residual is outstanding, or it waits."""
    asks: bool = False
    """Whether ranks first sum what they have to know to encode, as the level has just begun."""
    measurement: int = 0
    """Number of the measurement of gradients and residuals that ranks make in this step, from 1 on; 0: none."""
    probe_bytes: int = 0
    """Size of a bandwidth probe (an all-reduce of zeros) after all other sums; 0: none."""


class Ladder:
    """The levels of a run, least compression first, and the step variants that run them."""

    def __init__(self, levels: Sequence[str | Compressor]) -> None:
        """Raises ValueError for an unknown or repeated name."""
        self.compressors: tuple[Compressor, ...] = tuple(
            parse(level) if isinstance(level, str) else level for level in levels
        )
        self.names: tuple[str, ...] = tuple(compressor.name for compressor in self.compressors)
        self._wire_names = [re.sub(r"[^A-Za-z0-9_.]", "_", name) for name in self.names]
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"The ladder names a level twice. Received: {', '.join(self.names)}")
        self.variants: tuple[Variant, ...] = tuple(
            Variant(level, side, flushes, asks)
            for level, compressor in enumerate(self.compressors)
            for side in range(compressor.turns)
            for flushes in ([False] if compressor.keeps_residual else [False, True])
            for asks in ([False, True] if compressor.asks else [False])
        )

    def variant(self, plan: Plan) -> int:
        """Index of the variant that runs ``plan``."""
        return self.variants.index(Variant(plan.level, plan.side, self.flushes(plan), plan.asks))

    def allows(self, plan: Plan) -> bool:
        """Whether there is a variant that runs ``plan``, and the other fields of ``plan`` are valid."""
        levels = len(self.names)
        if not (is_count(plan.level, levels) and is_count(plan.side) and isinstance(plan.asks, bool)):
            return False
        if not (is_share(plan.flush_fraction) and is_count(plan.measurement) and is_count(plan.probe_bytes)):
            return False
        if self.keeps_residual(plan) and plan.flush_fraction != 1:  # the rest of the residual would be lost
            return False
        return Variant(plan.level, plan.side, self.flushes(plan), plan.asks) in self.variants

    def flushes(self, plan: Plan) -> bool:
        """Whether the step flushes a residual that its own level would not keep."""
        return plan.flush_fraction > 0 and not self.compressors[plan.level].keeps_residual

    def needs_finite_check(self, plan: Plan) -> bool:
        """Whether the step changes residuals or contexts, or could hide a value that is not finite: then every rank
        has to know in the same step whether all values were finite."""
        return plan.flush_fraction > 0 or self.compressors[plan.level].needs_finite_check

    def plain(self, plan: Plan) -> bool:
        """Whether the step sends gradients as they are, and nothing else."""
        return isinstance(self.compressors[plan.level], NoCompression) and not plan.flush_fraction

    def keeps_residual(self, plan: Plan) -> bool:
        """Whether the level of the step keeps a residual."""
        return self.compressors[plan.level].keeps_residual

    def tensor_name(self, prefix: str, bucket: int, plan: Plan | Variant) -> str:
        """Name of a bucket's all-reduce. A payload's length depends on level and side, so both are part of the name: a
        name that keeps its shape stays in Horovod's response cache. Only letters that TensorFlow allows in op names."""
        return f"{prefix}.{bucket}.{self._wire_names[plan.level]}.{plan.side}"
