"""What Keras promises, on any of its backends (KERAS_BACKEND), on as many ranks as it was started on."""

import itertools
import os

os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")

import keras
import numpy as np
import pytest
from picking import any_transport, few, several

import hvdplus.keras as hvd
from hvdplus.control.controller import Controller

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
TORCH = keras.backend.backend() == "torch"
LEVELS = few("auto", once=["int8"])
if TORCH:
    LEVELS = few("int8", "auto", once=["none", "fp16", "lowrank:2", "topk:0.2:32+int8"], sizes=(2, 4))
"""``keras_ranks.py`` runs the others on TensorFlow, where each takes a compilation."""
uncrowded = pytest.mark.ranks(*((1, 2, 4) if TORCH else (1, 2)))
"""Where ranks outnumber cores, compiling takes minutes. What four ranks add to two is told by PyTorch, which Keras' and
hvdplus' optimizers treat alike, and for TensorFlow's exchange by ``keras_ranks.py``."""
TRANSPORT = hvd._require_world().transport.name
MPI4PY = TRANSPORT == "mpi4py"


@pytest.fixture
def several_buckets(monkeypatch):
    """Even for small models."""
    monkeypatch.setenv("HVDPLUS_BUCKET_BYTES", "6000")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch, request):
    """Objects that travel in several messages; several buckets. TensorFlow compiles each of them, as it does in all of
    ``keras_ranks.py``: with it, tests have to ask for several."""
    monkeypatch.setattr("hvdplus.transport.PART_BYTES", 1000)
    if TORCH:
        request.getfixturevalue("several_buckets")


def model(seed=0, inputs=True):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(40, activation="tanh"), keras.layers.Dense(30, activation="tanh")]
    return keras.Sequential([*([keras.layers.Input((12,))] if inputs else []), *layers, keras.layers.Dense(3)])


def data(rank=RANK, rows=64):
    rng = np.random.default_rng(rank)
    return rng.standard_normal((rows, 12)).astype(np.float32), rng.integers(0, 3, rows)


def sgd(**keywords):
    return keras.optimizers.SGD(**{"learning_rate": 0.1, "momentum": 0.9, **keywords})


def compiled(net, optimizer, **keywords):
    net.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **keywords)
    return net


def fit(net, optimizer=None, epochs=2, callbacks=(), rank=RANK, **keywords):
    if optimizer is not None:
        compiled(net, optimizer, **keywords)
    x, y = data(rank)
    return net.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a.get_weights(), b.get_weights(), strict=True))


class StopOnOne(keras.callbacks.Callback):
    """The last rank stops after the second epoch, or after the third batch."""

    def __init__(self, each_batch):
        super().__init__()
        self.each_batch = each_batch

    def on_train_batch_end(self, batch, logs=None):
        if self.each_batch and batch == 2 and RANK == SIZE - 1:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1 and RANK == SIZE - 1:
            self.model.stop_training = True


@any_transport
@pytest.mark.parametrize("each_batch", few(True, once=[False], sizes=(1, 2)))
def test_all_ranks_stop_where_one_does(each_batch):
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd(), compression="none")
    together = hvd.callbacks.StopTogetherCallback(each_batch=each_batch)
    history = fit(net, optimizer, epochs=4, callbacks=[StopOnOne(each_batch), together])
    assert len(history.history["loss"]) == (1 if each_batch else 2)
    assert (
        hvd.identical(net) and hvd.allgather_object(int(net.optimizer.iterations)) == [3 if each_batch else 16] * SIZE
    )


def applied(optimizer, variables, grads):
    """One step with these gradients."""
    optimizer.apply([keras.ops.convert_to_tensor(np.asarray(grad, np.float32)) for grad in grads], variables)


def zeros(*shapes):
    return [keras.Variable(np.zeros(shape, np.float32)) for shape in shapes]


