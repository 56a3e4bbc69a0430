"""A stock Horovod ``Compressor`` class, unchanged, as a compressor of hvdplus.

Horovod's contract is ``compress(tensor) -> (tensor, ctx)`` and ``decompress(tensor, ctx) -> tensor``, around an
all-reduce of the compressed tensor. The class's author promises that this sum has a meaning. As in Horovod, there is no
residual, and the class's ``ctx`` stays on its rank. Arrays only pass through, so classes for ``horovod.torch`` and
``horovod.tensorflow`` both work.
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
        """``ops``: operations of the class's framework, for ``payload_bytes``."""
        self._cls = cls
        self._ops = ops
        self._own: dict[int, Any] = {}

    @property
    def name(self) -> str:
        """The class's name."""
        return str(getattr(self._cls, "__name__", type(self._cls).__name__))

    def init(self, ops: Ops[Array], spec: Spec) -> Context[Array]:
        """An empty context."""
        return Context(spec, 0, ())

    def encode(self, ops: Ops[Array], ctx: Context[Array], grad: Array, residual: Array | None = None) -> Array:
        """The bucket, compressed by the class; keeps the class's ``ctx``."""
        payload: Array
        payload, self._own[ctx.spec.position] = self._cls.compress(grad)
        return payload

    def decode(self, ops: Ops[Array], ctx: Context[Array], total: Array) -> Array:
        """The sum, decompressed by the class with the ``ctx`` that it returned for this bucket."""
        bucket: Array = self._cls.decompress(total, self._own[ctx.spec.position])
        return bucket

    def payload_bytes(self, spec: Spec, side: int = 0) -> int:
        """Bytes of a compressed bucket of zeros."""
        payload, _ = self._cls.compress(self._ops.from_numpy(np.zeros(spec.size, np.float32)))
        return int(self._ops.to_numpy(payload).nbytes)
