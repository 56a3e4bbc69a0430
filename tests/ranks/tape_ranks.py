"""hvdplus.tensorflow on as many ranks as it was started on: tapes, for training loops without Keras' ``fit``."""

import gc
import os

os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # one test makes some

import keras
import numpy as np
import pytest
import tensorflow as tf
from picking import few, several

import hvdplus.tensorflow as hvd
from hvdplus.adapters.keras import collectives
from hvdplus.adapters.numpy.backend import NumpyExchange
from hvdplus.adapters.tensorflow import tape as tapes
from hvdplus.adapters.transports.in_process import run as run_in_process

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
SHAPES = [(24, 40), (40,), (40, 24)]


def gradients(step, rank):
    rng = np.random.default_rng([step, rank])
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def mean(step):
    return [np.mean(arrays, axis=0) for arrays in zip(*(gradients(step, rank) for rank in range(SIZE)), strict=True)]


def taped(sources, grads, **keywords):
    """What a distributed tape makes of these gradients."""
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(source * grad) for source, grad in zip(sources, grads, strict=True)])
    return hvd.DistributedGradientTape(tape, **keywords).gradient(loss, sources)


def variables():
    return [tf.Variable(tf.zeros(shape)) for shape in SHAPES]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", ["tensorflow", "keras"])
def test_gradients_are_means(kind, compiled):
    sources = variables() if kind == "tensorflow" else [keras.Variable(np.zeros(s, np.float32)) for s in SHAPES]
    function = tf.function(lambda *grads: taped(sources, grads, compression="none"), autograph=False)
    step = function if compiled else lambda *grads: taped(sources, grads, compression="none")
    for number in range(3):
        for got, expected in zip(step(*map(tf.constant, gradients(number, RANK))), mean(number), strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-5)


@several
@pytest.mark.skipif(not collectives.current().transport.name.startswith("horovod"), reason="about process sets")
def test_process_sets_exchange_by_themselves():
    sets = [hvd.add_process_set(list(range(half, SIZE, 2))) for half in (0, 1)]
    got = taped(variables(), gradients(0, RANK), compression="none", process_set=sets[RANK % 2])
    theirs = [gradients(0, rank) for rank in range(RANK % 2, SIZE, 2)]
    for array, arrays in zip(got, zip(*theirs, strict=True), strict=True):
        np.testing.assert_allclose(array, np.mean(arrays, axis=0), atol=1e-5)
    collectives.current().transport.barrier()
    for each in sets:
        hvd.remove_process_set(each)


@several
def test_what_is_held_back_lives_with_the_variables_and_goes_with_them():
    """A new tape in every step; what a lossy level keeps back is sent later."""
    gc.collect()
    sources, sums, sent = variables(), [np.zeros(s) for s in SHAPES], [np.zeros(s) for s in SHAPES]
    before = len(tapes._exchanges)
    for number in range(40):
        for total, part in zip(sums, mean(0), strict=True):
            total += part
        means = taped(sources, gradients(0, RANK), compression="topk:0.3:8")
        for total, source, part in zip(sent, sources, means, strict=True):
            source.assign_sub(part)
            total += part.numpy()
        assert len(tapes._exchanges) == before + 1, number
    assert hvd.identical(sent)
    for total, received in zip(sums, sent, strict=True):
        assert np.abs(total - received).max() < 0.25 * np.abs(total).max()
    del sources
    gc.collect()
    assert len(tapes._exchanges) == before


def test_structures_unused_sources_and_sums():
    a, b, unused = tf.Variable([1.0, 2.0]), tf.Variable(3.0), tf.Variable(4.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(a) * b
    tape = hvd.DistributedGradientTape(tape, compression="none", op=hvd.Sum)
    got = tape.gradient(loss, {"first": a, "rest": [b, unused]})
    np.testing.assert_allclose(got["first"], [3.0 * SIZE] * 2)
    np.testing.assert_allclose(got["rest"][0], 3.0 * SIZE)
    assert got["rest"][1] is None


def test_local_layers_keep_their_own():
    net = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(2)])
    hvd.broadcast_variables(net.variables, 0)
    own, (kernel, _) = net.layers[0], net.layers[1].trainable_variables
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(net(tf.ones((1, 2)) * (RANK + 1.0)))
    tape = hvd.PartialDistributedGradientTape(tape, compression="none", local_layers=own)
    local, shared = tape.gradient(loss, [own.trainable_variables[1], kernel])
    bare = np.sum(kernel.numpy(), axis=1) / SIZE  # d loss / d bias of the first layer, scaled as all others are
    np.testing.assert_allclose(local, bare, rtol=1e-5)
    assert hvd.identical([shared.numpy()])


