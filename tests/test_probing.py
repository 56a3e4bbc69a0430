"""Sums before training: what of them counts."""

from __future__ import annotations

import time
from typing import Any

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.adapters.transports.in_process import run
from hvdplus.control.probing import LARGE_RUNS, RUNS, probe, sums

DENSE_BYTES = 4 << 20


def test_neither_a_link_that_has_rested_nor_a_busy_machine_counts() -> None:
    """The first large sum takes no time, the others 20 ms, on a machine that adds 40 ms to one of them."""
    small, large = (size for size, _ in sums(float, DENSE_BYTES))
    assert small < large and LARGE_RUNS * large <= 0.2 * DENSE_BYTES
    takes = {small: [0.001] * RUNS, large: [0.0, 0.06, 0.02]}

    def body(transport: Any) -> Any:
        left = {size: iter(seconds) for size, seconds in takes.items()}
        start, wait = transport.start, transport.wait

        def slow(handle: tuple[Any, int]) -> Any:
            time.sleep(next(left[handle[1]]))
            return wait(handle[0])

        transport.start = lambda array, *more: (start(array, *more), array.nbytes)
        transport.wait = slow
        return probe(NumpyOps(), transport, DENSE_BYTES)

    first, second = run(2, body)
    assert first == second and [size for size, _ in first] == [small, large]
    assert 0.001 <= first[0][1] < 0.01 and 0.02 <= first[1][1] < 0.04


def test_ranks_send_the_same_sums_whatever_each_has_measured() -> None:
    """A large sum takes 1.2 times as long as a small one on one rank, 1.8 times on the other: it shows its bytes."""
    small, large = (size for size, _ in sums(float, DENSE_BYTES))

    def body(transport: Any, slower: float) -> Any:
        wait, start = transport.wait, transport.start

        def slow(handle: tuple[Any, int]) -> Any:
            total = wait(handle[0])
            time.sleep(0.02 * (slower if handle[1] == large else 0.1 if handle[1] > large else 1.0))
            return total

        transport.start = lambda array, *more: (start(array, *more), array.nbytes)
        transport.wait = slow
        return [size for size, _ in probe(NumpyOps(), transport, DENSE_BYTES)]

    assert run(2, lambda transport: body(transport, 1.8 if transport.rank else 1.2)) == [[small, large]] * 2
    assert run(2, lambda transport: body(transport, 1.2)) == [[small, large, 4 * large]] * 2
