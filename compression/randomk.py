"""``randomk:share``: blocks that a hash of seed, bucket and step picks.

Random sparsification with a shared seed (Stich et al.: Sparsified SGD with memory, arXiv 1809.07599), in blocks. The
bucket's blocks are cut into as many groups as blocks are sent, and every group sends one of its blocks in turn,
starting from a place that the hash draws anew whenever the group has been round. So every block is sent once a round,
and none waits for more than two: with independent draws some would wait for many rounds and arrive many times too
large.

A spike in a block that is not sent would arrive many steps late. So the root mean square of all there is rides along,
and a rank whose own is far beyond the sum of the last steps overflows.

Sent: 4 k bytes for k elements, and 4 bytes. Work: all is read once, what is sent is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdplus.compression.blocks import BlockSelection, Cut
from hvdplus.compression.contract import Context, Spec, beyond, follow
from hvdplus.compression.hashing import key
from hvdplus.compression.ops import Array, Ops


@dataclass(frozen=True)
class RandomK(BlockSelection):
    """Hashed choice of blocks."""

    learns = "the step number, and the root mean square of what is to be sent"
    paper = "1809.07599"

    def init(self, ops: Ops[Array], spec: Spec) -> Context[Array]:
        """Step 0 and its blocks."""
        return self._context(ops, spec, ops.from_numpy(np.zeros(1, np.int32)), ops.from_numpy(np.zeros(1, np.float32)))

    def measured(self, blocks: int) -> int:
        """One."""
        return 1

    def chosen(self, ops: Ops[Array], ctx: Context[Array]) -> Array:
        """One block of every group."""
        return ctx.state[1]

    def advance(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Context[Array]:
        """The next step and its blocks."""
        scale = follow(ops, ctx.state[2], total[-1:]) if self.cut(ctx.spec).blocks else ctx.state[2]
        return self._context(ops, ctx.spec, ctx.state[0] + 1, scale)

    def measure(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None) -> Array:
        """The root mean square of all, which shows what is not finite in a block that stays behind."""
        return ops.reshape(ops.rms(grad), (1,))

    def overflows(self, ops: Ops[Array], ctx: Context[Array], grad: Array, payload: Array) -> Array:
        """Far beyond the root mean square of the last steps."""
        if not self.cut(ctx.spec).blocks:
            return super().overflows(ops, ctx, grad, payload)
        return beyond(ops, ctx.state[2], payload[-1:])

    def _context(self, ops: Ops[Array], spec: Spec, step: Array, scale: Array) -> Context[Array]:
        cut = self.cut(spec)
        starts = ops.constant(("starts", cut), lambda: _bounds(cut)[:-1])
        lengths = ops.constant(("lengths", cut), lambda: np.diff(_bounds(cut)))
        groups = ops.constant(("groups", cut.chosen), lambda: np.arange(cut.chosen, dtype=np.int32))
        drawn = ops.scramble(ops.scramble(groups + key(spec.seed, spec.position)) + step // lengths)
        return Context(spec, 0, (step, starts + (drawn % lengths + step % lengths) % lengths, scale))


def _bounds(cut: Cut) -> np.ndarray:
    """Where every group of blocks begins, and the last one ends (int32)."""
    return (np.arange(cut.chosen + 1, dtype=np.int64) * cut.blocks // max(1, cut.chosen)).astype(np.int32)
