"""``DistributedOptimizer`` for Keras 3: the user's own optimizer, exchanging before it updates.

Keras 3 never calls the methods that stock Horovod overrides, so its ranks train apart without an error (horovod#4290
reports a symptom). Every update of every Keras 3 optimizer passes through ``apply``, where gradients are exchanged. If
Keras accumulates gradients, they are exchanged later, in ``_backend_update_step``, which Keras keeps for backends to
override. Clipping comes after the exchange.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from hvdplus.adapters.keras import private
from hvdplus.agree import TWICE, check_may_rejoin, check_passes, check_types, choose_ladder, join, next_instance
from hvdplus.exchange import checkpoint
from hvdplus.settings import Settings
from hvdplus.transport import World

private.check()
backend: Any = importlib.import_module(f"hvdplus.adapters.keras.on_{keras.backend.backend()}")
"""The module with all that differs between Keras' backends."""
_alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Number of an optimizer, which begins the names of its sums -> the optimizer."""


def wrap(
    optimizer: keras.optimizers.Optimizer,
    world: World,
    *,
    compression: Any,
    settings: Mapping[str, Any] | None,
    passes: int,
    average: bool,
    local_layers: Sequence[keras.layers.Layer] = (),
    scale_local_gradients: bool = True,
    state: Mapping[str, Any] | None = None,
    in_condition: bool = False,
    rhythm: Mapping[str, Any] | None = None,
) -> keras.optimizers.Optimizer:
    """The optimizer as an instance of a subclass of its own class, sharing its variables.

    In a ``LossScaleOptimizer`` the inner optimizer is wrapped.

    Args:
        state: a checkpoint's, to resume from.
        in_condition: it is applied inside a condition that all ranks decide alike.
        rhythm: of local steps, see ``agreed_rhythm``.

    Raises:
        ValueError: wrapped twice, not a Keras 3 optimizer, an unknown compression, or a wrong setting.
    """
    scaler = optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else None
    optimizer = scaler.inner_optimizer if scaler else optimizer
    check(optimizer, passes)
    setup = _Setup(world, Settings.load(settings), compression, average, scale_local_gradients, state)
    setup.local_layers += local_layers
    setup.in_condition, setup.rhythm = in_condition, rhythm or {}
    wrapped = subclassed(optimizer, Distributed, setup)
    _alive[setup.instance] = wrapped
    if optimizer.built:
        setup.connect(wrapped)
    if scaler:
        scaler.inner_optimizer = wrapped
        return scaler
    return wrapped


def subclassed(optimizer: keras.optimizers.Optimizer, ours: type, setup: Any) -> Any:
    """``optimizer`` as an instance of a class that has ``ours`` before its own, sharing its variables. ``setup``: its
    attributes of ours."""
    # The class keeps name and module of the user's, so that a saved model loads without hvdplus.
    base = optimizer.__class__
    kind = type(base.__name__, (ours, base), {"__module__": base.__module__})
    wrapped: Any = kind.__new__(kind)  # type: ignore[call-overload]
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped.__dict__["_hvdplus"] = setup
    return wrapped


def check(optimizer: Any, passes: int) -> None:
    """Raise ValueError unless it can be wrapped; let it accumulate ``passes`` gradients."""
    if hasattr(optimizer, "_hvdplus"):
        raise ValueError(TWICE)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"DistributedOptimizer wraps a keras.optimizers.Optimizer. Received: {type(optimizer)}")
    check_passes(passes)
    if passes > 1:
        if optimizer.built:
            raise ValueError(
                "Keras' optimizers begin to accumulate gradients only where they are built. Received: "
                f"backward_passes_per_step={passes} for one that is built already; wrap it before it trains or loads."
            )
        if optimizer.gradient_accumulation_steps:
            raise ValueError(
                "Accumulate once: either backward_passes_per_step or the optimizer's gradient_accumulation_steps. "
                f"Received: {passes} and {optimizer.gradient_accumulation_steps}"
            )
        optimizer.gradient_accumulation_steps = passes


def rejoin(world: World) -> None:
    """Let all optimizers go on in ``world``, which has other ranks, in the order in which they were made.

    Every rank calls it, or makes the same optimizers anew.
    """
    for _, optimizer in sorted(_alive.items()):
        optimizer._hvdplus.rejoin(optimizer, world)


def exchanges() -> list[Any]:
    """Of all optimizers that a script still has, in the order in which they were made."""
    gc.collect()
    found = (optimizer._hvdplus.exchange for _, optimizer in sorted(_alive.items()))
    return [exchange for exchange in found if exchange is not None]


class _Setup:
    """Attributes of a wrapped optimizer: the job, the ladder and, once variables are known, the exchange."""

    def __init__(
        self,
        world: World,
        settings: Settings,
        compression: Any,
        average: bool,
        scale_local_gradients: bool,
        state: Mapping[str, Any] | None,
    ) -> None:
        self.settings = settings
        self.compression = compression
        self.average = average
        self.scale_local_gradients = scale_local_gradients
        self.state = state
        self.local_layers: list[keras.layers.Layer] = []
        self.local_variables: list[Any] = []
        self.instance = next_instance()
        self.times_joined = 0
        self._brought: checkpoint.Brought | None = None
        self.in_condition = False
        """Whether the optimizer is applied inside a condition that all ranks decide alike."""
        self.rhythm: Mapping[str, Any] = {}
        """Of local steps: what ranks have to have in common."""
        self.exchange: Any = None
        self.rate: Callable[[], Any] | None = None
        """Returns the learning rate that ranks tell each other; None: the optimizer's own."""
        self.after_update: Callable[[], Any] = lambda: None
        """Called whenever variables were updated."""
        self.rests = False
        """Whether it takes no steps any more, and only joins where others do."""
        self.updated = False
        """Whether Keras has called ``_backend_update_step`` in the current step."""
        self.places: dict[int, int] = {}
        """Position of a variable in the optimizer -> in the exchange; without local variables."""
        self._enter(world)

    def _enter(self, world: World) -> None:
        self.world = world
        self.ladder, self.auto = choose_ladder(self.compression, self.settings, world, backend.make_ops())
        self.local_divisor = float(world.transport.size) if self.scale_local_gradients else 1.0

    def rejoin(self, optimizer: Any, world: World) -> None:
        """Go on in ``world``, which has other ranks, with this rank's residuals."""
        check_may_rejoin(self.world)
        before = self.exchange
        self._brought = None if before is None else checkpoint.brought(before)
        self._enter(world)
        if before is not None:
            before.abandon()
            before.coordinator.finish()
            self.state = None if before.idle else checkpoint.to_stay(before.state())
            before.close()
            self.times_joined += 1
            self.connect(optimizer)
            self.exchange.coordinator.succeed(before.coordinator)

    def rest(self, rests: bool) -> None:
        """Take no steps any more, as gradients are another's, or take them again. Compiled steps choose themselves."""
        self.rests = rests
        if self.exchange is not None and not backend.TRACES:
            self.exchange.close()
            if not rests:
                self.exchange.open()

    def connect(self, optimizer: Any) -> None:
        """Make the exchange for the variables of an optimizer that is built.

        Raises:
            ValueError: a dtype that cannot be reduced, or another model on another rank.
            RuntimeError: ranks would go on from different checkpoints.
        """
        local = {id(v) for layer in self.local_layers for v in layer.trainable_variables}
        local |= {id(v) for v in self.local_variables}
        everything = private.trainable_variables(optimizer)
        chosen = [i for i, v in enumerate(everything) if id(v) not in local]
        variables = [everything[i] for i in chosen]
        self.places = {i: place for place, i in enumerate(chosen)}
        # Scales of float8 are no gradients, whatever their type.
        types = ["scale of float8" if getattr(v, "overwrite_with_gradient", False) else str(v.dtype) for v in variables]
        check_types([v.path for v in variables], types)
        with backend.outside_of_traces():
            self.exchange = join(
                functools.partial(
                    backend.Exchange,
                    variables,
                    average=self.average,
                    accumulates=bool(optimizer.gradient_accumulation_steps),
                ),
                self.world,
                self.settings,
                self.ladder,
                self.auto,
                framework="keras",
                instance=self.instance,
                shapes=[tuple(v.shape) for v in variables],
                dtypes=types,  # no names: `dense_7` depends on what was made before
                times=self.times_joined,
                brought=self._brought,
                optimizer=optimizer.__class__.__name__,
                average=self.average,
                accumulates=optimizer.gradient_accumulation_steps or 1,
                **self.rhythm,
            )
            self._resume()
            if self.rests:
                self.rest(True)

    def _resume(self) -> None:
        """Resume from each rank's checkpoint; a rank that has loaded none takes that of the first rank that has one."""
        gather = functools.partial(self.world.transport.gather_objects, what="an optimizer's checkpoint")
        loaded = [rank for rank, has in enumerate(gather(self.state is not None)) if has]
        if not loaded:
            return
        if len(loaded) < self.world.transport.size:
            mine = self.world.transport.rank == loaded[0]
            given = self.state if mine else None
            if given and self.exchange.settings.secure_aggregation:
                given = checkpoint.for_other_ranks(given)
            theirs = gather(given)[loaded[0]]
            if self.state is None:
                own = theirs["rank"] == checkpoint.KEEP_LOCAL
                self.state = {**theirs, "rank": checkpoint.FROM_OTHER} if own else theirs
        try:
            same, wrong = self.exchange.load(self.state), ""
        except ValueError as error:
            same, wrong = "", str(error)
        told = gather((same, wrong))
        for rank, (_, theirs) in enumerate(told):
            if theirs:
                raise ValueError(f"Rank {rank} cannot load its checkpoint: {theirs}")
        checkpoint.check_same([theirs for theirs, _ in told])
        self.state = None


