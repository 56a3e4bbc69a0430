"""The contract of every compressor: four pure functions and the types that they share.

    init(spec)          -> ctx        the same on every rank
    encode(ctx, grad)   -> payload    adds over ranks
    decode(ctx, total)  -> grad       linear in total: decode(p_1 + ... + p_N) = decode(p_1) + ... + decode(p_N)
    advance(ctx, total) -> ctx        from shared values only

Payloads add up and every rank holds the same ``ctx``, so one all-reduce of the payload is the only communication.
Every function takes ``ops`` (see ``ops.py``) first, so the same code serves every framework.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple

import numpy as np

from hvdplus.compression.ops import Array, Ops, Piece, magnitude


@functools.lru_cache(maxsize=1024)  # asked many times a step
def sizes_of(shapes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Number of elements of every tensor."""
    return tuple(map(math.prod, shapes))


class Spec(NamedTuple):
    """The layout of a bucket; equal on every rank.

    A bucket is a flat float32 vector: the gradients of ``shapes``, row-major, end to end, then ``tail`` elements that
    every compressor sends whole, rounded at most (vectors, norms, tiny tensors).
    """

    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensors that may be compressed, in the vector's order."""
    position: int = 0
    """Index of the bucket among the model's buckets; with ``seed`` it makes randomness differ between buckets."""
    seed: int = 0
    """Seed of all randomness, the same on every rank."""
    ranks: int = 1
    """World size N, the number of payloads that will be added."""
    tail: int = 0
    """Elements at the end of the vector that travel whole, in the same payload."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of every tensor of ``shapes``."""
        return sizes_of(self.shapes)

    @property
    def body(self) -> int:
        """Number of elements that may be compressed."""
        return sum(self.sizes)

    @property
    def size(self) -> int:
        """Number of elements d of the bucket."""
        return self.body + self.tail


class Context(NamedTuple, Generic[Array]):
    """The inputs of encoding and decoding besides the gradient. Identical on every rank, bit for bit, because only
    shared values enter it."""

    spec: Spec
    side: int
    """Side that this step, or pass, runs, from 0 to ``sides`` - 1. A plain integer, never an array, so that a compiled
    graph holds every side once and picks one by index. The exchange sets it."""
    state: tuple[Array, ...]
    """float32 or int32 arrays of fixed number and shapes, computed from the spec and earlier all-reduces' sums."""


class Sent(NamedTuple, Generic[Array]):
    """Results of ``Compressor.send``."""

    payload: Array
    left: Array
    """part of the gradient that the payload does not carry: the next residual"""
    finite: Array
    """0-d boolean, see ``Compressor.is_finite``"""
    overflow: Array
    """0-d boolean, see ``Compressor.overflows``"""


