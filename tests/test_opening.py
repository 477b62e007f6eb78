"""Composites are opened: nothing that they compute changes, and their products are scaled."""

import warnings

import composites
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tf_gradscale as gs

layers = keras.layers
SHAPE = (6, 8)
BATCH = 4


def normal(shape, seed):
    """Random values that float16 holds."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return tf.constant(values.astype("float16").astype("float32"))


def model_of(make, policy):
    """A model of the one layer between two others, with the same weights in every call."""
    keras.utils.set_random_seed(7)
    with gs.policy_scope(policy):
        inputs = keras.Input(SHAPE)
        model = keras.Model(inputs, layers.Dense(5)(make()(layers.Dense(8)(inputs))))
    for i, variable in enumerate(model.trainable_variables):
        variable.assign(variable + 0.3 * normal(variable.shape, i))
    reset(model)
    return model


def reset(model):
    """Seeds and moving statistics as before any call."""
    for layer in model._flatten_layers():
        for generator in getattr(layer, "_seed_generators", []):
            generator.state.assign([3, 5])
        if isinstance(layer, layers.BatchNormalization):
            layer.moving_mean.assign(0.1 * np.arange(8.0))
            layer.moving_variance.assign(1.0 + 0.1 * np.arange(8.0))


def gradients(model, x, multiplier=1.0, training=None):
    """Those of a random linear function of the outputs, of inputs and variables."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.cast(model(x, training=training), tf.float32)
        value = tf.reduce_sum(y * normal((BATCH, SHAPE[0], 5), 50))
        value = multiplier * (value + sum(tf.cast(loss, tf.float32) for loss in model.losses))
    return tape.gradient(value, [x, *[v.value for v in model.trainable_variables]])


def times(factor, gradients):
    return [None if g is None else factor * g for g in gradients]


def distance(found, wanted):
    """The largest error (L2), relative to its norm and a thousandth of the largest one."""
    assert [g is None for g in found] == [g is None for g in wanted]
    pairs = [(f, w) for f, w in zip(found, wanted, strict=True) if w is not None]
    largest = max(np.linalg.norm(w) for _, w in pairs)
    return max(np.linalg.norm(f - w) / (np.linalg.norm(w) + 1e-3 * largest) for f, w in pairs)


def state(model):
    return [v.numpy() for v in model.non_trainable_variables]


@pytest.mark.parametrize("training", [True, False, None])
@pytest.mark.parametrize("name", composites.OPENED)
def test_outputs_and_state_are_the_same_bit_for_bit(name, training):
    make = composites.OPENED[name]
    x = normal((BATCH, *SHAPE), 99)
    plain = model_of(make, "mixed_float16")
    wanted = plain(x, training=training)
    model = gs.convert(model_of(make, "mixed_float16"))
    found = model(x, training=training)
    np.testing.assert_array_equal(found, tf.cast(wanted, tf.float32))
    for a, b in zip(state(model), state(plain), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("training", [True, None])
@pytest.mark.parametrize("name", composites.OPENED)
def test_gradients_are_those_of_plain_keras_in_float32(name, training):
    make = composites.OPENED[name]
    x = normal((BATCH, *SHAPE), 99)
    wanted = gradients(model_of(make, "float32"), x, training=training)
    found = gradients(gs.convert(model_of(make, "float32")), x, training=training)
    assert distance(found, wanted) < 5e-5


@pytest.mark.parametrize(
    "name", ["own_weights", "switch", "shapes", "nested", "attentive", "adds_losses"]
)
def test_gradients_in_float16(name, run):
    """As good as plain float16's at a scale that suits them, where true ones are about 2^-30.

    Without random masks, which differ by precision.
    """
    make = composites.OPENED[name]
    x = normal((BATCH, *SHAPE), 99)
    wanted = gradients(model_of(make, "float32"), x)
    floor = gradients(model_of(make, "mixed_float16"), x, 2.0**4)
    model = gs.convert(model_of(make, "mixed_float16"))
    found = run(lambda x: gradients(model, x, 2.0**-30))(x)
    floor, found = distance(times(2.0**-4, floor), wanted), distance(times(2.0**30, found), wanted)
    assert found < 1.5 * floor < 0.2


@pytest.mark.parametrize("name", composites.OPENED)
def test_they_are_opened_and_left_as_they_were(name):
    make = composites.OPENED[name]
    plain = model_of(make, "mixed_float16")
    before = [len(layer._inbound_nodes) for layer in plain._flatten_layers()]
    next_name = layers.Dense(1).name
    model = gs.convert(plain)
    inside = {site.name.split("/")[0] for site in model.scales if site.name.count("/") > 1}
    assert inside == {plain.layers[2].name}
    assert [len(layer._inbound_nodes) for layer in plain._flatten_layers()] == before
    number = int(next_name.rpartition("_")[2])
    assert layers.Dense(1).name == f"dense_{number + 1}"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("counts", "it updates a variable"),
        ("raw", "`return tf.math.sin(self.dense(x))`"),
        ("map", "Map runs a function"),
    ],
)
def test_what_cannot_be_opened_is_one_operation(name, reason, run):
    check_closed(name, reason, run)


