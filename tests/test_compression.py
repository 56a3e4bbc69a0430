"""One table of compressors, one set of properties over all of them and over every framework.

A new algorithm is a new row of ``LEVELS``, a new framework a new row of ``OPS``. Ranks are simulated: their payloads
are added by the framework's own ``+``.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.compression import TABLE, Array, Compressor, Context, LowRank, Ops, Spec, parse
from hvdplus.compression.hashing import uniform
from hvdplus.compression.lowrank import most_square

LEVELS = ("none", "fp16", "lowrank:1", "lowrank:4")
LOWRANK = tuple(level for level in LEVELS if level.startswith("lowrank"))
OPS = ("numpy", "torch", "tensorflow")
EXAMPLES = {"numpy": 60, "torch": 40, "tensorflow": 10}
"""How many examples a property gets; eager TensorFlow is slow."""
ROUNDING = {"none": 1e-5, "fp16": 2.0**-9, "lowrank:1": 1e-5, "lowrank:4": 1e-5}
"""What "equal to rounding" means, relative to the norm of what was added up."""

every_level = pytest.mark.parametrize("level", LEVELS)
every_lowrank = pytest.mark.parametrize("level", LOWRANK)
every_framework = pytest.mark.parametrize("framework", OPS)


@cache
def ops_of(framework: str) -> Ops:
    """The framework's ``Ops``; the test is skipped where it is not installed."""
    if framework == "torch":
        pytest.importorskip("torch")
        from hvdplus.adapters.torch.ops import TorchOps

        return TorchOps()
    if framework == "tensorflow":
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        pytest.importorskip("tensorflow")
        from hvdplus.adapters.keras.ops import TensorFlowOps

        return TensorFlowOps()
    return NumpyOps()


@dataclass(frozen=True)
class Case:
    """A bucket and what its ranks computed."""

    spec: Spec
    steps: int
    """Steps that the contexts have behind them."""
    seed: int
    scale: float

    def gradients(self, step: int = 0) -> list[np.ndarray]:
        """One float32 vector a rank."""
        rng = np.random.default_rng((self.seed, step))
        return [self.scale * rng.standard_normal(self.spec.size, np.float32) for _ in range(self.spec.ranks)]


# Large enough matrices that rank 4 compresses some, small enough tensors that some stay dense; a few are empty.
SHAPES = st.one_of(
    st.tuples(st.integers(0, 40)),
    st.tuples(st.integers(1, 30), st.integers(1, 30)),
    st.tuples(st.integers(8, 24), st.integers(8, 24)),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4)),
    st.tuples(st.integers(2, 10), st.integers(2, 10), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(2, 10), st.integers(0, 10)),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Several tensors of one to four dimensions, one, two or four ranks."""
    spec = Spec(
        tuple(draw(st.lists(SHAPES, min_size=1, max_size=4))),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 1000)),
        draw(st.sampled_from((1, 2, 4))),
    )
    return Case(spec, draw(st.integers(0, 3)), draw(st.integers(0, 10**6)), draw(st.sampled_from((1e-3, 1.0, 1e3))))


def for_many(framework: str, check: Callable[[Case], None]) -> None:
    """Check a property on as many cases as the framework's speed allows; the same ones on every machine."""
    ops_of(framework)
    settings(max_examples=EXAMPLES[framework], deadline=None, derandomize=True, database=None)(given(cases())(check))()


