"""hvdplus as the communication hook of DistributedDataParallel: the same bodies on every rank."""

import contextlib
import copy
import gc
import os
import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from picking import few
from reference import Reference, at_any_price, check_preview
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import hvdplus.torch as hvd
from hvdplus.torch.ddp import attach

if not dist.is_initialized():
    dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
WIDTH = 40
torch.set_num_threads(1)


def net(seed=0, depth=3):
    """Layers of 40 x 40 with biases."""
    torch.manual_seed(seed)
    layers = [part for _ in range(depth) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 5))


def batch(step, rank=RANK, count=8):
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(count, WIDTH, generator=draw), torch.randint(0, 5, (count,), generator=draw)


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def train(model, optimizer, steps, first=0, loss=cross_entropy):
    losses = []
    for step in range(first, first + steps):
        x, y = batch(step)
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def identical(model):
    mine = [p.detach().clone() for p in model.parameters()]
    everyone = [None] * SIZE
    dist.all_gather_object(everyone, mine)
    return all(torch.equal(a, b) for theirs in everyone for a, b in zip(theirs, everyone[0], strict=True))


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def wrapped(seed=0, **options):
    """A model in DDP, and its optimizer. Small buckets, so that there are several."""
    model = DistributedDataParallel(net(seed), **{"bucket_cap_mb": 0.01, **options})
    return model, sgd(model)


