"""A language model of bytes: an LSTM, with much gradient for little computation, which is where hvdplus pays most.

mpirun -np 2 --bind-to none python examples/recipes/language_model_keras.py --text book.txt
"""

import argparse

import keras
import numpy as np
from data import text, windows

import hvdplus.keras as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--text", required=True, help="any file")
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--length", type=int, default=128, help="bytes of a window")
parser.add_argument("--batch-size", type=int, default=16, help="windows a rank and step")
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--every", default=1, help="local steps between two exchanges, or auto")
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(hvd.rank())
train, test = text(args.text)
draw = np.random.default_rng(hvd.rank())  # windows of its own on each rank


def batches():
    """Without end."""
    while True:
        yield windows(train, args.length, args.batch_size, draw)


model = keras.Sequential(
    [
        keras.layers.Input((args.length,), dtype="int64"),
        keras.layers.Embedding(256, args.width),
        keras.layers.LSTM(args.width, return_sequences=True),
        keras.layers.Dense(256),
    ]
)
every = args.every if args.every == "auto" else int(args.every)
optimizer = hvd.DistributedOptimizer(keras.optimizers.AdamW(args.learning_rate, global_clipnorm=1.0), every=every)
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
epoch_steps = min(100, args.steps)
model.fit(
    batches(),
    steps_per_epoch=epoch_steps,
    epochs=args.steps // epoch_steps,
    shuffle=False,  # they are drawn at random
    validation_data=windows(test, args.length, 64, np.random.default_rng(0)),
    verbose=2 if hvd.rank() == 0 else 0,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        *([hvd.callbacks.AverageLocalStepsCallback()] if every != 1 else []),
        hvd.callbacks.MetricAverageCallback(),
    ],
)
bits = model.evaluate(*windows(test, args.length, 64, np.random.default_rng(0)), verbose=0) / np.log(2)
hvd.report(optimizer, bits=float(bits))
if hvd.rank() == 0:
    print(f"{bits:.3f} bits a byte")
    model.save("language_model.keras")
hvd.shutdown()
