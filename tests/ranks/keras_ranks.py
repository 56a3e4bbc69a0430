"""hvdplus.keras on as many ranks as it was started on."""

import os

os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # some tests make some

import keras
import numpy as np
import pytest
import tensorflow as tf
from picking import any_transport, few, one_or_two, several, two
from reference import Reference, at_any_price, check_preview

import hvdplus.keras as hvd
from hvdplus.adapters.numpy.backend import NumpyExchange, Rows
from hvdplus.adapters.tensorflow import graph
from hvdplus.adapters.transports.in_process import run as run_in_process
from hvdplus.compression import IntB
from hvdplus.exchange.metadata import Slot, length
from hvdplus.transport import TransportError

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
SHAPES = [(24, 40), (40,), (3, 3, 3, 16), (40, 24), (7,), (1,)]
HOROVOD = hvd._require_world().transport.name.startswith("horovod")


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Several buckets, even for small models."""
    monkeypatch.setenv("HVDPLUS_BUCKET_BYTES", "6000")


@pytest.fixture
def one_bucket(small_buckets, monkeypatch):
    """Every bucket is compiled by itself: where a test is about something else, one is enough."""
    monkeypatch.delenv("HVDPLUS_BUCKET_BYTES")


about_no_buckets = pytest.mark.usefixtures("one_bucket")


def model(seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.layers.Input((12,)),
            keras.layers.Dense(40, activation="tanh"),
            keras.layers.Dense(30, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )


def data(rank=RANK, rows=64):
    rng = np.random.default_rng(rank)
    return rng.standard_normal((rows, 12)).astype(np.float32), rng.integers(0, 3, rows)


def sgd(**keywords):
    return keras.optimizers.SGD(**{"learning_rate": 0.1, "momentum": 0.9, **keywords})


def fit(net, optimizer=None, epochs=2, callbacks=(), **keywords):
    """Without an optimizer: goes on with the step that was compiled before."""
    if optimizer is not None:
        net.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **keywords)
    x, y = data()
    return net.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a.get_weights(), b.get_weights(), strict=True))


def gradients(step, rank, shapes=SHAPES):
    rng = np.random.default_rng([step, rank])
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def plain(compression, shapes=SHAPES, **keywords):
    """Variables and an optimizer that takes away exactly what arrives."""
    variables = [keras.Variable(np.zeros(shape, np.float32)) for shape in shapes]
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0, **keywords.pop("sgd", {})), compression=compression, **keywords
    )
    optimizer.build(variables)
    return variables, optimizer


def compiled(optimizer, variables):
    """A train step that applies the gradients it is given, compiled once."""

    @tf.function
    def step(*grads):
        optimizer.apply(list(grads), variables)

    return lambda grads: step(*(tf.constant(grad) for grad in grads))


def raises_everywhere(kind, match, function):
    with pytest.raises(kind, match=match):
        function()
    hvd._require_world().transport.barrier()


@pytest.mark.ranks(1)
def test_none_on_one_rank_is_the_bare_optimizer_bit_for_bit():
    bare, ours = model(), model()
    fit(bare, sgd())
    fit(ours, hvd.DistributedOptimizer(sgd(), compression="none"))
    assert equal(bare, ours)


@about_no_buckets
@two
@any_transport
def test_stock_horovod_trains_its_ranks_apart_and_ours_does_not():
    net = model()
    fit(net, hvd.DistributedOptimizer(sgd(), compression="none"))
    assert hvd.identical(net)
    if HOROVOD:
        import horovod.tensorflow.keras as stock

        theirs = model()
        try:
            fit(theirs, stock.DistributedOptimizer(sgd()))
        except Exception as error:  # noqa: BLE001 - a version that fails aloud would be better than the present one
            pytest.skip(f"stock Horovod's optimizer fails here: {error}")
        assert not hvd.identical(theirs)


@pytest.mark.skipif(not HOROVOD, reason="compares with stock Horovod's all-reduce")
@several
def test_none_is_a_hand_written_horovod_step():
    import horovod.tensorflow as stock

    theirs, ours = model(), model()

    class ByHand(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            reduced = [stock.allreduce(g, op=stock.Average, name=f"hand.{i}") for i, g in enumerate(grads)]
            super().apply(reduced, trainable_variables)

    fit(theirs, ByHand(0.1, momentum=0.9))
    fit(ours, hvd.DistributedOptimizer(sgd(), compression="none"))
    if SIZE <= 2:  # beyond, the order of a ring's sum depends on the layout
        assert equal(theirs, ours)
    for a, b in zip(theirs.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "level",
    few(
        *("lowrank:2", "qsgd:8"),
        pytest.param("none", marks=one_or_two),  # on four a step by hand, above, tells the same
        pytest.param("topk:0.2:32+int8", marks=[any_transport, one_or_two]),
        once=["fp16", "lowrank:2+fp16", "powersgd:2", "topk2:0.2:32"],
    ),
)
def test_agrees_with_numpy(level):
    """With what the reference computes, and with what NumPy's exchange does."""
    variables, optimizer = plain(level)
    exchange = optimizer._hvdplus.exchange
    reference = Reference(level, exchange.buckets, SIZE)
    if SIZE == 1 and level == "none":
        return
    step = compiled(optimizer, variables)
    for number, theirs in enumerate(in_numpy(level, SHAPES, gradients, 7)):
        before = [np.array(v) for v in variables]
        step(gradients(number, RANK))
        for means in (theirs, reference.step([gradients(number, rank) for rank in range(SIZE)])):
            for v, old, mean in zip(variables, before, means, strict=True):
                tolerance = 2e-3 if "fp16" in level else 5e-5  # fp16 sums round once a hop of the ring
                np.testing.assert_allclose(old - np.array(v), mean, rtol=0, atol=tolerance * max(np.abs(mean).max(), 1))
    assert hvd.identical(variables)


@several
@pytest.mark.parametrize("level", few("auto", once=["lowrank:2"], rarely=["topk:0.2:32+int8"]))
def test_ranks_stay_identical_in_fit(level):
    net = model(seed=RANK)
    optimizer = hvd.DistributedOptimizer(sgd(), compression=level)
    history = fit(
        net,
        optimizer,
        epochs=8,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
    )
    assert hvd.identical(net)
    assert hvd.identical([np.array(history.history["loss"])])  # averaged metrics are the same everywhere
    assert history.history["loss"][-1] < history.history["loss"][0]


