"""Exchanges that wait for nobody, or only for ranks too far behind, on as many ranks as it was started on."""

import time

import numpy as np
import pytest
import torch
from picking import few

import hvdplus.torch as hvd
from hvdplus.adapters.torch.asynchronous import step_share
from hvdplus.adapters.transports.window import SharedVector
from hvdplus.transport import TransportError

hvd.init()
torch.set_num_threads(1)
RANK, SIZE = hvd.rank(), hvd.size()
DATA = 6
"""Batches that every rank has."""
pytestmark = pytest.mark.ranks(2, 4)


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))


def batch(step, rank=RANK):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 12, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def wrapped(net, staleness, compression="none", **keywords):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(
        optimizer,
        named_parameters=net.named_parameters(),
        compression=compression,
        staleness=staleness,
        **keywords,
    )


def train(net, optimizer, steps, seconds=0.0):
    for step in range(steps):
        x, y = batch(step % DATA)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        time.sleep(seconds)
        optimizer.step()


@pytest.mark.parametrize("length", [1, 2, 5, 1000, 4097])
def test_what_is_added_is_in_the_vector(length):
    mine = np.random.default_rng(RANK).integers(-8, 8, length).astype(np.float32)
    shared = SharedVector(np.arange(length, dtype=np.float32))
    for _ in range(5):
        shared.add(mine)
    shared.meet()
    found = np.empty(length, np.float32)
    shared.read(found)
    everybody = sum(hvd.allgather_object(mine))
    assert np.array_equal(found, np.arange(length) + 5 * everybody), "sums of whole numbers are exact"
    shared.close()


