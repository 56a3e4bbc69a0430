"""The device's own time line: when it does what, and what it decides and tells without anybody waiting.

A host that runs ahead of a device knows no times: it hands over in microseconds what takes the device milliseconds. So
events are put between the device's work, and read when the step is long over.
"""

from __future__ import annotations

import functools
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from hvdplus.control.meter import StepMeter, StepTimes, union_seconds
from hvdplus.exchange.backend import Found

ALIGNED = 128
"""Elements between two places where memory may begin: 512 bytes, as CUDA's allocator has it."""


class OnItsWay:
    """Numbers that a device sends to the host."""

    def __init__(self, values: torch.Tensor) -> None:
        self._there: Any = None
        if values.device.type != "cuda":
            self._values = values.clone()
            return
        self._values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        self._values.copy_(values, non_blocking=True)
        self._there = _mark(values.device)

    def read(self) -> list[Any]:
        """The numbers; waits until they are here."""
        if self._there is not None:
            self._there.synchronize()
        values: list[Any] = self._values.tolist()
        return values


def found_on(
    device: torch.device,
    finite: Sequence[torch.Tensor],
    overflow: Sequence[torch.Tensor],
    contexts: Sequence[torch.Tensor],
    loss: Any,
    measured: Sequence[torch.Tensor],
) -> Callable[[], Found]:
    """``Backend.found`` of a device: everything is added up there, and comes in one copy."""

    def total(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum of integers or booleans, arrays of one length, as 0-d int64."""
        if not numbers:
            return torch.zeros((), dtype=torch.int64, device=device)
        return torch.stack(list(numbers)).sum(dtype=torch.int64)

    bits = [torch.cat([array.reshape(-1).view(torch.int32) for array in contexts])] if contexts else []
    if not isinstance(loss, torch.Tensor):
        loss = torch.full((), loss, dtype=torch.float64, device=device)
    numbers = torch.cat([loss.to(device).double().reshape(1), *(array.double() for array in measured)])
    whole = torch.stack([total(finite), total(overflow), total(bits)])
    coming, looked_at = OnItsWay(torch.cat([whole, numbers.view(torch.int64)])), len(finite)  # as bits

    def read() -> Found:
        sound, over, checksum, *bits = coming.read()
        loss, *told = struct.unpack(f"{len(bits)}d", struct.pack(f"{len(bits)}q", *bits))
        return Found(sound == looked_at, bool(over), checksum, loss, told)

    return read


def choose_each(
    condition: torch.Tensor, ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """See ``Backend.choose_each``: all of a type in one go."""
    chosen = list(ones)
    for dtype in {one.dtype for one in ones}:
        places = [i for i, one in enumerate(ones) if one.dtype == dtype]
        flat, before = (_joined([each[i] for i in places]) for each in (ones, others))
        picked = torch.where(condition, flat, before)
        start = 0
        for i in places:
            end = start + ones[i].numel()
            chosen[i], start = picked[start:end].view(ones[i].shape), _aligned(end)
    return chosen


def _joined(arrays: Sequence[torch.Tensor]) -> torch.Tensor:
    """Arrays of a type end to end, each where memory of its own could begin: products' last bits depend on that."""
    spare = arrays[0].new_zeros(ALIGNED)
    pieces = ((array.reshape(-1), spare[: _aligned(array.numel()) - array.numel()]) for array in arrays)
    return torch.cat([each for pair in pieces for each in pair])


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def stream_meter(device: torch.device) -> StreamMeter:
    """The stopwatch of a device's steps."""
    return StreamMeter(functools.partial(_mark, device))


class _Step(NamedTuple):
    """Events of a step that is over for the host, but perhaps not for the device."""

    began: Any
    input_arrived: Any
    """None: that is not known."""
    ended: Any
    spans: dict[str, list[tuple[Any, Any]]]
    """Kind -> beginnings and ends."""


class StreamMeter(StepMeter):
    """``StepMeter`` by events of the stream that computes.

    For steps in which the host runs ahead. A sum is in flight from where it was handed over to its end, which
    ``Transport.ended`` tells; where that does not, to where the stream went on.
    """

    def __init__(self, mark: Callable[[], Any]) -> None:
        """``mark``: puts an event at the present end of the stream, and returns it."""
        super().__init__()
        self._mark = mark
        self._spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._sums: dict[int, tuple[Any, Any]] = {}
        self._start: Any = None
        self._input: Any = None
        self._unread: _Step | None = None
        self._last = StepTimes()

    @contextmanager
    def _span(self, kind: str) -> Iterator[None]:
        """Keep when the stream begins and ends what is handed over inside."""
        began = self._mark()
        try:
            yield
        finally:
            self._spans[kind].append((began, self._mark()))

    def codec(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return self._span("codec")

    @contextmanager
    def exposed_comm(self) -> Iterator[None]:
        with self._span("exposed"):
            yield

    @contextmanager
    def waits_in_codec(self, *keys: int) -> Iterator[None]:
        with self._span("in codec"), self.awaited(*keys):
            yield

    @contextmanager
    def probe(self) -> Iterator[None]:
        with self._span("probe"):
            yield

    def sum_begins(self, key: int, done: Callable[[], bool], ended: Any = None) -> None:
        self._sums[key] = self._mark(), ended

    def look(self) -> None:
        """Events tell by themselves."""

    @contextmanager
    def awaited(self, *keys: int) -> Iterator[None]:
        with self.exposed_comm():
            yield
        gone_on = self._spans["exposed"][-1][1]
        for key in keys:
            if key in self._sums:
                began, ended = self._sums.pop(key)
                self._spans["sums"].append((began, ended or gone_on))

    def input_arrived(self) -> None:
        if self._start is not None and self._input is None:
            self._input = self._mark()

    def end_step(self) -> None:
        now = self._mark()
        if self._start is not None:
            self._unread = _Step(self._start, self._input, now, self._spans)
        self._start, self._input, self._spans = now, None, defaultdict(list)

    @property
    def last(self) -> StepTimes:
        """The last complete step; waits until the device has ended it."""
        if self._unread is not None:
            self._last, self._unread = _times(self._unread), None
        return self._last

    @last.setter
    def last(self, times: StepTimes) -> None:
        self._last = times


def _times(step: _Step) -> StepTimes:
    def at(event: Any) -> float:
        event.synchronize()
        return float(step.began.elapsed_time(event)) / 1e3

    def seconds(kind: str) -> float:
        return sum(end - begin for begin, end in spans[kind])

    whole = at(step.ended)
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for kind, pairs in step.spans.items():
        spans[kind] = [(at(begin), at(end)) for begin, end in pairs]
    exposed = seconds("exposed")
    return StepTimes(
        whole,
        seconds("codec") - seconds("in codec"),
        exposed,
        0.0 if step.input_arrived is None else at(step.input_arrived),
        max(0.0, union_seconds([*spans["sums"], *spans["exposed"]]) - exposed),
        seconds("probe"),
    )


def _mark(device: torch.device) -> Any:
    """An event at the present end of the device's stream, which need not be the current device."""
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
