"""Horovod's Keras functions: its own where they work, ours where Keras 3 broke them or Horovod is missing."""

from __future__ import annotations

import hashlib
import importlib
import io
import zipfile
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdplus.agree import Compression, same_bytes
from hvdplus.exchange import checkpoint
from hvdplus.transport import TransportError, World, broadcast_each, broadcast_object, check_root

_world: World | None = None


def use(world: World | None) -> None:
    """Set the world that callbacks and functions use; None: there is none."""
    global _world
    _world = world


def current() -> World:
    """The world that ``hvd.init()`` made.

    Raises:
        TransportError: there is none yet.
    """
    if _world is None:
        raise TransportError("hvdplus has not been initialized; call hvd.init() first.")
    return _world


def is_initialized() -> bool:
    """Whether ``hvd.init()`` has made a world."""
    return _world is not None


def from_horovod(name: str, binding: str) -> Any:
    """Horovod's object of that name. Raises AttributeError if it has none."""
    for module in ("horovod.tensorflow.keras", binding) if binding == "horovod.tensorflow" else (binding,):
        found = getattr(importlib.import_module(module), name, None)
        if found is not None:
            return found
    raise AttributeError(f"module 'hvdplus.keras' has no attribute {name!r}: Horovod has none of that name either")


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Overwrite Keras variables with rank ``root_rank``'s. Every rank passes the same variables in the same order.

    Raises:
        ValueError: no such rank, or the ranks' variables differ in number or shape.
    """
    world = current()
    check_root(world.transport, root_rank)
    shapes = [tuple(variable.shape) for variable in variables]
    what = f"broadcast of variables from rank {root_rank}"
    for rank, theirs in enumerate(world.transport.gather_objects(shapes, what)):
        if theirs != shapes:
            raise ValueError(
                f"Variables to broadcast differ between ranks {world.transport.rank} and {rank}: "
                f"{len(shapes)} against {len(theirs)}, shapes {shapes} against {theirs}"
            )
    values = (np.asarray(variable) for variable in variables)
    # As Python objects, which every transport gathers: this happens once a run.
    for variable, value in zip(variables, broadcast_each(world.transport, values, root_rank, what), strict=True):
        if world.transport.rank != root_rank:
            variable.assign(value)


def shared_variables(model: keras.Model) -> list[Any]:
    """A model's variables but the states of its random generators: every rank draws its own dropout masks."""
    return [v for v in model.variables if v.path.rsplit("/", 1)[-1] != "seed_generator_state"]


def broadcast_model(model: keras.Model, root_rank: int, local_variables: Sequence[Any] = ()) -> None:
    """Overwrite a model's variables, and its optimizer's, with rank ``root_rank``'s, but for ``local_variables``."""
    optimizer = getattr(model, "optimizer", None)
    local = {id(v) for v in local_variables}
    variables = [v for v in shared_variables(model) if id(v) not in local]
    known = {id(v) for v in model.variables}
    if optimizer is not None:
        variables += [v for v in optimizer.variables if id(v) not in known]
    inner: Any = getattr(optimizer, "inner_optimizer", optimizer)
    takes_local_steps = hasattr(inner, "follow_variables")
    if takes_local_steps:
        variables += inner.outer_variables
    broadcast_variables(variables, root_rank)
    if takes_local_steps:
        inner.follow_variables(lambda rhythm: broadcast_object(current().transport, rhythm, root_rank, "a rhythm"))


def identical(values: Sequence[Any], world: World) -> bool:
    """Whether variables or arrays, in order, are bit-identical on all ranks; rank 0 prints the first that differs."""
    digests = []
    for place, value in enumerate(values):
        array = np.asarray(value)
        described = f"{getattr(value, 'path', f'array {place}')} ({array.dtype.name} {array.shape})"
        digests.append((described, hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()))
    return same_bytes(digests, world)


def saved_state(path: Any) -> dict[str, Any] | None:
    """hvdplus's state in a saved ``.keras`` model; None: it has none, or the file has another format.

    Raises:
        ValueError: the file is damaged.
    """
    if not zipfile.is_zipfile(path):
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] == checkpoint.FILE]
            return checkpoint.read(io.BytesIO(archive.read(names[0]))) if names else None
    except checkpoint.UNREADABLE as error:
        raise ValueError(f"{path}: {error}") from error


class Essentials:
    """The essentials of ``horovod.tensorflow.keras`` over any transport and any backend."""

    Average = "Average"
    Sum = "Sum"
    Compression = Compression

    def __init__(self, world: World) -> None:
        self._world = world

    def rank(self) -> int:
        return self._world.transport.rank

    def size(self) -> int:
        return self._world.transport.size

    def local_rank(self) -> int:
        return self._world.transport.local_rank

    def local_size(self) -> int:
        return self._world.transport.local_size

    def cross_rank(self) -> int:
        return self._world.cross_rank

    def cross_size(self) -> int:
        return len(self._world.hosts)

    def allreduce(self, value: Any, name: Any = None, average: Any = None, op: Any = None) -> Any:
        """Mean (default) or sum of a tensor-compatible value over ranks."""
        if op not in (None, "Average", "Sum"):
            raise TransportError(f"Without Horovod, op is Average or Sum. Received: op={op!r}")
        mine = np.asarray(value)
        summed = op == "Sum" or (op is None and average is False)
        what = f"{_call('allreduce', name)} ({'Sum' if summed else 'Average'}) of {mine.dtype.name} {mine.shape}"
        parts = self._world.transport.gather_objects(mine, what)
        total = np.sum(parts, axis=0)
        return keras.ops.convert_to_tensor(total if summed else total / len(parts))

    def allgather(self, value: Any, name: Any = None) -> Any:
        """All ranks' values, joined along the first dimension."""
        mine = np.asarray(value)
        shape = ", ".join(["any", *map(str, mine.shape[1:])])
        what = f"{_call('allgather', name)} of {mine.dtype.name} ({shape})"
        return keras.ops.convert_to_tensor(np.concatenate(self._world.transport.gather_objects(mine, what)))

    def broadcast(self, value: Any, root_rank: int, name: Any = None) -> Any:
        """Rank ``root_rank``'s value."""
        check_root(self._world.transport, root_rank)
        what = f"{_call('broadcast', name)} from rank {root_rank}"
        mine = np.asarray(value)
        return keras.ops.convert_to_tensor(broadcast_object(self._world.transport, mine, root_rank, what))

    def broadcast_object(self, obj: Any, root_rank: int = 0, name: Any = None) -> Any:
        """Rank ``root_rank``'s picklable object."""
        check_root(self._world.transport, root_rank)
        what = f"{_call('broadcast_object', name)} from rank {root_rank}"
        return broadcast_object(self._world.transport, obj, root_rank, what)

    def allgather_object(self, obj: Any, name: Any = None) -> list[Any]:
        """All ranks' picklable objects."""
        return self._world.transport.gather_objects(obj, _call("allgather_object", name))

    def barrier(self) -> None:
        self._world.transport.barrier()


def _call(kind: str, name: Any) -> str:
    """Description of a script's call, compared between ranks."""
    return kind + (f" {name!r}" if name else "")
