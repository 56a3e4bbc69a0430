"""Horovod's source: which release, and the changes that let it build on today's frameworks."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hvdplus.cli.horovod.tools import InstallError

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


class Patch(NamedTuple):
    """One change to one file of Horovod's source: ``old`` must occur exactly ``times`` times."""

    path: str
    old: str
    new: str
    times: int
    why: str


_PYTORCH = "horovod/torch/CMakeLists.txt"
_TENSORFLOW = "horovod/tensorflow/CMakeLists.txt"
PATCHES = (
    Patch("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)", 1, "TensorFlow wants C++17"),
    Patch(
        _PYTORCH,
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD $ENV{HVDPLUS_CXX_STANDARD})",
        1,
        "PyTorch wants C++17, and newer ones C++20",
    ),
    Patch(
        _TENSORFLOW,
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
        1,
        "XLA's headers moved; the file only serves jit-compiled TensorFlow on GPUs",
    ),
    Patch(
        "third_party/flatbuffers/include/flatbuffers/stl_emulation.h",
        "  const size_type count_;",
        "  size_type count_;",
        1,
        "GCC 14 refuses the assignment to it",
    ),
    # Three of upstream's, which no release has.
    Patch(
        "horovod/common/common.h",
        "#include <memory>\n",
        "#include <memory>\n#include <stdexcept>\n",
        1,
        "from GCC 13 on no other header brings it along (horovod#3957)",
    ),
    Patch(
        "horovod/common/group_table.h",
        "#include <queue>\n",
        "#include <queue>\n#include <string>\n",
        1,
        "from GCC 13 on no other header brings it along (horovod#3957)",
    ),
    Patch(
        "horovod/runner/mpi_run.py",
        "elif 'MPICH' in output:",
        "elif 'MPICH' in output or 'HYDRA' in output:",
        1,
        "so MPICH's mpirun names itself since 4.0 (horovod#3984)",
    ),
    # Python 3.12 has no distutils; setuptools' stand-in is not everywhere where jobs run.
    Patch(
        _PYTORCH,
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_path('include'))",
        1,
        "Python 3.12 has no distutils",
    ),
    Patch(
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable\n",
        "from shutil import which as find_executable\n",
        1,
        "Python 3.12 has no distutils",
    ),
    Patch("CMakeLists.txt", 'string(REPLACE "-O2" "-O3"', 'string(REPLACE "-O2 -g" "-O3"', 3, "no debug information"),
    Patch(
        "CMakeLists.txt",
        "project(horovod CXX)\n",
        "project(horovod CXX)\n"
        "set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\n"
        'set(CMAKE_INSTALL_RPATH "$ENV{HVDPLUS_RPATH}")\n'
        'set(CMAKE_INSTALL_RPATH_USE_LINK_PATH "$ENV{HVDPLUS_RPATH_USE_LINK_PATH}")\n',
        1,
        "a wheel that works in another environment",
    ),
)


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the verified archive into ``folder`` and return the source directory."""
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
        else:  # Python before 3.10.12 and 3.11.4; the archive's hash is known
            tar.extractall(folder)
    return folder / f"horovod-{VERSION}"


def apply_patches(source: Path, patches: Sequence[Patch] = PATCHES) -> None:
    """Make all changes. Raises `InstallError` if one does not fit exactly."""
    for patch in patches:
        path = source / patch.path
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text.count(patch.old) != patch.times:
            raise InstallError(
                f"A change to Horovod's source does not fit: {patch.path} should hold {patch.old.strip()!r} "
                f"{patch.times} time(s), found {text.count(patch.old)}. This hvdplus knows Horovod {VERSION} only; "
                "update it with: pip install --upgrade hvdplus"
            )
        path.write_text(text.replace(patch.old, patch.new), encoding="utf-8")
