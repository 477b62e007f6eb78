"""Kinds of input on which mixed-precision training is known to fail, and what must happen."""

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs
from tf_gradscale import formats

layers = keras.layers
FLOAT16 = formats.get("float16")
# Relative error of a gradient that only rounding separates from float32's.
CLOSE = 3e-3


def pair(build, config=None):
    """A float32 model, and the gradient-scaled one with the same weights."""
    with gs.policy_scope("float32"):
        true = build()
    with gs.policy_scope("mixed_float16"):
        ours = gs.convert(build(), config)
    ours.set_weights(true.get_weights())
    return true, ours


def differentiate(run, model, loss):
    """A function of a batch: loss, and gradients of the trainable variables, in NumPy."""

    def step(*batch):
        with tf.GradientTape() as tape:
            value = loss(model, *batch)
        gradients = tape.gradient(value, model.trainable_variables)
        return value, [tf.convert_to_tensor(g) for g in gradients]

    step = run(step)

    def call(*batch):
        value, gradients = step(*(tf.constant(b) for b in batch))
        return float(value), [g.numpy() for g in gradients]

    return call


def relative_error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def assert_close(found, expected, bound=CLOSE):
    """Each gradient is close to the expected one, and exactly zero where that is."""
    for g, t in zip(found, expected, strict=True):
        assert np.all(np.isfinite(g))
        if np.any(t):
            assert relative_error(g, t) < bound
        else:
            assert not np.any(g)


def counts(model):
    return int(model.optimizer.applied_steps), int(model.optimizer.skipped_steps)


# --- 1: a mean over a large map makes every gradient tiny ----------------------------------------


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(("side", "multiplier"), [(512, 1e-4), (64, 1e-9), (64, 1e3)])
def test_pixelwise_softmax_of_a_mean_loss(side, multiplier, hidden):
    def build():
        inputs = x = keras.Input((side, side, 3))
        if hidden:
            x = layers.Conv2D(4, 1)(x)
        x = layers.Conv2D(5, 1)(x)
        return keras.Model(inputs, layers.Softmax(dtype="float32")(x))

    true, ours = pair(build)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, side, side, 3)).astype("float32")
    y = rng.integers(5, size=(1, side, side))

    def loss(model, x, y):
        losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True))
        return multiplier * tf.reduce_mean(losses)

    _, expected = differentiate(tf.function, true, loss)(x, y)
    _, found = differentiate(tf.function, ours, loss)(x, y)
    assert_close(found, expected)
    # Softmax and cross-entropy have the gradient p − y.
    gradient = (true(x).numpy() - np.eye(5)[y]) * multiplier / side**2
    if (side, multiplier) == (512, 1e-4):
        assert np.mean(np.abs(gradient)) < 4e-10
    scaled = (gradient * ours.scales["output"].scale).astype("float16")
    assert np.all(np.isfinite(scaled))
    lost = np.mean(scaled[gradient != 0] == 0)
    assert lost <= 1e-3


# --- 2: a true weight gradient that float16 cannot hold ------------------------------------------


@pytest.mark.parametrize(
    ("weight", "units"), [(1e5, [1]), (1e5, [4, 1]), (1e8, [1]), (1e8, [4, 1])]
)
def test_weight_gradient_beyond_the_largest_float16(weight, units):
    def build():
        return keras.Sequential([keras.Input((8,)), *map(layers.Dense, units)])

    true, ours = pair(build)
    before = true.get_weights()
    rng = np.random.default_rng(0)
    x = rng.uniform(80, 120, size=(32, 8)).astype("float32")
    y = rng.normal(size=(32, 1)).astype("float32")
    moved = []
    for model in (true, ours):
        # A step so small that weights stay as they are, up to their change.
        model.compile(keras.optimizers.SGD(1e-6 / weight), "mse", loss_weights=weight)
        model.fit(x, y, batch_size=32, verbose=0)
        moved.append([w - b for w, b in zip(model.get_weights(), before, strict=True)])
    assert np.abs(moved[0][0]).max() * weight / 1e-6 > 10 * FLOAT16.largest
    for found, expected in zip(*moved[::-1], strict=True):
        assert relative_error(found, expected) < 0.01
    assert counts(ours) == (1, 0)
    assert ours.scales["output"].scale < 1
    for _ in range(5):
        ours.fit(x, y, batch_size=32, verbose=0)
    assert counts(ours) == (6, 0)


# --- 3: everything next to nothing ---------------------------------------------------------------


