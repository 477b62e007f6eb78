"""What the paper says of why gradients get lost, against the comparison's results, in numbers."""

import itertools
import re

import numpy as np
import results

# Of ways to scale, those whose underflow is compared.
WAYS = ("fixed:2^0", "fixed:2^7", "fixed:2^11", "fixed:2^15", "dynamic", "paper", "balanced")


def lines(folder):
    """Markdown: for each of the paper's findings what the results say of it, or that none do."""
    given = [
        ("Underflow at SegNet's loss (the authors: about 70 % without scaling)", at_the_cast),
        ("Scales below 1 where encoder meets decoder", below_one),
        ("The largest scales are those of SSD's heads", at_the_heads),
        ("Residual nets lose less to underflow than plain ones", by_connections),
        ("Dynamic scaling loses fewer steps at the larger batch", by_batch),
        ("A cumulative scale above λ_max closes SegNet's gap to float32", by_cap),
    ]
    parts = []
    for title, function in given:
        rows = function(folder)
        parts += [f"**{title}.**", "", *(rows or ["Its runs have not been made yet."]), ""]
    return parts


def _results(folder, task, way, multiplier="1"):
    """Results of a method, by seed."""
    return results.read(folder / task / multiplier).get(way, {})


def _mean(found, function):
    return np.mean([function(result) for result in found.values()])


def at_the_cast(folder):
    """The share of entries lost where the gradient of the loss becomes float16."""
    rows = []
    for multiplier in ("1", "0.0001"):
        for way in WAYS:
            found = _results(folder, "segmentation", way, multiplier)
            if found:
                lost = _mean(found, lambda result: result["lost_at_cast"])
                rows.append((f"× {multiplier}", results.name(way), results.in_percent(lost)))
    return results.markdown(("loss", "method", "lost"), rows)


def log2_scales(found, pattern, apart=False):
    """log2 of the local scales at sites whose names match, or else all others'; of all seeds."""
    made = [
        np.log2(scale)
        for result in found.values()
        for name, _, scale, _ in result["scales"]
        if bool(re.search(pattern, name)) != apart
    ]
    return np.array(made)


def _placed(folder, task, pattern, inside, outside, ways):
    rows = []
    for way in ways:
        found = _results(folder, task, way)
        for label, apart in ((inside, False), (outside, True)):
            made = log2_scales(found, pattern, apart)
            if len(made):
                low = f"{100 * np.mean(made < 0):.0f} %"
                spread = f"{made.min():.0f} to {made.max():.0f}"
                rows.append((results.name(way), label, f"{made.mean():.1f}", spread, low))
    return results.markdown(("method", "sites", "mean of log2 β", "range", "below 1"), rows)


def below_one(folder):
    """Local scales at the casts behind the branches from SegNet's encoder to its decoder."""
    inside, outside = "behind an encoder's branch", "all others"
    pattern = r"encoder[123]_norm/cast"
    return _placed(folder, "segmentation", pattern, inside, outside, ("paper", "balanced"))


def at_the_heads(folder):
    """Local scales in the heads of SSD, and in its backbone."""
    pattern = r"^(boxes|classes|output)"
    ways = ("paper", "balanced")
    return _placed(folder, "detection-96-b8", pattern, "heads", "backbone", ways)


def by_connections(folder):
    """Shares of gradients lost without scaling, in a residual and in a plain network."""
    rows = []
    tasks = {"recognition-18": "residual", "recognition-18-plain": "plain"}
    way = "fixed:2^0"
    for task, label in tasks.items():
        found = _results(folder, task, way)
        if found:
            mean = _mean(found, lambda r: np.mean(list(r["lost_entries"].values())))
            most = _mean(found, results.most_lost)
            rows.append(
                (label, results.name(way), results.in_percent(mean), results.in_percent(most))
            )
    return results.markdown(("network", "method", "lost, mean over tensors", "at most"), rows)


def by_batch(folder):
    """Steps lost by dynamic scaling at two sizes of a batch."""
    rows = []
    for size, way, batch in itertools.product((96, 160), ("dynamic", "dynamic:10"), (8, 32)):
        found = _results(folder, f"detection-{size}-b{batch}", way)
        if found:
            lost = _mean(found, lambda result: result["steps_lost"])
            steps = _mean(found, lambda result: result["options"]["steps"])
            given = f"{lost:.3g} of {steps:.0f}", results.in_percent(lost / steps)
            rows.append((f"{size} × {size}", results.name(way), batch, *given))
    return results.markdown(("images", "method", "batch", "steps lost", "share"), rows)


def by_cap(folder):
    """SegNet's metric by the bound on the cumulative scale, with seed 0, which all have."""
    rows = []
    for way in ("float32", "paper:16,1024", "paper:32768,32768", "paper:65504,65504", "paper"):
        result = _results(folder, "segmentation", way).get(0)
        if result is not None:
            scales = [cumulative for *_, cumulative in result["scales"]]
            reached = f"{np.log2(max(scales)):.0f}" if scales else ""
            rows.append((results.name(way), f"{100 * result['final']:.1f}", reached))
    return results.markdown(("method", "mIoU in points", "largest log2 α"), rows)
