"""Steps in which the host runs ahead of a device: what depends on the step's values is decided on the device.

A device (CUDA) computes while the host goes on, and over NCCL it also waits for sums by itself. A host that reads a
value waits for all work that it has queued, and then the device waits for the host. So in a usual step it reads none,
and waits at most for the end of the step before:

- Whether all sums are finite is the same on all ranks, and their devices act on it alike. If one is not, contexts and
  residuals stay as they were, and NaN is delivered, as a plain all-reduce would. Whether the script then skips the step
  or takes it, nothing of it is left. The schedule counts it.
- What the device has found out travels with the next step's metadata; the host hears of it another step later.
- After an overflow all ranks send what is left in full width as soon as they hear of it, two steps late, or in the next
  step that is taken and keeps a residual. Meanwhile contexts follow the larger values.

Levels without a residual whose sums may leave their range (``fp16``) look in the step itself, because nothing would
keep the gradient; so do sparse gradients, steps that check weights, and those of two levels or with masks.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdplus.exchange import outcome
from hvdplus.exchange.backend import EagerArray
from hvdplus.exchange.bucket import BucketState

if TYPE_CHECKING:
    from hvdplus.exchange.eager import EagerExchange


LARGEST = 1e38
"""Magnitude of what ranks may hold back together, once they have told that it is far too much."""


def settle(x: EagerExchange[EagerArray]) -> None:
    """Commit the step's contexts if all sums are finite, else roll the step back: on the device, alike on all ranks."""
    x.reporter.answers = x.reporter.overflowed and x.ladder.keeps_residual(x.plan)
    if x.reporter.answers:
        outcome.send_left(x)
    sums = [state.sum_finite for state in x.states if state.sum_finite is not None]
    if not sums:
        return
    sound = functools.reduce(operator.and_, sums)
    states = [state for state in x.states if state.bucket.compressible]
    _settle_contexts(x, states, sound)
    for state in states:
        _settle(x, state, sound)


def _settle_contexts(
    x: EagerExchange[EagerArray], states: Sequence[BucketState[EagerArray]], sound: EagerArray
) -> None:
    level = x.plan.level
    following: list[EagerArray] = []
    before: list[EagerArray] = []
    for state in states:
        if state.next_context is not None:
            following += state.next_context.state
            before += state.context(x.ops, level, x.compressor(state.bucket, level)).state
    chosen = iter(x.backend.choose_each(sound, following, before))
    for state in states:
        if state.next_context is not None:
            arrays = tuple(itertools.islice(chosen, len(state.next_context.state)))
            state.contexts[level] = state.next_context._replace(state=arrays)


def _settle(x: EagerExchange[EagerArray], state: BucketState[EagerArray], sound: EagerArray) -> None:
    choose = x.backend.choose
    if state.pending is not None:
        before: EagerArray | float = 0.0 if state.residual is None else state.residual
        if x.reporter.answers and state.residual is not None:  # a sum beyond float32 would be so in every step
            before = x.backend.within(state.residual, LARGEST / x.transport.size)
        state.pending = choose(sound, state.pending, before)
    if state.mean is not None and x.compressor(state.bucket, x.plan.level).needs_finite_check:
        state.mean = choose(sound, state.mean, math.nan)
