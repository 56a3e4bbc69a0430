"""Sparse gradients: the rows that any rank used, agreed on and added up, exact.

An embedding's gradient has few rows, others on every rank. A ring cannot add what stands in different places, so the
ranks first add up a mask (a few bits a row), which tells each of them the union of all rows, and then the union's rows,
in one order. Two rounds, but small ones: next to Horovod's all-gather no row crosses the network more than once a rank.
"""

from __future__ import annotations

from typing import Any

import torch

from hvdplus.adapters.torch.ops import TorchOps
from hvdplus.compression.integer import fewest_bits
from hvdplus.compression.ops import Packed
from hvdplus.transport import Transport

FULL = 0.5
"""Share of rows from which on a step sends them all."""
WORD = 32


class SharedRows:
    """One parameter's sparse gradient, from step to step."""

    def __init__(self, parameter: torch.nn.Parameter, transport: Transport, ops: TorchOps, name: str) -> None:
        self.parameter = parameter
        self.sent_bytes = 0
        """Of the last step."""
        self._transport, self._ops, self._name = transport, ops, name
        self._bits = fewest_bits(transport.size)
        self._one = torch.zeros(1, dtype=torch.int32, device=parameter.device)
        self._handle: Any = None

    def start(self) -> None:
        """Say which rows this rank used."""
        self._mine = _rows(self.parameter)
        mask = torch.zeros(len(self.parameter), dtype=torch.float32, device=self.parameter.device)
        mask[self._mine.indices()[0]] = 1.0
        words = self._ops.pack(mask, self._one, 1, self._bits, WORD).words
        self.sent_bytes = words.nbytes
        self._handle = self._transport.start(words, f"{self._name}.mask")

    def send(self) -> None:
        """Hear which rows anybody used, and send this rank's part of them."""
        height, shape = len(self.parameter), self.parameter.shape[1:]
        total = self._transport.wait(self._handle)
        users = self._ops.assemble([Packed(total, self._one, self._bits, height)])
        self._union = users.nonzero()[:, 0]
        if len(self._union) > FULL * height:
            self._union = torch.arange(height, device=self.parameter.device)
        # A length that few steps share would be negotiated anew every time: round it up by an eighth at most.
        length = _round_up(len(self._union))
        dtype = torch.float64 if self.parameter.dtype == torch.float64 else torch.float32
        values = torch.zeros(length, *shape, dtype=dtype, device=self.parameter.device)
        values[torch.searchsorted(self._union, self._mine.indices()[0])] = self._mine.values().to(dtype)
        self._handle = None
        if length:
            self.sent_bytes += values.nbytes
            self._handle = self._transport.start(values.view(-1), f"{self._name}.{length}")

    def receive(self, scale: float) -> torch.Tensor:
        """The sum over all ranks times ``scale``, sparse."""
        shape = (len(self._union), *self.parameter.shape[1:])
        values = self.parameter.new_zeros(shape)
        if self._handle is not None:
            total = self._transport.wait(self._handle).view(-1, *shape[1:])
            values = (total[: len(self._union)] * scale).to(self.parameter.dtype)
        return as_sparse(self._union, values, self.parameter.shape)


def rows_used(parameter: torch.nn.Parameter) -> int | None:
    """How many rows a sparse gradient has; None: it is dense, or there is none."""
    grad = parameter.grad
    return _rows(parameter).indices().shape[1] if grad is not None and grad.is_sparse else None


def _rows(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient with duplicate rows merged, one sparse dimension; no rows where there is no gradient."""
    grad = parameter.grad
    if grad is None:
        nothing = torch.zeros(0, dtype=torch.int64, device=parameter.device)
        return as_sparse(nothing, parameter.detach()[:0], parameter.shape)
    if not grad.is_sparse or grad.sparse_dim() != 1:
        return rows_in_use(grad.to_dense())
    return grad.detach().coalesce()


def rows_in_use(dense: torch.Tensor) -> torch.Tensor:
    """A sparse tensor of the rows that are not zero: those of others are none of an optimizer's business."""
    used = dense.flatten(1).ne(0).any(1).nonzero()[:, 0]
    return as_sparse(used, dense[used], dense.shape)


def as_sparse(rows: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A sparse tensor with one sparse dimension; ``rows`` ascend. ``Tensor.to_sparse`` takes far longer."""
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)


def _round_up(count: int) -> int:
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step
