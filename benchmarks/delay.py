"""What delay costs in steps: κ of the price 1 + κ e, fitted on small trainings instead of assumed.

    python benchmarks/delay.py --quick             some minutes on one core; not to quote
    python benchmarks/delay.py                     some 40 minutes on one core; the figures to quote
    python benchmarks/delay.py --from FILE.json    the tables and the picture again, from figures measured before

Tasks and exchange are those of ``quality.py``: real data, one process plays all ranks, dense steps first. A *setting*
is a task with an optimizer, a learning rate and a schedule. Levels of a setting and seed share weights, data order and
learning rates with dense, so step ratios are paired.

Step ratios
    constant    The learning rate is constant. Every ``EVERY`` steps the loss on fixed data (digits: what is trained on;
                text: windows of held-out text) is taken, and averaged over ``SMOOTHED`` of them. Targets are what dense
                reaches after 40, 60, 80 and 95 % of its steps; the ratio is the steps after which the level gets there
                first, over those of dense. A level may take ``PATIENCE`` times dense's steps. One that does not get
                there is *censored*: its ratio is at least what it was given, it is counted apart and takes no part in
                fits, but for the row that says so.
    decay       The learning rate falls to 0 over the second half. Stopping early means nothing there, so dense is
                trained with several lengths, each with the schedule stretched to it. The ratio is the level's steps
                over the length at which dense ends with the same loss, interpolated in logarithms. Censored: worse
                than the shortest.

Predictors, medians or means over the compressed steps until the target was reached
    e²            squared norm of the residual over that of the gradient, both root mean squares over ranks. ``e`` is
                  its root, ``e² / (1 + e²)`` does not grow without bounds.
    e² summed     the same of the sums over ranks, in which the ranks' own noise is smaller
    e summed      its root, which the controller measures and puts its price on: the tables of κ are of this one
    gain          1 / gain² - 1 with GraVAC's gain |C(g + r)| / |g + r| (arXiv 2305.12201)
    lost          1 - gain²
    progress      <dense update, next gradient> / <applied update, next gradient> - 1, sums over ranks, each step over
                  the squared norm of its gradient; both are taken in the level's own run
    held          <residuals, next gradient> / <dense update, next gradient>: the steps' worth of progress that is held
                  back. A constant number of steps is late once, so its ratio falls with the length of the training.
    bytes         dense bytes over bytes, minus 1: what can be said without a measurement

Fits are least squares in logarithms, log ratio = log(1 + κ x), with one κ: the controller compares logarithms. R² is
about the mean log ratio; ``left out`` is the mean absolute error on each task and optimizer of a κ fitted on the
others. Levels without a residual (fp16) have e = 0 and take no part: what their ratios differ from 1 by is noise.
Intervals come from drawing settings with replacement, 5 % to 95 %.

Not as in a real run: no overflow is sent again in full width, which matters for levels of integers; models are small,
trainings short.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch
from quality import DENSE, TASKS, Batch, Task, Training, aligned, error_of, loss_of, schedule
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from hvdplus.control.config import Config
from hvdplus.control.delay import ENERGY
from hvdplus.settings import Settings

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402, the backend comes first

LEVELS = (
    "fp16",
    "int8",
    "int4",
    "lowrank:32+fp16",
    "lowrank:16+fp16",
    "lowrank:8+fp16",
    "lowrank:4+fp16",
    "lowrank:2+fp16",
    "powersgd:16+fp16",
    "powersgd:8+fp16",
    "powersgd:4+fp16",
    "topk:0.2",
    "topk:0.05",
    "randomk:0.2",
)
QUICK_LEVELS = ("int4", "lowrank:16+fp16", "lowrank:4+fp16", "topk:0.05")
STEPS, QUICK_STEPS = 200, 80
DENSE_STEPS = 10
RANKS = 4
TARGETS = (0.4, 0.6, 0.8, 0.95)
"""Shares of dense's steps whose losses are to be reached, at a constant learning rate."""
PATIENCE = 1.8
"""Steps that a level may take, over dense's."""
LENGTHS = (0.3, 0.4, 0.55, 0.7, 0.85, 1.0, 1.2)
"""Of dense with a schedule that decays, over the usual number of steps."""
SEEDS = {"digits": 3, "text": 2}
EVERY = 5
SMOOTHED = 5
PROBE = 900
"""Samples at most on which the loss is taken; a window of text counts as seven."""
SETTLED = 50
"""Compressed steps at the end whose median e² is what a level comes to."""
SMALL_ERROR = 1.0
"""Prices of levels with an e up to here are also fitted apart."""
LADDER = Settings().ladder
PRICE = Config().delay_price
"""κ, as the controller has it."""
DRAWS = 1000
STARTS = {"no dense step": 0, "2 dense steps": 2, "10 dense steps": 10}
START_LEVELS = ("lowrank:16+fp16", "lowrank:8+fp16")
START_STEP = 40
RESULTS = Path(__file__).parent / "results" / "delay"


class Setting(NamedTuple):
    """Something to train, and how."""

    task: str
    optimizer: str
    learning_rate: float
    decays: bool

    @property
    def kind(self) -> str:
        """What is left out together."""
        return f"{self.task} {self.optimizer}"

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.kind} {self.learning_rate:g} {'decay' if self.decays else 'constant'}"


RATES = {
    ("digits", "SGD"): (0.1, 0.03),
    ("digits", "Adam"): (0.01, 0.003),
    ("text", "Adam"): (0.006, 0.002),
    ("text", "SGD"): (0.3, 0.1),
}
"""Learning rates: the one among some tried that is best for dense in so few steps, and about a third of it."""
SETTINGS = tuple(
    Setting(*kind, rate, decays)
    for decays in (False, True)
    for kind, rates in RATES.items()
    for rate in rates
    if not (decays and kind == ("text", "SGD"))
)
QUICK_SETTINGS = tuple(each for each in SETTINGS if each.kind in ("digits SGD", "text Adam") and not each.decays)


