"""What is special to ``powersgd``: two passes over one gradient, of which the first only teaches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from compressing import add, every_framework, low_rank, norm, ops_of

from hvdplus.adapters.numpy.backend import NumpyExchange
from hvdplus.adapters.transports.in_process import run
from hvdplus.compression import Context, LowRank, Ops, Spec, parse
from hvdplus.compression.powersgd import PowerSGD
from hvdplus.control.link import Link
from hvdplus.exchange.engine import level_costs
from hvdplus.exchange.plan import Ladder, Plan
from hvdplus.exchange.schedule import Schedule

SPEC = Spec(((24, 16), (30, 20), (1, 15)), ranks=3, tail=4)


def drawn(*key: int, spec: Spec = SPEC) -> np.ndarray:
    return np.random.default_rng(key).standard_normal(spec.size, np.float32)


def one_step(ops: Ops, level: str, ctx: Context, vectors: Sequence[np.ndarray]) -> tuple[np.ndarray, list, Context]:
    """(sum that arrives, every rank's residual, next context) of a step in which all ranks take part."""
    compressor = parse(level)
    for _ in range(compressor.passes - 1):
        total = add([compressor.encode(ops, ctx, ops.from_numpy(vector)) for vector in vectors])
        ctx = compressor.advance(ops, ctx, total)
    sent = [compressor.send(ops, ctx, ops.from_numpy(vector.copy()), None) for vector in vectors]
    total = add([one.payload for one in sent])
    arrived = ops.to_numpy(compressor.decode(ops, ctx, total)).astype(np.float64)
    return arrived, [ops.to_numpy(one.left) for one in sent], compressor.advance(ops, ctx, total)


class Plain:
    """PowerSGD's algorithm 1 in float64, of one matrix (arXiv 1905.13727)."""

    def __init__(self, basis: np.ndarray) -> None:
        self.basis = basis.astype(np.float64)

    def step(self, matrices: Sequence[np.ndarray]) -> np.ndarray:
        left = np.linalg.qr(sum(matrix @ self.basis for matrix in matrices))[0]
        right = sum(matrix.T @ left for matrix in matrices)
        self.basis = np.linalg.qr(right)[0]
        return left @ right.T


@every_framework
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_it_is_power_iteration_as_published(rank: int, framework: str) -> None:
    """With error feedback, over some steps, on three ranks; small tensors and the tail arrive whole."""
    ops, level = ops_of(framework), f"powersgd:{rank}"
    ctx = parse(level).init(ops, SPEC)
    bases = [ops.to_numpy(array)[0] for array in ctx.state[:4:2]]
    plain = [Plain(basis) for basis in bases]
    places = [(slice(0, 384), (24, 16)), (slice(384, 984), (30, 20))]
    left = [np.zeros(SPEC.size, np.float32) for _ in range(SPEC.ranks)]
    for step in range(4):
        grads = [drawn(step, rank) for rank in range(SPEC.ranks)]
        vectors = [grad + held for grad, held in zip(grads, left, strict=True)]
        arrived, left, ctx = one_step(ops, level, ctx, vectors)
        np.testing.assert_allclose(arrived + sum(left), sum(vectors), atol=1e-4)
        for (part, shape), one in zip(places, plain, strict=True):
            wanted = one.step([vector[part].reshape(shape).astype(np.float64) for vector in vectors])
            np.testing.assert_allclose(arrived[part].reshape(shape), wanted, atol=2e-4 * np.abs(wanted).max())
        np.testing.assert_allclose(arrived[984:], sum(grads)[984:], atol=1e-5)
        assert norm(sum(left)) > 0.1 * norm(arrived)


@every_framework
@pytest.mark.parametrize("level", ["powersgd:3", "powersgd:3+fp16"])
def test_a_matrix_of_that_rank_arrives_whole_in_the_first_step(level: str, framework: str) -> None:
    """``lowrank`` sees it through a random basis at first."""
    ops, spec = ops_of(framework), Spec(((24, 16),), ranks=2)
    matrix = low_rank(np.random.default_rng(5), (24, 16), 3, 1.0).ravel().astype(np.float32)
    halves = [0.25 * matrix, 0.75 * matrix]

    def lost(level: str) -> float:
        return norm(one_step(ops, level, parse(level).init(ops, spec), halves)[0] - matrix) / norm(matrix)

    assert lost(level) < (2e-3 if "fp16" in level else 1e-5)
    assert lost(level.replace("powersgd", "lowrank")) > 0.1


def test_the_first_pass_sends_factors_and_nothing_else() -> None:
    one, chained = parse("powersgd:2"), parse("powersgd:2+fp16")
    assert (one.payload_bytes(SPEC, 0), one.payload_bytes(SPEC, 1)) == (4 * 2 * (24 + 30), 4 * (2 * (16 + 20) + 15 + 4))
    assert chained.step_bytes(SPEC) * 2 == one.step_bytes(SPEC) == sum(one.payload_bytes(SPEC, side) for side in (0, 1))
    assert parse("lowrank:2").step_bytes(SPEC) == 4 * (2 * (20 + 25) + 19), "the mean of its two sides"


@every_framework
@pytest.mark.parametrize("level", ["powersgd:2", "powersgd:2+fp16"])
@pytest.mark.parametrize("spec", [Spec(((2, 3), (5,)), ranks=2, tail=4), Spec((), ranks=2, tail=3)])
def test_with_nothing_to_learn_there_is_no_first_pass(spec: Spec, level: str, framework: str) -> None:
    ops, compressor = ops_of(framework), parse(level)
    grad = ops.from_numpy(drawn(1, spec=spec))
    asked: list[int] = []

    def summed(payload: object, number: int, _: int) -> object:
        asked.append(number)
        return payload

    ctx = compressor.taught(ops, compressor.init(ops, spec), grad, summed)
    assert asked == [] and compressor.payload_bytes(spec, 0) == 0 and ctx.side == 1
    sent = compressor.send(ops, ctx, ops.from_numpy(drawn(1, spec=spec)), None)
    arrived = ops.to_numpy(compressor.decode(ops, ctx, sent.payload))
    np.testing.assert_allclose(arrived, ops.to_numpy(grad), atol=2e-3)


def test_a_far_gradient_is_noticed_though_the_first_pass_has_seen_it() -> None:
    ops, compressor = ops_of("numpy"), PowerSGD(2)
    ctx = compressor.init(ops, SPEC)
    for step in range(3):
        _, _, ctx = one_step(ops, "powersgd:2", ctx, [drawn(step, rank) for rank in range(3)])
    for factor, far in ((1.0, False), (3.0, False), (1e4, True)):
        grad = factor * drawn(9, 0)
        taught = compressor.taught(ops, ctx, grad, lambda payload, *_: payload)
        assert bool(compressor.send(ops, taught, grad.copy(), None).overflow) is far, factor


def test_bases_pass_between_one_pass_and_two() -> None:
    ops, one, two = ops_of("numpy"), LowRank(4), PowerSGD(2)
    assert one.can_reuse(two) and two.can_reuse(one)
    learned = one.advance(ops, one.init(ops, SPEC), one.encode(ops, one.init(ops, SPEC), drawn(3)))
    taken = two.reuse_context(ops, two.init(ops, SPEC), learned)
    for old, new in zip(learned.state[:-1], taken.state[:-1], strict=True):
        np.testing.assert_allclose(new, old[..., :2], atol=1e-5)


def test_a_plan_has_no_side_for_a_pass() -> None:
    ladder = Ladder(["none", "lowrank:2", "powersgd:2"])
    assert sum(variant.level == 2 for variant in ladder.variants) == 1
    assert not ladder.allows(Plan(2, 1, 1.0)) and ladder.allows(Plan(2, 0, 1.0))
    schedule = Schedule(ladder, flush_steps=2)
    schedule.set_level(1)
    for _ in range(3):
        schedule.commit(schedule.next_plan())
    assert schedule.next_plan().side == 1
    schedule.set_level(2)  # whose contexts are reused
    for _ in range(3):
        plan = schedule.next_plan()
        assert plan == Plan(2, 0, 1.0)
        schedule.commit(plan)
    schedule.set_level(1)
    assert schedule.next_plan().side == 0


def test_two_passes_cost_twice_the_latency() -> None:
    (bucket,) = _buckets(((64, 64),))
    one, two = level_costs([bucket, bucket], [parse("lowrank:4"), parse("powersgd:2")], [0.0, 0.0])
    assert (one.messages, two.messages) == (2, 4) and one.payload_bytes == two.payload_bytes
    link = Link(0.001, 0.0)
    assert math.isclose(link.exposed(two, 1.0), 0.002) and math.isclose(link.exposed(one, 1.0), 0.001)


def _buckets(shapes: tuple[tuple[int, ...], ...]) -> tuple:
    return run(1, lambda transport: NumpyExchange(shapes, transport, "fp16").buckets)[0]
