"""Error feedback: nothing that a gradient held is ever lost or counted twice, whatever levels a run goes through.

The whole exchange runs, on ranks in one process, and every step is held against the one sum that it has to keep:

    gradients + residuals before = what arrived + residuals after                         summed over all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
from compressing import every_framework, ops_of
from frameworks import examples
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.adapters.numpy.backend import NumpyExchange
from hvdplus.adapters.transports.in_process import run
from hvdplus.compression import parse
from hvdplus.exchange import checkpoint
from hvdplus.exchange.plan import Plan
from hvdplus.exchange.residual import add, flush_fraction, left_after_flush

LADDER = (
    "none",
    "fp16",
    "int8",
    "qsgd:8",  # keeps no residual, but learns
    "topk:0.2:16",
    "randomk:0.3:16",  # keeps one, and does not learn from dense steps; what it leaves out hides NaN
    "lowrank:1",
    "lowrank:4",
    "lowrank:1+fp16",
    "lowrank:4+fp16",
    "topk:0.2:16+int8",
)
KEEPING = tuple(name for name in LADDER if parse(name).keeps_residual)
# Matrices that rank 4 compresses, one that only rank 1 does, and what no compressor may touch: in buckets with them,
# and in one of its own.
SHAPES = ((24, 16), (5,), (4, 70), (3, 3, 8, 16), (10, 9), (), (1300,))
BUCKET_BYTES = 5000
EPSILON = 2.0**-23
HALF_EPSILON = 2.0**-10


class Rank:
    """One rank of a job, with a ledger of what went in and what came out of every step."""

    def __init__(
        self,
        transport: Any,
        *,
        drain_steps: int = 10,
        seed: int = 0,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
    ) -> None:
        self.transport, self.shapes = transport, shapes
        self.exchange = NumpyExchange(shapes, transport, LADDER, drain_steps=drain_steps, bucket_bytes=BUCKET_BYTES)
        self.exchange.coordinator.set_level(0)  # the test turns the dial
        self.exchange.follow(self.exchange.coordinator.advance())
        self.rng = np.random.default_rng([seed, transport.rank])
        self.arrived = [np.zeros(shape) for shape in shapes]
        """Sum of all that arrived in steps taken."""

    @property
    def plan(self) -> Plan:
        """The coming step's, but for what it measures."""
        return self.exchange.plan._replace(measurement=0)

    def go(self, level: str) -> None:
        """Run ``level`` from the next step on; one step is under way."""
        self.exchange.coordinator.set_level(LADDER.index(level))
        self.step()

    def residual(self) -> list[np.ndarray]:
        """A copy of what this rank holds back, parameter by parameter, in float64."""
        held = checkpoint.residuals(self.exchange)
        return [np.array(held.get(i, np.zeros(shape)), np.float64) for i, shape in enumerate(self.shapes)]

    def learned(self, level: str) -> list[list[bytes]]:
        """What a level's contexts hold, bucket by bucket."""
        number, x = LADDER.index(level), self.exchange
        contexts = [
            state.contexts.get(number) or x.ladder.compressors[number].init(x.ops, state.bucket.spec)
            for state in x.states
        ]
        return [[array.tobytes() for array in ctx.state] for ctx in contexts]

    def outstanding(self) -> float:
        """Largest element of any rank's residual."""
        mine = max(float(np.abs(part).max(initial=0)) for part in self.residual())
        return max(self.transport.gather_objects(mine))

    def step(self, bad_rank: int | None = None, taken: bool = True) -> Plan:
        """One training step. ``bad_rank``: its gradient is not finite. ``taken``: the optimizer takes the step."""
        with nullcontext() if bad_rank is None else np.errstate(all="ignore"):
            return self._step(bad_rank, taken)

    def _step(self, bad_rank: int | None, taken: bool) -> Plan:
        x = self.exchange
        x.begin()  # after a step that was not taken, this makes the plan anew
        plan = self.plan
        grads = [self.rng.standard_normal(shape, np.float32) for shape in self.shapes]
        if bad_rank == self.transport.rank:
            spoiled = grads[int(self.rng.integers(len(grads)))].reshape(-1)
            spoiled[self.rng.integers(spoiled.size)] = self.rng.choice([np.nan, np.inf, -np.inf])
        before = self.residual()
        learned = {name: self.learned(name) for name in LADDER} if bad_rank is not None else {}
        means = x.reduce(grads)
        assert all(np.array_equal(old, now) for old, now in zip(before, self.residual(), strict=True)), "not taken yet"
        if taken:
            x.commit()
        after = self.residual()
        whole = all(bool(np.isfinite(mean).all()) for mean in means)
        if bad_rank is not None:
            assert not whole, "what is not finite reaches every rank"
            assert all(np.array_equal(old, now) for old, now in zip(before, after, strict=True))
            assert {name: self.learned(name) for name in LADDER} == learned
        elif taken:
            self.arrived = [
                sum_ + mean.astype(np.float64) * x.transport.size
                for sum_, mean in zip(self.arrived, means, strict=True)
            ]
            self._check(plan, grads, before, means, after)
        return plan

    def _check(
        self,
        plan: Plan,
        grads: list[np.ndarray],
        before: list[np.ndarray],
        means: list[np.ndarray],
        after: list[np.ndarray],
    ) -> None:
        """gradients + residuals before = what arrived + residuals after, bucket by bucket."""
        everyone = self.transport.gather_objects((grads, before, means, after))
        assert all(
            np.array_equal(mine, theirs)
            for _, _, other, _ in everyone
            for mine, theirs in zip(means, other, strict=True)
        )
        if self.transport.rank:
            return
        name, ranks = LADDER[plan.level], len(everyone)
        for state in self.exchange.states:
            off, size = 0.0, 0.0
            for i in state.bucket.parameters:
                put_in = sum(grads[i].astype(np.float64) + before[i] for grads, before, _, _ in everyone)
                left = sum(after[i] for *_, after in everyone)
                off += float(np.square(put_in - left - means[i].astype(np.float64) * ranks).sum())
                size += sum(
                    float(np.square(grads[i]).sum() + np.square(before[i]).sum()) for grads, before, _, _ in everyone
                )
            # qsgd keeps nothing of what it rounds.
            bound = 0.5 if name.startswith("qsgd") else 2 * HALF_EPSILON if "fp16" in name else 8 * EPSILON
            assert np.sqrt(off) <= bound * np.sqrt(ranks * size), (name, state.bucket.number)


