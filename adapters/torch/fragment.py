"""Parameters that are exchanged together after local steps; see ``local.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch


class Fragment:
    """Parameters that are exchanged together."""

    waits: ClassVar[bool] = True
    """Whether ranks wait for each other, and so have taken the same steps."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], anchors: Sequence[torch.nn.Parameter], outer: Any
    ) -> None:
        """``outer``: a ``DistributedOptimizer`` of the ``anchors``."""
        self.parameters, self.anchors, self.outer = list(parameters), list(anchors), outer
        self.sent: list[torch.Tensor] | None = None
        """The parameters as they were when their exchange began; None: none is under way."""

    @torch.no_grad()
    def anchor(self) -> None:
        """Drifts count from the present parameters on."""
        for anchor, parameter in zip(self.anchors, self.parameters, strict=True):
            anchor.copy_(parameter)

    @torch.no_grad()
    def begin(self, early: bool, sent: Sequence[torch.Tensor] | None = None) -> None:
        """Make the drifts, of the present parameters or of those that were ``sent``. ``early``: begin the sums, too."""
        now = [parameter.detach() for parameter in self.parameters] if sent is None else sent
        for anchor, value in zip(self.anchors, now, strict=True):
            anchor.grad = anchor - value
        self.sent = [value.clone() for value in now] if early else list(now)
        if early:
            self.outer._exchange.send_all()

    def look(self) -> None:
        """Notice how far sums under way have come."""
        if self.sent is not None:
            self.outer._exchange.meter.look()

    def settle(self) -> None:
        """Wait for sums under way, and forget them."""
        if self.sent is not None:
            self.outer._exchange.settle()
            self.sent = None

    @torch.no_grad()
    def complete(self, rate: float) -> None:
        """Take the outer step, and let the parameters follow it. ``rate``: that of the local steps before it."""
        assert self.sent is not None
        self.outer._exchange.inner_rate = rate  # ranks agree on it, and the price of delay follows it
        self.outer.step()
        # Alone, bit for bit what the user's own optimizer makes of the parameters.
        alone = self.outer._exchange.idle and not self.outer.param_groups[0]["momentum"]
        for anchor, parameter, sent in zip(self.anchors, self.parameters, self.sent, strict=True):
            if alone:
                anchor.copy_(parameter)
            elif sent.data_ptr() == parameter.data_ptr():  # no step was taken meanwhile
                parameter.copy_(anchor)
            else:
                parameter.add_(anchor - sent)
            anchor.grad = None
        self.sent = None

    @torch.no_grad()
    def arrive(self) -> None:
        """No step was taken since the exchange began that was just completed: parameters are the anchors, which adding
        a difference may miss by a last bit."""
        for anchor, parameter in zip(self.anchors, self.parameters, strict=True):
            parameter.copy_(anchor)

    def meet(self, rate: float) -> None:
        """Exchange at once, so that all ranks have the same parameters. All ranks call it. ``rate``: see
        ``complete``."""
        self.begin(early=False)
        self.complete(rate)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "anchors": [anchor.detach().clone() for anchor in self.anchors],
            "sent": None if self.sent is None else [value.clone() for value in self.sent],
            "outer": self.outer.state_dict(),
        }

    def load(self, state: Mapping[str, Any], under_way: bool) -> bool:
        """Continue from a ``state()``; returns whether drifts count from its anchors, not from the parameters that the
        next step finds. ``under_way``: its exchange had begun."""
        self.outer.load_state_dict(state["outer"])
        with torch.no_grad():
            for anchor, value in zip(self.anchors, state["anchors"], strict=True):
                anchor.copy_(value)
        if under_way:
            pairs = zip(state["sent"], self.parameters, strict=True)
            self.begin(early=True, sent=[value.to(parameter.device) for value, parameter in pairs])
        return True

    def facts(self) -> dict[str, Any]:
        """For the report."""
        return {}

    def average_state(self, state: Mapping[Any, Mapping[str, Any]], name: str) -> None:
        """Give all ranks the mean of what their own optimizers remember (momentum, second moments)."""
        exchange = self.outer._exchange
        mine = [
            {key for key, value in state.get(p, {}).items() if isinstance(value, torch.Tensor) and _is_of(value, p)}
            for p in self.parameters
        ]
        told = exchange.transport.gather_objects([sorted(keys) for keys in mine], f"optimizer state of {name}")
        keys = [sorted(set().union(*those)) for those in zip(*told, strict=True)]
        with torch.no_grad():
            parts = [
                _widened(state.get(p, {}).get(key, torch.zeros_like(p))).reshape(-1)
                for p, wanted in zip(self.parameters, keys, strict=True)
                for key in wanted
            ]
            if not parts:
                return
            sums = torch.cat(parts)
            mean = exchange.transport.wait(exchange.transport.start(sums, name, 1 / exchange.transport.size))
            means = iter(mean.split([len(part) for part in parts]))
            for p, wanted in zip(self.parameters, keys, strict=True):
                for key in wanted:
                    value = next(means)
                    if key in state.get(p, {}):
                        state[p][key].copy_(value.view(p.shape))


def _widened(value: torch.Tensor) -> torch.Tensor:
    """In float32 at least."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _is_of(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a tensor of an optimizer's state has one number for every number of the parameter."""
    return value.is_floating_point() and value.shape == parameter.shape and value.dim() > 0
