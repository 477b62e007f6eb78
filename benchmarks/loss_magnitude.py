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


class Network:
    """One architecture in one policy, with or without scales of gradients.

    Args:
        architecture: An `architectures.Architecture`.
        policy: The dtype policy.
        config: A `GradScaleConfig`, or `None` for plain Keras.
    """

    def __init__(self, architecture, policy, config=None):
        with gs.policy_scope(policy):
            self.models = architecture.build()
            if config is not None:
                self.models = tuple(gs.convert(model, config) for model in self.models)
        self._state = [
            v for model in self.models if config is not None for v in model.scales.variables
        ]
        self._initial = [v.numpy() for v in self._state]

        @tf.function(jit_compile=architecture.convolves, autograph=False)
        def step(multiplier, *batch):
            return architecture.gradients(self.models, batch, multiplier)[1]

        self._step = step

    def gradients(self, batch, multiplier):
        """Those of the loss times a multiplier, divided by it; ours in the very first pass."""
        for variable, value in zip(self._state, self._initial, strict=True):
            variable.assign(value)
        made = self._step(tf.constant(multiplier, tf.float32), *batch)
        return [g.numpy().astype("float64") / multiplier for g in made]


def dynamic(network, batch, multiplier):
    """The gradient of the first step that Keras' dynamic scaling does not skip."""
    scale = FIRST_DYNAMIC
    while True:
        found = network.gradients(batch, multiplier * scale)
        if all(np.all(np.isfinite(g)) for g in found) or scale < 1e-30:
            return found
        scale /= 2


def measure(name, seed=0):
    """The errors of every method, a dictionary of lists as long as `MULTIPLIERS`."""
    architecture = zoo.architecture_of(name)
    keras.utils.set_random_seed(seed)
    true = Network(architecture, "float32")
    plain = Network(architecture, "mixed_float16")
    bfloat16 = Network(architecture, "mixed_bfloat16")
    paper = Network(architecture, "mixed_float16", gs.GradScaleConfig.paper())
    ours = Network(architecture, "mixed_float16", gs.GradScaleConfig())
    for network in (plain, bfloat16, paper, ours):
        for model, other in zip(network.models, true.models, strict=True):
            model.set_weights(other.get_weights())
    batch = [tf.constant(x) for x in architecture.batch(np.random.default_rng(seed), 16)]
    truth = [g.astype("float32") for g in true.gradients(batch, 1.0)]
    ways = {
        "bfloat16": bfloat16.gradients,
        "float16, no scaling": plain.gradients,
        "float16, fixed 2^7": lambda b, m: plain.gradients(b, m * 2.0**7),
        "float16, fixed 2^15": lambda b, m: plain.gradients(b, m * 2.0**15),
        "float16, dynamic": lambda b, m: dynamic(plain, b, m),
        "paper's choice": paper.gradients,
        "balanced (ours)": ours.gradients,
    }
    found = {}
    with np.errstate(invalid="ignore", over="ignore"):
        for way, gradients in ways.items():
            found[way] = [
                min(zoo.middle(zoo.errors(gradients(batch, m), truth)), 1.0) for m in MULTIPLIERS
            ]
    return found


def draw(path, found):
    """Draws the errors, a panel for each network."""
    figure, axes = pyplot.subplots(
        1, len(found), figsize=(5 * len(found), 3.8), layout="constrained", squeeze=False
    )
    for axis, (name, errors) in zip(axes[0], found.items(), strict=True):
        for way, values in errors.items():
            axis.loglog(MULTIPLIERS, values, label=way, **STYLES[way])
        axis.set(title=name, xlabel="loss times", ylabel="relative error of the gradient")
        axis.grid(alpha=0.3)
    axes[0, -1].legend(fontsize="small")
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
