"""Transport over ``torch.distributed``: nothing to build, and every launcher of PyTorch's.

Gloo carries what is on the host, NCCL what is on CUDA devices. Both match calls by their order alone; where ranks make
different ones, Gloo ends the process without a word and NCCL hangs. So every sum is preceded by a small one, in which
ranks compare what they are about to do. On the host it travels while earlier sums do, and a thread begins each sum when
its comparison is over. A device's sums begin at once, in the order of the device's own work, and are compared
meanwhile.

Process groups are the transport's own: what the script does with its own groups cannot mix with them.
"""

from __future__ import annotations

import atexit
import itertools
import os
import queue
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed

from hvdplus.adapters.transports.board import Board, open_board
from hvdplus.adapters.transports.rendezvous import meeting
from hvdplus.transport import OBJECTS, TransportError, digest, gather_in_parts, words_of

LOOK_SECONDS = 5.0
"""A rank that has waited so long tells the others what for, and looks again as often for ranks that have ended."""
WARN_SECONDS = 60.0
"""A waiting rank prints a line this often."""
GRACE_SECONDS = 60.0
"""So much longer than this transport's patience is that of the groups, whose messages name nobody."""
dist: Any = torch.distributed
"""Its type leaves out some of what its documentation has."""
_times_joined: Counter[tuple[int, ...]] = Counter()
"""Ranks of a group -> how often they have joined."""


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


