"""``import hvdplus.tensorflow as hvd``: ``horovod.tensorflow`` for custom training loops, with the same levels.

``DistributedGradientTape`` exchanges gradients; ``DistributedOptimizer``, ``init`` and all else that hvdplus changes
are those of ``hvdplus.keras``, and the rest is Horovod's own.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import hvdplus.keras as front
from hvdplus.adapters.keras import collectives
from hvdplus.keras import DistributedOptimizer, identical, init, is_initialized, load_model, report

if front.backend.BINDING != "horovod.tensorflow":
    raise ImportError(
        "hvdplus.tensorflow runs on Keras' TensorFlow backend. Received: "
        f"KERAS_BACKEND={keras.backend.backend()}. Set KERAS_BACKEND=tensorflow."
    )

from hvdplus.adapters.tensorflow import tape as _tape
from hvdplus.adapters.transports.horovod import watched
from hvdplus.agree import NO_JOIN

__all__ = [
    "DistributedGradientTape", "DistributedOptimizer", "PartialDistributedGradientTape", "broadcast_variables",
    "identical", "init", "is_initialized", "join", "load_model", "report", "shutdown",
]  # fmt: skip


def shutdown() -> None:
    """End the transport."""
    _tape.forget()
    front.shutdown()


def join(*arguments: Any, **keywords: Any) -> Any:
    """As Horovod's, where no gradients are exchanged.

    Raises:
        RuntimeError: a tape or an optimizer exchanges gradients with all ranks.
    """
    gc.collect()  # exchanges whose variables the script has dropped need no other ranks
    if _tape._exchanges:
        raise RuntimeError(NO_JOIN)
    return front.join(*arguments, **keywords)


def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = "auto",
    sparse_as_dense: bool = False,
    op: Any = None,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
    settings: Mapping[str, Any] | None = None,
) -> tf.GradientTape:
    """Wrap a tape so that ``gradient`` returns means over all ranks.

    The next call of ``gradient`` finds out whether the step was taken: a source has changed since. A step that a script
    skips loses nothing. A step that changes no weight (a learning rate of 0) counts as skipped; a script that adds up
    several gradients of the same sources before one step should use ``none`` or ``fp16``, which keep no residual.

    Args:
        gradtape: the tape, before or after recording.
        compression, sparse_as_dense, op, gradient_predivide_factor, settings: as for ``DistributedOptimizer``.
        device_dense, device_sparse, num_groups, groups: accepted; TensorFlow places ops, hvdplus makes its own groups.
        process_set: as for ``DistributedOptimizer``.
        scale_local_gradients: divide gradients of local sources (``tape.register_local_source``) by the number of
            ranks, as all others are.

    Raises:
        ValueError: wrapped twice, not a tape, an argument that has no meaning here. The call of ``gradient`` raises it
            for an unknown compression, a wrong setting, or other sources on another rank.
        TransportError: ``hvd.init()`` was not called.
    """
    average = front.check_op(op, gradient_predivide_factor)
    world = front.world_of(process_set)
    return _tape.wrap(
        gradtape,
        world,
        compression=compression,
        settings=settings,
        average=average,
        scale_local_gradients=scale_local_gradients,
    )


def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    *arguments: Any,
    local_layers: keras.layers.Layer | Sequence[keras.layers.Layer] | None = None,
    **keywords: Any,
) -> tf.GradientTape:
    """``DistributedGradientTape`` that leaves the gradients of ``local_layers`` on their rank; other arguments and
    errors are the same."""
    tape = DistributedGradientTape(gradtape, *arguments, **keywords)
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers or [])
    for layer in layers:
        for variable in layer.trainable_variables:
            tape.register_local_source(variable)
    return tape


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> Any:
    """Overwrite variables, TensorFlow's or Keras', with rank ``root_rank``'s. In a graph it is Horovod's own.

    Raises:
        ValueError: no such rank, or the ranks' variables differ in number or shape.
    """
    if tf.executing_eagerly():
        return collectives.broadcast_variables(list(variables), root_rank)
    return _horovods("broadcast_variables")([getattr(v, "_value", v) for v in variables], root_rank)


def _horovods(name: str) -> Any:
    return getattr(importlib.import_module("horovod.tensorflow"), name)


def __getattr__(name: str) -> Any:
    """Everything else is Horovod's, or, in a job without Horovod, ours."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "elastic":
        return front.elastic
    return watched(name, _horovods(name), collectives._world) if front.with_horovod() else front.__getattr__(name)