@pytest.mark.parametrize("name", sorted(set(composites.FUNCTIONS) - {"map"}))
def test_an_operation_that_runs_a_function_is_not_opened(name):
    """What the function uses besides its arguments has a gradient, too."""
    check_closed(name, f"{composites.FUNCTIONS[name]} runs a function", tf.function)


def check_closed(name, reason, run):
    make = composites.CLOSED[name]
    x = normal((BATCH, *SHAPE), 99)
    wanted = gradients(model_of(make, "float32"), x)
    plain = model_of(make, "mixed_float16")
    with pytest.warns(UserWarning, match="is differentiated as one operation") as warned:
        model = gs.convert(plain)
    assert len(warned) == 1
    assert f"Layer '{plain.layers[2].name}'" in str(warned[0].message)
    assert reason in str(warned[0].message)
    found = run(lambda x: gradients(model, x, 2.0**-30))(x)
    assert distance([2.0**30 * g for g in found], wanted) < 1e-2
    if name == "counts":
        assert float(plain.layers[2].count) == 1.0


def test_layers_under_remat_are_not_opened():
    with keras.RematScope("full"):
        plain = model_of(composites.OwnWeights, "float32")
    with pytest.warns(UserWarning, match="it is rematerialized"):
        model = gs.convert(plain)
    x = normal((BATCH, *SHAPE), 99)
    wanted = gradients(model_of(composites.OwnWeights, "float32"), x)
    assert distance(gradients(model, x), wanted) < 5e-5


# --- Masks ---------------------------------------------------------------------------------------


class WithMask(layers.Layer):
    """Takes its argument's mask as Keras hands it over, and makes one."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(8)
        self.supports_masking = True

    def call(self, x, mask=None):
        if mask is None:
            return self.dense(x)
        return self.dense(x) * ops.cast(ops.expand_dims(mask, -1), x.dtype)

    def compute_mask(self, x, mask=None):
        return mask if mask is None else ops.logical_not(mask)


class Decoder(layers.Layer):
    """Self-attention and cross-attention, each with the masks of its operands."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.own, self.cross = (layers.MultiHeadAttention(2, 4) for _ in range(2))
        self.add = layers.Add()
        self.supports_masking = True

    def call(self, x, memory):
        x = self.add([x, self.own(x, x, use_causal_mask=True)])
        return self.add([x, self.cross(x, memory)])


def masked_model(policy):
    keras.utils.set_random_seed(7)
    with gs.policy_scope(policy):
        tokens, sources = (keras.Input((6,), dtype="int32") for _ in range(2))
        embed = layers.Embedding(9, 8, mask_zero=True)
        x = Decoder()(embed(tokens), WithMask()(embed(sources)))
        x = layers.LSTM(8, return_sequences=True)(x)
        x = WithMask()(x)
        model = keras.Model([tokens, sources], layers.Dense(5)(x))
    for i, variable in enumerate(model.trainable_variables):
        variable.assign(variable + 0.3 * normal(variable.shape, i))
    return model


