"""``DistributedOptimizer``: the user's own optimizer, whose ``step`` first exchanges gradients."""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hvdplus.adapters.torch import amp
from hvdplus.adapters.torch.backend import loss_of, real_view, type_name
from hvdplus.adapters.torch.hooks import HookedExchange
from hvdplus.adapters.torch.ops import TorchOps
from hvdplus.adapters.torch.waiting import InputWatch
from hvdplus.agree import (
    FLOATS,
    TWICE,
    check_may_rejoin,
    check_passes,
    check_same_model,
    check_types,
    choose_ladder,
    join,
    next_instance,
)
from hvdplus.exchange import checkpoint
from hvdplus.settings import Settings
from hvdplus.transport import World

STATE_KEY = "hvdplus"
"""Key of ours in ``state_dict``."""
DEVICE_BUCKET_BYTES = 32 << 20
OTHER_GRADIENTS = (
    "Gradients are not those that optimizer.synchronize() has left, and no backward pass has brought them. Are they to "
    "be taken as they are? Then step in `with optimizer.skip_synchronize():`. Or was the step before skipped, and are "
    "these to be exchanged? Then call optimizer.zero_grad() where it is skipped."
)
TYPES = (*FLOATS, "complex64", "complex128")
"""Types of gradients that are exchanged here."""

_alive: weakref.WeakValueDictionary[int, Distributed] = weakref.WeakValueDictionary()
"""Number of an optimizer, which begins the names of its sums -> the optimizer."""


