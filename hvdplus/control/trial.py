"""A trial: held level and challenger in turns, what their blocks show, and whether another pair is worth its time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from hvdplus.control.blocks import FAR, Block, Guess, ratio_of

CLEAR, HOPELESS = 0.05, 0.3
"""A loss that shows in three steps ends a trial's turn, if it is as large as that and far from noise. Steps that do not
count otherwise show the second, if the fastest of them does."""


class Verdict(NamedTuple):
    """What a trial has shown so far."""

    ratio: Guess
    """Of the challenger's seconds over those of the level held, as a logarithm, with what was known before."""
    pairs: int
    wins: bool
    at_stake: float
    """What further pairs may bring; 0: nothing."""
    interval: str
    """The ratio of costs with its bounds."""


def judge(
    turns: Sequence[tuple[int, Block]],
    challenger: int,
    prior: Guess,
    *,
    price: float,
    need: float,
    certainty: float,
    asked: float,
    pairs: int,
) -> Verdict:
    """Judge a trial by its turns, see ``ratio_of``.

    Args:
        prior: what was known of the ratio of seconds.
        price: logarithm of the ratio of the prices of delay.
        need: gain that the challenger has to show, as a logarithm.
        certainty: standard deviations between the ratio and its bounds.
        asked: by so many of them the challenger has to be better; 0: it need not prove it.
        pairs: most pairs of a trial.
    """
    measured, seen = ratio_of(turns, challenger)
    ratio = prior.updated(measured.mean, measured.variance)
    gain, deviation = -ratio.mean - price - need, math.sqrt(ratio.variance)
    left, at_stake = pairs - seen + (0.5 if turns[-1][0] == challenger else 0.0), 0.0
    if left and abs(gain) <= (asked or certainty) * deviation:
        at_stake = promised(gain if asked else -abs(gain), ratio.variance, measured.variance * seen / left, asked)
    low, middle, high = (
        math.exp(ratio.mean + price + off) for off in (-certainty * deviation, 0.0, certainty * deviation)
    )
    return Verdict(ratio, seen, gain > asked * deviation, at_stake, f"{middle:.3f} [{low:.3f}, {high:.3f}]")


def hopeless(steps: Sequence[float], held: Block, extra: float, block_steps: int, *, settled: bool) -> bool:
    """Whether the challenger is so much dearer already that the rest of its turn is not worth its time.

    Args:
        steps: seconds of its steps in this turn.
        held: the last turn of the level held, of ``block_steps`` steps or so.
        extra: what it has to make up for beside its seconds, as a logarithm.
        settled: whether these steps count.
    """
    loss = math.log(max(median(steps) if settled else min(steps), 1e-9) / held.step) + extra
    variance = block_steps * held.step_variance / len(steps) + held.step_variance  # first that of one step
    return loss > max(CLEAR if settled else HOPELESS, FAR * math.sqrt(variance))


def promised(gain: float, variance: float, noise: float, certainty: float) -> float:
    """What a trial may bring: the mean of the gain that it then shows, where that convinces; else 0.

    The value of a measurement to a decision (Raiffa and Schlaifer, 1961). A gain convinces if it lies ``certainty`` of
    its standard deviations above 0.

    Args:
        gain, variance: as known before the trial, of a logarithm.
        noise: variance of what the trial measures.
    """
    if not variance:
        return max(0.0, gain)
    shown = variance / math.sqrt(variance + noise)  # standard deviation of the gain as it will be known
    z = (certainty * math.sqrt(variance * noise / (variance + noise)) - gain) / shown
    return gain * math.erfc(z / math.sqrt(2)) / 2 + shown * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
