"""Large batches: a CNN on CIFAR-10 with LAMB (You et al., arXiv 1904.00962), which Keras has.

    mpirun -np 4 --bind-to none python examples/recipes/large_batch_keras.py --data cifar-10-batches-bin

LAMB scales every layer's step by the norms of its weights and of their update. It sees the mean of all ranks'
gradients, as one process with the whole batch would. The learning rate grows with the batch, and warms up.
"""

import argparse

import keras
from data import cifar10

import hvdplus.keras as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", required=True, help="folder with CIFAR-10's binary files")
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--batch-size", type=int, default=512, help="images a rank and step")
parser.add_argument("--learning-rate", type=float, default=0.002, help="for 256 images a step")
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(hvd.rank())
x, y, test_x, test_y = cifar10(args.data, hvd.rank(), hvd.size())
x, test_x = x.transpose(0, 2, 3, 1), test_x.transpose(0, 2, 3, 1)
model = keras.Sequential([keras.layers.Input((32, 32, 3))])
for filters in (64, 128, 256):
    model.add(keras.layers.Conv2D(filters, 3, strides=2, padding="same", activation="relu"))
model.add(keras.layers.Flatten())
model.add(keras.layers.Dense(10))
steps = max(1, len(x) // args.batch_size)
total = args.epochs * steps
rate = args.learning_rate * args.batch_size * hvd.size() / 256
schedule = keras.optimizers.schedules.CosineDecay(
    0.0, total - total // 10, warmup_target=rate, warmup_steps=max(1, total // 10)
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.Lamb(schedule, weight_decay=1e-4))
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(
    x[: steps * args.batch_size],
    y[: steps * args.batch_size],
    batch_size=args.batch_size,
    epochs=args.epochs,
    validation_data=(test_x, test_y),
    verbose=2 if hvd.rank() == 0 else 0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
)
hvd.report(optimizer)
hvd.shutdown()
