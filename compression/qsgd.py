"""``qsgd:B``: stochastic rounding to integers of B bits, without a residual.

QSGD (Alistarh et al., arXiv 1610.02132), made summable: unbiased stochastic rounding to levels that all ranks share.
Different from the paper: the scale is not each rank's own norm but the last step's root mean square over all ranks,
times sqrt(512), about the norm of the paper's buckets of 512 elements; larger values are clipped (and counted), which
the paper never has to do; integers have a fixed width, because Elias codes do not add up. B counts the sum's bits, so
the levels per rank shrink with the number of ranks.
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
        """``width``, for any number of ranks."""
        return self.width

    def clip_multiple(self, levels: int) -> float:
        """The norm of 512 typical elements."""
        return math.sqrt(512)
