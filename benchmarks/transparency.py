"""Is hvdplus at ``none`` as good as not there? Held against stock Horovod: the weights bit by bit, and the time.

    python benchmarks/transparency.py

Needs root for the part on four hosts (see ``lab.py``), and a machine with nothing else to do. Both train the same model
from the same weights on the same data. Where they share a job they take turns, block by block; stock Horovod as it
comes, without the ring that hvdplus sets up, needs jobs of its own, which take turns with the others. A ratio is the
geometric mean over the pairs, with 95 % bounds from their spread; below 1 hvdplus is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from adaptive import Ratio, Verdict, ratio
from lab import Lab, unavailable

TRAINED = 20
"""Steps after which weights are compared."""
BLOCKS, BLOCK_STEPS = 20, 10
LOOPBACK_LIMIT, AS_IT_COMES_LIMIT, WITH_RING_LIMIT = 1.02, 0.80, 1.0
HOSTS, RATE, JOBS, HOST_BLOCKS, HOST_BLOCK_STEPS = 4, "1gbit", 4, 5, 3
SHARED = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
"""For everybody: ranks that wait must not keep others from computing."""

Wrap = Callable[[torch.optim.Optimizer, Iterable[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]


class Trainee:
    """A model of 10 M parameters, in training on random data of its rank."""

    def __init__(self, wrap: Wrap, name: str, rank: int) -> None:
        """``name`` begins the names of its tensors."""
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(784, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048), torch.nn.ReLU(),
            torch.nn.Linear(2048, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 10),
        )  # fmt: skip
        named = [(f"{name}.{key}", parameter) for key, parameter in self.model.named_parameters()]
        self._optimizer = wrap(torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9), named)
        self._draw = torch.Generator().manual_seed(rank)

    def steps(self, count: int) -> list[float]:
        """Train; returns every step's seconds."""
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            inputs = torch.randn(32, 784, generator=self._draw)
            labels = torch.randint(0, 10, (32,), generator=self._draw)
            self._optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self.model(inputs), labels).backward()
            self._optimizer.step()
            seconds.append(time.perf_counter() - began)
        return seconds

    def block(self, count: int) -> float:
        """Median seconds of ``count`` steps, after one that does not count."""
        return statistics.median(self.steps(count + 1)[1:])


def both(blocks: int, block_steps: int) -> dict[str, Any]:
    """On every rank: stock Horovod and hvdplus side by side, over hvdplus's settings of MPI."""
    import horovod.torch as horovod

    import hvdplus.torch as hvd

    hvd.init()
    stock = Trainee(lambda bare, named: horovod.DistributedOptimizer(bare, named), "stock", hvd.rank())
    ours = Trainee(
        lambda bare, named: hvd.DistributedOptimizer(bare, named, compression="none"), "ours", hvd.rank()
    )  # fmt: skip
    stock.steps(TRAINED)
    ours.steps(TRAINED)
    pairs = list(zip(stock.model.parameters(), ours.model.parameters(), strict=True))
    mine = {
        "equal": all(torch.equal(a, b) for a, b in pairs),
        "difference": max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs),
        "identical": hvd.identical(ours.model),
    }
    order = random.Random(0)
    seconds: dict[str, list[float]] = {"stock": [], "ours": []}
    for _ in range(blocks):
        for name in order.sample(list(seconds), 2):
            hvd.barrier()
            seconds[name].append({"stock": stock, "ours": ours}[name].block(block_steps))
    everyone = hvd.allgather_object(mine)
    found = {
        "rank": hvd.rank(),
        "equal": all(each["equal"] for each in everyone),
        "difference": max(each["difference"] for each in everyone),
        "identical": all(each["identical"] for each in everyone),
        **seconds,
    }
    hvd.shutdown()
    return found


def stock_alone(blocks: int, block_steps: int) -> dict[str, Any]:
    """On every rank: stock Horovod in a job of its own."""
    import horovod.torch as horovod

    horovod.init()
    stock = Trainee(lambda bare, named: horovod.DistributedOptimizer(bare, named), "stock", horovod.rank())
    stock.steps(3)
    found = {"rank": horovod.rank(), "stock": [stock.block(block_steps) for _ in range(blocks)]}
    horovod.shutdown()
    return found


