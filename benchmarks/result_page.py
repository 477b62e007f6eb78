"""Writes docs/results.md from the comparison's results."""

import result_pictures
import results

NOTHING_YET = "No run of the comparison has been made yet."
SUMMARY = """In points (of language: in perplexity), mean and standard deviation over the seeds, of
which the number is in brackets; positive where ours is better. The best fixed scale is the one that
ended best with seed 0, which favours it there.
"""
MARK = "<!-- From here on written by benchmarks/compare.py. -->"


def write(folder, page, tasks, wanted, causes):
    """Writes docs/results.md and its pictures.

    Args:
        folder: Where the results are.
        page: Path of the Markdown file, beside it. The part behind the mark is written anew.
        tasks: The tasks, by name.
        wanted: All runs of the comparison, which have a `path(folder)`.
        causes: What `mechanisms.lines` gave.
    """
    folders = {}
    for task, spec in tasks.items():
        for multiplier in spec.multipliers:
            found = results.read(folder / task / f"{multiplier:g}")
            if found:
                folders[task, multiplier] = found
    if not folders:
        raise ValueError(f"Results must be there before they are reported. Received: {folder}")
    titles = {key: f"{key[0]}, loss × {key[1]:g}" for key in folders}
    higher = {task: spec.higher for task, spec in tasks.items()}
    parts = ["### Ours against the others\n", SUMMARY, results.summary(folders, higher) + "\n"]
    for key, found in folders.items():
        title = titles[key]
        first = next(iter(next(iter(found.values())).values()))
        metric, percent = first["metric"].removeprefix("val_"), results.is_share(found)
        metric += " in points" if percent else ""
        parts.append(f"### {title}\n\nMetric: {metric}; data: {first['data']}.\n")
        # Of the same task at all multipliers.
        float32 = [
            result
            for (task, _), by_method in folders.items()
            if task == key[0]
            for result in by_method.get("float32", {}).values()
        ]
        parts.append(results.table(found, percent, float32) + "\n")
    parts += ["### What the paper says of the causes\n", *causes]
    parts.append("### What was not run\n")
    parts.append(_missing(wanted, folder) + "\n")
    drawn = {titles[key]: found for key, found in folders.items()}
    for function, file in result_pictures.PICTURES:
        function(folder / file, drawn)
        title = function.__doc__.split("\n")[0].rstrip(".")
        parts.append(f"![{title}]({folder.name}/{file})\n\n*{title}.*\n")
    before = page.read_text(encoding="utf-8").partition(MARK)[0] if page.exists() else ""
    before = before.replace(NOTHING_YET, "").rstrip() + "\n\n"
    page.write_text(before + MARK + "\n\n" + "\n".join(parts), encoding="utf-8")


def _missing(runs, folder):
    missing = [run for run in runs if not run.path(folder).exists()]
    if not missing:
        return "All runs are there."
    groups: dict[tuple, list] = {}
    for run in missing:
        method = run.scaling if run.precision == "float16" else run.precision
        groups.setdefault((run.task, run.multiplier), []).append(
            f"{results.name(method)} ({run.seed})"
        )
    lines = []
    for (task, multiplier), methods in groups.items():
        wanted = [run for run in runs if (run.task, run.multiplier) == (task, multiplier)]
        said = "all" if len(methods) == len(wanted) else ", ".join(methods)
        lines.append(f"- {task}, loss × {multiplier:g}: {said}")
    return "Method, and in brackets the seed:\n\n" + "\n".join(lines)
