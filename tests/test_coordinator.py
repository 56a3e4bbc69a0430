"""What every rank does between two steps: contexts that must agree, windows and decisions in the run log."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from coordinating import (
    FAST,
    FP16,
    GENTLE,
    LADDER,
    LOWRANK,
    MIDDLE,
    NONE,
    SENT,
    SLOW,
    Run,
    cost,
    decisions,
    go,
    heard,
    make,
    report,
    step,
    steps,
    windows,
)

from hvdplus import __version__
from hvdplus.adapters.transports.local import Local
from hvdplus.control.config import Config
from hvdplus.control.controller import Controller, Decision, Mode, Observation
from hvdplus.control.meter import StepTimes
from hvdplus.exchange.coordinator import NORM_STEPS, REST_STEPS, Coordinator
from hvdplus.exchange.journal import TRACE_STEPS
from hvdplus.exchange.metadata import Report
from hvdplus.exchange.plan import Ladder, Plan
from hvdplus.log.runlog import RunLog, read
from hvdplus.settings import Settings
from hvdplus.transport import World

# -- loss scaling ------------------------------------------------------------------------------------------------------


def test_loss_scaling_leaves_out_levels_with_a_residual() -> None:
    """A residual would mix units; from the level that keeps one upwards."""
    coordinator = make("none", "fp16", "topk:0.2:16", "lowrank:4", auto=True, drain_steps=2)
    go(coordinator, "lowrank:4")
    steps(coordinator, 3)
    assert coordinator.leave_out_residuals(), "the coming plan was made before"
    coordinator.advance()
    assert steps(coordinator, 3) == [Plan(0, 0, 1 / 2), Plan(0, 0, 1.0), Plan()]
    assert not any(coordinator.leave_out_residuals() for _ in range(3)), "a loss scaler says so in every step"
    run = Run(coordinator, milliseconds=(*SLOW, (5.0, 0.0, 0.0)))
    run.steps(100)
    assert {plan.level for plan in run.plans} == {0, 1}
    (record,) = (record for record in coordinator.log.records if record["kind"] == "forbid")
    assert record["level"] == "topk:0.2:16" and "loss scaling" in record["reason"]


@pytest.mark.parametrize("names", [("none",), ("fp16",), ("none", "qsgd:8")])
def test_loss_scaling_is_fine_with_a_fixed_level_that_keeps_none(names: tuple[str, ...]) -> None:
    coordinator = make(*names)
    coordinator.leave_out_residuals()
    assert steps(coordinator, 4)[-1].level == len(names) - 1


@pytest.mark.parametrize("level", ["lowrank:4", "int8"])
def test_loss_scaling_refuses_a_fixed_level_that_keeps_one(level: str) -> None:
    with pytest.raises(ValueError, match=f"^{level} keeps a residual"):
        make("none", level).leave_out_residuals()


# -- contexts ----------------------------------------------------------------------------------------------------------


AGREED = {
    "contexts": (3.0, 4.0, "HVDPLUS_COMPRESSION=fp16"),
    "learning_rate": (0.1, 0.01, "hvd.allreduce"),
    "missing": (0.0, 16777215.0, "gradient on some ranks only"),
    "added": (0.0, 2.0, "on all ranks at the same step"),
}
"""What has to be equal on all ranks: two values, and what the error says."""


@pytest.mark.parametrize(
    ("odd", "named"), [((1,), "1"), ((1, 3), "1, 3"), ((2, 3), "2, 3")], ids=("rank 1", "1 and 3", "2 and 3")
)
@pytest.mark.parametrize("field", AGREED)
def test_what_differs_ends_the_job_and_names_the_ranks(field: str, odd: tuple[int, ...], named: str) -> None:
    """On whichever rank it is read, as all read the same."""
    ranks = max(odd) + 1
    coordinator = make("lowrank:4", ranks=ranks)
    usual, other, advice = AGREED[field]
    with pytest.raises(RuntimeError) as raised:
        coordinator.observe(
            coordinator.plan, heard(*(report(**{field: other if rank in odd else usual}) for rank in range(ranks)))
        )
    message = str(raised.value)
    assert advice in message
    if field == "added":
        assert ", ".join("2" if rank in odd else "0" for rank in range(ranks)) in message, "rank by rank"
    else:
        assert f"rank(s) {named}" in message
    assert field != "contexts" or "contexts of lowrank:4" in message


def test_equal_reports_are_fine() -> None:
    coordinator = make("lowrank:4", ranks=4)
    same = {"contexts": 16777215.0, "learning_rate": 0.1, "missing": 1.0}
    assert step(coordinator, *[report(**same)] * 4) == Plan(0, 0, 1.0)
    assert step(coordinator, *[report(**{**same, "contexts": 0.0})] * 4).side == 1


def test_a_learning_rate_that_is_not_a_number_is_no_difference() -> None:
    """It ruins the weights of all ranks alike."""
    coordinator = make("none", ranks=2)
    step(coordinator, *[report(learning_rate=math.nan)] * 2)
    with pytest.raises(RuntimeError, match="learning rate differs"):
        step(coordinator, report(learning_rate=0.1), report(learning_rate=math.nan))


# -- a whole run, on a link made of numbers ----------------------------------------------------------------------------


def test_auto_starts_dense_tries_and_holds() -> None:
    """Four ranks with their own coordinators, told the same, agree at every step."""
    coordinators = [make(auto=True, ranks=4, dense_steps=15) for _ in range(4)]
    run = Run(*coordinators, milliseconds=SLOW)
    run.steps(300)
    # The last dense step's times come with the next, whose plan is made by then.
    assert run.plans[:16] == [Plan()] * 16
    assert {plan.level for plan in run.plans[16:]} == {LOWRANK}
    assert [record["to"] for record in decisions(coordinators[0])] == ["lowrank:4", "lowrank:4"]
    assert all(coordinator.log.records == coordinators[0].log.records for coordinator in coordinators)


def test_auto_holds_the_least_compression_that_is_enough() -> None:
    coordinator = make(auto=True)
    run = Run(coordinator, milliseconds=MIDDLE)
    run.steps(300)
    assert [record["to"] for record in decisions(coordinator)] == ["fp16", "fp16"]
    assert {plan.level for plan in run.plans[100:]} == {FP16}


@pytest.mark.parametrize("dense_steps", [1, 8, 40])
def test_auto_is_dense_for_as_many_steps_as_the_settings_say(dense_steps: int) -> None:
    coordinator = make(auto=True, dense_steps=dense_steps)
    run = Run(coordinator, milliseconds=SLOW)
    run.steps(60)
    assert [plan.level for plan in run.plans].index(LOWRANK) == dense_steps + 1


def test_auto_rests_dense_on_a_fast_link_and_beside_a_slow_rank() -> None:
    """After a single look at fp16, whose codec nobody has timed, at most."""
    for links, slow_rank_ms in ((FAST, 0.0), (FAST, 8.0)):
        coordinator = make(auto=True)
        run = Run(coordinator, milliseconds=links, slow_rank_ms=slow_rank_ms)
        run.steps(200)
        assert {plan.level for plan in run.plans} <= {NONE, FP16} and set(run.plans[52:]) == {Plan(NONE)}
        assert [record["to"] for record in decisions(coordinator)] == ["none", "fp16", "none", "none"]


def test_auto_flushes_before_it_measures_dense_again() -> None:
    """On its way back to dense the residual is flushed, and the level names of the log stay right all the while."""
    coordinator = make(auto=True, drain_steps=4)
    run = Run(coordinator, milliseconds=SLOW)
    run.steps(100)
    run.milliseconds = ((9.7, 0.2, 0.0), (9.6, 0.1, 0.0), (11.0, 0.02, 0.0))  # the link is 200 times faster
    run.steps(100)
    back = next(i for i in range(100, 200) if run.plans[i].level == NONE)
    assert [plan.flush_fraction for plan in run.plans[back - 1 : back + 5]] == [1.0, 1 / 4, 1 / 3, 1 / 2, 1.0, 0.0]
    assert [plan.level for plan in run.plans[back : back + 5]] == [NONE] * 5


def test_after_loss_scaling_came_in_the_middle_of_a_trial_decisions_go_on() -> None:
    """The trial of fp16 is over, because what it was held against is forbidden."""
    coordinator = make(auto=True)
    run = Run(coordinator, milliseconds=SLOW)
    run.steps(60)
    assert coordinator.auto is not None
    controller = coordinator.auto.controller
    assert controller.held == LOWRANK
    controller.mode, controller.challenger, controller.level = Mode.TRIAL, FP16, FP16
    coordinator.set_level(FP16)
    coordinator.advance()
    assert coordinator.leave_out_residuals()
    coordinator.advance()
    assert controller.level == coordinator.schedule.level == NONE
    run.steps(60)
    assert controller.level == coordinator.schedule.level == FP16


def test_auto_stays_dense_on_one_rank() -> None:
    coordinator = make(auto=True, ranks=1)
    coordinator.describe_run(World(Local(), {"a": 1}, "ring", 0, ()), "torch", parameters=1000, gradient_bytes=4000)
    run = Run(coordinator, milliseconds=SLOW)
    run.steps(100)
    assert [record["to"] for record in decisions(coordinator)] == ["none"]
    assert {plan.level for plan in run.plans} == {NONE}


def test_no_step_probes_while_the_last_probe_is_not_known_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Controller, "probe_bytes", lambda controller: 4096)
    coordinator = make(auto=True)
    probed = [step(coordinator, *[report(**TIMED)] * 2).probe_bytes for _ in range(9)]
    assert probed[1:] == [4096, 0] * 4 or probed[:-1] == [4096, 0] * 4


def test_nor_where_metadata_are_read_a_step_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Controller, "probe_bytes", lambda controller: 4096)
    coordinator = make(auto=True)
    plans: list[Plan] = []
    for _ in range(12):
        plans.append(coordinator.plan)
        for late in plans[-2:-1]:
            coordinator.observe(late, heard(*[report(**TIMED)] * 2), counts=False)
        coordinator.schedule.commit(coordinator.plan)
        coordinator.advance()
    probed = [bool(plan.probe_bytes) for plan in plans]
    assert sum(probed) >= 3 and not any(map(all, pairwise(probed)))


def test_a_fact_has_a_name_of_its_own() -> None:
    coordinator = make("fp16")
    coordinator.describe_run(World(Local(), {"a": 2}, "ring", 0, ()), "torch", parameters=1000, gradient_bytes=4000)
    with pytest.raises(ValueError, match="has keep, kind, steps, wall_seconds itself. Received: kind, steps"):
        coordinator.finish(steps=3, kind="a")
    assert coordinator.finish(accuracy=0.9)["level"] == "fp16"
    assert coordinator.log.records[-1]["accuracy"] == 0.9


def test_where_ranks_have_changed_the_new_log_says_how_often_exchanges_come_too() -> None:
    before, after, lock_step = make("fp16"), make("fp16"), make("fp16")
    before.tell_rhythm(every=8, fragments=2)
    after.succeed(before)
    told = {"every": 8, "fragments": 2}
    for coordinator in (before, after):
        (record,) = (record for record in coordinator.log.records if record["kind"] == "local")
        assert told.items() <= record.items()
    lock_step.succeed(make("fp16"))
    assert all(record["kind"] != "local" for record in lock_step.log.records)


def test_a_fixed_level_never_decides() -> None:
    coordinator = make("fp16")
    run = Run(coordinator, milliseconds=[SLOW[FP16]])
    run.steps(200)
    assert decisions(coordinator) == [] and set(run.plans) == {Plan(0)}


@pytest.mark.parametrize("links", [SLOW, MIDDLE, FAST], ids=("slow", "middle", "fast"))
def test_windows_carry_the_level_that_ran_and_cover_every_step_once(links: Sequence[tuple[float, ...]]) -> None:
    coordinator = make(auto=True, window_steps=7)
    run = Run(coordinator, milliseconds=links)
    run.steps(250, loss=2.0)
    coordinator.finish()
    expected = 1
    for window in windows(coordinator):
        assert window["first_step"] == expected
        assert window["steps"] == window["last_step"] - window["first_step"] + 1 <= 7
        expected = window["last_step"] + 1
        plans = [run.plans[number - 1] for number in range(window["first_step"], window["last_step"] + 1)]
        assert len({(plan.level, plan.flush_fraction > 0) for plan in plans}) == 1
        flushes = plans[0].flush_fraction and plans[0].level != LOWRANK
        name = "draining" if flushes else LADDER[plans[0].level]
        assert window["level"] == name
        step_ms, exposed_ms, hidden_ms = links[plans[0].level]
        assert window["step_ms"] == pytest.approx(step_ms)
        assert window["exposed_comm_ms"] == pytest.approx(exposed_ms)
        assert window["overlapped_comm_ms"] == pytest.approx(hidden_ms)
        assert (window["codec_ms"], window["input_wait_ms"]) == pytest.approx((1.0, 0.5))
        assert window["compute_ms"] == pytest.approx(step_ms - exposed_ms - 1.5)
        assert window["payload_bytes"] == SENT[coordinator.ladder.names[plans[0].level]]
        assert window["loss"] == pytest.approx(2.5), "the mean over two ranks that said 2 and 3"
    assert expected == 250, "the last step's times would have come with the next"


def test_windows_hold_medians_not_means() -> None:
    coordinator = make("none", window_steps=5)
    step(coordinator, Report(), Report())
    for step_ms in (10, 11, 900, 12, 9):
        step(coordinator, *[report(step=step_ms / 1e3)] * 2)
    (window,) = windows(coordinator)
    assert window["step_ms"] == pytest.approx(11)
    assert (window["first_step"], window["last_step"], window["loss"]) == (1, 5, None)


def test_losses_that_are_missing_or_not_finite_spoil_no_window() -> None:
    coordinator = make("none", window_steps=4)
    step(coordinator)
    timed = {"step": 0.01}
    for reports in (
        (report(**timed, loss=1.0, losses=1.0), report(**timed)),  # reported by one rank only
        (report(**timed, loss=math.nan, losses=1.0), report(**timed, loss=5.0, losses=1.0)),
        (report(**timed), report(**timed)),
        (report(**timed, loss=2.0, losses=1.0), report(**timed, loss=4.0, losses=1.0)),
    ):
        step(coordinator, *reports)
    (window,) = windows(coordinator)
    assert window["loss"] == pytest.approx((1.0 + 3.0) / 2)


def test_decisions_are_written_with_reason_and_evidence(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    coordinator = make(auto=True, log=RunLog(path), dense_steps=15)
    Run(coordinator, milliseconds=MIDDLE).steps(100)
    written = [record for record in read(path) if record["kind"] == "decision"]
    assert written == decisions(coordinator)
    assert [(record["from"], record["to"]) for record in written] == [("none", "fp16"), ("fp16", "fp16")]
    assert written[0]["step"] == 16, "15 dense steps, whose last times came with the 16th"
    assert written[0]["reason"] == "the start is over; fp16 is expected to cost 0.74 times none"
    measured = {"none.step_ms": 56.5, "none.exposed_comm_ms": 15.0, "none.overlapped_comm_ms": 25.0}
    assert {name: written[0]["evidence"][name] for name in measured} == pytest.approx(measured, rel=1e-3)
    assert written[0]["evidence"]["fp16.predicted_step_ms"] == pytest.approx(42.0, abs=0.6)
    assert written[1]["evidence"]["fp16.step_ms"] == pytest.approx(41.6, rel=1e-3)
    assert re.match(r"fp16 costs 0\.736 \[0\.7\d\d, 0\.7\d\d\] times none, 1 pair; fp16 is best", written[1]["reason"])


def test_the_log_opens_with_what_the_job_is_and_closes_with_what_it_came_to(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    coordinator = make(auto=True, log=RunLog(path))
    transport = Local()
    transport.size = 2
    coordinator.describe_run(
        World(transport, {"a": 1, "b": 1}, "ring", 0, ()), "torch", parameters=1000, gradient_bytes=4000
    )
    run = Run(coordinator, milliseconds=MIDDLE)
    run.steps(120)
    assert coordinator.status.startswith("level fp16  step 41.60 ms, of which 0.10 ms")
    came_to = coordinator.finish(accuracy=0.97)
    first, *_, last = [json.loads(line) for line in path.read_text().splitlines()]
    assert (first["kind"], first["framework"], first["hvdplus"]) == ("run", "torch", __version__)
    assert (first["ranks"], first["hosts"]) == (2, {"a": 1, "b": 1})
    assert (first["transport"], first["collective"]) == ("local", "ring")
    assert (first["compression"], first["ladder"]) == ("auto", list(LADDER))
    assert first["payload_bytes"] == {name: SENT[name] for name in LADDER}
    assert first["levels"] == {
        name: {
            "payload_bytes": SENT[name],
            "last_bytes": SENT[name] // 40,
            "messages": 4,
            "codec_ms": 0.0,
            "keeps_residual": name == "lowrank:4",
            "passes": 1,
            "delay_weight": 1.0,
        }
        for name in LADDER
    }
    assert first["limits"] == dataclasses.asdict(Config(dense_steps=0, delay_price=0.25, error_budget=5.0))
    assert (first["parameters"], first["gradient_bytes"]) == (1000, 4000)
    assert (last["kind"], last["steps"], last["accuracy"]) == ("end", 120, 0.97)
    assert last["wall_seconds"] >= 0
    assert (came_to["level"], came_to["steps"]) == ("fp16", 120)
    assert came_to["step_ms"] == pytest.approx(41.6), "of the last level, not of the dense start"
    assert came_to["exposed_comm_ms"] == pytest.approx(0.1)


def test_a_resumed_run_counts_its_own_steps_those_not_observed_among_them() -> None:
    before = make("none")
    Run(before, milliseconds=MIDDLE).steps(57)
    coordinator = make("none")
    assert coordinator.load(before.state())
    Run(coordinator, milliseconds=MIDDLE).steps(30)
    coordinator.unread_steps = 1
    assert coordinator.finish()["steps"] == 31 and coordinator.log.records[-1]["steps"] == 31
    assert windows(coordinator)[-1]["last_step"] == 86, "windows count on"


def test_a_run_that_was_too_short_to_measure_ends_in_peace() -> None:
    coordinator = make("none")
    assert coordinator.status == "measuring"
    step(coordinator)
    came_to = coordinator.finish()
    assert came_to["steps"] == 1 and math.isnan(came_to["step_ms"])
    assert windows(coordinator) == []


def test_steps_that_flush_are_not_taken_for_dense_ones() -> None:
    """They are dearer than dense steps; measured as such, they would make a level look better than it is."""
    coordinator = make("none", "topk:0.2:16", drain_steps=6, window_steps=3)
    run = Run(coordinator, milliseconds=[(10.0, 5.0, 0.0), (8.0, 1.0, 0.0)])
    run.steps(12)
    go(coordinator, "none")
    run.steps(12)
    run.steps(1)  # brings the last one's times
    coordinator.finish()
    counted: dict[str, int] = {}
    for window in windows(coordinator):
        counted[window["level"]] = counted.get(window["level"], 0) + window["steps"]
    assert counted == {"topk:0.2:16": 12, "draining": 6, "none": 6}


def test_steps_that_flush_are_shown_to_the_controller_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[int, bool, float]] = []
    observe = Controller.observe

    def spy(controller: Controller, level: int, seen: Observation) -> Decision | None:
        shown.append((level, seen.flushes, round(seen.times.step * 1e3)))
        return observe(controller, level, seen)

    monkeypatch.setattr(Controller, "observe", spy)
    coordinator = make("none", "fp16", "topk:0.2:16", auto=True, drain_steps=7)
    plans: list[Plan] = []

    def flushes(plan: Plan) -> bool:
        return plan.level != LOWRANK and plan.flush_fraction > 0

    costs = (18, 17, 15)  # ms a level
    for _ in range(600):
        said = Report()
        if plans:  # times are of the step before
            cost = costs[plans[-1].level] + flushes(plans[-1])
            said = report(step=cost / 1e3, exposed_comm=(cost - 10) / 1e3)
        plans.append(coordinator.plan)
        step(coordinator, *[said] * 2)
    assert sum(map(flushes, plans)) >= 6
    assert {level for level, _, _ in shown} == {NONE, FP16, LOWRANK}
    ran = [(plan.level, flushes(plan)) for plan in plans[:-1]]
    assert shown == [(level, flushing, costs[level] + flushing) for level, flushing in ran]


def test_auto_passes_over_a_level_that_sends_no_less() -> None:
    """The coordinator tells its controller what every level sends."""
    costs = [cost(sent) for sent in (4000, 4000, 300)]
    coordinator = Coordinator(Ladder(LADDER), Settings(), auto=True, ranks=2, costs=costs, log=RunLog(None))
    run = Run(coordinator, milliseconds=GENTLE)
    run.steps(200)
    assert {plan.level for plan in run.plans} == {NONE, LOWRANK}


def test_rows_of_sparse_gradients_count_as_sent() -> None:
    """Whatever the level: they travel beside it."""
    coordinator = make("none", "topk:0.2:16", window_steps=2)
    for count in range(8):
        coordinator.row_bytes = 50 if count < 6 else 70
        step(coordinator, *[report(step=0.01 if count else 0.0)] * 2)
    coordinator.finish()
    assert [(record["level"], record["payload_bytes"]) for record in windows(coordinator)] == [
        ("topk:0.2:16", SENT["topk:0.2:16"] + 50),
        ("topk:0.2:16", SENT["topk:0.2:16"] + 50),
        ("topk:0.2:16", SENT["topk:0.2:16"] + 70),
        ("topk:0.2:16", SENT["topk:0.2:16"] + 70),
    ]


def test_the_log_of_a_fixed_level_names_it(tmp_path: Path) -> None:
    """Not the dense one that leads up to it; and what it came to is of its own steps."""
    path = tmp_path / "run.jsonl"
    coordinator = make("none", "lowrank:4", log=RunLog(path))
    coordinator.describe_run(World(Local(), {"a": 2}, "ring", 0, ()), "torch", parameters=1000, gradient_bytes=4000)
    Run(coordinator, milliseconds=[SLOW[NONE], SLOW[LOWRANK]]).steps(40)
    came_to = coordinator.finish()
    first = read(path)[0]
    assert (first["compression"], first["ladder"]) == ("lowrank:4", ["none", "lowrank:4"])
    assert first["payload_bytes"] == {"none": 4000, "lowrank:4": 300}
    assert (came_to["level"], came_to["step_ms"]) == ("lowrank:4", pytest.approx(15.0))


# -- what ranks report besides times ----------------------------------------------------------------------------------


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


TIMED = {"step": 0.02, "exposed_comm": 0.0001}


@pytest.mark.parametrize("names", [("none",), ("fp16",), ("int8",), ("none", "lowrank:4"), LADDER])
def test_every_fifth_plan_is_to_measure_gradients(names: tuple[str, ...]) -> None:
    """Every twentieth at levels that hold nothing back; but one rank alone has nothing to tell, and where nothing is
    ever held back or decided, nobody wants to know."""
    for ranks in (1, 2):
        coordinator = make(*names, ranks=ranks, auto=names == LADDER)
        asked = []
        for _ in range(41):
            asked.append(coordinator.plan.measurement)
            step(coordinator)
        wanted = ranks > 1 and names not in (("none",), ("fp16",))
        every = NORM_STEPS if coordinator.plan.flush_fraction else REST_STEPS
        assert every == (REST_STEPS if names in (("none",), ("fp16",), LADDER) else NORM_STEPS)
        assert asked == [wanted * (1 + number // NORM_STEPS) if number % every == 0 else 0 for number in range(41)]


def test_levels_are_tried_in_two_steps_in_a_row_and_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every five steps at first, later in every twenty; a pair has no second step without a first one, and none once
    errors are known, levels are forbidden or a checkpoint was loaded."""
    asked: list[int] = []
    coordinator = make(auto=True)
    monkeypatch.setattr(Controller, "unforeseen", lambda _: asked.append(coordinator.steps) or (3, 4))
    unknown = np.full(len(LADDER), math.nan)

    def tried(count: int) -> list[int]:
        at = []
        for _ in range(count):
            assert coordinator.unforeseen() in ((), (3, 4))
            at += [coordinator.steps] * bool(coordinator.unforeseen())
            if at[-1:] == [coordinator.steps]:
                coordinator.foresee(unknown)
            step(coordinator)
        return at

    coordinator.auto._previews_left = 12
    assert tried(120) == [3, 4, 8, 9, 13, 14, 18, 19, 38, 39, 58, 59]
    assert asked == [3, 8, 13, 18, 38, 58]
    ends: tuple[Callable[[Coordinator], object], ...] = (
        lambda coordinator: coordinator.foresee(np.full(len(LADDER), 0.5)),
        lambda coordinator: coordinator.load(coordinator.state()),
        lambda coordinator: coordinator.leave_out_residuals(),
    )
    for end in ends:
        coordinator = make(auto=True)
        steps(coordinator, 3)
        assert coordinator.unforeseen() == (3, 4)
        step(coordinator)
        assert coordinator.unforeseen() == (3, 4)
        end(coordinator)
        assert coordinator.unforeseen() == (), end
    coordinator = make(auto=True)
    steps(coordinator, 4)
    assert coordinator.unforeseen() == (), "its first step asked nobody"


