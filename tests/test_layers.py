"""`layers.GradientScaled`: a closed region inside a model of one's own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs

layers = keras.layers


def regions_model(wrap, policy="float32"):
    """The same network, with its middle wrapped or not."""
    keras.utils.set_random_seed(5)
    with gs.policy_scope(policy):
        inner = keras.Sequential(
            [keras.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(5)], name="inner"
        )
        single = layers.Dense(4, activation="tanh", name="single")
    inputs = keras.Input((6,))
    x = gs.layers.GradientScaled(inner)(inputs) if wrap else inner(inputs)
    x = gs.layers.GradientScaled(single)(x) if wrap else single(x)
    return keras.Model(inputs, layers.Dense(1)(x))


def batch():
    return np.random.default_rng(1).normal(size=(16, 6)).astype("float32")


def gradients(model, x, multiplier=1.0):
    x = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_mean(tf.square(model(x))) * multiplier
    return tape.gradient(loss, [x, *(v.value for v in model.trainable_variables)])


def test_float32_gradients_are_plain_ones():
    plain, wrapped = regions_model(False), regions_model(True)
    wrapped.set_weights(plain.get_weights())
    for ours, true in zip(gradients(wrapped, batch()), gradients(plain, batch()), strict=True):
        np.testing.assert_allclose(ours, true, rtol=1e-5, atol=1e-6 * np.abs(true).max())


def test_float16_gradients_survive_a_tiny_loss():
    plain, wrapped = regions_model(False), regions_model(True, "mixed_float16")
    wrapped.set_weights(plain.get_weights())
    ours, true = gradients(wrapped, batch(), 1e-12), gradients(plain, batch(), 1e-12)
    for g, t in zip(ours, true, strict=True):
        assert np.linalg.norm(g - t) < 0.02 * np.linalg.norm(t)


def test_outputs_are_float32_and_those_of_the_layer():
    with gs.policy_scope("mixed_float16"):
        layer = layers.Dense(4, activation="relu")
        wrapped = gs.layers.GradientScaled(layer)
    x = batch()
    y = wrapped(x)
    assert y.dtype == tf.float32
    assert wrapped.compute_output_spec(keras.KerasTensor((None, 6))).dtype == "float32"
    np.testing.assert_array_equal(y, tf.cast(layer(x), tf.float32))


def test_weights_are_the_layers_and_scales_are_none_of_them():
    wrapped = gs.layers.GradientScaled(layers.Dense(4))
    wrapped.build((None, 6))
    assert [tuple(w.shape) for w in wrapped.weights] == [(6, 4), (4,)]
    assert [site.kind for site in wrapped.scales] == ["variable", "gemm"]


def test_masks_pass_through():
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(7, 3, mask_zero=True)(inputs)
    x = gs.layers.GradientScaled(layers.Dense(2))(x)
    model = keras.Model(inputs, x)
    output = model(np.array([[1, 2, 0, 0, 3]]))
    np.testing.assert_array_equal(output._keras_mask, [[True, True, False, False, True]])


def test_survives_saving(tmp_path):
    model = regions_model(True, "mixed_float16")
    model.save(tmp_path / "regions.keras")
    loaded = keras.models.load_model(tmp_path / "regions.keras")
    assert loaded.layers[1].config == gs.GradScaleConfig()
    np.testing.assert_array_equal(
        loaded.predict(batch(), verbose=0), model.predict(batch(), verbose=0)
    )


def test_refuses_what_is_no_layer():
    with pytest.raises(TypeError, match=r"must be a Keras layer.*Received: layer=<function"):
        gs.layers.GradientScaled(lambda x: x)


def test_refuses_float16_weights():
    layer = gs.layers.GradientScaled(layers.Dense(2, dtype="float16", name="half"))
    with pytest.raises(ValueError, match=r"(?s)'half'.*must be float32.*mixed_float16"):
        layer.build((None, 3))
