"""The sketch of gradients: what it says of their likeness is true on average, in every framework alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
from frameworks import examples
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.adapters.numpy.backend import NumpyBackend
from hvdplus.exchange.metadata import Report, Slot, Sums, pack, read
from hvdplus.exchange.sketch import CELLS, WIDTH, cosine, part_of, signs, square

BACKEND = NumpyBackend([])


def sketch(gradient: np.ndarray, measurement: int, parameter: int = 0) -> np.ndarray:
    part = part_of(gradient.shape if gradient.ndim > 1 else (2, gradient.size // 2), parameter, measurement)
    return BACKEND.sketch(gradient, part) if part else np.zeros(CELLS, np.float32)


def found(gradients: list[np.ndarray], measurement: int) -> float:
    """What ranks with these gradients read."""
    ranks, tensors = len(gradients), []
    for rank, gradient in enumerate(gradients):
        cells = sketch(gradient, measurement)
        sums = Sums(sketch_square=square(cells), sketched_square=square(gradient))
        slot = Slot(gradient_norm=math.sqrt(square(gradient)))
        tensors.append(pack(rank, ranks, Report(sums, slot, cells.tolist(), [0.0] * CELLS), []))
    return read(np.sum(tensors, axis=0, dtype=np.float32), ranks).cosine


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("noise", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("size", [256, 1024, CELLS * (WIDTH + 1000)])
@pytest.mark.parametrize("low_rank", [False, True])
def test_the_mean_over_measurements_is_the_cosine(ranks: int, noise: float, size: int, low_rank: bool) -> None:
    """Of gradients with a part in common and a part of their own, also where a common part of rank one is all there is
    to add up: within four standard errors, and they are small."""
    rng, seen = np.random.default_rng(ranks), []
    for measurement in range(1, 61):
        common = rng.standard_normal(size)
        if low_rank:
            common = np.outer(rng.standard_normal(CELLS // 4), rng.standard_normal(size // CELLS * 4)).reshape(-1)
        common /= np.sqrt(np.mean(common**2))
        own = [common + noise * rng.standard_normal(common.size) for _ in range(ranks)]
        seen.append(found([each.astype(np.float32) for each in own], measurement))
    error = np.std(seen, ddof=1) / math.sqrt(len(seen))
    assert error < 0.15
    assert np.mean(seen) == pytest.approx(1 / (1 + noise**2), abs=4 * error + 0.01)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5, 51), (5000,), (1, 5000)])
def test_gradients_that_always_travel_whole_are_left_out(shape: tuple[int, ...]) -> None:
    assert part_of(shape, 0, 1) is None


@given(st.integers(2, 10**5), st.integers(128, 10**5), st.integers(0, 10**5), st.integers(1, 10**9))
@examples(300)
def test_parts_lie_within_the_gradient_and_the_signs(height: int, width: int, parameter: int, measurement: int) -> None:
    part, length = part_of((height, width), parameter, measurement), height * width
    assert part and part.rows * CELLS <= length < (part.rows + 1) * CELLS
    assert 0 < part.width <= WIDTH and 0 <= part.column <= part.rows - part.width
    assert 0 <= part.sign <= len(signs()) - part.width
    assert part.scale**2 * part.width == pytest.approx(part.rows)


def test_parameters_and_measurements_have_signs_of_their_own() -> None:
    """Else a sketch of two equal tensors would be twice that of one, and errors would not average out."""
    tensor = np.random.default_rng(0).standard_normal(10**5).astype(np.float32)
    sketches = [sketch(tensor, measurement, parameter) for measurement in (1, 2, 3) for parameter in (0, 1, 2)]
    table = np.corrcoef(sketches)
    assert np.abs(table - np.eye(len(sketches))).max() < 0.7
    assert set(np.unique(signs())) == {-1.0, 1.0} and abs(signs().mean()) < 0.03


@pytest.mark.parametrize(
    ("summed", "own", "whole", "ranks"),
    [
        (1.0, 1.0, 1.0, 1),
        (1.0, 1.0, 0.0, 2),
        (math.inf, math.inf, 1.0, 2),
        (math.nan, 1.0, 1.0, 2),
        (1.0, math.nan, 1.0, 2),
        (1.0, 1.0, math.nan, 2),
        (1.0, 1.0, math.inf, 2),
    ],
)
def test_what_is_not_known_is_nan(summed: float, own: float, whole: float, ranks: int) -> None:
    assert math.isnan(cosine([summed], own, whole, ranks))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_pytorch_makes_the_same_sketch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from hvdplus.adapters.torch.backend import TorchBackend

    backend = TorchBackend([])
    for size in (300, 10**5, 3 * 10**5):
        gradient = np.random.default_rng(size).standard_normal(size).astype(dtype)
        for measurement in (1, 2, 77):
            part = part_of((2, size // 2), 3, measurement)
            assert part
            for enabled in (False, True):
                with torch.autocast("cpu", enabled=enabled):
                    theirs = backend.sketch(torch.from_numpy(gradient), part).numpy()
                    apart = torch.from_numpy(np.repeat(gradient, 2))[::2]
                    assert (backend.sketch(apart, part).numpy() == theirs).all(), "every second place in memory"
                assert theirs.dtype == np.float32
                np.testing.assert_allclose(theirs, BACKEND.sketch(gradient, part), rtol=1e-3, atol=1e-3 * part.scale)


def test_tensorflow_makes_the_same_sketch() -> None:
    tf = pytest.importorskip("tensorflow")
    from types import SimpleNamespace

    from hvdplus.adapters.tensorflow.report import sketch as in_graph
    from hvdplus.adapters.tensorflow.variables import Coming

    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal(shape).astype(np.float32) for shape in [(300, 700), (5,), (40, 9)]]
    exchange = SimpleNamespace(shapes=[each.shape for each in gradients])
    for measurement in (1, 2, 77):
        coming = Coming(measurement=tf.constant(float(measurement), tf.float64))
        theirs, norm_square = in_graph(exchange, coming, list(map(tf.constant, gradients)))  # type: ignore[arg-type]
        ours = sum(sketch(each, measurement, parameter) for parameter, each in enumerate(gradients))
        np.testing.assert_allclose(theirs.numpy(), ours, rtol=1e-3, atol=1e-2)
        assert float(norm_square) == pytest.approx(square(gradients[0]) + square(gradients[2]), rel=1e-4)
