"""Cost of a training step with gradient scaling, as a ratio to Keras' own LossScaleOptimizer.

    python benchmarks/step_time.py --model residual vgg --jit 0 1

Both are timed in turn, round by round, in one process: absolute times vary with the machine's
load, their ratio much less. Prints the median ratio of steady steps, with its quartiles; the ratio
of all steps together, in which the few that choose scales count as what they cost; and that of
first steps (tracing and compiling included; each in a fresh model, alternating).
"""

import argparse
import json
import os
import platform
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from models import MODELS

import tf_gradscale as gs
from tf_gradscale.counters import Counters

# Gradient scaling: "ours" is timed between updates, "updating" in passes that choose scales,
# "counting" between updates while rates of underflow are counted at all sites, as the callbacks
# do now and then. "scaling" measures nothing: gradients of another dtype than the configured one
# are multiplied, by 1, and that is all. "histogram" and "optimizer" are "updating" and "ours" with
# another choice of the configuration.
CONFIGS = {
    "ours": gs.GradScaleConfig(update_every=10**6),
    "updating": gs.GradScaleConfig(update_every=1),
    "every10": gs.GradScaleConfig(update_every=10),
    "every100": gs.GradScaleConfig(update_every=100),
    "counting": gs.GradScaleConfig(update_every=10**6),
    "histogram": gs.GradScaleConfig(update_every=1, cast_model="histogram"),
    "optimizer": gs.GradScaleConfig(update_every=10**6, unscale="optimizer"),
    "scaling": gs.GradScaleConfig(gradient_dtype="bfloat16"),
}
POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16"}
METHODS = ("float32", "bfloat16", "lso", *CONFIGS)


def compiled(name, method, jit, options):
    """A model of its own under the given method, compiled for training."""
    keras.utils.set_random_seed(0)
    with gs.policy_scope(POLICIES.get(method, "mixed_float16")):
        model = MODELS[name](**options)
        if method in CONFIGS:
            model = gs.convert(model, CONFIGS[method])
        if method == "counting":
            counters = Counters(lambda site: True)
            model.scales.count(counters)
            counters.active = True
        model.compile(
            keras.optimizers.SGD(1e-3, momentum=0.9),
            "sparse_categorical_crossentropy",
            jit_compile=jit,
        )
    return model


def batch_for(model, batch):
    """Random inputs and labels of the shapes that a model takes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, *model.input_shape[1:])).astype("float32")
    y = rng.integers(0, model.output_shape[-1], size=(batch, *model.output_shape[1:-1]))
    return tf.constant(x), tf.constant(y)


def timed(model, x, y):
    """Seconds of one training step."""
    start = time.perf_counter()
    model.train_on_batch(x, y)
    return time.perf_counter() - start


def settle(model, x, y):
    """Steps of a model that has made its first, past the early updates of passes 0, 1, ... 64."""
    for _ in range(70):
        if timed(model, x, y) > 1.0:
            break


def measure(name, methods, jit, batch, rounds, options, firsts):
    """Times of first steps and of steady steps, by method."""
    first = {m: [] for m in methods}
    models = {}
    for _ in range(firsts):
        for m in methods:
            models[m] = compiled(name, m, jit, options)
            x, y = batch_for(models[m], batch)
            first[m].append(timed(models[m], x, y))
    for model in models.values():
        settle(model, x, y)
        for _ in range(3):
            timed(model, x, y)
    steady = {m: [] for m in methods}
    for _ in range(rounds):
        for m in methods:
            steady[m].append(timed(models[m], x, y))
    return first, steady


def main():
    """Measures, prints the table, and writes all times as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["residual", "vgg"], choices=MODELS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["lso", "ours"])
    parser.add_argument("--jit", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--blocks", type=int, help="of networks that have any")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--firsts", type=int, default=2)
    parser.add_argument("--json", help="file to write all times to")
    args = parser.parse_args()
    print(
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}, {platform.machine()}, "
        f"{os.cpu_count()} CPU cores, {len(tf.config.list_physical_devices('GPU'))} GPUs"
    )
    print(
        f"{'model':<10} {'XLA':<4} {'method':<9} {'step ms':>8} {'ratio':>6} {'quartiles':>13} "
        f"{'all':>6} {'first s':>8} {'ratio':>6}"
    )
    record = []
    for name in args.model:
        for jit in args.jit:
            options = {"width": args.width, "size": args.size}
            options |= {} if args.blocks is None else {"blocks": args.blocks}
            first, steady = measure(
                name, args.methods, bool(jit), args.batch, args.rounds, options, args.firsts
            )
            base = args.methods[0]
            for m in args.methods:
                ratios = [a / b for a, b in zip(steady[m], steady[base], strict=True)]
                low, mid, high = statistics.quantiles(ratios, n=4)
                whole = sum(steady[m]) / sum(steady[base])
                first_ratio = statistics.median(first[m]) / statistics.median(first[base])
                print(
                    f"{name:<10} {'yes' if jit else 'no':<4} {m:<9} "
                    f"{1e3 * statistics.median(steady[m]):8.1f} {mid:6.3f} "
                    f"{low:6.3f}-{high:.3f} {whole:6.3f} "
                    f"{statistics.median(first[m]):8.2f} {first_ratio:6.2f}",
                    flush=True,
                )
                record.append(
                    {"model": name, "jit": jit, "method": m, "steady": steady[m], "first": first[m]}
                )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
