"""The metadata tensor: what ranks report, and what every rank reads of it."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from coordinating import heard, report
from frameworks import examples
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.control.meter import StepTimes, reduce_times
from hvdplus.exchange.metadata import (
    AGREED,
    Metadata,
    Report,
    Slot,
    Sums,
    check_agreement,
    flag,
    fold24,
    hash24,
    hash_flags,
    length,
    pack,
    read,
    weights_differ,
)
from hvdplus.exchange.sketch import CELLS, Part, part_of, signs, square

quickly = examples(100)
floats = st.floats(width=32)  # NaN and infinities too: every value that can travel
slots = st.builds(Slot, *([floats] * len(Slot._fields)))
seconds = st.floats(0, 1000, width=32)


def total(reports: list[Report], flags: np.ndarray) -> np.ndarray:
    """Sum of the metadata tensors. ``flags``: (ranks, parameters)."""
    ranks = len(reports)
    tensors = [pack(rank, ranks, mine, flags[rank]) for rank, mine in enumerate(reports)]
    return np.sum(tensors, axis=0, dtype=np.float32)


@given(st.lists(slots, min_size=1, max_size=5), st.integers(0, 6), st.randoms(use_true_random=False))
@quickly
def test_a_sum_of_slots_is_a_gather(told: list[Slot], parameters: int, random: object) -> None:
    """What every rank reported is there, bit for bit, NaN of one rank included, and how many used a parameter."""
    ranks = len(told)
    rng = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]
    used = rng.integers(0, 2, (ranks, parameters)).astype(bool)
    tensors = [pack(rank, ranks, Report(slot=slot), used[rank]) for rank, slot in enumerate(told)]
    assert all(tensor.dtype == np.float32 and tensor.shape == (length(ranks, parameters),) for tensor in tensors)
    for order in (tensors, tensors[::-1]):  # a ring adds in any order
        summed = np.sum(order, axis=0, dtype=np.float32)
        table = summed[length(0, 0) :][: ranks * len(Slot._fields)].reshape(ranks, -1)
        assert np.array_equal(table, np.array(told, np.float32), equal_nan=True)
        with np.errstate(all="ignore"):
            metadata = read(summed, ranks)
        assert metadata.used.tolist() == used.sum(axis=0).tolist()
        for name in AGREED:
            theirs = [getattr(slot, name) for slot in told]
            unlike = [rank for rank in range(ranks) if not np.array_equal(theirs[rank], theirs[0], equal_nan=True)]
            assert metadata.odd.get(name, []) == unlike


def test_one_ranks_nan_leaves_the_others_alone() -> None:
    metadata = heard(
        report(loss=0.5, losses=1, learning_rate=0.5),
        report(loss=math.nan, losses=1, learning_rate=0.5, gradient_norm=math.nan),
        report(step=3.0, learning_rate=0.5, residual_norm=4.0),
    )
    assert math.isnan(metadata.loss) and math.isnan(metadata.gradient_norm)
    assert metadata.times.step == 1.0 and metadata.learning_rate == 0.5 and not metadata.odd
    assert metadata.residual_norm == pytest.approx(4.0 / math.sqrt(3))
    assert not metadata.nonfinite and not metadata.overflow


@given(st.lists(st.builds(StepTimes, *([seconds] * 6)), min_size=1, max_size=6))
@quickly
def test_times_are_those_of_the_job(told: list[StepTimes]) -> None:
    """As ``reduce_times`` makes one set of figures of all ranks'."""
    found, expected = heard(*map(report, told)).times, reduce_times(told)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-3)
    assert found.comm == pytest.approx(min(times.comm for times in told), rel=1e-5, abs=1e-3)


def test_times_of_one_rank_come_back_as_they_were_measured() -> None:
    times = StepTimes(step=0.25, codec=0.125, exposed_comm=0.0625, input_wait=0.03125, overlapped_comm=2.0, probe=0.5)
    assert heard(report(times)).times == times


