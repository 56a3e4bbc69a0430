"""Where gradients are on their way: buckets with what a rank holds for each of them, from step to step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hvdplus.buckets import Bucket
from hvdplus.compression import Context


class Side:
    """A side tensor under way; ``total`` waits for it once."""

    def __init__(self, wait: Callable[[], list[float]]) -> None:
        self._wait = wait
        self._total: list[float] | None = None

    def total(self) -> list[float]:
        """The sum over all ranks, on the host."""
        if self._total is None:
            self._total = self._wait()
        return self._total


@dataclass
class Lane:
    """One bucket on this rank, from step to step."""

    bucket: Bucket
    flat: torch.Tensor
    """What is sent before encoding: gradients plus released residual."""
    contexts: dict[int, Context] = field(default_factory=dict)
    """Level -> context, made when the level is first used."""
    residual: torch.Tensor | None = None
    """What encoding lost so far; None where nothing is outstanding."""
    pending: torch.Tensor | None = None
    """The next residual, until the optimizer has taken the step."""
    waiting: set[int] = field(default_factory=set)
    """Parameters whose gradient of this step is not here yet."""
    payload: Any = None
    """What is sent: a tensor; where gradients are summed in place, a list of them."""
    handle: Any = None
    total: Any = None
    """Sum of all ranks' payloads."""
    reduced: Any = None
    """Mean of all ranks' gradients, or their sum where that is asked for, decoded."""
    sum_finite: Any = None
    """0-d boolean tensor: so is the sum of narrow payloads; None: payloads are not narrow."""
    sound: Any = None
    """0-d boolean tensor: what was sent is finite; None: nobody asks."""


@dataclass
class Cut:
    """All gradients, cut into lanes."""

    lanes: list[Lane]
    prefix: str
    """Of the sums' names."""
    in_place: bool = False
    """Whether gradients are summed where they are, if they can be, and come back as means."""
    carrier: Lane | None = None
    """The lane that waits for the backward pass to end, and then takes the side tensor along, where one can do that: a
    sum less, which on fast links is what a step at ``none`` would take longer than stock Horovod's."""

    def __post_init__(self) -> None:
        last = self.lanes[-1] if self.in_place and self.lanes else None
        if last is not None and last.flat.dtype == torch.float32 and last.flat.device.type == "cpu":  # as it is
            self.carrier = last
        self.place_of = {
            i: (lane, slice(*lane.bucket.offsets[place : place + 2]), lane.bucket.shapes[place])
            for lane in self.lanes
            for place, i in enumerate(lane.bucket.parameters)
        }
