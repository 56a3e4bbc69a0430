"""A CNN on CIFAR-10.

    mpirun -np 2 --bind-to none python examples/recipes/cifar10_keras.py --data cifar-10-batches-bin

The learning rate grows with the number of ranks, and warms up (Goyal et al., arXiv 1706.02677).
"""

import argparse

import keras
from data import cifar10

import hvdplus.keras as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", required=True, help="folder with CIFAR-10's binary files")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=64, help="images a rank and step")
parser.add_argument("--learning-rate", type=float, default=0.05, help="of one rank")
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(hvd.rank())
x, y, test_x, test_y = cifar10(args.data, hvd.rank(), hvd.size())
x, test_x = x.transpose(0, 2, 3, 1), test_x.transpose(0, 2, 3, 1)

model = keras.Sequential([keras.layers.Input((32, 32, 3)), keras.layers.RandomFlip("horizontal")])
for filters in (64, 128, 256):
    model.add(keras.layers.Conv2D(filters, 3, padding="same", use_bias=False))
    model.add(keras.layers.BatchNormalization())
    model.add(keras.layers.ReLU())
    model.add(keras.layers.MaxPooling2D())
model.add(keras.layers.GlobalAveragePooling2D())
model.add(keras.layers.Dense(10))

optimizer = keras.optimizers.SGD(args.learning_rate * hvd.size(), momentum=0.9, weight_decay=5e-4)
optimizer = hvd.DistributedOptimizer(optimizer)
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
history = model.fit(
    x,
    y,
    batch_size=args.batch_size,
    epochs=args.epochs,
    validation_data=(test_x, test_y),
    verbose=2 if hvd.rank() == 0 else 0,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=args.learning_rate * hvd.size(), warmup_epochs=3),
    ],
)
hvd.report(optimizer, accuracy=history.history["val_accuracy"][-1])
if hvd.rank() == 0:
    model.save("cifar10.keras")
hvd.shutdown()