@any_transport
@two
def test_nothing_is_lost_across_changes_of_level(monkeypatch):
    monkeypatch.setenv("HVDPLUS_LADDER", "none,lowrank:1,lowrank:2")
    monkeypatch.setenv("HVDPLUS_DENSE_STEPS", "100000")  # the test turns the dial, not the controller
    monkeypatch.setenv("HVDPLUS_DRAIN_STEPS", "5")
    variables, optimizer = plain("auto")
    step = compiled(optimizer, variables)
    total = [np.zeros(shape) for shape in SHAPES]
    number = 0
    for level in [0, 1, 2, 0, 2, 1, 0, 0]:
        optimizer.hvdplus.set_level(level)
        for _ in range(7):
            grads = gradients(number, RANK)
            for t, g in zip(total, grads, strict=True):
                t += g
            step(grads)
            number += 1
        assert hvd.identical(variables)
    exchange = optimizer._hvdplus.exchange
    left = [np.zeros(shape) for shape in SHAPES]
    for state in exchange.states:
        residual = state.held.numpy().astype(np.float64)
        for i, (part, shape) in state.places.items():
            left[i] += residual[part].reshape(shape)
    gathered = hvd.allgather_object((total, left))
    for i, v in enumerate(variables):
        grads = sum(values[i] for values, _ in gathered)
        residual = sum(values[i] for _, values in gathered)
        np.testing.assert_allclose(-np.array(v, np.float64) * SIZE + residual, grads, atol=2e-3)
        assert np.abs(residual).max() == 0.0  # two stretches of 7 dense steps pay out everything in 5
    assert exchange.traces <= 3  # one for building, one for the compiled step; a level is no new trace


@two
@pytest.mark.parametrize("level", few("qsgd:8", once=["fp16", "lowrank:2"]))
def test_non_finite_gradient_of_one_rank_reaches_all_and_leaves_no_trace(level):
    variables, optimizer = plain(level)
    step = compiled(optimizer, variables)
    for number in range(4):
        step(gradients(number, RANK))
    exchange = optimizer._hvdplus.exchange

    def memory():
        states = exchange.states
        held = [ctx.variable.numpy() for state in states for ctx in state.contexts.values()]
        return held + [state.held.numpy() for state in states if state.held is not None]

    for number, value in ((4, np.nan), (6, np.inf)):
        before, plan = memory(), exchange.coordinator.plan._replace(measurement=0)
        kept = [np.array(v) for v in variables]
        grads = gradients(number, RANK)
        if RANK == SIZE - 1:
            grads[3][2, 5] = value
        step(grads)
        assert not np.isfinite(np.array(variables[3])).all()
        assert exchange.coordinator.plan._replace(measurement=0) == plan
        assert all(a.tobytes() == b.tobytes() for a, b in zip(before, memory(), strict=True))
        for v, value_before in zip(variables, kept, strict=True):
            v.assign(value_before)
        step(gradients(number + 1, RANK))
        assert all(np.isfinite(np.array(v)).all() for v in variables)


@two
@pytest.mark.parametrize("level", few("qsgd:8", once=["fp16", "lowrank:2", "topk:0.2:32+int8"]))
def test_a_gradient_too_large_for_the_payload_does_not_stay_for_ever(level):
    variables, optimizer = plain(level)
    for size in [1.0, 3e38, 1.0, 1.0]:
        for v in variables:
            v.assign(np.zeros(v.shape))
        optimizer.apply([np.full(shape, size, np.float32) for shape in SHAPES], variables)
        clips = level == "qsgd:8"  # integers without a residual clip it, and go on
        assert all(np.isfinite(np.array(v)).all() for v in variables) == (size == 1.0 or clips)


@several
def test_fp16_that_overflows_is_sent_again_in_full_width():
    variables, optimizer = plain("fp16")
    step = compiled(optimizer, variables)
    for number, size in enumerate([1.0, 1e6, 1.0]):
        for v in variables:
            v.assign(np.zeros(v.shape))
        step([grad * np.float32(size) for grad in gradients(number, RANK)])
        for i, v in enumerate(variables):
            mean = np.mean([gradients(number, rank)[i].astype(np.float64) * size for rank in range(SIZE)], axis=0)
            np.testing.assert_allclose(-np.array(v), mean, rtol=0, atol=2e-3 * size)


@about_no_buckets
@any_transport
@two
def test_random_generators_stay_apart_and_nothing_else_does():
    keras.utils.set_random_seed(RANK)
    net = keras.Sequential(
        [keras.layers.Input((12,)), keras.layers.Dense(8, name="seedling"), keras.layers.Dropout(0.5)]
        + [keras.layers.Dense(3)]
    )
    fit(net, hvd.DistributedOptimizer(sgd()), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert hvd.identical(net)
    seeds = [np.array(v) for v in net.variables if v.path.endswith("seed_generator_state")]
    assert seeds and not hvd.identical(seeds)


@any_transport
@several
def test_contexts_that_differ_between_ranks_are_an_error_on_every_rank():
    variables, optimizer = plain("lowrank:2")
    for step in range(3):  # the first two are dense, and teach
        optimizer.apply(gradients(step, RANK), variables)
    if RANK == SIZE - 1:
        for state in optimizer._hvdplus.exchange.states:
            for ctx in state.contexts.values():
                ctx.variable.assign(ctx.variable * (1 + 1e-6))
    raises_everywhere(Exception, "contexts of lowrank:2 differ", lambda: optimizer.apply(gradients(3, RANK), variables))


def test_eager_steps_and_compiled_steps_are_the_same():
    one, eager = plain("fp16")
    two, optimizer = plain("fp16")
    step = compiled(optimizer, two)
    for number in range(3):
        eager.apply([tf.constant(grad) for grad in gradients(number, RANK)], one)
        step(gradients(number, RANK))
    for a, b in zip(one, two, strict=True):
        # Beyond two ranks the order of a ring's sum depends on which tensors Horovod happens to fuse.
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=0, atol=0 if SIZE <= 2 else 1e-2)


