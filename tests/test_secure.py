"""Secure aggregation: masks cancel in the sum, and nothing else that ranks send can be read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hvdplus.adapters.numpy.backend import NumpyExchange, Rows
from hvdplus.adapters.transports.in_process import run
from hvdplus.exchange import two_level
from hvdplus.exchange.secure import Masks
from hvdplus.transport import TransportError

pytest.importorskip("cryptography")

SHAPES = ((40, 30), (50, 20), (7,))
LEVELS = ("int8", "int4:stochastic", "signsgd", "topk:0.1+int8", "lowrank:2+int8", "powersgd:2+int8")
ORDERS = pytest.mark.parametrize("negotiates", [False, True], ids=["in_order", "any_order"])
WIDE = {"int32": np.int32, "int64": np.int64}


def exchange(transport: Any, level: Any = "int8", **options: Any) -> NumpyExchange:
    options.setdefault("secure_aggregation", True)
    return NumpyExchange(options.pop("shapes", SHAPES), transport, level, weights_check_steps=0, **options)


def gradients(step: int, rank: int) -> list[np.ndarray]:
    rng = np.random.default_rng((step, rank))
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def spied(transport: Any) -> list[tuple[str, np.ndarray]]:
    """What this rank gives to the network from now on."""
    seen: list[tuple[str, np.ndarray]] = []
    bare = transport.start

    def start(array: Any, name: str, scale: float = 1.0) -> Any:
        seen.append((name, np.array(array)))
        return bare(array, name, scale)

    transport.start = start
    return seen


@given(st.data(), st.sampled_from(list(WIDE)), st.integers(2, 5))
def test_masks_cancel_whatever_the_words(data: st.DataObject, dtype: str, ranks: int) -> None:
    length = data.draw(st.integers(0, 40))
    words = data.draw(arrays.arrays(WIDE[dtype], (ranks, length)))

    def body(transport: Any) -> None:
        masks = Masks(transport, "a test")
        for name in ("one", "one", "other"):
            mine = masks.masked(words[transport.rank], name)
            total = transport.wait(transport.start(mine, name))
            assert np.array_equal(masks.unmasked(total, name), words.sum(axis=0, dtype=dtype))

    run(ranks, body)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("level", LEVELS)
@ORDERS
def test_means_are_bit_for_bit_those_without_masks(level: str, ranks: int, negotiates: bool) -> None:
    def body(transport: Any) -> None:
        hidden, bare = exchange(transport, level), exchange(transport, level, secure_aggregation=False)
        for step in range(6):
            mine = gradients(step, transport.rank)
            order = [2, 0, 1] if negotiates else None
            for one, other in zip(hidden.reduce(mine, 0.1, order), bare.reduce(mine, 0.1, order), strict=True):
                assert np.array_equal(one, other)
            hidden.commit(), bare.commit()

    run(ranks, body, negotiates=negotiates)


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_but_noise_and_metadata_leaves_a_rank(level: str) -> None:
    """The same gradients twice, with other keys: what is sent has nothing in common. A bit is as often 1 as 0."""

    def job() -> list[list[tuple[str, np.ndarray]]]:
        def body(transport: Any) -> list[tuple[str, np.ndarray]]:
            seen, x = spied(transport), exchange(transport, level)
            for step in range(4):
                x.reduce(gradients(step, transport.rank), 0.1)
                x.commit()
            return seen

        return run(3, body)

    for one, other in zip(job(), job(), strict=True):
        assert [name for name, _ in one] == [name for name, _ in other]
        floats = {name for name, array in one if array.dtype.kind == "f"}
        assert floats <= {"numpy.metadata.0", "numpy.metadata.1"}
        payloads = [(array, twin) for (_, array), (_, twin) in zip(one, other, strict=True) if array.dtype.kind == "i"]
        assert len(payloads) >= 4 and {array.dtype.name for array, _ in payloads} <= set(WIDE)
        words, twins = (np.concatenate([np.frombuffer(array.tobytes(), np.uint8) for array in each])
                        for each in zip(*payloads, strict=True))  # fmt: skip
        bits = np.unpackbits(words)
        assert abs(bits.mean() - 0.5) < 5 * 0.5 / np.sqrt(len(bits))
        alike = (bits == np.unpackbits(twins)).mean()
        assert abs(alike - 0.5) < 5 * 0.5 / np.sqrt(len(bits))


def test_metadata_tell_nothing_of_gradients() -> None:
    """They are the same for other gradients, but for times."""

    def job(scale: float) -> list[np.ndarray]:
        def body(transport: Any) -> list[np.ndarray]:
            seen, x = spied(transport), exchange(transport)
            for step in range(11):
                x.reduce([scale * gradient for gradient in gradients(step, transport.rank)], 0.1)
                x.commit()
            return [array for name, array in seen if "metadata" in name]

        return run(3, body)[0]

    from hvdplus.exchange.metadata import Slot, Sums
    from hvdplus.exchange.sketch import CELLS

    timed = [i for i, name in enumerate(Sums._fields) if name == "step"]
    slots = len(Sums._fields) + 2 * CELLS
    public = [Slot._fields.index("contexts")]  # of what all ranks know
    for small, large in zip(job(1.0), job(1e6), strict=True):
        different = np.flatnonzero(small != large)
        for at in different:
            field = (at - slots) % len(Slot._fields)
            times = ("codec", "exposed_comm", "comm", "input_wait", "probe")
            assert at in timed or (at >= slots and (Slot._fields[field] in times or field in public)), at


def test_no_mask_serves_twice() -> None:
    def body(transport: Any) -> bool:
        masks, zeros = Masks(transport, "a test"), np.zeros(4, np.int32)
        sent = [masks.masked(zeros, name).tobytes() for name in ("a", "a", "b", "b")]
        again = Masks(transport, "a test").masked(zeros, "a").tobytes()
        return len({*sent, again}) == 5

    assert run(2, body) == [True, True]


def test_a_rank_that_repeats_anothers_key_is_refused() -> None:
    """It could have that rank's mask cancel its own in what a third one sends."""

    def body(transport: Any) -> None:
        gather = transport.gather_objects

        def repeating(value: Any, what: str = "objects") -> list[Any]:
            told = gather(value, what)
            return [told[0], told[1], told[0]]

        transport.gather_objects = repeating
        with pytest.raises(TransportError, match="Two ranks give the same key"):
            Masks(transport, "a test")

    run(3, body)


