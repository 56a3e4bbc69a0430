"""Which gradients travel together, and what a rank holds for each bucket from step to step.

A bucket is a flat vector of some parameters' gradients, end to end, all of one type. Buckets are filled from the last
parameter to the first, the order of a backward pass, so that the first bucket travels while the pass goes on. A bucket
ends with its tail: vectors, norms and tiny tensors, which travel whole because compression would save little and spoil
much. A parameter with sparse gradients has a bucket of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar, Generic, NamedTuple

from hvdplus.compression import Array, Compressor, Context, NoCompression, Ops, Spec
from hvdplus.compression.contract import sizes_of

DENSE_ONLY = "float64"
"""Buckets of this type are never compressed; everything narrower is compressed as float32."""
NARROW = ("float16", "bfloat16")
"""Types of half the width of float32."""
TINY = 256
"""Tensors of fewer elements are never compressed."""
LEAST = 1 / 64
"""Of a full bucket: what is less waits for the next parameter, however large that is. A sum more takes as long as
128 kB at 1 Gb/s."""


class Bucket(NamedTuple):
    """Parameters that travel together; the same on every rank."""

    number: int
    parameters: tuple[int, ...]
    """Positions in the model's list of parameters, in the order in which they stand in the bucket."""
    shapes: tuple[tuple[int, ...], ...]
    """Their shapes, in the same order."""
    dtype: str
    """The gradients' own type: ``float16``, ``bfloat16``, ``float32`` or ``float64``."""
    spec: Spec
    """The bucket as compressors see it."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return sizes_of(self.shapes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter begins in the flat vector, and the end of the last."""
        return tuple(accumulate(self.lengths, initial=0))

    @property
    def compressible(self) -> bool:
        """Whether levels apply to it at all."""
        return self.dtype != DENSE_ONLY


def wide(dtype: str) -> str:
    """The type in which gradients of ``dtype`` are compressed: float32, but float64 stays."""
    return DENSE_ONLY if dtype == DENSE_ONLY else "float32"


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    return 8 if dtype == DENSE_ONLY else 2 if dtype in NARROW else 4


