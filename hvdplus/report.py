"""The report: what a run did, as a table and a picture.

Works on the records of a run log (``hvdplus.runlog``), read from a file or still in memory. Every figure and every
sentence is computed from the records; where they hold too little, the report says so. Times of several windows are
medians weighted by steps, so that a first window with a compilation in it does not colour the rest. Decisions stand
with the figures they were made from. The sentence at the end credits a level with what it changes, communication and
codec, and with nothing else.

The table needs nothing but Python; the picture needs matplotlib, imported when it is drawn.
"""

from __future__ import annotations

import math
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdplus.controller import Limits
from hvdplus.exchange.coordinator import DRAINING, WARMING, Coordinator
from hvdplus.runlog import Record, run_of
from hvdplus.transport import World

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DENSE = "none"
LIMITS = Limits()
"""What counts as a bottleneck, and as a difference between steps, is what the controller takes for one."""
ENOUGH_STEPS = 5  # fewer steps at a level are no evidence
LETTERS = 110  # letters in a line of text

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


def close(coordinator: Coordinator, world: World, png: str | os.PathLike[str] | None, facts: dict[str, Any]) -> dict[str, Any]:
    """End a run: close its log with ``facts``, and on rank 0 print the table and draw the picture to ``png``.

    A picture that cannot be drawn is no reason to lose a run: it says so and goes on. Returns what the run came to.
    """
    summary = coordinator.finish(**facts)
    if world.transport.rank == 0:
        print(f"\n{table(coordinator.log.records)}", flush=True)
        if coordinator.log.path:
            print(f"\nRun log: {coordinator.log.path}", flush=True)
        if png:
            try:
                print(f"Picture: {picture(coordinator.log.records, png).absolute()}", flush=True)
            except (ImportError, OSError, ValueError) as error:
                print(f"hvdplus: no picture: {error}", file=sys.stderr, flush=True)
    coordinator.log.close()
    return {**summary, "ranks": world.transport.size, "transport": world.transport.name}


# ---------------------------------------------------------------------------------------------------- facts


MEDIANS = (
    "step_ms", "compute_ms", "codec_ms", "exposed_comm_ms", "overlapped_comm_ms", "input_wait_ms", "error",
)  # fmt: skip
"""Fields of a window, and of a span."""


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
    overlapped_comm_ms: float
    """Hidden behind computation: no part of the step."""
    input_wait_ms: float
    error: float
    """Norm of the residuals over the norm of the gradients."""
    payload_bytes: float
    """What one rank sends a step."""
    loss: float
    """The last one known."""

    @property
    def exposed_share(self) -> float:
        """Exposed communication as a share of the step. (Parts beyond the step: logs of old, sparse gradients.)"""
        return min(self.exposed_comm_ms / self.step_ms, 1.0) if self.step_ms else math.nan

    @property
    def held_up_ms(self) -> float:
        """What of the step a level has a say in."""
        return min(self.exposed_comm_ms + self.codec_ms, self.step_ms)


