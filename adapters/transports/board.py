"""What ranks of ``torch.distributed`` tell each other outside of all sums, over the store at which they met.

A rank that waits long says so here, and a rank that ends as well: whoever waits for it can name it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from hvdplus.transport import TransportError, check_same_call

TELL_SECONDS = 10.0
"""How long ranks that make different calls wait for each other's words."""


def missing(waits: Mapping[int, str], words: str) -> str:
    """Who is not in the call ``words``, and where they are instead. ``waits``: other rank -> its call; empty: none."""
    elsewhere = [f"Rank {rank} waits in: {theirs}." for rank, theirs in waits.items() if theirs not in ("", words)]
    absent = [str(rank) for rank, theirs in waits.items() if not theirs]
    if absent:
        elsewhere.append(f"It is not known to wait anywhere: rank {', '.join(absent)}.")
    return " ".join(elsewhere)


def too_long(rank: int, seconds: float, words: str, absent: str, timeout_seconds: float) -> TransportError:
    """The error of a rank that has waited longer than it may. ``absent``: see ``missing``."""
    return TransportError(
        f"Rank {rank} has waited {seconds:.0f} seconds in: {words}. {absent} Where ranks may have to wait longer, "
        f"raise HVDPLUS_TIMEOUT_SECONDS. Received: {timeout_seconds:g}"
    )


class Board:
    """Notes of all ranks, each under its rank. A store that has gone, with the rank that held it, has none."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """``store``: a ``torch.distributed.Store`` with a prefix of these ranks' own."""
        self._store, self.rank, self.size = store, rank, size
        self._left = False

    def wait_in(self, words: str) -> None:
        """This rank has waited in a call for some time."""
        self._write("waits", words)

    def go_on(self) -> None:
        """It waits no longer."""
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(f"waits.{self.rank}")

    def leave(self, why: str = "has ended") -> None:
        """This rank ends; only the first reason counts."""
        if not self._left:
            self._left = True
            self._write("left", why)

    def gone(self) -> str:
        """Which ranks have ended, and why; empty: none is known to."""
        left = {rank: why for rank in range(self.size) if rank != self.rank and (why := self._read("left", rank))}
        return " ".join(f"Rank {rank} {why}." for rank, why in left.items())

    def missing(self, words: str) -> str:
        """See ``missing``."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        return missing({rank: self._read("waits", rank) for rank in others}, words)

    def complain(self, call: str, words: str, hint: str) -> None:
        """Ranks make different calls: raise TransportError, which quotes two of them, on every rank.

        Args:
            call: its kind and number, by which ranks find each other.
        """
        self._write(f"call.{call}", words)
        deadline, told = time.monotonic() + TELL_SECONDS, [""] * self.size
        told[self.rank] = words
        while not all(told) and time.monotonic() < deadline:
            told = [known or self._read(f"call.{call}", rank) for rank, known in enumerate(told)]
            time.sleep(0.01)
        check_same_call([theirs or "a call that it did not tell of" for theirs in told], hint)
        raise TransportError(f"Rank {self.rank} makes another call than a rank that has ended.{hint} Received: {words}")

    def fail(self, error: BaseException) -> None:
        """An exception ends this rank."""
        first = next(iter(str(error).splitlines()), "")
        self.leave(f"has ended with {type(error).__name__}: {first}".rstrip(".: "))

    def _write(self, key: str, value: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{key}.{self.rank}", value)

    def _read(self, key: str, rank: int) -> str:
        with contextlib.suppress(RuntimeError):
            if self._store.check([f"{key}.{rank}"]):
                return bytes(self._store.get(f"{key}.{rank}")).decode()
        return ""
