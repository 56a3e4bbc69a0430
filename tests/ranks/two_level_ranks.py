"""Two levels in PyTorch: four ranks of this machine, of which two each count as a host."""

import os

os.environ["HVDPLUS_TWO_LEVEL"] = "2"  # read when the transport starts
os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"

import copy
import threading

import numpy as np
import pytest
import torch

import hvdplus.torch as hvd
from hvdplus.exchange import checkpoint

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
torch.set_num_threads(1)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(40, 80), torch.nn.Tanh(), torch.nn.Linear(80, 40), torch.nn.Linear(40, 4)
    )


def batch(step, rank=RANK):
    draw = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 40, generator=draw)
    return x, x[:, :4].argmax(1)


def wrapped(net, level, **settings):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(
        optimizer, net.named_parameters(), level, settings={"bucket_bytes": 8000, **settings}
    )


def train(net, optimizer, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        x, y = batch(step % 4)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_two_levels():
    levels = hvd._require_world().transport.two_level
    assert (levels.local.size, levels.between.size) == (2, 2)
    assert levels.local.gather_objects(RANK) == ([0, 1] if RANK < 2 else [2, 3])
    assert levels.between.gather_objects(RANK) == ([0, 2] if RANK % 2 == 0 else [1, 3])
    total = levels.wait(levels.start(torch.full((3,), float(1 + RANK // 2)), "sum", 0.5))
    assert total.tolist() == [1.5] * 3, "of hosts, and the same on all ranks"


@pytest.mark.parametrize(("level", "most"), [("none", 1e-6), ("fp16", 2e-3)])
def test_sums_are_one_processs(level, most):
    net, bare = model(), model()
    train(net, wrapped(net, level), 4)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(SIZE):
            x, y = batch(step, rank)
            (torch.nn.functional.cross_entropy(bare(x), y) / SIZE).backward()
        optimizer.step()
    for a, b in zip(net.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=most)
    assert hvd.identical(net)


@pytest.mark.parametrize("level", ["fp16", "int8", "topk:0.1:16", "lowrank:2+fp16", "powersgd:2+fp16", "auto"])
def test_levels_learn_and_ranks_stay_identical(level):
    net = model()
    optimizer = wrapped(net, level)
    losses = train(net, optimizer, 40)
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    assert hvd.identical(net)
    exchange = optimizer._exchange
    assert exchange.two_level is not None and all(bucket.spec.ranks == 2 for bucket in exchange.buckets)
    held = hvd.allgather_object(sorted(checkpoint.residuals(exchange)), name="residuals")
    if any(held):  # one rank of each host has that of a bucket
        everything = sorted(i for state in exchange.states for i in state.bucket.parameters)
        assert sorted(held[0] + held[1]) == sorted(held[2] + held[3]) == everything


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_parameters_of_half_precision_change_levels(narrow):
    """Dense steps send them as they are, and those that flush as float32."""
    net = model().to(narrow)
    optimizer = wrapped(net, "auto", ladder="none,lowrank:2,int8", drain_steps=3)
    coordinator = optimizer._exchange.coordinator
    for step, level in enumerate([0, 0, 2, 2, 2, 2, 0, 0, 0, 0, 0, 1, 1, 0, 0]):
        coordinator.set_level(level)
        optimizer._exchange.follow(coordinator.advance())
        x, y = batch(step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x.to(narrow)).float(), y).backward()
        optimizer.step()
    assert hvd.identical(net)


def test_a_checkpoint_goes_on():
    net = model()
    optimizer = wrapped(net, "lowrank:2")
    train(net, optimizer, 5)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    train(net, optimizer, 4, first=5)
    other = model()
    again = wrapped(other, "lowrank:2")
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    train(other, again, 4, first=5)
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_every_ranks_state_names_the_same_residuals():
    """Other ranks, or another ladder, flush what they find there: all of them, or nobody."""
    optimizer = wrapped(model(), "lowrank:2")
    net = optimizer.param_groups[0]["params"]
    for step in range(3):
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(10 * step + RANK)
        sum((p * torch.randn(p.shape, generator=draw)).sum() for p in net).backward()
        optimizer.step()
    found = optimizer.state_dict()["hvdplus"]["residuals"]
    named = hvd.allgather_object(sorted(found), name="named")
    assert named == [named[0]] * SIZE and named[0] == list(range(len(net)))
    here = hvd.allgather_object(sorted(i for i, each in found.items() if each is not None), name="here")
    assert sorted(here[0] + here[1]) == named[0] and here[0] != here[1]
    again = wrapped(model(), "fp16")
    again.load_state_dict(optimizer.state_dict())
    told = hvd.allgather_object(list(again._exchange.coordinator.plan), name="plans")
    assert told == [told[0]] * SIZE and again._exchange.coordinator.plan.flush_fraction > 0


def test_sparse_gradients():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.EmbeddingBag(60, 40, sparse=True), torch.nn.Linear(40, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters(), "lowrank:2")
    for step in range(4):
        draw = torch.Generator().manual_seed(10 * step + RANK)
        optimizer.zero_grad()
        words, labels = torch.randint(0, 60, (6, 3), generator=draw), torch.randint(0, 4, (6,), generator=draw)
        torch.nn.functional.cross_entropy(net(words), labels).backward()
        optimizer.step()
    assert hvd.identical(net)


def test_what_cannot_be_is_said():
    with pytest.raises(ValueError, match="two_level .*wants auto, on, off, or a whole number of at least 2"):
        wrapped(model(), "none", two_level=1)
    net = model()
    assert wrapped(net, "none", two_level="off")._exchange.two_level is None


@pytest.mark.skipif(not hvd._require_world().transport.name.startswith("torch-"), reason="about DDP")
def test_the_hook_of_ddp():
    net = model()
    parallel = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    attached = hvd.ddp.attach(parallel, optimizer, "lowrank:2+fp16")
    losses = train(parallel, optimizer, 40)
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5]) and hvd.identical(net)
    assert attached._exchange.two_level is not None


@pytest.mark.skipif(
    hvd._require_world().transport.name.startswith("horovod"), reason="Horovod ends MPI, which begins only once"
)
def test_the_end_is_that_of_both_levels():
    def helpers():
        return [thread.name for thread in threading.enumerate() if thread.name.startswith(("hvdplus-mpi", "hvdplus-t"))]

    assert helpers()
    hvd.shutdown()
    assert not helpers()
    hvd.init()
    net = model()
    losses = train(net, wrapped(net, "int8"), 4)
    assert np.isfinite(losses).all() and hvd.identical(net)
