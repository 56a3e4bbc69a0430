"""``intB``: integers of B bits that add exactly (B from 2 to 16), e.g. ``int8``, ``int4:stochastic``.

Every rank rounds to integers of magnitude L = floor((2^(B-1) - 1) / N) at most, so a sum over N ranks cannot overflow
a lane of B bits. Lanes are packed into int32 or int64 words (Horovod's PyTorch binding reduces no 8- or 16-bit
integers) and stay signed, so a ring adds them exactly. The step size, the distance of two levels, is a power of two,
equal on all ranks. Every run of the body (a tensor, small ones joined) has a step size of its own. It follows from the
root mean squares (RMS) of the last step, whose logarithms travel in the payload as integers; in the first step they are
summed before anything is encoded (``ask``). Only the louder ranks' count, so that a rank with hardly any gradient does
not have the others clipped. Rounding to a level is the only rounding error: zero is exact, and contexts are integers
alone. Values beyond the levels are clipped and counted. A clipped value overflows if the body's largest value is also
above 64 times that of the last steps (the geometric mean over the louder ranks); the tail's by itself.

Nearest rounding is off by at most half a step size where it does not clip, and the residual keeps the difference (error
feedback). Stochastic rounding is right on average, and its residual stays below one step size.

Sent: d B / 8 bytes (more where B does not divide the word: see ``_word``). The tail (vectors, tiny tensors) travels in
lanes of 32 bits with a step size of about N millionths of its RMS. Shared scales, one for each tensor, and levels per
rank are as in integer all-reduces of the literature (e.g. IntSGD, arXiv 2102.08374). While the step size is unknown
(all gradients so far were zero), a step sends nothing; the residual, if the level keeps one, keeps the gradient.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
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
RUN = 4096
"""Fewest elements of a run, if there are several."""
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
    """Parts of the context's one int32 array; those with a star have an element for every run."""

    exponent: Entry
    """* log2 of the step size"""
    tail_exponent: Entry
    clipped: Entry
    """Values clipped in the last step, on all ranks together"""
    step: Entry
    """Number of sums that contexts have learned from so far"""
    largest: Entry
    """PER_OCTAVE * log2(largest magnitude of the body in the last steps), the louder ranks' mean"""
    tail_largest: Entry


class Measured(NamedTuple, Generic[Entry]):
    """Integers behind the payload's lanes; they add over ranks. Those with a star have an element for every run."""

    low_rms: Entry
    """* PER_OCTAVE * log2(RMS) on a low rank, else 0"""
    tail_low_rms: Entry
    log_rms: Entry
    """* the same on a rank that is neither low nor silent"""
    tail_log_rms: Entry
    contributors: Entry
    """* 1 on a rank that is neither low nor silent, ``LOW_ONE`` on a low rank"""
    tail_contributors: Entry
    clipped: Entry
    loud: Entry
    """1 on a rank that is neither low nor silent in some run"""
    tail_loud: Entry
    largest: Entry
    """PER_OCTAVE * log2(largest magnitude of the body) on such a rank"""
    tail_largest: Entry
    infinite: Entry
    """1 on a rank whose values are not finite"""
    overflow: Entry
    """Above 0 on a rank whose values lie far beyond the levels"""


INFINITE, OVERFLOW = (Measured._fields.index(name) - len(Measured._fields) for name in ("infinite", "overflow"))
"""Their indices in a payload, from its end."""


@functools.lru_cache(maxsize=1024)  # asked several times a step
def runs_of(spec: Spec) -> tuple[int, ...]:
    """Lengths of the body's runs, at least one: tensors; those of fewer than ``RUN`` elements join what follows, and
    the last one what is before."""
    runs: list[int] = []
    for size in spec.sizes:
        if runs and runs[-1] < RUN:
            runs[-1] += size
        else:
            runs.append(size)
    if len(runs) > 1 and runs[-1] < RUN:
        runs[-2:] = [sum(runs[-2:])]
    return tuple(runs) or (0,)


def measured_in(spec: Spec) -> int:
    """Number of integers behind the lanes."""
    return len(Measured._fields) + 3 * (len(runs_of(spec)) - 1)


