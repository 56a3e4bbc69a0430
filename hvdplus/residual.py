"""Error feedback: what encoding loses stays on its rank and joins the next gradient.

After Seide et al. (1-bit SGD, Interspeech 2014) and Karimireddy et al. (arXiv 1901.09847). Invariant, to rounding, at
every step and across every change of level:

    sum of gradients = sum of what was sent + residuals

The residual is apart from the compressors, is *pending* until the optimizer has taken the step, and is paid out over
several steps on the way back to dense, by a factor that every rank shares: released at once it would be a gradient
several times too large.
"""

from __future__ import annotations

from hvdplus.compression import Array


def release_factor(steps_left: int) -> float:
    """Share of the residual to send in this step so that ``steps_left`` steps pay it out in equal parts.

    ``steps_left`` = 1 gives 1.0: the last step leaves exactly nothing. 0 steps left: 0.0, nothing is outstanding.
    """
    return 1.0 / steps_left if steps_left else 0.0


def join(grad: Array, residual: Array, release: float | Array) -> Array:
    """What is to be sent: the gradient and the released share of the residual (1-D float32 of equal length)."""
    return grad + residual * release


def unreleased(residual: Array, release: float | Array) -> Array:
    """The next residual where the level itself loses nothing: what stayed behind of the last one."""
    return residual - residual * release
