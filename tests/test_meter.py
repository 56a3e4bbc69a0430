"""The stopwatch and how the ranks' figures become one, with a clock that is set by hand."""

from __future__ import annotations

import pytest
from frameworks import examples
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.control.meter import StepMeter, StepTimes, median_times, reduce_times, union_seconds

quickly = examples(100)


class Clock:
    """A clock that stands still between ``wait``s."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_step_is_cut_into_its_parts(clock: Clock) -> None:
    meter = StepMeter(clock)
    meter.end_step()
    clock.wait(3)
    meter.input_arrived()
    clock.wait(10)  # forward
    for _ in range(2):
        with meter.codec():
            clock.wait(1)
        clock.wait(4)  # backward goes on
    for seconds in (5, 2):
        with meter.exposed_comm():
            clock.wait(seconds)
    with meter.codec():
        clock.wait(0.5)
    clock.wait(1)  # optimizer
    meter.end_step()
    assert meter.last == StepTimes(step=31.5, codec=2.5, exposed_comm=7, input_wait=3)
    assert meter.last.compute == 10 + 2 * 4 + 1


def test_only_the_first_computation_of_a_step_ends_its_wait_for_input(clock: Clock) -> None:
    meter = StepMeter(clock)
    meter.end_step()
    for seconds in (1, 2):
        clock.wait(seconds)
        meter.input_arrived()
    clock.wait(4)
    meter.end_step()
    assert meter.last == StepTimes(step=7, input_wait=1)


def test_the_next_step_starts_from_zero(clock: Clock) -> None:
    meter = StepMeter(clock)
    meter.end_step()
    meter.input_arrived()
    with meter.codec(), meter.exposed_comm():
        clock.wait(1)
    meter.end_step()
    clock.wait(2)
    meter.end_step()
    assert meter.last == StepTimes(step=2)
    assert meter.last.compute == 2


def test_nothing_is_measured_before_the_first_step_has_an_end(clock: Clock) -> None:
    """Building the model, the first trace and the first batch are no part of a step."""
    meter = StepMeter(clock)
    clock.wait(100)
    meter.input_arrived()
    with meter.codec():
        clock.wait(50)
    assert meter.last == StepTimes()
    meter.end_step()
    assert meter.last == StepTimes()
    clock.wait(1)
    meter.end_step()
    assert meter.last == StepTimes(step=1)


def test_an_exception_inside_still_counts_its_time(clock: Clock) -> None:
    meter = StepMeter(clock)
    meter.end_step()
    for measure in (meter.codec, meter.exposed_comm):
        with pytest.raises(KeyError), measure():
            clock.wait(2)
            raise KeyError
    meter.end_step()
    assert meter.last == StepTimes(step=4, codec=2, exposed_comm=2)


def test_the_real_clock_runs() -> None:
    meter = StepMeter()
    meter.end_step()
    with meter.codec():
        sum(range(20000))
    meter.end_step()
    assert 0 < meter.last.codec <= meter.last.step < 60


class Wire:
    """Sums that end at given times of a clock."""

    def __init__(self, clock: Clock, meter: StepMeter) -> None:
        self.clock, self.meter = clock, meter
        self.ends: dict[int, float] = {}

    def start(self, key: int, seconds: float) -> None:
        self.ends[key] = self.clock.now + seconds
        self.meter.sum_begins(key, lambda: self.clock.now >= self.ends[key])

    def wait(self, key: int) -> None:
        with self.meter.awaited(key):
            self.clock.wait(max(0.0, self.ends[key] - self.clock.now))


def test_communication_behind_computation_is_overlapped(clock: Clock) -> None:
    meter = StepMeter(clock)
    wire = Wire(clock, meter)
    meter.end_step()
    clock.wait(10)
    wire.start(0, 8)
    clock.wait(6)  # the backward pass goes on
    wire.start(1, 8)  # while both are under way the wire is busy once
    clock.wait(1)
    wire.wait(0)
    wire.wait(1)
    meter.end_step()
    assert meter.last == StepTimes(step=24, exposed_comm=7, overlapped_comm=7)
    assert meter.last.comm == 14 and meter.last.compute == 17


def test_an_idle_wire_between_two_sums_is_not_communication(clock: Clock) -> None:
    meter = StepMeter(clock)
    wire = Wire(clock, meter)
    meter.end_step()
    for key in range(3):
        wire.start(key, 2)
        for _ in range(4):  # hooks that look; the sum has ended in the second of them
            clock.wait(1.5)
            meter.look()
    for key in range(3):
        wire.wait(key)
    meter.end_step()
    assert meter.last == StepTimes(step=18, overlapped_comm=3 * (1.5 + 3) / 2), "half way between two looks"


def test_an_end_is_known_to_half_the_time_between_two_looks(clock: Clock) -> None:
    for took in (0.5, 1, 3.5, 3.9):
        meter = StepMeter(clock)
        wire = Wire(clock, meter)
        meter.end_step()
        wire.start(0, took)
        clock.wait(4)
        wire.wait(0)
        meter.end_step()
        assert meter.last.comm == 2 and abs(meter.last.comm - took) <= 2


def test_few_sums_are_asked_whether_they_have_ended(clock: Clock) -> None:
    meter = StepMeter(clock)
    asked: list[int] = []
    for key in range(100):
        meter.sum_begins(key, lambda key=key: asked.append(key) or key < 2)  # type: ignore[misc]
    meter.look()
    assert asked == [0, 1, 2]
    meter.look()
    assert asked == [0, 1, 2], "hardly any time has passed"
    clock.wait(1)
    meter.look()
    assert asked == [0, 1, 2, 2]


def test_sums_of_a_step_are_forgotten_with_it(clock: Clock) -> None:
    meter = StepMeter(clock)
    wire = Wire(clock, meter)
    for _ in range(3):
        wire.start(0, 5)
        clock.wait(1)
        wire.wait(0)
        meter.end_step()
    assert meter.last == StepTimes(step=5, exposed_comm=4, overlapped_comm=1)


seconds = st.integers(0, 40)


@given(st.lists(st.tuples(seconds, seconds), max_size=8), st.randoms(use_true_random=False))
@quickly
def test_a_union_counts_every_second_once(intervals: list[tuple[int, int]], random: object) -> None:
    covered = {second for begin, end in intervals for second in range(begin, end)}
    assert union_seconds(intervals) == len(covered)
    shuffled = list(intervals)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert union_seconds(iter(shuffled)) == len(covered)


def test_a_slow_rank_is_blamed_as_computing_not_as_communication() -> None:
    """Rank 1 computes for 100 ms and then waits 2 ms for the wire; the others wait for it, not for the wire."""
    ranks = [
        StepTimes(step=0.102, exposed_comm=0.082),
        StepTimes(step=0.102, exposed_comm=0.002),
        StepTimes(step=0.102, exposed_comm=0.072),
    ]
    job = reduce_times(ranks)
    assert job.exposed_comm == 0.002
    assert job.step == pytest.approx(0.102)
    assert job.compute == pytest.approx(0.100)


def test_a_slow_rank_hides_no_communication_that_is_none() -> None:
    """Rank 0 starts its sums 50 ms before rank 1 comes: they wait, and 30 ms of wire are 30 ms of wire."""
    early = StepTimes(step=0.2, exposed_comm=0.06, overlapped_comm=0.02)
    late = StepTimes(step=0.2, exposed_comm=0.02, overlapped_comm=0.01)
    assert reduce_times([early, late]).comm == pytest.approx(0.03)
    assert reduce_times([early, late]).exposed_comm == 0.02


def test_the_slowest_codec_and_input_count() -> None:
    job = reduce_times([StepTimes(10, 1, 3, 0.5), StepTimes(12, 2, 4, 0.25)])
    assert job == StepTimes(step=11, codec=2, exposed_comm=3, input_wait=0.5)


def test_a_sounding_is_no_computation(clock: Clock) -> None:
    meter = StepMeter(clock)
    meter.end_step()
    for sounds in (True, False):
        clock.wait(2)
        with meter.exposed_comm():
            clock.wait(3)
        if sounds:
            with meter.probe():
                clock.wait(5)
        meter.end_step()
        assert meter.last == StepTimes(step=10 if sounds else 5, exposed_comm=3, probe=5 if sounds else 0)
        assert meter.last.compute == 2


times = st.builds(StepTimes, *([st.floats(0, 100)] * len(StepTimes._fields)))


@given(st.lists(times, min_size=1, max_size=6), st.randoms(use_true_random=False))
@quickly
def test_reduced_figures_lie_between_the_ranks_and_know_no_order(ranks: list[StepTimes], random: object) -> None:
    job = reduce_times(ranks)
    for figure in StepTimes._fields:
        values = [getattr(rank, figure) for rank in ranks]
        assert min(values) - 1e-12 <= getattr(job, figure) * (1 + 1e-12)
        assert getattr(job, figure) <= max(values) * (1 + 1e-12) + 1e-12
    assert job.compute >= 0
    shuffled = list(ranks)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert reduce_times(shuffled) == pytest.approx(job)
    assert job.comm == pytest.approx(min(rank.comm for rank in ranks)), "what the last to come saw of the wire"
    assert reduce_times(ranks[:1]) == pytest.approx(ranks[0]), "alone, nothing is reduced"


@given(times)
@quickly
def test_compute_is_the_rest_and_never_negative(step: StepTimes) -> None:
    rest = step.step - step.codec - step.exposed_comm - step.input_wait - step.probe
    assert step.compute == max(0.0, rest)


def test_medians_are_taken_figure_by_figure_and_shrug_off_a_hiccup() -> None:
    steps = [StepTimes(1, 4, 0, 1), StepTimes(2, 5, 0, 9), StepTimes(900, 0, 0, 2)]
    assert median_times(steps) == StepTimes(2, 4, 0, 2)
    assert median_times(steps[:2]) == StepTimes(1.5, 4.5, 0, 5)
