"""Error feedback: the part of a gradient that encoding loses stays on its rank and joins the next gradient.

After Seide et al. (1-bit SGD, Interspeech 2014) and Karimireddy et al. (arXiv 1901.09847). Invariant, to rounding, at
every step and across every change of level:

    sum of gradients = sum of what was sent + residuals

A residual's life, in the order of a step:

    add        gradient + fraction * residual is sent          fraction 1 at a level that keeps residuals
    pending    what is left becomes the *pending* residual
    flush      at a level that keeps none, a fraction of it is sent in each of several steps (below)
    commit     the optimizer has taken the step: pending becomes the residual
    roll back  the step was not taken, or was not finite: pending is dropped, the old residual stays
    consolidate  every rank gets the mean of all ranks' residuals (checkpoints), which changes no sum

All ranks use the same fraction. A residual sent at once would be a gradient several times too large.
"""

from __future__ import annotations

from hvdplus.compression import Array


def flush_fraction(steps_left: int) -> float:
    """Share of the residual to send now so that ``steps_left`` steps flush it in equal parts.

    1 step left gives 1.0: the last step leaves exactly nothing. 0 steps left: 0.0, nothing is outstanding.
    """
    return 1.0 / steps_left if steps_left else 0.0


def add(grad: Array, residual: Array, fraction: float | Array) -> Array:
    """The vector to send: gradient and a fraction of the residual (1-D float32 of equal length)."""
    return grad + residual * fraction


def left_after_flush(residual: Array, fraction: float | Array) -> Array:
    """The next residual where the level itself loses nothing: the part that stayed behind."""
    return residual - residual * fraction
