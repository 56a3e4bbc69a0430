"""Long commands, run into a log file while the user sees how far they are."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from hvdplus.cli.horovod.tools import environment

HEARTBEAT_SECONDS = 15.0


class Progress:
    """Shows how far a command is: by a moving line on a terminal with rich, else by a plain line now and then."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._bar: Any = None
        self._step = ""
        self._percent: int | None = None
        self._said = (0.0, 0)  # time in seconds and percent of the last plain line
        if sys.stdout.isatty() and find_spec("rich"):
            from rich import progress

            columns = (progress.SpinnerColumn(), progress.TextColumn("{task.description}"), progress.BarColumn(),
                       progress.TaskProgressColumn(), progress.TimeElapsedColumn())  # fmt: skip
            self._bar = progress.Progress(*columns)

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Show ``text`` while the block runs, then how long it took."""
        began = time.monotonic()
        self._step, self._percent, self._said = text, None, (began, 0)
        if self._bar is None:
            self.say(f"{text} ...")
            yield
        else:
            with self._bar:
                task = self._bar.add_task(text, total=None)
                yield
                self._bar.remove_task(task)
        self.say(f"{text}: {time.monotonic() - began:.0f} s")

    def tick(self, percent: int | None) -> None:
        """Show that time has passed, and the percentage of the step, if it is known."""
        now = time.monotonic()
        self._percent = percent if percent is not None else self._percent
        if self._bar is not None:
            task = self._bar.task_ids[-1]
            self._bar.update(task, total=None if self._percent is None else 100, completed=self._percent or 0)
        elif now - self._said[0] > HEARTBEAT_SECONDS or (self._percent or 0) >= self._said[1] + 20:
            self._said = (now, self._percent or 0)
            far = "" if self._percent is None else f" {self._percent:3d} %"
            self.say(f"{self._step}{far}, {now - self._start:.0f} s since the start")

    def say(self, text: str) -> None:
        """Print one line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)


class Runner:
    """Runs commands with their output in one log file, and updates the progress meanwhile."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        descriptor, name = tempfile.mkstemp(prefix="hvdplus-horovod-", suffix=".log")
        os.close(descriptor)
        self.log = Path(name)

    def __call__(
        self,
        command: Sequence[str],
        cwd: Path | None = None,
        extra: Mapping[str, str] | None = None,
        timeout_seconds: float = float("inf"),
    ) -> tuple[int | None, str]:
        """Run ``command`` and return (exit code, output). The code is None if it ran out of time."""
        deadline = time.monotonic() + timeout_seconds
        env = {**environment(), **(extra or {})}
        with self.log.open("a", encoding="utf-8") as out, self.log.open(encoding="utf-8", errors="replace") as lines:
            print("$", " ".join(command), file=out, flush=True)
            lines.seek(0, os.SEEK_END)
            begin = lines.tell()
            process = subprocess.Popen(
                command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                while process.poll() is None and time.monotonic() < deadline:
                    self.progress.tick(_last_percent(lines))
                    time.sleep(0.2)
            finally:
                if timed_out := process.poll() is None:  # out of time, or interrupted
                    os.killpg(process.pid, signal.SIGTERM)
                    try:
                        process.wait(10)
                    except subprocess.TimeoutExpired:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
            lines.seek(begin)
            return None if timed_out else process.returncode, lines.read()


def _last_percent(lines: IO[str]) -> int | None:
    """Return the number of the last ``[ 42%]`` that make printed since the last call, or None."""
    found = re.findall(r"\[\s*(\d+)%\]", lines.read())
    return int(found[-1]) if found else None


def last_lines(text: str, count: int = 30) -> str:
    """Return the last ``count`` lines of ``text``."""
    return "\n".join(text.rstrip().splitlines()[-count:])
