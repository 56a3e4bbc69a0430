"""``Ops`` in PyTorch: on the CPU, and on devices that compute while the host goes on.

Where an operation has several passes over a bucket it works through chunks that stay in the cache, so that memory is
read and written once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hvdplus.adapters.torch import private
from hvdplus.adapters.torch.memory import Pool
from hvdplus.compression.hashing import SCRAMBLE, WEYL
from hvdplus.compression.ops import HALF_LIMIT, Halves, Packed, Packing, Piece, Product, Rows, sign_bits

Array = Any

CHUNK = 1 << 17
"""Elements that are worked on at a time on the CPU; 512 kB fit into a core's second-level cache."""
SAFE = 1e-30
"""Sums of squares above this, and below its reciprocal, have not left float32 on the way."""
FAINT = 1e-15
"""Norms above this, and below its reciprocal, are made of squares that have not left float32."""
BYTES = {8: torch.int8, 16: torch.int16}
"""Lanes that are a type of their own."""


class _Rounding:
    """Rounds a bucket in stretches, and measures it."""

    def __init__(
        self,
        ops: TorchOps,
        count: int,
        exponent: Array,
        levels: int,
        noise: Array | None,
        left_exponent: Array | None,
    ) -> None:
        self._ops, self._count, self._levels, self._noise = ops, count, levels, noise
        self._leaves = left_exponent is not None
        self._scratch = ops._scratch(count)
        self._prepare(exponent, exponent if left_exponent is None else left_exponent)

    def _prepare(self, exponent: Array, left_exponent: Array) -> None:
        known, stands = int(exponent), int(left_exponent)
        self._inverse: Any = 2.0**-known if known > -127 else 0.0
        self._level: Any = 2.0**stands if stands > -127 else 0.0
        # Below, no value is rounded beyond the levels: noise adds nearly 1, and is itself rounded.
        self._within = self._levels if self._noise is None else 0.99 * self._levels
        self._square: Any = 0.0
        self._largest: Any = 0.0
        self._clipped: Any = 0.0

    def __call__(self, part: torch.Tensor, start: int) -> torch.Tensor:
        """Elements from ``start`` on as floats that are whole; the caller uses them before the next call."""
        scaled = torch.mul(part, self._inverse, out=self._scratch[: len(part)])
        largest = self._measure(part)
        if self._noise is not None:
            scaled.add_(self._ops._noise(part, start, self._noise)).floor_()
        else:
            scaled.round_()
        self._clip(scaled, largest)
        if self._leaves:
            self._ops._deduct(part, scaled, self._level)
        return scaled

    def _measure(self, part: torch.Tensor) -> Any:
        """The stretch's largest magnitude."""
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

    def rms(self) -> Array:
        return torch.tensor((self._square / self._count) ** 0.5, dtype=torch.float32, device=self._ops._device)

    def largest(self) -> Array:
        return torch.tensor(self._largest, dtype=torch.float32, device=self._ops._device)

    def clipped(self) -> Array:
        clipped = int(self._clipped) if self._clipped == self._clipped else 0
        return torch.tensor(clipped, dtype=torch.int32, device=self._ops._device)


class _DeviceRounding(_Rounding):
    """The same without a look at any value."""

    def _prepare(self, exponent: Array, left_exponent: Array) -> None:
        ops = self._ops
        self._inverse = torch.where(exponent > -127, ops.power_of_two(-exponent), 0.0)
        self._level = ops.power_of_two(left_exponent)
        self._square = torch.zeros((), dtype=torch.float64, device=ops._device)
        self._largest = torch.zeros((), dtype=torch.float32, device=ops._device)
        self._clipped = torch.zeros((), dtype=torch.int32, device=ops._device)

    def _measure(self, part: torch.Tensor) -> Any:
        self._square = self._square + torch.linalg.vector_norm(part, dtype=torch.float64).square()
        low, high = torch.aminmax(part)
        self._largest = torch.maximum(self._largest, torch.maximum(high, -low))

    def _clip(self, scaled: torch.Tensor, largest: Any) -> None:
        levels = float(self._levels)
        self._clipped = self._clipped + (scaled.abs() > levels).sum(dtype=torch.int32)
        scaled.clamp_(-levels, levels)

    def rms(self) -> Array:
        return (self._square / self._count).sqrt().float()

    def largest(self) -> Array:
        return self._largest

    def clipped(self) -> Array:
        return self._clipped


