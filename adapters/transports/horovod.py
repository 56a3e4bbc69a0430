"""Transport over Horovod, which negotiates names between ranks, so that sums may start in any order.

Each framework has its own binding with its own native library; only one of the two may run in a process.
"""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any

from hvdplus.transport import OBJECTS, TransportError, gather_in_parts

SECONDS_TO_END = 20
"""Time that a failed rank has for an orderly exit. Then it is killed, so that the others stop waiting for it."""


class Horovod:
    """Base of both bindings. ``binding`` is ``horovod.torch`` or ``horovod.tensorflow``."""

    negotiates = True
    summable = ("float16", "float32", "float64")

    def __init__(self, binding: ModuleType, *arguments: Any, **keywords: Any) -> None:
        """Starts Horovod; the arguments are those of ``horovod.init``."""
        self.binding: Any = binding
        self.binding.init(*arguments, **keywords)
        self.name = "horovod-mpi" if self.binding.mpi_enabled() else "horovod-gloo"
        self.rank = self.binding.rank()
        self.size = self.binding.size()
        self.local_rank = self.binding.local_rank()
        self.local_size = self.binding.local_size()
        if self.size > 1:
            _end_soon_on_exception()

    def gather_objects(self, value: Any, what: str = OBJECTS) -> list[Any]:
        if self.size == 1:
            return [value]
        # Horovod's default name contains the object's type, so ranks with different types would wait for ever. With one
        # name for all purposes, ranks that gather for different purposes meet and get an error.
        gather = functools.partial(self.binding.allgather_object, name="hvdplus.objects")
        return gather_in_parts(value, what, self.size, gather)

    def barrier(self) -> None:
        self.binding.barrier() if hasattr(self.binding, "barrier") else self.gather_objects(None)

    def shutdown(self) -> None:
        self.binding.shutdown()


class HorovodTorch(Horovod):
    """PyTorch: sums in place, asynchronously."""

    def start(self, array: Any, name: str, scale: float = 1.0) -> Any:
        self._check_size()
        return self.binding.allreduce_async_(array, op=self.binding.Sum, name=name, postscale_factor=scale)

    def start_all(self, arrays: Sequence[Any], name: str, scale: float = 1.0) -> Any:
        """As ``start``, for several arrays of one type at once; ``wait`` returns all sums."""
        self._check_size()
        return self.binding.grouped_allreduce_async_(arrays, op=self.binding.Sum, name=name, postscale_factor=scale)

    def _check_size(self) -> None:
        if self.binding.size() != self.size:
            raise TransportError(
                f"The job had {self.size} ranks when hvd.init() was called and has {self.binding.size()} now. In "
                "elastic jobs, wrap the training with hvdplus's own hvd.elastic.run, so that optimizers follow."
            )

    def done(self, handle: Any) -> bool:
        return bool(self.binding.poll(handle))

    def wait(self, handle: Any) -> Any:
        return self.binding.synchronize(handle)


class HorovodTensorFlow(Horovod):
    """TensorFlow: a sum is an op; the graph waits where the sum is used."""

    def start(self, array: Any, name: str, scale: float = 1.0) -> Any:
        return self.binding.allreduce(
            array, op=self.binding.Sum, name=name, postscale_factor=scale, ignore_name_scope=True
        )

    def done(self, handle: Any) -> bool:
        return True

    def wait(self, handle: Any) -> Any:
        return handle


def _end_soon_on_exception() -> None:
    """Bound the time that a failed rank takes to exit.

    Horovod's orderly shutdown, at exit, tells the other ranks; but it can hang while they wait for this one, and then
    the launcher never learns that a rank has failed. A timer of the operating system also works while the interpreter
    is being taken down: it ends the process, and so the job.
    """
    previous: Callable[..., Any] = sys.excepthook

    def bounded(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        if not hasattr(sys, "ps1"):  # an interactive session goes on
            sys.stdout.flush()
            sys.stderr.flush()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS_TO_END)

    sys.excepthook = bounded