@several
def test_a_whole_loop_and_broadcast_of_tensorflows_own_variables():
    tf.random.set_seed(RANK)
    weights = [tf.Variable(tf.random.normal(s)) for s in ((12, 30), (30, 3))]
    assert not hvd.identical(weights)
    hvd.broadcast_variables(weights, root_rank=0)
    assert hvd.identical(weights)
    rng = np.random.default_rng(RANK)
    x, y = rng.standard_normal((64, 12)).astype(np.float32), rng.integers(0, 3, 64)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            logits = tf.tanh(x @ weights[0]) @ weights[1]
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        tape = hvd.DistributedGradientTape(tape, compression="lowrank:2")
        for weight, grad in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * grad)
        return loss

    losses = [float(step()) for _ in range(30)]
    assert losses[-1] < losses[0] and hvd.identical(weights)


@several
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_gradient_that_some_ranks_only_have_is_an_error_on_every_rank(compiled):
    sources = variables()

    def step(*grads):
        with tf.GradientTape() as tape:
            used = list(zip(sources, grads, strict=True))[1 if RANK == SIZE - 1 else 0 :]
            loss = tf.add_n([tf.reduce_sum(source * grad) for source, grad in used])
        return hvd.DistributedGradientTape(tape, compression="none").gradient(loss, sources)

    if compiled:
        step = tf.function(step, autograph=False)
    with pytest.raises(Exception, match=rf"differ between rank 0 and rank\(s\) {SIZE - 1}\."):
        step(*map(tf.constant, gradients(0, RANK)))
    hvd.identical([tf.zeros(1)])  # all are here


@several
def test_a_step_compiled_for_other_ranks_is_an_error():
    sources = variables()
    step = tf.function(lambda *grads: taped(sources, grads, compression="none"), autograph=False)
    step(*map(tf.constant, gradients(0, RANK)))
    tapes.forget()
    with pytest.raises(Exception, match="Ranks have come or gone since this step was compiled"):
        step(*map(tf.constant, gradients(1, RANK)))
    taped(sources, [tf.constant(g) for g in gradients(2, RANK)], compression="none")


@several
def test_join_is_refused_where_tapes_exchange():
    sources = variables()
    taped(sources, [tf.constant(g) for g in gradients(0, RANK)], compression="none")
    with pytest.raises(RuntimeError, match="same number of steps"):
        hvd.join()


def test_bad_input_is_a_clear_error_on_every_rank():
    with pytest.raises(ValueError, match="wraps a tf.GradientTape"):
        hvd.DistributedGradientTape("tape")
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedGradientTape(hvd.DistributedGradientTape(tf.GradientTape()))
    with pytest.raises(ValueError, match="op currently"):
        hvd.DistributedGradientTape(tf.GradientTape(), op="Adasum")
    for keywords in ({"settings": {"every": 8}}, {"compression": "local:8"}, {"settings": {"staleness": 2}}):
        with pytest.raises(ValueError, match="A tape exchanges in every step: local steps need DistributedOptimizer"):
            taped([tf.Variable(tf.zeros(2))], [np.ones(2, np.float32)], **keywords)
    if SIZE > 1:
        shape = (3,) if RANK == SIZE - 1 else (2,)
        with pytest.raises(ValueError, match="model differs between ranks"):
            taped([tf.Variable(tf.zeros(shape))], [np.ones(shape, np.float32)])


@pytest.mark.skipif(not hvd.front.with_horovod(), reason="the rest of Horovod's API needs Horovod")
def test_everything_that_horovod_exports_is_here():
    import horovod.tensorflow as stock

    assert not [name for name in dir(stock) if not name.startswith("_") and not hasattr(hvd, name)]


def test_the_launch_is_the_one_that_was_meant():
    assert hvd.front._require_world().transport.name == os.environ["EXPECTED_TRANSPORT"]
    assert int(os.environ["EXPECTED_RANKS"]) == SIZE


@several
@pytest.mark.parametrize(
    "level", few("lowrank:2", "int8", once=["none", "fp16", "powersgd:2", "topk:0.3:8", "topk2:0.3:8+int8"])
)
def test_a_level_does_what_numpys_exchange_does(level):
    def body(transport):
        exchange, means = NumpyExchange(SHAPES, transport, level, bucket_bytes=6000), []
        for number in range(6):
            means.append(exchange.reduce(gradients(number, transport.rank)))
            exchange.commit()
        return means

    sources = variables()
    step = tf.function(lambda *grads: taped(sources, grads, compression=level, settings={"bucket_bytes": 6000}))
    for number, expected in enumerate(run_in_process(SIZE, body)[0]):
        means = step(*map(tf.constant, gradients(number, RANK)))
        tolerance = 2e-3 if "fp16" in level else 5e-5
        for source, got, mine in zip(sources, means, expected, strict=True):
            np.testing.assert_allclose(got, mine, rtol=0, atol=tolerance * max(np.abs(mine).max(), 1))
            source.assign_sub(got)


