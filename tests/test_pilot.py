"""What every rank does between two steps: plans, contexts that must agree, windows and decisions in the run log."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hvdplus import __version__
from hvdplus.adapters.local import Local
from hvdplus.controller import Controller, Decision, Limits, Observation
from hvdplus.costmodel import LevelCost
from hvdplus.exchange import Ladder, Plan, SideSlot, side_tensor
from hvdplus.log.runlog import RunLog, read
from hvdplus.meter import StepTimes
from hvdplus.pilot import GAUGE_STEPS, TRACE_STEPS, Pilot
from hvdplus.settings import Settings
from hvdplus.transport import World

LADDER = ("none", "fp16", "lowrank:4")
NONE, FP16, LOWRANK = range(3)
SENT = {
    "none": 4000,
    "fp16": 2000,
    "int8": 1000,
    "qsgd:8": 1000,
    "topk:0.2:16": 900,
    "lowrank:4": 300,
    "lowrank:4+fp16": 150,
    "lowrank:1": 80,
    "lowrank:1+fp16": 40,
}
"""Bytes a step."""


def cost(sent: int, codec: float = 0.0) -> LevelCost:
    """A fortieth of the bytes leaves last, when nothing hides it any more."""
    return LevelCost(sent, sent // 40, 4, codec)


def make(*names: str, auto: bool = False, ranks: int = 2, log: RunLog | None = None, **settings: int) -> Pilot:
    """A pilot over ``names`` (default: the whole ladder). With ``auto`` it begins dense, and until steps take time its
    controller leaves the level to the test."""
    ladder = Ladder(names or LADDER)
    return Pilot(
        ladder,
        Settings(**settings),  # type: ignore[arg-type]
        auto=auto,
        ranks=ranks,
        costs=[cost(SENT[name]) for name in ladder.names],
        log=log or RunLog(None),
    )


def total(*slots: SideSlot, parameters: int = 3) -> np.ndarray:
    """The summed side tensor of a step in which each rank said its slot."""
    ranks = len(slots)
    return sum(side_tensor(rank, ranks, slot, np.ones(parameters)) for rank, slot in enumerate(slots))


def step(pilot: Pilot, *slots: SideSlot) -> Plan:
    """One step: it runs the present plan, its side tensor is read, the next plan is made. Returns the plan that ran,
    but for what it gauges."""
    plan = pilot.plan
    pilot.observe(plan, total(*(slots or (SideSlot(),) * pilot.ranks)))
    pilot.advance()
    return plan._replace(gauge=False)


def go(pilot: Pilot, level: str) -> None:
    """Run ``level`` from the next plan on."""
    pilot.set_level(pilot.ladder.names.index(level))
    pilot.advance()


def steps(pilot: Pilot, count: int) -> list[Plan]:
    """The plans of the next steps."""
    return [step(pilot) for _ in range(count)]


BAD = (SideSlot(), SideSlot(nonfinite=1.0))


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "fp16"])
def test_a_fixed_lossless_level_has_one_plan(name: str) -> None:
    pilot = make(name)
    assert [step(pilot) for _ in range(50)] == [Plan(0, 0, 0.0)] * 50


def test_a_fixed_lossy_level_alternates_its_phases() -> None:
    """The residual joins in full at every step."""
    pilot = make("lowrank:4")
    assert [step(pilot) for _ in range(4)] == [Plan(0, 0, 1.0), Plan(0, 1, 1.0)] * 2


def test_phases_alternate_only_when_every_rank_was_finite() -> None:
    """A context that did not advance must not be read as the other side's."""
    pilot = make("lowrank:4")
    phases = [step(pilot, *slots).phase for slots in ((), BAD, BAD, (), (), BAD, ())]
    assert phases == [0, 1, 1, 1, 0, 1, 1]


def test_each_level_remembers_its_own_phase() -> None:
    """Across other levels, and across the dense steps that lead up to it again."""
    pilot = make("none", "lowrank:4", auto=True, warm_steps=1, drain_steps=2)
    warming, side_0, side_1 = Plan(warms=1), Plan(1, 0, 1.0), Plan(1, 1, 1.0)
    go(pilot, "lowrank:4")
    assert steps(pilot, 4) == [warming, side_0, side_1, side_0]
    go(pilot, "none")
    assert steps(pilot, 4) == [Plan(0, 0, 0.5), Plan(0, 0, 1.0), Plan(), Plan()]
    go(pilot, "lowrank:4")
    assert steps(pilot, 3) == [warming, side_1, side_0]


@pytest.mark.parametrize("names", [LADDER, ("none", "fp16"), ("fp16", "none"), ("none", "qsgd:8"), ("fp16",)])
def test_a_fixed_level_is_the_last_of_its_ladder(names: tuple[str, ...]) -> None:
    pilot = make(*names)
    assert steps(pilot, 5)[-1].level == len(names) - 1


def test_a_new_level_begins_with_the_next_plan() -> None:
    """The plan that is under way goes on meaning what it meant."""
    pilot = make(auto=True)
    pilot.set_level(FP16)
    assert step(pilot) == Plan(NONE)
    assert step(pilot) == Plan(FP16)


# -- levels that learn -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["int8", "qsgd:8", "topk:0.2:16", "lowrank:4", "lowrank:4+fp16"])
@pytest.mark.parametrize("warm_steps", [1, 2, 5])
def test_a_level_that_learns_is_led_up_to_by_dense_steps(level: str, warm_steps: int) -> None:
    """As many as the settings say, before the run's first step at it and whenever it is come back to."""
    pilot = make("none", level, warm_steps=warm_steps, drain_steps=1)
    for _ in range(3):
        assert steps(pilot, warm_steps) == [Plan(warms=1)] * warm_steps
        assert {plan.level for plan in steps(pilot, 4)} == {1}
        go(pilot, "none")
        steps(pilot, 3)
        go(pilot, level)


