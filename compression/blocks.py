"""The base of ``randomk``, ``topk`` and ``topk2``: a step sends some blocks of a bucket, the residual keeps the rest.

A bucket's body is cut into blocks of equal length. The chosen blocks travel dense, and so do the tail and the elements
that do not fill a block. All ranks choose the same blocks, so payloads add up and no index crosses the network.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvdplus.compression.contract import Context, Layout, Projection, Spec
from hvdplus.compression.ops import Array, Ops, Piece, Rows

BLOCK = 256
"""Elements of a block: 1 kB, long enough to be copied at the speed of memory."""


class Cut(NamedTuple):
    """How a bucket is cut."""

    blocks: int
    """Number of blocks; 0: choosing would save nothing, so the bucket travels dense."""
    chosen: int
    """Number of blocks that a step sends."""
    block: int

    @property
    def end(self) -> int:
        """Element at which the blocks end; the elements behind them travel dense."""
        return self.blocks * self.block


@dataclass(frozen=True)
class BlockSelection(Projection):
    """Sends a share of the blocks in every step."""

    share: float = 0.01
    """Share of the blocks that is sent, above 0 and below 1; smaller compresses more."""
    block: int = BLOCK
    """Elements of a block, 1 or more; smaller chooses more exactly and costs more."""

    memory_passes = 3.0

    def __post_init__(self) -> None:
        kind = type(self).__name__.lower()
        if not 0 < self.share < 1:
            raise ValueError(f"{kind} sends a share of the gradient, above 0 and below 1. Received: {self.share:g}")
        if self.block < 1:
            raise ValueError(f"{kind} needs blocks of 1 element or more. Received: {self.block}")

    @property
    def name(self) -> str:
        """``randomk:share``, ``topk:share`` or ``topk2:share``, and ``:block`` where it is not the usual one."""
        block = "" if self.block == BLOCK else f":{self.block}"
        return f"{type(self).__name__.lower()}:{self.share!r}{block}"

    @abstractmethod
    def measured(self, blocks: int) -> int:
        """Number of measurements (float32) at the payload's end, for a bucket of that many blocks."""

    def beside(self, blocks: int) -> int:
        """Number of floats that a step sends of that many blocks, beside the chosen ones."""
        return self.measured(blocks)

    @abstractmethod
    def chosen(self, ops: Ops[Array], ctx: Context[Array]) -> Array:
        """Indices of this step's blocks (int32, ascending)."""

    def cut(self, spec: Spec) -> Cut:
        """How ``spec``'s bucket is cut."""
        count = spec.body // self.block
        chosen = max(1, round(self.share * count))
        if chosen * self.block + self.beside(count) >= count * self.block:
            return Cut(0, 0, self.block)
        return Cut(count, chosen, self.block)

    @abstractmethod
    def measure(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None) -> Array:
        """The measurements (float32) at the payload's end."""

    def encode(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None = None) -> Array:
        """Chosen blocks, dense elements, measurements."""
        cut = self.cut(ctx.spec)
        if not cut.blocks:
            return grad
        rows = ops.take_rows(self._matrix(ops, cut, grad), self.chosen(ops, ctx))
        measured = self.measure(ops, ctx, grad, residual)
        return ops.concat([ops.reshape(rows, (cut.chosen * cut.block,)), grad[cut.end :], measured])

    def pieces(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Sequence[Piece[Array]]:
        """The chosen blocks among zeros, then the dense elements."""
        cut = self.cut(ctx.spec)
        if not cut.blocks:
            return [total]
        sent = cut.chosen * cut.block
        rows = ops.reshape(total[:sent], (cut.chosen, cut.block))
        return [Rows(rows, self.chosen(ops, ctx), cut.blocks), total[sent : sent + ctx.spec.size - cut.end]]

    def layout(self, spec: Spec, side: int) -> Layout:
        """Blocks in front; dense elements and measurements behind."""
        cut = self.cut(spec)
        return Layout(cut.chosen * cut.block, spec.size - cut.end + (self.measured(cut.blocks) if cut.blocks else 0))

    def _matrix(self, ops: Ops[Array], cut: Cut, bucket: Array) -> Array:
        return ops.reshape(bucket[: cut.end], (cut.blocks, cut.block))