def wrap(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
    world: World,
    *,
    compression: Any,
    settings: Mapping[str, Any] | None,
    passes: int,
    average: bool,
    sparse_as_dense: bool,
    grad_scaler: torch.amp.GradScaler | None = None,
    rhythm: Mapping[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer as an instance of a subclass of its own class, sharing its groups, state and hooks.

    ``rhythm``: of local steps, see ``agreed_rhythm``.

    Raises:
        ValueError: wrapped twice, names missing or repeated, parameters that cannot be reduced, another model on
            another rank, an unknown compression, or a wrong setting.
    """
    if isinstance(optimizer, Distributed) or hasattr(optimizer, "_fragments"):  # of local steps
        raise ValueError(TWICE)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"DistributedOptimizer wraps a torch.optim.Optimizer. Received: {type(optimizer).__name__}")
    check_passes(passes)
    names = names_of(optimizer, named_parameters)

    def called(parameters: Sequence[torch.nn.Parameter]) -> list[str]:
        return [names.get(id(p), "a parameter added later") for p in parameters]

    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if twice := [names[i] for i, times in Counter(map(id, parameters)).items() if times > 1]:
        raise ValueError(f"An optimizer has every parameter once. Received twice: {', '.join(twice)}")
    check_types([names[id(p)] for p in parameters], list(map(type_name, parameters)), TYPES)
    world = fitting(parameters, world)
    resolved, number, kind_name = load_settings(settings, parameters), next_instance(), optimizer.__class__.__name__

    def join_ranks(
        world: World, parameters: list[torch.nn.Parameter], times: int, brought: checkpoint.Brought | None = None
    ) -> HookedExchange:
        agreed: dict[str, Any] = {"passes": passes, "average": average, "sparse_as_dense": sparse_as_dense}
        exchange: HookedExchange = join(
            functools.partial(
                HookedExchange,
                parameters,
                names=called(parameters),
                get_loss_scale=grad_scaler.get_scale if grad_scaler is not None else None,
                **agreed,
            ),
            world,
            resolved,
            *choose_ladder(compression, resolved, world, TorchOps()),
            framework="torch",
            instance=number,
            shapes=[tuple(p.shape) for p in parameters],
            dtypes=[type_name(p) for p in parameters],
            names=called(parameters),
            times=times,
            brought=brought,
            optimizer=kind_name,
            scales_losses=grad_scaler is not None,
            **{**agreed, **(rhythm or {})},
        )
        return exchange

    wrapped = subclassed(optimizer, Distributed)
    wrapped._join, wrapped._times_joined, wrapped._called = join_ranks, 0, called
    wrapped._exchange = join_ranks(world, parameters, 0)
    wrapped._known = frozenset(id(p) for p in parameters)
    wrapped._added = []
    wrapped._world, wrapped._input_watch = world, InputWatch()
    wrapped._synchronized = False
    wrapped._should_synchronize = True
    _alive[number] = wrapped
    return wrapped  # type: ignore[no-any-return]


def subclassed(optimizer: torch.optim.Optimizer, ours: type) -> Any:
    """``optimizer`` as an instance of a class that has ``ours`` before its own, sharing its groups, state and hooks."""
    kind = type(optimizer.__class__.__name__, (ours, optimizer.__class__), {"__module__": __name__})
    wrapped: Any = kind.__new__(kind)  # type: ignore[call-overload]
    wrapped.__dict__.update(optimizer.__dict__)
    # A learning-rate scheduler patches `step` on the instance, which would hide ours. It still sees our groups.
    wrapped.__dict__.pop("step", None)
    return wrapped


def load_own(optimizer: torch.optim.Optimizer, theirs: Any, state_dict: Mapping[str, Any]) -> None:
    """Load the user's optimizer's part of a state by the ``load_state_dict`` of ``theirs``, in place: a scheduler made
    before the wrapping holds the bare optimizer, which shares groups and state."""
    groups, state = optimizer.param_groups, optimizer.state
    theirs.load_state_dict({key: value for key, value in state_dict.items() if key != STATE_KEY})
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.clear()
        group.update(loaded)
    state.clear()
    state.update(optimizer.state)
    optimizer.param_groups, optimizer.state = groups, state


def same_groups(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> bool:
    """Whether a state has as many parameters in each group; else PyTorch refuses it."""
    groups = state_dict.get("param_groups")
    if not isinstance(groups, list | tuple) or not all(isinstance(group, Mapping) for group in groups):
        return False
    return [len(group.get("params", ())) for group in groups] == [len(g["params"]) for g in optimizer.param_groups]


def reduced(optimizer: torch.optim.Optimizer, ours: type, state: dict[str, Any]) -> tuple[Any, ...]:
    """What pickles an optimizer as one of the user's own class, which comes after ``ours``."""
    ancestors = type(optimizer).__mro__
    return _restored, (ancestors[ancestors.index(ours) + 1], state)


def rejoin(world: World) -> None:
    """Let all optimizers go on in ``world``, which has other ranks, in the order in which they were made.

    Every rank calls it, or makes the same optimizers anew.
    """
    for _, optimizer in sorted(_alive.items()):
        optimizer._rejoin(world)


def exchanges() -> list[HookedExchange]:
    """Of all optimizers that a script still has, in the order in which they were made."""
    gc.collect()
    return [optimizer._exchange for _, optimizer in sorted(_alive.items())]


def refuses_join() -> bool:
    """Whether an optimizer of this rank needs all ranks in every step; one that the script has dropped does not."""
    return any(not x.idle and x.ladder.names != ("none",) for x in exchanges())


class Distributed(torch.optim.Optimizer):
    """Base class that comes before the user's optimizer class."""

    _exchange: HookedExchange
    _join: Callable[..., HookedExchange]
    """Makes the exchange, for a world, parameters, how often it was made before, and what this rank brings along."""
    _times_joined: int
    _called: Callable[[Sequence[torch.nn.Parameter]], list[str]]
    """Gives the names of parameters."""
    _known: frozenset[int]
    _added: list[torch.nn.Parameter]
    """Parameters that were unfrozen or added since the last step."""
    _world: World
    _synchronized: bool
    _should_synchronize: bool
    _input_watch: InputWatch
    _rests: bool = False
    """Whether it takes no steps any more, and only joins where others do."""
    # Makes GradScaler leave gradients alone and set its findings as attributes (see scaler_says_skip): otherwise it
    # would unscale this rank's gradients in flight.
    _step_supports_amp_scaling = True

    def synchronize(self) -> None:
        """Exchange the gradients now, so that they can be clipped or inspected before ``step``.

        Raises:
            RuntimeError: a gradient was changed before its exchange or set by hand after it, or a parameter was
                unfrozen or added on some ranks only.
            ValueError: an added parameter cannot be reduced, or is another one on another rank.
        """
        if self._synchronized and self._exchange.holds_means:  # or means and residuals would be exchanged again
            warnings.warn("optimizer.synchronize() called twice. Nothing is exchanged a second time.", stacklevel=2)
            return
        if self._synchronized and not self._exchange.in_flight:
            raise RuntimeError(OTHER_GRADIENTS)
        self._finish()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step`` inside this context does not exchange again, after an explicit ``synchronize``."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange gradients, then let the optimizer take its step.

        A closure is evaluated by the optimizer itself; its gradients are exchanged every time.
        """
        if amp.scaler_says_skip(self, self._exchange, self._synchronized):
            self._synchronized = False
            self._exchange.forget_means()
            self._exchange.meter.end_step()
            self._input_watch.begin(self._exchange)
            return None
        if closure is not None:
            closure = self._exchanging(closure)
        elif self._should_synchronize:
            # Horovod would exchange the means once more, without effect.
            if self._synchronized and self._exchange.holds_means:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). The gradients are not exchanged a second time.",
                    stacklevel=2,
                )
            else:
                self.synchronize()
        # The scaler's findings have been used; the user's optimizer may not expect these attributes.
        said: dict[str, Any] = {
            name: self.__dict__.pop(name) for name in ("grad_scale", "found_inf") if name in self.__dict__
        }
        try:
            result = super().step(closure) if closure is not None else super().step()
        finally:
            self.__dict__.update(said)
        self._synchronized = False
        self._exchange.commit()
        self._add_parameters()
        self._input_watch.begin(self._exchange)
        return result

    # Keeps PyTorch from adding step hooks to this method: the user's class runs them, after the exchange.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, *arguments: Any, **keywords: Any) -> None:
        """As in PyTorch; an error between ``backward`` and ``step``, while gradients are in flight."""
        if self._exchange.in_flight:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        self._synchronized = False  # the script may have skipped a step
        self._exchange.forget_means()
        self._exchange.restart()  # or some of its backward passes
        super().zero_grad(*arguments, **keywords)

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes that accumulate locally before one exchange."""
        return self._exchange.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Exchange after ``passes`` backward passes from now on; call it between two steps."""
        check_passes(passes)
        self._exchange.passes = passes
        self._exchange.restart()

    def state_dict(self) -> dict[str, Any]:
        """As in PyTorch, with one key more: ``hvdplus`` holds contexts, the controller's state and this rank's
        residuals (see ``consolidate_state_dict``). Other optimizers ignore it."""
        state = super().state_dict()
        if not self._exchange.idle:
            state[STATE_KEY] = self._exchange.state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in PyTorch; the job goes on as if it had never stopped. Every rank has to load, or call
        ``hvd.broadcast_optimizer_state``.

        Raises:
            ValueError: the state is of another model.
            RuntimeError: gradients are in flight.
        """
        saved: Any = state_dict.get(STATE_KEY)
        of_local_steps = isinstance(saved, Mapping) and "local" in saved
        fits = same_groups(self, state_dict)
        if not fits:  # PyTorch's own error comes before anything has changed; a class of one's own may take it
            load_own(self, super(), state_dict)
        if STATE_KEY in state_dict and not of_local_steps:
            self._add_saved_parameters(saved.get("shapes") if isinstance(saved, Mapping) else None)
            self._exchange.load(saved)
        elif not self._exchange.idle and self._exchange.transport.rank == 0:
            has = "is of local steps" if of_local_steps else "has no state of hvdplus"
            note = f"the checkpoint {has}: compressors and controller keep theirs."
            print(f"hvdplus: {note}", file=sys.stderr, flush=True)
        self._exchange.restart()
        if fits:
            load_own(self, super(), state_dict)

    def _abandon(self) -> None:
        """Forget the step in flight, after a failure that ended the transport."""
        self._exchange.abandon()
        self._synchronized, self._added = False, []

    def _rejoin(self, world: World) -> None:
        """Go on in ``world``, which has other ranks, with this rank's residuals. See ``rejoin``."""
        check_may_rejoin(self._world)
        before = self._exchange
        before.close()
        before.coordinator.finish()
        self._times_joined += 1
        brought = checkpoint.brought(before)
        self._exchange, self._world = self._join(world, before.parameters, self._times_joined, brought), world
        self._exchange.passes = before.passes
        self._exchange.coordinator.succeed(before.coordinator)
        self._abandon()
        if not before.idle:
            self._exchange.load(checkpoint.to_stay(before.state()))
        if self._rests:
            self._exchange.close()

    def rest(self) -> None:
        """Take no steps any more; gradients are another's."""
        self._rests = True
        self._exchange.close()

    def wake(self) -> None:
        """Take steps again."""
        self._rests = False
        self._exchange.open()

    def consolidate_state_dict(self) -> None:
        """Make any one rank's ``state_dict`` valid for all ranks, until the next step; every rank has to call it.

        Residuals are each rank's own. This gives all ranks their mean, which leaves their sum as it is, so that one
        rank's checkpoint is complete, and can be loaded on any number of ranks. It takes a dense all-reduce.
        """
        self._exchange.consolidate()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are of the user's optimizer, to be wrapped anew: an exchange belongs to its job."""
        return reduced(self, Distributed, super().__getstate__())

    def record(self, loss: float | torch.Tensor) -> None:
        """Put this step's loss into the run log; call it before ``step``."""
        self._exchange.reporter.loss = loss_of(loss)

    @property
    def hvdplus(self) -> Any:
        """The coordinator: present plan, level names, measured times, run log."""
        return self._exchange.coordinator

    def _finish(self) -> None:
        if not self._exchange.idle:
            known, groups = self._known, self.param_groups
            self._added = [p for group in groups for p in group["params"] if p.requires_grad and id(p) not in known]
            if self._added:
                names = [f"added parameter {i}" for i in range(len(self._added))]
                check_types(names, list(map(type_name, self._added)), TYPES)
        self._exchange.finish(rate_of(self.param_groups), self._added)

    def _add_parameters(self) -> None:
        """Parameters that were unfrozen or added take part from the coming step on."""
        if self._added:
            members = self._known.union(map(id, self._added))
            parameters = [p for group in self.param_groups for p in group["params"] if id(p) in members]
            check_same_model([(tuple(p.shape), str(p.dtype)) for p in parameters], self._world)
            self._exchange.add_parameters(parameters, self._called(parameters))
            # Another parameter may get the id of one that is gone.
            self._known, self._added = frozenset(map(id, parameters)), []

    def _add_saved_parameters(self, shapes: Any) -> None:
        """Exchange parameters that were, or will be, unfrozen or added since the last step, if a saved state has them,
        whose parameters have these ``shapes``."""
        known, everything = self._known, [p for group in self.param_groups for p in group["params"]]
        for members in ([p for p in everything if p.requires_grad or id(p) in known], everything):
            if len(members) > len(self._known) and [list(real_view(p).shape) for p in members] == shapes:
                check_types([f"parameter {i}" for i in range(len(members))], list(map(type_name, members)), TYPES)
                self._exchange.add_parameters(members, self._called(members))
                self._known = frozenset(map(id, members))

    def _exchanging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def exchanged() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._finish()
            self._exchange.forget_means()  # the next evaluation is of other parameters
            # LBFGS decides by the loss how far it goes and when it stops: all ranks have to see the same loss.
            if isinstance(self, torch.optim.LBFGS) and not self._exchange.idle:
                return _mean_loss(loss, self._world)
            return loss

        return exchanged


def rate_of(groups: Sequence[Mapping[str, Any]]) -> float:
    """The first learning rate that is not 0, as frozen layers' is; schedulers change them together. 0: all are."""
    return next(filter(None, (float(group.get("lr", 0.0)) for group in groups)), 0.0)


def _mean_loss(loss: float | torch.Tensor, world: World) -> torch.Tensor:
    """Over the ranks; the same on each."""
    mine = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(loss, device="cpu")
    losses = world.transport.gather_objects(mine.item(), "LBFGS's loss")
    return torch.full_like(mine, sum(losses) / len(losses))


def check_groups(groups: Any) -> None:
    """Check ``groups`` by Horovod's rules; hvdplus does not use them.

    Raises:
        ValueError: with Horovod's words.
    """
    if groups is None:
        return
    if not (isinstance(groups, list) or groups > 0):
        raise ValueError(
            f"groups should be a non-negative integer or a list of list of torch.Tensor. Received: {groups}"
        )
    members = [member for group in groups for member in group] if isinstance(groups, list) else []
    odd = next((member for member in members if not isinstance(member, torch.Tensor)), None)
    if odd is not None:
        raise ValueError(f"groups must consist of torch.Tensor. Received: {type(odd).__name__}")
    if len({id(member) for member in members}) < len(members):
        raise ValueError("A parameter can only appear once in groups.")


def load_settings(settings: Mapping[str, Any] | None, parameters: Sequence[torch.nn.Parameter]) -> Settings:
    """See ``Settings.load``. On a device buckets are larger by default: each takes some hundred launches."""
    resolved = Settings.load(settings)
    if "bucket_bytes" in resolved.origins or not parameters or parameters[0].device.type == "cpu":
        return resolved
    return dataclasses.replace(resolved, bucket_bytes=DEVICE_BUCKET_BYTES)


def fitting(parameters: Sequence[torch.nn.Parameter], world: World) -> World:
    """The world as these parameters see it: on the CPU, it does not matter that ranks' devices differ.

    Raises:
        ValueError: their gradients cannot share a bucket, or cannot be sent.
    """
    if sharded := next(filter(None, map(_sharded_by, parameters)), ""):
        raise ValueError(
            "FSDP, tensor parallelism and their like shard parameters and exchange gradients themselves, in their own "
            "way. hvdplus exchanges gradients of whole parameters: with DistributedDataParallel, or without. Received: "
            f"{sharded}"
        )
    devices = sorted({str(p.device) for p in parameters})
    if len(devices) > 1:
        raise ValueError(f"One optimizer's parameters have to be on one device. Received: {', '.join(devices)}")
    if devices and devices != ["cpu"] and world.transport.name == "mpi4py" and world.transport.size > 1:
        raise ValueError(
            f"The mpi4py transport sums on the host, and parameters are on {devices[0]}. Use torch.distributed "
            "(torchrun, or HVDPLUS_TRANSPORT=torch), or Horovod (`hvdplus install-horovod`)."
        )
    if devices in ([], ["cpu"]):
        return world._replace(differences=tuple(each for each in world.differences if not each.startswith("device:")))
    return world


def _sharded_by(parameter: torch.nn.Parameter) -> str:
    """What holds only a part of this parameter on each rank; empty: nothing does."""
    if hasattr(parameter, "device_mesh"):  # FSDP2, tensor parallelism
        return "DTensor"
    return "FullyShardedDataParallel" if getattr(parameter, "_fsdp_flattened", False) else ""


def _restored(kind: type[torch.optim.Optimizer], state: dict[str, Any]) -> torch.optim.Optimizer:
    optimizer = kind.__new__(kind)
    optimizer.__setstate__(state)
    return optimizer


def names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[int, str]:
    """id of parameter -> name, with Horovod's own rules and messages."""
    if named_parameters is None:
        groups = enumerate(optimizer.param_groups)
        return {id(p): f"allreduce.noname.{i}.{j}" for i, group in groups for j, p in enumerate(group["params"])}
    named = list(named_parameters)
    if any(not isinstance(entry, tuple) for entry in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    repeated = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if repeated:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(repeated)}")
    names = {id(parameter): name for name, parameter in named}
    unnamed = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Their shapes: "
            f"{', '.join(str(tuple(p.shape)) for p in unnamed)}"
        )
    return names
