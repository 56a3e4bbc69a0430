"""The report: what a run did, as a table and a picture.

Works on the records of a run log (``hvdplus.runlog``), read from a file or still in memory. Every figure and every
sentence is computed from the records; where they hold too little, the report says so. Times of several windows are
medians weighted by steps, so that a first window with a compilation in it does not colour the rest.

The table needs nothing but Python; the picture needs matplotlib, imported when it is drawn.
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdplus.pilot import DRAINING, WARMING, Pilot
from hvdplus.runlog import Record
from hvdplus.transport import World

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DENSE = "none"
# The controller's own limits: below the first, communication counts as hidden; below the second, a gain as noise.
HIDDEN_SHARE = 0.05
GAIN = 1.03
ENOUGH_STEPS = 5  # fewer steps at a level are no evidence

FRAMEWORKS = {"torch": "PyTorch", "keras": "Keras"}
TRANSPORTS = {
    "horovod-mpi": "Horovod over MPI",
    "horovod-gloo": "Horovod over Gloo",
    "mpi4py": "mpi4py",
    "local": "one process, no network",
}

# Parts of a step, bottom of the stack first: field, name, colour. From Okabe and Ito's colour-blind-safe palette; the
# warm one for what hvdplus is about.
PARTS = (
    ("compute_ms", "compute", "#c3cad3"),
    ("codec_ms", "codec", "#0072b2"),
    ("exposed_comm_ms", "exposed communication", "#d55e00"),
    ("input_wait_ms", "input wait", "#f0e442"),
)
INK = "#333333"
LOSS_COLOUR = "#009e73"


def close(pilot: Pilot, world: World, png: str | os.PathLike[str] | None, facts: dict[str, Any]) -> dict[str, Any]:
    """End a run: close its log with ``facts``, and on rank 0 print the table and draw the picture to ``png``.

    A picture that cannot be drawn is no reason to lose a run: it says so and goes on. Returns what the run came to.
    """
    summary = pilot.finish(**facts)
    if world.transport.rank == 0:
        print(f"\n{table(pilot.log.records)}", flush=True)
        if pilot.log.path:
            print(f"\nRun log: {pilot.log.path}", flush=True)
        if png:
            try:
                print(f"Picture: {picture(pilot.log.records, png).absolute()}", flush=True)
            except (ImportError, OSError, ValueError) as error:
                print(f"hvdplus: no picture: {error}", file=sys.stderr, flush=True)
    pilot.log.close()
    return {**summary, "ranks": world.transport.size, "transport": world.transport.name}


# ---------------------------------------------------------------------------------------------------- facts


class Span(NamedTuple):
    """Windows at one level taken together. Times in milliseconds; NaN stands for what is not known."""

    level: str
    first_step: int
    last_step: int
    steps: int
    step_ms: float
    compute_ms: float
    codec_ms: float
    exposed_comm_ms: float
    input_wait_ms: float
    payload_bytes: float
    """What one rank sends a step."""
    loss: float
    """The last one known."""

    @property
    def exposed_share(self) -> float:
        """Exposed communication as a share of the step."""
        return self.exposed_comm_ms / self.step_ms if self.step_ms else math.nan


def stretches(records: Sequence[Record]) -> list[Span]:
    """One span for each stretch of consecutive windows at the same level."""
    run_record = _run(records)
    return [_span(list(group), run_record) for _, group in groupby(_windows(records), key=_level)]


def _span(windows: Sequence[Record], run_record: Record) -> Span:
    """Take one or more windows of one level together."""
    steps = [_steps(window) for window in windows]
    level = _level(windows[-1])
    sent = _number(windows[-1].get("payload_bytes"))
    if math.isnan(sent):
        sent = _number((run_record.get("payload_bytes") or {}).get(level))
    losses = [loss for loss in (_number(window.get("loss")) for window in windows) if not math.isnan(loss)]

    def middle(field: str) -> float:
        return _weighted_median([_number(window.get(field)) for window in windows], steps)

    return Span(
        level=level,
        first_step=windows[0]["first_step"],
        last_step=windows[-1]["last_step"],
        steps=sum(steps),
        step_ms=middle("step_ms"),
        compute_ms=middle("compute_ms"),
        codec_ms=middle("codec_ms"),
        exposed_comm_ms=middle("exposed_comm_ms"),
        input_wait_ms=middle("input_wait_ms"),
        payload_bytes=sent,
        loss=losses[-1] if losses else math.nan,
    )


def _weighted_median(values: Sequence[float], weights: Sequence[int]) -> float:
    """Median of ``values``, each counted ``weight`` times; NaNs are left out."""
    pairs = sorted((value, weight) for value, weight in zip(values, weights, strict=True) if not math.isnan(value))
    half = sum(weight for _, weight in pairs) / 2
    for place, (value, weight) in enumerate(pairs):
        half -= weight
        if half < 0:
            return value
        if half == 0:
            return (value + pairs[min(place + 1, len(pairs) - 1)][0]) / 2
    return math.nan


def _number(value: object) -> float:
    """A figure of a record; NaN for null, missing, or no number."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else math.nan


