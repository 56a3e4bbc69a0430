"""hvdplus.torch on as many ranks as it was started on."""

import copy
import gc
import inspect
import io
import itertools
import math
import os
import pickle
import time
import warnings
import weakref

import numpy as np
import pytest
import torch
from picking import any_transport, few, one_or_two, several, two
from reference import Reference, at_any_price, check_preview
from scaling import step_as_horovod

import hvdplus.torch as hvd
from hvdplus.agree import next_instance
from hvdplus.compression import Chain, Compressor, Context, Half, IntB, LowRank

os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # one test makes some
hvd.init()
torch.set_num_threads(1)
RANK, SIZE = hvd.rank(), hvd.size()
FEW = ["lowrank:2", "int8"]
"""Payloads of floats and of integers."""
LEVELS = ["randomk:0.2:32", "topk:0.2:32", "int4:stochastic", "int11", "qsgd:8", "terngrad", "signsgd"]
LEVELS += ["lowrank:2+fp16", "randomk:0.3:16+int6", "powersgd:2", "powersgd:2+fp16", "topk2:0.2:32+int8"]
SOME = ["none", "fp16", *FEW, "topk:0.2:32+int8"]
"""Of all levels those that stand for ``LEVELS`` in launches that need not have them all."""
SHAPES = [(40, 24), (40,), (3, 16, 3, 3), (24, 40), (7,), (1,)]
HOROVOD = hvd._require_world().transport.name.startswith("horovod")


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Several buckets, even for small models, and gradients that have a state of their own in plain dense steps."""
    monkeypatch.setenv("HVDPLUS_BUCKET_BYTES", "6000")
    monkeypatch.setattr("hvdplus.exchange.engine.PLAIN_BUCKET_BYTES", 1000)


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3)
    )


def batch(step, rank=RANK):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 12, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def train(net, optimizer, steps, first=0, rank=RANK):
    for step in range(first, first + steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def wrapped(net, compression="none", lr=0.1, **keywords):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=1e-3)
    return hvd.DistributedOptimizer(
        optimizer, named_parameters=net.named_parameters(), compression=compression, **keywords
    )


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def parameters(shapes=SHAPES):
    """Parameters whose gradient is whatever we choose: the loss is their product with it."""
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]


def gradients(step, rank, shapes=SHAPES):
    rng = np.random.default_rng([step, rank])
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def backward(params, grads):
    sum((p * torch.from_numpy(np.asarray(g, np.float32))).sum() for p, g in zip(params, grads, strict=True)).backward()


def take_steps(optimizer, params, count):
    for step in range(count):
        backward(params, gradients(step, RANK))
        optimizer.step()
        optimizer.zero_grad()


def plain(params, compression, **keywords):
    return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), compression=compression, **keywords)


def raises_everywhere(kind, match, function):
    with pytest.raises(kind, match=match):
        function()
    hvd.barrier()


@pytest.mark.ranks(1)
def test_none_on_one_rank_is_the_bare_optimizer_bit_for_bit():
    bare, ours = model(), model()
    train(bare, torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3), 20)
    train(ours, wrapped(ours), 20)
    assert equal(bare, ours)


@pytest.mark.skipif(not HOROVOD, reason="compares with stock Horovod")
def test_none_is_stock_horovod():
    import horovod.torch as stock

    theirs, ours = model(), model()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    train(theirs, stock.DistributedOptimizer(optimizer, named_parameters=theirs.named_parameters()), 20)
    train(ours, wrapped(ours), 20)
    if SIZE <= 2:  # beyond, the order of a ring's sum depends on the layout
        assert equal(theirs, ours)
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert hvd.identical(ours)


@pytest.mark.parametrize("level", few(*SOME, once=LEVELS, sizes=(1, 2, 4)))
def test_agrees_with_numpy(level):
    agrees_with_numpy(level, SHAPES)


@pytest.mark.parametrize("level", few("lowrank:2", once=["powersgd:2+fp16", "lowrank:2+int8", "topk:0.1"]))
def test_agrees_with_numpy_where_gradients_do_not_fit_into_the_cache(level):
    """Those of a matrix join their residual no sooner than they are multiplied, beside others that do not."""
    agrees_with_numpy(level, ((20, 30), (40, 10), (10, 40), (600, 500), (50,)))


def agrees_with_numpy(level, shapes):
    params = parameters(shapes)
    optimizer = plain(params, level)
    reference = Reference(level, optimizer._exchange.buckets, SIZE)
    if SIZE == 1 and level == "none":
        return
    for step in range(6):
        before = [p.detach().clone() for p in params]
        optimizer.zero_grad()
        backward(params, gradients(step, RANK, shapes))
        optimizer.step()
        expected = reference.step([gradients(step, rank, shapes) for rank in range(SIZE)])
        for p, old, mean in zip(params, before, expected, strict=True):
            scale = np.abs(mean).max()
            # fp16 sums round once a hop of the ring, and what follows from them is a factor of the next pass.
            passes = optimizer._exchange.ladder.compressors[-1].passes
            tolerance = 2e-3 * max(1, SIZE - 1) * passes if "fp16" in level else 5e-5
            np.testing.assert_allclose((old - p.detach()).numpy(), mean, rtol=0, atol=tolerance * max(scale, 1.0))


@pytest.mark.parametrize("level", few(*SOME, "auto", once=LEVELS, sizes=(1, 2)))
def test_ranks_stay_identical(level):
    net = model(seed=RANK)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = wrapped(net, level)
    train(net, optimizer, 60)
    assert hvd.identical(net)
    assert all(torch.isfinite(p).all() for p in net.parameters())


def walk(optimizer, params, levels, steps_each):
    """Run through levels; returns the float64 sum of this rank's gradients."""
    total = [np.zeros(p.shape) for p in params]
    step = 0
    for level in levels:
        optimizer.hvdplus.set_level(level)
        for _ in range(steps_each):
            grads = gradients(step, RANK)
            for t, g in zip(total, grads, strict=True):
                t += g
            optimizer.zero_grad()
            backward(params, grads)
            optimizer.step()
            step += 1
        assert hvd.identical(p for p in params)
    return total


@several
def test_nothing_is_lost_across_changes_of_level(monkeypatch):
    monkeypatch.setenv("HVDPLUS_LADDER", "none,lowrank:1,lowrank:2")
    monkeypatch.setenv("HVDPLUS_DENSE_STEPS", "100000")  # the test turns the dial, not the controller
    monkeypatch.setenv("HVDPLUS_DRAIN_STEPS", "5")
    params = parameters()
    optimizer = plain(params, "auto")
    mine = walk(optimizer, params, [0, 1, 2, 0, 2, 1, 0, 0], steps_each=7)
    states = optimizer._exchange.states
    left, everyone = held_back(optimizer, params), hvd.allgather_object(mine)
    for i, (p, residual) in enumerate(zip(params, left, strict=True)):
        total = sum(grads[i] for grads in everyone)
        sent = -p.detach().double().numpy() * SIZE  # learning rate 1: a parameter is minus the sum of what arrived
        np.testing.assert_allclose(sent + residual, total, atol=2e-3)
        assert np.abs(residual).max() == 0.0  # two stretches of 7 dense steps pay out everything in 5
    assert all(state.residual is None for state in states)


def damage(grads, value, rank):
    if rank == RANK:
        grads[3][2, 5] = value
    return grads


@several
@pytest.mark.parametrize("level", few(*FEW, once=["none", "fp16"], sizes=(2, 4)))
def test_non_finite_gradient_of_one_rank_reaches_all_and_leaves_no_trace(level):
    params = parameters()
    optimizer = plain(params, level)
    for step in range(4):
        backward(params, gradients(step, RANK))
        optimizer.step()
        optimizer.zero_grad()
    exchange = optimizer._exchange
    states = copy.deepcopy([(state.residual, state.contexts) for state in exchange.states])
    plan = exchange.plan._replace(measurement=0)
    backward(params, damage(gradients(4, RANK), np.nan, SIZE - 1))
    optimizer.synchronize()
    assert not torch.isfinite(params[3].grad).all()
    with optimizer.skip_synchronize():  # as a script without a loss scaler does: the step is taken all the same
        optimizer.step()
    assert exchange.plan._replace(measurement=0) == plan
    for (residual, contexts), state in zip(states, exchange.states, strict=True):
        assert (residual is None) == (state.residual is None)
        assert residual is None or torch.equal(residual, state.residual)
        for number, ctx in contexts.items():
            assert all(torch.equal(a, b) for a, b in zip(ctx.state, state.contexts[number].state, strict=True))
    optimizer.zero_grad()
    backward(params, gradients(5, RANK))
    optimizer.synchronize()
    assert all(torch.isfinite(p.grad).all() for p in params)


@any_transport
@several
@pytest.mark.parametrize("level", ["int8", "lowrank:2"])
def test_a_step_that_is_not_taken_commits_no_residual(level):
    params = parameters()
    optimizer = plain(params, level)
    for step in range(3):
        optimizer.zero_grad()
        backward(params, gradients(step, RANK))
        optimizer.step()
    before = copy.deepcopy([state.residual for state in optimizer._exchange.states])
    optimizer.zero_grad()
    backward(params, gradients(3, RANK))
    optimizer.synchronize()
    optimizer.zero_grad()  # the script skips the step
    backward(params, gradients(4, RANK))
    for residual, state in zip(before, optimizer._exchange.states, strict=True):
        assert residual is None or torch.equal(residual, state.residual)
    optimizer.step()
    assert hvd.identical(p for p in params)


class Account:
    """Gradients brought = steps taken + what is held back, at a learning rate of 1."""

    def __init__(self, compression):
        self.params = parameters()
        self.optimizer = plain(self.params, compression)
        self.brought = [np.zeros(p.shape) for p in self.params]

    def backward(self, step, unused=(), taken=True):
        grads = gradients(step, RANK)
        used = [i for i in range(len(grads)) if i not in unused]
        for i in used if taken else ():
            self.brought[i] += grads[i]
        backward([self.params[i] for i in used], [grads[i] for i in used])

    def balance(self):
        left, everyone = held_back(self.optimizer, self.params), hvd.allgather_object(self.brought)
        for i, (p, held) in enumerate(zip(self.params, left, strict=True)):
            arrived = -p.detach().double().numpy() * SIZE
            np.testing.assert_allclose(arrived + held, sum(brought[i] for brought in everyone), atol=2e-3)
        assert hvd.identical(p for p in self.params)


@any_transport
@several
@pytest.mark.parametrize("level", ["topk:0.1", "lowrank:1"])
def test_a_backward_pass_that_adds_to_means_loses_nothing(level):
    """One loss is exchanged and clipped, then another is added and exchanged."""
    account = Account(level)
    for step in range(6):
        account.optimizer.zero_grad()
        account.backward(2 * step)
        account.optimizer.synchronize()
        account.backward(2 * step + 1)
        account.optimizer.step()
    account.balance()


@any_transport
@several
@pytest.mark.parametrize("how", ["optimizer", "model"])
def test_a_step_that_the_script_skips_after_synchronize_leaves_no_trace(how):
    account = Account("topk:0.1")
    for step in range(8):
        if skipped := step in (3, 4, 6):
            account.backward(step, taken=False)
            account.optimizer.synchronize()
        else:
            account.backward(step)
            account.optimizer.step()
        if how == "optimizer":
            account.optimizer.zero_grad()
        else:
            for p in account.params:
                p.grad = None
    assert not skipped
    account.balance()


@any_transport
@several
@pytest.mark.parametrize("level", ["none", "fp16", "topk:0.1"])
def test_gradients_that_are_set_by_hand_after_a_skipped_step_are_exchanged_or_an_error(level):
    account = Account(level)
    for step in range(3):
        account.backward(step)
        account.optimizer.step()
        account.optimizer.zero_grad()
    account.backward(3)
    account.optimizer.synchronize()
    before = [p.detach().clone() for p in account.params]
    grads = gradients(4, RANK)

    def set_by_hand():
        for p, grad in zip(account.params, grads, strict=True):
            p.grad = torch.from_numpy(grad).clone()

    set_by_hand()  # the script has skipped this step
    for tried in (account.optimizer.step, account.optimizer.synchronize):
        raises_everywhere(RuntimeError, r"skip_synchronize\(\).*optimizer.zero_grad\(\)", tried)
    account.optimizer.zero_grad()
    set_by_hand()
    account.optimizer.step()
    assert hvd.identical(p for p in account.params)
    if level == "none":
        for p, old, theirs in zip(account.params, before, zip(*hvd.allgather_object(grads), strict=True), strict=True):
            np.testing.assert_allclose((old - p.detach()).numpy(), np.mean(theirs, axis=0), atol=1e-6)


