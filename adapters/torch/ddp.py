"""The exchange inside PyTorch's ``DistributedDataParallel``, as its communication hook.

PyTorch's reducer waits for gradients and copies them into its buckets, in an order that all ranks share. Its hook hands
them to the engine as they come, and the engine's own buckets leave as soon as they are full; plain dense steps sum the
reducer's buckets where they are. With the last of those the backward pass is over: then the hook waits for all sums,
and writes the means into the reducer's buckets, from where PyTorch brings them to ``.grad``. So means are there when
``backward()`` returns, as always.

Residuals and contexts belong to parameters and the engine's buckets: it does not matter to them that the reducer makes
new buckets after the first step.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdplus.adapters.torch.backend import TorchBackend, loss_of, real_view, type_name
from hvdplus.adapters.torch.ops import TorchOps
from hvdplus.adapters.torch.optimizer import TYPES, fitting, load_settings, rate_of
from hvdplus.agree import check_types, choose_ladder, join, next_instance, refuse_local_steps
from hvdplus.exchange import step
from hvdplus.exchange.bucket import BucketSet
from hvdplus.exchange.eager import EagerExchange
from hvdplus.settings import Settings
from hvdplus.transport import World

UNKNOWN_SCALE = (
    "a GradScaler scales losses, and attach() was not given it (grad_scaler=): levels that keep a residual are left out"
)


class BucketBackend(TorchBackend):
    """Gradients are where the reducer keeps them: in its buckets."""

    may_adopt = False

    def __init__(self, parameters: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        super().__init__(parameters, names)
        self.views: dict[int, torch.Tensor] = {}
        """Parameter -> its gradient in a bucket of this step, afterwards its mean."""

    def gradient(self, i: int) -> torch.Tensor | None:
        return self.views.get(i)

    def present(self) -> list[bool]:
        return [i in self.views for i in range(len(self.parameters))]

    def sparse(self) -> list[int]:
        return [i for i, view in self.views.items() if view.is_sparse]

    def put(self, i: int, grad: torch.Tensor) -> None:
        self.views[i] = grad

    def _place(self, i: int) -> torch.Tensor | None:
        view = self.views[i]
        return None if view.is_sparse else real_view(view)


class HookExchange(EagerExchange[torch.Tensor]):
    """Exchanges the gradients that a reducer's hook is called with."""

    backend: BucketBackend

    def __init__(self, parameters: Sequence[nn.Parameter], *arguments: Any, names: Sequence[str], **keywords: Any):
        """See ``EagerExchange``."""
        super().__init__(BucketBackend(parameters, names), *arguments, **keywords)
        self._place = {id(parameter): i for i, parameter in enumerate(parameters)}
        self.optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        """The one whose learning rate counts; if it is gone, ``latest``, which stepped last."""
        self.latest: weakref.ref[torch.optim.Optimizer] | None = None
        self._waiting: list[tuple[Future[torch.Tensor], torch.Tensor | None, int]] = []
        """Of the reducer's buckets that were handed over: what it waits for, the bucket's memory (None: its gradient
        is sparse), its first parameter."""
        self._summing: list[tuple[int, Any]] = []
        """Of plain dense steps: the reducer's buckets that are being summed in place, by number."""
        self._to_commit = False
        self.keeps_gradients = True
        """Whether the reducer leaves gradients where autograd has put them, and not in its buckets."""
        self._left: tuple[torch.Tensor, torch.Tensor] | None = None
        """A parameter and its gradient as this forward pass began, if nobody had taken the step before."""

    def make_sets(self) -> None:
        super().make_sets()
        self._plain = None  # until the first step has shown that no gradient is sparse

    def _sum_in_place(self) -> None:
        """From now on, plain dense steps sum the reducer's buckets, and need none of the engine's."""
        unusual = self.two_level or self.sparse or self.idle
        if self._plain is None and not unusual and all(map(self.sums, self.dtypes)):
            self._plain = BucketSet([], f"{self.prefix}.plain", in_place=True)
            self.follow(self.plan)

    def hand_over(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """The reducer's bucket is full; returns what will hold its means."""
        if not self._waiting and self._to_commit:
            self._add_or_skip()
        buffer, places = bucket.buffer(), [self._place_of(parameter) for parameter in bucket.parameters()]
        gradients = [buffer] if buffer.is_sparse else _gradients(bucket)
        devices: list[Any] = [buffer.device] if buffer.device.type != "cpu" else []
        future: Future[torch.Tensor] = Future(devices=devices)
        self._waiting.append((future, None if buffer.is_sparse else buffer, places[0]))
        with torch.no_grad():
            for i, gradient in zip(places, gradients, strict=True):
                self.backend.views[i] = gradient
                step.gradient_ready(self, i)
            if self.now is self._plain:
                self.reporter.note_gradients(self, places, [gradient.reshape(-1) for gradient in gradients])
                number = bucket.index()
                handle = self.transport.start(buffer, f"{self.prefix}.plain.{number}", self.scale)
                self.sum_begins(number, self.transport, handle)
                self._summing.append((number, handle))
            if bucket.is_last():
                self._finish()
        return future

    def _add_or_skip(self) -> None:
        """Another backward pass adds to the means of the last one, or its step was skipped in the meantime."""
        if self._left is None or self._left[0].grad is self._left[1]:
            self._end_step()
        self._to_commit = False

    def _finish(self) -> None:
        """Gradients of this step are here: exchange the rest, and give all means to the reducer."""
        if len(self.backend.views) < len(self.backend.parameters):
            late = [name for i, name in enumerate(self.backend.names) if i not in self.backend.views]
            raise ValueError(
                "Parameters were frozen when DistributedDataParallel was made, which leaves their gradients alone. "
                f"Unfreeze them before the model is wrapped. Received: {', '.join(late[:3])}"
                + (f" and {len(late) - 3} more" if len(late) > 3 else "")
            )
        step.finish(self, self._learning_rate())
        self._sum_in_place()
        waiting, self._waiting = self._waiting, []
        for future, buffer, first in waiting:
            future.set_result(self.backend.views[first] if buffer is None else buffer)
        self.backend.views = {}
        self._to_commit, self._left = True, None

    def end_exchange(self, healthy: bool) -> None:
        super().end_exchange(healthy)
        for number, handle in self._summing:
            with self.meter.awaited(number), self.backend.named("hvdplus.wait"):
                self.transport.wait(handle)
        self._summing.clear()

    def forward_begins(self) -> None:
        """The next step's computation begins. If the means of the last step are gone, that step was skipped."""
        if self._left is not None and self._left[0].grad is not self._left[1]:  # a pass by itself came in between
            self._to_commit = False
        if self._to_commit:
            there = [(p, p.grad) for p in self.backend.parameters if p.grad is not None]
            self._to_commit = any(bool(gradient.any()) for _, gradient in there)  # almost always the first one tells
            if self._to_commit and self.keeps_gradients:
                self._left = min(there, key=lambda pair: pair[1].numel())
        if torch.is_grad_enabled():  # else the script validates
            self.meter.input_arrived()

    def _place_of(self, parameter: torch.Tensor) -> int:
        try:
            return self._place[id(parameter)]
        except KeyError:
            raise ValueError(
                "A parameter of DistributedDataParallel's was frozen when attach() was called. Freeze parameters "
                "before the model is wrapped, or unfreeze them before attach(). Received: one of shape "
                f"{tuple(parameter.shape)}"
            ) from None

    def _learning_rate(self) -> float:
        """Of groups as they are now: `load_state_dict` makes new ones. 0: nobody steps any more, or has one."""
        found = filter(None, (each() for each in (self.optimizer, self.latest) if each is not None))
        return next((rate_of(optimizer.param_groups) for optimizer in found), 0.0)

    def belongs_to(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer steps any of the parameters."""
        return any(id(p) in self._place for group in optimizer.param_groups for p in group["params"])

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of these parameters has taken its step."""
        self.latest = weakref.ref(optimizer)
        self._end_step()

    def _end_step(self) -> None:
        if self._to_commit:
            self._to_commit = False
            self.commit()

    def abandon(self) -> None:
        super().abandon()
        self._waiting, self._summing, self.backend.views, self._to_commit = [], [], {}, False


class Attached:
    """hvdplus in a ``DistributedDataParallel``: what ``attach`` returns."""

    def __init__(
        self,
        exchange: HookExchange,
        world: World,
        optimizers: Sequence[torch.optim.Optimizer],
        connect: Callable[[], None],
    ) -> None:
        """``connect``: has the model call the exchange from then on."""
        self._exchange, self._world = exchange, world
        self._connect: Callable[[], None] | None = connect
        self._connect_if_needed()
        exchange.optimizer = exchange.latest = weakref.ref(optimizers[0])
        _attached.add(exchange)
        _watch_optimizers()

    @property
    def hvdplus(self) -> Any:
        """The coordinator: present plan, level names, measured times, run log."""
        return self._exchange.coordinator

    def record(self, loss: float | torch.Tensor) -> None:
        """Put this step's loss into the run log; call it before ``loss.backward()``."""
        self._exchange.reporter.loss = loss_of(loss)

    def state_dict(self) -> dict[str, Any]:
        """Contexts, the controller's state and this rank's residuals, for a checkpoint between two steps; see
        ``consolidate_state_dict``."""
        return self._exchange.state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``; every rank calls it, between two steps.

        Raises:
            ValueError: the state is of another model, or damaged.
        """
        self._exchange.resumed = self._exchange.load(state_dict)
        self._connect_if_needed()

    def _connect_if_needed(self) -> None:
        """A rank by itself exchanges nothing, unless a state brings along what was held back among others."""
        if self._connect is not None and not self._exchange.idle:
            self._connect()
            self._connect = None

    def consolidate_state_dict(self) -> None:
        """Make any one rank's ``state_dict`` valid for all ranks, until the next step; every rank has to call it."""
        self._exchange.consolidate()


def attach(
    model: nn.parallel.DistributedDataParallel,
    optimizers: Sequence[torch.optim.Optimizer],
    world: World,
    *,
    compression: Any,
    settings: Mapping[str, Any] | None,
    grad_scaler: torch.amp.GradScaler | None,
) -> Attached:
    """See ``hvdplus.torch.ddp.attach``."""
    asked = Settings.load(settings)
    instead = "DistributedOptimizer(every=) around a bare model"
    refuse_local_steps(compression, asked, "DistributedDataParallel", instead)
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored]
    names, parameters = [name for name, _ in named], [parameter for _, parameter in named]
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if stepped.isdisjoint(map(id, parameters)):
        raise ValueError(
            "attach() wants the optimizer that steps the model's parameters: only it tells when a step is taken. "
            f"Received: {', '.join(type(each).__name__ for each in optimizers)} of other parameters"
        )
    resolved = load_settings(settings, parameters)
    world = fitting(parameters, world)
    check_types(names, [type_name(p) for p in parameters], TYPES)
    exchange: HookExchange = join(
        functools.partial(HookExchange, parameters, names=names, average=True),
        world,
        resolved,
        *choose_ladder(compression, resolved, world, TorchOps()),
        framework="torch",
        instance=next_instance(),
        shapes=[tuple(p.shape) for p in parameters],
        dtypes=[type_name(p) for p in parameters],
        names=names,
        optimizer=type(optimizers[0]).__name__,
        scales_losses=grad_scaler is not None,
    )
    if grad_scaler is not None:
        exchange.get_loss_scale = grad_scaler.get_scale
    return Attached(exchange, world, optimizers, functools.partial(_connect, model, exchange, grad_scaler))


def _connect(
    model: nn.parallel.DistributedDataParallel, exchange: HookExchange, grad_scaler: torch.amp.GradScaler | None
) -> None:
    """From now on, a model's gradients go through an exchange."""
    exchange.keeps_gradients = not model.gradient_as_bucket_view
    model.register_comm_hook(_Hook(exchange, scales=grad_scaler is not None), _Hook.call)
    this = weakref.ref(exchange)
    model.register_forward_pre_hook(lambda *_: _input_arrived(this))


class _Hook:
    """State of the communication hook."""

    def __init__(self, exchange: HookExchange, scales: bool) -> None:
        self.exchange = exchange
        self._looked = scales
        """Whether it is known whether losses are scaled."""

    def call(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """A full bucket of the reducer's."""
        if not self._looked:
            self._looked = True
            self._look_for_scalers()
        return self.exchange.hand_over(bucket)

    def _look_for_scalers(self) -> None:
        """Nobody tells a hook the scale of losses, in whose units the gradients are."""
        # By type(): some objects say something, or do something, when they are asked for their class.
        scalers: Iterable[Any] = (each for each in gc.get_objects() if issubclass(type(each), torch.amp.GradScaler))
        mine = any(scaler.is_enabled() for scaler in scalers)
        everyone = self.exchange.transport.gather_objects(mine, f"loss scaling in {self.exchange.prefix}")
        if any(everyone):
            if self.exchange.transport.rank == 0:
                print(f"hvdplus: {UNKNOWN_SCALE}", file=sys.stderr, flush=True)
            self.exchange.leave_out_residuals()


# PyTorch compares the annotations themselves, and here they are text.
_Hook.call.__annotations__.update({"bucket": GradBucket, "return": Future[torch.Tensor]})


def _gradients(bucket: GradBucket) -> list[torch.Tensor]:
    """A bucket's gradients, complex ones as pairs of real numbers."""
    parameters = bucket.parameters()
    if not any(parameter.is_complex() for parameter in parameters):
        return list(bucket.gradients())
    # PyTorch's own views of them end half way: they count complex numbers in a buffer of real ones.
    shapes = [real_view(parameter).shape for parameter in parameters]
    parts = torch.split(bucket.buffer(), [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


_attached: weakref.WeakSet[HookExchange] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    """Tell exchanges of every step that any optimizer takes with their parameters: scripts may make a new one."""

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for exchange in list(_attached):
            if exchange.belongs_to(optimizer):
                exchange.stepped(optimizer)

    register_optimizer_step_post_hook(stepped)


def _input_arrived(exchange: weakref.ref[HookExchange]) -> None:
    found = exchange()
    if found is not None:
        found.forward_begins()
