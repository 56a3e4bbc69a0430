"""Local steps in PyTorch: ranks take several steps of their own, and then average what they have come to.

    x = anchor ─► H steps of the user's own optimizer, on this rank's own gradients ─► drift = anchor - x
        ─► the exchange that gradients go through, with drifts instead ─► mean drift
        ─► outer step: anchor - mean drift (or Nesterov) ─► x = anchor, equal on all ranks again

Anchors are the parameters, and drifts the gradients, of an *outer* optimizer of PyTorch's, which is wrapped like any
other: so compressors, residuals, the controller, the run log and checkpoints are those of lock-step, and one "step" of
them is one exchange.

Local SGD is from arXiv 1805.09767, its outer Nesterov step DiLoCo's (arXiv 2311.08105). If the sum runs while ranks go
on (``overlap_steps``), the steps that they took meanwhile are kept: x becomes x + (new anchor - x when it was sent).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hvdplus.adapters.torch import asynchronous
from hvdplus.adapters.torch import optimizer as lockstep
from hvdplus.adapters.torch.fragment import Fragment
from hvdplus.agree import TWICE, agreed_rhythm, announce_local, check_passes, settings_of_exchanges
from hvdplus.exchange import checkpoint
from hvdplus.exchange.checkpoint import say
from hvdplus.exchange.form import require, require_fields
from hvdplus.exchange.rhythm import NESTEROV, Rhythm, split
from hvdplus.settings import Settings
from hvdplus.transport import World

STATE_KEY = lockstep.STATE_KEY
OUTER: Mapping[str, Mapping[str, Any]] = {
    "average": {"lr": 1.0},
    "nesterov": {"lr": NESTEROV[0], "momentum": NESTEROV[1], "nesterov": True},
}
"""Setting ``outer`` -> arguments of ``torch.optim.SGD`` over the anchors."""


def wrap(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
    world: World,
    *,
    every: int,
    compression: Any,
    settings: Mapping[str, Any] | None,
    average: bool,
    passes: int = 1,
) -> torch.optim.Optimizer:
    """The optimizer as an instance of a subclass of its own class, sharing its groups and state.

    ``every``: local steps between two exchanges; 0: from measurements. Others, and errors, as of
    ``optimizer.wrap``.
    """
    check_passes(passes)
    if isinstance(optimizer, lockstep.Distributed | LocalSteps):
        raise ValueError(TWICE)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"DistributedOptimizer wraps a torch.optim.Optimizer. Received: {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates its closure as often as it likes, and cannot take local steps.")
    resolved = Settings.load(settings)
    names = lockstep.names_of(optimizer, named_parameters)
    rhythm = Rhythm(
        every,
        fragments=resolved.fragments,
        overlap=resolved.overlap_steps,
        lock_steps=resolved.dense_steps,
        overlaps=True,
    )
    announce_local(every, average, world)
    # The dense steps come first in the script's own optimizer, the rest is the outer optimizers'.
    own = settings_of_exchanges(settings, resolved)
    fragments = _fragments(optimizer, names, world, every, compression, resolved, own)
    rhythm.follow([fragment.outer.hvdplus for fragment in fragments], resolved.staleness)
    wrapped: Any = lockstep.subclassed(optimizer, LocalSteps)
    wrapped._fragments, wrapped._rhythm, wrapped._begun = fragments, rhythm, False
    wrapped._averages_state = resolved.average_state
    wrapped._averaged = frozenset(id(p) for fragment in fragments for p in fragment.parameters)
    wrapped._locked, wrapped._backward_passes = None, passes
    if rhythm.lock_steps:
        named = [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]
        quiet = {**own, "run_log": ""}
        wrapped._locked = lockstep.wrap(
            optimizer,
            named,
            world,
            compression="none",
            settings=quiet,
            passes=passes,
            average=True,
            sparse_as_dense=False,
        )
    return wrapped  # type: ignore[no-any-return]


def _fragments(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    world: World,
    every: int,
    compression: Any,
    settings: Settings,
    own: Mapping[str, Any],
) -> list[Fragment]:
    """All parameters, in fragments with an outer optimizer each. ``own``: the outer optimizers' settings."""
    waits = not settings.staleness or world.transport.size == 1
    chosen = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    level = None if waits else asynchronous.chosen_level(compression, Settings.load(own))
    if not waits:
        asynchronous.check(settings, every, {names[id(p)]: p.dtype for p in chosen}, world)
    fragments = []
    for part in split([p.numel() for p in chosen], settings.fragments):
        parameters = [chosen[i] for i in part]
        anchors = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
        outer = lockstep.wrap(
            torch.optim.SGD(anchors, **OUTER[settings.outer]),
            [(names[id(p)], anchor) for p, anchor in zip(parameters, anchors, strict=True)],
            world,
            compression=compression if waits else "none",
            settings=own,
            passes=1,
            average=True,
            sparse_as_dense=True,
            rhythm=agreed_rhythm(every, settings),
        )
        if level is None:
            fragments.append(Fragment(parameters, anchors, outer))
        else:
            ahead = None if settings.staleness == "any" else int(settings.staleness)
            fragments.append(asynchronous.Asynchronous(parameters, anchors, outer, ahead=ahead, level=level))
    return fragments


