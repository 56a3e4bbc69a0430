"""One step's exchange, in pieces that every framework shares.

    gradient ─► join residual ─► encode ─► all-reduce ─► decode ─► mean gradient
                                    └► pending residual      └► next context

A *plan* says which level runs in a step; a *program* is one fixed piece of code that a plan can pick (level, phase,
draining or warming up another level or neither), so that a compiled graph holds each of them once. The *side tensor* is
the one small extra sum a step, for what does not add up: every rank writes its own slot and zeros elsewhere, so that
the sum is a gather.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvdplus.compression import Compressor, NoCompression, parse
from hvdplus.meter import StepTimes


class Program(NamedTuple):
    """A piece of code that a plan picks; the same list in the same order on every rank."""

    level: int
    phase: int
    drains: bool
    """Whether it pays out a residual on the way back to dense."""
    warms: int = 0
    """A level whose contexts learn from this dense step; 0: none."""


class Plan(NamedTuple):
    """What one step does; equal on every rank, because it is made from shared values only."""

    level: int = 0
    phase: int = 0
    release: float = 0.0
    """Share of the residual that joins the gradient; 0: none is outstanding, or it waits."""
    warms: int = 0
    """A level whose contexts learn from this dense step; 0: none."""
    gauge: bool = False
    """Whether ranks say how large their gradients and residuals are."""
    sounding: int = 0
    """Bytes of a sum of zeros that is sent after all others, to see how long it takes; 0: none."""


class Ladder:
    """The levels of a run, least compression first, and the programs that run them."""

    def __init__(self, levels: Sequence[str | Compressor]) -> None:
        """Raises ValueError for an unknown or repeated name."""
        self.compressors: tuple[Compressor, ...] = tuple(
            parse(level) if isinstance(level, str) else level for level in levels
        )
        self.names: tuple[str, ...] = tuple(compressor.name for compressor in self.compressors)
        self._names_on_the_wire = [re.sub(r"[^A-Za-z0-9_.]", "_", name) for name in self.names]
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"The ladder names a level twice. Received: {', '.join(self.names)}")
        self.programs: tuple[Program, ...] = tuple(
            program
            for level, compressor in enumerate(self.compressors)
            for phase in range(compressor.phases)
            for program in (
                [Program(level, phase, False)]
                if compressor.keeps_residual
                else [Program(level, phase, False), Program(level, phase, True)]
            )
        ) + tuple(
            Program(0, 0, False, warms=level)
            for level, compressor in enumerate(self.compressors)
            if level and compressor.warms
        )

    def program(self, plan: Plan) -> int:
        """Index of the program that runs ``plan``."""
        drains = plan.release > 0 and not self.compressors[plan.level].keeps_residual
        return self.programs.index(Program(plan.level, plan.phase, drains, plan.warms))

    def settles(self, plan: Plan) -> bool:
        """Whether the step changes residuals or contexts, or could hide what is not finite, and so must know in its own
        step that all went well."""
        return plan.release > 0 or plan.warms > 0 or self.compressors[plan.level].settles

    def plain(self, plan: Plan) -> bool:
        """Whether the step sends gradients as they are, and nothing besides."""
        return isinstance(self.compressors[plan.level], NoCompression) and not (plan.release or plan.warms)

    def tensor_name(self, prefix: str, bucket: int, plan: Plan) -> str:
        """All-reduce name. A payload's length depends on level and phase, so both are part of it: a name that keeps
        its shape stays in Horovod's response cache. Letters are those that TensorFlow allows in op names."""
        return f"{prefix}.{bucket}.{self._names_on_the_wire[plan.level]}.{plan.phase}"


