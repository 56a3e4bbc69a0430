"""From what the user asked for to what a run uses: ladders, the ranks' models, run logs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.adapters.numpy.backend import NumpyExchange
from hvdplus.adapters.transports.local import Local
from hvdplus.agree import (
    FLOATS,
    Compression,
    announce,
    announce_local,
    check_same_model,
    check_same_settings,
    check_types,
    choose_ladder,
    open_log,
)
from hvdplus.compression import Array, Chain, Compressor, Context, IntB, LowRank, Ops, Spec, TopK, known, parse
from hvdplus.compression.horovod_compressor import HorovodCompressor
from hvdplus.exchange.bucket import bytes_per_step, make_buckets
from hvdplus.exchange.plan import Ladder
from hvdplus.settings import Settings
from hvdplus.transport import World

EQUAL = World(Local(), {"a": 4}, "ring", 0, ())
UNLIKE = World(Local(), {"a": 2, "b": 2}, "ring", 0, ("CPU capability (AVX2, AVX512)", "torch (2.1, 2.2)"))
OPS = NumpyOps()


def choose(asked: Any, world: World = EQUAL, **settings: Any) -> tuple[Ladder, bool]:
    """The ladder for what a script passes and what the settings say."""
    return choose_ladder(asked, Settings(**settings), world, OPS)


def names_of(asked: Any, world: World = EQUAL, **settings: Any) -> tuple[tuple[str, ...], bool]:
    ladder, auto = choose(asked, world, **settings)
    return ladder.names, auto


class Halving:
    """A class of Horovod's ``Compressor`` kind, as users write them."""

    @staticmethod
    def compress(tensor: np.ndarray) -> tuple[np.ndarray, Any]:
        return tensor.astype(np.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: np.ndarray, ctx: Any) -> np.ndarray:
        return tensor.astype(ctx)


class Own(Compressor):
    """A compressor of the user's own."""

    name = "own"

    def __init__(self, uses_products: bool = False) -> None:
        self._uses_products = uses_products

    @property
    def uses_products(self) -> bool:
        return self._uses_products

    def init(self, ops: Ops, spec: Spec) -> Context:
        return Context(spec, 0, ())

    def encode(self, ops: Ops, ctx: Context, grad: Array, residual: Array | None = None) -> Array:
        return grad

    def decode(self, ops: Ops, ctx: Context, total: Array) -> Array:
        return total

    def payload_bytes(self, spec: Spec, side: int = 0) -> int:
        return 4 * spec.size


# -- one level ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("none", ("none",)),
        ("fp16", ("fp16",)),
        ("randomk:0.1", ("randomk:0.1",)),
        ("lowrank", ("lowrank:4",)),
        ("int4:stochastic", ("int4:stochastic",)),
        ("qsgd:8", ("qsgd:8",)),
        ("topk:0.05+int8", ("topk:0.05+int8",)),
        ("randomk:0.1+int8", ("randomk:0.1+int8",)),
        ("randomk:0.1+fp16", ("randomk:0.1+fp16",)),
        ("lowrank:2+fp16", ("lowrank:2+fp16",)),
        ("lowrank:2+int8", ("lowrank:2+int8",)),
    ],
)
def test_a_fixed_level_stands_alone(asked: str, names: tuple[str, ...]) -> None:
    """By name from the script or from the environment, or as an object."""
    assert names_of(asked) == (names, False)
    assert names_of("auto", compression=asked) == (names, False)
    assert names_of(parse(asked)) == (names, False)


def test_what_a_script_says_comes_before_the_environment() -> None:
    assert names_of("fp16", compression="topk:0.1") == (("fp16",), False)
    assert names_of(TopK(0.1), compression="fp16") == (("topk:0.1",), False)
    assert names_of(Halving, compression="fp16") == (("Halving",), False)


@pytest.mark.parametrize("compressor", [TopK(0.1), Chain(LowRank(2), IntB(8)), Chain(TopK(0.1, 64), IntB(8)), Own()])
def test_a_compressor_object_is_used_as_it_is(compressor: Compressor) -> None:
    ladder, auto = choose(compressor)
    assert (ladder.names, auto) == ((compressor.name,), False)
    assert ladder.compressors[-1] is compressor


