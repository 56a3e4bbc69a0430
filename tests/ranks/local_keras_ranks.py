"""Local steps in Keras, on either backend and on as many ranks as it was started on.

The reference trains all ranks' models in one process, with plain Keras, and averages them by hand.
"""

import keras
import numpy as np
import pytest
from picking import any_transport, few

import hvdplus.keras as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def model(seed=0):
    rng = np.random.default_rng(seed)
    net = keras.Sequential([keras.layers.Input((12,)), keras.layers.Dense(40, "tanh"), keras.layers.Dense(3)])
    net.set_weights([rng.standard_normal(w.shape).astype(np.float32) * 0.3 for w in net.get_weights()])
    return net


def batch(step, rank):
    rng = np.random.default_rng([step, rank])
    return rng.standard_normal((8, 12)).astype(np.float32), rng.integers(0, 3, 8)


def compiled(net, optimizer, **keywords):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(optimizer, loss, jit_compile=False, **keywords)
    return net


def train(net, steps, first=0, rank=RANK):
    for step in range(first, first + steps):
        net.train_on_batch(*batch(step, rank))
    return net


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def adam():
    return keras.optimizers.AdamW(0.01)


def wrapped(make=sgd, seed=0, **keywords):
    keywords.setdefault("compression", "none")
    return compiled(model(seed), hvd.DistributedOptimizer(make(), **keywords))


def by_hand(steps, every, make=sgd, *, parts=((0, 1, 2, 3),), outer=None):
    """The weights of this rank after so many steps, all ranks simulated."""
    # Eagerly: for a few steps TensorFlow's graphs are not worth their making.
    nets = [compiled(model(), make(), run_eagerly=True) for _ in range(SIZE)]
    anchors = [w.copy() for w in nets[0].get_weights()]
    momentum = [np.zeros_like(w) for w in anchors]
    for step in range(1, steps + 1):
        for rank, net in enumerate(nets):
            train(net, 1, step - 1, rank)
        for k, part in enumerate(parts):
            if step < (k + 1) * every // len(parts) or (step - (k + 1) * every // len(parts)) % every:
                continue
            weights = [net.get_weights() for net in nets]
            for i in part:
                drift = anchors[i] - np.mean([w[i] for w in weights], axis=0)
                if outer == "nesterov":
                    momentum[i] = 0.9 * momentum[i] + drift
                    anchors[i] = anchors[i] - 0.7 * (drift + 0.9 * momentum[i])
                else:
                    anchors[i] = anchors[i] - drift
                for w in weights:
                    w[i] = anchors[i]
            for net, w in zip(nets, weights, strict=True):
                net.set_weights(w)
    return nets[RANK].get_weights()


def close(net, weights, tolerance=3e-6):
    return all(np.allclose(a, b, rtol=0, atol=tolerance) for a, b in zip(net.get_weights(), weights, strict=True))


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one.get_weights(), other.get_weights(), strict=True))


@any_transport
def test_one_local_step_of_sgd_is_lock_step():

    def plain():
        return keras.optimizers.SGD(0.1)

    one, other = wrapped(plain, compression="local:1"), wrapped(plain)
    assert close(train(one, 10), train(other, 10).get_weights())


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("steps", few(11, once=[8]))
def test_local_steps_are_averaged(make, steps):
    assert close(train(wrapped(make, every=4), steps), by_hand(steps, 4, make))


def test_nesterov():
    net = train(wrapped(every=4, settings={"outer": "nesterov"}), 13)
    assert close(net, by_hand(13, 4, outer="nesterov"), 2e-5)


def test_fragments_take_turns():
    net = wrapped(adam, every=4, settings={"fragments": 2})
    net.optimizer.build(net.trainable_variables)
    place = {id(v): i for i, v in enumerate(net.trainable_variables)}
    parts = [[place[id(v)] for v in fragment.variables] for fragment in net.optimizer._hvdplus.fragments]
    assert sorted(sum(parts, [])) == [0, 1, 2, 3] and all(parts)
    assert close(train(net, 15), by_hand(15, 4, adam, parts=parts), 1e-5)


@pytest.mark.parametrize("level", few("int8", "lowrank:2+fp16", once=["auto"]))
def test_ranks_are_alike_after_an_exchange_and_only_then(level):
    net = wrapped(every=3, compression=level)
    for step in range(1, 13):
        train(net, 1, step)
        assert hvd.identical(net) == (step % 3 == 0 or SIZE == 1)
    train(net, 1, 13)
    net.optimizer.average_now()
    assert hvd.identical(net)


@any_transport
def test_eagerly_too():
    net = model()
    optimizer = hvd.DistributedOptimizer(sgd(), every=4, compression="none")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(optimizer, loss, run_eagerly=True)
    assert close(train(net, 9), by_hand(9, 4))


@any_transport
def test_lock_step_comes_first():
    net = train(wrapped(every=4, settings={"dense_steps": 5}), 5)
    assert close(net, train(wrapped(), 5).get_weights())
    train(net, 3, 5)
    assert hvd.identical(net) == (SIZE == 1)
    assert hvd.identical(train(net, 1, 8))


