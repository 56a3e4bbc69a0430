"""Buckets: every parameter in one of them, in the order of a backward pass, cut alike on every rank."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdplus.buckets import DENSE_ONLY, Bucket, make_buckets

Parameter = tuple[tuple[int, ...], str]

parameters = st.lists(
    st.tuples(
        st.lists(st.integers(0, 6), max_size=4).map(tuple),
        st.sampled_from(("float32", "float32", "float16", "bfloat16", "float64")),
    ),
    max_size=25,
)
limits = st.integers(4, 4000)

thoroughly = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def cut(model: list[Parameter], bucket_bytes: int, ranks: int = 2, seed: int = 5) -> tuple[Bucket, ...]:
    """Buckets of a model."""
    shapes, dtypes = [shape for shape, _ in model], [dtype for _, dtype in model]
    return make_buckets(shapes, dtypes, bucket_bytes=bucket_bytes, ranks=ranks, seed=seed)


def wire_bytes(parameter: Parameter) -> int:
    """Bytes of a gradient in its bucket: 8 an element for float64, else 4, whatever the parameter's own type."""
    shape, dtype = parameter
    return math.prod(shape) * (8 if dtype == "float64" else 4)


@given(parameters, limits)
@example([], 4)
@thoroughly
def test_every_parameter_is_in_exactly_one_bucket(model: list[Parameter], limit: int) -> None:
    buckets = cut(model, limit)
    assert sorted(i for bucket in buckets for i in bucket.parameters) == list(range(len(model)))
    assert all(bucket.parameters for bucket in buckets)


@given(parameters, limits)
@thoroughly
def test_order_is_that_of_a_backward_pass(model: list[Parameter], limit: int) -> None:
    """Last to first, within a bucket and, type by type, from bucket to bucket."""
    buckets = cut(model, limit)
    for dtype in ("float32", DENSE_ONLY):
        order = [i for bucket in buckets if bucket.dtype == dtype for i in bucket.parameters]
        assert order == sorted(order, reverse=True)
    assert [bucket.number for bucket in buckets] == list(range(len(buckets)))


@given(parameters, limits)
@thoroughly
def test_buckets_are_as_full_as_the_limit_allows(model: list[Parameter], limit: int) -> None:
    """None is larger unless a single parameter is, and no parameter would have fitted into the one before its own."""
    buckets = cut(model, limit)
    for dtype in ("float32", DENSE_ONLY):
        same = [bucket for bucket in buckets if bucket.dtype == dtype]
        sizes = [sum(wire_bytes(model[i]) for i in bucket.parameters) for bucket in same]
        for bucket, size in zip(same, sizes, strict=True):
            largest = max(wire_bytes(model[i]) for i in bucket.parameters)
            assert size <= max(limit, largest)
        for size, following in zip(sizes, same[1:], strict=False):
            assert size + wire_bytes(model[following.parameters[0]]) > limit


@given(parameters, limits)
@thoroughly
def test_float64_travels_apart_and_everything_narrower_together(model: list[Parameter], limit: int) -> None:
    for bucket in cut(model, limit):
        assert {model[i][1] == "float64" for i in bucket.parameters} == {bucket.dtype == DENSE_ONLY}
        assert bucket.dtype in ("float32", "float64")


@given(parameters, limits, st.integers(1, 64), st.integers(0, 2**31))
@thoroughly
def test_the_spec_tells_what_the_bucket_holds(model: list[Parameter], limit: int, ranks: int, seed: int) -> None:
    buckets = cut(model, limit, ranks, seed)
    for bucket in buckets:
        assert bucket.spec.shapes == tuple(model[i][0] for i in bucket.parameters)
        assert (bucket.spec.position, bucket.spec.ranks, bucket.spec.seed) == (bucket.number, ranks, seed)
        assert len(bucket.offsets) == len(bucket.parameters) + 1
        assert bucket.offsets[0] == 0 and bucket.offsets[-1] == bucket.spec.size
        widths = [end - start for start, end in zip(bucket.offsets, bucket.offsets[1:], strict=False)]
        assert widths == [math.prod(model[i][0]) for i in bucket.parameters]
    assert buckets == cut(list(model), limit, ranks, seed), "the same on every rank"


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (8 << 20, [(4, 3, 1, 0), (2,)]),  # the float64 bucket opened later and so closes later
        (400, [(4, 3), (1,), (0,), (2,)]),
        (4, [(4,), (3,), (1,), (0,), (2,)]),
    ],
)
def test_a_model_cut_by_hand(limit: int, expected: list[tuple[int, ...]]) -> None:
    model: list[Parameter] = [
        ((10, 10), "float32"),
        ((60,), "float16"),
        ((3,), "float64"),
        ((50,), "bfloat16"),
        ((7, 7), "float32"),
    ]
    assert sorted(bucket.parameters for bucket in cut(model, limit)) == sorted(expected)
