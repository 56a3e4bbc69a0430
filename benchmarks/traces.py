"""Recorded steps of real jobs, for ``controllers.py`` to play under any controller.

    python benchmarks/traces.py                 records all of them anew (root, 35 minutes) into traces/
    python benchmarks/traces.py mlp 200mbit     one of them
    python benchmarks/traces.py mlp errors      what levels' errors were in the course of a training

A trace holds, for every level of the ladder, what each step of a job at that level took, part by part, as all ranks
together saw it; levels were run in turns, so that steps with the same number saw much the same machine. It also holds
what levels send, how long their codecs take alone, what sums took before training, what errors came to, and what a
preview (``previews.py``) shows of them.

A step that a controller takes at a level is that level's recorded one of that time, round and round: a recording is as
long for every level, however many steps it has of each. What a change of level does to the steps right after it is not
in a trace, and probes of bandwidth take what the link's α and β say.

Errors do not depend on the link, and grow and fall with the training. So those of a model are recorded apart, in one
training at each level, longer than a trace; ``in_training`` is a trace with those.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from hvdplus.compression import parse
from hvdplus.control.delay import foreseen, reached, settled
from hvdplus.control.link import LevelCost, Link, fit_link
from hvdplus.control.meter import StepTimes
from hvdplus.lab import UNSHAPED
from hvdplus.log.facts import probes_of
from hvdplus.log.replay import costs_of
from hvdplus.settings import Settings

FOLDER = Path(__file__).parent / "traces"
RECORDED = (("mlp", "100mbit"), ("mlp", "1gbit"), ("mlp", "unshaped"), ("text", "100mbit"), ("text", "1gbit"),
            ("text", "unshaped"), ("cnn", "100mbit"), ("cnn", "1gbit"), ("cnn", "unshaped"),
            ("bytes", "100mbit"), ("bytes", "1gbit"), ("wide", "100mbit"), ("wide", "1gbit"))  # fmt: skip
HOSTS = 2
ERRORS, TRAINING_STEPS = "errors", 400
"""What is asked for in place of a rate, and the steps that it is recorded for."""
AROUND = 20
"""e at a step is the mean of the readings up to so many steps away: a single one is of a single batch."""
TURN_STEPS, TURN_SECONDS, TURNS = 20, 2.0, 8
"""A level's turn has so many steps, or as many as fit into so many seconds, and two at least; turns of each level."""


@dataclass(frozen=True)
class Trace:
    """A recorded job, in the shape of ``simulating.Job``."""

    name: str
    names: tuple[str, ...]
    costs: tuple[LevelCost, ...]
    errors: tuple[float, ...]
    """What e comes to at each level."""
    previews: tuple[float, ...]
    """What a preview shows of it: the share of a step's gradient that each level would hold back."""
    probes: tuple[tuple[int, float], ...]
    """(bytes, seconds) of sums before training."""
    steps: tuple[tuple[StepTimes, ...], ...]
    """Of each level."""
    link: Link
    _time: list[float] = field(default_factory=list, compare=False)
    """That of the next step, as a share of the recording."""
    scatter: tuple[float, ...] = ()
    """Standard deviation of the logarithm of a reading of each level's error; whoever plays the trace adds it."""
    noise: ClassVar[SimpleNamespace] = SimpleNamespace(wire=0.0)
    """None is added."""

    @property
    def model(self) -> str:
        """Its name."""
        return self.name.partition("-")[0]

    def rewound(self) -> Trace:
        """The same from the beginning."""
        return replace(self, _time=[])

    def step(self, level: int, dice: random.Random, wave: float = 0.0) -> list[StepTimes]:
        """The next step at a level, as all ranks together saw it."""
        now = self._time[0] if self._time else dice.random()
        steps = self.steps[level]
        self._time[:] = [(now + 1 / len(steps)) % 1]
        return [steps[int(now * len(steps))]]

    def preview(self, level: int, dice: random.Random, off: float) -> float:
        """As recorded."""
        return self.previews[level]

    def seconds(self, level: int) -> float:
        """The middle step."""
        return statistics.median(each.step for each in self.steps[level])

    def probe(self, size: int) -> float:
        """Seconds of a sum that nothing else goes along with."""
        return self.link.alpha + self.link.beta * size


def traces() -> list[Trace]:
    """All that there are."""
    return [load(path) for path in sorted(FOLDER.glob("*.json")) if not path.stem.endswith(f"-{ERRORS}")]


def moves(trace: Trace) -> bool:
    """Whether the errors of all its levels were recorded in the course of a training."""
    known = _readings(trace)
    return all(name in known for name, cost in zip(trace.names, trace.costs, strict=True) if cost.keeps_residual)


def in_training(trace: Trace, model: Trace | None = None) -> list[Trace]:
    """The trace from the beginning, at every step of a training: with the errors that its model's levels had then, or
    those of another trace's model, and with previews that show as much more or less."""
    model = model or trace
    known, columns, scatter, foretold = _readings(model), [], [], [foreseen(shown) for shown in model.previews]
    for name, cost in zip(trace.names, trace.costs, strict=True):
        seen = [(step, math.log(settled(error, step))) for step, error in known[name]] if cost.keeps_residual else []
        column = [_near(seen, step) for step in range(TRAINING_STEPS)] if seen else []
        scatter.append(statistics.pstdev(each - column[step] for step, each in seen) if seen else 0.0)
        columns.append([math.exp(each) for each in column] or [0.0] * TRAINING_STEPS)
    at = list(zip(*columns, strict=True))

    def previews(errors: Sequence[float]) -> tuple[float, ...]:
        moved = (now / first if first else 1.0 for now, first in zip(errors, at[0], strict=True))
        return tuple(reached(error * by, 1) for error, by in zip(foretold, moved, strict=True))

    trace = replace(trace.rewound(), scatter=tuple(scatter))
    return [replace(trace, errors=errors, previews=previews(errors)) for errors in at]


