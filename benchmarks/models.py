"""Networks that the benchmarks train, in one place so that all of them mean the same thing."""

import keras

layers = keras.layers


def _residual_block(x, filters, stride=1):
    y = layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(x)
    y = layers.ReLU()(layers.BatchNormalization()(y))
    y = layers.Conv2D(filters, 3, padding="same", use_bias=False)(y)
    y = layers.BatchNormalization()(y)
    if stride != 1 or x.shape[-1] != filters:
        x = layers.Conv2D(filters, 1, stride, use_bias=False)(x)
        x = layers.BatchNormalization()(x)
    return layers.ReLU()(layers.Add()([x, y]))


def residual(size=32, width=16, blocks=8, classes=10):
    """A residual network in the style of ResNet for CIFAR."""
    inputs = keras.Input((size, size, 3))
    x = layers.Conv2D(width, 3, padding="same", use_bias=False)(inputs)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    for i in range(blocks):
        stage = 3 * i // blocks
        first = i > 0 and 3 * (i - 1) // blocks != stage
        x = _residual_block(x, width * 2**stage, 2 if first else 1)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(classes, activation="softmax")(x))


def vgg(size=32, width=16, classes=10):
    """A plain stack of convolutions in the style of VGG, without normalisation."""
    inputs = x = keras.Input((size, size, 3))
    for stage in range(3):
        for _ in range(2):
            x = layers.Conv2D(
                width * 2**stage,
                3,
                padding="same",
                activation="relu",
                kernel_initializer="he_normal",
            )(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Dense(128, activation="relu")(layers.Flatten()(x))
    return keras.Model(inputs, layers.Dense(classes, activation="softmax")(x))


def segnet(size=64, width=16, classes=8):
    """An encoder-decoder for pixel-wise classification, in the style of SegNet."""
    inputs = x = keras.Input((size, size, 3))

    def block(x, filters):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        return layers.ReLU()(layers.BatchNormalization()(x))

    for stage in range(3):
        x = layers.MaxPooling2D()(block(x, width * 2**stage))
    for stage in reversed(range(3)):
        x = block(layers.UpSampling2D()(x), width * 2**stage)
    x = layers.Conv2D(classes, 1)(x)
    return keras.Model(inputs, layers.Activation("softmax", dtype="float32")(x))


def mobilenet(size=32, width=16, blocks=6, classes=10):
    """Depthwise convolutions between pointwise ones, in the style of MobileNetV2."""
    inputs = keras.Input((size, size, 3))
    x = layers.Conv2D(width, 3, padding="same", use_bias=False)(inputs)
    x = layers.ReLU(6.0)(layers.BatchNormalization()(x))
    for i in range(blocks):
        filters = width * 2 ** (2 * i // blocks)
        stride = 2 if i == blocks // 2 else 1
        y = layers.Conv2D(4 * x.shape[-1], 1, use_bias=False)(x)
        y = layers.ReLU(6.0)(layers.BatchNormalization()(y))
        y = layers.DepthwiseConv2D(3, stride, padding="same", use_bias=False)(y)
        y = layers.ReLU(6.0)(layers.BatchNormalization()(y))
        y = layers.BatchNormalization()(layers.Conv2D(filters, 1, use_bias=False)(y))
        x = layers.Add()([x, y]) if x.shape == y.shape else y
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(classes, activation="softmax")(x))


def transformer(size=32, width=64, blocks=4, classes=32):
    """An encoder that labels each of `size` vectors."""
    inputs = x = keras.Input((size, width))
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, width // 4)(y, y)])
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(y)])
    return keras.Model(inputs, layers.Dense(classes, activation="softmax")(x))


MODELS = {
    "residual": residual,
    "vgg": vgg,
    "mobilenet": mobilenet,
    "segnet": segnet,
    "transformer": transformer,
}
