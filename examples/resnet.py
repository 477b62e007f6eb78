"""Residual networks for small images, of ResNet-18's and ResNet-50's blocks, and plain ones."""

import keras
from keras import layers

# Blocks in each of four stages, each of which halves the maps and doubles the width.
DEPTHS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}


def build_model(shape, classes, depth=18, width=16, residual=True):
    """Builds a network that ends in a softmax, of any policy that is set.

    Args:
        shape: Height, width and channels of the images.
        classes: Their number.
        depth: 18, with blocks of two convolutions; or 50, with bottlenecks of three.
        width: Filters in the first stage (64 in the published ones).
        residual: Whether blocks are added to their inputs; else it is a plain network.
    """
    inputs = keras.Input(shape, name="image")
    x = layers.Rescaling(1 / 127.5, offset=-1)(inputs)
    x = _convolution(x, width, 3, 1, "stem")
    for stage, blocks in enumerate(DEPTHS[depth]):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            name = f"stage{stage + 1}_block{block + 1}"
            x = _block(x, width * 2**stage, stride, depth == 50, residual, name)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = layers.Dense(classes, name="logits")(x)
    return keras.Model(inputs, layers.Activation("softmax", dtype="float32", name="softmax")(x))


def _convolution(x, filters, size, stride, name, activation=True):
    """Convolution, batch normalisation and, unless it is a block's last, ReLU."""
    x = layers.Conv2D(
        filters,
        size,
        stride,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        name=name,
    )(x)
    x = layers.BatchNormalization(momentum=0.9, name=f"{name}_norm")(x)
    return layers.ReLU(name=f"{name}_relu")(x) if activation else x


def _block(x, filters, stride, bottleneck, residual, name):
    if bottleneck:
        y = _convolution(x, filters, 1, 1, f"{name}_reduce")
        y = _convolution(y, filters, 3, stride, f"{name}_middle")
        filters *= 4
        y = _convolution(y, filters, 1, 1, f"{name}_expand", activation=False)
    else:
        y = _convolution(x, filters, 3, stride, f"{name}_first")
        y = _convolution(y, filters, 3, 1, f"{name}_second", activation=False)
    if residual:
        if stride > 1 or x.shape[-1] != filters:
            x = _convolution(x, filters, 1, stride, f"{name}_shortcut", activation=False)
        y = layers.Add(name=f"{name}_add")([x, y])
    return layers.ReLU(name=f"{name}_out")(y)
