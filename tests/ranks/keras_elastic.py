"""As ``elastic.py``, in Keras: ranks come and go while ``fit`` runs."""

import faulthandler
import itertools
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")

import keras
import numpy as np
from disturbing import BATCH, COMMIT, FAILS_AT, KILLED_AT, Task, asked, change, changes_at, die, outcome, watched
from horovod.common.exceptions import HorovodInternalError

import hvdplus.keras as hvd

HOSTS, SEEN = Path(sys.argv[1]), Path(sys.argv[2])
LEVELS, DISTURBED = os.environ["LEVELS"].split(), os.environ["DISTURBED"]
SEEDS = [int(seed) for seed in os.environ["SEEDS"].split()]

hvd.init()
seen, trained = [], []


class Watch(keras.callbacks.Callback):
    def __init__(self, task, state, fails):
        super().__init__()
        self.task, self.state, self.fails = task, state, fails

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = self.task.rate(self.state.samples, hvd.size())

    def on_train_batch_end(self, batch, logs=None):
        state = self.state
        state.step += 1
        state.samples += BATCH * hvd.size()
        if DISTURBED and watched(state, self.task.samples):
            self._see()
        if DISTURBED == "killed":
            die(state, hvd.size(), hvd.local_size())
        if state.step == FAILS_AT and self.fails:
            self.fails = False
            raise HorovodInternalError("A sum has failed on all ranks, none of which is gone.")
        if DISTURBED == "resized" and (then := changes_at(state, hvd.size())):
            change(state, hvd.rank(), HOSTS, then)
        if DISTURBED == "killed" and hvd.size() == 2 and state.step < KILLED_AT + 90:
            time.sleep(0.2)  # longer, all in all, than a rank may wait

    def _see(self):
        optimizer = self.model.optimizer
        coordinator = optimizer.hvdplus
        local = getattr(optimizer._hvdplus, "fragments", ())  # whose ranks are alike after an exchange only
        exchanges = [fragment.outer._hvdplus.exchange for fragment in local] or [optimizer._hvdplus.exchange]
        residuals = {(k, i): r for k, x in enumerate(exchanges) for i, r in x.state()["residuals"].items()}
        if local and optimizer._hvdplus.rhythm._latest[0] != optimizer._hvdplus.rhythm.steps:
            coordinator = None
        seen.append(
            {
                "step": self.state.step,
                "samples": self.state.samples,
                "ranks": hvd.size(),
                "rank": hvd.rank(),
                "identical": hvd.identical(self.model) or coordinator is None,
                "level": coordinator.ladder.names[coordinator.plan.level] if coordinator else "",
                "held_back": sum(float(np.linalg.norm(residual)) for residual in residuals.values()),
            }
        )


def training(level, epochs, fails, seed):
    """Train once; what came of it is in ``trained``."""
    faulthandler.dump_traceback_later(160, exit=True)  # a rank that waits says where
    task = Task(seed, epochs)
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.layers.Input((20,)), keras.layers.Dense(40, "relu"), keras.layers.Dense(4)])
    bare = keras.optimizers.SGD(task.rate(0, hvd.size()), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(bare, compression=level, settings={"dense_steps": 2})
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    state = hvd.elastic.KerasState(model, step=0, samples=0, changes=0)
    watch = Watch(task, state, fails)

    @hvd.elastic.run
    def train(state):
        inputs, labels = task.rest(state.samples, hvd.rank(), hvd.size())
        callbacks = [watch, hvd.elastic.CommitStateCallback(state, 1 if DISTURBED == "resized" else COMMIT)]
        model.fit(inputs, labels, batch_size=BATCH, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)

    train(state)
    inputs, labels = task.test
    logits = model.predict_on_batch(inputs)
    weights = b"".join(np.asarray(weight).tobytes() for weight in model.get_weights())
    accuracy = (logits.argmax(1) == labels).mean()
    trained.append(outcome(state, level, seed, fails, accuracy, loss(labels, logits), weights))


for level, seed in itertools.product(LEVELS, SEEDS):
    training(*asked(level), seed)
(SEEN / f"{os.getpid()}.json").write_text(json.dumps({"steps": seen, "shared": [], "trained": trained}))
