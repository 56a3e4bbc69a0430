"""Transport over mpi4py alone: nothing to compile.

MPI has no negotiation, so sums must start in the same order on every rank. One thread makes them one after the other
with blocking calls: a non-blocking all-reduce makes no progress while Python computes, and ignores the tuned
algorithms. The thread works on a communicator of its own, so that the script's own calls, which another thread makes,
cannot mix with it. The main thread waits for both, and looks from time to time whether a rank has left.
"""

from __future__ import annotations

import atexit
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np
from mpi4py import MPI

from hvdplus.compression import Array
from hvdplus.launch import several
from hvdplus.transport import OBJECTS, gather_in_parts

LOOK_SECONDS, LOOKS = 5.0, 12
"""How often who waits looks whether a rank has left, and how many looks after that a call may still take: its bytes may
be on their way."""


class Mpi4py:
    """See ``hvdplus.transport.Transport``. Arrays are anything that NumPy can view without a copy, on the host."""

    name = "mpi4py"
    negotiates = False

    def __init__(self) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError(
                "The mpi4py transport needs an MPI that allows calls from several threads (THREAD_MULTIPLE). Received: "
                f"thread level {MPI.Query_thread()} of {MPI.Get_library_version().split(',')[0]}"
            )
        self._main = MPI.COMM_WORLD.Dup()
        self._sums = MPI.COMM_WORLD.Dup()
        self._half_sum = MPI.Op.Create(_sum_halves, commute=True)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hvdplus-mpi")
        self._calls = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hvdplus-mpi-calls")
        self.rank = self._main.Get_rank()
        self.size = self._main.Get_size()
        on_this_host = self._main.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank = on_this_host.Get_rank()
        self.local_size = on_this_host.Get_size()
        on_this_host.Free()
        _end_job_on_exception(self._main)
        atexit.register(self._leave)

    def start(self, array: Array, name: str, scale: float = 1.0) -> Future[Array]:
        # Within an exchange the order is agreed; that of several depends on the script.
        return self._thread.submit(self._sum, array, self._sums, scale, name if several() else "")

    def done(self, handle: Future[Array]) -> bool:
        return handle.done()

    def wait(self, handle: Future[Any]) -> Any:
        """Raises RuntimeError where a rank has left that the sum waits for."""
        before, looks = (self.rank - 1) % self.size, 0
        while looks < LOOKS:
            try:
                return handle.result(LOOK_SECONDS)
            except TimeoutError:
                looks += self._main.Iprobe(before)
        raise RuntimeError(
            f"Rank {before} has ended, and the other ranks wait for it: every rank has to take as many steps, and make "
            "the same calls, as all others."
        )

    def gather_objects(self, value: Any, what: str = OBJECTS) -> list[Any]:
        gathered = self._calls.submit(gather_in_parts, value, what, self.size, self._main.allgather)
        told: list[Any] = self.wait(gathered)
        return told

    def sum_now(self, array: Array) -> Array:
        """Sum over ranks in place, apart from the sums that ``start`` began: for the script's own calls."""
        return self.wait(self._calls.submit(self._sum, array, self._main))

    def barrier(self) -> None:
        self.wait(self._calls.submit(self._main.Barrier))

    def shutdown(self) -> None:
        self._thread.shutdown()
        self._calls.shutdown()

    def _leave(self) -> None:
        """Tell the next rank. Of ranks in a circle, somebody who waits is next to somebody who has left, if there are
        both."""
        if not MPI.Is_finalized():
            self._main.isend(None, (self.rank + 1) % self.size)

    def _sum(self, array: Array, comm: MPI.Comm, scale: float = 1.0, name: str = "") -> Array:
        """``name``: what the sum is of, where ranks might disagree; RuntimeError on all of them if they do."""
        if name:
            mine = zlib.crc32(name.encode())
            extremes = np.array([mine, -mine])
            comm.Allreduce(MPI.IN_PLACE, extremes, MPI.MAX)
            if extremes[0] != -extremes[1]:
                raise RuntimeError(
                    f"The gradients of several optimizers became ready in another order on another rank: here {name} "
                    "is next. Over mpi4py every rank has to compute them in the same order. Use Horovod, or call "
                    "synchronize() on one optimizer before the next one's backward()."
                )
        buffer = np.asarray(array)
        if buffer.dtype == np.float16:  # MPI knows no half precision: sum raw pairs of bytes with our own operation
            comm.Allreduce(MPI.IN_PLACE, [buffer.view(np.uint16), MPI.UINT16_T], self._half_sum)
        else:
            comm.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM)
        if scale != 1.0:
            np.multiply(buffer, buffer.dtype.type(scale), out=buffer)
        return array


def _sum_halves(incoming: Any, inout: Any, datatype: MPI.Datatype) -> None:
    """MPI reduction of float16, by way of float32: NumPy's own float16 addition is several times slower."""
    a, b = np.frombuffer(incoming, np.float16), np.frombuffer(inout, np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(a, b, out=b, dtype=np.float32, casting="same_kind")


def _end_job_on_exception(comm: MPI.Comm) -> None:
    """End all ranks when one of them fails: the others would wait for it in their next sum for ever."""
    previous: Callable[..., Any] = sys.excepthook

    def end_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        comm.Abort(1)

    sys.excepthook = end_job