def add(parts: list[Array]) -> Array:
    """What a ring does."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def norm(values: np.ndarray) -> float:
    """Euclidean norm in float64: squares of 1e30 overflow in float32."""
    return float(np.linalg.norm(np.asarray(values, np.float64)))


def warm(ops: Ops, compressor: Compressor, case: Case) -> Context:
    """The context after ``case.steps`` steps."""
    ctx = compressor.init(ops, case.spec)
    for step in range(1, case.steps + 1):
        payloads = [compressor.encode(ops, ctx, ops.from_numpy(grad)) for grad in case.gradients(step)]
        ctx = compressor.advance(ops, ctx, add(payloads))
    return ctx


def once(ops: Ops, compressor: Compressor, ctx: Context, grad: np.ndarray) -> tuple[np.ndarray, Array]:
    """Encode and decode on one rank: (what arrives, the payload)."""
    payload = compressor.encode(ops, ctx, ops.from_numpy(grad))
    return ops.to_numpy(compressor.decode(ops, ctx, payload)), payload


def off_orthonormal(basis: np.ndarray) -> float:
    """How far the columns are from orthonormal: the largest element of QᵀQ - I."""
    wide = np.asarray(basis, np.float64)
    return float(np.abs(wide.T @ wide - np.eye(wide.shape[1])).max())


# -- the contract ------------------------------------------------------------------------------------------------------


def test_every_algorithm_is_in_the_table_of_tests() -> None:
    assert {level.partition(":")[0] for level in LEVELS} == set(TABLE)


@every_framework
@every_level
def test_payloads_add_up(level: str, framework: str) -> None:
    """decode(Σ payload) = Σ decode(payload)."""
    ops, compressor = ops_of(framework), parse(level)

    def check(case: Case) -> None:
        ctx = warm(ops, compressor, case)
        payloads = [compressor.encode(ops, ctx, ops.from_numpy(grad)) for grad in case.gradients()]
        one_by_one = [ops.to_numpy(compressor.decode(ops, ctx, payload)).astype(np.float64) for payload in payloads]
        together = ops.to_numpy(compressor.decode(ops, ctx, add(payloads)))
        assert together.shape == (case.spec.size,)
        assert norm(together - sum(one_by_one)) <= ROUNDING[level] * sum(map(norm, one_by_one))

    for_many(framework, check)


@every_framework
@every_level
def test_encoding_is_a_projection_so_sums_may_come_first(level: str, framework: str) -> None:
    """Σ encode(g) = encode(Σ g)."""
    ops, compressor = ops_of(framework), parse(level)

    def check(case: Case) -> None:
        ctx = warm(ops, compressor, case)
        grads = case.gradients()
        payloads = [compressor.encode(ops, ctx, ops.from_numpy(grad)) for grad in grads]
        total = ops.to_numpy(add(payloads)).astype(np.float64)
        of_sum = ops.to_numpy(compressor.encode(ops, ctx, ops.from_numpy(sum(grads)))).astype(np.float64)
        assert norm(total - of_sum) <= ROUNDING[level] * sum(norm(ops.to_numpy(payload)) for payload in payloads)

    for_many(framework, check)


@every_framework
@every_level
def test_a_round_trip_never_grows_what_is_left(level: str, framework: str) -> None:
    """‖x - decode(encode(x))‖ ≤ ‖x‖ for every tensor of the bucket, or error feedback would diverge."""
    ops, compressor = ops_of(framework), parse(level)

    def check(case: Case) -> None:
        ctx = warm(ops, compressor, case)
        grad = case.gradients()[0]
        arrived, _ = once(ops, compressor, ctx, grad)
        ends = np.cumsum(case.spec.sizes)[:-1]
        for x, y in zip(np.split(grad, ends), np.split(arrived, ends), strict=True):
            assert norm(x - y) <= norm(x) * (1 + 1e-5)
        if level == "none":
            assert np.array_equal(arrived, grad)

    for_many(framework, check)


@every_framework
@every_level
def test_the_payload_is_as_long_as_announced(level: str, framework: str) -> None:
    ops, compressor = ops_of(framework), parse(level)

    def check(case: Case) -> None:
        ctx = warm(ops, compressor, case)
        payload = ops.to_numpy(compressor.encode(ops, ctx, ops.from_numpy(case.gradients()[0])))
        assert payload.ndim == 1
        assert payload.nbytes == compressor.payload_bytes(case.spec, ctx.phase)
        assert ctx.phase == case.steps % compressor.phases

    for_many(framework, check)


@pytest.mark.parametrize("framework", [name for name in OPS if name != "numpy"])
@every_level
def test_frameworks_agree_with_numpy(level: str, framework: str) -> None:
    """From equal contexts: payload, sum and next context."""
    ops, reference, compressor = ops_of(framework), NumpyOps(), parse(level)

    def check(case: Case) -> None:
        theirs = compressor.init(ops, case.spec)
        first = compressor.init(reference, case.spec)
        assert len(theirs.state) == len(first.state)
        for array, expected in zip(theirs.state, first.state, strict=True):
            assert ops.to_numpy(array).tobytes() == expected.tobytes()

        expected_ctx = warm(reference, compressor, case)
        ctx = expected_ctx._replace(state=tuple(ops.from_numpy(array) for array in expected_ctx.state))
        grad = case.gradients()[0]
        arrived, payload = once(ops, compressor, ctx, grad)
        expected_arrived, expected_payload = once(reference, compressor, expected_ctx, grad)
        assert payload_close(ops.to_numpy(payload), expected_payload)
        assert arrived.dtype == expected_arrived.dtype == np.float32
        assert norm(arrived - expected_arrived) <= 1e-5 * norm(grad)

        after = compressor.advance(ops, ctx, ops.from_numpy(expected_payload))
        expected_after = compressor.advance(reference, expected_ctx, expected_payload)
        assert after.phase == expected_after.phase
        # A basis is unique only where the factor behind it has full rank, and as exact as its condition allows.
        conditions = factor_conditions(compressor, expected_ctx, expected_payload)
        for i, (array, expected) in enumerate(zip(after.state, expected_after.state, strict=True)):
            assert ops.to_numpy(array).shape == expected.shape
            if conditions.get(i, 1.0) < 1e3:
                assert norm(ops.to_numpy(array) - expected) <= 1e-5 * max(1.0, conditions.get(i, 1.0) / 10)

    for_many(framework, check)


def payload_close(payload: np.ndarray, expected: np.ndarray) -> bool:
    """Relative 1e-5; a float16 cast has to agree in every bit, ties included."""
    if expected.dtype == np.float16:
        return payload.dtype == np.float16 and payload.tobytes() == expected.tobytes()
    return payload.dtype == expected.dtype and norm(payload - expected) <= 1e-5 * norm(expected)


def factor_conditions(compressor: Compressor, ctx: Context, payload: np.ndarray) -> dict[int, float]:
    """Position in the state -> condition number of the factor that advance() orthonormalises; read off its layout."""
    if not isinstance(compressor, LowRank):
        return {}
    conditions, start, matrix = {}, 0, 0
    for shape, size in zip(ctx.spec.shapes, ctx.spec.sizes, strict=True):
        sides = most_square(shape)
        if min(sides) < 2 * compressor.rank:
            start += size
            continue
        length = sides[ctx.phase] * compressor.rank
        factor = payload[start : start + length].reshape(-1, compressor.rank)
        conditions[2 * matrix + 1 - ctx.phase] = float(np.linalg.cond(factor))
        start, matrix = start + length, matrix + 1
    return conditions


@every_framework
@every_level
def test_contexts_of_all_ranks_stay_equal_bit_for_bit(level: str, framework: str) -> None:
    """200 steps, each rank with its own context and its own copy of the sum, and gradients that nobody else has."""
    ops, compressor = ops_of(framework), parse(level)
    case = Case(Spec(((16, 12), (9,), (3, 3, 8, 8)), ranks=2), 0, 7, 1.0)
    contexts = [compressor.init(ops, case.spec) for _ in range(2)]
    before = [ops.to_numpy(array).tobytes() for array in contexts[0].state]
    for step in range(200):
        grads = case.gradients(step)
        if step % 50 == 20:
            grads = [0 * grad for grad in grads]  # rank-deficient factors have no unique basis
        payloads = [
            compressor.encode(ops, ctx, ops.from_numpy(grad)) for ctx, grad in zip(contexts, grads, strict=True)
        ]
        total = ops.to_numpy(add(payloads))
        contexts = [compressor.advance(ops, ctx, ops.from_numpy(total)) for ctx in contexts]
        mine, other = ([ops.to_numpy(array).tobytes() for array in ctx.state] for ctx in contexts)
        assert mine == other
        assert contexts[0].phase == contexts[1].phase
        checksums = [[int(ops.checksum(array)) for array in ctx.state] for ctx in contexts]
        assert checksums[0] == checksums[1]
    assert (mine != before) == bool(before), "contexts are really reused and renewed"


@every_level
def test_init_depends_on_seed_and_position_and_on_nothing_else(level: str) -> None:
    ops, compressor = NumpyOps(), parse(level)

    def bits(**changes: int) -> list[bytes]:
        return [array.tobytes() for array in compressor.init(ops, Spec(((20, 20), (20, 20)))._replace(**changes)).state]

    assert bits() == bits() == bits(ranks=4)
    if bits():
        assert len({*bits(), *bits(seed=1), *bits(position=1)}) == 3 * len(bits()), "no two bases are alike"


@every_framework
@every_level
def test_the_users_random_numbers_stay_untouched(level: str, framework: str) -> None:
    torch = pytest.importorskip("torch")
    tf = pytest.importorskip("tensorflow") if framework == "tensorflow" else None
    ops, compressor = ops_of(framework), parse(level)

    def draw(touch: bool) -> list[Any]:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        if tf:
            tf.random.set_seed(1)
        if touch:
            spec = Spec(((12, 12),))
            ctx = compressor.init(ops, spec)
            _, payload = once(ops, compressor, ctx, np.ones(spec.size, np.float32))
            compressor.advance(ops, ctx, payload)
        drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
        return [*drawn, float(tf.random.uniform(()))] if tf else drawn

    assert draw(touch=True) == draw(touch=False)


@given(st.lists(st.integers(0, 2**31), max_size=4), st.integers(0, 2000))
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_the_hash_is_uniform_and_a_function_of_its_stream(stream: list[int], count: int) -> None:
    values = uniform(stream, count)
    assert values.shape == (count,) and values.dtype == np.float64
    assert np.array_equal(values, uniform(tuple(stream), count))
    assert ((values >= 0) & (values < 1)).all()
    if count >= 500:
        assert abs(values.mean() - 0.5) < 0.08 and len(set(values)) == count
        assert not np.array_equal(values, uniform([*stream, 0], count))


def test_the_hash_is_frozen() -> None:
    """Saved contexts and mixed versions of a job depend on these bits."""
    assert uniform((0, 1, 2), 3).tolist() == [0.5224381210141875, 0.9744837900811435, 0.5395286888612912]


# -- inputs at the edge ------------------------------------------------------------------------------------------------

EDGE = Spec(((16, 12), (5,), (4, 4, 3, 3)), ranks=2)


@every_framework
@every_level
def test_zero_stays_zero(level: str, framework: str) -> None:
    ops, compressor = ops_of(framework), parse(level)
    ctx = compressor.init(ops, EDGE)
    for _ in range(4):
        arrived, payload = once(ops, compressor, ctx, np.zeros(EDGE.size, np.float32))
        assert not arrived.any() and not ops.to_numpy(payload).any()
        ctx = compressor.advance(ops, ctx, payload)
    assert all(off_orthonormal(ops.to_numpy(array)) < 1e-5 for array in ctx.state)


@every_framework
@every_level
@pytest.mark.parametrize("shapes", [(), ((0,),), ((0, 7),), ((3, 0, 2, 2), (0,))])
def test_nothing_is_sent_of_nothing(level: str, framework: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    ops, compressor = ops_of(framework), parse(level)
    spec = Spec(shapes)
    ctx = compressor.init(ops, spec)
    for phase in range(compressor.phases + 1):
        arrived, payload = once(ops, compressor, ctx, np.zeros(0, np.float32))
        assert arrived.shape == (0,) and arrived.dtype == np.float32
        assert compressor.payload_bytes(spec, phase % compressor.phases) == ops.to_numpy(payload).nbytes == 0
        ctx = compressor.advance(ops, ctx, payload)


@every_framework
@every_level
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1, 1)])
def test_a_single_element_is_only_rounded(level: str, framework: str, shape: tuple[int, ...]) -> None:
    ops, compressor = ops_of(framework), parse(level)
    ctx = compressor.init(ops, Spec((shape,), ranks=4))
    arrived, payload = once(ops, compressor, ctx, np.array([-1.0 / 3], np.float32))
    assert arrived.shape == (1,)
    assert abs(arrived[0] + 1 / 3) <= (2.0**-11 / 3 if level == "fp16" else 1e-8)
    assert ops.to_numpy(payload).nbytes == compressor.payload_bytes(Spec((shape,)))


@every_framework
@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_huge_and_tiny_gradients_survive_what_keeps_float32(framework: str, scale: float) -> None:
    ops = ops_of(framework)
    rng = np.random.default_rng(3)
    left, right = rng.standard_normal((16, 1)), rng.standard_normal((1, 12))
    grad = np.concatenate([(left @ right).ravel(), rng.standard_normal(5 + 144)])
    grad = (grad / np.abs(grad).max() * scale).astype(np.float32)
    assert np.array_equal(once(ops, parse("none"), parse("none").init(ops, EDGE), grad)[0], grad)
    for level in LOWRANK:
        compressor = parse(level)
        ctx = compressor.init(ops, EDGE)
        for _ in range(4):
            arrived, payload = once(ops, compressor, ctx, grad)
            ctx = compressor.advance(ops, ctx, payload)
            assert all(off_orthonormal(ops.to_numpy(array)) < 1e-5 for array in ctx.state)
        assert norm(arrived[:192] - grad[:192]) <= 1e-5 * norm(grad[:192]), "a rank-1 matrix of any scale is recovered"


@every_framework
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


@every_framework
@every_level
def test_denormal_gradients_are_kept_or_lost_but_poison_nothing(level: str, framework: str) -> None:
    """1/1e-40 is infinite in float32: scaling by a reciprocal once turned every later context into NaN."""
    ops, compressor = ops_of(framework), parse(level)
    grad = np.linspace(-1e-40, 1e-40, EDGE.size, dtype=np.float64).astype(np.float32)
    assert grad.any()
    ctx = compressor.init(ops, EDGE)
    for _ in range(4):
        arrived, payload = once(ops, compressor, ctx, grad)
        assert np.abs(arrived).max() <= 1e-38 and np.isfinite(arrived).all()
        ctx = compressor.advance(ops, ctx, payload)
        assert all(off_orthonormal(ops.to_numpy(array)) < 1e-5 for array in ctx.state)
    if level == "none":
        assert np.array_equal(arrived, grad)
    if level == "fp16":
        assert not arrived.any()


@every_framework
@every_level
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # as NumPy says of inf - inf
def test_what_is_not_finite_arrives_as_not_finite(level: str, framework: str, bad: float) -> None:
    """In the tensor where it was, from one rank only, and next to it nothing is spoiled; no step raises."""
    ops, compressor = ops_of(framework), parse(level)
    for place, tensor in ((17, slice(0, 192)), (194, slice(192, 197)), (340, slice(197, 341))):
        ctx = compressor.init(ops, EDGE)
        grad = np.random.default_rng(0).standard_normal(EDGE.size, np.float32)
        healthy = compressor.encode(ops, ctx, ops.from_numpy(grad))
        expected = ops.to_numpy(compressor.decode(ops, ctx, healthy + healthy))
        grad[place] = bad
        total = healthy + compressor.encode(ops, ctx, ops.from_numpy(grad))
        arrived = ops.to_numpy(compressor.decode(ops, ctx, total))
        assert not np.isfinite(arrived[tensor]).all()
        others = np.ones(EDGE.size, bool)
        others[tensor] = False
        assert np.allclose(arrived[others], expected[others], rtol=1e-5, atol=1e-5)
        if not isinstance(compressor, LowRank):
            assert np.flatnonzero(~np.isfinite(arrived)).tolist() == [place]
            assert np.array_equal(arrived[place], np.float32(bad), equal_nan=True)
        compressor.advance(ops, ctx, total)  # compiled steps compute it before they know that it is to be dropped


# -- the operations that frameworks provide ----------------------------------------------------------------------------


@every_framework
def test_all_finite_is_exact(framework: str) -> None:
    ops = ops_of(framework)
    for values, finite in (
        ([], True),
        ([0.0, -1.0], True),
        ([3e38, 3e38, -3e38], True),  # their norm is not
        ([1.0, math.nan], False),
        ([math.inf, 0.0], False),
        ([math.inf, -math.inf], False),
        ([3e38, 3e38, math.nan], False),
    ):
        assert bool(ops.all_finite(ops.from_numpy(np.array(values, np.float32)))) == finite, values


@every_framework
def test_the_largest_magnitude(framework: str) -> None:
    ops = ops_of(framework)
    for values, largest in (([], 0.0), ([0.0, -0.0], 0.0), ([1.0, -3.5, 2.0], 3.5), ([1e-30], 1e-30), ([-3e38], 3e38)):
        answer = ops.to_numpy(ops.max_abs(ops.from_numpy(np.array(values, np.float32))))
        assert answer.shape == () and answer.dtype == np.float32 and answer == np.float32(largest)


@every_framework
def test_checksums_see_every_bit_and_agree_with_numpy(framework: str) -> None:
    ops, reference = ops_of(framework), NumpyOps()
    values = np.random.default_rng(0).standard_normal((7, 3)).astype(np.float32)
    values[0] = 0.0, -1e-45, math.inf
    expected = int(reference.checksum(values))
    assert int(ops.checksum(ops.from_numpy(values))) == expected == int(values.view(np.int32).astype(object).sum())
    for i in range(values.size):
        for bit in (0, 13, 31):
            changed = values.copy()
            changed.view(np.uint32).ravel()[i] ^= np.uint32(1 << bit)
            assert int(ops.checksum(ops.from_numpy(changed))) != expected
    assert int(ops.checksum(ops.from_numpy(np.zeros(0, np.float32)))) == 0
    many = np.full(100, -1e-45, np.float32)  # 100 times the smallest int32: wraps in 32 bits, not in 64
    assert int(ops.checksum(ops.from_numpy(many))) == 100 * int(many.view(np.int32)[0])


@every_framework
def test_a_copy_to_the_framework_and_back_is_bit_for_bit_and_a_copy(framework: str) -> None:
    ops = ops_of(framework)
    values = np.array([[0.0, -0.0, math.nan], [1e-45, math.inf, -1.5]], np.float32)
    there = ops.from_numpy(values)
    back = ops.to_numpy(there)
    assert back.tobytes() == values.tobytes() and back.shape == values.shape and back.dtype == values.dtype
    kept = values.tobytes()
    values[:] = 7
    back[:] = 8
    assert ops.to_numpy(there).tobytes() == kept


@every_framework
@pytest.mark.parametrize("kind", ["full", "deficient", "one column zero", "zero", "tiny", "square"])
def test_orthonormal_whatever_comes(framework: str, kind: str) -> None:
    ops = ops_of(framework)
    rng = np.random.default_rng(5)
    columns = rng.standard_normal((4 if kind == "square" else 20, 4))
    if kind == "deficient":
        columns = columns[:, :2] @ rng.standard_normal((2, 4))
    elif kind == "one column zero":
        columns[:, 1] = 0
    elif kind == "zero":
        columns[:] = 0
    elif kind == "tiny":
        columns *= 1e-30
    basis = ops.to_numpy(ops.orthonormal(ops.from_numpy(columns.astype(np.float32)))).astype(np.float64)
    assert basis.shape == columns.shape
    assert off_orthonormal(basis) < 1e-5
    if kind == "tiny":  # some frameworks take squares that underflow for zeros; that is why callers scale first
        return
    assert norm(columns - basis @ (basis.T @ columns)) <= 1e-5 * norm(columns), "the column space is inside"
    if kind in ("full", "square"):
        triangle = basis.T @ columns
        assert (np.diag(triangle) > 0).all() and norm(np.tril(triangle, -1)) <= 1e-5 * norm(triangle)


# -- lowrank: quality, not only identities -----------------------------------------------------------------------------


def low_rank(rng: np.random.Generator, shape: tuple[int, ...], rank: int, scale: float) -> np.ndarray:
    """A tensor whose matrix view has exactly ``rank``, flat."""
    rows, columns = most_square(shape)
    return scale * (rng.standard_normal((rows, rank)) @ rng.standard_normal((rank, columns))).ravel()


@every_framework
@every_lowrank
def test_matrices_of_that_rank_are_recovered_each_of_them(level: str, framework: str) -> None:
    """The same matrices, step after step and without a residual: once the bases are warm nothing is lost.

    Several equal-shaped matrices of very different size share a bucket: normalised together by one norm, as a known
    implementation does at rank 1, most of them would stay lost.
    """
    ops, compressor = ops_of(framework), parse(level)
    assert isinstance(compressor, LowRank)
    rng = np.random.default_rng(11)
    shapes = ((24, 16), (24, 16), (7,), (24, 16), (24, 16), (3, 3, 8, 16), (16, 8, 3, 3))
    for rank in {1, compressor.rank}:
        parts = [
            rng.standard_normal(7) if len(shape) == 1 else low_rank(rng, shape, rank, scale)
            for shape, scale in zip(shapes, (1.0, 1e-25, 1.0, 1e4, 1e-3, 1.0, 1e2), strict=True)
        ]
        grad = np.concatenate(parts).astype(np.float32)
        ctx = compressor.init(ops, Spec(shapes))
        ends = np.cumsum(Spec(shapes).sizes)[:-1]
        for step in range(6):
            arrived, payload = once(ops, compressor, ctx, grad)
            ctx = compressor.advance(ops, ctx, payload)
            for x, y in zip(np.split(grad, ends), np.split(arrived, ends), strict=True):
                assert step < 4 or norm(x - y) <= 1e-5 * norm(x), "in both phases"


@every_framework
@every_lowrank
def test_full_rank_matrices_come_near_the_best_that_rank_can_do(level: str, framework: str) -> None:
    """The error after some steps is within 2 % of the truncated singular value decomposition's."""
    ops, compressor = ops_of(framework), parse(level)
    assert isinstance(compressor, LowRank)
    rng = np.random.default_rng(12)
    spec = Spec(((20, 12),) * 4)
    spectrum = 2.0 ** -np.arange(12)
    matrices = []
    for scale in (1.0, 1.0, 1e-5, 1e3):
        u, v = np.linalg.qr(rng.standard_normal((20, 12)))[0], np.linalg.qr(rng.standard_normal((12, 12)))[0]
        matrices.append(scale * (u * spectrum) @ v.T)
    grad = np.concatenate([matrix.ravel() for matrix in matrices]).astype(np.float32)
    ctx = compressor.init(ops, spec)
    best = norm(spectrum[compressor.rank :]) / norm(spectrum)
    for step in range(12):
        arrived, payload = once(ops, compressor, ctx, grad)
        ctx = compressor.advance(ops, ctx, payload)
        for x, y in zip(np.split(grad, 4), np.split(arrived, 4), strict=True):
            assert step < 10 or best * (1 - 1e-3) <= norm(x - y) / norm(x) <= best * 1.02, "in both phases"


