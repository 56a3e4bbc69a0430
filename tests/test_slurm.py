"""The batch scripts on a real Slurm (``make slurm-up`` starts one on this machine)."""

import shutil
import subprocess
from pathlib import Path

import pytest
from launching import BIN, environment, run

ROOT = Path(__file__).parent.parent


def why_not():
    """What is missing for these tests; empty if nothing is."""
    if not shutil.which("sbatch"):
        return "Slurm is not installed (sbatch not found): `make slurm-up` as root"
    answer = subprocess.run(["sinfo", "--noheader"], capture_output=True, text=True, timeout=20, check=False)
    return (
        ""
        if answer.returncode == 0
        else f"Slurm is not running: `make slurm-up` as root ({answer.stderr.strip()[:80]})"
    )


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")


@pytest.mark.parametrize(
    ("framework", "launcher"),
    [
        ("pytorch", "mpirun"),
        ("pytorch", "horovodrun"),
        ("pytorch", "srun"),
        ("keras", "mpirun"),
        ("keras", "horovodrun"),
    ],
)
def test_batch_script(framework, launcher, tmp_path):
    output = tmp_path / "job.out"
    submit = ["sbatch", "--wait", "--parsable", f"--output={output}", "--export=ALL"]
    settings = {
        "PYTHONSAFEPATH": "",  # the examples import what lies beside them
        "LAUNCHER": launcher,
        "HVDPLUS_VENV": str(BIN.parent),
        "HVDPLUS_RUN_LOG": str(tmp_path / "run.jsonl"),
    }
    try:
        code, said = run(
            [*submit, f"examples/slurm/{framework}_digits.sbatch", "--epochs", "2"], 240, cwd=ROOT, **settings
        )
    except TimeoutError:
        subprocess.run(["scancel", f"--name={framework}_digits"], check=False, env=environment())
        raise
    printed = output.read_text() if output.exists() else "(no output file)"
    assert code == 0, f"{said}\n{printed}"
    last = [line for line in printed.splitlines() if line.strip().removeprefix("[1,0]<stdout>:")][-1]
    name = {"pytorch": "torch", "keras": "keras"}[framework]
    assert f"hvdplus demo {name}: accuracy=" in last, printed
    assert "ranks=2 transport=horovod-" in last and "identical_ranks=yes" in last
    assert (tmp_path / "run.jsonl").stat().st_size > 0


def test_srun_without_an_mpi_plugin_is_an_error_not_two_jobs_of_one_rank(tmp_path):
    script = tmp_path / "job.py"
    script.write_text("import hvdplus.torch as hvd\nhvd.init()\nprint('trained apart')\n")
    code, said = run(["srun", "-n2", "--mpi=none", str(BIN / "python"), str(script)], 120, cwd=tmp_path)
    assert code != 0
    assert "srun --mpi=pmix" in said
    assert "trained apart" not in said
