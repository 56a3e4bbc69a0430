"""What the tests of plans and decisions share: coordinators whose ranks report what the test says.

Nothing is sent: the ranks' metadata tensors are added up here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdplus.control.link import LevelCost
from hvdplus.control.meter import StepTimes
from hvdplus.exchange.coordinator import Coordinator
from hvdplus.exchange.metadata import Metadata, Report, Slot, Sums, pack, read
from hvdplus.exchange.plan import Ladder, Plan
from hvdplus.log.runlog import RunLog
from hvdplus.settings import Settings

LADDER = ("none", "fp16", "lowrank:4")
NONE, FP16, LOWRANK = range(3)
SENT = {
    "none": 4000,
    "fp16": 2000,
    "int8": 1000,
    "qsgd:8": 1000,
    "topk:0.2:16": 900,
    "lowrank:4": 300,
    "lowrank:4+int8": 200,
    "lowrank:4+fp16": 150,
    "lowrank:1+int8": 60,
    "lowrank:1": 80,
    "lowrank:1+fp16": 40,
}
"""Bytes a step."""


def cost(sent: int, codec: float = 0.0, *, keeps_residual: bool = False) -> LevelCost:
    """A fortieth of the bytes leaves last, when nothing hides it any more."""
    return LevelCost(sent, sent // 40, 4, codec, keeps_residual)


def make(*names: str, auto: bool = False, ranks: int = 2, log: RunLog | None = None, **settings: Any) -> Coordinator:
    """A coordinator over ``names`` (default: the whole ladder). With ``auto`` it begins dense, and until steps take
    time its controller leaves the level to the test."""
    ladder = Ladder(names or LADDER)
    return Coordinator(
        ladder,
        Settings(**settings),
        auto=auto,
        ranks=ranks,
        costs=[
            cost(SENT[name], keeps_residual=compressor.keeps_residual)
            for name, compressor in zip(ladder.names, ladder.compressors, strict=True)
        ],
        log=log or RunLog(None),
    )


def report(times: StepTimes | None = None, **fields: float) -> Report:
    """One rank's report: ``times``, or the times among ``fields``, are of its previous step."""
    known = {name: fields.pop(name) for name in StepTimes._fields if name in fields}
    times = (times or StepTimes())._replace(**known)
    sums = {name: fields.pop(name) for name in Sums._fields if name in fields}
    mine = {
        "codec": times.codec,
        "exposed_comm": times.exposed_comm,
        "comm": times.comm,
        "input_wait": times.input_wait,
        "probe": times.probe,
    }
    return Report(Sums(**{"step": times.step, **sums}), Slot(**{**mine, **fields}))


def heard(*reports: Report, parameters: int = 3) -> Metadata:
    """What every rank reads of a step in which each rank reported so, and had all gradients."""
    ranks = len(reports)
    tensors = [pack(rank, ranks, mine, np.ones(parameters)) for rank, mine in enumerate(reports)]
    return read(np.sum(tensors, axis=0, dtype=np.float32), ranks)


def step(coordinator: Coordinator, *reports: Report) -> Plan:
    """One step: it runs the present plan, its metadata are read, the next plan is made. Returns the plan that ran, but
    for what it measures."""
    plan = coordinator.plan
    coordinator.observe(plan, heard(*(reports or (Report(),) * coordinator.ranks)))
    coordinator.advance()
    return plan._replace(measurement=0)


def go(coordinator: Coordinator, level: str) -> None:
    """Run ``level`` from the next plan on."""
    coordinator.set_level(coordinator.ladder.names.index(level))
    coordinator.advance()


def steps(coordinator: Coordinator, count: int) -> list[Plan]:
    """The plans of the next steps."""
    return [step(coordinator) for _ in range(count)]


BAD = (Report(), Report(Sums(nonfinite=1.0)))


class Run:
    """Drives coordinators with metadata whose times belong to the step before, as in a real job."""

    def __init__(
        self, *coordinators: Coordinator, milliseconds: Sequence[tuple[float, float, float]], slow_rank_ms: float = 0.0
    ) -> None:
        """``milliseconds``: (step, exposed communication, hidden communication), one entry a level."""
        self.coordinators = coordinators
        self.milliseconds = milliseconds
        self.slow_rank_ms = slow_rank_ms
        self.plans: list[Plan] = []
        """Plan of every step, from step 1 on, but for what it measures."""

    def steps(self, count: int, loss: float | None = None) -> None:
        first = self.coordinators[0]
        for _ in range(count):
            plan = first.plan
            residual = 0.5 * first.ladder.compressors[plan.level].keeps_residual
            reports = []
            for rank in range(first.ranks):
                fields = {"gradient_norm": 2.0, "residual_norm": residual} if plan.measurement else {}
                times = StepTimes()
                if self.plans:
                    step_ms, exposed_ms, hidden_ms = self.milliseconds[self.plans[-1].level]
                    waits = exposed_ms + (self.slow_rank_ms if rank else 0.0)
                    times = StepTimes(step_ms / 1e3, 0.001, waits / 1e3, 0.0005, hidden_ms / 1e3)
                if loss is not None:
                    fields |= {"loss": loss + rank, "losses": 1.0}
                reports.append(report(times, **fields))
            metadata = heard(*reports)
            for coordinator in self.coordinators:
                coordinator.observe(plan, metadata)
            after = {coordinator.advance() for coordinator in self.coordinators}
            assert len(after) == 1, "every rank makes the same plan"
            self.plans.append(plan._replace(measurement=0))


def windows(coordinator: Coordinator) -> list[dict[str, Any]]:
    return [record for record in coordinator.log.records if record["kind"] == "window"]


def decisions(coordinator: Coordinator) -> list[dict[str, Any]]:
    return [record for record in coordinator.log.records if record["kind"] == "decision"]


# Milliseconds of a step, exposed communication, hidden communication; 1.5 ms are codec and input.
SLOW = ((50.0, 40.0, 0.0), (30.0, 20.0, 0.0), (15.0, 4.0, 0.0))
MIDDLE = ((56.5, 15.0, 25.0), (41.6, 0.1, 19.9), (41.6, 0.1, 2.9))
FAST = ((10.0, 0.1, 3.0), (10.0, 0.1, 1.5), (10.0, 0.1, 0.5))
GENTLE = ((16.0, 5.0, 0.0), (15.5, 4.5, 0.0), (14.0, 2.0, 0.0))
"""Dense costs so little more that it is looked at again after 400 steps."""
