"""The controller on numbers alone: a simulated job on a simulated link, and what it decides there."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from frameworks import examples as up_to
from hypothesis import given
from hypothesis import strategies as st
from simulating import (
    LIMITS,
    LOSSY,
    NAMES,
    NOISES,
    NORM_STEPS,
    WARM_STEPS,
    Course,
    Job,
    Noise,
    Training,
    any_job,
    calm,
    drive,
    jobs,
    ms,
    some_jobs,
)

from hvdplus.control.controller import Controller, Decision, Limits, Mode, Observation, typical_times
from hvdplus.control.link import LevelCost
from hvdplus.control.meter import StepTimes, reduce_times

NONE, FP16, INT8, LOWRANK_16, LOWRANK_8 = range(5)
SETTLED = LIMITS.dense_steps + 80
"""Steps after which a level has been chosen."""
ENOUGH = 1 / (1 - LIMITS.bottleneck)
"""How much longer than the best a step may take: dense is kept where its communication is no bottleneck."""
WORTHWHILE = 1 / (1 - LIMITS.worthwhile) / (1 - LIMITS.margin)
"""The same after a change of the link, when only what promises to save so much is tried."""
EXACT = 1 + 1e-9

examples = up_to(60)
some_examples = up_to(40)
few_examples = up_to(20)

FAST = Job(rate=10e9)
SLOW = Job(rate=10e6)
MIDDLE = Job(rate=300e6, messages=20, codec=(0.0, 0.5 * ms, 1 * ms, 4 * ms, 3 * ms))
"""At this speed float16 alone hides behind the computation."""


def share(job: Job, level: int) -> float:
    """Exposed communication as a share of the step."""
    return job.exposed(level) / job.seconds(level)


def least(job: Job) -> int:
    """The least compression that is as good as the best level."""
    return min(level for level in range(5) if job.seconds(level) * (1 - LIMITS.margin) <= job.best() * EXACT)


def test_the_simulated_links_are_what_they_are_called() -> None:
    assert share(FAST, NONE) < LIMITS.bottleneck / 2
    assert share(MIDDLE, NONE) > 2 * LIMITS.bottleneck and least(MIDDLE) == FP16
    assert share(SLOW, NONE) > 0.9 and least(SLOW) == LOWRANK_8
    dice = random.Random(0)
    figures = reduce_times(SLOW.step(FP16, dice))
    assert figures.step == pytest.approx(SLOW.seconds(FP16)) and figures.comm == pytest.approx(SLOW.wire(FP16))


# -- the start ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dense_steps", [1, 2, 7, 15, 40])
def test_the_first_steps_are_dense(dense_steps: int) -> None:
    """However slow the link. The last one's figures arrive with the step after it."""
    course = drive(SLOW, 100, limits=Limits(dense_steps=dense_steps))
    (first, decision), *_ = course.decisions
    assert first == dense_steps and "communication holds up" in decision.reason
    assert set(course.levels[: dense_steps + 1]) == {NONE}
    assert course.levels[dense_steps + 1] == decision.level != NONE


@pytest.mark.parametrize("dense_steps", [10, 15, 20, 40])
@pytest.mark.parametrize("restless", [0, 17, 23, 1000])
def test_the_start_lasts_while_gradients_change_fast_but_never_twice_as_long(dense_steps: int, restless: int) -> None:
    """``restless``: until this step every norm is three times as large or small as the one before."""

    def norm(step: int) -> float:
        return 3.0 if step < restless and step // NORM_STEPS % 2 else 1.0

    def is_calm(steps: int) -> bool:
        """After so many steps, of which every fifth measured norms."""
        latest = (steps - 1) // NORM_STEPS * NORM_STEPS
        return norm(latest) == norm(latest - NORM_STEPS)

    limits = Limits(dense_steps=dense_steps)
    course = drive(SLOW, 100, limits=limits, training=lambda step, level, age: (0.0, norm(step), 0.1))
    first = course.decisions[0][0]
    assert first == next((steps for steps in range(dense_steps, 2 * dense_steps) if is_calm(steps)), 2 * dense_steps)
    assert first == (dense_steps if restless == 0 else 2 * dense_steps if restless == 1000 else first)


def test_norms_that_shrink_slowly_do_not_extend_the_start() -> None:
    course = drive(SLOW, 60, training=lambda step, level, age: (0.0, 10 * 0.9**step, 0.1))
    assert course.decisions[0][0] == LIMITS.dense_steps


# -- what is chosen on a steady link -----------------------------------------------------------------------------------


@given(jobs)
@examples
def test_the_best_level_is_found_within_80_steps(job: Job) -> None:
    """Whatever the link and the codecs, and whether or not their times are known beforehand (wrong by 30 %)."""
    course = drive(job, SETTLED + 2)
    held = course.levels[-1]
    assert course.modes[-1] is Mode.HOLD
    if share(job, NONE) <= LIMITS.bottleneck / EXACT:
        assert set(course.levels) == {NONE} and job.seconds(NONE) <= ENOUGH * EXACT * job.best()
    elif share(job, NONE) > LIMITS.bottleneck * EXACT:
        assert held == least(job), "the least compression that is as good as the best"
        assert job.seconds(held) * (1 - LIMITS.margin) <= job.best() * EXACT


@given(jobs)
@examples
def test_a_level_is_tried_once_at_most(job: Job) -> None:
    course = drive(job, SETTLED + 300)
    trials = Counter(
        new for old, new in zip(course.levels, course.levels[1:], strict=False) if old != new and new != NONE
    )
    assert all(count <= (2 if level == course.levels[-1] else 1) for level, count in trials.items())
    assert course.changes(SETTLED) == 0


def test_what_steps_typically_take_is_not_what_slowed_them_down() -> None:
    def steps(*seconds: float) -> list[StepTimes]:
        return [StepTimes(each, 0.0, 1 - each, 0.0, 0.0) for each in seconds]

    for some, typical in (([3.0], 3), ([3, 2], 2.5), ([4, 1, 3, 2, 5], 2), ([9, 1, 2, 3, 9, 9, 9, 9], 2.5)):
        assert typical_times(steps(*some)).step == typical
    assert typical_times(steps(1, 2, 3, 4, 5)).exposed_comm == 1 - 4.5, "figure by figure"
    # Of a level that takes turns neither phase alone is typical, whichever was first.
    assert typical_times(steps(1, 3, 1, 3, 1, 3, 9, 3)).step == typical_times(steps(3, 1, 3, 1, 3, 1, 9, 1)).step == 2


@pytest.mark.parametrize("kind", NOISES)
def test_with_noise_39_of_40_jobs_are_within_5_percent_of_the_best(kind: str) -> None:
    """And all within 15 %."""
    slower = []
    for seed, job in enumerate(some_jobs(80, NOISES[kind])):
        course = drive(job, SETTLED + 2, seed=seed)
        slower.append(job.seconds(course.levels[-1]) / job.best())
    assert sum(ratio > ENOUGH for ratio in slower) <= len(slower) / 40 and max(slower) < 1.15


@given(jobs)
@examples
def test_never_slower_than_dense_or_float16(job: Job) -> None:
    """Promise 1: what is held compresses only where that saves time, against float16 too. Where communication is no
    bottleneck dense is kept, though float16 could save a part of that 5 %."""
    course = drive(job, SETTLED + 2)
    held = course.levels[-1]
    better = min(job.seconds(NONE), job.seconds(FP16))
    assert job.seconds(held) <= better * EXACT * (1 / (1 - LIMITS.margin) if held else ENOUGH)


def test_a_slow_link_is_answered_with_the_fastest_level() -> None:
    course = drive(replace(SLOW, noise=NOISES["jitter"]), 300)
    assert set(course.levels[SETTLED:]) == {LOWRANK_8}
    assert "lowrank:8+fp16 is best, 9" in course.last.reason


def test_the_fastest_is_held_even_if_it_is_not_the_last_one_tried() -> None:
    """lowrank:8 sends least, and its codec, of which nothing was known, costs more than that saves."""
    job = replace(SLOW, codec=(0.0, 1 * ms, 2 * ms, 4 * ms, 150 * ms), told=0.0)
    course = drive(job, 300)
    assert course.levels[16] == LOWRANK_8, "promises most"
    assert set(course.levels[SETTLED:]) == {LOWRANK_16}
    assert course.levels.count(LOWRANK_8) < 20


def test_what_is_hopeless_is_given_up_before_its_trial_is_over() -> None:
    job = replace(SLOW, codec=(0.0, 1 * ms, 2 * ms, 4 * ms, 9.0), told=0.0)
    assert drive(job, 300).levels.count(LOWRANK_8) == WARM_STEPS + LIMITS.settle_steps + 3 + 1


