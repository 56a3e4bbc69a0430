"""The cost model: formulas agree with collectives played message by message, a link is found again in what it did."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from frameworks import examples
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.control.link import (
    ALL_REDUCES,
    Collective,
    LevelCost,
    Link,
    LinkEstimate,
    Wire,
    fit_link,
    job_link,
    ring_all_reduce,
    ring_wire,
    tree_all_reduce,
)

thoroughly = examples(200)
WIRE = Wire(20e-6, 8e-9)

# -- collectives, played -----------------------------------------------------------------------------------------------


class Network:
    """Hosts that exchange byte vectors in rounds: in one round everybody sends one message and receives one."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.seconds = 0.0
        self.sent: dict[int, int] = {}

    def round(self, messages: dict[tuple[int, int], np.ndarray]) -> dict[tuple[int, int], np.ndarray]:
        """Deliver ``messages``, sender and receiver -> content."""
        senders, receivers = zip(*messages, strict=True)
        assert len(set(senders)) == len(senders) and len(set(receivers)) == len(receivers)
        self.seconds += self.wire.alpha + max(map(len, messages.values())) * self.wire.beta
        for (sender, _), content in messages.items():
            self.sent[sender] = self.sent.get(sender, 0) + len(content)
        return {pair: content.copy() for pair, content in messages.items()}


def play_ring(net: Network, data: list[np.ndarray]) -> None:
    ranks, part = len(data), len(data[0]) // len(data)

    def chunk(rank: int, number: int) -> np.ndarray:
        start = number % ranks * part
        return data[rank][start : start + part]

    for adds in (True, False):  # reduce-scatter, then all-gather
        for turn in range(ranks - 1):
            moved = {r: r - turn + (0 if adds else 1) for r in range(ranks)}
            come = net.round({(r, (r + 1) % ranks): chunk(r, moved[r]) for r in range(ranks)})
            for (sender, receiver), content in come.items():
                target = chunk(receiver, moved[sender])
                target[:] = target + content if adds else content


def folded(net: Network, data: list[np.ndarray], play: Callable[[list[int]], None]) -> None:
    """``play`` among as many ranks as a power of two has; the others hand over before and are told after."""
    extra = len(data) - (1 << (len(data).bit_length() - 1))
    pairs = [(2 * i, 2 * i + 1) for i in range(extra)]
    if pairs:
        for (_, receiver), content in net.round({pair: data[pair[0]] for pair in pairs}).items():
            data[receiver] += content
    play([receiver for _, receiver in pairs] + list(range(2 * extra, len(data))))
    if pairs:
        for (_, receiver), content in net.round({(b, a): data[b] for a, b in pairs}).items():
            data[receiver][:] = content


def play_tree(net: Network, data: list[np.ndarray]) -> None:
    def play(active: list[int]) -> None:
        length = len(data[0])
        kept = {place: (0, length) for place in range(len(active))}
        distances = [1 << bit for bit in reversed(range(len(active).bit_length() - 1))]
        halves = []
        for distance in distances:
            before, messages = dict(kept), {}
            for place, (low, high) in before.items():
                middle = (low + high) // 2
                mine, theirs = ((low, middle), (middle, high))[:: -1 if place & distance else 1]
                kept[place] = mine
                messages[active[place], active[place ^ distance]] = data[active[place]][slice(*theirs)]
            halves.append(before)
            for (_, receiver), content in net.round(messages).items():
                data[receiver][slice(*kept[active.index(receiver)])] += content
        for distance, before in zip(reversed(distances), reversed(halves), strict=True):
            come = net.round({
                (active[place], active[place ^ distance]): data[active[place]][slice(*kept[place])] for place in kept
            })  # fmt: skip
            for (sender, receiver), content in come.items():
                data[receiver][slice(*kept[active.index(sender)])] = content
            kept = before

    folded(net, data, play)


@pytest.mark.parametrize(
    ("formula", "play"),
    [
        (ring_all_reduce, play_ring),
        (tree_all_reduce, play_tree),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 31])
def test_an_all_reduce_takes_what_playing_it_takes(
    formula: Collective, play: Callable[[Network, list[np.ndarray]], None], ranks: int
) -> None:
    length = 16 * ranks  # parts and halves are whole bytes
    data = [np.random.default_rng(rank).integers(0, 1000, length) for rank in range(ranks)]
    total = sum(data)
    net = Network(WIRE)
    play(net, data)
    assert all(np.array_equal(one, total) for one in data)
    assert formula(length, ranks, WIRE) == pytest.approx(net.seconds, abs=1e-15)


@pytest.mark.parametrize("ranks", [2, 3, 8, 13])
def test_every_rank_of_a_ring_sends_the_fewest_bytes_there_are(ranks: int) -> None:
    net = Network(WIRE)
    play_ring(net, [np.ones(16 * ranks, int) for _ in range(ranks)])
    assert net.sent == dict.fromkeys(range(ranks), 2 * (ranks - 1) * 16)


