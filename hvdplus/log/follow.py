"""A run log as a live table, while its job runs. Needs rich, imported when the table is drawn.

The file is read as it grows. It need not be there yet: the job may still be starting.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvdplus.log.facts import Record, decisions_of, number_of, windows_of
from hvdplus.log.history import History
from hvdplus.log.runlog import parse
from hvdplus.log.summary import about, end_text, warnings
from hvdplus.log.words import closing, decision_line, printable, three_digits

if TYPE_CHECKING:
    from rich.console import RenderableType

LOOK_SECONDS = 0.5
WINDOWS, DECISIONS = 12, 4
"""As many of the latest are shown."""
COLUMNS = (
    ("steps", lambda window: f"{window['first_step']}-{window['last_step']}"),
    ("level", lambda window: window["level"]),
    ("ms a step", lambda window: three_digits(number_of(window.get("step_ms")))),
    ("compute", lambda window: three_digits(number_of(window.get("compute_ms")))),
    ("codec", lambda window: three_digits(number_of(window.get("codec_ms")))),
    ("exposed comm", lambda window: three_digits(number_of(window.get("exposed_comm_ms")))),
    ("error", lambda window: three_digits(number_of(window.get("error")))),
    ("loss", lambda window: three_digits(number_of(window.get("loss")))),
)


def follow(path: str | os.PathLike[str]) -> int:
    """Show the log until the job has ended or the user interrupts; returns 0.

    Raises:
        ImportError: rich is missing.
        ValueError: a line is no record.
        OSError: the file cannot be read.
    """
    try:
        from rich.live import Live
    except ImportError as error:
        raise ImportError("--follow needs rich: pip install 'hvdplus[viz]'") from error
    history = History()  # the job may run for long
    with Live(view(history.records, path), auto_refresh=False) as live:
        for new in grown(Path(path)):
            for record in new:
                if record["kind"] != "trace":
                    history.add(record)
            live.update(view(history.records, path), refresh=True)
            if any(record["kind"] == "end" for record in new):
                return 0
            time.sleep(LOOK_SECONDS)
    return 0


def grown(path: Path) -> Iterator[list[Record]]:
    """What the file has more than at the last look, again and again.

    Raises:
        ValueError: a line is no record, or the file has become shorter.
    """
    at, rest, number = 0, b"", 0
    while True:
        lines: list[bytes] = []
        if path.exists():
            with path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < at:
                    raise ValueError(f"{path}: another job has begun it anew")
                file.seek(at)
                *lines, rest = (rest + file.read()).split(b"\n")
                at = file.tell()
        found = []
        for line in lines:
            number += 1
            if not line.strip():
                continue
            found.append(printable(parse(line, path, number)))
        yield found


def view(records: Sequence[Record], path: str | os.PathLike[str]) -> RenderableType:
    """The latest windows and decisions, and what can be said so far."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    windows = windows_of(records)
    if not windows:
        return Text(f"{path}: no steps yet")
    rows = Table(box=None, header_style="dim")
    for name, _ in COLUMNS:
        rows.add_column(name, justify="left" if name in ("steps", "level") else "right")
    for window in windows[-WINDOWS:]:
        rows.add_row(*(Text(cell(window)) for _, cell in COLUMNS))
    known = about(records)
    lines = [f"{known.get('ranks', '')}, {known.get('transport', '')}"] if known else []
    latest = [decision_line(each, " -> ") for each in decisions_of(records)[-DECISIONS:]]
    ended = [end_text(records)] if any(record["kind"] == "end" for record in records) else []
    return Group(*map(Text, [*warnings(records), *lines]), rows, *map(Text, [*latest, closing(records), *ended]))