def _steps(window: Record) -> int:
    """Steps in a window."""
    return int(window.get("steps") or window["last_step"] - window["first_step"] + 1)


def _level(window: Record) -> str:
    return str(window["level"])


def _run(records: Iterable[Record]) -> Record:
    """The record of the run; empty if the log has none."""
    return next((record for record in records if record["kind"] == "run"), {})


def _windows(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if record["kind"] == "window"]


def _decisions(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if record["kind"] == "decision"]


# ---------------------------------------------------------------------------------------------------- words


def closing(records: Sequence[Record]) -> str:
    """One sentence: what hvdplus did for this run, as far as the records show it."""
    run_record, windows = _run(records), _windows(records)
    by_level: dict[str, list[Record]] = {}
    for window in windows:
        by_level.setdefault(_level(window), []).append(window)
    steps = sum(map(_steps, windows))
    # Steps that pay out a residual on the way back to dense were chosen by nobody.
    levels = {level: _span(group, run_record) for level, group in by_level.items() if level not in (DRAINING, WARMING)}
    if not levels:
        return "No steps were recorded: there is nothing to compare."
    main = max(levels.values(), key=lambda span: span.steps)
    if main.steps < ENOUGH_STEPS or math.isnan(main.step_ms) or math.isnan(main.exposed_share):
        return f"Too little was measured ({_count(steps, 'step')}) to say what hvdplus did."
    if run_record.get("ranks") == 1:
        return f"One rank has nobody to talk to: {_ms(main.step_ms)} a step, and no communication to shorten."
    asked = run_record.get("compression") not in (None, "auto")
    others = [span for level, span in levels.items() if level != main.level and span.steps >= ENOUGH_STEPS]
    if main.level == DENSE:
        return _closing_dense(main, others, steps, asked)
    return _closing_compressed(main, next((span for span in others if span.level == DENSE), None), steps, asked)


def _closing_dense(dense: Span, others: Sequence[Span], steps: int, asked: bool) -> str:
    """Most steps ran uncompressed."""
    share = f"{dense.exposed_share:.0%} of the step"
    best = min(others, key=lambda span: span.step_ms, default=None)
    if asked:
        return f"Gradients were sent uncompressed, as asked for: communication held up {share} ({_ms(dense.step_ms)})."
    if best and dense.step_ms / best.step_ms >= GAIN:
        return (
            f"{best.level} took {_ms(best.step_ms)} a step against {_ms(dense.step_ms)} dense "
            f"({_times(dense, best)}), but ran for only {best.steps} of {steps} steps."
        )
    if best:
        return (
            f"Compression did not pay: the best level tried, {best.level}, took {_ms(best.step_ms)} a step against "
            f"{_ms(dense.step_ms)} dense, so gradients were sent uncompressed."
        )
    if dense.exposed_share <= HIDDEN_SHARE:
        return f"Communication was never the bottleneck ({share}): gradients were sent uncompressed."
    return f"Communication held up {share}, but no other level ran long enough to compare ({_count(steps, 'step')})."


