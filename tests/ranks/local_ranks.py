"""Local steps in PyTorch, on as many ranks as it was started on.

The reference trains all ranks' models in one process, with plain PyTorch, and averages them by hand.
"""

import copy

import pytest
import torch
from picking import any_transport, few, one_or_two

import hvdplus.torch as hvd

hvd.init()
torch.set_num_threads(1)
RANK, SIZE = hvd.rank(), hvd.size()


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))


def batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 12, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def take_step(net, optimizer, step, rank=RANK):
    x, y = batch(step, rank)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()


def train(net, optimizer, steps, first=0):
    for step in range(first, first + steps):
        take_step(net, optimizer, step)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def wrapped(net, make=sgd, **keywords):
    keywords.setdefault("compression", "none")
    return hvd.DistributedOptimizer(make(net.parameters()), named_parameters=net.named_parameters(), **keywords)


def by_hand(steps, every, make=sgd, *, overlap=0, parts=((0, 1, 2, 3),), outer=None):
    """The model of this rank after so many steps, all ranks simulated. ``parts``: parameters of every fragment."""
    nets = [model() for _ in range(SIZE)]
    optimizers = [make(net.parameters()) for net in nets]
    values = [list(net.parameters()) for net in nets]
    anchors = [torch.nn.Parameter(p.detach().clone()) for p in values[0]]
    steppers = [torch.optim.SGD([anchors[i] for i in part], **(outer or {"lr": 1.0})) for part in parts]
    sent = {}
    begins = [(k + 1) * every // len(parts) for k in range(len(parts))]

    def complete(k):
        before = sent.pop(k)
        for i in parts[k]:
            anchors[i].grad = anchors[i].detach() - sum(values_[i] for values_ in before) / SIZE
        steppers[k].step()
        for rank in range(SIZE):
            for i in parts[k]:
                values[rank][i].data += anchors[i].data - before[rank][i]

    for step in range(1, steps + 1):
        for rank in range(SIZE):
            take_step(nets[rank], optimizers[rank], step - 1, rank)
        for k in [k for k in sent if step >= begins[k] - every + overlap]:
            complete(k)
        for k in range(len(parts)):
            if step == begins[k]:
                begins[k] += every
                sent[k] = [[p.detach().clone() for p in values[rank]] for rank in range(SIZE)]
                if not overlap:
                    complete(k)
    return nets[RANK]


def close(a, b, tolerance=2e-6):
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.allclose(x, y, rtol=0, atol=tolerance) for x, y in pairs)


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@any_transport
def test_one_local_step_of_sgd_is_lock_step():
    """Averages of steps that are linear in the gradient are steps of the average."""
    one, other = model(), model()

    def plain(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    train(one, wrapped(one, plain, compression="local:1"), 12)
    train(other, wrapped(other, plain), 12)
    assert close(one, other)


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("steps", [8, 11])
def test_local_steps_are_averaged(make, steps):
    net = model()
    train(net, wrapped(net, make, every=4), steps)
    assert close(net, by_hand(steps, 4, make))


def test_ranks_are_alike_after_an_exchange_and_only_then():
    net = model()
    optimizer = wrapped(net, every=3, compression="int8")
    for step in range(1, 13):
        take_step(net, optimizer, step)
        assert hvd.identical(net) == (step % 3 == 0 or SIZE == 1)
    take_step(net, optimizer, 13)
    optimizer.average_now()
    assert hvd.identical(net)


def test_nesterov():
    net = model()
    train(net, wrapped(net, every=4, settings={"outer": "nesterov"}), 13)
    assert close(net, by_hand(13, 4, outer={"lr": 0.7, "momentum": 0.9, "nesterov": True}))


@pytest.mark.parametrize("overlap", [1, 3])
def test_overlapped(overlap):
    net = model()
    train(net, wrapped(net, every=4, settings={"overlap_steps": overlap}), 15)
    assert close(net, by_hand(15, 4, overlap=overlap))


def test_fragments_take_turns():
    net = model()
    optimizer = wrapped(net, adam, every=4, settings={"fragments": 2, "overlap_steps": 1})
    parts, place = [], {id(p): i for i, p in enumerate(net.parameters())}
    for fragment in optimizer._fragments:
        parts.append([place[id(p)] for p in fragment.parameters])
    assert sorted(sum(parts, [])) == [0, 1, 2, 3] and all(parts)
    train(net, optimizer, 15)
    assert close(net, by_hand(15, 4, adam, overlap=1, parts=parts))


def test_the_log_of_every_fragment_says_how_often_it_is_exchanged(tmp_path):
    settings = {"fragments": 2, "run_log": str(tmp_path / "run.jsonl")}
    for fragment in wrapped(model(), every=4, settings=settings)._fragments:
        told = [record["every"] for record in fragment.outer.hvdplus.log.records if record["kind"] == "local"]
        assert told == [4] * (RANK == 0)


@pytest.mark.parametrize(
    "level", few("int4", "lowrank:2+fp16", once=["lowrank:2", "topk:0.2:32", "powersgd:2"], sizes=(1, 2))
)
@pytest.mark.parametrize("overlap", [0, 2])
def test_what_is_not_sent_is_kept(level, overlap):
    """At every exchange: mean of the ranks' parameters = new anchor - (new residual - old residual), on average."""
    net = model()
    settings = {"overlap_steps": overlap}
    optimizer = wrapped(net, every=3, compression=level, settings=settings)
    fragment = optimizer._fragments[0]
    names = [name for name, _ in net.named_parameters()]
    sent_before, compared = None, 0
    for step in range(24):
        residuals = kept(fragment, names)
        take_step(net, optimizer, step)
        now = None if fragment.sent is None else [value.clone() for value in fragment.sent]
        if not overlap and step % 3 == 2:  # began and was completed within the step: drifts are by hand
            continue
        if sent_before is not None and now is None:
            after = kept(fragment, names)
            for i, name in enumerate(names):
                wanted = hvd.allreduce(sent_before[i] - residuals[name], name=f"{step}{level}{name}")
                got = fragment.anchors[i].detach() - hvd.allreduce(after[name], name=f"{step}{level}{name}kept")
                assert torch.allclose(got, wanted, rtol=0, atol=3e-4 if "fp16" in level else 2e-5)
                compared += 1
        sent_before = now
    assert compared or not overlap
    if not overlap:
        optimizer.average_now()
        assert hvd.identical(net)


def kept(fragment, names):
    """Name -> this rank's residual; zeros where there is none."""
    saved = fragment.outer.state_dict().get("hvdplus", {"residuals": {}})["residuals"]
    return {
        name: saved.get(i, torch.zeros_like(anchor)).reshape(anchor.shape)
        for i, (name, anchor) in enumerate(zip(names, fragment.anchors, strict=True))
    }


@any_transport
@one_or_two
@pytest.mark.parametrize("level", ["none", "lowrank:2+fp16"])
@pytest.mark.parametrize(
    "settings", [{}, {"overlap_steps": 2}, {"fragments": 2, "overlap_steps": 1, "outer": "nesterov"}]
)
@pytest.mark.parametrize("steps", [9, 10, 11])
def test_a_loaded_checkpoint_goes_on_as_if_never_stopped(level, settings, steps):
    whole = model()
    optimizer = wrapped(whole, adam, every=4, compression=level, settings=settings)
    train(whole, optimizer, steps)
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    train(whole, optimizer, 10, first=steps)
    again = model(seed=1)
    other = wrapped(again, adam, every=4, compression=level, settings=settings)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(again, other, 10, first=steps)
    assert equal(whole, again)


def test_what_measurements_choose_runs_beside_an_exchange():
    """As if it had been asked for: the choice is put there, before there is anything to measure."""
    net = model()
    optimizer = wrapped(net, adam, every="auto")
    rhythm = optimizer._rhythm
    chosen = {**rhythm.interval.state(), "steps": 6, "overlap": 3}
    rhythm.load({**rhythm.state(), "interval": chosen, "begins": [6]})
    train(net, optimizer, 8)
    assert optimizer._fragments[0].sent is not None, "under way"
    train(net, optimizer, 9, first=8)
    assert close(net, by_hand(17, 6, adam, overlap=3))
    optimizer.average_now()
    assert hvd.identical(net)


def test_averaging_where_an_exchange_has_just_begun_leaves_ranks_equal_to_the_last_bit():
    net = model()
    optimizer = wrapped(net, adam, every=4, settings={"overlap_steps": 2})
    train(net, optimizer, 8)
    optimizer.average_now()
    assert hvd.identical(net)


def test_auto_goes_on_whatever_is_measured():
    net = model()
    optimizer = wrapped(net, adam, every="auto", compression="auto")
    assert optimizer.hvdplus.ladder.names == ("none", "fp16", "int8", "int4")
    train(net, optimizer, 200)
    optimizer.average_now()
    assert hvd.identical(net)
    interval = optimizer._rhythm.interval
    assert len(interval.compute) > 3
    if SIZE > 1:
        assert interval.highest_rate == pytest.approx(0.01)
        optimizer.load_state_dict(optimizer.state_dict())  # which makes new groups
        optimizer.param_groups[0]["lr"] = 0.02
        train(net, optimizer, 200)
        assert interval.highest_rate == pytest.approx(0.02)
    own = wrapped(model(), every=4, compression="auto", settings={"ladder": "none,fp16,lowrank:2"})
    assert own.hvdplus.ladder.names == ("none", "fp16", "lowrank:2")


@any_transport
def test_several_optimizers_have_each_their_own_rhythm():
    """One of them in lock-step; with accumulated gradients, which are the script's own affair."""
    nets, same = [model(), model(), model()], [model() for _ in range(SIZE)]
    optimizers = [
        wrapped(nets[0], every=2),
        wrapped(nets[1], adam, every=3, settings={"overlap_steps": 1}),
        wrapped(nets[2]),
    ]
    for step in range(12):
        for net, optimizer in zip(nets, optimizers, strict=True):
            take_step(net, optimizer, step)
    assert close(nets[0], by_hand(12, 2)) and close(nets[1], by_hand(12, 3, adam, overlap=1))
    assert hvd.identical(nets[2])
    net = model()
    optimizer, references = wrapped(net, every=2), [sgd(each.parameters()) for each in same]
    for step in range(0, 8, 2):
        optimizer.zero_grad()
        for part in (step, step + 1):
            x, y = batch(part, RANK)
            torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        for rank, (theirs, reference) in enumerate(zip(same, references, strict=True)):
            reference.zero_grad()
            for part in (step, step + 1):
                x, y = batch(part, rank)
                torch.nn.functional.cross_entropy(theirs(x), y).backward()
            reference.step()
        if step % 4 == 2:
            with torch.no_grad():
                for each in zip(*(theirs.parameters() for theirs in same), strict=True):
                    mean = sum(each) / SIZE
                    for p in each:
                        p.copy_(mean)
    assert close(net, same[RANK])


@any_transport
def test_a_checkpoint_of_lock_step_goes_on_in_local_steps():
    net = model()
    optimizer = wrapped(net)
    train(net, optimizer, 5)
    after, other = model(seed=2), None
    other = wrapped(after, every=4)
    after.load_state_dict(net.state_dict())
    other.load_state_dict(optimizer.state_dict())
    train(after, other, 4, first=5)
    assert hvd.identical(after)
    back = model(seed=3)
    optimizer = wrapped(back)
    back.load_state_dict(after.state_dict())
    optimizer.load_state_dict(other.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # momentum was each rank's own
    train(back, optimizer, 2, first=9)
    assert hvd.identical(back)


@any_transport
def test_a_checkpoint_of_the_lock_step_before_goes_back_to_it():
    net, same = model(), model()
    optimizer, straight = wrapped(net, every=4, settings={"dense_steps": 5}), wrapped(same)
    train(net, optimizer, 2)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    train(net, optimizer, 5, first=2)
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(net, optimizer, 3, first=2)
    train(same, straight, 5)
    assert equal(net, same)
    train(net, optimizer, 4, first=5)
    assert hvd.identical(net)


def test_a_checkpoint_is_loaded_while_an_exchange_is_under_way():
    net, same = model(), model()
    optimizer = wrapped(net, adam, every=4, compression="fp16", settings={"overlap_steps": 2})
    train(net, optimizer, 5)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    for _ in range(3):
        net.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        assert optimizer._fragments[0].sent is not None, "under way again"
    train(net, optimizer, 9, first=5)
    other = wrapped(same, adam, every=4, compression="fp16", settings={"overlap_steps": 2})
    train(same, other, 14)
    assert equal(net, same)


@any_transport
def test_a_checkpoint_goes_on_with_rarer_and_later_exchanges():
    """Whose overlap reaches beyond the next exchange that the checkpoint had in mind."""
    net = model()
    optimizer = wrapped(net, every=4, settings={"overlap_steps": 3})
    train(net, optimizer, 17)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    other = wrapped(net, every=16, settings={"overlap_steps": 12})
    net.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(net, other, 40, first=17)
    other.average_now()
    assert hvd.identical(net)


@any_transport
def test_lock_step_comes_first():
    net, same = model(), model()
    optimizer = wrapped(net, every=4, settings={"dense_steps": 5})
    train(net, optimizer, 5)
    train(same, wrapped(same), 5)
    assert equal(net, same)
    train(net, optimizer, 3, first=5)
    assert hvd.identical(net) == (SIZE == 1)
    train(net, optimizer, 1, first=8)
    assert hvd.identical(net)


@any_transport
def test_what_optimizers_remember_may_be_averaged():
    for averages in (False, True):
        net = model()
        optimizer = wrapped(net, adam, every=4, settings={"average_state": averages})
        for steps, at_once in ((8, False), (2, True)):
            train(net, optimizer, steps)
            if at_once:
                optimizer.average_now()
            moments = [value for p in net.parameters() for value in optimizer.state[p].values()]
            assert hvd.identical(moments) == (averages or SIZE == 1)


def test_a_value_that_is_not_finite_reaches_all_ranks():
    net = model()
    optimizer = wrapped(net, every=2, compression="lowrank:2")
    train(net, optimizer, 7)
    if RANK == 0:
        with torch.no_grad():
            next(net.parameters())[0, 0] = float("nan")
    take_step(net, optimizer, 7)
    assert torch.isnan(next(net.parameters())).any()


def take_scaled_step(net, optimizer, scaler, step, skips=False):
    """``skips``: because of an infinity on this rank."""
    x, y = batch(step, RANK)
    optimizer.zero_grad()
    scaler.scale(torch.nn.functional.cross_entropy(net(x), y)).backward()
    if skips:
        next(net.parameters()).grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()


@any_transport
@pytest.mark.ranks(2, 4)
def test_ranks_may_skip_steps_by_themselves():
    net = model()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = wrapped(net, every=4)
    for step in range(8):
        take_scaled_step(net, optimizer, scaler, step, RANK == 1 and step == 2)
    assert hvd.identical(net) and all(torch.isfinite(p).all() for p in net.parameters())


@any_transport
@pytest.mark.ranks(2, 4)
def test_a_schedule_may_fall_behind_on_a_rank_that_skips_steps():
    """As with Accelerate, which steps a scheduler only where the optimizer has stepped."""
    net = model()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = wrapped(net, every=2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(8):
        skips = RANK == 1 and step == 2
        take_scaled_step(net, optimizer, scaler, step, skips)
        if not skips:
            schedule.step()
    assert hvd.identical(net)


@any_transport
@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler_in_the_lock_step_before(unscales):
    """As in lock-step: it has to look at gradients after their exchange, and then ranks skip together."""
    net, other = model(), model()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = wrapped(net, every=4, settings={"dense_steps": 4})

    def take(step):
        x, y = batch(step, RANK)
        optimizer.zero_grad()
        scale = float("inf") if RANK == 0 and step == 1 else 1.0
        scaler.scale(scale * torch.nn.functional.cross_entropy(net(x), y)).backward()
        if unscales:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()

    if not unscales and SIZE > 1:
        with pytest.raises(RuntimeError, match="GradScaler has to look at gradients after their exchange"):
            take(0)
        return
    reference = wrapped(other, every=4, settings={"dense_steps": 4})
    for step in range(4):
        take(step)
        if step != 1:
            take_step(other, reference, step)
    assert hvd.identical(net) and equal(net, other)


@any_transport
def test_unscaled_gradients_are_the_same():
    net, other = model(), model()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = wrapped(net, every=4)
    for step in range(8):
        take_scaled_step(net, optimizer, scaler, step)
    train(other, wrapped(other, every=4), 8)
    assert equal(net, other)


@any_transport
def test_lists_and_closures():
    net, other = model(), model()
    optimizer = wrapped(net, every=2)
    for step in range(6):
        x, y = batch(step, RANK)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x), y)
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None
    train(other, wrapped(other, every=2), 6)
    assert equal(net, other)


@any_transport
def test_schedulers_reach_the_steps():
    net, same = model(), model()
    optimizer, plain = wrapped(net, every=50), sgd(same.parameters())
    for one, steps in ((optimizer, net), (plain, same)):
        schedule = torch.optim.lr_scheduler.StepLR(one, 2, 0.5)
        for step in range(6):
            take_step(steps, one, step)
            schedule.step()
    assert equal(net, same)


@any_transport
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"op": "Sum"}, "Local steps are averaged. Received: op=Sum"),
        ({"settings": {"fragments": 9}}, "fragments has to be from 1 to the 8 local steps"),
        ({"settings": {"fragments": 5}}, "fragments has to be at most the 4 parameters. Received: fragments=5"),
        ({"settings": {"overlap_steps": 8}}, "overlap_steps has to be below the 8 local steps"),
        ({"settings": {"outer": "adam"}}, "wants one of average, nesterov"),
    ],
)
def test_what_cannot_be_is_an_error(keywords, message):
    keywords = {name: hvd.Sum if value == "Sum" else value for name, value in keywords.items()}
    net = model()
    with pytest.raises(ValueError, match=message):
        wrapped(net, every=8, **keywords)


