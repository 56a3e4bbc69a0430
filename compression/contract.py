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
from typing import NamedTuple, Protocol

from hvdplus.compression.ops import Array, Ops


class Spec(NamedTuple):
    """What a bucket looks like; equal on every rank.

    A bucket is a flat float32 vector: the gradients of ``shapes``, row-major, end to end.
    """

    shapes: tuple[tuple[int, ...], ...]
    """Shape of every tensor in the bucket, in the order in which they stand in the vector."""
    position: int = 0
    """Index of the bucket among the model's buckets; with ``seed`` it makes randomness differ between buckets."""
    seed: int = 0
    """Seed of all randomness, the same on every rank."""
    ranks: int = 1
    """World size N, the number of payloads that will be added."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of every tensor."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def size(self) -> int:
        """Number of elements d of the bucket."""
        return sum(self.sizes)


class Context(NamedTuple):
    """What a payload means. Identical on every rank, bit for bit, because only shared values enter it."""

    spec: Spec
    phase: int
    """Which of the compressor's ``phases`` programs runs in this step. A plain integer, never an array, so that a
    compiled graph holds each program once and picks one by index."""
    state: tuple[Array, ...]
    """Arrays of fixed number and shapes, computed from the spec and from what earlier all-reduces returned."""


class Compressor(Protocol):
    """One algorithm with its parameters. Stateless: everything that changes is in the ``Context``."""

    @property
    def name(self) -> str:
        """How the user spells it, e.g. ``lowrank:4``; also part of the all-reduce's tensor name."""

    @property
    def phases(self) -> int:
        """Number of programs that take turns from step to step (1 for most)."""

    @property
    def keeps_residual(self) -> bool:
        """Whether what encoding loses is kept and added to the next gradient (error feedback)."""

    @property
    def narrow(self) -> bool:
        """Whether finite gradients can become infinite on the wire. All ranks see it in the sum, and send again."""

    @property
    def uses_products(self) -> bool:
        """Whether contexts come from floating-point matrix products or factorisations, whose bits depend on the
        CPU's capability. Such a level needs equal CPUs and libraries on all ranks."""

    def init(self, ops: Ops, spec: Spec) -> Context:
        """The first context, from the spec alone."""

    def encode(self, ops: Ops, ctx: Context, grad: Array) -> Array:
        """Payload (1-D) of a gradient bucket (1-D, float32, ``ctx.spec.size`` elements)."""

    def decode(self, ops: Ops, ctx: Context, total: Array) -> Array:
        """Bucket (1-D, float32) that a sum of payloads stands for: the *sum* over ranks, not the mean."""

    def advance(self, ops: Ops, ctx: Context, total: Array) -> Context:
        """The next step's context. ``total`` is the sum of all ranks' payloads."""

    def payload_bytes(self, spec: Spec, phase: int = 0) -> int:
        """Bytes that one rank hands to the all-reduce for this bucket."""