class TorchOps:
    """See ``hvdplus.compression.ops.Ops`` for what each method promises."""

    _chunk_length = CHUNK
    _rounding = _Rounding

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._pool = Pool()
        self._constants: dict[Hashable, torch.Tensor] = {}

    def from_numpy(self, values: np.ndarray) -> Array:
        return torch.tensor(values, device=self._device)

    def constant(self, key: Hashable, make: Callable[[], np.ndarray]) -> Array:
        if key not in self._constants:
            self._constants[key] = self.from_numpy(make())
        return self._constants[key]

    def to_numpy(self, values: Array) -> np.ndarray:
        return np.array(values.detach().cpu().numpy())

    def reshape(self, values: Array, shape: tuple[int, ...]) -> Array:
        return values.reshape(shape)

    def concat(self, parts: Sequence[Array]) -> Array:
        parts = [part for part in parts if part.numel()] or list(parts[:1])
        if len(parts) == 1:
            return parts[0]
        if parts and all(_adjoin(*pair) for pair in pairwise(parts)):
            return parts[0].as_strided((sum(part.numel() for part in parts),), (1,))
        if not parts:
            return torch.zeros(0, dtype=torch.float32, device=self._device)
        out = self._empty(sum(part.numel() for part in parts), parts[0].dtype)
        return torch.cat(parts, out=out)

    def assemble(self, pieces: Sequence[Piece], scale: float = 1.0) -> Array:
        if scale == 1 and len(pieces) == 1 and isinstance(pieces[0], torch.Tensor):
            return pieces[0]
        types = [piece.dtype for piece in pieces if isinstance(piece, torch.Tensor)]
        out = self._empty(sum(map(_length, pieces)), reduce(torch.promote_types, types, torch.float32))
        for part, piece in zip(_split(out, pieces), pieces, strict=True):
            if isinstance(piece, Product):
                matrix = part.view(len(piece.left), len(piece.right))
                torch.addmm(matrix, piece.left, piece.right.t(), beta=0, alpha=scale, out=matrix)
            elif isinstance(piece, Rows):
                part.zero_()
                values = piece.values if scale == 1 else piece.values * scale
                part.view(piece.height, -1).index_copy_(0, piece.rows.long(), values)
            elif isinstance(piece, Halves):
                factor = piece.factor * scale
                if factor == 1:
                    part.copy_(piece.values)
                    continue
                for a, b in self._chunks(len(part)):
                    part[a:b].copy_(piece.values[a:b]).mul_(factor)
            elif isinstance(piece, Packed):
                step = scale * self._number(self.power_of_two(piece.exponent))
                for _, _, numbers in self._unpacked(piece, part):
                    numbers.mul_(step)
            else:
                torch.mul(piece, scale, out=part)
        return out

    def subtract(self, values: Array, pieces: Sequence[Piece]) -> Array:
        if any(_shares(part, values) for piece in pieces for part in _tensors(piece)):
            return values - self.assemble(pieces)
        for part, piece in zip(_split(values, pieces), pieces, strict=True):
            if isinstance(piece, Product):
                matrix = part.view(len(piece.left), len(piece.right))
                torch.addmm(matrix, piece.left, piece.right.t(), alpha=-1, out=matrix)
            elif isinstance(piece, Rows):
                part.view(piece.height, -1).index_add_(0, piece.rows.long(), piece.values, alpha=-1)
            elif isinstance(piece, Halves):
                scratch = self._scratch(len(part))
                for a, b in self._chunks(len(part)):
                    part[a:b].sub_(scratch[: b - a].copy_(piece.values[a:b]), alpha=piece.factor)
            elif isinstance(piece, Packed):
                step = self._number(self.power_of_two(piece.exponent))
                for a, b, numbers in self._unpacked(piece):
                    self._deduct(part[a:b], numbers, step)
            else:
                part.sub_(piece)
        return values

    def matmul(self, a: Array, b: Array, transpose_a: bool = False) -> Array:
        with torch.autocast(self._device.type, enabled=False):  # a script may take its step inside of one
            if transpose_a:  # this way round both are read along their rows
                return torch.matmul(b.mT, a).mT
            return torch.matmul(a, b)

    def orthonormal(self, columns: Array) -> Array:
        q, r = torch.linalg.qr(columns)
        return q * (1.0 - 2.0 * (r.diagonal(dim1=-2, dim2=-1) < 0).to(q.dtype)).unsqueeze(-2)

    def largest(self, batch: Array) -> Array:
        if len(batch) == 1:  # no copy of it
            low, high = torch.aminmax(batch)
            return torch.maximum(high, -low).reshape(1, 1, 1)
        return batch.abs().amax(dim=(1, 2), keepdim=True)

    def half(self, parts: Sequence[Array], factor: float, saturate: bool = False) -> Array:
        out = self._empty(sum(map(len, parts)), torch.float16)
        scratch = self._scratch(max(map(len, parts), default=0)) if saturate else None
        for values, halves in zip(parts, torch.split(out, [len(values) for values in parts]), strict=True):
            if scratch is None:
                halves.copy_(values)
                continue
            for a, b in self._chunks(len(values)):
                stopped = scratch[: b - a].copy_(values[a:b]).clamp_(-HALF_LIMIT, HALF_LIMIT)
                halves[a:b].copy_(stopped.add_(values[a:b], alpha=0.0))
        return out if factor == 1 else out.mul_(factor)

    def rms(self, values: Array) -> Array:
        if not values.numel():
            return values.new_zeros(())
        square = torch.dot(values, values)
        if not SAFE < float(square) < 1 / SAFE:  # squares may have left float32
            square = torch.linalg.vector_norm(values, dtype=torch.float64).square()
        return (square / values.numel()).sqrt().float()

    def row_rms(self, matrix: Array, other: Array | None = None, factor: float = 1.0) -> Array:
        if other is not None and self._device.type == "cpu" and matrix.numel() > CHUNK:
            rows = max(1, CHUNK // matrix.shape[1])
            pairs = zip(matrix.split(rows), other.split(rows), strict=True)
            scratch = matrix.new_empty(rows, matrix.shape[1])
            return torch.cat([self._row_rms(torch.add(m, o, alpha=factor, out=scratch[: len(m)])) for m, o in pairs])
        return self._row_rms(matrix if other is None else torch.add(matrix, other, alpha=factor))

    def top(self, values: Array, count: int) -> Array:
        if not count:
            return torch.zeros(0, dtype=torch.int32, device=self._device)
        values = torch.nan_to_num(values, nan=torch.inf, posinf=torch.inf)  # NaN compares with nothing
        least = torch.topk(values, count, sorted=False).values.amin()
        above, equal = values > least, values == least
        # Of those at the threshold, the first in line. Sorting all of them would take several times as long.
        chosen = above | (equal & (equal.cumsum(0) <= count - above.sum()))
        return self._places(chosen, count)

    def take_rows(self, matrix: Array, rows: Array) -> Array:
        out = self._empty(len(rows) * matrix.shape[1], matrix.dtype).view(len(rows), matrix.shape[1])
        return torch.index_select(matrix, 0, rows, out=out)

    def put_values(self, values: Array, places: Array, new: Array) -> Array:
        return values.index_copy(0, places.long(), new)

    def log2(self, values: Array) -> Array:
        return torch.log2(values)

    def power_of_two(self, exponent: Array) -> Array:
        return ((exponent.clamp(min=-127) + 127) << 23).view(torch.float32)

    def integers(self, values: Array, bits: int = 32) -> Array:
        values = values.round() if values.is_floating_point() else values
        return values.to(torch.int32 if bits == 32 else torch.int64)

    def scramble(self, values: Array) -> Array:
        return self._scrambled(values.clone())

    def pack(
        self,
        values: Array,
        exponent: Array,
        levels: int,
        bits: int,
        word: int,
        noise: Array | None = None,
        left_exponent: Array | None = None,
    ) -> Packing:
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

    def all_finite(self, values: Array) -> Array:
        if not values.is_floating_point():
            return torch.ones((), dtype=torch.bool, device=values.device)
        # One pass and no temporary of the gradient's size. A sum is finite unless an element is not or it overflows;
        # only then is it worth looking closely. In half precision squares are slow, and comparing takes twice as long.
        if values.dtype == torch.float16 and values.numel():
            if bool(torch.isfinite(values.sum())):
                return torch.ones((), dtype=torch.bool, device=values.device)
            least, largest = torch.aminmax(values)  # of what holds a NaN both are NaN
            return torch.isfinite(largest.float() - least.float())
        if values.dim() == 1 and bool(torch.isfinite(torch.dot(values, values))):
            return torch.ones((), dtype=torch.bool, device=values.device)
        return torch.isfinite(values).all()

    def checksum(self, values: Array) -> Array:
        return values.view(torch.int32).sum(dtype=torch.int64)

    def _empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self._pool.empty(count, dtype, self._device)

    def _scratch(self, count: int) -> torch.Tensor:
        """Room for a chunk of ``count`` elements."""
        return self._empty(min(self._chunk(), count), torch.float32)

    def _chunk(self, multiple: int = 1) -> int:
        """Length of a chunk: a multiple, CHUNK or a little more."""
        return -(-self._chunk_length // multiple) * multiple

    def _chunks(self, count: int) -> Iterator[tuple[int, int]]:
        """Bounds of chunks."""
        return ((start, min(start + self._chunk(), count)) for start in range(0, count, self._chunk()))

    def _number(self, value: torch.Tensor) -> Any:
        """A tensor of one element as a factor."""
        return float(value)

    def _deduct(self, values: torch.Tensor, numbers: torch.Tensor, factor: Any) -> None:
        """``values -= numbers * factor`` in place."""
        values.sub_(numbers, alpha=factor)

    def _places(self, chosen: torch.Tensor, count: int) -> torch.Tensor:
        """Where a vector is true, which is ``count`` times."""
        return chosen.nonzero().reshape(-1).to(torch.int32)

    def _row_rms(self, matrix: torch.Tensor) -> torch.Tensor:
        norms = torch.linalg.vector_norm(matrix, dim=1)
        if norms.numel() and not (norms.amin() > FAINT and norms.amax() < 1 / FAINT):  # squares may have left float32
            norms = torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float64)
        return torch.as_tensor(norms.mul_(matrix.shape[1] ** -0.5).float())

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

    def _unpacked(self, piece: Packed, out: torch.Tensor | None = None) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(from, to, integers as floats), stretch by stretch: in ``out``, or until the next is asked for."""
        word = 8 * piece.words.element_size()
        scratch = self._scratch(piece.length)

        def room(a: int, b: int) -> torch.Tensor:
            return scratch[: b - a] if out is None else out[a:b]

        bits, lanes, length = piece.bits, word // piece.bits, piece.length
        if bits in BYTES:
            signs, step = sign_bits(bits, word), self._chunk(lanes)
            spare = self._empty(step // lanes, piece.words.dtype)
            for i, words in enumerate(piece.words.split(step // lanes)):
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


class DeviceOps(TorchOps):
    """The same for CUDA, which computes while the host goes on: no method looks at a value, as that would wait for all
    that the device has been given to do. It has double precision to spare, and no caches worth small chunks."""

    _chunk_length = CHUNK << 8
    _rounding = _DeviceRounding

    def from_numpy(self, values: np.ndarray) -> Array:
        here = torch.tensor(values)
        if self._device.type != "cuda":
            return here.to(self._device)
        return here.pin_memory().to(self._device, non_blocking=True)  # any other copy would wait

    def rms(self, values: Array) -> Array:
        square = torch.linalg.vector_norm(values, dtype=torch.float64).square()
        return (square / max(values.numel(), 1)).sqrt().float()

    def all_finite(self, values: Array) -> Array:
        if not values.is_floating_point():
            return torch.ones((), dtype=torch.bool, device=self._device)
        return torch.isfinite(values).all()

    def _number(self, value: torch.Tensor) -> Any:
        return value

    def _deduct(self, values: torch.Tensor, numbers: torch.Tensor, factor: Any) -> None:
        values.addcmul_(numbers, factor, value=-1)

    def _places(self, chosen: torch.Tensor, count: int) -> torch.Tensor:
        places = torch.arange(len(chosen), dtype=torch.int32, device=self._device)
        others = torch.where(chosen, places, len(chosen))
        return torch.topk(others, count, largest=False, sorted=True).values

    def _row_rms(self, matrix: torch.Tensor) -> torch.Tensor:
        norms: torch.Tensor = torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float64)
        return norms.mul_(matrix.shape[1] ** -0.5).float()


def make_ops(device: torch.device | str) -> TorchOps:
    """The operations for arrays on ``device``."""
    device = torch.device(device)
    return DeviceOps(device) if device.type == "cuda" else TorchOps(device)


def _tensors(piece: Piece) -> list[torch.Tensor]:
    fields = [piece] if isinstance(piece, torch.Tensor) else piece
    return [part for part in fields if isinstance(part, torch.Tensor)]


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two arrays stand in the same block of memory."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _adjoin(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one vector ends in memory where the other begins."""
    return (
        private.same_storage(one, other)
        and one.is_contiguous()
        and other.is_contiguous()
        and one.data_ptr() + one.nbytes == other.data_ptr()
    )


def _length(piece: Piece) -> int:
    if isinstance(piece, Product):
        return len(piece.left) * len(piece.right)
    if isinstance(piece, Rows):
        return piece.height * int(piece.values.shape[1])
    return piece.length if isinstance(piece, Packed) else len(piece.values if isinstance(piece, Halves) else piece)


def _split(values: torch.Tensor, pieces: Sequence[Piece]) -> Sequence[torch.Tensor]:
    return torch.split(values, [_length(piece) for piece in pieces])
