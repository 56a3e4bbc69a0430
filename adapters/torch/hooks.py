"""The exchange in PyTorch: hooks send gradients while the backward pass goes on, ``finish`` brings the means back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvdplus.adapters.torch import private
from hvdplus.adapters.torch.backend import TorchBackend, like, real_view, rows_in_use
from hvdplus.exchange import checkpoint, passes, step
from hvdplus.exchange.eager import EagerExchange
from hvdplus.settings import Settings
from hvdplus.transport import Transport


class HookedExchange(EagerExchange[torch.Tensor]):
    """Exchanges the gradients of ``parameters`` once a step."""

    backend: TorchBackend

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        transport: Transport,
        settings: Settings,
        *,
        passes: int,
        names: Sequence[str] = (),
        get_loss_scale: Callable[[], float] | None = None,
        **keywords: Any,
    ) -> None:
        """See ``EagerExchange``.

        Args:
            parameters: those that have gradients, in the same order on every rank.
            passes: backward passes that accumulate before one exchange.
            names: of the parameters, for messages.
            get_loss_scale: returns the factor by which the script scales its losses, and so its gradients.
        """
        super().__init__(TorchBackend(parameters, names), transport, settings, **keywords)
        self._place = {id(parameter): i for i, parameter in enumerate(self.backend.parameters)}
        self.passes = passes
        self.get_loss_scale = get_loss_scale
        self.inner_rate: float | None = None
        """Learning rate of the local steps whose drifts these gradients are; None: they are no drifts."""
        self._passes_left = [passes] * len(parameters)
        self._means: tuple[torch.Tensor, torch.Tensor] | None = None
        """A parameter and its mean, until the optimizer has taken the step: a script may add to means, or drop them."""
        self._sent: dict[int, tuple[torch.Tensor, int]] = {}
        """Parameter -> its gradient in flight, and how often that had been written to: a change is noticed."""
        self._added: Sequence[torch.nn.Parameter] = ()
        self._hooks: dict[int, Any] = {}
        """id of a parameter -> its hook."""
        self._listen(self.backend.parameters)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients are exchanged, in order."""
        return self.backend.parameters

    @property
    def holds_means(self) -> bool:
        """Whether gradients are those that the last exchange has left, after it and before the step."""
        return not self.in_flight and (self._means is None or self._means[0].grad is self._means[1])

    def forget_means(self) -> None:
        """Whatever gradients come next have nothing to do with them."""
        self._means = None

    @property
    def in_flight(self) -> bool:
        """Whether gradients of the current step are in flight."""
        return bool(self._sent)

    def finish(
        self, learning_rate: float = 0.0, added: Sequence[torch.nn.Parameter] = (), missing: float = 0.0
    ) -> None:
        """See ``step.finish``. ``added``: parameters that are not in the exchange yet (see ``add_parameters``); their
        gradients are summed one by one, dense."""
        self._check_unchanged()
        self._added = added
        step.finish(self, learning_rate if self.inner_rate is None else self.inner_rate, len(added), missing)
        self._added = ()
        self._sent.clear()
        self.restart()
        # The last one: usually a small one.
        self._means = next(((p, p.grad) for p in reversed(self.parameters) if p.grad is not None), None)

    def begin(self) -> None:
        """See ``EagerExchange``. If another backward pass adds to the means, what their step held back is kept."""
        means, self._means = self._means, None
        if means is not None and means[0].grad is means[1]:
            self.commit()
        super().begin()

    def commit(self) -> None:
        """See ``EagerExchange``."""
        self._means = None
        super().commit()

    def send_all(self) -> None:
        """Begin the sums of gradients that no backward pass has brought, in the order that ranks have agreed on."""
        self.begin()
        for i in self.order:
            for _ in range(self._passes_left[i]):
                self._accumulated(i, self.parameters[i])
        with self.meter.codec():
            passes.go_on_with_all(self)

    def restart(self) -> None:
        """Count backward passes anew, after their number or the optimizer's state changed between two steps."""
        self._passes_left = [self.passes] * len(self.parameters)

    def load(self, state: Mapping[str, Any]) -> str:
        """See ``Exchange.load``.

        Raises:
            RuntimeError: gradients are in flight.
        """
        if self.in_flight:
            raise RuntimeError(
                "load_state_dict() was called with gradients in flight. Call it before backward() or after step()."
            )
        self.resumed = super().load(state)
        return self.resumed

    def abandon(self) -> None:
        """Forget the sums in flight: the transport has failed or has ended."""
        super().abandon()
        self._means = None
        self._sent.clear()
        self.restart()

    def settle(self) -> None:
        """Wait for the sums in flight, and forget them: another state is loaded. All ranks have begun them."""
        with self.meter.codec():
            passes.go_on_with_all(self)
        for state in self.now.states:
            if state.handle is not None:
                self.wire.wait(state.handle)
        self.abandon()

    def close(self) -> None:
        """Remove the hooks: another exchange takes over."""
        self.abandon()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def open(self) -> None:
        """Listen again, after ``close``."""
        self._listen(self.parameters)

    # -- hooks

    def _listen(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        if not self.alone:
            # A parameter that is frozen now takes part without a hook.
            listening = [p for p in parameters if p.requires_grad]
            for p in listening:
                self._hooks[id(p)] = p.register_post_accumulate_grad_hook(self._make_hook())  # type: ignore[no-untyped-call]

    def _make_hook(self) -> Callable[[torch.Tensor], None]:
        me = weakref.ref(self)  # an optimizer that is gone must not go on exchanging

        def hook(parameter: torch.Tensor) -> None:
            exchange = me()
            if exchange is not None:
                exchange._accumulated(exchange._place[id(parameter)], parameter)

        return hook

    def _accumulated(self, i: int, parameter: torch.Tensor) -> None:
        left = self._passes_left[i] = self._passes_left[i] - 1
        if left < 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                f"Received: {self.passes - left} passes with backward_passes_per_step={self.passes}. Increase it to "
                "accumulate gradients locally."
            )
        grad = parameter.grad
        if not left and grad is not None:
            self._sent[i] = grad, private.version(grad)
            step.gradient_ready(self, i)

    def _check_unchanged(self) -> None:
        if self.idle:
            return
        for i, (grad, version) in self._sent.items():
            if self.parameters[i].grad is not grad or private.version(grad) != version:
                raise RuntimeError(
                    "A gradient was changed after backward() and before the ranks' gradients were exchanged, so the "
                    "change would be lost. Call optimizer.synchronize() first, then clip or unscale, then "
                    "`with optimizer.skip_synchronize(): optimizer.step()`."
                )

    # -- parameters that come later

    def exchange_added(self) -> None:
        """Ranks tell each other which added parameters have gradients, and sum them one by one: this is rare."""
        forms = [(p.grad is not None, p.grad is not None and p.grad.is_sparse) for p in self._added]
        used, sparse = np.any(self.transport.gather_objects(forms, f"added parameters of {self.prefix}"), axis=0).T
        handles = []
        for number, parameter in enumerate(self._added):
            grad = real_view(
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().to_dense()
            )
            wide = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True).contiguous().view(-1)
            handles.append(self.transport.start(wide, f"{self.prefix}.added.{number}", self.scale))
        with torch.no_grad():
            for parameter, handle, anybody, rows_only in zip(self._added, handles, used, sparse, strict=True):
                mean = like(self.transport.wait(handle).view(real_view(parameter).shape), parameter)
                if rows_only:
                    parameter.grad = rows_in_use(mean)
                elif parameter.grad is None or parameter.grad.is_sparse or parameter.is_complex():
                    parameter.grad = mean if anybody else None
                else:
                    parameter.grad.copy_(mean)

    def add_parameters(self, parameters: Sequence[torch.nn.Parameter], names: Sequence[str] = ()) -> None:
        """Exchange ``parameters``, which include the old ones, from the coming step on. All ranks call it alike.

        A parameter keeps its residual, and a parameter that is gone takes it along; buckets that stay the same keep
        their contexts.
        """
        self.reporter.observe_last(self)  # while numbers are as they were
        before, residuals, learned = self.parameters, checkpoint.residuals(self), {}
        for state in self.states:
            learned[tuple(id(before[i]) for i in state.bucket.parameters)] = state.contexts
        self.backend.take(parameters, names)
        self._place = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        moved = {i: self._place[id(p)] for i, p in enumerate(before) if id(p) in self._place}  # others are gone
        for gone in self._hooks.keys() - self._place.keys():
            self._hooks.pop(gone).remove()
        stayed = set(moved.values())
        self._listen(p for i, p in enumerate(self.parameters) if i not in stayed)
        late = [i for i in reversed(range(len(self.parameters))) if i not in stayed]
        self.change_members([*(moved[i] for i in self.order if i in moved), *late], moved)
        for state in self.states:
            contexts = learned.get(tuple(id(self.parameters[i]) for i in state.bucket.parameters), {})
            state.contexts = {level: ctx._replace(spec=state.bucket.spec) for level, ctx in contexts.items()}
        for i in residuals.keys() & moved.keys():
            self.hold(moved[i], residuals[i])
        self.restart()
        self.follow(self.coordinator.plan)
