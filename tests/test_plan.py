"""``hvdplus plan RUNLOG``: forecasts are those worked out by hand, and what a log does not hold is said."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from frameworks import examples
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.cli import main
from hvdplus.cli.text import read_log
from hvdplus.control.link import ALL_REDUCES, LevelCost, Link, Wire, ring_all_reduce
from hvdplus.exchange.metadata import Slot
from hvdplus.log.forecast import (
    DENSE,
    MARGIN,
    Seen,
    Shown,
    Step,
    best_level,
    best_local,
    costs_on,
    pays_up_to,
    predict,
    predict_two_level,
    what_the_run_showed,
)

SLOT = 4 * len(Slot._fields)
"""Bytes of a rank's slot in the metadata tensor."""
thoroughly = examples(100)

# A job on two ranks that computes for 50 ms and hides 30, over a link of 1 ms an all-reduce and 16 ns a byte of
# payload; on two ranks a ring sends each byte once, so that is a wire of 0.5 Gbit/s. Five buckets of 8 MB in fp32.
COMPUTE_MS, HIDEABLE_MS, ALPHA_MS, NS_A_BYTE = 50.0, 30.0, 1.0, 16.0
LEVELS = {
    "none": {"payload_bytes": 40_000_000, "last_bytes": 8_000_000, "messages": 5, "codec_ms": 0.5},
    "fp16": {"payload_bytes": 20_000_000, "last_bytes": 4_000_000, "messages": 5, "codec_ms": 4.0},
    "int8": {"payload_bytes": 10_000_000, "last_bytes": 2_000_000, "messages": 5, "codec_ms": 8.0},
    "lowrank:4": {"payload_bytes": 400_000, "last_bytes": 80_000, "messages": 5, "codec_ms": 12.0},
}
CODEC_MS = {"none": 2.0, "fp16": 6.0, "lowrank:4": 15.0}
"""As seen; int8 was not tried."""


def about(**changes: Any) -> dict[str, Any]:
    """The record of the run."""
    return {
        "kind": "run", "ranks": 2, "hosts": {"a": 1, "b": 1}, "transport": "horovod-mpi", "collective": "ring",
        "gradient_bytes": 40_000_000, "levels": LEVELS, **changes,
    }  # fmt: skip


def window(level: str, **changes: Any) -> dict[str, Any]:
    """Ten steps as such a link makes them."""
    cost = LEVELS[level]
    comm = ALPHA_MS * cost["messages"] + NS_A_BYTE * 1e-6 * cost["payload_bytes"]
    exposed = max(ALPHA_MS + NS_A_BYTE * 1e-6 * cost["last_bytes"], comm - HIDEABLE_MS)
    times = {
        "step_ms": COMPUTE_MS + CODEC_MS[level] + exposed, "compute_ms": COMPUTE_MS - 1, "input_wait_ms": 1.0,
        "codec_ms": CODEC_MS[level], "exposed_comm_ms": exposed, "overlapped_comm_ms": comm - exposed,
    }  # fmt: skip
    place = {"kind": "window", "first_step": 0, "last_step": 9, "steps": 10, "level": level}
    return {**place, **times, "payload_bytes": cost["payload_bytes"], **changes}


SLOW = {"step_ms": 9000.0, "codec_ms": 2000.0, "exposed_comm_ms": 3000.0, "overlapped_comm_ms": 1000.0}
"""A window in which things were still being set up."""


def records(*ran: str, **changes: Any) -> list[dict[str, Any]]:
    """A log in which these levels ran, each for four windows of which the first is slow."""
    windows = [window(level, **(SLOW if i == 0 else {})) for level in ran or CODEC_MS for i in range(4)]
    return [about(**changes), *windows]