@pytest.mark.ranks(1)
def test_none_on_one_rank_is_the_bare_optimizer_bit_for_bit():
    bare, ours = model(), model()
    fit(bare, sgd())
    fit(ours, hvd.DistributedOptimizer(sgd(), compression="none"))
    assert equal(bare, ours)


@several
@pytest.mark.parametrize("level", LEVELS)
def test_ranks_stay_identical_in_fit_and_learn(level):
    net = model(seed=RANK)
    first = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    history = fit(net, hvd.DistributedOptimizer(sgd(), compression=level), epochs=6, callbacks=first)
    assert hvd.identical(net)
    assert history.history["loss"][-1] < history.history["loss"][0]


@any_transport
@uncrowded
@several
def test_the_wire_is_sounded_where_the_controller_asks_for_it_and_nothing_else_changes(monkeypatch):
    seen, sizes = [], itertools.cycle([0, 4096, 0, 8192])
    monkeypatch.setattr(Controller, "probe_bytes", lambda self: next(sizes))
    monkeypatch.setattr(Controller, "observe", lambda self, level, observation: seen.append(observation))
    sounded, silent = model(), model()
    dense = {"dense_steps": 100000}
    fit(sounded, hvd.DistributedOptimizer(sgd(), compression="auto", settings=dense), epochs=3)
    fit(silent, hvd.DistributedOptimizer(sgd(), compression="none"), epochs=3)
    assert hvd.identical(sounded)
    if SIZE == 2:  # with more ranks Horovod's fusion decides about the order of a ring's sums
        assert equal(sounded, silent)
    for mine, plain in zip(sounded.get_weights(), silent.get_weights(), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-4, atol=1e-5)
    assert {each.probe_bytes for each in seen} == {0, 4096, 8192}
    for each in seen:
        assert (each.times.probe > 0) == (each.probe_bytes > 0), each
        assert each.times.probe < each.times.step, each
    assert len({str(theirs) for theirs in hvd.allgather_object(seen)}) == 1


@several
def test_variables_begin_equal_and_the_first_that_differs_is_named(capfd):
    net = model(seed=RANK)
    hvd.broadcast_global_variables(1, net)
    assert hvd.identical(net) and hvd.identical([np.zeros(3)]) and "not identical" not in capfd.readouterr().err
    if RANK == 1:
        net.layers[1].bias.assign(np.ones(30))
    assert not hvd.identical(net)
    line = f"{net.layers[1].bias.path} (float32 (30,)) on rank 1 is not rank 0's; 1 of 6 tensors differ"
    assert (line in capfd.readouterr().err) == (RANK == 0)


@several
def test_optimizers_of_different_classes_are_an_error_on_every_rank():
    kind = keras.optimizers.Adam if RANK == 0 else keras.optimizers.SGD
    with pytest.raises(ValueError, match="Ranks 0 and 1 differ in optimizer: 'Adam' against 'SGD'"):
        hvd.DistributedOptimizer(kind(0.1), compression="none").build(zeros((3, 3)))


