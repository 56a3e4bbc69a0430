"""The run log: what a job measured and decided, as JSON lines that survive a crash.

One JSON object a line, written by rank 0; each line reaches the operating system at once. ``kind`` tells its type:

    run       the job: framework, ranks, hosts, transport, ladder, bytes that each level sends
    window    medians over a few steps: level, step_ms and its four parts, hidden communication, error, loss,
              cosine (between ranks' gradients, see ``sketch.py``)
    trace     the controller's input, step by step, in whole microseconds: [level, step, codec, exposed_comm,
              input_wait, overlapped_comm, probe, error, gradient_norm, learning_rate, probe_bytes, flushes]
    decision  a change of level (or a choice to stay): from, to, reason, evidence
    resize    levels: their costs, after the buckets were cut anew
    lost      ranks that are gone from an elastic job, and the norm of what one that is left holds back
    forbid    level: it and the levels above it may run no more, with the reason
    stretch   every: local steps before an exchange from here on, and by what factor these are more
    preview   errors of levels, as tried beside the training
    resume    a checkpoint was loaded: its step and level, and the controller's state
    local     local steps: how many between two exchanges; one "step" elsewhere is an exchange with those before it
    end       steps, wall_seconds, and further figures of the job

Times are in milliseconds, sizes in bytes. Strict JSON: NaN and infinities are written as null. A reader skips kinds and
fields that it does not know, so both may be added without a new ``FORMAT``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import warnings
import weakref
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from hvdplus import __version__
from hvdplus.files import content
from hvdplus.log.facts import Record
from hvdplus.log.history import History, Medians

try:
    import fcntl
except ImportError:  # no POSIX system: two jobs that write one file go unnoticed
    fcntl = None  # type: ignore[assignment]

FORMAT = 1

TIMES = ("step_ms", "compute_ms", "codec_ms", "exposed_comm_ms", "overlapped_comm_ms", "input_wait_ms")
"""Times of a window, in milliseconds."""

# The report needs these fields; all others may be missing or null.
REQUIRED: dict[str, dict[str, type]] = {
    "window": {"first_step": int, "last_step": int, "level": str},
    "decision": {"step": int, "from": str, "to": str, "reason": str},
}


class RunLog:
    """Writes a run log, and keeps in memory what a report at the end of the job needs.

    Memory is bounded: see ``hvdplus.log.history``. An existing file is overwritten.
    """

    def __init__(self, path: str | os.PathLike[str] | None, *, keep: bool = True) -> None:
        """Open ``path`` (``~`` is the home folder) and create its folder; with None (or "") there is no file.

        Args:
            keep: keep records in memory, in ``records``. False for ranks that make no report: they have
                ``last_window`` and ``medians`` all the same.

        Raises:
            OSError: the file cannot be written, or another job is writing it; the message names it and the reason.
        """
        # Absolute, so that messages and reports find it again after the script has changed folder.
        self.path = Path(path).expanduser().absolute() if path else None
        self.last_window: Record | None = None
        """The last complete window of steps."""
        self._history = History() if keep else None
        self._medians: dict[str | None, dict[str, Medians]] = {}
        """Level, or None for all of them -> time -> its median over windows."""
        self._file = None
        if self.path:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = _open(self.path)
            except OSError as error:
                raise OSError(
                    f"Cannot write the run log {self.path}: {error.strerror}. Name a file that can be written "
                    "(HVDPLUS_RUN_LOG), or none."
                ) from error
            # Not at exit: an optimizer that is still open writes its end then, and may do so after finalizers have run.
            weakref.finalize(self, _close, self._file).atexit = False

    @property
    def records(self) -> list[Record]:
        """The job's records so far, older windows of one level merged; empty if this log keeps none."""
        return self._history.records if self._history else []

    def medians(self, level: str) -> dict[str, float]:
        """Medians of ``TIMES`` over the windows at ``level``, in milliseconds; over all windows if none ran at it, NaN
        if there is no window."""
        found = self._medians.get(level) or self._medians.get(None) or {}
        return {name: found[name].median if name in found else math.nan for name in TIMES}

    def write(self, kind: str, *, keep: bool = True, **fields: Any) -> None:
        """Append one record: numbers, text, None, and lists and dicts of them. ``run`` gets format, version and time.

        ``keep``: also in memory, if this log keeps records.

        A disk that fills up does not end the training: the file ends there, with a warning; memory goes on.

        Raises:
            TypeError: a field is none of these; the message names it.
        """
        if kind == "run":
            now = datetime.now(UTC).isoformat(timespec="seconds")
            fields = {"format": FORMAT, "hvdplus": __version__, "started_at": now, **fields}
        record = {"kind": kind, **{name: _plain(value, name) for name, value in fields.items()}}
        if kind == "window":
            self._note_window(record)
        if keep and self._history:
            self._history.add(record)
        if self._file is None or self._file.closed:
            return
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            written = self._file.write(line)
            reason = "" if written == len(line) else "the disk took only part of a line"
        except OSError as error:
            reason = str(error.strerror)
        if reason:
            self.close()
            warnings.warn(f"The run log {self.path} ends here: {reason}.", RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        """Close the file; records written later are only kept in memory."""
        if self._file is not None:
            _close(self._file)

    def _note_window(self, window: Record) -> None:
        self.last_window = window
        for level in (window.get("level"), None):
            times = self._medians.setdefault(level, {})
            for name in TIMES:
                if isinstance(value := window.get(name), (int, float)):
                    times.setdefault(name, Medians()).add(value)


def _open(path: Path) -> BinaryIO:
    """Open a file for writing, empty, and lock it against other jobs.

    Unbuffered: a line is out when it is written, and a failed write leaves nothing behind to retry.
    """
    if path.is_symlink() and path.is_file() and not path.is_relative_to("/dev"):  # as /dev/stdout in a batch job
        raise OSError(errno.ELOOP, f"it is a link to {path.resolve()}, which would be overwritten")
    # Opening a pipe that nobody reads would wait for ever.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_NONBLOCK", 0), 0o666)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            _lock(descriptor)
            os.ftruncate(descriptor, 0)  # not before the lock is ours
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "wb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def _lock(descriptor: int) -> None:
    """Raises OSError if another job holds the lock. File systems without locks go without."""
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
            raise OSError(error.errno, "another job is writing it") from error


def _close(file: BinaryIO) -> None:
    """Close the file and release its lock, which a forked child (of a data loader) would keep."""
    if file.closed:
        return
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def read(path: str | os.PathLike[str]) -> list[Record]:
    """Read a run log. A last line that a crash cut short is left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no run log, or damaged; the message names file and line and what was expected.
    """
    lines = content(path).split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(parse(line, path, number))
        except ValueError:
            if number == len(lines) and records:  # no newline after it: the job ended in the middle of this line
                break
            raise
    return records


def parse(line: bytes, path: str | os.PathLike[str], number: int) -> Record:
    """The record of a line.

    Raises:
        ValueError: it is none; the message names file and line and what was expected.
    """
    try:
        return _record(line)
    except ValueError as error:
        start = line[:60].decode(errors="replace")
        raise ValueError(f"{path}, line {number}: expected {error}. Received: {start!r}") from None


def _record(line: bytes) -> Record:
    """Parse one line. Raises ValueError with what was expected."""
    try:
        record = json.loads(line.decode(), parse_constant=lambda name: None)
    except (ValueError, RecursionError):  # text that is no JSON, or nested without end
        raise ValueError("one JSON object, as hvdplus writes them") from None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise ValueError('a JSON object with a text field "kind"')
    kind = record["kind"]
    if kind == "run" and record.get("format", FORMAT) != FORMAT:
        raise ValueError(f"format {FORMAT} (this is hvdplus {__version__}; the log comes from another version)")
    for name, wanted in REQUIRED.get(kind, {}).items():
        if not isinstance(record.get(name), wanted):
            raise ValueError(f'a {kind} record with "{name}" of type {wanted.__name__}')
    return record


def _plain(value: Any, name: str) -> Any:
    """``value`` as strict JSON holds it. ``name`` is for the error message."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, name) for inner in value]
    for convert in ("tolist", "numpy"):  # values of NumPy and torch, of TensorFlow: none of them is imported here
        if hasattr(value, convert):
            return _plain(getattr(value, convert)(), name)
    raise TypeError(
        f"The run log holds numbers, text, and lists and dicts of them. Received: {name}={value!r} "
        f"({type(value).__name__})"
    )
