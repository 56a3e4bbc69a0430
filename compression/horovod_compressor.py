"""A stock Horovod ``Compressor`` class, unchanged, as one of ours.

Horovod's contract is ``compress(tensor) -> (tensor, ctx)`` and ``decompress(tensor, ctx) -> tensor``, around an
all-reduce of the compressed tensor. Whether that sum means anything is its author's promise; its losses are not kept,
as in Horovod. What its ``ctx`` holds stays on its rank. Works with classes for ``horovod.torch`` and
``horovod.tensorflow`` alike, because it only hands arrays through.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdplus.compression.contract import Compressor, Context, Spec
from hvdplus.compression.ops import Array, Ops


class HorovodCompressor(Compressor):
    """Runs ``cls.compress`` and ``cls.decompress`` on whole buckets."""

    learns = "nothing; a context of its own on each rank"
    keeps_residual = False
    needs_finite_check = False
    may_overflow = True
    memory_passes = 6.0

    def __init__(self, cls: Any, ops: Ops[Any]) -> None:
        """``ops``: of the framework that the class is written for, to ask it for the size of its payload."""
        self._cls = cls
        self._ops = ops
        self._own: dict[int, Any] = {}

    @property
    def name(self) -> str:
        """The class's."""
        return str(getattr(self._cls, "__name__", type(self._cls).__name__))

    def init(self, ops: Ops[Array], spec: Spec) -> Context[Array]:
        """An empty context."""
        return Context(spec, 0, ())

    def encode(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None = None) -> Array:
        """What the class compresses the bucket to."""
        payload: Array
        payload, self._own[ctx.spec.position] = self._cls.compress(grad)
        return payload

    def decode(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Array:
        """What the class decompresses, with what it remembered of this bucket."""
        bucket: Array = self._cls.decompress(total, self._own[ctx.spec.position])
        return bucket

    def payload_bytes(self, spec: Spec, side: int = 0) -> int:
        """As a zero gradient's."""
        payload, _ = self._cls.compress(self._ops.from_numpy(np.zeros(spec.size, np.float32)))
        return int(self._ops.to_numpy(payload).nbytes)
