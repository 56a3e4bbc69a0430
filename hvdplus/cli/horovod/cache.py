"""The cache of wheels: one for each combination of everything that a build depends on.

A wheel from the cache must work in another environment, so it may hold no path of this one. The only such paths are the
run paths to ``libmpi`` and ``libnccl``; they are written relative to the extension (``$ORIGIN/...``) where the library
lives inside the environment, and are part of the cache key where it does not. PyTorch's and TensorFlow's libraries need
no run path: Horovod's modules import the framework first, and the loader then finds them by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from hvdplus.cli.horovod.patches import PATCHES, VERSION
from hvdplus.cli.horovod.stack import Stack
from hvdplus.cli.horovod.tools import inside


def run_path(stack: Stack) -> str:
    """Return the run path of the extensions: MPI's and NCCL's libraries, relative where they live in this
    environment."""
    folder = Path(sysconfig.get_path("platlib")) / "horovod" / "torch"  # TensorFlow's lies as deep
    directories = [*(stack.mpi.library_dirs if stack.mpi else ()), *(stack.gpu.run_path if stack.gpu else ())]
    return ";".join("$ORIGIN/" + os.path.relpath(each, folder) if inside(each) else each for each in directories)


def cache_key(stack: Stack) -> dict[str, str]:
    """Return everything by which builds of Horovod differ, in words."""
    try:
        cpu = set(Path("/proc/cpuinfo").read_text().split()) & {"f16c", "avx", "fma"}
    except OSError:
        cpu = set()
    key = {
        "horovod": VERSION,
        "patches": hashlib.sha256(repr(PATCHES).encode()).hexdigest()[:8],
        "python": sysconfig.get_config_var("EXT_SUFFIX") or sys.version,
        "platform": sysconfig.get_platform(),
        "libc": " ".join(platform.libc_ver()),
        "compiler": stack.compiler_version,
        "cpu": " ".join(sorted(cpu)),  # Horovod builds for these if the machine has them
        "mpi": stack.mpi.version if stack.mpi else "none",
        "gpu": f"{stack.gpu}{'' if stack.gpu.nccl.shared else ', static'}" if stack.gpu else "none",
        "run path": run_path(stack),
    }
    key |= {framework.module: str(framework) for framework in stack.frameworks}
    key |= stack.custom
    if stack.custom:
        key["prefix"] = sys.prefix  # such a build may hold paths of this environment
    return key


def cache_folder(stack: Stack) -> Path:
    """Return the folder of this stack's wheel in the cache. Its name is readable and ends in a hash of the whole
    key."""
    key = cache_key(stack)
    parts = [VERSION, f"py{sys.version_info[0]}.{sys.version_info[1]}", *map(str, stack.frameworks), key["mpi"]]
    name = re.sub(r"[^\w.+-]+", "", "-".join(parts).replace(" ", "").lower())
    return cache_root() / f"{name}-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]}"


def cache_root() -> Path:
    """Return ``$XDG_CACHE_HOME/hvdplus/horovod`` (default ``~/.cache``)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdplus" / "horovod"


def cached_wheel(folder: Path) -> Path | None:
    """Return the wheel in ``folder`` of the cache, if there is one."""
    return next(iter(sorted(folder.glob("horovod-*.whl"))), None)


def store(source: Path, folder: Path, key: Mapping[str, str] | None = None) -> None:
    """Copy ``source`` into ``folder`` of the cache, at once: a simultaneous reader sees all of it or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    if key is not None:
        (folder / "key.json").write_text(json.dumps(key, indent=2) + "\n", encoding="utf-8")
    partial = folder / f".{source.name}.{os.getpid()}"
    shutil.copyfile(source, partial)
    partial.replace(folder / source.name)