def test_measuring_norms_changes_nothing_else_about_a_plan() -> None:
    """Neither its step variant nor its name: a compiled graph and a response cache know the one without."""
    ladder = Ladder(("none", "topk:0.2:16", "lowrank:4"))
    for plan in (Plan(), Plan(2, 1, 1.0), Plan(1, 0, 1.0, True)):
        measuring = plan._replace(measurement=1)
        assert ladder.variant(measuring) == ladder.variant(plan)
        assert ladder.tensor_name("grad", 3, measuring) == ladder.tensor_name("grad", 3, plan)


def test_norms_belong_to_the_step_whose_times_come_with_the_next(seen: list[Observation]) -> None:
    """Root mean squares over the ranks; an error is the residuals' over the gradients'."""
    coordinator = make(auto=True)
    for number in range(2 * REST_STEPS):
        times = {**TIMED, "step": 0.02 + number / 1e3} if number else {}
        norms: tuple[dict[str, float], dict[str, float]] = {}, {}
        if coordinator.plan.measurement:
            norms = (
                {"gradient_norm": 3.0 + number, "residual_norm": 1.0},
                {"gradient_norm": 4.0, "residual_norm": 7.0},
            )
        step(coordinator, *(report(**times, **mine) for mine in norms))
    assert [round(each.times.step * 1e3) for each in seen] == list(range(21, 20 + 2 * REST_STEPS))
    for number, each in enumerate(seen):
        if number % REST_STEPS:
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
    coordinator = make(auto=True)
    step(coordinator, *[report(gradient_norm=gradient, residual_norm=residual)] * 2)
    step(coordinator, *[report(**TIMED)] * 2)
    assert (seen[0].gradient_norm, seen[0].error) == pytest.approx((norm, error), nan_ok=True)


