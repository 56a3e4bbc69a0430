"""Whether and how Horovod is built for CUDA devices: NVIDIA's toolkit, and NCCL, which sums gradients between GPUs.

Horovod has GPU operations for all frameworks of a build or for none. Its CMake files find neither toolkit nor NCCL
where centres, conda and pip put them; here they are found, and told to it by the variables that it documents.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from hvdplus.cli.horovod.frameworks import Framework
from hvdplus.cli.horovod.tools import InstallError, output_of, which

OWN_CHOICE = "HOROVOD_GPU"
"""Variables that begin so say what the user wants of GPUs: then nothing here is decided."""


class Toolkit(NamedTuple):
    """A CUDA toolkit: its folder and its version, such as ``12.6``."""

    home: str
    version: str


class Nccl(NamedTuple):
    """An NCCL: its version, the folders of ``nccl.h`` and of its library, and whether that is a shared one."""

    version: str
    include: str
    lib: str
    shared: bool


class Gpu(NamedTuple):
    """What a build for CUDA devices uses."""

    toolkit: Toolkit
    nccl: Nccl

    def __str__(self) -> str:
        return f"CUDA {self.toolkit.version} and NCCL {self.nccl.version}"

    @property
    def run_path(self) -> tuple[str, ...]:
        """Folders in which the loader has to look for NCCL: none if it is linked in or in the system's."""
        return (self.nccl.lib,) if self.nccl.shared and not self.nccl.lib.startswith(("/usr/lib", "/lib")) else ()

    def variables(self) -> dict[str, str]:
        """Return the variables that tell Horovod's build and PyTorch's of this."""
        told = {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_CUDA_HOME": self.toolkit.home,
            "CUDA_HOME": self.toolkit.home,  # where PyTorch looks for headers
            "HOROVOD_NCCL_INCLUDE": self.nccl.include,
            "HOROVOD_NCCL_LIB": self.nccl.lib,
        }
        if "HOROVOD_NCCL_INCLUDE" not in os.environ and "HOROVOD_NCCL_LIB" not in os.environ:
            # CMake looks here before it looks into CMAKE_PREFIX_PATH, and only after that into the two above.
            told["HOROVOD_NCCL_HOME"] = str(Path(self.nccl.include).parent)
        if self.nccl.shared and "HOROVOD_NCCL_LINK" not in os.environ:
            told["HOROVOD_NCCL_LINK"] = "SHARED"  # as frameworks do, so that there is one NCCL in the process
        return told


class Lack(NamedTuple):
    """Why there is no build for GPUs although a framework uses them, and what mends it (``""``: nothing does)."""

    why: str
    mend: str


def find_gpu(frameworks: Sequence[Framework]) -> Gpu | Lack | None:
    """Return what to build for GPUs with, or what lacks for it; None where no framework uses GPUs.

    Raises:
        InstallError: a variable of Horovod's own names a folder that does not hold what it should.
    """
    if not any(each.cuda or each.rocm for each in frameworks):
        return None
    if rocm := next((each for each in frameworks if each.rocm), None):
        return Lack(f"{rocm} is built for AMD's ROCm, on whose present releases Horovod does not build", "")
    if other := next((each for each in frameworks if not each.cuda), None):
        return Lack(
            f"{other} is built for CPUs, and Horovod has GPU operations for all frameworks or for none",
            f"leave it out (--without-{other.module}), or install {other.module} for CUDA",
        )
    toolkit = find_toolkit()
    wanted = frameworks[0].cuda.partition(".")[0]
    if toolkit is None:
        return Lack(
            "no CUDA toolkit with nvcc was found (by HOROVOD_CUDA_HOME, CUDA_HOME, EBROOTCUDA, on PATH, in "
            "/usr/local/cuda)",
            f"load the module of CUDA {wanted}, or set HOROVOD_CUDA_HOME",
        )
    major = toolkit.version.partition(".")[0]
    if unlike := next((each for each in frameworks if each.cuda.partition(".")[0] != major), None):
        return Lack(
            f"{unlike} is built for CUDA {unlike.cuda}, and the toolkit in {toolkit.home} is CUDA {toolkit.version}",
            f"load the module of CUDA {unlike.cuda.partition('.')[0]}, or set HOROVOD_CUDA_HOME"
            + (f"; or leave it out (--without-{unlike.module})" if len(frameworks) > 1 else ""),
        )
    nccl = find_nccl(toolkit)
    if nccl is None:
        return Lack(
            "NCCL was not found, nccl.h and its library (by HOROVOD_NCCL_HOME, NCCL_HOME, EBROOTNCCL, CONDA_PREFIX, "
            f"in pip's nvidia-nccl-cu{major}, in {toolkit.home} and /usr)",
            f"load the module of NCCL, or set HOROVOD_NCCL_HOME, or: pip install nvidia-nccl-cu{major}",
        )
    return Gpu(toolkit, nccl)


