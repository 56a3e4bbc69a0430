"""The plans of coming steps: asking at a level's first ones, flushing the residual after it, alternating sides."""

from __future__ import annotations

import numpy as np
import pytest
from coordinating import BAD, FP16, LADDER, NONE, go, heard, make, step, steps

from hvdplus.exchange.coordinator import Coordinator
from hvdplus.exchange.metadata import Report
from hvdplus.exchange.plan import Ladder, Plan
from hvdplus.exchange.schedule import PATIENCE, Schedule

# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "fp16"])
def test_a_fixed_lossless_level_has_one_plan(name: str) -> None:
    coordinator = make(name)
    assert [step(coordinator) for _ in range(50)] == [Plan(0, 0, 0.0)] * 50


def test_a_fixed_lossy_level_alternates_its_sides() -> None:
    """The residual joins in full at every step."""
    coordinator = make("lowrank:4")
    assert [step(coordinator) for _ in range(4)] == [Plan(0, 0, 1.0), Plan(0, 1, 1.0)] * 2


def test_sides_alternate_only_when_every_rank_was_finite() -> None:
    """A context that did not advance must not be read as the other side's."""
    coordinator = make("lowrank:4")
    sides = [step(coordinator, *slots).side for slots in ((), BAD, BAD, (), (), BAD, ())]
    assert sides == [0, 1, 1, 1, 0, 1, 1]


def test_each_level_remembers_its_own_side() -> None:
    """Across other levels, and across the steps that ask again."""
    coordinator = make("none", "lowrank:4+int8", auto=True, drain_steps=2)
    first_0, first_1, side_0, side_1 = (Plan(1, side, 1.0, asks) for asks in (True, False) for side in (0, 1))
    go(coordinator, "lowrank:4+int8")
    assert steps(coordinator, 5) == [first_0, first_1, side_0, side_1, side_0]
    go(coordinator, "none")
    assert steps(coordinator, 4) == [Plan(0, 0, 0.5), Plan(0, 0, 1.0), Plan(), Plan()]
    go(coordinator, "lowrank:4+int8")
    assert steps(coordinator, 3) == [first_1, first_0, side_1]


@pytest.mark.parametrize("names", [LADDER, ("none", "fp16"), ("fp16", "none"), ("none", "qsgd:8"), ("fp16",)])
def test_a_fixed_level_is_the_last_of_its_ladder(names: tuple[str, ...]) -> None:
    coordinator = make(*names)
    assert steps(coordinator, 5)[-1].level == len(names) - 1


def test_a_new_level_begins_with_the_next_plan() -> None:
    """The plan that is under way goes on meaning what it meant."""
    coordinator = make(auto=True)
    coordinator.set_level(FP16)
    assert step(coordinator) == Plan(NONE)
    assert step(coordinator) == Plan(FP16)


# -- levels that learn -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["int8", "qsgd:8", "topk:0.2:16", "lowrank:4+int8"])
def test_first_steps_of_a_level_that_learns_ask(level: str) -> None:
    """One for every side, the run's first ones and whenever it is come back to."""
    coordinator = make("none", level, drain_steps=1)
    sides = coordinator.ladder.compressors[1].turns
    for _ in range(3):
        plans = steps(coordinator, sides + 3)
        assert {plan.level for plan in plans} == {1}
        assert [plan.asks for plan in plans] == [True] * sides + [False] * 3
        go(coordinator, "none")
        assert not any(plan.asks for plan in steps(coordinator, 3))
        go(coordinator, level)


def test_a_fixed_level_asks_with_nothing_beside_it() -> None:
    assert steps(make("topk:0.2:16"), 3) == [Plan(0, 0, 1.0, True), *[Plan(0, 0, 1.0)] * 2]


