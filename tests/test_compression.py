"""One table of compressors, one set of properties over all of them and over every framework.

The tables are in ``compressing.py``; what is special to one family is in test_lowrank.py, test_blocks.py,
test_integer.py and test_chain.py.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
from compressing import (
    EPSILON,
    KINDS,
    LEVELS,
    OPS,
    ROWS,
    Case,
    add,
    after_steps,
    asked,
    bits_of,
    blocks_of,
    every_level,
    for_many,
    groups,
    heard_in,
    in_numpy,
    levels_with,
    norm,
    once,
    ops_of,
    out_of_numpy,
    parts,
    rounding_backlog,
    step_of,
    tensors,
    trip_of,
)
from frameworks import examples, need
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.compression import (
    TABLE,
    Array,
    Chain,
    Compressor,
    Context,
    HorovodCompressor,
    IntB,
    LowRank,
    NoCompression,
    Ops,
    RandomK,
    Spec,
    TopK,
    builder,
    known,
    parse,
    register,
    registry,
)
from hvdplus.compression.blocks import BlockSelection
from hvdplus.compression.hashing import key, scramble, uniform
from hvdplus.compression.integer import Integer, Measured
from hvdplus.exchange.residual import add as with_residual
from hvdplus.exchange.residual import left_after_flush

other_frameworks = pytest.mark.parametrize("framework", [name for name in OPS if name != "numpy"])
usual_frameworks = pytest.mark.parametrize(
    "framework", [pytest.param(name, marks=[pytest.mark.rarely] * (name == "tensorflow")) for name in OPS]
)
"""Eager TensorFlow takes half of the time. Every run sees that it agrees with NumPy, so what holds there holds for it,
too."""

# -- the contract ------------------------------------------------------------------------------------------------------


def test_every_algorithm_is_in_the_table_of_tests() -> None:
    tried = {part.partition(":")[0].rstrip("0123456789") for level in LEVELS for part in level.split("+")}
    tried |= {"fp", "powersgd", "topk2"}  # two passes: test_powersgd.py, test_topk2.py
    assert {name if name == "topk2" else name.rstrip("0123456789") for name in TABLE} <= tried
    assert {"fp16"} <= set(LEVELS)


def exact_end(compressor: Compressor, spec: Spec) -> int:
    """Where the integers with the shared step end: what they stand for adds without any rounding."""
    if isinstance(compressor, Integer):
        return spec.body
    if isinstance(compressor, Chain) and isinstance(compressor.second, Integer):
        first = compressor.first
        return blocks_of(first, spec)[0] * first.block if isinstance(first, BlockSelection) else 0
    return 0


@usual_frameworks
@every_level
def test_payloads_add_up(level: str, framework: str) -> None:
    """decode(Σ payload) = Σ decode(payload): exactly for integers, whose tail is float32 in the end."""
    ops, compressor = ops_of(framework), parse(level)

    def check(case: Case) -> None:
        ctx = after_steps(ops, compressor, case)
        payloads = [compressor.encode(ops, ctx, ops.from_numpy(grad)) for grad in case.gradients()]
        one_by_one = [ops.to_numpy(compressor.decode(ops, ctx, payload)).astype(np.float64) for payload in payloads]
        together = ops.to_numpy(compressor.decode(ops, ctx, add(payloads)))
        assert together.shape == (case.spec.size,) and together.dtype == np.float32
        exact = exact_end(compressor, case.spec)
        assert np.array_equal(together[:exact], sum(one_by_one)[:exact])
        off, size = together - sum(one_by_one), sum(map(np.abs, one_by_one))
        rounding = ROWS[level].sums or 2 * EPSILON
        assert norm(off) <= rounding * sum(map(norm, one_by_one))
        tail_rounding = max(rounding, 4 * EPSILON) if "fp16" in level else 4 * EPSILON
        assert (np.abs(off) <= tail_rounding * size + 1e-7 * ("fp16" in level))[case.spec.body :].all()

    for_many(level, framework, check)


@usual_frameworks
@every_level
def test_a_mean_is_the_sum_scaled(level: str, framework: str) -> None:
    """To rounding, and the payload's sum, from which contexts learn, stays as it is."""
    ops, compressor = ops_of(framework), parse(level)

    def check(case: Case) -> None:
        ctx = after_steps(ops, compressor, case)
        total = add([compressor.encode(ops, ctx, ops.from_numpy(grad)) for grad in case.gradients()])
        before = ops.to_numpy(total)
        mean = ops.to_numpy(compressor.mean(ops, ctx, total, 1 / 3))
        assert np.array_equal(ops.to_numpy(total), before)
        whole = ops.to_numpy(compressor.decode(ops, ctx, total)).astype(np.float64)
        assert mean.shape == whole.shape and mean.dtype == np.float32
        assert norm(mean - whole / 3) <= 4 * EPSILON * norm(whole)

    for_many(level, framework, check)


@usual_frameworks
@pytest.mark.parametrize("level", levels_with(kind="projection"))
def test_projections_may_be_summed_before_or_after(level: str, framework: str) -> None:
    """decode(Σ encode(g)) = decode(encode(Σ g)). (Payloads need not: block norms that ride along do not add.)"""
    ops, compressor = ops_of(framework), parse(level)

    def check(case: Case) -> None:
        ctx = after_steps(ops, compressor, case)
        grads = case.gradients()
        payloads = [compressor.encode(ops, ctx, ops.from_numpy(grad)) for grad in grads]
        of_payloads = ops.to_numpy(compressor.decode(ops, ctx, add(payloads))).astype(np.float64)
        of_gradients = once(ops, compressor, ctx, sum(grads))[0].astype(np.float64)
        assert norm(of_payloads - of_gradients) <= ROWS[level].sums * sum(map(norm, grads))

    for_many(level, framework, check)


def test_which_are_projections_and_which_are_quantisers() -> None:
    for level in LEVELS:
        rounds = level.split("+")[-1].startswith(("int", "qsgd", "terngrad", "signsgd"))
        assert parse(level).kind == ("quantiser" if rounds else "projection"), level


@usual_frameworks
@every_level
def test_a_round_trip_loses_what_it_may(level: str, framework: str) -> None:
    """And what keeps a residual never grows it, tensor by tensor and element by element, or error feedback diverges."""
    ops, compressor = ops_of(framework), parse(level)

    def check(case: Case) -> None:
        ctx = after_steps(ops, compressor, case)
        for grad in case.gradients():
            trip, _ = trip_of(ops, compressor, ctx, grad)
            ROWS[level].kept(trip)
            # Signs and draws send more than there is of small elements; draws lose less than a step of each (``kept``).
            if compressor.keeps_residual and level not in ("signsgd", "int8:stochastic"):
                for _, x, y in tensors(case.spec, trip.sent, trip.arrived):
                    assert norm(x - y) <= norm(x) * (1 + 1e-5)

    for_many(level, framework, check)


@usual_frameworks
@every_level
def test_the_payload_is_as_long_as_announced_in_every_phase(level: str, framework: str) -> None:
    ops, compressor = ops_of(framework), parse(level)

    def check(case: Case) -> None:
        ctx = after_steps(ops, compressor, case)
        assert ctx.side == case.steps % compressor.sides and type(ctx.side) is int
        for _ in range(compressor.sides):
            payload = compressor.encode(ops, ctx, ops.from_numpy(case.gradients()[0]))
            assert ops.to_numpy(payload).ndim == 1
            assert ops.to_numpy(payload).nbytes == compressor.payload_bytes(case.spec, ctx.side)
            ctx = compressor.advance(ops, ctx, payload)

    for_many(level, framework, check)