@any_transport
@one_or_two
def test_clipping_comes_after_the_exchange():
    variables, optimizer = plain("none", sgd={"global_clipnorm": 1.0})
    grads = [np.full(shape, RANK + 1.0, np.float32) for shape in SHAPES]
    optimizer.apply(grads, variables)
    norm = np.sqrt(sum(np.square(np.array(v)).sum() for v in variables))
    assert norm == pytest.approx(1.0, rel=1e-4)


@any_transport
@one_or_two
def test_accumulated_steps_are_exchanged_once():
    variables, optimizer = plain("none", backward_passes_per_step=3, average_aggregated_gradients=True)
    step = compiled(optimizer, variables)
    for number in range(6):
        step([np.full(shape, number + RANK, np.float32) for shape in SHAPES])
    assert optimizer.hvdplus.steps <= 2
    expected = -(1 + 4 + 2 * (SIZE - 1) / 2)
    assert all(np.allclose(np.array(v), expected, rtol=1e-5) for v in variables)


@any_transport
@two
@pytest.mark.parametrize("eagerly", [False, True])
def test_gradients_of_one_compiled_function_may_be_applied_elsewhere(eagerly):
    """The loss is a value of the function that computes them, and no one else's."""
    weight = keras.Variable(np.ones(3, np.float32))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="none")
    optimizer.build([weight])

    @tf.function
    def computed(x):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(weight * x))
        return tape.gradient(loss, [weight.value])

    def apply(grads):
        optimizer.apply(grads, [weight])

    applied = apply if eagerly else tf.function(apply)
    for _ in range(3):
        applied(computed(tf.fill([3], float(RANK))))
    np.testing.assert_allclose(np.array(weight), 1 - 3 * (SIZE - 1) / 2, rtol=1e-6)


@two
def test_an_optimizer_that_is_built_does_not_begin_to_accumulate():
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([keras.Variable(np.ones(3, np.float32))])
    with pytest.raises(ValueError, match=r"only where they are built. Received: backward_passes_per_step=2"):
        hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2, average_aggregated_gradients=True)


@any_transport
@one_or_two
def test_horovods_own_names_for_compression():
    assert plain(hvd.Compression.fp16)[1].hvdplus.ladder.names == ("fp16",)
    assert plain(hvd.Compression.none)[1].hvdplus.ladder.names == ("none",)


@any_transport
def test_op_sum():
    variables, optimizer = plain("none", op=hvd.Sum)
    optimizer.apply([np.full(shape, 0.5, np.float32) for shape in SHAPES], variables)
    assert all(np.array_equal(np.array(v), np.full(v.shape, -0.5 * SIZE)) for v in variables)


@any_transport
def test_embeddings():
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.layers.Input((2,), dtype="int32"), keras.layers.Embedding(10, 4)])
    start = net.get_weights()[0]
    net.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="none"), lambda y, p: tf.reduce_sum(p))
    net.train_on_batch(np.array([[RANK, 9]]), np.zeros((1, 2, 4)))
    expected = start.copy()
    for rank in range(SIZE):
        expected[rank] -= 1.0 / SIZE
        expected[9] -= 1.0 / SIZE
    np.testing.assert_allclose(net.get_weights()[0], expected, atol=1e-6)


@about_no_buckets
@any_transport
@one_or_two
@pytest.mark.parametrize("optimizer", few("Adam", once=["AdamW"], rarely=["RMSprop", "Lion", "Adagrad", "Nadam"]))
def test_any_optimizer(optimizer):
    net = model()
    fit(net, hvd.DistributedOptimizer(getattr(keras.optimizers, optimizer)(), compression="lowrank:2"), epochs=1)
    assert hvd.identical(net)


@any_transport
@one_or_two
def test_custom_training_loop():
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd(), compression="lowrank:2")
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, net(x, training=True))
        grads = tape.gradient(loss, net.trainable_variables)
        optimizer.apply_gradients(zip(grads, net.trainable_variables, strict=True))
        return loss

    x, y = data()
    losses = [float(step(x, y)) for _ in range(12)]
    assert hvd.identical(net) and losses[-1] < losses[0]


@about_no_buckets
@any_transport
@one_or_two
def test_saved_models_load_with_and_without_hvdplus(tmp_path):
    net = model()
    fit(net, hvd.DistributedOptimizer(sgd(), compression="none"), epochs=1)
    path = tmp_path / "net.keras"
    net.save(path)
    bare = keras.models.load_model(path)
    assert type(bare.optimizer) is keras.optimizers.SGD
    again = hvd.load_model(path)
    x, y = data()
    again.fit(x, y, batch_size=8, verbose=0)
    assert hvd.identical(again)


@about_no_buckets
@any_transport
@one_or_two
def test_warmup_and_schedule_callbacks():
    rates = []

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    warmup = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * SIZE, warmup_epochs=2)
    later = hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.1 * SIZE, multiplier=0.5, start_epoch=3)
    fit(model(), hvd.DistributedOptimizer(sgd(), compression="none"), epochs=4, callbacks=[warmup, later, Note()])
    assert rates[15] == pytest.approx(0.1 * SIZE, rel=1e-4)
    assert rates[0] <= rates[7] <= rates[15]
    assert rates[-1] == pytest.approx(0.05 * SIZE, rel=1e-4)


@about_no_buckets
@any_transport
@one_or_two
def test_best_model_checkpoint(tmp_path):
    path = tmp_path / f"best-{RANK}.keras"
    fit(
        model(),
        hvd.DistributedOptimizer(sgd(), compression="none"),
        epochs=1,
        callbacks=[hvd.callbacks.BestModelCheckpoint(str(path), monitor="loss")],
    )
    assert path.exists()


@any_transport
@one_or_two
def test_the_users_randomness_is_untouched():
    keras.utils.set_random_seed(5)
    before = np.random.get_state()[1].copy()
    variables, optimizer = plain("lowrank:2")
    optimizer.apply(gradients(0, RANK), variables)
    assert np.array_equal(before, np.random.get_state()[1])


