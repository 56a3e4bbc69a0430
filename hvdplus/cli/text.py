"""Text that several commands print or read: tables, reasons, ratios, whole numbers, run logs."""

from __future__ import annotations

from collections.abc import Container, Sequence

from hvdplus.compression import NoCompression
from hvdplus.exchange.bucket import Bucket, bytes_per_step
from hvdplus.log.facts import Record
from hvdplus.log.runlog import read
from hvdplus.log.words import printable

FOREIGN = (ArithmeticError, AttributeError, LookupError, RuntimeError, StopIteration, TypeError, ValueError)
"""Errors of code that expects a run log's records and finds other JSON."""


def whole(option: str, text: str) -> int:
    """The value of an option as a whole number of at least 1.

    Raises:
        ValueError: ``text`` is no such number; the message says what was received.
    """
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError(f"{option} wants a whole number of at least 1. Received: {text!r}")
    return int(text)


def reason(error: Exception) -> str:
    """An error in one line. Only a ValueError is written for users; any other error is shown with its type."""
    words = " ".join(str(error).split())
    return words if type(error) is ValueError else f"{type(error).__name__}: {words}"


def ratio(buckets: Sequence[Bucket], sent_bytes: int) -> str:
    """The bytes of a step in fp32, divided by ``sent_bytes``."""
    return f"{bytes_per_step(buckets, NoCompression()) / sent_bytes:.1f} x" if sent_bytes else "-"


def columns(rows: Sequence[Sequence[str]], figures: Container[int]) -> str:
    """Rows as a table with columns of equal width.

    Args:
        rows: the cells of each row. A row with fewer cells than the first does not widen the columns.
        figures: indices of the columns that are aligned to the right.
    """
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    widths[0] = max(len(row[0]) for row in rows)

    def line(row: Sequence[str]) -> str:
        whole_row = len(row) == len(widths)
        cells = enumerate(zip(row, widths, strict=whole_row))
        return "  ".join(
            cell.rjust(width) if whole_row and place in figures else cell.ljust(width) for place, (cell, width) in cells
        ).rstrip()

    return "\n".join(map(line, rows))


def read_log(path: str) -> list[Record]:
    """The records of a run log, with all text in them safe to print.

    Raises:
        ValueError: the file cannot be read, or is no run log; the message names it.
    """
    try:
        return [printable(record) for record in read(path)]
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except RecursionError:
        raise ValueError(foreign(path, "nested without end")) from None


def foreign(path: str, error: object) -> str:
    """The message for a log on which one of ``FOREIGN`` was raised."""
    return f"{path} holds records that hvdplus does not write: {error!r}"
