"""What every rank does between two steps: plans, contexts that must agree, windows and decisions in the run log."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hvdplus import __version__
from hvdplus.adapters.local import Local
from hvdplus.exchange import Ladder, Plan, SideSlot, side_tensor
from hvdplus.pilot import Pilot
from hvdplus.runlog import RunLog, read
from hvdplus.settings import Settings
from hvdplus.transport import World

LADDER = ("none", "fp16", "lowrank:4")
NONE, FP16, LOWRANK = range(3)
PAYLOAD_BYTES = (4000, 2000, 300)


def make(*names: str, auto: bool = False, ranks: int = 2, log: RunLog | None = None, **settings: int) -> Pilot:
    """A pilot over ``names`` (default: the whole ladder)."""
    ladder = Ladder(names or LADDER)
    return Pilot(
        ladder,
        Settings(**settings),  # type: ignore[arg-type]
        auto=auto,
        ranks=ranks,
        payload_bytes=[PAYLOAD_BYTES[LADDER.index(name)] for name in ladder.names],
        log=log or RunLog(None),
    )


def total(*slots: SideSlot, parameters: int = 3) -> np.ndarray:
    """The summed side tensor of a step in which each rank said its slot."""
    ranks = len(slots)
    return sum(side_tensor(rank, ranks, slot, np.ones(parameters)) for rank, slot in enumerate(slots))


def step(pilot: Pilot, *slots: SideSlot) -> Plan:
    """One step: it runs the present plan, its side tensor is read, the next plan is made. Returns the plan that ran."""
    plan = pilot.plan
    pilot.observe(plan, total(*(slots or (SideSlot(),) * pilot.ranks)))
    pilot.advance()
    return plan


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
    pilot = make("none", "lowrank:4")
    seen = []
    for level, steps in ((1, 3), (0, 4), (1, 2)):
        pilot.set_level(level)
        pilot.advance()
        seen += [step(pilot).phase for _ in range(steps)]
    assert seen == [0, 1, 0] + [0] * 4 + [1, 0]


def test_a_new_level_begins_with_the_next_plan() -> None:
    """The plan that is under way goes on meaning what it meant."""
    pilot = make()
    pilot.set_level(FP16)
    assert step(pilot) == Plan(NONE)
    assert step(pilot) == Plan(FP16)


def test_a_drain_is_counted_in_finite_steps_only() -> None:
    pilot = make(drain_steps=3)
    pilot.set_level(LOWRANK)
    pilot.advance()
    step(pilot)
    pilot.set_level(NONE)
    pilot.advance()
    releases = [step(pilot, *slots).release for slots in ((), BAD, (), BAD, BAD, (), (), ())]
    assert releases == [1 / 3, 1 / 2, 1 / 2, 1.0, 1.0, 1.0, 0.0, 0.0]


def test_a_drain_goes_on_under_another_lossless_level() -> None:
    pilot = make(drain_steps=4)
    pilot.set_level(LOWRANK)
    pilot.advance()
    step(pilot)
    plans = []
    for level in (NONE, FP16, NONE):
        pilot.set_level(level)
        pilot.advance()
        plans += [step(pilot), step(pilot)]
    assert [plan.release for plan in plans] == [1 / 4, 1 / 3, 1 / 2, 1.0, 0.0, 0.0]
    assert [plan.level for plan in plans] == [NONE, NONE, FP16, FP16, NONE, NONE]


def test_asking_for_the_present_level_does_not_start_a_drain_again() -> None:
    pilot = make(drain_steps=4)
    pilot.set_level(LOWRANK)
    pilot.advance()
    step(pilot)
    releases = []
    for _ in range(6):
        pilot.set_level(NONE)
        pilot.advance()
        releases.append(step(pilot).release)
    assert releases == [1 / 4, 1 / 3, 1 / 2, 1.0, 0.0, 0.0]


def test_without_a_lossy_level_before_there_is_nothing_to_drain() -> None:
    pilot = make()
    for level in (FP16, NONE, FP16):
        pilot.set_level(level)
        pilot.advance()
        assert step(pilot).release == 0.0


def test_changing_its_mind_before_a_step_leaves_no_trace() -> None:
    """No share of a residual is ever more than all of it, or negative."""
    pilot = make(drain_steps=2)
    rng = np.random.default_rng(0)
    for _ in range(500):
        for level in rng.integers(0, 3, rng.integers(0, 3)):
            pilot.set_level(int(level))
        plan = step(pilot, *(BAD if rng.random() < 0.2 else ()))
        assert 0.0 <= plan.release <= 1.0
        assert plan.release == 1.0 or not pilot.ladder.compressors[plan.level].keeps_residual


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

    def __init__(self, *pilots: Pilot, milliseconds: Sequence[tuple[float, float]], slow_rank_ms: float = 0.0) -> None:
        """``milliseconds``: (step, exposed communication), one entry a level."""
        self.pilots = pilots
        self.milliseconds = milliseconds
        self.slow_rank_ms = slow_rank_ms
        self.plans: list[Plan] = []
        """Plan of every step, from step 1 on."""

    def steps(self, count: int, loss: float | None = None) -> None:
        for _ in range(count):
            plan = self.pilots[0].plan
            slots = []
            for rank in range(self.pilots[0].ranks):
                slot = SideSlot()
                if self.plans:
                    step_ms, exposed_ms = self.milliseconds[self.plans[-1].level]
                    waits = exposed_ms + (self.slow_rank_ms if rank else 0.0)
                    slot = SideSlot(step=step_ms / 1e3, codec=0.001, exposed_comm=waits / 1e3, input_wait=0.0005)
                if loss is not None:
                    slot = slot._replace(loss=loss + rank, has_loss=1.0)
                slots.append(slot)
            said = total(*slots)
            for pilot in self.pilots:
                pilot.observe(plan, said)
            after = {pilot.advance() for pilot in self.pilots}
            assert len(after) == 1, "every rank makes the same plan"
            self.plans.append(plan)


def windows(pilot: Pilot) -> list[dict]:
    return [record for record in pilot.log.records if record["kind"] == "window"]


def decisions(pilot: Pilot) -> list[dict]:
    return [record for record in pilot.log.records if record["kind"] == "decision"]


SLOW = ((50.0, 40.0), (30.0, 20.0), (15.0, 4.0))
MIDDLE = ((50.0, 40.0), (12.0, 0.1), (12.0, 0.1))
FAST = ((10.0, 0.1), (10.0, 0.1), (10.0, 0.1))


def test_auto_starts_dense_walks_up_and_holds() -> None:
    """Four ranks with their own pilots, told the same, agree at every step."""
    pilots = [make(auto=True, ranks=4, dense_steps=15) for _ in range(4)]
    run = Run(*pilots, milliseconds=SLOW)
    run.steps(300)
    levels = [plan.level for plan in run.plans]
    assert levels[:15] == [NONE] * 15
    assert sorted(levels) == levels and set(levels[100:]) == {LOWRANK}
    assert [record["to"] for record in decisions(pilots[0])] == ["fp16", "lowrank:4", "lowrank:4"]
    assert all(pilot.log.records == pilots[0].log.records for pilot in pilots)


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
    run = Run(pilot, milliseconds=SLOW)
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
def test_windows_carry_the_level_that_ran_and_cover_every_step_once(links: Sequence[tuple[float, float]]) -> None:
    pilot = make(auto=True, window_steps=7)
    run = Run(pilot, milliseconds=links)
    run.steps(250, loss=2.0)
    pilot.finish()
    expected = 1
    for window in windows(pilot):
        assert window["first_step"] == expected
        assert window["steps"] == window["last_step"] - window["first_step"] + 1 <= 7
        expected = window["last_step"] + 1
        ran = {run.plans[number - 1].level for number in range(window["first_step"], window["last_step"] + 1)}
        assert {pilot.ladder.names.index(window["level"])} == ran
        step_ms, exposed_ms = links[ran.pop()]
        assert window["step_ms"] == pytest.approx(step_ms)
        assert window["exposed_comm_ms"] == pytest.approx(exposed_ms)
        assert (window["codec_ms"], window["input_wait_ms"]) == pytest.approx((1.0, 0.5))
        assert window["compute_ms"] == pytest.approx(step_ms - exposed_ms - 1.5)
        assert window["payload_bytes"] == PAYLOAD_BYTES[pilot.ladder.names.index(window["level"])]
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
    assert [(record["from"], record["to"]) for record in written] == [("none", "fp16"), ("fp16", "fp16")]
    assert written[0]["step"] == 16, "15 dense steps, whose last times came with the 16th"
    assert "50.00 ms" in written[0]["reason"]
    assert written[0]["evidence"] == {"none.step_ms": 50.0, "none.exposed_comm_ms": 40.0, "none.codec_ms": 1.0}
    assert written[1]["evidence"]["fp16.step_ms"] == pytest.approx(12.0)


def test_the_log_opens_with_what_the_job_is_and_closes_with_what_it_came_to(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    pilot = make(auto=True, log=RunLog(path))
    pilot.describe_run(World(Local(), {"a": 1, "b": 1}, "ring", 0, ()), "torch", parameters=1000)
    run = Run(pilot, milliseconds=MIDDLE)
    run.steps(120)
    assert pilot.status.startswith("level fp16  step 12.00 ms, of which 0.10 ms")
    came_to = pilot.finish(accuracy=0.97)
    first, *_, last = [json.loads(line) for line in path.read_text().splitlines()]
    assert (first["kind"], first["framework"], first["hvdplus"]) == ("run", "torch", __version__)
    assert (first["ranks"], first["hosts"]) == (2, {"a": 1, "b": 1})
    assert (first["transport"], first["collective"]) == ("local", "ring")
    assert (first["compression"], first["ladder"]) == ("auto", list(LADDER))
    assert first["payload_bytes"] == dict(zip(LADDER, PAYLOAD_BYTES, strict=True))
    assert (first["parameters"], first["gradient_bytes"]) == (1000, 4000)
    assert (last["kind"], last["steps"], last["accuracy"]) == ("end", 120, 0.97)
    assert last["wall_seconds"] >= 0
    assert (came_to["level"], came_to["steps"]) == ("fp16", 120)
    assert came_to["step_ms"] == pytest.approx(12.0), "of the last level, not of the dense start"
    assert came_to["exposed_comm_ms"] == pytest.approx(0.1)


def test_a_run_that_was_too_short_to_measure_ends_in_peace() -> None:
    pilot = make("none")
    assert pilot.status == "measuring"
    step(pilot)
    came_to = pilot.finish()
    assert came_to["steps"] == 1 and math.isnan(came_to["step_ms"])
    assert windows(pilot) == []


def test_steps_that_pay_out_a_residual_are_not_taken_for_dense_ones() -> None:
    """They are dearer than dense steps; measured as such, they would make a level look better than it is."""
    levels = Ladder(("none", "lowrank:4"))
    log = RunLog(None)
    settings = Settings(dense_steps=5, drain_steps=6, window_steps=3)
    pilot = Pilot(levels, settings, auto=False, ranks=1, payload_bytes=(8, 4), log=log)
    pilot.set_level(1)
    for step in range(24):
        if step == 6:
            pilot.set_level(0)
        plan = pilot.advance()
        slot = SideSlot(step=0.001 * (step + 1))
        pilot.observe(plan, side_tensor(0, 1, slot, np.zeros(0)))
    pilot.finish()
    windows = [record for record in log.records if record["kind"] == "window"]
    drained = [window for window in windows if window["level"] == "draining"]
    assert sum(window["steps"] for window in drained) == 6
    assert {window["level"] for window in windows} == {"none", "lowrank:4", "draining"}