def test_bytes_take_as_long_on_many_ranks_and_messages_do_not() -> None:
    """Why payloads should add up: 100 MB at 10 Gbit/s take 160 ms on 4,096 ranks."""
    wire, payload = Wire(0.0, 8e-10), 1e8
    assert ring_all_reduce(payload, 2, wire) == pytest.approx(0.08)
    assert ring_all_reduce(payload, 4096, wire) == tree_all_reduce(payload, 4096, wire) == pytest.approx(0.16, rel=1e-3)
    assert ring_all_reduce(0, 4096, Wire(20e-6, 0)) == pytest.approx(0.1638)
    assert tree_all_reduce(0, 4096, Wire(20e-6, 0)) == pytest.approx(0.00048)


# -- the job's link ----------------------------------------------------------------------------------------------------

seconds = st.floats(1e-6, 1e-1)
per_byte = st.floats(1e-11, 1e-6)
ranks_of_a_job = st.integers(2, 5000)


@given(st.sampled_from(sorted(ALL_REDUCES)), ranks_of_a_job, seconds, per_byte, seconds, st.integers(0, 10**9))
@thoroughly
def test_a_collective_is_a_straight_line_in_its_payload(
    name: str, ranks: int, alpha: float, beta: float, fixed: float, payload: int
) -> None:
    wire = Wire(alpha, beta)
    link = job_link(ALL_REDUCES[name], ranks, wire, fixed)
    assert link.alpha + payload * link.beta == pytest.approx(fixed + ALL_REDUCES[name](payload, ranks, wire))


@given(ranks_of_a_job, seconds, per_byte, seconds)
@thoroughly
def test_the_wire_below_a_ring_is_found_again(ranks: int, alpha: float, beta: float, fixed: float) -> None:
    link = job_link(ring_all_reduce, ranks, Wire(alpha, beta), fixed)
    wire, besides = ring_wire(link, ranks, alpha)
    assert wire == pytest.approx((alpha, beta)) and besides == pytest.approx(fixed, rel=1e-6)
    assert job_link(ring_all_reduce, ranks, wire, besides) == pytest.approx(link)


def test_a_ring_faster_than_its_messages_has_nothing_besides() -> None:
    wire, fixed = ring_wire(Link(1e-6, 1e-9), 4, 20e-6)
    assert fixed == 0.0 and wire == (20e-6, pytest.approx(1e-9 / 1.5))


# -- the fit -----------------------------------------------------------------------------------------------------------

levels = st.lists(
    st.builds(LevelCost, st.integers(1, 10**9), st.just(0), st.integers(1, 200)), min_size=2, max_size=6
).filter(lambda costs: _spread(costs) > 1.5)


def _spread(costs: list[LevelCost]) -> float:
    sizes = [cost.payload_bytes / cost.messages for cost in costs]
    return max(sizes) / min(sizes)


def apart(costs: list[LevelCost], link: Link) -> bool:
    """Whether both figures of the link matter somewhere, so that rounding does not hide one of them."""
    shares = [link.alpha * cost.messages / link.seconds(cost) for cost in costs]
    return max(shares) > 0.01 and min(shares) < 0.99 and max(shares) > 1.01 * min(shares)


@given(levels, seconds, per_byte)
@thoroughly
def test_a_link_is_found_again_in_what_it_did(costs: list[LevelCost], alpha: float, beta: float) -> None:
    link = Link(alpha, beta)
    if apart(costs, link):
        assert fit_link([(cost, link.seconds(cost)) for cost in costs]) == pytest.approx(link, rel=1e-3)


measurements = st.lists(
    st.tuples(
        st.builds(LevelCost, st.integers(0, 10**9), st.just(0), st.integers(0, 200)), st.floats(0, 100, width=32)
    ),
    max_size=6,
)


@given(measurements)
@thoroughly
def test_no_link_pays_back_time(measured: list[tuple[LevelCost, float]]) -> None:
    link = fit_link(measured)
    assert link.alpha >= 0 and link.beta >= 0 and math.isfinite(link.alpha) and math.isfinite(link.beta)


@given(levels, seconds, per_byte, st.floats(0.01, 100), st.lists(st.floats(0.7, 1.4), min_size=6, max_size=6))
@thoroughly
def test_the_unit_of_time_does_not_matter(
    costs: list[LevelCost], alpha: float, beta: float, factor: float, noise: list[float]
) -> None:
    link = Link(alpha, beta)
    measured = [(cost, link.seconds(cost) * times) for cost, times in zip(costs, noise, strict=False)]
    once = fit_link(measured)
    again = fit_link([(cost, factor * taken) for cost, taken in measured])
    assert [again.seconds(cost) for cost in costs] == pytest.approx(
        [factor * once.seconds(cost) for cost in costs], rel=1e-6
    )


def test_the_fit_is_by_relative_error_and_one_level_alone_is_all_bytes() -> None:
    large, small = LevelCost(10**8, 0, 10), LevelCost(10**5, 0, 10)
    assert fit_link([(large, 1.0)]) == (0.0, pytest.approx(1e-8))
    assert fit_link([]) == fit_link([(large, 0.0)]) == (0.0, 0.0)
    # Bytes that seem to cost less than nothing cost nothing: relative errors of -1/3 and +1/3 are the least.
    flat = fit_link([(large, 0.01), (small, 0.02)])
    assert flat.beta == 0.0 and flat.alpha * 10 == pytest.approx(0.012)


