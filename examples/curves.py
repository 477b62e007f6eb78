"""Curves of a training."""

import matplotlib

matplotlib.use("Agg")  # writes files; needs no display

import numpy as np
from matplotlib import pyplot

CROSS_ENTROPY = {"training": "cross_entropy", "validation": "val_cross_entropy"}


def draw(path, history, panels):
    """Draws curves over the epochs.

    Args:
        path: Of the picture.
        history: Of `fit`, a dictionary of lists.
        panels: By the name of a vertical axis, the curves: names in `history` by their labels.
    """
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(1 + 4 * len(panels), 3.5), layout="constrained", squeeze=False
    )
    for axis, (name, lines) in zip(axes[0], panels.items(), strict=True):
        for label, key in lines.items():
            axis.plot(np.arange(1, len(history[key]) + 1), history[key], label=label)
        axis.set(xlabel="epoch", ylabel=name)
        axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
