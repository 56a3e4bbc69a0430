"""What the tests of decisions share: a simulated job on a simulated link, whose true step times are known.

The wire works while the backward pass does, but for the bucket that leaves last; what it needs beyond that is exposed.
Ranks say what they measured, each for itself, and ``reduce_times`` makes one set of figures of it, as in a real job.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from hvdplus.control.config import Config
from hvdplus.control.controller import Controller, Decision, Mode, Observation
from hvdplus.control.handling import PACKING
from hvdplus.control.link import LevelCost
from hvdplus.control.meter import StepTimes, reduce_times
from hvdplus.control.probing import sums

NAMES = ("none", "fp16", "int8", "lowrank:16+fp16", "lowrank:8+fp16")
ERRORS = (0.0, 0.0, 0.3, 0.45, 0.7)
"""What e comes to at each level: about as in ``benchmarks/results/delay.txt``."""
LOSSY = 2
"""Least level that keeps a residual."""
DRAIN_STEPS = 10
NORM_STEPS = 5
PREVIEW_ERROR, PREVIEWS_APART = 0.5, 0.15
"""Standard deviations of the logarithm of the error that follows from a preview: common to levels of as many passes,
as all are here, and of each by itself. (``benchmarks/previews.py``: five models, three levels of two passes, 0.5 and
0.15.)"""
PAUSE = 40.0
"""What a script does between two steps now and then takes as long as so many steps compute."""
ms = 1e-3


@dataclass(frozen=True)
class Noise:
    """Standard deviations, as shares of the figure, and how often something odd happens."""

    compute: float = 0.0
    wire: float = 0.0
    rank: float = 0.0
    """Of each rank's own computation."""
    odd: float = 0.0
    """Share of steps that compute half as long again, and of those whose communication takes three times as long."""
    waves: float = 0.0
    """Of the wire, as it comes and goes over some ten steps."""
    pauses: float = 0.0
    """Share of steps before which the script validates or writes a checkpoint, and for as long as ``PAUSE`` steps
    compute. That step then computes half as long again, with others' data in the caches."""


NOISES = {
    "jitter": Noise(compute=0.05, wire=0.05, rank=0.02),
    "restless wire": Noise(compute=0.03, wire=0.2, rank=0.02),
    "odd steps": Noise(compute=0.03, wire=0.05, rank=0.01, odd=0.05),
    "waves": Noise(compute=0.03, wire=0.05, rank=0.01, waves=0.1),
    "pauses": Noise(compute=0.03, wire=0.05, rank=0.01, pauses=0.04),
}


