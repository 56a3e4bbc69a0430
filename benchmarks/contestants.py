"""The ranks' side of ``adaptive.py``: models on real data, trained by whoever is called next.

One job holds every contestant, each with its own copy of the model, so that they can be measured in turns under the
same conditions. Rank 0 takes commands over the socket that CONTESTANTS names, the other ranks from rank 0.

    auto                       hvdplus, as it comes
    level NAME                 hvdplus at one level
    traced NAME                the same, with a line of its log for every step
    horovod, horovod fp16      stock Horovod (over the same MPI settings, ring included)
    ddp, ddp fp16, ddp powersgd:R:S
                               PyTorch's own DistributedDataParallel over Gloo, with its communication hooks; PowerSGD
                               of rank R after S dense steps
    hook NAME [SETTING=VALUE ...]
                               hvdplus at one level, or auto, as the hook of DistributedDataParallel
    local H NAME [SETTING=VALUE ...]
                               hvdplus, H local steps between two exchanges at a level
    stale S [SETTING=VALUE ...]
                               hvdplus, nobody more than S exchanges ahead (any: no limit)
    postlocal H                PyTorch's own PostLocalSGDOptimizer, which averages parameters every H steps
    diloco H                   DiLoCo without compression: AdamW or whatever it is inside, Nesterov 0.7, 0.9 outside
    alone                      a rank with its share of the batch, and nobody to talk to

``hook auto #1`` is ``hook auto`` with another order of data, and so on: another training of the same kind.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client
from typing import Any

import horovod.torch as horovod
import quality
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn import functional

import hvdplus.torch as hvd
from hvdplus.control.meter import StepTimes


class Perceptron(quality.Digits):
    """Much gradient for little computation: 1.1 M parameters, 32 digits a rank."""

    name, learning_rate, images_a_rank = "mlp", 0.05, 32

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )


class Convolutions(quality.Digits):
    """Much computation for little gradient: 0.2 M parameters, 128 digits a rank."""

    name, learning_rate, images_a_rank = "cnn", 0.05, 128

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 64, 3, padding="same"),
            nn.ReLU(),
            *(part for _ in range(3) for part in (nn.Conv2d(64, 64, 3, padding="same"), nn.ReLU())),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1024, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )


class Characters(quality.Text):
    """In between: a transformer of 1.8 M parameters, 64 characters a rank."""

    name, learning_rate, windows_a_rank = "text", 0.001, 2

    def model(self) -> nn.Module:
        return quality.Transformer(width=224, layers=3)


class Bytes(Characters):
    """More gradient, and AdamW: a transformer of 3.3 M parameters."""

    name = "bytes"

    def model(self) -> nn.Module:
        return quality.Transformer(width=304, layers=3)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, weight_decay=0.01)


class Wide(Perceptron):
    """Ten times as much gradient: 10.2 M parameters, 32 digits a rank."""

    name = "wide"

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 2240),
            nn.ReLU(),
            nn.Linear(2240, 2240),
            nn.ReLU(),
            nn.Linear(2240, 2240),
            nn.ReLU(),
            nn.Linear(2240, 10),
        )


class WideText(Bytes):
    """Twice as much gradient: a transformer of 6.2 M parameters."""

    name = "wide text"

    def model(self) -> nn.Module:
        return quality.Transformer(width=416, layers=3)


class Recurrent(Characters):
    """Very much gradient: an LSTM of 48 M parameters, and SGD without momentum, so that a dozen of them have room."""

    name, learning_rate = "lstm", 0.1

    def model(self) -> nn.Module:
        return Lstm(1720)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate)


class Lstm(nn.Module):
    """Logits of the next character at every place. It forgets after every few characters: a step on one core does not
    take seconds then."""

    CHARACTERS_AT_A_TIME = 8

    def __init__(self, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(quality.CHARACTERS, width)
        self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, quality.CHARACTERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen, _ = self.layers(self.characters(x.reshape(-1, self.CHARACTERS_AT_A_TIME)))
        logits: torch.Tensor = self.head(seen).view(*x.shape, -1)
        return logits


TASKS: dict[str, Callable[[], quality.Task]] = {
    "mlp": Perceptron,
    "cnn": Convolutions,
    "text": Characters,
    "bytes": Bytes,
    "wide": Wide,
    "wide text": WideText,
    "lstm": Recurrent,
}


KINDS = {"local": "every", "stale": "staleness"}
"""Kind of contestant -> the setting that its first word is."""


class Contestant:
    """Somebody who trains a copy of the model."""

    def __init__(self, who: str, number: int, task: quality.Task, initial: nn.Module, seed: int) -> None:
        """``number``: of this contestant in the job; tensor names begin with it. ``seed``: of the order of data."""
        who, _, training = who.partition(" #")
        seed += int(training or 0)
        self.model = copy.deepcopy(initial)
        self._task = task
        self._draw = torch.Generator().manual_seed(1000 * seed + hvd.rank())
        self._paused_at = time.perf_counter()
        self._forward: nn.Module = self.model
        self.optimizer = task.optimizer(self.model)
        named = [(f"{number}.{name}", parameter) for name, parameter in self.model.named_parameters()]
        self.attached: Any = None
        kind, _, detail = who.partition(" ")
        if kind in ("auto", "level", "traced"):
            every_step = {"window_steps": 1} if kind == "traced" else None
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, named_parameters=named, compression=detail or "auto", settings=every_step
            )
        elif kind == "horovod":
            compression = horovod.Compression.fp16 if detail == "fp16" else horovod.Compression.none
            self.optimizer = horovod.DistributedOptimizer(
                self.optimizer, named_parameters=named, compression=compression
            )
        elif kind == "alone":
            pass
        elif kind == "hook":
            self._forward = _ddp(self.model, "")
            level, *others = detail.split()
            self.attached = hvd.ddp.attach(self._forward, self.optimizer, level, settings=_settings(others))
        elif kind == "ddp":
            self._forward = _ddp(self.model, detail)
        elif kind in ("local", "stale"):
            first, *others = detail.split()
            level = others.pop(0) if kind == "local" else "none"
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer,
                named_parameters=named,
                compression=level,
                settings={KINDS[kind]: first, **_settings(others)},
            )
        elif kind == "postlocal":
            self._forward, self.optimizer = _post_local(self.model, self.optimizer, int(detail))
        elif kind == "diloco":
            self.optimizer = DiLoCo(self.model, self.optimizer, int(detail))
        else:
            raise ValueError(f"Nobody is called {who!r}")

    def step(self, *, unseen: bool = False) -> float:
        """Train one step; returns its seconds. ``unseen``: hvdplus does not learn how long it took."""
        began = time.perf_counter()
        batch = self._task.batch(hvd.rank(), hvd.size(), self._draw)
        self.optimizer.zero_grad()
        logits = self._forward(batch.inputs)
        functional.cross_entropy(logits.flatten(0, -2), batch.labels.flatten()).backward()
        self.optimizer.step()
        seconds = time.perf_counter() - began
        for exchange in self._exchanges() if unseen else ():
            exchange.meter.last = StepTimes()
        return seconds

    def pause(self) -> None:
        """Others train now."""
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """Others have trained: no step of this contestant's lasted so long."""
        away = time.perf_counter() - self._paused_at
        for meter in (exchange.meter for exchange in self._exchanges()):
            if meter._began is not None:
                meter._began += away
                meter._under_way = {key: (began + away, done) for key, (began, done) in meter._under_way.items()}

    def _exchanges(self) -> list[Any]:
        """Of hvdplus; none in others."""
        fragments = getattr(self.optimizer, "_fragments", ())
        optimizers = (self.attached, self.optimizer, *(fragment.outer for fragment in fragments))
        return [exchange for each in optimizers if (exchange := getattr(each, "_exchange", None)) is not None]

    @property
    def coordinator(self) -> Any:
        """hvdplus's; None in others."""
        return getattr(self.attached or self.optimizer, "hvdplus", None)

    @property
    def level(self) -> str:
        """That hvdplus runs next; elsewhere empty."""
        coordinator = self.coordinator
        return coordinator.ladder.names[coordinator.plan.level] if coordinator else ""

    def evaluate(self, average: bool) -> float:
        """Loss of this rank's model, or of the ``average`` of all ranks'; training goes on as if nothing had been."""
        if not average:
            return self._task.evaluate(self.model)
        mean = copy.deepcopy(self.model)
        for number, parameter in enumerate(mean.parameters()):
            parameter.data = hvd.allreduce(parameter.data, name=f"contestants.evaluate.{number}")
        return self._task.evaluate(mean)