@pytest.mark.parametrize(
    ("level", "size"),
    [
        ("none", 4 * 10_020),
        ("fp16", 2 * 10_020),
        ("randomk:0.01", 4 * (256 * 0 + 10_020 - 39 * 256 + 256 + 1)),
        ("topk:0.1", 4 * (4 * 256 + 39 + 10_020 - 39 * 256)),
        ("lowrank:4", 4 * (4 * 100 + 20)),
        ("int8", 10_000 + 4 * (20 + 13)),
        ("int4", 5_000 + 4 * (20 + 13)),
        ("int16", 20_000 + 4 * (20 + 13)),
        ("int3", 8 * (477 + 10 + 13)),  # 21 in 64 bits
        ("int5", 4 * (1667 + 20 + 13)),  # 6 in 32 bits
        ("int11", 8 * (2000 + 10 + 13)),  # 5 in 64 bits
        ("int12", 8 * (2000 + 10 + 13)),
        ("terngrad", 8 * (477 + 10 + 13)),
        ("lowrank:4+int8", 400 + 4 * (20 + 13)),
        ("lowrank:4+fp16", 2 * (4 * 100 + 20)),
    ],
)
def test_payload_sizes_in_closed_form(level: str, size: int) -> None:
    """A matrix of 100 x 100 and a tail of 20 on two ranks."""
    assert parse(level).payload_bytes(Spec(((100, 100),), ranks=2, tail=20)) == size


@other_frameworks
@every_level
def test_frameworks_agree_with_numpy(level: str, framework: str) -> None:
    """From equal contexts: payload, sum and next context; integers and choices of blocks bit for bit."""
    ops, reference, compressor = ops_of(framework), NumpyOps(), parse(level)

    def check(case: Case) -> None:
        assert bits_of(ops, compressor.init(ops, case.spec)) == bits_of(
            reference, compressor.init(reference, case.spec)
        )
        expected_ctx = after_steps(reference, compressor, case)
        ctx = out_of_numpy(ops, expected_ctx)
        grad, residual = case.gradients()[0], 0.7 * case.gradients(99)[0]

        payload = compressor.encode(ops, ctx, ops.from_numpy(grad), ops.from_numpy(residual))
        expected = compressor.encode(reference, expected_ctx, grad, residual)
        payloads_agree(compressor, expected_ctx, ops.to_numpy(payload), expected)
        arrived = ops.to_numpy(compressor.decode(ops, ctx, ops.from_numpy(expected)))
        expected_arrived = compressor.decode(reference, expected_ctx, expected)
        assert arrived.dtype == expected_arrived.dtype == np.float32
        exact = exact_end(compressor, case.spec)
        assert np.array_equal(arrived[:exact], expected_arrived[:exact])
        assert norm(arrived - expected_arrived) <= 1e-5 * norm(grad)

        after = compressor.advance(ops, ctx, ops.from_numpy(expected))
        contexts_agree(
            compressor, expected_ctx, expected, after, ops, compressor.advance(reference, expected_ctx, expected)
        )

    for_many(level, framework, check)


def payloads_agree(compressor: Compressor, ctx: Context, payload: np.ndarray, expected: np.ndarray) -> None:
    """Integers and what is copied in every bit; measurements to a step of theirs; floats to 1e-5."""
    assert payload.dtype == expected.dtype and payload.shape == expected.shape
    spec, first, second = ctx.spec, compressor, compressor
    if isinstance(compressor, Chain):
        first, _, inner = parts(compressor, ctx)
        second, spec = compressor.second, inner.spec
    products = isinstance(first, LowRank)
    if isinstance(second, Integer):
        if not spec.size:
            return
        mine, theirs = heard_in(second, spec, payload), heard_in(second, spec, expected)
        # A product that differs in its last bit may fall on the other side between two levels.
        assert np.abs(mine.body - theirs.body).max(initial=0) <= products
        assert np.count_nonzero(mine.body != theirs.body) <= 1 + 0.001 * spec.body
        measured = isinstance(compressor, Chain)  # block norms, or nothing
        assert (np.abs(mine.tail - theirs.tail) <= measured * (1 + 1e-6 * np.abs(theirs.tail))).all()
        apart = Measured(*np.abs(mine.measured - theirs.measured).tolist())
        logarithms = {"low_rms", "tail_low_rms", "log_rms", "tail_log_rms", "largest", "tail_largest"}
        bounds = dict.fromkeys(logarithms, 1) | {"clipped": products or measured}
        assert all(value <= bounds.get(name, 0) for name, value in apart._asdict().items()), apart
    elif payload.dtype == np.float16:
        # What was copied agrees in every bit, ties included; what was computed may differ by one in the last place.
        assert (np.abs(payload.view(np.int16).astype(int) - expected.view(np.int16)) <= (first is not second)).all()
        if isinstance(first, BlockSelection):
            blocks = blocks_of(first, ctx.spec)[0]
            copied = expected.size - (
                blocks if isinstance(first, TopK) else min(blocks, 1)
            )  # what rides along is computed
            assert payload[:copied].tobytes() == expected[:copied].tobytes()
    elif isinstance(first, BlockSelection):
        blocks = blocks_of(first, ctx.spec)[0]
        copied = expected.size - (blocks if isinstance(first, TopK) else min(blocks, 1))
        assert payload[:copied].tobytes() == expected[:copied].tobytes()
        assert np.allclose(payload[copied:], expected[copied:], rtol=1e-5, atol=0)
    elif products:
        assert norm(payload - expected) <= 1e-5 * norm(expected)
    else:
        assert payload.tobytes() == expected.tobytes()


def contexts_agree(
    compressor: Compressor, ctx: Context, total: np.ndarray, after: Context, ops: Ops, expected: Context
) -> None:
    """int32 state in every bit; bases as exactly as the condition of the factor behind them allows."""
    assert after.side == expected.side and type(after.side) is int
    assert len(after.state) == len(expected.state)
    conditions = factor_conditions(compressor, ctx, total)
    for number, (array, reference) in enumerate(zip(after.state, expected.state, strict=True)):
        values = ops.to_numpy(array)
        assert values.shape == reference.shape and values.dtype == reference.dtype
        if values.dtype == np.int32:
            assert values.tobytes() == reference.tobytes()
        elif conditions.get(number, 1.0) < 1e3:  # a basis is unique only where the factor has full rank
            bound = 1e-5 * max(1.0, conditions.get(number, 1.0) / 10) * math.sqrt(len(values))
            assert norm(values - reference) <= bound


def factor_conditions(compressor: Compressor, ctx: Context, total: np.ndarray) -> dict[int, float]:
    """Position in the state -> worst condition of the factors that advance() orthonormalises."""
    if isinstance(compressor, Chain):
        first, outer, inner = parts(compressor, ctx)
        return factor_conditions(first, outer, compressor.second.decode(NumpyOps(), inner, total))
    if not isinstance(compressor, LowRank):
        return {}
    conditions, start = {}, 0
    for number, (sides, members) in enumerate(groups(ctx.spec, compressor.rank).items()):
        shape = (len(members), sides[ctx.side], compressor.rank)
        factors = total[start : start + math.prod(shape)].reshape(shape).astype(np.float64)
        conditions[2 * number + 1 - ctx.side] = float(np.linalg.cond(factors).max())
        start += math.prod(shape)
    return conditions


@other_frameworks
@pytest.mark.parametrize("level", [level for level in LEVELS if parse(level).asks])
def test_frameworks_ask_like_numpy(level: str, framework: str) -> None:
    ops, reference, compressor = ops_of(framework), NumpyOps(), parse(level)
    spec = Spec(((20, 16), (12, 9)), seed=3, ranks=ROWS[level].ranks[-1], tail=5)
    grads = list(np.random.default_rng(8).standard_normal((spec.ranks, spec.size), np.float32))
    ctx = asked(ops, compressor, compressor.init(ops, spec), grads)
    expected = asked(reference, compressor, compressor.init(reference, spec), grads)
    assert ctx.side == expected.side
    for array, values in zip(ctx.state, expected.state, strict=True):
        if values.dtype == np.int32:
            assert ops.to_numpy(array).tobytes() == values.tobytes()
        else:
            assert norm(ops.to_numpy(array) - values) <= 1e-5 * norm(values)