# -- the estimate ------------------------------------------------------------------------------------------------------


def cost_of(size: float, messages: int = 4) -> LevelCost:
    return LevelCost(int(size), int(size / messages), messages)


@given(st.floats(1e-6, 1e-3), st.floats(1e-10, 1e-6), st.permutations([2e4, 1e6, 4e6, 3e7]))
@thoroughly
def test_a_link_is_estimated_from_levels_of_different_sizes(alpha: float, beta: float, sizes: list[float]) -> None:
    """In any order. And it knows how well: what remains is within three standard deviations."""
    estimate, link = LinkEstimate(), Link(alpha, beta)
    for size in sizes * 5:
        estimate = estimate.updated(cost_of(size), link.seconds(cost_of(size)), 0.0)
    for size in sizes:
        took = link.seconds(cost_of(size))
        assert estimate.link.seconds(cost_of(size)) == pytest.approx(took, rel=0.1)
        assert abs(estimate.link.seconds(cost_of(size)) - took) <= 3 * estimate.variance(cost_of(size)) ** 0.5 + 1e-12


@given(st.floats(1e-6, 1e-3), st.floats(1e-10, 1e-6), st.sampled_from([0.02, 0.25, 4.0, 50.0]))
@thoroughly
def test_a_link_that_changed_is_followed_at_once_by_the_level_that_runs(
    alpha: float, beta: float, factor: float
) -> None:
    """However sure the estimate was. A little noise moves it little."""
    estimate, cost = LinkEstimate(), cost_of(1e6)
    for step in range(200):
        noise = 1.05 if step % 2 else 0.95
        estimate = estimate.updated(cost, noise * Link(alpha, beta).seconds(cost), 0.0)
    assert estimate.link.seconds(cost) == pytest.approx(Link(alpha, beta).seconds(cost), rel=0.02)
    now = Link(alpha, factor * beta).seconds(cost)
    for _ in range(2):
        estimate = estimate.updated(cost, now, 0.0)
    if not 0.5 < now / Link(alpha, beta).seconds(cost) < 2:
        assert estimate.link.seconds(cost) == pytest.approx(now, rel=0.1)


@given(st.floats(0, 2e-3), st.floats(1e-11, 1e-7), st.booleans())
@thoroughly
def test_two_sums_of_one_link_tell_its_messages_from_its_bytes(alpha: float, beta: float, small_first: bool) -> None:
    """Even where a message takes far longer than messages usually do."""
    estimate, link = LinkEstimate(), Link(alpha, beta)
    for size in sorted((4 << 10, 256 << 10), reverse=not small_first):
        estimate = estimate.updated(cost_of(size, 1), link.seconds(cost_of(size, 1)), 0.0, same=True)
    for size in (4 << 10, 256 << 10):
        assert estimate.link.seconds(cost_of(size, 1)) == pytest.approx(link.seconds(cost_of(size, 1)), rel=0.4)


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 200), st.floats(1e-7, 100), st.floats(0, 1)), max_size=8)
)
@thoroughly
def test_whatever_is_measured_an_estimate_stays_one(measured: list[tuple[int, int, float, float]]) -> None:
    estimate = LinkEstimate()
    for size, messages, took, variance in measured:
        estimate = estimate.older(0.01).updated(LevelCost(size, size, messages), took, variance)
        assert all(map(math.isfinite, estimate))
        assert min(estimate.alpha, estimate.beta, estimate.aa, estimate.bb) >= 0


def test_what_was_no_sum_tells_nothing_and_an_old_estimate_is_less_sure() -> None:
    estimate = LinkEstimate().updated(cost_of(1e6), 0.1, 0.0)
    assert estimate == estimate.updated(cost_of(1e6), 0.0, 0.0) == estimate.updated(LevelCost(0, 0, 3), 1.0, 0.0)
    assert estimate.older(0.1).variance(cost_of(1e6)) > estimate.variance(cost_of(1e6))
    assert estimate.older(0.1).link == estimate.link


# -- what a step waits for ---------------------------------------------------------------------------------------------


@given(levels, seconds, per_byte, st.floats(0, 1), st.floats(1, 10))
@thoroughly
def test_more_bytes_or_a_slower_link_never_shorten_a_step(
    costs: list[LevelCost], alpha: float, beta: float, hideable: float, more: float
) -> None:
    link = Link(alpha, beta)
    for cost in (cost._replace(passes=1 + cost.payload_bytes % 2) for cost in costs):
        waits = link.exposed(cost, hideable)
        larger = cost._replace(payload_bytes=round(cost.payload_bytes * more))
        assert waits <= link.exposed(larger, hideable)
        assert waits <= Link(alpha, beta * more).exposed(cost, hideable)
        assert waits <= Link(alpha * more, beta).exposed(cost, hideable)
        assert waits <= link.exposed(cost, hideable / more)
        assert waits <= max(link.seconds(cost), alpha * cost.passes)
