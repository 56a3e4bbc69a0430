"""hvdplus.torch with gradients on CUDA devices: one rank over NCCL, or several on one device over Gloo."""

import os
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scaling import step_as_horovod

SIZE = int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(0)
if SIZE > 1:  # NCCL takes one rank a device
    dist.init_process_group("gloo")
else:
    os.environ["HVDPLUS_TRANSPORT"] = "torch"

import hvdplus.torch as hvd  # noqa: E402

hvd.init()
RANK = hvd.rank()
DEVICE = torch.device("cuda", 0)
LEVELS = [
    "none",
    "fp16",
    "int8",
    "int4:stochastic",
    "lowrank:4",
    "lowrank:4+fp16",
    "powersgd:4",
    "topk:0.1:32",
    "topk2:0.1:32",
]
LEVELS += ["topk:0.1:32+int8", "randomk:0.2:32", "qsgd:8", "signsgd"]


def model(seed=0):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(
        torch.nn.Linear(32, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8)
    )
    return net.to(DEVICE)


def batch(step, rank=RANK, device=DEVICE):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(64, 32, generator=generator)
    return x.to(device), (x[:, :8].argmax(1)).to(device)


def wrapped(net, level, **keywords):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters(), compression=level, **keywords)


def step(net, optimizer, data, record=False):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(net(data[0]), data[1])
    if record:
        optimizer.record(loss)
    loss.backward()
    optimizer.step()
    return loss.detach()


def synchronisations(body):
    """Where PyTorch makes the host wait for the device in ``body``."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            body()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [
        f"{one.filename}:{one.lineno} {one.message}" for one in caught if "called a synchronizing" in str(one.message)
    ]


def test_the_transport():
    world = hvd._require_world()
    assert world.transport.name == ("torch-nccl" if SIZE == 1 else "torch-gloo")


@pytest.mark.parametrize("level", LEVELS)
def test_trains(level):
    """Towards a small loss, with the same weights on all ranks."""
    net = model()
    optimizer = wrapped(net, level)
    losses = [float(step(net, optimizer, batch(number))) for number in range(200)]
    assert np.mean(losses[-10:]) < 0.85 * np.mean(losses[:5]), losses
    assert hvd.identical(net)


@pytest.mark.skipif(SIZE > 1, reason="over Gloo the host brings sums to the device")
@pytest.mark.parametrize("level", LEVELS)
def test_the_host_does_not_wait_for_the_device(level):
    """In no usual step, but at ``fp16``, which looks whether a sum has left its range."""
    net = model()
    optimizer = wrapped(net, level)
    batches = [batch(number) for number in range(40)]
    for data in batches[:25]:
        step(net, optimizer, data, record=True)
    counts, places = [], []
    for data in batches[25:]:
        found = synchronisations(lambda data=data: step(net, optimizer, data, record=True))
        counts.append(len(found))
        places += found
    assert counts == [int(level == "fp16")] * 15, sorted(set(places))


@pytest.mark.parametrize("level", LEVELS[2:])
def test_what_is_not_finite_leaves_no_trace(level):
    nets = [model(), model()]
    optimizers = [wrapped(net, level) for net in nets]
    for number in range(12):
        for net, optimizer in zip(nets, optimizers, strict=True):
            step(net, optimizer, batch(number))
        if number == 5:  # a step that the script skips
            net, optimizer = nets[1], optimizers[1]
            optimizer.zero_grad()
            x, y = batch(number)
            x[3, 3] = torch.nan if RANK == SIZE - 1 else 1.0
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.synchronize()
            assert not all(torch.isfinite(p.grad).all() for p in net.parameters())
    losses = [float(step(net, optimizer, batch(20))) for net, optimizer in zip(nets, optimizers, strict=True)]
    assert hvd.identical(nets[1])
    assert abs(losses[0] - losses[1]) < 0.2, losses


@pytest.mark.parametrize("level", ["none", "int8", "lowrank:4", "topk:0.1:32"])
def test_a_device_agrees_with_the_cpu(level):
    """Step by step the same weights, to the rounding of a device's own products and sums."""
    nets = [model(), model().cpu()]
    optimizers = [wrapped(net, level) for net in nets]
    for number in range(4):
        for net, optimizer, device in zip(nets, optimizers, (DEVICE, "cpu"), strict=True):
            step(net, optimizer, batch(number, device=device))
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        close = torch.isclose(ours.cpu(), theirs, rtol=1e-3, atol=1e-4)
        assert close.float().mean() > 0.98, (level, (~close).sum())  # a value at an edge may fall to either side


def test_times_are_the_devices():
    """A product that takes the device long counts as computation, also where the host has long gone on."""
    net, slow = model(), torch.randn(8192, 8192, device=DEVICE)
    optimizer = wrapped(net, "lowrank:4")

    def takes_long(*_):
        slow @ slow

    net[0].register_forward_hook(takes_long)
    for number in range(10):
        step(net, optimizer, batch(number))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(10, 14):
        data = batch(number)
        begin.record()
        step(net, optimizer, data)
        end.record()
    torch.cuda.synchronize()
    seconds, last = begin.elapsed_time(end) / 1e3, optimizer._exchange.meter.last
    print(f"a step of {1e3 * seconds:.2f} ms: {last}, computing {1e3 * last.compute:.2f} ms")
    assert 0.7 * seconds < last.step < 1.3 * seconds
    if SIZE == 1:
        assert last.compute > 0.6 * last.step


@pytest.mark.parametrize("level", ["none", "fp16", "int8", "lowrank:4+fp16", "topk:0.1:32", "auto"])
def test_the_ddp_hook(level):
    net = torch.nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    hvd.ddp.attach(net, optimizer, compression=level)
    losses = [float(step(net, optimizer, batch(number))) for number in range(200)]
    assert np.mean(losses[-10:]) < 0.85 * np.mean(losses[:5]), losses
    assert hvd.identical(net.module)


def test_loss_scaling():
    net = model()
    scaler = torch.amp.GradScaler("cuda")
    optimizer = wrapped(net, "lowrank:4+fp16", grad_scaler=scaler)
    losses = []
    for number in range(200):
        x, y = batch(number)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = torch.nn.functional.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        step_as_horovod(optimizer, scaler)
        losses.append(float(loss.detach()))
    assert np.mean(losses[-10:]) < 0.85 * np.mean(losses[:5]), losses
    assert hvd.identical(net)
