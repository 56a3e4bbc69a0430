"""Calls in which ranks differ are an error on every rank; values of any type and length arrive."""

import gc
import os
import time

import numpy as np
import pytest
import torch

import hvdplus.torch as hvd
from hvdplus.adapters.torch.collectives import Collectives
from hvdplus.transport import TransportError

hvd.init()
torch.set_num_threads(1)
RANK, SIZE = hvd.rank(), hvd.size()
WORLD = hvd._require_world()
HOROVOD = WORLD.transport.name.startswith("horovod")
without_negotiation = pytest.mark.skipif(HOROVOD, reason="Horovod negotiates")


def linear(seed=0, kind=torch.optim.SGD, compression="none", **keywords):
    torch.manual_seed(seed)
    net = torch.nn.Linear(20, 20)
    return net, hvd.DistributedOptimizer(kind(net.parameters(), lr=0.1), compression=compression, **keywords)


def fails_everywhere(mine, theirs, *words):
    """Rank 0 makes one call, the others another: all are told of both, and can go on together."""
    with pytest.raises(TransportError) as refused:
        (mine if RANK == 0 else theirs)()
    assert all(word in str(refused.value) for word in ("rank 0: ", "rank 1: ", *words)), refused.value
    assert hvd.allgather_object(RANK) == list(range(SIZE))


@without_negotiation
@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (
            lambda: hvd.allreduce(torch.ones(3), name="x"),
            lambda: hvd.allreduce(torch.ones(4), name="x"),
            ("rank 0: allreduce 'x' (Average) of float32 (3,), rank 1: allreduce 'x' (Average) of float32 (4,)",),
        ),
        (
            lambda: hvd.allreduce(torch.ones(2, 3)),
            lambda: hvd.allreduce(torch.ones(3, 2)),
            ("float32 (2, 3)", "float32 (3, 2)"),
        ),
        (
            lambda: hvd.allreduce(torch.ones(2)),
            lambda: hvd.allreduce(torch.ones(1, dtype=torch.float64)),
            ("float32 (2,)", "float64 (1,)"),
        ),
        (
            lambda: hvd.allreduce(torch.ones(2), op=hvd.Sum),
            lambda: hvd.allreduce(torch.ones(2), op=hvd.Average),
            ("(Sum)", "(Average)"),
        ),
        (lambda: hvd.allreduce(torch.ones(2), name="x"), lambda: hvd.allreduce(torch.ones(2)), ("'x'", "allreduce (")),
        (lambda: hvd.allreduce(torch.ones(2)), lambda: hvd.barrier(), ("allreduce", "barrier")),
        (lambda: hvd.allreduce(torch.ones(2)), lambda: hvd.allgather_object(2), ("allreduce", "allgather_object")),
        (lambda: hvd.allgather(torch.ones(2, 3)), lambda: hvd.allgather(torch.ones(2, 4)), ("(any, 3)", "(any, 4)")),
        (lambda: hvd.broadcast_object(1, 0), lambda: hvd.broadcast_object(1, 1), ("from rank 0", "from rank 1")),
    ],
)  # fmt: skip
def test_no_calls_bytes_are_taken_for_anothers(mine, theirs, words):
    fails_everywhere(mine, theirs, *words)


@without_negotiation
def test_sums_of_an_exchange_are_compared_too():
    transport = WORLD.transport

    def total(count, name="sum", scale=1.0):
        return lambda: transport.wait(transport.start(torch.ones(count), name, scale))

    fails_everywhere(total(3), total(4), "sum 'sum' of float32 (3,)", "sum 'sum' of float32 (4,)")
    fails_everywhere(total(3, "a"), total(3, "b"), "'a'", "'b'")
    fails_everywhere(total(3, "a", 0.5), total(3, "a"), "times 0.5")
    assert torch.equal(total(3)(), torch.full((3,), float(SIZE)))


@without_negotiation
def test_a_rank_that_waits_says_for_which_call(monkeypatch, capfd):
    monkeypatch.setattr(f"{type(WORLD.transport).wait.__module__}.WARN_SECONDS", 0.5)
    monkeypatch.setattr(f"{type(WORLD.transport).wait.__module__}.LOOK_SECONDS", 0.1)
    hvd.barrier()
    time.sleep(1.3 if RANK else 0)
    hvd.allreduce(torch.ones(2, 3), name="late")
    told = capfd.readouterr().err
    assert ("rank 0 has waited" in told and "allreduce 'late' (Average) of float32 (2, 3)" in told) == (RANK == 0), told


