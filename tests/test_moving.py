"""A batch that is skipped leaves moving statistics alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs

layers = keras.layers
RNG = np.random.default_rng(0)
X = RNG.standard_normal((6, 4, 3, 2)).astype("float32") + 1.0
Y = RNG.standard_normal((6, 4, 2)).astype("float32")
BAD = (0, 3, 5)
SPOILT = np.array(X)
SPOILT[0, 0, 0, 0], SPOILT[3, 1, 2, 1], SPOILT[5, 2] = np.nan, np.inf, -np.inf


def model_of(policy, **kwargs):
    with gs.policy_scope(policy):
        inputs = keras.Input((3, 2))
        # One value that is not finite reaches all channels.
        x = layers.Dense(4, kernel_initializer="ones", trainable=False)(inputs)
        x = layers.BatchNormalization(momentum=0.75, name="norm", **kwargs)(x)
        x = layers.GlobalAveragePooling1D()(x)
        return gs.convert(keras.Model(inputs, layers.Dense(2, kernel_initializer="ones")(x)))


def statistics(model):
    norm = model.get_layer("norm")
    return [v.numpy() for v in (norm.moving_mean, norm.moving_variance)]


def means(batches, x=X):
    """The mean of each channel, by the definition, of the sum that the first layer makes."""
    mean = np.zeros(4)
    for i in batches:
        mean = 0.75 * mean + 0.25 * x[i].astype("float64").sum(-1).mean()
    return mean


WAYS = {
    "eager": {"run_eagerly": True},
    "graph": {"jit_compile": False},
    "xla": {"jit_compile": True},
    "several": {"steps_per_execution": 3, "jit_compile": False},
}


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("way", WAYS)
def test_a_skipped_batch_leaves_them(policy, way):
    found = []
    good = [i for i in range(6) if i not in BAD]
    for x, batches in ((SPOILT, range(6)), (X, good)):
        model = model_of(policy)
        model.compile("sgd", "mse", **WAYS[way])
        # Losses of the bad batches are NaN.
        dataset = tf.data.Dataset.from_tensor_slices((x[list(batches)], Y[list(batches)]))
        model.fit(dataset, shuffle=False, verbose=0)
        found.append(statistics(model))
    assert int(model.optimizer.applied_steps) == 3
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(found[0][0], means(good), rtol=1e-6 if policy == "float32" else 1e-3)


def test_each_replica_leaves_its_own(mirrored):
    """On the first replica all is finite."""
    with mirrored.scope():
        model = model_of("mixed_float16")
        model.compile("sgd", "mse", jit_compile=False)
    both = np.concatenate([X[1], SPOILT[3]])[None]
    dataset = tf.data.Dataset.from_tensor_slices((both, np.concatenate([Y[1], Y[3]])[None]))
    model.fit(dataset, shuffle=False, verbose=0)
    assert int(model.optimizer.skipped_steps.numpy()) == 1
    mean = model.get_layer("norm").moving_mean.value
    first, second = (v.numpy() for v in mirrored.experimental_local_results(mean))
    np.testing.assert_allclose(first, means([1]), rtol=1e-3)
    np.testing.assert_array_equal(second, np.zeros(4))


@pytest.mark.parametrize("axis", [-1, 1])
def test_channels_that_are_finite_are_updated(axis):
    with gs.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((2, 2)), layers.BatchNormalization(axis=axis)])
    model = gs.convert(model)
    x = np.ones((4, 2, 2), "float32")
    x[3, 1, 0] = np.inf
    model(x, training=True)
    mean, variance = (v.numpy() for v in model.layers[0].non_trainable_variables)
    finite = [0, 1] if axis == -1 else [1, 0]
    # 0 and 1 before; towards 1 and 0 by 0.01 where the batch is finite.
    np.testing.assert_allclose(mean, 0.01 * np.array(finite), rtol=1e-5)
    np.testing.assert_allclose(variance, 1 - 0.01 * np.array(finite), rtol=1e-5)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_penalty_on_its_output_is_not_lost(policy):
    model = model_of(policy, activity_regularizer=keras.regularizers.L2(0.5))
    plain = gs.strip(model)
    x = tf.constant(X[0])
    state = statistics(model)
    found = []
    for one in (model, plain):
        norm = model.get_layer("norm")
        norm.moving_mean.assign(state[0])
        norm.moving_variance.assign(state[1])
        one(x, training=True)
        found.append([float(loss) for loss in one.losses])
    assert len(found[0]) == 1
    np.testing.assert_allclose(*found, rtol=1e-3)


def test_frozen_statistics_stay():
    model = model_of("mixed_float16")
    model.get_layer("norm").trainable = False
    before = statistics(model)
    model(X[0], training=True)
    model.get_layer("norm").trainable = True
    model(X[0], training=False)
    for a, b in zip(statistics(model), before, strict=True):
        np.testing.assert_array_equal(a, b)
