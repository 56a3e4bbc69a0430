"""Repeat the controller's decisions from a run log: the same figures give the same decisions on any machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple

from hvdplus.control.config import Config
from hvdplus.control.controller import Controller, Decision, Observation
from hvdplus.control.link import LevelCost
from hvdplus.control.meter import StepTimes
from hvdplus.log.facts import Record, check_not_empty, probes_of, run_of


class Replayed(NamedTuple):
    """A decision, and the level that it left."""

    before: int
    decision: Decision


def replay(records: Sequence[Record], **limits: float) -> tuple[tuple[str, ...], list[Replayed]]:
    """The levels of a run, and the decisions that the controller makes from the figures in its log.

    Args:
        records: the log of a run at ``auto``, read from its file (traces are not kept in memory).
        limits: fields of ``Config`` to change; without any, decisions come out as in the run.

    Raises:
        ValueError: the log holds no limits or no traces, which a replay needs, or it is of another version.
    """
    check_not_empty(records)
    run = run_of(records)
    if not run.get("limits"):
        raise ValueError("only the log of a run at compression auto, by this version of hvdplus, can be replayed")
    if other := sorted(run["limits"].keys() ^ {entry.name for entry in fields(Config)}):
        raise ValueError(f"the log is of another version of hvdplus: one of both has no limit {', '.join(other)}")
    if not any(record["kind"] == "trace" for record in records):
        raise ValueError("the log holds no step to decide from (steps are written every 50 steps and at the end)")
    names = tuple(run["levels"])
    controller = Controller(names, costs_of(run), Config(**{**run["limits"], **limits}))
    controller.begin(probes_of(run))
    decisions = []
    for record in records:
        if record["kind"] == "resize":
            controller.costs = costs_of(record)
        elif record["kind"] == "forbid":
            controller.forbid(names.index(record["level"]), record["reason"])
        elif record["kind"] == "stretch":
            controller.stretch(record["factor"])
        elif record["kind"] == "preview":
            controller.foresee({names.index(level): error for level, error in record["errors"].items()})
        elif record["kind"] == "resume":
            _go_on_from(record, controller)
        elif record["kind"] == "trace":
            for level, *micros, error, norm, learning_rate, probe_bytes, flushes in record["steps"]:
                times = StepTimes(*(value / 1e6 for value in micros))
                error, norm = (math.nan if value is None else value for value in (error, norm))
                before = controller.level
                seen = Observation(times, error, norm, learning_rate, probe_bytes, flushes=bool(flushes))
                decision = controller.observe(level, seen)
                if decision:
                    decisions.append(Replayed(before, decision))
    return names, decisions


def _go_on_from(record: Record, controller: Controller) -> None:
    """What the controller knew when a checkpoint was loaded; nothing for a fixed level."""
    if not record["controller"]:
        return
    try:
        controller.recall(record["controller"])
    except ValueError as error:
        message = "the log goes on from a checkpoint of another version of hvdplus, or is damaged: in its controller "
        raise ValueError(message + str(error)) from None


def costs_of(record: Record) -> tuple[LevelCost, ...]:
    """Costs of all levels as a ``run`` or ``resize`` record has them, the same to the last bit as the job's."""
    return tuple(
        LevelCost(
            level["payload_bytes"],
            level["last_bytes"],
            level["messages"],
            round(level["codec_ms"] * 1e3) / 1e6,
            level["keeps_residual"],
            level.get("passes", 1),
            level.get("delay_weight", 1.0),
        )
        for level in record["levels"].values()
    )