def test_gathers_for_different_purposes_do_not_meet():
    transport = WORLD.transport
    fails_everywhere(
        lambda: transport.gather_objects(1, "an apple"),
        lambda: transport.gather_objects("1", "a pear"),
        "gather of an apple",
        "gather of a pear",
    )
    assert transport.gather_objects(RANK) == list(range(SIZE)), "the purpose need not be named"


def test_a_second_optimizer_on_one_rank_is_an_error_on_both_and_no_wrong_answer():
    net, _ = linear()
    fails_everywhere(linear, lambda: hvd.identical(net), "DistributedOptimizer", "hvd.identical")


def test_optimizers_of_different_classes_are_an_error_on_every_rank():
    with pytest.raises(ValueError, match="Ranks 0 and 1 differ in optimizer: 'Adam' against 'SGD'"):
        linear(kind=torch.optim.SGD if RANK else torch.optim.Adam)


def test_identical_names_the_first_tensor_that_differs(capfd):
    net, _ = linear()
    assert hvd.identical(net) and hvd.identical(net.parameters()) and hvd.identical(net.named_parameters())
    assert "not identical" not in capfd.readouterr().err
    with torch.no_grad():
        net.bias[3] += RANK
    for values, name in ((net, "bias"), (net.state_dict(), "bias"), (list(net.parameters()), "tensor 1")):
        assert not hvd.identical(values)
        told = capfd.readouterr().err
        line = f"not identical: {name} (float32 (20,)) on rank 1 is not rank 0's; 1 of 2 tensors differ"
        assert (line in told) == (RANK == 0), told
    assert not hvd.identical([torch.ones(1)] * (1 + RANK)), "another number of tensors"


@pytest.fixture
def short_messages(monkeypatch):
    """Objects travel in parts; gives the longest message in bytes."""
    import hvdplus.transport

    longest = [0]
    original = hvdplus.transport.gather_in_parts

    def watched(value, what, size, gather):
        def measured(part):
            longest[0] = max(longest[0], len(part if isinstance(part, bytes) else part[2]))
            return gather(part)

        return original(value, what, size, measured)

    monkeypatch.setattr(hvdplus.transport, "PART_BYTES", 2000)
    module = "hvdplus.adapters.transports.horovod" if HOROVOD else type(WORLD.transport).gather_objects.__module__
    monkeypatch.setattr(f"{module}.gather_in_parts", watched)
    return longest


def test_objects_of_any_length(short_messages):
    mine = os.urandom(5000 * (RANK + 1))
    everyone = hvd._require_world().transport.gather_objects(mine)
    assert [len(each) for each in everyone] == [5000 * (rank + 1) for rank in range(SIZE)] and everyone[RANK] == mine
    assert short_messages[0] == 2000 // SIZE
    assert hvd.identical([torch.zeros(1)] * 100)


def test_states_of_any_length(short_messages):
    shared = torch.arange(600.0)
    state = {
        "table": {0: torch.arange(1000.0).bfloat16(), "numpy": np.arange(700)},
        "twice": [shared, shared],
        "view": torch.arange(5000)[3:5],
        "scalars": (1, None, "words" * 300, torch.tensor(True)),
    }
    arrived = Collectives(WORLD).broadcast_state(state if RANK == 1 else None, 1)
    assert short_messages[0] <= 2000 // SIZE
    assert torch.equal(arrived["table"][0], state["table"][0]) and arrived["table"][0].dtype == torch.bfloat16
    assert np.array_equal(arrived["table"]["numpy"], state["table"]["numpy"])
    assert arrived["twice"][0] is arrived["twice"][1] and torch.equal(arrived["twice"][0], shared)
    assert torch.equal(arrived["view"], torch.tensor([3, 4])) and arrived["view"].untyped_storage().nbytes() == 16
    assert arrived["scalars"][:3] == (1, None, "words" * 300) and bool(arrived["scalars"][3])


