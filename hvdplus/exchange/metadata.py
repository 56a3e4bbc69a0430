"""The metadata tensor: the few numbers that ranks tell each other in every step, in one small all-reduce.

    float32:  SUMS | SKETCHES | one slot a rank | one flag a parameter

SUMS and SKETCHES (``sketch.py``) add up over ranks. For numbers that do not (minima, agreement), every rank fills its
own slot and leaves the others zero, so that the sum is a gather. A flag counts the ranks that have a gradient of the
parameter. The summed tensor is read once a step, in NumPy: a few microseconds, under 0.1 ms for 4,096 ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvdplus.control.meter import StepTimes
from hvdplus.exchange.sketch import CELLS, cosine, of_sum


class Sums(NamedTuple):
    """Numbers that add up over ranks."""

    nonfinite: float = 0.0
    """1: a value that this rank sent is not finite (checked only where a residual or context would keep it)."""
    overflow: float = 0.0
    """1: values lie so far beyond the level's scale that all ranks send the rest in full width."""
    step: float = 0.0
    """Seconds of the *previous* step."""
    loss: float = 0.0
    losses: float = 0.0
    """1 if this rank reported a loss."""
    sketch_square: float = 0.0
    sketched_square: float = 0.0
    """Squares of the norms of this rank's sketch of its gradients, and of the gradients that it shows."""
    residual_sketch_square: float = 0.0
    """Square of the norm of this rank's sketch of its next residual."""


class Slot(NamedTuple):
    """Numbers that do not add up. Times are seconds of the *previous* step, see ``StepTimes``."""

    codec: float = 0.0
    exposed_comm: float = 0.0
    input_wait: float = 0.0
    probe: float = 0.0  # up to here: NOT_COMPUTING
    comm: float = 0.0
    """All communication, hidden or not."""
    gradient_norm: float = 0.0
    residual_norm: float = 0.0
    """Euclidean norms of this rank's fresh gradient and of its next residual; 0 in steps that do not measure them."""
    learning_rate: float = 0.0
    """0: unknown."""
    contexts: float = 0.0
    """24 bits of the checksum of all contexts that this step used."""
    weights: float = 0.0
    """24 bits of the checksum of the parameters, in steps that check them; else 0."""
    missing: float = 0.0
    """24-bit hash of which variables are not updated, where that has to be equal on all ranks."""
    added: float = 0.0
    """Number of parameters that were unfrozen or added since the last step."""


ROW = {name: row for row, name in enumerate(Slot._fields)}
"""Field of a slot -> its place."""
NOT_COMPUTING = 4
"""The first fields are times in which a rank does not compute."""
AGREED = ("learning_rate", "contexts", "weights", "missing", "added")
"""Fields of a slot that have to be equal on all ranks."""
TURNED = 2
"""A flag is this times the number of ranks, more than all counts, on a rank whose gradient has turned sparse."""


class Report(NamedTuple):
    """One rank's metadata."""

    sums: Sums = Sums()
    slot: Slot = Slot()
    sketch: Sequence[float] = ()
    """Of this rank's gradients; empty in steps that do not measure them."""
    residual_sketch: Sequence[float] = ()
    """Of its next residual."""


class Metadata(NamedTuple):
    """All ranks' metadata, as every rank reads it."""

    nonfinite: bool
    overflow: bool
    times: StepTimes
    """Of the previous step, reduced over ranks."""
    loss: float
    """Mean over the ranks that reported one; NaN if none did."""
    learning_rate: float
    gradient_norm: float
    residual_norm: float
    """Root mean squares of the ranks' norms."""
    cosine: float
    """Between the gradients of two ranks, on average; NaN: not measured."""
    odd: dict[str, list[int]]
    """Field that has to agree -> ranks that differ from rank 0; empty where all agree."""
    added: list[int]
    """Number of added parameters, rank by rank; empty: none."""
    used: np.ndarray
    """float32, one a parameter: how many ranks have a gradient of it."""
    turned: list[int]
    """Parameters whose gradients have turned sparse on some rank."""
    compute: np.ndarray
    """(ranks,): seconds of each rank's own computation in the previous step."""
    error: float = math.nan
    """Norm of the sum of all ranks' next residuals over that of the sum of their gradients; NaN: not measured.

    The sum is what arrives late. Parts of residuals that cancel between ranks never arrive, and are not missed: most of
    those of ``powersgd``. Where there are no sketches: the ranks' own norms, as root mean squares.
    """


