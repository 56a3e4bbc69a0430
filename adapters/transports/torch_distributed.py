"""Transport over ``torch.distributed``: nothing to build, and every launcher of PyTorch's.

Gloo carries what is on the host (``gloo.py``), NCCL what is on CUDA devices, if the process group has it. What the
script does with its own process groups cannot mix with these.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from hvdplus.adapters.transports.gloo import GRACE_SECONDS, Gloo, dist
from hvdplus.adapters.transports.rendezvous import meeting
from hvdplus.transport import TransportError

POLL_SECONDS, SLOWEST_POLL_SECONDS = 0.01, 0.5
"""Between two looks into the store, at first and later."""
_times_begun = itertools.count()
"""How often this process has made the default process group: the store keeps what was said before."""
_times_joined: Counter[tuple[int, ...]] = Counter()
"""Ranks of a group -> how often they have joined."""


class TorchDistributed(Gloo):
    """See ``hvdplus.transport.Transport``. Arrays are tensors."""

    def __init__(self, timeout_seconds: float, group: Any = None) -> None:
        """Join the process group that there is, or make one of what the launcher says.

        Args:
            timeout_seconds: for which a call waits for other ranks before it ends the job.
            group: a process group of the script, whose ranks alone take part; None: all ranks.

        Raises:
            TransportError: the launcher does not say who this rank is, or a rank does not come.
        """
        self._owns = not dist.is_initialized()
        if self._owns:
            _begin(timeout_seconds)
        self._join(tuple(dist.get_process_group_ranks(group or dist.group.WORLD)), timeout_seconds)
        if "nccl" in dist.get_backend_config(group):
            self._use_nccl()

    def _use_nccl(self) -> None:
        patience = timedelta(seconds=self._timeout_seconds + GRACE_SECONDS)
        everybody = self.size == dist.get_world_size()
        self.name = "torch-nccl"
        self.waits_on_device = not {"TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"} & os.environ.keys()
        # Ranks that are not among these know nothing of this group.
        self._device_sums = dist.new_group(self._ranks, patience, "nccl", use_local_synchronization=not everybody)

    def _join(self, ranks: tuple[int, ...], timeout_seconds: float) -> None:
        self._ranks = ranks
        self.part = () if len(ranks) == dist.get_world_size() else ranks
        times, _times_joined[ranks] = _times_joined[ranks], _times_joined[ranks] + 1
        default = dist.distributed_c10d._get_default_store()
        if default is None:
            raise TransportError(
                "hvdplus makes a process group of its own, and this one has no store to meet by. Use gloo or nccl. "
                f"Received: backend {dist.get_backend()}"
            )
        store = dist.PrefixStore(f"hvdplus.{'.'.join(map(str, ranks))}.{times}", default)
        super().__init__(store, ranks.index(dist.get_rank()), len(ranks), timeout_seconds)
        hosts = self.gather_objects(socket.gethostname(), "hvd.init (hosts)")
        self.local_rank = hosts[: self.rank].count(hosts[self.rank])
        self.local_size = hosts.count(hosts[self.rank])

    def split(self, groups: Sequence[Sequence[int]]) -> TorchDistributed:
        """The transport of this rank's group alone; every rank of this transport calls it, with the same groups."""
        (mine,) = (ranks for ranks in groups if self.rank in ranks)
        part: TorchDistributed = TorchDistributed.__new__(TorchDistributed)
        part._owns = False
        part._join(tuple(self._ranks[rank] for rank in mine), self._timeout_seconds)
        if self.name == "torch-nccl":
            part._use_nccl()
        return part

    def _release(self) -> None:
        if self.name == "torch-nccl":
            with contextlib.suppress(ValueError):  # the script has ended it, with all others
                dist.destroy_process_group(self._device_sums)
        super()._release()
        if self._owns and dist.is_initialized():
            dist.destroy_process_group()


def _begin(timeout_seconds: float) -> None:
    """Make the default process group of what the launcher says."""
    environment, patience = meeting(), timedelta(seconds=timeout_seconds)
    os.environ.update(environment)  # where the script's own calls look, too
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=patience))
        times = str(next(_times_begun))
        if "TORCHELASTIC_RUN_ID" in os.environ:
            times = start_of_ranks(store, rank, size, timeout_seconds)
        store = dist.PrefixStore(f"hvdplus.start.{times}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    except (dist.DistError, TimeoutError) as error:
        raise TransportError(
            f"Not all {environment['WORLD_SIZE']} ranks have come to {environment['MASTER_ADDR']}:"
            f"{environment['MASTER_PORT']} within {timeout_seconds:g} seconds (rank {environment['RANK']}): {error}"
        ) from error


def start_of_ranks(store: Any, rank: int, size: int, timeout_seconds: float) -> str:
    """A name for this start of a job's ranks, equal on all of them, that no start before had.

    torchrun keeps the store when it starts ranks again, with the addresses of those that are gone. Its count of
    restarts does not tell starts apart: each node counts the failures of its own ranks. So rank 0 takes the next
    number. Others may still read the last one; they answer it with a word, and go on when a rank 0 repeats this word.

    Raises:
        TimeoutError, or torch.distributed.DistError: not all ranks came in time.
    """
    numbers, word = "hvdplus.starts", uuid.uuid4().hex
    if rank == 0:
        number = store.add(numbers, 1)
        answers = [f"hvdplus.start.{number}.{other}" for other in range(1, size)]
        if answers:
            store.wait(answers, timedelta(seconds=timeout_seconds))
        store.set(f"hvdplus.start.{number}.all", ",".join(store.get(answer).decode() for answer in answers))
        return str(number)
    answered, pause, deadline = -1, POLL_SECONDS, time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        number = store.add(numbers, 0)
        if number != answered:
            store.set(f"hvdplus.start.{number}.{rank}", word)
            answered = number
        heard = f"hvdplus.start.{number}.all"
        if store.check([heard]) and word in store.get(heard).decode().split(","):
            return str(number)
        time.sleep(pause)
        pause = min(1.2 * pause, SLOWEST_POLL_SECONDS)
    raise TimeoutError(f"rank 0 has not answered within {timeout_seconds:g} seconds")
