"""``terngrad``: -1, 0 or 1 times a shared scale, by chance, without a residual.

TernGrad (Wen et al., arXiv 1705.07878): an element becomes its sign with probability |x| / scale. The paper shares the
scale (its section on scaler sharing) and clips gradients at 2.5 standard deviations; so does this. Different from the
paper: that clip is also the scale, where the paper takes the largest magnitude that is left after clipping; it is one
step late and covers a bucket, not a layer; and a lane has as many bits as a sum of N signs needs, 3 bits on 2 or 3
ranks.
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
        """What a sum of signs needs."""
        return fewest_bits(ranks)

    def clip_multiple(self, levels: int) -> float:
        """The paper's clipping constant."""
        return 2.5
