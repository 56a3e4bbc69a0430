"""Is hvdplus at ``none`` as good as not there? Held against stock Horovod: the weights bit by bit, and the time.

    python benchmarks/transparency.py
    python benchmarks/transparency.py --framework keras

Under Keras 3 stock Horovod's optimizer exchanges nothing: there it is a train step whose gradients pass through
``hvd.allreduce``, written by hand, and the comparison is made on this host alone.

Needs root for the part on four hosts (see ``hvdplus.lab``), and a machine with nothing else to do. Both train one model
from the same weights on the same data. Where they share a job they take turns, step by step; stock Horovod as it
comes, without the ring that hvdplus sets up, needs jobs of its own, which take turns with the others. A ratio is the
geometric mean over the pairs (of steps, or of jobs), with 95 % bounds from their spread; below 1 hvdplus is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adaptive import Ratio, Verdict, ratio

from hvdplus.lab import Lab, unavailable

TRAINED = 20
"""Steps after which weights are compared."""
BLOCKS, BLOCK_STEPS = 200, 1
LOOPBACK_LIMIT, AS_IT_COMES_LIMIT, WITH_RING_LIMIT = 1.02, 0.80, 1.0
HOSTS, RATE, JOBS, HOST_BLOCKS, HOST_BLOCK_STEPS, HOST_TRAINED = 4, "1gbit", 4, 12, 1, 3
SHARED = {
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_btl_tcp_flags": "9",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTRAOP_THREADS": "1",
}
"""For everybody: ranks that wait must not keep others from computing."""

Wrap = Callable[[torch.optim.Optimizer, Iterable[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]


class Trainee:
    """A model of 10 M parameters, in training on random data of its rank."""

    def train(self) -> None:
        """One step."""
        raise NotImplementedError

    def weights(self) -> list[np.ndarray]:
        """All of the model's."""
        raise NotImplementedError

    def steps(self, count: int) -> list[float]:
        """Train; returns every step's seconds."""
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            self.train()
            seconds.append(time.perf_counter() - began)
        return seconds

    def fresh_memory(self, count: int) -> list[float]:
        """MB, of each step, of memory that is touched for the first time since the system gave it out."""
        fresh = []
        for _ in range(count):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            self.train()
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            fresh.append(faults * resource.getpagesize() / 1e6)
        return fresh

    def block(self, count: int) -> float:
        """Median seconds of ``count`` steps."""
        return statistics.median(self.steps(count))


class TorchTrainee(Trainee):
    """In PyTorch. Nothing in it jumps: where the last bit of a sum switches a ReLU, weights differ by 1e-4 at once."""

    def __init__(self, wrap: Wrap, name: str, rank: int) -> None:
        """``name`` begins the names of its tensors."""
        torch.manual_seed(0)
        self._model = torch.nn.Sequential(
            torch.nn.Linear(784, 2048), torch.nn.Tanh(), torch.nn.Linear(2048, 2048), torch.nn.Tanh(),
            torch.nn.Linear(2048, 2048), torch.nn.Tanh(), torch.nn.Linear(2048, 10),
        )  # fmt: skip
        named = [(f"{name}.{key}", parameter) for key, parameter in self._model.named_parameters()]
        self._optimizer = wrap(torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9), named)
        self._draw = torch.Generator().manual_seed(rank)

    def train(self) -> None:
        inputs = torch.randn(32, 784, generator=self._draw)
        labels = torch.randint(0, 10, (32,), generator=self._draw)
        self._optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self._model(inputs), labels).backward()
        self._optimizer.step()

    def weights(self) -> list[np.ndarray]:
        return [parameter.detach().numpy() for parameter in self._model.parameters()]


class KerasTrainee(Trainee):
    """In Keras on TensorFlow, compiled."""

    def __init__(self, optimizer: Any, rank: int) -> None:
        import keras

        keras.utils.set_random_seed(0)
        hidden = [keras.layers.Dense(2048, activation="tanh") for _ in range(3)]
        self._model = keras.Sequential([keras.layers.Input((784,)), *hidden, keras.layers.Dense(10)])
        self._model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        self._draw = np.random.default_rng(rank)

    def train(self) -> None:
        inputs = self._draw.standard_normal((32, 784), dtype=np.float32)
        self._model.train_on_batch(inputs, self._draw.integers(0, 10, 32))

    def weights(self) -> list[np.ndarray]:
        return list(self._model.get_weights())