@pytest.mark.parametrize("units", [[1], [4, 1]])
def test_targets_and_weights_of_1e_30(units):
    _, model = pair(lambda: keras.Sequential([keras.Input((8,)), *map(layers.Dense, units)]))
    model.set_weights([np.full(w.shape, 1e-30) for w in model.get_weights()])
    rng = np.random.default_rng(0)
    # Fifty times the same batch.
    x = np.tile(rng.normal(size=(16, 8)).astype("float32"), (50, 1))
    y = np.tile(rng.normal(scale=1e-30, size=(16, 1)).astype("float32"), (50, 1))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    seen = []
    for _ in range(3):
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        seen.append([site.cumulative_scale for site in model.scales])
        assert all(np.all(np.isfinite(w)) and np.abs(w).max() < 1e-28 for w in model.get_weights())
    assert counts(model) == (150, 0)
    seen = np.array(seen)
    assert np.all(seen > 0) and np.all(seen <= 2.0**100)
    # Without bound they would grow with every update.
    np.testing.assert_array_less(np.abs(np.log2(seen[2] / seen[1])), 4)


# --- 4: gradients that are all zero --------------------------------------------------------------


def two_dense():
    inputs = keras.Input((8,))
    x = layers.Dense(16, activation="tanh", name="first")(inputs)
    return keras.Model(inputs, layers.Dense(4, kernel_initializer="zeros", name="second")(x))


def zero_branch():
    inputs = keras.Input((6, 6, 3))
    x = layers.Conv2D(4, 3, padding="same", name="stem")(inputs)
    y = layers.Conv2D(4, 3, padding="same", use_bias=False, name="first")(x)
    y = layers.BatchNormalization(gamma_initializer="zeros", name="second")(y)
    x = layers.ReLU()(layers.Add()([x, y]))
    return keras.Model(inputs, layers.Dense(4)(layers.Flatten()(x)))


@pytest.mark.parametrize(
    ("build", "opened", "sites"),
    [
        (two_dense, "second/kernel", ["second/input", "first/kernel", "first/input"]),
        (zero_branch, "second/gamma", ["second/cast", "first/input"]),
    ],
)
def test_an_all_zero_gradient_has_scale_one(run, build, opened, sites):
    # Scales are chosen in passes 0, 1, 2 and 4 only, except where something asks for it.
    true, ours = pair(build, gs.GradScaleConfig(update_every=1000))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, *ours.input_shape[1:])).astype("float32")
    y = rng.normal(size=(16, 4)).astype("float32")

    def loss(model, x, y):
        return 1e-6 * tf.reduce_mean((model(x, training=True) - y) ** 2)

    step, true_step = differentiate(run, ours, loss), differentiate(tf.function, true, loss)
    scales = {site.name: site for site in ours.scales}
    of_first = [v.path.endswith("first/kernel") for v in ours.trainable_variables]
    for _ in range(3):
        _, found = step(x, y)
        assert_close(found, true_step(x, y)[1], 0.02)
        assert not np.any(found[of_first.index(True)])
        for name in sites:
            assert scales[name].scale == 1.0
    # Pass 3 is no updating pass by its number: the zeros of pass 2 ask for one.
    for model in (true, ours):
        (variable,) = [v for v in model.variables if v.path.endswith(opened)]
        variable.assign(1e-4 * np.random.default_rng(1).normal(size=variable.shape))
    _, found = step(x, y)
    expected = true_step(x, y)[1]
    assert np.any(expected[of_first.index(True)])
    assert_close(found, expected, 0.02)
    assert any(scales[name].scale != 1.0 for name in sites)


# --- 5: batches with nothing in them, or little --------------------------------------------------


def classifier():
    inputs = keras.Input((4, 4, 3))
    x = layers.BatchNormalization()(layers.Conv2D(6, 3, padding="same")(inputs))
    x = layers.Conv2D(5, 1)(layers.ReLU()(x))
    return keras.Model(inputs, layers.Softmax(dtype="float32")(x))


def sequence():
    inputs = keras.Input((5, 3))
    x = layers.Dense(8, activation="tanh")(layers.Masking()(inputs))
    x = layers.GRU(4, return_sequences=True)(x)
    return keras.Model(inputs, layers.Dense(2)(x))


def images(batch, labels):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, 4, 4, 3)).astype("float32")
    return x, rng.choice(labels, size=(batch, 4, 4))


def weighted(loss):
    return lambda model, x, y, weights: loss(y, model(x, training=True), sample_weight=weights)


CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy()
IGNORING = keras.losses.SparseCategoricalCrossentropy(ignore_class=-1)