def test_two_dense_steps_are_the_default() -> None:
    assert steps(make("none", "topk:0.2:16"), 4) == [Plan(warms=1)] * 2 + [Plan(1, 0, 1.0)] * 2


def test_levels_that_learn_nothing_begin_at_once() -> None:
    pilot = make("none", "fp16", "lowrank:4", auto=True, warm_steps=3)
    for level in ("fp16", "none", "fp16"):
        go(pilot, level)
        assert step(pilot) == Plan(pilot.ladder.names.index(level))


def test_only_steps_of_finite_gradients_teach() -> None:
    """Whether a rank said so of what it sent, or all ranks saw it in the sums."""
    pilot = make("none", "topk:0.2:16", warm_steps=2)
    for told, healthy in (((), False), (BAD, True), ((), True), (BAD, False), ((), False)):
        assert pilot.plan._replace(gauge=False) == Plan(warms=1)
        pilot.observe(pilot.plan, total(*(told or (SideSlot(),) * 2)), healthy)
        pilot.advance()
    assert steps(pilot, 2) == [Plan(warms=1), Plan(1, 0, 1.0)]


def test_a_sum_that_is_not_finite_turns_no_phase_and_pays_out_nothing() -> None:
    """Every rank's own payload can be finite, and their sum beyond float32."""
    pilot = make("none", "lowrank:4", auto=True, warm_steps=1, drain_steps=3)
    go(pilot, "lowrank:4")
    steps(pilot, 2)
    for level, plan in (("lowrank:4", Plan(1, 1, 1.0)), ("none", Plan(0, 0, 1 / 3))):
        go(pilot, level)
        for _ in range(2):
            assert pilot.plan._replace(gauge=False) == plan
            pilot.observe(plan, total(SideSlot(), SideSlot()), healthy=False)
            pilot.advance()
    assert steps(pilot, 2) == [Plan(0, 0, 1 / 3), Plan(0, 0, 1 / 2)]


def test_a_residual_waits_while_the_next_level_learns() -> None:
    """Released in these steps it would teach contexts that the gradients are larger than they are."""
    pilot = make("none", "topk:0.2:16", "int8", auto=True)
    go(pilot, "topk:0.2:16")
    steps(pilot, 4)
    go(pilot, "int8")
    assert steps(pilot, 4) == [Plan(warms=2)] * 2 + [Plan(2, 0, 1.0)] * 2


def test_a_level_without_a_residual_learns_first_and_pays_out_then() -> None:
    pilot = make("none", "lowrank:4", "qsgd:8", auto=True, drain_steps=4)
    go(pilot, "lowrank:4")
    steps(pilot, 4)
    go(pilot, "none")
    assert steps(pilot, 1) == [Plan(0, 0, 1 / 4)]
    go(pilot, "qsgd:8")  # and goes on where the drain was
    assert steps(pilot, 3) == [Plan(warms=2)] * 2 + [Plan(2, 0, 1 / 3)]
    go(pilot, "none")
    assert steps(pilot, 1) == [Plan(0, 0, 1 / 2)]
    go(pilot, "qsgd:8")
    assert steps(pilot, 4) == [Plan(warms=2)] * 2 + [Plan(2, 0, 1.0), Plan(2, 0, 0.0)]


def test_a_warm_up_that_is_cut_short_starts_from_the_beginning() -> None:
    pilot = make("none", "topk:0.2:16", "int8", auto=True, warm_steps=3)
    for level in (1, 2, 1):
        pilot.set_level(level)
        pilot.advance()
        assert steps(pilot, 2) == [Plan(warms=level)] * 2
    go(pilot, "none")
    assert pilot.plan.warms == 0
    go(pilot, "int8")
    assert steps(pilot, 4) == [Plan(warms=2)] * 3 + [Plan(2, 0, 1.0)]


@pytest.mark.parametrize("other", ["none", "fp16"])
def test_a_warm_up_called_off_in_its_last_plan_leaves_no_trace(other: str) -> None:
    """The plan is made, then the level is changed from outside (loss scaling), then the plan's step is taken: the
    residual that waited is paid out all the same."""
    pilot = make("none", "fp16", "topk:0.2:16", "int8", auto=True, drain_steps=2)
    go(pilot, "topk:0.2:16")
    steps(pilot, 4)
    go(pilot, "int8")
    pilot.set_level(pilot.ladder.names.index(other))
    assert step(pilot).warms, "under way"
    assert [plan.release for plan in steps(pilot, 3)] == [1 / 2, 1.0, 0.0]


def test_a_step_that_taught_another_level_does_not_count() -> None:
    pilot = make("none", "topk:0.2:16", "int8", auto=True)
    go(pilot, "topk:0.2:16")
    pilot.set_level(2)
    assert step(pilot) == Plan(warms=1)
    assert steps(pilot, 3) == [Plan(warms=2)] * 2 + [Plan(2, 0, 1.0)]


@pytest.mark.parametrize(
    ("first", "second"),
    [("lowrank:1", "lowrank:4"), ("lowrank:4", "lowrank:1"), ("lowrank:4+fp16", "lowrank:1+fp16")],
)
@pytest.mark.parametrize("before", [3, 4])
def test_a_level_that_follows_the_last_one_goes_on_from_there(first: str, second: str, before: int) -> None:
    """It takes over contexts, so it is not warmed up, and it takes its turn at the side whose turn it is."""
    pilot = make("none", first, second, auto=True)
    go(pilot, first)
    steps(pilot, before)
    phase = before % 2
    go(pilot, second)
    assert steps(pilot, 3) == [Plan(2, phase, 1.0), Plan(2, 1 - phase, 1.0), Plan(2, phase, 1.0)]
    go(pilot, first)
    assert step(pilot) == Plan(1, 1 - phase, 1.0)


@pytest.mark.parametrize(
    ("first", "second"),
    [("lowrank:4", "lowrank:4+fp16"), ("lowrank:4+fp16", "lowrank:1"), ("int8", "qsgd:8"), ("lowrank:4", "int8")],
)
def test_a_level_that_does_not_follow_is_warmed_up(first: str, second: str) -> None:
    pilot = make("none", first, second, auto=True)
    go(pilot, first)
    steps(pilot, 5)
    go(pilot, second)
    assert steps(pilot, 2) == [Plan(warms=2)] * 2
    assert step(pilot).level == 2