@pytest.mark.parametrize(
    "options", few({}, once=[{"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 25}])
)
@pytest.mark.parametrize("level", ["none", "auto"])
def test_dense_steps_are_those_of_plain_ddp(options, level):
    plain, plain_sgd = wrapped(**options)
    train(plain, plain_sgd, 6)
    model, optimizer = wrapped(**options)
    # A ladder of one level: auto without a choice.
    attach(model, optimizer, level, settings={"ladder": ["none"]})
    train(model, optimizer, 6)
    torch.testing.assert_close(weights(model), weights(plain), rtol=0, atol=1e-6)
    assert identical(model)


@pytest.mark.parametrize(
    "level",
    few(
        "int8", "lowrank:2", once=["fp16", "topk:0.2", "lowrank:4+fp16", "powersgd:2", "topk2:0.2", "randomk:0.3+int8"]
    ),
)
def test_every_level_sends_what_the_reference_sends(level):
    model, _ = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    exchange = attach(model, optimizer, level)._exchange
    reference = None
    for step in range(5):
        before = [p.detach().clone() for p in model.parameters()]
        grads = []
        for rank in range(SIZE):  # all ranks' gradients, computed here
            twin = copy.deepcopy(model.module)
            x, y = batch(step, rank)
            cross_entropy(twin(x), y).backward()
            grads.append([p.grad.numpy() for p in twin.parameters()])
        train(model, optimizer, 1, first=step)
        reference = reference or Reference(level, exchange.buckets, SIZE)  # whose order the first step has shown
        expected = reference.step(grads)
        for p, old, mean in zip(model.parameters(), before, expected, strict=True):
            np.testing.assert_allclose((old - p.detach()).numpy(), mean, rtol=1e-3, atol=1e-4)
    assert identical(model)


@pytest.mark.parametrize("level", ["lowrank:2+fp16", "topk:0.1", "int4", "auto"])
@pytest.mark.parametrize("options", few({}, once=[{"gradient_as_bucket_view": True}, {"static_graph": True}]))
def test_lossy_levels_learn_and_keep_ranks_identical(level, options):
    model, optimizer = wrapped(**options)
    attach(model, optimizer, level)
    draw = torch.Generator().manual_seed(RANK)
    x = torch.randn(64, WIDTH, generator=draw)
    y = x[:, :5].argmax(1)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of means: they are there when backward returns
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 4, losses
    assert identical(model)


def test_means_are_there_when_backward_returns():
    model, optimizer = wrapped()
    attach(model, optimizer, "none")
    x, y = batch(0)
    cross_entropy(model(x), y).backward()
    mine = torch.cat([p.grad.flatten() for p in model.parameters()])
    everyone = [None] * SIZE
    dist.all_gather_object(everyone, mine)
    assert all(torch.equal(theirs, mine) for theirs in everyone)


def test_accumulation_under_no_sync_is_one_exchange_of_the_sum():
    plain, plain_sgd = wrapped()
    model, optimizer = wrapped()
    attached = attach(model, optimizer, "none")
    for each, its_optimizer in ((plain, plain_sgd), (model, optimizer)):
        for step in range(4):
            its_optimizer.zero_grad()
            for part in range(3):
                x, y = batch(3 * step + part)
                with each.no_sync() if part < 2 else contextlib.nullcontext():
                    cross_entropy(each(x), y).backward()
            its_optimizer.step()
    torch.testing.assert_close(weights(model), weights(plain), rtol=0, atol=1e-6)
    assert attached.hvdplus.steps + attached.hvdplus.unread_steps == 4


class Forked(nn.Module):
    """One of two branches, by turns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two, self.turn = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 5), 0

    def forward(self, x):
        self.turn += 1
        return (self.one if self.turn % 2 else self.two)(x)


@pytest.mark.parametrize("level", ["none", "lowrank:2"])
def test_unused_parameters_are_left_alone(level):
    model = DistributedDataParallel(Forked(), find_unused_parameters=True)
    optimizer = sgd(model, lr=0.01)
    attach(model, optimizer, level)
    train(model, optimizer, 6)
    assert identical(model)
    x, y = batch(9)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    assert model.module.two.weight.grad is None, "nobody used it"


def test_sparse_gradients_come_back_sparse():
    torch.manual_seed(0)
    table = nn.Sequential(nn.EmbeddingBag(50, WIDTH, sparse=True), nn.Linear(WIDTH, 5))
    model = DistributedDataParallel(table)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    attach(model, optimizer, "lowrank:2")
    start = weights(model)
    for step in range(4):
        draw = torch.Generator().manual_seed(10 * step + RANK)
        words = torch.randint(0, 20, (6, 3), generator=draw)
        optimizer.zero_grad()
        cross_entropy(model(words), torch.randint(0, 5, (6,), generator=draw)).backward()
        assert model.module[0].weight.grad.is_sparse
        optimizer.step()
    assert identical(model) and not torch.equal(start, weights(model))
    assert torch.equal(start[50 * WIDTH // 2 : 50 * WIDTH], weights(model)[50 * WIDTH // 2 : 50 * WIDTH]), "unused rows"


@pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to send to")
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_levels_that_have_not_run_are_tried_on_the_means(options, monkeypatch):
    """In plain dense steps, too, whose buckets are the reducer's."""
    at_any_price(monkeypatch)
    model, optimizer = wrapped(**options)
    ladder, means = ["none", "int8", "powersgd:2", "lowrank:2"], []
    attached = attach(model, optimizer, "auto", settings={"ladder": ladder, "dense_steps": 10**6})
    for step in range(8):
        train(model, optimizer, 1, first=step)
        means.append([p.grad.numpy().copy() for p in model.parameters()])
    assert identical(model)
    if RANK == 0:
        shapes = [tuple(p.shape) for p in model.parameters()]
        check_preview(attached.hvdplus.log.records, ladder, shapes, means, ranks=SIZE)


@pytest.mark.skipif(SIZE == 1, reason="one rank has nobody to send to")
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_at_a_level_that_holds_something_back_levels_are_tried_on_ranks_own_gradients(options, monkeypatch):
    """Which the reducer's buckets hold until the means take their place."""
    at_any_price(monkeypatch, start=2)
    model = wrapped(**options)[0]
    optimizer, ladder = sgd(model, lr=0.0), ["none", "int8", "powersgd:2", "lowrank:2"]
    attached = attach(model, optimizer, "auto", settings={"ladder": ladder})
    train(model, optimizer, 6)
    if RANK == 0:
        alone, everyones = net(0), []
        for rank in range(SIZE):
            everyones.append([])
            for step in range(6):
                x, y = batch(step, rank)
                everyones[-1].append(
                    [g.numpy() for g in torch.autograd.grad(cross_entropy(alone(x), y), alone.parameters())]
                )
        shapes = [tuple(p.shape) for p in model.parameters()]
        check_preview(attached.hvdplus.log.records, ladder, shapes, *everyones, ranks=SIZE)


@pytest.mark.parametrize("given", [True, False])
def test_loss_scaling(given, capfd):
    model, optimizer = wrapped()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    attached = attach(model, optimizer, "auto", grad_scaler=scaler if given else None)
    for step in range(8):
        x, y = batch(step)
        before = weights(model)
        if step == 4 and RANK == 0:
            x[0, 0] = float("inf")
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weights(model), before) == (step == 4), "every rank's scaler skips the step"
    assert identical(model) and torch.isfinite(weights(model)).all()
    refused = attached.hvdplus.auto.controller.refused if attached.hvdplus.auto else {}
    assert bool(refused) == (not given and SIZE > 1)
    said = "attach() was not given it" in capfd.readouterr().err
    assert said == (not given and SIZE > 1 and RANK == 0)
    del scaler


@pytest.mark.parametrize("level", ["fp16", "lowrank:2", "int8"])
def test_gradients_that_are_not_finite_on_one_rank_reach_all_and_spoil_nothing(level):
    model, optimizer = wrapped()
    attached = attach(model, optimizer, level)
    train(model, optimizer, 4)
    x, y = batch(4)
    if RANK == SIZE - 1:
        x[0, 0] = float("nan")
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    assert not all(torch.isfinite(p.grad).all() for p in model.parameters()), "as without compression"
    train(model, optimizer, 4, first=5)  # the step is skipped, as a scaler does
    assert torch.isfinite(weights(model)).all() and identical(model)
    state = attached.state_dict()
    assert all(np.isfinite(np.asarray(r)).all() for r in _arrays(state))


def _arrays(value):
    """All arrays within a state."""
    if isinstance(value, torch.Tensor | np.ndarray):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _arrays(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _arrays(each)


@pytest.mark.parametrize("level", few("lowrank:2+fp16", once=["powersgd:2+fp16", "topk:0.1", "auto"]))
def test_a_checkpoint_goes_on_bit_for_bit(level):
    model, optimizer = wrapped()
    attached = attach(model, optimizer, level, settings={"weights_check_steps": 0})
    train(model, optimizer, 5)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), attached.state_dict()))
    if level == "auto":  # whose next decisions depend on times
        other, its_sgd = wrapped(seed=1)
        again = attach(other, its_sgd, level)
        again.load_state_dict(state[2])
        assert again.hvdplus.steps == attached.hvdplus.steps
        return
    train(model, optimizer, 4, first=5)
    other, its_sgd = wrapped(seed=1)
    again = attach(other, its_sgd, level, settings={"weights_check_steps": 0})
    other.load_state_dict(state[0])
    its_sgd.load_state_dict(state[1])
    again.load_state_dict(state[2])
    train(other, its_sgd, 4, first=5)
    assert torch.equal(weights(other), weights(model))


