"""The engine's interface to an eager framework (NumPy, PyTorch), besides ``Ops``.

Its methods find the gradients of one step, pack them into buckets and write the means back. A framework that compiles
its steps (TensorFlow) uses the engine's pure functions and keeps its arrays in variables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from hvdplus.compression import Ops
from hvdplus.compression.ops import Arithmetic
from hvdplus.control.meter import StepMeter
from hvdplus.exchange.bucket import Bucket
from hvdplus.exchange.sketch import Part


class Memory(Arithmetic, Protocol):
    """What an eager framework's arrays can do besides: they have values, and can be written to."""

    @property
    def nbytes(self) -> int: ...
    def __int__(self) -> int: ...
    def __len__(self) -> int: ...
    def __setitem__(self, places: slice, values: Self, /) -> None: ...
    def reshape(self, length: int, /) -> Self: ...


EagerArray = TypeVar("EagerArray", bound=Memory)
"""An array of such a framework (``numpy.ndarray``, ``torch.Tensor``)."""


class Found(NamedTuple):
    """What metadata tell of the values of a step."""

    finite: bool = True
    """Whether all values that this rank sent were."""
    overflow: bool = False
    """Whether values of any bucket did, see ``Compressor.overflows``."""
    checksum: int = 0
    """Of all contexts, modulo 2**64."""
    loss: float = math.nan
    measured: Sequence[float] = ()


def look(
    ops: Ops[EagerArray],
    finite: Sequence[EagerArray],
    overflow: Sequence[EagerArray],
    contexts: Sequence[EagerArray],
    loss: float,
    measured: Sequence[EagerArray],
) -> Found:
    """What ``Backend.found`` finds where arrays are on the host. Arguments as there."""
    checksum = sum(int(ops.checksum(array)) for array in contexts)
    numbers = [number for array in measured for number in ops.to_numpy(array).ravel().tolist()]
    return Found(all(map(bool, finite)), any(map(bool, overflow)), checksum, float(loss), numbers)


