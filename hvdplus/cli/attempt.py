"""``hvdplus try``: what would hvdplus bring to a script, on which network?

    hvdplus try train.py --epochs 3             two hosts on this machine, at 100 Mb/s and 1 Gb/s; some minutes
    hvdplus try --rates 200mbit,2gbit train.py
    hvdplus try --torchrun train_ddp.py         one with DistributedDataParallel

The script runs for some seconds at a time on hosts of a lab (see ``hvdplus lab``): without compression, in fp16 and
with ``auto``, and what a step takes is read from its run logs. It has to use hvdplus already, with the default
compression. Other networks are planned from the same logs, as ``hvdplus plan`` does.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hvdplus.cli.text import columns, whole
from hvdplus.control.link import Wire, ring_all_reduce
from hvdplus.lab import UNSHAPED, Job, Lab, LabError, a_core_each, bits_per_second, own_cores, rootless
from hvdplus.log.facts import DENSE, Record, Span, delay_prices, rhythm_of, run_of, spans_by_level, windows_of
from hvdplus.log.forecast import best_level, costs_on, predict, what_the_run_showed
from hvdplus.log.runlog import read
from hvdplus.log.words import count, three_digits

BUSY = 0.7
"""Load from which other work disturbs."""
WAYS = ("none", "fp16", "auto")
RATES, PLANNED = "100mbit,1gbit", (10.0, 25.0)
"""That are measured, and those in Gbit/s that are planned."""
SETTLE, ENOUGH = 3, 8
"""Windows of a run that do not count, and those that do after which it may end early."""
WINDOW_STEPS = 4
LATENCY = 20e-6
"""Seconds that a message takes on a planned network."""
LOOK_SECONDS = 0.3
NEEDS_TORCHRUN = re.compile(r"environment variable RANK expected|KeyError: '(LOCAL_)?(RANK|WORLD_SIZE)'")
"""What a script prints that another launcher has started."""


class Went(NamedTuple):
    """How the script ran in one way."""

    span: Span
    """All its later steps at the level that most of them ran at."""
    price: float
    """Of delay: how many times the steps of dense a training needs at that level."""

    @property
    def cost_ms(self) -> float:
        """Milliseconds a step, times what delay costs."""
        return self.span.step_ms * self.price


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``hvdplus try``."""
    parser.add_argument("--hosts", default="2", metavar="N", help="number of hosts (default: 2)")
    parser.add_argument("--rates", default=RATES, metavar="RATES", help=f"of the links (default: {RATES})")
    parser.add_argument("--seconds", default="40", metavar="S", help="of training in each run (default: 40)")
    parser.add_argument("--torchrun", action="store_true", help="torchrun instead of mpirun")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="a Python script, its arguments")


