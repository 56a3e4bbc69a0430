"""``qsgd:B``: stochastic rounding to integers of B bits, without a residual.

QSGD (Alistarh et al., arXiv 1610.02132), summable: a random but on average exact rounding to levels that all ranks
share. Different from the paper: the scale is not each rank's own norm but the last step's root mean square over all
ranks, times sqrt(512), which is what the norm of the paper's buckets of 512 elements comes to; what is beyond it is
clipped (and counted), which the paper's norms never need; and integers of fixed width instead of Elias coding, which
does not add up. B counts the sum's bits, so the levels per rank shrink with the number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvdplus.compression.integer import MOST_BITS, Integer


@dataclass(frozen=True)
class QSGD(Integer):
    """Unbiased rounding to a shared grid."""

    width: int = 8
    """B, bits of a lane: 2 to 16."""

    paper = "1610.02132"
    keeps_residual = False
    stochastic = True

    def __post_init__(self) -> None:
        if not 2 <= self.width <= MOST_BITS:
            raise ValueError(f"qsgd has 2 to 16 bits, e.g. qsgd:8. Received: qsgd:{self.width}")

    @property
    def name(self) -> str:
        """``qsgd:B``."""
        return f"qsgd:{self.width}"

    def bits(self, ranks: int) -> int:
        """As asked for."""
        return self.width

    def clip_multiple(self, levels: int) -> float:
        """The norm of 512 typical elements."""
        return math.sqrt(512)
