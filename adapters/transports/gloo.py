"""Sums over Gloo, of tensors on the host, between ranks that have met at a store.

Gloo matches calls by their order alone, and ends the process without a word where ranks make different ones. So every
sum is preceded by a small one, in which ranks compare what they are about to do. It travels while earlier sums do, and
a thread begins each sum when its comparison is over.
"""

from __future__ import annotations

import atexit
import itertools
import pickle
import queue
import sys
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed

from hvdplus.adapters.transports.board import Board, too_long
from hvdplus.adapters.transports.ending import end_soon, on_exception
from hvdplus.transport import OBJECTS, Transport, digest, gather_in_parts, words_of

LOOK_SECONDS = 5.0
"""A rank that has waited so long tells the others what for, and looks again as often for ranks that have ended."""
LOOKS = 3
"""So many looks have to find that a rank has ended: its last sums may still be on their way."""
DEVICE_LOOK_SECONDS = 0.0002
"""A device's sum is asked this often whether it has ended."""
WARN_SECONDS = 60.0
"""A waiting rank prints a line this often."""
END_SECONDS = 1.0
"""What this process waits for its thread at its end."""
GRACE_SECONDS = 60.0
"""So much longer than this transport's patience is that of Gloo, whose messages name nobody."""
dist: Any = torch.distributed
"""Its type leaves out some of what its documentation has."""
cuda: Any = torch.cuda
"""Parts of it have no types."""


class _Comparison(NamedTuple):
    """A sum in which ranks compare what they are about to do."""

    work: Any
    extremes: torch.Tensor
    """Afterwards the largest digest, and the negative of the smallest."""
    words: str
    number: int
    """How many there were before it; the same on all ranks."""


class _Call(NamedTuple):
    """A handle: a sum in flight."""

    work: Future[Any]
    """Its ``torch.distributed.Work``, as soon as the sum has begun."""
    comparison: _Comparison
    array: torch.Tensor
    scale: float
    ended: Any = None
    """The event at which a device's sum ends; None: nobody waits for it on the device."""


