"""Recorded steps of real jobs, for ``controllers.py`` to play under any controller.

    python benchmarks/traces.py                 records all of them anew (root, a quarter of an hour) into traces/
    python benchmarks/traces.py mlp 200mbit     one of them

A trace holds, for every level of the ladder, what each step of a job at that level took, part by part, as all ranks
together saw it; levels were run in turns, so that steps with the same number saw much the same machine. It also holds
what levels send, how long their codecs take alone, what sums took before training, what errors came to, and what a
preview (``previews.py``) shows of them.

A step that a controller takes at a level is that level's recorded one of that time, round and round: a recording is as
long for every level, however many steps it has of each. What a change of level does to the steps right after it is not
in a trace, and probes of bandwidth take what the link's α and β say.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from hvdplus.compression import parse
from hvdplus.control.link import LevelCost, Link, fit_link
from hvdplus.control.meter import StepTimes
from hvdplus.log.facts import probes_of
from hvdplus.log.replay import costs_of
from hvdplus.settings import Settings

FOLDER = Path(__file__).parent / "traces"
RECORDED = (("mlp", "100mbit"), ("mlp", "1gbit"), ("mlp", "unshaped"), ("text", "100mbit"), ("text", "1gbit"),
            ("text", "unshaped"), ("cnn", "100mbit"), ("cnn", "1gbit"), ("cnn", "unshaped"),
            ("bytes", "100mbit"), ("bytes", "1gbit"))  # fmt: skip
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
    noise: ClassVar[SimpleNamespace] = SimpleNamespace(wire=0.0)
    """None is added."""

    def rewound(self) -> Trace:
        """The same from the beginning."""
        return replace(self, _time=[])

    def step(self, level: int, dice: random.Random, wave: float = 0.0) -> list[StepTimes]:
        """The next step at a level, as all ranks together saw it."""
        now = self._time[0] if self._time else dice.random()
        steps = self.steps[level]
        self._time[:] = [(now + 1 / len(steps)) % 1]
        return [steps[int(now * len(steps))]]

    def preview(self, level: int, dice: random.Random) -> float:
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
    return [load(path) for path in sorted(FOLDER.glob("*.json"))]


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


def tried(model: str) -> dict[str, float]:
    """What a preview shows of every level."""
    from previews import FIRST, gradients, shown

    levels = Settings().ladder
    errors = shown(gradients(model, FIRST + 2), [parse(level) for level in levels])
    return {level: round(error, 4) for level, error in zip(levels, errors, strict=True)}


def main() -> None:
    """Command line."""
    from adaptive import UNSHAPED, machine, running

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", nargs="*", metavar="MODEL RATE", help="one of them; default: all")
    asked = parser.parse_args().which
    wanted = [tuple(asked)] if asked else list(RECORDED)
    FOLDER.mkdir(exist_ok=True)
    with running(2, sorted({rate for _, rate in wanted if rate != UNSHAPED} | {"1gbit"})) as ranks:
        for model, rate in wanted:
            found = {"machine": machine(), "hosts": 2, **record(ranks, model, rate)}
            path = FOLDER / f"{model}-{rate}.json"
            path.write_text(json.dumps(found, separators=(",", ":")) + "\n")
            print(path, {level: len(steps) for level, steps in found["steps"].items()}, flush=True)


if __name__ == "__main__":
    main()
