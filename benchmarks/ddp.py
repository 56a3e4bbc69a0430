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
from collections.abc import Sequence
from pathlib import Path

from adaptive import START_STEPS, Seconds, in_turns, machine, ratio, running

from hvdplus.lab import UNSHAPED
from hvdplus.settings import Settings

RATES = ("100mbit", "1gbit")
PLAIN = ("ddp", "ddp fp16", "ddp powersgd:4:2", "ddp powersgd:8:2")
SOONER, SAME, NEAR = 0.6, 1.02, 1.05
"""Limits: a low-rank level over PowerSGD of rank 4, ``none`` over plain DDP, ``auto`` over its fastest level."""
LEVELS = ("none", "fp16", "lowrank:4", "lowrank:8+fp16", "lowrank:16+fp16")


def measure(rates: Sequence[str], rounds: int) -> dict[str, Seconds]:
    """Rate -> who -> mean seconds a step, one a block."""
    people = [*PLAIN, *(f"hook {level}" for level in LEVELS), "hook auto"]
    found: dict[str, Seconds] = {}
    with running(2, [rate for rate in rates if rate != UNSHAPED]) as ranks:
        for rate in rates:
            ranks.model(name="wide")
            ranks.lab.shape(UNSHAPED)
            for who in people:
                ranks.steps(who=who, count=START_STEPS if who != "hook auto" else 1)
            ranks.lab.shape(rate)
            ranks.steps(who="hook auto", count=START_STEPS)
            found[rate] = in_turns(ranks, people, rounds, lambda _: [], 0.0)
            print(f"{rate}: auto at {ranks.steps(who='hook auto', count=1)['level']}", flush=True)
    return found


def judge(rate: str, seconds: Seconds) -> list[str]:
    """The table at one rate, and its verdicts."""
    lines = [f"{rate}: milliseconds a step (medians of {len(seconds['ddp'])} blocks)"]
    lines += [f"  {who:<24} {statistics.median(took) * 1e3:8.1f}" for who, took in seconds.items()]
    levels = [who for level in Settings().ladder if (who := f"hook {level}") in seconds]  # auto runs no others
    best = min(levels, key=lambda who: statistics.median(seconds[who]))
    for mine, other, limit in (
        ("hook lowrank:4", "ddp powersgd:4:2", SOONER),
        ("hook lowrank:8+fp16", "ddp powersgd:4:2", SOONER),
        ("hook fp16", "ddp fp16", SAME),
        ("hook none", "ddp", SAME),
        ("hook auto", best, NEAR),
    ):
        found = ratio(seconds[mine], seconds[other])
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
