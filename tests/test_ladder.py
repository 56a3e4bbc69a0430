"""The ladder of levels, its step variants, and the names of what travels."""

from __future__ import annotations

import re

import pytest

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.compression import HorovodCompressor, parse
from hvdplus.exchange.plan import Ladder, Plan, Variant

NAMES = ("none", "fp16", "qsgd:8", "int8:stochastic", "topk:0.2", "lowrank:1", "lowrank:4", "lowrank:4+fp16")
OP_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")
"""What TensorFlow accepts as the name of an operation."""


def every_plan(ladder: Ladder) -> list[Plan]:
    """All plans that a ladder allows, with a few shares of a residual."""
    return [
        Plan(level, side, fraction, asks)
        for level, compressor in enumerate(ladder.compressors)
        for side in range(compressor.sides)
        for fraction in ((1.0,) if compressor.keeps_residual else (0.0, 0.1, 1.0))
        for asks in ((False, True) if compressor.asks else (False,))
    ]


# -- the ladder --------------------------------------------------------------------------------------------------------


def test_variants_of_the_ladder() -> None:
    """A level without a residual needs a second variant that flushes one, a level with one has one for every side; of a
    level that asks there is each with and without it."""
    assert Ladder(("none", "lowrank:4", "qsgd:8", "randomk:0.1")).variants == (
        Variant(0, 0, False),
        Variant(0, 0, True),
        Variant(1, 0, False),
        Variant(1, 1, False),
        Variant(2, 0, False),
        Variant(2, 0, False, asks=True),
        Variant(2, 0, True),
        Variant(2, 0, True, asks=True),
        Variant(3, 0, False),
    )


@pytest.mark.parametrize("names", [NAMES, ("none",), ("lowrank:2",), ("fp16", "none"), ("none", "qsgd:8", "int8")])
def test_every_plan_has_its_variant(names: tuple[str, ...]) -> None:
    ladder = Ladder(names)
    assert len(set(ladder.variants)) == len(ladder.variants)
    used = set()
    for plan in every_plan(ladder):
        number = ladder.variant(plan)
        variant = ladder.variants[number]
        assert (variant.level, variant.side, variant.asks) == (plan.level, plan.side, plan.asks)
        lossless = not ladder.compressors[plan.level].keeps_residual
        assert variant.flushes == (lossless and plan.flush_fraction > 0)
        used.add(number)
    assert used == set(range(len(ladder.variants))), "no variant that no plan picks"


def test_a_step_is_checked_if_anything_would_keep_or_hide_what_is_not_finite() -> None:
    """Residuals keep it; integers hide it, also where there is no residual. A dense step does neither."""
    ladder = Ladder(NAMES)
    checked = {
        (ladder.names[plan.level], plan.flush_fraction): ladder.needs_finite_check(plan) for plan in every_plan(ladder)
    }
    free = {(name, 0.0) for name in ("none", "fp16")}
    assert {plan for plan, checks in checked.items() if not checks} == free
    assert checked["qsgd:8", 0.0], "its integers hide NaN"
    assert checked["none", 0.1] and checked["fp16", 0.1], "a residual is flushed"


@pytest.mark.parametrize("plan", [Plan(1, 1), Plan(0, asks=True), Plan(2, 0, 1.0, asks=True)])
def test_a_plan_that_the_ladder_does_not_know_is_an_error(plan: Plan) -> None:
    """No such side; levels that have nothing to ask."""
    ladder = Ladder(("none", "fp16", "lowrank:4"))
    assert not ladder.allows(plan)
    with pytest.raises(ValueError):
        ladder.variant(plan)


@pytest.mark.parametrize("plan", [Plan(3), Plan(-1), Plan(0, asks=1), Plan(0, -1)])
def test_a_plan_for_another_ladder_is_not_allowed(plan: Plan) -> None:
    """As one in a damaged checkpoint."""
    assert not Ladder(("none", "fp16", "lowrank:4")).allows(plan)


def test_all_plans_of_a_ladder_are_allowed() -> None:
    ladder = Ladder(NAMES)
    assert all(ladder.allows(plan) for plan in every_plan(ladder))


def test_plain_steps_send_gradients_as_they_are() -> None:
    ladder = Ladder(NAMES)
    assert [plan for plan in every_plan(ladder) if ladder.plain(plan)] == [Plan()]
    flushing = [plan for plan in every_plan(ladder) if ladder.flushes(plan)]
    assert flushing == [
        Plan(level, 0, fraction, asks)
        for level in range(3)
        for fraction in (0.1, 1.0)
        for asks in ((False, True) if level == 2 else (False,))
    ]


def test_levels_are_spelled_in_one_way() -> None:
    ladder = Ladder(("none", "lowrank", "int", "topk:.20:0256+int8"))
    assert ladder.names == ("none", "lowrank:4", "int8", "topk:0.2+int8")


def test_levels_may_be_objects() -> None:
    """A compressor of one's own is as good as a name, and in their order."""
    own = HorovodCompressor(type("Own", (), {}), NumpyOps())
    ladder = Ladder(("none", parse("topk:0.1+int8"), own, "fp16"))
    assert ladder.names == ("none", "topk:0.1+int8", "Own", "fp16")
    assert ladder.compressors[2] is own
    assert ladder.variants[3] == Variant(1, 0, False, asks=True)


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
    """One name a (bucket, level, side), the same whatever is flushed or asked: then its shape never changes."""
    ladder = Ladder(NAMES)
    names: dict[str, set[tuple[int, int, int]]] = {}
    for prefix in ("hvdplus", "hvdplus.1"):
        for bucket in (0, 1, 10, 11):
            for plan in every_plan(ladder):
                name = ladder.tensor_name(prefix, bucket, plan)
                assert OP_NAME.fullmatch(name) and name.startswith(prefix + ".")
                names.setdefault(name, set()).add((bucket, plan.level, plan.side))
    assert all(len(uses) == 1 for uses in names.values())
    sides = sum(compressor.sides for compressor in ladder.compressors)
    assert len(names) == 2 * 4 * sides
