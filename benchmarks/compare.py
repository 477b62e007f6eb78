"""Runs the examples in every precision and with every scaling, and writes docs/results.md.

    python benchmarks/compare.py --cifar10 PATH --camvid PATH --voc PATH --text PATH
    python benchmarks/compare.py --tasks language --minutes 60 --text PATH
    python benchmarks/compare.py --report

Each run is a process of its own and leaves a JSON file under docs/results/; what is there is not
run again. The order is that of importance: for each task float32, dynamic scaling, the paper's
choice, ours and the sweep of fixed scales with one seed, then these (and the best of the fixed
scales) with two more seeds, then the rest. `--report` draws tables and pictures from the files.
With `--jobs 2` two runs share the processor: two cores do more in a minute, and each run's time on
the wall says less (`core_seconds` is what a run took of the cores).
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import mechanisms
import result_page
import results

ROOT = Path(__file__).parents[1]
SEEDS = (0, 1, 2)
FIXED = tuple(f"fixed:2^{k}" for k in (0, 7, 11, 15, 19))
MAIN = (
    ("float32", "none"),
    ("float16", "dynamic"),
    ("float16", "paper"),
    ("float16", "balanced"),
)
# The first of them is float16 without any scaling.
SWEEP = tuple(("float16", scaling) for scaling in FIXED)
# The authors' details: scales in float16; the caps of their code; those of their SSD and SegNet.
REST = (
    ("bfloat16", "none"),
    ("float16", "dynamic:10"),
    ("float16", "paper:32768,32768"),
    ("float16", "paper:16,1024"),
    ("float16", "paper:65504,65504"),
)
# What shows the mechanisms: also without scaling, and dynamic scaling that loses steps.
VARIANT = (*MAIN, ("float16", "fixed:2^0"), ("float16", "dynamic:10"))


class Task(NamedTuple):
    """A program with its options.

    `data`: which of the data sets it takes. `higher`: whether a higher metric is better.
    `trained`: whether it starts from SqueezeNet's weights. `variant`: whether it is there for one
    of the paper's mechanisms only, or takes too long, and gets one seed and one multiplier.
    """

    program: str
    options: tuple
    data: str
    higher: bool = True
    trained: bool = False
    variant: bool = False

    @property
    def multipliers(self):
        """Of its loss, most important first."""
        return (1.0,) if self.variant else (1.0, 1e-4)


def _detection(size, batch, *options, trained=True, variant=True):
    steps = {8: 400, 32: 150}[batch]
    options = ("--size", str(size), "--batch", str(batch), *options)
    options += ("--steps", str(steps), "--validate", "300")
    return Task("detection.py", options, "voc", trained=trained, variant=variant)


def _recognition(depth, *options, variant=False):
    options = ("--depth", str(depth), "--width", "8", "--batch", "64", *options)
    options += ("--steps", "400", "--validate", "2000")
    return Task("recognition.py", options, "cifar10", variant=variant)


TASKS = {
    "segmentation": Task(
        "segmentation.py",
        ("--balance", "--epochs", "6", "--steps", "360", "--learning-rate", "0.1"),
        "camvid",
    ),
    "language": Task("language.py", ("--steps", "400"), "text", higher=False),
    "recognition-18": _recognition(18),
    "detection-96-b8": _detection(96, 8, variant=False),
    "recognition-18-plain": _recognition(18, "--plain", variant=True),
    "detection-96-b8-1e-3": _detection(96, 8, "--class-weight", "1e-3"),
    # SGD hardly trains the classes with that weight.
    "detection-96-b8-1e-3-adam": _detection(
        96, 8, "--class-weight", "1e-3", "--optimizer", "adam", "--learning-rate", "1e-3"
    ),
    "detection-96-b8-random": _detection(96, 8, trained=False),
    "detection-96-b32": _detection(96, 32),
    "detection-160-b8": _detection(160, 8),
    "detection-160-b32": _detection(160, 32),
    "recognition-50": _recognition(50, variant=True),
}


class Run(NamedTuple):
    """One run: a task by name, a multiplier, a method and a seed."""

    task: str
    multiplier: float
    precision: str
    scaling: str
    seed: int

    def path(self, folder):
        """Where its result is."""
        way = self.scaling if self.precision == "float16" else self.precision
        name = way.replace(":", "_").replace("^", "").replace(",", "_")
        return folder / self.task / f"{self.multiplier:g}" / f"{name}-{self.seed}.json"


def runs(tasks, folder):
    """All runs, most important first; those of the best fixed scale once the sweep is there."""
    main = [name for name in tasks if not TASKS[name].variant]
    variants = [name for name in tasks if TASKS[name].variant]
    for nth in range(2):
        yield from _every(main, nth, MAIN + SWEEP, SEEDS[:1])
        for seed in SEEDS[1:]:
            for name in main:
                methods = MAIN + _best_fixed(name, nth, folder)
                yield from _every([name], nth, methods, (seed,))
        yield from _every(variants, nth, VARIANT, SEEDS[:1])
    for nth in range(2):
        yield from _every(main, nth, REST, SEEDS[:1])


def _every(tasks, nth, methods, seeds):
    """The runs of some tasks at their nth multiplier, if they have one."""
    for name, method, seed in itertools.product(tasks, methods, seeds):
        if len(TASKS[name].multipliers) > nth:
            yield Run(name, TASKS[name].multipliers[nth], *method, seed)


def _best_fixed(name, nth, folder):
    """The best method of the sweep of a task, in a tuple; an empty one before its end."""
    sweep = list(_every([name], nth, SWEEP, SEEDS[:1]))
    if not sweep or not all(run.path(folder).exists() for run in sweep):
        return ()
    best = results.best_fixed(results.read(sweep[0].path(folder).parent), TASKS[name].higher)
    return (("float16", best),) if best else ()


def command(run, args):
    """The command line of a run."""
    task = TASKS[run.task]
    found = [sys.executable, str(ROOT / "examples" / task.program), *task.options]
    found += ["--precision", run.precision, "--scaling", run.scaling]
    found += ["--loss-multiplier", f"{run.multiplier:g}", "--seed", str(run.seed), "--verbose", "0"]
    data = getattr(args, task.data)
    if data:
        found += ["--data", str(Path(data).resolve())]
    if task.trained and args.squeezenet:
        found += ["--backbone", str(Path(args.squeezenet).resolve())]
    return found


def execute(run, args):
    """Runs it and keeps its result."""
    print("Begins:", *run, flush=True)
    path = run.path(args.folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    given = [*command(run, args), "--json", str(unfinished.resolve())]
    # Pictures that a program draws go with the folder.
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(given, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"A run must end with a result. Its command: {' '.join(done.args)}\n"
            f"{done.stdout[-1000:]}{done.stderr[-3000:]}\nReceived: status {done.returncode}"
        )
    # Where the data lie is nobody's business.
    found = json.loads(unfinished.read_text())
    found["options"]["data"] = bool(found["options"]["data"])
    found["options"].pop("backbone", None)
    path.write_text(json.dumps(found, indent=0), encoding="utf-8")
    unfinished.unlink()
    said = f"{found['metric']} {found['final']:.4f}, {found['core_seconds']:.0f} core seconds"
    print(*run, said, flush=True)


def work(args, until, taken, lock):
    """Makes one run after the other that is neither done nor in `taken`, until it is late."""
    while time.monotonic() < until:
        with lock:
            left = (r for r in runs(args.tasks, args.folder) if not r.path(args.folder).exists())
            run = next((r for r in left if r not in taken), None)
            taken.add(run)
        if run is None:
            return
        execute(run, args)


def parse_arguments(argv=None):
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    help_tasks = f"of {', '.join(TASKS)} (default: all)"
    add("--tasks", nargs="+", choices=TASKS, default=tuple(TASKS), metavar="TASK", help=help_tasks)
    for name in ("cifar10", "camvid", "voc", "text", "squeezenet"):
        add(f"--{name}", metavar="PATH", help="see the example (default: data that it makes)")
    add("--minutes", type=float, default=480, help="begin no run after this time")
    add("--jobs", type=int, default=1, help="so many runs at a time (default: %(default)s)")
    add(
        "--folder",
        type=Path,
        default=ROOT / "docs" / "results",
        help="of results; tables go beside it (docs/results)",
    )
    add("--report", action="store_true", help="run nothing")
    return parser.parse_args(argv)


def main(argv=None):
    """Runs the program."""
    args = parse_arguments(argv)
    if not args.report:
        until, taken, lock = time.monotonic() + 60 * args.minutes, set(), threading.Lock()
        with ThreadPoolExecutor(args.jobs) as pool:
            jobs = [pool.submit(work, args, until, taken, lock) for _ in range(args.jobs)]
        for job in jobs:
            job.result()
        if time.monotonic() >= until:
            print("The time is over.")
    wanted, causes = list(runs(TASKS, args.folder)), mechanisms.lines(args.folder)
    # docs/results.md of docs/results; a name may hold a dot.
    folder = args.folder.resolve()
    page = folder.with_name(f"{folder.name}.md")
    try:
        result_page.write(args.folder, page, TASKS, wanted, causes)
    except ValueError as error:
        sys.exit(f"compare.py: {error}")
    print(f"Tables and pictures: {page}")


if __name__ == "__main__":
    main()
