"""What starts a job's ranks on the laboratory's hosts, over the network that is being measured.

``mpirun`` is whichever comes first: Open MPI's, or MPICH's, which starts ranks by Hydra and has options of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdplus.adapters.transports.window import UCX

LAUNCHERS = ("mpi", "gloo", "torch")
TORCHRUN_PORT = 29500
"""On the first host, where torchruns meet."""
OB1 = "--mca pml ob1 --mca btl self,{shared_memory},tcp --mca btl_tcp_if_include eth0"
"""Ranks of one host share memory; hosts have a /dev/shm each, so between them there is only TCP."""
UCX_OVER_TCP = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
"""Else UCX would find that the hosts are one machine, and use its memory."""
LIBFABRIC_OVER_TCP = {"FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0"}


def launch(
    command: Sequence[str], hosts: Sequence[str], ranks_per_host: int, launcher: str, one_sided: bool, folder: Path
) -> tuple[list[str], dict[str, str]]:
    """(the command that starts ``command`` as ranks on ``hosts``, its variables).

    Args:
        launcher, one_sided: as of ``Lab.start``.
        folder: the laboratory's, with its ``ssh``.
    """
    variables = os.environ | {
        # First our ssh, then this Python's own launchers.
        "PATH": f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    # Unbuffered, `print` writes a line in pieces, and those of several ranks mix. To the ranks mpirun looks like a
    # terminal, so that their lines come at once anyway.
    variables.pop("PYTHONUNBUFFERED", None)
    if launcher == "torch":  # mpirun starts one on every host
        meet = f"--rdzv-backend c10d --rdzv-endpoint {hosts[0]}:{TORCHRUN_PORT}"
        here = f"--nnodes {len(hosts)} --nproc-per-node {ranks_per_host} {meet} --no-python"
        command = [*f"python -m torch.distributed.run {here}".split(), *command]
        ranks_per_host = 1
        variables.setdefault("HVDPLUS_TRANSPORT", "torch")  # the ranks inherit mpirun's variables, too
    ranks, slots = ranks_per_host * len(hosts), ",".join(f"{host}:{ranks_per_host}" for host in hosts)
    if launcher == "gloo":
        line = f"horovodrun --gloo -np {ranks} -H {slots} --network-interfaces eth0 --disable-cache"
    elif (version := _open_mpi(variables)) is None:
        how = f"-bind-to none -iface eth0 -launcher ssh -launcher-exec {folder}/bin/ssh"
        line = f"mpirun -n {ranks} -hosts {slots} {how}"
        variables |= UCX_OVER_TCP | LIBFABRIC_OVER_TCP
    else:
        scratch = tempfile.mkdtemp(dir=folder)
        if version < 5:
            shared_memory = "vader"
            how = (
                f"--map-by ppr:{ranks_per_host}:node --oversubscribe --mca plm rsh --mca plm_rsh_agent {folder}/bin/ssh"
            )
            how += f" --mca orte_tmpdir_base {scratch} --mca oob_tcp_if_include eth0"
        else:  # ranks are started by PRRTE, which has options of its own
            shared_memory = "sm"
            how = f"--map-by ppr:{ranks_per_host}:node:OVERSUBSCRIBE --prtemca plm ssh"
            how += f" --prtemca plm_ssh_agent {folder}/bin/ssh"
            how += f" --prtemca prte_tmpdir_base {scratch} --prtemca prte_if_include eth0"
        line = f"mpirun -np {ranks} -H {slots} --bind-to none {how} "
        line += UCX if one_sided else OB1.format(shared_memory=shared_memory)
        if one_sided:
            variables |= UCX_OVER_TCP
    return [*line.split(), *command], variables


def _open_mpi(variables: Mapping[str, str]) -> int | None:
    """The first number of Open MPI's version; None: ``mpirun`` is another one's, and starts ranks by Hydra."""
    try:
        told = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, env=variables, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return 4
    if "HYDRA" in told.stdout:
        return None
    version = re.search(r"Open MPI\)? (\d+)", told.stdout)
    return int(version[1]) if version else 4
