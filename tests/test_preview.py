"""What levels would hold back, tried on parts of two steps' gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks.reference import at_any_price, check_preview, previewed

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.adapters.numpy.backend import NumpyExchange
from hvdplus.adapters.transports.in_process import ORDERS, run
from hvdplus.compression import parse
from hvdplus.exchange.preview import SIDE, TENSORS, Preview

LEVELS = ("none", "int8", "powersgd:4+fp16", "lowrank:4+fp16", "topk:0.1", "randomk:0.1")


def of_rank(rank: int, shape: tuple[int, int], seed: int) -> np.ndarray:
    """A matrix of this rank, whose entries are of the size of 1."""
    rng = np.random.default_rng([seed, rank])
    left, right = (rng.standard_normal((length, rank)) for length in shape)
    return (left @ right.T / math.sqrt(rank)).astype(np.float32)


def errors(shapes: Sequence[tuple[int, ...]], steps: Sequence[Sequence[np.ndarray]], **options: Any) -> list[float]:
    """What a preview of every level shows after these steps' gradients."""
    preview = Preview(shapes, ["float32"] * len(shapes), (), seed=0, ranks=2)
    levels = options.get("levels", range(len(LEVELS)))
    for means in steps:
        parts = [means[i].reshape(-1)[: preview.elements(i)] for i in preview.parameters]
        shown = preview.see(NumpyOps(), [parse(level) for level in LEVELS], levels, parts)
    assert shown.dtype == np.float32
    return shown.tolist()


@given(st.integers(1, 3), st.integers(9, 80), st.integers(32, 90), st.integers(0, 99))
def test_levels_of_low_rank_send_all_of_gradients_of_lower_rank(rank: int, rows: int, columns: int, seed: int) -> None:
    """``lowrank`` as far as the basis that the step before has taught fits: here both steps' gradients are the same."""
    gradient = of_rank(rank, (rows, columns), seed)
    none, int8, powersgd, lowrank, *_ = errors([(rows, columns)], [[gradient]] * 2)
    assert none == 0 and 0 < int8 < 0.2 and powersgd < 0.01 and lowrank < 0.01


def test_noise_is_held_back_as_far_as_bytes_say() -> None:
    shape = (300, 400)
    steps = [[of_rank(300, shape, seed)] for seed in range(2)]
    _, _, powersgd, lowrank, topk, randomk = errors([shape], steps)
    assert 0.95 < powersgd < lowrank < 1, "four of three hundred directions"
    assert randomk == pytest.approx(math.sqrt(0.9), abs=0.03) and topk == pytest.approx(randomk, abs=0.03), "a tenth"


def test_a_corner_of_a_large_matrix_tells_of_the_whole() -> None:
    shape = (2 * SIDE, 3 * SIDE)
    low = [[of_rank(2, shape, seed) + 0.3 * of_rank(64, shape, seed)] for seed in (1, 1)]
    shown, whole = errors([shape], low), previewed(LEVELS, [shape], low, corner=None)
    for level in (2, 3):
        assert shown[level] == pytest.approx(whole[level], rel=0.2)


def test_the_first_step_only_teaches_and_a_third_begins_anew() -> None:
    steps = [[of_rank(6, (40, 50), seed)] for seed in range(4)]
    assert all(map(math.isnan, errors([(40, 50)], steps[:1]))) and all(map(math.isnan, errors([(40, 50)], steps[:3])))
    assert errors([(40, 50)], steps[2:]) == errors([(40, 50)], steps), "whatever was tried before"
    only = errors([(40, 50)], steps[:2], levels=(3,))
    assert [math.isnan(error) for error in only] == [level != 3 for level in range(len(LEVELS))]


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_gradients_that_show_nothing_are_tried_as_others_are(value: float) -> None:
    """Else a rank whose own show nothing would read in a step in which others learn."""
    bad, good = np.full((40, 50), value, np.float32), of_rank(6, (40, 50), 0)
    assert all(map(math.isnan, errors([(40, 50)], [[good], [bad]])))
    assert all(map(math.isnan, errors([(40, 50)], [[bad]])))
    for first in (bad, good):
        assert errors([(40, 50)], [[first], [bad], [good], [good]]) == errors([(40, 50)], [[good]] * 2)


