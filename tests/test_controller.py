"""The controller on numbers alone: a simulated job on a simulated link, and what it decides there."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdplus.controller import Controller, Decision, Limits, Mode
from hvdplus.meter import StepTimes, reduce_times

NAMES = ("none", "fp16", "lowrank:4")
NONE, FP16, LOWRANK = range(3)
LIMITS = Limits()
ms = 1e-3


@dataclass(frozen=True)
class Job:
    """What a step costs. The wire works while the backward pass does; what it needs beyond that is exposed."""

    compute: float = 20 * ms
    bytes_per_second: float = 125e6
    payload_bytes: tuple[float, ...] = (4e6, 2e6, 4e5)
    codec: tuple[float, ...] = (0.0, 0.3 * ms, 0.6 * ms)
    overlap: float = 0.5
    """Share of the computation that communication can hide behind."""
    ranks: int = 4
    slow_rank: float = 0.0
    """Seconds that rank 0 computes longer than the others."""
    noise: float = 0.0
    """Standard deviation of every figure of every rank, as a share of it."""

    def step(self, level: int, rng: np.random.Generator) -> StepTimes:
        """Times of one step, reduced over ranks."""
        wire = self.payload_bytes[level] / self.bytes_per_second
        exposed = max(0.0, wire - self.overlap * self.compute)
        shaken = 1 + self.noise * rng.standard_normal((self.ranks, 3))
        compute = self.compute * shaken[:, 0]
        compute[0] += self.slow_rank
        codec = self.codec[level] * shaken[:, 1]
        # All leave the exchange together: who computed less waits longer.
        busy = compute + codec
        waits = exposed * shaken[:, 2].mean() + busy.max() - busy
        return reduce_times([StepTimes(b + w, c, w) for b, c, w in zip(busy, codec, waits, strict=True)])


@dataclass
class Course:
    """What happened in a run."""

    controller: Controller
    levels: list[int]
    """Level of every step."""
    decisions: list[tuple[int, Decision]]
    """(step, decision)."""

    @property
    def last(self) -> Decision:
        return self.decisions[-1][1]


def drive(
    job: Callable[[int], Job],
    steps: int,
    *,
    limits: Limits = LIMITS,
    seed: int = 0,
    names: tuple[str, ...] = NAMES,
    estimated: tuple[int, ...] = (),
) -> Course:
    """Run ``steps`` steps of ``job(step)`` under a controller; figures arrive one step late, as in a real run.

    ``estimated``: what the controller is told that every level of ``names`` sends.
    """
    controller = Controller(names, limits, estimated)
    rng = np.random.default_rng(seed)
    course = Course(controller, [], [])
    late: tuple[int, StepTimes] | None = None
    for step in range(steps):
        level = controller.level
        if late:
            decision = controller.observe(*late)
            if decision:
                course.decisions.append((step, decision))
        course.levels.append(level)
        late = level, job(step).step(level, rng)
    return course


FAST = Job(bytes_per_second=10e9)
SLOW = Job(bytes_per_second=20e6)
MIDDLE = Job(bytes_per_second=220e6)
"""At this speed float16 alone hides behind the computation."""


def exposed_share(job: Job, level: int) -> float:
    """Exposed communication as a share of the step, without noise."""
    times = dataclasses.replace(job, noise=0.0).step(level, np.random.default_rng(0))
    return times.exposed_comm / times.step


def step_seconds(job: Job, level: int) -> float:
    """Step time without noise."""
    return dataclasses.replace(job, noise=0.0).step(level, np.random.default_rng(0)).step


def test_the_simulated_links_are_what_they_are_called() -> None:
    assert exposed_share(FAST, NONE) == 0
    assert exposed_share(MIDDLE, NONE) > 2 * LIMITS.bottleneck > 0 == exposed_share(MIDDLE, FP16)
    assert all(exposed_share(SLOW, level) > LIMITS.bottleneck for level in range(3))


@pytest.mark.parametrize("dense_steps", [1, 15, 40])
def test_the_first_steps_are_dense(dense_steps: int) -> None:
    """However slow the link. A few are always needed, to know what dense costs."""
    course = drive(lambda step: SLOW, 100, limits=Limits(dense_steps=dense_steps))
    first, decision = course.decisions[0]
    assert set(course.levels[: max(dense_steps, LIMITS.settle_steps + 3)]) == {NONE}
    assert first == max(dense_steps, LIMITS.settle_steps + 3)
    assert decision.level == FP16
    assert course.levels[first + 1] == FP16


def test_without_a_bottleneck_it_stays_dense_and_says_so() -> None:
    course = drive(lambda step: dataclasses.replace(FAST, noise=0.05), 1000)
    assert set(course.levels) == {NONE}
    assert len(course.decisions) == 1
    assert "communication is no bottleneck" in course.last.reason


def test_a_slow_link_is_walked_up_to_the_fastest_level() -> None:
    course = drive(lambda step: dataclasses.replace(SLOW, noise=0.02), 300)
    assert [decision.level for _, decision in course.decisions] == [FP16, LOWRANK, LOWRANK]
    assert course.controller.mode is Mode.HOLD
    assert course.last.reason.startswith("lowrank:4 saves")
    assert set(course.levels[-200:]) == {LOWRANK}


def test_the_fastest_is_held_even_if_it_is_not_the_last_one_tried() -> None:
    """lowrank:4 sends less, but its codec costs more than that saves."""
    job = dataclasses.replace(SLOW, codec=(0.0, 1 * ms, 150 * ms))
    course = drive(lambda step: job, 300)
    assert [decision.level for _, decision in course.decisions] == [FP16, LOWRANK, FP16]


def test_the_least_compression_that_removes_the_bottleneck_wins() -> None:
    """lowrank:4 would be no slower, but it is never tried: float16 is enough."""
    course = drive(lambda step: dataclasses.replace(MIDDLE, noise=0.02), 300)
    assert [decision.level for _, decision in course.decisions] == [FP16, FP16]
    assert LOWRANK not in course.levels


def test_compression_that_does_not_pay_is_given_up_with_a_reason() -> None:
    job = dataclasses.replace(SLOW, codec=(0.0, 120 * ms, 210 * ms))
    course = drive(lambda step: job, 2000)
    assert [decision.level for _, decision in course.decisions] == [FP16, LOWRANK, NONE]
    assert "does not pay" in course.last.reason
    assert all(name in course.last.reason for name in NAMES), "what was tried, with its times"
    assert set(course.levels[100:]) == {NONE}, "remembered while the link stays as it is"


def test_a_ladder_of_one_level_has_nothing_to_decide() -> None:
    controller = Controller(("none",))
    rng = np.random.default_rng(0)
    decisions = [controller.observe(0, SLOW.step(0, rng)) for _ in range(200)]
    assert [decision.level for decision in decisions if decision] == [0]


FIVE = ("none", "fp16", "int8", "topk:0.1", "lowrank:4")
CROWD = dataclasses.replace(SLOW, payload_bytes=(4e6, 3e6, 2e6, 1e6, 4e5), codec=(0.0,) * 5)
"""A link on which every level of five is faster than the one below it."""


@pytest.mark.parametrize(
    ("estimated", "tried"),
    [
        ((), [1, 2, 3, 4]),  # unknown: all of them
        ((5, 4, 3, 2, 1), [1, 2, 3, 4]),
        ((5, 5, 3, 2, 1), [2, 3, 4]),  # no less than dense
        ((5, 7, 3, 2, 1), [2, 3, 4]),
        ((5, 4, 4, 2, 1), [1, 3, 4]),  # no less than the one below it
        ((5, 4, 6, 5, 1), [1, 4]),  # of those that are passed over nobody is the one below
        ((5, 4, 2, 3, 2), [1, 2]),  # the last ones: the walk ends
        ((5, 5, 5, 5, 4), [4]),
    ],
)
def test_a_level_that_sends_no_less_is_passed_over(estimated: tuple[int, ...], tried: list[int]) -> None:
    """Its trial would cost steps and could save nothing."""
    course = drive(lambda step: CROWD, 600, names=FIVE, estimated=estimated)
    assert list(dict.fromkeys(course.levels[:300])) == [0, *tried]
    assert course.levels[300] == tried[-1], "the fastest of those that were tried"
    assert set(course.levels) == {0, *tried}, "nor in a later walk"
    for _, decision in course.decisions:
        assert all(key.rsplit(".", 1)[0] in {FIVE[level] for level in (0, *tried)} for key in decision.evidence)


@pytest.mark.parametrize("estimated", [(5, 5, 5, 5, 5), (5, 6, 7, 8, 9)])
def test_where_no_level_sends_less_there_is_nothing_to_try(estimated: tuple[int, ...]) -> None:
    course = drive(lambda step: CROWD, 300, names=FIVE, estimated=estimated)
    assert set(course.levels) == {NONE} and course.controller.mode is Mode.HOLD
    assert [decision.level for _, decision in course.decisions] == [NONE]


@pytest.mark.parametrize(("names", "estimated"), [(("none",), ()), (FIVE, (5, 5, 5, 5, 5))])
def test_a_bottleneck_without_a_remedy_is_not_denied(names: tuple[str, ...], estimated: tuple[int, ...]) -> None:
    course = drive(lambda step: CROWD, 100, names=names, estimated=estimated)
    assert exposed_share(CROWD, NONE) > 0.9
    assert "no bottleneck" not in course.last.reason


@pytest.mark.parametrize("held", [1, 4])
def test_forbidden_levels_are_not_tried_whatever_they_send(held: int) -> None:
    """Also where a walk has gone beyond them: it begins anew, at dense."""
    controller = Controller(FIVE, LIMITS, (5, 4, 4, 2, 1))
    rng = np.random.default_rng(0)
    while controller.level != held:
        controller.observe(controller.level, CROWD.step(controller.level, rng))
    controller.forbid(2)
    assert controller.level == (held if held < 2 else NONE)
    seen = set()
    for _ in range(1000):
        seen.add(controller.level)
        controller.observe(controller.level, CROWD.step(controller.level, rng))
    assert seen == {0, 1}


def test_a_link_that_turns_slow_is_noticed() -> None:
    course = drive(lambda step: dataclasses.replace(SLOW if step >= 300 else FAST, noise=0.03), 700)
    noticed = [step for step, decision in course.decisions if "the step changed" in decision.reason]
    assert noticed and 300 < noticed[0] <= 300 + 3 * LIMITS.watch_steps
    assert set(course.levels[-200:]) == {LOWRANK}


def test_a_link_that_turns_fast_is_noticed() -> None:
    """Dense is looked at again now and then, because a faster link cannot be seen through compression."""
    course = drive(lambda step: dataclasses.replace(FAST if step >= 300 else SLOW, noise=0.03), 900)
    assert course.levels[299] == LOWRANK
    after = [decision for step, decision in course.decisions if step > 300]
    assert "is it still needed" in after[0].reason or "the step changed" in after[0].reason
    assert after[0].level == NONE
    assert "no bottleneck" in course.last.reason
    assert set(course.levels[-200:]) == {NONE}


def test_a_new_look_at_dense_is_never_a_look_at_one_step() -> None:
    """Also where dense was running all along: one step's hiccup would decide."""
    course = drive(lambda step: SLOW if step >= 300 else FAST, 700)
    steps = [step for step, _ in course.decisions]
    (noticed,) = (step for step, decision in course.decisions if "the step changed" in decision.reason)
    assert steps[steps.index(noticed) + 1] - noticed >= LIMITS.trial_steps


