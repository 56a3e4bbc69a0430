"""Draws ``images/levels.png``: a gradient, and what each level sends of it in one step.

python docs/draw_levels.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.compression import Spec, parse

LEVELS = ("none", "fp16", "int8", "int4", "lowrank:4+fp16", "lowrank:16+fp16", "topk:0.1", "randomk:0.1", "signsgd")
ROWS, COLUMNS = 128, 128
LEARNED = 8
"""Steps before, from which levels have learned scales, bases or blocks."""


def gradient(step: int) -> np.ndarray:
    """Some structure that stays, and noise that does not, as gradients of linear layers have it."""
    dice, noise = np.random.default_rng(0), np.random.default_rng(step + 1)
    strong = dice.standard_normal((ROWS, 6)) @ (dice.standard_normal((6, COLUMNS)) * np.linspace(1, 0.2, 6)[:, None])
    rows = np.exp(dice.standard_normal((ROWS, 1)))
    return (rows * (strong + 0.6 * noise.standard_normal((ROWS, COLUMNS)))).astype(np.float32) / 8


def sent(name: str) -> tuple[np.ndarray, float]:
    """What arrives of the last gradient, with error feedback; bytes of fp32 over bytes sent."""
    ops, spec, compressor = NumpyOps(), Spec(((ROWS, COLUMNS),), ranks=2), parse(name)
    ctx = compressor.asked(ops, compressor.init(ops, spec), gradient(0).ravel(), lambda told: 2 * told)
    left = np.zeros(spec.size, np.float32)
    mean = left
    for step in range(LEARNED):
        vector = gradient(step).ravel() + left
        payload = compressor.encode(ops, ctx, vector.copy(), left)
        mean = compressor.decode(ops, ctx, payload + payload) / 2  # two ranks that agree
        left = vector - mean if compressor.keeps_residual else np.zeros_like(left)
        ctx = compressor.advance(ops, ctx, payload + payload)
    return mean.reshape(ROWS, COLUMNS), 4 * spec.size / compressor.payload_bytes(spec)


def main() -> None:
    """Draw."""
    figure = Figure(figsize=(11, 4.9), dpi=110, layout="constrained")
    axes = figure.subplots(2, 5)
    pictures = [("the gradient", gradient(LEARNED - 1), 1.0), *((name, *sent(name)) for name in LEVELS)]
    for axis, (name, values, ratio) in zip(axes.flat, pictures, strict=True):
        axis.imshow(values, cmap="RdBu", vmin=-0.6, vmax=0.6, interpolation="nearest")
        axis.set_title(name if name == "the gradient" else f"{name}: 1/{ratio:.0f}", fontsize=10)
        axis.set_axis_off()
    target = Path(__file__).parent / "images" / "levels.png"
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target)


if __name__ == "__main__":
    main()
