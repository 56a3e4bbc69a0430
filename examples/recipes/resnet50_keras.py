"""ResNet-50 on a folder of images, one folder inside for each class, as ImageNet's are.

    mpirun -np 2 --bind-to none python examples/recipes/resnet50_keras.py --data imagenet/train

The learning rate grows with the number of ranks, warms up for five epochs, and falls to a tenth at epochs 30, 60 and 80
(Goyal et al., arXiv 1706.02677).

Every rank reads and decodes all images and keeps its share: where reading is slow, make shares of the files instead.

Its convolutions are small for what they compute, so this pays on slower networks than a language model does: let
``hvdplus try`` tell.
"""

import argparse

import keras

import hvdplus.keras as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", required=True, help="folder with a folder for each class")
parser.add_argument("--epochs", type=int, default=90)
parser.add_argument("--batch-size", type=int, default=32, help="images a rank and step")
parser.add_argument("--image-size", type=int, default=224)
parser.add_argument("--learning-rate", type=float, default=0.0125, help="of one rank")
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(0)
images = keras.utils.image_dataset_from_directory(
    args.data, batch_size=None, image_size=(args.image_size, args.image_size), seed=0, verbose=hvd.rank() == 0
)
classes = len(images.class_names)
steps = images.cardinality().numpy() // hvd.size() // args.batch_size  # as many on every rank
if not steps:
    raise SystemExit(f"{args.data} has too few images for {hvd.size()} batches of {args.batch_size}")
mine = images.shard(hvd.size(), hvd.rank()).batch(args.batch_size, drop_remainder=True).repeat().prefetch(4)

inputs = keras.layers.Input((args.image_size, args.image_size, 3))
scaled = keras.layers.Rescaling(1 / 127.5, offset=-1)(keras.layers.RandomFlip("horizontal")(inputs))
outputs = keras.applications.ResNet50(weights=None, classes=classes)(scaled) if args.image_size == 224 else None
if outputs is None:  # another size wants a head of its own
    body = keras.applications.ResNet50(weights=None, include_top=False, pooling="avg", input_tensor=scaled)
    outputs = keras.layers.Dense(classes, activation="softmax")(body.output)
model = keras.Model(inputs, outputs)

rate = args.learning_rate * hvd.size()
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9, nesterov=True, weight_decay=1e-4))
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(
    mine,
    steps_per_epoch=steps,
    epochs=args.epochs,
    verbose=2 if hvd.rank() == 0 else 0,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=5, steps_per_epoch=steps),
        *(
            hvd.callbacks.LearningRateScheduleCallback(rate, 0.1**number, start_epoch=first, end_epoch=last)
            for number, (first, last) in enumerate([(30, 60), (60, 80), (80, None)], start=1)
        ),
    ],
)
hvd.report(optimizer)
if hvd.rank() == 0:
    model.save("resnet50.keras")
hvd.shutdown()
