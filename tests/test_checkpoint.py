"""Checkpoints: what a rank may take over, what is damaged, and files that hold exactly what was put in."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frameworks import examples
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.adapters.numpy.backend import NumpyExchange, Rows
from hvdplus.adapters.transports.in_process import run
from hvdplus.adapters.transports.local import Local
from hvdplus.exchange import checkpoint
from hvdplus.transport import Transport

plain = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5)
arrays = st.lists(st.integers(-100, 100), max_size=4).map(lambda values: np.array(values, np.int32))
values = st.recursive(
    plain | arrays,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers(0, 9) | st.text(max_size=3), inner),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@given(st.dictionaries(st.text(max_size=4), values))
@examples(100)
def test_files_hold_what_was_put_in(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    checkpoint.write(state, folder)
    assert same(state, checkpoint.read(folder / checkpoint.FILE))


def test_what_is_not_a_number_stays_so(tmp_path: Path) -> None:
    checkpoint.write({"error": math.nan, "limit": math.inf}, tmp_path)
    found = checkpoint.read(tmp_path / checkpoint.FILE)
    assert math.isnan(found["error"]) and found["limit"] == math.inf


def test_reading_a_file_executes_nothing(tmp_path: Path) -> None:
    np.savez(tmp_path / checkpoint.FILE, state=np.array([print], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        checkpoint.read(tmp_path / checkpoint.FILE)


class At(Local):
    """A rank among several, as far as anybody asks here."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


def state(rank: Any, ranks: int) -> dict[str, Any]:
    return {"format": checkpoint.FORMAT, "rank": rank, "ranks": ranks, "shapes": [[2, 3]], "residuals": {0: 1.0}}


@pytest.mark.parametrize(
    ("rank", "ranks", "average", "expected"),
    [
        (1, 4, True, checkpoint.Ownership(True, 1.0)),  # this rank's own file
        (0, 4, True, checkpoint.Ownership(False, 1.0)),  # another's
        (None, 4, True, checkpoint.Ownership(True, 1.0)),  # consolidated
        (None, 2, True, checkpoint.Ownership(True, 1.0)),  # ... on fewer ranks: the mean stays the mean
        (None, 2, False, checkpoint.Ownership(True, 0.5)),  # ... and the sum the sum
        (1, 2, True, checkpoint.Ownership(True, 2.0)),  # of two, one of which came along twice
        (1, 2, False, checkpoint.Ownership(True, 1.0)),
        (1, 8, True, checkpoint.Ownership(True, 0.5)),
        (0, 1, True, checkpoint.Ownership(False, 4.0)),  # rank 0 flushes it, and nobody else
        (checkpoint.KEEP_LOCAL, 2, False, checkpoint.Ownership(True, 1.0)),  # stays where it is
        (checkpoint.KEEP_LOCAL, 2, True, checkpoint.Ownership(True, 2.0)),
        (checkpoint.FROM_OTHER, 4, False, checkpoint.Ownership(False, 1.0)),
    ],
)
def test_what_a_rank_may_take_over(rank: Any, ranks: int, average: bool, expected: checkpoint.Ownership) -> None:
    here: Transport = At(1, 4)
    assert checkpoint.claim(state(rank, ranks), here, average=average) == expected