@given(st.lists(st.tuples(st.floats(-100, 100, width=32), st.booleans()), min_size=1, max_size=6))
@quickly
def test_the_loss_is_the_mean_over_the_ranks_that_reported_one(told: list[tuple[float, bool]]) -> None:
    metadata = heard(*(report(loss=loss * says, losses=says) for loss, says in told))
    losses = [loss for loss, says in told if says]
    assert metadata.loss == pytest.approx(np.mean(losses) if losses else math.nan, nan_ok=True, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("field", ["nonfinite", "overflow"])
@pytest.mark.parametrize(
    ("told", "expected"), [((0, 0, 0), False), ((0, 1, 0), True), ((1, 1, 1), True), ((0, math.nan, 0), True)]
)
def test_one_rank_is_enough(field: str, told: tuple[float, ...], expected: bool) -> None:
    metadata = heard(*(report(**{field: value}) for value in told))
    assert getattr(metadata, field) is expected
    assert getattr(metadata, "overflow" if field == "nonfinite" else "nonfinite") is False


def test_a_loss_beyond_float32_arrives_as_infinity() -> None:
    assert heard(report(loss=1e300, losses=1)).loss == math.inf


@pytest.mark.parametrize("ranks", [1, 2, 7, 100])
def test_a_gradient_that_turned_sparse_on_one_rank_outweighs_all_ranks_gradients(ranks: int) -> None:
    """However many ranks have the gradient, and wherever it turned."""
    flags = np.array(
        [
            [flag(True, False, ranks), flag(True, rank == ranks - 1, ranks), flag(False, False, ranks)]
            for rank in range(ranks)
        ]
    )
    metadata = read(total([Report()] * ranks, flags), ranks)
    assert metadata.turned == [1]
    assert (metadata.used > 0).tolist() == [True, True, False]
    everywhere = read(total([Report()] * ranks, np.full((ranks, 1), flag(True, True, ranks))), ranks)
    assert everywhere.turned == [0]


def test_added_parameters_are_told_rank_by_rank() -> None:
    assert heard(report(added=0), report(added=3)).added == [0, 3]
    assert heard(report(), report()).added == []


@pytest.mark.parametrize("field", AGREED)
def test_agreement_is_checked_in_every_field_but_weights(field: str) -> None:
    """The error about weights names a parameter, which takes another round."""
    metadata: Metadata = heard(report(), report(**{field: 1.0}), report())
    assert metadata.odd == {field: [1]}
    if field == "weights":
        check_agreement(metadata, "int8")
    else:
        with pytest.raises(RuntimeError):
            check_agreement(metadata, "int8")


def test_weights_that_differ_name_the_first_parameter() -> None:
    message = weights_differ([1, 3], [[5, 6, 7], [5, 0, 0], [5, 6, 7], [5, 6, 1]], ["a", "b", "c"])
    assert "rank(s) 1, 3" in message and "b is the first that differs" in message
    assert "HVDPLUS_WEIGHTS_CHECK_STEPS=0" in message


@given(st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**33), 2**33)))
@quickly
def test_checksums_survive_float32(checksum: int) -> None:
    folded = fold24(checksum)
    assert folded == np.float32(folded) == int(folded) and 0 <= folded < 2**24


@pytest.mark.parametrize("checksum", [0, 1, -1, 0xFFFF, 0x10000, 2**31, -(2**31), 2**63 - 1, -(2**63)])
def test_checksums_that_differ_in_one_bit_differ_afterwards(checksum: int) -> None:
    """In any of 64."""
    for bit in range(64):
        assert fold24((checksum ^ (1 << bit)) & (2**64 - 1)) != fold24(checksum)


def test_hashes_are_what_float32_holds() -> None:
    seen = [hash24(bytes([one, two])) for one in range(64) for two in range(64)]
    assert all(float(np.float32(each)) == each and 0 <= each < 2**24 for each in seen)
    assert len(set(seen)) > 4090


def test_flags_are_told_apart_in_what_float32_holds() -> None:
    for count in (0, 1, 9, 12):
        seen = [hash_flags([bool(number >> bit & 1) for bit in range(count)]) for number in range(1 << count)]
        assert len(set(seen)) == len(seen)
        assert all(float(np.float32(each)) == each for each in seen)


def test_4096_ranks_are_read_in_no_time() -> None:
    """Once a step, on every rank."""
    ranks = 4096
    reports = [report(step=0.1, exposed_comm=0.01, learning_rate=0.1, gradient_norm=2.0, residual_norm=1.0)] * ranks
    slots = np.array([mine.slot for mine in reports], np.float32)
    first = np.array([*reports[0].sums, *[0.0] * 2 * CELLS], np.float32)
    summed = np.concatenate([first * ranks, slots.ravel(), np.full(200, ranks, np.float32)])
    assert summed.shape == (length(ranks, 200),)
    took = []
    for _ in range(20):
        began = time.perf_counter()
        metadata = read(summed, ranks)
        took.append(time.perf_counter() - began)
    assert metadata.times.step == pytest.approx(0.1) and metadata.gradient_norm == 2.0 and not metadata.odd
    assert min(took) < 0.001, f"{min(took) * 1e3:.3f} ms"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("alike", [True, False])
def test_what_cancels_in_the_sum_is_no_error(ranks: int, alike: bool) -> None:
    """Residuals that are the same on every rank count whole; those whose sum is zero hardly count."""
    rng = np.random.default_rng(ranks)
    gradient, held = rng.standard_normal(64 * CELLS), rng.standard_normal(64 * CELLS)
    residuals = [held] * ranks if alike else [held * math.cos(2 * math.pi * rank / ranks) for rank in range(ranks)]
    errors = []
    for turn in range(40):
        part = part_of((CELLS, 64), 0, turn)
        assert part is not None

        def sketched(vector: np.ndarray, part: Part = part) -> np.ndarray:
            cells = vector[: CELLS * part.rows].reshape(CELLS, part.rows)[:, part.column : part.column + part.width]
            return cells @ signs()[part.sign : part.sign + part.width] * part.scale

        totals = []
        for rank, residual in enumerate(residuals):
            sums = Sums(
                sketch_square=square(sketched(gradient)),
                sketched_square=float(gradient @ gradient),
                residual_sketch_square=square(sketched(residual)),
            )
            slot = Slot(gradient_norm=np.linalg.norm(gradient), residual_norm=np.linalg.norm(residual))
            mine = Report(sums, slot, sketched(gradient).tolist(), sketched(residual).tolist())
            totals.append(pack(rank, ranks, mine, ()))
        errors.append(read(np.sum(totals, axis=0, dtype=np.float32), ranks).error)
    whole = np.linalg.norm(sum(residuals)) / np.linalg.norm(ranks * gradient)
    assert np.median(errors) == pytest.approx(whole, rel=0.1) if alike else np.median(errors) < 0.35
