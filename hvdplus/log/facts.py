"""What a run log shows, as figures: stretches of windows, decisions with their evidence, levels left out.

Every figure is computed from the records (``hvdplus.log.runlog``), read from a file or still in memory. Figures of
several windows are medians weighted by steps, so that one slow window, such as a first one with a compilation in it,
does not change them. What the records do not hold is NaN.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from hvdplus.control.delay import price_of_delay

Record = dict[str, Any]
"""One line of the log: plain JSON values, ``kind`` among them."""

DENSE = "none"
PLAIN = (DENSE, "fp16")
"""Levels that stock Horovod has, too: what compression is held against."""

TRIED = re.compile(r"(?P<level>\S+) costs (?P<ratio>\d+\.\d+) \[.*\] times (?P<held>[^\s,]+),")
"""The reason of a decision that rests on pairs of blocks."""
IN_TURNS = ": in turns"
"""What it ends with while the trial goes on."""

DRAINING = "draining"
"""Level of windows of dense steps that flush a residual; not a level of the ladder."""

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
    """Hidden behind computation, so it does not make the step longer."""
    input_wait_ms: float
    error: float
    """Norm of the residuals over the norm of the gradients."""
    cosine: float
    """Between the gradients of two ranks, on average."""
    payload_bytes: float
    """Bytes that one rank sends in a step."""
    loss: float
    """The last known loss."""

    @property
    def exposed_share(self) -> float:
        """Exposed communication as a share of the step; at most 1, because parts can exceed the step in older logs."""
        return min(self.exposed_comm_ms / self.step_ms, 1.0) if self.step_ms else math.nan

    @property
    def held_up_ms(self) -> float:
        """The part of the step that depends on the level."""
        return min(self.exposed_comm_ms + self.codec_ms, self.step_ms)


def check_not_empty(records: Sequence[Record]) -> None:
    """Raises ValueError where there is no record at all."""
    if not records:
        raise ValueError("the log is empty; the job wrote nothing")


def run_of(records: Iterable[Record]) -> Record:
    """The record of the run; empty if the log has none."""
    return next((record for record in records if record["kind"] == "run"), {})


def rhythm_of(records: Iterable[Record]) -> Record | None:
    """The record of the run's local steps; None: it was in lock-step."""
    return next((record for record in records if record["kind"] == "local"), None)


def stretches(records: Sequence[Record]) -> list[Span]:
    """One span for each stretch of consecutive windows at the same level."""
    run_record = run_of(records)
    return [span_of(list(group), run_record) for _, group in groupby(windows_of(records), key=level_of)]


def span_of(windows: Sequence[Record], run_record: Record) -> Span:
    """Windows of one level as one span: medians weighted by steps, and the last known loss."""
    steps = [steps_in(window) for window in windows]
    level = level_of(windows[-1])
    sent = number_of(windows[-1].get("payload_bytes"))
    if math.isnan(sent):
        sent = number_of((run_record.get("payload_bytes") or {}).get(level))
    losses = [loss for loss in (number_of(window.get("loss")) for window in windows) if not math.isnan(loss)]

    def middle(field: str) -> float:
        value = weighted_median([number_of(window.get(field)) for window in windows], steps)
        return 0.0 if value < 0 else value

    return Span(
        level=level,
        first_step=windows[0]["first_step"],
        last_step=windows[-1]["last_step"],
        steps=sum(steps),
        **{field: middle(field) for field in MEDIANS},
        cosine=mean_cosine(windows),
        payload_bytes=sent,
        loss=losses[-1] if losses else math.nan,
    )


def mean_cosine(windows: Sequence[Record]) -> float:
    """Between the gradients of two ranks; the mean, because measurements scatter, and are right on average."""
    known = [(cosine, steps_in(each)) for each in windows if not math.isnan(cosine := number_of(each.get("cosine")))]
    return sum(cosine * steps for cosine, steps in known) / sum(steps for _, steps in known) if known else math.nan


def weighted_median(values: Sequence[float], weights: Sequence[int]) -> float:
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


def number_of(value: object) -> float:
    """A record's figure as a float; NaN if it is missing, null, not a finite number, or too large for a float."""
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else math.nan
    except OverflowError:
        return math.nan


def steps_in(window: Record) -> int:
    """Steps in a window."""
    return int(window.get("steps") or window["last_step"] - window["first_step"] + 1)


def level_of(window: Record) -> str:
    """The level that a window ran at."""
    return str(window["level"])


def windows_of(records: Iterable[Record]) -> list[Record]:
    """The records of windows of steps."""
    return [record for record in records if record["kind"] == "window"]


