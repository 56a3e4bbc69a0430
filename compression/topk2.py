"""``topk2:share``: the blocks with most energy in this step, in two passes.

``topk`` without its step of delay. The first pass sums every block's energy, the root mean square of residual +
gradient over the block, and delivers nothing; the second sends the blocks whose summed energies are largest. So a block
is chosen by what it holds now, not by what it was expected to hold, and nobody has to ask for the first choice.

Sent: what ``topk`` of the same share sends, and a number; but there are two all-reduces a bucket, one after the other.
Work: the bucket is read twice to measure it, the sent blocks are copied. A rank overflows if the root mean square of
its blocks is far beyond the ranks' sums of the last steps: few blocks that are far beyond are sent at once. Papers:
those of ``topk``.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdplus.compression.contract import Context, Layout, Spec, follow
from hvdplus.compression.ops import Array, Ops
from hvdplus.compression.topk import TopK


@dataclass(frozen=True)
class TopK2(TopK):
    """Choice by energies of the same step."""

    learns = "the choice: block energies, summed in the first pass"
    passes = 2
    sides = 2
    asks = False
    memory_passes = 4.0

    def measured(self, blocks: int) -> int:
        """One for the bucket."""
        return 1

    def beside(self, blocks: int) -> int:
        """The energies of the first pass as well."""
        return blocks + self.measured(blocks)

    def measure(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None) -> Array:
        """Root mean square of all blocks. It is not finite where a block is not, whichever are sent."""
        return ops.reshape(ops.rms(grad[: self.cut(ctx.spec).end]), (1,))

    def encode(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None = None) -> Array:
        """Every block's energy; in the second pass chosen blocks, dense elements, the measurement."""
        return super().encode(ops, ctx, grad, residual) if ctx.side else self.ask(ops, ctx, grad)

    def advance(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Context[Array]:
        """Choose the blocks with most energy in the first pass's sum, follow the scale of the second one's."""
        cut, (chosen, scale) = self.cut(ctx.spec), ctx.state
        if cut.blocks and ctx.side:
            scale = follow(ops, scale, total[-1:])
        elif cut.blocks:
            chosen = ops.top(total, cut.chosen)
        return Context(ctx.spec, 1 - ctx.side, (chosen, scale))

    def layout(self, spec: Spec, side: int) -> Layout:
        """Energies; blocks in front, dense elements and the measurement behind."""
        return super().layout(spec, side) if side else Layout(0, self.cut(spec).blocks)