@every_framework
def test_bases_stay_orthonormal_through_changing_and_degenerate_gradients(framework: str) -> None:
    ops, compressor = ops_of(framework), parse("lowrank:4")
    rng = np.random.default_rng(13)
    spec = Spec(((24, 16), (16, 16)))
    kinds = [
        lambda: rng.standard_normal(spec.size),
        lambda: np.zeros(spec.size),
        lambda: np.concatenate([low_rank(rng, shape, 1, 1.0) for shape in spec.shapes]),
        lambda: 1e-30 * rng.standard_normal(spec.size),
        lambda: 1e30 * rng.standard_normal(spec.size),
        lambda: np.ones(spec.size),
        lambda: 1e-41 * rng.standard_normal(spec.size),
    ]
    ctx = compressor.init(ops, spec)
    for step in range(42 if framework != "tensorflow" else 21):
        grad = kinds[step * 3 % 7 if step % 2 else step % 7]().astype(np.float32)
        _, payload = once(ops, compressor, ctx, grad)
        ctx = compressor.advance(ops, ctx, payload)
        assert max(off_orthonormal(ops.to_numpy(array)) for array in ctx.state) < 1e-5


@every_framework
@pytest.mark.parametrize(
    ("rank", "shape", "dense"),
    [
        (1, (2, 2), False),
        (1, (1, 50), True),
        (1, (50,), True),
        (1, (), True),
        (4, (8, 8), False),
        (4, (7, 100), True),
        (4, (100, 7), True),
        (4, (100, 8), False),
        (4, (3, 3, 1, 16), False),  # 9 x 16
        (4, (8, 1, 3, 3), False),  # 8 x 9
        (4, (7, 1, 3, 3), True),
        (4, (5, 5, 5), True),
    ],
)
def test_vectors_and_tiny_matrices_travel_dense(framework: str, rank: int, shape: tuple[int, ...], dense: bool) -> None:
    ops, compressor = ops_of(framework), LowRank(rank)
    spec = Spec((shape, (3,)))
    size = spec.sizes[0]
    grad = np.random.default_rng(1).standard_normal(spec.size, np.float32)
    ctx = compressor.init(ops, spec)
    assert len(ctx.state) == (0 if dense else 2)
    for phase in (0, 1):
        arrived, payload = once(ops, compressor, ctx, grad)
        sent = ops.to_numpy(payload)
        assert np.array_equal(sent[-3:], grad[-3:]) and np.array_equal(arrived[-3:], grad[-3:])
        if dense:
            assert np.array_equal(sent, grad) and np.array_equal(arrived, grad)
        else:
            assert sent.size == 3 + rank * most_square(shape)[phase] <= 3 + size
            assert not np.allclose(arrived[:size], grad[:size])
        ctx = compressor.advance(ops, ctx, payload)