@several
def test_what_no_rank_uses_at_the_end_of_a_flush_is_not_forgotten(monkeypatch):
    """It waits for the next level that keeps a residual, or the next flush."""
    monkeypatch.setenv("HVDPLUS_LADDER", "none,lowrank:1")
    monkeypatch.setenv("HVDPLUS_DENSE_STEPS", "100000")  # the test turns the dial, not the controller
    monkeypatch.setenv("HVDPLUS_DRAIN_STEPS", "4")
    account, step, waited = Account("auto"), 0, False
    for level, heads_in_turns in [(1, False), (0, True), (1, False), (0, False)]:
        account.optimizer._exchange.coordinator.set_level(level)
        for _ in range(8):
            last = level == 0 and account.optimizer._exchange.plan.flush_fraction == 1.0
            account.optimizer.zero_grad()
            account.backward(step, unused=[0, 3] if last and heads_in_turns else [])
            account.optimizer.step()
            step += 1
        account.balance()
        largest = [np.abs(held).max() for held in held_back(account.optimizer, account.params)]
        if heads_in_turns:
            waited = largest[0] > 1e-3 and largest[3] > 1e-3 and max(largest[1:3]) == 0.0
    assert waited and max(largest) == 0.0


@several
def test_parameters_without_a_gradient():
    params = parameters([(20, 20), (20, 20), (5,)])
    optimizer = plain(params, "lowrank:2")
    for step in range(3):
        optimizer.zero_grad()  # gradients become None
        used = [0] if RANK else [0, 1]
        grads = gradients(step, RANK, [(20, 20), (20, 20), (5,)])
        backward([params[i] for i in used], [grads[i] for i in used])
        optimizer.synchronize()
        assert params[2].grad is None  # used nowhere: weight decay must not move it
        assert params[1].grad is not None  # used on rank 0
        with optimizer.skip_synchronize():
            optimizer.step()
    assert hvd.identical(p for p in params)


@any_transport
@two
@pytest.mark.skipif(not HOROVOD, reason="compares with stock Horovod")
def test_backward_passes_per_step_is_stock_horovods():
    import horovod.torch as stock

    def accumulate(net, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            for part in range(2):
                x, y = batch(2 * step + part)
                torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        return net

    theirs, ours = model(), model()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    accumulate(
        theirs,
        stock.DistributedOptimizer(optimizer, named_parameters=theirs.named_parameters(), backward_passes_per_step=2),
    )
    accumulate(ours, wrapped(ours, backward_passes_per_step=2))
    assert equal(theirs, ours)


@several
def test_fp16_that_overflows_is_sent_again_in_full_width():
    params = parameters()
    optimizer = plain(params, "fp16")
    for step, size in enumerate([1.0, 1e6, 1.0]):
        grads = [g * np.float32(size) for g in gradients(step, RANK)]
        optimizer.zero_grad()
        backward(params, grads)
        optimizer.synchronize()
        for i, p in enumerate(params):
            mean = np.mean([gradients(step, rank)[i].astype(np.float64) * size for rank in range(SIZE)], axis=0)
            np.testing.assert_allclose(p.grad.numpy(), mean, rtol=0, atol=2e-3 * size)
    assert hvd.identical(p.grad for p in params)


@any_transport
@several
def test_optimizer_state_that_only_rank_0_has_is_broadcast():
    """Horovod's recipe for checkpoints; its own function would step, and so exchange, on the other ranks only."""
    net = model()
    bare = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if RANK == 0:
        train(net, bare, 2)
    optimizer = hvd.DistributedOptimizer(bare, named_parameters=net.named_parameters(), compression="lowrank:2")
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert hvd.identical(state["momentum_buffer"] for state in optimizer.state.values())
    train(net, optimizer, 3)
    assert hvd.identical(net)


def saved(optimizer):
    """Through a file, as a checkpoint goes, read in PyTorch's safe way."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(net, state, compression, **keywords):
    """A job that begins anew, with the weights of ``net`` and an optimizer's state."""
    fresh = copy.deepcopy(net)
    optimizer = wrapped(fresh, compression, **keywords)
    optimizer.load_state_dict(state)
    return fresh, optimizer


@any_transport
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("level", ["none", "int8", "lowrank:2", "topk:0.2:32+int8"])
def test_a_checkpoint_goes_on_as_if_it_had_never_stopped(level):
    net = model()
    optimizer = wrapped(net, level)
    train(net, optimizer, 5)
    fresh, again = resumed(net, saved(optimizer), level)
    train(net, optimizer, 5, first=5)
    train(fresh, again, 5, first=5)
    if SIZE <= 2:  # beyond, the order of a ring's sum depends on what Horovod makes as one
        assert equal(net, fresh)
    for a, b in zip(net.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
    assert hvd.identical(fresh)


@any_transport
@several
def test_a_checkpoint_knows_what_the_controller_knew(monkeypatch):
    """And which embeddings have their rows shared."""
    monkeypatch.setenv("HVDPLUS_DENSE_STEPS", "3")

    def words(step):
        return torch.randint(0, 400, (3,), generator=torch.Generator().manual_seed(10 * step + RANK))

    def walk(net, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            net(words(step)).square().sum().backward()
            optimizer.step()

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(400, 8, sparse=True), torch.nn.Linear(8, 8))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    walk(net, optimizer, range(12))
    state = saved(optimizer)
    fresh = copy.deepcopy(net)
    again = hvd.DistributedOptimizer(torch.optim.SGD(fresh.parameters(), lr=0.1))
    again.load_state_dict(state)
    assert again.hvdplus.steps == optimizer.hvdplus.steps >= 11 and again.hvdplus.plan == optimizer.hvdplus.plan
    assert again.hvdplus.auto.controller.memory() == optimizer.hvdplus.auto.controller.memory()
    assert again._exchange.tables == optimizer._exchange.tables == [0]
    walk(fresh, again, range(12, 16))
    assert hvd.identical(fresh)


@any_transport
# PyTorch counts the bare optimizer's own steps, and there are none.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@several
def test_a_scheduler_of_the_bare_optimizer_survives_loading():
    net = model()
    bare = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(bare, step_size=1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(bare, named_parameters=net.named_parameters(), compression="int8")
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(3):
        train(net, optimizer, 1, first=step)
        schedule.step()
        assert [group["lr"] for group in optimizer.param_groups] == [0.1 * 0.5 ** (step + 1)]
    assert hvd.identical(net)


@any_transport
def test_hooks_of_steps_run_once_and_after_the_exchange():
    params = parameters()
    bare = torch.optim.SGD(params, lr=0.1)
    seen = []
    bare.register_step_pre_hook(lambda optimizer, *_: seen.append(params[0].grad.clone()))
    bare.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer = hvd.DistributedOptimizer(bare, compression="none")
    for step in range(4):
        backward(params, gradients(step, RANK))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert [each for each in seen if isinstance(each, str)] == ["after"] * 4 and len(seen) == 8
    for step, mean in enumerate(seen[::2]):
        everyone = [gradients(step, rank)[0] for rank in range(SIZE)]
        np.testing.assert_allclose(mean.numpy(), np.mean(everyone, axis=0), rtol=1e-5, atol=1e-6)


@any_transport
def test_ranks_that_have_made_more_optimizers_before_take_part_under_the_same_name():
    """As in elastic jobs, where survivors have made some that newcomers have not."""
    if RANK == 0:
        next_instance()
    params = parameters()
    optimizer = plain(params, "int8")
    take_steps(optimizer, params, 3)
    assert hvd.identical(params)


@any_transport
@two
def test_join_is_refused_where_ranks_compress_together():
    optimizer = plain(parameters(), "int8")
    raises_everywhere(RuntimeError, "same number of steps", hvd.join)
    del optimizer


@one_or_two
@any_transport
def test_copies_and_pickles_are_the_users_optimizer():
    net = model()
    optimizer = wrapped(net, "int8")
    train(net, optimizer, 3)
    other_net, other = copy.deepcopy((net, optimizer))
    loaded = pickle.loads(pickle.dumps(optimizer))
    for each in (other, loaded):
        assert type(each) is torch.optim.SGD
        ours, theirs = saved(optimizer)["state"], each.state_dict()["state"]
        assert all(torch.equal(ours[i]["momentum_buffer"], theirs[i]["momentum_buffer"]) for i in range(6))
    again = hvd.DistributedOptimizer(other, named_parameters=other_net.named_parameters(), compression="int8")
    train(other_net, again, 2)
    assert hvd.identical(other_net) and not equal(net, other_net)


def held_back(optimizer, params):
    """What a job holds back, summed over its ranks."""
    mine = [np.zeros(p.shape) for p in params]
    for i, residual in optimizer.state_dict().get("hvdplus", {"residuals": {}})["residuals"].items():
        mine[i] += residual.double().numpy()
    return [sum(parts) for parts in zip(*hvd.allgather_object(mine), strict=True)]


@any_transport
@several
def test_one_ranks_checkpoint_is_everybodys_once_consolidated():
    """On as many ranks, and on twice or half as many: what will reach the weights stays what it was."""
    params = parameters()
    optimizer = plain(params, "lowrank:2")
    for step in range(6):
        optimizer.zero_grad()
        backward(params, gradients(step, RANK))
        optimizer.step()
    before = held_back(optimizer, params)
    optimizer.consolidate_state_dict()
    after = held_back(optimizer, params)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    state = hvd.broadcast_object(saved(optimizer), root_rank=0)
    for ranks in (SIZE, 2 * SIZE, SIZE // 2):
        again = parameters()
        other = plain(again, "lowrank:2")
        other.load_state_dict({**state, "hvdplus": {**state["hvdplus"], "ranks": ranks}})
        for a, b in zip(after, held_back(other, again), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)
        backward(again, gradients(6, RANK))
        other.step()
        assert hvd.identical(again)
    optimizer.zero_grad()
    backward(params, gradients(6, RANK))
    optimizer.step()
    assert optimizer.state_dict()["hvdplus"]["rank"] == RANK, "from here on every rank holds back its own again"


@any_transport
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("level", ["none", "auto"])
def test_what_was_held_back_is_not_lost_with_another_level(level, monkeypatch):
    monkeypatch.setenv("HVDPLUS_DRAIN_STEPS", "4")
    params = parameters()
    optimizer = plain(params, "lowrank:1")
    for step in range(6):
        optimizer.zero_grad()
        backward(params, gradients(step, RANK))
        optimizer.step()
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = plain(again, level)
    other.load_state_dict(saved(optimizer))
    for step in range(6, 14):
        other.zero_grad()
        backward(again, gradients(step, RANK))
        other.step()
    left = held_back(other, again)
    if level in ("none", "auto", "fp16"):
        assert not other.state_dict().get("hvdplus", {"residuals": {}})["residuals"], "all is paid out"
        assert other._exchange.idle == (SIZE == 1 and level != "fp16")
    for i, p in enumerate(again):
        total = sum(gradients(step, rank)[i] for step in range(14) for rank in range(SIZE))
        np.testing.assert_allclose(-p.detach().double().numpy() * SIZE + left[i], total, atol=0.02)


@any_transport
@several
def test_states_that_cannot_be_gone_on_from_are_an_error_on_every_rank():
    net = model()
    optimizer = wrapped(net, "int8")
    train(net, optimizer, 2)
    state = saved(optimizer)
    fresh = copy.deepcopy(net)
    again = wrapped(fresh, "int8")
    if RANK == 0:
        again.load_state_dict(state)
    raises_everywhere(RuntimeError, "different states", lambda: train(fresh, again, 1))
    ours = state["hvdplus"]
    small = plain(parameters([(7,)]), "int8")
    raises_everywhere(ValueError, "another model", lambda: small._exchange.load(ours))
    raises_everywhere(ValueError, "format", lambda: optimizer._exchange.load({**ours, "format": 99}))
    for damage, match in (
        ({name: value for name, value in ours.items() if name != "shapes"}, "has no shapes"),
        ({**ours, "residuals": {0: torch.full((40, 12), torch.nan)}}, "residual of parameter 0 .* not finite"),
        (None, "format"),
    ):
        damaged = {**state, "hvdplus": damage}
        raises_everywhere(ValueError, match, lambda damaged=damaged: optimizer.load_state_dict(damaged))
    x, y = batch(0)
    torch.nn.functional.cross_entropy(net(x), y).backward()
    raises_everywhere(RuntimeError, "in flight", lambda: optimizer._exchange.load(ours))
    optimizer.step()


@any_transport
@several
def test_a_checkpoint_without_our_state_loads_with_a_note(capfd):
    net = model()
    bare = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    train(net, bare, 2, rank=0)
    optimizer = wrapped(net, "int8")
    optimizer.load_state_dict(bare.state_dict())
    assert ("no state of hvdplus" in capfd.readouterr().err) == (RANK == 0)
    train(net, optimizer, 2)
    assert hvd.identical(net)
    bare.load_state_dict(optimizer.state_dict())  # and the other way round


@any_transport
@several
def test_another_ranks_checkpoint_says_what_it_does_not_hold(capfd):
    net = model()
    optimizer = wrapped(net, "lowrank:2")
    train(net, optimizer, 5)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    assert (f"residuals of rank(s) {RANK} are lost" in capfd.readouterr().err) == (RANK != 1)
    train(net, optimizer, 3)
    assert hvd.identical(net)


@several
@pytest.mark.parametrize("level", few(*SOME, once=LEVELS))
def test_parameters_may_be_unfrozen_and_added_later(level):
    """From their first gradient on they are exchanged, and of all others nothing is lost."""
    params = parameters([*SHAPES, (16, 20)])
    params[0].requires_grad_(False)
    params[4].requires_grad_(False)
    optimizer = plain(params[:6], level)
    active, total = {1, 2, 3, 5}, [np.zeros(p.shape) for p in params]
    for step in range(12):
        if step == 3:
            params[0].requires_grad_(True)
            active.add(0)
        if step == 5:
            optimizer.add_param_group({"params": [params[6]], "lr": 1.0})
            active |= {6}
        if step == 7:
            params[4].requires_grad_(True)
            params[3].requires_grad_(False)  # what is held back of it waits
            active = active - {3} | {4}
        grads = gradients(step, RANK, [p.shape for p in params])
        optimizer.zero_grad()
        backward([params[i] for i in sorted(active)], [grads[i] for i in sorted(active)])
        optimizer.step()
        for i in active:
            total[i] += grads[i]
    assert hvd.identical(params)
    left = held_back(optimizer, [p for p in optimizer._exchange.parameters])
    left = {id(p): residual for p, residual in zip(optimizer._exchange.parameters, left, strict=True)}
    everybodys = hvd.allgather_object(total)
    exact = level in ("none", "fp16") or optimizer._exchange.ladder.compressors[-1].keeps_residual
    for i, p in enumerate(params if exact else ()):
        whole = sum(theirs[i] for theirs in everybodys)
        np.testing.assert_allclose(-p.detach().double().numpy() * SIZE + left[id(p)], whole, atol=0.02 * SIZE)


@several
@pytest.mark.parametrize("level", few("int8", once=["none", "fp16", "lowrank:2"]))
def test_parameters_may_be_replaced(level):
    """Those that are gone stay as they are, and may come back; of all others nothing is lost."""
    body = parameters()
    heads = [parameters([(400, 6), (30, 20)]) for _ in range(2)]
    optimizer, total = plain([*body, *heads[0]], level), [np.zeros(p.shape) for p in body]
    for step in range(12):
        head, other = heads[step // 3 % 2], heads[1 - step // 3 % 2]
        optimizer.param_groups[0]["params"] = [*body, *head]
        before = copy.deepcopy(other)
        grads = gradients(step, RANK, [*SHAPES, (30, 20)])
        optimizer.zero_grad()
        backward([*body, head[1]], grads)
        rows = torch.nn.functional.embedding(torch.tensor([RANK]), head[0], sparse=True)
        (rows.sum() + sum(p.sum() for p in other)).backward()  # those that are gone may still be used
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, other, strict=True))
        total = [sum_ + grad for sum_, grad in zip(total, grads[: len(body)], strict=True)]
    assert hvd.identical([*body, *heads[0], *heads[1]])
    assert [id(p) for p in optimizer._exchange.parameters] == [id(p) for p in [*body, *heads[1]]]
    left, everybodys = held_back(optimizer, optimizer._exchange.parameters), hvd.allgather_object(total)
    for i, p in enumerate(body):
        whole = sum(theirs[i] for theirs in everybodys)
        np.testing.assert_allclose(-p.detach().double().numpy() * SIZE + left[i], whole, atol=0.02 * SIZE)


@several
@pytest.mark.parametrize("steps", few(2, once=[0]))
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("level", ["none", "int8"])
def test_a_gradient_that_is_replaced_on_its_way_is_an_error_on_every_rank(level, place, steps):
    params = parameters()
    optimizer = plain(params, level)
    take_steps(optimizer, params, steps)
    backward(params, gradients(steps, RANK))
    params[place].grad = params[place].grad * 0  # as new as the one before, and never written to
    raises_everywhere(RuntimeError, "A gradient was changed after backward", optimizer.step)


@pytest.mark.parametrize("level", ["none", "fp16", "int8"])
def test_an_optimizer_that_is_dropped_is_gone_at_once(level):
    """Another one over the same model must not find it at work until garbage is collected."""
    net = model()
    gc.disable()
    try:
        optimizer = wrapped(net, level)
        train(net, optimizer, 3)
        former = weakref.ref(optimizer._exchange)
        optimizer = wrapped(net, level)
        train(net, optimizer, 3, first=3)
        assert former() is None
    finally:
        gc.enable()
    assert hvd.identical(net)


@several
def test_the_controller_knows_which_bytes_nothing_hides():
    """The bucket that leaves last: at dense over Horovod, where nothing is joined, a much smaller one."""
    dense, *others = plain(parameters([(200, 250)] * 6), "auto", settings={"bucket_bytes": 8 << 20}).hvdplus.costs
    last = 200_000 if HOROVOD else 1_200_000
    assert (dense.payload_bytes, dense.last_bytes) == (1_200_000, last)
    assert all(cost.last_bytes == cost.payload_bytes for cost in others), "one bucket"


@any_transport
@several
def test_synchronize_and_step_exchange_once():
    params = parameters()
    optimizer = plain(params, "lowrank:2")
    reference = Reference("lowrank:2", optimizer._exchange.buckets, SIZE)
    for step in range(3):
        before = [p.detach().clone() for p in params]
        optimizer.zero_grad()
        backward(params, gradients(step, RANK))
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="not exchanged a second time"):
            optimizer.step()
        expected = reference.step([gradients(step, rank) for rank in range(SIZE)])
        for p, old, mean in zip(params, before, expected, strict=True):
            np.testing.assert_allclose((old - p.detach()).numpy(), mean, rtol=0, atol=1e-4)


def test_more_passes_than_agreed_is_an_error():
    if SIZE == 1:
        return
    params = parameters()
    optimizer = plain(params, "none")
    backward(params, gradients(0, RANK))
    raises_everywhere(AssertionError, "backward_passes_per_step", lambda: backward(params, gradients(0, RANK)))
    del optimizer


def test_op_sum():
    params = parameters()
    optimizer = plain(params, "fp16", op=hvd.Sum)
    backward(params, [np.full(shape, 0.5) for shape in SHAPES])
    optimizer.synchronize()
    assert all(torch.equal(p.grad, torch.full(p.shape, 0.5 * SIZE)) for p in params)


@any_transport
def test_closures():
    params = parameters()
    optimizer = plain(params, "none")

    def closure():
        optimizer.zero_grad()
        loss = sum((p * (RANK + 1)).sum() for p in params)
        loss.backward()
        return loss

    optimizer.step(closure)
    expected = -(SIZE + 1) / 2
    assert all(torch.equal(p.detach(), torch.full(p.shape, expected)) for p in params)


class Stock(hvd.Compression.fp16):
    """What a script for Horovod may bring along: a class of its own."""


class Mirror(Compressor):
    """A user's own compressor: sends every number with its sign changed."""

    name = "mirror"

    def init(self, ops, spec):
        return Context(spec, 0, ())

    def encode(self, ops, ctx, grad, residual=None):
        return grad * -1.0

    def decode(self, ops, ctx, total):
        return total * -1.0

    def payload_bytes(self, spec, side=0):
        return 4 * spec.size


@any_transport
@pytest.mark.parametrize("compression", [Mirror(), IntB(16), Chain(LowRank(20), Half())])
def test_compressors_as_objects(compression):
    params = parameters()
    optimizer = plain(params, compression)
    for step in range(3):
        optimizer.zero_grad()
        backward(params, gradients(step, RANK))
        optimizer.step()
    assert optimizer.hvdplus.ladder.names[-1] == compression.name
    assert hvd.identical(p for p in params)
    for i, p in enumerate(params):
        expected = -np.mean([gradients(step, rank)[i] for step in range(3) for rank in range(SIZE)], axis=0) * 3
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=0, atol=0.05)


@any_transport
@pytest.mark.skipif(not HOROVOD, reason="needs a class of Horovod's")
def test_a_stock_horovod_compressor_runs_unchanged():
    """To the same bits as under Horovod itself."""
    import horovod.torch as stock

    theirs, ours = model(), model()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    train(theirs, stock.DistributedOptimizer(optimizer, theirs.named_parameters(), compression=Stock), 5)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, ours.named_parameters(), compression=Stock)
    train(ours, optimizer, 5)
    assert optimizer.hvdplus.ladder.names == ("Stock",)
    assert optimizer.hvdplus.payload_bytes == (2 * sum(p.numel() for p in ours.parameters()),)
    assert hvd.identical(ours)
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def lookups(step, rank, height):
    """Rows that a rank looks up, some twice; on one rank nothing in step 2."""
    rng = np.random.default_rng([step, rank])
    rows = rng.integers(0, height, 5)
    return np.concatenate([rows, rows[:2]]) if (step, rank) != (2, 0) else None