@pytest.mark.usefixtures("several_buckets")
@several
def test_none_is_training_on_all_ranks_data_at_once():
    """Every rank's batches side by side, in one process, with the bare optimizer."""
    ours, alone = model(), model()
    fit(ours, hvd.DistributedOptimizer(sgd(), compression="none"), epochs=1)
    compiled(alone, sgd())
    shards = [data(rank) for rank in range(SIZE)]
    for start in range(0, 64, 8):
        part = slice(start, start + 8)
        alone.train_on_batch(*(np.concatenate([shard[i][part] for shard in shards]) for i in (0, 1)))
    for a, b in zip(ours.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@any_transport
@uncrowded
@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm", "clipvalue"])
@pytest.mark.parametrize("passes", [1, 2])
def test_clipping_comes_after_the_exchange_once(clip, passes):
    (variable,) = zeros((3, 3))
    inner = keras.optimizers.SGD(1.0, **{clip: 0.5})
    optimizer = hvd.DistributedOptimizer(
        inner, compression="none", backward_passes_per_step=passes, average_aggregated_gradients=True
    )
    optimizer.build([variable])
    for _ in range(passes):
        applied(optimizer, [variable], [np.full((3, 3), 4.0 * (RANK == 0))])  # a mean of 4 / SIZE
    mean = np.full((3, 3), 4.0 / SIZE)
    clipped = np.minimum(mean, 0.5) if clip == "clipvalue" else mean * min(1.0, 0.5 / np.linalg.norm(mean))
    np.testing.assert_allclose(np.array(variable), -clipped, rtol=1e-5)


def test_accumulated_steps_are_exchanged_once():
    variables = zeros((3, 3), (5,))
    optimizer = hvd.DistributedOptimizer(sgd(learning_rate=1.0, momentum=0.0, gradient_accumulation_steps=3))
    optimizer.build(variables)
    for number in range(6):
        applied(optimizer, variables, [np.full((3, 3), number + RANK), np.full(5, number + RANK)])
        assert all((np.array(v) == 0).all() == (number < 2) for v in variables)
    expected = -(1 + 4 + 2 * (SIZE - 1) / 2)
    assert all(np.allclose(np.array(v), expected, rtol=1e-5) for v in variables)
    assert optimizer.hvdplus.steps <= 2


@any_transport
@uncrowded
def test_what_is_computed_before_the_last_batch_of_a_step_is_no_waiting_for_input():
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=4), compression="none")
    fit(net, optimizer, epochs=12)
    hvd.report(optimizer)
    windows = [record for record in optimizer.hvdplus.log.records if record["kind"] == "window"]
    assert bool(windows) == (RANK == 0)
    assert all(w["input_wait_ms"] == 0 < w["compute_ms"] for w in windows)


@any_transport
@pytest.mark.skipif(not TORCH, reason="hooks that send in backward() are PyTorch's")
def test_accumulation_in_fit_agrees_with_one_large_batch():
    """Hooks must not send what Keras is still accumulating."""
    small, large = model(), model()
    fit(small, hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=2), compression="none"), epochs=1)
    compiled(large, hvd.DistributedOptimizer(sgd(), compression="none"))
    x, y = data()
    large.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
    for a, b in zip(small.get_weights(), large.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    assert hvd.identical(small)


@any_transport
@uncrowded
def test_ema_weight_decay_and_static_loss_scale():
    ours, reference = model(), model()
    options = {"use_ema": True, "ema_momentum": 0.9, "weight_decay": 0.01, "loss_scale_factor": 128.0}
    fit(ours, hvd.DistributedOptimizer(sgd(**options), compression="none"), epochs=2, rank=0)
    fit(reference, sgd(**options), epochs=2, rank=0)  # all ranks have the same data: the mean is everybody's
    for a, b in zip(ours.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert hvd.identical(ours)


@any_transport
@uncrowded
@pytest.mark.parametrize("explicit", [False, True], ids="the script wraps it: {}".format)
@pytest.mark.parametrize("passes", [None, 2], ids=["", "accumulating"])
@pytest.mark.parametrize("level", ["none", "int8"] if TORCH else ["int8"])
def test_loss_scaling_skips_on_all_ranks_together(level, passes, explicit):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        net = model()
    finally:
        keras.config.set_dtype_policy("float32")
    inner = sgd(gradient_accumulation_steps=passes)
    bare = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0) if explicit else inner
    compiled(net, hvd.DistributedOptimizer(bare, compression=level))
    scaler = net.optimizer
    assert isinstance(scaler, keras.optimizers.LossScaleOptimizer)
    x, y = data()
    for _ in range(4):
        net.train_on_batch(x[:8], y[:8])
    before, scale, taken = net.get_weights(), float(scaler.dynamic_scale), int(scaler.iterations)
    poisoned = x[:8].copy()
    if RANK == SIZE - 1:
        poisoned[0, 0] = np.inf
    for _ in range(2):
        net.train_on_batch(poisoned, y[:8])
    assert float(scaler.dynamic_scale) == scale / 4, "halved twice, on all ranks"
    assert int(scaler.iterations) == taken
    assert all(np.array_equal(a, b) for a, b in zip(before, net.get_weights(), strict=True))
    losses = [float(np.ravel(net.train_on_batch(x[:8], y[:8]))[0]) for _ in range(12)]
    assert int(scaler.iterations) == taken + 12 // (passes or 1)
    assert hvd.identical(net) and np.isfinite(losses).all()


@uncrowded
@several
@pytest.mark.skipif(MPI4PY, reason="what is on its way when the error comes has no names to be told apart by")
def test_a_layer_that_is_frozen_on_one_rank_only_is_an_error_on_every_rank():
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd(), compression="none")
    fit(net, optimizer)
    net.layers[0].trainable = RANK != SIZE - 1
    with pytest.raises(Exception, match=rf"differ between rank 0 and rank\(s\) {SIZE - 1}\."):
        fit(net, optimizer)
    assert hvd.allgather_object(RANK) == list(range(SIZE)), "all are here"


