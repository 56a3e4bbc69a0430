"""When ranks exchange."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.agree import choose_rhythm, settings_of_exchanges
from hvdplus.control.interval import MOST, START, Interval
from hvdplus.control.meter import StepTimes
from hvdplus.exchange.rhythm import Rhythm, split
from hvdplus.settings import Settings


def events(rhythm, steps):
    """(step, what, fragment) of all that happens in so many steps, in order."""
    seen = []
    for _ in range(steps):
        if rhythm.locked:
            rhythm.step()
            seen.append((rhythm.steps, "lock", None))
            continue
        rhythm.step()
        seen += [(rhythm.steps, "complete", number) for number in rhythm.complete()]
        seen += [(rhythm.steps, "begin", number) for number in rhythm.begin()]
        if not rhythm.overlap:
            seen += [(rhythm.steps, "complete", number) for number in rhythm.complete()]
    return seen


@st.composite
def rhythms(draw):
    every = draw(st.integers(1, 12))
    return {
        "every": every,
        "fragments": draw(st.integers(1, every)),
        "overlap": draw(st.integers(0, every - 1)),
        "lock_steps": draw(st.integers(0, 5)),
    }


@given(rhythms(), st.integers(1, 60))
def test_every_fragment_is_exchanged_once_in_so_many_steps(asked, steps):
    seen = events(Rhythm(**asked), steps)
    for number in range(asked["fragments"]):
        begins = [at for at, what, which in seen if (what, which) == ("begin", number)]
        completes = [at for at, what, which in seen if (what, which) == ("complete", number)]
        assert all(b - a == asked["every"] for a, b in zip(begins, begins[1:], strict=False))
        assert completes == [at + asked["overlap"] for at in begins if at + asked["overlap"] <= steps]
        assert not begins or begins[0] <= asked["lock_steps"] + asked["every"]
    assert sum(what == "lock" for _, what, _ in seen) == min(steps, asked["lock_steps"])
    busiest = max((sum((at, what) == (step, "begin") for at, what, _ in seen) for step in range(steps + 1)), default=0)
    assert busiest <= 1, "fragments take turns"


@given(rhythms(), st.integers(0, 40), st.integers(1, 40))
def test_a_loaded_rhythm_goes_on_as_if_never_stopped(asked, before, after):
    whole = Rhythm(**asked)
    events(whole, before)
    loaded = Rhythm(**asked)
    under_way = loaded.load(json.loads(json.dumps(whole.state())))
    assert len(under_way) <= asked["fragments"]
    assert events(loaded, after) == events(whole, after)


@given(rhythms(), st.integers(6, 30))
def test_all_can_be_exchanged_at_once(asked, steps):
    rhythm = Rhythm(**asked)
    events(rhythm, steps)
    rhythm.complete(all_of_them=True)
    begun = rhythm.begin_all()
    assert sorted(rhythm.complete(all_of_them=True)) == begun
    assert rhythm.begin_all() == rhythm.complete(all_of_them=True) == [], "no step was taken since"
    rhythm.step()
    assert rhythm.begin_all() == list(range(asked["fragments"]))
    assert sorted(rhythm.complete(all_of_them=True)) == list(range(asked["fragments"]))


@given(rhythms(), st.integers(0, 30))
def test_a_loaded_rhythm_knows_that_no_step_was_taken_since_the_last_exchange(asked, steps):
    rhythm = Rhythm(**asked)
    events(rhythm, steps)
    state, loaded, old = rhythm.state(), Rhythm(**asked), Rhythm(**asked)
    loaded.load(json.loads(json.dumps(state)))
    old.load({name: value for name, value in state.items() if name != "latest"})
    assert loaded.begin_all() == rhythm.begin_all()
    assert old.begin_all() == list(range(asked["fragments"])), "an earlier checkpoint does not say"


def test_nobody_exchanges_alone_at_once():
    ahead, behind, steps = Rhythm(4, fragments=2), Rhythm(4, fragments=2), range(5)
    for _ in steps:
        ahead.step()
        ahead.begin()
    for _ in steps[:4]:
        behind.step()
        behind.begin()
    assert ahead._latest == [2, 4] and behind._latest == [2, 4] and behind.steps == 4
    told = [[0, 1], [0]]
    assert ahead.begin_all(lambda mine: told) == behind.begin_all(lambda mine: told) == [0, 1]
    assert [at - ahead.steps for at in ahead._begins] == [at - behind.steps for at in behind._begins]


def test_fragments_take_turns_again_after_all_were_exchanged_at_once():
    rhythm = Rhythm(8, fragments=4)
    for _ in range(11):
        rhythm.step()
        rhythm.complete()
        rhythm.begin()
    rhythm.complete(all_of_them=True)
    assert rhythm.begin_all() == [0, 1, 2, 3]
    rhythm.complete(all_of_them=True)
    seen = []
    for _ in range(8):
        rhythm.step()
        seen.append(rhythm.begin())
        rhythm.complete(all_of_them=True)
    assert seen == [[], [0], [], [1], [], [2], [], [3]]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20), st.data())
def test_fragments_are_of_about_one_size(sizes, data):
    count = data.draw(st.integers(1, len(sizes)))
    parts = split(sizes, count)
    assert len(parts) == count and all(parts) and sum(parts, []) == list(range(len(sizes)))
    if count < len(sizes):
        largest = max(sum(sizes[i] for i in part) for part in parts)
        assert largest <= sum(sizes) / count + max(sizes) + sum(sizes) / count


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"every": 4, "fragments": 5}, "fragments has to be from 1 to the 4 local steps. Received: fragments=5"),
        ({"every": 4, "overlap": 4}, "overlap_steps has to be below the 4 local steps"),
    ],
)
def test_impossible_rhythms_are_errors(asked, message):
    with pytest.raises(ValueError, match=message):
        Rhythm(**asked)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": -1}, "its number of steps has to be a whole number of at least 0"),
        ({"began": [None, None]}, "has 2 fragments, and this optimizer 1"),
        ({"begins": [None]}, "begins has to be step numbers"),
        ({"begins": "soon"}, "begins has to be step numbers"),
        ({"latest": [None]}, "latest has to be step numbers"),
        ({"latest": [0, 0]}, "has 2 fragments, and this optimizer 1"),
    ],
)
def test_damaged_states_are_errors(change, message):
    rhythm = Rhythm(4)
    with pytest.raises(ValueError, match=message):
        rhythm.load({**rhythm.state(), **change})


@pytest.mark.parametrize(
    ("compression", "every", "environ", "wanted"),
    [
        ("auto", None, {}, (1, False, "auto")),
        ("int8", 1, {}, (1, False, "int8")),
        ("int8", 8, {}, (8, True, "int8")),
        ("int8", "auto", {}, (0, True, "int8")),
        ("local:8", None, {}, (8, True, "none")),
        ("local:8+lowrank:16+fp16", None, {}, (8, True, "lowrank:16+fp16")),
        ("local:8+auto", None, {}, (8, True, "auto")),
        ("local:auto+auto", None, {}, (0, True, "auto")),
        ("local:auto+fp16", "auto", {}, (0, True, "fp16")),
        ("local:1", None, {}, (1, True, "none")),
        ("auto", None, {"HVDPLUS_COMPRESSION": "local:4+fp16"}, (4, True, "fp16")),
        ("auto", None, {"HVDPLUS_EVERY": "16"}, (16, True, "auto")),
        ("auto", None, {"HVDPLUS_EVERY": "auto"}, (0, True, "auto")),
        ("auto", 2, {"HVDPLUS_EVERY": "16"}, (2, True, "auto")),
        ("auto", None, {"HVDPLUS_COMPRESSION": "int8"}, (1, False, "auto")),
    ],
)
def test_what_is_wanted(compression, every, environ, wanted):
    """And what exchanges are wrapped with names no local steps any more."""
    settings = Settings.load({}, environ)
    own = Settings.load(settings_of_exchanges({}, settings), environ)
    if wanted[1]:
        assert choose_rhythm(wanted[2], None, own)[:2] == (1, False)
    assert choose_rhythm(compression, every, Settings.load({}, environ)) == wanted


@pytest.mark.parametrize(
    ("compression", "every", "environ", "message"),
    [
        ("local", None, {}, "compression: local wants auto or a number of steps.*Received: 'local'"),
        ("local:0+fp16", None, {}, "local wants auto or a number of steps"),
        ("local:x", None, {}, "local wants auto or a number of steps"),
        ("local:8", 4, {}, "compression='local:8' and every=4 ask for different numbers"),
        ("auto", 4, {"HVDPLUS_COMPRESSION": "local:8"}, r"HVDPLUS_COMPRESSION \(environment\)='local:8' and every=4"),
        ("auto", 0, {}, "every wants auto, or a number of local steps, at least 1. Received: every=0"),
        ("auto", True, {}, "every wants auto, or a number"),
        ("auto", "8", {}, "every wants auto, or a number"),
    ],
)
def test_what_is_wanted_may_be_impossible(compression, every, environ, message):
    with pytest.raises(ValueError, match=message):
        choose_rhythm(compression, every, Settings.load({}, environ))


# -- a number of steps that is measured


def exchanges(seconds, comm, *, learning_rate=lambda step: 0.1, steps=400, overlaps=False, codec=0.0):
    """(steps, every, overlap) after every exchange: ``seconds`` a step, ``comm`` and ``codec`` an exchange."""
    rhythm, told, periods, seen = Rhythm(0, overlaps=overlaps), [StepTimes(), StepTimes()], 0, []
    last = began = 0
    for _ in range(steps):
        rhythm.step()
        for step in range(2):  # as the optimizer: complete those of before, begin, complete what nothing hides
            for _ in rhythm.complete():
                periods += 1
                rhythm.hear(told.pop(0), learning_rate(rhythm.steps))
                if periods > 1:  # what it took is told in the next exchange
                    hidden = min(comm, (rhythm.steps - began) * seconds)
                    took = (rhythm.steps - last) * seconds + codec + comm - hidden
                    told.append(StepTimes(took, codec, comm - hidden, 0.0, hidden))
                last = rhythm.steps
                seen.append((rhythm.steps, rhythm.every, rhythm.overlap))
            if not step and rhythm.begin():
                began = rhythm.steps
    return seen


def test_an_exchange_that_takes_little_is_made_in_every_step_and_one_that_takes_much_seldom():
    assert exchanges(0.03, 0.0)[-1][1] == 1
    few, more, most = (exchanges(0.03, comm)[-1][1] for comm in (0.01, 0.1, 1.0))
    assert 1 < few < more < most <= MOST
    assert exchanges(0.03, 1000.0, steps=2000)[-1][1] == MOST


def test_steps_are_counted_for_the_exchange_that_followed_them():
    """Else a change of H would look like a change of the machine, and H would swing."""
    for overlaps in (False, True):
        for codec in (0.0, 0.01):
            seen = [choice for _, *choice in exchanges(0.03, 0.1, steps=3000, overlaps=overlaps, codec=codec)]
            assert len(set(map(tuple, seen[len(seen) // 4 :]))) == 1


@pytest.mark.parametrize("every_other", [False, True])
def test_meetings_in_between_do_not_change_what_a_step_takes(every_other):
    rhythm, last, told = Rhythm(0, overlaps=True), 0, []
    rhythm.overlap = 3

    def complete(**how):
        nonlocal last
        for _ in rhythm.complete(**how):
            rhythm.hear(told.pop(0) if told else StepTimes(), 0.1)
            if last:
                told.append(StepTimes(0.03 * (rhythm.steps - last) + 1e-9))
            last = rhythm.steps

    for step in range(1, 150):
        rhythm.step()
        complete()
        rhythm.begin()
        if every_other and step % 24 == 0:
            complete(all_of_them=True)
            rhythm.begin_all()
            complete(all_of_them=True)
    assert len(rhythm.interval.compute) > 3
    assert all(seconds == pytest.approx(0.03, rel=1e-3) for seconds in rhythm.interval.compute)


def test_whoever_chooses_the_level_is_told_with_the_first_period_of_another_length():
    """And of no other: an exchange in between makes a single one shorter."""
    rhythm, told = Rhythm(0), []
    rhythm._heard = True
    for length, comm in [(START, 0.0), (START, 0.0), (3, 0.0), *[(START, 4.0)] * 20]:
        rhythm._lengths.append(length)
        told.append(rhythm.hear(StepTimes(0.03 * length + comm, 0.0, comm), 0.1))
        assert told[-1] is None
    assert rhythm.every > START
    for length in (START, rhythm.every, rhythm.every):
        every = rhythm.every
        rhythm._lengths.append(length)
        told.append(rhythm.hear(StepTimes(0.03 * length + 4.0, 0.0, 4.0), 0.1))
        assert rhythm.every == every, "or the test says nothing"
        if length == START:
            loaded = Rhythm(0)
            loaded.load(json.loads(json.dumps(rhythm.state())))
            assert loaded._told == START != loaded.every
    assert told[-3:] == [None, (every, every / START), None]


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_learning_rate_of_nothing_is_no_reason_for_other_exchanges(rate):
    """The last of a schedule may be 0; where rates are unknown, all are."""
    interval = Interval()
    for comm, share in [*[(0.05, 1.0)] * 12, *[(0.05, 0.1)] * 12]:
        before = interval.observe(StepTimes(0.03 * 4 + comm, 0.0, comm), 4, rate * share)
    for _ in range(12):
        after = interval.observe(StepTimes(0.03 * 4 + 0.05, 0.0, 0.05), 4, 0.0)
    assert after == before and (before.steps > 16) == bool(rate)


def test_as_the_learning_rate_falls_exchanges_become_rarer():
    seen = exchanges(0.03, 0.05, learning_rate=lambda step: 0.1 if step < 400 else 0.02, steps=1200)
    before = [every for step, every, _ in seen if step < 400][-1]
    assert seen[-1][1] > 2 * before


def test_communication_is_hidden_where_ranks_can_go_on():
    """Behind steps that take longer than it, and no more of them than that takes; then H need not be as large."""
    steps, every, overlap = exchanges(0.03, 0.1, overlaps=True)[-1]
    assert 0.1 < overlap * 0.03 < 0.1 + 2 * 0.03 and overlap < every < exchanges(0.03, 0.1)[-1][1]
    assert exchanges(0.03, 0.0, overlaps=True)[-1][1:] == (1, 0)
    assert exchanges(0.03, 1000.0, overlaps=True, steps=3000)[-1][1:] == (MOST, 0), (
        "late means cost more than they hide"
    )
    assert exchanges(0.03, 0.1)[-1][2] == 0


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_measured_number_of_steps_is_saved(overlaps):
    rhythm = Rhythm(0, overlaps=overlaps)
    for waits in [1.0] * 6:
        rhythm.hear(StepTimes(), 0.1)
        rhythm._lengths.append(4)
        rhythm.hear(StepTimes(step=1.1, exposed_comm=waits), 0.1)
    rhythm.step()
    loaded = Rhythm(0, overlaps=overlaps)
    loaded.load(json.loads(json.dumps(rhythm.state())))
    assert loaded.interval == rhythm.interval and (loaded.every, loaded.overlap) == rhythm.interval.choice
    assert loaded.every != START and (loaded.overlap > 0) == overlaps
    without = Rhythm(0)
    without.load(rhythm.state())
    assert without.every == rhythm.every and without.overlap == 0
    with pytest.raises(ValueError, match="its number of local steps"):
        loaded.load({**rhythm.state(), "interval": {**rhythm.interval.state(), "steps": 0}})


def test_a_measured_number_of_steps_is_for_all_parameters_at_once():
    with pytest.raises(ValueError, match="all parameters at once, and chooses overlap_steps itself.*fragments=2"):
        Rhythm(0, fragments=2)
