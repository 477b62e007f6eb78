"""The detector of the detection example: SSD on SqueezeNet, plain Keras, the same for all methods.

Maps of several resolutions each predict, for every place and every anchor (a box of fixed size
there), how a box differs from the anchor and which class it holds; class 0 is the background.
"""

import data_files
import keras
import numpy as np
from blocks import conv_block
from keras import layers, ops
from multibox import ASPECTS

FIRE = {2: 16, 3: 16, 4: 32, 5: 32, 6: 48, 7: 48, 8: 64, 9: 64}  # squeezed channels by module
MEAN = (123.68, 116.779, 103.939)  # of ImageNet's pixels, red to blue
RANGE = 127.5  # what pixels are divided by
NEGATIVES = 3  # for each positive


# Network.


def build_model(size, classes, backbone=None):
    """Builds the detector, of any policy that is set.

    Args:
        size: Height and width of the images, a multiple of 32.
        classes: Number of classes, without the background.
        backbone: Weights from `load_backbone`; random ones by default.

    Returns:
        A model from images in 0..255 to a dictionary: "boxes", the differences, of shape
        (batch, anchors, 4), and "classes", logits of shape (batch, anchors, 1 + classes).
    """
    image = keras.Input((size, size, 3), name="image")
    # Heads add up thousands of values of size 1, and would not bear the rate of all other layers.
    maps = [layers.Rescaling(1 / 4, name=f"map{i}")(x) for i, x in enumerate(_maps(image))]
    outputs = {}
    for name, values in (("boxes", 4), ("classes", 1 + classes)):
        filters = (1 + len(ASPECTS)) * values
        heads = []
        for i, x in enumerate(maps):
            x = layers.Conv2D(filters, 3, padding="same", name=f"{name}{i}")(x)
            heads.append(layers.Reshape((-1, values), name=f"{name}{i}_rows")(x))
        x = layers.Concatenate(axis=1, name=f"{name}_rows")(heads)
        # The losses are in float32 under every policy; gradients get lost at the cast before them.
        outputs[name] = layers.Activation("linear", dtype="float32", name=name)(x)
    model = keras.Model(image, outputs, name="ssd")
    for name, weights in (backbone or {}).items():
        model.get_layer(name).set_weights(weights)
    return model


def _squeezenet(image):
    """SqueezeNet 1.1 without its classifier; returns its maps of 1/8 and 1/16 of the size."""
    offset = [-mean / RANGE for mean in MEAN]
    x = layers.Rescaling(1 / RANGE, offset=offset, name="rescale")(image)
    x = conv_block(x, 64, "conv1", strides=2)
    for module, filters in FIRE.items():
        if module in (2, 4, 6):
            eighth = x
            x = layers.MaxPooling2D(3, strides=2, padding="same", name=f"pool{module - 1}")(x)
        x = conv_block(x, filters, f"fire{module}_squeeze1x1", 1)
        x = layers.Concatenate(name=f"fire{module}")(
            [conv_block(x, 4 * filters, f"fire{module}_expand{k}x{k}", k) for k in (1, 3)]
        )
    return eighth, x


def _maps(image):
    """Adds maps of half the size each, down to 2 x 2."""
    maps = list(_squeezenet(image))
    while maps[-1].shape[1] > 2:
        number = len(maps) + 8  # SqueezeNet's last module is 9
        x = conv_block(maps[-1], 96, f"extra{number}_squeeze1x1", 1)
        maps.append(conv_block(x, 192, f"extra{number}_expand3x3", strides=2))
    return maps


