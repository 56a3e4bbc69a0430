"""What does a step take, whoever exchanges its gradients? Stock Horovod, PyTorch's own and hvdplus, on real links.

    python benchmarks/peers.py --quick    two models and three links: nine minutes
    python benchmarks/peers.py            models of 1 to 48 M parameters, 100 Mb/s to no limit: for hours
    python benchmarks/peers.py --models lstm --rates 1gbit

Needs root (network namespaces; see ``hvdplus.lab``); nothing else may run on the machine meanwhile. Two hosts with a
core each; everybody trains on real data (``contestants.py``), in one job, in blocks of steps that alternate
(``adaptive.py`` has the how). ``alone`` is a rank with nobody to talk to: what a step computes.

A step can take no less than it computes, and no less than its bytes need on the wire. ``of the limit`` is the longer of
both over the step: 100 % is an exchange that hides behind the computation, or the computation behind it. Megabytes are
those that the first host put on its link, headers and all. A ratio is the geometric mean over rounds, with its 95 %
bounds. A full run writes ``benchmarks/results/peers.txt``, a quick one ``peers-quick.txt``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from adaptive import DENSE, START_STEPS, Ranks, Seconds, Verdict, in_turns, machine, ratio, running

from hvdplus.cli.text import columns
from hvdplus.lab import UNSHAPED, bits_per_second
from hvdplus.settings import Settings

MODELS = {True: ("mlp", "wide"), False: ("mlp", "wide text", "wide", "lstm")}
RATES = {True: ("100mbit", "1gbit", UNSHAPED), False: ("100mbit", "1gbit", "10gbit", UNSHAPED)}
STOCK = (*DENSE, "ddp", "ddp fp16")
POWERSGD = ("ddp powersgd:4:2", "ddp powersgd:8:2")
ROUNDS, LONG_SECONDS, MORE_SECONDS = 4, 0.5, {True: 10.0, False: 30.0}
"""Rounds of everybody; those whose blocks are short then go on for a while."""
RING, SAME, DOUBT = 1.15, 1.00, 1.02
"""Limits: ``none`` over the longer of wire and computation on links that are slow; ``auto`` over the faster of stock
Horovod's on links that are fast, in the middle and by the bound."""
FAST = ("10gbit", UNSHAPED)


class Cell(NamedTuple):
    """A model on a link."""

    model: str
    parameters: int
    rate: str
    seconds: Seconds
    sent: dict[str, float]
    """Who -> bytes a step."""
    level: str
    """Where ``auto`` is in the end."""

    def limit(self, who: str) -> float:
        """Seconds that a step takes at least."""
        alone = statistics.median(self.seconds["alone"])
        return alone if self.rate == UNSHAPED else max(alone, self.sent[who] * 8 / bits_per_second(self.rate))

    @property
    def best(self) -> str:
        """The level of the ladder whose step is shortest."""
        return min(
            (w for w in self.seconds if w.startswith("level ")), key=lambda w: statistics.median(self.seconds[w])
        )


def people() -> list[str]:
    """Everybody."""
    return ["alone", *STOCK, *POWERSGD, *(f"level {level}" for level in Settings().ladder), "auto"]


def measure(ranks: Ranks, model: str, parameters: int, rate: str, more_seconds: float) -> Cell:
    """Everybody in turns; those whose steps are long drop out after some rounds."""
    everybody = people()
    ranks.lab.shape(UNSHAPED)
    for who in everybody:
        ranks.forget(who=who)
        if who != "auto":
            ranks.steps(who=who, count=4)
    ranks.lab.shape(rate)
    ranks.steps(who="auto", count=START_STEPS)

    def short(seconds: Seconds) -> list[str]:
        return [who for who in everybody if statistics.median(seconds[who]) < LONG_SECONDS]

    seconds = in_turns(ranks, everybody, ROUNDS, short, more_seconds)
    sent = {}
    for who in everybody:
        count = 1 if statistics.median(seconds[who]) > LONG_SECONDS else 10
        before = ranks.lab.bytes_sent()["h1"]
        ranks.steps(who=who, count=count)
        sent[who] = (ranks.lab.bytes_sent()["h1"] - before) / count
    level = ranks.steps(who="auto", count=1)["level"]
    return Cell(model, parameters, rate, seconds, sent, level)


def table(cell: Cell) -> list[str]:
    """Who, milliseconds, megabytes, share of the limit."""
    rows = [["", "ms a step", "MB", "of the limit"]]
    for who, blocks in cell.seconds.items():
        step = statistics.median(blocks)
        name = f"auto ({cell.level})" if who == "auto" else who
        rows.append([name, f"{step * 1e3:.1f}", f"{cell.sent[who] / 1e6:.2f}", f"{cell.limit(who) / step:.0%}"])
    title = f"{cell.model}, {cell.parameters / 1e6:.1f} M parameters, {cell.rate}, {len(cell.seconds['auto'])} rounds"
    return [title, *(f"  {line}" for line in columns(rows, (1, 2, 3)).splitlines())]


def judge(cell: Cell) -> list[Verdict]:
    """What is promised in a cell."""
    where = f"{cell.model}, {cell.rate}"
    verdicts = []

    def compare(line: str, mine: str, others: Sequence[str], middle: float, bound: float) -> None:
        other = min(others, key=lambda who: statistics.median(cell.seconds[who]))
        rounds = min(len(cell.seconds[mine]), len(cell.seconds[other]))
        found = ratio(cell.seconds[mine][:rounds], cell.seconds[other][:rounds])
        passed = found.middle <= middle and found.high <= bound
        verdicts.append(Verdict(f"{where}: {line}", passed, f"{mine} over {other}: {found}"))

    fastest = [*STOCK, *POWERSGD]
    if cell.rate in FAST:
        line = f"auto over stock Horovod's faster one at most {SAME:.2f}, {DOUBT} by its bound"
        compare(line, "auto", DENSE, SAME, DOUBT)
    else:
        took = statistics.median(cell.seconds["level none"]) / cell.limit("level none")
        line = f"none at most {RING} x of the longer of wire and computing"
        verdicts.append(Verdict(f"{where}: {line}", took <= RING, f"{took:.2f} x"))
        compare("the best level before the fastest peer", cell.best, fastest, 1.0, 1.0)
        compare("auto before the fastest peer", "auto", fastest, 1.0, 1.0)
    return verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two models, three links")
    parser.add_argument("--models", help="with commas between them")
    parser.add_argument("--rates", help="with commas between them")
    options = parser.parse_args(arguments)
    models = tuple(options.models.split(",")) if options.models else MODELS[options.quick]
    rates = tuple(options.rates.split(",")) if options.rates else RATES[options.quick]
    began, lines, verdicts = time.monotonic(), [machine()], list[Verdict]()
    print(lines[0], flush=True)
    with running(2, [rate for rate in rates if rate != UNSHAPED]) as ranks:
        for model in models:
            parameters = ranks.model(name=model)["parameters"]
            for rate in rates:
                cell = measure(ranks, model, parameters, rate, MORE_SECONDS[options.quick])
                seen = table(cell)
                lines += seen
                verdicts += judge(cell)
                print("\n".join(seen), flush=True)
    judged = [str(each) for each in verdicts]
    judged.append(f"{time.monotonic() - began:.0f} s")
    print("\n".join(judged))
    if not options.models and not options.rates:
        name = "peers-quick.txt" if options.quick else "peers.txt"
        (Path(__file__).parent / "results" / name).write_text("\n".join([*lines, *judged]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
