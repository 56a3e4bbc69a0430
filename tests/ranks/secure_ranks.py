"""Secure aggregation in Keras, on either backend, and in PyTorch: training goes on bit for bit as without masks."""

import os
import pickle

os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")

import keras
import numpy as np
import pytest
from picking import any_transport

import hvdplus.keras as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
TRANSPORTS = [hvd._require_world().transport]
TORCH = keras.backend.backend() == "torch"
if TORCH:
    import torch
    import torch.distributed as dist

    import hvdplus.torch as torch_hvd
    from hvdplus.torch import ddp

    torch_hvd.init()
    torch.set_num_threads(1)
    TRANSPORTS.append(torch_hvd._require_world().transport)
on_torch = pytest.mark.skipif(not TORCH, reason="of PyTorch")
HIDDEN, BARE = {"secure_aggregation": True}, {"secure_aggregation": False}
"""Settings of two jobs that are alike but for the masks."""


@pytest.fixture
def sent(monkeypatch):
    """(name, type) of what this rank gives to the network, as often as it does."""
    seen = []

    def spied(bare):
        def start(array, name, scale=1.0):
            seen.append((name, str(array.dtype)))
            return bare(array, name, scale)

        return start

    for transport in TRANSPORTS:
        transport = getattr(transport, "_transport", transport)  # what runs, not what is traced
        monkeypatch.setattr(transport, "start", spied(transport.start))
    return seen


def net():
    rng = np.random.default_rng(0)
    made = keras.Sequential([keras.layers.Input((12,)), keras.layers.Dense(40, "tanh"), keras.layers.Dense(3)])
    made.set_weights([rng.standard_normal(w.shape).astype(np.float32) * 0.3 for w in made.get_weights()])
    return made


def fitted(level, settings, **keywords):
    made, rng = net(), np.random.default_rng(RANK)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), compression=level, settings=settings, **keywords
    )
    made.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    x, y = rng.standard_normal((64, 12)).astype(np.float32), rng.integers(0, 3, 64)
    made.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return made.get_weights()


# On TensorFlow every level takes two compilations.
@pytest.mark.parametrize("level", ["int8", "topk:0.2:32+int8", "powersgd:2+int8"] if TORCH else ["powersgd:2+int8"])
def test_keras_trains_as_without_masks(level, sent):
    hidden = fitted(level, HIDDEN)
    floats = {name for name, dtype in sent if "float" in dtype}
    traced = not TORCH and TRANSPORTS[0].name != "mpi4py"  # what never runs, too
    assert traced or all(".metadata" in name or ".agree" in name for name in floats), floats
    assert len(sent) > len(floats)
    for one, other in zip(hidden, fitted(level, BARE), strict=True):
        assert np.array_equal(one, other)
    assert any(not np.array_equal(one, begun) for one, begun in zip(hidden, net().get_weights(), strict=True))


def test_keras_local_steps_train_as_without_masks():
    for one, other in zip(fitted("int8", HIDDEN, every=4), fitted("int8", BARE, every=4), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("level", ["auto", "fp16", "none"])
def test_keras_levels_that_cannot_be_masked(level):
    with pytest.raises(ValueError, match=f"needs a level of integers .*compression={level}"):
        fitted(level, HIDDEN)
    assert hvd.allgather_object(RANK) == list(range(SIZE))


def test_ranks_have_to_agree_on_it():
    with pytest.raises(ValueError, match="differ in secure_aggregation: True against False"):
        fitted("int8", {"secure_aggregation": RANK == 0})


def trained(level, settings, attach=False, **keywords):
    """Weights of a PyTorch model after 12 steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
    optimizer, run = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model
    if attach:
        run = torch.nn.parallel.DistributedDataParallel(model)
        ddp.attach(run, optimizer, compression=level, settings=settings)
    else:
        named = model.named_parameters()
        optimizer = torch_hvd.DistributedOptimizer(optimizer, named, compression=level, settings=settings, **keywords)
    for step in range(12):
        draw = torch.Generator().manual_seed(100 * step + RANK)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(run(torch.randn(8, 12, generator=draw)), torch.arange(8) % 3).backward()
        optimizer.step()
    return model, optimizer


def alike(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@on_torch
@pytest.mark.parametrize("level", ["int8", "int4:stochastic", "signsgd", "topk:0.2:32+int8", "lowrank:2+int8"])
def test_pytorch_trains_as_without_masks(level, sent):
    hidden, _ = trained(level, HIDDEN)
    assert {name.rpartition(".")[0] for name, dtype in sent if "float" in dtype} <= {
        f"{sent[0][0].partition('.')[0]}.metadata"
    }
    bare, _ = trained(level, BARE)
    assert alike(hidden, bare)


@on_torch
@pytest.mark.parametrize("keywords", [{"every": 3}, {"attach": True}], ids=str)
def test_pytorch_otherwise(keywords):
    if "attach" in keywords and not (dist.is_available() and dist.is_initialized()):
        pytest.skip("DistributedDataParallel needs torch.distributed")
    (hidden, _), (bare, _) = trained("int8", HIDDEN, **keywords), trained("int8", BARE, **keywords)
    assert alike(hidden, bare)


@any_transport
@pytest.mark.skipif(TORCH, reason="of TensorFlow")
def test_the_tape_trains_as_without_masks():
    import tensorflow as tf

    import hvdplus.tensorflow as tf_hvd

    def weights(settings):
        variable = tf.Variable(tf.reshape(tf.range(600, dtype=tf.float32) / 600, (30, 20)))
        for step in range(6):
            x = tf.constant(np.random.default_rng((step, RANK)).standard_normal((8, 30)), tf.float32)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(x @ variable))
            tape = tf_hvd.DistributedGradientTape(tape, compression="int8", settings=settings)
            (gradient,) = tape.gradient(loss, [variable])
            variable.assign_sub(0.001 * gradient)
        return variable.numpy()

    hidden = weights(HIDDEN)
    assert np.array_equal(hidden, weights(BARE))
    assert np.abs(hidden.ravel() - np.arange(600) / 600).max() > 0.01


@on_torch
def test_a_broadcast_of_the_optimizer_leaves_residuals_where_they_are(monkeypatch):
    told = []
    gather = TRANSPORTS[1].gather_objects
    model, optimizer = trained("topk:0.2:32+int8", HIDDEN)
    before = {i: r.clone() for i, r in optimizer.state_dict()["hvdplus"]["residuals"].items()}
    assert any(residual.abs().max() > 0 for residual in before.values())
    monkeypatch.setattr(
        TRANSPORTS[1], "gather_objects", lambda value, what="objects": told.append(value) or gather(value, what)
    )
    torch_hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    after = optimizer.state_dict()["hvdplus"]["residuals"]
    kept = [torch.equal(before[i], after[i]) for i in before]
    assert all(kept) if RANK == 0 else not any(residual.abs().max() > 0 for residual in after.values())
    assert told
    sent = pickle.dumps(told)
    assert not any(residual.numpy().tobytes() in sent for residual in before.values() if residual.any())


@on_torch
def test_what_would_show_a_residual_is_refused():
    model, optimizer = trained("int8", HIDDEN)
    with pytest.raises(ValueError, match="would show what one rank sends"):
        optimizer.consolidate_state_dict()
    torch.nn.functional.cross_entropy(model(torch.ones(8, 12)), torch.arange(8) % 3).backward()
    optimizer.step()  # and training goes on
