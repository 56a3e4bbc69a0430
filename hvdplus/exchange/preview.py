"""What levels would hold back that have not run: tried beside the training, on parts of two steps' gradients.

Their bytes alone say little of it. The gradient of a fully connected layer is a sum of one product of two vectors a
sample, so with small batches a level of low rank sends nearly all of it in a hundredth of the bytes; that of a
convolution is no such sum. In the first of the two steps contexts learn, in the second the levels' errors are read.

Where the level that runs loses nothing, they are tried on the means; where it holds something back, means lack just
what is asked for, and each rank tries levels on its own gradients. Ranks add up what they see, to agree.
(``benchmarks/previews.py`` has how far either is from what levels come to.)
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hvdplus.compression import Array, Compressor, Context, Ops, Spec
from hvdplus.compression.lowrank import most_square
from hvdplus.exchange.backend import EagerArray
from hvdplus.exchange.bucket import DENSE_ONLY, compressible

if TYPE_CHECKING:
    from hvdplus.exchange.eager import EagerExchange

SIDE = 512
"""Most rows and columns of a matrix that are tried: a corner has the matrix's rank, if that is smaller."""
TENSORS = 4
"""Most tensors that are tried. A level takes some 5 to 10 milliseconds of one core, in both steps together."""
ELEMENTS = 4 << 20
"""Most elements of a tensor that are copied to the host."""


class Preview:
    """Tries levels on some of the parameters' gradients."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[str],
        sparse: Container[int],
        *,
        seed: int,
        ranks: int,
    ) -> None:
        """``shapes``, ``dtypes``: of all parameters; ``sparse``: those whose gradients are."""
        self.parameters = _typical(shapes, dtypes, sparse)
        """Whose gradients are tried."""
        self._matrices = {i: most_square(shapes[i]) for i in self.parameters}
        corners = tuple((self._rows(i), min(SIDE, columns)) for i, (_, columns) in self._matrices.items())
        self._spec = Spec(corners, seed=seed, ranks=ranks)
        self._learned: dict[int, tuple[Any, ...]] = {}
        """Level -> the arrays of its context after the first step."""

    def elements(self, i: int) -> int:
        """How many of a gradient's first elements are looked at: whole rows."""
        return self._rows(i) * self._matrices[i][1]

    def _rows(self, i: int) -> int:
        rows, columns = self._matrices[i]
        return max(1, min(SIDE, rows, ELEMENTS // columns))

    def see(
        self,
        ops: Ops[Array],
        compressors: Sequence[Compressor],
        levels: Container[int],
        gradients: Sequence[np.ndarray],
    ) -> np.ndarray:
        """Errors of all levels (float32): the norm of what each would hold back, over the gradient's. NaN: not known,
        as of each in its first step, of those that are not among ``levels``, and of gradients that are zero or not
        finite.

        Args:
            compressors: of all levels.
            gradients: the first ``elements`` of the gradient of each of ``parameters``, 1-D, float32.
        """
        errors = np.full(len(compressors), math.nan, np.float32)
        sample = self._sample(gradients)
        norm = float(np.linalg.norm(sample))
        norm = norm if 0 < norm < math.inf else math.nan
        with np.errstate(invalid="ignore", over="ignore"):
            for level, compressor in enumerate(compressors):
                if level in levels and sample.size:  # of gradients that show nothing, too: ranks stay in step
                    errors[level] = self._try(ops, level, compressor, sample) / norm
        return errors

    def _sample(self, gradients: Sequence[np.ndarray]) -> np.ndarray:
        parts = [np.zeros(0, np.float32)]
        for gradient, (rows, columns) in zip(gradients, self._spec.shapes, strict=True):
            parts.append(gradient.reshape(rows, -1)[:, :columns].reshape(-1))
        return np.concatenate(parts)

    def _try(self, ops: Ops[Array], level: int, compressor: Compressor, sample: np.ndarray) -> float:
        """Norm of what a level would hold back; in its first step NaN."""
        learned = self._learned.pop(level, None)
        side = 0 if learned is None else 1 % compressor.turns
        state = compressor.init(ops, self._spec).state if learned is None else learned
        gradient, first = ops.from_numpy(sample.copy()), learned is None or side > 0
        ctx = compressor.taught(ops, Context(self._spec, side, state), gradient, lambda told, *_: told, first)
        sent = compressor.send(ops, ctx, gradient)
        if learned is None:
            self._learned[level] = compressor.advance(ops, ctx, sent.payload).state
            return math.nan
        return float(np.linalg.norm(ops.to_numpy(sent.left)))


def _typical(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], sparse: Container[int]) -> tuple[int, ...]:
    """Parameters that stand for all: of the larger ones at most ``TENSORS``, evenly spread over the model."""
    sizes = {
        i: min(math.prod(shape), SIDE * SIDE)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        if compressible(shape) and dtype != DENSE_ONLY and i not in sparse
    }
    largest = max(sizes.values(), default=0)
    large = [i for i, size in sizes.items() if size >= largest / 2]
    return tuple(large[:: max(1, -(-len(large) // TENSORS))])


class Sample(NamedTuple):
    """What a step tries."""

    levels: Sequence[int]
    own: Sequence[np.ndarray] | None = None
    """The rank's own gradients, see ``Preview.see``; None: the means are tried."""


def sees_own(compressor: Compressor) -> bool:
    """Whether in a step at such a level ranks look at their own gradients, and not at the means."""
    return compressor.keeps_residual


def look(x: EagerExchange[EagerArray]) -> Sample:
    """What the step will try, before means take the gradients' places."""
    levels = () if x.idle else x.coordinator.unforeseen()
    if not levels or not sees_own(x.ladder.compressors[x.plan.level]):
        return Sample(levels)
    if x.two_level:  # which holds back part of a host's sum, and that is nowhere by then
        return Sample(())
    return Sample(levels, _gradients(x))


def try_levels(x: EagerExchange[EagerArray], sample: Sample) -> None:
    """Try levels, if the step is to, after the means were delivered.

    All ranks call it at the same point, before the optimizer takes the step.
    """
    if not sample.levels:
        return
    gradients = _gradients(x) if sample.own is None else sample.own
    with x.meter.probe():
        assert x.preview
        shown = x.preview.see(x.ops, x.ladder.compressors, sample.levels, gradients)
        total = x.bare.wait(x.bare.start(x.backend.metadata_array(shown), f"{x.prefix}.preview"))
        x.coordinator.foresee(x.backend.to_host(total))


def _gradients(x: EagerExchange[EagerArray]) -> list[np.ndarray]:
    """Of what is now in the gradients' places, what a preview looks at."""
    with x.meter.probe():
        x.preview = preview = x.preview or x.make_preview()
        return [_first(x, i, preview.elements(i)) for i in preview.parameters]


def _first(x: EagerExchange[EagerArray], i: int, count: int) -> np.ndarray:
    """The first ``count`` elements of a parameter's gradient, float32, of the unscaled loss."""
    bucket = next(bucket for bucket in x.buckets if i in bucket.parameters)
    (gradient,) = x.backend.parts(bucket._replace(parameters=(i,), shapes=(x.shapes[i],)))
    first = x.backend.empty(count, "float32")
    x.backend.join([gradient[:count]], first, x.loss_scale)
    return x.backend.to_host(first)