@pytest.fixture
def masked_batch():
    rng = np.random.default_rng(2)
    tokens, sources = (rng.integers(1, 9, (BATCH, 6)) for _ in range(2))
    tokens[:, 4:], sources[1:, 3:] = 0, 0
    return [tf.constant(tokens), tf.constant(sources)]


def test_masks_reach_the_layers_inside(masked_batch, run):
    plain, model = masked_model("mixed_float16"), gs.convert(masked_model("mixed_float16"))
    wanted = plain(masked_batch)
    found = model(masked_batch)
    np.testing.assert_array_equal(found, tf.cast(wanted, tf.float32))
    np.testing.assert_array_equal(found._keras_mask, wanted._keras_mask)
    # And they matter.
    unmasked = [tf.maximum(x, 1) for x in masked_batch]
    assert np.abs(plain(unmasked) - wanted).max() > 1e-2

    def backward(model, multiplier=1.0):
        with tf.GradientTape() as tape:
            y = tf.cast(model(masked_batch), tf.float32)
            value = multiplier * tf.reduce_sum(y * normal((BATCH, 6, 5), 50))
        variables = [v.value for v in model.trainable_variables]
        return [tf.convert_to_tensor(g) for g in tape.gradient(value, variables)]

    truth = backward(masked_model("float32"))
    floor = distance(times(2.0**-4, run(lambda: backward(plain, 2.0**4))()), truth)
    found = run(lambda: backward(model, 2.0**-30))()
    assert distance(times(2.0**30, found), truth) < 1.5 * floor < 0.1


def test_a_mask_that_composites_would_not_see_is_refused():
    model = gs.convert(model_of(composites.Attentive, "float32"))
    with pytest.raises(ValueError, match="A mask must come from a layer of the model"):
        model(normal((BATCH, *SHAPE), 1), mask=tf.ones((BATCH, 6), tf.bool))


# --- Models with a call of their own -------------------------------------------------------------


