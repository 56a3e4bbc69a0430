"""What ranks settle before training: the ladder of levels, equal models and settings, the run log."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hvdplus.compression import Compressor, HorovodCompressor, Ops, Spec, known, parse
from hvdplus.control.interval import LADDER
from hvdplus.exchange.checkpoint import Brought
from hvdplus.exchange.plan import Ladder
from hvdplus.log.runlog import RunLog
from hvdplus.settings import SETTINGS, Settings
from hvdplus.transport import World

AUTO = "auto"
LOCAL = "local"
"""Begins the name of a level that runs after several local steps: ``local:8+lowrank:16+fp16``."""

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""Types of gradients that every framework exchanges."""

TWICE = "This optimizer is a DistributedOptimizer already; wrapped twice it would average twice. Wrap the bare one."
NO_JOIN = (
    "hvd.join() lets other ranks continue alone, but ranks compress and decide together in every step. Give all ranks "
    "the same number of steps (DistributedSampler and drop_last=True do), or run with compression='none' in PyTorch."
)
_instances = 0

HOROVODS_NAMES = {"NoneCompressor": "none", "FP16Compressor": "fp16"}
"""Horovod's two compressor classes -> levels."""


class Compression:
    """Horovod's ``Compression`` in a job without Horovod, for scripts that name it."""

    none = type("NoneCompressor", (), {})
    fp16 = type("FP16Compressor", (), {})


def choose_ladder(compression: Any, settings: Settings, world: World, ops: Ops[Any]) -> tuple[Ladder, bool]:
    """The ladder to run, and whether a controller chooses from it.

    Args:
        compression: ``auto`` (then the setting ``compression`` decides, ``auto`` by default), a level such as
            ``lowrank:4`` or ``topk:0.05+int8``, a ``Compressor`` object, Horovod's own ``Compression.none`` or
            ``Compression.fp16``, or another class with Horovod's ``compress`` and ``decompress``.
        ops: operations of the framework in use.

    Raises:
        ValueError: unknown compression; a ladder that does not begin with ``none``; or a fixed level that needs equal
            CPUs and libraries, while ranks differ.
    """
    wanted, from_settings = asked_for(compression, settings)
    if _is_local(wanted):
        raise ValueError(
            f"{wanted}: local steps are an optimizer's, and this is none. Wrap one in DistributedOptimizer."
        )
    auto = isinstance(wanted, str) and wanted == AUTO
    try:
        compressors = Ladder([_one(level, ops) for level in (settings.ladder if auto else [wanted])]).compressors
    except ValueError as error:
        if not from_settings:
            raise
        raise ValueError(f"{settings.whence('ladder' if auto else 'compression')}: {error}") from None
    if auto:
        if compressors[0].name != "none":
            raise ValueError(
                f"{settings.whence('ladder')} must begin with none, which every other level is measured against. "
                f"Received: {','.join(settings.ladder)}"
            )
        left_out = {c.name: why for c in compressors if (why := _unfit(c, world))}
        if left_out and world.transport.rank == 0:
            for name, why in left_out.items():
                print(f"hvdplus: auto leaves out {name}: {why}", file=sys.stderr, flush=True)
        return Ladder([c for c in compressors if c.name not in left_out]), True
    (compressor,) = compressors
    if compressor.uses_products and world.differences:
        raise ValueError(
            f"compression={compressor.name!r} needs the same CPU capability and library versions on all ranks, or "
            f"their contexts drift apart. The ranks differ in {'; '.join(world.differences)}. Use fp16 or none, or "
            "make them equal."
        )
    return Ladder([compressor]), False


def asked_for(compression: Any, settings: Settings) -> tuple[Any, bool]:
    """(the compression that a script or else the settings ask for, whether it is the settings)."""
    stock = isinstance(compression, type) and compression.__module__.partition(".")[0] in ("horovod", "hvdplus")
    if stock and compression.__name__ in HOROVODS_NAMES:
        # A script written for Horovod names one of these classes by default, so a setting may override it.
        turned = "compression" in settings.origins or settings.compression != AUTO
        compression = AUTO if turned else HOROVODS_NAMES[compression.__name__]
    from_settings = isinstance(compression, str) and compression == AUTO
    return (settings.compression if from_settings else compression), from_settings


def _is_local(compression: Any) -> bool:
    """Whether it names local steps."""
    return isinstance(compression, str) and compression.partition("+")[0].partition(":")[0] == LOCAL


