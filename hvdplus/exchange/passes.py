"""Buckets that take more than one sum, one after the other: first over a host's ranks, what a level asks in its first
step, the first pass of a level.

    send ─► first sum, asynchronous ─► it is there, or the backward pass is over ─► encode ─► the next sum

A bucket goes on at the end of the backward pass; before, only if its sum is there and the transport lets ranks send in
any order. Within a backward pass nobody waits for a first pass: a rank that has not begun it may itself wait for
something that the script exchanges. (A host's ranks do wait for each other: two levels need the same gradients on all.)
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


def is_under_way(x: EagerExchange[EagerArray], state: BucketState[EagerArray]) -> bool:
    """Whether a bucket waits for its first sum."""
    return any(state is stage.state for stage in x.stages)


def follow(x: EagerExchange[EagerArray], stage: Stage) -> None:
    """A bucket's first sum is in flight. What is done goes on; over a host, the bucket before goes on."""
    x.stages.append(stage)
    if x.two_level and stage.transport is x.two_level.local and len(x.stages) > 1:
        _go_on(x)
    while x.wire.negotiates and x.stages and x.stages[0].transport.done(x.stages[0].handle):
        _go_on(x)


def go_on_with_all(x: EagerExchange[EagerArray]) -> None:
    """Wait for all first sums, and begin the last ones."""
    while x.stages:
        _go_on(x)


def _go_on(x: EagerExchange[EagerArray]) -> None:
    stage = x.stages.pop(0)
    with x.meter.waits_in_codec(id(stage.state)), x.backend.named("hvdplus.wait"):
        total = stage.transport.wait(stage.handle)
    stage.go_on(total)
