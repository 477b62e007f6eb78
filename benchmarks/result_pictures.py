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
METHODS = ("float32", "dynamic", "paper", "balanced")


def _style(method):
    kind = method.partition(":")[0]
    return {"color": COLOURS.get(kind, "0.6"), "linestyle": "--" if kind == "fixed" else "-"}


def _those(folders, wanted):
    """The tasks of whose results `wanted` is true, all if there are none."""
    return {title: found for title, found in folders.items() if wanted(found)} or folders


def _have_ours(folders):
    return _those(folders, lambda found: "balanced" in found)


def draw_sweep(path, folders):
    """The metric against the fixed scale, with lines for the others (the paper's Figure 1a).

    All with seed 0, the only one that each fixed scale has. A cross at the edge is a scale with
    which the network was not trained: its metric is further away.
    """
    # Without scaling is no sweep yet.
    folders = _those(folders, lambda found: sum("fixed" in method for method in found) > 1)
    figure, axes = _grid(folders)
    for axis, (title, found) in zip(axes, folders.items(), strict=True):
        finals = {method: by[0]["final"] for method, by in found.items() if 0 in by}
        fixed = sorted((results.order(m)[1], y) for m, y in finals.items() if "fixed" in m)
        lines = {method: finals[method] for method in METHODS if method in finals}
        x, y = np.array(fixed, float).reshape(-1, 2).T
        middle = np.median([*lines.values(), *y[np.isfinite(y)]])
        # False of NaN, too.
        trained = np.abs(y - middle) <= 0.2 * abs(middle)
        shown = [*lines.values(), *y[trained]]
        low, high = np.min(shown, initial=middle), np.max(shown, initial=middle)
        margin = max(0.15 * (high - low), 1e-3 * abs(middle))
        axis.set_ylim(low - margin, high + margin)
        colour = COLOURS["fixed"]
        axis.plot(x[trained], y[trained], "o--", color=colour, label="fixed scale")
        edge = np.full(np.count_nonzero(~trained), low - 0.6 * margin)
        axis.plot(x[~trained], edge, "x", color=colour, label="fixed scale, not trained")
        for method, value in lines.items():
            axis.axhline(value, label=results.name(method), **_style(method))
        axis.set(title=title, xlabel="log2 of the fixed scale", xticks=x)
    _finish(figure, axes[0], path)


def draw_curves(path, folders):
    """Validation curves, the mean over the seeds that all have (the paper's Figures 1b and 3a)."""
    folders = _have_ours(folders)
    figure, axes = _grid(folders)
    for axis, (title, found) in zip(axes, folders.items(), strict=True):
        drawn = [method for method in METHODS if method in found]
        seeds = set.intersection(*(set(found[method]) for method in drawn)) if drawn else ()
        for method in drawn if seeds else ():
            curves = [found[method][s]["history"][found[method][s]["metric"]] for s in seeds]
            length = min(map(len, curves))
            mean = np.mean([curve[:length] for curve in curves], axis=0)
            x = np.arange(1, length + 1) / length
            axis.plot(x, mean, marker="o", label=results.name(method), **_style(method))
        plural = "" if len(seeds) == 1 else "s"
        axis.set(title=f"{title} ({len(seeds)} seed{plural})", xlabel="share of training")
    _finish(figure, axes[0], path)


def draw_scales(path, folders):
    """Scales per site: mean and range over seeds (Figure 2), and over training (Figure 3b)."""
    folders = _have_ours(folders)
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
    _finish(figure, axes[0, 0], path)


def _finish(figure, axis, path):
    """Adds the legend of one of a figure's axes, and writes the figure to a file."""
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=6)
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