@pytest.mark.parametrize("taken", [0, 1])
def test_nothing_is_taken_over_from_a_level_that_has_not_begun(taken: int) -> None:
    """It has learned from fewer dense steps than it should have, and its contexts are nobody's yet."""
    pilot = make("none", "lowrank:1", "lowrank:4", auto=True)
    go(pilot, "lowrank:1")
    steps(pilot, taken)
    go(pilot, "lowrank:4")
    assert steps(pilot, 3) == [Plan(warms=2)] * 2 + [Plan(2, 0, 1.0)]


def test_a_level_follows_only_the_last_one() -> None:
    """Contexts of one that ran before are out of date."""
    pilot = make("none", "lowrank:1", "lowrank:4", "fp16", auto=True)
    go(pilot, "lowrank:1")
    steps(pilot, 4)
    go(pilot, "fp16")
    steps(pilot, 1)
    go(pilot, "lowrank:4")
    assert steps(pilot, 2) == [Plan(warms=2)] * 2


# -- residuals ---------------------------------------------------------------------------------------------------------


def test_a_drain_is_counted_in_finite_steps_only() -> None:
    pilot = make(auto=True, drain_steps=3)
    go(pilot, "lowrank:4")
    steps(pilot, 3)
    go(pilot, "none")
    releases = [step(pilot, *slots).release for slots in ((), BAD, (), BAD, BAD, (), (), ())]
    assert releases == [1 / 3, 1 / 2, 1 / 2, 1.0, 1.0, 1.0, 0.0, 0.0]


def test_a_drain_goes_on_under_another_lossless_level() -> None:
    pilot = make(auto=True, drain_steps=4)
    go(pilot, "lowrank:4")
    steps(pilot, 3)
    plans = []
    for level in (NONE, FP16, NONE):
        pilot.set_level(level)
        pilot.advance()
        plans += [step(pilot), step(pilot)]
    assert [plan.release for plan in plans] == [1 / 4, 1 / 3, 1 / 2, 1.0, 0.0, 0.0]
    assert [plan.level for plan in plans] == [NONE, NONE, FP16, FP16, NONE, NONE]


def test_asking_for_the_present_level_does_not_start_a_drain_again() -> None:
    pilot = make(auto=True, drain_steps=4)
    go(pilot, "lowrank:4")
    steps(pilot, 3)
    releases = []
    for _ in range(6):
        pilot.set_level(NONE)
        pilot.advance()
        releases.append(step(pilot).release)
    assert releases == [1 / 4, 1 / 3, 1 / 2, 1.0, 0.0, 0.0]


def test_without_a_lossy_level_before_there_is_nothing_to_drain() -> None:
    pilot = make("none", "fp16", "qsgd:8", auto=True)
    for level in ("fp16", "none", "qsgd:8", "fp16", "qsgd:8", "none"):
        go(pilot, level)
        assert {plan.release for plan in steps(pilot, 4)} == {0.0}


def test_changing_its_mind_before_a_step_leaves_no_trace() -> None:
    """No share of a residual is ever more than all of it, or negative, none is released while a level learns, and only
    the level that was asked for last runs or learns."""
    names = ("none", "fp16", "qsgd:8", "topk:0.2:16", "lowrank:4", "lowrank:1")
    pilot = make(*names, auto=True, drain_steps=2)
    rng = np.random.default_rng(0)
    wanted = warmed = 0
    for _ in range(2000):
        if rng.random() < 0.4:
            for level in rng.integers(0, len(names), rng.integers(1, 4)):
                warmed = 0 if level != wanted else warmed
                pilot.set_level(wanted := int(level))
            pilot.advance()
        told = BAD if rng.random() < 0.2 else ()
        plan = step(pilot, *told)
        assert 0.0 <= plan.release <= 1.0
        assert plan.release == 1.0 or not pilot.ladder.compressors[plan.level].keeps_residual
        if plan.warms:
            assert plan == Plan(warms=wanted)
            warmed += not told
            assert warmed <= 2
        else:
            assert plan.level == wanted
            assert warmed == 2 or not pilot.ladder.compressors[wanted].warms or wanted >= 4, "all but those that follow"
    go(pilot, "topk:0.2:16")
    steps(pilot, 3)
    go(pilot, "none")
    assert [plan.release for plan in steps(pilot, 3)] == [1 / 2, 1.0, 0.0]


def test_loss_scaling_leaves_out_levels_with_a_residual() -> None:
    """A residual would mix units; from the level that keeps one upwards."""
    pilot = make("none", "fp16", "topk:0.2:16", "lowrank:4", auto=True, drain_steps=2)
    go(pilot, "lowrank:4")
    steps(pilot, 3)
    assert pilot.leave_out_residuals(), "the coming plan was made before"
    pilot.advance()
    assert steps(pilot, 3) == [Plan(0, 0, 1 / 2), Plan(0, 0, 1.0), Plan()]
    assert not any(pilot.leave_out_residuals() for _ in range(3)), "a loss scaler says so in every step"
    run = Run(pilot, milliseconds=(*SLOW, (5.0, 0.0, 0.0)))
    run.steps(100)
    assert {plan.level for plan in run.plans} == {0, 1}
    (record,) = (record for record in pilot.log.records if record["kind"] == "forbid")
    assert record["level"] == "topk:0.2:16" and "loss scaling" in record["reason"]


@pytest.mark.parametrize("names", [("none",), ("fp16",), ("none", "qsgd:8")])
def test_loss_scaling_is_fine_with_a_fixed_level_that_keeps_none(names: tuple[str, ...]) -> None:
    pilot = make(*names)
    pilot.leave_out_residuals()
    assert steps(pilot, 4)[-1].level == len(names) - 1


