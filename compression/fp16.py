"""``fp16``: float16 on the wire (micikevicius et al., arXiv 1710.03740, uses the same format for gradients).

A projection up to rounding: 2 d bytes sent, one pass over memory each way. Every rank divides by the number of
ranks before the cast and the sum is multiplied back afterwards, so that the *mean* has to fit into float16 and a
sum of N values near the limit does not overflow on the way. Magnitudes of the mean above 65504 become infinite; every
rank sees that in the sum, and the exchange sends the bucket again in float32. Below 6e-8 N values arrive as zero. What
rounding loses (relative 2^-11) is not kept as a residual.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdplus.compression.contract import Context, Spec
from hvdplus.compression.ops import Array, Ops


@dataclass(frozen=True)
class Half:
    """float16 cast with pre-division."""

    name: str = "fp16"
    phases: int = 1
    keeps_residual: bool = False
    narrow: bool = True
    uses_products: bool = False

    def init(self, ops: Ops, spec: Spec) -> Context:
        """An empty context."""
        return Context(spec, 0, ())

    def encode(self, ops: Ops, ctx: Context, grad: Array) -> Array:
        """float16 payload of ``grad / N``."""
        return ops.half(grad * (1.0 / ctx.spec.ranks))

    def decode(self, ops: Ops, ctx: Context, total: Array) -> Array:
        """float32 sum over ranks."""
        return ops.single(total) * float(ctx.spec.ranks)

    def advance(self, ops: Ops, ctx: Context, total: Array) -> Context:
        """Nothing to learn."""
        return ctx

    def payload_bytes(self, spec: Spec, phase: int = 0) -> int:
        """2 bytes an element."""
        return 2 * spec.size
