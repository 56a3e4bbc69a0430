"""``fp16``: float16 on the wire (Micikevicius et al., arXiv 1710.03740, use the same format for gradients).

A projection up to rounding: 2 d bytes sent, one pass over memory each way. Every rank divides by the smallest power of
two that is not below N, which is exact, and decoding multiplies the sum back, so that a sum of N values near the limit
does not overflow. Magnitudes above 65504 become infinite; every rank sees that in the sum, and the exchange sends the
bucket again in float32. Values below 6e-8 N arrive as zero. No residual keeps the rounding error (relative 2^-11).

As the second part of a chain it saturates instead: the chain's residual keeps the excess over 32768 and the rounding
error (but not that of the ring's own sums, which no rank sees).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdplus.compression.contract import Context, Piecewise, Spec, largest_of
from hvdplus.compression.ops import HALF_LIMIT, Array, Halves, Ops, Piece


@dataclass(frozen=True)
class Half(Piecewise):
    """float16 cast with division before the sum."""

    saturate: bool = False
    """Whether magnitudes beyond 32768 stop there, so that no sum overflows."""

    name = "fp16"
    paper = "1710.03740"
    keeps_residual = False
    needs_finite_check = False
    memory_passes = 3.0

    @property
    def may_overflow(self) -> bool:
        """Unless it saturates."""
        return not self.saturate

    def init(self, ops: Ops[Array], spec: Spec) -> Context[Array]:
        """An empty context."""
        return Context(spec, 0, ())

    def encode(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None = None) -> Array:
        """float16 payload of ``grad``, divided so that N of them add up."""
        return self.encode_parts(ops, ctx, [grad])

    def encode_parts(self, ops: Ops[Array], ctx: Context[Array], parts: Sequence[Array]) -> Array:
        """The same, for tensors that are not joined."""
        return ops.half(parts, 1.0 / _divisor(ctx.spec), self.saturate)

    def overflows(self, ops: Ops[Array], ctx: Context[Array], grad: Array, payload: Array) -> Array:
        """Whether a value saturated."""
        if not self.saturate:
            return super().overflows(ops, ctx, grad, payload)
        return largest_of(ops, payload)[0] >= HALF_LIMIT / _divisor(ctx.spec)

    def pieces(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Sequence[Piece[Array]]:
        """float32 sum over ranks."""
        return [Halves(total, float(_divisor(ctx.spec)))]

    def payload_bytes(self, spec: Spec, side: int = 0) -> int:
        """2 bytes an element."""
        return 2 * spec.size


def _divisor(spec: Spec) -> int:
    """The smallest power of two that is not below the number of ranks."""
    return 1 << (spec.ranks - 1).bit_length()
