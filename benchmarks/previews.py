"""What does a preview say of levels that have not run? Held against what they come to, on the laboratory's models.

    python benchmarks/previews.py               all five, a minute or two
    python benchmarks/previews.py --models mlp --steps 100

Two ranks' gradients, in one process: dense steps, tried in the fourth and fifth as in a job (``exchange/preview.py``);
beside them every level's residual, as if it had run from the first step on. For each model and level: e by its bytes,
by the preview, and as it was (median of the last ten steps).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence

import numpy as np
import torch
from contestants import TASKS
from torch.nn import functional

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.compression import Compressor, Spec, parse
from hvdplus.control.delay import expected, foreseen
from hvdplus.exchange.bucket import compressible, make_buckets
from hvdplus.exchange.engine import level_costs
from hvdplus.exchange.preview import Preview
from hvdplus.settings import Settings

RANKS, FIRST, LAST = 2, 3, 10
"""Ranks; the first of the two steps of a preview; steps at the end that count."""


def gradients(name: str, steps: int) -> list[list[np.ndarray]]:
    """Mean gradients of a training without compression, step by step."""
    torch.manual_seed(0)
    task = TASKS[name]()
    model = task.model()
    optimizer = task.optimizer(model)
    draws = [torch.Generator().manual_seed(rank) for rank in range(RANKS)]
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        for rank, draw in enumerate(draws):
            batch = task.batch(rank, RANKS, draw)
            logits = model(batch.inputs)
            (functional.cross_entropy(logits.flatten(0, -2), batch.labels.flatten()) / RANKS).backward()
        found.append([parameter.grad.numpy().copy() for parameter in model.parameters()])
        optimizer.step()
    return found


def shown(steps: Sequence[Sequence[np.ndarray]], levels: Sequence[Compressor]) -> list[float]:
    """What a preview in the steps ``FIRST`` and the next shows of each level: what it would hold back, as a share."""
    shapes = [part.shape for part in steps[0]]
    preview = Preview(shapes, ["float32"] * len(shapes), (), seed=0, ranks=RANKS)
    errors = np.zeros(0)
    for step in steps[FIRST : FIRST + 2]:
        parts = [step[i].reshape(-1)[: preview.elements(i)] for i in preview.parameters]
        errors = preview.see(NumpyOps(), levels, range(len(levels)), parts)
    return [float(error) for error in errors]


def run(compressor: Compressor, steps: Sequence[Sequence[np.ndarray]]) -> float:
    """e of a level that has run from the first step on. Of projections, all ranks' residuals are that of their mean."""
    ops, residual, errors = NumpyOps(), np.float32(0), []
    body = [i for i, part in enumerate(steps[0]) if compressible(part.shape)]
    ctx = compressor.init(ops, Spec(tuple(steps[0][i].shape for i in body), ranks=RANKS))
    for number, step in enumerate(steps):
        gradient = np.concatenate([step[i].reshape(-1) for i in body])
        vector = gradient + residual
        ctx = ctx._replace(side=number % compressor.turns)
        ctx = compressor.taught(ops, ctx, vector, lambda told, *_: told, number < compressor.asking_steps)
        sent = compressor.send(ops, ctx, vector)
        residual, ctx = sent.left, compressor.advance(ops, ctx, sent.payload)
        errors.append(float(np.linalg.norm(residual) / np.linalg.norm(gradient)))
    return statistics.median(errors[-LAST:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each model and level."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="mlp,wide,cnn,text,bytes", help="with commas between them")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args(arguments)
    ladder = [parse(level) for level in Settings().ladder]
    ratios: dict[str, list[float]] = {"bytes": [], "preview": []}
    print(f"{'model':<8} {'level':<20} {'by bytes':>9} {'preview':>9} {'as it was':>9}")
    for name in options.models.split(","):
        steps = gradients(name, options.steps)
        shapes = [part.shape for part in steps[0]]
        buckets = make_buckets(
            shapes, ["float32"] * len(shapes), bucket_bytes=Settings().bucket_bytes, ranks=RANKS, seed=0
        )
        costs = level_costs(buckets, ladder, [0.0] * len(ladder))
        tried = shown(steps, ladder)
        for level, compressor in enumerate(ladder):
            if compressor.keeps_residual:
                guessed = expected(level, {}, costs, {}).mean
                previewed, was = foreseen(tried[level]), run(compressor, steps)
                print(f"{name:<8} {compressor.name:<20} {guessed:9.2f} {previewed:9.2f} {was:9.2f}", flush=True)
                ratios["bytes"].append(math.log(was / guessed))
                ratios["preview"].append(math.log(was / previewed))
    for kind, logs in ratios.items():
        spread = math.sqrt(statistics.fmean(each**2 for each in logs))
        print(
            f"as it was over {kind}: {math.exp(min(logs)):.2f} to {math.exp(max(logs)):.2f}; off by {spread:.2f} (log)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
