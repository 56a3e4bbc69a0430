"""What the masks of secure aggregation cost a rank: milliseconds a step, beside what ``int8`` takes for its codec.

    python benchmarks/secure.py                  # half a minute

One process, no network: masks cost no bytes but a word a bucket. Medians of interleaved runs.
"""

import argparse
import statistics
import time

import numpy as np
import torch

from hvdplus.adapters.torch.ops import TorchOps
from hvdplus.adapters.transports.in_process import run
from hvdplus.compression import Spec, parse
from hvdplus.exchange.secure import Masks

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--elements", type=int, nargs="+", default=[10**6, 10**7])
parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
parser.add_argument("--runs", type=int, default=15)


def milliseconds(function):
    began = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - began)


def masks_of_rank_0(ranks):
    return run(ranks, lambda transport: Masks(transport, "a benchmark"))[0]


def main():
    args = parser.parse_args()
    torch.set_num_threads(1)
    ops, level = TorchOps(), parse("int8")
    print(f"{'gradient':>12}{'ranks':>7}{'codec ms':>10}{'masks ms':>10}{'times codec':>13}")
    for elements in args.elements:
        width = int(elements**0.5)
        gradient = torch.randn(width * width)
        for ranks in args.ranks:
            spec = Spec(((width, width),), 0, 0, ranks)
            ctx, masks = level.init(ops, spec), masks_of_rank_0(ranks)
            total = level.encode(ops, ctx, gradient)
            ctx = level.advance(ops, ctx, total)

            def codec(ctx=ctx, gradient=gradient):
                sent = level.send(ops, ctx, gradient)
                level.decode(ops, ctx, sent.payload)

            payload, summed = total.numpy(), np.full(len(total) + 1, ranks, np.int32)

            def mask(masks=masks, payload=payload, summed=summed):
                masks.masked(payload, "sum")
                masks.unmasked(summed, "sum")

            pairs = [(milliseconds(codec), milliseconds(mask)) for _ in range(args.runs)]
            took = [statistics.median(column) for column in zip(*pairs, strict=True)]
            ratio = statistics.median(masked / coded for coded, masked in pairs)
            print(f"{len(gradient):>12,}{ranks:>7}{took[0]:>10.2f}{took[1]:>10.2f}{ratio:>13.2f}", flush=True)


if __name__ == "__main__":
    main()
