"""The end of a step: send overflowed buckets again, commit contexts or roll them back, deliver the means, hand over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdplus.exchange.backend import EagerArray
from hvdplus.exchange.bucket import BucketState
from hvdplus.exchange.transfer import vector

if TYPE_CHECKING:
    from hvdplus.exchange.eager import EagerExchange


def send_overflowed_again(x: EagerExchange[EagerArray], states: Sequence[BucketState[EagerArray]]) -> None:
    """Send buckets whose float16 sum is not finite again, in full width. All ranks hold the same sums and so send the
    same buckets."""
    narrow = [s for s in states if s.sum_finite is not None and x.compressor(s.bucket, x.plan.level).may_overflow]
    if x.backend.all_true(_looked_at(narrow)):
        return
    for state in (state for state in narrow if not state.sum_finite):
        if x.together and not x.two_level:  # whose vectors are the hosts' sums
            x.backend.join(x.backend.parts(state.bucket), vector(x, state), 1.0)
        name = f"{x.tensor_name(state)}.again"
        state.mean = x.wire.wait(x.wire.start(vector(x, state), name, x.scale))
        state.sum_finite = x.ops.all_finite(state.mean)


def sums_are_finite(x: EagerExchange[EagerArray]) -> bool:
    """Whether the sums of all compressible buckets are finite; the same on every rank."""
    return x.backend.all_true(_looked_at(x.states))


def _looked_at(states: Sequence[BucketState[EagerArray]]) -> list[EagerArray]:
    """Flags of all sums that were checked, whether they are finite."""
    return [state.sum_finite for state in states if state.sum_finite is not None]


def send_left(x: EagerExchange[EagerArray]) -> None:
    """After an overflow on any rank, all ranks send what is left in full width: the whole gradient arrives, and the
    residual becomes zero."""
    scale, sums = x.scale * x.sent_scale, []
    for state in x.states:
        if state.bucket.compressible and (
            state.handed_over or (state.pending is not None and state.finite is not None)
        ):
            mine = state.pending  # None: another rank of this host has it
            left = x.backend.zeros(state.bucket.spec.size) if mine is None else x.backend.clone(mine)
            sums.append((state, x.transport.start(left, f"{x.tensor_name(state)}.left", scale)))
    for state, handle in sums:
        left = x.transport.wait(handle)
        state.mean = _mean(x, state) + left
        state.pending = None if state.handed_over else x.backend.filled_like(left, 0.0)
        finite = x.ops.all_finite(state.mean)
        state.sum_finite = finite if state.sum_finite is None else state.sum_finite & finite


def settle(x: EagerExchange[EagerArray], state: BucketState[EagerArray], healthy: bool, learns: bool) -> None:
    """Commit a bucket's next context if the step is ``healthy`` and ``learns``; roll back if it is not ``healthy``."""
    if not state.bucket.compressible:
        return
    if healthy:
        if learns and state.next_context is not None:
            state.contexts[x.plan.level] = state.next_context
        return
    state.pending, state.handed_over = None, False
    if x.compressor(state.bucket, x.plan.level).needs_finite_check:  # deliver NaN, as a plain all-reduce would
        state.mean = x.backend.filled_like(_mean(x, state), math.nan)


def _mean(x: EagerExchange[EagerArray], state: BucketState[EagerArray]) -> EagerArray:
    """A bucket's mean, which may be in its gradients' places by now."""
    if state.mean is None:
        state.mean = x.backend.empty(state.bucket.spec.size, "float32")
        x.backend.join(x.backend.places(state.bucket), state.mean, 1.0)
    return state.mean


def deliver(x: EagerExchange[EagerArray], used: Sequence[bool]) -> None:
    """Write means to the gradients; a parameter that no rank used keeps none.

    ``used``: which parameters have a gradient on this rank.
    """
    users = (x.reporter.metadata.read().used > 0).tolist() if x.reporter.read_in_step else used
    for state in x.now.states:
        if x.now.in_place:
            x.backend.deliver_summed(state.bucket, state.summed, users, sparse=x.sparse)
        else:
            _deliver_bucket(x, state, users)
    for table in x.tables_now:
        if table.union is None:
            _deliver_bucket(x, table, users)
        elif users[table.parameter]:
            x.backend.deliver_rows(table.parameter, table.union, _mean(x, table))


def _deliver_bucket(x: EagerExchange[EagerArray], state: BucketState[EagerArray], users: Sequence[bool]) -> None:
    if state.mean is None:
        return
    sent = [array for array in (state.flat, state.payload) if array is not None]
    adopt = not any(x.backend.shares_memory(state.mean, array) for array in sent)
    x.backend.deliver(state.bucket, state.mean, users, adopt=adopt, sparse=x.sparse)
    if state.residual is None:
        return
    unused = [part for i, (part, _) in state.places.items() if not users[i]]  # no rank uses these parts of the mean
    if not unused:
        return
    if state.handed_over:  # to the bucket's owner, whose mean of these parts is dropped
        state.pending, state.handed_over = x.backend.filled_like(state.residual, 0.0), False
    if state.pending is not None:
        state.waits = not x.two_level  # where each rank of a host has a part of the residuals
        for part in unused:
            state.pending[part] = state.residual[part]


def turned_sparse(x: EagerExchange[EagerArray]) -> None:
    """If all ranks read the metadata in the step, treat a gradient that turned sparse on one rank as sparse on all."""
    if x.reporter.observed_in_step:
        x.sparse.update(x.reporter.metadata.read().turned)


def hand_over(x: EagerExchange[EagerArray], before: int) -> None:
    """Hand the contexts of the level ``before`` to the coming level, if that can reuse them."""
    old, new = x.ladder.compressors[before], x.ladder.compressors[x.plan.level]
    if x.plan.level != before and new.can_reuse(old):
        for state in (state for state in x.states if state.bucket.compressible):
            fresh = new.init(x.ops, state.bucket.spec)
            state.contexts[x.plan.level] = new.reuse_context(x.ops, fresh, x.context(state, before))
