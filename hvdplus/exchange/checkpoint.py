"""Checkpoints of an exchange: their content, the part that a rank may take over, their form in a file.

    format          see ``FORMAT``
    framework       whose arrays these are: numpy, torch, tensorflow
    ranks, rank     world size, and the rank whose residuals these are (null: all ranks', they were consolidated;
                    own, another's: of elastic jobs)
    shapes          of all gradients, in order
    order           parameters as their gradients become ready; null: no step has shown it
    sparse, tables  parameters whose gradients are sparse, and those of them with a bucket of their own
    coordinator     level, schedule, step number, plan, and the controller's memory
    not_taken       a residual's share was sent in a step that the optimizer has not taken
    contexts        for every bucket: its parameters, and for every level the arrays of its context
    residuals       parameter -> its residual (null: zeros)

Residuals are every rank's own; all else is equal on every rank. A job with other levels or another number of ranks
takes over the residuals alone, so that only the residuals of ranks that are gone are lost.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hvdplus.compression import Array, Context
from hvdplus.exchange.form import are_different, are_shapes, damaged, is_count, is_finite, require, require_fields
from hvdplus.transport import Transport

if TYPE_CHECKING:
    from hvdplus.exchange.engine import Exchange

FORMAT = 10
"""Format number of the states that exchanges return."""
KEEP_LOCAL = "own"
"""Value of ``rank`` in a state that stays on its rank."""
FROM_OTHER = "another's"
"""Value of ``rank`` in a state that a new rank takes over, which has no residual yet."""
FILE = "hvdplus.npz"
FIELDS = (
    "framework", "ranks", "rank", "shapes", "order", "sparse", "tables", "coordinator", "not_taken", "contexts",
    "residuals",
)  # fmt: skip


UNREADABLE = (
    AttributeError, EOFError, KeyError, MemoryError, RuntimeError, TypeError, ValueError, struct.error,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""Errors of NumPy and JSON for files that ``write`` did not write."""


class Ownership(NamedTuple):
    """The part of a state that a rank may take over."""

    mine: bool
    """This rank takes over the residuals."""
    share: float
    """Factor on loaded residuals that keeps their total effect on the weights unchanged when the world size changes."""


def save(x: Exchange[Array]) -> dict[str, Any]:
    """All that coming steps depend on, besides weights and the optimizer's own state. Call it between two steps.

    Arrays (the framework's, copied), numbers, text, and lists and dictionaries of them.
    """
    return {
        "format": FORMAT,
        "framework": x.framework,
        "ranks": x.transport.size,
        "rank": None if x.consolidated else x.transport.rank,
        "shapes": [list(shape) for shape in x.shapes],
        "order": list(x.order) if x.order_known else None,
        "sparse": sorted(x.sparse) if x.order_known else None,
        "tables": list(x.tables) if x.order_known else None,
        "coordinator": x.coordinator.state(),
        "not_taken": x.not_taken,
        "contexts": [
            {
                "parameters": list(state.bucket.parameters),
                "levels": {x.ladder.names[level]: x.arrays(ctx) for level, ctx in sorted(state.contexts.items())},
            }
            for state in x.states
        ],
        "residuals": {**_of_others(x), **residuals(x)},
    }


def _of_others(x: Exchange[Array]) -> dict[int, None]:
    """Over two levels, parameters whose residual another rank of this host may have: every rank's state names the same
    ones, as what is to be flushed follows from them."""
    outstanding = x.coordinator.plan.flush_fraction
    states = x.states if x.two_level and outstanding and not x.consolidated else []
    return dict.fromkeys(i for state in states if state.bucket.compressible for i in state.bucket.parameters)