def load_backbone(path, images):
    """Loads weights of SqueezeNet 1.1, which has biases where there are normalisations here.

    Scales and offsets of these are set so that the network computes what SqueezeNet does as long as
    images have the statistics of those given here. SqueezeNet was trained on pixels of -128 to 128.
    All it does is homogeneous, so with pixels and biases divided by 127.5 its maps are, too.

    Args:
        path: An .npz file of arrays such as "conv1/kernel" and "fire2/expand3x3/bias".
        images: Some images to take statistics of, of shape (count, size, size, 3).

    Returns:
        A dictionary of lists of arrays, by the names of layers.

    Raises:
        ValueError: If there is no such file, or it holds something else.
    """
    keras.config.set_dtype_policy("float32")
    image = keras.Input(images.shape[1:])
    model = keras.Model(image, _squeezenet(image))
    convolutions = [layer for layer in model.layers if isinstance(layer, layers.Conv2D)]
    norms = [model.get_layer(f"{layer.name}_norm") for layer in convolutions]
    arrays, biases = _read_backbone(path, convolutions), []
    for layer, norm in zip(convolutions, norms, strict=True):
        kernel, bias = (arrays[_key(layer, kind)] for kind in ("kernel", "bias"))
        # The file's network takes blue before green and red.
        layer.kernel.assign(kernel[:, :, ::-1] if layer.name == "conv1" else kernel)
        biases.append(bias / np.float32(RANGE))
        # For the moment no normalisation, so that the maps below are SqueezeNet's own.
        one = np.ones_like(bias)
        norm.set_weights([one, biases[-1], 0 * one, one - norm.epsilon])
    maps = keras.Model(image, [norm.input for norm in norms]).predict(images, verbose=0)
    found = {layer.name: layer.get_weights() for layer in convolutions}
    for norm, x, bias in zip(norms, maps, biases, strict=True):
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        found[norm.name] = [np.sqrt(variance + norm.epsilon), mean + bias, mean, variance]
    return found


def _key(layer, kind):
    return f"{layer.name.replace('_', '/')}/{kind}"


def _read_backbone(path, convolutions):
    """Returns the arrays of a file, if it has kernels and biases for all convolutions."""

    def error(problem):
        return ValueError(
            f"--backbone cannot be used: {problem}. Expected an .npz with weights of SqueezeNet "
            f"1.1 (pixels blue, green, red) as {2 * len(convolutions)} arrays: kernel and bias of "
            "conv1 (conv1/kernel of shape (3, 3, 3, 64), conv1/bias), fire2/squeeze1x1, "
            "fire2/expand1x1, fire2/expand3x3, ... fire9/expand3x3. Leave out --backbone to start "
            f"from random weights.\nReceived: {path}"
        )

    try:
        arrays = data_files.read_npz(path)
    except FileNotFoundError as cause:
        raise error("there is no such file") from cause
    if arrays is None:
        raise error("it is not an .npz archive")
    for layer in convolutions:
        shape = tuple(layer.kernel.shape)
        for name, expected in ((_key(layer, "kernel"), shape), (_key(layer, "bias"), shape[-1:])):
            if name not in arrays:
                raise error(f"{name} is missing")
            if arrays[name].shape != expected:
                raise error(f"{name} has shape {arrays[name].shape}, not {expected}")
    return arrays


# Loss.


def hard_negatives(entropy, labels):
    """Chooses the anchors without a box on which the network errs most, in each image.

    Args:
        entropy: Cross-entropy of each anchor, of shape (batch, anchors).
        labels: Their classes; 0 has no box, -1 cannot be chosen.

    Returns:
        Boolean; for each anchor with a box 3 others, or all if there are fewer.
    """
    negative = labels == 0
    rank = ops.argsort(ops.argsort(ops.where(negative, -entropy, np.inf), axis=1), axis=1)
    count = NEGATIVES * ops.sum(ops.cast(labels > 0, "int32"), axis=1, keepdims=True)
    return ops.logical_and(rank < count, negative)


def mine(labels, logits):
    """Fixes which anchors count: returns labels with -1 for those that are not chosen."""
    entropy = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    return np.where(labels > 0, labels, np.asarray(hard_negatives(entropy, labels)) - 1)


def losses(box_weight=1.0, class_weight=1.0):
    """The two losses: sums over anchors, over the number of anchors with a box in the batch.

    Args:
        box_weight: Of the smooth L1 loss of the differences.
        class_weight: Of the cross-entropy of positives and hard negatives.

    Returns:
        A dictionary of functions of (targets, outputs), by output.
    """

    def boxes(y_true, y_pred):
        matched = y_true[..., 4]
        # Huber's loss with delta 1; Keras takes the mean of the four differences.
        error = 4 * keras.losses.huber(y_true[..., :4], y_pred)
        return box_weight * ops.sum(matched * error) / ops.maximum(ops.sum(matched), 1)

    def classes(y_true, y_pred):
        labels = ops.cast(y_true, "int32")
        entropy = keras.losses.sparse_categorical_crossentropy(
            ops.maximum(labels, 0), y_pred, from_logits=True
        )
        positive = labels > 0
        chosen = ops.logical_or(positive, hard_negatives(ops.stop_gradient(entropy), labels))
        matched = ops.maximum(ops.sum(ops.cast(positive, "float32")), 1)
        return class_weight * ops.sum(ops.where(chosen, entropy, 0)) / matched

    return {"boxes": boxes, "classes": classes}
