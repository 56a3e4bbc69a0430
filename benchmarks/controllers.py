"""Two controllers on the same simulated jobs: who ends nearer to the best level, at what cost, with how many changes?

    python benchmarks/controllers.py                    the controller of this tree, a minute
    python benchmarks/controllers.py --against main~5   and that of another commit, in turns
    python benchmarks/controllers.py --seed 1000        other jobs than those that its numbers were chosen on

Needs no machine to itself: time is simulated (``tests/simulating.py``) or was recorded (``traces.py``), and nothing is
measured but decisions.

What counts is *cost*: seconds a step times the price of delay, ``1 + κ e``, with κ as in the settings and e the
residual over the gradient. Columns: the cost at the level held last over that of the best level (median, the worst
tenth begins at, worst; jobs beyond 5 %), the cost of all steps, with what levels before have left, over that of an
oracle that runs the best level in every step (median, worst tenth), jobs that end more than 2 % dearer than dense,
changes of the level in a job (median, worst tenth), and processor seconds for all jobs.
"""

from __future__ import annotations

import argparse
import io
import math
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import permutations, product
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))
if __name__ == "__main__":  # the tree's own package, whatever is installed
    sys.path.insert(0, str(ROOT))

from simulating import NOISES, Job, Noise, drive, some_jobs  # noqa: E402
from traces import TRAINING_STEPS, Trace, in_training, moves, traces  # noqa: E402

from hvdplus.control.config import Config  # noqa: E402
from hvdplus.control.controller import Controller  # noqa: E402
from hvdplus.control.delay import price_of_delay, reached  # noqa: E402

PRICE_OF_DELAY = Config().delay_price
NOISY = Noise(compute=0.1, wire=0.3, rank=0.05, odd=0.03, waves=0.1)
FIRST = (0, 50, 100)
"""Steps of a training at which jobs begin whose errors move: those of ``wide`` grow seven times from 50 to 250."""
At = Callable[[int], "Job | Trace"]
"""Step -> the job as it is then."""


def in_use(names: tuple[str, ...], costs: Any, config: Any) -> Controller:
    """The controller of this tree with its default numbers."""
    return Controller(names, costs)


def with_numbers(numbers: Sequence[str]) -> Callable[..., Controller]:
    """The same with other numbers, each as ``name=value``."""
    pairs = (number.partition("=") for number in numbers)
    config = Config(**{name: type(getattr(Config(), name))(value) for name, _, value in pairs})
    return lambda names, costs, _: Controller(names, costs, config)


@contextmanager
def of_commit(commit: str) -> Iterator[Callable[..., Any]]:
    """The controller of another commit with its own numbers, beside this tree's under another package name."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", commit, "hvdplus/control"], check=True, capture_output=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            packed.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        source = Path(folder) / "hvdplus" / "control"
        for path in source.glob("*.py"):
            path.write_text(path.read_text().replace("hvdplus.control", "control_against"))
        source.rename(Path(folder) / "control_against")
        sys.path.append(folder)
        try:
            against = import_module("control_against.controller")
        finally:
            sys.path.remove(folder)
        yield lambda names, costs, config: against.Controller(names, costs)


class Outcome(NamedTuple):
    """How one job went."""

    end: float
    """Cost at the level held last, over that of the best."""
    whole: float
    """Cost of all steps, over the oracle's."""
    against_dense: float
    """Cost at the level held last, over that of dense."""
    changes: int


def cost(job: Job | Trace, level: int) -> float:
    """Seconds of a step, times the price of delay."""
    return paid(job, level, 0.0)


def paid(job: Job | Trace, level: int, error: float) -> float:
    """The same, of an error above what the level's comes to: that a residual has yet to grow is nobody's merit."""
    kappa = PRICE_OF_DELAY * job.costs[level].delay_weight
    return job.seconds(level) * price_of_delay(kappa, max(error, job.errors[level]))


def steady(job: Job | Trace) -> At:
    """Nothing changes."""
    job = job.rewound() if isinstance(job, Trace) else job
    return lambda step: job


class Delay:
    """Gradients that are mostly noise: what is held back grows until as much leaves in a step as joins, which is the
    job's error at that step. What the level before held back leaves more slowly. Readings scatter as the job says."""

    def __init__(self, at: At = steady(Job()), seed: int = 0) -> None:  # noqa: B008 (a constant)
        self._at, self._dice, self._carried = at, random.Random(seed), 0.0
        self.errors: list[float] = []
        """Of every step, as it was."""

    def __call__(self, step: int, level: int, age: int) -> tuple[float, float, float]:
        """A ``Training``."""
        job = self._at(step)
        asks, dense = job.costs[level], job.costs[0]
        if not age:
            self._carried = self.errors[-1] if self.errors else 0.0
        carried = self._carried * asks.keeps_residual  # a flush takes ten steps in truth
        share = asks.payload_bytes / dense.payload_bytes
        self.errors.append(reached(job.errors[level], age + 1, carried, share))
        off = self._dice.gauss(0, job.scatter[level]) if job.scatter else 0.0
        return self.errors[-1] * math.exp(off), 1.0, 0.1


