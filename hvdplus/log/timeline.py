"""The run as a trace for Perfetto and Chrome (``chrome://tracing``): a process a rank, the parts of its steps in a row.

A log has medians over windows of steps, so a window is drawn as one long step: its parts take as long as those of all
of its steps together. What ranks' own steps were like is in the log as their computation; a rank that computes for less
time than the others waits for longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hvdplus.log.columns import PARTS
from hvdplus.log.facts import Record, decisions_of, number_of, run_of, steps_in, windows_of
from hvdplus.log.summary import plain
from hvdplus.log.words import printable


def timeline(records: Sequence[Record]) -> dict[str, Any]:
    """The trace as plain values, for ``json.dump``. Times in microseconds since the first step that was measured.

    Raises:
        ValueError: there is no window to draw.
    """
    if not windows_of(records):
        raise ValueError("the log holds no window of steps yet")
    events = printable(plain(list(_events(records))))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    windows, decisions = windows_of(records), decisions_of(records)
    ranks = max(len(window.get("compute_ms_by_rank") or [0.0]) for window in windows)
    told = run_of(records).get("ranks") or ranks
    for rank in range(ranks):
        name = f"rank {rank}" if ranks == told else f"all {told} ranks"
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
    began = 0.0
    for window in windows:
        steps, step_ms = steps_in(window), number_of(window.get("step_ms"))
        if not step_ms > 0:
            continue
        long = steps * step_ms * 1e3
        for rank, compute in enumerate((window.get("compute_ms_by_rank") or [None])[:ranks]):
            yield from _window(window, rank, began, steps, step_ms, compute)
        yield _event("C", "MB a step", 0, began, args={"MB": number_of(window.get("payload_bytes")) / 1e6})
        for each in decisions:
            if window["first_step"] <= each["step"] <= window["last_step"]:
                at = began + (each["step"] - window["first_step"]) / steps * long
                yield _event("i", f"{each['from']} -> {each['to']}", 0, at, s="g", args={"reason": each["reason"]})
        began += long


def _window(
    window: Record, rank: int, began: float, steps: int, step_ms: float, compute: float | None
) -> Iterator[dict[str, Any]]:
    parts = {field: max(0.0, number_of(window.get(field))) for field, *_ in PARTS}
    parts = {field: 0.0 if value != value else value for field, value in parts.items()}
    if compute is not None:
        parts["compute_ms"] = min(compute, step_ms)
        rest = step_ms - parts["compute_ms"] - parts["codec_ms"] - parts["input_wait_ms"]
        parts["exposed_comm_ms"] = max(0.0, rest)
    name = f"{window['level']}: steps {window['first_step']} to {window['last_step']}"
    yield _event("X", name, rank, began, dur=steps * step_ms * 1e3)
    left = step_ms
    for field, word, _ in PARTS:
        part = min(parts[field], left)  # medians, each for itself, may add up to more than a step
        if part:
            yield _event("X", word, rank, began, dur=part * steps * 1e3, args={"ms a step": parts[field]})
        left, began = left - part, began + part * steps * 1e3


def _event(kind: str, name: str, rank: int, at: float, **others: Any) -> dict[str, Any]:
    return {"ph": kind, "name": name, "pid": rank, "tid": 0, "ts": round(at, 3), **others}