def test_one_ranks_checkpoint_is_everybodys_once_consolidated():
    model, optimizer = wrapped()
    attached = attach(model, optimizer, "lowrank:2")
    train(model, optimizer, 4)
    held = [np.asarray(r) for r in _arrays(attached.state_dict()["residuals"])]
    everyone = [None] * SIZE
    dist.all_gather_object(everyone, held)
    attached.consolidate_state_dict()
    mine = [np.asarray(r) for r in _arrays(attached.state_dict()["residuals"])]
    for of_all, mean in zip(zip(*everyone, strict=True), mine, strict=True):
        np.testing.assert_allclose(mean, sum(of_all) / SIZE, atol=1e-5)


def test_what_was_held_back_among_ranks_reaches_a_rank_that_goes_on_alone():
    model, optimizer = wrapped()
    attached = attach(model, optimizer, "lowrank:2")
    train(model, optimizer, 4)
    attached.consolidate_state_dict()
    saved = attached.state_dict()
    own = [dist.new_group([rank]) for rank in range(SIZE)][RANK]
    alone = DistributedDataParallel(net(), process_group=own)
    steps = torch.optim.SGD(alone.parameters(), lr=1.0)
    going_on = attach(alone, steps, "lowrank:2")
    going_on.load_state_dict(saved)
    before = weights(alone)
    for step in range(12):  # without gradients of its own
        steps.zero_grad()
        (cross_entropy(alone(batch(step)[0]), batch(step)[1]) * 0.0).backward()
        steps.step()
    held, left = (_flat(each["residuals"]) for each in (saved, going_on.state_dict()))
    assert held.norm() > 0.1 and left.norm() < 0.25 * held.norm()
    torch.testing.assert_close(before - weights(alone) + left, held, rtol=0, atol=1e-5)


