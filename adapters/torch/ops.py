"""``Ops`` in PyTorch: on the CPU, and on devices that compute while the host goes on.

An operation that makes several passes over a bucket works in chunks that stay in the cache, so that memory is read and
written once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np
import torch

from hvdplus.adapters.torch import private
from hvdplus.adapters.torch.joint import Joint
from hvdplus.adapters.torch.memory import Pool
from hvdplus.adapters.torch.packing import CHUNK, SAFE, DeviceRounding, PackingOps
from hvdplus.compression.hashing import uniform
from hvdplus.compression.ops import HALF_LIMIT, Halves, Packed, Piece, Product, Rows

FAINT = 1e-15
"""A norm between this and its reciprocal has squares that stayed within float32."""


HAIR = 1e-6
MKL: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
BLOCK_ROWS, BLOCK_RANKS, BLOCK_SIZE = {0: 16, 1: 12}, range(2, 17), CHUNK // 4
"""A product is computed in so many rows at a time on the CPU (0: it is written, 1: added to a matrix), if it has so
many columns to multiply, and more elements than this for each. MKL takes up to twice as long for the whole of it, and
less for others (``benchmarks/NOTES.md``)."""


class TorchOps(PackingOps):
    """See ``hvdplus.compression.ops.Ops`` for what each method promises."""

    _on_host = True

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._pool = Pool()
        self._constants: dict[Hashable, torch.Tensor] = {}

    def from_numpy(self, values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, device=self._device)

    def constant(self, key: Hashable, make: Callable[[], np.ndarray]) -> torch.Tensor:
        if key not in self._constants:
            self._constants[key] = self.from_numpy(make())
        return self._constants[key]

    def to_numpy(self, values: torch.Tensor) -> np.ndarray:
        return np.array(values.detach().cpu().numpy())

    def reshape(self, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return values.reshape(shape)

    def concat(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = [part for part in parts if part.numel()] or list(parts[:1])
        if len(parts) == 1:
            return parts[0]
        if parts and all(_adjoin(*pair) for pair in pairwise(parts)):
            return parts[0].as_strided((sum(part.numel() for part in parts),), (1,))
        if not parts:
            return torch.zeros(0, dtype=torch.float32, device=self._device)
        out = self._empty(sum(part.numel() for part in parts), parts[0].dtype)
        return torch.cat(parts, out=out)

    def assemble(self, pieces: Sequence[Piece[torch.Tensor]], scale: float = 1.0) -> torch.Tensor:
        if scale == 1 and len(pieces) == 1 and isinstance(pieces[0], torch.Tensor):
            return pieces[0]
        types = [piece.dtype for piece in pieces if isinstance(piece, torch.Tensor)]
        out = self._empty(sum(map(_length, pieces)), reduce(torch.promote_types, types, torch.float32))
        with private.full_precision():
            self._write(pieces, scale, _split(out, pieces))
        return out

    def assemble_into(self, pieces: Sequence[Piece[torch.Tensor]], scale: float, parts: Sequence[torch.Tensor]) -> bool:
        lengths = [part.numel() for part in parts]
        ends = list(accumulate(lengths))
        pieces_end = list(accumulate(map(_length, pieces)))
        if not set(pieces_end) <= {0, *ends}:  # a piece ends within a tensor
            pieces, pieces_end = [self.assemble(pieces, scale)], pieces_end[-1:]
            scale = 1.0
        whole: list[Piece[torch.Tensor]] = []
        places: list[torch.Tensor] = []
        first = 0
        for piece, end in zip(pieces, pieces_end, strict=True):
            last = bisect_right(ends, end)
            own, sizes, first = parts[first:last], lengths[first:last], last
            if len(own) == 1:
                whole.append(piece)
                places.append(own[0])
            elif own and isinstance(piece, Halves):  # several tensors in one piece
                whole += [Halves(values, piece.factor) for values in torch.split(piece.values, sizes)]
                places += own
            elif own:
                private.copy_each(own, torch.split(self.assemble([piece], scale), sizes))
        with private.full_precision():
            self._write(whole, scale, places)
        return True

    def _write(self, pieces: Sequence[Piece[torch.Tensor]], scale: float, parts: Sequence[torch.Tensor]) -> None:
        into, copied = list[torch.Tensor](), list[torch.Tensor]()
        for part, piece in zip(parts, pieces, strict=True):
            if isinstance(piece, Product):
                matrix = part.view(piece.left.shape[0], piece.right.shape[0])
                self._add_product(matrix, piece, alpha=scale, beta=0)
            elif isinstance(piece, Rows):
                part.zero_()
                values = piece.values if scale == 1 else piece.values * scale
                part.view(piece.height, -1).index_copy_(0, piece.rows.long(), values)
            elif isinstance(piece, Halves):
                factor = piece.factor * scale
                if factor == 1:
                    into.append(part)
                    copied.append(piece.values)
                else:
                    for a, b in self._chunks(len(part)):
                        part[a:b].copy_(piece.values[a:b]).mul_(factor)
            elif isinstance(piece, Packed):
                for _, _, numbers, step in self._by_runs(piece, scale, part):
                    numbers.mul_(step)
            else:
                torch.mul(piece, scale, out=part)
        private.copy_each(into, copied)

    def subtract(self, values: torch.Tensor | Joint, pieces: Sequence[Piece[torch.Tensor]]) -> torch.Tensor:
        values = values[:]
        if any(_shares(part, values) for piece in pieces for part in _tensors(piece)):
            return values - self.assemble(pieces)
        with private.full_precision():
            self._deduct_pieces(values, pieces)
        return values

    def _deduct_pieces(self, values: torch.Tensor, pieces: Sequence[Piece[torch.Tensor]]) -> None:
        for part, piece in zip(_split(values, pieces), pieces, strict=True):
            if isinstance(piece, Product):
                matrix = part.view(piece.left.shape[0], piece.right.shape[0])
                self._add_product(matrix, piece, alpha=-1, beta=1)
            elif isinstance(piece, Rows):
                part.view(piece.height, -1).index_add_(0, piece.rows.long(), piece.values, alpha=-1)
            elif isinstance(piece, Halves):
                scratch = self._scratch(len(part))
                for a, b in self._chunks(len(part)):
                    part[a:b].sub_(scratch[: b - a].copy_(piece.values[a:b]), alpha=piece.factor)
            elif isinstance(piece, Packed):
                for a, b, numbers, step in self._by_runs(piece):
                    self._deduct(part[a:b], numbers, step)
            else:
                part.sub_(piece)

    def _add_product(self, matrix: torch.Tensor, product: Product[torch.Tensor], *, alpha: float, beta: int) -> None:
        """``beta`` times the matrix, plus ``alpha`` times the product, in place."""
        left, right = product.left, product.right.t()
        large = len(right) in BLOCK_RANKS and matrix.numel() > BLOCK_SIZE * len(right)
        rows = BLOCK_ROWS[beta]
        blocks = len(matrix) // rows if large and self._on_host and MKL else 0
        done = blocks * rows
        if blocks:
            those = matrix[:done].view(blocks, rows, -1)
            lefts = left[:done].view(blocks, rows, -1)
            torch.baddbmm(those, lefts, right.expand(blocks, *right.shape), alpha=alpha, beta=beta, out=those)
        if done < len(matrix):
            torch.addmm(matrix[done:], left[done:], right, alpha=alpha, beta=beta, out=matrix[done:])

    def project(
        self,
        bucket: torch.Tensor | Joint,
        start: int,
        shape: tuple[int, int],
        basis: torch.Tensor,
        transpose: bool = False,
    ) -> torch.Tensor:
        product = bucket.project(start, shape, basis, transpose) if isinstance(bucket, Joint) else None
        if product is None:
            product = self.matmul(bucket[start : start + prod(shape)].view(shape), basis, transpose)
        return product

    def matmul(self, a: torch.Tensor, b: torch.Tensor, transpose_a: bool = False) -> torch.Tensor:
        with private.without_autocast(self._device.type), private.full_precision():
            a = a.mT if transpose_a else a
            if self._on_host:  # this way round is faster, by half where a basis has eight columns
                return torch.matmul(b.mT, a.mT).mT
            return torch.matmul(a, b)

    def orthonormal(self, columns: torch.Tensor) -> torch.Tensor:
        with private.full_precision():
            q, r = torch.linalg.qr(columns)
        basis: torch.Tensor = q * (1.0 - 2.0 * (r.diagonal(dim1=-2, dim2=-1) < 0).to(q.dtype)).unsqueeze(-2)
        return basis

    def largest(self, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) == 1:  # no copy of it
            low, high = torch.aminmax(batch)
            return torch.maximum(high, -low).reshape(1, 1, 1)
        return batch.abs().amax(dim=(1, 2), keepdim=True)

    def half(self, parts: Sequence[torch.Tensor], factor: float, saturate: bool = False) -> torch.Tensor:
        lengths = [values.numel() for values in parts]
        out = self._empty(sum(lengths), torch.float16)
        places = torch.split(out, lengths)
        if saturate:
            self._copy_stopped(places, parts)
        else:
            private.copy_each(places, parts)
        return out if factor == 1 else out.mul_(factor)

    def _copy_stopped(self, places: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        scratch = self._scratch(max(map(len, parts), default=0))
        for values, halves in zip(parts, places, strict=True):
            for a, b in self._chunks(len(values)):
                stopped = scratch[: b - a].copy_(values[a:b]).clamp_(-HALF_LIMIT, HALF_LIMIT)
                halves[a:b].copy_(stopped.add_(values[a:b], alpha=0.0))

    def rms(self, values: torch.Tensor) -> torch.Tensor:
        if not values.numel():
            return values.new_zeros(())
        square = torch.dot(values, values)
        if not SAFE < float(square) < 1 / SAFE:  # squares may have left float32
            square = torch.linalg.vector_norm(values, dtype=torch.float64).square()
        return (square / values.numel()).sqrt().float()

    def row_rms(self, matrix: torch.Tensor, other: torch.Tensor | None = None, factor: float = 1.0) -> torch.Tensor:
        if other is not None and self._device.type == "cpu" and matrix.numel() > CHUNK:
            rows = max(1, CHUNK // matrix.shape[1])
            pairs = zip(torch.split(matrix, rows), torch.split(other, rows), strict=True)
            scratch = matrix.new_empty(rows, matrix.shape[1])
            return torch.cat([self._row_rms(torch.add(m, o, alpha=factor, out=scratch[: len(m)])) for m, o in pairs])
        return self._row_rms(matrix if other is None else torch.add(matrix, other, alpha=factor))

    def top(self, values: torch.Tensor, count: int) -> torch.Tensor:
        if not count:
            return torch.zeros(0, dtype=torch.int32, device=self._device)
        values = torch.nan_to_num(values, nan=torch.inf, posinf=torch.inf)  # NaN compares with nothing
        least = torch.topk(values, count, sorted=False).values.amin()
        above, equal = values > least, values == least
        # Of values equal to the threshold, the first ones. Sorting all of them would take several times as long.
        chosen = above | (equal & (equal.cumsum(0) <= count - above.sum()))
        return self._places(chosen, count)

    def take_rows(self, matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        out = self._empty(len(rows) * matrix.shape[1], matrix.dtype).view(len(rows), matrix.shape[1])
        return torch.index_select(matrix, 0, rows, out=out)

    def put_values(self, values: torch.Tensor, places: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return values.index_copy(0, places.long(), new)

    def log2(self, values: torch.Tensor) -> torch.Tensor:
        return torch.log2(values)

    def integers(self, values: torch.Tensor, bits: int = 32) -> torch.Tensor:
        values = values.round() if values.is_floating_point() else values
        return values.to(torch.int32 if bits == 32 else torch.int64)

    def floats(self, values: torch.Tensor) -> torch.Tensor:
        return values.float()

    def all_finite(self, values: torch.Tensor) -> torch.Tensor:
        if not values.is_floating_point():
            return torch.ones((), dtype=torch.bool, device=values.device)
        # One pass and no temporary of the gradient's size. A sum is finite unless an element is not or it overflows;
        # only then is it worth looking closely. In half precision squares are slow, and comparing takes twice as long.
        if values.dtype == torch.float16 and values.numel():
            if bool(torch.isfinite(values.sum())):
                return torch.ones((), dtype=torch.bool, device=values.device)
            least, largest = torch.aminmax(values)  # both are NaN if one value is
            return torch.isfinite(largest.float() - least.float())
        if values.dim() == 1 and bool(torch.isfinite(torch.dot(values, values))):
            return torch.ones((), dtype=torch.bool, device=values.device)
        return torch.isfinite(values).all()

    def checksum(self, values: torch.Tensor) -> torch.Tensor:
        return values.view(torch.int32).sum(dtype=torch.int64)

    def _places(self, chosen: torch.Tensor, count: int) -> torch.Tensor:
        """Indices (int32, ascending) of the ``count`` true elements of a vector."""
        return chosen.nonzero().reshape(-1).to(torch.int32)

    def _row_rms(self, matrix: torch.Tensor) -> torch.Tensor:
        return _norms_of_rows(matrix).mul_(matrix.shape[1] ** -0.5).float()


class DeviceOps(TorchOps):
    """``Ops`` for CUDA, which computes while the host goes on. No method reads a value on the host: that would wait for
    all queued work. Double precision costs little there, and small chunks bring nothing."""

    _chunk_length = CHUNK << 8
    _rounding = DeviceRounding
    _on_host = False

    def from_numpy(self, values: np.ndarray) -> torch.Tensor:
        here = torch.tensor(values, device="cpu")
        if self._device.type != "cuda":
            return here.to(self._device)
        return here.pin_memory().to(self._device, non_blocking=True)  # a copy from other memory would wait

    def rms(self, values: torch.Tensor) -> torch.Tensor:
        square: torch.Tensor = torch.linalg.vector_norm(values, dtype=torch.float64).square()
        return (square / max(values.numel(), 1)).sqrt().float()

    def all_finite(self, values: torch.Tensor) -> torch.Tensor:
        if not values.is_floating_point() or not values.numel():
            return torch.ones((), dtype=torch.bool, device=self._device)
        least, largest = torch.aminmax(values)  # one pass; both are NaN if one value is
        return (least * 0.0).add_(largest, alpha=0.0) == 0.0  # no multiple of 0 is 0 if it is not finite

    def orthonormal(self, columns: torch.Tensor) -> torch.Tensor:
        # CUDA's factorisations of small matrices leave columns askew that depend on the first ones: what is left of
        # them after a few reflections has squares below the type's range. A hair of noise keeps them in range.
        hair = self.constant(("hair", columns.shape[-2:]), lambda: _hair(*columns.shape[-2:]))
        with private.full_precision():
            q, r = torch.linalg.qr(columns + hair)
        signs = torch.copysign(self._one(), r.diagonal(dim1=-2, dim2=-1)).unsqueeze(-2)
        return torch.mul(q, signs, out=q.new_empty(q.shape))  # row by row; q is column by column

    def _one(self) -> torch.Tensor:
        return self.constant("one", lambda: np.ones((), np.float32))

    def largest(self, batch: torch.Tensor) -> torch.Tensor:
        largest: torch.Tensor = torch.linalg.vector_norm(batch, torch.inf, dim=(1, 2), keepdim=True)
        return largest

    def _numbers(self, values: torch.Tensor) -> Sequence[Any]:
        return values.unbind()

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


def _norms_of_rows(matrix: torch.Tensor) -> torch.Tensor:
    """On the CPU; in float64 if there are rows whose squares may have left float32."""
    norms: torch.Tensor = torch.linalg.vector_norm(matrix, dim=1)
    if norms.numel() and not (norms.amin() > FAINT and norms.amax() < 1 / FAINT):
        odd, norms = ~((norms > FAINT) & (norms < 1 / FAINT)), norms.double()
        norms[odd] = torch.linalg.vector_norm(matrix[odd], dim=1, dtype=torch.float64)
    return norms


def _hair(rows: int, columns: int) -> np.ndarray:
    """Noise beside columns whose largest elements are about 1: less than what rounding in a product does to them."""
    noise = uniform((rows, columns), rows * columns).reshape(rows, columns) - 0.5
    return (HAIR * noise).astype(np.float32)


def _tensors(piece: Piece[torch.Tensor]) -> list[torch.Tensor]:
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


def _length(piece: Piece[torch.Tensor]) -> int:
    if isinstance(piece, Product):
        return int(piece.left.shape[0] * piece.right.shape[0])
    if isinstance(piece, Rows):
        return piece.height * int(piece.values.shape[1])
    return piece.length if isinstance(piece, Packed) else (piece.values if isinstance(piece, Halves) else piece).numel()


def _split(values: torch.Tensor, pieces: Sequence[Piece[torch.Tensor]]) -> Sequence[torch.Tensor]:
    return torch.split(values, [_length(piece) for piece in pieces])
