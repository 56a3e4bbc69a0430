"""``intB``: integers of B bits that add exactly (B from 2 to 16), e.g. ``int8``, ``int4:stochastic``.

Every rank rounds to integers of magnitude L = floor((2^(B-1) - 1) / N) at most, so a sum over N ranks cannot overflow
a lane of B bits. Lanes are packed into int32 or int64 words (Horovod's PyTorch binding reduces no 8- or 16-bit
integers) and stay signed, so a ring adds them exactly. The step size, the distance of two levels, is a power of two,
equal on all ranks. It follows from the root mean squares (RMS) of the last step, whose logarithms travel in the payload
as integers. Only the louder ranks' count, so that a rank with hardly any gradient does not have the others clipped.
Rounding to a level is the only rounding error: zero is exact, and contexts are integers alone. Values beyond the levels
are clipped and counted. A clipped value overflows if it is also above 64 times the largest value of the last steps (the
geometric mean over the louder ranks).

Nearest rounding is off by at most half a step size where it does not clip, and the residual keeps the difference (error
feedback). Stochastic rounding is right on average, and its residual stays below one step size.

Sent: d B / 8 bytes (more where B does not divide the word: see ``_word``). The tail (vectors, tiny tensors) travels in
lanes of 32 bits with a step size of about N millionths of its RMS. The shared scale and the levels per rank follow
integer all-reduces in the literature (e.g. IntSGD, arXiv 2102.08374). While the step size is unknown (no warm-up, and
neither body nor tail measured), a step sends nothing; the residual, if the level keeps one, keeps the gradient.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from hvdplus.compression.contract import Context, Piecewise, Sent, Spec, largest_of
from hvdplus.compression.hashing import key
from hvdplus.compression.ops import Array, Ops, Packed, Packing, Piece, magnitude

UNKNOWN = -127
"""Exponent of a step size that no sum has told yet; ``power_of_two`` makes it 0."""
SMALLEST_RMS = 2.0**-100
"""A body or tail with a smaller RMS counts as silent: the residual keeps it."""
LOUDEST = 125
"""Largest exponent of a step size."""
PER_OCTAVE = 256
"""Logarithms are integers, with this many units per factor of two."""
MOST_BITS = 16
LOW = 2 * PER_OCTAVE
"""A rank is low if its log RMS is this far below the one that the step size is made for. Low ranks do not count while
there are louder ones."""
LOW_ONE = 1 << 16
"""Count of a low rank in ``Measured.contributors``."""
TAIL_BITS = 32
TAIL_LEVELS = 2**30
TAIL_RANGE = 2.0**10
"""Multiple of the tail's RMS that fits into its lanes."""
FAR = 6 * PER_OCTAVE
"""A clipped value whose logarithm is this far above the largest of the last steps overflows."""
FORGET = PER_OCTAVE // 8
"""Decay of the largest value's logarithm in a step with smaller values."""
UNSEEN = 1 << 16
"""Logarithm of a largest value that no sum has told yet: nothing is above it."""

Entry = TypeVar("Entry")
"""An integer, or an array of one."""


class State(NamedTuple, Generic[Entry]):
    """Elements of the context's one int32 array."""

    exponent: Entry
    """log2 of the body's step size"""
    tail_exponent: Entry
    clipped: Entry
    """Values clipped in the last step, on all ranks together"""
    step: Entry
    """Number of training steps so far"""
    largest: Entry
    """PER_OCTAVE * log2(largest magnitude in the last steps), the louder ranks' mean"""
    tail_largest: Entry


class Measured(NamedTuple, Generic[Entry]):
    """Integers behind the payload's lanes; they add over ranks."""

    low_rms: Entry
    """PER_OCTAVE * log2(RMS of the body) on a low rank, else 0"""
    tail_low_rms: Entry
    log_rms: Entry
    """the same on a rank that is neither low nor silent"""
    tail_log_rms: Entry
    contributors: Entry
    """1 on a rank that is neither low nor silent, ``LOW_ONE`` on a low rank"""
    tail_contributors: Entry
    clipped: Entry
    infinite: Entry
    """1 on a rank whose values are not finite"""
    largest: Entry
    """PER_OCTAVE * log2(largest magnitude of the body) on a rank that is neither low nor silent"""
    tail_largest: Entry
    overflow: Entry
    """Above 0 on a rank whose values lie far beyond the levels"""