@any_transport
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("keywords", "what"),
    [
        ({"every": 4 + RANK}, "every: 4 against 5"),
        ({"every": 4 if RANK else "auto"}, "every: 'auto' against 4"),
        ({"every": 4 if RANK else 1}, ""),
        ({"every": 4, "settings": {"dense_steps": RANK}}, "dense_steps: 0 against 1"),
    ],
    ids=("every", "auto", "lock-step", "dense_steps"),
)
def test_ranks_that_would_exchange_after_other_steps_are_an_error_on_all(keywords, what):
    with pytest.raises(ValueError, match=f"Ranks 0 and 1 differ in {what}"):
        wrapped(model(), **keywords)


@any_transport
def test_lock_step_before_counts_backward_passes_as_it_does_elsewhere():
    nets = model(), model()
    lock_step = wrapped(nets[0], backward_passes_per_step=2)
    local = wrapped(nets[1], every=4, backward_passes_per_step=2, settings={"dense_steps": 3})
    for net, optimizer in zip(nets, (lock_step, local), strict=True):
        for step in range(3):
            passes = 2 if step < 2 else 1
            if step == 2:
                optimizer.set_backward_passes_per_step(1)
            optimizer.zero_grad()
            for number in range(passes):
                x, y = batch(10 * step + number, RANK)
                torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    assert equal(*nets) and local.backward_passes_per_step == 1
    with pytest.raises(ValueError, match="backward_passes_per_step must be at least 1. Received: 0"):
        local.set_backward_passes_per_step(0)