class Wanted(NamedTuple):
    """How often to exchange, and what."""

    every: int
    """Local steps between two exchanges; 1: lock-step, 0: as many as measurements say."""
    local: bool
    """Whether ranks take local steps; not in lock-step."""
    compression: Any
    """For ``choose_ladder``."""


def choose_rhythm(compression: Any, every: int | str | None, settings: Settings) -> Wanted:
    """From the arguments of ``DistributedOptimizer``, and from the settings where those leave it open.

    ``local:H+LEVEL`` names both; ``local:H`` alone exchanges without compression. ``every=1`` is lock-step; with
    ``local:1`` ranks exchange in every step, but what their own optimizers have made of their own gradients. ``auto``
    instead of H: measurements decide.

    Raises:
        ValueError: they contradict each other, or a number is out of range.
    """
    asked = settings.every if every is None else every
    if asked != AUTO and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 1):
        raise ValueError(f"every wants auto, or a number of local steps, at least 1. Received: every={asked!r}")
    level, from_settings = asked_for(compression, settings)
    local = _is_local(level) or asked != 1 or settings.staleness != 0
    if local and settings.secure_aggregation and (settings.average_state or settings.dense_steps):
        raise ValueError(
            "Secure aggregation adds up integers only, so local steps have neither average_state nor dense_steps with "
            f"it. Received: average_state={settings.average_state}, dense_steps={settings.dense_steps}"
        )
    if not _is_local(level):
        return Wanted(0 if asked == AUTO else int(asked), local, compression)
    where = settings.whence("compression") if from_settings else "compression"
    first, _, rest = level.partition("+")
    number = first.partition(":")[2]
    if number != AUTO and not (number.isdecimal() and int(number) >= 1):
        raise ValueError(
            f"{where}: local wants auto or a number of steps, and may name a level for what is exchanged then, such as "
            f"local:8 or local:8+lowrank:16+fp16. Received: {level!r}"
        )
    named = AUTO if number == AUTO else int(number)
    if asked not in (1, named):
        raise ValueError(f"{where}={level!r} and every={asked} ask for different numbers of local steps.")
    return Wanted(0 if named == AUTO else int(named), True, rest or "none")


def refuse_local_steps(compression: Any, settings: Settings, who: str, instead: str) -> None:
    """Raise ValueError if local steps are asked for where ``who`` exchanges in every step.

    ``instead``: what takes them.
    """
    if choose_rhythm(compression, None, settings).local:
        raise ValueError(
            f"{who} exchanges in every step: local steps need {instead}. Received: "
            f"compression={compression!r}, every={settings.every}, staleness={settings.staleness}"
        )


def settings_of_exchanges(given: Mapping[str, Any] | None, resolved: Settings) -> dict[str, Any]:
    """What an optimizer that exchanges drifts is wrapped with, where the user has ``given`` these settings."""
    own = {**(given or {}), "dense_steps": 0, "every": 1, "staleness": 0}
    if _is_local(resolved.compression):  # it has been followed: ``choose_rhythm`` says what is left of it
        own["compression"] = AUTO
    if "ladder" not in resolved.origins:
        own["ladder"] = LADDER
    return own


def check_passes(passes: int) -> None:
    """Raise ValueError unless so many backward passes can accumulate."""
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1. Received: {passes}")


def agreed_rhythm(every: int, resolved: Settings) -> dict[str, Any]:
    """What of it ranks have to have in common, beside the settings of exchanges. ``every``: 0: from measurements."""
    return {"every": every or AUTO, "dense_steps": resolved.dense_steps, "staleness": resolved.staleness}


def _unfit(compressor: Compressor, world: World) -> str:
    """Why a level cannot run in this job; empty: it can."""
    if compressor.uses_products and world.differences:
        return f"it needs equal CPUs and libraries, but ranks differ in {'; '.join(world.differences)}"
    try:
        compressor.payload_bytes(Spec(((32, 32),), 0, 0, world.transport.size))
    except ValueError as error:  # too many ranks for the bits of its integers
        return str(error)
    return ""


def announce(ladder: Ladder, auto: bool, world: World) -> None:
    """Rank 0 prints one line: the compression that an optimizer runs with."""
    if world.transport.rank == 0:
        what = f"auto, ladder {' > '.join(ladder.names)}" if auto else ladder.names[-1]
        print(f"hvdplus: compression {what}", file=sys.stderr, flush=True)


