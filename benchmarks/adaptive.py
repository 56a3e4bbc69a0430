"""Is ``auto`` what it promises to be? Measured on hosts with real bandwidth limits, against everybody else.

    python benchmarks/adaptive.py --quick       some cells, fewer repeats, shorter races of one seed: 15 minutes
    python benchmarks/adaptive.py               all of it, for hours; writes benchmarks/results/
    python benchmarks/adaptive.py --hosts 4     only what is measured on so many hosts
    python benchmarks/adaptive.py --only race   only a part of it; parts, too, leave files of their own in results/
    python benchmarks/adaptive.py --only race --model bytes --seeds 2   and only on one model, twice instead of thrice

Nothing else may run on the machine meanwhile: what is measured is mostly its processor.

Needs root (network namespaces; see ``hvdplus.lab``). Two hosts with a core each, or four on two cores; three models of
different ratio of computation to gradient on real data (``contestants.py``). In every cell ``auto`` trains from its
start; after 40 steps, blocks of its steps are measured in turns with blocks of others:

    oracle   the level of the ladder of least cost, which is the seconds of a step times the price of delay, 1 + k e
             (k: HVDPLUS_DELAY_PRICE; e: residual to gradient, the median while blocks are measured, each contestant's
             own): all are tried, after as many steps of a training of their own as ``auto`` has taken; those within
             the error budget (there, and where ``auto`` came to them) and nearly the best are measured beside
             ``auto``, and the best then is the oracle
    dense    the faster of stock Horovod in fp32 and in fp16, by seconds alone

A round has one block of each, in changing order, of few steps; a block's figure is the mean of its steps, a
round's ratio that of two blocks, a cell's ratio the rounds' geometric mean, with a 95 % bound from the rounds' spread
(Student's t), which is of seconds alone: prices have no bounds. Rounds go on, for a while, until these bounds are
narrow; those about whom no doubt is left drop out, so that slow links leave time for the others. Before each block
links rest until they have their bursts again: after a dense block, a small payload would wait where in a training of
its own it never does.
A line about cells fails (``FAIL``) where that bound is beyond the limit; the other lines judge the figures they print.
Ratios below 1 are in favour of ``auto``. In races everybody pays for preparations, and ``auto`` for every second of its
steps; the others' steps are measured all along its training. ``alone`` is one host with its share of each batch and
nobody to talk to: where it wins, ranks should not have been more than one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from itertools import accumulate, groupby, pairwise
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from scipy.special import stdtrit

from hvdplus.compression import parse
from hvdplus.control.delay import price_of_delay
from hvdplus.lab import UNSHAPED, Job, Lab, LabError, a_core_each
from hvdplus.log.facts import decisions_of, steps_in, weighted_median, windows_of
from hvdplus.log.words import BOTTLENECK
from hvdplus.settings import Settings

HERE = Path(__file__).parent
MORE_SECONDS = {True: 8.0, False: 15.0}
"""What a cell of the quick and of the full run gets for rounds beyond its number, until its bounds are narrow."""
START_STEPS, CHANGE_STEPS = 40, 80
"""Steps after which ``auto`` is to have found its level: from the first on, and after a change of the link."""
ORACLE_LIMIT, CHANGE_LIMIT, DENSE_LIMIT = 1.03, 1.05, 1.02
BLOCK_SECONDS, BLOCK_STEPS, LONG_SECONDS = 0.3, (4, 40), 0.2
"""A block takes so long, but has no fewer and no more steps; an even number, as low-rank levels send more in every
second one. Steps that take longer than the last figure, which those of such levels never do, are blocks of their own.
Machines change their speed within tenths of a second: many short blocks in turns tell more than a few long ones. But
``auto`` learns from its steps, and from two at a time, with others' in the caches, it learns little (``NOTES.md``)."""
RATES = ("50mbit", "200mbit", "1gbit", "5gbit", UNSHAPED)
MODELS = ("mlp", "text", "cnn")


class Ratio(NamedTuple):
    """Of step times, with its 95 % bounds."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Verdict(NamedTuple):
    """A line of the report."""

    line: str
    passed: bool
    figures: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.passed else 'FAIL'}  {self.line}\n        {self.figures}"


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Geometric mean of the pairs' ratios."""
    logs = [math.log(a / b) for a, b in zip(above, below, strict=True)]
    middle, width = statistics.mean(logs), stdtrit(len(logs) - 1, 0.975) * statistics.stdev(logs) / len(logs) ** 0.5
    return Ratio(*map(math.exp, (middle, middle - width, middle + width)))


NARROW = 1.015
"""Of a ratio's bound over its middle. On a restless machine that takes more rounds."""


def clear(found: Ratio, most: float) -> bool:
    """Whether the bounds of a ratio are narrow, or its limit is three times as far from its middle as they are. To stop
    as soon as a bound is within the limit would not do: whoever looks often enough sees that once."""
    width = found.high / found.middle
    return width <= NARROW or width**3 <= max(most / found.middle, found.middle / most)