def windows_in(windows: Iterable[Record]) -> int:
    """Number of windows that the job wrote; one window in memory may stand for several."""
    return sum(window.get("windows", 1) for window in windows)


def decisions_of(records: Iterable[Record]) -> list[Record]:
    """The records of decisions."""
    return [record for record in records if record["kind"] == "decision"]


def evidence_by_level(decision: Record) -> dict[str, dict[str, float]]:
    """The evidence of a decision: level, or ``link`` -> figure -> value."""
    figures: dict[str, dict[str, float]] = {}
    for key, value in (decision.get("evidence") or {}).items():
        name, _, figure = key.rpartition(".")
        if not math.isnan(number_of(value)):
            figures.setdefault(name, {})[figure] = number_of(value)
    return figures


def probes_of(run_record: Record) -> list[tuple[int, float]]:
    """What sums took before training began: (bytes, seconds)."""
    return [(size, micros / 1e6) for size, micros in run_record.get("probes") or []]


def delay_prices(records: Sequence[Record]) -> dict[str, float]:
    """Level -> how many times the steps of dense a training needs there, by the errors of the run and its price of
    delay; levels that keep nothing back are left out."""
    price = number_of((run_of(records).get("limits") or {}).get("delay_price"))
    if math.isnan(price):
        return {}
    errors = {
        name: figures["error"]
        for decision in decisions_of(records)
        for name, figures in evidence_by_level(decision).items()
        if "error" in figures
    }
    windows = [window for window in windows_of(records) if not math.isnan(number_of(window.get("error")))]
    for level in {level_of(window) for window in windows}:
        same = [window for window in windows if level_of(window) == level]
        errors[level] = weighted_median([number_of(each["error"]) for each in same], [steps_in(each) for each in same])
    levels = run_of(records).get("levels") or {}
    weights = {name: level.get("delay_weight", 1.0) for name, level in levels.items() if isinstance(level, dict)}
    return {name: price_of_delay(price * weights.get(name, 1.0), error) for name, error in errors.items() if error}


class Alone(NamedTuple):
    """One rank with its share of each batch and nobody to talk to, beside the ranks of a run."""

    sooner: float
    """How many times sooner than the ranks it would come to the same loss."""
    cosine: float
    worth: float
    """Steps of its own that a step of all ranks is worth."""
    takes: float
    """Time of a step of all ranks, delay included, over that of its own."""


def alone(records: Sequence[Record]) -> Alone | None:
    """What one rank alone would have come to, where the log tells.

    A training with a batch of B samples takes 1 + noise scale / B times the steps of one with all samples (McCandlish
    et al., arXiv 1812.06162), each at a learning rate that suits it. The cosine tells the noise scale, see
    ``hvdplus.exchange.sketch``.
    """
    ranks, windows, spans = run_of(records).get("ranks") or 1, windows_of(records), spans_by_level(records)
    if ranks < 2 or not spans:
        return None
    cosine, main = mean_cosine(windows), max(spans.values(), key=lambda span: span.steps)
    own_ms = main.compute_ms + main.input_wait_ms
    if math.isnan(cosine + own_ms + main.step_ms) or not own_ms:
        return None
    alike = min(1.0, max(0.0, cosine))
    worth = 1 / (alike + (1 - alike) / ranks)
    takes = main.step_ms * delay_prices(records).get(main.level, 1.0) / own_ms
    return Alone(takes / worth, cosine, worth, takes)


class Spread(NamedTuple):
    """How unequally long ranks compute. Milliseconds a step."""

    rank: int
    """The slowest one."""
    slowest_ms: float
    middle_ms: float
    """Of the middle rank."""
    steps: int
    """In which it was the slowest."""

    @property
    def times(self) -> float:
        """How many times as long as the middle rank the slowest one computes."""
        return self.slowest_ms / self.middle_ms if self.middle_ms else 1.0


def spread(records: Sequence[Record]) -> Spread | None:
    """The rank that was the slowest in most steps; None: the log does not tell, or there is one rank."""
    by_rank: dict[int, list[Record]] = {}
    for window in windows_of(records):
        if isinstance(window.get("slowest_rank"), int):
            by_rank.setdefault(window["slowest_rank"], []).append(window)
    if not by_rank or (run_of(records).get("ranks") or 1) < 2:
        return None
    rank, windows = max(by_rank.items(), key=lambda pair: sum(map(steps_in, pair[1])))
    steps = [steps_in(window) for window in windows]
    slowest, middle = (
        weighted_median([number_of(window.get(field)) for window in windows], steps)
        for field in ("slowest_compute_ms", "middle_compute_ms")
    )
    return None if math.isnan(slowest + middle) else Spread(rank, slowest, middle, sum(steps))