@any_transport
def test_what_optimizers_remember_may_be_averaged():
    for averages in (False, True):
        net = train(wrapped(adam, every=4, settings={"average_state": averages}), 8)
        for at_once in (False, True):
            if at_once:
                train(net, 2, 8)
                net.optimizer.average_now()
            remembered = [v for v in net.optimizer.variables if len(v.shape)]
            assert len(remembered) == 8
            assert hvd.identical(remembered) == (averages or SIZE == 1)


@any_transport
@pytest.mark.parametrize("level", ["none", "lowrank:2+fp16"])
@pytest.mark.parametrize("steps", [10, 12])
def test_a_saved_model_goes_on_as_if_never_stopped(level, steps, tmp_path, capfd):
    whole = train(wrapped(adam, every=4, compression=level, settings={"outer": "nesterov"}), steps)
    path = tmp_path / f"model{RANK}.keras"
    whole.save(path)
    train(whole, 9, steps)
    again = hvd.load_model(path, compression=level, settings={"every": 4, "outer": "nesterov"})
    again.compile(again.optimizer, again.loss, jit_compile=False)
    assert same(train(again, 9, steps), whole)
    assert same(
        train(hvd.load_model(path, compression=level, every=4, settings={"outer": "nesterov"}), 9, steps), whole
    )
    capfd.readouterr()
    hvd.load_model(path)  # in lock-step
    assert ("the checkpoint is of local steps" in capfd.readouterr().err) == (RANK == 0)


@any_transport
@pytest.mark.ranks(2, 4)
def test_averaging_after_loading_changes_nothing(tmp_path):
    """An outer step with momentum of no drift would."""
    net = train(wrapped(every=4, settings={"outer": "nesterov"}), 6)
    net.optimizer.average_now()
    net.save(tmp_path / f"model{RANK}.keras")
    again = hvd.load_model(
        tmp_path / f"model{RANK}.keras", compression="none", settings={"every": 4, "outer": "nesterov"}
    )
    again.optimizer.average_now()
    assert same(again, net)


@any_transport
@pytest.mark.ranks(2, 4)
def test_a_rank_with_a_step_more_does_not_exchange_alone():
    """As with data that do not divide among the ranks."""
    net = train(wrapped(every=8), 8)
    before = net.get_weights()
    train(net, RANK == 0, 8)
    drifts = [hvd.allreduce(keras.ops.convert_to_tensor(w - b)) for w, b in zip(net.get_weights(), before, strict=True)]
    net.optimizer.average_now()
    for weight, start, mean in zip(net.get_weights(), before, map(np.array, drifts), strict=True):
        assert np.abs(mean).max() > 0 and np.allclose(weight, start + mean, rtol=0, atol=2e-6)
    assert hvd.identical(train(net, 8, 9))


@any_transport
def test_a_model_saved_in_the_lock_step_before_goes_on_in_it(tmp_path):
    settings = {"dense_steps": 4}
    whole = train(wrapped(adam, every=3, settings=settings), 2)
    path = tmp_path / f"model{RANK}.keras"
    whole.save(path)
    train(whole, 8, 2)
    again = hvd.load_model(path, compression="none", settings={**settings, "every": 3})
    again.compile(again.optimizer, again.loss, jit_compile=False)
    assert same(train(again, 8, 2), whole)


@any_transport
def test_lock_step_before_counts_updates_and_not_what_accumulates():
    net = wrapped(every=4, backward_passes_per_step=2, average_aggregated_gradients=True, settings={"dense_steps": 2})
    train(net, 4)
    assert hvd.identical(net) and net.optimizer._hvdplus.rhythm.steps == 2
    train(net, 2, 4)
    assert hvd.identical(net) == (SIZE == 1) and net.optimizer._hvdplus.rhythm.steps == 3
    assert hvd.identical(train(net, 6, 6))


@any_transport
@pytest.mark.ranks(2, 4)
def test_one_ranks_checkpoint_and_a_broadcast(tmp_path):
    """As in Horovod's examples: rank 0 loads, all others begin, and take over where it is."""
    settings = {"dense_steps": 2}
    first = train(wrapped(every=4, settings=settings), 5)
    path = tmp_path / "model.keras"
    if RANK == 0:
        first.save(path)
        net = hvd.load_model(path, compression="none", settings={**settings, "every": 4})
        net.compile(net.optimizer, net.loss, jit_compile=False)
    else:
        net = wrapped(every=4, settings=settings)
        net.optimizer.build(net.trainable_variables)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    x, y = batch(RANK, RANK)
    net.fit(np.tile(x, (3, 1)), np.tile(y, 3), batch_size=8, shuffle=False, verbose=0, callbacks=[callback])
    assert not hvd.identical(net), "rank 0 was past the lock-step before"
    net.optimizer.average_now()
    assert hvd.identical(net)


@any_transport
def test_a_broadcast_begins_anew():
    net = compiled(model(RANK), hvd.DistributedOptimizer(sgd(), every=4, compression="none"))
    x, y = batch(0, RANK)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    net.fit(np.tile(x, (8, 1)), np.tile(y, 8), batch_size=8, verbose=0, callbacks=[callback])
    assert hvd.identical(net)


