"""Losses that layers add inside a model: those of Keras in number and size, gradients right."""

import comparison
import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import Threefold, build_all, error, normal, relative
from keras import ops

import tf_gradscale as gs

layers = keras.layers
VECTORS = normal((8, 6), 1)
slow = pytest.mark.slow
L2 = keras.regularizers.L2(0.1)
not_opened = pytest.mark.filterwarnings("ignore:Layer '.*' is differentiated as one operation")


class Adds(layers.Layer):
    """Adds a loss of its output: always, or in training only."""

    def __init__(self, always=True, **kwargs):
        super().__init__(**kwargs)
        self.dense, self.always = layers.Dense(6), always

    def call(self, x, training=None):
        y = self.dense(x)
        if self.always or training:
            self.add_loss(0.1 * ops.mean(y * y))
        return y


class AddsOfWeights(layers.Layer):
    """Adds a loss of its weights alone."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(6)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        self.add_loss(0.1 * ops.sum(ops.square(self.dense.kernel)))
        return self.dense(x)


class AddsTwo(layers.Layer):
    """Calls TensorFlow itself."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 6), name="kernel")

    def call(self, x):
        self.add_loss(0.1 * tf.reduce_sum(self.kernel * self.kernel))
        y = tf.matmul(x, tf.cast(self.kernel, x.dtype))
        self.add_loss(tf.reduce_mean(tf.abs(y)))
        return y