class Gloo(Transport):
    """See ``hvdplus.transport.Transport``. Arrays are tensors."""

    negotiates = False
    summable = ("float16", "bfloat16", "float32", "float64")
    name = "torch-gloo"

    def __init__(self, store: Any, rank: int, size: int, timeout_seconds: float) -> None:
        """
        Args:
            store: where the ranks meet, with a prefix of their own: a ``torch.distributed.Store``.
            timeout_seconds: for which a call waits for other ranks before it ends the job.
        """
        self.rank, self.size, self._timeout_seconds = rank, size, timeout_seconds
        self._board = Board(store, rank, size)
        patience = timedelta(seconds=timeout_seconds + GRACE_SECONDS)
        self._main, self._compared, self._sums, self._device_sums = (
            dist.ProcessGroupGloo(dist.PrefixStore(what, store), rank, size, patience)
            for what in ("main", "compared", "sums", "devices")
        )
        self._numbers = {id(self._main): itertools.count(), id(self._compared): itertools.count()}
        self._to_begin: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._last: dict[str, Any] = {}
        """The last work of every kind: what was begun before it has ended before."""
        self._watch: dict[torch.device, Any] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._begin_sums, name="hvdplus-torch", daemon=True)
        self._thread.start()
        on_exception(self._fail)
        atexit.register(self._end)

    # -- sums

    def start(self, array: Any, name: str, scale: float = 1.0) -> _Call:
        comparison = self._compare(_words("sum", array, name, scale), self._compared)
        ended: Any = cuda.Event(enable_timing=True) if self._on_device(array) else None
        call = _Call(Future(), comparison, array, scale, ended)
        self._begin(call)
        return call

    def done(self, handle: _Call) -> bool:
        if handle.ended is not None:
            return bool(handle.ended.query())
        if not handle.work.done() or handle.work.exception() is not None:
            return handle.work.done()
        return bool(handle.comparison.work.is_completed() and handle.work.result().is_completed())

    def wait(self, handle: _Call) -> Any:
        """
        Raises:
            TransportError: another rank makes another call, or none within the time that there is.
            RuntimeError: a rank that the call waits for has ended.
        """
        self._settle(handle.comparison, self._compared)
        if handle.ended is not None:  # all ranks have come to it, so it will end
            handle.work.result().wait()
        else:
            self._wait(handle.work.result(), handle.comparison.words, on_device=handle.array.device.type != "cpu")
        return handle.array.mul_(handle.scale) if handle.scale != 1.0 else handle.array

    def ended(self, handle: _Call) -> Any:
        return handle.ended

    def sum_now(self, array: Any, what: str = "sum") -> Any:
        """Sum over ranks in place, apart from the sums that ``start`` began: for the script's own calls.

        Args:
            what: kind and name of the call, for people; the same on all ranks.
        """
        if array.device.type != "cpu":
            return self.wait(self.start(array, what))
        words = _words(what, array)
        self._agree(words)
        self._wait(dist.all_reduce(array, group=self._main, async_op=True), words)
        return array

    def gather_objects(self, value: Any, what: str = OBJECTS) -> list[Any]:
        words = f"gather of {what}"
        self._agree(words)
        return gather_in_parts(value, what, self.size, lambda part: self._gather(part, words))

    def barrier(self) -> None:
        self._agree("barrier")

    def shutdown(self) -> None:
        self._end()
        atexit.unregister(self._end)

    def _fail(self, error: BaseException) -> None:
        if not self._ended.is_set():
            end_soon()  # Gloo's threads wait for sums that other ranks have not come to
            self._board.fail(error)

    def _begin(self, call: _Call) -> None:
        """Begin a sum: on the host once all ranks have come to it, on a device in the order of the device's work."""
        if call.array.device.type == "cpu":
            self._to_begin.put(call)
        else:
            self._last["device"] = work = dist.all_reduce(call.array, group=self._device_sums, async_op=True)
            call.work.set_result(work)
            if call.ended is not None:
                watch = self._watching(call.array.device)
                call.array.record_stream(watch)  # should nobody wait for the sum, it still may not lose its memory
                with cuda.stream(watch):
                    work.wait()
                    call.ended.record()

    def _on_device(self, array: torch.Tensor) -> bool:
        """Whether the device waits for the sum of this array."""
        return self.waits_on_device and array.device.type == "cuda"

    def _watching(self, device: torch.device) -> Any:
        """A stream that does nothing but wait for sums, so that it shows when they end."""
        if device not in self._watch:
            self._watch[device] = cuda.Stream(device)
        return self._watch[device]

    def _gather(self, value: Any, words: str) -> list[Any]:
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        lengths[self.rank] = len(mine)
        self._wait(dist.all_reduce(lengths, group=self._main, async_op=True), words)
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device="cpu")
        padded[: len(mine)] = mine
        told = [torch.empty_like(padded) for _ in range(self.size)]
        self._wait(self._main.allgather([told], [padded]), words)
        return [pickle.loads(bytes(one[:length].numpy())) for one, length in zip(told, lengths.tolist(), strict=True)]

    def _begin_sums(self) -> None:
        """In the thread: begin the host's sums in order, each as soon as all ranks have come to it."""
        while True:
            call = self._to_begin.get()
            if call is None:
                return
            try:
                self._come_to(call.comparison.work)
                if _alike(call.comparison):
                    self._last["sum"] = dist.all_reduce(call.array, group=self._sums, async_op=True)
                    call.work.set_result(self._last["sum"])
            except BaseException as error:  # of a rank that has ended: `wait` meets it in the comparison, too
                call.work.set_exception(error)

    def _come_to(self, work: Any) -> None:
        """In the thread: wait for a comparison, but no longer than this process lives."""
        while not self._ended.is_set():
            try:
                work.wait(timedelta(seconds=END_SECONDS / 4))
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()
                    return

    def _end(self) -> None:
        """Tell the others, and end all threads, which the interpreter's own end would tear out of Gloo's code.

        Where an exception ends the process, or a sum still waits for others, Gloo's threads are torn all the same.
        """
        self._board.leave()
        self._ended.set()
        self._to_begin.put(None)
        self._thread.join(END_SECONDS)
        deadline = time.monotonic() + END_SECONDS
        while not all(work.is_completed() for work in self._last.values()) and time.monotonic() < deadline:
            time.sleep(0.01)
        if all(work.is_completed() for work in self._last.values()) and not hasattr(sys, "last_value"):
            self._release()

    def _release(self) -> None:
        """End Gloo's threads: nothing is under way."""
        self._main = self._compared = self._sums = self._device_sums = None

    # -- the same call everywhere

    def _compare(self, words: str, group: Any) -> _Comparison:
        mine = digest(words)
        extremes = torch.tensor([mine, -mine], device="cpu")
        work = dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group, async_op=True)
        self._last["call" if group is self._main else "comparison"] = work
        return _Comparison(work, extremes, words, next(self._numbers[id(group)]))

    def _agree(self, words: str) -> None:
        """Raise TransportError on every rank unless all ranks are about to make the same call."""
        self._settle(self._compare(words, self._main), self._main)

    def _settle(self, comparison: _Comparison, group: Any) -> None:
        self._wait(comparison.work, comparison.words)
        if not _alike(comparison):
            hint = " Gradients of several optimizers became ready in another order? "
            hint += "Call synchronize() on one optimizer before the next one's backward()."
            kind = "sums" if group is self._compared else "calls"
            self._board.complain(f"{kind}.{comparison.number}", comparison.words, hint * (kind == "sums"))

    # -- waiting

    def _wait(self, work: Any, words: str, *, on_device: bool = False) -> None:
        """Wait for ``work``, and for the ranks that it needs as long as there is patience.

        ``on_device``: the work's own ``wait`` makes the device's stream wait, and gives up where it is given a time.
        """
        began, warnings, looks = time.monotonic(), 0, 0
        try:
            while not self._is_over(work, words, on_device):
                self._board.wait_in(words)
                seconds, gone = time.monotonic() - began, self._board.gone()
                looks += bool(gone)
                if looks >= LOOKS:
                    raise RuntimeError(f"{gone} {_waits(self.rank, words)}")
                if seconds > self._timeout_seconds:
                    raise too_long(self.rank, seconds, words, self._board.missing(words), self._timeout_seconds)
                if seconds >= (warnings + 1) * WARN_SECONDS:
                    warnings += 1
                    line = f"rank {self.rank} has waited {seconds:.0f} seconds in: {words}."
                    print(f"hvdplus: {line} {self._board.missing(words)}", file=sys.stderr, flush=True)
        finally:
            if time.monotonic() - began >= LOOK_SECONDS:
                self._board.go_on()

    def _is_over(self, work: Any, words: str, on_device: bool) -> bool:
        """Wait for ``LOOK_SECONDS``; whether the work has come to its end. Raises RuntimeError: it has failed."""
        try:
            if on_device:
                deadline = time.monotonic() + LOOK_SECONDS
                while not work.is_completed() and time.monotonic() < deadline:
                    time.sleep(DEVICE_LOOK_SECONDS)
            else:
                work.wait(timedelta(seconds=LOOK_SECONDS))
                return True
        except RuntimeError:
            pass  # it takes longer, or has failed: its own wait says which
        if not work.is_completed():
            return False
        try:
            work.wait()
        except RuntimeError as error:
            gone = self._board.gone() or f"A rank has ended and left no note ({_first_line(error)})."
            raise RuntimeError(f"{gone} {_waits(self.rank, words)}") from error
        return True


def _words(what: str, array: torch.Tensor, name: str = "", scale: float = 1.0) -> str:
    return words_of(what, str(array.dtype).removeprefix("torch."), tuple(array.shape), name, scale)


def _alike(comparison: _Comparison) -> bool:
    return bool(comparison.extremes[0] == -comparison.extremes[1])


def _first_line(error: BaseException) -> str:
    """Without the place in a file that Gloo's messages begin with."""
    return str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0]


def _waits(rank: int, words: str) -> str:
    return f"Rank {rank} waits in: {words}. Every rank has to take the same number of steps and make the same calls."
