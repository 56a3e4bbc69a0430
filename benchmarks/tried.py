"""Ideas that are tried in ``quality.py``'s trainings before anything is built; ``NOTES.md`` says what came of them.

    python benchmarks/tried.py --tasks text --json runs.jsonl none delayed/none lr0.7/delayed/none

A row is a row of ``quality.py`` with words before it, each with a slash; with ``stepsN`` a run has N steps. Runs that
the file has already are not repeated; the table has all rows asked for, against the first.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality import (
    TASKS,
    Batch,
    Exchange,
    Step,
    Summable,
    Task,
    Training,
    _hand_over,
    _sum,
    aligned,
    error_of,
)
from torch import Tensor

from hvdplus.compression import IntB, Spec, parse
from hvdplus.compression.hashing import uniform
from hvdplus.compression.lowrank import most_square

# --- late sums ----------------------------------------------------------------------------------------------------


class Late(Training):
    """Sums are applied a step later than usual, from the first compressed step on."""

    form = "delayed"
    """``delayed``; ``ahead``: gradients are those of the weights with the last change once more; ``own``: of the
    weights with the rank's own pending gradient; ``acco``: half a batch each at the weights and at an estimate of the
    next."""

    def run(self) -> Iterator[Step]:
        """Step by step."""
        draw = torch.Generator().manual_seed(1000 + self.seed)
        self._optimizer = self.task.optimizer(self.model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: self.factor(step, self.steps))
        self._parameters = list(self.model.parameters())
        self._pending: Tensor | None = None
        self._grads: Sequence[Tensor] = ()
        self._change = [torch.zeros_like(parameter) for parameter in self._parameters]
        for step in range(self.steps):
            batches = [self.task.batch(rank, self.ranks, draw) for rank in range(self.ranks)]
            late = step >= self.dense_steps
            take = self._half_steps if late and self.form == "acco" else self._step
            losses, total = take(batches, step, late)
            scheduler.step()
            yield Step(step, statistics.fmean(losses), self._grads, total, self.compresses(step))
            if not torch.isfinite(total).all():
                return

    def _step(self, batches: Sequence[Batch], step: int, late: bool) -> tuple[Sequence[float], Tensor]:
        losses, self._grads = self._found(batches)
        total = self.summed(self._grads, step)
        applied = self._pending if late else total
        if applied is not None:
            old = [parameter.detach().clone() for parameter in self._parameters]
            self._apply(applied)
            self._change = [new.detach() - was for new, was in zip(self._parameters, old, strict=True)]
        if late:
            self._pending = total
        return losses, total

    def _found(self, batches: Sequence[Batch]) -> tuple[Sequence[float], Sequence[Tensor]]:
        """Losses and gradients of a step; nothing pends in the first one that is late."""
        if self._pending is None or self.form == "delayed":
            return self.gradients(batches)
        if self.form == "ahead":
            self._move(self._change, 1.0)
            found = self.gradients(batches)
            self._move(self._change, -1.0)
            return found
        losses, grads = [], []
        for own, batch in zip(self._grads, batches, strict=True):
            before = self._snapshot()
            self._apply(own * self.ranks)
            (loss,), (grad,) = self.gradients([batch])
            self._restore(before)
            losses.append(loss)
            grads.append(grad)
        return losses, grads

    def _half_steps(self, batches: Sequence[Batch], step: int, late: bool) -> tuple[Sequence[float], Tensor]:
        first, second = zip(*map(_halves, batches), strict=True)
        losses, self._grads = self.gradients(first)
        total, pending = self.summed(self._grads, step), self._pending
        if pending is None:
            _, others = self.gradients(second)
            self._apply(total)
        else:
            before = self._snapshot()
            self._apply(pending)
            _, others = self.gradients(second)
            self._restore(before)
            self._apply((total + pending) / 2)
        self._pending = self.summed(others, step)
        return losses, self._pending

    def _apply(self, total: Tensor) -> None:
        _hand_over(total / self.ranks, self._parameters, self.layout)
        self._optimizer.step()

    def _move(self, change: Sequence[Tensor], sign: float) -> None:
        with torch.no_grad():
            for parameter, one in zip(self._parameters, change, strict=True):
                parameter += sign * one

    def _snapshot(self) -> tuple[list[Tensor], dict[str, Any]]:
        return [one.detach().clone() for one in self._parameters], copy.deepcopy(self._optimizer.state_dict())

    def _restore(self, before: tuple[list[Tensor], dict[str, Any]]) -> None:
        with torch.no_grad():
            for parameter, was in zip(self._parameters, before[0], strict=True):
                parameter.copy_(was)
        self._optimizer.load_state_dict(before[1])


def _halves(batch: Batch) -> tuple[Batch, Batch]:
    half = len(batch.inputs) // 2
    return Batch(batch.inputs[:half], batch.labels[:half]), Batch(batch.inputs[half:], batch.labels[half:])


# --- rotation -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rotated(IntB):
    """``intB`` of blocks that were multiplied by random signs and a Hadamard matrix, each both orthogonal."""

    block: int = 0
    """A power of 2; 0: no rotation"""
    strided: bool = False
    """Whether a block takes elements from all over the bucket instead of neighbours."""
    step: float = 0.0
    """Distance of two levels, in root mean squares of the body; 0: that of ``intB``."""

    def clip_multiple(self, levels: int) -> float:
        """The largest level, in root mean squares."""
        return self.step * levels if self.step else super().clip_multiple(levels)

    @property
    def name(self) -> str:
        """Unlike ``intB``'s."""
        return f"rotated{self.block}{self.strided}{self.step}{super().name}"

    def encode(self, ops: Any, ctx: Any, grad: Tensor, residual: Tensor | None = None) -> Tensor:
        """Turned, then rounded."""
        return super().encode(ops, ctx, self.turn(ctx.spec, grad, back=False))

    def decode(self, ops: Any, ctx: Any, total: Tensor) -> Tensor:
        """Integers, turned back."""
        return self.turn(ctx.spec, super().decode(ops, ctx, total), back=True)

    def remain(self, ops: Any, ctx: Any, grad: Tensor, payload: Tensor) -> Tensor:
        """By way of ``decode``."""
        return grad - self.decode(ops, ctx, payload)

    def ask(self, ops: Any, ctx: Any, grad: Tensor) -> Tensor:
        """About the turned gradient."""
        return super().ask(ops, ctx, self.turn(ctx.spec, grad, back=False))

    def turn(self, spec: Spec, bucket: Tensor, back: bool) -> Tensor:
        """The rotation or its inverse; what does not fill a block stays."""
        if not self.block:
            return bucket
        count = spec.body // self.block
        end = count * self.block
        signs = self._signs(end)
        body = bucket[:end] if back else bucket[:end] * signs
        rows = body.view(self.block, count).t() if self.strided else body.view(count, self.block)
        turned = _hadamard(rows.contiguous())
        body = (turned.t() if self.strided else turned).reshape(-1)
        return torch.cat([body * signs if back else body, bucket[end:]])

    def _signs(self, count: int) -> Tensor:
        if count not in SIGNS:
            SIGNS[count] = torch.from_numpy(np.where(uniform((7,), count) < 0.5, -1, 1).astype(np.float32))
        return SIGNS[count]


