"""Sparse gradients: ranks agree on the rows that any of them used, and add these rows up, exact.

An embedding's gradient has few rows, different ones on every rank. A ring adds only elements in equal places, so in
every step the ranks first add up a mask (a few bits a row), which tells all of them the union of rows. If the union is
a small share of the table, its rows follow, in one order, uncompressed. Else the table travels as a bucket at the
step's level. Unlike in Horovod's all-gather, no row crosses the network more than once a rank.

A step that exchanges rows loses nothing and leaves the residual unchanged. Contexts learn nothing from it, but what
ranks ask in a level's first step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hvdplus.compression import Array, Ops, fewest_bits
from hvdplus.compression.ops import Packed
from hvdplus.exchange import passes, transfer
from hvdplus.exchange.backend import EagerArray
from hvdplus.exchange.bucket import NOT_YET, BucketState, wide

if TYPE_CHECKING:
    from hvdplus.exchange.eager import EagerExchange

SHARED = 0.25
"""Largest share of rows, all ranks' together, that is exchanged row by row; beyond, the table travels as a bucket."""
WORD = 32
"""Bits of a word of the mask."""


@dataclass
class Table(BucketState[EagerArray]):
    """The bucket of a parameter whose gradients are sparse, from step to step."""

    is_table: ClassVar[bool] = True
    mask: Any = None
    """Handle of the mask's all-reduce."""
    rows: EagerArray = NOT_YET
    """Rows that this rank used, int64 ascending."""
    values: EagerArray = NOT_YET
    """(rows, width)"""
    union: EagerArray | None = None
    """Rows that any rank used; None: the table travels as a bucket in this step."""
    sent_bytes: int = 0
    """Bytes of the last step: mask, and rows or payload."""

    @property
    def parameter(self) -> int:
        """Position of its only parameter."""
        return self.bucket.parameters[0]

    @property
    def height(self) -> int:
        """Rows of the table."""
        return self.bucket.shapes[0][0]

    def forget_step(self) -> None:
        """As a bucket's."""
        super().forget_step()
        self.mask = self.rows = self.values = NOT_YET
        self.union = None


def start_mask(x: EagerExchange[EagerArray], table: Table[EagerArray]) -> None:
    """Tell the other ranks which rows this rank used."""
    table.pending = None  # of a step that was never taken
    table.rows, table.values = x.backend.rows(table.parameter)
    words = mask_words(x.ops, x.backend.mask(table.rows, table.height), x.transport.size)
    table.mask = x.transport.start(words, f"{x.prefix}.{table.bucket.number}.mask")


def send_table(x: EagerExchange[EagerArray], table: Table[EagerArray]) -> None:
    """Wait for the sum of masks; send the rows that any rank used, or the whole table as a bucket."""
    with x.meter.exposed_comm():
        words = x.transport.wait(table.mask)
    with x.meter.codec():
        union = x.backend.rows_in_use(mask_counts(x.ops, words, table.height, x.transport.size))
        table.sent_bytes = mask_bytes(table.height, x.transport.size)
        if x.ladder.flushes(x.plan) or not few(len(union), table.height):
            transfer.mark_ready(table, table.parameter)
            transfer.send(x, table)
            passes.go_on_with_all(x)
            earlier = x.compressor(table.bucket, x.plan.level).earlier_bytes(table.bucket.spec)
            table.sent_bytes += int(table.payload.nbytes) + earlier
            return
        table.union = union
        x.reporter.note_norms(x, [table.values])
        length = padded(len(union))
        if length:
            values = x.backend.place(union, table.rows, table.values, length, wide(table.bucket.dtype))
            table.sent_bytes += int(values.nbytes)
            table.handle = x.transport.start(values, f"{x.prefix}.{table.bucket.number}.rows.{length}")
            _ask(x, table, values)


def _ask(x: EagerExchange[EagerArray], table: Table[EagerArray], values: EagerArray) -> None:
    """In a level's first step its contexts learn from the table's own gradient: later it may travel as a bucket. Of
    several passes, only the first one's do. ``values``: this rank's, 1-D, of the union's rows and some padding."""
    compressor = x.compressor(table.bucket, x.plan.level)
    if not (x.plan.asks and compressor.asks):
        return
    assert table.union is not None
    width = table.bucket.spec.size // table.height
    whole = x.backend.spread(table.union, values[: len(table.union) * width], table.height) * (1.0 / x.sent_scale)

    def summed(told: EagerArray) -> EagerArray:
        handle = x.wire.start(told, f"{x.tensor_name(table)}.ask")
        with x.meter.waits_in_codec(id(table)), x.backend.named("hvdplus.wait"):
            total: EagerArray = x.wire.wait(handle)
        return total

    table.next_context = compressor.asked(x.ops, x.context(table), whole, summed)


def receive_rows(x: EagerExchange[EagerArray], table: Table[EagerArray]) -> None:
    """The mean of the union's rows, 1-D."""
    assert table.union is not None
    if table.handle is None:
        table.mean = x.backend.zeros(0, wide(table.bucket.dtype))
        return
    width = table.bucket.spec.size // table.height
    total = table.total[: len(table.union) * width]
    if x.checks:
        table.sum_finite = x.ops.all_finite(total)
    table.mean = total * x.scale


def mask_words(ops: Ops[Array], mask: Array, ranks: int) -> Array:
    """A mask (float32, zeros and ones), packed so that a sum over ``ranks`` ranks fits."""
    return ops.pack(mask, _one(ops), 1, fewest_bits(ranks), WORD).words


def mask_counts(ops: Ops[Array], words: Array, height: int, ranks: int) -> Array:
    """Sum of masks -> how many ranks used each row, float32 (height,)."""
    return ops.assemble([Packed(words, _one(ops), fewest_bits(ranks), height)])


def mask_bytes(height: int, ranks: int) -> int:
    """Size of a packed mask."""
    lanes = WORD // fewest_bits(ranks)
    return -(-height // lanes) * WORD // 8


def few(union: int, height: int) -> bool:
    """Whether a union of so many rows is exchanged row by row."""
    return union <= int(SHARED * height)


def padded(count: int) -> int:
    """``count`` rounded up by an eighth at most, so that few different lengths occur: each is negotiated anew."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step


def _one(ops: Ops[Array]) -> Array:
    """Exponent of a step size of 1."""
    return ops.from_numpy(np.zeros(1, np.int32))
