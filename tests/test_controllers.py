"""The benchmark of controllers: what it measures, and a summary of how the controller of this tree does in it."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from controllers import (
    ANOTHER_LINK,
    MOVING,
    Delay,
    Outcome,
    cost,
    in_use,
    line,
    phases,
    run,
    scenarios,
    steady,
    with_numbers,
)
from simulating import ERRORS, Job, ms
from traces import TRAINING_STEPS, Trace, in_training, moves, traces

from hvdplus.control.config import Config
from hvdplus.control.controller import Controller

JOBS = 6


OWN = f"{MOVING}, of the trace's own model from its beginning"


TWO_OFF = pytest.mark.xfail(reason="two of 13 traces end 1.053 and 1.061 times as dear as the best", strict=True)
NAMES = [name for name in scenarios(1) if name not in (MOVING, ANOTHER_LINK, "codecs misjudged")]


@pytest.mark.parametrize("name", [*NAMES, pytest.param("codecs misjudged", marks=TWO_OFF), OWN])
def test_the_controller_ends_near_the_best_level_and_wastes_little(name: str) -> None:
    """At most one job ends over 5 % dearer than the best, all steps are within 2 % at the median, changes are rare."""
    own = [each for each in traces() if moves(each)], TRAINING_STEPS, lambda trace: in_training(trace).__getitem__
    drawn, steps, changing = {**scenarios(JOBS, seed=1000), OWN: own}[name]
    check([run(in_use, changing(job), steps, seed) for seed, job in enumerate(drawn)], off=1, typical=1.02)


def test_the_controller_follows_a_link_to_another_that_was_recorded() -> None:
    """At most three of 22 jobs end over 5 % dearer. Where a link turns 30 times slower, a few dense steps cost most."""
    drawn, steps, changing = scenarios(22, seed=1000)[ANOTHER_LINK]
    outcomes = [run(in_use, changing(pair), steps, seed) for seed, pair in enumerate(drawn)]
    assert sum(each.end > 1.05 for each in outcomes) <= 3 and max(each.end for each in outcomes) < 1.3
    assert median(each.whole for each in outcomes) < 1.04 and sum(each.whole > 1.2 for each in outcomes) <= 2
    assert max(each.against_dense for each in outcomes) < 1.1


def check(outcomes: list[Outcome], *, off: int, typical: float) -> None:
    """``off``: most jobs that end over 5 % dearer than the best; ``typical``: median of all steps over the oracle."""
    ends, whole, against_dense, changes = zip(*outcomes, strict=True)
    assert sum(end > 1.05 for end in ends) <= off and max(ends) < 1.25
    assert median(whole) < typical and max(whole) < 1.3
    assert max(against_dense) < 1.06
    assert median(changes) <= 8 and max(changes) <= 24


def test_the_controller_follows_errors_that_grow_at_any_time() -> None:
    """One job of six ends over 5 % dearer than the best at most; an oracle knows what errors will be tomorrow."""
    drawn, steps, changing = scenarios(4 * JOBS, seed=1000)[MOVING]
    outcomes = [run(in_use, changing(job), steps, seed) for seed, job in enumerate(drawn)]
    check(outcomes, off=len(outcomes) // 6, typical=1.03)


def test_a_controller_that_never_changes_anything_is_told_from_one_that_does() -> None:
    """The benchmark's own figures: on a slow link dense is not the best, by as much as it takes longer."""

    class Dense(Controller):
        def observe(self, level: int, seen: object) -> None:
            return None

    job = Job(rate=10e6)
    outcome = run(lambda names, costs, config: Dense(names, costs, Config(dense_steps=1)), steady(job), 50, 0)
    best = min(cost(job, level) for level in range(5))
    assert outcome == pytest.approx((cost(job, 0) / best, cost(job, 0) / best, 1.0, 0))
    assert run(in_use, steady(job), 50, 0).end == 1.0
    assert run(with_numbers(["dense_steps=20"]), steady(job), 50, 0).whole > run(in_use, steady(job), 50, 0).whole


def test_its_jobs_are_what_they_are_called() -> None:
    job = Job(compute=50 * ms)
    assert phases(job)(69) == job and phases(job)(70).seconds(0) > 1.25 * job.compute
    for name, (drawn, steps, changing) in scenarios(3).items():
        assert len(drawn) >= 3 and steps >= (300 if name == MOVING else 500)
        assert changing(drawn[-1])(steps - 1) is not None
    for level, error in enumerate(ERRORS):
        assert Delay()(0, level, 500)[0] == pytest.approx(error) and Delay()(0, level, 0)[0] <= error
    assert line([Outcome(1.0, 1.1, 0.5, 3), Outcome(1.2, 1.3, 1.1, 5)], 2.0).split() == [
        "1.200", "1.200", "1.200", "1", "1.300", "1.300", "1", "5", "5", "2.0",
    ]  # fmt: skip


def test_what_a_level_left_leaves_while_the_next_one_runs() -> None:
    """At once where that one sends much, slowly where it sends little; a dense step leaves nothing."""
    job = Job()

    def after(steps: int, level: int) -> float:
        delay = Delay(steady(job))
        for step in range(100):
            delay(step, 4, step)
        for step in range(steps):
            delay(100 + step, level, step)
        return delay.errors[-1]

    assert after(1, 0) == after(1, 1) == 0.0
    assert after(3, 2) == pytest.approx(ERRORS[2], rel=0.01)
    slow = [after(steps, 3) for steps in (1, 3, 9, 100)]
    assert slow == sorted(slow, reverse=True) and slow[0] > 1.3 * slow[-1] == pytest.approx(1.3 * ERRORS[3])


@pytest.mark.parametrize("trace", [each for each in traces() if moves(each)], ids=lambda trace: trace.name)
def test_recorded_errors_move_with_the_training(trace: Trace) -> None:
    """Those of levels that keep a residual, and of no others; readings of them scatter; there is one clock."""
    steps = in_training(trace)
    first, last = steps[0], steps[-1]
    assert len(steps) == TRAINING_STEPS and first._time is last._time and first._time is not trace._time
    for level, asked in enumerate(trace.costs):
        assert (first.errors[level] != last.errors[level]) == asked.keeps_residual
        assert (first.errors[level] < last.errors[level]) == (first.previews[level] < last.previews[level] < 1)
        read = [Delay(steps.__getitem__, seed)(TRAINING_STEPS - 1, level, 500)[0] for seed in range(40)]
        if asked.keeps_residual:
            assert median(read) == pytest.approx(last.errors[level], rel=0.5) and len(set(read)) == 40
        else:
            assert not any(read)


def test_errors_are_played_where_those_of_every_level_were_recorded() -> None:
    """Not beside others that stand still."""
    names = [each.name for each in traces() if moves(each)]
    assert {"mlp-1gbit", "text-100mbit", "wide-100mbit"} <= set(names)
    trace = next(each for each in traces() if each.name == "mlp-1gbit")
    assert not moves(replace(trace, names=(*trace.names[:-1], "lowrank:32")))
    assert not moves(replace(trace, name="nobody-1gbit"))
