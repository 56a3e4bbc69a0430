"""Proof that an installed Horovod works: an all-reduce over two ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from hvdplus.cli.horovod.frameworks import Framework, package_version
from hvdplus.cli.horovod.patches import VERSION
from hvdplus.cli.horovod.progress import Runner, last_lines
from hvdplus.cli.horovod.stack import Stack
from hvdplus.cli.horovod.tools import InstallError, inside, which

CHECK_SECONDS = 180.0
"""Two ranks may import TensorFlow from a slow shared disk; the all-reduce itself is instant."""
QUEUE_SECONDS = 1800.0
"""The user's own launcher may have to wait for nodes first."""
RANKS = re.compile(r"(?:^|\s)(?:-n|-np|--np|--ntasks)[= ]?(\d+)(?=\s|$)")
"""How launchers are told a number of ranks."""

# Each rank adds its number; rank 0 prints what it saw as one line of JSON. On CPUs: NCCL refuses two ranks on one GPU.
CHECKS = {
    "torch": """
import json, torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum, name="hvdplus.check").item()
""",
    "tensorflow": """
import json, tensorflow as tf, horovod.tensorflow as hvd
tf.config.set_visible_devices([], "GPU")
hvd.init()
total = float(hvd.allreduce(tf.constant([hvd.rank() + 1.0]), op=hvd.Sum, name="hvdplus.check")[0])
""",
}
_SEEN = "hvdplus saw "
_TELL = f"""
seen = dict(ranks=hvd.size(), total=total, mpi=bool(hvd.mpi_built()), gloo=bool(hvd.gloo_built()),
            nccl=bool(hvd.nccl_built()))
if hvd.rank() == 0:
    print("{_SEEN}" + json.dumps(seen), flush=True)
hvd.shutdown()
"""


def given_launcher(text: str) -> tuple[str, ...]:
    """Return the words of ``--check-with``, a command that starts two ranks of whatever follows.

    Raises:
        InstallError: there is no such program, or it is told to start another number of ranks.
    """
    try:
        words = tuple(shlex.split(text))
    except ValueError:  # a quotation that does not end
        words = ()
    if not words or not which(words[0]):
        raise InstallError("--check-with must be a launcher that is on PATH, with its options, such as 'srun -n 2 "
                           f"--mpi=pmix'. Received: {text!r}")  # fmt: skip
    if any(int(count) != 2 for count in RANKS.findall(" ".join(words))):
        raise InstallError(f"--check-with must start 2 ranks, as 'srun -n 2' does. Received: {text!r}")
    return words


def _launcher(stack: Stack, given: Sequence[str]) -> tuple[list[str], str, dict[str, str]]:
    """(command that starts two ranks, what they talk over in words, its variables)."""
    mpi = stack.mpi
    if given:
        return list(given), given[0], {}
    if mpi is None or mpi.mpirun is None:
        return [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", "2"], "Gloo", {}
    command, extra = [mpi.mpirun, "-np", "2"], {}
    if mpi.version.startswith("Open MPI"):
        command.append("--oversubscribe")
        if os.geteuid() == 0:  # for this child only: it does nothing but add two numbers
            extra = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return command, "MPI", extra


def check_framework(run: Runner, framework: Framework, stack: Stack, launcher: Sequence[str] = ()) -> str:
    """All-reduce one number over two ranks with the installed Horovod, and return the result as a sentence.

    Args:
        launcher: what starts the two ranks, if the user has said so.

    Raises:
        InstallError: Horovod cannot be imported, gives no answer or a wrong one, or lacks this environment's MPI or
            the NCCL that was found or asked for.
    """
    program = CHECKS[framework.module] + _TELL
    launch, over, extra = _launcher(stack, launcher)
    limit = QUEUE_SECONDS if launcher else CHECK_SECONDS
    extra |= {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONSAFEPATH": "1"}
    with run.progress.step(f"checking: two ranks, {framework.module}, {over}"):
        code, output = run([*launch, sys.executable, "-c", program], extra=extra, timeout_seconds=limit)
    told = next((line.partition(_SEEN)[2] for line in output.splitlines() if _SEEN in line), None)
    ranks = f"Two ranks of horovod.{framework.module} over {over}"
    if code is None:
        raise InstallError(f"{ranks} did not finish within {limit:.0f} s. Log: {run.log}")
    if code or told is None:
        where = "" if launcher else " Where no job may run: --no-check, or --check-with 'srun -n 2 --mpi=pmix'."
        raise InstallError(f"{ranks} failed:\n{last_lines(output)}\nThe whole log: {run.log}. To build anew: "
                           f"hvdplus install-horovod --force.{where}")  # fmt: skip
    seen = json.JSONDecoder().raw_decode(told)[0]
    if (seen["ranks"], seen["total"]) != (2, 3.0):
        why = (f"{shlex.join(launcher)} does not start two ranks of the MPI that Horovod was built with (srun wants "
               "--mpi=pmix, as srun --mpi=list says). Change --check-with." if launcher else
               f"{launch[0]} does not belong to the MPI that Horovod was built with. Put the right one first on "
               "PATH.")  # fmt: skip
        raise InstallError(
            f"{ranks} should see 2 ranks and 1 + 2 = 3, but saw {seen['ranks']} and {seen['total']}: {why}"
        )
    lacks = (f"MPI, but {stack.mpi.version} is here" if stack.mpi and not seen["mpi"] else
             f"NCCL, but {stack.gpu or 'HOROVOD_GPU_OPERATIONS'} is here" if stack.wants_nccl and not seen["nccl"] else
             "")  # fmt: skip
    if lacks:
        raise InstallError(f"horovod.{framework.module} was built without {lacks}. To build anew: "
                           "hvdplus install-horovod --force")  # fmt: skip
    built = ", ".join(name for name, key in (("MPI", "mpi"), ("Gloo", "gloo"), ("NCCL", "nccl")) if seen[key])
    return f"horovod.{framework.module} on {framework}, built with {built}: two ranks over {over}, 1 + 2 = 3"


def check_installed(run: Runner, stack: Stack, launcher: Sequence[str] = ()) -> tuple[list[str], str]:
    """Return (sentences, "") if the installed Horovod works with every framework, else ([], reason).

    Whoever built it: a module's, conda's, or a newer one will do, if two ranks add up.
    """
    known = package_version("horovod")
    if known is None:
        return [], ""
    if _numbers(known[1]) < _numbers(VERSION):
        return [], f"Horovod {known[1]} is installed, which is older than {VERSION}"
    try:
        return [check_framework(run, framework, stack, launcher) for framework in stack.frameworks], ""
    except InstallError as error:
        return [], f"the installed Horovod does not serve this environment ({str(error).splitlines()[0].rstrip(':')})"


def _numbers(version: str) -> tuple[int, ...]:
    """``0.28.1`` as numbers, without a site's own addition (``+cuda12``)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def refuse_hidden() -> None:
    """Raise `InstallError` if a Horovod of elsewhere comes before this environment's packages and would hide a new one:
    a module's, by PYTHONPATH."""
    try:
        place = Path(str(metadata.distribution("horovod").locate_file("")))
    except metadata.PackageNotFoundError:
        return
    before = [Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if place.resolve() in before and not inside(place):
        raise InstallError(f"The Horovod in {place} comes first on PYTHONPATH and would hide a new one. Unload its "
                           "module, or take the folder out of PYTHONPATH; then: hvdplus install-horovod")  # fmt: skip