def test_the_least_compression_that_removes_the_bottleneck_wins() -> None:
    """int8 and lowrank would be no slower, but what they save is within the margin."""
    job = replace(MIDDLE, codec=(0.0, *[0.5 * ms] * 4))
    assert job.seconds(LOWRANK_8) < job.seconds(FP16)
    for seed in range(10):
        course = drive(replace(job, noise=Noise(compute=0.005, wire=0.05)), 300, seed=seed)
        assert course.decisions[0][1].level == FP16, "tried first"
        assert course.levels[-1] == FP16 and "fp16 is best" in course.last.reason


def test_compression_that_does_not_pay_is_given_up_with_a_reason() -> None:
    job = replace(SLOW, codec=(0.0, 0.5, 0.9, 1.1, 1.2), told=0.0)
    course = drive(job, 1000)
    assert "compression does not pay" in course.last.reason
    assert all(name in course.last.reason for name in NAMES), "what was tried, with its times"
    assert set(course.levels[SETTLED:]) == {NONE}, "remembered while the link stays as it is"


def test_input_that_is_waited_for_is_named_with_its_figures() -> None:
    """What a rank waits for input counts as computation; communication stays as it is."""
    controller = Controller(NAMES, FAST.costs)
    times = StepTimes(11 * ms, input_wait=1 * ms)
    slow = times._replace(step=30 * ms, input_wait=20 * ms)
    said = [controller.observe(0, Observation(slow if step > 100 else times)) for step in range(200)]
    reasons = [decision.reason for decision in said[100:] if decision]
    assert any("computation and input wait take 30.00 ms a step instead of 11.00 ms" in reason for reason in reasons)


def test_codecs_that_are_known_to_be_dear_are_not_even_tried() -> None:
    job = replace(SLOW, codec=(0.0, 0.9, 1.3, 1.6, 1.7))
    course = drive(job, 300)
    assert set(course.levels) == {NONE} and "no other level promises enough" in course.last.reason


@pytest.mark.parametrize("pays", [True, False])
def test_the_mildest_level_is_tried_though_the_model_has_doubts(pays: bool) -> None:
    """The model takes the codec for ten times dearer than it is; or is right."""
    codec = (0.0, 1.5 * ms if pays else 15 * ms, *[30 * ms] * 3)
    job = Job(rate=300e6, overlap=0.4, messages=2, codec=codec, told=10.0 if pays else 1.0)
    dense, fp16 = job.seconds(NONE), job.compute + 15 * ms + job.exposed(FP16)
    assert (1 - LIMITS.mild_optimism) * fp16 < dense < (1 - LIMITS.optimism) * fp16
    course = drive(job, 300)
    assert FP16 in course.levels and len(course.decisions) == 2
    assert course.levels[-1] == (FP16 if pays else NONE)


def test_the_mildest_level_is_tried_though_more_compression_was_measured_faster_than_dense() -> None:
    class Doubted(Job):
        """The model takes the codec of float16 for much dearer than it is."""

        @property
        def costs(self) -> tuple[LevelCost, ...]:
            none, fp16, *others = super().costs
            return none, fp16._replace(codec=19 * ms), *others

    job = Doubted(rate=300e6, overlap=0.4, messages=2, codec=(0.0, 0.5 * ms, *[9 * ms] * 3))
    fp16, lowrank = job.compute + 19 * ms + job.exposed(FP16), min(map(job.seconds, (LOWRANK_16, LOWRANK_8)))
    assert (1 - LIMITS.mild_optimism) * fp16 < (1 - LIMITS.margin) * lowrank < lowrank < (1 - LIMITS.optimism) * fp16
    assert job.seconds(FP16) < (1 - LIMITS.margin) * lowrank
    assert lowrank < (1 - LIMITS.margin) * job.seconds(NONE)
    course = drive(job, 300)
    assert course.times("tried as the mildest level") and course.levels[-1] == FP16


# -- communication that is none ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jitter", "odd steps", "restless wire"])
def test_without_a_bottleneck_it_never_leaves_dense(kind: str) -> None:
    for seed in range(10):
        course = drive(replace(FAST, noise=NOISES[kind]), 500, seed=seed)
        assert set(course.levels) == {NONE}
        ((_, decision),) = course.decisions
        assert "communication is no bottleneck" in decision.reason


@given(jobs, st.floats(0.2, 3))
@few_examples
def test_a_slow_rank_is_not_answered_with_compression(job: Job, slow: float) -> None:
    """Each of the others waits for much of the step, and it looks like communication to them."""
    job = replace(job, rate=1e15, alpha=0.0, slow_rank=slow * job.compute, noise=NOISES["jitter"])
    theirs = job.step(NONE, random.Random(0))[1]
    assert theirs.exposed_comm > 2 * LIMITS.bottleneck * theirs.step
    course = drive(job, 200)
    assert set(course.levels) == {NONE} and "communication is no bottleneck" in course.last.reason


def test_a_rank_that_turns_slow_is_not_answered_with_compression_either() -> None:
    for slow in (0.1, 0.5, 2.0):
        job = replace(FAST, noise=NOISES["jitter"])
        later = replace(job, slow_rank=slow * job.compute)
        course = drive(lambda step, job=job, later=later: job if step < 100 else later, 400)
        assert set(course.levels) == {NONE}
        assert not course.times("communication takes")


@pytest.mark.parametrize("names", [("none",), NAMES])
def test_a_bottleneck_without_a_remedy_is_not_denied(names: tuple[str, ...]) -> None:
    """A ladder of one level, or one whose levels all send the same."""
    costs = (LevelCost(8_000_000, 1_600_000, 5),) * len(names)
    controller = Controller(names, costs)
    dice = random.Random(0)
    decided = [controller.observe(0, Observation(reduce_times(SLOW.step(NONE, dice)))) for _ in range(300)]
    (decision,) = filter(None, decided)
    assert decision.level == NONE and "holds up" in decision.reason and "no bottleneck" not in decision.reason


def test_a_job_that_takes_no_time_divides_by_nothing() -> None:
    controller = Controller(NAMES, FAST.costs)
    decisions = [controller.observe(NONE, Observation(StepTimes())) for _ in range(200)]
    assert [decision.level for decision in decisions if decision] == [NONE]


def test_levels_that_send_nothing_divide_by_nothing() -> None:
    """As in a model without parameters that may be compressed."""
    for costs in ((LevelCost(0, 0, 0),) * 5, (LevelCost(100, 50, 2), *(LevelCost(0, 0, 0),) * 4)):
        controller = Controller(NAMES, costs)
        dice = random.Random(0)
        for _ in range(600):
            controller.observe(controller.level, Observation(reduce_times(SLOW.step(controller.level, dice))))


# -- steadiness --------------------------------------------------------------------------------------------------------


STEADY_STEPS = 500


@cache
def steady(kind: str) -> list[tuple[Job, Course]]:
    """40 jobs with noise, each with what happened until it was settled and 500 steps longer."""
    drawn = some_jobs(40, NOISES[kind], seed=2)
    return [(job, drive(job, SETTLED + STEADY_STEPS, seed=seed)) for seed, job in enumerate(drawn)]


@pytest.mark.parametrize("kind", NOISES)
def test_noise_makes_nothing_oscillate(kind: str) -> None:
    """In 500 steady steps no job changes its level more than 7 times (there and back at three comparisons, one of which
    may end elsewhere), and 9 of 10 spend 95 % of the steps at one level. Where two are as good as each other the choice
    may change, and costs nothing."""
    courses = [course for _, course in steady(kind)]
    assert max(course.changes(SETTLED) for course in courses) <= 7
    assert sum(course.most(SETTLED)[1] >= 0.95 for course in courses) >= 0.9 * len(courses)


@pytest.mark.parametrize("kind", NOISES)
def test_with_noise_the_steady_state_is_nearly_the_best(kind: str) -> None:
    """Every one of 500 steps counts, looks at dense and comparisons too: 39 of 40 jobs are within 5 % of the best, and
    38 of 40 within the margin of dense and float16 (but 5 % where communication is no bottleneck)."""
    slower, not_better = [], []
    for job, course in steady(kind):
        mean = sum(map(job.seconds, course.levels[SETTLED:])) / STEADY_STEPS
        slower.append(mean / job.best())
        margin = ENOUGH if share(job, NONE) < 2 * LIMITS.bottleneck else 1 / (1 - LIMITS.margin)
        not_better.append(mean / job.best((NONE, FP16)) / margin)
    assert sum(ratio > ENOUGH for ratio in slower) <= 1 and max(slower) < 1.15
    assert sum(ratio > 1 for ratio in not_better) <= 2 and max(not_better) < 1.1