def test_bad_input_is_a_clear_error_on_every_rank():
    raises_everywhere(ValueError, "Unknown compression. Received: 'zip'", lambda: plain("zip"))
    raises_everywhere(ValueError, "Received: 0", lambda: plain("lowrank:0"))
    raises_everywhere(ValueError, "Received: 17", lambda: plain(17))
    wrapped = hvd.DistributedOptimizer(sgd(), compression="none")
    raises_everywhere(ValueError, "DistributedOptimizer already", lambda: hvd.DistributedOptimizer(wrapped))
    raises_everywhere(ValueError, "keras.optimizers.Optimizer. Received", lambda: hvd.DistributedOptimizer("sgd"))
    raises_everywhere(ValueError, "op currently", lambda: hvd.DistributedOptimizer(sgd(), op="Adasum"))
    raises_everywhere(ValueError, "is complex64", lambda: _build_complex())
    scaled = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(sgd()))
    raises_everywhere(ValueError, "DistributedOptimizer already", lambda: hvd.DistributedOptimizer(scaled))
    if SIZE > 1:
        shapes = [(3, 3) if RANK == SIZE - 1 else (2, 2)]
        raises_everywhere(ValueError, "model differs between ranks", lambda: plain("none", shapes))
        raises_everywhere(ValueError, f"Received: {SIZE}", lambda: hvd.broadcast_global_variables(SIZE, model()))


@pytest.fixture
def halves():
    """Process sets of the even and of the odd ranks."""
    sets = [hvd.add_process_set(list(range(half, SIZE, 2))) for half in (0, 1)]
    yield sets
    hvd._require_world().transport.barrier()
    for each in sets:
        hvd.remove_process_set(each)


in_sets = pytest.mark.skipif(not HOROVOD, reason="about process sets")


@several
@in_sets
@pytest.mark.parametrize("level", few("fp16", once=["none", "lowrank:2"], sizes=(4,)))
def test_process_sets_exchange_by_themselves(level, halves):
    """Two halves of a model with unlike shapes, a copy for each rank of a set: what arrives is the set's own mean."""
    mine = range(RANK % 2, SIZE, 2)
    shapes = SHAPES[: 4 + RANK % 2]
    variables, optimizer = plain(level, shapes, process_set=halves[RANK % 2])
    step = compiled(optimizer, variables)
    for count in range(4):
        step(gradients(count, RANK, shapes))
    assert optimizer.hvdplus.ranks == len(mine)
    given = [[gradients(count, rank, shapes) for count in range(4)] for rank in mine]
    means = [-np.mean([np.sum([grads[i] for grads in each], 0) for each in given], 0) for i in range(len(shapes))]
    told = hvd.allgather_object([np.asarray(variable) for variable in variables], name="variables")
    for rank in mine:
        assert all(np.array_equal(a, b) for a, b in zip(told[rank], told[RANK], strict=True))
    if level != "lowrank:2":  # which holds something back
        tolerance = 1e-6 if level == "none" else 1e-2
        for variable, mean in zip(variables, means, strict=True):
            np.testing.assert_allclose(variable, mean, rtol=0, atol=tolerance)


@any_transport
@several
@in_sets
def test_a_rank_outside_of_a_process_set_is_told_so(halves):
    raises_everywhere(
        ValueError,
        f"This rank, {RANK}, is not in the process set",
        lambda: hvd.DistributedOptimizer(sgd(), process_set=halves[1 - RANK % 2]),
    )


def _build_complex():
    optimizer = hvd.DistributedOptimizer(sgd(), compression="none")
    variable = keras.Variable(np.zeros(3), dtype="complex64")
    optimizer.build([variable])


@any_transport
@two
def test_a_step_inside_a_condition_is_refused_because_it_could_hang():
    variables, optimizer = plain("none")

    @tf.function
    def step(*grads):
        tf.cond(tf.reduce_sum(grads[0]) > 0, lambda: optimizer.apply(list(grads), variables), lambda: None)

    grads = [tf.constant(grad) for grad in gradients(0, RANK)]
    raises_everywhere(ValueError, "inside a condition", lambda: step(*grads))


@any_transport
@one_or_two
def test_a_step_that_xla_compiles_is_refused_and_says_what_to_do():
    net = model()
    raises_everywhere(
        ValueError,
        "jit_compile=False",
        lambda: fit(net, hvd.DistributedOptimizer(sgd(), compression="none"), epochs=1, jit_compile=True),
    )


@about_no_buckets
@any_transport
@one_or_two
def test_one_trace_serves_every_level(monkeypatch):
    """A level is a branch of the step, not a new step."""
    monkeypatch.setenv("HVDPLUS_LADDER", "none,fp16,int8,lowrank:2")
    monkeypatch.setenv("HVDPLUS_DENSE_STEPS", "100000")  # the test turns the dial
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd())
    fit(net, optimizer, epochs=1)
    exchange = optimizer._hvdplus.exchange
    before = exchange.traces
    for level in (1, 2, 3, 0):
        optimizer.hvdplus.set_level(level)
        x, y = data()
        net.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert exchange.traces == before
    assert hvd.identical(net)


def steps_per_execution(count):
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd(), compression="none")
    fit(net, optimizer, epochs=2, steps_per_execution=count)
    return net, optimizer


@about_no_buckets
@any_transport
@one_or_two
def test_steps_per_execution():
    one, four = steps_per_execution(1), steps_per_execution(4)
    for a, b in zip(one[0].get_weights(), four[0].get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=0 if SIZE <= 2 else 1e-6)
    assert four[1].hvdplus.steps == one[1].hvdplus.steps


@pytest.mark.skipif(not HOROVOD, reason="the rest of Horovod's API needs Horovod")
def test_everything_that_horovod_exports_is_here():
    import horovod.tensorflow.keras as stock

    names = [name for name in dir(stock) if not name.startswith("_")]
    foreign = {"K", "inspect", "keras", "tf", "version", "warnings", "is_version_greater_equal_than"}
    assert not [name for name in names if name not in foreign and not hasattr(hvd, name)]


@pytest.mark.skipif(HOROVOD, reason="about a job without Horovod")
def test_what_needs_horovod_says_so():
    with pytest.raises(RuntimeError, match="hvdplus install-horovod"):
        hvd.alltoall(np.zeros(SIZE))


@pytest.mark.skipif(HOROVOD, reason="about a job without Horovod")
def test_calls_that_only_horovod_could_answer_are_errors_on_every_rank():
    raises_everywhere(TransportError, "op is Average or Sum", lambda: hvd.allreduce(np.zeros(2), op="Adasum"))
    raises_everywhere(ValueError, f"root_rank must be from 0 to {SIZE - 1}", lambda: hvd.broadcast(np.zeros(2), SIZE))
    raises_everywhere(ValueError, "root_rank must be", lambda: hvd.broadcast_object("x", -1))


