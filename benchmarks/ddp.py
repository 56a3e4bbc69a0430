"""hvdplus as the hook of DistributedDataParallel, against PyTorch's own hooks: steps in turns on real slow links.

    python benchmarks/ddp.py            a perceptron of 10.2 M parameters, two hosts, 100 Mb/s and 1 Gb/s: 30 minutes
    python benchmarks/ddp.py --rates unshaped
    python benchmarks/ddp.py --two-level   two hosts with two ranks each: one stream a host, or two?

Needs root (network namespaces; see ``hvdplus.lab``); nothing else may run on the machine meanwhile. All contestants
train on real digits over Gloo, in one job, in blocks of steps that alternate (``adaptive.py`` has the how), with
gradients in the reducer's buckets (``gradient_as_bucket_view``). A ratio is the geometric mean over rounds, with its
95 % bounds, which are of seconds alone; rounds of those about whom there is doubt go on for four minutes at most, and
then of each pair that is still in doubt for one. Writes ``benchmarks/results/ddp.txt``.

From one training to the next, with nothing changed but the order of data, a level's error differs by a fifth, and its
price of delay by 2 % and more (``NOTES.md``): the least of a single reading of seven levels is an accident. So a
level's price is the mean of ``TRAININGS`` trainings, each by its median error over the steps in which ``auto`` is
measured; and so many trainings of ``auto`` take part, each of which pays by its own errors.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adaptive import (
    START_STEPS,
    Ranks,
    Ratio,
    Seconds,
    against,
    clear,
    in_all_rounds,
    in_turns,
    machine,
    next_step,
    prices_in,
    ratio,
    running,
    windows,
)

from hvdplus.compression import parse
from hvdplus.lab import UNSHAPED
from hvdplus.settings import Settings

RATES = ("100mbit", "1gbit")
PLAIN = ("alone", "ddp", "ddp fp16", "ddp powersgd:4:2", "ddp powersgd:8:2")
SOONER, SAME, NEAR = 0.6, 1.02, 1.05
"""Limits: a low-rank level over PowerSGD of rank 4, ``none`` over plain DDP, ``auto`` over its ladder's best level,
which is the one of least seconds times price of delay."""
PAIRS = (
    ("hook lowrank:4", "ddp powersgd:4:2", SOONER),
    ("hook lowrank:8+fp16", "ddp powersgd:4:2", SOONER),
    ("hook fp16", "ddp fp16", SAME),
    ("hook none", "ddp", SAME),
)
STAY, LONGEST_SECONDS, PAIR_SECONDS = 3, 240.0, 60.0
"""So many of the ladder's levels, the least costly of the first rounds, stay beside ``auto`` in further ones, which
may take so many seconds at one rate; then each pair in doubt, by itself, so many."""
TRAININGS, TRAINING_STEPS = 3, 300
"""Of each level that keeps a residual, one of them in turns with the others; steps of the rest."""
AUTOS = ("hook auto", *(f"hook auto #{number}" for number in range(1, TRAININGS)))
LEVELS = tuple(dict.fromkeys(("none", "fp16", "lowrank:4", "lowrank:8+fp16", *Settings().ladder)))


class Measured(NamedTuple):
    """At one rate."""

    seconds: Seconds
    """Who -> mean seconds a step, one a block."""
    ran: Mapping[str, Sequence[str]]
    """Training of ``auto`` -> its level in each round."""
    paid: Mapping[str, Sequence[float]]
    """Training of ``auto`` -> the price of delay that it paid in each round."""
    prices: Mapping[str, Sequence[float]]
    """Level -> price of delay in each of its trainings, the one in turns first."""
    more: dict[tuple[str, str], Seconds]
    """Pair -> further blocks of the two, in turns with nobody else."""

    def price(self, level: str) -> float:
        """The mean of a level's trainings."""
        return statistics.mean(self.prices[level])

    def of_auto(self, auto: str) -> list[float]:
        """Its blocks, times the price of delay that it paid in each."""
        return [took * price for took, price in zip(self.seconds[auto], self.paid[auto], strict=False)]


Windows = Sequence[Mapping[str, Any]]
"""Of the log of one training."""


