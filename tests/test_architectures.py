"""Right gradients in architectures of all kinds: as near float32's as float16 can be."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import TINY, Threefold, build_all, error, linear, normal
from conftest import MODES
from keras import ops

import tf_gradscale as gs

layers = keras.layers
slow = pytest.mark.slow
VECTORS = normal((8, 6), 1)
SEQUENCES = normal((4, 5, 6), 2)

# --- Recurrent -----------------------------------------------------------------------------------

# Of four, two, five and one steps.
PADDED = SEQUENCES * (np.arange(5) < np.array([[4], [2], [5], [1]])).astype("float32")[..., None]


class Cell(layers.Layer):
    """A recurrent cell of one's own, with two states."""

    state_size = (4, 3)
    output_size = 3

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")
        self.out = layers.Dense(3)
        self.out.build((None, 4))

    def call(self, x, states):
        h = ops.tanh(ops.matmul(x, self.kernel) + 0.5 * states[0])
        y = self.out(h) + ops.sigmoid(states[1])
        return y, (h, y)


def of_two_cells(x):
    return layers.RNN(layers.StackedRNNCells([layers.GRUCell(4), layers.LSTMCell(3)]))(x)


def films(x):
    y = layers.ConvLSTM1D(2, 3, padding="same")(layers.Reshape((5, 6, 1))(x))
    return layers.Flatten()(y)


def from_states(x):
    """One layer begins where the other ended."""
    y, h, c = layers.LSTM(4, return_sequences=True, return_state=True)(x)
    return layers.LSTM(4, return_sequences=True)(y, initial_state=[h, c]), h


RECURRENT = {
    "SimpleRNN": lambda x: layers.SimpleRNN(4)(x),
    "LSTM": lambda x: layers.LSTM(4, return_sequences=True)(x),
    "LSTM_unrolled": lambda x: layers.LSTM(4, unroll=True)(x),
    "GRU": lambda x: layers.GRU(4)(x),
    "GRU_reset_before": lambda x: layers.GRU(4, reset_after=False, go_backwards=True)(x),
    "ConvLSTM1D": films,
    "Bidirectional": lambda x: layers.Bidirectional(layers.GRU(3, return_sequences=True))(x),
    "TimeDistributed": lambda x: layers.TimeDistributed(layers.Dense(4, activation="relu"))(x),
    "two_cells": of_two_cells,
    "own_cell": lambda x: layers.RNN(Cell(), return_sequences=True)(x),
    "LSTM_states": lambda x: layers.LSTM(4, return_sequences=True, return_state=True)(x),
    "GRU_states": lambda x: layers.GRU(4, return_state=True)(x),
    "from_states": from_states,
    "masked_LSTM": lambda x: layers.LSTM(4, return_sequences=True)(x),
    "masked_Bidirectional": lambda x: layers.Bidirectional(layers.LSTM(3))(x),
    "masked_states": lambda x: layers.GRU(4, return_state=True)(x),
}


# XLA takes five to fifteen seconds to compile one.
FAST = {("GRU", "xla"), *((name, "eager") for name in RECURRENT)}
FAST |= {(name, "graph") for name in ("LSTM", "ConvLSTM1D", "own_cell", "masked_Bidirectional")}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if (name, mode) in FAST else slow)
        for name in RECURRENT
        for mode in MODES
    ],
)
def test_recurrent_layers(name, mode):
    def build():
        inputs = x = keras.Input((5, 6))
        if name.startswith("masked"):
            x = layers.Masking()(x)
        x = layers.Dense(6, activation="tanh")(x)
        *states, y = reversed(keras.tree.flatten(RECURRENT[name](x)))
        return keras.Model(inputs, [*states, layers.Dense(3)(y)])

    batch = PADDED if name.startswith("masked") else SEQUENCES
    Threefold(build, batch).check(MODES[mode], plain_run=MODES[mode])


def operations(graph):
    """Kinds of all operations of a graph, and those within its while loops."""
    definition = graph.as_graph_def()
    functions = {f.signature.name: f.node_def for f in definition.library.function}
    kinds, in_loops = [], []

    def collect(nodes, looped):
        for node in nodes:
            (in_loops if looped else kinds).append(node.op)
            for value in node.attr.values():
                for name in [value.func.name, *(f.name for f in value.list.func)]:
                    if name:
                        inside = looped or node.op in ("While", "StatelessWhile")
                        collect(functions[name], inside)

    collect(definition.node, False)
    return kinds, in_loops


