"""Trains a small SSD, an object detector, by any method of `methods.py`.

    python examples/detection.py --precision float32
    python examples/detection.py --precision float16 --scaling dynamic
    python examples/detection.py --data VOCdevkit --backbone squeezenet.npz --size 160 --batch 32

The loss is a smooth L1 loss of boxes plus a cross-entropy of classes, of all anchors that have a
box and of the three times as many others on which the network errs most. What reaches one map is a
mean over few anchors, what meets in the backbone is a sum over maps, and the two losses may be
weighted (`--box-weight`, `--class-weight`): gradients of different places differ in size. Sizes of
96 and 160 pixels stand in for SSD-300 and SSD-512: the larger one has a map and a scale more.

The learning rate, which rises in the first tenth of the steps and then falls to 0, is divided by
`--loss-multiplier` (with `--optimizer adam` epsilon is multiplied by it), so that in float32
nothing changes. The program prints one line with the mean average precision on the validation
images at an IoU of 0.5, `val_map`.
"""

import argparse
import os
import sys

# Keep TensorFlow's start-up notes off the screen; must be set before it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import average_precision
import detection_data
import keras
import methods
import multibox
import numpy as np
import ssd


def encode(split, indices, anchors, flipped):
    """Returns images and targets of some images of a split.

    Args:
        split: A `detection_data.Split`.
        indices: Which images.
        anchors: From `multibox.make_anchors`.
        flipped: For each whether left and right change places.
    """
    images, targets = [], []
    for index, flip in zip(indices, flipped, strict=True):
        image, boxes = split.images[index], split.boxes[index]
        if flip:
            image, boxes = image[:, ::-1], np.abs(boxes[:, (2, 1, 0, 3)] - np.float32([1, 0, 1, 0]))
        images.append(image)
        targets.append(multibox.encode(boxes, split.labels[index], anchors))
    boxes, classes = map(np.stack, zip(*targets, strict=True))
    return np.stack(images), {"boxes": boxes, "classes": classes}


