"""``hvdplus compressors``: all compressors that are known here, with what they send, keep and learn.

They are hvdplus's own, those that were registered, and those of other packages' entry points. None is run: sizes follow
from the compressors' own ``payload_bytes``.
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from hvdplus.cli.text import columns, ratio, reason, whole
from hvdplus.compression import TABLE, Compressor, NoCompression, known, parse
from hvdplus.compression.registry import ENTRY_POINTS
from hvdplus.exchange.bucket import Bucket, bytes_per_step, make_buckets
from hvdplus.log.words import count
from hvdplus.settings import Settings

EXAMPLE = ((4096, 1024), (4096,), (1024,))
"""Shapes of the bucket for which ratios are given."""
CHAINS = ("topk:0.05+int8", "lowrank:4+fp16")
HEAD = (("spelling", "class", "ratio", "keeps", "paper", "learns"), ("", "", "to fp32", "", "arXiv", "(its context)"))
FIGURES = (2,)
"""Columns of ``HEAD`` that are aligned to the right."""
WIDEST = {4: 11, 5: 38}
"""Column of ``HEAD`` -> its width in letters."""
LINE = 100
"""Letters in a line of text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``hvdplus compressors``."""
    parser.add_argument("--ranks", metavar="N", default="4", help="number of ranks for the ratios (default: 4)")


def run(args: argparse.Namespace) -> int:
    """Print the list.

    Returns 0, or 2 with a message for a wrong number of ranks or a wrong setting. A compressor that fails is a row with
    its error.
    """
    try:
        ranks, ladder = whole("--ranks", args.ranks), Settings.load().ladder
    except ValueError as error:
        print(f"hvdplus compressors: {error}", file=sys.stderr)
        return 2
    buckets = _example(ranks)
    rows = [cells for name in _names() for cells in _wrapped(_row(known()[name].usual, buckets))]
    dense = bytes_per_step(buckets, NoCompression()) / 1e6
    print(f"Ratios for one bucket: a 4096 x 1024 matrix and vectors of 4096 and 1024 ({dense:.1f} MB in fp32), on "
          f"{count(ranks, 'rank')}.\n")  # fmt: skip
    print(columns([*HEAD, *rows], FIGURES))
    chains = "; ".join(_chain(spelling, buckets) for spelling in CHAINS)
    print(
        "\n"
        + _note(f"Chains: randomk, topk, topk2, lowrank or powersgd, and fp16 or intB on what they leave: {chains}.")
    )
    print(_note(f"auto chooses from {', '.join(ladder)} (HVDPLUS_LADDER)."))
    print(_note(
        'Your own: subclass hvdplus.compression.Compressor and call hvdplus.compression.register("name", build), or '
        f"name build as an entry point of your package, in the group {ENTRY_POINTS}."
    ))  # fmt: skip
    return 0


def _example(ranks: int) -> tuple[Bucket, ...]:
    room = 4 * sum(math.prod(shape) for shape in EXAMPLE)
    return make_buckets(EXAMPLE, ["float32"] * len(EXAMPLE), bucket_bytes=room, ranks=ranks, seed=0)


def _names() -> list[str]:
    """Ours in the order of their table, then those of other packages."""
    return [*TABLE, *sorted(set(known()) - set(TABLE))]


def _row(spelling: str, buckets: Sequence[Bucket]) -> list[str]:
    """A compressor's cells; or its spelling and an error, which may be of any type in another package's code."""
    try:
        compressor = parse(spelling)
    except Exception as error:
        return [spelling, f"does not load: {reason(error)}"]
    try:
        return [spelling, *_cells(compressor, buckets)]
    except Exception as error:
        return [spelling, reason(error)]


def _cells(compressor: Compressor, buckets: Sequence[Bucket]) -> list[str]:
    size = ratio(buckets, bytes_per_step(buckets, compressor))
    keeps = "residual" if compressor.keeps_residual else "nothing"
    return [compressor.kind, size, keeps, compressor.paper or "-", compressor.learns]


def _wrapped(row: Sequence[str]) -> Iterator[Sequence[str]]:
    """The row in several lines, if a cell is wider than ``WIDEST``."""
    if len(row) < len(HEAD[0]):
        return iter([row])
    lines = (textwrap.wrap(cell, WIDEST.get(place, LINE)) for place, cell in enumerate(row))
    return zip_longest(*lines, fillvalue="")


def _chain(spelling: str, buckets: Sequence[Bucket]) -> str:
    try:
        return f"{spelling} ({ratio(buckets, bytes_per_step(buckets, parse(spelling)))})"
    except ValueError as error:
        return f"{spelling} ({reason(error)})"


def _note(text: str) -> str:
    return textwrap.fill(text, LINE, subsequent_indent="  ", break_on_hyphens=False)