@any_transport
@several
def test_residuals_are_in_units_of_the_unscaled_gradient():
    """A scale that doubles must not rescale what is held back."""
    (variable,) = zeros((40, 30))
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0, dynamic_growth_steps=3)
    scaler = hvd.DistributedOptimizer(scaler, compression="topk:0.3:8")
    scaler.build([variable])
    total = np.zeros((40, 30))
    grad = np.random.default_rng(RANK).standard_normal((40, 30))
    everyone = np.mean([np.random.default_rng(rank).standard_normal((40, 30)) for rank in range(SIZE)], axis=0)
    for _ in range(30):
        scaler.scale_loss(keras.ops.convert_to_tensor(1.0))
        applied(scaler, [variable], [grad * float(scaler.dynamic_scale)])
        total += everyone
    assert float(scaler.dynamic_scale) >= 2**10 * 8
    assert np.abs(total + np.array(variable)).max() < 0.3 * np.abs(total).max()


@pytest.mark.usefixtures("several_buckets")
@any_transport
@uncrowded
def test_layers_frozen_between_fits():
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd(), compression="int8")
    fit(net, optimizer)
    frozen, held_back = net.layers[0].get_weights(), memory(net)[0]
    net.layers[0].trainable = False
    fit(net, optimizer)
    for a, b in zip(held_back[:2], memory(net)[0][:2], strict=True):  # kernel and bias
        np.testing.assert_array_equal(a, b)
    assert all(np.array_equal(a, b) for a, b in zip(frozen, net.layers[0].get_weights(), strict=True))
    net.layers[0].trainable = True
    fit(net, optimizer)
    assert not all(np.array_equal(a, b) for a, b in zip(frozen, net.layers[0].get_weights(), strict=True))
    assert hvd.identical(net)


@any_transport
@uncrowded
@several
def test_models_that_build_themselves_late():
    net = model(seed=RANK, inputs=False)
    fit(net, hvd.DistributedOptimizer(sgd()), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert hvd.identical(net)


@any_transport
@uncrowded
@several
def test_partial_optimizers_leave_layers_to_their_ranks():
    net = model()
    own = net.layers[0]
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=own.variables)
    optimizer = hvd.PartialDistributedOptimizer(sgd(momentum=0.0), compression="none", local_layers=own)
    fit(net, optimizer, callbacks=[broadcast])
    assert hvd.identical([v for layer in net.layers[1:] for v in layer.get_weights()])
    assert not hvd.identical(own.get_weights())


