"""Converted models are the models they were: layers, outputs, losses, masks, files."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs

layers = keras.layers
CLASSES = 3


def functional():
    inputs = keras.Input((6,), name="features")
    x = layers.Dense(8, activation="relu")(inputs)
    y = layers.BatchNormalization()(layers.Dropout(0.25)(x))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.Add()([x, y])), name="net")


def sequential():
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def nested():
    inner_input = keras.Input((8,))
    inner = keras.Model(inner_input, layers.Dense(8, activation="tanh")(inner_input), name="inner")
    tail = keras.Sequential([layers.LayerNormalization(), layers.Dense(CLASSES)], name="tail")
    inputs = keras.Input((6,))
    x = layers.Dense(8)(inputs)
    return keras.Model(inputs, tail(inner(inner(x))))


def several_inputs_and_outputs():
    inputs = {name: keras.Input((4,), name=name) for name in ("left", "right")}
    x = layers.Concatenate()(list(inputs.values()))
    return keras.Model(inputs, {"a": layers.Dense(2)(x), "b": layers.Dense(CLASSES)(x)})


BUILDERS = [functional, sequential, nested, several_inputs_and_outputs]
any_model = pytest.mark.parametrize("build", BUILDERS)


def batch(model, size=8):
    """Random inputs, in the structure that the model takes."""
    rng = np.random.default_rng(0)
    structure = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    return keras.tree.map_structure(
        lambda kt: rng.standard_normal((size, *kt.shape[1:])).astype("float32"), structure
    )


def summary(model):
    lines = []
    model.summary(print_fn=lines.append, expand_nested=True, show_trainable=True)
    return "\n".join(lines)


def same(found, wanted):
    keras.tree.assert_same_structure(found, wanted)
    pairs = zip(keras.tree.flatten(found), keras.tree.flatten(wanted), strict=True)
    return all(f.dtype == w.dtype and np.array_equal(f, w) for f, w in pairs)


# --- Convert and strip ---------------------------------------------------------------------------


@any_model
def test_convert_shares_layers_and_weights(build):
    gs.set_global_policy("mixed_float16")
    plain = build()
    wanted = summary(plain)
    converted = gs.convert(plain)
    assert converted.name == plain.name
    assert all(a is b for a, b in zip(converted.layers, plain.layers, strict=True))
    assert all(a is b for a, b in zip(converted.weights, plain.weights, strict=True))
    assert [v.path for v in converted.trainable_variables] == [
        v.path for v in plain.trainable_variables
    ]
    assert summary(converted) == wanted
    assert converted.dtype_policy.name == "mixed_float16"


@any_model
def test_predictions_are_bit_for_bit_those_of_keras(build):
    gs.set_global_policy("mixed_float16")
    plain = build()
    x = batch(plain)
    wanted = plain.predict(x, verbose=0)
    converted = gs.convert(plain)
    assert same(converted.predict(x, verbose=0), wanted)
    assert same(plain.predict(x, verbose=0), wanted)
    assert all(y.dtype == "float16" for y in keras.tree.flatten(wanted))


@any_model
@pytest.mark.parametrize("training", [None, False])
def test_calls_give_the_outputs_in_float32(build, training):
    """With a trailing softmax the logits are what leaves the region; see the tests of heads."""
    gs.set_global_policy("mixed_float16")
    plain = build()
    if isinstance(plain, keras.Sequential):
        plain = keras.Sequential([keras.Input((6, 6, 2)), *plain.layers[:-1]])
    x = batch(plain)
    wanted = keras.tree.map_structure(lambda y: tf.cast(y, "float32"), plain(x, training=training))
    assert same(gs.convert(plain)(x, training=training), wanted)


@any_model
def test_strip_gives_the_plain_model(build):
    gs.set_global_policy("mixed_float16")
    plain = build()
    x = batch(plain)
    wanted_summary, wanted = summary(plain), plain.predict(x, verbose=0)
    stripped = gs.strip(gs.convert(plain))
    assert type(stripped) is type(plain)
    assert all(a is b for a, b in zip(stripped.layers, plain.layers, strict=True))
    assert summary(stripped) == wanted_summary
    assert same(stripped.predict(x, verbose=0), wanted)
    # And it can be converted again.
    config = gs.GradScaleConfig(margin_bits=7)
    assert gs.convert(stripped, config).config == config


def test_the_global_configuration_is_used_where_none_is_given():
    config = gs.GradScaleConfig(update_every=7)
    gs.set_global_policy("float32", config)
    assert gs.convert(functional()).config == config
    with gs.policy_scope("float32"):
        assert gs.convert(functional()).config == gs.GradScaleConfig()
    inputs = keras.Input((2,))
    assert gs.Model(inputs, layers.Dense(2)(inputs)).config == config
    assert gs.Sequential([inputs, layers.Dense(2)]).config == config


def test_nested_models_are_opened():
    converted = gs.convert(nested())
    gemms = [site.name for site in converted.scales if site.kind == "gemm"]
    # The last first, as backpropagation meets them; "inner" is called twice.
    assert gemms == [
        "tail/dense_1/input",
        "inner/dense/input",
        "inner/dense/input_1",
        "dense_2/input",
    ]


@pytest.mark.parametrize("training", [None, True, False])
def test_training_flags_count_as_under_keras(training):
    """What a call is told goes before what nested calls recorded; the outer of these first."""
    x = batch(functional())
    for outer, inner, own in itertools.product([None, True, False], repeat=3):

        def call(layer, x, recorded):
            return layer(x) if recorded is None else layer(x, training=recorded)

        inputs = [keras.Input((6,)) for _ in range(3)]
        model = keras.Model(inputs[0], call(layers.BatchNormalization(), inputs[0], own))
        model = keras.Model(inputs[1], call(model, inputs[1], inner))
        model = keras.Model(inputs[2], call(model, inputs[2], outer))
        converted = gs.convert(model)
        assert [step.name.count("/") for step in converted._region().graph().steps] == [2]
        state = model.get_weights()
        wanted = model(x, training=training)
        model.set_weights(state)
        np.testing.assert_array_equal(converted(x, training=training), wanted)


def test_a_sequential_model_can_grow():
    model = gs.Sequential([keras.Input((4,)), layers.Dense(3)])
    before = [site.name for site in model.scales]
    model.add(layers.Dense(2))
    assert [site.name for site in model.scales][-len(before) :] == before
    assert len(model.scales) == len(before) + 2
    assert model(np.ones((1, 4), "float32")).shape == (1, 2)


# --- Trailing activations ------------------------------------------------------------------------


def _softmax(x):
    return layers.Activation("softmax", dtype="float32")(layers.Dense(CLASSES)(x))


def _sigmoid(x):
    return layers.Activation("sigmoid", dtype="float32")(layers.Dense(CLASSES)(x))


def _inner(end):
    inner_input = keras.Input((5,), dtype=keras.config.dtype_policy().compute_dtype)
    return keras.Model(inner_input, end(inner_input))


HEADS = {
    "softmax_in_dense": (lambda x: layers.Dense(CLASSES, activation="softmax")(x), _softmax),
    "softmax_activation": (
        lambda x: layers.Activation("softmax")(layers.Dense(CLASSES)(x)),
        _softmax,
    ),
    "softmax_layer": (lambda x: layers.Softmax()(layers.Dense(CLASSES)(x)), _softmax),
    "softmax_op": (lambda x: keras.ops.softmax(layers.Dense(CLASSES)(x)), _softmax),
    "softmax_activation_op": (
        lambda x: keras.activations.softmax(layers.Dense(CLASSES)(x)),
        _softmax,
    ),
    "softmax_nested": (
        lambda x: _inner(lambda y: layers.Dense(CLASSES, activation="softmax")(y))(x),
        _softmax,
    ),
    "softmax_float32": (_softmax, _softmax),
    "sigmoid_in_dense": (lambda x: layers.Dense(CLASSES, activation="sigmoid")(x), _sigmoid),
    "sigmoid_activation": (
        lambda x: layers.Activation("sigmoid")(layers.Dense(CLASSES)(x)),
        _sigmoid,
    ),
    "sigmoid_op": (lambda x: keras.ops.sigmoid(layers.Dense(CLASSES)(x)), _sigmoid),
    "sigmoid_in_einsum": (
        lambda x: layers.EinsumDense("ab,bc->ac", CLASSES, activation="sigmoid", bias_axes="c")(x),
        _sigmoid,
    ),
}


def with_head(head):
    """A model that ends so, with weights that do not depend on how it ends."""
    inputs = keras.Input((6,))
    model = keras.Model(inputs, head(layers.Dense(5, activation="relu")(inputs)))
    rng = np.random.default_rng(1)
    # Large, so that a softmax in float16 would saturate.
    model.set_weights([4 * rng.standard_normal(w.shape) for w in model.get_weights()])
    return model


@pytest.mark.parametrize("name", HEADS)
def test_the_loss_is_that_of_a_float32_activation(name):
    gs.set_global_policy("mixed_float16")
    head, float32_head = HEADS[name]
    converted, reference = gs.convert(with_head(head)), with_head(float32_head)
    x = np.random.default_rng(0).standard_normal((16, 6)).astype("float32")
    y = np.eye(CLASSES, dtype="float32")[np.arange(16) % CLASSES]
    loss = "categorical_crossentropy" if "softmax" in name else "binary_crossentropy"
    for model in (converted, reference):
        # As a graph for two of them; the others eagerly, to save time.
        model.compile("sgd", loss, run_eagerly="in_dense" not in name)
    assert converted.train_on_batch(x, y) == reference.train_on_batch(x, y)


@pytest.mark.parametrize("name", HEADS)
def test_the_logits_are_kept_for_the_loss(name):
    gs.set_global_policy("mixed_float16")
    head, float32_head = HEADS[name]
    converted, reference = gs.convert(with_head(head)), with_head(float32_head)
    x = np.random.default_rng(0).standard_normal((4, 6)).astype("float32")
    logits = reference(x)._keras_logits
    output = converted(x)
    np.testing.assert_array_equal(output._keras_logits, tf.cast(logits, "float32"))
    np.testing.assert_array_equal(output, reference(x))


def test_an_activation_with_other_consumers_stays_inside():
    """Its output is used twice, so the loss may not work on its logits alone."""
    inputs = keras.Input((6,))
    attention = layers.Dense(4, activation="softmax")(inputs)
    model = keras.Model(inputs, [attention, layers.Dense(CLASSES)(attention)])
    x = np.random.default_rng(0).standard_normal((4, 6)).astype("float32")
    wanted = model(x)
    converted = gs.convert(model)
    assert same(converted(x), wanted)
    gradients = []
    for each in (model, converted):
        with tf.GradientTape() as tape:
            first, second = each(x)
            value = tf.reduce_sum(first[:, 0]) + tf.reduce_sum(second**2)
        gradients.append(tape.gradient(value, [v.value for v in model.trainable_variables]))
    for found, true in zip(*gradients, strict=True):
        np.testing.assert_allclose(found, true, rtol=1e-5, atol=1e-6)


# --- Masks ---------------------------------------------------------------------------------------

TOKENS = np.array([[1, 2, 3, 0, 0], [4, 0, 0, 0, 0], [5, 6, 1, 2, 3]])


def _mask_to_output(x):
    return layers.Dense(CLASSES)(layers.Dense(4, activation="relu")(x))


def _mask_to_softmax(x):
    return layers.Dense(CLASSES, activation="softmax")(x)


def _mask_to_lstm(x):
    return layers.LSTM(CLASSES, return_sequences=True)(layers.Dense(4)(x))


def _mask_to_attention(x):
    return layers.MultiHeadAttention(2, 4)(x, x)


def _mask_to_normalization(x):
    return layers.Dense(CLASSES)(layers.BatchNormalization()(x))


def _mask_through_branches(x):
    return layers.Dense(CLASSES)(layers.Add()([x, layers.LayerNormalization()(x)]))


def _mask_through_nested_model(x):
    inner_input = keras.Input((5, 4), dtype=keras.config.dtype_policy().compute_dtype)
    return layers.Dense(CLASSES)(keras.Model(inner_input, layers.Dense(4)(inner_input))(x))


def _mask_to_pooling(x):
    return layers.GlobalAveragePooling1D()(layers.Activation("tanh")(x))


MASKED = [
    _mask_to_output,
    _mask_to_softmax,
    _mask_to_lstm,
    _mask_to_attention,
    _mask_to_normalization,
    _mask_through_branches,
    _mask_through_nested_model,
    _mask_to_pooling,
]


# What Keras says when a Functional model is nested in a masked one; it passes the mask nonetheless.
no_warning = pytest.mark.filterwarnings("ignore:.*does not support masking:UserWarning")


@no_warning
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("make", MASKED)
def test_masks_reach_layers_and_outputs(make, policy):
    gs.set_global_policy(policy)
    inputs = keras.Input((5,), dtype="int32")
    plain = keras.Model(inputs, make(layers.Embedding(7, 4, mask_zero=True)(inputs)))
    converted = gs.convert(plain)
    state = plain.get_weights()
    wanted = plain(TOKENS, training=True)
    wanted_state = plain.get_weights()
    plain.set_weights(state)
    found = converted(TOKENS, training=True)
    if make is _mask_to_softmax:
        # In float16 plain Keras' softmax is another one.
        np.testing.assert_allclose(found, tf.cast(wanted, "float32"), atol=1e-3)
    else:
        np.testing.assert_array_equal(found, tf.cast(wanted, "float32"))
    assert same(plain.get_weights(), wanted_state)
    masks = [getattr(y, "_keras_mask", None) for y in (found, wanted)]
    assert (masks[0] is None) == (masks[1] is None)
    if masks[1] is not None:
        np.testing.assert_array_equal(*masks)


@pytest.mark.parametrize("make", [_mask_to_output, _mask_to_softmax])
def test_masked_steps_do_not_count_in_the_loss(make):
    inputs = keras.Input((5,), dtype="int32")
    plain = keras.Model(inputs, make(layers.Embedding(7, 4, mask_zero=True)(inputs)))
    converted = gs.convert(plain)
    y = np.random.default_rng(0).random((3, 5, CLASSES)).astype("float32")
    losses = []
    for model in (converted, plain):
        model.compile(keras.optimizers.SGD(0.0), "mse")
        losses.append(model.train_on_batch(TOKENS, y))
    true = np.square(plain.predict(TOKENS, verbose=0) - y).mean(-1)[TOKENS > 0].mean()
    assert losses[0] == losses[1] == pytest.approx(true, rel=1e-5)


@no_warning
def test_a_mask_that_is_passed_in_is_used():
    inputs = keras.Input((5, 4))
    plain = keras.Model(inputs, layers.LSTM(3)(inputs))
    converted = gs.convert(plain)
    x = np.random.default_rng(0).standard_normal((3, 5, 4)).astype("float32")
    mask = TOKENS > 0
    found = converted(x, mask=mask)
    np.testing.assert_array_equal(found, plain(x, mask=mask))
    assert not np.array_equal(found, converted(x))


# --- Files ---------------------------------------------------------------------------------------


def trained(build, config=None):
    """A converted model after three steps, and data for more."""
    gs.set_global_policy("mixed_float16")
    plain = build()
    model = gs.convert(plain, config)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    x = batch(plain)
    y = keras.tree.map_structure(np.zeros_like, model.predict(x, verbose=0))
    for _ in range(3):
        model.train_on_batch(x, y)
    return model, x, y


def without_dropout():
    """Keras does not save the state of its random generators."""
    model = functional()
    model.get_layer("dropout").rate = 0.0
    return model


@pytest.mark.parametrize("build", [without_dropout, sequential, several_inputs_and_outputs])
def test_keras_files_hold_everything(build, tmp_path):
    model, x, y = trained(build, gs.GradScaleConfig(update_every=5))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is type(model)
    assert loaded.config == model.config
    assert loaded.dtype_policy.name == "mixed_float16"
    assert [layer.name for layer in loaded.layers] == [layer.name for layer in model.layers]
    assert same(loaded.get_weights(), model.get_weights())
    assert str(loaded.scales) == str(model.scales)
    assert any(site.scale != 1 for site in loaded.scales)
    assert int(loaded.optimizer.applied_steps) == 3
    # Three passes on from here scales are chosen anew, from both models' counts.
    for _ in range(4):
        # Older versions of Keras report the mean over all calls.
        loaded.reset_metrics()
        model.reset_metrics()
        assert loaded.train_on_batch(x, y) == model.train_on_batch(x, y)
    assert same(loaded.get_weights(), model.get_weights())
    assert str(loaded.scales) == str(model.scales)


@pytest.mark.parametrize("build", [functional, sequential, nested])
def test_files_hold_each_weight_once(build, tmp_path):
    gs.set_global_policy("mixed_float16")
    plain = build()
    plain.save(tmp_path / "plain.keras")
    gs.convert(plain).save(tmp_path / "converted.keras")
    sizes = [(tmp_path / f"{name}.keras").stat().st_size for name in ("plain", "converted")]
    # The configuration is all that comes on top.
    assert 0 < sizes[1] - sizes[0] < 1500


@pytest.mark.parametrize("build", [functional, sequential, nested])
def test_weights_files_are_interchangeable(build, tmp_path):
    model, plain = gs.convert(build()), build()
    x = batch(plain)
    model.save_weights(tmp_path / "a.weights.h5")
    plain.load_weights(tmp_path / "a.weights.h5")
    assert same(plain.get_weights(), model.get_weights())
    wanted = plain.predict(x, verbose=0)
    plain.save_weights(tmp_path / "b.weights.h5")
    other = gs.convert(build())
    other.load_weights(tmp_path / "b.weights.h5")
    assert same(other.predict(x, verbose=0), wanted)


@keras.saving.register_keras_serializable(package="tests")
class Doubled(gs.Model):
    """A class of one's own, whose training step returns twice the loss."""

    def train_step(self, data):
        return {"doubled": 2 * super().train_step(data)["loss"]}