def test_masks_that_do_not_cancel_are_an_error_on_every_rank() -> None:
    def body(transport: Any) -> None:
        masks = Masks(transport, "a test")
        if transport.rank == 1:
            masks.masked(np.zeros(3, np.int32), "sum")
        total = transport.wait(transport.start(masks.masked(np.zeros(3, np.int32), "sum"), "sum"))
        with pytest.raises(TransportError, match="have not cancelled in the sum 'sum': -?\\d+ instead of 2"):
            masks.unmasked(total, "sum")

    run(2, body)


@pytest.mark.parametrize(
    ("level", "options", "said"),
    [
        ("none", {}, "compression=none"),
        ("lowrank:4+fp16", {}, "compression=lowrank:4\\+fp16"),
        ("qsgd", {}, "level of integers that keeps a residual, .*compression=qsgd"),
        (["none", "int8"], {"auto": True}, "compression=auto"),
        ("int8", {"dtypes": ["float32", "float64", "float32"]}, "gradients of float64. Use float32"),
    ],
)
def test_what_cannot_be_masked_is_an_error_on_every_rank(level: Any, options: dict[str, Any], said: str) -> None:
    def body(transport: Any) -> None:
        with pytest.raises(ValueError, match=said):
            exchange(transport, level, **options)

    run(2, body)


@pytest.mark.parametrize("wanted", ["auto", "on"])
def test_ranks_of_a_host_are_not_summed_beforehand(wanted: str) -> None:
    def body(transport: Any) -> None:
        transport.two_level = two_level.split(transport, ["a", "a", "b", "b"], "on")
        if wanted == "auto":
            assert exchange(transport).two_level is None
        else:
            with pytest.raises(ValueError, match="two_level=on; use off"):
                exchange(transport, two_level=wanted)

    run(4, body)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    def body(transport: Any) -> None:
        with pytest.raises(ValueError, match="pip install 'hvdplus\\[secure\\]'"):
            exchange(transport)

    run(2, body)


def test_what_would_show_a_ranks_gradients_is_refused() -> None:
    """A float that some later code sends, such as residuals for a checkpoint."""

    def body(transport: Any) -> None:
        x = exchange(transport)
        x.reduce(gradients(0, transport.rank), 0.1)
        x.commit()
        with pytest.raises(ValueError, match="would show what one rank sends: 'numpy.mean.0' of float32"):
            x.consolidate()

    run(2, body)


def test_values_far_beyond_the_scale_stay_in_the_residual() -> None:
    """Where other ranks would send the rest in full width."""

    def body(transport: Any) -> None:
        x, sent, given = exchange(transport), np.zeros(SHAPES[0]), np.zeros(SHAPES[0])
        for step in range(40):
            mine = gradients(step, transport.rank)
            mine[0] *= np.float32(1e4 if step == 5 and transport.rank == 1 else 1.0)
            everyone = transport.gather_objects(mine[0].astype(np.float64))
            given += sum(everyone) / transport.size
            sent += x.reduce(mine, 0.1)[0]
            x.commit()
        left = transport.gather_objects(
            [state.residual[state.places[0][0]] for state in x.states if 0 in state.places][0].reshape(SHAPES[0])
        )
        held = np.mean(left, axis=0)
        assert np.allclose(sent + held, given, atol=1e-2 * np.abs(given).max())
        assert np.linalg.norm(held) < 0.1 * np.linalg.norm(given), "and what was held back has arrived by now"

    run(2, body)


def test_rows_of_tables_travel_masked() -> None:
    def body(transport: Any) -> None:
        seen = spied(transport)
        x = exchange(transport, shapes=((100, 8),))
        for step in range(4):
            rng = np.random.default_rng((step, transport.rank))
            rows = np.sort(rng.choice(100, 5, replace=False))
            x.reduce([Rows(rows, rng.standard_normal((5, 8)).astype(np.float32))], 0.1)
            x.commit()
        assert not [name for name, _ in seen if "rows" in name]

    run(2, body)


def test_two_ranks_are_told_what_it_hides(capsys: pytest.CaptureFixture[str]) -> None:
    run(2, lambda transport: exchange(transport) and None)
    assert capsys.readouterr().err.count("hides gradients from the network only") == 1
    run(3, lambda transport: exchange(transport) and None)
    assert "network only" not in capsys.readouterr().err


def test_one_rank_has_nothing_to_mask() -> None:
    def body(transport: Any) -> None:
        x = exchange(transport)
        assert x.transport is transport
        x.reduce(gradients(0, 0), 0.1)

    run(1, body)