def in_torch() -> tuple[Any, Trainee, Trainee]:
    """The front door, stock Horovod's trainee, and ours."""
    import horovod.torch as horovod

    import hvdplus.torch as hvd

    hvd.init()
    stock = TorchTrainee(lambda bare, named: horovod.DistributedOptimizer(bare, named), "stock", hvd.rank())
    ours = TorchTrainee(
        lambda bare, named: hvd.DistributedOptimizer(bare, named, compression="none"), "ours", hvd.rank()
    )  # fmt: skip
    return hvd, stock, ours


def in_keras() -> tuple[Any, Trainee, Trainee]:
    """As ``in_torch``; stock Horovod's all-reduce is called by hand."""
    import horovod.tensorflow as horovod
    import keras

    import hvdplus.keras as hvd

    hvd.init()

    class ByHand(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            reduced = [horovod.allreduce(g, op=horovod.Average, name=f"hand.{i}") for i, g in enumerate(grads)]
            super().apply(reduced, trainable_variables)

    options = {"learning_rate": 0.01, "momentum": 0.9}
    stock = KerasTrainee(ByHand(**options), hvd.rank())
    ours = KerasTrainee(hvd.DistributedOptimizer(keras.optimizers.SGD(**options), compression="none"), hvd.rank())
    return hvd, stock, ours


def both(framework: str, blocks: int, block_steps: int, trained: int) -> dict[str, Any]:
    """On every rank: stock Horovod and hvdplus side by side, over hvdplus's settings of MPI."""
    hvd, stock, ours = {"torch": in_torch, "keras": in_keras}[framework]()
    stock.steps(trained)
    ours.steps(trained)
    pairs = list(zip(stock.weights(), ours.weights(), strict=True))
    mine = {
        "equal": all(np.array_equal(a, b) for a, b in pairs),
        "difference": max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs),
        "identical": hvd.identical([hvd_array(weight, framework) for weight in ours.weights()]),
        "fresh_stock": statistics.median(stock.fresh_memory(trained)),
        "fresh_ours": statistics.median(fresh := ours.fresh_memory(trained)),
        "most_fresh": max(fresh),
    }
    order = random.Random(0)
    seconds: dict[str, list[float]] = {"stock": [], "ours": []}
    for _ in range(blocks):
        for name in order.sample(list(seconds), 2):
            hvd._require_world().transport.barrier()
            seconds[name].append({"stock": stock, "ours": ours}[name].block(block_steps))
    everyone = hvd.allgather_object(mine)
    found = {
        "rank": hvd.rank(),
        "equal": all(each["equal"] for each in everyone),
        "difference": max(each["difference"] for each in everyone),
        "identical": all(each["identical"] for each in everyone),
        "fresh_stock": max(each["fresh_stock"] for each in everyone),
        "fresh_ours": max(each["fresh_ours"] for each in everyone),
        "most_fresh": max(each["most_fresh"] for each in everyone),
        **seconds,
    }
    hvd.shutdown()
    return found


def hvd_array(array: np.ndarray, framework: str) -> Any:
    """As the front door takes it."""
    return torch.from_numpy(array) if framework == "torch" else array


def stock_alone(blocks: int, block_steps: int, trained: int) -> dict[str, Any]:
    """On every rank: stock Horovod in a job of its own."""
    import horovod.torch as horovod

    horovod.init()
    stock = TorchTrainee(lambda bare, named: horovod.DistributedOptimizer(bare, named), "stock", horovod.rank())
    stock.steps(2 * trained)  # as many as in ``both``
    seconds = []
    for _ in range(blocks):
        horovod.barrier()
        seconds.append(stock.block(block_steps))
    found = {"rank": horovod.rank(), "stock": seconds}
    horovod.shutdown()
    return found


