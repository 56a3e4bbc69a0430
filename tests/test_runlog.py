"""The run log: what goes in comes out, a crash costs one line at most, and a damaged log says where."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frameworks import examples
from hypothesis import given
from hypothesis import strategies as st

from hvdplus import __version__
from hvdplus.files import content
from hvdplus.log.history import MOST_EVENTS, MOST_VALUES, MOST_WINDOWS, NEWEST_WINDOWS, Medians
from hvdplus.log.runlog import FORMAT, RunLog, read
from hvdplus.log.table import table

WINDOW = {"first_step": 0, "last_step": 9, "level": "none", "step_ms": 12.5}
DECISION = {"step": 10, "from": "none", "to": "fp16", "reason": "communication holds up 40% of a 20.00 ms step"}

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)
FIELDS = st.dictionaries(st.text().filter(lambda name: name not in ("self", "kind", "keep")), VALUES, max_size=6)


def strict(value: Any) -> Any:
    """What strict JSON can hold of a value."""
    if isinstance(value, dict):
        return {key: strict(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def written(path: Path, *records: tuple[str, dict[str, Any]]) -> RunLog:
    log = RunLog(path)
    for kind, fields in records:
        log.write(kind, **fields)
    log.close()
    return log


@given(st.lists(FIELDS, max_size=4))
@examples(60)
def test_any_json_value_survives_and_memory_equals_file(fields: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        log = written(path, *(("end", entry) for entry in fields))
        assert read(path) == log.records == [{"kind": "end", **strict(entry)} for entry in fields]
        assert path.read_bytes().count(b"\n") == len(fields)


def test_non_finite_figures_become_null(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log = written(path, ("end", {"loss": math.nan, "evidence": {"up": math.inf, "down": [-math.inf, 1.5]}}))
    assert log.records == [{"kind": "end", "loss": None, "evidence": {"up": None, "down": [None, 1.5]}}]
    assert path.read_text() == '{"kind": "end", "loss": null, "evidence": {"up": null, "down": [null, 1.5]}}\n'


def test_values_of_array_libraries_are_plain_figures(tmp_path: Path) -> None:
    class Eager:
        """As TensorFlow's eager tensors: ``numpy()`` is the way to the figure."""

        def numpy(self) -> np.float32:
            return np.float32(0.25)

    values = {"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True), "d": np.arange(3), "e": Eager(), "f": (1, 2)}
    plain = {"a": 0.5, "b": 3, "c": True, "d": [0, 1, 2], "e": 0.25, "f": [1, 2]}
    log = written(tmp_path / "run.jsonl", ("end", values), ("end", {"nan": np.float32("nan")}))
    assert log.records == read(tmp_path / "run.jsonl") == [{"kind": "end", **plain}, {"kind": "end", "nan": None}]


def test_what_is_no_figure_is_named(tmp_path: Path) -> None:
    log = RunLog(None)
    with pytest.raises(TypeError, match=r"Received: evidence\.model=<object object at .*> \(object\)"):
        log.write("decision", evidence={"model": object()})
    assert log.records == []


def test_a_run_says_which_format_version_and_when() -> None:
    log = RunLog(None)
    log.write("run", framework="torch", ranks=2)
    record = log.records[0]
    assert (record["format"], record["hvdplus"], record["framework"]) == (FORMAT, __version__, "torch")
    assert record["started_at"].endswith("+00:00") and "T" in record["started_at"]


@pytest.mark.parametrize("path", [None, ""])
def test_without_a_path_records_stay_here(path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = RunLog(path)
    log.write("window", **WINDOW)
    log.close()
    assert log.path is None and log.records == [{"kind": "window", **WINDOW}] and not list(tmp_path.iterdir())


def test_folders_are_made_and_the_path_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = RunLog("runs/today/run.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    log.write("window", **WINDOW)
    assert log.path == tmp_path / "runs/today/run.jsonl" and read(log.path) == log.records


def test_what_is_not_kept_is_only_in_the_file(tmp_path: Path) -> None:
    """Traces of every step would fill the memory of a job that runs for days."""
    log = RunLog(tmp_path / "run.jsonl")
    log.write("window", **WINDOW)
    log.write("trace", keep=False, steps=[[0, 1.5, None]])
    log.write("decision", keep=True, **DECISION)
    assert [record["kind"] for record in log.records] == ["window", "decision"]
    trace = {"kind": "trace", "steps": [[0, 1.5, None]]}
    assert read(tmp_path / "run.jsonl") == [log.records[0], trace, log.records[1]]
    nowhere = RunLog(None)
    nowhere.write("trace", keep=False, steps=[])
    assert nowhere.records == []
    with pytest.raises(TypeError, match="Received: steps=<object"):
        nowhere.write("trace", keep=False, steps=object())


def footprint(value: Any) -> int:
    """Bytes of memory of a structure of plain values and arrays; what is shared counts each time."""
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        return size + sum(footprint(each) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple)):
        return size + sum(map(footprint, value))
    return size + (footprint(vars(value)) if hasattr(value, "__dict__") else 0)


WINDOWS = 100_000
DENSE_EVERY = 5000


def full_window(number: int) -> dict[str, Any]:
    """All fields of a window of ten steps, which take a little longer each time and much longer now and then."""
    step_ms = 10 + number / WINDOWS + (500.0 if number % 97 == 0 else 0.0)
    return {
        "first_step": 10 * number, "last_step": 10 * number + 9, "steps": 10,
        "level": "fp16" if number % DENSE_EVERY else "none", "step_ms": step_ms, "compute_ms": step_ms - 2,
        "codec_ms": 0.5, "exposed_comm_ms": 1.25, "overlapped_comm_ms": 3.0, "input_wait_ms": 0.25,
        "payload_bytes": 4096, "error": None, "loss": 1 / (1 + number),
    }  # fmt: skip


def test_a_log_stays_small_however_long_the_job() -> None:
    """A million windows take no more than a hundred thousand do (2.8 MB, measured), and next to nothing on ranks that
    show no report."""
    shows, silent = RunLog(None), RunLog(None, keep=False)
    shows.write("run", ranks=2)
    sizes = []
    for number in range(WINDOWS):
        for log in (shows, silent) if number > 0.9 * WINDOWS else (shows,):
            log.write("window", **full_window(number))
        if number % 10_000 == 9_999:
            shows.write("decision", **DECISION)
            sizes.append(footprint(vars(shows)))
    assert max(sizes) < 3e6
    assert footprint(vars(silent)) < 0.2e6 and silent.records == []

    windows = [record for record in shows.records if record["kind"] == "window"]
    assert shows.records[0]["kind"] == "run" and sum(each["kind"] == "decision" for each in shows.records) == 10
    newest = [{"kind": "window", **full_window(number)} for number in range(WINDOWS - NEWEST_WINDOWS, WINDOWS)]
    assert windows[-NEWEST_WINDOWS:] == newest
    # Nothing is missing between the first step and the last, and no level is taken for another.
    assert windows[0]["first_step"] == 0 and windows[-1]["last_step"] == 10 * WINDOWS - 1
    assert all(after["first_step"] == before["last_step"] + 1 for before, after in pairwise(windows))
    assert sum(window["steps"] for window in windows) == 10 * WINDOWS
    dense = [window["first_step"] for window in windows if window["level"] == "none"]
    assert dense == list(range(0, 10 * WINDOWS, 10 * DENSE_EVERY))
    # Old windows are in equal detail, and have the medians of the windows that they stand for.
    old = [window for window in windows[:-NEWEST_WINDOWS] if window["level"] == "fp16"]
    assert len(old) > 250 and max(window.get("windows", 1) for window in old) == 3**5
    for window in (window for window in old if window.get("windows", 1) > 9):
        middle = (window["first_step"] + window["last_step"]) / 20
        assert window["step_ms"] == pytest.approx(10 + middle / WINDOWS, abs=0.003)
    assert shows.medians("fp16")["step_ms"] == pytest.approx(10.5, abs=0.01)
    assert shows.medians("fp16")["codec_ms"] == 0.5


def test_medians_are_those_of_the_windows_at_a_level() -> None:
    log = RunLog(None, keep=False)
    assert log.last_window is None and all(math.isnan(value) for value in log.medians("none").values())
    for number, step_ms in enumerate((5.0, 1.0, 2.0)):
        log.write("window", **{**WINDOW, "level": "none" if number else "fp16", "step_ms": step_ms})
    assert log.last_window == {"kind": "window", **WINDOW, "step_ms": 2.0}
    assert log.records == []
    assert log.medians("none")["step_ms"] == 1.5 and log.medians("fp16")["step_ms"] == 5.0
    assert log.medians("lowrank:4")["step_ms"] == 2.0, "of all, where the level did not run"
    assert math.isnan(log.medians("none")["codec_ms"]), "which these windows do not say"


@pytest.mark.parametrize("count", [1, 2, 998, 999, 1000, 5000, 100_000])
def test_a_running_median_is_that_of_its_values(count: int) -> None:
    values = np.random.default_rng(count).lognormal(sigma=1.0, size=count)
    medians = Medians()
    for value in values:
        medians.add(value)
    exact = float(np.median(values))
    assert medians.median == (exact if count < MOST_VALUES else pytest.approx(exact, rel=0.05))
    assert sys.getsizeof(medians._values) < 20_000


def test_levels_that_change_all_the_time_cost_no_more_memory() -> None:
    """Then old windows have to be left out, and the report says so."""
    log = RunLog(None)
    log.write("run", ranks=2)
    for number in range(5000):
        log.write("window", **{**full_window(number), "level": ("none", "fp16")[number % 2]})
        log.write("decision", **DECISION)
        assert len(log.records) <= MOST_WINDOWS + MOST_EVENTS + 2
    run, left_out = sorted(log.records[:2], key=lambda record: record["kind"], reverse=True)
    assert run["kind"] == "run" and left_out["kind"] == "left_out"
    assert left_out["records"] + len(log.records) - 1 == 10_001
    assert f"{left_out['records']:,} older records of this run are not shown" in table(log.records)


def test_a_second_job_is_refused_the_same_file(tmp_path: Path) -> None:
    """Two jobs that write one file garble it."""
    path = tmp_path / "run.jsonl"
    log = written_by_another = RunLog(path)
    log.write("window", **WINDOW)
    script = "import sys; from hvdplus.log.runlog import RunLog; RunLog(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"OSError: Cannot write the run log {path}: another job is writing it." in done.stderr
    assert "HVDPLUS_RUN_LOG" in done.stderr
    assert read(path) == [{"kind": "window", **WINDOW}], "what the first one wrote stays"
    written_by_another.close()
    assert subprocess.run([sys.executable, "-c", script, str(path)]).returncode == 0
    assert read(path) == []


def test_a_log_is_free_once_closed_whatever_a_forked_child_holds(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run.jsonl")
    copy = os.dup(log._file.fileno())  # type: ignore[union-attr]
    try:
        log.close()
        RunLog(tmp_path / "run.jsonl").close()
    finally:
        os.close(copy)


def test_a_pipe_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    """It would be waited for without a word."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="Cannot write the run log .*pipe: No such device or address"):
        RunLog(tmp_path / "pipe")


def test_a_home_folder_is_no_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert RunLog("~/run.jsonl").path == tmp_path / "home" / "run.jsonl"
    assert [each.name for each in tmp_path.iterdir()] == ["home"]


def test_every_record_is_readable_at_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run.jsonl")
    for count in range(1, 4):
        log.write("window", **WINDOW)
        assert len(read(tmp_path / "run.jsonl")) == count


def test_a_killed_job_leaves_a_readable_log(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    script = (
        "import os, signal, sys; from hvdplus.log.runlog import RunLog; log = RunLog(sys.argv[1]); "
        "log.write('end', steps=1); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(path)], cwd=tmp_path).returncode == -9
    assert read(path) == [{"kind": "end", "steps": 1}]


@pytest.mark.parametrize(
    ("path", "reason"), [("file/run.jsonl", "Not a directory|File exists"), ("folder", "Is a directory")]
)
def test_a_file_that_cannot_be_written_is_named_with_the_reason(path: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=rf"Cannot write the run log {tmp_path / path}: ({reason}).*HVDPLUS_RUN_LOG"):
        RunLog(tmp_path / path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_ends_the_log_and_not_the_training() -> None:
    log = RunLog("/dev/full")
    with pytest.warns(RuntimeWarning, match="The run log /dev/full ends here: No space left on device"):
        log.write("window", **WINDOW)
    log.write("window", **WINDOW)  # once warned is enough
    assert len(log.records) == 2


def test_a_log_cut_off_anywhere_yields_its_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log = written(path, ("run", {"hosts": {"knöten": 2}}), ("window", WINDOW), ("decision", DECISION), ("end", {}))
    whole = path.read_bytes()
    first = whole.index(b"\n")
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        found = read(path)
        assert found == log.records[: len(found)]
        # A line that lacks nothing but its newline is whole.
        assert len(found) == whole[: length + 1].count(b"\n")


def test_an_empty_log_has_no_records(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    RunLog(path).close()
    assert read(path) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"kind": "window", "first_', "one JSON object"),
        ("loss went up", "one JSON object"),
        ("[1, 2]", 'a JSON object with a text field "kind"'),
        ('{"step": 3}', 'a JSON object with a text field "kind"'),
        ('{"kind": 7}', 'a JSON object with a text field "kind"'),
        ('{"kind": "window", "first_step": 0, "last_step": 9}', 'a window record with "level" of type str'),
        ('{"kind": "decision", "step": "ten"}', 'a decision record with "step" of type int'),
        ('{"kind": "run", "format": 2}', f"format {FORMAT} "),
    ],
)
def test_a_damaged_line_is_named_with_what_was_expected(line: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    good = json.dumps({"kind": "window", **WINDOW})
    path.write_text(f"{good}\n{good}\n{line}\n{good}\n")
    with pytest.raises(ValueError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}, line 3: expected {expected}")
    assert line[:60] in str(caught.value)


def test_bytes_that_are_no_text_are_no_log(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00")
    with pytest.raises(ValueError, match="picture.png, line 1: expected one JSON object"):
        read(path)


def test_kinds_and_fields_of_a_later_version_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind": "weather", "sky": "blue"}\n\n{"kind": "end", "steps": 3, "new": NaN}\n')
    assert read(path) == [{"kind": "weather", "sky": "blue"}, {"kind": "end", "steps": 3, "new": None}]


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nothing.jsonl")


def test_a_link_is_not_followed_to_a_file_that_it_would_empty(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "run.jsonl"
    victim.write_text("precious")
    link.symlink_to(victim)
    with pytest.raises(OSError, match=f"it is a link to {victim}, which would be overwritten"):
        RunLog(link)
    assert victim.read_text() == "precious"


def test_a_pipe_is_read_if_somebody_writes_into_it(tmp_path: Path) -> None:
    pipe, kept = tmp_path / "pipe", tmp_path / "kept"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="nobody writes into this pipe"):
        content(pipe)
    text = b"line\n" * 50_000  # more than a pipe holds
    kept.write_bytes(text)
    assert content(kept) == text

    def write() -> None:
        try:
            pipe.write_bytes(text)
        except BrokenPipeError:  # a reader that had found nobody closed what this thread has opened
            write()

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():  # it waits for a reader to come
        with contextlib.suppress(OSError):
            assert content(pipe) == text
            break
    writer.join()