@any_transport
@pytest.mark.parametrize("dense_steps", [0, 2])
def test_parameters_that_are_unfrozen_later_are_an_error(dense_steps):
    net = model()
    net[0].requires_grad_(False)
    optimizer = wrapped(net, every=2, settings={"dense_steps": dense_steps})
    train(net, optimizer, 1)
    net[0].requires_grad_(True)
    with pytest.raises(ValueError, match="Received: 2 that became so later"):
        train(net, optimizer, 1)


@any_transport
@pytest.mark.ranks(2, 4)
def test_ranks_with_different_learning_rates_are_an_error():
    net = model()
    optimizer = wrapped(net, every=2)
    optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * (RANK == 1)
    with pytest.raises(RuntimeError, match="learning rate differs between rank 0 and rank.*1"):
        train(net, optimizer, 8)


@any_transport
@pytest.mark.parametrize(("level", "auto"), [("local:4+auto", True), ("local:4+fp16", False)])
def test_local_steps_are_asked_for_from_outside(level, auto, monkeypatch):
    monkeypatch.setenv("HVDPLUS_COMPRESSION", level)
    net = model()
    optimizer = wrapped(net, compression="auto")
    assert optimizer._rhythm.every == 4 and (len(optimizer.hvdplus.ladder.names) > 1) == auto
    train(net, optimizer, 8)
    assert hvd.identical(net)


