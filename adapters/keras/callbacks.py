"""Horovod's Keras callbacks for Keras 3, with the same names and arguments.

Stock Horovod's fail here: they look for methods that Keras 3 variables and optimizers no longer have (horovod#4290).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from hvdplus.adapters.keras import collectives


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Start all ranks from rank ``root_rank``'s variables.

    A model that is built already is broadcast before the first step, any other model after it.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local_variables = list(local_variables or [])
        self._done = False

    def register_local_var(self, variable: Any) -> None:
        """Leave a variable as it is on every rank."""
        self._local_variables.append(variable)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.model.built and not self._done:
            if not self.model.optimizer.built:
                self.model.optimizer.build(self.model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._done:
            self._broadcast()

    def _broadcast(self) -> None:
        collectives.broadcast_model(self.model, self.root_rank, self._local_variables)
        self._done = True


class AverageLocalStepsCallback(keras.callbacks.Callback):
    """With local steps: exchange before every validation and at the end of every epoch, so that all ranks evaluate and
    save the same model. Without local steps it does nothing. List it before callbacks that save."""

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._average()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._average()

    def _average(self) -> None:
        optimizer = getattr(self.model, "optimizer", None)
        inner: Any = getattr(optimizer, "inner_optimizer", optimizer)
        if hasattr(inner, "average_now"):
            inner.average_now()


class MetricAverageCallback(keras.callbacks.Callback):
    """Average metrics over ranks at the end of every epoch; list it before callbacks that use the metrics."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None:
            return
        mine = {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}
        everyone = collectives.current().transport.gather_objects(mine)
        for name in mine:
            values = [metrics[name] for metrics in everyone if name in metrics]
            logs[name] = sum(values) / len(values)


class StopTogetherCallback(keras.callbacks.Callback):
    """If any rank has set ``stop_training``, all ranks stop; else those that go on would wait for it. List it last.

    ``EarlyStopping`` decides at the end of an epoch, by figures that may be a rank's own. (With
    ``restore_best_weights`` list ``MetricAverageCallback`` before it, or each rank restores others.) Callbacks that
    decide within an epoch, such as ``TerminateOnNaN``, need ``each_batch``.
    """

    def __init__(self, each_batch: bool = False) -> None:
        """``each_batch``: look after every batch, too, which takes one more message a step."""
        super().__init__()
        self.each_batch = each_batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.each_batch:
            self._agree()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._agree()

    def _agree(self) -> None:
        everyone = collectives.current().transport.gather_objects(bool(self.model.stop_training), "who stops training")
        self.model.stop_training = any(everyone)


class ExchangeLogsCallback(keras.callbacks.Callback):
    """Put hvdplus' figures into the logs of every epoch, for History, CSVLogger, TensorBoard and other callbacks.

    List it before those. All are numbers, medians over the last complete window of steps: ``hvdplus_step_ms``,
    ``hvdplus_compute_ms``, ``hvdplus_codec_ms``, ``hvdplus_exposed_comm_ms``, ``hvdplus_overlapped_comm_ms``,
    ``hvdplus_input_wait_ms``. Two describe the present level: ``hvdplus_level`` is its position in the ladder (0 is
    ``none``), ``hvdplus_ratio`` the gradients' bytes over the bytes that it sends.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        if logs is not None and hasattr(optimizer, "hvdplus"):
            logs.update({f"hvdplus_{name}": value for name, value in optimizer.hvdplus.figures().items()})


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Multiply the learning rate by ``multiplier`` (a number, or a function of the epoch) in a range of epochs.

    Args:
        initial_lr: learning rate that the multiplier refers to.
        multiplier: a factor, or a function from the epoch (a fraction, if not ``staircase``) to a factor.
        start_epoch, end_epoch: first epoch, and the one after the last (None: no end).
        staircase: change once an epoch; else every batch, for which ``steps_per_epoch`` is needed.
        momentum_correction: accepted, without effect: a compiled Keras step holds momentum as a constant, so that
            a correction (Goyal et al., arXiv 1706.02677) during its first batch would stay for ever.
        steps_per_epoch: batches an epoch; None: taken from Keras.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase if callable(multiplier) else True
        self.steps_per_epoch = steps_per_epoch
        self._multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier
        self._epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not self.staircase and self.steps_per_epoch is None:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    "Could not find out the number of steps per epoch. Please pass steps_per_epoch to the "
                    f"{type(self).__name__} constructor."
                )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        if self.staircase and self._active():
            self._adjust(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self.staircase and self._active():
            self._adjust(self._epoch + batch / (self.steps_per_epoch or 1))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _active(self) -> bool:
        return self.start_epoch <= self._epoch and (self.end_epoch is None or self._epoch < self.end_epoch)

    def _adjust(self, epoch: float) -> None:
        self.model.optimizer.learning_rate = self.initial_lr * self._multiplier(epoch)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from ``initial_lr / size`` to ``initial_lr`` over the first epochs (arXiv 1706.02677)."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # One batch ahead, so that every epoch ends on a round number.
            size = collectives.current().transport.size
            epoch += 1.0 / (self.steps_per_epoch or 1)
            return 1.0 / size * (epoch * (size - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and self.end_epoch is not None and epoch == self.end_epoch - 1:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keep the best model seen; give it to rank 0 alone. The path may be set after construction, as Horovod's Spark
    estimators do."""

    def __init__(
        self,
        filepath: str | None = None,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        super().__init__(
            filepath=filepath or "best-model.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            mode=mode,
            save_freq=save_freq,
        )
