"""What small sums take on the link, measured before training begins: the controller's first idea of it."""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from hvdplus.compression import Array, Ops
from hvdplus.transport import Transport

RUNS, STAGGER = 5, 0.0002
"""Small sums, and by how many seconds each begins later after a barrier than the one before.

Horovod begins sums in turns, one a millisecond, and what a sum takes depends on how long it waits for its turn. So
there are several, spread over a turn, and the median counts: it is what every sum of a step has to expect."""
LARGE_RUNS = 3
"""Large sums. The first one does not count, as links may carry some 100 kB at any speed after a rest. Of the others the
faster does: a busy machine adds milliseconds to a sum, which would become many times as many for a dense step."""
SMALL, LEAST, MOST = 4 << 10, 64 << 10, 1 << 20
"""Bytes. A small sum shows what every all-reduce takes, a large one (of so many bytes) what its bytes take."""
SHARE = 0.06
"""What a large one sends within these limits, as a share of a dense step's bytes. All of them together: 0.2 steps."""


def sizes(dense_bytes: int) -> tuple[int, int]:
    """Bytes of a small and a large sum, for a model whose dense steps send ``dense_bytes``."""
    large = max(LEAST, min(MOST, int(SHARE * dense_bytes)))
    return SMALL, large // 4 * 4


def probe(ops: Ops[Array], transport: Transport, dense_bytes: int) -> list[tuple[int, float]]:
    """(bytes, seconds on the slowest rank) of a sum of each size. All ranks call it at the same point."""

    def seconds(size: int, run: int) -> float:
        array = ops.from_numpy(np.zeros(size // 4, np.float32))
        transport.barrier()
        time.sleep(run * STAGGER)
        began = time.perf_counter()
        total = transport.wait(transport.start(array, f"hvdplus.probe.{size}.{run}"))
        ops.to_numpy(ops.reshape(total, (-1,))[:1])  # waits for the device
        return time.perf_counter() - began

    small, large = sizes(dense_bytes)
    own = [
        median(seconds(small, run) for run in range(RUNS)),
        min([seconds(large, run) for run in range(LARGE_RUNS)][1:]),
    ]
    ranks = transport.gather_objects(own, "seconds of probes")
    return [(size, max(same)) for size, *same in zip(sizes(dense_bytes), *ranks, strict=True)]
