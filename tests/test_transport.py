"""What all transports share: objects in parts, purposes that are compared. Ranks are threads that meet."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hvdplus import transport
from hvdplus.adapters.transports.local import Local
from hvdplus.transport import TransportError, broadcast_each, broadcast_object, gather_in_parts

LIMIT = 300
"""Most bytes of a message here."""


class Threads(Local):
    """One of several ranks that are threads of this process; knows the longest message."""

    def __init__(self, rank, shared):
        self.rank, self.size, self._shared = rank, len(shared["box"]), shared

    def gather_objects(self, value, what="objects"):
        return gather_in_parts(value, what, self.size, self._gather)

    def _gather(self, value):
        shared = self._shared
        shared["box"][self.rank] = pickle.dumps(value)
        shared["meeting"].wait(10)
        shared["messages"].append(sum(map(len, shared["box"])))
        told = [pickle.loads(each) for each in shared["box"]]
        shared["meeting"].wait(10)
        return told


def together(size, body):
    """What ``body`` returns (or raises) on every rank, and the bytes of every message."""
    shared = {"box": [b""] * size, "meeting": threading.Barrier(size), "messages": []}

    def one(rank):
        try:
            return body(Threads(rank, shared))
        except TransportError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size))), shared["messages"]


@pytest.fixture(autouse=True)
def short_messages(monkeypatch):
    monkeypatch.setattr(transport, "PART_BYTES", LIMIT)


@pytest.mark.parametrize("lengths", [(0, 0, 0), (5, 5000, 100), (1000, 0, 2000), (299, 300, 301)])
def test_objects_of_any_length_travel_in_short_messages(lengths):
    values = [bytes([rank]) * length for rank, length in enumerate(lengths)]
    results, messages = together(3, lambda rank: rank.gather_objects(values[rank.rank]))
    assert results == [values] * 3
    overhead = 3 * 60  # purpose and length
    assert max(messages) <= LIMIT + overhead
    assert len(messages) // 3 == max(1, -(-max(len(pickle.dumps(v, 5)) for v in values) // (LIMIT // 3)))


def test_a_short_object_is_one_message():
    results, messages = together(3, lambda rank: broadcast_object(rank, rank.rank, 2))
    assert results == [2, 2, 2] and len(messages) == 3


@pytest.mark.parametrize("lengths", [[], [1], [10, 10, 10], [1000], [10, 80, 2, 0, 500, 3]])
@pytest.mark.parametrize("root", [0, 1])
def test_arrays_are_broadcast_one_after_the_other(lengths, root):
    arrays = [np.full(length, place, np.float32) for place, length in enumerate(lengths)]
    looked_at = []

    def body(rank):
        def mine():
            for array in arrays:
                looked_at.append(rank.rank)
                yield array

        return list(broadcast_each(rank, mine(), root))

    results, messages = together(2, body)
    for received in results:
        assert len(received) == len(arrays)
        assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(received, arrays, strict=True))
    assert set(looked_at) <= {root}, "the others' values do not count"
    assert max(messages) <= LIMIT + 2 * 60


def test_small_arrays_share_a_message():
    _, messages = together(2, lambda rank: list(broadcast_each(rank, [np.zeros(1)] * 10, 0)))
    some = len(messages)
    _, messages = together(2, lambda rank: list(broadcast_each(rank, [np.zeros(1)] * 20, 0)))
    assert len(messages) < 20 + some


def test_gathers_for_different_purposes_are_an_error_on_every_rank_that_names_both():
    def body(rank):
        if rank.rank == 2:
            return rank.gather_objects("a digest", "hvd.identical")
        return rank.gather_objects(7, "an optimizer's number")

    results, _ = together(3, body)
    for error in results:
        assert isinstance(error, TransportError)
        assert "rank 0: gather of an optimizer's number, rank 2: gather of hvd.identical" in str(error)
