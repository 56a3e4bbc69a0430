"""One vector in the memory of all ranks, read and added to by MPI's one-sided operations: nobody waits for anybody.

Every rank holds a part of the vector, and adds its own changes to all parts and reads them whenever it likes
(``Accumulate`` and ``Get_accumulate``, passive target: sums stay exact, whoever adds at the same time). A second, small
memory on rank 0 counts the exchanges of every rank, so that a rank knows how old what it works with is, and may be held
back until others have come nearer (stale-synchronous, Ho et al., NeurIPS 2013).

On one host that is shared memory. Between hosts MPI needs the target's help, which a thread here gives every
millisecond. Open MPI over TCP has one-sided operations for programs of several threads in its UCX component alone;
``UCX`` asks for it.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from hvdplus.adapters.transports.board import too_long
from hvdplus.transport import TransportError

HELP_SECONDS = 0.001
"""Between two times that this rank's thread helps others."""
LOOK_SECONDS = 0.002
"""Between two looks of a rank that waits for others."""
WARN_SECONDS = 60.0
GONE = 1 << 40
"""Exchanges that a rank which nobody has to wait for counts as, besides its own."""
_open: list[SharedVector] = []
"""In the order in which they were made, which is the same on all ranks."""
UCX = "--mca pml ucx --mca osc ucx --mca pml_ucx_tls any --mca pml_ucx_devices any"
"""What Open MPI's mpirun needs for one-sided operations between hosts over TCP."""


