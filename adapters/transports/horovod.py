"""Transport over Horovod, which negotiates names between ranks, so that sums may start in any order.

Each framework has its own binding with its own native library; only one of the two may run in a process.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import pickle
from collections.abc import MutableMapping, Sequence
from types import ModuleType
from typing import Any, Self

import numpy as np

from hvdplus.adapters.transports.ending import Patience, end_soon, on_exception
from hvdplus.transport import OBJECTS, Transport, TransportError, World, gather_in_parts

SHUTDOWN = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
WARN_SECONDS = 60
"""Horovod names ranks that others have waited for so long; its own default."""


BLOCKING = frozenset(
    f"{kind}{call}{in_place}"
    for kind in ("", "grouped_")
    for call in ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
    for in_place in ("", "_")
) | {"barrier", "synchronize", "broadcast_object", "allgather_object", "broadcast_parameters", "broadcast_variables"}
"""Horovod's functions that wait for other ranks. (``join`` may do so for as long as others train.)"""


def watched(name: str, function: Any, world: World | None) -> Any:
    """Horovod's function of that name, for a script's own calls; see ``Patience``."""
    patience = world.transport.patience if world else None
    if patience is None or name not in BLOCKING:
        return function

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with patience.waits(f"hvd.{name}"):
            return function(*arguments, **keywords)

    return call


