"""The comparison's results: read, compared by seed, as tables and pictures."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # writes files; needs no display

import numpy as np
from matplotlib import pyplot

NAMES = {
    "dynamic": "dynamic",
    "dynamic:10": "dynamic, growth every 10 steps",
    "paper": "paper's choice",
    "balanced": "balanced (ours)",
    "paper:32768,32768": "paper's, scales in float16",
    "paper:16,1024": "paper's, caps 16 and 1024",
    "paper:65504,65504": "paper's, caps 65504",
}
COLOURS = {
    "float32": "#000000",
    "dynamic": "#0072B2",
    "paper": "#E69F00",
    "balanced": "#009E73",
    "fixed": "#D55E00",
}


def way(found):
    """A result's method: the precision, or for float16 the scaling."""
    precision, scaling = found["method"]
    return scaling if precision == "float16" else precision


def name(method):
    """A method as it is named in tables."""
    if method == "fixed:2^0":
        return "no scaling (fixed scale 1)"
    if method.startswith("fixed:"):
        return f"fixed scale {method.partition(':')[2]}"
    return NAMES.get(method, method)


def read(folder):
    """All results in a folder: by method, a dictionary from seeds to results."""
    found: dict[str, dict] = {}
    for path in sorted(Path(folder).glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(way(result), {})[result["options"]["seed"]] = result
    return found


def best_fixed(folder, higher):
    """The fixed scale with the best final metric at seed 0, `None` if there is no result."""
    finals = {
        method: by_seed[0]["final"]
        for method, by_seed in read(folder).items()
        if method.startswith("fixed:") and 0 in by_seed
    }
    finite = {method: final for method, final in finals.items() if np.isfinite(final)}
    if not finite:
        return None
    return (max if higher else min)(finite, key=finite.get)


def difference(by_seed, reference):
    """The mean of the differences to a reference with the same seed, their spread and number.

    The spread is their standard deviation; NaN for one.
    """
    seeds = sorted(set(by_seed) & set(reference))
    found = np.array([by_seed[s]["final"] - reference[s]["final"] for s in seeds], float)
    if not seeds:
        return np.nan, np.nan, 0
    return found.mean(), found.std(ddof=1) if len(seeds) > 1 else np.nan, len(seeds)


def order(method):
    """Where a method stands in a table."""
    kinds = ["float32", "bfloat16", "fixed", "dynamic", "paper", "balanced"]
    kind, _, rest = method.partition(":")
    power = int(rest[2:]) if kind == "fixed" else len(rest)
    return kinds.index(kind), power


def table(found, percent):
    """A table of one task at one multiplier, in Markdown.

    Args:
        found: What `read` gave.
        percent: Whether the metric is a share, to be given in points.
    """
    factor, digits = (100, 1) if percent else (1, 3)
    measures = ("final", "to float32", "steps lost", "entries lost", "core ms a step", "MiB")
    rows = []
    for method in sorted(found, key=order):
        results = list(found[method].values())
        final = factor * np.mean([r["final"] for r in results])
        mean, spread, count = difference(found[method], found.get("float32", {}))
        compared = ""
        if count and method != "float32":
            compared = f"{factor * mean:+.{digits}f}"
            compared += "" if np.isnan(spread) else f" ± {factor * spread:.{digits}f}"
        steps = np.mean([r["steps_lost"] for r in results])
        lost = np.max([most_lost(r) for r in results])
        time = np.median([1000 * r["core_seconds"] / (r["options"]["steps"] - 1) for r in results])
        peak = np.max([r["peak_mib"] for r in results])
        rows.append(
            (
                *(name(method), len(results), f"{final:.{digits}f}", compared, f"{steps:.3g}"),
                *(in_percent(lost), f"{time:.0f}", f"{peak:.0f}"),
            )
        )
    return "\n".join(markdown(("method", "seeds", *measures), rows))


def in_percent(share):
    """A share as a table shows it."""
    return f"{100 * share:.3g} %"


def markdown(header, rows):
    """The lines of a table; none, if there are no rows."""
    if not rows:
        return []
    marks = ["---"] * len(header)
    return ["| " + " | ".join(map(str, row)) + " |" for row in (header, marks, *rows)]


def most_lost(result):
    """The largest share of a gradient's entries that are lost, over all tensors."""
    return max(result["lost_entries"].values(), default=0.0)


def _is_share(found):
    return all("perplexity" not in r["metric"] for by in found.values() for r in by.values())


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
            (order(m)[1], by[0]["final"]) for m, by in found.items() if "fixed" in m and 0 in by
        )
        if fixed:
            axis.plot(*zip(*fixed, strict=True), "o--", color=COLOURS["fixed"], label="fixed scale")
        for method in ("float32", "dynamic", "paper", "balanced"):
            if 0 in found.get(method, {}):
                axis.axhline(found[method][0]["final"], label=name(method), **_style(method))
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
                axis.plot(x, mean, marker="o", label=name(method), **_style(method))
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
                row[0].errorbar(x, mean, error, fmt=".", label=name(method), **_style(method))
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


