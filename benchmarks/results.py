"""The comparison's results: read, compared by seed, as tables."""

import json
from pathlib import Path

import numpy as np

NAMES = {
    "dynamic": "dynamic",
    "dynamic:10": "dynamic, growth every 10 steps",
    "paper": "paper's choice",
    "balanced": "balanced (ours)",
    "paper:32768,32768": "paper's, scales in float16",
    "paper:16,1024": "paper's, caps 16 and 1024",
    "paper:65504,65504": "paper's, caps 65504",
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


def best_fixed(found, higher):
    """The fixed scale with the best final metric at seed 0, `None` if there is no result.

    Args:
        found: What `read` gave.
        higher: Whether a higher metric is better.
    """
    finals = {
        method: by_seed[0]["final"]
        for method, by_seed in found.items()
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


def core_time(runs, reference):
    """The cores' time for a step, as the median of ratios to float32's on the same machine.

    Args:
        runs: Results of a method.
        reference: Results of float32 for the same task; at any multiplier, which costs no time.

    Returns:
        NaN if float32 was not run on one of their machines.
    """
    times: dict[str, list] = {}
    for result in reference:
        times.setdefault(result["machine"], []).append(result["core_seconds"])
    ratios = [
        result["core_seconds"] / np.mean(times[result["machine"]])
        for result in runs
        if result["machine"] in times
    ]
    return np.median(ratios) if ratios else np.nan


def table(found, percent, reference):
    """A table of one task at one multiplier, in Markdown.

    Args:
        found: What `read` gave.
        percent: Whether the metric is a share, to be given in points.
        reference: Results of float32, for `core_time`.
    """
    factor = 100 if percent else 1
    digits = _digits(percent)
    measures = ("seed 0", "to float32", "steps lost", "entries lost", "core time", "MiB")
    rows = []
    for method in sorted(found, key=order):
        results = list(found[method].values())
        final = ""
        # Means of different seeds could not be compared.
        if 0 in found[method]:
            final = f"{factor * found[method][0]['final']:.{digits}f}"
        others = {} if method == "float32" else found.get("float32", {})
        compared, _ = _compared(found[method], others, percent)
        steps = np.mean([r["steps_lost"] for r in results])
        known = [lost for lost in map(most_lost, results) if not np.isnan(lost)]
        said = in_percent(max(known)) if known else ""
        if any(map(has_diverged, results)):
            said = "diverged"
        ratio = core_time(results, reference)
        time = "" if np.isnan(ratio) else f"{ratio:.2f}"
        peak = np.max([r["peak_mib"] for r in results])
        rows.append(
            (
                *(name(method), len(results), final, compared, f"{steps:.3g}"),
                *(said, time, f"{peak:.0f}"),
            )
        )
    return "\n".join(markdown(("method", "seeds", *measures), rows))


def _digits(percent):
    return 1 if percent else 3


def _compared(by_seed, reference, percent, higher=True):
    """A difference with its spread in words, and of how many seeds; "" if there are none."""
    mean, spread, count = difference(by_seed, reference)
    if not count:
        return "", 0
    factor, digits = (100 if percent else 1) * (1 if higher else -1), _digits(percent)
    # No minus before a zero.
    said = f"{np.round(factor * mean, digits) + 0.0:+.{digits}f}"
    return said + ("" if np.isnan(spread) else f" ± {abs(factor) * spread:.{digits}f}"), count


def summary(folders, higher):
    """By how much ours ends better than the others, task by task; a table in Markdown.

    Args:
        folders: What `read` gave, by (task, multiplier).
        higher: By task, whether a higher metric is better.
    """
    rows = []
    for (task, multiplier), found in folders.items():
        ours, percent = found.get("balanced", {}), is_share(found)
        best = best_fixed(found, higher[task])
        cells = []
        for method in ("float32", "dynamic", best):
            said, count = _compared(ours, found.get(method, {}), percent, higher[task])
            named = f", {name(best)}" if count and method == best else ""
            cells.append(said and f"{said} ({count}{named})")
        if any(cells):
            skipped = sum(result["steps_lost"] for result in ours.values())
            rows.append((f"{task}, × {multiplier:g}", *cells, skipped))
    against = [
        f"better than {other} by" for other in ("float32", "dynamic", "the best fixed scale")
    ]
    return "\n".join(markdown(("task, loss", *against, "steps lost"), rows))


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
    """The largest share of a gradient's entries that are lost, over all tensors; NaN: not known."""
    return max(result["lost_entries"].values(), default=np.nan)


def has_diverged(result):
    """Whether what training computes at its end is not finite."""
    return not all(np.isfinite(values[-1]) for values in result["history"].values())


def is_share(found):
    """Whether a task's metric is a share, to be given in points."""
    return all("perplexity" not in r["metric"] for by in found.values() for r in by.values())