def test_which_parameters_are_tried() -> None:
    shapes = [(600, 700), (20,), (700, 600), (3, 3, 64, 128), (10, 10), *[(512, 800)] * 8, (5000, 600)]
    dtypes = ["float32"] * len(shapes)
    dtypes[0] = "float64"
    preview = Preview(shapes, dtypes, {2}, seed=0, ranks=2)
    assert preview.parameters == (5, 8, 11), "large ones, spread over the model, neither float64 nor sparse"
    assert all(preview.elements(i) == SIDE * 800 for i in preview.parameters)
    long = Preview([(4, 10**7)], ["bfloat16"], (), seed=0, ranks=2)
    assert long.parameters == (0,) and long.elements(0) == 10**7, "a row at least, and hardly more"
    rows = (4 << 20) // 50257
    assert Preview([(4096, 50257)], ["float32"], (), seed=0, ranks=2).elements(0) == rows * 50257
    gradient = [np.random.default_rng(0).standard_normal(rows * 50257, np.float32)]
    wide = Preview([(4096, 50257)], ["float32"], (), seed=0, ranks=2)
    for _ in range(2):
        shown = wide.see(NumpyOps(), [parse("randomk:0.1")], [0], gradient)
    assert shown[0] == pytest.approx(math.sqrt(0.9), abs=0.03), "nothing but gradients is tried"
    assert not Preview([(20,), (2, 2)], ["float32"] * 2, (), seed=0, ranks=2).parameters
    assert len(Preview([(64, 64)] * 99, ["float32"] * 99, (), seed=0, ranks=2).parameters) == TENSORS
    nothing = Preview([], [], (), seed=0, ranks=2)
    assert all(map(math.isnan, nothing.see(NumpyOps(), [parse("int8")], [0], []).tolist()))