@pytest.mark.parametrize("kind", NOISES)
def test_on_a_steady_link_levels_are_changed_for_rare_looks_and_comparisons_only(kind: str) -> None:
    """Comparisons come after 20, 80 and 320 held steps, looks at dense after 400: each named as what it is."""
    for _, course in steady(kind):
        held = 0
        compared: list[int] = []
        for step in range(len(course.levels) - 1):
            held = held + 1 if course.modes[step] is Mode.HOLD else 0
            if course.modes[step] is Mode.HOLD and course.modes[step + 1] is Mode.TRIAL:
                reason = dict(course.decisions)[step].reason
                assert re.search("compared once more|is it still needed|communication takes|input wait take", reason)
                if "compared once more" in reason:
                    compared.append(held)
                if "is it still needed" in reason:
                    assert held >= LIMITS.probe_steps
        assert len(compared) <= 3
        assert all(steps >= 20 * 4**number for number, steps in enumerate(compared))


def test_comparisons_become_rarer() -> None:
    """Where codecs take longer and longer, what was measured long ago always looks better than what is held."""
    start = Job(rate=100e6, codec=(0.0, 30 * ms, 24 * ms, 5 * ms, 5 * ms))
    course = drive(lambda step: replace(start, codec=tuple(1.002**step * c for c in start.codec)), 2000)
    compared = course.times("compared once more")
    assert 3 <= len(compared) <= 5
    gaps = [later - earlier for earlier, later in zip(compared, compared[1:], strict=False)]
    assert all(later > 3 * earlier for earlier, later in zip(gaps, gaps[1:], strict=False))


def test_a_slow_machine_is_no_excuse_for_what_has_lost_a_comparison_by_a_tenth() -> None:
    """A level that makes the computation itself slower looks as if it had only been tried in a slow phase. Once what is
    held is slower than that, or once the wire has changed, it is compared again."""
    present = 0

    def watch(step: int, controller: Controller) -> None:
        nonlocal present
        present = controller.level

    slow = replace(NEAR, compute=1.25 * NEAR.compute)
    course = drive(lambda step: slow if present == INT8 else NEAR, 2000, events=watch)
    assert slow.seconds(INT8) * NEAR.compute / slow.compute < (1 - LIMITS.margin) * NEAR.seconds(FP16)
    assert len(course.times("compared once more")) == 1
    assert course.most(SETTLED)[0] == FP16 and course.controller._beaten == [INT8]

    dearer = replace(NEAR, codec=(0.0, 40 * ms, *NEAR.codec[2:]))
    course = drive(lambda step: slow if present == INT8 else NEAR if step < 1000 else dearer, 2000, events=watch)
    assert course.levels[-1] == INT8

    faster = replace(NEAR, rate=4 * NEAR.rate)
    course = drive(lambda step: slow if present == INT8 else NEAR if step < 1000 else faster, 1200, events=watch)
    assert INT8 not in course.controller._beaten


@pytest.mark.parametrize("threshold", ["bottleneck", "margin"])
def test_a_link_right_at_a_limit_does_not_oscillate_either(threshold: str) -> None:
    if threshold == "bottleneck":  # float16 and all others are dearer than what they save
        job = Job(overlap=0.0, alpha=0.0, rate=8e6 / (50 / 19 * ms), codec=(0.0, *[4 * ms] * 4))
        assert share(job, NONE) == pytest.approx(LIMITS.bottleneck, rel=0.01)
    else:  # what float16 saves, its codec takes away again, but for 2 %
        job = Job(overlap=0.0, alpha=0.0, rate=8e6 / (20 * ms), codec=(0.0, 8.6 * ms, *[20 * ms] * 3))
        assert job.seconds(FP16) / job.seconds(NONE) == pytest.approx(1 - LIMITS.margin, abs=0.001)
    for seed in range(20):
        course = drive(replace(job, noise=NOISES["jitter"]), SETTLED + 400, seed=seed)
        assert course.changes(SETTLED) <= 6  # there and back at three comparisons


NEAR = Job(rate=40e6, codec=(0.0, 1 * ms, 67 * ms, *[200 * ms] * 2), told=0.0, overlap=0.0)
"""float16 is the fastest, int8 takes a tenth longer."""


@pytest.mark.parametrize("lasts", [0, 1])
def test_phases_of_a_machine_that_change_between_two_trials_deceive_nobody(lasts: int) -> None:
    """What a level sends is slower by a quarter while it is held, so that another looks better, and fast again as soon
    as that one is compared: it would win, if the held one had not another turn. What does stay slow, is left."""
    assert NEAR.seconds(INT8) / NEAR.seconds(FP16) == pytest.approx(1.1, abs=0.01)
    slow = replace(NEAR, rate=NEAR.rate / 1.25, codec=tuple(1.25 * c for c in NEAR.codec))
    stays = replace(NEAR, codec=(0.0, 70 * ms, *NEAR.codec[2:])) if lasts else NEAR
    phases = [NEAR, slow, stays]
    phase = 0

    def watch(step: int, controller: Controller) -> None:
        nonlocal phase
        holding = controller.mode is Mode.HOLD
        phase = 2 if phase == 1 and not holding else max(phase, int(holding))

    course = drive(lambda step: phases[phase], 200, events=watch)
    assert phase == 2 and len(course.times("compared once more")) >= 1 and len(course.times("before it is left")) == 1
    assert course.levels[-1] == (INT8 if lasts else FP16)


def test_what_was_measured_decides_what_is_held() -> None:
    """However unlike the levels' computation is: nobody knows whether the machine or the level is to blame for it."""

    def steps(busy: float, comm: float) -> list[StepTimes]:
        return [StepTimes(step=busy + comm, exposed_comm=comm)] * LIMITS.trial_steps

    for busy, best in ((10.0, NONE), (10.9, FP16), (13.0, FP16), (7.0, NONE)):
        controller = Controller(NAMES, SLOW.costs, level=FP16)
        controller._samples = {NONE: steps(busy, 2.0), FP16: steps(10.0, 2.0)}
        decision = controller._hold_best("tried")
        assert decision.level == best
        assert "pace" not in decision.reason


@pytest.mark.parametrize(
    ("exposed", "longer"),
    [(8, (0, 14, 16, 15, 15)), (12, (0, 3, 12, 25, 24)), (20, (0, 30, 30, 30, 30)), (20, (0, 31, 40, 5, 50))],
)
def test_no_level_is_held_that_took_longer_than_another(exposed: int, longer: tuple[int, ...]) -> None:
    """Codecs on a device may make computation longer without being seen as codecs. A step of 131 ms was once held as
    13% less than a dense one of 120 ms, since the machine was thought to have become slower."""
    costs = tuple(cost._replace(codec=ms * more) for cost, more in zip(SLOW.costs, longer, strict=True))
    controller, held = Controller(NAMES, costs), Counter[int]()
    took = [ms * (100 + more + (exposed, exposed / 2, 2, 1, 1)[level]) for level, more in enumerate(longer)]
    for _ in range(600):
        level = controller.level
        waited = took[level] - ms * (100 + longer[level])
        controller.observe(level, Observation(StepTimes(step=took[level], exposed_comm=waited), 0.3, 1.0, 0.1))
        if controller.mode is Mode.HOLD:
            held[controller.level] += 1
            known = [took[each] for each in controller._samples]
            assert took[controller.level] <= min(known) / (1 - LIMITS.margin)
    assert set(held) == {min(range(5), key=took.__getitem__)}


def test_a_level_that_computes_longer_by_itself_is_not_held_for_ever() -> None:
    """Dense takes less in all, though more of it is communication."""

    def seen(level: int) -> Observation:
        busy, comm = ((100 * ms, 20 * ms), (150 * ms, 2 * ms))[min(level, 1)]
        return Observation(StepTimes(step=busy + comm, exposed_comm=comm), 0.0, 1.0)

    controller, levels = Controller(NAMES, SLOW.costs), []
    for _ in range(400):
        levels.append(controller.level)
        controller.observe(controller.level, seen(controller.level))
    assert set(levels[:100]) > {NONE} == set(levels[-100:])
    assert sum(level != NONE for level in levels[100:]) <= LIMITS.settle_steps + LIMITS.trial_steps, "one look more"


