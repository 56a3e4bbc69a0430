"""``lowrank:r``: rank-r projections of every matrix, one side a step, alternating.

After PowerSGD (Vogels et al., arXiv 1905.13727), made one-round as in ACP-SGD (Zhang et al., arXiv 2306.08881):
a gradient matrix G (n x m) meets the orthonormal basis that the *previous* all-reduce produced. In phase 0 the
basis is Q (m x r), ``P = G Q`` is sent, and ``P Q^T`` is what arrives; the orthonormalised sum of P is the basis
of phase 1, in which ``S = G^T P`` is sent and ``P S^T`` arrives. Both are linear in G and in the payload. So two
steps together make one power iteration, and neither of them needs a second round.

Sent: r n floats in phase 0, r m in phase 1. Work: 2 n m r flops to encode, as many to decode, and a QR of one thin
matrix. A tensor of two or more dimensions is viewed as the most nearly square matrix that keeps its memory order.
Tensors for which 2 r > min(n, m), and so all vectors, travel dense in the same payload.

Different from the papers: orthonormalisation by Householder QR with fixed signs (Gram-Schmidt lost orthogonality
at scale), after dividing the matrix by its own largest magnitude, so that zero gradients are safe and tiny ones are
not swamped by an absolute epsilon. Only the basis is orthonormal, never the payload, which keeps ``decode`` linear.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hvdplus.compression.contract import Context, Spec
from hvdplus.compression.hashing import uniform
from hvdplus.compression.ops import Array, Ops

LARGEST_RANK = 1024
SMALLEST_NORMAL = 2.0**-126
"""Smallest normal float32: added to a divisor it changes no bit of any scale above 1e-30, and saves zeros from 0/0."""


class Piece(NamedTuple):
    """Where one tensor stands in the bucket and in the payload, for one phase."""

    start: int
    stop: int
    payload_start: int
    payload_stop: int
    rows: int
    """n; 0 if the tensor travels dense."""
    columns: int
    """m; 0 if the tensor travels dense."""
    matrix: int
    """Index among the compressed tensors of the bucket."""


@dataclass(frozen=True)
class LowRank:
    """One-round low-rank compression with a warm-started basis."""

    rank: int = 4
    """r: columns of the basis; smaller compresses more. 1 to 8 is usual."""
    phases: int = 2
    keeps_residual: bool = True
    narrow: bool = False
    uses_products: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= LARGEST_RANK:
            raise ValueError(f"lowrank needs a rank from 1 to {LARGEST_RANK}, e.g. lowrank:4. Received: {self.rank}")

    @property
    def name(self) -> str:
        """``lowrank:r``."""
        return f"lowrank:{self.rank}"

    def init(self, ops: Ops, spec: Spec) -> Context:
        """Random bases from hash(seed, position): (Q_1, P_1, Q_2, P_2, ...), Q is (m, r) and P is (n, r)."""
        state = []
        for piece in self._matrices(spec):
            for side, length in enumerate((piece.columns, piece.rows)):
                stream = (spec.seed, spec.position, piece.matrix, side)
                entries = 2.0 * uniform(stream, length * self.rank).reshape(length, self.rank) - 1.0
                # In NumPy on every framework: all start from the same bits.
                state.append(ops.from_numpy(_orthonormal_numpy(entries)))
        return Context(spec, 0, tuple(state))

    def encode(self, ops: Ops, ctx: Context, grad: Array) -> Array:
        """``G Q`` (phase 0) or ``G^T P`` (phase 1) of every matrix, dense tensors as they are, end to end."""
        parts = []
        for piece in self._pieces(ctx.spec, ctx.phase):
            values = grad[piece.start : piece.stop]
            if piece.rows:
                matrix = ops.reshape(values, (piece.rows, piece.columns))
                sent = ops.matmul(matrix, self._basis(ctx, piece), transpose_a=ctx.phase == 1)
                values = ops.reshape(sent, (piece.payload_stop - piece.payload_start,))
            parts.append(values)
        return ops.concat(parts)

    def decode(self, ops: Ops, ctx: Context, total: Array) -> Array:
        """``P Q^T`` of every matrix."""
        parts = []
        for piece in self._pieces(ctx.spec, ctx.phase):
            values = total[piece.payload_start : piece.payload_stop]
            if piece.rows:
                basis = self._basis(ctx, piece)
                factor = self._factor(ops, piece, ctx.phase, total)
                left, right = (factor, basis) if ctx.phase == 0 else (basis, factor)
                values = ops.reshape(ops.matmul(left, right, transpose_b=True), (piece.stop - piece.start,))
            parts.append(values)
        return ops.concat(parts)

    def advance(self, ops: Ops, ctx: Context, total: Array) -> Context:
        """The orthonormalised sum becomes the other side's basis, and the other side's turn comes."""
        state = list(ctx.state)
        for piece in self._matrices(ctx.spec, ctx.phase):
            factor = self._factor(ops, piece, ctx.phase, total)
            # A division, because the reciprocal of a denormal is infinite and that of a huge number is flushed to zero.
            scaled = factor / (ops.max_abs(factor) + SMALLEST_NORMAL)
            state[2 * piece.matrix + 1 - ctx.phase] = ops.orthonormal(scaled)
        return Context(ctx.spec, 1 - ctx.phase, tuple(state))

    def payload_bytes(self, spec: Spec, phase: int = 0) -> int:
        """4 bytes for every float of this phase."""
        return 4 * sum(piece.payload_stop - piece.payload_start for piece in self._pieces(spec, phase))

    def _basis(self, ctx: Context, piece: Piece) -> Array:
        return ctx.state[2 * piece.matrix + ctx.phase]

    def _factor(self, ops: Ops, piece: Piece, phase: int, payload: Array) -> Array:
        length = piece.columns if phase else piece.rows
        return ops.reshape(payload[piece.payload_start : piece.payload_stop], (length, self.rank))

    def _matrices(self, spec: Spec, phase: int = 0) -> Iterator[Piece]:
        return (piece for piece in self._pieces(spec, phase) if piece.rows)

    def _pieces(self, spec: Spec, phase: int) -> Iterator[Piece]:
        start = payload_start = matrix = 0
        for shape, size in zip(spec.shapes, spec.sizes, strict=True):
            rows, columns = most_square(shape)
            if 2 * self.rank > min(rows, columns):
                rows = columns = 0
            length = self.rank * (columns if phase else rows) if rows else size
            yield Piece(start, start + size, payload_start, payload_start + length, rows, columns, matrix)
            start, payload_start, matrix = start + size, payload_start + length, matrix + bool(rows)


def most_square(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the view of ``shape`` with the least rows + columns; (1, size) for a vector.

    Torch keeps a convolution as (out, in, h, w) and Keras as (h, w, in, out): the best cut differs, the rule does not.
    """
    if len(shape) < 2 or 0 in shape:
        return 1, math.prod(shape)
    cuts = [(math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in range(1, len(shape))]
    return min(cuts, key=sum)


def _orthonormal_numpy(columns: np.ndarray) -> np.ndarray:
    q, r = np.linalg.qr(columns)
    return np.ascontiguousarray(q * np.where(np.diag(r) < 0, -1.0, 1.0), dtype=np.float32)