SIGNS: dict[int, Tensor] = {}


def _hadamard(rows: Tensor) -> Tensor:
    """Every row times a normalised Hadamard matrix, its own inverse; by factors of 16 at most."""
    count, length = rows.shape
    span = 1
    while span < length:
        factor = min(16, length // span)
        matrix = torch.ones(1, 1)
        while len(matrix) < factor:
            matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
        rows = matrix @ rows.view(-1, factor, span) if span > 1 else rows.reshape(-1, factor) @ matrix
        span *= factor
    return rows.reshape(count, length) * length**-0.5


# --- residuals that fade ------------------------------------------------------------------------------------------


class Fading(Summable):
    """Residuals are multiplied by ``kept`` in every step."""

    kept = 1.0

    def joined(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradients and what is kept of residuals."""
        if self.residuals is not None:
            self.residuals = [residual * self.kept for residual in self.residuals]
        return super().joined(grads)


# --- matrices -----------------------------------------------------------------------------------------------------


def _projected(spec: Spec, rank: int) -> list[tuple[int, int, int]]:
    """(Start, rows, columns) of the matrices that ``lowrank`` projects."""
    starts, found = np.cumsum([0, *spec.sizes]).tolist(), []
    for start, shape in zip(starts, spec.shapes, strict=False):
        rows, columns = most_square(shape)
        if 2 * rank <= min(rows, columns):
            found.append((start, rows, columns))
    return found


def _basis(columns: Tensor) -> Tensor:
    return torch.linalg.qr(columns)[0]


# --- ranks by singular values -------------------------------------------------------------------------------------


class Planned(Exchange):
    """``lowrank`` with a rank a matrix, planned anew now and then at the bytes of one rank for all."""

    def __init__(self, rank: int, spec: Spec, every: int, relative: bool, log: Callable[[list[int]], None]) -> None:
        """``every``: steps between two plans; 0: never. ``relative``: by each matrix' share of its own energy."""
        self.spec, self._every, self._relative, self._log = spec, every, relative, log
        self._side, self._step = 0, 0
        self._places = _projected(spec, rank)
        self._draw = torch.Generator().manual_seed(5)
        self.planned = [rank] * len(self._places)
        self._bases = [[self._fresh(length, rank) for length in (columns, rows)] for _, rows, columns in self._places]
        self._budget = self._spent(self.planned)
        self._energies: list[Tensor | None] = [None] * len(self._places)

    @property
    def bytes_a_step(self) -> float:
        """Mean over sides."""
        dense = self.spec.size - sum(rows * columns for _, rows, columns in self._places)
        return 4 * (dense + self._spent(self.planned) / 2)

    def _spent(self, ranks: Sequence[int]) -> int:
        return sum(r * (rows + columns) for r, (_, rows, columns) in zip(ranks, self._places, strict=True))

    def _fresh(self, length: int, rank: int) -> Tensor:
        return _basis(torch.randn(length, rank, generator=self._draw))

    def add(self, grads: Sequence[Tensor]) -> Tensor:
        """One side."""
        joined = self.joined(grads)
        total, left = torch.stack(joined).sum(dim=0), [torch.zeros_like(grad) for grad in grads]
        side = self._side
        for number, (start, rows, columns) in enumerate(self._places):
            end, basis = start + rows * columns, self._bases[number][side]
            factor = None
            for sent, residual in zip(joined, left, strict=True):
                matrix = sent[start:end].view(rows, columns)
                own = matrix.t() @ basis if side else matrix @ basis
                arrives = basis @ own.t() if side else own @ basis.t()
                residual[start:end] = (matrix - arrives).flatten()
                factor = own if factor is None else factor + own
            total[start:end] = (basis @ factor.t() if side else factor @ basis.t()).flatten()
            left_vectors, sizes, _ = torch.linalg.svd(factor, full_matrices=False)
            before = self._energies[number]
            now = sizes**2
            self._energies[number] = now if before is None or len(before) != len(now) else 0.9 * before + 0.1 * now
            self._bases[number][1 - side] = left_vectors
        self.residuals = left
        self._side = 1 - side
        self._step += 1
        if self._every and (self._step == 20 or self._step % self._every == 0):
            self._plan()
        return total

    def _plan(self) -> None:
        spectra = []
        for (_, rows, columns), energies in zip(self._places, self._energies, strict=True):
            known = [*energies.tolist()]
            if self._relative:
                known = [one / max(sum(known), 1e-30) for one in known]
            half = len(known) // 2
            ratio = (known[-1] / max(known[half], 1e-30)) ** (1 / max(1, len(known) - 1 - half)) if half else 0.8
            while len(known) < min(rows, columns) // 2:
                known.append(known[-1] * min(ratio, 0.98))
            spectra.append(known)
        ranks = [1] * len(spectra)
        open_still = set(range(len(spectra)))
        while open_still:
            best = max(
                open_still,
                key=lambda i: spectra[i][ranks[i]] / (self._places[i][1] + self._places[i][2]),
            )
            ranks[best] += 1
            if self._spent(ranks) > self._budget:
                ranks[best] -= 1
                open_still.discard(best)
            elif ranks[best] >= len(spectra[best]):
                open_still.discard(best)
        for number, (rank, (_, rows, columns)) in enumerate(zip(ranks, self._places, strict=True)):
            for side, length in enumerate((columns, rows)):
                basis = self._bases[number][side]
                more = rank - basis.shape[1]
                if more > 0:
                    joined = torch.cat([basis, self._fresh(length, more)], dim=1)
                    self._bases[number][side] = torch.linalg.qr(joined)[0]
                else:
                    self._bases[number][side] = basis[:, :rank].contiguous()
        self.planned = ranks
        self._log(ranks)


# --- both bases in one pass -----------------------------------------------------------------------------------------


class Both(Exchange):
    """``lowrank`` that sends both sides in every step, each by a basis that earlier sums have taught.

    Of a matrix G a rank sends ``A = G Q`` and ``W = G^T U``. Delivered is, by ``form``:

    ``both``: what either basis spans, ``A Q^T + U W^T - U (U^T A) Q^T``; the next bases are those of W and A.
    ``bothsvd``: the same; the next bases are the largest singular vectors of what was delivered.
    ``bothdraw``: as ``both``, with a quarter of each basis drawn anew in every step.
    ``nystrom``: ``Y C``, with Y the basis of the sum of A, and C by least squares from ``U^T Y C = W^T``; the next
    bases are those of C and Y. U has ``more`` columns besides, drawn anew in every step.
    """

    damping = 0.03

    def __init__(self, rank: int, spec: Spec, form: str, more: int = 0) -> None:
        self.spec, self._form, self._rank, self._more = spec, form, rank, more
        self._places = _projected(spec, rank)
        self._draw = torch.Generator().manual_seed(5)
        self._bases = [
            (self._fresh(columns, rank), self._fresh(rows, rank + more)) for _, rows, columns in self._places
        ]

    @property
    def bytes_a_step(self) -> float:
        """Both sides."""
        dense = self.spec.size - sum(rows * columns for _, rows, columns in self._places)
        factors = sum(self._rank * (rows + columns) + self._more * columns for _, rows, columns in self._places)
        return 4 * (dense + factors)

    def _fresh(self, length: int, rank: int) -> Tensor:
        return _basis(torch.randn(length, rank, generator=self._draw))

    def add(self, grads: Sequence[Tensor]) -> Tensor:
        """Both sides of every matrix."""
        joined = self.joined(grads)
        total, left = torch.stack(joined).sum(dim=0), [torch.zeros_like(grad) for grad in grads]
        for number, (start, rows, columns) in enumerate(self._places):
            end = start + rows * columns
            matrices = [sent[start:end].view(rows, columns) for sent in joined]
            arrive, self._bases[number] = self._exchanged(matrices, *self._bases[number])
            for matrix, arrives, residual in zip(matrices, arrive, left, strict=True):
                residual[start:end] = (matrix - arrives).flatten()
            total[start:end] = _sum(arrive).flatten()
        self.residuals = left
        return total

    def _exchanged(
        self, matrices: Sequence[Tensor], right: Tensor, left: Tensor
    ) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
        """Every rank's part of what arrives, and the next bases."""
        columns, rows = [matrix @ right for matrix in matrices], [matrix.t() @ left for matrix in matrices]
        all_columns, all_rows = _sum(columns), _sum(rows)
        if self._form == "nystrom":
            basis = _basis(all_columns)
            cosines = left.t() @ basis
            known = torch.eye(self._rank) * self.damping
            solved = torch.linalg.solve(cosines.t() @ cosines + known, cosines.t())
            arrive = [basis @ (solved @ row.t()) for row in rows]
            more = torch.randn(len(basis), self._more, generator=self._draw)
            return arrive, (_basis(all_rows @ solved.t()), _basis(torch.cat([basis, more], dim=1)))
        arrive = [a @ right.t() + left @ (w - right @ (a.t() @ left)).t() for a, w in zip(columns, rows, strict=True)]
        if self._form == "bothsvd":
            u, _, v = torch.linalg.svd(_sum(arrive), full_matrices=False)
            return arrive, (v[: self._rank].t().contiguous(), u[:, : self._rank].contiguous())
        if self._form == "bothdraw":
            drawn = self._rank // 4
            kept = self._rank - drawn
            parts = [
                torch.cat([found[:, :kept], torch.randn(len(found), drawn, generator=self._draw)], dim=1)
                for found in (_largest(all_rows), _largest(all_columns))
            ]
            return arrive, (_basis(parts[0]), _basis(parts[1]))
        return arrive, (_basis(all_rows), _basis(all_columns))


def _largest(columns: Tensor) -> Tensor:
    """Left singular vectors, the largest first."""
    return torch.linalg.svd(columns, full_matrices=False)[0]


# --- command line -------------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """A row's words."""

    row: str
    form: str = ""
    rate: float = 1.0
    steps: int = 0
    kept: float = 1.0
    turned: dict[str, Any] = field(default_factory=dict)
    every: int | None = None
    relative: bool = False
    both: str = ""
    more: int = 0


def read(text: str) -> Asked:
    """A row with its words."""
    *words, row = text.split("/")
    asked = Asked(row)
    for word in words:
        if word in ("delayed", "ahead", "own", "acco"):
            asked.form = word
        elif match := re.fullmatch(r"lr([\d.]+)", word):
            asked.rate = float(match[1])
        elif match := re.fullmatch(r"steps(\d+)", word):
            asked.steps = int(match[1])
        elif match := re.fullmatch(r"keep([\d.]+)", word):
            asked.kept = float(match[1])
        elif match := re.fullmatch(r"rotated(\d+)(s?)", word):
            asked.turned |= {"block": int(match[1]), "strided": bool(match[2])}
        elif match := re.fullmatch(r"apart([\d.]+)", word):
            asked.turned |= {"step": float(match[1])}
        elif match := re.fullmatch(r"planned(\d+)(r?)", word):
            asked.every, asked.relative = int(match[1]), bool(match[2])
        elif match := re.fullmatch(r"(both|bothsvd|bothdraw|nystrom)(\d*)", word):
            asked.both, asked.more = match[1], int(match[2] or 0)
        else:
            raise ValueError(f"Unknown word. Received: {word!r}")
    return asked


def train(text: str, task: Task, seed: int, steps: int, ranks: int) -> dict[str, Any]:
    """One run."""
    began, asked = time.monotonic(), read(text)
    task.learning_rate = type(task).learning_rate * asked.rate
    training = (Late if asked.form else Training)(task, asked.row, seed, asked.steps or steps, 15, ranks)
    if isinstance(training, Late):
        training.form = asked.form
    exchange, spec, plans = training.exchange, training.layout.spec, []
    if asked.turned:
        plain = parse(asked.row)
        exchange = Summable(Rotated(plain.width, **asked.turned), spec)  # type: ignore[attr-defined]
    elif asked.kept != 1.0:
        exchange = Fading(parse(asked.row), spec)
        exchange.kept = asked.kept
    elif asked.both:
        exchange = Both(parse(asked.row).rank, spec, asked.both, asked.more)  # type: ignore[attr-defined]
    elif asked.every is not None:
        exchange = Planned(parse(asked.row).rank, spec, asked.every, asked.relative, plans.append)  # type: ignore
    training.exchange = exchange
    errors, losses = [], []
    for step in training.run():
        losses.append(step.loss)
        if step.compressed:
            errors.append(error_of(training.exchange.residuals, step.grads))
    final = task.evaluate(training.model)
    return {
        "task": task.name,
        "row": text,
        "seed": seed,
        "steps": steps,
        "ranks": ranks,
        "final": final,
        "loss": statistics.fmean(losses[-50:]) / math.log(2),
        "bytes": training.exchange.bytes_a_step / (4 * training.layout.spec.size),
        "error": statistics.median(errors[-50:]) if errors else 0.0,
        "seconds": time.monotonic() - began,
        "plans": plans[:1] + plans[-1:],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--limit", type=float, default=200.0, help="seconds after which no run begins")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("rows", nargs="+")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    if asked.json.exists():
        for line in asked.json.read_text().splitlines():
            run = json.loads(line)
            known[run["task"], run["row"], run["seed"], run["steps"], run["ranks"]] = run
    began, missing = time.monotonic(), 0
    for name in asked.tasks.split(","):
        task = TASKS[name]()
        steps = asked.steps or task.steps
        for seed in range(asked.seeds):
            for row in asked.rows:
                key = (name, row, seed, steps, asked.ranks)
                if key not in known:
                    if time.monotonic() - began > asked.limit:
                        missing += 1
                        continue
                    known[key] = train(row, task, seed, steps, asked.ranks)
                    with asked.json.open("a") as file:
                        file.write(json.dumps(known[key]) + "\n")
        sign = -1 if task.higher_is_better else 1
        table = [("row", "n", "bytes [%]", task.metric, "se", "worse than first", "+-", "train loss", "error", "s")]
        for row in asked.rows:
            runs, base = (
                {seed: known.get((name, one, seed, steps, asked.ranks)) for seed in range(asked.seeds)}
                for one in (row, asked.rows[0])
            )
            runs = {seed: run for seed, run in runs.items() if run}
            if not runs or not all(base[seed] for seed in runs):
                continue
            finals = [run["final"] for run in runs.values()]
            worse = [sign * (run["final"] - base[seed]["final"]) for seed, run in runs.items()]
            mean = [statistics.fmean(run[key] for run in runs.values()) for key in ("loss", "error", "seconds")]
            table.append(
                (
                    row,
                    str(len(runs)),
                    f"{100 * next(iter(runs.values()))['bytes']:.2f}",
                    f"{statistics.fmean(finals):.4f}",
                    f"{_se(finals):.4f}",
                    f"{statistics.fmean(worse):+.4f}",
                    f"{_se(worse):.4f}",
                    f"{mean[0]:.4f}",
                    f"{mean[1]:.2f}",
                    f"{mean[2]:.1f}",
                )
            )
        print(f"\n{name}, {asked.ranks} ranks, {steps} steps\n{aligned(table)}", flush=True)
    print(f"{time.monotonic() - began:.0f} s, {missing} runs missing")


def _se(values: Sequence[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan


if __name__ == "__main__":
    main()
