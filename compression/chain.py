"""Chains such as ``topk:0.05+int8`` or ``lowrank:4+fp16``: what a projection leaves is rounded once more.

The first part (``randomk``, ``topk``, ``lowrank``) makes a float32 payload, the second (``fp16``, ``intB``) encodes
that as if it were a bucket: its values in full compression, and what the first part wants precise (dense tensors, block
energies) as the second part treats a tail. Both are linear in the sum, so the chain is. One context holds both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdplus.compression.contract import Compressor, Context, Piecewise, Projection, Sent, Spec
from hvdplus.compression.fp16 import Half
from hvdplus.compression.integer import Integer
from hvdplus.compression.ops import Array, Ops, Piece


@dataclass(frozen=True)
class Chain(Piecewise):
    """Two compressors as one, with one context and one residual."""

    first: Projection
    second: Half | Integer

    def __post_init__(self) -> None:
        if not isinstance(self.first, Projection):
            raise ValueError(f"{self.first.name} cannot begin a chain; randomk, topk and lowrank can")
        if not isinstance(self.second, Half | Integer) or not (
            self.second.keeps_residual or self.second.name == "fp16"
        ):
            raise ValueError(f"{self.second.name} cannot end a chain; fp16, intB and signsgd can")
        if isinstance(self.second, Half):
            # What does not fit stays in the residual, so nothing has to be sent again.
            object.__setattr__(self, "second", Half(saturate=True))

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The second part's."""
        return self.second.kind

    @property
    def learns(self) -> str:  # type: ignore[override]
        """Both parts'."""
        return "; ".join(part.learns for part in (self.first, self.second) if part.learns != "nothing") or "nothing"

    @property
    def paper(self) -> str:  # type: ignore[override]
        """Both parts'."""
        return ", ".join(part.paper for part in (self.first, self.second) if part.paper)

    @property
    def name(self) -> str:
        """``first+second``."""
        return f"{self.first.name}+{self.second.name}"

    @property
    def phases(self) -> int:
        """The first part's."""
        return self.first.phases

    @property
    def warms(self) -> bool:
        """If one of them does."""
        return self.first.warms or self.second.warms

    @property
    def uses_products(self) -> bool:
        """If the first part does."""
        return self.first.uses_products

    @property
    def memory_passes(self) -> float:
        """The second part works on what the first has left."""
        return self.first.memory_passes + 1.0

    def init(self, ops: Ops, spec: Spec) -> Context:
        """State of the first part, then of the second for every phase: their payloads differ in size."""
        state = self.first.init(ops, spec).state
        for phase in range(self.phases):
            state += self.second.init(ops, self._inner_spec(spec, phase)).state
        return Context(spec, 0, state)

    def encode(self, ops: Ops, ctx: Context, grad: Array, residual: Array | None = None) -> Array:
        """The first part's payload, encoded by the second."""
        return self.second.encode(ops, self._inner(ctx), self.first.encode(ops, self._outer(ctx), grad, residual))

    def pieces(self, ops: Ops, ctx: Context, total: Array) -> Sequence[Piece]:
        """What the first part makes of what the second part decodes."""
        return self.first.pieces(ops, self._outer(ctx), self._between(ops, ctx, total))

    def advance(self, ops: Ops, ctx: Context, total: Array) -> Context:
        """Both parts'."""
        inner = self.second.advance(ops, self._inner(ctx), total)
        outer = self.first.advance(ops, self._outer(ctx), self._between(ops, ctx, total))
        return self._joined(ctx, outer, {ctx.phase: inner})

    def warm(self, ops: Ops, ctx: Context, total: Array) -> Context:
        """The first part, and with it the second on what the first would send."""
        outer = self.first.warm(ops, self._outer(ctx), total)
        inners = {}
        for phase in range(self.phases):
            payload = self.first.encode(ops, outer._replace(phase=phase), total)
            inners[phase] = self.second.warm(ops, self._inner(ctx, phase), payload)
        return self._joined(ctx, outer, inners)

    def follows(self, other: Compressor) -> bool:
        """If the first part does, and the second has nothing to learn."""
        stateless = isinstance(other, Chain) and isinstance(other.second, Half) and isinstance(self.second, Half)
        return stateless and self.first.follows(other.first)  # type: ignore[attr-defined]

    def inherit(self, ops: Ops, ctx: Context, old: Context) -> Context:
        """The first part's."""
        return self.first.inherit(ops, ctx, old)

    def send(self, ops: Ops, ctx: Context, grad: Array, residual: Array | None = None) -> Sent:
        """Each part tells from what it made itself whether it overflows."""
        outer, inner = self._outer(ctx), self._inner(ctx)
        between = self.first.encode(ops, outer, grad, residual)
        payload = self.second.encode(ops, inner, between)
        sound = self.sound(ops, grad, payload)
        overflow = self.first.overflows(ops, outer, grad, between) | self.second.overflows(ops, inner, between, payload)
        return Sent(payload, self.remain(ops, ctx, grad, payload), sound, overflow)

    def sound(self, ops: Ops, grad: Array, payload: Array) -> Array:
        """As the second part sees it."""
        return self.second.sound(ops, grad, payload)

    def payload_bytes(self, spec: Spec, phase: int = 0) -> int:
        """The second part's, of what the first leaves."""
        return self.second.payload_bytes(self._inner_spec(spec, phase))

    def _inner_spec(self, spec: Spec, phase: int) -> Spec:
        layout = self.first.layout(spec, phase)
        return spec._replace(shapes=((layout.values,),), tail=layout.precise)

    @property
    def _inner_arrays(self) -> int:
        return int(isinstance(self.second, Integer))

    def _outer(self, ctx: Context) -> Context:
        return ctx._replace(state=ctx.state[: len(ctx.state) - self.phases * self._inner_arrays])

    def _inner(self, ctx: Context, phase: int | None = None) -> Context:
        phase = ctx.phase if phase is None else phase
        start = len(ctx.state) + (phase - self.phases) * self._inner_arrays
        return Context(self._inner_spec(ctx.spec, phase), 0, ctx.state[start : start + self._inner_arrays])

    def _between(self, ops: Ops, ctx: Context, total: Array) -> Array:
        return self.second.decode(ops, self._inner(ctx), total)

    def _joined(self, ctx: Context, outer: Context, inners: dict[int, Context]) -> Context:
        state = outer.state
        for phase in range(self.phases):
            state += inners.get(phase, self._inner(ctx, phase)).state
        return outer._replace(state=state)
