"""The picture of the segmentation example: curves, scales per layer, predicted maps."""

import matplotlib

matplotlib.use("Agg")  # writes files; needs no display

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

# Okabe and Ito's colours, which stay apart under colour blindness. Lines that lie on each other can
# be told by width, dash and mark.
STYLES = {
    "float32": dict(color="#000000", linewidth=5, alpha=0.3),
    "float16": dict(color="#D55E00", linewidth=2, linestyle="--"),
    "loss-scaling": dict(color="#0072B2", linewidth=2.5, linestyle=":"),
    "gradient-scaling": dict(color="#009E73", linewidth=1, marker="o", markersize=5),
}
# CamVid's colours where a class has one, else the next of a list.
CLASS_COLOURS = {
    "sky": (128, 200, 255),
    "building": (150, 60, 50),
    "pole": (255, 220, 0),
    "road": (110, 70, 130),
    "pavement": (240, 150, 200),
    "tree": (60, 140, 40),
    "sign_symbol": (220, 220, 160),
    "fence": (90, 80, 60),
    "car": (20, 40, 170),
    "pedestrian": (255, 90, 0),
    "bicyclist": (0, 190, 180),
}
UNLABELLED_COLOUR = (225, 225, 225)
EXAMPLES = 3  # validation images shown


def examples(data):
    """Returns the indices of the validation images that are shown, spread over all of them."""
    return np.linspace(0, len(data.x_val) - 1, min(EXAMPLES, len(data.x_val))).astype(int)


def class_colours(classes):
    """Returns an RGB palette, uint8 of shape (len(classes) + 1, 3); the last is unlabelled."""
    others = (np.asarray(plt.get_cmap("tab20").colors) * 255).astype(int)
    colours = [CLASS_COLOURS.get(name, others[i % 20]) for i, name in enumerate(classes)]
    return np.asarray([*colours, UNLABELLED_COLOUR], np.uint8)


def draw(path, data, runs):
    """Draws the picture of the runs and writes it to `path`."""
    rows, columns = len(examples(data)), 2 + len(runs)
    scales = next((run.found["scales"] for run in runs if run.found["scales"]), None)
    heights = [3, 3.6 if scales else 0.01, 0.6 + 1.9 * rows]
    figure = plt.figure(figsize=(15, sum(heights)), layout="constrained")
    top, middle, bottom = figure.subfigures(3, 1, height_ratios=heights)
    _draw_curves(top.subplots(1, 2), runs)
    if scales:
        _draw_scales(middle.subplots(), scales)
    _draw_maps(bottom, bottom.subplots(rows, columns, squeeze=False), data, runs)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw_curves(axes, runs):
    loss, miou = axes
    for run in runs:
        style, history = STYLES.get(run.name, {}), run.found["history"]
        epochs = np.arange(1, len(history["val_miou"]) + 1)
        loss.plot(epochs, history["cross_entropy"], **style)
        miou.plot(epochs, history["val_miou"], label=run.name, **style)
    loss.set(title="Training loss (cross-entropy per pixel)", xlabel="epoch", yscale="log")
    loss.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    loss.yaxis.set_major_formatter("{x:g}")
    loss.yaxis.set_minor_formatter(NullFormatter())
    miou.set(title="Validation mIoU", xlabel="epoch", ylim=(0, None))
    miou.legend(loc="lower right")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.xaxis.get_major_locator().set_params(integer=True)


def _draw_scales(axis, sites):
    """Draws the scales in the order in which backpropagation meets them."""
    axis.set_title("Scales chosen by gradient scaling, in the order of backpropagation")
    names, kinds, local, cumulative = zip(*sites, strict=True)
    x = np.arange(len(sites))
    weights = np.asarray([kind == "variable" for kind in kinds])
    axis.axhline(0, color="0.6", linewidth=1)
    axis.bar(x, np.log2(local), color="#56B4E9", label="local scale β")
    for chosen, marker, label in (
        (~weights, "o", "cumulative scale α of an activation's gradient"),
        (weights, "^", "cumulative scale of a weight's gradient"),
    ):
        if not chosen.any():
            continue
        axis.plot(
            x[chosen],
            np.log2(cumulative)[chosen],
            marker,
            color="#D55E00",
            label=label,
            markersize=5,
        )
    axis.set_xticks(x, names, rotation=90, fontsize=7)
    axis.set_ylabel("scale, power of two")
    axis.yaxis.set_major_formatter(lambda power, _: f"$2^{{{power:.0f}}}$")
    axis.margins(x=0.01)
    axis.grid(axis="y", alpha=0.3)
    axis.legend(loc="upper right", fontsize=8, ncols=3)


def _draw_maps(figure, axes, data, runs):
    palette = class_colours(data.classes)
    for row, index in enumerate(examples(data)):
        truth = data.y_val[index]
        axes[row, 0].imshow(data.x_val[index])
        for axis, labels in zip(axes[row, 1:], (truth, *(r.maps[row] for r in runs)), strict=True):
            shown = np.where(truth == len(data.classes), truth, labels)
            axis.imshow(palette[shown], interpolation="nearest")
    for axis in axes.flat:
        axis.axis("off")
    for axis, name in zip(axes[0], ("image", "truth", *(run.name for run in runs)), strict=True):
        axis.set_title(name)
    figure.legend(
        handles=[
            Patch(facecolor=colour / 255, edgecolor="0.4", label=name)
            for colour, name in zip(palette, (*data.classes, "unlabelled"), strict=True)
        ],
        loc="outside lower center",
        ncols=len(palette),
        frameon=False,
    )