def test_a_change_that_is_not_the_wires_changes_nothing() -> None:
    """Longer sequences, a bigger batch: the step takes twice as long, and communication as before."""
    job = dataclasses.replace(SLOW, overlap=0.0)
    course = drive(lambda step: dataclasses.replace(job, compute=(40 if step >= 200 else 20) * ms), 400)
    assert all(step < 100 for step, _ in course.decisions)


@pytest.mark.parametrize("start", range(300, 300 + LIMITS.watch_steps, 4))
def test_one_bad_stretch_is_no_change_of_the_link(start: int) -> None:
    """Two looks in a row must agree, so trouble that is as long as one is sat out."""
    course = drive(lambda step: SLOW if start <= step < start + LIMITS.watch_steps - 1 else FAST, 500)
    assert len(course.decisions) == 1


def test_a_slow_rank_is_not_answered_with_compression() -> None:
    """The others wait for half of the step, and it looks like communication to each of them."""
    job = dataclasses.replace(FAST, slow_rank=20 * ms, noise=0.02)
    times = job.step(NONE, np.random.default_rng(0))
    assert times.exposed_comm < 0.1 * ms < 30 * ms < times.step
    course = drive(lambda step: job, 400)
    assert set(course.levels) == {NONE}
    assert "no bottleneck" in course.last.reason


