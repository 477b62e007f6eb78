"""Trains a small ResNet to tell images apart, in a precision and with a scaling of your choice.

python examples/recognition.py
python examples/recognition.py --data cifar10 --depth 50 --precision float32
python examples/recognition.py --data cifar10 --scaling dynamic --loss-multiplier 1e-4
"""

import argparse
import os
import sys

# Keep TensorFlow's start-up notes off the screen; must be set before it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import curves
import keras
import methods
import recognition_data
import resnet
import tensorflow as tf


def batches(data, args):
    """Batches without end; images are flipped, and shifted by up to 4 pixels."""
    height, width = data.x_train.shape[1:3]

    def augmented(image, label, seed):
        image = tf.image.stateless_random_flip_left_right(image, seed)
        image = tf.pad(image, [[4, 4], [4, 4], [0, 0]], "REFLECT")
        return tf.image.stateless_random_crop(image, (height, width, 3), seed), label

    images = tf.data.Dataset.from_tensor_slices((data.x_train, data.y_train))
    images = images.shuffle(len(data.x_train), seed=args.seed).repeat()
    seeds = tf.data.Dataset.random(seed=args.seed).batch(2, drop_remainder=True)
    images = tf.data.Dataset.zip(images, seeds)
    images = images.map(lambda pair, seed: augmented(*pair, seed), num_parallel_calls=2)
    return images.batch(args.batch, drop_remainder=True).prefetch(2)


def draw(path, history):
    """Draws the curves."""
    accuracy = {"validation": "val_accuracy"}
    curves.draw(path, history, {"cross-entropy": curves.CROSS_ENTROPY, "accuracy": accuracy})


def make_optimizer(args, **options):
    """SGD with momentum and weight decay; in float32 the loss multiplier changes nothing."""
    rate = keras.optimizers.schedules.CosineDecay(
        args.learning_rate / args.loss_multiplier, args.steps
    )
    optimizer = keras.optimizers.SGD(
        rate,
        momentum=0.9,
        nesterov=True,
        # Keras multiplies it by the rate.
        weight_decay=5e-4 * args.loss_multiplier,
        **options,
    )
    optimizer.exclude_from_weight_decay(var_names=["gamma", "beta", "bias"])
    return optimizer


def parse_arguments(argv=None):
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    data = "cifar10 (downloaded), its folder or an .npz file"
    methods.add_arguments(parser, data, steps=600, learning_rate=0.1)
    add = parser.add_argument
    add("--depth", type=int, choices=resnet.DEPTHS, default=18, help="default: %(default)s")
    add("--width", type=int, default=16, help="filters in the first stage (default: %(default)s)")
    add("--plain", action="store_true", help="without the residual connections")
    add("--batch", type=int, default=128, help="images per step (default: %(default)s)")
    return methods.parsed(parser, argv)


def main(argv=None):
    """Runs the program."""
    args = parse_arguments(argv)
    try:
        data = recognition_data.load(args.data, args.seed)
    except ValueError as error:
        sys.exit(f"recognition.py: {error}")
    epochs = methods.epochs(args)
    validated = methods.validated(args, len(data.x_val))
    print(
        f"{data.name}: {len(data.x_train)} images to train on, {len(validated)} to validate, "
        f"{data.classes} classes"
    )
    loss = keras.losses.sparse_categorical_crossentropy
    model = methods.compiled(
        args.method,
        lambda: resnet.build_model(
            data.x_train.shape[1:], data.classes, args.depth, args.width, not args.plain
        ),
        lambda **options: make_optimizer(args, **options),
        loss,
        args.loss_multiplier,
        args.seed,
        metrics=["accuracy", keras.metrics.SparseCategoricalCrossentropy(name="cross_entropy")],
    )
    costs = methods.Costs()
    history = model.fit(
        batches(data, args),
        steps_per_epoch=args.steps // epochs,
        epochs=epochs,
        validation_data=(data.x_val[validated], data.y_val[validated]),
        validation_batch_size=250,
        verbose=args.verbose,
        shuffle=False,  # the data set shuffles by itself
        callbacks=[costs],
    ).history
    few = min(8, args.batch)
    x, y = next(iter(batches(data, args)))
    multiplier = args.loss_multiplier * few / args.batch
    lost = methods.lost_entries(model, args.method, loss, multiplier, x[:few], y[:few])
    found = methods.report(
        "recognition", args.method, args, data.name, "val_accuracy", history, model, costs, lost
    )
    if args.json:
        methods.write(args.json, found)
    if args.out:
        draw(args.out, history)
        print(f"Curves: {args.out}")


if __name__ == "__main__":
    main()