RUN = Spec(((16, 12), (9,), (3, 3, 8, 8)), position=2, seed=5, tail=6)


@usual_frameworks
@every_level
def test_contexts_of_all_ranks_stay_equal_bit_for_bit(level: str, framework: str) -> None:
    """Each rank with its own compressor, ``Ops``, context and copy of the sum, and gradients that nobody else has.

    One of them is restored from its saved state again and again, and goes on in the same way.
    """
    ops_of(framework)
    ranks = ROWS[level].ranks[:2][-1]
    every = [OPS[framework].make() for _ in range(2)]
    compressors = [parse(level) for _ in range(2)]
    case = Case(RUN._replace(ranks=ranks), 0, 7)
    contexts = [compressor.init(ops, case.spec) for ops, compressor in zip(every, compressors, strict=True)]
    first = bits_of(every[0], contexts[0])
    shapes = [(array.shape, array.dtype) for array in in_numpy(every[0], contexts[0]).state]
    assert all(dtype in (np.float32, np.int32) for _, dtype in shapes)
    for step in range(OPS[framework].long):
        grads = [grad * np.float32(2.0 ** (step % 7)) for grad in case.gradients(step)]
        if step % 50 == 20:
            grads = [0 * grad for grad in grads]  # rank-deficient factors have no unique basis
        payloads = [
            compressors[rank].encode(every[rank], contexts[rank], every[rank].from_numpy(grad), None)
            for rank, grad in enumerate(grads)
        ]
        total = every[0].to_numpy(add(payloads))
        contexts = [
            compressor.advance(ops, ctx, ops.from_numpy(total))
            for compressor, ops, ctx in zip(compressors, every, contexts, strict=True)
        ]
        assert bits_of(every[0], contexts[0]) == bits_of(every[1], contexts[1])
        assert contexts[0].side == contexts[1].side
        sums = [[int(ops.checksum(array)) for array in ctx.state] for ops, ctx in zip(every, contexts, strict=True)]
        assert sums[0] == sums[1]
        assert [(array.shape, array.dtype) for array in in_numpy(every[0], contexts[0]).state] == shapes
        if step % 10 == 5:
            contexts[1] = out_of_numpy(every[1], in_numpy(every[1], contexts[1]))
            compressors[1] = parse(level)
    assert (bits_of(every[0], contexts[0]) != first) == bool(first), "contexts are really used and renewed"


@usual_frameworks
@every_level
def test_a_restored_run_goes_on_in_the_same_way(level: str, framework: str) -> None:
    ops, compressor = ops_of(framework), parse(level)
    case = Case(RUN, 5, 1)
    ctx = after_steps(ops, compressor, case)
    saved = in_numpy(ops, ctx)
    restored = out_of_numpy(OPS[framework].make(), saved)
    assert bits_of(ops, restored) == [array.tobytes() for array in saved.state] == bits_of(ops, ctx)
    for step in range(6, 10):
        grad, residual = case.gradients(step)[0], case.gradients(step + 50)[0]
        payloads = [
            which.encode(ops, context, ops.from_numpy(grad), ops.from_numpy(residual))
            for which, context in ((compressor, ctx), (parse(level), restored))
        ]
        assert ops.to_numpy(payloads[0]).tobytes() == ops.to_numpy(payloads[1]).tobytes()
        ctx = compressor.advance(ops, ctx, payloads[0])
        restored = parse(level).advance(ops, restored, payloads[1])
    assert bits_of(ops, ctx) == bits_of(ops, restored) and ctx.side == restored.side


@every_level
def test_init_depends_on_the_spec_and_on_nothing_else(level: str) -> None:
    compressor, spec = parse(level), Spec(((20, 20), (20, 20)), tail=3)

    def first(**changes: int) -> list[bytes]:
        return bits_of(NumpyOps(), compressor.init(NumpyOps(), spec._replace(**changes)))

    assert first() == first()
    if "lowrank" in level:
        bases = [array.tobytes() for array in compressor.init(NumpyOps(), spec).state if array.ndim == 3]
        for changes in ({"seed": 1}, {"position": 1}):
            changed = compressor.init(NumpyOps(), spec._replace(**changes)).state
            bases += [array.tobytes() for array in changed if array.ndim == 3]
        assert len(set(bases)) == len(bases) > 0, "no two bases are alike"
        matrices = compressor.init(NumpyOps(), spec).state[0]
        assert not np.allclose(matrices[0], matrices[1])


@pytest.mark.parametrize("level", ["randomk:0.1:16", "int8:stochastic", "qsgd:8", "terngrad", "randomk:0.1:16+int4"])
def test_randomness_differs_between_seeds_buckets_and_steps(level: str) -> None:
    ops, compressor, spec = NumpyOps(), parse(level), Spec(((40, 40),))
    grad = np.random.default_rng(0).standard_normal(spec.size, np.float32)
    seen = []
    for changes in ({}, {"seed": 1}, {"position": 1}):
        ctx = asked(ops, compressor, compressor.init(ops, spec._replace(**changes)), [grad])
        for _ in range(3):
            arrived, payload = once(ops, compressor, ctx, grad)
            ctx = compressor.advance(ops, ctx, payload)
            seen.append(arrived.tobytes())
    assert len(set(seen)) == len(seen)


@usual_frameworks
@every_level
def test_the_users_random_numbers_stay_untouched(level: str, framework: str) -> None:
    torch = need("torch") if framework.startswith("torch") else None
    tf = need("tensorflow") if framework == "tensorflow" else None
    ops, compressor = ops_of(framework), parse(level)

    def draw(touch: bool) -> list[Any]:
        random.seed(1)
        np.random.seed(1)
        if torch:
            torch.manual_seed(1)
        if tf:
            tf.random.set_seed(1)
        if touch:
            spec = Spec(((12, 12),), tail=3)
            ctx = asked(ops, compressor, compressor.init(ops, spec), [np.ones(spec.size, np.float32)])
            _, payload = once(ops, compressor, ctx, np.ones(spec.size, np.float32))
            compressor.advance(ops, ctx, payload)
        drawn = [random.random(), np.random.rand()]
        drawn += [torch.rand(()).item()] if torch else []
        return [*drawn, float(tf.random.uniform(()))] if tf else drawn

    assert draw(touch=True) == draw(touch=False)


# -- what is left ------------------------------------------------------------------------------------------------------


@usual_frameworks
@every_level
def test_what_remains_is_the_gradient_less_what_arrives(level: str, framework: str) -> None:
    ops, compressor = ops_of(framework), parse(level)

    def check(case: Case) -> None:
        ctx = after_steps(ops, compressor, case)
        grad = case.gradients()[0]
        payload = compressor.encode(ops, ctx, ops.from_numpy(grad))
        arrived = ops.to_numpy(compressor.decode(ops, ctx, payload)).astype(np.float64)
        left = ops.to_numpy(compressor.remain(ops, ctx, ops.from_numpy(grad), payload))
        assert left.shape == grad.shape and left.dtype == np.float32
        assert norm(left - (grad - arrived)) <= 1e-6 * (norm(grad) + norm(arrived))

    for_many(level, framework, check)