def test_levels_that_learn_nothing_beforehand_ask_nothing() -> None:
    coordinator = make("none", "fp16", "lowrank:4", auto=True)
    for level in ("fp16", "none", "fp16"):
        go(coordinator, level)
        assert step(coordinator) == Plan(coordinator.ladder.names.index(level))
    for side in (0, 1):
        go(coordinator, "lowrank:4")
        assert step(coordinator) == Plan(2, side, 1.0)
        go(coordinator, "none")


def test_only_steps_of_finite_gradients_teach() -> None:
    """Whether a rank said so of what it sent, or all ranks saw it in the sums."""
    coordinator = make("none", "topk:0.2:16")
    for told, healthy in (((), False), (BAD, True), (BAD, False), ((), False)):
        assert coordinator.plan._replace(measurement=0) == Plan(1, 0, 1.0, True)
        coordinator.observe(coordinator.plan, heard(*(told or (Report(),) * 2)), healthy)
        coordinator.advance()
    assert steps(coordinator, 2) == [Plan(1, 0, 1.0, True), Plan(1, 0, 1.0)]


def test_a_sum_that_is_not_finite_turns_no_side_and_flushes_nothing() -> None:
    """Every rank's own payload can be finite, and their sum beyond float32."""
    coordinator = make("none", "lowrank:4", auto=True, drain_steps=3)
    go(coordinator, "lowrank:4")
    steps(coordinator, 1)
    for level, plan in (("lowrank:4", Plan(1, 1, 1.0)), ("none", Plan(0, 0, 1 / 3))):
        go(coordinator, level)
        for _ in range(2):
            assert coordinator.plan._replace(measurement=0) == plan
            coordinator.observe(plan, heard(Report(), Report()), counts=False)
            coordinator.advance()
    assert steps(coordinator, 2) == [Plan(0, 0, 1 / 3), Plan(0, 0, 1 / 2)]


def test_a_residual_joins_the_next_level_in_its_first_step() -> None:
    """What ranks ask about is what they will send."""
    coordinator = make("none", "topk:0.2:16", "int8", auto=True)
    go(coordinator, "topk:0.2:16")
    steps(coordinator, 4)
    go(coordinator, "int8")
    assert steps(coordinator, 3) == [Plan(2, 0, 1.0, True), *[Plan(2, 0, 1.0)] * 2]


def test_a_level_without_a_residual_flushes_while_it_asks() -> None:
    coordinator = make("none", "lowrank:4", "qsgd:8", auto=True, drain_steps=4)
    go(coordinator, "lowrank:4")
    steps(coordinator, 4)
    go(coordinator, "none")
    assert steps(coordinator, 1) == [Plan(0, 0, 1 / 4)]
    go(coordinator, "qsgd:8")  # and goes on where the flush was
    assert steps(coordinator, 1) == [Plan(2, 0, 1 / 3, True)]
    go(coordinator, "none")
    assert steps(coordinator, 1) == [Plan(0, 0, 1 / 2)]
    go(coordinator, "qsgd:8")
    assert steps(coordinator, 2) == [Plan(2, 0, 1.0, True), Plan(2, 0, 0.0)]


def test_asking_that_is_cut_short_starts_from_the_beginning() -> None:
    coordinator = make("none", "lowrank:4+int8", "lowrank:1+int8", auto=True)
    for level in (1, 2, 1):
        coordinator.set_level(level)
        coordinator.advance()
        assert step(coordinator)._replace(side=0) == Plan(level, 0, 1.0, True)
    go(coordinator, "none")
    assert not coordinator.plan.asks
    go(coordinator, "lowrank:4+int8")
    assert [plan.asks for plan in steps(coordinator, 3)] == [True, True, False]


