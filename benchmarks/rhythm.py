"""How often should ranks exchange? Local steps, lock-step and PyTorch's own race to losses on slow links.

    python benchmarks/rhythm.py --quick    two hosts, two rates, one seed: 20 minutes
    python benchmarks/rhythm.py            two and four hosts, 10 Mb/s to 1 Gb/s, 3 seeds; writes results/rhythm.*

Nothing else may run on the machine meanwhile. Needs root (network namespaces; see ``lab.py``).

A byte-level transformer of 3.3 M parameters trains with AdamW on real text. As in ``adaptive.py``'s races, what a fixed
choice learns in a step does not depend on the link: its curve is that of a training without limits, at the step time
that it has at each rate; who decides for itself trains at each rate. A local step's time is that of a whole period, its
exchange included. Losses are those of the ranks' mean, between two exchanges, too.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from adaptive import POWERSGD, UNSHAPED, Ranks, Verdict, curve, machine, running
from matplotlib.figure import Figure

HERE = Path(__file__).parent
MODEL, STEPS, STRETCH = "bytes", 768, 64
"""Steps of a training, and those after which it is evaluated."""
TARGETS = (3.4, 3.2, 3.0)
"""Bits a byte on the validation text."""
RATES = {True: ("100mbit", "1gbit"), False: ("10mbit", "20mbit", "100mbit", "1gbit")}
SEEDS = {True: 1, False: 3}
LEVELS = {True: ("fp16",), False: ("none", "fp16", "lowrank:16+fp16")}
EVERY = {True: (4, 16), False: (4, 16, 64)}
LOCK_STEP = {True: ("horovod", "alone", "ddp powersgd:4:2", "ddp powersgd:8:2"), False: ("horovod", "alone", *POWERSGD)}
PEERS = {
    True: ("postlocal 4", "postlocal 16", "diloco 16"),
    False: tuple(f"{who} {h}" for who in ("postlocal", "diloco") for h in (4, 16, 64)),
}
DECIDE = ("auto", "local auto auto")
"""Who trains at each rate."""
BLOCK_SECONDS, BLOCKS = 0.3, {True: 3, False: 5}
"""A block of steps, of whole periods, takes at least so long; so many blocks of everybody, in turns."""
SOONER, SLOW_SOONER = 1.5, 2.0


class Run(NamedTuple):
    """Everybody's way at one rate."""

    hosts: int
    rate: str
    curves: dict[str, list[list[tuple[float, float]]]]
    """Who -> a curve a seed: (seconds of training, bits a byte)."""

    def seconds(self, who: str, target: float) -> float:
        """Median over seeds of the seconds until the target; infinity: not within the steps."""
        return statistics.median(reached(one, target) for one in self.curves[who])

    def final(self, who: str) -> list[float]:
        """Bits a byte after all steps, one a seed."""
        return [one[-1][1] for one in self.curves[who]]


def reached(one: Sequence[tuple[float, float]], target: float) -> float:
    """Seconds until a curve is at the target, on straight lines between its points; infinity: never."""
    last: tuple[float, float] | None = None
    for at, loss in one:
        if loss <= target:
            if last is None:
                return at
            return last[0] + (at - last[0]) * (last[1] - target) / (last[1] - loss)
        last = at, loss
    return math.inf


def people(quick: bool) -> list[str]:
    """All fixed choices that train."""
    local = [f"local {every} {level}" for every in EVERY[quick] for level in LEVELS[quick]]
    local += [f"local 16 {level} overlap_steps=4" for level in LEVELS[quick]]
    return [*LOCK_STEP[quick], *PEERS[quick], *local]


def period(who: str) -> int:
    """Steps between two exchanges."""
    kind, _, rest = who.partition(" ")
    every = rest.partition(" ")[0]
    return int(every) if kind in ("local", "postlocal", "diloco") and every.isdecimal() else 1


