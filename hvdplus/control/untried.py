"""Choices without a trial: the level to begin with, levels to preview, when to probe the link, and what takes over from
a level that is out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvdplus.control.config import Config
from hvdplus.control.exploring import Exploring
from hvdplus.control.knowledge import Knowledge
from hvdplus.control.link import LevelCost

COMPUTATIONS = (1e-3, 1e-2, 1e-1, 1.0)
"""Seconds that the computation of a step may take, before one was seen; half of them may hide communication."""


def best_start(known: Knowledge, usable: Sequence[int]) -> int:
    """The level to begin with, before any step was seen: that of least regret, which is what a step is expected to cost
    beyond the best level's, as a share of it, if the computation may as well take any of ``COMPUTATIONS``."""

    def cost(level: int, busy: float) -> float:
        exposed = known.link.link.exposed(known.costs[level], busy / 2)
        return known.price(level) * (busy + known.codec(level).mean + exposed)

    regrets = dict.fromkeys(usable, 0.0)
    for busy in COMPUTATIONS:
        costs = {level: cost(level, busy) for level in usable}
        for level in usable:
            regrets[level] += costs[level] / min(costs.values())
    return min(usable, key=lambda level: regrets[level])


def unforeseen(known: Knowledge, level: int, usable: Sequence[int]) -> tuple[int, ...]:
    """While ``level`` runs: levels of whose errors nothing is known but bytes, and that may pay. With them the level
    that runs, if it holds something back: what the same step shows of it, and what it comes to, tell of the others."""
    if not known.steps:
        return ()
    lossy = [each for each in usable if known.costs[each].keeps_residual]
    unknown = [each for each in lossy if each != level and each not in known.errors.levels]
    paying = known.paying(unknown, level) if unknown else []
    return tuple(each for each in lossy if each in paying or (paying and each == level))


def probe_bytes(known: Knowledge, level: int, exploring: Exploring, share: float) -> int:
    """While ``level`` is held: bytes by which the coming step shall probe the link's bandwidth, or 0. ``share``: of the
    time, for exploring."""
    link, cost = known.link.link, known.costs[level]
    # Sums of levels that hold nothing back show the link.
    if not (cost.keeps_residual and link.beta and share) or exploring.until_probe:
        return 0
    size = link.probe_size(known.seconds(level), known.costs[0].payload_bytes)
    if 2 * size < cost.payload_bytes:  # which shows as much
        return 0
    return size if exploring.affords_probe(link.seconds(LevelCost.of_sum(size)), share) else 0


def surest(known: Knowledge, usable: Sequence[int], running: int, config: Config) -> int:
    """The level within the error budget whose cost has the least upper bound, measured or not. ``running``: is out."""
    if not known.levels:
        return 0

    def most(level: int) -> float:
        guess = known.cost(level, running)
        return guess.mean + config.certainty * math.sqrt(guess.variance)

    return min((level for level in usable if known.error(level).mean <= config.error_budget), key=most, default=0)
