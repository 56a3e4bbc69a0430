"""Blocks of steps, and what blocks of two levels in turns say about the ratio of their seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from hvdplus.control.meter import StepTimes

FAR = 3.0
"""Standard deviations beyond which a measurement says that something has changed."""
NOISE_FLOOR = 0.004
"""Least standard deviation of a block's logarithm: clocks, and what blocks in a row have in common."""
ONE_SIDED = 0.01
"""Standard deviation of a ratio of which only one neighbour was measured: the machine's pace may be changing."""
ALONE = 0.05
"""Standard deviation of one or two steps, as a share of them: nobody knows how they scatter."""
CONTENTION = 0.03
"""Standard deviation of what a level changes in the computation, as a share of the step: sums and codecs compete with
it for the machine."""


class Guess(NamedTuple):
    """An estimate with its variance; of a logarithm, unless it says otherwise."""

    mean: float = 0.0
    variance: float = 1.0

    def updated(self, seen: float, variance: float) -> Guess:
        """With a measurement of it. One that lies far off says that things have changed, and counts the more."""
        off, own = seen - self.mean, self.variance
        if off * off > FAR**2 * (own + variance):
            own += off * off
        gain = own / (own + variance)
        return Guess(self.mean + gain * off, (1 - gain) * own)


class Block(NamedTuple):
    """Some steps in a row at one level: middle values in seconds, and the variances of these values."""

    step: float
    step_variance: float
    """Of the logarithm."""
    busy: float
    """Computation and input wait."""
    busy_variance: float
    rest: float
    """Codec and exposed communication."""
    rest_variance: float
    codec: float
    exposed: float
    overlapped: float
    comm_variance: float

    @property
    def comm(self) -> float:
        """All communication, hidden or not."""
        return self.exposed + self.overlapped


def stdev(values: Sequence[float]) -> float:
    """As of ``statistics``, which adds fractions, and takes thirty times as long."""
    middle = fmean(values)
    return math.dist(values, [middle] * len(values)) / math.sqrt(len(values) - 1)


def usual(steps: Sequence[StepTimes], wait: float) -> list[StepTimes]:
    """As if each had waited ``wait`` seconds for input: a script that validates before a step does so at any level."""
    return [each._replace(step=each.step - each.input_wait + wait, input_wait=wait) for each in steps]


def block_of(steps: Sequence[StepTimes]) -> Block:
    """A block of steps. They count in pairs: a level of two sides sends more in one than in the other."""
    steps = usual(steps, median(each.input_wait for each in steps))

    def pairs(values: Sequence[float]) -> list[float]:
        return [(a + b) / 2 for a, b in pairwise(values)] or list(values)

    def middle(values: Sequence[float], *, logarithms: bool = False) -> tuple[float, float]:
        means = pairs(values)
        spread = stdev(means) if len(means) > 1 else ALONE * (1.0 if logarithms else abs(means[0]))
        return median(means), math.pi / 2 * spread**2 / max(1.0, len(values) / 2)  # a median scatters more than a mean

    busy = [each.compute + each.input_wait for each in steps]
    step, step_variance = middle([math.log(max(each.step, 1e-9)) for each in steps], logarithms=True)
    busy_middle, busy_variance = middle(busy)
    rest, rest_variance = middle([max(0.0, each.step - own) for each, own in zip(steps, busy, strict=True)])
    codec, exposed, overlapped = (
        middle(figure)[0]
        for figure in zip(*((each.codec, each.exposed_comm, each.overlapped_comm) for each in steps), strict=True)
    )
    comm_variance = middle([each.comm for each in steps])[1]
    return Block(
        math.exp(step),
        step_variance + NOISE_FLOOR**2,
        max(busy_middle, 1e-9),
        busy_variance,
        rest,
        rest_variance,
        codec,
        exposed,
        overlapped,
        comm_variance,
    )


class Ratio(NamedTuple):
    """The challenger's seconds over those of the level held, as logarithms."""

    guess: Guess
    pairs: int


def ratio_of(turns: Sequence[tuple[int, Block]], challenger: int, contention: float = CONTENTION) -> Ratio:
    """The ratio from a trial's turns, each (level, block): the level held comes first, and they alternate.

    Computation is common to both levels: it counts as far as it can be told from the machine's pace.
    """
    rest, busy, rest_variance, busy_variance = 0.0, 0.0, 0.0, 0.0
    count = sum(level == challenger for level, _ in turns)
    for place, (level, mine) in enumerate(turns):
        if level != challenger:
            continue
        others = [turns[near][1] for near in (place - 1, place + 1) if 0 <= near < len(turns)]
        n, a, b = len(others), others[0], others[-1]
        theirs = fmean(other.rest for other in others), fmean(other.busy for other in others)
        common = (mine.busy + n * theirs[1]) / (n + 1)
        step = common + theirs[0]
        # Between two neighbours the machine and the link may have been anywhere.
        doubt = [ONE_SIDED**2] * 2
        if n == 2:
            doubt = [((one - two) / step) ** 2 / 12 for one, two in ((a.rest, b.rest), (a.busy, b.busy))]
        rest += math.log((common + mine.rest) / step)
        busy += (mine.busy - theirs[1]) / step
        rest_variance += (mine.rest_variance + sum(each.rest_variance for each in others) / n**2) / step**2
        busy_variance += (mine.busy_variance + sum(each.busy_variance for each in others) / n**2) / step**2
        rest_variance, busy_variance = rest_variance + doubt[0], busy_variance + doubt[1]
    rest_variance, busy_variance = rest_variance / count**2, busy_variance / count**2
    trust = shrunk(busy_variance, contention) / busy_variance if busy_variance else 1.0
    mean = (rest + trust * busy) / count
    return Ratio(Guess(mean, rest_variance + trust * busy_variance + 1e-5), count)


def noise_of(block: Block, pairs: int) -> float:
    """Variance of the ratio that so many pairs of blocks like this one would show."""
    share = 2 / (pairs * block.step**2)
    return share * block.rest_variance + shrunk(share * block.busy_variance, CONTENTION)


def shrunk(variance: float, prior: float) -> float:
    """Variance of what a level changes in the computation, after a measurement with ``variance``; ``prior``: standard
    deviation before it."""
    return variance * prior**2 / (variance + prior**2) if prior else 0.0
