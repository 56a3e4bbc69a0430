"""``randomk:share``: blocks that a hash of seed, bucket and step picks.

Random sparsification with a shared seed (Stich et al.: Sparsified SGD with memory, arXiv 1809.07599), in blocks. The
bucket's blocks are cut into as many groups as blocks are sent, and every group sends one of its blocks in turn,
starting from a place that the hash draws anew whenever the group has been round. So every block is sent once a round,
and none waits for more than two: with independent draws some would wait for many rounds and arrive many times too
large.

Sent: 4 k bytes for k elements. Work: one copy of what is sent; nothing is read of what is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdplus.compression.blocks import BlockSelection
from hvdplus.compression.contract import Context, Spec
from hvdplus.compression.hashing import key
from hvdplus.compression.ops import Array, Ops


@dataclass(frozen=True)
class RandomK(BlockSelection):
    """Hashed choice of blocks."""

    learns = "the step number"
    paper = "1809.07599"
    measured = 0
    shows_all = False

    def init(self, ops: Ops, spec: Spec) -> Context:
        """Step 0 and its blocks."""
        return self._context(ops, spec, ops.from_numpy(np.zeros(1, np.int32)))

    def chosen(self, ops: Ops, ctx: Context) -> Array:
        """One block of every group."""
        return ctx.state[1]

    def advance(self, ops: Ops, ctx: Context, total: Array) -> Context:
        """The next step and its blocks."""
        return self._context(ops, ctx.spec, ctx.state[0] + 1)

    def _context(self, ops: Ops, spec: Spec, step: Array) -> Context:
        cut = self.cut(spec)
        bounds = np.arange(cut.chosen + 1, dtype=np.int64) * cut.blocks // max(1, cut.chosen)
        starts = ops.from_numpy(bounds[:-1].astype(np.int32))
        lengths = ops.from_numpy(np.diff(bounds).astype(np.int32))
        groups = ops.from_numpy(np.arange(cut.chosen, dtype=np.int32))
        drawn = ops.scramble(ops.scramble(groups + key(spec.seed, spec.position)) + step // lengths)
        return Context(spec, 0, (step, starts + (drawn % lengths + step % lengths) % lengths))