@pytest.mark.parametrize(
    ("here", "size", "rank", "ranks", "lost"),
    [
        (1, 4, 0, 4, "1"),  # everybody loads one rank's
        (1, 4, 1, 4, ""),
        (1, 4, 0, 2, "1"),
        (3, 4, 0, 2, ""),  # there was no rank 3
        (1, 2, 1, 4, ""),  # rank 0 says it
        (0, 2, 0, 4, "2, 3"),
        (0, 2, 1, 4, "0, 2, 3"),
        (0, 2, None, 4, ""),
        (0, 2, checkpoint.KEEP_LOCAL, 4, ""),
        (0, 2, checkpoint.FROM_OTHER, 4, ""),
    ],
)
def test_what_is_lost_is_said(
    here: int, size: int, rank: Any, ranks: int, lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.claim(state(rank, ranks), At(here, size), average=True)
    said = capsys.readouterr().err
    assert (f"residuals of rank(s) {lost} are lost" in said) if lost else not said
    checkpoint.claim({**state(rank, ranks), "residuals": {}}, At(here, size), average=True)
    assert not capsys.readouterr().err


def test_ranks_that_differ_are_named() -> None:
    told = [checkpoint.digest(1, None, arrays=[np.arange(3)]) for _ in range(3)]
    checkpoint.check_same(told)
    with pytest.raises(RuntimeError, match="Ranks 0 and 2 would resume from different states"):
        checkpoint.check_same([*told[:2], checkpoint.digest(1, None, arrays=[np.arange(3) + 1])])


# -- damage ------------------------------------------------------------------------------------------------------------

SHAPES = [(40, 24), (40,), (300, 4), (24, 30)]
PARAMETERS = len(SHAPES)
LEVELS = ("none", "int8", "lowrank:2")
Edit = Callable[[dict[str, Any]], Any]


def exchange(transport: Any, level: Any = LEVELS, **options: Any) -> NumpyExchange:
    """It ends at lowrank:2, after two dense steps; parameter 2 has sparse gradients."""
    return NumpyExchange(SHAPES, transport, level, bucket_bytes=3000, **options)


def train(x: NumpyExchange, steps: range) -> list[Any]:
    """The means of some steps."""
    means = []
    for step in steps:
        rng = np.random.default_rng([step, x.transport.rank])
        grads: list[Any] = [rng.standard_normal(shape, np.float32) for shape in SHAPES]
        grads[2] = Rows(np.array([step, 7]), grads[2][:2])
        means.append(x.reduce(grads, 0.1))
        x.commit()
    return means


def equal(one: Any, other: Any) -> bool:
    """Of means, bit by bit."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    return one is other if one is None else all(map(equal, one, other))


def through_a_file(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    checkpoint.write(state, folder)
    return checkpoint.read(folder / checkpoint.FILE)


def put(path: str, value: Any) -> Edit:
    """Set what stands at a path of keys."""

    def edit(state: dict[str, Any]) -> None:
        *path_to, last = [int(key) if key.lstrip("-").isdigit() else key for key in path.split("/")]
        for key in path_to:
            state = state[key]
        state[last] = value  # type: ignore[index]

    return edit


def without(path: str) -> Edit:
    """Remove what stands at a path of keys."""

    def edit(state: dict[str, Any]) -> None:
        *path_to, last = path.split("/")
        for key in path_to:
            state = state[int(key)] if isinstance(state, list) else state[key]
        del state[last]

    return edit


def spoil(number: int, value: float) -> Edit:
    """One value of a residual."""

    def edit(state: dict[str, Any]) -> None:
        state["residuals"][number].reshape(-1)[-1] = value

    return edit


def context(change: Callable[[np.ndarray], Any]) -> Edit:
    """The first array of the contexts of lowrank:2 in bucket 0."""

    def edit(state: dict[str, Any]) -> None:
        arrays = state["contexts"][0]["levels"]["lowrank:2"]
        arrays[0] = change(arrays[0])

    return edit


def not_finite(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.reshape(-1)[0] = np.inf
    return array


DAMAGE: dict[str, tuple[Edit, str]] = {
    "format": (put("format", 1), "of format 10. Received: 1"),
    "no format": (without("format"), "of format 10. Received: None"),
    **{f"no {name}": (without(name), f"the state has no {name}") for name in checkpoint.FIELDS},
    **{
        f"{name} is text": (put(name, "a lot"), "damaged|another model")
        for name in checkpoint.FIELDS
        if name not in ("framework", "rank")
    },
    **{f"{name} is a number": (put(name, -7.5), "damaged|another model") for name in checkpoint.FIELDS},
    "framework": (put("framework", None), "framework has to be a name"),
    "ranks 0": (put("ranks", 0), "ranks has to be a number of at least 1"),
    "ranks true": (put("ranks", True), "ranks has to be"),
    "ranks negative": (put("ranks", -2), "ranks has to be"),
    "rank negative": (put("rank", -1), "rank has to be a number of at least 0"),
    "rank text": (put("rank", "first"), "rank has to be a number of at least 0, or nothing. Received: 'first'"),
    "another model": (put("shapes", [[7]]), "another model: it has 1 parameters and this optimizer 4"),
    "other shape": (put("shapes/3", [24, 31]), "the first that differs is number 3"),
    "shapes negative": (put("shapes/0", [-40, 24]), "shapes has to be"),
    "order short": (put("order", [3, 2, 1]), "order has to be every parameter below 4 once"),
    "order twice": (put("order", [3, 2, 1, 1]), "order has to be"),
    "order phantom": (put("order", [4, 3, 2, 1]), "order has to be"),
    "order floats": (put("order", [3.0, 2.0, 1.0, 0.0]), "order has to be"),
    "order nothing": (put("order", None), "sparse and tables has to be nothing where order is"),
    "sparse phantom": (put("sparse", [2, 9]), "sparse has to be"),
    "sparse nothing": (put("sparse", None), "sparse has to be"),
    "table not sparse": (put("tables", [0]), "tables has to be"),
    "table phantom": (put("tables", [2, 5]), "tables has to be"),
    "not_taken": (put("not_taken", 2), "not_taken has to be true or false"),
    "residual NaN": (spoil(0, np.nan), "residual of parameter 0 in the checkpoint holds values that are not finite"),
    "residual inf": (spoil(3, -np.inf), "residual of parameter 3 .* not finite"),
    "residual phantom": (put("residuals", {4: np.zeros(3, np.float32)}), "parameter has to be below 4. Received: 4"),
    "residual negative": (put("residuals", {-1: np.zeros(3, np.float32)}), "parameter has to be below 4"),
    "residual named": (put("residuals", {"weight": np.zeros(3, np.float32)}), "parameter has to be below 4"),
    "residual short": (put("residuals/0", np.zeros(7, np.float32)), "parameter 0 has to be an array of shape .40, 24."),
    "residual text": (put("residuals/0", "x"), "parameter 0 has to be an array"),
    "residual of text": (put("residuals/0", np.full((40, 24), "x")), "parameter 0 .* not finite"),
    "residual list": (put("residuals/1", [0.0] * 40), "parameter 1 has to be an array"),
    "context NaN": (context(lambda array: array * np.float32(np.nan)), "context of lowrank:2 has to be"),
    "context inf": (context(not_finite), "context of lowrank:2 has to be"),
    "context short": (context(lambda array: array[:-1]), "context of lowrank:2 has to be"),
    "context empty": (context(lambda array: array[:0]), "context of lowrank:2 has to be"),
    "context wide": (context(lambda array: array.astype(np.float64)), "context of lowrank:2 has to be"),
    "context text": (context(lambda array: "base"), "context of lowrank:2 has to be"),
    "context gone": (put("contexts/0/levels/lowrank:2", []), "context of lowrank:2 has to be"),
    "context nothing": (put("contexts/0/levels/lowrank:2", None), "context of lowrank:2 has to be"),
    "context of a level": (put("contexts/0/levels/topk:0.1", []), "context's level has to be one of none, int8"),
    "contexts nothing": (put("contexts/0", None), "contexts has to be a dictionary"),
    "contexts of phantoms": (put("contexts/0/parameters", [0, 17]), "parameters has to be different numbers below 4"),
    "contexts of nobody": (without("contexts/0/parameters"), "a bucket's contexts has no parameters"),
    "contexts list": (put("contexts/0/levels", []), "contexts has to be a dictionary"),
    **{
        f"coordinator without {name}": (without(f"coordinator/{name}"), f"its coordinator has no {name}")
        for name in ("levels", "schedule", "steps", "plan", "controller")
    },
    "levels a number": (put("coordinator/levels", 3), "levels has to be names"),
    "steps negative": (put("coordinator/steps", -3), "number of steps has to be a whole number of at least 0"),
    "steps text": (put("coordinator/steps", "many"), "number of steps has to be"),
    "steps half": (put("coordinator/steps", 2.5), "number of steps has to be"),
    "level beyond": (put("coordinator/schedule/level", 3), "level has to be below 3"),
    "level negative": (put("coordinator/schedule/level", -1), "level has to be below 3"),
    "sides": (put("coordinator/schedule/sides", [0, 0, 2]), "sides has to be one a level"),
    "sides short": (put("coordinator/schedule/sides", [0, 0]), "sides has to be one a level"),
    "flush_left negative": (put("coordinator/schedule/flush_left", -1), "flush_left has to be a number of steps"),
    "asking_left NaN": (put("coordinator/schedule/asking_left", math.nan), "asking_left has to be a number"),
    "no schedule": (put("coordinator/schedule", None), "schedule has to be a dictionary"),
    "plan short": (put("coordinator/plan", [2, 0]), "its plan has to be"),
    "plan long": (put("coordinator/plan", [2, 0, 1.0, False, 0, 0, 0]), "its plan has to be"),
    "plan level": (put("coordinator/plan/0", 3), "its plan has to be"),
    "plan level half": (put("coordinator/plan/0", 2.0), "its plan has to be"),
    "plan side": (put("coordinator/plan/1", 2), "its plan has to be"),
    "plan fraction NaN": (put("coordinator/plan", [0, 0, math.nan, False, 0, 0]), "its plan has to be"),
    "plan fraction large": (put("coordinator/plan", [0, 0, 2.0, False, 0, 0]), "its plan has to be"),
    "plan fraction small": (put("coordinator/plan/2", 0.5), "its plan has to be"),
    "plan asks": (put("coordinator/plan/3", 1), "its plan has to be"),
    "plan norms": (put("coordinator/plan/4", "yes"), "its plan has to be"),
    "plan probe": (put("coordinator/plan/5", 1 << 50), "its plan has to be"),
}  # fmt: skip


def attempt(transport: Any, edit: Edit, message: str, folder: Path, level: Any = LEVELS, **options: Any) -> None:
    """A damaged state is refused, and an exchange in the middle of its training goes on as if nothing had been."""
    x, twin = exchange(transport, level, **options), exchange(transport, level, **options)
    train(x, range(5)), train(twin, range(5))
    mine = folder / str(transport.rank)
    mine.mkdir()
    before = through_a_file(x.state(), mine)
    state = through_a_file(x.state(), mine)
    edit(state)
    with pytest.raises(ValueError, match=message) as raised:
        x.load(state)
    assert len(str(raised.value)) < 1000
    assert same(through_a_file(x.state(), mine), before), "nothing has changed"
    for one, other in zip(train(x, range(5, 9)), train(twin, range(5, 9)), strict=True):
        assert equal(one, other)
    x.load(before)  # the state itself is as good as ever
    train(x, range(5, 9))
    fresh = exchange(transport, level, **options)
    with pytest.raises(ValueError, match=message):
        fresh.load(state)
    train(fresh, range(4))


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_state_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    edit, message = DAMAGE[name]
    run(1, lambda transport: attempt(transport, edit, message, tmp_path))


@pytest.mark.parametrize("name", ["no order", "residual NaN", "context wide", "plan level", "steps negative"])
def test_ranks_train_on_together_after_a_damaged_state(name: str, tmp_path: Path) -> None:
    edit, message = DAMAGE[name]
    run(2, lambda transport: attempt(transport, edit, message, tmp_path))


CONTROLLER_DAMAGE: dict[str, tuple[Edit, str]] = {
    "nothing at all": (put("coordinator/controller", {}), "its controller has no mode"),
    "text": (put("coordinator/controller", "clever"), "its controller has to be a dictionary"),
    "mode": (put("coordinator/controller/mode", "asleep"), "its controller: mode does not fit"),
    "level": (put("coordinator/controller/level", 3), "levels beyond none, int8, lowrank:2"),
    "level text": (put("coordinator/controller/level", "2"), "level does not fit: int is wanted"),
    "link": (put("coordinator/controller/_known/link", [1.0]), "its controller: link does not fit"),
    "link text": (put("coordinator/controller/_known/link", list("abcde")), "link does not fit: float is wanted"),
    "link negative": (put("coordinator/controller/_known/link", [-1.0, 0.0, 1.0, 0.0, 1.0]), "less than no time"),
    "levels": (put("coordinator/controller/_known/levels", {"5": [1, 1, 1, 1, 1, 1, [0, 1], 1, 0]}), "levels beyond"),
    "levels empty": (put("coordinator/controller/_known/levels", {"0": []}), "levels does not fit"),
    "no time": (
        put("coordinator/controller/_known/levels", {"0": [0, 1, 1, 1, 1, 1, [0, 1], 1, 0]}),
        "less than no time",
    ),
    "doubt": (
        put("coordinator/controller/_known/levels", {"0": [1, 1, 1, 1, 1, 1, [0, 1], 1, -1]}),
        "less than no time",
    ),
    "variance": (put("coordinator/controller/_known/pace", [0.0, -1.0]), "less than no time"),
    "errors": (
        put("coordinator/controller/_known/errors/readings", {"1": [math.nan]}),
        "errors does not fit: readings does not fit: float is wanted",
    ),
    "error negative": (put("coordinator/controller/_known/errors/readings", {"1": [0.5, -0.5]}), "less than no time"),
    "errors empty": (put("coordinator/controller/_known/errors/readings", {"1": []}), "less than no time"),
    "preview negative": (put("coordinator/controller/_known/errors/previews", {"1": -0.5}), "less than no time"),
    "preview of nothing": (put("coordinator/controller/_known/errors/previews", {"1": 0.0}), "less than no time"),
    "moved": (put("coordinator/controller/_known/errors/moved", 50.0), "less than no time"),
    "knows nothing": (put("coordinator/controller/_known", {}), "is missing"),
    "window": (put("coordinator/controller/_window", [[1.0]]), "_window does not fit"),
    "steps": (put("coordinator/controller/_age", -1), "_age does not fit"),
    "norms": (put("coordinator/controller/_phases/_norms", [None]), "_phases does not fit: _norms does not fit"),
    "turns": (put("coordinator/controller/_turns", [[0]]), "_turns does not fit"),
    "refused": (put("coordinator/controller/refused", {"x": "y"}), "refused does not fit"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTROLLER_DAMAGE)
def test_a_damaged_controller_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    edit, message = CONTROLLER_DAMAGE[name]

    def body(transport: Any) -> None:
        x = exchange(transport, auto=True, dense_steps=2)
        train(x, range(6))
        mine = tmp_path / str(transport.rank)
        mine.mkdir()
        before, state = (through_a_file(x.state(), mine) for _ in range(2))
        edit(state)
        with pytest.raises(ValueError, match=message):
            x.load(state)
        assert same(through_a_file(x.state(), mine), before)
        x.load(before)
        train(x, range(6, 9))

    run(2, body)


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 9, 15, 30, 60])
def test_what_auto_remembers_at_any_time_is_not_taken_for_damage(steps: int, tmp_path: Path) -> None:
    def body(transport: Any) -> None:
        x = exchange(transport, auto=True, dense_steps=2, drain_steps=3)
        train(x, range(steps))
        mine = tmp_path / str(transport.rank)
        mine.mkdir()
        state = through_a_file(x.state(), mine)
        again = exchange(transport, auto=True, dense_steps=2, drain_steps=3)
        again.load(state)
        assert again.coordinator.plan == x.coordinator.plan and again.coordinator.steps == x.coordinator.steps
        assert equal(train(again, range(steps, steps + 1)), train(x, range(steps, steps + 1)))

    run(2, body)


@pytest.mark.parametrize("bucket_bytes", [3000, 9000])
def test_where_contexts_do_not_fit_the_level_asks_again(bucket_bytes: int) -> None:
    """Buckets that are cut in another way have no part in what was learned."""

    def body(transport: Any) -> None:
        x = exchange(transport, "int8")
        train(x, range(4))
        state = x.state()
        other = NumpyExchange(SHAPES, transport, "int8", bucket_bytes=bucket_bytes)
        other.load(state)
        assert other.plan.asks == (bucket_bytes != 3000)
        for mean in train(other, range(4, 5))[0]:
            assert isinstance(mean, Rows) or np.any(mean)

    run(2, body)


@pytest.mark.parametrize("value", [None, "a state", 3, []])
def test_what_is_no_state_at_all_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="This hvdplus reads states of format 10. Received: "):
        exchange(Local()).load(value)


def test_a_state_of_very_many_ranks_is_told_of_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Not in one that lists them all."""
    checkpoint.claim(state(0, 10**15), At(0, 2), average=True)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "2, 3, 4, 5, 6, 7, 8, 9 ..." in said and len(said) < 500


@pytest.mark.parametrize(
    "content",
    [b"", b"PK", b"not a file of arrays", b"\x93NUMPY\x01\x00v\x00{'descr': '<f4'"],
    ids=("empty", "cut short", "text", "array"),
)
def test_other_files_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"cannot be read|pickle"):
        checkpoint.read(io.BytesIO(content))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """Cut short, with a byte turned, without the text that says what is what, or with text that is too deep."""
    checkpoint.write(state(0, 1) | {"residuals": {0: np.arange(1000.0)}}, tmp_path)
    whole = (tmp_path / checkpoint.FILE).read_bytes()
    files = [whole[: len(whole) // 2], whole[: len(whole) // 4] + b"x" + whole[len(whole) // 4 + 1 :]]
    for arrays in (
        {"other": np.zeros(3)},
        {"state": np.array("[" * 100_000)},
        {"state": np.array('{"array": "array9"}')},
        {"state": np.array('{"pairs": 3}')},
        {"state": np.array("no JSON")},
    ):
        file = io.BytesIO()
        np.savez(file, **arrays)
        files.append(file.getvalue())
    for file in files:
        with pytest.raises(ValueError, match="cannot be read"):
            checkpoint.read(io.BytesIO(file))


def test_ranks_that_have_held_back_nothing_yet_take_part() -> None:
    """There a residual is None: whether there is one has to be the same on all ranks."""

    def body(transport: Any) -> None:
        x = exchange(transport)
        train(x, range(5))
        state = x.state()
        if transport.rank:
            state["residuals"] = dict.fromkeys(state["residuals"])
        fresh = exchange(transport)
        fresh.load(state)
        assert any(map(np.any, fresh.state()["residuals"].values())) == (transport.rank == 0)
        train(fresh, range(5, 7))

    run(2, body)
