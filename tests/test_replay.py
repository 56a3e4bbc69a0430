"""A run log's figures decide once more what the job decided: a real coordinator, a real file, a simulated job."""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coordinating import heard, report
from frameworks import examples as up_to
from hypothesis import given
from hypothesis import strategies as st
from simulating import LOSSY, NAMES, NOISES, Job, jobs, ms

from hvdplus.adapters.transports.local import Local
from hvdplus.control.meter import StepTimes
from hvdplus.control.probing import sums
from hvdplus.exchange.coordinator import Coordinator
from hvdplus.exchange.plan import Ladder, Plan
from hvdplus.log.facts import Record
from hvdplus.log.replay import replay
from hvdplus.log.runlog import RunLog, read
from hvdplus.settings import Settings
from hvdplus.transport import World

RANKS = 2
SLOW = Job(rate=20e6, alpha=0.0, noise=NOISES["jitter"])
"""Everything pays on it, and lowrank:8 most."""
examples = up_to(30)


class Run:
    """Drives a coordinator with metadata: what ranks report of a step's times comes with the next."""

    def __init__(self, job: Job, path: Path, seed: int = 0, compression: str = "auto", **options: Any) -> None:
        """``options``: settings."""
        self.job, self.path, self.dice = job, path, random.Random(seed)
        self.names = NAMES if compression == "auto" else ("none", compression)
        self.coordinator = Coordinator(
            Ladder(self.names),
            Settings(**options),
            auto=compression == "auto",
            ranks=RANKS,
            costs=job.costs[: len(self.names)],
            log=RunLog(path),
        )
        if compression == "auto":
            self.coordinator.begin(sums(job.probe, job.costs[0].payload_bytes))
        self.coordinator.describe_run(
            World(Local(), {"a": RANKS}, "ring", 0, ()), "torch", parameters=1000, gradient_bytes=4000
        )
        self._ran: Plan | None = None
        self._scales_losses = False

    def go(self, steps: int, rate: float = 0.1, norm: float = 1.0) -> Run:
        """``rate``, ``norm``: learning rate, and norm of the gradients, which is noisy."""
        for _ in range(steps):
            plan = self.coordinator.plan
            times = [StepTimes()] * RANKS
            if self._ran:
                times = self.job.step(self._ran.level, self.dice)
                took = self.job.probe(self._ran.probe_bytes) if self._ran.probe_bytes else 0.0
                times = [each._replace(step=each.step + took, probe=took) for each in times]
            norms = {}
            if plan.measurement:
                gradient = norm * self.dice.uniform(0.7, 1.4)
                lost = (plan.level >= LOSSY) * gradient * self.dice.uniform(0, 1.2)
                norms = {"gradient_norm": gradient, "residual_norm": lost}
            self.coordinator.observe(plan, heard(*(report(each, learning_rate=rate, **norms) for each in times)))
            self.coordinator.advance()
            self._ran = plan
            if tried := self.coordinator.unforeseen():
                shown = [RANKS * self.dice.random() if level in tried else math.nan for level in range(len(self.names))]
                self.coordinator.foresee(np.array(shown, np.float32))
        return self

    def cut_anew(self, shares: Sequence[float]) -> Run:
        """Sparse gradients have turned out to be dense: buckets are others."""
        sent = tuple(size * share for size, share in zip(self.job.payload_bytes, shares, strict=True))
        self.job = replace(self.job, payload_bytes=sent)
        self.coordinator.resize(self.job.costs)
        self.coordinator.advance()
        return self

    def scale_losses(self) -> Run:
        """From now on. After a checkpoint was loaded, a loss scaler asks again."""
        self._scales_losses = True
        if self.coordinator.leave_out_residuals():
            self.coordinator.advance()
        return self

    def change_local_steps(self, factor: float) -> Run:
        """So many times as many come before an exchange."""
        self.job = replace(self.job, compute=factor * self.job.compute)
        hear, self.coordinator.listener = self.coordinator.listener, lambda times, rate: (8, factor)
        self.go(1)
        self.coordinator.listener = hear
        return self

    def go_back(self, steps: int) -> Run:
        """As from a checkpoint that is so many steps old."""
        checkpoint = json.loads(json.dumps(self.coordinator.state()))
        self.go(steps)
        assert self.coordinator.load(checkpoint)
        if self._scales_losses:
            self.scale_losses()
        assert json.loads(json.dumps(self.coordinator.state())) == checkpoint
        self._ran = None
        return self

    def end(self) -> list[Record]:
        """The log, read from its file."""
        self.coordinator.finish()
        self.coordinator.log.close()
        return read(self.path)