@any_transport
@pytest.mark.ranks(2, 4)
def test_a_rank_with_a_step_more_does_not_exchange_alone():
    """As with data that do not divide among the ranks."""
    net = model()
    optimizer = wrapped(net, every=8)
    train(net, optimizer, 8)
    before = copy.deepcopy(net)
    if RANK == 0:
        take_step(net, optimizer, 8)
    drift = [hvd.allreduce(p.detach() - q.detach()) for p, q in zip(net.parameters(), before.parameters(), strict=True)]
    optimizer.average_now()
    for p, q, mean in zip(net.parameters(), before.parameters(), drift, strict=True):
        assert mean.abs().max() > 0 and torch.allclose(p, q + mean, rtol=0, atol=2e-6)
    assert hvd.identical(net)
    train(net, optimizer, 8, first=9)
    assert hvd.identical(net)


@any_transport
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("overlap", [0, 2])
def test_averaging_again_leaves_alone_what_the_script_has_put_there(overlap):
    """The best parameters so far, to be saved."""
    net = model()
    optimizer = wrapped(net, every=4, settings={"overlap_steps": overlap})
    train(net, optimizer, 6)
    optimizer.average_now()
    best = model(seed=1)
    net.load_state_dict(best.state_dict())
    optimizer.average_now()
    optimizer.consolidate_state_dict()
    assert equal(net, best)