@usual_frameworks
@every_level
@pytest.mark.parametrize("spec", [RUN, Spec((), tail=9), Spec(((3, 2),)), Spec(((16, 12),))], ids=str)
def test_what_remains_may_overwrite_the_gradient_and_nothing_else(level: str, framework: str, spec: Spec) -> None:
    """``remain`` runs while the payload is under way. (The payload may be the gradient: then it gets a copy.)"""
    ops, compressor = ops_of(framework), parse(level)
    grad = np.random.default_rng(0).standard_normal(spec.size, np.float32)
    ctx = asked(ops, compressor, compressor.init(ops, spec), [grad])
    sent, residual = ops.from_numpy(grad), ops.from_numpy(grad)
    payload = compressor.encode(ops, ctx, sent, residual)
    before = ops.to_numpy(payload).tobytes(), bits_of(ops, ctx)
    assert ops.to_numpy(sent).tobytes() == ops.to_numpy(residual).tobytes() == grad.tobytes(), "encoding only reads"
    compressor.decode(ops, ctx, payload)
    compressor.advance(ops, ctx, payload)
    compressor.remain(ops, ctx, ops.from_numpy(grad), payload)
    assert (ops.to_numpy(payload).tobytes(), bits_of(ops, ctx)) == before


FRONT = 16
"""Values before a gradient that stands between others': a cache line, as the bits of a product depend on how memory is
aligned."""


def sends_as_it_encodes(
    ops: Ops, compressor: Compressor, ctx: Context, grad: np.ndarray, residual: np.ndarray | None = None
) -> None:
    """``send`` is ``encode``, ``sound`` and ``remain`` in one: it may overwrite the gradient, and nothing else.

    The gradient stands between others' values where a framework has views.
    """
    views = type(ops).__name__ != "TensorFlowOps"

    def before() -> Array | None:
        return None if residual is None else ops.from_numpy(residual)

    with np.errstate(over="ignore", invalid="ignore"):  # NumPy says so of infinity - infinity and of 0 * infinity
        encoded = compressor.encode(ops, ctx, ops.from_numpy(grad), before())
        payload = ops.to_numpy(encoded)
        sound = compressor.is_finite(ops, ops.from_numpy(grad), encoded)
        left = ops.to_numpy(compressor.remain(ops, ctx, ops.from_numpy(grad), encoded))
        state, among = bits_of(ops, ctx), ops.from_numpy(np.concatenate([[7] * FRONT, grad, [8]]).astype(np.float32))
        kept = before()
        sent = compressor.send(ops, ctx, among[FRONT:-1] if views else ops.from_numpy(grad), kept)
    for ours, expected in ((sent.payload, payload), (sent.left, left)):
        found = ops.to_numpy(ours)
        assert found.dtype == expected.dtype and found.shape == expected.shape
    assert bool(sent.finite) == bool(sound) and ops.to_numpy(sent.finite).shape == ()
    assert bits_of(ops, ctx) == state
    assert residual is None or ops.to_numpy(kept).tobytes() == residual.tobytes()
    if views:
        assert ops.to_numpy(among)[[FRONT - 1, -1]].tolist() == [7, 8]
    if not sound:
        return
    assert ops.to_numpy(sent.payload).tobytes() == payload.tobytes()
    off = ops.to_numpy(sent.left).astype(np.float64) - left
    assert norm(off) <= (0 if isinstance(compressor, Integer) else 2 * EPSILON) * norm(grad)
    if views:  # it is summed in place while the residual waits
        sent.payload[:] = 1
        assert np.array_equal(ops.to_numpy(sent.left), left + off)


every_residual = pytest.mark.parametrize("level", levels_with(keeps_residual=True))


@usual_frameworks
@every_residual
def test_sending_is_encoding_and_what_remains(level: str, framework: str) -> None:
    ops, compressor = ops_of(framework), parse(level)

    def check(case: Case) -> None:
        grad, residual = case.gradients()[0], 0.7 * case.gradients(99)[0]
        sends_as_it_encodes(ops, compressor, after_steps(ops, compressor, case), grad, residual)

    for_many(level, framework, check)


@usual_frameworks
@every_residual
@pytest.mark.parametrize(
    "spec",
    [
        Spec((), tail=9),
        Spec((), tail=200_000),
        Spec(((0, 3),), tail=5),
        Spec(((3, 2),)),
        Spec(((3, 2), (5,)), tail=4),  # two stretches that adjoin
        Spec(((40_000,), (30_000,)), tail=20_000),  # nothing but vectors, in blocks of the memory pool
        Spec(((12,),), tail=3),  # not even one block
    ],
    ids=str,
)
def test_sending_leaves_a_payload_alone_that_is_the_gradient(level: str, framework: str, spec: Spec) -> None:
    """Where nothing is to be compressed, the payload may be the gradient's own memory, and is under way already."""
    ops, compressor = ops_of(framework), parse(level)
    grad = np.random.default_rng(0).standard_normal(spec.size, np.float32)
    first = compressor.init(ops, spec)
    for ctx in (first, asked(ops, compressor, first, [grad])):
        sends_as_it_encodes(ops, compressor, ctx, grad)
        sends_as_it_encodes(ops, compressor, ctx, grad, grad / 2)


class Job:
    """All ranks' residuals and contexts of one bucket, with a ledger of what went in and what came out."""

    def __init__(self, ops: Ops, ranks: int, seed: int) -> None:
        self.ops, self.spec = ops, RUN._replace(ranks=ranks)
        self.rng = np.random.default_rng(seed)
        self.contexts: dict[str, Context] = {}
        self.residuals = [ops.from_numpy(np.zeros(self.spec.size, np.float32)) for _ in range(ranks)]
        self.put_in, self.came_out = np.zeros(self.spec.size), np.zeros(self.spec.size)
        self.lost = np.zeros(self.spec.size)
        """What no level keeps: the roundings of those without a residual, and of float16 sums on the wire."""
        self.bound = 0.0
        """What float32 rounding may have added up to."""

    def step(self, level: str, fraction: float) -> None:
        """One step of all ranks; levels with a residual send all of it."""
        ops, compressor = self.ops, parse(level)
        fraction = 1.0 if compressor.keeps_residual else fraction
        ctx = self.contexts.setdefault(level, compressor.init(ops, self.spec))
        payloads, alone, sent = [], np.zeros(self.spec.size), np.zeros(self.spec.size)
        for rank, residual in enumerate(self.residuals):
            grad = self.rng.standard_normal(self.spec.size, np.float32)
            joined = with_residual(ops.from_numpy(grad), residual, fraction)
            payload = compressor.encode(ops, ctx, joined, residual)
            before = ops.to_numpy(residual)
            sent += ops.to_numpy(joined)
            # It may overwrite what was encoded, which some levels send as it is.
            joined = ops.from_numpy(ops.to_numpy(joined))
            self.residuals[rank] = (
                compressor.remain(ops, ctx, joined, payload)
                if compressor.keeps_residual
                else left_after_flush(residual, fraction)
            )
            if not fraction:
                assert ops.to_numpy(self.residuals[rank]).tobytes() == before.tobytes(), "untouched"
            self.put_in += grad
            alone += ops.to_numpy(compressor.decode(ops, ctx, payload))
            self.bound += 4 * EPSILON * (norm(grad) + norm(before))
            payloads.append(payload)
        total = add(payloads)
        arrived = ops.to_numpy(compressor.decode(ops, ctx, total)).astype(np.float64)
        size = sum(norm(ops.to_numpy(compressor.decode(ops, ctx, payload))) for payload in payloads)
        assert norm(arrived - alone) <= (ROWS[level].sums or 2 * EPSILON) * size
        self.came_out += arrived
        self.lost += alone - arrived
        if not compressor.keeps_residual:
            self.lost += sent - alone
        self.contexts[level] = compressor.advance(ops, ctx, total)

    def off(self) -> float:
        """‖Σ gradients - Σ sent - Σ residuals‖."""
        left = sum(self.ops.to_numpy(residual).astype(np.float64) for residual in self.residuals)
        return norm(self.put_in - self.came_out - left - self.lost)


