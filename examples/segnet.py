"""The network and the loss of the segmentation example: plain Keras, the same for all methods."""

import keras
import numpy as np
from blocks import conv_block
from keras import layers, ops

WIDTHS = (16, 32, 48, 64)  # filters per stage; each further stage works at half the size


def build_model(size, classes):
    """Builds an encoder-decoder in the manner of SegNet, of any policy that is set.

    The encoder is a VGG: convolutions and pooling. The decoder mirrors it with upsampling. SegNet
    hands the positions of the maxima to the decoder; here the encoder's maps are added, a
    branch whose two gradients meet again on the way back.
    """
    inputs = keras.Input((*size, 3), name="image")
    x = layers.Rescaling(1 / 127.5, offset=-1, name="rescale")(inputs)
    skipped = []
    for stage, filters in enumerate(WIDTHS, start=1):
        x = conv_block(x, filters, f"encoder{stage}")
        if stage < len(WIDTHS):
            skipped.append(x)
            x = layers.MaxPooling2D(name=f"pool{stage}")(x)
    for stage in range(len(WIDTHS) - 1, 0, -1):
        x = conv_block(x, WIDTHS[stage - 1], f"decoder{stage}")
        x = layers.UpSampling2D(name=f"upsample{stage}")(x)
        x = layers.Add(name=f"add{stage}")([x, skipped[stage - 1]])
    x = layers.Conv2D(classes, 1, name="logits")(x)
    # The softmax is in float32 under every policy; the cast before it is where gradients get lost.
    outputs = layers.Activation("softmax", dtype="float32", name="softmax")(x)
    return keras.Model(inputs, outputs, name="segnet")


class PixelCrossEntropy(keras.losses.Loss):
    """Mean cross-entropy over the labelled pixels of a batch, times a multiplier.

    Args:
        class_weights: One weight per class. The label `len(class_weights)` means unlabelled.
        multiplier: What the mean is multiplied by.
    """

    def __init__(self, class_weights, multiplier=1.0, name="cross_entropy"):
        super().__init__(name=name)
        self.class_weights = np.asarray(class_weights, np.float32)
        self.multiplier = multiplier

    def call(self, y_true, y_pred):
        """Returns the loss of a batch, a scalar."""
        labels = ops.cast(y_true, "int32")
        # An unlabelled pixel takes any class, with weight 0.
        weights = ops.take(np.append(self.class_weights, np.float32(0)), labels)
        labelled = ops.cast(labels < len(self.class_weights), "float32")
        labels = ops.minimum(labels, len(self.class_weights) - 1)
        entropy = keras.losses.sparse_categorical_crossentropy(labels, y_pred)
        return self.multiplier * ops.sum(weights * entropy) / ops.maximum(ops.sum(labelled), 1)
