"""Chains such as ``topk:0.05+int8`` or ``lowrank:4+fp16``: the second part rounds the payload of the first.

The first part (``randomk``, ``topk``, ``topk2``, ``lowrank``, ``powersgd``) makes a float32 payload. The second
(``fp16``, ``intB``, ``signsgd``) encodes this payload like a bucket: its values are the body, its precise elements
(dense tensors, block energies) the tail. Both decode linearly, so the chain does. One context holds both.
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
            raise ValueError(f"{self.first.name} cannot begin a chain; randomk, topk, topk2, lowrank and powersgd can")
        if not isinstance(self.second, Half | Integer) or not (
            self.second.keeps_residual or self.second.name == "fp16"
        ):
            raise ValueError(f"{self.second.name} cannot end a chain; fp16, intB and signsgd can")
        if isinstance(self.second, Half):
            # Values that do not fit stay in the residual, so nothing has to be sent again.
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
    def sides(self) -> int:
        """The first part's."""
        return self.first.sides

    @property
    def passes(self) -> int:  # type: ignore[override]
        """The first part's."""
        return self.first.passes

    @property
    def asks(self) -> bool:
        """If either part does."""
        return self.first.asks or self.second.asks

    @property
    def asking_steps(self) -> int:
        """One more for every side if both parts ask: the second asks again, of the payload that the first then has."""
        return super().asking_steps * (1 + (self.first.asks and self.second.asks))

    @property
    def uses_products(self) -> bool:
        """If the first part does."""
        return self.first.uses_products

    @property
    def reads_by_tensor(self) -> bool:
        """If the first part does."""
        return self.first.reads_by_tensor

    @property
    def delay_weight(self) -> float:
        """The first part's."""
        return self.first.delay_weight

    @property
    def memory_passes(self) -> float:
        """The first part's plus one: the second part's array is smaller."""
        return self.first.memory_passes + 1.0

    def init(self, ops: Ops[Array], spec: Spec) -> Context[Array]:
        """State of the first part, then of the second for every side: their payloads differ in size."""
        state = self.first.init(ops, spec).state
        for side in range(self.sides):
            state += self.second.init(ops, self._inner_spec(spec, side)).state
        return Context(spec, 0, state)

    def encode(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None = None) -> Array:
        """The first part's payload, encoded by the second."""
        return self.second.encode(ops, self._inner(ctx), self.first.encode(ops, self._outer(ctx), grad, residual))

    def pieces(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Sequence[Piece[Array]]:
        """The first part's pieces of the payload that the second part decodes."""
        return self.first.pieces(ops, self._outer(ctx), self._between(ops, ctx, total))

    def advance(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Context[Array]:
        """Both parts'."""
        inner = self.second.advance(ops, self._inner(ctx), total)
        outer = self.first.advance(ops, self._outer(ctx), self._between(ops, ctx, total))
        return self._joined(ctx, outer, {ctx.side: inner})

    def ask(self, ops: Ops[Array], ctx: Context[Array], grad: Array) -> Array:
        """What the second part asks about the first one's payload; where it asks nothing, what the first part asks.
        (What that would ask rides along with its payload, once there is a step size.)"""
        if not self.second.asks:
            return self.first.ask(ops, self._outer(ctx), grad)
        return self.second.ask(ops, self._inner(ctx), self.first.encode(ops, self._outer(ctx), grad))

    def learn(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Context[Array]:
        """The context of the part that asked."""
        if not self.second.asks:
            return self._joined(ctx, self.first.learn(ops, self._outer(ctx), total), {})
        return self._joined(ctx, self._outer(ctx), {ctx.side: self.second.learn(ops, self._inner(ctx), total)})

    def can_reuse(self, other: Compressor) -> bool:
        """If the first part does, and both second parts are ``fp16``, which learns nothing."""
        stateless = isinstance(other, Chain) and isinstance(other.second, Half) and isinstance(self.second, Half)
        return stateless and self.first.can_reuse(other.first)  # type: ignore[attr-defined]

    def reuse_context(self, ops: Ops[Array], ctx: Context[Array], old: Context[Array]) -> Context[Array]:
        """The first part's."""
        return self.first.reuse_context(ops, ctx, old)

    def send(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None = None) -> Sent[Array]:
        """Each part checks its own payload for overflow."""
        outer, inner = self._outer(ctx), self._inner(ctx)
        between = self.first.encode(ops, outer, grad, residual)
        payload = self.second.encode(ops, inner, between)
        finite = self.second.is_finite(ops, between, payload)
        overflow = self.first.overflows(ops, outer, grad, between) | self.second.overflows(ops, inner, between, payload)
        return Sent(payload, self.remain(ops, ctx, grad, payload), finite, overflow)

    def is_finite(self, ops: Ops[Array], grad: Array, payload: Array) -> Array:
        """As the second part sees it."""
        return self.second.is_finite(ops, grad, payload)

    def payload_bytes(self, spec: Spec, side: int = 0) -> int:
        """The second part's, for the first part's payload."""
        return self.second.payload_bytes(self._inner_spec(spec, side))

    def _inner_spec(self, spec: Spec, side: int) -> Spec:
        layout = self.first.layout(spec, side)
        return spec._replace(shapes=((layout.values,),), tail=layout.precise)

    @property
    def _inner_arrays(self) -> int:
        return int(isinstance(self.second, Integer))

    def _outer(self, ctx: Context[Array]) -> Context[Array]:
        return ctx._replace(state=ctx.state[: len(ctx.state) - self.sides * self._inner_arrays])

    def _inner(self, ctx: Context[Array], side: int | None = None) -> Context[Array]:
        side = ctx.side if side is None else side
        start = len(ctx.state) + (side - self.sides) * self._inner_arrays
        return Context(self._inner_spec(ctx.spec, side), 0, ctx.state[start : start + self._inner_arrays])

    def _between(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Array:
        return self.second.decode(ops, self._inner(ctx), total)

    def _joined(self, ctx: Context[Array], outer: Context[Array], inners: dict[int, Context[Array]]) -> Context[Array]:
        state = outer.state
        for side in range(self.sides):
            state += inners.get(side, self._inner(ctx, side)).state
        return outer._replace(state=state)
