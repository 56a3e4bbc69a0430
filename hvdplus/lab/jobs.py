"""A job in a lab: its output as it comes, its end, and what its hosts sent."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from hvdplus.lab.network import Lab


class Result(NamedTuple):
    """How a job ended."""

    exit_code: int
    output: str
    """Standard output and standard error of all ranks."""
    bytes_sent: dict[str, int]
    """What each host put on its link while the job ran."""


class Job:
    """A running job: iterate over it for its output, line by line; ``wait`` for its end. It ends with its ``with``."""

    def __init__(self, lab: Lab, command: Sequence[str], timeout_seconds: float, **how: Any):
        self._lab = lab
        self._sent_before = lab.bytes_sent()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C comes to us, and we end the job
            **how,
        )
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + timeout_seconds
        self._printed: list[str] = []
        self._unread: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        # A thread, so that a job whose output nobody reads just now is not held up by a full pipe.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return "".join(self._printed)

    def __iter__(self) -> Iterator[str]:
        """Lines as they come, without the line's end. Raises TimeoutError as `wait` does."""
        while True:
            try:
                line = self._unread.get(timeout=max(0.0, self._deadline - time.monotonic()))
            except queue.Empty:
                self._give_up()
            if line is None:
                self._unread.put(None)  # for whoever iterates again
                return
            yield line.rstrip("\n")

    def wait(self) -> Result:
        """Wait for the end.

        Raises:
            TimeoutError: it took longer than ``timeout_seconds`` from its start; every process was ended.
        """
        try:
            exit_code = self.process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._give_up()
        bytes_sent = {host: count - self._sent_before[host] for host, count in self._lab.bytes_sent().items()}
        self._reader.join()
        return Result(exit_code, self.output, bytes_sent)

    def stop(self) -> None:
        """End every process of the job at once. Safe to repeat."""
        if self.process.poll() is None:
            # Rather the first process of the job's namespace than `unshare` around it: that returns when all are gone.
            try:
                first = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            except OSError:
                first = []
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(first[0]) if first else self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _give_up(self) -> NoReturn:
        self.stop()
        raise TimeoutError(f"The job did not end in {self._timeout_seconds:g} s. It printed:\n{self.output}")

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._printed.append(line)
                self._unread.put(line)
        self._unread.put(None)
