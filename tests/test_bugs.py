"""One test a past fault, with its story: what a user saw."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdplus.adapters.numpy.backend import NumpyExchange, Rows
from hvdplus.adapters.transports.in_process import run
from hvdplus.adapters.transports.local import Local
from hvdplus.exchange import coordinator as coordinators
from hvdplus.log.runlog import RunLog, read
from hvdplus.transport import World

ORDERS = pytest.mark.parametrize("negotiates", [False, True], ids=["one order", "negotiates"])
SHAPES = [(20, 30), (30,), (16, 16)]


def gradients(step: int, rank: int) -> list[Any]:
    rng = np.random.default_rng([step, rank])
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def take(x: NumpyExchange, steps: range, learning_rate: float = 0.1) -> None:
    for step in steps:
        x.reduce(gradients(step, x.transport.rank), learning_rate)
        x.commit()


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def open_files() -> int:
    """Of this process; 0 where the system does not tell."""
    folder = Path("/proc/self/fd")
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0


def test_optimizers_that_were_dropped_stayed_until_the_program_ended(tmp_path: Path, no_collector: None) -> None:
    """A search over learning rates made a thousand optimizers, and ran out of memory and open files: every coordinator
    had registered a function to run at exit, which held it, its buckets and its run log."""
    files, unfinished = open_files(), set(coordinators._open)
    gone = []
    for number in range(5):
        log = RunLog(tmp_path / f"run{number}.jsonl")
        x = NumpyExchange(SHAPES, Local(), ["none", "int8"], log=log)
        x.coordinator.describe_run(World(Local(), {"a": 1}, "ring", 0, ()), "numpy", 886, 3544)
        take(x, range(4))
        gone += [weakref.ref(x.coordinator), weakref.ref(log)]
        del x, log
    assert [each() for each in gone] == [None] * 10, "5 of 5 are gone at once"
    assert set(coordinators._open) == unfinished, "nothing is left to be done at exit"
    assert open_files() == files, "their files are closed"
    for number in range(5):
        first, *_, last = read(tmp_path / f"run{number}.jsonl")
        assert (first["kind"], last["kind"], last["steps"]) == ("run", "end", 4), "and complete all the same"


@ORDERS
def test_a_checkpoint_with_nan_in_its_residual_ruined_all_weights(negotiates: bool) -> None:
    """A job that had diverged was resumed from its last checkpoint, whose weights were fine: after one step all weights
    of all ranks were NaN, because the residual was taken as it was."""

    def body(transport: Any) -> None:
        x = NumpyExchange(SHAPES, transport, "lowrank:2")
        take(x, range(4))
        state = x.state()
        state["residuals"][2][3, 3] = np.nan
        fresh = NumpyExchange(SHAPES, transport, "lowrank:2")
        with pytest.raises(
            ValueError, match="residual of parameter 2 in the checkpoint holds values that are not finite"
        ):
            fresh.load(state)
        state["residuals"][2][3, 3] = 0.0
        fresh.load(state)
        means = fresh.reduce(gradients(4, transport.rank), 0.1)
        assert all(np.isfinite(mean).all() for mean in means)

    run(2, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("level", ["none", "int8"])
def test_ranks_with_other_learning_rates_trained_apart_in_silence(level: str, negotiates: bool) -> None:
    """A scheduler that halves the rate when the loss stalls saw each rank's own loss. The ranks ended with different
    models, exit code 0 and no message."""

    def body(transport: Any) -> None:
        x = NumpyExchange(SHAPES, transport, level)
        take(x, range(3))
        with pytest.raises(RuntimeError, match=r"learning rate differs between rank 0 and rank\(s\) 1,"):
            take(x, range(3, 5), 0.1 / (1 + transport.rank))

    run(2, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("level", ["none", "int8"])
def test_ranks_with_other_weights_trained_apart_in_silence(level: str, negotiates: bool) -> None:
    """A script forgot to broadcast its weights: gradients were averaged, models were not the same, and only rank 0's
    was saved."""

    def body(transport: Any) -> None:
        weights = [np.full(shape, 1.0 + (i == 1) * transport.rank, np.float32) for i, shape in enumerate(SHAPES)]
        x = NumpyExchange(SHAPES, transport, level, weights=weights)
        with pytest.raises(RuntimeError, match=r"rank\(s\) 1, 2 no longer equal .* parameter 1 is the first"):
            take(x, range(3))

    run(3, body, negotiates=negotiates)


@ORDERS
@pytest.mark.parametrize("level", ["none", "fp16", "int8"])
@pytest.mark.parametrize("begins", [0, 1, 3])
def test_a_gradient_that_turned_sparse_on_one_rank_came_back_in_two_forms(
    level: str, begins: int, negotiates: bool
) -> None:
    """Rank 1 alone came to an embedding's sparse branch. There its gradient was sparse, elsewhere dense; an optimizer
    that treats them differently (Adam against its sparse kind) moved the weights apart."""

    def body(transport: Any) -> None:
        x = NumpyExchange(SHAPES, transport, level)
        forms = []
        for step in range(6):
            grads = gradients(step, transport.rank)
            if transport.rank == 1 and step >= begins:
                grads[0] = Rows(np.array([2, 5]), grads[0][:2])
            means = x.reduce(grads, 0.1)
            x.commit()
            form = isinstance(means[0], Rows)
            assert transport.gather_objects(form) == [form] * 3, step
            forms.append(form)
            both = transport.gather_objects((grads[0], x.backend._flat(0)))
            if level == "none":
                mean = sum(flat.reshape(SHAPES[0]).astype(np.float64) for _, flat in both) / 3
                got = np.zeros(SHAPES[0])
                if form:
                    got[means[0].rows] = means[0].values
                else:
                    got[:] = means[0]
                np.testing.assert_allclose(got, mean, rtol=1e-5, atol=1e-6)
        # Where nothing else depends on it, ranks hear of it one step later.
        assert forms[:begins] == [False] * begins and all(forms[begins + 1 :])
        assert forms[begins] or (begins and level != "int8")

    run(3, body, negotiates=negotiates)