@pytest.mark.parametrize("other", ["none", "fp16"])
def test_a_level_called_off_in_its_first_plan_leaves_no_trace(other: str) -> None:
    """The plan is made, then the level is changed from outside (loss scaling), then the plan's step is taken: the
    residual is flushed all the same."""
    coordinator = make("none", "fp16", "topk:0.2:16", "int8", auto=True, drain_steps=2)
    go(coordinator, "topk:0.2:16")
    steps(coordinator, 4)
    go(coordinator, "int8")
    coordinator.set_level(coordinator.ladder.names.index(other))
    assert step(coordinator).asks, "under way"
    assert [plan.flush_fraction for plan in steps(coordinator, 3)] == [1 / 2, 1.0, 0.0]


def test_a_step_in_which_another_level_asked_does_not_count() -> None:
    coordinator = make("none", "topk:0.2:16", "int8", auto=True)
    go(coordinator, "topk:0.2:16")
    coordinator.set_level(2)
    assert step(coordinator) == Plan(1, 0, 1.0, True)
    assert steps(coordinator, 2) == [Plan(2, 0, 1.0, True), Plan(2, 0, 1.0)]


@pytest.mark.parametrize(
    ("first", "second"),
    [("lowrank:1", "lowrank:4"), ("lowrank:4", "lowrank:1"), ("lowrank:4+fp16", "lowrank:1+fp16")],
)
@pytest.mark.parametrize("before", [3, 4])
def test_a_level_that_follows_the_last_one_goes_on_from_there(first: str, second: str, before: int) -> None:
    """It takes over contexts, so it asks nothing, and it takes its turn at the side whose turn it is."""
    coordinator = make("none", first, second, auto=True)
    go(coordinator, first)
    steps(coordinator, before)
    side = before % 2
    go(coordinator, second)
    assert steps(coordinator, 3) == [Plan(2, side, 1.0), Plan(2, 1 - side, 1.0), Plan(2, side, 1.0)]
    go(coordinator, first)
    assert step(coordinator) == Plan(1, 1 - side, 1.0)


@pytest.mark.parametrize(
    ("first", "second"),
    [("lowrank:4", "lowrank:4+int8"), ("lowrank:4+int8", "lowrank:1+int8"), ("int8", "qsgd:8"), ("lowrank:4", "int8")],
)
def test_a_level_that_does_not_follow_asks(first: str, second: str) -> None:
    coordinator = make("none", first, second, auto=True)
    go(coordinator, first)
    steps(coordinator, 5)
    go(coordinator, second)
    plan = step(coordinator)
    assert (plan.level, plan.asks) == (2, True)


def test_a_level_follows_only_the_last_one() -> None:
    """Contexts of one that ran before are out of date."""
    coordinator = make("none", "lowrank:1", "lowrank:4", "fp16", auto=True)
    go(coordinator, "lowrank:1")
    steps(coordinator, 3)
    go(coordinator, "fp16")
    steps(coordinator, 1)
    go(coordinator, "lowrank:4")
    assert steps(coordinator, 2) == [Plan(2, 0, 1.0), Plan(2, 1, 1.0)], "the side that comes first, not the next"


# -- residuals ---------------------------------------------------------------------------------------------------------


def test_a_flush_is_counted_in_finite_steps_only() -> None:
    coordinator = make(auto=True, drain_steps=3)
    go(coordinator, "lowrank:4")
    steps(coordinator, 3)
    go(coordinator, "none")
    fractions = [step(coordinator, *slots).flush_fraction for slots in ((), BAD, (), BAD, BAD, (), (), ())]
    assert fractions == [1 / 3, 1 / 2, 1 / 2, 1.0, 1.0, 1.0, 0.0, 0.0]


def test_a_flush_goes_on_under_another_lossless_level() -> None:
    coordinator = make(auto=True, drain_steps=4)
    go(coordinator, "lowrank:4")
    steps(coordinator, 3)
    plans = []
    for level in (NONE, FP16, NONE):
        coordinator.set_level(level)
        coordinator.advance()
        plans += [step(coordinator), step(coordinator)]
    assert [plan.flush_fraction for plan in plans] == [1 / 4, 1 / 3, 1 / 2, 1.0, 0.0, 0.0]
    assert [plan.level for plan in plans] == [NONE, NONE, FP16, FP16, NONE, NONE]