class Ranks:
    """A job of contestants in the lab, commanded from here."""

    def __init__(self, lab: Lab, connection: Connection, job: Job) -> None:
        self.lab = lab
        self._connection, self._job = connection, job

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """``ranks.steps(who="auto", count=10)`` and so on: see ``contestants.Job``."""

        def call(**arguments: Any) -> Any:
            self._connection.send((name, arguments))
            try:
                if self._connection.poll(CALL_SECONDS):
                    return self._connection.recv()
                what = f"took more than {CALL_SECONDS} s for"
            except EOFError:
                what = "ended while it was busy with"
            raise SystemExit(f"The job {what} {name} {arguments}:\n{self._job.output}") from None

        return call


def check(lab: Lab) -> None:
    """As ``lab.check``, but a machine that is busy with something else may have some minutes for it."""
    deadline = time.monotonic() + CHECK_SECONDS
    while True:
        try:
            return lab.check()
        except LabError as error:
            if time.monotonic() > deadline:
                raise
            say(f"  not yet: {error}")
            time.sleep(10)


CHECK_SECONDS = 300
CALL_SECONDS, JOB_SECONDS, END_SECONDS = 900, 12 * 3600, 60
"""What a call, the whole job, and its end may take."""


KEEP_MEMORY = "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1073741824"
"""By default the C library gives large arrays back to the system in every step, or not, depending on what was freed
before: in a process of many contestants on whoever was there. Stock Horovod's fp16 took 9.1 ms a step of the perceptron
or 12 to 14, from one job to the next. Here nobody gives memory back, which is best for all."""


@contextmanager
def running(hosts: int, rates: Iterable[str], one_sided: bool = False, ranks_per_host: int = 1) -> Iterator[Ranks]:
    """A lab with a job of contestants: two hosts with a core each, more on all cores. Others: as of ``Lab``."""
    cores = a_core_each(2) if hosts == 2 else None
    with Lab(hosts, "1gbit", cores) as lab, tempfile.TemporaryDirectory() as folder:
        for rate in rates:
            lab.shape(rate)
            check(lab)
        address = f"{folder}/socket"
        environment = {
            "CONTESTANTS": address,
            "CONTESTANTS_MASTER": lab.address("h1"),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "GLIBC_TUNABLES": KEEP_MEMORY,
        }
        command = [sys.executable, str(HERE / "contestants.py")]
        how = {"env": environment, "one_sided": one_sided, "timeout_seconds": JOB_SECONDS}
        how["ranks_per_host"] = ranks_per_host
        with Listener(address) as listener, lab.start(command, **how) as job:
            listener._listener._socket.settimeout(120)  # type: ignore[attr-defined]
            try:
                connection = listener.accept()
            except TimeoutError:
                raise SystemExit(f"The job did not start:\n{job.output}") from None
            ranks = Ranks(lab, connection, job)
            yield ranks
            connection.send(("end", {}))
            job.process.wait(END_SECONDS)


# -- measuring in turns


def block_steps(seconds: float) -> int:
    """How many steps of ``seconds`` make a block."""
    least, most = BLOCK_STEPS
    if seconds > LONG_SECONDS:
        return 1
    return min(most, max(least, 2 * round(BLOCK_SECONDS / seconds / 2)))


Seconds = dict[str, list[float]]
"""Who -> mean seconds a step, one a block: of the first rounds, of as many as each took part in."""


def in_all_rounds(seconds: Seconds, *people: str) -> bool:
    """Whether they took part in the last round, too. Whoever drops out never comes back."""
    return min(len(seconds[who]) for who in people) == max(map(len, seconds.values()))


def in_turns(
    ranks: Ranks,
    people: Sequence[str],
    rounds: int,
    wanted: Callable[[Seconds], Sequence[str]],
    more_seconds: float,
    noted: Callable[[], None] = lambda: None,
) -> Seconds:
    """Blocks of everybody, round after round; then up to ``more_seconds`` more of those who are ``wanted`` still.
    ``noted``: called after each round."""
    order = random.Random(0)
    lengths = {who: block_steps(statistics.median(ranks.steps(who=who, count=3)["seconds"])) for who in people}
    seconds: Seconds = {who: [] for who in people}
    deadline, done = math.inf, 0
    while people and time.monotonic() < deadline:
        turns = [(who, lengths[who]) for who in order.sample(list(people), len(people))]
        for (who, _), took in zip(turns, ranks.blocks(turns=turns, rest_seconds=ranks.lab.burst_seconds), strict=True):
            seconds[who].append(took)
        noted()
        done += 1
        if done == max(1, rounds):
            deadline = time.monotonic() + more_seconds
        if done >= rounds:
            likely = wanted(seconds)
            people = [who for who in people if who in likely]
    return seconds


DENSE = ("horovod", "horovod fp16")
NEAR = 1.05
"""Levels within this of the fastest may turn out to be it."""


class Cell(NamedTuple):
    """What one cell came to."""

    hosts: int
    model: str
    rate: str
    auto: str
    """The level that ``auto`` had reached."""
    oracle: str
    dense: str
    against_oracle: Ratio
    against_dense: Ratio
    oracle_ms: float
    auto_ms: float
    levels: dict[str, float]
    """Level -> milliseconds a step, when all were tried."""
    prices: dict[str, float]
    """Level -> price of delay, in a training of its own."""
    over_budget: dict[str, float]
    """Level -> its error."""
    decisions: list[str]
    """What ``auto`` decided while it was compared."""

    @property
    def name(self) -> str:
        return f"{self.hosts} hosts, {self.model}, {self.rate}"