class Compressor(ABC):
    """One algorithm with its parameters. Immutable: everything that changes is in the ``Context``.

    Compare compressors by ``name``, which includes the parameters.
    """

    kind: str = "projection"
    """``projection``: encoding is linear too, up to rounding; ``quantiser``: every rank rounds on its own."""
    learns: str = "nothing"
    """Where the next context comes from, in a few words."""
    paper: str = ""
    """arXiv ids of the method's papers."""

    @property
    @abstractmethod
    def name(self) -> str:
        """How the user spells it, e.g. ``lowrank:4``; also part of the all-reduce's tensor name."""

    passes: int = 1
    """All-reduces of a bucket in a step, one after the other. All but the last deliver nothing: their sums teach the
    context that the next pass encodes the same gradient with. Of several, each is a side of its own."""

    @property
    def sides(self) -> int:
        """Number of sides: ways of encoding that alternate from step to step, or from pass to pass."""
        return 1

    @property
    def turns(self) -> int:
        """Number of sides that alternate from step to step."""
        return self.sides // self.passes

    @property
    def keeps_residual(self) -> bool:
        """Whether a residual keeps the part that encoding loses and adds it to the next gradient (error feedback)."""
        return True

    @property
    def needs_finite_check(self) -> bool:
        """Whether a step counts only once all ranks know that every gradient was finite. Without the check, residuals
        and contexts would keep a NaN or infinity, and a payload of integers would deliver a number in its place."""
        return True

    @property
    def asks(self) -> bool:
        """Whether a sum of ``ask``, of few bytes, precedes every pass of a side's first step, for ``learn`` to make the
        context from. Goes with ``needs_finite_check``."""
        return False

    @property
    def asking_steps(self) -> int:
        """Number of a level's first steps that ask."""
        return self.turns if self.asks else 0

    @property
    def may_overflow(self) -> bool:
        """Whether finite gradients can have an infinite sum of payloads. All ranks see it and send the bucket again in
        full width. Only for compressors without a residual."""
        return False

    @property
    def uses_products(self) -> bool:
        """Whether contexts come from floating-point matrix products or factorisations, whose bits depend on the
        CPU's capability. Such a level needs equal CPUs and libraries on all ranks."""
        return False

    @property
    def reads_by_tensor(self) -> bool:
        """Whether no method does more with ``grad`` than slice it, and hand it to ``ops.project`` and ``ops.subtract``.
        Then it may be an object of the adapter's, which is added up as it is read. Subclasses that do more say no."""
        return False

    @property
    def delay_weight(self) -> float:
        """What the level's residual delays a training, beside one as long of other levels (``docs/costs.md``)."""
        return 1.0

    @property
    def memory_passes(self) -> float:
        """Estimate of how often a bucket's 4 d bytes are read or written in a step by encoding, decoding and the
        residual: 2 is one copy of the gradient."""
        return 8.0

    @abstractmethod
    def init(self, ops: Ops[Array], spec: Spec) -> Context[Array]:
        """The first context, from the spec alone.

        Raises:
            ValueError: the compressor cannot serve that many ranks; the message says how to change it.
        """

    @abstractmethod
    def encode(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None = None) -> Array:
        """Payload (1-D) of a bucket.

        Args:
            grad: gradient plus residual (1-D, float32, ``ctx.spec.size`` elements). The payload may share its memory.
            residual: the residual in ``grad``, for compressors that tell it from the fresh gradient; None: there is
                none.
        """

    def encode_parts(self, ops: Ops[Array], ctx: Context[Array], parts: Sequence[Array]) -> Array | None:
        """``encode`` for a bucket whose tensors are not joined, which saves a copy.

        Returns a payload that shares no memory with ``parts``, or None: join them and call ``encode``.

        Args:
            parts: the bucket's tensors in order, 1-D, float32 or their gradients' own narrower type.
        """
        return None

    @abstractmethod
    def decode(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Array:
        """Bucket (1-D, float32) for a sum of payloads: the *sum* over ranks, not the mean."""

    def mean(self, ops: Ops[Array], ctx: Context[Array], total: Array, scale: float) -> Array:
        """``decode`` times ``scale``; overridden where that saves a pass over memory. Never overwrites ``total``."""
        decoded = self.decode(ops, ctx, total)
        return decoded if scale == 1 else decoded * scale

    def advance(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Context[Array]:
        """The next step's context. ``total`` is the sum of all ranks' payloads."""
        return ctx

    def remain(self, ops: Ops[Array], ctx: Context[Array], grad: Array, payload: Array) -> Array:
        """The part of ``grad`` that the payload does not carry. May overwrite ``grad``."""
        return grad - self.decode(ops, ctx, payload)

    def send(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None = None) -> Sent[Array]:
        """``encode``, ``is_finite``, ``overflows``, ``remain``; overridden where that saves a pass over memory.

        May overwrite ``grad``.
        """
        payload = self.encode(ops, ctx, grad, residual)
        finite = self.is_finite(ops, grad, payload)
        overflow = self.overflows(ops, ctx, grad, payload)
        return Sent(payload, self.remain(ops, ctx, grad, payload), finite, overflow)

    def overflows(self, ops: Ops[Array], ctx: Context[Array], grad: Array, payload: Array) -> Array:
        """Whether this rank's values lie so far beyond the level's scale that the residual would need many steps to
        send them (0-d boolean).

        If any rank overflows, all ranks send the rest in full width in the same step, and the residual becomes zero.
        Contexts do not advance in such a step: they would learn a scale that is gone in the next. They advance only
        if overflows go on for many steps, because then the gradients have grown for good. (``exchange/ahead.py`` does
        it later, and contexts advance.)
        """
        return ops.constant("no overflow", lambda: np.zeros((), np.bool_))

    def taught(
        self,
        ops: Ops[Array],
        ctx: Context[Array],
        grad: Array,
        summed: Callable[[Array, int, bool], Array],
        first: bool = False,
    ) -> Context[Array]:
        """The context of the step's last pass.

        Args:
            summed: (payload, pass, whether it is what the pass asks) -> sum over ranks.
            first: whether it is the side's first step.
        """
        for number in range(self.passes):
            if first:
                ctx = self.asked(ops, ctx, grad, lambda told: summed(told, number, True))  # noqa: B023, called at once
            if number < self.passes - 1:
                payload = self.encode(ops, ctx, grad)
                ctx = self.advance(ops, ctx, summed(payload, number, False) if payload.shape[0] else payload)
                ctx = ctx._replace(side=number + 1)
        return ctx

    def asked(
        self, ops: Ops[Array], ctx: Context[Array], grad: Array, summed: Callable[[Array], Array]
    ) -> Context[Array]:
        """The context to encode a pass's ``grad`` with for the first time. ``summed``: the sum over ranks."""
        if not self.asks:
            return ctx
        told = self.ask(ops, ctx, grad)
        return self.learn(ops, ctx, summed(told) if told.shape[0] else told)

    def ask(self, ops: Ops[Array], ctx: Context[Array], grad: Array) -> Array:
        """What a rank tells the others before it encodes ``grad`` for the first time (1-D): see ``asks``."""
        return grad[:0]

    def learn(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Context[Array]:
        """The context to encode ``grad`` with, from the sum of what all ranks told."""
        return self.advance(ops, ctx, total)._replace(side=ctx.side)

    def can_reuse(self, other: Compressor) -> bool:
        """Whether ``reuse_context`` accepts a context of ``other``."""
        return False

    def reuse_context(self, ops: Ops[Array], ctx: Context[Array], old: Context[Array]) -> Context[Array]:
        """``ctx`` with the reusable parts of ``old``, the context of a compressor that this one ``can_reuse``."""
        return ctx

    def is_finite(self, ops: Ops[Array], grad: Array, payload: Array) -> Array:
        """Whether this rank's gradient is finite (0-d boolean), or of a sum of payloads, all ranks'. The default checks
        the payload, which is not finite where the gradient is not."""
        return ops.all_finite(payload)

    @abstractmethod
    def payload_bytes(self, spec: Spec, side: int = 0) -> int:
        """Bytes that one rank hands to the all-reduce for this bucket. Raises ValueError as ``init`` does."""

    def earlier_bytes(self, spec: Spec) -> int:
        """The same of all passes but the last."""
        return sum(self.payload_bytes(spec, side) for side in range(self.passes - 1))

    def step_bytes(self, spec: Spec) -> int:
        """The same of a whole step, on average where sides take turns: as in measurements, which are of both."""
        last = range(self.passes - 1, self.sides)
        return self.earlier_bytes(spec) + sum(self.payload_bytes(spec, side) for side in last) // len(last)


FAR = 32.0
"""A rank's value is far beyond a level's scale if it exceeds the largest value in the last steps' sums this many times.
One rank's share of a sum is smaller, so neither tenfold growth nor the largest of heavy-tailed values comes near."""


REMEMBERED = 0.9
"""Decay of a scale per step."""


def largest_of(ops: Ops[Array], values: Array) -> Array:
    """Largest magnitude of a 1-D array, one element; 0 for an empty one."""
    if not values.shape[0]:
        return ops.reshape(ops.rms(values), (1,))
    if values.shape[0] == 1:
        return magnitude(values)
    return ops.reshape(ops.largest(ops.reshape(values, (1, values.shape[0], 1))), (1,))


def follow(ops: Ops[Array], scale: Array, values: Array) -> Array:
    """The next step's scale (one element): the largest magnitude of a sum's ``values``, or the decayed last ``scale``
    if that is larger. It decays over some ten steps, so that rarely used rows do not count as far beyond it."""
    return largest_of(ops, ops.concat([largest_of(ops, values), scale * REMEMBERED]))


def beyond(ops: Ops[Array], scale: Array, values: Array) -> Array:
    """Whether any of this rank's ``values`` exceeds ``FAR`` times ``scale`` (0-d boolean); no value exceeds scale 0."""
    # The values are divided, because the scale times FAR could overflow float32.
    return ((largest_of(ops, values) * (1 / FAR) > scale) & (scale > 0))[0]


class Piecewise(Compressor):
    """A compressor that decodes to pieces, which ``ops`` can assemble or subtract without a copy."""

    @abstractmethod
    def pieces(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Sequence[Piece[Array]]:
        """The pieces that ``total`` decodes to, in the bucket's order."""

    def decode(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Array:
        """All pieces, end to end."""
        return ops.assemble(self.pieces(ops, ctx, total))

    def mean(self, ops: Ops[Array], ctx: Context[Array], total: Array, scale: float) -> Array:
        """All pieces end to end, times ``scale``."""
        return ops.assemble(self.pieces(ops, ctx, total), scale)

    def mean_into(
        self, ops: Ops[Array], ctx: Context[Array], total: Array, scale: float, parts: Sequence[Array]
    ) -> bool:
        """``mean`` into ``parts``, the bucket's tensors in order; see ``Ops.assemble_into``."""
        return ops.assemble_into(self.pieces(ops, ctx, total), scale, parts)

    def remain(self, ops: Ops[Array], ctx: Context[Array], grad: Array, payload: Array) -> Array:
        """``grad`` minus all pieces."""
        return ops.subtract(grad, self.pieces(ops, ctx, payload))


class Layout(NamedTuple):
    """Layout of a projection's payload (all float32), for the second part of a chain."""

    values: int
    """Number of leading elements, which the second part may round."""
    precise: int
    """Number of elements behind them, to keep precise: tensors that travel whole, measurements."""


class Projection(Piecewise):
    """A linear compressor with a float32 payload, which can begin a chain."""

    @abstractmethod
    def layout(self, spec: Spec, side: int) -> Layout:
        """The payload's layout."""

    def payload_bytes(self, spec: Spec, side: int = 0) -> int:
        """4 bytes a float."""
        return 4 * sum(self.layout(spec, side))
