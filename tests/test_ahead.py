"""What is measured in the forward pass: what XLA then keeps, and the passes that begin together."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_xla import graphs

import tf_gradscale as gs
from tf_gradscale.xla import product_operand

layers = keras.layers
X = np.random.default_rng(0).standard_normal((8, 6, 6, 3)).astype("float32")
Y = np.random.default_rng(1).standard_normal((8, 2)).astype("float32")


def network(**config):
    """Products of activations of rank 4, of different sizes, and one of rank 2."""
    with gs.policy_scope("mixed_float16"):
        model = keras.Sequential(
            [
                keras.Input(X.shape[1:]),
                layers.Conv2D(4, 3, activation="relu", name="a"),
                layers.DepthwiseConv2D(2, depth_multiplier=2, activation="relu", name="b"),
                layers.Conv2D(5, 2, activation="relu", name="c"),
                layers.GlobalAveragePooling2D(),
                layers.Dense(2, name="d"),
            ]
        )
        return gs.convert(model, gs.GradScaleConfig(**config))


def loss_of(model, multiplier=1.0, training=True):
    return multiplier * tf.reduce_mean(tf.square(model(X, training=training) - Y))


def gradients(model, multiplier=1.0):
    with tf.GradientTape() as tape:
        loss = loss_of(model, multiplier)
    return tape.gradient(loss, [v.value for v in model.trainable_variables])


@pytest.fixture(scope="module")
def step():
    """A training step for XLA, traced only."""
    model = network()
    return tf.function(lambda: gradients(model), jit_compile=True).get_concrete_function()


def conditions(graph):
    return [op for op in graph.get_operations() if op.type == "StatelessIf"]


def test_no_condition_keeps_an_activation_for_the_backward_pass(step):
    """One that reads a gradient reads no activation: XLA would keep it until then."""
    large = [
        [x for x in op.inputs if x.shape.rank == 4 and x.shape[0] == len(X)]
        for op in conditions(step.graph)
    ]
    # Three products of rank 4 in each direction, the gradient that is cast, the pooling's trial.
    assert sum(map(len, large)) >= 6
    assert max(map(len, large)) == 1


def test_a_product_waits_for_what_is_measured_of_its_operand(step):
    """Or XLA would measure it when the backward pass asks for it."""

    def ancestors(op, found):
        for x in op.inputs:
            if x.op not in found:
                found.add(x.op)
                ancestors(x.op, found)
        return found

    kinds = ("Conv2D", "DepthwiseConv2dNative", "MatMul")
    products = [op for op in step.graph.get_operations() if op.type in kinds][:4]
    assert [op.type for op in products] == [kinds[0], kinds[1], kinds[0], kinds[2]]
    for i, op in enumerate(products):
        kernel = op.inputs[1].op
        waits = [c for c in ancestors(kernel, {kernel}) if c.type == "StatelessIf"]
        # For its own, which waits for those before.
        assert len(waits) == i + 1


def test_the_operand_is_measured_as_the_product_has_it():
    x = tf.constant([1.0, 2.0], tf.float16)
    wanted = "float16" if tf.config.list_physical_devices("GPU") else "float32"
    assert product_operand(x).dtype == wanted
    np.testing.assert_array_equal(product_operand(x), x)


@pytest.mark.parametrize("training", [False, True])
def test_nothing_is_measured_without_a_tape(training):
    model = network()
    function = tf.function(lambda: loss_of(model, training=training), jit_compile=True)
    nodes = [node for nodes in graphs(function.get_concrete_function()) for node in nodes]
    assert not [node for node in nodes if node.op == "StatelessIf"]


def test_scales_are_those_of_other_modes(run):
    """Chosen in the pass that measures; a pass later, they are read, whatever X is."""
    models = network(), network()
    models[1].set_weights(models[0].get_weights())
    for _ in range(2):
        wanted = gradients(models[0])
        found = run(lambda: gradients(models[1]))()
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4)
    first, second = (model.scales for model in models)
    np.testing.assert_array_equal(second.local(), first.local())
    assert np.ptp(second.local()) > 0


@pytest.mark.parametrize("calls", [2, 3])
def test_passes_that_begin_together(run, calls):
    """Where several calls of a model are one step, not every number comes up at a beginning."""
    model = network(update_every=5)

    @run
    def step(multiplier):
        with tf.GradientTape() as tape:
            loss = tf.add_n([loss_of(model, multiplier) for _ in range(calls)])
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    wanted = gradients(network_like(model))
    late, exponents = 0, []
    for i in range(12):
        found = step(tf.constant(2.0**-i))
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a * 2.0**i / calls, b, rtol=5e-3, atol=1e-3)
        exponents.append(np.log2(model.scales["d/kernel"].cumulative_scale))
        late = 0 if exponents[-1] == exponents[0] + i else late + 1
        assert late <= 5 // calls + 1
    assert int(model.scales.variables[2]) == 12 * calls


def network_like(model):
    other = network()
    other.set_weights(model.get_weights())
    return other


def test_frozen_while_a_pass_is_on_its_way():
    """A forward pass that is compiled, and the rest not: nothing is measured ahead."""
    model = network()
    wanted = gradients(network_like(model))
    forward = tf.function(lambda: loss_of(model), jit_compile=True)
    for i in range(3):
        with tf.GradientTape() as tape:
            loss = forward()
        if i == 2:
            model.scales.freeze(lambda site: 2.0 if site.name == "c/kernel" else 1.0)
        found = tape.gradient(loss, [v.value for v in model.trainable_variables])
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=5e-3, atol=1e-3)
    assert {site.scale for site in model.scales} == {1.0, 2.0}


def test_an_input_that_is_watched_is_enough():
    """A model none of whose weights is trained, of which the input's gradient is asked for."""
    model = network()
    model.trainable = False
    x = tf.constant(X)

    def input_gradient(model):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(tf.square(model(x) - Y))
        return tape.gradient(loss, x)

    wanted = input_gradient(network_like(model))
    found = tf.function(lambda: input_gradient(model), jit_compile=True)()
    np.testing.assert_allclose(found, wanted, rtol=5e-3, atol=1e-4)
    assert np.max(np.abs(found)) > 0
