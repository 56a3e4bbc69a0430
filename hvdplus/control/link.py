"""The cost of a level: an α–β model of the link, fitted to measurements, and the communication that computation hides.

The all-reduces of a step follow each other on the link. With α seconds for each all-reduce and β seconds for each byte
of payload, a level's communication takes ``α · messages + β · bytes``. The backward pass can hide all of it but the
last bucket, which is full only when the pass is over. All functions are pure, like the controller that calls them.

α and β describe the job as it runs: its ranks, its collective, its links. The cost on other numbers of ranks and by
other collectives follows from the textbook formulas below (Thakur, Rabenseifner and Gropp, 2005).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hvdplus.control.blocks import FAR

MODEL_ERROR = 0.05
"""Standard deviation of measured communication from the model, as a share of it."""

PROBE_LEAST, PROBE_MOST = 64 << 10, 64 << 20
"""Bytes of a bandwidth probe: links carry some 10 kB at any speed after a rest, and what a level sends comes before
it."""


class LevelCost(NamedTuple):
    """Demands of a level on link and processor in one step, the same on every rank."""

    payload_bytes: int
    last_bytes: int
    """Bytes of the bucket that is sent last, when the backward pass is over and hides nothing."""
    messages: int
    """Number of all-reduces."""
    codec: float = 0.0
    """Seconds to encode and decode, measured before training; 0: not measured."""
    keeps_residual: bool = True
    """Whether what is not sent stays in a residual, and so arrives late."""
    passes: int = 1
    """All-reduces of a bucket, one after the other."""
    delay_weight: float = 1.0
    """What a residual delays a training, beside one as long of other levels."""

    @classmethod
    def of_sum(cls, size: int) -> LevelCost:
        """Of a single sum of ``size`` bytes that nothing else goes along with."""
        return cls(size, size, 1)


class Link(NamedTuple):
    """The link as this job's all-reduces see it."""

    alpha: float
    """Seconds for each all-reduce, however small."""
    beta: float
    """Seconds for each byte of payload."""

    def seconds(self, cost: LevelCost) -> float:
        """Communication of one step, hidden or not."""
        return self.alpha * cost.messages + self.beta * cost.payload_bytes

    def probe_size(self, step: float, dense_bytes: int) -> int:
        """Bytes whose sum shows the bandwidth: those of a third of a step of so many seconds."""
        return int(min(max(0.3 * step / self.beta, PROBE_LEAST), dense_bytes, PROBE_MOST)) // 4 * 4

    def exposed(self, cost: LevelCost, hideable: float) -> float:
        """Communication that a step waits for, if computation can hide ``hideable`` seconds."""
        last = self.alpha * cost.passes + self.beta * cost.last_bytes
        return max(last, self.seconds(cost) - hideable)


class LinkEstimate(NamedTuple):
    """α and β with the covariance of their errors: a Kalman filter over measured communication."""

    alpha: float = 0.0
    beta: float = 0.0
    aa: float = (3e-4) ** 2
    """Variance of α; at first, what all-reduces of clusters take."""
    ab: float = 0.0
    bb: float = (1e-6) ** 2
    """Variance of β; at first, anything from 1 MB/s on."""

    @property
    def link(self) -> Link:
        """The link as estimated."""
        return Link(self.alpha, self.beta)

    def variance(self, cost: LevelCost) -> float:
        """Of the seconds that a level's communication takes, as far as the link is the reason."""
        m, b = cost.messages, cost.payload_bytes
        return max(0.0, m * m * self.aa + 2 * m * b * self.ab + b * b * self.bb)

    def older(self, share: float) -> LinkEstimate:
        """α and β may each have changed; ``share``: variance of the change, relative to their squares."""
        return self._replace(aa=self.aa + share * self.alpha**2, bb=self.bb + share * self.beta**2)

    def updated(self, cost: LevelCost, seconds: float, variance: float, *, same: bool = False) -> LinkEstimate:
        """With a level's measured communication. One far from the estimate says that the link has changed, unless it
        is the ``same`` link for sure, of which little was known."""
        m, b = cost.messages, cost.payload_bytes
        if seconds <= 0 or not b:
            return self
        noise = variance + (MODEL_ERROR * seconds) ** 2
        expected = self.link.seconds(cost)
        off, known = seconds - expected, self
        if not same and expected and off * off > FAR**2 * (self.variance(cost) + noise):
            share = (off / expected) ** 2
            # Rates change by any factor, and what an all-reduce takes however small seldom by more than two.
            slower = min(share, 1.0)
            known = LinkEstimate(
                self.alpha,
                self.beta,
                self.aa + slower * self.alpha**2,
                self.ab + math.sqrt(slower * share) * self.alpha * self.beta / 2,
                self.bb + share * self.beta**2,
            )
        pa, pb = m * known.aa + b * known.ab, m * known.ab + b * known.bb
        total = m * pa + b * pb + noise
        ka, kb = pa / total, pb / total
        alpha, beta = self.alpha + ka * off, self.beta + kb * off
        if alpha < 0:
            alpha, beta = 0.0, max(0.0, beta + alpha * m / b)
        elif beta < 0:
            alpha, beta = max(0.0, alpha + beta * b / m), 0.0
        aa, bb = max(0.0, known.aa - ka * pa), max(0.0, known.bb - kb * pb)  # rounding
        return LinkEstimate(alpha, beta, aa, known.ab - ka * pb, bb)