def write(folder, page, tasks, wanted, causes):
    """Writes docs/results.md and its pictures.

    Args:
        folder: Where the results are.
        page: Path of the Markdown file, of which the part behind the mark is written anew.
        tasks: The tasks, by name.
        wanted: All runs of the comparison, which have a `path(folder)`.
        causes: What `mechanisms.lines` gave.
    """
    folders = {}
    for task, spec in tasks.items():
        for multiplier in spec.multipliers:
            found = read(folder / task / f"{multiplier:g}")
            if found:
                folders[f"{task}, loss × {multiplier:g}"] = found
    if not folders:
        raise ValueError(f"Results must be there before they are reported. Received: {folder}")
    parts = []
    for title, found in folders.items():
        first = next(iter(next(iter(found.values())).values()))
        metric = first["metric"].removeprefix("val_") + (" in points" if _is_share(found) else "")
        parts.append(f"### {title}\n\nMetric: {metric}; data: {first['data']}.\n")
        parts.append(table(found, _is_share(found)) + "\n")
    parts += ["### What the paper says of the causes\n", *causes]
    parts.append("### What was not run\n")
    parts.append(_missing(wanted, folder) + "\n")
    for function, file in (
        (draw_sweep, "fixed_scales.png"),
        (draw_curves, "curves.png"),
        (draw_scales, "scales.png"),
    ):
        function(folder / file, folders)
        title = function.__doc__.split("\n")[0].rstrip(".")
        parts.append(f"![{title}](results/{file})\n\n*{title}.*\n")
    before = page.read_text(encoding="utf-8").partition(MARK)[0] if page.exists() else ""
    before = before.replace(NOTHING_YET, "").rstrip() + "\n\n"
    page.write_text(before + MARK + "\n\n" + "\n".join(parts), encoding="utf-8")


NOTHING_YET = "No run of the comparison has been made yet."
MARK = "<!-- From here on written by benchmarks/compare.py. -->"


def _missing(runs, folder):
    missing = [run for run in runs if not run.path(folder).exists()]
    if not missing:
        return "All runs are there."
    groups: dict[tuple, list] = {}
    for run in missing:
        method = run.scaling if run.precision == "float16" else run.precision
        groups.setdefault((run.task, run.multiplier), []).append(f"{name(method)} ({run.seed})")
    lines = []
    for (task, multiplier), methods in groups.items():
        wanted = [run for run in runs if (run.task, run.multiplier) == (task, multiplier)]
        said = "all" if len(methods) == len(wanted) else ", ".join(methods)
        lines.append(f"- {task}, loss × {multiplier:g}: {said}")
    return "Method, and in brackets the seed:\n\n" + "\n".join(lines)