def test_several_models_in_one_program():
    (one, first), (two, second) = wrapped(1), wrapped(2)
    attach(one, first, "lowrank:2")
    attach(two, second, "fp16")
    for step in range(4):
        x, y = batch(step)
        first.zero_grad()
        second.zero_grad()
        cross_entropy(one(x), y).backward()
        cross_entropy(two(x), y).backward()
        first.step()
        second.step()
    assert identical(one) and identical(two)


def test_several_optimizers_of_one_model():
    model, _ = wrapped()
    halves = list(model.parameters())[:4], list(model.parameters())[4:]
    optimizers = [torch.optim.SGD(half, lr=0.1) for half in halves]
    attached = attach(model, optimizers, "lowrank:2")
    for step in range(5):
        x, y = batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert identical(model) and attached.hvdplus.steps + attached.hvdplus.unread_steps == 5


def test_a_compiled_model():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = wrapped(bucket_cap_mb=1)  # of no less than the first bucket
        attach(model, optimizer, "lowrank:2")
        compiled = torch.compile(model, backend="eager")
        train(compiled, optimizer, 4)
    assert identical(model)


def test_nothing_is_lost_across_changes_of_level():
    model, _ = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    start, total = weights(model), 0.0
    # The test turns the dial, not the controller.
    settings = {"ladder": ["none", "lowrank:1", "lowrank:2"], "dense_steps": 100_000, "drain_steps": 5}
    attached = attach(model, optimizer, "auto", settings=settings)
    step = 0
    for level in (0, 1, 2, 0, 2, 1, 0, 0):
        attached.hvdplus.set_level(level)
        for _ in range(7):
            twin = copy.deepcopy(model.module)
            x, y = batch(step)
            cross_entropy(twin(x), y).backward()
            total = total + torch.cat([p.grad.flatten() for p in twin.parameters()]).double()
            train(model, optimizer, 1, first=step)
            step += 1
    everyone = [None] * SIZE
    dist.all_gather_object(everyone, total)
    arrived = (start.double() - weights(model).double()) * SIZE
    torch.testing.assert_close(arrived, sum(everyone), rtol=0, atol=2e-3)
    assert identical(model) and all(state.residual is None for state in attached._exchange.states)


def test_steps_that_are_skipped_lose_nothing():
    model, _ = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = attach(model, optimizer, "topk:0.1")
    train(model, optimizer, 3)
    held = copy.deepcopy(attached.state_dict())
    x, y = batch(3)
    cross_entropy(model(x), y).backward()
    optimizer.zero_grad()  # no step
    assert _equal(attached.state_dict()["residuals"], held["residuals"])
    train(model, optimizer, 2, first=4)
    assert identical(model)


def _flat(residuals):
    """Residuals end to end, in the order of the parameters."""
    return torch.cat([torch.as_tensor(residual).flatten() for _, residual in sorted(residuals.items())])


