"""The benchmark of controllers, and the candidate that is on trial there."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
from candidate.controller import Config, Controller
from candidate.knowledge import LinkEstimate, settled
from controllers import CONTROLLERS, on_trial, run, scenarios, training
from frameworks import examples
from hypothesis import given
from hypothesis import strategies as st
from simulating import NAMES, Job, jobs, ms

from hvdplus.control.controller import Observation
from hvdplus.control.link import LevelCost
from hvdplus.control.meter import reduce_times

JOBS = 6


@pytest.mark.parametrize("name", scenarios(1))
def test_the_candidate_ends_near_the_best_level_and_wastes_less_than_the_controller_in_use(name: str) -> None:
    drawn, steps, changing = scenarios(JOBS)[name]
    mine, others = (
        [run(CONTROLLERS[title], changing(job), steps, seed) for seed, job in enumerate(drawn)]
        for title in ("candidate", "lenient")
    )
    assert sum(outcome.end > 1.05 for outcome in mine) <= 1
    assert sum(outcome.whole for outcome in mine) <= 1.005 * sum(outcome.whole for outcome in others)


def test_where_nothing_is_to_be_gained_it_rests_at_dense() -> None:
    job = Job(compute=50 * ms, rate=50e9, alpha=0.01 * ms)
    for seed in range(10):
        assert run(on_trial, lambda step: job, 500, seed).changes == 0


def steps_of(controller: Controller, job: Job, dice: random.Random, count: int) -> list[Any]:
    decided = []
    for step in range(count):
        times = reduce_times(job.step(controller.level, dice))
        decided.append(controller.observe(controller.level, Observation(times, *training(step, controller.level, 20))))
    return decided


@given(jobs, st.integers(0, 1000), st.integers(0, 150))
@examples(40)
def test_what_is_recalled_decides_like_what_remembers(job: Job, seed: int, when: int) -> None:
    first, second = (Controller(NAMES, job.costs, Config()) for _ in range(2))
    steps_of(first, job, random.Random(seed), when)
    second.recall(json.loads(json.dumps(first.memory())))
    one, other = (steps_of(each, job, random.Random(seed + 1), 100) for each in (first, second))
    assert one == other


@pytest.mark.parametrize(
    "edit",
    [{"level": 9}, {"mode": "asleep"}, {"_turns": [[0]]}, {"refused": 3}, {"_known": {"levels": {"0": [1.0]}}}],
    ids=str,
)
def test_a_damaged_memory_is_refused(edit: Mapping[str, Any]) -> None:
    controller = Controller(NAMES, Job().costs)
    steps_of(controller, Job(), random.Random(0), 40)
    with pytest.raises(ValueError, match=r"does not fit|beyond"):
        controller.recall({**controller.memory(), **edit})


@given(st.floats(0.01, 0.99), st.integers(1, 100))
@examples(100)
def test_an_error_that_still_grows_tells_what_it_comes_to(share: float, age: int) -> None:
    reached = ((1 - share) / share * (1 - (1 - share) ** age)) ** 0.5
    assert settled(reached, age) == pytest.approx(((1 - share) / share) ** 0.5, rel=0.02)


@given(st.floats(1e-6, 1e-3), st.floats(1e-10, 1e-6), st.permutations([2e4, 1e6, 4e6, 3e7]))
@examples(100)
def test_a_link_is_found_from_levels_of_different_sizes(alpha: float, beta: float, sizes: list[float]) -> None:
    estimate = LinkEstimate()
    costs = [LevelCost(int(size), int(size), 4) for size in sizes]
    for cost in costs * 5:
        estimate = estimate.updated(cost, 4 * alpha + beta * cost.payload_bytes, 0.0)
    for cost in costs:
        assert estimate.link.seconds(cost) == pytest.approx(4 * alpha + beta * cost.payload_bytes, rel=0.1)
