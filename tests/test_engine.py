"""The whole exchange on NumPy, on ranks in one process: what reaches the gradients, what stays, what is an error.

Every body runs on each rank, over a transport that takes sums in one order and over one that negotiates. That nothing
is lost across changes of level is in ``test_residual.py``.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from ranks.reference import Reference

from hvdplus.adapters.numpy.backend import NumpyExchange, Rows
from hvdplus.adapters.transports.in_process import ORDERS as KINDS
from hvdplus.adapters.transports.in_process import InProcess, run
from hvdplus.compression import Array, Compressor, Context, Ops, Spec, parse
from hvdplus.compression.integer import Integer
from hvdplus.exchange import checkpoint, sparse
from hvdplus.exchange.plan import Plan

LEVELS = ["none", "fp16", "randomk:0.2:32", "topk:0.2:32", "lowrank:2", "int8", "int4:stochastic", "int11", "qsgd:8"]
LEVELS += ["terngrad", "signsgd", "topk:0.2:32+int8", "lowrank:2+fp16", "randomk:0.3:16+int6"]
LEVELS += ["powersgd:2", "powersgd:2+fp16", "topk2:0.2:32", "topk2:0.2:32+int8"]
SHAPES: list[tuple[int, ...]] = [(40, 24), (40,), (3, 16, 3, 3), (24, 40), (7,), (1,)]
ORDERS = pytest.mark.parametrize("negotiates", KINDS, ids=["one order", "negotiates", "on a device"])


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several buckets, even for small models, in plain dense steps as well."""
    monkeypatch.setattr("hvdplus.exchange.engine.PLAIN_BUCKET_BYTES", 1000)


def exchange(transport: Any, level: Any = "none", shapes: Any = SHAPES, **options: Any) -> NumpyExchange:
    return NumpyExchange(shapes, transport, level, **{"bucket_bytes": 6000, **options})


