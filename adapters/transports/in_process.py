"""N ranks as threads of one process: for tests, and for playing with an exchange. NumPy arrays only.

    means = run(4, lambda transport: train(transport))        # one result a rank

If a rank does not make a call, or ranks make it with different shapes or types, every rank that waits for it raises
an error, which names the missing ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from hvdplus.transport import OBJECTS, Transport, TransportError

Result = TypeVar("Result")

PATIENCE_SECONDS = 20.0
"""Time that a rank waits for the others."""


class Hub:
    """The place where ranks meet."""

    def __init__(self, ranks: int, *, in_order: bool, patience_seconds: float) -> None:
        self.ranks = ranks
        self._in_order, self._patience = in_order, patience_seconds
        self._lock = threading.Condition()
        self._calls: dict[tuple[str, int], dict[int, Any]] = {}
        self._taken: dict[tuple[str, int], int] = {}
        self._counts: list[dict[str, int]] = [{} for _ in range(ranks)]
        self._orders: list[list[str]] = [[] for _ in range(ranks)]
        self.failed: BaseException | None = None
        self._parts: dict[tuple[int, ...], Hub] = {}

    def part(self, ranks: tuple[int, ...]) -> Hub:
        """Where some of the ranks meet by themselves."""
        with self._lock:
            fresh = Hub(len(ranks), in_order=self._in_order, patience_seconds=self._patience)
            return self._parts.setdefault(ranks, fresh)

    def bring(self, rank: int, name: str, value: Any) -> tuple[str, int]:
        """One rank's part of a call; returns the call's key."""
        with self._lock:
            key = name, self._counts[rank].get(name, 0)
            self._counts[rank][name] = key[1] + 1
            if self._in_order:
                self._check_order(rank, name)
            self._calls.setdefault(key, {})[rank] = value
            self._lock.notify_all()
            return key

    def there(self, key: tuple[str, int]) -> bool:
        """Whether every rank has brought its part."""
        with self._lock:
            return len(self._calls[key]) == self.ranks

    def take(self, key: tuple[str, int]) -> list[Any]:
        """All parts, in rank order; waits for them.

        Raises:
            TransportError: another rank has failed, or did not come in time.
        """
        with self._lock:
            parts = self._calls[key]
            arrived = self._lock.wait_for(lambda: len(parts) == self.ranks or self.failed is not None, self._patience)
            if len(parts) < self.ranks:
                missing = ", ".join(str(rank) for rank in range(self.ranks) if rank not in parts)
                why = f"a rank has failed: {self.failed!r}" if arrived else f"not within {self._patience:g} s"
                raise TransportError(f"Rank(s) {missing} did not make the call {key[0]!r}: {why}")
            self._taken[key] = self._taken.get(key, 0) + 1
            if self._taken[key] == self.ranks:
                del self._calls[key], self._taken[key]
            return [parts[rank] for rank in range(self.ranks)]

    def fail(self, error: BaseException) -> None:
        """A rank has ended with an error: nobody waits for it any longer."""
        with self._lock:
            self.failed = self.failed or error
            self._lock.notify_all()
            parts = list(self._parts.values())
        for part in parts:
            part.fail(error)

    def _check_order(self, rank: int, name: str) -> None:
        """Without negotiation, every rank has to begin the same sums in the same order."""
        mine = self._orders[rank]
        mine.append(name)
        for other, order in enumerate(self._orders):
            if len(order) >= len(mine) and order[len(mine) - 1] != name:
                raise TransportError(
                    f"Rank {rank} begins the sum {name!r} where rank {other} began {order[len(mine) - 1]!r}"
                )


class InProcess(Transport):
    """One rank of the process; see ``hvdplus.transport.Transport``. Sums must begin in the same order on every rank."""

    name = "in-process"
    negotiates = False
    summable = ("float16", "float32", "float64")

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self.rank = self.local_rank = rank
        self.size = self.local_size = hub.ranks
        self.sent: list[tuple[str, int]] = []
        """(name, bytes) of every sum that this rank began."""

    def start(self, array: Any, name: str, scale: float = 1.0) -> Any:
        self.sent.append((name, array.nbytes))
        return self._hub.bring(self.rank, name, np.array(array)), name, scale

    def done(self, handle: Any) -> bool:
        return self._hub.there(handle[0])

    def wait(self, handle: Any) -> Any:
        key, name, scale = handle
        parts = self._hub.take(key)
        kinds = [(part.shape, part.dtype) for part in parts]
        if len(set(kinds)) > 1:
            raise TransportError(f"Ranks add up unlike arrays as {name!r}. Received, rank by rank: {kinds}")
        with np.errstate(over="ignore", invalid="ignore"):
            total = np.sum(np.stack(parts), axis=0, dtype=parts[0].dtype)
            return total if scale == 1.0 else (total * total.dtype.type(scale)).astype(total.dtype)

    def gather_objects(self, value: Any, what: str = OBJECTS) -> list[Any]:
        told = self._hub.take(self._hub.bring(self.rank, "objects", (what, value)))
        if len({purpose for purpose, _ in told}) > 1:
            purposes = [purpose for purpose, _ in told]
            raise TransportError(f"Ranks gather for different purposes. Received, rank by rank: {purposes}")
        return [theirs for _, theirs in told]

    def split(self, groups: Sequence[Sequence[int]]) -> InProcess:
        """The transport of this rank's group alone; every rank calls it, with the same groups."""
        (mine,) = (ranks for ranks in groups if self.rank in ranks)
        return type(self)(self._hub.part(tuple(mine)), mine.index(self.rank))

    def barrier(self) -> None:
        self.gather_objects(None)

    def shutdown(self) -> None:
        pass


