"""A run log in sentences: what the run was, why each decision was made, and what compression did for it.

Each sentence is made from figures of the records (``hvdplus.log.facts``); where they hold too little, it says so. The
sentence at the end credits a level with what the level changes, communication and codec, and with nothing else.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from hvdplus.control.config import Config
from hvdplus.log.facts import (
    DENSE,
    PLAIN,
    Record,
    Span,
    alone,
    decisions_of,
    delay_prices,
    dense_exposed_share,
    evidence_by_level,
    levels_refused,
    run_of,
    spans_by_level,
    spread,
    steps_in,
    tried,
    windows_of,
)

MARGIN = Config().margin
"""Share of the step that counts as a difference, as for the controller."""
BOTTLENECK = 0.05
"""Share of the step above which exposed communication is called a bottleneck."""
WARNED_FROM = 1.2
"""How many times sooner one rank alone has to be, to be mentioned."""
UNEQUAL_FROM = 1.15
"""How many times as long as the middle rank one has to compute, to be mentioned."""
ENOUGH_STEPS = 5
"""Fewer steps at a level are no evidence."""
LETTERS = 110
"""Letters in a line of text."""
MOST_LETTERS = 4000
"""Letters of one text of a log that are shown; hvdplus itself writes fewer."""

FRAMEWORKS = {"torch": "PyTorch", "keras": "Keras"}
TRANSPORTS = {
    "horovod-mpi": "Horovod over MPI",
    "horovod-gloo": "Horovod over Gloo",
    "mpi4py": "mpi4py",
    "torch-gloo": "torch.distributed over Gloo",
    "torch-nccl": "torch.distributed over NCCL and Gloo",
    "local": "one process, no network",
}


def closing(records: Sequence[Record]) -> str:
    """One sentence on what compression did for this run, as far as the records show it."""
    run_record, steps = run_of(records), sum(map(steps_in, windows_of(records)))
    levels = spans_by_level(records)
    if not levels:
        return "No steps were recorded: there is nothing to compare."
    main = max(levels.values(), key=lambda span: span.steps)
    if main.steps < ENOUGH_STEPS or math.isnan(main.step_ms) or math.isnan(main.exposed_share):
        return f"Too little was measured ({count(steps, 'step')}) to say what hvdplus did."
    if run_record.get("ranks") == 1:
        return f"The job ran on one rank and had no communication to shorten ({in_ms(main.step_ms)} a step)."
    asked = run_record.get("compression") not in (None, "auto")
    others = [span for level, span in levels.items() if level != main.level and span.steps >= ENOUGH_STEPS]
    if main.level != DENSE:
        dense = next((span for span in others if span.level == DENSE), None)
        return _closing_compressed(main, dense, steps, asked) + _sooner(records, main, others)
    if asked:
        return (
            f"Gradients were sent uncompressed, as asked for: communication held up {main.exposed_share:.0%} of the "
            f"step ({in_ms(main.step_ms)})."
        )
    ratios = tried(records)
    if ratios and min(ratios.values()) >= 1.005 and not levels_refused(records):
        level = min(ratios, key=lambda name: ratios[name])
        return (
            f"Compression did not pay: in turns with {DENSE}, the best level tried, {level}, cost {ratios[level]:.2f} "
            f"times as much (time a step, with the price of delay), so {main.steps} of {steps} steps ran uncompressed."
        )
    if others:
        best = max(others, key=lambda span: saved_share(span, main))
        return _closing_tried(main, best, steps, levels_refused(records).get(best.level))
    return _closing_dense(main, steps, decisions_of(records))


def alone_text(records: Sequence[Record]) -> str:
    """A sentence where one rank alone would come to the same loss clearly sooner than all together; else empty."""
    found = alone(records)
    if not found or found.sooner < WARNED_FROM:
        return ""
    ranks = count(run_of(records)["ranks"], "rank")
    return (
        f"One rank alone would probably come to the same loss {found.sooner:.1f} x sooner than {ranks} together: their "
        f"gradients are much alike (cosine {found.cosine:.2f}), so that a step of theirs is worth {found.worth:.2f} of "
        f"its own, but takes {found.takes:.1f} times as long. Larger batches on each rank, or a faster network, change "
        "that."
    )


def spread_text(records: Sequence[Record]) -> str:
    """A sentence where one rank computes clearly longer than the middle one; else empty."""
    found = spread(records)
    if not found or found.times < UNEQUAL_FROM:
        return ""
    return (
        f"Rank {found.rank} computes {found.times:.1f} times as long as the middle rank ({in_ms(found.slowest_ms)} a "
        f"step against {in_ms(found.middle_ms)}): all ranks wait for it, and compression does not change that."
    )


def _closing_tried(dense: Span, best: Span, steps: int, refused: str | None) -> str:
    """Sentence for a run with more uncompressed steps than steps at any other level; ``best`` is the best other
    level."""
    if saved_share(best, dense) <= MARGIN:
        return (
            f"Compression did not pay: the best level tried, {best.level}, took {_versus(best, dense)}, so "
            f"{dense.steps} of {steps} steps ran uncompressed."
        )
    but = f"was refused {refused}" if refused else f"ran for only {best.steps} of {steps} steps"
    return f"{best.level} took {_versus(best, dense)}, but {but}."


def _closing_dense(dense: Span, steps: int, decisions: Sequence[Record]) -> str:
    """Sentence for a run that compressed no steps, or too few to compare."""
    share = f"{dense.exposed_share:.0%} of the step"
    held_up = [decision for decision in decisions if dense_exposed_share(decision) > BOTTLENECK]
    if not held_up and dense.exposed_share <= BOTTLENECK:
        return f"Communication was never the bottleneck ({share}): gradients were sent uncompressed."
    if not held_up or held_up[-1]["to"] != DENSE:
        return f"Communication held up {share}, but no other level ran long enough to compare ({count(steps, 'step')})."
    decision, found = held_up[-1], evidence_by_level(held_up[-1])
    promises = {name: level["predicted_step_ms"] for name, level in found.items() if "predicted_step_ms" in level}
    best = min(promises, key=lambda name: promises[name], default="")
    why = f"no level promised enough (the best, {best}: {in_ms(promises[best])})" if best else "no other level may run"
    return (
        f"Communication held up {dense_exposed_share(decision):.0%} of a {in_ms(found[DENSE]['step_ms'])} step "
        f"(step {decision['step']}), but {why}: gradients were sent uncompressed."
    )


def _closing_compressed(main: Span, dense: Span | None, steps: int, asked: bool) -> str:
    """Sentence for a run with more steps at the compressed level ``main`` than at any other."""
    share = f"{main.exposed_share:.0%} of the step"
    if dense is None:
        why = ", as asked for" if asked else ""
        return (
            f"{main.steps} of {steps} steps ran at level {main.level}{why} ({in_ms(main.step_ms)}, communication "
            f"{share}); too few ran dense to compare with."
        )
    versus = _versus(main, dense)
    if saved_share(main, dense) <= MARGIN:
        return f"Level {main.level} made the step no shorter: {versus}."
    if main.exposed_share <= BOTTLENECK:
        return f"Communication was hidden at level {main.level}: {versus}."
    return f"Level {main.level} made the step shorter: {versus}; communication still held up {share}."


def _sooner(records: Sequence[Record], main: Span, others: Sequence[Span]) -> str:
    """A further sentence: how much sooner ``main`` comes to the same loss than the better of the plain levels, measured
    or, where they did not run, predicted; empty where that is known or nothing is."""
    if main.level in PLAIN and any(span.level == DENSE for span in others):
        return ""
    predicted = {
        name: (figures["predicted_step_ms"], " as predicted")
        for decision in decisions_of(records)
        for name, figures in evidence_by_level(decision).items()
        if name in PLAIN and name != main.level and "predicted_step_ms" in figures
    }
    plain = predicted | {span.level: (like_for_like(main, span), "") for span in others if span.level in PLAIN}
    if not plain:
        return ""
    best = min(plain, key=lambda name: plain[name][0])
    step_ms, source = plain[best]
    price = delay_prices(records).get(main.level, 1.0)
    gain = step_ms / (main.step_ms * price)
    delay = f" and {price - 1:.1%} more steps for what arrives late" if price - 1 >= 0.0005 else ""
    than = f"than at {best} ({in_ms(step_ms)} a step{source})"
    if abs(gain - 1) <= MARGIN:
        return f" With {in_ms(main.step_ms)} a step{delay} it comes to the same loss no sooner {than}."
    how = f"{gain:.2f} x sooner" if gain > 1 else f"{1 / gain:.2f} x later"
    return f" With {in_ms(main.step_ms)} a step{delay} it comes to the same loss {how} {than}."


def like_for_like(span: Span, dense: Span) -> float:
    """The step of ``dense`` in milliseconds, if computation had taken as long as in ``span``."""
    alike = span.step_ms + dense.held_up_ms - span.held_up_ms
    return dense.step_ms if math.isnan(alike) else alike


def saved_share(span: Span, dense: Span) -> float:
    """Share of the dense step that a level saves in communication and codec, whatever computation took."""
    least = min(like_for_like(span, dense), dense.step_ms)
    return 1 - span.step_ms / least if least else 0.0


def _versus(span: Span, dense: Span) -> str:
    """A level's step beside the dense step, with a remark where computation took unequally long."""
    alike, tolerance = like_for_like(span, dense), MARGIN * dense.step_ms
    if alike < dense.step_ms - tolerance:
        return (
            f"{in_ms(span.step_ms)} a step against {in_ms(alike)} dense with the same computation "
            f"({alike / span.step_ms:.2f} x; dense as it ran: {in_ms(dense.step_ms)})"
        )
    longer = alike - dense.step_ms
    remark = f"; its computation and input wait took {in_ms(longer)} longer" if longer > tolerance else ""
    times = f"{dense.step_ms / span.step_ms:.2f} x"
    return f"{in_ms(span.step_ms)} a step against {in_ms(dense.step_ms)} dense ({times}{remark})"


