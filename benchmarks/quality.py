"""What compression costs in final quality, measured on real data without a network or a download.

    python benchmarks/quality.py --quick            some minutes on one core
    python benchmarks/quality.py                    some 40 minutes; the figures to quote

Two tasks. ``digits``: a small CNN on scikit-learn's 1797 handwritten digits, SGD with momentum, test accuracy.
``text``: a transformer of characters on the source text of Python's own standard library, Adam, validation loss in bits
a character. One process plays N ranks: from the same weights each computes the gradient of its own minibatch and
encodes it with its own residual; payloads are added, decoded, divided by N and handed to the optimizer. As in a real
run there are some dense steps first, and vectors and tiny tensors travel whole. All rows of a seed share initial
weights, data order, learning rates and schedule (tuned for dense), so rows are paired.

References, written here in plain torch with error feedback, none of which one ring all-reduce could carry:

    block-topk:s     blocks of the largest true energy, of the ranks' summed gradients and residuals in the same step;
                     at most the bytes of topk:s, the choice itself taken for free
    element-topk:s   every rank its own largest elements (Deep Gradient Compression, arXiv 1712.01887), 4 bytes of index
                     and 4 of value each, at most the bytes of topk:s

How to read it. ``bytes`` is what a rank sends in a compressed step, as a share of dense, mean over the sides;
``final`` is the mean and the standard deviation over seeds; ``worse`` is the mean over seeds of the paired difference,
positive where the row is worse than what it is held against, and ``+-`` the standard error of that mean. A target is
met (``ok``) where ``worse`` is not above the *spread*: the standard deviations over seeds of the two rows, pooled:
sqrt((sd1^2 + sd2^2) / 2). Rows without a target report only what they cost. ``diverged`` counts the seeds in which
something was not finite (the figure is then that of the weights before) or nothing was learned. ``error`` is what
the automatic controller's budget bounds: in every compressed step the norm of what is held back (residual) over that of
the rank's own gradient (without the residual it joins), both root mean squares over ranks, and of these the median of
the last 50 compressed steps. (The controller looks at the sums over ranks, which differ from that for ``powersgd``.)
The exit code is 0 whatever comes out: this is a report.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import sysconfig
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from hvdplus.adapters.torch.ops import TorchOps
from hvdplus.compression import Compressor, Spec, parse

ROWS = (
    "none",
    "fp16",
    "int8",
    "int4",
    "int8:stochastic",
    "qsgd:8",
    "terngrad",
    "signsgd",
    "randomk:0.05",
    "topk:0.05",
    "block-topk:0.05",
    "element-topk:0.05",
    "topk:0.01",
    "block-topk:0.01",
    "element-topk:0.01",
    "lowrank:4",
    "lowrank:2",
    "powersgd:4",
    "powersgd:2",
    "powersgd:1",
    "topk:0.05+int8",
    "lowrank:4+fp16",
    "lowrank:8+fp16",
)
DENSE = "none"
SMOOTHED_STEPS = 50
"""Compressed steps at the end of a run of whose errors the median is reported."""
SMALLEST_COMPRESSED = 256
"""Elements below which a tensor travels whole."""
CHARACTERS = 96
"""Newline, then printable ASCII; everything else is a question mark."""
CONTEXT = 32
MODULES = (
    "argparse.py",
    "ast.py",
    "asyncio/base_events.py",
    "bdb.py",
    "collections/__init__.py",
    "configparser.py",
    "csv.py",
    "dataclasses.py",
    "datetime.py",
    "difflib.py",
    "doctest.py",
    "email/message.py",
    "enum.py",
    "fractions.py",
    "ftplib.py",
    "gzip.py",
    "heapq.py",
    "http/client.py",
    "inspect.py",
    "json/decoder.py",
    "logging/__init__.py",
    "mailbox.py",
    "optparse.py",
    "pathlib.py",
    "pdb.py",
    "pickle.py",
    "shutil.py",
    "socket.py",
    "statistics.py",
    "subprocess.py",
    "tarfile.py",
    "textwrap.py",
    "threading.py",
    "tokenize.py",
    "traceback.py",
    "typing.py",
    "unittest/case.py",
    "urllib/request.py",
    "uuid.py",
    "zipfile.py",
)
CHARACTERS_A_MODULE = 40_000


# --- tasks --------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Inputs and labels."""

    inputs: Tensor
    labels: Tensor


