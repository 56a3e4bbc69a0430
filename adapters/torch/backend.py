"""The engine's backend in PyTorch: gradients are where PyTorch keeps them, in ``parameter.grad``.

A full bucket's gradients are copied once, into its vector, together with their share of the residual; means are written
to ``.grad``. As in Horovod, ``.grad`` stays the same tensor; float16 means are decoded into it, and if no other tensor
shares its memory it takes over that of other means. Plain dense steps over Horovod need no bucket: every gradient is
summed in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import torch

from hvdplus.adapters.torch import private
from hvdplus.adapters.torch.joint import Joint
from hvdplus.adapters.torch.memory import alone_in_memory
from hvdplus.adapters.torch.ops import make_ops
from hvdplus.adapters.torch.packing import CHUNK
from hvdplus.adapters.torch.stream import choose_each, found_on, stream_meter
from hvdplus.control.meter import StepMeter
from hvdplus.exchange.backend import Found, look
from hvdplus.exchange.bucket import DENSE_ONLY, Bucket
from hvdplus.exchange.sketch import CELLS, Part, signs

UNNAMED = nullcontext()
ADOPTED = 1 << 16
"""Bytes from which on a mean's memory becomes the gradient's: what is smaller is copied sooner, many in one call."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the integer type that shows its bits."""
WORD = 8
"""Bytes of int64."""


