"""Training converted models: with fit, in loops of one's own, frozen in part, over replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs

layers = keras.layers
CLASSES = 3
RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 6)).astype("float32")
Y = np.arange(16) % CLASSES
TINY = 1e-7


def network():
    """A small classifier whose weights are the same under every policy."""
    inputs = keras.Input((6,))
    x = layers.Dense(8, activation="tanh")(inputs)
    x = layers.LayerNormalization()(x)
    y = layers.Dense(8, activation="relu")(x)
    x = layers.Add()([x, y])
    x = layers.Dense(CLASSES)(x)
    model = keras.Model(inputs, layers.Activation("softmax", dtype="float32")(x))
    rng = np.random.default_rng(2)
    for variable in model.weights:
        mean = variable if len(variable.shape) == 1 else 0.0
        variable.assign(mean + 0.4 * rng.standard_normal(variable.shape).astype("float32"))
    return model


def loss_of(model, x=X, **kwargs):
    return keras.ops.mean(
        keras.losses.sparse_categorical_crossentropy(Y, model(x, **kwargs), from_logits=False)
    )


def gradients(model, multiplier=1.0, variables=None, **kwargs):
    """Gradients of a multiple of the loss, divided by the multiplier again; `None` for none."""
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = loss_of(model, x, **kwargs) * multiplier
    variables = model.trainable_variables if variables is None else variables
    found = tape.gradient(value, [x, *[v.value for v in variables]])
    return [None if g is None else tf.convert_to_tensor(g).numpy() / multiplier for g in found]


def error(found, wanted):
    """The largest relative L2 error."""
    assert [g is None for g in found] == [g is None for g in wanted]
    return max(
        np.linalg.norm(f - w) / np.linalg.norm(w)
        for f, w in zip(found, wanted, strict=True)
        if w is not None
    )


def float32_and_converted():
    reference = network()
    with gs.policy_scope("mixed_float16"):
        return reference, gs.convert(network())


# --- Gradients -----------------------------------------------------------------------------------


def test_gradients_of_a_tiny_loss():
    reference, converted = float32_and_converted()
    assert error(gradients(converted, TINY), gradients(reference)) < 5e-3
    # Plain mixed precision cannot do that.
    assert error(gradients(gs.strip(converted), TINY), gradients(reference)) > 0.1


def test_whether_training_is_passed_makes_no_difference_to_the_backward_pass():
    _, converted = float32_and_converted()
    wanted = gradients(converted, TINY, training=False)
    scales = str(converted.scales)
    found = gradients(converted, TINY)
    assert all(np.array_equal(f, w) for f, w in zip(found, wanted, strict=True))
    assert str(converted.scales) == scales


def test_saliency():
    """The gradient of one class with respect to the input."""
    reference, converted = float32_and_converted()
    maps = []
    for model in (reference, converted):
        x = tf.constant(X)
        with tf.GradientTape() as tape:
            tape.watch(x)
            score = TINY * tf.reduce_sum(model(x)[:, 1])
        maps.append(tape.gradient(score, x))
    assert error(maps[1:], maps[:1]) < 5e-3


def test_only_the_inputs_gradient_with_all_layers_frozen():
    reference, converted = float32_and_converted()
    for model in (reference, converted):
        model.trainable = False
    assert len(gradients(converted)) == 1
    assert error(gradients(converted, TINY), gradients(reference)) < 5e-3


def test_gradients_with_respect_to_an_inner_output():
    """Two models on one set of layers: what Grad-CAM does."""
    reference, converted = float32_and_converted()
    maps = []
    for model, make in ((reference, keras.Model), (converted, gs.Model)):
        feature = model.layers[2].output
        first = make(model.inputs, feature)
        second = make(feature, model.output)
        features = first(tf.constant(X))
        with tf.GradientTape() as tape:
            tape.watch(features)
            score = TINY * tf.reduce_sum(second(features)[:, 1])
        maps.append(tape.gradient(score, features))
    assert error(maps[1:], maps[:1]) < 5e-3


def test_frozen_layers_have_no_gradient_and_those_below_do():
    reference, converted = float32_and_converted()
    for model in (reference, converted):
        model.layers[3].trainable = False
    frozen = converted.layers[3].kernel
    *found, none = gradients(converted, TINY, [*converted.trainable_variables, frozen])
    assert none is None
    assert error(found, gradients(reference)) < 5e-3


def test_a_frozen_backbone_takes_no_statistics():
    _, converted = float32_and_converted()
    for layer in converted.layers[:4]:
        layer.trainable = False
    converted.compile("sgd", "sparse_categorical_crossentropy", loss_weights=TINY)
    converted.fit(X, Y, verbose=0)
    measured = [site.name for site in converted.scales if site.scale != 1]
    head = converted.layers[-2].name
    assert "output" in measured
    assert all(name.startswith(("output", head)) for name in measured)
    # Unfrozen, they are measured from the next trace on.
    converted.layers[3].trainable = True
    converted.compile("sgd", "sparse_categorical_crossentropy", loss_weights=TINY)
    converted.fit(X, Y, verbose=0)
    assert converted.scales[f"{converted.layers[3].name}/kernel"].scale != 1


def test_an_unused_output_gives_no_gradient():
    inputs = keras.Input((6,))
    x = layers.Dense(4)(inputs)
    model = gs.Model(inputs, [layers.Dense(2)(x), layers.Dense(3)(x)])
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(model(X)[0])
    first, *_, last = tape.gradient(value, [v.value for v in model.trainable_variables])
    wanted = X.sum(0)[:, None] * model.layers[2].kernel.numpy().sum(1)
    np.testing.assert_allclose(first, wanted, rtol=1e-5)
    assert last is None or not np.any(last)


def test_regularizers_act_beside_the_region():
    """An L2 penalty's gradient is 2·c·W to the last bit, where the data give none."""
    gs.set_global_policy("mixed_float16")
    dense = layers.Dense(2, use_bias=False, kernel_regularizer=keras.regularizers.L2(1e-9))
    model = gs.Sequential([keras.Input((4,)), dense])
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(model(np.zeros((3, 4), "float32"))) + sum(model.losses)
    kernel = dense.kernel.numpy()
    found = tape.gradient(value, dense.kernel.value)
    np.testing.assert_allclose(found, 2e-9 * kernel, rtol=1e-6)


