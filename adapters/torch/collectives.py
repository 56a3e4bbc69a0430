"""The part of ``horovod.torch`` that works without Horovod: over mpi4py or torch.distributed, or alone.

Names, arguments and results are Horovod's. Other names need Horovod, and raise an error that says so.
"""

from __future__ import annotations

import functools
import hashlib
import io
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvdplus.adapters.torch.backend import type_name
from hvdplus.agree import check_same_model, same_bytes
from hvdplus.exchange import checkpoint
from hvdplus.transport import Transport, TransportError, World, broadcast_each, broadcast_object, check_root

Average = "Average"
Sum = "Sum"


_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Bytes of an element -> a type that Horovod broadcasts."""
_HOROVODS = {*_CARRIERS.values(), torch.int8, torch.float16, torch.float32, torch.float64}
"""Types that Horovod broadcasts as they are; it refuses bfloat16, bool, complex and others."""


class Collectives:
    """Horovod's functions, bound to one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._transport: Transport = world.transport

    def is_initialized(self) -> bool:
        return True

    def rank(self) -> int:
        return self._transport.rank

    def size(self) -> int:
        return self._transport.size

    def local_rank(self) -> int:
        return self._transport.local_rank

    def local_size(self) -> int:
        return self._transport.local_size

    def cross_rank(self) -> int:
        return self._world.cross_rank

    def cross_size(self) -> int:
        return len(self._world.hosts)

    def barrier(self) -> None:
        self._transport.barrier()

    def allreduce_async_(self, tensor: torch.Tensor, average: Any = None, name: Any = None, op: Any = None) -> Any:
        """Begin to reduce ``tensor`` in place. ``op``: Average (default) or Sum."""
        if op not in (None, Average, Sum):
            raise TransportError(f"Without Horovod, op is Average or Sum. Received: op={op!r}")
        if not tensor.is_contiguous() or (tensor.device.type != "cpu" and self._transport.name == "mpi4py"):
            raise TransportError(
                "In-place reductions need a contiguous tensor, over mpi4py one on the CPU. Received: one on "
                f"{tensor.device}, strides {tensor.stride()}"
            )
        op = op or (Sum if average is False else Average)
        # Blocking: without negotiation nothing would order this sum among gradients in flight.
        with torch.no_grad():
            narrow = tensor.dtype == torch.bfloat16  # which NumPy does not know
            sums = tensor.float() if narrow else tensor.detach()
            what = f"{_call('allreduce', name)} ({op}{', from bfloat16' if narrow else ''})"
            self._transport.sum_now(sums, what)  # type: ignore[attr-defined]
            if narrow:
                tensor.copy_(sums)
        return tensor, op == Average

    def synchronize(self, handle: Any) -> Any:
        """Wait for ``allreduce_async`` and return its result."""
        tensor, average = handle
        if average:
            with torch.no_grad():
                if tensor.dtype.is_floating_point:
                    tensor.div_(self.size())
                else:
                    tensor.copy_(torch.div(tensor, self.size(), rounding_mode="floor"))
        return tensor

    def poll(self, handle: Any) -> bool:
        return True

    def allreduce_(self, tensor: torch.Tensor, average: Any = None, name: Any = None, op: Any = None) -> Any:
        return self.synchronize(self.allreduce_async_(tensor, average, name, op))

    def allreduce_async(self, tensor: torch.Tensor, average: Any = None, name: Any = None, op: Any = None) -> Any:
        return self.allreduce_async_(tensor.detach().clone(memory_format=torch.contiguous_format), average, name, op)

    def allreduce(
        self, tensor: torch.Tensor, average: Any = None, name: Any = None, compression: Any = None, op: Any = None
    ) -> Any:
        """Mean (or sum) over ranks, as a new tensor. As in Horovod, its gradient is reduced in the same way."""
        if tensor.requires_grad:
            return _AllReduce.apply(tensor, self, average, op)  # type: ignore[no-untyped-call]
        return self.synchronize(self.allreduce_async(tensor, average, name, op))

    def allgather(self, tensor: torch.Tensor, name: Any = None) -> torch.Tensor:
        """All ranks' tensors, joined along the first dimension. Its gradient is averaged, as in Horovod."""
        if tensor.requires_grad:
            return _AllGather.apply(tensor, self, name)  # type: ignore[no-any-return, no-untyped-call]
        return torch.cat(self.gathered(tensor, name)).to(tensor.device)

    def gathered(self, tensor: torch.Tensor, name: Any) -> list[torch.Tensor]:
        """All ranks' tensors, on the CPU."""
        shape = ", ".join(["any", *map(str, tensor.shape[1:])])
        what = f"{_call('allgather', name)} of {type_name(tensor)} ({shape})"
        told = self._transport.gather_objects((_bytes(tensor), tuple(tensor.shape)), what)
        return [_tensor(content, tensor.dtype, shape) for content, shape in told]

    def allgather_object(self, obj: Any, name: Any = None) -> list[Any]:
        return self._transport.gather_objects(obj, _call("allgather_object", name))

    def broadcast_object(self, obj: Any, root_rank: int = 0, name: Any = None) -> Any:
        """Rank ``root_rank``'s picklable object on every rank."""
        check_root(self._transport, root_rank)
        return broadcast_object(self._transport, obj, root_rank, _call("broadcast_object", name, root_rank))

    def broadcast_(self, tensor: torch.Tensor, root_rank: int, name: Any = None) -> torch.Tensor:
        """Overwrite ``tensor`` with rank ``root_rank``'s."""
        self.broadcast_parameters([(name, tensor)], root_rank)
        return tensor

    def broadcast(self, tensor: torch.Tensor, root_rank: int, name: Any = None) -> torch.Tensor:
        """Rank ``root_rank``'s tensor on every rank. Its gradient is averaged, as in Horovod."""
        if tensor.requires_grad:
            return _Broadcast.apply(tensor, self, root_rank, name)  # type: ignore[no-any-return, no-untyped-call]
        return self.broadcast_(tensor.detach().clone(), root_rank, name)

    def broadcast_parameters(self, params: Any, root_rank: int) -> None:
        """Overwrite tensors with rank ``root_rank``'s. ``params``: a state dict, or (name, tensor) pairs."""
        pairs: Iterable[tuple[str, Any]]
        if isinstance(params, Mapping):
            pairs = sorted(params.items())
        elif isinstance(params, Iterable):
            pairs = [entry if isinstance(entry, tuple) else ("", entry) for entry in params]
        else:
            raise ValueError(f"invalid params of type: {type(params).__name__}")
        check_root(self._transport, root_rank)
        pairs = [(name, tensor) for name, tensor in pairs if tensor is not None]
        check_same_model([(name, tuple(tensor.shape), type_name(tensor)) for name, tensor in pairs], self._world)
        contents = (_bytes(tensor) for _, tensor in pairs)
        arriving = broadcast_each(self._transport, contents, root_rank, f"broadcast_parameters from rank {root_rank}")
        with torch.no_grad():
            for (_, tensor), content in zip(pairs, arriving, strict=True):
                tensor.copy_(_tensor(content, tensor.dtype, tensor.shape))

    def broadcast_optimizer_state(
        self, optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
    ) -> None:
        """Load rank ``root_rank``'s optimizer state on every rank.

        If it has no state yet, missing gradients become zeros, as in Horovod, which takes a step there. Parameters
        that get sparse gradients according to ``model`` are left alone.
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("cannot broadcast torch.optim.LBFGS state")
        check_root(self._transport, root_rank)
        mine = self.rank() == root_rank
        own = optimizer.state_dict() if mine else {}
        state = self.broadcast_state(for_other_ranks(own), root_rank)
        if not mine:
            optimizer.load_state_dict(state)
        elif "hvdplus" in own:  # exchanges resume together, the root's too
            optimizer.load_state_dict(own)
        if not state["state"] and not isinstance(optimizer, torch.optim.SparseAdam):
            tables = [m.weight for m in model.modules() if getattr(m, "sparse", False)] if model is not None else []
            sparse = {id(weight) for weight in tables}
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter.requires_grad and parameter.grad is None and id(parameter) not in sparse:
                    parameter.grad = torch.zeros_like(parameter)

    def broadcast_state(self, state: Any, root_rank: int) -> Any:
        """Rank ``root_rank``'s nested state on every rank, its tensors on the CPU. The structure travels in one
        message, then the tensors one by one."""
        what = f"broadcast_optimizer_state from rank {root_rank}"
        file, mine = io.BytesIO(), self.rank() == root_rank
        writer = _Writer(file, pickle.HIGHEST_PROTOCOL)
        if mine:
            writer.dump(state)
        reader = _Reader(io.BytesIO(broadcast_object(self._transport, file.getvalue(), root_rank, what)))
        contents = (_bytes(a) if isinstance(a, torch.Tensor) else a for a in writer.arrays)
        reader.contents = list(broadcast_each(self._transport, contents, root_rank, what))
        return reader.load()


def for_other_ranks(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state, as ``checkpoint.for_other_ranks`` leaves it; of local steps, each fragment's, too."""
    ours = state.get("hvdplus")
    if not ours:
        return dict(state)
    if "residuals" in ours:
        return {**state, "hvdplus": checkpoint.for_other_ranks(ours)}
    fragments = [
        {
            **fragment,
            "outer": for_other_ranks(fragment["outer"]),
            **({"residual": None} if "residual" in fragment else {}),  # with staleness
        }
        for fragment in ours.get("fragments") or ()
    ]
    return {**state, "hvdplus": {**ours, "fragments": fragments or None}}


