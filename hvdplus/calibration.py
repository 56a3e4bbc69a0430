"""What every level's codec takes on this machine, tried before training begins.

Four buckets at most, spread over the model, stand for all of it: each takes the steps that an exchange takes (encode,
see whether it is finite, work out what remains, decode, advance), once to warm up and a few times more. Packing
gradients and writing means back is not in it: every level has that, the densest too (but for PyTorch's over Horovod,
which sums gradients where they are: next to it, levels that were not measured yet look cheaper than they are).

A level costs about twice ``SECONDS`` at the most, and memory for some six copies of what is tried, which is 32 MB at
the most. Nothing of it stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdplus.exchange.bucket import DENSE_ONLY, Bucket
from hvdplus.compression import Array, Compressor, Context, NoCompression, Ops, Spec
from hvdplus.transport import Transport

BUCKETS = 4
"""Buckets that are tried."""
ELEMENTS = 2 << 20
"""Elements of a bucket that are tried, if it has more."""
RUNS = 6
"""Runs of a level, of which the first warms up and the fastest of the others counts."""
SECONDS = 0.5
"""Time of a level's runs after which no more than two are made."""

State = tuple[Array, ...]
Round = Callable[[Sequence[Array], Sequence[Array], Sequence[State]], tuple[list[Array], list[State], list[Array]]]
"""(gradients, residuals, contexts' arrays) of some buckets -> (whether they are finite, the next contexts' arrays, all
else that an exchange would use)."""


def codec_seconds(
    ops: Ops,
    buckets: Sequence[Bucket],
    compressors: Sequence[Compressor],
    transport: Transport,
    compiled: Callable[[Round], Any] = lambda a_round: a_round,
) -> tuple[float, ...]:
    """Seconds a step that encoding and decoding all buckets takes at each level, on the slowest rank.

    All ranks call it at the same point. ``compiled``: how the framework makes a graph of a function of arrays, where
    it trains in graphs.
    """
    tried, factor = _typical(buckets)
    rng = np.random.default_rng(0)  # zeros would take short cuts, and the script's own randomness is not ours
    grads = [rng.standard_normal(spec.size, dtype=np.float32) for spec in tried]
    own = [
        0.0 if isinstance(c, NoCompression) or not tried else factor * _seconds(ops, tried, grads, c, compiled)
        for c in compressors
    ]
    return tuple(max(ranks) for ranks in zip(*transport.gather_objects(own), strict=True))


def _typical(buckets: Sequence[Bucket]) -> tuple[Sequence[Spec], float]:
    """Buckets to try, and how many times as much all are."""
    specs = [bucket.spec for bucket in buckets if bucket.dtype != DENSE_ONLY and bucket.spec.size]
    if not specs:
        return (), 0.0
    # Small ones would say more of the cost of a call than of that of a byte.
    least = min(ELEMENTS, max(spec.size for spec in specs)) / 2
    typical = [spec for spec in specs if spec.size >= least]
    tried = [_shortened(spec) for spec in typical[:: -(-len(typical) // BUCKETS)]]
    return tried, sum(spec.size for spec in specs) / sum(spec.size for spec in tried)


def _shortened(spec: Spec) -> Spec:
    """The same tensors with fewer rows, where the bucket has more than ``ELEMENTS``."""
    part = min(1.0, ELEMENTS / spec.size)
    shapes = tuple((max(1, int(part * shape[0])), *shape[1:]) for shape in spec.shapes)
    return spec._replace(shapes=shapes, tail=int(part * spec.tail))


def _seconds(
    ops: Ops,
    specs: Sequence[Spec],
    grads: Sequence[np.ndarray],
    compressor: Compressor,
    compiled: Callable[[Round], Any],
) -> float:
    """Seconds that a level takes for these buckets, less what a call takes that does nothing."""
    residuals = [ops.from_numpy(grad) for grad in grads]
    states = [
        compressor.warm(ops, compressor.init(ops, spec), residual).state
        for spec, residual in zip(specs, residuals, strict=True)
    ]

    def work(grads: Sequence[Array], residuals: Sequence[Array], states: Sequence[State]) -> Any:
        sound, after, results = [], [], []
        for spec, grad, residual, state in zip(specs, grads, residuals, states, strict=True):
            ctx = Context(spec, 0, tuple(state))
            if compressor.keeps_residual:
                payload, left, finite, _ = compressor.send(ops, ctx, grad, residual)
                results.append(left)
            else:
                payload = compressor.encode(ops, ctx, grad)
                finite = compressor.sound(ops, grad, payload)
            sound.append(finite)
            results.append(compressor.decode(ops, ctx, payload))
            after.append(compressor.advance(ops, ctx, payload).state)
        return sound, after, results

    def idle(grads: Sequence[Array], residuals: Sequence[Array], states: Sequence[State]) -> Any:
        return [ops.all_finite(grad[:1]) for grad in grads], [tuple(state) for state in states], []

    busy, nothing = (_least(ops, compiled(a_round), grads, residuals, states) for a_round in (work, idle))
    return max(0.0, busy - nothing)


def _least(
    ops: Ops, a_round: Round, grads: Sequence[np.ndarray], residuals: Sequence[Array], states: Sequence[State]
) -> float:
    """Seconds of the fastest run."""
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) < RUNS and sum(seconds) < SECONDS):
        fresh = [ops.from_numpy(grad) for grad in grads]  # what is sent is overwritten by what remains of it
        began = time.perf_counter()
        sound, states, results = a_round(fresh, residuals, states)
        all([bool(flag) for flag in sound])  # a device works on until somebody looks
        for last in (*results[-1:], *(states[-1] if states else ())):
            ops.to_numpy(ops.reshape(last, (-1,))[:1])
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
