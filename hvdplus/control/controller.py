"""Which level to run: a pure function of measurements that every rank shares.

No clock, no MPI, no framework: numbers in, decisions out, so that it is tested with numbers alone and replayed from a
run log. Every rank runs it on the same figures and so decides the same at the same step.

    dense start ──► try what the cost model promises most ──► hold the best ──► watch and sound
                        ▲        (each level at most once)                             │
                        └──────── the wire or the computation has changed ─────────────┘

The level that is held is the least compression among the fastest levels *measured*: the model only says which level is
worth a try. Times of levels are compared as lower quartiles of a few pairs of steps each, which noise can turn around.
So the held level is compared once more with one that might take less now, be it that the machine was slower when that
one was measured; comparisons become rarer and rarer. In a comparison, and in a look at dense, the held level
has a turn before the other's and one after it, and is left only if it loses both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from hvdplus.control.link import LevelCost, Link, fit_link
from hvdplus.control.meter import StepTimes


class Observation(NamedTuple):
    """What all ranks know of one step."""

    times: StepTimes
    error: float = math.nan
    """Norm of the residuals over the norm of the gradients, as root mean squares over the ranks; NaN: not measured."""
    gradient_norm: float = math.nan
    """Root mean square over the ranks; NaN: not measured."""
    learning_rate: float = 0.0
    """0: unknown."""
    probe_bytes: int = 0
    """Of the sum that ``times.probe`` is of; 0: there was none."""


class Decision(NamedTuple):
    """One decision, with its reason and the evidence behind it; the unit of every figure stands in its name."""

    level: int
    reason: str
    evidence: dict[str, float]


class Mode(Enum):
    """What the controller is busy with."""

    START = "dense start"
    TRIAL = "trying a level"
    HOLD = "holding a level"
    CRITICAL = "dense in a critical phase"


@dataclass(frozen=True)
class Limits:
    """The thresholds of all decisions."""

    dense_steps: int = 10
    """Steps at level 0 before anything else is tried, and in a critical phase; twice as many at the start while
    gradients change fast."""
    trial_steps: int = 8
    """Steps that a level is measured for."""
    settle_steps: int = 3
    """Steps after a change that are not counted: new buffers, new names."""
    bottleneck: float = 0.05
    """Share of the dense step above which exposed communication is a bottleneck."""
    margin: float = 0.02
    """Share of the step that counts as a difference between levels."""
    optimism: float = 0.1
    """Share of the step by which a prediction may be too long: a level that could be the fastest is tried."""
    mild_optimism: float = 0.25
    """The same for the least compression, if communication is a bottleneck at dense: the model ignores that computation
    and communication compete for the machine, so fp16 is nearly always worth a trial."""
    change: float = 0.3
    """Relative change of communication, or of computation as a share of the step, that may change the choice; then a
    level must promise to save ``worthwhile`` of the step to be tried. Communication has to change by so much of a step
    as well, or to fall by ``margin`` of it."""
    worthwhile: float = 0.1
    """Also the share of the step by which a level has to lose a comparison for its time to stand, whatever the
    machine's pace."""
    watch_steps: int = 6
    """Steps in a look at the held level; ``patience`` looks in a row must agree on a change."""
    patience: int = 2
    memory_steps: int = 40
    """Latest steps of a level that its times are taken from."""
    probe_steps: int = 400
    """Steps after which a compressed run looks at dense again, in case a faster link cannot be seen through
    compression. Doubles after every look that changed nothing."""
    probe_share: float = 0.01
    """Share of the time that such looks may cost."""
    sounding_steps: int = 40
    """Steps at a compressed level between two soundings: sums that are sent to see how fast the link is, which few
    bytes do not show."""
    sounding_share: float = 0.02
    """Share of the time that they may cost, or they become rarer."""
    sounding_length: float = 0.3
    """Share of a step that a sounding is meant to take."""
    sounding_bytes: int = 128 << 10
    """The least that one sends: links carry some 10 kB at any speed after a rest."""
    sounding_most: int = 64 << 20
    """Bytes that it takes no more than, whatever the model."""
    drain_steps: int = 10
    """Dense steps that flush a residual before a look at dense begins."""
    error_budget: float = 1.0
    """Largest error of a level, smoothed as the median of the last 10 readings: at 1, no more than about one step's
    gradient is held back. ``benchmarks/quality.py`` shows what that costs. A level whose trial ends at twice as much is
    out at once."""
    critical_change: float = 2.0
    """Factor by which gradient norms rise, or a learning rate falls, as a critical phase begins; at the start, by which
    two gradient norms in a row differ."""
    critical_pause: int = 300
    """Steps between two critical phases."""
    critical_share: float = 0.05
    """Share of the time at a level that a critical phase may cost: where dense is many times slower, it is rare."""


