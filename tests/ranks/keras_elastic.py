"""As ``elastic.py``, in Keras: ranks come and go while ``fit`` runs."""

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")

import keras
import numpy as np

import hvdplus.keras as hvd

HOSTS, SEEN = Path(sys.argv[1]), Path(sys.argv[2])
LEVEL, KILLED = os.environ["LEVEL"], "KILLED" in os.environ
STEPS = 200 if KILLED else 60

faulthandler.dump_traceback_later(130, exit=True)  # a rank that waits says where
hvd.init()
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((20,)), keras.layers.Dense(40, "relu"), keras.layers.Dense(4)])
bare = keras.optimizers.SGD(0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(bare, compression=LEVEL, settings={"dense_steps": 2})
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
seen = []


class Watch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        state.step += 1
        coordinator = optimizer.hvdplus
        local = getattr(optimizer._hvdplus, "fragments", ())  # whose ranks are alike after an exchange only
        exchanges = [fragment.outer._hvdplus.exchange for fragment in local] or [optimizer._hvdplus.exchange]
        residuals = {(k, i): r for k, x in enumerate(exchanges) for i, r in x.state()["residuals"].items()}
        if local and optimizer._hvdplus.rhythm._last != optimizer._hvdplus.rhythm.steps:
            coordinator = None
        seen.append(
            {
                "step": state.step,
                "ranks": hvd.size(),
                "rank": hvd.rank(),
                "identical": hvd.identical(model) or coordinator is None,
                "level": coordinator.ladder.names[coordinator.plan.level] if coordinator else "",
                "held_back": sum(float(np.linalg.norm(residual)) for residual in residuals.values()),
            }
        )
        if KILLED and state.step == 10 and hvd.size() == 3 and hvd.local_size() == 1:  # Horovod gives up its host
            os.kill(os.getpid(), signal.SIGKILL)
        for step, ranks, then in () if KILLED else ((15, 3, "localhost:2"), (30, 2, "localhost:3")):
            if state.step == step and hvd.size() == ranks and state.changes == (step == 30):
                if hvd.rank() == 0:
                    HOSTS.write_text(then)
                while True:
                    time.sleep(0.5)
                    state.changes = 1 + (step == 30)
                    state.commit()  # ends with the change
        if KILLED and hvd.size() == 2:
            time.sleep(0.1)  # longer, all in all, than a rank may wait
        if state.step >= STEPS:
            model.stop_training = True


@hvd.elastic.run
def train(state):
    rng = np.random.default_rng([state.step, hvd.rank()])
    inputs = rng.standard_normal((8 * STEPS, 20)).astype(np.float32)
    labels = inputs[:, :4].argmax(1)
    callbacks = [Watch(), hvd.elastic.CommitStateCallback(state, 4 if KILLED else 1)]
    model.fit(inputs, labels, batch_size=8, epochs=1, verbose=0, callbacks=callbacks)


state = hvd.elastic.KerasState(model, step=0, changes=0)
train(state)
inputs = np.random.default_rng(1).standard_normal((500, 20)).astype(np.float32)
accuracy = float((model.predict_on_batch(inputs).argmax(1) == inputs[:, :4].argmax(1)).mean())
(SEEN / f"{os.getpid()}.json").write_text(json.dumps({"steps": seen, "shared": [], "accuracy": accuracy}))