class Integer(Piecewise):
    """Base of the summable quantisers: rounding to integers with a shared step size."""

    kind = "quantiser"
    learns = "the step: last step's root mean square"
    asks = True

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

        Larger than the best for a single round trip: rows of a tensor differ in magnitude, and clipping in step after
        step costs more than coarser rounding, which the residual corrects. Tried on digits and text (``NOTES.md``): 2.2
        at one level, 4 at three; where there are many, a larger one would only round more.
        """
        return float(max(2.2 * levels**0.575, 1.5 * levels ** (2 / 3)))

    def init(self, ops: Ops[Array], spec: Spec) -> Context[Array]:
        """A context without known step sizes."""
        self.levels(spec.ranks)
        exponents = [UNKNOWN] * (len(runs_of(spec)) + 1)
        return Context(spec, 0, (ops.from_numpy(np.array([*exponents, 0, 0, UNSEEN, UNSEEN], np.int32)),))

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
            ops.pack(body, self.rounding(ops, state), levels, bits, word, noise, left_exponent, _several(spec)),
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
            Packed(total[:split], state.exponent, self.bits(spec.ranks), spec.body, _several(spec)),
            Packed(total[split : -measured_in(spec)], state.tail_exponent, TAIL_BITS, spec.tail),
        ]

    def advance(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Context[Array]:
        """The next step sizes, from the geometric mean of the louder ranks' RMS."""
        if not ctx.spec.size:
            return ctx
        numbers, parts = ops.integers(total[-measured_in(ctx.spec) :]), len(runs_of(ctx.spec)) + 1
        low_rms, log_rms, contributors = (numbers[i * parts : (i + 1) * parts] for i in range(3))
        clipped, loud, told = (numbers[3 * parts + a : 3 * parts + b] for a, b in ((0, 1), (1, 3), (3, 5)))
        largest = self._follow_largest(ops, ctx.state[0][-2:], told, loud)
        louder = ops.integers(contributors % LOW_ONE > 0)
        log_rms = log_rms * louder + low_rms * (1 - louder)
        count = contributors % LOW_ONE * louder + contributors // LOW_ONE * (1 - louder)
        offsets = self._offsets(ops, ctx.spec)
        exponents = _follow(ops, log_rms, count, offsets, ctx.state[0][:parts])
        # What was silent so far takes the step size of the loudest, until a rank measures its own.
        known = ops.integers(exponents > UNKNOWN)
        loudest = _most(ops, (exponents * PER_OCTAVE - offsets) * known - NOBODY * (1 - known))
        others = _larger(_smaller((loudest + offsets) // PER_OCTAVE, LOUDEST), UNKNOWN)
        exponents = exponents * known + others * (1 - known)
        step = ctx.state[0][parts + 1 : parts + 2] + 1
        return ctx._replace(state=(ops.concat([exponents, clipped, step, largest]),))

    def ask(self, ops: Ops[Array], ctx: Context[Array], grad: Array) -> Array:
        """The measurements alone."""
        if not ctx.spec.size:
            return grad[:0]
        nothing, body, tail = ops.integers(ops.rms(grad[:0])), grad[: ctx.spec.body], grad[ctx.spec.body :]
        runs = [grad[a:b] for a, b in pairwise(accumulate(runs_of(ctx.spec), initial=0))]
        rms = ops.concat([ops.reshape(ops.rms(run), (1,)) for run in runs])
        measured = self._measure(
            ops,
            ctx,
            Packing(body, nothing, rms, None, largest_of(ops, body)),
            Packing(tail, nothing, ops.rms(tail), None, largest_of(ops, tail)),
        )
        return ops.integers(measured, self._word(ctx.spec.ranks))

    def _offsets(self, ops: Ops[Array], spec: Spec) -> Array:
        """PER_OCTAVE * log2(step size / RMS) for every run and the tail (int32)."""
        runs = len(runs_of(spec))

        def make() -> np.ndarray:
            levels = self.levels(spec.ranks)
            steps = [self.clip_multiple(levels) / levels] * runs + [TAIL_RANGE / (TAIL_LEVELS // spec.ranks)]
            return np.array([round(PER_OCTAVE * math.log2(step)) for step in steps], np.int32)

        return ops.constant(("offsets", self.name, spec.ranks, runs), make)

    def _measure(self, ops: Ops[Array], ctx: Context[Array], body: Packing[Array], tail: Packing[Array]) -> Array:
        """``Measured`` of one rank, end to end (int32)."""
        runs = len(runs_of(ctx.spec))
        rms = ops.concat([ops.reshape(body.rms, (runs,)), ops.reshape(tail.rms, (1,))])
        largest = ops.concat([ops.reshape(part.largest, (1,)) for part in (body, tail)])
        clips = ops.concat([ops.reshape(part.clipped, (1,)) for part in (body, tail)])
        logarithms = ops.integers(ops.log2(ops.concat([rms, largest]) + SMALLEST_RMS) * PER_OCTAVE)
        log_rms, log_largest = logarithms[:-2], logarithms[-2:]
        contributors = ops.integers(rms > SMALLEST_RMS)
        made_for = ctx.state[0][: runs + 1] * PER_OCTAVE - self._offsets(ops, ctx.spec)
        loud = contributors * ops.integers(log_rms + LOW > made_for)
        low_rms = contributors - loud
        some = ops.concat([_most(ops, loud[:-1]), loud[-1:]])
        infinite = 1 - ops.reshape(ops.integers(ops.all_finite(ops.concat([rms, largest]))), (1,))
        far = ops.integers(log_largest > ctx.state[0][-2:] + FAR) * ops.integers(clips > 0)
        count, clipped, overflow = loud + low_rms * LOW_ONE, clips[:1] + clips[1:], far[:1] + far[1:]
        return ops.concat(
            [log_rms * low_rms, log_rms * loud, count, clipped, some, log_largest * some, infinite, overflow]
        )

    def _follow_largest(self, ops: Ops[Array], before: Array, told: Array, count: Array) -> Array:
        """The next ``largest`` of body and tail: the louder ranks' mean, or the decayed last one if that is larger."""
        known = ops.integers(count > 0)
        now = told // (count + 1 - known)
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
        return word // 8 * (words + measured_in(spec))

    def rounding(self, ops: Ops[Array], state: State[Array]) -> Array:
        """Exponents of the step sizes that the body's runs are rounded with."""
        return state.exponent

    def _state(self, ctx: Context[Array]) -> State[Array]:
        ends = accumulate([len(runs_of(ctx.spec)), 1, 1, 1, 1, 1], initial=0)
        return State(*(ctx.state[0][a:b] for a, b in pairwise(ends)))

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


def _several(spec: Spec) -> tuple[int, ...]:
    """The runs, if there are several."""
    runs = runs_of(spec)
    return runs if len(runs) > 1 else ()


SHIFT = 1 << 18
"""Above the magnitude of all numbers that are compared, and exact in float32."""
NOBODY = 1 << 17
"""Below every logarithm, taken negative."""


def _most(ops: Ops[Array], numbers: Array) -> Array:
    """The largest of some integers (int32, one element)."""
    if numbers.shape[0] == 1:
        return numbers
    return ops.integers(largest_of(ops, ops.floats(numbers + SHIFT))) - SHIFT


def _larger(one: Array, other: Array | int) -> Array:
    """The larger of two integers, in operations that all frameworks share."""
    return (one + other + magnitude(one - other)) // 2


def _smaller(one: Array, other: Array | int) -> Array:
    return (one + other - magnitude(one - other)) // 2


def _follow(ops: Ops[Array], log_rms: Array, count: Array, offsets: Array, before: Array) -> Array:
    """Exponents of the step sizes for the mean log RMS, to the nearest power of two, in integers alone."""
    known = ops.integers(count > 0)
    following = (log_rms + count * (offsets + PER_OCTAVE // 2)) // (PER_OCTAVE * (count + 1 - known))
    # A step size and its reciprocal have to be normal float32.
    return _smaller(following, LOUDEST) * known + before * (1 - known)
