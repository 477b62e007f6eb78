"""What XLA makes of a training step: conditions stay, and operations do not grow with depth."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs
from tf_gradscale.fusion import computed_once, materialized

layers = keras.layers


def test_both_leave_the_values_as_they_are():
    x = tf.constant([0.0, -1.5, 2.0**-126, 3e38, 7.0])
    half = tf.constant([0.0, -1.5, 2.0**-24, 65504.0], tf.float16)
    for jit in (False, True):
        found = tf.function(computed_once, jit_compile=jit)(x)
        np.testing.assert_array_equal(found, x)
        found = tf.function(materialized, jit_compile=jit)(half, tf.constant(1.0))
        np.testing.assert_array_equal(found, half)
    assert materialized(half, tf.constant(1.0)) is half


def stack(blocks):
    """A residual network of blocks with a normalisation and two products."""
    inputs = x = keras.Input((8, 16))
    for _ in range(blocks):
        y = layers.Dense(32, activation="relu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(16)(y)])
    return keras.Model(inputs, layers.Dense(4, activation="softmax")(x))


def compiled_step(blocks):
    """The number of groups of sites, and XLA's program of a training step."""
    with gs.policy_scope("mixed_float16"):
        model = gs.convert(stack(blocks))
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=True)
    x, y = tf.ones([4, 8, 16]), tf.zeros([4, 8], tf.int32)
    step = tf.function(lambda x, y: model.train_step((x, y)), jit_compile=True)
    step(x, y)
    made = step.experimental_get_compiler_ir(x, y)(stage="optimized_hlo")
    return len(model.scales.groups), made


@pytest.fixture(scope="module")
def programs():
    return {blocks: compiled_step(blocks) for blocks in (2, 8)}


def test_statistics_stay_under_their_conditions(programs):
    # XLA replaces conditions that seem cheap by both of their branches, which would then run in
    # every step.
    for groups, made in programs.values():
        # One at the end of the pass as well.
        assert len(re.findall(r" conditional\(", made)) == groups + 1


def test_no_operation_grows_with_the_depth(programs):
    longest = {}
    for blocks, (_, made) in programs.items():
        fused = re.findall(r"\n(%fused_computation[^\n]*\{\n.*?\n\})", made, re.DOTALL)
        lengths = sorted((len(text.splitlines()) for text in fused), reverse=True)
        # One looks at all gradients, whether they are finite; one makes the new vector.
        longest[blocks] = lengths[2]
    assert longest[8] <= longest[2] + 4