def overlap(who: str) -> int:
    """Steps that an exchange runs on beside."""
    return int(who.partition("overlap_steps=")[2] or 0)


def train(ranks: Ranks, who: str, rate: str) -> tuple[float, list[float], list[float]]:
    """(Seconds of preparations, mean seconds of a step in each stretch, loss after each)."""
    ranks.forget(who=who)
    ranks.lab.shape(rate)
    began = ranks.steps(who=who, count=0)["began"]
    seconds, losses = [], []
    for _ in range(STEPS // STRETCH):
        seconds.append(statistics.mean(ranks.steps(who=who, count=STRETCH)["seconds"]))
        ranks.lab.shape(UNSHAPED)
        losses.append(ranks.evaluate(who=who, average=who != "alone"))
        ranks.lab.shape(rate)
    return began, seconds, losses


def step_seconds(ranks: Ranks, names: Sequence[str], blocks: int) -> dict[str, float]:
    """Mean seconds of a step, everybody in turns. A block has whole periods, from one exchange's end to another's: what
    runs on beside the steps after it is in the block in which it began."""
    lengths, found = {}, {who: [] for who in names}
    for who in names:
        every = period(who)
        ranks.steps(who=who, count=-(-2 // every) * every + overlap(who))
        typical = statistics.mean(ranks.steps(who=who, count=every)["seconds"])
        lengths[who] = every * max(1, round(BLOCK_SECONDS / (every * typical)))
    for _ in range(blocks):
        took = ranks.blocks(turns=[(who, lengths[who]) for who in names], rest_seconds=ranks.lab.burst_seconds)
        for who, seconds in zip(names, took, strict=True):
            found[who].append(seconds)
    return {who: statistics.mean(each) for who, each in found.items()}


def race(ranks: Ranks, hosts: int, quick: bool) -> list[Run]:
    """All seeds at all rates."""
    fixed = people(quick)
    granted = ["horovod fp16", "ddp", "ddp fp16"]
    """Choices that only round: they are granted the losses of fp32."""
    runs = [Run(hosts, rate, {who: [] for who in (*DECIDE, *fixed, *granted)}) for rate in RATES[quick]]
    for seed in range(SEEDS[quick]):
        ranks.model(name=MODEL, seed=seed)
        learned = {}
        for who in fixed:
            learned[who] = train(ranks, who, UNSHAPED)
            print(f"  {hosts} hosts, seed {seed}: {who} ended with {learned[who][2][-1]:.3f} bits", flush=True)
        for run in runs:
            for who in DECIDE:
                run.curves[who].append(curve(*train(ranks, who, run.rate), STRETCH))
            took = step_seconds(ranks, [*fixed, *granted], BLOCKS[quick])
            for who in (*fixed, *granted):
                began, _, losses = learned.get(who, learned["horovod"])
                run.curves[who].append(curve(began, [took[who]] * len(losses), losses, STRETCH))
            for who, one in run.curves.items():
                print(f"  {hosts} hosts, {run.rate}, seed {seed}: {describe(who, one[-1])}", flush=True)
    return runs


def describe(who: str, one: Sequence[tuple[float, float]]) -> str:
    """One training in a line."""
    at = [reached(one, target) for target in TARGETS]
    times = ", ".join("never" if math.isinf(seconds) else f"{seconds:.1f}" for seconds in at)
    return f"{who:<34} {times} s to {', '.join(map(str, TARGETS))} bits; {one[-1][1]:.3f} after {one[-1][0]:.1f} s"


def judge(run: Run) -> list[Verdict]:
    """What is promised at one rate."""
    where = f"{run.hosts} hosts, {run.rate}"
    local = [who for who in run.curves if who.startswith("local ") and who not in DECIDE]
    powersgd = [who for who in run.curves if "powersgd" in who]
    spread = max(run.final("horovod")) - min(run.final("horovod"))
    verdicts = []

    def sooner(line: str, mine: str, others: Sequence[str], least: float) -> None:
        pairs = [
            (run.seconds(who, target) / run.seconds(mine, target), who, target)
            for target in TARGETS
            for who in others
            if run.seconds(who, target) < math.inf
        ]
        if pairs:
            lead, who, target = min(pairs)
            figures = f"{lead:.2f} x at {target:g} bits against {who} ({run.seconds(who, target):.1f} s)"
            verdicts.append(Verdict(f"{where}: {line}", lead >= least, figures))

    def final(line: str, mine: str) -> None:
        worse = statistics.mean(run.final(mine)) - statistics.mean(run.final("horovod"))
        figures = f"{worse:+.4f} bits, dense's seeds spread over {spread:.4f}"
        verdicts.append(Verdict(f"{where}: {line}", worse <= spread, figures))

    best = min(local, key=lambda who: run.seconds(who, TARGETS[-1]))
    if run.rate in ("100mbit", "1gbit"):
        sooner(f"every=auto at least {SOONER} x sooner than auto and PowerSGD", DECIDE[1], ["auto", *powersgd], SOONER)
        final("every=auto ends as dense does", DECIDE[1])
    if run.rate == "20mbit":
        sooner(f"{best} at least {SLOW_SOONER} x sooner than auto", best, ["auto"], SLOW_SOONER)
        final(f"{best} ends as dense does", best)
    for every in sorted({period(who) for who in run.curves if who.startswith("postlocal")}):
        mine = min((w for w in local if period(w) == every), key=lambda who: run.seconds(who, TARGETS[-1]))
        sooner(f"{mine} never later than PyTorch's local SGD", mine, [f"postlocal {every}"], 1.0)
    return verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, judge; a full run leaves table and picture in results/."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two hosts, two rates, one seed")
    parser.add_argument("--hosts", type=int, choices=(2, 4), help="only so many hosts")
    options = parser.parse_args(arguments)
    began, runs = time.monotonic(), []
    print(machine(), flush=True)
    for hosts in (options.hosts,) if options.hosts else (2,) if options.quick else (2, 4):
        with running(hosts, RATES[options.quick]) as ranks:
            runs += race(ranks, hosts, options.quick)
    for verdict in (verdict for run in runs for verdict in judge(run)):
        print(f"{'ok  ' if verdict.passed else 'FAIL'}  {verdict.line}\n        {verdict.figures}")
    print(f"{time.monotonic() - began:.0f} s")
    if not options.quick:
        keep(runs, "rhythm" + f"-{options.hosts}-hosts" * bool(options.hosts))
    return 0


def keep(runs: Sequence[Run], name: str) -> None:
    """Write figures, verdicts and the picture into results/."""
    folder = HERE / "results"
    lines = [machine()]
    for run in runs:
        lines += [f"{run.hosts} hosts, {run.rate}", *(f"  {describe(who, one[0])}" for who, one in run.curves.items())]
    for verdict in (verdict for run in runs for verdict in judge(run)):
        lines.append(f"{'ok  ' if verdict.passed else 'FAIL'}  {verdict.line}\n        {verdict.figures}")
    (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    (folder / f"{name}.json").write_text(json.dumps([run._asdict() for run in runs], indent=1) + "\n")
    figure = Figure(figsize=(6 * len(runs), 6), layout="constrained")
    for axis, run in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs, strict=True):
        for who, curves in run.curves.items():
            axis.plot(*zip(*curves[0], strict=True), label=who, linewidth=3 if who in DECIDE else 1.2)
        axis.set(xscale="log", xlabel="seconds of training", ylabel="validation loss [bits a byte]")
        axis.set_title(f"{run.hosts} hosts, {run.rate}", loc="left")
        axis.grid(color="#e6e6e6")
        axis.legend(frameon=False, fontsize=6)
    figure.savefig(folder / f"{name}.png", dpi=100)


if __name__ == "__main__":
    sys.exit(main())