class Task(ABC):
    """Something to train."""

    name: str
    metric: str
    """Name and unit of the final figure."""
    higher_is_better: bool
    hopeless: float
    """A final figure that is no better means that nothing was learned."""
    steps: int
    quick_steps: int
    learning_rate: float

    @abstractmethod
    def model(self) -> nn.Module:
        """New weights, from torch's global generator."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """What the user would have."""

    @abstractmethod
    def batch(self, rank: int, ranks: int, draw: torch.Generator) -> Batch:
        """A rank's next minibatch."""

    @abstractmethod
    def probe(self) -> Batch:
        """Fixed data whose loss tells how far a training has come."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> float:
        """The final figure."""


class Digits(Task):
    """A small CNN on 8 x 8 digits; a shard a rank, half of all digits to test on."""

    name, metric, higher_is_better = "digits", "test accuracy [%]", True
    hopeless = 20.0
    steps, quick_steps = 400, 120
    learning_rate = 0.1
    images_a_rank = 16

    def __init__(self) -> None:
        data = load_digits()
        order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
        self._images = torch.from_numpy(data.images / 16).float().unsqueeze(1)[order]
        self._labels = torch.from_numpy(data.target).long()[order]
        self._train = len(order) // 2

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding="same"),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding="same"),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=0.9)

    def batch(self, rank: int, ranks: int, draw: torch.Generator) -> Batch:
        picked = torch.randint(self._train // ranks, (self.images_a_rank,), generator=draw) * ranks + rank
        return Batch(self._images[picked], self._labels[picked])

    def probe(self) -> Batch:
        """What is trained on."""
        return Batch(self._images[: self._train], self._labels[: self._train])

    def evaluate(self, model: nn.Module) -> float:
        with torch.no_grad():
            guesses = model(self._images[self._train :]).argmax(dim=1)
        return 100 * (guesses == self._labels[self._train :]).float().mean().item()


class Layer(nn.Module):
    """A transformer's layer, normalised before each part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_expansion = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.contract(functional.gelu(self.expand(self.before_expansion(x))))


class Transformer(nn.Module):
    """Logits of the next character at every place."""

    def __init__(self, width: int = 96, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(CHARACTERS, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CHARACTERS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.characters(x) + self.places.weight)))  # type: ignore[no-any-return]


