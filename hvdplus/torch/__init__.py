"""``import hvdplus.torch as hvd``: ``horovod.torch`` with gradients that are compressed as much as it takes.

Everything that ``horovod.torch`` exports is here; what hvdplus does not change is Horovod's own. Without Horovod, in a
job over ``torch.distributed`` or mpi4py, the essentials are here too, and the rest says that it needs Horovod.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hvdplus.adapters.torch import collectives as _functions
from hvdplus.adapters.torch import local, private
from hvdplus.adapters.torch.collectives import Collectives
from hvdplus.adapters.torch.cpu import CPU
from hvdplus.adapters.torch.optimizer import check_groups, refuses_join, wrap
from hvdplus.adapters.transports import window, within
from hvdplus.adapters.transports.connect import INSTALL_HOROVOD, connect, wants_horovod
from hvdplus.adapters.transports.horovod import watched
from hvdplus.agree import NO_JOIN, choose_rhythm, say_if_nothing_was_wrapped
from hvdplus.agree import Compression as WithoutHorovods
from hvdplus.settings import Settings
from hvdplus.transport import NeedsHorovod, TransportError, World

_BINDING = "horovod.torch"
JOIN_SECONDS = 20.0
"""How long a rank whose ``join`` would be refused waits for the others."""
_world: World | None = None
_collectives: Collectives | None = None


def init(*arguments: Any, **keywords: Any) -> None:
    """Start the transport; arguments are those of ``horovod.torch.init``. A second call does nothing.

    Rank 0 prints one line: ranks, hosts, transport, collective.

    Raises:
        TransportError: no transport is installed; the message names the command that installs one.
        ValueError: a setting in the environment or the file is wrong.
    """
    global _world, _collectives
    if _world is None:
        _world = connect(_BINDING, CPU, *arguments, **keywords)
        for sentence in private.check():  # not before: it runs a kernel, which fixes the CPU capability
            print(f"hvdplus: {sentence}", file=sys.stderr, flush=True)
        if not _world.transport.name.startswith("horovod"):
            _collectives = Collectives(_world)


def shutdown() -> None:
    """End the transport."""
    global _world, _collectives
    if _world is not None:
        window.end_all()
        within.end_all()
        _world.transport.end()
    _world = _collectives = None


def is_initialized() -> bool:
    """Whether ``init`` was called."""
    return _world is not None


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = "auto",
    backward_passes_per_step: int = 1,
    op: Any = None,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
    settings: Mapping[str, Any] | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    every: int | str | None = None,
    staleness: int | str | None = None,
    process_group: Any = None,
) -> Any:
    """Wrap ``optimizer`` so that ``step`` first averages gradients over all ranks.

    Args:
        optimizer: any ``torch.optim.Optimizer``; the result is an instance of its class and shares its state.
        named_parameters: ``model.named_parameters()``; must name every parameter of the optimizer.
        compression: ``auto`` (measure, and compress as much as it takes; the setting of that name may say otherwise),
            a level (``none``, ``fp16``, ``int8``, ``lowrank:4``, ``topk:0.05+int8``; ``hvdplus compressors`` lists
            them), Horovod's ``Compression.none`` / ``Compression.fp16``, another class with Horovod's ``compress`` and
            ``decompress``, or an ``hvdplus.compression.Compressor`` object.
        backward_passes_per_step: backward passes that accumulate locally before one exchange.
        op: ``Average`` (default) or ``Sum``; ``Adasum`` runs on Horovod's own optimizer, with Horovod's compression.
        gradient_predivide_factor: accepted; hvdplus divides before the cast where a narrow type could overflow.
        num_groups, groups: accepted; hvdplus makes its own groups (buckets).
        sparse_as_dense: sparse gradients are exchanged dense. Otherwise, for gradients that are sparse in the first
            step, every step in which ranks use few rows exchanges these rows alone, exact and uncompressed, and any
            other step exchanges them dense. All come back sparse.
        process_set: Horovod's, of which this rank is one: only its ranks exchange, such as the copies of one part of a
            model that is split over several ranks. Horovod numbers collectives without a name by the calls of each
            process: give ``hvd.allreduce`` and its like a ``name=`` if sets exchange unequal numbers of tensors.
        settings: name -> value, over ``HVDPLUS_*`` and over the file that ``HVDPLUS_CONFIG`` names, e.g.
            ``{"dense_steps": 20, "ladder": ["none", "fp16"]}``; ``hvdplus doctor`` lists them.
        grad_scaler: the script's ``torch.amp.GradScaler``. Levels with a residual need the scale of losses; without
            this argument they are left out as soon as a scaler is used. Call in Horovod's order: ``synchronize``,
            ``scaler.unscale_``, then ``scaler.step`` inside ``skip_synchronize``.
        every: steps that every rank takes by itself before ranks average what they have come to, through the same
            compression. 1: lock-step, ``auto``: as many as measurements say; default: the setting of that name.
            ``compression="local:8+fp16"`` says both.
        staleness: exchanges by which a rank may be ahead of the slowest one; ``any``: nobody waits for anybody. Ranks
            then add to a memory that they share, by MPI; default: the setting of that name, 0: all exchange together.
        process_group: as ``process_set``, of ``torch.distributed``, over which its ranks then exchange.

    Raises:
        ValueError: wrapped twice, bad names, types, arguments or settings, another model on another rank.
        NeedsHorovod: ``process_set`` without Horovod.
        TransportError: ``hvd.init()`` was not called.
    """
    world = _require_world()
    average, sum_ = __getattr__("Average"), __getattr__("Sum")
    op = average if op is None else op
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    check_groups(groups)
    if within.is_part(process_set) and process_group is not None:
        raise ValueError("Give process_set= (Horovod's) or process_group= (torch.distributed's). Received: both")
    if op not in (average, sum_):
        return _horovods_own(
            optimizer,
            named_parameters,
            compression=compression if inspect.isclass(compression) else None,
            backward_passes_per_step=backward_passes_per_step,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        )
    if process_group is not None:
        world = within.of_process_group(CPU, process_group)
    else:
        world = within.of_process_set(_BINDING, CPU, world, process_set)
    if gradient_predivide_factor != 1.0 and op != average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if staleness is not None:
        settings = {**(settings or {}), "staleness": staleness}
    rhythm = choose_rhythm(compression, every, Settings.load(settings))
    if rhythm.local:
        return local.wrap(
            optimizer,
            named_parameters,
            world,
            every=rhythm.every,
            compression=rhythm.compression,
            settings=settings,
            average=op == average,
            passes=backward_passes_per_step,
        )
    wrapped: Any = wrap(
        optimizer,
        named_parameters,
        world,
        compression=rhythm.compression,
        settings=settings,
        passes=backward_passes_per_step,
        average=op == average,
        sparse_as_dense=sparse_as_dense,
        grad_scaler=grad_scaler,
    )
    # Scripts read these from Horovod's.
    wrapped.op, wrapped.gradient_predivide_factor = op, gradient_predivide_factor
    wrapped.sparse_as_dense = sparse_as_dense
    wrapped.process_set = __getattr__("global_process_set") if process_set is None and _with_horovod() else process_set
    return wrapped


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, model: Any = None) -> None:
    """Load rank ``root_rank``'s optimizer state on every rank. ``model``: tells which gradients are sparse.

    If an optimizer has no state yet, Horovod's own function takes a step with it, which would exchange gradients. This
    function takes no step, but makes missing gradients zeros, as Horovod's does.
    """
    Collectives(_require_world()).broadcast_optimizer_state(optimizer, root_rank, model)


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite tensors with rank ``root_rank``'s, of any type.

    Args:
        params: a ``state_dict``, or a list of tensors or (name, tensor) pairs.
    """
    if not _with_horovod() or not isinstance(params, dict | list):
        __getattr__("broadcast_parameters")(params, root_rank)
        return
    pairs = sorted(params.items()) if isinstance(params, dict) else params
    pairs = [entry if isinstance(entry, tuple) else (None, entry) for entry in pairs]
    names = [name for name, _ in pairs]
    horovods = _horovods("broadcast_parameters")
    _functions.broadcast_carried(
        [tensor for _, tensor in pairs],
        lambda carriers: horovods(list(zip(names, carriers, strict=True)), root_rank),
    )


