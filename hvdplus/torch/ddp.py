"""``hvdplus.torch.ddp.attach``: hvdplus inside PyTorch's own ``DistributedDataParallel``.

::

    model = DistributedDataParallel(model)
    hvdplus.torch.ddp.attach(model, optimizer)

The training loop stays as it is: ``no_sync``, gradient clipping, schedulers and compiled models work as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hvdplus.adapters.torch.cpu import CPU
from hvdplus.adapters.torch.ddp import Attached
from hvdplus.adapters.torch.ddp import attach as _attach
from hvdplus.adapters.transports.within import of_process_group

__all__ = ["Attached", "attach"]


def attach(
    model: Any,
    optimizer: Any,
    compression: Any = "auto",
    settings: Mapping[str, Any] | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> Attached:
    """Let hvdplus carry the gradients of a ``DistributedDataParallel`` model. Every rank of its process group calls it,
    before the first step.

    Args:
        model: a ``DistributedDataParallel``, without another communication hook.
        optimizer: the optimizer of its parameters, or a list of several that step together; whatever wraps one under
            the name ``optimizer`` will do, too. It stays as it is: only the end of its steps is noticed.
        compression: as of ``hvd.DistributedOptimizer``: ``auto``, or a level such as ``fp16`` or ``lowrank:8+fp16``.
        settings: name -> value, over ``HVDPLUS_*`` and the file that ``HVDPLUS_CONFIG`` names.
        grad_scaler: the script's ``torch.amp.GradScaler``. Levels with a residual need the scale of losses; without
            this argument they are left out when a scaler is found.

    Returns:
        for ``hvdplus.torch.report``, ``record(loss)``, and checkpoints (``state_dict``, ``load_state_dict``).

    Raises:
        ValueError: not such a model or optimizer, a wrong level or setting, another model on another rank.
        TransportError: ``torch.distributed`` has not been initialized.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            "attach wants a DistributedDataParallel model (FSDP and its like exchange gradients themselves). Received: "
            f"{type(model).__name__}"
        )
    if getattr(model, "_use_python_reducer", False):
        raise ValueError(
            "attach wants DistributedDataParallel's own reducer, which hands over buckets. Received: "
            "torch._dynamo.config.optimize_ddp = 'python_reducer'"
        )
    optimizers = [getattr(one, "optimizer", one) for one in (optimizer if _several(optimizer) else [optimizer])]
    odd = next((one for one in optimizers if not isinstance(one, torch.optim.Optimizer)), None)
    if odd is not None or not optimizers:
        raise ValueError(f"attach wants the model's torch.optim.Optimizer. Received: {type(odd or optimizer).__name__}")
    if any(hasattr(one, "hvdplus") for one in optimizers):
        raise ValueError(
            "This optimizer is a DistributedOptimizer already, and would average twice. Give the bare one."
        )
    world = of_process_group(CPU, model.process_group)
    return _attach(model, optimizers, world, compression=compression, settings=settings, grad_scaler=grad_scaler)


def _several(optimizer: Any) -> bool:
    return isinstance(optimizer, Iterable) and not isinstance(optimizer, torch.optim.Optimizer)