Decided = list[tuple[str, str, str, dict[str, float]]]
"""(from, to, reason, evidence) of every decision."""


def logged(records: Sequence[Record]) -> Decided:
    keys = ("from", "to", "reason", "evidence")
    return [tuple(record[key] for key in keys) for record in records if record["kind"] == "decision"]  # type: ignore


def replayed(records: Sequence[Record], **limits: float) -> Decided:
    names, decisions = replay(records, **limits)
    assert names == NAMES
    return [(names[before], names[level], reason, evidence) for before, (level, reason, evidence) in decisions]


changes = st.lists(
    st.one_of(
        st.floats(6, 11).map(lambda exponent: ("rate", 10**exponent)),
        st.lists(st.floats(0.2, 5), min_size=5, max_size=5).map(lambda shares: ("cut anew", shares)),
        st.just(("scale losses", None)),
        st.floats(0.2, 5).map(lambda factor: ("local steps", factor)),
        st.integers(1, 70).map(lambda steps: ("go back", steps)),
        st.sampled_from([0.1, 0.03, 0.3]).map(lambda rate: ("learning rate", rate)),
        st.sampled_from([0.2, 1.0, 5.0]).map(lambda norm: ("norm", norm)),
        st.just(("nothing", None)),
    ),
    max_size=4,
)


def test_what_a_sounding_led_to_comes_out_as_in_the_run(tmp_path: Path) -> None:
    codec = (0.0, *[15 * ms] * 4)
    run = Run(replace(SLOW, codec=codec, payload_bytes=(8e6, 4e6, 2e6, 4e4, 2e4)), tmp_path / "run.jsonl").go(120)
    run.job = replace(run.job, rate=1e10)
    records = run.go(100).end()
    assert replayed(records) == logged(records)
    assert any(row[6] for record in records if record["kind"] == "trace" for row in record["steps"]), "it was probed"
    assert logged(records)[-1][1] == "none"


@given(jobs, changes, st.sampled_from(sorted(NOISES)), st.integers(0, 1000), st.sampled_from([0, 1, 4, 15]))
@examples
def test_decisions_come_out_as_in_the_run(
    job: Job, changes: list[tuple[str, Any]], kind: str, seed: int, dense_steps: int
) -> None:
    """To the last digit of the evidence, whatever happens: other links and buckets, loss scaling, critical phases, and
    checkpoints that the job goes back to."""
    with tempfile.TemporaryDirectory() as folder:
        job = replace(job, noise=NOISES[kind])
        run = Run(job, Path(folder) / "run.jsonl", seed, dense_steps=dense_steps).go(120)
        rate, norm = 0.1, 1.0
        for what, value in changes:
            if what == "rate":
                run.job = replace(run.job, rate=value)
            elif what == "cut anew":
                run.cut_anew(value)
            elif what == "scale losses":
                run.scale_losses()
            elif what == "local steps":
                run.change_local_steps(value)
            elif what == "go back":
                run.go_back(value)
            rate = value if what == "learning rate" else rate
            norm = value if what == "norm" else norm
            run.go(90, rate, norm)
        records = run.end()
    assert logged(records) and replayed(records) == logged(records)


def test_a_run_with_everything_in_it_is_replayed(tmp_path: Path) -> None:
    """Which kinds of records and decisions a replay was seen to get right."""
    run = Run(SLOW, tmp_path / "run.jsonl", dense_steps=8, error_budget=0.7).go(1000)
    run.go(100, rate=0.01)
    run.cut_anew((1.5, 1.5, 1.5, 1.5, 1.4)).go(60, rate=0.01)
    run.job = replace(run.job, rate=2e6)
    run.go(60, rate=0.01).change_local_steps(2.0).go(60, rate=0.01).scale_losses().go(80, rate=0.01)
    records = run.end()
    kinds = {"run", "trace", "preview", "decision", "resize", "forbid", "stretch", "window", "end"}
    assert kinds == {record["kind"] for record in records}
    reasons = [reason for _, _, reason, _ in logged(records)]
    for words in ("the start is over", "is expected to cost", "costs", "is best", "(budget 0.7); back to", "; on to"):
        assert any(words in reason for reason in reasons), words
    assert replayed(records) == logged(records)
    assert any(record["kind"] == "trace" and None in record["steps"][0] for record in records), (
        "steps that measure no norms"
    )