def on(ranks: int, body: Callable[[Rank], Any], *, negotiates: bool = False, **options: Any) -> list[Any]:
    """``body`` on every rank."""
    return run(ranks, lambda transport: body(Rank(transport, **options)), negotiates=negotiates)


class Stretch(NamedTuple):
    """Some steps at one level."""

    level: str
    steps: int
    bad: tuple[int, ...] = ()
    """Steps (from 0) in which a rank's gradient is not finite."""
    skipped: tuple[int, ...] = ()
    """Steps that are exchanged, but that the optimizer does not take."""


STRETCHES = st.lists(
    st.builds(
        Stretch,
        st.sampled_from(LADDER),
        st.integers(1, 12),
        st.lists(st.integers(0, 11), max_size=2).map(tuple),
        st.lists(st.integers(0, 11), max_size=2).map(tuple),
    ),
    min_size=1,
    max_size=8,
)


def walk(rank: Rank, schedule: Sequence[Stretch], drain_steps: int) -> None:
    """A schedule, checked step by step; then back to dense until nothing is outstanding."""
    for stretch in schedule:
        rank.exchange.coordinator.set_level(LADDER.index(stretch.level))
        level = LADDER.index(stretch.level)
        for i in range(stretch.steps):
            bad = i % rank.transport.size if i in stretch.bad else None
            plan = rank.step(bad_rank=bad, taken=i not in stretch.skipped)
            # The first step's plan was made before.
            assert not i or plan.level == level
    rank.go("none")
    flushed = 0
    while rank.plan.flush_fraction:
        rank.step()
        flushed += 1
        assert flushed <= drain_steps + 1
    assert rank.outstanding() == 0, "flushed to exactly nothing"
    assert all(state.residual is None for state in rank.exchange.states)
    assert rank.plan == Plan()
    rank.step()
    assert rank.outstanding() == 0


@given(STRETCHES, st.sampled_from((1, 2, 2, 4)), st.booleans(), st.integers(0, 1000))
@examples(40)
def test_gradients_are_what_was_sent_plus_what_is_left(
    schedule: list[Stretch], ranks: int, negotiates: bool, seed: int
) -> None:
    """Random changes of level, steps that are not finite or not taken, flushes and first steps cut short."""
    on(ranks, lambda rank: walk(rank, schedule, 10), negotiates=negotiates, seed=seed)


