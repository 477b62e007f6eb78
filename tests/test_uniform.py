"""Operations that multiply gradients by one number: their scale is what a trial would give."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs
from tf_gradscale import rules

layers, ops = keras.layers, keras.ops

# The operation and the shape of its input.
UNIFORM = {
    "global_average_1d": (layers.GlobalAveragePooling1D, (9, 4)),
    "global_average_2d": (layers.GlobalAveragePooling2D, (6, 5, 4)),
    "global_average_3d": (layers.GlobalAveragePooling3D, (3, 2, 2, 4)),
    "rescaling": (lambda: layers.Rescaling(-0.01, offset=3), (5,)),
    "mean": (lambda: lambda x: ops.mean(x, axis=(1, 2), keepdims=True), (4, 4, 3)),
    "mean_of_all": (lambda: lambda x: ops.reshape(ops.mean(x), (1,)) + 0 * x, (4,)),
    "sum": (lambda: lambda x: ops.sum(x, axis=1), (7, 4)),
    "times": (lambda: lambda x: x * 40.0, (5,)),
    "times_in_front": (lambda: lambda x: 40 * x, (5,)),
    "over": (lambda: lambda x: x / 300.0, (5,)),
    "divide": (lambda: lambda x: ops.divide(x, -300.0), (5,)),
}
NOT_UNIFORM = {
    "rescaling_by_channel": (lambda: layers.Rescaling([1.0, 0.01]), (2,)),
    "rescaling_to_zero": (lambda: layers.Rescaling(0.0), (2,)),
    "times_itself": (lambda: lambda x: x * x, (4,)),
    "times_an_array": (lambda: lambda x: x * np.array([1.0, 0.01], "float32"), (2,)),
    "over_itself": (lambda: lambda x: 3.0 / x, (4,)),
    "average_of_windows": (lambda: layers.AveragePooling1D(2), (8, 3)),
    "maximum": (lambda: lambda x: ops.max(x, axis=1), (8, 3)),
}
BATCH = 8


def plain_of(make, shape, policy):
    """The operation between an input and a loss."""
    with gs.policy_scope(policy):
        inputs = keras.Input(shape)
        outputs = make()(layers.Activation("linear")(inputs))
        return keras.Model(inputs, layers.Activation("linear")(outputs))


def model_of(make, shape):
    return gs.convert(plain_of(make, shape, "mixed_float16"))


def gradient(model, x, size=1.0):
    """∇X for ∇Y of magnitudes around `size`, and that ∇Y."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = model(x, training=True)
        dy = tf.random.stateless_normal(y.shape, [1, 2]) * size
        loss = tf.reduce_sum(tf.cast(y, tf.float32) * dy)
    return tape.gradient(loss, x).numpy(), dy.numpy()


def rules_of(model):
    return [step.rule for step in model._region().graph().steps]


def x_of(shape):
    return tf.random.stateless_normal((BATCH, *shape), [3, 4])


@pytest.mark.parametrize("name", UNIFORM)
def test_scale_is_that_of_a_trial(name, monkeypatch):
    make, shape = UNIFORM[name]
    x = x_of(shape)
    model = model_of(make, shape)
    gradient(model, x)
    assert any(type(rule) is rules.Uniform for rule in rules_of(model))
    monkeypatch.setattr(rules.Uniform, "takes", lambda step: False)
    tried = model_of(make, shape)
    gradient(tried, x)
    assert not any(isinstance(rule, rules.Uniform) for rule in rules_of(tried))
    np.testing.assert_array_equal(model.scales.cumulative(), tried.scales.cumulative())


@pytest.mark.parametrize("size", [1e-9, 1e-4, 1.0, 1e4])
@pytest.mark.parametrize("name", UNIFORM)
def test_gradient(name, size):
    make, shape = UNIFORM[name]
    x = x_of(shape)
    found, _ = gradient(model_of(make, shape), x, size)
    expected, _ = gradient(plain_of(make, shape, "float32"), x, size)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    # Rounded to float16 at most five times.
    assert error < 5 * 2.0**-11


@pytest.mark.parametrize("name", NOT_UNIFORM)
def test_what_is_no_such_operation(name):
    make, shape = NOT_UNIFORM[name]
    assert not any(isinstance(rule, rules.Uniform) for rule in rules_of(model_of(make, shape)))


class Shrinks(layers.Layer):
    """Multiplies by 2^-26 in two steps: what is tried out at the size of 1 is zero in float16."""

    def call(self, x):
        return tf.multiply(tf.multiply(x, 2.0**-13), 2.0**-13)


@pytest.mark.parametrize("size", [2.0**-30, 1.0, 2.0**10])
def test_what_is_lost_in_a_trial_is_not_lost(size):
    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((5,))
        hidden = layers.Dense(4, use_bias=False)(Shrinks()(inputs))
        model = gs.convert(keras.Model(inputs, layers.Activation("linear")(hidden)))
    x = x_of((5,))
    found, dy = gradient(model, x, size)
    kernel = model.get_weights()[0].astype("float16").astype("float32")
    expected = 2.0**-26 * dy @ kernel.T
    assert np.linalg.norm(found - expected) < 5e-3 * np.linalg.norm(expected)


def test_masked_means_are_tried_out():
    """Sequences of 1 and 64 steps: where the first is, gradients shrink by nothing."""
    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((64, 2))
        hidden = layers.GlobalAveragePooling1D()(layers.Masking()(inputs))
        model = gs.convert(keras.Model(inputs, layers.Activation("linear")(hidden)))
    x = np.ones((2, 64, 2), "float32")
    x[0, 1:] = 0
    found, dy = gradient(model, tf.constant(x), 2.0**-20)
    assert any(isinstance(rule, rules.Uniform) for rule in rules_of(model))
    expected = np.zeros_like(x)
    expected[0, 0], expected[1] = dy[0], dy[1] / 64
    np.testing.assert_allclose(found, expected, rtol=2.0**-10)
