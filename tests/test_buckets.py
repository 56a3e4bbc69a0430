"""Buckets: every parameter in one of them, in the order of a backward pass, cut alike on every rank.

What no compressor may touch stands behind the rest of its bucket.
"""

from __future__ import annotations

import math

import pytest
from frameworks import examples
from hypothesis import example, given
from hypothesis import strategies as st

from hvdplus.compression import parse
from hvdplus.exchange.bucket import (
    DENSE_ONLY,
    Bucket,
    bytes_per_step,
    compressible,
    compressor_for,
    itemsize,
    make_buckets,
    wide,
)

Parameter = tuple[tuple[int, ...], str]

parameters = st.lists(
    st.tuples(
        st.one_of(
            st.lists(st.integers(0, 6), max_size=4).map(tuple),
            st.sampled_from(((16, 16), (255,), (256,), (1, 300), (300, 1, 1), (1, 16, 1, 16), (51, 5), (3, 3, 4, 8))),
        ),
        st.sampled_from(("float32", "float32", "float16", "bfloat16", "float64")),
    ),
    max_size=25,
)
limits = st.integers(4, 4000)

TYPES = ("float16", "bfloat16", "float32", DENSE_ONLY)

thoroughly = examples(200)


def cut(model: list[Parameter], bucket_bytes: int, ranks: int = 2, seed: int = 5) -> tuple[Bucket, ...]:
    """Buckets of a model."""
    shapes, dtypes = [shape for shape, _ in model], [dtype for _, dtype in model]
    return make_buckets(shapes, dtypes, bucket_bytes=bucket_bytes, ranks=ranks, seed=seed)


def may_be_compressed(shape: tuple[int, ...]) -> bool:
    """A matrix of 256 elements or more; dimensions of 1 make no matrix of a vector."""
    return len([length for length in shape if length != 1]) >= 2 and math.prod(shape) >= 256


