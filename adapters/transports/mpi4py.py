"""Transport over mpi4py alone: nothing to compile.

MPI has no negotiation, so sums must start in the same order on every rank. One thread makes them one after the other
with blocking calls: a non-blocking all-reduce makes no progress while Python computes, and ignores the tuned
algorithms. The thread works on a communicator of its own, so that the script's own calls, which another thread makes,
cannot mix with its calls. The main thread waits for both, and checks from time to time whether a rank has left.
"""

from __future__ import annotations

import atexit
import copy
import math
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any, NamedTuple, cast

import numpy as np
from mpi4py import MPI

from hvdplus.adapters.transports.board import missing, too_long
from hvdplus.adapters.transports.ending import on_exception
from hvdplus.transport import OBJECTS, Transport, TransportError, check_same_call, digest, gather_in_parts, words_of

LOOK_SECONDS, LOOKS = 5.0, 12
"""A waiting rank looks every ``LOOK_SECONDS`` whether another rank has left, and gives up after ``LOOKS`` looks that
found so: until then the bytes of a call may still be in flight."""
WARN_SECONDS = 60.0
"""A waiting rank prints a line this often."""
LEAVE_SECONDS = 5.0
"""For which a rank that leaves waits for what another one tells it."""
MEET_SECONDS = 30.0
"""Time after the start of MPI, which all ranks pass together, within which every rank must come to this transport."""
LEAVING_TAG, MEETING_TAG = 7680, 7681
WAITING_TAG = 7682
"""Of notes: the call that a rank has waited in for some time; empty: it goes on."""


class _Call(NamedTuple):
    """A handle: a call in flight, and its description."""

    result: Future[Any]
    words: str


class _Caller:
    """A thread that makes calls one after the other. Python ends without waiting for it, as for a sum that the other
    ranks never come to it would wait for ever; ``Mpi4py._leave`` waits as long as another rank may still come."""

    def __init__(self, name: str) -> None:
        self._to_make: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._last: tuple[weakref.ref[Future[Any]], str] | None = None  # which does not keep what was summed
        self._thread = threading.Thread(target=self._make, name=name, daemon=True)
        self._thread.start()

    def begin(self, make: Callable[[], Any], words: str) -> _Call:
        call = _Call(Future(), words)
        self._last = weakref.ref(call.result), words
        self._to_make.put((call.result, make))
        return call

    def unfinished(self) -> _Call | None:
        """The last call, if it is not over."""
        result = self._last[0]() if self._last else None
        return None if self._last is None or result is None or result.done() else _Call(result, self._last[1])

    def end(self) -> None:
        """Returns when all calls are made."""
        self._to_make.put(None)
        self._thread.join()

    def _make(self) -> None:
        while (call := self._to_make.get()) is not None:
            result, make = call
            try:
                result.set_result(make())
            except BaseException as error:
                result.set_exception(error)
            del call, result, make  # what was summed is not kept until the next call comes