class Text(Task):
    """A transformer of characters on Python's own source text; the last tenth of every module to validate on."""

    name, metric, higher_is_better = "text", "validation loss [bits/character]", False
    hopeless = 5.0
    steps, quick_steps = 500, 100
    learning_rate = 0.006
    windows_a_rank = 6
    windows_to_validate = 512

    def __init__(self) -> None:
        train, validate = [], []
        for module in MODULES:
            text = _characters(Path(sysconfig.get_path("stdlib")) / module)
            train.append(text[: len(text) * 9 // 10])
            validate.append(text[len(text) * 9 // 10 :])
        self._train, held_out = torch.cat(train), torch.cat(validate)
        self._validate = _windows(
            held_out, torch.linspace(0, len(held_out) - CONTEXT - 1, self.windows_to_validate).long()
        )

    def model(self) -> nn.Module:
        return Transformer()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=self.learning_rate)

    def batch(self, rank: int, ranks: int, draw: torch.Generator) -> Batch:
        share = (len(self._train) - CONTEXT - 1) // ranks
        return _windows(self._train, torch.randint(share, (self.windows_a_rank,), generator=draw) + rank * share)

    def probe(self) -> Batch:
        """What is validated on."""
        return self._validate

    def evaluate(self, model: nn.Module) -> float:
        with torch.no_grad():
            return loss_of(model, self._validate).item() / math.log(2)


def _characters(path: Path) -> Tensor:
    codes = torch.tensor(list(path.read_bytes()[:CHARACTERS_A_MODULE]))
    codes = torch.where((codes >= 32) & (codes < 127), codes, torch.where(codes == 10, 31, ord("?")))
    return codes - 31


def _windows(text: Tensor, starts: Tensor) -> Batch:
    places = starts.unsqueeze(1) + torch.arange(CONTEXT + 1)
    return Batch(text[places[:, :-1]], text[places[:, 1:]])


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy in nats, mean over a minibatch."""
    return functional.cross_entropy(model(batch.inputs).flatten(0, -2), batch.labels.flatten())


TASKS: dict[str, Callable[[], Task]] = {"digits": Digits, "text": Text}


# --- exchanges ----------------------------------------------------------------------------------------------------


class Exchange(ABC):
    """A way of the ranks' buckets (flat, compressible tensors first) to their sum, with a residual a rank."""

    spec: Spec
    residuals: list[Tensor] | None = None

    @property
    @abstractmethod
    def bytes_a_step(self) -> float:
        """What one rank sends, mean over the sides."""

    @abstractmethod
    def add(self, grads: Sequence[Tensor]) -> Tensor:
        """The sum of the ranks' buckets, as far as it arrives."""

    def joined(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradients and residuals, as new tensors."""
        if self.residuals is None:
            return [grad.clone() for grad in grads]
        return [grad + residual for grad, residual in zip(grads, self.residuals, strict=True)]


class Summable(Exchange):
    """One of the project's compressors: payloads that add."""

    def __init__(self, compressor: Compressor, spec: Spec) -> None:
        self.spec, self._compressor, self._ops = spec, compressor, TorchOps()
        self._ctx, self._to_ask = compressor.init(self._ops, spec), compressor.asking_steps

    @property
    def bytes_a_step(self) -> float:
        compressor = self._compressor
        sizes = [compressor.payload_bytes(self.spec, side) for side in range(compressor.sides)]
        return sum(sizes) / compressor.turns

    def add(self, grads: Sequence[Tensor]) -> Tensor:
        compressor, ops, ctx = self._compressor, self._ops, self._ctx
        before: Sequence[Tensor | None] = self.residuals or [None] * len(grads)
        joined = self.joined(grads)
        for number in range(compressor.passes):
            if self._to_ask:
                ctx = compressor.learn(ops, ctx, _sum([compressor.ask(ops, ctx, sent) for sent in joined]))
            if number < compressor.passes - 1:
                ctx = compressor.advance(ops, ctx, _sum([compressor.encode(ops, ctx, sent) for sent in joined]))
        self._to_ask = max(0, self._to_ask - 1)
        total: Tensor | None = None
        left = []
        for sent, residual in zip(joined, before, strict=True):
            payload = compressor.encode(ops, ctx, sent, residual)
            total = payload.clone() if total is None else total + payload
            if compressor.keeps_residual:
                left.append(compressor.remain(ops, ctx, sent, payload))
        self.residuals = left or None
        self._ctx = compressor.advance(ops, ctx, total)
        return compressor.decode(ops, ctx, total).clone()  # type: ignore[no-any-return]


def _sum(payloads: Sequence[Tensor]) -> Tensor:
    return sum(payloads[1:], payloads[0].clone())


class BlockTopK(Exchange):
    """Whole blocks of the largest true energy, chosen in the step itself."""

    def __init__(self, parameters: str, spec: Spec) -> None:
        rival = parse(f"topk:{parameters}")
        self._block: int = rival.block  # type: ignore[attr-defined]
        self.spec, self._count = spec, spec.body // self._block
        always = spec.size - self._count * self._block
        self._chosen = int(rival.payload_bytes(spec) / 4 - always) // self._block

    @property
    def bytes_a_step(self) -> float:
        return 4 * (self.spec.size - (self._count - self._chosen) * self._block)

    def add(self, grads: Sequence[Tensor]) -> Tensor:
        sent = self.joined(grads)
        total = torch.stack(sent).sum(dim=0)
        stays = torch.zeros_like(total, dtype=torch.bool)
        blocks = stays[: self._count * self._block].view(self._count, self._block)
        energies = total[: self._count * self._block].view(self._count, self._block).square().sum(dim=1)
        blocks.fill_(True)[energies.topk(self._chosen).indices] = False
        self.residuals = [one * stays for one in sent]
        return total * ~stays


class ElementTopK(Exchange):
    """Every rank its own largest elements."""

    def __init__(self, parameters: str, spec: Spec) -> None:
        self.spec = spec
        self._chosen = (parse(f"topk:{parameters}").payload_bytes(spec) - 4 * spec.tail) // 8

    @property
    def bytes_a_step(self) -> float:
        return 8 * self._chosen + 4 * self.spec.tail

    def add(self, grads: Sequence[Tensor]) -> Tensor:
        arrives, left = [], []
        for sent in self.joined(grads):
            stays = torch.ones_like(sent, dtype=torch.bool)
            stays[sent[: self.spec.body].abs().topk(self._chosen).indices] = False
            stays[self.spec.body :] = False
            arrives.append(sent * ~stays)
            left.append(sent * stays)
        self.residuals = left
        return torch.stack(arrives).sum(dim=0)


REFERENCES: dict[str, Callable[[str, Spec], Exchange]] = {
    "block-topk": BlockTopK,
    "element-topk": ElementTopK,
}


def make_exchange(row: str, spec: Spec) -> Exchange:
    """What a row's name stands for. Raises ValueError for a name that means nothing, or a number of ranks too large."""
    name, _, parameters = row.partition(":")
    return REFERENCES[name](parameters, spec) if name in REFERENCES else Summable(parse(row), spec)


# --- training -----------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Which parameters stand where in the one bucket."""

    order: tuple[int, ...]
    """Positions in the model's list of parameters: those that may be compressed, then the tail."""
    spec: Spec


@dataclass
class Result:
    """One run."""

    task: str
    row: str
    seed: int
    final: float
    """Where something was not finite: of the weights before."""
    diverged: bool
    """Something was not finite, or nothing was learned."""
    bytes_a_step: float
    dense_bytes: int
    error: float
    """Residual over gradient, in norms, smoothed; 0 without a residual."""
    seconds: float


def make_layout(model: nn.Module, ranks: int) -> Layout:
    """One bucket of all parameters, last first, as a backward pass delivers."""
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    backwards = range(len(shapes) - 1, -1, -1)
    body = [i for i in backwards if _may_be_compressed(shapes[i])]
    tail = [i for i in backwards if not _may_be_compressed(shapes[i])]
    spec = Spec(tuple(shapes[i] for i in body), ranks=ranks, tail=sum(math.prod(shapes[i]) for i in tail))
    return Layout((*body, *tail), spec)


def _may_be_compressed(shape: tuple[int, ...]) -> bool:
    return sum(length > 1 for length in shape) >= 2 and math.prod(shape) >= SMALLEST_COMPRESSED


def schedule(step: int, steps: int) -> float:
    """Factor of the learning rate: 1, then down to 0 over the last half, so that the end is not a matter of luck."""
    return min(1.0, 2 * (steps - step) / steps)


class Step(NamedTuple):
    """What a step leaves behind; the optimizer has moved, unless the sum was not finite."""

    number: int
    loss: float
    """Of the weights before, mean over ranks."""
    grads: Sequence[Tensor]
    """The ranks' own, without their residuals."""
    total: Tensor
    """What arrived of their sum."""
    compressed: bool


@dataclass
class Training:
    """A model in training, one process playing all ranks."""

    task: Task
    row: str
    seed: int
    steps: int
    dense_steps: int
    ranks: int
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    """In place of the task's."""
    factor: Callable[[int, int], float] = schedule
    """Step and steps -> factor of the learning rate."""

    def __post_init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.model = self.task.model()
        self.layout = make_layout(self.model, self.ranks)
        self.exchange = make_exchange(self.row, self.layout.spec)

    def run(self) -> Iterator[Step]:
        """Step by step; the last is that whose sum is not finite."""
        draw = torch.Generator().manual_seed(1000 + self.seed)
        optimizer = (self.optimizer or self.task.optimizer)(self.model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.factor(step, self.steps))
        parameters = list(self.model.parameters())
        for step in range(self.steps):
            losses, grads = self.gradients(self.task.batch(rank, self.ranks, draw) for rank in range(self.ranks))
            total = self.summed(grads, step)
            finite = bool(torch.isfinite(total).all())
            if finite:
                _hand_over(total / self.ranks, parameters, self.layout)
                optimizer.step()
                scheduler.step()
            yield Step(step, statistics.fmean(losses), grads, total, self.compresses(step))
            if not finite:
                return

    def compresses(self, step: int) -> bool:
        """Whether the step's sum is compressed."""
        return step >= self.dense_steps and self.row != DENSE

    def gradients(self, batches: Iterable[Batch]) -> tuple[Sequence[float], Sequence[Tensor]]:
        """Every rank's loss and gradient at the present weights."""
        losses, grads = zip(*(_gradient(self.model, self.layout, batch) for batch in batches), strict=True)
        return losses, grads

    def summed(self, grads: Sequence[Tensor], step: int) -> Tensor:
        """What arrives of the ranks' gradients."""
        if self.compresses(step):
            return self.exchange.add(grads)
        return torch.stack(list(grads)).sum(dim=0)


def train(task: Task, row: str, seed: int, steps: int, dense_steps: int, ranks: int) -> Result:
    """One run of one row."""
    began = time.monotonic()
    training = Training(task, row, seed, steps, dense_steps, ranks)
    exchange, errors = training.exchange, []
    for step in training.run():
        if step.compressed:
            errors.append(error_of(exchange.residuals, step.grads))
    final = task.evaluate(training.model)
    diverged = not torch.isfinite(step.total).all() or (final <= task.hopeless) == task.higher_is_better
    error = statistics.median(errors[-SMOOTHED_STEPS:]) if errors else 0.0
    dense_bytes = 4 * training.layout.spec.size
    seconds = time.monotonic() - began
    return Result(task.name, row, seed, final, diverged, exchange.bytes_a_step, dense_bytes, error, seconds)


def error_of(residuals: Sequence[Tensor] | None, grads: Sequence[Tensor]) -> float:
    """Norms over all ranks: as many residuals as gradients, so root mean squares over ranks have the same ratio."""
    if residuals is None:
        return 0.0
    left, fresh = (math.hypot(*(float(one.norm()) for one in tensors)) for tensors in (residuals, grads))
    return left / max(fresh, 1e-30)


def _gradient(model: nn.Module, layout: Layout, batch: Batch) -> tuple[float, Tensor]:
    """A minibatch's loss and its gradient, as a bucket."""
    loss = loss_of(model, batch)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), torch.cat([grads[i].flatten() for i in layout.order])


def _hand_over(mean: Tensor, parameters: Sequence[nn.Parameter], layout: Layout) -> None:
    start = 0
    for i in layout.order:
        parameters[i].grad = mean[start : start + parameters[i].numel()].view_as(parameters[i])
        start += parameters[i].numel()


# --- report -------------------------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """A row held against another, over the seeds of both."""

    worse: float
    error: float
    """Standard error of ``worse``"""
    spread: float

    @property
    def verdict(self) -> str:
        """Whether it is within the spread."""
        return "ok" if self.worse <= self.spread else "MISSED"


def compare(row: Sequence[Result], other: Sequence[Result], higher_is_better: bool) -> Comparison:
    """Paired by seed; both have the same seeds in the same order."""
    sign = -1.0 if higher_is_better else 1.0
    differences = [sign * (a.final - b.final) for a, b in zip(row, other, strict=True)]
    spread = math.sqrt(statistics.mean(statistics.stdev([run.final for run in runs]) ** 2 for runs in (row, other)))
    return Comparison(statistics.fmean(differences), statistics.stdev(differences) / len(differences) ** 0.5, spread)


def rivals(row: str) -> Iterator[tuple[str, bool, str]]:
    """What a row is held against beside dense: (reference, whether that is a target, in words)."""
    name, _, parameters = row.partition(":")
    if name == "topk" and "+" not in row:
        yield f"block-topk:{parameters}", True, "undelayed, same bytes"
        yield f"element-topk:{parameters}", False, "undelayed, same bytes"
    elif name == "lowrank" and "+" not in row:
        yield f"powersgd:{parameters}", True, "two passes, same rank, twice the bytes"
        if int(parameters) % 2 == 0:
            yield f"powersgd:{int(parameters) // 2}", True, "two passes, same bytes"
    elif "+" in row:
        yield row.partition("+")[0], False, "without the second part"


def report(task: Task, results: dict[str, list[Result]]) -> str:
    """The table of one task and, below it, that of the targets."""
    digits = 2 if task.higher_is_better else 4
    table = [
        ("compressor", "bytes [% of dense]", "final: " + task.metric, "worse than dense", "error [x gradient]", "s")
    ]
    for row, runs in results.items():
        error = statistics.fmean(run.error for run in runs)
        seconds = statistics.fmean(run.seconds for run in runs)
        table.append(
            (
                row,
                f"{100 * runs[0].bytes_a_step / runs[0].dense_bytes:.2f}",
                _final(runs, digits),
                _worse(compare(runs, results[DENSE], task.higher_is_better), digits) if DENSE in results else "?",
                f"{error:.2f}" if error else "-",
                f"{seconds:.1f}",
            )
        )
    targets = [("row", "held against", "how", "worse", "target: at most", "verdict")]
    for row, runs in results.items():
        for reference, is_target, how in rivals(row):
            if reference in results:
                found = compare(runs, results[reference], task.higher_is_better)
                aim = (f"{found.spread:.{digits}f}", found.verdict) if is_target else ("no target", "-")
                targets.append((row, reference, how, _worse(found, digits), *aim))
        if DENSE in results and _is_held_against_dense(row):
            found = compare(runs, results[DENSE], task.higher_is_better)
            targets.append((row, DENSE, "", _worse(found, digits), "no target", "-"))
    unit = task.metric[task.metric.index("[") :]
    return f"{aligned(table)}\n\nTargets, {unit}: worse by at most the spread\n{aligned(targets)}"


def _is_held_against_dense(row: str) -> bool:
    is_reference = row == DENSE or row.partition(":")[0] in REFERENCES
    return not is_reference and not any(is_target for _, is_target, _ in rivals(row))


def _final(runs: Sequence[Result], digits: int) -> str:
    finals, diverged = [run.final for run in runs], sum(run.diverged for run in runs)
    lost = f"{diverged} of {len(runs)} diverged: " if diverged else ""
    return f"{lost}{statistics.fmean(finals):.{digits}f} sd {statistics.stdev(finals):.{digits}f}"


def _worse(found: Comparison, digits: int) -> str:
    return f"{found.worse:+.{digits}f} +- {found.error:.{digits}f}"


def aligned(table: Sequence[Sequence[str]]) -> str:
    """Columns of equal width; the first to the left, the others to the right."""
    first, *others = ([*column] for column in zip(*table, strict=True))
    columns = [[cell.ljust(max(map(len, first))) for cell in first]]
    columns += [[cell.rjust(max(map(len, column))) for cell in column] for column in others]
    lines = ["  ".join(line) for line in zip(*columns, strict=True)]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


# --- command line -------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    """What the user asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 seeds and fewer steps")
    parser.add_argument("--seeds", type=int, help="number of seeds, 2 or more (5, or 3 with --quick)")
    parser.add_argument("--steps", type=int, help="steps a run, dense ones included (each task has its own number)")
    parser.add_argument("--dense-steps", type=int, default=15, help="steps before compression (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks to play (%(default)s)")
    parser.add_argument("--tasks", default=",".join(TASKS), help="some of them, with commas (%(default)s)")
    parser.add_argument("--only", default=",".join(ROWS), help="rows, with commas; any compressor or reference")
    parser.add_argument("--json", type=Path, help="file for the figures of every run")
    asked = parser.parse_args()
    asked.seeds = asked.seeds or (3 if asked.quick else 5)
    asked.tasks, asked.only = asked.tasks.split(","), list(dict.fromkeys(asked.only.split(",")))
    unknown = [name for name in asked.tasks if name not in TASKS]
    if unknown:
        parser.error(f"--tasks takes {', '.join(TASKS)}. Received: {', '.join(unknown)}")
    if asked.seeds < 2:
        parser.error(f"--seeds takes 2 or more: a spread needs two. Received: {asked.seeds}")
    if asked.dense_steps < 0:
        parser.error(f"--dense-steps takes 0 or more. Received: {asked.dense_steps}")
    for row in asked.only:
        try:
            make_exchange(row, Spec(((64, 64),), ranks=asked.ranks))
        except ValueError as error:
            parser.error(f"--only: {row}: {error}")
    return asked


def measure(task: Task, asked: argparse.Namespace) -> dict[str, list[Result]]:
    """All runs of a task, seed by seed."""
    steps = asked.steps or (task.quick_steps if asked.quick else task.steps)
    spec = make_layout(task.model(), asked.ranks).spec
    seeds = ", ".join(map(str, range(asked.seeds)))
    print(
        f"\n{task.name}: {asked.ranks} ranks, {steps} steps of which {asked.dense_steps} dense, seeds {seeds}; "
        f"{spec.size} parameters in {len(spec.shapes)} tensors that may be compressed, of which {spec.tail} in vectors "
        "and tiny ones travel whole\n",
        flush=True,
    )
    results: dict[str, list[Result]] = {row: [] for row in asked.only}
    for seed in range(asked.seeds):
        for row in asked.only:
            results[row].append(train(task, row, seed, steps, asked.dense_steps, asked.ranks))
            run = results[row][-1]
            print(f"{task.name} seed {seed} {row}: {run.final:.4f} in {run.seconds:.1f} s", file=sys.stderr, flush=True)
    return results


def main() -> None:
    """Measure and print."""
    asked = arguments()
    torch.set_num_threads(1)
    began, runs = time.monotonic(), []
    for name in asked.tasks:
        task = TASKS[name]()
        results = measure(task, asked)
        print(report(task, results), flush=True)
        runs += [asdict(run) for of_row in results.values() for run in of_row]
        if asked.json:
            asked.json.write_text(json.dumps(runs, indent=1) + "\n")
    print(f"\n{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
