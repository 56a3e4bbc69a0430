"""``hvdplus doctor`` and the command line itself."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdplus import cli
from hvdplus.cli import doctor
from hvdplus.cli.horovod.stack import Framework
from hvdplus.compression import TABLE, Compressor
from hvdplus.compression.registry import Row
from hvdplus.settings import SETTINGS, Settings, variable


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

    monkeypatch.setattr(
        doctor, "find_frameworks", lambda: tuple(framework(name) for name in answers if name != "mpi4py")
    )
    monkeypatch.setattr(doctor, "probe", answers.__getitem__)
    monkeypatch.setattr(doctor, "package_version", version)
    return doctor.run(argparse.Namespace())


BUILT = {"mpi": True, "gloo": True, "nccl": False}


def test_horovod_alone_is_enough(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        _run(
            monkeypatch,
            {"torch": {"imported": True, "capability": "AVX2", **BUILT}},
            {"torch": "2", "horovod": "0.28.1"},
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "built with MPI, Gloo" in text and "AVX2" in text
    assert "pip install 'hvdplus[keras]'" in text


def test_nothing_to_train_with(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(monkeypatch, {}, {}) == 1
    text = capsys.readouterr().out
    assert "pip install 'hvdplus[torch]'" in text and "Nothing here can train" in text


def test_missing_horovod_names_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers = {
        "torch": {"imported": True, "capability": "AVX2", "error": "ModuleNotFoundError: No module named 'horovod'"}
    }
    assert _run(monkeypatch, answers, {"torch": "2"}) == 1
    assert "hvdplus install-horovod" in capsys.readouterr().out


def test_a_broken_horovod_is_a_line_of_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {"torch": {"imported": True, "capability": "AVX2", "error": "ImportError: undefined symbol: x"}}
    assert _run(monkeypatch, answers, {"torch": "2", "horovod": "0.28.1"}) == 1
    text = capsys.readouterr().out
    assert "does not work: ImportError: undefined symbol: x" in text
    assert "Horovod that works with torch" in text


def test_a_framework_that_cannot_be_imported_trains_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {"torch": {"error": "ImportError: libcudart.so.12"}, "mpi4py": {"library": "Open MPI v4.1.8"}}
    monkeypatch.setattr(doctor, "which", lambda *names: "/usr/bin/mpirun")
    assert _run(monkeypatch, broken, {"torch": "2", "mpi4py": "4"}) == 1
    text = capsys.readouterr().out
    assert "cannot be imported itself: ImportError: libcudart.so.12" in text and "python -c 'import torch'" in text
    assert "install-horovod" not in text and "Nothing here can train" in text
    sound = {**broken, "tensorflow": {"imported": True, "error": "no module named horovod"}}
    assert _run(monkeypatch, sound, {"torch": "2", "tensorflow": "2", "mpi4py": "4"}) == 0
    text = capsys.readouterr().out
    assert "works through: mpi4py." in text and "PyTorch that can be imported (optional)" in text


def test_pytorch_alone_is_enough_for_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {
        "torch": {"imported": True, "capability": "AVX2", "distributed": True, "error": "no module named horovod"}
    }
    assert _run(monkeypatch, answers, {"torch": "2"}) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == "Training on several ranks works through: torch.distributed (torchrun)."
    assert re.search(r"Horovod \(optional\) +hvdplus install-horovod", text)


@pytest.fixture
def settings_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run the command where ranks can train, in an environment with these settings: exit code, section, last line."""
    for name in [name for name in os.environ if name.startswith("HVDPLUS_")]:
        monkeypatch.delenv(name)

    def run(**environ: str) -> tuple[int, str]:
        with monkeypatch.context() as within:
            for name, value in environ.items():
                within.setenv(name, value)
            code = _run(
                within,
                {"torch": {"imported": True, "capability": "AVX2", **BUILT}},
                {"torch": "2", "horovod": "0.28.1"},
            )
        text = capsys.readouterr().out
        return code, text[text.index("\nSettings") : text.index("\nMissing")] + text.splitlines()[-1]

    return run


