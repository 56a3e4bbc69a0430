"""What does a preview say of levels that have not run? Held against what they come to, on the laboratory's models.

    python benchmarks/previews.py               all five, two or three minutes
    python benchmarks/previews.py --models mlp --steps 100 --ranks 8

Ranks' gradients, in one process: dense steps, tried in the fourth and fifth as in a job (``exchange/preview.py``);
beside them every level's residual, as if it had run from the first step on. For each model and level: e by its bytes,
by a preview of the means, by one of a rank's own gradients, and as it was (median of the last ten steps). In the end
how far off they are, the last line for previews of own gradients that are held against another level's of as many
passes, which runs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from contestants import TASKS
from torch.nn import functional

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.compression import Compressor, Spec, parse
from hvdplus.control.delay import LEAST_PREVIEW, expected, foreseen
from hvdplus.exchange.bucket import compressible, make_buckets
from hvdplus.exchange.engine import level_costs
from hvdplus.exchange.preview import Preview
from hvdplus.settings import Settings

FIRST, LAST = 3, 10
"""The first of the two steps of a preview; steps at the end that count."""
Gradients = Sequence[np.ndarray]


class Training(NamedTuple):
    """Gradients of a training without compression, step by step."""

    means: Sequence[Gradients]
    own: Sequence[Gradients]
    """Of rank 0."""


def train(name: str, steps: int, ranks: int) -> Training:
    """Train one of the laboratory's models, as so many ranks would."""
    torch.manual_seed(0)
    task = TASKS[name]()
    model = task.model()
    optimizer = task.optimizer(model)
    draws = [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    found = Training([], [])
    for _ in range(steps):
        optimizer.zero_grad()
        for rank, draw in enumerate(draws):
            batch = task.batch(rank, ranks, draw)
            logits = model(batch.inputs)
            (functional.cross_entropy(logits.flatten(0, -2), batch.labels.flatten()) / ranks).backward()
            if not rank:
                found.own.append([parameter.grad.numpy() * ranks for parameter in model.parameters()])
        found.means.append([parameter.grad.numpy().copy() for parameter in model.parameters()])
        optimizer.step()
    return found


def shown(steps: Sequence[Gradients], levels: Sequence[Compressor], ranks: int) -> list[float]:
    """What a preview in the steps ``FIRST`` and the next shows of each level: what it would hold back, as a share."""
    shapes = [part.shape for part in steps[0]]
    preview = Preview(shapes, ["float32"] * len(shapes), (), seed=0, ranks=ranks)
    errors = np.zeros(0)
    for step in steps[FIRST : FIRST + 2]:
        parts = [step[i].reshape(-1)[: preview.elements(i)] for i in preview.parameters]
        errors = preview.see(NumpyOps(), levels, range(len(levels)), parts)
    return [float(error) for error in errors]


def run(compressor: Compressor, steps: Sequence[Gradients], ranks: int) -> float:
    """e of a level that has run from the first step on. Of projections, all ranks' residuals are that of their mean."""
    ops, residual, errors = NumpyOps(), np.float32(0), []
    body = [i for i, part in enumerate(steps[0]) if compressible(part.shape)]
    ctx = compressor.init(ops, Spec(tuple(steps[0][i].shape for i in body), ranks=ranks))
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
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args(arguments)
    ranks, ladder = options.ranks, [parse(level) for level in Settings().ladder]
    logs: dict[str, list[float]] = {"bytes": [], "means": [], "own gradients": [], "own, and another level's e": []}
    print(f"{'model':<8} {'level':<20} {'bytes':>9} {'means':>9} {'own':>9} {'as it was':>9}")
    for name in options.models.split(","):
        training = train(name, options.steps, ranks)
        shapes = [part.shape for part in training.means[0]]
        buckets = make_buckets(
            shapes, ["float32"] * len(shapes), bucket_bytes=Settings().bucket_bytes, ranks=ranks, seed=0
        )
        costs = level_costs(buckets, ladder, [0.0] * len(ladder))
        tried = {kind: shown(steps, ladder, ranks) for kind, steps in training._asdict().items()}
        lossy = [level for level, compressor in enumerate(ladder) if compressor.keeps_residual]
        was = {level: run(ladder[level], training.means, ranks) for level in lossy}
        own = {level: max(LEAST_PREVIEW, foreseen(tried["own"][level])) for level in lossy}
        for level in lossy:
            mean = max(LEAST_PREVIEW, foreseen(tried["means"][level]))
            guesses = expected(level, {}, costs, {}).mean, mean, own[level]
            columns = " ".join(f"{each:9.2f}" for each in (*guesses, was[level]))
            print(f"{name:<8} {ladder[level].name:<20} {columns}", flush=True)
            for kind, guess in zip(logs, guesses, strict=False):
                logs[kind].append(math.log(was[level] / guess))
            for other in lossy:
                if other != level and ladder[other].passes == ladder[level].passes:
                    guess = was[other] * own[level] / own[other]
                    logs["own, and another level's e"].append(math.log(was[level] / guess))
    for kind, found in logs.items():
        spread = math.sqrt(statistics.fmean(each**2 for each in found))
        least, most = math.exp(min(found)), math.exp(max(found))
        print(f"as it was over that by {kind}: {least:.2f} to {most:.2f}; off by {spread:.2f} (log)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