def test_a_job_that_was_killed_is_replayed_as_far_as_its_log_goes(tmp_path: Path) -> None:
    """What is not written yet may hold a decision no more than what is."""
    run = Run(SLOW, tmp_path / "run.jsonl", dense_steps=4).go(333)
    content = run.path.read_bytes()
    whole = read(run.path)
    assert replayed(whole) == logged(whole) and len(logged(whole)) >= 2
    for length in range(content.index(b'"trace"') + 3000, len(content), 701):
        run.path.write_bytes(content[:length])
        records = read(run.path)
        decided = replayed(records)
        assert decided[: len(logged(records))] == logged(records)
        assert len(decided) - len(logged(records)) <= 1, "cut off between a step and what was decided then"


def test_other_limits_give_other_decisions(tmp_path: Path) -> None:
    records = Run(SLOW, tmp_path / "run.jsonl").go(300).end()
    ran = logged(records)
    assert [to for _, to, _, _ in ran][-1] in ("lowrank:16+fp16", "lowrank:8+fp16")
    strict = replayed(records, error_budget=0.01)
    assert any("budget 0.01" in reason for _, _, reason, _ in strict)
    assert replayed(records, dense_steps=4) == [], "the run began compressed"
    assert replayed(records, margin=0.02, pairs=3) == ran, "those that the run had"


def test_steps_of_levels_that_other_limits_would_not_have_run_tell_nothing(tmp_path: Path) -> None:
    """The log holds no others: a replay stands still where it would have needed them."""
    records = Run(SLOW, tmp_path / "run.jsonl").go(300).end()
    decided = replayed(records, dense_steps=200)
    assert decided == []


def test_limits_that_there_are_none_of_are_refused(tmp_path: Path) -> None:
    records = Run(SLOW, tmp_path / "run.jsonl").go(60).end()
    with pytest.raises(TypeError, match="haste"):
        replay(records, haste=3)


def without(kind: str) -> Callable[[list[Record]], list[Record]]:
    return lambda records: [record for record in records if record["kind"] != kind]


def of_a_run(**fields: Any) -> Callable[[list[Record]], list[Record]]:
    return lambda records: [{**records[0], **fields}, *records[1:]]


def resumed(**fields: Any) -> Callable[[list[Record]], list[Record]]:
    """After the first steps a checkpoint was loaded, of a controller that knew ``fields``."""
    return lambda records: [
        *records[:3],
        {"kind": "resume", "step": 50, "level": "none", "controller": fields},
        *records[3:],
    ]


OTHER_RUN = "only the log of a run at compression auto, by this version"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda records: [], "the log is empty; the job wrote nothing"),
        (without("run"), OTHER_RUN),
        (without("trace"), "the log holds no step to decide from"),
        (of_a_run(limits=None), OTHER_RUN),
        (of_a_run(limits={}), OTHER_RUN),
        (resumed(level=0, probe_bent=1.0), "a checkpoint of another version of hvdplus, or is damaged: .* is missing"),
    ],
    ids=["empty", "no run", "no trace", "fixed level", "no limits", "another version"],
)
def test_a_log_that_lacks_something_says_what_can_be_replayed(
    spoil: Callable[[list[Record]], list[Record]], message: str, tmp_path: Path
) -> None:
    records = Run(SLOW, tmp_path / "run.jsonl").go(60).end()
    assert replayed(records)
    with pytest.raises(ValueError, match=message):
        replay(spoil(records))


def test_a_fixed_level_left_nothing_to_replay(tmp_path: Path) -> None:
    records = Run(SLOW, tmp_path / "run.jsonl", compression="fp16").go(60).end()
    with pytest.raises(ValueError, match="compression auto"):
        replay(records)


def test_what_a_job_keeps_in_memory_cannot_be_replayed(tmp_path: Path) -> None:
    """A job of days would keep every step."""
    run = Run(SLOW, tmp_path / "run.jsonl").go(60)
    run.end()
    with pytest.raises(ValueError):
        replay(run.coordinator.log.records)


def test_records_that_a_replay_does_not_know_are_passed_over(tmp_path: Path) -> None:
    run = Run(SLOW, tmp_path / "run.jsonl").go(60)
    run.coordinator.log.write("weather", sky="blue")
    records = run.go(100).end()
    assert any(record["kind"] == "weather" for record in records)
    assert replayed(records) == logged(records)


def test_a_log_that_went_through_another_json_library_is_replayed(tmp_path: Path) -> None:
    """Figures are written with all their digits."""
    records = Run(SLOW, tmp_path / "run.jsonl").go(200).end()
    assert replayed(json.loads(json.dumps(records, indent=1))) == logged(records)
