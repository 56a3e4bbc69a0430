"""How much communication the computation of a step hides: sums run while the backward pass goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvdplus.control.blocks import Block
from hvdplus.control.link import LevelCost, Link

HIDES = 0.7
"""Share of the computation that communication may hide behind, where no step has shown how much it is."""
BOUND = 1.5
"""Exposed communication over the last bucket's, from which it shows that."""


@dataclass
class Hiding:
    """What was seen of it, whatever the level."""

    share: float = 0.0
    """Communication that was hidden, as a share of the computation that it hid behind: the most that was seen."""
    bound: bool = False
    """Whether a step waited for more than its last bucket, so that the computation hides no more than that."""

    def see(self, block: Block, cost: LevelCost, link: Link) -> None:
        """Take in a block of a level that asks ``cost`` of the link."""
        self.share = max(self.share, min(block.overlapped, block.busy + block.codec) / block.busy)
        if straight := link.seconds(cost):  # the last bucket's share of this block's own sums, however long they take
            self.bound |= block.exposed > BOUND * block.comm * link.exposed(cost, math.inf) / straight > 0.0

    def least(self, busy: float) -> float:
        """Seconds of communication that a computation of ``busy`` seconds was seen to hide."""
        return self.share * busy

    def most(self, busy: float) -> float:
        """Seconds that it may hide, as far as steps have shown."""
        return self.share * busy if self.bound else max(HIDES, self.share) * busy
