"""What a saved exchange means to the ranks that load it, in any framework; and how it lies in a file.

What levels hold back is every rank's own, while all else is the same on every rank. So a state says which rank's it is,
unless residuals were consolidated: then it is everybody's.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvdplus.transport import Transport

FORMAT = 1
"""Of the states that exchanges return."""
OWN = "own"
"""In place of the rank in a state that stays where it is."""
ANOTHERS = "another's"
"""In place of it in a state that a newcomer takes over, who has held back nothing yet."""
FILE = "hvdplus.npz"


class Claim(NamedTuple):
    """What of a state a rank may take over."""

    same_ranks: bool
    """It is of as many ranks as there are, so that contexts and decisions hold."""
    mine: bool
    """Its residuals are this rank's to pay out."""
    share: float
    """By which they are multiplied: what reaches the weights stays the same, the mean or the sum, whichever is made."""


def check(state: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if the state is of another model, or of another version of hvdplus."""
    if state["format"] != FORMAT:
        raise ValueError(f"This hvdplus reads states of format {FORMAT}. Received: {state['format']}")
    theirs, mine = ([list(shape) for shape in those] for those in (state["shapes"], shapes))
    if theirs != mine:
        odd = next(i for i, (one, other) in enumerate(itertools.zip_longest(theirs, mine)) if one != other)
        raise ValueError(
            f"The state is of another model: of {len(theirs)} parameters, while this optimizer has {len(mine)}, and "
            f"the first that differs is number {odd}."
        )


def claim(state: Mapping[str, Any], transport: Transport, *, average: bool) -> Claim:
    """What this rank may take over; says so where something is lost.

    A rank's own residual goes to the rank of the same number, however many there are now; all other ranks leave it.
    """
    rank, ranks, size = state["rank"], state["ranks"], transport.size
    mine = rank in (None, OWN, transport.rank)
    if state["residuals"] and rank not in (None, OWN, ANOTHERS):
        forgotten = [] if mine or transport.rank >= ranks else [transport.rank]
        forgotten += range(size, ranks) if transport.rank == 0 else ()
        if forgotten:
            say(
                f"Rank {transport.rank} of {size} loads what rank {rank} of {ranks} saved, and what rank(s) "
                f"{', '.join(map(str, forgotten))} held back is lost. Let all ranks call "
                "optimizer.consolidate_state_dict() before one of them saves, or let each save and load its own."
            )
    if rank is None:  # a mean is made of means, a sum of as many as there are
        return Claim(ranks == size, mine, 1.0 if average else ranks / size)
    return Claim(ranks == size, mine, size / ranks if average else 1.0)


def holds_back(state: Mapping[str, Any]) -> bool:
    """Whether there is anything to pay out."""
    return any(bool((residual != 0).any()) for residual in state["residuals"].values())


def say(line: str) -> None:
    """To the user, on this rank."""
    print(f"hvdplus: {line}", file=sys.stderr, flush=True)


def digest(*values: Any, arrays: Sequence[np.ndarray] = ()) -> str:
    """Tells whether ranks go on from the same state. ``values`` are plain."""
    found = hashlib.sha256(repr(values).encode())
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def check_same(digests: Sequence[str]) -> None:
    """Raise RuntimeError if ranks would go on from different states; on every rank, as all know all digests."""
    for rank, theirs in enumerate(digests):
        if theirs != digests[0]:
            raise RuntimeError(
                f"Ranks 0 and {rank} would go on from different states: load the same checkpoint on all ranks, or "
                "load it on one and broadcast the optimizer's state from there on all."
            )


def write(state: Mapping[str, Any], folder: str | os.PathLike[str]) -> None:
    """Put a state of plain values and NumPy arrays into ``folder``."""
    arrays: dict[str, np.ndarray] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays[f"array{len(arrays)}"] = value
            return {"array": f"array{len(arrays) - 1}"}
        if isinstance(value, Mapping):
            return {"pairs": [[plain(key), plain(each)] for key, each in value.items()]}
        return [plain(each) for each in value] if isinstance(value, list | tuple) else value

    text = json.dumps(plain(state))
    np.savez(Path(folder) / FILE, state=np.array(text), **arrays)  # type: ignore[arg-type]


def read(file: Any) -> dict[str, Any]:
    """What ``write`` wrote, from a path or an open file. Nothing in it is executed."""
    with np.load(file, allow_pickle=False) as saved:

        def full(value: Any) -> Any:
            if isinstance(value, dict) and "array" in value:
                return saved[value["array"]]
            if isinstance(value, dict):
                return {full(key): full(each) for key, each in value["pairs"]}
            return [full(each) for each in value] if isinstance(value, list) else value

        return full(json.loads(str(saved["state"])))  # type: ignore[no-any-return]