TRY_SECONDS, HOPELESS = 6.0, 1.5
"""What trying all levels gets beyond its rounds, to find those that are near the fastest; and what is so many times as
slow as that one is not tried any longer."""


def best_level(ranks: Ranks, rounds: int) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Milliseconds of all levels within the error budget, prices of delay of all levels, errors of those beyond it."""
    over = refused(ranks)
    for level in Settings().ladder:
        who = f"level {level}"
        ranks.forget(who=who)
        if parse(level).keeps_residual:  # errors grow with age
            ranks.steps(who=who, count=START_STEPS)
            if (error := errors(ranks, who, 0)[level]) > Settings().error_budget:
                over.setdefault(level, error)
    people = [f"level {level}" for level in Settings().ladder if level not in over]

    def promising(seconds: Seconds) -> list[str]:
        medians = {who: statistics.median(blocks) for who, blocks in seconds.items()}
        return [who for who in people if medians[who] <= HOPELESS * min(medians.values())]

    seconds = in_turns(ranks, people, rounds, promising, TRY_SECONDS)
    prices = dict.fromkeys(Settings().ladder, 1.0)
    for level in prices:
        prices |= prices_of(ranks, f"level {level}", YOUNG_STEPS)
    return {level_of(who): statistics.median(seconds[who]) * 1e3 for who in people}, prices, over


YOUNG_STEPS = START_STEPS // 2
"""Steps in which a training's residuals are still growing: its price of delay is that of later ones."""


def errors(ranks: Ranks, who: str, first_step: int) -> dict[str, float]:
    """As ``errors_in``, of the windows of ``who`` so far."""
    return errors_in(windows(ranks, who), first_step)


def errors_in(windows: Iterable[Mapping[str, Any]], first_step: int, last_step: float = math.inf) -> dict[str, float]:
    """Level -> the median error there, over windows from a step to another. Of all of them: from one window to the next
    errors change by a factor of two, and the price of delay was fitted to medians of whole trainings."""
    found: dict[str, list[tuple[float, int]]] = {}
    for window in windows:
        if first_step <= window["first_step"] and window["last_step"] <= last_step and window["error"] is not None:
            found.setdefault(window["level"], []).append((window["error"], steps_in(window)))
    return {level: weighted_median(*zip(*readings, strict=True)) for level, readings in found.items()}


def prices_of(ranks: Ranks, who: str, first_step: int) -> dict[str, float]:
    """As ``prices_in``, of the windows of ``who`` so far."""
    return prices_in(windows(ranks, who), first_step)


def prices_in(windows: Iterable[Mapping[str, Any]], first_step: int, last_step: float = math.inf) -> dict[str, float]:
    """Level of the ladder -> the price of delay that was paid there, from a step to another, where errors were read."""
    found = errors_in(windows, first_step, last_step)
    return {
        level: price_of_delay(Settings().delay_price * parse(level).delay_weight, found[level])
        for level in Settings().ladder
        if level in found
    }


def next_step(ranks: Ranks, who: str) -> int:
    """The first step that is not in a window yet."""
    return max((window["last_step"] + 1 for window in windows(ranks, who)), default=0)


def level_of(who: str) -> str:
    """The level that ``level NAME`` runs."""
    return who.removeprefix("level ")


def refused(ranks: Ranks) -> dict[str, float]:
    """Levels that ``auto`` ran and found beyond the error budget, with the error: it grows as training goes on."""
    return {
        record["from"]: record["evidence"][f"{record['from']}.error"]
        for record in decisions(ranks)
        if record["reason"].startswith("the residual at ")
    }


def decisions(ranks: Ranks) -> list[dict[str, Any]]:
    """Of ``auto``."""
    return decisions_of(ranks.records(who="auto"))


def windows(ranks: Ranks, who: str) -> list[dict[str, Any]]:
    """From the run log."""
    return windows_of(ranks.records(who=who))


def cheapest(seconds: Seconds, people: Iterable[str], prices: Mapping[str, float]) -> str:
    """By the median of the blocks, times the price of delay."""
    return min(people, key=lambda who: statistics.median(seconds[who]) * prices.get(level_of(who), 1.0))


def against(
    seconds: Seconds, rival: str, price: float = 1.0, paid: Sequence[float] = (), *, who: str = "auto"
) -> Ratio:
    """The blocks of ``who`` over the rival's, in the rounds that both took part in, each times its price of delay:
    ``price`` is the rival's, ``paid`` are those of ``who``, one a block."""
    rounds = min(len(seconds[who]), len(seconds[rival]))
    mine = [took * (paid[place] if paid else 1.0) for place, took in enumerate(seconds[who][:rounds])]
    return ratio(mine, [took * price for took in seconds[rival][:rounds]])


