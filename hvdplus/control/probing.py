"""What small sums take on the link, measured before training begins: the controller's first idea of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np

from hvdplus.compression import Array, Ops
from hvdplus.transport import Transport

RUNS, STAGGER = 5, 0.0002
"""Small sums, and by how many seconds each begins later after a barrier than the one before.

Horovod begins sums in turns, one a millisecond, and what a sum takes depends on how long it waits for its turn. So
there are several, spread over a turn, and the median counts: it is what every sum of a step has to expect."""
LARGE_RUNS = 3
"""Large sums of a size. The first one does not count, as links may carry some 100 kB at any speed after a rest. Of the
others the faster does: a busy machine adds milliseconds to a sum, which would become many times as many for a dense
step."""
SMALL, LEAST, MOST = 4 << 10, 64 << 10, 1 << 20
"""Bytes. A small sum shows what every all-reduce takes, a large one (of so many bytes) what its bytes take."""
SHARE = 0.06
"""What the first large ones send within these limits, as a share of a dense step's bytes: together 0.2 steps."""
SHOWS, LARGER = 1.5, 4
"""Where a large sum takes less than so many times what a small one does, its bytes do not show: the next one has so
many times as many, those of a dense step or ``MOST`` at most."""


def sums(seconds: Callable[[int], float], dense_bytes: int) -> list[tuple[int, float]]:
    """(bytes, seconds) of a small sum and of large ones, for a model whose dense steps send ``dense_bytes``.

    Args:
        seconds: that a sum of so many bytes takes, equal on all ranks.
    """
    found = [(SMALL, seconds(SMALL))]
    size, most = max(LEAST, min(MOST, int(SHARE * dense_bytes))) // 4 * 4, min(dense_bytes, MOST) // 4 * 4
    while True:
        found.append((size, seconds(size)))
        if 2 * size > most or found[-1][1] > SHOWS * found[0][1]:
            return found
        size = min(LARGER * size, most)


def probe(ops: Ops[Array], transport: Transport, dense_bytes: int) -> list[tuple[int, float]]:
    """``sums``, in seconds on the slowest rank. All ranks call it at the same point."""

    def seconds(size: int, run: int) -> float:
        array = ops.from_numpy(np.zeros(size // 4, np.float32))
        transport.barrier()
        time.sleep(run * STAGGER)
        began = time.perf_counter()
        total = transport.wait(transport.start(array, f"hvdplus.probe.{size}.{run}"))
        ops.to_numpy(ops.reshape(total, (-1,))[:1])  # waits for the device
        return time.perf_counter() - began

    def agreed(size: int) -> float:
        if size == SMALL:
            own = median(seconds(size, run) for run in range(RUNS))
        else:
            own = min([seconds(size, run) for run in range(LARGE_RUNS)][1:])
        slowest: float = max(transport.gather_objects(own, "seconds of probes"))
        return slowest

    return sums(agreed, dense_bytes)
