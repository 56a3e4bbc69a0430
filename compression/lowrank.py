"""``lowrank:r``: rank-r projections of every matrix, one side a step, alternating.

After PowerSGD (Vogels et al., arXiv 1905.13727), with one all-reduce a step as in ACP-SGD (Zhang et al., arXiv
2306.08881): a gradient matrix G (n x m) is projected on the orthonormal basis that the *previous* all-reduce produced.
In side 0 the basis is Q (m x r): ``P = G Q`` is sent, ``P Q^T`` is decoded. The orthonormalised sum of P is the basis
of side 1: ``S = G^T P`` is sent, ``P S^T`` is decoded. Both are linear in G and in the payload. Two steps make one
power iteration.

Sent: r n floats in side 0, r m in side 1. Work: 2 n m r flops to encode, as many to decode, and a QR of one thin
matrix. A tensor of two or more dimensions is viewed as the most nearly square matrix that keeps its memory order.
Tensors for which 2 r > min(n, m) travel dense in the same payload. Matrices of equal shape stand next to each other
in the payload, so that their factors are orthonormalised in one batch, each scaled by itself.

Different from the papers: orthonormalisation by Householder QR with fixed signs (Gram-Schmidt lost orthogonality
at scale), after dividing the matrix by its own largest magnitude, so that zero gradients are safe and tiny ones are
not swamped by an absolute epsilon. Only the basis is orthonormal, never the payload, which keeps ``decode`` linear.

A rank whose factors are far beyond the sums of the last steps overflows. It scales its factors down to that limit, or
they would swamp the other ranks' bases and the rest of the gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from hvdplus.compression.contract import FAR, Compressor, Context, Layout, Projection, Spec, beyond, follow, largest_of
from hvdplus.compression.hashing import uniform
from hvdplus.compression.ops import Array, Ops, Piece, Product

LARGEST_RANK = 1024
HEADROOM = 2.0**6
"""Products are computed this much smaller, so that finite gradients (1e38 in 40,000 columns) have finite products."""
SMALLEST_NORMAL = 2.0**-126
"""Smallest normal float32: added to a divisor, it changes no bit of a divisor above 1e-30, and prevents 0/0."""


class Group(NamedTuple):
    """Matrices of equal shape in a bucket."""

    rows: int
    """n"""
    columns: int
    """m"""
    tensors: tuple[int, ...]
    """Positions in ``spec.shapes``."""


@dataclass(frozen=True)
class LowRank(Projection):
    """One-round low-rank compression with bases that earlier steps have learned."""

    rank: int = 4
    """r: columns of the basis; smaller compresses more. 1 to 8 is usual."""

    learns = "bases: the orthonormalised previous sums"
    paper = "1905.13727, 2306.08881"
    sides = 2
    uses_products = True
    reads_by_tensor = True
    memory_passes = 5.0

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= LARGEST_RANK:
            kind = self.name.partition(":")[0]
            raise ValueError(f"{kind} needs a rank from 1 to {LARGEST_RANK}, e.g. {kind}:4. Received: {self.rank}")

    @property
    def name(self) -> str:
        """``lowrank:r``."""
        return f"lowrank:{self.rank}"

    def init(self, ops: Ops[Array], spec: Spec) -> Context[Array]:
        """Random bases from hash(seed, position): for every group Q (b, m, r) and P (b, n, r)."""
        state = []
        for group in self._groups(spec):
            for side, length in enumerate((group.columns, group.rows)):
                # In NumPy on every framework: all start from the same bits.
                bases = [
                    _orthonormal_numpy(_random((spec.seed, spec.position, tensor, side), length, self.rank))
                    for tensor in group.tensors
                ]
                state.append(ops.from_numpy(np.stack(bases)))
        if state:  # the largest magnitude of factors in the last steps
            state.append(ops.from_numpy(np.zeros(1, np.float32)))
        return Context(spec, 0, tuple(state))

    def encode(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None = None) -> Array:
        """``G Q`` (side 0) or ``G^T P`` (side 1) of every matrix, then dense tensors as they are, in the last pass."""
        starts, parts = _starts(ctx.spec), []
        for number, group in enumerate(self._groups(ctx.spec)):
            bases = ctx.state[2 * number + ctx.side] * (1 / HEADROOM)
            for place, tensor in enumerate(group.tensors):
                shape = group.rows, group.columns
                sent = ops.project(grad, starts[tensor], shape, bases[place], transpose=ctx.side == 1)
                parts.append(ops.reshape(sent, (self.rank * (group.columns if ctx.side else group.rows),)))
        if parts:
            parts = [_limited(ops, ctx.state[-1], ops.concat(parts))]
        if not self._delivers(ctx.side):
            return parts[0] if parts else grad[:0]
        parts += [grad[starts[tensor] : starts[tensor + 1]] for tensor in self._dense(ctx.spec)]
        return ops.concat([*parts, grad[ctx.spec.body :]])

    def pieces(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Sequence[Piece[Array]]:
        """``P Q^T`` of every matrix."""
        found: dict[int, Piece[Array]] = {}
        factors = self._factors(ops, ctx, total)
        for number, (group, factor) in enumerate(zip(self._groups(ctx.spec), factors, strict=True)):
            for place, tensor in enumerate(group.tensors):
                basis = ctx.state[2 * number + ctx.side][place]
                found[tensor] = Product(basis, factor[place]) if ctx.side else Product(factor[place], basis)
        start = self.layout(ctx.spec, ctx.side).values
        for tensor in self._dense(ctx.spec):
            found[tensor] = total[start : start + ctx.spec.sizes[tensor]]
            start += ctx.spec.sizes[tensor]
        return [*(found[tensor] for tensor in range(len(ctx.spec.shapes))), total[start:]]

    def advance(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Context[Array]:
        """The orthonormalised sum becomes the other side's basis, and that side is next."""
        state = list(ctx.state)
        for number, factor in enumerate(self._factors(ops, ctx, total)):
            state[2 * number + 1 - ctx.side] = _orthonormal(ops, factor)
        if state and self._delivers(ctx.side):  # else no gradient would be far beyond a scale that its own step has set
            values = total[: self.layout(ctx.spec, ctx.side).values]
            state[-1] = follow(ops, state[-1], values)
            if self.passes == 1:
                # The first bases are random: they show 1 / sqrt(length) of what bases show that have learned, or more.
                known = ops.floats(ctx.state[-1] > 0)
                longest = max(max(group.rows, group.columns) for group in self._groups(ctx.spec))
                state[-1] = state[-1] * (known + (1.0 - known) * math.sqrt(longest))
        return Context(ctx.spec, 1 - ctx.side, tuple(state))

    def can_reuse(self, other: Compressor) -> bool:
        """Any ``lowrank`` or ``powersgd``: bases with more or fewer columns are a start."""
        return isinstance(other, LowRank)

    def reuse_context(self, ops: Ops[Array], ctx: Context[Array], old: Context[Array]) -> Context[Array]:
        """The old bases' first columns; if those are too few, also new random columns orthogonal to them."""
        spec, state = ctx.spec, list(ctx.state)
        if state and old.state:
            state[-1] = old.state[-1]
        if not old.state:  # all tensors were too small for bases of the old r
            return ctx._replace(side=old.side)
        rank = int(old.state[0].shape[-1])
        before = LowRank(rank)._groups(spec)
        for number, group in enumerate(self._groups(spec)):
            if group in before:
                kept = ops.from_numpy(np.eye(rank, self.rank, dtype=np.float32))
                for side in range(2):
                    columns = ops.matmul(old.state[2 * before.index(group) + side], kept)
                    fresh = np.arange(self.rank) >= rank
                    state[2 * number + side] = ops.orthonormal(
                        columns + state[2 * number + side] * ops.from_numpy(fresh.astype(np.float32))
                    )
        return ctx._replace(side=old.side, state=tuple(state))

    def overflows(self, ops: Ops[Array], ctx: Context[Array], grad: Array, payload: Array) -> Array:
        """Whether factors were scaled down."""
        if not ctx.state:
            return super().overflows(ops, ctx, grad, payload)
        # Rounding may leave scaled factors slightly below the limit.
        return beyond(ops, ctx.state[-1] * 0.99, payload[: self.layout(ctx.spec, ctx.side).values])

    def layout(self, spec: Spec, side: int) -> Layout:
        """Factors in front, dense tensors behind."""
        values = sum(
            self.rank * (group.columns if side else group.rows) * len(group.tensors) for group in self._groups(spec)
        )
        precise = sum(spec.sizes[tensor] for tensor in self._dense(spec)) + spec.tail
        return Layout(values, precise if self._delivers(side) else 0)

    def _delivers(self, side: int) -> bool:
        """Whether the side's sum reaches the gradient, and does not only teach the next pass."""
        return side >= self.passes - 1

    def _groups(self, spec: Spec) -> Sequence[Group]:
        return _split(spec.shapes, self.rank)[0]

    def _dense(self, spec: Spec) -> Sequence[int]:
        return _split(spec.shapes, self.rank)[1]

    def _factors(self, ops: Ops[Array], ctx: Context[Array], payload: Array) -> Sequence[Array]:
        """The factors of every group, (b, n, r) or (b, m, r)."""
        factors, start = [], 0
        for group in self._groups(ctx.spec):
            shape = (len(group.tensors), group.columns if ctx.side else group.rows, self.rank)
            factors.append(ops.reshape(payload[start : start + math.prod(shape)], shape))
            start += math.prod(shape)
        return factors