def broadcast_(tensor: torch.Tensor, root_rank: int, *arguments: Any, **keywords: Any) -> torch.Tensor:
    """As Horovod's, for tensors of any type."""
    if _with_horovod() and _functions.needs_carrier(tensor):
        broadcast = _horovods("broadcast_")
        _functions.broadcast_carried([tensor], lambda one: broadcast(one[0], root_rank, *arguments, **keywords))
        return tensor
    return __getattr__("broadcast_")(tensor, root_rank, *arguments, **keywords)  # type: ignore[no-any-return]


def broadcast(tensor: torch.Tensor, root_rank: int, *arguments: Any, **keywords: Any) -> torch.Tensor:
    """As Horovod's, also for types that Horovod refuses, if the tensor needs no gradient."""
    if _with_horovod() and _functions.needs_carrier(tensor) and not tensor.requires_grad:
        return broadcast_(tensor.clone(), root_rank, *arguments, **keywords)
    return __getattr__("broadcast")(tensor, root_rank, *arguments, **keywords)  # type: ignore[no-any-return]


def identical(values: torch.nn.Module | Iterable[Any]) -> bool:
    """Whether a model's parameters and buffers (or the given tensors) are equal on all ranks, bit for bit.

    Every rank has to call it. ``values`` may also be a state dict or (name, tensor) pairs. If ranks differ, rank 0
    prints the first tensor that does, and the ranks. Running statistics of batch normalisation are buffers, and each
    rank's own, as with Horovod: give ``model.named_parameters()`` to leave them out.
    """
    return _functions.identical(values, _require_world())


