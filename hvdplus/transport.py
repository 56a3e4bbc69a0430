"""What carries the bytes, as the core sees it: one sum over all ranks, and a few words at the start.

Implementations live in ``hvdplus.adapters``: Horovod (PyTorch, TensorFlow), mpi4py, and local (one rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from hvdplus.compression import Array


class TransportError(RuntimeError):
    """The transport is missing, was not started, or cannot do what was asked."""


class NeedsHorovod(TransportError, AttributeError):
    """A name of Horovod's in a job that runs without it; an AttributeError too, so that ``hasattr`` tells."""


class Transport(Protocol):
    """Every rank makes the same calls in the same order; only Horovod, which negotiates, forgives another order."""

    name: str
    """For people: ``horovod-mpi``, ``horovod-gloo``, ``mpi4py``, ``local``."""
    rank: int
    size: int
    local_rank: int
    """Rank among those on the same host."""
    local_size: int
    negotiates: bool
    """Whether ranks may start sums in any order, and small ones that are ready together are made as one."""

    @property
    def summable(self) -> Sequence[str]:
        """Types of arrays that it can add up, such as ``float16``."""

    def start(self, array: Array, name: str, scale: float = 1.0) -> Any:
        """Begin to sum ``array`` over all ranks, in place where the framework allows; returns a handle at once.

        The sum is multiplied by ``scale``, in the array's precision.

        ``name`` is the same on every rank and unique among sums in flight.
        """

    def done(self, handle: Any) -> bool:
        """Whether the sum that ``start`` began, and nobody has waited for yet, is there. At once."""

    def wait(self, handle: Any) -> Array:
        """The sum that ``start`` began, bit-identical on every rank."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable ``value``, in rank order, on every rank."""

    def barrier(self) -> None:
        """Return when every rank has arrived."""

    def shutdown(self) -> None:
        """End; nothing may be in flight."""


class Grouping(Transport, Protocol):
    """One that takes several arrays at once; Horovod in PyTorch."""

    def start_all(self, arrays: Sequence[Array], name: str, scale: float = 1.0) -> Any:
        """As ``start``, for arrays of one type; ``wait`` returns all sums."""


class World(NamedTuple):
    """What ``init`` learned about the job. Equal on every rank but for the transport's ranks."""

    transport: Transport
    hosts: dict[str, int]
    """Host name -> number of ranks there."""
    collective: str
    """Algorithm of large all-reduces: ``ring``, ..."""
    cross_rank: int
    """Index of this rank's host among ``hosts``."""
    differences: tuple[str, ...]
    """In what the ranks' CPUs or libraries differ; empty where bits can be expected to agree."""
