"""``powersgd:r``: rank-r projections of every matrix on the basis that its own step has learned, in two passes.

As PowerSGD (Vogels et al., arXiv 1905.13727): of a gradient matrix G (n x m) the first pass sends ``P = G Q`` and
delivers nothing; the orthonormalised sum of P is the basis of the second, which sends ``S = G^T P`` and delivers
``P S^T``. The orthonormalised sum of S is Q of the next step. So it is ``lowrank:r`` with both sides in one step.

Sent: r (n + m) floats, the bytes of ``lowrank:2r``, and dense tensors in the second pass. The basis is no step late,
and products are narrower: 8 n m r flops instead of 12; but there are two all-reduces a bucket, one after the other.

The deflated form, which also delivers ``P Q^T`` of the first pass, delivers the same sum: what the sum of P spans, the
second pass has whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdplus.compression.lowrank import LowRank


@dataclass(frozen=True)
class PowerSGD(LowRank):
    """Two-pass low-rank compression."""

    learns = "bases: the orthonormalised sum of the first pass"
    paper = "1905.13727"
    passes = 2
    memory_passes = 6.0
    # What it holds back is small in this step's own directions, not what the last step's have missed.
    delay_weight = 0.6

    @property
    def name(self) -> str:
        """``powersgd:r``."""
        return f"powersgd:{self.rank}"
