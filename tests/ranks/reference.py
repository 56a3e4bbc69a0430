"""All ranks of a job in one NumPy process: what the frameworks' exchange is held against."""

import numpy as np

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.compression import Spec, parse
from hvdplus.control import untried
from hvdplus.control.knowledge import Knowledge
from hvdplus.exchange.residual import add, left_after_flush


class Reference:
    """One level, fixed, over the same buckets that a framework uses."""

    def __init__(self, level, buckets, ranks):
        self.ops = NumpyOps()
        self.compressor = parse(level)
        self.buckets = buckets
        self.ranks = ranks
        self.steps = 0
        self.contexts = [self.compressor.init(self.ops, bucket.spec) for bucket in buckets]
        self.residuals = [[np.zeros(bucket.spec.size, np.float32) for bucket in buckets] for _ in range(ranks)]

    def step(self, gradients):
        """``gradients[rank][parameter]`` -> mean gradient of every parameter."""
        means = [None] * len(gradients[0])
        compressor, asks = self.compressor, self.steps < self.compressor.asking_steps
        fraction = 1.0 if compressor.keeps_residual else 0.0
        self.steps += 1
        for number, bucket in enumerate(self.buckets):
            ctx, payloads, vectors = self.contexts[number], [], []
            for rank in range(self.ranks):
                flat = np.concatenate([gradients[rank][i].ravel() for i in bucket.parameters]).astype(np.float32)
                vectors.append(add(flat, self.residuals[rank][number], fraction))
            for pass_ in range(compressor.passes):
                if asks and compressor.asks:
                    told = [compressor.ask(self.ops, ctx, vector) for vector in vectors]
                    ctx = compressor.learn(self.ops, ctx, np.sum(told, axis=0, dtype=told[0].dtype))
                if pass_ < compressor.passes - 1:  # it only teaches
                    first = [compressor.encode(self.ops, ctx, vector) for vector in vectors]
                    ctx = compressor.advance(self.ops, ctx, np.sum(first, axis=0, dtype=first[0].dtype))
            for rank, vector in enumerate(vectors):
                residual = self.residuals[rank][number]
                if compressor.keeps_residual:
                    payload, left, *_ = compressor.send(self.ops, ctx, vector, residual)
                else:
                    payload, left = compressor.encode(self.ops, ctx, vector), left_after_flush(residual, fraction)
                self.residuals[rank][number] = left
                payloads.append(payload)
            total = np.sum(payloads, axis=0, dtype=payloads[0].dtype)
            mean = compressor.decode(self.ops, ctx, total) / self.ranks
            self.contexts[number] = compressor.advance(self.ops, ctx, total)
            for place, i in enumerate(bucket.parameters):
                part = mean[bucket.offsets[place] : bucket.offsets[place + 1]]
                means[i] = part.reshape(bucket.shapes[place])
        return means


def previewed(levels, shapes, steps, corner=512, ranks=2):
    """Level by level, the share of the last step's gradient that would be held back by contexts of the step before.

    ``steps``: two steps' gradients, of which the ``corner`` of every large one counts (None: all).
    """
    ops, matrices = NumpyOps(), [i for i, shape in enumerate(shapes) if len(shape) > 1]
    largest = max(np.prod(shapes[i]) for i in matrices)
    matrices = [i for i in matrices if np.prod(shapes[i]) >= largest / 2]
    corners = [[step[i][:corner, :corner] for i in matrices] for step in steps]
    spec = Spec(tuple(part.shape for part in corners[0]), ranks=ranks)
    found = []
    for compressor in map(parse, levels):
        ctx = compressor.init(ops, spec)
        for number, step in enumerate(corners):
            gradient = np.concatenate([part.ravel() for part in step]).astype(np.float32)
            asks = number < max(1, compressor.asking_steps)
            ctx = ctx._replace(side=number % compressor.turns)
            ctx = compressor.taught(ops, ctx, gradient, lambda payload, *_: payload, asks)
            payload = compressor.encode(ops, ctx, gradient)
            left = gradient - compressor.decode(ops, ctx, payload)
            ctx = compressor.advance(ops, ctx, payload)
        found.append(float(np.linalg.norm(left) / np.linalg.norm(gradient)))
    return found


def check_preview(records, levels, shapes, *gradients, ranks=2):
    """That a job has tried all levels but the first once, in two early steps in a row, and what it has found.

    ``gradients``: mean gradients, step by step, or those of every rank.
    """
    (record,) = [record for record in records if record["kind"] == "preview"]
    assert list(record["errors"]) == list(levels[1:])
    shown, expected = list(record["errors"].values()), []
    for first in range(5):
        seen = [previewed(levels, shapes, steps[first : first + 2], ranks=ranks)[1:] for steps in gradients]
        expected.append(np.mean(seen, axis=0))
    assert any(np.allclose(shown, each, rtol=1e-3) for each in expected), (shown, expected)


def at_any_price(monkeypatch, start=None):
    """Let all levels be tried in a preview, of a job that begins at the level ``start``."""
    monkeypatch.setattr(Knowledge, "paying", lambda _, levels, running: list(levels))
    if start is not None:
        monkeypatch.setattr(untried, "best_start", lambda *_: start)