@several
@pytest.mark.parametrize("height", [10, 400], ids=["dense", "rows are shared"])
@pytest.mark.parametrize("level", ["none", "int8"])
def test_sparse_gradients(level, height):
    """Rows that few lookups touch are exact at every level, others are compressed as all gradients are."""
    torch.manual_seed(0)
    table, head = torch.nn.Embedding(height, 6, sparse=True), torch.nn.Linear(6, 60)
    start = table.weight.detach().clone().double()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([*table.parameters(), *head.parameters()], lr=1.0), compression=level
    )
    expected = start.clone()
    for step in range(5):
        optimizer.zero_grad()
        rows = lookups(step, RANK, height)
        if rows is None:
            head(torch.zeros(1, 6)).sum().backward()
        else:
            (table(torch.from_numpy(rows)).sum() + head(torch.ones(1, 6)).sum()).backward()
        optimizer.synchronize()
        assert table.weight.grad.is_sparse
        with optimizer.skip_synchronize():
            optimizer.step()
        for rank in range(SIZE):
            for row in () if lookups(step, rank, height) is None else lookups(step, rank, height):
                expected[row] -= 1.0 / SIZE
    assert hvd.identical([*table.parameters(), *head.parameters()])
    assert optimizer._exchange.tables == [0]
    shared = height == 400
    if shared:
        assert optimizer._exchange.coordinator.row_bytes < height * 6 * 4 / 2
    if shared or level == "none":
        torch.testing.assert_close(table.weight.detach().double(), expected, rtol=0, atol=1e-5)


@any_transport
@several
def test_sparse_gradients_in_their_odder_forms():
    torch.manual_seed(0)
    table = torch.nn.Embedding(300, 4, sparse=True, dtype=torch.float64)
    start = table.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), compression="none")
    for step, rows in enumerate([[RANK], list(range(RANK, 300, SIZE)), [], [7, 7, 7]]):
        optimizer.zero_grad()
        if rows:
            (table(torch.tensor(rows)).sum() * SIZE).backward()
        optimizer.synchronize()
        assert (table.weight.grad is None) == (not rows), "what nobody used keeps grad=None"
        if step == 1:
            assert table.weight.grad._nnz() == 300, "where most rows are used, all are sent"
        with optimizer.skip_synchronize():
            optimizer.step()
    expected = start.clone()
    expected[:SIZE] -= 1.0
    expected -= 1.0
    expected[7] -= 3.0 * SIZE
    torch.testing.assert_close(table.weight.detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("level", ["none", "int8"])
@pytest.mark.parametrize("kind", [torch.complex64, torch.complex128])
def test_sparse_complex_gradients_keep_their_imaginary_part(kind, level):
    table = torch.nn.Parameter(torch.zeros(400, 6, dtype=kind))
    optimizer = plain([table], level)
    for step in range(3):
        optimizer.zero_grad()
        values = torch.full((1, 6), (RANK + 1) * (1 - 2j), dtype=kind)
        table.grad = torch.sparse_coo_tensor([[step + RANK]], values, table.shape)
        optimizer.step()
    expected = torch.zeros_like(table)
    for step, rank in itertools.product(range(3), range(SIZE)):
        expected[step + rank] -= (rank + 1) * (1 - 2j) / SIZE
    assert torch.equal(table.detach(), expected)


@any_transport
@several
@pytest.mark.parametrize("level", ["none", "int8", "auto"])
def test_a_table_whose_rows_are_shared_may_get_dense_gradients(level):
    """On one rank alone, too; they are measured where a plan asks how large gradients are."""
    params = [torch.nn.Parameter(torch.zeros(400, 6)), *parameters()]
    optimizer = plain(params, level)
    for step in range(10):
        optimizer.zero_grad()
        backward(params[1:], gradients(step, RANK))
        rows = torch.nn.functional.embedding(torch.tensor([3]), params[0], sparse=True).sum()
        (rows + params[0].sum() if step >= 4 and RANK == SIZE - 1 else rows).backward()
        optimizer.step()
    expected = torch.full((400, 6), -6.0 / SIZE)
    expected[3] -= 10.0
    assert optimizer._exchange.tables == [0]
    # A step with a dense gradient runs at the level: what int8 has lost of it is in the residuals.
    held = [state.residual for state in optimizer._exchange.states if state.bucket.parameters == (0,)]
    mine = 0.0 if held[0] is None else held[0].view(400, 6)
    left = sum(hvd.allgather_object(mine)) / SIZE
    torch.testing.assert_close(params[0].detach() - left, expected)


@any_transport
def test_sparse_as_dense_travels_dense_and_comes_back_sparse():
    """As in Horovod."""
    table = torch.nn.Embedding(300, 4, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), compression="fp16", sparse_as_dense=True
    )
    table(torch.tensor([RANK])).sum().backward()
    optimizer.synchronize()
    grad = table.weight.grad
    assert not optimizer._exchange.tables
    assert grad.is_sparse and sorted(grad.coalesce().indices()[0].tolist()) == list(range(SIZE))
    assert torch.equal(grad.to_dense()[:SIZE], torch.full((SIZE, 4), 1 / SIZE))


