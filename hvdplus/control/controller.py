"""Which level to run: a pure function of measurements that every rank shares.

No clock, no MPI, no framework: numbers in, decisions out, so that it is tested with numbers alone and replayed from a
run log. Every rank runs it on the same figures and so decides the same at the same step.

    start ──► hold the level of least cost ◄──────────────┐
                │ another level may well cost less        │ the pairs' ratio decides, by its bound
                └──► both run in turns, block by block ───┘

Small sums that were timed beforehand show the link. The start is at the level that is expected to lose least, as long
as nobody knows how long the computation takes.

The cost of a level is seconds a step times the price of delay, see ``knowledge.py`` and ``delay.py``. More compression
has to be cheaper by a margin, less compression may cost half a margin more; so a tie goes to less. A level is tried
only where the trial is worth its time: if it can tell the two apart, and if what it may gain is more than noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from hvdplus.control import untried
from hvdplus.control.blocks import Block, Guess, block_of, noise_of, usual
from hvdplus.control.config import Config
from hvdplus.control.delay import reached
from hvdplus.control.exploring import Exploring
from hvdplus.control.knowledge import Knowledge, evidence, plausible
from hvdplus.control.link import LevelCost
from hvdplus.control.memory import restore, to_plain
from hvdplus.control.meter import StepTimes
from hvdplus.control.phases import Phases
from hvdplus.control.prospects import Prospects
from hvdplus.control.trial import hopeless, judge


class Observation(NamedTuple):
    """What all ranks know of one step."""

    times: StepTimes
    error: float = math.nan
    """Norm of the residuals over that of the gradients, both summed over ranks; NaN: not measured."""
    gradient_norm: float = math.nan
    """Root mean square over the ranks; NaN: not measured."""
    learning_rate: float = 0.0
    """0: unknown."""
    probe_bytes: int = 0
    """Of the sum that ``times.probe`` is of; 0: there was none."""
    cosine: float = math.nan
    """Between the gradients of two ranks, on average; NaN: not measured. For the log: no decision rests on it."""
    flushes: bool = False
    """Whether it also sent what the level before had held back, so that it took longer than the level's other steps."""


class Decision(NamedTuple):
    """One decision, with its reason and the evidence behind it; the unit of every figure stands in its name."""

    level: int
    reason: str
    evidence: dict[str, float]


class Mode(Enum):
    """What the controller is busy with."""

    START = "start"
    TRIAL = "trying a level"
    HOLD = "holding a level"


ARGUMENTS = ("names", "costs", "config")
"""Fields of a controller that a new one is given anew."""
NOT_LEARNED = ("costs", "delay_price")
"""Fields of its ``Knowledge`` that are given anew."""
QUIET = 1e-8
"""Least noise."""
START_SETTLES, START_STEPS = 2, 4
"""Steps of a start that do not count, and that do: it may be far from the best level, and trials follow anyway."""


