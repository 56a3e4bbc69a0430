"""What the controller's decisions rest on, in small: guesses, blocks, ratios, errors, and what is known of levels."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import pytest
from frameworks import examples
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.control.blocks import ALONE, NOISE_FLOOR, Block, Guess, block_of, ratio_of, shrunk
from hvdplus.control.delay import (
    FOLLOW,
    LEAST_PREVIEW,
    LEAVES,
    MOST_ERROR,
    OWN,
    PREVIEW_ERROR,
    Errors,
    expected,
    foreseen,
    left_behind,
    reached,
    settled,
)
from hvdplus.control.knowledge import DRIFT, WAIT_ERROR, WITHIN, Knowledge, plausible
from hvdplus.control.link import LevelCost
from hvdplus.control.memory import from_plain, restore, to_plain
from hvdplus.control.meter import StepTimes
from hvdplus.control.probing import LARGER, LEAST, MOST, SHOWS, SMALL, sums

thoroughly = examples(100)
logarithms, variances = st.floats(-5, 5), st.floats(1e-6, 1.0)


# -- guesses -----------------------------------------------------------------------------------------------------------


@given(logarithms, variances, st.floats(-2.9, 2.9), variances)
@thoroughly
def test_a_guess_goes_towards_what_is_seen_and_becomes_surer(
    mean: float, own: float, deviations: float, variance: float
) -> None:
    seen = mean + deviations * math.sqrt(own + variance)
    guess = Guess(mean, own).updated(seen, variance)
    assert min(mean, seen) - 1e-9 <= guess.mean <= max(mean, seen) + 1e-9
    assert guess.variance == pytest.approx(own * variance / (own + variance), rel=1e-6)
    weights = variance / (own + variance), own / (own + variance)
    assert guess.mean == pytest.approx(weights[0] * mean + weights[1] * seen, rel=1e-6, abs=1e-9)


@given(logarithms, variances, st.sampled_from([-1, 1]), st.floats(4, 50), variances)
@thoroughly
def test_what_lies_far_off_is_believed(mean: float, own: float, sign: int, deviations: float, variance: float) -> None:
    """Things have changed: a guess that was ever so sure follows."""
    seen = mean + sign * deviations * math.sqrt(own + variance)
    assert abs(Guess(mean, own).updated(seen, variance).mean - seen) <= 0.1 * abs(seen - mean)


# -- blocks ------------------------------------------------------------------------------------------------------------


def steps(busy: list[float], comm: list[float]) -> list[StepTimes]:
    return [StepTimes(b + c, 0.0, c, 0.0, 0.1) for b, c in zip(busy, comm, strict=True)]


def test_a_block_holds_middle_values_of_steps_in_pairs() -> None:
    """A level of two sides that takes turns is neither side; a single odd step is not in the middle."""
    turns = block_of(steps([1.0] * 8, [0.2, 0.4] * 4))
    assert (turns.busy, turns.rest, turns.exposed) == pytest.approx((1.0, 0.3, 0.3))
    assert turns.comm == pytest.approx(0.4) and turns.step == pytest.approx(1.3, rel=0.01)
    assert turns.rest_variance == pytest.approx(0.0) == turns.busy_variance
    odd = block_of(steps([1.0, 1.0, 9.0, *[1.0] * 5], [0.3] * 8))
    assert odd.busy == 1.0 and odd.step == pytest.approx(1.3) and odd.busy_variance > 0.5
    waits = block_of([StepTimes(2.0, 0.5, 0.25, 0.75)] * 4)
    assert (waits.busy, waits.codec, waits.rest) == (1.25, 0.5, 0.75), "waiting for input counts as computation"


@given(st.lists(st.floats(0.01, 1.0), min_size=3, max_size=12), st.data(), st.floats(0.0, 1000.0))
def test_a_script_that_validates_before_a_step_does_not_change_its_block(
    took: list[float], data: st.DataObject, seconds: float
) -> None:
    quiet = [StepTimes(each + 0.004, 0.2 * each, 0.3 * each, 0.004) for each in took]
    place = data.draw(st.integers(0, len(took) - 1))
    late = quiet[place]._replace(step=quiet[place].step + seconds, input_wait=0.004 + seconds)
    found = block_of([*quiet[:place], late, *quiet[place + 1 :]])
    assert [*found] == pytest.approx([*block_of(quiet)], rel=1e-6, abs=1e-9)


@given(st.floats(0.01, 0.2), st.integers(0, 99))
@examples(20)
def test_a_block_knows_how_far_it_may_be_off(noise: float, seed: int) -> None:
    """Blocks of the same steps scatter as much as they say, within a factor of 2."""
    dice = random.Random(seed)
    blocks = [block_of(steps([math.exp(dice.gauss(0, noise)) for _ in range(8)], [0.0] * 8)) for _ in range(60)]
    mean = sum(math.log(block.step) for block in blocks) / 60
    scatter = math.sqrt(sum((math.log(block.step) - mean) ** 2 for block in blocks) / 59)
    said = math.sqrt(sum(block.step_variance for block in blocks) / 60)
    assert scatter / 2 < said < 2 * scatter + NOISE_FLOOR


def test_blocks_of_one_or_two_steps_and_of_no_time_are_blocks() -> None:
    for some in (steps([1.0], [0.5]), steps([1.0, 1.2], [0.5, 0.5]), [StepTimes()], [StepTimes()] * 3):
        block = block_of(some)
        assert all(map(math.isfinite, block)) and min(block) >= 0 and block.step > 0 < block.busy
    for scale in (1e-3, 1.0, 1e3):  # nobody knows how one step scatters, whatever the unit
        for count in (1, 2):
            block = block_of(steps([0.6 * scale] * count, [0.4 * scale] * count))
            assert block.step_variance == pytest.approx(math.pi / 2 * ALONE**2 + NOISE_FLOOR**2)


# -- the ratio of two levels in turns ----------------------------------------------------------------------------------


def turn(busy: float, rest: float, variance: float = 1e-6) -> Block:
    return Block(busy + rest, variance, busy, variance, rest, variance, 0.0, rest, 0.0, variance)


@given(st.floats(0.1, 3), st.floats(-0.05, 0.05), st.sampled_from([3, 5, 7]))
@thoroughly
def test_what_slows_both_levels_down_is_no_difference(rest: float, drift: float, count: int) -> None:
    """Turns lie between two of the other, so that a pace that changes steadily cancels."""
    paces = [math.exp(drift * place) for place in range(count)]
    turns = [(place % 2, turn(pace, pace * (rest if place % 2 else 1.0))) for place, pace in enumerate(paces)]
    found = ratio_of(turns, 1, contention=0.03)
    assert found.pairs == count // 2
    assert found.guess.mean == pytest.approx(math.log((1 + rest) / 2), abs=0.005)


@pytest.mark.parametrize("pace", [0.7, 1.3])
def test_a_pace_that_jumps_in_a_trial_is_known_from_the_computation(pace: float) -> None:
    """Much of a step is computation, which is alike: as noisy as it is, its difference counts for little."""
    turns = [(0, turn(1.0, 0.1, 0.01)), (1, turn(pace, 0.1, 0.01)), (0, turn(1.0, 0.1, 0.01))]
    assert abs(ratio_of(turns, 1, contention=0.03).guess.mean) < 0.2 * abs(math.log(pace))


def test_more_pairs_and_quieter_blocks_make_a_ratio_surer_and_one_neighbour_less_so() -> None:
    def variance(turns: int, noise: float = 1e-3) -> float:
        return ratio_of([(place % 2, turn(1.0, 1.0, noise)) for place in range(turns)], 1, 0.03).guess.variance

    assert variance(2) > variance(3) > variance(5) > variance(7)
    assert variance(3, 1e-2) > variance(3, 1e-3) > variance(3, 1e-5)


@pytest.mark.parametrize(("variance", "counts"), [(1e-8, 1.0), (1.0, 0.0)])
def test_computation_that_differs_counts_as_far_as_it_can_be_told_from_noise(variance: float, counts: float) -> None:
    turns = [(0, turn(1.0, 0.5, variance)), (1, turn(1.05, 0.5, variance)), (0, turn(1.0, 0.5, variance))]
    assert ratio_of(turns, 1, 0.03).guess.mean == pytest.approx(counts * 0.05 / 1.5, abs=0.002)


@given(variances, variances)
@thoroughly
def test_a_prior_makes_a_variance_smaller_than_either(variance: float, prior: float) -> None:
    assert 0 <= shrunk(variance, prior) <= min(variance, prior**2) and shrunk(variance, 0.0) == 0.0


# -- errors ------------------------------------------------------------------------------------------------------------


@given(st.floats(0.05, 0.99), st.integers(1, 100), st.floats(0, 4))
@thoroughly
def test_an_error_that_still_changes_tells_what_it_comes_to(share: float, age: int, carried: float) -> None:
    """From nothing, or from what another level left."""
    kept = (1 - share) ** age
    reached = math.sqrt((1 - share) / share * (1 - kept) + carried**2 * kept)
    assert settled(reached, age, carried) == pytest.approx(math.sqrt((1 - share) / share), rel=0.02)


@given(st.floats(0.1, 4), st.integers(1, 100), st.floats(0, 1), st.floats(0, 1))
@thoroughly
def test_what_another_level_left_leaves_no_faster_than_bytes_let_it(
    error: float, age: int, carried: float, share: float
) -> None:
    """So a level of few bytes that comes to little is at much for long, and that is taken off."""
    at = reached(error, age, carried, share)
    assert at >= reached(error, age, carried) - 1e-9 and at >= reached(error, age, 0.0, share)
    assert at >= carried * (1 - LEAVES * share) ** (age / 2) - 1e-9 if LEAVES * share < 1 else at >= 0
    assert settled(at, age, carried, share) == pytest.approx(error, rel=0.02)


@pytest.mark.parametrize("share", [0.003, 0.01, 0.03])
def test_what_a_level_leaves_behind_is_the_sum_of_errors_until_it_has_left(share: float) -> None:
    peak = reached(2.0, 11, 0.05, 0.003)
    later = sum(reached(0.05, age, peak, share) - 0.05 for age in range(1, 3000))
    assert left_behind(2.0, 11, 0.05, 0.003, share) == pytest.approx(later, rel=0.15)
    assert left_behind(0.05, 11, 2.0, share, 0.003) == 0.0, "a level that holds back less leaves no more"


@given(st.floats(0.01, 10), st.integers(1, 100), st.floats(0, 4), st.floats(0.001, 0.1))
@thoroughly
def test_whatever_another_level_left_a_reading_is_in_part_of_the_level_that_runs(
    error: float, age: int, carried: float, share: float
) -> None:
    errors = Errors()
    errors.learn(1, error, age, carried, share=share, held=False)
    (read,) = errors.readings[1]
    assert reached(read, age) >= 0.99 * error * math.sqrt(OWN) or read >= error, "its own part"
    assert read <= max(10.0, error) and read <= 1.01 * settled(error, age), "but no more than all of it"


def test_a_trial_after_a_level_that_holds_back_much_does_not_find_that_the_next_holds_back_nothing() -> None:
    """Of a training: readings of ``powersgd:16+fp16`` after ``powersgd:4+fp16`` had come to 0.5."""
    errors = Errors()
    errors.foresee(1, 0.14)
    for age, error in ((4, 0.17), (9, 0.12), (14, 0.045)):
        errors.learn(1, error, age, 0.5, share=0.02, held=False)
    assert 0.05 < errors.guess(1, known(0).costs).mean < 0.17


@given(st.floats(0, 1e6), st.integers(0, 100), st.floats(0, 1e3))
@thoroughly
def test_no_reading_comes_to_more_than_ten_or_itself(error: float, age: int, carried: float) -> None:
    assert 0 <= settled(error, age, carried) <= max(error, 10.0) and settled(0.0, age, carried) == 0.0


# -- levels ------------------------------------------------------------------------------------------------------------


def test_a_single_reading_outvotes_no_guess() -> None:
    """It may be of an odd batch, and would price the level and those near it out for good."""
    for level, neighbour in ((1, 2), (2, 1)):
        near = tuple(LevelCost(round(8e6 * share), 0, 5) for share in (1.0, 0.1, 0.07))
        guess, beside = expected(level, {}, near, {}), expected(neighbour, {}, near, {})
        assert expected(level, {level: [13.0]}, near, {}) == guess and guess.mean < 1
        assert expected(neighbour, {level: [13.0]}, near, {}) == beside
        assert expected(level, {level: [0.5, 13.0, 0.6]}, near, {}) == Guess(0.6, 0.0)
        assert expected(level, {level: [0.1]}, near, {}).mean == 0.1, "no batch makes it smaller by chance"
        assert 0.05 < expected(neighbour, {level: [0.1]}, near, {}).mean < 0.2


def test_a_preview_tells_of_a_level_until_it_is_measured() -> None:
    costs = tuple(
        LevelCost(round(8e6 * share), 0, 5, passes=passes) for share, passes in ((1, 1), (0.1, 2), (0.07, 1), (0.05, 2))
    )
    seen = {1: 0.1, 2: 0.4, 3: 0.2}
    assert expected(1, {}, costs, seen) == Guess(0.1, (PREVIEW_ERROR * 0.1) ** 2)
    assert expected(1, {1: [0.3] * 3}, costs, seen) == Guess(0.3, 0.0), "measured"
    assert expected(1, {1: [0.3]}, costs, seen).mean == 0.1 and expected(1, {1: [0.05]}, costs, seen).mean == 0.05
    assert expected(3, {1: [0.15] * 3}, costs, seen).mean == pytest.approx(0.3), "1.5 times as much as in the preview"
    assert expected(2, {1: [0.15] * 3}, costs, seen).mean == 0.4, "has another number of passes"
    assert expected(2, {1: [0.15] * 3}, costs, {1: 0.1}).mean == expected(2, {1: [0.15] * 3}, costs, {}).mean
    assert expected(3, {1: [0.15] * 3}, costs, {3: 0.2}).mean == 0.2, "the other had none to hold against"


@given(st.floats(0, 2), st.floats(0, 2))
def test_what_holds_back_more_in_a_preview_comes_to_more(one: float, other: float) -> None:
    one, other = sorted((one, other))
    assert 0 <= foreseen(one) <= foreseen(other) <= MOST_ERROR
    assert foreseen(0.9999) == MOST_ERROR and foreseen(0.0) == 0


def test_what_a_preview_shows_is_a_first_reading() -> None:
    knowledge = known(0)
    knowledge.errors.foresee(2, math.sqrt(0.8))
    assert knowledge.error(2).mean == pytest.approx(2.0, rel=1e-3), (
        "what keeps 0.8 of the energy a step comes to e² = 4"
    )
    knowledge.errors.foresee(1, 0.0)
    assert knowledge.error(1).mean == LEAST_PREVIEW, "others' errors are held against it"
    assert knowledge.paying([0, 2], 0) == [2] and not knowledge.paying([0], 2)
    knowledge.link = knowledge.link._replace(beta=1e-12)
    assert not knowledge.paying([2], 0), "its codec takes longer than the link"
    for _ in range(10):
        knowledge.errors.learn(2, 10.0, 1000, held=False)
    assert knowledge.paying([1], 2), "it takes longer, but what the level that runs holds back costs more"


def test_errors_of_levels_that_do_not_run_follow_that_of_the_level_held() -> None:
    knowledge = known(0)
    for level, error in ((1, 0.2), (2, 1.0)):
        for _ in range(10):
            knowledge.errors.learn(level, error, 1000, held=level == 2)
    for _ in range(40):  # the training goes on, and level 2 holds back three times as much
        knowledge.errors.learn(2, 3.0, 1000, held=True)
    assert knowledge.error(2).mean == pytest.approx(3.0, rel=1e-3)
    assert knowledge.error(1).mean == pytest.approx(0.2 * 3**FOLLOW, rel=1e-3), "it has not run since"
    knowledge.errors.foresee(0, math.sqrt(0.8))
    assert knowledge.error(0).mean == pytest.approx(2.0, rel=1e-3), "what a preview shows is of today"
    before = knowledge.errors.moved
    for _ in range(10):
        knowledge.errors.learn(1, 0.2, 1000, held=False)
    assert knowledge.errors.moved == before and knowledge.error(1).mean == pytest.approx(0.2, rel=1e-3), (
        "a trial tells of its level alone"
    )


@given(st.lists(st.tuples(st.integers(1, 2), st.floats(0, 1e3), st.booleans()), max_size=60))
@thoroughly
def test_errors_move_no_further_than_what_was_read(readings: list[tuple[int, float, bool]]) -> None:
    knowledge = known(0)
    for level, error, held in readings:
        knowledge.errors.learn(level, error, 1000, held=held)
    read = [settled(error, 1000) for _, error, _ in readings if error]
    if read:
        assert abs(knowledge.errors.moved) <= math.log(max(read) / min(read)) + 1e-9
    assert plausible(knowledge, [])


def test_a_levels_weight_is_in_its_price() -> None:
    knowledge = known(0, 2, error=2.0)
    assert knowledge.price(2) == pytest.approx(1 + 0.05 * 2.0)
    knowledge.costs = (*COSTS[:2], COSTS[2]._replace(delay_weight=0.6))
    assert knowledge.price(2) == pytest.approx(1 + 0.6 * 0.05 * 2.0) and knowledge.price(0) == 1


COSTS = tuple(
    LevelCost(round(8e6 * share), round(1.6e6 * share), 5, codec)
    for share, codec in ((1.0, 0.0), (0.5, 1e-3), (0.07, 4e-3))
)


def known(*levels: int, error: float = math.nan) -> Knowledge:
    """Of a job of 50 ms on a link of 100 MB/s without overlap, at the levels that ran."""
    knowledge = Knowledge(COSTS, 0.05)
    for level in levels:
        for _ in range(4):
            knowledge.steps += 8
            comm = COSTS[level].payload_bytes * 1e-8
            took = StepTimes(0.05 + COSTS[level].codec + comm, COSTS[level].codec, comm)
            knowledge.learn(level, block_of([took] * 8), held=level == levels[0])
            if not math.isnan(error) and level:
                knowledge.errors.learn(level, error, 100, held=True)
    return knowledge


def test_a_level_that_never_ran_is_predicted_and_less_sure_than_one_that_did() -> None:
    one, all_three = known(0), known(0, 1, 2)
    for level, cost in enumerate(COSTS):
        true = 0.05 + cost.codec + cost.payload_bytes * 1e-8
        assert all_three.seconds(level) == pytest.approx(true, rel=0.01)
        assert one.seconds(level) == pytest.approx(true, rel=0.05)
    for level in (1, 2):
        assert one.cost(level, 0).variance > 4 * all_three.cost(level, 0).variance
    before = all_three.cost(1, 0).variance
    all_three.steps += 1000
    assert all_three.cost(1, 0).variance == pytest.approx(before + 1000 * DRIFT**2, rel=0.05), "trusted less with age"


def test_a_machine_that_slows_down_slows_every_level_and_a_link_each_by_its_bytes() -> None:
    for busy, beta in ((2.0, 1.0), (1.0, 3.0)):
        knowledge = known(0, 2)
        comm = COSTS[2].payload_bytes * 1e-8 * beta
        for _ in range(4):
            knowledge.steps += 8
            took = StepTimes(0.05 * busy + 4e-3 * busy + comm, 4e-3 * busy, comm)
            knowledge.learn(2, block_of([took] * 8), held=True)
        assert knowledge.seconds(2) == pytest.approx(0.054 * busy + comm, rel=0.02)
        assert knowledge.seconds(0) == pytest.approx(0.05 * busy + 0.08 * beta, rel=0.1)


@pytest.mark.parametrize("factor", [1 / 64, 0.25, 1.0, 3.0])
def test_a_step_of_more_computation_takes_that_much_more_at_every_level(factor: float) -> None:
    """And as much communication and encoding, whether a level ran or not."""
    knowledge, fresh = known(0, 2), known(0, 2)
    before = [knowledge.seconds(level) for level in range(3)]
    sure = knowledge.cost(2, 0).variance
    knowledge.stretch(factor)
    for level in range(3):
        assert knowledge.seconds(level) == pytest.approx(before[level] + (factor - 1) * 0.05, rel=0.01)
    assert knowledge.codec(1) == fresh.codec(1) and knowledge.link == fresh.link
    assert knowledge.cost(2, 0).variance >= (0.5 if factor < 1 else 0.1) * sure, "what is left is no surer than it was"
    hides = Knowledge(COSTS, 0.05)
    hides.learn(0, block_of([StepTimes(0.05, 0.0, 0.01, 0.0, 0.02)] * 8), held=True)
    seconds = hides.hiding.least(0.04)
    hides.stretch(factor)
    least = min(seconds, factor * 0.04)
    assert hides.hiding.least(factor * 0.04) == pytest.approx(least), "as much of it is hidden, as far as it can be"


def test_steps_that_became_faster_than_their_computation_was_may_become_shorter_still() -> None:
    knowledge = known(0, 2)
    for level, held in ((0, True), (2, False), (2, False)):
        knowledge.steps += 8
        took = StepTimes(0.5 * 0.05 + COSTS[level].codec, COSTS[level].codec, 0.0)
        knowledge.learn(level, block_of([took] * 8), held=held)
    knowledge.stretch(1 / 64)
    assert all(0 < knowledge.seconds(level) < 0.05 for level in range(3))
    assert plausible(knowledge, [])


def test_what_one_level_hides_says_nothing_of_another_that_was_measured() -> None:
    """Sums that run behind the computation at one level show what it hides of levels that never ran."""
    knowledge, untried = known(0, 2), known(2)
    before, guessed = knowledge.seconds(0), untried.seconds(0)
    for each in (knowledge, untried):
        each.steps += 8
        comm = COSTS[2].payload_bytes * 1e-8
        took = StepTimes(0.054 + comm, 4e-3, comm, 0.0, 0.03)
        each.learn(2, block_of([took] * 8), held=True)
        assert each.hiding.share == pytest.approx(0.6)
    assert untried.seconds(0) < 0.95 * guessed
    # Longer sums are news of the link. Were less of them to wait for, too, it would be a third less.
    assert knowledge.seconds(0) >= before
    first = known(0)
    before, comm = first.seconds(0), COSTS[2].payload_bytes * 1e-8
    first.learn(2, block_of([StepTimes(0.054 + comm, 4e-3, comm, 0.0, 0.03)] * 8), held=False)
    assert first.hiding.share == pytest.approx(0.6) and first.seconds(0) == pytest.approx(before)


def with_probes(ms_per_megabyte: float) -> Knowledge:
    """Sums before training have shown the link."""
    knowledge = Knowledge(COSTS, 0.05)
    knowledge.begin([(size, 1e-4 + size * ms_per_megabyte * 1e-9) for size in (4_000, 800_000)])
    return knowledge


def ran(knowledge: Knowledge, level: int, ms_per_megabyte: float) -> Knowledge:
    """The same after a block of a level, over a link of that speed."""
    knowledge.steps += 8
    comm = COSTS[level].payload_bytes * ms_per_megabyte * 1e-9
    took = StepTimes(0.05 + COSTS[level].codec + comm, COSTS[level].codec, comm)
    knowledge.learn(level, block_of([took] * 8), held=True)
    return knowledge


def test_a_byte_is_expected_to_take_longer_within_training() -> None:
    """And what an all-reduce takes, however small it is, to take as long; neither is sure."""
    link = with_probes(10.0).link
    assert link.beta == pytest.approx(WITHIN * 1e-8, rel=0.01) and link.alpha == pytest.approx(1e-4, rel=0.1)
    assert math.sqrt(link.bb) == pytest.approx(WAIT_ERROR * 1e-8, rel=0.2)
    assert math.sqrt(link.aa) == pytest.approx(WAIT_ERROR * 1e-4, rel=0.2)


@pytest.mark.parametrize("before, within", [(7.0, 11.0), (12.0, 8.0)])
def test_what_sums_before_training_show_yields_to_what_steps_take(before: float, within: float) -> None:
    """A processor that computes has less time for sums; or it was something else that slowed the first ones down."""
    knowledge = ran(ran(with_probes(before), 2, before), 1, within)
    assert knowledge.seconds(0) == pytest.approx(0.05 + 8e-3 * within, rel=0.1)


@pytest.mark.parametrize("times", [0.7, 1.0, 1.8])
def test_a_step_that_waits_for_its_last_bucket_alone_says_nothing_of_what_computation_may_hide(times: float) -> None:
    """Whatever sums take, as against those before training."""
    for waits, bound in ((1.2, False), (2.0, True)):
        knowledge = with_probes(20.0)
        link, cost = knowledge.link.link, COSTS[1]
        comm, last = times * link.seconds(cost), times * link.exposed(cost, math.inf)
        took = StepTimes(0.05 + cost.codec + waits * last, cost.codec, waits * last, 0.0, comm - waits * last)
        knowledge.learn(1, block_of([took] * 8), held=True)
        assert knowledge.hiding.bound == bound


def test_what_the_running_level_takes_beside_a_probe_is_its_own() -> None:
    """The link is faster than its few bytes let think, so that levels of many bytes are cheaper, and it is not."""
    knowledge, told = ran(with_probes(80.0), 2, 80.0), []
    before = knowledge.seconds(2)
    for _ in range(4):
        told.append(knowledge.see_probe(2, 1_000_000, 1e-4 + 1e-3))
        assert ran(knowledge, 2, 80.0).seconds(2) == pytest.approx(before, rel=0.01)
    assert told[0] and not told[-1], "the link is another once"
    assert knowledge.link.beta == pytest.approx(1e-9, rel=0.2)
    assert knowledge.seconds(0) < 0.05 + 2e-9 * COSTS[0].payload_bytes


@pytest.mark.parametrize("bent", [0.4, 2.5])
def test_a_level_off_the_line_says_as_much_of_the_link_as_one_on_it(bent: float) -> None:
    """Its seconds and their scatter, both as far off, are the same news."""
    dice, straight, off = random.Random(0), known(0, 2), known(0, 2)
    scatter = [8e-2 * math.exp(dice.gauss(0, 0.2)) for _ in range(8)]
    off.levels[0] = off.levels[0]._replace(bent=bent * off.levels[0].bent)
    for knowledge, factor in ((straight, 1.0), (off, bent)):
        knowledge.steps += 8
        took = [StepTimes(0.05 + factor * comm, 0.0, factor * comm) for comm in scatter]
        knowledge.learn(0, block_of(took), held=True)
    for mine, theirs in zip(off.link, straight.link, strict=True):
        assert math.isclose(mine, theirs, rel_tol=1e-6), (off.link, straight.link)


def test_few_bytes_that_a_link_carries_at_once_say_little_of_many() -> None:
    """Half a megabyte after a rest takes no time on links that let bursts through."""
    assert ran(with_probes(80.0), 2, 8.0).seconds(0) > 0.05 + 8e-3 * 40


def test_a_ratio_that_was_measured_stands_until_the_level_runs_again() -> None:
    knowledge = known(0, 1)
    knowledge.learn_ratio(1, 0, Guess(math.log(0.8), 1e-4))
    assert knowledge.seconds(1) / knowledge.seconds(0) == pytest.approx(0.8) and knowledge.known_own(1).variance < 2e-4


def test_what_was_measured_holds_however_little_is_known_of_the_link() -> None:
    knowledge = known(0, 1)
    knowledge.link = knowledge.link._replace(aa=1e-4, bb=1e-14)  # a step may take 50 ms more or less
    assert knowledge.cost(1, 0).variance > 0.1, "less is known than when it was measured"
    knowledge.learn_ratio(1, 0, Guess(math.log(0.8), 1e-4))
    assert knowledge.cost(1, 0).variance < 1e-3 and knowledge.cost(2, 0).variance > 0.1
    knowledge.link = knowledge.link._replace(aa=4e-4)
    assert knowledge.cost(1, 0).variance > 0.1, "the link is another"


def test_the_price_follows_the_errors_that_were_measured() -> None:
    guessed, measured = known(0), known(0, 2, error=0.3)
    assert guessed.price(0) == 1.0 < guessed.price(1) < guessed.price(2)
    assert measured.price(2) == pytest.approx(1 + 0.05 * 0.3)
    scaled = Knowledge((*COSTS, LevelCost(300_000, 60_000, 5)), 0.05)
    for error in (0.3, 0.3, 9.0):
        scaled.errors.learn(2, error, 100, held=True)
    assert scaled.error(2).mean == pytest.approx(0.3, rel=1e-4), "the middle of the readings"
    assert scaled.error(3).mean == pytest.approx(0.3 * ((8e6 / 3e5 - 1) / (1 / 0.07 - 1)) ** 0.875, rel=0.01)


# -- state as plain values, and sums before training -------------------------------------------------------------------


class Colour(Enum):
    RED = "red"


class Pair(NamedTuple):
    left: int
    right: float


@dataclass
class Thing:
    colour: Colour = Colour.RED
    pairs: list[tuple[int, Pair]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    flag: bool = False
    secret: str = "kept"


def test_state_survives_a_file() -> None:
    thing, other = Thing(Colour.RED, [(3, Pair(1, 2.5))], {4: "four"}, True, "mine"), Thing()
    plain = json.loads(json.dumps(to_plain(thing, without=("secret",))))
    restore(other, plain, without=("secret",))
    assert other == Thing(thing.colour, thing.pairs, thing.names, thing.flag, "kept")
    assert type(other.pairs[0][1]) is Pair and list(other.names) == [4]
    plain["pairs"].append("another")
    assert len(other.pairs) == 1 and "secret" not in plain, "a copy"


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        ({"colour": "blue"}, "colour does not fit"),
        ({"pairs": [[1, [2]]]}, "pairs does not fit"),
        ({"pairs": [[1, [2, math.inf]]]}, "float is wanted, not inf"),
        ({"pairs": [[-1, [2, 1.0]]]}, "int is wanted, not -1"),
        ({"pairs": [[True, [2, 1.0]]]}, "int is wanted, not True"),
        ({"pairs": 3}, "a list is wanted, not 3"),
        ({"names": {"four": "4"}}, "names does not fit"),
        ({"names": []}, "a dictionary is wanted"),
        ({"flag": 1}, "bool is wanted, not 1"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(edit: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        restore(Thing(), {**to_plain(Thing()), **edit})
    for values, missing in (({"colour": "red"}, "pairs, names, flag, secret is missing"), (None, "a dictionary")):
        with pytest.raises(ValueError, match=missing):
            restore(Thing(), values)


def test_a_whole_number_may_stand_for_a_float() -> None:
    assert from_plain(float, 3) == 3 and from_plain(tuple[int, str], [1, "a"]) == (1, "a")


@given(st.integers(0, 10**12), st.floats(1e-5, 1e-2), st.floats(0.0, 1e-6))
@thoroughly
def test_sums_before_training_are_small_beside_a_step(dense_bytes: int, alpha: float, beta: float) -> None:
    """Larger ones follow as long as their bytes do not show beside what every all-reduce takes."""
    (small, least), (large, _), *larger = found = sums(lambda size: alpha + beta * size, dense_bytes)
    assert small == SMALL <= large <= MOST and large % 4 == 0 and large <= max(LEAST, 0.15 * dense_bytes)
    assert all(took <= SHOWS * least for _, took in found[1:-1])
    assert found[-1][1] > SHOWS * least or 2 * found[-1][0] > min(dense_bytes, MOST) - 4
    assert all(size % 4 == 0 and size <= dense_bytes and took <= LARGER * SHOWS * least for size, took in larger)


@pytest.mark.parametrize(("alpha", "rate"), [(2e-3, 1.6e9), (1e-3, 1e9), (0.2e-3, 10e9)])
def test_a_fast_link_is_not_taken_for_a_slow_one(alpha: float, rate: float) -> None:
    """Horovod begins a sum every millisecond, so that a small and a large one may take as long as each other."""
    dense_bytes = 605224
    knowledge = Knowledge((), 0.25)
    knowledge.begin(sums(lambda size: alpha + size / rate, dense_bytes))
    assert knowledge.link.beta * dense_bytes < WITHIN * dense_bytes / rate + 0.3 * alpha