def batches(split, anchors, batch, seed):
    """Yields batches for ever, shuffled anew in each epoch; half of the images are flipped."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(split.images))
        for start in range(0, len(order) - batch + 1, batch):
            yield encode(split, order[start : start + batch], anchors, rng.random(batch) < 0.5)


def predict(model, images, anchors, batch):
    """Returns the detections in images."""
    # Whole batches only: XLA would compile once more for a rest.
    count = -(-len(images) // batch) * batch
    outputs = model.predict(np.resize(images, (count, *images.shape[1:])), batch, verbose=0)
    return multibox.detect({name: y[: len(images)] for name, y in outputs.items()}, anchors)


class MeanAveragePrecision(keras.callbacks.Callback):
    """Puts the mean average precision at an IoU of 0.5 into `logs` as "val_map".

    Args:
        data: A `detection_data.Dataset`.
        anchors: From `multibox.make_anchors`.
        batch: How many images are predicted at once.
    """

    def __init__(self, data, anchors, batch):
        super().__init__()
        self.data, self.anchors, self.batch = data, anchors, batch

    def on_epoch_end(self, epoch, logs=None):
        val = self.data.val
        found = predict(self.model, val.images, self.anchors, self.batch)
        truth = list(zip(val.boxes, val.labels, strict=True))
        logs["val_map"] = average_precision.mean_average_precision(
            found, truth, len(self.data.classes)
        )


def draw(path, data, found):
    """Draws the surest detections in the first validation images, above the truth."""
    import matplotlib

    matplotlib.use("Agg")  # writes files; needs no display
    from matplotlib import pyplot as plt
    from matplotlib.patches import Rectangle

    colours = plt.get_cmap("tab20").colors
    figure, axes = plt.subplots(
        2, len(found), figsize=(2.5 * len(found), 5.4), squeeze=False, layout="constrained"
    )
    axes[0, 0].set_title("found")
    axes[1, 0].set_title("truth")
    for column, (boxes, labels, scores) in enumerate(found):
        sure = scores >= max(0.1, scores[:3].min(initial=1))  # three at most
        texts = [f"{data.classes[k]} {s:.2f}" for k, s in zip(labels, scores, strict=True)]
        truth = data.val.boxes[column], data.val.labels[column]
        names = [data.classes[k] for k in truth[1]]
        for axis, *rows in (
            (axes[0, column], boxes[sure], labels[sure], np.asarray(texts)[sure]),
            (axes[1, column], *truth, names),
        ):
            axis.imshow(data.val.images[column], extent=(0, 1, 1, 0))
            axis.axis("off")
            for box, label, text in zip(*rows, strict=True):
                colour = colours[label % len(colours)]
                extent = box[2:] - box[:2]
                axis.add_patch(Rectangle(box[:2], *extent, fill=False, color=colour, linewidth=2))
                axis.text(*box[:2], text, fontsize=7, va="top", backgroundcolor=colour)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def make_optimizer(args, **options):
    """SGD with momentum, or Adam; in float32 the loss multiplier changes neither's steps."""
    warmup = max(args.steps // 10, 1)
    adam = args.optimizer == "adam"
    rate = keras.optimizers.schedules.CosineDecay(
        0.0,
        args.steps - warmup,
        # Adam's step does not depend on the loss multiplier, if its epsilon follows it.
        warmup_target=args.learning_rate / (1 if adam else args.loss_multiplier),
        warmup_steps=warmup,
    )
    if adam:
        return keras.optimizers.Adam(rate, epsilon=1e-7 * args.loss_multiplier, **options)
    return keras.optimizers.SGD(rate, momentum=0.9, **options)


def parse_arguments(argv=None):
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    methods.add_arguments(parser, "VOC's devkit or an .npz file", steps=600, learning_rate=0.02)
    add = parser.add_argument
    add("--size", type=int, default=96, help="height and width of the images (%(default)s)")
    add("--batch", type=int, default=8, help="images per step (default: %(default)s)")
    add("--optimizer", choices=("sgd", "adam"), default="sgd", help="default: %(default)s")
    add("--backbone", metavar="NPZ", help="weights of SqueezeNet 1.1 (default: random)")
    add("--box-weight", type=float, default=1.0, help="of the smooth L1 loss (%(default)s)")
    add("--class-weight", type=float, default=1.0, help="of the cross-entropy (%(default)s)")
    args = methods.parsed(parser, argv)
    if args.size < 64 or args.size % 32:
        parser.error(f"--size must be a multiple of 32 from 64 on. Received: {args.size}")
    for name in ("box_weight", "class_weight"):
        if getattr(args, name) <= 0:
            option = name.replace("_", "-")
            parser.error(f"--{option} must be positive. Received: {getattr(args, name)}")
    return args


def main(argv=None):
    """Runs the program."""
    args = parse_arguments(argv)
    try:
        data = detection_data.load(args.data, args.size, args.seed)
        backbone = args.backbone and ssd.load_backbone(args.backbone, data.train.images[:64])
    except ValueError as error:
        sys.exit(f"detection.py: {error}")
    data = data._replace(val=data.val.chosen(methods.validated(args, len(data.val.images))))
    args.batch = min(args.batch, len(data.train.images))
    epochs = methods.epochs(args)
    anchors = multibox.make_anchors(args.size)
    print(
        f"{data.name}: {len(data.train.images)} images to train on, {len(data.val.images)} to "
        f"validate, {args.size} x {args.size} pixels, {len(data.classes)} classes, {len(anchors)} "
        f"anchors; {args.steps} steps of {args.batch} images; loss times {args.loss_multiplier:g}"
    )
    loss = ssd.losses(args.box_weight, args.class_weight)
    model = methods.compiled(
        args.method,
        lambda: ssd.build_model(args.size, len(data.classes), backbone),
        lambda **options: make_optimizer(args, **options),
        loss,
        args.loss_multiplier,
        args.seed,
    )
    costs = methods.Costs()
    history = model.fit(
        batches(data.train, anchors, args.batch, args.seed),
        steps_per_epoch=args.steps // epochs,
        epochs=epochs,
        callbacks=[MeanAveragePrecision(data, anchors, args.batch), costs],
        verbose=args.verbose,
        shuffle=False,  # the generator shuffles by itself
    ).history
    if args.out:
        draw(args.out, data, predict(model, data.val.images[:6], anchors, args.batch))
        print(f"Detections: {args.out}")
    indices = np.arange(args.batch)
    x, y = encode(data.train, indices, anchors, np.zeros(args.batch, bool))
    # Else float32 would choose other negatives than float16, whose gradients would seem lost there.
    y["classes"] = ssd.mine(y["classes"], model.predict(x, args.batch, verbose=0)["classes"])
    lost = methods.lost_entries(model, args.method, loss, args.loss_multiplier, x, y)
    found = methods.report(
        "detection", args.method, args, data.name, "val_map", history, model, costs, lost
    )
    if args.json:
        methods.write(args.json, found)


if __name__ == "__main__":
    main()
