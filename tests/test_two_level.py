"""Two levels on NumPy, on ranks in one process: 2 hosts x 2 ranks send what 2 ranks with the hosts' sums would send."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from ranks.reference import Reference

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.adapters.numpy.backend import NumpyExchange
from hvdplus.adapters.transports.in_process import run
from hvdplus.exchange import checkpoint
from hvdplus.exchange.two_level import groups, pays, split

LEVELS = ["none", "fp16", "randomk:0.2:32", "topk:0.2:32", "lowrank:2", "int8"]
LEVELS += ["int4", "signsgd", "topk:0.2:32+int8", "lowrank:2+fp16"]
SHAPES: list[tuple[int, ...]] = [(40, 24), (40,), (3, 16, 3, 3), (24, 40), (7,)]
HOSTS = ["a", "a", "b", "b"]


def gradients(step: int, rank: int) -> list[np.ndarray]:
    rng = np.random.default_rng([step, rank])
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def exchange(transport: Any, level: Any, hosts: list[str] | None = HOSTS, **options: Any) -> NumpyExchange:
    wanted = "on" if hosts else "off"
    transport.two_level = split(transport, hosts or [], wanted)
    return NumpyExchange(SHAPES, transport, level, **{"bucket_bytes": 6000, "two_level": wanted, **options})


@pytest.mark.parametrize("level", LEVELS)
def test_hosts_exchange_as_single_ranks_with_their_sums_would(level: str) -> None:
    def body(transport: Any) -> Any:
        x = exchange(transport, level)
        means = []
        for step in range(6):
            means.append([np.array(mean) for mean in x.reduce(gradients(step, transport.rank), 0.1)])
            x.commit()
        return means, list(x.buckets)

    results = run(4, body)
    reference = Reference(level, results[0][1], 2)
    for step in range(6):
        pairs = [(gradients(step, 2 * host), gradients(step, 2 * host + 1)) for host in (0, 1)]
        sums = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
        expected = [mean / 2 for mean in reference.step(sums)]  # of four ranks
        for means, *_ in results:
            for mean, wanted in zip(means[step], expected, strict=True):
                scale = max(1.0, float(np.abs(wanted).max()))
                np.testing.assert_allclose(mean, wanted, rtol=0, atol=(4e-3 if "fp16" in level else 1e-4) * scale)
    for means, *_ in results[1:]:
        for mine, first in zip(means, results[0][0], strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(mine, first, strict=True))


def held_back(x: NumpyExchange) -> list[np.ndarray]:
    """What a rank's state says that it holds back, tensor by tensor."""
    held = x.state()["residuals"]
    return [np.array(np.zeros(shape) if held.get(i) is None else held[i], float) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("level", ["lowrank:2", "topk:0.2:32", "int4", "topk:0.2:32+int8"])
def test_nothing_is_lost(level: str) -> None:
    """Sum of gradients = sum of what arrived + what hosts hold back."""

    def body(transport: Any) -> Any:
        x = exchange(transport, level)
        arrived = [np.zeros(shape) for shape in SHAPES]
        for step in range(8):
            for total, mean in zip(arrived, x.reduce(gradients(step, transport.rank), 0.1), strict=True):
                total += 4.0 * np.asarray(mean, np.float64)
            x.commit()
        return arrived, held_back(x)

    results = run(4, body)
    for i in range(len(SHAPES)):
        brought = sum(gradients(step, rank)[i].astype(np.float64) for step in range(8) for rank in range(4))
        held = sum(each[1][i] for each in results)
        np.testing.assert_allclose(results[0][0][i] + held, brought, atol=1e-3)


def test_what_all_ranks_hold_back_of_a_parameter_that_none_of_them_uses_stays() -> None:
    """After consolidating every rank holds something back, and hands it over to the bucket's owner in the next step."""

    def body(transport: Any) -> Any:
        x = exchange(transport, "int4")
        arrived = np.zeros(SHAPES[1])
        for step in range(5):
            grads: list[Any] = gradients(step, transport.rank)
            if step == 3:
                x.consolidate()
                grads[1] = None
            mean = x.reduce(grads, 0.1)[1]
            arrived += 0.0 if step == 3 else 4.0 * np.asarray(mean, np.float64)
            x.commit()
        return arrived, held_back(x)[1]

    results = run(4, body)
    brought = sum(gradients(step, rank)[1].astype(np.float64) for step in (0, 1, 2, 4) for rank in range(4))
    np.testing.assert_allclose(results[0][0] + sum(held for _, held in results), brought, atol=1e-3)


def test_what_owners_hold_back_is_flushed_after_a_change_of_level() -> None:
    """All ranks plan alike, whether they own a bucket or not; and so they do where a step of the flush is skipped."""

    def body(transport: Any) -> Any:
        x = exchange(transport, ["none", "int4", "lowrank:2"], drain_steps=3)
        arrived = [np.zeros(shape) for shape in SHAPES]
        for step in range(12):
            if step in (3, 6):
                x.coordinator.set_level(1 if step == 3 else 0)
            mean = x.reduce(gradients(step, transport.rank), 0.1)
            if step == 8:
                mean = x.reduce(gradients(step, transport.rank), 0.1)
            for total, each in zip(arrived, mean, strict=True):
                total += 4.0 * np.asarray(each, np.float64)
            x.commit()
        return arrived, checkpoint.residuals(x), x.coordinator.plan

    results = run(4, body)
    for i in range(len(SHAPES)):
        brought = sum(gradients(step, rank)[i].astype(np.float64) for step in range(12) for rank in range(4))
        np.testing.assert_allclose(results[0][0][i], brought, atol=1e-3)
    assert all(not held and plan == results[0][2] for _, held, plan in results)


@pytest.mark.parametrize("level", ["topk:0.2:32", "lowrank:2+fp16"])
def test_a_value_beyond_scale_on_one_rank_arrives_at_once(level: str) -> None:
    def body(transport: Any) -> Any:
        x = exchange(transport, level)
        for step in range(5):
            x.reduce(gradients(step, transport.rank), 0.1)
            x.commit()
        huge = gradients(5, transport.rank)
        if transport.rank == 3:
            huge[0] = huge[0] * np.float32(1e5)
        mean = x.reduce(huge, 0.1)
        x.commit()
        return mean[0], huge[0]

    results = run(4, body)
    expected = sum(theirs.astype(np.float64) for _, theirs in results) / 4
    for mean, _ in results:
        assert np.abs(mean - expected).max() < 0.02 * np.abs(expected).max()
        assert np.array_equal(mean, results[0][0])


def test_infinite_gradients_reach_all_and_leave_no_trace() -> None:
    def body(transport: Any) -> Any:
        x = exchange(transport, "lowrank:2")
        for step in range(3):
            x.reduce(gradients(step, transport.rank), 0.1)
            x.commit()
        bad = gradients(3, transport.rank)
        if transport.rank == 1:
            bad[0][0, 0] = np.inf
        with np.errstate(invalid="ignore"):
            mean = [np.array(each) for each in x.reduce(bad, 0.1)]
        after = x.reduce(gradients(4, transport.rank), 0.1)
        x.commit()
        return mean, [np.isfinite(each).all() for each in after], checkpoint.residuals(x)

    for mean, after, held in run(4, body):
        assert not np.isfinite(mean[0]).all() and all(after)
        assert all(np.isfinite(residual).all() for residual in held.values())


@pytest.mark.parametrize(("before", "after"), [(HOSTS, HOSTS), (HOSTS, None), (None, HOSTS)])
def test_checkpoints_cross_from_one_level_to_two_and_back(before: list[str] | None, after: list[str] | None) -> None:
    """What is held back in all is the same afterwards."""

    def held(x: NumpyExchange) -> list[np.ndarray]:
        return [sum(parts) for parts in zip(*x.transport.gather_objects(held_back(x)), strict=True)]

    def body(transport: Any) -> Any:
        x = exchange(transport, "lowrank:2", before)
        for step in range(4):
            x.reduce(gradients(step, transport.rank), 0.1)
            x.commit()
        saved, total = x.state(), held(x)
        y = exchange(transport, "lowrank:2", after)
        y.load(saved)
        loaded = held(y)
        arrived = [np.zeros(shape) for shape in SHAPES]
        for step in range(4, 8):
            for each, mean in zip(arrived, y.reduce(gradients(step, transport.rank), 0.1), strict=True):
                each += 4.0 * np.asarray(mean, np.float64)
            y.commit()
        return total, loaded, arrived, held(y)

    total, loaded, arrived, left = run(4, body)[0]
    for i in range(len(SHAPES)):
        np.testing.assert_allclose(loaded[i], total[i], atol=1e-5, err_msg="saved again before a step")
        brought = sum(gradients(step, rank)[i].astype(np.float64) for step in range(4, 8) for rank in range(4))
        np.testing.assert_allclose(arrived[i] + left[i], brought + total[i], atol=1e-3)


def test_one_ranks_checkpoint_is_complete_after_consolidating() -> None:
    def body(transport: Any) -> Any:
        x = exchange(transport, "topk:0.2:32")
        for step in range(4):
            x.reduce(gradients(step, transport.rank), 0.1)
            x.commit()
        before = [sum(parts) for parts in zip(*transport.gather_objects(held_back(x)), strict=True)]
        x.consolidate()
        return before, [4 * x.state()["residuals"][i] for i in range(len(SHAPES))]

    for before, complete in run(4, body):
        for a, b in zip(before, complete, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)


def test_every_bucket_is_sent_by_one_rank_of_a_host_and_they_take_turns() -> None:
    def body(transport: Any) -> Any:
        x = exchange(transport, "lowrank:2")
        for step in range(4):
            x.reduce(gradients(step, transport.rank), 0.1)
            x.commit()
        return len(x.buckets), [name for name, _ in x.two_level.between.sent]

    results = run(4, body)
    for host in (results[:2], results[2:]):
        sent = [name for _, names in host for name in names]
        assert len(sent) == 4 * results[0][0] and all(names for _, names in host)


@pytest.mark.parametrize(
    ("hosts", "share", "expected"),
    [
        (["a", "a", "b", "b"], 0, ([[0, 1], [2, 3]], [[0, 2], [1, 3]])),
        (["a", "b", "a", "b"], 0, ([[0, 2], [1, 3]], [[0, 1], [2, 3]])),
        (["a"] * 4, 2, ([[0, 1], [2, 3]], [[0, 2], [1, 3]])),
    ],
)
def test_groups(hosts: list[str], share: int, expected: Any) -> None:
    assert groups(hosts, share) == expected


@pytest.mark.parametrize(
    ("hosts", "wanted", "words"),
    [
        (["a", "a", "b"], "on", "same number of ranks on every host. Received: 1 and 2"),
        (["a", "a"], "on", "several hosts, with several ranks on each. Received: 1 x 2"),
        (["a", "b"], "on", "Received: 2 x 1"),
        (["a"] * 3, 2, "one that 2 divides"),
    ],
)
def test_two_levels_that_cannot_be_are_an_error_where_they_are_asked_for(hosts: Any, wanted: Any, words: str) -> None:
    def body(transport: Any) -> None:
        assert split(transport, hosts, "auto") is None and split(transport, hosts, "off") is None
        with pytest.raises(ValueError, match=words):
            split(transport, hosts, wanted)

    run(len(hosts), body)


@pytest.mark.parametrize(("slow", "expected"), [("everyone", True), ("local", False)])
def test_two_levels_are_chosen_where_they_are_faster(slow: str, expected: bool) -> None:
    """The sums of one of them take 50 ms longer."""

    def body(transport: Any) -> bool:
        levels = split(transport, HOSTS, "on")
        assert levels is not None
        part = getattr(levels, slow)
        wait = part.wait

        def late(handle: Any) -> Any:
            time.sleep(0.05)
            return wait(handle)

        part.wait = late
        return pays(NumpyOps(), levels, 1 << 16, 1 << 12)

    assert run(4, body) == [expected] * 4
