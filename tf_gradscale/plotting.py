"""The figure that `callbacks.ScaleHistory` draws."""

import warnings

import numpy as np

# Inches for a site, for what stands above and below all sites, for a letter, and at most in all.
_ROW, _HEAD, _FOOT, _LETTER, _MOST = 0.2, 0.5, 0.6, 0.075, 60.0
_FONT = 8.0
# log2 β of the deepest colour: the cast at the end has a scale beside which others look the same.
_DEEPEST = 12.0
_STYLES = {
    "underflow": ("o", "tab:blue"),
    "lost": ("x", "tab:orange"),
    "overflow": ("^", "tab:red"),
}


def draw(names, steps, log2_scales, log2_cumulative_scales, rates):
    """Draws a line for each site.

    Args:
        names: Names of the sites, (S,).
        steps: Training steps, (T,).
        log2_scales: log2 β, (T, S).
        log2_cumulative_scales: log2 α, (T, S).
        rates: A dictionary of rates by name, (T, S) each; NaN for what is not known.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError(
            "Drawing needs matplotlib, which comes with the extra `examples`: "
            f"pip install tf_gradscale[examples]. Received: {error}"
        ) from error
    row = min(_ROW, (_MOST - _HEAD - _FOOT) / len(names))
    widths = [4.2, 2.8, 2.8] if rates else [4.2, 2.8]
    width = sum(widths) + 0.5 + _LETTER * max(map(len, names))
    body = row * len(names)
    figure = Figure(figsize=(width, body + _HEAD + _FOOT), layout="constrained")
    cells = figure.add_gridspec(
        2, len(widths), width_ratios=widths, height_ratios=[_HEAD, body + _FOOT]
    )
    heads = [figure.add_subplot(cells[0, i]) for i in range(len(widths))]
    axes = [figure.add_subplot(cells[1, 0])]
    axes += [figure.add_subplot(cells[1, i], sharey=axes[0]) for i in range(1, len(widths))]
    rows = np.arange(len(names))

    mesh = _draw_scales(axes[0], steps, log2_scales)
    _draw_means(axes[1], rows, log2_scales, log2_cumulative_scales)
    if rates:
        _draw_rates(axes[2], rows, rates)

    axes[0].set_yticks(rows, names, fontsize=_FONT * row / _ROW)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    # Instead of a colour bar's own axes, whose height would grow with the figure's.
    bar = heads[0].inset_axes([0.2, 0.0, 0.6, 0.3])
    figure.colorbar(mesh, cax=bar, orientation="horizontal", ticklocation="top")
    bar.set_title("log2 of the local scale β", fontsize=_FONT)
    bar.tick_params(labelsize=_FONT)
    for head, axis in zip(heads, axes, strict=True):
        head.set_axis_off()
        axis.tick_params(axis="x", labelsize=_FONT)
        axis.xaxis.label.set_fontsize(_FONT)
    for head, axis in zip(heads[1:], axes[1:], strict=True):
        handles, labels = axis.get_legend_handles_labels()
        head.legend(handles, labels, loc="lower center", fontsize=_FONT, frameon=False)
        axis.grid(True, linewidth=0.3)
        axis.tick_params(axis="y", length=0, labelleft=False)
    return figure


def _draw_scales(axis, steps, log2_scales):
    # What was read after a step holds for those since the reading before.
    edges = np.concatenate([[0], steps])
    columns = np.arange(log2_scales.shape[1] + 1) - 0.5
    deepest = np.clip(np.abs(log2_scales).max(), 1.0, _DEEPEST)
    axis.set_xlabel("training step")
    return axis.pcolormesh(
        edges, columns, log2_scales.T, cmap="RdBu_r", vmin=-deepest, vmax=deepest, rasterized=True
    )


def _draw_means(axis, rows, log2_scales, log2_cumulative_scales):
    mean = log2_scales.mean(0)
    error = [mean - log2_scales.min(0), log2_scales.max(0) - mean]
    axis.barh(rows, mean, height=0.7, color="tab:gray", label="local scale β, range")
    axis.errorbar(mean, rows, xerr=error, fmt="none", ecolor="black", elinewidth=0.8, capsize=1.5)
    mean = log2_cumulative_scales.mean(0)
    axis.plot(mean, rows, ".", color="tab:green", label="cumulative scale α")
    axis.axvline(0.0, color="black", linewidth=0.5)
    axis.set_xlabel("mean of log2")


def _draw_rates(axis, rows, rates):
    for name, values in rates.items():
        with warnings.catch_warnings():
            # Of sites that were never counted.
            warnings.filterwarnings("ignore", "Mean of empty slice")
            mean = np.nanmean(values, axis=0)
        marker, color = _STYLES[name]
        axis.plot(mean, rows, marker, color=color, markersize=4.0, fillstyle="none", label=name)
    axis.set_xscale("symlog", linthresh=1e-6)
    axis.set_xlim(-2e-7, 1.5)
    axis.set_xticks([0.0, 1e-6, 1e-4, 1e-2, 1.0])
    axis.set_xlabel("mean rate")
