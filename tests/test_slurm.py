"""The batch scripts on a real Slurm (``make slurm-up`` starts one on this machine)."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from frameworks import need
from launching import BIN, run
from slurm_nodes import Cluster, missing

ROOT = Path(__file__).parent.parent


def why_not():
    """What is missing for these tests; empty if nothing is."""
    if not shutil.which("sbatch"):
        return "Slurm is not installed (sbatch not found): `make slurm-up` as root"
    try:
        answer = subprocess.run(["sinfo", "--noheader"], capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return "Slurm does not answer (sinfo took more than 20 s): `make slurm-up` as root"
    if answer.returncode:
        return f"Slurm is not running: `make slurm-up` as root ({answer.stderr.strip()[:80]})"
    return ""


@pytest.fixture(scope="session")
def slurm():
    """A Slurm that runs; the test is skipped where there is none."""
    reason = why_not()  # once: without a controller sinfo tries for 9 s
    if reason:
        pytest.skip(reason)


def on_slurm(test):
    """Needs a Slurm that runs."""
    return pytest.mark.slurm(pytest.mark.usefixtures("slurm")(test))


@pytest.mark.parametrize("variables", [{}, {"OMP_NUM_THREADS": "1"}, {"OMP_THREAD_LIMIT": "1"}], ids=str)
def test_the_node_has_all_cores_whatever_openmp_is_told(variables):
    """With one core, the batch scripts' two ranks would wait for ever."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    command = ["bash", str(ROOT / "examples/slurm/one-node-slurm.sh"), "conf"]
    text = subprocess.run(command, env={**environ, **variables}, capture_output=True, text=True, check=True).stdout
    assert re.findall(r" CPUs=(\d+) ", text) == [str(len(os.sched_getaffinity(0)))]


def on_this_machine(*command, check=True):
    """What a command prints."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=check).stdout


def state_at_the_end(job, timeout_seconds, ask=on_this_machine):
    """How a job ended. ``sbatch --wait`` would look only after 2, 10, 42, ... seconds.

    Raises:
        TimeoutError: with the state the job was in; it is cancelled then.
    """
    deadline = time.monotonic() + timeout_seconds
    try:
        while True:
            shown = ask("scontrol", "show", "job", job)
            state = re.search(r"JobState=(\w+)", shown).group(1)
            if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                return state
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} was still {state} after {timeout_seconds} s")
            time.sleep(0.5)
    finally:  # by its number: a user's own job may have the same name; does nothing to a job that ended
        ask("scancel", job, check=False)


@on_slurm
@pytest.mark.parametrize(
    ("framework", "launcher"),
    [
        pytest.param("pytorch", "mpirun", marks=pytest.mark.rarely),
        ("pytorch", "horovodrun"),
        pytest.param("pytorch", "srun", marks=pytest.mark.rarely),
        ("keras", "mpirun"),
        pytest.param("keras", "horovodrun", marks=pytest.mark.rarely),
    ],
)
def test_batch_script(framework, launcher, tmp_path):
    output = tmp_path / "job.out"
    submit = ["sbatch", "--parsable", f"--output={output}", "--export=ALL"]
    script = ["examples/slurm/cpu.sbatch", f"examples/{framework}_digits.py"]
    settings = {
        "PYTHONSAFEPATH": "",  # the examples import what lies beside them
        "LAUNCHER": launcher,
        "VENV": str(BIN.parent),
        "HVDPLUS_RUN_LOG": str(tmp_path / "run.jsonl"),
    }
    code, said = run([*submit, *script, "--epochs", "2"], 60, cwd=ROOT, **settings)
    assert code == 0, said
    try:
        state = state_at_the_end(said.split()[-1], 240)
    finally:
        printed = output.read_text() if output.exists() else "(no output file)"
        print(printed)
    assert state == "COMPLETED"
    last = [line for line in printed.splitlines() if line.strip().removeprefix("[1,0]<stdout>:")][-1]
    name = {"pytorch": "torch", "keras": "keras"}[framework]
    assert f"hvdplus demo {name}: accuracy=" in last
    assert "ranks=2 transport=horovod-" in last and "identical_ranks=yes" in last
    assert (tmp_path / "run.jsonl").stat().st_size > 0


@pytest.fixture
def srun(tmp_path):
    """Two ranks that no MPI plugin of Slurm's tells of each other."""

    def start(**environ):
        script = tmp_path / "job.py"
        script.write_text(
            "import hvdplus.torch as hvd, torch\n"
            "hvd.init()\n"
            "print('trained', hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist())\n"
        )
        return run(["srun", "-n2", "--mpi=none", str(BIN / "python"), str(script)], 120, cwd=tmp_path, **environ)

    return start


@on_slurm
def test_srun_without_an_mpi_plugin_is_one_job_over_torch_distributed(srun):
    code, said = srun()
    assert code == 0 and said.count("trained [2.0, 2.0]") == 2 and "transport torch-gloo" in said, said


@on_slurm
@pytest.mark.parametrize("transport", ["horovod", "mpi4py"])
def test_srun_without_an_mpi_plugin_is_an_error_not_two_jobs_of_one_rank(transport, srun):
    code, said = srun(HVDPLUS_TRANSPORT=transport)
    assert code != 0
    assert "srun --mpi=pmix" in said
    assert "trained" not in said


