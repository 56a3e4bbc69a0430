"""What codecs take within training is told from levels that were measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.control.handling import CODEC_ERROR, PACKING, Seen, codec_of
from hvdplus.control.link import LevelCost

ALONE = (0.0, 0.015, 0.040, 0.050, 0.040)
COSTS = tuple(
    LevelCost(payload, 0, 1, codec=codec, keeps_residual=keeps, passes=passes)
    for payload, codec, keeps, passes in zip(
        (40_000_000, 20_000_000, 10_000_000, 400_000, 300_000),
        ALONE,
        (False, False, True, True, True),
        (1, 1, 1, 2, 1),
        strict=True,
    )
)
NONE, FP16, INT8, TWO_PASSES, LOWRANK = range(5)
HANDLED = (1, 1, 3, 4, 3)
TRAVEL = (0.005, 0.030, 0.080, 0.003, 0.002)
"""Seconds in which each level's bytes travel behind computation and codec."""


def took(level: int, once: float, share: float) -> Seen:
    """Within training: ``once`` seconds each time that gradients are handled, and a share of the time of travel."""
    return Seen(ALONE[level] + once * HANDLED[level] + share * TRAVEL[level], TRAVEL[level])


@given(once=st.floats(0.001, 0.02), share=st.floats(0.0, 0.6))
def test_two_levels_show_what_handling_and_travel_take(once: float, share: float) -> None:
    seen = {level: took(level, once, share) for level in (FP16, INT8)}
    for level in (TWO_PASSES, LOWRANK):
        guess, true = codec_of(level, COSTS, seen, TRAVEL[level]), took(level, once, share).codec
        assert abs(guess.mean - true) <= 2.5 * guess.variance**0.5


def test_what_travel_took_at_one_level_is_not_expected_where_little_travels() -> None:
    """As measured over Gloo on a host of one core, where all of it had been taken for handling."""
    seen = {INT8: Seen(0.098, 0.080), FP16: Seen(0.030, 0.028)}
    guess = codec_of(LOWRANK, COSTS, seen, TRAVEL[LOWRANK])
    assert guess.mean == pytest.approx(0.074, rel=0.15)
    assert guess.mean < codec_of(LOWRANK, COSTS, seen, 0.080).mean - 0.01, "if as much travelled"


@given(codec=st.floats(0.0, 0.5), travel=st.floats(0.0, 0.5))
def test_it_never_takes_less_than_alone(codec: float, travel: float) -> None:
    guess = codec_of(LOWRANK, COSTS, {INT8: Seen(codec, travel)}, 0.01)
    assert guess.mean >= ALONE[LOWRANK] and guess.variance > 0


def test_before_anything_is_known_packing_comes_on_top() -> None:
    for seen, dense in (({}, 0.0), ({NONE: Seen(0.001, 0.0)}, 0.001)):
        guess = codec_of(LOWRANK, COSTS, seen, 0.0)
        assert guess.mean == pytest.approx((1 + PACKING) * ALONE[LOWRANK] + dense)
        assert guess.variance == pytest.approx((CODEC_ERROR * guess.mean) ** 2)
        assert codec_of(FP16, COSTS, seen, 0.0).mean == pytest.approx(ALONE[FP16] + dense)


def test_the_more_was_measured_the_surer_it_is() -> None:
    variances, seen = [], {}
    for level in (FP16, INT8, TWO_PASSES):
        seen[level] = took(level, 0.01, 0.3)
        variances.append(codec_of(LOWRANK, COSTS, seen, TRAVEL[LOWRANK]).variance)
    assert variances[0] > variances[1] > variances[2]
