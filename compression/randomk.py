"""``randomk:share``: blocks chosen by a hash of seed, bucket and step.

Random sparsification with a shared seed (Stich et al.: Sparsified SGD with memory, arXiv 1809.07599), in blocks. A
bucket's blocks form as many groups as a step sends blocks. In every step each group sends one block, in cyclic order;
for each round the hash draws a new first block. So every block is sent once a round and none waits for more than two
rounds. With independent draws some would wait for many rounds and arrive many times too large.

A spike in a block that is not sent would arrive many steps late. So the payload ends with the root mean square of the
whole bucket, and a rank overflows if its own is far beyond the sums of the last steps.

Sent: 4 k bytes for k elements, and 4 bytes. Work: the bucket is read once, the sent blocks are copied.
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
        """One, the root mean square."""
        return 1

    def chosen(self, ops: Ops[Array], ctx: Context[Array]) -> Array:
        """One block of every group."""
        return ctx.state[1]

    def advance(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Context[Array]:
        """The next step and its blocks."""
        scale = follow(ops, ctx.state[2], total[-1:]) if self.cut(ctx.spec).blocks else ctx.state[2]
        return self._context(ops, ctx.spec, ctx.state[0] + 1, scale)

    def measure(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None) -> Array:
        """The bucket's root mean square: it is not finite if any element is, also in a block that is not sent."""
        return ops.reshape(ops.rms(grad), (1,))

    def overflows(self, ops: Ops[Array], ctx: Context[Array], grad: Array, payload: Array) -> Array:
        """Whether this rank's root mean square is far beyond those of the last steps."""
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
    """First block of every group, and the end of the last group (int32)."""
    return (np.arange(cut.chosen + 1, dtype=np.int64) * cut.blocks // max(1, cut.chosen)).astype(np.int32)
