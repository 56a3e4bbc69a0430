"""What `benchmarks/adaptive.py` makes of step times: ratios, turns and verdicts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from adaptive import (
    BLOCK_SECONDS,
    BLOCK_STEPS,
    DENSE_LIMIT,
    LONG_SECONDS,
    ORACLE_LIMIT,
    Cell,
    Race,
    Ratio,
    against,
    block_steps,
    cheapest,
    clear,
    errors,
    errors_in,
    in_all_rounds,
    in_turns,
    judge_cells,
    judge_race,
    main,
    next_step,
    prices_in,
    prices_of,
    ratio,
    windows,
)
from ddp import AUTOS, Measured, by_cost, compare, over, versus
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.compression import parse
from hvdplus.settings import Settings

times = st.floats(1e-4, 10)
pairs = st.lists(st.tuples(times, times), min_size=2, max_size=20)


@given(pairs, st.floats(0.1, 10))
def test_a_ratio_is_of_pairs(pairs: list[tuple[float, float]], factor: float) -> None:
    above, below = zip(*pairs, strict=True)
    found = ratio(above, below)
    assert found.low <= found.middle <= found.high
    assert min(a / b for a, b in pairs) * (1 - 1e-9) <= found.middle <= max(a / b for a, b in pairs) * (1 + 1e-9)
    assert ratio(below, above) == pytest.approx((1 / found.middle, 1 / found.high, 1 / found.low), rel=1e-6)
    assert ratio([factor * a for a in above], below) == pytest.approx([factor * part for part in found], rel=1e-6)
    # What befalls both of a pair is no part of it.
    assert ratio([factor * a for a in above], above) == pytest.approx((factor,) * 3, rel=1e-6)


def test_the_bounds_of_a_ratio_are_students() -> None:
    """Logarithms of mean 0 and standard deviation 0.1, ten of them: 2.262 standard errors, from any table of t."""
    steps = [math.exp(sign * 0.1 * math.sqrt(9 / 10)) for sign in (1, -1) * 5]
    width = math.exp(2.262 * 0.1 / math.sqrt(10))
    assert ratio(steps, [1.0] * 10) == pytest.approx((1, 1 / width, width), rel=1e-4)


@given(st.floats(1e-4, 100))
def test_blocks_hold_pairs_of_steps_unless_these_are_long(seconds: float) -> None:
    steps, (least, most) = block_steps(seconds), BLOCK_STEPS
    if seconds > LONG_SECONDS:
        assert steps == 1
    else:
        assert steps % 2 == 0 and least <= steps <= most
        assert abs(steps * seconds - BLOCK_SECONDS) <= seconds or steps in BLOCK_STEPS


class Steady:
    """Contestants whose steps all take the same."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.rounds = seconds, list[list[str]]()
        self.lab = SimpleNamespace(burst_seconds=0.0)

    def steps(self, who: str, count: int) -> dict[str, list[float]]:
        return {"seconds": [self.seconds[who]] * count}

    def blocks(self, turns: Sequence[tuple[str, int]], rest_seconds: float) -> list[float]:
        self.rounds.append([who for who, _ in turns])
        assert all(length == block_steps(self.seconds[who]) for who, length in turns)
        return [self.seconds[who] for who, _ in turns]


def test_those_of_whom_no_doubt_is_left_drop_out() -> None:
    ranks: Any = Steady(auto=0.01, dense=0.03, near=0.011)
    wanted, noted = {6: ["auto", "near"], 7: ["auto", "near"]}, list[int]()

    def note() -> None:
        noted.append(len(ranks.rounds))

    seconds = in_turns(ranks, list(ranks.seconds), 6, lambda each: wanted.get(len(each["auto"]), []), 60.0, note)
    assert [len(seconds[who]) for who in ("auto", "near", "dense")] == [8, 8, 6]
    assert all(sorted(turns) == ["auto", "dense", "near"] for turns in ranks.rounds[:6])
    assert len({tuple(turns) for turns in ranks.rounds}) > 1, "the order changes"
    assert against({"auto": [1.0, 1.0, 9.0], "dense": [2.0, 2.0]}, "dense").middle == pytest.approx(0.5)
    assert len(ranks.rounds) == len(noted) == 8


