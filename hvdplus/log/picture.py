"""The report as a picture: the parts of a step, the level and the loss over the steps. Needs matplotlib, imported when
the picture is drawn.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hvdplus.log.columns import INK, LOSS_COLOUR, PARTS, columns_of, or_zero, sensible_top, total_ms
from hvdplus.log.facts import Record, Span, decisions_of, run_of
from hvdplus.log.words import (
    FRAMEWORKS,
    TRANSPORTS,
    closing,
    count,
    decision_line,
    in_ms,
    ladder_text,
    ranks_and_hosts,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT, DPI = 14.0, 10.0, 100  # inches, dots an inch
MOST_DECISION_LINES = 9
LINE = 0.185  # inches, of small text


def picture(records: Sequence[Record], path: str | os.PathLike[str]) -> Path:
    """Draw times, level and loss over the steps into a PNG of 1400 x 1000 pixels; returns its path.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: there is no window to draw.
        OSError: the file cannot be written.
    """
    columns, a_column, levels = columns_of(records)
    try:
        # No pyplot: it would choose a backend, and the script may be using it for windows of its own.
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError("the picture needs matplotlib: pip install 'hvdplus[viz]'") from error

    decisions = decisions_of(records)
    with_loss = any(not math.isnan(span.loss) for span in columns)
    notes = _notes(decisions)
    headline, subline = _headline(run_of(records)), textwrap.wrap(closing(records), 150)

    # A dollar sign in the name of a host or level starts no formula.
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "text.parse_math": False, "text.color": INK}):
        figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI)
        FigureCanvasAgg(figure)
        top = HEIGHT - 0.22
        titles = [(line, 14.0, "bold") for line in headline] + [(line, 11.5, "normal") for line in subline]
        for text, size, weight in titles:
            figure.text(0.25 / WIDTH, top / HEIGHT, text, size=size, weight=weight, va="top")
            top -= size * 1.65 / 72
        bottom = 0.62 + (0.12 + LINE * len(notes) if notes else 0)
        left = max(0.85, 0.45 + 0.075 * max(map(len, levels)))
        heights = [4.0, 0.3 + 0.3 * len(levels)] + [1.7] * with_loss
        grid = figure.add_gridspec(
            len(heights), 1, height_ratios=heights, left=left / WIDTH, right=1 - 0.25 / WIDTH,
            top=(top - 0.32) / HEIGHT, bottom=bottom / HEIGHT, hspace=0.16,
        )  # fmt: skip
        times = figure.add_subplot(grid[0])
        axes = [times, *(figure.add_subplot(grid[row], sharex=times) for row in range(1, len(heights)))]
        for axis in axes:
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelbottom=axis is axes[-1], colors=INK)
            axis.margins(x=0)
            axis.set_axisbelow(True)

        _draw_times(times, columns, a_column)
        _draw_levels(axes[1], columns, levels, matplotlib.colormaps["cividis"])
        if with_loss:
            _draw_loss(axes[2], columns)
        first, last = columns[0].first_step, columns[-1].last_step + 1
        times.set_xlim(first, last)
        _mark_decisions(axes, decisions, last - first)
        axes[-1].set_xlabel("step")
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.align_ylabels(axes)
        for number, line in enumerate(notes):
            figure.text(0.25 / WIDTH, (0.12 + LINE * (len(notes) - number)) / HEIGHT, line, size=9, va="top")
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, format="png")
    return target


def _headline(run_record: Record) -> list[str]:
    framework, transport = str(run_record.get("framework", "?")), str(run_record.get("transport", "?"))
    text = (
        f"{FRAMEWORKS.get(framework, framework)} on {ranks_and_hosts(run_record)}, "
        f"{TRANSPORTS.get(transport, transport)} ({run_record.get('collective', '?')}), "
        f"compression {ladder_text(run_record, ' → ')}"
    )
    return textwrap.wrap(text, 115)


def _notes(decisions: Sequence[Record]) -> list[str]:
    """The decisions as lines under the picture; the last line counts those that do not fit."""
    lines: list[str] = []
    for number, record in enumerate(decisions, start=1):
        new = textwrap.wrap(f"{number}   {decision_line(record, ' → ')}", 185, subsequent_indent=" " * 6)
        room = MOST_DECISION_LINES - len(lines) - (number < len(decisions))
        if len(new) > room:
            return [*lines, f"+{len(decisions) - number + 1} more in the log"]
        lines += new
    return lines


def _draw_times(axis: Axes, columns: Sequence[Span], a_column: int) -> None:
    """Draw the parts of a step, stacked. Outliers are cut off and counted in a remark."""
    edges = [span.first_step for span in columns] + [columns[-1].last_step + 1]
    stack = [[or_zero(getattr(span, field)) for span in columns] for field, _, _ in PARTS]
    totals = [total_ms(span) for span in columns]
    axis.stackplot(
        edges, *([*values, values[-1]] for values in stack),
        labels=[name for _, name, _ in PARTS], colors=[colour for _, _, colour in PARTS], step="post", linewidth=0,
    )  # fmt: skip
    axis.set_ylabel("ms a step")
    axis.grid(axis="y", color="#e6e6e6")
    limit = sensible_top(columns)
    axis.set_ylim(0, limit)
    handles, names = axis.get_legend_handles_labels()
    axis.legend(
        handles, names, ncols=len(PARTS), loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2,
        frameon=False, handlelength=1.2, columnspacing=1.8,
    )  # fmt: skip
    beyond = [total for total in totals if total > limit]
    what = "window" if a_column == 1 else f"group of {a_column} windows"
    remarks = [f"one column: median of {count(a_column, 'window')}"] if a_column > 1 else []
    if beyond:
        remarks.append(f"cut off: {count(len(beyond), what)}, up to {in_ms(max(beyond))}")
    axis.annotate("; ".join(remarks), (1, 1), xycoords="axes fraction", xytext=(0, 4), textcoords="offset points",
                  ha="right", va="bottom", size=9)  # fmt: skip


def _draw_levels(axis: Axes, columns: Sequence[Span], levels: Sequence[str], colours: object) -> None:
    """Draw a band for each stretch at the height of its level."""
    assert callable(colours)
    heights = {level: place for place, level in enumerate(levels)}
    edges = [span.first_step for span in columns] + [columns[-1].last_step + 1]
    path = [heights[span.level] for span in columns]
    axis.step(edges, [*path, path[-1]], where="post", color=INK, linewidth=0.8)
    for level, group in groupby(columns, key=lambda span: span.level):
        spans = list(group)
        colour = colours(0.85 - 0.7 * heights[level] / max(len(levels) - 1, 1))
        begin, end = spans[0].first_step, spans[-1].last_step + 1
        # The edge keeps a stretch visible that is thinner than a pixel.
        axis.broken_barh([(begin, end - begin)], (heights[level] - 0.32, 0.64), color=colour, linewidth=1.5)
    axis.set_yticks(range(len(levels)), levels)
    axis.set_ylim(-0.6, len(levels) - 0.4)
    axis.set_ylabel("level")


def _draw_loss(axis: Axes, columns: Sequence[Span]) -> None:
    points = [((span.first_step + span.last_step + 1) / 2, span.loss) for span in columns]
    known = [loss for _, loss in points if not math.isnan(loss)]
    axis.plot(*zip(*points, strict=True), color=LOSS_COLOUR, linewidth=1.6, marker="o" if len(known) <= 60 else "",
              markersize=3)  # fmt: skip
    if min(known) > 0 and max(known) > 30 * min(known):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")  # the usual 10^-1 would need formulas
        axis.yaxis.set_minor_formatter("")
    axis.set_ylabel("loss")
    axis.grid(axis="y", color="#e6e6e6")


def _mark_decisions(axes: Sequence[Axes], decisions: Sequence[Record], width: int) -> None:
    """Draw a thin line for each decision through all panels, and its number over the panel of levels. Neighbours that
    are too close for two labels share one."""
    steps = [record["step"] for record in decisions]
    for step in steps:
        for axis in axes:
            axis.axvline(step, color=INK, linewidth=0.8, linestyle=":", alpha=0.7 if len(steps) <= 12 else 0.3)
    for label in _labels(steps, letter=0.0075 * width):
        axes[1].annotate(
            label.text, (label.middle, 1), xycoords=("data", "axes fraction"), ha="center", va="center", size=8,
            color="white", weight="bold", annotation_clip=False,
            bbox={"boxstyle": "round,pad=0.25", "facecolor": INK, "edgecolor": "none"},
        )  # fmt: skip


class _Label(NamedTuple):
    """The number of a decision, or of several in a row, on the axis of steps."""

    numbers: tuple[int, int]
    steps: tuple[float, float]
    letter: float
    """Width of a letter, in steps."""

    @property
    def text(self) -> str:
        first, last = self.numbers
        return str(first) if first == last else f"{first}–{last}"

    @property
    def middle(self) -> float:
        return sum(self.steps) / 2

    @property
    def half(self) -> float:
        """Half of the width, with room for the frame."""
        return (len(self.text) + 1.5) / 2 * self.letter


def _labels(steps: Sequence[float], letter: float) -> list[_Label]:
    """A label for each decision; those that would overlap are joined."""
    labels: list[_Label] = []
    for number, step in enumerate(steps, start=1):
        labels.append(_Label((number, number), (step, step), letter))
        while len(labels) > 1 and labels[-1].middle - labels[-1].half < labels[-2].middle + labels[-2].half:
            last, before = labels.pop(), labels.pop()
            labels.append(_Label((before.numbers[0], last.numbers[1]), (before.steps[0], last.steps[1]), letter))
    return labels