def run(controller: Callable[..., Any], at: At, steps: int, seed: int) -> Outcome:
    """One job under one controller."""
    delay, levels = Delay(at, seed), range(len(at(0).names))
    course = drive(at, steps, make=controller, seed=seed, training=delay)
    oracle = sum(min(cost(at(step), level) for level in levels) for step in range(steps))
    last, level = at(steps - 1), course.controller.held
    return Outcome(
        cost(last, level) / min(cost(last, other) for other in levels),
        sum(
            paid(at(step), level, error)
            for step, (level, error) in enumerate(zip(course.ran, delay.errors, strict=True))
        )
        / oracle,
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


def misled(count: int, seed: int = 0) -> list[Job]:
    """Sums before training take a third less or twice as long as within it, and computation hides much."""
    dice = random.Random(4 + seed)
    jobs = some_jobs(count, NOISES["jitter"], seed=13 + seed)
    return [replace(job, before=dice.choice((0.6, 0.7, 2.0)), overlap=dice.uniform(0.4, 0.9)) for job in jobs]


def link_times(factor: float) -> Callable[[Job], At]:
    """The link becomes faster or slower at step 200."""
    return lambda job: lambda step: replace(job, rate=job.rate * (factor if step >= 200 else 1))


def phases(job: Job) -> At:
    """The machine is 1.3 times slower in every other 70 steps."""
    slow = replace(job, compute=1.3 * job.compute, codec=tuple(1.3 * each for each in job.codec))
    return lambda step: slow if step // 70 % 2 else job


def in_training_from(job: tuple[Trace, Trace, int]) -> At:
    """A trace's steps with the errors of another's model, from a step of its training on."""
    trace, model, first = job
    steps = in_training(trace, model)
    return lambda step: steps[first + step]


MOVING, ANOTHER_LINK = "errors that move", "another recorded link"
CODECS_SCATTER = 0.2
"""Standard deviation of the logarithm of what a level's codec is said to take alone. (0.12 to 0.13 of one level over
another in eight calibrations on two cores that were idle otherwise, 0.17 to 0.28 while levels did not take turns.)"""


def another_link(pair: tuple[Trace, Trace]) -> At:
    """The link of a trace becomes that of another one of its model at step 200."""
    before, after = (trace.rewound() for trace in pair)
    after = replace(after, costs=before.costs, errors=before.errors, previews=before.previews)
    return lambda step: before if step < 200 else after


Scenario = tuple[Sequence[Any], int, Callable[[Any], At]]
"""Jobs, steps of each, how they change."""


def scenarios(count: int, seed: int = 0) -> dict[str, Scenario]:
    """Name -> scenario."""
    calm, found = some_jobs(count, NOISES["jitter"], seed=6 + seed), traces()
    moving = [trace for trace in found if moves(trace)]
    models = {trace.model: trace for trace in moving}.values()
    moved = [*product(moving, models, FIRST)]
    random.Random(seed).shuffle(moved)
    pairs = [(a, b) for a, b in permutations(found, 2) if (a.model, a.names) == (b.model, b.names)]
    recorded = (found * count)[: max(count, len(found))]

    return {
        **{name: (some_jobs(count, noise, seed=5 + seed), 500, steady) for name, noise in NOISES.items()},
        "much noise": (some_jobs(count, NOISY, seed=11 + seed), 1000, steady),
        "fast links": (fast_links(count, seed), 700, steady),
        "misled at first": (misled(count, seed), 600, steady),
        "link 4 x faster": (calm, 600, link_times(4)),
        "link 4 x slower": (calm, 600, link_times(0.25)),
        "traces": (recorded, 500, steady),
        "codecs misjudged": ([misjudged(trace, number + seed) for number, trace in enumerate(recorded)], 500, steady),
        ANOTHER_LINK: ((pairs * count)[:count], 500, another_link),
        MOVING: ((moved * count)[: 3 * count], TRAINING_STEPS - max(FIRST), in_training_from),
        "machine in phases": (some_jobs(count, NOISES["jitter"], seed=7 + seed), 700, phases),
    }


def misjudged(trace: Trace, number: int) -> Trace:
    """With other seconds that codecs are said to take alone, as they scatter from one calibration to the next."""
    dice = random.Random(number)
    costs = (cost._replace(codec=cost.codec * math.exp(dice.gauss(0.0, CODECS_SCATTER))) for cost in trace.costs)
    return replace(trace, costs=tuple(costs))


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
    parser.add_argument(
        "--jobs", type=int, default=60, help="jobs of each kind, three times as many whose errors move (default: 60)"
    )
    parser.add_argument("--seed", type=int, default=0, help="other jobs than those that the numbers were chosen on")
    parser.add_argument("--against", metavar="COMMIT", help="also the controller of another commit")
    parser.add_argument("--set", metavar="NAME=VALUE", nargs="+", help="also this controller with other numbers")
    asked = parser.parse_args()
    with ExitStack() as stack:
        contestants: dict[str, Callable[..., Any]] = {"this": in_use}
        if asked.against:
            contestants[asked.against] = stack.enter_context(of_commit(asked.against))
        if asked.set:
            contestants[" ".join(asked.set)] = with_numbers(asked.set)
        print(f"{'':30}   end/best: median, tenth, worst, > 5 %   all: median, tenth   > dense   changes   seconds")
        for name, (jobs, steps, changing) in scenarios(asked.jobs, asked.seed).items():
            print(name)
            for title, controller in contestants.items():
                ats, began = [changing(job) for job in jobs], time.process_time()
                outcomes = [run(controller, at, steps, seed) for seed, at in enumerate(ats)]
                print(f"  {title:28} {line(outcomes, time.process_time() - began)}", flush=True)


if __name__ == "__main__":
    main()
