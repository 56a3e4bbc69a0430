"""From what the user asked for to what a run uses: its ladder of levels and its run log."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hvdplus.compression import TABLE, parse
from hvdplus.exchange import Ladder
from hvdplus.runlog import RunLog
from hvdplus.settings import Settings
from hvdplus.transport import World

AUTO = "auto"

HOROVODS_NAMES = {"NoneCompressor": "none", "FP16Compressor": "fp16"}
"""Horovod spells its two compressors as classes."""


class Compression:
    """Horovod's ``Compression`` in a job without Horovod, for scripts that name it."""

    none = type("NoneCompressor", (), {})
    fp16 = type("FP16Compressor", (), {})


def choose_ladder(compression: Any, settings: Settings, world: World) -> tuple[Ladder, bool]:
    """The ladder to run, and whether a controller chooses from it.

    Args:
        compression: ``auto`` (then ``HVDPLUS_COMPRESSION`` decides, ``auto`` by default), a level such as
            ``lowrank:4``, or Horovod's own ``Compression.none`` or ``Compression.fp16``.

    Raises:
        ValueError: unknown compression; or a fixed level that needs equal CPUs and libraries where ranks differ.
    """
    name = _spelling(compression)
    # Scripts written for Horovod name its classes because they have to name something: the environment may turn that.
    if name == AUTO or (not isinstance(compression, str) and settings.compression != AUTO):
        name = settings.compression
    if name == AUTO:
        compressors = [parse(level) for level in settings.ladder]
        if compressors[0].name != "none":
            raise ValueError(
                f"The ladder must begin with none, which every other level is measured against. "
                f"Received: HVDPLUS_LADDER={','.join(settings.ladder)}"
            )
        return Ladder([c.name for c in compressors if not (c.uses_products and world.differences)]), True
    compressor = parse(name)
    if compressor.uses_products and world.differences:
        raise ValueError(
            f"compression={name!r} needs the same CPU capability and library versions on all ranks, or their contexts "
            f"drift apart. The ranks differ in {'; '.join(world.differences)}. Use fp16 or none, or make them equal."
        )
    return Ladder([compressor.name]), False


def check_same_model(mine: Sequence[Any], world: World) -> None:
    """All ranks must exchange the same tensors, or they would wait for each other for ever. Every rank calls it.

    Args:
        mine: one comparable, picklable description a parameter, in order.

    Raises:
        ValueError: another rank has other parameters; on every rank, with the first that differs.
    """
    mine = list(mine)
    everyone = world.transport.gather_objects(mine)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            pairs = itertools.zip_longest(everyone[0], theirs)
            first = next(pair for pair in pairs if pair[0] != pair[1])
            raise ValueError(
                f"The model differs between ranks 0 and {rank}: {first[0]} against {first[1]}. All ranks must optimise "
                "the same parameters in the same order."
            )


def open_log(settings: Settings, world: World, instance: int) -> RunLog:
    """The run log of the job's ``instance``-th optimizer (from 0); only rank 0 writes a file, and only if asked to."""
    path = settings.run_log if world.transport.rank == 0 else ""
    return RunLog(f"{path}.{instance}" if path and instance else path or None)


def _spelling(compression: Any) -> str:
    if isinstance(compression, str):
        return compression
    if isinstance(getattr(compression, "name", None), str) and hasattr(compression, "payload_bytes"):
        return str(compression.name)
    horovod = HOROVODS_NAMES.get(getattr(compression, "__name__", ""))
    if horovod:
        return horovod
    raise ValueError(
        f"compression wants 'auto' or one of {', '.join(sorted(TABLE))}, or Horovod's Compression.none or "
        f"Compression.fp16. Received: {compression!r}"
    )