class Composite(layers.Layer):
    """Is opened; a layer inside has a regulariser, and so may it itself."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(6, activity_regularizer=keras.regularizers.L2(0.02))
        self.outer = layers.Dense(6)

    def call(self, x):
        return self.outer(ops.tanh(self.inner(x)))


def nested(x):
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(6, activity_regularizer=L2)(inputs))(x)


def twice(x):
    dense = layers.Dense(6, activity_regularizer=L2)
    return dense(dense(x))


# What is made of a Keras tensor, and how many losses that adds.
ADDED = {
    "add_loss": (lambda x: Adds()(x), 1),
    "in_training": (lambda x: Adds(always=False)(x), 1),
    "of_weights": (lambda x: AddsOfWeights()(x), 1),
    "two": (lambda x: AddsTwo()(x), 2),
    "Dense": (lambda x: layers.Dense(6, activity_regularizer=L2)(x), 1),
    "ReLU": (lambda x: layers.ReLU(activity_regularizer=L2)(x), 1),
    "Lambda": (lambda x: layers.Lambda(lambda x: x * x, activity_regularizer=L2)(x), 1),
    "BatchNormalization": (lambda x: layers.BatchNormalization(activity_regularizer=L2)(x), 1),
    "ActivityRegularization": (lambda x: layers.ActivityRegularization(0.01, 0.1)(x), 1),
    "opened": (lambda x: Composite()(x), 1),
    "opened_and_around": (lambda x: Composite(activity_regularizer=L2)(x), 2),
    "nested": (nested, 1),
    "twice": (twice, 2),
    "weights": (lambda x: layers.Dense(6, kernel_regularizer=L2, bias_regularizer=L2)(x), 2),
}


def of_vectors(name):
    def build():
        inputs = keras.Input((6,))
        x = ADDED[name][0](layers.Dense(6, activation="tanh")(inputs))
        return keras.Model(inputs, layers.Dense(3)(x))

    return build


def with_losses(model, x):
    return comparison.linear(model, x) + sum(ops.cast(loss, "float32") for loss in model.losses)


def only_losses(model, x):
    """The losses alone: what they are made of gets no other gradient."""
    model(x, training=True)
    return sum(ops.cast(loss, "float32") for loss in model.losses)


@not_opened
@pytest.mark.parametrize("name", ADDED)
def test_gradients(name):
    Threefold(of_vectors(name), VECTORS, loss=with_losses).check()


@not_opened
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("add_loss", "graph"),
        ("Dense", "graph"),
        ("opened_and_around", "xla"),
        pytest.param("add_loss", "xla", marks=slow),
        pytest.param("two", "xla", marks=slow),
    ],
)
def test_gradients_of_the_losses_alone(run, name):
    threefold = Threefold(of_vectors(name), VECTORS, loss=only_losses, loss_scale=2.0**8)
    threefold.check(run)


@not_opened
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ADDED)
def test_losses_are_as_many_and_as_large_as_under_keras(name, training):
    _, plain, ours = build_all(of_vectors(name))
    count = 0 if name == "in_training" and not training else ADDED[name][1]
    for _ in range(2):
        found = []
        for model in (plain, ours):
            model(VECTORS, training=training)
            found.append([float(loss) for loss in model.losses])
        assert [len(losses) for losses in found] == [count] * 2
        np.testing.assert_allclose(found[1], found[0], rtol=2e-3)


@not_opened
@pytest.mark.parametrize(
    ("name", "jit_compile"),
    [
        ("add_loss", False),
        ("opened_and_around", True),
        *[
            pytest.param(name, jit_compile, marks=slow)
            for name in ("two", "of_weights", "weights", "twice")
            for jit_compile in (False, True)
        ],
    ],
)
def test_training_with_them(name, jit_compile):
    target = normal((8, 3), 2)
    histories = []
    true, _, ours = build_all(of_vectors(name))
    for model in (true, ours):
        jit = jit_compile and model is ours
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=jit)
        history = model.fit(VECTORS, target, batch_size=8, epochs=6, verbose=0).history
        histories.append(history["loss"])
    np.testing.assert_allclose(histories[1], histories[0], rtol=5e-3)
    assert int(ours.optimizer.applied_steps) == 6
    for a, b in zip(ours.get_weights(), true.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-3)
    evaluated = [model.evaluate(VECTORS, target, verbose=0) for model in (true, ours)]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=5e-3)


# --- Outputs of very different weights -----------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("weights", [(1.0, 1e-4, 1e-8), (1e-8, 1.0, 1e4)])
def test_outputs_of_different_weights(run, weights):
    """Each head's variables have gradients near float32's, however small its loss is."""

    def build():
        inputs = keras.Input((6,))
        x = layers.Dense(8, activation="tanh")(inputs)
        heads = [layers.Dense(3)(layers.Dense(6, activation="relu")(x)) for _ in weights]
        return keras.Model(inputs, heads)

    def loss(model, x):
        made = model(x, training=True)
        targets = [normal((8, 3), 10 + i) for i in range(3)]
        parts = zip(weights, made, targets, strict=True)
        return sum(w * tf.reduce_mean((tf.cast(y, tf.float32) - t) ** 2) for w, y, t in parts)

    threefold = Threefold(build, VECTORS, loss=loss)
    threefold.check(run, bound=5e-3)
    if max(weights) / min(weights) < 1e10:
        return
    # With one scale for all, the largest gradients overflow or the smallest are lost.
    wanted = threefold.gradients(threefold.true, comparison.eagerly)()
    plain = threefold.gradients(threefold.plain, comparison.eagerly)
    for exponent in range(0, 20, 4):
        found = plain(2.0**exponent / max(weights))
        assert not all(relative(f, w) < 0.02 for f, w in zip(found, wanted, strict=True))


def test_fit_with_different_weights():
    """One step of SGD shows all gradients."""
    moves = []
    for policy in ("float32", "mixed_float16"):
        keras.utils.set_random_seed(7)
        with gs.policy_scope(policy):
            inputs = keras.Input((6,))
            # Zeros, so that a small move can be seen.
            head = {"units": 2, "kernel_initializer": "zeros"}
            outputs = [layers.Dense(**head, name=name)(inputs) for name in "abc"]
            model = gs.convert(keras.Model(inputs, dict(zip("abc", outputs, strict=True))))
        weights = {"a": 1.0, "b": 1e-4, "c": 1e-8}
        model.compile(keras.optimizers.SGD(1.0), dict.fromkeys("abc", "mse"), loss_weights=weights)
        model.fit(VECTORS, {name: normal((8, 2), i) for i, name in enumerate("abc")}, verbose=0)
        moves.append(model.get_weights())
    assert max(error(moves[1], moves[0])) < 5e-3


def test_as_many_losses_in_every_call():
    class Sometimes(layers.Layer):
        """Adds a loss when it is run in earnest, and none where Keras tries it out."""

        def call(self, x):
            if tf.executing_eagerly():
                self.add_loss(tf.reduce_sum(x))
            return x

    inputs = keras.Input((3,))
    model = gs.convert(keras.Model(inputs, Sometimes(name="moody")(inputs)))
    with pytest.raises(ValueError, match="'moody' must add the same number of losses") as caught:
        model(tf.ones((2, 3)))
    assert "Received: 1 losses, and 0 in a trial" in str(caught.value)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_lambda_that_casts(policy):
    """Keras declares its output in the layer's dtype, whatever it returns."""
    with gs.policy_scope(policy):
        inputs = keras.Input((3,))
        dense = layers.Dense(2, use_bias=False)
        y = layers.Lambda(lambda x: tf.cast(x, tf.float32))(dense(inputs))
        model = gs.convert(keras.Model(inputs, y))
    x = tf.constant([[1.0, 2.0, -4.0]])
    with tf.GradientTape() as tape:
        value = 2.0**-30 * tf.reduce_sum(model(x))
    found = tape.gradient(value, dense.kernel.value)
    np.testing.assert_array_equal(found, 2.0**-30 * tf.transpose([x[0], x[0]]))