def test_asking_for_the_present_level_does_not_start_a_flush_again() -> None:
    coordinator = make(auto=True, drain_steps=4)
    go(coordinator, "lowrank:4")
    steps(coordinator, 3)
    fractions = []
    for _ in range(6):
        coordinator.set_level(NONE)
        coordinator.advance()
        fractions.append(step(coordinator).flush_fraction)
    assert fractions == [1 / 4, 1 / 3, 1 / 2, 1.0, 0.0, 0.0]


def test_without_a_lossy_level_before_there_is_nothing_to_flush() -> None:
    coordinator = make("none", "fp16", "qsgd:8", auto=True)
    for level in ("fp16", "none", "qsgd:8", "fp16", "qsgd:8", "none"):
        go(coordinator, level)
        assert {plan.flush_fraction for plan in steps(coordinator, 4)} == {0.0}


def test_changing_its_mind_before_a_step_leaves_no_trace() -> None:
    """No share of a residual is ever more than all of it, or negative, and only the level that was asked for last runs
    or asks."""
    names = ("none", "fp16", "qsgd:8", "topk:0.2:16", "lowrank:4", "lowrank:1")
    coordinator = make(*names, auto=True, drain_steps=2)
    rng = np.random.default_rng(0)
    wanted = asked = 0
    for _ in range(2000):
        if rng.random() < 0.4:
            for level in rng.integers(0, len(names), rng.integers(1, 4)):
                asked = 0 if level != wanted else asked
                coordinator.set_level(wanted := int(level))
            coordinator.advance()
        told = BAD if rng.random() < 0.2 else ()
        plan = step(coordinator, *told)
        assert 0.0 <= plan.flush_fraction <= 1.0
        assert plan.flush_fraction == 1.0 or not coordinator.ladder.compressors[plan.level].keeps_residual
        assert plan.level == wanted
        assert plan.asks == (not asked and coordinator.ladder.compressors[wanted].asks)
        asked += plan.asks and not told
    go(coordinator, "topk:0.2:16")
    steps(coordinator, 3)
    go(coordinator, "none")
    assert [plan.flush_fraction for plan in steps(coordinator, 3)] == [1 / 2, 1.0, 0.0]


def flushing() -> Coordinator:
    """After the first of three steps of a flush."""
    coordinator = make(auto=True, drain_steps=3)
    go(coordinator, "lowrank:4")
    steps(coordinator, 3)
    go(coordinator, "none")
    assert step(coordinator) == Plan(0, 0, 1 / 3)
    return coordinator


def test_a_flush_that_was_not_taken_is_repeated() -> None:
    """What the step sent is still outstanding."""
    coordinator = flushing()
    assert coordinator.repeat().flush_fraction == 1 / 3
    assert [plan.flush_fraction for plan in steps(coordinator, 2)] == [1 / 3, 1 / 2]
    assert step(coordinator) == Plan(0, 0, 1.0)
    assert coordinator.repeat().flush_fraction == 1.0
    assert steps(coordinator, 2) == [Plan(0, 0, 1.0), Plan()]


def test_a_flush_that_was_not_taken_before_a_level_that_keeps_residuals_is_over() -> None:
    """That level sends all that is left at once: nothing stays to be flushed, which would keep trials away."""
    coordinator = flushing()
    go(coordinator, "lowrank:4")
    assert coordinator.repeat().flush_fraction == 1.0
    assert not coordinator.schedule.transitional


@pytest.mark.parametrize(("level", "fractions"), [("none", [1 / 2, 1.0, 0.0]), ("lowrank:4", [1.0, 1.0, 1.0])])
def test_a_residual_from_elsewhere_is_flushed_where_the_level_keeps_none(level: str, fractions: list[float]) -> None:
    coordinator = make("none", level, drain_steps=2) if level != "none" else make("none", drain_steps=2)
    if level != "none":
        steps(coordinator, 1)
    coordinator.flush()
    assert [plan.flush_fraction for plan in steps(coordinator, 3)] == fractions