@pytest.mark.parametrize(("length", "block"), [(100, 10), (101, 10), (7, 3), (4096, 256)])
def test_blocks_are_added_where_they_belong(length, block):
    mine = np.random.default_rng(RANK).integers(-8, 8, length).astype(np.float32)
    blocks = -(-length // block)
    chosen = np.flatnonzero(np.random.default_rng(RANK + 10).random(blocks) < 0.5)
    shared = SharedVector(np.zeros(length, np.float32))
    sent = shared.add_blocks(mine, block, chosen)
    shared.meet()
    kept = np.isin(np.arange(length) // block, chosen)
    assert sent == 4 * kept.sum()
    found = np.empty(length, np.float32)
    shared.read(found)
    assert np.array_equal(found, sum(hvd.allgather_object(np.where(kept, mine, 0))))
    shared.close()


def test_exchanges_are_counted():
    shared = SharedVector(np.zeros(3, np.float32))
    for _ in range(RANK + 1):
        shared.count()
    shared.meet()
    assert shared.counts().tolist() == [rank + 1 for rank in range(SIZE)]
    shared.meet()
    shared.skip(100)
    assert shared.wait_until(100) < 60, "nobody waits for those who have left"
    shared.close()


@pytest.mark.parametrize("level", ["none", "topk:0.2:32"])
@pytest.mark.parametrize("staleness", [1, 3, "any"])
@pytest.mark.parametrize("steps", few(21, once=[20]))
def test_nothing_is_lost(steps, staleness, level, monkeypatch):
    """Parameters at the end: those of the beginning, and all that ranks have added or still hold."""
    added = []
    add, add_blocks = SharedVector.add, SharedVector.add_blocks
    monkeypatch.setattr(SharedVector, "add", lambda me, change: (added.append(change.copy()), add(me, change))[1])

    def blocks(me, change, block, chosen):
        kept = np.isin(np.arange(len(change)) // block, chosen)
        added.append(np.where(kept, change, np.float32(0)))
        return add_blocks(me, change, block, chosen)

    monkeypatch.setattr(SharedVector, "add_blocks", blocks)
    net, start = model(), model()
    optimizer = wrapped(net, staleness, level, every=2)
    train(net, optimizer, steps)
    optimizer.average_now()
    assert hvd.identical(net)
    total = sum(hvd.allgather_object(np.sum(added, axis=0)))
    before = torch.cat([p.detach().reshape(-1) for p in start.parameters()]).numpy()
    after = torch.cat([p.detach().reshape(-1) for p in net.parameters()]).numpy()
    assert np.abs(total).max() > 0.01
    assert np.allclose(after, before + total, rtol=0, atol=1e-5)
    assert optimizer._fragments[0]._residual is None


@pytest.mark.parametrize("staleness", [1, 2])
def test_no_rank_is_further_ahead_than_allowed(staleness, monkeypatch):
    net = model()
    optimizer = wrapped(net, staleness)
    ahead = []
    read = SharedVector.read

    def reads(me, out):
        counts = me.counts()
        ahead.append(int(counts[RANK] - counts.min()))
        read(me, out)

    monkeypatch.setattr(SharedVector, "read", reads)
    train(net, optimizer, 15, seconds=0.01 if RANK == 0 else 0.0)
    assert max(ahead) <= staleness
    optimizer.average_now()
    furthest = max(hvd.allgather_object(max(ahead)))
    assert furthest == staleness, "those who are fast use what is allowed"
    if RANK:
        assert optimizer.facts()["waited_seconds"] > 0


def test_ranks_with_fewer_steps_are_not_waited_for_at_a_meeting():
    """Nor afterwards: all count anew."""
    net = model()
    optimizer = wrapped(net, 1)
    train(net, optimizer, 3 + 5 * RANK)
    optimizer.average_now()
    assert hvd.identical(net)
    train(net, optimizer, 2)
    counts = hvd.allgather_object(int(optimizer._fragments[0].memory.counts()[RANK]))
    optimizer.average_now()
    assert counts == [3 + 5 * (SIZE - 1) + 2] * SIZE
    assert hvd.identical(net)


def test_ranks_with_fewer_steps_are_not_waited_for_when_the_memory_is_made_anew():
    net = model()
    optimizer = wrapped(net, 1)
    train(net, optimizer, 3 + 5 * RANK)
    net.load_state_dict(model().state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    train(net, optimizer, 2)
    optimizer.average_now()
    assert hvd.identical(net)


def test_ranks_begin_with_the_same_parameters_or_an_error():
    net = model(seed=RANK)
    with pytest.raises(RuntimeError, match="other ones on rank 1 than on rank 0.*broadcast_parameters"):
        train(net, wrapped(net, "any"), 1)


def test_nobody_waits_where_anything_is_allowed():
    net = model()
    optimizer = wrapped(net, "any")
    hvd.barrier()
    began = time.perf_counter()
    train(net, optimizer, 15, seconds=0.05 if RANK == 0 else 0.0)
    took = time.perf_counter() - began
    facts = optimizer.facts()
    optimizer.average_now()
    everybody = hvd.allgather_object(took)
    assert max(everybody[1:]) < everybody[0] / 2
    assert facts["waited_seconds"] == 0
    assert hvd.identical(net)
    if RANK == 0:
        assert facts["largest_staleness"] >= 5


def test_the_older_the_smaller_the_step():
    assert step_share(0, 4) == step_share(3, 4) == 0.25
    assert step_share(6, 4) == 0.125
    assert step_share(10**6, 2) == pytest.approx(5e-7)


def test_it_learns_as_much_as_lock_step():
    def loss(net, name):
        with torch.no_grad():
            mine = sum(torch.nn.functional.cross_entropy(net(x), y) for x, y in map(batch, range(DATA))) / DATA
        return hvd.allreduce(mine, name=name).item()

    start, gained = loss(model(), "at first"), {}
    for staleness in (0, 2, "any"):
        net = model()
        optimizer = wrapped(net, staleness)
        hvd.barrier()
        train(net, optimizer, 60, seconds=0.03)  # else one could be through before another begins, on a busy machine
        if staleness:
            optimizer.average_now()
        gained[staleness] = start - loss(net, f"at {staleness}")
    assert gained[0] > 0.1
    assert all(gained[staleness] > 0.5 * gained[0] for staleness in (2, "any"))


def test_the_report_says_how_stale_it_was(tmp_path):
    net = model()
    optimizer = wrapped(net, 2, settings={"run_log": str(tmp_path / "run.jsonl")})
    train(net, optimizer, 10)
    optimizer.average_now()
    hvd.report(optimizer)
    if RANK == 0:
        assert '"mean_staleness"' in next(tmp_path.glob("run.jsonl*")).read_text()


def test_what_cannot_be_is_an_error():
    net = model()
    for keywords, message in (
        ({"compression": "int8"}, "add float32 values to each other's memory"),
        ({"settings": {"outer": "nesterov"}}, "after a fixed number of steps. Received: outer=nesterov"),
        ({"every": 4, "settings": {"overlap_steps": 2}}, "Received: overlap_steps=2"),
        ({"every": "auto"}, "Received: every=auto"),
    ):
        with pytest.raises(ValueError, match=message):
            wrapped(net, 2, **{"compression": "none", **keywords})
    complex_one = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match="are added up in float32. Received: .* in torch.complex64"):
        hvd.DistributedOptimizer(torch.optim.SGD([complex_one], lr=0.1), compression="none", staleness=2)
    with pytest.raises(ValueError, match="wants any, or a whole number of at least 0"):
        wrapped(net, -1)


def test_settings_name_the_level_where_the_script_leaves_it_open():
    for compression in ("auto", hvd.Compression.none):
        optimizer = wrapped(model(), 2, compression, settings={"compression": "topk:0.1:64"})
        assert optimizer._fragments[0]._blocks.share == 0.1
    with pytest.raises(ValueError, match=r"or the blocks with most energy .* Received: compression .*=int8"):
        wrapped(model(), 2, "auto", settings={"compression": "int8"})
    assert wrapped(model(), 2, hvd.Compression.none)._fragments[0]._blocks is None


def test_a_rank_waits_no_longer_than_it_may():
    shared = SharedVector(np.zeros(8, np.float32), timeout_seconds=0.3)
    if RANK == 0:
        with pytest.raises(TransportError, match=r"Rank 0 has waited .* HVDPLUS_TIMEOUT_SECONDS. Received: 0.3"):
            shared.wait_until(5)
    hvd.barrier()


def test_parameters_that_are_not_finite_are_an_error():
    net = model()
    optimizer = wrapped(net, "any")
    train(net, optimizer, 3)
    with torch.no_grad():
        next(net.parameters())[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match=f"Rank {RANK} has parameters that are not finite after 4 exchanges"):
        train(net, optimizer, 1)
    hvd.barrier()
