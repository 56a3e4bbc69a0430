"""``intB``: integers of B bits that add exactly (B from 2 to 16), e.g. ``int8``, ``int4:stochastic``.

Every rank rounds for itself to integers of at most L = floor((2^(B-1) - 1) / N) levels, so that a sum over N ranks
cannot overflow a lane of B bits, by construction. Lanes are packed into int32 or int64 words and stay signed, so a ring
adds them exactly: Horovod's PyTorch binding reduces no 8- or 16-bit integers. The step between two levels is a power of
two, shared by all ranks and one step late: it follows from the root mean squares of the last step, whose logarithms
ride along as integers; those of the louder ranks count, so that a rank with hardly any gradient does not have the
others clipped. So encoding, adding and decoding make no rounding error beyond the one rounding to a level, zero is
exact, and the next context is made of integers alone. Values beyond the levels are clipped and counted; one that is
also far beyond the largest of the last steps overflows (64 times their geometric mean over the louder ranks).

Nearest rounding loses at most half a step of what is not clipped and never sends more than there is, so the residual
takes the rest (error feedback); stochastic rounding is right on average instead, and its residual stays below one step.

Sent: d B / 8 bytes (more where B does not divide the word: see ``_word``). Vectors and tiny tensors (the spec's tail)
travel in lanes of 32 bits whose step is a millionth of their root mean square or less. The shared scale and the levels
per rank are those of integer all-reduces in the literature (e.g. IntSGD, arXiv 2102.08374). A step whose scale nothing
has told yet, neither a dense step nor the body for the tail or the tail for the body, sends nothing; the residual keeps
it, if there is one.
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
"""Exponent of a step that no sum has told yet; ``power_of_two`` makes it 0."""
SMALLEST_RMS = 2.0**-100
"""Root mean squares below this count as silence: nothing is sent, the residual keeps it."""
LOUDEST = 125
"""Largest exponent of a step."""
PER_OCTAVE = 256
"""Logarithms travel in this many parts of a factor of two."""
MOST_BITS = 16
LOW = 2 * PER_OCTAVE
"""A rank this far below what the step is made for does not count while there are louder ones."""
LOW_ONE = 1 << 16
TAIL_BITS = 32
TAIL_LEVELS = 2**30
TAIL_RANGE = 2.0**10
"""Multiple of the tail's root mean square that fits into its lanes."""
FAR = 6 * PER_OCTAVE
"""A value this far above the largest of the last steps overflows, if it is beyond the levels, too."""
FORGET = PER_OCTAVE // 8
"""How much of the largest is forgotten in a step that had smaller ones."""
UNSEEN = 1 << 16
"""Logarithm of the largest value where no sum has told it yet: nothing is above it."""

Entry = TypeVar("Entry")
"""An integer, or an array of one."""


class State(NamedTuple, Generic[Entry]):
    """What stands in the context's one int32 array."""

    exponent: Entry
    """log2 of the step between two levels"""
    tail_exponent: Entry
    clipped: Entry
    """Values beyond the levels in the last step, all ranks together"""
    step: Entry
    largest: Entry
    """PER_OCTAVE * log2(largest magnitude that a rank had in the last steps)"""
    tail_largest: Entry


class Measured(NamedTuple, Generic[Entry]):
    """Integers that ride behind the lanes; they add over ranks."""

    low_rms: Entry
    """PER_OCTAVE * log2(root mean square of the body), over ranks far below what the present step is made for"""
    tail_low_rms: Entry
    log_rms: Entry
    """the same over all others that are not silent"""
    tail_log_rms: Entry
    contributors: Entry
    """number of those others, and LOW_ONE for every rank with a low one"""
    tail_contributors: Entry
    clipped: Entry
    infinite: Entry
    """Ranks whose values were not finite"""
    largest: Entry
    """PER_OCTAVE * log2(largest magnitude of the body), over the ranks of ``log_rms``"""
    tail_largest: Entry
    overflow: Entry
    """What is above 0 on ranks whose values lie far beyond the levels"""


INFINITE, OVERFLOW = (Measured._fields.index(name) - len(Measured._fields) for name in ("infinite", "overflow"))
"""Where they stand in a payload, from its end."""


