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
_TENSORFLOW_OPS = "horovod/tensorflow/mpi_ops.cc"
_FIND_NCCL = "cmake/Modules/FindNCCL.cmake"


def _without_gpu(variable: str) -> Patch:
    """Let the build say that a ``variable`` of FindPytorch is false, whatever PyTorch can do."""
    old = f'string(TOUPPER "${{{variable}}}" {variable})\n'
    new = f'if(NOT "$ENV{{HVDPLUS_WITHOUT_GPU}}" STREQUAL "")\n    set({variable} FALSE)\nendif()\n'
    why = f"{variable} is false in a build for CPUs"
    return Patch("cmake/Modules/FindPytorch.cmake", old, old + new, 1, why)


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
    # Open MPI 5 takes no long options with one dash, and 4 takes them with two as well.
    *(
        Patch("horovod/runner/mpi_run.py", old, new, 1, "mpirun of Open MPI 5")
        for old, new in (
            ("['-mca pml ob1', '-mca btl ^openib']", "['--mca pml ob1', '--mca btl ^openib']"),
            ("list(_OMPI_FLAGS), list(_NO_BINDING_ARGS)", "list(_OMPI_FLAGS), ['--bind-to none', '--map-by slot']"),
            ("'-mca btl_tcp_if_include {nics}'", "'--mca btl_tcp_if_include {nics}'"),
            ("f'-mca plm_rsh_args ", "f'--mca plm_rsh_args "),
        )
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
    # For GPUs.
    _without_gpu("Pytorch_CUDA"),
    _without_gpu("Pytorch_ROCM"),
    Patch(
        "horovod/common/ops/cuda/CMakeLists.txt",
        "set(CMAKE_CUDA_STANDARD 11)",
        "set(CMAKE_CUDA_STANDARD 14)",
        1,
        "nvcc does not compile GCC 14's headers as C++11 (horovod#4313)",
    ),
    # Architectures are those that nvcc lists, so CUDA 13's, too; but it has to be the nvcc that compiles.
    Patch(
        "cmake/build_utils.py",
        "for nvcc_bin in ['nvcc', cuda_nvcc]:",
        "for nvcc_bin in [cuda_nvcc, 'nvcc'] if 'HOROVOD_CUDA_HOME' in os.environ else ['nvcc', cuda_nvcc]:",
        1,
        "CUDA 13 lacks architectures of an older nvcc on PATH",
    ),
    # pip's wheel of NCCL has its library under this name alone. One folder after the other, so that NCCL's own wins.
    Patch(_FIND_NCCL, 'set(NCCL_LIBNAME "nccl")', "set(NCCL_LIBNAME nccl libnccl.so.2)", 1, "NCCL may be pip's wheel"),
    Patch(
        _FIND_NCCL,
        "        NAMES ${NCCL_LIBNAME}\n",
        "        NAMES ${NCCL_LIBNAME} NAMES_PER_DIR\n",
        1,
        "the named NCCL wins over the system's",
    ),
    Patch(_TENSORFLOW_OPS, "stream_executor::gpu::AsGpuStreamValue(", "StreamValue(", 12, "see the next one"),
    Patch(
        _TENSORFLOW_OPS,
        "#endif // TENSORFLOW_VERSION >= 2011000000\n#endif // HAVE_GPU\n",
        "#endif // TENSORFLOW_VERSION >= 2011000000\n"
        "static GpuStreamHandle StreamValue(stream_executor::Stream* stream) {\n"
        "#if TENSORFLOW_VERSION >= 2020000000\n"
        "  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);\n"
        "#else\n"
        "  return stream_executor::gpu::AsGpuStreamValue(stream);\n"
        "#endif\n"
        "}\n"
        "#endif // HAVE_GPU\n",
        1,
        "TensorFlow 2.21 has no AsGpuStreamValue",
    ),
    Patch("CMakeLists.txt", 'string(REPLACE "-O2" "-O3"', 'string(REPLACE "-O2 -g" "-O3"', 3, "no debug information"),
    # Less to compile: all files read the same large headers, and Gloo would be built twice. Files for GPUs were not
    # tried as one, so builds with them compile file by file.
    Patch(
        "CMakeLists.txt",
        "# TF\nadd_subdirectory(horovod/tensorflow)\n",
        '# TF\nif(NOT "$ENV{HVDPLUS_WITHOUT_GPU}" STREQUAL "")\n    set(CMAKE_UNITY_BUILD ON)\nendif()\n'
        "add_subdirectory(horovod/tensorflow)\n",
        1,
        "eight files are compiled as one",
    ),
    Patch(
        "CMakeLists.txt",
        "# Correctly wrap up json format\n",
        "set(CMAKE_UNITY_BUILD OFF)\n# Correctly wrap up json format\n",
        1,
        "Gloo's files cannot be compiled as one",
    ),
    Patch(
        "CMakeLists.txt",
        "(DEFINED Tensorflow_CXX17 AND Tensorflow_CXX17)",
        "(Tensorflow_CXX17 AND NOT Tensorflow_CXX11)",
        1,
        "TensorFlow takes PyTorch's Gloo where both have one ABI",
    ),
    Patch(
        _TENSORFLOW,
        "    if (Tensorflow_CXX17)\n       list(APPEND TF_LINKER_LIBS compatible17_gloo)\n",
        "    if (Tensorflow_CXX17 AND NOT Tensorflow_CXX11)\n       list(APPEND TF_LINKER_LIBS compatible17_gloo)\n",
        1,
        "see the one before",
    ),
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
    Patch(
        "CMakeLists.txt",
        "    find_package(MPI ${MPI_REQUIRED})\n",
        '    set(MPI_CXX_COMPILER "$ENV{HVDPLUS_MPICXX}" CACHE FILEPATH "")\n    find_package(MPI ${MPI_REQUIRED})\n',
        1,
        "the MPI of the wrapper that was found or named",
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
