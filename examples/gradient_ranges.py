"""Where a network's gradients lie, and where gradient scaling puts them.

    python examples/gradient_ranges.py --out docs/gradient_ranges.png

Takes one gradient of a small encoder-decoder with random weights on random data. For the input of
every convolution it draws the magnitudes of the true gradient (computed in float32, without this
library) and of the one that is kept in float16 (times that site's scale), against the range of
float16; and prints which share of the non-zero entries float16 would round to zero.
"""

import argparse

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import tf_gradscale as gs

layers = keras.layers
QUANTILES = (0.001, 0.25, 0.5, 0.75, 0.999)


def encoder_decoder(size, classes):
    """Three stages down, three up, and a softmax for each pixel."""
    inputs = x = keras.Input((size, size, 3))
    for i, filters in enumerate((16, 32, 64)):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False, name=f"down_{i}")(x)
        x = layers.MaxPooling2D()(layers.ReLU()(layers.BatchNormalization()(x)))
    for i, filters in enumerate((64, 32, 16)):
        x = layers.UpSampling2D()(x)
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False, name=f"up_{i}")(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Conv2D(classes, 1, name="classes")(x)
    return keras.Model(inputs, layers.Activation("softmax", dtype="float32")(x))


def true_gradients(model, x, y):
    """The gradient at every convolution's input, in float32: a dictionary by the layer's name."""
    output, watched = tf.convert_to_tensor(x), {}
    with tf.GradientTape(persistent=True) as tape:
        for layer in model.layers[1:]:
            if isinstance(layer, layers.Conv2D):
                tape.watch(output)
                watched[layer.name] = output
            output = layer(output, training=True)
        loss = keras.losses.SparseCategoricalCrossentropy()(y, output)
    gradients = tape.gradient(loss, list(watched.values()))
    # The first one's input is the image.
    return {name: g.numpy() for name, g in list(zip(watched, gradients, strict=True))[1:]}


def main():
    """Prints the table and draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=128, help="height and width of the maps")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--out", default="gradient_ranges.png", help="picture to write")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(args.batch, args.size, args.size, 3)).astype("float32")
    y = rng.integers(0, 8, size=(args.batch, args.size, args.size))

    keras.utils.set_random_seed(0)
    reference = encoder_decoder(args.size, 8)
    with gs.policy_scope("mixed_float16"):
        keras.utils.set_random_seed(0)
        model = gs.convert(encoder_decoder(args.size, 8))
    model.set_weights(reference.get_weights())
    true = true_gradients(reference, x, y)
    with tf.GradientTape() as tape:
        loss = keras.losses.SparseCategoricalCrossentropy()(y, model(x, training=True))
    tape.gradient(loss, [v.value for v in model.trainable_variables])

    scales = {}
    for site in model.scales:
        if site.kind == "gemm":
            scales[site.name.removesuffix("/input")] = site.cumulative_scale
    rows = [(name, scales[name], gradient) for name, gradient in true.items()]
    print(f"{'convolution':<12} {'cumulative scale':>16} {'lost unscaled':>14} {'lost scaled':>12}")
    for name, scale, gradient in rows:
        present = np.abs(gradient[gradient != 0])
        # float16 rounds to zero what is at most half its smallest number.
        lost = [float(np.mean(present * s <= 2.0**-25)) for s in (1.0, scale)]
        print(f"{name:<12} {f'2^{int(np.log2(scale))}':>16} {lost[0]:>14.1%} {lost[1]:>12.3%}")
    draw(rows, args.out)


def draw(rows, path):
    """One column a convolution: 0.1 % to 99.9 % of the non-zero magnitudes, and the quartiles."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    fmt = gs.formats.get("float16")
    lowest, normal, largest = map(
        np.log2, (fmt.smallest("subnormal"), fmt.smallest("normal"), fmt.largest)
    )
    axes.axhspan(normal, largest, color="#d9ead3", label="float16, full precision", zorder=0)
    axes.axhspan(lowest, normal, color="#fff2cc", label="float16, subnormal", zorder=0)
    for i, (_, scale, gradient) in enumerate(rows):
        magnitudes = np.log2(np.abs(gradient[gradient != 0]))
        for shift, offset, color, label in (
            (0.0, -0.15, "#b45f06", "true gradient"),
            (np.log2(scale), 0.15, "#0b5394", "scaled gradient"),
        ):
            low, first, middle, third, high = np.quantile(magnitudes, QUANTILES) + shift
            label = label if i == 0 else None
            axes.plot([i + offset] * 2, [low, high], color=color, lw=1.5, label=label)
            axes.plot([i + offset] * 2, [first, third], color=color, lw=7, solid_capstyle="butt")
            axes.plot(i + offset, middle, "o", color="white", ms=3)
    axes.set_xticks(
        range(len(rows)),
        [name for name, *_ in rows],
    )
    axes.set_ylabel("log2 of the magnitude")
    axes.set_title("Gradients at the inputs of convolutions, and the range of float16")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path, dpi=150)
    print(f"Picture: {path}")


if __name__ == "__main__":
    main()
