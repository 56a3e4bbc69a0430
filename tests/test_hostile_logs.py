"""Logs that were damaged, or written to do harm: every command ends with a message, and no byte of them reaches the
terminal as it is.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hvdplus.cli import main
from hvdplus.control.config import Config

COSTS = {
    "payload_bytes": 4_000_000, "last_bytes": 400_000, "messages": 4, "codec_ms": 0.1, "keeps_residual": False,
}  # fmt: skip
LEVELS = {"none": COSTS, "fp16": {**COSTS, "payload_bytes": 2_000_000, "last_bytes": 200_000}}
RUN = {
    "kind": "run", "format": 1, "hvdplus": "0.1.0", "started_at": "2026-01-01T00:00:00+00:00", "framework": "torch",
    "ranks": 2, "hosts": {"a": 1, "b": 1}, "transport": "horovod-mpi", "collective": "ring", "compression": "auto",
    "ladder": ["none", "fp16"], "parameters": 1_000_000, "gradient_bytes": 4_000_000,
    "payload_bytes": {"none": 4_000_000, "fp16": 2_000_000}, "levels": LEVELS, "limits": asdict(Config()),
    "probes": [[4096, 300], [200000, 900]],
}  # fmt: skip
EVIDENCE = {"none.step_ms": 30.0, "none.exposed_comm_ms": 18.0, "fp16.predicted_step_ms": 21.0, "link.ms_per_MB": 4.5}
DECISION = {
    "kind": "decision", "step": 10, "from": "none", "to": "fp16", "reason": "communication holds up 60%",
    "evidence": EVIDENCE,
}  # fmt: skip


def window(first: int, level: str, exposed: float) -> dict[str, Any]:
    return {
        "kind": "window", "first_step": first, "last_step": first + 9, "steps": 10, "level": level,
        "step_ms": 12 + exposed, "compute_ms": 11.0, "codec_ms": 0.5, "exposed_comm_ms": exposed,
        "overlapped_comm_ms": 1.0, "input_wait_ms": 0.5, "payload_bytes": LEVELS[level]["payload_bytes"],
        "error": None, "loss": 1.5,
    }  # fmt: skip


TRACE = {"kind": "trace", "last_step": 9, "steps": [[0, 30000, 500, 18000, 500, 1000, 0, 0.1, 2.0, 0.1, 0]] * 12}
END = {"kind": "end", "steps": 40, "wall_seconds": 12.5, "accuracy": 0.98}
LOG = [RUN, window(0, "none", 18.0), TRACE, DECISION, *(window(at, "fp16", 9.0) for at in (10, 20, 30)), END]
BIG = int("9" * 4000)
DEEP: Any = []
for _ in range(700):
    DEEP = [DEEP]


def change(record: dict[str, Any], **fields: Any) -> Callable[[list[dict[str, Any]]], None]:
    """Give fields to all records like that one."""

    def edit(records: list[dict[str, Any]]) -> None:
        for each in records:
            if each["kind"] == record["kind"]:
                each.update(fields)

    return edit


EDITS = {
    "milliseconds beyond any float": change(window(0, "none", 1.0), step_ms=BIG, exposed_comm_ms=-BIG),
    "evidence beyond any float": change(DECISION, evidence={"none.step_ms": BIG, "fp16.step_ms": 2.0}),
    "evidence that is a list": change(DECISION, evidence=[1, 2]),
    "evidence that is text": change(DECISION, evidence="none.step_ms"),
    "an end of other types": change(END, steps="many", wall_seconds={}),
    "limits that are text": change(RUN, limits="none"),
    "a ladder of figures": change(RUN, ladder=[1, 2.5, None]),
    "hosts in a list": change(RUN, hosts=["a", "b"], ranks="two"),
    "ranks beyond any float": change(RUN, ranks=BIG, parameters=BIG, gradient_bytes=BIG),
    "levels in a list": change(RUN, levels=[1], payload_bytes=3),
    "levels of negative size": change(RUN, levels={name: dict.fromkeys(COSTS, -1e300) for name in LEVELS}),
    "steps in text": change(window(0, "none", 1.0), steps="ten"),
    "half of a character": change(window(0, "none", 1.0), level="\ud800"),
    "half of a character as a host": change(RUN, hosts={"\ud800": 2}),
    "text without end": change(DECISION, reason="x" * 10_000_000),
    "nested fields": change(RUN, hosts=DEEP, framework=DEEP),
    "steps of the trace beyond any float": change(TRACE, steps=[[0, BIG, 1, 1, 1, 1, 1, 1, 1, 1, 1]] * 20),
    "a trace of an unknown level": change(TRACE, steps=[[7, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]] * 20),
    "a trace of text": change(TRACE, steps="steps"),
    "records without a run": lambda records: records.__delitem__(0),
}
COMMANDS = (["report", "--no-png"], ["report"], ["plan"], ["replay"])


def written(path: Path, records: list[dict[str, Any]]) -> str:
    sys.set_int_max_str_digits(10_000)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_no_log_ends_in_a_traceback(
    edit: Callable[[list[dict[str, Any]]], None], command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if command == ["report"]:
        pytest.importorskip("matplotlib")
    records = copy.deepcopy(LOG)
    edit(records)
    path = written(tmp_path / "run.jsonl", records)
    code = main([*command, path])
    out, err = capsys.readouterr()
    out.encode(), err.encode()  # a terminal takes it
    assert code in ((0, 1) if command == ["replay"] else (0,)) or (
        code == 2 and err.startswith(f"hvdplus {command[0]}: ") and err.count("\n") == 1 and len(err) < 10_000
    )
    assert code != 2 or path in err


def test_the_log_before_any_harm_is_fine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "run.jsonl", LOG)
    assert main(["report", "--no-png", path]) == main(["plan", path]) == 0
    assert main(["replay", path]) in (0, 1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("depth", [2_000, 200_000])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_json_without_end_is_refused(
    depth: int, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.jsonl").write_text('{"kind": "run", "hosts": ' + "[" * depth + "]" * depth + "}\n")
    assert main([*command, str(tmp_path / "run.jsonl")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_windows_of_billions_of_steps_take_no_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{**record, "steps": 2_000_000_000} if record["kind"] == "window" else record for record in LOG]
    began = time.perf_counter()
    assert main(["plan", written(tmp_path / "run.jsonl", records)]) == 0
    assert time.perf_counter() - began < 20, capsys.readouterr()


ESCAPES = "\x1b]0;title\x07 \x1b[2J \x1b]8;;http://example.org\x1b\\ \x1b[1A \x9b2J \u202e \r\b\n\t\x00\x7f"


@pytest.mark.parametrize("command", COMMANDS[:1] + COMMANDS[2:], ids=" ".join)
def test_a_terminal_sees_no_control_character_of_a_log(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Title, screen, links, and lines further up would be in the hands of whoever wrote the log."""

    def poison(value: Any) -> Any:
        if isinstance(value, dict):
            return {key if key in KNOWN else f"{key}{ESCAPES}": poison(item) for key, item in value.items()}
        if isinstance(value, list):
            return [poison(item) for item in value]
        return f"{value}{ESCAPES}" if isinstance(value, str) else value

    kept = ("kind", "compression")
    records = [{key: value if key in kept else poison(value) for key, value in record.items()} for record in LOG]
    main([*command, written(tmp_path / "run.jsonl", records)])
    for text in capsys.readouterr():
        assert all(character.isprintable() or character == "\n" for character in text), ascii(text)
    if command[0] == "report":
        main([*command, str(tmp_path / "run.jsonl")])
        assert "\\x1b]0;title\\x07 \\x1b[2J" in capsys.readouterr().out.replace("\n" + 15 * " ", " ")


KNOWN = {*COSTS, *asdict(Config()), *(key for record in LOG for key in record)}
"""Keys of the format itself."""


def test_settings_are_shown_without_their_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hvdplus.cli import doctor

    monkeypatch.setattr(doctor, "find_frameworks", tuple)
    monkeypatch.setattr(doctor, "package_version", lambda *_: None)
    monkeypatch.setenv("HVDPLUS_LADDER", f"none,fp16{ESCAPES.replace(chr(0), '')}")
    main(["doctor"])
    text = capsys.readouterr().out
    assert "\\x1b]0;title" in text
    assert all(character.isprintable() or character == "\n" for character in text), ascii(text)
