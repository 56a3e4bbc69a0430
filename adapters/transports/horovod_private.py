"""Every interface of Horovod that hvdplus relies on and its documentation does not promise: names of the native
libraries, and what elastic jobs are made of. A check says which version broke one."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hvdplus.transport import TransportError

LIBRARIES = {"horovod.torch": "mpi_lib_v2", "horovod.tensorflow": "mpi_lib"}
"""Binding -> beginning of its native library's file name, which tells whether Horovod is built for the framework."""
ELASTIC = ("run_fn", "ObjectState")
"""Names of ``horovod.common.elastic``."""
TORCH_STATES = ("OptimizerStateHandler", "ModelStateHandler", "get_handler_registry", "set_handler_registry")
"""Names of ``horovod.torch.elastic.state``."""


def elastic() -> Any:
    """``horovod.common.elastic``: ``run_fn`` runs a function anew when ranks come or go, ``ObjectState`` is a state.

    Raises:
        TransportError: this Horovod lacks one of the names.
    """
    return _checked("horovod.common.elastic", ELASTIC)


def before_ranks_change(function: Callable[..., Any], prepare: Callable[[], None]) -> Callable[..., Any]:
    """``function``, and ``prepare`` when it is interrupted because ranks come or go.

    All ranks still run then, and all are at the same point. Afterwards they sync in any case, and so save what
    ``prepare`` has changed.
    """
    interrupt = _checked("horovod.common.exceptions", ("HostsUpdatedInterrupt",)).HostsUpdatedInterrupt

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except interrupt as interrupted:
            prepare()
            interrupted.skip_sync = False
            raise

    return call


def internal_error() -> type[Exception]:
    """The exception that ends a sum when a rank is gone."""
    found: type[Exception] = _checked("horovod.common.exceptions", ("HorovodInternalError",)).HorovodInternalError
    return found


def torch_states() -> Any:
    """``horovod.torch.elastic.state``: handlers of what a ``TorchState`` holds, and their registry.

    Raises:
        TransportError: this Horovod lacks one of the names.
    """
    return _checked("horovod.torch.elastic.state", TORCH_STATES)


def _checked(name: str, wanted: tuple[str, ...]) -> ModuleType:
    module = importlib.import_module(name)
    missing = [each for each in wanted if not hasattr(module, each)]
    if missing:
        version = importlib.import_module("horovod").__version__
        raise TransportError(
            f"hvdplus cannot run elastic jobs with Horovod {version}, whose {name} has no {', '.join(missing)}."
        )
    return module
