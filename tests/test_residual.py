"""Error feedback: nothing that a gradient held is ever lost or counted twice, whatever levels a run goes through.

A real ``Pilot`` makes the plans; ranks are simulated in one process with the operations of each framework, and do with
a plan what the frameworks' exchanges do: warm a level's contexts from dense sums, hand contexts over, keep nothing of a
step in which a rank's gradient was not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import pytest
from compressing import Trip, add, bits_of, drawn, every_framework, in_numpy, norm, ops_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.buckets import make_buckets
from hvdplus.compression import Array, Compressor, Context, Ops, parse
from hvdplus.costmodel import LevelCost
from hvdplus.exchange import Ladder, Plan, SideSlot, side_tensor
from hvdplus.pilot import Pilot
from hvdplus.residual import join, release_factor, unreleased
from hvdplus.runlog import RunLog
from hvdplus.settings import Settings

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


class Job:
    """All ranks of a job, with a ledger of what went in and what came out."""

    def __init__(
        self,
        ops: Ops,
        ranks: int,
        *,
        drain_steps: int = 10,
        warm_steps: int = 2,
        seed: int = 0,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
    ) -> None:
        self.ops, self.ranks = ops, ranks
        self.ladder = Ladder(LADDER)
        self.pilot = Pilot(
            self.ladder,
            Settings(drain_steps=drain_steps, warm_steps=warm_steps),
            auto=True,  # it begins dense, and its controller sees no times: the tests choose the levels
            ranks=ranks,
            costs=[LevelCost(0, 0, 0)] * len(LADDER),
            log=RunLog(None),
        )
        buckets = make_buckets(shapes, ["float32"] * len(shapes), bucket_bytes=BUCKET_BYTES, ranks=ranks, seed=0)
        self.specs = [bucket.spec for bucket in buckets]
        self.contexts: list[dict[int, Context]] = [{} for _ in self.specs]
        zeros = [np.zeros(spec.size, np.float32) for spec in self.specs]
        self.residuals = [[ops.from_numpy(part) for part in zeros] for _ in range(ranks)]
        self.rng = np.random.default_rng(seed)
        self.put_in = [np.zeros(spec.size) for spec in self.specs]
        """Sum of all gradients of all steps taken."""
        self.came_out = [np.zeros(spec.size) for spec in self.specs]
        """Sum of all that was sent, as it arrived."""
        self.rounded = [np.zeros(spec.size) for spec in self.specs]
        """What no residual is meant to keep: float16's rounding and qsgd's; its size is checked where it happens."""
        self.bound = [0.0 for _ in self.specs]
        """What float32 rounding may have added up to."""

    @property
    def plan(self) -> Plan:
        """The coming step's; nothing is gauged here, whatever the pilot asks."""
        return self.pilot.plan._replace(gauge=False)

    def go(self, level: str) -> None:
        """Run ``level`` from the next step on."""
        self.pilot.set_level(LADDER.index(level))
        self._plan()

    def step(self, bad_rank: int | None = None) -> Plan:
        """One training step of all ranks; ``bad_rank`` meets what is not finite, so that nobody takes the step."""
        with nullcontext() if bad_rank is None else np.errstate(all="ignore"):
            return self._step(bad_rank)

    def check(self) -> None:
        """Σ gradients = Σ sent + Σ residuals, bucket by bucket."""
        for number in range(len(self.specs)):
            left = sum(self._wide(self.residuals[rank][number]) for rank in range(self.ranks))
            off = self.put_in[number] - self.came_out[number] - left - self.rounded[number]
            assert np.linalg.norm(off) <= self.bound[number]

    def outstanding(self) -> float:
        """Largest element of any residual."""
        return max(float(np.abs(part).max(initial=0)) for rank in self.owed() for part in rank)

    def owed(self) -> list[list[np.ndarray]]:
        """A copy of all residuals."""
        return [[self.ops.to_numpy(part).copy() for part in rank] for rank in self.residuals]

    def learned(self, level: str) -> list[list[bytes]]:
        """What a level's contexts hold, bucket by bucket."""
        return [bits_of(self.ops, self._context(number, LADDER.index(level))) for number in range(len(self.specs))]

    def _step(self, bad_rank: int | None) -> Plan:
        plan = self.plan
        compressor, settles = self.ladder.compressors[plan.level], self.ladder.settles(plan)
        grads = [[self.rng.standard_normal(spec.size, np.float32) for spec in self.specs] for _ in range(self.ranks)]
        if bad_rank is not None:
            spoiled = grads[bad_rank][int(self.rng.integers(len(self.specs)))]
            spoiled[self.rng.integers(spoiled.size)] = self.rng.choice([np.nan, np.inf, -np.inf])
        pending: list[list[Array]] = [[] for _ in range(self.ranks)]
        sound, finite, arrived_finite = [True] * self.ranks, True, True
        totals: list[Array] = []
        for number in range(len(self.specs)):
            ctx = self._context(number, plan.level)
            sent, payloads = [], []
            for rank in range(self.ranks):
                residual = self.residuals[rank][number]
                joined = join(self.ops.from_numpy(grads[rank][number]), residual, plan.release)
                sent.append(self._wide(joined))
                if compressor.keeps_residual:
                    payload, residual, whole, _ = compressor.send(self.ops, ctx, joined, residual)  # may overwrite joined
                    sound[rank] &= bool(whole)
                else:
                    payload = compressor.encode(self.ops, ctx, joined)
                    if settles and not compressor.narrow:
                        sound[rank] &= bool(compressor.sound(self.ops, joined, payload))
                    if plan.release:
                        residual = unreleased(residual, plan.release)
                payloads.append(payload)
                pending[rank].append(residual)
            total = add(payloads)
            finite &= bool(self.ops.all_finite(total))
            totals.append(total)
            arrived = self._wide(compressor.decode(self.ops, ctx, total))
            arrived_finite &= bool(np.isfinite(arrived).all())
            if bad_rank is None:
                self._book(number, compressor, ctx, [rank[number] for rank in grads], sent, payloads, arrived)
        healthy = not settles or (finite and all(sound))
        if bad_rank is None:
            assert healthy
        elif settles:
            assert not healthy, "every rank hears of it"
            assert compressor.narrow or sound == [rank != bad_rank for rank in range(self.ranks)], "and of nobody else"
        else:
            assert not arrived_finite, "what does not settle hides nothing"
        if healthy:
            for number, total in enumerate(totals):
                ctx = self._context(number, plan.level)
                self.contexts[number][plan.level] = compressor.advance(self.ops, ctx, total)
                if plan.warms:
                    learner = self.ladder.compressors[plan.warms]
                    warmed = learner.warm(self.ops, self._context(number, plan.warms), total)
                    self.contexts[number][plan.warms] = warmed
            self.residuals = pending
        slots = [SideSlot(nonfinite=float(not rank_sound)) for rank_sound in sound]
        sides = [side_tensor(rank, self.ranks, slot, np.zeros(0)) for rank, slot in enumerate(slots)]
        self.pilot.observe(plan, np.sum(sides, axis=0, dtype=np.float32), healthy)
        self._plan()
        return plan

    def _book(
        self,
        number: int,
        compressor: Compressor,
        ctx: Context,
        grads: Sequence[np.ndarray],
        sent: Sequence[np.ndarray],
        payloads: Sequence[Array],
        arrived: np.ndarray,
    ) -> None:
        """Write one bucket's step into the ledger."""
        size = sum(map(norm, sent))
        if compressor.name == "fp16":
            dropped = sum(sent) - arrived
            assert norm(dropped) <= HALF_EPSILON * size
            self.rounded[number] += dropped
        elif compressor.name.endswith("+fp16"):  # what the wire rounds when it adds, no rank could keep
            dropped = sum(self._wide(compressor.decode(self.ops, ctx, payload)) for payload in payloads) - arrived
            assert norm(dropped) <= HALF_EPSILON * size
            self.rounded[number] += dropped
        elif compressor.name.startswith("qsgd"):
            for mine, payload in zip(sent, payloads, strict=True):
                own = self.ops.to_numpy(compressor.decode(self.ops, ctx, payload))
                drawn(Trip(compressor, in_numpy(self.ops, ctx), mine.astype(np.float32), own))
                self.rounded[number] += mine - own
        self.put_in[number] += sum(grad.astype(np.float64) for grad in grads)
        self.came_out[number] += arrived
        self.bound[number] += 4 * EPSILON * size

    def _context(self, number: int, level: int) -> Context:
        if level not in self.contexts[number]:
            self.contexts[number][level] = self.ladder.compressors[level].init(self.ops, self.specs[number])
        return self.contexts[number][level]._replace(phase=self.pilot.plan.phase)

    def _plan(self) -> None:
        """The next plan; a level that follows the last one takes over its contexts."""
        before, after = self.pilot.plan.level, self.pilot.advance().level
        old, new = self.ladder.compressors[before], self.ladder.compressors[after]
        if after != before and new.follows(old):
            for number, spec in enumerate(self.specs):
                fresh = new.init(self.ops, spec)
                self.contexts[number][after] = new.inherit(self.ops, fresh, self._context(number, before))

    def _wide(self, values: Array) -> np.ndarray:
        return self.ops.to_numpy(values).astype(np.float64)