@any_transport
def test_lbfgs_loses_no_digit_of_the_loss():
    x = torch.nn.Parameter(torch.tensor([1.0 + 1e-12 * RANK], dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS([x], max_iter=1), compression="fp16")

    def closure():
        optimizer.zero_grad()
        loss = x.sum()
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = optimizer.step(closure)
    assert loss.dtype == torch.float64 and not loss.requires_grad
    assert loss.item() == pytest.approx(1.0 + 1e-12 * (SIZE - 1) / 2, abs=1e-15)


@any_transport
@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("begins", [0, 2], ids=["used at once", "used later"])
@pytest.mark.parametrize("height", [12, 400])
def test_sparse_adam(height, begins, as_dense):
    """It wants sparse gradients on every rank, also where this one had none, and leaves alone what nobody used."""
    torch.manual_seed(0)
    ours = torch.nn.ModuleList(torch.nn.Embedding(height, 3, sparse=True) for _ in range(3))
    theirs = copy.deepcopy(ours)
    bare = torch.optim.SparseAdam(theirs.parameters(), lr=0.1)
    optimizer = torch.optim.SparseAdam([*ours[0].parameters(), *ours[1].parameters()], lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, compression="none", sparse_as_dense=as_dense)

    def loss(tables, step, rank):
        used = tables[: 1 if step < begins else 2 if step < 3 else 3]
        parts = [t(torch.tensor([(5 * rank + step + n) % height, 7])).pow(2).sum() for n, t in enumerate(used)]
        return sum(parts[:1] if rank == 1 and step != begins else parts)

    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": list(ours[2].parameters())})
        bare.zero_grad()
        sum(loss(theirs, step, rank) for rank in range(SIZE)).div(SIZE).backward()
        bare.step()
        optimizer.zero_grad()
        loss(ours, step, RANK).backward()
        optimizer.step()
    assert hvd.identical(ours)
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@one_or_two
@any_transport
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_decides_alike_on_all_ranks(search):
    """By everybody's loss: by its own, each rank would search along the line as far as suits itself."""
    theirs, ours = model(), model()
    data = [batch(0, rank) for rank in range(SIZE)]

    def loss(net, rank):
        return torch.nn.functional.cross_entropy(net(data[rank][0]), data[rank][1])

    bare = torch.optim.LBFGS(theirs.parameters(), lr=0.5, max_iter=6, line_search_fn=search)
    optimizer = torch.optim.LBFGS(ours.parameters(), lr=0.5, max_iter=6, line_search_fn=search)
    optimizer = hvd.DistributedOptimizer(optimizer, compression="none")

    def everybodys():
        bare.zero_grad()
        mean = sum(loss(theirs, rank) for rank in range(SIZE)) / SIZE
        mean.backward()
        return mean

    def own():
        optimizer.zero_grad()
        mine = loss(ours, RANK)
        mine.backward()
        return mine

    for _ in range(3):
        expected, got = bare.step(everybodys), optimizer.step(own)
        torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(expected), rtol=1e-2, atol=1e-3)
    assert hvd.identical(ours)
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


@any_transport
@two
def test_levels_that_have_not_run_are_tried_on_the_means(monkeypatch):
    at_any_price(monkeypatch)
    shapes, ladder, means = [(40, 24), (40,), (24, 40)], ["none", "int8", "powersgd:2", "lowrank:2"], []
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    settings = {"ladder": ladder, "dense_steps": 10**6}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), compression="auto", settings=settings)
    for step in range(8):
        optimizer.zero_grad()
        grads = map(torch.from_numpy, gradients(step, RANK, shapes))
        sum((weight * grad).sum() for weight, grad in zip(weights, grads, strict=True)).backward()
        optimizer.step()
        means.append([weight.grad.numpy().copy() for weight in weights])
        everyone = [gradients(step, rank, shapes) for rank in range(SIZE)]
        for got, *theirs in zip(means[-1], *everyone, strict=True):
            np.testing.assert_allclose(got, np.mean(theirs, axis=0), atol=1e-6)
    if RANK == 0:
        check_preview(optimizer.hvdplus.log.records, ladder, shapes, means)


@any_transport
@two
def test_at_a_level_that_holds_something_back_levels_are_tried_on_ranks_own_gradients(monkeypatch):
    at_any_price(monkeypatch, start=2)
    shapes, ladder = [(40, 24), (40,), (24, 40)], ["none", "int8", "powersgd:2", "lowrank:2"]
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(weights, lr=1.0), compression="auto", settings={"ladder": ladder}
    )
    for step in range(6):
        optimizer.zero_grad()
        grads = map(torch.from_numpy, gradients(step, RANK, shapes))
        sum((weight * grad).sum() for weight, grad in zip(weights, grads, strict=True)).backward()
        optimizer.step()
    if RANK == 0:
        everyones = [[gradients(step, rank, shapes) for step in range(6)] for rank in range(SIZE)]
        check_preview(optimizer.hvdplus.log.records, ladder, shapes, *everyones)


@any_transport
@pytest.mark.parametrize("level", ["none", "fp16"])
def test_gradients_that_a_script_sets_lie_in_memory_as_they_like(level):
    """One value for all places, every second place, columns before rows."""
    weight = torch.nn.Parameter(torch.zeros(24, 16))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=level)
    filled = torch.full((24, 16, 2), float(RANK))
    for grad in (torch.tensor(float(RANK)).expand(24, 16), filled[..., 0], torch.full((16, 24), float(RANK)).t()):
        before = weight.detach().clone()
        weight.grad = grad
        optimizer.step()
        torch.testing.assert_close(before - weight.detach(), torch.full((24, 16), (SIZE - 1) / 2), rtol=1e-5, atol=1e-5)
    assert (filled[..., 1] == RANK).all(), "the script's own"


@any_transport
def test_a_parameter_that_an_optimizer_has_twice_is_an_error():
    net = model()
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.SGD([*net.parameters(), next(net.parameters())], lr=0.1)
    with pytest.raises(ValueError, match="An optimizer has every parameter once. Received twice: 0.weight"):
        hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())


@any_transport
@pytest.mark.filterwarnings("ignore:Parameter `average` has been replaced:DeprecationWarning")  # by Horovod itself
def test_gathered_and_broadcast_tensors_have_gradients_as_in_horovod():
    """Averaged over what all ranks made of them."""
    rows, mean = [rank + 1 for rank in range(SIZE)], (SIZE + 1) / 2
    own = torch.full((rows[RANK], 2), float(RANK), requires_grad=True)
    gathered = hvd.allgather(own, name="embeddings")
    assert gathered[:, 0].tolist() == [rank for rank in range(SIZE) for _ in range(rows[rank])]
    weights = torch.arange(2.0 * sum(rows)).view(-1, 2)
    (gathered * weights * (RANK + 1)).sum().backward()
    first = sum(rows[:RANK])
    torch.testing.assert_close(own.grad, weights[first : first + rows[RANK]] * mean)
    centre = torch.full((3,), float(RANK), requires_grad=True)
    sent = hvd.broadcast(centre, SIZE - 1, name="centre")
    assert sent.tolist() == [SIZE - 1] * 3 and centre.tolist() == [RANK] * 3
    (sent * (RANK + 1)).sum().backward()
    assert centre.grad.tolist() == [mean if RANK == SIZE - 1 else 0.0] * 3


@several
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_narrow_gradients_travel_as_they_are_at_none(kind):
    """Half of float32's bytes where the transport can add them up, and the very sum that it makes of them."""
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=kind)) for shape in [(20, 30), (7,)]]
    optimizer = plain(params, "none")
    grads = [torch.from_numpy(g).to(kind) for g in gradients(0, RANK, [(20, 30), (7,)])]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    optimizer.synchronize()
    width = 2 if str(kind).removeprefix("torch.") in hvd._require_world().transport.summable else 4
    assert optimizer.hvdplus.payload_bytes == (607 * width,)
    assert optimizer.hvdplus._gradient_bytes == 607 * 2
    everyone = hvd.allgather_object(grads)
    for i, p in enumerate(params):
        assert p.grad.dtype == kind
        if kind == torch.float16 and HOROVOD and SIZE == 2:  # more ranks add up in an order of the bucket
            assert torch.equal(p.grad, hvd.allreduce(grads[i], name=f"narrow.{i}"))
        mean = sum(theirs[i].float() for theirs in everyone) / SIZE
        torch.testing.assert_close(p.grad.float(), mean, rtol=2e-2, atol=2e-2)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert hvd.identical(p for p in params)


@several
def test_learning_rates_that_differ_are_an_error_on_every_rank():
    """A scheduler that follows each rank's own loss would let the weights go apart."""
    params = parameters()
    optimizer = plain(params, "none")
    take_steps(optimizer, params, 2)
    optimizer.param_groups[0]["lr"] = 0.5 if RANK == SIZE - 1 else 1.0
    with pytest.raises(RuntimeError, match=f"learning rate differs between rank 0 and rank\\(s\\) {SIZE - 1}"):
        take_steps(optimizer, params, 2)
    hvd.barrier()


@several
@pytest.mark.parametrize("level", few("lowrank:2", once=["none", "fp16"]))
@pytest.mark.parametrize("when", ["never broadcast", "changed later"])
def test_weights_that_differ_are_an_error_on_every_rank(level, when):
    """Buffers stay each rank's own."""
    net = torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 3))
    torch.manual_seed(0)
    for p in net.parameters():
        torch.nn.init.normal_(p)
    if when == "never broadcast" and RANK == SIZE - 1:
        torch.nn.init.normal_(net[2].weight)
    optimizer = wrapped(net, level, settings={"weights_check_steps": 5})
    match = f"weights of rank\\(s\\) {SIZE - 1} no longer equal those of rank 0: 2.weight is the first"
    if when == "changed later":
        train(net, optimizer, 3)
        if RANK == SIZE - 1:
            with torch.no_grad():
                net[2].weight[0, 0] += 1e-3
    with pytest.raises(RuntimeError, match=match):
        train(net, optimizer, 9, first=3)
    hvd.barrier()


@any_transport
@several
@pytest.mark.parametrize("size", [1e6, 1e30])
@pytest.mark.parametrize("level", few("lowrank:2+fp16", "int8", once=["signsgd", "topk:0.2:32"]))
def test_one_finite_spike_is_seen_in_its_step_and_leaves_nothing_behind(level, size):
    """It used to leave the residual at some 1e4 a step, so that all later steps were spike."""
    params = parameters()
    optimizer = plain(params, level)
    take_steps(optimizer, params, 5)
    optimizer.zero_grad()
    grads = gradients(5, RANK)
    grads[3][2] = size if RANK == SIZE - 1 else grads[3][2]
    backward(params, grads)
    optimizer.synchronize()
    # Beside it: the gradients of other ranks, and what five steps have held back.
    assert torch.allclose(params[3].grad[2], torch.full(params[3].shape[1:], size / SIZE), rtol=2e-5)
    with optimizer.skip_synchronize():
        optimizer.step()
    for step in range(6, 9):
        optimizer.zero_grad()
        backward(params, gradients(step, RANK))
        optimizer.synchronize()
        assert max(p.grad.abs().max() for p in params) < 50
        with optimizer.skip_synchronize():
            optimizer.step()
    assert hvd.identical(p for p in params)


@any_transport
@two
def test_the_check_of_weights_can_be_turned_off():
    net = model(seed=RANK)
    train(net, wrapped(net, "none", settings={"weights_check_steps": 0}), 12)
    assert not hvd.identical(net)


def test_narrow_and_wide_types():
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    params = [torch.nn.Parameter(torch.zeros(6, 6, dtype=kind)) for kind in kinds]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), compression="fp16")
    sum((p.double() * (RANK + 1)).sum() for p in params).backward()
    optimizer.step()
    assert [p.dtype for p in params] == kinds
    assert all(torch.equal(p.detach().double(), torch.full((6, 6), -(SIZE + 1) / 2).double()) for p in params)


@pytest.mark.parametrize("level", ["none", "int8"])
def test_float64_keeps_its_digits_and_its_range(level):
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = plain([param], level)
    wanted = torch.tensor([1 + 2.0**-52, 1e300], dtype=torch.float64)
    for _ in range(3):
        optimizer.zero_grad()
        (param * wanted).sum().backward()
        optimizer.step()
        assert torch.equal(param.grad, wanted)