@pytest.mark.parametrize("slower", [1.2, 1.5])
def test_a_level_that_was_tried_in_a_slow_phase_is_compared_once_more(slower: float) -> None:
    """All that a processor does is slower in it, sending as well; computation tells by how much."""
    job = replace(NEAR, codec=(0.0, 1 * ms, *NEAR.codec[2:]))
    slow = replace(
        job,
        compute=slower * job.compute,
        rate=job.rate / slower,
        alpha=slower * job.alpha,
        codec=tuple(slower * seconds for seconds in job.codec),
    )
    assert least(job) == FP16
    undisturbed = drive(job, 200)
    trial = undisturbed.levels.index(FP16)
    ends = next(step for step, _ in undisturbed.decisions if step >= trial)
    course = drive(lambda step: slow if trial <= step <= ends else job, 300)
    assert course.times("at the machine's present pace: compared once more")
    assert set(course.levels[150:]) == {FP16}


def test_a_machine_that_is_slower_as_a_whole_makes_no_other_level_look_better() -> None:
    """What was tried while it was fast would be slower now, too."""
    slow = replace(
        NEAR, compute=1.2 * NEAR.compute, rate=NEAR.rate / 1.2, codec=tuple(1.2 * codec for codec in NEAR.codec)
    )
    course = drive(lambda step: slow if step >= SETTLED else NEAR, 600)
    assert slow.seconds(FP16) > NEAR.seconds(INT8)
    assert not course.times("compared once more") and set(course.levels[SETTLED:]) == {FP16}


@pytest.mark.parametrize(("forbidden", "running"), [(FP16, FP16), (FP16, INT8), (INT8, INT8), (INT8, FP16)])
def test_a_level_forbidden_while_it_is_compared_is_not_held(forbidden: int, running: int) -> None:
    slow = replace(NEAR, rate=NEAR.rate / 1.25, codec=(0.0, 20 * ms, *NEAR.codec[2:]))
    when = []

    def forbid(step: int, controller: Controller) -> None:
        if controller._rivals and controller.level == running:
            controller.forbid(forbidden, "a test")
            when.append(step)

    course = drive(lambda step: NEAR if step < SETTLED else slow, 300, events=forbid)
    assert when and max(course.levels[when[0] :]) < forbidden
    assert course.modes[-1] is Mode.HOLD


# -- links that change -------------------------------------------------------------------------------------------------


