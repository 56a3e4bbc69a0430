"""Keras on PyTorch: hvdplus's PyTorch exchange, whose hooks send gradients while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import torch

from hvdplus.adapters.torch.backend import loss_of
from hvdplus.adapters.torch.cpu import CPU as CPU
from hvdplus.adapters.torch.hooks import HookedExchange
from hvdplus.adapters.torch.ops import TorchOps
from hvdplus.exchange.metadata import hash_flags
from hvdplus.transport import Transport

BINDING = "horovod.torch"
make_ops = TorchOps
outside_of_traces = nullcontext
without_gradients = torch.no_grad
TRACES = False
"""Whether a step may be compiled, so that both sides of a condition stay in it."""
NEVER = 1 << 62
"""Backward passes before hooks send: they never do where Keras accumulates by itself and hands over the sum."""


def adapt(transport: Transport) -> Transport:
    return transport


def check(transport: Transport) -> None:
    """Raise ValueError where gradients would be averaged twice."""
    others = torch.distributed
    if transport.name.startswith("torch-"):  # it is ours
        return
    if transport.size > 1 and others.is_available() and others.is_initialized() and others.get_world_size() > 1:
        raise ValueError(
            "torch.distributed is initialised, so Keras may wrap models in DistributedDataParallel, and gradients "
            "would be averaged twice. Call torch.distributed.destroy_process_group() first, or train without hvdplus."
        )


def ask(question: Callable[[], Sequence[bool]], count: int) -> Sequence[bool]:
    """``count`` answers that the host gives."""
    return question()


def when(flag: bool, do: Callable[[], Any]) -> None:
    """Call ``do`` if the flag is true."""
    if flag:
        do()


def either(flag: bool, one: Callable[[], Any], other: Callable[[], Any]) -> None:
    """Call ``one`` if the flag is true, else ``other``."""
    one() if flag else other()


def average(exchange: HookedExchange, variables: Sequence[Any]) -> None:
    """Give variables their mean over all ranks."""
    values = [variable.value.detach() for variable in variables]
    if not values:
        return
    whole = torch.cat([value.float().reshape(-1) for value in values])
    handle = exchange.transport.start(whole, f"{exchange.prefix}.state", 1 / exchange.transport.size)
    parts = exchange.transport.wait(handle).split([value.numel() for value in values])
    with torch.no_grad():
        for value, part in zip(values, parts, strict=True):
            value.copy_(part.view(value.shape))


class Exchange(HookedExchange):
    """The exchange of Keras variables' gradients."""

    def __init__(
        self, variables: Sequence[Any], transport: Transport, settings: Any, *, accumulates: bool, **keywords: Any
    ) -> None:
        parameters = [variable.value for variable in variables]
        names = [variable.path for variable in variables]
        passes = NEVER if accumulates else 1
        super().__init__(parameters, transport, settings, passes=passes, names=names, **keywords)

    def hear(self, loss: torch.Tensor) -> None:
        """The step's loss, for the run log."""
        self.reporter.loss = loss_of(loss)

    def scales_losses(self, scale: Callable[[], Any]) -> None:
        """Losses are scaled by ``scale()`` from now on."""
        self.get_loss_scale = lambda: float(scale())

    def agree(self, here: Any) -> torch.Tensor:
        """Whether ``here`` is true on all ranks."""
        elsewhere = torch.tensor([0.0 if bool(here) else 1.0], device="cpu")
        return self.bare.wait(self.bare.start(elsewhere, f"{self.prefix}.agree"))[0] == 0

    def reduce(
        self, grads: Sequence[torch.Tensor | None], learning_rate: Any, loss_scale: Any, applied: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Mean gradients over all ranks, None where no rank has one. Call ``end_step`` or ``skip_step`` afterwards.

        ``applied``: whether each variable is updated; if ranks differ, the coming step is an error.

        Raises:
            RuntimeError: the gradients in flight are not those that are applied.
        """
        for parameter, grad in zip(self.parameters, grads, strict=True):
            if grad is not parameter.grad:
                if self.in_flight:
                    raise RuntimeError(
                        "The gradients to apply are not those that backward() computed, which have been sent to the "
                        "other ranks already. Change gradients after their exchange (clipnorm, global_clipnorm and "
                        "clipvalue do), or compute them with torch.autograd.grad."
                    )
                parameter.grad = None if grad is None else grad.detach().to(parameter.dtype, copy=True)
        if loss_scale is not None and self.get_loss_scale is None:  # first step of an optimizer not built before
            self.scales_losses(lambda: loss_scale)
        rate = float(keras.ops.convert_to_numpy(learning_rate))
        self.finish(rate, missing=hash_flags([not each for each in applied]))
        means = [parameter.grad for parameter in self.parameters]
        if loss_scale is None:
            return means
        return [None if mean is None else mean / loss_scale for mean in means]

    def end_step(self, updated: Sequence[Any]) -> None:
        """The optimizer has taken the step."""
        self.commit()

    def skip_step(self) -> None:
        """The optimizer has not taken the step."""
        self.forget_means()
        self.meter.end_step()

    def state(self) -> dict[str, Any]:
        """See ``HookedExchange``; with NumPy arrays."""
        return {name: _as_arrays(value) for name, value in super().state().items()}

    def load(self, state: Mapping[str, Any]) -> str:
        """See ``HookedExchange``; takes NumPy arrays."""
        return super().load({name: _as_tensors(value) for name, value in state.items()})


def _as_arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu().numpy()
    if isinstance(value, dict):
        return {key: _as_arrays(each) for key, each in value.items()}
    return [_as_arrays(each) for each in value] if isinstance(value, list | tuple) else value


def _as_tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {key: _as_tensors(each) for key, each in value.items()}
    return [_as_tensors(each) for each in value] if isinstance(value, list) else value