def for_other_ranks(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state without what other ranks do not take over: this rank's residuals, which may be all of its gradients."""
    consolidated = state["rank"] is None
    return {**state, "residuals": state["residuals"] if consolidated else dict.fromkeys(state["residuals"])}


class Brought(NamedTuple):
    """What a rank brings along from an exchange among other ranks."""

    ranks: int
    """How many they were."""
    norm: float
    """Of its own residual; 0: none, or all ranks have the same, so that nothing went with those that left."""


def brought(x: Exchange[Array]) -> Brought:
    """See ``Brought``."""
    norms = [] if x.consolidated else [np.linalg.norm(x.on_host(residual)) for residual in residuals(x).values()]
    return Brought(x.transport.size, float(np.linalg.norm(norms)))


def to_stay(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state to stay on its rank, whatever number the rank has later; unless residuals are all ranks', alike."""
    return {**state, "rank": None if state["rank"] is None else KEEP_LOCAL}


def share_out(exchanges: Iterable[Exchange[Any]]) -> None:
    """Before ranks leave in order: what each holds back becomes all ranks' mean, so that none of it leaves with them.
    All ranks call it. With secure aggregation other ranks may not see it, so it is lost."""
    for x in exchanges:
        if not (x.idle or x.settings.secure_aggregation):
            consolidate(x)


def residuals(x: Exchange[Array]) -> dict[int, Any]:
    """Parameter -> a copy of its residual, in the parameter's shape."""
    return {
        i: x.copied(state.residual[part]).reshape(shape)
        for state in x.states
        if state.residual is not None
        for i, (part, shape) in state.places.items()
    }


def load(x: Exchange[Array], state: Mapping[str, Any]) -> str:
    """Continue from a ``state`` that ``save`` returned; return a digest that must be equal on all ranks.

    Raises:
        ValueError: the state is damaged, of another model, or of another version of hvdplus. Nothing has changed then.
    """
    check(state, x.shapes)
    own = state["framework"] == x.framework
    known = own and state["order"] is not None
    resumed = own and state["ranks"] == x.transport.size and x.coordinator.fits(state["coordinator"])
    contexts = checked_contexts(x, state) if resumed else {}
    mine, share = claim(state, x.transport, average=x.average)
    # Everything is checked; changes begin here.
    if x.idle:
        if not (mine and holds_back(state)):
            return ""
        x.idle = False  # until all is flushed
    if known:
        x.know_gradients(state["order"], state["sparse"], state["tables"])
    else:
        x.know_nothing()
    x.consolidated = state["rank"] is None
    if resumed:
        x.coordinator.load(state["coordinator"])
    x.not_taken = resumed and state["not_taken"]
    for bucket in x.states:
        for level, arrays in contexts.get(bucket.bucket.parameters, {}).items():
            x.put_context(bucket, level, arrays)
    level = x.coordinator.schedule.level
    states = [state.bucket for state in x.states if state.bucket.compressible]
    if any(level not in contexts.get(bucket.parameters, {}) for bucket in states):  # they were cut in another way
        x.coordinator.ask()
    for i, residual in state["residuals"].items():
        x.hold(i, residual if mine else None, share)
    if state["residuals"] and not resumed:
        x.coordinator.flush()
    x.follow(x.coordinator.plan)
    plain = state["ranks"], state["rank"] is None, resumed, state["coordinator"], own and state["order"], x.not_taken
    arrays = (array for levels in contexts.values() for those in levels.values() for array in those)
    return digest(*plain, arrays=[np.asarray(x.on_host(array)) for array in arrays])


def consolidate(x: Exchange[Array]) -> None:
    """Give every rank the mean of all ranks' residuals, which leaves their sum unchanged."""
    held = [state.residual is not None for state in x.states]
    if x.two_level:  # where each bucket's owners hold something back
        everyone = x.transport.gather_objects(held, f"residuals of {x.prefix}")
        held = [any(ranks) for ranks in zip(*everyone, strict=True)]
    states = [state for state, anybody in zip(x.states, held, strict=True) if anybody]
    for state in states:
        if state.residual is None:
            x.hold(state.bucket.parameters[0], None)
    names = [f"{x.prefix}.mean.{state.bucket.number}" for state in states]
    handles = [
        x.transport.start(x.copied(state.residual), name, 1.0 / x.transport.size)
        for state, name in zip(states, names, strict=True)
    ]
    for state, handle in zip(states, handles, strict=True):
        state.residual = x.transport.wait(handle)
    x.consolidated = True


def check(state: Any, shapes: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if the state is damaged, of another model, or of another version of hvdplus."""
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        received = state.get("format") if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"This hvdplus reads states of format {FORMAT}. Received: {received}")
    require_fields(state, FIELDS, "the state")
    require(are_shapes(state["shapes"]), "shapes", "the gradients' shapes", state["shapes"])
    theirs, mine = ([list(shape) for shape in those] for those in (state["shapes"], shapes))
    if theirs != mine:
        odd = next(i for i, (one, other) in enumerate(itertools.zip_longest(theirs, mine)) if one != other)
        raise ValueError(
            f"The state is of another model: it has {len(theirs)} parameters and this optimizer {len(mine)}; the first "
            f"that differs is number {odd}."
        )
    require(isinstance(state["framework"], str), "framework", "a name", state["framework"])
    ranks, rank = state["ranks"], state["rank"]
    require(is_count(ranks) and ranks > 0, "ranks", "a number of at least 1", ranks)
    known = rank is None or is_count(rank) or (isinstance(rank, str) and rank in (KEEP_LOCAL, FROM_OTHER))
    require(known, "rank", "a number of at least 0, or nothing", rank)
    require(isinstance(state["not_taken"], bool), "not_taken", "true or false", state["not_taken"])
    _check_order(state, len(mine))
    _check_residuals(state["residuals"], mine)


def _check_order(state: Mapping[str, Any], parameters: int) -> None:
    """Raise ValueError unless order, sparse and tables fit the number of parameters."""
    order, sparse, tables = state["order"], state["sparse"], state["tables"]
    everything = f"every parameter below {parameters} once, or nothing"
    if order is None:
        require(sparse is None and tables is None, "sparse and tables", "nothing where order is", (sparse, tables))
        return
    require(are_different(order, parameters) and len(order) == parameters, "order", everything, order)
    require(are_different(sparse, parameters), "sparse", f"parameters below {parameters}", sparse)
    fits = are_different(tables, parameters) and set(tables) <= set(sparse)
    require(fits and all(state["shapes"][i] for i in tables), "tables", "some of the sparse parameters", tables)


def _check_residuals(residuals: Any, shapes: Sequence[Sequence[int]]) -> None:
    require(isinstance(residuals, Mapping), "residuals", "a dictionary of arrays", residuals)
    for i, residual in residuals.items():
        require(is_count(i, len(shapes)), "a residual's parameter", f"below {len(shapes)}", i)
        if residual is None:  # of a rank that has no residual yet
            continue
        received = tuple(getattr(residual, "shape", ()))
        if math.prod(received) != math.prod(shapes[i]) or not hasattr(residual, "shape"):
            wanted = f"an array of shape {tuple(shapes[i])}"
            raise damaged(f"the residual of parameter {i}", wanted, received or residual)
        if not is_finite(residual):
            raise ValueError(
                f"The residual of parameter {i} in the checkpoint holds values that are not finite: they would reach "
                "every weight. Load an earlier checkpoint, or remove the key 'hvdplus' from this one, which forgets "
                "residuals."
            )


def checked_contexts(x: Exchange[Array], state: Mapping[str, Any]) -> dict[tuple[int, ...], dict[int, Any]]:
    """Parameters of a bucket -> level -> arrays of its context, for the buckets to come. Raises ValueError: damaged."""
    order = list(reversed(range(len(x.shapes)))) if state["order"] is None else state["order"]
    buckets = {bucket.parameters: bucket for bucket in x.make_buckets(order=order, tables=state["tables"] or [])}
    found: dict[tuple[int, ...], dict[int, Any]] = {}
    require(isinstance(state["contexts"], list | tuple), "contexts", "a list, one entry a bucket", state["contexts"])
    for each in state["contexts"]:
        require_fields(each, ("parameters", "levels"), "a bucket's contexts")
        parameters, levels = each["parameters"], each["levels"]
        fits = are_different(parameters, len(x.shapes))
        require(fits, "a bucket's parameters", f"different numbers below {len(x.shapes)}", parameters)
        require(isinstance(levels, Mapping), "a bucket's contexts", "a dictionary of lists", levels)
        known = set(levels) <= set(x.ladder.names)
        require(known, "a context's level", f"one of {', '.join(x.ladder.names)}", list(levels))
        bucket = buckets.get(tuple(parameters))
        if bucket is None:  # they were cut in another way
            continue
        for name, arrays in levels.items():
            level = x.ladder.names.index(name)
            check_context(x, name, arrays, x.compressor(bucket, level).init(x.ops, bucket.spec))
            found.setdefault(tuple(parameters), {})[level] = arrays
    return found


def check_context(x: Exchange[Array], name: str, arrays: Any, fresh: Context[Array]) -> None:
    """Raise ValueError if a loaded context does not have the form that the level makes."""
    wanted = [_form(x.ops.to_numpy(array)) for array in fresh.state]
    try:
        received = [_form(np.asarray(x.on_host(array))) for array in arrays]
    except (AttributeError, TypeError, ValueError, RuntimeError):
        received = None
    if received != wanted or not all(map(is_finite, arrays)):
        raise damaged(f"the context of {name}", f"arrays of {wanted} with finite values", received or arrays)


def _form(array: np.ndarray) -> str:
    return f"{array.dtype} {array.shape}"


def claim(state: Mapping[str, Any], transport: Transport, *, average: bool) -> Ownership:
    """The part of a state that this rank may take over; prints a warning if residuals are lost.

    A rank's own residual goes to the rank of the same number, whatever the world size.
    """
    rank, ranks, size = state["rank"], state["ranks"], transport.size
    mine = rank in (None, KEEP_LOCAL, transport.rank)
    if state["residuals"] and rank not in (None, KEEP_LOCAL, FROM_OTHER):
        forgotten = [] if mine or transport.rank >= ranks else [transport.rank]
        forgotten += itertools.islice(range(size, ranks), 9) if transport.rank == 0 else ()
        if forgotten:
            some = ", ".join(map(str, forgotten[:8])) + (" ..." if len(forgotten) > 8 else "")
            say(
                f"Rank {transport.rank} of {size} loads the state that rank {rank} of {ranks} saved, so the residuals "
                f"of rank(s) {some} are lost. Let all ranks call optimizer.consolidate_state_dict() before one of "
                "them saves, or let each rank save and load its own state."
            )
    if rank is None:  # every rank holds the mean: an average keeps it, a sum counts it ``size`` times
        return Ownership(mine, 1.0 if average else ranks / size)
    return Ownership(mine, size / ranks if average else 1.0)


def holds_back(state: Mapping[str, Any]) -> bool:
    """Whether any residual is not zero."""
    return any(residual is not None and bool((residual != 0).any()) for residual in state["residuals"].values())


OF_LOCK_STEP = "the checkpoint is of lock-step; gradients that it held back are lost, as local steps hold back others."
"""Where local steps are to go on from it."""


def say(line: str) -> None:
    """Print a line on this rank's stderr."""
    print(f"hvdplus: {line}", file=sys.stderr, flush=True)


def digest(*values: Any, arrays: Sequence[np.ndarray] = ()) -> str:
    """SHA-256 digest of a state, for comparison between ranks. ``values``: plain."""
    found = hashlib.sha256(repr(values).encode())
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def check_same(digests: Sequence[str]) -> None:
    """Raise RuntimeError if ranks would resume from different states; on every rank, as all know all digests."""
    for rank, theirs in enumerate(digests):
        if theirs != digests[0]:
            raise RuntimeError(
                f"Ranks 0 and {rank} would resume from different states: load the same checkpoint on all ranks, or "
                "load it on one rank and broadcast the optimizer's state from there."
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
    """Read what ``write`` wrote, from a path or an open file. Nothing in it is executed.

    Raises:
        ValueError: it is another file, or a damaged one.
    """
    try:
        with np.load(file, allow_pickle=False) as saved:

            def full(value: Any) -> Any:
                if isinstance(value, dict) and "array" in value:
                    return saved[value["array"]]
                if isinstance(value, dict):
                    return {full(key): full(each) for key, each in value["pairs"]}
                return [full(each) for each in value] if isinstance(value, list) else value

            return full(json.loads(str(saved["state"])))  # type: ignore[no-any-return]
    except UNREADABLE as error:
        raise ValueError(f"The state of hvdplus cannot be read: {type(error).__name__}: {error}") from error