def _equal(one, other):
    pairs = zip(_arrays(one), _arrays(other), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_backward_passes_that_add_up_without_no_sync_lose_nothing(options):
    """As in plain DDP: each is exchanged, and the optimizer takes the sum of the means."""
    book = Book(options)
    for step in range(6):
        book.optimizer.zero_grad()
        for part in range(2):
            book.bring(2 * step + part)
            x, y = batch(2 * step + part)
            cross_entropy(book.model(x), y).backward()
        book.optimizer.step()
    book.balance()


def test_a_step_that_is_skipped_before_gradients_are_zeroed_in_the_next_loses_nothing():
    """As most loops are written: forward, zero_grad, backward, step."""
    book = Book({})
    for step in range(8):
        x, y = batch(step)
        loss = cross_entropy(book.model(x), y)
        book.optimizer.zero_grad()
        if skipped := step in (3, 4, 6):
            loss = 10 * loss
        else:
            book.bring(step)
        loss.backward()
        if not skipped:
            book.optimizer.step()
    book.balance()


@pytest.mark.parametrize("zeroed", ["before forward", "before backward"])
def test_a_skipped_step_before_one_of_several_passes_loses_nothing(zeroed):
    book = Book({})
    for step in range(8):
        if skipped := step in (3, 4, 6):
            scale = 10.0
        else:
            scale = 1.0
            book.bring(2 * step, 0.5)
            book.bring(2 * step + 1, 0.5)
        for part in range(2):
            x, y = batch(2 * step + part)
            with book.model.no_sync() if part == 0 else contextlib.nullcontext():
                if part == 0 and zeroed == "before forward":
                    book.optimizer.zero_grad()
                loss = 0.5 * scale * cross_entropy(book.model(x), y)
                if part == 0 and zeroed == "before backward":
                    book.optimizer.zero_grad()
                loss.backward()
        if not skipped:
            book.optimizer.step()
    book.balance()


class Book:
    """Gradients brought = steps taken + what is held back, at a learning rate of 1."""

    def __init__(self, options):
        self.model, _ = wrapped(**options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.attached = attach(self.model, self.optimizer, "lowrank:2" if SIZE == 2 else "topk:0.1")
        self.start, self.brought = weights(self.model), torch.zeros(len(weights(self.model)))

    def bring(self, step, share=1.0):
        """All ranks' mean gradient of a batch, worked out on the side."""
        x, y = batch(step)
        twin = copy.deepcopy(self.model.module)
        twin.zero_grad()
        cross_entropy(twin(x), y).backward()
        mine = torch.cat([p.grad.flatten() for p in twin.parameters()])
        dist.all_reduce(mine)
        self.brought += share * mine / SIZE

    def balance(self):
        held = _flat(self.attached.state_dict()["residuals"])
        dist.all_reduce(held)
        moved = self.start - weights(self.model)
        torch.testing.assert_close(moved + held / SIZE, self.brought, rtol=0, atol=1e-4)


def test_the_report_and_on_window(tmp_path):
    model, optimizer = wrapped()
    seen = []
    attached = attach(model, optimizer, "auto", settings={"window_steps": 2})
    attached.hvdplus.on_window(seen.append)
    for step in range(10):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        attached.record(loss)
        loss.backward()
        optimizer.step()
    summary = hvd.report(attached, accuracy=0.5)
    assert summary["ranks"] == SIZE and summary["transport"] == os.environ["EXPECTED_TRANSPORT"]
    assert summary["step_ms"] > 0 and seen and (seen[-1]["loss"] is not None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda model, optimizer: (model.module, optimizer), "wants a DistributedDataParallel"),
        (lambda model, optimizer: (model, model), "torch.optim.Optimizer"),
        (lambda model, optimizer: (model, []), "torch.optim.Optimizer"),
        (lambda model, optimizer: (model, optimizer, "lowrank:x"), "lowrank"),
        (lambda model, optimizer: (model, optimizer, "local:8"), "DistributedOptimizer"),
        (lambda model, optimizer: (model, optimizer, "auto", {"every": 4}), "DistributedOptimizer"),
    ],
)
def test_bad_arguments(arguments, words):
    model, optimizer = wrapped()
    with pytest.raises(ValueError, match=words):
        attach(*arguments(model, optimizer))


def test_complex_parameters_at_auto():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Parameter(torch.randn(16, 20, dtype=torch.complex64))
            self.second = nn.Parameter(torch.randn(20, 16, dtype=torch.complex64))

        def forward(self, x):
            return (x.to(torch.complex64) @ self.first @ self.second).abs()

    bare, model = Product(), DistributedDataParallel(Product())
    optimizer, attached = torch.optim.SGD(model.parameters(), lr=1e-4), None
    attached = attach(model, optimizer)
    plain = torch.optim.SGD(bare.parameters(), lr=1e-4)
    for step in range(12):
        for optimizer_ in (optimizer, plain):
            optimizer_.zero_grad()
        for rank in range(SIZE):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + rank))
            (bare(x).square().mean() / SIZE).backward()
            if rank == RANK:
                model(x).square().mean().backward()
        optimizer.step()
        plain.step()
    assert attached.hvdplus.steps >= 10
    for mine, expected in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(torch.view_as_real(mine), torch.view_as_real(expected), rtol=1e-4, atol=1e-5)


def test_the_learning_rate_is_that_of_the_groups_of_today():
    """`load_state_dict` makes new ones."""
    model, optimizer = wrapped()
    attached = attach(model, optimizer, compression="fp16")
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    rates = []
    attached.hvdplus.listener = lambda times, rate: rates.append(rate)
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 0.1 / 2**step
        train(model, optimizer, 1, step)
    assert rates[-2:] == pytest.approx([0.05, 0.025])


