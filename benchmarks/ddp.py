"""hvdplus as the hook of DistributedDataParallel, against PyTorch's own hooks: steps in turns on real slow links.

    python benchmarks/ddp.py            a perceptron of 10.2 M parameters, two hosts, 100 Mb/s and 1 Gb/s: some minutes
    python benchmarks/ddp.py --rates unshaped
    python benchmarks/ddp.py --two-level   two hosts with two ranks each: one stream a host, or two?

Needs root (network namespaces; see ``hvdplus.lab``); nothing else may run on the machine meanwhile. All contestants
train on real digits over Gloo, in one job, in blocks of steps that alternate (``adaptive.py`` has the how), with
gradients in the reducer's buckets (``gradient_as_bucket_view``). A ratio is the geometric mean over rounds, with its
95 % bounds. Writes ``benchmarks/results/ddp.txt``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from adaptive import START_STEPS, Ratio, Seconds, against, clear, in_turns, machine, prices_of, ratio, running, windows

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
MOST_NEAR, MORE_SECONDS = 3, 240.0
"""Of the ladder's levels, so many are measured on beside ``auto``; and so long, at one rate, may rounds go on."""
LEVELS = tuple(dict.fromkeys(("none", "fp16", "lowrank:4", "lowrank:8+fp16", *Settings().ladder)))


class Measured(NamedTuple):
    """At one rate."""

    seconds: Seconds
    """Who -> mean seconds a step, one a block."""
    ran: Sequence[str]
    """The level of each block of ``auto``'s."""
    prices: Mapping[str, float]
    """Level -> price of delay, in a training of its own."""
    paid: Sequence[float]
    """The price of delay in each block of ``auto``'s."""


def measure(rates: Sequence[str], rounds: int) -> dict[str, Measured]:
    """Rate -> what was found there."""
    people = [*PLAIN, *(f"hook {level}" for level in LEVELS), "hook auto"]
    found: dict[str, Measured] = {}
    with running(2, [rate for rate in rates if rate != UNSHAPED]) as ranks:
        for rate in rates:
            ranks.model(name="wide")
            ranks.lab.shape(UNSHAPED)
            for who in people:
                ranks.steps(who=who, count=START_STEPS if who != "hook auto" else 1)
            ranks.lab.shape(rate)
            ranks.steps(who="hook auto", count=START_STEPS)
            ran: list[str] = []

            def note(ran: list[str] = ran) -> None:
                ran.append(ranks.steps(who="hook auto", count=0)["level"])

            # Residuals grow with age: these are to be as old as auto's.
            for level in Settings().ladder:
                if parse(level).keeps_residual:
                    ranks.steps(who=f"hook {level}", count=START_STEPS)
            began = windows(ranks, "hook auto")[-1]["last_step"]

            def seen(seconds: Seconds, ran: list[str] = ran, began: int = began) -> Measured:
                prices = {level: prices_of(ranks, f"hook {level}")[level] for level in Settings().ladder}
                own = prices_of(ranks, "hook auto", began)
                paid = [own.get(level, prices[level]) for level in ran]
                return Measured(seconds, ran, prices, paid)

            seconds = in_turns(ranks, people, rounds, lambda so_far: doubtful(seen(so_far)), MORE_SECONDS, note)
            found[rate] = seen(seconds)
            print(f"{rate}: auto at {', '.join(dict.fromkeys(ran))}", flush=True)
    return found


def compare(measured: Measured) -> list[tuple[str, str, Ratio, float]]:
    """Who is held against whom, what came out, and the limit."""
    seconds = measured.seconds
    best = by_cost(measured)[0]
    auto = against(seconds, f"hook {best}", measured.prices[best], measured.paid, who="hook auto")
    found = [(mine, other, against(seconds, other, who=mine), limit) for mine, other, limit in PAIRS]
    return [*found, ("hook auto", f"hook {best}, times their prices", auto, NEAR)]


def by_cost(measured: Measured) -> list[str]:
    """The levels of ``auto``'s ladder, that of least cost first."""
    return sorted(
        measured.prices,
        key=lambda level: measured.prices[level] * statistics.median(measured.seconds[f"hook {level}"]),
    )


def doubtful(measured: Measured) -> list[str]:
    """Whose rounds shall go on: nothing is clear yet about them."""
    *pairs, (_, _, found, limit) = compare(measured)
    people = {who for mine, other, found, limit in pairs if not clear(found, limit) for who in (mine, other)}
    if not clear(found, limit):
        people |= {"hook auto", *(f"hook {level}" for level in by_cost(measured)[:MOST_NEAR])}
    return [*people]


def judge(rate: str, measured: Measured) -> list[str]:
    """The table at one rate, and its verdicts."""
    seconds, ran, prices, _ = measured
    lines = [f"{rate}: milliseconds a step (medians of {len(ran)} blocks or fewer); price of delay"]
    for who, took in seconds.items():
        level = who.removeprefix("hook ")
        cost = (
            f"{prices[level]:8.3f}" if level in prices else f"  at {', '.join(dict.fromkeys(ran))}" * (level == "auto")
        )
        lines.append(f"  {who:<24} {statistics.median(took) * 1e3:8.1f}{cost}")

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
    parser.add_argument("--rounds", type=int, default=12, help="blocks of everybody")
    parser.add_argument("--two-level", action="store_true", help="only two hosts with two ranks each")
    options = parser.parse_args(arguments)
    began, rates = time.monotonic(), options.rates.split(",")
    if options.two_level:
        lines = [machine(), *measure_two_level(rates, options.rounds), f"{time.monotonic() - began:.0f} s"]
        (Path(__file__).parent / "results" / "ddp-two-level.txt").write_text("\n".join(lines) + "\n")
        return 0
    found = measure(rates, options.rounds)
    lines = [f"{machine()}; ladder of auto {', '.join(Settings().ladder)}"]
    lines += [line for rate in rates for line in judge(rate, found[rate])]
    lines.append(f"{time.monotonic() - began:.0f} s")
    print("\n".join(lines))
    if tuple(rates) == RATES:
        (Path(__file__).parent / "results" / "ddp.txt").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