@pytest.mark.parametrize("negotiates", ORDERS, ids=["one order", "negotiates", "on a device"])
def test_at_a_level_that_holds_something_back_ranks_try_levels_on_their_own_gradients(
    negotiates: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_any_price(monkeypatch, start=2)
    shapes, ladder = [(40, 24), (40,), (24, 40)], ("none", "int8", "powersgd:2", "lowrank:2")
    gradients = np.random.default_rng(0).standard_normal((2, 8, 40 * 24 + 40 + 24 * 40)).astype(np.float32)

    def parts(gradient: np.ndarray) -> list[np.ndarray]:
        return [part.reshape(shape) for part, shape in zip(np.split(gradient, [960, 1000]), shapes, strict=True)]

    ranks = [[parts(gradient) for gradient in own] for own in gradients]

    def body(transport: Any) -> None:
        x = NumpyExchange(shapes, transport, ladder, auto=True, bucket_bytes=5000)
        for own in ranks[transport.rank]:
            x.reduce(own, 0.1)
            x.commit()
        check_preview(x.coordinator.log.records, ladder, shapes, *ranks)
        known = x.coordinator.auto.controller._known.errors
        assert transport.gather_objects(known.previews)[0] == known.previews, "bit for bit"

    run(2, body, negotiates=negotiates)


@pytest.mark.parametrize("start", [0, 2])
def test_levels_are_tried_on_gradients_of_the_unscaled_loss(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else halves would saturate at the loss scale that AMP begins with, which the training itself divides by."""
    at_any_price(monkeypatch, start=start)
    gradients = np.random.default_rng(0).standard_normal((2, 8, 40, 24)).astype(np.float32)
    shown = []

    def body(transport: Any, scale: float) -> None:
        x = NumpyExchange([(40, 24)], transport, ("none", "int8", "powersgd:2+fp16"), auto=True, dense_steps=10**6)
        x.get_loss_scale = lambda: scale
        for own in gradients[transport.rank]:
            x.reduce([own * np.float32(scale)], 0.1)
            x.commit()
        if not transport.rank:
            shown.append([each["errors"] for each in x.coordinator.log.records if each["kind"] == "preview"][0])

    for scale in (1.0, 2.0**20):
        run(2, lambda transport, scale=scale: body(transport, scale))
    assert shown[0] == shown[1] and 0.0 < shown[0]["powersgd:2+fp16"] < 1.0


def test_a_rank_without_gradients_of_its_own_keeps_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would show is not known, and so nothing is, for as long as that lasts."""
    at_any_price(monkeypatch, start=2)
    gradients = np.random.default_rng(0).standard_normal((2, 30, 40, 24)).astype(np.float32)
    gradients[1, :10] = 0.0

    def body(transport: Any) -> None:
        x = NumpyExchange([(40, 24)], transport, ("none", "int8", "lowrank:2"), auto=True)
        known = x.coordinator.auto.controller._known.errors
        for step, own in enumerate(gradients[transport.rank]):
            x.reduce([own], 0.1)
            x.commit()
            assert not (step < 10 and known.previews)
        assert transport.gather_objects(known.previews)[0] == known.previews and 1 in known.previews

    run(2, body)


@pytest.mark.parametrize("negotiates", ORDERS, ids=["one order", "negotiates", "on a device"])
def test_ranks_try_levels_beside_the_training_and_agree(
    negotiates: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the fourth and fifth step, once for each level; the training's means stay what they are."""
    at_any_price(monkeypatch)
    shapes, ladder = [(40, 24), (40,), (24, 40)], ("none", "int8", "powersgd:2", "lowrank:2")

    def gradients(step: int, rank: int) -> list[Any]:
        return [np.random.default_rng([step, rank]).standard_normal(shape).astype(np.float32) for shape in shapes]

    def body(transport: Any) -> None:
        x = NumpyExchange(shapes, transport, ladder, auto=True, dense_steps=10**6, bucket_bytes=5000)
        means = []
        for step in range(8):
            means.append([np.array(mean) for mean in x.reduce(gradients(step, transport.rank), 0.1)])
            x.commit()
            both = [gradients(step, rank) for rank in range(2)]
            for got, one, other in zip(means[-1], *both, strict=True):
                np.testing.assert_array_equal(got, (one + other) / 2)
        check_preview(x.coordinator.log.records, ladder, shapes, means)
        known = x.coordinator.auto.controller._known.errors
        assert sorted(known.previews) == [1, 2, 3] and not x.preview._learned
        assert transport.gather_objects(known.previews)[0] == known.previews, "bit for bit"

    run(2, body, negotiates=negotiates)


def test_a_preview_begins_anew_where_parameters_change_between_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has learned, and which parameters it looks at, are of those before."""
    at_any_price(monkeypatch)

    def body(transport: Any) -> None:
        x = NumpyExchange([(40, 24)], transport, ("none", "int8", "lowrank:2"), auto=True, dense_steps=10**6)
        while not (x.preview and x.preview._learned):
            x.reduce([np.random.default_rng(transport.rank).random((40, 24), np.float32)], 0.1)
            x.commit()
        before = x.preview
        x.know_gradients([0], [], [])
        for step in range(6):
            x.reduce([np.random.default_rng([step, transport.rank]).random((40, 24), np.float32)], 0.1)
            x.commit()
        assert x.preview is not before and x.coordinator.auto.controller._known.errors.previews.keys() == {1, 2}

    run(2, body)


def test_gradients_that_stay_zero_are_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    at_any_price(monkeypatch)
    sums: list[str] = []

    def body(transport: Any) -> None:
        begin = transport.start

        def start(array: Any, name: str, *rest: Any) -> Any:
            sums.append(name)
            return begin(array, name, *rest)

        transport.start = start
        x = NumpyExchange([(40, 24)], transport, ("none", "int8"), auto=True, dense_steps=10**6)
        for _ in range(20):
            x.reduce([np.zeros((40, 24), np.float32)], 0.1)
            x.commit()

    run(2, body)
    assert len([name for name in sums if name.endswith(".preview")]) == 2 * 2 * 2, "two steps a level, on two ranks"