def gradients(step: int, rank: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Any]:
    rng = np.random.default_rng([step, rank])
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def mean(step: int, ranks: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[np.ndarray]:
    """In float64."""
    everyone = [gradients(step, rank, shapes) for rank in range(ranks)]
    return [np.mean([grad.astype(np.float64) for grad in grads], axis=0) for grads in zip(*everyone, strict=True)]


def take(x: NumpyExchange, steps: Sequence[int], learning_rate: float = 0.1) -> list[list[Any]]:
    """The means of some steps, all of them taken."""
    means = []
    for step in steps:
        means.append(x.reduce(gradients(step, x.transport.rank, x.shapes), learning_rate))
        x.commit()
    return means


def identical(transport: Any, arrays: Sequence[Any]) -> bool:
    """Whether arrays are the same on all ranks, bit for bit."""
    everyone = transport.gather_objects([None if array is None else np.array(array).tobytes() for array in arrays])
    return all(theirs == everyone[0] for theirs in everyone)


def residuals(x: NumpyExchange) -> list[np.ndarray]:
    """What this rank holds back."""
    held = checkpoint.residuals(x)
    return [np.array(held.get(i, np.zeros(shape)), np.float64) for i, shape in enumerate(x.shapes)]


def held_back(x: NumpyExchange) -> list[np.ndarray]:
    """What all ranks hold back together."""
    return [sum(parts) for parts in zip(*x.transport.gather_objects(residuals(x)), strict=True)]


def norm_of(arrays: Sequence[np.ndarray]) -> float:
    return float(np.linalg.norm([np.linalg.norm(array) for array in arrays]))


def dense(gradient: Any, shape: tuple[int, ...]) -> np.ndarray:
    whole = np.zeros(shape)
    if isinstance(gradient, Rows):
        np.add.at(whole, gradient.rows, gradient.values)
    elif gradient is not None:
        whole += gradient
    return whole


# -- what reaches the gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["none", ("fp16", "none")])
def test_none_on_one_rank_is_the_gradient_itself_bit_for_bit(level: Any) -> None:
    """Where nothing is exchanged, and where it is."""

    def body(transport: Any) -> None:
        x = exchange(transport, level)
        assert x.idle == (level == "none")
        for step in range(3):
            grads = gradients(step, 0)
            for mine, got in zip(grads, x.reduce(grads), strict=True):
                assert got.tobytes() == mine.tobytes()
            x.commit()
        assert not transport.sent or not x.idle or all("metadata" in name for name, _ in transport.sent)

    run(1, body)


@ORDERS
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_none_is_the_mean_of_all_ranks_gradients(ranks: int, negotiates: bool | str) -> None:
    def body(transport: Any) -> None:
        x = exchange(transport, "none")
        for step, order in enumerate([None, range(6), [5, 4, 3, 2, 1, 0]]):
            got = x.reduce(gradients(step, transport.rank), order=order)
            for one, other in zip(got, mean(step, ranks), strict=True):
                assert one.dtype == np.float32
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
            x.commit()

    run(ranks, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("level", LEVELS)
def test_agrees_with_a_plain_reference(level: str, ranks: int, negotiates: bool | str) -> None:
    """Bucket by bucket, without anything that goes on at once; ranks are identical bit for bit."""

    def body(transport: Any) -> None:
        x = exchange(transport, level)
        if x.idle:
            return
        reference = Reference(level, x.buckets, ranks)
        for step in range(6):
            got = x.reduce(gradients(step, transport.rank), order=[5, 4, 3, 2, 1, 0] if step % 2 else None)
            x.commit()
            expected = reference.step([gradients(step, rank) for rank in range(ranks)])
            for one, other in zip(got, expected, strict=True):
                tolerance = 2e-3 if "fp16" in level else 2e-6
                np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * max(np.abs(other).max(), 1.0))
            assert identical(transport, got)

    run(ranks, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("level", LEVELS)
def test_average_or_sum(level: str, negotiates: bool | str) -> None:
    """The sum is so many times the mean, and the residuals are the same: they are each rank's own."""

    def body(transport: Any) -> None:
        means, sums = exchange(transport, level), exchange(transport, level, average=False)
        for step in range(5):
            grads = gradients(step, transport.rank)
            for one, other in zip(means.reduce(grads), sums.reduce(grads), strict=True):
                np.testing.assert_allclose(one * 3, other, rtol=1e-3 if "fp16" in level else 1e-5, atol=1e-6)
            means.commit(), sums.commit()
            for one, other in zip(residuals(means), residuals(sums), strict=True):
                assert np.array_equal(one, other)

    run(3, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("level", ["none", "int8", "lowrank:2", "powersgd:2"])
def test_gradients_that_are_ready_in_another_order_on_every_rank(level: str, negotiates: bool | str) -> None:
    """A transport that negotiates takes them as they come, the others get them in one order whatever comes first."""

    def body(transport: Any) -> None:
        x, plain = exchange(transport, level), exchange(transport, level)
        for step in range(5):
            order = np.random.default_rng([step, transport.rank, 1]).permutation(len(SHAPES)).tolist()
            grads = gradients(step, transport.rank)
            transport.sent.clear()
            got = x.reduce(grads, order=order)
            assert identical(transport, got)
            names = [name for name, _ in transport.sent]
            assert len(names) == len(set(names)), "no bucket leaves before it is full, or twice"
            if not step:  # buckets are cut by rank 0's order
                assert x.order == transport.gather_objects(order)[0]
            elif level == "none":
                for one, other in zip(got, mean(step, 3), strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
            x.commit()
        take(plain, range(3))

    run(3, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("level", ["none", "fp16", "int8", "lowrank:2"])
def test_parameters_without_a_gradient(level: str, negotiates: bool | str) -> None:
    """Used on one rank: all get it. Used nowhere: it stays None, and what is held back of it waits."""
    shapes = [(20, 20), (20, 20), (5,), (18, 20)]

    def body(transport: Any) -> None:
        x = exchange(transport, level, shapes)
        for step in range(8):
            grads = gradients(step, transport.rank, shapes)
            used = {0, 3} if step < 5 else {0}
            used |= {1} if transport.rank == 0 else set()
            mine = [grad if i in used else None for i, grad in enumerate(grads)]
            before = residuals(x)
            got = x.reduce(mine)
            x.commit()
            assert got[2] is None and (got[3] is None) == (step >= 5)
            assert all(got[i] is not None for i in (0, 1))
            if got[3] is None:
                assert np.array_equal(before[3], residuals(x)[3])
            everyone = transport.gather_objects((mine, before, residuals(x)))
            for i, shape in enumerate(shapes):
                put_in = sum(dense(theirs[i], shape) + held[i] for theirs, held, _ in everyone)
                came_out = sum(left[i] for *_, left in everyone) + dense(got[i], shape) * transport.size
                np.testing.assert_allclose(came_out, put_in, atol=2e-2 if "fp16" in level else 1e-4)
        assert identical(transport, got)

    run(3, body, negotiates=negotiates)


@ORDERS
def test_fp16_that_overflows_is_sent_again_in_full_width(negotiates: bool | str) -> None:
    """The buckets that overflowed, and no others."""

    def body(transport: Any) -> None:
        x = exchange(transport, "fp16")
        for step, size in enumerate([1.0, 1e6, 1.0]):
            grads = gradients(step, transport.rank)
            grads[0] = grads[0] * np.float32(size)
            transport.sent.clear()
            got = x.reduce(grads)
            x.commit()
            expected = mean(step, 2)
            expected[0] = expected[0] * size
            again = [name for name, _ in transport.sent if name.endswith(".again")]
            affected = [state.bucket.number for state in x.states if 0 in state.bucket.parameters]
            assert len(again) == (size > 1) and all(f".{number}.fp16" in again[0] for number in affected if again)
            for i, (one, other) in enumerate(zip(got, expected, strict=True)):
                np.testing.assert_allclose(one, other, rtol=0, atol=2e-3 * (1.0 if i else size))
            assert identical(transport, got)

    run(2, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("level", LEVELS[1:])
def test_a_gradient_too_large_for_the_payload_does_not_stay_for_ever(level: str, negotiates: bool | str) -> None:
    """Nor does one whose sum is beyond float32: the steps after it are finite, on a device those from the fourth on.
    (Integers without a residual clip it, and go on.)"""
    clips = isinstance(parse(level), Integer) and not parse(level).keeps_residual

    def body(transport: Any) -> None:
        x = exchange(transport, level)
        finite = []
        with np.errstate(all="ignore"):
            for size in [1.0, 3e38, *[1.0] * 8]:
                got = x.reduce([np.full(shape, size, np.float32) for shape in SHAPES])
                x.commit()
                finite.append(all(np.isfinite(one).all() for one in got))
        late = 3 if transport.waits_on_device else 0
        assert finite[0] and all(finite[1 : 2 + late]) == clips and all(finite[2 + late :]), finite

    run(2, body, negotiates=negotiates)


# -- types -------------------------------------------------------------------------------------------------------------


def test_gradients_travel_in_their_own_types_at_none() -> None:
    """float16 is half as long on the wire, and its sum is float16's."""

    def body(transport: Any) -> None:
        shapes, dtypes = [(20, 30), (7,), (50,), (9,)], ["float16", "float16", "float32", "float64"]
        x = exchange(transport, "none", shapes, dtypes=dtypes)
        grads = [grad.astype(dtype) for grad, dtype in zip(gradients(0, transport.rank, shapes), dtypes, strict=True)]
        got = x.reduce(grads)
        sent = sorted(count for name, count in transport.sent if ".none." in name)
        assert sent == sorted([2 * 607, 4 * 50, 8 * 9])
        assert x.coordinator.payload_bytes == (2 * 607 + 4 * 50 + 8 * 9,) and x.gradient_bytes == 2 * 607 + 200 + 72
        everyone = transport.gather_objects(grads)
        for i, dtype in enumerate(dtypes):
            total = np.sum([theirs[i] for theirs in everyone], axis=0, dtype=dtype)
            assert got[i].dtype == dtype and np.array_equal(got[i], total * np.dtype(dtype).type(0.5))
        x.commit()

    run(2, body)


@ORDERS
@pytest.mark.parametrize("level", ["fp16", "int8", "lowrank:2", "powersgd:2"])
def test_narrow_gradients_are_compressed_as_float32_is(level: str, negotiates: bool | str) -> None:
    """To the same payload, and come back in their own type."""
    shapes = [(20, 30), (7,)]

    def body(transport: Any) -> None:
        x, wide = exchange(transport, level, shapes, dtypes=["float16"] * 2), exchange(transport, level, shapes)
        for step in range(5):
            grads = [grad.astype(np.float16) for grad in gradients(step, transport.rank, shapes)]
            got, expected = x.reduce(grads), wide.reduce([grad.astype(np.float32) for grad in grads])
            for one, other in zip(got, expected, strict=True):
                assert one.dtype == np.float16
                np.testing.assert_allclose(one, other, rtol=2e-3, atol=1e-3)
            x.commit(), wide.commit()

    run(2, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("level", ["none", "fp16", "int8", "lowrank:2"])
def test_float64_keeps_its_digits_and_its_range(level: str, negotiates: bool | str) -> None:
    def body(transport: Any) -> None:
        x = exchange(transport, level, [(2,), (16, 16)], dtypes=["float64", "float64"])
        wanted = [np.array([1 + 2.0**-52, 1e300]), np.full((16, 16), np.pi)]
        for _ in range(4):
            assert all(np.array_equal(one, other) for one, other in zip(x.reduce(wanted), wanted, strict=True))
            x.commit()
        assert not any(residual.any() for residual in residuals(x))

    def in_thirds(transport: Any) -> None:
        x = exchange(transport, level, [(2,), (16, 16)], dtypes=["float64", "float64"])
        wanted = [np.array([1 + 2.0**-52, 1e300]), np.full((16, 16), np.pi)]
        for mean, grad in zip(x.reduce(wanted), wanted, strict=True):
            np.testing.assert_allclose(mean, grad, rtol=1e-15)

    run(2, body, negotiates=negotiates)
    run(3, in_thirds, negotiates=negotiates)


# -- what is not finite, and what is not taken -------------------------------------------------------------------------


def snapshot(x: NumpyExchange) -> Any:
    """Residuals and contexts, bit by bit."""
    return [
        (
            None if state.residual is None else state.residual.tobytes(),
            {level: [array.tobytes() for array in ctx.state] for level, ctx in state.contexts.items()},
        )
        for state in x.states
    ]


@ORDERS
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_not_finite_on_one_rank_reaches_all_and_leaves_no_trace(
    level: str, value: float, negotiates: bool
) -> None:
    def body(transport: Any) -> None:
        x = exchange(transport, level)
        take(x, range(4))
        before, plan = snapshot(x), x.plan._replace(measurement=0)
        grads = gradients(4, transport.rank)
        if transport.rank == 2:
            grads[3][2, 5] = value
        with np.errstate(all="ignore"):
            got = x.reduce(grads, 0.1)
        assert not np.isfinite(got[3]).all()
        x.commit()  # as a script without a loss scaler does: the step is taken all the same
        if not transport.waits_on_device:
            assert x.plan._replace(measurement=0) == plan
        assert snapshot(x) == before
        (after,) = take(x, [5])
        assert all(np.isfinite(one).all() for one in after) and identical(transport, after)

    run(3, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("level", LEVELS)
def test_a_step_that_is_not_taken_commits_no_residual(level: str, negotiates: bool | str) -> None:
    def body(transport: Any) -> None:
        x = exchange(transport, level)
        take(x, range(3))
        before = residuals(x)
        x.reduce(gradients(3, transport.rank), 0.1)
        assert all(np.array_equal(old, now) for old, now in zip(before, residuals(x), strict=True))
        (after,) = take(x, [4])  # the script has skipped the step
        assert identical(transport, after)

    run(2, body, negotiates=negotiates)


# -- ranks that differ -------------------------------------------------------------------------------------------------


def raises_everywhere(transport: Any, kind: type[Exception], match: str, function: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=match):
        function()
    transport.barrier()


@ORDERS
@pytest.mark.parametrize("level", ["lowrank:2", "topk:0.2:32", "int8"])
def test_contexts_that_differ_are_an_error_on_every_rank(level: str, negotiates: bool | str) -> None:
    def body(transport: Any) -> None:
        x = exchange(transport, level)
        take(x, range(3))
        if transport.rank == 2:
            for state in x.states:
                for ctx in state.contexts.values():
                    for array in ctx.state:
                        if level == "topk:0.2:32":  # one block is another one
                            unused = np.setdiff1d(np.arange(array.max(initial=0)), array)
                            array[: len(unused)][:1] = unused[:1]
                        else:
                            array[...] = array + (1 if level == "int8" else 1e-6)
        match = rf"contexts of {level} differ between rank 0 and rank\(s\) 2,"
        steps = [3, 4, 5] if transport.waits_on_device else [3]  # where it is told a step later, and read another one
        raises_everywhere(transport, RuntimeError, match, lambda: take(x, steps))

    run(3, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("level", ["none", "fp16", "int8"])
def test_learning_rates_that_differ_are_an_error_on_every_rank(level: str, negotiates: bool | str) -> None:
    def body(transport: Any) -> None:
        x = exchange(transport, level)
        take(x, range(3))
        rate = 0.1 if transport.rank in (0, 2) else 0.2
        match = r"learning rate differs between rank 0 and rank\(s\) 1, 3,"
        raises_everywhere(transport, RuntimeError, match, lambda: take(x, range(3, 6), rate))

    run(4, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("when", ["from the start", "later"])
@pytest.mark.parametrize("level", ["none", "fp16", "lowrank:2", "powersgd:2"])
def test_weights_that_differ_are_an_error_on_every_rank(level: str, when: str, negotiates: bool | str) -> None:
    """It names the first of them. They are looked at after the first step, and every so often."""

    def body(transport: Any) -> None:
        weights = [np.ones(shape, np.float32) for shape in SHAPES]
        x = exchange(transport, level, weights=weights, weights_check_steps=5)
        if when == "later":
            take(x, range(3))
        if transport.rank == 1:
            weights[3][1, 1] += 1e-6
            weights[4][:] = 0
        match = r"weights of rank\(s\) 1 no longer equal those of rank 0: parameter 3 is the first"
        raises_everywhere(transport, RuntimeError, match, lambda: take(x, range(3, 3 + (3 if when != "later" else 5))))

    run(3, body, negotiates=negotiates)


def test_the_check_of_weights_can_be_turned_off() -> None:
    def body(transport: Any) -> None:
        weights = [np.full(shape, transport.rank, np.float32) for shape in SHAPES]
        take(exchange(transport, weights=weights, weights_check_steps=0), range(8))

    run(2, body)


# -- sparse gradients --------------------------------------------------------------------------------------------------


TABLE = [(400, 6), (24, 20)]


def lookups(step: int, rank: int, height: int) -> Rows | None:
    """A sparse gradient: few rows, some of them twice; on rank 0 none in step 2."""
    rng = np.random.default_rng([step, rank, 7])
    rows = rng.integers(0, height, 5)
    rows = np.concatenate([rows, rows[:2]])
    return None if (step, rank) == (2, 0) else Rows(rows, rng.standard_normal((7, 6)).astype(np.float32))


@ORDERS
@pytest.mark.parametrize("level", ["none", "fp16", "lowrank:2", "int8", "powersgd:2+fp16"])
def test_rows_that_few_ranks_use_are_exact_at_every_level(level: str, negotiates: bool | str) -> None:
    """And sent by themselves: every rank says which it used, then the union of them follows."""

    def body(transport: Any) -> None:
        x = exchange(transport, level, TABLE)
        for step in range(6):
            grads = [lookups(step, transport.rank, 400), gradients(step, transport.rank, TABLE)[1]]
            transport.sent.clear()
            got = x.reduce(grads, order=[1, 0])
            x.commit()
            assert isinstance(got[0], Rows) and x.tables == [0]
            everyone = [lookups(step, rank, 400) for rank in range(3)]
            expected = sum(dense(theirs, TABLE[0]) for theirs in everyone) / 3
            np.testing.assert_allclose(dense(got[0], TABLE[0]), expected, rtol=1e-5, atol=1e-6)
            union = sorted(set(itertools.chain.from_iterable(theirs.rows for theirs in everyone if theirs)))
            assert got[0].rows.tolist() == union
            rows = [count for name, count in transport.sent if ".rows." in name]
            assert rows and len(union) * 24 <= sum(rows) <= 1.2 * len(union) * 24
            assert x.coordinator.row_bytes == sum(rows) + sum(n for name, n in transport.sent if name.endswith("mask"))
            assert identical(transport, [*got[0], got[1]])

    run(3, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("level", ["none", "fp16", "lowrank:2", "int8", "powersgd:2+fp16"])
def test_tables_of_which_most_rows_are_used_travel_at_the_level(level: str, negotiates: bool | str) -> None:
    """Nothing is lost: what the level has not sent of the table is held back."""
    shapes = [(60, 6), (24, 20)]

    def body(transport: Any) -> None:
        x = exchange(transport, level, shapes)
        put_in, came_out = np.zeros(shapes[0]), np.zeros(shapes[0])
        for step in range(6):
            rows = np.arange(transport.rank, 60, 2)
            grad = Rows(rows, gradients(step, transport.rank, [(30, 6)])[0])
            transport.sent.clear()
            got = x.reduce([grad, gradients(step, transport.rank, shapes)[1]])
            x.commit()
            assert isinstance(got[0], Rows), "it comes back as it was"
            put_in += dense(grad, shapes[0])
            came_out += dense(got[0], shapes[0])
            assert not any(".rows." in name for name, _ in transport.sent)
        total, left = transport.gather_objects(put_in), held_back(x)[0]
        np.testing.assert_allclose(came_out * 2 + left, sum(total), atol=2e-2 if "fp16" in level else 1e-4)
        assert bool(np.any(left)) == x.ladder.compressors[-1].keeps_residual
        if level == "int8":  # a table's payload, beside the others
            assert x.coordinator.row_bytes < 60 * 6 * 2

    run(2, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("level", ["none", "int8"])
def test_a_table_changes_its_way_from_step_to_step(level: str, negotiates: bool | str) -> None:
    """Few rows, most of them, none at all, the whole table dense on one rank alone: all ranks see the same."""

    def grad(step: int, rank: int) -> Any:
        values = gradients(step, rank, TABLE)[0]
        kind = step % 4
        if kind == 0:
            return Rows(np.array([3 + rank, 7, 7]), values[:3])
        if kind == 1:
            return Rows(np.arange(rank % 2, 400, 2), values[:200])
        if kind == 2:
            return Rows(np.zeros(0, np.int64), values[:0]) if rank else None
        return values if rank == 1 else Rows(np.array([1]), values[:1])

    def body(transport: Any) -> None:
        x = exchange(transport, level, TABLE)
        for step in range(9):
            before = residuals(x)
            got = x.reduce([grad(step, transport.rank), gradients(step, transport.rank, TABLE)[1]])
            x.commit()
            everyone = transport.gather_objects((before[0], residuals(x)[0]))
            put_in = sum(dense(grad(step, rank), TABLE[0]) for rank in range(3)) + sum(old for old, _ in everyone)
            came_out = dense(got[0], TABLE[0]) * 3 + sum(left for _, left in everyone)
            np.testing.assert_allclose(came_out, put_in, atol=1e-4)
            assert isinstance(got[0], Rows)
            assert identical(transport, got[0]) and identical(transport, got[1:])

    run(3, body, negotiates=negotiates)


@ORDERS
def test_a_whole_table_that_was_not_taken_leaves_nothing_to_a_step_of_few_rows(negotiates: bool | str) -> None:
    """What the level has not sent of it is forgotten with its step."""

    def body(transport: Any) -> None:
        x = exchange(transport, "int8", TABLE)

        def step(number: int, count: int) -> None:
            values, head = gradients(number, transport.rank, TABLE)
            x.reduce([Rows(np.arange(count), values[:count]), head])

        for number in range(4):
            step(number, 300)
            x.commit()
        before = residuals(x)[0]
        step(4, 300)  # not taken
        step(5, 3)
        x.commit()
        assert before.any() and np.array_equal(residuals(x)[0], before), "it waits in a step that shares rows"

    run(2, body, negotiates=negotiates)


@ORDERS
def test_an_empty_union_sends_no_rows(negotiates: bool | str) -> None:
    """Nobody used the table, or only rows of zeros: it costs its mask alone."""

    def body(transport: Any) -> None:
        x = exchange(transport, "none", TABLE)
        head = gradients(0, transport.rank, TABLE)[1]
        x.reduce([lookups(0, transport.rank, 400), head])
        x.commit()
        transport.sent.clear()
        nothing = Rows(np.zeros(0, np.int64), np.zeros((0, 6), np.float32))
        got = x.reduce([nothing if transport.rank else None, head])
        x.commit()
        assert got[0].rows.size == 0 and got[0].values.shape == (0, 6)
        assert not any(".rows." in name for name, _ in transport.sent)
        assert x.reduce([None, head])[0] is None, "no rank has a gradient"
        x.commit()

    run(2, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rows_have_the_gradients_type(dtype: str, negotiates: bool | str) -> None:
    def body(transport: Any) -> None:
        x = exchange(transport, "int8", TABLE, dtypes=[dtype, "float32"])
        value = np.dtype(dtype).type(1) + np.finfo(dtype).eps
        for _ in range(4):
            grad = Rows(np.array([5]), np.full((1, 6), value, dtype))
            got = x.reduce([grad, gradients(0, transport.rank, TABLE)[1]])
            assert got[0].values.dtype == dtype and np.array_equal(got[0].values, grad.values)
            x.commit()

    run(2, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("level", ["int8", "topk:0.2:16+int8"])
def test_a_table_whose_rows_are_shared_learns_in_a_levels_first_step(level: str, negotiates: bool) -> None:
    """As much as one that travels whole: later it may do so."""
    shapes = [(400, 6), (24, 20)]

    def learned(shared: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
        def body(transport: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
            x = exchange(transport, level, shapes)
            assert x.plan.asks
            while x.plan.asks:
                x.reduce([lookups(0, transport.rank, 400), gradients(0, transport.rank, shapes)[1]])
                x.commit()
            assert any(".rows." in name for name, _ in transport.sent) == (shared > 0)
            (state,) = (state for state in x.states if state.bucket.parameters == (0,))
            fresh = x.ladder.compressors[0].init(x.ops, state.bucket.spec)
            return [np.array(array) for array in state.contexts[0].state], list(fresh.state)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sparse, "SHARED", shared)
            return run(2, body, negotiates=negotiates)[0]

    rows, fresh = learned(sparse.SHARED)
    whole, _ = learned(0.0)
    if level == "int8":
        assert np.array_equal(rows[0][:2], whole[0][:2]), "the same step sizes"
    assert not all(np.array_equal(one, other) for one, other in zip(rows, fresh, strict=True)), "it did learn"


@pytest.mark.parametrize("level", ["int8", "topk:0.2:16"])
def test_a_table_asks_about_gradients_without_the_loss_scale(level: str) -> None:
    shapes = [(400, 6), (24, 20)]

    def learned(scale: float) -> Any:
        def body(transport: Any) -> list[np.ndarray]:
            x = exchange(transport, level, shapes)
            x.get_loss_scale = lambda: scale
            rows, grad = lookups(0, transport.rank, 400), gradients(0, transport.rank, shapes)[1]
            x.reduce([Rows(rows.rows, rows.values * np.float32(scale)), grad * np.float32(scale)])
            x.commit()
            (state,) = (state for state in x.states if state.bucket.parameters == (0,))
            return [np.array(array) for array in state.contexts[0].state]

        return run(2, body)[0]

    for plain, scaled in zip(learned(1.0), learned(1024.0), strict=True):
        np.testing.assert_allclose(plain, scaled, rtol=1e-6)


@pytest.mark.parametrize("level", ["topk:0.2:16", "topk:0.2:16+fp16", "int8"])
def test_a_table_that_has_nothing_to_ask_sends_nothing_more(level: str) -> None:
    """It is too small to be compressed."""

    def body(transport: Any) -> None:
        x = exchange(transport, level, [(40, 1), (24, 20)])
        rows = Rows(np.array([transport.rank]), np.ones((1, 1), np.float32))
        got = x.reduce([rows, gradients(0, transport.rank, x.shapes)[1]])
        assert got[0].rows.tolist() == [0, 1] and np.array_equal(got[0].values, np.full((2, 1), 0.5))
        assert all(size for _, size in transport.sent)

    run(2, body)


# -- first steps -------------------------------------------------------------------------------------------------------


@ORDERS
@pytest.mark.parametrize("level", ["int8", "int4", "signsgd", "qsgd:8", "topk:0.2:32+int8"])
def test_a_first_step_of_very_unequal_ranks_is_the_last_that_does_not_fit(level: str, negotiates: bool | str) -> None:
    """Ranks ask for the mean of their logarithms, which fits neither; what they then send shows who is loud."""

    def body(transport: Any) -> None:
        x = exchange(transport, level)
        for step in range(8):
            grads = [grad * np.float32(2.0**-24 if transport.rank else 1.0) for grad in gradients(step, transport.rank)]
            x.reduce(grads)
            x.commit()
            left = sum(".left" in name for name, _ in transport.sent)
            if step == (4 if transport.waits_on_device else 1):
                before = left
        assert left == before and all(any(np.any(a) for a in s.contexts[0].state) for s in x.states)

    run(2, body, negotiates=negotiates)


@pytest.mark.parametrize("level", ["int8", "lowrank:2+int8", "topk:0.2:32"])
def test_contexts_that_are_dropped_are_asked_for_again(level: str) -> None:
    """Buckets were cut anew: without it, integers would send nothing in the next step."""

    def body(transport: Any) -> None:
        x = exchange(transport, level)
        take(x, range(5))
        assert not x.plan.asks
        x.change_members(x.order, {i: i for i in range(len(SHAPES))})
        x.follow(x.coordinator.plan)
        assert x.plan.asks
        (got,) = take(x, [5])
        assert all(np.any(mean) for mean in got)

    run(2, body)


@ORDERS
def test_sparse_as_dense_travels_dense_and_comes_back_sparse(negotiates: bool | str) -> None:
    def body(transport: Any) -> None:
        x = exchange(transport, "fp16", TABLE, sparse_as_dense=True)
        grad = Rows(np.array([transport.rank]), np.ones((1, 6), np.float32))
        got = x.reduce([grad, gradients(0, transport.rank, TABLE)[1]])
        assert not x.tables and isinstance(got[0], Rows)
        assert got[0].rows.tolist() == [0, 1] and np.array_equal(got[0].values, np.full((2, 6), 0.5))
        x.commit()

    run(2, body, negotiates=negotiates)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@ORDERS
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("level", LEVELS)
def test_a_checkpoint_goes_on_as_if_it_had_never_stopped(level: str, steps: int, negotiates: bool | str) -> None:
    """Bit for bit; and the state itself does not change when the exchange that gave it goes on."""

    def body(transport: Any) -> None:
        x = exchange(transport, level)
        take(x, range(steps))
        state = x.state()
        expected = take(x, range(steps, steps + 4))
        again = exchange(transport, level)
        again.load(state)
        for one, other in zip(take(again, range(steps, steps + 4)), expected, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
        x.load(state)  # back in time, in the same exchange
        for one, other in zip(take(x, range(steps, steps + 4)), expected, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))

    run(2, body, negotiates=negotiates)


@ORDERS
def test_a_checkpoint_in_the_middle_of_a_flush(negotiates: bool | str) -> None:
    """Also of a step that flushed a share and was not taken: the share is flushed again."""

    def body(transport: Any) -> None:
        def fresh() -> NumpyExchange:
            return exchange(transport, ("none", "topk:0.2:32"), drain_steps=4)

        x = fresh()
        take(x, range(6))
        x.coordinator.set_level(0)
        take(x, range(6, 8))  # the first was under way
        assert x.plan.flush_fraction == 1 / 3
        x.reduce(gradients(8, transport.rank), 0.1)  # not taken
        state = x.state()
        assert state["not_taken"]
        again = fresh()
        again.load(state)
        for one, other in zip(take(again, range(9, 14)), take(x, range(9, 14)), strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
        assert not x.state()["residuals"] and not again.state()["residuals"], "all is flushed"

    run(2, body, negotiates=negotiates)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_ranks_checkpoint_is_everybodys_once_consolidated(ranks: int, average: bool) -> None:
    """On as many ranks, and on half or twice as many: what reaches the weights is what it was."""

    def save(transport: Any) -> Any:
        x = exchange(transport, "lowrank:2", average=average)
        take(x, range(6))
        before = held_back(x)
        x.consolidate()
        after = held_back(x)
        for one, other in zip(before, after, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
        state = x.state()
        assert state["rank"] is None
        assert identical(transport, [state["residuals"][i] for i in sorted(state["residuals"])])
        take(x, [6])
        assert x.state()["rank"] == transport.rank, "from here on every rank holds back its own again"
        return after, state

    held, state = run(2, save)[1]

    def load(transport: Any) -> Any:
        x = exchange(transport, "lowrank:2", average=average)
        x.load(state)
        loaded = held_back(x)
        (got,) = take(x, [6])
        assert identical(transport, got)
        return loaded

    # Of a mean, every rank holds back what each did; of a sum, all together what all did.
    share = ranks / 2 if average else 1.0
    for one, other in zip(held, run(ranks, load)[0], strict=True):
        np.testing.assert_allclose(one * share, other, atol=1e-4)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_own_checkpoints_serve_more_and_fewer_ranks(
    ranks: int, average: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a rank held back reaches the weights as it would have; those of ranks that are gone are named as lost."""

    def save(transport: Any) -> Any:
        x = exchange(transport, "lowrank:2", average=average)
        take(x, range(6))
        return residuals(x), x.state()

    saved = run(2, save)

    def load(transport: Any) -> Any:
        x = exchange(transport, "lowrank:2", average=average)
        x.load(saved[min(transport.rank, 1)][1])
        loaded = residuals(x)
        take(x, range(6, 8))
        return loaded

    loaded = run(ranks, load)
    for rank, theirs in enumerate(loaded):
        for i in range(len(SHAPES)):
            mine = saved[rank][0][i] * (ranks / 2 if average else 1.0) if rank < 2 else np.zeros(SHAPES[i])
            np.testing.assert_allclose(theirs[i], mine, atol=1e-5)
    assert ("residuals of rank(s) 1 are lost" in capsys.readouterr().err) == (ranks == 1)


@ORDERS
@pytest.mark.parametrize("level", ["none", "fp16", "int8", "lowrank:4", "qsgd:8"])
def test_what_was_held_back_is_not_lost_with_another_level(level: str, negotiates: bool | str) -> None:
    def body(transport: Any) -> None:
        x = exchange(transport, "lowrank:1")
        means = take(x, range(6))
        other = exchange(transport, level, drain_steps=4)
        other.load(x.state())
        means += take(other, range(6, 14))
        left = held_back(other)
        if not other.ladder.compressors[-1].keeps_residual:
            assert not other.state()["residuals"], "all is flushed"
        for i in range(len(SHAPES)):
            total = sum(gradients(step, rank)[i].astype(np.float64) for step in range(14) for rank in range(3))
            arrived = sum(each[i].astype(np.float64) for each in means) * 3
            if level != "qsgd:8":  # which rounds by chance
                np.testing.assert_allclose(arrived + left[i], total, atol=0.02)

    run(3, body, negotiates=negotiates)


def test_another_frameworks_checkpoint_brings_its_residuals() -> None:
    """They stay when the first step finds another order of gradients."""

    def body(transport: Any) -> None:
        x = exchange(transport, "lowrank:2")
        take(x, range(6))
        before, other = held_back(x), exchange(transport, "lowrank:2")
        other.load({**x.state(), "framework": "another"})
        order, grads = [3, 0, 5, 1, 4, 2], gradients(6, transport.rank)
        got = other.reduce(grads, order=order)
        other.commit()
        assert other.order == order
        for i, left in enumerate(held_back(other)):
            total = sum(gradients(6, rank)[i].astype(np.float64) for rank in range(2))
            np.testing.assert_allclose(got[i] * 2.0 + left, before[i] + total, atol=1e-3)

    run(2, body)


def test_a_checkpoint_knows_which_parameters_have_tables() -> None:
    def body(transport: Any) -> None:
        x = exchange(transport, "int8", TABLE)

        def step(each: NumpyExchange, number: int) -> list[Any]:
            got = each.reduce([lookups(number, transport.rank, 400), gradients(number, transport.rank, TABLE)[1]])
            each.commit()
            return got

        for number in range(4):
            step(x, number)
        again = exchange(transport, "int8", TABLE)
        again.load(x.state())
        assert again.tables == x.tables == [0] and again.sparse == {0}
        for one, other in zip(step(x, 4), step(again, 4), strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))

    run(2, body)


def test_ranks_that_load_different_states_are_an_error_on_every_rank() -> None:
    def body(transport: Any) -> None:
        x = exchange(transport, "int8")
        take(x, range(3))
        again = exchange(transport, "int8")
        if transport.rank == 1:
            again.resumed = again.load(x.state())
        match = "Ranks 0 and 1 would resume from different states"
        raises_everywhere(transport, RuntimeError, match, lambda: take(again, [3]))

    run(2, body)


# -- one rank alone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("auto", [False, True])
def test_alone_a_checkpoint_of_more_ranks_is_flushed_and_then_nothing_is_exchanged(auto: bool) -> None:
    level: Any = ("none", "lowrank:2") if auto else "none"

    def save(transport: Any) -> Any:
        x = exchange(transport, "lowrank:2")
        take(x, range(5))
        x.consolidate()
        return held_back(x), x.state()

    held, state = run(2, save)[0]

    def alone(transport: Any) -> None:
        x = exchange(transport, level, auto=auto, drain_steps=3)
        assert x.idle
        grads = gradients(0, 0)
        assert all(one is other for one, other in zip(x.reduce(grads), grads, strict=True))
        x.commit()
        x.load(state)
        assert not x.idle
        arrived = [np.zeros(shape) for shape in SHAPES]
        fractions = []
        for step in range(1, 6):
            if not x.idle:
                fractions.append(x.plan.flush_fraction)
            grads = gradients(step, 0)
            got = x.reduce(grads)
            x.commit()
            arrived = [sum_ + one - mine for sum_, one, mine in zip(arrived, got, grads, strict=True)]
        assert x.idle and fractions == [1 / 3, 1 / 2, 1.0]
        for one, other in zip(arrived, held, strict=True):
            np.testing.assert_allclose(one, other / 2, atol=1e-4)
        transport.sent.clear()
        take(x, range(6, 8))
        assert all("metadata" in name for name, _ in transport.sent)
        x.load({**state, "residuals": {}})  # that has nothing to flush
        assert x.idle

    run(1, alone)


# -- auto --------------------------------------------------------------------------------------------------------------


@ORDERS
def test_auto_over_a_ladder(negotiates: bool | str) -> None:
    """It begins dense; the level that is set begins with the next plan, on all ranks alike, and each is what it is."""
    names = ["none", "fp16", "int8", "lowrank:2"]

    def body(transport: Any) -> None:
        x = exchange(transport, names, auto=True, dense_steps=10**6, drain_steps=2)
        assert x.coordinator.costs[0].codec == 0 and all(cost.codec > 0 for cost in x.coordinator.costs[1:])
        assert transport.gather_objects(x.coordinator.costs) == [x.coordinator.costs] * 3
        ran = []
        for step in range(24):
            if step % 6 == 0:
                x.coordinator.set_level([0, 3, 1, 2][step // 6])
            ran.append(x.plan)
            (got,) = take(x, [step])
            assert identical(transport, got)
            assert transport.gather_objects(x.plan) == [x.plan] * 3
            if x.ladder.plain(ran[-1]):
                for one, other in zip(got, mean(step, 3), strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        assert [plan.level for plan in ran] == [0] * 7 + [3] * 6 + [1] * 6 + [2] * 5
        assert [step for step, plan in enumerate(ran) if plan.asks] == [19]
        assert [plan.flush_fraction for plan in ran[13:17]] == [1 / 2, 1.0, 0.0, 0.0]

    run(3, body, negotiates=negotiates)


@pytest.mark.parametrize("level", ["none", "fp16", "topk:0.2:32", "lowrank:2", "int8", "powersgd:2"])
def test_ranks_report_how_large_their_gradients_and_residuals_are(level: str) -> None:
    def body(transport: Any) -> None:
        x = exchange(transport, level, [*SHAPES, (400, 6)])
        x.coordinator._measures_norms = True  # as `auto` does at every level
        heard: list[Any] = []
        observe = x.coordinator.observe

        def observed(plan: Plan, metadata: Any, *healthy: bool) -> None:
            heard.append((plan, metadata))
            observe(plan, metadata, *healthy)

        x.coordinator.observe = observed  # type: ignore[method-assign]
        known = []
        for step in range(44):
            table = Rows(np.array([step, 3, 3]), np.ones((3, 6), np.float32))
            grads = [*gradients(step, transport.rank), table]
            x.reduce(grads, 0.1 * (step + 1))
            x.commit()
            whole = [dense(grad, shape) for grad, shape in zip(grads, x.shapes, strict=True)]
            known.append([np.sqrt(sum(np.square(each).sum() for each in those)) for those in (whole, residuals(x))])
        everyone = np.array(transport.gather_objects(known))
        assert len(heard) >= 43 and sum(plan.measurement > 0 for plan, _ in heard) >= 2
        for step, (plan, metadata) in enumerate(heard):
            assert metadata.learning_rate == pytest.approx(0.1 * (step + 1))
            expected = np.sqrt(np.square(everyone[:, step]).mean(axis=0)) if plan.measurement else (0.0, 0.0)
            assert (metadata.gradient_norm, metadata.residual_norm) == pytest.approx(tuple(expected), rel=1e-4)
        lossy = any(metadata.residual_norm for _, metadata in heard)
        assert lossy == x.ladder.compressors[-1].keeps_residual

    run(2, body)


@ORDERS
@pytest.mark.parametrize("level", ["none", "fp16", "int8", "lowrank:2"])
def test_metadata_are_read_in_the_step_only_where_it_depends_on_them(level: str, negotiates: bool | str) -> None:
    """Else one step later: nobody waits for them. In the first step they tell which gradients there are."""

    def body(transport: Any) -> None:
        x = exchange(transport, level)
        in_step = []
        for step in range(5):
            take(x, [step])
            in_step.append(x.reporter.observed_in_step)
            assert x.coordinator.steps + x.coordinator.unread_steps == step + 1
        depends = x.ladder.compressors[-1].keeps_residual
        assert in_step == [True, *[depends and not transport.waits_on_device] * 4]

    run(2, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("level", ["none", "fp16", "int8"])
def test_steps_of_before_do_not_count_in_a_loaded_state(level: str, negotiates: bool | str) -> None:
    """The last one's metadata may not have been read when it is loaded."""

    def body(transport: Any) -> None:
        x, again = exchange(transport, level), exchange(transport, level)
        take(x, range(3))
        state = x.state()
        take(x, range(3, 6))
        x.load(state), again.load(state)
        for each in (x, again):
            take(each, range(3, 7))
        assert x.coordinator.steps == again.coordinator.steps
        assert x.coordinator.unread_steps == again.coordinator.unread_steps

    run(2, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("level", ["none", "fp16", "int8"])
def test_metadata_are_read_once_a_step(level: str, negotiates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parts of a step ask for them."""
    from hvdplus.exchange import metadata, reporter

    reads: list[int] = []

    def counted(*arguments: Any) -> Any:
        reads.append(1)
        return metadata.read(*arguments)

    monkeypatch.setattr(reporter, "read", counted)

    def body(transport: Any) -> None:
        x = exchange(transport, level)
        take(x, range(10))
        x.reporter.finish_last()

    run(2, body, negotiates=negotiates)
    assert len(reads) == 2 * 10


# -- values beyond a level's scale -------------------------------------------------------------------------------------


class Stops(Compressor):
    """Sends no value beyond 1, and says so of those beyond 10."""

    name = "stops"

    def init(self, ops: Ops, spec: Spec) -> Context:
        return Context(spec, 0, ())

    def encode(self, ops: Ops, ctx: Context, grad: Array, residual: Array | None = None) -> Array:
        return np.clip(grad, -1, 1)

    def decode(self, ops: Ops, ctx: Context, total: Array) -> Array:
        return total

    def payload_bytes(self, spec: Spec, side: int = 0) -> int:
        return 4 * spec.size

    def overflows(self, ops: Ops, ctx: Context, grad: Array, payload: Array) -> Array:
        return np.abs(grad).max() > 10


@pytest.mark.parametrize("case", ["", "a parameter that nobody uses", "a step that is not taken"])
@pytest.mark.parametrize("level", [level for level in LEVELS if parse(level).keeps_residual])
def test_a_device_sends_values_far_beyond_the_level_whole_two_steps_later(level: str, case: str) -> None:
    """Nothing is lost on the way, and soon no more is held back than before."""

    def body(transport: Any) -> None:
        x = exchange(transport, level)
        unused = {1} if "uses" in case else set()

        def made(step: int) -> list[Any]:
            return [None if i in unused else grad for i, grad in enumerate(gradients(step, transport.rank))]

        for step in range(6):
            x.reduce(made(step), 0.1)
            x.commit()
        put_in, before = [held.copy() for held in held_back(x)], norm_of(held_back(x))
        norms: list[float] = []
        for step in range(6, 14):
            grads = made(step)
            if step == 6 and transport.rank == 1:
                grads[3] *= np.float32(1e4)
            if step == 8 and "taken" in case:  # it is the one that would send what is left
                x.reduce(grads, 0.1)
            for total, *mine in zip(put_in, *transport.gather_objects(grads), strict=True):
                total += 0.0 if mine[0] is None else np.sum(mine, axis=0, dtype=np.float64)
            got = x.reduce(grads, 0.1)
            x.commit()
            got = [np.zeros(shape) if grad is None else grad for grad, shape in zip(got, SHAPES, strict=True)]
            for total, mean, held in zip(put_in, got, held_back(x), strict=True):
                total -= 2.0 * mean
                # Where float16 sums are rounded, nobody holds the difference.
                np.testing.assert_allclose(total, held, rtol=1e-5, atol=5.0 if "fp16" in level else 0.1)
            assert identical(transport, got)
            norms.append(norm_of(held_back(x)))
        # Once all is sent, integers' steps stay for a while as large as the large values made them; what is rounded by
        # chance may be off by a whole one.
        if level.endswith("stochastic"):
            assert max(norms[2:]) < 0.05 * min(norms[:2]) and norms[-1] < max(4.0 * before, 0.9 * max(norms[2:]))
        else:
            assert max(norms[2:]) < 0.02 * min(norms[:2]) and norms[-1] < 4.0 * before
        assert any(".left" in name for name, _ in transport.sent)

    run(2, body, negotiates="on a device")


@pytest.mark.parametrize("negotiates", [False, True], ids=["one order", "negotiates"])
def test_values_far_beyond_the_level_are_sent_whole_in_the_same_step(negotiates: bool | str) -> None:
    """If it is so on one rank, all ranks send what is left, and hold back nothing afterwards."""

    def body(transport: Any) -> None:
        x = exchange(transport, ["none", Stops()])
        (got,) = take(x, [0])
        left = held_back(x)
        assert any(each.any() for each in left) and not any(".left" in name for name, _ in transport.sent)
        grads = gradients(1, transport.rank)
        if transport.rank == 1:
            grads[3][0, 0] = 1e6
        got = x.reduce(grads, 0.1)
        assert all(np.array_equal(one, other) for one, other in zip(left, held_back(x), strict=True)), "not taken yet"
        x.commit()
        total = [sum(parts) for parts in zip(*transport.gather_objects(grads), strict=True)]
        for one, put_in, before in zip(got, total, left, strict=True):
            np.testing.assert_allclose(one * 3.0, put_in + before, rtol=1e-6, atol=1e-5)
        assert not any(each.any() for each in residuals(x))
        assert sum(name.endswith(".left") for name, _ in transport.sent) == len(x.states)
        (after,) = take(x, [2])
        assert max(np.abs(one).max() for one in after) <= 1 and identical(transport, after)

    run(3, body, negotiates=negotiates)


def test_values_far_beyond_the_level_that_are_not_finite_are_sent_by_nobody() -> None:
    """The step is undone as any other that is not finite."""

    def body(transport: Any) -> None:
        x = exchange(transport, ["none", Stops()])
        take(x, [0])
        before = residuals(x)
        grads = gradients(1, transport.rank)
        grads[0][0, 0], grads[3][0, 0] = 1e6, np.nan if transport.rank else 0.0
        with np.errstate(all="ignore"):
            x.reduce(grads, 0.1)
        x.commit()
        assert not any(name.endswith(".left") for name, _ in transport.sent)
        assert all(np.array_equal(old, now) for old, now in zip(before, residuals(x), strict=True))

    run(2, body)


# -- loss scaling ------------------------------------------------------------------------------------------------------


@ORDERS
@pytest.mark.parametrize("level", LEVELS)
def test_loss_scaling_that_is_known_changes_nothing(level: str, negotiates: bool | str) -> None:
    """A changed scale does not rescale what is held back. Powers of two are exact, but where float16 ends."""

    def body(transport: Any) -> None:
        plain, scaled = exchange(transport, level), exchange(transport, level)
        scales = [8.0, 8.0, 16.0, 16.0, 4.0, 4.0, 1024.0, 1.0, 1.0]
        for step, scale in enumerate(scales):
            scaled.get_loss_scale = lambda scale=scale: scale
            grads = gradients(step, transport.rank)
            expected = plain.reduce(grads, 0.1)
            plain.commit()
            # A loss overflows on one rank, and the step is made again; where the host runs ahead, on the next side.
            if step == 5 and not (transport.waits_on_device and parse(level).turns > 1):
                bad = [grad * np.float32(np.inf if transport.rank else 1.0) for grad in grads]
                with np.errstate(all="ignore"):
                    assert not np.isfinite(scaled.reduce(bad, 0.1)[0]).all()
            got = scaled.reduce([grad * np.float32(scale) for grad in grads], 0.1)
            scaled.commit()
            for one, other in zip(got, expected, strict=True):
                tolerance = 5e-2 if "fp16" in level else 1e-6
                np.testing.assert_allclose(one / np.float32(scale), other, atol=tolerance)
            for one, other in zip(residuals(scaled), residuals(plain), strict=True):
                np.testing.assert_allclose(one, other, atol=5e-2 if "fp16" in level else 1e-5)
            assert identical(transport, got)

    run(2, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("level", ["none", "fp16"])
def test_a_residual_is_flushed_in_the_units_of_the_scaled_loss(level: str, negotiates: bool | str) -> None:
    """Under a level that keeps none, which sends gradients as they are scaled or not."""

    def body(transport: Any) -> None:
        plain, scaled = (exchange(transport, ("none", "fp16", "topk:0.2:32"), drain_steps=3) for _ in range(2))
        for step, scale in enumerate([8.0] * 6 + [32.0, 16.0, 4.0, 4.0]):
            if step == 4:
                for x in (plain, scaled):
                    x.coordinator.set_level(["none", "fp16"].index(level))
            scaled.get_loss_scale = lambda scale=scale: scale
            grads = gradients(step, transport.rank)
            got, expected = scaled.reduce([grad * np.float32(scale) for grad in grads]), plain.reduce(grads)
            scaled.commit(), plain.commit()
            for one, other in zip(got, expected, strict=True):
                np.testing.assert_allclose(one / np.float32(scale), other, atol=2e-2 if level == "fp16" else 1e-5)
            for one, other in zip(residuals(scaled), residuals(plain), strict=True):
                np.testing.assert_allclose(one, other, atol=1e-5)
        assert not scaled.state()["residuals"] and not plain.state()["residuals"]

    run(2, body, negotiates=negotiates)


@ORDERS
def test_loss_scaling_that_begins_late_joins_no_residual(negotiates: bool | str) -> None:
    """The coming step's plan, of a level that keeps one, was made before anybody knew."""

    def body(transport: Any) -> None:
        x = exchange(transport, ("none", "int8"), auto=True, dense_steps=10**6)
        x.coordinator.set_level(1)
        take(x, range(4))
        assert x.plan.level == 1
        for step in range(4, 7):
            x.leave_out_residuals()
            assert x.plan.level == 0
            take(x, [step])
        assert [record["kind"] for record in x.coordinator.log.records].count("forbid") == 1

    run(2, body, negotiates=negotiates)


# -- what a step does besides ------------------------------------------------------------------------------------------


@ORDERS
@pytest.mark.parametrize("level", ["none", "int8"])
def test_a_bandwidth_probe_changes_no_mean(level: str, negotiates: bool | str) -> None:
    """A sum of zeros of the size that was asked for, after all others; its time comes with the next metadata."""

    def body(transport: Any) -> None:
        x, plain = exchange(transport, level), exchange(transport, level)
        take(x, range(3)), take(plain, range(3))
        x.follow(x.plan._replace(probe_bytes=4096))
        transport.sent.clear()
        (got,) = take(x, [3])
        assert transport.sent[-1] == ("numpy.probe", 4096)
        assert x.meter.last.probe > 0 and not x.plan.probe_bytes
        for one, other in zip(got, take(plain, [3])[0], strict=True):
            assert np.array_equal(one, other)

    run(2, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("level", ["none", "int8"])
def test_losses_reach_the_log_as_their_mean(level: str, negotiates: bool | str) -> None:
    def body(transport: Any) -> None:
        x = exchange(transport, level, window_steps=4)
        for step in range(10):
            if step >= 2:
                x.reporter.loss = 1.0 + transport.rank
            take(x, [step])
        x.coordinator.finish()
        losses = [record["loss"] for record in x.coordinator.log.records if record["kind"] == "window"]
        assert losses[-1] == pytest.approx(1.5)

    run(2, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("level", ["none", "int8", "lowrank:2", "powersgd:2"])
def test_a_step_that_was_broken_off_leaves_no_trace(level: str, negotiates: bool | str) -> None:
    """The transport failed in the middle of a backward pass: what was on its way is forgotten."""

    def body(transport: Any) -> None:
        from hvdplus.exchange.step import gradient_ready

        x, plain = exchange(transport, level), exchange(transport, level)
        take(x, range(4)), take(plain, range(4))
        x.backend.gradients = gradients(99, transport.rank)
        for i in x.order[:3]:
            gradient_ready(x, i)
        x.abandon()
        for one, other in zip(take(x, range(4, 6)), take(plain, range(4, 6)), strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))

    run(2, body, negotiates=negotiates)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@ORDERS
@pytest.mark.parametrize("level", ["none", "fp16", "int8", "auto"])
def test_an_exchange_that_is_dropped_is_gone_at_once(level: str, negotiates: bool, no_collector: None) -> None:
    """With all its buckets, and without waiting for the garbage collector."""

    def body(transport: Any) -> None:
        options = {"auto": True} if level == "auto" else {}
        x = exchange(transport, ("none", "int8") if level == "auto" else level, **options)
        take(x, range(3))
        gone = [weakref.ref(each) for each in (x, x.coordinator, x.reporter, x.backend, x.states[0])]
        del x
        assert [each() for each in gone] == [None] * len(gone)

    run(2, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("level", LEVELS)
def test_the_users_gradients_are_left_alone(level: str, negotiates: bool | str) -> None:
    """And nobody writes to means that were given out."""

    def body(transport: Any) -> None:
        x = exchange(transport, level)
        given, copies = [], []
        for step in range(4):
            grads = gradients(step, transport.rank)
            got = x.reduce(grads, 0.1)
            x.commit()
            for mine, before in zip(grads, gradients(step, transport.rank), strict=True):
                assert np.array_equal(mine, before)
            given.append(got), copies.append([np.array(one) for one in got])
        for got, before in zip(given, copies, strict=True):
            assert all(np.array_equal(one, other) for one, other in zip(got, before, strict=True))

    run(2, body, negotiates=negotiates)


def test_buckets_leave_while_the_backward_pass_goes_on() -> None:
    """Once the order is known, those that are full; and in the order in which gradients become ready."""

    def body(transport: InProcess) -> None:
        from hvdplus.exchange.step import finish, gradient_ready

        x = exchange(transport, "int8")
        take(x, range(4))
        transport.sent.clear()
        x.backend.gradients = gradients(4, transport.rank)
        numbers = []
        for i in x.order:
            gradient_ready(x, i)
            numbers.append(len(transport.sent))
        assert numbers[-1] == len(x.states) and numbers[0] <= 1 < numbers[-2] + 1
        assert [name.split(".")[1] for name, _ in transport.sent] == [str(state.bucket.number) for state in x.states]
        finish(x, 0.1)
        x.commit()

    run(2, body)


def test_the_reference_is_a_compressor_that_is_not_none() -> None:
    """Every level of the list is another one, so that tests of all levels are of all levels."""
    assert len({parse(level).name for level in LEVELS}) == len(LEVELS)


@pytest.mark.parametrize("level", ["powersgd:2", "lowrank:2", "int8"])
def test_the_error_is_that_of_the_sum(level: str) -> None:
    """On average; ranks of ``powersgd`` hold back several times as much, which cancels."""

    def body(transport: Any) -> tuple[float, float, float]:
        x = exchange(transport, level, [(48, 40), (64, 32)])
        seen: list[float] = []
        observe = x.coordinator.observe

        def listen(plan: Any, metadata: Any, healthy: bool = True) -> None:
            if plan.measurement:
                seen.append(metadata.error)
            observe(plan, metadata, healthy)

        x.coordinator.observe = listen  # type: ignore[method-assign]
        true, own = [], []
        for step in range(60):
            grads = gradients(step, transport.rank, x.shapes)
            x.reduce(grads)
            x.commit()
            everyone = transport.gather_objects((grads, residuals(x)))
            summed = [[sum(parts) for parts in zip(*those, strict=True)] for those in zip(*everyone, strict=True)]
            fresh, held = (np.linalg.norm(np.concatenate([part.ravel() for part in one])) for one in summed)
            true.append(held / fresh)
            mine = [np.linalg.norm(np.concatenate([part.ravel() for part in one])) for one in (residuals(x), grads)]
            own.append(mine[0] / mine[1])
        return float(np.mean(seen[2:])), float(np.mean(true[10:])), float(np.mean(own[10:]))

    seen, true, own = run(3, body)[0]
    assert seen == pytest.approx(true, rel=0.25)
    assert (own > 1.2 * true) == (level == "powersgd:2")