def announce_local(every: int, average: bool, world: World) -> None:
    """Rank 0 prints how many local steps are between two exchanges. ``every``: 0: as many as measurements say.

    Raises:
        ValueError: a sum is asked for, not an ``average``, or a part of the ranks.
    """
    if world.transport.part:
        raise ValueError(
            "Local steps are of all ranks. Received: a process set or group; leave it out, or use every=1."
        )
    if not average:
        raise ValueError("Local steps are averaged. Received: op=Sum; use op=Average, or every=1.")
    if world.transport.rank == 0:
        how_many = every or "as many as it takes,"
        print(f"hvdplus: {how_many} local steps between two exchanges", file=sys.stderr, flush=True)


def join(
    make: Callable[..., Any],
    world: World,
    settings: Settings,
    ladder: Ladder,
    auto: bool,
    *,
    framework: str,
    instance: int,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[str],
    names: Sequence[str] | None = None,
    times: int = 0,
    brought: Brought | None = None,
    **agreed: Any,
) -> Any:
    """Check that all ranks fit together, then make their exchange. Every rank calls it.

    Args:
        make: takes transport and settings, and ``ladder``, ``auto``, ``log`` and ``prefix`` by name.
        instance: see ``next_instance``.
        shapes, dtypes: of the gradients, in order.
        names: of the gradients, if ranks have to agree on them.
        times: how often this exchange has joined other ranks before.
        brought: from there, by this rank.
        agreed: arguments that must be equal on all ranks, besides the settings.

    Raises:
        ValueError: ranks differ in gradients, settings or arguments; on every rank.
    """
    # In an elastic job, some ranks have made more optimizers than others.
    told = world.transport.gather_objects((instance, brought), "an optimizer's number (DistributedOptimizer)")
    instance = max(number for number, _ in told)
    check_same_model(list(zip(*((names,) if names else ()), shapes, dtypes, strict=True)), world)
    announce(ladder, auto, world)
    check_same_settings(settings, ladder, world, auto=auto, **agreed)
    if world.differences:  # the same update may give other bits there; ``init`` has warned
        settings = replace(settings, weights_check_steps=0)
    log = open_log(settings, world, instance, times)
    exchange = make(world.transport, settings, ladder=ladder, auto=auto, log=log, prefix=f"hvdplus{instance}")
    exchange.coordinator.describe_run(world, framework, sum(map(math.prod, shapes)), exchange.gradient_bytes)
    _tell_of_lost([theirs for _, theirs in told if theirs is not None], world, log)
    return exchange


def _tell_of_lost(left: Sequence[Brought], world: World, log: RunLog) -> None:
    """Say and log if ranks are gone with what they held back. ``left``: of those that were there before, too."""
    gone = max((each.ranks for each in left), default=0) - len(left)
    norm = math.sqrt(sum(each.norm**2 for each in left) / len(left)) if left else 0.0
    if gone > 0 and norm and world.transport.rank == 0:
        log.write("lost", ranks=gone, held_back_norm=float(f"{norm:.7g}"))
        print(
            f"hvdplus: {gone} rank{'s are' if gone > 1 else ' is'} gone. What {'they' if gone > 1 else 'it'} held back "
            f"is lost. (A rank that is left holds back gradients of norm {norm:.3g}.)",
            file=sys.stderr,
            flush=True,
        )


def check_types(names: Sequence[str], dtypes: Sequence[str], known: Sequence[str] = FLOATS) -> None:
    """Raise ValueError if the type of a gradient is not in ``known``."""
    odd = [f"{name} is {dtype}" for name, dtype in zip(names, dtypes, strict=True) if dtype not in known]
    if odd:
        raise ValueError(
            f"hvdplus exchanges gradients of type {', '.join(known)}. Received: {', '.join(odd)}. Keep such parameters "
            "out of this optimizer, or reduce them with hvd.allreduce."
        )


def check_same_model(mine: Sequence[Any], world: World) -> None:
    """Check that all ranks exchange the same tensors; otherwise they would hang. Every rank calls it.

    Args:
        mine: one comparable, picklable description per parameter, in order.

    Raises:
        ValueError: ranks differ in parameters; on every rank, with the first difference.
    """
    mine = list(mine)
    everyone = world.transport.gather_objects(mine, "an optimizer's parameters")
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            pairs = itertools.zip_longest(everyone[0], theirs)
            first = next(pair for pair in pairs if pair[0] != pair[1])
            raise ValueError(
                f"The model differs between ranks 0 and {rank}: {first[0]} against {first[1]}. All ranks must optimise "
                "the same parameters in the same order."
            )