def compare(ranks: Ranks, hosts: int, model: str, rate: str, rounds: int, more_seconds: float, limit: float) -> Cell:
    """``auto``, which has had its time, against the oracle (``limit``: what is asked there) and against dense."""
    near: list[str] = []
    prices: dict[str, float] = {}
    ran: list[str] = []
    """Levels of ``auto``'s blocks."""

    first: dict[str, int] = {}
    """Who -> the first step of its blocks."""

    def look(seconds: Seconds) -> tuple[str, Ratio]:
        """The oracle, and ``auto`` against it, as the blocks so far have it."""
        for level in near:
            prices.update(prices_of(ranks, f"level {level}", first[f"level {level}"]))
        oracle = cheapest(seconds, (f"level {level}" for level in near), prices)
        paid = prices | prices_of(ranks, "auto", first["auto"])
        return oracle, against(seconds, oracle, prices[level_of(oracle)], [paid[level] for level in ran])

    def undecided(seconds: Seconds) -> list[str]:
        oracle, found = look(seconds)
        dense = cheapest(seconds, DENSE, {})
        rivals: list[str] = []
        for best, ratio_to_it, most, those in (
            (oracle, found, limit, [f"level {level}" for level in near]),
            (dense, against(seconds, dense), DENSE_LIMIT, DENSE),
        ):
            if in_all_rounds(seconds, best) and not clear(ratio_to_it, most):
                rivals += those
        return ["auto", *rivals] if rivals else []

    def note() -> None:
        ran.append(ranks.steps(who="auto", count=0)["level"])

    while not near:  # what goes over the budget while it is measured is no oracle
        before = len(decisions(ranks))
        levels, prices, over = best_level(ranks, rounds // 2)
        costs = {level: levels[level] * prices[level] for level in levels}
        near = [level for level in levels if costs[level] <= NEAR * min(costs.values())]
        now = ranks.steps(who="auto", count=1)["levels"][0]
        near += [now] * (now not in near)  # whatever a training of its own says of its error: `auto` runs it
        age = next_step(ranks, "auto")
        for who in (f"level {level}" for level in near if parse(level).keeps_residual):
            ranks.forget(who=who)  # it was tried for long, and errors grow with the training: as old as `auto`
            ranks.steps(who=who, count=age)
        people = ["auto", *(f"level {level}" for level in near), *DENSE]
        ran.clear()
        first = {"auto": age} | {f"level {level}": next_step(ranks, f"level {level}") for level in near}
        seconds = in_turns(ranks, people, rounds, undecided, more_seconds, note)
        near = [level for level in near if level not in refused(ranks)]
    (oracle, against_oracle), dense = look(seconds), cheapest(seconds, DENSE, {})
    now = ranks.steps(who="auto", count=1)["levels"][0]
    if not ranks.identical(who="auto"):
        raise SystemExit(f"auto trained its ranks apart: {hosts} hosts, {model}, {rate}")
    return Cell(
        hosts,
        model,
        rate,
        now,
        level_of(oracle),
        dense,
        against_oracle,
        against(seconds, dense),
        statistics.median(seconds[oracle]) * 1e3,
        statistics.median(seconds["auto"]) * 1e3,
        levels,
        prices,
        over,
        [f"{record['from']} -> {record['to']}" for record in decisions(ranks)[before:]],
    )


def measure_cell(ranks: Ranks, hosts: int, model: str, rate: str, rounds: int, more_seconds: float) -> Cell:
    """A start, and the comparison."""
    ranks.lab.shape(rate)
    ranks.forget(who="auto")
    ranks.steps(who="auto", count=START_STEPS)
    return compare(ranks, hosts, model, rate, rounds, more_seconds, ORACLE_LIMIT)


# -- what else is promised


def cells(quick: bool) -> dict[int, dict[str, Sequence[str]]]:
    """Hosts -> model -> rates."""
    if quick:
        return {
            2: {"mlp": ("200mbit", UNSHAPED), "text": ("1gbit",), "cnn": ("1gbit",)},
            4: {"mlp": ("1gbit",)},
        }
    return {hosts: dict.fromkeys(MODELS, RATES) for hosts in (2, 4)}


def link_changes(ranks: Ranks, hosts: int, model: str, rounds: int, more_seconds: float) -> Iterator[Cell]:
    """The link changes while ``auto`` trains on."""
    ranks.lab.shape("1gbit")
    ranks.forget(who="auto")
    ranks.steps(who="auto", count=CHANGE_STEPS)
    for rate in ("100mbit", UNSHAPED, "1gbit"):
        ranks.lab.shape(rate)
        ranks.steps(who="auto", count=CHANGE_STEPS)
        yield compare(ranks, hosts, model, rate, rounds, more_seconds, CHANGE_LIMIT)


def steady(ranks: Ranks, where: str) -> Verdict:
    """``auto``, once it has settled, stays where it is."""
    levels = ranks.steps(who="auto", count=STEADY_STEPS)["levels"]
    held, turns = held_of(levels)
    changes = sum(a != b for a, b in pairwise(held))
    share = max(levels.count(level) for level in set(levels)) / len(levels)
    return Verdict(
        f"no oscillation in {STEADY_STEPS} steps: at most {MOST_CHANGES} changes of the level held for more than "
        f"{TURN_STEPS} steps, {STEADY_SHARE:.0%} at one level",
        changes <= MOST_CHANGES and share >= STEADY_SHARE,
        f"{changes} changes, beside {turns} turns of trials; {share:.1%} at one level ({where})",
    )


STEADY_STEPS, MOST_CHANGES, STEADY_SHARE = 1000, 2, 0.95
TURN_STEPS = 50
"""A trial's turns are shorter: the level held and its challenger take turns, and what they cost shows in the share."""


def held_of(levels: Iterable[str]) -> tuple[list[str], int]:
    """Levels of steps that ran for longer than a trial's turns, one after the other; the number of shorter runs."""
    runs = [(level, len(list(steps))) for level, steps in groupby(levels)]
    held = [level for level, steps in runs if steps > TURN_STEPS]
    return held, len(runs) - len(held)


def slow_rank(ranks: Ranks) -> Verdict:
    """The CPU of one host is halved: that is no communication, and compression does not help."""
    ranks.lab.shape(UNSHAPED)
    ranks.forget(who="auto")
    count = CHANGE_STEPS
    usual = levels_of(ranks.steps(who="auto", count=count)["levels"][-20:])
    before = last_window(ranks)
    with ranks.lab.slow("h2", 0.5):
        levels = ranks.steps(who="auto", count=count)["levels"]
        during = last_window(ranks)
        ranks.forget(who="auto")
        fresh = ranks.steps(who="auto", count=count)["levels"]
    compressed = sum(place > max(usual) for place in levels_of([*levels[-20:], *fresh[-20:]]))
    share = during["exposed_comm_ms"] / during["step_ms"]
    return Verdict(
        "one slow rank is blamed as computation and not answered with compression",
        compressed == 0 and during["compute_ms"] > 1.5 * before["compute_ms"] and share <= BOTTLENECK,
        f"computation {before['compute_ms']:.1f} -> {during['compute_ms']:.1f} ms, exposed communication "
        f"{before['exposed_comm_ms']:.1f} -> {during['exposed_comm_ms']:.1f} ms ({share:.1%} of the step), "
        f"{compressed} of 40 steps compressed more than before (2 hosts, cnn, unshaped)",
    )


def levels_of(names: Sequence[str]) -> list[int]:
    """Their places in the ladder."""
    return [Settings().ladder.index(name) for name in names]


def last_window(ranks: Ranks) -> dict[str, Any]:
    """Medians over the last three windows of ``auto``."""
    last = windows(ranks, "auto")[-3:]
    return {key: statistics.median(window[key] for window in last) for key in last[0] if key.endswith("_ms")}


Curve = list[tuple[float, float]]
"""(Seconds of training; bits a character.)"""


class Race(NamedTuple):
    """Everybody's way to the targets on one model of text."""

    model: str
    rate: str
    steps: int
    """Of a training."""
    targets: tuple[float, ...]
    """Bits a character on the validation text."""
    curves: dict[str, list[Curve]]
    """Who -> a curve a seed, over seconds."""

    def seconds(self, who: str, target: float) -> list[float]:
        """Seconds of training until the target, one a seed; infinity: not within the steps allowed."""
        return [next((at for at, loss in curve if loss <= target), math.inf) for curve in self.curves[who]]

    def sooner(self, who: str, target: float) -> list[float]:
        """How many times sooner than ``who`` ``auto`` is there, one a seed; 0: never."""
        pairs = zip(self.seconds(who, target), self.seconds("auto", target), strict=True)
        return [0.0 if math.isinf(mine) else theirs / mine for theirs, mine in pairs]

    def final(self, who: str) -> list[float]:
        """Bits a character after all steps, one a seed."""
        return [curve[-1][1] for curve in self.curves[who]]


RACES = {"1gbit": 1.1, "100mbit": 1.3, "50mbit": 1.3}
"""Rate -> how many times sooner than every fixed choice of stock Horovod and PyTorch."""
LEVEL_LIMIT = 1.05
"""How many times as long as the best fixed level of its ladder ``auto`` may take."""
COURSES = {"text": (700, (3.4, 3.2, 3.1, 3.0)), "bytes": (700, (3.8, 3.6, 3.5, 3.4))}
QUICK_COURSES = {"text": (280, (3.6, 3.4)), "bytes": (280, (4.0, 3.8))}
"""Model -> steps, and bits a character to reach."""
EVALUATE_STEPS = 20
RACE_SECONDS, BESIDE = 0.2, 5
"""A block of somebody's steps beside ``auto``'s takes so long, or a step; one follows every fifth stretch of it."""
POWERSGD = tuple(f"ddp powersgd:{rank}:{start}" for rank in (2, 4, 8, 16) for start in (2, 10))
"""Each rank with a short and with a long dense start."""
TRAINED = {
    True: ("horovod", "alone", "ddp powersgd:4:2", "ddp powersgd:8:2"),
    False: ("horovod", "alone", *POWERSGD),
}
"""Of the quick and of the full run; beside them the levels of the ladder that keep a residual."""
LOSSY = tuple(f"level {level}" for level in Settings().ladder if parse(level).keeps_residual)
"""Levels that learn otherwise than dense."""
GRANTED = ("horovod fp16", "ddp", "ddp fp16", "level fp16")
"""Choices that only round: they are granted the curve of fp32."""


def race(ranks: Ranks, races: Sequence[Race], seeds: Iterable[int]) -> None:
    """Time to fixed losses, everything included, and the loss after all steps; ``races``: of one model, a rate each.

    What a fixed choice learns in a step does not depend on the link: its curve is that of a training without limits,
    at the step time that it has at each rate. ``auto`` depends, and trains at each rate; in between, all along its
    training, the others' steps are measured, so that all are timed while the machine is as fast or as slow as it is for
    ``auto``.
    """
    model, people = races[0].model, [who for who in races[0].curves if who != "auto"]
    steps, trained = races[0].steps, [who for who in people if who not in GRANTED]
    for seed in seeds:
        ranks.model(name=model, seed=seed)
        ranks.lab.shape(UNSHAPED)
        trainings = {who: train(ranks, who, steps) for who in trained}
        for who, training in trainings.items():
            say(f"  {model}, seed {seed}: {who} ended with {training.losses[-1]:.3f} bits")
        for run in races:
            ranks.lab.shape(run.rate)
            ranks.forget(who="auto")
            mine = train(ranks, "auto", steps, people)
            run.curves["auto"].append(curve(mine.began, mine.stretches, mine.losses))
            dense = mine.beside["ddp"][0]
            for who in people:
                theirs = trainings.get(who, trainings["horovod"])
                # What starts dense does so at the price of dense steps, and its later steps have no part in it.
                start = ranks.dense_start(who=who) * (dense - mine.beside[who][0])
                began = start + (theirs.began if who in trainings else 0.0)
                run.curves[who].append(curve(began, mine.beside[who], theirs.losses))
            spent, loss = run.curves["auto"][-1][-1]
            levels = [f"{record['step']} {record['to']}" for record in decisions(ranks)]
            say(
                f"  {model}, seed {seed}: auto ended with {loss:.3f} bits after {spent:.1f} s at {run.rate} (from "
                f"step: {', '.join(levels)}); the others' steps: "
                + ", ".join(f"{who} {statistics.mean(mine.beside[who]) * 1e3:.1f} ms" for who in people)
            )


class Training(NamedTuple):
    """Of one contestant, in stretches of ``EVALUATE_STEPS``."""

    began: float
    """Seconds of preparations."""
    stretches: list[float]
    """Mean seconds of a step."""
    losses: list[float]
    """Bits a character after each stretch."""
    beside: dict[str, list[float]]
    """Mean seconds of others' steps during each stretch, as last measured."""


def train(ranks: Ranks, who: str, steps: int, beside: Sequence[str] = ()) -> Training:
    """From the beginning, with blocks of others in between."""
    began = ranks.steps(who=who, count=0)["began"]
    order = random.Random(0)
    typical = {other: statistics.median(ranks.steps(who=other, count=3)["seconds"]) for other in beside}
    lengths = {other: max(1, round(RACE_SECONDS / seconds)) for other, seconds in typical.items()}
    training = Training(began, [], [], {other: [] for other in beside})
    took: dict[str, float] = {}
    for stretch in range(steps // EVALUATE_STEPS):
        training.stretches.append(statistics.mean(ranks.steps(who=who, count=EVALUATE_STEPS)["seconds"]))
        training.losses.append(ranks.evaluate(who=who))
        if beside and stretch % BESIDE == 0:
            turns = [(other, lengths[other]) for other in order.sample(list(beside), len(beside))]
            blocks = ranks.blocks(turns=turns, rest_seconds=ranks.lab.burst_seconds)
            took = {other: seconds for (other, _), seconds in zip(turns, blocks, strict=True)}
        for other in beside:
            training.beside[other].append(took[other])
    return training


def curve(began: float, steps: Sequence[float], losses: Sequence[float], stretch: int = EVALUATE_STEPS) -> Curve:
    """Loss over seconds; ``steps``: mean seconds of a step in each ``stretch``, which has so many."""
    spent = accumulate((stretch * seconds for seconds in steps), initial=began)
    return list(zip(list(spent)[1:], losses, strict=True))


def judge_race(run: Race, least: float) -> list[Verdict]:
    """Verdicts from medians over the seeds, at every target that the other reaches."""
    levels = [who for who in run.curves if who.startswith("level ")]
    fixed = [who for who in run.curves if who not in ("auto", "alone", *levels)]

    def worst(line: str, people: Sequence[str], least: float) -> Verdict:
        """The least of ``auto``'s leads."""
        leads = [
            (statistics.median(run.sooner(who, target)), who, target)
            for target in run.targets
            for who in people
            if statistics.median(run.seconds(who, target)) < math.inf
        ]
        if not leads:
            return Verdict(line, False, "nobody reached a target")
        lead, who, target = min(leads)
        factors = run.sooner(who, target)
        times = [statistics.median(run.seconds(each, target)) for each in (who, "auto")]
        return Verdict(
            line,
            lead >= least,
            f"{lead:.2f} x (seeds {min(factors):.2f} to {max(factors):.2f}) at {target:g} bits; {who}: {times[0]:.1f} "
            f"s, auto: {times[1]:.1f} s",
        )

    where = f"race, {run.model}, {run.rate}"
    alone = [f"{statistics.median(run.seconds('alone', target)):.1f} s" for target in run.targets]
    mine = [f"{statistics.median(run.seconds('auto', target)):.1f} s" for target in run.targets]
    worse = statistics.mean(run.final("auto")) - statistics.mean(run.final("horovod"))
    say(f"  {where}: one host alone was at {run.targets} bits after {', '.join(alone)}; auto after {', '.join(mine)}")
    say(f"  {where}: final loss of auto {worse:+.4f} bits a character to stock Horovod's fp32")
    return [
        worst(f"{where}: at least {least:g} x sooner than any fixed choice of stock Horovod or PyTorch", fixed, least),
        worst(f"{where}: no later than {LEVEL_LIMIT:g} x the best level of its ladder", levels, 1 / LEVEL_LIMIT),
    ]


# -- the report


SAID: list[str] = []


def say(line: str) -> None:
    SAID.append(line)
    print(line, flush=True)


def describe(cell: Cell) -> str:
    """A cell in one line."""
    over = "".join(f"; {level} over the error budget ({error:.1f})" for level, error in cell.over_budget.items())
    over += f"; meanwhile {', '.join(cell.decisions)}" if cell.decisions else ""
    return (
        f"  {cell.name:<26} auto {cell.auto:<16} oracle {cell.oracle:<16} {cell.oracle_ms:7.1f} ms   against oracle "
        f"{cell.against_oracle}   against {cell.dense:<12} {cell.against_dense}{over}"
    )


def judge_cells(seen: Sequence[Cell], changed: Sequence[Cell]) -> list[Verdict]:
    """The lines about cells: the worst cell decides."""
    verdicts = []
    lines: tuple[tuple[str, str, float, Sequence[Cell]], ...] = (
        (
            f"against the oracle: at most {ORACLE_LIMIT} x in every cell after {START_STEPS} steps",
            "against_oracle",
            ORACLE_LIMIT,
            seen,
        ),
        (f"against dense: at most {DENSE_LIMIT} x in every cell", "against_dense", DENSE_LIMIT, seen),
        (
            f"after a change of the link: at most {CHANGE_LIMIT} x the oracle within {CHANGE_STEPS} steps",
            "against_oracle",
            CHANGE_LIMIT,
            changed,
        ),
    )
    for line, figure, limit, those in lines:
        if not those:
            continue
        beyond = [cell for cell in those if getattr(cell, figure).high > limit]
        worst = max(those, key=lambda cell: getattr(cell, figure).high)
        verdicts.append(
            Verdict(
                line,
                not beyond,
                f"{len(those) - len(beyond)} of {len(those)} cells; worst: {worst.name}, {getattr(worst, figure)}",
            )
        )
    return verdicts


@dataclass
class Measured:
    """All that there is so far."""

    cells: list[Cell] = field(default_factory=list)
    changes: list[Cell] = field(default_factory=list)
    races: list[Race] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    """But those about cells and races."""


PARTS = ("cells", "changes", "slow", "race")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, judge; a full run leaves table and pictures in results/. Returns 0 whatever comes out.

    A run that was cut short leaves its own files, not those of a whole one.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="some cells, fewer repeats, races of one seed on one model at two rates",
    )
    parser.add_argument("--rounds", type=int, help="the least rounds of blocks a cell, 2 or more (quick: 6, else 10)")
    parser.add_argument("--only", choices=PARTS, help="a part of it")
    parser.add_argument("--hosts", type=int, choices=(2, 4), help="only what is measured on so many hosts")
    parser.add_argument("--model", choices=tuple(COURSES), help="with --only race: only on this model")
    parser.add_argument("--seeds", type=int, help="trainings of everybody in a race (quick: 1, else 3)")
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 2:
        parser.error(f"--rounds has to be at least 2. Received: {options.rounds}")
    if options.seeds is not None and options.seeds < 1:
        parser.error(f"--seeds has to be at least 1. Received: {options.seeds}")
    if options.hosts == 4 and options.only not in (None, "cells"):
        parser.error(f"--only {options.only} is measured on two hosts. Received: --hosts 4")
    if options.model and options.only != "race":
        parser.error(f"--model goes with --only race. Received: --model {options.model}")
    began, measured, whole = time.monotonic(), Measured(), False
    say(f"{machine()}\nladder {', '.join(Settings().ladder)}; price of delay {Settings().delay_price:g}")
    try:
        chosen = (options.hosts,) if options.hosts else (2, 4)
        parts = (options.only,) if options.only else PARTS
        races = (options.model,) if options.model else list(COURSES)[: 1 if options.quick else None]
        seeds = options.seeds or (1 if options.quick else 3)
        measure(measured, options.quick, chosen, parts, races, options.rounds, seeds)
        whole = True
    finally:  # what a run of hours has measured is there whatever ended it
        measured.races = [run for run in measured.races if run.curves["auto"]]
        raced = [verdict for run in measured.races for verdict in judge_race(run, RACES[run.rate])]
        for verdict in [*judge_cells(measured.cells, measured.changes), *measured.verdicts, *raced]:
            say(str(verdict))
        say(f"{time.monotonic() - began:.0f} s")
        if not options.quick:
            part = [f"-{options.hosts}-hosts"] * bool(options.hosts)
            part += [f"-{chosen}" for chosen in (options.only, options.model) if chosen]
            keep(measured, "adaptive" + "".join(part) + "-cut-short" * (not whole))
    return 0


def measure(
    measured: Measured,
    quick: bool,
    chosen: Sequence[int],
    parts: Sequence[str],
    races: Sequence[str],
    rounds: int | None,
    seeds: int,
) -> None:
    """All cells, and what else is promised on two hosts. ``races``: the models that race; ``seeds``: how often."""
    rounds, more_seconds = rounds or (6 if quick else 10), MORE_SECONDS[quick]
    for hosts, models in cells(quick).items():
        mine = parts if hosts == 2 else set(parts) & {"cells"}
        if not mine or hosts not in chosen:
            continue
        rates = {rate for own in models.values() for rate in own if rate != UNSHAPED} | {"100mbit"} | set(RACES)
        with running(hosts, sorted(rates)) as ranks:
            for model, rates in models.items() if "cells" in mine else ():
                ranks.model(name=model)
                for rate in rates:
                    measured.cells.append(measure_cell(ranks, hosts, model, rate, rounds, more_seconds))
                    say(describe(measured.cells[-1]))
            if "changes" in mine:
                ranks.model(name="mlp")
                for cell in link_changes(ranks, hosts, "mlp", rounds, more_seconds):
                    measured.changes.append(cell)
                    say(describe(cell))
                measured.verdicts.append(steady(ranks, f"{hosts} hosts, mlp, 1gbit"))
            if "slow" in mine:
                ranks.model(name="cnn")
                measured.verdicts.append(slow_rank(ranks))
            if "race" in mine:
                rates = list(RACES)[: 2 if quick else None]
                people = ("auto", *TRAINED[quick], *LOSSY, *GRANTED)
                for model in races:
                    course = (QUICK_COURSES if quick else COURSES)[model]
                    runs = [Race(model, rate, *course, {who: [] for who in people}) for rate in rates]
                    measured.races += runs
                    race(ranks, runs, range(seeds))


def keep(measured: Measured, name: str) -> None:
    """Write what was printed, figures and pictures into results/, in files whose names begin with ``name``."""
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.txt").write_text("\n".join(SAID) + "\n")
    figures = {
        "machine": machine(),
        "cells": [cell._asdict() for cell in measured.cells],
        "changes": [cell._asdict() for cell in measured.changes],
        "races": [run._asdict() for run in measured.races],
    }
    (folder / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")
    if measured.cells:
        draw_cells(measured.cells, folder / f"{name.removesuffix('-cells')}-cells.png")
    if measured.races:
        draw_races(measured.races, folder / f"{name}-races.png")


def draw_cells(seen: Sequence[Cell], path: Path) -> None:
    """Step times of all levels and of ``auto``, as shares of the dense step, a column a cell."""
    figure = Figure(figsize=(14, 7), layout="constrained")
    axis = figure.add_subplot()
    for level in Settings().ladder:
        points = [(x, cell.levels[level] / cell.levels["none"]) for x, cell in enumerate(seen) if level in cell.levels]
        if points:
            axis.plot(*zip(*points, strict=True), "o", label=level, alpha=0.7)
    auto = [cell.auto_ms / cell.levels["none"] for cell in seen]
    axis.plot(range(len(seen)), auto, "_", color="black", markersize=18, markeredgewidth=2.5, label="auto")
    axis.set_xticks(range(len(seen)), [cell.name for cell in seen], rotation=60, ha="right")
    axis.set_ylabel("step, as a share of dense fp32")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(axis="y", color="#e6e6e6")
    axis.legend(ncols=4, frameon=False)
    axis.set_title(f"auto and the levels it chooses from ({machine()})", loc="left")
    figure.savefig(path, dpi=100)


def draw_races(races: Sequence[Race], path: Path) -> None:
    """Validation loss over seconds of training, first seed."""
    figure = Figure(figsize=(14, 6), layout="constrained")
    for axis, run in zip(figure.subplots(1, len(races), squeeze=False)[0], races, strict=True):
        for who, curves in run.curves.items():
            axis.plot(*zip(*curves[0], strict=True), label=who, linewidth=3 if who == "auto" else 1.2)
        axis.set_xscale("log")
        axis.set_xlabel("seconds of training")
        axis.set_ylabel("validation loss [bits a character]")
        axis.set_title(f"{run.model} on 2 hosts, {run.rate}", loc="left")
        axis.grid(color="#e6e6e6")
        axis.legend(frameon=False)
    figure.savefig(path, dpi=100)


def machine() -> str:
    return f"{date.today()}, {os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}"


if __name__ == "__main__":
    sys.exit(main())
