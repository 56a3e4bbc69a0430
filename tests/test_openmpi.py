"""Open MPI settings: set where the user has no wish, never over one, wherever Open MPI would read it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.adapters.transports.openmpi import (
    ALLREDUCE_ALGORITHM,
    DYNAMIC_RULES,
    HAN_PRIORITY,
    SETTINGS,
    TCP_FLAGS,
    YIELD_WHEN_IDLE,
    Setting,
    allreduce_algorithm,
    apply_settings,
)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Return an environment whose home and whose Open MPI are empty folders."""
    (tmp_path / "home" / ".openmpi").mkdir(parents=True)
    (tmp_path / "prefix" / "etc").mkdir(parents=True)
    return {"HOME": str(tmp_path / "home"), "OPAL_PREFIX": str(tmp_path / "prefix"), "PATH": ""}


def test_everything_is_set_where_nothing_was(environ: dict[str, str]) -> None:
    settings = apply_settings(environ)
    assert {setting.name: setting.value for setting in settings} == SETTINGS
    assert {setting.origin for setting in settings} == {"hvdplus"}
    assert SETTINGS.items() <= environ.items()
    assert allreduce_algorithm(settings) == "ring"


def test_a_second_call_changes_nothing(environ: dict[str, str]) -> None:
    first = apply_settings(environ)
    before = dict(environ)
    assert apply_settings(environ) == first
    assert environ == before


def test_a_later_change_by_the_user_is_theirs(environ: dict[str, str]) -> None:
    apply_settings(environ)
    environ[YIELD_WHEN_IDLE] = "0"
    assert Setting(YIELD_WHEN_IDLE, "0", "environment") in apply_settings(environ)
    assert environ[YIELD_WHEN_IDLE] == "0"


@given(
    mine=st.dictionaries(
        st.sampled_from([*SETTINGS, "OMPI_MCA_coll_tuned_bcast_algorithm", "OMPI_MCA_btl"]),
        st.sampled_from(["0", "1", "4", "5", "tcp,self"]),
    )
)
def test_the_users_variables_are_never_touched(mine: dict[str, str]) -> None:
    environ = {"HOME": "/nonexistent", "OPAL_PREFIX": "/nonexistent", "PATH": "", **mine}
    settings = {setting.name: setting for setting in apply_settings(environ)}
    assert mine.items() <= environ.items()
    for name in SETTINGS:
        assert settings[name].origin == ("environment" if name in mine else settings[name].origin)
        assert settings[name].value == environ.get(name, "")
    tuned = any(name.startswith("OMPI_MCA_coll_tuned_") for name in mine)
    for name in (DYNAMIC_RULES, ALLREDUCE_ALGORITHM):
        assert (name in environ) == (name in mine or not tuned)
    again = apply_settings(environ)
    assert {setting.name: setting for setting in again} == settings


@pytest.mark.parametrize(
    ("where", "variable"),
    [
        ("home/.openmpi/mca-params.conf", None),
        ("prefix/etc/openmpi-mca-params.conf", None),
        ("prefix/etc/openmpi-mca-params-override.conf", None),
        ("own.conf", "OMPI_MCA_mca_base_param_files"),
        ("own.conf", "OMPI_MCA_mca_param_files"),
        ("am.conf", "OMPI_MCA_mca_base_param_file_prefix"),
    ],
)
def test_parameter_files_are_respected(
    environ: dict[str, str], tmp_path: Path, where: str, variable: str | None
) -> None:
    path = tmp_path / where
    path.write_text("# comment\nbtl = tcp,self\n  coll_tuned_use_dynamic_rules=1\ncoll_tuned_allreduce_algorithm = 5\n")
    if variable:
        environ[variable] = f"/nonexistent.conf,{path}"
    settings = apply_settings(environ)
    assert settings[:2] == (Setting(DYNAMIC_RULES, "1", str(path)), Setting(ALLREDUCE_ALGORITHM, "5", str(path)))
    assert DYNAMIC_RULES not in environ and ALLREDUCE_ALGORITHM not in environ
    assert environ[YIELD_WHEN_IDLE] == "1"
    assert allreduce_algorithm(settings) == "segmented ring"


def test_a_tune_file_has_its_own_notation(environ: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "tune.conf"
    path.write_text("-mca coll_tuned_use_dynamic_rules 1 \n--mca mpi_yield_when_idle 0\n")
    environ["OMPI_MCA_mca_base_envar_file_prefix"] = str(path)
    settings = {setting.name: setting for setting in apply_settings(environ)}
    assert settings[DYNAMIC_RULES] == Setting(DYNAMIC_RULES, "1", str(path))
    assert settings[ALLREDUCE_ALGORITHM] == Setting(ALLREDUCE_ALGORITHM, "", str(path))
    assert settings[YIELD_WHEN_IDLE] == Setting(YIELD_WHEN_IDLE, "0", str(path))
    assert SETTINGS.keys() & environ.keys() == {TCP_FLAGS}, "of which the file says nothing"


def test_the_home_file_beats_the_systems(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "home/.openmpi/mca-params.conf").write_text("mpi_yield_when_idle = 0\n")
    (tmp_path / "prefix/etc/openmpi-mca-params.conf").write_text("mpi_yield_when_idle = 1\n")
    assert apply_settings(environ)[2] == Setting(YIELD_WHEN_IDLE, "0", str(tmp_path / "home/.openmpi/mca-params.conf"))


def test_a_comment_is_no_wish(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "home/.openmpi/mca-params.conf").write_text("# coll_tuned_use_dynamic_rules = 1\n")
    assert {setting.origin for setting in apply_settings(environ)} == {"hvdplus"}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_respected_in_a_file(environ: dict[str, str], tmp_path: Path, name: str) -> None:
    path = tmp_path / "home/.openmpi/mca-params.conf"
    path.write_text(f"{name.removeprefix('OMPI_MCA_')} = 7\n")
    assert Setting(name, "7", str(path)) in apply_settings(environ)
    assert name not in environ


@pytest.mark.parametrize(
    ("version", "priority", "grouped", "word"),
    [
        ("5.0.11", "", True, "hosts first (han)"),
        ("5.0.11", "", False, "ring"),
        ("5.0.11", "0", True, "ring"),
        ("", "", True, "ring"),
        ("", "50", True, "hosts first (han)"),
        ("5.0.11", "high", True, "hosts first (han)"),
    ],
)
def test_from_open_mpi_5_on_hosts_come_first(
    environ: dict[str, str], version: str, priority: str, grouped: bool, word: str
) -> None:
    environ |= {"OMPI_VERSION": version} if version else {}
    environ |= {HAN_PRIORITY: priority} if priority else {}
    assert allreduce_algorithm(apply_settings(environ), grouped, environ) == word


@pytest.mark.parametrize(
    ("rules", "algorithm", "word"),
    [
        ("1", "4", "ring"),
        ("true", "5", "segmented ring"),
        ("1", "segmented_ring", "segmented ring"),
        ("1", "3", "recursive doubling"),
        ("1", "0", "default"),
        ("1", "ignore", "default"),
        ("1", "", "default"),
        ("0", "4", "default"),
        ("", "4", "default"),
        ("1", "99", "99"),
    ],
)
def test_the_algorithm_has_a_name(rules: str, algorithm: str, word: str) -> None:
    settings = (Setting(DYNAMIC_RULES, rules, "environment"), Setting(ALLREDUCE_ALGORITHM, algorithm, "environment"))
    assert allreduce_algorithm(settings) == word