@pytest.mark.parametrize("level", ["lowrank:4", "int8"])
def test_loss_scaling_refuses_a_fixed_level_that_keeps_one(level: str) -> None:
    with pytest.raises(ValueError, match=f"^{level} keeps a residual"):
        make("none", level).leave_out_residuals()


# -- contexts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checksums", "named"),
    [
        ([(1, 2), (1, 3)], "rank(s) 1,"),
        ([(7, 2), (1, 2), (7, 2), (7, 3)], "rank(s) 1, 3,"),
        ([(0, 0), (65535, 65535)], "rank(s) 1,"),
    ],
)
def test_contexts_that_differ_end_the_job_and_name_the_ranks(checksums: list[tuple[int, int]], named: str) -> None:
    pilot = make("lowrank:4", ranks=len(checksums))
    slots = [SideSlot(checksum_high=high, checksum_low=low) for high, low in checksums]
    with pytest.raises(RuntimeError) as raised:
        pilot.observe(pilot.plan, total(*slots))
    message = str(raised.value)
    assert named in message and "lowrank:4" in message and "HVDPLUS_COMPRESSION=fp16" in message


def test_equal_checksums_are_fine() -> None:
    pilot = make("lowrank:4", ranks=4)
    same = SideSlot(checksum_high=65535.0, checksum_low=1.0)
    assert step(pilot, *[same] * 4) == Plan(0, 0, 1.0)
    assert step(pilot, *[same._replace(checksum_low=0.0)] * 4).phase == 1


# -- a whole run, on a link made of numbers ----------------------------------------------------------------------------


class Run:
    """Drives pilots with side tensors whose times belong to the step before, as in a real job."""

    def __init__(
        self, *pilots: Pilot, milliseconds: Sequence[tuple[float, float, float]], slow_rank_ms: float = 0.0
    ) -> None:
        """``milliseconds``: (step, exposed communication, hidden communication), one entry a level."""
        self.pilots = pilots
        self.milliseconds = milliseconds
        self.slow_rank_ms = slow_rank_ms
        self.plans: list[Plan] = []
        """Plan of every step, from step 1 on, but for what it gauges."""

    def steps(self, count: int, loss: float | None = None) -> None:
        for _ in range(count):
            plan = self.pilots[0].plan
            residual = 0.5 * self.pilots[0].ladder.compressors[plan.level].keeps_residual
            slots = []
            for rank in range(self.pilots[0].ranks):
                slot = SideSlot(gradient_norm=plan.gauge * 2.0, residual_norm=plan.gauge * residual)
                if self.plans:
                    step_ms, exposed_ms, hidden_ms = self.milliseconds[self.plans[-1].level]
                    waits = exposed_ms + (self.slow_rank_ms if rank else 0.0)
                    times = StepTimes(step_ms / 1e3, 0.001, waits / 1e3, 0.0005, hidden_ms / 1e3)
                    slot = slot._replace(**times._asdict())
                if loss is not None:
                    slot = slot._replace(loss=loss + rank, has_loss=1.0)
                slots.append(slot)
            said = total(*slots)
            for pilot in self.pilots:
                pilot.observe(plan, said)
            after = {pilot.advance() for pilot in self.pilots}
            assert len(after) == 1, "every rank makes the same plan"
            self.plans.append(plan._replace(gauge=False))


def windows(pilot: Pilot) -> list[dict]:
    return [record for record in pilot.log.records if record["kind"] == "window"]


def decisions(pilot: Pilot) -> list[dict]:
    return [record for record in pilot.log.records if record["kind"] == "decision"]


# Milliseconds of a step, exposed communication, hidden communication; 1.5 ms are codec and input.
SLOW = ((50.0, 40.0, 0.0), (30.0, 20.0, 0.0), (15.0, 4.0, 0.0))
MIDDLE = ((56.5, 15.0, 25.0), (41.6, 0.1, 19.9), (41.6, 0.1, 2.9))
FAST = ((10.0, 0.1, 3.0), (10.0, 0.1, 1.5), (10.0, 0.1, 0.5))
GENTLE = ((16.0, 5.0, 0.0), (15.5, 4.5, 0.0), (14.0, 2.0, 0.0))
"""Dense costs so little more that it is looked at again after 400 steps."""


def test_auto_starts_dense_tries_and_holds() -> None:
    """Four ranks with their own pilots, told the same, agree at every step."""
    pilots = [make(auto=True, ranks=4, dense_steps=15) for _ in range(4)]
    run = Run(*pilots, milliseconds=SLOW)
    run.steps(300)
    # The last dense step's times come with the next, whose plan is made by then.
    assert run.plans[:16] == [Plan()] * 16
    assert run.plans[16:18] == [Plan(warms=LOWRANK)] * 2, "right before it begins"
    assert {plan.level for plan in run.plans[18:]} == {LOWRANK}
    assert [record["to"] for record in decisions(pilots[0])] == ["lowrank:4", "lowrank:4"]
    assert all(pilot.log.records == pilots[0].log.records for pilot in pilots)


def test_auto_comes_back_to_the_least_compression_that_is_enough() -> None:
    pilot = make(auto=True)
    run = Run(pilot, milliseconds=MIDDLE)
    run.steps(300)
    assert [record["to"] for record in decisions(pilot)] == ["fp16", "lowrank:4", "fp16"]
    assert {plan.level for plan in run.plans[100:]} == {FP16}


@pytest.mark.parametrize("dense_steps", [1, 8, 40])
def test_auto_is_dense_for_as_many_steps_as_the_settings_say(dense_steps: int) -> None:
    pilot = make(auto=True, dense_steps=dense_steps)
    run = Run(pilot, milliseconds=SLOW)
    run.steps(60)
    assert run.plans.index(Plan(warms=LOWRANK)) == dense_steps + 1


