"""How often should ranks exchange? Local steps, lock-step and PyTorch's own race to losses on slow links.

    python benchmarks/rhythm.py --quick             two hosts, two rates, one seed: 15 minutes
    python benchmarks/rhythm.py --judged            what verdicts are about, three seeds: an hour
    python benchmarks/rhythm.py                     everybody, two and four hosts, 10 Mb/s to 1 Gb/s, for hours
    python benchmarks/rhythm.py --only stragglers   a part: races, stragglers, or prices
    python benchmarks/rhythm.py --judged --only races --rates 10mbit          other rates, in files of their own
    python benchmarks/rhythm.py --only races --hosts 2 --seeds 1              an hour for the first seed, and then
    python benchmarks/rhythm.py --only races --hosts 2 --seeds 1 --after 1    for the second one, whenever you like

Tables and pictures are left in results/. Nothing else may run on the machine meanwhile. Needs root (network namespaces;
see ``hvdplus.lab``).

races       A byte-level transformer of 3.3 M parameters trains with AdamW on real text. As in ``adaptive.py``'s races,
            what a fixed choice learns in a step does not depend on the link: its curve is that of a training without
            limits, at the step time that it has at each rate. Who decides for itself trains at each rate. A local
            step's time is that of a whole period, its exchange included; peers' dense steps at the start are charged.
            Losses are those of the ranks' mean, between two exchanges, too.
stragglers  The same training on links without limits, of two hosts whose speed differs: one has half the time of its
            core, or both change theirs every second. Everybody trains for the same seconds.
prices      What local steps and late means cost in steps: trainings of the same number of steps, with more and more
            steps between exchanges. ``hvdplus/control/interval.py`` has the two numbers that are fitted to them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from adaptive import UNSHAPED, Ranks, Verdict, curve, machine, running
from matplotlib.figure import Figure

from hvdplus.control.interval import LATE_PRICE, PRICE
from hvdplus.lab import Lab, LabError

HERE = Path(__file__).parent
MODEL, STRETCH = "bytes", 64
"""Whoever trains is evaluated after so many steps."""
TARGETS = (3.4, 3.2, 3.0)
"""Bits a byte on the validation text."""
DECIDE = ("auto", "local auto auto")
"""Who trains at each rate."""


class Size(NamedTuple):
    """How much of it all is measured."""

    name: str
    """At the end of its files' names."""
    rates: tuple[str, ...]
    people: tuple[str, ...]
    """All fixed choices that train."""
    seeds: int
    steps: int
    """Of a training."""
    blocks: int
    straggler_seconds: float
    """What everybody trains for where hosts' speeds differ."""
    conditions: int
    """So many of ``SPEEDS_OF_HOSTS``."""


POWERSGD = ("ddp powersgd:4:2", "ddp powersgd:8:2", "ddp powersgd:16:2")
OVERLAPPED = "local 8 int4 overlap_steps=4"
QUICK = Size(
    "-quick",
    ("100mbit", "1gbit"),
    ("horovod", "ddp powersgd:8:2", "postlocal 16", "local 16 fp16", "local 16 int4", OVERLAPPED),
    seeds=1,
    steps=576,
    blocks=2,
    straggler_seconds=24.0,
    conditions=1,
)
JUDGED = Size(
    "-judged",
    ("20mbit", "100mbit", "1gbit"),
    (
        *("horovod", *POWERSGD, "postlocal 16"),
        *("local 16 fp16", "local 16 int4", "local 32 int4", "local 64 int4", OVERLAPPED),
    ),
    seeds=3,
    steps=768,
    blocks=3,
    straggler_seconds=60.0,
    conditions=2,
)
FULL = Size(
    "",
    ("10mbit", "20mbit", "100mbit", "1gbit"),
    (
        *("horovod", "alone", *POWERSGD, "postlocal 4", "postlocal 16", "postlocal 64", "diloco 16", "diloco 64"),
        *(f"local {every} {level}" for every in (4, 16, 64) for level in ("fp16", "int4")),
        *(OVERLAPPED, "local 16 fp16 overlap_steps=4", "local 16 lowrank:16+fp16"),
    ),
    seeds=3,
    steps=768,
    blocks=5,
    straggler_seconds=60.0,
    conditions=2,
)
BLOCK_SECONDS = 0.3
"""A block of steps, of whole periods, takes at least so long; everybody's in turns."""
MOST_UNDER_WAY = 64
"""Steps at most beside one exchange."""
LONG_SECONDS, LONG_BLOCKS = 3.0, 2
"""Who takes longer than this for a block has only so many: such a block is the wire's, and hardly varies."""
SOONER, SLOW_SOONER, STALE_SOONER = 1.5, 2.0, 1.3
PARTS = ("races", "stragglers", "prices")