@pytest.mark.parametrize("level", few(*FEW, once=["none", "fp16"], sizes=(1, 2)))
@pytest.mark.parametrize("kind", [torch.complex64, torch.complex128])
def test_complex_numbers_travel_dense(kind, level):
    params = [torch.nn.Parameter(torch.zeros(20, 18, dtype=kind)), torch.nn.Parameter(torch.zeros(20, 18))]
    optimizer = plain(params, level)
    total = torch.zeros(20, 18, dtype=torch.complex128)
    for step in range(4):
        drawn = [torch.from_numpy(np.stack(gradients(step, rank, [(20, 18), (20, 18)]))) for rank in range(SIZE)]
        weights = [torch.complex(*each.double()).to(kind) for each in drawn]
        total += sum(weight.to(total.dtype) for weight in weights) / SIZE
        optimizer.zero_grad()
        (params[0] * weights[RANK].conj()).real.sum().backward()
        if step != 2:  # where it has no gradient for a step
            (params[1] * drawn[RANK][0]).sum().backward()
        optimizer.step()
    torch.testing.assert_close(params[0].detach().to(total.dtype), -total, rtol=1e-5, atol=1e-5)
    assert hvd.identical(params)


@one_or_two
@any_transport
@pytest.mark.parametrize("level", ["none", "fp16", *FEW])
def test_memory_layouts_survive(level):
    torch.manual_seed(3)
    net = torch.nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), compression=level)
    reference = copy.deepcopy(net)
    ours, wanted = torch.zeros_like(net.weight), torch.zeros_like(net.weight)
    for step in range(16):  # all ranks have the same gradient
        x = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(step)).to(memory_format=torch.channels_last)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        net(x).square().mean().backward()
        reference.zero_grad()
        reference(x).square().mean().backward()
        stride = reference.weight.grad.stride()
        assert net.weight.grad.stride() == stride != reference.weight.grad.contiguous().stride()
        optimizer.step()
        assert net.weight.grad.stride() == stride
        ours += net.weight.grad
        wanted += reference.weight.grad
        reference.load_state_dict(net.state_dict())
    # What is held back comes later; if elements had changed places, the error would be about 1.4.
    loose = {"none": 1e-6, "fp16": 1e-3, "int8": 0.1, "lowrank:2": 0.5}[level]
    assert (ours - wanted).norm() <= loose * wanted.norm(), "elements are where they were"
    assert net.weight.is_contiguous(memory_format=torch.channels_last) and hvd.identical(net)


@several
@pytest.mark.parametrize("level", few(*FEW, once=["none", "fp16", "topk:0.2:32"]))
def test_buckets_leave_while_the_backward_pass_goes_on(level):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(6)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), compression=level)
    gone = []
    for step in range(4):
        x = torch.ones(2, 40, requires_grad=True)
        if step == 3:  # when the pass arrives at the input, what is behind it is on its way
            x.register_hook(lambda grad: gone.extend(state.handle for state in optimizer._exchange.now.states))
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()
    assert len(gone) > 4 and sum(handle is not None for handle in gone) >= len(gone) - 2
    assert hvd.identical(net)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("level", few("none", *FEW, once=["fp16"], sizes=(1, 2, 4)))
def test_a_gradient_keeps_its_identity_and_nobody_writes_to_it_later(level, to_none):
    params = parameters()
    optimizer = plain(params, level)
    reference = Reference(level, optimizer._exchange.buckets, SIZE)
    kept = []
    for step in range(5):
        optimizer.zero_grad(set_to_none=to_none)
        backward(params, gradients(step, RANK))
        before = [p.grad for p in params]
        optimizer.step()
        assert all(p.grad is grad for p, grad in zip(params, before, strict=True))
        if SIZE > 1 or level != "none":
            for p, mean in zip(params, reference.step([gradients(step, rank) for rank in range(SIZE)]), strict=True):
                np.testing.assert_allclose(p.grad.numpy(), mean, rtol=5e-3, atol=5e-3 * np.abs(mean).max())
        kept += [(p.grad, p.grad.clone()) for p in params if to_none]
    assert all(torch.equal(grad, copy) for grad, copy in kept)


@pytest.mark.parametrize("level", ["none", "fp16"])
def test_gradients_that_share_memory_with_what_backward_still_reads(level):
    """A view's gradient is a view of what the next node takes as input; two views of one sum have one gradient."""
    first, second = (torch.nn.Parameter(torch.full((40, 40), value)) for value in (0.1, 0.2))
    weight = torch.nn.Parameter(torch.eye(40))
    optimizer = plain([first, second, weight], level, op=hvd.Sum)  # a mean of means would hide a sum made twice
    x = torch.from_numpy(np.stack([gradients(0, rank, [(40, 40)])[0] for rank in range(SIZE)]))

    def loss(rank):
        rows = (x[rank].unsqueeze(0) @ weight) + first.unsqueeze(0)
        rows.register_hook(lambda _: time.sleep(0.05))  # time enough for the sum of what came before
        return ((rows + second.view(1, 40, 40)) * x[rank]).sum()

    for _ in range(3):
        optimizer.zero_grad()
        total = torch.autograd.grad(sum(map(loss, range(SIZE))), [first, second, weight])
        loss(RANK).backward()
        optimizer.synchronize()
        for p, expected in zip([first, second, weight], total, strict=True):
            scale = float(expected.abs().max())
            torch.testing.assert_close(p.grad, expected, rtol=0, atol=(5e-3 if level == "fp16" else 1e-5) * scale)


@several
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_of_plain_steps_are_summed_where_they_are(to_none):
    if not HOROVOD:
        pytest.skip("only Horovod sums gradients one by one")
    net = model()
    optimizer, parameters = wrapped(net), list(net.parameters())
    for step in range(3):
        x, y = batch(step)
        optimizer.zero_grad(set_to_none=to_none)
        torch.nn.functional.cross_entropy(net(x), y).backward()
        states = optimizer._exchange.now.states
        sums = [(i, array) for state in states for i, array in zip(state.bucket.parameters, state.summed, strict=False)]
        assert len(sums) == (len(parameters) if step else 0), "in the first step ranks have not agreed on an order"
        assert all(array is parameters[i].grad for i, array in sums)
        optimizer.step()


@pytest.mark.parametrize("level", ["none", "fp16", "int8"])
def test_gradients_that_lie_in_a_buffer_of_the_users_stay_there(level):
    params = parameters()
    optimizer = plain(params, level)
    flat = torch.zeros(sum(p.numel() for p in params))
    places = np.cumsum([0, *(p.numel() for p in params)])
    for p, start, end in zip(params, places, places[1:], strict=False):
        p.grad = flat[start:end].view_as(p).data
    for step in range(3):
        flat.zero_()
        backward(params, gradients(step, RANK))
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        held = torch.cat([p.grad.flatten() for p in params])
        assert held.any() and torch.equal(held, flat)


def test_transports_scale_sums():
    transport = hvd._require_world().transport
    for dtype in (torch.float32, torch.float64):
        values = torch.arange(5, dtype=dtype) + RANK
        total = transport.wait(transport.start(values, "scaled", 1 / 3))
        expected = (torch.arange(5, dtype=dtype) * SIZE + sum(range(SIZE))) * (1 / 3)
        torch.testing.assert_close(torch.as_tensor(total), expected)


def test_gradients_that_arrive_in_another_order_on_every_rank():
    """Data-dependent graphs: Horovod negotiates, the others send in one order whatever comes first."""
    for level in ("none", "int8"):
        params = parameters()
        optimizer = plain(params, level)
        for step in range(3):
            grads, order = gradients(step, RANK), np.random.default_rng([step, RANK, 1]).permutation(len(params))
            optimizer.zero_grad()
            for i in order:
                backward(params[i : i + 1], grads[i : i + 1])
            optimizer.step()
            assert hvd.identical(params)
            if level == "none":
                for i, p in enumerate(params):
                    mean = np.mean([gradients(step, rank)[i].astype(np.float64) for rank in range(SIZE)], axis=0)
                    np.testing.assert_allclose(p.grad.numpy(), mean, rtol=1e-5, atol=1e-6)


OPTIMIZERS = [
    name
    for name in dir(torch.optim)
    if isinstance(kind := getattr(torch.optim, name), type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam")  # those with closures and sparse gradients have their own
]


@any_transport
@pytest.mark.parametrize("name", few("AdamW", once=sorted({*OPTIMIZERS} - {"AdamW"}), sizes=(1, 2)))
def test_every_optimizer_takes_the_steps_that_it_would_take_alone_with_everybodys_gradient(name):
    theirs, ours = model(), model()
    kind = getattr(torch.optim, name)

    def matrices(net):
        return [p for p in net.parameters() if p.dim() == 2 or name != "Muon"]

    bare = kind(matrices(theirs), lr=0.01)
    optimizer = hvd.DistributedOptimizer(kind(matrices(ours), lr=0.01), compression="none")
    assert isinstance(optimizer, kind)
    for step in range(5):
        bare.zero_grad()
        for rank in range(SIZE):
            x, y = batch(step, rank)
            (torch.nn.functional.cross_entropy(theirs(x), y) / SIZE).backward()
        bare.step()
        train(ours, optimizer, 1, first=step)
    assert hvd.identical(ours)
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        # Signs of gradients next to zero, and what is divided by their roots, hang on the order of the sum.
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-3)


@one_or_two
@any_transport
@pytest.mark.parametrize("level", ["none", "int8"])
def test_compiled_models(level):
    """Hooks fire once a gradient is complete, whoever computed it."""
    plainly, compiled = model(), model()
    train(plainly, wrapped(plainly, level), 6)
    train(torch.compile(compiled, backend="aot_eager"), wrapped(compiled, level), 6)
    assert hvd.identical(compiled)
    for a, b in zip(plainly.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 if level == "none" else 1e-2)