def report(optimizer: Any, png: str | None = None, html: str | None = None, **facts: Any) -> dict[str, Any]:
    """Close the run log; on rank 0, print the report, and draw it to ``png`` and ``html``.

    Args:
        optimizer: what ``DistributedOptimizer`` or ``ddp.attach`` returned.
        png: file for the picture; None: no picture.
        html: file for the page, which any browser opens; None: no page.
        facts: values for the log's last record (``accuracy=0.98``).

    Returns:
        level, steps, and median times in milliseconds (``step_ms``, ``compute_ms``, ``exposed_comm_ms``, ...), and the
        job's ranks and transport.
    """
    from hvdplus.log.report import report as end_with_report  # words and axes: training needs neither

    own = optimizer.facts() if hasattr(optimizer, "facts") else {}
    world = getattr(optimizer, "_world", None) or _require_world()
    return end_with_report(optimizer.hvdplus, world, png, html, {**own, **facts})


def _require_world() -> World:
    if _world is None:
        raise TransportError("hvdplus has not been initialized; call hvd.init() first.")
    return _world


def _horovods_own(optimizer: Any, named_parameters: Any, **keywords: Any) -> Any:
    """Horovod's own optimizer, for ops that hvdplus does not compress."""
    if not _with_horovod():
        raise NeedsHorovod(f"Ops other than Average and Sum need Horovod. {INSTALL_HOROVOD}.")
    import horovod.torch

    ops = [getattr(horovod.torch, name) for name in ("Average", "Sum", "Adasum")]
    if keywords["op"] not in ops:
        raise ValueError(f"op is one of hvd.Average, hvd.Sum and hvd.Adasum. Received: {keywords['op']!r}")
    warnings.warn(
        "hvdplus does not compress with this op: Horovod's own DistributedOptimizer is used, with Horovod's own "
        "compression, and without what hvdplus adds (settings, reports, `optimizer.record`, ...).",
        stacklevel=3,
    )
    atexit.unregister(say_if_nothing_was_wrapped)
    given = {name: value for name, value in keywords.items() if value is not None}
    return horovod.torch.DistributedOptimizer(optimizer, named_parameters, **given)


def _ours(name: str) -> Any:
    """Our function of that name. An argument that only Horovod's function has raises ``NeedsHorovod``."""
    function = getattr(_collectives, name)
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            signature.bind(*arguments, **keywords)
        except TypeError as error:
            has = f"Without Horovod it has {signature}, the rest needs Horovod"
            raise NeedsHorovod(f"hvd.{name}: {error}. {has}. {INSTALL_HOROVOD}.") from None
        return function(*arguments, **keywords)

    return call


def _with_horovod() -> bool:
    return _world.transport.name.startswith("horovod") if _world else wants_horovod(_BINDING)


def join(*arguments: Any, **keywords: Any) -> Any:
    """As Horovod's, for a rank that has run out of data.

    Raises:
        RuntimeError: an optimizer runs at another level than a fixed ``none``, and no other rank has joined. (A rank on
            which such an optimizer waits for the garbage collector may join after the others.)
    """
    if refuses_join() and not _others_have_joined():
        raise RuntimeError(NO_JOIN)
    return __getattr__("join")(*arguments, **keywords)


def _others_have_joined() -> bool:
    """Whether another rank is in Horovod's ``join``, which adds zeros to the sums of ranks that are not."""
    if not _with_horovod():
        return False
    handle = _horovods("allreduce_async")(torch.ones(1, device="cpu"), name="hvdplus.join", op=_horovods("Sum"))
    deadline = time.monotonic() + JOIN_SECONDS
    while not _horovods("poll")(handle):
        if time.monotonic() > deadline:  # the others are in their next step, and wait for this rank there
            return False
        time.sleep(0.001)
    return bool(_horovods("synchronize")(handle).item() < _require_world().transport.size)


def _horovods(name: str) -> Any:
    return getattr(importlib.import_module("horovod.torch"), name)


def __getattr__(name: str) -> Any:
    """Everything else is Horovod's, or, in a job without Horovod, ours."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name in ("ddp", "elastic"):
        return importlib.import_module(f"hvdplus.torch.{name}")
    if _with_horovod():
        return watched(name, _horovods(name), _world)
    if name in ("Average", "Sum"):
        return name
    if name == "Compression":
        return WithoutHorovods
    if hasattr(Collectives, name):
        _require_world()
        return _ours(name)
    raise NeedsHorovod(f"hvd.{name} needs Horovod, and this job runs without it. {INSTALL_HOROVOD}.")
