"""Steps in which the host runs ahead of a device, in PyTorch, without a device: who looks at values, and the time line.

What such steps deliver, and what is held back, is in ``test_engine.py``; on a real device in ``ranks/device_ranks.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from hvdplus.adapters.transports.local import Local
from hvdplus.control.meter import StepTimes

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from hvdplus.adapters.torch import backend  # noqa: E402
from hvdplus.adapters.torch.ops import DeviceOps  # noqa: E402
from hvdplus.adapters.torch.optimizer import wrap  # noqa: E402
from hvdplus.adapters.torch.stream import StreamMeter  # noqa: E402
from hvdplus.exchange.metadata import length  # noqa: E402
from hvdplus.transport import World  # noqa: E402

LEVELS = ["none", "int8", "int4:stochastic", "qsgd:8", "signsgd", "terngrad", "topk:0.1:32", "topk:0.1:32+int8"]
LEVELS += ["randomk:0.2:32", "lowrank:4", "lowrank:4+fp16", "powersgd:4", "powersgd:4+fp16"]


class Ahead(Local):
    """Another rank with the same gradients, whose sums are there at once; on a device, as far as hvdplus can tell."""

    name, size, local_size, negotiates = "ahead", 2, 2, False
    summable = ("float16", "float32", "float64")
    waits_on_device = True

    def start(self, array: Any, name: str, scale: float = 1.0) -> Any:
        doubled = array.mul_(2)
        if ".metadata." in name:  # each rank fills its own slot alone
            mine, theirs = array[length(0, 0) : length(2, 0)].view(2, -1)
            theirs.copy_(mine.div_(2))
        return doubled if scale == 1 else doubled.mul_(scale)

    def gather_objects(self, value: Any, what: str = "") -> list[Any]:
        return [value, value]


class Looks(TorchDispatchMode):
    """Counts operations that would make the host wait for a device."""

    WAIT = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten.unique")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if str(function).startswith(self.WAIT):
            self.found.append(str(function))
        return function(*arguments, **(keywords or {}))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients count as a device's, though they are on the CPU."""

    class OnDevice(backend.TorchBackend):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.on_host, self.ops = False, DeviceOps("cpu")

    monkeypatch.setattr("hvdplus.adapters.torch.hooks.TorchBackend", OnDevice)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("level", [*LEVELS, "fp16"])
def test_nobody_looks_at_a_value_in_a_usual_step(level: str) -> None:
    """At ``fp16`` once, as to whether a sum has left its range."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(48, 48) for _ in range(4)))
    optimizer = wrap(
        torch.optim.SGD(model.parameters(), lr=1e-3),
        model.named_parameters(),
        World(Ahead(), {"here": 2}, "ahead", 0, ()),
        compression=level,
        settings={"weights_check_steps": 0},
        passes=1,
        average=True,
        sparse_as_dense=False,
    )
    assert optimizer._exchange.runs_ahead
    looks = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 48)).square().mean()
        with Looks() as mode:
            loss.backward()
            optimizer._exchange.reporter.loss = loss.detach()  # as ``record`` does with a device's
            optimizer.step()
        looks.append(len(mode.found))
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert looks[4:] == [int(level == "fp16")] * 8, mode.found


class Event:
    """An event of a stream with a clock that is set by hand."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.read = False

    def synchronize(self) -> None:
        self.read = True

    def elapsed_time(self, other: Event) -> float:
        assert other.read, "read before the device has come to it"
        return 1e3 * (other.now - self.now)


class Stream:
    """Makes events."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> Event:
        return Event(self.now)

    def works(self, seconds: float) -> None:
        self.now += seconds


def one_step(stream: Stream, meter: StreamMeter, times: Iterator[float]) -> None:
    """Two buckets; of the second sum's time two units lie behind the backward pass."""
    stream.works(next(times))  # data
    meter.input_arrived()
    stream.works(10)  # forward
    with meter.codec():
        stream.works(1)
    meter.sum_begins(0, lambda: False, Event(stream.now + 3))
    stream.works(5)  # backward
    with meter.codec():
        stream.works(1)
    meter.sum_begins(1, lambda: False)
    with meter.awaited(0):  # it ended long ago
        pass
    with meter.awaited(1):
        stream.works(2)
    with meter.codec():
        stream.works(0.5)
        with meter.waits_in_codec():
            stream.works(0.25)
    with meter.probe():
        stream.works(4)
    stream.works(1)  # optimizer
    meter.end_step()


def test_a_device_tells_times_by_events() -> None:
    stream = Stream()
    meter = StreamMeter(stream)
    one_step(stream, meter, itertools.repeat(100.0))
    assert meter.last == StepTimes()  # building the model and the first batch are no part of a step
    for data in (2.0, 3.0):
        one_step(stream, meter, itertools.repeat(data))
        assert meter.last == StepTimes(24.75 + data, 2.5, 2.25, data, 3.0, 4.0)
        assert meter.last.compute == 16.0
        assert meter.last is meter.last