def test_gradient_penalty():
    """The gradient of a gradient: scales are constants to it, whatever they are."""
    found = []
    for model in float32_and_converted():
        x = tf.constant(X)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                score = tf.reduce_sum(model(x)[:, 1])
            norms = tf.norm(inner.gradient(score, x), axis=1)
            penalty = tf.reduce_mean((norms - 1.0) ** 2)
        kernels = [v.value for v in model.trainable_variables if len(v.shape) == 2]
        found.append(outer.gradient(penalty, kernels))
    assert error(found[1], found[0]) < 1e-2


def test_one_forward_pass_differentiated_twice():
    """A persistent tape: each of two losses through the same call."""
    reference, converted = float32_and_converted()
    found = []
    for model in (reference, converted):
        kernel = model.layers[1].kernel.value
        with tf.GradientTape(persistent=True) as tape:
            outputs = model(X)
            first, second = TINY * outputs[0, 0], TINY * tf.reduce_sum(outputs[:, 1])
        found.append([tape.gradient(first, kernel), tape.gradient(second, kernel)])
    assert error(found[1], found[0]) < 5e-3


def test_a_model_called_twice_in_a_step():
    """As in a contrastive loss: the gradients of both calls are added."""
    reference, converted = float32_and_converted()
    found = []
    for model in (reference, converted):
        variables = [v.value for v in model.trainable_variables]
        with tf.GradientTape() as tape:
            product = tf.reduce_sum(model(X) * model(X[::-1].copy()))
            value = TINY * product
        found.append(tape.gradient(value, variables))
    assert error(found[1], found[0]) < 5e-3


def test_embeddings_keep_sparse_gradients():
    tokens = np.array([[1, 2, 2, 0, 1]])
    gs.set_global_policy("mixed_float16")
    inputs = keras.Input((5,), dtype="int32")
    table = layers.Embedding(7, 4)
    dense = layers.Dense(1, use_bias=False)
    model = gs.Model(inputs, dense(layers.Add()([table(inputs), table(inputs)])))
    with tf.GradientTape() as tape:
        value = TINY * tf.reduce_sum(model(tokens))
    found = tape.gradient(value, table.embeddings.value)
    assert isinstance(found, tf.IndexedSlices)
    assert found.dtype == tf.float32
    # Tokens 0, 1 and 2 occur once, twice and twice, and the table is used twice.
    counts = 2.0 * np.array([1, 2, 2, 0, 0, 0, 0])
    wanted = TINY * counts[:, None] * dense.kernel.numpy()[:, 0]
    np.testing.assert_allclose(tf.convert_to_tensor(found), wanted, rtol=2e-3)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_model_first_called_in_a_function(policy, run):
    """Its registry is made outside of the function; within `call` its weights read as float16."""
    gs.set_global_policy(policy)
    dense = layers.Dense(2, use_bias=False)
    model = gs.Sequential([keras.Input((6,)), dense])

    @run
    def gradient(x):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(model(x))
        return tape.gradient(value, dense.kernel.value)

    for _ in range(2):
        found = gradient(tf.constant(X))
        np.testing.assert_allclose(found, np.repeat(X.sum(0)[:, None], 2, 1), rtol=1e-2)
    assert passes(model) == 2


# --- Loops of one's own --------------------------------------------------------------------------