@pytest.mark.parametrize(
    ("labels", "weights", "loss", "jit_compile"),
    [
        ([0, 1, 2, 3, 4], 0.0, CROSSENTROPY, False),
        ([0, 1, 2, 3, 4], 0.0, CROSSENTROPY, True),
        ([-1], 1.0, IGNORING, False),
    ],
    ids=["weights of zero", "weights of zero, XLA", "ignored class"],
)
def test_every_entry_masked_out(labels, weights, loss, jit_compile):
    run = functools.partial(tf.function, jit_compile=jit_compile)
    true, ours = pair(classifier)
    x, y = images(4, labels)
    batch = x, y, np.full(y.shape, weights, "float32")
    expected = differentiate(tf.function, true, weighted(loss))(*batch)
    assert not any(np.any(g) for g in expected[1])
    step = differentiate(run, ours, weighted(loss))
    for _ in range(2):
        value, found = step(*batch)
        assert value == expected[0] == 0.0
        assert_close(found, expected[1])
    assert all(site.scale == 1.0 for site in ours.scales if site.kind != "measured")
    # And the next batch, which has entries, is right at once.
    x, y = images(4, [0, 1, 2, 3, 4])
    batch = x, y, np.ones(y.shape, "float32")
    _, expected = differentiate(tf.function, true, weighted(CROSSENTROPY))(*batch)
    if loss is not CROSSENTROPY:
        step = differentiate(run, ours, weighted(CROSSENTROPY))
    _, found = step(*batch)
    assert_close(found[2:], expected[2:], 0.02)


def test_every_time_step_masked_out():
    true, ours = pair(sequence)
    x = np.zeros((3, 5, 3), "float32")
    y = np.ones((3, 5, 2), "float32")
    loss = keras.losses.MeanSquaredError()
    steps = [
        differentiate(tf.function, model, lambda model, x, y: loss(y, model(x, training=True)))
        for model in (true, ours)
    ]
    (value, expected), (found_value, found) = (step(x, y) for step in steps)
    assert not any(np.any(g) for g in expected)
    assert found_value == value == 0.0
    assert_close(found, expected)
    # The first sequence has three steps, the others have none.
    x[0, :3] = np.random.default_rng(0).normal(size=(3, 3))
    (_, expected), (_, found) = (step(x, y) for step in steps)
    assert_close(found, expected, 0.02)


@pytest.mark.parametrize("labels", [[0, 1, 3, 4], [2]], ids=["without 2", "only 2"])
@pytest.mark.parametrize("batch", [1, 4])
def test_an_empty_class_and_a_batch_of_one(labels, batch):
    true, ours = pair(classifier)
    x, y = images(batch, labels)
    batch = x, y, np.ones(y.shape, "float32")
    loss = weighted(CROSSENTROPY)
    _, expected = differentiate(tf.function, true, loss)(*batch)
    _, found = differentiate(tf.function, ours, loss)(*batch)
    # The first convolution's bias has no gradient but rounding: a normalisation follows.
    assert_close(found[:1] + found[2:], expected[:1] + expected[2:], 0.02)
    assert np.all(np.isfinite(found[1])) and np.abs(found[1]).max() < 1e-3


def test_a_class_whose_loss_is_empty():
    """A loss summed class by class, one of which has no entries: fp32 gives it zeros."""

    def loss(model, x, y):
        losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True))
        total = 0.0
        for label in range(5):
            of_class = tf.cast(y == label, tf.float32)
            total += tf.math.divide_no_nan(
                tf.reduce_sum(losses * of_class), tf.reduce_sum(of_class)
            )
        return total

    true, ours = pair(classifier)
    x, y = images(4, [0, 1, 3])
    _, expected = differentiate(tf.function, true, loss)(x, y)
    _, found = differentiate(tf.function, ours, loss)(x, y)
    assert_close(found[:1] + found[2:], expected[:1] + expected[2:], 0.02)


def test_the_last_batch_is_smaller():
    true, ours = pair(classifier)
    x, y = images(11, [0, 1, 2, 3, 4])
    losses = []
    for model in (true, ours):
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        history = model.fit(x, y, batch_size=5, epochs=4, shuffle=False, verbose=0).history
        losses.append(history["loss"])
    np.testing.assert_allclose(*losses, rtol=2e-3)
    for found, expected in zip(ours.get_weights(), true.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, atol=0.01)
    assert counts(ours) == (12, 0)


# --- 7: large logits in float16 ------------------------------------------------------------------