def limit_waiting(seconds: float, environ: MutableMapping[str, str] = os.environ) -> None:
    """Make Horovod end the job if some ranks have waited for others so long in one call; what the user has set for its
    stall check stays. Horovod prints before which ranks are missing in which calls. (Over Gloo, Horovod 0.28.1 does
    neither; see ``Patience``.)"""
    if math.isfinite(seconds):
        environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(min(WARN_SECONDS, _limit(seconds) // 2)))
        environ.setdefault(SHUTDOWN, str(_limit(seconds)))


def _limit(seconds: float) -> int:
    """As Horovod wants it."""
    return max(2, math.ceil(seconds))


class Horovod(Transport):
    """Base of both bindings. ``binding`` is ``horovod.torch`` or ``horovod.tensorflow``."""

    negotiates = True
    summable = ("float16", "float32", "float64")

    def __init__(self, binding: ModuleType, timeout_seconds: float, *arguments: Any, **keywords: Any) -> None:
        """Starts Horovod; the arguments are those of ``horovod.init``. ``timeout_seconds``: see ``limit_waiting``."""
        self.binding: Any = binding
        self.binding.init(*arguments, **keywords)
        self._set: dict[str, Any] = {}
        """The process set, as an argument of Horovod's functions; none: all ranks."""
        self.name = "horovod-mpi" if self.binding.mpi_enabled() else "horovod-gloo"
        self.rank = self.binding.rank()
        self.size = self.binding.size()
        self.local_rank = self.binding.local_rank()
        self.local_size = self.binding.local_size()
        if self.size > 1:
            on_exception(lambda _: end_soon())  # Horovod's orderly shutdown, at exit, can wait for other ranks
        self.patience: Patience | None = None
        """Where Horovod's own stall check does not work: over Gloo never; over MPI not while a rank's process stands
        still, for which the check itself waits. Where it works, it comes first."""
        if self.size > 1 and math.isfinite(timeout_seconds):
            over_gloo = self.name == "horovod-gloo"
            if over_gloo or os.environ.get(SHUTDOWN) == str(_limit(timeout_seconds)):  # and not the user's own
                self.patience = Patience(self.rank, timeout_seconds, grace=0.0 if over_gloo else 2 + timeout_seconds)
        self._words: dict[Any, str] = {}
        """Handle -> its call, for ``Patience``."""

    def gather_objects(self, value: Any, what: str = OBJECTS) -> list[Any]:
        if self.size == 1:
            return [value]
        # Horovod's default name contains the object's type, so ranks with different types would wait for ever. With one
        # name for all purposes, ranks that gather for different purposes meet and get an error.
        gather = functools.partial(self.binding.allgather_object, name="hvdplus.objects")
        with self._waits(f"gather of {what}"):
            return gather_in_parts(value, what, self.size, self._gather_within if self._set else gather)

    def _gather_within(self, value: Any) -> list[Any]:
        """Horovod's own gathering of objects is for all ranks."""
        mine = np.frombuffer(pickle.dumps(value), np.uint8)
        lengths = self._all_gather(np.array([len(mine)]), "hvdplus.lengths")
        everyone = self._all_gather(mine, "hvdplus.objects")
        return [pickle.loads(theirs.tobytes()) for theirs in np.split(everyone, np.cumsum(lengths)[:-1])]

    def _all_gather(self, array: np.ndarray, name: str) -> np.ndarray:
        """Every rank's array, end to end."""
        raise NotImplementedError

    def within(self, process_set: Any) -> Self:
        """The same for the ranks of a Horovod process set alone.

        Raises:
            ValueError: this rank is not among them.
        """
        if not process_set.included():
            raise ValueError(f"This rank, {self.binding.rank()}, is not in the process set. Received: {process_set}")
        inside = copy.copy(self)
        inside.part = tuple(process_set.ranks)
        inside._set, inside.rank, inside.size = {"process_set": process_set}, process_set.rank(), process_set.size()
        return inside

    def _waits(self, words: str) -> contextlib.AbstractContextManager[None]:
        return self.patience.waits(words) if self.patience else contextlib.nullcontext()

    def barrier(self) -> None:
        if not hasattr(self.binding, "barrier"):
            self.gather_objects(None)
            return
        with self._waits("barrier"):
            self.binding.barrier(**self._set)

    def shutdown(self) -> None:
        if self._set:  # which ends with all others
            return
        if self.patience:
            self.patience.close()
        self.binding.shutdown()


class HorovodTorch(Horovod):
    """PyTorch: sums in place, asynchronously."""

    splits_unasked = False
    """Groups are process sets, of which the script may want some itself."""

    def start(self, array: Any, name: str, scale: float = 1.0) -> Any:
        self._check_size()
        handle = self.binding.allreduce_async_(
            array, op=self.binding.Sum, name=name, postscale_factor=scale, **self._set
        )
        return self._named(handle, name)

    def start_all(self, arrays: Sequence[Any], name: str, scale: float = 1.0) -> Any:
        """As ``start``, for several arrays of one type at once; ``wait`` returns all sums."""
        self._check_size()
        handle = self.binding.grouped_allreduce_async_(
            arrays, op=self.binding.Sum, name=name, postscale_factor=scale, **self._set
        )
        return self._named(handle, name)

    def split(self, groups: Sequence[Sequence[int]]) -> HorovodTorch:
        """The transport of this rank's group alone; every rank calls it, with the same groups.

        Raises:
            ValueError: Horovod was started without process sets that are made later, or this is one.
        """
        if self._set:
            raise ValueError("A process set of Horovod's has no process sets, and so no two levels.")
        if os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") not in ("1", "true", "True"):
            raise ValueError(
                "Two levels over Horovod are process sets: set HOROVOD_DYNAMIC_PROCESS_SETS=1 before hvd.init(), or "
                "use torch.distributed or mpi4py (HVDPLUS_TRANSPORT=torch or mpi4py)."
            )
        sets = [self.binding.add_process_set(list(ranks)) for ranks in groups]
        return next(self.within(one) for one in sets if one.included())

    def _all_gather(self, array: np.ndarray, name: str) -> np.ndarray:
        import torch

        found: np.ndarray = self.binding.allgather(torch.from_numpy(array.copy()), name=name, **self._set).numpy()
        return found

    def _check_size(self) -> None:
        if not self._set and self.binding.size() != self.size:
            raise TransportError(
                f"The job had {self.size} ranks when hvd.init() was called and has {self.binding.size()} now. In "
                "elastic jobs, wrap the training with hvdplus's own hvd.elastic.run, so that optimizers follow."
            )

    def done(self, handle: Any) -> bool:
        return bool(self.binding.poll(handle))

    def wait(self, handle: Any) -> Any:
        with self._waits(self._words.pop(handle, "a sum")):
            return self.binding.synchronize(handle)

    def _named(self, handle: Any, name: str) -> Any:
        if self.patience:
            self._words[handle] = f"sum {name!r}"
        return handle


class HorovodTensorFlow(Horovod):
    """TensorFlow: a sum is an op; the graph waits where the sum is used."""

    def start(self, array: Any, name: str, scale: float = 1.0) -> Any:
        in_a_graph = hasattr(array, "graph")  # whose steps ``GraphExchange`` watches
        with contextlib.nullcontext() if in_a_graph else self._waits(f"sum {name!r}"):
            return self.binding.allreduce(
                array, op=self.binding.Sum, name=name, postscale_factor=scale, ignore_name_scope=True, **self._set
            )

    def _all_gather(self, array: np.ndarray, name: str) -> np.ndarray:
        found: np.ndarray = self.binding.allgather(array, name=name, ignore_name_scope=True, **self._set).numpy()
        return found

    def done(self, handle: Any) -> bool:
        return True

    def wait(self, handle: Any) -> Any:
        return handle