class Integer(Piecewise):
    """Rounding to integers with a shared step: what the summable quantisers have in common."""

    kind = "quantiser"
    learns = "the step: last step's root mean square"
    needs_warmup = True

    @property
    def memory_passes(self) -> float:
        """Drawing noise takes a few more."""
        return 8.0 if self.stochastic else 6.0

    @property
    def stochastic(self) -> bool:
        """Whether a hash rounds, instead of to the nearest."""
        return False

    @abstractmethod
    def bits(self, ranks: int) -> int:
        """B, bits of a lane."""

    def levels(self, ranks: int) -> int:
        """L, the largest integer that a rank sends. Raises ValueError where none is left."""
        bits = self.bits(ranks)
        levels = ((1 << (bits - 1)) - 1) // ranks
        if not levels:
            fewest = fewest_bits(ranks)
            instead = f"; the fewest that do are {fewest}" if fewest <= MOST_BITS else ", and so do all others"
            raise ValueError(
                f"{self.name} leaves no level for a sum over {ranks} ranks: {bits} bits hold sums up to "
                f"{2 ** (bits - 1) - 1}{instead}"
            )
        return levels

    def clip_multiple(self, levels: int) -> float:
        """Largest value sent, as a multiple of the root mean square.

        Wider than a single round trip would like it: one step serves layers of different magnitude, and what is clipped
        step after step weighs more than coarser rounding, which the residual makes good.
        """
        return float(1.5 * levels ** (2 / 3))

    def init(self, ops: Ops[Array], spec: Spec) -> Context[Array]:
        """No step known."""
        self.levels(spec.ranks)
        return Context(spec, 0, (ops.from_numpy(np.array(State(UNKNOWN, UNKNOWN, 0, 0, UNSEEN, UNSEEN), np.int32)),))

    def encode(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None = None) -> Array:
        """Lanes of the body, lanes of the tail, measurements."""
        return self._payload(ops, ctx, *self._pack(ops, ctx, grad, leave=False))

    def send(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None = None) -> Sent[Array]:
        """While values are in hand, what is left of them is too."""
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
        """Integers times the step."""
        spec, state = ctx.spec, self._state(ctx)
        split = _words(spec.body, self.bits(spec.ranks), self._word(spec.ranks))
        return [
            Packed(total[:split], state.exponent, self.bits(spec.ranks), spec.body),
            Packed(total[split : -len(Measured._fields)], state.tail_exponent, TAIL_BITS, spec.tail),
        ]

    def advance(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Context[Array]:
        """The next steps, from the geometric mean of the louder ranks' root mean squares."""
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
        # What was silent so far takes its step from the other part, to be corrected when a rank has some of it.
        known = ops.integers(exponents > UNKNOWN)
        apart = (offsets - ops.concat([offsets[1:], offsets[:1]])) // PER_OCTAVE
        other = ops.concat([exponents[1:], exponents[:1]]) + apart
        exponents = exponents * known + other * (1 - known)
        return ctx._replace(state=(ops.concat([exponents, numbers[6:7], state[3:4] + 1, largest]),))

    def warm_up(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Context[Array]:
        """Steps for gradients of which ``total`` is the sum, taken for independent ones."""
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
        """PER_OCTAVE * log2(step / root mean square) for body and tail (int32)."""

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
        """The mean of what the louder ranks had, or what is remembered of the steps before, for body and tail."""
        before, count = ctx.state[0][4:], numbers[4:6] % LOW_ONE
        known = ops.integers(count > 0)
        now = numbers[8:10] // (count + 1 - known)
        # A first measurement replaces what stands for none.
        faded = before - FORGET - 2 * UNSEEN * ops.integers(before >= UNSEEN)
        largest = _larger(now, faded) * known + before * (1 - known)
        # A tail may be rarely hit: it is held against the body's values, too, where those are larger.
        body = largest[:1]
        return ops.concat([body, _larger(largest[1:], body - 2 * UNSEEN * ops.integers(body >= UNSEEN))])

    def is_finite(self, ops: Ops[Array], grad: Array, payload: Array) -> Array:
        """As measured, because integers are always finite."""
        return payload[INFINITE] < 1 if payload.shape[0] else ops.all_finite(grad)

    def overflows(self, ops: Ops[Array], ctx: Context[Array], grad: Array, payload: Array) -> Array:
        """A value beyond the levels that is far above what was the largest, in the body or in the tail."""
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
        """Exponent of the step that values are rounded to."""
        return state.exponent

    def _state(self, ctx: Context[Array]) -> State[Array]:
        return State(*(ctx.state[0][i : i + 1] for i in range(len(State._fields))))

    def _word(self, ranks: int) -> int:
        """32, or 64 where that wastes fewer bits: 3-bit lanes fit 10 times into the one and 21 times into the other."""
        bits = self.bits(ranks)
        return 64 if 64 // bits > 2 * (32 // bits) else 32


@dataclass(frozen=True)
class IntB(Integer):
    """Integers of a given width."""

    width: int = 8
    """B, bits of a lane: 2 to 16."""
    stochastic: bool = False
    """Whether a hash rounds, instead of to the nearest."""

    paper = "2102.08374"

    def __post_init__(self) -> None:
        if not 2 <= self.width <= MOST_BITS:
            raise ValueError(f"intB has 2 to 16 bits, e.g. int8. Received: int{self.width}")

    @property
    def name(self) -> str:
        """``intB`` or ``intB:stochastic``."""
        return f"int{self.width}" + ":stochastic" * self.stochastic

    def bits(self, ranks: int) -> int:
        """As asked for."""
        return self.width


def fewest_bits(ranks: int) -> int:
    """Bits of the narrowest lane whose sums over ``ranks`` ranks leave a level."""
    return ranks.bit_length() + 1


def _words(count: int, bits: int, word: int) -> int:
    lanes = word // bits
    return -(-count // lanes)


def _larger(one: Array, other: Array) -> Array:
    """The larger of two integers, in operations that all frameworks share."""
    return (one + other + magnitude(one - other)) // 2


def _follow(ops: Ops[Array], log_rms: Array, count: Array, offsets: Array, before: Array) -> Array:
    """Exponents of the powers of two nearest to the steps for the mean logarithm; in integers alone."""
    known = ops.integers(count > 0)
    following = (log_rms + count * (offsets + PER_OCTAVE // 2)) // (PER_OCTAVE * (count + 1 - known))
    # Beyond, a step and its reciprocal would not both be numbers. (following + LOUDEST - |following - LOUDEST|) / 2 is
    # the lesser of two integers, in operations that all frameworks share.
    following = (following + LOUDEST - magnitude(following - LOUDEST)) // 2
    return following * known + before * (1 - known)