@any_transport
def test_local_gradients_are_scaled_or_not():
    for scaled in (True, False):
        layer = keras.layers.Dense(2, kernel_initializer="zeros")
        layer.build((3,))
        other = zeros((2, 2))
        optimizer = hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(1.0), compression="none", local_layers=[layer], scale_local_gradients=scaled
        )
        variables = [*layer.trainable_variables, *other]
        optimizer.build(variables)
        applied(optimizer, variables, [np.full(v.shape, RANK + 1.0) for v in variables])
        np.testing.assert_allclose(np.array(layer.kernel), -(RANK + 1.0) / (SIZE if scaled else 1))
        np.testing.assert_allclose(np.array(other[0]), -(SIZE + 1) / 2)


@any_transport
@several
def test_ranks_skip_together_where_a_local_gradient_is_not_finite():
    """Each rank sees its own ones alone."""
    layer = keras.layers.Dense(2, kernel_initializer="zeros")
    layer.build((3,))
    other = zeros((2, 2))
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    optimizer = hvd.PartialDistributedOptimizer(scaler, compression="none", local_layers=[layer])
    variables = [*layer.trainable_variables, *other]
    for step in range(3):
        gradients = [np.full(v.shape, 8.0) for v in variables]
        if RANK == 0 and step == 1:
            gradients[0][0, 0] = np.inf
        applied(optimizer, variables, gradients)
    assert hvd.identical([np.array(other[0]), np.array(optimizer.dynamic_scale)])
    assert float(np.array(optimizer.dynamic_scale)) == 4.0
    assert np.isfinite(np.array(layer.kernel)).all()


@any_transport
@several
def test_nobody_joins_while_an_optimizer_needs_all_ranks():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="none")
    optimizer.build(zeros((3, 2)))
    with pytest.raises(RuntimeError, match="ranks compress and decide together in every step"):
        hvd.join()


@any_transport
@several
def test_an_optimizer_whose_build_has_failed_says_why_again():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), settings={"window_steps": 10 + RANK})
    variables = zeros((3, 2))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"Ranks 0 and 1 differ in window_steps: 10 against 11"):
            applied(optimizer, variables, [np.ones((3, 2))])


def memory(net):
    """What hvdplus remembers of a model's training."""
    state = net.optimizer._hvdplus.exchange.state()
    known = state["coordinator"]
    return [state["residuals"][i] for i in sorted(state["residuals"])], known["steps"], known["plan"]


@pytest.mark.usefixtures("several_buckets")
@any_transport
@uncrowded
@several
@pytest.mark.parametrize(
    "level", few("lowrank:2", "auto", once=["none", "fp16", "int8"] if TORCH else [], sizes=(2, 4))
)
def test_saved_models_go_on_as_if_never_stopped(tmp_path, level):
    net = model()
    fit(net, hvd.DistributedOptimizer(sgd(), compression=level), epochs=3)
    path = tmp_path / f"rank{RANK}.keras"  # every rank its own
    net.save(path)
    again = hvd.load_model(path, compression=level)
    for a, b in zip(memory(net)[0], memory(again)[0], strict=True):
        np.testing.assert_array_equal(a, b)
    assert memory(net)[1:] == memory(again)[1:]
    for each in (net, again):
        fit(each, epochs=2)
    assert hvd.identical(again)
    if level != "auto":  # which decides by the clock
        for a, b in zip(net.get_weights(), again.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=0 if SIZE <= 2 else 1e-3)


@pytest.mark.usefixtures("several_buckets")
@uncrowded
def test_one_ranks_file_is_everybodys_once_consolidated(tmp_path):
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd(), compression="int8")
    fit(net, optimizer, epochs=2)
    optimizer.consolidate_state_dict()
    path = hvd.broadcast_object(str(tmp_path / "shared.keras"), root_rank=0)
    if RANK == 0:
        net.save(path)
    hvd._require_world().transport.barrier()
    again = hvd.load_model(path, compression="int8")
    assert hvd.identical(memory(again)[0]) and np.abs(np.concatenate([r.ravel() for r in memory(again)[0]])).max() > 0
    for level in ("none", "auto"):
        dense = hvd.load_model(path, compression=level)  # what was held back is paid out, not lost
        assert any(map(np.any, memory(dense)[0]))
        fit(dense, epochs=2)
        assert hvd.identical(dense) and not any(map(np.any, memory(dense)[0]))


