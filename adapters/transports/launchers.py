"""Number of ranks that a job's launcher announced, for a comparison with the transport's size.

A process that cannot reach the other ranks of its job (an MPI that the launcher does not speak to, TensorFlow under
``torchrun``, a Horovod without MPI under ``mpirun``) is alone: N processes would train N models apart, each as rank 0
of 1.

Launchers are nested: a batch script in an allocation of 8 tasks calls ``mpirun -np 4``, and Slurm's variables reach the
ranks, too. So the table is in the order in which launchers are likely to be inside each other, the innermost first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from hvdplus.transport import TransportError


class Launcher(NamedTuple):
    """One row of the table: how to recognise a launcher, and how to use it so that ranks reach each other."""

    name: str
    size: str
    """Variable that holds the number of ranks; empty: the launcher announces none."""
    rank: str
    """Variable that holds the number of this rank."""
    way_out: str
    marks: tuple[str, ...] = ()
    """Further variables that this launcher sets: without them ``size`` comes from elsewhere."""
    silent: bool = False
    """Whether it tells neither MPI nor Horovod of the ranks, so that only torch.distributed works."""


_ANOTHER_MPI = "Start the job with the mpirun of the MPI that mpi4py (or Horovod) was built with"
_TORCHRUN = (
    "Only torch.distributed hears torchrun, and it carries PyTorch's tensors: with TensorFlow, start the job with "
    "mpirun or horovodrun; in PyTorch, leave HVDPLUS_TRANSPORT at auto or torch."
)

LAUNCHERS = (
    Launcher("torchrun", "WORLD_SIZE", "RANK", _TORCHRUN, ("TORCHELASTIC_RUN_ID", "RANK"), silent=True),
    Launcher(
        "horovodrun --gloo",
        "HOROVOD_SIZE",
        "HOROVOD_RANK",
        "Only Horovod hears this launcher: run without HVDPLUS_TRANSPORT=mpi4py, or start the job with mpirun.",
    ),
    Launcher(
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        f"{_ANOTHER_MPI}, or, if this Horovod was built with Gloo alone, with `horovodrun --gloo`.",
    ),
    Launcher("mpirun (MVAPICH2)", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", f"{_ANOTHER_MPI}."),
    Launcher(
        "mpiexec (MPICH, Intel MPI) or srun --mpi=pmi2",
        "PMI_SIZE",
        "PMI_RANK",
        f"{_ANOTHER_MPI}; under Slurm `srun --mpi=pmix` reaches Open MPI.",
    ),
    Launcher("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", f"{_ANOTHER_MPI}."),
    Launcher("mpiexec (PALS)", "", "PALS_RANKID", f"{_ANOTHER_MPI}."),
    Launcher("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "Name the MPI (`flux run -o mpi=...`), or use mpirun."),
    Launcher(
        "srun --mpi=pmix",
        "SLURM_STEP_NUM_TASKS",
        "PMIX_RANK",
        "The MPI in use does not speak PMIx: try another of `srun --mpi=list`, or mpirun inside the batch script.",
        ("PMIX_RANK",),
    ),
    Launcher("a launcher over PMIx", "", "PMIX_RANK", f"{_ANOTHER_MPI}."),
    Launcher(
        "srun",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID",
        "Start them with `srun --mpi=pmix`, or with mpirun or horovodrun inside the batch script; PyTorch needs "
        "neither, if HVDPLUS_TRANSPORT is auto or torch.",
        silent=True,
    ),
    # Such as Kubernetes' operators for PyTorch set.
    Launcher("the environment", "WORLD_SIZE", "RANK", _TORCHRUN, ("RANK", "MASTER_ADDR", "MASTER_PORT"), silent=True),
    Launcher("the environment", "WORLD_SIZE", "RANK", _TORCHRUN, ("RANK", "LOCAL_RANK")),
)
"""``SLURM_NTASKS`` is not here: it counts allocated tasks, also where a single plain process runs."""


class Announced(NamedTuple):
    """A launcher's variables, as this process sees them."""

    launcher: Launcher
    size: int | None
    """Number of ranks; None: it did not say."""
    rank: int | None

    def __str__(self) -> str:
        pairs = ((self.launcher.size, self.size), (self.launcher.rank, self.rank))
        return ", ".join(f"{name}={value}" for name, value in pairs if name and value is not None)


def announced(environ: Mapping[str, str] = os.environ) -> list[Announced]:
    """All launchers that left their variables, the innermost first; empty: the process was started by itself."""
    found = []
    for launcher in LAUNCHERS:
        size, rank = _number(environ, launcher.size), _number(environ, launcher.rank)
        known = size if launcher.size else rank
        if known is not None and all(mark in environ for mark in launcher.marks):
            found.append(Announced(launcher, size, rank))
    return found


def heard(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether MPI or Horovod hears a launcher of this process."""
    return any(not one.launcher.silent and one.launcher.name != "the environment" for one in announced(environ))


def unheard(environ: Mapping[str, str] = os.environ) -> Announced | None:
    """The innermost launcher, if it started several ranks and only torch.distributed hears it; else None.

    What it was started by itself (``srun torchrun``, one on every node) knows nothing of its ranks.
    """
    nearest = next(iter(announced(environ)), None)
    return nearest if nearest is not None and nearest.launcher.silent and nearest.size != 1 else None


def check_reachable(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse ranks that neither MPI nor Horovod can connect, before MPI starts and fails with an error of its own.

    Raises:
        TransportError: ``torchrun`` or a plain ``srun`` started several ranks.
    """
    nearest = unheard(environ)
    if nearest is not None:
        raise TransportError(
            f"{nearest.launcher.name} started {nearest.size} ranks ({nearest}) without telling MPI or Horovod of each "
            f"other: they would train apart. {nearest.launcher.way_out}"
        )


def check_size(transport: str, size: int, environ: Mapping[str, str] = os.environ) -> None:
    """Compare the announced number of ranks with the transport's.

    Args:
        transport: name of the transport, for the message.
        size: number of ranks that it connects.

    Raises:
        TransportError: the transport connects another number of ranks than the launcher started.
    """
    found = announced(environ)
    if not found or (size > 1 and any(one.size == size for one in found)):
        return  # one launcher announced this number, and so connected these ranks
    nearest = found[0]
    at_least = nearest.size if nearest.size is not None else (nearest.rank or 0) + 1
    if at_least > size or nearest.size not in (size, None):
        ranks = f"{at_least} ranks" if nearest.size is not None else f"at least {at_least} ranks"
        raise TransportError(
            f"{nearest.launcher.name} started {ranks} ({nearest}), but the transport {transport} connects "
            f"{size} here: groups of ranks would train apart. {nearest.launcher.way_out}"
        )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "") if name else ""
    return int(value) if value.isdecimal() else None