def _settings(words: Sequence[str]) -> dict[str, str]:
    """``name=value``, of each word."""
    return dict(word.split("=", 1) for word in words)


class DiLoCo:
    """arXiv 2311.08105 in plain PyTorch: every H steps the mean of all ranks' drifts is an outer gradient."""

    def __init__(self, model: nn.Module, inner: torch.optim.Optimizer, every: int) -> None:
        _join_gloo()
        self._inner, self._every, self._steps = inner, every, 0
        self._parameters = list(model.parameters())
        self._anchors = [nn.Parameter(p.detach().clone()) for p in self._parameters]
        self._outer = torch.optim.SGD(self._anchors, lr=0.7, momentum=0.9, nesterov=True)

    def zero_grad(self) -> None:
        self._inner.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self._inner.step()
        self._steps += 1
        if self._steps % self._every:
            return
        drifts = torch.cat([(a - p).view(-1) for a, p in zip(self._anchors, self._parameters, strict=True)])
        torch.distributed.all_reduce(drifts)
        means = (drifts / hvd.size()).split([p.numel() for p in self._parameters])
        for anchor, mean in zip(self._anchors, means, strict=True):
            anchor.grad = mean.view(anchor.shape)
        self._outer.step()
        for anchor, parameter in zip(self._anchors, self._parameters, strict=True):
            parameter.copy_(anchor)


