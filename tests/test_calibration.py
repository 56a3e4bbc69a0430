"""Codecs tried beforehand: which buckets stand for a model, and what is made of their times."""

from __future__ import annotations

from typing import Any

import pytest

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.adapters.transports.local import Local
from hvdplus.compression import Spec, parse
from hvdplus.control import calibration
from hvdplus.control.calibration import codec_seconds
from hvdplus.exchange.bucket import make_buckets

LADDER = [parse(level) for level in ("none", "fp16", "lowrank:4", "topk:0.05+int8", "int8")]


def cut(shapes: list[tuple[int, ...]], dtype: str = "float32", bucket_bytes: int = 1 << 16) -> list[Spec]:
    """As an exchange does: of the buckets that may be compressed."""
    buckets = make_buckets(shapes, [dtype] * len(shapes), bucket_bytes=bucket_bytes, ranks=2, seed=0)
    return [bucket.spec for bucket in buckets if bucket.compressible]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Sizes of the buckets of every level that is timed; a bucket takes 1 ms for every element."""
    sizes: list[list[int]] = []

    def seconds(ops: Any, specs: Any, grads: Any, compressors: Any, compiled: Any) -> list[float]:
        sizes.extend([spec.size for spec in specs] for _ in compressors)
        return [sum(sizes[-1]) * 1e-3 for _ in compressors]

    monkeypatch.setattr(calibration, "_seconds", seconds)
    return sizes


def test_every_level_that_encodes_takes_some_time_and_dense_takes_none() -> None:
    figures = codec_seconds(NumpyOps(), cut([(64, 32), (40,), (100, 60)]), LADDER, Local())
    assert figures[0] == 0
    assert all(0 < seconds < 10 for seconds in figures[1:])


def test_few_buckets_stand_for_all_and_all_are_counted(tried: list[list[int]]) -> None:
    buckets = cut([(128, 128)] * 23)
    assert codec_seconds(NumpyOps(), buckets, LADDER[1:3], Local()) == pytest.approx([23 * 128 * 128 * 1e-3] * 2)
    assert tried == [[128 * 128] * 4] * 2


@pytest.mark.parametrize("count", range(1, 10))
def test_four_at_most(tried: list[list[int]], count: int) -> None:
    codec_seconds(NumpyOps(), cut([(128, 128)] * count), LADDER[1:2], Local())
    assert min(count, 3) <= len(tried[0]) <= 4


def test_small_buckets_stand_for_nothing_and_huge_ones_are_shortened(tried: list[list[int]]) -> None:
    buckets = cut([(8,), (3000, 1000), (1200, 1000), (128, 100), (20, 20)])
    (seconds,) = codec_seconds(NumpyOps(), buckets, LADDER[1:2], Local())
    assert tried == [[1_200_000, 2_097_000]], "the last parameter has the first bucket"
    assert seconds == pytest.approx(1e-3 * sum(spec.size for spec in buckets))


def test_shortened_buckets_are_of_the_same_make() -> None:
    spec = cut([(3000, 1000), (2000, 500), (700,)], bucket_bytes=1 << 30)[0]
    shortened = calibration._shortened(spec)
    for (height, width), (before, same) in zip(shortened.shapes, spec.shapes, strict=True):
        assert width == same and height == pytest.approx(before * shortened.size / spec.size, abs=1.5)
    assert 0.99 * calibration.ELEMENTS < shortened.size <= calibration.ELEMENTS
    assert calibration._shortened(shortened) == shortened


def test_what_is_never_compressed_takes_no_time() -> None:
    assert codec_seconds(NumpyOps(), cut([(64, 64)], "float64"), LADDER, Local()) == (0.0,) * len(LADDER)
    assert codec_seconds(NumpyOps(), (), LADDER, Local()) == (0.0,) * len(LADDER)


def test_the_slowest_rank_counts(tried: list[list[int]]) -> None:
    class Two(Local):
        size = 2

        def gather_objects(self, value: Any, what: str = "") -> list[Any]:
            return [value, [2 * seconds for seconds in value], [0.0 for _ in value]]

    buckets = cut([(128, 128)] * 2)
    assert codec_seconds(NumpyOps(), buckets, LADDER[:2], Two()) == pytest.approx((0.0, 4 * 128 * 128 * 1e-3))


def test_a_level_has_half_a_second_and_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow it is, and however many runs there are otherwise; the first does not count."""
    now = [0.0]
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: now[0])
    for runs, expected in (
        ([9.0, 8.0, 7.0], 8.0),
        ([0.2, 0.4, 0.1], 0.4),
        ([0.09, 0.08, 0.06, 0.05, 0.01], 0.05),
    ):
        left = iter(runs)

        def work(grads: Any, residuals: Any, states: Any, left: Any = left) -> Any:
            now[0] += next(left)
            return [True], states, []

        assert calibration._least(NumpyOps(), [work], (), (), [()]) == pytest.approx([expected])
    assert list(left) == [0.01], "no more than RUNS"


def test_a_busy_moment_does_not_meet_all_runs_of_one_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine takes three times as long from 0.35 to 0.75 seconds on."""
    now = [0.0]
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: now[0])

    def taking(seconds: float) -> Any:
        def work(grads: Any, residuals: Any, states: Any) -> Any:
            now[0] += seconds * (3 if 0.35 <= now[0] < 0.75 else 1)
            return [True], states, []

        return work

    rounds = [taking(0.02), taking(0.05), taking(0.09)]
    assert calibration._least(NumpyOps(), rounds, (), (), [()] * 3) == pytest.approx([0.02, 0.05, 0.09])