@dataclass
class Controller:
    """Decides. Levels are indices of the ladder, least compression first; 0 is dense."""

    names: tuple[str, ...]
    costs: tuple[LevelCost, ...]
    """What every level asks of wire and processor. One that sends no less than one below it is passed over, unless it
    sends as much and delays less."""
    config: Config = field(default_factory=Config)
    mode: Mode = Mode.START
    level: int = 0
    """Runs at present."""
    held: int = 0
    """The choice, as far as it is known."""
    challenger: int = 0
    refused: dict[int, str] = field(default_factory=dict)
    """Levels that are not run any more, and why."""
    _known: Knowledge = field(init=False)
    _window: list[StepTimes] = field(default_factory=list)
    _turns: list[tuple[int, Block]] = field(default_factory=list)
    """(level, block): the last block of the level held, then those of the trial."""
    _age: int = 0
    """Steps since the level changed."""
    _prior: Guess = Guess()
    """What was known of the trial's ratio before it."""
    _lost: dict[int, int] = field(default_factory=dict)
    """Level -> trials that it lost against the level held; each makes it promise more to be tried again."""
    _doubt: bool = False
    """Whether the last block was left out, as it lay far from those before: a burst, or news."""
    _noise: float = 0.0
    """Variance of a trial's ratio, as blocks of the level held let expect."""
    _exploring: Exploring = field(default_factory=Exploring)
    _phases: Phases = field(default_factory=Phases)
    _carried: float = 0.0
    """Error of the level before, with whose residual this one began."""

    def __post_init__(self) -> None:
        self._known = Knowledge(self.costs, self.config.delay_price)

    @property
    def _prospects(self) -> Prospects:
        """Of trials against the level held."""
        return Prospects(self.config, self._known, self._exploring, self.held, self._noise, self._lost)

    def memory(self) -> dict[str, Any]:
        """All that was learned, as numbers, text, lists and dictionaries of them; see ``recall``."""
        known = to_plain(self._known, without=NOT_LEARNED)
        return {**to_plain(self, without=(*ARGUMENTS, "_known")), "_known": known}

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Go on where a controller of the same ladder was when it gave ``memory``, of which JSON may have made text.

        Raises:
            ValueError: the memory is damaged.
        """
        restore(self, memory, without=(*ARGUMENTS, "_known"))
        restore(self._known, memory.get("_known"), without=NOT_LEARNED)
        _check(self)

    def begin(self, probes: Sequence[tuple[int, float]]) -> None:
        """Before the first step: sums of so many bytes took so many seconds."""
        self._known.begin(probes)
        if probes and not self.config.dense_steps:
            self.level = self.held = untried.best_start(self._known, self._usable())

    def unforeseen(self) -> tuple[int, ...]:
        """Levels to preview in the coming step."""
        return untried.unforeseen(self._known, self.level, self._usable())

    def foresee(self, errors: Mapping[int, float]) -> None:
        """A preview: level -> the norm of what it would have held back of a step's gradient, over the gradient's."""
        for level, error in errors.items():
            self._known.errors.foresee(level, error)

    def forbid(self, level: int, why: str) -> None:
        """Never again run ``level`` or one above it (1 or more); if one of them is held, the run starts anew, dense."""
        self.refused = {**dict.fromkeys(range(level, len(self.names)), why), **self.refused, level: why}
        if self.held >= level:
            self._known.levels.clear()
            self.held, self._lost, self._turns = 0, {}, []
            self._enter(Mode.START, 0)
        elif self.mode is Mode.TRIAL and self.challenger >= level:
            self._enter(Mode.HOLD, self.held)

    def stretch(self, factor: float) -> None:
        """What is observed as one step has so many times the computation from now on, and one exchange as before."""
        self._known.stretch(factor)
        if self.mode is Mode.TRIAL:
            self._enter(Mode.HOLD, self.held)
        self._window, self._turns, self._lost, self._doubt = [], [], {}, False

    def observe(self, level: int, seen: Observation) -> Decision | None:
        """Take in one step that ran at ``level``. Returns a decision, if one is due."""
        if level != self.level:  # a step that was under way when the level changed
            return None
        config, times = self.config, seen.times._replace(step=seen.times.step - seen.times.probe, probe=0.0)
        self._known.costs = self.costs
        self._known.steps += 1
        self._age += not seen.flushes
        self._exploring.see(seen.times)
        if self.mode is Mode.TRIAL and level == self.challenger:
            self._exploring.see_trial(times, held=self._turns[-1][1])
        self._note_training(level, seen)
        if level and min(seen.error, self._known.errors.least(level)) > config.error_budget:
            budget = f"the residual at {self.names[level]} is {seen.error:.2f} times the gradient (budget "
            return self._refuse(f"{budget}{config.error_budget:g})")
        settles, asked = config.settle_steps, self._dense_steps
        if self.mode is Mode.START:
            settles = min(settles, asked - 1 if asked else START_SETTLES)
        if self._age <= settles or seen.flushes:
            if self._age <= settles:
                self._window.append(times)
            if self._is_hopeless(settled=False):  # by steps of which those beyond the age have flushed
                return self._after_block(block_of(self._window), flushes=len(self._window) > self._age)
            return None
        if self._age == settles + 1:
            self._window = []
        self._window.append(times)
        if seen.probe_bytes and seen.times.probe and level in self._known.levels:
            another = self._known.see_probe(level, seen.probe_bytes, seen.times.probe)
            self._exploring.see_probe(seen.times.probe, config.explore, step=self._known.seconds(level), again=another)
        return self._after_block(block_of(self._window)) if self._block_is_full() else None

    def probe_bytes(self) -> int:
        """Bytes by which the coming step shall probe the link's bandwidth, or 0."""
        rests = self.mode is Mode.HOLD and self._age > self.config.settle_steps
        return untried.probe_bytes(self._known, self.level, self._exploring, self.config.explore) if rests else 0

    # -- one block

    def _block_is_full(self) -> bool:
        config, count = self.config, len(self._window)
        if self.mode is Mode.START:
            return self._age >= self._dense_steps if self._dense_steps else count >= START_STEPS
        turn = self._prospects.turn if self.mode is Mode.TRIAL else config.block_steps
        return count >= turn or self._is_hopeless(settled=True)

    @property
    def _dense_steps(self) -> int:
        """Those that are asked for, as long as nothing was measured."""
        return 0 if self._known.levels else self.config.dense_steps

    def _is_hopeless(self, *, settled: bool) -> bool:
        """Whether the trial's level is so much dearer already that the rest of its turn is not worth its time."""
        if self.mode is not Mode.TRIAL or self.level != self.challenger or len(self._window) < 3:
            return False
        steps = [each.step for each in usual(self._window, min(each.input_wait for each in self._window))]
        held, prospects = self._turns[-1][1], self._prospects
        extra = prospects.dearer(self.level) + prospects.need(self.level)
        count = prospects.turn if len(self._turns) > 1 else self.config.block_steps
        return hopeless(steps, held, extra, count, settled=settled)

    def _after_block(self, block: Block, *, flushes: bool = False) -> Decision | None:
        count, self._window = len(self._window), []
        news = self._known.is_news(self.level, block)
        self._doubt, changed = news and not self._doubt, news and self._doubt
        if self._doubt:
            return None
        if changed:
            self._lost = {}
        self._known.learn(self.level, block, held=self.level == self.held, flushes=flushes)
        if self.level == self.held:
            noise = max(noise_of(block, self.config.pairs) * count / self.config.block_steps, QUIET)
            # The geometric mean of late: a step that stalled makes its block hundreds of times as noisy as others.
            self._noise = self._noise**0.8 * noise**0.2 if self._noise else noise
        if self.mode is Mode.TRIAL:
            self._turns.append((self.level, block))
            return self._judge()
        self._turns = [(self.level, block)]
        return self._choose("the start is over" if self.mode is Mode.START else "")

    def _note_training(self, level: int, seen: Observation) -> None:
        """What the step says of delay and of its price."""
        if not math.isnan(seen.error) and level:
            share = self._known.share(level)
            self._known.errors.learn(level, seen.error, self._age, self._carried, share=share, held=level == self.held)
        self._phases.observe(seen.gradient_norm, seen.learning_rate)
        self._known.delay_price = self.config.delay_price * (self.config.critical_price if self._phases.left else 1.0)

    # -- decisions

    def _choose(self, why: str) -> Decision | None:
        """Try the level that promises most, or hold the present choice."""
        promises = self._prospects.promises(self._usable())
        if not promises:
            news = self.mode is not Mode.HOLD
            words = f"{why}; {self.names[self.held]} is best"
            if error := self._known.error(self.held).mean:
                words += f" (price of delay {self._known.price(self.held):.3f}, error {error:.2f})"
            return self._enter(Mode.HOLD, self.held, words) if news else None
        best = max(promises, key=lambda level: promises[level])
        self.challenger, self._prior = best, self._known.ratio(best, self.held)
        ratio = math.exp(self._known.cost(best, self.held).mean - self._known.cost(self.held, self.held).mean)
        promise_text = f"{self.names[best]} is expected to cost {ratio:.2f} times {self.names[self.held]}"
        return self._enter(Mode.TRIAL, best, f"{why}; {promise_text}" if why else promise_text)

    def _judge(self) -> Decision | None:
        """After a block of a trial: decide, if the pairs' bound does, or let the other have its turn."""
        config, names, prospects = self.config, self.names, self._prospects
        verdict = judge(
            self._turns,
            self.challenger,
            self._prior,
            price=prospects.dearer(self.challenger),
            need=prospects.need(self.challenger),
            certainty=config.certainty,
            asked=config.certainty * prospects.burden(self.challenger),
            pairs=config.pairs,
        )
        pairs = f"{verdict.pairs} pair{'s' if verdict.pairs > 1 else ''}"
        words = f"{names[self.challenger]} costs {verdict.interval} times {names[self.held]}, {pairs}"
        least = [config.margin / 2]
        if verdict.at_stake > config.margin / 2:
            promises = prospects.promises(self._usable())
            least += [promise for level, promise in promises.items() if level != self.challenger]
        # One that loses is held against a turn after its own, too: the link may have changed since the one before it.
        if verdict.at_stake > max(least) or (self.level == self.challenger and not verdict.wins):
            other = self.held if self.level == self.challenger else self.challenger
            return self._enter(Mode.TRIAL, other, f"{words}: in turns")
        self._known.learn_ratio(self.challenger, self.held, verdict.ratio)
        if verdict.wins:
            self.held, self._lost = self.challenger, {}
        else:
            self._lost[self.challenger] = self._lost.get(self.challenger, 0) + 1
        self._turns = [turn for turn in self._turns if turn[0] == self.held][-1:]
        return self._choose(words)

    def _usable(self) -> list[int]:
        """Levels that may run, and that send less than every such level below them, or as much with less delay."""
        allowed = [level for level in range(len(self.names)) if level not in self.refused]
        sent = [(self.costs[level].payload_bytes, self.costs[level].delay_weight) for level in allowed]
        return [level for place, level in enumerate(allowed) if all(sent[place] < more for more in sent[:place])]

    def _refuse(self, why: str) -> Decision | None:
        """The present level is out."""
        self.refused[self.level] = why
        if self.level == self.held:
            self.held = untried.surest(self._known, self._usable(), self.level, self.config)
        self._turns, self._lost = [], {}
        measured = self.held in self._known.levels
        where = f"{'back' if measured else 'on'} to {self.names[self.held]}"
        return self._enter(Mode.HOLD if measured else Mode.START, self.held, f"{why}; {where}")

    def _enter(self, mode: Mode, level: int, why: str = "") -> Decision:
        if level != self.level:
            if self._age or self.costs[self.level].keeps_residual:  # else what was carried is under way still
                error, share = self._known.error(self.level).mean, self._known.share(self.level)
                self._carried = reached(error, self._age, self._carried, share)
            self._age = 0
        self.mode, self.level, self._window, self._doubt = mode, level, [], False
        return Decision(level, why, evidence(self._known, self.names, self._usable()))


def _check(controller: Controller) -> None:
    """Raise ValueError if what a controller has recalled does not fit together."""
    known, names, turns = controller._known, controller.names, controller._turns
    seen = {*controller.refused, *known.levels, *known.errors.levels, *controller._lost}
    levels = {controller.level, controller.held, controller.challenger, *seen, *(level for level, _ in turns)}
    if not levels <= set(range(len(names))):
        raise ValueError(f"it names levels beyond {', '.join(names)}")
    if controller.mode is not Mode.START and controller.held not in known.levels:
        raise ValueError("it holds a level that it has not seen")
    both = controller.held, controller.challenger
    order = [*(level for level, _ in turns), controller.level]
    in_turns = all(level == both[place % 2] for place, level in enumerate(order))
    if controller.mode is Mode.TRIAL and not (turns and in_turns):
        raise ValueError(f"its trial of {names[controller.challenger]} is not in turns")
    if not {level for level, _ in turns} <= set(known.levels):
        raise ValueError("it compares levels that it has not seen")
    if controller._noise < 0 or not plausible(known, [block for _, block in turns]):
        raise ValueError("it knows of steps that took less than no time")