@functools.lru_cache(maxsize=1024)  # asked several times a step
def _split(shapes: tuple[tuple[int, ...], ...], rank: int) -> tuple[tuple[Group, ...], tuple[int, ...]]:
    """Tensors to project, grouped by the shape of their matrix, and tensors that travel dense."""
    found: dict[tuple[int, int], list[int]] = {}
    dense = []
    for tensor, shape in enumerate(shapes):
        if 2 * rank <= min(most_square(shape)):
            found.setdefault(most_square(shape), []).append(tensor)
        else:
            dense.append(tensor)
    return tuple(Group(rows, columns, tuple(tensors)) for (rows, columns), tensors in found.items()), tuple(dense)


def most_square(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the view of ``shape`` with the least rows + columns; (1, size) for a vector.

    Torch keeps a convolution as (out, in, h, w) and Keras as (h, w, in, out): the best cut differs, the rule does not.
    """
    if len(shape) < 2 or 0 in shape:
        return 1, math.prod(shape)
    cuts = [(math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in range(1, len(shape))]
    return min(cuts, key=sum)


@functools.lru_cache(maxsize=1024)
def _starts(spec: Spec) -> tuple[int, ...]:
    return tuple(accumulate(spec.sizes, initial=0))


def _limited(ops: Ops[Array], scale: Array, values: Array) -> Array:
    """Products times ``HEADROOM``, scaled down to ``FAR * scale`` if the largest would exceed it; values that are not
    finite stay so."""
    largest, limit = largest_of(ops, values), scale * (FAR / HEADROOM)
    far = ops.floats((largest > limit) & (scale > 0))
    near = 1.0 - far
    return values * (near * HEADROOM + far * (limit / (far * largest + near)) * HEADROOM)


def _orthonormal(ops: Ops[Array], factor: Array) -> Array:
    # A division, because the reciprocal of a denormal is infinite and that of a huge number is flushed to zero.
    return ops.orthonormal(factor / (ops.largest(factor) + SMALLEST_NORMAL))


def _random(stream: tuple[int, ...], length: int, rank: int) -> np.ndarray:
    return 2.0 * uniform(stream, length * rank).reshape(length, rank) - 1.0


def _orthonormal_numpy(columns: np.ndarray) -> np.ndarray:
    q, r = np.linalg.qr(columns)
    return np.ascontiguousarray(q * np.where(np.diag(r) < 0, -1.0, 1.0), dtype=np.float32)