def test_collectives():
    assert float(hvd.allreduce(np.float32(RANK))) == pytest.approx((SIZE - 1) / 2)
    assert np.array(hvd.allgather(np.full((1, 2), RANK))).shape == (SIZE, 2)
    assert hvd.broadcast_object({"rank": RANK}, root_rank=SIZE - 1) == {"rank": SIZE - 1}
    net = model(seed=RANK)
    hvd.broadcast_global_variables(0, net)
    assert hvd.identical(net)


@any_transport
@one_or_two
def test_the_step_is_taken_apart(tmp_path):
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd(), compression="none")
    fit(net, optimizer, epochs=6)
    summary = hvd.report(optimizer)
    assert summary["step_ms"] > 0 and summary["compute_ms"] > 0
    windows = [record for record in optimizer.hvdplus.log.records if record["kind"] == "window"]
    assert bool(windows) == (RANK == 0)  # which keeps them for the report
    assert all(window["loss"] > 0 for window in windows)
    parts = ("compute_ms", "codec_ms", "exposed_comm_ms", "input_wait_ms")
    assert all(sum(w[part] for part in parts) == pytest.approx(w["step_ms"], rel=0.5) for w in windows)


def test_the_launch_is_the_one_that_was_meant():
    assert hvd._require_world().transport.name == os.environ["EXPECTED_TRANSPORT"]
    assert int(os.environ["EXPECTED_RANKS"]) == SIZE


def lookups(step, rank, height):
    """Rows that a rank looks up, some twice."""
    rows = np.random.default_rng([step, rank]).integers(0, height, 5)
    return np.concatenate([rows, rows[:2]])


@several
@pytest.mark.parametrize("height", few(400, once=[12]), ids=["rows are shared", "dense"])
@pytest.mark.parametrize("level", few("int8", once=["none"], rarely=["lowrank:2"]))
def test_indexed_slices(level, height):
    """Rows that few lookups touch are exact at every level, others are exchanged as all gradients are."""
    shapes = [(height, 24), (30, 20), (7,)]
    variables, optimizer = plain(level, shapes)

    @tf.function(reduce_retracing=True)
    def step(rows, *others):
        slices = tf.IndexedSlices(tf.ones((tf.shape(rows)[0], 24)), rows, (height, 24))
        optimizer.apply([slices, *others], variables)

    expected = np.zeros(shapes[0])
    for number in range(5):
        step(tf.constant(lookups(number, RANK, height)), *gradients(number, RANK, shapes[1:]))
        for rank in range(SIZE):
            np.add.at(expected, lookups(number, rank, height), -1.0 / SIZE)
    exchange = optimizer._hvdplus.exchange
    assert hvd.identical([np.array(v) for v in variables])
    dense_bytes = 4 * height * 24
    if height == 400:
        assert 0 < exchange.coordinator.row_bytes < dense_bytes / 2
        if exchange.states[-1].held is not None:
            assert not exchange.states[-1].held.numpy().any(), "nothing is lost of what is exact"
    if height == 400 or level == "none":
        np.testing.assert_allclose(np.array(variables[0]), expected, rtol=0, atol=1e-5)


@two
@any_transport
def test_rows_are_shared_or_not_from_step_to_step():
    """Few rows, most rows, none at all, and again: nothing is lost, ranks stay equal, and the residual waits."""
    height, shape = 400, (400, 24)
    variables, optimizer = plain("int8", [shape])
    total = np.zeros(shape)
    rng = np.random.default_rng(RANK)
    for count in (3, 3, 3, 390, 3, 0, 390, 390, 3):
        rows = rng.choice(height, count, replace=False)
        values = rng.standard_normal((count, 24)).astype(np.float32)
        optimizer.apply([tf.IndexedSlices(tf.constant(values), tf.constant(rows), shape)], variables)
        total[rows] += values
    (state,) = optimizer._hvdplus.exchange.states
    assert state.held.numpy().any()
    everyone = hvd._require_world().transport.gather_objects((total, state.held.numpy().reshape(shape)))
    sent = -np.array(variables[0], np.float64) * SIZE
    np.testing.assert_allclose(sent + sum(left for _, left in everyone), sum(own for own, _ in everyone), atol=1e-4)
    assert hvd.identical([np.array(variables[0])])


@any_transport
@one_or_two
@pytest.mark.skipif(not HOROVOD, reason="needs a class of Horovod's")
def test_a_stock_horovod_compressor_runs_unchanged():
    class Stock(hvd.Compression.fp16):
        """A class of the script's own."""

    variables, optimizer = plain(Stock)
    step = compiled(optimizer, variables)
    for number in range(2):
        step(gradients(number, RANK))
    assert optimizer.hvdplus.ladder.names == ("Stock",)
    for i, v in enumerate(variables):
        mean = np.mean([gradients(number, rank)[i] for number in range(2) for rank in range(SIZE)], axis=0)
        np.testing.assert_allclose(np.array(v), -2 * mean, rtol=0, atol=2e-2)
    assert hvd.identical([np.array(v) for v in variables])