# -- Horovod's classes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [Halving, Halving()])
def test_a_class_with_horovods_two_methods_runs_as_it_is(written: Any) -> None:
    """Or an instance of one, as long as it has a name."""
    if not isinstance(written, type):
        written.__name__ = "halves"
    ladder, auto = choose(written)
    (compressor,) = ladder.compressors
    assert not auto and isinstance(compressor, HorovodCompressor)
    assert ladder.names == (written.__name__,)
    spec = Spec(((16, 16),), tail=3)
    ctx = compressor.init(OPS, spec)
    payload = compressor.encode(OPS, ctx, np.arange(259, dtype=np.float32))
    assert payload.dtype == np.float16
    assert np.array_equal(compressor.decode(OPS, ctx, payload), np.arange(259, dtype=np.float32))
    assert bytes_per_step(make_buckets([(16, 16), (3,)], ["float32"] * 2, bucket_bytes=99999, ranks=2, seed=0),
                          compressor) == 2 * 259  # fmt: skip


def horovods(name: str) -> list[type]:
    """Classes of this name: as Horovod has them, with the two methods, and as a job without Horovod has them."""
    methods = {"compress": staticmethod(lambda tensor: (tensor, None)), "decompress": staticmethod(lambda t, ctx: t)}
    ours = {"NoneCompressor": Compression.none, "FP16Compressor": Compression.fp16}[name]
    assert ours.__name__ == name
    return [type(name, (), {"__module__": "horovod.torch.compression", **methods}), ours]


@pytest.mark.parametrize(("name", "level"), [("NoneCompressor", "none"), ("FP16Compressor", "fp16")])
def test_horovods_two_names_mean_ours_unless_the_environment_has_a_wish(name: str, level: str) -> None:
    """Scripts written for Horovod name one because they have to name something."""
    for written in horovods(name):
        assert names_of(written) == ((level,), False)
        assert choose(written)[0].compressors == (parse(level),), "ours, which knows how to send an overflow again"
        assert names_of(written, compression="topk:0.1") == (("topk:0.1",), False)
        assert names_of(written, compression="none") == (("none",), False)


def test_only_classes_are_known_by_horovods_names() -> None:
    """Not an object that calls itself so."""
    written = horovods("FP16Compressor")[0]()
    written.__name__ = "FP16Compressor"
    (compressor,) = choose(written, compression="topk:0.1")[0].compressors
    assert isinstance(compressor, HorovodCompressor)


def test_an_object_with_the_two_methods_is_called_after_its_class() -> None:
    """It need not have a name of its own."""
    assert names_of(type("Quarters", (Halving,), {})()) == (("Quarters",), False)


# -- auto --------------------------------------------------------------------------------------------------------------


def test_auto_has_the_ladder_of_the_settings() -> None:
    assert names_of("auto") == (Settings().ladder, True)
    assert names_of("auto", ladder=("none", "int8", "lowrank", "topk:0.1+int8")) == (
        ("none", "int8", "lowrank:4", "topk:0.1+int8"),
        True,
    )
    assert names_of("auto", ladder=("none",)) == (("none",), True)


@pytest.mark.parametrize("ladder", [("fp16", "none"), ("int8",)])
def test_a_ladder_that_does_not_begin_dense_is_refused(ladder: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=rf"ladder \(argument\) must begin with none.*Received: {','.join(ladder)}$"):
        choose_ladder("auto", Settings.load({"ladder": ladder}, {}), EQUAL, OPS)


def test_a_ladder_with_a_level_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^ladder \(default\): .*none, lowrank:4, lowrank:4"):
        choose("auto", ladder=("none", "lowrank", "lowrank:4"))


# -- worlds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["lowrank:4", LowRank(4), "lowrank:4+fp16", Own(uses_products=True)])
def test_ranks_that_differ_cannot_run_a_fixed_level_of_products(asked: str | Compressor) -> None:
    """The message says in what they differ and what would work."""
    name = asked if isinstance(asked, str) else asked.name
    with pytest.raises(ValueError) as refused:
        choose(asked, UNLIKE)
    message = str(refused.value)
    assert repr(name) in message and "fp16 or none" in message
    assert "CPU capability (AVX2, AVX512); torch (2.1, 2.2)" in message


@pytest.mark.parametrize("asked", ["none", "fp16", "int8", "qsgd:8", "topk:0.1+int8", Halving, IntB(8)])
def test_ranks_that_differ_run_all_other_levels(asked: Any) -> None:
    assert names_of(asked, UNLIKE) == names_of(asked, EQUAL)


def test_ranks_that_differ_leave_such_levels_out_of_the_ladder() -> None:
    ladder = ("none", "fp16", "lowrank:4", "topk:0.1", "lowrank:4+fp16", "int8")
    assert names_of("auto", UNLIKE, ladder=ladder) == (("none", "fp16", "topk:0.1", "int8"), True)
    assert names_of("auto", EQUAL, ladder=ladder) == (ladder, True)
    assert names_of("auto", UNLIKE, ladder=("none", "lowrank:4")) == (("none",), True)


