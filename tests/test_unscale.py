"""`unscale="optimizer"`: gradients leave the tape scaled, and the optimizer divides them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs

layers = keras.layers
OPTIMIZER = gs.GradScaleConfig(unscale="optimizer", update_every=3)


def classifier(config):
    keras.utils.set_random_seed(3)
    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((8, 8, 2))
        x = layers.Conv2D(4, 3, activation="relu", name="conv")(inputs)
        y = layers.LayerNormalization()(x)
        x = layers.Flatten()(layers.Add()([x, y]))
        outputs = layers.Dense(3, activation="softmax", name="head")(x)
        return gs.convert(keras.Model(inputs, outputs), config)


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(12, 8, 8, 2)).astype("float32"), np.arange(12) % 3


def loss_of(model, x, y):
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x)))


def gradients_of(model, x, y, *sizes):
    """Of the loss, or of the sum of its multiples, each from a call of its own."""
    with tf.GradientTape() as tape:
        loss = tf.add_n([size * loss_of(model, x, y) for size in sizes or [1.0]])
    return tape.gradient(loss, [v.value for v in model.trainable_variables])


@pytest.mark.parametrize("run", ["eager", "graph", "xla"])
def test_updates_are_those_of_the_default(run):
    x, y = data()
    weights = []
    for config in (gs.GradScaleConfig(update_every=3), OPTIMIZER):
        model = classifier(config)
        model.compile(
            keras.optimizers.Adam(0.01),
            "sparse_categorical_crossentropy",
            run_eagerly=run == "eager",
            jit_compile=run == "xla",
        )
        before = model.get_weights()
        model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0)
        assert int(model.optimizer.applied_steps) == 9
        assert any((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))
        weights.append(model.get_weights())
    # Powers of two: not only to rounding, but the same.
    for default, divided_later in zip(*weights, strict=True):
        np.testing.assert_array_equal(default, divided_later)


def test_gradients_leave_the_tape_scaled_and_fit_into_float16():
    x, y = data()
    plain = gradients_of(classifier(gs.GradScaleConfig()), x, y)
    model = classifier(OPTIMIZER)
    scaled = gradients_of(model, x, y)
    names = [v.path for v in model.trainable_variables]
    ratios = {
        name: np.unique((s.numpy() / t.numpy())[t.numpy() != 0])
        for name, s, t in zip(names, scaled, plain, strict=True)
    }
    assert all(len(ratio) == 1 for ratio in ratios.values())
    site = model.scales["conv/kernel"]
    assert ratios["conv/kernel"][0] == site.cumulative_scale
    # A kernel's gradient is a float16 product: at its scale, compressing it loses nothing.
    kernel = scaled[names.index("conv/kernel")].numpy()
    np.testing.assert_array_equal(kernel, kernel.astype("float16").astype("float32"))


def test_a_gradient_compressed_to_float16_survives():
    """What the mode is for: at scale 1 these gradients would be zero in float16."""
    x, y = data()
    model = classifier(OPTIMIZER)
    optimizer = gs.GradScaleOptimizer(keras.optimizers.SGD(1e9))
    optimizer.attach(model.scales)
    with tf.GradientTape() as tape:
        loss = loss_of(model, x, y) * 1e-9
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    compressed = [tf.cast(tf.cast(g, tf.float16), tf.float32) for g in gradients]
    before = model.get_weights()
    reference = gradients_of(classifier(gs.GradScaleConfig()), x, y)
    optimizer.apply(compressed, model.trainable_variables)
    head = [v.path for v in model.weights].index("head/kernel")
    step = before[head] - model.get_weights()[head]
    true = reference[-2].numpy()
    assert np.linalg.norm(step - true) < 0.01 * np.linalg.norm(true)


def test_refuses_a_regularized_variable():
    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((4,))
        outputs = layers.Dense(2, kernel_regularizer="l2", name="decayed")(inputs)
    with pytest.raises(ValueError, match=r"(?s)one place.*'decayed/kernel'.*regularizer"):
        gs.convert(keras.Model(inputs, outputs), OPTIMIZER)


def test_refuses_a_variable_that_is_used_twice():
    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((4,))
        shared = layers.Dense(4, name="shared")
        outputs = shared(shared(inputs))
    with pytest.raises(ValueError, match=r"(?s)'shared/kernel'.*used 2 times"):
        gs.convert(keras.Model(inputs, outputs), OPTIMIZER)


@pytest.mark.parametrize("apart", [False, True])
def test_accumulates_over_passes(run, apart):
    """Those that come before gradients are applied use the scales of the first."""
    x, y = data()
    model = classifier(gs.GradScaleConfig(unscale="optimizer", update_every=1))
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    reference = classifier(gs.GradScaleConfig())
    head = [v.path for v in model.weights].index("head/kernel")

    @run
    def step(size):
        if apart:
            both = [gradients_of(model, x, y, size), gradients_of(model, x, y, 3.0 * size)]
            total = [a + b for a, b in zip(*both, strict=True)]
        else:
            total = gradients_of(model, x, y, size, 3.0 * size)
        model.optimizer.apply(total, model.trainable_variables)

    for i in range(5):
        reference.set_weights(model.get_weights())
        before = model.get_weights()[head]
        step(tf.constant(4.0**-i))
        true = 4.0 * 4.0**-i * gradients_of(reference, x, y)[-2].numpy()
        found = (before - model.get_weights()[head]) / 0.01
        # What is subtracted from a weight of float32 is rounded to it.
        rounded = 2.0**-23 * np.abs(before).max() / 0.01
        np.testing.assert_allclose(found, true, rtol=0.02, atol=1e-2 * np.abs(true).max() + rounded)
    assert int(model.optimizer.applied_steps) == 5
    assert int(model.optimizer.skipped_steps) == 0


def test_accumulates_over_passes_with_frozen_scales():
    x, y = data()
    model = classifier(gs.GradScaleConfig(unscale="optimizer", update_every=100))
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    model.optimizer.apply(gradients_of(model, x, y), model.trainable_variables)
    model.scales.freeze()
    # The next pass still derives what the frozen scales imply.
    model.optimizer.apply(gradients_of(model, x, y), model.trainable_variables)
    reference = classifier(gs.GradScaleConfig())
    reference.set_weights(model.get_weights())
    before = model.get_weights()
    first, second = gradients_of(model, x, y), gradients_of(model, x, y)
    total = [a + b for a, b in zip(first, second, strict=True)]
    model.optimizer.apply(total, model.trainable_variables)
    head = [v.path for v in model.weights].index("head/kernel")
    true = gradients_of(reference, x, y)[-2].numpy()
    step = before[head] - model.get_weights()[head]
    np.testing.assert_allclose(step / 0.01, 2 * true, rtol=0.02, atol=1e-2 * np.abs(true).max())


def test_a_pass_that_leaves_a_variable_out_leaves_its_scale():
    """Summed with one that does not."""
    x, y = data()
    model = classifier(gs.GradScaleConfig(unscale="optimizer", update_every=1))
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    reference = classifier(gs.GradScaleConfig())
    reference.set_weights(model.get_weights())
    true = gradients_of(reference, x, y)[-2].numpy()
    gradients = gradients_of(model, x, y)
    head = model.get_layer("head").kernel
    model.get_layer("head").trainable = False
    gradients_of(model, x, y)
    model.get_layer("head").trainable = True
    before = np.array(head)
    model.optimizer.apply(gradients, model.trainable_variables)
    found = (before - np.array(head)) / 0.01
    np.testing.assert_allclose(found, true, rtol=0.02, atol=1e-2 * np.abs(true).max())


def test_replicas_must_share_their_scales(mirrored):
    x, y = data()

    @tf.function
    def step(model):
        def replica():
            model.optimizer.apply(gradients_of(model, x, y), model.trainable_variables)

        mirrored.run(replica)

    with mirrored.scope():
        model = classifier(OPTIMIZER)
        model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match=r"(?s)all replicas must use the same scales.*2 replicas"):
        step(model)
    model.scales.freeze(
        lambda site: 2.0**10 if site.kind == "cast" and "output" in site.name else 1.0
    )

    @tf.function
    def frozen_step():
        def replica():
            model.optimizer.apply(gradients_of(model, x, y), model.trainable_variables)

        mirrored.run(replica)

    reference = classifier(gs.GradScaleConfig())
    reference.set_weights(model.get_weights())
    head = [v.path for v in model.weights].index("head/kernel")
    before = model.get_weights()[head]
    frozen_step()
    # Each replica saw the same batch, and gradients are summed over replicas.
    true = gradients_of(reference, x, y)[-2].numpy()
    step_taken = before - model.get_weights()[head]
    np.testing.assert_allclose(step_taken, true, rtol=0.02, atol=1e-3 * np.abs(true).max())
