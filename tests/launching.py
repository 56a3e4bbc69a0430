"""Start jobs on several ranks, the way a user does, and never wait for one for ever."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).parent
TESTS = Path(__file__).parent


def environment(**extra):
    """The user's environment, fit for jobs of tests: root is allowed, TensorFlow is quiet, one thread a rank."""
    found = {key: value for key, value in os.environ.items() if not key.startswith(("HVDPLUS_", "OMPI_MCA_"))}
    found.update(
        PATH=f"{BIN}:{os.environ['PATH']}",
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        TF_CPP_MIN_LOG_LEVEL="3",
        OMP_NUM_THREADS="1",
        TF_NUM_INTRAOP_THREADS="1",
        PYTHONSAFEPATH="1",  # the installed package, not what lies around
        PYTHONFAULTHANDLER="1",
    )
    found.pop("PYTHONUNBUFFERED", None)  # it takes a line of a rank apart, between which another rank's may come
    found.update(extra)
    return found


def mpirun(ranks, *command):
    """Command line for Open MPI."""
    return ["mpirun", "-np", str(ranks), "--oversubscribe", "--bind-to", "none", *command]


def gloo(ranks, *command):
    """Command line for Horovod over Gloo."""
    return ["horovodrun", "--gloo", "-np", str(ranks), *command]


def torchrun(ranks, *command):
    """Command line for PyTorch's launcher."""
    return ["torchrun", "--standalone", "--no-python", "--nproc-per-node", str(ranks), *command]


def run(command, timeout_seconds, cwd=TESTS, **extra):
    """Run a job to its end: (exit code, everything it printed). A job that hangs is killed with all its ranks.

    Raises:
        TimeoutError: with what was printed so far.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        raise TimeoutError(
            f"{' '.join(map(str, command))} did not end in {timeout_seconds} s. It printed:\n{output}"
        ) from None
    return process.returncode, output


def elastic(folder, script, levels, disturbed="", seeds="0", gloo_seconds=30, **extra):
    """An elastic job of three ranks, see ``ranks/elastic.py``: (what each rank has told, what the job printed). Ranks
    wait so many seconds for others to come, and for one that is dead."""
    hosts, discover = folder / "hosts", folder / "discover.sh"
    # Two names of this machine: Horovod uses no host again that has lost a rank.
    hosts.write_text("localhost:2\n127.0.0.1:1\n")
    discover.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discover.chmod(0o755)
    command = ["horovodrun", "--gloo", "-np", "3", "--min-np", "2", "--max-np", "3", "--host-discovery-script"]
    body = [sys.executable, "-P", str(TESTS / "ranks" / f"{script}.py"), str(hosts), str(folder)]
    code, output = run(
        [*command, str(discover), *body],
        timeout_seconds=300,
        PYTHONPATH=str(TESTS / "ranks"),
        LEVELS=levels,
        SEEDS=seeds,
        DISTURBED=disturbed,
        HOROVOD_GLOO_TIMEOUT_SECONDS=str(gloo_seconds),
        **extra,
    )
    assert code == 0, output
    return [json.loads(path.read_text()) for path in folder.glob("*.json")], output
