"""Trains a small SegNet four times: in float32, and in float16 with three ways to keep gradients.

    python examples/segmentation.py
    python examples/segmentation.py --data CamVid --size 360 480 --batch 12 --epochs 40
    python examples/segmentation.py --data CamVid --precision float16 --scaling fixed:2^11

The network labels every pixel of a street scene. Its loss is a mean over all pixels of a batch, so
the gradient of one pixel is tiny: float16 has nothing below 6e-8, and what is smaller is lost when
the gradient enters the float16 part of the network, at the cast before the pixel-wise softmax.

    float32           nothing is lost; the reference
    float16           mixed_float16 layers, gradients as they come
    loss-scaling      mixed_float16 with Keras' LossScaleOptimizer: one scale for all gradients
    gradient-scaling  mixed_float16 with tf_gradscale: a scale for each gradient

All four start from the same weights and see the same batches. The scenes drawn for this example
are small, so that it runs in minutes on two processor cores; camera images have 64 times the
pixels. The program therefore multiplies the loss by 1/64 (`--loss-multiplier`), which gives a
pixel's gradient the size it has in a batch of 8 images of 768 x 1024, and divides the learning rate
by it: in float32 nothing changes. With `--data` the multiplier is 1.

The program prints one table and draws one picture: curves, scales per layer, predicted maps. With
`--precision` or `--scaling` it trains once, in that way (`methods.py` lists them).
"""

import argparse
import os
import sys
from typing import NamedTuple

# Keep TensorFlow's start-up notes off the screen; must be set before it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import methods
import numpy as np
import segmentation_data
import segmentation_figure
import segnet
import tensorflow as tf

METHODS = {
    "float32": methods.Method("float32", "none"),
    "float16": methods.Method("float16", "none"),
    "loss-scaling": methods.Method("float16", "dynamic"),
    "gradient-scaling": methods.Method("float16", "balanced"),
}
SMALL_MAPS = 1 / 64  # pixels of a drawn scene (96 x 128) over those of a camera image (768 x 1024)


class Run(NamedTuple):
    """What one training run leaves behind."""

    name: str
    found: dict  # what `methods.report` returned, with the share lost at the cast
    maps: np.ndarray  # predicted labels of the validation images that are shown


def prepare(method, args, data, loss, learning_rate):
    """Builds and compiles the model of a method."""
    classes = len(data.classes)
    return methods.compiled(
        method,
        lambda: segnet.build_model(args.size, classes),
        lambda **options: keras.optimizers.SGD(learning_rate, momentum=0.9, **options),
        loss,
        seed=args.seed,
        metrics=[
            segnet.PixelCrossEntropy(loss.class_weights),
            keras.metrics.MeanIoU(classes, ignore_class=classes, sparse_y_pred=False, name="miou"),
        ],
    )


def softmax_gradient(probabilities, labels, loss):
    """Returns the gradient of the loss with respect to the logits, in float64."""
    classes = len(loss.class_weights)
    weights = np.append(loss.class_weights, 0)[labels][..., None]
    targets = np.eye(classes + 1)[labels][..., :classes]
    count = max(np.count_nonzero(labels < classes), 1)
    return loss.multiplier * weights * (probabilities - targets) / count


def share_lost(gradient, scale):
    """Returns the share of non-zero entries that, times `scale`, are 0 or infinite in float16."""
    with np.errstate(over="ignore"):
        cast = (gradient[gradient != 0] * scale).astype(np.float16)
    return np.count_nonzero((cast == 0) | np.isinf(cast)) / max(cast.size, 1)


def scale_at_cast(model, method):
    """Returns the scale with which the gradient passes the cast before the softmax."""
    if method.config() is not None:
        # Sites are in the order of backpropagation: the first cast is the one before the softmax.
        return next(site.cumulative_scale for site in model.scales if site.kind == "cast")
    return float(getattr(model.optimizer, "dynamic_scale", method.loss_scale))