def test_optimizer_states_of_any_length(short_messages):
    net, optimizer = linear(RANK, torch.optim.Adam, "int8", settings={"weights_check_steps": 0})
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.full((1, 20), 1.0 + RANK)).square().sum().backward()
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5 * (RANK + 1)
    hvd.broadcast_parameters(net.state_dict(), root_rank=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert hvd.identical(net) and hvd.identical(state["exp_avg"] for state in optimizer.state.values())
    assert short_messages[0] <= 2000 // SIZE


def test_an_optimizer_without_state_has_gradients_of_zeros_afterwards_as_with_horovod():
    net = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Embedding(5, 2, sparse=True), torch.nn.Linear(2, 2)])
    net[0].bias.requires_grad_(False)
    net[2].weight.grad = torch.ones(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), compression="none")
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=net)
    assert torch.equal(net[0].weight.grad, torch.zeros(2, 2)) and net[0].bias.grad is None
    assert net[1].weight.grad is None and torch.equal(net[2].weight.grad, torch.ones(2, 2))


OTHER_TYPES = [torch.bfloat16, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16]
TYPES = [*OTHER_TYPES, torch.float32, torch.float16, torch.int64, torch.int16, torch.uint8]


@pytest.mark.parametrize("dtype", TYPES)
def test_tensors_of_every_type_are_broadcast(dtype):
    torch.manual_seed(RANK)
    tensors = [(torch.randn(shape) * 3).to(dtype) for shape in ((), (5,), (2, 3, 4))]
    tensors.append((torch.randn(4, 6) * 3).to(dtype).t())  # not contiguous
    if dtype not in OTHER_TYPES and HOROVOD:
        tensors.pop()  # Horovod's own rules
    torch.manual_seed(1)
    expected = [(torch.randn(shape) * 3).to(dtype) for shape in ((), (5,), (2, 3, 4))]
    expected.append((torch.randn(4, 6) * 3).to(dtype).t())
    hvd.broadcast_parameters({f"{dtype}.{i}": tensor for i, tensor in enumerate(tensors)}, root_rank=1)
    for tensor, wanted in zip(tensors, expected, strict=False):
        assert torch.equal(
            tensor.contiguous().view(-1).view(torch.uint8), wanted.contiguous().view(-1).view(torch.uint8)
        )
    mine = torch.ones(3).to(dtype) if RANK else torch.zeros(3).to(dtype)
    copy = hvd.broadcast(mine, root_rank=1, name=f"copy {dtype}")
    assert copy.dtype == dtype and bool((copy.to(torch.complex128) == 1).all())
    assert RANK or bool((mine.to(torch.complex128) == 0).all())
    assert hvd.broadcast_(mine, root_rank=1, name=f"in place {dtype}") is mine and torch.equal(mine, copy)


def test_a_model_of_bfloat16_begins_equal():
    torch.manual_seed(RANK)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).bfloat16()
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_parameters(list(net.named_parameters()), root_rank=0)
    assert hvd.identical(net)


@without_negotiation
def test_parameters_that_differ_in_shape_are_not_broadcast():
    with pytest.raises(ValueError, match=r"ranks 0 and 1: \('w', \(1,\), 'float32'\) against \('w', \(4,\)"):
        hvd.broadcast_parameters({"w": torch.ones(1 + 3 * RANK)}, root_rank=0)


def all_may_join(allowed):
    """Whether a rank may join is the same on all ranks; nobody waits for ever."""
    hvd.barrier()
    if not allowed:
        with pytest.raises(RuntimeError, match="same number of steps"):
            hvd.join()
    elif HOROVOD:
        assert hvd.join() in range(SIZE)
    hvd.barrier()


def test_ranks_decide_together_whether_they_may_join():
    gc.collect()
    net, optimizer = linear(compression="none")
    all_may_join(True)
    net, optimizer = linear(compression="int8")
    all_may_join(False)
    optimizer.circle = optimizer  # waits for the garbage collector
    del net, optimizer
    all_may_join(True)
    if HOROVOD:
        net, optimizer = linear(compression="int8")
        if RANK == 0:
            del net, optimizer
        all_may_join(True)


@pytest.mark.skipif(not HOROVOD, reason="without Horovod nobody joins")
def test_a_rank_that_joins_alone_is_told_in_the_end(monkeypatch):
    monkeypatch.setattr(hvd, "JOIN_SECONDS", 0.5)
    net, optimizer = linear(compression="int8")
    if RANK == 0:
        with pytest.raises(RuntimeError, match="same number of steps"):
            hvd.join()
    else:
        time.sleep(1.5)
        with pytest.raises(RuntimeError, match="same number of steps"):
            hvd.join()
    hvd.barrier()