def wire_bytes(parameter: Parameter) -> int:
    """Bytes of a gradient in its bucket, in its own type."""
    shape, dtype = parameter
    return math.prod(shape) * {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[dtype]


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
    """Last to first, type by type, from bucket to bucket. Within one too, but what may be compressed comes first."""
    buckets = cut(model, limit)
    for dtype in TYPES:
        order = [i for bucket in buckets if bucket.dtype == dtype for i in sorted(bucket.parameters, reverse=True)]
        assert order == sorted(order, reverse=True)
    for bucket in buckets:
        body = [i for i in bucket.parameters if may_be_compressed(model[i][0])]
        tail = [i for i in bucket.parameters if not may_be_compressed(model[i][0])]
        assert list(bucket.parameters) == sorted(body, reverse=True) + sorted(tail, reverse=True)
    assert [bucket.number for bucket in buckets] == list(range(len(buckets)))


@given(parameters, limits)
@example([((8,), "float32")] * 12, 128)
@thoroughly
def test_tapering_buckets_leave_little_to_the_end(model: list[Parameter], limit: int) -> None:
    """Of several parameters, none is larger than what comes after it, but for the smallest."""
    model = [(shape, "float32") for shape, _ in model]
    shapes, sizes = [shape for shape, _ in model], [wire_bytes(parameter) for parameter in model]
    buckets = make_buckets(shapes, ["float32"] * len(model), bucket_bytes=limit, ranks=2, seed=5, tapering=True)
    assert sorted(i for bucket in buckets for i in bucket.parameters) == list(range(len(model)))
    carried = [sum(sizes[i] for i in bucket.parameters) for bucket in buckets]
    for number, bucket in enumerate(buckets):
        if len(bucket.parameters) > 1:
            assert carried[number] <= min(limit, max(limit // 16, sum(carried[number + 1 :])))


@given(parameters, limits)
@thoroughly
def test_buckets_are_as_full_as_the_limit_allows(model: list[Parameter], limit: int) -> None:
    """None is larger unless a single parameter is, beside less than a 64th of a full one; all but the last hold so
    much; and no parameter would have fitted into the one before its own."""
    buckets = cut(model, limit)
    for dtype in TYPES:
        same = [bucket for bucket in buckets if bucket.dtype == dtype]
        sizes = [sum(wire_bytes(model[i]) for i in bucket.parameters) for bucket in same]
        for bucket, size in zip(same, sizes, strict=True):
            largest = max(wire_bytes(model[i]) for i in bucket.parameters)
            assert size <= limit or size - largest < limit / 64
        for size, following in zip(sizes, same[1:], strict=False):
            assert size >= limit / 64
            assert size + wire_bytes(model[max(following.parameters)]) > limit


def test_a_few_biases_are_no_bucket() -> None:
    """The layers of a perceptron are each as large as a bucket or larger."""
    perceptron = [((64, 2240), "float32"), ((2240,), "float32"), ((2240, 2240), "float32"), ((2240,), "float32")]
    assert [bucket.parameters for bucket in cut(perceptron, 8 << 20)] == [(2, 3), (0, 1)]
    assert [bucket.parameters for bucket in cut(perceptron, 64 * 4 * 2240)] == [(3,), (2,), (1,), (0,)]
    assert [bucket.parameters for bucket in cut(perceptron, 64 * 4 * 2240 + 16)] == [(2, 3), (0, 1)]


@given(parameters, limits)
@thoroughly
def test_every_type_has_buckets_of_its_own(model: list[Parameter], limit: int) -> None:
    """So that plain dense steps can send gradients as they are."""
    for bucket in cut(model, limit):
        assert {model[i][1] for i in bucket.parameters} == {bucket.dtype}


def test_types() -> None:
    assert [itemsize(dtype) for dtype in TYPES] == [2, 2, 4, 8]
    assert [wide(dtype) for dtype in TYPES] == ["float32", "float32", "float32", "float64"]


@given(parameters, limits, st.randoms(use_true_random=False))
@thoroughly
def test_tables_have_a_bucket_each_behind_all_others(model: list[Parameter], limit: int, random: object) -> None:
    """And change nothing in how the rest is cut."""
    apart = [i for i in range(len(model)) if random.random() < 0.3]  # type: ignore[attr-defined]
    shapes, dtypes = [shape for shape, _ in model], [dtype for _, dtype in model]
    buckets = make_buckets(shapes, dtypes, bucket_bytes=limit, ranks=2, seed=5, apart=apart)
    dense = len(buckets) - len(apart)
    assert [bucket.parameters for bucket in buckets[dense:]] == [(i,) for i in apart]
    assert [bucket.number for bucket in buckets] == list(range(len(buckets)))
    rest = [i for i in range(len(model)) if i not in apart]
    alone = make_buckets([shapes[i] for i in rest], [dtypes[i] for i in rest], bucket_bytes=limit, ranks=2, seed=5)
    assert [bucket.parameters for bucket in buckets[:dense]] == [
        tuple(rest[i] for i in bucket.parameters) for bucket in alone
    ]


@given(parameters, limits, st.integers(1, 64), st.integers(0, 2**31))
@thoroughly
def test_the_spec_tells_what_the_bucket_holds(model: list[Parameter], limit: int, ranks: int, seed: int) -> None:
    buckets = cut(model, limit, ranks, seed)
    for bucket in buckets:
        assert bucket.shapes == tuple(model[i][0] for i in bucket.parameters)
        body = [shape for shape in bucket.shapes if may_be_compressed(shape)]
        assert bucket.spec.shapes == tuple(body) == bucket.shapes[: len(body)], "in front, so that both offsets agree"
        assert bucket.spec.tail == sum(math.prod(shape) for shape in bucket.shapes[len(body) :])
        assert (bucket.spec.position, bucket.spec.ranks, bucket.spec.seed) == (bucket.number, ranks, seed)
        assert len(bucket.offsets) == len(bucket.parameters) + 1
        assert bucket.offsets[0] == 0 and bucket.offsets[-1] == bucket.spec.size
        widths = [end - start for start, end in zip(bucket.offsets, bucket.offsets[1:], strict=False)]
        assert widths == [math.prod(model[i][0]) for i in bucket.parameters]
    assert buckets == cut(list(model), limit, ranks, seed), "the same on every rank"


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (8 << 20, [(4, 0), (5, 3), (2,), (1,)]),
        (400, [(4,), (5, 3), (2,), (0,), (1,)]),
        (60, [(4,), (3,), (5,), (2,), (0,), (1,)]),
    ],
)
def test_a_model_cut_by_hand(limit: int, expected: list[tuple[int, ...]]) -> None:
    model: list[Parameter] = [
        ((10, 10), "float32"),
        ((60,), "float16"),
        ((3,), "float64"),
        ((50,), "bfloat16"),
        ((7, 7), "float32"),
        ((2,), "bfloat16"),
    ]
    assert sorted(bucket.parameters for bucket in cut(model, limit)) == sorted(expected)


def test_what_no_compressor_may_touch_stands_last() -> None:
    """A small network: two layers with their biases and norms, an embedding, a vector that looks like a matrix."""
    shapes = ((50, 8), (16, 30), (30,), (30,), (30,), (3, 3, 8, 30), (1, 512), (2, 127))
    (bucket,) = cut([(shape, "float32") for shape in shapes], 8 << 20)
    assert bucket.parameters == (5, 1, 0, 7, 6, 4, 3, 2)
    assert bucket.shapes == tuple(shapes[i] for i in bucket.parameters)
    assert bucket.spec.shapes == ((3, 3, 8, 30), (16, 30), (50, 8))
    assert bucket.spec.body == 2160 + 480 + 400
    assert bucket.spec.tail == 254 + 512 + 3 * 30
    assert bucket.offsets == (0, 2160, 2640, 3040, 3294, 3806, 3836, 3866, 3896)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((), False),
        ((10**6,), False),
        ((1, 10**6), False),
        ((10**6, 1, 1, 1), False),
        ((16, 16), True),
        ((2, 128), True),
        ((255, 1), False),
        ((15, 17), False),  # 255 elements
        ((1, 1, 16, 16), True),
        ((64, 1, 3, 3), True),
        ((5, 5, 5), False),
        ((0, 1000), False),
        ((1000, 0, 3), False),
    ],
)
def test_what_may_be_compressed(shape: tuple[int, ...], expected: bool) -> None:
    """Matrices of 256 elements or more, of whatever number of dimensions."""
    assert compressible(shape) is expected