def _closing_compressed(main: Span, dense: Span | None, steps: int, asked: bool) -> str:
    """Most steps ran at a compressed level."""
    share = f"{main.exposed_share:.0%} of the step"
    if dense is None:
        why = ", as asked for" if asked else ""
        return (
            f"{main.steps} of {steps} steps ran at level {main.level}{why} ({_ms(main.step_ms)}, communication "
            f"{share}); too few ran dense to compare with."
        )
    versus = f"{_ms(main.step_ms)} a step against {_ms(dense.step_ms)} dense ({_times(dense, main)})"
    if dense.step_ms / main.step_ms < GAIN:
        return f"Level {main.level} made the step no shorter: {versus}."
    if main.exposed_share <= HIDDEN_SHARE:
        return f"Communication was hidden at level {main.level}: {versus}."
    return f"Level {main.level} made the step shorter: {versus}; communication still held up {share}."


def _times(dense: Span, span: Span) -> str:
    return f"{dense.step_ms / span.step_ms:.2f} x"


def _ms(value: float) -> str:
    return f"{_figure(value)} ms"


def _figure(value: float) -> str:
    """Three significant digits or all whole ones, without exponents; - for what is not known."""
    if math.isnan(value):
        return "-"
    decimals = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{min(max(decimals, 0), 4)}f}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _ladder(run_record: Record, arrow: str) -> str:
    """``auto: none -> fp16``, or the fixed level."""
    compression = str(run_record.get("compression", "?"))
    return f"{compression}: {arrow.join(run_record.get('ladder') or [])}" if compression == "auto" else compression


def _place(run_record: Record) -> str:
    """``2 ranks on 1 host``."""
    hosts = run_record.get("hosts") or {}
    return _count(run_record.get("ranks") or 0, "rank") + (f" on {_count(len(hosts), 'host')}" if hosts else "")


def _decision(record: Record, arrow: str) -> str:
    """One decision in one line."""
    before, after = record["from"], record["to"]
    change = f"stays at {after}" if before == after else f"{before}{arrow}{after}"
    return f"step {record['step']}, {change}: {record['reason']}"


# ---------------------------------------------------------------------------------------------------- table


def table(records: Sequence[Record]) -> str:
    """The report as plain text: facts, one row a stretch of windows at one level, decisions, end, one sentence."""
    return "\n\n".join(
        block
        for block in (
            _facts(_run(records)),
            _rows(stretches(records), _number(_run(records).get("gradient_bytes"))),
            _decision_list(_decisions(records)),
            _end(records) + "\n" + closing(records),
        )
        if block
    )


def _facts(run_record: Record) -> str:
    if not run_record:
        return "hvdplus run: the log has no record of who ran."
    hosts = run_record.get("hosts") or {}
    names = ", ".join(f"{host}: {ranks}" for host, ranks in list(hosts.items())[:4])
    more = f", +{len(hosts) - 4} more" if len(hosts) > 4 else ""
    transport = str(run_record.get("transport", "?"))
    framework = str(run_record.get("framework", "?"))
    facts = {
        "started": f"{run_record.get('started_at', '?')}, hvdplus {run_record.get('hvdplus', '?')}",
        "framework": FRAMEWORKS.get(framework, framework),
        "ranks": _place(run_record) + (f" ({names}{more})" if names else ""),
        "transport": f"{TRANSPORTS.get(transport, transport)}, collective {run_record.get('collective', '?')}",
        "compression": _ladder(run_record, " -> "),
        "gradient": f"{run_record.get('parameters') or 0:,} parameters, "
        f"{_figure(_number(run_record.get('gradient_bytes')) / 1e6)} MB in fp32",
    }
    return "\n".join(["hvdplus run", *(f"  {name:<11}  {fact}" for name, fact in facts.items())])


