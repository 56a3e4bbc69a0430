"""The software that Horovod is built for and with: frameworks, MPI, CUDA, compiler. No framework is imported."""

from __future__ import annotations

import argparse
import os
import re
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from hvdplus.cli.horovod.cuda import OWN_CHOICE, Gpu, Lack, find_gpu
from hvdplus.cli.horovod.frameworks import Framework, find_frameworks
from hvdplus.cli.horovod.tools import InstallError, output_of, which

BYTES_PER_JOB = 1.5 * 2**30
"""Peak of one compiler job, on PyTorch's headers."""

# A build with one of these is the user's own (GPU operations, oneCCL, ...): keep CMake's run paths to those libraries.
CUSTOM_BUILD = re.compile(
    r"HOROVOD_(GPU|CUDA|NCCL|ROCM|CCL|DDL|CPU_OPERATIONS|ALLOW_MIXED|BUILD|DEBUG|WITH_NVTX|WITHOUT_NVTX)|CCL_|NCCL_HOME"
)
CRAY = ("CRAYPE_VERSION", "PE_ENV")
"""Variables of Cray's programming environment. There ``CC`` is the C++ compiler, and brings MPI along."""


class Mpi(NamedTuple):
    """An MPI of this environment: compiler wrapper, launcher, name with version, and folders of its libraries."""

    wrapper: str
    mpirun: str | None
    version: str
    library_dirs: tuple[str, ...]


class Stack(NamedTuple):
    """Everything a build depends on."""

    frameworks: tuple[Framework, ...]
    mpi: Mpi | None
    compiler: str
    compiler_version: str
    custom: dict[str, str]
    gpu: Gpu | None = None
    lack: Lack | None = None
    """Why the build is for CPUs although a framework uses GPUs; None if none does, or if the user asked for it."""

    @property
    def users_gpu(self) -> bool:
        """Whether the user's own variables say what to build for GPUs."""
        return any(name.startswith(OWN_CHOICE) for name in self.custom)

    @property
    def wants_nccl(self) -> bool:
        """Whether the build has to have NCCL."""
        return self.gpu is not None or self.custom.get("HOROVOD_GPU_OPERATIONS") == "NCCL"


def cray_compiler() -> tuple[str, ...]:
    """Return the name of Cray's compiler wrapper where a Cray programming environment is loaded, else nothing."""
    return ("CC",) if any(name in os.environ for name in CRAY) else ()


def find_mpi(wanted: str | None = None) -> Mpi | None:
    """Return the MPI of the compiler wrapper ``wanted`` (a path, or a name on PATH), else of that which comes first on
    PATH: Cray's where its environment is loaded, this environment's own before the system's.

    Raises:
        InstallError: there is no program ``wanted``.
    """
    found = which(*([wanted] if wanted else [*cray_compiler(), "mpicxx", "mpic++", "mpicc"]))
    if not found:
        if wanted:
            raise InstallError("--mpicxx must be an MPI's C++ compiler wrapper: its path, or its name on PATH, such as "
                               f"mpicxx or CC. Received: {wanted}")  # fmt: skip
        return None
    wrapper = str(Path(found).absolute())
    if Path(wrapper).name in cray_compiler():  # it has no mpirun, and any other's would not fit
        version, mpirun = f"Cray MPICH {os.environ.get('CRAY_MPICH_VERSION', 'unknown')}", None
        question = "--cray-print-opts=libs"
    else:
        beside = Path(wrapper).parent
        mpirun = which(str(beside / "mpirun"), str(beside / "mpiexec"), "mpirun", "mpiexec")
        version, question = _mpi_version(output_of(mpirun, "--version") if mpirun else ""), "-show"
    dirs = re.findall(r"(?:^|\s)-L(\S+)", output_of(wrapper, question))
    return Mpi(wrapper, mpirun, version, tuple(dict.fromkeys(dirs)))


def _mpi_version(banner: str) -> str:
    """The name and version that mpirun's own words tell."""
    number = re.search(r"\d+\.\d+(\.\d+)?\S*", banner)
    name = "Open MPI" if "Open MPI" in banner or "OpenRTE" in banner else "MPICH" if "HYDRA" in banner else "MPI"
    return f"{name} {number[0] if number else 'unknown'}"


def find_stack(args: argparse.Namespace) -> Stack:
    """Return the stack of this environment. Raises `InstallError` if something that a build needs is missing; with
    ``--wheel``, no compiler is."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    if sys.prefix == sys.base_prefix and (stdlib / "EXTERNALLY-MANAGED").exists():
        raise InstallError(
            f"{sys.executable} is the system's own Python, which pip may not change. Make an environment first: "
            "python3 -m venv .venv && . .venv/bin/activate"
        )
    if not find_spec("pip"):
        raise InstallError(f"pip is missing in {sys.prefix}. Mend it with: {sys.executable} -m ensurepip")
    unwanted = [module for module in ("torch", "tensorflow") if getattr(args, f"without_{module}")]
    frameworks = tuple(framework for framework in find_frameworks() if framework.module not in unwanted)
    if not frameworks:
        left_out = f" (left out as asked: {', '.join(unwanted)})" if unwanted else ""
        raise InstallError(
            f"No PyTorch and no TensorFlow found in {sys.prefix}{left_out}. Horovod is built for what is there, so "
            "install one first: pip install torch, or: pip install tensorflow-cpu keras"
        )
    custom = {name: value for name, value in sorted(os.environ.items()) if CUSTOM_BUILD.match(name)}
    custom |= {name: os.environ[name] for name in ("CXXFLAGS", "LDFLAGS") if name in os.environ}
    mpi = None if args.without_mpi else find_mpi(args.mpicxx)
    if args.wheel:
        return Stack(frameworks, mpi, "", "none", custom)
    compiler, version = find_compiler()
    stack = Stack(frameworks, mpi, compiler, version, custom)
    if args.without_gpu:
        if stack.users_gpu:
            asked = " ".join(f"{name}={value}" for name, value in custom.items() if name.startswith(OWN_CHOICE))
            raise InstallError(f"--without-gpu contradicts {asked} in the environment: leave one of them out")
        return stack
    if stack.users_gpu:
        return stack
    found = find_gpu(frameworks)
    return stack._replace(lack=found) if isinstance(found, Lack) else stack._replace(gpu=found)


def find_compiler() -> tuple[str, str]:
    """Return (C++ compiler, its version). Raises `InstallError` without it, make or Python's headers."""
    compiler = which(*filter(None, [os.environ.get("CXX")]), *cray_compiler(), "c++", "g++", "clang++")
    if not compiler:
        raise InstallError("No C++ compiler found (looked for $CXX, c++, g++ and clang++). Mend it with: "
                           "sudo apt-get install g++ make")  # fmt: skip
    if not which("make"):
        raise InstallError("make is missing, and Horovod builds with it. Mend it with: sudo apt-get install make")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise InstallError(f"Python's headers are missing ({header}). Mend it with: sudo apt-get install python3-dev")
    return compiler, (output_of(compiler, "--version").splitlines() or ["unknown"])[0]


def default_jobs() -> int:
    """Return the number of compiler jobs that cores and free memory allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        free = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        free = None
    return max(1, min(cores, int(int(free[1]) * 1024 / BYTES_PER_JOB)) if free else cores)