class Backend(Protocol[EagerArray]):
    """A gradient has its parameter's number. Complex gradients count as pairs of real numbers, of type float64."""

    framework: str
    """``numpy`` or ``torch``; checkpoints name it."""
    on_host: bool
    """Whether gradients are in the host's memory."""
    may_adopt: bool
    """Whether a mean's memory may become a gradient's."""
    shapes: list[tuple[int, ...]]
    """Of all gradients."""
    dtypes: list[str]
    """Of all gradients: ``float16``, ``bfloat16``, ``float32``, ``float64``."""
    names: list[str]
    """Of all parameters, for messages."""

    @property
    def ops(self) -> Ops[EagerArray]:
        """The operations of the gradients' device."""

    def named(self, what: str) -> AbstractContextManager[Any]:
        """What happens inside has this name in the framework's profiler."""

    def present(self) -> list[bool]:
        """Of every parameter: whether it has a gradient on this rank."""

    def sparse(self) -> list[int]:
        """Parameters whose gradient on this rank is sparse."""

    def may_share_rows(self, i: int) -> bool:
        """Whether this parameter's sparse gradients can be exchanged row by row."""

    def empty(self, count: int, dtype: str) -> EagerArray:
        """An uninitialised 1-D array."""

    def zeros(self, count: int, dtype: str = "float32") -> EagerArray:
        """1-D zeros."""

    def parts(self, bucket: Bucket) -> list[EagerArray]:
        """This rank's gradients in the bucket's order, 1-D, in their own type, not copied where that can be avoided. No
        gradient counts as zeros."""

    def places(self, bucket: Bucket) -> Sequence[EagerArray]:
        """Where the means of a bucket's parameters shall be in the end, 1-D and in its order, if that is float32 memory
        that can be written to; else empty. This rank's gradients may be there: only once they are sent."""

    def join(
        self,
        parts: Sequence[EagerArray],
        out: EagerArray,
        divisor: float,
        residual: EagerArray | None = None,
        share: float = 1.0,
        *,
        as_read: bool = False,
    ) -> EagerArray:
        """``out = parts / divisor + share * residual``: the parts end to end, converted to the type of ``out``.

        Returns ``out``; with ``as_read`` perhaps an object that is added up as a compressor reads it: see
        ``Compressor.reads_by_tensor``.
        """

    def summable(self, bucket: Bucket, dtype: str) -> list[EagerArray]:
        """This rank's gradients for sums in place: contiguous arrays of ``dtype`` whose memory nobody else reads."""

    def norm(self, array: EagerArray) -> EagerArray:
        """Euclidean norm, 0-d, in float32 or wider."""

    def sketch(self, array: EagerArray, part: Part) -> EagerArray:
        """float32 (``CELLS``,): a part of the gradient, added up with signs, times its scale; see ``sketch.py``."""

    def rows(self, i: int) -> tuple[EagerArray, EagerArray]:
        """The gradient's rows that are not zero: (int64 (k,) ascending, values (k, width))."""

    def mask(self, rows: EagerArray, height: int) -> EagerArray:
        """float32 (height,): 1 in ``rows``, else 0."""

    def rows_in_use(self, counts: EagerArray) -> EagerArray:
        """Rows with a count above 0, int64 ascending."""

    def place(self, union: EagerArray, rows: EagerArray, values: EagerArray, length: int, dtype: str) -> EagerArray:
        """1-D, ``length`` rows: the rows of ``union`` in order, with ``values`` in those of ``rows``, else zeros."""

    def spread(self, union: EagerArray, values: EagerArray, height: int) -> EagerArray:
        """The whole table, 1-D: ``values`` (1-D) in the rows of ``union``, else zeros."""

    def deliver(
        self, bucket: Bucket, mean: EagerArray, users: Sequence[bool], *, adopt: bool, sparse: Container[int]
    ) -> None:
        """Write a bucket's mean (1-D) to the gradients.

        Args:
            users: one a parameter: whether any rank uses the mean; else it is not written.
            adopt: whether the mean's memory may become the gradients'.
            sparse: parameters whose gradients have to be sparse on all ranks.
        """

    def deliver_rows(self, i: int, union: EagerArray, values: EagerArray) -> None:
        """Write a mean that is zero outside the rows of ``union``; ``values``: 1-D, one row after the other."""

    def deliver_summed(
        self, bucket: Bucket, means: Sequence[EagerArray], users: Sequence[bool], *, sparse: Container[int]
    ) -> None:
        """Write sums made in place to the gradients that they are not themselves. Arguments as of ``deliver``."""

    def all_true(self, flags: Sequence[EagerArray]) -> bool:
        """Whether all of these 0-d booleans are true. Reads them together, because every read waits for the device."""

    def make_meter(self, *, runs_ahead: bool) -> StepMeter:
        """A stopwatch for steps; ``runs_ahead``: of a device that the host runs ahead of."""

    def found(
        self,
        finite: Sequence[EagerArray],
        overflow: Sequence[EagerArray],
        contexts: Sequence[EagerArray],
        loss: Any,
        measured: Sequence[EagerArray],
    ) -> Callable[[], Found]:
        """What the device finds out about a step; the function that is returned waits for it.

        Args:
            finite, overflow: 0-d booleans.
            contexts: arrays of 32 bits an element, of which a checksum is told.
            loss: a number, or a device's; NaN: not reported.
            measured: numbers, in arrays of any lengths.
        """

    def within(self, array: EagerArray, limit: float) -> EagerArray:
        """The array, with magnitudes of at most ``limit``; in new memory."""

    def choose_each(
        self, condition: EagerArray, ones: Sequence[EagerArray], others: Sequence[EagerArray]
    ) -> list[EagerArray]:
        """``choose`` of each pair; small arrays of any shapes."""

    def choose(self, condition: EagerArray, one: EagerArray, other: EagerArray | float) -> EagerArray:
        """``one`` if the condition (0-d boolean) is true, else ``other``; in new memory."""

    def norm_of_all(self, norms: Sequence[EagerArray]) -> EagerArray:
        """Norm of all elements of arrays with these ``norms``, as one element."""

    def clone(self, array: EagerArray) -> EagerArray:
        """A copy, for a checkpoint or an array that will be overwritten."""

    def filled_like(self, array: EagerArray, value: float) -> EagerArray:
        """A new array of the same length and type."""

    def restore(self, values: Any) -> EagerArray:
        """An array of a checkpoint on the parameters' device."""

    def metadata_array(self, values: np.ndarray) -> EagerArray:
        """The metadata as the transport sums them, on the host."""

    def to_host(self, array: EagerArray) -> np.ndarray:
        """An array in NumPy, not copied where that can be avoided."""

    def shares_memory(self, one: EagerArray | None, other: EagerArray | None) -> bool:
        """Whether two 1-D arrays begin in the same place."""

    def wait_for_device(self) -> None:
        """Return when the device has finished all its work."""

    def checksums(self) -> list[int]:
        """A checksum of every parameter's bits."""