class Four(Local):
    """A transport of four ranks, of which this is the first; nothing is ever sent."""

    size = 4


def test_a_level_that_four_ranks_leave_no_room_for_is_refused_when_the_exchange_is_made() -> None:
    """With the fewest bits that would do."""

    def exchange(level: str) -> NumpyExchange:
        return NumpyExchange([(32, 32)], Four(), ["none", level])

    with pytest.raises(ValueError, match="int2 leaves no level for a sum over 4 ranks.*4 bits are enough"):
        exchange("int2")
    with pytest.raises(ValueError, match=r"int3 leaves no level .*4 bits are enough"):
        exchange("topk:0.1+int3")
    assert exchange("int4").coordinator.payload_bytes[1] < exchange("int8").coordinator.payload_bytes[1]


# -- what is none ------------------------------------------------------------------------------------------------------


class HalfAnswer:
    """It can compress, and that is all."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None


@pytest.mark.parametrize("asked", [None, 16, object(), HalfAnswer, ["fp16"], ("none", "fp16"), Compression])
def test_what_is_no_compression_is_refused_with_what_would_be(asked: Any) -> None:
    """With the names that there are."""
    with pytest.raises(ValueError) as refused:
        choose(asked)
    message = str(refused.value)
    assert message.endswith(f"Received: {asked!r}")
    assert "'auto'" in message and all(name in message for name in known())
    assert "Compressor" in message and "compress and decompress" in message


def test_a_class_of_ours_instead_of_an_object_is_refused() -> None:
    with pytest.raises(ValueError, match=r"wants an object, such as TopK\(\)\. Received: <class .*TopK"):
        choose(TopK)


def test_a_scripts_own_class_is_not_taken_for_horovods_of_the_same_name() -> None:
    own = type("FP16Compressor", (), {"compress": staticmethod(lambda t: (t, None)), "decompress": lambda t, ctx: t})
    (compressor,) = choose(own)[0].compressors
    assert isinstance(compressor, HorovodCompressor)


@pytest.mark.parametrize(("name", "value"), [("compression", "lowrnk:4"), ("ladder", "none,fp17")])
def test_a_setting_is_named_with_its_place_where_it_is_wrong(name: str, value: str, tmp_path: Path) -> None:
    file = tmp_path / "hvdplus.yaml"
    file.write_text(f"{name}: {value}")
    variable = f"HVDPLUS_{name.upper()}"
    for settings, where in (
        (Settings.load({name: value}, {}), f"{name} (argument)"),
        (Settings.load(environ={variable: value}), f"{variable} (environment)"),
        (Settings.load(environ={"HVDPLUS_CONFIG": str(file)}), f"{name} (file {file})"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(where)}: .*(lowrnk|fp17)"):
            choose_ladder("auto", settings, EQUAL, OPS)
        if name == "compression":
            assert choose_ladder("fp16", settings, EQUAL, OPS)[0].names == ("fp16",), "nobody asked for it"


@pytest.mark.parametrize("asked", ["gzip", "Auto", "", "int8+topk:0.1", "topk:2"])
def test_an_unknown_level_is_refused_wherever_it_comes_from(asked: str) -> None:
    for said, settings in ((asked, {}), ("auto", {"compression": asked})):
        with pytest.raises(ValueError, match=re.escape(repr(asked))):
            choose(said, **settings)


# -- the ranks' models, the run log ------------------------------------------------------------------------------------


class Several(Local):
    """A transport that gathers what the test says."""

    def __init__(self, rank: int, *others: Any) -> None:
        self.rank, self.size, self.others = rank, len(others), others

    def gather_objects(self, value: Any, what: str = "") -> list[Any]:
        return [value if rank == self.rank else other for rank, other in enumerate(self.others)]


def test_ranks_with_equal_models_agree() -> None:
    mine = [("w", (2, 3)), ("b", (3,))]
    check_same_model(iter(mine), EQUAL._replace(transport=Several(1, mine, mine, mine)))


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        ([("w", (2, 3)), ("b", (4,))], r"\('b', \(3,\)\) against \('b', \(4,\)\)"),
        ([("w", (2, 3))], r"\('b', \(3,\)\) against None"),
        ([("b", (3,)), ("w", (2, 3))], r"\('w', \(2, 3\)\) against \('b', \(3,\)\)"),
    ],
)
def test_ranks_with_other_models_are_told_of_the_first_difference(theirs: list[Any], named: str) -> None:
    """The same on every rank."""
    mine = [("w", (2, 3)), ("b", (3,))]
    for rank, value in ((0, mine), (1, theirs)):
        with pytest.raises(ValueError, match=f"ranks 0 and 1: {named}"):
            check_same_model(value, EQUAL._replace(transport=Several(rank, mine, theirs)))


class Listener(Local):
    """A transport that keeps what it is given to gather."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def gather_objects(self, value: Any, what: str = "") -> list[Any]:
        self.heard.append(value)
        return [value]