def test_an_optimizer_may_be_made_anew():
    """Its steps count as those of the one before, and nothing that was held back is sent twice."""
    runs = []
    for anew in (False, True):
        model, _ = wrapped()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attached = attach(model, optimizer, compression="lowrank:2")
        rates = []
        attached.hvdplus.listener = lambda times, rate, rates=rates: rates.append(rate)
        train(model, optimizer, 3)
        if anew:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            gc.collect()
        else:
            optimizer.param_groups[0]["lr"] = 0.05
        train(model, optimizer, 6, first=3)
        runs.append((attached.hvdplus.steps, [p.detach().clone() for p in model.parameters()]))
        assert rates[-1] == pytest.approx(0.05)
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(p, q) for p, q in zip(runs[0][1], runs[1][1], strict=True))


def test_only_waiting_before_the_first_of_several_batches_is_input_wait():
    model, optimizer = wrapped()
    attached = attach(model, optimizer, compression="fp16")
    for step in range(4):
        optimizer.zero_grad()
        with model.no_sync():
            cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
        time.sleep(0.1)
        cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
        optimizer.step()
    times = attached._exchange.meter.last
    assert times.step > 0.1 > 0.05 > times.input_wait


def test_parameters_that_the_reducer_leaves_alone_are_an_error():
    bare = net()
    bare[0].requires_grad_(False)
    model = DistributedDataParallel(bare)
    bare[0].requires_grad_(True)
    optimizer = sgd(model)
    attach(model, optimizer, compression="lowrank:2")
    with pytest.raises(Exception, match=r"frozen when DistributedDataParallel was made.* Received: 0.weight, 0.bias"):
        train(model, optimizer, 1)


def test_an_optimizer_of_other_parameters_is_refused():
    model, _ = wrapped()
    with pytest.raises(ValueError, match="the optimizer that steps the model's parameters.* SGD of other parameters"):
        attach(model, sgd(net()))


def test_a_reducer_without_buckets_is_refused():
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model, optimizer = wrapped()
    with pytest.raises(ValueError, match="Received: torch._dynamo.config.optimize_ddp = 'python_reducer'"):
        attach(model, optimizer)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("level", ["none", "fp16", "lowrank:2"])
def test_copies_of_a_model_that_is_split_exchange_among_themselves(level):
    """A mesh of two copies x two parts: gradients cross between copies, activations between parts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    mine, part = mesh["copies"].get_group(), mesh["parts"].get_local_rank()
    partner = dist.get_process_group_ranks(mesh["parts"].get_group())[1 - part]
    torch.manual_seed(0)
    parts = [nn.Linear(WIDTH, 30), nn.Linear(30, 5)]
    whole = copy.deepcopy(parts)
    model = DistributedDataParallel(parts[part], process_group=mine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    assert attach(model, optimizer, level).hvdplus.ranks == 2
    reference = torch.optim.SGD([*whole[0].parameters(), *whole[1].parameters()], lr=0.5)
    for step in range(3):
        batches = [batch(step, rank) for rank in range(2)]
        reference.zero_grad()
        (sum(cross_entropy(whole[1](torch.tanh(whole[0](x))), y) for x, y in batches) / 2).backward()
        optimizer.zero_grad()
        x, y = batches[mesh["copies"].get_local_rank()]
        if part == 0:
            hidden = torch.tanh(model(x))
            dist.send(hidden.detach(), partner)
            back = torch.empty_like(hidden)
            dist.recv(back, partner)
            hidden.backward(back)
        else:
            hidden = torch.empty(len(x), 30)
            dist.recv(hidden, partner)
            hidden.requires_grad_()
            cross_entropy(model(hidden), y).backward()
            dist.send(hidden.grad, partner)
        optimizer.step()
        reference.step()
        if level != "lowrank:2":
            for own, expected in zip(model.parameters(), whole[part].parameters(), strict=True):
                torch.testing.assert_close(own, expected, rtol=0, atol=1e-6 if level == "none" else 2e-3)
    everyone = [None] * SIZE
    dist.all_gather_object(everyone, (part, weights(model)))
    for one, its_weights in everyone:
        assert (one != part) or torch.equal(its_weights, weights(model))