def write(path: Path, lines: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def log(tmp_path: Path) -> str:
    return write(tmp_path / "run.jsonl", records())


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's ``HVDPLUS_*`` stay outside."""
    for name in [name for name in os.environ if name.startswith("HVDPLUS_")]:
        monkeypatch.delenv(name)


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Standard output of a plan that succeeds."""
    assert main(("plan", *argv)) == 0
    out, err = capsys.readouterr()
    assert err == "" and all(line == line.rstrip() for line in out.splitlines())
    return out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line of a plan that is refused."""
    assert main(("plan", *argv)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("hvdplus plan: ")
    return err


def forecasts(text: str) -> dict[tuple[str, str], list[str]]:
    """(ranks, rate) -> the other cells of the table's rows."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    return {(row[0], row[1]): row[2:] for row in rows if len(row) == 8 and row[0][0].isdigit()}


# -- what the run showed -----------------------------------------------------------------------------------------------


def test_the_parts_of_the_job_are_found_again() -> None:
    shown = what_the_run_showed(records())
    assert shown.link == pytest.approx((ALPHA_MS / 1e3, NS_A_BYTE / 1e9))
    assert shown.gbit == pytest.approx(0.5)
    assert (shown.compute, shown.hideable) == pytest.approx((COMPUTE_MS / 1e3, HIDEABLE_MS / 1e3))
    assert (shown.ranks, shown.hosts, shown.elements) == (2, 2, 10_000_000)
    assert list(shown.costs) == list(LEVELS) and list(shown.seen) == list(CODEC_MS)
    assert shown.assumptions == ()


def test_codecs_are_those_seen_and_else_those_tried_besides_the_least_packing() -> None:
    codec = {name: cost.codec for name, cost in what_the_run_showed(records()).costs.items()}
    assert codec == pytest.approx({"none": 0.002, "fp16": 0.006, "int8": 0.0015 + 0.008, "lowrank:4": 0.015})


def test_first_windows_count_only_where_there_are_no_others() -> None:
    alone = what_the_run_showed([about(), window("none"), window("fp16", **SLOW), window("none", **SLOW)])
    assert alone.seen["fp16"].step == 9.0
    assert alone.seen["none"].step == pytest.approx((window("none")["step_ms"] + 9000) / 2e3)
    after = what_the_run_showed([about(), *2 * [window("fp16", **SLOW), window("fp16"), window("none", **SLOW)]])
    assert after.seen["fp16"].step == window("fp16")["step_ms"] / 1e3


def test_a_stretch_of_few_steps_says_less_than_one_of_many() -> None:
    few = {**window("none", **SLOW), "steps": 2}
    seen = what_the_run_showed([about(), window("none"), few, window("fp16"), few]).seen
    assert seen["none"].step == window("none")["step_ms"] / 1e3


def test_draining_is_no_level() -> None:
    odd = [{**window("none", **SLOW), "level": "draining"}] * 5
    assert what_the_run_showed([*records(), *odd]) == what_the_run_showed(records())


def test_windows_that_do_not_say_everything_are_passed_over() -> None:
    silent = [window("fp16", overlapped_comm_ms=None), window("none", codec_ms="?")]
    assert what_the_run_showed([*records(), *silent]).seen == what_the_run_showed(records()).seen


def test_the_last_word_on_what_levels_send_counts_and_rows_go_on_top() -> None:
    smaller = {name: {**level, "payload_bytes": level["payload_bytes"] // 4} for name, level in LEVELS.items()}
    rows = 500_000
    windows = [window(name, payload_bytes=smaller[name]["payload_bytes"] + rows) for name in ("none", "fp16")]
    shown = what_the_run_showed([about(), {"kind": "resize", "levels": smaller}, *windows])
    assert shown.costs["none"].payload_bytes == 10_000_000 + rows
    assert shown.costs["int8"].payload_bytes == 2_500_000 + rows
    assert shown.costs["int8"].last_bytes == LEVELS["int8"]["last_bytes"] + rows


def test_what_ran_before_parameters_came_or_went_does_not_count() -> None:
    smaller = {name: {**level, "payload_bytes": level["payload_bytes"] // 4} for name, level in LEVELS.items()}
    before = [{"kind": "run", **about(levels=smaller)}, *(window(name, **SLOW) for name in CODEC_MS for _ in range(9))]
    cut = {"kind": "resize", "levels": LEVELS}
    assert what_the_run_showed([*before, cut, *records()[1:]]) == what_the_run_showed(records())
    assert what_the_run_showed([*before, cut]).seen["fp16"].step == 9.0, "where nothing has run since"


def test_one_level_is_enough_and_what_is_made_up_is_said() -> None:
    shown = what_the_run_showed(records("none"))
    assert shown.link == (0.0, pytest.approx((5 * ALPHA_MS + 640) / 40e6 / 1e3))
    assert "Only none ran" in shown.assumptions[0]


def test_without_dense_steps_they_are_made_up() -> None:
    shown = what_the_run_showed(records("fp16", levels={"fp16": LEVELS["fp16"]}))
    assert shown.costs[DENSE] == LevelCost(40_000_000, 8_000_000, 5, 0.002)
    assert list(shown.costs) == ["none", "fp16"]
    assert any("No dense step ran" in text and "fp16" in text for text in shown.assumptions)
    shown = what_the_run_showed(records("fp16"))
    assert shown.costs[DENSE].codec == pytest.approx(0.0005 + 0.002) and shown.costs["int8"].codec == 0.01
    assert any("No dense step ran: it is assumed to need 2.50 ms of codec" in text for text in shown.assumptions)


def test_other_things_that_a_run_does_not_show_are_said() -> None:
    texts = " ".join(what_the_run_showed(records(hosts={"a": 2}, collective="default")).assumptions)
    assert "All ranks were on one host" in texts and "(default) is assumed to be a ring" in texts
    hidden = [window("lowrank:4") for _ in range(3)]
    assert "may be able to hide more" in " ".join(what_the_run_showed([about(), *hidden]).assumptions)
    assert "may be able to hide more" not in " ".join(what_the_run_showed(records("none")).assumptions)


# -- what follows ------------------------------------------------------------------------------------------------------


def test_a_forecast_is_the_one_worked_out_by_hand() -> None:
    """8 ranks at 1 Gbit/s. The run's 1 ms is two messages of 20 us and 0.96 ms besides."""
    shown = what_the_run_showed(records())
    costs, _ = costs_on(shown, 8)
    wire = Wire(20e-6, 8e-9)
    sent = 40_000_000 + 6 * SLOT
    ring_ms = 5 * (0.96 + 14 * 0.02) + 2 * 7 / 8 * 8e-6 * sent
    tree_ms = 5 * (0.96 + 6 * 0.02) + 2 * 7 / 8 * 8e-6 * sent
    by_ring = predict(shown, costs["none"], 8, wire, {"ring": ring_all_reduce})
    assert by_ring == (pytest.approx((52 + ring_ms - 30) / 1e3), pytest.approx((ring_ms - 30) / 1e3), "ring")
    assert predict(shown, costs["none"], 8, wire) == (
        pytest.approx((52 + tree_ms - 30) / 1e3), pytest.approx((tree_ms - 30) / 1e3), "tree"
    )  # fmt: skip
    # All of lowrank is hidden but its last bucket.
    last_ms = 0.96 + 6 * 0.02 + 2 * 7 / 8 * 8e-6 * 80_000
    assert predict(shown, costs["lowrank:4"], 8, wire).seconds == pytest.approx((50 + 15 + last_ms) / 1e3)


def test_the_runs_own_ranks_and_link_give_the_runs_own_steps() -> None:
    shown = what_the_run_showed(records())
    costs, _ = costs_on(shown, 2)
    for name, seen in shown.seen.items():
        again = predict(shown, costs[name], 2, Wire(20e-6, NS_A_BYTE * 1e-9))
        assert again == (pytest.approx(seen.step), pytest.approx(seen.exposed), "ring")


def test_trees_win_where_messages_count_and_rings_where_ranks_are_no_power_of_two() -> None:
    shown = what_the_run_showed(records())
    large, small = shown.costs["none"], LevelCost(1000, 200, 5)
    wire = Wire(20e-6, 8e-9)
    assert predict(shown, large, 12, wire).collective == "ring"
    assert predict(shown, small._replace(last_bytes=1000), 12, wire).collective == "tree"
    assert predict(shown, large, 2, wire).collective == "ring"  # the same for two


def test_levels_without_room_for_so_many_ranks_are_left_out_with_the_reason() -> None:
    costs, reasons = costs_on(what_the_run_showed(records()), 4096)
    assert list(costs) == ["none", "fp16", "lowrank:4"] and list(reasons) == ["int8"]
    assert reasons["int8"].endswith("; 14 bits are enough")
    assert "int8" in costs_on(what_the_run_showed(records()), 127)[0]


@pytest.mark.parametrize(
    ("name", "growth"),
    [
        ("fp16", 1), ("lowrank:4", 1), ("topk:0.01", 1), ("int16", 1), ("mine:3", 1),
        # 21 lanes of 3 bits in 64, then 2 of 14 in 32; the measurements behind them are lost in a million elements.
        ("signsgd", 16 / (64 / 21)), ("terngrad", 16 / (64 / 21)),
    ],
)  # fmt: skip
def test_payloads_are_as_large_on_any_number_of_ranks_but_for_sums_of_signs(name: str, growth: float) -> None:
    shown = what_the_run_showed(records("none", levels={"none": LEVELS["none"], name: LEVELS["int8"]}))
    cost = costs_on(shown, 4096)[0][name]
    assert cost.payload_bytes - 4094 * SLOT == pytest.approx(10_000_000 * growth, rel=1e-3)
    assert cost.last_bytes == pytest.approx(2_000_000 * growth, rel=1e-3)


def shown_by(costs: Mapping[str, LevelCost], link: Link, compute: float, hideable: float) -> Shown:
    return Shown(2, 2, "ring", 10**6, {}, dict(costs), link, compute, hideable, ())


costs_of_a_ladder = st.lists(st.floats(0.001, 1), min_size=2, max_size=5).map(
    lambda shares: {
        ("none", "fp16", "lowrank:4", "lowrank:2", "lowrank:1")[i]: LevelCost(
            round(share * 1e8), round(share * 1e7), 10, 0.002 * i
        )
        for i, share in enumerate(sorted(shares, reverse=True))
    }
)


@given(
    costs_of_a_ladder, st.floats(0, 1), st.floats(0, 1), st.integers(2, 5000), st.floats(1e-3, 1e3), st.floats(1, 100),
)  # fmt: skip
@thoroughly
def test_more_bytes_or_a_slower_link_are_never_faster(
    costs: dict[str, LevelCost], compute: float, hidden: float, ranks: int, gbit: float, slower: float
) -> None:
    shown = shown_by(costs, Link(1e-3, 1e-8), compute, hidden * compute)
    wire = Wire(20e-6, 8e-9 / gbit)
    steps = [predict(shown, cost._replace(codec=0.0), ranks, wire).seconds for cost in costs.values()]
    assert steps == sorted(steps, reverse=True)
    for cost, step in zip(costs.values(), steps, strict=True):
        for worse in (wire._replace(beta=wire.beta * slower), wire._replace(alpha=wire.alpha + slower * 1e-5)):
            # What one message takes is split off the same 1 ms of the run, so more of it is never less in all.
            assert predict(shown, cost, ranks, worse).seconds >= step - 1e-9
        ring_only = predict(shown, cost, ranks, wire, {"ring": ring_all_reduce})
        assert ring_only.seconds >= predict(shown, cost, ranks, wire).seconds - 1e-9


@given(costs_of_a_ladder, st.floats(0.001, 1), st.floats(0, 1), st.sampled_from((2, 3, 8, 100, 4096)))
@thoroughly
def test_compression_pays_just_below_its_limit_and_not_above(
    costs: dict[str, LevelCost], compute: float, hidden: float, ranks: int
) -> None:
    shown = shown_by(costs, Link(1e-3, 1e-8), compute, hidden * compute)
    limit = pays_up_to(shown, ranks, 20e-6)
    able, _ = costs_on(shown, ranks)
    for gbit in (1e-3, 1e-2, 0.1, 1, 10, 100, 1e3, 1e4, limit * 0.99, limit * 1.01):
        if not 0 < gbit < math.inf or math.isclose(gbit, limit, rel_tol=1e-3):  # which is found by halving
            continue
        steps = {name: predict(shown, cost, ranks, Wire(20e-6, 8e-9 / gbit)) for name, cost in able.items()}
        pays = best_level(steps, shown.prices) != DENSE
        assert not pays if gbit > limit else pays or gbit < 0.9 * limit


def test_the_best_level_is_the_least_compression_among_the_fastest() -> None:
    def best(*seconds: float, **prices: float) -> str:
        steps = {name: Step(value, 0.0, "ring") for name, value in zip(LEVELS, seconds, strict=False)}
        return best_level(steps, prices)

    assert best(1.0, 1.0) == "none" and best(1.0, 1 - MARGIN) == "none" and best(1.0, 0.9, 0.899) == "fp16"
    assert best(1.0, 0.9, 0.5, 0.499) == "int8" and best(1.0, 0.9, 0.5, 0.499, int8=1.5) == "lowrank:4"


# -- what is printed ---------------------------------------------------------------------------------------------------


def test_the_table_holds_the_forecasts(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, log, "--ranks", "8,4096", "--gbit", "1,100")
    rows = forecasts(text)
    assert list(rows) == [("8", "1"), ("8", "100"), ("4,096", "1"), ("4,096", "100")]
    tree_ms = 5 * (0.96 + 6 * 0.02) + 2 * 7 / 8 * 8e-6 * (40_000_000 + 6 * SLOT)
    last_ms = 0.96 + 6 * 0.02 + 2 * 7 / 8 * 8e-6 * 80_000
    dense, low = 22 + tree_ms, 65 + last_ms
    half_ms = tree_ms - 2 * 7 / 8 * 8e-6 * 20_000_000
    speed_up = f"{(26 + half_ms) / low:.2f} x"  # against fp16, which has 4 ms more of codec than dense
    share = f"{(tree_ms - 30) / dense:.0%}"
    assert rows["8", "1"] == [f"{dense:.2f}", share, "lowrank:4", f"{low:.2f}", speed_up, "tree"]
    assert rows["8", "100"][2] == "none" and rows["8", "100"][4] == "1.00 x"
    assert "On 4,096 ranks without int8: int8 leaves no level" in text and "On 8 ranks without" not in text


def test_what_the_run_showed_stands_first(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, log)
    facts = " ".join(text.split())
    assert "Run: 2 ranks on 2 hosts, all-reduce by ring. A step computes and waits for input 50.00 ms, which" in facts
    assert "which hides 30.00 ms of communication." in facts
    assert "1.00 ms and 16.000 ms a MB, as by links of 0.5 Gbit/s" in facts
    rows = {cells[0]: cells[1:] for cells in (re.split(r"\s{2,}", line) for line in text.splitlines())}
    assert rows["none"] == ["40.000", "8.000", "5", "2.00", "645.00", "667.00", "667.00"]
    assert rows["int8"][3:6] == ["9.50", "-", "-"]
    assert max(map(len, text.splitlines())) <= 110


def test_the_usual_questions_and_the_runs_own_rate(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [(ranks, rate) for ranks in ("8", "64", "1,024", "4,096") for rate in ("0.5", "1", "10", "25", "100")]
    assert list(forecasts(printed(capsys, log))) == asked


def test_two_levels_are_worked_out_by_hand(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Dense sums within a host on top of a job of as many ranks as there are hosts."""
    text = printed(capsys, log, "--ranks", "8x4,16", "--gbit", "1", "--local-gbit", "40")
    assert "Two levels (HVDPLUS_TWO_LEVEL), 40 Gbit/s within a host" in text and " 8x4 " in text
    shown = what_the_run_showed(read_log(log))
    wire, inside = Wire(20e-6, 8e-9), Wire(2e-6, 8e-9 / 40)
    for name, cost in costs_on(shown, 8)[0].items():
        step, alone = predict_two_level(shown, cost, 8, 4, wire, inside), predict(shown, cost, 8, wire)
        dense = 2 * 3 * (2e-6 + 4 * shown.elements / 4 * 8e-9 / 40)
        shared = cost.messages * 2 * 3 * 2e-6 + 2 * 3 * cost.payload_bytes / 4 * 8e-9 / 40
        assert step.seconds == pytest.approx(alone.seconds + dense + shared), name
    assert "Two levels" not in printed(capsys, log, "--ranks", "16", "--gbit", "1")


def test_two_levels_are_those_of_the_all_reduce_that_is_asked_for(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [printed(capsys, log, "--ranks", "8x4", "--gbit", "1", "--all-reduce", kind) for kind in ALL_REDUCES]
    ring, tree = (text[text.index("Two levels") :].split("Compression stops")[0] for text in texts)
    assert ring != tree
    shown = what_the_run_showed(read_log(log))
    cost, wire, inside = costs_on(shown, 8)[0]["none"], Wire(20e-6, 8e-9), Wire(2e-6, 8e-9 / 40)
    one_kind = [predict_two_level(shown, cost, 8, 4, wire, inside, {kind: ALL_REDUCES[kind]}) for kind in ALL_REDUCES]
    assert one_kind[0].seconds != one_kind[1].seconds


def test_a_run_with_local_steps_is_no_ground_for_a_plan(log: str) -> None:
    with pytest.raises(ValueError, match="took local steps.* let one run in lock-step"):
        what_the_run_showed([*read_log(log), {"kind": "local", "every": 16}])


def test_where_compression_stops_paying(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, log, "--ranks", "8,64")
    limit = pays_up_to(what_the_run_showed(records()), 8, 20e-6)
    assert f"  on 8 ranks: above {limit:.3g} Gbit/s\n" in text and "  on 64 ranks: above " in text
    assert f"(no level saves more than {MARGIN:.0%} of the time to the same loss)" in text


def test_where_it_stops_is_unknown_to_a_run_that_had_no_other_level(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = [{**about(), "levels": {"none": about()["levels"]["none"]}}, window("none"), window("none")]
    text = printed(capsys, write(tmp_path / "dense.jsonl", dense), "--ranks", "8")
    assert "  on 8 ranks: unknown, as the run had no other level" in text and "never pays" not in text


def test_fewer_ranks_than_the_runs_send_no_less_than_their_payloads() -> None:
    shown = what_the_run_showed(records(ranks=1024))
    assert costs_on(shown, 8)[0]["lowrank:4"].payload_bytes == shown.costs["lowrank:4"].payload_bytes


def test_the_kind_of_all_reduce_and_the_latency_can_be_chosen(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    def dense(*argv: str) -> float:
        return float(forecasts(printed(capsys, log, "--ranks", "1024", "--gbit", "100", *argv))["1,024", "100"][0])

    ring, tree = dense("--all-reduce", "ring"), dense("--all-reduce", "tree")
    assert ring > tree == dense()
    assert dense("--latency-us", "100") > tree


def test_what_the_run_rejected_is_no_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A level over the error budget loses accuracy, however fast it is."""
    why = "the residual at lowrank:4 is 3.10 times the gradient (budget 1)"
    decision = {"kind": "decision", "step": 80, "from": "lowrank:4", "to": "fp16", "reason": f"{why}; fp16 is best"}
    before = printed(capsys, write(tmp_path / "before.jsonl", records()), "--gbit", "1")
    assert {row[2] for row in forecasts(before).values()} == {"lowrank:4"}
    text = printed(capsys, write(tmp_path / "after.jsonl", [*records(), decision]), "--gbit", "1")
    assert {row[2] for row in forecasts(text).values()} == {"fp16", "int8"}
    assert f"No forecast for lowrank:4: the run rejected it from step 80 on, since {why}." in " ".join(text.split())
    forbidden = {"kind": "forbid", "step": 5, "level": "fp16", "reason": "loss scaling"}
    only_dense = printed(capsys, write(tmp_path / "log", [*records(ladder=list(LEVELS)), forbidden]), "--gbit", "1")
    assert {row[2] for row in forecasts(only_dense).values()} == {"none"}
    assert "No forecast for int8: " in only_dense and "it never pays" in only_dense


def test_a_wrong_level_is_named_before_a_missing_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert "int9x" in refused(capsys, "int9x")


def test_assumptions_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(printed(capsys, write(tmp_path / "log", records("none", hosts={"a": 2}))).split())
    assert "Only none ran" in text and "All ranks were on one host" in text
    assert "A message takes 20 us (--latency-us)" in text and "its 2 messages would take" in text
    assert "Not in the log: slow ranks" in text


def test_a_level_may_pay_never_or_always(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = {"none": LEVELS["none"], "fp16": {**LEVELS["none"], "codec_ms": 9.0}}
    text = printed(capsys, write(tmp_path / "never.jsonl", records("none", levels=same)), "--ranks", "8")
    assert "  on 8 ranks: it never pays\n" in text
    quick = [window("none"), window("fp16", codec_ms=0.1, step_ms=COMPUTE_MS + 0.1 + 295)]
    slow = [about(), *[{**one, "codec_ms": 40.0} if one["level"] == "none" else one for one in quick]]
    text = printed(capsys, write(tmp_path / "always.jsonl", slow), "--ranks", "8")
    assert "  on 8 ranks: it always pays\n" in text


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([about(levels=None)], "does not say what the levels send (an older hvdplus wrote it)"),
        ([window("none")], "does not say what the levels send"),
        ([about(levels={"none": {"messages": 5}})], "should hold payload_bytes, last_bytes and messages"),
        ([about(levels={"none": 3})], "should hold payload_bytes"),
        ([about(ranks=1)], "ran on one rank, which shows nothing of a network"),
        ([about()], "no complete window of steps at a level"),
        ([about(), window("none", overlapped_comm_ms=None)], "no complete window"),
        ([], "the log is empty; the job wrote nothing"),
    ],
)
def test_a_log_that_does_not_hold_enough_is_named_with_what_is_missing(
    lines: list[dict[str, Any]], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "run.jsonl", lines)
    line = refused(capsys, path)
    assert words in line and line.startswith(f"hvdplus plan: {path}")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--ranks", "8,,64"), "--ranks wants a whole number of at least 1. Received: ''"),
        (("--ranks", "1,8"), "--ranks wants at least 2 with a run log. Received: '1,8'"),
        (("--ranks", "8x4x2"), "--ranks wants numbers, or hosts x ranks of each such as 8x4. Received: '8x4x2'"),
        (("--ranks", "8x1", "--local-gbit", "40"), "--local-gbit goes with --ranks such as 8x4"),
        (("--gbit", "1,fast"), "--gbit wants a rate above 0 in Gbit/s, such as 10. Received: 'fast'"),
        (("--latency-us", "0"), "--latency-us wants microseconds above 0, such as 20. Received: '0'"),
        (("--all-reduce", "star"), "--all-reduce wants ring or tree. Received: 'star'"),
        (("int8",), "is a run log, which brings its own model and levels"),
        (("--shape", "10"), "is a run log, which brings its own model and levels"),
        (("--parameters", "10"), "is a run log, which brings its own model and levels"),
    ],
)
def test_a_wrong_argument_is_named(
    argv: tuple[str, ...], words: str, log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, log, *argv)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"cannot read {tmp_path}/no.jsonl: No such file" in refused(capsys, f"{tmp_path}/no.jsonl")
    assert "cannot read runs/42: No such file" in refused(capsys, "runs/42")
    (tmp_path / "other").write_text("{}\n")
    assert f"{tmp_path}/other, line 1: expected" in refused(capsys, f"{tmp_path}/other")


@pytest.mark.parametrize("argv", [("--latency-us", "20"), ("--all-reduce", "ring")])
def test_what_only_a_run_log_can_answer_is_refused_without_one(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{argv[0]} goes with a run log" in refused(capsys, "--shape", "10", *argv)


def test_all_reduces_are_named_as_the_option_takes_them() -> None:
    assert list(ALL_REDUCES) == ["ring", "tree"]


def test_a_level_as_seen_adds_up() -> None:
    assert Seen(1.0, 0.5, 0.1, 0.25, 0.5, 8.0).comm == 0.75


def test_local_steps_pay_where_exchanges_take_long() -> None:
    """And what they cost is worked out by hand: nothing hides an exchange."""
    from hvdplus.control.interval import LADDER, MOST, PRICE

    shown = what_the_run_showed(
        [about(), *(window(level) for level in ("none", "fp16", "lowrank:4") for _ in range(3))]
    )
    costs, _ = costs_on(shown, 2)
    ring = {"ring": ring_all_reduce}
    slow, fast = (best_local(shown, costs, 2, Wire(1e-5, 8e-9 / gbit), ring) for gbit in (0.01, 1000.0))
    assert fast.every < slow.every <= MOST
    wire = Wire(1e-5, 8e-9 / 0.01)
    fixed = max(0.0, shown.link.alpha - 2e-5)
    cost = costs[slow.level]
    exchange = cost.codec + cost.messages * (fixed + 2e-5) + cost.payload_bytes * wire.beta
    assert slow.level in LADDER, "low rank is for gradients"
    by_hand = (shown.compute + exchange / slow.every) * (1 + PRICE * (slow.every - 1)) * shown.prices.get(slow.level, 1)
    assert slow.cost == pytest.approx(by_hand, rel=1e-6)
