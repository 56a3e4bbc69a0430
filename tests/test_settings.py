"""Settings: environment over defaults, and errors that say which variable, which value and what would be right."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from hvdplus.settings import PREFIX, Settings, describe, unknown

VARIABLES = {entry.name: PREFIX + entry.name.upper() for entry in dataclasses.fields(Settings)}


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Settings.from_environment({}) == Settings()
    assert Settings.from_environment({"PATH": "/bin", "HOROVOD_SIZE": "2"}) == Settings()
    assert Settings().compression == "auto" and Settings().ladder[0] == "none"
    assert Settings().warm_steps == 2, "what the README says"


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("HVDPLUS_COMPRESSION", "lowrank:2", "compression", "lowrank:2"),
        ("HVDPLUS_TRANSPORT", "mpi4py", "transport", "mpi4py"),
        ("HVDPLUS_LADDER", "none,lowrank:1", "ladder", ("none", "lowrank:1")),
        ("HVDPLUS_LADDER", " none , fp16 ", "ladder", ("none", "fp16")),
        ("HVDPLUS_DENSE_STEPS", "1", "dense_steps", 1),
        ("HVDPLUS_WARM_STEPS", "5", "warm_steps", 5),
        ("HVDPLUS_DRAIN_STEPS", "25", "drain_steps", 25),
        ("HVDPLUS_BUCKET_BYTES", "4", "bucket_bytes", 4),
        ("HVDPLUS_WINDOW_STEPS", "3", "window_steps", 3),
        ("HVDPLUS_RUN_LOG", "runs/a b.jsonl", "run_log", "runs/a b.jsonl"),
        ("HVDPLUS_SEED", "0", "seed", 0),
        ("HVDPLUS_SEED", "12345678901", "seed", 12345678901),
    ],
)
def test_a_variable_sets_its_setting_and_no_other(variable: str, text: str, name: str, value: object) -> None:
    assert Settings.from_environment({variable: text}) == dataclasses.replace(Settings(), **{name: value})


@pytest.mark.parametrize(
    ("variable", "text", "wanted"),
    [
        ("HVDPLUS_TRANSPORT", "tcp", "one of auto, horovod, mpi4py, local"),
        ("HVDPLUS_TRANSPORT", "Horovod", "one of auto, horovod, mpi4py, local"),
        ("HVDPLUS_LADDER", "", "comma-separated names"),
        ("HVDPLUS_LADDER", "none,,fp16", "comma-separated names"),
        ("HVDPLUS_DENSE_STEPS", "0", "a whole number of at least 1"),
        ("HVDPLUS_DENSE_STEPS", "ten", "a whole number of at least 1"),
        ("HVDPLUS_WARM_STEPS", "0", "a whole number of at least 1"),
        ("HVDPLUS_DRAIN_STEPS", "", "a whole number of at least 1"),
        ("HVDPLUS_DRAIN_STEPS", "2.5", "a whole number of at least 1"),
        ("HVDPLUS_BUCKET_BYTES", "3", "a whole number of at least 4"),
        ("HVDPLUS_BUCKET_BYTES", "8MB", "a whole number of at least 4"),
        ("HVDPLUS_WINDOW_STEPS", "-1", "a whole number of at least 1"),
        ("HVDPLUS_SEED", "-1", "a whole number of at least 0"),
    ],
)
def test_a_bad_value_is_named_with_its_variable_and_what_would_be_right(variable: str, text: str, wanted: str) -> None:
    with pytest.raises(ValueError) as refused:
        Settings.from_environment({"HVDPLUS_COMPRESSION": "none", variable: text})
    assert str(refused.value) == f"{variable} wants {wanted}. Received: {variable}={text!r}"
    with pytest.raises(ValueError, match=variable):
        list(describe({variable: text}))


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HVDPLUS_DENSE_STEPS", "7")
    assert Settings.from_environment() == Settings(dense_steps=7)
    assert {each.name: each.value for each in describe()}["HVDPLUS_DENSE_STEPS"] == "7"
    assert Settings.from_environment({}) == Settings(), "an environment that is given is the only one"


def test_describe_lists_every_setting_with_its_origin_and_a_help_text() -> None:
    described = {each.name: each for each in describe({"HVDPLUS_LADDER": "none, fp16", "HVDPLUS_SEED": "0"})}
    assert list(described) == list(VARIABLES.values())
    assert described["HVDPLUS_LADDER"].value == "none,fp16"
    origins = dict.fromkeys(described, "default") | dict.fromkeys(("HVDPLUS_LADDER", "HVDPLUS_SEED"), "environment")
    assert {name: each.origin for name, each in described.items()} == origins
    assert all(each.help and each.help[0].islower() for each in described.values())
    assert described["HVDPLUS_BUCKET_BYTES"].value == str(Settings().bucket_bytes)


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().seed = 1  # type: ignore[misc]


@given(
    st.builds(
        Settings,
        compression=st.sampled_from(("auto", "none", "lowrank:4")),
        transport=st.sampled_from(("auto", "horovod", "mpi4py", "local")),
        ladder=st.sampled_from((("none",), ("none", "fp16", "lowrank:1"))),
        dense_steps=st.integers(1, 10**6),
        warm_steps=st.integers(1, 10**6),
        drain_steps=st.integers(1, 10**6),
        bucket_bytes=st.integers(4, 2**40),
        window_steps=st.integers(1, 10**6),
        run_log=st.text("abc/._- ", max_size=20),
        seed=st.integers(0, 2**63),
    )
)
@effort(max_examples=50, deadline=None, derandomize=True, database=None)
def test_what_describe_prints_can_be_set_again(wanted: Settings) -> None:
    environ = {
        variable: ",".join(value) if isinstance(value := getattr(wanted, name), tuple) else str(value)
        for name, variable in VARIABLES.items()
    }
    assert Settings.from_environment(environ) == wanted
    assert {each.name: each.value for each in describe(environ)} == environ


def test_misspelled_variables_are_found() -> None:
    """``HVDPLUS_VENV`` belongs to the batch scripts."""
    environ = {"HVDPLUS_COMPRESION": "fp16", "HVDPLUS_VENV": "/x", "HVDPLUS_SEED": "1", "HVDPLUS_XYZ": "", "HOME": "/"}
    assert unknown(environ) == [("HVDPLUS_COMPRESION", "HVDPLUS_COMPRESSION"), ("HVDPLUS_XYZ", "")]