def test_nothing_is_written_within_a_loop():
    """Scales are chosen once a pass, not once for each element of a sequence."""

    def build():
        inputs = keras.Input((5, 6))
        x = layers.Bidirectional(layers.LSTM(4, return_sequences=True, dropout=0.2))(inputs)
        return keras.Model(inputs, layers.Dense(3)(layers.RNN(Cell())(x)))

    _, plain, ours = build_all(build)
    found = {}
    for model in (plain, ours):

        @tf.function
        def step(x, model=model):
            with tf.GradientTape() as tape:
                value = linear(model, x)
            return tape.gradient(value, [v.value for v in model.trainable_variables])

        found[model] = operations(step.get_concrete_function(SEQUENCES).graph)
    kinds, in_loops = found[ours]
    assert "AssignVariableOp" in kinds and "TensorListPopBack" in in_loops
    writes = [kind for kind in in_loops if kind.startswith("Assign")]
    assert writes == [kind for kind in found[plain][1] if kind.startswith("Assign")] == []


# --- Embeddings ----------------------------------------------------------------------------------

WORDS = 7
TOKENS = np.random.default_rng(0).integers(0, WORDS, (6, 5)).astype("int32")


class Tied(layers.Layer):
    """An embedding that also gives the logits."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = layers.Embedding(WORDS, 6)
        self.dense = layers.Dense(6, activation="tanh")

    def call(self, tokens):
        h = self.dense(self.embedding(tokens))
        return ops.matmul(h, ops.transpose(self.embedding.embeddings))


class Widened(Tied):
    """The same; the kernel is rounded to float16 first, and the product is in float32."""

    def call(self, tokens):
        h = ops.cast(self.dense(self.embedding(tokens)), "float32")
        return ops.matmul(h, ops.transpose(ops.cast(self.embedding.embeddings, "float32")))


def reversible(**options):
    def make(tokens):
        embedding = layers.ReversibleEmbedding(WORDS, 6, **options)
        x = layers.Dense(6, activation="tanh")(embedding(tokens))
        return embedding(x, reverse=True)

    return make


EMBEDDINGS = {
    "single": lambda tokens: layers.Dense(3)(layers.Embedding(WORDS, 6)(tokens)),
    "tied": lambda tokens: Tied()(tokens),
    "tied_in_float32": lambda tokens: Widened()(tokens),
}
# Newer than the oldest Keras.
if hasattr(layers, "ReversibleEmbedding"):
    EMBEDDINGS |= {
        "reversible": reversible(),
        "reversible_in_float32": reversible(reverse_dtype="float32"),
        "reversible_not_tied": reversible(tie_weights=False),
        "reversible_capped": reversible(logit_soft_cap=3.0),
    }


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings(name):
    def build():
        inputs = keras.Input((5,), dtype="int32")
        return keras.Model(inputs, EMBEDDINGS[name](inputs))

    threefold = Threefold(build, TOKENS)
    threefold.check()
    # What is sparse under Keras stays so.
    kinds = {}
    for model in (threefold.true, threefold.ours):
        threefold.gradients(model, lambda step: step)()
        kinds[model] = [type(gradient) for gradient in threefold.raw]
    assert kinds[threefold.ours] == kinds[threefold.true]
    tied = name not in ("single", "reversible_not_tied")
    assert (tf.IndexedSlices in kinds[threefold.ours]) != tied


@pytest.mark.parametrize("multiplier", [1.0, TINY, 2.0**20])
def test_gradients_of_equal_tokens_are_added_in_float32(run, multiplier):
    """In float16 their sum would overflow at a scale that suits them, and ends at 2048 of them."""
    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((4096,), dtype="int32")
        model = gs.Model(inputs, layers.Embedding(3, 2)(inputs))
    tokens = np.ones((1, 4096), "int32")
    tokens[0, :3] = 0

    @run
    def gradient(tokens):
        with tf.GradientTape() as tape:
            value = multiplier * tf.reduce_sum(model(tokens) * [1.0, 3.0])
        return tape.gradient(value, model.trainable_variables[0].value)

    found = gradient(tf.constant(tokens))
    assert isinstance(found, tf.IndexedSlices) and found.dtype == tf.float32
    wanted = multiplier * np.outer([3, 4093, 0], [1.0, 3.0])
    np.testing.assert_array_equal(tf.convert_to_tensor(found), wanted)


# --- One tensor, one weight, used twice ----------------------------------------------------------

TWICE = {
    "Add": lambda x: layers.Add()([x, x]),
    "Multiply": lambda x: layers.Multiply()([x, x]),
    "Concatenate": lambda x: layers.Concatenate()([x, x, x]),
    "Dot": lambda x: layers.Dot((2, 2))([x, x]),
    "power": lambda x: x * x - 0.5 * x,
    "matmul": lambda x: ops.matmul(x, ops.transpose(x, (0, 2, 1))),
    "einsum": lambda x: ops.einsum("bij,bkj->bik", x, x),
    "Attention": lambda x: layers.Attention()([x, x]),
    "Attention_scaled": lambda x: layers.Attention(use_scale=True, score_mode="concat")([x, x, x]),
    "AdditiveAttention": lambda x: layers.AdditiveAttention()([x, x]),
    "MultiHeadAttention": lambda x: layers.MultiHeadAttention(2, 3)(x, x, x),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_tensor_used_twice_by_one_operation(name):
    def build():
        inputs = keras.Input((5, 6))
        return keras.Model(inputs, layers.Dense(3)(TWICE[name](layers.Dense(6)(inputs))))

    Threefold(build, SEQUENCES).check()


@pytest.mark.parametrize("activation", ["tanh", "softmax"])
def test_an_output_that_is_an_inner_tensor_too(activation):
    def build():
        inputs = keras.Input((6,))
        x = layers.Dense(6, activation=activation)(inputs)
        y = layers.Dense(3)(x)
        return keras.Model(inputs, {"inner": x, "last": y, "again": y})

    Threefold(build, VECTORS).check()


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_weights_shared_by_two_models(run):
    """Each has scales of its own; the gradients of what they share are added."""

    def build():
        shared = layers.Dense(6, activation="tanh")
        models = []
        for width in (6, 4):
            inputs = keras.Input((width,))
            x = inputs if width == 6 else layers.Dense(6)(inputs)
            models.append(keras.Model(inputs, layers.Dense(3)(shared(x))))
        return models

    keras.utils.set_random_seed(7)
    true = build()
    with gs.policy_scope("mixed_float16"):
        ours = [gs.convert(model) for model in build()]
    found = []
    for models in (true, ours):
        for model, reference in zip(models, true, strict=True):
            model.set_weights(reference.get_weights())
        first, second = models
        variables = [v.value for v in {id(v): v for m in models for v in m.variables}.values()]

        def step(first=first, second=second, variables=variables):
            with tf.GradientTape() as tape:
                value = linear(first, VECTORS) + 2.0**-9 * linear(second, VECTORS[:, :4])
                value *= TINY
            return tape.gradient(value, variables)

        found.append([g.numpy() for g in run(step)()])
    assert len({id(v) for model in ours for v in model.variables}) == 8
    assert max(error(found[1], found[0])) < 2e-3
    scales = [model.scales["output"].scale for model in ours]
    assert scales[1] == 2.0**9 * scales[0]


def test_adversarial_examples():
    """The sign of a tiny gradient with respect to the inputs."""

    def build():
        inputs = keras.Input((6,))
        x = layers.Dense(16, activation="relu")(inputs)
        return keras.Model(inputs, layers.Dense(3, activation="softmax")(x))

    labels = np.arange(8) % 3
    crossentropy = keras.losses.SparseCategoricalCrossentropy()
    losses, moves = [], []
    for model in build_all(build):
        x = tf.constant(VECTORS)
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = 1e-6 * crossentropy(labels, model(x))
        moves.append(np.sign(tape.gradient(value, x)))
        with gs.policy_scope("float32"):
            adversarial = VECTORS + 0.3 * moves[-1]
        losses.append(float(crossentropy(labels, model(adversarial))))
    agreement = [np.mean(move == moves[0]) for move in moves]
    assert agreement[1] < 0.9 and agreement[2] > 0.98
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-2)


# --- Normalisation, noise and augmentation -------------------------------------------------------


def raised(x):
    return tf.nn.silu(x) * x


class Rematerialized(layers.Layer):
    """Runs two of its layers once more in the backward pass."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense, self.norm = layers.Dense(6, activation="tanh"), layers.LayerNormalization()

    def call(self, x):
        return keras.remat(lambda x: self.norm(self.dense(x)))(x)


