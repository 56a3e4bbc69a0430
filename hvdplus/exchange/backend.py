"""What the engine asks of a framework that computes at once (NumPy, PyTorch), besides ``Ops``.

Every method is about the gradients of one step: where they are, how they get into a bucket, how means get back. A
framework that compiles its steps (TensorFlow) uses the engine's pure functions and keeps its arrays in variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from hvdplus.compression import Array, Ops
from hvdplus.exchange.bucket import Bucket


class Backend(Protocol):
    """Gradients are numbered as the parameters are. Complex ones count as pairs of real numbers, of type float64."""

    framework: str
    """``numpy``, ``torch``: whose checkpoints these are."""
    on_host: bool
    """Whether gradients are in the host's memory."""
    shapes: list[tuple[int, ...]]
    """Of all gradients."""
    dtypes: list[str]
    """Of all gradients: ``float16``, ``bfloat16``, ``float32``, ``float64``."""
    names: list[str]
    """Of all parameters, for messages."""

    @property
    def ops(self) -> Ops:
        """The operations of the gradients' device."""

    def gradient(self, i: int) -> Any:
        """This rank's gradient as the framework holds it; None: there is none."""

    def is_sparse(self, i: int) -> bool:
        """Whether there is a gradient here, and it is sparse."""

    def may_share_rows(self, i: int) -> bool:
        """Whether rows of this parameter's sparse gradients can be exchanged by themselves."""

    def empty(self, count: int, dtype: str) -> Array:
        """An uninitialised 1-D array."""

    def zeros(self, count: int, dtype: str = "float32") -> Array:
        """1-D zeros."""

    def flat(self, i: int) -> Array:
        """This rank's gradient, dense and 1-D, in its own type, not copied where that can be avoided."""

    def fill(self, i: int, target: Array, residual: Array | None, fraction: float, divisor: float) -> None:
        """``target = gradient / divisor + fraction * residual``; 1-D parts of a bucket. No gradient counts as zeros."""

    def parts(self, bucket: Bucket) -> list[Array]:
        """This rank's gradients in the bucket's order, 1-D, in their own type, not copied where that can be avoided."""

    def join(self, parts: Sequence[Array], out: Array, divisor: float) -> None:
        """``parts``, end to end, converted to the type of ``out`` and divided."""

    def summable(self, bucket: Bucket, dtype: str) -> list[Array]:
        """This rank's gradients for sums in place: contiguous arrays of ``dtype`` whose memory nobody else reads."""

    def norm(self, array: Array) -> Array:
        """Euclidean norm, 0-d, in float32 or wider."""

    def rows(self, i: int) -> tuple[Array, Array]:
        """The gradient's rows that are not zero: (int64 (k,) ascending, values (k, width))."""

    def mask(self, rows: Array, height: int) -> Array:
        """float32 (height,): 1 in ``rows``, else 0."""

    def rows_in_use(self, counts: Array) -> Array:
        """Rows with a count above 0, int64 ascending."""

    def place(self, union: Array, rows: Array, values: Array, length: int, dtype: str) -> Array:
        """1-D: ``length`` rows, the first of which are those of ``union``; ``values`` stand where ``rows`` are."""

    def spread(self, union: Array, values: Array, height: int) -> Array:
        """The whole table, 1-D: ``values`` (1-D) in the rows of ``union``, else zeros."""

    def deliver(self, i: int, mean: Array, *, adopt: bool, sparse: bool) -> None:
        """Write the mean (1-D) to the gradient. ``adopt``: its memory may become the gradient's. ``sparse``: the
        gradient has to be sparse on all ranks."""

    def deliver_rows(self, i: int, union: Array, values: Array) -> None:
        """Write a mean that is zero but in some rows; ``values``: 1-D, one row after the other."""

    def deliver_summed(self, i: int, mean: Array, *, sparse: bool) -> None:
        """Take over a sum made in place, where it is not the gradient itself."""

    def all_true(self, flags: Sequence[Array]) -> bool:
        """Of 0-d booleans, looked at once: every look waits for the device."""

    def any_true(self, flags: Sequence[Array]) -> bool:
        """The same, for any of them."""

    def norm_of_all(self, norms: Sequence[Array]) -> float:
        """Norm of all elements of arrays with these ``norms``."""

    def clone(self, array: Array) -> Array:
        """A copy, for a checkpoint or an array that will be overwritten."""

    def filled_like(self, array: Array, value: float) -> Array:
        """A new array of the same length and type."""

    def restore(self, values: Any) -> Array:
        """An array of a checkpoint on the parameters' device."""

    def metadata_array(self, values: np.ndarray) -> Array:
        """The metadata as the transport sums them, on the host."""

    def to_host(self, array: Array) -> np.ndarray:
        """An array in NumPy, not copied where that can be avoided."""

    def shares_memory(self, one: Array | None, other: Array | None) -> bool:
        """Whether two 1-D arrays begin in the same place."""

    def wait_for_device(self) -> None:
        """Return when the device has computed all that was asked of it."""

    def checksums(self) -> list[int]:
        """A checksum of every parameter's bits."""