@dataclass
class Controller:
    """State of the decision maker. Levels are indices of the ladder, least compression first; 0 is dense."""

    names: tuple[str, ...]
    costs: tuple[LevelCost, ...]
    """What every level asks of wire and processor; a level that sends no less than one below it is passed over."""
    limits: Limits = field(default_factory=Limits)
    mode: Mode = Mode.START
    level: int = 0
    link: Link = Link(0.0, 0.0)
    refused: dict[int, str] = field(default_factory=dict)
    """Levels that are not run any more, and why."""
    _samples: dict[int, list[StepTimes]] = field(default_factory=dict)
    """Level -> its latest steps, at the present link."""
    _past: dict[int, list[StepTimes]] = field(default_factory=dict)
    """What was known before a change was suspected that is not confirmed yet."""
    _doubt: str = ""
    """What may have changed: ``communication``, ``computation``, or ``need`` of compression, or the link as a
    ``sounding`` showed it; empty: nothing."""
    _link_before: Link = Link(0.0, 0.0)
    _codec: dict[int, float] = field(default_factory=dict)
    """Level -> its codec's seconds, as last measured: no wire changes them."""
    _hidden_share: float = 0.0
    """Communication that was hidden, as a share of the computation it hid behind: the most that was seen."""
    _window: list[StepTimes] = field(default_factory=list)
    _steps: int = 0
    _steps_at_level: int = 0
    _steps_held: int = 0
    _anchor: list[StepTimes] = field(default_factory=list)
    """What a step took when the level had been held for a while, at most one: what drifts away from it slowly has
    changed, too."""
    _strikes: int = 0
    _patience: int = 0
    _probe_after: int = 0
    _compare_after: int = 0
    _rivals: list[int] = field(default_factory=list)
    """Levels that are being compared once more, as they take turns: the held one, the other, the held one again."""
    _beaten: list[int] = field(default_factory=list)
    """Levels that lost a comparison by more than ``worthwhile``: a slow phase of the machine is no excuse for them."""
    _sounding_pause: int = 1
    """One in so many soundings takes place."""
    _larger: int = 0
    """Bytes of a sounding that shall follow a quick one; 0: none shall."""
    _larger_after: int = 0
    """Steps held when it shall."""
    _errors: list[float] = field(default_factory=list)
    """Of the present level."""
    _norms: list[float] = field(default_factory=list)
    _learning_rate: float = 0.0
    _critical: str = ""
    """Why a critical phase is due."""
    _calm_since: int = 0
    _resume: int = 0
    """Level that the last critical phase broke off; 0: there has been none."""

    def __post_init__(self) -> None:
        self._typical: dict[int, tuple[list[StepTimes], StepTimes]] = {}
        """Level -> samples, and what is typical of them: it is asked for many times a step."""
        self._become_watchful()

    def memory(self) -> dict[str, Any]:
        """All that it has learned, as numbers, text, lists and dictionaries of them; see ``recall``."""
        return {f.name: _as_plain(getattr(self, f.name)) for f in fields(self) if f.name not in ARGUMENTS}

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Go on where a controller of the same ladder was when it gave ``memory``, of which JSON may have made text."""
        for f in fields(self):
            if f.name in memory:
                setattr(self, f.name, _FROM_PLAIN.get(f.name, _as_plain)(memory[f.name]))

    def check(self) -> None:
        """Raise ValueError where what was recalled is not of these levels, or is nothing to measure by."""
        levels = {self.level, self._resume, *self._rivals, *self._beaten, *self.refused, *self._samples, *self._past}
        if not {*levels, *self._codec} <= set(range(len(self.names))):
            raise ValueError(f"The controller's state is damaged: it names levels beyond {', '.join(self.names)}.")
        if not all([*self._samples.values(), *self._past.values(), self._sounding_pause]):
            raise ValueError("The controller's state is damaged: it knows levels of which it has seen no step.")

    def forbid(self, level: int, why: str) -> None:
        """Never again run ``level`` or one above it (1 or more); where one of them runs, the run starts anew, dense."""
        self.refused.update({above: why for above in range(level, len(self.names))})
        if self.level >= level:
            self._samples.clear()
            self._past.clear()
            self._rivals.clear()
            self._doubt = ""
            self._become_watchful()
            self._enter(Mode.START, 0)

    def observe(self, level: int, seen: Observation) -> Decision | None:
        """Take in one step that ran at ``level``. Returns a decision, if one is due."""
        if level != self.level:  # a step that was under way when the level changed
            return None
        self._steps += 1
        self._steps_at_level += 1
        self._note_training(seen)
        settle = self.limits.settle_steps
        if self.mode is Mode.START:
            settle = min(settle, self.limits.dense_steps - 1)
        if self._steps_at_level <= settle:
            return None
        self._window.append(seen.times._replace(step=seen.times.step - seen.times.probe, probe=0.0))
        if self.mode is Mode.START:
            return self._after_start() if self._started() else None
        if self.mode is Mode.TRIAL:
            return self._after_trial() if self._tried() else None
        if self.mode is Mode.CRITICAL:
            return self._after_critical() if self._steps_at_level >= self.limits.dense_steps else None
        self._steps_held += 1
        if seen.times.probe and seen.probe_bytes and (decision := self._after_sounding(seen)):
            return decision
        return self._while_holding() if len(self._window) >= self.limits.watch_steps else None

    def probe_bytes(self) -> int:
        """Bytes by which the coming step shall sound the link, or 0. It asks for one in every ``sounding_steps``."""
        if self.mode is not Mode.HOLD or not self.level or not self._steps_held:
            return 0
        if self._larger and self._steps_held == self._larger_after:
            return self._larger
        rounds, odd = divmod(self._steps_held, self.limits.sounding_steps)
        if odd or not self.link.beta:
            return 0
        step = self._measured(self.level).step
        wanted = max(self.limits.sounding_length * step / self.link.beta, self.limits.sounding_bytes)
        size = int(min(wanted, self.costs[0].payload_bytes, self.limits.sounding_most)) // 4 * 4
        if size <= 4 * self.costs[self.level].payload_bytes:  # the level itself shows nearly as much
            return 0
        dear = self.link.beta * size / (self.limits.sounding_share * self.limits.sounding_steps * step)
        return size if rounds % (self._sounding_pause * max(1, math.ceil(dear))) == 0 else 0

    def predict(self, level: int) -> float:
        """Seconds that a step at ``level`` takes: as measured, or else as the cost model expects."""
        if level in self._samples:
            return self._measured(level).step
        calmest = min(map(self._measured, self._samples), key=lambda times: times.compute + times.input_wait)
        codec = self._codec.get(level, self._codec.get(0, 0.0) + self.costs[level].codec)
        hideable = self._hidden_share * calmest.compute
        return calmest.compute + calmest.input_wait + codec + self.link.exposed(self.costs[level], hideable)

    # -- the four modes

    def _started(self) -> bool:
        wanted = self.limits.dense_steps
        if self._steps_at_level < wanted:
            return False
        if self._steps_at_level >= 2 * wanted or len(self._norms) < 2:
            return True
        low, high = sorted(self._norms[-2:])
        return high <= self.limits.critical_change * low

    def _after_start(self) -> Decision:
        self._calm_since, self._critical = self._steps, ""
        self._keep_window()
        dense = self._measured(0)
        share = _share(dense)
        if share <= self.limits.bottleneck:
            return self._hold(
                0,
                f"communication is no bottleneck: {_ms(dense.exposed_comm)} exposed are {share:.0%} of a "
                f"{_ms(dense.step)} step (limit {self.limits.bottleneck:.0%})",
            )
        return self._go_on(
            f"communication holds up {share:.0%} of a {_ms(dense.step)} step ({_ms(dense.exposed_comm)} exposed, limit "
            f"{self.limits.bottleneck:.0%})"
        )

    def _tried(self) -> bool:
        """Enough steps for a figure, or for seeing that the level is hopeless."""
        if len(self._window) >= self.limits.trial_steps:
            return True
        others = [self._measured(level).step for level in self._samples if level != self.level]
        return len(self._window) >= 3 and bool(others) and typical_times(self._window).step > 2 * min(others)

    def _after_trial(self) -> Decision:
        name = self.names[self.level]
        # A short trial still shows what the level before it left behind: only what is far off is out at once.
        over = self._over_budget([min(self._errors[-2:])] if self._errors else [], 2 * self.limits.error_budget)
        nothing_changed = self._nothing_changed()
        if nothing_changed:
            # What was known counts. Suspicion has to be stronger from now on; looks for their own sake become rarer.
            self._samples, self._past, self.link = {**self._samples, **self._past}, {}, self._link_before
            if self._doubt == "need":
                self._probe_after *= 2
            elif self._doubt != "sounding":
                self._patience = min(2 * self._patience, 64)
            self._doubt, self._rivals = "", []
            self._keep_window()
            if not over:
                return self._hold_best(f"{name} takes {_ms(self._measured(self.level).step)} as before")
        else:
            if nothing_changed is not None:
                self._past, self._doubt = {}, ""
                self._become_watchful()
            self._samples.pop(self.level, None)  # of another time, which may have been a lucky one
            self._keep_window()
        times = self._measured(self.level)
        if over:
            return self._refuse(over)
        return self._go_on(f"{name} takes {_ms(times.step)} a step, {_ms(times.exposed_comm)} of it exposed")

    def _after_comparison(self, rivals: Sequence[int], why: str) -> Decision:
        """Another turn, or the better one; what was measured long ago at other levels is no rival."""
        held, among = rivals[0], [level for level in self._known() if level in rivals]
        # Without allowance for the machine's pace: turns follow each other.
        taken = {level: self._measured(level).step for level in among}
        best = self._least(taken)
        if len(rivals) == 2 and best != held:
            self._rivals = [*rivals, held]
            return self._try(held, f"{why}; {self.names[held]} once more before it is left")
        latest = {level: typical_times(self._samples[level][-self.limits.trial_steps :]).step for level in among}
        limit = min(latest.values()) / (1 - self.limits.worthwhile)
        self._beaten = [level for level in self._beaten if level != best]
        self._beaten += [level for level, step in latest.items() if step > limit and level != best]
        following = self._worthwhile(taken[best])  # these figures may be news
        return self._hold_best(why, among) if following is None else self._try_promising(following, why)

    def _nothing_changed(self) -> bool | None:
        """Whether the level that was tried shows that a suspicion was wrong; None: there is none, or it cannot tell."""
        if not self._doubt:
            return None
        seen, known = typical_times(self._window), self._past.get(self.level)
        if self._doubt not in ("communication", "sounding"):
            return None if known is None else not _changed(seen, typical_times(known), self.limits)
        cost = self.costs[self.level]
        before = typical_times(known).comm if known else self._link_before.seconds(cost)
        after = self.link.seconds(cost)
        # A level that sends next to nothing takes what it took, whatever the wire.
        if abs(after - before) <= max(self.limits.change * before, 2 * self.limits.bottleneck * seen.step):
            return None
        return abs(seen.comm - before) < abs(seen.comm - after)

    def _while_holding(self) -> Decision | None:
        now, before = typical_times(self._window), self._measured(self.level)
        what = _changed(now, before, self.limits)
        for anchor in self._anchor if not what else ():
            what, before = _changed(now, anchor, self.limits), anchor
        self._strikes = self._strikes + 1 if what else 0
        if over := self._over_budget(self._errors if len(self._errors) >= 5 else [], self.limits.error_budget):
            return self._refuse(over)
        if what:
            if self._strikes >= self._patience:
                return self._look_anew(what, now, before)
            self._window = []
            return None
        self._keep_window()
        held = self._measured(self.level)
        if not self._anchor and self._steps_held >= 4 * self.limits.watch_steps:
            self._anchor = [held]
        if self._critical and self._errors and self._errors[-1] > 0:
            steps = self.limits.drain_steps + self.limits.dense_steps
            cost = steps * max(0.0, self.predict(0) - held.step)
            if cost <= self.limits.critical_share * self._steps_held * held.step:
                return self._go_critical()
        self._critical = ""
        rivals = self._known() if self._steps_held >= self._compare_after else []
        others = {level: self._might_take(level) for level in rivals if level != self.level}
        if others:
            other = min(others, key=others.__getitem__)
            if others[other] < (1 - self.limits.margin) * held.step:
                self._compare_after *= 4
                self._rivals = [self.level, other]
                return self._try(
                    other,
                    f"{self.names[self.level]} takes {_ms(held.step)} a step over {len(self._samples[self.level])} "
                    f"steps, {self.names[other]} took {_ms(self._measured(other).step)} and might be "
                    f"{1 - others[other] / held.step:.0%} faster at the machine's present pace: compared once "
                    "more",
                )
        if self.level and self._steps_held >= self._probe_after:
            look = self.limits.drain_steps + self.limits.settle_steps + self.limits.trial_steps
            cost = look * max(0.0, self.predict(0) - held.step)
            if cost <= self.limits.probe_share * self._steps_held * held.step:
                self._past, self._samples = self._samples, {self.level: self._samples[self.level]}
                self._doubt, self._link_before = "need", self.link
                self._rivals = [self.level, 0]
                return self._try(0, f"{self._steps_held} steps at {self.names[self.level]}: is it still needed?")
        return None

    def _after_sounding(self, seen: Observation) -> Decision | None:
        """A sum may take longer than its bytes need, but hardly less: one that is quick shows a faster link.

        Unless it was small: every sum takes a while, and a link that has rested carries some bytes at any speed. So a
        larger one follows, until it is large enough for the level that is promised.
        """
        took, size, known = seen.times.probe, seen.probe_bytes, self._samples
        # Few bytes have hardly a say in what the link is thought to be, unless they have become quick: the level that
        # sends most says what it was.
        heaviest = min(known)
        before = self.link.changed(self.costs[heaviest], self._measured(heaviest).comm)
        followed, self._larger = size == self._larger, 0
        now = Link(min(before.alpha, took), max(0.0, took - before.alpha) / size)
        if not before.beta or 2 * now.beta > before.beta:
            if followed:
                self._sound_more_rarely()
            return None
        larger = min(4 * size, self.costs[0].payload_bytes, self.limits.sounding_most) // 4 * 4
        following = self._promised(now)
        enough = following is not None and size >= min(self.costs[following].payload_bytes / 8, larger)
        if not enough and larger > size and self._promised(Link(now.alpha, 0.0)) is not None:
            self._larger, self._larger_after = larger, self._steps_held
            return None
        self._sound_more_rarely()  # unless it turns out to be true
        if following is None:
            return None
        expected = before.alpha + before.beta * size
        self._past, self._doubt, self._link_before = known, "sounding", before
        self._samples, self.link = {self.level: known[self.level]}, now  # what else was measured is of the old link
        return self._try_promising(
            following,
            f"a sounding of {size / 1e3:.0f} kB took {_ms(took)} instead of {_ms(expected)}: the link is faster",
        )

    def _promised(self, link: Link) -> int | None:
        """The lesser compression that would be worthwhile on ``link``, if there is one."""
        known, before = self._samples, self.link
        self._samples, self.link = {self.level: known[self.level]}, link
        best = self._worthwhile(self.predict(self.level))
        self._samples, self.link = known, before
        return best if best is not None and best < self.level else None

    def _sound_more_rarely(self) -> None:
        self._sounding_pause = min(2 * self._sounding_pause, 64)

    def _after_critical(self) -> Decision:
        self._keep_window()
        self._calm_since, self._critical = self._steps, ""
        if self._resume in self.refused:
            return self._go_on("the critical phase is over")
        return self._hold(self._resume, "the critical phase is over")

    # -- what they share

    def _become_watchful(self) -> None:
        """What was learned about how seldom things change, and about who is slower than whom, is of another link."""
        self._patience = self.limits.patience
        self._probe_after = self.limits.probe_steps
        self._compare_after = 4 * self.limits.watch_steps
        self._sounding_pause = 1
        self._beaten = []

    def _go_on(self, why: str) -> Decision:
        """Try the next level that is worth it, or hold the best."""
        rivals, self._rivals = self._rivals, []
        if rivals and rivals[0] not in self.refused:
            return self._after_comparison(rivals, why)
        following, mildest = self._next(self.limits.optimism), self._mildest()
        if following is not None:
            return self._try_promising(following, why)
        if mildest is not None:
            doubts = f"tried as the mildest level, though {_ms(self.predict(mildest))} are expected"
            return self._try(mildest, f"{why}; {self.names[mildest]} is {doubts}")
        return self._hold_best(why)

    def _mildest(self) -> int | None:
        """The least compression, if it could be better than what would be held."""
        dense = self._measured(0) if 0 in self._samples else StepTimes()
        mildest = next((level for level in self._usable() if level), 0)
        if mildest in self._samples or _share(dense) <= self.limits.bottleneck:
            return None
        fastest = min(self._measured(level).step for level in self._known())
        could_be = (1 - self.limits.mild_optimism) * self.predict(mildest)
        return mildest if could_be < (1 - self.limits.margin) * fastest else None

    def _worthwhile(self, seconds: float) -> int | None:
        """The untried level that promises a step so much shorter than ``seconds`` that what is held is left for it."""
        best = self._next(optimism=0.0)
        return best if best is not None and self.predict(best) <= (1 - self.limits.worthwhile) * seconds else None

    def _next(self, optimism: float) -> int | None:
        """The untried level most worth a try: the least compression among the fastest that are predicted."""
        untried = [level for level in self._usable() if level not in self._samples]
        fastest = min((self._measured(level).step for level in self._known()), default=math.inf)
        predicted = {level: (1 - optimism) * self.predict(level) for level in untried}
        promising = {level: step for level, step in predicted.items() if step < (1 - self.limits.margin) * fastest}
        if not promising:
            return None
        best = min(promising.values())
        return min(level for level, step in promising.items() if (1 - self.limits.margin) * step <= best)

    def _least(self, steps: Mapping[int, float]) -> int:
        """The least compression that is as good as the fastest, going by seconds of a step."""
        fastest = min(steps.values())
        return min(level for level, step in steps.items() if (1 - self.limits.margin) * step <= fastest)

    def _hold_best(self, why: str, compared: Sequence[int] = ()) -> Decision:
        """Hold the best of the levels that were ``compared``, or of all that are known, by what they took."""
        taken = {level: self._measured(level).step for level in compared or self._known()}
        best = self._least(taken)
        tried = ", ".join(f"{self.names[level]} {_ms(step)}" for level, step in sorted(taken.items()))
        if best == 0:
            no_pay = f"compression does not pay ({tried})"
            return self._hold(0, f"{why}; {no_pay if len(taken) > 1 else 'no other level promises enough'}")
        saves = f", {1 - taken[best] / taken[0]:.0%} less than dense" if 0 in taken else ""
        return self._hold(best, f"{why}; {self.names[best]} is best{saves} ({tried})")

    def _look_anew(self, what: str, now: StepTimes, before: StepTimes) -> Decision | None:
        """The wire or the computation has changed: what was measured at other levels may hold no more."""
        if what == "communication":
            why, was, is_now = "communication takes", before.comm, now.comm
        else:
            why, was, is_now = "computation and input wait take", _busy(before), _busy(now)
        why += f" {_ms(is_now)} a step instead of {_ms(was)}"
        self._strikes = 0
        self._past, self._samples, self._beaten = self._samples, {}, []
        self._doubt, self._link_before = what, self.link
        self._keep_window()
        following = self._worthwhile(now.step)
        if following is not None:
            return self._try_promising(following, why)
        stay = self._hold(self.level, f"{why}; nothing else promises to be {self.limits.worthwhile:.0%} faster")
        # What is no news to anybody needs no explanation.
        return stay if abs(now.step - before.step) > self.limits.change * before.step else None

    def _refuse(self, why: str) -> Decision:
        """The present level is out."""
        self.refused[self.level] = why
        self._compare_after = 4 * self.limits.watch_steps  # what takes its place has not been compared with anything
        self._beaten = []
        return self._go_on(why)

    def _go_critical(self) -> Decision:
        self._resume, why, self._critical = self.level, self._critical, ""
        return self._enter(Mode.CRITICAL, 0, f"{why}: dense for {self.limits.dense_steps} steps")

    def _usable(self) -> list[int]:
        """Levels that may run, and that send less than every such level below them."""
        sent = [cost.payload_bytes for cost in self.costs]
        return [
            level
            for level in range(len(self.names))
            if level not in self.refused
            and all(sent[level] < sent[below] for below in range(level) if below not in self.refused)
        ]

    def _known(self) -> list[int]:
        """Levels that have been measured and may run, whatever they send since."""
        return [level for level in sorted(self._samples) if level not in self.refused]

    def _pace(self, level: int) -> float:
        """The present level's computation over that of ``level`` when it was measured: the machine's pace, unless the
        level itself is the reason. 1 where one of the two has clearly lost a comparison."""
        if level == self.level or {level, self.level} & set(self._beaten) or not self._samples.get(self.level):
            return 1.0
        then, now = (typical(map(_busy, self._samples[each])) for each in (level, self.level))
        return now / then if then and now else 1.0

    def _might_take(self, level: int) -> float:
        """Seconds of a step now, if the machine's pace changes all of it: a reason to compare the level, none to hold
        it."""
        return self._measured(level).step * self._pace(level)

    def _measured(self, level: int) -> StepTimes:
        steps = self._samples[level]  # lists of samples are replaced, never changed
        if level not in self._typical or self._typical[level][0] is not steps:
            self._typical[level] = steps, typical_times(steps)
        return self._typical[level][1]

    def _keep_window(self) -> None:
        """The window's steps are the present level's latest; the link is fitted to all that is known."""
        samples = [*self._samples.get(self.level, []), *self._window]
        self._samples[self.level], self._window = samples[-self.limits.memory_steps :], []
        times = self._measured(self.level)
        self._codec[self.level] = times.codec
        if times.compute:
            self._hidden_share = max(self._hidden_share, times.overlapped_comm / times.compute)
        comm = [(self.costs[level], self._measured(level).comm) for level in self._samples]
        sizes = [cost.payload_bytes for cost, _ in comm]
        if max(sizes) > 1.5 * min(sizes):
            self.link = fit_link(comm)
        else:
            self.link = self.link.changed(self.costs[self.level], times.comm)

    def _over_budget(self, errors: Sequence[float], most: float) -> str:
        """Why the present level may not go on, or nothing."""
        if not errors or median(errors) <= most:
            return ""
        return (
            f"the residual at {self.names[self.level]} is {median(errors):.2f} times the gradient (budget "
            f"{self.limits.error_budget:g})"
        )

    def _note_training(self, seen: Observation) -> None:
        """Watch for phases in which what is lost would be missed most (Agarwal et al., Accordion, MLSys 2021)."""
        if not math.isnan(seen.error):
            self._errors = [*self._errors[-9:], seen.error]
        last, self._learning_rate = self._learning_rate, seen.learning_rate
        calm = self._steps - self._calm_since >= self.limits.critical_pause
        fell = 0 < seen.learning_rate * self.limits.critical_change <= last
        if fell and (calm or not self._resume):
            self._critical = f"the learning rate fell from {last:.3g} to {seen.learning_rate:.3g}"
        if math.isnan(seen.gradient_norm):
            return
        self._norms = [*self._norms[-7:], seen.gradient_norm]
        before, now = self._norms[:4], self._norms[4:]
        if calm and len(now) == 4 and median(now) > self.limits.critical_change * median(before):
            self._critical = f"gradient norms rose from {median(before):.3g} to {median(now):.3g}"

    def _promise(self, level: int) -> str:
        return f"{self.names[level]} promises {_ms(self.predict(level))}"

    def _try_promising(self, level: int, why: str) -> Decision:
        return self._try(level, f"{why}; {self._promise(level)}")

    def _try(self, level: int, why: str) -> Decision:
        return self._enter(Mode.TRIAL, level, why)

    def _hold(self, level: int, why: str) -> Decision:
        self._past, self._doubt, self._anchor = {}, "", []
        if level != self.level or self.mode is not Mode.HOLD:
            self._steps_held = self._strikes = self._larger = 0
        return self._enter(Mode.HOLD, level, why)

    def _enter(self, mode: Mode, level: int, why: str = "") -> Decision:
        decision = Decision(level, why, self._evidence())
        if level != self.level or mode is not Mode.HOLD:
            self._steps_at_level = 0
            self._errors = []
        self.mode, self.level, self._window = mode, level, []
        return decision

    def _evidence(self) -> dict[str, float]:
        evidence = {
            f"{self.names[level]}.{figure}_ms": getattr(self._measured(level), figure) * 1e3
            for level in sorted(self._samples)
            for figure in ("step", "exposed_comm", "overlapped_comm", "codec")
        }
        if self._samples.get(self.level):
            for level in self._usable():
                if level not in self._samples:
                    evidence[f"{self.names[level]}.predicted_step_ms"] = self.predict(level) * 1e3
            evidence["link.ms_per_allreduce"] = self.link.alpha * 1e3
            evidence["link.ms_per_MB"] = self.link.beta * 1e9
        if self._errors:
            evidence[f"{self.names[self.level]}.error"] = median(self._errors)
        return {name: round(value, 4) for name, value in evidence.items()}


ARGUMENTS = ("names", "costs", "limits")
"""Fields of a controller that a new one is given anew."""


def _as_plain(value: Any) -> Any:
    """A copy of numbers, text, and lists, tuples and dictionaries of them, with lists for tuples."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: _as_plain(item) for key, item in value.items()}
    return [_as_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _steps(values: Iterable[Sequence[float]]) -> list[StepTimes]:
    return [StepTimes(*times) for times in values]


def _by_level(kind: Callable[[Any], Any]) -> Callable[[Mapping[Any, Any]], dict[int, Any]]:
    return lambda values: {int(level): kind(value) for level, value in values.items()}


_FROM_PLAIN: dict[str, Callable[[Any], Any]] = {
    "mode": Mode,
    "link": lambda values: Link(*values),
    "_link_before": lambda values: Link(*values),
    "refused": _by_level(str),
    "_samples": _by_level(_steps),
    "_past": _by_level(_steps),
    "_codec": _by_level(float),
    "_window": _steps,
    "_anchor": _steps,
}
"""Field -> what makes its value from the plain one, where that is not the value itself."""


def typical(seconds: Iterable[float]) -> float:
    """The lower quartile: what else a machine is busy with makes steps longer, never shorter."""
    ordered = sorted(seconds)
    return ordered[(len(ordered) - 1) // 4]


def typical_times(steps: Sequence[StepTimes]) -> StepTimes:
    """What is typical, figure by figure, of two steps in a row (of those that were kept): a level of two phases sends
    more in one than in the other, and its lower quartile alone would be the lighter phase's."""
    if len(steps) == 1:
        return steps[0]
    columns = zip(*steps, strict=True)
    return StepTimes(*(typical([a + b for a, b in pairwise(column)]) / 2 for column in columns))


def _changed(now: StepTimes, before: StepTimes, limits: Limits) -> str:
    """What changed: ``communication``, ``computation``, or nothing.

    Communication that makes a step a little longer makes no other level worthwhile. Less of it tells more: a level that
    sends more gains more.
    """
    more = now.comm - before.comm
    least = limits.worthwhile if more > 0 else limits.margin
    if abs(more) > max(limits.change * before.comm, least * before.step):
        return "communication"
    return "computation" if abs(_busy(now) - _busy(before)) > limits.change * before.step else ""


def _busy(times: StepTimes) -> float:
    """Seconds that are neither codec nor communication. Ranks' figures are reduced one by one, so that a wait for input
    on one of them is taken from the computation of all: only together do they say how fast the machine is."""
    return times.compute + times.input_wait


def _share(times: StepTimes) -> float:
    """Exposed communication as a share of the step."""
    return times.exposed_comm / times.step if times.step else 0.0


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
