"""Parts of the compiled exchange that one process can try: integers, checksums, clocks, private interfaces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

tf = pytest.importorskip("tensorflow")

from hvdplus.adapters.tensorflow import private, tensors  # noqa: E402
from hvdplus.adapters.tensorflow.timing import Stamps, StepClock, packed, unpacked  # noqa: E402
from hvdplus.control.meter import StepTimes  # noqa: E402
from hvdplus.exchange import sparse  # noqa: E402
from hvdplus.exchange.bucket import make_buckets  # noqa: E402
from hvdplus.exchange.metadata import fold24  # noqa: E402

quickly = settings(max_examples=100, deadline=None, derandomize=True, database=None)
seconds = st.floats(-1e4, 1e4).map(lambda delta: 1.7e9 + delta)


@given(st.one_of(st.integers(0, 5000), st.integers(0, 1 << 30)))
@quickly
def test_lengths_are_padded_as_everywhere(count: int) -> None:
    assert int(tensors.padded(tf.constant(count))) == sparse.padded(count)


def test_lengths_next_to_powers_of_two_are_padded_as_everywhere() -> None:
    for count in {(1 << bit) + off for bit in range(4, 30) for off in (-1, 0, 1)}:
        assert int(tensors.padded(tf.constant(count))) == sparse.padded(count), count


@given(st.integers(-(1 << 63), (1 << 63) - 1))
@quickly
def test_checksums_are_folded_as_everywhere(checksum: int) -> None:
    assert float(tensors.fold24(tf.constant(checksum, tf.int64))) == fold24(checksum)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_checksum_sees_every_bit_and_a_fingerprint_its_samples(dtype: str) -> None:
    values = np.random.default_rng(0).standard_normal(16)
    for function in (tensors.checksum, lambda v: tensors.fingerprint(v, whole=False)):
        seen = set()
        for i in range(16):
            changed = values.copy()
            changed[i] += 1
            seen.add(int(function(tf.Variable(changed, dtype=dtype))))
        seen.add(int(function(tf.Variable(values, dtype=dtype))))
        assert len(seen) == 17


def test_equal_variables_in_another_order_have_another_hash() -> None:
    one, other = tf.constant([3, 5], tf.int64), tf.constant([5, 3], tf.int64)
    assert int(tensors.weighed(one)) != int(tensors.weighed(other))
    assert int(tensors.weighed(tf.zeros(0, tf.int64))) == 0


def test_a_bucket_comes_apart_as_it_was_packed() -> None:
    shapes = [(3, 100), (4,), (), (2, 200)]
    (bucket,) = make_buckets(shapes, ["float32"] * 4, bucket_bytes=1 << 20, ranks=2, seed=0)
    grads = [tf.random.stateless_normal(shape, [0, i]) for i, shape in enumerate(shapes)]
    vector = tensors.packed(bucket, grads)
    for i, part in zip(bucket.parameters, tensors.parts_of(vector, bucket), strict=True):
        np.testing.assert_array_equal(part, grads[i])
    mixed = tensors.with_parts(vector * 2, vector, bucket, [False, True, False, True])
    for i, part in zip(bucket.parameters, tensors.parts_of(mixed, bucket), strict=True):
        np.testing.assert_array_equal(part, grads[i] * (1 if i in (1, 3) else 2))


@given(st.lists(st.tuples(*[seconds] * 3, st.floats(-1, 1), *[seconds] * 4), min_size=2, max_size=4), st.floats(0, 1))
@quickly
def test_a_clock_that_is_set_back_makes_no_time_negative_or_longer_than_the_step(
    steps: list[tuple[float, ...]], codec: float
) -> None:
    clock = StepClock()
    for data, ready, done, probe, *rest in steps:
        stamps = Stamps(data, ready, done, probe, np.array(rest[:2]), np.array(rest[2:]))
        times = clock.read(stamps, [3, 5], codec, False)
        clock.step_ended(done - 0.5)
        assert min(times) >= 0
        assert times.codec + times.exposed_comm + times.input_wait + times.probe <= times.step + 1e-6
        assert times.comm <= times.step + 1e-6


def test_a_step_is_taken_apart() -> None:
    clock = StepClock()
    assert clock.read(Stamps(0.0, 9.0, 10.0, 0.0, np.array([8.0]), np.array([10.0])), [4], 0.25, False) == StepTimes()
    clock.step_ended(10.5)
    times = clock.read(Stamps(11.0, 13.0, 14.0, 0.5, np.array([12.0]), np.array([14.0])), [4], 0.25, False)
    assert times == StepTimes(4.5, 0.25, 0.75, 0.5, 1.0, 0.5)


def test_stamps_travel_in_one_vector() -> None:
    numbers = [tf.constant(value, tf.float64) for value in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)]
    got = unpacked(packed(Stamps(*numbers[:4], numbers[4:6], numbers[6:])).numpy())
    assert got[:4] == (1.0, 2.0, 3.0, 4.0)
    assert got.begins.tolist() == [5.0, 6.0] and got.ends.tolist() == [7.0, 8.0]


def test_this_tensorflow_has_all_private_interfaces() -> None:
    assert private.missing() == []


def test_what_a_version_of_tensorflow_lacks_is_named_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_order_of", lambda graph: None)
    monkeypatch.setattr(private, "_xla_test", lambda: None)
    told = private.missing()
    assert [tf.__version__ in line for line in told] == [True, True]
    assert "experimental_acd_manager" in told[0] and "GraphOrParentsInXlaContext" in told[1]
    assert not private.in_xla(tf.Graph()), "it cannot be told"


@pytest.mark.parametrize("private_order", [True, False])
def test_a_timestamp_comes_after_what_it_waits_for(private_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is taken anew in every step, not once, when the graph is made."""
    if not private_order:
        monkeypatch.setattr(private, "_order_of", lambda graph: None)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        before = private.timestamp([x])
        with tf.control_dependencies([before]):
            y = tf.linalg.matmul(x, x)
        # A product that nobody uses would be optimized away.
        return before, private.timestamp([y]), y[0, 0]

    x = tf.ones((700, 700))
    stamps = [float(stamp) for _ in range(3) for stamp in step(x)[:2]]
    assert stamps == sorted(stamps) and len(set(stamps)) == 6