@one_or_two
@any_transport
def test_compiling_sees_nothing_of_us():
    """A hook on all modules would bring a warning, and break a graph that has to be whole."""
    net = model()
    optimizer = wrapped(net)
    whole = torch.compile(net, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step, size in enumerate((8, 8, 5, 3)):
            x, y = batch(step)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(whole(x[:size]), y[:size]).backward()
            optimizer.step()
    assert hvd.identical(net)


class NoArguments(torch.optim.SGD):
    """As scripts write them."""

    def zero_grad(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


@one_or_two
@any_transport
def test_optimizers_that_users_derive():
    net = model()
    optimizer = hvd.DistributedOptimizer(NoArguments(net.parameters(), lr=0.1), compression="int8")
    kind = type(optimizer)

    class Derived(kind):
        pass

    optimizer.__class__ = Derived
    train(net, optimizer, 2)
    assert hvd.identical(net)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(twin) is NoArguments


@any_transport
@two
def test_a_state_with_parameters_that_were_added_later_is_resumed():
    """In the order that a script has: wrap, add, load; and frozen ones may be unfrozen after that."""

    def begin():
        params = parameters()
        params[1].requires_grad_(False)
        optimizer = plain(params[:4], "lowrank:2")
        optimizer.add_param_group({"params": params[4:]})
        return params, optimizer

    def go_on(params, optimizer, first, last):
        params[1].requires_grad_(True)
        for step in range(first, last):
            optimizer.zero_grad()
            backward(params, gradients(step, RANK))
            optimizer.step()

    params, optimizer = begin()
    go_on(params, optimizer, 0, 6)
    state = copy.deepcopy(optimizer.state_dict())
    twins, another = begin()
    with torch.no_grad():
        for twin, p in zip(twins, params, strict=True):
            twin.copy_(p)
    another.load_state_dict(state)
    for each, its in ((params, optimizer), (twins, another)):
        go_on(each, its, 6, 10)
    assert hvd.identical(twins)
    assert all(torch.equal(twin, p) for twin, p in zip(twins, params, strict=True))


@any_transport
def test_tied_weights_are_exchanged_once():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.Tanh(), torch.nn.Linear(12, 12))
    net[2].weight = net[0].weight
    reference = copy.deepcopy(net)
    train(net, wrapped(net), 3)
    bare = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    for step in range(3):
        bare.zero_grad()
        for rank in range(SIZE):
            x, y = batch(step, rank)
            (torch.nn.functional.cross_entropy(reference(x), y) / SIZE).backward()
        bare.step()
    assert hvd.identical(net) and net[2].weight is net[0].weight
    for a, b in zip(reference.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@any_transport
@several
@pytest.mark.parametrize("level", ["none", "int8", "lowrank:2"])
def test_buckets_are_in_the_order_in_which_gradients_become_ready(level):
    """On rank 0, where they come last layer first, though the script names layers in the order of its own liking."""
    net = model()
    layers = [net[4], net[0], net[2]]
    optimizer = plain([p for layer in layers for p in (layer.weight, layer.bias)], level)
    for step in range(6):
        optimizer.zero_grad()
        x, y = batch(step)
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    buckets = optimizer._exchange.buckets
    assert len(buckets) > 1
    assert sorted(i for bucket in buckets for i in bucket.parameters) == list(range(6))
    depths = [{{0: 2, 1: 0, 2: 1}[i // 2] for i in bucket.parameters} for bucket in buckets]
    assert 2 in depths[0] and depths[-1] == {0}, "the last layer's gradients leave first"
    assert hvd.identical(net)
    assert len(set(hvd.allgather_object(str(buckets)))) == 1


@any_transport
def test_clipping_comes_after_the_exchange():
    params = parameters()
    optimizer = plain(params, "none")
    if SIZE > 1:
        backward(params, gradients(0, RANK))
        torch.nn.utils.clip_grad_norm_(params, 1e-3)  # too early: it would be overwritten without a word
        raises_everywhere(RuntimeError, "Call optimizer.synchronize\\(\\) first", optimizer.step)
    params = parameters()
    optimizer = plain(params, "none")
    backward(params, gradients(0, RANK))
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert np.sqrt(sum(float((p.detach() ** 2).sum()) for p in params)) == pytest.approx(1.0, rel=1e-4)


def test_attributes_that_scripts_read_of_horovods_optimizer():
    optimizer = plain(parameters(), "none", op=hvd.Sum, backward_passes_per_step=3, sparse_as_dense=True)
    assert (optimizer.op, optimizer.backward_passes_per_step, optimizer.sparse_as_dense) == (hvd.Sum, 3, True)
    assert optimizer.gradient_predivide_factor == 1.0
    assert optimizer.process_set == (hvd.global_process_set if HOROVOD else None)
    optimizer.set_backward_passes_per_step(2)
    assert optimizer.backward_passes_per_step == 2
    assert plain(parameters(), "none").op == hvd.Average


@one_or_two
@any_transport
def test_the_optimizer_is_still_itself():
    net = model()
    bare = torch.optim.Adam(net.parameters(), lr=0.01)
    train(net, bare, 2, rank=0)
    optimizer = hvd.DistributedOptimizer(bare, named_parameters=net.named_parameters(), compression="none")
    assert isinstance(optimizer, torch.optim.Adam)
    assert optimizer.state and optimizer.param_groups is bare.param_groups  # momenta are kept
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(net, optimizer, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(net, optimizer, 1)


@one_or_two
@any_transport
def test_the_users_randomness_is_untouched():
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    params = parameters()
    optimizer = plain(params, "lowrank:2")
    take_steps(optimizer, params, 3)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


def test_bad_input_is_a_clear_error_on_every_rank():
    def wrap(compression="none", params=None, **keywords):
        return plain(params or parameters(), compression, **keywords)

    raises_everywhere(ValueError, "Unknown compression. Received: 'zip'", lambda: wrap("zip"))
    raises_everywhere(ValueError, "Received: 0", lambda: wrap("lowrank:0"))
    raises_everywhere(ValueError, "whole number", lambda: wrap("lowrank:many"))
    raises_everywhere(ValueError, "takes no parameter", lambda: wrap("fp16:2"))
    raises_everywhere(ValueError, "Received: 17", lambda: wrap(17))
    narrow = [torch.nn.Parameter(torch.zeros(3).to(torch.float8_e5m2))]
    raises_everywhere(ValueError, "is float8_e5m2", lambda: wrap(params=narrow))
    apart = [torch.nn.Parameter(torch.zeros(3, device=device)) for device in ("cpu", "meta")]
    raises_everywhere(ValueError, "on one device. Received: cpu, meta", lambda: wrap(params=apart))
    optimizer = wrap()
    raises_everywhere(ValueError, "DistributedOptimizer already", lambda: hvd.DistributedOptimizer(optimizer))
    raises_everywhere(ValueError, "Received: Linear", lambda: hvd.DistributedOptimizer(torch.nn.Linear(1, 1)))
    raises_everywhere(ValueError, "at least 1. Received: 0", lambda: wrap(backward_passes_per_step=0))
    one = parameters([(2, 2), (2, 2)])
    raises_everywhere(
        ValueError, "duplicates: a", lambda: wrap(params=one, named_parameters=[("a", one[0]), ("a", one[1])])
    )
    raises_everywhere(ValueError, r"shapes: \(2, 2\)", lambda: wrap(params=one, named_parameters=[("a", one[0])]))
    if SIZE > 1:
        other = parameters([(3, 3) if RANK == SIZE - 1 else (2, 2)])
        raises_everywhere(ValueError, "model differs between ranks", lambda: wrap(params=other))
        raises_everywhere(ValueError, "oot", lambda: hvd.broadcast_object({}, root_rank=SIZE))


@one_or_two
@any_transport
def test_horovods_own_names_for_compression(monkeypatch):
    assert plain(parameters(), hvd.Compression.fp16).hvdplus.ladder.names == ("fp16",)
    assert plain(parameters(), hvd.Compression.none).hvdplus.ladder.names == ("none",)
    monkeypatch.setenv("HVDPLUS_COMPRESSION", "lowrank:2")  # turns the dial without touching the script
    assert plain(parameters(), hvd.Compression.none).hvdplus.ladder.names[-1] == "lowrank:2"
    assert plain(parameters(), "auto").hvdplus.ladder.names[-1] == "lowrank:2"
    assert plain(parameters(), "fp16").hvdplus.ladder.names == ("fp16",)


@any_transport
def test_settings_of_the_script_come_before_the_environment_and_the_file(monkeypatch, tmp_path):
    path = tmp_path / "hvdplus.yaml"
    path.write_text("ladder: [none, int8]\ndense_steps: 9\ndrain_steps: 4\n")
    monkeypatch.setenv("HVDPLUS_CONFIG", str(path))
    monkeypatch.setenv("HVDPLUS_DENSE_STEPS", "12")
    settings = {"dense_steps": 20, "bucket_bytes": 1 << 20}
    optimizer = plain(parameters(), "auto", settings=settings)
    used = optimizer._exchange.settings
    assert (used.dense_steps, used.drain_steps, len(optimizer._exchange.buckets)) == (20, 4, 1)
    assert optimizer.hvdplus.ladder.names == ("none", "int8")
    assert len(plain(parameters(), "auto")._exchange.buckets) > 1, "the environment's"
    assert plain(parameters(), "fp16", settings={"compression": "none"}).hvdplus.ladder.names == ("fp16",)
    assert plain(parameters(), settings={"compression": "none"}, compression="auto").hvdplus.ladder.names == ("none",)
    for wrong, match in (
        ({"dense_stepz": 20}, r"dense_stepz \(argument\) is not a setting; did you mean dense_steps\?"),
        ({"drain_steps": 0}, r"drain_steps \(argument\) wants a whole number of at least 1. Received: drain_steps=0"),
        ({"transport": "mpi4py"}, "comes too late"),
    ):
        raises_everywhere(ValueError, match, lambda wrong=wrong: plain(parameters(), "auto", settings=wrong))
    if SIZE > 1:
        other = {"drain_steps": 5 + (RANK == SIZE - 1)}
        raises_everywhere(
            ValueError, "differ in drain_steps: 5 against 6", lambda: plain(parameters(), "auto", settings=other)
        )


def test_zero_grad_in_flight_is_refused():
    params = parameters()
    optimizer = plain(params, "none")
    backward(params, gradients(0, RANK))
    if SIZE > 1:
        raises_everywhere(AssertionError, "race condition", optimizer.zero_grad)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in params)


@several
@pytest.mark.skipif(HOROVOD, reason="Horovod negotiates")
def test_optimizers_whose_gradients_come_in_another_order_elsewhere_are_an_error_on_every_rank():
    first, second = parameters(), parameters()
    optimizers = plain(first, "none"), plain(second, "none")
    for params, optimizer in zip((first, second), optimizers, strict=True):
        take_steps(optimizer, params, 2)
    for params in (second, first) if RANK == 0 else (first, second):
        backward(params, gradients(2, RANK))
    with pytest.raises(RuntimeError, match="several optimizers became ready in another order"):
        optimizers[0].step()
    with pytest.raises(RuntimeError, match="several optimizers became ready in another order"):
        optimizers[1].step()
    hvd.barrier()


def test_two_optimizers_in_one_program():
    first, second = model(1), model(2)
    one, two = wrapped(first, "lowrank:2"), wrapped(second, "fp16")
    for step in range(4):
        x, y = batch(step)
        one.zero_grad()
        two.zero_grad()
        (torch.nn.functional.cross_entropy(first(x), y) + torch.nn.functional.cross_entropy(second(x), y)).backward()
        two.step()
        one.step()
    assert hvd.identical(first) and hvd.identical(second)


@pytest.mark.skipif(not HOROVOD, reason="the rest of horovod.torch needs Horovod")
def test_everything_that_horovod_exports_is_here():
    import horovod.torch as stock

    from hvdplus.torch import elastic

    missing = [name for name in dir(stock) if not name.startswith("_") and not hasattr(hvd, name)]
    assert not missing
    assert hvd.elastic is elastic and all(hasattr(elastic, name) for name in stock.elastic.__all__)
    ours, theirs = (list(inspect.signature(module.DistributedOptimizer).parameters) for module in (hvd, stock))
    assert ours[: len(theirs)] == theirs
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = model()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), named_parameters=net.named_parameters(), op=hvd.Adasum
        )
        assert any("does not compress" in str(w.message) for w in caught)
    del optimizer


def test_arguments_are_checked_with_horovods_own_rules():
    import hvdplus.torch as front

    p = torch.nn.Parameter(torch.zeros(3))
    for groups, words in ((0, "non-negative"), ([[1]], "consist of torch.Tensor"), ([[p], [p]], "only appear once")):
        with pytest.raises(ValueError, match=words):
            plain([p], "none", groups=groups)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        plain([p], "none", num_groups=2)
    plain([p], "none", groups=[[p]])
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        plain([p], "none", op=hvd.Sum, gradient_predivide_factor=2.0)
    assert list(inspect.signature(front.broadcast_optimizer_state).parameters) == ["optimizer", "root_rank", "model"]


@pytest.mark.parametrize("factor", [1.0, 2.0, 0.5])
def test_dividing_beforehand_changes_no_mean(factor):
    params = parameters()
    optimizer = plain(params, "fp16", gradient_predivide_factor=factor)
    backward(params, gradients(0, RANK))
    optimizer.step()
    for i, p in enumerate(params):
        mean = np.mean([gradients(0, rank)[i].astype(np.float64) for rank in range(SIZE)], axis=0)
        np.testing.assert_allclose(-p.detach().numpy(), mean, rtol=1e-2, atol=1e-2)


@any_transport
@pytest.mark.parametrize("level", ["none", "int8"])
def test_zero_grad_drops_the_passes_that_were_made(level):
    """As at the end of an epoch whose batches are no multiple of them."""
    params = parameters()
    optimizer = plain(params, level, backward_passes_per_step=2)
    for _ in range(2):
        backward(params, gradients(7, RANK))
        optimizer.zero_grad()
        for _ in range(2):
            backward(params, [np.full(shape, 0.5) for shape in SHAPES])
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(p.detach(), torch.full(p.shape, -2.0)) for p in params)


@any_transport
@several
@pytest.mark.parametrize("level", ["none", "lowrank:2"])
def test_the_number_of_passes_may_change_between_steps(level):
    params = parameters()
    optimizer = plain(params, level, backward_passes_per_step=2)
    total = [np.zeros(p.shape) for p in params]
    step = 0
    for passes in (2, 2, 1, 3, 3):
        optimizer.set_backward_passes_per_step(passes)
        for _ in range(passes):
            backward(params, gradients(step, RANK))
            total = [sum_ + grad for sum_, grad in zip(total, gradients(step, RANK), strict=True)]
            step += 1
        optimizer.step()
        optimizer.zero_grad()
    everybodys = hvd.allgather_object(total)
    assert hvd.identical(params)
    left = held_back(optimizer, params)
    for i, p in enumerate(params):
        whole = sum(theirs[i] for theirs in everybodys)
        np.testing.assert_allclose(-p.detach().double().numpy() * SIZE + left[i], whole, atol=1e-2 * SIZE)


@two
@pytest.mark.skipif(not HOROVOD, reason="Horovod's own optimizer")
def test_adasum_trains():
    if not hvd.mpi_enabled():
        pytest.skip("Horovod has Adasum over MPI only")
    net = model()
    with pytest.warns(UserWarning, match="does not compress"):
        optimizer = wrapped(net, hvd.Compression.fp16, op=hvd.Adasum)
    assert optimizer._compression is hvd.Compression.fp16
    with pytest.raises(ValueError, match="op is one of .* Received: 'mean'"):
        wrapped(net, op="mean")
    before = copy.deepcopy(net)
    train(net, optimizer, 3)
    assert hvd.identical(net) and not equal(net, before)


class _Groups:
    """Groups of ranks: Horovod's process sets, or torch.distributed's process groups."""

    def __init__(self, *groups):
        self.groups = [
            hvd.add_process_set(ranks) if HOROVOD else torch.distributed.new_group(ranks) for ranks in groups
        ]
        (mine,) = (place for place, ranks in enumerate(groups) if RANK in ranks)
        self.argument = {"process_set" if HOROVOD else "process_group": self.groups[mine]}

    def __enter__(self):
        return self.argument

    def __exit__(self, *failure):
        hvd.barrier()
        for group in self.groups if HOROVOD else ():
            hvd.remove_process_set(group)


grouped = pytest.mark.skipif(
    not (HOROVOD or hvd._require_world().transport.name.startswith("torch-")), reason="mpi4py knows no groups here"
)


@two
@grouped
def test_a_rank_in_a_group_of_its_own_trains_alone():
    net = model()
    with _Groups(*([rank] for rank in range(SIZE))) as mine:
        train(net, wrapped(net, "auto", **mine), 3)
        assert not hvd.identical(net)
    bare = model()
    train(bare, torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3), 3)
    assert equal(net, bare)


@two
@grouped
def test_an_optimizer_of_a_group_does_not_follow_ranks_that_come_or_go():
    """It would average what belongs to other groups."""
    with _Groups(*([rank] for rank in range(SIZE))) as mine:
        optimizer = wrapped(model(), "auto", **mine)
        with pytest.raises(ValueError, match=f"cannot follow them.* Received: one of ranks {RANK}$"):
            optimizer._rejoin(hvd._require_world())


@pytest.mark.ranks(4)
@grouped
@pytest.mark.parametrize("level", ["none", "fp16"])
def test_copies_of_a_model_that_is_split_exchange_among_themselves(level):
    """Two halves x two copies: ranks 0 and 1 hold the first copy, 2 and 3 the second. Gradients are one process's."""
    half, copy_ = RANK % 2, RANK // 2
    torch.manual_seed(0)
    halves = [torch.nn.Linear(40, 30), torch.nn.Linear(30, 5)]
    whole = copy.deepcopy(halves)

    def of_my_copy(values):
        return hvd.allgather_object(values, name="copies")[2 * copy_ : 2 * copy_ + 2]

    with _Groups([0, 2], [1, 3]) as mine:
        optimizer = torch.optim.SGD(halves[half].parameters(), lr=0.5)
        optimizer = hvd.DistributedOptimizer(optimizer, halves[half].named_parameters(), level, **mine)
        reference = torch.optim.SGD([*whole[0].parameters(), *whole[1].parameters()], lr=0.5)
        for step in range(3):
            batches = [
                torch.from_numpy(np.random.default_rng(10 * step + c).standard_normal((6, 40))).float() for c in (0, 1)
            ]
            reference.zero_grad()
            (sum(whole[1](torch.tanh(whole[0](x))).pow(2).mean() for x in batches) / 2).backward()
            optimizer.zero_grad()
            hidden = torch.tanh(halves[0](batches[copy_]))
            if half == 0:  # sends activations, and gets their gradient
                of_my_copy(hidden.detach().numpy())
                hidden.backward(torch.from_numpy(of_my_copy(None)[1]))
            else:
                hidden = torch.from_numpy(of_my_copy(None)[0]).requires_grad_()
                halves[1](hidden).pow(2).mean().backward()
                of_my_copy(hidden.grad.numpy())
            optimizer.step()
            reference.step()
        tolerance = 1e-6 if level == "none" else 2e-3
        for own, expected in zip(halves[half].parameters(), whole[half].parameters(), strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=tolerance)
        assert optimizer.hvdplus.ranks == 2


@pytest.mark.ranks(4)
@pytest.mark.skipif(not HOROVOD, reason="about process sets")
def test_a_rank_outside_of_a_process_set_is_told_so():
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [2, 3])]
    with pytest.raises(ValueError, match=f"This rank, {RANK}, is not in the process set"):
        wrapped(model(), "none", process_set=sets[RANK < 2])
    with pytest.raises(ValueError, match="The process set was not added"):
        wrapped(model(), "none", process_set=hvd.ProcessSet([0, 3]))
    hvd.barrier()
    for one in sets:
        hvd.remove_process_set(one)


