"""``hvdplus replay``: whether a log's figures lead to its decisions, and what other limits would have led to."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdplus.cli import main
from hvdplus.control.config import Config
from hvdplus.control.controller import Controller, Observation
from hvdplus.control.link import LevelCost
from hvdplus.control.meter import StepTimes
from hvdplus.log.runlog import RunLog, read

COSTS = {"none": LevelCost(4_000_000, 1_000_000, 4, 0.0, False), "fp16": LevelCost(2_000_000, 500_000, 4, 3e-4, False)}
NAMES = tuple(COSTS)


def write(path: Path, steps: int = 120, limits: Config | None = None, slower_from: int = 70) -> Path:
    """The log of a job on a link of 0.2 ms an all-reduce and 5 ms a megabyte, which takes twice as long later on."""
    limits, shaken = limits or Config(), random.Random(7)
    log, controller, trace = RunLog(path), Controller(NAMES, tuple(COSTS.values()), limits), list[list[Any]]()
    levels = {
        name: {**dict(zip(LevelCost._fields, cost, strict=True)), "codec_ms": cost.codec * 1e3}
        for name, cost in COSTS.items()
    }
    log.write("run", compression="auto", ladder=NAMES, levels=levels, limits=dataclasses.asdict(limits))

    def write_trace() -> None:
        if trace:
            log.write("trace", steps=trace)
            trace.clear()

    for step in range(steps):
        level, cost = controller.level, COSTS[NAMES[controller.level]]
        exposed = round(
            (800 + cost.payload_bytes * 5e-3) * (2 if step >= slower_from else 1) * shaken.uniform(0.98, 1.02)
        )
        codec = round(cost.codec * 1e6)
        sounding = controller.probe_bytes()
        sounded = round(800 + sounding * 5e-3) if sounding else 0
        micros = (12_000 + exposed + codec + sounded, codec, exposed, 0, 500, sounded)
        norms = (0.25, 1.5) if step % 5 == 0 else (None, None)
        trace.append([level, *micros, *norms, 0.1, sounding, 0])
        seen = [math.nan if value is None else value for value in norms]
        times = StepTimes(*(value / 1e6 for value in micros))
        decision = controller.observe(level, Observation(times, *seen, 0.1, sounding))
        if decision:
            write_trace()
            fields = {"step": step + 1, "from": NAMES[level], "to": NAMES[decision.level]}
            log.write("decision", **fields, reason=decision.reason, evidence=decision.evidence)
    write_trace()
    log.write("end", steps=steps, wall_seconds=1.0)
    log.close()
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write(tmp_path / "run.jsonl")


def edit(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> str:
    """Change the records of a log; its name."""
    records = read(path)
    change(records)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def decisions(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == "decision"]


def replayed(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Exit code, and what is printed as one line."""
    code = main(["replay", *argv])
    out, err = capsys.readouterr()
    assert err == "" and max(map(len, out.splitlines())) <= 120
    return code, " ".join(out.split())


def test_the_same_figures_lead_to_the_same_decisions(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = decisions(read(log))
    assert len(made) > 1 and made[0]["to"] == "fp16"  # or there is nothing to compare
    code, text = replayed(capsys, str(log))
    assert code == 0 and text.endswith(f"All {len(made)} decisions are the run's, figure for figure.")
    for number, decision in enumerate(made, start=1):
        assert f"{number}. step {decision['step']}, " in text and decision["reason"] in text
    assert "Measured: none " in text and " MB/s." in text


@pytest.mark.parametrize(
    ("field", "value"), [("to", "none"), ("from", "none"), ("reason", "why not"), ("evidence", {"none.step_ms": 1.0})]
)
def test_a_decision_that_the_figures_do_not_lead_to_is_code_1(
    field: str, value: object, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = replayed(capsys, edit(log, lambda records: decisions(records)[1].update({field: value})))
    assert code == 1 and "1 of the run's " in text and "decisions come out the same, figure for figure." in text
    assert "The run's next decision was: 2. step " in text
    if isinstance(value, str):
        assert value in text.partition("next decision was")[2]


def test_decisions_missing_from_the_log_or_from_the_replay_are_code_1(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def forget(kind: str, count: int) -> Callable[[list[dict[str, Any]]], None]:
        def change(records: list[dict[str, Any]]) -> None:
            for record in [record for record in records if record["kind"] == kind][-count:]:
                records.remove(record)

        return change

    code, text = replayed(capsys, edit(log, forget("decision", 1)))
    left = len(decisions(read(log)))
    assert code == 1 and f"{left} of the run's {left} decisions come out the same" in text
    assert "rest on steps" in text and "next decision" not in text
    code, text = replayed(capsys, edit(write(log), forget("trace", 2)))
    assert code == 1 and "rest on steps" not in text and "The run's next decision was:" in text


def test_other_limits_lead_to_other_decisions_and_that_is_no_failure(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = replayed(capsys, str(log), "--limit", "margin=0.9")
    assert code == 0 and "1. stays at none: the start is over; none is best" in text
    assert "0 of the run's " in text and "rest on steps that the run took at other levels" in text
    code, text = replayed(capsys, str(log), "--limit", "dense_steps=14")
    assert code == 0 and "0 of the run's " in text
    code, text = replayed(capsys, str(log), "--limit", "error_budget=4.5")
    assert code == 0 and " decisions are the run's" in text


def test_the_jobs_own_limits_hold_unless_others_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = str(write(tmp_path / "run.jsonl", limits=Config(dense_steps=30)))
    assert " decisions are the run's" in replayed(capsys, log)[1]
    assert "0 of the run's " in replayed(capsys, log, "--limit", "dense_steps=5")[1]


def test_a_run_without_decisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replayed(capsys, str(write(tmp_path / "run.jsonl", steps=5))) == (
        0, "All 0 decisions are the run's, figure for figure."
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda records: records.clear(), "the log is empty"),
        (lambda records: records.__delitem__(slice(1, None)), "holds no step to decide from"),
        (lambda records: records[0].pop("limits"), "only the log of a run at compression auto"),
        (lambda records: [record for record in records if record["kind"] == "trace"][0].pop("steps"), "'steps'"),
        (lambda records: [record for record in records if record["kind"] == "trace"][0]["steps"].append([1]), "unpack"),
        (lambda records: records[0]["levels"]["fp16"].pop("messages"), "'messages'"),
        (lambda records: records[0]["limits"].update(new=1), "new"),
    ],
)
def test_logs_that_cannot_be_replayed_are_code_2(
    change: Callable[[list[dict[str, Any]]], object], message: str, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", edit(log, change)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("hvdplus replay: ") and message in err and err.count("\n") == 1


def test_a_log_that_is_not_there_is_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "run.jsonl")]) == 2
    assert capsys.readouterr().err.startswith(f"hvdplus replay: cannot read {tmp_path / 'run.jsonl'}: No such file")


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("marg=0.1", "--limit takes one of dense_steps, block_steps"),
        ("margin", "--limit margin takes a number of 0 or more, as in margin=0.02. Received: margin"),
        ("margin=-1", "--limit margin takes a number of 0 or more"),
        ("margin=nan", "--limit margin takes a number of 0 or more"),
        ("margin=inf", "--limit margin takes a number of 0 or more"),
        (
            "pairs=1.5",
            "--limit pairs takes a whole number of 0 or more, as in pairs=3. Received: pairs=1.5",
        ),
    ],
)
def test_limits_that_are_none_are_code_2(
    limit: str, message: str, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(log), "--limit", limit]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"hvdplus replay: {message}")