@usual_frameworks
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_are_what_was_sent_plus_what_is_left(framework: str, ranks: int) -> None:
    """Over random changes between all levels; each keeps its own context."""
    job = Job(ops_of(framework), ranks, seed=ranks)
    levels = [level for level in LEVELS if ranks in ROWS[level].ranks]
    rng = random.Random(ranks)
    steps = [level for level in rng.sample(levels, len(levels)) for _ in range(3)]
    while len(steps) < OPS[framework].long:
        steps += [rng.choice(levels)] * rng.randint(1, 5)
    most = 0.0
    for level in steps:
        job.step(level, fraction=rng.choice((0.0, 0.25, 1.0)))
        assert job.off() <= job.bound
        most = max(most, *(norm(job.ops.to_numpy(residual)) for residual in job.residuals))
    assert most > math.sqrt(RUN.size), "there is something in the residuals"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", levels_with(keeps_residual=True))
def test_error_feedback_settles(level: str, kind: str) -> None:
    """The residual stays within the row's multiple of a gradient, on fresh gradients of every kind.

    Nor is it smaller than rounding makes it: a step that is half of what is asked for clips what it should not.
    """
    ops, compressor, row = NumpyOps(), parse(level), ROWS[level]
    spec = Spec(((32, 40), (3, 3, 8, 16)), ranks=row.ranks[-1], tail=8)
    ctx = compressor.init(ops, spec)
    rng = np.random.default_rng(17)
    residuals = [np.zeros(spec.size, np.float32)] * spec.ranks
    for _ in range(60):
        grads = [KINDS[kind](rng, spec.size).astype(np.float32) for _ in residuals]
        joined = [grad + residual for grad, residual in zip(grads, residuals, strict=True)]
        payloads = [compressor.encode(ops, ctx, *pair) for pair in zip(joined, residuals, strict=True)]
        residuals = [compressor.remain(ops, ctx, *pair) for pair in zip(joined, payloads, strict=True)]
        ctx = compressor.advance(ops, ctx, add(payloads))
    size = math.sqrt(spec.size * np.mean(np.concatenate(grads).astype(np.float64) ** 2))
    backlog = max(map(norm, residuals)) / size
    least = 0.0
    if isinstance(compressor, IntB) and kind != "sparse":
        least = rounding_backlog(compressor.levels(spec.ranks), compressor.stochastic, -0.5)
        assert row.backlog == rounding_backlog(compressor.levels(spec.ranks), compressor.stochastic)
    assert 0.98 * least < backlog <= (row.spiky if kind == "sparse" else row.backlog)


@pytest.mark.parametrize("level", levels_with(keeps_residual=False))
def test_levels_without_a_residual_state_no_backlog(level: str) -> None:
    assert ROWS[level].backlog == ROWS[level].spiky == 0


# -- inputs at the edge ------------------------------------------------------------------------------------------------

EDGE = Spec(((16, 12), (5,), (4, 4, 3, 3)), ranks=1, tail=4)


@usual_frameworks
@every_level
def test_zero_stays_zero(level: str, framework: str) -> None:
    """At first, and also after louder steps, whatever is drawn."""
    ops, compressor = ops_of(framework), parse(level)
    loud = np.random.default_rng(0).standard_normal(EDGE.size, np.float32)
    for before in (0, 3):
        ctx = compressor.init(ops, EDGE)
        for _ in range(before):
            ctx = compressor.advance(ops, ctx, compressor.encode(ops, ctx, ops.from_numpy(loud)))
        for _ in range(4):
            arrived, payload = once(ops, compressor, ctx, np.zeros(EDGE.size, np.float32))
            assert not arrived.any() and not ops.to_numpy(payload).any()
            assert bool(compressor.is_finite(ops, ops.from_numpy(np.zeros(EDGE.size, np.float32)), payload))
            ctx = compressor.advance(ops, ctx, payload)
        if compressor.keeps_residual:
            sends_as_it_encodes(ops, compressor, ctx, np.zeros(EDGE.size, np.float32))
        assert all(np.isfinite(ops.to_numpy(array)).all() for array in ctx.state)