def test_the_learning_rate_has_seven_digits(seen: list[Observation]) -> None:
    """As float32 carries it, without the digits that are none."""
    coordinator = make(auto=True)
    for rate in (0.1, 0.1, 0.0, 1e-5):
        step(coordinator, *[report(**TIMED, learning_rate=rate)] * 2)
    assert [each.learning_rate for each in seen] == [0.0, 0.1, 0.1, 0.0]
    assert float(np.float32(0.1)) != 0.1


def test_decisions_are_made_from_whole_microseconds(seen: list[Observation]) -> None:
    """So that the log holds exactly what they are made from."""
    coordinator = Coordinator(
        Ladder(LADDER),
        Settings(),
        auto=True,
        ranks=2,
        costs=[cost(4000, 1e-7), cost(2000, 0.00123456789), cost(300, 0.002)],
        log=RunLog(None),
    )
    assert [each.codec for each in coordinator.costs] == [0.0, 0.001235, 0.002]
    step(coordinator)
    step(coordinator, *[report(step=0.0123456789, codec=1e-7, exposed_comm=0.0011111, overlapped_comm=0.0000009)] * 2)
    assert seen[0].times == StepTimes(0.012346, 0.0, 0.001111, 0.0, 0.000001)


def test_windows_hold_the_median_error() -> None:
    coordinator = make("int8", window_steps=20)
    for number in range(41):
        told = dict(TIMED) if number else {}
        if coordinator.plan.measurement:
            told |= {"gradient_norm": 2.0, "residual_norm": [1.0, 9.0, 2.0, 3.0][number // 5 % 4]}
        step(coordinator, *[report(**told)] * 2)
    assert [window["error"] for window in windows(coordinator)] == [1.25, 1.25]
    coordinator = make("int8", window_steps=3)
    for number in range(5):
        step(coordinator, *[report(**TIMED) if number else Report()] * 2)
    assert windows(coordinator)[0]["error"] is None, "zero gradients have none"


# -- what a replay needs -----------------------------------------------------------------------------------------------


def test_the_trace_holds_every_step_that_the_controller_saw(tmp_path: Path, seen: list[Observation]) -> None:
    """Each once, in order, in whole microseconds, before the decision that it led to; and only in the file."""
    path = tmp_path / "run.jsonl"
    coordinator = make(auto=True, log=RunLog(path))
    run = Run(coordinator, milliseconds=GENTLE)
    run.steps(600)
    coordinator.finish()
    records = read(path)
    assert all(record["kind"] != "trace" for record in coordinator.log.records)
    traces = [record for record in records if record["kind"] == "trace"]
    assert max(len(trace["steps"]) for trace in traces) == TRACE_STEPS
    rows = [row for trace in traces for row in trace["steps"]]
    assert len(rows) == len(seen)
    for (level, *micros, error, norm, rate, probe_bytes, flushes), each in zip(rows, seen, strict=True):
        assert micros == [GENTLE[level][0] * 1e3, 1000, GENTLE[level][1] * 1e3, 500, GENTLE[level][2] * 1e3, 0]
        assert (probe_bytes, flushes) == (each.probe_bytes, each.flushes)
        assert all(isinstance(value, int) for value in micros)
        assert StepTimes(*(value / 1e6 for value in micros)) == each.times
        measured = (None if math.isnan(value) else value for value in (each.error, each.gradient_norm))
        assert (error, norm) == tuple(measured) and rate == each.learning_rate
    assert {row[7] for row in rows} == {None, 0.0, 0.25} and {row[8] for row in rows} == {None, 2.0}
    # A decision stands right after the step that it was made at.
    for before, record in zip(records, records[1:], strict=False):
        if record["kind"] == "decision":
            last = next(each for each in reversed(records[: records.index(record)]) if each["kind"] == "trace")
            assert last["last_step"] == record["step"] - 1 and before["kind"] in ("trace", "window")
            assert LADDER[last["steps"][-1][0]] == record["from"]


def test_a_fixed_level_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    coordinator = make("none", "fp16", log=RunLog(path))
    coordinator.describe_run(World(Local(), {"a": 2}, "ring", 0, ()), "torch", parameters=1000, gradient_bytes=4000)
    Run(coordinator, milliseconds=[SLOW[NONE], SLOW[FP16]]).steps(120)
    coordinator.finish()
    assert {record["kind"] for record in read(path)} == {"run", "window", "end"}
    assert read(path)[0]["limits"] is None


def test_a_trace_that_is_not_full_is_written_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    coordinator = make(auto=True, log=RunLog(path))
    run = Run(coordinator, milliseconds=FAST)
    run.steps(5)
    assert not any(record["kind"] == "trace" for record in read(path))
    coordinator.finish()
    assert [len(record["steps"]) for record in read(path) if record["kind"] == "trace"] == [4]


def test_buckets_that_are_cut_anew_send_something_else(tmp_path: Path) -> None:
    """The controller decides by what levels send from then on, and the log says what that is."""
    path = tmp_path / "run.jsonl"
    coordinator = make(auto=True, log=RunLog(path), window_steps=4)
    run = Run(coordinator, milliseconds=GENTLE)
    run.steps(5)
    new = [cost(5000), cost(2500, 0.0012344), cost(6000)]
    coordinator.resize(new)
    run.steps(192)
    assert coordinator.payload_bytes == (5000, 2500, 6000)
    assert {plan.level for plan in run.plans} == {NONE, FP16}, "the last level sends no less any more"
    assert [window["payload_bytes"] for window in windows(coordinator)][:2] == [4000, 5000]
    records = read(path)
    kinds = [record["kind"] for record in records]
    (record,) = (record for record in records if record["kind"] == "resize")
    sent = {"payload_bytes": 2500, "last_bytes": 62, "messages": 4, "codec_ms": 1.234, "keeps_residual": False}
    sent |= {"passes": 1, "delay_weight": 1.0}
    assert record["levels"]["fp16"] == sent
    assert kinds.index("trace") < kinds.index("resize"), "what was seen before stands before"
    assert len(records[kinds.index("trace")]["steps"]) == 4
    fixed = make("none", "fp16")
    fixed.resize(new[:2])
    assert fixed.payload_bytes == (5000, 2500)


def test_what_is_forbidden_is_in_the_log_where_it_happened(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    coordinator = make(auto=True, log=RunLog(path))
    run = Run(coordinator, milliseconds=SLOW)
    run.steps(40)
    assert run.plans[-1].level == LOWRANK
    coordinator.leave_out_residuals()
    coordinator.advance()
    run.steps(100)
    records = read(path)
    at = next(i for i, record in enumerate(records) if record["kind"] == "forbid")
    assert (records[at]["step"], records[at]["level"]) == (40, "lowrank:4")
    shown = [row[0] for record in records[:at] if record["kind"] == "trace" for row in record["steps"]]
    assert shown.count(LOWRANK) == 39 - 7, "all that was seen before"
    assert {plan.level for plan in run.plans[42:]} == {NONE, FP16}
    # Once is enough, where nothing is left that keeps a residual, too.
    other = make("none", "fp16", auto=True)
    other.leave_out_residuals()
    assert other.log.records == []


def test_another_number_of_local_steps_is_in_the_log_where_it_happened(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    coordinator = make(auto=True, log=RunLog(path))
    run = Run(coordinator, milliseconds=SLOW)
    run.steps(30)
    coordinator.listener = lambda times, rate: (8, 0.5)
    run.steps(1)
    coordinator.listener = lambda times, rate: None
    run.steps(100)
    records = read(path)
    (at,) = (place for place, record in enumerate(records) if record["kind"] == "stretch")
    assert {key: records[at][key] for key in ("step", "every", "factor")} == {"step": 30, "every": 8, "factor": 0.5}
    assert records[at - 1]["kind"] == "trace", "what was seen before stands before"


def test_what_a_loss_scaler_has_forbidden_is_asked_anew_after_a_checkpoint() -> None:
    """The script may train without one by now, or have given it to hvdplus."""
    before = make(auto=True)
    Run(before, milliseconds=SLOW).steps(40)
    before.leave_out_residuals()
    after = make(auto=True)
    assert after.load(before.state())
    run = Run(after, milliseconds=SLOW)
    run.steps(200)
    assert LOWRANK in {plan.level for plan in run.plans}
    assert after.load(before.state()) and after.leave_out_residuals() is False
    run.steps(40)
    assert {plan.level for plan in run.plans[-38:]} <= {NONE, FP16}


def test_a_level_over_the_error_budget_does_not_come_back() -> None:
    """The settings' budget, in the ranks' own figures."""
    for budget, levels in ((0.2, {NONE, FP16}), (0.3, {NONE, LOWRANK})):
        coordinator = make(auto=True, error_budget=budget)
        run = Run(coordinator, milliseconds=SLOW)
        run.steps(300)
        assert {plan.level for plan in run.plans[100:]} | {NONE} == levels
