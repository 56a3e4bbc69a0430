"""All ranks of a job in one NumPy process: what the frameworks' exchange is held against."""

import numpy as np

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.compression import parse
from hvdplus.residual import join, remainder


class Reference:
    """One level, fixed, over the same buckets that a framework uses."""

    def __init__(self, level, buckets, ranks):
        self.ops = NumpyOps()
        self.compressor = parse(level)
        self.buckets = buckets
        self.ranks = ranks
        self.contexts = [self.compressor.init(self.ops, bucket.spec) for bucket in buckets]
        self.residuals = [[np.zeros(bucket.spec.size, np.float32) for bucket in buckets] for _ in range(ranks)]

    def step(self, gradients):
        """``gradients[rank][parameter]`` -> mean gradient of every parameter."""
        means = [None] * len(gradients[0])
        release = 1.0 if self.compressor.keeps_residual else 0.0
        for number, bucket in enumerate(self.buckets):
            ctx, payloads = self.contexts[number], []
            for rank in range(self.ranks):
                flat = np.concatenate([gradients[rank][i].ravel() for i in bucket.parameters]).astype(np.float32)
                residual = self.residuals[rank][number]
                sent = join(flat, residual, release)
                payload = self.compressor.encode(self.ops, ctx, sent)
                self.residuals[rank][number] = remainder(
                    self.ops, self.compressor, ctx, sent, payload, residual, release
                )
                payloads.append(payload)
            total = np.sum(payloads, axis=0, dtype=payloads[0].dtype)
            mean = self.compressor.decode(self.ops, ctx, total) / self.ranks
            self.contexts[number] = self.compressor.advance(self.ops, ctx, total)
            for place, i in enumerate(bucket.parameters):
                part = mean[bucket.offsets[place] : bucket.offsets[place + 1]]
                means[i] = part.reshape(bucket.spec.shapes[place])
        return means
