"""The benchmark of delay: step ratios from curves, and fits that find what made-up data were made with."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

for module in ("torch", "sklearn", "matplotlib"):
    pytest.importorskip(module)

import delay  # noqa: E402, it imports them
from delay import Curve, Error, Point, Setting, best_so_far, equivalent_steps, smooth, steps_to  # noqa: E402

SETTINGS = [Setting(task, "SGD", rate, False) for task in ("digits", "text") for rate in (0.1, 0.03)]


def point(setting: Setting, ratio: float, error2: float, **others: Any) -> Point:
    return Point(setting, 0, "lowrank:4", 0.8, 100.0, ratio, False, {"e²": error2, **others})


def test_steps_to_interpolates_and_says_where_a_loss_is_never_reached() -> None:
    curve = Curve((10, 20, 30), (4.0, 2.0, 1.0))
    assert steps_to(curve, 3.0) == pytest.approx(15)
    assert steps_to(curve, 1.0) == pytest.approx(30)
    assert steps_to(curve, 5.0) == 10
    assert steps_to(curve, 0.9) is None


def test_a_loss_counts_once_it_was_reached() -> None:
    assert best_so_far(Curve((1, 2, 3), (2.0, 1.0, 3.0))).losses == (2.0, 1.0, 1.0)


def test_smoothing_leaves_a_straight_line_as_it_is() -> None:
    steps = tuple(range(0, 50, 5))
    smoothed = smooth(Curve(steps, tuple(100.0 - step for step in steps)), 5)
    assert smoothed.losses == pytest.approx([100 - step for step in smoothed.steps])
    assert smoothed.steps[0] == 10


def test_equivalent_steps_follow_a_power_law() -> None:
    lengths = Curve((50, 100, 200), tuple(8 / length**0.5 for length in (50, 100, 200)))
    assert equivalent_steps(lengths, 8 / 150**0.5) == pytest.approx(150)
    assert equivalent_steps(lengths, 2.0) is None
    assert equivalent_steps(lengths, 1e-3) == pytest.approx(200)


@pytest.mark.parametrize("kappa", [0.003, 0.05, 2.0])
def test_a_fit_finds_kappa(kappa: float) -> None:
    draw = random.Random(0)
    xs = [10 ** draw.uniform(-2, 1) for _ in range(300)]
    found = delay.fit([(x, (1 + kappa * x) * math.exp(draw.gauss(0, 0.001))) for x in xs])
    assert found.kappa == pytest.approx(kappa, rel=0.02)
    assert found.r2 > 0.95 and found.error < 0.002


def test_a_fit_of_the_power_finds_both() -> None:
    draw = random.Random(0)
    xs = [math.sqrt(10 ** draw.uniform(-2, 1)) for _ in range(100)]
    power, kappa, error = delay.fit_power([(x, 1 + 0.3 * x) for x in xs])
    assert (power, kappa) == (pytest.approx(1.0), pytest.approx(0.3, rel=1e-3))
    assert error < 1e-3


def test_what_is_left_out_is_predicted_from_the_others() -> None:
    same = [point(setting, 1 + 0.1 * x, x) for setting in SETTINGS for x in (0.5, 1.0, 2.0)]
    assert delay.left_out(same, "e²") == pytest.approx(0, abs=1e-4)
    other = [p._replace(ratio=1 + 3 * (p.ratio - 1)) if p.setting.task == "text" else p for p in same]
    assert delay.left_out(other, "e²") > 0.1


def test_an_interval_holds_the_kappas_of_its_settings() -> None:
    kappas = dict(zip(SETTINGS, (0.05, 0.1, 0.15, 0.2), strict=True))
    points = [point(setting, 1 + kappa * x, x) for setting, kappa in kappas.items() for x in (0.5, 1.0, 2.0)]
    low, high = delay.interval(points, lambda drawn: delay.fit(delay.pairs_of(drawn, "e²")).kappa, draws=100)
    assert 0.05 <= low < 0.12 < high <= 0.2


def test_energy_is_found_with_its_power() -> None:
    def error(share: float, power: float) -> Error:
        return Error(SETTINGS[0], 0, "lowrank:4", share, [], 0.03 * (1 / share - 1) ** power)

    for power in (1.0, 1.5):
        found = delay.fit_energy([error(share, power) for share in (0.01, 0.02, 0.1)], power=None)
        assert (found.scale, found.power) == (pytest.approx(0.03), pytest.approx(power))
        assert found.scatter == pytest.approx(1)
    judged = delay.judge_energy([error(share, 1.0) for share in (0.01, 0.1)], 0.01)
    assert (judged.scatter, judged.within) == (pytest.approx(3), 0)


def test_a_level_without_a_residual_has_no_error() -> None:
    readings = [delay.Reading(step, 0.0, 0.0, 1.0, 0.5, 0.5, 0.0) for step in range(20)]
    found = delay.predictors(readings, 20, 0.5)
    assert found["e²"] == found["gain"] == found["progress"] == found["held"] == 0


def test_figures_survive_being_saved(tmp_path: Any) -> None:
    figures = delay.Figures([point(SETTINGS[0], 1.25, 0.5)], [Error(SETTINGS[0], 0, "int8", 0.25, [1.0] * 4, 1.0)], [])
    delay.save(figures, tmp_path / "delay.json")
    assert delay.load(tmp_path / "delay.json") == figures
