"""How wrong gradients are, by method and by the magnitude of the loss.

    python benchmarks/loss_magnitude.py --out docs/loss_magnitude.png

The loss of a network is multiplied by 1e-12 to 1e8, as losses and loss weights in practice are, and
its gradient compared with float32's: the relative L2 error of each variable's gradient, as a median
over the variables. An error of 1 is a gradient that is gone, or infinite.
"""

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import architectures
import keras
import matplotlib
import numpy as np
import tensorflow as tf
import zoo

import tf_gradscale as gs

matplotlib.use("Agg")  # writes files; needs no display
from matplotlib import pyplot

MULTIPLIERS = tuple(10.0**k for k in range(-12, 9))
FIRST_DYNAMIC = 2.0**15  # with which Keras' LossScaleOptimizer begins
STYLES = {
    "bfloat16": dict(color="0.5", linestyle=":"),
    "float16, no scaling": dict(color="#D55E00"),
    "float16, fixed 2^7": dict(color="#D55E00", linestyle="--"),
    "float16, fixed 2^15": dict(color="#CC79A7", linestyle="--"),
    "float16, dynamic": dict(color="#0072B2"),
    "paper's choice": dict(color="#E69F00", marker="."),
    "balanced (ours)": dict(color="#009E73", marker="o", markersize=4),
}


def dynamic(network, batch, multiplier, truth):
    """The error of the first step that Keras' dynamic scaling does not skip."""
    scale = FIRST_DYNAMIC
    while True:
        found = network.gradients(batch, multiplier * scale)
        if all(np.all(np.isfinite(g)) for g in found) or scale < 1e-30:
            return zoo.errors(found, truth, multiplier * scale)
        scale /= 2


def measure(name, seed=0):
    """The errors of every method, a dictionary of lists as long as `MULTIPLIERS`."""
    architecture = zoo.architecture_of(name)
    mode = "xla" if architecture.convolves else "graph"
    keras.utils.set_random_seed(seed)
    true = zoo.Network(architecture, "float32")
    plain, bfloat16, paper, ours = (
        zoo.Network(architecture, policy, mode, config)
        for policy, config in (
            ("mixed_float16", None),
            ("mixed_bfloat16", None),
            ("mixed_float16", gs.GradScaleConfig.paper()),
            ("mixed_float16", gs.GradScaleConfig()),
        )
    )
    for network in (plain, bfloat16, paper, ours):
        network.take(true.models)
    batch = [tf.constant(x) for x in architecture.batch(np.random.default_rng(seed), 16)]
    truth = true.gradients(batch)

    def fixed(network, scale=1.0):
        return lambda m: zoo.errors(network.gradients(batch, m * scale), truth, m * scale)

    ways = {
        "bfloat16": fixed(bfloat16),
        "float16, no scaling": fixed(plain),
        "float16, fixed 2^7": fixed(plain, 2.0**7),
        "float16, fixed 2^15": fixed(plain, 2.0**15),
        "float16, dynamic": lambda m: dynamic(plain, batch, m, truth),
        "paper's choice": fixed(paper),
        "balanced (ours)": fixed(ours),
    }
    with np.errstate(invalid="ignore", over="ignore"):
        return {
            way: [min(zoo.middle(errors(m)), 1.0) for m in MULTIPLIERS]
            for way, errors in ways.items()
        }


def draw(path, found):
    """Draws the errors, a panel for each network."""
    figure, axes = pyplot.subplots(
        1, len(found), figsize=(4.4 * len(found) + 1.8, 3.8), layout="constrained", squeeze=False
    )
    for axis, (name, errors) in zip(axes[0], found.items(), strict=True):
        for way, values in errors.items():
            axis.loglog(MULTIPLIERS, values, label=way, **STYLES[way])
        axis.set(title=name, xlabel="loss times", ylabel="relative error of the gradient")
        axis.grid(alpha=0.3)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv=None):
    """Measures, prints a table, and draws it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--models", nargs="+", default=["encoder", "u_net"], choices=architectures.ARCHITECTURES)
    add("--seed", type=int, default=0, help="of weights and data")
    add("--out", metavar="PNG", help="draw a picture")
    add("--json", metavar="PATH", help="write the figures to a file")
    args = parser.parse_args(argv)
    found = {}
    for name in args.models:
        found[name] = measure(name, args.seed)
        print(f"\n{name}\n| loss times | " + " | ".join(found[name]) + " |")
        print("| --- " * (len(found[name]) + 1) + "|")
        for i, multiplier in enumerate(MULTIPLIERS):
            values = " | ".join(f"{errors[i]:.2g}" for errors in found[name].values())
            print(f"| {multiplier:g} | {values} |", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    if args.out:
        draw(args.out, found)


if __name__ == "__main__":
    main()
