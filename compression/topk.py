"""``topk:share``: the blocks with most energy.

Top-k sparsification with error feedback (Lin et al.: Deep Gradient Compression, arXiv 1712.01887; Stich et al., arXiv
1809.07599), made summable: all ranks send the same blocks, chosen by the sum of their energies, which travelled in the
last step's payload. A block's energy is the root mean square of *its residual after sending + its fresh gradient*, the
best guess of the next step's block: energies from before sending would choose half of the same blocks again. In the
first step they are summed before anything is encoded (``ask``). A rank overflows if a block's energy is far beyond the
largest of the last steps: the block would arrive a step late.

Sent: 4 k bytes for k elements, and 4 bytes a block. Work: two arrays are read to measure the blocks, the sent blocks
are copied. Different from the papers: whole blocks instead of elements, one choice for all ranks, one step late, root
mean squares (which add without overflow) instead of squares.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdplus.compression.blocks import BlockSelection
from hvdplus.compression.contract import Context, Spec, beyond, follow
from hvdplus.compression.ops import Array, Ops


@dataclass(frozen=True)
class TopK(BlockSelection):
    """Choice by measured energy."""

    learns = "the choice: block energies that rode along one step earlier"
    paper = "1712.01887, 1809.07599"
    asks = True
    memory_passes = 5.0

    def init(self, ops: Ops[Array], spec: Spec) -> Context[Array]:
        """Evenly spaced blocks."""
        cut = self.cut(spec)
        places = np.arange(cut.chosen) * cut.blocks // max(1, cut.chosen)
        return Context(spec, 0, (ops.from_numpy(places.astype(np.int32)), ops.from_numpy(np.zeros(1, np.float32))))

    def measured(self, blocks: int) -> int:
        """One for every block."""
        return blocks

    def chosen(self, ops: Ops[Array], ctx: Context[Array]) -> Array:
        """The blocks with most energy in the last sum."""
        return ctx.state[0]

    def measure(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None) -> Array:
        """Every block's expected root mean square in the next step."""
        cut = self.cut(ctx.spec)
        chosen, blocks = ctx.state[0], self._matrix(ops, cut, grad)
        # Half of (residual after sending + fresh gradient); the fresh gradient is ``grad`` minus the old residual.
        before = None if residual is None else self._matrix(ops, cut, residual)
        expected = ops.row_rms(blocks, before, -0.5)
        before = None if before is None else ops.take_rows(before, chosen)
        fresh = ops.row_rms(ops.take_rows(blocks, chosen), before, -1.0) * 0.5
        return ops.put_values(expected, chosen, fresh)

    def advance(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Context[Array]:
        """Choose the blocks with most energy in the sum."""
        cut = self.cut(ctx.spec)
        if not cut.blocks:
            return ctx
        energies = total[-cut.blocks :]
        return ctx._replace(state=(ops.top(energies, cut.chosen), follow(ops, ctx.state[1], energies)))

    def ask(self, ops: Ops[Array], ctx: Context[Array], grad: Array) -> Array:
        """Every block's energy."""
        cut = self.cut(ctx.spec)
        return ops.row_rms(self._matrix(ops, cut, grad)) if cut.blocks else grad[:0]

    def overflows(self, ops: Ops[Array], ctx: Context[Array], grad: Array, payload: Array) -> Array:
        """Whether the energy of any block, sent or not, is far beyond the largest of the last steps."""
        cut = self.cut(ctx.spec)
        if not cut.blocks:
            return super().overflows(ops, ctx, grad, payload)
        return beyond(ops, ctx.state[1], payload[-self.measured(cut.blocks) :])