class _Writer(pickle.Pickler):
    """Pickles a state without its tensors and arrays, and lists these."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.arrays: list[Any] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if not isinstance(obj, torch.Tensor | np.ndarray):
            return None
        if id(obj) not in self._places:
            self._places[id(obj)] = len(self.arrays)
            self.arrays.append(obj)
        kind = (obj.dtype, tuple(obj.shape)) if isinstance(obj, torch.Tensor) else ()
        return (self._places[id(obj)], *kind)


class _Reader(pickle.Unpickler):
    """Puts the tensors back; one that stood in two places is one tensor again."""

    contents: list[Any]

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        place, *kind = pid
        if kind and isinstance(self.contents[place], np.ndarray):
            self.contents[place] = _tensor(self.contents[place], *kind)
        return self.contents[place]


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's bytes on the host, 1-D: torch's own pickles hold the whole base of a view, and know fewer types."""
    content: np.ndarray = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return content


def _tensor(content: np.ndarray, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(content).view(dtype).reshape(tuple(shape))


class _AllReduce(torch.autograd.Function):
    """An all-reduce with a gradient, for losses that depend on a reduced tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, collectives: Collectives, average: Any, op: Any) -> torch.Tensor:
        ctx.reduce = functools.partial(collectives.allreduce, average=average, op=op)
        reduced: torch.Tensor = ctx.reduce(tensor.detach())
        return reduced

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return ctx.reduce(grad), None, None, None


class _AllGather(torch.autograd.Function):
    """An all-gather with a gradient: that of this rank's rows, averaged over what all ranks made of them."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, collectives: Collectives, name: Any) -> torch.Tensor:
        parts = collectives.gathered(tensor.detach(), name)
        rows, rank = [len(part) for part in parts], collectives.rank()
        ctx.reduce, ctx.first, ctx.rows = collectives.allreduce, sum(rows[:rank]), rows[rank]
        return torch.cat(parts).to(tensor.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return ctx.reduce(grad).narrow(0, ctx.first, ctx.rows), None, None


class _Broadcast(torch.autograd.Function):
    """A broadcast with a gradient: the root's, averaged over what all ranks made of its tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, collectives: Collectives, root_rank: int, name: Any) -> torch.Tensor:
        ctx.reduce, ctx.is_root = collectives.allreduce, collectives.rank() == root_rank
        return collectives.broadcast(tensor.detach(), root_rank, name)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        mean = ctx.reduce(grad)
        return mean if ctx.is_root else torch.zeros_like(mean), None, None, None


def identical(values: torch.nn.Module | Iterable[Any], world: World) -> bool:
    """Whether a module's state, or tensors, or (name, tensor) pairs are equal on all ranks (in order), bit for bit.

    Rank 0 prints the first that differs.
    """
    state = values.state_dict() if isinstance(values, torch.nn.Module) else values
    digests = []
    for place, entry in enumerate(state.items() if isinstance(state, Mapping) else state):
        name, value = entry if isinstance(entry, tuple) else (f"tensor {place}", entry)
        described = f"{name} ({type_name(value)} {tuple(value.shape)})"
        digests.append((described, hashlib.sha256(_bytes(value).data).hexdigest()))
    return same_bytes(digests, world)


def needs_carrier(tensor: torch.Tensor) -> bool:
    """Whether Horovod refuses to broadcast a tensor only for its type, so that its bytes can travel as another type."""
    return tensor.dtype not in _HOROVODS and tensor.layout == torch.strided


def broadcast_carried(tensors: Sequence[torch.Tensor], broadcast: Callable[[list[torch.Tensor]], Any]) -> None:
    """Overwrite tensors with the root's by Horovod's ``broadcast``, also tensors of types that Horovod refuses.

    Args:
        broadcast: overwrites a list of tensors of types that Horovod knows.
    """
    carriers = []
    for tensor in tensors:
        if needs_carrier(tensor):
            bytes_ = tensor.detach().contiguous().reshape(-1)
            carriers.append(bytes_.view(_CARRIERS[tensor.element_size()]))
        else:
            carriers.append(tensor)
    broadcast(carriers)
    with torch.no_grad():
        for tensor, carrier in zip(tensors, carriers, strict=True):
            if carrier.data_ptr() != tensor.data_ptr():  # it was not contiguous
                tensor.copy_(carrier.view(tensor.dtype).reshape(tensor.shape))


def _call(kind: str, name: Any, root_rank: int | None = None) -> str:
    """Description of a script's call, compared between ranks."""
    return kind + (f" {name!r}" if name else "") + (f" from rank {root_rank}" if root_rank is not None else "")