@pytest.mark.parametrize("job", [FAST, MIDDLE, SLOW], ids=("fast", "middle", "slow"))
@pytest.mark.parametrize("seed", range(8))
def test_noise_makes_nothing_oscillate(job: Job, seed: int) -> None:
    """500 steady steps with 5 % of noise: one walk, one look at dense later on at most, and the same choice again."""
    course = drive(lambda step: dataclasses.replace(job, noise=0.05), 500, seed=seed)
    settled = next(step for step, decision in course.decisions if course_held(decision))
    assert settled <= 60
    later = [(step, decision) for step, decision in course.decisions if step > settled]
    if later:
        assert later[0][0] >= settled + LIMITS.probe_steps and "is it still needed" in later[0][1].reason
    held = course.levels[settled + 1]
    assert set(course.levels[settled + 1 : settled + LIMITS.probe_steps]) == {held}


def course_held(decision: Decision) -> bool:
    """Whether a decision ended a walk."""
    return any(words in decision.reason for words in ("no bottleneck", "saves", "does not pay"))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("threshold", ["bottleneck", "margin"])
def test_a_link_right_at_a_limit_does_not_oscillate_either(threshold: str, seed: int) -> None:
    if threshold == "bottleneck":  # 1.05 ms of a 21 ms step
        job = Job(bytes_per_second=4e6 / (11.05 * ms), codec=(0.0, 0.0, 0.0), noise=0.05)
        assert exposed_share(job, NONE) == pytest.approx(LIMITS.bottleneck, rel=0.05)
    else:  # what float16 saves, its codec takes away again, but for 3 %
        job = Job(bytes_per_second=4e6 / (12 * ms), codec=(0.0, 1.34 * ms, 1.34 * ms), noise=0.05)
        assert step_seconds(job, FP16) / step_seconds(job, NONE) == pytest.approx(1 - LIMITS.margin, abs=0.002)
    course = drive(lambda step: job, 400, seed=seed)
    assert len([step for step, _ in course.decisions if step > 60]) == 0


