"""Scales are exact: on random graphs, forced ones change no bit of any gradient."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MODES
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from random_graphs import random_model

import tf_gradscale as gs

randoms = st.randoms(use_true_random=False)
seeds = st.integers(0, 2**32 - 1)
BATCH = 2
# An example takes seconds; to shrink a failing one would take minutes.
WITHOUT_SHRINKING = [Phase.generate]


class Problem:
    """A random model, the same one converted, and a random linear function of the outputs."""

    def __init__(self, random, seed, run, composites=False):
        self.rng, self.run = np.random.default_rng(seed), run
        self.plain = random_model(random, composites=composites)
        self.training = random.choice([True, False, None])
        for variable in self.plain.trainable_variables:
            variable.assign(variable + 0.3 * self.normal(variable.shape))
        self.inputs = [self.normal((BATCH, *x.shape[1:])) for x in self.plain.inputs]
        self.weights = [self.normal((BATCH, *y.shape[1:])) for y in self.plain.outputs]
        self.converted = gs.convert(self.plain)

    def normal(self, shape):
        return tf.constant(self.rng.standard_normal(shape), "float32")

    def evaluation(self, model):
        """A function without arguments: outputs; gradients of inputs and variables."""
        variables = [v.value for v in model.trainable_variables]

        @self.run
        def evaluate(inputs):
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                outputs = keras.tree.flatten(model(inputs, training=self.training))
                outputs = [tf.cast(y, "float32") for y in outputs]
                pairs = zip(outputs, self.weights, strict=True)
                value = sum(tf.reduce_sum(y * w) for y, w in pairs)
                value += sum(tf.cast(loss, "float32") for loss in model.losses)
            return outputs, tape.gradient(value, [*inputs, *variables])

        return lambda: [
            [None if g is None else tf.convert_to_tensor(g).numpy() for g in part]
            for part in evaluate(self.inputs)
        ]

    def force(self, binades):
        """Forces random local scales whose binades add up to so many, in absolute value."""
        sites = len(self.converted.scales)
        if sites:
            shares = self.rng.multinomial(binades, self.rng.dirichlet(np.ones(sites)))
            log2 = shares * self.rng.choice([-1, 1], sites)
            self.converted.scales.freeze(lambda site: 2.0 ** int(log2[site.index]))


def distance(found, wanted):
    """The largest error of a gradient (L2), relative to its norm and a tenth of the largest one.

    Some true gradients are zero, such as that of a bias before a normalisation: what is found
    then is rounding of the others.
    """
    assert [g is None for g in found] == [g is None for g in wanted]
    pairs = [(f, w) for f, w in zip(found, wanted, strict=True) if w is not None]
    largest = max(np.linalg.norm(w) for _, w in pairs)
    return max(
        np.linalg.norm(f - w) / (np.linalg.norm(w) + 0.1 * largest + 1e-30) for f, w in pairs
    )


def check_float32(random, seed, run, composites=False):
    problem = Problem(random, seed, run, composites)
    state = problem.plain.get_weights()
    plain_outputs, plain = problem.evaluation(problem.plain)()
    plain_state = problem.plain.get_weights()
    problem.plain.set_weights(state)
    evaluate = problem.evaluation(problem.converted)
    problem.converted.scales.freeze(lambda site: 1.0)
    outputs, unscaled = evaluate()
    # Moving statistics too: what is called twice runs in Keras' own order.
    outputs += problem.plain.get_weights()
    for found, wanted in zip(outputs, plain_outputs + plain_state, strict=True):
        if run is MODES["xla"] or (composites and run is MODES["graph"]):
            # Two programs, which are fused differently (in graphs, those of unrolled loops).
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(found, wanted)
    assert distance(unscaled, plain) < 1e-5
    for _ in range(1 if run is MODES["eager"] else 3):
        problem.force(60)
        for scaled, one in zip(evaluate()[1], unscaled, strict=True):
            np.testing.assert_array_equal(scaled, one)


@given(randoms, seeds)
@settings(max_examples=16, phases=WITHOUT_SHRINKING)
def test_forced_scales_change_no_bit_eager(random, seed):
    check_float32(random, seed, MODES["eager"])


@given(randoms, seeds)
@settings(max_examples=8, phases=WITHOUT_SHRINKING)
def test_forced_scales_change_no_bit_graph(random, seed):
    check_float32(random, seed, MODES["graph"])


@given(randoms, seeds)
@settings(max_examples=4, phases=WITHOUT_SHRINKING)
def test_forced_scales_change_no_bit_xla(random, seed):
    check_float32(random, seed, MODES["xla"])


@pytest.mark.parametrize(("mode", "examples"), [("eager", 10), ("graph", 5), ("xla", 3)])
def test_forced_scales_change_no_bit_in_composites(mode, examples):
    """Attention, recurrent layers, layers made of layers, layers that add losses."""

    @given(randoms, seeds)
    @settings(max_examples=examples, phases=WITHOUT_SHRINKING)
    def check(random, seed):
        check_float32(random, seed, MODES[mode], composites=True)

    check()


@pytest.mark.slow
@given(randoms, seeds)
@settings(max_examples=30, phases=WITHOUT_SHRINKING)
def test_forced_scales_change_no_bit_in_many_composites(run, random, seed):
    check_float32(random, seed, run, composites=True)


@pytest.mark.slow
@given(randoms, seeds)
@settings(max_examples=50, phases=WITHOUT_SHRINKING)
def test_forced_scales_change_no_bit_in_many_graphs(run, random, seed):
    check_float32(random, seed, run)


@given(randoms, seeds)
@settings(max_examples=4, phases=WITHOUT_SHRINKING)
def test_forced_scales_in_float16(random, seed):
    """Moderate ones: the same values but for a few subnormal ones; plain autodiff's too."""
    gs.set_global_policy("mixed_float16")
    problem = Problem(random, seed, MODES["graph"])
    _, plain = problem.evaluation(problem.plain)()
    evaluate = problem.evaluation(problem.converted)
    problem.converted.scales.freeze(lambda site: 1.0)
    _, unscaled = evaluate()
    assert distance(unscaled, plain) < 1e-2
    for _ in range(3):
        problem.force(6)
        assert distance(evaluate()[1], unscaled) < 1e-4