def fit_link(measured: Sequence[tuple[LevelCost, float]]) -> Link:
    """The link that fits the measured seconds of communication best, by least squares of relative errors.

    Neither α nor β is negative. A single measurement is attributed to β alone.
    """
    points = [(cost.messages / seconds, cost.payload_bytes / seconds) for cost, seconds in measured if seconds > 0]
    mm = sum(m * m for m, _ in points)
    mb = sum(m * b for m, b in points)
    bb = sum(b * b for _, b in points)
    m, b = sum(m for m, _ in points), sum(b for _, b in points)
    determinant = mm * bb - mb * mb
    if determinant > 1e-9 * mm * bb:
        alpha, beta = (m * bb - b * mb) / determinant, (b * mm - m * mb) / determinant
        if alpha >= 0 and beta >= 0:
            return Link(alpha, beta)
        if beta < 0:
            return Link(m / mm, 0.0)
    return Link(0.0, b / bb if bb else 0.0)


# -- other numbers of ranks, other links -------------------------------------------------------------------------------
#
# Seconds of a collective of N ranks. A message takes α seconds and a byte β seconds; each rank has a link of its own,
# and sends one message and receives one at a time. The time of additions is left out. All are α–β formulas of Thakur,
# Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (Int. J. High Perform. Comput.
# Appl. 19(1), 2005), unless they say otherwise.


class Wire(NamedTuple):
    """A rank's own link, of one speed in both directions at once."""

    alpha: float
    """Seconds for each message from rank to rank, however small."""
    beta: float
    """Seconds for each byte on the link; 8e-9 / rate in Gbit/s."""


Collective = Callable[[float, int, Wire], float]
"""(bytes M of a rank's payload, number of ranks N, link) -> seconds."""


def ring_all_reduce(payload_bytes: float, ranks: int, wire: Wire) -> float:
    """2 (N-1) (α + β M/N): reduce-scatter and all-gather around a ring, a part of M/N bytes a message.

    No all-reduce sends fewer bytes (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69(2), 2009).
    """
    return 2 * (ranks - 1) * (wire.alpha + payload_bytes / ranks * wire.beta)


def tree_all_reduce(payload_bytes: float, ranks: int, wire: Wire) -> float:
    """2 log₂N α + 2 (N-1)/N M β: recursive halving, then recursive doubling (Rabenseifner, ICCS 2004).

    Where N is no power of two, P is the largest power of two below it: N-P ranks first send their payload to a
    neighbour and receive the result at the end, as in MPICH. That adds 2 (α + M β) to the time of a tree of P ranks.
    """
    stages, folds = _stages(ranks)
    halved = 1 - 0.5**stages
    whole = wire.alpha + payload_bytes * wire.beta
    return 2 * (stages * wire.alpha + halved * payload_bytes * wire.beta) + folds * whole


def _stages(ranks: int) -> tuple[int, int]:
    """(stages of a tree over the largest power of two up to ``ranks``, more messages for the ranks beyond it)."""
    stages = ranks.bit_length() - 1
    return stages, 2 if ranks > 1 << stages else 0


ALL_REDUCES: Mapping[str, Collective] = {"ring": ring_all_reduce, "tree": tree_all_reduce}
"""For payloads of more than a few kilobytes; libraries choose between them by size and number of ranks."""


def job_link(collective: Collective, ranks: int, wire: Wire, fixed: float) -> Link:
    """The link as a job's all-reduces see it. Every formula is linear in the payload, so α and β describe it.

    Args:
        fixed: seconds that each all-reduce takes in addition (negotiation, launching), on any number of ranks.
    """
    return Link(fixed + collective(0.0, ranks, wire), collective(1.0, ranks, wire._replace(alpha=0.0)))


def ring_wire(link: Link, ranks: int, message_seconds: float) -> tuple[Wire, float]:
    """The wire behind a ring's fitted ``link``, and the fixed seconds of each all-reduce.

    One run cannot tell the two apart, so ``message_seconds`` (α of the wire) is an assumption. The part of the link's α
    that 2 (N-1) messages do not explain is fixed.
    """
    fixed = max(0.0, link.alpha - 2 * (ranks - 1) * message_seconds)
    return Wire(message_seconds, link.beta * ranks / (2 * (ranks - 1))), fixed