SKETCHES = len(Sums._fields)
"""Where they begin in the metadata tensor."""


def length(ranks: int, parameters: int) -> int:
    """Floats of the metadata tensor."""
    return SKETCHES + 2 * CELLS + ranks * len(Slot._fields) + parameters


def pack(rank: int, ranks: int, report: Report, flags: Sequence[float]) -> np.ndarray:
    """This rank's metadata tensor. ``flags``: one a parameter, see ``flag``."""
    total = np.zeros(length(ranks, len(flags)), np.float32)
    own = length(rank, 0)
    with np.errstate(over="ignore"):  # a loss beyond float32 arrives as infinity
        total[:SKETCHES] = report.sums
        if report.sketch:
            total[SKETCHES : length(0, 0)] = [*report.sketch, *report.residual_sketch]
        total[own : own + len(Slot._fields)] = report.slot
    total[length(ranks, 0) :] = flags
    return total


def flag(has_gradient: bool, turned_sparse: bool, ranks: int) -> float:
    """A rank's flag of a parameter: 1 for a gradient, ``TURNED * ranks`` if that has turned sparse, else 0."""
    return float(TURNED * ranks if turned_sparse else has_gradient)


def read(total: np.ndarray, ranks: int) -> Metadata:
    """All ranks' metadata from the summed tensor (float32, one-dimensional)."""
    sums, behind = Sums(*total[:SKETCHES].tolist()), length(ranks, 0)
    # One row a field: with many ranks NumPy is several times quicker along rows.
    fields = np.ascontiguousarray(total[length(0, 0) : behind].reshape(ranks, len(Slot._fields)).T)
    # A field differs where its minimum is not its maximum; NaN, unequal to itself, is found as well.
    low, high = fields.min(axis=1).tolist(), fields.max(axis=1).tolist()
    least, most = Slot(*low), Slot(*high)
    used, turned = total[behind:], list[int]()
    if len(used) and used.max() > ranks:
        turned = np.flatnonzero(used > (TURNED - 0.5) * ranks).tolist()
    norms, alike, error = (0.0, 0.0), math.nan, math.nan
    if most.gradient_norm or most.residual_norm or math.isnan(most.gradient_norm + most.residual_norm):  # measured
        at = ROW["gradient_norm"]
        norms = tuple(np.sqrt(np.square(fields[at : at + 2].astype(np.float64)).mean(axis=1)).tolist())
        gradients, residuals = total[SKETCHES : SKETCHES + CELLS], total[SKETCHES + CELLS : length(0, 0)]
        alike = cosine(gradients, sums.sketch_square, sums.sketched_square, ranks)
        error = _error(norms, of_sum(gradients, sums.sketch_square), of_sum(residuals, sums.residual_sketch_square))
    times = StepTimes(
        step=sums.step / ranks,
        codec=most.codec,
        exposed_comm=least.exposed_comm,
        input_wait=most.input_wait,
        overlapped_comm=least.comm - least.exposed_comm,
        probe=least.probe,
    )
    return Metadata(
        nonfinite=not sums.nonfinite < 0.5,
        overflow=not sums.overflow < 0.5,
        times=times,
        loss=sums.loss / sums.losses if sums.losses else math.nan,
        learning_rate=float(fields[ROW["learning_rate"], 0]),
        gradient_norm=norms[0],
        residual_norm=norms[1],
        cosine=alike,
        odd=_odd(fields, low, high),
        added=[] if not most.added else fields[ROW["added"]].astype(int).tolist(),
        used=used,
        turned=turned,
        compute=np.maximum(times.step - fields[:NOT_COMPUTING].sum(axis=0), 0.0),
        error=error,
    )


