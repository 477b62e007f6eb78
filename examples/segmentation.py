"""Trains a small SegNet four times: in float32, and in float16 with three ways to keep gradients.

    python examples/segmentation.py
    python examples/segmentation.py --data CamVid --size 360 480 --batch 12 --epochs 40

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

The program prints one table and draws one picture: curves, scales per layer, predicted maps.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

# Keep TensorFlow's start-up notes off the screen; must be set before it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import segmentation_data
import segmentation_figure
import segnet
import tensorflow as tf

import tf_gradscale as gs

METHODS = {  # name: policy of the layers
    "float32": "float32",
    "float16": "mixed_float16",
    "loss-scaling": "mixed_float16",
    "gradient-scaling": "mixed_float16",
}
SMALL_MAPS = 1 / 64  # pixels of a drawn scene (96 x 128) over those of a camera image (768 x 1024)


class Run(NamedTuple):
    """What one training run leaves behind."""

    method: str
    history: dict  # per epoch: cross_entropy, val_cross_entropy, val_miou
    steps_lost: int
    cast_lost: float  # share of the gradient's entries lost at the cast, at the end of training
    seconds: float
    maps: np.ndarray  # predicted labels of the validation images that are shown
    scales: list  # (name, kind, local scale, cumulative scale) of every site; gradient scaling only


def prepare(method, args, data, loss, learning_rate):
    """Builds and compiles the model of a method; this is where the four differ."""
    classes = len(data.classes)
    ours = method == "gradient-scaling"
    keras.utils.set_random_seed(args.seed)
    set_policy = gs.set_global_policy if ours else keras.mixed_precision.set_global_policy
    set_policy(METHODS[method])
    model = segnet.build_model(args.size, classes)
    if ours:
        model = gs.convert(model)
    optimizer = keras.optimizers.SGD(learning_rate, momentum=0.9)
    model.compile(
        optimizer,
        loss,
        metrics=[
            segnet.PixelCrossEntropy(loss.class_weights),
            keras.metrics.MeanIoU(classes, ignore_class=classes, sparse_y_pred=False, name="miou"),
        ],
        # Keras wraps the optimizer of a mixed_float16 model in a LossScaleOptimizer unless told
        # otherwise; tf_gradscale wraps it in its own.
        auto_scale_loss=method != "float16",
        jit_compile=True,  # float16 convolutions are several times faster with XLA on a processor
    )
    return model


def count_lost_steps(optimizer, steps):
    """Returns how many of `steps` left the weights as they were because a gradient overflowed."""
    if hasattr(optimizer, "skipped_steps"):  # tf_gradscale
        return int(optimizer.skipped_steps)
    # Keras' LossScaleOptimizer counts every step, the optimizer in it those that were applied.
    applied = getattr(optimizer, "inner_optimizer", optimizer).iterations
    return steps - int(applied)


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
    if method == "gradient-scaling":
        # Sites are in the order of backpropagation: the first cast is the one before the softmax.
        return next(site.cumulative_scale for site in model.scales if site.kind == "cast")
    return float(getattr(model.optimizer, "dynamic_scale", 1))


def train(method, args, data):
    """Trains with one method and returns the `Run`."""
    steps_per_epoch = args.steps // args.epochs
    loss = segnet.PixelCrossEntropy(args.class_weights, args.loss_multiplier)
    schedule = keras.optimizers.schedules.CosineDecay(
        args.learning_rate / args.loss_multiplier, steps_per_epoch * args.epochs
    )
    model = prepare(method, args, data, loss, schedule)
    train_set = tf.data.Dataset.from_tensor_slices((data.x_train, data.y_train))
    train_set = train_set.shuffle(len(data.x_train), seed=args.seed).repeat()
    started = time.monotonic()
    history = model.fit(
        train_set.batch(args.batch, drop_remainder=True),
        steps_per_epoch=steps_per_epoch,
        epochs=args.epochs,
        validation_data=(data.x_val, data.y_val),
        validation_batch_size=args.batch,
        shuffle=False,  # the data set shuffles by itself
        verbose=args.verbose,
    ).history
    seconds = time.monotonic() - started
    labels = data.y_train[: args.batch]
    probabilities = np.asarray(model(data.x_train[: args.batch], training=True))
    gradient = softmax_gradient(probabilities, labels, loss)
    return Run(
        method=method,
        history={
            name: history[name] for name in ("cross_entropy", "val_cross_entropy", "val_miou")
        },
        steps_lost=count_lost_steps(model.optimizer, steps_per_epoch * args.epochs),
        cast_lost=0.0
        if method == "float32"
        else share_lost(gradient, scale_at_cast(model, method)),
        seconds=seconds,
        maps=np.argmax(model(data.x_val[segmentation_figure.examples(data)]), axis=-1),
        scales=[
            (site.name, site.kind, site.scale, site.cumulative_scale)
            for site in getattr(model, "scales", ())
        ],
    )


def format_table(runs):
    """Returns the results as a table in plain text."""
    rows = [("method", "train loss", "val mIoU", "steps lost", "lost at cast", "seconds")]
    for run in runs:
        rows.append(
            (
                run.method,
                f"{run.history['cross_entropy'][-1]:.3f}",
                f"{run.history['val_miou'][-1]:.3f}",
                str(run.steps_lost),
                f"{run.cast_lost:.1%}",
                f"{run.seconds:.0f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])])
        for cells in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def as_json(args, data, runs):
    """Returns the options and the metrics of all runs as a JSON text."""
    options = {key: value for key, value in vars(args).items() if key != "class_weights"}
    metrics = [
        {
            "method": run.method,
            **run.history,
            "steps_lost": run.steps_lost,
            "lost_at_cast": run.cast_lost,
            "seconds": run.seconds,
            "scales": run.scales,
        }
        for run in runs
    ]
    return json.dumps({"data": data.name, "options": options, "runs": metrics}, indent=1)


def parse_arguments(argv=None):
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data", metavar="PATH", help="CamVid folder or .npz file (default: drawn scenes)")
    add("--size", type=int, nargs=2, default=(96, 128), metavar=("H", "W"), help="of the images")
    add("--batch", type=int, default=8, help="images per step (default: %(default)s)")
    add("--epochs", type=int, default=12, help="validations on the way (default: %(default)s)")
    add("--steps", type=int, help="steps in all (default: each image once in an epoch)")
    add("--learning-rate", type=float, default=0.2, help="of SGD (default: %(default)s)")
    add("--loss-multiplier", type=float, help="default: 1/64 for drawn scenes, else 1")
    add("--balance", action="store_true", help="median-frequency class weights")
    add("--methods", nargs="+", default=tuple(METHODS), choices=METHODS, help="default: all four")
    add("--seed", type=int, default=0, help="of data, weights and batches")
    add("--out", default="segmentation.png", metavar="PNG", help="picture (default: %(default)s)")
    add("--json", metavar="PATH", help="write the metrics to a file")
    add("--verbose", type=int, default=1, help="of Keras' fit: 1 bars, 2 lines, 0 silent")
    args = parser.parse_args(argv)
    halvings = len(segnet.WIDTHS) - 1
    stride = 2**halvings
    if any(pixels < 16 or pixels % stride for pixels in args.size):
        parser.error(
            f"--size must be multiples of {stride} from 16 on, since the maps are halved "
            f"{halvings} times. Received: {args.size[0]} {args.size[1]}"
        )
    for name in ("batch", "epochs", "learning_rate", "steps", "loss_multiplier"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive. Received: {value}")
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
    args.class_weights = data.class_weights() if args.balance else np.ones(len(data.classes))
    print(
        f"{data.name}: {len(data.x_train)} images to train on, {len(data.x_val)} to validate, "
        f"{args.size[0]} x {args.size[1]} pixels, {len(data.classes)} classes; "
        f"{args.steps // args.epochs * args.epochs} steps of {args.batch} images; "
        f"loss times {args.loss_multiplier:g}"
    )
    runs = []
    for method in args.methods:
        print(f"\n{method}", flush=True)
        runs.append(train(method, args, data))
    print("\n" + format_table(runs))
    if args.json:
        Path(args.json).write_text(as_json(args, data, runs), encoding="utf-8")
    segmentation_figure.draw(args.out, data, runs)
    print(f"\nCurves, scales and maps: {args.out}")


if __name__ == "__main__":
    main()