@dataclass(frozen=True)
class Job:
    """What a step costs."""

    compute: float = 50 * ms
    payload_bytes: tuple[float, ...] = (8e6, 4e6, 2e6, 6e5, 3e5)
    rate: float = 125e6
    """Bytes a second."""
    alpha: float = 0.2 * ms
    """Seconds for each all-reduce."""
    messages: int = 5
    codec: tuple[float, ...] = (0.0, 1 * ms, 2 * ms, 4 * ms, 3 * ms)
    told: float = 1.0
    """What the controller is told of the codecs, as a multiple of the truth; 0: nothing."""
    overlap: float = 0.4
    """Share of the computation that communication can hide behind."""
    burst: float = 0.0
    """Bytes of a sounding that the link carries at any speed."""
    wait: float = 0.0
    """Seconds until a sounding begins."""
    lag: float = 0.0
    """Seconds of a step's communication in which ranks wait for each other, and no link carries anything."""
    before: float = 1.0
    """Seconds of sums before training, as a multiple of what they take within."""
    ranks: int = 2
    names: tuple[str, ...] = NAMES
    errors: tuple[float, ...] = ERRORS
    scatter: tuple[float, ...] = ()
    """Standard deviation of the logarithm of a reading of each level's error; empty: it is as it is."""
    slow_rank: float = 0.0
    """Seconds that rank 0 computes longer than the others."""
    noise: Noise = Noise()

    @property
    def costs(self) -> tuple[LevelCost, ...]:
        """What the controller is told of the levels."""
        return tuple(
            LevelCost(
                round(sent),
                round(sent / self.messages),
                self.messages,
                self.told * codec / (1 + PACKING * (level >= LOSSY)),
                level >= LOSSY,
            )
            for level, (sent, codec) in enumerate(zip(self.payload_bytes, self.codec, strict=True))
        )

    @property
    def probes(self) -> tuple[tuple[int, float], ...]:
        """(bytes, seconds) of sums before training, without noise."""
        return tuple(sums(lambda size: self.before * self.probe(size), self.costs[0].payload_bytes))

    def wire(self, level: int) -> float:
        """All communication of a step, hidden or not."""
        return self.alpha * self.messages + self.payload_bytes[level] / self.rate

    def exposed(self, level: int) -> float:
        wire = self.wire(level)
        return self.lag + max(wire / self.messages, wire - self.overlap * (self.compute + self.slow_rank))

    def probe(self, size: int) -> float:
        """A sum that nothing else goes along with."""
        return self.wait + self.alpha + max(0.0, size - self.burst) / self.rate

    def seconds(self, level: int) -> float:
        """The step, without noise."""
        return self.compute + self.slow_rank + self.codec[level] + self.exposed(level)

    def best(self, levels: Iterable[int] = range(len(NAMES))) -> float:
        """The shortest step of all, without noise: the oracle that has tried every level."""
        return min(self.seconds(level) for level in levels)

    def preview(self, level: int, dice: random.Random, off: float) -> float:
        """What a preview shows: the share of a step's gradient that a level would hold back. ``off``: of the error that
        follows from it, as a factor common to all levels."""
        comes_to = self.errors[level] * off * _shaken(dice, PREVIEWS_APART)
        return comes_to / math.hypot(1, comes_to)

    def step(self, level: int, dice: random.Random, wave: float = 0.0) -> list[StepTimes]:
        """What each rank measures of one step."""
        noise = self.noise
        wire = self.wire(level) * _shaken(dice, noise.wire) * math.exp(noise.waves * wave)
        compute = self.compute * _shaken(dice, noise.compute)
        if noise.odd:
            compute *= 1.5 if dice.random() < noise.odd else 1
            wire *= 3 if dice.random() < noise.odd else 1
        pause = self.compute * PAUSE if noise.pauses and dice.random() < noise.pauses else 0.0
        compute *= 1.5 if pause else 1
        busy = [compute * _shaken(dice, noise.rank) for _ in range(self.ranks)]
        busy[0] += self.slow_rank
        last = max(busy)  # all leave the exchange together: who computed less waits longer
        exposed = max(wire / self.messages, wire - self.overlap * last)
        codec, hidden, exposed = self.codec[level], wire - exposed, exposed + self.lag
        return [StepTimes(pause + last + codec + exposed, codec, exposed + last - own, pause, hidden) for own in busy]


def _shaken(dice: random.Random, deviation: float) -> float:
    return math.exp(dice.gauss(0, deviation)) if deviation else 1.0


def any_job(dice: random.Random) -> Job:
    """From 1 ms to 1 s of computation, 0.4 to 400 MB of gradients, 1 MB/s to 100 GB/s, and any codecs."""
    compute = 10 ** dice.uniform(-3, 0)
    dense_bytes = 4 * 10 ** dice.uniform(5, 8)
    dear = (0.0, 0.1, 0.6)
    return Job(
        compute=compute,
        payload_bytes=tuple(dense_bytes * share for share in (1, 0.5, 0.26, 0.07, 0.035)),
        rate=10 ** dice.uniform(6, 11),
        alpha=dice.choice([0.0, 10 ** dice.uniform(-5, -3)]),
        messages=dice.choice([1, 2, 5, 12]),
        codec=(0.0, *(compute * dice.uniform(0, dice.choice(dear)) for _ in range(4))),
        told=dice.choice([0.0, 0.7, 1.0, 1.3]),
        overlap=dice.uniform(0, 0.9),
    )


jobs = st.randoms(use_true_random=False).map(any_job)


def some_jobs(count: int, noise: Noise, seed: int = 0) -> list[Job]:
    """For what is said of a share of all jobs."""
    dice = random.Random(seed)
    return [replace(any_job(dice), noise=noise) for _ in range(count)]


Training = Callable[[int, int, int], tuple[float, float, float]]
"""(step, level, steps at the level) -> error, norm of the gradients, learning rate."""


