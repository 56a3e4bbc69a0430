"""Every private interface of Keras that hvdplus relies on, with a check that says which version of Keras broke one.

Keras 3 has no public place between an optimizer's gradients and its update. ``Optimizer.apply`` is public, but the
list of variables, clipping and accumulation are private.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

OPTIMIZER = {
    "_get_variable_index": "finds a variable's place in the optimizer",
    "_check_variables_are_known": "refuses variables that the optimizer was not built for",
    "_clip_gradients": "is overridden, so that accumulated gradients are clipped after their exchange",
    "_backend_update_step": "is overridden, as the last step before weights change",
}
"""Methods of ``keras.optimizers.Optimizer`` -> their use."""
SCALER = {"_stateful_handle_non_finite_grads": "lowers the loss scale"}
"""Methods of ``keras.optimizers.LossScaleOptimizer`` -> their use."""


def trainable_variables(optimizer: Any) -> list[Any]:
    """The variables that an optimizer was built for, in its order."""
    return list(optimizer._trainable_variables)


def handle_non_finite(scaler: Any) -> None:
    """Let a ``LossScaleOptimizer`` do what follows a step whose gradients are not finite."""
    scaler._stateful_handle_non_finite_grads()


def missing(kind: type, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that are no methods of a class."""
    return [name for name in names if not callable(getattr(kind, name, None))]


def check() -> None:
    """Raise ImportError if this Keras lacks an interface: ranks would train apart.

    Raises:
        ImportError: the message names the version, the interface and its use.
    """
    lost = {name: OPTIMIZER[name] for name in missing(keras.optimizers.Optimizer, list(OPTIMIZER))}
    lost |= {name: SCALER[name] for name in missing(keras.optimizers.LossScaleOptimizer, list(SCALER))}
    if not hasattr(keras.optimizers.SGD(), "_trainable_variables"):
        lost["_trainable_variables"] = "lists the variables that an optimizer was built for"
    if lost:
        uses = "; ".join(f"{name}, which {use}" for name, use in lost.items())
        raise ImportError(f"hvdplus does not work with Keras {keras.__version__}, whose optimizers have no {uses}.")


def check_updated(updated: bool) -> None:
    """Raise RuntimeError unless ``updated``: ``Optimizer.apply`` has called ``_backend_update_step``."""
    if not updated:
        raise RuntimeError(
            f"hvdplus does not work with Keras {keras.__version__}: Optimizer.apply() no longer calls "
            "_backend_update_step(), so that the end of a step goes unnoticed."
        )
