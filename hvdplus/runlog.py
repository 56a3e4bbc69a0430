"""The run log: what a job measured and decided, as JSON lines that survive a crash.

One JSON object a line, written by rank 0, each line handed to the operating system at once. ``kind`` says what it is:

    run       who ran: framework, ranks, hosts, transport, ladder, bytes a level sends
    window    medians over a few steps: level, step_ms and its four parts, hidden communication, error, loss
    trace     what the controller saw, step by step, in whole microseconds: [level, step, codec, exposed_comm,
              input_wait, overlapped_comm, sounding, error, gradient_norm, learning_rate, sounding_bytes]
    decision  a change of level (or a choice to stay): from, to, reason, evidence
    resize    levels: what they send since buckets were cut anew (sparse gradients)
    forbid    level: it and those above it are out, with the reason
    resume    a checkpoint was loaded: the step and level it was taken at, and what the controller knew
    end       steps, wall_seconds, and whatever else the job wants to keep

Times are in milliseconds, sizes in bytes. Strict JSON: NaN and infinities are written as null. A reader skips kinds and
fields that it does not know, so both may be added without a new ``FORMAT``.
"""

from __future__ import annotations

import json
import math
import os
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hvdplus import __version__

FORMAT = 1

Record = dict[str, Any]
"""One line of the log: plain JSON values, ``kind`` among them."""

# What the report cannot do without; everything else may be missing or null.
REQUIRED: dict[str, dict[str, type]] = {
    "window": {"first_step": int, "last_step": int, "level": str},
    "decision": {"step": int, "from": str, "to": str, "reason": str},
}


class RunLog:
    """Writes a run log, and keeps its records for the report at the end of the job.

    A job that runs for days keeps a few hundred bytes a window in memory. An existing file is overwritten.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        """Open ``path`` and create its folder; with None (or "") records are only kept in memory.

        Raises:
            OSError: the file cannot be written; the message names it and the reason.
        """
        # Absolute, so that messages and reports find it again after the script has changed folder.
        self.path = Path(path).absolute() if path else None
        self.records: list[Record] = []
        self._file = None
        if self.path:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                # Unbuffered: a line is out when it is written, and a failed write leaves nothing behind to retry.
                self._file = self.path.open("wb", buffering=0)
            except OSError as error:
                raise OSError(
                    f"Cannot write the run log {self.path}: {error.strerror}. Name a file that can be written "
                    "(HVDPLUS_RUN_LOG), or none."
                ) from error
            weakref.finalize(self, self._file.close)

    def write(self, kind: str, *, keep: bool = True, **fields: Any) -> None:
        """Append one record: numbers, text, None, and lists and dicts of them. ``run`` gets format, version and time.

        ``keep``: also in memory, for the report at the end of the job.

        A disk that fills up later does not end the training: the log ends there with a warning, memory goes on.

        Raises:
            TypeError: a field is none of these; the message names it.
        """
        if kind == "run":
            now = datetime.now(UTC).isoformat(timespec="seconds")
            fields = {"format": FORMAT, "hvdplus": __version__, "started_at": now, **fields}
        record = {"kind": kind, **{name: _plain(value, name) for name, value in fields.items()}}
        if keep:
            self.records.append(record)
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
            self._file.close()


def read(path: str | os.PathLike[str]) -> list[Record]:
    """Read a run log. A last line that a crash cut short is left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no run log, or damaged; the message names file and line and what was expected.
    """
    lines = Path(path).read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(_record(line))
        except ValueError as error:
            if number == len(lines) and records:  # no newline after it: the job ended in the middle of this line
                break
            start = line[:60].decode(errors="replace")
            raise ValueError(f"{path}, line {number}: expected {error}. Received: {start!r}") from None
    return records


def check_not_empty(records: Sequence[Record]) -> None:
    """Raises ValueError where there is no record at all."""
    if not records:
        raise ValueError("the log is empty; the job wrote nothing")


def run_of(records: Iterable[Record]) -> Record:
    """The record of the run; empty if the log has none."""
    return next((record for record in records if record["kind"] == "run"), {})


def _record(line: bytes) -> Record:
    """Parse one line. Raises ValueError with what was expected."""
    try:
        record = json.loads(line.decode(), parse_constant=lambda name: None)
    except ValueError:
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
