"""A lab without root: the program starts anew inside namespaces of its own, in which it may do as root does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

INSIDE = "HVDPLUS_LAB_INSIDE"
"""Set where the program has been started anew."""
ENTER = ("unshare", "--user", "--map-root-user", "--mount", "--net")
OWN_RUN = 'mount -t tmpfs tmpfs /run && exec "$@"'
"""Where ``ip`` keeps its namespaces belongs to the real root."""


def refused() -> str | None:
    """Why there can be no namespaces of a user's own here, in one sentence; None if there can."""
    if not shutil.which("unshare"):
        return "The lab needs unshare (Debian: util-linux)."
    tried = subprocess.run([*ENTER, "sh", "-c", OWN_RUN, "sh", "true"], capture_output=True, text=True)
    if tried.returncode:
        return f"This kernel lets only root make networks of its own: {tried.stderr.strip()}"
    return None


def enter(arguments: Sequence[str]) -> None:
    """If this is not root, and the kernel allows, start Python anew with these arguments, as root of namespaces of its
    own; else return."""
    if os.geteuid() == 0 or os.environ.get(INSIDE) or refused():
        return
    sys.stdout.flush()
    command = [*ENTER, "sh", "-c", OWN_RUN, "sh", sys.executable, *arguments]
    os.execvpe(command[0], command, {**os.environ, INSIDE: "1"})
