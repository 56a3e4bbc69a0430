"""What every framework's exchange shares: the ladder with its programs and names, and the side tensor."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from frameworks import examples
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.compression import HorovodCompressor, parse
from hvdplus.exchange import (
    SLOT_FLOATS,
    Ladder,
    Plan,
    Program,
    SideSlot,
    read_side,
    side_tensor,
    split_checksum,
    told_apart,
)
from hvdplus.meter import StepTimes

NAMES = ("none", "fp16", "qsgd:8", "int8:stochastic", "topk:0.2", "lowrank:1", "lowrank:4", "lowrank:4+fp16")
OP_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")
"""What TensorFlow accepts as the name of an operation."""

quickly = examples(100)


def every_plan(ladder: Ladder) -> list[Plan]:
    """All plans that a ladder allows, with a few shares of a residual."""
    return [
        Plan(level, phase, release)
        for level, compressor in enumerate(ladder.compressors)
        for phase in range(compressor.phases)
        for release in ((1.0,) if compressor.keeps_residual else (0.0, 0.1, 1.0))
    ] + [Plan(warms=level) for level, compressor in enumerate(ladder.compressors) if level and compressor.warms]


# -- the ladder --------------------------------------------------------------------------------------------------------


def test_programs_of_the_ladder() -> None:
    """A level without a residual needs a second program that pays one out, a level with one has one for every side;
    for a level that learns there is a dense one from which it does."""
    assert Ladder(("none", "lowrank:4", "qsgd:8", "randomk:0.1")).programs == (
        Program(0, 0, False),
        Program(0, 0, True),
        Program(1, 0, False),
        Program(1, 1, False),
        Program(2, 0, False),
        Program(2, 0, True),
        Program(3, 0, False),
        Program(0, 0, False, warms=1),
        Program(0, 0, False, warms=2),
    )


def test_the_first_level_is_never_warmed_up() -> None:
    """Steps before it would have to run at it."""
    assert Ladder(("lowrank:4", "int8")).programs == (
        Program(0, 0, False),
        Program(0, 1, False),
        Program(1, 0, False),
        Program(0, 0, False, warms=1),
    )


@pytest.mark.parametrize("names", [NAMES, ("none",), ("lowrank:2",), ("fp16", "none"), ("none", "qsgd:8", "int8")])
def test_every_plan_has_its_program(names: tuple[str, ...]) -> None:
    ladder = Ladder(names)
    assert len(set(ladder.programs)) == len(ladder.programs)
    used = set()
    for plan in every_plan(ladder):
        number = ladder.program(plan)
        program = ladder.programs[number]
        assert (program.level, program.phase, program.warms) == (plan.level, plan.phase, plan.warms)
        lossless = not ladder.compressors[plan.level].keeps_residual
        assert program.drains == (lossless and plan.release > 0)
        used.add(number)
    assert used == set(range(len(ladder.programs))), "no program that no plan picks"


def test_a_step_settles_if_anything_would_keep_or_hide_what_is_not_finite() -> None:
    """Residuals and contexts keep it; integers hide it, also where there is no residual. A dense step does neither."""
    ladder = Ladder(NAMES)
    settling = {
        (ladder.names[plan.level], plan.release, ladder.names[plan.warms]): ladder.settles(plan)
        for plan in every_plan(ladder)
    }
    free = {(name, 0.0, "none") for name in ("none", "fp16")}
    assert {plan for plan, settles in settling.items() if not settles} == free
    assert settling["qsgd:8", 0.0, "none"], "its integers hide NaN"
    assert settling["none", 0.1, "none"] and settling["fp16", 0.1, "none"], "a residual is paid out"
    assert settling["none", 0.0, "qsgd:8"] and settling["none", 0.0, "lowrank:4"], "contexts learn"


@pytest.mark.parametrize("plan", [Plan(1, 1), Plan(0, warms=1), Plan(1, warms=2), Plan(0, 0, 0.5, warms=2)])
def test_a_plan_that_the_ladder_does_not_know_is_an_error(plan: Plan) -> None:
    """No such phase; a level that learns nothing; a step that is not dense; one that pays out and teaches at once."""
    with pytest.raises(ValueError):
        Ladder(("none", "fp16", "lowrank:4")).program(plan)


def test_levels_are_spelled_in_one_way() -> None:
    ladder = Ladder(("none", "lowrank", "int", "topk:.20:0256+int8"))
    assert ladder.names == ("none", "lowrank:4", "int8", "topk:0.2+int8")


def test_levels_may_be_objects() -> None:
    """A compressor of one's own is as good as a name, and in their order."""
    own = HorovodCompressor(type("Own", (), {}), NumpyOps())
    ladder = Ladder(("none", parse("topk:0.1+int8"), own, "fp16"))
    assert ladder.names == ("none", "topk:0.1+int8", "Own", "fp16")
    assert ladder.compressors[2] is own
    assert ladder.programs[-1] == Program(0, 0, False, warms=1)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("none", "none"), "none, none"),
        (("none", "lowrank:4", "fp16", "lowrank:4"), "none, lowrank:4, fp16, lowrank:4"),
        (("none", "lowrank", "lowrank:4"), "none, lowrank:4, lowrank:4"),
        (("none", "int8", parse("int8:nearest")), "none, int8, int8"),
    ],
)
def test_a_level_named_twice_is_refused(names: tuple[str, ...], said: str) -> None:
    """Levels that are the same however they are spelled; the message spells them as the run log would."""
    with pytest.raises(ValueError, match="twice") as refused:
        Ladder(names)
    assert str(refused.value).endswith(f"Received: {said}")