class InProcessNegotiating(InProcess):
    """Sums may begin in any order, and several at once, in place."""

    negotiates = True

    def start_all(self, arrays: Sequence[Any], name: str, scale: float = 1.0) -> Any:
        """As ``start``, for several arrays; ``wait`` returns all sums."""
        return [(array, self.start(array, f"{name}.{i}", scale)) for i, array in enumerate(arrays)]

    def done(self, handle: Any) -> bool:
        return (
            all(super(InProcessNegotiating, self).done(each) for _, each in handle)
            if isinstance(handle, list)
            else (super().done(handle))
        )

    def wait(self, handle: Any) -> Any:
        if not isinstance(handle, list):
            return super().wait(handle)
        for array, each in handle:
            array[...] = super().wait(each)
        return [array for array, _ in handle]


class InProcessOnDevice(InProcess):
    """As NCCL: ``wait`` would make a device wait, and so the exchange decides nothing on the host."""

    waits_on_device = True


ORDERS = {False: InProcess, True: InProcessNegotiating, "on a device": InProcessOnDevice}
"""Whether ranks negotiate the order of sums -> transport."""


def run(
    ranks: int,
    body: Callable[[Any], Result],
    *,
    negotiates: bool | str = False,
    patience_seconds: float = PATIENCE_SECONDS,
) -> list[Result]:
    """``body(transport)`` on every rank, each in a thread of its own; returns their results in rank order.

    Args:
        negotiates: see ``ORDERS``.

    Raises:
        BaseException: the first error of any rank; it also ends the other ranks' waiting.
    """
    kind = ORDERS[negotiates]
    hub = Hub(ranks, in_order=not kind.negotiates, patience_seconds=patience_seconds)
    results: list[Any] = [None] * ranks
    errors: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        try:
            results[rank] = body(kind(hub, rank))
        except BaseException as error:  # noqa: BLE001 - every rank's error counts
            errors[rank] = error
            hub.fail(error)

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}") for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if hub.failed is not None:
        hub.failed.__notes__ = [f"on every rank: { {rank: repr(error) for rank, error in sorted(errors.items())} }"]
        raise hub.failed
    return results
