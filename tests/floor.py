"""A gradient's error against float32, and the floor under it that float16's rounding sets.

The error of a variable's gradient is its relative L2 distance to the gradient in float32, with the
same weights and data. The floor is that error in plain mixed_float16 under a fixed loss scale, as a
median over a sweep of loss scales at which nothing overflows and little underflows. What counts is
the ratio of an error to the floor, as a median over several seeds: one seed, or the best of a
sweep, is luck.
"""

import functools

import keras
import numpy as np
import tensorflow as tf

import tf_gradscale as gs

layers = keras.layers
CLASSES = 5
BATCH = 16
SWEEP = tuple(2.0**k for k in range(6, 13))
# A gradient whose norm is a smaller share of the largest one is zero to float32's rounding.
ZERO = 1e-6


def _head(x):
    return layers.Activation("softmax", dtype="float32")(layers.Dense(CLASSES)(x))


def residual(zero_init=False):
    """Three residual blocks with batch normalisation.

    With `zero_init` every branch ends in γ = 0, so that gradients in it are all zero at first.
    """

    def convolution(x, filters, size=3, stride=1, gamma="ones"):
        x = layers.Conv2D(filters, size, stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization(gamma_initializer=gamma)(x)

    inputs = keras.Input((12, 12, 3))
    x = layers.ReLU()(convolution(inputs, 8))
    for filters, stride in ((8, 1), (16, 2), (16, 1)):
        y = layers.ReLU()(convolution(x, filters, stride=stride))
        y = convolution(y, filters, gamma="zeros" if zero_init else "ones")
        if stride > 1:
            x = convolution(x, filters, 1, stride)
        x = layers.ReLU()(layers.Add()([x, y]))
    return keras.Model(inputs, _head(layers.GlobalAveragePooling2D()(x)))


def residual_zero():
    """`residual` with `zero_init`."""
    return residual(zero_init=True)


def vgg():
    """Convolutions, pooling and dense layers in one line, without normalisation."""
    inputs = x = keras.Input((12, 12, 3))
    for filters in (8, 16):
        for _ in range(2):
            x = layers.Conv2D(
                filters, 3, padding="same", activation="relu", kernel_initializer="he_normal"
            )(x)
        x = layers.MaxPooling2D()(x)
    return keras.Model(inputs, _head(layers.Dense(32, activation="relu")(layers.Flatten()(x))))


def three_heads():
    """Three heads on one trunk, each behind the mean over a map of 21 × 16 = 336 positions."""
    inputs = x = keras.Input((21, 16, 3))
    for _ in range(2):
        x = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    outputs = []
    for _ in range(3):
        y = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
        outputs.append(_head(layers.GlobalAveragePooling2D()(y)))
    return keras.Model(inputs, outputs)


def error(gradients, truth, multiplier=1.0):
    """Relative L2 error of gradients of the loss times a multiplier: (median, largest)."""
    norms = [np.linalg.norm(t) for t in truth]
    errors = [
        np.linalg.norm(g.astype("float64") / multiplier - t) / norm
        for g, t, norm in zip(gradients, truth, norms, strict=True)
        if norm > ZERO * max(norms)
    ]
    return np.array([np.median(errors), np.max(errors)])


def _step(model, x, labels, multiplier):
    """The loss, and the gradients of the loss times a multiplier."""
    with tf.GradientTape() as tape:
        made = keras.tree.flatten(model(x, training=True))
        losses = map(keras.losses.sparse_categorical_crossentropy, tf.unstack(labels), made)
        loss = sum(map(tf.reduce_mean, losses))
        scaled = loss * multiplier
    return loss, tape.gradient(scaled, model.trainable_variables)


class Bench:
    """One architecture three times over: in float32, in plain mixed_float16, and scaled by us.

    Each model's step is traced once; `reset` gives new weights and new data.

    Args:
        net: A function that builds the model, with softmaxes at its end.
        jit_compile: Whether the two mixed_float16 steps are compiled by XLA.
        config: A `GradScaleConfig` for ours.
    """

    def __init__(self, net, jit_compile=False, config=None):
        self._net = net
        with gs.policy_scope("float32"):
            self.true = net()
        with gs.policy_scope("mixed_float16"):
            self.plain = net()
            self.ours = gs.convert(net(), config)
        self._step = {
            model: tf.function(functools.partial(_step, model), jit_compile=jit)
            for model, jit in (
                (self.true, False),
                (self.plain, jit_compile),
                (self.ours, jit_compile),
            )
        }
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9, global_clipnorm=1.0)
        optimizer.build(self.ours.trainable_variables)
        self._apply = tf.function(optimizer.apply)
        self._state = [*self.ours.scales.variables, *optimizer.variables]
        self._initial = self._saved()

    def _saved(self):
        return [keras.ops.convert_to_numpy(variable) for variable in self._state]

    def _restore(self, values):
        for variable, value in zip(self._state, values, strict=True):
            variable.assign(value)

    def reset(self, seed):
        """New weights and new data; scales as in a model that was never differentiated."""
        keras.utils.set_random_seed(seed)
        with gs.policy_scope("float32"):
            self.ours.set_weights(self._net().get_weights())
        self._restore(self._initial)
        self._rng = np.random.default_rng(seed)
        self._colours = self._rng.normal(size=(len(self.ours.outputs), CLASSES, 1, 1, 3))

    def draw(self):
        """A batch that can be learned: noise, and for each head the colour of the class."""
        labels = self._rng.integers(CLASSES, size=(len(self._colours), BATCH))
        x = self._rng.normal(size=(BATCH, *self.ours.input_shape[1:]))
        for colours, label in zip(self._colours, labels, strict=True):
            x += colours[label]
        return tf.constant(x, tf.float32), tf.constant(labels)

    def gradients(self, model, batch, multiplier=1.0):
        """The loss, and the gradients of the loss times a multiplier, in NumPy."""
        loss, gradients = self._step[model](*batch, tf.constant(multiplier, tf.float32))
        return float(loss), [g.numpy() for g in gradients]

    def train(self, steps):
        """Trains ours by its own gradients, each step one pass. Returns the last loss."""
        for _ in range(steps):
            loss, gradients = self.gradients(self.ours, self.draw())
            self._apply(gradients)
        return loss

    def errors(self, multipliers=(1.0,), loss_scales=SWEEP):
        """Errors in the next pass, which does not count as one: its state is restored.

        Args:
            multipliers: What the loss is multiplied by, each tried at the present scales.
            loss_scales: Those of plain mixed_float16.

        Returns:
            Two arrays of (median, largest) errors: of ours for each multiplier, of plain
            mixed_float16 for each loss scale.
        """
        batch, state = self.draw(), self._saved()
        for model in (self.true, self.plain):
            model.set_weights(self.ours.get_weights())
        _, truth = self.gradients(self.true, batch)
        plain = [error(self.gradients(self.plain, batch, s)[1], truth, s) for s in loss_scales]
        ours = []
        for multiplier in multipliers:
            ours.append(error(self.gradients(self.ours, batch, multiplier)[1], truth, multiplier))
            self._restore(state)
        return np.array(ours), np.array(plain)

    def ratios(self, multipliers=(1.0,)):
        """For each multiplier, errors of ours over the floor: of the median, of the largest."""
        ours, plain = self.errors(multipliers)
        return ours / np.median(plain, axis=0)
