"""Compressors whose payloads ring all-reduce can add up: one algorithm, one file, one table row.

name       class             sent (d elements)     paper
none       NoCompression     4 d bytes             -
fp16       Half              2 d bytes             arXiv 1710.03740
lowrank:r  LowRank           4 r n or 4 r m bytes  arXiv 1905.13727, 2306.08881
"""

from __future__ import annotations

from collections.abc import Callable

from hvdplus.compression.contract import Compressor, Context, Spec
from hvdplus.compression.fp16 import Half
from hvdplus.compression.lowrank import LowRank
from hvdplus.compression.none import NoCompression
from hvdplus.compression.ops import Array, Ops

__all__ = ["Array", "Compressor", "Context", "Half", "LowRank", "NoCompression", "Ops", "Spec", "TABLE", "parse"]


def _bare(make: Callable[[], Compressor]) -> Callable[[str], Compressor]:
    def build(argument: str) -> Compressor:
        if argument:
            raise ValueError("it takes no parameter")
        return make()

    return build


def _lowrank(argument: str) -> Compressor:
    try:
        rank = int(argument or LowRank.rank)
    except ValueError:
        raise ValueError("its parameter is a rank, a whole number such as lowrank:4") from None
    return LowRank(rank)


TABLE: dict[str, Callable[[str], Compressor]] = {
    "none": _bare(NoCompression),
    "fp16": _bare(Half),
    "lowrank": _lowrank,
}
"""Name -> what builds the compressor from the text behind the colon."""


def parse(text: str) -> Compressor:
    """The compressor that ``text`` names, e.g. ``none``, ``fp16``, ``lowrank:4``.

    Raises:
        ValueError: the name is unknown or its parameter is wrong; the message says what was received.
    """
    name, _, argument = text.strip().partition(":")
    if name not in TABLE:
        raise ValueError(f"Unknown compression. Received: {text!r}. Known: {', '.join(sorted(TABLE))} (or 'auto')")
    try:
        return TABLE[name](argument)
    except ValueError as error:
        raise ValueError(f"Bad compression {text!r}: {error}") from None
