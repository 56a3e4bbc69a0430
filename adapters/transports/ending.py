"""The end of a rank that has failed: soon, so that the others do not wait for it. And of one that waits too long."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from hvdplus.adapters.transports.board import too_long

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


LOOK_SECONDS, TOLD_SECONDS = 1.0, 3.0
"""How often ``Patience`` looks; what it gives other ranks, before it ends the job, to say what they wait for."""


class Patience:
    """Ends this process if it waits too long in one call of a library that cannot be given a time.

    A thread looks after it. It knows this rank's call alone: ranks that print nothing are those that are missing.
    """

    def __init__(self, rank: int, seconds: float, grace: float = 0.0) -> None:
        """
        Args:
            seconds: see ``HVDPLUS_TIMEOUT_SECONDS``.
            grace: more seconds, for somebody else to end the job, who knows which ranks are missing.
        """
        self._rank, self._seconds, self._grace = rank, seconds, grace
        self._calls: dict[Any, tuple[float, str]] = {}
        self._over = False
        threading.Thread(target=self._watch, name="hvdplus-patience", daemon=True).start()

    @contextlib.contextmanager
    def waits(self, words: str) -> Iterator[None]:
        """The call that this rank waits in."""
        key = object()
        self.begin(key, words)
        try:
            yield
        finally:
            self.end(key)

    def begin(self, key: Any, words: str) -> None:
        """A call begins that this rank waits in; for those that do not begin and end in one place."""
        self._calls[key] = time.monotonic(), words

    def end(self, key: Any) -> None:
        """The call that began as ``key`` is over, if one did."""
        self._calls.pop(key, None)

    def close(self) -> None:
        """Stop watching: this transport is over."""
        self._over = True

    def _watch(self) -> None:
        while not self._over:
            time.sleep(min(LOOK_SECONDS, self._seconds / 4))
            calls = list(self._calls.items())
            if not calls:
                continue
            key, call = min(calls, key=lambda item: item[1][0])
            if time.monotonic() - call[0] <= self._seconds + self._grace:
                continue
            absent = "Ranks that say nothing like this are missing."
            error = too_long(self._rank, time.monotonic() - call[0], call[1], absent, self._seconds)
            print(f"hvdplus: {error}", file=sys.stderr, flush=True)
            time.sleep(TOLD_SECONDS)
            if self._calls.get(key) is call and not self._over:
                sys.stdout.flush()
                os._exit(1)  # nothing else ends a thread that waits in a library