class TorchDistributed:
    """See ``hvdplus.transport.Transport``. Arrays are tensors."""

    negotiates = False
    summable = ("float16", "bfloat16", "float32", "float64")

    def __init__(self, timeout_seconds: float, group: Any = None) -> None:
        """Join the process group that there is, or make one of what the launcher says.

        Args:
            timeout_seconds: for which a call waits for other ranks before it ends the job.
            group: a process group of the script, whose ranks alone take part; None: all ranks.

        Raises:
            TransportError: the launcher does not say who this rank is, or a rank does not come.
        """
        self._timeout_seconds = timeout_seconds
        self._owns = not dist.is_initialized()
        if self._owns:
            _begin(timeout_seconds)
        self._ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        self.rank, self.size = dist.get_rank(group), len(self._ranks)
        self._everybody = self.size == dist.get_world_size()
        times, _times_joined[self._ranks] = _times_joined[self._ranks], _times_joined[self._ranks] + 1
        self._board: Board = open_board(self.rank, self._ranks, times)
        on_devices = "nccl" in dist.get_backend_config(group)
        self.name = "torch-nccl" if on_devices else "torch-gloo"
        self._main, self._compared, self._sums = (self._group("gloo") for _ in range(3))
        self._device_sums = self._group("nccl") if on_devices else self._sums
        self._numbers = {id(self._main): itertools.count(), id(self._compared): itertools.count()}
        self._to_begin: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        # A daemon: while it waits for a rank that never comes, this process can end all the same.
        threading.Thread(target=self._begin_sums, name="hvdplus-torch", daemon=True).start()
        hosts = self.gather_objects(socket.gethostname(), "hvd.init (hosts)")
        self.local_rank = hosts[: self.rank].count(hosts[self.rank])
        self.local_size = hosts.count(hosts[self.rank])
        self._board.tell_of_exceptions()
        atexit.register(self._board.leave)

    # -- sums

    def start(self, array: Any, name: str, scale: float = 1.0) -> _Call:
        comparison = self._compare(_words("sum", array, name, scale), self._compared)
        call = _Call(Future(), comparison, array, scale)
        if array.device.type == "cpu":
            self._to_begin.put(call)
        else:
            call.work.set_result(dist.all_reduce(array, group=self._device_sums, async_op=True))
        return call

    def done(self, handle: _Call) -> bool:
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
        self._wait(handle.work.result(), handle.comparison.words)
        return handle.array.mul_(handle.scale) if handle.scale != 1.0 else handle.array

    def sum_now(self, array: Any, what: str = "sum") -> Any:
        """Sum over ranks in place, apart from the sums that ``start`` began: for the script's own calls.

        Args:
            what: kind and name of the call, for people; the same on all ranks.
        """
        words = _words(what, array)
        self._agree(words)
        group = self._main if array.device.type == "cpu" else self._device_sums
        self._wait(dist.all_reduce(array, group=group, async_op=True), words)
        return array

    def gather_objects(self, value: Any, what: str = OBJECTS) -> list[Any]:
        def gather(part: Any) -> list[Any]:
            told: list[Any] = [None] * self.size
            dist.all_gather_object(told, part, group=self._main)
            return told

        self._agree(f"gather of {what}")
        return gather_in_parts(value, what, self.size, gather)

    def barrier(self) -> None:
        self._agree("barrier")

    def split(self, groups: Sequence[Sequence[int]]) -> TorchDistributed:
        """The transport of this rank's group alone; every rank of this transport calls it, with the same groups."""
        (mine,) = (ranks for ranks in groups if self.rank in ranks)
        ranks = [self._ranks[rank] for rank in mine]
        return TorchDistributed(self._timeout_seconds, dist.new_group(ranks, use_local_synchronization=True))

    def shutdown(self) -> None:
        self._board.leave()
        for group in (self._main, self._compared, self._sums, self._device_sums)[: 4 if self._on_devices else 3]:
            dist.destroy_process_group(group)
        if self._owns:
            dist.destroy_process_group()

    @property
    def _on_devices(self) -> bool:
        return self._device_sums is not self._sums

    def _group(self, backend: str) -> Any:
        patience = timedelta(seconds=self._timeout_seconds + GRACE_SECONDS)
        # Ranks that are not among these know nothing of this group.
        return dist.new_group(self._ranks, patience, backend, use_local_synchronization=not self._everybody)

    def _begin_sums(self) -> None:
        """In the thread: begin the host's sums in order, each as soon as all ranks have come to it."""
        while True:
            call = self._to_begin.get()
            try:
                call.comparison.work.wait()
                if _alike(call.comparison):
                    call.work.set_result(dist.all_reduce(call.array, group=self._sums, async_op=True))
            except BaseException as error:  # of a rank that has ended: `wait` meets it in the comparison, too
                call.work.set_exception(error)

    # -- the same call everywhere

    def _compare(self, words: str, group: Any) -> _Comparison:
        mine = digest(words)
        extremes = torch.tensor([mine, -mine])
        work = dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group, async_op=True)
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

    def _wait(self, work: Any, words: str) -> None:
        """Wait for ``work``, and for the ranks that it needs as long as there is patience."""
        began, warnings, told = time.monotonic(), 0, False
        try:
            while True:
                try:
                    work.wait(timedelta(seconds=LOOK_SECONDS))
                    return
                except RuntimeError as error:
                    if work.is_completed():  # it has not only taken long, but failed
                        gone = self._board.gone() or f"A rank has ended and left no note ({_first_line(error)})."
                        raise RuntimeError(f"{gone} {_waits(self.rank, words)}") from error
                self._board.wait_in(words)
                told = True
                seconds, gone = time.monotonic() - began, self._board.gone()
                if gone:
                    raise RuntimeError(f"{gone} {_waits(self.rank, words)}")
                if seconds > self._timeout_seconds:
                    raise TransportError(
                        f"Rank {self.rank} has waited {seconds:.0f} seconds in: {words}. {self._board.missing(words)} "
                        "Where ranks may have to wait longer, raise HVDPLUS_TIMEOUT_SECONDS. Received: "
                        f"{self._timeout_seconds:g}"
                    )
                if seconds >= (warnings + 1) * WARN_SECONDS:
                    warnings += 1
                    line = f"rank {self.rank} has waited {seconds:.0f} seconds in: {words}."
                    print(f"hvdplus: {line} {self._board.missing(words)}", file=sys.stderr, flush=True)
        finally:
            if told:
                self._board.go_on()


def _begin(timeout_seconds: float) -> None:
    """Make the default process group of what the launcher says."""
    environment, patience = meeting(), timedelta(seconds=timeout_seconds)
    os.environ.update(environment)  # where the script's own calls look, too
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=patience))
        # torchrun keeps the store when it restarts ranks, with the addresses of those that are gone.
        store = dist.PrefixStore(f"hvdplus.attempt.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    except dist.DistError as error:
        raise TransportError(
            f"Not all {environment['WORLD_SIZE']} ranks have come to {environment['MASTER_ADDR']}:"
            f"{environment['MASTER_PORT']} within {timeout_seconds:g} seconds (rank {environment['RANK']}): {error}"
        ) from error


def _words(what: str, array: torch.Tensor, name: str = "", scale: float = 1.0) -> str:
    return words_of(what, str(array.dtype).removeprefix("torch."), tuple(array.shape), name, scale)


def _alike(comparison: _Comparison) -> bool:
    return bool(comparison.extremes[0] == -comparison.extremes[1])


def _first_line(error: BaseException) -> str:
    """Without the place in a file that Gloo's messages begin with."""
    return str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0]


def _waits(rank: int, words: str) -> str:
    return f"Rank {rank} waits in: {words}. Every rank has to take the same number of steps and make the same calls."