@about_no_buckets
@any_transport
@two
@pytest.mark.skipif(not HOROVOD, reason="needs a class of Horovod's")
def test_a_stock_horovod_compressor_runs_in_fit():
    """There the optimizer is built while the train step is traced."""

    class Stock(hvd.Compression.fp16):
        """A class of the script's own."""

    keras.utils.set_random_seed(0)
    net = keras.Sequential(
        [
            keras.layers.Input((2,), dtype="int32"),
            keras.layers.Embedding(50, 8),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )
    net.compile(hvd.DistributedOptimizer(sgd(), compression=Stock), keras.losses.MeanSquaredError())
    rng = np.random.default_rng(RANK)
    net.fit(rng.integers(0, 50, (32, 2)), rng.standard_normal((32, 3)), batch_size=8, epochs=1, verbose=0)
    assert hvd.identical(net)


@any_transport
@one_or_two
def test_an_embedding_whose_batches_have_no_length_of_their_own_is_exchanged():
    """Batches come from a generator: how many rows a gradient has is known when the step runs, and no sooner."""
    keras.utils.set_random_seed(0)
    net = keras.Sequential(
        [
            keras.layers.Input((4,), dtype="int64"),
            keras.layers.Embedding(50, 8),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )
    net.compile(hvd.DistributedOptimizer(sgd(), settings={"ladder": "none,int8"}), keras.losses.MeanSquaredError())
    rng = np.random.default_rng(RANK)

    def batches():
        while True:
            yield rng.integers(0, 50, (8, 4)), rng.standard_normal((8, 3)).astype(np.float32)

    net.fit(batches(), steps_per_epoch=6, epochs=1, verbose=0, shuffle=False)
    assert hvd.identical(net)


@any_transport
@several
def test_settings_that_differ_between_ranks_are_an_error_on_every_rank(monkeypatch):
    monkeypatch.setenv("HVDPLUS_COMPRESSION", "int8" if RANK else "fp16")
    raises_everywhere(ValueError, "Ranks 0 and 1 differ in levels", lambda: plain("auto"))


@any_transport
@one_or_two
def test_settings_of_the_script_come_before_the_environment_and_the_file(monkeypatch, tmp_path):
    path = tmp_path / "hvdplus.yaml"
    path.write_text("ladder: [none, int8]\ndense_steps: 9\ndrain_steps: 4\n")
    monkeypatch.setenv("HVDPLUS_CONFIG", str(path))
    monkeypatch.setenv("HVDPLUS_DENSE_STEPS", "12")
    _, optimizer = plain("auto", settings={"dense_steps": 20, "bucket_bytes": 1 << 20})
    used = optimizer._hvdplus.settings
    assert (used.dense_steps, used.drain_steps, len(optimizer._hvdplus.exchange.buckets)) == (20, 4, 1)
    assert optimizer.hvdplus.ladder.names == ("none", "int8")
    assert len(plain("auto")[1]._hvdplus.exchange.buckets) > 1, "the environment's"
    assert plain("fp16", settings={"compression": "none"})[1].hvdplus.ladder.names == ("fp16",)
    assert plain("auto", settings={"compression": "none"})[1].hvdplus.ladder.names == ("none",)
    for wrong, match in (
        ({"dense_stepz": 20}, r"dense_stepz \(argument\) is not a setting; did you mean dense_steps\?"),
        ({"drain_steps": 0}, r"drain_steps \(argument\) wants a whole number of at least 1. Received: drain_steps=0"),
        ({"transport": "mpi4py"}, "comes too late"),
    ):
        raises_everywhere(ValueError, match, lambda wrong=wrong: plain("auto", settings=wrong))
    if SIZE > 1:
        other = {"drain_steps": 5 + (RANK == SIZE - 1)}
        raises_everywhere(ValueError, "differ in drain_steps: 5 against 6", lambda: plain("auto", settings=other))


def norm(arrays):
    return np.sqrt(sum(np.square(np.asarray(array, np.float64)).sum() for array in arrays))


@any_transport
@several
@pytest.mark.parametrize("level", few("topk:0.2:32", once=["none"]))
def test_ranks_say_how_large_their_gradients_and_residuals_are(level, monkeypatch):
    shapes = [*SHAPES, (400, 6)]
    variables = [keras.Variable(np.zeros(shape, np.float32)) for shape in shapes]
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([6], [0.5, 0.25])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(schedule), compression=level)
    optimizer.build(variables)
    optimizer.hvdplus._measures_norms = True  # as `auto` does at every level
    exchange, heard, known = optimizer._hvdplus.exchange, [], []
    read = graph.read

    def heard_by_all(total, ranks):
        slots = total[length(0, 0) :].reshape(ranks, -1)
        heard.append((exchange.coordinator.plan, [Slot(*slot.tolist()) for slot in slots]))
        return read(total, ranks)

    monkeypatch.setattr(graph, "read", heard_by_all)

    @tf.function
    def step(rows, *grads):
        slices = tf.IndexedSlices(tf.ones((4, 6)), rows, (400, 6))
        optimizer.apply([*grads, slices], variables)

    for number in range(44):
        grads, rows = gradients(number, RANK), np.array([number, 3, 3, RANK])
        step(tf.constant(rows), *map(tf.constant, grads))
        left = [state.held.numpy() for state in exchange.states if state.held is not None]
        known.append((norm([*grads, np.repeat(np.bincount(rows), 6)]), norm(left), 0.5 if number <= 6 else 0.25))
    everyone = hvd.allgather_object(known)
    assert sum(plan.measurement > 0 for plan, _ in heard) >= 2 and len(heard) == 44
    for number, (plan, slots) in enumerate(heard):
        for rank, slot in enumerate(slots):
            gradient_norm, residual_norm, rate = everyone[rank][number]
            assert slot.learning_rate == pytest.approx(rate)
            assert slot.gradient_norm == pytest.approx(gradient_norm if plan.measurement else 0.0, rel=1e-4)
            assert slot.residual_norm == pytest.approx(residual_norm if plan.measurement else 0.0, rel=1e-4)
    assert any(slot.residual_norm for _, slots in heard for slot in slots) == (level != "none")


def in_numpy(level, shapes, gradients_of, steps, levels=(), **settings):
    """Means of all steps as the NumPy reference exchange makes them, all ranks in this process.

    ``levels``: step -> level that runs from then on.
    """

    def body(transport):
        auto = not isinstance(level, str)
        exchange = NumpyExchange(shapes, transport, level, auto=auto, bucket_bytes=6000, **settings)
        means = []
        for number in range(steps):
            if number in dict(levels):
                exchange.coordinator.set_level(dict(levels)[number])
            means.append(exchange.reduce(gradients_of(number, transport.rank)))
            exchange.commit()
        return means

    return run_in_process(SIZE, body)[0]


def dense(mean, shape):
    if not isinstance(mean, Rows):
        return mean
    whole = np.zeros(shape, np.float32)
    whole[mean.rows] = mean.values
    return whole


@any_transport
@two
def test_changes_of_level_are_those_of_numpys_exchange():
    """First steps, flushing, contexts that are handed over, and rows of a table, shared or not."""
    ladder, levels = ["none", "lowrank:1", "lowrank:2", "int8"], {4: 1, 10: 2, 14: 3, 19: 0, 27: 3}
    settings = {"dense_steps": 100000, "drain_steps": 4}
    shapes = [*SHAPES, (400, 6)]

    def of(number, rank):
        rows = np.random.default_rng([number, rank]).integers(0, 400, 250 if number % 5 == 4 else 7)
        return [*gradients(number, rank), Rows(rows, np.ones((len(rows), 6), np.float32))]

    variables, optimizer = plain("auto", shapes, settings={**settings, "ladder": ladder})

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64), *map(tf.TensorSpec, SHAPES)])
    def step(rows, *grads):
        slices = tf.IndexedSlices(tf.ones((tf.shape(rows)[0], 6)), rows, (400, 6))
        optimizer.apply([*grads, slices], variables)

    for number, expected in enumerate(in_numpy(ladder, shapes, of, 32, levels.items(), **settings)):
        if number in levels:
            optimizer.hvdplus.set_level(levels[number])
        before = [np.array(v) for v in variables]
        *grads, rows = of(number, RANK)
        step(tf.constant(rows.rows), *map(tf.constant, grads))
        for v, old, mean in zip(variables, before, expected, strict=True):
            mean = dense(mean, v.shape)
            message = f"step {number}"
            np.testing.assert_allclose(
                old - np.array(v), mean, rtol=0, atol=2e-4 * max(np.abs(mean).max(), 1), err_msg=message
            )
    ran = {record["level"] for record in optimizer.hvdplus.log.records if record["kind"] == "window"}
    assert RANK or {"none", "lowrank:1", "lowrank:2", "int8", "draining"} <= ran  # rank 0 keeps them