def test_each_setting_is_shown_with_its_value_and_where_it_is_from(
    settings_of: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    code, text = settings_of()
    assert code == 0 and text.endswith("Training on several ranks works through: Horovod (torch).")
    assert re.search(r"HVDPLUS_CONFIG +- \(default\)", text)
    assert all(re.search(rf"{variable(name)} +\S+ \(default\): ", text) for name in SETTINGS)
    path = tmp_path / "hvdplus.yaml"
    path.write_text("ladder: [none, 'lowrank:2']\ndense_steps: 20\n")
    code, text = settings_of(HVDPLUS_CONFIG=str(path), HVDPLUS_DENSE_STEPS="30")
    assert code == 0 and "no setting" not in text
    assert re.search(rf"HVDPLUS_CONFIG +{path} \(environment\)", text)
    assert re.search(rf"HVDPLUS_LADDER +none,lowrank:2 \(file {path}\)", text)
    assert re.search(r"HVDPLUS_DENSE_STEPS +30 \(environment\)", text)
    assert re.search(rf"HVDPLUS_ERROR_BUDGET +{Settings().error_budget} \(default\)", text)


def test_a_misspelt_variable_is_shown_and_does_no_harm(settings_of: Callable[..., tuple[int, str]]) -> None:
    code, text = settings_of(HVDPLUS_COMPRESION="fp16", HVDPLUS_XYZ="1")
    found = "is in the environment, but is no setting of hvdplus"
    assert code == 0
    assert re.search(f"HVDPLUS_COMPRESION +{found}; did you mean HVDPLUS_COMPRESSION\\?", text)
    assert re.search(f"HVDPLUS_XYZ +{found}\n", text)


@pytest.mark.parametrize(
    ("environ", "content", "message"),
    [
        ({"HVDPLUS_SEED": "soon"}, "", r"HVDPLUS_SEED \(environment\) wants a whole number.*'soon'"),
        ({"HVDPLUS_COMPRESSION": "lowrnk:4"}, "", r"HVDPLUS_COMPRESSION \(environment\): .*'lowrnk"),
        ({"HVDPLUS_LADDER": "none,fp17"}, "", r"HVDPLUS_LADDER \(environment\): .*'fp17'"),
        ({"HVDPLUS_LADDER": "fp16"}, "", r"HVDPLUS_LADDER \(environment\) must begin with none"),
        (
            {"HVDPLUS_LADDER": "none,fp16,fp16"},
            "",
            r"HVDPLUS_LADDER \(env.*\): .*names a level twice.*none, fp16, fp16",
        ),
        ({"HVDPLUS_COMPRESSION": "fp16"}, "ladder: [none, fp17]", r"ladder \(file .*yaml\): .*'fp17'"),
        ({}, "compression: topk:2", r"compression \(file .*yaml\): .*topk:2"),
        ({}, "dense_stepz: 20", r"dense_stepz \(file .*yaml\) is not a setting; did you mean dense_steps\?"),
        ({}, "ladder: [none", "HVDPLUS_CONFIG names a file that is not YAML: .*yaml"),
        ({"HVDPLUS_CONFIG": "/gone.yaml"}, "", "HVDPLUS_CONFIG names a file that cannot be read: .*'/gone.yaml'"),
    ],
)
def test_a_wrong_setting_is_shown_and_counts(
    settings_of: Callable[..., tuple[int, str]], tmp_path: Path, environ: dict[str, str], content: str, message: str
) -> None:
    path = tmp_path / "hvdplus.yaml"
    path.write_text(content)
    code, text = settings_of(**{"HVDPLUS_CONFIG": str(path), **environ})
    assert code == 1 and "A setting is wrong: see Settings." in text
    (wrong,) = re.findall(r"^  wrong +(.*)$", text, re.MULTILINE)
    assert re.search(message, wrong)


@pytest.mark.parametrize("level", ["local:8+int4", "local:auto+auto", "local:8"])
def test_levels_of_local_steps_are_right(settings_of: Callable[..., tuple[int, str]], level: str) -> None:
    _, text = settings_of(HVDPLUS_COMPRESSION=level)
    assert "A setting is wrong" not in text and "  wrong " not in text


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"HVDPLUS_COMPRESSION": "local:8+gzip"}, "gzip"),
        ({"HVDPLUS_COMPRESSION": "local:8", "HVDPLUS_EVERY": "4"}, "ask for different numbers of local steps"),
    ],
)
def test_levels_of_local_steps_may_be_wrong(
    settings_of: Callable[..., tuple[int, str]], environ: dict[str, str], message: str
) -> None:
    code, text = settings_of(**environ)
    assert code == 1 and message in text


def test_both_levels_that_are_wrong_are_shown(settings_of: Callable[..., tuple[int, str]]) -> None:
    code, text = settings_of(HVDPLUS_COMPRESSION="gzip", HVDPLUS_LADDER="none,fp17")
    assert code == 1 and len(re.findall("^  wrong ", text, re.MULTILINE)) == 2


def test_another_packages_compressor_that_fails_is_a_line_of_the_table(
    settings_of: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Compressor:
        raise RuntimeError("no licence")

    monkeypatch.setitem(TABLE, "theirs", Row(fails, "theirs"))
    code, text = settings_of(HVDPLUS_COMPRESSION="theirs")
    assert code == 1 and re.search("wrong .*RuntimeError: no licence", text)


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