@pytest.fixture
def cluster(lab):
    """Two nodes with two cores each, on a laboratory's hosts."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    running = Cluster(lab(hosts=2))
    yield running
    running.close()


LAB = {
    "PYTHONSAFEPATH": "",
    "VENV": str(BIN.parent),
    # These hosts are one machine, whose memory UCX would find.
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,vader,tcp",
    "GLOO_SOCKET_IFNAME": "eth0",
}


def submit(cluster, output, *script, **settings):
    """A job's number."""
    said = cluster.run("sbatch", "--parsable", f"--output={output}", *script, cwd=ROOT, **LAB, **settings)
    return said.strip()


@pytest.mark.slurm
@pytest.mark.parametrize("launcher", ["mpirun", "srun", "torchrun"])
def test_two_nodes_with_two_tasks_each(cluster, launcher, tmp_path):
    need("torch")
    output, log = tmp_path / "job.out", tmp_path / "run.jsonl"
    script = ["examples/slurm/several_nodes.sbatch", "examples/pytorch_digits.py", "--epochs", "3"]
    job = submit(cluster, output, *script, LAUNCHER=launcher, HVDPLUS_RUN_LOG=str(log))
    try:
        state = state_at_the_end(job, 180, cluster.run)
    finally:
        printed = output.read_text() if output.exists() else "(no output file)"
        print(printed)
    assert state == "COMPLETED"
    assert "4 ranks on 2 hosts (h1 x 2, h2 x 2)" in printed and "collective ring" in printed
    assert re.search(r"hvdplus demo torch: accuracy=.* ranks=4 transport=\S+ .* identical_ranks=yes", printed)
    assert log.stat().st_size > 0


def printed_by(output):
    """What a job has printed so far."""
    return output.read_text() if output.exists() else ""


def to_the_end(cluster, output, script, *arguments, until=None, then=lambda job: None):
    """What a job prints that writes into ``runs/``; once it has printed ``until``, ``then`` is called with its number.

    Raises:
        TimeoutError: it did not print this, or did not end, in time.
    """
    job = submit(cluster, output, f"examples/slurm/{script}.sbatch", *arguments)
    try:
        deadline = time.monotonic() + 90
        while until and until not in printed_by(output):
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} did not print {until!r} within 90 s")
            time.sleep(0.1)
        then(job)
        state = state_at_the_end(job, 240, cluster.run)
    finally:
        cluster.run("scancel", job, check=False)
        print(printed_by(output))
        for left in (ROOT / "runs").glob(f"{script}-{job}*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    assert state == "COMPLETED"
    return printed_by(output)


@pytest.mark.slurm
def test_a_job_that_is_told_to_stop_goes_on_bit_for_bit(cluster, tmp_path):
    """Its ranks save on the signal before a time limit; requeued, it ends where one that ran through does."""
    need("torch")

    def stop(job):
        cluster.run("scancel", "--signal=USR1", job)

    through = to_the_end(cluster, tmp_path / "through", "requeue", "--steps", "1000")
    stopped = to_the_end(cluster, tmp_path / "stopped", "requeue", "--steps", "1000", until="from step 0 on", then=stop)
    assert re.search(r"stopped after step \d*9\n", stopped)
    assert re.search(r"from step [1-9]\d*0 on", stopped)
    weights = [re.search(r"finished: 1000 steps, weights (\w+)", told).group(1) for told in (through, stopped)]
    assert weights[0] == weights[1]


def processes(**variables):
    """Numbers of the processes that have these variables."""
    wanted, found = {f"{name}={value}".encode() for name, value in variables.items()}, []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if wanted <= set(environment.read_bytes().split(b"\0")):
                found.append(int(environment.parent.name))
    return found


@pytest.mark.slurm
@pytest.mark.parametrize("lost", ["a rank", pytest.param("a node", marks=pytest.mark.rarely)])
def test_a_job_outlives_what_it_loses(lost, cluster, tmp_path):
    """It goes on from its checkpoint; with as many ranks as before, it ends where a job that lost nobody does."""
    need("torch")

    def kill(job):
        # torchrun has no rank. It has the lower number, and so is killed before it can notice anything.
        gone = processes(SLURM_JOB_ID=job, **({"RANK": 1} if lost == "a rank" else {"SLURM_PROCID": 1}))
        assert len(gone) == (1 if lost == "a rank" else 2)
        for process in sorted(gone):
            os.kill(process, signal.SIGKILL)

    told = to_the_end(cluster, tmp_path / "job", "elastic", "--epochs", "12", until="epoch 3 of 12 saved", then=kill)
    assert re.search(rf"from epoch ([3-9]|1\d) on, ranks: {2 if lost == 'a rank' else 1}\n", told)
    finished = re.search(r"finished: accuracy (\S+), weights (\w+), identical ranks: True", told)
    assert float(finished.group(1)) > 0.95
    if lost == "a rank":
        through = to_the_end(cluster, tmp_path / "through", "elastic", "--epochs", "12")
        assert finished.group() in through
