"""Kinds of input on which mixed-precision training is known to fail, and what must happen."""

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import TINY, Threefold, error, normal

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


# --- 6, 20: training loops that were written for plain Keras -------------------------------------


def small_classifier():
    inputs = keras.Input((6,))
    x = layers.Dense(12, activation="tanh")(inputs)
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(x))


def vectors(batch=16):
    rng = np.random.default_rng(0)
    return rng.normal(size=(batch, 6)).astype("float32"), np.arange(batch) % 3


class LayerByLayer(keras.Model):
    """Takes the gradients of one layer after the other."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = 1e-7 * self.compute_loss(x, y, self(x, training=True))
        for layer in self.layers:
            if layer.trainable_variables:
                gradients = tape.gradient(loss, layer.trainable_variables)
                self.optimizer.apply(gradients, layer.trainable_variables)
        return {"true_loss": 1e7 * loss}


def test_a_train_step_that_goes_layer_by_layer():
    losses = []
    for policy in ("float32", "mixed_float16"):
        keras.utils.set_random_seed(1)
        with gs.policy_scope(policy):
            plain = small_classifier()
            model = LayerByLayer(plain.inputs, plain.outputs)
        if policy != "float32":
            assert gs.convert(model) is model
        # Plain SGD: it has no state that belongs to variables, which come in turn.
        model.compile(keras.optimizers.SGD(1e6), "sparse_categorical_crossentropy")
        model.optimizer.build(model.trainable_variables)
        history = model.fit(*vectors(), batch_size=8, epochs=5, shuffle=False, verbose=0).history
        losses.append(history["true_loss"])
    assert losses[0][-1] < 0.95 * losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-2)


def published_loop(model, optimizer, scale_loss=False):
    """The loop of Keras' guide "Writing a training loop from scratch in TensorFlow", unchanged.

    With `scale_loss`, as the guide to mixed precision has it.
    """
    x_train, y_train = vectors(32)
    loss_fn = keras.losses.SparseCategoricalCrossentropy()
    train_dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).batch(8)
    seen = []

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss_value = loss_fn(y, logits)
            scaled_loss = optimizer.scale_loss(loss_value) if scale_loss else loss_value
        grads = tape.gradient(scaled_loss, model.trainable_weights)
        optimizer.apply(grads, model.trainable_weights)
        return loss_value

    for _ in range(3):
        for x_batch_train, y_batch_train in train_dataset:
            seen.append(float(train_step(x_batch_train, y_batch_train)))
    return seen


@pytest.mark.parametrize("wrapper", ["none", "ours", "ours, scale_loss", "Keras'"])
def test_the_published_training_loop(wrapper):
    true, ours = pair(small_classifier)
    wanted = published_loop(true, keras.optimizers.Adam(0.02))
    optimizer = keras.optimizers.Adam(0.02)
    if wrapper == "Keras'":
        # Its own scale goes in and out again, on top of ours.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    elif wrapper != "none":
        optimizer = gs.GradScaleOptimizer(optimizer, scales=ours.scales)
    found = published_loop(ours, optimizer, scale_loss=wrapper[-1] in "s'")
    assert wanted[-1] < 0.9 * wanted[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-2)
    for a, b in zip(ours.get_weights(), true.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=0.01)


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


# --- 8: statistics beyond what float16 holds -----------------------------------------------------


def grouped():
    inputs = keras.Input((8, 8, 4))
    x = layers.GroupNormalization(2)(layers.Rescaling(1.0)(inputs))
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))


def pooled():
    inputs = keras.Input((256, 256, 1))
    x = layers.GlobalAveragePooling2D()(layers.Rescaling(1.0)(inputs))
    return keras.Model(inputs, layers.Dense(3)(x))


def averaged():
    inputs = keras.Input((256, 256, 1))
    x = keras.ops.mean(layers.Rescaling(1.0)(inputs), axis=(1, 2))
    return keras.Model(inputs, layers.Dense(3)(x))


@pytest.mark.parametrize(("build", "size"), [(grouped, 6e4), (pooled, 300.0), (averaged, 300.0)])
@pytest.mark.parametrize("multiplier", [1.0, 1e-6])
def test_statistics_of_large_values(build, size, multiplier):
    true, ours = pair(build)
    rng = np.random.default_rng(0)
    x = rng.uniform(0.9, 1.0, size=(2, *true.input_shape[1:])).astype("float32") * size
    # What float16 holds, so that both models normalise the same.
    x = x.astype("float16").astype("float32")
    assert np.all(np.isfinite(x)) and (size**2 > FLOAT16.largest)
    weights = rng.normal(size=(2, 3)).astype("float32")

    def gradients(model):
        batch = tf.constant(x)
        with tf.GradientTape() as tape:
            tape.watch(batch)
            value = multiplier * tf.reduce_sum(
                tf.cast(model(batch, training=True), "float32") * weights
            )
        found = tape.gradient(value, [batch, *[v.value for v in model.trainable_variables]])
        return [g.numpy() for g in found]

    assert_close(gradients(ours), gradients(true), 0.01)


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


# --- 10: a detector ------------------------------------------------------------------------------


def detector():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    classes = layers.Conv2D(1, 1, activation="sigmoid", bias_initializer="ones")(x)
    return keras.Model(inputs, [classes, layers.Conv2D(4, 1)(x)])


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_detector_with_few_positives_and_one_large_box(jit_compile):
    true, ours = pair(detector)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 8, 8, 3)).astype("float32")
    positive = rng.random(size=(4, 8, 8, 1)) < 0.02
    boxes = rng.normal(size=(4, 8, 8, 4)).astype("float32")
    boxes[1, 2, 3] = 1e4
    boxes[0, 0, 0], positive[0, 0, 0], positive[1, 2, 3] = 0.5, True, True
    focal = keras.losses.BinaryFocalCrossentropy()

    def loss(model, x, positive, boxes, factors):
        classes, found = model(x, training=True)
        positive = tf.cast(positive, tf.float32)
        # Smooth L1, on the positives alone; and a squared error, which the large box dominates.
        smooth = keras.losses.huber(boxes, found)[..., None] * positive
        squares = 1e-4 * tf.reduce_mean((boxes - tf.cast(found, tf.float32)) ** 2)
        parts = focal(positive, classes), tf.reduce_sum(smooth), squares
        return tf.reduce_sum(factors * tf.stack(parts))

    true_step = differentiate(tf.function, true, loss)
    step = differentiate(functools.partial(tf.function, jit_compile=jit_compile), ours, loss)
    for multiplier in (1.0, 1e-6):
        for weights in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (1.0, 1.0, 1.0)):
            batch = x, positive, boxes, np.array(weights, "float32") * np.float32(multiplier)
            _, expected = true_step(*batch)
            ours.scales.unfreeze()
            _, found = step(*batch)
            assert_close(found, expected, 0.01)
            assert all(np.any(g) for g in found[:2])


# --- 11: two optimizers in one step --------------------------------------------------------------


def generator():
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(6)(layers.Dense(8, activation="tanh")(inputs)))


def discriminator():
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(1)(layers.Dense(8, activation="relu")(inputs)))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_the_discriminator_skips_alone(run):
    (true_g, ours_g), (true_d, ours_d) = pair(generator), pair(discriminator)
    rng = np.random.default_rng(0)
    real = tf.constant(rng.normal(size=(8, 6)), tf.float32)
    noise = tf.constant(rng.normal(size=(8, 4)), tf.float32)
    crossentropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def trained(g, d, wrap):
        optimizers = []
        for model in (g, d):
            optimizer = keras.optimizers.SGD(0.05)
            if wrap:
                optimizer = gs.GradScaleOptimizer(optimizer, scales=model.scales)
            optimizer.build(model.trainable_variables)
            optimizers.append(optimizer)

        def step(factor):
            with tf.GradientTape() as tape_g, tf.GradientTape() as tape_d:
                fake = g(noise, training=True)
                of_real, of_fake = d(real, training=True), d(fake, training=True)
                loss_g = 1e-6 * crossentropy(tf.ones((8, 1)), of_fake)
                loss_d = crossentropy(tf.ones((8, 1)), of_real)
                loss_d = factor * (loss_d + crossentropy(tf.zeros((8, 1)), of_fake))
            gradients_g = tape_g.gradient(loss_g, g.trainable_variables)
            gradients_d = tape_d.gradient(loss_d, d.trainable_variables)
            optimizers[0].apply([1e6 * x for x in gradients_g], g.trainable_variables)
            optimizers[1].apply(gradients_d, d.trainable_variables)
            return loss_g, loss_d

        step, moved = run(step), []
        for i in range(5):
            before = g.get_weights(), d.get_weights()
            if not wrap and i == 2:
                # The reference's discriminator is left out by hand.
                kept = d.get_weights()
                step(tf.constant(1.0))
                d.set_weights(kept)
            else:
                step(tf.constant(np.inf if i == 2 else 1.0, tf.float32))
            after = g.get_weights(), d.get_weights()
            moved.append(
                [
                    [a - b for a, b in zip(*weights, strict=True)]
                    for weights in zip(after, before, strict=True)
                ]
            )
        return moved, optimizers

    wanted, _ = trained(true_g, true_d, False)
    found, optimizers = trained(ours_g, ours_d, True)
    assert [int(o.applied_steps) for o in optimizers] == [5, 4]
    assert [int(o.skipped_steps) for o in optimizers] == [0, 1]
    for i, (moves, expected) in enumerate(zip(found, wanted, strict=True)):
        assert_close(moves[0], expected[0], 0.03)
        assert np.any(moves[0][0]) and np.any(moves[1][0]) == (i != 2)
        assert_close(moves[1], expected[1], 0.03)
    names = [{id(v) for v in model.scales.variables} for model in (ours_g, ours_d)]
    assert not names[0] & names[1]


# --- 12: a recurrent layer that keeps its states -------------------------------------------------


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("mode", ["eager", "graph", pytest.param("xla", marks=pytest.mark.slow)])
def test_states_that_are_kept(run, unroll):
    """Each batch goes on where the last ended, in the pass that differentiates as in others."""
    sequences = normal((4, 5, 6), 1)

    def build():
        inputs = keras.Input(batch_shape=sequences.shape)
        x = layers.Dense(6, activation="tanh")(inputs)
        x = layers.GRU(4, return_sequences=True, stateful=True, unroll=unroll)(x)
        return keras.Model(inputs, layers.Dense(3)(x))

    threefold = Threefold(build, sequences)
    true, ours = threefold.true, threefold.ours
    step, true_step = threefold.gradients(ours, run), threefold.gradients(true, tf.function)
    seen = []
    for multiplier in (1.0, TINY, 1.0):
        wanted = true_step()
        ours.scales.unfreeze()
        assert max(error(step(multiplier), wanted)) < 5e-3
        state, true_state = (model.layers[2].states[0] for model in (ours, true))
        np.testing.assert_allclose(state, true_state, atol=2e-3)
        seen.append(wanted)
    # And they matter.
    assert max(error(seen[1], seen[0])) > 0.1


# --- 13: connectionist temporal classification ---------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("way", ["loss", "operation"])
def test_ctc_on_the_outputs_of_an_lstm(run, way):
    """As the loss of a model, and as the end of one."""
    rng = np.random.default_rng(0)
    # Labels are filled up with zeros, which are the blank.
    labels = np.where(np.arange(6) < [[6], [2], [4]], rng.integers(1, 5, size=(3, 6)), 0)
    sizes = {"target_length": np.array([6, 2, 4]), "output_length": np.full(3, 20)}

    def build():
        inputs = keras.Input(batch_shape=(3, 20, 6))
        x = layers.LSTM(8, return_sequences=True)(layers.Dense(8, activation="tanh")(inputs))
        x = layers.Dense(5)(x)
        if way == "operation":
            x = keras.ops.ctc_loss(labels.astype("int32"), x, **sizes)
        return keras.Model(inputs, x)

    def loss(model, x):
        y = model(x, training=True)
        return tf.reduce_mean(y) if way == "operation" else keras.losses.CTC()(labels, y)

    frames = normal((3, 20, 6), 1)
    Threefold(build, frames, loss=loss, loss_scale=2.0**10).check(run, (1.0, 1e-6))


# --- 19: gradients that are None -----------------------------------------------------------------


def three_dense():
    inputs = keras.Input((6,))
    x = layers.Dense(8, activation="tanh")(inputs)
    x = layers.Dense(8, activation="tanh")(x)
    return keras.Model(inputs, layers.Dense(3)(x))


def test_a_layer_frozen_and_unfrozen_during_training():
    true, ours = pair(three_dense)
    x, _ = vectors()
    y = np.random.default_rng(1).normal(size=(16, 3)).astype("float32")
    for trainable in (True, False, True):
        before = ours.get_weights()
        for model in (true, ours):
            model.layers[2].trainable = trainable
            model.compile(keras.optimizers.SGD(1e5), "mse", loss_weights=1e-6)
            model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
        after = ours.get_weights()
        moved = [not np.array_equal(a, b) for a, b in zip(after, before, strict=True)]
        assert moved == [True, True, trainable, trainable, True, True]
        for a, b in zip(after, true.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-3)
        # Gradients pass through the frozen layer to the one below.
        first, frozen = (layer.name for layer in ours.layers[1:3])
        for name in (f"{first}/kernel", f"{frozen}/input"):
            assert ours.scales[name].cumulative_scale > 2.0**10


@pytest.mark.parametrize("unscale", ["layer", "optimizer"])
def test_nothing_left_to_train(unscale):
    _, model = pair(three_dense, gs.GradScaleConfig(unscale=unscale))
    x, _ = vectors()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x))
    unused = tf.Variable(1.0)
    assert tape.gradient(loss, [unused]) == [None]
    optimizer = gs.GradScaleOptimizer(keras.optimizers.SGD(), scales=model.scales)
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        optimizer.apply([None] * 6, model.trainable_variables)


# --- 21: gradients that do not come through the region alone -------------------------------------


def test_weight_decay_and_a_layer_called_twice():
    def build():
        inputs = keras.Input((6,))
        shared = layers.Dense(6, activation="tanh", kernel_regularizer=keras.regularizers.L2(1e-3))
        return keras.Model(inputs, layers.Dense(3)(shared(shared(inputs))))

    true, ours = pair(build)
    x, _ = vectors()
    y = np.random.default_rng(1).normal(size=(16, 3)).astype("float32")
    for model in (true, ours):
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-12)
        model.compile(optimizer, "mse", loss_weights=1e-6)
        model.fit(x, y, batch_size=16, epochs=10, verbose=0)
    for found, expected in zip(ours.get_weights(), true.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-3)


def test_a_penalty_where_data_give_no_gradient():
    """Identical to float32's, to the last bit."""
    true, ours = pair(
        lambda: keras.Sequential(
            [keras.Input((4,)), layers.Dense(2, kernel_regularizer=keras.regularizers.L2(1e-9))]
        )
    )

    def loss(model, x):
        return tf.reduce_sum(model(x, training=True)) + sum(model.losses)

    x = np.zeros((3, 4), "float32")
    _, expected = differentiate(tf.function, true, loss)(x)
    _, found = differentiate(tf.function, ours, loss)(x)
    assert np.any(found[0])
    for g, t in zip(found, expected, strict=True):
        np.testing.assert_array_equal(g, t)


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


@pytest.mark.parametrize("factor", [1e-4, 1e3, 1e4])
def test_a_batch_whose_inputs_are_of_another_size_between_updates(factor, run):
    """Gradients of kernels grow with the inputs, while all that is measured in between is not."""

    def build():
        normal = keras.initializers.RandomNormal(stddev=0.01, seed=1)
        inputs = keras.Input((16,))
        x = layers.Dense(32, kernel_initializer=normal)(inputs)
        return keras.Model(inputs, layers.Dense(8, kernel_initializer=normal)(x))

    def loss(model, x, s):
        return tf.reduce_mean(s * tf.cast(model(x, training=True), tf.float32))

    true, ours = pair(build)
    rng = np.random.default_rng(0)
    x = tf.constant(rng.normal(size=(32, 16)) * 0.03, tf.float32)
    s = tf.constant(rng.normal(size=(32, 8)), tf.float32)
    step = differentiate(run, ours, loss)
    # Passes 0, 1, 2 and 4 choose scales; 5 does not.
    for _ in range(5):
        step(x, s)
    _, found = step(x * factor, s)
    _, wanted = differentiate(run, true, loss)(x * factor, s)
    assert (error(found, wanted) < CLOSE).all()
