"""Keras on TensorFlow: the exchange is part of the step, compiled or not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from hvdplus.adapters.tensorflow.graph import GraphExchange, check_place, heard
from hvdplus.adapters.tensorflow.ops import TensorFlowOps
from hvdplus.adapters.tensorflow.transport import cpu_capability, graph_transport
from hvdplus.adapters.transports.connect import Cpu
from hvdplus.transport import Transport

BINDING = "horovod.tensorflow"
CPU = Cpu(cpu_capability, lambda everyone: None, cpu_capability)
adapt = graph_transport
make_ops = TensorFlowOps
outside_of_traces = tf.init_scope
without_gradients = nullcontext
TRACES = True
"""Whether a step may be compiled, so that both sides of a condition stay in it."""


def check(transport: Transport) -> None:
    """Raise ValueError where applying an optimizer could hang, or cannot be compiled."""
    check_place(transport.size)


def ask(question: Callable[[], Sequence[bool]], count: int) -> list[Any]:
    """``count`` answers that the host gives, once whenever the step runs."""
    told = tf.numpy_function(lambda: np.array(question(), np.bool_), [], tf.bool)
    return list(tf.unstack(tf.ensure_shape(told, [count])))


def when(flag: Any, do: Callable[[], Any]) -> None:
    """Call ``do`` if the flag is true. All ranks have the same flag."""
    either(flag, do, lambda: None)


def either(flag: Any, one: Callable[[], Any], other: Callable[[], Any]) -> None:
    """Call ``one`` if the flag is true, else ``other``. All ranks have the same flag."""

    def branch(do: Callable[[], Any]) -> Callable[[], tf.Tensor]:
        def run() -> tf.Tensor:
            do()
            return tf.constant(0)

        return run

    tf.cond(flag, branch(one), branch(other))


def average(exchange: GraphExchange, variables: Sequence[Any]) -> None:
    """Give variables their mean over all ranks."""
    values = [tf.convert_to_tensor(variable) for variable in variables]
    if not values:
        return
    whole = tf.concat([tf.reshape(tf.cast(value, tf.float32), [-1]) for value in values], 0)
    mean = exchange.sum(whole, f"{exchange.prefix}.state", 1 / exchange.transport.size)
    parts = tf.split(mean, [int(np.prod(value.shape)) for value in values])
    for variable, value, part in zip(variables, values, parts, strict=True):
        variable.assign(tf.cast(tf.reshape(part, value.shape), value.dtype))


class Exchange(GraphExchange):
    """The exchange of Keras variables' gradients."""

    def __init__(
        self, variables: Sequence[Any], transport: Transport, settings: Any, *, accumulates: bool, **keywords: Any
    ) -> None:
        shapes, dtypes = [tuple(v.shape) for v in variables], [str(v.dtype) for v in variables]
        names = [variable.path for variable in variables]
        super().__init__(lambda: variables, names, shapes, dtypes, transport, settings, **keywords)
        self._accumulates = accumulates

    def hear(self, loss: tf.Tensor) -> None:
        """See ``GraphExchange.hear``. A step of several batches has no input time."""
        if self._accumulates:
            self._heard = heard(loss)
        else:
            super().hear(loss)

    def reduce(
        self, grads: Sequence[Any], learning_rate: Any = None, loss_scale: Any = None, applied: Sequence[bool] = ()
    ) -> list[Any]:
        """See ``GraphExchange.reduce``. ``applied`` is not needed: variables that are not applied have no gradient."""
        return super().reduce(grads, learning_rate, loss_scale)

    def _note_skipped(self) -> np.ndarray:
        self._clock.step_ended(time.time())
        return super()._note_skipped()

    def end_step(self, updated: Sequence[Any]) -> None:
        super().end_step([tf.convert_to_tensor(variable) for variable in updated])

    def scales_losses(self, scale: Any) -> None:
        """Nothing to do: ``reduce`` is given the loss scale."""