@pytest.mark.parametrize("level", ["topk:9", "int99", "gzip", "fp16+int8"])
def test_an_unknown_level_is_refused(level: str) -> None:
    with pytest.raises(ValueError) as refused:
        Ladder(("none", level))
    assert level in str(refused.value)


def test_tensor_names_tell_apart_what_has_another_length() -> None:
    """One name a (bucket, level, phase), the same whatever is released or learned: then its shape never changes."""
    ladder = Ladder(NAMES)
    names: dict[str, set[tuple[int, int, int]]] = {}
    for prefix in ("hvdplus", "hvdplus.1"):
        for bucket in (0, 1, 10, 11):
            for plan in every_plan(ladder):
                name = ladder.tensor_name(prefix, bucket, plan)
                assert OP_NAME.fullmatch(name) and name.startswith(prefix + ".")
                names.setdefault(name, set()).add((bucket, plan.level, plan.phase))
    assert all(len(uses) == 1 for uses in names.values())
    phases = sum(compressor.phases for compressor in ladder.compressors)
    assert len(names) == 2 * 4 * phases
    assert ladder.tensor_name("hvdplus", 0, Plan(warms=2)) == ladder.tensor_name("hvdplus", 0, Plan()), "both are dense"


# -- the side tensor ---------------------------------------------------------------------------------------------------

floats = st.floats(width=32)  # NaN and infinities too: every value that can travel
slots = st.builds(SideSlot, *([floats] * len(SideSlot._fields)))


@given(st.lists(slots, min_size=1, max_size=5), st.integers(0, 6), st.randoms(use_true_random=False))
@quickly
def test_a_sum_of_side_tensors_is_a_gather(told: list[SideSlot], parameters: int, random: object) -> None:
    """Each rank finds what every rank said, bit for bit, NaN of one rank included, and how many used a parameter."""
    ranks = len(told)
    rng = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]
    used = rng.integers(0, 2, (ranks, parameters)).astype(bool)
    tensors = [side_tensor(rank, ranks, slot, used[rank]) for rank, slot in enumerate(told)]
    assert all(tensor.dtype == np.float32 for tensor in tensors)
    assert all(tensor.shape == (ranks * SLOT_FLOATS + parameters,) for tensor in tensors)
    for order in (tensors, tensors[::-1]):  # a ring adds in any order
        heard, users = read_side(np.sum(order, axis=0, dtype=np.float32), ranks)
        assert np.array_equal(np.array(heard), np.array(told), equal_nan=True)
        assert users == used.sum(axis=0).tolist()


def test_one_ranks_nan_leaves_the_others_alone() -> None:
    told = [SideSlot(loss=0.5, has_loss=1), SideSlot(1.0, 3.0, 4.0, loss=math.nan, has_loss=1), SideSlot(step=2.0)]
    heard, _ = read_side(sum(side_tensor(rank, 3, slot, np.zeros(2)) for rank, slot in enumerate(told)), 3)
    assert heard[0] == told[0] and heard[2] == told[2]
    assert math.isnan(heard[1].loss)
    assert heard[1]._replace(loss=0.0) == told[1]._replace(loss=0.0)


def test_times_come_back_as_they_were_measured() -> None:
    slot = SideSlot(step=0.25, codec=0.125, exposed_comm=0.0625, input_wait=0.03125, sounding=0.5)
    assert slot.times == StepTimes(step=0.25, codec=0.125, exposed_comm=0.0625, input_wait=0.03125, sounding=0.5)
    assert SideSlot(0.0, 0.0, 0.0, *slot.times) == slot


@given(st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**33), 2**33)))
@quickly
def test_checksums_survive_float32(checksum: int) -> None:
    """The lowest 32 bits of any int64, negative ones in two's complement, through two float32 numbers."""
    high, low = (np.float32(part) for part in split_checksum(checksum))
    assert 0 <= high < 2**16 and 0 <= low < 2**16
    assert (int(high) << 16 | int(low)) == checksum % 2**32


@pytest.mark.parametrize("checksum", [0, 1, -1, 0xFFFF, 0x10000, 2**31, -(2**31), 2**63 - 1, -(2**63)])
def test_checksums_that_differ_in_32_bits_differ_afterwards(checksum: int) -> None:
    for bit in range(32):
        assert split_checksum(checksum ^ (1 << bit)) != split_checksum(checksum)


def test_flags_are_told_apart_in_what_float32_holds() -> None:
    for count in (0, 1, 9, 12):
        seen = [told_apart([bool(number >> bit & 1) for bit in range(count)]) for number in range(1 << count)]
        assert len(set(seen)) == len(seen)
        assert all(float(np.float32(each)) == each for each in seen)