class Loud(IntB):
    """Calls a step an overflow in which any rank's values are large."""

    def overflows(self, ops, ctx, grad, payload):
        return tf.reduce_max(tf.abs(grad)) > 1e4


@two
@any_transport
def test_what_overflows_a_level_is_sent_in_full_width_in_its_own_step():
    variables, optimizer = plain(Loud(8))
    step = compiled(optimizer, variables)
    for number in range(6):
        for v in variables:
            v.assign(np.zeros(v.shape))
        loud = number == 4
        held = [0.0 if s.held is None else s.held.numpy() for s in optimizer._hvdplus.exchange.states]
        scale = [np.float32(1e6 if loud and rank == SIZE - 1 else 1.0) for rank in range(SIZE)]
        step([grad * scale[RANK] for grad in gradients(number, RANK)])
        if loud:
            everyone = hvd.allgather_object(held)
            for state, parts in zip(optimizer._hvdplus.exchange.states, zip(*everyone, strict=True), strict=True):
                assert not state.held.numpy().any(), "nothing is left"
                for i, (part, shape) in state.places.items():
                    sent = [gradients(number, rank)[i] * scale[rank] for rank in range(SIZE)]
                    mean = np.mean([s + p[part].reshape(shape) for s, p in zip(sent, parts, strict=True)], axis=0)
                    np.testing.assert_allclose(-np.array(variables[i]), mean, rtol=1e-5, atol=0.2)
    assert hvd.identical(variables)


@several
def test_ranks_that_begin_with_other_weights_are_an_error_on_every_rank():
    net = model(seed=RANK)
    optimizer = hvd.DistributedOptimizer(sgd(), compression="none")
    others = rf"weights of rank\(s\) {', '.join(map(str, range(1, SIZE)))} no longer equal those of rank 0"
    raises_everywhere(Exception, f"{others}: .*kernel is the first", lambda: fit(net, optimizer))
    assert optimizer.hvdplus.steps == 1, "in the second step"


@about_no_buckets
@any_transport
@two
def test_ranks_whose_weights_are_changed_are_an_error_within_the_interval():
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd(), compression="none", settings={"weights_check_steps": 5})
    fit(net, optimizer)
    assert optimizer.hvdplus.steps == 16
    if RANK == SIZE - 1:
        bias = net.layers[1].bias
        bias.assign(bias + 1e-3)
    raises_everywhere(Exception, rf"weights of rank\(s\) {SIZE - 1} .*bias is the first", lambda: fit(net))
    assert 16 < optimizer.hvdplus.steps <= 21
    unchecked = model(seed=RANK)
    fit(unchecked, hvd.DistributedOptimizer(sgd(), compression="none", settings={"weights_check_steps": 0}))


@about_no_buckets
@two
@any_transport
def test_learning_rates_that_differ_between_ranks_are_an_error_on_every_rank():
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd(), compression="fp16")
    fit(net, optimizer)
    optimizer.learning_rate = 0.1 / (RANK + 1)
    names = ", ".join(map(str, range(1, SIZE)))
    raises_everywhere(Exception, rf"learning rate differs between rank 0 and rank\(s\) {names},", lambda: fit(net))


@two
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_plain_dense_steps_send_gradients_in_their_own_type_if_they_can_be_added_up(dtype, monkeypatch):
    variables = [keras.Variable(np.zeros(shape), dtype=dtype) for shape in SHAPES]
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), compression="auto", settings={"ladder": ["none", "int8"], "dense_steps": 100000}
    )
    optimizer.build(variables)
    exchange, sums = optimizer._hvdplus.exchange, set()
    transport = exchange.transport

    class Spy:
        def __getattr__(self, name):
            return getattr(transport, name)

        def start(self, array, name, scale=1.0):
            sums.add((name, array.dtype.name))
            return transport.start(array, name, scale)

    monkeypatch.setattr(exchange, "transport", Spy())
    own = dtype if dtype in transport.summable else "float32"
    for level in (0, 1, 0):
        optimizer.hvdplus.set_level(level)
        for number in range(3):
            for v in variables:
                v.assign(np.zeros(v.shape))
            optimizer.apply([tf.cast(grad, dtype) for grad in gradients(number, RANK)], variables)
    # Branches are eager here: only those that ran began a sum.
    kinds = {(name.split(".")[2], kind) for name, kind in sums if name.split(".")[1].isdigit()}
    others = {("none", "float32"), ("int8", "int32")} if dtype != "float64" else {("int8", "float64")}
    assert kinds == {("none", own), *others}
    assert dtype == "bfloat16" or exchange.costs()[0].payload_bytes == exchange.gradient_bytes
    assert hvd.identical([np.array(v, np.float64) for v in variables])