def train(ranks: Ranks) -> dict[str, list[Windows]]:
    """Level -> trainings of it beside the one in turns: errors do not depend on the link."""
    found: dict[str, list[Windows]] = {level: [] for level in Settings().ladder}
    ranks.lab.shape(UNSHAPED)
    for level in found:
        for number in range(1, TRAININGS) if parse(level).keeps_residual else ():
            ranks.model(name="wide")
            ranks.steps(who=f"hook {level} #{number}", count=TRAINING_STEPS)
            found[level].append(windows(ranks, f"hook {level} #{number}"))
    return found


def measure(ranks: Ranks, rate: str, rounds: int, trained: Mapping[str, Sequence[Windows]]) -> Measured:
    """Blocks in turns, until it is clear who is faster or the time is over. ``trained``: as of ``train``."""
    people = [*PLAIN, *(f"hook {level}" for level in LEVELS), *AUTOS]
    # ``auto`` is to find its level at this rate from its first step on, before which small sums show it the link; and
    # residuals grow with age: theirs are to be as old as ``auto``'s.
    later = [*AUTOS, *(f"hook {level}" for level in Settings().ladder if parse(level).keeps_residual)]
    ranks.model(name="wide")
    ranks.lab.shape(UNSHAPED)
    for who in people:
        if who not in AUTOS:
            ranks.steps(who=who, count=1 if who in later else START_STEPS)
    ranks.lab.shape(rate)
    for who in later:
        ranks.steps(who=who, count=START_STEPS)
    first = {who: next_step(ranks, who) for who in later}
    near, more = list[str](), dict[tuple[str, str], Seconds]()
    ran = {auto: list[str]() for auto in AUTOS}

    def note() -> None:
        for auto, levels in ran.items():
            levels.append(ranks.steps(who=auto, count=0)["level"])

    def look(seconds: Seconds) -> Measured:
        last = max(next_step(ranks, auto) for auto in AUTOS)
        prices, paid = dict[str, list[float]](), dict[str, list[float]]()
        for level in Settings().ladder:
            who = f"hook {level}"
            seen = (windows(ranks, who), *trained[level])
            prices[level] = [prices_in(each, first.get(who, 0), last).get(level, 1.0) for each in seen]
        for auto, levels in ran.items():
            seen = windows(ranks, auto)
            usual = {level: statistics.mean(prices[level]) for level in levels}
            known = usual | prices_in(seen, first[auto], last)  # a level may be left before its error was read
            paid[auto] = [known[level] for level in levels]
        return Measured(seconds, ran, paid, prices, more)

    def doubtful(seconds: Seconds) -> list[str]:
        measured = look(seconds)
        if not near:
            near.extend(f"hook {level}" for level in by_cost(measured)[:STAY])
        *pairs, (_, _, of_auto, limit) = compare(measured)
        contests = [((one, other), found, most) for one, other, found, most in pairs]
        contests.append(((*AUTOS, *near), of_auto, limit))
        doubts = [those for those, found, most in contests if in_all_rounds(seconds, *those) and not clear(found, most)]
        return list({who for those in doubts for who in those})

    measured = look(in_turns(ranks, people, rounds, doubtful, LONGEST_SECONDS, note))
    for mine, other, limit in PAIRS:
        go_on(ranks, measured, mine, other, limit)
    return measured


def go_on(ranks: Ranks, measured: Measured, mine: str, other: str, limit: float) -> None:
    """Blocks of two in turns, as long as there is doubt about them."""

    def these(blocks: Seconds) -> Sequence[str]:
        measured.more[mine, other] = blocks
        return () if clear(versus(measured, mine, other), limit) else (mine, other)

    if not clear(versus(measured, mine, other), limit):
        in_turns(ranks, (mine, other), 0, these, PAIR_SECONDS)


def by_cost(measured: Measured) -> list[str]:
    """Of ``auto``'s ladder the levels that took part as long as ``auto``, that of least cost first."""
    seconds = measured.seconds
    those = [level for level in measured.prices if len(seconds[f"hook {level}"]) >= len(seconds["hook auto"])]
    return sorted(those, key=lambda level: measured.price(level) * statistics.median(seconds[f"hook {level}"]))


def versus(measured: Measured, mine: str, other: str) -> Ratio:
    """The blocks of two in the rounds that both took part in."""
    both = measured.seconds, measured.more.get((mine, other), {mine: [], other: []})
    blocks = [pair for seconds in both for pair in zip(seconds[mine], seconds[other], strict=False)]
    return ratio(*zip(*blocks, strict=True))