def changing(job: Job, rates: tuple[float, ...], period: int = 150) -> Callable[[int], Job]:
    return lambda step: replace(job, rate=rates[min(step // period, len(rates) - 1)])


LINKS = (125e6, 12.5e6, 1e10, 125e6)


@pytest.mark.parametrize("kind", [None, "jitter", "odd steps"])
def test_after_a_change_of_the_link_the_best_level_is_found_within_80_steps(kind: str | None) -> None:
    """1 Gbit/s, 100 Mbit/s, very fast, 1 Gbit/s: of all jobs and changes 9 of 10 are within 5 % of the best again, and
    all but 1 in 30 within the tenth for which alone something else is tried."""
    slower = []
    for seed, job in enumerate(some_jobs(30, NOISES[kind] if kind else Noise(), seed=5)):
        job = replace(job, alpha=min(job.alpha, 0.2 * ms))
        course = drive(changing(job, LINKS), 600, seed=seed)
        for number, rate in enumerate(LINKS):
            now = replace(job, rate=rate)
            held = course.levels[number * 150 + (81 if number else SETTLED + 1)]
            slower.append(now.seconds(held) / now.best())
    assert sum(ratio > ENOUGH for ratio in slower) <= len(slower) / 10
    assert sum(ratio > WORTHWHILE for ratio in slower) <= len(slower) / 30


def test_a_link_that_turns_slow_is_noticed_at_once() -> None:
    slow = replace(SLOW, noise=NOISES["jitter"])
    course = drive(lambda step: replace(FAST, noise=NOISES["jitter"]) if step < 200 else slow, 400)
    (noticed,) = course.times("communication takes")
    assert 200 < noticed <= 200 + (LIMITS.patience + 1) * LIMITS.watch_steps + 1
    assert set(course.levels[280:]) == {LOWRANK_8}


@pytest.mark.parametrize(("rate", "times"), [(800e6, 5), (800e6, 20), (2e9, 20)])
@pytest.mark.parametrize("kind", [None, "jitter"])
def test_a_link_that_becomes_slower_little_by_little_is_noticed(kind: str | None, rate: float, times: float) -> None:
    """No look differs from the one before by much."""
    job = Job(rate=rate, messages=20, noise=NOISES[kind] if kind else Noise())

    def drifting(step: int) -> Job:
        return replace(job, rate=job.rate / times ** min(1.0, max(0, step - 150) / 500))

    course, end = drive(drifting, 900), drifting(900)
    assert course.levels[149] in (NONE, FP16) and share(job, NONE) < 0.2 < share(end, NONE)
    assert end.seconds(course.levels[-1]) <= WORTHWHILE * end.best()


def test_a_link_that_turns_fast_behind_compression_is_noticed_in_a_look_at_dense() -> None:
    """The wire takes next to nothing of a compressed step, before and after, and nobody sounds it."""
    before = Job(rate=250e6, alpha=0.0, payload_bytes=(8e6, 4e6, 2e6, 1e5, 5e4), codec=(0.0, *[8 * ms] * 4))
    after = replace(before, rate=1e10)
    assert least(before) == LOWRANK_16 and least(after) == NONE
    course = drive(lambda step: before if step < 200 else after, 800, limits=replace(LIMITS, sounding_steps=10**6))
    (look,) = course.times("is it still needed")
    assert set(course.levels[SETTLED : look + 1]) == {LOWRANK_16}
    (once_more,) = course.times("before it is left")
    turn = LIMITS.settle_steps + LIMITS.trial_steps
    assert look < once_more <= look + LIMITS.drain_steps + turn + 1
    assert set(course.levels[once_more + WARM_STEPS + turn + 2 :]) == {NONE}
    assert look <= SETTLED + LIMITS.probe_steps + LIMITS.watch_steps


HEAVY = Job(
    rate=1e8, alpha=0.0, payload_bytes=(8e6, 4e6, 2e6, 1e5, 5e4), codec=(0.0, 8 * ms, 20 * ms, 15 * ms, 15 * ms)
)
"""The wire takes next to nothing of a step at its best level, whose codec a faster link would do without."""


@pytest.mark.parametrize("wait", [0.0, 5 * ms])
@pytest.mark.parametrize("kind", NOISES)
def test_a_link_that_turns_fast_behind_compression_is_noticed_by_a_sounding(kind: str, wait: float) -> None:
    before = replace(HEAVY, noise=NOISES[kind], wait=wait)
    after = replace(before, rate=1e10)
    assert least(before) == LOWRANK_16 and least(after) == NONE
    course = drive(lambda step: before if step < 200 else after, 400)
    assert course.levels[199] in (LOWRANK_16, LOWRANK_8)
    assert set(course.levels[281:]) == {NONE}
    assert any(200 < step <= 280 for step in course.times("the link is faster"))
    assert not any(step <= 200 for step in course.times("the link is faster"))
    for _, decision in course.decisions:
        explains_itself(decision)


@given(jobs)
@examples
def test_soundings_cost_little_and_change_nothing_on_a_steady_link(job: Job) -> None:
    course = drive(job, 500)
    assert not course.times("the link is faster")
    assert sum(seconds for _, seconds in course.soundings) <= (LIMITS.sounding_share + 0.005) * course.seconds
    assert all(course.levels[step] for step, _ in course.soundings), "a dense step shows the link as it is"


FAR = Job(compute=180 * ms, messages=1, alpha=1 * ms, rate=1e7, payload_bytes=(1e8, 5e7, 2.6e7, 1e5, 5e4), overlap=0.0)
"""Dense takes fifty times as long as the best level."""


@pytest.mark.parametrize("codec", [5 * ms, 25 * ms])
@pytest.mark.parametrize("burst", [1e5, 1e6, 1e7])
def test_what_a_link_carries_for_nothing_costs_little_where_dense_is_far_away(burst: float, codec: float) -> None:
    """Whether dense on a fast link would pay, or not."""
    job = replace(FAR, burst=burst, codec=(0.0, *[codec] * 4))
    course = drive(job, 4000)
    assert not course.times("the link is faster")
    assert sum(seconds for _, seconds in course.soundings) <= (LIMITS.sounding_share + 0.005) * course.seconds
    after = replace(job, rate=1e10)
    course = drive(lambda step: job if step < 1000 else after, 2000)
    assert set(course.levels[-10:]) == {NONE} or codec < 25 * ms


@pytest.mark.parametrize("burst", [1e5, 1e6, 1e9])
def test_what_a_link_carries_for_nothing_deceives_ever_more_rarely(burst: float) -> None:
    """Of the least that is sounded, of most, and of all."""
    job = replace(HEAVY, burst=burst)
    course = drive(job, 4000)
    deceived = course.times("the link is faster")
    assert len(deceived) <= 6
    assert all(
        later - sooner > sooner - soonest
        for soonest, sooner, later in zip(deceived, deceived[1:], deceived[2:], strict=False)
    )
    assert course.seconds <= 1.05 * 4000 * job.best()


def test_a_link_that_turns_fast_is_noticed_though_all_its_work_is_hidden() -> None:
    """Float16 hides behind the computation, and its codec costs a tenth of the step."""
    before = replace(MIDDLE, codec=(0.0, *[7 * ms] * 4))
    after = replace(before, rate=1e10, alpha=0.0)
    assert least(before) == FP16 and least(after) == NONE
    assert after.exposed(FP16) > before.exposed(FP16) - 0.02 * before.seconds(FP16)
    course = drive(lambda step: before if step < 200 else after, 300)
    assert set(course.levels[SETTLED:200]) == {FP16} and set(course.levels[281:]) == {NONE}


@given(jobs, st.sampled_from([1 / 3, 3]))
@examples
def test_three_times_more_or_less_computation_is_handled(job: Job, factor: float) -> None:
    """Longer sequences, another batch size: communication hides behind more or less."""
    job = replace(job, told=1.0)
    later = replace(job, compute=factor * job.compute)
    course = drive(lambda step: job if step < 150 else later, 232)
    assert later.seconds(course.levels[-1]) <= WORTHWHILE * EXACT * later.best()


def test_computation_that_changes_beside_a_wire_that_does_not_changes_nothing() -> None:
    job = replace(SLOW, overlap=0.0)
    longer = replace(job, compute=3 * job.compute)
    course = drive(lambda step: job if step < 150 else longer, 400)
    assert set(course.levels[SETTLED:]) == {LOWRANK_8}


def test_a_change_that_the_tried_level_hardly_sees_is_no_false_alarm() -> None:
    """From 80 to 1 Gbit/s: dense takes 3.5 times as long, and lowrank, whose wire time is nearly all latency, 9 % more.
    What lowrank takes "as before" says nothing of what dense takes now."""
    sent = tuple(2.25e6 * part for part in (1, 0.5, 0.26, 0.07, 0.035))
    codec = (0.0, 0.1 * ms, 0.3 * ms, 1 * ms, 0.2 * ms)
    fast = Job(compute=5 * ms, payload_bytes=sent, rate=1e10, alpha=0.45 * ms, codec=codec, overlap=0.1)
    slow = replace(fast, rate=125e6)
    course = drive(lambda step: fast if step < 150 else slow, 400)
    assert slow.seconds(course.levels[-1]) <= WORTHWHILE * slow.best()


UNNOTICED = Job(
    compute=140 * ms,
    payload_bytes=(8e6, 7.2e6, 8e6, 8e6, 8e4),
    rate=400e6,
    alpha=0.0,
    messages=1,
    codec=(0.0, 1 * ms, 9 * ms, 9 * ms, 9 * ms),
    overlap=0.0,
)
"""Where lowrank:8 is held, neither a slower codec nor a wire four times slower is much of a change; together they make
it slower than dense once was."""
UNNOTICED_LATER = replace(UNNOTICED, codec=(*UNNOTICED.codec[:-1], 25 * ms), rate=110e6)


def test_a_comparison_is_made_with_what_a_level_takes_now() -> None:
    """Not with the median of that and what it took when it was tried first."""
    course = drive(lambda step: UNNOTICED if step < 150 else UNNOTICED_LATER, 250)
    compared = course.times("compared once more")[0]
    decision = next(decision for step, decision in course.decisions if step > compared)
    assert decision.reason.startswith("fp16 takes 206.45 ms a step")


def test_dense_is_not_held_for_what_it_took_before_an_unnoticed_change() -> None:
    course = drive(lambda step: UNNOTICED if step < 150 else UNNOTICED_LATER, 500)
    assert UNNOTICED_LATER.seconds(course.levels[-1]) <= WORTHWHILE * UNNOTICED_LATER.best()


# -- false alarms ------------------------------------------------------------------------------------------------------


def burst(job: Job, factor: float, steps: int, begins: int = 200) -> Callable[[int], Job]:
    """Communication takes ``factor`` times as long for some steps."""
    busy = replace(job, rate=job.rate / factor, alpha=job.alpha * factor)
    return lambda step: busy if begins <= step < begins + steps else job


def after_bursts(steps: int, factor: float) -> tuple[float, float]:
    """Shares of 40 jobs in which what was held comes back, and that are slower than before by more than the margin."""
    back, slower = 0, []
    for job in some_jobs(40, Noise(), seed=7):
        course = drive(burst(job, factor, steps), 280)
        before, after = course.levels[199], course.levels[-1]
        back += after == before
        slower.append(job.seconds(after) / job.seconds(before))
    return back / 40, sum(ratio > 1 / (1 - LIMITS.margin) for ratio in slower) / 40


@pytest.mark.parametrize("steps", [8, 20])
@pytest.mark.parametrize("factor", [3, 10])
def test_after_a_burst_on_the_wire_most_things_are_as_before(steps: int, factor: float) -> None:
    """What was held comes back in 3 of 4 jobs, and 11 of 12 are no slower than before."""
    back, slower = after_bursts(steps, factor)
    assert back >= 3 / 4 and slower <= 1 / 12


@pytest.mark.xfail(strict=True, reason="what is held was measured in the burst, others after it")
def test_after_a_burst_on_the_wire_nothing_much_slower_is_held() -> None:
    """The burst ends while others are tried. What was held was the best, and is by far."""
    sent = tuple(11.1e6 * part for part in (1, 0.5, 0.26, 0.07, 0.035))
    codec = (0.0, 0.28 * ms, 0.0, 2.34 * ms, 2.05 * ms)
    job = Job(compute=5 * ms, payload_bytes=sent, rate=4.1e9, alpha=0.517 * ms, codec=codec, overlap=0.823)
    for steps in (20, 30):
        course = drive(burst(job, 10, steps), 400)
        assert job.seconds(course.levels[-1]) <= WORTHWHILE * job.seconds(course.levels[199])


@pytest.mark.parametrize("begins", range(200, 200 + LIMITS.watch_steps))
def test_trouble_that_is_as_long_as_one_look_is_sat_out(begins: int) -> None:
    """Two looks in a row must agree: three times as much of it, with quiet between, is no more."""
    at = [burst(FAST, 100, LIMITS.watch_steps - 1, begins + 3 * number * LIMITS.watch_steps) for number in range(3)]
    course = drive(lambda step: min((job(step) for job in at), key=lambda job: job.rate), 300)
    assert len(course.decisions) == 1


ALARMING = Job(rate=40e6, codec=(0.0, 1 * ms, 2 * ms, 30 * ms, 40 * ms))
"""Holds int8; where the wire slows down, lowrank promises more."""


def test_after_a_false_alarm_what_was_held_is_held_and_the_next_has_to_be_clearer() -> None:
    """The burst is over when another level is tried, so that one is as it was: nothing was the matter. From then on
    twice as many looks must agree: the same burst once more is sat out."""
    at = burst(ALARMING, 5, 12)
    again = burst(ALARMING, 5, 12, 300)
    patience = []
    course = drive(
        lambda step: at(step) if step < 300 else again(step),
        400,
        events=lambda step, controller: patience.append(controller._patience),
    )
    (alarm,) = course.times("communication takes")
    assert 200 < alarm < 215
    assert set(course.levels[190:200]) == {INT8} == set(course.levels[240:])
    assert set(course.levels[200:240]) != {INT8}, "another one was looked at"
    assert (patience[199], patience[-1]) == (LIMITS.patience, 2 * LIMITS.patience)


def test_a_change_that_lasts_makes_it_watchful_again() -> None:
    at = burst(ALARMING, 5, 12)
    course = drive(lambda step: at(step) if step < 300 else replace(ALARMING, rate=4e6), 500)
    assert course.controller._patience == LIMITS.patience
    assert course.levels[-1] == least(replace(ALARMING, rate=4e6)) != INT8


# -- looks at dense ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("job", "share"), [(MIDDLE, 0.01), (Job(rate=40e6), 0.05)], ids=["cheap", "dear"])
def test_looks_at_dense_cost_their_share_of_the_time_at_most(job: Job, share: float) -> None:
    """And one look more, as the last one is not paid off yet."""
    steps, settled = 5000, SETTLED + 1
    course = drive(job, steps, limits=replace(LIMITS, probe_share=share))
    held, _ = course.most(settled)
    cost = course.seconds - drive(job, settled).seconds - (steps - settled) * job.seconds(held)
    # The step under way when it is decided, and those from which the level learns on the way back, are dense too.
    one_look = LIMITS.drain_steps + LIMITS.settle_steps + LIMITS.trial_steps + 1 + WARM_STEPS
    assert 0 < cost <= share * course.seconds + one_look * (job.seconds(NONE) - job.seconds(held))
    assert set(course.levels[settled:]) == {NONE, held}
    looks = course.times("is it still needed")
    gaps = [later - earlier for earlier, later in zip([SETTLED, *looks], looks, strict=False)]
    if job is MIDDLE:
        assert len(gaps) == 3 and all(1.8 < after / before < 2.5 for before, after in zip(gaps, gaps[1:], strict=False))
    else:
        assert len(gaps) >= 2 and min(gaps) > 2 * LIMITS.probe_steps, "what costs much has to wait"


def test_looks_at_dense_make_nobody_slow_to_notice() -> None:
    """They are no false alarms."""
    change = 4000
    course = drive(lambda step: MIDDLE if step < change else replace(MIDDLE, rate=MIDDLE.rate / 20), change + 100)
    assert len([look for look in course.times("is it still needed") if look < change]) >= 2
    noticed = next(time for time in course.times("communication takes") if time >= change)
    assert noticed <= change + (LIMITS.patience + 1) * LIMITS.watch_steps + 1


def test_one_odd_reading_in_a_trial_is_no_reason_either() -> None:
    """A gradient that happened to be small; the reading before it was not over the budget."""
    controller = Controller(NAMES, SLOW.costs)
    dice = random.Random(0)

    def go(error: float) -> None:
        controller.observe(controller.level, Observation(reduce_times(SLOW.step(controller.level, dice)), error, 1.0))

    while controller.mode is not Mode.TRIAL:
        go(0.0)
    tried = controller.level
    while controller.mode is Mode.TRIAL and controller.level == tried:
        odd = len(controller._errors) == LIMITS.settle_steps + LIMITS.trial_steps - 1
        go(5.0 if odd else 0.3)
    assert tried not in controller.refused


# -- what encoding loses -----------------------------------------------------------------------------------------------

errors = st.tuples(*[st.sampled_from([0.1, 0.5, 0.8, 1.6, 5.0])] * 3)


@given(jobs, errors, st.sampled_from([1, 5, 30]), st.integers(0, 99))
@some_examples
def test_a_level_over_the_error_budget_is_left_for_good(
    job: Job, factors: tuple[float, ...], tau: float, seed: int
) -> None:
    """Errors build up while a level runs, quickly or slowly."""
    job = replace(job, rate=min(job.rate, 1e8), noise=NOISES["jitter"])
    final = [0.0, 0.0, *(factor * LIMITS.error_budget for factor in factors)]

    def training(step: int, level: int, age: int) -> tuple[float, float, float]:
        return final[level] * (1 - math.exp(-(age + 1) / tau)), 1.0, 0.1

    course = drive(job, 500, seed=seed, training=training)
    excessive = {level for level in range(5) if final[level] > LIMITS.error_budget}
    for step in course.times("times the gradient"):
        level = course.levels[step]
        assert level in excessive and f"(budget {LIMITS.error_budget:g})" in dict(course.decisions)[step].reason
        assert level not in course.levels[step + 1 :]
    # Readings come every fifth step, and a trial ends after the first ones. One that loses by its time alone is never
    # held and may be looked at again, some steps at a time.
    assert all(course.levels.count(level) <= 120 for level in excessive), "however slowly it built up"
    held = [level for level, mode in zip(course.levels, course.modes, strict=True) if mode is Mode.HOLD]
    assert all(held.count(level) <= 100 for level in excessive)


@pytest.mark.parametrize("bad", [LOWRANK_8, LOWRANK_16, INT8])
def test_the_best_of_what_is_left_is_held(bad: int) -> None:
    course = drive(SLOW, 300, training=lambda step, level, age: (2.0 if level >= bad else 0.0, 1.0, 0.1))
    assert set(course.levels[150:]) == {bad - 1}
    assert set(course.controller.refused) == set(range(bad, 5))
    assert all("times the gradient (budget 1)" in why for why in course.controller.refused.values())


@pytest.mark.parametrize("error", [1.8, 2.2])
def test_what_loses_twice_the_budget_in_its_trial_is_not_even_held(error: float) -> None:
    """Less than that may be what the level before it left behind."""
    course = drive(SLOW, 300, training=lambda step, level, age: (error if level == LOWRANK_8 else 0.0, 1.0, 0.1))
    trial = WARM_STEPS + LIMITS.settle_steps + LIMITS.trial_steps + 1
    assert (course.levels.count(LOWRANK_8) == trial) == (error > 2)
    assert set(course.levels[150:]) == {LOWRANK_16}


def test_a_single_reading_of_many_is_no_reason() -> None:
    """The median of the last ten counts."""
    rare = drive(SLOW, 600, training=lambda s, level, age: (3.0 if age % 20 == 5 and age > 20 else 0.5, 1.0, 0.1))
    assert not rare.controller.refused and rare.levels[-1] == LOWRANK_8


def test_an_error_that_grows_in_the_end_is_noticed_too() -> None:
    def training(step: int, level: int, age: int) -> tuple[float, float, float]:
        return (1.5 if level >= LOWRANK_16 and step > 300 else 0.5), 1.0, 0.1

    course = drive(SLOW, 500, training=training)
    assert set(course.levels[SETTLED:300]) == {LOWRANK_8}
    assert set(course.levels[400:]) == {INT8}
    decision = next(decision for step, decision in course.decisions if step > 300)
    assert decision.evidence["lowrank:8+fp16.error"] == 1.5


def test_what_takes_the_place_of_a_refused_level_is_not_looked_for_in_dense_steps() -> None:
    """The wire has changed meanwhile, so that nothing else was measured on it; the model still tells."""

    def training(step: int, level: int, age: int) -> tuple[float, float, float]:
        return (1.5 if level == LOWRANK_8 and step > 300 else 0.5), 1.0, 0.1

    course = drive(lambda step: SLOW if step < 200 else replace(SLOW, rate=SLOW.rate / 2), 500, training=training)
    assert course.levels[299] == LOWRANK_8
    assert NONE not in course.levels[300:] and course.levels[-1] == LOWRANK_16


def test_what_takes_the_place_of_a_refused_level_is_soon_compared() -> None:
    """However rare comparisons have become: what they told was told of the level that is out."""
    controller, dice, reasons = Controller(NAMES, SLOW.costs), random.Random(0), []

    def go(error: float) -> None:
        seen = Observation(reduce_times(SLOW.step(controller.level, dice)), error, 1.0)
        if decision := controller.observe(controller.level, seen):
            reasons.append(decision.reason)

    while controller.mode is not Mode.HOLD:
        go(0.0)
    assert controller.level == LOWRANK_8
    controller._compare_after, controller._beaten = 10_000, [NONE, FP16, INT8, LOWRANK_16]
    while controller.level == LOWRANK_8:
        go(2.0)
    while controller.mode is not Mode.HOLD:
        go(0.0)
    held, reasons[:] = controller.level, []
    other = next(level for level in controller._samples if level not in (held, LOWRANK_8))
    took = [  # while the wire was faster
        times._replace(step=times.step - saved, exposed_comm=times.exposed_comm - saved)
        for times in controller._samples[held]
        for saved in [0.1 * times.step]
    ]
    controller._samples[other] = took
    for _ in range(5 * LIMITS.watch_steps):
        if not reasons:
            go(0.0)
    assert "compared once more" in reasons[0] and not controller._beaten


# -- critical phases ---------------------------------------------------------------------------------------------------


AT_ANY_COST = Limits(critical_share=math.inf)


def phases(course: Course) -> list[int]:
    """Steps at which a critical phase was decided on."""
    return course.times("dense for")


@pytest.mark.parametrize("dense_steps", [1, 5, 15, 40])
@pytest.mark.parametrize("what", ["rate", "norm"])
def test_a_critical_phase_is_dense_and_then_over(what: str, dense_steps: int) -> None:
    """The learning rate falls by half, or gradients turn 2.5 times larger."""

    def training(step: int, level: int, age: int) -> tuple[float, float, float]:
        later = step >= 450
        return calm(step, level, age)[0], 2.5 if later and what == "norm" else 1.0, 0.05 if later else 0.1

    if what == "norm":
        change = training

        def training(step: int, level: int, age: int) -> tuple[float, float, float]:
            return *change(step, level, age)[:2], 0.1

    limits = Limits(dense_steps=dense_steps, probe_steps=10_000, critical_share=math.inf)
    course = drive(SLOW, 700, limits=limits, training=training)
    (begins,) = phases(course)
    reason = dict(course.decisions)[begins].reason
    assert reason.startswith("the learning rate fell from 0.1 to 0.05" if what == "rate" else "gradient norms rose")
    assert 450 < begins <= (460 if what == "rate" else 480)
    (ends,) = course.times("the critical phase is over")
    # Steps that pay out the residual come first, and the step under way when the phase ends is dense too.
    assert ends - begins == LIMITS.drain_steps + max(dense_steps, LIMITS.settle_steps + 1) + 1
    assert set(course.levels[begins + 1 : ends + 1]) == {NONE}
    assert set(course.levels[SETTLED + 30 : begins]) == {LOWRANK_8} == set(course.levels[ends + 1 :])


@pytest.mark.parametrize("rate", [3e6, 10e6, 30e6])
def test_critical_phases_cost_little_however_slow_dense_is(rate: float) -> None:
    """Gradients that grow and shrink without end would make a phase of every pause."""
    job = Job(rate=rate)
    restless = steps_of({}, {step: 3.0 if step % 200 else 1 / 3 for step in range(100, 2000, 100)})
    steps = 2000
    held = drive(job, steps).seconds
    course = drive(job, steps, training=restless)
    assert course.seconds <= (1 + 1.2 * LIMITS.critical_share) * held  # two steps warm up besides
    assert drive(job, steps, limits=AT_ANY_COST, training=restless).seconds > course.seconds


def test_without_a_residual_there_is_nothing_to_spare_a_critical_phase() -> None:
    for job in (FAST, MIDDLE):
        course = drive(job, 400, training=lambda step, level, age: (0.0, 1.0, 0.1 if step < 200 else 0.001))
        assert not phases(course)


def steps_of(rates: dict[int, float], norms: dict[int, float]) -> Training:
    """Factors by which rate and norm change at steps."""

    def training(step: int, level: int, age: int) -> tuple[float, float, float]:
        rate = math.prod(factor for at, factor in rates.items() if at <= step)
        norm = math.prod(factor for at, factor in norms.items() if at <= step)
        return calm(step, level, age)[0], norm, 0.1 * rate

    return training


@given(
    st.dictionaries(st.integers(0, 1100), st.sampled_from([0.1, 0.4, 0.9, 2.0]), max_size=6),
    st.dictionaries(st.integers(0, 1100), st.sampled_from([0.3, 1.5, 3.0]), max_size=6),
)
@few_examples
def test_critical_phases_are_a_pause_apart(rates: dict[int, float], norms: dict[int, float]) -> None:
    course = drive(SLOW, 1200, limits=AT_ANY_COST, training=steps_of(rates, norms))
    begun = phases(course)
    ended = course.times("the critical phase is over")
    assert all(begins - ends >= LIMITS.critical_pause for ends, begins in zip(ended, begun[1:], strict=False))
    if not norms:
        falls = sorted(at for at, factor in rates.items() if factor < 0.5)
        assert len(begun) <= len(falls)
        if falls and falls[0] > SETTLED:
            assert falls[0] < begun[0] <= falls[0] + 12


SCHEDULES: dict[str, Callable[[int], float]] = {
    "constant": lambda step: 0.1,
    "cosine": lambda step: 0.001 + 0.0495 * (1 + math.cos(math.pi * step / 1000)),
    "linear to the last step but one": lambda step: 0.1 * (1001 - step) / 1000,
    "warm-up, then linear": lambda step: 0.1 * min((step + 1) / 300, (1001 - step) / 700),
    "exponential": lambda step: 0.1 * 0.99**step,
    "warm restarts, upwards": lambda step: 0.1 * (0.1 + step % 250 / 250) ** -0.5 * 0.5,
    "unknown": lambda step: 0.0,
    "warm-up from nothing": lambda step: 0.1 * min(1.0, step / 200),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_smooth_schedules_are_no_critical_phases(schedule: str) -> None:
    """While norms, noisy by a fifth, shrink to a tenth, or grow tenfold."""
    for growth in (0.1, 1.0, 10.0):
        dice = random.Random(1)

        def training(step: int, level: int, age: int, growth: float = growth, dice: random.Random = dice):
            norm = growth ** (step / 1000) * math.exp(0.2 * dice.gauss(0, 1))
            return calm(step, level, age)[0], norm, SCHEDULES[schedule](step)

        course = drive(SLOW, 1000, training=training)
        assert not phases(course)
        assert course.levels[-1] == LOWRANK_8


# -- levels that may not run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "tried"),
    [
        ((5, 4, 3, 2, 1), {1, 2, 3, 4}),
        ((5, 5, 3, 2, 1), {2, 3, 4}),  # no less than dense
        ((5, 7, 3, 2, 1), {2, 3, 4}),
        ((5, 4, 4, 2, 1), {1, 3, 4}),  # no less than the one below it
        ((5, 4, 6, 5, 1), {1, 4}),
        ((5, 4, 2, 3, 2), {1, 2}),
        ((5, 5, 5, 5, 4), {4}),
        ((5, 1, 2, 3, 4), {1}),
        ((5, 5, 5, 5, 5), set()),
        ((5, 6, 7, 8, 9), set()),
    ],
)
def test_a_level_that_sends_no_less_is_passed_over(sent: tuple[int, ...], tried: set[int]) -> None:
    """Its trial would cost steps and could save nothing. That of a level above it may still be worth it."""
    job = Job(rate=1e7, overlap=0.0, payload_bytes=tuple(1e6 * size for size in sent), codec=(0.0,) * 5)
    # One after the other would be tried if the fastest were out.
    for forbidden in range(1, 6):

        def forbid(step: int, controller: Controller, forbidden: int = forbidden) -> None:
            if not step and forbidden < 5:
                controller.forbid(forbidden, "a test")

        course = drive(job, 600, events=forbid)
        left = {level for level in tried if level < forbidden}
        assert set(course.levels) <= {NONE, *left}
        assert course.levels[-1] == max(left, default=NONE)
        for _, decision in course.decisions:
            named = {key.rsplit(".", 1)[0] for key in decision.evidence} - {"link"}
            assert named <= {NAMES[level] for level in (0, *left)}


@given(jobs, st.integers(1, 4), st.integers(0, 400))
@few_examples
def test_forbidden_levels_do_not_run(job: Job, forbidden: int, when: int) -> None:
    """Neither they nor those above; where one of them ran, the run starts anew, dense."""
    job = replace(job, rate=min(job.rate, 1e8))
    levels = []

    def forbid(step: int, controller: Controller) -> None:
        if step == when:
            levels.append(controller.level)
            controller.forbid(forbidden, "a test")
            levels.append(controller.level)

    course = drive(job, 520, events=forbid)
    before, after = levels
    assert after == (before if before < forbidden else NONE)
    assert max(course.levels[when:]) < forbidden
    if before >= forbidden:
        assert set(course.levels[when : when + LIMITS.drain_steps + LIMITS.dense_steps]) == {NONE}
    if not (job.seconds(NONE) <= ENOUGH * job.best(range(forbidden))):
        assert job.seconds(course.levels[-1]) <= 1.05 * job.best(range(forbidden))


def test_a_level_forbidden_in_a_critical_phase_is_not_come_back_to() -> None:
    def forbid(step: int, controller: Controller) -> None:
        if controller.mode is Mode.CRITICAL:
            controller.forbid(LOWRANK_16, "a test")

    course = drive(SLOW, 400, limits=AT_ANY_COST, training=steps_of({200: 0.1}, {}), events=forbid)
    assert course.levels[195] == LOWRANK_8 and set(course.levels[260:]) == {INT8}


class Misfortunes:
    """Levels are forbidden, buckets cut anew, and links, errors and norms change at any time."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job, self.dice = job, random.Random(seed)

    def __call__(self, step: int, controller: Controller) -> None:
        assert controller.level not in controller.refused
        if controller.mode is Mode.HOLD:
            assert not controller._doubt and not controller._past, "what is held is held for a reason"
        chance = self.dice.random()
        if chance < 0.003:
            controller.forbid(self.dice.randrange(1, 5), "a test")
        elif chance < 0.006:
            sent = tuple(size * 10 ** self.dice.uniform(-0.5, 0.5) for size in self.job.payload_bytes)
            self.job = replace(self.job, payload_bytes=sent)
            controller.costs = self.job.costs
        elif chance < 0.01:
            self.job = replace(self.job, rate=10 ** self.dice.uniform(6, 11))

    def training(self, step: int, level: int, age: int) -> tuple[float, float, float]:
        dice = self.dice
        error = dice.choice([0.3] * 9 + [5.0]) if level >= LOSSY else 0.0
        return error, dice.choice([0.0, 1.0, 1.0, 3.0]) * 10 ** (step / 100), dice.choice([0.1] * 50 + [0.01, 0.0])


@given(jobs, st.integers(0, 10_000))
@examples
def test_whatever_happens_decisions_go_on(job: Job, seed: int) -> None:
    job = replace(job, noise=NOISES["odd steps"])
    misfortunes = Misfortunes(job, seed)
    course = drive(lambda step: misfortunes.job, 500, seed=seed, training=misfortunes.training, events=misfortunes)
    assert course.decisions
    for _, decision in course.decisions:
        explains_itself(decision)


# -- explanations ------------------------------------------------------------------------------------------------------

FIGURES = re.compile(
    r"(?P<level>.+)\.((step|exposed_comm|overlapped_comm|codec|predicted_step)_ms|error)|link\.ms_per_(allreduce|MB)"
)


def explains_itself(decision: Decision) -> None:
    """A reason with figures, and finite evidence with units."""
    assert re.search(r"\d", decision.reason) or "the critical phase is over" in decision.reason
    assert decision.evidence
    for key, value in decision.evidence.items():
        match = FIGURES.fullmatch(key)
        assert match and (match["level"] is None or match["level"] in NAMES)
        assert math.isfinite(value) and value >= 0
    if sounding := re.search(r"a sounding of (\d+) kB took (\d+\.\d\d) ms", decision.reason):
        megabytes, took = float(sounding[1]) / 1e3, float(sounding[2])
        per_sum, per_megabyte = decision.evidence["link.ms_per_allreduce"], decision.evidence["link.ms_per_MB"]
        rounded = 0.0051 + 0.00051 * per_megabyte + 0.0001 * (1 + megabytes)
        assert abs(per_sum + megabytes * per_megabyte - took) <= rounded, "what it took is the link's two figures"


@given(jobs, st.integers(0, 1000), st.sampled_from(sorted(NOISES)))
@few_examples
def test_every_decision_explains_itself(job: Job, seed: int, kind: str) -> None:
    """Promise 3: the milliseconds that a reason names are in the evidence. The sum of exposed and hidden communication
    stands for all of it; what it or the computation took before a change is history, and ``explains_itself`` looks at
    what a sounding took."""
    job = replace(job, noise=NOISES[kind])
    course = drive(changing(job, (job.rate, job.rate / 5, 1e11)), 600, seed=seed)
    assert course.decisions
    for step, decision in course.decisions:
        explains_itself(decision)
        evidence = decision.evidence
        assert f"{NAMES[course.levels[step]]}.step_ms" in evidence, "the level that was left or kept has been measured"
        known = list(evidence.values())
        for name in NAMES:
            if f"{name}.step_ms" in evidence:
                exposed, hidden = evidence[f"{name}.exposed_comm_ms"], evidence[f"{name}.overlapped_comm_ms"]
                known += [exposed + hidden]
        reason = re.sub("(input wait take|kB took|instead of) .*? ms", "", decision.reason)
        for said in map(float, re.findall(r"(\d+\.\d\d) ms", reason)):
            assert min(abs(value - said) for value in known) < 0.0061


def test_evidence_is_in_milliseconds() -> None:
    job = Job(compute=20 * ms, rate=100e6, alpha=0.0, overlap=0.5, codec=(0.0, *[100 * ms] * 4))
    course = drive(job, 17)
    ((_, decision),) = course.decisions
    measured = {"step": 90.0, "exposed_comm": 70.0, "overlapped_comm": 10.0, "codec": 0.0}
    assert {key: decision.evidence[f"none.{key}_ms"] for key in measured} == measured
    assert decision.evidence["fp16.predicted_step_ms"] == 100 + 20 + 30
    assert decision.evidence["link.ms_per_MB"] == 10
    assert "90.00 ms" in decision.reason and "70.00 ms" in decision.reason and "78%" in decision.reason


@given(jobs, st.integers(0, 1000))
@few_examples
def test_equal_figures_give_equal_decisions(job: Job, seed: int) -> None:
    """Every rank decides for itself, and a run log can be replayed."""
    misfortunes = Misfortunes(replace(job, noise=NOISES["jitter"]), seed)
    mine, other = Controller(NAMES, job.costs), Controller(NAMES, job.costs)
    dice = random.Random(seed)
    said = []
    for step in range(300):
        level = mine.level
        figures = misfortunes.training(step, level, 0) if step % 5 == 0 else (math.nan, math.nan, 0.1)
        seen = Observation(reduce_times(misfortunes.job.step(level, dice)), *figures)
        said.append((level, seen, mine.observe(level, seen)))
        assert other.observe(level, seen) == said[-1][2]
        assert (mine.level, mine.mode) == (other.level, other.mode)
    replayed = Controller(NAMES, job.costs)
    assert [replayed.observe(level, seen) for level, seen, _ in said] == [decision for *_, decision in said]


@given(jobs, st.integers(0, 1000), st.integers(0, 250))
@few_examples
def test_what_is_recalled_decides_like_what_remembers(job: Job, seed: int, when: int) -> None:
    """At any time, and through a file."""
    job = replace(job, noise=NOISES["jitter"])
    mine, other = Controller(NAMES, job.costs), Controller(NAMES, job.costs)
    dice = random.Random(seed)
    for step in range(300):
        if step == when:
            other.recall(json.loads(json.dumps(mine.memory())))
            assert mine == other
        at = job if step < 150 else replace(job, rate=job.rate * dice.choice([0.05, 20]))
        times, size = reduce_times(at.step(mine.level, dice)), mine.probe_bytes()
        if size:
            times = times._replace(step=times.step + at.probe(size), probe=at.probe(size))
        seen = Observation(times, 0.3 * mine.level, 1.0, 0.1, size)
        if step >= when:
            assert other.probe_bytes() == size
        decision = mine.observe(mine.level, seen)
        if step >= when:
            assert other.observe(other.level, seen) == decision
    assert mine == other


@given(jobs, st.integers(0, 1000), st.lists(st.integers(0, 299), max_size=60))
@few_examples
def test_steps_of_another_level_change_nothing(job: Job, seed: int, when: list[int]) -> None:
    """They were under way when the level changed."""
    controller, other = Controller(NAMES, job.costs), Controller(NAMES, job.costs)
    nonsense = Observation(StepTimes(1e6, 1e5, 1e6, 1e4, 1e6), 1e9, 1e9, 1e-9)
    dice = random.Random(seed)
    for step in range(300):
        if step in when:
            assert controller.observe((controller.level + 1 + step % 4) % 5, nonsense) is None
        seen = Observation(reduce_times(job.step(controller.level, dice)), 0.1, 1.0, 0.1)
        assert controller.observe(controller.level, seen) == other.observe(other.level, seen)
        assert controller.level == other.level


def test_steps_right_after_a_change_do_not_count() -> None:
    controller = Controller(NAMES, SLOW.costs)
    dice = random.Random(0)

    def real() -> Observation:
        return Observation(reduce_times(SLOW.step(controller.level, dice)))

    while controller.level == NONE:
        controller.observe(NONE, real())
    tried = controller.level
    for _ in range(LIMITS.settle_steps):
        assert controller.observe(tried, Observation(StepTimes(step=1e6, exposed_comm=1e6))) is None
    for _ in range(LIMITS.trial_steps - 1):
        assert controller.observe(tried, real()) is None
    decision = controller.observe(tried, real())
    assert decision is not None
    assert decision.evidence[f"{NAMES[tried]}.step_ms"] == pytest.approx(SLOW.seconds(tried) * 1e3)


def test_any_job_is_any_job() -> None:
    """The drawn jobs hold what they should: every level is the best of some, and dense is enough for others."""
    drawn = [any_job(random.Random(seed)) for seed in range(400)]
    assert {least(job) for job in drawn} == set(range(5))
    enough = sum(share(job, NONE) <= LIMITS.bottleneck for job in drawn)
    assert 0.1 < enough / len(drawn) < 0.6
