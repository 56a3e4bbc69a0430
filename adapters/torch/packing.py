"""Integers of a few bits in lanes of words, in PyTorch: rounding, packing, unpacking, and noise for stochastic
rounding.

Everything works through chunks that stay in the cache.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from hvdplus.adapters.torch.memory import Pool
from hvdplus.compression.hashing import SCRAMBLE, WEYL
from hvdplus.compression.ops import Packed, Packing, sign_bits

CHUNK = 1 << 18
"""Elements that are worked on at a time on the CPU: 1 MB. Less is nearer in the cache, and costs more in calls."""
SAFE = 1e-30
"""A sum of squares between this and its reciprocal has stayed within float32."""
BYTES = {8: torch.int8, 16: torch.int16}
"""Bits of a lane -> its type, where it is a type of its own."""


class Runs:
    """Where a vector's runs are; without any, it is one run."""

    def __init__(self, lengths: tuple[int, ...], count: int) -> None:
        self.lengths, self._ends = lengths or (count,), list(accumulate(lengths)) or [count]

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(start, stop, number) of the parts of runs between two elements."""
        number = bisect_right(self._ends, start)
        while start < stop:
            end = min(self._ends[number], stop)
            yield start, end, number
            start, number = end, number + 1


class Rounding:
    """Rounds a bucket chunk by chunk, and measures it."""

    def __init__(
        self,
        ops: PackingOps,
        runs: Runs,
        exponent: torch.Tensor,
        levels: int,
        noise: torch.Tensor | None,
        left_exponent: torch.Tensor | None,
    ) -> None:
        self._ops, self._runs, self._levels, self._noise = ops, runs, levels, noise
        self._leaves = left_exponent is not None
        self._scratch = ops._scratch(sum(runs.lengths))
        self._prepare(exponent, exponent if left_exponent is None else left_exponent)

    def _prepare(self, exponent: torch.Tensor, left_exponent: torch.Tensor) -> None:
        self._inverse: Sequence[Any] = [2.0**-known if known > -127 else 0.0 for known in exponent.tolist()]
        self._level: Sequence[Any] = [2.0**stands if stands > -127 else 0.0 for stands in left_exponent.tolist()]
        # A scaled value up to this is never rounded beyond the levels: noise adds nearly 1, and is itself rounded.
        self._within = self._levels if self._noise is None else 0.99 * self._levels
        self._squares = [0.0] * len(self._inverse)
        self._largest: Any = 0.0
        self._clipped = 0.0

    def __call__(self, part: torch.Tensor, start: int) -> torch.Tensor:
        """The chunk ``part``, which begins at element ``start``, rounded to whole floats; valid until the next call."""
        whole = self._scratch[: len(part)]
        for a, b, run in self._runs.within(start, start + len(part)):
            own = slice(a - start, b - start)
            self._round(part[own], whole[own], a, run)
        return whole

    def _round(self, part: torch.Tensor, whole: torch.Tensor, start: int, run: int) -> None:
        """A part of one run, to whole floats in ``whole``."""
        square, largest = torch.dot(part, part).item(), max(part.amax().item(), -part.amin().item())
        if largest and not SAFE < square < 1 / SAFE:  # squares may have left float32
            square = torch.linalg.vector_norm(part, dtype=torch.float64).item() ** 2
        self._squares[run] += square
        self._largest = max(self._largest, largest)
        self._to_levels(torch.mul(part, self._inverse[run], out=whole), part, start)
        if not largest * self._inverse[run] <= self._within:  # NaN compares with nothing
            room = self._ops._scratch(len(whole))[: len(whole)]
            beyond = torch.abs(whole, out=room).sub_(self._levels).clamp_(0, 1)
            self._clipped += beyond.sum().item()  # comparing and counting takes longer
            whole.clamp_(-float(self._levels), float(self._levels))
        if self._leaves:
            part.sub_(whole, alpha=self._level[run])

    def _to_levels(self, scaled: torch.Tensor, part: torch.Tensor, start: int) -> None:
        if self._noise is not None:
            scaled.add_(self._ops._noise(part, start, self._noise)).floor_()
        else:
            scaled.round_()

    def rms(self) -> torch.Tensor:
        squares = zip(self._squares, self._runs.lengths, strict=True)
        rms = [(square / count) ** 0.5 for square, count in squares]
        return torch.tensor(rms if len(rms) > 1 else rms[0], dtype=torch.float32, device=self._ops._device)

    def largest(self) -> torch.Tensor:
        return torch.tensor(self._largest, dtype=torch.float32, device=self._ops._device)

    def clipped(self) -> torch.Tensor:
        clipped = int(self._clipped) if self._clipped == self._clipped else 0
        return torch.tensor(clipped, dtype=torch.int32, device=self._ops._device)


class DeviceRounding(Rounding):
    """``Rounding`` that reads no value on the host."""

    def _prepare(self, exponent: torch.Tensor, left_exponent: torch.Tensor) -> None:
        step = self._ops.power_of_two(exponent)
        inverse = step.reciprocal().nan_to_num_(posinf=0.0)  # exact, and 0 for an unknown step
        level = step if left_exponent is exponent else self._ops.power_of_two(left_exponent)
        self._inverse, self._level = inverse.unbind(), level.unbind()
        self._norms: list[list[torch.Tensor]] = [[] for _ in self._runs.lengths]
        self._highest: list[torch.Tensor] = []
        self._beyond: list[torch.Tensor] = []

    def __call__(self, part: torch.Tensor, start: int) -> torch.Tensor:
        levels, scaled = float(self._levels), self._scratch[: len(part)]
        own = [(slice(a - start, b - start), run) for a, b, run in self._runs.within(start, start + len(part))]
        for place, run in own:
            self._norms[run].append(torch.linalg.vector_norm(part[place], dtype=torch.float64))
            torch.mul(part[place], self._inverse[run], out=scaled[place])
        self._highest.append(torch.linalg.vector_norm(part, torch.inf))
        self._to_levels(scaled, part, start)
        self._beyond.append((scaled.abs() > levels).sum(dtype=torch.int32))
        scaled.clamp_(-levels, levels)
        for place, run in own if self._leaves else ():
            self._ops._deduct(part[place], scaled[place], self._level[run])
        return scaled

    def rms(self) -> torch.Tensor:
        norms = [one[0] if len(one) == 1 else torch.stack(one).square().sum().sqrt() for one in self._norms]
        lengths = self._runs.lengths
        if len(lengths) == 1:
            return norms[0].mul(lengths[0] ** -0.5).float()
        return torch.stack(norms).mul_(self._ops.constant(("runs", lengths), lambda: np.array(lengths) ** -0.5)).float()

    def largest(self) -> torch.Tensor:
        return self._highest[0] if len(self._highest) == 1 else torch.stack(self._highest).amax()

    def clipped(self) -> torch.Tensor:
        return self._beyond[0] if len(self._beyond) == 1 else torch.stack(self._beyond).sum(dtype=torch.int32)


class PackingOps:
    """The part of ``TorchOps`` that packs; see ``hvdplus.compression.ops.Ops``."""

    _chunk_length = CHUNK
    _rounding = Rounding
    _device: torch.device
    _pool: Pool
    constant: Callable[[Hashable, Callable[[], np.ndarray]], torch.Tensor]

    def scramble(self, values: torch.Tensor) -> torch.Tensor:
        return self._scrambled(values.clone())

    def pack(
        self,
        values: torch.Tensor,
        exponent: torch.Tensor,
        levels: int,
        bits: int,
        word: int,
        noise: torch.Tensor | None = None,
        left_exponent: torch.Tensor | None = None,
        runs: tuple[int, ...] = (),
    ) -> Packing[torch.Tensor]:
        dtype, lanes = torch.int32 if word == 32 else torch.int64, word // bits
        zero = torch.zeros((), dtype=torch.float32, device=self._device)
        if not len(values):
            empty = torch.zeros(0, dtype=dtype, device=self._device)
            return Packing(empty, zero.int(), zero, None if left_exponent is None else values, zero)
        words = self._empty(-(-len(values) // lanes), dtype)
        rounded = self._rounding(self, Runs(runs, len(values)), exponent, levels, noise, left_exponent)
        if bits in BYTES:
            signs, lanes_out, step = sign_bits(bits, word), words.view(BYTES[bits]), self._chunk(lanes)
            lanes_out[len(values) :].zero_()
            parts = zip(
                torch.split(values, step),
                torch.split(lanes_out, step),
                torch.split(words, step // lanes),
                strict=True,
            )
            for i, (part, out, packed) in enumerate(parts):
                out[: len(part)].copy_(rounded(part, i * step))
                packed.bitwise_xor_(signs).sub_(signs)
        else:
            numbers = self._empty(self._chunk(), dtype)
            for a, b in self._chunks(len(words)):
                for lane in reversed(range(lanes)):
                    start, stop = lane * len(words) + a, min(lane * len(words) + b, len(values))
                    if lane == lanes - 1:
                        words[a:b].zero_()
                    elif bits < word:
                        words[a:b].bitwise_left_shift_(bits)
                    if start < stop:
                        whole = rounded(values[start:stop], start)
                        words[a : a + stop - start].add_(numbers[: stop - start].copy_(whole))
        return Packing(
            words, rounded.clipped(), rounded.rms(), None if left_exponent is None else values, rounded.largest()
        )

    def power_of_two(self, exponent: torch.Tensor) -> torch.Tensor:
        return ((exponent.clamp(min=-127) + 127) << 23).view(torch.float32)

    def _empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self._pool.empty(count, dtype, self._device)

    def _scratch(self, count: int) -> torch.Tensor:
        """Room for a chunk of ``count`` elements."""
        return self._empty(min(self._chunk(), count), torch.float32)

    def _chunk(self, multiple: int = 1) -> int:
        """Length of a chunk: the first multiple of ``multiple`` that is not less than ``_chunk_length``."""
        return -(-self._chunk_length // multiple) * multiple

    def _chunks(self, count: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of each chunk of ``count`` elements."""
        return ((start, min(start + self._chunk(), count)) for start in range(0, count, self._chunk()))

    def _numbers(self, values: torch.Tensor) -> Sequence[Any]:
        """The elements of a vector, as factors."""
        return values.tolist()

    def _deduct(self, values: torch.Tensor, numbers: torch.Tensor, factor: Any) -> None:
        """``values -= numbers * factor`` in place."""
        values.sub_(numbers, alpha=factor)

    def _noise(self, values: torch.Tensor, start: int, key: torch.Tensor) -> torch.Tensor:
        """Values in [0, 1) from a hash of key, place and the values' own bits."""
        places = torch.arange(start, start + len(values), dtype=torch.int32, device=self._device)
        drawn = self._scrambled(places.mul_(WEYL).add_(key).bitwise_xor_(values.contiguous().view(torch.int32)))
        return drawn.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF) * 2.0**-24

    def _scrambled(self, values: torch.Tensor) -> torch.Tensor:
        """``scramble`` in place."""
        for shift, factor in SCRAMBLE:
            values.bitwise_xor_((values >> shift).bitwise_and_((1 << (32 - shift)) - 1))
            if factor != 1:
                values.mul_(factor - 2**32)
        return values

    def _by_runs(
        self, piece: Packed[torch.Tensor], scale: float = 1.0, out: torch.Tensor | None = None
    ) -> Iterator[tuple[int, int, torch.Tensor, Any]]:
        """As ``_unpacked``, in parts of one run, each with its step size times ``scale``: a number, on a device 0-d."""
        sizes, runs = self.power_of_two(piece.exponent), Runs(piece.runs, piece.length)
        steps = self._numbers(sizes if scale == 1 else sizes * scale)
        for start, stop, numbers in self._unpacked(piece, out):
            for a, b, run in runs.within(start, stop):
                yield a, b, numbers[a - start : b - start], steps[run]

    def _unpacked(
        self, piece: Packed[torch.Tensor], out: torch.Tensor | None = None
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(start, stop, integers as floats) by chunks: in ``out``, or else valid until the next chunk."""
        word = 8 * piece.words.element_size()
        scratch = self._scratch(piece.length)

        def room(a: int, b: int) -> torch.Tensor:
            return scratch[: b - a] if out is None else out[a:b]

        bits, lanes, length = piece.bits, word // piece.bits, piece.length
        if bits in BYTES:
            signs, step = sign_bits(bits, word), self._chunk(lanes)
            spare = self._empty(step // lanes, piece.words.dtype)
            for i, words in enumerate(torch.split(piece.words, step // lanes)):
                a, b = i * step, min((i + 1) * step, length)
                numbers = torch.add(words, signs, out=spare[: len(words)]).bitwise_xor_(signs).view(BYTES[bits])
                yield a, b, room(a, b).copy_(numbers[: b - a])
            return
        for a, b in self._chunks(len(piece.words)):
            rest = piece.words[a:b]
            for lane in range(lanes):
                start, stop = lane * len(piece.words) + a, min(lane * len(piece.words) + b, length)
                lowest = rest << (word - bits) >> (word - bits)  # the lane's bits, with its sign
                if start < stop:
                    yield start, stop, room(start, stop).copy_(lowest[: stop - start])
                if lane < lanes - 1:
                    rest = (rest - lowest) >> bits