@usual_frameworks
@every_level
@pytest.mark.parametrize("shapes", [(), ((0,),), ((0, 7),), ((3, 0, 2, 2), (0,))], ids=str)
def test_nothing_arrives_of_nothing(level: str, framework: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    """An empty bucket needs no message. (A chain's integers still send what they measured: nothing.)"""
    ops, compressor = ops_of(framework), parse(level)
    spec, nothing = Spec(shapes), np.zeros(0, np.float32)
    ctx = compressor.init(ops, spec)
    for side in range(compressor.sides + 1):
        arrived, payload = once(ops, compressor, ctx, nothing)
        assert arrived.shape == (0,) and arrived.dtype == np.float32
        assert compressor.payload_bytes(spec, side % compressor.sides) == ops.to_numpy(payload).nbytes == 0
        if compressor.keeps_residual:
            sends_as_it_encodes(ops, compressor, ctx, nothing, nothing)
        assert bool(compressor.is_finite(ops, ops.from_numpy(nothing), payload))
        assert ops.to_numpy(compressor.remain(ops, ctx, ops.from_numpy(nothing), payload)).shape == (0,)
        ctx = compressor.advance(ops, asked(ops, compressor, ctx, [nothing]), payload)


SCALES = {"usual": 1.0, "huge": 1e30, "tiny": 1e-30, "denormal": 1e-40}
SPECS = (
    Spec(((1,),)),
    Spec(((1, 1, 1),), ranks=4),
    Spec((), tail=1),
    Spec(((0, 3),), tail=33),  # only a tail
    Spec(((20, 16),)),  # only a body
    Spec(((20, 16), (0,), (), (1,), (7,)), tail=2),
)


@usual_frameworks
@every_level
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_the_stated_bound_holds_at_the_edges(level: str, framework: str, scale: float) -> None:
    """Of buckets and of float32's range; contexts stay sane, and nothing that is finite counts as unsound."""
    for spec in SPECS:
        if spec.ranks in ROWS[level].ranks:
            at_the_edge(ops_of(framework), parse(level), spec, scale)


def at_the_edge(ops: Ops, compressor: Compressor, spec: Spec, scale: float) -> None:
    """Some steps of one rank."""
    ctx = compressor.init(ops, spec)
    for step in range(3):
        grad = np.random.default_rng(step).standard_normal(spec.size) * scale
        grad = grad.astype(np.float32)
        assert grad.any() and np.isfinite(grad).all()
        trip, payload = trip_of(ops, compressor, ctx, grad)
        ROWS[compressor.name].kept(trip)
        if compressor.keeps_residual and step == 2:
            sends_as_it_encodes(ops, compressor, ctx, grad)
        assert compressor.payload_bytes(spec, ctx.side) == ops.to_numpy(payload).nbytes
        overflows = compressor.may_overflow and scale > 1e5
        assert np.isfinite(trip.arrived).all() != overflows
        assert bool(compressor.is_finite(ops, ops.from_numpy(grad), payload)) != overflows
        ctx = compressor.advance(ops, ctx, payload)
        assert all(np.isfinite(ops.to_numpy(array)).all() for array in ctx.state)


@usual_frameworks
@pytest.mark.parametrize("level", [level for level in LEVELS if "fp16" not in level])
@pytest.mark.parametrize("power", [90, -90])
def test_nothing_depends_on_the_scale_but_the_scale(level: str, framework: str, power: int) -> None:
    """Gradients times a power of two arrive times that power: there is no absolute threshold in float32's range."""
    ops, compressor = ops_of(framework), parse(level)
    spec, factor = Spec(((20, 16), (9, 10)), ranks=1, tail=5), np.float32(2.0**power)
    contexts = [compressor.init(ops, spec)] * 2
    for step in range(4):
        grad = np.random.default_rng(step).standard_normal(spec.size, np.float32)
        plain, payload = once(ops, compressor, contexts[0], grad)
        scaled, payload_scaled = once(ops, compressor, contexts[1], grad * factor)
        assert plain.any() or step < compressor.sides, "until every side's step is known"
        if "stochastic" not in level and level not in ("qsgd:8", "qsgd:4", "terngrad"):  # drawn from the values' bits
            assert norm(scaled / factor - plain) <= 1e-5 * norm(grad) + 0.05 * norm(grad) * ("lowrank:4+int" in level)
        contexts = [
            compressor.advance(ops, ctx, what) for ctx, what in zip(contexts, (payload, payload_scaled), strict=True)
        ]
        if isinstance(compressor, Integer):
            assert int(ops.to_numpy(contexts[1].state[0])[0]) - int(ops.to_numpy(contexts[0].state[0])[0]) == power


@usual_frameworks
def test_half_precision_ends_where_float16_ends(framework: str) -> None:
    """Means beyond 65504 become infinite, below the smallest float16 zero; the sum of N large values does not."""
    ops, compressor = ops_of(framework), parse("fp16")
    ctx = compressor.init(ops, Spec(((8,),), ranks=4))
    grad = np.array([1e30, -1e30, 6e4, -6e4, 4e5, 1e-30, 1e-7, 1e-40], np.float32)
    payload = compressor.encode(ops, ctx, ops.from_numpy(grad))
    total = ops.to_numpy(compressor.decode(ops, ctx, add([payload] * 4)))
    assert total[:2].tolist() == [math.inf, -math.inf]
    assert np.allclose(total[2:4], 4 * grad[2:4], rtol=2.0**-10), "no overflow on the way: the mean fits"
    assert total[4] == math.inf, "the mean is 4e5"
    assert total[5:].tolist() == [0, 0, 0], "below 6e-8 N"
    one = compressor.init(ops, Spec(((1,),)))
    assert once(ops, compressor, one, np.array([1e-7], np.float32))[0] == np.float32(np.float16(1e-7)) > 0


SOUND = Spec(((16, 12), (5,), (4, 4, 3, 3)), tail=7)
"""197 + 144 elements: 21 blocks of 16 and 5 that fill none, then the tail."""
PLACES = (0, 17, 100, 194, 250, 335, 340, SOUND.body, SOUND.size - 1)


@usual_frameworks
@every_level
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_before_the_sum(level: str, framework: str, bad: float) -> None:
    """By the rank that holds it, wherever it is: in what is sent, in what is not, in the tail."""
    ops, compressor = ops_of(framework), parse(level)
    spec = SOUND._replace(ranks=ROWS[level].ranks[:2][-1])
    for steps in (0, 2):
        ctx = after_steps(ops, compressor, Case(spec, steps, 3))
        healthy = Case(spec, 0, 4).gradients()[0]
        payload = compressor.encode(ops, ctx, ops.from_numpy(healthy))
        assert bool(compressor.is_finite(ops, ops.from_numpy(healthy), payload))
        for place in PLACES:
            grad = healthy.copy()
            grad[place] = bad
            with np.errstate(invalid="ignore"):  # NumPy says so of infinity - infinity and of 0 * infinity
                spoiled = compressor.encode(ops, ctx, ops.from_numpy(grad), ops.from_numpy(healthy))
                assert not bool(compressor.is_finite(ops, ops.from_numpy(grad), spoiled)), place
            if compressor.keeps_residual and steps and place in PLACES[::4]:
                sends_as_it_encodes(ops, compressor, ctx, grad, healthy)
        # Compiled steps compute it before they know that it is to be dropped: shapes stay.
        with np.errstate(invalid="ignore"):
            after = compressor.advance(ops, ctx, add([payload, spoiled][-spec.ranks :]))
        for array, before in zip(after.state, ctx.state, strict=True):
            assert ops.to_numpy(array).shape == ops.to_numpy(before).shape


@usual_frameworks
@pytest.mark.parametrize("level", [level for level in LEVELS if not parse(level).needs_finite_check])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_levels_that_need_not_settle_deliver_what_is_not_finite(level: str, framework: str, bad: float) -> None:
    """Where it was, from one rank only, as a plain all-reduce does; next to it nothing is spoiled."""
    ops, compressor = ops_of(framework), parse(level)
    spec = SOUND._replace(ranks=2)
    ctx = compressor.init(ops, spec)
    grad = np.random.default_rng(0).standard_normal(spec.size, np.float32)
    healthy = compressor.encode(ops, ctx, ops.from_numpy(grad))
    expected = ops.to_numpy(compressor.decode(ops, ctx, healthy + healthy))
    for place in PLACES:
        spoiled = grad.copy()
        spoiled[place] = bad
        total = healthy + compressor.encode(ops, ctx, ops.from_numpy(spoiled))
        arrived = ops.to_numpy(compressor.decode(ops, ctx, total))
        assert np.flatnonzero(~np.isfinite(arrived)).tolist() == [place]
        assert np.array_equal(arrived[place], np.float32(bad), equal_nan=True)
        assert np.array_equal(np.delete(arrived, place), np.delete(expected, place))


@usual_frameworks
@pytest.mark.parametrize("level", ["none", "randomk:0.1:16", "int8", "int2", "int8:stochastic", "qsgd:8", "signsgd"])
def test_the_largest_floats_are_sound(level: str, framework: str) -> None:
    """Where nothing is summed within a rank there is no overflow either (``lowrank`` and block norms do sum)."""
    ops, compressor = ops_of(framework), parse(level)
    grad = np.full(SOUND.size, 3e38, np.float32)
    payload = compressor.encode(ops, compressor.init(ops, SOUND), ops.from_numpy(grad))
    assert bool(compressor.is_finite(ops, ops.from_numpy(grad), payload))


# TensorFlow knows no strides.
@pytest.mark.parametrize("framework", [name for name in OPS if name in ("numpy", "torch")])
@every_level
def test_a_bucket_may_be_a_view_with_gaps(level: str, framework: str) -> None:
    ops, compressor = ops_of(framework), parse(level)
    case = Case(SOUND, 3, 2)
    ctx = after_steps(ops, compressor, case)
    wide = np.random.default_rng(0).standard_normal(2 * SOUND.size, np.float32)

    def view() -> Any:
        return ops.from_numpy(wide)[::2]

    plain = ops.from_numpy(wide[::2].copy())
    expected = compressor.encode(ops, ctx, plain, plain)
    payload = compressor.encode(ops, ctx, view(), view())
    # Products and sums of squares may run in other kernels, with other last bits.
    computed = compressor.uses_products or level.startswith("randomk")
    tolerance = 1e-6 * computed * norm(wide)
    if "int" in level and computed:
        assert ops.to_numpy(payload).shape == ops.to_numpy(expected).shape
    else:
        assert norm(ops.to_numpy(payload) - ops.to_numpy(expected)) <= tolerance
    assert bool(compressor.is_finite(ops, view(), payload))
    left = ops.to_numpy(compressor.remain(ops, ctx, view(), payload))
    expected_left = ops.to_numpy(compressor.remain(ops, ctx, ops.from_numpy(wide[::2].copy()), payload))
    assert norm(left - expected_left) <= tolerance
    if compressor.keeps_residual:
        sent = compressor.send(ops, ctx, view(), view())
        assert ops.to_numpy(sent.payload).tobytes() == ops.to_numpy(payload).tobytes() and bool(sent.finite)
        assert norm(ops.to_numpy(sent.left) - left) <= 2 * EPSILON * norm(wide)
    learned = [asked(ops, compressor, ctx, [grad]) for grad in (view(), plain)]
    for one, other in zip(*(each.state for each in learned), strict=True):
        rtol = 2 * EPSILON if ops.to_numpy(one).dtype == np.float32 else 0
        np.testing.assert_allclose(ops.to_numpy(one), ops.to_numpy(other), rtol=rtol)


# -- first steps -------------------------------------------------------------------------------------------------------


@usual_frameworks
@every_level
def test_equal_answers_teach_contexts_equally(level: str, framework: str) -> None:
    """Bit for bit, on ranks with an ``Ops`` of their own; and where a level asks, it learns something."""
    ops_of(framework)
    total = np.random.default_rng(1).standard_normal(RUN.size, np.float32)
    learned = []
    for _ in range(2):
        ops, compressor = OPS[framework].make(), parse(level)
        first = compressor.init(ops, RUN)
        ctx = asked(ops, compressor, first, [total])
        assert ctx.side == first.side and len(ctx.state) == len(first.state)
        assert (bits_of(ops, ctx) != bits_of(ops, first)) == compressor.asks
        learned.append(bits_of(ops, ctx))
        assert compressor.payload_bytes(RUN) == ops.to_numpy(compressor.encode(ops, ctx, ops.from_numpy(total))).nbytes
    assert learned[0] == learned[1]


# -- a stock Horovod compressor ----------------------------------------------------------------------------------------


class Halving:
    """Horovod's contract; every array knows these operations."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Half of it, and what it was like."""
        return tensor * 0.5, tensor.shape

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Twice that, if it is like what it was."""
        assert tensor.shape == ctx
        return tensor * 2.0


class Front:
    """Sends every other element, and remembers how many there were."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, int]:
        """The elements with even places."""
        return tensor[::2], int(tensor.shape[0])

    @staticmethod
    def decompress(tensor: Any, ctx: int) -> Any:
        """What was sent, and how long the whole was."""
        return tensor * float(ctx)


@usual_frameworks
def test_a_stock_horovod_compressor_runs_unchanged(framework: str) -> None:
    ops = ops_of(framework)
    compressor = HorovodCompressor(Halving, ops)
    assert compressor.name == "Halving" and not compressor.keeps_residual and not compressor.needs_finite_check
    assert compressor.may_overflow and compressor.sides == 1 and not compressor.asks
    spec = Spec(((3, 4), (5,)), ranks=2, tail=2)
    ctx = compressor.init(ops, spec)
    grads = Case(spec).gradients()
    payloads = [compressor.encode(ops, ctx, ops.from_numpy(grad)) for grad in grads]
    assert ops.to_numpy(payloads[0]).nbytes == compressor.payload_bytes(spec) == 4 * spec.size
    assert np.array_equal(ops.to_numpy(compressor.decode(ops, ctx, add(payloads))), grads[0] + grads[1])
    assert compressor.advance(ops, ctx, payloads[0]) == ctx == compressor.learn(ops, ctx, payloads[0])
    assert bool(compressor.is_finite(ops, ops.from_numpy(grads[0]), payloads[0]))
    grads[0][3] = math.nan
    assert not bool(compressor.is_finite(ops, grads[0], compressor.encode(ops, ctx, ops.from_numpy(grads[0]))))


@usual_frameworks
def test_a_horovod_compressors_own_contexts_are_kept_bucket_by_bucket(framework: str) -> None:
    ops = ops_of(framework)
    compressor = HorovodCompressor(Front, ops)
    contexts = [compressor.init(ops, Spec(((size,),), position=size)) for size in (7, 4)]
    payloads = [compressor.encode(ops, ctx, ops.from_numpy(np.ones(ctx.spec.size, np.float32))) for ctx in contexts]
    for ctx, payload, sent in zip(contexts, payloads, (4, 2), strict=True):
        assert compressor.payload_bytes(ctx.spec) == 4 * sent
        assert ops.to_numpy(compressor.decode(ops, ctx, payload)).tolist() == [ctx.spec.size] * sent


def test_horovods_own_half_precision() -> None:
    compression = need("horovod.torch.compression").Compression
    ops = ops_of("torch")
    compressor = HorovodCompressor(compression.fp16, ops)
    assert compressor.name == "FP16Compressor"
    spec = Spec(((10, 10),), ranks=2, tail=3)
    assert compressor.payload_bytes(spec) == 2 * spec.size
    grads = Case(spec).gradients()
    ctx = compressor.init(ops, spec)
    payloads = [compressor.encode(ops, ctx, ops.from_numpy(grad)) for grad in grads]
    assert ops.to_numpy(payloads[0]).dtype == np.float16
    arrived = ops.to_numpy(compressor.decode(ops, ctx, add(payloads)))
    assert arrived.dtype == np.float32 and norm(arrived - sum(grads)) <= 2.0**-10 * norm(sum(grads))
    same = HorovodCompressor(compression.none, ops)
    assert ops.to_numpy(same.encode(ops, ctx, ops.from_numpy(grads[0]))).tobytes() == grads[0].tobytes()


# -- hashes ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**31), max_size=4), st.integers(0, 2000))
@examples(50)
def test_the_hash_is_uniform_and_a_function_of_its_stream(stream: list[int], count: int) -> None:
    values = uniform(stream, count)
    assert values.shape == (count,) and values.dtype == np.float64
    assert np.array_equal(values, uniform(tuple(stream), count))
    assert ((values >= 0) & (values < 1)).all()
    if count >= 500:
        assert abs(values.mean() - 0.5) < 0.08 and len(set(values)) == count
        assert not np.array_equal(values, uniform([*stream, 0], count))


def test_the_hashes_are_frozen() -> None:
    """Saved contexts and mixed versions of a job depend on these bits."""
    assert uniform((0, 1, 2), 3).tolist() == [0.5224381210141875, 0.9744837900811435, 0.5395286888612912]
    assert scramble(np.array([0, 1, -1, 2**31 - 1], np.int32)).tolist() == FROZEN_SCRAMBLE
    assert [key(), key(0), key(3, 1)] == FROZEN_KEYS


FROZEN_SCRAMBLE = [0, 1364076727, -2114883783, -104067416]
FROZEN_KEYS = [1646307385, 654761263, -1307337394]


def test_keys_fill_the_int32_range() -> None:
    keys = [key(seed, position) for seed in range(40) for position in range(10)]
    assert len(set(keys)) == len(keys)
    assert -(2**31) <= min(keys) < -(2**30) and 2**30 < max(keys) < 2**31


def test_the_mixer_is_a_bijection_that_spreads_every_bit() -> None:
    """One bit changed changes half of the 32, more or less, whichever it is."""
    values = np.arange(-5000, 5000, dtype=np.int32)
    mixed = scramble(values)
    assert len(set(mixed.tolist())) == values.size
    for bit in range(32):
        changed = scramble(values ^ np.array(1 << bit, np.uint32).view(np.int32)) ^ mixed
        flips = np.unpackbits(changed.view(np.uint8)).mean() * 32
        assert 14 < flips < 18


# -- from words to compressors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("none", "none"),
        ("fp16", "fp16"),
        ("lowrank", "lowrank:4"),
        ("lowrank:1", "lowrank:1"),
        (" lowrank:1024 ", "lowrank:1024"),
        ("lowrank4", "lowrank:4"),
        ("randomk", "randomk:0.01"),
        ("topk:0.05", "topk:0.05"),
        ("topk:0.05:256", "topk:0.05"),
        ("topk:5e-2:16", "topk:0.05:16"),
        ("randomk:.25:1", "randomk:0.25:1"),
        ("int", "int8"),
        ("int8", "int8"),
        ("int:8", "int8"),
        ("int2", "int2"),
        ("int16:stochastic", "int16:stochastic"),
        ("int16:nearest", "int16"),
        ("qsgd", "qsgd:8"),
        ("qsgd4", "qsgd:4"),
        ("terngrad", "terngrad"),
        ("signsgd", "signsgd"),
    ],
)
def test_parse_and_name_are_inverse(text: str, name: str) -> None:
    assert parse(text).name == name
    assert parse(name) == parse(text)


