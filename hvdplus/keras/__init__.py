"""``import hvdplus.keras as hvd``: Horovod for Keras 3, with the same hooks and levels as ``hvdplus.torch``.

What ``horovod.tensorflow.keras`` exports is here under the same names. The parts of stock Horovod that do not work
under Keras 3 (its optimizer trains ranks apart without an error, its callbacks fail) are replaced. Without Horovod, in
a job over mpi4py, the essentials are here too.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from hvdplus.adapters.transports import within
from hvdplus.adapters.transports.connect import INSTALL_HOROVOD, connect, wants_horovod
from hvdplus.adapters.transports.horovod import watched
from hvdplus.agree import NO_JOIN, choose_rhythm
from hvdplus.exchange.checkpoint import say
from hvdplus.settings import Settings
from hvdplus.transport import NeedsHorovod, World

if keras.backend.backend() not in ("tensorflow", "torch"):
    raise ImportError(
        "hvdplus.keras runs on Keras' TensorFlow and PyTorch backends: Horovod has no sums for JAX. Received: "
        f"KERAS_BACKEND={keras.backend.backend()}. Set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch."
    )

from hvdplus.adapters.keras import callbacks, collectives, local
from hvdplus.adapters.keras.optimizer import backend, exchanges, wrap

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer", "backend", "callbacks", "init", "shutdown"]


def init(*arguments: Any, **keywords: Any) -> None:
    """Start the transport; arguments are those of ``horovod.tensorflow.keras.init``. A second call does nothing.

    Rank 0 prints one line: ranks, hosts, transport, collective.

    Raises:
        TransportError: no transport is installed; the message names the command that installs one.
        ValueError: a setting in the environment or the file is wrong.
    """
    if not is_initialized():
        world = connect(backend.BINDING, backend.CPU, *arguments, **keywords)
        collectives.use(world._replace(transport=backend.adapt(world.transport)))


def shutdown() -> None:
    """End the transport."""
    if is_initialized():
        within.end_all()
        _require_world().transport.end()
    collectives.use(None)


def is_initialized() -> bool:
    """Whether ``init`` was called."""
    return collectives.is_initialized()


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = "auto",
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
    settings: Mapping[str, Any] | None = None,
    *,
    local_layers: Sequence[keras.layers.Layer] = (),
    state: Mapping[str, Any] | None = None,
    every: int | str | None = None,
) -> keras.optimizers.Optimizer:
    """Wrap any Keras 3 optimizer so that gradients are averaged over all ranks before each update.

    Args:
        optimizer: the optimizer; the result is an instance of its class and shares its variables. In a
            ``LossScaleOptimizer`` the inner optimizer is wrapped.
        name: accepted.
        device_dense, device_sparse: accepted; TensorFlow places the ops.
        compression: ``auto`` (measure, and compress as much as it takes; the setting of that name may say otherwise),
            a level (``none``, ``fp16``, ``int8``, ``lowrank:4``, ``topk:0.05+int8``; ``hvdplus compressors`` lists
            them), Horovod's ``Compression.none`` / ``Compression.fp16``, another class with Horovod's ``compress`` and
            ``decompress``, or an ``hvdplus.compression.Compressor`` object.
        sparse_as_dense: accepted. IndexedSlices that use few rows have these rows exchanged, exact and uncompressed,
            the others are exchanged dense; both come back dense.
        gradient_predivide_factor: accepted; hvdplus divides before the cast where a narrow type could overflow.
        op: ``Average`` (default) or ``Sum``.
        backward_passes_per_step: passes that accumulate locally before one exchange
            (Keras' own ``gradient_accumulation_steps``).
        average_aggregated_gradients: with several passes, Keras always averages them; False warns.
        num_groups, groups: accepted; hvdplus makes its own groups (buckets).
        process_set: Horovod's, of which this rank is one: only its ranks exchange, such as the copies of one part of a
            model that is split over several ranks. Callbacks and broadcasts still are about all ranks.
        scale_local_gradients: divide the gradients of ``local_layers`` by the number of ranks, as all others are.
        settings: name -> value, over ``HVDPLUS_*`` and over the file that ``HVDPLUS_CONFIG`` names, e.g.
            ``{"dense_steps": 20, "ladder": ["none", "fp16"]}``; ``hvdplus doctor`` lists them.
        local_layers: layers whose gradients stay on their rank.
        state: hvdplus's state in a saved model, to resume from; ``load_model`` passes it.
        every: steps that every rank takes by itself before ranks average what they have come to, through the same
            compression. 1: lock-step, ``auto``: as many as measurements say; default: the setting of that name.
            ``compression="local:8+fp16"`` says both.

    Raises:
        ValueError: wrapped twice, not an optimizer, unknown compression or a wrong setting, or an argument that has no
            meaning here.
        NeedsHorovod: ``process_set`` without Horovod.
        TransportError: ``hvd.init()`` was not called.
    """
    average = check_op(op, gradient_predivide_factor)
    world = world_of(process_set)
    if backward_passes_per_step > 1 and not average_aggregated_gradients:
        warnings.warn(
            "Keras averages over accumulated passes; pass average_aggregated_gradients=True to silence this warning.",
            stacklevel=2,
        )
    rhythm = choose_rhythm(compression, every, Settings.load(settings))
    if rhythm.local:
        if local_layers:
            raise ValueError("With local steps all layers are averaged. Received: local_layers; use every=1.")
        return local.wrap(
            optimizer,
            world,
            every=rhythm.every,
            compression=rhythm.compression,
            settings=settings,
            average=average,
            passes=backward_passes_per_step,
            state=state,
        )
    if state and "local" in state:
        if world.transport.rank == 0:
            say("the checkpoint is of local steps, and nothing of it is for lock-step: pass every= to go on with them.")
        state = None
    return wrap(
        optimizer,
        world,
        compression=rhythm.compression,
        settings=settings,
        passes=backward_passes_per_step,
        average=average,
        local_layers=local_layers,
        scale_local_gradients=scale_local_gradients,
        state=state,
    )


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = "auto",
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: Any = None,
    local_layers: keras.layers.Layer | Sequence[keras.layers.Layer] | None = None,
    scale_local_gradients: bool = True,
    settings: Mapping[str, Any] | None = None,
) -> keras.optimizers.Optimizer:
    """``DistributedOptimizer`` that leaves the gradients of some layers on their rank, because every rank has its own.

    Args:
        local_layers: these layers, or one layer; None: all gradients are exchanged.

    Other arguments and errors are those of ``DistributedOptimizer``. Do not broadcast these layers either:
    ``callbacks.BroadcastGlobalVariablesCallback(0, local_variables=layer.variables)``.
    """
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers or [])
    return DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        settings=settings,
        local_layers=layers,
    )


def world_of(process_set: Any) -> World:
    """The ranks that exchange: those of a Horovod process set, or all.

    Raises:
        ValueError: this rank is not one of them.
        NeedsHorovod: the job runs without Horovod.
    """
    return within.of_process_set(backend.BINDING, backend.CPU, _require_world(), process_set)


def check_op(op: Any, gradient_predivide_factor: float) -> bool:
    """Whether gradients are averaged (else added up). Raises ValueError for arguments that hvdplus cannot serve."""
    average, sum_ = __getattr__("Average"), __getattr__("Sum")
    op = average if op is None else op
    if op not in (average, sum_):
        raise ValueError(f"op currently only supports Average and Sum. Received: op={op!r}")
    if gradient_predivide_factor != 1.0 and op != average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    return bool(op == average)


def broadcast_global_variables(root_rank: int, model: keras.Model | None = None) -> None:
    """Overwrite a model's (and its optimizer's) variables with rank ``root_rank``'s.

    Keras 3 has no list of global variables: pass the model, or use ``callbacks.BroadcastGlobalVariablesCallback``.
    """
    if model is None:
        raise ValueError(
            "Keras 3 keeps no list of all variables: call broadcast_global_variables(root_rank, model), or use "
            "hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank)."
        )
    _require_world()
    collectives.broadcast_model(model, root_rank)


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = "auto",
    legacy_opts: bool = False,
    settings: Mapping[str, Any] | None = None,
    every: int | str | None = None,
    op: Any = None,
    process_set: Any = None,
) -> keras.Model:
    """Load a Keras model and wrap its optimizer, so that training resumes where it was; on every rank.

    A ``.keras`` file saved with a ``DistributedOptimizer`` holds contexts, the controller's state, and the residuals of
    the rank that saved it (see ``optimizer.consolidate_state_dict``).

    Arguments are Horovod's; ``settings``, ``every``, ``op`` and ``process_set`` are those of ``DistributedOptimizer``:
    they are not in the file. ``legacy_opts`` must stay False: Keras 3 has no legacy optimizers. A
    ``PartialDistributedOptimizer`` does not come back: ``keras.models.load_model``, and wrap its optimizer.
    """
    if legacy_opts:
        raise ValueError("Keras 3 has no legacy optimizers. Received: legacy_opts=True")
    objects = {cls.__name__: cls for cls in custom_optimizers or []} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        state = collectives.saved_state(filepath)
        model.optimizer = DistributedOptimizer(
            model.optimizer,
            compression=compression,
            settings=settings,
            every=every,
            op=op,
            process_set=process_set,
            state=state,
        )
    return model


def identical(values: keras.Model | Iterable[Any]) -> bool:
    """Whether a model's variables (or the given arrays) are equal on all ranks, bit for bit. Every rank calls it.

    If they are not, rank 0 prints the first variable that differs, and the ranks.

    The states of random generators (dropout) do not count: they differ on purpose. Running statistics of batch
    normalisation count, and are each rank's own, as with Horovod: give ``model.trainable_variables`` to leave them out.
    """
    if isinstance(values, keras.Model):
        values = collectives.shared_variables(values)
    return collectives.identical(list(values), _require_world())


def report(optimizer: Any, png: str | None = None, html: str | None = None, **facts: Any) -> dict[str, Any]:
    """Close the run log; on rank 0, print the report, and draw it to ``png`` and ``html``.

    Args:
        optimizer: what ``DistributedOptimizer`` returned.
        png: file for the picture; None: no picture.
        html: file for the page, which any browser opens; None: no page.
        facts: values for the log's last record (``accuracy=0.98``).

    Returns:
        level, steps, and median times in milliseconds (``step_ms``, ``compute_ms``, ``exposed_comm_ms``, ...), and the
        job's ranks and transport.
    """
    ours = getattr(optimizer, "inner_optimizer", optimizer)
    from hvdplus.log.report import report as end_with_report  # words and axes: training needs neither

    return end_with_report(ours.hvdplus, ours._hvdplus.world, png, html, facts)


def _require_world() -> World:
    return collectives.current()


def with_horovod() -> bool:
    """Whether the job runs, or would run, on Horovod."""
    if is_initialized():
        return _require_world().transport.name.startswith("horovod")
    return wants_horovod(backend.BINDING)


def join(*arguments: Any, **keywords: Any) -> Any:
    """As Horovod's, where no gradients are exchanged.

    Raises:
        RuntimeError: an optimizer exchanges gradients with all ranks.
    """
    if any(not exchange.idle for exchange in exchanges()):
        raise RuntimeError(NO_JOIN)
    return __getattr__("join")(*arguments, **keywords)


def __getattr__(name: str) -> Any:
    """Everything else is Horovod's, or, in a job without Horovod, ours."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "elastic":
        return importlib.import_module("hvdplus.keras.elastic")
    if with_horovod() and (backend.BINDING == "horovod.tensorflow" or not hasattr(collectives.Essentials, name)):
        return watched(name, collectives.from_horovod(name, backend.BINDING), collectives._world)
    if hasattr(collectives.Essentials, name):
        return getattr(collectives.Essentials(_require_world()), name)
    raise NeedsHorovod(f"hvd.{name} needs Horovod, and this job runs without it. {INSTALL_HOROVOD}.")