class Run(NamedTuple):
    """Everybody's way at one rate, or under one condition."""

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


def period(who: str) -> int:
    """Steps between two exchanges."""
    kind, _, rest = who.partition(" ")
    every = rest.partition(" ")[0]
    return int(every) if kind in ("local", "postlocal", "diloco") and every.isdecimal() else 1


def overlap(who: str) -> int:
    """Steps that an exchange runs on beside."""
    return int(who.partition("overlap_steps=")[2] or 0)


def train(ranks: Ranks, who: str, rate: str, steps: int) -> tuple[float, list[float], list[float]]:
    """(Seconds of preparations, mean seconds of a step in each stretch, loss after each stretch)."""
    ranks.forget(who=who)
    ranks.lab.shape(rate)
    began = ranks.steps(who=who, count=0)["began"]
    seconds, losses, taken = [], [], 0
    for place in range(steps // STRETCH):
        count = (place + 1) * STRETCH - taken
        took = ranks.steps(who=who, count=count)["seconds"]
        while len(took) < count + MOST_UNDER_WAY and ranks.under_way(who=who):  # or its rest would cost nothing
            took += ranks.steps(who=who, count=1)["seconds"]
        taken += len(took)
        seconds.append(math.fsum(took) / STRETCH)  # all that was spent, though a stretch may be longer
        ranks.lab.shape(UNSHAPED)
        losses.append(ranks.evaluate(who=who, average=who != "alone"))
        ranks.lab.shape(rate)
    return began, seconds, losses


def step_seconds(ranks: Ranks, names: Sequence[str], blocks: int) -> dict[str, float]:
    """Mean seconds of a step, everybody in turns, each round in another order. A block has whole periods, from one
    exchange's end to another's: what runs on beside the steps after it is in the block in which it began, as between
    blocks nobody would pay for it. A period before it does not count, as processors' caches are others' still, unless
    it is the wire's anyway."""
    lengths, warm, found, dice = {}, {}, {who: [] for who in names}, random.Random(0)
    for who in names:
        every = period(who)
        ranks.steps(who=who, count=-(-2 // every) * every + overlap(who))
        while overlap(who) and ranks.under_way(who=who):  # a training before may have ended anywhere
            ranks.steps(who=who, count=1)
        typical = statistics.mean(ranks.steps(who=who, count=every)["seconds"])
        lengths[who] = every * max(1, round(BLOCK_SECONDS / (every * typical)))
        warm[who] = every * math.ceil(2 / every) if every * typical < LONG_SECONDS else 0
    for turn in range(blocks):
        taking = [who for who in names if turn < LONG_BLOCKS or lengths[who] * found[who][0] < LONG_SECONDS]
        dice.shuffle(taking)
        turns = [(who, lengths[who], warm[who]) for who in taking]
        took = ranks.blocks(turns=turns, rest_seconds=ranks.lab.burst_seconds)
        for who, seconds in zip(taking, took, strict=True):
            found[who].append(seconds)
    return {who: statistics.mean(each) for who, each in found.items()}


def dense_start(ranks: Ranks, who: str, took: Mapping[str, float]) -> float:
    """Seconds that its first steps, dense ones, take beyond its later ones. ``took``: of everybody's step."""
    return ranks.dense_start(who=who) * max(0.0, took["ddp"] - took[who])


def race(ranks: Ranks, hosts: int, size: Size, seed: int) -> list[Run]:
    """One seed at all rates."""
    fixed = size.people
    granted = ["horovod fp16", "ddp", "ddp fp16"]
    """Choices that only round: they are granted the losses of fp32."""
    runs = [Run(hosts, rate, {who: [] for who in (*DECIDE, *fixed, *granted)}) for rate in size.rates]
    ranks.model(name=MODEL, seed=seed)
    learned = {}
    for who in fixed:
        learned[who] = train(ranks, who, UNSHAPED, size.steps)
        print(f"  {hosts} hosts, seed {seed}: {who} ended with {learned[who][2][-1]:.3f} bits", flush=True)
    for run in runs:
        for who in DECIDE:
            run.curves[who].append(curve(*train(ranks, who, run.rate, size.steps), STRETCH))
            if who != "auto":
                print(f"  {who} at {run.rate}: {chosen(ranks, who)}", flush=True)
        ranks.lab.shape(run.rate)
        took = step_seconds(ranks, [*fixed, *granted], size.blocks)
        for who in (*fixed, *granted):
            began, _, losses = learned.get(who, learned["horovod"])
            began += dense_start(ranks, who, took)
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
    """What is promised at one rate. The best of local steps is the soonest one that ends as dense does."""
    where = f"{run.hosts} hosts, {run.rate}"
    local = [who for who in run.curves if who.startswith("local ") and who not in DECIDE]
    powersgd = [who for who in run.curves if "powersgd" in who]
    spread, several = max(run.final("horovod")) - min(run.final("horovod")), len(run.final("horovod")) > 1
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
        else:
            lead, figures = 0.0, f"none of {', '.join(others)} is at any of {', '.join(map(str, TARGETS))} bits"
        verdicts.append(Verdict(f"{where}: {line}", lead >= least, figures))

    def worse(who: str) -> float:
        return statistics.mean(run.final(who)) - statistics.mean(run.final("horovod"))

    def final(line: str, mine: str) -> None:
        figures = f"{worse(mine):+.4f} bits, dense's seeds spread over {spread:.4f}"
        if several:  # else nobody knows what seeds do
            verdicts.append(Verdict(f"{where}: {line}", worse(mine) <= spread, figures))

    as_good = [who for who in local if several and worse(who) <= spread]
    best = min(as_good or local, key=lambda who: run.seconds(who, TARGETS[-1]))
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


# -- hosts of different speeds


MEETINGS = 6
"""How often the loss is taken."""
WANDER_SECONDS, SPEEDS = 1.0, (0.3, 0.5, 0.7, 0.95)
STALE = ("stale 3 every=4", "stale any every=4", "stale any every=8")
LOCK_STEPPED, WAITS = ("auto", "horovod"), "local 8 fp16"
BULK = (*LOCK_STEPPED, WAITS)
"""Who exchanges all together."""
COMMANDED = 8
"""Steps that they are told to take at a time."""


class Wander(threading.Thread):
    """Gives hosts other speeds every second."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(daemon=True)
        self._lab, self._over, self._dice = lab, threading.Event(), random.Random(0)
        self._failure: LabError | None = None

    def run(self) -> None:
        try:
            while not self._over.is_set():
                with contextlib.ExitStack() as slow:
                    for host in self._lab.hosts:
                        slow.enter_context(self._lab.slow(host, self._dice.choice(SPEEDS)))
                    self._over.wait(WANDER_SECONDS)
        except LabError as failure:
            self._failure = failure

    def __enter__(self) -> Wander:
        self.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._over.set()
        self.join()
        if self._failure:  # hosts have had one speed since
            raise self._failure


SPEEDS_OF_HOSTS: dict[str, Callable[[Lab], contextlib.AbstractContextManager[object]]] = {
    "one rank at half speed": lambda lab: lab.slow("h2", 0.5),
    "speeds that wander": Wander,
}


def straggle(ranks: Ranks, size: Size, seed: int) -> list[Run]:
    """Everybody under every condition, for the same seconds; one seed."""
    conditions = list(SPEEDS_OF_HOSTS)[: size.conditions]
    runs = [Run(2, condition, {who: [] for who in (*BULK, *STALE)}) for condition in conditions]
    ranks.lab.shape(UNSHAPED)
    ranks.model(name=MODEL, seed=seed)
    for run in runs:
        for who, curves in run.curves.items():
            curves.append(against_the_clock(ranks, who, SPEEDS_OF_HOSTS[run.rate], size.straggler_seconds))
            print(f"  {run.rate}, seed {seed}: {describe(who, curves[-1])}", flush=True)
    return runs


def against_the_clock(
    ranks: Ranks, who: str, speeds: Callable[[Lab], contextlib.AbstractContextManager[object]], seconds: float
) -> list[tuple[float, float]]:
    """A curve over so many seconds of training, hosts' speeds being what they are."""
    ranks.forget(who=who)
    ranks.steps(who=who, count=0)
    part, spent, found = seconds / MEETINGS, 0.0, []
    while spent < seconds:
        with speeds(ranks.lab):
            began = time.monotonic()
            if who in STALE:
                ranks.seconds(who=who, seconds=part)
            else:
                while time.monotonic() < began + part:
                    ranks.steps(who=who, count=COMMANDED)
            spent += time.monotonic() - began
        found.append((spent, ranks.evaluate(who=who, average=True)))
    return found


def judge_stragglers(run: Run) -> list[Verdict]:
    """Whether it pays to wait for nobody."""
    # Of an even number of seeds the worse one in the middle: half of them never reach a loss between the two.
    loss = max(statistics.median_high(run.final(who)) for who in LOCK_STEPPED)
    bulk = {who: run.seconds(who, loss) for who in LOCK_STEPPED}
    stale = {who: run.seconds(who, loss) for who in STALE}
    soonest, best = min(bulk, key=lambda who: bulk[who]), min(stale, key=lambda who: stale[who])
    return [
        Verdict(
            f"{run.rate}: stale or asynchronous at least {STALE_SOONER} x sooner than the best of lock-step",
            math.isfinite(bulk[soonest]) and bulk[soonest] / stale[best] >= STALE_SOONER,
            f"{bulk[soonest] / stale[best]:.2f} x at {loss:.3f} bits: {best} {stale[best]:.1f} s, {soonest} "
            f"{bulk[soonest]:.1f} s; {WAITS}, which waits, {run.seconds(WAITS, loss):.1f} s",
        )
    ]


# -- what it costs in steps


APART = (2, 4, 8, 16, 32, 64)
LATE = ((16, 4), (16, 12), (32, 16))
"""(Steps between exchanges, steps by which the mean is late)."""


class Price(NamedTuple):
    """Steps of a training over those of lock-step to the same loss."""

    model: str
    every: int
    late: int
    ratio: float


def prices(ranks: Ranks, seeds: Sequence[int]) -> list[Price]:
    """Trainings on both models of text, in lock-step and not."""
    found = []
    ranks.lab.shape(UNSHAPED)
    for model in ("text", MODEL):
        for seed in seeds:
            ranks.model(name=model, seed=seed)
            dense = train(ranks, "horovod", UNSHAPED, FULL.steps)[2]
            for every, late in (*((every, 0) for every in APART), *LATE):
                who = f"local {every} fp16" + f" overlap_steps={late}" * bool(late)
                losses = train(ranks, who, UNSHAPED, FULL.steps)[2]
                found.append(Price(model, every, late, steps_ratio(losses, dense)))
                print(f"  {model}, seed {seed}: {who} needs {found[-1].ratio:.3f} times the steps", flush=True)
    return found


def steps_ratio(losses: Sequence[float], dense: Sequence[float]) -> float:
    """Steps that a training takes over those of dense: the geometric mean over losses on the way, from where dense is
    after a quarter of its steps to the last one that both come to."""

    def steps(one: Sequence[float], loss: float) -> float:
        return reached([(float(place + 1), each) for place, each in enumerate(one)], loss)

    first, last = dense[len(dense) // 4], max(min(losses), min(dense))
    wanted = [first + (last - first) * share for share in (0.0, 0.25, 0.5, 0.75, 1.0)] if first > last else [last]
    return math.exp(statistics.fmean(math.log(steps(losses, loss) / steps(dense, loss)) for loss in wanted))


def fit(found: Sequence[Price]) -> tuple[float, float]:
    """(Price of a step apart, price of means late by a whole period), by least squares. What local steps gain or lose
    at all, before they drift apart, is another number for each model."""
    models = sorted({each.model for each in found})
    rows = [[each.every - 1, each.late / each.every, *(each.model == model for model in models)] for each in found]
    apart, late, *_ = np.linalg.lstsq(np.array(rows, float), np.array([each.ratio for each in found]), rcond=None)[0]
    return float(apart), float(late)


# -- the report


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, judge; a full run leaves tables and pictures in results/."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    much = parser.add_mutually_exclusive_group()
    much.add_argument("--quick", action="store_true", help="two hosts, two rates, one condition, one seed; no prices")
    much.add_argument("--judged", action="store_true", help="two hosts, and what verdicts are about; no prices")
    parser.add_argument("--only", choices=PARTS, help="a part of it")
    parser.add_argument("--hosts", type=int, choices=(2, 4), help="races on so many hosts only")
    parser.add_argument("--rates", nargs="+", metavar="RATE", help="races at these, in files that are named after them")
    parser.add_argument("--seeds", type=int, help="so many (--quick: 1, else 3)")
    parser.add_argument("--after", type=int, default=0, help="those after so many, which results/ has already")
    options = parser.parse_args(arguments)
    size = QUICK if options.quick else JUDGED if options.judged else FULL
    if options.rates:
        size = size._replace(rates=tuple(options.rates), name=f"{size.name}-{'-'.join(options.rates)}")
    parts = (options.only,) if options.only else PARTS if size is FULL else PARTS[:2]
    seeds = range(options.after, options.after + (options.seeds or size.seeds))
    began = time.monotonic()
    print(machine(), flush=True)
    if "races" in parts:
        for hosts in (options.hosts,) if options.hosts else (2, 4) if size is FULL else (2,):
            name = f"rhythm-{hosts}-hosts{size.name}"
            before = earlier(HERE / "results" / f"{name}.json", options.after)
            with running(hosts, size.rates) as ranks:
                seed_by_seed(before, seeds, functools.partial(race, ranks, hosts, size), judge, name)
    if "stragglers" in parts:
        name = f"rhythm-stragglers{size.name}"
        before = earlier(HERE / "results" / f"{name}.json", options.after)
        with running(2, [], one_sided=True) as ranks:
            seed_by_seed(before, seeds, functools.partial(straggle, ranks, size), judge_stragglers, name)
    if "prices" in parts:
        with running(2, []) as ranks:
            found = prices(ranks, seeds)
        apart, late = fit(found)
        lines = [machine(), "model, steps between exchanges, steps late, times the steps of lock-step"]
        lines += [f"{each.model} {each.every} {each.late} {each.ratio:.3f}" for each in found]
        lines.append(
            f"price of a step apart {apart:.4f}, of means late by a period {late:.4f}; in use: {PRICE}, {LATE_PRICE}"
        )
        print(lines[-1])
        (HERE / "results" / "rhythm-prices.txt").write_text("\n".join(lines) + "\n")
    print(f"{time.monotonic() - began:.0f} s")
    return 0


def chosen(ranks: Ranks, who: str) -> str:
    """What who decides for itself has come to."""
    every, late = ranks.rhythm(who=who)
    return f"{every} local steps, {late} of them beside an exchange, {ranks.steps(who=who, count=0)['level']}"


def earlier(path: Path, seeds: int) -> list[Run]:
    """The runs of the first ``seeds`` seeds, as ``conclude`` has left them.

    Raises:
        ValueError: they are not there, or are of another number of seeds.
    """
    if not seeds:
        return []
    runs = [Run(**each) for each in json.loads(path.read_text())] if path.exists() else []
    found = {len(curves) for run in runs for curves in run.curves.values()}
    if found != {seeds}:
        raise ValueError(f"--after {seeds} wants so many seeds in {path}. Received: {sorted(found) or 'no file'}")
    return runs


def seed_by_seed(
    before: Sequence[Run],
    seeds: Sequence[int],
    measured: Callable[[int], Sequence[Run]],
    judged: Callable[[Run], Sequence[Verdict]],
    name: str,
) -> None:
    """Measure one seed after the other; all so far are in results/ after each."""
    for seed in seeds:
        before = joined(before, measured(seed))
        conclude(before, [verdict for run in before for verdict in judged(run)], name)


def joined(before: Sequence[Run], now: Sequence[Run]) -> list[Run]:
    """Runs with the seeds of those before, if there are any.

    Raises:
        ValueError: those have other rates or other people.
    """
    if not before:
        return list(now)
    theirs, ours = ({run.rate: sorted(run.curves) for run in runs} for runs in (before, now))
    if theirs != ours:
        raise ValueError(f"The seeds before are of other rates or people: {theirs}. Now: {ours}")
    return [
        run._replace(curves={who: [*first.curves[who], *curves] for who, curves in run.curves.items()})
        for first, run in zip(before, now, strict=True)
    ]


def conclude(runs: Sequence[Run], verdicts: Sequence[Verdict], name: str) -> None:
    """Print verdicts; write figures, verdicts and the picture into results/."""
    judged = [str(each) for each in verdicts]
    print("\n".join(judged), flush=True)
    folder, lines = HERE / "results", [machine()]
    for run in runs:
        lines.append(f"{run.hosts} hosts, {run.rate}")
        lines += [f"  seed {n}: {describe(who, one)}" for who, each in run.curves.items() for n, one in enumerate(each)]
    (folder / f"{name}.txt").write_text("\n".join([*lines, *judged]) + "\n")
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
