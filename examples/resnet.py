"""Residual networks for small images, of ResNet-18's and ResNet-50's blocks, and plain ones."""

import keras
from blocks import conv_block
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
    x = conv_block(x, width, "stem")
    for stage, blocks in enumerate(DEPTHS[depth]):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            name = f"stage{stage + 1}_block{block + 1}"
            x = _block(x, width * 2**stage, stride, depth == 50, residual, name)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = layers.Dense(classes, name="logits")(x)
    return keras.Model(inputs, layers.Activation("softmax", dtype="float32", name="softmax")(x))


def _block(x, filters, stride, bottleneck, residual, name):
    if bottleneck:
        y = conv_block(x, filters, f"{name}_reduce", 1)
        y = conv_block(y, filters, f"{name}_middle", 3, stride)
        filters *= 4
        y = conv_block(y, filters, f"{name}_expand", 1, activation=False)
    else:
        y = conv_block(x, filters, f"{name}_first", 3, stride)
        y = conv_block(y, filters, f"{name}_second", activation=False)
    if residual:
        if stride > 1 or x.shape[-1] != filters:
            x = conv_block(x, filters, f"{name}_shortcut", 1, stride, activation=False)
        y = layers.Add(name=f"{name}_add")([x, y])
    return layers.ReLU(name=f"{name}_out")(y)
