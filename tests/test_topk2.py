"""What is special to ``topk2``: blocks that are chosen by what they hold in the same step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from compressing import add, asked, every_framework, norm, ops_of

from hvdplus.compression import Context, Ops, Spec, parse

SPEC = Spec(((24, 16), (30, 20)), ranks=3, tail=4)
BLOCK = 8
LEVEL = f"topk2:0.1:{BLOCK}"
COUNT = SPEC.body // BLOCK


def drawn(*key: int, spec: Spec = SPEC) -> np.ndarray:
    """Blocks of very different size."""
    rng = np.random.default_rng(key)
    sizes = np.repeat(rng.lognormal(0, 1.5, -(-spec.size // BLOCK)), BLOCK)[: spec.size]
    return (rng.standard_normal(spec.size) * sizes).astype(np.float32)


def energies(vector: np.ndarray) -> np.ndarray:
    """Root mean squares of the blocks, in double precision."""
    return np.sqrt(np.square(vector[: COUNT * BLOCK].reshape(COUNT, BLOCK).astype(np.float64)).mean(axis=1))


def one_step(
    ops: Ops, level: str, ctx: Context, vectors: Sequence[np.ndarray], first: bool = False
) -> tuple[np.ndarray, list, Context]:
    """(sum that arrives, every rank's residual, next context) of a step in which all ranks take part."""
    compressor = parse(level)
    ctx = asked(ops, compressor, ctx._replace(side=0), vectors if first else ())
    payloads = [compressor.encode(ops, ctx, ops.from_numpy(vector)) for vector in vectors]
    taught = compressor.advance(ops, ctx, add(payloads))._replace(side=1)
    taught = asked(ops, compressor, taught, vectors if first else ())
    sent = [compressor.send(ops, taught, ops.from_numpy(vector.copy()), None) for vector in vectors]
    total = add([one.payload for one in sent])
    arrived = ops.to_numpy(compressor.decode(ops, taught, total)).astype(np.float64)
    assert not any(bool(ops.to_numpy(one.overflow)) for one in sent)
    return arrived, [ops.to_numpy(one.left) for one in sent], compressor.advance(ops, taught, total)


@every_framework
def test_the_blocks_that_hold_most_in_this_step_arrive_in_it(framework: str) -> None:
    """By the sum of the ranks' energies, residuals in them, over some steps; nothing is lost."""
    ops, compressor = ops_of(framework), parse(LEVEL)
    ctx, left = compressor.init(ops, SPEC), [np.zeros(SPEC.size, np.float32)] * SPEC.ranks
    for step in range(4):
        vectors = [drawn(step, rank) + held for rank, held in enumerate(left)]
        arrived, left, ctx = one_step(ops, LEVEL, ctx, vectors)
        wanted = np.sort(np.argsort(sum(map(energies, vectors)))[-round(0.1 * COUNT) :])
        assert np.flatnonzero(energies(arrived)).tolist() == wanted.tolist()
        np.testing.assert_allclose(arrived + sum(left), sum(vectors), atol=1e-4)
        np.testing.assert_allclose(arrived[COUNT * BLOCK :], sum(vectors)[COUNT * BLOCK :], atol=1e-5)


@every_framework
@pytest.mark.parametrize("second", ["", "+fp16", "+int8"])
def test_it_holds_back_less_than_a_choice_of_the_last_step(second: str, framework: str) -> None:
    """Where the blocks that matter change, ``topk`` sends those of the step before."""
    ops, held = ops_of(framework), {}
    for level in (LEVEL, LEVEL.replace("topk2", "topk")):
        level += second
        compressor = parse(level)
        ctx = asked(ops, compressor, compressor.init(ops, SPEC), [drawn(0, r) for r in range(3)])
        vectors = [drawn(1, rank) for rank in range(SPEC.ranks)]
        if "topk2" in level:
            _, left, _ = one_step(ops, level, ctx, vectors, first=True)
        else:
            left = [ops.to_numpy(compressor.send(ops, ctx, ops.from_numpy(v.copy()), None).left) for v in vectors]
        held[level] = norm(np.concatenate(left)) / norm(np.concatenate(vectors))
    mine, other = held.values()
    assert mine < 0.8 * other


def test_both_passes_together_send_the_bytes_of_topk_and_a_number() -> None:
    one, two = parse("topk:0.1:8"), parse(LEVEL)
    assert two.payload_bytes(SPEC, 0) == 4 * COUNT
    assert two.step_bytes(SPEC) - 4 == one.step_bytes(SPEC) == 4 * (COUNT + round(0.1 * COUNT) * BLOCK + SPEC.tail)
    assert two.turns == 1 and not two.asks


@every_framework
@pytest.mark.parametrize("level", [LEVEL, LEVEL + "+fp16", LEVEL + "+int8"])
@pytest.mark.parametrize("spec", [Spec(((2, 3),), ranks=2, tail=4), Spec((), ranks=2, tail=3)])
def test_with_nothing_to_choose_there_is_no_first_pass(spec: Spec, level: str, framework: str) -> None:
    ops, compressor = ops_of(framework), parse(level)
    grad, passes = drawn(1, spec=spec), []

    def summed(payload: object, number: int, _: int) -> object:
        passes.append(number)
        return payload

    ctx = compressor.taught(ops, compressor.init(ops, spec), ops.from_numpy(grad), summed)
    ctx = asked(ops, compressor, ctx, [grad])
    assert passes == [] and compressor.payload_bytes(spec, 0) == 0
    sent = compressor.send(ops, ctx, ops.from_numpy(grad.copy()), None)
    arrived = ops.to_numpy(compressor.decode(ops, ctx, sent.payload))
    np.testing.assert_allclose(arrived, grad, atol=np.abs(grad).max() / 20)


@every_framework
def test_a_chain_learns_its_step_from_blocks_that_will_be_sent(framework: str) -> None:
    """Where the front of the bucket is quiet, the first step is no spike."""
    ops, compressor = ops_of(framework), parse(LEVEL + "+int8")

    def quiet(rank: int) -> np.ndarray:
        values = np.random.default_rng(rank).standard_normal(SPEC.size).astype(np.float32)
        values[:384] *= 1e-4
        return values

    vectors = [quiet(10 + rank) for rank in range(3)]
    _, left, _ = one_step(ops, LEVEL + "+int8", compressor.init(ops, SPEC), vectors, first=True)
    assert norm(np.concatenate(left)) < 0.97 * norm(np.concatenate(vectors))


def test_choosing_that_would_save_nothing_is_left() -> None:
    spec = Spec(((1000,),), ranks=2)
    for level in ("topk2:0.05:1", "topk2:0.5:2"):
        assert (parse(level).payload_bytes(spec, 0), parse(level).step_bytes(spec)) == (0, 4000)
    assert parse("topk2:0.05:4").step_bytes(spec) < 4000


@every_framework
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_block_that_is_not_finite_is_seen(bad: float, framework: str) -> None:
    """Even if ranks have chosen others: integers of a first pass have no infinity."""
    ops = ops_of(framework)
    for second in ("", "+fp16", "+int8"):
        compressor, vector = parse(LEVEL + second), drawn(2, 0)
        vector[3 * BLOCK + 1] = bad
        ctx = asked(ops, compressor, compressor.init(ops, SPEC), [drawn(2, 1)])
        told = compressor.encode(ops, ctx, ops.from_numpy(drawn(2, 1)))
        ctx = asked(ops, compressor, compressor.advance(ops, ctx, told)._replace(side=1), [drawn(2, 1)])
        assert 3 in ops.to_numpy(ctx.state[0]).tolist(), "it is chosen here, and not below"
        for chosen in (ctx, ctx._replace(state=(ops.from_numpy(np.arange(9, 9 + 12, dtype=np.int32)), *ctx.state[1:]))):
            with np.errstate(all="ignore"):  # NumPy says so of infinity - infinity
                sent = compressor.send(ops, chosen, ops.from_numpy(vector.copy()), None)
            assert not bool(ops.to_numpy(sent.finite)), second


@every_framework
def test_few_far_blocks_are_sent_and_many_overflow(framework: str) -> None:
    ops, compressor = ops_of(framework), parse(LEVEL)
    ctx = compressor.init(ops, SPEC)
    for step in range(3):
        _, _, ctx = one_step(ops, LEVEL, ctx, [drawn(step, rank) for rank in range(SPEC.ranks)])
    one, all_of_them = drawn(9, 0), 1e4 * drawn(9, 0)
    one[2 * BLOCK : 3 * BLOCK] += 100
    for vector, far in ((one, False), (all_of_them, True)):
        taught = compressor.taught(ops, ctx, ops.from_numpy(vector), lambda payload, *_: payload)
        sent = compressor.send(ops, taught, ops.from_numpy(vector.copy()), None)
        assert bool(ops.to_numpy(sent.overflow)) is far
        assert far or not ops.to_numpy(sent.left)[2 * BLOCK : 3 * BLOCK].any()