def on_this_host(framework: str, ranks: int, blocks: int) -> dict[str, Any]:
    """What rank 0 of a job of ``both`` found on so many ranks of this host, a core each if there are enough."""
    binding = "--bind-to core" if ranks <= (os.cpu_count() or 1) else "--bind-to none --oversubscribe"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = f"mpirun -np {ranks} {binding} --mca btl tcp,self".split()
    job = subprocess.run(
        [*command, sys.executable, *job_arguments(framework, blocks, BLOCK_STEPS, TRAINED)],
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
    command = ["python", *job_arguments(what, HOST_BLOCKS, HOST_BLOCK_STEPS, HOST_TRAINED)]
    result = lab.run(command, env=SHARED, timeout_seconds=600)
    if result.exit_code:
        raise SystemExit(f"The job on {HOSTS} hosts failed. It printed:\n{result.output}")
    return of_rank_0(result.output)


def job_arguments(what: str, *numbers: int) -> list[str]:
    return [str(Path(__file__).absolute()), "--job", what, *map(str, numbers)]


def of_rank_0(output: str) -> dict[str, Any]:
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return next(each for each in found if each["rank"] == 0)


def judge(name: str, found: Ratio, limit: float) -> Verdict:
    return Verdict(f"{name}: at most {limit:.2f}", found.high <= limit, f"{found}")


def main() -> int:
    """Measure and print. Returns 0 whatever comes out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--job", nargs=4, metavar=("WHAT", "BLOCKS", "STEPS", "TRAINED"), help=argparse.SUPPRESS
    )  # a rank of one
    parser.add_argument("--framework", choices=("torch", "keras"), default="torch")
    options = parser.parse_args()
    if options.job:
        torch.set_num_threads(1)
        what, (blocks, block_steps, trained) = options.job[0], map(int, options.job[1:])
        found = (
            stock_alone(blocks, block_steps, trained) if what == "stock" else both(what, blocks, block_steps, trained)
        )
        if found["rank"] == 0:
            print(json.dumps(found), flush=True)
        return 0
    two, four = on_this_host(options.framework, 2, BLOCKS), on_this_host(options.framework, 4, 1)
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
        Verdict(
            "a steady step takes no more fresh memory than Horovod's, but for 0.1 MB",
            two["fresh_ours"] <= two["fresh_stock"] + 0.1,
            f"median {two['fresh_ours']:.2f} MB a step, Horovod's {two['fresh_stock']:.2f}; at most "
            f"{two['most_fresh']:.2f} in a step (gradients: 40 MB)",
        ),
        judge(
            "step time on 2 ranks of a host, over TCP, against Horovod's",
            ratio(two["ours"], two["stock"]),
            LOOPBACK_LIMIT,
        ),
    ]
    say(verdicts)
    if options.framework == "keras":
        return 0
    if why := unavailable():
        print(f"Nothing is measured between hosts: {why}")
    else:
        say(between_hosts())
    return 0


def say(verdicts: list[Verdict]) -> None:
    for verdict in verdicts:
        print(f"{'ok  ' if verdict.passed else 'FAIL'}  {verdict.line}\n        {verdict.figures}", flush=True)


def between_hosts() -> list[Verdict]:
    """Jobs with both, and of stock Horovod as it comes, in turns."""
    ours, with_ring, of_jobs, as_it_comes = [], [], [], []
    with Lab(HOSTS, RATE) as lab:
        lab.check()
        for number in range(JOBS):
            order = ("torch", "stock") if number % 2 else ("stock", "torch")
            found = {what: on_hosts(lab, what) for what in order}
            ours += found["torch"]["ours"]
            with_ring += found["torch"]["stock"]
            of_jobs.append(statistics.median(found["torch"]["ours"]))
            as_it_comes.append(statistics.median(found["stock"]["stock"]))
    where = f"step time on {HOSTS} hosts at {RATE}, against Horovod's"
    return [
        judge(f"{where} as it comes", ratio(of_jobs, as_it_comes), AS_IT_COMES_LIMIT),
        judge(f"{where} with the ring set by hand", ratio(ours, with_ring), WITH_RING_LIMIT),
    ]


if __name__ == "__main__":
    sys.exit(main())