def every_change() -> list[str]:
    """Levels in an order in which every level comes right after every other one."""
    order = [LADDER[0]]
    for i, level in enumerate(LADDER):
        for other in LADDER[i + 1 :]:
            order += [other, level]
        order += LADDER[i + 1 : i + 2]
    changes = set(zip(order, order[1:], strict=False))
    assert len(changes) == len(LADDER) * (len(LADDER) - 1)
    return order


@pytest.mark.parametrize("negotiates", [False, True])
def test_every_change_of_level(negotiates: bool) -> None:
    """Every ordered pair of levels; some flushes end, some are interrupted."""
    lengths = [5, 2, 7]
    schedule = [Stretch(level, lengths[i % 3], (1,) if i % 2 else ()) for i, level in enumerate(every_change())]
    on(2, lambda rank: walk(rank, schedule, 3), negotiates=negotiates, drain_steps=3, seed=3)


@pytest.mark.parametrize("level", KEEPING)
def test_the_residual_holds_what_the_level_cannot_send(level: str) -> None:
    """It is really used: without it, whatever the payload misses would be gone."""

    def body(rank: Rank) -> None:
        rank.go(level)
        for _ in range(6):
            rank.step()
            assert rank.outstanding() > (0.01 if level == "int8" else 0.1)

    on(2, body)


@pytest.mark.parametrize("level", ["none", "fp16", "qsgd:8"])
def test_a_residual_is_flushed_in_equal_parts(level: str) -> None:
    """Never at once, which would be a gradient several times too large."""

    def body(rank: Rank) -> None:
        rank.go("lowrank:1")
        for _ in range(20):
            rank.step()
        rank.go(level)
        held = rank.residual()
        fractions = []
        for left in (4, 3, 2, 1, 0):
            fractions.append(rank.step().flush_fraction)
            for before, now in zip(held, rank.residual(), strict=True):
                assert np.allclose(now, before * left / 5, rtol=1e-5, atol=1e-6)
        assert fractions == [1 / 5, 1 / 4, 1 / 3, 1 / 2, 1.0]
        assert rank.outstanding() == 0

    on(2, body, drain_steps=5)


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    """Whether no residual has changed in any bit."""
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_steps_that_are_not_finite_flush_nothing() -> None:
    def body(rank: Rank) -> None:
        rank.go("lowrank:4")
        for _ in range(6):
            rank.step()
        rank.go("none")
        held = rank.residual()
        assert [rank.step(bad_rank=1).flush_fraction for _ in range(4)] == [1 / 3] * 4
        assert same(rank.residual(), held) and rank.outstanding() > 0
        assert [rank.step().flush_fraction for _ in range(4)] == [1 / 3, 1 / 2, 1.0, 0.0]
        assert rank.outstanding() == 0

    on(2, body, drain_steps=3)


def test_steps_that_are_not_taken_flush_nothing() -> None:
    """What they sent is sent again."""

    def body(rank: Rank) -> None:
        rank.go("topk:0.2:16")
        for _ in range(6):
            rank.step()
        rank.go("none")
        held = rank.residual()
        assert [rank.step(taken=False).flush_fraction for _ in range(4)] == [1 / 3] * 4
        assert same(rank.residual(), held) and rank.outstanding() > 0
        assert rank.step().flush_fraction == 1 / 3
        assert [rank.step(taken=False).flush_fraction for _ in range(2)] == [1 / 2] * 2
        assert [rank.step().flush_fraction for _ in range(3)] == [1 / 2, 1.0, 0.0]
        assert rank.outstanding() == 0

    on(2, body, drain_steps=3)


def test_a_step_that_was_not_taken_leaves_nothing_to_the_level_that_begins() -> None:
    """The decision came with it, so that the next step is the new level's first."""

    def body(rank: Rank) -> None:
        rank.go("lowrank:4")
        for _ in range(6):
            rank.step()
        for level in ("int8", "topk:0.2:16", "none", "qsgd:8"):
            held = rank.residual()
            rank.exchange.coordinator.set_level(LADDER.index(level))
            rank.step(taken=False)
            assert same(rank.residual(), held)
            for _ in range(4):
                rank.step()  # checks its sum

    on(2, body, drain_steps=3)


@pytest.mark.parametrize("level", [name for name in LADDER if parse(name).needs_finite_check])
def test_steps_that_are_not_finite_teach_nothing(level: str) -> None:
    """Neither in a level's first step nor later, and residuals stay as they are, whoever met the NaN."""

    def body(rank: Rank) -> None:
        rank.go("topk:0.2:16" if level != "topk:0.2:16" else "int8")
        for _ in range(4):
            rank.step()
        rank.go(level)
        for _ in range(6):
            learned, plan = rank.learned(level), rank.plan
            for bad_rank in (0, 3):
                assert rank.step(bad_rank=bad_rank) == plan  # and checks that nothing stays of it
                assert rank.plan == plan
            rank.step()
        assert rank.learned(level) != learned, "but the others do"

    on(4, body)