def test_looks_at_dense_become_rarer_while_they_change_nothing() -> None:
    course = drive(lambda step: SLOW, 7000)
    looks = [step for step, decision in course.decisions if "is it still needed" in decision.reason]
    gaps = np.diff(looks)
    assert len(looks) == 4  # after 400, 800, 1600 and 3200 steps
    assert (gaps[1:] > 1.8 * gaps[:-1]).all()
    dense = sum(level == NONE for level in course.levels[100:])
    assert dense / len(course.levels) < 0.02, "what looking costs"


jobs = st.builds(
    Job,
    compute=st.floats(1 * ms, 100 * ms),
    bytes_per_second=st.floats(1e6, 1e10),
    codec=st.tuples(st.just(0.0), st.floats(0, 20 * ms), st.floats(0, 40 * ms)),
    overlap=st.floats(0, 1),
    slow_rank=st.floats(0, 5 * ms),
)


@given(jobs)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_whatever_the_link_it_never_ends_slower_than_dense(job: Job) -> None:
    """Promise 1, without noise: dense, or the least level that is within the margin of the fastest tried."""
    course = drive(lambda step: job, 200)
    held = course.controller.level
    assert course.controller.mode is Mode.HOLD
    tried = sorted(set(course.levels))
    assert tried == list(range(len(tried))), "from the least compression upwards"
    for level in tried[:-1]:
        enough = exposed_share(job, level) <= LIMITS.bottleneck
        pays = step_seconds(job, level) <= (1 - LIMITS.margin) * step_seconds(job, NONE)
        assert not (enough and (pays or level == NONE)), "no level above one that was enough"
    fastest = min(step_seconds(job, level) for level in tried)
    good = [level for level in tried if step_seconds(job, level) * (1 - LIMITS.margin) <= fastest * (1 + 1e-9)]
    if held:
        assert step_seconds(job, held) * (1 - LIMITS.margin) <= fastest * (1 + 1e-9)
        assert held == min(good), "the least compression that is as good as the fastest"
    elif len(tried) > 1:
        assert fastest > (1 - LIMITS.margin) * step_seconds(job, NONE) * (1 - 1e-9)