# --- curves -------------------------------------------------------------------------------------------------------


class Curve(NamedTuple):
    """Losses after numbers of steps."""

    steps: tuple[float, ...]
    losses: tuple[float, ...]


def smooth(curve: Curve, count: int) -> Curve:
    """Means of ``count`` neighbours, at their middle."""
    windows = range(len(curve.steps) - count + 1)
    steps, losses = (tuple(statistics.fmean(each[i : i + count]) for i in windows) for each in curve)
    return Curve(steps, losses)


def best_so_far(curve: Curve) -> Curve:
    """The least loss until each step."""
    least, losses = math.inf, []
    for loss in curve.losses:
        least = min(least, loss)
        losses.append(least)
    return Curve(curve.steps, tuple(losses))


def loss_at(curve: Curve, step: float) -> float:
    """Interpolated; the ends go on as they are."""
    for i in range(1, len(curve.steps)):
        if step <= curve.steps[i]:
            share = max(0.0, (step - curve.steps[i - 1]) / (curve.steps[i] - curve.steps[i - 1]))
            return curve.losses[i - 1] + share * (curve.losses[i] - curve.losses[i - 1])
    return curve.losses[-1]


def steps_to(curve: Curve, target: float) -> float | None:
    """Steps until the loss is first no more than ``target``, interpolated; None: never, as far as the curve goes."""
    for i, loss in enumerate(curve.losses):
        if loss <= target:
            if i == 0:
                return curve.steps[0]
            share = (curve.losses[i - 1] - target) / (curve.losses[i - 1] - loss)
            return curve.steps[i - 1] + share * (curve.steps[i] - curve.steps[i - 1])
    return None


def equivalent_steps(lengths: Curve, loss: float) -> float | None:
    """Length at which dense ends with ``loss``, interpolated in logarithms; None: shorter than any. A loss better than
    dense's best counts as that of the longest."""
    logs = best_so_far(Curve(*(tuple(math.log(value) for value in each) for each in lengths)))
    if loss > lengths.losses[0]:
        return None
    found = steps_to(logs, math.log(max(loss, 1e-30)))
    return math.exp(logs.steps[-1] if found is None else found)


# --- measuring ----------------------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """A compressed step, as far as predictors need it."""

    step: int
    error2: float
    summed2: float
    gain2: float
    dense_dot: float
    sent_dot: float
    held_dot: float
    """The three over the squared norm of the step's gradient."""


class Run(NamedTuple):
    """A training."""

    curve: Curve
    """Loss on the probe."""
    readings: Sequence[Reading]
    final: float
    """Loss on the probe at the end; infinite where something was not finite."""
    share: float
    """Bytes of a compressed step, of dense."""


def probe_of(task: Task) -> Batch:
    """Fixed data, evenly picked from the task's."""
    whole = task.probe()
    most = PROBE if whole.inputs.is_floating_point() else PROBE // 7
    picked = torch.linspace(0, len(whole.labels) - 1, min(most, len(whole.labels))).long()
    return Batch(whole.inputs[picked], whole.labels[picked])


def optimizer_of(setting: Setting) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """As the setting says."""
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "SGD": partial(torch.optim.SGD, momentum=0.9),
        "Adam": torch.optim.Adam,
    }
    return lambda model: kinds[setting.optimizer](model.parameters(), lr=setting.learning_rate)


def constant(step: int, steps: int) -> float:
    """No schedule."""
    return 1.0


class Observer:
    """Predictors' readings of a training, one step late: they need the next gradient."""

    def __init__(self, training: Training) -> None:
        self.readings: list[Reading] = []
        self._training = training
        self._before: Sequence[Tensor] | None = None
        self._waiting: tuple[Reading, Tensor, Tensor, Tensor | None] | None = None

    def see(self, number: int, grads: Sequence[Tensor], total: Tensor) -> None:
        """A compressed step."""
        after, summed = self._training.exchange.residuals, torch.stack(list(grads)).sum(dim=0)
        if self._waiting:
            reading, fresh, sent, held = self._waiting
            dots = [0.0 if one is None else float(one @ summed / fresh.square().sum()) for one in (fresh, sent, held)]
            self.readings.append(reading._replace(dense_dot=dots[0], sent_dot=dots[1], held_dot=dots[2]))
        held = None if after is None else torch.stack(list(after)).sum(dim=0)
        summed2 = 0.0 if held is None else float(held.square().sum() / summed.square().sum())
        reading = Reading(number, error_of(after, grads) ** 2, summed2, self._gain2(grads, after), 0.0, 0.0, 0.0)
        self._waiting = reading, summed, total.clone(), held
        self._before = after

    def _gain2(self, grads: Sequence[Tensor], after: Sequence[Tensor] | None) -> float:
        """GraVAC's gain, squared; the levels without a residual here lose nothing but bits."""
        if after is None:
            return 1.0
        before = self._before or [torch.zeros_like(grad) for grad in grads]
        joined = [grad + residual for grad, residual in zip(grads, before, strict=True)]
        sent = sum(float((one - left).square().sum()) for one, left in zip(joined, after, strict=True))
        return sent / max(1e-30, sum(float(one.square().sum()) for one in joined))


