"""``terngrad``: stochastic rounding to -1, 0 or 1 times a shared scale, without a residual.

TernGrad (Wen et al., arXiv 1705.07878): an element becomes its sign with probability |x| / scale. As in the paper,
ranks share the scale (its section on scaler sharing), and gradients are clipped at 2.5 standard deviations. Different
from the paper: the clip is also the scale, while the paper takes the largest magnitude after clipping; the scale is one
step late; a lane has as many bits as a sum of N signs needs, 3 bits on 2 or 3 ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdplus.compression.integer import Integer, fewest_bits


@dataclass(frozen=True)
class TernGrad(Integer):
    """Stochastic ternary gradients."""

    name = "terngrad"
    paper = "1705.07878"
    keeps_residual = False
    stochastic = True

    def bits(self, ranks: int) -> int:
        """As many as a sum of ``ranks`` signs needs."""
        return fewest_bits(ranks)

    def clip_multiple(self, levels: int) -> float:
        """The paper's clipping constant."""
        return 2.5
