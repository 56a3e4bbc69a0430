"""Step times of a job on other numbers of ranks and other links, predicted from the run log of one run.

The link is a model: the run's link is fitted (``link.fit_link``), and other links follow from the formulas of
collectives. Computation, codec and the communication that computation hides stay as measured, because each rank keeps
its number of samples (weak scaling). Slower hosts, other jobs on the same links and Horovod's negotiation among
thousands of ranks are left out, since a run on a few ranks does not show them. Pure functions of a run log's records;
times in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

from hvdplus.compression import NoCompression, Spec, parse
from hvdplus.control import interval
from hvdplus.control.config import Config
from hvdplus.control.link import (
    ALL_REDUCES,
    Collective,
    LevelCost,
    Link,
    Wire,
    fit_link,
    job_link,
    ring_all_reduce,
    ring_wire,
)
from hvdplus.exchange.metadata import Slot
from hvdplus.log.facts import (
    Record,
    check_not_empty,
    delay_prices,
    fp32_bytes,
    level_of,
    levels_refused,
    number_of,
    probes_of,
    rhythm_of,
    run_of,
    weighted_median,
    windows_of,
)

DENSE = NoCompression().name
MARGIN = Config().margin
"""Share of the step that counts as a difference between levels."""
SLOWEST, FASTEST = 1e-3, 1e4
"""Range of link rates, in Gbit/s, that ``pays_up_to`` searches."""


class Seen(NamedTuple):
    """A level as it ran: medians over its windows."""

    step: float
    compute: float
    """The step without codec and communication; input wait is part of it."""
    codec: float
    exposed: float
    overlapped: float
    """Communication that computation hides."""
    sent_bytes: float
    """Bytes of one rank a step, rows of sparse gradients among them."""

    @property
    def comm(self) -> float:
        """All communication, hidden or not."""
        return self.exposed + self.overlapped


class Shown(NamedTuple):
    """Measurements of a run, and the model fitted to them."""

    ranks: int
    hosts: int
    collective: str
    elements: int
    """Values in a gradient."""
    seen: dict[str, Seen]
    """The levels that ran, with their measurements."""
    costs: dict[str, LevelCost]
    """All levels of the ladder, least compression first, dense at the front."""
    link: Link
    compute: float
    hideable: float
    """Seconds of communication that computation can hide."""
    assumptions: tuple[str, ...]
    """Sentences on what the run did not show and this model assumes."""
    rejected: frozenset[str] = frozenset()
    """Levels that the run has refused; they are in ``costs``, and get no forecast."""
    prices: Mapping[str, float] = MappingProxyType({})
    """Level -> how many times the steps of dense a training needs there, where the run shows more than once."""

    @property
    def gbit(self) -> float:
        """Rate of a rank's link in Gbit/s; infinite if the fitted β is 0."""
        beta = ring_wire(self.link, self.ranks, 0.0)[0].beta
        return 8e-9 / beta if beta else math.inf


class Step(NamedTuple):
    """A predicted step at one level."""

    seconds: float
    exposed: float
    """Communication that computation does not hide."""
    collective: str


# -- from the log to measurements --------------------------------------------------------------------------------------


