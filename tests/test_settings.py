"""Settings: arguments over environment over a file over defaults, and errors that say where, what and what would be
right."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from frameworks import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from hvdplus.settings import CONFIG, SETTINGS, Settings, describe, unknown, variable

VARIABLES = {name: variable(name) for name in SETTINGS}
WHOLE = st.integers(1, 10**6)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "compression": st.sampled_from(("auto", "none", "lowrank:4", "topk:0.05+int8")),
    "transport": st.sampled_from(("auto", "horovod", "mpi4py", "torch", "local")),
    "timeout_seconds": st.floats(1e-300, 1e300),
    "two_level": st.sampled_from(("auto", "on", "off")) | st.integers(2, 10**6),
    "ladder": st.sampled_from((("none",), ("none", "fp16", "lowrank:1"), ("none", "topk:0.05+int8"))),
    "dense_steps": st.integers(0, 10**6),
    "every": st.integers(1, 10**6) | st.just("auto"),
    "outer": st.sampled_from(("average", "nesterov")),
    "overlap_steps": st.integers(0, 10**6),
    "fragments": WHOLE,
    "average_state": st.booleans(),
    "staleness": st.integers(0, 10**6) | st.just("any"),
    "secure_aggregation": st.booleans(),
    "drain_steps": WHOLE,
    "delay_price": st.floats(0, 1e300),
    "error_budget": st.floats(1e-300, 1e300),
    "bucket_bytes": st.integers(4, 2**40),
    "weights_check_steps": st.integers(0, 10**6),
    "window_steps": WHOLE,
    "batch_size": st.integers(0, 10**6),
    "run_log": st.text("abc/._- ", max_size=20),
    "seed": st.integers(0, 2**63),
}
"""Setting -> values it may have."""
SUBSETS = st.fixed_dictionaries({}, optional=VALUES)
"""Any values for any of the settings."""
EFFORT = examples(50, suppress_health_check=[HealthCheck.function_scoped_fixture])


def text(value: Any) -> str:
    """A value as one writes it in the environment."""
    return ",".join(value) if isinstance(value, tuple) else str(value)


def variables(values: Mapping[str, Any]) -> dict[str, str]:
    """An environment that makes these settings."""
    return {VARIABLES[name]: text(value) for name, value in values.items()}


def write(folder: Path, content: str | bytes) -> tuple[str, dict[str, str]]:
    """The path of a file with this content, and an environment that names it."""
    path = folder / "hvdplus.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path), {CONFIG: str(path)}


def refusal(arguments: Any = None, environ: Mapping[str, str] | None = None) -> str:
    """What is said about settings that are wrong."""
    with pytest.raises(ValueError) as refused:
        Settings.load(arguments, environ or {})
    return str(refused.value)


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Settings.load(environ={}) == Settings.load({}, {}) == Settings()
    assert Settings.load(environ={"PATH": "/bin", "HOROVOD_SIZE": "2", CONFIG: ""}) == Settings()
    assert Settings().compression == "auto" and Settings().ladder[0] == "none"
    assert (Settings().dense_steps, Settings().error_budget) == (0, 5.0), "as in the docs"


def test_every_setting_is_tried_here() -> None:
    assert list(VALUES) == list(SETTINGS)


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("HVDPLUS_COMPRESSION", "lowrank:2", "compression", "lowrank:2"),
        ("HVDPLUS_TRANSPORT", "mpi4py", "transport", "mpi4py"),
        ("HVDPLUS_LADDER", "none,lowrank:1", "ladder", ("none", "lowrank:1")),
        ("HVDPLUS_LADDER", " none , fp16 ", "ladder", ("none", "fp16")),
        ("HVDPLUS_DENSE_STEPS", "1", "dense_steps", 1),
        ("HVDPLUS_DELAY_PRICE", "0", "delay_price", 0.0),
        ("HVDPLUS_DELAY_PRICE", "0.1", "delay_price", 0.1),
        ("HVDPLUS_DRAIN_STEPS", "25", "drain_steps", 25),
        ("HVDPLUS_ERROR_BUDGET", "0.5", "error_budget", 0.5),
        ("HVDPLUS_ERROR_BUDGET", "3", "error_budget", 3.0),
        ("HVDPLUS_BUCKET_BYTES", "4", "bucket_bytes", 4),
        ("HVDPLUS_WEIGHTS_CHECK_STEPS", "0", "weights_check_steps", 0),
        ("HVDPLUS_WINDOW_STEPS", "3", "window_steps", 3),
        ("HVDPLUS_RUN_LOG", "runs/a b.jsonl", "run_log", "runs/a b.jsonl"),
        ("HVDPLUS_SEED", "0", "seed", 0),
        ("HVDPLUS_SEED", "12345678901", "seed", 12345678901),
    ],
)
def test_a_variable_sets_its_setting_and_no_other(variable: str, text: str, name: str, value: object) -> None:
    assert Settings.load(environ={variable: text}) == dataclasses.replace(Settings(), **{name: value})


WHOLE_FROM_1 = "a whole number of at least 1"
NAMES = "a list of names, or names with commas between them"


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("transport", "tcp", "one of auto, horovod, mpi4py, torch, local"),
        ("transport", "Horovod", "one of auto, horovod, mpi4py, torch, local"),
        ("ladder", "", NAMES),
        ("ladder", "none,,fp16", NAMES),
        ("drain_steps", "0", WHOLE_FROM_1),
        ("drain_steps", "ten", WHOLE_FROM_1),
        ("dense_steps", "-1", "a whole number of at least 0"),
        ("drain_steps", "", WHOLE_FROM_1),
        ("drain_steps", "2.5", WHOLE_FROM_1),
        ("error_budget", "0", "a number above 0"),
        ("error_budget", "-1", "a number above 0"),
        ("error_budget", "inf", "a number above 0"),
        ("error_budget", "nan", "a number above 0"),
        ("error_budget", "much", "a number above 0"),
        ("bucket_bytes", "3", "a whole number of at least 4"),
        ("bucket_bytes", "8MB", "a whole number of at least 4"),
        ("window_steps", "-1", WHOLE_FROM_1),
        ("seed", "-1", "a whole number of at least 0"),
    ],
)
def test_a_bad_value_is_named_with_its_place_and_what_would_be_right(
    name: str, text: str, wanted: str, tmp_path: Path
) -> None:
    """In a variable, and as the same text in the file or the script."""
    spelled = VARIABLES[name]
    message = f"{spelled} (environment) wants {wanted}. Received: {spelled}={text!r}"
    assert refusal(environ={"HVDPLUS_COMPRESSION": "none", spelled: text}) == message
    path, environ = write(tmp_path, yaml.safe_dump({"compression": "none", name: text}))
    assert refusal(environ=environ) == f"{name} (file {path}) wants {wanted}. Received: {name}={text!r}"
    if name != "transport":
        assert refusal({name: text}) == f"{name} (argument) wants {wanted}. Received: {name}={text!r}"


@pytest.mark.parametrize(
    ("line", "received"),
    [
        ("dense_steps: -1", "dense_steps=-1"),
        ("dense_steps: 20.0", "dense_steps=20.0"),
        ("dense_steps: yes", "dense_steps=True"),
        ("dense_steps:", "dense_steps=None"),
        ("dense_steps: [20]", "dense_steps=[20]"),
        ("error_budget: true", "error_budget=True"),
        ("error_budget: .inf", "error_budget=inf"),
        ("error_budget: 1" + 400 * "0", "error_budget=1" + 400 * "0"),
        ("error_budget: [1]", "error_budget=[1]"),
        ("ladder: 8", "ladder=8"),
        ("ladder: []", "ladder=[]"),
        ("ladder: [none, 8]", "ladder=['none', 8]"),
        ("ladder: [none, '']", "ladder=['none', '']"),
        ("compression: [none]", "compression=['none']"),
        ("transport: {}", "transport={}"),
        ("run_log: 2026-01-01", "run_log=datetime.date(2026, 1, 1)"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused(line: str, received: str, tmp_path: Path) -> None:
    path, environ = write(tmp_path, line)
    name = received.partition("=")[0]
    assert re.fullmatch(
        rf"{name} \(file {re.escape(path)}\) wants .+\. Received: {re.escape(received)}", refusal(environ=environ)
    )


def test_a_file_may_write_a_value_as_yaml_or_as_text(tmp_path: Path) -> None:
    wanted = Settings(compression="auto", ladder=("none", "fp16"), dense_steps=20, error_budget=2.0)
    for content in (
        "compression: auto\nladder: [none, fp16]\ndense_steps: 20\nerror_budget: 2\n",
        "compression: 'auto'\nladder: 'none, fp16'\ndense_steps: '20'\nerror_budget: 2e0\n",
        '{"compression": "auto", "ladder": ["none", "fp16"], "dense_steps": 20, "error_budget": 2.0}',
    ):
        assert Settings.load(environ=write(tmp_path, content)[1]) == wanted
    assert Settings.load(environ=write(tmp_path, "ladder:\n  - none\n  - topk:0.05+int8\n")[1]).ladder == (
        "none",
        "topk:0.05+int8",
    )


@pytest.mark.parametrize("content", ["", "# dense_steps: 20\n", "---\n", "{}"])
def test_a_file_may_say_nothing(content: str, tmp_path: Path) -> None:
    assert Settings.load(environ=write(tmp_path, content)[1]) == Settings()


def test_no_file_is_searched_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "seed: 5")
    monkeypatch.chdir(tmp_path)
    assert Settings.load(environ={}) == Settings()
    assert Settings.load(environ={CONFIG: "hvdplus.yaml"}).seed == 5, "a relative path is the job's"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("dense_steps: [20", "is not YAML: .*line 1"),
        ("a: b: c", "is not YAML: .*line 1"),
        (b"\xff\xfe\x00", "is not YAML"),
        ("seed: !!python/object/apply:os.getpid []", "is not YAML: .*could not determine a constructor"),
        ("seed: 2026-13-45", "is not YAML: .*month"),
        ("seed: 1\n---\nseed: 2\n", "is not YAML"),
        ("- dense_steps", r"wants lines such as `dense_steps: 20`. Received: \['dense_steps'\]"),
        ("dense_steps=20", "wants lines such as `dense_steps: 20`. Received: 'dense_steps=20'"),
    ],
)
def test_a_file_that_cannot_be_understood_is_one_error(content: str | bytes, said: str, tmp_path: Path) -> None:
    path, environ = write(tmp_path, content)
    message = refusal(environ=environ)
    assert re.search(said, message) and path in message and CONFIG in message and "\n" not in message


def test_a_file_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "gone.yaml", "No such file"), (tmp_path, "Is a directory")):
        assert re.fullmatch(
            rf"HVDPLUS_CONFIG names a file that cannot be read: {said}.*\. Received: '{re.escape(str(path))}'",
            refusal(environ={CONFIG: str(path)}),
        )


@pytest.mark.parametrize(
    ("written", "near"),
    [
        ("dense_step", "dense_steps"),
        ("denseSteps", "dense_steps"),
        ("DENSE_STEPS", "dense_steps"),
        ("HVDPLUS_DENSE_STEPS", "dense_steps"),
        ("compresion", "compression"),
        ("budget", "error_budget"),
    ],
)
def test_a_name_that_is_no_setting_is_refused_with_the_nearest_that_is(written: str, near: str, tmp_path: Path) -> None:
    path, environ = write(tmp_path, f"seed: 1\n{written}: 1")
    assert refusal(environ=environ) == f"{written} (file {path}) is not a setting; did you mean {near}?"
    assert refusal({written: 1}) == f"{written} (argument) is not a setting; did you mean {near}?"


def test_a_name_like_no_setting_is_refused_with_those_there_are(tmp_path: Path) -> None:
    everything = f"is not a setting. Settings are {', '.join(SETTINGS)}."
    assert refusal({"origins": {}}) == f"origins (argument) {everything}"
    path, environ = write(tmp_path, "7: 1")
    assert refusal(environ=environ) == f"7 (file {path}) {everything}"


def test_a_script_can_pass_a_mapping_only() -> None:
    for arguments in ([("seed", 1)], "seed=1", Settings(), 5):
        assert refusal(arguments) == (
            f"settings= wants names with values, such as {{'dense_steps': 20}}. Received: {arguments!r}"
        )


def test_an_optimizer_comes_too_late_to_choose_the_transport() -> None:
    message = refusal({"transport": "mpi4py"}, {"HVDPLUS_TRANSPORT": "mpi4py"})
    assert message.startswith("transport (argument) comes too late: hvd.init() starts the transport")
    assert "HVDPLUS_TRANSPORT" in message and CONFIG in message
    assert message.endswith("Received: transport='mpi4py'")


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (*VARIABLES.values(), CONFIG):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv("HVDPLUS_DENSE_STEPS", "7")
    assert Settings.load() == Settings(dense_steps=7)
    assert Settings.load(environ={}) == Settings(), "an environment that is given is the only one"


@given(in_script=SUBSETS, in_environment=SUBSETS, in_file=SUBSETS)
@EFFORT
def test_the_highest_source_wins_and_is_named(
    in_script: dict[str, Any], in_environment: dict[str, Any], in_file: dict[str, Any], tmp_path: Path
) -> None:
    """Script, environment, file, default: for each setting by itself."""
    for name in ("transport", "timeout_seconds"):
        in_script.pop(name, None)
    listed = {name: list(value) if isinstance(value, tuple) else value for name, value in in_file.items()}
    path, environ = write(tmp_path, yaml.safe_dump(listed))
    settings = Settings.load(in_script, {**environ, **variables(in_environment)})
    expected = {**dataclasses.asdict(Settings()), **in_file, **in_environment, **in_script}
    for described in describe(settings):
        name = next(name for name in VARIABLES if VARIABLES[name] == described.name)
        origin = (
            "argument" if name in in_script
            else "environment" if name in in_environment
            else f"file {path}" if name in in_file
            else "default"
        )  # fmt: skip
        assert getattr(settings, name) == expected[name]
        assert (described.value, described.origin) == (text(expected[name]), origin)
        spelled = VARIABLES[name] if origin == "environment" else name
        assert settings.whence(name) == f"{spelled} ({origin})"


def test_a_wrong_value_is_refused_even_where_a_higher_source_replaces_it(tmp_path: Path) -> None:
    _, environ = write(tmp_path, "seed: soon")
    assert "seed='soon'" in refusal({"seed": 1}, {**environ, "HVDPLUS_SEED": "2"})


def test_where_a_value_came_from_makes_no_other_settings(tmp_path: Path) -> None:
    """What the ranks compare are the values."""
    _, environ = write(tmp_path, "seed: 3")
    assert Settings.load(environ=environ) == Settings.load({"seed": 3}, {}) == Settings(seed=3)


def test_describe_lists_every_setting_with_a_help_text() -> None:
    described = {each.name: each for each in describe(Settings.load(environ={"HVDPLUS_LADDER": "none, fp16"}))}
    assert list(described) == list(VARIABLES.values())
    assert described["HVDPLUS_LADDER"].value == "none,fp16"
    assert all(each.help and each.help[0].islower() for each in described.values())
    assert described["HVDPLUS_BUCKET_BYTES"].value == str(Settings().bucket_bytes)


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().seed = 1  # type: ignore[misc]


@given(st.builds(Settings, **VALUES))
@EFFORT
def test_what_describe_prints_can_be_set_again(wanted: Settings) -> None:
    environ = {each.name: each.value for each in describe(wanted)}
    again = Settings.load(environ=environ)
    assert again == wanted
    assert {each.name: each.value for each in describe(again)} == environ


def test_misspelled_variables_are_found() -> None:
    environ = {"HVDPLUS_COMPRESION": "fp16", "HVDPLUS_SEED": "1", "HVDPLUS_XYZ": "", "HOME": "/"}
    environ |= {CONFIG: "", "HVDPLUS_CONFG": ""}
    assert unknown(environ) == [("HVDPLUS_COMPRESION", "HVDPLUS_COMPRESSION"), ("HVDPLUS_CONFG", CONFIG),
                                ("HVDPLUS_XYZ", "")]  # fmt: skip