class Distributed:
    """Base class that comes before the user's optimizer class."""

    _hvdplus: _Setup
    # Keras' own.
    name: str
    built: bool
    learning_rate: Any
    gradient_accumulation_steps: int | None
    _trainable_variables: list[Any]
    _get_variable_index: Callable[[Any], int]
    _check_variables_are_known: Callable[[Sequence[Any]], None]

    def build(self, variables: Sequence[Any]) -> None:
        """As in Keras; buckets, residuals and contexts are made here too, once."""
        super().build(variables)  # type: ignore[misc]
        if self._hvdplus.exchange is None:
            self._hvdplus.connect(self)

    def register_local_var(self, variable: Any) -> None:
        """Leave this variable's gradient out of the exchange; before the optimizer is built."""
        if self._hvdplus.exchange is not None:
            raise ValueError("register_local_var() has to be called before the optimizer is built; it is built.")
        self._hvdplus.local_variables.append(variable)

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """As in Keras, with the means of all ranks' gradients. Every rank calls it in every step."""
        grads = list(grads)
        variables = self._variables_of(grads, trainable_variables)
        if variables is None:
            self._take_step(grads, trainable_variables)  # Keras raises its own error
            return
        if not self._hvdplus.in_condition:
            backend.check(self._hvdplus.world.transport)
        accumulates = self.gradient_accumulation_steps
        self._take_step(_complete(grads, variables) if accumulates else self._reduced(grads, variables), variables)

    def scale_loss(self, loss: Any) -> Any:
        """As in Keras; every train step passes its loss through here, so the run log learns it."""
        self._hear(loss)
        return super().scale_loss(loss)  # type: ignore[misc]

    def consolidate_state_dict(self) -> None:
        """Make what any one rank saves valid for all ranks, until the next step; every rank has to call it.

        Residuals are each rank's own. This gives all ranks their mean, which leaves their sum as it is, so that a model
        saved by one rank is complete, and can be loaded on any number of ranks. It takes a dense all-reduce.
        """
        if self._hvdplus.exchange is not None:
            self._hvdplus.exchange.consolidate()

    def save_assets(self, folder: str | os.PathLike[str]) -> None:
        """Write contexts, the controller's state and this rank's residuals; Keras calls it when it saves a ``.keras``
        model. Keras alone ignores them, ``hvd.load_model`` reads them."""
        if self._hvdplus.exchange is not None:
            checkpoint.write(self._hvdplus.exchange.state(), folder)

    @property
    def hvdplus(self) -> Any:
        """The coordinator: present plan, level names, measured times, run log."""
        if self._hvdplus.exchange is None:
            raise RuntimeError("The optimizer has not been built yet: train first, or call optimizer.build(variables).")
        return self._hvdplus.exchange.coordinator

    def _variables_of(self, grads: Sequence[Any], variables: Any) -> list[Any] | None:
        """The variables of these gradients, after the optimizer was built for them; None: Keras will refuse them."""
        if variables is None:
            variables = private.trainable_variables(self) if self.built else []
        variables = list(variables)
        if grads and variables and len(grads) != len(variables):
            raise ValueError(
                f"apply() wants a gradient for every variable. Received: {len(grads)} for {len(variables)} variables"
            )
        if not grads or not variables:
            return None
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(variables)
            self.built = True
        if self._hvdplus.exchange is None:  # a build before this one has failed
            self._hvdplus.connect(self)
        self._check_variables_are_known(variables)
        return variables

    def _hear(self, loss: Any) -> None:
        if self._hvdplus.exchange is not None:
            self._hvdplus.exchange.hear(loss)

    def _reduced(self, grads: Sequence[Any], variables: Sequence[Any], loss_scale: Any = None) -> list[Any]:
        """Mean gradients over all ranks; those of local variables are this rank's."""
        setup = self._hvdplus
        indices = [self._get_variable_index(variable) for variable in variables]
        mine: list[Any] = [None] * len(setup.places)
        for i, grad in zip(indices, grads, strict=True):
            if i in setup.places:
                mine[setup.places[i]] = grad
        updated = set(indices)
        applied = [i in updated for i in setup.places]
        rate = self.learning_rate if setup.rate is None else setup.rate()
        means = setup.exchange.reduce(mine, rate, loss_scale, applied)
        divisor = setup.local_divisor if loss_scale is None else setup.local_divisor * loss_scale
        return [
            means[setup.places[i]] if i in setup.places else (None if grad is None else keras.ops.divide(grad, divisor))
            for i, grad in zip(indices, grads, strict=True)
        ]

    def _take_step(self, grads: Sequence[Any], variables: Any) -> None:
        setup = self._hvdplus
        setup.updated = bool(self.gradient_accumulation_steps)  # Keras then does not update in every step
        super().apply(grads, variables)  # type: ignore[misc]
        private.check_updated(setup.updated or setup.exchange is None)

    def _clip_gradients(self, grads: list[Any]) -> list[Any]:
        """As in Keras; accumulated gradients are clipped later, once, after their exchange."""
        return grads if self.gradient_accumulation_steps else super()._clip_gradients(grads)  # type: ignore

    def _backend_update_step(self, grads: list[Any], trainable_variables: list[Any], learning_rate: Any) -> None:
        if self.gradient_accumulation_steps:
            grads = super()._clip_gradients(self._reduced(grads, trainable_variables))  # type: ignore[misc]
        super()._backend_update_step(grads, trainable_variables, learning_rate)  # type: ignore[misc]
        self._hvdplus.updated = True
        self._hvdplus.exchange.end_step(trainable_variables)
        self._hvdplus.after_update()


