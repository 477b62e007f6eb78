"""Pictures of the comparison's results: after the paper's figures, with ours in them."""

import matplotlib

matplotlib.use("Agg")  # writes files; needs no display

import numpy as np
import results
from matplotlib import pyplot

COLOURS = {
    "float32": "#000000",
    "dynamic": "#0072B2",
    "paper": "#E69F00",
    "balanced": "#009E73",
    "fixed": "#D55E00",
}


def _style(method):
    kind = method.partition(":")[0]
    return {"color": COLOURS.get(kind, "0.6"), "linestyle": "--" if kind == "fixed" else "-"}


def draw_sweep(path, folders):
    """The metric against the fixed scale, with lines for the others (the paper's Figure 1a).

    All with seed 0, the only one that each fixed scale has.
    """
    # Without scaling is no sweep yet.
    swept = {
        title: found
        for title, found in folders.items()
        if sum("fixed" in method for method in found) > 1
    }
    folders = swept or folders
    figure, axes = _grid(folders)
    for axis, (title, found) in zip(axes, folders.items(), strict=True):
        fixed = sorted(
            (results.order(m)[1], by[0]["final"])
            for m, by in found.items()
            if "fixed" in m and 0 in by
        )
        if fixed:
            axis.plot(*zip(*fixed, strict=True), "o--", color=COLOURS["fixed"], label="fixed scale")
        for method in ("float32", "dynamic", "paper", "balanced"):
            if 0 in found.get(method, {}):
                axis.axhline(
                    found[method][0]["final"], label=results.name(method), **_style(method)
                )
        axis.set(title=title, xlabel="log2 of the fixed scale")
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_curves(path, folders):
    """Validation curves, the mean over seeds (the paper's Figures 1b and 3a)."""
    figure, axes = _grid(folders)
    for axis, (title, found) in zip(axes, folders.items(), strict=True):
        for method in ("float32", "dynamic", "paper", "balanced"):
            if method in found:
                curves = [r["history"][r["metric"]] for r in found[method].values()]
                length = min(map(len, curves))
                mean = np.mean([curve[:length] for curve in curves], axis=0)
                x = np.arange(1, length + 1) / length
                axis.plot(x, mean, marker="o", label=results.name(method), **_style(method))
        axis.set(title=title, xlabel="share of training")
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_scales(path, folders):
    """Scales per site: mean and range over seeds (Figure 2), and over training (Figure 3b)."""
    figure, axes = pyplot.subplots(
        len(folders), 2, figsize=(14, 3.2 * len(folders)), layout="constrained", squeeze=False
    )
    for row, (title, found) in zip(axes, folders.items(), strict=True):
        for method in ("paper", "balanced"):
            if method in found:
                by_epoch = [r["log2_scales_by_epoch"] for r in found[method].values()]
                last = np.array([epochs[-1] for epochs in by_epoch])
                x, mean = np.arange(last.shape[1]), last.mean(0)
                error = [mean - last.min(0), last.max(0) - mean]
                row[0].errorbar(
                    x, mean, error, fmt=".", label=results.name(method), **_style(method)
                )
        row[0].set(title=f"{title}: at the end", xlabel="site, as backpropagation meets them")
        row[0].set_ylabel("log2 of the local scale")
        if "balanced" in found:
            epochs = np.array(next(iter(found["balanced"].values()))["log2_scales_by_epoch"])
            image = row[1].imshow(epochs, aspect="auto", cmap="RdBu_r", vmin=-24, vmax=24)
            figure.colorbar(image, ax=row[1])
            row[1].set_yticks(range(len(epochs)), range(1, len(epochs) + 1))
        row[1].set(title=f"{title}: balanced, over training", xlabel="site", ylabel="epoch")
    axes[0, 0].legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _grid(folders):
    columns = min(3, len(folders))
    rows = -(-len(folders) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.6 * columns, 3.4 * rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(folders) :]:
        axis.set_axis_off()
    return figure, axes.flat[: len(folders)]


PICTURES = (
    (draw_sweep, "fixed_scales.png"),
    (draw_curves, "curves.png"),
    (draw_scales, "scales.png"),
)
