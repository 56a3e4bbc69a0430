"""Programs of this environment: where they are and what they print. And the error that ends an installation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path


class InstallError(Exception):
    """A reason for not building, and the command that mends it, in words for the user."""


def environment() -> dict[str, str]:
    """Return the process environment with this Python's scripts first on PATH.

    cmake, mpicxx and mpirun may come from wheels, and the environment need not be activated.
    """
    scripts = dict.fromkeys([str(Path(sys.executable).parent), sysconfig.get_path("scripts")])
    return {**os.environ, "PATH": os.pathsep.join([*scripts, os.environ.get("PATH", os.defpath)])}


def which(*names: str) -> str | None:
    """Return the first of ``names`` that is on the PATH of `environment`, as an absolute path."""
    path = environment()["PATH"]
    return next((found for name in names if (found := shutil.which(name, path=path))), None)


def output_of(*command: str) -> str:
    """Return the output of ``command``, from either stream, or ``""`` if it fails."""
    try:
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout or done.stderr) if done.returncode == 0 else ""


def inside(path: str | Path) -> bool:
    """Return whether ``path`` lies in this environment."""
    return Path(path).resolve().is_relative_to(Path(sys.prefix).resolve())