def check_same_settings(settings: Settings, ladder: Ladder, world: World, **arguments: Any) -> None:
    """Check that levels, settings and ``arguments`` are equal on all ranks. Every rank calls it.

    Raises:
        ValueError: ranks differ in one of them; on every rank, with the first difference.
    """
    values = {name: getattr(settings, name) for name in SETTINGS if name != "run_log"}  # only rank 0 writes one
    mine = {"levels": ladder.names, **values, **arguments}
    everyone = world.transport.gather_objects(mine, "an optimizer's settings")
    for rank, theirs in enumerate(everyone):
        for name in {**everyone[0], **theirs}:
            first, value = (each.get(name, "nothing") for each in (everyone[0], theirs))
            if value != first:
                raise ValueError(
                    f"Ranks 0 and {rank} differ in {name}: {first!r} against {value!r}. Give all ranks the "
                    "same arguments, HVDPLUS_* variables (mpirun passes one on to other hosts with -x NAME) and file."
                )


def same_bytes(mine: Sequence[tuple[str, str]], world: World) -> bool:
    """Whether all ranks have the same digests. Every rank calls it. Rank 0 prints the first tensor that differs.

    Args:
        mine: one (description, digest) per tensor, in order.
    """
    everyone = world.transport.gather_objects(list(mine), "hvd.identical")
    rows = list(itertools.zip_longest(*everyone, fillvalue=("nothing", "")))
    unlike = [row for row in rows if len({digest for _, digest in row}) > 1]
    if unlike and world.transport.rank == 0:
        first = unlike[0]
        described = next(text for text, _ in first if text != "nothing")
        ranks = [str(rank) for rank, (_, digest) in enumerate(first) if digest != first[0][1]]
        listed = ", ".join(ranks[:8]) + (", ..." if len(ranks) > 8 else "")
        print(
            f"hvdplus: not identical: {described} on rank{'s' if len(ranks) > 1 else ''} {listed} is not rank 0's; "
            f"{len(unlike)} of {len(rows)} tensors differ",
            file=sys.stderr,
            flush=True,
        )
    return not unlike


def check_may_rejoin(world: World) -> None:
    """Raise ValueError if an optimizer of ``world`` cannot go on among other ranks than it has now."""
    if world.transport.part:
        raise ValueError(
            "Ranks have come or gone, and an optimizer of a process set or group cannot follow them: which ranks would "
            f"belong to it is unknown. Received: one of ranks {', '.join(map(str, world.transport.part))}"
        )


def next_instance() -> int:
    """A number for an optimizer or tape, from 0; equal on all ranks if they make them in the same order."""
    global _instances
    _instances += 1
    return _instances - 1


def say_if_nothing_was_wrapped() -> None:
    """At the end of a process of several ranks that has not failed: a job without an optimizer of ours trains each of
    its ranks by itself, and nobody else would say so."""
    if not _instances and not hasattr(sys, "last_value"):
        print(
            "hvdplus: no optimizer was wrapped on rank 0 (hvd.DistributedOptimizer, hvd.ddp.attach), so hvdplus has "
            "exchanged no gradients there",
            file=sys.stderr,
        )


def open_log(settings: Settings, world: World, instance: int, rejoined: int = 0) -> RunLog:
    """The run log of the job's ``instance``-th optimizer (from 0); a new log each time that it has ``rejoined`` other
    ranks. Only rank 0 writes a file, and only if the setting ``run_log`` names one."""
    path = settings.run_log if world.transport.rank == 0 else ""
    part = world.transport.part  # groups of ranks have logs of their own
    ending = f".ranks{'-'.join(map(str, part))}" if part else ""
    ending += (f".{instance}" if instance else "") + (f".rejoined{rejoined}" if rejoined else "")
    return RunLog(path + ending if path else None, keep=world.transport.rank == 0)


def _one(compression: Any, ops: Ops[Any]) -> Compressor:
    """The compressor that a script asked for."""
    if isinstance(compression, str):
        return parse(compression)
    if isinstance(compression, Compressor):
        return compression
    if callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None)):
        return HorovodCompressor(compression, ops)
    if isinstance(compression, type) and issubclass(compression, Compressor):
        raise ValueError(f"compression wants an object, such as {compression.__name__}(). Received: {compression!r}")
    raise ValueError(
        f"compression wants 'auto', one of {', '.join(sorted(known()))} with its parameters, a hvdplus Compressor, or "
        f"a class with Horovod's compress and decompress. Received: {compression!r}"
    )
