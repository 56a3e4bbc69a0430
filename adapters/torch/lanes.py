"""Where gradients are on their way: buckets with what a rank holds for each of them, from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hvdplus.buckets import Bucket
from hvdplus.compression import Context
from hvdplus.transport import Transport


class Side:
    """A side tensor under way; ``total`` waits for it once."""

    def __init__(self, transport: Transport, array: torch.Tensor, name: str) -> None:
        self._transport = transport
        self._handle = transport.start(array, name)
        self._total: np.ndarray | None = None

    def total(self) -> np.ndarray:
        """The sum over all ranks, on the host."""
        if self._total is None:
            self._total = np.asarray(self._transport.wait(self._handle))
        return self._total


@dataclass
class Lane:
    """One bucket on this rank, from step to step."""

    bucket: Bucket
    flat: torch.Tensor
    """What is sent before encoding: gradients plus released residual; or the bucket's only gradient itself."""
    contexts: dict[int, Context] = field(default_factory=dict)
    """Level -> context, made when the level is first used."""
    residual: torch.Tensor | None = None
    """What encoding lost so far; None where nothing is outstanding."""
    pending: torch.Tensor | None = None
    """The next residual, until the optimizer has taken the step."""
    waiting: set[int] = field(default_factory=set)
    """Parameters whose gradient of this step is not here yet."""
    payload: torch.Tensor | None = None
    handle: Any = None
    total: Any = None
    """Sum of all ranks' payloads."""
    reduced: Any = None
    """Mean of all ranks' gradients, or their sum where that is asked for, decoded."""
    nonfinite: bool = False


@dataclass
class Cut:
    """All gradients, cut into lanes."""

    lanes: list[Lane]
    prefix: str
    """Of the sums' names."""
    in_place: bool = False
    """Whether a gradient that has a lane of its own is summed where it is, if it can be, and comes back as a mean."""

    def __post_init__(self) -> None:
        self.place_of = {
            i: (lane, slice(*lane.bucket.offsets[place : place + 2]), lane.bucket.shapes[place])
            for lane in self.lanes
            for place, i in enumerate(lane.bucket.parameters)
        }

    def alone(self, lane: Lane) -> bool:
        """Whether the lane is for one gradient, which is summed where it is."""
        return self.in_place and len(lane.bucket.parameters) == 1