class TorchBackend:
    """See ``hvdplus.exchange.backend.Backend``."""

    framework = "torch"
    may_adopt = True

    def __init__(self, parameters: Sequence[torch.nn.Parameter], names: Sequence[str] = ()) -> None:
        self.device = parameters[0].device if parameters else torch.device("cpu")
        self.on_host = self.device.type == "cpu"
        self.ops = make_ops(self.device)
        self._signs: torch.Tensor | None = None
        """Those of sketches, once one was made."""
        self.take(parameters, names)

    def take(self, parameters: Sequence[torch.nn.Parameter], names: Sequence[str] = ()) -> None:
        """Use these parameters from now on."""
        self.parameters = list(parameters)
        self.shapes = [tuple(real_view(parameter).shape) for parameter in self.parameters]
        self.dtypes = [DENSE_ONLY if p.is_complex() else type_name(p) for p in self.parameters]
        self.names = [*names, *(f"parameter {i}" for i in range(len(names), len(self.parameters)))]

    def named(self, what: str) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(what) if private.profiles() else UNNAMED

    # -- gradients of this rank

    def gradient(self, i: int) -> torch.Tensor | None:
        return self.parameters[i].grad

    def put(self, i: int, grad: torch.Tensor) -> None:
        """Make ``grad`` the gradient."""
        self.parameters[i].grad = grad

    def present(self) -> list[bool]:
        return [parameter.grad is not None for parameter in self.parameters]

    def sparse(self) -> list[int]:
        return [i for i, p in enumerate(self.parameters) if p.grad is not None and p.grad.is_sparse]

    def may_share_rows(self, i: int) -> bool:
        return not self.parameters[i].is_complex()  # rows are added up as real numbers

    @torch.no_grad()
    def parts(self, bucket: Bucket) -> list[torch.Tensor]:
        parts = []
        for i, length in zip(bucket.parameters, bucket.lengths, strict=True):
            grad = self._dense(i)
            parts.append(self.zeros(length, bucket.dtype) if grad is None else grad.reshape(-1))
        return parts

    def places(self, bucket: Bucket) -> Sequence[torch.Tensor]:
        places = [self._place(i) for i in bucket.parameters]
        usual = [p for p in places if p is not None and p.dtype == torch.float32 and p.is_contiguous()]
        return [place.detach().view(-1) for place in usual] if len(usual) == len(places) else ()

    def join(
        self,
        parts: Sequence[torch.Tensor],
        out: torch.Tensor,
        divisor: float,
        residual: torch.Tensor | None = None,
        share: float = 1.0,
        *,
        as_read: bool = False,
    ) -> torch.Tensor:
        alike = all(part.dtype == out.dtype for part in parts)
        if residual is not None and self.on_host and divisor == 1 and alike:  # memory is written once
            joint = Joint(parts, residual, share, out)
            return cast(torch.Tensor, joint) if as_read and len(out) > CHUNK else joint[:]
        torch.cat(list(parts), out=out)
        if divisor != 1:
            out.mul_(1 / divisor)
        if residual is not None:
            out.add_(residual, alpha=share)
        return out

    def summable(self, bucket: Bucket, dtype: str) -> list[torch.Tensor]:
        arrays, wanted = [], getattr(torch, dtype)
        for i, shape in zip(bucket.parameters, bucket.shapes, strict=True):
            grad = self._dense(i)
            if grad is None:
                grad = self.zeros(math.prod(shape), dtype).view(shape)
            own = grad.to(wanted).contiguous()
            # The backward pass may still read memory that is not the gradient's alone.
            arrays.append(grad.detach().clone() if own is grad and not alone_in_memory(grad) else own)
        return arrays

    def rows(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        parameter, grad = self.parameters[i], self.gradient(i)
        if grad is None:
            nothing = parameter.detach()[:0]
            return torch.zeros(0, dtype=torch.int64, device=self.device), nothing.reshape(0, _width(parameter))
        if not grad.is_sparse or grad.sparse_dim() != 1:
            grad = rows_in_use(grad.to_dense())
        grad = grad.detach().coalesce()
        return grad.indices()[0], grad.values().reshape(-1, _width(parameter))

    def _dense(self, i: int) -> torch.Tensor | None:
        grad = self.gradient(i)
        if grad is None:
            return None
        return real_view(grad.detach().to_dense() if grad.is_sparse else grad)

    # -- means

    @torch.no_grad()
    def deliver(
        self, bucket: Bucket, mean: torch.Tensor, users: Sequence[bool], *, adopt: bool, sparse: Container[int]
    ) -> None:
        means = zip(bucket.parameters, bucket.shapes, torch.split(mean, list(bucket.lengths)), strict=True)
        self._write(((i, part.view(shape), i in sparse) for i, shape, part in means if users[i]), adopt)

    def _write(self, means: Iterable[tuple[int, torch.Tensor, bool]], adopt: bool) -> None:
        """Write means to gradients. Each is: parameter, mean in its shape, whether the gradient has to be sparse."""
        into: list[torch.Tensor] = []
        copied: list[torch.Tensor] = []
        for i, mean, sparse in means:
            place = None if sparse else self._place(i)
            if place is None:
                whole = like(mean, self.parameters[i])
                # Sparse or dense, but alike on all ranks: optimizers treat the two differently.
                self.put(i, rows_in_use(whole) if sparse else whole)
            elif adopt and self.may_adopt and mean.nbytes >= ADOPTED and takes(place, mean):
                place.set_(mean)  # type: ignore[call-overload]
            elif place.data_ptr() != mean.data_ptr():  # else it was summed in place
                into.append(place)
                copied.append(mean)
        private.copy_each(into, copied)

    def _place(self, i: int) -> torch.Tensor | None:
        """Where a dense mean can be written; None: the gradient becomes another tensor."""
        grad = self.gradient(i)
        if grad is None or grad.is_sparse or grad.is_complex():
            return None
        if grad.is_contiguous():  # as nearly all are, and this is asked of every one in every step
            return grad
        spread = any(step == 0 and length > 1 for step, length in zip(grad.stride(), grad.shape, strict=True))
        return None if spread else grad  # expanded: several elements have one place

    def deliver_rows(self, i: int, union: torch.Tensor, values: torch.Tensor) -> None:
        parameter = self.parameters[i]
        shape = (len(union), *parameter.shape[1:])
        self.put(i, as_sparse(union, values.to(parameter.dtype).view(shape), parameter.shape))

    @torch.no_grad()
    def deliver_summed(
        self, bucket: Bucket, means: Sequence[torch.Tensor], users: Sequence[bool], *, sparse: Container[int]
    ) -> None:
        triples = zip(bucket.parameters, bucket.shapes, means, strict=True)
        apart = (each for each in triples if users[each[0]] and each[2] is not self.gradient(each[0]))
        self._write(((i, mean.view(shape), i in sparse) for i, shape, mean in apart), adopt=False)

    # -- arrays

    def empty(self, count: int, dtype: str) -> torch.Tensor:
        return torch.empty(count, dtype=getattr(torch, dtype), device=self.device)

    def zeros(self, count: int, dtype: str = "float32") -> torch.Tensor:
        return torch.zeros(count, dtype=getattr(torch, dtype), device=self.device)

    def norm(self, array: torch.Tensor) -> torch.Tensor:
        return norm(array)

    @torch.no_grad()
    def sketch(self, array: torch.Tensor, part: Part) -> torch.Tensor:
        if self._signs is None:
            self._signs = torch.from_numpy(signs()).to(self.device)
        return _sketch(array.detach(), part, self._signs)

    def norm_of_all(self, norms: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.linalg.vector_norm(torch.stack(list(norms))).reshape(1) if norms else self.zeros(1)

    def mask(self, rows: torch.Tensor, height: int) -> torch.Tensor:
        mask = self.zeros(height)
        mask[rows] = 1.0
        return mask

    def rows_in_use(self, counts: torch.Tensor) -> torch.Tensor:
        return counts.nonzero()[:, 0]

    def place(
        self, union: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, length: int, dtype: str
    ) -> torch.Tensor:
        placed = self.zeros(length * values.shape[1], dtype).view(length, values.shape[1])
        placed[torch.searchsorted(union, rows)] = values.to(placed.dtype)
        return placed.view(-1)

    def spread(self, union: torch.Tensor, values: torch.Tensor, height: int) -> torch.Tensor:
        whole = values.new_zeros(height, values.numel() // max(1, len(union)))
        whole[union] = values.view(len(union), -1)
        return whole.view(-1)

    def all_true(self, flags: Sequence[torch.Tensor]) -> bool:
        return not flags or bool(torch.stack([torch.as_tensor(flag, device=self.device) for flag in flags]).all())

    def make_meter(self, *, runs_ahead: bool) -> StepMeter:
        return stream_meter(self.device) if runs_ahead and self.device.type == "cuda" else StepMeter()

    def found(
        self,
        finite: Sequence[torch.Tensor],
        overflow: Sequence[torch.Tensor],
        contexts: Sequence[torch.Tensor],
        loss: Any,
        measured: Sequence[torch.Tensor],
    ) -> Callable[[], Found]:
        if self.on_host or not (finite or overflow or contexts or measured or isinstance(loss, torch.Tensor)):
            found = look(self.ops, finite, overflow, contexts, loss, measured)
            return lambda: found
        return found_on(self.device, finite, overflow, contexts, loss, measured)

    def within(self, array: torch.Tensor, limit: float) -> torch.Tensor:
        return array.clamp(-limit, limit)

    def choose_each(
        self, condition: torch.Tensor, ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        return choose_each(condition, ones, others)

    def choose(self, condition: torch.Tensor, one: torch.Tensor, other: torch.Tensor | float) -> torch.Tensor:
        return torch.where(condition, one, other)

    def clone(self, array: torch.Tensor) -> torch.Tensor:
        return array.detach().clone()

    def filled_like(self, array: torch.Tensor, value: float) -> torch.Tensor:
        return torch.full_like(array, value)

    def restore(self, values: Any) -> torch.Tensor:
        return torch.as_tensor(values, device=self.device).clone()

    def metadata_array(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values)

    def to_host(self, array: torch.Tensor) -> np.ndarray:
        return array.detach().cpu().numpy()

    def shares_memory(self, one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
        return one is not None and other is not None and one.data_ptr() == other.data_ptr()

    def wait_for_device(self) -> None:
        # All gradients have been handed to the transport, and the host would next wait for the device to make the
        # metadata. Waiting here instead counts the rest of the device's work as computation.
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def checksums(self) -> list[int]:
        sums = [_sum_of_bits(real_view(parameter.detach())) for parameter in self.parameters]
        return torch.stack(sums).tolist() if sums else []


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones, in one more dimension at the end; other tensors unchanged."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def _sketch(array: torch.Tensor, part: Part, all_signs: torch.Tensor) -> torch.Tensor:
    flat = array.reshape(-1).contiguous()
    cells = flat.as_strided((CELLS, part.width), (part.rows, 1), flat.storage_offset() + part.column).float()
    # No product of matrices: autocast would compute it in half precision, and all the rest of a step takes longer
    # beside it (by a third in models of small tensors).
    return (cells * all_signs[part.sign : part.sign + part.width]).sum(1) * part.scale


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Of the bits as integers, 0-d int64: of eight bytes each, and of the elements that are left over."""
    values = tensor.contiguous().view(-1)
    if values.storage_offset() * values.element_size() % WORD:
        values = values.clone()  # words begin where the storage does
    whole = len(values) - len(values) % (WORD // values.element_size())
    rest = values[whole:].view(INTEGERS[values.element_size()]).sum(dtype=torch.int64)
    # Elements by themselves would have to be made wider first, which takes thirty times as long.
    return rest + values[:whole].view(torch.int64).sum() if whole else rest


def like(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A copy of ``values``, a tensor as ``real_view`` returns it, in the parameter's type."""
    if parameter.is_complex():
        return torch.view_as_complex(values.to(parameter.dtype.to_real(), copy=True))
    return values.to(parameter.dtype, copy=True)


def type_name(tensor: torch.Tensor) -> str:
    """``float32`` and the like."""
    return str(tensor.dtype).removeprefix("torch.")


def loss_of(loss: float | torch.Tensor) -> Any:
    """A loss for ``Reporter.loss``; that of a device is read when the host waits for the device anyway."""
    if not isinstance(loss, torch.Tensor):
        return float(loss)
    return float(loss.detach()) if loss.device.type == "cpu" else loss.detach().clone().reshape(())


def takes(grad: torch.Tensor, mean: torch.Tensor) -> bool:
    """Whether ``grad`` can take over the memory of ``mean``: same type, and its own memory is no part of a buffer."""
    alike = grad.dtype == mean.dtype and grad.is_contiguous()
    return alike and grad.untyped_storage().nbytes() == grad.nbytes and alone_in_memory(grad)


def norm(tensor: torch.Tensor) -> torch.Tensor:
    """Euclidean norm, 0-d float32; computed in float32 or wider, because half precision overflows."""
    with torch.no_grad():
        wider = torch.promote_types(tensor.dtype, torch.float32)
        found: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=wider)
        return found.float()


def rows_in_use(dense: torch.Tensor) -> torch.Tensor:
    """A sparse tensor of the rows that are not zero, so that an optimizer leaves the others alone."""
    used = dense.flatten(1).ne(0).any(1).nonzero()[:, 0] if dense.dim() > 1 else dense.nonzero()[:, 0]
    return as_sparse(used, dense[used], dense.shape)


def as_sparse(rows: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A sparse tensor with one sparse dimension; ``rows`` ascend. ``Tensor.to_sparse`` takes far longer."""
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)


def _width(parameter: torch.Tensor) -> int:
    return math.prod(parameter.shape[1:])