def test_auto_stays_dense_on_a_fast_link_and_beside_a_slow_rank() -> None:
    for links, slow_rank_ms in ((FAST, 0.0), (FAST, 8.0)):
        pilot = make(auto=True)
        run = Run(pilot, milliseconds=links, slow_rank_ms=slow_rank_ms)
        run.steps(200)
        assert set(run.plans) == {Plan(NONE)}
        (decision,) = decisions(pilot)
        assert (decision["from"], decision["to"]) == ("none", "none")


def test_auto_drains_before_it_measures_dense_again() -> None:
    """On its way back to dense the residual is paid out, and the level names of the log stay right all the while."""
    pilot = make(auto=True, drain_steps=4)
    run = Run(pilot, milliseconds=GENTLE)
    run.steps(700)
    back = next(i for i in range(60, 700) if run.plans[i].level == NONE)
    assert [plan.release for plan in run.plans[back - 1 : back + 5]] == [1.0, 1 / 4, 1 / 3, 1 / 2, 1.0, 0.0]
    assert [plan.level for plan in run.plans[back : back + 5]] == [NONE] * 5


def test_a_fixed_level_never_decides() -> None:
    pilot = make("fp16")
    run = Run(pilot, milliseconds=[SLOW[FP16]])
    run.steps(200)
    assert decisions(pilot) == [] and set(run.plans) == {Plan(0)}


@pytest.mark.parametrize("links", [SLOW, MIDDLE, FAST], ids=("slow", "middle", "fast"))
def test_windows_carry_the_level_that_ran_and_cover_every_step_once(links: Sequence[tuple[float, ...]]) -> None:
    pilot = make(auto=True, window_steps=7)
    run = Run(pilot, milliseconds=links)
    run.steps(250, loss=2.0)
    pilot.finish()
    expected = 1
    for window in windows(pilot):
        assert window["first_step"] == expected
        assert window["steps"] == window["last_step"] - window["first_step"] + 1 <= 7
        expected = window["last_step"] + 1
        plans = [run.plans[number - 1] for number in range(window["first_step"], window["last_step"] + 1)]
        assert len({(plan.level, plan.warms, plan.release > 0) for plan in plans}) == 1
        pays_out = plans[0].release and plans[0].level != LOWRANK
        name = "warming" if plans[0].warms else "draining" if pays_out else LADDER[plans[0].level]
        assert window["level"] == name
        step_ms, exposed_ms, hidden_ms = links[plans[0].level]
        assert window["step_ms"] == pytest.approx(step_ms)
        assert window["exposed_comm_ms"] == pytest.approx(exposed_ms)
        assert window["overlapped_comm_ms"] == pytest.approx(hidden_ms)
        assert (window["codec_ms"], window["input_wait_ms"]) == pytest.approx((1.0, 0.5))
        assert window["compute_ms"] == pytest.approx(step_ms - exposed_ms - 1.5)
        assert window["payload_bytes"] == SENT[pilot.ladder.names[plans[0].level]], "a step that teaches is dense"
        assert window["loss"] == pytest.approx(2.5), "the mean over two ranks that said 2 and 3"
    assert expected == 250, "the last step's times would have come with the next"


def test_windows_hold_medians_not_means() -> None:
    pilot = make("none", window_steps=5)
    step(pilot, SideSlot(), SideSlot())
    for step_ms in (10, 11, 900, 12, 9):
        step(pilot, *[SideSlot(step=step_ms / 1e3)] * 2)
    (window,) = windows(pilot)
    assert window["step_ms"] == pytest.approx(11)
    assert (window["first_step"], window["last_step"], window["loss"]) == (1, 5, None)


def test_losses_that_are_missing_or_not_finite_spoil_no_window() -> None:
    pilot = make("none", window_steps=4)
    step(pilot)
    timed = SideSlot(step=0.01)
    for slots in (
        (timed._replace(loss=1.0, has_loss=1.0), timed),  # reported by one rank only
        (timed._replace(loss=math.nan, has_loss=1.0), timed._replace(loss=5.0, has_loss=1.0)),
        (timed, timed),
        (timed._replace(loss=2.0, has_loss=1.0), timed._replace(loss=4.0, has_loss=1.0)),
    ):
        step(pilot, *slots)
    (window,) = windows(pilot)
    assert window["loss"] == pytest.approx((1.0 + 3.0) / 2)