class Loop:
    """Keras' published loop, unchanged: a tape, `model(x, training=True)`, `apply`."""

    def __init__(self, model, multiplier, run):
        self.model, self.multiplier = model, multiplier
        self.optimizer = keras.optimizers.Adam(0.01, epsilon=1e-15)
        self.step = run(self._step)

    def _step(self, x):
        with tf.GradientTape() as tape:
            loss = self.multiplier * loss_of(self.model, x, training=True)
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss / self.multiplier


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_plain_loop_with_a_plain_optimizer(mode, run):
    reference, converted = float32_and_converted()
    losses = []
    for model, multiplier in ((reference, 1.0), (converted, TINY)):
        loop = Loop(model, multiplier, run)
        losses.append(
            [float(loop.step(tf.constant(X))) for _ in range(3 if mode == "eager" else 20)]
        )
    assert losses[0][-1] < losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-2)


class OwnStep:
    """A hand-written `train_step`, to be mixed in before a model's class."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = TINY * self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"true_loss": loss / TINY}


class PlainTrainer(OwnStep, keras.Model):
    pass


class ScaledTrainer(OwnStep, gs.Model):
    pass


def test_a_train_step_of_ones_own():
    histories = []
    for policy, kind in (("float32", PlainTrainer), ("mixed_float16", ScaledTrainer)):
        with gs.policy_scope(policy):
            plain = network()
            model = kind(plain.inputs, plain.outputs[0])
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-15), "sparse_categorical_crossentropy")
        history = model.fit(X, Y, batch_size=8, epochs=5, shuffle=False, verbose=0).history
        histories.append(history["true_loss"])
    assert histories[0][-1] < 0.95 * histories[0][0]
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-2)


# --- fit and evaluate ----------------------------------------------------------------------------


def fit(model, epochs=2, **options):
    model.compile(
        keras.optimizers.SGD(0.1),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        **options,
    )
    return model.fit(X, Y, batch_size=4, epochs=epochs, shuffle=False, verbose=0).history


def passes(model):
    return int(model.scales.variables[2].numpy())


@pytest.mark.parametrize(
    "options", [{"run_eagerly": True}, {"jit_compile": True}], ids=["eager", "xla"]
)
def test_fit(options):
    epochs = 1 if "run_eagerly" in options else 2
    reference, converted = float32_and_converted()
    wanted, found = fit(reference, epochs), fit(converted, epochs, **options)
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=5e-3)
    for a, b in zip(converted.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-3)
    assert passes(converted) == int(converted.optimizer.applied_steps) == 4 * epochs


def test_float32_models_train_as_under_keras():
    reference, converted = network(), gs.convert(network())
    wanted, found = fit(reference), fit(converted)
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-6)
    for a, b in zip(converted.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert all(site.scale == 1 for site in converted.scales)


def test_bfloat16_models_are_left_as_they_are():
    gs.set_global_policy("mixed_bfloat16")
    reference, converted = network(), gs.convert(network())
    wanted, found = fit(reference), fit(converted)
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-2)
    assert all(site.scale == 1 for site in converted.scales)


def test_no_scale_in_a_bfloat16_model_before_float32_layers():
    """Their gradients are cast to bfloat16, not to float16."""
    with gs.policy_scope("mixed_bfloat16"):
        inputs = keras.Input((6,))
        x = keras.layers.Dense(8)(inputs)
        x = keras.layers.Dense(8, dtype="float32", activation="tanh")(x)
        x = keras.layers.BatchNormalization(dtype="float32")(keras.layers.Dense(8)(x))
        model = gs.convert(keras.Model(inputs, keras.layers.Dense(3)(x)))
    with tf.GradientTape() as tape:
        loss = 1e-6 * tf.reduce_mean(tf.square(model(X[:4], training=True)))
    tape.gradient(loss, model.trainable_variables)
    assert [site.name for site in model.scales if site.scale != 1] == []


def test_steps_per_execution_changes_no_bit():
    histories = []
    with gs.policy_scope("mixed_float16"):
        for steps in (1, 4):
            model = gs.convert(network())
            histories.append((fit(model, steps_per_execution=steps)["loss"], model.get_weights()))
    # What is reported within an epoch is averaged alike.
    assert histories[0][0] == pytest.approx(histories[1][0], rel=1e-6)
    for a, b in zip(histories[0][1], histories[1][1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_evaluate_is_plain_keras():
    gs.set_global_policy("mixed_float16")
    plain = network()
    converted = gs.convert(plain)
    results = []
    for model in (plain, converted):
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        results.append(model.evaluate(X, Y, batch_size=4, verbose=0))
    assert results[0] == results[1]
    assert passes(converted) == 0


# --- Replicas ------------------------------------------------------------------------------------


def test_fit_under_a_strategy(strategy):
    reference = network()
    wanted = fit(reference)
    with strategy.scope(), gs.policy_scope("mixed_float16"):
        converted = gs.convert(network())
        found = fit(converted)
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=5e-3)
    for variable, b in zip(converted.weights, reference.get_weights(), strict=True):
        replicas = strategy.experimental_local_results(variable.value)
        assert len(replicas) == strategy.num_replicas_in_sync
        for replica in replicas:
            np.testing.assert_array_equal(replica, replicas[0])
            np.testing.assert_allclose(replica, b, atol=5e-3)
    assert int(converted.optimizer.applied_steps.numpy()) == 8
    assert any(site.scale != 1 for site in converted.scales)
