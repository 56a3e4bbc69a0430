"""The transport as the core sees it: sums over all ranks in every step, and gathered objects at the start.

Implementations live in ``hvdplus.adapters``: Horovod (PyTorch, TensorFlow), mpi4py, torch.distributed (PyTorch), and
local (one rank).
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

OBJECTS = "objects"
"""Purpose of a gather whose caller names none."""
PART_BYTES = 1 << 28
"""Most bytes of objects in one message, all ranks' together: MPI and Horovod count bytes with 31 bits."""


class TransportError(RuntimeError):
    """The transport is missing, was not started, or cannot do what was asked."""


class NeedsHorovod(TransportError, AttributeError):
    """A name of Horovod's in a job that runs without it; an AttributeError too, so that ``hasattr`` works."""


class Transport(Protocol):
    """Every rank makes the same calls in the same order; a transport that negotiates (Horovod) allows any order.

    It carries any framework's arrays. A handle does not know their type, so ``wait`` returns ``Any``.
    """

    name: str
    """For messages: ``horovod-mpi``, ``horovod-gloo``, ``mpi4py``, ``torch-gloo``, ``torch-nccl``, ``local``."""
    rank: int
    size: int
    local_rank: int
    """Rank among those on the same host."""
    local_size: int
    negotiates: bool
    """Whether ranks may start sums in any order, and small sums that are ready together are fused."""
    part: tuple[int, ...] = ()
    """The job's ranks that these are, if they are not all; empty: they are."""
    two_level: Any = None
    """``hvdplus.exchange.two_level.TwoLevel`` of these ranks, if there is one."""
    splits_unasked: bool = True
    """Whether groups of ranks may be made for two levels that nobody has asked for."""
    patience: Any = None
    """``adapters.transports.ending.Patience``, where the library itself does not end calls that wait too long."""
    summable: Sequence[str]
    """Types of arrays that the transport can add up, such as ``float16``."""
    waits_on_device: bool = False
    """Whether ``wait`` makes the device wait for a sum, not the host (NCCL). The host then runs ahead."""

    def start(self, array: Any, name: str, scale: float = 1.0) -> Any:
        """Begin to sum ``array`` over all ranks, in place where the framework allows; return a handle at once.

        The sum is multiplied by ``scale``, in the array's precision.

        ``name`` is the same on every rank and unique among sums in flight.
        """

    def done(self, handle: Any) -> bool:
        """Whether the sum that ``start`` began is complete; returns at once. Not for sums already waited for."""

    def wait(self, handle: Any) -> Any:
        """The sum that ``start`` began, bit-identical on every rank."""

    def ended(self, handle: Any) -> Any:
        """The event on a device at which the sum ends; None: it is not known."""
        return None

    def gather_objects(self, value: Any, what: str = OBJECTS) -> list[Any]:
        """Every rank's picklable ``value``, in rank order, on every rank; of any length.

        Args:
            what: the purpose, for messages; the same on all ranks.

        Raises:
            TransportError: ranks gather for different purposes; on every rank.
        """

    def barrier(self) -> None:
        """Return when every rank has arrived."""

    def shutdown(self) -> None:
        """End this transport alone; no sum may be in flight."""

    def end(self) -> None:
        """End it, and those of its two levels."""
        if self.two_level:
            self.two_level.shutdown()
        self.shutdown()


