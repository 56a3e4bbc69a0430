"""``hvdplus plan``: costs and savings of compression, estimated before a job runs at that size.

    hvdplus plan lowrank:4 --shape 4096x1024     bytes that a model would send, from its shapes alone
    hvdplus plan run.jsonl --ranks 64,1024       steps on more ranks and other links, from a job's run log

From shapes, the model is cut into buckets as in a job, so that the same tensors stay uncompressed and the same bytes
are counted. From a run log, see ``hvdplus.log.forecast``.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdplus.cli.text import FOREIGN, columns, foreign, ratio, read_log, reason, whole
from hvdplus.compression import Compressor, NoCompression, parse
from hvdplus.control.link import ALL_REDUCES, Collective, Wire, ring_all_reduce
from hvdplus.exchange.bucket import Bucket, bytes_per_step, make_buckets
from hvdplus.log.facts import PLAIN
from hvdplus.log.forecast import (
    DENSE,
    MARGIN,
    Shown,
    Step,
    best_level,
    best_local,
    costs_on,
    pays_up_to,
    predict,
    predict_two_level,
    what_the_run_showed,
)
from hvdplus.log.words import count
from hvdplus.settings import Settings

USUAL = ("auto", "int4", "signsgd", "randomk:0.01", "topk:0.01", "topk:0.05+int8", "lowrank:4")
"""Compressors that are compared by default."""
UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9}
"""Suffixes of a number of parameters."""
RANKS, RATES = "8,64,1024,4096", "1,10,25,100"
"""Ranks and rates for which a run log is extrapolated by default."""
LATENCY_US = "20"
"""Microseconds that a message takes between hosts: some tens by TCP over Ethernet of 1 to 10 Gbit/s."""
LOCAL_GBIT = "80"
"""What ranks of a host exchange through its memory: some 10 GB/s. NVLink has ten times as much."""
LINE = 110
"""Letters in a line of text."""


class Model(NamedTuple):
    """Shapes of a model's tensors, first to last, and a note if they are an approximation."""

    shapes: tuple[tuple[int, ...], ...]
    caveat: str = ""

    @property
    def parameters(self) -> int:
        """Number of elements d."""
        return sum(math.prod(shape) for shape in self.shapes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``hvdplus plan``."""
    parser.add_argument(
        "what", nargs="*", metavar="RUNLOG|COMPRESSOR",
        help="run log of a job (HVDPLUS_RUN_LOG), or compressors such as int8; auto means the levels of its ladder "
        "(default: auto, and a choice of others)",
    )  # fmt: skip
    parser.add_argument(
        "--shape", action="append", metavar="AxB", help="shape of a tensor, such as 4096x1024 or 1024; once for each"
    )
    parser.add_argument("--parameters", metavar="D", help="number of parameters, instead of shapes, such as 25M")
    parser.add_argument(
        "--ranks", metavar="N",
        help=f"number of ranks (default: 2; with a run log, several: {RANKS}; 8x4 means 8 hosts of 4 ranks each, and "
        "says what two levels bring)",
    )  # fmt: skip
    parser.add_argument(
        "--local-gbit", metavar="RATE", help=f"with 8x4: rate within a host in Gbit/s (default: {LOCAL_GBIT})"
    )
    parser.add_argument(
        "--gbit", metavar="RATE",
        help="rate of a rank's link in Gbit/s; adds the ring's time (with a run log, several: the run's own and "
        f"{RATES})",
    )  # fmt: skip
    parser.add_argument(
        "--latency-us", metavar="T", help=f"with a run log: microseconds a message takes (default: {LATENCY_US})"
    )
    parser.add_argument(
        "--all-reduce", metavar="KIND", help="with a run log: ring or tree (default: whichever makes the step shorter)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the estimate.

    Returns 0, or 2 with a message for wrong arguments or a run log that cannot be read. A compressor that cannot serve
    so many ranks gets a row with the reason.
    """
    try:
        log = next((text for text in args.what if _names_a_file(text)), None)
        text = _from_shapes(args) if log is None else _from_run_log(args, log)
    except ValueError as error:
        print(f"hvdplus plan: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


def _names_a_file(text: str) -> bool:
    """Whether it is meant as a run log: no compressor has a slash or such an ending."""
    return text.endswith(".jsonl") or "/" in text or Path(text).is_file()


# -- from shapes -------------------------------------------------------------------------------------------------------


def _from_shapes(args: argparse.Namespace) -> str:
    with_log = {"--latency-us": args.latency_us, "--all-reduce": args.all_reduce, "--local-gbit": args.local_gbit}
    for option, value in with_log.items():
        if value is not None:
            raise ValueError(f"{option} goes with a run log. Received: {option} {value}, and no run log")
    compressors = {spelling: _compressor(spelling) for spelling in _spellings(args.what or USUAL)}
    model, ranks = _model(args.shape, args.parameters), whole("--ranks", "2" if args.ranks is None else args.ranks)
    gbit = None if args.gbit is None else _rate(args.gbit)
    buckets = _buckets(model, ranks)
    rows = [_row(spelling, compressor, buckets, gbit) for spelling, compressor in compressors.items()]
    heads = _heads(gbit)
    table = columns([*heads, *rows], range(1, len(heads[0])))
    return "\n\n".join((_facts(model, buckets, ranks), table, _notes(model, ranks, gbit)))


def _model(shapes: Sequence[str] | None, parameters: str | None) -> Model:
    if bool(shapes) == bool(parameters):
        received = "both" if shapes else "neither"
        raise ValueError(f"give the model by --shape, once for each tensor, or by --parameters. Received: {received}")
    return Model(tuple(map(_shape, shapes))) if shapes else _one_matrix(parameters or "")


def _shape(text: str) -> tuple[int, ...]:
    """``4096x1024`` -> (4096, 1024)."""
    if not re.fullmatch(r"0*[1-9][0-9]*(x0*[1-9][0-9]*)*", text):
        raise ValueError(f"--shape wants lengths of at least 1, such as 4096x1024 or 1024. Received: {text!r}")
    return tuple(map(int, text.split("x")))


def _one_matrix(text: str) -> Model:
    """``25M`` -> a nearly square matrix with that many elements."""
    found = re.fullmatch(rf"(\d{{1,15}}(?:\.\d+)?)([{''.join(UNITS)}]?)", text, re.ASCII)
    number = round(float(found[1]) * UNITS[found[2]]) if found else 0
    if not number:
        raise ValueError(f"--parameters wants a number such as 60000, 250k, 25M or 1.5B. Received: {text!r}")
    rows = math.isqrt(number)
    shape = rows, round(number / rows)
    return Model((shape,), (
        f"One {shape[0]} x {shape[1]} matrix stands for all {text} parameters, an approximation: the smaller matrices "
        "of a real\nmodel compress less at lowrank, and its vectors travel whole. With --shape it is exact."
    ))  # fmt: skip


def _rate(text: str) -> float:
    return _above_zero("--gbit", "a rate above 0 in Gbit/s, such as 10", text)


def _above_zero(option: str, wanted: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{option} wants {wanted}. Received: {text!r}")
    return number


def _spellings(names: Sequence[str]) -> list[str]:
    """The names, with ``auto`` replaced by the levels of its ladder."""
    return [spelling for name in names for spelling in (Settings.load().ladder if name == "auto" else [name])]


def _compressor(spelling: str) -> Compressor:
    """The compressor of that spelling. Raises ValueError for any error, in another package's code too."""
    try:
        return parse(spelling)
    except Exception as error:
        received = "" if isinstance(error, ValueError) else f". Received: {spelling!r}"
        raise ValueError(reason(error) + received) from None


def _buckets(model: Model, ranks: int) -> tuple[Bucket, ...]:
    limit = Settings.load().bucket_bytes
    return make_buckets(model.shapes, ["float32"] * len(model.shapes), bucket_bytes=limit, ranks=ranks, seed=0)


def _facts(model: Model, buckets: Sequence[Bucket], ranks: int) -> str:
    dense = bytes_per_step(buckets, NoCompression()) / 1e6
    size = f"{count(len(model.shapes), 'tensor')}, {count(model.parameters, 'parameter')}, {dense:.3f} MB in fp32"
    facts = f"Model: {size}, in {count(len(buckets), 'bucket')}; {count(ranks, 'rank')}. An estimate: nothing was run."
    return "\n".join(filter(None, (facts, model.caveat)))


def _heads(gbit: float | None) -> list[list[str]]:
    upper = ["compressor", "MB sent", "ratio", "memory", "GB read and"]
    lower = ["", "a step", "to fp32", "passes", "written"]
    return [upper, lower] if gbit is None else [[*upper, "ring, ms at"], [*lower, f"{gbit:g} Gbit/s"]]


def _row(spelling: str, compressor: Compressor, buckets: Sequence[Bucket], gbit: float | None) -> list[str]:
    """A compressor's figures; or its spelling and the reason for having none."""
    try:
        sent, passes = bytes_per_step(buckets, compressor), compressor.memory_passes
    except Exception as error:
        return [spelling, reason(error)]
    touched = passes * bytes_per_step(buckets, NoCompression())
    row = [spelling, f"{sent / 1e6:.3f}", ratio(buckets, sent), f"{passes:.1f}", f"{touched / 1e9:.3f}"]
    if gbit is not None:
        row.append(f"{ring_all_reduce(sent, buckets[0].spec.ranks, _wire(gbit, 0.0)) * 1e3:.2f}")
    return row


def _notes(model: Model, ranks: int, gbit: float | None) -> str:
    size, turns = 4 * model.parameters / 1e6, 2 * (ranks - 1) / ranks
    notes = [
        "MB sent: what a rank hands to the all-reduce; where steps take turns, the larger. Vectors and tiny tensors go "
        "whole.",
        f"Memory passes: how often the gradient's {size:.3f} MB are read or written by codec and residual (estimated).",
    ]
    if gbit is not None:
        notes.append(f"Ring: 2 (N-1)/N = {turns:.3g} times the MB sent, at the link's rate; latency is not included.")
    return "\n".join(notes)


# -- from a run log ----------------------------------------------------------------------------------------------------


def _from_run_log(args: argparse.Namespace, path: str) -> str:
    if len(args.what) > 1 or args.shape or args.parameters:
        raise ValueError(
            f"{path} is a run log, which brings its own model and levels: name one, and no compressors or shapes"
        )
    told = (RANKS if args.ranks is None else args.ranks).split(",")
    grids = [[whole("--ranks", part) for part in text.split("x")] for text in told]
    ranks = [math.prod(grid) for grid in grids]
    if any(len(grid) > 2 for grid in grids):
        raise ValueError(f"--ranks wants numbers, or hosts x ranks of each such as 8x4. Received: {args.ranks!r}")
    if args.local_gbit is not None and all(grid[1:] in ([], [1]) for grid in grids):
        raise ValueError(
            f"--local-gbit goes with --ranks such as 8x4. Received: --local-gbit {args.local_gbit}, and --ranks "
            f"{args.ranks or RANKS}"
        )
    if min(ranks) < 2:
        raise ValueError(f"--ranks wants at least 2 with a run log. Received: {args.ranks!r}")
    rates = [_rate(text) for text in (RATES if args.gbit is None else args.gbit).split(",")]
    latency = 1e-6 * _above_zero(
        "--latency-us", "microseconds above 0, such as 20", LATENCY_US if args.latency_us is None else args.latency_us
    )
    inside = _above_zero(
        "--local-gbit", "a rate above 0, such as 80", LOCAL_GBIT if args.local_gbit is None else args.local_gbit
    )
    kinds = ALL_REDUCES
    if args.all_reduce is not None:
        if args.all_reduce not in ALL_REDUCES:
            raise ValueError(f"--all-reduce wants {' or '.join(ALL_REDUCES)}. Received: {args.all_reduce!r}")
        kinds = {args.all_reduce: ALL_REDUCES[args.all_reduce]}
    records = read_log(path)
    try:
        shown = what_the_run_showed(records)
        if args.gbit is None and shown.hosts > 1 and shown.gbit < math.inf:
            rates = [shown.gbit, *rates]
        blocks = (
            _what_it_showed(shown),
            _forecasts(shown, ranks, rates, latency, kinds),
            _local_steps(shown, ranks, rates, latency, kinds),
            *_two_levels(shown, [(h, r) for h, *rest in grids for r in rest if r > 1], rates, latency, inside, kinds),
            _limits(shown, ranks, latency, kinds),
            _assumed(shown, latency, kinds),
        )
        return "\n\n".join(blocks)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except FOREIGN as error:
        raise ValueError(foreign(path, error)) from None


def _wire(gbit: float, latency: float) -> Wire:
    return Wire(latency, 8e-9 / gbit)


def _what_it_showed(shown: Shown) -> str:
    link = shown.link
    facts = (
        f"Run: {count(shown.ranks, 'rank')} on {count(shown.hosts, 'host')}, all-reduce by {shown.collective}. A step "
        f"computes and waits for input {_ms(shown.compute)} ms, which hides {_ms(shown.hideable)} ms of communication. "
        f"An all-reduce takes {_ms(link.alpha)} ms and {link.beta * 1e9:.3f} ms a MB"
    )
    facts += f", as by links of {shown.gbit:.3g} Gbit/s." if shown.gbit < math.inf else "."
    rows = [
        ["level", "MB sent", "of it last", "all-", "codec", "comm.", "step", "by the"],
        ["", "a step", "bucket", "reduces", "ms", "ms", "ms", "model"],
    ]
    for name, cost in shown.costs.items():
        seen = shown.seen.get(name)
        model = shown.compute + cost.codec + link.exposed(cost, shown.hideable)
        rows.append([
            name, f"{cost.payload_bytes / 1e6:.3f}", f"{cost.last_bytes / 1e6:.3f}", str(cost.messages),
            _ms(cost.codec), *((_ms(seen.comm), _ms(seen.step)) if seen else ("-", "-")), _ms(model),
        ])  # fmt: skip
    return f"{_wrapped(facts)}\n\n{columns(rows, range(1, len(rows[0])))}"


def _forecasts(
    shown: Shown, ranks: Sequence[int], rates: Sequence[float], latency: float, kinds: Mapping[str, Collective]
) -> str:
    """The table of ranks and rates; below it, the levels that cannot serve so many ranks."""
    rows = [
        ["ranks", "Gbit/s", "dense", "exposed", "best", "its step", "sooner", "all-reduce"],
        ["", "", "ms", "share", "level", "ms", "than plain", ""],
    ]
    left_out = []
    for number in ranks:
        costs, reasons = costs_on(shown, number)
        left_out += [f"On {count(number, 'rank')} without {name}: {why}." for name, why in reasons.items()]
        for gbit in rates:
            wire = _wire(gbit, latency)
            steps = {name: predict(shown, cost, number, wire, kinds) for name, cost in costs.items()}
            rows.append([f"{number:,}", *_forecast(steps, gbit, shown.prices)])
    table = columns(rows, (0, 1, 2, 3, 5, 6))
    return "\n\n".join([table, *(["\n".join(map(_wrapped, left_out))] if left_out else [])])


def _forecast(steps: Mapping[str, Step], gbit: float, prices: Mapping[str, float]) -> list[str]:
    dense, name = steps[DENSE], best_level(steps, prices)
    best = steps[name]
    plain = min(steps[level].seconds for level in PLAIN if level in steps)
    gain = plain / (best.seconds * prices.get(name, 1.0))
    return [
        f"{gbit:.3g}", _ms(dense.seconds), f"{dense.exposed / dense.seconds:.0%}", name, _ms(best.seconds),
        f"{gain:.2f} x", ", ".join(dict.fromkeys((dense.collective, best.collective))),
    ]  # fmt: skip


def _local_steps(
    shown: Shown, ranks: Sequence[int], rates: Sequence[float], latency: float, kinds: Mapping[str, Collective]
) -> str:
    """What ``every="auto"`` would do, against the best of lock-step."""
    rows = [["ranks", "Gbit/s", "local steps", "level", "sooner than"], ["", "", "", "", "lock-step"]]
    for number in ranks:
        costs, _ = costs_on(shown, number)
        for gbit in rates:
            wire = _wire(gbit, latency)
            steps = {name: predict(shown, cost, number, wire, kinds) for name, cost in costs.items()}
            best = best_level(steps, shown.prices)
            local = best_local(shown, costs, number, wire, kinds)
            gain = steps[best].seconds * shown.prices.get(best, 1.0) / local.cost
            rows.append([f"{number:,}", f"{gbit:.3g}", str(local.every), local.level, f"{gain:.2f} x"])
    return "Local steps (every=auto), to the same loss:\n" + columns(rows, (0, 1, 2, 4))


def _two_levels(
    shown: Shown,
    grids: Sequence[tuple[int, int]],
    rates: Sequence[float],
    latency: float,
    inside: float,
    kinds: Mapping[str, Collective],
) -> list[str]:
    """Hosts of several ranks: the best level over one level of ranks, and over two."""
    rows = [["hosts x", "Gbit/s", "one level", "ms", "two levels", "ms", "sooner"], ["ranks", "", "", "", "", "", ""]]
    for hosts, each in grids:
        for gbit in rates:
            wire, within = _wire(gbit, latency), _wire(inside, latency / 10)
            costs, between = costs_on(shown, hosts * each)[0], costs_on(shown, hosts)[0]
            one = {name: predict(shown, cost, hosts * each, wire, kinds) for name, cost in costs.items()}
            two = {
                name: predict_two_level(shown, cost, hosts, each, wire, within, kinds) for name, cost in between.items()
            }
            best, other = best_level(one, shown.prices), best_level(two, shown.prices)
            gain = one[best].seconds * shown.prices.get(best, 1.0) / two[other].seconds / shown.prices.get(other, 1.0)
            rows.append([
                f"{hosts}x{each}", f"{gbit:.3g}", best, _ms(one[best].seconds), other, _ms(two[other].seconds),
                f"{gain:.2f} x",
            ])  # fmt: skip
    title = f"Two levels (HVDPLUS_TWO_LEVEL), {inside:g} Gbit/s within a host:\n"
    return [title + columns(rows, (0, 1, 3, 5, 6))] if grids else []


def _limits(shown: Shown, ranks: Sequence[int], latency: float, kinds: Mapping[str, Collective]) -> str:
    never = "it never pays" if len(shown.costs) > 1 else "unknown, as the run had no other level: let it run with auto"
    lines = [f"Compression stops paying (no level saves more than {MARGIN:.0%} of the time to the same loss)"]
    for number in ranks:
        limit = pays_up_to(shown, number, latency, kinds)
        where = {0.0: never, math.inf: "it always pays"}.get(limit, f"above {limit:.3g} Gbit/s")
        lines.append(f"  on {count(number, 'rank')}: {where}")
    return "\n".join(lines)


def _assumed(shown: Shown, latency: float, kinds: Mapping[str, Collective]) -> str:
    messages = 2 * (shown.ranks - 1) * latency
    fixed = max(0.0, shown.link.alpha - messages)
    less = "" if fixed else f"; the run showed less than its {2 * (shown.ranks - 1)} messages would take"
    notes = [
        *shown.assumptions,
        "Sooner: to the same loss, against the faster of " + " and ".join(PLAIN) + ". " + _delay(shown.prices),
        f"A message takes {latency * 1e6:g} us (--latency-us), and an all-reduce {_ms(fixed)} ms more{less}. One run "
        "cannot tell the two apart.",
        f"All-reduce: {' or '.join(kinds)}"
        + (", whichever makes the step shorter: " if len(kinds) > 1 else ": ")
        + "2 (N-1) messages in a ring, 2 log N in a tree, about twice the payload over each link in both. The run "
        f"used {shown.collective}; Horovod over Gloo always uses a ring, and hvdplus sets Open MPI to one unless "
        "OMPI_MCA_coll_tuned_allreduce_algorithm says otherwise (6 is the tree).",
        "Every rank has a link of its own and as many samples a step as in the run. A rate is what payloads get: by "
        "TCP about 95% of the nominal rate. Above some 10 Gbit/s the hosts' memory may be slower than the link.",
        "Not in the log: slow ranks, other jobs on the network, Horovod's negotiation among so many ranks, and a "
        "level's loss of accuracy there.",
    ]
    return "\n".join(_wrapped(note) for note in notes)


def _delay(prices: Mapping[str, float]) -> str:
    """What delay costs, in a sentence."""
    known = ", ".join(f"{name} {price - 1:.1%}" for name, price in prices.items() if price - 1 >= 0.0005)
    return f"More steps for what a level sends later, by the run's errors: {known}." if known else "Delay is free here."


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, LINE, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
