"""All ranks of a job in one NumPy process: what the frameworks' exchange is held against."""

import numpy as np

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.compression import parse
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