def _error(norms: Sequence[float], gradients: float, residuals: float) -> float:
    """See ``Metadata.error``. ``norms``: the ranks' own, of gradients and residuals; the others: ``of_sum`` of each."""
    if not norms[0]:
        return math.nan
    known = gradients > 0 and not math.isnan(residuals)
    return norms[1] / norms[0] * (math.sqrt(residuals / gradients) if known else 1.0)


def _odd(fields: np.ndarray, low: list[float], high: list[float]) -> dict[str, list[int]]:
    found = {}
    for name in AGREED:
        row = ROW[name]
        if low[row] != high[row]:
            told = fields[row]
            both_nan = np.isnan(told) & np.isnan(told[0])  # whatever the bits of a NaN are
            ranks = np.flatnonzero((told != told[0]) & ~both_nan).tolist()
            if ranks:  # else NaN everywhere
                found[name] = ranks
    return found


def check_agreement(metadata: Metadata, level: str, note: str = "") -> None:
    """Raise an error, on every rank alike, if ranks differ in a field that has to be equal.

    Weights are not checked here: their error names a parameter, which takes another gather.

    Args:
        level: name of the level that ran.
        note: ends the message.

    Raises:
        RuntimeError: the message names the ranks and the way out.
    """
    if not metadata.odd:
        return
    odd = {name: ", ".join(map(str, ranks)) for name, ranks in metadata.odd.items()}
    if "added" in odd:
        raise RuntimeError(
            "Parameters have to be unfrozen or added to the optimizer on all ranks at the same step. New parameters, "
            f"rank by rank: {', '.join(map(str, metadata.added))}.{note}"
        )
    if "missing" in odd:
        raise RuntimeError(
            "Some variables have a gradient on some ranks only: the variables without one differ between rank 0 and "
            f"rank(s) {odd['missing']}. Every rank has to compute gradients of the same variables: freeze layers on "
            f"all ranks alike, and add unused variables to the loss with a factor of 0.{note}"
        )
    if "contexts" in odd:
        raise RuntimeError(
            f"The contexts of {level} differ between rank 0 and rank(s) {odd['contexts']}, so their sum has no "
            "meaning. This happens when ranks have different library versions or CPU capabilities: make them equal, or "
            f"set HVDPLUS_COMPRESSION=fp16.{note}"
        )
    if "learning_rate" in odd:
        raise RuntimeError(
            f"The learning rate differs between rank 0 and rank(s) {odd['learning_rate']}, so their weights will "
            "drift apart. Set it from values that all ranks share: a scheduler that follows a loss needs all ranks' "
            f"mean loss (hvd.allreduce), and a loaded scheduler has to be loaded on every rank.{note}"
        )


def hash24(values: bytes) -> float:
    """24 bits of a checksum: as many as float32 holds exactly."""
    return float(zlib.crc32(values) & 0xFFFFFF)


def hash_flags(flags: Sequence[bool]) -> float:
    """24 bits that tell which flags are set."""
    return hash24(np.packbits(np.array(flags, bool)).tobytes())


def fold24(checksum: int) -> float:
    """24 bits that depend on all bits of a 64-bit checksum."""
    bits = checksum & 0xFFFFFFFFFFFFFFFF
    return float((bits ^ bits >> 24 ^ bits >> 48) & 0xFFFFFF)


def weights_differ(ranks: Sequence[int], checksums: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """The message for ranks whose parameters are no longer equal.

    Args:
        ranks: those that differ from rank 0.
        checksums: rank by rank, one per parameter.
        names: of the parameters.
    """
    first = next((i for i, each in enumerate(zip(*checksums, strict=True)) if len(set(each)) > 1), 0)
    return (
        f"The weights of rank(s) {', '.join(map(str, ranks))} no longer equal those of rank 0: {names[first]} is the "
        "first that differs. Broadcast them before training (hvd.broadcast_parameters, or Keras' "
        "BroadcastGlobalVariablesCallback), take the same steps with the same learning rate on every rank, and change "
        "weights on all ranks alike. HVDPLUS_WEIGHTS_CHECK_STEPS=0 turns this check off."
    )
