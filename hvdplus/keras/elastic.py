"""``horovod.tensorflow.keras.elastic`` for Keras 3: ranks may come and go, and hvdplus's optimizers follow.

Stock Horovod's ``KerasState`` fails under Keras 3, where an optimizer's ``variables`` is no longer a method.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import hvdplus.keras as front
from hvdplus.adapters.keras import collectives
from hvdplus.adapters.keras.local import LocalSteps
from hvdplus.adapters.keras.optimizer import Distributed, exchanges, rejoin
from hvdplus.adapters.transports import horovod_private
from hvdplus.adapters.transports.connect import INSTALL_HOROVOD
from hvdplus.exchange.checkpoint import for_other_ranks, share_out, to_stay
from hvdplus.transport import NeedsHorovod, broadcast_object

if not front.with_horovod():
    raise NeedsHorovod(f"Elastic jobs need Horovod, and this one runs without it. {INSTALL_HOROVOD}.")

ObjectState: Any = horovod_private.elastic().ObjectState
run_fn = horovod_private.elastic().run_fn
HorovodInternalError = horovod_private.internal_error()

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """As Horovod's: run ``function``, whose first argument is a ``KerasState``, anew whenever ranks come or go."""

    prepared = horovod_private.before_ranks_change(function, lambda: share_out(exchanges()))

    def heard(*arguments: Any, **keywords: Any) -> Any:
        try:
            return prepared(*arguments, **keywords)
        except Exception as error:
            # TensorFlow wraps what Horovod's ops raise into an error of its own, which names the op: Horovod's or ours.
            if re.search(r"Horovod(Allreduce|Allgather|Broadcast)|hvdplus\d+\.|Horovod has been shut down", str(error)):
                raise HorovodInternalError(error) from error
            raise

    return run_fn(heard, _reset)


def _reset() -> None:
    if tapes := sys.modules.get("hvdplus.adapters.tensorflow.tape"):
        tapes.forget()
    front.shutdown()
    front.init()
    gc.collect()  # optimizers that the script has dropped do not join
    rejoin(front._require_world())


class KerasState(ObjectState):
    """State that ranks share: a model, its optimizer, and further values by name (``epoch=0, batch=0``).

    When ranks have come or gone, all take over rank 0's state, but each rank keeps its own residuals.

    Args:
        model: a Keras model, built.
        optimizer: its optimizer; None: the one that the model was compiled with.
        attributes: further values, picklable; they become attributes.

    Raises:
        ValueError: the model has not been built.
    """

    def __init__(self, model: keras.Model, optimizer: Any = None, **attributes: Any) -> None:
        if not model.built:
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        self.model = model
        self.optimizer = optimizer or model.optimizer
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        self._save()
        super().__init__(self._from_rank_0, front.rank, **attributes)

    def save(self) -> None:
        """Remember where training is."""
        self._save()
        super().save()

    def restore(self) -> None:
        """Go back to the last ``save``."""
        for variable, value in zip(self._variables(), self._values, strict=True):
            variable.assign(value)
        self._follow(lambda rhythm: self._rhythm)
        for exchange, saved in zip(self._exchanges, self._exchanged, strict=True):
            if saved is not None:
                exchange.abandon()
                exchange.load(saved)
        super().restore()

    def reset(self) -> None:
        """Ranks have come or gone."""
        self.model.train_function = None  # the compiled step is for the old ranks

    def sync(self) -> None:
        """Take over rank 0's state, except residuals."""
        self.model.train_function = None  # one compiled before would go on with the exchange's old variables
        collectives.broadcast_variables(self._variables(), 0)
        self._follow(self._from_rank_0)
        for exchange in self._exchanges:
            if not exchange.idle:
                mine = to_stay(exchange.state())
                everybodys = self._from_rank_0(for_other_ranks(mine))
                exchange.load({**everybodys, "residuals": mine["residuals"], "rank": mine["rank"]})
        self._save()
        super().sync()

    def _follow(self, shared: Callable[[Any], Any]) -> None:
        """Local steps count from these variables on. ``shared``: see ``LocalSteps.follow_variables``."""
        if self._local:
            self._own.follow_variables(shared)

    @property
    def _own(self) -> Any:
        """The wrapped optimizer, without loss scaling."""
        return getattr(self.optimizer, "inner_optimizer", self.optimizer)

    @property
    def _local(self) -> Any:
        """Of an optimizer that takes local steps: its fragments and rhythm."""
        return self._own._hvdplus if isinstance(self._own, LocalSteps) else None

    @property
    def _exchanges(self) -> list[Any]:
        if self._local:
            return [fragment.outer._hvdplus.exchange for fragment in self._local.fragments]
        return [self._own._hvdplus.exchange] if isinstance(self._own, Distributed) else []

    def _variables(self) -> list[Any]:
        known = {id(v) for v in self.model.variables}
        outer = self._own.outer_variables if self._local else []
        return [
            *collectives.shared_variables(self.model),
            *(v for v in self.optimizer.variables if id(v) not in known),
            *outer,
        ]

    def _save(self) -> None:
        self._values = [np.array(variable) for variable in self._variables()]
        self._rhythm = self._local.rhythm.state() if self._local else None
        self._exchanged = [None if x.idle else to_stay(x.state()) for x in self._exchanges]

    @staticmethod
    def _from_rank_0(value: Any) -> Any:
        return broadcast_object(collectives.current().transport, value, 0, "an elastic state")


class CommitStateCallback(keras.callbacks.Callback):
    """Commit ``state`` every ``batches_per_commit`` batches, and at the end of every epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit
        self._left = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._left = self.batches_per_commit  # alike on all ranks, also on those that came later

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._left -= 1
        if not self._left:
            self._left = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keep ``state.batch`` at the batch; 0 at the end of an epoch.

    Keras 3 takes the length of an epoch from ``fit``: pass ``steps_per_epoch=steps - state.batch`` to shorten the first
    epoch after ranks came or went.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keep ``state.epoch`` at the number of epochs done, including those before ranks came or went."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._initial = state.epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._initial = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.epoch = self._initial + epoch + 1