def _complete(grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Zeros for None, which Keras drops while it accumulates: this rank would then miss the other ranks' mean."""
    pairs = zip(grads, variables, strict=True)
    return [keras.ops.zeros(v.shape, v.dtype) if grad is None else grad for grad, v in pairs]


# Keras wraps optimizers in a LossScaleOptimizer by itself, in compile() under mixed_float16, and takes no other class.
# It looks for infinities in this rank's gradients and then skips `apply`: one rank would send nothing while the others
# wait. So if the inner optimizer is ours, gradients are exchanged first, and all ranks look at the same means.

_LossScaleOptimizer = keras.optimizers.LossScaleOptimizer
_keras_apply, _keras_scale_loss = _LossScaleOptimizer.apply, _LossScaleOptimizer.scale_loss


def _apply(scaler: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
    """``LossScaleOptimizer.apply``, with ranks that skip together."""
    inner, ops = scaler.inner_optimizer, keras.ops
    if hasattr(inner, "apply_scaled"):  # local steps
        inner.apply_scaled(scaler, _keras_apply, grads, trainable_variables)
        return
    if not isinstance(inner, Distributed):
        _keras_apply(scaler, grads, trainable_variables)
        return
    if not scaler.built:
        with keras.name_scope(scaler.name, caller=scaler):
            scaler.build(trainable_variables)
        scaler.built = True
    grads = list(grads)
    variables = inner._variables_of(grads, trainable_variables)
    if variables is None:
        inner._take_step(grads, trainable_variables)
        return
    exchange, scale = inner._hvdplus.exchange, ops.convert_to_tensor(scaler.dynamic_scale)
    backend.check(inner._hvdplus.world.transport)
    if inner.gradient_accumulation_steps:
        grads = [keras.ops.divide(grad, scale) for grad in _complete(grads, variables)]
        finite = exchange.agree(scaler.check_finite(grads))
    else:
        grads = inner._reduced(grads, variables, scale)
        finite = scaler.check_finite(grads)
        if inner._hvdplus.local_layers or inner._hvdplus.local_variables:  # whose gradients are this rank's own
            finite = exchange.agree(finite)

    def taken() -> None:
        inner._take_step(grads, variables)
        grows = ops.equal(scaler.step_counter, scaler.dynamic_growth_steps - 1)
        scaler.dynamic_scale.assign(ops.where(grows, scale * 2.0, scale))
        scaler.step_counter.assign(ops.where(grows, 0, scaler.step_counter + 1))

    def skipped() -> None:
        private.handle_non_finite(scaler)
        exchange.skip_step()

    ops.cond(finite, taken, skipped)


def _scale_loss(scaler: Any, loss: Any) -> Any:
    inner = scaler.inner_optimizer
    if isinstance(inner, Distributed):
        inner._hear(loss)
        exchange = inner._hvdplus.exchange
        if exchange is not None and not inner.gradient_accumulation_steps:
            exchange.scales_losses(lambda: scaler.dynamic_scale if scaler.built else scaler.initial_scale)
    return _keras_scale_loss(scaler, loss)


_LossScaleOptimizer.apply, _LossScaleOptimizer.scale_loss = _apply, _scale_loss
