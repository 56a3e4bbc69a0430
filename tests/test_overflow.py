"""Values far beyond a level's scale: all is seen in the step in which it happened, and nothing of it stays.

Ranks are simulated with the rule that an exchange follows. If a rank's values overflow, all ranks send what their
payloads do not carry in full width, in the same step: residuals are zero after it. Contexts stay as they are in such a
step, because they would learn a scale that is gone in the next one. From about the eighth such step in a row on they
advance, because the gradients have grown for good.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
from compressing import LEVELS, ROWS, asked, bits_of, every_framework, norm, ops_of
from frameworks import examples
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.compression import Array, LowRank, Ops, RandomK, Spec, parse
from hvdplus.compression.contract import FAR

KEEPING = [level for level in LEVELS if parse(level).keeps_residual]
SPEC = Spec(((24, 32), (40, 24), (7, 3), (300,)), position=1, seed=2, tail=23)
PATIENCE = 8
"""Overflowing steps in a row after which contexts advance."""
SIZES = (1e4, 1e6, 1e20, 1e38)
PLACES = ("element", "row", "layer", "tail")


class Outcome(NamedTuple):
    """What one step of all ranks comes to."""

    mean: np.ndarray
    overflow: bool
    finite: bool


class Job:
    """All ranks of a job at one level."""

    def __init__(self, level: str, ranks: int, ops: Ops | None = None, spec: Spec = SPEC) -> None:
        self.compressor, self.ops = parse(level), ops or NumpyOps()
        self.spec = spec._replace(ranks=ranks)
        self.context = self.compressor.init(self.ops, self.spec)
        self.residuals = [np.zeros(spec.size, np.float32) for _ in range(ranks)]
        self.to_ask = self.compressor.asking_steps
        self.streak = 0
        """``PATIENCE`` for every step that overflowed, less one for every other one."""

    def step(self, grads: list[np.ndarray]) -> Outcome:
        """One training step."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self._step(grads)

    def _step(self, grads: list[np.ndarray]) -> Outcome:
        ops, compressor, ctx = self.ops, self.compressor, self.context
        joined = [ops.from_numpy(grad + residual) for grad, residual in zip(grads, self.residuals, strict=True)]
        if self.to_ask:
            ctx, self.to_ask = asked(ops, compressor, ctx, joined), self.to_ask - 1
        sent = [compressor.send(ops, ctx, x, ops.from_numpy(r)) for x, r in zip(joined, self.residuals, strict=True)]
        total = _sum([rank.payload for rank in sent])
        lefts = [ops.to_numpy(rank.left) for rank in sent]
        overflow = any(bool(rank.overflow) for rank in sent)
        finite = all(bool(rank.finite) for rank in sent) and bool(ops.all_finite(total))
        whole = ops.to_numpy(compressor.decode(ops, ctx, total))
        if overflow:
            rest = _sum(lefts)
            finite &= bool(np.isfinite(rest).all())
            whole = whole + rest
        if finite:
            self.residuals = [np.zeros_like(left) for left in lefts] if overflow else lefts
            self.streak = min(self.streak + PATIENCE, PATIENCE**2) if overflow else max(self.streak - 1, 0)
            if not overflow or self.streak == PATIENCE**2:
                self.context = self.compressor.advance(ops, ctx, total)
            self.context = self.context._replace(side=(ctx.side + 1) % compressor.sides)
        return Outcome(whole / np.float32(self.spec.ranks), overflow, finite)

    def owed(self) -> float:
        """Largest norm of a residual."""
        return max(map(norm, self.residuals))


def _sum(parts: list[Array]) -> Array:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class Source:
    """Gradients of ranks that have something in common."""

    def __init__(self, ranks: int, scale: float, seed: int, spec: Spec = SPEC) -> None:
        self.rng, self.ranks, self.scale, self.spec = np.random.default_rng(seed), ranks, scale, spec
        self.common = self.rng.standard_normal(spec.size)

    def __call__(self, factor: float = 1.0) -> list[np.ndarray]:
        """One step's."""
        scale = self.scale * factor
        return [
            (scale * (self.common + self.rng.standard_normal(self.spec.size))).astype(np.float32)
            for _ in range(self.ranks)
        ]