def over(measured: Measured, level: str, autos: Sequence[str] = AUTOS) -> Ratio:
    """The blocks of ``auto`` over those of a level, times their prices of delay: in each round the geometric mean of
    all of its trainings."""
    mine = [statistics.geometric_mean(each) for each in zip(*map(measured.of_auto, autos), strict=True)]
    return against(measured.seconds | {"auto": mine}, f"hook {level}", measured.price(level))


def compare(measured: Measured) -> list[tuple[str, str, Ratio, float]]:
    """Who is held against whom, what came out, and the limit; ``auto`` comes last."""
    best = by_cost(measured)[0]
    found = [(mine, other, versus(measured, mine, other), limit) for mine, other, limit in PAIRS]
    return [*found, ("hook auto", f"hook {best}, times their prices", over(measured, best), NEAR)]


def judge(rate: str, measured: Measured) -> list[str]:
    """The table at one rate, and its verdicts."""
    best = by_cost(measured)[0]
    lines = [f"{rate}: milliseconds a step (medians), blocks; price of delay, of each training"]
    for who, took in measured.seconds.items():
        level = who.removeprefix("hook ")
        line = f"  {who:<24} {statistics.median(took) * 1e3:8.1f} {len(took):4}"
        if level in measured.prices:
            line += f"{measured.price(level):8.3f}  {', '.join(f'{price:.3f}' for price in measured.prices[level])}"
        elif who in AUTOS:
            ran = ", ".join(dict.fromkeys(measured.ran[who][: len(took)]))
            line += f"{statistics.mean(measured.paid[who][: len(took)]):8.3f}  at {ran}"
            line += f"; {over(measured, best, [who]).middle:.3f} of {best}"
        lines.append(line)

    for mine, other, found, limit in compare(measured):
        verdict = "ok  " if found.middle <= limit else "FAIL"
        lines.append(f"{verdict}  {rate}: {mine} over {other}: {found}, at most {limit}")
    return lines


def measure_two_level(rates: Sequence[str], rounds: int) -> list[str]:
    """Two hosts with two ranks each, on one core a host: levels over two levels against the same over one."""
    lines = []
    levels = ("fp16", "int8", "lowrank:8+fp16")
    people = [f"hook {level} two_level={how}" for level in levels for how in ("off", "on")]
    with running(2, [rate for rate in rates if rate != UNSHAPED], ranks_per_host=2) as ranks:
        for rate in rates:
            ranks.model(name="mlp")
            ranks.lab.shape(rate)
            for who in people:
                ranks.steps(who=who, count=6)
            seconds = in_turns(ranks, people, rounds, lambda _: [], 0.0)
            for level in levels:
                off, on = (seconds[f"hook {level} two_level={how}"] for how in ("off", "on"))
                lines.append(
                    f"2 hosts x 2 ranks, mlp, {rate}, {level}: {statistics.median(off) * 1e3:.1f} ms over one level, "
                    f"{statistics.median(on) * 1e3:.1f} over two: {ratio(on, off)}"
                )
                print(lines[-1], flush=True)
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", default=",".join(RATES), help="with commas between them")
    parser.add_argument("--rounds", type=int, default=12, help="least rounds, a block of everybody in each")
    parser.add_argument("--two-level", action="store_true", help="only two hosts with two ranks each")
    options = parser.parse_args(arguments)
    began, rates = time.monotonic(), options.rates.split(",")
    if options.two_level:
        lines = [machine(), *measure_two_level(rates, options.rounds), f"{time.monotonic() - began:.0f} s"]
        (Path(__file__).parent / "results" / "ddp-two-level.txt").write_text("\n".join(lines) + "\n")
        return 0
    found: dict[str, Measured] = {}
    with running(2, [rate for rate in rates if rate != UNSHAPED]) as ranks:
        trained = train(ranks)
        for rate in rates:
            found[rate] = measure(ranks, rate, options.rounds, trained)
            print("\n".join(judge(rate, found[rate])), flush=True)
    lines = [f"{machine()}; ladder of auto {', '.join(Settings().ladder)}"]
    lines += [line for rate in rates for line in judge(rate, found[rate])]
    lines.append(f"{time.monotonic() - began:.0f} s")
    print(lines[0], lines[-1], sep="\n")
    if tuple(rates) == RATES:
        (Path(__file__).parent / "results" / "ddp.txt").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