@any_transport
@pytest.mark.ranks(2, 4)
def test_averaging_after_loading_changes_nothing():
    """An outer step with momentum of no drift would."""
    net = model()
    optimizer = wrapped(net, every=4, settings={"outer": "nesterov"})
    train(net, optimizer, 6)
    optimizer.average_now()
    again = model()
    again.load_state_dict(net.state_dict())
    loaded = wrapped(again, every=4, settings={"outer": "nesterov"})
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    loaded.average_now()
    assert equal(again, net)


@any_transport
@pytest.mark.ranks(2, 4)
def test_meeting_again_changes_nothing():
    """An outer step with momentum is taken once, however often ranks meet, and fragments go on in turns."""
    net = model()
    optimizer = wrapped(net, every=8, settings={"outer": "nesterov", "fragments": 2})
    train(net, optimizer, 10)
    optimizer.average_now()
    before = copy.deepcopy(net)
    optimizer.average_now()
    optimizer.consolidate_state_dict()
    assert equal(net, before) and hvd.identical(net)
    begun = [fragment.outer.hvdplus.steps for fragment in optimizer._fragments]
    train(net, optimizer, 4, first=10)
    assert [fragment.outer.hvdplus.steps for fragment in optimizer._fragments] != begun
    assert not hvd.identical(net), "one fragment was exchanged, and no more"