@pytest.mark.ranks(4)
@pytest.mark.skipif(not HOROVOD, reason="about process sets")
def test_process_sets_whose_ranks_exchange_more_and_less():
    """Horovod numbers what has no name by the calls of each process, so here a sum over all ranks needs a name."""
    with _Groups([0, 1, 2], [3]) as mine:
        net = model()
        train(net, wrapped(net, "fp16", **mine), 1 + RANK // 3)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="with a name").item() == SIZE
        handle = hvd.allreduce_async(torch.ones(1), name="another")
        hvd.synchronize(handle)
        counts = hvd.allgather_object(handle)
        for _ in range(max(counts) - counts[RANK]):  # as many calls everywhere, for what comes after this test
            hvd.allreduce(torch.ones(1), process_set=mine["process_set"], name=f"of {RANK // 3}")


@pytest.mark.skipif(HOROVOD, reason="about a job without Horovod")
@pytest.mark.skipif(SIZE == 1, reason="one rank has nothing to add up")
def test_reductions_without_horovod():
    assert torch.equal(
        hvd.allreduce(torch.ones(3, dtype=torch.bfloat16), op=hvd.Sum), torch.full((3,), SIZE).bfloat16()
    )
    assert torch.equal(hvd.allgather(torch.ones(1, dtype=torch.bfloat16)), torch.ones(SIZE).bfloat16())
    assert hvd.allgather(torch.arange(RANK + 1)).tolist() == [i for rank in range(SIZE) for i in range(rank + 1)]
    y = torch.full((2,), float(RANK), requires_grad=True)
    hvd.allreduce(y).pow(2).sum().backward()
    assert torch.equal(y.grad, torch.full((2,), float(SIZE - 1)))
    handle = hvd.allreduce_async(torch.ones(2))
    assert hvd.poll(handle) and torch.equal(hvd.synchronize(handle), torch.ones(2))
    with pytest.raises(RuntimeError, match="prescale_factor.*needs Horovod"):
        hvd.allreduce(torch.ones(2), prescale_factor=0.5)
    with pytest.raises(RuntimeError, match="process_set.*needs Horovod"):
        hvd.barrier(process_set=1)


@pytest.mark.skipif(HOROVOD, reason="about a job without Horovod")
def test_what_needs_horovod_says_so():
    if SIZE > 1:
        with pytest.raises(RuntimeError, match="hvdplus install-horovod"):
            hvd.alltoall(torch.zeros(SIZE))
    assert not hasattr(hvd, "alltoall")


@two
@pytest.mark.skipif(
    hvd._require_world().transport.name.startswith("torch-"),
    reason="this transport reads values of its own, on the host",
)
@pytest.mark.parametrize(
    ("level", "most"),
    [("none", 0), ("fp16", 1), ("int8", 2), ("lowrank:4+fp16", 2), ("topk:0.1:32", 2), ("topk:0.1:32+int8", 2)],
)
def test_how_often_a_device_would_be_waited_for(level, most, monkeypatch):
    """Values that the host reads in a step, with what a device computes by: the same for any number of buckets."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from hvdplus.adapters.torch.ops import DeviceOps

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            name = function.overloadpacket.__name__
            self.count += name in ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select")
            return function(*arguments, **(keywords or {}))

    reads = Reads()

    def counted(tensor, read=torch.Tensor.tolist):  # which the mode does not see
        reads.count += 1
        return read(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    monkeypatch.setattr("hvdplus.adapters.torch.backend.make_ops", DeviceOps)
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(6)))
    optimizer = wrapped(net, level, settings={"bucket_bytes": 8000, "weights_check_steps": 0})
    optimizer._exchange.backend.on_host = False
    counts = []
    for step in range(6):
        optimizer.zero_grad()
        measures = optimizer.hvdplus.plan.measurement
        loss = net(torch.ones(2, 40) * (step + 1)).square().mean()
        reads.count = 0
        with reads:
            loss.backward()
            optimizer.synchronize()
        counts.append((bool(measures), reads.count))
        with optimizer.skip_synchronize():
            optimizer.step()
    assert len(optimizer._exchange.now.states) > 3 and hvd.identical(net)
    assert max(count for measures, count in counts[2:] if not measures) <= most, counts


def test_collectives(monkeypatch):
    assert torch.equal(
        hvd.allreduce(torch.full((3,), float(RANK)), op=hvd.Sum), torch.full((3,), SIZE * (SIZE - 1) / 2)
    )
    assert torch.equal(hvd.allreduce(torch.full((3,), float(RANK))), torch.full((3,), (SIZE - 1) / 2))
    assert hvd.allgather(torch.full((1, 2), RANK)).shape == (SIZE, 2)
    assert hvd.broadcast_object({"rank": RANK}, root_rank=SIZE - 1) == {"rank": SIZE - 1}
    assert torch.equal(hvd.broadcast(torch.full((2,), float(RANK)), root_rank=SIZE - 1), torch.full((2,), SIZE - 1.0))
    assert hvd.allgather_object(RANK) == list(range(SIZE))
    net = model(seed=RANK)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1 * (RANK + 1), momentum=0.9)
    train(net, optimizer, 1)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    monkeypatch.setattr("hvdplus.transport.PART_BYTES", 1000)  # of which it takes several
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=net)
    assert hvd.identical(net)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert hvd.identical(state["momentum_buffer"] for state in optimizer.state.values())


@one_or_two
@any_transport
def test_run_log_tells_where_the_time_went(tmp_path, monkeypatch):
    from hvdplus.log.runlog import read

    path = tmp_path / "run.jsonl"
    monkeypatch.setenv("HVDPLUS_RUN_LOG", str(path))
    monkeypatch.setattr("hvdplus.agree._instances", 0)
    net = model()
    optimizer = wrapped(net, "auto")
    for step in range(45):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.record(loss=loss)
        optimizer.step()
    summary = hvd.report(optimizer)
    assert summary["ranks"] == SIZE and summary["step_ms"] > 0
    if RANK == 0:
        records = read(path)
        windows = [record for record in records if record["kind"] == "window"]
        assert sum(window["steps"] for window in windows) >= 40
        for window in windows:
            parts = sum(window[key] for key in ("compute_ms", "codec_ms", "exposed_comm_ms", "input_wait_ms"))
            assert parts == pytest.approx(window["step_ms"], rel=0.5)
            assert window["loss"] > 0
        assert any(record["kind"] == "decision" for record in records)
        assert records[-1]["kind"] == "end"


@any_transport
def test_a_script_that_validates_before_a_step_waits_for_input():
    """So that no level is blamed for it; nor is any if a rank validates alone."""
    # Nobody watches for input where PyTorch compiles, as this process did for other tests.
    torch._dynamo.utils.counters.clear()
    net = model()
    optimizer = wrapped(net, "fp16")
    for step in range(6):
        if step == 4 and RANK == 0:
            with torch.no_grad():
                for _ in range(3):
                    net(batch(step)[0])
                    time.sleep(0.1)
        x, y = batch(step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        times = optimizer._exchange.meter.last
        if step == 4:
            assert times.step > 0.3 and times.compute < 0.1
            assert (times.input_wait if RANK == 0 else times.exposed_comm) > 0.25
    assert times.step < 0.2


@any_transport
@pytest.mark.parametrize("how", ["transforms", "another process"])
def test_modules_that_make_the_input_do_not_end_the_wait_for_it(how, monkeypatch):
    """A loader's transforms may be modules, and its workers inherit hooks."""
    torch._dynamo.utils.counters.clear()
    net, transform = model(), torch.nn.Tanh()
    optimizer = wrapped(net, "fp16")
    for step in range(3):
        if how == "transforms":
            transform(torch.ones(3))
        else:
            with monkeypatch.context() as worker:
                worker.setattr("hvdplus.adapters.torch.waiting.os.getpid", lambda: -1)
                net(batch(step)[0])
        time.sleep(0.2)
        train(net, optimizer, 1, first=step)
    assert optimizer._exchange.meter.last.input_wait > 0.15


@any_transport
def test_input_is_waited_for_after_a_step_that_a_scaler_skips():
    torch._dynamo.utils.counters.clear()
    net = model()
    optimizer, scaler = wrapped(net, "fp16"), torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        time.sleep(0.2)
        x, y = batch(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x * (math.inf if step == 1 else 1.0)), y)
        scaler.scale(loss).backward()
        step_as_horovod(optimizer, scaler)
    assert scaler.get_scale() == 4.0 and optimizer._exchange.meter.last.input_wait > 0.15


@any_transport
def test_windows_are_told_as_they_are_written():
    net = model()
    optimizer = wrapped(net, "lowrank:2", settings={"window_steps": 4})
    seen = []
    optimizer.hvdplus.on_window(seen.append)
    train(net, optimizer, 14)
    assert [window["steps"] for window in seen[:2]] == [4, 4] and all(window["step_ms"] > 0 for window in seen)
    for window in seen:
        ranks = window["compute_ms_by_rank"]
        assert len(ranks) == SIZE and ranks[window["slowest_rank"]] == max(ranks)
        assert min(ranks) <= window["middle_compute_ms"] <= window["slowest_compute_ms"]
    told = hvd.allgather_object([window["compute_ms_by_rank"] for window in seen])
    assert all(theirs == told[0] for theirs in told)


