"""The part of ``horovod.torch`` that works without Horovod: over mpi4py, or alone.

Names, arguments and results are Horovod's. What is not here needs Horovod, and says so.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hvdplus.transport import Transport, TransportError, World

Average = "Average"
Sum = "Sum"
PART_BYTES = 1 << 28
"""What one message of a long broadcast holds."""


class Collectives:
    """Horovod's functions, bound to one world. ``names`` lists what there is."""

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
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise TransportError("Without Horovod, in-place reductions need a contiguous tensor on the CPU.")
        # Made at once: there is no negotiation that could order it among gradients in flight.
        with torch.no_grad():
            sums = tensor.float() if tensor.dtype == torch.bfloat16 else tensor.detach()  # which NumPy does not know
            self._transport.sum_now(sums)  # type: ignore[attr-defined]
            if sums.dtype != tensor.dtype:
                tensor.copy_(sums)
        return tensor, (op or (Sum if average is False else Average)) == Average

    def synchronize(self, handle: Any) -> Any:
        """Wait for ``allreduce_async`` and give its result."""
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
        """Mean (or sum) over ranks, as a new tensor. As in Horovod, its gradient is reduced alike."""
        if tensor.requires_grad:
            return _AllReduce.apply(tensor, self, average, op)  # type: ignore[no-untyped-call]
        return self.synchronize(self.allreduce_async(tensor, average, name, op))

    def allgather(self, tensor: torch.Tensor, name: Any = None) -> torch.Tensor:
        """All ranks' tensors, joined along the first dimension."""
        return torch.cat(self._transport.gather_objects(tensor.detach().cpu().clone())).to(tensor.device)

    def allgather_object(self, obj: Any, name: Any = None) -> list[Any]:
        return self._transport.gather_objects(obj)

    def broadcast_object(self, obj: Any, root_rank: int = 0, name: Any = None) -> Any:
        """Rank ``root_rank``'s picklable object on every rank."""
        self._check_root(root_rank)
        mine = obj if self.rank() == root_rank else None
        return self._transport.gather_objects(mine)[root_rank]

    def broadcast_(self, tensor: torch.Tensor, root_rank: int, name: Any = None) -> torch.Tensor:
        """Overwrite ``tensor`` with rank ``root_rank``'s."""
        self.broadcast_parameters([(name, tensor)], root_rank)
        return tensor

    def broadcast(self, tensor: torch.Tensor, root_rank: int, name: Any = None) -> torch.Tensor:
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
        values = self.broadcast_object([tensor.detach().cpu() for _, tensor in pairs if tensor is not None], root_rank)
        with torch.no_grad():
            for (_, tensor), value in zip([pair for pair in pairs if pair[1] is not None], values, strict=True):
                tensor.copy_(value)

    def broadcast_optimizer_state(self, optimizer: torch.optim.Optimizer, root_rank: int) -> None:
        """Load rank ``root_rank``'s optimizer state on every rank."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("cannot broadcast torch.optim.LBFGS state")
        mine, file = self.rank() == root_rank, io.BytesIO()
        if mine:
            torch.save(optimizer.state_dict(), file)
        arrived = io.BytesIO(self._broadcast_bytes(file.getbuffer(), root_rank))
        # Tensors of a device would arrive on the root's, which may be another rank's.
        state = torch.load(arrived, map_location="cpu", weights_only=False)
        if not mine or "hvdplus" in state:  # where exchanges go on, all of them do so together
            optimizer.load_state_dict(state)

    def _broadcast_bytes(self, mine: memoryview, root_rank: int) -> bytes:
        """In parts, as Horovod and MPI count bytes with 31 bits."""
        length = self.broadcast_object(len(mine), root_rank)
        parts = [bytes(mine[at : at + PART_BYTES]) for at in range(0, length, PART_BYTES)]
        return b"".join(self.broadcast_object(part, root_rank) for part in parts)

    def _check_root(self, root_rank: int) -> None:
        if not 0 <= root_rank < self.size():
            raise ValueError(f"root_rank must be from 0 to {self.size() - 1}. Received: {root_rank}")


class _AllReduce(torch.autograd.Function):
    """For losses that hang on a reduced tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, collectives: Collectives, average: Any, op: Any) -> torch.Tensor:
        ctx.reduce = functools.partial(collectives.allreduce, average=average, op=op)
        reduced: torch.Tensor = ctx.reduce(tensor.detach())
        return reduced

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return ctx.reduce(grad), None, None, None