def _rows(spans: Sequence[Span], gradient_bytes: float) -> str:
    """``gradient_bytes``: what an uncompressed step sends."""
    if not spans:
        return ""
    rows = [
        ["steps", "level", "step", "compute", "codec", "exposed comm", "input wait", "MB sent", "ratio", "loss"],
        ["", "", *["ms"] * 5, "a step", "to fp32", "at end"],
    ]
    for span in spans:
        ratio = gradient_bytes / span.payload_bytes if span.payload_bytes else math.nan
        times = (getattr(span, field) for field in ("step_ms", *(field for field, _, _ in PARTS)))
        rows.append(
            [
                f"{span.first_step}-{span.last_step}",
                span.level,
                *("-" if math.isnan(time) else f"{time:.2f}" for time in times),
                _figure(span.payload_bytes / 1e6),
                "-" if math.isnan(ratio) else f"{ratio:.1f} x",
                _figure(span.loss),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)  # words to the left, figures to the right
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _decision_list(decisions: Sequence[Record]) -> str:
    lines = [
        textwrap.fill(_decision(record, " -> "), 100, initial_indent=f"{number:3}. ", subsequent_indent=" " * 5)
        for number, record in enumerate(decisions, start=1)
    ]
    return "\n".join(["Decisions", *lines]) if lines else ""


def _end(records: Sequence[Record]) -> str:
    end = next((record for record in records if record["kind"] == "end"), None)
    if end is None:
        return "The log has no end: the job is still running, or was stopped."
    extras = [
        f"{name} {_figure(value) if isinstance(value, float) else value}"
        for name, value in end.items()
        if name not in ("kind", "steps", "wall_seconds")
    ]
    done = f"{_count(end.get('steps') or 0, 'step')} in {_figure(_number(end.get('wall_seconds')))} s"
    return "; ".join([f"End: {done}", *extras])


# -------------------------------------------------------------------------------------------------- picture

WIDTH, HEIGHT, DPI = 14.0, 10.0, 100  # inches, dots an inch
MOST_COLUMNS = 400  # more columns than this show noise, not a run
MOST_DECISION_LINES = 9
LINE = 0.185  # inches, of small text
PERCENTILE = 0.95


def picture(records: Sequence[Record], path: str | os.PathLike[str]) -> Path:
    """Draw times, level and loss over the steps into a PNG of 1400 x 1000 pixels; returns its path.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: there is no window to draw.
        OSError: the file cannot be written.
    """
    windows, run_record = _windows(records), _run(records)
    if not windows:
        raise ValueError("the log holds no window of steps yet")
    try:
        # No pyplot: it would choose a backend, and the script may be using it for windows of its own.
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError("the picture needs matplotlib: pip install 'hvdplus[viz]'") from error

    columns, a_column = _columns(windows, run_record)
    decisions = _decisions(records)
    levels = _levels(run_record, columns)
    with_loss = any(not math.isnan(span.loss) for span in columns)
    notes = _notes(decisions)
    headline, subline = _headline(run_record), textwrap.wrap(closing(records), 150)

    # Names of hosts and levels may hold a dollar sign, which is no formula.
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


def _columns(windows: Sequence[Record], run_record: Record) -> tuple[list[Span], int]:
    """What is drawn: one span a window, or a few windows of one level a span; and how many windows that is."""
    together = math.ceil(len(windows) / MOST_COLUMNS)
    columns = []
    for _, group in groupby(windows, key=_level):
        stretch = list(group)
        columns += [_span(stretch[i : i + together], run_record) for i in range(0, len(stretch), together)]
    return columns, together


def _levels(run_record: Record, columns: Sequence[Span]) -> list[str]:
    """Names on the level axis, lowest first; draining and warming lie below dense, being the ways from it and back."""
    names = dict.fromkeys([*(run_record.get("ladder") or []), *(span.level for span in columns)])
    return sorted(names, key=lambda name: name not in (DRAINING, WARMING))


def _headline(run_record: Record) -> list[str]:
    framework, transport = str(run_record.get("framework", "?")), str(run_record.get("transport", "?"))
    text = (
        f"{FRAMEWORKS.get(framework, framework)} on {_place(run_record)}, {TRANSPORTS.get(transport, transport)} "
        f"({run_record.get('collective', '?')}), compression {_ladder(run_record, ' → ')}"
    )
    return textwrap.wrap(text, 115)


def _notes(decisions: Sequence[Record]) -> list[str]:
    """The decisions as lines under the picture; what does not fit is counted."""
    lines: list[str] = []
    for number, record in enumerate(decisions, start=1):
        new = textwrap.wrap(f"{number}   {_decision(record, ' → ')}", 185, subsequent_indent=" " * 6)
        room = MOST_DECISION_LINES - len(lines) - (number < len(decisions))
        if len(new) > room:
            return [*lines, f"+{len(decisions) - number + 1} more in the log"]
        lines += new
    return lines


def _draw_times(axis: Axes, columns: Sequence[Span], a_column: int) -> None:
    """The parts of a step, stacked; outliers are cut off and counted."""
    edges = [span.first_step for span in columns] + [columns[-1].last_step + 1]
    stack = [[_zero(getattr(span, field)) for span in columns] for field, _, _ in PARTS]
    totals = [sum(parts) for parts in zip(*stack, strict=True)]
    axis.stackplot(
        edges, *([*values, values[-1]] for values in stack),
        labels=[name for _, name, _ in PARTS], colors=[colour for _, _, colour in PARTS], step="post", linewidth=0,
    )  # fmt: skip
    axis.set_ylabel("ms a step")
    axis.grid(axis="y", color="#e6e6e6")
    limit = _sensible_top(columns, totals)
    axis.set_ylim(0, limit)
    handles, names = axis.get_legend_handles_labels()
    axis.legend(
        handles, names, ncols=len(PARTS), loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2,
        frameon=False, handlelength=1.2, columnspacing=1.8,
    )  # fmt: skip
    beyond = [total for total in totals if total > limit]
    what = "window" if a_column == 1 else f"group of {a_column} windows"
    remarks = [f"one column: median of {_count(a_column, 'window')}"] if a_column > 1 else []
    if beyond:
        remarks.append(f"cut off: {_count(len(beyond), what)}, up to {_ms(max(beyond))}")
    axis.annotate("; ".join(remarks), (1, 1), xycoords="axes fraction", xytext=(0, 4), textcoords="offset points",
                  ha="right", va="bottom", size=9)  # fmt: skip


def _sensible_top(columns: Sequence[Span], totals: Sequence[float]) -> float:
    """Top of the axis in ms: the usual step of every level fits, and most windows; a compilation need not."""
    by_level: dict[str, list[float]] = {}
    for span, total in zip(columns, totals, strict=True):
        by_level.setdefault(span.level, []).append(total)
    usual = max(sorted(group)[(len(group) - 1) // 2] for group in by_level.values())
    most = sorted(totals)[int(PERCENTILE * (len(totals) - 1))]
    top = 1.5 * max(usual, most)
    return (1.08 * max(totals) if max(totals) <= top else top) or 1.0


def _draw_levels(axis: Axes, columns: Sequence[Span], levels: Sequence[str], colours: object) -> None:
    """A band for each stretch, at the height of its level."""
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
    """Thin lines through all panels, numbers over the level's; neighbours too close for two numbers share one."""
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


def _zero(value: float) -> float:
    """What is not known has no height."""
    return 0.0 if math.isnan(value) else value