def on_this_host(ranks: int) -> dict[str, Any]:
    """What rank 0 of a job of ``both`` found on so many ranks of this host, a core each if there are enough."""
    binding = "--bind-to core" if ranks <= (os.cpu_count() or 1) else "--bind-to none --oversubscribe"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = f"mpirun -np {ranks} {binding} --mca btl tcp,self".split()
    job = subprocess.run(
        [*command, sys.executable, *job_arguments("both", BLOCKS, BLOCK_STEPS)],
        env=os.environ | root | path | SHARED,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if job.returncode:
        raise SystemExit(f"The job on {ranks} ranks failed. It printed:\n{job.stdout}{job.stderr}")
    return of_rank_0(job.stdout)


def on_hosts(lab: Lab, what: str) -> dict[str, Any]:
    """The same on the hosts of a laboratory."""
    command = ["python", *job_arguments(what, HOST_BLOCKS, HOST_BLOCK_STEPS)]
    result = lab.run(command, env=SHARED, timeout_seconds=600)
    if result.exit_code:
        raise SystemExit(f"The job on {HOSTS} hosts failed. It printed:\n{result.output}")
    return of_rank_0(result.output)


def job_arguments(what: str, blocks: int, block_steps: int) -> list[str]:
    return [str(Path(__file__).absolute()), "--job", what, str(blocks), str(block_steps)]


def of_rank_0(output: str) -> dict[str, Any]:
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return next(each for each in found if each["rank"] == 0)


def judge(name: str, found: Ratio, limit: float) -> Verdict:
    return Verdict(f"{name}: at most {limit:.2f}", found.high <= limit, f"{found}")


def main() -> int:
    """Measure and print. Returns 0 whatever comes out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--job", nargs=3, metavar=("WHAT", "BLOCKS", "STEPS"), help=argparse.SUPPRESS)  # a rank of one
    options = parser.parse_args()
    if options.job:
        torch.set_num_threads(1)
        what, blocks, block_steps = options.job[0], int(options.job[1]), int(options.job[2])
        print(json.dumps((both if what == "both" else stock_alone)(blocks, block_steps)), flush=True)
        return 0
    two, four = on_this_host(2), on_this_host(4)
    verdicts = [
        Verdict(
            f"after {TRAINED} steps on 2 ranks weights are Horovod's, bit for bit",
            two["equal"] and two["identical"],
            f"equal: {two['equal']}, ranks identical: {two['identical']}",
        ),
        Verdict(
            f"after {TRAINED} steps on 4 ranks they are so to rounding (1e-5 of the largest weight)",
            four["difference"] <= 1e-5 and four["identical"],
            f"largest difference {four['difference']:.1e}, ranks identical: {four['identical']}",
        ),
        judge("step time on 2 ranks of a host, against Horovod's", ratio(two["ours"], two["stock"]), LOOPBACK_LIMIT),
    ]
    if why := unavailable():
        print(f"Nothing is measured between hosts: {why}")
    else:
        verdicts += between_hosts()
    for verdict in verdicts:
        print(f"{'ok  ' if verdict.passed else 'FAIL'}  {verdict.line}\n        {verdict.figures}")
    return 0


def between_hosts() -> list[Verdict]:
    """Jobs with both, and of stock Horovod as it comes, in turns."""
    ours, with_ring, as_it_comes = [], [], []
    with Lab(HOSTS, RATE) as lab:
        lab.check()
        for _ in range(JOBS):
            found = on_hosts(lab, "both")
            ours += found["ours"]
            with_ring += found["stock"]
            as_it_comes += on_hosts(lab, "stock")["stock"]
    where = f"step time on {HOSTS} hosts at {RATE}, against Horovod's"
    return [
        judge(f"{where} as it comes", ratio(ours, as_it_comes), AS_IT_COMES_LIMIT),
        judge(f"{where} with the ring set by hand", ratio(ours, with_ring), WITH_RING_LIMIT),
    ]


if __name__ == "__main__":
    sys.exit(main())