@any_transport
@uncrowded
@several
def test_different_checkpoints_on_different_ranks_are_an_error_on_all(tmp_path):
    net = model()
    path = tmp_path / "net.keras"
    fit(net, hvd.DistributedOptimizer(sgd(), compression="lowrank:2"), epochs=1)
    if RANK == SIZE - 1:
        net.save(path)
    fit(net, epochs=1)
    if RANK != SIZE - 1:
        net.save(path)

    def train():
        fit(hvd.load_model(path, compression="lowrank:2"), epochs=1)

    with pytest.raises(RuntimeError, match="different states"):
        train()
    hvd._require_world().transport.barrier()


@any_transport
@uncrowded
def test_saved_models_load_without_hvdplus(tmp_path):
    net = model()
    fit(net, hvd.DistributedOptimizer(sgd(), compression="int8"), epochs=1)
    path = tmp_path / "net.keras"
    net.save(path)
    bare = keras.models.load_model(path)
    assert type(bare.optimizer) is type(sgd())
    for a, b in zip(bare.optimizer.variables, net.optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.array(a), np.array(b))


@any_transport
@uncrowded
def test_logs_hold_times_level_and_ratio(tmp_path):
    net = model()
    callbacks = [hvd.callbacks.ExchangeLogsCallback(), keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))]
    history = fit(net, hvd.DistributedOptimizer(sgd(), compression="fp16"), epochs=4, callbacks=callbacks)
    last = {name: values[-1] for name, values in history.history.items()}
    assert last["hvdplus_step_ms"] > 0 and last["hvdplus_ratio"] == pytest.approx(2.0)
    assert last["hvdplus_level"] == 0, "the ladder's only one"
    assert "hvdplus_exposed_comm_ms" in (tmp_path / "log.csv").read_text().splitlines()[0]


@any_transport
@pytest.mark.skipif(not TORCH, reason="graphs that differ from rank to rank are PyTorch's")
def test_a_variable_that_one_rank_does_not_use_is_updated_alike():
    used, other, nobodys = zeros((4, 4), (3, 3), (2, 2))
    nobodys.assign(np.ones((2, 2)))
    optimizer = hvd.DistributedOptimizer(sgd(learning_rate=1.0, momentum=0.0, weight_decay=0.1), compression="none")
    optimizer.build([used, other, nobodys])
    one = keras.ops.convert_to_tensor(np.ones((3, 3), np.float32))
    grads = [keras.ops.convert_to_tensor(np.ones((4, 4), np.float32)), one if RANK == 0 else None, None]
    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        optimizer.apply(grads, [used, other, nobodys])
    np.testing.assert_allclose(np.array(other), -1.0 / SIZE)
    assert (np.array(nobodys) == 1).all(), "weight decay must not move what nobody uses"


@any_transport
@pytest.mark.skipif(TRANSPORT.startswith("torch-"), reason="torch.distributed is the transport")
@pytest.mark.skipif(not TORCH, reason="about PyTorch's own data parallelism")
@several
def test_a_second_averager_is_refused(tmp_path):
    import torch

    meeting = hvd.broadcast_object(str(tmp_path / "meeting"), root_rank=0)
    torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=RANK, world_size=SIZE)
    try:
        with pytest.raises(ValueError, match="averaged twice"):
            fit(model(), hvd.DistributedOptimizer(sgd(), compression="none"), epochs=1)
    finally:
        torch.distributed.destroy_process_group()


def test_the_launch_is_the_one_that_was_meant():
    assert hvd._require_world().transport.name == os.environ["EXPECTED_TRANSPORT"]
    assert int(os.environ["EXPECTED_RANKS"]) == SIZE
    assert keras.backend.backend() == os.environ["KERAS_BACKEND"]