def fp32_bytes(records: Sequence[Record]) -> float:
    """Bytes of all gradients in float32, whatever their own type; NaN: the log does not tell."""
    about = run_of(records)
    parameters = number_of(about.get("parameters"))
    return 4 * parameters if parameters > 0 else number_of(about.get("gradient_bytes"))


class Traffic(NamedTuple):
    """What a rank has sent."""

    bytes: float
    dense_bytes: float
    """What the same steps would have sent in float32."""

    @property
    def saved_share(self) -> float:
        """Share of the bytes that were not sent."""
        return 1 - self.bytes / self.dense_bytes if self.dense_bytes else math.nan


def traffic(records: Sequence[Record]) -> Traffic:
    """Of all steps that the log has; bandwidth probes and metadata do not count."""
    dense, windows = fp32_bytes(records), windows_of(records)
    sent = [(steps_in(window), span_of([window], run_of(records)).payload_bytes) for window in windows]
    known = [(steps, size) for steps, size in sent if not math.isnan(size)]
    return Traffic(sum(steps * size for steps, size in known), dense * sum(steps for steps, _ in known))


class Bandwidth(NamedTuple):
    """Of all-reduces, in bytes a second, as NCCL's tests count them."""

    algorithm: float
    """Payload over time."""
    bus: float
    """What each rank's link carries in a ring: 2 (N - 1) / N times as much."""


def bandwidth(span: Span, ranks: int) -> Bandwidth:
    """At one level; NaN where nothing was sent. Communication behind computation counts as long as it took."""
    seconds = (span.exposed_comm_ms + span.overlapped_comm_ms) / 1e3
    algorithm = span.payload_bytes / seconds if seconds > 0 else math.nan
    return Bandwidth(algorithm, algorithm * 2 * (ranks - 1) / ranks)


def samples_per_second(span: Span, records: Sequence[Record]) -> float:
    """All ranks' together; NaN: the run does not say how many a step has, or takes as many local steps between two
    exchanges as measurements say."""
    about, rhythm = run_of(records), rhythm_of(records) or {"every": 1}
    samples = number_of(about.get("batch_size")) * number_of(about.get("ranks")) * number_of(rhythm.get("every"))
    return 1e3 * samples / span.step_ms if samples and span.step_ms else math.nan


def spans_by_level(records: Sequence[Record]) -> dict[str, Span]:
    """All windows of each level taken together, but those of steps that flush, which no decision chose."""
    by_level: dict[str, list[Record]] = {}
    for window in windows_of(records):
        if level_of(window) != DRAINING:
            by_level.setdefault(level_of(window), []).append(window)
    return {level: span_of(windows, run_of(records)) for level, windows in by_level.items()}


def dense_exposed_share(decision: Record) -> float:
    """Exposed communication as a share of the dense step, by the evidence of a decision; 0 without evidence."""
    dense = evidence_by_level(decision).get(DENSE, {})
    step_ms = dense.get("step_ms")
    return min(dense.get("exposed_comm_ms", 0.0) / step_ms, 1.0) if step_ms else 0.0


def levels_passed_over(records: Sequence[Record]) -> list[tuple[str, float, str, float]]:
    """Levels that ``auto`` never runs because a level below sends no more (as much counts if it delays no more): level,
    its bytes a step, the level below, that level's bytes a step."""
    if run_of(records).get("compression") != "auto":
        return []
    # Buckets may have been cut anew since the run began.
    levels = [record.get("levels") for record in records if record["kind"] in ("run", "resize")][-1] or {}
    sent = {name: number_of(level.get("payload_bytes")) for name, level in levels.items()}
    orders = {name: (sent[name], number_of(level.get("delay_weight", 1.0))) for name, level in levels.items()}
    names, found = list(sent), []
    for place, name in enumerate(names):
        below = next((lower for lower in names[:place] if orders[lower] <= orders[name]), None)
        if below:
            found.append((name, sent[name], below, sent[below]))
    return found


def tried(records: Sequence[Record]) -> dict[str, float]:
    """Level -> what it cost in the end against ``DENSE``, where both had their turns: the ratio of seconds a step with
    the price of delay."""
    reasons = (str(decision.get("reason")) for decision in decisions_of(records))
    sentences = (TRIED.match(reason) for reason in reasons if not reason.endswith(IN_TURNS))
    return {found["level"]: float(found["ratio"]) for found in sentences if found and found["held"] == DENSE}


def levels_refused(records: Sequence[Record]) -> dict[str, str]:
    """Level -> reason, for each level that may run no more. A ``forbid`` record also rules out the levels above its
    own."""
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
