"""hvdplus as the hook of DistributedDataParallel, against PyTorch's own hooks: steps in turns on real slow links.

    python benchmarks/ddp.py            a perceptron of 10.2 M parameters, two hosts, 100 Mb/s and 1 Gb/s: 20 minutes
    python benchmarks/ddp.py --rates unshaped
    python benchmarks/ddp.py --two-level   two hosts with two ranks each: one stream a host, or two?

Needs root (network namespaces; see ``hvdplus.lab``); nothing else may run on the machine meanwhile. All contestants
train on real digits over Gloo, in one job, in blocks of steps that alternate (``adaptive.py`` has the how), with
gradients in the reducer's buckets (``gradient_as_bucket_view``). A ratio is the geometric mean over rounds, with its
95 % bounds, which are of seconds alone; rounds of those about whom there is doubt go on for four minutes at most. A
level's price of delay is by the median error of its blocks, and ``auto`` pays by its own. Writes
``benchmarks/results/ddp.txt``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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
    prices_of,
    ratio,
    running,
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
STAY, LONGEST_SECONDS = 3, 240.0
"""So many of the ladder's levels, the least costly of the first rounds, stay beside ``auto`` in further ones, which
may take so many seconds at one rate."""
LEVELS = tuple(dict.fromkeys(("none", "fp16", "lowrank:4", "lowrank:8+fp16", *Settings().ladder)))


class Measured(NamedTuple):
    """At one rate."""

    seconds: Seconds
    """Who -> mean seconds a step, one a block."""
    ran: Sequence[str]
    """The level of ``auto`` in each round."""
    prices: Mapping[str, float]
    """Level -> price of delay, in a training of its own."""
    paid: Sequence[float]
    """The price of delay that ``auto`` paid in each round."""


def measure(ranks: Ranks, rate: str, rounds: int) -> Measured:
    """Blocks in turns, until it is clear who is faster or the time is over."""
    people = [*PLAIN, *(f"hook {level}" for level in LEVELS), "hook auto"]
    # ``auto`` is to find its level at this rate, and residuals grow with age: theirs are to be as old as ``auto``'s.
    later = ["hook auto", *(f"hook {level}" for level in Settings().ladder if parse(level).keeps_residual)]
    ranks.model(name="wide")
    ranks.lab.shape(UNSHAPED)
    for who in people:
        ranks.steps(who=who, count=1 if who in later else START_STEPS)
    ranks.lab.shape(rate)
    for who in later:
        ranks.steps(who=who, count=START_STEPS)
    first = {who: next_step(ranks, who) for who in ("hook auto", *(f"hook {level}" for level in Settings().ladder))}
    ran, near = list[str](), list[str]()

    def note() -> None:
        ran.append(ranks.steps(who="hook auto", count=0)["level"])

    def look(seconds: Seconds) -> Measured:
        prices = dict.fromkeys(Settings().ladder, 1.0)
        for level in prices:
            prices |= prices_of(ranks, f"hook {level}", first[f"hook {level}"])
        paid = prices | prices_of(ranks, "hook auto", first["hook auto"])
        return Measured(seconds, ran, prices, [paid[level] for level in ran])

    def doubtful(seconds: Seconds) -> list[str]:
        measured = look(seconds)
        if not near:
            near.extend(f"hook {level}" for level in by_cost(measured)[:STAY])
        *pairs, (mine, _, of_auto, limit) = compare(measured)
        contests = [((one, other), found, most) for one, other, found, most in pairs]
        contests.append(((mine, *near), of_auto, limit))
        doubts = [those for those, found, most in contests if in_all_rounds(seconds, *those) and not clear(found, most)]
        return list({who for those in doubts for who in those})

    return look(in_turns(ranks, people, rounds, doubtful, LONGEST_SECONDS, note))


def by_cost(measured: Measured) -> list[str]:
    """Of ``auto``'s ladder the levels that took part as long as ``auto``, that of least cost first."""
    seconds, prices = measured.seconds, measured.prices
    those = [level for level in prices if len(seconds[f"hook {level}"]) >= len(seconds["hook auto"])]
    return sorted(those, key=lambda level: prices[level] * statistics.median(seconds[f"hook {level}"]))


def compare(measured: Measured) -> list[tuple[str, str, Ratio, float]]:
    """Who is held against whom, what came out, and the limit; ``auto`` comes last."""
    seconds = measured.seconds
    best = by_cost(measured)[0]
    auto = against(seconds, f"hook {best}", measured.prices[best], measured.paid, who="hook auto")
    found = [(mine, other, against(seconds, other, who=mine), limit) for mine, other, limit in PAIRS]
    return [*found, ("hook auto", f"hook {best}, times their prices", auto, NEAR)]


def judge(rate: str, measured: Measured) -> list[str]:
    """The table at one rate, and its verdicts."""
    seconds, ran, prices, paid = measured
    lines = [f"{rate}: milliseconds a step (medians), blocks; price of delay"]
    for who, took in seconds.items():
        level = who.removeprefix("hook ")
        line = f"  {who:<24} {statistics.median(took) * 1e3:8.1f} {len(took):4}"
        if level in prices:
            line += f"{prices[level]:8.3f}"
        elif level == "auto":
            line += f"{statistics.mean(paid[: len(took)]):8.3f}  at {', '.join(dict.fromkeys(ran[: len(took)]))}"
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
        for rate in rates:
            found[rate] = measure(ranks, rate, options.rounds)
            print(f"{rate}: auto at {', '.join(dict.fromkeys(found[rate].ran))}", flush=True)
    lines = [f"{machine()}; ladder of auto {', '.join(Settings().ladder)}"]
    lines += [line for rate in rates for line in judge(rate, found[rate])]
    lines.append(f"{time.monotonic() - began:.0f} s")
    print("\n".join(lines))
    if tuple(rates) == RATES:
        (Path(__file__).parent / "results" / "ddp.txt").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