def test_a_bucket_without_any_matrix_is_all_tail() -> None:
    (bucket,) = cut([((3,), "float32"), ((), "float32")], 8 << 20)
    assert (bucket.parameters, bucket.spec.shapes, bucket.spec.tail) == ((1, 0), (), 4)


@pytest.mark.parametrize("level", ["none", "fp16", "int8", "lowrank:4", "topk:0.05"])
def test_float64_stays_dense_at_every_level(level: str) -> None:
    half, double = sorted(cut([((32, 32), "float64"), ((32, 32), "float16")], 8 << 20), key=lambda bucket: bucket.dtype)
    assert compressor_for(half, parse(level)) == parse(level)
    assert compressor_for(double, parse(level)) == parse("none")
    dense = 8 * 32 * 32
    assert bytes_per_step([double], parse(level)) == dense
    assert bytes_per_step([half, double], parse(level)) == dense + bytes_per_step([half], parse(level))


@pytest.mark.parametrize(("sums", "width"), [((), 4), (("float16",), 2), (("bfloat16",), 4), (("float32",), 4)])
def test_narrow_gradients_travel_narrow_where_the_transport_can_add_them_up(sums: tuple[str, ...], width: int) -> None:
    """In plain dense steps; whatever is compressed is so from float32."""
    (bucket,) = cut([((32, 32), "float16")], 8 << 20)
    assert bytes_per_step([bucket], parse("none"), sums) == width * 32 * 32
    (wide_bucket,) = cut([((32, 32), "float32")], 8 << 20)
    for level in ("fp16", "int8", "lowrank:4"):
        assert bytes_per_step([bucket], parse(level), sums) == bytes_per_step([wide_bucket], parse(level))


def test_bytes_of_a_step() -> None:
    """All that one rank sends, tail included; of levels whose sides differ, the mean."""
    (bucket,) = cut([((24, 40), "float32"), ((10,), "float32")], 8 << 20)
    sizes = {level: bytes_per_step([bucket], parse(level)) for level in ("none", "fp16", "lowrank:2", "lowrank:2+fp16")}
    assert sizes == {
        "none": 4 * (24 * 40 + 10),
        "fp16": 2 * (24 * 40 + 10),
        "lowrank:2": 4 * (2 * 32 + 10),
        "lowrank:2+fp16": 2 * (2 * 32 + 10),
    }
    assert bytes_per_step([bucket, bucket], parse("fp16")) == 2 * sizes["fp16"]
    assert bytes_per_step([], parse("fp16")) == 0


def test_a_level_that_the_ranks_leave_no_room_for_names_one_that_works() -> None:
    model: list[Parameter] = [((32, 32), "float32")]
    assert bytes_per_step(cut(model, 8 << 20, ranks=1), parse("int2")) > 0
    with pytest.raises(ValueError, match=r"int2 leaves no level for a sum over 4 ranks.*4 bits are enough"):
        bytes_per_step(cut(model, 8 << 20, ranks=4), parse("int2"))