class Stretch(NamedTuple):
    """Some steps at one level."""

    level: str
    steps: int
    bad: tuple[int, ...] = ()
    """Steps (from 0) in which a rank's gradient is not finite."""


STRETCHES = st.lists(
    st.builds(
        Stretch,
        st.sampled_from(LADDER),
        st.integers(1, 30),
        st.lists(st.integers(0, 29), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=14,
)


def run(job: Job, schedule: Sequence[Stretch], steps: int) -> None:
    """Up to ``steps`` steps of a schedule, checked one by one; then back to dense until nothing is outstanding."""
    done = 0
    for stretch in schedule:
        job.go(stretch.level)
        level = LADDER.index(stretch.level)
        for i in range(stretch.steps):
            if done == steps:
                break
            plan = job.step(bad_rank=i % job.ranks if i in stretch.bad else None)
            assert plan.level == level or (plan.warms == level and not plan.level and not plan.release)
            job.check()
            done += 1
    job.go("none")
    drained = 0
    while job.plan.release:
        job.step()
        job.check()
        drained += 1
        assert drained <= 10
    assert job.outstanding() == 0, "drained to exactly nothing"
    assert job.plan == Plan()
    job.step()
    job.check()
    assert job.outstanding() == 0


@given(STRETCHES, st.sampled_from((1, 2, 4)), st.integers(0, 1000))
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_gradients_are_what_was_sent_plus_what_is_left(schedule: list[Stretch], ranks: int, seed: int) -> None:
    """Over 200 steps at most, random changes of level, steps that are not finite, and drains and warm-ups cut short."""
    run(Job(NumpyOps(), ranks, seed=seed), schedule, steps=200)


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


@every_framework
def test_every_change_of_level(framework: str) -> None:
    """Every ordered pair of levels; some drains and warm-ups end, some are interrupted."""
    # Eager TensorFlow is slow: up the ladder and down again.
    order = every_change() if framework != "tensorflow" else [*LADDER, *reversed(LADDER)]
    lengths = [4, 1, 6]
    schedule = [Stretch(level, lengths[i % 3], (1,) if i % 2 else ()) for i, level in enumerate(order)]
    run(Job(ops_of(framework), 2, drain_steps=3, seed=3), schedule, steps=sum(lengths) * len(order))


@every_framework
@pytest.mark.parametrize("level", KEEPING)
def test_the_residual_holds_what_the_level_cannot_send(framework: str, level: str) -> None:
    """It is really used: without it, whatever the payload misses would be gone."""
    job = Job(ops_of(framework), 2)
    job.go(level)
    while job.plan.warms:
        job.step()
        assert job.outstanding() == 0, "dense steps lose nothing"
    for _ in range(6):
        job.step()
        assert job.outstanding() > (0.01 if level == "int8" else 0.1)
        job.check()


@pytest.mark.parametrize("level", ["none", "fp16", "qsgd:8"])
def test_a_residual_is_paid_out_in_equal_parts(level: str) -> None:
    """Never at once, which would be a gradient several times too large; a level that learns does so first."""
    job = Job(NumpyOps(), 2, drain_steps=5)
    job.go("lowrank:1")
    for _ in range(20):
        job.step()
    owed = job.owed()
    job.go(level)
    while job.plan.warms:
        job.step()
        assert same(job.owed(), owed), "it waits meanwhile"
    releases = []
    for left in (4, 3, 2, 1, 0):
        releases.append(job.step().release)
        job.check()
        for before, now in zip(owed, job.residuals, strict=True):
            for owed_part, part in zip(before, now, strict=True):
                assert np.allclose(part, owed_part * left / 5, rtol=1e-5, atol=1e-6)
    assert releases == [1 / 5, 1 / 4, 1 / 3, 1 / 2, 1.0]
    assert job.outstanding() == 0


def same(owed: list[list[np.ndarray]], before: list[list[np.ndarray]]) -> bool:
    """Whether no residual has changed in any bit."""
    return all(
        np.array_equal(a, b) for one, two in zip(owed, before, strict=True) for a, b in zip(one, two, strict=True)
    )


def test_steps_that_are_not_finite_do_not_drain() -> None:
    job = Job(NumpyOps(), 2, drain_steps=3)
    job.go("lowrank:4")
    for _ in range(6):
        job.step()
    job.go("none")
    owed = job.owed()
    assert [job.step(bad_rank=1).release for _ in range(4)] == [1 / 3] * 4
    assert same(job.owed(), owed) and job.outstanding() > 0
    assert [job.step().release for _ in range(4)] == [1 / 3, 1 / 2, 1.0, 0.0]
    assert job.outstanding() == 0
    job.check()


@pytest.mark.parametrize("level", [name for name in LADDER if parse(name).settles])
def test_steps_that_are_not_finite_teach_nothing(level: str) -> None:
    """Neither a level that runs nor one that is warmed up, and residuals stay as they are, whoever met the NaN."""
    job = Job(NumpyOps(), 4)
    job.go("topk:0.2:16" if level != "topk:0.2:16" else "int8")
    for _ in range(4):
        job.step()
    job.go(level)
    for _ in range(6):  # warming up first, where the level does
        owed, learned, plan = job.owed(), job.learned(level), job.plan
        for rank in (0, 3):
            assert job.step(bad_rank=rank) == plan
            assert same(job.owed(), owed) and job.learned(level) == learned and job.plan == plan
        job.step()
        job.check()
    assert job.learned(level) != learned, "but the others do"


@pytest.mark.parametrize("level", [name for name in KEEPING if parse(name).warms])
def test_a_residual_waits_while_the_next_level_learns(level: str) -> None:
    """Untouched, then all of it joins the level's own error feedback."""
    job = Job(NumpyOps(), 2, warm_steps=3)
    job.go("randomk:0.3:16")
    for _ in range(5):
        job.step()
    owed = job.owed()
    job.go(level)
    for _ in range(3):
        assert job.step() == Plan(warms=LADDER.index(level))
        assert same(job.owed(), owed)
        job.check()
    assert job.step().release == 1.0
    assert not same(job.owed(), owed)
    job.check()


@pytest.mark.parametrize("level", [name for name in LADDER if "int8" in name or name == "qsgd:8"])
def test_what_was_learned_counts_from_the_first_step_on(level: str) -> None:
    """A step that no dense one led up to would know of no scale, and send nothing."""
    job = Job(NumpyOps(), 2)
    job.go(level)
    for _ in range(2):
        job.step()
    before = [part.copy() for part in job.came_out]
    assert job.step().level == LADDER.index(level)
    assert all(norm(now - old) > 0.4 * np.sqrt(now.size) for old, now in zip(before, job.came_out, strict=True))
    job.check()


@pytest.mark.parametrize(
    ("first", "second"),
    [("lowrank:1", "lowrank:4"), ("lowrank:4", "lowrank:1"), ("lowrank:1+fp16", "lowrank:4+fp16")],
)
def test_a_level_that_follows_takes_over_contexts_and_phase(first: str, second: str) -> None:
    """No dense step in between, and what was learned goes on: the bases' first columns are the old ones."""
    job = Job(NumpyOps(), 2)
    job.go(first)
    for _ in range(2 + 3):  # the phase of the coming step is 1
        job.step()
    before = [[array.copy() for array in contexts[LADDER.index(first)].state] for contexts in job.contexts]
    job.go(second)
    assert job.plan == Plan(LADDER.index(second), 1, 1.0)
    (number,) = (number for number, spec in enumerate(job.specs) if (3, 3, 8, 16) in spec.shapes)
    for old, new in zip(before[number], job.contexts[number][LADDER.index(second)].state, strict=True):
        if old.ndim < 3:
            continue
        assert np.allclose(np.abs((old[0].T @ new[0]).diagonal()), 1, atol=1e-5)
    job.step()
    job.check()


@pytest.mark.parametrize(
    ("first", "second"), [("lowrank:4", "lowrank:1"), ("lowrank:1", "lowrank:4"), ("lowrank:4+fp16", "lowrank:1+fp16")]
)
def test_a_bucket_in_which_only_the_lower_rank_compresses(first: str, second: str) -> None:
    """The other level has no basis in it to take over."""
    job = Job(NumpyOps(), 2, shapes=((4, 70), (7,)))
    for level in (first, second, first):
        job.go(level)
        for _ in range(4):
            job.step()
            job.check()


def test_coming_back_to_a_lossy_level_takes_the_rest_along() -> None:
    """A drain that is cut short leaves its residual to error feedback, and a new drain starts from the beginning."""
    job = Job(NumpyOps(), 2, drain_steps=4)
    for level, steps, expected in (
        ("lowrank:4", 6, [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]),  # two dense steps teach it
        ("none", 2, [1 / 4, 1 / 3]),
        ("lowrank:4", 5, [0.0, 0.0, 1.0, 1.0, 1.0]),
        ("fp16", 1, [1 / 4]),
    ):
        job.go(level)
        assert [job.step().release for _ in range(steps)] == expected
        job.check()
        assert job.outstanding() > 0


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 10, 1000])
def test_release_factors_sum_up_to_everything(steps: int) -> None:
    left, parts = 1.0, []
    for to_go in range(steps, 0, -1):
        parts.append(left * release_factor(to_go))
        left -= parts[-1]
    assert np.allclose(parts, 1 / steps, rtol=1e-9)
    assert release_factor(1) == 1.0 and left == 0
    assert release_factor(0) == 0.0


@every_framework
def test_join_and_what_is_not_released_in_closed_form(framework: str) -> None:
    ops = ops_of(framework)
    grad, residual = np.array([1.0, -2.0, 3.0], np.float32), np.array([4.0, 8.0, -16.0], np.float32)
    sent = join(ops.from_numpy(grad), ops.from_numpy(residual), 0.25)
    assert ops.to_numpy(sent).tolist() == [2.0, 0.0, -1.0]
    assert ops.to_numpy(join(ops.from_numpy(grad), ops.from_numpy(residual), 0.0)).tolist() == grad.tolist()
    for release, left in ((0.25, [3.0, 6.0, -12.0]), (1.0, [0.0, 0.0, 0.0]), (0.0, [4.0, 8.0, -16.0])):
        assert ops.to_numpy(unreleased(ops.from_numpy(residual), release)).tolist() == left