def run(args: argparse.Namespace) -> int:
    """Print the table. Returns 0; 1 if a run failed; 2 with a message if an argument is wrong, or there is no lab."""
    rootless.enter(["-m", "hvdplus.cli", *sys.argv[1:]])
    try:
        hosts, seconds = whole("--hosts", args.hosts), whole("--seconds", args.seconds)
        rates = sorted(dict.fromkeys(args.rates.split(",")), key=bits_per_second)
        script = args.script[1:] if args.script[:1] == ["--"] else args.script
        if not script or not Path(script[0]).is_file():
            raise ValueError(f"hvdplus try wants a Python script. Received: {shlex.join(args.script) or 'nothing'}")
        print(said_before(hosts, rates, seconds) + busy(os.getloadavg()[0]), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            launcher = "torch" if args.torchrun else "mpi"
            rows, logs = measured(hosts, rates, seconds, launcher, script, Path(folder))
    except (LabError, ValueError) as error:
        print(f"hvdplus try: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"hvdplus try: {error}", file=sys.stderr)
        return 1
    head = ("network", *WAYS, "level", "to the same loss")
    print("\n" + columns([head, *rows, *planned(logs, hosts)], range(1, 4)))
    print(
        "\nMilliseconds a step. The last column is auto against the better of none and fp16, with what delay costs. "
        "\nAbove 1 it is sooner. Networks with a ~ are planned from the runs before, not measured. One run each: "
        "another try differs."
    )
    return 0


def busy(load: float) -> str:
    """A line where other programs keep this machine busy; ``load``: how many of them, on average."""
    if load < BUSY:
        return ""
    return f"\nOther programs keep this machine busy (load {load:.1f}): figures will show them, too."


def said_before(hosts: int, rates: Sequence[str], seconds: int) -> str:
    """What is going to happen."""
    minutes = math.ceil(len(rates) * len(WAYS) * (seconds + 15) / 60)
    return (
        f"{count(hosts, 'host')} on this machine, {', '.join(rates)}; {', '.join(WAYS)} in turns, {seconds} s each: "
        f"about {count(minutes, 'minute')}"
    )


def measured(
    hosts: int, rates: Sequence[str], seconds: int, launcher: str, script: Sequence[str], folder: Path
) -> tuple[list[tuple[str, ...]], list[list[Record]]]:
    """A row for each rate; the records of all runs.

    Raises:
        RuntimeError: the script failed, or wrote no run log.
    """
    cores = a_core_each(hosts) if len(own_cores()) >= hosts else None
    rows, logs = [], []
    with Lab(hosts, UNSHAPED, cores) as lab:
        for rate in rates:
            lab.shape(rate)
            went = {}
            for way in WAYS:
                records = one(lab, [sys.executable, *script], way, seconds, launcher, folder / f"{rate}-{way}.jsonl")
                logs.append(records)
                went[way] = summed_up(records)
                print(f"  {rate}, {way}: {three_digits(went[way].span.step_ms)} ms a step", flush=True)
            rows.append(row(rate, went))
    return rows, logs


def one(lab: Lab, command: Sequence[str], way: str, seconds: int, launcher: str, log: Path) -> list[Record]:
    """Run the script in one way until it ends or its time is up; the records of its run log."""
    environment = {
        "HVDPLUS_COMPRESSION": way,
        "HVDPLUS_RUN_LOG": str(log),
        "HVDPLUS_WINDOW_STEPS": str(WINDOW_STEPS),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    limit = 60.0 + 3 * seconds
    with lab.start(command, launcher=launcher, env=environment, timeout_seconds=limit) as job:
        records = watch(job, log, seconds, limit)
        code = job.process.poll()  # None: its time was up
    if wrong := fault(records, way, code, job.output):
        raise RuntimeError(wrong)
    return records


def fault(records: Sequence[Record], way: str, code: int | None, output: str) -> str:
    """Why a run says nothing of ``way``; empty: it does. ``code``: the script's, as it ended; None: its time was up."""
    windows = len(windows_of(records))
    if rhythm_of(records):
        return (
            "the script takes local steps, and what is compared here are steps in lock-step: leave `every` and "
            "`staleness` out."
        )
    if not windows and NEEDS_TORCHRUN.search(output):
        return "the script is one for torchrun: hvdplus try --torchrun SCRIPT ..."
    if code:
        return f"the script ended with code {code}:\n{output[-2000:]}"
    if windows <= SETTLE:
        return (
            f"the script took too few steps with hvdplus ({WINDOW_STEPS * windows}). Slow steps need more time: "
            "--seconds. And it needs `import hvdplus.torch as hvd` (or hvdplus.keras), hvd.init() and "
            f"hvd.DistributedOptimizer (or hvd.ddp.attach). It printed:\n{output[-2000:]}"
        )
    chosen = run_of(records).get("compression", way)
    if chosen != way:
        return f"the script asks for {chosen} itself, whatever is tried: leave its `compression` out."
    return ""


def watch(job: Job, log: Path, seconds: float, limit: float) -> list[Record]:
    """The records of a run log, once the job has ended, or has trained for so long (and for some windows). ``limit``:
    seconds after which it has to have begun to train."""
    records: list[Record] = []
    began, started = math.inf, time.monotonic()
    while True:
        ended = job.process.poll() is not None
        if log.exists():
            try:
                records = read(log)
            except ValueError:  # its first line is being written
                records = []
        windows = len(windows_of(records))
        began = min(began, time.monotonic()) if windows else math.inf
        late = time.monotonic() - began
        never = not windows and time.monotonic() - started > limit
        if ended or never or (late > seconds and windows > SETTLE + ENOUGH) or late > 2 * seconds:
            return records
        time.sleep(LOOK_SECONDS)


def summed_up(records: Sequence[Record]) -> Went:
    """The later steps at the level that most of them ran at."""
    windows = windows_of(records)
    others = [record for record in records if record["kind"] != "window"]
    levels = spans_by_level([*others, *windows[max(SETTLE, len(windows) // 3) :]]) or spans_by_level(records)
    if not levels:
        raise RuntimeError("the script took too few steps at any level. Give it more time: --seconds.")
    main = max(levels.values(), key=lambda span: span.steps)
    return Went(main, delay_prices(records).get(main.level, 1.0))


def row(rate: str, went: dict[str, Went]) -> tuple[str, ...]:
    """Of the table."""
    plain = min(went["none"].cost_ms, went["fp16"].cost_ms)
    return (
        rate,
        *(three_digits(went[way].span.step_ms) for way in WAYS),
        went["auto"].span.level,
        f"{plain / went['auto'].cost_ms:.2f} x",
    )


def planned(logs: Sequence[list[Record]], hosts: int) -> list[tuple[str, ...]]:
    """Rows for faster networks, from all that was measured; empty if that is too little."""
    runs = [record for records in logs for record in records if record["kind"] == "run"]
    last = next((run for run in reversed(runs) if run.get("compression") == "auto"), None)
    if last is None:
        return []
    fastest = [record for records in logs[-len(WAYS) :] for record in records if record["kind"] != "run"]
    try:
        shown = what_the_run_showed([last, *fastest])
        costs, _ = costs_on(shown, hosts)
    except ValueError:
        return []
    rows = []
    for gbit in PLANNED:
        wire = Wire(LATENCY, 8e-9 / gbit)
        steps = {name: predict(shown, cost, hosts, wire, {"ring": ring_all_reduce}) for name, cost in costs.items()}
        best = best_level(steps, shown.prices)
        plain = min(steps[name].seconds for name in (DENSE, "fp16") if name in steps)
        gain = plain / (steps[best].seconds * shown.prices.get(best, 1.0))
        cells = (steps[name].seconds if name in steps else math.nan for name in (DENSE, "fp16", best))
        rows.append((f"~ {gbit:g}gbit", *(three_digits(1e3 * cell) for cell in cells), best, f"{gain:.2f} x"))
    return rows
