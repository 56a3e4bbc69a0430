"""What a codec costs: encoding, decoding and the residual, in copies of the gradient.

    python benchmarks/codecs.py [--sizes 1M,25M] [--frameworks torch,tensorflow] [--device cpu] [--repeats 9]

One thread. Every compressor works on one bucket of a square-ish matrix, once its context is warm, in the steps that an
exchange takes: encode the bucket, see whether it is finite, work out what remains (for levels with a residual), decode
the sum, advance the context. The unit is one copy of the same gradient into memory that is there already, timed next to
every run, so that the noise of the machine falls on both; figures are medians over the repeats, with the quartiles. On
the CPU one copy reads and writes 8 bytes an element. Joining the residual to the gradient is not in it: that is part of
the one copy into the bucket. A target is the most copies that the codec may take on PyTorch's CPU.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# Before the frameworks are imported: they read it once.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
    os.environ[variable] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np  # noqa: E402

from hvdplus.compression import Compressor, Context, Spec, parse  # noqa: E402

TARGETS = {"fp16": 3.0, "int8": 5.0, "randomk:0.05": 3.0, "topk:0.05": 5.0, "lowrank:4": 3.5}
"""Most copies on PyTorch's CPU; the others are reported."""
LEVELS = (*TARGETS, "int4", "int8:stochastic", "qsgd:8", "terngrad", "signsgd", "topk:0.05+int8", "lowrank:4+fp16")
RANKS = 2


class Figure(NamedTuple):
    """Cost of one level, in copies."""

    median: float
    low: float
    high: float
    copy_seconds: float


def torch_step(level: str, size: int, device: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """(a step of the codec, a copy of the gradient) in PyTorch; the copy comes first, and fills the bucket."""
    import torch

    from hvdplus.adapters.torch.ops import make_ops

    torch.set_num_threads(1)
    ops, compressor, spec = make_ops(device), parse(level), _spec(size)
    grad, other = (torch.from_numpy(array).to(device) for array in _gradients(spec))
    ctx = _warm(ops, compressor, spec, grad)
    state = {"ctx": ctx}
    sync = torch.cuda.synchronize if device != "cpu" else lambda: None
    bucket = torch.empty_like(grad)

    def refill() -> None:
        """What was sent is overwritten by what remains of it: a new gradient, as the backward pass would bring."""
        bucket.copy_(grad)
        sync()

    def step() -> None:
        ctx = state["ctx"]
        if compressor.keeps_residual:
            payload = compressor.send(ops, ctx, bucket, other).payload
        else:
            payload = compressor.encode(ops, ctx, bucket)
            compressor.is_finite(ops, bucket, payload)
        compressor.decode(ops, ctx, payload)
        state["ctx"] = compressor.advance(ops, ctx, payload)
        sync()

    return step, refill


def tensorflow_step(level: str, size: int, device: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """The same in TensorFlow, compiled; the copy is NumPy's, since TensorFlow has none into memory that is there."""
    import tensorflow as tf

    from hvdplus.adapters.tensorflow.ops import TensorFlowOps

    ops, compressor, spec = TensorFlowOps(), parse(level), _spec(size)
    grad, other = (tf.constant(array) for array in _gradients(spec))
    ctx = _warm(ops, compressor, spec, grad)

    @tf.function(autograph=False)
    def codec(sent: Any, residual: Any, arrays: Any) -> Any:
        now = ctx._replace(state=arrays)
        left, sound = sent, sent
        if compressor.keeps_residual:
            payload, left, sound, _ = compressor.send(ops, now, sent, residual)
        else:
            payload = compressor.encode(ops, now, sent)
            sound = compressor.is_finite(ops, sent, payload)
        return compressor.decode(ops, now, payload), left, sound, compressor.advance(ops, now, payload).state

    source, target = _gradients(spec)
    return lambda: codec(grad, other, ctx.state), lambda: np.copyto(target, source)


FRAMEWORKS = {"torch": torch_step, "tensorflow": tensorflow_step}


def _spec(size: int) -> Spec:
    rows = math.isqrt(size)
    return Spec(((rows, size // rows),), ranks=RANKS)


def _gradients(spec: Spec) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal(spec.size, np.float32), rng.standard_normal(spec.size, np.float32)


def _warm(ops: Any, compressor: Compressor, spec: Spec, grad: Any) -> Context:
    return compressor.asked(ops, compressor.init(ops, spec), grad, lambda told: told)


def measure(step: Callable[[], None], copy: Callable[[], None], repeats: int) -> Figure:
    """Pairs of codec and copy, after two that are not counted."""
    pairs = [(_seconds(copy), _seconds(step)) for _ in range(repeats + 2)][2:]
    # The copy's own median: a single one can be disturbed more than the codec.
    copy_seconds = float(np.median([seconds for seconds, _ in pairs]))
    ratios = [seconds / copy_seconds for _, seconds in pairs]
    low, median, high = np.percentile(ratios, (25, 50, 75))
    return Figure(float(median), float(low), float(high), copy_seconds)


def _seconds(function: Callable[[], None]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def rows(frameworks: list[str], sizes: list[int], levels: list[str], device: str, repeats: int) -> Iterator[str]:
    """The table, line by line."""
    for framework in frameworks:
        for size in sizes:
            yield f"\n{framework} on {device}, {size / 1e6:g} M elements, 1 thread"
            yield f"{'level':18}{'copies':>8}  {'quartiles':>13}{'target':>8}  {'verdict':8}{'GB/s':>7}"
            for level in levels:
                figure = measure(*FRAMEWORKS[framework](level, size, device), repeats)
                target = TARGETS.get(level) if framework == "torch" and device == "cpu" else None
                verdict = "-" if target is None else "ok" if figure.median <= target else "MISSED"
                speed = 4 * size / (figure.median * figure.copy_seconds) / 1e9
                yield (
                    f"{level:18}{figure.median:8.2f}  {figure.low:5.2f} - {figure.high:5.2f}"
                    f"{'-' if target is None else f'<= {target:g}':>8}  {verdict:8}{speed:7.2f}"
                )
            yield f"(one copy: {8 * size / figure.copy_seconds / 1e9:.1f} GB/s read and written)"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Cost of encoding, decoding and residual, in copies of the gradient.")
    parser.add_argument("--sizes", default="1M,25M", help="elements, e.g. 1M,25M")
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS))
    parser.add_argument("--levels", default=",".join(LEVELS))
    parser.add_argument("--device", default="cpu", help="PyTorch's name of a device; TensorFlow stays on the CPU")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    sizes = [
        int(float(text.removesuffix("M")) * (1e6 if text.endswith("M") else 1)) for text in options.sizes.split(",")
    ]
    print(f"Codecs on {RANKS} ranks' terms, in copies of the gradient (GB/s: of gradient through the codec)")
    for line in rows(options.frameworks.split(","), sizes, options.levels.split(","), options.device, options.repeats):
        print(line, flush=True)


if __name__ == "__main__":
    main()