def stretches(records: Sequence[Record]) -> list[Span]:
    """One span for each stretch of consecutive windows at the same level."""
    run_record = run_of(records)
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
        value = _weighted_median([_number(window.get(field)) for window in windows], steps)
        return 0.0 if value < 0 else value

    return Span(
        level=level,
        first_step=windows[0]["first_step"],
        last_step=windows[-1]["last_step"],
        steps=sum(steps),
        **{field: middle(field) for field in MEDIANS},
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


def _windows(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if record["kind"] == "window"]


def _decisions(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if record["kind"] == "decision"]


def _passed_over(records: Sequence[Record]) -> list[str]:
    """Levels that ``auto`` never runs, since they send no less than one below them."""
    run_record = run_of(records)
    if run_record.get("compression") != "auto":
        return []
    # Buckets may have been cut anew since the run began.
    levels = [record.get("levels") for record in records if record["kind"] in ("run", "resize")][-1] or {}
    sent = {name: _number(level.get("payload_bytes")) / 1e6 for name, level in levels.items()}
    names, passed_over = list(sent), []
    for place, name in enumerate(names):
        below = next((lower for lower in names[:place] if sent[lower] <= sent[name]), None)
        if below:
            sends, less = _figure(sent[name]), _figure(sent[below])
            passed_over.append(f"{name} (sends {sends} MB, no less than {below}: {less} MB)")
    return passed_over


def _refused(records: Sequence[Record]) -> dict[str, str]:
    """Levels that may not run any more -> why. One that is forbidden takes those above it along."""
    ladder, refused = list(run_of(records).get("ladder") or []), dict[str, str]()
    for record in records:
        reason = str(record.get("reason")).partition(";")[0]
        if record["kind"] == "forbid":
            level = str(record.get("level"))
            levels = ladder[ladder.index(level) :] if level in ladder else [level]
        elif record["kind"] == "decision" and "(budget " in reason:
            levels = [record["from"]]
        else:
            continue
        refused.update(dict.fromkeys(levels, f"from step {record.get('step', '?')} on, since {reason}"))
    return refused


# ---------------------------------------------------------------------------------------------------- words


def closing(records: Sequence[Record]) -> str:
    """One sentence: what hvdplus did for this run, as far as the records show it."""
    run_record, windows = run_of(records), _windows(records)
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
        return f"Too little was measured ({count(steps, 'step')}) to say what hvdplus did."
    if run_record.get("ranks") == 1:
        return f"One rank has nobody to talk to: {_ms(main.step_ms)} a step, and no communication to shorten."
    asked = run_record.get("compression") not in (None, "auto")
    others = [span for level, span in levels.items() if level != main.level and span.steps >= ENOUGH_STEPS]
    if main.level != DENSE:
        return _closing_compressed(main, next((span for span in others if span.level == DENSE), None), steps, asked)
    if asked:
        return (
            f"Gradients were sent uncompressed, as asked for: communication held up {main.exposed_share:.0%} of the "
            f"step ({_ms(main.step_ms)})."
        )
    if others:
        best = max(others, key=lambda span: _saved(span, main))
        return _closing_tried(main, best, steps, _refused(records).get(best.level))
    return _closing_dense(main, steps, _decisions(records))


def _closing_tried(dense: Span, best: Span, steps: int, refused: str | None) -> str:
    """More steps ran uncompressed than at any other level; of those, ``best`` saved most."""
    if _saved(best, dense) <= LIMITS.margin:
        return (
            f"Compression did not pay: the best level tried, {best.level}, took {_versus(best, dense)}, so "
            f"{dense.steps} of {steps} steps ran uncompressed."
        )
    but = f"was refused {refused}" if refused else f"ran for only {best.steps} of {steps} steps"
    return f"{best.level} took {_versus(best, dense)}, but {but}."


def _closing_dense(dense: Span, steps: int, decisions: Sequence[Record]) -> str:
    """Nothing but uncompressed steps, or as good as nothing."""
    share = f"{dense.exposed_share:.0%} of the step"
    held_up = [decision for decision in decisions if _share(decision) > LIMITS.bottleneck]
    if not held_up and dense.exposed_share <= LIMITS.bottleneck:
        return f"Communication was never the bottleneck ({share}): gradients were sent uncompressed."
    if not held_up or held_up[-1]["to"] != DENSE:
        return f"Communication held up {share}, but no other level ran long enough to compare ({count(steps, 'step')})."
    decision, found = held_up[-1], _by_level(held_up[-1])
    promises = {name: level["predicted_step_ms"] for name, level in found.items() if "predicted_step_ms" in level}
    best = min(promises, key=lambda name: promises[name], default="")
    why = f"no level promised enough ({best}, the best: {_ms(promises[best])})" if best else "no other level may run"
    return (
        f"Communication held up {_share(decision):.0%} of a {_ms(found[DENSE]['step_ms'])} step (step "
        f"{decision['step']}), but {why}: gradients were sent uncompressed."
    )


def _closing_compressed(main: Span, dense: Span | None, steps: int, asked: bool) -> str:
    """Most steps ran at a compressed level."""
    share = f"{main.exposed_share:.0%} of the step"
    if dense is None:
        why = ", as asked for" if asked else ""
        return (
            f"{main.steps} of {steps} steps ran at level {main.level}{why} ({_ms(main.step_ms)}, communication "
            f"{share}); too few ran dense to compare with."
        )
    versus = _versus(main, dense)
    if _saved(main, dense) <= LIMITS.margin:
        return f"Level {main.level} made the step no shorter: {versus}."
    if main.exposed_share <= LIMITS.bottleneck:
        return f"Communication was hidden at level {main.level}: {versus}."
    return f"Level {main.level} made the step shorter: {versus}; communication still held up {share}."


def _alike(span: Span, dense: Span) -> float:
    """Milliseconds of a dense step that computes as long as ``span`` does."""
    alike = span.step_ms + dense.held_up_ms - span.held_up_ms
    return dense.step_ms if math.isnan(alike) else alike


def _saved(span: Span, dense: Span) -> float:
    """Share of the dense step that a level saves: as measured, and not because computation took less."""
    least = min(_alike(span, dense), dense.step_ms)
    return 1 - span.step_ms / least if least else 0.0


def _versus(span: Span, dense: Span) -> str:
    """A level's step and the dense one; where they computed unequally, that is said."""
    alike, tolerance = _alike(span, dense), LIMITS.margin * dense.step_ms
    if alike < dense.step_ms - tolerance:
        return (
            f"{_ms(span.step_ms)} a step against {_ms(alike)} dense with the same computation "
            f"({alike / span.step_ms:.2f} x; dense as it ran: {_ms(dense.step_ms)})"
        )
    longer = alike - dense.step_ms
    remark = f"; its computation and input wait took {_ms(longer)} longer" if longer > tolerance else ""
    times = f"{dense.step_ms / span.step_ms:.2f} x"
    return f"{_ms(span.step_ms)} a step against {_ms(dense.step_ms)} dense ({times}{remark})"


def _ms(value: float) -> str:
    return f"{_figure(value)} ms"


def _figure(value: float) -> str:
    """Three significant digits or all whole ones, without exponents; - for what is not known."""
    if math.isnan(value):
        return "-"
    decimals = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{min(max(decimals, 0), 4)}f}"