def _readings(trace: Trace) -> dict[str, list[tuple[int, float]]]:
    """(step, error) of the levels that were recorded in trainings of the trace's model."""
    path = FOLDER / f"{trace.model}-{ERRORS}.json"
    return json.loads(path.read_text())["readings"] if path.exists() else {}


def _near(readings: Sequence[tuple[int, float]], step: int) -> float:
    """The mean of the readings around a step."""
    return statistics.fmean(reading for at, reading in readings if abs(at - step) <= AROUND)


def load(path: Path) -> Trace:
    """A trace from its file."""
    known = json.loads(path.read_text())
    names, costs, probes = tuple(known["levels"]), costs_of(known), probes_of(known)
    steps = tuple(
        tuple(StepTimes(*(micros / 1e6 for micros in step)) for step in known["steps"][name]) for name in names
    )
    # Of levels that send much: what they send little of, a link may carry at any speed.
    middle = [(cost, statistics.median(each.comm for each in taken)) for cost, taken in zip(costs, steps, strict=True)]
    much = [(cost, seconds) for cost, seconds in middle if cost.payload_bytes > 0.2 * costs[0].payload_bytes]
    return Trace(
        path.stem,
        names,
        costs,
        tuple(known["errors"][name] for name in names),
        tuple(known["previews"][name] for name in names),
        tuple(probes),
        steps,
        fit_link([*much, *((LevelCost.of_sum(size), seconds) for size, seconds in probes[:1])]),
    )


def record(ranks: Any, model: str, rate: str) -> dict[str, Any]:
    """Record one trace in a running laboratory."""
    ranks.model(name=model)
    ranks.lab.shape(rate)
    ranks.steps(who="auto", count=1)
    (about,) = (each for each in ranks.records(who="auto") if each["kind"] == "run")
    people = {level: f"traced {level}" for level in Settings().ladder}
    turn = {}
    for level, who in people.items():
        typical = statistics.median(ranks.steps(who=who, count=6)["seconds"][3:])
        turn[level] = max(2, min(TURN_STEPS, round(TURN_SECONDS / typical)))
    for _ in range(TURNS):
        for level, who in people.items():
            ranks.steps(who=who, count=turn[level] + 1)
    steps, errors = {}, {}
    for level, who in people.items():
        seen = [each for each in ranks.records(who=who) if each["kind"] == "window" and each["level"] == level]
        names = ("step_ms", "codec_ms", "exposed_comm_ms", "input_wait_ms", "overlapped_comm_ms")
        # The first six steps showed how long a turn is to be.
        steps[level] = [[round(each[name] * 1e3) for name in names] for each in seen[6:]]
        found = [each["error"] for each in seen[len(seen) // 2 :] if each["error"] is not None]
        errors[level] = round(statistics.median(found), 4) if found else 0.0
    found = {"levels": about["levels"], "probes": about["probes"], "errors": errors, "previews": tried(model)}
    return {**found, "steps": steps}


def record_errors(ranks: Any, model: str) -> dict[str, Any]:
    """Record what each level's error is in the course of a training."""
    ranks.model(name=model)
    ranks.lab.shape(UNSHAPED)
    found = {}
    for level in Settings().ladder:
        if parse(level).keeps_residual:
            ranks.steps(who=f"traced {level}", count=TRAINING_STEPS)
            windows = (each for each in ranks.records(who=f"traced {level}") if each["kind"] == "window")
            readings = ((each["first_step"], each["error"]) for each in windows if each["error"] is not None)
            found[level] = [(step, float(f"{error:.3g}")) for step, error in readings]
    return {"readings": found}


def tried(model: str) -> dict[str, float]:
    """What a preview shows of every level."""
    from previews import FIRST, shown, train

    levels = Settings().ladder
    errors = shown(train(model, FIRST + 2, HOSTS).means, [parse(level) for level in levels], HOSTS)
    return {level: round(error, 4) for level, error in zip(levels, errors, strict=True)}


def main() -> None:
    """Command line."""
    from adaptive import machine, running

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", nargs="*", metavar="MODEL RATE", help=f"one of them, or MODEL {ERRORS}; default: all")
    asked = parser.parse_args().which
    models = dict.fromkeys(model for model, _ in RECORDED)
    wanted = [tuple(asked)] if asked else [*RECORDED, *((model, ERRORS) for model in models)]
    FOLDER.mkdir(exist_ok=True)
    with running(HOSTS, sorted({rate for _, rate in wanted if rate not in (UNSHAPED, ERRORS)} | {"1gbit"})) as ranks:
        for model, rate in wanted:
            seen = record_errors(ranks, model) if rate == ERRORS else record(ranks, model, rate)
            found = {"machine": machine(), "hosts": HOSTS, **seen}
            path = FOLDER / f"{model}-{rate}.json"
            path.write_text(json.dumps(found, separators=(",", ":")) + "\n")
            print(
                path, {level: len(each) for level, each in (seen.get("steps") or seen["readings"]).items()}, flush=True
            )


if __name__ == "__main__":
    main()