class Written(keras.Model):
    """A model written by hand, with its own training step."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embed = layers.Embedding(9, 8)
        self.block = composites.Attentive()
        self.steps = 0

    def call(self, inputs, training=None):
        x = self.block(self.embed(inputs["tokens"]), training=training)
        return {"logits": ops.matmul(x, ops.transpose(self.embed.embeddings))}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        each = keras.losses.sparse_categorical_crossentropy(y, y_pred["logits"], from_logits=True)
        return 2.0**-20 * ops.mean(each)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def written(policy):
    keras.utils.set_random_seed(3)
    with gs.policy_scope(policy):
        model = Written()
        model({"tokens": np.ones((BATCH, 6), "int32")})
    return model


@pytest.fixture
def tokens():
    rng = np.random.default_rng(4)
    return {"tokens": rng.integers(0, 9, (BATCH, 6))}, rng.integers(0, 9, (BATCH, 6))


@pytest.mark.parametrize("jit_compile", [False, True])
def test_models_written_by_hand_train(tokens, jit_compile):
    """With a learning rate of 2^20, one step of SGD shows the gradient of a loss of 2^-20."""
    moves = []
    for convert in (False, True):
        model = written("mixed_float16" if convert else "float32")
        if convert:
            assert gs.convert(model) is model and isinstance(model, Written)
        before = model.get_weights()
        model.compile(keras.optimizers.SGD(2.0**20), jit_compile=jit_compile)
        model.fit(*tokens, batch_size=BATCH, verbose=0)
        moves.append([a - b for a, b in zip(model.get_weights(), before, strict=True)])
    assert distance(moves[1], moves[0]) < 1e-2
    assert isinstance(model.optimizer, gs.GradScaleOptimizer)
    assert int(model.scales.variables[2]) == 1
    assert {site.kind for site in model.scales} >= {"gemm", "variable", "branch"}


def test_a_model_compiled_before_is_to_be_compiled_again(tokens):
    model = written("mixed_float16")
    model.compile("sgd")
    gs.convert(model)
    with pytest.raises(ValueError, match="You must call `compile"):
        model.fit(*tokens, verbose=0)
    model.compile("sgd")
    model.fit(*tokens, verbose=0)
    assert isinstance(model.optimizer, gs.GradScaleOptimizer)


def test_models_written_by_hand_are_given_back(tokens):
    model = written("mixed_float16")
    wanted = model(tokens[0])["logits"]
    gs.convert(model)
    predicted = model.predict(tokens[0], verbose=0)["logits"]
    np.testing.assert_allclose(predicted, wanted, rtol=1e-2, atol=1e-2)
    assert predicted.dtype == np.float16
    np.testing.assert_array_equal(model(tokens[0])["logits"], tf.cast(wanted, tf.float32))
    assert gs.strip(model) is model and type(model) is Written
    assert model(tokens[0])["logits"].dtype == tf.float16


def test_a_call_on_other_shapes_has_the_same_scales(tokens):
    """Each length has a graph of its own, and all share the scales."""
    model = gs.convert(written("mixed_float16"))
    truth = written("float32")
    for length in (6, 4):
        x = {"tokens": tf.constant(tokens[0]["tokens"][:, :length])}

        def backward(model, multiplier=1.0, x=x):
            with tf.GradientTape() as tape:
                y = model(x)["logits"]
                value = multiplier * tf.reduce_sum(y * normal(y.shape, 50))
            variables = [v.value for v in model.trainable_variables]
            return [tf.convert_to_tensor(g) for g in tape.gradient(value, variables)]

        found = [2.0**20 * g for g in backward(model, 2.0**-20)]
        assert distance(found, backward(truth)) < 1e-2
    assert int(model.scales.variables[2]) == 2


def test_a_model_written_by_hand_and_not_openable_warns():
    class Loop(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(4)

        def call(self, x):
            return tf.nn.relu(self.dense(x))

    x = normal((3, 4), 1)
    model = gs.convert(Loop())
    with pytest.warns(UserWarning, match="Layer 'loop' is differentiated as one operation"):
        model(x)
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(model(x))
    kernel = model.dense.kernel
    positive = (x.numpy() @ kernel.numpy() > 0).astype("float32")
    found = tape.gradient(value, kernel.value)
    np.testing.assert_allclose(found, x.numpy().T @ positive, rtol=1e-5, atol=1e-6)


class OwnStep(keras.Model):
    """A functional model with a training step of its own."""

    def train_step(self, data):
        return {**super().train_step(data), "own": 1.0}


def test_functional_models_with_methods_of_their_own_stay_of_their_class():
    inputs = keras.Input((4,))
    model = OwnStep(inputs, layers.Dense(2)(inputs))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gs.convert(model) is model
    model.compile("sgd", "mse")
    history = model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0).history
    assert history["own"] == [1.0]
    assert [site.name for site in model.scales] == ["dense/kernel", "dense/input"]


def test_models_written_by_hand_under_a_strategy(strategy, tokens):
    """Each replica sees half the batch; the mean of their gradients is the whole one's."""
    truth = written("float32")
    before = truth.get_weights()
    truth.compile(keras.optimizers.SGD(2.0**20))
    truth.fit(*tokens, batch_size=BATCH, verbose=0)
    with strategy.scope():
        model = gs.convert(written("mixed_float16"))
        model.compile(keras.optimizers.SGD(2.0**20))
    model.fit(*tokens, batch_size=BATCH, verbose=0)
    replicas = strategy.num_replicas_in_sync
    # This training step does not divide its loss by the number of replicas, whose gradients add up.
    moves = [(a - b) / replicas for a, b in zip(model.get_weights(), before, strict=True)]
    truth = [a - b for a, b in zip(truth.get_weights(), before, strict=True)]
    assert distance(moves, truth) < 1e-2


def test_a_first_call_on_a_replica_is_refused(mirrored):
    with mirrored.scope():
        model = gs.convert(Written())
    x = {"tokens": tf.ones((2, 6), tf.int32)}
    with pytest.raises(RuntimeError, match="Call it on one batch within `strategy.scope"):
        mirrored.run(lambda: model(x))