class Around(Transport):
    """Base of transports that sum by way of another one, in a way of their own; all else is that one's."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.name, self.part = transport.name, transport.part
        self.rank, self.size = transport.rank, transport.size
        self.local_rank, self.local_size = transport.local_rank, transport.local_size
        self.negotiates, self.summable = transport.negotiates, transport.summable

    def gather_objects(self, value: Any, what: str = OBJECTS) -> list[Any]:
        return self._transport.gather_objects(value, what)

    def barrier(self) -> None:
        self._transport.barrier()

    def shutdown(self) -> None:
        self._transport.end()


class Grouping(Transport, Protocol):
    """A transport that sums several arrays in one call; Horovod in PyTorch."""

    def start_all(self, arrays: Sequence[Any], name: str, scale: float = 1.0) -> Any:
        """As ``start``, for arrays of one type; ``wait`` returns all sums."""


class World(NamedTuple):
    """Facts of the job that ``init`` collects. Equal on every rank but for the transport's ranks and ``cross_rank``."""

    transport: Transport
    hosts: dict[str, int]
    """Host name -> number of ranks there."""
    collective: str
    """Algorithm of large all-reduces: ``ring``, ..."""
    cross_rank: int
    """Index of this rank's host among ``hosts``."""
    differences: tuple[str, ...]
    """Differences between the ranks' CPUs or libraries; empty: results can be expected to agree in every bit."""


def words_of(what: str, dtype: str, shape: tuple[int, ...], name: str = "", scale: float = 1.0) -> str:
    """Description of a call, compared between ranks and used in messages: ``sum 'hvdplus0.b1' of float32 (3,)``."""
    named = f" {name!r}" if name else ""
    scaled = f", times {scale!r}" if scale != 1.0 else ""
    return f"{what}{named} of {dtype} {shape}{scaled}"


@functools.lru_cache(maxsize=4096)
def digest(words: str) -> int:
    """A hash of 63 bits: its negative is an int64, too."""
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big") >> 1


def check_same_call(calls: Sequence[str], hint: str = "") -> None:
    """Raise TransportError, which quotes two ranks, unless all ``calls`` (one per rank) are equal."""
    for rank, call in enumerate(calls):
        if call != calls[0]:
            raise TransportError(
                f"Ranks make different calls: rank 0: {calls[0]}, rank {rank}: {call}. Every rank has to make the same "
                f"calls in the same order, with tensors of the same shape and type.{hint}"
            )


def gather_in_parts(value: Any, what: str, size: int, gather: Callable[[Any], list[Any]]) -> list[Any]:
    """``Transport.gather_objects`` over a ``gather`` that can take no more than ``PART_BYTES`` from all ranks together.

    Short values travel in one message.

    Args:
        size: number of ranks.
        gather: returns every rank's object, in rank order.
    """
    mine = memoryview(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    part_bytes = max(PART_BYTES // size, 1)
    told = gather((what, len(mine), bytes(mine[:part_bytes])))
    check_same_call([f"gather of {theirs}" for theirs, _, _ in told])
    parts = [[first] for _, _, first in told]
    for at in range(part_bytes, max(length for _, length, _ in told), part_bytes):
        for rank, part in enumerate(gather(bytes(mine[at : at + part_bytes]))):
            parts[rank].append(part)
    return [pickle.loads(b"".join(theirs)) for theirs in parts]


def check_root(transport: Transport, root_rank: int) -> None:
    """Raise ValueError where there is no rank ``root_rank``."""
    if not 0 <= root_rank < transport.size:
        raise ValueError(f"root_rank must be from 0 to {transport.size - 1}. Received: {root_rank}")


def broadcast_object(transport: Transport, value: Any, root_rank: int, what: str = OBJECTS) -> Any:
    """Rank ``root_rank``'s picklable ``value`` on every rank; of any length. Other ranks' values are ignored."""
    return transport.gather_objects(value if transport.rank == root_rank else None, what)[root_rank]


def broadcast_each(transport: Transport, values: Iterable[Any], root_rank: int, what: str = OBJECTS) -> Iterator[Any]:
    """Rank ``root_rank``'s arrays on every rank, one after the other; iterate to the end on every rank.

    Small arrays share a message; at most ``PART_BYTES`` and one array more are in memory twice.

    Args:
        values: arrays or tensors with ``nbytes``; only the root's are used.
    """
    source = iter(values)
    more = True
    while more:
        group: list[Any] = []
        if transport.rank == root_rank:
            length = 0
            more = False
            for value in source:
                group.append(value)
                length += value.nbytes
                if length >= PART_BYTES:
                    more = True
                    break
        group, more = broadcast_object(transport, (group, more), root_rank, what)
        yield from group
