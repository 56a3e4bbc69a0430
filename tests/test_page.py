"""The report in its other forms: a page, data, a trace, a live table. All say what the plain table says."""

from __future__ import annotations

import io
import json
import math
import re
import threading
import time
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_report import TIMES, Job, demo

from hvdplus.cli import main
from hvdplus.log import follow
from hvdplus.log.facts import bandwidth, fp32_bytes, spans_by_level, spread, traffic
from hvdplus.log.page import page, row_of_run, write_page
from hvdplus.log.panels import Scale, ticks
from hvdplus.log.summary import summary
from hvdplus.log.table import table
from hvdplus.log.timeline import timeline
from hvdplus.log.words import closing, decision_line


class Text(HTMLParser):
    """What a reader sees, and which elements there are."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.text, self.tags, self.links = "", list[str](), list[str]()
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def pictures(source: str) -> list[ElementTree.Element]:
    """The SVGs of a page, parsed as strictly as XML is."""
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL)]


def uneven(windows: int = 3) -> Job:
    """Three ranks, the last of which computes for 22 ms where the others take 11."""
    job = Job(ranks=3)
    for _ in range(windows):
        job.run(
            "fp16", 10, error=0.0, overlapped_comm_ms=2.0, payload_bytes=246912, slowest_rank=2,
            slowest_compute_ms=22.0, middle_compute_ms=11.0, compute_ms_by_rank=[11.0, 10.0, 22.0],
        )  # fmt: skip
    return job.end()


# -- page


def test_a_page_stands_alone_and_begins_with_the_verdict() -> None:
    records = demo().records
    seen = Text(page({"run.jsonl": records}))
    assert not seen.links and "script" not in seen.tags
    assert seen.text.index("run.jsonl") < seen.text.index(closing(records)) < seen.text.index("Milliseconds a step")
    assert "accuracy 0.986" in seen.text and "123,456 parameters" in seen.text


def test_what_lies_under_the_pointer_says_its_figures() -> None:
    job = demo()
    titles = [each.text or "" for svg in pictures(page({"a": job.records})) for each in svg.iter("title")]
    assert any(
        title.startswith("steps 0 to 9, none: 19.8 ms a step (compute 11.0, codec 0.400, exposed communication 8.00")
        for title in titles
    )
    decisions = [record for record in job.records if record["kind"] == "decision"]
    for number, each in enumerate(decisions, start=1):
        assert f"{number}. {decision_line(each, ' → ')}" in titles


def test_columns_are_as_high_as_their_times() -> None:
    job = Job().run("none", 20).run("none", 10, (5.5, 0.2, 4.0, 0.2)).end()
    times = pictures(page({"a": job.records}))[0]
    first, _, last = (
        sum(float(part.get("height", "0")) for part in each.iter("rect"))
        for each in times.iter("g")
        if each.get("class") == "column"
    )
    assert first == pytest.approx(2 * last, rel=0.01)


def test_figures_that_are_missing_make_no_panel() -> None:
    whole, bare = page({"a": demo().records}), page({"a": Job().run("none", 5).end().records})
    assert "<h2>Loss</h2>" in whole and "<h2>Loss</h2>" not in bare and "Slowest rank" not in bare
    with pytest.raises(ValueError, match="no window of steps"):
        page({"a": Job().end().records})


def test_nothing_in_a_log_becomes_markup() -> None:
    evil = '<script>alert("1")</script>&amp;'
    job = Job(hosts={evil: 2}, framework=evil).run("none", 20, loss=1.0).decide(evil, evil)
    job.run(evil, 20, TIMES["fp16"]).end(note=evil)
    source = page({evil: job.records})
    seen = Text(source)
    assert "script" not in seen.tags and seen.text.count(evil) >= 4
    assert len(pictures(source)) >= 3


def test_a_slow_rank_is_named_first() -> None:
    records = uneven().records
    said = (
        "Rank 2 computes 2.0 times as long as the middle rank (22.0 ms a step against 11.0 ms): all ranks wait for it"
    )
    assert table(records).replace("\n", " ").startswith(said)
    assert said in Text(page({"a": records})).text
    found = spread(records)
    assert found is not None and (found.rank, found.times, found.steps) == (2, 2.0, 30)
    assert spread(demo().records) is None  # a log of before


def test_two_runs_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo(tmp_path / "a.jsonl"), Job(tmp_path / "b.jsonl").run("none", 40, loss=0.5).end()
    names = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    assert main(["report", *names, "--html", str(tmp_path / "both.html")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.split(r"\s{2,}", lines[1])[1:] == ["fp16", "12.1", "300", "12.3", "77.8", "0.112"]
    assert re.split(r"\s{2,}", lines[2])[1:] == ["none", "19.8", "40", "12.3", "19.8", "0.500"]
    seen = Text((tmp_path / "both.html").read_text())
    assert all(seen.text.count(name) >= 2 for name in names) and not list(tmp_path.glob("*.png"))
    assert main(["report", *names, "--png", "x.png"]) == 2
    assert "--png wants one run log. Received: 2" in capsys.readouterr().err
    assert main(["report", *names, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert list(figures) == names and figures[names[1]]["levels"].keys() == {"none"}


def test_steps_before_a_checkpoint_was_loaded_count_too() -> None:
    records = Job().run("none", 40).end().records
    loaded = [
        {**record, "first_step": 0, "last_step": 9} if record["kind"] == "window" else record for record in records
    ]
    assert row_of_run("a", loaded)[3] == row_of_run("a", records)[3] == "40"


def test_fp32_is_fp32_whatever_the_gradients_are() -> None:
    """Half precision that travels in float32, where the transport knows no other sums: nothing is saved, nor lost."""
    records = Job(gradient_bytes=2 * 123_456, payload_bytes={"none": 4 * 123_456}).run("none", 40).end().records
    dense = [{**record, "payload_bytes": 4 * 123_456} if record["kind"] == "window" else record for record in records]
    assert traffic(dense).saved_share == 0.0 and "0.494 MB in fp32" in table(dense)
    assert fp32_bytes([{"kind": "run", "gradient_bytes": 8}]) == 8, "a log without a number of parameters"


def test_what_was_saved_is_never_all_of_it() -> None:
    records = Job(parameters=10_000_000).run("none", 40).end().records
    few = [{**record, "payload_bytes": 100_000} if record["kind"] == "window" else record for record in records]
    assert "1/400 of it." in Text(page({"a": few})).text
    nothing = [{**record, "payload_bytes": 0} if record["kind"] == "window" else record for record in records]
    assert "100% less." in Text(page({"a": nothing})).text


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--follow", "--html"], "--html goes with its log once it has ended"),
        (["--follow", "--why"], "--why goes with"),
        (["--json", "--why"], "--why goes with the table of one run log"),
    ],
    ids=str,
)
def test_an_option_that_would_do_nothing_is_refused(
    options: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo(tmp_path / "a.jsonl")
    assert main(["report", str(tmp_path / "a.jsonl"), *options]) == 2
    assert why in capsys.readouterr().err


def test_a_picture_that_is_asked_for_comes_beside_figures_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo(tmp_path / "a.jsonl")
    assert main(["report", str(tmp_path / "a.jsonl"), "--json", "--png", str(tmp_path / "x.png")]) == 0
    assert json.loads(capsys.readouterr().out) and (tmp_path / "x.png").exists()


def test_the_command_writes_beside_the_log_or_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo(tmp_path / "run.jsonl")
    assert main(["report", str(tmp_path / "run.jsonl"), "--no-png", "--html"]) == 0
    assert f"Page: {tmp_path / 'run.html'}" in capsys.readouterr().out and (tmp_path / "run.html").exists()
    (tmp_path / "file").write_text("")
    assert main(["report", str(tmp_path / "run.jsonl"), "--no-png", "--html", str(tmp_path / "file" / "x.html")]) == 2
    assert "hvdplus report: no page: cannot write" in capsys.readouterr().err


def test_no_page_or_picture_takes_the_place_of_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for log in logs:
        log.write_text("".join(json.dumps(record) + "\n" for record in demo().records))
    before = [log.read_bytes() for log in logs]
    names = [str(log) for log in logs]
    assert main(["report", "--no-png", "--html", names[0]]) == 0, "the word behind --html is a log"
    assert f"Page: {tmp_path / 'a.html'}" in capsys.readouterr().out
    assert main(["report", "--html", *names]) == 0
    for option in ("--png", "--trace"):
        assert main(["report", option, *names]) == 2
        assert f"{names[0]} is a run log, and would be overwritten" in capsys.readouterr().err
    assert main(["report", "--html"]) == 2
    assert "name a run log" in capsys.readouterr().err
    assert [log.read_bytes() for log in logs] == before


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [(0.0, 10.0, [0, 2, 4, 6, 8, 10]), (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (17, 23, [18, 20, 22]), (3, 3, [3])],
)
def test_ticks_are_round(low: float, high: float, wanted: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(wanted)


def test_a_scale_of_no_length_is_no_division_by_zero() -> None:
    assert Scale(5, 5, 10, 20)(5) == 10


# -- data


def test_the_data_are_what_the_table_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = demo(tmp_path / "run.jsonl")
    assert main(["report", str(tmp_path / "run.jsonl"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(json.dumps(summary(job.records))) and not list(tmp_path.glob("*.png"))
    assert told["verdict"] == closing(job.records) and told["warnings"] == []
    assert told["levels"]["fp16"]["step_ms"] == pytest.approx(12.1) and told["levels"]["fp16"]["steps"] == 285
    assert [each["level"] for each in told["stretches"]] == ["none", "fp16"]
    assert told["bytes_sent"] == 15 * 493824 + 285 * 246912
    assert told["saved_share"] == pytest.approx(1 - told["bytes_sent"] / (300 * 493824))
    assert [each["to"] for each in told["decisions"]] == ["fp16", "fp16"] and told["slowest_rank"] is None


def test_bandwidths_are_counted_as_nccls_tests_count_them() -> None:
    span = spans_by_level(uneven().records)["fp16"]
    found = bandwidth(span, 3)
    assert found.algorithm == pytest.approx(246912 / 2.1e-3) and found.bus == pytest.approx(found.algorithm * 4 / 3)
    silent = span._replace(exposed_comm_ms=0.0, overlapped_comm_ms=0.0)
    assert math.isnan(bandwidth(silent, 3).algorithm)


def test_samples_a_second_are_those_of_all_ranks() -> None:
    job = Job(batch_size=32).run("none", 20).end()
    assert summary(job.records)["levels"]["none"]["samples_per_second"] == pytest.approx(2 * 32 / 19.8e-3)
    assert "3232" in Text(page({"a": job.records})).text
    assert summary(demo().records)["levels"]["fp16"]["samples_per_second"] is None
    for every, factor in ((16, 16.0), ("auto", None)):
        records = [*job.records, {"kind": "local", "every": every}]
        found = summary(records)["levels"]["none"]["samples_per_second"]
        assert found == (factor and pytest.approx(factor * 2 * 32 / 19.8e-3))


def test_traffic_of_a_log_without_sizes_is_unknown() -> None:
    job = Job(gradient_bytes=None, payload_bytes=None).run("none", 20).end()
    assert traffic(job.records).bytes == 0 and math.isnan(traffic(job.records).saved_share)
    assert summary(job.records)["saved_share"] is None


# -- trace


def test_a_trace_has_a_process_a_rank_whose_steps_are_full() -> None:
    events = timeline(uneven().records)["traceEvents"]
    assert [each["args"]["name"] for each in events if each["ph"] == "M"] == ["rank 0", "rank 1", "rank 2"]
    for rank, compute in enumerate((11.0, 10.0, 12.1)):  # the slowest one's is cut at the mean step
        mine = [each for each in events if each["ph"] == "X" and each["pid"] == rank]
        outer = [each for each in mine if each["name"].startswith("fp16: steps")]
        assert [each["ts"] for each in outer] == pytest.approx([0, 121e3, 242e3])
        assert sum(each["dur"] for each in mine if each["name"] == "compute") == pytest.approx(30 * compute * 1e3)
        for each in mine:
            inside = [
                o for o in outer if o["ts"] - 1 <= each["ts"] and each["ts"] + each["dur"] <= o["ts"] + o["dur"] + 1
            ]
            assert inside, each


def test_a_trace_marks_decisions_and_is_plain_json(tmp_path: Path) -> None:
    demo(tmp_path / "run.jsonl")
    target = tmp_path / "deep" / "trace.json"
    assert main(["report", str(tmp_path / "run.jsonl"), "--no-png", "--trace", str(target)]) == 0
    events = json.loads(target.read_text(), parse_constant=lambda name: pytest.fail(name))["traceEvents"]
    marks = [each for each in events if each["ph"] == "i"]
    assert [each["name"] for each in marks] == ["none -> fp16", "fp16 -> fp16"]
    assert marks[0]["ts"] == pytest.approx(15 * 19.8e3)
    assert events[0]["args"]["name"] == "all 2 ranks"


# -- live


def shown(records: list[dict[str, Any]]) -> str:
    """The live table as text."""
    console = Console(file=io.StringIO(), width=120)
    console.print(follow.view(records, "run.jsonl"))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_live_table_shows_the_latest_windows_and_decisions() -> None:
    assert "no steps yet" in shown(Job().records)
    text = shown(demo().records)
    assert (
        "297-299" in text
        and "187-196" in text
        and "177-186" not in text
        and "stays at fp16" in text
        and "accuracy 0.986" in text
    )


def test_a_job_is_followed_to_its_end(tmp_path: Path) -> None:
    """It need not have begun, and lines come in pieces."""
    path = tmp_path / "run.jsonl"
    seen: list[list[dict[str, Any]]] = []

    def read_on() -> None:
        for new in follow.grown(path):
            seen.append(new)
            if any(record["kind"] == "end" for record in new):
                return
            time.sleep(0.01)

    reader = threading.Thread(target=read_on, daemon=True)
    reader.start()
    whole = demo(tmp_path / "whole.jsonl")
    content = (tmp_path / "whole.jsonl").read_bytes()
    with path.open("wb", buffering=0) as file:
        for at in range(0, len(content), 997):
            file.write(content[at : at + 997])
            time.sleep(0.002)
    reader.join(10)
    assert not reader.is_alive() and [record for new in seen for record in new] == whole.records


def test_a_file_that_begins_anew_while_it_is_followed_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    demo(path)
    looks = follow.grown(path)
    assert next(looks)
    path.write_text("")
    with pytest.raises(ValueError, match="another job has begun it anew"):
        next(looks)


def test_the_command_follows_a_log_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo(tmp_path / "run.jsonl")
    assert main(["report", str(tmp_path / "run.jsonl"), "--follow"]) == 0
    assert "297-299" in capsys.readouterr().out
    (tmp_path / "odd.jsonl").write_text("{}\n")
    assert main(["report", str(tmp_path / "odd.jsonl"), "--follow"]) == 2
    assert "odd.jsonl, line 1: expected" in capsys.readouterr().err


def test_a_page_is_written_into_a_new_folder(tmp_path: Path) -> None:
    assert write_page({"a": demo().records}, tmp_path / "new" / "a.html").read_text().startswith("<!doctype html>")