@several
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_nothing_is_lost_in_a_loop_that_leaves_out_every_third_step(compiled):
    """At levels that hold something back, and while that is flushed."""
    settings = {"ladder": ["none", "lowrank:1", "int8"], "dense_steps": 100000, "drain_steps": 4, "bucket_bytes": 6000}
    sources = variables()

    def step(*grads):
        return taped(sources, grads, compression="auto", settings=settings)

    if compiled:
        step = tf.function(step, autograph=False)
    total, sent, number, held = [np.zeros(s) for s in SHAPES], [np.zeros(s) for s in SHAPES], 0, False
    for level, steps in ((0, 2), (1, 9), (2, 9), (0, 18)):
        for first in range(steps):
            grads, taken = gradients(number, RANK), number % 3 != 2
            means = step(*map(tf.constant, grads))
            if not first:  # an exchange exists
                exchange = list(tapes._exchanges.values())[-1][1]
                exchange.coordinator.set_level(level)
            if taken:
                for each in zip(total, sent, sources, grads, means, strict=True):
                    t, s, source, grad, mean_now = each
                    t += grad
                    s += mean_now.numpy()
                    source.assign_sub(0.1 * mean_now)
            number += 1
        held |= any(state.held.numpy().any() for state in exchange.states if state.held is not None)
    step(*map(tf.constant, gradients(number, RANK)))  # which sees that the last step was taken
    assert held and not any(state.held.numpy().any() for state in exchange.states if state.held is not None)
    assert hvd.identical(sources)
    for mine, *everyone in zip(sent, *hvd.allgather_object(total), strict=True):
        np.testing.assert_allclose(mine, np.mean(everyone, axis=0), atol=5e-4)


@several
def test_what_was_held_back_stays_if_no_step_is_taken():
    sources = variables()
    grads = [tf.constant(grad) for grad in gradients(0, RANK)]
    means = [taped(sources, grads, compression="topk:0.3:8") for _ in range(3)]
    (_, exchange) = list(tapes._exchanges.values())[-1]
    assert not any(state.held.numpy().any() for state in exchange.states if state.held is not None)
    for source, part in zip(sources, means[-1], strict=True):
        source.assign_sub(part)
    known = exchange.state()
    assert any(np.any(residual) for residual in known["residuals"].values()), "the state tells that the step was taken"


@several
def test_rows_of_a_table_that_change_show_that_a_step_was_taken():
    """Few of them do, and not those that a few samples of the table would look at."""
    table = tf.Variable(tf.zeros((4000, 24)))
    rows = tf.constant([1, 7, 11])
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows) * (RANK + 1.0))
        (mean_now,) = hvd.DistributedGradientTape(tape, compression="int8").gradient(loss, [table])
        (_, exchange) = list(tapes._exchanges.values())[-1]
        assert exchange.pends.numpy()
        table.assign_sub(mean_now)
    before = exchange.pends.numpy()
    exchange.settle_last_step()
    assert before and not exchange.pends.numpy()
    changed = tf.reduce_any(exchange._seen != tapes.tensors.fingerprint(table, whole=False)).numpy()
    assert changed, "samples alone would not have told"


@several
def test_weights_that_differ_between_ranks_are_an_error_on_every_rank():
    sources = [tf.Variable(tf.fill(shape, 1.0 + RANK), name=f"weight_{i}") for i, shape in enumerate(SHAPES)]
    grads = [tf.constant(grad) for grad in gradients(0, RANK)]
    taped(sources, grads, compression="none")
    with pytest.raises(Exception, match=r"weights of rank\(s\) .* no longer equal those of rank 0: weight_0"):
        taped(sources, grads, compression="none")
    hvd.identical([tf.zeros(1)])  # all are here


@several
def test_sources_that_are_no_variables_may_differ_between_ranks():
    x, weight = tf.constant([1.0 + RANK, 2.0]), tf.Variable([1.0, 1.0])

    for _ in range(3):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(x * weight)
        of_x, of_weight = hvd.DistributedGradientTape(tape, compression="none").gradient(loss, [x, weight])
        np.testing.assert_allclose(of_x, [1.0, 1.0])
        np.testing.assert_allclose(of_weight, [(SIZE + 1) / 2, 2.0])
