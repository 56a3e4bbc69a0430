"""The cache of wheels: one for each combination of everything that a build depends on.

A wheel from the cache must work in another environment, so it may hold no path of this one. The only such path is the
run path to ``libmpi``; it is written relative to the extension (``$ORIGIN/...``) when MPI lives inside the
environment, and is part of the cache key when it does not. PyTorch's and TensorFlow's libraries need no run path:
Horovod's modules import the framework first, and the loader then finds them by name.
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


def run_path(stack: Stack) -> str:
    """Return the run path of the extensions: MPI's libraries, relative where they live in this environment."""
    folder = Path(sysconfig.get_path("platlib")) / "horovod" / "torch"  # TensorFlow's lies as deep
    entries = []
    for directory in stack.mpi.library_dirs if stack.mpi else ():
        inside = Path(directory).resolve().is_relative_to(Path(sys.prefix).resolve())
        entries.append("$ORIGIN/" + os.path.relpath(directory, folder) if inside else directory)
    return ";".join(entries)


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
