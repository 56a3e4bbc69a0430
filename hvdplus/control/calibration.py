"""Codec times of every level on this machine, measured before training begins.

At most four buckets, spread over the model, stand for all of it. Each goes through the steps of an exchange (encode,
check for finite values, compute the residual, decode, advance), once to warm up and a few times more, levels in turns.
Packing gradients and writing means back is not measured: every level does that, dense too. (One exception: dense steps
of PyTorch over Horovod sum gradients in place, so levels that have not run yet look cheaper than they are.)

A level takes at most about twice ``SECONDS``. All levels together take memory for their contexts, and for some six
copies of the buckets tried, which hold 32 MB at most. All of it is freed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdplus.compression import Array, Compressor, Context, NoCompression, Ops, Spec
from hvdplus.transport import Transport

BUCKETS = 4
"""Most buckets that are measured."""
ELEMENTS = 2 << 20
"""Most elements of a bucket that are measured."""
RUNS = 4
"""Runs of a level. The first warms up; the fastest of the others counts. Levels take turns, so that a busy moment of
the machine does not meet all runs of one."""
DRAWN = 65521
"""Random numbers that fill a bucket, over and over: zeros would take short cuts. A prime, so that no rows are equal."""
SECONDS = 0.5
"""Time for a level's runs. Once it is spent, two runs are enough."""

State = tuple[Array, ...]
Round = Callable[
    [Sequence[Array], Sequence[Array], Sequence[State[Array]]], tuple[list[Array], list[State[Array]], list[Array]]
]
"""(gradients, residuals, contexts' arrays) of some buckets -> (flags of finite payloads, the next contexts' arrays, all
other results of an exchange)."""


def codec_seconds(
    ops: Ops[Array],
    specs: Sequence[Spec],
    compressors: Sequence[Compressor],
    transport: Transport,
    compiled: Callable[[Round[Array]], Any] | None = None,
) -> tuple[float, ...]:
    """Seconds a step to encode and decode all buckets, for each compressor, on the slowest rank.

    All ranks call it at the same point.

    Args:
        compiled: compiles a function of arrays into a graph, for frameworks that train in graphs; None: they do not.
    """
    tried, factor = _typical(specs)
    drawn = np.random.default_rng(0).standard_normal(DRAWN, dtype=np.float32)  # not by the script's own generator
    grads = [np.resize(drawn, spec.size) for spec in tried]
    lossy = [c for c in compressors if tried and not isinstance(c, NoCompression)]
    took = iter(_seconds(ops, tried, grads, lossy, compiled) if lossy else ())
    own = [factor * next(took) if compressor in lossy else 0.0 for compressor in compressors]
    return tuple(max(ranks) for ranks in zip(*transport.gather_objects(own, "codec seconds"), strict=True))


def _typical(specs: Sequence[Spec]) -> tuple[Sequence[Spec], float]:
    """(buckets to measure, elements of all buckets divided by elements of these)."""
    specs = [spec for spec in specs if spec.size]
    if not specs:
        return (), 0.0
    # Small buckets would show the cost of calls rather than of bytes.
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
    ops: Ops[Array],
    specs: Sequence[Spec],
    grads: Sequence[np.ndarray],
    compressors: Sequence[Compressor],
    compiled: Callable[[Round[Array]], Any] | None,
) -> list[float]:
    """Seconds that each level takes for these buckets, in a graph less the time of one that does nothing."""
    residuals = [ops.from_numpy(grad) for grad in grads]
    states = [
        [
            compressor.asked(ops, compressor.init(ops, spec), residual, lambda told: told).state
            for spec, residual in zip(specs, residuals, strict=True)
        ]
        for compressor in compressors
    ]
    rounds = [_round(ops, specs, compressor) for compressor in compressors]
    if compiled is None:
        return _least(ops, rounds, grads, residuals, states)

    def idle(grads: Sequence[Array], residuals: Sequence[Array], states: Sequence[State[Array]]) -> Any:
        return [ops.all_finite(grad[:1]) for grad in grads], [tuple(state) for state in states], []

    count = len(rounds)
    took = _least(ops, [compiled(each) for each in (*rounds, *[idle] * count)], grads, residuals, [*states, *states])
    return [max(0.0, busy - nothing) for busy, nothing in zip(took[:count], took[count:], strict=True)]


def _round(ops: Ops[Array], specs: Sequence[Spec], compressor: Compressor) -> Round[Array]:
    def work(grads: Sequence[Array], residuals: Sequence[Array], states: Sequence[State[Array]]) -> Any:
        sound, after, results = [], [], []
        for spec, grad, residual, state in zip(specs, grads, residuals, states, strict=True):
            ctx = compressor.taught(ops, Context(spec, 0, tuple(state)), grad, lambda payload, *_: payload)
            if compressor.keeps_residual:
                payload, left, finite, _ = compressor.send(ops, ctx, grad, residual)
                results.append(left)
            else:
                payload = compressor.encode(ops, ctx, grad)
                finite = compressor.is_finite(ops, grad, payload)
            sound.append(finite)
            results.append(compressor.decode(ops, ctx, payload))
            after.append(compressor.advance(ops, ctx, payload).state)
        return sound, after, results

    return work


def _least(
    ops: Ops[Array],
    rounds: Sequence[Round[Array]],
    grads: Sequence[np.ndarray],
    residuals: Sequence[Array],
    states: Sequence[Sequence[State[Array]]],
) -> list[float]:
    """Seconds of the fastest run of each, from contexts ``states`` on."""
    seconds: list[list[float]] = [[] for _ in rounds]
    now = list(states)
    for _ in range(RUNS):
        for place, (a_round, taken) in enumerate(zip(rounds, seconds, strict=True)):
            if len(taken) >= 2 and sum(taken) >= SECONDS:
                continue
            fresh = [ops.from_numpy(grad) for grad in grads]  # the residual may overwrite them
            for grad in fresh:
                ops.to_numpy(grad[:1])  # waits until it is on the device
            began = time.perf_counter()
            sound, now[place], results = a_round(fresh, residuals, now[place])
            all([bool(flag) for flag in sound])  # waits for the device
            for last in (*results[-1:], *(now[place][-1] if now[place] else ())):
                ops.to_numpy(ops.reshape(last, (-1,))[:1])
            taken.append(time.perf_counter() - began)
    return [min(taken[1:]) for taken in seconds]