def calm(step: int, level: int, age: int) -> tuple[float, float, float]:
    """Training in which nothing happens."""
    return (0.4 if level >= LOSSY else 0.0), 1.0, 0.1


@dataclass
class Course:
    """What happened in a run."""

    controller: Controller
    levels: list[int]
    """Level of every step; of one from which a level learns, that level."""
    ran: list[int]
    """The same, but 0 for those."""
    decisions: list[tuple[int, Decision]]
    """(step, decision)."""
    modes: list[Mode]
    """What the controller was busy with at every step."""
    seconds: float = 0.0
    """What all steps took, without noise."""
    soundings: list[tuple[int, float]] = field(default_factory=list)
    """(step, seconds), which ``seconds`` holds, too."""

    @property
    def last(self) -> Decision:
        return self.decisions[-1][1]

    def changes(self, since: int) -> int:
        later = self.levels[since:]
        return sum(one != other for one, other in zip(later, later[1:], strict=False))

    def most(self, since: int) -> tuple[int, float]:
        """The level that most steps ran at, and their share."""
        later = self.levels[since:]
        level, count = Counter(later).most_common(1)[0]
        return level, count / len(later)

    def times(self, words: str) -> list[int]:
        """Steps of the decisions whose reason holds ``words``."""
        return [step for step, decision in self.decisions if words in decision.reason]


def drive(
    job: Job | Callable[[int], Job],
    steps: int,
    *,
    make: Callable[..., Controller] = Controller,
    config: Config = Config(),  # noqa: B008 (a constant)
    seed: int = 0,
    training: Training = calm,
    events: Callable[[int, Controller], object] = lambda step, controller: None,
) -> Course:
    """Run ``steps`` steps of a job (that changes) under the controller that ``make`` makes.

    Figures arrive one step late.
    ``events(step, controller)`` is called before every step.
    """
    at = job if callable(job) else lambda step: job
    start = at(0)
    controller = make(start.names, start.costs, config)
    keeps = [cost.keeps_residual for cost in start.costs]
    known = getattr(sys.modules[type(controller).__module__], "Observation", Observation)  # of its own version
    sees_flushes = "flushes" in known._fields
    course = Course(controller, [], [], [], [])
    dice = random.Random(seed)
    if hasattr(controller, "begin"):  # a controller of another version may have to begin without
        controller.begin([(size, seconds * _shaken(dice, start.noise.wire)) for size, seconds in start.probes])
    late: tuple[int, Observation] | None = None
    running = drains = age = 0
    learned = set[int]()
    """Levels whose preview has seen the first of its two steps."""
    wave = 0.0
    for step in range(steps):
        events(step, controller)
        level, mode = controller.level, controller.mode
        if late:
            decision = controller.observe(*late)
            if decision:
                course.decisions.append((step, decision))
        if level != running:
            drains = DRAIN_STEPS if keeps[running] and not keeps[level] else 0
            running, age = level, 0
        job_now = at(step)
        late = None
        course.levels.append(level)
        course.ran.append(level)
        course.modes.append(mode)
        course.seconds += job_now.seconds(course.ran[-1])
        wave = 0.9 * wave + math.sqrt(1 - 0.9**2) * dice.gauss(0, 1)
        flushes, drains = drains > 0, max(0, drains - 1)
        error, norm, rate = training(step, level, age)
        if flushes and not sees_flushes:
            continue
        times, sounding = reduce_times(job_now.step(level, dice, wave)), 0 if flushes else controller.probe_bytes()
        if sounding:
            took = job_now.probe(sounding) * _shaken(dice, job_now.noise.wire)
            times = times._replace(step=times.step + took, probe=took)
            course.soundings.append((step, job_now.probe(sounding)))
            course.seconds += course.soundings[-1][1]
        unforeseen = controller.unforeseen() if hasattr(controller, "unforeseen") else ()
        if shown := learned & {*unforeseen}:
            its = random.Random(seed)  # of its own: levels without a preview see the same noise
            off = _shaken(its, PREVIEW_ERROR)
            controller.foresee({level: job_now.preview(level, its, off) for level in sorted(shown)})
        learned ^= {*unforeseen}
        if step % NORM_STEPS:
            error = norm = math.nan
        age += 1
        late = level, Observation(times, error, norm, rate, sounding, flushes=flushes)
    return course
