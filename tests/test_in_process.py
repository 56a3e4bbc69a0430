"""Ranks in one process: what does not fit together is an error on every rank, and says why."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from hvdplus.adapters.transports.in_process import run
from hvdplus.transport import TransportError

ORDERS = pytest.mark.parametrize("negotiates", [False, True], ids=["one order", "negotiates"])
SOON = 0.2
"""Seconds of patience, where ranks are waited for that never come."""


def add_up(transport: Any, array: Any, name: str = "sum", scale: float = 1.0) -> Any:
    return transport.wait(transport.start(np.asarray(array), name, scale))


@ORDERS
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_rank_gets_the_sum(ranks: int, negotiates: bool) -> None:
    def body(transport: Any) -> Any:
        assert (transport.size, transport.local_size) == (ranks, ranks)
        assert transport.rank == transport.local_rank
        assert transport.negotiates == negotiates
        mine = np.full(3, transport.rank, np.float32)
        whole, share = add_up(transport, mine), add_up(transport, mine, "mean", 1 / ranks)
        assert np.array_equal(mine, np.full(3, transport.rank)), "the rank's own array is left alone"
        assert transport.gather_objects(transport.rank**2) == [rank**2 for rank in range(ranks)]
        transport.barrier()
        return whole.tolist(), share.tolist()

    total = sum(range(ranks))
    assert run(ranks, body, negotiates=negotiates) == [([total] * 3, [pytest.approx(total / ranks)] * 3)] * ranks


def test_sums_are_made_in_the_arrays_type() -> None:
    def body(transport: Any) -> Any:
        for dtype in transport.summable:
            total = add_up(transport, np.array([2.0**-11, 1.0], dtype) * (1 + transport.rank))
            assert total.dtype == dtype
        return add_up(transport, np.array([1.0, 2.0**-11][transport.rank : transport.rank + 1], "float16"))[0]

    assert run(2, body) == [1.0, 1.0], "float16 has not the digits for more"


def test_a_sum_that_is_changed_afterwards_is_nobody_elses() -> None:
    def body(transport: Any) -> Any:
        mine = np.ones(2, np.float32)
        handle = transport.start(mine, "sum")
        mine[:] = 100  # after it was handed over
        total = transport.wait(handle)
        total += transport.rank
        transport.barrier()
        return total.tolist()

    assert run(2, body) == [[2.0, 2.0], [3.0, 3.0]]


def test_several_arrays_are_summed_in_place() -> None:
    def body(transport: Any) -> Any:
        arrays = [np.full(2, transport.rank + 1.0), np.full(3, 1.0)]
        handle = transport.start_all(arrays, "group", 0.5)
        sums = transport.wait(handle)
        assert all(one is other for one, other in zip(sums, arrays, strict=True))
        return [array.tolist() for array in arrays]

    assert run(2, body, negotiates=True) == [[[1.5, 1.5], [1.0, 1.0, 1.0]]] * 2


@ORDERS
def test_whether_a_sum_is_there(negotiates: bool) -> None:
    begun = threading.Event()

    def body(transport: Any) -> None:
        if transport.rank:
            begun.wait(5)
        handle = transport.start(np.ones(1), "sum")
        if not transport.rank:
            assert not transport.done(handle)
            begun.set()
        transport.gather_objects(None)
        assert transport.done(handle)
        transport.wait(handle)

    run(2, body, negotiates=negotiates)


@ORDERS
def test_ranks_that_do_not_come_are_named(negotiates: bool) -> None:
    def body(transport: Any) -> None:
        if transport.rank in (0, 3):
            add_up(transport, np.ones(2), "hvdplus.7")

    with pytest.raises(TransportError, match=r"Rank\(s\) 1, 2 did not make the call 'hvdplus.7': not within 0.2 s"):
        run(4, body, negotiates=negotiates, patience_seconds=SOON)


@ORDERS
@pytest.mark.parametrize(
    "arrays",
    [
        (np.ones(3, np.float32), np.ones(4, np.float32)),
        (np.ones(3, np.float32), np.ones((1, 3), np.float32)),
        (np.ones(3, np.float32), np.ones(3, np.float16)),
        (np.ones(3, np.int32), np.ones(3, np.float32)),
    ],
    ids=("length", "shape", "width", "kind"),
)
def test_unlike_arrays_are_an_error_on_every_rank(arrays: tuple[np.ndarray, np.ndarray], negotiates: bool) -> None:
    def body(transport: Any) -> None:
        with pytest.raises(TransportError, match="unlike arrays as 'grads'. Received, rank by rank: ") as raised:
            add_up(transport, arrays[transport.rank], "grads")
        assert all(str(array.dtype) in str(raised.value) for array in arrays)

    run(2, body, negotiates=negotiates)


@ORDERS
def test_an_error_on_one_rank_ends_the_others_at_once(negotiates: bool) -> None:
    """With that error, which says what every rank met."""

    def body(transport: Any) -> None:
        if transport.rank == 1:
            raise ZeroDivisionError("of rank 1")
        add_up(transport, np.ones(2))

    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="of rank 1") as raised:
        run(3, body, negotiates=negotiates)
    assert time.monotonic() - began < 5, "not until patience is over"
    (note,) = raised.value.__notes__
    assert "0: " in note and "2: " in note and "a rank has failed" in note and "Rank(s) 1 did not make" in note


def test_another_order_is_an_error_where_nothing_is_negotiated() -> None:
    def body(transport: Any) -> None:
        names = ["a", "b"] if transport.rank else ["b", "a"]
        handles = [transport.start(np.ones(1), name) for name in names]
        for handle in handles:
            transport.wait(handle)

    with pytest.raises(TransportError, match="begins the sum '[ab]' where rank [01] began '[ab]'"):
        run(2, body)
    run(2, body, negotiates=True)


@ORDERS
def test_a_name_serves_again_and_again(negotiates: bool) -> None:
    """Sums of one name are told apart by how often it was begun."""

    def body(transport: Any) -> Any:
        first, second = (transport.start(np.full(1, 10.0**power * (1 + transport.rank)), "sum") for power in (0, 1))
        late, early = transport.wait(second), transport.wait(first)
        return early[0], late[0], [add_up(transport, np.full(1, step))[0] for step in range(3)]

    assert run(2, body, negotiates=negotiates) == [(3.0, 30.0, [0.0, 2.0, 4.0])] * 2


def test_gathers_for_different_purposes_are_an_error_on_every_rank() -> None:
    def body(transport: Any) -> None:
        with pytest.raises(TransportError, match=r"different purposes. Received, rank by rank: \['a', 'b'\]"):
            transport.gather_objects(1, "ab"[transport.rank])

    run(2, body)


def test_what_was_sent_is_noted() -> None:
    def body(transport: Any) -> Any:
        add_up(transport, np.ones(3, np.float16), "a")
        add_up(transport, np.ones(3, np.float64), "b")
        return transport.sent

    assert run(2, body) == [[("a", 6), ("b", 24)]] * 2