class Mpi4py(Transport):
    """See ``hvdplus.transport.Transport``. Arrays are anything that NumPy can view without a copy, on the host.

    MPI matches calls by their order alone. So every call is preceded by a small all-reduce in which ranks compare what
    they are about to do: its name, the array's shape and its type. This takes some 3 microseconds on one host, and
    between hosts what a message of 16 bytes takes.
    """

    name = "mpi4py"
    negotiates = False
    summable = ("float16", "float32", "float64")

    def __init__(self, chosen_by: str = "the script", patient: bool = False, timeout_seconds: float = math.inf) -> None:
        """
        Args:
            chosen_by: where this rank's choice of the transport comes from, for the message.
            patient: wait for the other ranks without a limit, because the script started MPI, some time ago.
            timeout_seconds: for which a call waits for other ranks before it ends the job.

        Raises:
            TransportError: a rank does not come, because it uses another transport.
            RuntimeError: MPI does not allow calls from several threads.
        """
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError(
                "The mpi4py transport needs an MPI that allows calls from several threads (THREAD_MULTIPLE). Received: "
                f"thread level {MPI.Query_thread()} of {MPI.Get_library_version().split(',')[0]}"
            )
        self.rank = MPI.COMM_WORLD.Get_rank()
        self.size = MPI.COMM_WORLD.Get_size()
        on_exception(lambda _: MPI.COMM_WORLD.Abort(1))  # the others would wait in their next sum for ever
        _meet(chosen_by, patient)
        self._timeout_seconds = timeout_seconds
        self._waits: dict[int, str] = {}
        """Other rank -> the call that it waits in, as far as it has told."""
        self._main = MPI.COMM_WORLD.Dup()
        self._sums = MPI.COMM_WORLD.Dup()
        self._half_sum = MPI.Op.Create(_sum_halves, commute=True)
        self._summer, self._caller = _Caller("hvdplus-mpi"), _Caller("hvdplus-mpi-calls")
        on_this_host = self._main.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank = on_this_host.Get_rank()
        self.local_size = on_this_host.Get_size()
        on_this_host.Free()
        atexit.register(self._leave)

    def start(self, array: Any, name: str, scale: float = 1.0) -> _Call:
        words = _words("sum", array, name, scale)
        return self._summer.begin(lambda: self._sum(array, self._sums, words, scale), words)

    def done(self, handle: _Call) -> bool:
        return handle.result.done()

    def wait(self, handle: _Call) -> Any:
        """
        Raises:
            TransportError: another rank makes another call, or has not come to this one within the time that is set.
            RuntimeError: a rank that the call waits for has left.
        """
        before, looks = (self.rank - 1) % self.size, 0
        began, warnings, told = time.monotonic(), 0, False
        while looks < LOOKS:
            try:
                result = handle.result.result(min(LOOK_SECONDS, self._timeout_seconds))
            except futures.TimeoutError:
                if not told:
                    told = True
                    self._tell(handle.words)
                looks += self._main.Iprobe(before, LEAVING_TAG)
                seconds = time.monotonic() - began
                if seconds > self._timeout_seconds:
                    raise too_long(
                        self.rank, seconds, handle.words, self._missing(handle.words), self._timeout_seconds
                    ) from None
                if seconds >= (warnings + 1) * WARN_SECONDS:
                    warnings += 1
                    line = f"has waited {seconds:.0f} seconds for other ranks in: {handle.words}."
                    _say(self.rank, f"{line} {self._missing(handle.words)}")
            else:
                if told:
                    self._tell("")
                return result
        raise RuntimeError(
            f"Rank {before} has ended, and the other ranks wait for it: every rank has to take the same number of "
            "steps and make the same calls."
        )

    def gather_objects(self, value: Any, what: str = OBJECTS) -> list[Any]:
        def gather() -> list[Any]:
            self._agree(self._main, words)
            return gather_in_parts(value, what, self.size, self._main.allgather)

        words = f"gather of {what}"
        told: list[Any] = self.wait(self._caller.begin(gather, words))
        return told

    def sum_now(self, array: Any, what: str = "sum") -> Any:
        """Sum over ranks in place, apart from the sums that ``start`` began: for the script's own calls.

        Args:
            what: kind and name of the call, for people; the same on all ranks.
        """
        words = _words(what, array)
        return self.wait(self._caller.begin(lambda: self._sum(array, self._main, words), words))

    def barrier(self) -> None:
        def meet() -> None:
            self._agree(self._main, "barrier")
            self._main.Barrier()

        self.wait(self._caller.begin(meet, "barrier"))

    def split(self, groups: Sequence[Sequence[int]]) -> Mpi4py:
        """The transport of this rank's group alone; every rank of this transport calls it, with the same groups."""
        (number,) = (number for number, ranks in enumerate(groups) if self.rank in ranks)
        comm = cast(MPI.Intracomm, self._main.Split(number, self.rank))
        one = copy.copy(self)
        one._main, one._sums = comm, comm.Dup()
        one.rank, one.size, one._waits = comm.Get_rank(), comm.Get_size(), {}
        one._summer, one._caller = _Caller("hvdplus-mpi-group"), _Caller("hvdplus-mpi-group-calls")
        atexit.register(one._leave)
        return one

    def shutdown(self) -> None:
        self._summer.end()
        self._caller.end()

    def _tell(self, words: str) -> None:
        """Leave a note on every other rank."""
        for rank in range(self.size):
            if rank != self.rank:
                self._main.isend(words, rank, WAITING_TAG)

    def _missing(self, words: str) -> str:
        """See ``board.missing``, by the notes that have arrived."""
        self._take_notes()
        return missing({rank: self._waits.get(rank, "") for rank in range(self.size) if rank != self.rank}, words)

    def _take_notes(self) -> None:
        status = MPI.Status()
        while self._main.Iprobe(MPI.ANY_SOURCE, WAITING_TAG, status):
            self._waits[status.Get_source()] = self._main.recv(source=status.Get_source(), tag=WAITING_TAG)

    def _leave(self) -> None:
        """Tell the next rank that this one leaves. In a circle, if some ranks wait and others have left, a waiting rank
        comes next after one that has left. Then it waits for its last calls, and for a moment for the rank before it,
        and takes what has arrived: MPIs warn of messages that nobody received."""
        if MPI.Is_finalized() or self.size == 1:
            return
        self._main.isend(None, (self.rank + 1) % self.size, LEAVING_TAG)
        for last in filter(None, (self._summer.unfinished(), self._caller.unfinished())):
            try:
                self.wait(last)
            except Exception as error:
                if not last.result.done():
                    _say(self.rank, f"ends within {last.words}, which no other rank comes to any more: {error}")
                    MPI.COMM_WORLD.Abort(1)
        before, until = (self.rank - 1) % self.size, time.monotonic() + LEAVE_SECONDS
        while not self._main.Iprobe(before, LEAVING_TAG):
            if time.monotonic() > until:
                return
            time.sleep(0.001)
        self._main.recv(source=before, tag=LEAVING_TAG)
        self._take_notes()

    def _agree(self, comm: MPI.Comm, words: str) -> None:
        """Raise TransportError on every rank unless all ranks of ``comm`` are about to make the same call."""
        mine = digest(words)
        extremes = np.array([mine, -mine])
        comm.Allreduce(MPI.IN_PLACE, extremes, MPI.MAX)
        if extremes[0] != -extremes[1]:
            hint = " Gradients of several optimizers became ready in another order? "
            hint += "Use Horovod, or call synchronize() on one optimizer before the next one's backward()."
            check_same_call(comm.allgather(words), hint if comm is self._sums else "")

    def _sum(self, array: Any, comm: MPI.Comm, words: str, scale: float = 1.0) -> Any:
        self._agree(comm, words)
        buffer = np.asarray(array)
        if buffer.dtype == np.float16:  # MPI knows no half precision: sum raw pairs of bytes with our own operation
            comm.Allreduce(MPI.IN_PLACE, [buffer.view(np.uint16), MPI.UINT16_T], self._half_sum)
        else:
            comm.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM)
        if scale != 1.0:
            np.multiply(buffer, buffer.dtype.type(scale), out=buffer)
        return array