def in_remat_scope(x):
    with keras.RematScope("full"):
        dense, norm = layers.Dense(6, activation="tanh"), layers.LayerNormalization()
    return norm(dense(x))


class Widening(layers.Layer):
    """Calls TensorFlow itself; what it computes in float16 it returns in float32."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")

    def call(self, x):
        y = tf.matmul(x, tf.cast(self.kernel, x.dtype))
        return tf.cast(y, tf.float32), tf.cast(tf.reduce_sum(y, -1, keepdims=True), tf.float32)


OTHERS = {
    "float32_outputs": lambda x: layers.Concatenate(dtype="float32")(Widening()(x)),
    "UnitNormalization": lambda x: layers.UnitNormalization()(x),
    "RMSNormalization": lambda x: layers.RMSNormalization()(x),
    "SpectralNormalization": lambda x: layers.SpectralNormalization(layers.Dense(5))(x),
    "Masking": lambda x: layers.Masking()(x),
    "Lambda": lambda x: layers.Lambda(raised)(x),
    "Rescaling": lambda x: layers.Rescaling(1 / 255, offset=0.3)(x),
    "cumsum_in_float32": lambda x: ops.cumsum(x, axis=1, dtype="float32"),
    "remat": lambda x: Rematerialized()(x),
    "RematScope": in_remat_scope,
}


@pytest.mark.filterwarnings("ignore:Layer '.*' is differentiated as one operation")
@pytest.mark.parametrize("name", OTHERS)
def test_other_layers(name):
    def build():
        inputs = keras.Input((5, 6))
        return keras.Model(inputs, layers.Dense(3)(OTHERS[name](layers.Dense(6)(inputs))))

    # Plain Keras fails in float16 where it runs a layer once more.
    Threefold(build, SEQUENCES).check(bound=5e-3 if "emat" in name else None)


NOISE = {
    "Dropout": lambda: layers.Dropout(0.4),
    "SpatialDropout1D": lambda: layers.SpatialDropout1D(0.4),
    "AlphaDropout": lambda: layers.AlphaDropout(0.4),
    "GaussianDropout": lambda: layers.GaussianDropout(0.4),
    "GaussianNoise": lambda: layers.GaussianNoise(0.4),
}


@pytest.mark.parametrize("name", NOISE)
def test_noise_is_the_same_as_under_keras(name):
    def build():
        inputs = keras.Input((5, 6))
        x = NOISE[name]()(layers.Dense(6)(inputs))
        return keras.Model(inputs, layers.Dense(3)(NOISE[name]()(x)))

    _, plain, ours = build_all(build)
    seen = []
    for _ in range(2):
        seen.append(ours(SEQUENCES, training=True).numpy())
        wanted = plain(SEQUENCES, training=True)
        np.testing.assert_array_equal(seen[-1], tf.cast(wanted, tf.float32))
    assert not np.array_equal(*seen)


IMAGES = normal((2, 6, 6, 2), 3)
AUGMENTATION = {
    "Resizing": lambda: layers.Resizing(8, 8),
    "RandomFlip": lambda: layers.RandomFlip(),
    "RandomRotation": lambda: layers.RandomRotation(0.1),
    "RandomZoom": lambda: layers.RandomZoom(0.2),
}


@pytest.mark.parametrize("place", ["first", "between"])
@pytest.mark.parametrize("name", AUGMENTATION)
def test_augmentation_within_a_model(name, place):
    def build():
        inputs = x = keras.Input((6, 6, 2))
        if place == "between":
            x = layers.Conv2D(2, 1)(x)
        return keras.Model(inputs, layers.Conv2D(2, 3)(AUGMENTATION[name]()(x)))

    def loss(model, x):
        # Not in training: each precision would augment in its own way.
        y = tf.cast(model(x, training=False), tf.float32)
        return tf.reduce_sum(y * normal(y.shape, 50))

    threefold = Threefold(build, IMAGES, loss=loss)
    threefold.check()
    if place == "between":
        return
    model, target = threefold.ours, normal((2, *threefold.ours.output_shape[1:]), 4)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    losses = model.fit(IMAGES, target, epochs=3, verbose=0).history["loss"]
    assert np.all(np.isfinite(losses)) and len(set(losses)) == 3
    assert int(model.optimizer.applied_steps) == 3


# --- Gradients of gradients, and at other weights ------------------------------------------------


def critic():
    inputs = keras.Input((6,))
    x = layers.Dense(8, activation="tanh")(inputs)
    x = layers.LayerNormalization()(x)
    return keras.Model(inputs, layers.Dense(1)(layers.Dense(8, activation="softplus")(x)))


def penalty(model, x):
    """How far the norms of the gradients with respect to the inputs are from one."""
    variables = [v.value for v in model.trainable_variables]
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = tf.reduce_sum(model(x, training=True))
        norms = tf.norm(tape.gradient(value, x), axis=1)
        distance = tf.reduce_mean((norms - 1.0) ** 2)
    return [g for g in outer.gradient(distance, variables) if g is not None]


def sharpness_aware(model, x):
    """Gradients at weights that are a step uphill (Foret et al., ICLR 2021)."""
    variables = model.trainable_variables

    def gradients():
        with tf.GradientTape() as tape:
            loss = 1e-6 * tf.reduce_mean((model(x, training=True) - 1.0) ** 2)
        return tape.gradient(loss, [v.value for v in variables])

    uphill = gradients()
    moves = [0.2 * g / tf.linalg.global_norm(uphill) for g in uphill]
    for variable, move in zip(variables, moves, strict=True):
        variable.assign_add(move)
    found = gradients()
    for variable, move in zip(variables, moves, strict=True):
        variable.assign_sub(move)
    return uphill + found


@pytest.mark.parametrize("mode", ["eager", "graph", pytest.param("xla", marks=slow)])
@pytest.mark.parametrize(("policy", "bound"), [("float32", 1e-5), ("mixed_float16", 3e-2)])
@pytest.mark.parametrize("step", [penalty, sharpness_aware])
def test_gradients_of_gradients_and_at_other_weights(run, step, policy, bound):
    true = critic()
    with gs.policy_scope(policy):
        ours = gs.convert(critic())
    ours.set_weights(true.get_weights())
    wanted = [g.numpy() for g in step(true, VECTORS)]
    found = [g.numpy() for g in run(lambda x: step(ours, x))(VECTORS)]
    assert len(wanted) >= 5
    assert max(error(found, wanted)) < bound
    np.testing.assert_allclose(ours.get_weights()[0], true.get_weights()[0], atol=1e-6)


# --- Sparse inputs -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("multiplier", [1.0, 1e-6])
def test_sparse_inputs(run, multiplier):
    """The layer that takes them is run by Keras; those behind it are scaled as ever."""
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((16, 8)) * (rng.random((16, 8)) < 0.4)
    x, y = tf.sparse.from_dense(tf.constant(dense, tf.float32)), np.arange(16) % 3
    found = []
    for policy, convert in (("float32", lambda model: model), ("mixed_float16", gs.convert)):
        keras.utils.set_random_seed(0)
        with gs.policy_scope(policy):
            inputs = keras.Input((8,), sparse=True)
            hidden = layers.Dense(6, activation="tanh")(inputs)
            model = convert(keras.Model(inputs, layers.Dense(3, activation="softmax")(hidden)))

        def gradients(x, model=model):
            with tf.GradientTape() as tape:
                loss = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True))
                loss = multiplier * tf.reduce_mean(loss)
            made = tape.gradient(loss, model.trainable_variables)
            return [tf.convert_to_tensor(g) for g in made]

        found.append([g.numpy() / multiplier for g in run(gradients)(x)])
    assert {"dense_1/input", "dense_1/kernel"} <= {
        site.name.replace("dense_3", "dense_1") for site in model.scales
    }
    for true, ours in zip(*found, strict=True):
        assert np.linalg.norm(ours - true) < 5e-3 * np.linalg.norm(true)


def test_a_model_with_sparse_inputs_is_diagnosed(capsys):
    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((8,), sparse=True)
        model = gs.convert(keras.Model(inputs, layers.Dense(3)(inputs)))
    model.compile("sgd", "mse", jit_compile=False)
    x = tf.sparse.from_dense(tf.eye(8))
    model.fit(
        tf.data.Dataset.from_tensor_slices((x, tf.ones((8, 3)))).batch(4), verbose=0, shuffle=False
    )
    assert gs.diagnose(model, x, tf.ones((8, 3))).fault is None