def run(
    task: Task,
    setting: Setting,
    level: str,
    seed: int,
    steps: int,
    *,
    stop_at: float = -math.inf,
    dense_steps: int = DENSE_STEPS,
) -> Run:
    """One training; at a constant learning rate it ends once the smoothed loss is at ``stop_at``."""
    factor = schedule if setting.decays else constant
    training = Training(task, level, seed, steps, dense_steps, RANKS, optimizer=optimizer_of(setting), factor=factor)
    observer, probe, exchange = Observer(training), probe_of(task), training.exchange
    seen: list[tuple[int, float]] = []
    final = math.inf
    for step in training.run():
        if not torch.isfinite(step.total).all():
            break
        if step.compressed:
            observer.see(step.number, step.grads, step.total)
        done = step.number + 1
        if (done % EVERY == 0 and not setting.decays) or done == steps:
            with torch.no_grad():
                final = loss_of(training.model, probe).item()
            final = final if math.isfinite(final) else math.inf
            seen.append((done, final))
            if len(seen) >= SMOOTHED and statistics.fmean(loss for _, loss in seen[-SMOOTHED:]) <= stop_at:
                break
    curve = Curve(tuple(done for done, _ in seen), tuple(loss for _, loss in seen))
    share = exchange.bytes_a_step / (4 * training.layout.spec.size)
    return Run(curve, observer.readings, final, share)


def predictors(readings: Sequence[Reading], until: float, share: float) -> dict[str, float | None]:
    """By name; None where a sum of projections has the wrong sign. See the module's docstring."""
    used = [reading for reading in readings if reading.step < until]
    if not used:
        return dict.fromkeys(PREDICTORS)
    error2, summed2, gain2 = (
        statistics.median(reading[field] for reading in used) for field in map(Reading._fields.index, FIELDS)
    )
    dense, sent, held = (sum(getattr(reading, name) for reading in used) for name in DOTS)
    return {
        "e²": error2,
        "e": math.sqrt(error2),
        "e² / (1 + e²)": error2 / (1 + error2),
        "e² summed": summed2,
        "gain": 1 / max(gain2, 1e-9) - 1,
        "lost": max(0.0, 1 - gain2),
        "progress": max(0.0, dense / sent - 1) if dense > 0 and sent > 0 else None,
        "held": max(0.0, held / dense) if dense > 0 else None,
        "bytes": 1 / share - 1,
    }


FIELDS = ("error2", "summed2", "gain2")
DOTS = ("dense_dot", "sent_dot", "held_dot")
PREDICTORS = ("e²", "e", "e² / (1 + e²)", "e² summed", "gain", "lost", "progress", "held", "bytes")
PRICED = "e summed"
"""What the controller's price goes by, the root of a predictor."""


class Point(NamedTuple):
    """How many steps a level needs for a target."""

    setting: Setting
    seed: int
    level: str
    target: float
    """Share of dense's steps; 1: the end, with a schedule that decays."""
    dense_steps: float
    ratio: float
    """Censored: at least that."""
    censored: bool
    x: dict[str, float | None]

    @property
    def family(self) -> str:
        """The level's name without its parameters."""
        return family(self.level)

    @property
    def error(self) -> float:
        """What the controller puts its price on; 0: nothing is held back, or it is not known."""
        return math.sqrt(self.x["e² summed"] or 0.0)

    def value(self, predictor: str) -> float | None:
        """Of a predictor, or of the one that is priced."""
        return self.error if predictor == PRICED else self.x[predictor]


class Error(NamedTuple):
    """What a level's e² comes to."""

    setting: Setting
    seed: int
    level: str
    share: float
    quarters: list[float]
    """Medians of e² over quarters of the compressed steps."""
    settled: float
    """Median of the last compressed steps."""


class Start(NamedTuple):
    """A training begun in one of the ways of ``STARTS``."""

    setting: Setting
    seed: int
    level: str
    start: str
    early: float
    """Smoothed loss at ``START_STEP``."""
    late: float
    """The same at the end."""


class Figures(NamedTuple):
    """All that was measured."""

    points: list[Point]
    errors: list[Error]
    starts: list[Start]


def family(level: str) -> str:
    """``lowrank`` of ``lowrank:8+fp16``, ``int`` of ``int8``."""
    return level.partition(":")[0].rstrip("0123456789") if level != "fp16" else level


