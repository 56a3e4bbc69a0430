"""Do the forecasts of ``hvdplus plan`` come true? From two hosts at one rate to more hosts and another rate.

    python benchmarks/scaling.py [--hosts 3,4,8] [--rates 100mbit,200mbit] [--levels none,fp16,lowrank:4] [--repeats 3]

Jobs of the laboratory (``hvdplus.lab``: network namespaces, one rank each, Open MPI's ring) train an MLP that hardly
computes, so that eight hosts on two cores measure their links and not the cores. The run logs of the two hosts at the
first rate make the forecasts, with the functions that ``hvdplus plan`` uses: the link is what was fitted there, at
another rate scaled by the nominal ones. They are held against the same levels on more hosts, and at the other rates.

How to read it. ``step`` is what is forecast; ``waits`` the communication that the step waits for, and ``busy`` all the
rest, computing and codec, which the forecast takes from the two hosts as it is. Hosts share this machine's processor:
where ``busy`` grows, the laboratory is too small, which on hosts of their own it would not be. Figures are medians
over windows of steps, then over repeats, with the least and the largest of the repeats; ``off`` is forecast over
measured, less one. Takes some five minutes on two cores, which nobody else should be using.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hvdplus.cli.text import columns
from hvdplus.control.link import ring_all_reduce, ring_wire
from hvdplus.lab import Lab, LabError, bits_per_second
from hvdplus.log.facts import Record
from hvdplus.log.forecast import Seen, Shown, Step, costs_on, predict, what_the_run_showed
from hvdplus.log.runlog import read

WIDTH, LAYERS, BATCH = 384, 4, 8
"""Of the MLP: 0.6 M parameters, 2.4 MB."""
STEPS, WINDOW_STEPS = 24, 5
MESSAGE_SECONDS = 20e-6
"""As ``hvdplus plan`` assumes unless it is told."""
RING = {"ring": ring_all_reduce}
"""The all-reduce that hvdplus has Open MPI use."""
TIMEOUT_SECONDS = 180


class Row(NamedTuple):
    """A level on some hosts at some rate: forecast, and measured in every repeat."""

    hosts: int
    rate: str
    level: str
    forecast: Step
    measured: list[Seen]

    @property
    def step(self) -> float:
        """Seconds, the median over repeats."""
        return statistics.median(seen.step for seen in self.measured)

    @property
    def waits(self) -> float:
        """Seconds, the median over repeats."""
        return statistics.median(seen.exposed for seen in self.measured)


def train(levels: Sequence[str], repeats: int) -> None:
    """The job, on every rank: some steps at each level in turn, each with a run log of its own."""
    import torch

    import hvdplus.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    for level in list(levels) * repeats:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            *(layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()))
        )
        bare = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(bare, named_parameters=model.named_parameters(), compression=level)
        data = torch.randn(BATCH, WIDTH)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
        optimizer.hvdplus.finish()
        optimizer.hvdplus.log.close()
    hvd.shutdown()


def measure(hosts: int, rates: Sequence[str], levels: Sequence[str], repeats: int) -> dict[str, list[list[Record]]]:
    """Run logs of the job on so many hosts: rate -> for each level in turn, and repeat, its records."""
    found = {}
    with Lab(hosts=hosts, rate=rates[0]) as lab:
        for rate in rates:
            lab.shape(rate)
            lab.check()
            log = lab.folder / f"{rate}.jsonl"
            command = ["python", str(Path(__file__).absolute()), "--job", *levels, "--repeats", str(repeats)]
            result = lab.run(
                command,
                env={
                    "HVDPLUS_RUN_LOG": str(log),
                    "HVDPLUS_WINDOW_STEPS": str(WINDOW_STEPS),
                    "HVDPLUS_BUCKET_BYTES": str(4 * (WIDTH * WIDTH + WIDTH)),  # a layer each
                    "OMP_NUM_THREADS": "1",
                },
                timeout_seconds=TIMEOUT_SECONDS,
            )
            if result.exit_code:
                raise LabError(f"The job on {hosts} hosts at {rate} failed. It printed:\n{result.output}")
            # Every optimizer but the first has a number behind its log's name.
            found[rate] = [read(f"{log}.{i}" if i else log) for i in range(len(levels) * repeats)]
    return found


def joined(logs: Sequence[Sequence[Record]]) -> list[Record]:
    """Run logs of one level each as the log of one run that went through all of them."""
    abouts = [next(record for record in log if record["kind"] == "run") for log in logs]
    levels = {name: level for about in reversed(abouts) for name, level in about["levels"].items()}
    order = dict.fromkeys(name for about in abouts for name in about["levels"])
    windows = [record for log in logs for record in log if record["kind"] == "window"]
    return [{**abouts[0], "levels": {name: levels[name] for name in order}}, *windows]


def forecast(shown: Shown, level: str, hosts: int, faster: float) -> Step:
    """On so many hosts, with links ``faster`` times as fast as those of the run."""
    wire, _ = ring_wire(shown.link, shown.ranks, MESSAGE_SECONDS)
    costs, _ = costs_on(shown, hosts)
    return predict(shown, costs[level], hosts, wire._replace(beta=wire.beta / faster), RING)


def report(shown: Shown, rate: str, rows: Sequence[Row]) -> str:
    """The table, and how far off the forecasts are. ``rate``: that of the links of the two hosts."""
    head = [
        "hosts",
        "rate",
        "level",
        "step: forecast",
        "measured",
        "off",
        "waits: forecast",
        "measured",
        "busy:",
        "now",
    ]
    table = [head, ["", "", "", "ms", "ms (repeats)", "", "ms", "ms", "ms", "ms"]]
    for row in rows:
        repeats = [seen.step * 1e3 for seen in row.measured]
        table.append(
            [
                str(row.hosts), row.rate, row.level,
                f"{row.forecast.seconds * 1e3:.1f}",
                f"{row.step * 1e3:.1f} ({min(repeats):.1f}-{max(repeats):.1f})",
                f"{row.forecast.seconds / row.step - 1:+.0%}",
                f"{row.forecast.exposed * 1e3:.1f}",
                f"{row.waits * 1e3:.1f}",
                f"{(row.forecast.seconds - row.forecast.exposed) * 1e3:.1f}",
                f"{(row.step - row.waits) * 1e3:.1f}",
            ]
        )  # fmt: skip
    lines = [columns(table, (0, *range(3, len(head)))), ""]
    for level in dict.fromkeys(row.level for row in rows):
        own = [row for row in rows if row.level == level]
        lines.append(f"Median absolute error, {level}: {_error(own)}")
    lines.append(f"Median absolute error, all: {_error(rows)}; at most {max(map(_off, rows)):.0%}")
    lines.append(
        f"From 2 hosts: an all-reduce takes {shown.link.alpha * 1e3:.2f} ms and {shown.link.beta * 1e9:.1f} ms a MB, "
        f"as by links of {shown.gbit * 1e3:.1f} Mbit/s (they have {rate}, of which payloads get 95%; "
        f"where much less was seen, the machine was busy); computing hides {shown.hideable * 1e3:.2f} ms."
    )
    lines += shown.assumptions
    return "\n".join(lines)


def _error(rows: Sequence[Row]) -> str:
    return f"{statistics.median(map(_off, rows)):.1%} of {len(rows)} steps"


def _off(row: Row) -> float:
    return abs(row.forecast.seconds / row.step - 1)


def main() -> int:
    """Measure on two hosts, forecast, measure the others, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="3,4,8", help="numbers of hosts to hold forecasts against")
    parser.add_argument("--rates", default="100mbit,200mbit", help="of the links; forecasts come from the first")
    parser.add_argument("--levels", default="none,fp16,lowrank:4")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--job", nargs="+", metavar="LEVEL", help=argparse.SUPPRESS)  # a rank of a job
    args = parser.parse_args()
    if args.job:
        train(args.job, args.repeats)
        return 0
    rates, levels = args.rates.split(","), args.levels.split(",")
    shown, rows = None, []
    for hosts in [2, *(int(text) for text in args.hosts.split(","))]:
        found = measure(hosts, rates, levels, args.repeats)
        shown = shown or what_the_run_showed(joined(found[rates[0]]))
        for rate in rates:
            faster = bits_per_second(rate) / bits_per_second(rates[0])
            for i, level in enumerate(levels):
                repeats = [what_the_run_showed(log).seen[level] for log in found[rate][i :: len(levels)]]
                rows.append(Row(hosts, rate, level, forecast(shown, level, hosts, faster), repeats))
        print(f"{hosts} hosts measured", file=sys.stderr, flush=True)
    assert shown
    print(report(shown, rates[0], [row for row in rows if (row.hosts, row.rate) != (2, rates[0])]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
