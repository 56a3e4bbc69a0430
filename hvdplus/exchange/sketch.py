"""How much ranks' gradients, and their residuals, are alike, from a sketch of a few numbers that add up over ranks.

Of every gradient that levels compress a part is added up with random signs, the same on all ranks, into ``CELLS``
numbers. Scalar products of sketches are those of the gradients, on average (Alon, Matias and Szegedy, STOC 1996). So
the sum of all ranks' sketches shows how long the mean gradient is beside the ranks' own, without that anybody has it:
at levels that keep a residual, the mean that arrives is that of other steps, too.

    cosine = mean over pairs of ranks of <g_i, g_j>, over the mean of <g_i, g_i>

It is what the gradient noise scale tells, (1 - cosine) / cosine in units of a rank's batch (McCandlish et al.,
arXiv 1812.06162).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from hvdplus.compression.hashing import uniform
from hvdplus.exchange.bucket import compressible

CELLS = 32
WIDTH = 4096
"""Elements that go into a cell from one gradient, at most: a sketch costs little, however large the model."""
_COLUMN, _SIGN, _PARAMETER = 7919, 1009, 9176


class Part(NamedTuple):
    """The part of a gradient that goes into a sketch; numbers or tensors, as ``measurement`` was."""

    rows: int
    """Elements of the gradient for each cell: the first ``CELLS * rows`` are those of all."""
    width: int
    """Elements of these that count."""
    column: Any
    """The first of them."""
    sign: Any
    """The first of their signs, in ``signs()``."""
    scale: float
    """Factor that makes up for what does not count."""


def part_of(shape: Sequence[int], parameter: int, measurement: Any) -> Part | None:
    """The part of a parameter's gradient of this shape; None: it always travels whole, and is not worth the time."""
    if not compressible(tuple(shape)):
        return None
    rows = math.prod(shape) // CELLS
    width, turn = min(rows, WIDTH), measurement + _PARAMETER * parameter
    column, sign = turn * _COLUMN % (rows - width + 1), turn * _SIGN % WIDTH
    return Part(rows, width, column, sign, math.sqrt(rows / width))


@cache
def signs() -> np.ndarray:
    """float32 (2 * ``WIDTH``,): 1 or -1."""
    return np.where(uniform((CELLS, WIDTH), 2 * WIDTH) < 0.5, -1, 1).astype(np.float32)


def square(cells: Sequence[float] | np.ndarray) -> float:
    """Of the norm."""
    return float(np.square(np.asarray(cells, np.float64)).sum())


def of_sum(summed: Sequence[float] | np.ndarray, own: float) -> float:
    """Squared norm of the sum of all ranks' vectors, over the sum of their squared norms.

    N for equal vectors of N ranks, 0 where they cancel; NaN: not known. Arguments as of ``cosine``.
    """
    return square(summed) / own if 0 < own < math.inf else math.nan


def cosine(summed: Sequence[float] | np.ndarray, own: float, whole: float, ranks: int) -> float:
    """The mean cosine of two ranks' gradients, which a single measurement only shows roughly; NaN: not known.

    Args:
        summed: all ranks' sketches, added up.
        own: the sum of the sketches' squares.
        whole: the sum of the gradients' squares.
    """
    if ranks < 2 or not 0 < whole < math.inf:
        return math.nan
    found = (square(summed) - own) / ((ranks - 1) * whole)
    return found if math.isfinite(found) else math.nan
