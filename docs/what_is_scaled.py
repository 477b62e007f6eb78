"""Prints docs/what_is_scaled.md: how each Keras layer is differentiated, read off the code.

python docs/what_is_scaled.py --write docs/what_is_scaled.md
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras

import tf_gradscale as gs

layers = keras.layers
VECTOR, SEQUENCE, IMAGE, VOLUME = (6,), (6, 4), (12, 12, 3), (6, 6, 6, 2)
VIDEO = {1: (4, 6, 2), 2: (4, 6, 6, 2), 3: (4, 6, 6, 6, 2)}
BY_DIMENSION = {1: SEQUENCE, 2: IMAGE, 3: VOLUME}

# How to make the layers that need arguments, and what to call them on.
CASES = {
    "Activation": (lambda: layers.Activation("relu"), VECTOR),
    "AdaptiveAveragePooling": (lambda kind: kind(3), None),
    "AdaptiveMaxPooling": (lambda kind: kind(3), None),
    "AveragePooling": (lambda kind: kind(2), None),
    "Bidirectional": (lambda: layers.Bidirectional(layers.LSTM(3)), SEQUENCE),
    "CenterCrop": (lambda: layers.CenterCrop(6, 6), IMAGE),
    "Conv": (lambda kind: kind(4, 2), None),
    "Dense": (lambda: layers.Dense(3), VECTOR),
    "DepthwiseConv": (lambda kind: kind(2), None),
    "Dropout": (lambda: layers.Dropout(0.5), VECTOR),
    "AlphaDropout": (lambda: layers.AlphaDropout(0.5), VECTOR),
    "EinsumDense": (lambda: layers.EinsumDense("abc,cd->abd", (6, 5)), SEQUENCE),
    "GRU": (lambda: layers.GRU(3), SEQUENCE),
    "LSTM": (lambda: layers.LSTM(3), SEQUENCE),
    "SimpleRNN": (lambda: layers.SimpleRNN(3), SEQUENCE),
    "RNN": (lambda: layers.RNN(layers.LSTMCell(3)), SEQUENCE),
    "GaussianDropout": (lambda: layers.GaussianDropout(0.5), VECTOR),
    "GaussianNoise": (lambda: layers.GaussianNoise(0.5), VECTOR),
    "GroupNormalization": (lambda: layers.GroupNormalization(2), SEQUENCE),
    "Lambda": (lambda: layers.Lambda(lambda x: 2 * x), VECTOR),
    "Normalization": (lambda: layers.Normalization(mean=0.0, variance=1.0), VECTOR),
    "Permute": (lambda: layers.Permute((2, 1)), SEQUENCE),
    "RepeatVector": (lambda: layers.RepeatVector(3), VECTOR),
    "Rescaling": (lambda: layers.Rescaling(2.0), VECTOR),
    "Reshape": (lambda: layers.Reshape((2, 3)), VECTOR),
    "Resizing": (lambda: layers.Resizing(6, 6), IMAGE),
    "SeparableConv": (lambda kind: kind(4, 2), None),
    "SpatialDropout": (lambda kind: kind(0.5), None),
    "SpectralNormalization": (
        lambda: layers.SpectralNormalization(layers.Dense(3)),
        VECTOR,
    ),
    "TimeDistributed": (lambda: layers.TimeDistributed(layers.Dense(3)), SEQUENCE),
}
# Two tensors: in one list, or as two arguments.
MERGING = "Add Average Concatenate Maximum Minimum Multiply Subtract Dot".split()
ATTENTION = {
    "Attention": layers.Attention,
    "AdditiveAttention": layers.AdditiveAttention,
    "MultiHeadAttention": lambda: layers.MultiHeadAttention(2, 2),
    "GroupQueryAttention": lambda: layers.GroupQueryAttention(2, 2, 1),
}
TOKENS = ("Embedding", "ReversibleEmbedding")
# Not for the inside of a network, or nothing to call by itself.
LEFT_OUT = {
    "no gradient": "CategoryEncoding Discretization HashedCrossing Hashing IntegerLookup "
    "StringLookup TextVectorization MaxNumBoundingBoxes",
    "augments data, in the input pipeline or in front of a network": "AugMix AutoContrast "
    "ContrastLimitedAdaptiveHistogramEqualization CutMix Equalization MixUp RandAugment "
    "RandomBrightness RandomColorDegeneration RandomColorJitter RandomContrast RandomCrop "
    "RandomElasticTransform RandomErasing RandomFlip RandomGaussianBlur RandomGrayscale RandomHue "
    "RandomInvert RandomPerspective RandomPosterization RandomRotation RandomSaturation "
    "RandomSharpness RandomShear RandomTranslation RandomZoom Solarization MelSpectrogram "
    "STFTSpectrogram",
    "a cell or a base class": "GRUCell LSTMCell SimpleRNNCell StackedRNNCells Layer Wrapper "
    "InputLayer Pipeline",
    "another framework's, or loaded": "FlaxLayer JaxLayer TorchModuleWrapper TFSMLayer",
}


def names():
    """All layers that Keras exports, each by its first name."""
    found = {}
    for name in sorted(vars(layers)):
        kind = getattr(layers, name)
        if isinstance(kind, type) and issubclass(kind, layers.Layer):
            # Convolution2D is Conv2D; GroupedQueryAttention is exported as GroupQueryAttention.
            found.setdefault(kind, kind.__name__ if hasattr(layers, kind.__name__) else name)
    return sorted(found.values())


def model_of(name):
    """A model of the one layer, in mixed_float16."""
    if name in MERGING:
        inputs = [keras.Input(SEQUENCE), keras.Input(SEQUENCE)]
        layer = layers.Dot(axes=2) if name == "Dot" else getattr(layers, name)()
        return keras.Model(inputs, layer(inputs))
    if name in ATTENTION:
        inputs = [keras.Input(SEQUENCE), keras.Input(SEQUENCE)]
        layer = ATTENTION[name]()
        together = name in ("Attention", "AdditiveAttention")
        return keras.Model(inputs, layer(inputs) if together else layer(*inputs))
    if name in TOKENS:
        inputs = keras.Input((6,), dtype="int32")
        return keras.Model(inputs, getattr(layers, name)(9, 4)(inputs))
    kind, base, dimension = getattr(layers, name), name, 0
    for suffix in ("1D", "2D", "3D", "1DTranspose", "2DTranspose", "3DTranspose"):
        if name.endswith(suffix):
            base, dimension = name.removesuffix(suffix), int(suffix[0])
    make, shape = CASES.get(base, (None, None))
    if base == "ConvLSTM":
        inputs = keras.Input(VIDEO[dimension])
        return keras.Model(inputs, kind(3, 2)(inputs))
    inputs = keras.Input(shape or BY_DIMENSION.get(dimension, SEQUENCE))
    if make is None:
        layer = kind()
    else:
        layer = make(kind) if make.__code__.co_argcount else make()
    return keras.Model(inputs, layer(inputs))


def rules_of(name):
    """The rules of the steps that a layer is run as, and the sites of each rule."""
    with gs.policy_scope("mixed_float16"):
        model = gs.convert(model_of(name))
    steps = model._region().graph().steps
    kinds = [type(step.rule).__name__ for step in steps if step.outputs]
    counted = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    text = ", ".join(f"{k} × {n}" if n > 1 else k for k, n in counted.items() if k != "Outside")
    if not text:
        # A trailing activation is no step.
        return "Carry; at the end of a model in float32, behind all steps"
    return f"opened: {text}" if len(kinds) > 1 else text


def page():
    """The page, as Markdown."""
    left_out = {name: why for why, some in LEFT_OUT.items() for name in some.split()}
    rows = [(name, rules_of(name)) for name in names() if name not in left_out]
    lines = [
        "# What is scaled, and what is carried",
        "",
        "How each layer of Keras is differentiated under `mixed_float16`, as printed by",
        "`python docs/what_is_scaled.py`. Everything is right in each case; what differs is where",
        "a scale of its own is chosen.",
        "",
        "- **Gemm**: a product with a kernel. β for its input by Theorem 1; β_W for its kernel.",
        "- **Bilinear**: a product of two activations. β for each of them by Theorem 1.",
        "- **Normalization**: run on its float32 input, as Keras does inside; its gradient leaves",
        "  through a cast with a scale of its own.",
        "- **Carry**: neither shrinks nor grows gradients much; α passes through.",
        "- **Uniform**: multiplies gradients by one known number, as a mean does, from which β",
        "  follows.",
        "- **Measured**: may shrink or grow gradients. β is measured in a trial.",
        "- **Unscaled**: a custom gradient that is not linear, such as one that clips. Run in",
        "  float32 and given the true gradient. It is detected, whatever layer it is in.",
        "- **opened**: the layer's `call` is taken apart into the layers and operations in it.",
        "  The same is done with layers and models of one's own, to any depth.",
        "",
        "Where gradients meet (a tensor that is used twice) and where float32 becomes float16",
        "(outputs, losses, float32 layers) there are scales besides, whatever the layers are.",
        "`model.scales` lists them all. A layer class of one's own gets a rule by",
        "`tf_gradscale.rules.register`.",
        "",
        "| layer | rule |",
        "| --- | --- |",
        *[f"| `{name}` | {rule} |" for name, rule in rows],
        "",
        "Not in the table:",
        "",
        *[
            f"- {why}: {', '.join(f'`{n}`' for n in some.split() if hasattr(layers, n))}."
            for why, some in LEFT_OUT.items()
        ],
        "",
    ]
    return "\n".join(lines)


def main():
    """Prints the page, or writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", metavar="FILE", help="write the page (default: print it)")
    args = parser.parse_args()
    text = page()
    if args.write:
        Path(args.write).write_text(text, "utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