@any_transport
@two
@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_levels_that_have_not_run_are_tried_on_the_means(eager, monkeypatch):
    at_any_price(monkeypatch)
    shapes, ladder, means = [(40, 24), (40,), (24, 40)], ["none", "int8", "lowrank:2"], []
    variables, optimizer = plain("auto", shapes, settings={"ladder": ladder, "dense_steps": 10**6})
    step = compiled(optimizer, variables)
    for number in range(8):
        before = [np.array(v) for v in variables]
        if eager:
            optimizer.apply([tf.constant(grad) for grad in gradients(number, RANK, shapes)], variables)
        else:
            step(gradients(number, RANK, shapes))
        means.append([old - np.array(v) for old, v in zip(before, variables, strict=True)])
        everyone = [gradients(number, rank, shapes) for rank in range(SIZE)]
        for got, *theirs in zip(means[-1], *everyone, strict=True):
            np.testing.assert_allclose(got, np.mean(theirs, axis=0), atol=1e-5)
    if RANK == 0:
        check_preview(optimizer.hvdplus.log.records, ladder, shapes, means)


@any_transport
@two
@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_at_a_level_that_holds_something_back_levels_are_tried_on_ranks_own_gradients(eager, monkeypatch):
    at_any_price(monkeypatch, start=2)
    shapes, ladder = [(40, 24), (40,), (24, 40)], ["none", "int8", "lowrank:2"]
    variables, optimizer = plain("auto", shapes, settings={"ladder": ladder})
    step = compiled(optimizer, variables)
    for number in range(6):
        if eager:
            optimizer.apply([tf.constant(grad) for grad in gradients(number, RANK, shapes)], variables)
        else:
            step(gradients(number, RANK, shapes))
    if RANK == 0:
        everyones = [[gradients(number, rank, shapes) for number in range(6)] for rank in range(SIZE)]
        check_preview(optimizer.hvdplus.log.records, ladder, shapes, *everyones)


@any_transport
@two
def test_a_step_that_is_not_taken_sends_what_it_flushed_once_more():
    """Of two steps out of three nobody takes the means; nothing is lost of what the others sent, or held back."""
    ladder = ["none", "lowrank:1", "int8"]
    settings = {"ladder": ladder, "dense_steps": 100000, "drain_steps": 3}
    variables, optimizer = plain("auto", settings=settings)
    exchange = optimizer._hvdplus.exchange

    @tf.function
    def step(taken, *grads):
        means = exchange.reduce(list(grads))

        def take():
            for v, mean in zip(variables, means, strict=True):
                v.assign_sub(mean)
            exchange.end_step([tf.convert_to_tensor(v) for v in variables])
            return 0

        def skip():
            exchange.skip_step()
            return 0

        tf.cond(taken, take, skip)

    total, number = [np.zeros(shape) for shape in SHAPES], 0
    for level, steps in ((1, 9), (2, 9), (0, 24)):
        optimizer.hvdplus.set_level(level)
        for _ in range(steps):
            taken, grads = number % 3 == 0, gradients(number, RANK)
            step(tf.constant(taken), *map(tf.constant, grads))
            for t, g in zip(total, grads, strict=True):
                t += g * taken
            number += 1
    assert not any(state.held.numpy().any() for state in exchange.states if state.held is not None), "all is flushed"
    everyone = hvd.allgather_object(total)
    for v, *parts in zip(variables, *everyone, strict=True):
        np.testing.assert_allclose(-np.array(v, np.float64), np.mean(parts, axis=0), atol=2e-4)


@any_transport
@two
def test_a_checkpoint_within_a_step_knows_that_it_was_not_taken():
    settings = {"ladder": ["none", "int8"], "dense_steps": 100000, "drain_steps": 3}
    variables, optimizer = plain("auto", settings=settings)
    exchange = optimizer._hvdplus.exchange
    for number, level in enumerate((0, 1, 1, 1, 0, 0)):
        optimizer.hvdplus.set_level(level)
        optimizer.apply(gradients(number, RANK), variables)
    assert optimizer.hvdplus.plan.flush_fraction == 1 / 2
    exchange.reduce(gradients(7, RANK))
    state = exchange.state()
    assert state["not_taken"] and optimizer.hvdplus.plan.flush_fraction == 1
    others, again = plain("auto", settings=settings, state=state)
    assert again.hvdplus.plan.flush_fraction == 1 / 2
    sums = [np.mean([r[i] for r in hvd.allgather_object(state["residuals"])], axis=0) for i in range(len(SHAPES))]
    for _ in range(2):
        again.apply([np.zeros(shape, np.float32) for shape in SHAPES], others)
    for v, held in zip(others, sums, strict=True):
        np.testing.assert_allclose(-np.array(v), held, atol=1e-6)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "compiled"])
def test_one_rank_is_idle_again_when_a_checkpoints_residual_is_flushed(in_graph):
    """A step that was compiled before goes on as it is."""
    shape = (40, 30)
    (variable,), optimizer = plain("int8", [shape])
    for number in range(3):
        optimizer.apply(gradients(number, 0, [shape]), [variable])
    state = optimizer._hvdplus.exchange.state()
    held = state["residuals"][0]
    assert held.any()
    alone = keras.Variable(np.zeros(shape, np.float32))
    again = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="none", settings={"drain_steps": 3})
    again._hvdplus.state = {**state, "ranks": 2, "rank": None}
    again.build([alone])
    exchange = again._hvdplus.exchange
    step = compiled(again, [alone]) if in_graph else lambda grads: again.apply(grads, [alone])
    for number in range(5):
        assert exchange.idle == (number >= 3), number
        step([np.full(shape, 0.5, np.float32)])
    np.testing.assert_allclose(-np.array(alone), held + 2.5, atol=1e-6)
    assert not again._hvdplus.exchange.state()["residuals"]


@about_no_buckets
@any_transport
@two
def test_where_tensorflow_has_no_order_of_effects_to_leave_times_are_taken_all_the_same(monkeypatch):
    from hvdplus.adapters.tensorflow import private

    assert private.missing() == []
    monkeypatch.setattr(private, "_order_of", lambda graph: None)
    assert any("experimental_acd_manager" in line and tf.__version__ in line for line in private.missing())
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd(), compression="none")
    fit(net, optimizer, epochs=4)
    windows = [record for record in optimizer.hvdplus.log.records if record["kind"] == "window"]
    assert bool(windows) == (RANK == 0)  # which keeps them for the report
    assert all(0 < window["exposed_comm_ms"] <= window["step_ms"] for window in windows)
    assert hvd.identical(net)
