"""What a level's codec takes within training: more than alone.

A step handles its gradients beside the codec: it packs them, hands them over, writes means back. And bytes that travel
meanwhile take their share of the processor. Both are told from the levels that were measured: what their codecs took
beyond what they take alone is so many seconds each time that gradients are handled, and so large a share of the time in
which bytes travelled behind computation and codec (a linear regression with a prior).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvdplus.control.blocks import Guess
from hvdplus.control.link import LevelCost

PACKING, CODEC_ERROR, ALIKE_ERROR = 0.5, 0.3, 0.15
"""Seconds that a level with a residual takes to pack gradients and write means back, as a share of its codec's alone;
standard deviations of a codec's time, as shares of it: of any, and where a level that packs likewise was measured.
(Packing is 0.5 to 0.8 on two cores, 2.3 for many small tensors. What codecs take alone is measured within 10 to 20 % of
each other on a machine whose pace changes.)"""
TRAVEL, TRAVEL_ERROR = 0.2, 0.2
"""Share of the processor's time that travelling bytes take, and its standard deviation. (On hosts of one core, with
sums over Gloo: 0.2 to 0.4 at 1 Gb/s, none to speak of at 100 Mb/s.)"""


class Seen(NamedTuple):
    """What was measured of a level."""

    codec: float
    """Seconds."""
    travel: float
    """Seconds in which bytes travelled behind computation and codec."""


def codec_of(level: int, costs: Sequence[LevelCost], seen: Mapping[int, Seen], travel: float) -> Guess:
    """Seconds of the codec of a level that was not measured: what it takes alone, and what other levels show.

    Dense steps say nothing of it, as they may sum gradients where they are; where only they were measured: what they
    take, and ``PACKING``. ``travel``: see ``Seen``, as expected of this level.
    """
    cost, known = costs[level], [other for other in seen if other]
    if not (cost.codec and known):
        dense = seen[0].codec if 0 in seen else 0.0
        codec = cost.codec + PACKING * cost.codec * cost.keeps_residual + dense
        return Guess(codec, (CODEC_ERROR * codec) ** 2)
    beyond = _beyond(cost, [(costs[other], seen[other]) for other in known], travel)
    codec = cost.codec + beyond.mean
    alike = any(costs[other].keeps_residual == cost.keeps_residual for other in known)
    return Guess(codec, beyond.variance + ((ALIKE_ERROR if alike else CODEC_ERROR) * codec) ** 2)


def _beyond(cost: LevelCost, known: Sequence[tuple[LevelCost, Seen]], travel: float) -> Guess:
    """Seconds that a level's codec takes beyond what it takes alone."""
    # Seconds each time that gradients are handled, and share of the time of travel; variances and covariance.
    once = PACKING * cost.codec / 3
    a, b, aa, ab, bb = once, TRAVEL, once**2, 0.0, TRAVEL_ERROR**2
    for other, (codec, its_travel) in known:
        handled = _handled(other)
        error = ALIKE_ERROR if handled == _handled(cost) else CODEC_ERROR
        off = codec - other.codec - a * handled - b * its_travel
        with_a, with_b = aa * handled + ab * its_travel, ab * handled + bb * its_travel
        total = with_a * handled + with_b * its_travel + (error * codec) ** 2
        if total:
            a, b = a + with_a / total * off, b + with_b / total * off
            aa, ab, bb = aa - with_a**2 / total, ab - with_a * with_b / total, bb - with_b**2 / total
    handled = _handled(cost)
    variance = aa * handled**2 + 2 * ab * handled * travel + bb * travel**2
    return Guess(max(0.0, a) * handled + max(0.0, b) * travel, max(0.0, variance))


def _handled(cost: LevelCost) -> int:
    """How often a step at a level handles its gradients beside the codec: to write means back, with a residual also to
    pack them, and to hand over every pass. (In the recorded traces levels with a residual and one pass take 3 to 4
    times what ``fp16`` takes so, with two passes 4 to 6 times.)"""
    return 1 + (1 + cost.passes) * cost.keeps_residual
