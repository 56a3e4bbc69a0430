"""Steps in which the host runs ahead of a device, on several ranks without one: gradients are on the CPU, but hvdplus
takes them for a device's. What needs a device is in ``device_ranks.py``."""

import numpy as np
import pytest
import torch
from picking import any_transport

import hvdplus.torch as hvd
from hvdplus.adapters.torch.backend import TorchBackend
from hvdplus.adapters.torch.ops import DeviceOps

hvd.init()
torch.set_num_threads(1)
RANK, SIZE = hvd.rank(), hvd.size()
LEVELS = ["none", "fp16", "int8", "int4:stochastic", "qsgd:8", "signsgd", "topk:0.2:32", "topk:0.2:32+int8"]
LEVELS += ["randomk:0.2:32", "lowrank:2", "lowrank:2+fp16", "powersgd:2+fp16"]
LOSSY = [level for level in LEVELS if level not in ("none", "fp16", "qsgd:8")]


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """A device's operations; several buckets."""
    made = TorchBackend.__init__

    def init(self, *arguments, **keywords):
        made(self, *arguments, **keywords)
        self.on_host, self.ops = False, DeviceOps("cpu")

    monkeypatch.setattr(TorchBackend, "__init__", init)
    monkeypatch.setenv("HVDPLUS_BUCKET_BYTES", "6000")


@pytest.fixture(params=[False, True], ids=["the host waits", "the host runs ahead"])
def ahead(request, monkeypatch):
    """Whether it does."""
    monkeypatch.setattr(hvd._require_world().transport, "waits_on_device", request.param)
    return request.param


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3)
    )


def loss_of(net, step):
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    x, y = torch.randn(8, 12, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    return torch.nn.functional.cross_entropy(net(x), y)


def wrapped(net, level):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    return hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters(), compression=level)


def train(net, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()


@any_transport
@pytest.mark.parametrize("level", LEVELS)
def test_steps_are_those_of_a_host_that_waits(level, monkeypatch):
    """Bit by bit, as long as nothing overflows."""
    nets = []
    for ahead in (False, True):
        monkeypatch.setattr(hvd._require_world().transport, "waits_on_device", ahead)
        net = model()
        optimizer = wrapped(net, level)
        train(net, optimizer, range(20))
        assert optimizer._exchange.runs_ahead == ahead and hvd.identical(net)
        nets.append(net)
    assert all(torch.equal(*pair) for pair in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


@pytest.mark.parametrize("level", LOSSY)
def test_a_step_that_is_not_finite_on_one_rank_is_told_by_nan_to_all(level, ahead):
    net = model()
    optimizer = wrapped(net, level)
    train(net, optimizer, range(6))
    held = [state.residual.clone() for state in optimizer._exchange.states]
    optimizer.zero_grad()
    (loss_of(net, 7) * (torch.nan if RANK == SIZE - 1 else 1.0)).backward()
    optimizer.synchronize()  # and the script skips the step
    assert any(parameter.grad.isnan().any() for parameter in net.parameters())
    for before, state in zip(held, optimizer._exchange.states, strict=True):
        assert torch.equal(before, state.residual)
    train(net, optimizer, range(8, 12))
    assert hvd.identical(net) and all(parameter.isfinite().all() for parameter in net.parameters())


@any_transport
@pytest.mark.parametrize("level", ["lowrank:2+fp16", "int8", "auto"])
def test_the_ddp_hook(level, ahead):
    if not torch.distributed.is_initialized():
        pytest.skip("no process group")
    net = torch.nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    hvd.ddp.attach(net, optimizer, compression=level)
    losses = []
    for step in range(60):
        optimizer.zero_grad()
        loss = loss_of(net, step % 5)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert np.mean(losses[-10:]) < np.mean(losses[:5]) and hvd.identical(net.module)


@any_transport
def test_a_checkpoint_goes_on(ahead):
    nets = [model(), model()]
    first = wrapped(nets[0], "lowrank:2")
    train(nets[0], first, range(5))
    kept = first.state_dict(), [parameter.detach().clone() for parameter in nets[0].parameters()]
    train(nets[0], first, range(5, 10))
    second = wrapped(nets[1], "lowrank:2")
    with torch.no_grad():
        for parameter, value in zip(nets[1].parameters(), kept[1], strict=True):
            parameter.copy_(value)
    second.load_state_dict(kept[0])
    train(nets[1], second, range(5, 10))
    assert all(torch.equal(*pair) for pair in zip(nets[0].parameters(), nets[1].parameters(), strict=True))
