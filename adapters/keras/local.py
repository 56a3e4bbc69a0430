"""Local steps for Keras 3: ranks take several steps of their own, and then average what they have come to.

As in PyTorch (``adapters/torch/local.py``, which says what an anchor and a drift are): an outer optimizer, Keras' own
SGD, has the anchors for variables and is wrapped like any other, so that an exchange of drifts is one step of it. In a
compiled step every fragment's exchange is a condition, which all ranks decide alike, because they count the same steps.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvdplus.adapters.keras import optimizer as lockstep
from hvdplus.adapters.keras import private
from hvdplus.adapters.keras.optimizer import backend
from hvdplus.agree import agreed_rhythm, announce_local, settings_of_exchanges
from hvdplus.exchange import checkpoint
from hvdplus.exchange.form import require_fields
from hvdplus.exchange.rhythm import NESTEROV, Rhythm, split
from hvdplus.settings import Settings
from hvdplus.transport import World

OUTER: Mapping[str, Mapping[str, Any]] = {
    "average": {"learning_rate": 1.0},
    "nesterov": {"learning_rate": NESTEROV[0], "momentum": NESTEROV[1], "nesterov": True},
}
"""Setting ``outer`` -> arguments of ``keras.optimizers.SGD`` over the anchors."""


def wrap(
    optimizer: keras.optimizers.Optimizer,
    world: World,
    *,
    every: int,
    compression: Any,
    settings: Mapping[str, Any] | None,
    average: bool,
    passes: int,
    state: Mapping[str, Any] | None = None,
) -> keras.optimizers.Optimizer:
    """The optimizer as an instance of a subclass of its own class, sharing its variables.

    ``every``: local steps between two exchanges; 0: from measurements. Others, and errors, as of
    ``optimizer.wrap``.
    """
    scaler = optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else None
    optimizer = scaler.inner_optimizer if scaler else optimizer
    lockstep.check(optimizer, passes)
    own = Settings.load(settings)
    if own.overlap_steps:
        raise ValueError(
            f"overlap_steps works in PyTorch only, so far. Received: overlap_steps={own.overlap_steps}; leave it at 0."
        )
    if own.staleness:
        raise ValueError(
            f"staleness works in PyTorch only, so far. Received: staleness={own.staleness}; leave it at 0."
        )
    if scaler:
        check_scaled(optimizer, own)
    if optimizer.use_ema and world.transport.size > 1:
        raise ValueError(
            "use_ema=True makes the means of a rank's own weights the weights in the end, and ranks would end apart. "
            "Leave it out with local steps."
        )
    announce_local(every, average, world)
    setup = _Local(world, own, dict(settings or {}), every, compression, state)
    wrapped = lockstep.subclassed(optimizer, LocalSteps, setup)
    if optimizer.built:
        wrapped._hvdplus.connect(wrapped)
    if scaler:
        scaler.inner_optimizer = wrapped
        return scaler
    return wrapped


def check_scaled(optimizer: Any, settings: Settings) -> None:
    """Raise ValueError unless it can take local steps in a ``LossScaleOptimizer``."""
    if settings.dense_steps or optimizer.gradient_accumulation_steps:
        what = f"dense_steps={settings.dense_steps}" if settings.dense_steps else "accumulated gradients"
        raise ValueError(
            "Local steps with loss scaling (LossScaleOptimizer, which Keras adds under mixed_float16) do not work with "
            f"{what}. Leave one of the two out."
        )


class Fragment:
    """Variables that are exchanged together."""

    def __init__(self, variables: Sequence[Any], anchors: Sequence[Any], outer: Any) -> None:
        """``outer``: a ``DistributedOptimizer`` of the ``anchors``."""
        self.variables, self.anchors, self.outer = list(variables), list(anchors), outer

    def anchor(self) -> None:
        """Drifts count from the present variables on."""
        for anchor, variable in zip(self.anchors, self.variables, strict=True):
            anchor.assign(variable)

    def exchange(self) -> None:
        """Exchange drifts, take the outer step, and let the variables follow it."""
        pairs = list(zip(self.anchors, self.variables, strict=True))
        with backend.without_gradients():
            self.outer.apply([keras.ops.subtract(anchor, variable) for anchor, variable in pairs], self.anchors)
            # Alone, bit for bit what the user's own optimizer makes of the variables.
            alone = self.outer._hvdplus.exchange.idle and not self.outer.momentum
            for anchor, variable in pairs:
                if alone:
                    anchor.assign(variable)
                else:
                    variable.assign(anchor)


class _Local:
    """Attributes of a wrapped optimizer."""

    def __init__(
        self,
        world: World,
        settings: Settings,
        given: dict[str, Any],
        every: int,
        compression: Any,
        state: Mapping[str, Any] | None,
    ) -> None:
        self._world, self.settings, self.compression = world, settings, compression
        self.own = settings_of_exchanges(given, settings)
        """Settings of the outer optimizers."""
        self._agreed = agreed_rhythm(every, settings)
        self.rhythm = Rhythm(
            every,
            fragments=settings.fragments,
            lock_steps=settings.dense_steps,
        )
        self.fragments: list[Fragment] = []
        self.state = state if state and "local" in state else None
        if state and not self.state and state.get("residuals") and not world.transport.rank:
            checkpoint.say(checkpoint.OF_LOCK_STEP)
        self.begun = bool((self.state or {}).get("fragments"))
        """Whether anchors are the variables of the last exchange, or of the beginning."""
        self.locked: Any = None
        """The same optimizer in lock-step, for the first steps."""
        self.holds = False
        """Whether ``LossScaleOptimizer`` counts steps itself, those that it skips too."""

    @property
    def world(self) -> World:
        """The job, as it is now."""
        return self.fragments[0].outer._hvdplus.world if self.fragments else self._world

    def connect(self, optimizer: Any) -> None:
        """Make fragments for the variables of an optimizer that is built."""
        variables = private.trainable_variables(optimizer)
        places = split([int(np.prod(v.shape)) for v in variables], self.rhythm.fragments)
        if self.state:
            self.rhythm.check(self.state, [[tuple(variables[i].shape) for i in part] for part in places])
            for number, fragment in enumerate(self.state["fragments"] or ()):
                require_fields(fragment, ("variables",), f"fragment {number}")
            self.rhythm.load(self.state["local"])
        saved = (self.state or {}).get("fragments") or [None] * self.rhythm.fragments
        with backend.outside_of_traces():
            for part, of_state in zip(places, saved, strict=True):
                mine = [variables[i] for i in part]
                values = of_state["anchors"] if of_state else [np.array(v) for v in mine]
                anchors = [
                    keras.Variable(value, dtype=v.dtype, name="anchor_of_" + v.path.replace("/", "_"))
                    for v, value in zip(mine, values, strict=True)
                ]
                outer: Any = lockstep.wrap(
                    keras.optimizers.SGD(**OUTER[self.settings.outer]),
                    self._world,
                    compression=self.compression,
                    settings=self.own,
                    passes=1,
                    average=True,
                    in_condition=True,
                    state=of_state["outer"] if of_state else None,
                    rhythm=self._agreed,
                )
                outer._hvdplus.rate = lambda: optimizer.learning_rate
                outer.build(anchors)
                if of_state:
                    for variable, value in zip(outer.variables, of_state["variables"], strict=True):
                        variable.assign(value)
                self.fragments.append(Fragment(mine, anchors, outer))
            self.rhythm.follow([fragment.outer.hvdplus for fragment in self.fragments])
            if self.rhythm.lock_steps:  # whatever step it is, as other ranks may be at their first one
                self._lock(optimizer)

    def _lock(self, optimizer: Any) -> None:
        """Begin in lock-step, with an optimizer that shares all variables."""
        ancestors = type(optimizer).__mro__
        base: Any = ancestors[ancestors.index(LocalSteps) + 1]
        bare = base.__new__(base)
        bare.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "_hvdplus"})
        quiet = {**self.own, "run_log": ""}
        self.locked = lockstep.wrap(
            bare, self.world, compression="none", settings=quiet, passes=1, average=True, in_condition=True
        )
        # Not before: accumulated gradients take several calls to a step.
        self.locked._hvdplus.after_update = lambda: backend.ask(self.count_locked, 1)
        self.follow_rhythm()

    def follow_rhythm(self) -> None:
        """Let the optimizer in lock-step rest, once its steps are over."""
        if self.locked is not None:
            self.locked._hvdplus.rest(not self.rhythm.locked)

    def count_locked(self) -> list[bool]:
        """On the host, once a step in lock-step."""
        self.rhythm.step()
        if not self.rhythm.locked:
            self.follow_rhythm()
        return [True]

    def before_step(self) -> Sequence[Any]:
        """Drifts count from what the first step finds; returns for every fragment whether it is due after the step."""
        # Variables may have been broadcast or loaded since the optimizer was made.
        first, *due = backend.ask(self._count, 1 + len(self.fragments))
        backend.when(first, self.anchor)
        return due

    def anchor(self) -> None:
        """Drifts count from the present variables on."""
        for fragment in self.fragments:
            fragment.anchor()

    def after_step(self, optimizer: Any, due: Sequence[Any]) -> None:
        """The step is taken: exchange what is ``due``."""
        for number in range(len(self.fragments)):
            backend.when(due[number], functools.partial(self.exchange, optimizer, number))

    def exchange(self, optimizer: Any, number: int) -> None:
        """Exchange one fragment, and with the first one what the optimizer remembers, if the settings say so."""
        fragment = self.fragments[number]
        fragment.exchange()
        if self.settings.average_state and not number:
            backend.average(fragment.outer._hvdplus.exchange, remembered(optimizer))

    def _count(self) -> list[bool]:
        """On the host, once a step: whether it is the first, and which fragments are due."""
        first, self.begun = not self.begun, True
        self.rhythm.step()
        due = self.rhythm.begin()
        self.rhythm.complete()
        return [first, *(number in due for number in range(len(self.fragments)))]

    def saved(self) -> dict[str, Any]:
        """For a checkpoint, of plain values and NumPy arrays."""
        return {
            "local": self.rhythm.state(),
            "fragments": [
                {
                    "anchors": [np.array(anchor) for anchor in fragment.anchors],
                    "outer": fragment.outer._hvdplus.exchange.state(),
                    "variables": [np.array(variable) for variable in fragment.outer.variables],
                }
                for fragment in self.fragments
            ]
            if self.begun
            else None,
        }


class LocalSteps:
    """Base class that comes before the user's optimizer class."""

    _hvdplus: _Local
    # Keras' own.
    name: str
    built: bool

    def build(self, variables: Sequence[Any]) -> None:
        """As in Keras; anchors and their exchanges are made here too, once."""
        super().build(variables)  # type: ignore[misc]
        if not self._hvdplus.fragments:
            self._hvdplus.connect(self)

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """A step of this rank's own, and the exchange, if one is due. Every rank calls it in every step."""
        local = self._hvdplus
        if not local.holds:
            backend.check(local.world.transport)
        variables = list(private.trainable_variables(self) if trainable_variables is None else trainable_variables)
        if local.rhythm.lock_steps and not self.built and variables:
            with keras.name_scope(self.name, caller=self):
                self.build(variables)
        own = super().apply  # type: ignore[misc]
        if local.locked is None:
            own(grads, trainable_variables)
            return
        locked = backend.ask(lambda: [local.rhythm.locked], 1)[0]
        backend.either(locked, lambda: local.locked.apply(grads, variables), lambda: own(grads, variables))

    def apply_scaled(self, scaler: Any, apply: Callable[..., None], grads: Sequence[Any], variables: Any) -> None:
        """``LossScaleOptimizer.apply`` around this one: ranks skip steps by themselves, and count those, too."""
        local, variables = self._hvdplus, list(private.trainable_variables(self) if variables is None else variables)
        check_scaled(self, local.settings)
        backend.check(local.world.transport)
        if not scaler.built:
            with keras.name_scope(scaler.name, caller=scaler):
                scaler.build(variables)
            scaler.built = True
        for fragment in local.fragments:  # a rank's schedule may fall behind those of others
            fragment.outer.hvdplus.rates_may_differ = True
        due = local.before_step()
        local.holds = True
        try:
            apply(scaler, grads, variables)
        finally:
            local.holds = False
        local.after_step(self, due)

    def average_now(self) -> None:
        """Exchange at once, whatever step it is, so that all ranks have the same variables: before an evaluation, or at
        the end. Every rank calls it, outside of a compiled step."""
        local = self._hvdplus
        if local.begun and not local.rhythm.locked:
            transport = local.world.transport
            due = local.rhythm.begin_all(lambda mine: transport.gather_objects(mine, "fragments to average"))
            local.rhythm.complete(all_of_them=True)
            for number in due:
                local.exchange(self, number)

    def consolidate_state_dict(self) -> None:
        """Make what any one rank saves valid for all ranks, until the next step: they exchange at once, and residuals
        become their mean. Every rank has to call it."""
        self.average_now()
        for fragment in self._hvdplus.fragments:
            fragment.outer.consolidate_state_dict()

    @property
    def outer_variables(self) -> list[Any]:
        """What outer optimizers remember; equal on all ranks."""
        return [variable for fragment in self._hvdplus.fragments for variable in fragment.outer.variables]

    def follow_variables(self, shared: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Variables were overwritten, on all ranks alike: drifts count from what the next step finds.

        ``shared``: gives every rank one rank's rhythm.
        """
        local = self._hvdplus
        local.begun = False
        local.rhythm.restart()
        local.rhythm.load(shared(local.rhythm.state()))
        local.rhythm.forget()
        local.follow_rhythm()

    def save_assets(self, folder: str | os.PathLike[str]) -> None:
        """Write anchors and what their exchange needs; Keras calls it when it saves a ``.keras`` model."""
        if self._hvdplus.fragments:
            checkpoint.write(self._hvdplus.saved(), folder)

    @property
    def hvdplus(self) -> Any:
        """The coordinator of the (first fragment's) exchange: plan, level names, measured times, run log."""
        if not self._hvdplus.fragments:
            raise RuntimeError("The optimizer has not been built yet: train first, or call optimizer.build(variables).")
        return self._hvdplus.fragments[0].outer.hvdplus

    def _backend_update_step(self, grads: list[Any], trainable_variables: list[Any], learning_rate: Any) -> None:
        local = self._hvdplus
        due = () if local.holds else local.before_step()
        super()._backend_update_step(grads, trainable_variables, learning_rate)  # type: ignore[misc]
        if not local.holds:
            local.after_step(self, due)


def remembered(optimizer: Any) -> list[Any]:
    """The variables in which an optimizer remembers something of every weight: momentum, second moments."""
    known = {id(optimizer.iterations), id(getattr(optimizer, "_learning_rate", None))}
    return [v for v in optimizer.variables if id(v) not in known and "float" in str(v.dtype) and len(v.shape)]