# -- states ------------------------------------------------------------------------------------------------------------


def schedule(*names: str, flush_steps: int = 4) -> Schedule:
    return Schedule(Ladder(names or ("none", "lowrank:4", "lowrank:4+int8")), flush_steps=flush_steps)


def walk(one: Schedule, levels: list[int]) -> list[Plan]:
    """The plans of steps, before each of which a level is set."""
    plans = []
    for level in levels:
        one.set_level(level)
        plans.append(one.next_plan())
        one.commit(plans[-1])
    return plans


@pytest.mark.parametrize("before", range(1, 16))
def test_a_loaded_schedule_goes_on_where_the_saved_one_was(before: int) -> None:
    """Between two steps that ask, in the middle of a flush, and between two sides."""
    course = [0, 1, 1, 1, 1, 1, 0, 0, 2, 2, 2, 0, 0, 1, 1, 1, 1, 1]
    one, other = schedule(), schedule()
    walk(one, course[:before])
    other.load(one.state())
    assert other.state() == one.state()
    assert walk(other, course[before:]) == walk(one, course[before:])


@pytest.mark.parametrize("before", range(PATIENCE + 1))
def test_a_loaded_schedule_learns_when_the_saved_one_would_have(before: int) -> None:
    """From the eighth overflow in a row on, whether it was loaded in between or has seen others meanwhile."""
    one, other = schedule(), schedule()
    assert not other.learns(True)
    seen = [one.learns(True) for _ in range(before)]
    other.load(one.state())
    seen += [other.learns(True) for _ in range(before, PATIENCE + 2)]
    assert seen == [False] * (PATIENCE - 1) + [True] * 3


@pytest.mark.parametrize(
    "damage",
    [
        {"level": 3}, {"level": -1}, {"level": "none"}, {"level": None},
        {"sides": [0, 2, 0]}, {"sides": [0, 0]}, {"sides": [0, -1, 0]}, {"sides": 1}, {"sides": [1, 0, 0]},
        {"flush_left": -1}, {"flush_left": None}, {"flush_left": "many"}, {"asking_left": -2}, {"asking_left": []},
        {"asking_left": 1}, {"overflows": -1}, {"overflows": PATIENCE**2 + 1}, {"overflows": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_state_is_refused_and_changes_nothing(damage: dict[str, object]) -> None:
    one = schedule()
    walk(one, [1, 1, 1, 0])
    before = one.state()
    with pytest.raises(ValueError, match="damaged: the schedule.s "):
        one.load({**before, **damage})
    (missing,) = damage
    with pytest.raises(ValueError, match=f"damaged: its schedule has no {missing}"):
        one.load({name: value for name, value in before.items() if name != missing})
    assert one.state() == before
    assert one.next_plan() == Plan(0, 0, 1 / 3)


def test_no_more_steps_are_left_than_the_settings_ask_for() -> None:
    """The other job's settings may have asked for more: the residual is flushed all the same, and soon."""
    one = schedule(flush_steps=2)
    one.load({**one.state(), "flush_left": 10**9})
    assert [plan.flush_fraction for plan in walk(one, [0, 0, 0])] == [1 / 2, 1.0, 0.0]
    with pytest.raises(ValueError, match="asking_left has to be at most 2"):
        one.load({**one.state(), "level": 2, "asking_left": 3})


def test_there_is_a_variant_for_every_plan() -> None:
    """Whatever levels are asked for."""
    one = schedule("none", "fp16", "lowrank:1", "lowrank:4", "qsgd:8")
    rng = np.random.default_rng(1)
    for plan in walk(one, [int(level) for level in np.repeat(rng.integers(0, 5, 200), rng.integers(1, 6, 200))]):
        assert one.ladder.allows(plan)