class SharedVector:
    """A float32 vector in the memory of all ranks."""

    def __init__(self, values: np.ndarray, timeout_seconds: float = math.inf) -> None:
        """
        Args:
            values: 1-D float32, equal on all ranks, which all call this.
            timeout_seconds: for which this rank waits for others before it ends the job.

        Raises:
            TransportError: there is no MPI of several ranks and threads, or none with one-sided operations.
        """
        MPI = _mpi()
        self._mpi: Any = MPI
        self._timeout_seconds = timeout_seconds
        self._comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        length = -(-len(values) // self.size)
        ends = [min(rank * length, len(values)) for rank in range(self.size + 1)]
        self._parts = list(pairwise(ends))
        """(First element, the one behind the last) of every rank's part."""
        try:
            self._values = MPI.Win.Allocate(4 * max(1, length), 4, comm=self._comm)
            self._counts = MPI.Win.Allocate(8 * self.size if self.rank == 0 else 8, 8, comm=self._comm)
        except MPI.Exception as error:
            raise TransportError(
                f"This MPI has no one-sided operations between these ranks: {error}. With Open MPI over TCP, "
                f"start the job with mpirun {UCX}"
            ) from None
        mine = values[slice(*self._parts[self.rank])]
        np.frombuffer(self._values, np.float32)[: len(mine)] = mine
        np.frombuffer(self._counts, np.int64)[:] = 0
        self._comm.Barrier()
        self._values.Lock_all()
        self._counts.Lock_all()
        self._ended = threading.Event()
        self._helper = threading.Thread(target=self._help, name="hvdplus-window", daemon=True)
        self._helper.start()
        _open.append(self)
        atexit.unregister(end_all)  # it has to come before MPI's own end, and so be the last to be registered
        atexit.register(end_all)

    def add(self, change: np.ndarray) -> None:
        """Add ``change`` (1-D float32) to the vector; returns when it is there."""
        for rank in self._in_turn():
            part = np.ascontiguousarray(change[slice(*self._parts[rank])])
            if len(part):
                self._values.Accumulate(part, rank, op=self._mpi.SUM)
                self._values.Flush(rank)

    def add_blocks(self, change: np.ndarray, block: int, chosen: np.ndarray) -> int:
        """Add only the blocks of so many elements that are ``chosen`` (their numbers, ascending); returns the bytes
        that were sent."""
        sent = 0
        for rank in self._in_turn():
            first, end = self._parts[rank]
            starts, ends = np.maximum(chosen * block, first), np.minimum((chosen + 1) * block, end)
            for start, stop in zip(*_joined(starts[starts < ends], ends[starts < ends]), strict=True):
                part = np.ascontiguousarray(change[start:stop])
                self._values.Accumulate(part, rank, target=(int(start - first), len(part)), op=self._mpi.SUM)
                sent += part.nbytes
            self._values.Flush(rank)
        return sent

    def read(self, out: np.ndarray) -> None:
        """Overwrite ``out`` (1-D float32) with the vector as it is."""
        nothing = np.zeros(0, np.float32)
        for rank in self._in_turn():
            first, end = self._parts[rank]
            if first < end:
                part = np.empty(end - first, np.float32)
                self._values.Get_accumulate(
                    [nothing, 0, self._mpi.FLOAT], part, rank, (0, len(part), self._mpi.FLOAT), self._mpi.NO_OP
                )
                self._values.Flush(rank)
                out[first:end] = part

    def count(self) -> np.ndarray:
        """Count an exchange of this rank; returns all ranks' counts, this one included."""
        one, before = np.ones(1, np.int64), np.zeros(1, np.int64)
        self._counts.Fetch_and_op(one, before, 0, self.rank, self._mpi.SUM)
        self._counts.Flush(0)
        return self.counts()

    def counts(self) -> np.ndarray:
        """Exchanges of every rank so far."""
        found, nothing = np.zeros(self.size, np.int64), np.zeros(0, np.int64)
        integers = self._mpi.INT64_T
        self._counts.Get_accumulate([nothing, 0, integers], found, 0, (0, self.size, integers), self._mpi.NO_OP)
        self._counts.Flush(0)
        return found

    def wait_until(self, least: int) -> float:
        """Wait until every rank has made ``least`` exchanges; returns the seconds."""

        def slowest() -> str:
            counts = self.counts()
            return f"rank {int(counts.argmin())}, which has made {counts.min()} exchanges of {least}"

        return self._wait(lambda: self.counts().min() >= least, slowest)

    def _wait(self, over: Callable[[], bool], for_whom: Callable[[], str]) -> float:
        """Wait, and say so if that takes long; returns the seconds. Raises TransportError: it takes too long."""
        began, warned = time.monotonic(), 0
        while not over():
            time.sleep(LOOK_SECONDS)
            seconds = time.monotonic() - began
            if seconds > WARN_SECONDS * (warned + 1):
                warned += 1
                print(f"hvdplus: rank {self.rank} has waited {seconds:.0f} seconds for {for_whom()}", flush=True)
            if seconds > self._timeout_seconds:
                raise too_long(self.rank, seconds, "an exchange", f"It waits for {for_whom()}.", self._timeout_seconds)
        return time.monotonic() - began

    def skip(self, exchanges: int) -> None:
        """Count so many exchanges at once."""
        mine = np.array([exchanges], np.int64)  # MPI may read it until the flush
        self._counts.Accumulate(mine, 0, target=(self.rank, 1), op=self._mpi.SUM)
        self._counts.Flush(0)

    def meet(self) -> None:
        """Wait for all ranks: what was added before is in the vector afterwards."""
        request = self._comm.Ibarrier()
        whom = "other ranks to meet; each has to call the same"
        self._wait(lambda: self._mpi.Is_finalized() or request.Test(), lambda: whom)

    def close(self) -> None:
        """End it; all ranks call it. Nobody waits any more for the exchanges of one that does, and it helps the others
        until they do, too."""
        self.skip(GONE)
        self.meet()
        _open.remove(self)
        self._ended.set()
        self._helper.join()
        for memory in (self._values, self._counts):  # else MPI, or Horovod for it, never ends over UCX
            memory.Unlock_all()
        self.meet()  # as soon as one rank ends Horovod, that ends MPI on all of them

    def _in_turn(self) -> list[int]:
        """All ranks, this one first, so that not all turn to the same one."""
        return [(self.rank + away) % self.size for away in range(self.size)]

    def _help(self) -> None:
        while not self._ended.wait(HELP_SECONDS) and not self._mpi.Is_finalized():
            self._comm.Iprobe()


def end_all() -> None:
    """At the end of the job, whatever ends it, and before MPI's own end: this rank leaves all vectors."""
    for vector in [vector for vector in _open if not vector._mpi.Is_finalized()]:
        vector.close()


def _joined(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Neighbouring pieces in one."""
    if not len(starts):
        return starts, ends
    first = np.concatenate([[True], starts[1:] != ends[:-1]])
    return starts[first], ends[np.concatenate([first[1:], [True]])]


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise TransportError(
            f"Ranks that do not wait for each other need mpi4py: {error}. pip install mpi4py"
        ) from None
    if not MPI.Is_initialized() or MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise TransportError(
            "Ranks that do not wait for each other need an MPI that allows calls from several threads "
            "(THREAD_MULTIPLE), started by mpirun or srun; Horovod over Gloo has none."
        )
    return MPI
