"""The end of a rank that has failed: soon, so that the others do not wait for it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

SECONDS_TO_END = 20
"""Time that a failed rank has for an orderly exit. Then it is killed."""


def on_exception(do: Callable[[BaseException], None]) -> None:
    """Call ``do`` with an exception that ends this process, once it was printed. An interactive session goes on."""
    previous: Callable[..., Any] = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            previous(kind, error, trace)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # nobody may read what is printed any more
            if not hasattr(sys, "ps1"):
                do(error)

    sys.excepthook = hook


def end_soon() -> None:
    """Bound the time that this process takes to exit.

    The native libraries' own ends can wait for the other ranks, and then the launcher never learns that this one has
    failed. A timer of the operating system works while the interpreter is being taken down, too.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS_TO_END)