def train(name, method, args, data):
    """Trains with one method and returns the `Run`."""
    steps_per_epoch = args.steps // args.epochs
    loss = segnet.PixelCrossEntropy(args.class_weights, args.loss_multiplier)
    schedule = keras.optimizers.schedules.CosineDecay(
        args.learning_rate / args.loss_multiplier, steps_per_epoch * args.epochs
    )
    model = prepare(method, args, data, loss, schedule)
    train_set = tf.data.Dataset.from_tensor_slices((data.x_train, data.y_train))
    train_set = train_set.shuffle(len(data.x_train), seed=args.seed).repeat()
    costs = methods.Costs()
    history = model.fit(
        train_set.batch(args.batch, drop_remainder=True),
        steps_per_epoch=steps_per_epoch,
        epochs=args.epochs,
        validation_data=(data.x_val, data.y_val),
        validation_batch_size=args.batch,
        shuffle=False,  # the data set shuffles by itself
        verbose=args.verbose,
        callbacks=[costs],
    ).history
    labels = data.y_train[: args.batch]
    probabilities = np.asarray(model(data.x_train[: args.batch], training=True))
    gradient = softmax_gradient(probabilities, labels, loss)
    cast_lost = 0.0
    if method.precision == "float16":
        cast_lost = share_lost(gradient, scale_at_cast(model, method))
    maps = np.argmax(model(data.x_val[segmentation_figure.examples(data)]), axis=-1)
    lost = None
    if args.method is not None:
        # Of all gradients. This takes a while, without XLA.
        few = min(4, args.batch)
        x, y = data.x_train[:few], data.y_train[:few]
        lost = methods.lost_entries(model, method, loss, few / args.batch, x, y)
    found = methods.report(
        "segmentation", method, args, data.name, "val_miou", history, model, costs, lost
    )
    found["lost_at_cast"] = cast_lost
    return Run(name, found, maps)


def format_table(runs):
    """Returns the results as a table in plain text."""
    rows = [("method", "train loss", "val mIoU", "steps lost", "lost at cast", "seconds")]
    for run in runs:
        found = run.found
        rows.append(
            (
                run.name,
                f"{found['history']['cross_entropy'][-1]:.3f}",
                f"{found['history']['val_miou'][-1]:.3f}",
                str(found["steps_lost"]),
                f"{found['lost_at_cast']:.1%}",
                f"{found['seconds_first_step'] + found['seconds']:.0f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])])
        for cells in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def parse_arguments(argv=None):
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    methods.add_common_arguments(parser, "CamVid's folder or an .npz file", learning_rate=0.2)
    add = parser.add_argument
    add("--size", type=int, nargs=2, default=(96, 128), metavar=("H", "W"), help="of the images")
    add("--batch", type=int, default=8, help="images per step (default: %(default)s)")
    add("--epochs", type=int, default=12, help="validations on the way (default: %(default)s)")
    add("--steps", type=int, help="steps in all (default: each image once in an epoch)")
    add("--loss-multiplier", type=float, help="default: 1/64 for drawn scenes, else 1")
    add("--balance", action="store_true", help="median-frequency class weights")
    add("--methods", nargs="+", choices=METHODS, help="ways to compare (default: all four)")
    add("--precision", choices=methods.POLICIES, help="train once, in this precision or scaling")
    add("--out", default="segmentation.png", metavar="PNG", help="picture (default: %(default)s)")
    args = methods.parsed(parser, argv)
    if args.methods is not None and args.method is not None:
        parser.error(
            "--methods names ways to compare, --precision and --scaling one way: give one of them. "
            f"Received: --methods {' '.join(args.methods)}, and {args.method}"
        )
    args.methods = args.methods or tuple(METHODS)
    halvings = len(segnet.WIDTHS) - 1
    stride = 2**halvings
    if any(pixels < 16 or pixels % stride for pixels in args.size):
        parser.error(
            f"--size must be multiples of {stride} from 16 on, since the maps are halved "
            f"{halvings} times. Received: {args.size[0]} {args.size[1]}"
        )
    if args.loss_multiplier is None:
        args.loss_multiplier = 1.0 if args.data else SMALL_MAPS
    return args


def main(argv=None):
    """Runs the program."""
    args = parse_arguments(argv)
    try:
        data = segmentation_data.load(args.data, args.size, args.seed)
    except ValueError as error:
        sys.exit(f"segmentation.py: {error}")
    args.batch = min(args.batch, len(data.x_train))
    args.steps = args.steps or args.epochs * (len(data.x_train) // args.batch)
    args.epochs = min(args.epochs, args.steps)
    weights = data.class_weights() if args.balance else np.ones(len(data.classes))
    args.class_weights = [float(weight) for weight in weights]
    print(
        f"{data.name}: {len(data.x_train)} images to train on, {len(data.x_val)} to validate, "
        f"{args.size[0]} x {args.size[1]} pixels, {len(data.classes)} classes; "
        f"{args.steps // args.epochs * args.epochs} steps of {args.batch} images; "
        f"loss times {args.loss_multiplier:g}"
    )
    wanted = {name: METHODS[name] for name in args.methods}
    if args.method is not None:
        wanted = {str(args.method): args.method}
    # Not an option any more.
    del args.methods
    runs = []
    for name, method in wanted.items():
        print(f"\n{name}", flush=True)
        runs.append(train(name, method, args, data))
    print("\n" + format_table(runs))
    if args.json:
        found = [run.found for run in runs]
        methods.write(args.json, found if args.method is None else found[0])
    segmentation_figure.draw(args.out, data, runs)
    print(f"\nCurves, scales and maps: {args.out}")


if __name__ == "__main__":
    main()