@every_level
def test_every_rows_name_is_its_level(level: str) -> None:
    assert parse(level).name == level
    assert parse(f"  {level} ").name == level


@given(st.floats(1e-6, 0.999999), st.integers(1, 5000), st.sampled_from((RandomK, TopK)))
@examples(200)
def test_names_say_all_parameters(share: float, block: int, kind: type[BlockSelection]) -> None:
    """Two compressors are compared by name, and buckets' messages are matched by it."""
    made = kind(share=share, block=block)
    assert parse(made.name) == made


def test_usual_spellings_parse() -> None:
    for name, row in TABLE.items():
        assert parse(row.usual).name == row.usual and row.usual.startswith(name)


@pytest.mark.parametrize("text", ["", "None", "FP16", "auto", ":4", "none,fp16", "top k", "int8x", "8", "lowrank-4"])
def test_unknown_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Unknown compression") as refused:
        parse(text)
    assert repr(text) in str(refused.value)
    assert all(name in str(refused.value) for name in TABLE)


@pytest.mark.parametrize(("text", "meant"), [("lowrnk:4", "lowrank:4"), ("fp32", "none"), ("bf16", "fp16")])
def test_what_was_probably_meant_is_named(text: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean {meant}\\?"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("none:1", "takes no parameter"),
        ("fp16:x", "takes no parameter"),
        ("terngrad:2", "takes no parameter"),
        ("signsgd:2", "takes no parameter"),
        ("lowrank:x", "whole number"),
        ("lowrank:4:2", "whole number"),
        ("lowrank:1.5", "whole number"),
        ("lowrank:", "whole number"),
        ("lowrank:0", "rank from 1 to 1024"),
        ("lowrank:-1", "rank from 1 to 1024"),
        ("lowrank:1025", "rank from 1 to 1024"),
        ("topk:0", "share of the gradient, above 0 and below 1"),
        ("topk:1", "share of the gradient, above 0 and below 1"),
        ("topk:nan", "share of the gradient, above 0 and below 1"),
        ("randomk:-0.1", "share of the gradient, above 0 and below 1"),
        ("randomk:x", "a share such as 0.05"),
        ("topk:0.1:0", "blocks of 1 element or more"),
        ("topk:0.1:x", "a block length"),
        ("topk:0.1:16:3", "a share such as 0.05 and a block length"),
        ("int1", "2 to 16 bits"),
        ("int17", "2 to 16 bits"),
        ("int8:random", "nearest or stochastic"),
        ("int:x", "bits, a whole number"),
        ("int8:stochastic:1", "bits, a whole number and nearest or stochastic"),
        ("qsgd:1", "2 to 16 bits"),
        ("qsgd:8:stochastic", "bits, a whole number"),
    ],
)
def test_bad_parameters_are_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        parse(text)
    assert repr(text) in str(refused.value), "the whole of what was received"