@any_transport
def test_complex_parameters_go_on_from_a_checkpoint():
    def make():
        torch.manual_seed(0)
        return torch.nn.Parameter(torch.randn(6, 5, dtype=torch.complex64))

    def steps(parameter, optimizer, first, count):
        for step in range(first, first + count):
            optimizer.zero_grad()
            x = torch.randn(5, generator=torch.Generator().manual_seed(100 * step + RANK)).to(torch.complex64)
            (parameter @ x).abs().square().sum().backward()
            optimizer.step()

    def wrap(parameter):
        return hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.01, momentum=0.9), compression="local:4")

    whole, part = make(), make()
    optimizer = wrap(whole)
    steps(whole, optimizer, 0, 10)
    first = wrap(part)
    steps(part, first, 0, 6)
    rest = torch.nn.Parameter(part.detach().clone())
    again = wrap(rest)
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(rest, again, 6, 4)
    assert torch.equal(torch.view_as_real(whole.detach()), torch.view_as_real(rest.detach()))


@any_transport
def test_wrapped_twice_or_lbfgs():
    net = model()
    optimizer = wrapped(net, every=8)
    with pytest.raises(ValueError, match="wrapped twice"):
        hvd.DistributedOptimizer(optimizer, every=8)
    with pytest.raises(ValueError, match="wrapped twice"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.DistributedOptimizer(torch.optim.LBFGS(net.parameters()), every=8)
    with pytest.raises(ValueError, match="all parameters from the start"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})


@any_transport
def test_broadcast_state_and_copies():
    net = model(seed=RANK)
    optimizer = wrapped(net, adam, every=4)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(net, optimizer, 4)
    assert hvd.identical(net)
    train(net, optimizer, 2, first=4)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert hvd.identical(net)
    train(net, optimizer, 2, first=6)
    assert hvd.identical(net), "two steps later is the exchange"
    assert type(copy.deepcopy(optimizer)) is torch.optim.AdamW


@any_transport
def test_the_log_has_a_line_an_exchange(tmp_path):
    path = tmp_path / "run.jsonl"
    net = model()
    optimizer = wrapped(net, every=4, compression="fp16", settings={"run_log": str(path), "window_steps": 2})
    for step in range(40):
        optimizer.record(1.0)
        take_step(net, optimizer, step)
    figures = hvd.report(optimizer)
    assert figures["steps"] == 10 and figures["level"] == "fp16"
    assert len(list(tmp_path.glob("run.jsonl*"))) == (RANK == 0)
