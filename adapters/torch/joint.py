"""A bucket's vector that is added up as it is read.

Its gradients and what the residual adds to them are read once, and each block of the sum is multiplied while it is
still in the cache.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

import torch

from hvdplus.adapters.torch import private
from hvdplus.adapters.torch.packing import CHUNK

Addends: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Joint:
    """Gradients plus a share of the residual, 1-D, on the CPU. A tensor's stretch is added up when it is first read."""

    def __init__(
        self, parts: Sequence[torch.Tensor], residual: torch.Tensor, share: float, whole: torch.Tensor
    ) -> None:
        """``parts``: 1-D. ``whole``: where the sum is put. All of one type."""
        lengths = [part.numel() for part in parts]
        addends = zip(parts, torch.split(residual, lengths), torch.split(whole, lengths), strict=True)
        self._share, self._whole = share, whole
        self._ends = list(accumulate(lengths))
        self._open: list[Addends | None] = list(addends)
        """Of every tensor: gradient, residual, sum; None: it is added up."""

    def __getitem__(self, place: slice) -> torch.Tensor:
        """A stretch of the sum."""
        start, stop, _ = place.indices(len(self._whole))
        for i in range(bisect_right(self._ends, start), min(bisect_left(self._ends, stop) + 1, len(self._ends))):
            addends, self._open[i] = self._open[i], None
            if addends is not None:
                part, left, out = addends
                torch.add(part, left, alpha=self._share, out=out)
        return self._whole[start:stop]

    def project(self, start: int, shape: tuple[int, int], basis: torch.Tensor, transpose: bool) -> torch.Tensor | None:
        """``Ops.project`` of the matrix at ``start``, added up in blocks of rows. None: it fits into the cache, is
        added up already, or is no whole tensor."""
        count, i = math.prod(shape), bisect_right(self._ends, start)
        addends = self._open[i] if count > CHUNK else None
        if addends is None or (self._ends[i], len(addends[0])) != (start + count, count):
            return None
        self._open[i] = None
        rows = max(1, CHUNK // shape[1])
        blocks = zip(*(torch.split(each.view(shape), rows) for each in addends), strict=True)
        sums = (torch.add(part, left, alpha=self._share, out=out) for part, left, out in blocks)
        product = basis.new_zeros(basis.shape[1], shape[1 if transpose else 0])
        with private.without_autocast("cpu"), private.full_precision():
            if transpose:
                for block, own in zip(sums, torch.split(basis, rows), strict=True):
                    product.addmm_(own.t(), block)
            else:
                for block, own in zip(sums, torch.split(product, rows, dim=1), strict=True):
                    torch.mm(basis.t(), block.t(), out=own)
        return product.t()
