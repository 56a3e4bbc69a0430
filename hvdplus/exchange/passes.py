"""Buckets that take more than one sum, one after the other: first over a host's ranks, or the first pass of a level.

    send ─► first sum, asynchronous ─► (the next bucket is sent) ─► wait ─► what it leads to: encode, the next sum

A bucket goes on when the next one has been sent, so that its sum has had time, or at the end of the backward pass. All
ranks send buckets in the same order here, negotiation or not: who waits for a sum that another rank has not begun would
keep that rank waiting as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdplus.exchange.backend import EagerArray
from hvdplus.exchange.bucket import BucketState
from hvdplus.transport import Transport

if TYPE_CHECKING:
    from hvdplus.exchange.eager import EagerExchange


class Stage(NamedTuple):
    """A bucket whose first sum is in flight."""

    state: BucketState[Any]
    transport: Transport
    handle: Any
    go_on: Callable[[Any], None]
    """What follows, given the sum."""


def in_order(x: EagerExchange[EagerArray]) -> bool:
    """Whether all ranks have to send the step's buckets in the same order."""
    return not x.wire.negotiates or x.ladder.compressors[x.plan.level].passes > 1


def is_under_way(x: EagerExchange[EagerArray], state: BucketState[EagerArray]) -> bool:
    """Whether a bucket waits for its first sum."""
    return any(state is stage.state for stage in x.stages)


def follow(x: EagerExchange[EagerArray], stage: Stage) -> None:
    """A bucket's first sum is in flight. The bucket before goes on."""
    x.stages.append(stage)
    if len(x.stages) > 1:
        _go_on(x)


def go_on_with_all(x: EagerExchange[EagerArray]) -> None:
    """Wait for all first sums, and begin the last ones."""
    while x.stages:
        _go_on(x)


def _go_on(x: EagerExchange[EagerArray]) -> None:
    stage = x.stages.pop(0)
    with x.meter.waits_in_codec(stage.state.bucket.number), x.backend.named("hvdplus.wait"):
        total = stage.transport.wait(stage.handle)
    stage.go_on(total)