def test_a_subclass_is_saved_as_itself(tmp_path):
    inputs = keras.Input((4,))
    model = Doubled(inputs, layers.Dense(2)(inputs), config=gs.GradScaleConfig(margin_bits=6))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is Doubled
    assert loaded.config == gs.GradScaleConfig(margin_bits=6)
    clone = Doubled.from_config(model.get_config())
    assert type(clone) is Doubled
    assert clone.config == model.config


@pytest.mark.parametrize("build", [sequential, several_inputs_and_outputs])
def test_what_is_exported_is_the_plain_forward_graph(build, tmp_path):
    model, x, _ = trained(build)
    wanted = model.predict(x, verbose=0)
    model.export(tmp_path / "exported", verbose=False)
    reloaded = tf.saved_model.load(tmp_path / "exported")
    found = reloaded.serve(x)
    # A model with one input is exported with a flat list of outputs.
    pairs = zip(keras.tree.flatten(found), keras.tree.flatten(wanted), strict=True)
    assert all(np.array_equal(f, w) for f, w in pairs)
    graph = (tmp_path / "exported" / "saved_model.pb").read_bytes()
    assert b"CustomGradient" not in graph
    assert b"scales" not in graph


def test_scaled_models_inside_are_exported_plainly(tmp_path):
    inner = gs.Sequential([keras.Input((4,)), layers.Dense(4, activation="relu")])
    inputs = keras.Input((4,))
    model = gs.Model(inputs, layers.Dense(2)(inner(inputs)))
    x = np.ones((2, 4), "float32")
    model.export(tmp_path / "exported", verbose=False)
    reloaded = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_array_equal(reloaded.serve(x), model(x))
    assert b"CustomGradient" not in (tmp_path / "exported" / "saved_model.pb").read_bytes()
