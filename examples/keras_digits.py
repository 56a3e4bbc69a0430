"""Train a small CNN on scikit-learn's real handwritten digits, on as many ranks as you like.

    horovodrun -np 2 python examples/keras_digits.py
    mpirun -np 2 python examples/keras_digits.py

Change the import back and what is left is a script for Horovod, but for the lines that watch and report.
"""

import argparse
import os

# TensorFlow reads these when it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")

import keras  # noqa: E402
from digits import Progress, last_line, load_digits_shard  # noqa: E402

import hvdplus.keras as hvd  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--batch-size", type=int, default=32, help="images a rank and step")
parser.add_argument("--learning-rate", type=float, default=0.02)
parser.add_argument("--compression", default="auto", help="auto, none, fp16, lowrank:4, ...")
parser.add_argument("--png", help="file for the report's picture")
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(1 + hvd.rank())  # ranks start apart on purpose: the callback below has to make them equal

train_x, train_y, test_x, test_y = load_digits_shard(hvd.rank(), hvd.size(), channels_last=True)

model = keras.Sequential(
    [
        keras.layers.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10),
    ]
)
optimizer = keras.optimizers.SGD(args.learning_rate * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, compression=args.compression)
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

progress = Progress("keras", args.epochs, show=hvd.rank() == 0)


class ShowProgress(keras.callbacks.Callback):
    """One line an epoch on rank 0."""

    def on_epoch_end(self, epoch, logs):
        progress.epoch(epoch, logs["loss"], logs["val_accuracy"], optimizer.hvdplus.status)


model.fit(
    train_x,
    train_y,
    batch_size=args.batch_size,
    epochs=args.epochs,
    validation_data=(test_x, test_y),
    validation_batch_size=len(test_x),
    verbose=0,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        ShowProgress(),
    ],
)
accuracy = model.evaluate(test_x, test_y, verbose=0)[1]

identical = hvd.identical(model)
summary = hvd.report(optimizer, png=args.png, accuracy=accuracy, identical_ranks=identical)
if hvd.rank() == 0:
    print(last_line("keras", accuracy, identical, summary), flush=True)
hvd.shutdown()