def test_rounds_end_when_their_time_is_over() -> None:
    ranks: Any = Steady(auto=0.01, dense=0.03)
    seconds = in_turns(ranks, ["auto", "dense"], 5, list, 0.0)
    assert [len(blocks) for blocks in seconds.values()] == [5, 5]


def cell(rate: str, oracle: Ratio, dense: Ratio) -> Cell:
    return Cell(2, "mlp", rate, "fp16", "fp16", "horovod", oracle, dense, 10.0, 10.0, {}, {}, {}, [])


def test_the_bound_is_judged_and_the_worst_cell_named() -> None:
    good = cell("1gbit", Ratio(1.0, 0.99, ORACLE_LIMIT), Ratio(0.5, 0.4, DENSE_LIMIT))
    wide = cell("5gbit", Ratio(1.0, 0.9, ORACLE_LIMIT + 0.01), Ratio(0.9, 0.8, 1.0))
    assert [verdict.passed for verdict in judge_cells([good], [good])] == [True, True, True]
    oracle, dense = judge_cells([good, wide], [])
    assert not oracle.passed and oracle.figures == "1 of 2 cells; worst: 2 hosts, mlp, 5gbit, 1.000 [0.900, 1.040]"
    assert dense.passed and dense.figures.startswith("2 of 2 cells; worst: 2 hosts, mlp, 1gbit")


def test_a_race_is_judged_by_the_best_fixed_choice() -> None:
    def curves(seconds: float, *ends: float) -> list[list[tuple[float, float]]]:
        return [[(seconds / 2, 4.0), (seconds, 2.9), (2 * seconds, end)] for end in ends]

    run = Race(
        "text",
        "1gbit",
        700,
        (3.0, 2.85),
        {
            "auto": curves(10, 2.80, 2.82),
            "alone": curves(20, 2.80, 2.82),
            "horovod": curves(25, 2.79, 2.81),
            "ddp powersgd:4:2": curves(12, 2.9, 2.9),
            "ddp powersgd:8:2": curves(14, 2.9, 2.9),
            "level int8": curves(9, 2.9, 2.9),
        },
    )
    fixed, levels = judge_race(run, 1.3)
    assert not fixed.passed and re.match(
        r"1\.20 x \(seeds 1\.20 to 1\.20\) at 3 bits; ddp powersgd:4:2: 12\.0 s, auto: 10\.0 s", fixed.figures
    )
    assert not levels.passed and levels.figures.startswith("0.90 x")
    assert all(verdict.passed for verdict in judge_race(run._replace(targets=(2.85,)), 1.3)[:1]), (
        "PowerSGD is never there"
    )
    assert not any(verdict.passed for verdict in judge_race(run._replace(targets=(2.5,)), 1.3)), "nobody is there ever"


def test_delay_has_its_price_in_a_cell() -> None:
    seconds = {"auto": [1.0, 1.0], "level int8": [1.0, 1.0], "level lowrank:8": [0.98, 0.98]}
    levels = ["level int8", "level lowrank:8"]
    assert cheapest(seconds, levels, {}) == "level lowrank:8"
    assert cheapest(seconds, levels, {"lowrank:8": 1.1}) == "level int8"
    assert against(seconds, "level lowrank:8", 1.1).middle == pytest.approx(1 / 0.98 / 1.1)
    paid = [1.1, 1.0]  # it left lowrank between its two blocks
    assert against(seconds, "level int8", 1.0, paid).middle == pytest.approx(1.1**0.5)


