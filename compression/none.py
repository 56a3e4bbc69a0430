"""``none``: the gradient itself, in float32.

Linear in everything; d floats (4 d bytes) sent, no arithmetic, no pass over memory. Training starts at this level, and
all other levels are measured against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdplus.compression.contract import Context, Piecewise, Spec
from hvdplus.compression.ops import Array, Ops, Piece


@dataclass(frozen=True)
class NoCompression(Piecewise):
    """Identity compressor."""

    name = "none"
    keeps_residual = False
    needs_finite_check = False
    memory_passes = 0.0

    def init(self, ops: Ops[Array], spec: Spec) -> Context[Array]:
        """An empty context."""
        return Context(spec, 0, ())

    def encode(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None = None) -> Array:
        """The gradient, not a copy of it."""
        return grad

    def pieces(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Sequence[Piece[Array]]:
        """The sum."""
        return [total]

    def payload_bytes(self, spec: Spec, side: int = 0) -> int:
        """4 bytes an element."""
        return 4 * spec.size
