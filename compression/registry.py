"""From a level's name to its compressor: the table of names and the grammar.

    compression = part ["+" part]          a chain of two, such as topk:0.05+int8
    part        = name [":" parameter] ...

Parameters follow the name after colons; ``int8`` is the name ``int`` with its first parameter joined to it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from hvdplus.compression.chain import Chain
from hvdplus.compression.contract import Compressor
from hvdplus.compression.fp16 import Half
from hvdplus.compression.integer import IntB
from hvdplus.compression.lowrank import LowRank
from hvdplus.compression.none import NoCompression
from hvdplus.compression.powersgd import PowerSGD
from hvdplus.compression.qsgd import QSGD
from hvdplus.compression.randomk import RandomK
from hvdplus.compression.signsgd import SignSGD
from hvdplus.compression.terngrad import TernGrad
from hvdplus.compression.topk import TopK
from hvdplus.compression.topk2 import TopK2

ENTRY_POINTS = "hvdplus.compressors"
"""Group of entry points of other packages: name -> a callable that takes the parameters (strings)."""


class Row(NamedTuple):
    """How to build the compressor of a name."""

    build: Callable[..., Compressor]
    """Takes the parameters as strings; raises ValueError for wrong ones."""
    usual: str
    """A usual spelling, with its parameters."""


def builder(make: Callable[..., Compressor], *wants: tuple[Callable[[str], Any], str]) -> Callable[..., Compressor]:
    """``make`` for parameters given as text.

    Args:
        wants: each parameter's converter, and its description for errors. Omitted parameters keep their defaults.
    """

    def build(*texts: str) -> Compressor:
        if len(texts) > len(wants):
            takes = " and ".join(what for _, what in wants) or "no parameter"
            raise ValueError(f"it takes {takes}. Received: {':'.join(texts)!r}")
        values = []
        for text, (convert, what) in zip(texts, wants, strict=False):
            try:
                values.append(convert(text))
            except ValueError:
                raise ValueError(f"it takes {what}. Received: {text!r}") from None
        return make(*values)

    return build


def _stochastic(text: str) -> bool:
    if text not in ("stochastic", "nearest"):
        raise ValueError
    return text == "stochastic"


_SHARE = (float, "a share such as 0.05")
_BLOCK = (int, "a block length, a whole number of elements")
_BITS = (int, "bits, a whole number")

TABLE: dict[str, Row] = {
    "none": Row(builder(NoCompression), "none"),
    "fp16": Row(builder(Half), "fp16"),
    "randomk": Row(builder(RandomK, _SHARE, _BLOCK), "randomk:0.01"),
    "topk": Row(builder(TopK, _SHARE, _BLOCK), "topk:0.01"),
    "topk2": Row(builder(TopK2, _SHARE, _BLOCK), "topk2:0.01"),
    "lowrank": Row(builder(LowRank, (int, "a rank, a whole number such as lowrank:4")), "lowrank:4"),
    "powersgd": Row(builder(PowerSGD, (int, "a rank, a whole number such as powersgd:4")), "powersgd:4"),
    "int": Row(builder(IntB, _BITS, (_stochastic, "nearest or stochastic")), "int8"),
    "qsgd": Row(builder(QSGD, _BITS), "qsgd:8"),
    "terngrad": Row(builder(TernGrad), "terngrad"),
    "signsgd": Row(builder(SignSGD), "signsgd"),
}
"""Name -> how to build it. ``register`` adds to it."""


def register(name: str, build: Callable[..., Compressor], usual: str = "") -> None:
    """Make ``name`` known to ``parse``, and so to ``compression=`` and ``HVDPLUS_COMPRESSION``.

    Args:
        build: a ``Compressor`` class or another callable; takes the parameters behind the name as strings.
        usual: a spelling to list, with its parameters.

    Raises:
        ValueError: the name is taken, or the grammar cannot read it.
    """
    if not re.fullmatch(r"[a-z_]+\d*", name):
        raise ValueError(f"A compressor's name has lower-case letters, and digits only at its end. Received: {name!r}")
    joined = re.fullmatch(r"([a-z_]+)(\d+)", name)
    if name in known() or (joined and joined[1] in known()):
        raise ValueError(f"There is a compressor of this name already. Received: {name!r}")
    TABLE[name] = Row(build, usual or name)


@cache
def _from_entry_points() -> Mapping[str, Row]:
    return {entry.name: Row(_loading(entry), entry.name) for entry in entry_points(group=ENTRY_POINTS)}


def _loading(entry: EntryPoint) -> Callable[..., Compressor]:
    def build(*texts: str) -> Compressor:
        made = entry.load()(*texts)
        if not isinstance(made, Compressor):
            raise ValueError(f"{entry.value} must return a Compressor. Received: {made!r}")
        return made

    return build


OTHER_NAMES = {"half": "fp16", "top_k": "topk", "random_k": "randomk", "fp32": "none"}
"""What others call it -> a name here."""


def known() -> Mapping[str, Row]:
    """All names: those of ``TABLE``, and other packages' entry points whose names are not in it."""
    return {**_from_entry_points(), **TABLE}


def parse(text: str) -> Compressor:
    """The compressor that ``text`` names, e.g. ``none``, ``int8``, ``lowrank:4``, ``topk:0.05+int8``.

    Raises:
        ValueError: a name is unknown or its parameters are wrong; the message says what was received, and where.
    """
    parts = text.split("+")
    if len(parts) > 2:
        raise ValueError(f"Bad compression {text!r}: a chain has two parts. Received: {len(parts)}")
    made = []
    for part in parts:
        try:
            made.append(_parse_part(part.strip()))
        except ValueError as error:
            where = f", at {part.strip()!r}" if len(parts) > 1 else ""
            raise ValueError(f"Bad compression {text!r}{where}: {error}") from None
    if len(made) == 1:
        return made[0]
    try:
        return Chain(*made)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"Bad compression {text!r}: {error}") from None


def _parse_part(part: str) -> Compressor:
    table = known()
    name, *texts = part.split(":")
    joined = re.fullmatch(r"([a-z_]+)(\d+)", name)
    if name not in table and joined and joined[1] in table:
        name, texts = joined[1], [joined[2], *texts]
    if name not in table:
        near = OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, table, 1)), "")
        raise ValueError(
            f"Unknown compression. Received: {name!r}"
            + (f"; did you mean {table[near].usual}?" if near else ".")
            + f" Known: {', '.join(sorted(row.usual for row in table.values()))} (or 'auto'); "
            "`hvdplus compressors` lists them"
        )
    try:
        return table[name].build(*texts)
    except TypeError as error:  # a class that takes other parameters than were given
        raise ValueError(str(error)) from None
