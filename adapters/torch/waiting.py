"""When a step's input has arrived: before the forward pass of a model."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from hvdplus.adapters.torch import private
from hvdplus.adapters.torch.hooks import HookedExchange


class InputWatch:
    """Tells an exchange's meter when its rank no longer waits for input."""

    def __init__(self) -> None:
        self._hook: Any = None

    def begin(self, exchange: HookedExchange) -> None:
        """From now until any model's next forward pass with gradients, this rank waits for input."""
        this = weakref.ref(exchange)  # PyTorch holds the hook, and would hold an optimizer that the script has dropped
        process = os.getpid()

        def began(module: torch.nn.Module, arguments: Any) -> None:
            # A loader's transforms may be modules, and its workers are processes in which no device may be touched.
            if os.getpid() != process or next(module.parameters(), None) is None:
                return
            if not torch.is_grad_enabled():  # the script validates
                return
            handle.remove()
            waiting = this()
            if waiting is not None:
                waiting.meter.input_arrived()

        if self._hook is not None:
            self._hook.remove()  # no model ran since the last step
            self._hook = None
        # A hook on all modules breaks graphs that are compiled, and `torch.compile` warns of it.
        if private.compiles():
            return
        handle = self._hook = register_module_forward_pre_hook(began)