class LocalSteps(torch.optim.Optimizer):
    """Base class that comes before the user's optimizer class."""

    _fragments: list[Fragment]
    _rhythm: Rhythm
    _locked: Any
    """The same optimizer in lock-step, for the first steps; None: they are over."""
    _past: Any = None
    """It, once they are. It stays, as newcomers of an elastic job have one, and ranks join with all that they have."""
    _begun: bool
    """Whether anchors are the parameters of the last exchange, or of the beginning."""
    _averages_state: bool
    _backward_passes: int
    _averaged: frozenset[int]
    """ids of the parameters in all fragments."""
    _step_supports_amp_scaling = True  # ranks may skip steps by themselves, and all count them

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of this rank's own, and the exchange, if one is due.

        Raises:
            ValueError: a parameter was unfrozen that is not among those which are averaged.
        """
        self._check_parameters()
        if self._locked is not None:
            result = self._step_in_lock(closure)
            self._rhythm.step()
            self._end_lock_step()
            return result
        if not self._begun:  # parameters may have been broadcast or loaded since the optimizer was made
            for fragment in self._fragments:
                fragment.anchor()
            self._begun = True
        result = self._own_step(closure)
        for fragment in self._fragments:
            fragment.look()
        self._rhythm.step()
        self._complete(self._rhythm.complete())
        for number in self._rhythm.begin():
            self._fragments[number].begin(early=self._rhythm.overlap > 0)
        if not self._rhythm.overlap:
            self._complete(self._rhythm.complete())
        return result

    # Keeps PyTorch from adding step hooks to this method: the user's class runs them.
    step.hooked = True  # type: ignore[attr-defined]

    def average_now(self) -> None:
        """Exchange at once, whatever step it is, so that all ranks have the same parameters: before an evaluation, or
        at the end. Every rank calls it."""
        if self._locked is None and self._begun:
            under_way = self._rhythm.complete(all_of_them=True)
            self._complete(under_way)
            due = self._rhythm.begin_all(self._told)
            self._rhythm.complete(all_of_them=True)
            for number, fragment in enumerate(self._fragments):
                if number in due or not fragment.waits:
                    fragment.meet(lockstep.rate_of(self.param_groups))
                    _average_state(self, fragment)
                elif number in under_way:
                    fragment.arrive()

    def _told(self, due: list[int]) -> list[list[int]]:
        """What all ranks say is ``due``, if they wait for each other."""
        first = self._fragments[0]
        if not first.waits:
            return [due]
        told: list[list[int]] = first.outer._exchange.transport.gather_objects(due, "fragments to average")
        return told

    def restart(self) -> None:
        """Forget exchanges under way: drifts count from the parameters that the next step finds, equal on all ranks."""
        for fragment in self._fragments:
            fragment.outer._abandon()
            fragment.sent = None
        self._rhythm.restart()
        self._begun = False

    def synchronize(self) -> None:
        """In lock-step, as in Horovod; local steps have no gradients to exchange. See ``average_now``."""
        if self._locked is not None:
            self._locked.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In lock-step, as in Horovod."""
        if self._locked is None:
            yield
            return
        with self._locked.skip_synchronize():
            yield

    def zero_grad(self, *arguments: Any, **keywords: Any) -> None:
        """As in PyTorch."""
        if self._locked is not None:
            self._locked.zero_grad(*arguments, **keywords)
        else:
            super().zero_grad(*arguments, **keywords)

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes before a step in lock-step; local steps may have any number of them."""
        return self._backward_passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """See ``backward_passes_per_step``; call it between two steps."""
        check_passes(passes)
        self._backward_passes = passes
        for each in filter(None, (self._locked, self._past)):
            each.set_backward_passes_per_step(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not with local steps.

        Raises:
            ValueError: once wrapped.
        """
        if hasattr(self, "_fragments"):
            raise ValueError("Local steps need all parameters from the start: add them, then wrap the optimizer anew.")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As in PyTorch, with one key more: ``hvdplus`` holds the anchors and what their exchange needs."""
        state = self.own_state_dict()
        if self._begun:
            state[STATE_KEY]["fragments"] = [fragment.state() for fragment in self._fragments]
        return state

    def own_state_dict(self) -> dict[str, Any]:
        """The same without anchors: once loaded, drifts count from the parameters that the next step finds."""
        return {**super().state_dict(), STATE_KEY: {"local": self._rhythm.state(), "fragments": None}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in PyTorch. Every rank has to load, or call ``hvd.broadcast_optimizer_state``.

        A state that was saved in lock-step brings no anchors: drifts then count from the parameters at the next step.

        Raises:
            ValueError: the state is of another model, or of other fragments.
        """
        ours = state_dict.get(STATE_KEY, {})
        require(isinstance(ours, Mapping), "its part of an optimizer's state", "a dictionary", ours)
        if "local" in ours:
            _check(self, ours)
        fits = lockstep.same_groups(self, state_dict)
        if not fits:  # as in lock-step
            lockstep.load_own(self, super(), state_dict)
        for fragment in self._fragments:
            fragment.settle()
        self.restart()
        if "local" in ours:
            under_way = self._rhythm.load(ours["local"])
            saved = ours["fragments"] or []
            pairs = enumerate(zip(self._fragments, saved, strict=bool(saved)))
            goes_on = [fragment.load(state, number in under_way) for number, (fragment, state) in pairs]
            self._begun = bool(goes_on) and all(goes_on)
            if not self._begun:
                self._rhythm.forget()
            if self._rhythm.locked and self._past is not None:
                self._past, self._locked = None, self._past
                self._locked.wake()
            self._end_lock_step()
        elif ours.get("residuals"):
            say(checkpoint.OF_LOCK_STEP)
        if fits:
            lockstep.load_own(self, super(), state_dict)

    def consolidate_state_dict(self) -> None:
        """Make any one rank's ``state_dict`` valid for all ranks, until the next step: they exchange at once, and
        residuals become their mean. Every rank has to call it."""
        self.average_now()
        for fragment in self._fragments:
            fragment.outer.consolidate_state_dict()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are of the user's optimizer, to be wrapped anew."""
        return lockstep.reduced(self, LocalSteps, super().__getstate__())

    def facts(self) -> dict[str, Any]:
        """Figures for the report, of exchanges that wait for nobody."""
        return {name: value for fragment in self._fragments for name, value in fragment.facts().items()}

    def record(self, loss: float | torch.Tensor) -> None:
        """Put this step's loss into the run log, if its exchange is due; call it before ``step``."""
        self._fragments[0].outer.record(loss)

    @property
    def hvdplus(self) -> Any:
        """The coordinator of the (first fragment's) exchange: plan, level names, measured times, run log."""
        return self._fragments[0].outer.hvdplus

    def _end_lock_step(self) -> None:
        """If it is over."""
        if self._locked is not None and not self._rhythm.locked:
            self._past, self._locked = self._locked, None
            self._past.rest()

    def _check_parameters(self) -> None:
        everything = (p for group in self.param_groups for p in group["params"])
        late = sum(p.requires_grad and id(p) not in self._averaged for p in everything)
        if late:
            raise ValueError(
                "Local steps average the parameters that had requires_grad=True when the optimizer was wrapped. "
                f"Received: {late} that became so later. Unfreeze them before, or make and wrap the optimizer anew."
            )

    @contextmanager
    def _what_scaler_says(self) -> Iterator[dict[str, Any]]:
        """The attributes that a ``GradScaler`` has set, which this optimizer does not have meanwhile."""
        names: tuple[str, ...] = ("grad_scale", "found_inf")
        said = {name: self.__dict__.pop(name) for name in names if name in self.__dict__}
        try:
            yield said
        finally:
            self.__dict__.update(said)

    def _step_in_lock(self, closure: Callable[[], Any] | None) -> Any:
        with self._what_scaler_says() as said:
            self._locked.__dict__.update(said)
            try:
                return self._locked.step() if closure is None else self._locked.step(closure)
            finally:
                for name in said:
                    self._locked.__dict__.pop(name, None)

    def _own_step(self, closure: Callable[[], Any] | None) -> Any:
        """The user's optimizer's, unless a ``GradScaler`` has found infinities on this rank."""
        with self._what_scaler_says() as said:  # the user's optimizer may not expect these attributes
            if "found_inf" in said:
                self._skips_by_itself()
            if said.get("grad_scale") is not None:
                with torch.no_grad():
                    for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                        parameter.grad.div_(said["grad_scale"])
            if bool(said.get("found_inf", False)):
                return None
            return super().step() if closure is None else super().step(closure)

    def _skips_by_itself(self) -> None:
        """A rank's schedule may fall behind those of others."""
        for fragment in self._fragments:
            fragment.outer.hvdplus.rates_may_differ = True

    def _complete(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._fragments[number].complete(lockstep.rate_of(self.param_groups))
            _average_state(self, self._fragments[number])


def _average_state(optimizer: LocalSteps, fragment: Fragment) -> None:
    if optimizer._averages_state:
        fragment.average_state(optimizer.state, f"{fragment.outer._exchange.prefix}.state")


def _check(optimizer: LocalSteps, ours: Mapping[str, Any]) -> None:
    """Raise ValueError if a state is damaged or of another model; nothing has changed then."""
    shapes = [[tuple(anchor.shape) for anchor in fragment.anchors] for fragment in optimizer._fragments]
    optimizer._rhythm.check(ours, shapes)
    copy.deepcopy(optimizer._rhythm).load(ours["local"])
    for number, (fragment, mine) in enumerate(zip(ours["fragments"] or (), optimizer._fragments, strict=False)):
        outer = fragment["outer"]
        require_fields(outer, ("state", "param_groups"), f"fragment {number}'s outer optimizer")
        if not lockstep.same_groups(mine.outer, outer):
            raise ValueError(f"The state is of another model: fragment {number} has other groups of parameters.")
        if STATE_KEY in outer:
            checkpoint.check(outer[STATE_KEY], mine.outer._exchange.shapes)