class SideSlot(NamedTuple):
    """What one rank says in one step. All values travel as float32."""

    nonfinite: float = 0.0
    """1 if what this rank sent held NaN or infinity (looked for only where a residual or a context would keep it)."""
    checksum_high: float = 0.0
    checksum_low: float = 0.0
    """Two 16-bit halves of the checksum of the contexts this step used; float32 is exact for those."""
    step: float = 0.0
    codec: float = 0.0
    exposed_comm: float = 0.0
    input_wait: float = 0.0
    overlapped_comm: float = 0.0
    sounding: float = 0.0
    """Seconds of the *previous* step, see ``StepTimes``."""
    loss: float = 0.0
    has_loss: float = 0.0
    """1 if ``loss`` was reported."""
    learning_rate: float = 0.0
    """0: unknown."""
    gradient_norm: float = 0.0
    residual_norm: float = 0.0
    """Euclidean norms of this rank's fresh gradient and of what it keeps back after sending; 0 where the plan does not
    gauge them."""
    newcomers: float = 0.0
    """Parameters that were unfrozen or added since the last step."""
    absent: float = 0.0
    """Which variables are not updated (see ``told_apart``), where that has to be alike on all ranks."""

    @property
    def times(self) -> StepTimes:
        """The previous step's times."""
        return StepTimes(self.step, self.codec, self.exposed_comm, self.input_wait, self.overlapped_comm, self.sounding)


SLOT_FLOATS = len(SideSlot._fields)


def side_tensor(rank: int, ranks: int, slot: SideSlot, used: Sequence[float]) -> np.ndarray:
    """This rank's side tensor: float32, ``ranks * SLOT_FLOATS`` floats of slots, then ``used`` (one a parameter)."""
    # Made and read as lists: where a sum has just come through the caches, every other function called costs
    # microseconds, and NumPy's are many.
    mine = [0.0] * (ranks * SLOT_FLOATS)
    mine[rank * SLOT_FLOATS : (rank + 1) * SLOT_FLOATS] = slot
    with np.errstate(over="ignore"):  # a loss beyond float32 arrives as infinity
        return np.array([*mine, *used], np.float32)


def read_side(total: list[float] | np.ndarray, ranks: int) -> tuple[list[SideSlot], list[float]]:
    """All ranks' slots and, for every parameter, how many ranks used it, from the sum of the side tensors."""
    values: list[float] = total.tolist() if isinstance(total, np.ndarray) else total
    behind = ranks * SLOT_FLOATS
    slots = [SideSlot(*values[start : start + SLOT_FLOATS]) for start in range(0, behind, SLOT_FLOATS)]
    return slots, values[behind:]


def check_newcomers(slots: Sequence[SideSlot]) -> None:
    """Parameters have to join on all ranks at the same step.

    Raises:
        RuntimeError: they do not; on every rank.
    """
    counts = [round(slot.newcomers) for slot in slots]
    if len(set(counts)) > 1:
        raise RuntimeError(
            "Parameters that were unfrozen or added to the optimizer have to be so on all ranks at the same step. "
            f"Received, rank by rank: {', '.join(map(str, counts))} of them."
        )


def check_absent(slots: Sequence[SideSlot]) -> None:
    """Where a variable without a gradient is left as it is, it has to be so on all ranks, or they drift apart.

    Raises:
        RuntimeError: it is not; on every rank.
    """
    odd = [rank for rank, slot in enumerate(slots) if slot.absent != slots[0].absent]
    if odd:
        raise RuntimeError(
            "Some variables have a gradient on some ranks only: what has none differs between rank 0 and rank(s) "
            f"{', '.join(map(str, odd))}. Every rank has to compute gradients of the same variables: freeze layers on "
            "all ranks alike, and add unused ones to the loss with a factor of 0."
        )


def told_apart(flags: Sequence[bool]) -> float:
    """24 bits of a checksum of flags: as many as float32 holds exactly."""
    return float(zlib.crc32(np.packbits(np.array(flags, bool)).tobytes()) & 0xFFFFFF)


def split_checksum(checksum: int) -> tuple[float, float]:
    """High and low 16 bits of a checksum's lowest 32 bits."""
    return float(checksum >> 16 & 0xFFFF), float(checksum & 0xFFFF)