@pytest.mark.parametrize(
    ("shape", "view"),
    [
        ((64, 32, 3, 3), (64, 288)),  # torch: out, in, h, w
        ((3, 3, 32, 64), (288, 64)),  # Keras: h, w, in, out
        ((32, 1, 3, 3), (32, 9)),
        ((3, 3, 1, 32), (9, 32)),
        ((512, 8, 1, 1), (512, 8)),
        ((1, 1, 8, 512), (8, 512)),
        ((10, 20), (10, 20)),
        ((20, 10), (20, 10)),
        ((6, 5, 4), (6, 20)),
        ((9,), (1, 9)),
        ((), (1, 1)),
        ((0, 5), (1, 0)),
    ],
)
def test_most_square_view(shape: tuple[int, ...], view: tuple[int, int]) -> None:
    assert most_square(shape) == view


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4))
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_most_square_is_a_view_and_none_is_squarer(shape: list[int]) -> None:
    rows, columns = most_square(tuple(shape))
    cuts = [(math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in range(1, len(shape))]
    assert (rows, columns) in cuts
    assert rows + columns == min(map(sum, cuts))


# -- parse -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("none", "none"),
        ("fp16", "fp16"),
        ("lowrank", "lowrank:4"),
        ("lowrank:1", "lowrank:1"),
        (" lowrank:1024 ", "lowrank:1024"),
    ],
)
def test_parse_and_name_are_inverse(text: str, name: str) -> None:
    assert parse(text).name == name
    assert parse(name) == parse(text)


@pytest.mark.parametrize("text", ["", "topk", "None", "FP16", "auto", "lowrank4", ":4", "none,fp16", "lowrank+fp16"])
def test_unknown_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Unknown compression") as refused:
        parse(text)
    assert repr(text) in str(refused.value)
    assert all(name in str(refused.value) for name in TABLE)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("none:1", "takes no parameter"),
        ("fp16:x", "takes no parameter"),
        ("lowrank:x", "whole number"),
        ("lowrank:4:2", "whole number"),
        ("lowrank:1.5", "whole number"),
        ("lowrank:0", "rank from 1 to 1024"),
        ("lowrank:-1", "rank from 1 to 1024"),
        ("lowrank:1025", "rank from 1 to 1024"),
    ],
)
def test_bad_parameters_are_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        parse(text)
    assert repr(text) in str(refused.value)