def _post_local(
    model: nn.Module, optimizer: torch.optim.Optimizer, every: int
) -> tuple[nn.Module, PostLocalSGDOptimizer]:
    """PyTorch's own local SGD, which averages gradients in its first two steps."""
    _join_gloo()
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    state = post_localSGD_hook.PostLocalSGDState(None, torch.distributed.group.WORLD, POST_LOCAL_WARM, False)
    wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=every, warmup_steps=POST_LOCAL_WARM)
    return wrapped, PostLocalSGDOptimizer(optimizer, averager)


def _join_gloo() -> None:
    if not torch.distributed.is_initialized():
        store = torch.distributed.TCPStore(
            os.environ["CONTESTANTS_MASTER"], 29511, hvd.size(), is_master=hvd.rank() == 0
        )
        torch.distributed.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())


def _ddp(model: nn.Module, hook: str) -> nn.Module:
    _join_gloo()
    name, rank, start = (*hook.split(":"), "", "")[:3]
    # PowerSGD over several Gloo buckets aborts: one bucket.
    wrapped = nn.parallel.DistributedDataParallel(
        model, bucket_cap_mb=1000 if name == "powersgd" else 25, gradient_as_bucket_view=True
    )
    if name == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=int(rank), start_powerSGD_iter=int(start), min_compression_rate=1
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


WARM_STEPS = 2
"""Before a block."""
POST_LOCAL_WARM = 2
"""Steps in which PyTorch's local SGD still averages gradients."""