def count(number: int, noun: str) -> str:
    """``1 rank``, ``4 ranks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _ladder(run_record: Record, arrow: str) -> str:
    """``auto: none -> fp16``, or the fixed level."""
    compression = str(run_record.get("compression", "?"))
    return f"{compression}: {arrow.join(run_record.get('ladder') or [])}" if compression == "auto" else compression


def _place(run_record: Record) -> str:
    """``2 ranks on 1 host``."""
    hosts = run_record.get("hosts") or {}
    return count(run_record.get("ranks") or 0, "rank") + (f" on {count(len(hosts), 'host')}" if hosts else "")


def _decision(record: Record, arrow: str) -> str:
    """One decision in one line."""
    before, after = record["from"], record["to"]
    step = f"step {record['step']}, " if "step" in record else ""
    return f"{step}{f'stays at {after}' if before == after else f'{before}{arrow}{after}'}: {record['reason']}"


def _by_level(decision: Record) -> dict[str, dict[str, float]]:
    """The evidence of a decision: level, or ``link`` -> figure -> value."""
    figures: dict[str, dict[str, float]] = {}
    for key, value in (decision.get("evidence") or {}).items():
        name, _, figure = key.rpartition(".")
        if not math.isnan(_number(value)):
            figures.setdefault(name, {})[figure] = _number(value)
    return figures


def _share(decision: Record) -> float:
    """Exposed communication as a share of the dense step, as a decision found it; 0: it does not say."""
    dense = _by_level(decision).get(DENSE, {})
    step_ms = dense.get("step_ms")
    return min(dense.get("exposed_comm_ms", 0.0) / step_ms, 1.0) if step_ms else 0.0


def _evidence(decision: Record) -> str:
    """The figures that a decision rests on, in sentences; logs of old hold fewer."""
    measured, predicted, last = [], [], []
    parts = {"exposed_comm_ms": "exposed", "overlapped_comm_ms": "hidden", "codec_ms": "codec"}
    for name, figures in _by_level(decision).items():
        if "step_ms" in figures:
            of_it = ", ".join(f"{figures[part]:.2f} ms {word}" for part, word in parts.items() if part in figures)
            measured.append(f"{name} {figures['step_ms']:.2f} ms a step" + (f" ({of_it})" if of_it else ""))
        if "predicted_step_ms" in figures:
            predicted.append(f"{name} {figures['predicted_step_ms']:.2f} ms")
        if figures.get("error"):
            last.append(f"Residual at {name}: {figures['error']:.2f} times the gradient.")
        if "ms_per_allreduce" in figures:
            slope = figures.get("ms_per_MB")
            rate = f" and {_figure(1e3 / slope)} MB/s" if slope else ", whatever it sends"
            last.insert(0, f"Link: {figures['ms_per_allreduce']:.2f} ms an all-reduce{rate}.")
    groups = {"Measured": measured, "Predicted": predicted}
    return " ".join([*(f"{title}: {', '.join(group)}." for title, group in groups.items() if group), *last])


def explain(number: int, decision: Record) -> str:
    """A decision with its reason, and below it what it rests on."""
    lines = [_fill(_decision(decision, " -> "), f"{number:3}. "), _fill(_evidence(decision), " " * 5)]
    return "\n".join(filter(None, lines))


def _fill(text: str, indent: str) -> str:
    """``text`` in lines that a terminal shows whole; all but the first as far in as ``indent`` is wide."""
    glued = re.sub(r"(?<=\d) (?=ms|MB|x)", "\xa0", text)  # a figure and its unit
    further = " " * len(indent)
    lines = textwrap.fill(glued, LETTERS, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False)
    return lines.replace("\xa0", " ")


# ---------------------------------------------------------------------------------------------------- table


def table(records: Sequence[Record]) -> str:
    """The report as plain text: facts, one row a stretch of windows at one level, decisions, end, one sentence."""
    return "\n\n".join(
        block
        for block in (
            _facts(records),
            _rows(stretches(records), _number(run_of(records).get("gradient_bytes"))),
            _decision_list(records),
            _fill(_end(records), "") + "\n" + _fill(closing(records), ""),
        )
        if block
    )


def _facts(records: Sequence[Record]) -> str:
    run_record = run_of(records)
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
    if passed_over := _passed_over(records):
        facts["passed over"] = "; ".join(passed_over)
    if refused := _refused(records):
        reasons = dict.fromkeys(refused.values())
        facts["refused"] = "; ".join(
            f"{', '.join(level for level, why in refused.items() if why == reason)} {reason}" for reason in reasons
        )
    return "\n".join(["hvdplus run", *(_fill(fact, f"  {name:<11}  ") for name, fact in facts.items())])


COLUMNS = (
    ("steps", ""), ("level", ""), ("step", "ms"), ("compute", "ms"), ("codec", "ms"), ("exposed", "comm ms"),
    ("hidden", "comm ms"), ("input", "wait ms"), ("error", "to gradient"), ("MB sent", "a step"), ("ratio", "to fp32"),
    ("loss", "at end"),
)  # fmt: skip


def _rows(spans: Sequence[Span], gradient_bytes: float) -> str:
    """``gradient_bytes``: what an uncompressed step sends."""
    if not spans:
        return ""
    rows = [list(row) for row in zip(*COLUMNS, strict=True)]
    for span in spans:
        ratio = gradient_bytes / span.payload_bytes if span.payload_bytes else math.nan
        times = (getattr(span, field) for field in MEDIANS if field.endswith("_ms"))
        rows.append(
            [
                f"{span.first_step}-{span.last_step}",
                span.level,
                *("-" if math.isnan(time) else f"{time:.2f}" for time in times),
                "-" if math.isnan(span.error) else f"{span.error:.2f}",
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


def _decision_list(records: Sequence[Record]) -> str:
    decisions = _decisions(records)
    memory = (run_of(records).get("limits") or {}).get("memory_steps")
    rests_on = (
        f", and what each rests on: lower quartiles of pairs of a level's latest steps, {memory} at most"
        if memory
        else ""
    )
    lines = [explain(number, decision) for number, decision in enumerate(decisions, start=1)]
    return "\n".join([f"Decisions{rests_on}", *lines]) if lines else ""


def _end(records: Sequence[Record]) -> str:
    end = next((record for record in records if record["kind"] == "end"), None)
    if end is None:
        return "The log has no end: the job is still running, or was stopped."
    extras = [
        f"{name} {_figure(value) if isinstance(value, float) else value}"
        for name, value in end.items()
        if name not in ("kind", "steps", "wall_seconds")
    ]
    done = f"{count(end.get('steps') or 0, 'step')} in {_figure(_number(end.get('wall_seconds')))} s"
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
    windows, run_record = _windows(records), run_of(records)
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
    remarks = [f"one column: median of {count(a_column, 'window')}"] if a_column > 1 else []
    if beyond:
        remarks.append(f"cut off: {count(len(beyond), what)}, up to {_ms(max(beyond))}")
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
