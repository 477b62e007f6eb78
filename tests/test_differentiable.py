"""Functions with a gradient of their own: who differentiates them, and what stays behind."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs
from tf_gradscale.differentiable import differentiable

X = tf.constant([1.0, 2.0, 3.0])


class Owner:
    pass


OWNER = Owner()


def tripled(x, weight=None, owner=OWNER):
    """2x (plus w²), whose gradients are taken to be 3 ∇Y and 5 ∇Y."""

    def function(x):
        y = 2.0 * x
        if weight is not None:
            y += weight * weight

        def gradient(upstream, variables):
            (dy,) = upstream
            return [3.0 * dy], [5.0 * dy for _ in variables]

        return [y], gradient

    return differentiable(function, [x], owner)[0]


def test_the_gradient_is_the_one_given(run):
    weight = tf.Variable(tf.ones([3]))

    @run
    def step():
        with tf.GradientTape() as tape:
            tape.watch(X)
            y = tripled(X, weight)
        return y, tape.gradient(y, [X, weight], output_gradients=X)

    y, (dx, dw) = step()
    np.testing.assert_array_equal(y, [3, 5, 7])
    np.testing.assert_array_equal(dx, [3, 6, 9])
    np.testing.assert_array_equal(dw, [5, 10, 15])


def test_a_tape_around_a_finished_function():
    weight = tf.Variable(tf.ones([3]))
    function = tf.function(lambda x: tripled(x, weight) ** 2, autograph=False)
    with tf.GradientTape() as tape:
        tape.watch(X)
        value = tf.reduce_sum(function(X))
    dx, dw = tape.gradient(value, [X, weight])
    np.testing.assert_array_equal(dx, 3 * 2 * np.array([3, 5, 7]))
    np.testing.assert_array_equal(dw, 5 * 2 * np.array([3, 5, 7]))


def test_a_second_derivative(run):
    """d/dx of ∇x = 3 x·∇y, where ∇y = 2y: what is inside is seen by all tapes."""

    def function(x):
        y = x * x

        def gradient(upstream, variables):
            return [3.0 * x * upstream[0]], []

        return [y], gradient

    @run
    def step():
        with tf.GradientTape() as outer:
            outer.watch(X)
            with tf.GradientTape() as inner:
                inner.watch(X)
                y = differentiable(function, [X], OWNER)[0]
            dx = inner.gradient(y, X)
        return outer.gradient(dx, X)

    np.testing.assert_array_equal(step(), [3, 3, 3])


def test_a_variable_is_read_twice():
    """By the function itself, and for the tape."""
    weight = tf.Variable(tf.ones([3]))

    def function(x):
        y = x * tf.convert_to_tensor(weight)
        return [y], lambda upstream, variables: ([upstream[0]], [upstream[0]])

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            y = differentiable(function, [x], OWNER)[0]
        return tape.gradient(y, weight)

    graph = step.get_concrete_function(X).graph
    assert sum(op.type == "ReadVariableOp" for op in graph.get_operations()) == 2


def test_the_graph_does_not_outlive_its_function():
    step = tf.function(tripled, autograph=False)
    graph = weakref.ref(step.get_concrete_function(X).graph)
    assert graph() is not None
    del step
    gc.collect()
    assert graph() is None


def test_a_model_leaves_nothing_behind():
    """Though TensorFlow keeps the graph of its training step: `all_reduce` registers a gradient."""
    model = gs.convert(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    kept = [weakref.ref(x) for x in (model._region(), model.layers[0], model.layers[0].kernel)]
    del model
    keras.backend.clear_session()
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3


def test_without_its_owner_a_graph_cannot_be_differentiated():
    def concrete_function():
        owner = Owner()
        function = tf.function(lambda x: tripled(x, owner=owner), autograph=False)
        return function.get_concrete_function(X)

    concrete = concrete_function()
    gc.collect()
    with tf.GradientTape() as tape:
        tape.watch(X)
        with pytest.raises(RuntimeError, match="A model must be kept.*Received: a graph of"):
            tape.gradient(concrete(X), X)


def test_a_copy_of_a_graph_that_is_gone_is_refused():
    graph = tf.Graph()
    with graph.as_default():
        y = tripled(tf.constant([1.0]))
        name, definition = y.name, graph.as_graph_def()
    del graph, y
    gc.collect()
    with tf.Graph().as_default() as copy:
        tf.graph_util.import_graph_def(definition, name="")
        y = copy.get_tensor_by_name(name)
        with pytest.raises(RuntimeError, match="and the graph in which it was run.*Received"):
            tf.gradients(y, y.op.inputs[1])


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("place", ["while", "map", "cond"])
def test_a_tape_outside_of_a_loop_is_refused(place, jit):
    """TensorFlow lets nothing be written in the gradient of a loop. Inside, all is well."""
    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((4,))
        model = gs.convert(keras.Model(inputs, keras.layers.Dense(4, activation="tanh")(inputs)))
    x = tf.constant(np.random.default_rng(0).standard_normal((3, 5, 4)).astype("float32"))
    x = x[0] if place == "cond" else x
    weights = [v.value for v in model.trainable_variables]

    def loss(x):
        return tf.reduce_mean(tf.square(model(x)))

    def gradients(xs):
        with tf.GradientTape() as tape:
            value = loss(xs)
        return tape.gradient(value, weights)

    def outside(xs):
        with tf.GradientTape() as tape:
            if place == "while":
                counts = tf.constant(0), tf.constant(0.0)
                _, value = tf.while_loop(
                    lambda i, _: i < 3,
                    lambda i, total: (i + 1, total + loss(xs[i])),
                    counts,
                    maximum_iterations=3,
                )
            elif place == "map":
                value = tf.reduce_sum(tf.map_fn(loss, xs))
            else:
                value = tf.cond(tf.size(xs) > 0, lambda: loss(xs), lambda: loss(2.0 * xs))
        return tape.gradient(value, weights)

    def inside(xs):
        if place == "cond":
            return tf.cond(tf.size(xs) > 0, lambda: gradients(xs), lambda: gradients(2.0 * xs))
        parts = tf.map_fn(gradients, xs, fn_output_signature=[tf.float32] * len(weights))
        return [tf.reduce_sum(g, 0) for g in parts]

    with pytest.raises(ValueError, match="(?s)tape in there.*Received: a tape outside"):
        tf.function(outside, jit_compile=jit)(x)
    wanted = outside(x)
    found = tf.function(inside, jit_compile=jit)(x)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-3, atol=1e-4)
