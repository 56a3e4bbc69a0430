"""What is special to ``randomk`` and ``topk``: which blocks are sent, and when."""

from __future__ import annotations

import math

import numpy as np
import pytest
from compressing import Case, add, asked, blocks_of, every_framework, norm, once, ops_of
from frameworks import examples
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.compression import RandomK, Spec, TopK, parse
from hvdplus.compression.blocks import BLOCK, BlockSelection

every_selection = pytest.mark.parametrize("kind", [RandomK, TopK])


def sent_in(compressor: BlockSelection, spec: Spec, steps: int, grad: np.ndarray | None = None) -> np.ndarray:
    """(steps, blocks): which blocks arrive in which step."""
    ops, (count, _) = NumpyOps(), blocks_of(compressor, spec)
    grad = np.ones(spec.size, np.float32) if grad is None else grad
    ctx, table = compressor.init(ops, spec), np.zeros((steps, count), bool)
    for step in range(steps):
        arrived, payload = once(ops, compressor, ctx, grad)
        table[step] = arrived[: count * compressor.block].reshape(count, compressor.block).any(axis=1)
        ctx = compressor.advance(ops, ctx, payload)
    return table


# -- both --------------------------------------------------------------------------------------------------------------


@every_framework
@every_selection
@pytest.mark.parametrize("size", [0, 15, 16, 31, 32, 47, 160, 1603])
def test_what_fills_no_block_travels_whole(kind: type[BlockSelection], framework: str, size: int) -> None:
    """So does the tail; blocks are cut across tensors; and the payload is never larger than the bucket."""
    ops, compressor = ops_of(framework), kind(share=0.1, block=16)
    spec = Spec(((size // 3,), (size - size // 3,)), tail=5)
    grad = np.random.default_rng(size).standard_normal(spec.size, np.float32)
    count, chosen = blocks_of(compressor, spec)
    arrived, payload = once(ops, compressor, compressor.init(ops, spec), grad)
    assert np.array_equal(arrived[count * 16 :], grad[count * 16 :])
    assert np.count_nonzero(arrived[: count * 16]) == chosen * 16
    extra = count if kind is TopK else min(count, 1)
    assert ops.to_numpy(payload).nbytes == 4 * (chosen * 16 + spec.size - count * 16 + extra) <= 4 * spec.size
    if size < 32:
        assert count == 0 and np.array_equal(arrived, grad), "one block is all or nothing"


@pytest.mark.parametrize("share", [0.01, 0.05, 0.1, 0.5])
@every_selection
def test_a_payload_is_the_share_of_a_large_bucket(kind: type[BlockSelection], share: float) -> None:
    compressor, spec = kind(share=share), Spec(((1024, 1024),))
    assert compressor.block == BLOCK == 256
    sent = compressor.payload_bytes(spec) / (4 * spec.size)
    assert share * 0.99 <= sent <= share * 1.01 + (1 / 256 if kind is TopK else 0)


@every_selection
def test_where_little_is_saved_nothing_is_left_out(kind: type[BlockSelection]) -> None:
    """A share near 1 of few blocks, or blocks so small that their norms take as much room."""
    for compressor, spec in ((kind(share=0.9, block=16), Spec(((48,),))), (kind(share=0.6, block=1), Spec(((10,),)))):
        grad = Case(spec).gradients()[0]
        arrived, _ = once(NumpyOps(), compressor, compressor.init(NumpyOps(), spec), grad)
        assert compressor.payload_bytes(spec) <= 4 * spec.size
        if blocks_of(compressor, spec)[0] == 0:
            assert np.array_equal(arrived, grad)
    assert blocks_of(TopK(share=0.6, block=1), Spec(((10,),))) == (0, 0)


# -- randomk -----------------------------------------------------------------------------------------------------------


@given(st.integers(2, 60), st.floats(0.01, 0.9), st.integers(0, 1000), st.integers(0, 3))
@examples(60)
def test_every_block_is_sent_once_a_round(count: int, share: float, seed: int, position: int) -> None:
    """And none waits for more than two rounds: with independent draws some would wait for many."""
    compressor, spec = RandomK(share=share, block=2), Spec(((2 * count,),), position, seed)
    blocks, chosen = blocks_of(compressor, spec)
    if not blocks:
        return
    longest = -(-blocks // chosen)
    table = sent_in(compressor, spec, 6 * longest)
    assert (table.sum(axis=1) == chosen).all()
    bounds = [group * blocks // chosen for group in range(chosen + 1)]
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        length = end - start
        group = table[:, start:end]
        assert (group.sum(axis=1) == 1).all(), "one of every group"
        for first in range(0, len(group) - length + 1, length):
            assert (group[first : first + length].sum(axis=0) == 1).all(), "once a round"
    for block in range(blocks):
        waits = np.diff(np.flatnonzero(table[:, block]))
        assert waits.size and waits.max() < 2 * longest


def test_orders_are_random() -> None:
    """They differ between groups, rounds, seeds and buckets; and each block of a group is as likely as the others."""
    compressor = RandomK(share=0.1, block=2)
    tables = [
        sent_in(compressor, Spec(((2 * 400,),), position, seed), 200) for position, seed in ((0, 0), (1, 0), (0, 1))
    ]
    for i, table in enumerate(tables):
        assert all((table != other).any(axis=1).mean() > 0.95 for other in tables[:i])
    groups = tables[0].reshape(200, 40, 10)
    assert len({groups[:10, group].tobytes() for group in range(40)}) >= 9, "ten orders in all"
    starts = np.stack([sent_in(compressor, Spec(((800,),), 0, seed), 1)[0] for seed in range(50)])
    counts = starts.reshape(50 * 40, 10).sum(axis=0)
    assert np.abs(counts - 200).max() <= 6 * math.sqrt(200)
    rounds = [groups[start : start + 10].tobytes() for start in range(0, 200, 10)]
    assert len(set(rounds)) == len(rounds), "drawn anew in every round"


@every_framework
def test_all_frameworks_send_the_same_blocks(framework: str) -> None:
    """From the first step to beyond the end of many rounds; keys near the ends of int32 wrap alike."""
    ops, steps = ops_of(framework), 30 if framework == "tensorflow" else 100
    for seed in range(3):
        compressor, spec = RandomK(share=0.15, block=3), Spec(((301,),), seed=seed, tail=2)
        ctx, grad = compressor.init(ops, spec), np.ones(spec.size, np.float32)
        table = sent_in(compressor, spec, steps)
        for step in range(steps):
            arrived, payload = once(ops, compressor, ctx, grad)
            assert np.array_equal(arrived[:300].reshape(100, 3).any(axis=1), table[step])
            ctx = compressor.advance(ops, ctx, payload)


def test_a_constant_gradient_arrives_whole_over_a_round() -> None:
    """With error feedback, each block with all that it has waited for."""
    ops, compressor, spec = NumpyOps(), RandomK(share=0.25, block=4), Spec(((160,),))
    grad = Case(spec).gradients()[0]
    ctx, residual, arrived = compressor.init(ops, spec), np.zeros_like(grad), np.zeros_like(grad)
    for step in range(1, 41):
        payload = compressor.encode(ops, ctx, grad + residual, residual)
        arrived += compressor.decode(ops, ctx, payload)
        residual = compressor.remain(ops, ctx, grad + residual, payload)
        ctx = compressor.advance(ops, ctx, payload)
        assert np.abs(step * grad - arrived - residual).max() <= 1e-4
        assert (np.abs(residual) <= 7.01 * np.abs(grad)).all(), "less than two rounds of 4 steps are outstanding"


# -- topk --------------------------------------------------------------------------------------------------------------


@every_framework
def test_the_blocks_with_most_energy_are_sent(framework: str) -> None:
    """Without a residual, one step late: exactly the undelayed choice of a gradient that stays the same."""
    ops, compressor = ops_of(framework), TopK(share=0.2, block=8)
    spec = Spec(((400,),), ranks=2, tail=3)
    rng = np.random.default_rng(5)
    energies = np.repeat(rng.permutation(50) + 1.0, 8)
    grads = [np.append(energies * rng.choice([-1.0, 1.0], 400), np.ones(3)).astype(np.float32) for _ in range(2)]
    ctx = compressor.init(ops, spec)
    total = add([compressor.encode(ops, ctx, ops.from_numpy(grad)) for grad in grads])
    chosen = ops.to_numpy(compressor.advance(ops, ctx, total).state[0])
    # A block that was just sent is expected to hold the fresh gradient only, half of what would have been left.
    first = ops.to_numpy(ctx.state[0])
    expected = energies[::8].copy()
    expected[first] /= 2
    assert chosen.tolist() == sorted(np.argsort(-expected, kind="stable")[:10].tolist())
    first = ops.to_numpy(asked(ops, compressor, ctx, grads).state[0])
    assert first.tolist() == sorted(np.argsort(-energies[::8])[:10].tolist())


@every_framework
def test_blocks_start_at_equal_distances(framework: str) -> None:
    ops = ops_of(framework)
    ctx = TopK(share=0.1, block=4).init(ops, Spec(((404,),)))
    first = ops.to_numpy(ctx.state[0])
    assert first.dtype == np.int32 and first.tolist() == [block * 101 // 10 for block in range(10)]


@every_framework
def test_what_rides_along_is_the_root_mean_square_of_what_the_next_step_will_have(framework: str) -> None:
    """Of what stays behind after sending plus a gradient like this one, halved; no squares, so they do not overflow."""
    ops, compressor = ops_of(framework), TopK(share=0.25, block=5)
    spec = Spec(((100,),))
    rng = np.random.default_rng(1)
    fresh, residual = rng.standard_normal((2, 100)).astype(np.float32)
    ctx = asked(ops, compressor, compressor.init(ops, spec), [fresh])
    joined = fresh + residual
    payload = ops.to_numpy(compressor.encode(ops, ctx, ops.from_numpy(joined), ops.from_numpy(residual)))
    stays = joined.copy().reshape(20, 5)
    stays[ops.to_numpy(ctx.state[0])] = 0
    expected = np.linalg.norm((stays + fresh.reshape(20, 5)).astype(np.float64), axis=1) / 2 / 5**0.5
    assert np.allclose(payload[-20:], expected, rtol=1e-5)


@pytest.mark.parametrize("level", ["topk:0.1:16", "topk:0.1:16+int8", "topk:0.1:16+fp16"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_delayed_choice_is_nearly_as_good_as_the_undelayed_one(level: str, ranks: int) -> None:
    """With error feedback on stationary gradients: the energy sent against the most that as many blocks could hold.

    The references: a choice made from what is there (the best), and one that looks at energies from before sending,
    which picks half of the same blocks again.
    """
    ops, compressor = NumpyOps(), parse(level)
    spec = Spec(((3200,),), ranks=ranks)
    rng = np.random.default_rng(7)
    scales = np.repeat(np.exp(rng.standard_normal(200)), 16)
    ctx = compressor.init(ops, spec)
    residuals = [np.zeros(3200, np.float32)] * ranks
    shares = []
    for step in range(60):
        joined = [(scales * rng.standard_normal(3200)).astype(np.float32) + residual for residual in residuals]
        payloads = [compressor.encode(ops, ctx, *pair) for pair in zip(joined, residuals, strict=True)]
        arrived = compressor.decode(ops, ctx, add(payloads))
        there = sum(joined).astype(np.float64)
        best = np.sort(np.square(there).reshape(200, 16).sum(axis=1))[-20:].sum()
        if step >= 20:
            shares.append((norm(there) ** 2 - norm(there - arrived) ** 2) / best)
        residuals = [compressor.remain(ops, ctx, *pair) for pair in zip(joined, payloads, strict=True)]
        ctx = compressor.advance(ops, ctx, add(payloads))
    assert np.mean(shares) >= (0.85 if ranks == 1 else 0.75), np.mean(shares)


def test_no_block_is_forgotten() -> None:
    """What is quiet grows in the residual until it is sent: every block arrives, in the end."""
    ops, compressor, spec = NumpyOps(), TopK(share=0.1, block=4), Spec(((200,),))
    rng = np.random.default_rng(3)
    scales = np.repeat(10.0 ** rng.uniform(-1, 1, 50), 4)
    ctx, residual, seen = compressor.init(ops, spec), np.zeros(200, np.float32), np.zeros(50, int)
    for _ in range(400):
        grad = (scales * (1 + 0.1 * rng.standard_normal(200))).astype(np.float32)
        payload = compressor.encode(ops, ctx, grad + residual, residual)
        seen += compressor.decode(ops, ctx, payload).reshape(50, 4).any(axis=1)
        residual = compressor.remain(ops, ctx, grad + residual, payload)
        ctx = compressor.advance(ops, ctx, payload)
    assert seen.min() >= 1 and seen.sum() == 400 * 5


@every_framework
def test_blocks_of_very_different_scale_are_told_apart(framework: str) -> None:
    """A share of the blocks holds everything but noise 25 orders of magnitude below: that noise is still ordered."""
    ops, compressor = ops_of(framework), TopK(share=0.5, block=4)
    spec = Spec(((40,),))
    norms = np.array([1, 1e-25, 0, 1e-24, 1e3, 0, 3e-25, 1e-26, 2e-24, 0])
    grad = np.repeat(norms, 4).astype(np.float32)
    ctx = asked(ops, compressor, compressor.init(ops, spec), [grad])
    assert ops.to_numpy(ctx.state[0]).tolist() == [0, 3, 4, 6, 8]