def what_the_run_showed(records: Sequence[Record]) -> Shown:
    """The measurements of a run, from the records of its log.

    Raises:
        ValueError: the log does not hold them; the message says what is missing and how to get it.
    """
    check_not_empty(records)
    about = run_of(records)
    costs, ranks = _costs_as_tried(records), int(about.get("ranks") or 1)
    if rhythm_of(records):
        raise ValueError(
            "the job took local steps, and its log has what an exchange takes with the steps before it: let one run in "
            "lock-step, without `every` and `staleness`"
        )
    if ranks < 2:
        raise ValueError("the job ran on one rank, which shows nothing of a network: run it on two hosts or more")
    seen = _levels_as_seen(_of_these_costs(records), costs)
    rows = max((round(level.sent_bytes) - costs[name].payload_bytes for name, level in seen.items()), default=0)
    if rows > 0:  # rows of sparse gradients, sent after the backward pass
        costs = {
            name: cost._replace(payload_bytes=cost.payload_bytes + rows, last_bytes=cost.last_bytes + rows)
            for name, cost in costs.items()
        }
    if not seen:
        raise ValueError("it holds no complete window of steps at a level: let the job run longer, 100 steps or so")

    probes = [(LevelCost.of_sum(size), seconds) for size, seconds in probes_of(about)]
    link = fit_link([*((costs[name], level.comm) for name, level in seen.items()), *probes])
    compute = median(level.compute for level in seen.values())
    hideable = max(level.overlapped for level in seen.values())
    # The codec times in the run record are of encoding and decoding alone; packing and unpacking buckets adds to them.
    packing = min(max(0.0, level.codec - costs[name].codec) for name, level in seen.items())
    known = fp32_bytes(records)
    gradient_bytes = int(known) if 0 < known < math.inf else max(cost.payload_bytes for cost in costs.values())
    costs = {
        name: cost._replace(codec=seen[name].codec if name in seen else packing + cost.codec)
        for name, cost in costs.items()
    }
    assumptions = []
    if len(seen) == 1 and not probes:
        (only,) = seen
        assumptions.append(
            f"Only {only} ran: its communication time is attributed to bytes alone, none to the number of all-reduces."
        )
    if DENSE in costs and DENSE not in seen:
        dense = costs[DENSE].codec
        assumptions.append(f"No dense step ran: it is assumed to need {dense * 1e3:.2f} ms of codec.")
    if DENSE not in costs:
        like, cost = next(iter(costs.items()))
        last = round(gradient_bytes * cost.last_bytes / cost.payload_bytes) if cost.payload_bytes else gradient_bytes
        costs = {DENSE: LevelCost(gradient_bytes, last, cost.messages // cost.passes, packing), **costs}
        assumptions.append(
            f"No dense step ran: it is assumed to send fp32's bytes in as many all-reduces as {like}, with "
            f"{packing * 1e3:.2f} ms of codec."
        )
    bound = [name for name in seen if link.seconds(costs[name]) - hideable > 1.1 * link.exposed(costs[name], math.inf)]
    if not bound:
        assumptions.append(
            f"Computation hid all communication but the last bucket's, and may be able to hide more than these "
            f"{hideable * 1e3:.2f} ms: on slow links steps may be shorter than predicted."
        )
    hosts = max(1, len(about.get("hosts") or {}))
    if hosts == 1:
        assumptions.append("All ranks were on one host: the fitted link is the host's memory.")
    collective = str(about.get("collective") or "unknown")
    if collective not in ("ring", "segmented ring"):
        assumptions.append(f"The run's all-reduce ({collective}) is assumed to be a ring.")
    rejected = {name: why for name, why in levels_refused(records).items() if name in costs and name != DENSE}
    assumptions += [f"No forecast for {name}: the run rejected it {why}." for name, why in rejected.items()]
    return Shown(
        ranks, hosts, collective, gradient_bytes // 4, seen, costs, link, compute, hideable, tuple(assumptions),
        frozenset(rejected), delay_prices(records),
    )  # fmt: skip


def _costs_as_tried(records: Sequence[Record]) -> dict[str, LevelCost]:
    """Level -> its cost, from the last record that has costs (``run`` or ``resize``)."""
    levels = next((record["levels"] for record in reversed(records) if record.get("levels")), None)
    if not levels:
        raise ValueError(
            "its run record does not say what the levels send (an older hvdplus wrote it): run the job once more"
        )
    try:
        return {
            str(name): LevelCost(
                int(entry["payload_bytes"]), int(entry["last_bytes"]), int(entry["messages"]),
                float(entry.get("codec_ms") or 0.0) / 1e3, passes=int(entry.get("passes", 1)),
            )
            for name, entry in levels.items()
        }  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"its run record should hold payload_bytes, last_bytes and messages for each level. Received: {levels}"
        ) from None


def _of_these_costs(records: Sequence[Record]) -> Sequence[Record]:
    """Records since levels cost what they do: what ran before buckets were cut anew was another model's. All of them
    where nothing has run since."""
    cut = max((place for place, record in enumerate(records) if record["kind"] == "resize"), default=0)
    return records[cut:] if windows_of(records[cut:]) else records


def _levels_as_seen(records: Sequence[Record], costs: Mapping[str, LevelCost]) -> dict[str, Seen]:
    """Levels of ``costs`` that ran, in their order, with medians over their steps.

    The first window of a stretch counts only if fewer steps follow it than it holds. Steps that flush a residual belong
    to no level.
    """
    later: dict[str, list[tuple[Seen, int]]] = {}
    first: dict[str, list[tuple[Seen, int]]] = {}
    for level, group in groupby(windows_of(records), key=level_of):
        for place, window in enumerate(group):
            seen, steps = _seen(window), window.get("steps")
            if not any(map(math.isnan, seen)):
                count = steps if isinstance(steps, int) else 1
                (later if place else first).setdefault(level, []).append((seen, count))
    found = {}
    for name in costs:
        head, rest = first.get(name, []), later.get(name, [])
        enough = sum(steps for _, steps in rest) >= sum(steps for _, steps in head)
        if some := rest if enough else head + rest:
            seen_there, weights = zip(*some, strict=True)
            found[name] = Seen(*(weighted_median(values, weights) for values in zip(*seen_there, strict=True)))
    return found


def _seen(window: Mapping[str, Any]) -> Seen:
    """The figures of one window; NaN for a missing one."""
    step, codec, exposed, overlapped, sent = (
        number_of(window.get(name))
        for name in ("step_ms", "codec_ms", "exposed_comm_ms", "overlapped_comm_ms", "payload_bytes")
    )
    return Seen(step / 1e3, max(0.0, step - codec - exposed) / 1e3, codec / 1e3, exposed / 1e3, overlapped / 1e3, sent)


# -- from measurements to predictions ----------------------------------------------------------------------------------


def costs_on(shown: Shown, ranks: int) -> tuple[dict[str, LevelCost], dict[str, str]]:
    """Costs of the levels that can serve ``ranks`` ranks, and level -> reason for those that cannot. Neither holds
    rejected levels.

    Most payloads have the same size on any number of ranks. Sums of signs grow with it; the growth is computed for
    one square matrix with the model's number of elements. The metadata tensor has a slot for each rank.
    """
    more_slots = 4 * len(Slot._fields) * max(0, ranks - shown.ranks)
    costs, reasons = {}, {}
    for name, cost in shown.costs.items():
        if name in shown.rejected:
            continue
        try:
            growth = _growth(name, shown, ranks)
        except ValueError as error:
            reasons[name] = " ".join(str(error).split())
        else:
            costs[name] = cost._replace(
                payload_bytes=round(cost.payload_bytes * growth) + more_slots,
                last_bytes=round(cost.last_bytes * growth),
            )
    return costs, reasons


def _growth(name: str, shown: Shown, ranks: int) -> float:
    """Payload on ``ranks`` ranks over payload on the run's ranks. Raises ValueError if the level cannot serve so many
    ranks."""
    try:
        compressor = parse(name)
    except Exception:  # an object of the script's own, or another package's that is not installed here
        return 1.0
    side = max(16, math.isqrt(shown.elements))

    def size(ranks: int) -> int:
        spec = Spec(((side, side),), ranks=ranks)
        return compressor.step_bytes(spec)

    after, before = size(ranks), size(shown.ranks)
    return after / before if before else 1.0


def predict(
    shown: Shown, cost: LevelCost, ranks: int, wire: Wire, collectives: Mapping[str, Collective] = ALL_REDUCES
) -> Step:
    """A step on ``ranks`` ranks with links like ``wire``, by the collective that makes it shortest (the first of
    equals).

    The run's all-reduces took more time than their bytes explain. Messages of ``wire.alpha`` seconds explain one part
    of it; the rest (negotiation, launching) is the same for each all-reduce on any number of ranks.
    """
    _, fixed = ring_wire(shown.link, shown.ranks, wire.alpha)

    def by(name: str) -> Step:
        exposed = job_link(collectives[name], ranks, wire, fixed).exposed(cost, shown.hideable)
        return Step(shown.compute + cost.codec + exposed, exposed, name)

    return min(map(by, collectives), key=lambda step: round(step.seconds, 9))  # equal to a nanosecond is equal


def predict_two_level(
    shown: Shown,
    cost: LevelCost,
    hosts: int,
    ranks_a_host: int,
    wire: Wire,
    inside: Wire,
    collectives: Mapping[str, Collective] = ALL_REDUCES,
) -> Step:
    """A step on hosts whose ranks sum densely among themselves (``hvdplus.exchange.two_level``).

    Args:
        wire, inside: links between hosts, and within one. What is summed inside of hosts is not hidden.
        collectives: between hosts, see ``predict``.
    """
    between = predict(shown, cost, hosts, wire, collectives)
    dense = ring_all_reduce(4.0 * shown.elements, ranks_a_host, inside)
    shared = cost.messages * ring_all_reduce(cost.payload_bytes / cost.messages, ranks_a_host, inside)
    return Step(between.seconds + dense + shared, between.exposed + dense + shared, between.collective)


def best_level(steps: Mapping[str, Step], prices: Mapping[str, float]) -> str:
    """The least compression whose step, times the price of delay, is within ``MARGIN`` of the best level's.

    ``auto`` comes close to this rule; it also rejects levels over the error budget.

    Args:
        steps: level -> predicted step, least compression first.
        prices: level -> price of delay, where it is not 1.
    """
    costs = {name: step.seconds * prices.get(name, 1.0) for name, step in steps.items()}
    return next(name for name, cost in costs.items() if (1 - MARGIN) * cost <= min(costs.values()))


class Local(NamedTuple):
    """Local steps, as predicted."""

    every: int
    """Steps between two exchanges."""
    level: str
    cost: float
    """Seconds of a step, exchanges included, times the price of delay and of steps apart."""


def best_local(
    shown: Shown,
    costs: Mapping[str, LevelCost],
    ranks: int,
    wire: Wire,
    collectives: Mapping[str, Collective] = ALL_REDUCES,
) -> Local:
    """The level and the number of local steps of least cost; nothing hides an exchange. ``costs``: of the levels that
    serve so many ranks; those of low rank and few values are for gradients, not for what local steps come to."""
    _, fixed = ring_wire(shown.link, shown.ranks, wire.alpha)
    found = []
    for name in [name for name in costs if name in interval.LADDER]:
        level = costs[name]
        for collective in collectives.values():
            comm = job_link(collective, ranks, wire, fixed).seconds(level)
            seconds = interval.Seconds(shown.compute, level.codec, comm)
            choice = interval.cheapest(seconds)
            cost = shown.prices.get(name, 1.0) * interval.cost(choice, seconds)
            found.append(Local(choice.steps, name, cost))
    return min(found, key=lambda local: local.cost)


def pays_up_to(
    shown: Shown, ranks: int, message_seconds: float, collectives: Mapping[str, Collective] = ALL_REDUCES
) -> float:
    """The rate of the links, in Gbit/s, above which no level saves ``MARGIN`` of the time; 0 if none does at any rate,
    infinite if one does at every rate.

    On a faster link communication shrinks and the codec's time stays. Below the rate a level may still save less
    somewhere, where the link is so slow that bytes are not what takes the time.
    """
    costs, _ = costs_on(shown, ranks)

    def pays(gbit: float) -> bool:
        wire = Wire(message_seconds, 8e-9 / gbit)
        return (
            best_level(
                {name: predict(shown, cost, ranks, wire, collectives) for name, cost in costs.items()}, shown.prices
            )
            != DENSE
        )

    if pays(FASTEST):
        return math.inf
    low = FASTEST
    while not pays(low):
        low /= 1.25
        if low < SLOWEST:
            return 0.0
    high = 1.25 * low
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low
