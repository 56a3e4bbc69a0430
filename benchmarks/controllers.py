"""Two controllers on the same simulated jobs: who ends nearer to the best level, at what cost, with how many changes?

    python benchmarks/controllers.py                    the controller in use against the candidate, about a minute
    python benchmarks/controllers.py --jobs 20          fewer jobs of each kind
    python benchmarks/controllers.py --only candidate

The candidate's numbers were chosen on the jobs of seed 0: believe ``--seed 1000``.

Needs no machine to itself: time is simulated (``tests/simulating.py``), and nothing is measured but decisions.

What counts is *cost*: seconds a step times the price of delay, ``1 + κ e²``. κ is 0.05, e the residual over the
gradient (PowerSGD at ranks 16, 8 and 4 needs 1.04, 1.09 and 1.21 times the steps of dense on a text model). Columns:
the cost at the last level over that of the best level (median, the worst tenth begins at, worst; jobs beyond 5 %), the
cost of all steps over that of an oracle that runs the best level from the first step on (median, worst tenth), jobs
that end more than 2 % dearer than dense, changes of the level in a job (median, worst tenth), and processor seconds for
all jobs.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import candidate.controller as new
import simulating
from simulating import NOISES, Job, Noise, drive, some_jobs

import hvdplus.control.controller as old

PRICE_OF_DELAY = 0.05
ERRORS = (0.0, 0.0, 0.02, 0.8, 1.2)
"""What e comes to at each level of ``simulating.NAMES``; assumed."""
NOISY = Noise(compute=0.1, wire=0.3, rank=0.05, odd=0.03, waves=0.1)


def in_use(names: tuple[str, ...], costs: Any, limits: Any) -> Any:
    """The controller that hvdplus runs, with its default limits."""
    return old.Controller(names, costs)


def lenient(names: tuple[str, ...], costs: Any, limits: Any) -> Any:
    """The same with a far error budget, so that its veto plays no part."""
    return old.Controller(names, costs, replace(old.Limits(), error_budget=5.0))


def on_trial(names: tuple[str, ...], costs: Any, limits: Any) -> Any:
    """The candidate."""
    return new.Controller(names, costs, new.Config(delay_price=PRICE_OF_DELAY))


CONTROLLERS: dict[str, Callable[..., Any]] = {"in use": in_use, "lenient": lenient, "candidate": on_trial}
At = Callable[[int], Job]
"""Step -> the job as it is then."""


class Outcome(NamedTuple):
    """How one job went."""

    end: float
    """Cost at the last level, over that of the best."""
    whole: float
    """Cost of all steps, over the oracle's."""
    against_dense: float
    """Cost at the last level, over that of dense."""
    changes: int


def cost(job: Job, level: int) -> float:
    """Seconds of a step, times the price of delay."""
    return job.seconds(level) * (1 + PRICE_OF_DELAY * ERRORS[level] ** 2)


def training(step: int, level: int, age: int) -> tuple[float, float, float]:
    """Gradients that are mostly noise: what is held back grows until as much leaves in a step as joins."""
    if not ERRORS[level]:
        return 0.0, 1.0, 0.1
    share = 1 / (1 + ERRORS[level] ** 2)
    return ERRORS[level] * math.sqrt(1 - (1 - share) ** (age + 1)), 1.0, 0.1


def run(controller: Callable[..., Any], at: At, steps: int, seed: int) -> Outcome:
    """One job under one controller."""
    simulating.Controller = controller  # type: ignore[assignment,misc]
    course = drive(at, steps, seed=seed, training=training)
    levels = range(len(ERRORS))
    oracle = sum(min(cost(at(step), level) for level in levels) for step in range(steps))
    last, level = at(steps - 1), course.levels[-1]
    return Outcome(
        cost(last, level) / min(cost(last, other) for other in levels),
        sum(cost(at(step), level) for step, level in enumerate(course.levels)) / oracle,
        cost(last, level) / cost(last, 0),
        course.changes(0),
    )


def fast_links(count: int, seed: int = 0) -> list[Job]:
    """Communication of 2 to 15 % of the computation, codecs that cost 1 to 30 %, and much noise: little to gain."""
    dice, jobs = random.Random(3 + seed), []
    for job in some_jobs(count, NOISY, seed=9 + seed):
        compute = 10 ** dice.uniform(-2.7, -1)
        rate = job.payload_bytes[0] / (compute * dice.uniform(0.02, 0.15))
        codec = (0.0, *(compute * dice.uniform(0.01, 0.3) for _ in range(4)))
        jobs.append(replace(job, compute=compute, rate=rate, alpha=1e-5, codec=codec))
    return jobs


def steady(job: Job) -> At:
    """Nothing changes."""
    return lambda step: job


def link_times(factor: float) -> Callable[[Job], At]:
    """The link becomes faster or slower at step 200."""
    return lambda job: lambda step: replace(job, rate=job.rate * (factor if step >= 200 else 1))


def phases(job: Job) -> At:
    """The machine is 1.3 times slower in every other 70 steps."""
    slow = replace(job, compute=1.3 * job.compute, codec=tuple(1.3 * each for each in job.codec))
    return lambda step: slow if step // 70 % 2 else job


def scenarios(count: int, seed: int = 0) -> dict[str, tuple[list[Job], int, Callable[[Job], At]]]:
    """Name -> jobs, steps of each, how they change."""
    calm = some_jobs(count, NOISES["jitter"], seed=6 + seed)
    return {
        **{name: (some_jobs(count, noise, seed=5 + seed), 500, steady) for name, noise in NOISES.items()},
        "much noise": (some_jobs(count, NOISY, seed=11 + seed), 1000, steady),
        "fast links": (fast_links(count, seed), 700, steady),
        "link 4 x faster": (calm, 600, link_times(4)),
        "link 4 x slower": (calm, 600, link_times(0.25)),
        "machine in phases": (some_jobs(count, NOISES["jitter"], seed=7 + seed), 700, phases),
    }


def line(outcomes: Sequence[Outcome], seconds: float) -> str:
    """One row of the table."""

    def at(values: Sequence[float], share: float) -> float:
        return sorted(values)[min(len(values) - 1, int(share * len(values)))]

    ends, whole, dense, changes = zip(*outcomes, strict=True)
    return (
        f"{at(ends, 0.5):6.3f} {at(ends, 0.9):6.3f} {max(ends):6.3f} {sum(end > 1.05 for end in ends):5d} "
        f"{at(whole, 0.5):9.3f} {at(whole, 0.9):6.3f} {sum(each > 1.02 for each in dense):8d} "
        f"{at(changes, 0.5):9.0f} {at(changes, 0.9):4.0f} {seconds:9.1f}"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=60, help="jobs of each kind (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="other jobs than those that the candidate was tuned on")
    parser.add_argument("--only", choices=CONTROLLERS, help="one controller")
    asked = parser.parse_args()
    print(f"{'':30}   end/best: median, tenth, worst, > 5 %   all: median, tenth   > dense   changes   seconds")
    for name, (jobs, steps, changing) in scenarios(asked.jobs, asked.seed).items():
        print(name)
        for title, controller in CONTROLLERS.items():
            if asked.only in (None, title):
                began = time.process_time()
                outcomes = [run(controller, changing(job), steps, seed) for seed, job in enumerate(jobs)]
                print(f"  {title:28} {line(outcomes, time.process_time() - began)}", flush=True)


if __name__ == "__main__":
    main()