INFINITE, OVERFLOW = (Measured._fields.index(name) - len(Measured._fields) for name in ("infinite", "overflow"))
"""Their indices in a payload, from its end."""


class Integer(Piecewise):
    """Base of the summable quantisers: rounding to integers with a shared step size."""

    kind = "quantiser"
    learns = "the step: last step's root mean square"
    needs_warmup = True

    @property
    def memory_passes(self) -> float:
        """Two more for the noise of stochastic rounding."""
        return 8.0 if self.stochastic else 6.0

    @property
    def stochastic(self) -> bool:
        """Whether rounding is stochastic (by a hash) instead of to nearest."""
        return False

    @abstractmethod
    def bits(self, ranks: int) -> int:
        """B, bits of a lane."""

    def levels(self, ranks: int) -> int:
        """L, the largest integer that a rank sends. Raises ValueError if L would be 0."""
        bits = self.bits(ranks)
        levels = ((1 << (bits - 1)) - 1) // ranks
        if not levels:
            fewest = fewest_bits(ranks)
            instead = f"{fewest} bits are enough" if fewest <= MOST_BITS else f"{MOST_BITS} bits are too few as well"
            raise ValueError(
                f"{self.name} leaves no level for a sum over {ranks} ranks: {bits} bits hold sums up to "
                f"{2 ** (bits - 1) - 1}; {instead}"
            )
        return levels

    def clip_multiple(self, levels: int) -> float:
        """Largest value sent, as a multiple of the RMS.

        Larger than the best for a single round trip: one step size serves layers of different magnitude, and clipping
        in step after step costs more than coarser rounding, which the residual corrects.
        """
        return float(1.5 * levels ** (2 / 3))

    def init(self, ops: Ops[Array], spec: Spec) -> Context[Array]:
        """A context without known step sizes."""
        self.levels(spec.ranks)
        return Context(spec, 0, (ops.from_numpy(np.array(State(UNKNOWN, UNKNOWN, 0, 0, UNSEEN, UNSEEN), np.int32)),))

    def encode(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None = None) -> Array:
        """Lanes of the body, lanes of the tail, measurements."""
        return self._payload(ops, ctx, *self._pack(ops, ctx, grad, leave=False))

    def send(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None = None) -> Sent[Array]:
        """Packs and computes what is left in one pass."""
        body, tail = self._pack(ops, ctx, grad, leave=True)
        payload = self._payload(ops, ctx, body, tail)
        assert body.left is not None and tail.left is not None  # as asked for
        left = ops.concat([body.left, tail.left])
        return Sent(payload, left, self.is_finite(ops, grad, payload), self.overflows(ops, ctx, grad, payload))

    def _pack(
        self, ops: Ops[Array], ctx: Context[Array], grad: Array, leave: bool
    ) -> tuple[Packing[Array], Packing[Array]]:
        spec, state = ctx.spec, self._state(ctx)
        word, levels, bits = self._word(spec.ranks), self.levels(spec.ranks), self.bits(spec.ranks)
        noise = state.step + key(spec.seed, spec.position) if self.stochastic else None
        left_exponent, tail_left_exponent = (state.exponent, state.tail_exponent) if leave else (None, None)
        body, tail = grad[: spec.body], grad[spec.body :]
        return (
            ops.pack(body, self.rounding(ops, state), levels, bits, word, noise, left_exponent),
            ops.pack(tail, state.tail_exponent, TAIL_LEVELS // spec.ranks, TAIL_BITS, word, None, tail_left_exponent),
        )

    def _payload(self, ops: Ops[Array], ctx: Context[Array], body: Packing[Array], tail: Packing[Array]) -> Array:
        if not ctx.spec.size:
            return body.words
        measured = ops.integers(self._measure(ops, ctx, body, tail), self._word(ctx.spec.ranks))
        return ops.concat([body.words, tail.words, measured])

    def pieces(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Sequence[Piece[Array]]:
        """Body and tail: integers times their step size."""
        spec, state = ctx.spec, self._state(ctx)
        split = _words(spec.body, self.bits(spec.ranks), self._word(spec.ranks))
        return [
            Packed(total[:split], state.exponent, self.bits(spec.ranks), spec.body),
            Packed(total[split : -len(Measured._fields)], state.tail_exponent, TAIL_BITS, spec.tail),
        ]

    def advance(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Context[Array]:
        """The next step sizes, from the geometric mean of the louder ranks' RMS."""
        if not ctx.spec.size:
            return ctx
        numbers, state = ops.integers(total[-len(Measured._fields) :]), ctx.state[0]
        largest = self._follow_largest(ops, ctx, numbers)
        low_rms, log_rms, contributors = numbers[:2], numbers[2:4], numbers[4:6]
        louder = ops.integers(contributors % LOW_ONE > 0)
        log_rms = log_rms * louder + low_rms * (1 - louder)
        count = contributors % LOW_ONE * louder + contributors // LOW_ONE * (1 - louder)
        offsets = self._offsets(ops, ctx.spec.ranks)
        exponents = _follow(ops, log_rms, count, offsets, state[:2])
        # A body or tail that was silent so far takes the other's step size, until a rank measures its own.
        known = ops.integers(exponents > UNKNOWN)
        apart = (offsets - ops.concat([offsets[1:], offsets[:1]])) // PER_OCTAVE
        other = ops.concat([exponents[1:], exponents[:1]]) + apart
        exponents = exponents * known + other * (1 - known)
        return ctx._replace(state=(ops.concat([exponents, numbers[6:7], state[3:4] + 1, largest]),))

    def warm_up(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Context[Array]:
        """Step sizes for gradients whose sum is ``total``, on the assumption that ranks' gradients are independent."""
        if not ctx.spec.size:
            return ctx
        parts, share = (total[: ctx.spec.body], total[ctx.spec.body :]), ctx.spec.ranks**-0.5
        clipped = ctx.state[0][2:3], ops.integers(ops.rms(total[:0]))
        body, tail = (
            Packing(part, clips, ops.rms(part) * share, None, largest_of(ops, part))
            for part, clips in zip(parts, clipped, strict=True)
        )
        return self.advance(ops, ctx, self._measure(ops, ctx, body, tail))

    def _offsets(self, ops: Ops[Array], ranks: int) -> Array:
        """PER_OCTAVE * log2(step size / RMS) for body and tail (int32)."""

        def make() -> np.ndarray:
            levels = self.levels(ranks)
            steps = self.clip_multiple(levels) / levels, TAIL_RANGE / (TAIL_LEVELS // ranks)
            return np.array([round(PER_OCTAVE * math.log2(step)) for step in steps], np.int32)

        return ops.constant(("offsets", self.name, ranks), make)

    def _measure(self, ops: Ops[Array], ctx: Context[Array], body: Packing[Array], tail: Packing[Array]) -> Array:
        """``Measured`` of one rank, end to end (int32)."""
        measures = [body.rms, tail.rms, body.largest, tail.largest, body.clipped, tail.clipped]
        body_rms, tail_rms, body_largest, tail_largest, *clipped = [ops.reshape(number, (1,)) for number in measures]
        sizes = ops.concat([body_rms, tail_rms, body_largest, tail_largest])
        logarithms = ops.integers(ops.log2(sizes + SMALLEST_RMS) * PER_OCTAVE)
        log_rms, largest = logarithms[:2], logarithms[2:]
        contributors = ops.integers(sizes[:2] > SMALLEST_RMS)
        made_for = ctx.state[0][:2] * PER_OCTAVE - self._offsets(ops, ctx.spec.ranks)
        loud = contributors * ops.integers(log_rms + LOW > made_for)
        low_rms = contributors - loud
        infinite = 1 - ops.reshape(ops.integers(ops.all_finite(sizes)), (1,))
        far = ops.integers(largest > ctx.state[0][4:] + FAR) * ops.integers(ops.concat(clipped) > 0)
        count = loud + low_rms * LOW_ONE
        clips, overflow = clipped[0] + clipped[1], far[:1] + far[1:]
        return ops.concat([log_rms * low_rms, log_rms * loud, count, clips, infinite, largest * loud, overflow])

    def _follow_largest(self, ops: Ops[Array], ctx: Context[Array], numbers: Array) -> Array:
        """The next ``largest`` of body and tail: the louder ranks' mean, or the decayed last one if that is larger."""
        before, count = ctx.state[0][4:], numbers[4:6] % LOW_ONE
        known = ops.integers(count > 0)
        now = numbers[8:10] // (count + 1 - known)
        # A first measurement replaces UNSEEN.
        faded = before - FORGET - 2 * UNSEEN * ops.integers(before >= UNSEEN)
        largest = _larger(now, faded) * known + before * (1 - known)
        # A tail's gradients may be rare, so the body's largest value counts for it, too, if that is larger.
        body = largest[:1]
        return ops.concat([body, _larger(largest[1:], body - 2 * UNSEEN * ops.integers(body >= UNSEEN))])

    def is_finite(self, ops: Ops[Array], grad: Array, payload: Array) -> Array:
        """As measured before rounding, because integers are always finite."""
        return payload[INFINITE] < 1 if payload.shape[0] else ops.all_finite(grad)

    def overflows(self, ops: Ops[Array], ctx: Context[Array], grad: Array, payload: Array) -> Array:
        """Whether a clipped value in body or tail is far above the largest of the last steps."""
        return payload[OVERFLOW] > 0 if payload.shape[0] else super().overflows(ops, ctx, grad, payload)

    def payload_bytes(self, spec: Spec, side: int = 0) -> int:
        """B bits an element of the body, 32 of the tail, and a word for every number measured."""
        self.levels(spec.ranks)
        if not spec.size:
            return 0
        word = self._word(spec.ranks)
        words = _words(spec.body, self.bits(spec.ranks), word) + _words(spec.tail, TAIL_BITS, word)
        return word // 8 * (words + len(Measured._fields))

    def rounding(self, ops: Ops[Array], state: State[Array]) -> Array:
        """Exponent of the step size that the body is rounded with."""
        return state.exponent

    def _state(self, ctx: Context[Array]) -> State[Array]:
        return State(*(ctx.state[0][i : i + 1] for i in range(len(State._fields))))

    def _word(self, ranks: int) -> int:
        """Bits of a word: 32, or 64 where that wastes fewer: 21 lanes of 3 bits fit into 64 bits, but 10 into 32."""
        bits = self.bits(ranks)
        return 64 if 64 // bits > 2 * (32 // bits) else 32


@dataclass(frozen=True)
class IntB(Integer):
    """Integers of a given width."""

    width: int = 8
    """B, bits of a lane: 2 to 16."""
    stochastic: bool = False
    """Whether rounding is stochastic (by a hash) instead of to nearest."""

    paper = "2102.08374"

    def __post_init__(self) -> None:
        if not 2 <= self.width <= MOST_BITS:
            raise ValueError(f"intB has 2 to 16 bits, e.g. int8. Received: int{self.width}")

    @property
    def name(self) -> str:
        """``intB`` or ``intB:stochastic``."""
        return f"int{self.width}" + ":stochastic" * self.stochastic

    def bits(self, ranks: int) -> int:
        """``width``, for any number of ranks."""
        return self.width


def fewest_bits(ranks: int) -> int:
    """Bits of the narrowest lane that holds a sum of ``ranks`` signs."""
    return ranks.bit_length() + 1


def _words(count: int, bits: int, word: int) -> int:
    lanes = word // bits
    return -(-count // lanes)


def _larger(one: Array, other: Array) -> Array:
    """The larger of two integers, in operations that all frameworks share."""
    return (one + other + magnitude(one - other)) // 2


def _follow(ops: Ops[Array], log_rms: Array, count: Array, offsets: Array, before: Array) -> Array:
    """Exponents of the step sizes for the mean log RMS, to the nearest power of two, in integers alone."""
    known = ops.integers(count > 0)
    following = (log_rms + count * (offsets + PER_OCTAVE // 2)) // (PER_OCTAVE * (count + 1 - known))
    # A step size and its reciprocal have to be normal float32. (following + LOUDEST - |following - LOUDEST|) / 2 is the
    # lesser of two integers, in operations that all frameworks share.
    following = (following + LOUDEST - magnitude(following - LOUDEST)) // 2
    return following * known + before * (1 - known)
