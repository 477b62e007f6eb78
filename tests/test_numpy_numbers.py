"""NumPy's numbers in a model: what Keras makes float64 of is cast to float16 with a scale."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import Threefold

layers, ops = keras.layers, keras.ops
X = np.random.default_rng(0).standard_normal((4, 6, 8)).astype("float32")
Y = np.random.default_rng(1).standard_normal((4, 6, 3)).astype("float32")
WITH_NUMBERS = {
    "over_float64": lambda x: x / np.sqrt(8),
    "times_float32": lambda x: x * np.float32(0.3),
    "minus_float32": lambda x: x - np.float32(0.3),
    "plus_array": lambda x: x + np.ones(3),
    "divide": lambda x: ops.divide(x, np.sqrt(8)),
    "add": lambda x: ops.add(x, np.ones(3)),
    "power": lambda x: x ** np.float32(2),
    "chain": lambda x: ops.log(ops.softmax(x / np.sqrt(8))),
}


class Applies(layers.Layer):
    """A function as a layer, with a weight if you like."""

    def __init__(self, function, weighs, **kwargs):
        super().__init__(**kwargs)
        self.function, self.weighs = function, weighs

    def build(self, shape):
        if self.weighs:
            self.gain = self.add_weight(shape=shape[-1:], initializer="ones")

    def call(self, x):
        return self.function(x * self.gain if self.weighs else x)


class Written(keras.Model):
    """The same at the end of a model whose `call` is written by hand."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second, self.function = layers.Dense(8), layers.Dense(3), function

    def call(self, x):
        return self.function(self.second(self.first(x)))


class AddsLoss(layers.Layer):
    """Adds a loss that is float64."""

    def call(self, x):
        self.add_loss(ops.mean(ops.square(x)) / np.float64(3))
        return x


def functional(function, end=None):
    inputs = keras.Input((6, 8))
    x = function(layers.Dense(3)(layers.Dense(8)(inputs)))
    return keras.Model(inputs, x if end is None else end(x))


BUILDS = {
    "functional": functional,
    "written": Written,
    "layer": lambda f: functional(Applies(f, False), layers.Dense(3)),
    "layer_with_a_weight": lambda f: functional(Applies(f, True), layers.Dense(3)),
}


def squared_error(model, x):
    """To random targets, with what layers added."""
    y = tf.cast(model(x, training=True), tf.float32)
    return tf.reduce_mean((y - Y) ** 2) + sum(model.losses)


def check(build, multipliers):
    """All gradients are as near to float32's as float16 is, whatever the loss is multiplied by."""

    def built():
        model = build()
        model(X)
        return model

    threefold = Threefold(built, X, loss=squared_error)
    # A model whose `call` is written by hand has scales from then on.
    threefold.ours(X, training=True)
    threefold.check(multipliers=multipliers, bound=5e-3)


# A layer without weights that NumPy's numbers stop from being opened has no product inside; of one
# with a weight a warning tells.
@pytest.mark.filterwarnings("ignore:Layer '.*' is differentiated as one operation")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if fast else pytest.mark.slow)
        for name in WITH_NUMBERS
        for kind in BUILDS
        for fast in [kind == "functional" or name in ("over_float64", "minus_float32")]
    ],
)
def test_gradients_of_a_small_loss(name, kind):
    check(lambda: BUILDS[kind](WITH_NUMBERS[name]), (2.0**-20, 1.0))


def test_a_loss_added_in_float64():
    def build():
        inputs = keras.Input((6, 8))
        x = AddsLoss()(layers.Dense(8)(inputs))
        return keras.Model(inputs, 0.0 * layers.Dense(3)(x))

    check(build, (2.0**-20, 1.0, 2.0**20))
