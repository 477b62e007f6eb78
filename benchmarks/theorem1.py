"""Theorem 1's predicted underflow rate against the realised one, at every product of a network.

    python benchmarks/theorem1.py --write docs/theorem1.md

The true gradients come from a float32 model and `tf.GradientTape`, without this package; the scales
from the same model under mixed_float16, gradient-scaled, after its first backward pass.
"""

import argparse
import math
import os
import platform
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from models import MODELS

import tf_gradscale as gs

SMALLEST = gs.formats.get("float16").smallest_subnormal
CONFIGS = {"paper": gs.GradScaleConfig.paper(), "balanced": gs.GradScaleConfig()}


def accumulation_length(layer):
    """N, the number of products summed into one entry of ∇X (on average, with strides)."""
    if isinstance(layer, keras.layers.Dense):
        return layer.units
    return math.prod(layer.kernel_size) * layer.filters / math.prod(layer.strides)


def true_gradients(model, x, y):
    """For each Dense and Conv2D layer (∇Z, ∇X) in float32: at its product's output and input.

    ∇X is the product's own; where its input has other consumers besides, theirs are not in it.
    """
    products = [
        layer
        for layer in model.layers
        if isinstance(layer, (keras.layers.Dense, keras.layers.Conv2D))
    ]
    inner = [[layer.input, layer.output] for layer in products]
    with tf.GradientTape() as tape:
        tape.watch(x)
        *values, outputs = keras.Model(model.input, [*inner, model.output])(x, training=True)
        # Without the mark by which Keras' losses pass a softmax over, and its gradient with it.
        outputs = tf.identity(outputs)
        loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, outputs))
    dys = tape.gradient(loss, [output for _, output in values])
    found = {}
    for layer, (inputs, _), dy in zip(products, values, dys, strict=True):
        linear = type(layer).from_config({**layer.get_config(), "activation": None})
        linear.build(inputs.shape)
        linear.set_weights(layer.get_weights())
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(inputs)
            z = linear(inputs)
            made = layer.activation(z)
        dz = tape.gradient(made, z, output_gradients=dy)
        dx = tape.gradient(z, inputs, output_gradients=dz)
        found[layer] = dz.numpy().astype("float64"), dx.numpy().astype("float64")
    return found


def scales(weights, build, config, x, y):
    """α of ∇X at every product, by the layer's name, after one backward pass."""
    with gs.policy_scope("mixed_float16"):
        model = gs.convert(build(), config)
    model.set_weights(weights)
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = model(x, training=True)
        loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, outputs))
    tape.gradient(loss, [x, *model.trainable_variables])
    suffix = "/input"
    return {
        site.name.removesuffix(suffix): site.cumulative_scale
        for site in model.scales
        if site.kind == "gemm" and site.name.endswith(suffix)
    }


def rates(build, seed=0, batch=32):
    """Rates at every product of a model, for each placement.

    Args:
        build: Function that builds the model.
        seed: Seed of weights and data.
        batch: Number of examples.

    Returns:
        A dictionary from placement to a list of rows, one a layer: dictionaries.
    """
    keras.utils.set_random_seed(seed)
    with gs.policy_scope("float32"):
        # Named from scratch, so that layers of all models have the same names.
        keras.backend.clear_session()
        model = build()
    rng = np.random.default_rng(seed)
    x = tf.constant(rng.normal(size=(batch, *model.input_shape[1:])), tf.float32)
    y = tf.constant(rng.integers(model.output_shape[-1], size=(batch,)))
    weights, gradients = model.get_weights(), true_gradients(model, x, y)
    found = {}
    for placement, config in CONFIGS.items():
        keras.backend.clear_session()
        alphas = scales(weights, build, config, x, y)
        found[placement] = []
        for layer, (dz, dx) in gradients.items():
            alpha = alphas[layer.name]
            sigmas = {
                "sigma_dy": np.sqrt(np.mean(dz**2)),
                "sigma_w": np.sqrt(np.mean(layer.get_weights()[0].astype("float64") ** 2)),
            }
            n = accumulation_length(layer)
            # Entries of ∇X that are exactly zero, as behind a 1×1 kernel with stride 2, are none.
            magnitudes = alpha * np.abs(dx[dx != 0])
            row = {"layer": layer.name, "n": n, "entries": magnitudes.size, "alpha": alpha}
            # Eq. 1 counts α|∇x| ≤ λ; rounding to nearest loses α|∇x| ≤ λ/2.
            for name, limit in (("below", SMALLEST), ("lost", SMALLEST / 2)):
                row[f"{name} predicted"] = float(
                    gs.theory.gemm_underflow_rate(alpha, n, **sigmas, smallest=limit)
                )
                row[name] = float(np.mean(magnitudes <= limit))
            found[placement].append(row)
    return found


def table(rows):
    """Rows as lines of a Markdown table."""
    lines = [
        "| product | N | non-zero entries | log2 α | predicted ≤ λ | realised ≤ λ | ratio "
        "| predicted lost | realised lost |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        predicted, realised = row["below predicted"], row["below"]
        # Fewer than ten entries say little.
        ratio = f"{predicted / realised:.2f}" if realised * row["entries"] >= 10 else "–"
        lines.append(
            f"| {row['layer']} | {row['n']:g} | {row['entries']} | {math.log2(row['alpha']):.0f} "
            f"| {predicted:.1e} | {realised:.1e} | {ratio} "
            f"| {row['lost predicted']:.1e} | {row['lost']:.1e} |"
        )
    return lines


def page(names, seed, batch):
    """The whole page, as lines."""
    lines = [
        "# Theorem 1: predicted and realised underflow",
        "",
        "Theorem 1 of Zhao et al., IJCAI 2020, predicts which share of a product's gradient ∇X",
        "underflows under a scale α (Eq. 3). Here it stands beside the share that does, at every",
        "product of two networks as they are initialised, in the first backward pass. λ is 2^-24,",
        "float16's smallest magnitude. *≤ λ* counts non-zero entries with α\\|∇x\\| ≤ λ, as Eq. 1",
        "does; *lost* counts those that rounding to nearest makes zero, α\\|∇x\\| ≤ λ/2. *ratio*",
        "is predicted over realised, where at least ten entries are ≤ λ.",
        "",
        f"Printed by `{' '.join(['python', 'benchmarks/theorem1.py', *sys.argv[1:]])}`",
        f"(seed {seed}, batch {batch}) with Python {platform.python_version()}, TensorFlow "
        f"{tf.__version__},",
        f"Keras {keras.__version__} and NumPy {np.__version__} on {platform.machine()}.",
    ]
    for name in names:
        for placement, rows in rates(MODELS[name], seed, batch).items():
            lines += ["", f"## {name}, {placement} placement", "", *table(rows)]
            known = [row for row in rows if row["below"] * row["entries"] >= 10]
            if known:
                ratios = [row["below predicted"] / row["below"] for row in known]
                lines += [
                    "",
                    f"Predicted over realised: {min(ratios):.2f} to {max(ratios):.2f}, "
                    f"median {np.median(ratios):.2f}.",
                ]
    return lines


def main():
    """Prints the page, and writes it where it is told to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["residual", "vgg"], choices=MODELS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--write", help="file to write the page to")
    args = parser.parse_args()
    lines = page(args.model, args.seed, args.batch)
    print("\n".join(lines))
    if args.write:
        with open(args.write, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
