"""What happens to one bucket in a step, as pure functions, with the operations of every framework."""

from __future__ import annotations

import numpy as np
import pytest
from compressing import add, asked, every_framework, ops_of

from hvdplus.compression import Context, Ops, Spec, parse
from hvdplus.exchange.codec import receive_bucket, send_bucket

RANKS = 3
SPEC = Spec(((24, 16), (3, 3, 8, 16)), ranks=RANKS, tail=5)
KEEPING = ["int8", "topk:0.2:16", "randomk:0.3:16", "lowrank:2", "lowrank:2+fp16", "topk:0.2:16+int8"]


def gradients(step: int) -> list[np.ndarray]:
    return [np.random.default_rng([step, rank]).standard_normal(SPEC.size, np.float32) for rank in range(RANKS)]


def ready(ops: Ops, level: str) -> Context:
    compressor = parse(level)
    return asked(ops, compressor, compressor.init(ops, SPEC), gradients(99))


@every_framework
@pytest.mark.parametrize("level", KEEPING)
def test_what_is_not_sent_is_left(framework: str, level: str) -> None:
    """gradients + residuals before = what arrived + residuals after, over some steps whose contexts learn."""
    ops, compressor = ops_of(framework), parse(level)
    ctx, left = ready(ops, level), [np.zeros(SPEC.size, np.float32)] * RANKS
    for step in range(4):
        ctx = ctx._replace(side=step % compressor.sides)
        vectors = [grad + held for grad, held in zip(gradients(step), left, strict=True)]
        sent = [
            send_bucket(ops, compressor, ctx, ops.from_numpy(vector), ops.from_numpy(held), 1.0, True)
            for vector, held in zip([vector.copy() for vector in vectors], left, strict=True)
        ]
        assert all(bool(out.finite) for out in sent)
        left = [np.array(ops.to_numpy(out.left)) for out in sent]
        got = receive_bucket(ops, compressor, ctx, add([out.payload for out in sent]), 1 / RANKS, True)
        assert bool(got.sum_finite) and got.next_context is not None
        ctx = got.next_context
        arrived = ops.to_numpy(got.mean).astype(np.float64) * RANKS
        tolerance = 2e-3 if "fp16" in level else 1e-5
        np.testing.assert_allclose(arrived + sum(left), sum(vectors), atol=tolerance * np.abs(sum(vectors)).max())
        assert np.abs(sum(left)).max() > 1e-3


@every_framework
@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_a_level_that_keeps_none_leaves_what_was_not_flushed(framework: str, fraction: float) -> None:
    ops, compressor = ops_of(framework), parse("none")
    residual, grad = gradients(5)[:2]
    vector = grad + np.float32(fraction) * residual
    ctx = compressor.init(ops, SPEC)
    out = send_bucket(ops, compressor, ctx, ops.from_numpy(vector.copy()), ops.from_numpy(residual), fraction, True)
    assert np.array_equal(ops.to_numpy(out.payload), vector) and bool(out.finite) and out.overflow is None
    assert np.array_equal(ops.to_numpy(out.left), residual - residual * np.float32(fraction))
    assert fraction < 1 or not ops.to_numpy(out.left).any(), "the last part leaves exactly nothing"


@every_framework
@pytest.mark.parametrize("level", ["none", "fp16"])
def test_plain_steps_look_for_nothing(framework: str, level: str) -> None:
    """But fp16 for a sum that overflowed, which is sent again."""
    ops, compressor = ops_of(framework), parse(level)
    ctx, grads = compressor.init(ops, SPEC), gradients(0)
    grads[1][3] = 1e6
    with np.errstate(over="ignore"):
        sent = [send_bucket(ops, compressor, ctx, ops.from_numpy(grad.copy()), None, 0.0, False) for grad in grads]
    assert all(out[1:] == (None, None, None) for out in sent)
    got = receive_bucket(ops, compressor, ctx, add([out.payload for out in sent]), 1 / RANKS, False)
    assert got.next_context is None
    if level == "none":
        assert got.sum_finite is None
        np.testing.assert_allclose(ops.to_numpy(got.mean), sum(grads) / RANKS, rtol=1e-5, atol=1e-6)
    else:
        assert not bool(got.sum_finite)


@every_framework
@pytest.mark.parametrize("level", [*KEEPING, "qsgd:8"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_seen_before_the_sum(framework: str, level: str, value: float) -> None:
    ops, compressor = ops_of(framework), parse(level)
    ctx, (grad, *_) = ready(ops, level), gradients(1)
    grad[7] = value
    with np.errstate(all="ignore"):
        out = send_bucket(ops, compressor, ctx, ops.from_numpy(grad), None, 0.0, True)
    assert not bool(out.finite)