def find_toolkit() -> Toolkit | None:
    """Return the CUDA toolkit that the user has named, else one that is loaded, on PATH, or in NVIDIA's own place."""
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "EBROOTCUDA"):
        if home := os.environ.get(name):
            if toolkit := _toolkit(home):
                return toolkit
            if name == "HOROVOD_CUDA_HOME":
                raise InstallError(f"{name} must be the folder of a CUDA toolkit, with bin/nvcc. Received: {home}")
    if nvcc := which("nvcc"):
        # A wrapper or a link may be far from the toolkit: nvcc itself tells where that is.
        told = re.search(r"TOP=(\S+)", output_of(nvcc, "--dryrun", "-x", "cu", os.devnull))
        if toolkit := _toolkit(told[1] if told else str(Path(nvcc).parent.parent)):
            return toolkit
    return _toolkit("/usr/local/cuda")


def _toolkit(home: str) -> Toolkit | None:
    found = re.search(r"release (\d+\.\d+)", output_of(f"{home}/bin/nvcc", "--version"))
    return Toolkit(str(Path(home).resolve()), found[1]) if found else None


def find_nccl(toolkit: Toolkit) -> Nccl | None:
    """Return the NCCL that the user has named, else the first of those that modules, conda, pip, the toolkit and the
    system have."""
    home, include, lib = (os.environ.get(f"HOROVOD_NCCL_{name}", "") for name in ("HOME", "INCLUDE", "LIB"))
    if home or include or lib:
        if found := _nccl(home, include, lib):
            return found
        named = {f"HOROVOD_NCCL_{name}": value for name, value in (("HOME", home), ("INCLUDE", include), ("LIB", lib))}
        raise InstallError(
            "HOROVOD_NCCL_HOME must be a folder with include/nccl.h and lib/libnccl.so, or HOROVOD_NCCL_INCLUDE and "
            "HOROVOD_NCCL_LIB the folders of these two. Received: "
            + ", ".join(f"{name}={value}" for name, value in named.items() if value)
        )
    return next((found for place in _places(toolkit) if (found := _nccl(place))), None)


def _places(toolkit: Toolkit) -> Iterator[str]:
    """Folders that may have NCCL, in the order in which they win."""
    yield from filter(None, map(os.environ.get, ("NCCL_HOME", "EBROOTNCCL", "CONDA_PREFIX")))
    yield sys.prefix  # a conda environment that is not activated
    try:
        wheel = metadata.distribution(f"nvidia-nccl-cu{toolkit.version.partition('.')[0]}")
        yield str(wheel.locate_file("nvidia/nccl"))
    except metadata.PackageNotFoundError:
        pass
    yield toolkit.home
    yield "/usr"


def _nccl(home: str, include: str = "", lib: str = "") -> Nccl | None:
    """Return the NCCL in ``home``, or in the folders of its header and its library where these are given."""
    header = Path(include or f"{home}/include") / "nccl.h"
    numbers = (
        dict(re.findall(r"#define NCCL_(MAJOR|MINOR|PATCH) +(\d+)", header.read_text())) if header.is_file() else {}
    )
    if len(numbers) != 3:
        return None
    version = "{MAJOR}.{MINOR}.{PATCH}".format(**numbers)
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    folders = [lib] if lib else [f"{home}/lib", f"{home}/lib64", f"{home}/lib/{multiarch}"]
    for folder in folders:
        # pip's wheel has no libnccl.so, by which linkers look for it; a patch makes CMake take the other name.
        for name, shared in (("libnccl.so", True), ("libnccl.so.2", True), ("libnccl_static.a", False)):
            if (Path(folder) / name).exists():
                return Nccl(version, str(header.parent.absolute()), str(Path(folder).absolute()), shared)
    return None