def spiked(grad: np.ndarray, place: str, size: float, rng: np.random.Generator) -> np.ndarray:
    """A copy with a spike in one of the matrices, or behind them."""
    grad, start = grad.copy(), 24 * 32
    signs = rng.choice(np.array([-1, 1], np.float32), SPEC.size)
    row = start + 24 * int(rng.integers(40))
    element = int(rng.integers(SPEC.body))
    where = {
        "element": slice(element, element + 1),
        "row": slice(row, row + 24),
        "layer": slice(start, start + 40 * 24),
        "tail": slice(SPEC.body + 3, SPEC.body + 4),
    }[place]
    grad[where] = np.float32(size) * signs[where]
    return grad


def train(job: Job, source: Source, steps: int) -> None:
    """Ordinary steps."""
    for _ in range(steps):
        assert not job.step(source()).overflow


def may_hide(level: str, ranks: int, size: float) -> int:
    """In how many more steps a spike may arrive.

    lowrank: what stands in a row that the present basis has nothing of is seen by the next one, of the other side.
    randomk: its scale is the whole bucket's root mean square; what stays within arrives with its block, which no more
    than two rounds go without.
    """
    first = parse(level.split("+")[0])
    if isinstance(first, LowRank):
        return 3
    if isinstance(first, RandomK) and size < 8 * FAR * ranks * SPEC.size**0.5:
        return 2 * math.ceil(1 / first.share)
    return 0


@pytest.mark.parametrize("level", KEEPING)
def test_a_spike_is_seen_at_once_and_nothing_of_it_stays(level: str) -> None:
    """Spikes of any size and shape, on one rank or all, in some steps: what arrives in the step is what a plain sum
    would have brought, and what is owed is nothing."""

    @given(
        st.sampled_from(SIZES),
        st.sampled_from(PLACES),
        st.sampled_from(ROWS[level].ranks),
        st.booleans(),
        st.sampled_from((1e-2, 1.0)),
        st.integers(1, PATIENCE - 1),
        st.integers(0, 1000),
    )
    @examples(25)
    def check(size: float, place: str, ranks: int, everywhere: bool, scale: float, steps: int, seed: int) -> None:
        if everywhere and size * ranks > 3e38:
            size = 3e37
        job, source = Job(level, ranks), Source(ranks, scale, seed)
        train(job, source, 7 + seed % 2)
        usual = max(job.owed(), scale * SPEC.size**0.5)
        hidden = may_hide(level, ranks, size / scale)
        for _ in range(1 if hidden else steps):
            owed, grads = list(job.residuals), source()
            for rank in range(ranks) if everywhere else [seed % ranks]:
                grads[rank] = spiked(grads[rank], place, size, source.rng)
            outcome = job.step(grads)
            assert outcome.finite
            expected = (sum(g.astype(np.float64) for g in grads) + sum(r.astype(np.float64) for r in owed)) / ranks
            lost = norm(outcome.mean - expected)
            if outcome.overflow:
                assert lost <= 1e-3 * norm(expected), "half precision rounds the sum"
                assert job.owed() == 0
            elif not hidden:  # all of the spike was sent; the rest is compressed as usual
                assert lost <= 1e-6 * norm(expected) + 6 * usual * ranks
                assert job.owed() <= 6 * usual
            assert np.abs(outcome.mean).max() <= 1.01 * size + 200 * scale
        put_in, came_out = sum(r.astype(np.float64) for r in job.residuals), np.zeros(SPEC.size)
        for number in range(24 if hidden else 8):
            grads = source()
            put_in += sum(g.astype(np.float64) for g in grads)
            outcome = job.step(grads)
            assert outcome.finite
            came_out += outcome.mean.astype(np.float64) * ranks
            if number >= hidden:
                assert np.abs(outcome.mean).max() < 200 * scale, "nothing of it arrives on clean data"
                assert job.owed() <= 6 * usual
            else:
                assert np.abs(outcome.mean).max() <= 1.01 * size + 200 * scale, "no more than a plain sum brings"
        left = sum(r.astype(np.float64) for r in job.residuals)
        assert norm(put_in - came_out - left) <= 2e-2 * norm(put_in)

    check()