class Autoencoder(keras.Model):
    """Adds its own loss, and returns nothing for one of its outputs."""

    def __init__(self, raw):
        super().__init__()
        self.encoder, self.decoder, self.raw = layers.Dense(8), layers.Dense(8), raw

    def call(self, x):
        code = self.encoder(x)
        self.add_loss(1e-3 * ops.mean(ops.square(ops.cast(code, "float32"))))
        return {"y": self.decoder(tf.nn.relu(code) if self.raw else ops.relu(code)), "extra": None}


@pytest.mark.parametrize("raw", [False, True])
def test_a_model_that_adds_a_loss_and_returns_none(raw, run):
    """Opened or not, the loss comes back scaled, and the structure of the outputs is kept."""
    x = normal((BATCH, 8), 1)

    def build(policy):
        keras.utils.set_random_seed(5)
        with gs.policy_scope(policy):
            model = Autoencoder(raw)
            model(x)
        return model

    def backward(model, multiplier=1.0):
        with tf.GradientTape() as tape:
            made = model(x)
            assert made["extra"] is None
            assert len(model.losses) == 1
            value = 1e-4 * tf.reduce_sum(tf.cast(made["y"], tf.float32)) + sum(model.losses)
            value *= multiplier
        return tape.gradient(value, [v.value for v in model.trainable_variables])

    truth = backward(build("float32"))
    model = gs.convert(build("mixed_float16"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = run(lambda: backward(model, 2.0**-20))()
    assert [str(w.message).count("as one operation") for w in warned] == ([1] if raw else [])
    assert distance(times(2.0**20, found), truth) < 5e-3


@keras.saving.register_keras_serializable("tests")
class Registered(keras.Model):
    """A model of a registered class."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(2)

    def call(self, x):
        return self.dense(x)


def test_models_written_by_hand_are_saved_as_they_are(tmp_path):
    """Loaded, they are scaled; stripped before, they are of their own class."""
    x, y = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")
    with gs.policy_scope("mixed_float16"):
        model = gs.convert(Registered())
        model.compile("sgd", "mse")
        model.fit(x, y, verbose=0)
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        assert isinstance(loaded, Registered)
        assert isinstance(loaded.optimizer, gs.GradScaleOptimizer)
        assert [site.kind for site in loaded.scales] == [site.kind for site in model.scales]
        wanted = model.predict(x, verbose=0)
        np.testing.assert_array_equal(loaded.predict(x, verbose=0), wanted)
        loaded.fit(x, y, verbose=0)
        gs.strip(model).save(tmp_path / "plain.keras")
        plain = keras.saving.load_model(tmp_path / "plain.keras")
    assert type(plain) is Registered
    np.testing.assert_array_equal(plain.predict(x, verbose=0), wanted)


def test_the_first_call_must_be_the_fullest():
    class Modes(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = layers.Dense(2), layers.Dense(2)

        def call(self, x, decode=True):
            return self.decoder(self.encoder(x)) if decode else self.encoder(x)

    x = tf.ones((2, 3))
    first, second = Modes(), Modes()
    for model in (first, second):
        # Builds all layers.
        model(x)
        gs.convert(model)
    first(x)
    first(x, decode=False)
    second(x, decode=False)
    with pytest.raises(ValueError, match="Make the fullest call first. Received"):
        second(x)


@pytest.mark.skipif(
    not hasattr(layers, "ReversibleEmbedding"), reason="this Keras has no ReversibleEmbedding"
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_ends_in_its_embedding(tied):
    """Within a model, a layer of integers does not autocast: its product is float32's."""
    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((7,), dtype="int32")
        both = layers.ReversibleEmbedding(20, 16, tie_weights=tied)
        plain = keras.Model(inputs, both(both(inputs), reverse=True))
    scaled = gs.convert(plain)
    ids = tf.constant(np.arange(14).reshape(2, 7))
    for training in (None, False, True):
        found, wanted = (model(ids, training=training) for model in (scaled, plain))
        np.testing.assert_array_equal(found, tf.cast(wanted, tf.float32))