def in_ms(value: float) -> str:
    """``12.3 ms``; ``value`` is in milliseconds."""
    return f"{three_digits(value)} ms"


def three_digits(value: float) -> str:
    """A figure with three significant digits, or all digits before the point, and no exponent; ``-`` for NaN."""
    if math.isnan(value):
        return "-"
    decimals = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{min(max(decimals, 0), 9)}f}"


def count(number: int, noun: str) -> str:
    """``1 rank``, ``4 ranks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ladder_text(run_record: Record, arrow: str) -> str:
    """``auto: none -> fp16``, or the fixed level."""
    compression = str(run_record.get("compression", "?"))
    return f"{compression}: {arrow.join(run_record.get('ladder') or [])}" if compression == "auto" else compression


def ranks_and_hosts(run_record: Record) -> str:
    """``2 ranks on 1 host``."""
    hosts = run_record.get("hosts") or {}
    return count(run_record.get("ranks") or 0, "rank") + (f" on {count(len(hosts), 'host')}" if hosts else "")


def decision_line(record: Record, arrow: str) -> str:
    """One decision in one line."""
    before, after = record["from"], record["to"]
    step = f"step {record['step']}, " if "step" in record else ""
    return f"{step}{f'stays at {after}' if before == after else f'{before}{arrow}{after}'}: {record['reason']}"


def evidence_text(decision: Record) -> str:
    """The evidence of a decision, in sentences. Logs of older versions hold less."""
    measured, predicted, link, residuals = [], [], "", []
    parts = {"exposed_comm_ms": "exposed", "overlapped_comm_ms": "hidden", "codec_ms": "codec"}
    for name, figures in evidence_by_level(decision).items():
        if "step_ms" in figures:
            of_it = ", ".join(f"{figures[part]:.2f} ms {word}" for part, word in parts.items() if part in figures)
            measured.append(f"{name} {figures['step_ms']:.2f} ms a step" + (f" ({of_it})" if of_it else ""))
        if "predicted_step_ms" in figures:
            predicted.append(f"{name} {figures['predicted_step_ms']:.2f} ms")
        if figures.get("error"):
            residuals.append(f"{name} {figures['error']:.2f}")
        if "ms_per_allreduce" in figures:
            slope = figures.get("ms_per_MB")
            rate = f" and {three_digits(1e3 / slope)} MB/s" if slope else ", whatever it sends"
            link = f"{figures['ms_per_allreduce']:.2f} ms an all-reduce{rate}"
    groups = {"Measured": measured, "Predicted": predicted, "Link": [link] if link else []}
    groups["Residual over gradient"] = residuals
    return " ".join(f"{title}: {', '.join(group)}." for title, group in groups.items() if group)


def explain(number: int, decision: Record, evidence: bool = True) -> str:
    """A decision with its reason, and below it its evidence."""
    lines = [fill(decision_line(decision, " -> "), f"{number:3}. ")]
    if evidence:
        lines.append(fill(evidence_text(decision), " " * 5))
    return "\n".join(filter(None, lines))


def printable(value: Any) -> Any:
    """A copy of ``value`` (text, or lists and dictionaries with text in them) that is safe to print.

    A log may come from anybody. Control characters would move the cursor, retitle the window or hide text; here they
    become visible escapes, as in ``repr``.
    """
    if isinstance(value, str):
        text = value if len(value) <= MOST_LETTERS else value[:MOST_LETTERS] + "..."
        if text.isprintable():
            return text
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if isinstance(value, Mapping):
        return {printable(key): printable(item) for key, item in value.items()}
    return [printable(item) for item in value] if isinstance(value, (list, tuple)) else value


def fill(text: str, indent: str) -> str:
    """``text`` in lines of at most ``LETTERS``; further lines are indented by the width of ``indent``."""
    glued = re.sub(r"(?<=\d) (?=ms|MB|x)", "\xa0", text)  # a figure and its unit
    further = " " * len(indent)
    lines = textwrap.fill(glued, LETTERS, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False)
    return lines.replace("\xa0", " ")
