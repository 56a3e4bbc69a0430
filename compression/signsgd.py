"""``signsgd``: the mean of the ranks' signs times a shared scale, with a residual.

signSGD (Bernstein et al., arXiv 1802.04434) in its mean form with error feedback (EF-signSGD: Karimireddy et al., arXiv
1901.09847), because the majority vote is not linear in the sum of signs. Different from the papers: the scale is half
the ranks' last root mean square, rounded to a power of two, where EF-signSGD takes each rank's mean magnitude (about
0.7 to 0.8 of the root mean square): half never exceeds the mean magnitude of a smooth distribution. Values below a 64th
of the scale are sent as zero, so that nothing is sent while the scale is far too large. A lane has as many bits as a
sum of N signs needs: 3 on 2 or 3 ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdplus.compression.integer import Integer, State, fewest_bits
from hvdplus.compression.ops import Array, Ops, magnitude

FINEST = 5
"""Values that round to zero on a grid this many octaves finer than the scale are sent as zero."""


@dataclass(frozen=True)
class SignSGD(Integer):
    """Signs that add up."""

    name = "signsgd"
    paper = "1802.04434, 1901.09847"

    def bits(self, ranks: int) -> int:
        """As many as a sum of ``ranks`` signs needs."""
        return fewest_bits(ranks)

    def clip_multiple(self, levels: int) -> float:
        """Magnitude that a sign stands for, as a multiple of the root mean square."""
        return 0.5

    def rounding(self, ops: Ops[Array], state: State[Array]) -> Array:
        """A step size so small that nearly every value is beyond the one level and becomes its sign."""
        # max(exponent - FINEST, -126) in integers; a smaller step size has no reciprocal.
        above = state.exponent - FINEST + 126
        return (above + magnitude(above)) // 2 - 126
