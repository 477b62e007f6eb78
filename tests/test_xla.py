"""What XLA makes of a training step: conditions stay, and operations do not grow with depth."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs
from tf_gradscale.xla import ceil, computed_once, floor, hidden, is_finite, magnitude, materialized

layers = keras.layers


def test_both_leave_the_values_as_they_are():
    x = tf.constant([0.0, -1.5, np.nan, 2.0**-126, np.inf, 3e38, 7.0, -np.inf])
    half = tf.constant([0.0, -1.5, 2.0**-24, 65504.0], tf.float16)
    for jit in (False, True):
        found = tf.function(computed_once, jit_compile=jit)(x)
        np.testing.assert_array_equal(found, x)
        found = tf.function(materialized, jit_compile=jit)(half, tf.constant(1.0))
        np.testing.assert_array_equal(found, half)
    assert materialized(half, tf.constant(1.0)) is half


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_is_read_fast_has_the_same_values(run, dtype):
    most = np.finfo(dtype).max
    x = np.array([0.0, -0.0, 0.5, -0.5, 1.0, -1.5, 2.75, -1000.25, most, -most], dtype)
    extreme = np.append(x, [np.inf, -np.inf, np.nan, np.finfo(dtype).smallest_normal]).astype(dtype)
    cases = [(floor, np.floor, x), (ceil, np.ceil, x)]
    cases += [(magnitude, np.abs, extreme), (is_finite, np.isfinite, extreme)]
    for ours, numpys, values in cases:
        np.testing.assert_array_equal(run(ours)(tf.constant(values)), numpys(values))


def test_a_hidden_constant_is_no_constant():
    def add(x, one):
        return x + hidden(tf.constant([2.0, 3.0]), one)

    compiled = tf.function(add, jit_compile=True)
    arguments = tf.constant([1.0, 1.0]), tf.constant(1.0)
    np.testing.assert_array_equal(compiled(*arguments), [3.0, 4.0])
    assert "multiply" in compiled.experimental_get_compiler_ir(*arguments)(stage="optimized_hlo")


def stack(blocks):
    """A residual network of blocks with a normalisation and two products."""
    inputs = x = keras.Input((8, 16))
    for _ in range(blocks):
        y = layers.Dense(32, activation="relu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(16)(y)])
    return keras.Model(inputs, layers.Dense(4, activation="softmax")(x))


def compiled_step(blocks):
    """How many conditions a training step has, and XLA's program of it."""
    with gs.policy_scope("mixed_float16"):
        model = gs.convert(stack(blocks))
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=True)
    x, y = tf.ones([4, 8, 16]), tf.zeros([4, 8], tf.int32)
    step = tf.function(lambda x, y: model.train_step((x, y)), jit_compile=True)
    step(x, y)
    made = step.experimental_get_compiler_ir(x, y)(stage="optimized_hlo")
    # One a group, one for the operand of each product with a kernel, and one at the end.
    kernels = sum(len(layer.get_weights()) == 2 for layer in model.layers if "dense" in layer.name)
    return len(model.scales.groups) + kernels + 1, made


@pytest.fixture(scope="module")
def programs():
    return {blocks: compiled_step(blocks) for blocks in (2, 8)}


def test_statistics_stay_under_their_conditions(programs):
    # XLA replaces conditions that seem cheap by both of their branches, which would then run in
    # every step.
    for conditions, made in programs.values():
        assert len(re.findall(r" conditional\(", made)) == conditions


def test_no_operation_grows_with_the_depth(programs):
    longest = {}
    for blocks, (_, made) in programs.items():
        fused = re.findall(r"\n(%fused_computation[^\n]*\{\n.*?\n\})", made, re.DOTALL)
        lengths = sorted((len(text.splitlines()) for text in fused), reverse=True)
        # One looks at all gradients, whether they are finite; one makes the new vector.
        longest[blocks] = lengths[2]
    assert longest[8] <= longest[2] + 4


def graphs(function):
    """The graph of a concrete function and those of all functions that it calls, as definitions."""
    definition = function.graph.as_graph_def()
    return [definition.node, *(inner.node_def for inner in definition.library.function)]


@pytest.fixture(scope="module")
def traced():
    """A training step for XLA, of products with biases and normalisations, traced only."""
    with gs.policy_scope("mixed_float16"):
        inputs = x = keras.Input((8, 8, 3))
        for _ in range(3):
            x = layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same")(x))
        x = layers.GlobalAveragePooling2D()(x)
        model = gs.convert(keras.Model(inputs, layers.Dense(4)(x)))
    model.compile("sgd", "mse", jit_compile=True)
    x, y = tf.ones([2, 8, 8, 3]), tf.ones([2, 4])
    step = tf.function(lambda x, y: model.train_step((x, y)), jit_compile=True)
    return step.get_concrete_function(x, y)


def test_no_operation_is_long_to_read(traced):
    """Those that TensorFlow takes through another compiler, sixty times as long as the others."""
    # Keras' own batch normalisation takes an inverse square root.
    slow = {"Abs", "BiasAddGrad", "Ceil", "Exp", "Floor", "IsFinite", "Reciprocal", "Sqrt"}
    found = {node.op for nodes in graphs(traced) for node in nodes}
    assert not slow & found
    assert "XlaVariadicReduceV2" in found


def test_equal_layers_are_read_once(traced):
    """Nothing that goes into a condition is a constant, by which XLA would tell calls apart."""
    (graph, *_) = graphs(traced)
    nodes = {node.name: node for node in graph}

    def constant(name):
        node = nodes[name.split(":")[0].lstrip("^")]
        if node.op in ("Identity", "StopGradient"):
            return constant(node.input[0])
        return node.op == "Const"

    conditions = [node for node in graph if node.op == "StatelessIf" and len(node.input) > 4]
    assert len(conditions) >= 6
    # All but the first, which begins with α = 1.
    assert sum(any(map(constant, node.input)) for node in conditions) <= 1
