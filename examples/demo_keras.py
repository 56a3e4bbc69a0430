"""One training of the demo in Keras: a wide perceptron on real digits, until the test accuracy is reached.

Under Keras 3, stock Horovod trains its ranks apart, each for itself. What it would send if it did not, hvdplus sends at
``none`` and at ``fp16``, so these stand for it here.

    python examples/demo.py            starts it three ways on two hosts with a slow link between them
"""

import argparse
import json
import os
import time

# TensorFlow reads these when it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")

import keras  # noqa: E402
from digits import last_line, load_digits_shard  # noqa: E402

import hvdplus.keras as hvd  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--way", choices=("stock", "stock-fp16", "auto"), default="auto")
parser.add_argument("--accuracy", type=float, default=0.95, help="train until the test set is classified so well")
parser.add_argument("--most-steps", type=int, default=400)
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(1)
train_x, train_y, test_x, test_y = load_digits_shard(hvd.rank(), hvd.size(), channels_last=True)
model = keras.Sequential(
    [
        keras.layers.Input((8, 8, 1)),
        keras.layers.Flatten(),
        keras.layers.Dense(1024, activation="relu"),
        keras.layers.Dense(1024, activation="relu"),
        keras.layers.Dense(10),
    ]
)
optimizer = keras.optimizers.SGD(0.02 * hvd.size(), momentum=0.9)
level = {"stock": "none", "stock-fp16": "fp16", "auto": "auto"}[args.way]
optimizer = hvd.DistributedOptimizer(optimizer, compression=level)
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])


class Watch(keras.callbacks.Callback):
    """Tests after every fifth step, off the clock, and ends the training when the accuracy is reached."""

    def __init__(self):
        super().__init__()
        self.step, self.seconds, self.accuracy = 0, 0.0, 0.0
        self.began = time.perf_counter()

    def on_train_batch_begin(self, batch, logs=None):
        if self.step == 1:  # the first one holds the compilation, in every way alike
            self.seconds, self.began = 0.0, time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1
        if self.step % 5:
            return
        self.seconds += time.perf_counter() - self.began
        guessed = model.predict_on_batch(test_x).argmax(axis=1)
        self.accuracy = float((guessed == test_y).mean())
        if hvd.rank() == 0:
            point = {"step": self.step, "seconds": self.seconds, "accuracy": self.accuracy}
            print("point", json.dumps(point), flush=True)
        if self.accuracy >= args.accuracy or self.step >= args.most_steps:
            self.model.stop_training = True
        self.began = time.perf_counter()


watch = Watch()
model.fit(
    train_x,
    train_y,
    batch_size=32,
    epochs=args.most_steps,
    verbose=0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), watch],
)
if args.way == "auto":
    identical = hvd.identical(model)
    summary = hvd.report(optimizer, accuracy=watch.accuracy, identical_ranks=identical)
    if hvd.rank() == 0:
        print(last_line("keras", watch.accuracy, identical, summary), flush=True)
hvd.shutdown()
