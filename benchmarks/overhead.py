"""What hvdplus itself costs a step: its own computing in one process, without a network or other ranks.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --only none,fp16 --profile

A model of 42 small tensors is trained with and without hvdplus, in turns, over a transport that answers at once, as a
second rank with the same gradients would. What is left is hvdplus: hooks, packing, codecs of small arrays, metadata,
plans, run log. Figures are processor time of the thread: medians over turns, and the least, which other work on the
machine changes least.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hvdplus.adapters.torch.optimizer import wrap
from hvdplus.adapters.transports.local import Local
from hvdplus.exchange.metadata import length
from hvdplus.transport import OBJECTS, World

TENSORS, WIDTH, BATCH = 42, 24, 8
TURNS, STEPS, WARM_STEPS = 40, 25, 60
LIMIT_MS = 0.25
LEVELS = ("none", "fp16", "int8", "lowrank:8+fp16", "topk:0.05", "auto")


class Echo(Local):
    """Another rank that always has the same: a sum is twice one's own array, and is there at once."""

    name, size, local_size, negotiates = "echo", 2, 2, True

    def start(self, array: Any, name: str, scale: float = 1.0) -> Any:
        return self.start_all([array], name, scale)[0]

    def start_all(self, arrays: Sequence[Any], name: str, scale: float = 1.0) -> Any:
        memory = [array.data for array in arrays]  # as a transport writes: no version counts it
        torch._foreach_mul_(memory, 2 if scale == 1 else 2 * scale)
        if len(arrays[-1]) == length(2, TENSORS):  # each rank fills its own slot alone
            mine, theirs = arrays[-1][length(0, 0) : length(2, 0)].view(2, -1)
            theirs.copy_(mine.div_(2))
        return arrays

    def gather_objects(self, value: Any, what: str = OBJECTS) -> list[Any]:
        return [value, value]


def trainee(level: str | None) -> Callable[[], None]:
    """A training step at a level; None: without hvdplus."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(TENSORS // 2)))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if level is not None:
        world = World(Echo(), {"here": 2}, "echo", 0, ())
        optimizer = wrap(
            optimizer,
            model.named_parameters(),
            world,
            compression=level,
            settings=None,
            passes=1,
            average=True,
            sparse_as_dense=False,
        )
    inputs, labels = torch.randn(BATCH, WIDTH), torch.randint(WIDTH, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def milliseconds(step: Callable[[], None]) -> float:
    """Of the thread, a step."""
    began = time.thread_time()
    for _ in range(STEPS):
        step()
    return (time.thread_time() - began) / STEPS * 1e3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(LEVELS), help="levels, with commas between")
    parser.add_argument("--profile", action="store_true", help="where the time goes, function by function")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    levels = asked.only.split(",")
    people = {name: trainee(None if name == "plain" else name) for name in ("plain", *levels)}
    for step in people.values():
        for _ in range(WARM_STEPS):
            step()
    gc.disable()
    taken: dict[str, list[float]] = {name: [] for name in people}
    for _ in range(TURNS):
        for name, step in people.items():
            taken[name].append(milliseconds(step))
    print(f"{TENSORS} tensors; without hvdplus {statistics.median(taken['plain']):.3f} ms a step")
    worst = 0.0
    for name in levels:
        more = statistics.median(a - b for a, b in zip(taken[name], taken["plain"], strict=True))
        least = min(taken[name]) - min(taken["plain"])
        worst = max(worst, more)
        print(f"  {name:16s} {more:6.3f} ms more (least {least:.3f})")
    print(f"{'ok' if worst <= LIMIT_MS else 'FAIL'}    at most {LIMIT_MS} ms at every level: {worst:.3f}")
    for name in levels if asked.profile else ():
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(TURNS * STEPS):
            people[name]()
        profile.disable()
        print(f"\n{name}, {TURNS * STEPS} steps:")
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    return 0 if worst <= LIMIT_MS else 1


if __name__ == "__main__":
    raise SystemExit(main())
