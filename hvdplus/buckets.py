"""Which gradients travel together.

A bucket is a flat vector of some parameters' gradients, end to end. Buckets are filled from the last parameter to
the first, the order in which a backward pass delivers, so that the first is on its way while the pass goes on. Within a
bucket those stand last that no compressor may touch: vectors, norms and tiny tensors, in which there is little to save
and much to spoil.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from hvdplus.compression import Compressor, NoCompression, Spec

DENSE_ONLY = "float64"
"""Buckets of this type are never compressed; everything narrower travels through float32."""
TINY = 256
"""Tensors of fewer elements are never compressed."""
SPARSE = 0.25
"""Largest share of rows, all ranks' together, at which only the used rows of a sparse gradient are exchanged; beyond,
it is better off in a bucket, at the level that all others have."""


class Bucket(NamedTuple):
    """Parameters that travel together; the same on every rank."""

    number: int
    parameters: tuple[int, ...]
    """Positions in the model's list of parameters, in the order in which they stand in the bucket."""
    shapes: tuple[tuple[int, ...], ...]
    """Their shapes, in the same order."""
    dtype: str
    """``float32`` or ``float64``."""
    spec: Spec
    """What a compressor sees of it."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter begins in the flat vector, and the end of the last."""
        return tuple(accumulate(map(math.prod, self.shapes), initial=0))


def make_buckets(
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[str],
    *,
    bucket_bytes: int,
    ranks: int,
    seed: int,
    tapering: bool = False,
) -> tuple[Bucket, ...]:
    """Cut the parameters (given first to last) into buckets of at most ``bucket_bytes``.

    A larger parameter has a bucket of its own. All depends on the arguments alone, so every rank cuts alike.

    ``tapering``: towards the end buckets get smaller and smaller, as nothing is left to hide the last one behind.
    """
    sizes = [math.prod(shape) * (8 if dtype == DENSE_ONLY else 4) for shape, dtype in zip(shapes, dtypes, strict=True)]
    left = sum(sizes)
    limit = bucket_bytes
    buckets: list[Bucket] = []
    open_parameters: dict[str, list[int]] = {}
    open_bytes: dict[str, int] = {}

    def close(dtype: str) -> None:
        parameters = sorted(open_parameters.pop(dtype), key=lambda i: not compressible(shapes[i]))  # else in order
        body = tuple(shapes[i] for i in parameters if compressible(shapes[i]))
        tail = sum(math.prod(shapes[i]) for i in parameters[len(body) :])
        spec = Spec(body, len(buckets), seed, ranks, tail)
        buckets.append(Bucket(len(buckets), tuple(parameters), tuple(shapes[i] for i in parameters), dtype, spec))

    for i in reversed(range(len(shapes))):
        dtype = DENSE_ONLY if dtypes[i] == DENSE_ONLY else "float32"
        if dtype in open_parameters and open_bytes[dtype] + sizes[i] > limit:
            close(dtype)
        if dtype not in open_parameters:
            open_bytes[dtype] = 0
            if tapering:
                limit = min(bucket_bytes, max(bucket_bytes // 16, left // 2))
        open_bytes[dtype] += sizes[i]
        left -= sizes[i]
        open_parameters.setdefault(dtype, []).append(i)
    for dtype in list(open_parameters):
        close(dtype)
    return tuple(buckets)


def compressible(shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape may be compressed: a matrix of some size, whatever dimensions of 1 it has."""
    return sum(length > 1 for length in shape) >= 2 and math.prod(shape) >= TINY


def compressor_for(bucket: Bucket, compressor: Compressor) -> Compressor:
    """The level's compressor, or none where the bucket's type must stay dense."""
    return NoCompression() if bucket.dtype == DENSE_ONLY else compressor


def bytes_per_step(buckets: Sequence[Bucket], compressor: Compressor) -> int:
    """Bytes that one rank sends a step at a level; of levels whose phases differ, the larger."""
    total = 0
    for bucket in buckets:
        own = compressor_for(bucket, compressor)
        widths = 2 if bucket.dtype == DENSE_ONLY else 1  # payload_bytes counts float32
        total += widths * max(own.payload_bytes(bucket.spec, phase) for phase in range(own.phases))
    return total
