"""The contract that every compressor keeps: four pure functions and what they share.

    init(spec)          -> ctx        the same on every rank
    encode(ctx, grad)   -> payload    adds over ranks
    decode(ctx, total)  -> grad       linear in total: decode(p_1 + ... + p_N) = decode(p_1) + ... + decode(p_N)
    advance(ctx, total) -> ctx        from shared values only

Because payloads add up and every rank holds the same ``ctx``, one ring all-reduce of the payload is all the
communication there is. ``ops`` (see ``ops.py``) comes first everywhere, so one text serves every framework.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple

import numpy as np

from hvdplus.compression.ops import Array, Ops, Piece, magnitude


class Spec(NamedTuple):
    """What a bucket looks like; equal on every rank.

    A bucket is a flat float32 vector: the gradients of ``shapes``, row-major, end to end, and behind them ``tail``
    elements that no compressor may touch (vectors, norms, tiny tensors).
    """

    shapes: tuple[tuple[int, ...], ...]
    """Shape of every tensor that may be compressed, in the order in which they stand in the vector."""
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
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def body(self) -> int:
        """Number of elements that may be compressed."""
        return sum(self.sizes)

    @property
    def size(self) -> int:
        """Number of elements d of the bucket."""
        return self.body + self.tail


class Context(NamedTuple, Generic[Array]):
    """What a payload means. Identical on every rank, bit for bit, because only shared values enter it."""

    spec: Spec
    side: int
    """Which of the compressor's ``sides`` programs runs in this step. A plain integer, never an array, so that a
    compiled graph holds each program once and picks one by index. The exchange counts it on."""
    state: tuple[Array, ...]
    """float32 or int32 arrays of fixed number and shapes, computed from the spec and from what earlier all-reduces
    returned."""


class Sent(NamedTuple, Generic[Array]):
    """What a step with a residual makes of a bucket."""

    payload: Array
    left: Array
    """what the payload does not carry"""
    finite: Array
    """whether all was finite, see ``Compressor.is_finite``"""
    overflow: Array
    """whether the residual would need many steps to pay out what is left, see ``Compressor.overflows``"""


class Compressor(ABC):
    """One algorithm with its parameters. Immutable: everything that changes is in the ``Context``.

    Compare two of them by ``name``, which says the parameters too.
    """

    kind: str = "projection"
    """``projection``: encoding is linear as well, to rounding; ``quantiser``: every rank rounds for itself."""
    learns: str = "nothing"
    """Where the next context comes from, in a few words."""
    paper: str = ""
    """Where the method comes from (arXiv id)."""

    @property
    @abstractmethod
    def name(self) -> str:
        """How the user spells it, e.g. ``lowrank:4``; also part of the all-reduce's tensor name."""

    @property
    def sides(self) -> int:
        """Number of programs that take turns from step to step."""
        return 1

    @property
    def keeps_residual(self) -> bool:
        """Whether what encoding loses is kept and added to the next gradient (error feedback)."""
        return True

    @property
    def needs_finite_check(self) -> bool:
        """Whether a step counts only once all ranks know that every gradient was finite: residuals and contexts would
        keep what is not, and a payload that hides it would have delivered a number."""
        return True

    @property
    def needs_warmup(self) -> bool:
        """Whether ``warm_up`` does anything; such a level is led up to by some dense steps."""
        return False

    @property
    def may_overflow(self) -> bool:
        """Whether finite gradients can become infinite on the wire. All ranks see it in the sum, and send again. Only
        for compressors without a residual."""
        return False

    @property
    def uses_products(self) -> bool:
        """Whether contexts come from floating-point matrix products or factorisations, whose bits depend on the
        CPU's capability. Such a level needs equal CPUs and libraries on all ranks."""
        return False

    @property
    def memory_passes(self) -> float:
        """Estimate of how often a bucket's 4 d bytes are read or written in a step by encoding, decoding and the
        residual: 2 is one copy of the gradient."""
        return 8.0

    @abstractmethod
    def init(self, ops: Ops[Array], spec: Spec) -> Context[Array]:
        """The first context, from the spec alone.

        Raises:
            ValueError: the compressor cannot serve that many ranks; the message says which could.
        """

    @abstractmethod
    def encode(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None = None) -> Array:
        """Payload (1-D) of a bucket.

        Args:
            grad: what is to be sent (1-D, float32, ``ctx.spec.size`` elements), residual included. The payload may be
                this very array, or a part of it.
            residual: the part of it that is left over from earlier steps, for those who look ahead; None: nothing.
        """

    def encode_parts(self, ops: Ops[Array], ctx: Context[Array], parts: Sequence[Array]) -> Array | None:
        """``encode`` of the bucket whose tensors ``parts`` are (1-D, in order, float32 or the narrower type that their
        gradients have), for those who can save joining them.

        The payload is memory of its own. None: join them first.
        """
        return None

    @abstractmethod
    def decode(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Array:
        """Bucket (1-D, float32) that a sum of payloads stands for: the *sum* over ranks, not the mean."""

    def mean(self, ops: Ops[Array], ctx: Context[Array], total: Array, scale: float) -> Array:
        """``scale`` times what ``decode`` returns, for those who can save a pass. Never overwrites ``total``."""
        return self.decode(ops, ctx, total) * scale

    def advance(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Context[Array]:
        """The next step's context. ``total`` is the sum of all ranks' payloads."""
        return ctx

    def remain(self, ops: Ops[Array], ctx: Context[Array], grad: Array, payload: Array) -> Array:
        """What the payload does not carry of ``grad``. May overwrite ``grad``."""
        return grad - self.decode(ops, ctx, payload)

    def send(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None = None) -> Sent[Array]:
        """``encode``, ``is_finite`` and ``remain`` in one, for those who can save a pass over memory.

        May overwrite ``grad``.
        """
        payload = self.encode(ops, ctx, grad, residual)
        finite = self.is_finite(ops, grad, payload)
        overflow = self.overflows(ops, ctx, grad, payload)
        return Sent(payload, self.remain(ops, ctx, grad, payload), finite, overflow)

    def overflows(self, ops: Ops[Array], ctx: Context[Array], grad: Array, payload: Array) -> Array:
        """Whether values of this rank lie so far beyond the level's scale that the residual would need many steps to
        pay them out, as a 0-d boolean.

        If it is so on any rank, all ranks send what is left in full width, in the same step, and nothing stays in the
        residual. Contexts stay as they are in such a step: they would learn a scale that is gone in the next one. Only
        where steps overflow again and again do they advance, because the gradients have grown for good.
        """
        return ops.constant("no overflow", lambda: np.zeros((), np.bool_))

    def warm_up(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Context[Array]:
        """A better first context, from a dense step's ``total``: the bucket's gradients, summed over ranks."""
        return ctx

    def can_reuse(self, other: Compressor) -> bool:
        """Whether ``reuse_context`` can take over a context of ``other``."""
        return False

    def reuse_context(self, ops: Ops[Array], ctx: Context[Array], old: Context[Array]) -> Context[Array]:
        """``ctx`` with all that can be kept of the context of a compressor that this one ``can_reuse``."""
        return ctx

    def is_finite(self, ops: Ops[Array], grad: Array, payload: Array) -> Array:
        """Whether what is sent is finite, as a 0-d boolean: of one rank, before the sum. Here: what is not finite in a
        gradient is never finite in its payload."""
        return ops.all_finite(payload)

    @abstractmethod
    def payload_bytes(self, spec: Spec, side: int = 0) -> int:
        """Bytes that one rank hands to the all-reduce for this bucket. Raises ValueError as ``init`` does."""


FAR = 32.0
"""What is this many times as large as all ranks' sum of the last steps is far beyond a level's scale: a rank's own part
of it was smaller, so that neither tenfold growth nor the largest of heavy-tailed values comes near."""


REMEMBERED = 0.9
"""Share of a scale that is left of it a step later."""


def largest_of(ops: Ops[Array], values: Array) -> Array:
    """Largest magnitude of a 1-D array, one element; 0 for an empty one."""
    if not values.shape[0]:
        return ops.reshape(ops.rms(values), (1,))
    if values.shape[0] == 1:
        return magnitude(values)
    return ops.reshape(ops.largest(ops.reshape(values, (1, values.shape[0], 1))), (1,))


def follow(ops: Ops[Array], scale: Array, values: Array) -> Array:
    """The largest magnitude of a sum's ``values``, or most of the last ``scale`` where that is more: the scale that
    values of the next step are held against (one element). It forgets in some ten steps, because rows that are rarely
    hit are not far beyond it."""
    return largest_of(ops, ops.concat([largest_of(ops, values), scale * REMEMBERED]))


def beyond(ops: Ops[Array], scale: Array, values: Array) -> Array:
    """Whether one of a rank's own ``values`` is far beyond ``scale``, as a 0-d boolean; 0 is no scale yet."""
    # Divided, because the scale times FAR could leave float32.
    return ((largest_of(ops, values) * (1 / FAR) > scale) & (scale > 0))[0]


class Piecewise(Compressor):
    """A compressor whose payload stands for pieces that ``ops`` can put in place, or take away, without a copy."""

    @abstractmethod
    def pieces(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Sequence[Piece[Array]]:
        """What ``total`` stands for, in the bucket's order."""

    def decode(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Array:
        """All pieces, end to end."""
        return ops.assemble(self.pieces(ops, ctx, total))

    def mean(self, ops: Ops[Array], ctx: Context[Array], total: Array, scale: float) -> Array:
        """All pieces, scaled as they are put in place."""
        return ops.assemble(self.pieces(ops, ctx, total), scale)

    def remain(self, ops: Ops[Array], ctx: Context[Array], grad: Array, payload: Array) -> Array:
        """``grad`` less all pieces."""
        return ops.subtract(grad, self.pieces(ops, ctx, payload))


class Layout(NamedTuple):
    """What stands in a projection's payload (all float32), for the second part of a chain."""

    values: int
    """Elements at the front that may be rounded once more."""
    precise: int
    """Elements behind them that should not be: tensors that travel whole, measurements."""


class Projection(Piecewise):
    """A linear compressor with a float32 payload, which can begin a chain."""

    @abstractmethod
    def layout(self, spec: Spec, side: int) -> Layout:
        """What its payload holds."""

    def payload_bytes(self, spec: Spec, side: int = 0) -> int:
        """4 bytes a float."""
        return 4 * sum(self.layout(spec, side))
