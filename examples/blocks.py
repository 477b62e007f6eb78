"""The layers that the convolutional networks of the examples repeat."""

from keras import layers


def conv_block(x, filters, name, size=3, strides=1, activation=True):
    """Convolution, batch normalisation and, if wanted, ReLU."""
    x = layers.Conv2D(
        filters,
        size,
        strides,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        name=name,
    )(x)
    x = layers.BatchNormalization(momentum=0.9, name=f"{name}_norm")(x)
    return layers.ReLU(name=f"{name}_relu")(x) if activation else x
