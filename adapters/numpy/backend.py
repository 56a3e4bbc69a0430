"""The engine's backend in NumPy, in its plainest form: the reference for every framework.

exchange = NumpyExchange(shapes, transport, level="lowrank:4")
means = exchange.reduce(gradients)          # arrays, ``Rows`` for sparse ones, or None
exchange.commit()                           # the optimizer has taken the step
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from hvdplus.adapters.numpy.ops import NumpyOps
from hvdplus.control.meter import StepMeter
from hvdplus.exchange.backend import Found, look
from hvdplus.exchange.bucket import Bucket
from hvdplus.exchange.eager import EagerExchange
from hvdplus.exchange.plan import Ladder
from hvdplus.exchange.sketch import CELLS, Part, signs
from hvdplus.exchange.step import finish, gradient_ready
from hvdplus.log.runlog import RunLog
from hvdplus.settings import Settings


class Rows(NamedTuple):
    """A sparse gradient: rows of a matrix that are not zero."""

    rows: np.ndarray
    """int64 (k,); a row may come twice, then both are added."""
    values: np.ndarray
    """(k, ...)"""


class NumpyBackend:
    """See ``hvdplus.exchange.backend.Backend``."""

    framework = "numpy"
    on_host = True
    may_adopt = True

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str] | None = None, weights: Sequence[np.ndarray] = ()
    ) -> None:
        """``weights``: the parameters themselves, if their equality on all ranks is to be checked."""
        self.ops = NumpyOps()
        self.shapes = [tuple(shape) for shape in shapes]
        self.dtypes = list(dtypes or ["float32"] * len(self.shapes))
        self.names = [f"parameter {i}" for i in range(len(self.shapes))]
        self.weights = list(weights)
        self.gradients: list[Any] = [None] * len(self.shapes)
        self.means: list[Any] = [None] * len(self.shapes)

    def named(self, what: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def present(self) -> list[bool]:
        return [gradient is not None for gradient in self.gradients]

    def sparse(self) -> list[int]:
        return [i for i, gradient in enumerate(self.gradients) if isinstance(gradient, Rows)]

    def may_share_rows(self, i: int) -> bool:
        return len(self.shapes[i]) > 1

    def empty(self, count: int, dtype: str) -> np.ndarray:
        return np.empty(count, dtype)

    def zeros(self, count: int, dtype: str = "float32") -> np.ndarray:
        return np.zeros(count, dtype)

    def parts(self, bucket: Bucket) -> list[np.ndarray]:
        return [self._flat(i) for i in bucket.parameters]

    def places(self, bucket: Bucket) -> Sequence[np.ndarray]:
        return ()

    def join(
        self,
        parts: Sequence[np.ndarray],
        out: np.ndarray,
        divisor: float,
        residual: np.ndarray | None = None,
        share: float = 1.0,
        *,
        as_read: bool = False,
    ) -> np.ndarray:
        out[:] = np.concatenate(parts) / out.dtype.type(divisor)
        if residual is not None:
            out += residual * out.dtype.type(share)
        return out

    def summable(self, bucket: Bucket, dtype: str) -> list[np.ndarray]:
        return [self._flat(i).astype(dtype).reshape(self.shapes[i]) for i in bucket.parameters]

    def norm(self, array: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):  # an infinite norm is ignored
            norm: Any = np.linalg.norm(np.ravel(array).astype(np.float64))
        return norm

    def sketch(self, array: np.ndarray, part: Part) -> np.ndarray:
        rows = np.ravel(array)[: CELLS * part.rows].reshape(CELLS, part.rows)
        cells = rows[:, part.column : part.column + part.width].astype(np.float32)
        return cells @ signs()[part.sign : part.sign + part.width] * np.float32(part.scale)

    def norm_of_all(self, norms: Sequence[np.ndarray]) -> np.ndarray:
        with np.errstate(over="ignore"):
            return np.array([np.linalg.norm(norms) if norms else 0.0])

    def rows(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        table = self._flat(i).reshape(self.shapes[i][0], -1)
        grad = self.gradients[i]
        used = np.unique(grad.rows) if isinstance(grad, Rows) else np.flatnonzero((table != 0).any(axis=1))
        return used, table[used]

    def mask(self, rows: np.ndarray, height: int) -> np.ndarray:
        mask = np.zeros(height, np.float32)
        mask[rows] = 1.0
        return mask

    def rows_in_use(self, counts: np.ndarray) -> np.ndarray:
        return np.flatnonzero(counts > 0)

    def place(self, union: np.ndarray, rows: np.ndarray, values: np.ndarray, length: int, dtype: str) -> np.ndarray:
        placed = np.zeros((length, values.shape[1]), dtype)
        placed[np.searchsorted(union, rows)] = values
        return placed.reshape(-1)

    def spread(self, union: np.ndarray, values: np.ndarray, height: int) -> np.ndarray:
        whole = np.zeros((height, values.size // max(1, len(union))), values.dtype)
        whole[union] = values.reshape(len(union), -1)
        return whole.reshape(-1)

    def deliver(
        self, bucket: Bucket, mean: np.ndarray, users: Sequence[bool], *, adopt: bool, sparse: Container[int]
    ) -> None:
        for i, part in zip(bucket.parameters, np.split(mean, bucket.offsets[1:-1]), strict=True):
            if users[i]:
                self._deliver(i, part, sparse=i in sparse)

    def _deliver(self, i: int, mean: np.ndarray, *, sparse: bool) -> None:
        whole = np.array(mean, self.dtypes[i]).reshape(self.shapes[i])
        if sparse:
            used = np.flatnonzero((whole.reshape(len(whole), -1) != 0).any(axis=1))
            self.means[i] = self.gradients[i] = Rows(used, whole[used])
        else:
            self.means[i] = self.gradients[i] = whole

    def deliver_rows(self, i: int, union: np.ndarray, values: np.ndarray) -> None:
        shape = (len(union), *self.shapes[i][1:])
        self.means[i] = self.gradients[i] = Rows(union, values.astype(self.dtypes[i]).reshape(shape))

    def deliver_summed(
        self, bucket: Bucket, means: Sequence[np.ndarray], users: Sequence[bool], *, sparse: Container[int]
    ) -> None:
        for i, mean in zip(bucket.parameters, means, strict=True):
            if users[i]:
                self._deliver(i, mean, sparse=i in sparse)

    def all_true(self, flags: Sequence[np.ndarray]) -> bool:
        return all(bool(flag) for flag in flags)

    def make_meter(self, *, runs_ahead: bool) -> StepMeter:
        return StepMeter()

    def found(
        self,
        finite: Sequence[np.ndarray],
        overflow: Sequence[np.ndarray],
        contexts: Sequence[np.ndarray],
        loss: Any,
        measured: Sequence[np.ndarray],
    ) -> Callable[[], Found]:
        found = look(self.ops, finite, overflow, contexts, loss, measured)
        return lambda: found

    def within(self, array: np.ndarray, limit: float) -> np.ndarray:
        return np.clip(array, -limit, limit)

    def choose_each(
        self, condition: np.ndarray, ones: Sequence[np.ndarray], others: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        return [self.choose(condition, *pair) for pair in zip(ones, others, strict=True)]

    def choose(self, condition: np.ndarray, one: np.ndarray, other: np.ndarray | float) -> np.ndarray:
        return np.where(condition, one, other).astype(one.dtype)

    def clone(self, array: np.ndarray) -> np.ndarray:
        return np.array(array)

    def filled_like(self, array: np.ndarray, value: float) -> np.ndarray:
        return np.full_like(array, value)

    def restore(self, values: Any) -> np.ndarray:
        return np.array(values)

    def metadata_array(self, values: np.ndarray) -> np.ndarray:
        return values

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(array)

    def shares_memory(self, one: np.ndarray | None, other: np.ndarray | None) -> bool:
        return one is not None and other is not None and np.may_share_memory(one, other)

    def wait_for_device(self) -> None:
        pass

    def checksums(self) -> list[int]:
        return [
            int(np.frombuffer(weight.tobytes(), np.uint8).astype(np.int64) @ _places(weight.nbytes))
            for weight in self.weights
        ]

    def _flat(self, i: int) -> np.ndarray:
        """The gradient, dense and 1-D, in its own type; zeros if there is none."""
        grad = self.gradients[i]
        if isinstance(grad, Rows):
            whole = np.zeros(self.shapes[i], self.dtypes[i])
            np.add.at(whole, grad.rows, grad.values)
            grad = whole
        elif grad is None:
            grad = np.zeros(self.shapes[i], self.dtypes[i])
        return np.asarray(grad, self.dtypes[i]).reshape(-1)


def _places(count: int) -> np.ndarray:
    return np.arange(1, count + 1, dtype=np.int64)


class NumpyExchange(EagerExchange[np.ndarray]):
    """The reference exchange: one call a step."""

    backend: NumpyBackend

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        transport: Any,
        level: str | Sequence[str] = "none",
        *,
        auto: bool = False,
        dtypes: Sequence[str] | None = None,
        weights: Sequence[np.ndarray] = (),
        average: bool = True,
        sparse_as_dense: bool = False,
        log: RunLog | None = None,
        **settings: Any,
    ) -> None:
        """``level``: a level, or all levels of a ladder, of which the last runs unless ``auto`` chooses."""
        ladder = Ladder([level] if isinstance(level, str) else level)
        backend = NumpyBackend(shapes, dtypes, weights)
        backend.on_host = not transport.waits_on_device
        super().__init__(
            backend,
            transport,
            Settings.load(settings, environ={}),
            ladder=ladder,
            auto=auto,
            log=log or RunLog(None),
            prefix="numpy",
            average=average,
            sparse_as_dense=sparse_as_dense,
        )

    def reduce(
        self, gradients: Sequence[Any], learning_rate: float = 0.0, order: Sequence[int] | None = None
    ) -> list[Any]:
        """Mean gradients over all ranks; None where no rank has one.

        Args:
            gradients: one a parameter: an array, ``Rows``, or None.
            order: in which gradients become ready, as in a backward pass; None: all at its end.
        """
        self.backend.gradients, self.backend.means = list(gradients), [None] * len(gradients)
        for i in order or ():
            gradient_ready(self, i)
        finish(self, learning_rate)
        if self.idle:
            return list(gradients)
        return self.backend.means
