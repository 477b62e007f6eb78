"""What a training step is compiled to: figures that do not depend on how busy the machine is.

    python benchmarks/program_size.py --model residual segnet
    python benchmarks/program_size.py --model residual --blocks 4 16 64 --methods lso ours

For each method, one training step in a process of its own:

    nodes      of TensorFlow's graph, functions included, as optimized without XLA
    kernels    that XLA makes of it: fusions, copies, convolutions and the like; and in brackets
               its conditionals
    compiled   kernels that it has to compile for that: those of equal layers are equal
    MiB        that XLA asks for to run it, arguments and results included
    peak MiB   the largest resident size of the process, compiling included
    seconds    of the processor's cores together, to trace and compile with XLA

`scaling` is what is left of ours if nothing is measured: multiplications, and reading the registry.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

METHODS = ("float32", "bfloat16", "lso", "ours", "counting", "optimizer", "scaling")
# Instructions that run no code of their own.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast conditional call while after-all".split()
)


def instructions(hlo):
    """Counts the instructions of an HLO module that are run one by one, by opcode.

    Args:
        hlo: The module as text. What is fused is one instruction.
    """
    computations, fused, lines = {}, set(), []
    for line in hlo.splitlines():
        if line.startswith((" ", "}")):
            lines.append(line)
        elif line.endswith("{"):
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
            computations[name] = lines = []
    found: dict[str, list] = {}
    for name, lines in computations.items():
        for line in lines:
            match = re.search(r" = .*?[\]})] ([a-z][a-z0-9-]*)\(", line)
            if match is None:
                continue
            found.setdefault(name, []).append(match[1])
            fused.update(re.findall(r"(?:calls|to_apply)=%?([\w.-]+)", line))
    return Counter(op for name, ops in found.items() if name not in fused for op in ops)


def kernels(counts):
    """How many of the counted instructions run code."""
    return sum(count for op, count in counts.items() if op not in _FREE)


def _largest_path(folder, pattern):
    paths = list(Path(folder).glob(pattern))
    if not paths:
        raise FileNotFoundError(
            f"XLA must have left a file of the step behind. Received: no {pattern} in {folder}"
        )
    return max(paths, key=lambda path: path.stat().st_size)


def largest(folder, pattern):
    """The text of the largest file in a folder that matches."""
    return _largest_path(folder, pattern).read_text(encoding="utf-8")


def compiled_kernels(folder):
    """How many kernels of the largest module XLA compiled on a processor."""
    module = _largest_path(folder, "*after_optimizations.txt").name.split(".")[0]
    return sum(1 for _ in Path(folder).glob(f"{module}.*ir-with-opt*.ll"))


def child(name, method, jit, batch, options):
    """Runs one step and prints what the process knows of it, as JSON."""
    import step_time
    import tensorflow as tf

    model = step_time.compiled(name, method, bool(jit), options)
    x, y = step_time.batch_for(model, batch)
    # Tiny, so that what is loaded once is not counted.
    tf.function(lambda t: t * 2.0, jit_compile=True)(tf.constant(1.0))
    began = time.process_time()
    step = tf.function(lambda x, y: model.train_step((x, y)), jit_compile=bool(jit))
    if jit:
        step(x, y)
        found = {"seconds": time.process_time() - began}
    else:
        found = {"nodes": nodes(step, x, y)}
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(json.dumps(found))


def nodes(step, *args):
    """The nodes of a step's graph after TensorFlow's own optimization, functions included."""
    # tensorflow.python: the optimized graph is not to be had otherwise.
    from tensorflow.python.eager import context

    context.context().enable_run_metadata()
    step(*args)
    metadata = context.context().export_run_metadata()
    graphs = [run.post_optimization_graph for run in metadata.function_graphs]
    count = 0
    for graph in graphs:
        count += len(graph.node) + sum(len(f.node_def) for f in graph.library.function)
    return count


def measure(name, method, batch, options):
    """What one method makes of one network, as a dictionary."""

    def run(jit, flags):
        given = [str(Path(__file__).resolve()), "--child", name, method, str(jit), str(batch)]
        done = subprocess.run(
            [sys.executable, *given, json.dumps(options)],
            env={**os.environ, "XLA_FLAGS": flags},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"The step must run. Received: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])

    with tempfile.TemporaryDirectory() as folder:
        run(1, f"--xla_dump_to={folder} --xla_dump_hlo_as_text")
        counts = instructions(largest(folder, "*after_optimizations.txt"))
        said = largest(folder, "*memory-usage-report.txt")
        found = {"compiled": compiled_kernels(folder)}
    # Writing it all down takes time of its own.
    found |= run(1, "")
    found["kernels"], found["conditionals"] = kernels(counts), counts["conditional"]
    found["instructions"] = counts
    found["bytes"] = int(re.search(r"Total bytes used: (\d+)", said)[1])
    # How many there are does not depend on sizes, and float16 takes its time without XLA.
    batch, options = 2, {**options, "width": 8}
    return {**found, "nodes": run(0, "")["nodes"]}


def parse_arguments(argv=None):
    """Parses the command line."""
    from models import MODELS

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", nargs="+", choices=MODELS, default=tuple(MODELS), help="default: all")
    add("--methods", nargs="+", choices=METHODS, default=METHODS, help="default: all")
    add("--blocks", nargs="+", type=int, help="of networks that have any")
    add("--batch", type=int, default=8, help="default: %(default)s")
    add("--width", type=int, default=16, help="default: %(default)s")
    add("--size", type=int, default=32, help="default: %(default)s")
    add("--json", metavar="PATH", help="file to write all figures to")
    return parser.parse_args(argv)


def main(argv=None):
    """Measures and prints the table."""
    args = parse_arguments(argv)
    record = []
    print(
        f"{'model':<16} {'method':<9} {'nodes':>6} {'kernels':>12} {'ratio':>6} {'compiled':>8} "
        f"{'MiB':>8} {'ratio':>6} {'peak MiB':>8} {'seconds':>8} {'ratio':>6}"
    )
    for name in args.model:
        for blocks in args.blocks or [None]:
            options = {"width": args.width, "size": args.size}
            options |= {} if blocks is None else {"blocks": blocks}
            base = None
            for method in args.methods:
                found = measure(name, method, args.batch, options)
                record.append({"model": name, "method": method, **options, **found})
                base = found if method == "lso" else base
                ratios = {
                    key: f"{found[key] / base[key]:.2f}" if base else ""
                    for key in ("kernels", "bytes", "seconds")
                }
                print(
                    f"{name if blocks is None else f'{name} {blocks}':<16} {method:<9} "
                    f"{found['nodes']:>6} {found['kernels']:>6} ({found['conditionals']:>3}) "
                    f"{ratios['kernels']:>6} {found['compiled']:>8} "
                    f"{found['bytes'] / 2**20:>8.1f} {ratios['bytes']:>6} "
                    f"{found['peak']:>8.0f} {found['seconds']:>8.1f} {ratios['seconds']:>6}",
                    flush=True,
                )
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=1), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        network, way, jit, count, options = sys.argv[2:]
        child(network, way, int(jit), int(count), json.loads(options))
    else:
        main()