def test_the_price_is_of_the_median_error_of_all_windows_from_a_step_on() -> None:
    def window(step: int, level: str, error: float | None, steps: int = 10) -> dict[str, Any]:
        return {"kind": "window", "first_step": step, "last_step": step + steps - 1, "level": level, "error": error}

    class Log:
        def records(self, who: str) -> list[dict[str, Any]]:
            assert who == "auto"
            readings = [0.1, 0.1, 2.0, 9.0, 1.0]
            log = [window(10 * place, "powersgd:8+fp16", error) for place, error in enumerate(readings)]
            log += [window(50, "powersgd:8+fp16", None), window(60, "powersgd:8+fp16", 7.0, 2)]  # 2 steps count as 2
            return [*log, window(62, "fp16", None), window(72, "draining", None), {"kind": "decision"}]

    ranks: Any = Log()
    kappa = Settings().delay_price * parse("powersgd:8+fp16").delay_weight
    assert kappa != Settings().delay_price
    assert prices_of(ranks, "auto", 20) == {"powersgd:8+fp16": pytest.approx(1 + kappa * 2.0)}
    assert prices_of(ranks, "auto", 40) == {"powersgd:8+fp16": pytest.approx(1 + kappa)}
    assert errors(ranks, "auto", 0)["powersgd:8+fp16"] == pytest.approx(1.0)
    assert errors_in(windows(ranks, "auto"), 10, 35)["powersgd:8+fp16"] == pytest.approx((0.1 + 2.0) / 2)
    assert next_step(ranks, "auto") == 82
    assert prices_in(windows(ranks, "auto"), 40, 90) == {"powersgd:8+fp16": pytest.approx(1 + kappa)}
    assert prices_in(windows(ranks, "auto"), 82, 90) == {}, "no error was read there"
    assert "fp16" not in prices_in(windows(ranks, "auto"), 0, 90)


def test_a_ratio_is_clear_once_its_bounds_are_narrow_or_far_from_the_limit() -> None:
    assert clear(Ratio(1.02, 1.01, 1.03), 1.02) and clear(Ratio(1.2, 1.15, 1.26), 1.02)
    assert not clear(Ratio(1.0, 0.96, 1.04), 1.02), "within the limit by its middle alone"


def test_the_hooks_auto_is_held_against_a_level_that_stayed_as_long() -> None:
    one, two, three = AUTOS
    seconds = {one: [1.0] * 6, two: [0.9] * 6, three: [1.0 / 0.9] * 6}
    seconds |= {"hook fp16": [1.2] * 6, "hook int8": [1.0] * 6, "hook none": [0.5] * 3}
    others = {"ddp": [1.0] * 3, "ddp fp16": [1.2] * 3, "ddp powersgd:4:2": [2.0] * 4}
    seconds |= others | {"hook lowrank:4": [1.0] * 4, "hook lowrank:8+fp16": [1.5] * 3}
    assert in_all_rounds(seconds, one, "hook fp16") and not in_all_rounds(seconds, "hook none", "ddp")
    ran, paid = dict.fromkeys(AUTOS, ["int8"] * 6), {one: [1.0] * 6, two: [1.21] * 6, three: [1.21] * 6}
    prices = {"none": [1.0], "fp16": [1.0], "int8": [0.9, 1.1, 1.3]}
    measured = Measured(seconds, ran, paid, prices, {})
    assert by_cost(measured) == ["int8", "fp16"], "none, the fastest, dropped out"
    *pairs, (mine, other, found, limit) = compare(measured)
    assert (mine, other, limit) == ("hook auto", "hook int8, times their prices", 1.05)
    assert found.middle == pytest.approx(1.21 ** (2 / 3) / 1.1)
    assert over(measured, "int8", [two]).middle == pytest.approx(0.9 * 1.21 / 1.1)
    assert {mine: found.middle for mine, _, found, _ in pairs} == pytest.approx(
        {"hook lowrank:4": 0.5, "hook lowrank:8+fp16": 0.75, "hook fp16": 1.0, "hook none": 0.5}
    )

    # Further blocks of a pair count as those of the rounds do; one without its other does not.
    measured.more["hook fp16", "ddp fp16"] = {"hook fp16": [2.4] * 3, "ddp fp16": [1.2] * 4}
    assert versus(measured, "hook fp16", "ddp fp16").middle == pytest.approx(2**0.5)
    assert versus(measured, "hook none", "ddp").middle == pytest.approx(0.5)


def test_parts_that_are_measured_on_two_hosts_are_refused_on_four(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--quick", "--hosts", "4", "--only", "race"])
    assert ended.value.code == 2 and "--only race is measured on two hosts" in capsys.readouterr().err
