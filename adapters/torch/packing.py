"""Integers of a few bits in lanes of words, in PyTorch: rounding, packing, unpacking, and noise for stochastic
rounding.

Everything works through chunks that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hvdplus.adapters.torch.memory import Pool
from hvdplus.compression.hashing import SCRAMBLE, WEYL
from hvdplus.compression.ops import Packed, Packing, sign_bits

CHUNK = 1 << 17
"""Elements that are worked on at a time on the CPU; 512 kB fit into a core's second-level cache."""
SAFE = 1e-30
"""A sum of squares between this and its reciprocal has stayed within float32."""
BYTES = {8: torch.int8, 16: torch.int16}
"""Bits of a lane -> its type, where it is a type of its own."""


class Rounding:
    """Rounds a bucket chunk by chunk, and measures it."""

    def __init__(
        self,
        ops: PackingOps,
        count: int,
        exponent: torch.Tensor,
        levels: int,
        noise: torch.Tensor | None,
        left_exponent: torch.Tensor | None,
    ) -> None:
        self._ops, self._count, self._levels, self._noise = ops, count, levels, noise
        self._leaves = left_exponent is not None
        self._scratch = ops._scratch(count)
        self._prepare(exponent, exponent if left_exponent is None else left_exponent)

    def _prepare(self, exponent: torch.Tensor, left_exponent: torch.Tensor) -> None:
        known, stands = int(exponent), int(left_exponent)
        self._inverse: Any = 2.0**-known if known > -127 else 0.0
        self._level: Any = 2.0**stands if stands > -127 else 0.0
        # A scaled value up to this is never rounded beyond the levels: noise adds nearly 1, and is itself rounded.
        self._within = self._levels if self._noise is None else 0.99 * self._levels
        self._square: Any = 0.0
        self._largest: Any = 0.0
        self._clipped: Any = 0.0

    def __call__(self, part: torch.Tensor, start: int) -> torch.Tensor:
        """The chunk ``part``, which begins at element ``start``, rounded to whole floats; valid until the next call."""
        largest = self._measure(part)
        scaled = torch.mul(part, self._inverse, out=self._scratch[: len(part)])
        if self._noise is not None:
            scaled.add_(self._ops._noise(part, start, self._noise)).floor_()
        else:
            scaled.round_()
        self._clip(scaled, largest)
        if self._leaves:
            self._ops._deduct(part, scaled, self._level)
        return scaled

    def _measure(self, part: torch.Tensor) -> Any:
        """Count the chunk in ``rms`` and ``largest``; returns its largest magnitude."""
        square = torch.dot(part, part).item()
        if not SAFE < square < 1 / SAFE:  # squares may have left float32
            square = torch.linalg.vector_norm(part, dtype=torch.float64).item() ** 2
        self._square += square
        largest = max(part.amax().item(), -part.amin().item())
        self._largest = max(self._largest, largest)
        return largest

    def _clip(self, scaled: torch.Tensor, largest: Any) -> None:
        levels = self._levels
        if not largest * self._inverse <= self._within:  # NaN compares with nothing
            room = self._ops._scratch(len(scaled))[: len(scaled)]
            beyond = torch.abs(scaled, out=room).sub_(levels).clamp_(0, 1)
            self._clipped += beyond.sum().item()  # comparing and counting takes longer
            scaled.clamp_(-float(levels), float(levels))

    def rms(self) -> torch.Tensor:
        return torch.tensor((self._square / self._count) ** 0.5, dtype=torch.float32, device=self._ops._device)

    def largest(self) -> torch.Tensor:
        return torch.tensor(self._largest, dtype=torch.float32, device=self._ops._device)

    def clipped(self) -> torch.Tensor:
        clipped = int(self._clipped) if self._clipped == self._clipped else 0
        return torch.tensor(clipped, dtype=torch.int32, device=self._ops._device)


class DeviceRounding(Rounding):
    """``Rounding`` that reads no value on the host."""

    def _prepare(self, exponent: torch.Tensor, left_exponent: torch.Tensor) -> None:
        step = self._ops.power_of_two(exponent)
        self._inverse = step.reciprocal().nan_to_num_(posinf=0.0)  # exact, and 0 for an unknown step
        self._level = step if left_exponent is exponent else self._ops.power_of_two(left_exponent)
        self._norms: list[torch.Tensor] = []
        self._highest: list[torch.Tensor] = []
        self._beyond: list[torch.Tensor] = []

    def _measure(self, part: torch.Tensor) -> Any:
        self._norms.append(torch.linalg.vector_norm(part, dtype=torch.float64))
        self._highest.append(torch.linalg.vector_norm(part, torch.inf))

    def _clip(self, scaled: torch.Tensor, largest: Any) -> None:
        levels = float(self._levels)
        self._beyond.append((scaled.abs() > levels).sum(dtype=torch.int32))
        scaled.clamp_(-levels, levels)

    def rms(self) -> torch.Tensor:
        norm = self._norms[0] if len(self._norms) == 1 else torch.stack(self._norms).square().sum().sqrt()
        return norm.mul(self._count**-0.5).float()

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
    ) -> Packing[torch.Tensor]:
        dtype, lanes = torch.int32 if word == 32 else torch.int64, word // bits
        zero = torch.zeros((), dtype=torch.float32, device=self._device)
        if not len(values):
            empty = torch.zeros(0, dtype=dtype, device=self._device)
            return Packing(empty, zero.int(), zero, None if left_exponent is None else values, zero)
        words = self._empty(-(-len(values) // lanes), dtype)
        rounded = self._rounding(self, len(values), exponent, levels, noise, left_exponent)
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

    def _number(self, value: torch.Tensor) -> Any:
        """A tensor of one element as a factor."""
        return float(value)

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
