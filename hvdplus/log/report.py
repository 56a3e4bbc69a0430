"""The end of a job: close its run log, print the table, draw the picture."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from hvdplus.log.page import write_page
from hvdplus.log.picture import picture
from hvdplus.log.runlog import RunLog
from hvdplus.log.table import table
from hvdplus.log.words import printable
from hvdplus.transport import World


class Job(Protocol):
    """The part of a job that a report needs; an optimizer's coordinator provides it."""

    log: RunLog

    def finish(self, **facts: Any) -> dict[str, Any]:
        """Write the log's last record with ``facts`` in it; returns the run's summary."""


def report(
    job: Job,
    world: World,
    png: str | os.PathLike[str] | None,
    html: str | os.PathLike[str] | None,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """End a run: close its log with ``facts``; on rank 0 print the table, and draw the picture to ``png`` and the page
    to ``html``.

    What cannot be drawn does not fail the job: its error is printed. Returns the run's summary.
    """
    summary = job.finish(**facts)
    if world.transport.rank == 0:
        records = printable(job.log.records)
        print(f"\n{table(records)}", flush=True)
        if job.log.path:
            print(f"\nRun log: {job.log.path}", flush=True)
        name = job.log.path.name if job.log.path else "hvdplus"
        forms: tuple[tuple[str, str | os.PathLike[str] | None, Callable[[Any], Path]], ...] = (
            ("picture", png, lambda path: picture(records, path)),
            ("page", html, lambda path: write_page({name: records}, path)),
        )
        for what, path, draw in forms:
            try:
                if path:
                    print(f"{what.capitalize()}: {draw(path).absolute()}", flush=True)
            except (ImportError, OSError, ValueError) as error:
                print(f"hvdplus: no {what}: {error}", file=sys.stderr, flush=True)
    job.log.close()
    return {**summary, "ranks": world.transport.size, "transport": world.transport.name}