@any_transport
def test_a_callback_averages_before_a_validation():
    net = wrapped(every=5, compression="none")
    x, y = batch(0, RANK)
    data = np.tile(x, (7, 1)), np.tile(y, 7)
    net.fit(
        *data,
        batch_size=8,
        verbose=0,
        epochs=2,
        validation_data=(x, y),
        callbacks=[hvd.callbacks.AverageLocalStepsCallback()],
    )
    assert hvd.identical(net)


@any_transport
@pytest.mark.ranks(2, 4)
def test_ranks_may_skip_steps_by_themselves():
    scaler = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=8.0)
    net = compiled(model(), hvd.DistributedOptimizer(scaler, every=4, compression="none"))
    for step in range(8):
        x, y = batch(step, RANK)
        if RANK == 1 and step == 2:
            x = x * np.float32(np.inf)
        net.train_on_batch(x, y)
    assert hvd.identical(net) and all(np.isfinite(w).all() for w in net.get_weights())


@any_transport
@pytest.mark.ranks(2, 4)
def test_a_schedule_may_fall_behind_on_a_rank_that_skips_steps():
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rate), initial_scale=8.0)
    net = compiled(model(), hvd.DistributedOptimizer(scaler, every=2, compression="none"))
    for step in range(8):
        x, y = batch(step, RANK)
        net.train_on_batch(x * np.float32(np.inf if RANK == 1 and step == 2 else 1), y)
    assert hvd.identical(net)


@any_transport
@pytest.mark.ranks(2, 4)
def test_ranks_with_different_learning_rates_are_an_error():
    net = wrapped(lambda: keras.optimizers.SGD(0.1 + 0.1 * (RANK == 1)), every=2)
    with pytest.raises(Exception, match="learning rate differs between rank 0 and rank.*1"):
        train(net, 8)


@any_transport
def test_accumulated_gradients_count_as_one_step():
    net = compiled(model(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), every=2))
    for step in range(1, 9):
        train(net, 1, step)
        assert hvd.identical(net) == (step in (1, 4, 5, 8) or SIZE == 1)


def test_a_measured_number_of_steps():
    net = wrapped(every="auto", compression="fp16")
    train(net, 100)
    net.optimizer.average_now()
    assert hvd.identical(net)
    interval = net.optimizer._hvdplus.rhythm.interval
    assert len(interval.compute) >= 3 or SIZE == 1
    assert interval.highest_rate == pytest.approx(0.1) or SIZE == 1


@any_transport
@pytest.mark.ranks(2, 4)
def test_ranks_that_would_exchange_after_other_steps_are_an_error_on_all():
    net = wrapped(every=4 + RANK)
    with pytest.raises(ValueError, match="Ranks 0 and 1 differ in every: 4 against 5"):
        net.optimizer.build(net.trainable_variables)


@any_transport
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"op": "Sum"}, "Local steps are averaged. Received: op=Sum"),
        ({"settings": {"fragments": 9}}, "fragments has to be from 1 to the 8 local steps"),
        ({"settings": {"overlap_steps": 2}}, "overlap_steps works in PyTorch only"),
        ({"local_layers": [keras.layers.Dense(1)]}, "With local steps all layers are averaged"),
    ],
)
def test_what_cannot_be_is_an_error(keywords, message):
    keywords = {name: hvd.Sum if value == "Sum" else value for name, value in keywords.items()}
    with pytest.raises(ValueError, match=message):
        hvd.DistributedOptimizer(sgd(), every=8, **keywords)


@any_transport
def test_loss_scaling_that_comes_later_is_an_error_with_lock_step_before():
    """``compile`` adds it under mixed_float16, after the optimizer was wrapped."""
    inner = hvd.DistributedOptimizer(sgd(), every=4, settings={"dense_steps": 2})
    net = compiled(model(), keras.optimizers.LossScaleOptimizer(inner))
    with pytest.raises(ValueError, match="do not work with dense_steps=2"):
        train(net, 1)


@any_transport
@pytest.mark.ranks(2, 4)
def test_means_of_a_ranks_own_weights_are_an_error():
    with pytest.raises(ValueError, match="use_ema=True"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, use_ema=True), every=4)


@any_transport
def test_wrapped_twice():
    optimizer = hvd.DistributedOptimizer(sgd(), every=8)
    for every in (1, 8):
        with pytest.raises(ValueError, match="wrapped twice"):
            hvd.DistributedOptimizer(optimizer, every=every)


@any_transport
def test_the_log_has_a_line_an_exchange(tmp_path):
    path = tmp_path / "run.jsonl"
    net = wrapped(every=4, compression="fp16", settings={"run_log": str(path), "window_steps": 2})
    train(net, 40)
    figures = hvd.report(net.optimizer)
    assert figures["steps"] == 10 and figures["level"] == "fp16"
    assert len(list(tmp_path.glob("run.jsonl*"))) == (RANK == 0)