@given(jobs, st.integers(0, 1000))
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
def test_every_decision_explains_itself(job: Job, seed: int) -> None:
    """Promise 3: a reason with figures and units, and the times of all that was measured, in milliseconds."""
    shaky = dataclasses.replace(job, noise=0.05)
    quick = dataclasses.replace(shaky, bytes_per_second=1e11)
    course = drive(lambda step: quick if step > 150 else shaky, 700, seed=seed)
    assert course.decisions
    before = NONE
    for _, decision in course.decisions:
        assert re.search(r"\d", decision.reason)
        assert decision.evidence
        figure = re.compile(r"(none|fp16|lowrank:4)\.(step|exposed_comm|codec)_ms")
        assert all(figure.fullmatch(key) for key in decision.evidence)
        assert all(np.isfinite(value) and value >= 0 for value in decision.evidence.values())
        assert f"{NAMES[before]}.step_ms" in decision.evidence, "the level that was left or kept has been measured"
        if course_held(decision) or "holds up" in decision.reason:
            said = [float(text) for text in re.findall(r"(\d+\.\d\d) ms", decision.reason)]
            known = np.array(list(decision.evidence.values()))
            assert said and all(np.abs(known - value).min() < 0.0051 for value in said), "the same figures in both"
        before = decision.level


def test_evidence_is_in_milliseconds() -> None:
    course = drive(lambda step: Job(compute=20 * ms, bytes_per_second=100e6), 17)
    ((_, decision),) = course.decisions
    assert decision.evidence == {"none.step_ms": 50.0, "none.exposed_comm_ms": 30.0, "none.codec_ms": 0.0}
    assert "50.00 ms" in decision.reason and "30.00 ms" in decision.reason and "60%" in decision.reason


@given(jobs, st.integers(0, 1000))
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
def test_equal_figures_give_equal_decisions(job: Job, seed: int) -> None:
    """Every rank decides for itself, and a run log can be replayed."""
    shaky = dataclasses.replace(job, noise=0.05)
    rng = np.random.default_rng(seed)
    mine, other = Controller(NAMES), Controller(NAMES)
    said = []
    for _ in range(600):
        level = mine.level
        times = shaky.step(level, rng)
        said.append((level, times, mine.observe(level, times)))
        assert other.observe(level, times) == said[-1][2]
    assert mine == other
    replay = Controller(NAMES)
    assert [replay.observe(level, times) for level, times, _ in said] == [decision for *_, decision in said]
    assert any(decision for *_, decision in said)


def test_steps_of_another_level_and_steps_right_after_a_change_do_not_count() -> None:
    controller = Controller(NAMES)
    rng = np.random.default_rng(0)
    while controller.level == NONE:
        controller.observe(NONE, SLOW.step(NONE, rng))
    nonsense = StepTimes(step=1e6, exposed_comm=1e6)
    for _ in range(50):  # still under way when the level changed
        assert controller.observe(NONE, nonsense) is None
    for _ in range(LIMITS.settle_steps):
        assert controller.observe(FP16, nonsense) is None
    for _ in range(LIMITS.trial_steps - 1):
        assert controller.observe(FP16, SLOW.step(FP16, rng)) is None
    decision = controller.observe(FP16, SLOW.step(FP16, rng))
    assert decision is not None
    assert decision.evidence["fp16.step_ms"] == pytest.approx(step_seconds(SLOW, FP16) * 1e3)


def test_a_job_that_takes_no_time_divides_by_nothing() -> None:
    controller = Controller(NAMES)
    decisions = [controller.observe(NONE, StepTimes()) for _ in range(200)]
    assert [decision.level for decision in decisions if decision] == [NONE]
