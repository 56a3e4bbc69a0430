"""The multi-rank tests in ``ranks/``: one launch of pytest for every framework, transport and number of ranks."""

import os
import re
import sys

import pytest
from launching import TESTS, gloo, mpirun, run, torchrun

pytestmark = [pytest.mark.jobs, pytest.mark.alone]

RARELY = pytest.mark.rarely
LAUNCHES = [
    # framework, launcher, ranks, transport asked for, transport expected
    ("torch", mpirun, 1, "auto", "horovod-mpi"),
    ("torch", mpirun, 2, "auto", "horovod-mpi"),
    ("torch", mpirun, 4, "auto", "horovod-mpi"),
    ("torch", gloo, 2, "auto", "horovod-gloo", RARELY),
    ("torch", mpirun, 2, "mpi4py", "mpi4py"),
    ("torch", mpirun, 1, "local", "local"),
    ("torch", torchrun, 2, "auto", "torch-gloo"),
    ("torch", torchrun, 4, "auto", "torch-gloo", RARELY),
    ("ddp", torchrun, 2, "auto", "torch-gloo"),
    ("ddp", torchrun, 4, "auto", "torch-gloo", RARELY),
    ("ahead", torchrun, 2, "auto", "torch-gloo"),
    ("ahead", torchrun, 4, "auto", "torch-gloo", RARELY),
    ("two_level", torchrun, 4, "auto", "torch-gloo"),
    ("two_level", mpirun, 4, "mpi4py", "mpi4py"),
    ("two_level", mpirun, 4, "auto", "horovod-mpi", RARELY),
    ("agreement", mpirun, 2, "auto", "horovod-mpi"),
    ("agreement", mpirun, 2, "mpi4py", "mpi4py"),
    ("agreement", torchrun, 2, "auto", "torch-gloo"),
    ("local", mpirun, 1, "auto", "horovod-mpi", RARELY),
    ("local", mpirun, 2, "auto", "horovod-mpi"),
    ("local", mpirun, 4, "mpi4py", "mpi4py", RARELY),
    ("local", torchrun, 2, "auto", "torch-gloo"),
    ("stale", mpirun, 2, "auto", "horovod-mpi"),
    ("stale", mpirun, 4, "mpi4py", "mpi4py", RARELY),
    ("local_keras tensorflow", mpirun, 2, "auto", "horovod-mpi", RARELY),
    ("local_keras torch", mpirun, 2, "mpi4py", "mpi4py", RARELY),
    ("local_keras torch", torchrun, 2, "auto", "torch-gloo"),
    ("secure torch", mpirun, 3, "auto", "horovod-mpi"),
    ("secure torch", torchrun, 2, "auto", "torch-gloo"),
    ("secure tensorflow", mpirun, 2, "auto", "horovod-mpi", RARELY),
    ("secure tensorflow", mpirun, 2, "mpi4py", "mpi4py", RARELY),
    ("keras", mpirun, 1, "auto", "horovod-mpi"),
    ("keras", mpirun, 2, "auto", "horovod-mpi"),
    ("keras", mpirun, 4, "auto", "horovod-mpi", RARELY),
    ("keras", gloo, 2, "auto", "horovod-gloo", RARELY),
    ("keras", mpirun, 2, "mpi4py", "mpi4py", RARELY),
    ("tape", mpirun, 1, "auto", "horovod-mpi"),
    ("tape", mpirun, 2, "auto", "horovod-mpi"),
    ("tape", mpirun, 4, "auto", "horovod-mpi", RARELY),
    ("backends tensorflow", mpirun, 1, "auto", "horovod-mpi", RARELY),
    ("backends tensorflow", mpirun, 2, "auto", "horovod-mpi", RARELY),
    ("backends tensorflow", mpirun, 4, "auto", "horovod-mpi", RARELY),
    ("backends torch", mpirun, 1, "auto", "horovod-mpi", RARELY),
    ("backends torch", mpirun, 2, "auto", "horovod-mpi"),
    ("backends torch", mpirun, 4, "auto", "horovod-mpi", RARELY),
    ("backends torch", mpirun, 2, "mpi4py", "mpi4py", RARELY),
    ("backends torch", torchrun, 2, "auto", "torch-gloo"),
]
"""Keras' backend stands behind the name of a body that runs on several. Of a body's launches on so many ranks the first
runs everything, later ones only what another transport could change (``ranks/conftest.py``)."""


def launched_before(launch):
    """Whether an earlier launch has run this body on as many ranks, in every run of the tests."""
    earlier = LAUNCHES[: [other[:5] for other in LAUNCHES].index(launch)]
    return (launch[0], launch[2]) in [(other[0], other[2]) for other in earlier if RARELY not in other[5:]]


def marks(launch):
    """One rank shares the cores with tests that start no jobs."""
    return [*launch[5:], pytest.mark.one_rank] if launch[2] == 1 else launch[5:]


@pytest.mark.parametrize(
    ("framework", "launcher", "ranks", "asked", "expected"),
    [pytest.param(*launch[:5], marks=marks(launch)) for launch in LAUNCHES],
)
def test_launch(framework, launcher, ranks, asked, expected, tmp_path):
    again = launched_before((framework, launcher, ranks, asked, expected))
    framework, _, backend = framework.partition(" ")
    body = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--color=no"]
    body += [] if os.environ.get("EVERY_TEST") else ["-m", "not rarely"]
    body += ["-o", "faulthandler_timeout=240", "-o", "faulthandler_exit_on_timeout=true"]  # says where it waits
    code, output = run(
        launcher(ranks, *body, f"{framework}_ranks.py"),
        timeout_seconds=900,
        cwd=TESTS / "ranks",
        PYTHONPATH=str(TESTS / "ranks"),
        KERAS_BACKEND=backend or "tensorflow",
        HVDPLUS_TRANSPORT=asked,
        EXPECTED_TRANSPORT=expected,
        EXPECTED_RANKS=str(ranks),
        RANKS_TEMPORARY=str(tmp_path),
        **({"LAUNCHED_BEFORE": "1"} if again else {}),
    )
    print(output)
    assert code == 0
    passed = [int(count) for count in re.findall(r"(\d+) passed", output)]
    assert len(passed) == ranks, "every rank has to report"
    assert len(set(passed)) == 1 and passed[0] >= 6
