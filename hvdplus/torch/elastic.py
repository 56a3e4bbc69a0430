"""``horovod.torch.elastic``: ranks may come and go, and hvdplus's optimizers follow.

``TorchState`` and ``ElasticSampler`` are Horovod's own; ``run`` is Horovod's, with a reset that also reaches hvdplus.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch

import hvdplus.torch as front
from hvdplus.adapters.torch.collectives import Collectives, for_other_ranks
from hvdplus.adapters.torch.local import LocalSteps
from hvdplus.adapters.torch.optimizer import STATE_KEY, Distributed, exchanges, rejoin
from hvdplus.adapters.transports import horovod_private
from hvdplus.adapters.transports.connect import INSTALL_HOROVOD
from hvdplus.exchange.checkpoint import share_out, to_stay
from hvdplus.transport import NeedsHorovod, broadcast_object

if not front._with_horovod():
    raise NeedsHorovod(f"Elastic jobs need Horovod, and this one runs without it. {INSTALL_HOROVOD}.")

from horovod.torch.elastic import ElasticSampler, TorchState

_states: Any = horovod_private.torch_states()

__all__ = ["ElasticSampler", "TorchState", "run"]


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """As Horovod's: run ``function``, whose first argument is a ``TorchState``, anew whenever ranks come or go."""
    function = horovod_private.before_ranks_change(function, lambda: share_out(exchanges()))
    return horovod_private.elastic().run_fn(function, _reset)  # type: ignore[no-any-return]


def _reset() -> None:
    front.shutdown()
    front.init()
    gc.collect()  # optimizers that the script has dropped do not join
    rejoin(front._require_world())


class _OptimizerState(_states.OptimizerStateHandler):  # type: ignore[misc]
    """Rank 0's optimizer state on all ranks, but each rank keeps its own residuals; newcomers have none."""

    def save(self) -> None:
        self._saved_optimizer_state = copy.deepcopy(_own(self.value.state_dict()))

    def restore(self) -> None:
        self.value._abandon()
        self.value.load_state_dict(self._saved_optimizer_state)

    def sync(self) -> None:
        _take_over(self.value)
        self.save()


class _LocalState(_states.OptimizerStateHandler):  # type: ignore[misc]
    """Rank 0's optimizer state and rhythm on all ranks. Drifts count from rank 0's parameters; of what an exchange held
    back, each rank keeps its own."""

    def save(self) -> None:
        local: LocalSteps = self.value
        outers = [_own(fragment.outer.state_dict()) for fragment in local._fragments]
        self._saved_optimizer_state = copy.deepcopy((local.own_state_dict(), outers))

    def restore(self) -> None:
        state, outers = self._saved_optimizer_state
        self.value.restart()
        self.value.load_state_dict(state)
        for fragment, outer in zip(self.value._fragments, outers, strict=True):
            fragment.outer.load_state_dict(outer)

    def sync(self) -> None:
        local: LocalSteps = self.value
        local.restart()
        state = local.own_state_dict()
        ours = broadcast_object(front._require_world().transport, state.pop(STATE_KEY), 0, "the rhythm of local steps")
        shared = Collectives(front._require_world()).broadcast_state(state, root_rank=0)
        local.load_state_dict({**shared, STATE_KEY: ours})
        for fragment in local._fragments:
            _take_over(fragment.outer)
        if local._locked is not None:
            _take_over(local._locked)
        self.save()


def _take_over(optimizer: Distributed) -> None:
    """Rank 0's state, but for this rank's residuals."""
    own = optimizer.state_dict()
    mine = own.get(STATE_KEY, {"residuals": {}})["residuals"]
    state = Collectives(front._require_world()).broadcast_state(for_other_ranks(own), root_rank=0)
    if STATE_KEY in state:
        everybodys = state[STATE_KEY]
        if everybodys["rank"] is not None:  # else they are all ranks', also the newcomers'
            everybodys["residuals"] = {i: mine.get(i) for i in everybodys["residuals"]}
    optimizer.load_state_dict(_own(state))


class _ModelState(_states.ModelStateHandler):  # type: ignore[misc]
    """Rank 0's model on all ranks, also where it has parameters of types that Horovod refuses."""

    def sync(self) -> None:
        front.broadcast_parameters(self.value.state_dict(), root_rank=0)


def _own(state: dict[str, Any]) -> dict[str, Any]:
    """The state, see ``checkpoint.to_stay``."""
    return {**state, STATE_KEY: to_stay(state[STATE_KEY])} if STATE_KEY in state else state


_states.set_handler_registry(
    [
        (Distributed, _OptimizerState),
        (LocalSteps, _LocalState),
        (torch.nn.Module, _ModelState),
        *_states.get_handler_registry(),
    ]
)