@pytest.mark.parametrize("level", [name for name in LADDER if "int8" in name or name == "qsgd:8"])
def test_what_was_learned_counts_from_the_first_step_on(level: str) -> None:
    """One that did not ask would know of no scale, and send nothing."""

    def body(rank: Rank) -> None:
        rank.go(level)
        before = rank.arrived
        assert rank.step().level == LADDER.index(level)
        for now, old in zip(rank.arrived, before, strict=True):
            assert np.linalg.norm(now - old) > 0.4 * np.sqrt(now.size)

    on(2, body)


@pytest.mark.parametrize(
    ("first", "second"),
    [("lowrank:1", "lowrank:4"), ("lowrank:4", "lowrank:1"), ("lowrank:1+fp16", "lowrank:4+fp16")],
)
def test_a_level_that_follows_takes_over_contexts_and_side(first: str, second: str) -> None:
    """No dense step in between, and what was learned goes on: the bases' first columns are the old ones."""

    def body(rank: Rank) -> None:
        rank.go(first)
        for _ in range(2 + 2):
            rank.step()
        rank.go(second)  # the step under way has side 0, and the coming one side 1
        assert rank.plan == Plan(LADDER.index(second), 1, 1.0)
        (state,) = (state for state in rank.exchange.states if (3, 3, 8, 16) in state.bucket.spec.shapes)
        for old, new in zip(*(state.contexts[LADDER.index(level)].state for level in (first, second)), strict=True):
            if old.ndim == 3:  # a basis
                assert np.allclose(np.abs((old[0].T @ new[0]).diagonal()), 1, atol=1e-5)
        rank.step()

    on(2, body)


@pytest.mark.parametrize(
    ("first", "second"), [("lowrank:4", "lowrank:1"), ("lowrank:1", "lowrank:4"), ("lowrank:4+fp16", "lowrank:1+fp16")]
)
def test_a_bucket_in_which_only_the_lower_rank_compresses(first: str, second: str) -> None:
    """The other level has no basis in it to take over."""

    def body(rank: Rank) -> None:
        for level in (first, second, first):
            rank.go(level)
            for _ in range(4):
                rank.step()

    on(2, body, shapes=((4, 70), (7,)))


def test_coming_back_to_a_lossy_level_takes_the_rest_along() -> None:
    """A flush that is cut short leaves its residual to error feedback, and a new one starts from the beginning."""

    def body(rank: Rank) -> None:
        for level, steps, expected in (
            ("topk:0.2:16", 4, [1.0] * 4),
            ("none", 1, [1 / 4]),
            ("topk:0.2:16", 3, [1.0] * 3),  # a second flushing step was under way
            ("fp16", 1, [1 / 4]),
        ):
            rank.go(level)
            assert [rank.step().flush_fraction for _ in range(steps)] == expected
            assert rank.outstanding() > 0

    on(2, body, drain_steps=4)


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 10, 1000])
def test_flush_fractions_sum_up_to_everything(steps: int) -> None:
    left, parts = 1.0, []
    for to_go in range(steps, 0, -1):
        parts.append(left * flush_fraction(to_go))
        left -= parts[-1]
    assert np.allclose(parts, 1 / steps, rtol=1e-9)
    assert flush_fraction(1) == 1.0 and left == 0
    assert flush_fraction(0) == 0.0


@every_framework
def test_add_and_what_is_left_in_closed_form(framework: str) -> None:
    ops = ops_of(framework)
    grad, residual = np.array([1.0, -2.0, 3.0], np.float32), np.array([4.0, 8.0, -16.0], np.float32)
    sent = add(ops.from_numpy(grad), ops.from_numpy(residual), 0.25)
    assert ops.to_numpy(sent).tolist() == [2.0, 0.0, -1.0]
    assert ops.to_numpy(add(ops.from_numpy(grad), ops.from_numpy(residual), 0.0)).tolist() == grad.tolist()
    for fraction, left in ((0.25, [3.0, 6.0, -12.0]), (1.0, [0.0, 0.0, 0.0]), (0.0, [4.0, 8.0, -16.0])):
        assert ops.to_numpy(left_after_flush(ops.from_numpy(residual), fraction)).tolist() == left