HEAVY = ("normal", "student", "rows", "single")


def heavy(rng: np.random.Generator, kind: str, size: int) -> np.ndarray:
    """Values as training brings them: also with few elements that hold all the energy."""
    if kind == "normal":
        return rng.standard_normal(size)
    if kind == "student":
        return rng.standard_t(2, size)
    if kind == "single":
        values = np.zeros(size)
        values[rng.integers(size)] = size**0.5
        return values + 1e-3 * rng.standard_normal(size)
    values = np.zeros((-(-size // 24), 24))
    values[rng.choice(len(values), 4)] = rng.standard_normal((4, 24))
    return values.reshape(-1)[:size]


@pytest.mark.parametrize("kind", HEAVY)
@pytest.mark.parametrize("level", KEEPING)
def test_ordinary_training_does_not_overflow(level: str, kind: str) -> None:
    """Heavy tails, rows of an embedding, elements of sqrt(d) times the root mean square, tenfold growth at once."""
    # Four bits of blocks that are drawn, few of which hold anything, have no scale to keep to.
    often = 0.4 if (level, kind) == ("randomk:0.1:16+int4", "single") else 0.01 if kind == "student" else 0
    if level.startswith("lowrank") and kind == "single":
        # The first random bases may not show a single value at all: so it is until contexts learn again.
        often = (PATIENCE + 4) / 30
    fired: dict[int, list[bool]] = {ranks: [] for ranks in ROWS[level].ranks}

    @given(st.integers(0, 2**31))
    @examples(6)
    def train_as_usual(seed: int) -> None:
        for ranks in fired:
            rng, job = np.random.default_rng(seed), Job(level, ranks)

            def grads(factor: float = 1.0, rng: np.random.Generator = rng, ranks: int = ranks) -> list[np.ndarray]:
                return [(factor * heavy(rng, kind, SPEC.size)).astype(np.float32) for _ in range(ranks)]

            for step in range(30):
                factor = 10.0 if step >= 20 else 1.0 if step >= 10 else 10.0 ** (-step / 10)
                fired[ranks].append(job.step(grads(factor)).overflow)

    train_as_usual()
    for steps in fired.values():
        assert sum(steps) <= often * len(steps), "an exact step, but it takes longer"


@pytest.mark.parametrize("level", [level for level in KEEPING if 2 in ROWS[level].ranks])
def test_a_step_in_which_sums_overflow_float32_leaves_no_trace(level: str) -> None:
    job, source = Job(level, 2), Source(2, 1.0, 3)
    train(job, source, 6)
    owed, learned = [r.copy() for r in job.residuals], bits_of(job.ops, job.context)
    for place in PLACES:
        grads = [spiked(grad, place, 3e38, np.random.default_rng(0)) for grad in source()]
        outcome = job.step(grads)
        assert not outcome.finite and not np.isfinite(outcome.mean).all()
        assert all(np.array_equal(a, b) for a, b in zip(owed, job.residuals, strict=True))
        assert bits_of(job.ops, job.context) == learned
    assert np.abs(job.step(source()).mean).max() < 30


@pytest.mark.parametrize("level", KEEPING)
def test_gradients_that_have_grown_for_good_are_learned(level: str) -> None:
    """They overflow for some steps, then the level serves them as it did before."""
    for ranks in ROWS[level].ranks:
        job, source = Job(level, ranks), Source(ranks, 1e-3, 5)
        train(job, source, 6)
        overflows = [job.step(source(1e5)).overflow for _ in range(30)]
        assert any(overflows[:1]) and not any(overflows[20:])


@every_framework
@pytest.mark.parametrize("level", KEEPING)
def test_every_framework_sees_the_same(level: str, framework: str) -> None:
    ranks = min(2, max(ROWS[level].ranks))
    job, source = Job(level, ranks, ops_of(framework)), Source(ranks, 1.0, 4)
    train(job, source, 3)
    for size in (1e6, 1e38):
        grads = source()
        grads[0] = spiked(grads[0], "layer", size, source.rng)
        outcome = job.step(grads)
        assert outcome.overflow and outcome.finite and job.owed() == 0
        outcome = job.step(source())
        assert not outcome.overflow and np.abs(outcome.mean).max() < 30
