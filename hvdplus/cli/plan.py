"""``hvdplus plan``: what compressors would send and cost for a model, estimated without running anything.

The model is cut into buckets as in a job, so the same tensors travel whole and the same bytes are counted.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from typing import NamedTuple

from hvdplus.buckets import Bucket, bytes_per_step, make_buckets
from hvdplus.cli.compressors import columns, count, ratio, reason, whole
from hvdplus.compression import Compressor, NoCompression, parse
from hvdplus.settings import Settings

USUAL = (
    "none", "fp16", "int8", "int4", "signsgd", "randomk:0.01", "topk:0.01", "topk:0.05+int8", "lowrank:4",
    "lowrank:4+fp16",
)  # fmt: skip
"""What is compared unless the user names something."""
UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9}
"""What may stand behind a number of parameters."""


class Model(NamedTuple):
    """Shapes of a model's tensors, first to last, and what is only approximate about them."""

    shapes: tuple[tuple[int, ...], ...]
    caveat: str = ""

    @property
    def parameters(self) -> int:
        """Number of elements d."""
        return sum(math.prod(shape) for shape in self.shapes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``hvdplus plan``."""
    parser.add_argument("compressors", nargs="*", metavar="COMPRESSOR", help="such as int8 (default: a choice of them)")
    parser.add_argument(
        "--shape", action="append", metavar="AxB", help="shape of a tensor, such as 4096x1024 or 1024; once for each"
    )
    parser.add_argument("--parameters", metavar="D", help="instead of shapes, how many there are, such as 25M")
    parser.add_argument("--ranks", default="2", metavar="N", help="number of ranks (default: 2)")
    parser.add_argument("--gbit", metavar="RATE", help="speed of a rank's link in Gbit/s; adds the ring's time")


def run(args: argparse.Namespace) -> int:
    """Print the estimate.

    Returns 0, or 2 with a message for arguments that cannot be read. A compressor that cannot serve that many ranks is
    a row with its reason.
    """
    try:
        model, ranks = _model(args.shape, args.parameters), whole("--ranks", args.ranks)
        gbit = None if args.gbit is None else _rate(args.gbit)
        compressors = {spelling: _compressor(spelling) for spelling in args.compressors or USUAL}
        buckets = _buckets(model, ranks)
    except ValueError as error:
        print(f"hvdplus plan: {error}", file=sys.stderr)
        return 2
    print(_facts(model, buckets, ranks) + "\n")
    rows = [_row(spelling, compressor, buckets, gbit) for spelling, compressor in compressors.items()]
    heads = _heads(gbit)
    print(columns([*heads, *rows], range(1, len(heads[0]))))
    print("\n" + _notes(model, ranks, gbit))
    return 0


def ring_seconds(payload_bytes: float, ranks: int, gbit: float) -> float:
    """Time of a ring all-reduce over links of ``gbit`` Gbit/s, without latency: every rank sends 2 (N-1)/N of it."""
    return 2 * (ranks - 1) / ranks * payload_bytes * 8 / (gbit * 1e9)


def _model(shapes: Sequence[str] | None, parameters: str | None) -> Model:
    if bool(shapes) == bool(parameters):
        received = "both" if shapes else "neither"
        raise ValueError(f"the model: --shape once for each tensor, or --parameters. Received: {received}")
    return Model(tuple(map(_shape, shapes))) if shapes else _one_matrix(parameters or "")


def _shape(text: str) -> tuple[int, ...]:
    """``4096x1024`` -> (4096, 1024)."""
    if not re.fullmatch(r"0*[1-9][0-9]*(x0*[1-9][0-9]*)*", text):
        raise ValueError(f"--shape wants lengths of at least 1, such as 4096x1024 or 1024. Received: {text!r}")
    return tuple(map(int, text.split("x")))


def _one_matrix(text: str) -> Model:
    """``25M`` -> a matrix as square as that many elements allow."""
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
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise ValueError(f"--gbit wants a rate above 0 in Gbit/s, such as 10. Received: {text!r}")
    return rate


def _compressor(spelling: str) -> Compressor:
    """What is spelled, or a ValueError, whatever goes wrong in another package's code."""
    if spelling == "auto":
        raise ValueError("auto chooses between compressors while it trains: name those. Received: 'auto'")
    try:
        return parse(spelling)
    except Exception as error:
        received = "" if isinstance(error, ValueError) else f". Received: {spelling!r}"
        raise ValueError(reason(error) + received) from None


def _buckets(model: Model, ranks: int) -> tuple[Bucket, ...]:
    limit = Settings.from_environment().bucket_bytes
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
    """A compressor's figures; or its spelling and why there are none."""
    try:
        sent, passes = bytes_per_step(buckets, compressor), compressor.memory_passes
    except Exception as error:
        return [spelling, reason(error)]
    touched = passes * bytes_per_step(buckets, NoCompression())
    row = [spelling, f"{sent / 1e6:.3f}", ratio(buckets, sent), f"{passes:.1f}", f"{touched / 1e9:.3f}"]
    return row if gbit is None else [*row, f"{ring_seconds(sent, buckets[0].spec.ranks, gbit) * 1e3:.2f}"]


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