def said(settings: Settings) -> Any:
    """What a rank tells the others of its settings."""
    transport = Listener()
    check_same_settings(settings, choose("auto")[0], EQUAL._replace(transport=transport), passes=1)
    (value,) = transport.heard
    return value


def test_ranks_with_equal_settings_agree_wherever_each_has_them_from() -> None:
    """Only rank 0 writes a run log, so the others need not know where."""
    first = said(Settings.load({"seed": 3}, {}))
    assert first == said(Settings.load(environ={"HVDPLUS_SEED": "3", "HVDPLUS_RUN_LOG": "x"})) and first["seed"] == 3


def test_settings_that_one_rank_alone_passes_are_an_error_on_every_rank() -> None:
    both = Settings.load({"dense_steps": 20}, {}), Settings.load({}, {})
    for rank, mine in enumerate(both):
        world = EQUAL._replace(transport=Several(rank, *map(said, both)))
        with pytest.raises(ValueError, match="Ranks 0 and 1 differ in dense_steps: 20 against 0. .*same arguments"):
            check_same_settings(mine, choose("auto")[0], world, passes=1)


@pytest.mark.parametrize(
    ("asked", "settings", "line"),
    [
        ("auto", {}, f"auto, ladder {' > '.join(Settings().ladder)}"),
        ("auto", {"ladder": ("none", "fp16", "lowrank:4")}, "auto, ladder none > fp16 > lowrank:4"),
        ("auto", {"compression": "lowrank:2"}, "lowrank:2"),
        ("fp16", {"compression": "lowrank:2"}, "fp16"),
        ("topk:0.1", {}, "topk:0.1"),
        (Halving, {}, "Halving"),
    ],
)
def test_rank_0_says_what_an_optimizer_runs_with(
    asked: Any, settings: dict[str, Any], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        announce(*choose(asked, **settings), EQUAL._replace(transport=Several(rank, 0, 0)))
    printed = capsys.readouterr()
    assert printed.err == f"hvdplus: compression {line}\n" and not printed.out


@pytest.mark.parametrize("source", ["arguments", "environment"])
def test_auto_that_was_asked_for_is_more_than_the_default(source: str) -> None:
    """Scripts that name Horovod's `Compression.none`, as its examples do, can be turned to `auto`, too."""
    asked = {"compression": "auto"}
    settings = Settings.load(asked, {}) if source == "arguments" else Settings.load({}, {"HVDPLUS_COMPRESSION": "auto"})
    for kind in horovods("NoneCompressor"):
        assert choose_ladder(kind, settings, EQUAL, OPS)[1]
        assert not choose_ladder(kind, Settings.load({}, {}), EQUAL, OPS)[1]


def test_types_that_are_not_exchanged_are_named() -> None:
    check_types(["a", "b", "c", "d"], FLOATS)
    with pytest.raises(
        ValueError, match=r"float16, bfloat16, float32, float64\. Received: b is int64, c is complex64\."
    ):
        check_types(["a", "b", "c"], ["float32", "int64", "complex64"])
    check_types(["c"], ["complex64"], (*FLOATS, "complex64"))


def test_only_rank_0_writes_a_log_and_every_optimizer_its_own(tmp_path: Path) -> None:
    settings = Settings(run_log=str(tmp_path / "run.jsonl"))
    for rank, instance, written in ((0, 0, "run.jsonl"), (0, 2, "run.jsonl.2"), (1, 0, None)):
        log = open_log(settings, EQUAL._replace(transport=Several(rank, 1, 2)), instance)
        assert log.path == (tmp_path / written if written else None)
        log.close()
    assert open_log(Settings(), EQUAL, 3).path is None


def test_local_steps_are_of_all_ranks() -> None:
    part = Local()
    part.part = (0, 2)
    with pytest.raises(ValueError, match="Local steps are of all ranks. Received: a process set or group"):
        announce_local(8, True, EQUAL._replace(transport=part))