def scaled_logits(end):
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    if end == "convolution":
        initializer = keras.initializers.RandomNormal(stddev=20.0)
        x = layers.Conv2D(5, 1, activation="softmax", kernel_initializer=initializer)(x)
        return keras.Model(inputs, x)
    x = layers.Rescaling(20.0)(layers.Conv2D(5, 1)(x))
    if end == "softmax":
        x = layers.Softmax()(x)
    elif end == "activation":
        x = layers.Activation("softmax")(x)
    return keras.Model(inputs, x)


@pytest.mark.parametrize("end", ["softmax", "activation", "convolution", "logits"])
def test_large_logits_of_a_float16_head(end):
    true, ours = pair(lambda: scaled_logits(end))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 8, 8, 3)).astype("float32")
    y = np.eye(5, dtype="float32")[rng.integers(5, size=(4, 8, 8))]
    crossentropy = keras.losses.CategoricalCrossentropy(from_logits=end == "logits")

    def loss(model, x, y):
        return crossentropy(y, model(x, training=True))

    value, expected = differentiate(tf.function, true, loss)(x, y)
    found_value, found = differentiate(tf.function, ours, loss)(x, y)
    # Most entries are certain, many of them wrong: probabilities of float16 would give log 0.
    assert value > 5
    np.testing.assert_allclose(found_value, value, rtol=1e-3)
    assert_close(found, expected, 0.03)


# --- 9: weights in float16 -----------------------------------------------------------------------


def in_submodel(dtype):
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(3, dtype=dtype, name="narrow")])
    inputs = keras.Input((4,))
    return keras.Model(inputs, inner(inputs))


def in_sequential(dtype):
    return keras.Sequential([keras.Input((4,)), layers.Dense(3, dtype=dtype, name="narrow")])


def in_wrapper(dtype):
    inputs = keras.Input((2, 4))
    x = layers.TimeDistributed(layers.Dense(3, dtype=dtype, name="narrow"))(inputs)
    return keras.Model(inputs, x)


@pytest.mark.parametrize("build", [in_sequential, in_submodel, in_wrapper])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_must_be_float32(build, dtype):
    model = build(dtype)
    with pytest.raises(ValueError) as raised:
        gs.convert(model)
    message = str(raised.value)
    assert re.search(rf"keeps its weights in {dtype}.*weights must be float32", message)
    assert f'dtype="mixed_{dtype}" instead of dtype="{dtype}"' in message
    assert "narrow/kernel" in message
    gs.convert(build(f"mixed_{dtype}"))


# --- 25: resizing under XLA ----------------------------------------------------------------------


class Probe(layers.Layer):
    """The identity; tells a function the dtype of the gradient that comes back."""

    def __init__(self, tell, **kwargs):
        super().__init__(**kwargs)
        self.tell = tell

    def call(self, x):
        @tf.custom_gradient
        def probe(x):
            def grad(dy):
                self.tell(dy.dtype)
                return dy

            return tf.identity(x), grad

        return probe(x)


@pytest.mark.parametrize(
    "resize",
    [
        layers.UpSampling2D(interpolation="bilinear"),
        pytest.param(layers.UpSampling2D(), marks=pytest.mark.slow),
        pytest.param(layers.Resizing(12, 12), marks=pytest.mark.slow),
        lambda x: keras.ops.image.resize(x, (12, 12)),
    ],
    ids=["bilinear", "nearest", "Resizing", "ops.image.resize"],
)
def test_resizing_under_xla(resize):
    seen = []

    def build():
        inputs = keras.Input((6, 6, 3))
        x = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
        x = Probe(seen.append)(x)
        if isinstance(resize, layers.Layer):
            # A new one, under the present policy.
            config = {**resize.get_config(), "dtype": None}
            x = type(resize).from_config(config)(x)
        else:
            x = resize(x)
        x = Probe(seen.append)(x)
        return keras.Model(inputs, layers.Conv2D(2, 3)(x))

    true, ours = pair(build)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 6, 6, 3)).astype("float32")
    y = rng.normal(size=(4, 10, 10, 2)).astype("float32")

    def loss(model, x, y):
        return 1e-6 * tf.reduce_mean((model(x, training=True) - y) ** 2)

    _, expected = differentiate(tf.function, true, loss)(x, y)
    assert set(seen) == {tf.float32}
    seen.clear()
    xla = differentiate(lambda f: tf.function(f, jit_compile=True), ours, loss)
    assert_close(xla(x, y)[1], expected, 0.01)
    assert set(seen) == {tf.float16}
