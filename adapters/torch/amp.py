"""``torch.amp.GradScaler`` with a ``DistributedOptimizer``: the scaler looks at gradients after their exchange."""

from __future__ import annotations

import torch

from hvdplus.adapters.torch.hooks import HookedExchange


def scaler_says_skip(optimizer: torch.optim.Optimizer, exchange: HookedExchange, synchronized: bool) -> bool:
    """Whether the scaler found infinities, so that the step is skipped. Where it leaves unscaling to the optimizer,
    gradients are unscaled here.

    Args:
        synchronized: the script has called ``synchronize``.

    Raises:
        RuntimeError: the scaler looked at this rank's own gradients, so that ranks would decide and scale differently.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return False
    grad_scale = getattr(optimizer, "grad_scale", None)
    if not exchange.idle and (grad_scale is not None or not synchronized):
        raise RuntimeError(
            "GradScaler has to look at gradients after their exchange. Call optimizer.synchronize() first, then "
            "scaler.unscale_(optimizer), then `with optimizer.skip_synchronize(): scaler.step(optimizer)`."
        )
    if exchange.get_loss_scale is None:  # gradients arrive scaled, by an unknown factor: a residual would mix units
        exchange.leave_out_residuals()
    if grad_scale is not None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.div_(grad_scale)
    return bool(found_inf)
