"""Proof that an installed Horovod works: an all-reduce over two ranks."""

from __future__ import annotations

import json
import os
import sys

from hvdplus.cli.horovod.frameworks import Framework, package_version
from hvdplus.cli.horovod.patches import VERSION
from hvdplus.cli.horovod.progress import Runner, last_lines
from hvdplus.cli.horovod.stack import Stack
from hvdplus.cli.horovod.tools import InstallError

CHECK_SECONDS = 180.0
"""Two ranks may import TensorFlow from a slow shared disk; the all-reduce itself is instant."""

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


def check_framework(run: Runner, framework: Framework, stack: Stack) -> str:
    """All-reduce one number over two ranks with the installed Horovod, and return the result as a sentence.

    Raises `InstallError` if Horovod cannot be imported, gives no answer or a wrong one, or lacks this environment's
    MPI, or the NCCL that was found or asked for.
    """
    mpi = stack.mpi
    program = CHECKS[framework.module] + _TELL
    extra = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONSAFEPATH": "1"}
    if mpi and mpi.mpirun:
        launch, over = [mpi.mpirun, "-np", "2"], "MPI"
        if mpi.version.startswith("Open MPI"):
            launch.append("--oversubscribe")
            if os.geteuid() == 0:  # for this child only: it does nothing but add two numbers
                extra |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    else:
        launch, over = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", "2"], "Gloo"
    with run.progress.step(f"checking: two ranks, {framework.module}, {over}"):
        code, output = run([*launch, sys.executable, "-c", program], extra=extra, timeout_seconds=CHECK_SECONDS)
    told = next((line.partition(_SEEN)[2] for line in output.splitlines() if _SEEN in line), None)
    if code is None:
        raise InstallError(f"Two ranks of horovod.{framework.module} over {over} did not finish within "
                           f"{CHECK_SECONDS:.0f} s. Log: {run.log}")  # fmt: skip
    if code or told is None:
        raise InstallError(f"Two ranks of horovod.{framework.module} over {over} failed:\n{last_lines(output)}\n"
                           f"The whole log: {run.log}. To build anew: hvdplus install-horovod --force")  # fmt: skip
    seen = json.JSONDecoder().raw_decode(told)[0]
    if (seen["ranks"], seen["total"]) != (2, 3.0):
        raise InstallError(f"Two ranks of horovod.{framework.module} over {over} should see 2 ranks and 1 + 2 = 3, but "
                           f"saw {seen['ranks']} and {seen['total']}: {launch[0]} does not belong to the MPI that "
                           "Horovod was built with. Put the right one first on PATH.")  # fmt: skip
    lacks = (f"MPI, but {stack.mpi.version} is here" if stack.mpi and not seen["mpi"] else
             f"NCCL, but {stack.gpu or 'HOROVOD_GPU_OPERATIONS'} is here" if stack.wants_nccl and not seen["nccl"] else
             "")  # fmt: skip
    if lacks:
        raise InstallError(f"horovod.{framework.module} was built without {lacks}. To build anew: "
                           "hvdplus install-horovod --force")  # fmt: skip
    built = ", ".join(name for name, key in (("MPI", "mpi"), ("Gloo", "gloo"), ("NCCL", "nccl")) if seen[key])
    return f"horovod.{framework.module} on {framework}, built with {built}: two ranks over {over}, 1 + 2 = 3"


def check_installed(run: Runner, stack: Stack) -> tuple[list[str], str]:
    """Return (sentences, "") if the installed Horovod works with every framework, else ([], reason)."""
    known = package_version("horovod")
    if known is None or known[1].partition("+")[0] != VERSION:
        return [], f"Horovod {known[1]} is installed" if known else ""
    try:
        return [check_framework(run, framework, stack) for framework in stack.frameworks], ""
    except InstallError as error:
        return [], f"the installed Horovod does not serve this environment ({str(error).splitlines()[0].rstrip(':')})"