def make_buckets(
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[str],
    *,
    bucket_bytes: int,
    ranks: int,
    seed: int,
    tapering: bool = False,
    apart: Sequence[int] = (),
) -> tuple[Bucket, ...]:
    """Cut the parameters (given first to last) into buckets of at most ``bucket_bytes``.

    A larger parameter has a bucket to itself, but for what came before it and is too little for a bucket (``LEAST``).
    The result depends on the arguments alone and so is equal on all ranks.

    Args:
        tapering: make buckets smaller towards the end, because no computation hides the last one.
        apart: parameters that have a bucket each, behind all others.
    """
    sizes = [math.prod(shape) * itemsize(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    left = sum(size for i, size in enumerate(sizes) if i not in set(apart))
    limit = bucket_bytes
    buckets: list[Bucket] = []
    open_parameters: dict[str, list[int]] = {}
    open_bytes: dict[str, int] = {}

    def close(dtype: str, found: Sequence[int]) -> None:
        parameters = sorted(found, key=lambda i: not compressible(shapes[i]))  # else in order
        body = tuple(shapes[i] for i in parameters if compressible(shapes[i]))
        tail = sum(math.prod(shapes[i]) for i in parameters[len(body) :])
        spec = Spec(body, len(buckets), seed, ranks, tail)
        buckets.append(Bucket(len(buckets), tuple(parameters), tuple(shapes[i] for i in parameters), dtype, spec))

    for i in reversed(range(len(shapes))):
        if i in apart:
            continue
        dtype = dtypes[i]
        full = dtype in open_parameters and open_bytes[dtype] + sizes[i] > limit
        if full and (tapering or open_bytes[dtype] >= LEAST * limit):
            close(dtype, open_parameters.pop(dtype))
        if dtype not in open_parameters:
            open_bytes[dtype] = 0
            if tapering:
                limit = min(bucket_bytes, max(bucket_bytes // 16, left // 2))
        open_bytes[dtype] += sizes[i]
        left -= sizes[i]
        open_parameters.setdefault(dtype, []).append(i)
    for dtype in list(open_parameters):
        close(dtype, open_parameters.pop(dtype))
    for i in apart:
        close(dtypes[i], [i])
    return tuple(buckets)


def compressible(shape: tuple[int, ...]) -> bool:
    """Whether a tensor may be compressed: it has ``TINY`` elements or more, and two dimensions longer than 1."""
    return sum(length > 1 for length in shape) >= 2 and math.prod(shape) >= TINY


def compressor_for(bucket: Bucket, compressor: Compressor) -> Compressor:
    """The level's compressor, or none where the bucket's type must stay dense."""
    return compressor if bucket.compressible else NoCompression()


def bytes_per_step(buckets: Sequence[Bucket], compressor: Compressor, narrow_sums: Sequence[str] = ()) -> int:
    """Bytes that one rank sends per step at a level: in all passes, and on average where sides take turns.

    ``narrow_sums``: narrow types that the transport can add up, so that dense steps send them unchanged.
    """
    total = 0
    for bucket in buckets:
        own = compressor_for(bucket, compressor)
        sent = own.step_bytes(bucket.spec)
        if isinstance(own, NoCompression) and bucket.dtype in (DENSE_ONLY, *narrow_sums):
            sent = sent * itemsize(bucket.dtype) // 4  # payload_bytes counts float32
        total += sent
    return total


NOT_YET: Any = None
"""Placeholder of an array that comes later in the step."""


@dataclass
class BucketState(Generic[Array]):
    """One bucket on this rank."""

    is_table: ClassVar[bool] = False
    """Whether its only parameter's gradients are sparse."""
    bucket: Bucket
    contexts: dict[int, Context[Array]] = field(default_factory=dict)
    """Level -> context, made when the level is first used."""
    residual: Array | None = None
    """Part of the gradients that encoding lost so far; None: nothing is outstanding."""
    pending: Array | None = None
    """The next residual, until the optimizer has taken the step."""
    waits: bool = False
    """Whether a part of the residual waits for the next one: no rank used its parameters at the end of a flush."""
    handed_over: bool = False
    """Of two levels: whether another rank takes over this rank's residual, once the optimizer has taken the step."""
    forms: dict[tuple[int, int, str], Array] = field(default_factory=dict)
    """Of two levels: (level, side, ``flat_type``) -> a payload, whatever its values."""
    flat: Array | None = None
    """The vector that is encoded: gradients plus a fraction of the residual. Kept, because fresh memory is slow."""
    flat_type: str = ""
    missing: set[int] = field(default_factory=set)
    """Parameters whose gradient of this step is not here yet."""
    taught: Context[Array] | None = None
    """The context as the step's passes so far have taught it; None: as it was before the step."""
    asked: bool = False
    """Whether the step's present pass has asked."""
    payload: Array = NOT_YET
    """The vector, encoded."""
    summed: list[Array] = field(default_factory=list)
    """Where gradients are summed in place: the gradients, after the sum their means."""
    handle: Any = None
    """Of the all-reduce under way."""
    total: Array = NOT_YET
    """Sum of all ranks' payloads."""
    mean: Array | None = NOT_YET
    """Mean of all ranks' gradients (or their sum, if that was asked for), decoded; None: it was written to
    ``Backend.places``."""
    next_context: Context[Array] | None = None
    """The context that follows from ``total``, until all ranks know that the step was finite."""
    finite: Array | None = None
    """0-d boolean: all values that this rank sent are finite; None: not checked."""
    overflow: Array | None = None
    """0-d boolean: the residual would need many steps to send what is left; None: not checked."""
    sum_finite: Array | None = None
    """0-d boolean: the sum is finite; None: not checked."""

    def __post_init__(self) -> None:
        self.missing = set(self.bucket.parameters)
        offsets = self.bucket.offsets
        self.places: Mapping[int, tuple[slice, tuple[int, ...]]] = {
            i: (slice(*offsets[place : place + 2]), self.bucket.shapes[place])
            for place, i in enumerate(self.bucket.parameters)
        }
        """Parameter -> where it stands in the flat vector, and its shape."""

    def context(self, ops: Ops[Array], level: int, compressor: Compressor, side: int = 0) -> Context[Array]:
        """The context of a level, made if it is used for the first time."""
        if level not in self.contexts:
            self.contexts[level] = compressor.init(ops, self.bucket.spec)
        return self.contexts[level]._replace(side=side)

    def forget_step(self) -> None:
        """Free the arrays of one step, so that the next forward pass can use the memory."""
        self.missing = set(self.bucket.parameters)
        self.payload = self.handle = self.total = self.mean = NOT_YET
        self.summed, self.asked = [], False
        self.taught = self.next_context = self.finite = self.overflow = self.sum_finite = None


@dataclass
class BucketSet(Generic[Array]):
    """All gradients, cut into buckets in one way."""

    states: list[BucketState[Array]]
    prefix: str
    """Beginning of the all-reduces' names."""
    in_place: bool = False
    """Whether gradients are summed in place where possible, and come back as means."""

    def __post_init__(self) -> None:
        self.place_of = {i: (state, *place) for state in self.states for i, place in state.places.items()}
        """Parameter -> bucket, place in it, shape."""