@any_transport
@pytest.mark.skipif(SIZE == 1, reason="one rank exchanges nothing")
def test_the_profiler_names_what_the_exchange_does():
    net = model()
    optimizer = wrapped(net, "lowrank:2")
    train(net, optimizer, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train(net, optimizer, 1, first=1)
    counts = {event.key: event.count for event in profiler.key_averages()}
    buckets = counts["hvdplus.encode"]
    assert buckets >= 1 and counts["hvdplus.wait"] == counts["hvdplus.decode"] == buckets


def test_the_launch_is_the_one_that_was_meant():
    world = hvd._require_world()
    assert world.transport.name == os.environ["EXPECTED_TRANSPORT"]
    assert int(os.environ["EXPECTED_RANKS"]) == SIZE


@several
@pytest.mark.parametrize("level", ["fp16", "int8"])
def test_a_gradient_too_large_for_the_payload_does_not_stay_for_ever(level):
    params = parameters()
    optimizer = plain(params, level)
    for step, size in enumerate([1.0, 3e38, 1.0, 1.0]):
        optimizer.zero_grad()
        backward(params, [np.full(shape, size) for shape in SHAPES])
        optimizer.synchronize()
        assert all(torch.isfinite(p.grad).all() for p in params) == (size == 1.0), step


@any_transport
@several
def test_grad_scaler_in_horovods_sequence():
    net = model()
    optimizer = wrapped(net, "fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(6):
        x, y = batch(step)
        if step == 3 and RANK == SIZE - 1:
            x = x * float("inf")  # one rank overflows: all skip together, and all halve their scale
        before = [p.detach().clone() for p in net.parameters()]
        optimizer.zero_grad()
        scaler.scale(torch.nn.functional.cross_entropy(net(x), y)).backward()
        step_as_horovod(optimizer, scaler, lambda: torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0))
        moved = not all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
        assert moved == (step != 3)
        assert hvd.identical(net)
    assert scaler.get_scale() == 4.0


@any_transport
@several
def test_loss_scaling_leaves_out_levels_with_residuals():
    """Trap: a changed loss scale must not rescale history."""
    net = model()
    optimizer = wrapped(net, "auto")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(60):
        x, y = batch(step)
        optimizer.zero_grad()
        scaler.scale(torch.nn.functional.cross_entropy(net(x), y)).backward()
        step_as_horovod(optimizer, scaler)
        assert optimizer.hvdplus.ladder.names[optimizer.hvdplus.plan.level] != "lowrank:4"
    assert hvd.identical(net)
    params = parameters()
    optimizer = plain(params, "lowrank:2")
    backward(params, gradients(0, RANK))
    optimizer.synchronize()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        raises_everywhere(ValueError, "loss scaling would mix the units", lambda: scaler.step(optimizer))


@any_transport
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("level", ["fp16", "int8", "lowrank:2+fp16"])
def test_loss_scaling_that_is_known_changes_nothing(level):
    """Trap: a changed loss scale must not rescale history. Powers of two are exact, but where float16 ends."""
    once, again = parameters(), parameters()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    optimizer = plain(once, level)
    other = plain(again, level, grad_scaler=scaler)
    scales = []
    for step in range(9):
        grads = gradients(step, RANK)
        optimizer.zero_grad()
        backward(once, grads)
        optimizer.step()
        for attempt in ("overflows on one rank", "is taken") if step == 5 else ("is taken",):
            other.zero_grad()
            scales.append(scaler.get_scale())
            bad = attempt != "is taken" and RANK == SIZE - 1
            backward(again, [g * scaler.get_scale() * (np.inf if bad else 1.0) for g in grads])
            scaler.scale(torch.zeros(()))
            other.synchronize()
            scaler.unscale_(other)
            with other.skip_synchronize():
                scaler.step(other)
            scaler.update()
    steps = list(itertools.pairwise(scales))
    assert any(a < b for a, b in steps) and any(a > b for a, b in steps), "it grew, and fell once"
    exact = "fp16" not in level
    for a, b in zip(once, again, strict=True):
        # Sums of float16 round in the order of the ring, which fusion changes; mixed units would be off by a gradient.
        torch.testing.assert_close(a, b, rtol=0 if exact else 1e-3, atol=1e-5 if exact else 5e-2)
    assert hvd.identical(again)


@any_transport
@two
def test_loss_scaling_that_begins_late_joins_no_residual(monkeypatch):
    """The plan of the coming step is made before the scaler speaks for the first time."""
    monkeypatch.setenv("HVDPLUS_LADDER", "none,int8")
    params = parameters()
    optimizer = plain(params, "auto")
    optimizer.hvdplus.set_level(1)
    for step in range(4):
        optimizer.zero_grad()
        backward(params, gradients(step, RANK))
        optimizer.step()
    assert optimizer.hvdplus.plan.level == 1
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4, 7):
        optimizer.zero_grad()
        backward(params, gradients(step, RANK))
        optimizer.synchronize()
        scaler.scale(torch.zeros(()))
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        assert optimizer._exchange.plan.level == 0
    kinds = [record["kind"] for record in optimizer.hvdplus.log.records]  # kept where a report is made
    assert kinds.count("forbid") == (RANK == 0)


@any_transport
@several
def test_a_step_that_was_skipped_in_the_scripts_own_way_is_followed_by_an_exchange():
    """``synchronize``, no step, gradients cleared by the model: what comes then has not been exchanged."""
    net, other = model(), model()
    optimizer, same = wrapped(net, "none"), wrapped(other, "none")
    x, y = batch(0)
    torch.nn.functional.cross_entropy(net(x), y).backward()
    optimizer.synchronize()
    net.zero_grad()
    for who, how in ((net, optimizer), (other, same)):
        x, y = batch(1)
        torch.nn.functional.cross_entropy(who(x), y).backward()
        how.step()
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        if SIZE <= 2:  # beyond, the order of a ring's sum depends on what Horovod makes as one
            assert torch.equal(a, b)
        torch.testing.assert_close(a, b)
    assert hvd.identical(net)


@pytest.mark.ranks(1)
def test_grad_scaler_on_one_rank_is_the_bare_one():
    def scaled(optimizer, net):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            x, y = batch(step)
            optimizer.zero_grad()
            scaler.scale(torch.nn.functional.cross_entropy(net(x * (float("inf") if step == 2 else 1)), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        return net

    bare, ours = model(), model()
    scaled(torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3), bare)
    assert equal(bare, scaled(wrapped(ours), ours))


@any_transport
@several
def test_grad_scaler_that_unscales_too_early_is_refused():
    net = model()
    optimizer = wrapped(net, "fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x, y = batch(0)
    scaler.scale(torch.nn.functional.cross_entropy(net(x), y)).backward()
    raises_everywhere(RuntimeError, "Call optimizer.synchronize\\(\\) first", lambda: scaler.step(optimizer))


@any_transport
@several
@pytest.mark.parametrize(
    ("variable", "values"),
    [("COMPRESSION", ("int8", "lowrank:2")), ("BUCKET_BYTES", ("6000", "9000")), ("DRAIN_STEPS", ("2", "3"))],
)
def test_settings_that_differ_between_ranks_are_an_error_on_every_rank(monkeypatch, variable, values):
    """mpirun passes no variables on to other hosts unless asked to."""
    monkeypatch.setenv(f"HVDPLUS_{variable}", values[RANK == SIZE - 1])
    raises_everywhere(ValueError, f"Ranks 0 and {SIZE - 1} differ in", lambda: plain(parameters(), "auto"))


@any_transport
@several
def test_arguments_that_differ_between_ranks_are_an_error_on_every_rank():
    level = "int8" if RANK else "fp16"
    raises_everywhere(ValueError, "Ranks 0 and 1 differ in levels", lambda: plain(parameters(), level))


@any_transport
@several
@pytest.mark.parametrize("level", ["none", "topk:0.2:32"])
def test_synchronizing_twice_exchanges_once(level):
    params = parameters()
    optimizer = plain(params, level)
    reference = Reference(level, optimizer._exchange.buckets, SIZE)
    for step in range(4):
        before = [p.detach().clone() for p in params]
        optimizer.zero_grad()
        backward(params, gradients(step, RANK))
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="called twice"):
            optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        expected = reference.step([gradients(step, rank) for rank in range(SIZE)])
        for p, old, mean in zip(params, before, expected, strict=True):
            np.testing.assert_allclose((old - p.detach()).numpy(), mean, rtol=0, atol=1e-4)


@any_transport
@two
@pytest.mark.parametrize("level", ["lowrank:2", "lowrank:2+fp16", "topk:0.2:32", "int8"])
def test_steps_inside_autocast_and_under_another_default_type(level):
    """Bases, scales and rows are float32 whatever the script computes in."""
    once, again = parameters(), parameters()
    optimizers = plain(once, level), plain(again, level)
    for step in range(5):
        for params, optimizer in zip((once, again), optimizers, strict=True):
            optimizer.zero_grad()
            if params is once:
                backward(params, gradients(step, RANK))
                optimizer.step()
                continue
            torch.set_default_dtype(torch.float64 if step % 2 else torch.bfloat16)
            try:
                with torch.autocast("cpu"):
                    backward(params, gradients(step, RANK))
                    optimizer.step()
            finally:
                torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@any_transport
@one_or_two
@pytest.mark.parametrize("level", ["int8", "lowrank:2", "topk:0.2:32+int8"])
def test_mixed_precision_with_loss_scaling_and_a_residual(level):
    """Forward in float16, losses scaled, one overflow: ranks skip together, learn, and hold back what is finite."""
    net = model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    optimizer = wrapped(net, level, grad_scaler=scaler)
    losses = []
    for step in range(24):
        x, y = batch(step % 4)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = torch.nn.functional.cross_entropy(net(x * (1e30 if step == 9 and RANK == 0 else 1)).float(), y)
        losses.append(loss.item())
        before = copy.deepcopy(net)
        scaler.scale(loss).backward()
        step_as_horovod(optimizer, scaler)
        assert equal(net, before) == (step == 9)
        assert hvd.identical(net)
    assert np.mean(losses[-4:]) < 0.9 * np.mean(losses[:4])
    residuals = [state.residual for state in optimizer._exchange.states if state.residual is not None]
    assert residuals and all(torch.isfinite(residual).all() for residual in residuals)
    assert max(residual.abs().max() for residual in residuals) < 10, "in units of the loss, not of the scaled one"


def listen(optimizer):
    """[(plan, metadata)] of the steps that the coordinator observes from now on."""
    coordinator, heard = optimizer.hvdplus, []
    observe = coordinator.observe

    def observed(plan, metadata, *healthy):
        heard.append((plan, metadata))
        observe(plan, metadata, *healthy)

    coordinator.observe = observed
    return heard


def norm(arrays):
    return np.sqrt(sum(np.square(np.asarray(array, np.float64)).sum() for array in arrays))


@any_transport
@several
@pytest.mark.parametrize("level", few("int8", "lowrank:2", once=["none", "fp16", "topk:0.2:32"]))
def test_ranks_say_how_large_their_gradients_and_residuals_are(level):
    table, params = torch.nn.Embedding(400, 6, sparse=True), parameters()
    optimizer = plain([*params, *table.parameters()], level)
    optimizer.hvdplus._measures_norms = True  # as `auto` does at every level
    heard, known = listen(optimizer), []
    for step in range(44):
        rate = 0.1 * (step + 1)
        optimizer.param_groups[0]["lr"] = torch.tensor(rate) if step % 2 else rate
        grads, rows = gradients(step, RANK), np.array([step, 3, 3, RANK])
        optimizer.zero_grad()
        backward(params, grads)
        table(torch.from_numpy(rows)).sum().backward()
        optimizer.step()
        left = [state.residual for state in optimizer._exchange.states if state.residual is not None]
        known.append((norm([*grads, np.repeat(np.bincount(rows), 6)]), norm(left), rate))
    everyone = hvd.allgather_object(known)
    assert sum(plan.measurement > 0 for plan, _ in heard) >= 2 and len(heard) >= 41
    for step, (plan, metadata) in enumerate(heard):
        gradient_norms, residual_norms, rates = np.array([rank[step] for rank in everyone]).T
        assert metadata.learning_rate == pytest.approx(rates[0])
        for found, norms in ((metadata.gradient_norm, gradient_norms), (metadata.residual_norm, residual_norms)):
            expected = np.sqrt(np.square(norms).mean()) if plan.measurement else 0.0
            assert found == pytest.approx(expected, rel=1e-4)
    lossy = any(metadata.residual_norm for _, metadata in heard)
    assert lossy == optimizer.hvdplus.ladder.compressors[-1].keeps_residual


@any_transport
@several
def test_what_codecs_take_is_known_beforehand_and_the_same_everywhere():
    state = torch.get_rng_state()
    automatic, fixed = plain(parameters(), "auto").hvdplus, plain(parameters(), "lowrank:4").hvdplus
    assert automatic.costs[0].codec == 0 and all(0 < cost.codec < 1 for cost in automatic.costs[1:])
    assert all(cost.codec == 0 for cost in fixed.costs), "nobody asks"
    assert len({str(costs) for costs in hvd.allgather_object(automatic.costs)}) == 1
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.skipif(not HOROVOD, reason="over mpi4py the first rank that raises ends the job")
@several
def test_parameters_that_join_on_one_rank_only_are_an_error_on_every_rank():
    """The last test: after it ranks have begun unequal numbers of sums, from which Horovod makes names."""
    for late in (0, SIZE - 1):
        net = model()
        net[0].weight.requires_grad_(False)
        optimizer = wrapped(net)
        train(net, optimizer, 2)
        if late == RANK:
            net[0].weight.requires_grad_(True)
        with pytest.raises(RuntimeError, match="on all ranks at the same step"):
            train(net, optimizer, 2, first=2)
        hvd.barrier()
