"""``hvdplus doctor`` and the command line itself."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdplus import cli
from hvdplus.cli import doctor
from hvdplus.cli.install_horovod import Framework


def test_importing_hvdplus_imports_no_framework_and_no_mpi() -> None:
    heavy = ("torch", "tensorflow", "keras", "horovod", "mpi4py", "matplotlib", "rich")
    program = f"import sys, hvdplus, hvdplus.cli; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in cli.COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            cli.main([command, "--help"])
        assert stopped.value.code == 0
        assert f"usage: hvdplus {command}" in capsys.readouterr().out


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["instal-horovod"])
    assert stopped.value.code == 2
    assert "install-horovod" in capsys.readouterr().err


def test_the_real_table() -> None:
    """In this environment: everything it promises is there, and the exit code says whether ranks can train."""
    command = [sys.executable, "-c", "import sys; from hvdplus.cli import main; sys.exit(main(['doctor']))"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "HVDPLUS_"))}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    for word in ("hvdplus", "python", "numpy", "horovod", "all-reduce", "capability", "HVDPLUS_COMPRESSION", "Slurm"):
        assert word in done.stdout
    assert done.stderr == ""
    assert done.returncode == (0 if "Training on several ranks works through" in done.stdout else 1)


def framework(name: str) -> Framework:
    """Return a framework as `find_frameworks` would."""
    return Framework(name, name, "1")


def _run(monkeypatch: pytest.MonkeyPatch, answers: dict[str, dict[str, Any]], packages: dict[str, str]) -> int:
    """Run the command in a made-up environment: what its probes answer, and which packages it has."""

    def version(*names: str) -> tuple[str, str] | None:
        return next(((name, packages[name]) for name in names if name in packages), None)

    monkeypatch.setattr(doctor, "find_frameworks", lambda: tuple(map(framework, answers)))
    monkeypatch.setattr(doctor, "probe", answers.__getitem__)
    monkeypatch.setattr(doctor, "package_version", version)
    return doctor.run(argparse.Namespace())


BUILT = {"mpi": True, "gloo": True, "nccl": False}


def test_horovod_alone_is_enough(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(monkeypatch, {"torch": {"capability": "AVX2", **BUILT}}, {"torch": "2", "horovod": "0.28.1"}) == 0
    text = capsys.readouterr().out
    assert "built with MPI, Gloo" in text and "AVX2" in text
    assert "pip install 'hvdplus[keras]'" in text


def test_nothing_to_train_with(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(monkeypatch, {}, {}) == 1
    text = capsys.readouterr().out
    assert "pip install 'hvdplus[torch]'" in text and "Nothing here can train" in text


def test_missing_horovod_names_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers = {"torch": {"capability": "AVX2", "error": "ModuleNotFoundError: No module named 'horovod'"}}
    assert _run(monkeypatch, answers, {"torch": "2"}) == 1
    assert "hvdplus install-horovod" in capsys.readouterr().out


def test_a_broken_horovod_is_a_line_of_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {"torch": {"capability": "AVX2", "error": "ImportError: undefined symbol: x"}}
    assert _run(monkeypatch, answers, {"torch": "2", "horovod": "0.28.1"}) == 1
    text = capsys.readouterr().out
    assert "does not work: ImportError: undefined symbol: x" in text
    assert "Horovod that works with torch" in text


def test_a_wrong_setting_and_a_misspelt_one_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HVDPLUS_COMPRESION", "fp16")
    _run(monkeypatch, {}, {})
    assert re.search("HVDPLUS_COMPRESION +is in the environment, but is no setting", capsys.readouterr().out)
    monkeypatch.setenv("HVDPLUS_SEED", "soon")
    _run(monkeypatch, {}, {})
    assert "HVDPLUS_SEED" in capsys.readouterr().out


def test_a_probe_that_fails_answers_with_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.PROBES, "torch", "raise ImportError('libmpi.so.40: cannot open')")
    assert doctor.probe("torch") == {"error": "ImportError: libmpi.so.40: cannot open"}


def test_the_users_own_tuning_is_shown_with_its_origin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / ".openmpi").mkdir()
    (tmp_path / ".openmpi/mca-params.conf").write_text("coll_tuned_bcast_algorithm = 1\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(("OMPI_MCA_", "_HVDPLUS_"))]:
        monkeypatch.delenv(name)
    _run(monkeypatch, {}, {})
    assert f"default (set by: {tmp_path}/.openmpi/mca-params.conf)" in capsys.readouterr().out