def measure_constant(task: Task, setting: Setting, seed: int, levels: Sequence[str], steps: int) -> Figures:
    """Dense, then the levels, until they are as good or out of patience."""
    reach = steps + EVERY * (SMOOTHED // 2)
    dense = best_so_far(smooth(run(task, setting, DENSE, seed, reach).curve, SMOOTHED))
    aims = [loss_at(dense, target * steps) for target in TARGETS]
    found = Figures([], [], [])
    for level in levels:
        limit = round(PATIENCE * steps)
        level_run = run(task, setting, level, seed, limit, stop_at=min(aims))
        curve = best_so_far(smooth(level_run.curve, SMOOTHED))
        for target, aim in zip(TARGETS, aims, strict=True):
            needed, usual = steps_to(curve, aim), steps_to(dense, aim)
            assert usual is not None, "dense has been there"
            taken = limit if needed is None else needed
            x = predictors(level_run.readings, taken, level_run.share)
            found.points.append(Point(setting, seed, level, target, usual, taken / usual, needed is None, x))
        found.errors.extend(errors_of(setting, seed, level, level_run))
    return found


def measure_decay(task: Task, setting: Setting, seed: int, levels: Sequence[str], steps: int) -> Figures:
    """Dense with several lengths, then the levels with the usual one."""
    counts = [round(length * steps) for length in LENGTHS]
    lengths = Curve(tuple(counts), tuple(run(task, setting, DENSE, seed, count).final for count in counts))
    found = Figures([], [], [])
    for level in levels:
        level_run = run(task, setting, level, seed, steps)
        same = equivalent_steps(lengths, level_run.final)
        x = predictors(level_run.readings, steps, level_run.share)
        ratio = steps / (lengths.steps[0] if same is None else same)
        found.points.append(Point(setting, seed, level, 1.0, steps / ratio, ratio, same is None, x))
        found.errors.extend(errors_of(setting, seed, level, level_run))
    return found


def errors_of(setting: Setting, seed: int, level: str, level_run: Run) -> Iterable[Error]:
    """None where nothing is held back, or the run came to nothing."""
    values = [reading.error2 for reading in level_run.readings]
    if len(values) >= SETTLED and max(values) > 0 and math.isfinite(level_run.final):
        cuts = [round(i * len(values) / 4) for i in range(5)]
        quarters = [statistics.median(values[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
        yield Error(setting, seed, level, level_run.share, quarters, statistics.median(values[-SETTLED:]))


def measure_starts(task: Task, setting: Setting, seed: int, steps: int) -> list[Start]:
    """Every way to begin, and dense."""
    found = []
    for level, start in [(DENSE, "dense"), *((level, start) for level in START_LEVELS for start in STARTS)]:
        level_run = run(task, setting, level, seed, steps, dense_steps=STARTS.get(start, DENSE_STEPS))
        curve = smooth(level_run.curve, SMOOTHED)
        found.append(Start(setting, seed, level, start, loss_at(curve, START_STEP), curve.losses[-1]))
    return found


# --- fits ---------------------------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """log ratio = log(1 + κ x)."""

    kappa: float
    r2: float
    """About the mean log ratio."""
    error: float
    """Mean absolute, of the log ratio."""
    count: int


Pairs = Sequence[tuple[float, float]]
"""(x, ratio)"""


def fit(pairs: Pairs) -> Fit:
    """The κ of least squares in logarithms. At least one pair."""
    logs = [math.log(ratio) for _, ratio in pairs]

    def squares(log_kappa: float) -> float:
        return sum((y - math.log1p(math.exp(log_kappa) * x)) ** 2 for (x, _), y in zip(pairs, logs, strict=True))

    scale = math.log(1 / max(1e-12, statistics.fmean(x for x, _ in pairs)))
    # The price of the mean x is sought between 1 + 1e-4 and 1 + 100. Several valleys are possible: a grid first.
    grid = [scale + math.log(1e-4) + i * math.log(1e6) / 60 for i in range(61)]
    start = min(grid, key=squares)
    step = grid[1] - grid[0]
    found = minimize_scalar(squares, bounds=(start - step, start + step), method="bounded").x
    middle = statistics.fmean(logs)
    around = sum((y - middle) ** 2 for y in logs)
    return Fit(
        math.exp(found), 1 - squares(found) / around if around else math.nan, miss(pairs, math.exp(found)), len(logs)
    )


def fit_power(pairs: Pairs) -> tuple[float, float, float]:
    """(p, κ, mean absolute error of log ratio) of log(1 + κ x^p); p in tenths from 0.1 to 4."""

    def powered(power: float) -> Pairs:
        return [(x**power, ratio) for x, ratio in pairs]

    def squares(power: float) -> float:
        kappa = fit(powered(power)).kappa
        return sum((math.log(ratio) - math.log1p(kappa * x)) ** 2 for x, ratio in powered(power))

    power = min((tenths / 10 for tenths in range(1, 41)), key=squares)
    found = fit(powered(power))
    return power, found.kappa, found.error


def miss(pairs: Pairs, kappa: float) -> float:
    """Mean absolute error of the log ratio."""
    return statistics.fmean(abs(math.log(ratio) - math.log1p(kappa * x)) for x, ratio in pairs)


def complete(points: Sequence[Point]) -> list[Point]:
    """Of runs at a constant learning rate that reach all targets."""
    reached: dict[tuple[Any, ...], int] = defaultdict(int)
    for p in points:
        reached[p.setting, p.seed, p.level] += not p.censored and not p.setting.decays
    return [p for p in points if reached[p.setting, p.seed, p.level] == len(TARGETS)]


def pairs_of(points: Iterable[Point], predictor: str, *, late: bool = False) -> Pairs:
    """``late``: x counts in steps that a training is late, however long it is; it is divided by dense's steps."""
    return [
        (x / point.dense_steps if late else x, point.ratio)
        for point in points
        if (x := point.value(predictor)) is not None and math.isfinite(x)
    ]


def left_out(points: Sequence[Point], predictor: str, *, late: bool = False, families: bool = False) -> float:
    """Mean absolute error over tasks and optimizers, each predicted from the others.

    ``families``: every family has a κ of its own.
    """
    misses = []
    for kind in {point.setting.kind for point in points}:
        off, count = 0.0, 0
        for name in {point.family for point in points} if families else {""}:
            chosen = [point for point in points if not name or point.family == name]
            apart, others = ([p for p in chosen if (p.setting.kind == kind) is wanted] for wanted in (True, False))
            if apart and others:
                kappa = fit(pairs_of(others, predictor, late=late)).kappa
                off += len(apart) * miss(pairs_of(apart, predictor, late=late), kappa)
                count += len(apart)
        if count:
            misses.append(off / count)
    return statistics.fmean(misses) if misses else math.nan


def interval(points: Sequence[Point], value: Callable[[list[Point]], float], draws: int = DRAWS) -> tuple[float, float]:
    """5 % and 95 % of ``value`` over settings drawn with replacement."""
    by_setting: dict[Setting, list[Point]] = defaultdict(list)
    for point in points:
        by_setting[point.setting].append(point)
    draw, settings = random.Random(0), list(by_setting.values())
    values = sorted(
        value([point for group in draw.choices(settings, k=len(settings)) for point in group]) for _ in range(draws)
    )
    return values[round(0.05 * (draws - 1))], values[round(0.95 * (draws - 1))]


class Energy(NamedTuple):
    """e² = scale (1 / share - 1)^power."""

    scale: float
    power: float
    scatter: float
    """Standard deviation of log e², as a factor."""
    within: float
    """Share of runs in which the guess of e² is within a factor of two."""
    count: int


def fit_energy(errors: Sequence[Error], *, power: float | None = 1.0) -> Energy:
    """Least squares in logarithms; ``power=None``: fitted too."""
    xs, ys = [math.log(1 / e.share - 1) for e in errors], [math.log(e.settled) for e in errors]
    if power is None:
        spread = sum((x - statistics.fmean(xs)) ** 2 for x in xs)
        power = statistics.covariance(xs, ys) * (len(xs) - 1) / spread if spread > 1e-9 else 0.0
    scale = statistics.fmean(y - power * x for x, y in zip(xs, ys, strict=True))
    return judge_energy(errors, math.exp(scale), power)


def judge_energy(errors: Sequence[Error], scale: float, power: float = 1.0) -> Energy:
    """How far e² is from a guess."""
    off = [math.log(e.settled / (scale * (1 / e.share - 1) ** power)) for e in errors]
    scatter = math.exp(math.sqrt(statistics.fmean(x * x for x in off)))
    return Energy(scale, power, scatter, statistics.fmean(abs(x) <= math.log(2) for x in off), len(off))


# --- report -------------------------------------------------------------------------------------------------------


def report(figures: Figures) -> str:
    """All tables."""
    reached = [point for point in figures.points if not point.censored]
    seeds = {setting: len({p.seed for p in figures.points if p.setting == setting}) for setting in _settings(reached)}
    parts = [
        "Settings (seeds): " + ", ".join(f"{setting.name} ({count})" for setting, count in seeds.items()),
        "Steps over those of dense, geometric means over settings and seeds, censored ones left out; the last columns: "
        "steps between two targets, ratio of sums over runs that reach all\n" + aligned(_level_table(figures.points)),
        *_kappa_parts(figures.points, reached),
        "What e² comes to, settled, and guesses of it from the bytes: e² = scale (1 / share - 1)^power\n"
        + aligned(_energy_table(figures.errors)),
        "e² over quarters of the compressed steps, over that of the last 50; geometric means\n"
        + aligned(_quarter_table(figures.errors)),
    ]
    if figures.starts:
        parts.append(
            f"Starts: loss over that of dense, minus 1, at step {START_STEP} and at the end, smoothed; mean over seeds "
            "and its standard error\n" + aligned(_start_table(figures.starts))
        )
    return "\n\n".join(parts)


def _settings(points: Sequence[Point]) -> list[Setting]:
    return list(dict.fromkeys(point.setting for point in points))


def _mean_ratio(points: Sequence[Point]) -> str:
    return f"{math.exp(statistics.fmean(math.log(p.ratio) for p in points)):.3f}" if points else "-"


def _level_table(points: Sequence[Point]) -> list[tuple[str, ...]]:
    targets = sorted({point.target for point in points})
    heads = ["at the end of a decay" if target == 1 else f"to {target:.0%}" for target in targets]
    table = [("level", "e", *heads, "censored", f"{TARGETS[0]:.0%} to {TARGETS[-1]:.0%}", "runs")]
    whole = complete(points)
    for level in dict.fromkeys(point.level for point in points):
        of_level = [point for point in points if point.level == level]
        error = statistics.median(p.error for p in of_level)
        cells = [_mean_ratio([p for p in of_level if p.target == target and not p.censored]) for target in targets]
        lost = sum(point.censored for point in of_level)
        first, last = ([p for p in whole if p.level == level and p.target == TARGETS[i]] for i in (0, -1))
        usual = sum(b.dense_steps - a.dense_steps for a, b in zip(first, last, strict=True))
        taken = sum(b.ratio * b.dense_steps - a.ratio * a.dense_steps for a, b in zip(first, last, strict=True))
        between = f"{taken / usual:.3f}" if usual else "-"
        table.append((level, f"{error:.2f}", *cells, f"{lost} of {len(of_level)}", between, str(len(first))))
    return table


def _kappa_parts(points: Sequence[Point], reached: Sequence[Point]) -> list[str]:
    costly = [point for point in reached if point.error > 0]
    everyone = [point for point in points if point.error > 0]
    small = [point for point in costly if point.error <= SMALL_ERROR]
    lines = []
    for name, most in (("all", math.inf), (f"e <= {SMALL_ERROR:g}", SMALL_ERROR)):
        chosen, bounded = ([p for p in some if p.error <= most] for some in (costly, everyone))
        pairs = pairs_of(chosen, PRICED)
        found, bounds = fit(pairs), interval(chosen, lambda drawn: fit(pairs_of(drawn, PRICED)).kappa)
        single = sorted(
            fit(pairs_of([p for p in chosen if p.setting == setting], PRICED)).kappa for setting in _settings(chosen)
        )
        middle = statistics.median(single)
        power, kappa, error = fit_power(pairs)
        lines += [
            f"{name}: κ = {found.kappa:.4f} ({bounds[0]:.4f} to {bounds[1]:.4f} over settings drawn), "
            f"R² {found.r2:.2f}, {found.count} step ratios; single settings {single[0]:.4f} to {single[-1]:.4f}, "
            f"median {middle:.4f}",
            f"    {len(bounded) - len(chosen)} of {len(bounded)} censored; with these at their lower bounds κ is "
            f"{fit(pairs_of(bounded, PRICED)).kappa:.4f}",
            f"    mean absolute error of log ratio: {found.error:.3f} fitted, {miss(pairs, PRICE):.3f} with "
            f"κ = {PRICE} as the controller has it, {miss(pairs, 0.0):.3f} with κ = 0; between seeds "
            f"{_noise(chosen):.3f}",
            f"    with a power of e fitted as well: {kappa:.4f} e^{power:.1f}, error {error:.3f}",
        ]
    silent = [(0.0, point.ratio) for point in reached if point.x["e²"] == 0]
    if silent:
        lines.append(f"Noise: levels without a residual, mean absolute log ratio {miss(silent, 0.0):.3f}")
    return [
        "Price 1 + κ e, e summed\n" + "\n".join(lines),
        "Predictors of the step ratio; the same points for all, those that have all of them; 'late': excess steps, not "
        "their share, follow x\n" + aligned(_predictor_table(costly)),
        "κ of e by range of e, target, schedule, task, family\n" + aligned(_part_table(costly)),
        "κ of e by learning rate; quotient: κ of the high rate over that of the low one, power: its logarithm over "
        "that of the rates'\n" + aligned(_rate_table(costly)),
        f"The same where e <= {SMALL_ERROR:g}\n" + aligned(_rate_table(small)),
        f"κ of e by schedule, where e <= {SMALL_ERROR:g}; the decaying one has "
        f"{statistics.fmean(schedule(step, STEPS) for step in range(STEPS)):.2f} times the mean learning rate\n"
        + aligned(_schedule_table(small)),
    ]


def _noise(points: Sequence[Point]) -> float:
    """Mean absolute deviation of log ratios from the mean over seeds, as if there were infinitely many seeds."""
    groups: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for point in points:
        groups[point.setting, point.level, point.target].append(math.log(point.ratio))
    several = [group for group in groups.values() if len(group) > 1]
    if not several:
        return math.nan
    return statistics.fmean(
        abs(y - statistics.fmean(group)) * math.sqrt(len(group) / (len(group) - 1)) for group in several for y in group
    )


def _predictor_table(points: Sequence[Point]) -> list[tuple[str, ...]]:
    table = [("x", "κ", "R²", "error of log ratio", "left out", f"e <= {SMALL_ERROR:g}: error", "left out")]
    shared = [point for point in points if all(value is not None for value in point.x.values())]
    small = [point for point in shared if point.error <= SMALL_ERROR]
    ones = [(0.0, point.ratio) for point in shared]
    small_ones = [(0.0, point.ratio) for point in small]
    nothing = f"{miss(ones, 0.0):.3f}", f"{miss(small_ones, 0.0):.3f}" if small else "-"
    table.append(("(nothing)", "0", "-", nothing[0], nothing[0], nothing[1], nothing[1]))
    for predictor in (*PREDICTORS, PRICED):
        for late in (False, True):
            found = fit(pairs_of(shared, predictor, late=late))
            part = fit(pairs_of(small, predictor, late=late)) if small else None
            table.append(
                (
                    predictor + (", late" if late else ""),
                    f"{found.kappa:.4g}",
                    f"{found.r2:.2f}",
                    f"{found.error:.3f}",
                    f"{left_out(shared, predictor, late=late):.3f}",
                    f"{part.error:.3f}" if part else "-",
                    f"{left_out(small, predictor, late=late):.3f}",
                )
            )
    for predictor in ("e²", "e", "e² / (1 + e²)", PRICED):
        numbers = (f"{left_out(some, predictor, families=True):.3f}" for some in (shared, small))
        both = (next(numbers), "-", next(numbers))
        table.append((f"{predictor}, κ of each family", "-", "-", "-", *both))
    table.append((f"{len(shared)} points, {len(small)} with e <= {SMALL_ERROR:g}", "", "", "", "", "", ""))
    return table


def _part_table(points: Sequence[Point]) -> list[tuple[str, ...]]:
    parts: list[tuple[str, Callable[[Point], bool]]] = [
        ("e < 0.5", lambda p: p.error < 0.5),
        ("0.5 <= e < 1", lambda p: 0.5 <= p.error < 1),
        ("1 <= e < 2", lambda p: 1 <= p.error < 2),
        ("2 <= e", lambda p: p.error >= 2),
    ]
    whole = {(p.setting, p.seed, p.level) for p in complete(points)}
    parts += [
        (f"all reached, to {target:.0%}", lambda p, t=target: p.target == t and (p.setting, p.seed, p.level) in whole)
        for target in TARGETS
    ]
    parts += [("constant", lambda p: not p.setting.decays), ("decay", lambda p: p.setting.decays)]
    parts += [
        (
            f"{'decay, to its end' if target == 1 else f'to {target:.0%}'}, e <= {SMALL_ERROR:g}",
            lambda p, t=target: p.target == t and p.error <= SMALL_ERROR,
        )
        for target in (*TARGETS, 1.0)
    ]
    parts.append(("levels of the usual ladder", lambda p: p.level in LADDER))
    for kind in dict.fromkeys(p.setting.kind for p in points):
        parts.append((kind, lambda p, kind=kind: p.setting.kind == kind))
    for name in dict.fromkeys(p.family for p in points):
        parts.append((name, lambda p, name=name: p.family == name))
        parts.append(
            (f"{name}, e <= {SMALL_ERROR:g}", lambda p, name=name: p.family == name and p.error <= SMALL_ERROR)
        )
    table = [("part", "points", "κ", "5 %", "95 %", "R²", "error of log ratio")]
    for name, belongs in parts:
        chosen = [point for point in points if belongs(point)]
        if len(chosen) < 3:
            continue
        found = fit(pairs_of(chosen, PRICED))
        bounds = interval(chosen, lambda drawn: fit(pairs_of(drawn, PRICED)).kappa, draws=200)
        cells = (f"{value:.4f}" for value in (found.kappa, *bounds))
        table.append((name, str(found.count), *cells, f"{found.r2:.2f}", f"{found.error:.3f}"))
    return table


def _rate_table(points: Sequence[Point]) -> list[tuple[str, ...]]:
    table = [("setting", "rates", "κ high", "κ low", "quotient", "power")]
    powers = []
    for kind, decays in dict.fromkeys((p.setting.kind, p.setting.decays) for p in points):
        group = [p for p in points if p.setting.kind == kind and p.setting.decays == decays]
        rates = sorted({p.setting.learning_rate for p in group}, reverse=True)
        if len(rates) != 2:
            continue
        high, low = (
            fit(pairs_of([p for p in group if p.setting.learning_rate == rate], PRICED)).kappa for rate in rates
        )
        powers.append(math.log(high / low) / math.log(rates[0] / rates[1]))
        name = f"{kind} {'decay' if decays else 'constant'}"
        shown = f"{rates[0]:g}, {rates[1]:g}"
        table.append((name, shown, f"{high:.4f}", f"{low:.4f}", f"{high / low:.2f}", f"{powers[-1]:+.2f}"))
    if len(powers) > 1:
        error = statistics.stdev(powers) / len(powers) ** 0.5
        table.append(("mean power", "", "", "", "", f"{statistics.fmean(powers):+.2f} +- {error:.2f}"))
    return table


def _schedule_table(points: Sequence[Point]) -> list[tuple[str, ...]]:
    table = [("setting", f"κ constant, to {TARGETS[-1]:.0%}", "κ decay, to its end", "quotient")]
    logs = []
    for setting in dict.fromkeys(p.setting for p in points if p.setting.decays):
        decaying = [p for p in points if p.setting == setting]
        steady = [p for p in points if p.setting == setting._replace(decays=False) and p.target == TARGETS[-1]]
        if steady:
            high, low = (fit(pairs_of(some, PRICED)).kappa for some in (steady, decaying))
            logs.append(math.log(low / high))
            name = f"{setting.kind} {setting.learning_rate:g}"
            table.append((name, f"{high:.4f}", f"{low:.4f}", f"{low / high:.2f}"))
    if len(logs) > 1:
        off = statistics.stdev(logs) / len(logs) ** 0.5
        middle = statistics.fmean(logs)
        shown = f"{math.exp(middle):.2f} ({math.exp(middle - off):.2f} to {math.exp(middle + off):.2f})"
        table.append(("geometric mean, with one standard error", "", "", shown))
    return table


def _energy_table(errors: Sequence[Error]) -> list[tuple[str, ...]]:
    table = [("levels", "how", "scale", "power", "scatter, a factor", "within a factor 2", "left out", "runs")]

    def add(name: str, how: str, found: Energy, apart: str = "-") -> None:
        numbers = f"{found.scale:.4f}", f"{found.power:.2f}", f"{found.scatter:.2f}", f"{found.within:.0%}", apart
        table.append((name, how, *numbers, str(found.count)))

    families = dict.fromkeys(family(error.level) for error in errors)
    for name in ("all", *families):
        chosen = [error for error in errors if name in ("all", family(error.level))]
        add(name, "as the controller has it", judge_energy(chosen, ENERGY))
        several = len({error.level for error in chosen}) > 1
        for power in (1.0, None) if several else (1.0,):
            off = []
            for kind in {error.setting.kind for error in chosen}:
                others = [error for error in chosen if error.setting.kind != kind]
                if others:
                    learned = fit_energy(others, power=power)
                    apart = [error for error in chosen if error.setting.kind == kind]
                    off.append(judge_energy(apart, learned.scale, learned.power).scatter)
            how = "scale fitted" if power else "both fitted"
            add(name, how, fit_energy(chosen, power=power), f"{statistics.fmean(off):.2f}" if off else "-")
    for name in families:
        for task in dict.fromkeys(error.setting.task for error in errors):
            chosen = [error for error in errors if family(error.level) == name and error.setting.task == task]
            if len({error.level for error in chosen}) > 1:
                add(f"{name}, {task} alone", "both fitted", fit_energy(chosen, power=None))
    powers = {}
    for name in families:
        chosen = [error for error in errors if family(error.level) == name]
        powers[name] = fit_energy(chosen, power=None).power if len({error.level for error in chosen}) > 1 else 1.0
    for how, power_of in (("power 1", dict.fromkeys(families, 1.0)), ("power of its family", powers)):
        for name, off in _neighbours(errors, power_of).items():
            if off:
                scatter = math.exp(math.sqrt(statistics.fmean(x * x for x in off)))
                within = statistics.fmean(abs(x) <= math.log(2) for x in off)
                numbers = "-", "-", f"{scatter:.2f}", f"{within:.0%}", "-"
                table.append((f"scaled from {name}", how, *numbers, str(len(off))))
    return table


def _neighbours(errors: Sequence[Error], powers: dict[str, float]) -> dict[str, list[float]]:
    """Logarithms by which e² is off if it is scaled from another level of the run, with at most four times or no less
    than a quarter of the bytes; of the same family, and of another."""
    runs: dict[tuple[Setting, int], list[Error]] = defaultdict(list)
    for error in errors:
        runs[error.setting, error.seed].append(error)
    off: dict[str, list[float]] = {"the same family": [], "another family": []}
    for group in runs.values():
        for one in group:
            for other in group:
                if one is not other and abs(math.log(one.share / other.share)) < math.log(4):
                    power = powers[family(one.level)]
                    guess = other.settled * ((1 / one.share - 1) / (1 / other.share - 1)) ** power
                    which = "the same family" if family(one.level) == family(other.level) else "another family"
                    off[which].append(math.log(one.settled / guess))
    return off


def _quarter_table(errors: Sequence[Error]) -> list[tuple[str, ...]]:
    table = [("setting", "1st", "2nd", "3rd", "4th", "runs")]
    for setting in dict.fromkeys(error.setting for error in errors):
        chosen = [error for error in errors if error.setting == setting]
        cells = (
            f"{math.exp(statistics.fmean(math.log(e.quarters[i] / e.settled) for e in chosen)):.2f}" for i in range(4)
        )
        table.append((setting.name, *cells, str(len(chosen))))
    return table


def _start_table(starts: Sequence[Start]) -> list[tuple[str, ...]]:
    table = [("setting", "level", "start", f"step {START_STEP}", "end", "seeds")]
    dense = {(each.setting, each.seed): each for each in starts if each.level == DENSE}
    for key in dict.fromkeys((each.setting, each.level, each.start) for each in starts if each.level != DENSE):
        group = [each for each in starts if (each.setting, each.level, each.start) == key]
        rivals = [dense[each.setting, each.seed] for each in group]
        early = [each.early / rival.early - 1 for each, rival in zip(group, rivals, strict=True)]
        late = [each.late / rival.late - 1 for each, rival in zip(group, rivals, strict=True)]
        table.append((key[0].name, key[1], key[2], _with_error(early), _with_error(late), str(len(group))))
    return table


def _with_error(values: Sequence[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return f"{100 * statistics.fmean(values):+.1f} % +- {100 * error:.1f}"


def draw(figures: Figures, path: Path) -> None:
    """Step ratio - 1 against e, tasks by colour, with the line that was fitted and the controller's."""
    points = [point for point in figures.points if point.error > 0]
    reached = [point for point in points if not point.censored]
    kinds = list(dict.fromkeys(point.setting.kind for point in points))
    figure, axes = plt.subplots(figsize=(8, 5.5), layout="constrained")
    floor = 1e-3
    for colour, kind in enumerate(kinds):
        of_kind = [point for point in points if point.setting.kind == kind]
        for censored, marker, alpha in ((False, "o", 0.45), (True, "^", 0.9)):
            chosen = [point for point in of_kind if point.censored is censored]
            axes.scatter(
                [point.error for point in chosen],
                [max(floor, point.ratio - 1) for point in chosen],
                s=14 if not censored else 22,
                marker=marker,
                facecolors="none" if censored else f"C{colour}",
                edgecolors=f"C{colour}",
                alpha=alpha,
                label=kind if not censored else None,
            )
    kappa = fit(pairs_of(reached, PRICED)).kappa
    low, high = (extreme(point.error for point in points) for extreme in (min, max))
    xs = [low * (high / low) ** (i / 50) for i in range(51)]
    axes.plot(xs, [kappa * x for x in xs], "k", label=f"fitted: {kappa:.3f} e")
    axes.plot(xs, [PRICE * x for x in xs], "k--", label=f"the controller's: {PRICE} e")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="e: norm of the residuals' sum over that of the gradients'",
        ylabel=f"steps over dense's, minus 1 (least shown: {floor:g})",
        title="What delay costs in steps (triangles: lower bounds)",
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


# --- command line -------------------------------------------------------------------------------------------------


def load(path: Path) -> Figures:
    """What ``save`` wrote."""
    data = json.loads(path.read_text())

    def rows(kind: type[Any], name: str) -> list[Any]:
        return [kind(**{**row, "setting": Setting(*row["setting"])}) for row in data[name]]

    return Figures(rows(Point, "points"), rows(Error, "errors"), rows(Start, "starts"))


def save(figures: Figures, path: Path) -> None:
    """One line a row, numbers to six digits; an infinite ratio does not occur, as bounds are finite."""

    def short(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.6g}")
        if isinstance(value, dict):
            return {key: short(each) for key, each in value.items()}
        return [short(each) for each in value] if isinstance(value, list) else value

    parts = []
    for name, rows in figures._asdict().items():
        lines = ",\n".join(
            json.dumps({key: short(value) for key, value in row._asdict().items()}, ensure_ascii=False) for row in rows
        )
        parts.append(f'"{name}": [\n{lines}\n]')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def arguments() -> argparse.Namespace:
    """What the user asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer settings, levels, steps; one seed")
    parser.add_argument("--seeds", type=int, help="number of seeds (3 for digits, 2 for text; 1 with --quick)")
    parser.add_argument("--from", type=Path, dest="source", help="figures measured before, in place of new ones")
    parser.add_argument("--out", type=Path, default=RESULTS, help="path of the results, without .json (%(default)s)")
    return parser.parse_args()


def measure(asked: argparse.Namespace) -> Figures:
    """All settings; the figures so far are on disk after each."""
    quick = asked.quick
    settings, levels, steps = (QUICK_SETTINGS, QUICK_LEVELS, QUICK_STEPS) if quick else (SETTINGS, LEVELS, STEPS)
    tasks = {name: make() for name, make in TASKS.items()}
    figures = Figures([], [], [])

    def keep(found: Figures, what: str, began: float) -> None:
        for mine, new in zip(figures, found, strict=True):
            mine.extend(new)
        save(figures, asked.out.with_suffix(".json"))
        print(f"{what}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    for setting in settings:
        for seed in range(asked.seeds or (1 if quick else SEEDS[setting.task])):
            began = time.monotonic()
            how = measure_decay if setting.decays else measure_constant
            keep(how(tasks[setting.task], setting, seed, levels, steps), f"{setting.name}, seed {seed}", began)
    for setting in (each for each in QUICK_SETTINGS if each.learning_rate == RATES[each.task, each.optimizer][0]):
        for seed in range(asked.seeds or (1 if quick else 3)):
            began = time.monotonic()
            starts = measure_starts(tasks[setting.task], setting, seed, steps)
            keep(Figures([], [], starts), f"starts, {setting.name}, seed {seed}", began)
    return figures


def main() -> None:
    """Measure, fit, print, draw."""
    asked = arguments()
    torch.set_num_threads(1)
    began = time.monotonic()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    figures = load(asked.source) if asked.source else measure(asked)
    text = report(figures)
    print(text)
    asked.out.with_suffix(".txt").write_text(text + "\n")
    draw(figures, asked.out.with_suffix(".png"))
    print(f"\n{time.monotonic() - began:.0f} s in all", file=sys.stderr)


if __name__ == "__main__":
    main()