class Job:
    """What rank 0 is told, all ranks do."""

    def __init__(self) -> None:
        self._people: dict[str, Contestant] = {}
        self._number = 0
        # Momentum of weights whose gradients have become zero dwindles to numbers that processors are slow with: after
        # a thousand steps a step took a third longer, whoever trained.
        torch.set_flush_denormal(True)

    def model(self, name: str, seed: int = 0) -> dict[str, Any]:
        """Begin anew with a model: all contestants leave."""
        self._people.clear()
        self._task, self._seed = TASKS[name](), seed
        torch.manual_seed(seed)
        self._initial = self._task.model()
        hvd.broadcast_parameters(self._initial.state_dict(), root_rank=0)
        return {"parameters": sum(parameter.numel() for parameter in self._initial.parameters())}

    def forget(self, who: str) -> None:
        """The next steps of ``who`` begin from the initial weights."""
        self._people.pop(who, None)

    def steps(self, who: str, count: int, unseen: bool = False) -> dict[str, Any]:
        """Train ``count`` steps: seconds and levels of each, and the seconds that preparing for the first took.
        ``unseen``: as of ``Contestant.step``."""
        began = time.perf_counter()
        if who not in self._people:
            self._number += 1
            self._people[who] = Contestant(who, self._number, self._task, self._initial, self._seed)
        began = time.perf_counter() - began
        contestant = self._people[who]
        seconds, levels = [], []
        hvd.barrier()
        contestant.resume()
        for _ in range(count):
            levels.append(contestant.level)
            seconds.append(contestant.step(unseen=unseen))
        contestant.pause()
        return {"seconds": seconds, "levels": levels, "began": began, "level": contestant.level}

    def rhythm(self, who: str) -> tuple[int, int]:
        """Local steps between two exchanges, and those beside one."""
        rhythm = self._people[who].optimizer._rhythm
        return rhythm.every, rhythm.overlap

    def under_way(self, who: str) -> bool:
        """Whether an exchange runs beside local steps now."""
        rhythm = getattr(self._people[who].optimizer, "_rhythm", None)
        return rhythm is not None and any(at is not None for at in rhythm._began)

    def seconds(self, who: str, seconds: float) -> None:
        """Train for so long, each rank as many steps as it takes, and meet."""
        self.steps(who, 0)
        contestant, end = self._people[who], time.perf_counter() + seconds
        while time.perf_counter() < end:
            contestant.step()
        contestant.pause()
        contestant.optimizer.average_now()

    def blocks(self, turns: list[tuple[Any, ...]], rest_seconds: float) -> list[float]:
        """Mean seconds a step of everybody's block of so many steps; a mean, as some have more to do in every fifth
        or twentieth.

        Links rest for ``rest_seconds`` before each, so that nobody pays for the bytes of whoever was before. Nor for
        what they left in the processor's caches: a step or two come first that do not count, if a block has several,
        and that hvdplus does not learn from, as no training by itself has such steps.

        Args:
            turns: (who, steps), or (who, steps, steps before it that do not count).
        """
        seconds = []
        for who, count, *warm in turns:
            time.sleep(rest_seconds)
            self.steps(who, warm[0] if warm else min(WARM_STEPS, count - 1), unseen=True)
            seconds.append(statistics.mean(self.steps(who, count)["seconds"]))
        return seconds

    def dense_start(self, who: str) -> int:
        """Dense steps that ``who`` takes before it compresses."""
        kind, _, detail = who.partition(" ")
        if kind == "ddp" and "powersgd" in detail:
            return int(detail.rpartition(":")[2])
        if kind == "postlocal":
            return POST_LOCAL_WARM
        return 0

    def evaluate(self, who: str, average: bool = False) -> float:
        return self._people[who].evaluate(average)

    def records(self, who: str) -> list[dict[str, Any]]:
        """The run log of ``who`` so far."""
        contestant = self._people[who]
        return contestant.coordinator.log.records

    def identical(self, who: str) -> bool:
        return hvd.identical(self._people[who].model)


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    job = Job()
    line = Client(os.environ["CONTESTANTS"]) if hvd.rank() == 0 else None
    while True:
        command = line.recv() if line else None
        name, arguments = horovod.broadcast_object(command, root_rank=0, name="contestants.command")
        if name == "end":
            break
        answer = getattr(job, name)(**arguments)
        if line:
            line.send(answer)
    hvd.shutdown()


if __name__ == "__main__":
    main()