def _words(what: str, array: Any, name: str = "", scale: float = 1.0) -> str:
    view = np.asarray(array)
    return words_of(what, view.dtype.name, view.shape, name, scale)


def _meet(chosen_by: str, patient: bool) -> None:
    """Wait until the previous rank has come to this transport, too.

    Raises:
        TransportError: it has not come within ``MEET_SECONDS``; never if ``patient``.
    """
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    before, began, warnings = (rank - 1) % size, time.monotonic(), 0
    # Point to point: MPI could match a collective call with a call of a rank that has chosen Horovod.
    world.Isend([np.zeros(0, np.uint8), MPI.BYTE], (rank + 1) % size, MEETING_TAG).Free()
    while not world.Iprobe(before, MEETING_TAG):
        time.sleep(0.002)
        seconds = time.monotonic() - began
        if seconds >= MEET_SECONDS and not patient:
            raise TransportError(
                f"Rank {before} has not come to the transport mpi4py within {MEET_SECONDS:g} seconds after MPI "
                f"started. Every rank needs the same transport; rank {rank} has mpi4py from {chosen_by}. Set "
                "HVDPLUS_TRANSPORT on all ranks or on none (mpirun passes it on to other hosts with "
                "-x HVDPLUS_TRANSPORT), and install the same packages everywhere."
            )
        if seconds >= (warnings + 1) * WARN_SECONDS:
            warnings += 1
            _say(rank, f"has waited {seconds:.0f} seconds in hvd.init() for rank {before} to choose mpi4py, too")
    world.Recv([np.zeros(0, np.uint8), MPI.BYTE], before, MEETING_TAG)


def _say(rank: int, line: str) -> None:
    print(f"hvdplus: rank {rank} {line}", file=sys.stderr, flush=True)


def _sum_halves(incoming: Any, inout: Any, datatype: MPI.Datatype) -> None:
    """MPI reduction of float16, by way of float32: NumPy's own float16 addition is several times slower."""
    a, b = np.frombuffer(incoming, np.float16), np.frombuffer(inout, np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(a, b, out=b, dtype=np.float32, casting="same_kind")