@pytest.fixture
def clean_table() -> Iterator[None]:
    """Forget what a test registers."""
    names = set(TABLE)
    yield
    for name in set(TABLE) - names:
        del TABLE[name]
    registry._from_entry_points.cache_clear()


class Mine(NoCompression):
    """A user's own."""

    name = "mine"  # type: ignore[misc]


@pytest.mark.usefixtures("clean_table")
def test_a_registered_name_is_parsed() -> None:
    register("mine", Mine)
    assert isinstance(parse("mine"), Mine) and parse("mine").name == "mine"
    assert known()["mine"].usual == "mine"
    register("my_rank", builder(LowRank, (int, "a rank")), usual="my_rank:2")
    assert parse("my_rank:3") == LowRank(3) == parse("my_rank3")
    assert known()["my_rank"].usual == "my_rank:2"
    assert parse("my_rank:3+int8").name == "lowrank:3+int8"
    register("base64", Mine)
    assert isinstance(parse("base64"), Mine), "a name with digits at its end"
    with pytest.raises(ValueError, match="my_rank"):
        parse("unknown")


@pytest.mark.usefixtures("clean_table")
@pytest.mark.parametrize("name", ["none", "int", "lowrank"])
def test_a_taken_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="already") as refused:
        register(name, Mine)
    assert repr(name) in str(refused.value)
    assert not isinstance(parse(name), Mine)


@pytest.mark.usefixtures("clean_table")
@pytest.mark.parametrize("name", ["int8", "lowrank4", "qsgd8"])
def test_a_name_that_means_something_already_is_refused(name: str) -> None:
    """``int8`` is no name in the table, but it has a meaning that must not change behind the user's back."""
    with pytest.raises(ValueError, match=name):
        register(name, Mine)


@pytest.mark.usefixtures("clean_table")
@pytest.mark.parametrize("name", ["", "Mine", "a:b", "a+b", "a b", "9lives", "a1b", "a-b"])
def test_a_name_that_the_grammar_cannot_read_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="lower-case") as refused:
        register(name, Mine)
    assert repr(name) in str(refused.value)


@pytest.mark.usefixtures("clean_table")
def test_parameters_that_a_registered_class_does_not_take_are_a_clear_error() -> None:
    """``register`` takes a class; ``parse`` promises ValueError."""
    register("mine", Mine)
    with pytest.raises(ValueError, match="mine:3"):
        parse("mine:3")


@pytest.fixture
def brought_along(monkeypatch: pytest.MonkeyPatch, clean_table: None) -> None:
    """Another package's entry points: a compressor, one that builds none, one with a name of ours."""
    here = [
        EntryPoint("theirs", "hvdplus.compression:LowRank", registry.ENTRY_POINTS),
        EntryPoint("broken", "builtins:list", registry.ENTRY_POINTS),
        EntryPoint("fp16", "hvdplus.compression:NoCompression", registry.ENTRY_POINTS),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry for entry in here if entry.group == group])
    registry._from_entry_points.cache_clear()


@pytest.mark.usefixtures("brought_along")
def test_other_packages_bring_compressors_along() -> None:
    assert {"theirs", "broken"} <= set(known())
    assert parse("theirs") == LowRank()
    assert parse("fp16").name == "fp16", "ours is ours"
    with pytest.raises(ValueError, match="builtins:list must return a Compressor"):
        parse("broken")
    with pytest.raises(ValueError, match="already"):
        register("theirs", Mine)


@pytest.mark.usefixtures("clean_table")
def test_without_other_packages_there_are_ours() -> None:
    registry._from_entry_points.cache_clear()
    assert set(TABLE) <= set(known())
    assert parse("int8") == IntB(8)


def test_the_step_of_nothing_known_is_nothing() -> None:
    """The helper that bounds are built on reads exponents as ``power_of_two`` does."""
    for exponent in (-200, -127, -126, -20, 0, 3):
        assert step_of(exponent) == NumpyOps().power_of_two(np.array([exponent], np.int32))[0]


@every_level
def test_no_value_is_looked_at_on_a_device(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU whoever looks at a value waits for all that came before; tensors without values refuse a look.

    Copies to the device are not seen here.
    """
    torch = need("torch")
    from hvdplus.adapters.torch.ops import DeviceOps, TorchOps

    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # which knows no such device

    def steps(ops: Ops) -> None:
        compressor = parse(level)
        ctx = compressor.init(ops, RUN)
        for _ in range(compressor.sides):
            ctx = asked(ops, compressor, ctx, [torch.zeros(RUN.size, device="meta")])
            grad, residual = (torch.zeros(RUN.size, device="meta") for _ in range(2))
            payload = compressor.send(ops, ctx, grad, residual).payload
            assert payload.device.type == "meta" and 4 * payload.numel() >= compressor.payload_bytes(RUN, ctx.side) / 2
            compressor.mean(ops, ctx, payload, 0.5)
            compressor.remain(ops, ctx, grad, compressor.encode(ops, ctx, grad, residual))
            ops.checksum(torch.zeros(3, device="meta"))
            ctx = compressor.advance(ops, ctx, payload)

    steps(DeviceOps("meta"))
    if isinstance(parse(level), Integer):
        with pytest.raises(RuntimeError, match="meta"):
            steps(TorchOps("meta"))