def test_decisions_are_written_with_reason_and_evidence(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    pilot = make(auto=True, log=RunLog(path), dense_steps=15)
    Run(pilot, milliseconds=MIDDLE).steps(100)
    written = [record for record in read(path) if record["kind"] == "decision"]
    assert written == decisions(pilot)
    steps = [("none", "fp16"), ("fp16", "lowrank:4"), ("lowrank:4", "fp16")]
    assert [(record["from"], record["to"]) for record in written] == steps
    assert written[0]["step"] == 16, "15 dense steps, whose last times came with the 16th"
    assert "56.50 ms" in written[0]["reason"] and "fp16 promises 42.00 ms" in written[0]["reason"]
    measured = {"none.step_ms": 56.5, "none.exposed_comm_ms": 15.0, "none.overlapped_comm_ms": 25.0}
    assert measured.items() <= written[0]["evidence"].items()
    assert written[0]["evidence"]["fp16.predicted_step_ms"] == 42.0
    assert written[1]["evidence"]["fp16.step_ms"] == pytest.approx(41.6)


def test_the_log_opens_with_what_the_job_is_and_closes_with_what_it_came_to(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    pilot = make(auto=True, log=RunLog(path))
    pilot.describe_run(World(Local(), {"a": 1, "b": 1}, "ring", 0, ()), "torch", parameters=1000)
    run = Run(pilot, milliseconds=MIDDLE)
    run.steps(120)
    assert pilot.status.startswith("level fp16  step 41.60 ms, of which 0.10 ms")
    came_to = pilot.finish(accuracy=0.97)
    first, *_, last = [json.loads(line) for line in path.read_text().splitlines()]
    assert (first["kind"], first["framework"], first["hvdplus"]) == ("run", "torch", __version__)
    assert (first["ranks"], first["hosts"]) == (2, {"a": 1, "b": 1})
    assert (first["transport"], first["collective"]) == ("local", "ring")
    assert (first["compression"], first["ladder"]) == ("auto", list(LADDER))
    assert first["payload_bytes"] == {name: SENT[name] for name in LADDER}
    assert first["levels"] == {
        name: {"payload_bytes": SENT[name], "last_bytes": SENT[name] // 40, "messages": 4, "codec_ms": 0.0}
        for name in LADDER
    }
    assert first["limits"] == dataclasses.asdict(Limits(dense_steps=10, drain_steps=10, error_budget=1.0))
    assert (first["parameters"], first["gradient_bytes"]) == (1000, 4000)
    assert (last["kind"], last["steps"], last["accuracy"]) == ("end", 120, 0.97)
    assert last["wall_seconds"] >= 0
    assert (came_to["level"], came_to["steps"]) == ("fp16", 120)
    assert came_to["step_ms"] == pytest.approx(41.6), "of the last level, not of the dense start"
    assert came_to["exposed_comm_ms"] == pytest.approx(0.1)


def test_a_resumed_run_counts_its_own_steps_those_not_observed_among_them() -> None:
    before = make("none")
    Run(before, milliseconds=MIDDLE).steps(57)
    pilot = make("none")
    assert pilot.load(before.state())
    Run(pilot, milliseconds=MIDDLE).steps(30)
    pilot.unread_steps = 1
    assert pilot.finish()["steps"] == 31 and pilot.log.records[-1]["steps"] == 31
    assert windows(pilot)[-1]["last_step"] == 86, "windows count on"


def test_a_run_that_was_too_short_to_measure_ends_in_peace() -> None:
    pilot = make("none")
    assert pilot.status == "measuring"
    step(pilot)
    came_to = pilot.finish()
    assert came_to["steps"] == 1 and math.isnan(came_to["step_ms"])
    assert windows(pilot) == []


def test_steps_that_pay_out_or_teach_are_not_taken_for_dense_ones() -> None:
    """They are dearer than dense steps; measured as such, they would make a level look better than it is."""
    pilot = make("none", "lowrank:4", warm_steps=4, drain_steps=6, window_steps=3)
    run = Run(pilot, milliseconds=[(10.0, 5.0, 0.0), (8.0, 1.0, 0.0)])
    run.steps(12)
    go(pilot, "none")
    run.steps(12)
    run.steps(1)  # brings the last one's times
    pilot.finish()
    counted: dict[str, int] = {}
    for window in windows(pilot):
        counted[window["level"]] = counted.get(window["level"], 0) + window["steps"]
    assert counted == {"warming": 4, "lowrank:4": 8, "draining": 6, "none": 6}


def test_steps_that_teach_or_pay_out_are_not_shown_to_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither as steps of the level that learns nor as dense ones."""
    shown: list[tuple[int, float]] = []
    observe = Controller.observe

    def spy(controller: Controller, level: int, seen: Observation) -> Decision | None:
        shown.append((level, round(seen.times.step * 1e3)))
        return observe(controller, level, seen)

    monkeypatch.setattr(Controller, "observe", spy)
    pilot = make(auto=True, warm_steps=5, drain_steps=7)
    plans: list[Plan] = []
    costs = (18, 17, 15)  # ms a level
    for _ in range(600):
        slot = SideSlot()
        if plans:  # times are of the step before
            unlike = plans[-1].warms or (plans[-1].level != LOWRANK and plans[-1].release)
            cost = costs[plans[-1].level]
            slot = SideSlot(step=(999 if unlike else cost) / 1e3, exposed_comm=(cost - 10) / 1e3)
        plans.append(pilot.plan)
        step(pilot, *[slot] * 2)
    assert sum(bool(plan.warms) for plan in plans) >= 10 and sum(0 < plan.release < 1 for plan in plans) >= 6
    assert {level for level, _ in shown} == {NONE, FP16, LOWRANK}
    assert all(milliseconds == costs[level] for level, milliseconds in shown)
    regular = [plan for plan in plans[:-1] if not plan.warms and not (plan.level != LOWRANK and plan.release)]
    assert [level for level, _ in shown] == [plan.level for plan in regular], "all the others are"


def test_what_teaching_steps_take_changes_no_decision() -> None:
    """They cost whatever they cost."""
    decided = []
    for warm_steps in (1, 8):
        pilot = make(auto=True, warm_steps=warm_steps)
        Run(pilot, milliseconds=SLOW).steps(300)
        decided.append([(record["to"], record["evidence"]) for record in decisions(pilot)])
    assert decided[0] == decided[1]


def test_auto_passes_over_a_level_that_sends_no_less() -> None:
    """The pilot tells its controller what every level sends."""
    costs = [cost(sent) for sent in (4000, 4000, 300)]
    pilot = Pilot(Ladder(LADDER), Settings(), auto=True, ranks=2, costs=costs, log=RunLog(None))
    run = Run(pilot, milliseconds=GENTLE)
    run.steps(200)
    assert {plan.level for plan in run.plans} == {NONE, LOWRANK}


def test_rows_of_sparse_gradients_count_as_sent() -> None:
    """Whatever the level: they travel beside it."""
    pilot = make("none", "lowrank:4", window_steps=2, warm_steps=2)
    for count in range(8):
        pilot.row_bytes = 50 if count < 6 else 70
        step(pilot, *[SideSlot(step=0.01 if count else 0.0)] * 2)
    pilot.finish()
    assert [(record["level"], record["payload_bytes"]) for record in windows(pilot)] == [
        ("warming", SENT["none"] + 50),
        ("lowrank:4", SENT["lowrank:4"] + 50),
        ("lowrank:4", SENT["lowrank:4"] + 70),
        ("lowrank:4", SENT["lowrank:4"] + 70),
    ]


def test_the_log_of_a_fixed_level_names_it(tmp_path: Path) -> None:
    """Not the dense one that leads up to it; and what it came to is of its own steps."""
    path = tmp_path / "run.jsonl"
    pilot = make("none", "lowrank:4", log=RunLog(path))
    pilot.describe_run(World(Local(), {"a": 2}, "ring", 0, ()), "torch", parameters=1000)
    Run(pilot, milliseconds=[SLOW[NONE], SLOW[LOWRANK]]).steps(40)
    came_to = pilot.finish()
    first = read(path)[0]
    assert (first["compression"], first["ladder"]) == ("lowrank:4", ["none", "lowrank:4"])
    assert first["payload_bytes"] == {"none": 4000, "lowrank:4": 300}
    assert (came_to["level"], came_to["step_ms"]) == ("lowrank:4", pytest.approx(15.0))


# -- what ranks say besides times --------------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Observation]:
    """What the controller sees."""
    shown: list[Observation] = []
    observe = Controller.observe

    def spy(controller: Controller, level: int, seen: Observation) -> Decision | None:
        shown.append(seen)
        return observe(controller, level, seen)

    monkeypatch.setattr(Controller, "observe", spy)
    return shown


TIMED = SideSlot(step=0.02, exposed_comm=0.0001)


@pytest.mark.parametrize("names", [("none",), ("fp16",), ("int8",), ("none", "lowrank:4"), LADDER])
def test_every_fifth_plan_asks_how_large_gradients_are(names: tuple[str, ...]) -> None:
    """Dense, learning and lossy ones alike; but one rank alone has nothing to tell, and where nothing is ever held back
    or decided, nobody wants to know."""
    for ranks in (1, 2):
        pilot = make(*names, ranks=ranks, auto=names == LADDER)
        asked = []
        for _ in range(31):
            asked.append(pilot.plan.gauge)
            step(pilot)
        wanted = ranks > 1 and names not in (("none",), ("fp16",))
        assert asked == [wanted and number % GAUGE_STEPS == 0 for number in range(31)]


def test_the_gauge_changes_nothing_else_about_a_plan() -> None:
    """Neither its program nor its name: a compiled graph and a response cache know the one without."""
    ladder = Ladder(LADDER)
    for plan in (Plan(), Plan(LOWRANK, 1, 1.0), Plan(warms=LOWRANK)):
        gauging = plan._replace(gauge=True)
        assert ladder.program(gauging) == ladder.program(plan)
        assert ladder.tensor_name("grad", 3, gauging) == ladder.tensor_name("grad", 3, plan)


def test_norms_belong_to_the_step_whose_times_come_with_the_next(seen: list[Observation]) -> None:
    """Root mean squares over the ranks; an error is the residuals' over the gradients'."""
    pilot = make(auto=True)
    for number in range(12):
        told = [SideSlot(), SideSlot()] if number == 0 else [TIMED._replace(step=0.02 + number / 1e3)] * 2
        if pilot.plan.gauge:
            told[0] = told[0]._replace(gradient_norm=3.0 + number, residual_norm=1.0)
            told[1] = told[1]._replace(gradient_norm=4.0, residual_norm=7.0)
        step(pilot, *told)
    assert [round(each.times.step * 1e3) for each in seen] == list(range(21, 32))
    for number, each in enumerate(seen):
        if number % GAUGE_STEPS:
            assert math.isnan(each.error) and math.isnan(each.gradient_norm)
        else:
            gradients = math.sqrt(((3.0 + number) ** 2 + 4.0**2) / 2)
            assert each.gradient_norm == pytest.approx(gradients, rel=1e-6)
            assert each.error == pytest.approx(5.0 / gradients, rel=1e-6)
            assert each.error == float(f"{each.error:.7g}"), "no more digits than float32 has"


@pytest.mark.parametrize(
    ("gradient", "residual", "norm", "error"),
    [
        (0.0, 0.0, 0.0, math.nan),
        (0.0, 2.0, 0.0, math.nan),
        (math.nan, 1.0, math.nan, math.nan),
        (math.inf, 1.0, math.nan, math.nan),
        (2.0, math.inf, math.nan, math.nan),
        (2.0, 0.0, 2.0, 0.0),
    ],
)
def test_norms_that_say_nothing(
    gradient: float, residual: float, norm: float, error: float, seen: list[Observation]
) -> None:
    """Of gradients that are all zero there is no error, of a step that is not taken there is neither."""
    pilot = make(auto=True)
    step(pilot, *[SideSlot(gradient_norm=gradient, residual_norm=residual)] * 2)
    step(pilot, TIMED, TIMED)
    assert (seen[0].gradient_norm, seen[0].error) == pytest.approx((norm, error), nan_ok=True)


def test_the_learning_rate_is_rank_0s_to_seven_digits(seen: list[Observation]) -> None:
    """As float32 carries it, without the digits that are none."""
    pilot = make(auto=True)
    for rate in (0.1, 0.1, 0.0, 1e-5):
        step(pilot, TIMED._replace(learning_rate=rate), TIMED._replace(learning_rate=7.0))
    assert [each.learning_rate for each in seen] == [0.0, 0.1, 0.1, 0.0]
    assert float(np.float32(0.1)) != 0.1


def test_decisions_are_made_from_whole_microseconds(seen: list[Observation]) -> None:
    """So that the log holds exactly what they are made from."""
    pilot = Pilot(
        Ladder(LADDER),
        Settings(),
        auto=True,
        ranks=2,
        costs=[cost(4000, 1e-7), cost(2000, 0.00123456789), cost(300, 0.002)],
        log=RunLog(None),
    )
    assert [each.codec for each in pilot.costs] == [0.0, 0.001235, 0.002]
    step(pilot)
    step(pilot, *[SideSlot(step=0.0123456789, codec=1e-7, exposed_comm=0.0011111, overlapped_comm=0.0000009)] * 2)
    assert seen[0].times == StepTimes(0.012346, 0.0, 0.001111, 0.0, 0.000001)


def test_windows_hold_the_median_error() -> None:
    pilot = make("int8", window_steps=20)
    for number in range(41):
        told = TIMED if number else SideSlot()
        if pilot.plan.gauge:
            told = told._replace(gradient_norm=2.0, residual_norm=[1.0, 9.0, 2.0, 3.0][number // 5 % 4])
        step(pilot, told, told)
    assert [window["error"] for window in windows(pilot)] == [1.25, 1.25]
    pilot = make("int8", window_steps=3)
    for number in range(5):
        step(pilot, *[TIMED if number else SideSlot()] * 2)
    assert windows(pilot)[0]["error"] is None, "zero gradients have none"


# -- what a replay needs -----------------------------------------------------------------------------------------------


def test_the_trace_holds_every_step_that_the_controller_saw(tmp_path: Path, seen: list[Observation]) -> None:
    """Each once, in order, in whole microseconds, before the decision that it led to; and only in the file."""
    path = tmp_path / "run.jsonl"
    pilot = make(auto=True, log=RunLog(path))
    run = Run(pilot, milliseconds=GENTLE)
    run.steps(600)
    pilot.finish()
    records = read(path)
    assert all(record["kind"] != "trace" for record in pilot.log.records)
    traces = [record for record in records if record["kind"] == "trace"]
    assert max(len(trace["steps"]) for trace in traces) == TRACE_STEPS
    rows = [row for trace in traces for row in trace["steps"]]
    assert len(rows) == len(seen)
    for (level, *micros, error, norm, rate, sounding), each in zip(rows, seen, strict=True):
        assert micros == [GENTLE[level][0] * 1e3, 1000, GENTLE[level][1] * 1e3, 500, GENTLE[level][2] * 1e3, 0]
        assert sounding == each.sounding_bytes
        assert all(isinstance(value, int) for value in micros)
        assert StepTimes(*(value / 1e6 for value in micros)) == each.times
        gauged = (None if math.isnan(value) else value for value in (each.error, each.gradient_norm))
        assert (error, norm) == tuple(gauged) and rate == each.learning_rate
    assert {row[7] for row in rows} == {None, 0.0, 0.25} and {row[8] for row in rows} == {None, 2.0}
    # A decision stands right after the step that it was made at.
    for before, record in zip(records, records[1:], strict=False):
        if record["kind"] == "decision":
            last = next(each for each in reversed(records[: records.index(record)]) if each["kind"] == "trace")
            assert last["last_step"] == record["step"] - 1 and before["kind"] in ("trace", "window")
            assert LADDER[last["steps"][-1][0]] == record["from"]


def test_a_fixed_level_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    pilot = make("none", "fp16", log=RunLog(path))
    pilot.describe_run(World(Local(), {"a": 2}, "ring", 0, ()), "torch", parameters=1000)
    Run(pilot, milliseconds=[SLOW[NONE], SLOW[FP16]]).steps(120)
    pilot.finish()
    assert {record["kind"] for record in read(path)} == {"run", "window", "end"}
    assert read(path)[0]["limits"] is None


def test_a_trace_that_is_not_full_is_written_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    pilot = make(auto=True, log=RunLog(path))
    run = Run(pilot, milliseconds=FAST)
    run.steps(8)
    assert not any(record["kind"] == "trace" for record in read(path))
    pilot.finish()
    assert [len(record["steps"]) for record in read(path) if record["kind"] == "trace"] == [7]


def test_buckets_that_are_cut_anew_send_something_else(tmp_path: Path) -> None:
    """The controller decides by what levels send from then on, and the log says what that is."""
    path = tmp_path / "run.jsonl"
    pilot = make(auto=True, log=RunLog(path), window_steps=5)
    run = Run(pilot, milliseconds=GENTLE)
    run.steps(8)
    new = [cost(5000), cost(2500, 0.0012344), cost(6000)]
    pilot.resize(new)
    run.steps(192)
    assert pilot.payload_bytes == (5000, 2500, 6000)
    assert {plan.level for plan in run.plans} == {NONE, FP16}, "the last level sends no less any more"
    assert [window["payload_bytes"] for window in windows(pilot)][:2] == [4000, 5000]
    records = read(path)
    kinds = [record["kind"] for record in records]
    (record,) = (record for record in records if record["kind"] == "resize")
    assert record["levels"]["fp16"] == {"payload_bytes": 2500, "last_bytes": 62, "messages": 4, "codec_ms": 1.234}
    assert kinds.index("trace") < kinds.index("resize"), "what was seen before stands before"
    assert len(records[kinds.index("trace")]["steps"]) == 7
    fixed = make("none", "fp16")
    fixed.resize(new[:2])
    assert fixed.payload_bytes == (5000, 2500)


def test_what_is_forbidden_is_in_the_log_where_it_happened(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    pilot = make(auto=True, log=RunLog(path))
    run = Run(pilot, milliseconds=SLOW)
    run.steps(40)
    assert run.plans[-1].level == LOWRANK
    pilot.leave_out_residuals()
    pilot.advance()
    run.steps(100)
    records = read(path)
    at = next(i for i, record in enumerate(records) if record["kind"] == "forbid")
    assert (records[at]["step"], records[at]["level"]) == (40, "lowrank:4")
    shown = [row[0] for record in records[:at] if record["kind"] == "trace" for row in record["steps"]]
    assert shown.count(LOWRANK) == 39 - 13, "all that was seen before"
    assert {plan.level for plan in run.plans[42:]} == {NONE, FP16}
    # Once is enough, where nothing is left that keeps a residual, too.
    other = make("none", "fp16", auto=True)
    other.leave_out_residuals()
    assert other.log.records == []


def test_a_level_over_the_error_budget_does_not_come_back() -> None:
    """The settings' budget, in the ranks' own figures."""
    for budget, levels in ((0.2, {NONE, FP16}), (0.3, {NONE, LOWRANK})):
        pilot = make(auto=True, error_budget=budget)
        run = Run(pilot, milliseconds=SLOW)
        run.steps(300)
        assert {plan.level for plan in run.plans[100:]} | {NONE} == levels
