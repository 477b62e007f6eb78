"""Training that skips every step stops: in fit, in loops of one's own, on several replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs

X = np.ones((32, 4), "float32")
# The first 3 batches of 2 are bad, then every one from the 6th on.
BAD = np.array([True] * 3 + [False] * 2 + [True] * 11)


def model_of(max_skips, jit_compile=False, **compiled):
    with gs.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="dense")])
    model = gs.convert(model, gs.GradScaleConfig(max_skips=max_skips))
    model.compile("sgd", "mse", jit_compile=jit_compile, **compiled)
    return model


def targets(bad=BAD):
    values = np.where(bad, np.nan, 1.0).astype("float32")
    return np.repeat(values, 2)[:, None] * np.ones((1, 2), "float32")


def fit(model, y, **kwargs):
    model.fit(X[: len(y)], y, batch_size=2, shuffle=False, verbose=0, **kwargs)


def counters(model):
    optimizer = model.optimizer
    names = ("applied_steps", "skipped_steps", "skips_in_a_row", "iterations")
    return [int(getattr(optimizer, name)) for name in names]


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("kwargs", [{}, {"steps_per_execution": 2}, {"run_eagerly": True}])
def test_fit_stops(jit_compile, kwargs):
    """Looked at once in 4 steps, it is seen behind the 12th batch."""
    model = model_of(4, jit_compile and "run_eagerly" not in kwargs, **kwargs)
    message = "(?s)must apply one step in 4 .*diagnose.*is the targets.*Received: .* in a row$"
    with pytest.raises(FloatingPointError, match=message):
        fit(model, targets(), epochs=2)
    applied, skipped, in_a_row, iterations = counters(model)
    assert (applied, skipped, in_a_row, iterations) == (2, 10, 7, 2)


def test_fewer_skips_than_that_are_no_reason():
    model = model_of(4)
    fit(model, targets(BAD[:5]), epochs=4)
    assert counters(model) == [8, 12, 0, 8]
    assert np.all(np.isfinite(model.get_weights()[0]))


def test_what_is_said_when_no_batch_is_left():
    model = model_of(3)
    with pytest.raises(FloatingPointError, match="no other batch to see it in.*Received: 3 skip"):
        fit(model, targets(BAD[:3]))


def test_what_is_said_when_the_next_batch_is_well():
    model = model_of(3)
    with pytest.raises(FloatingPointError, match="In the next batch all is finite.*Received: 3"):
        fit(model, targets(BAD[:4]))


def test_the_layer_is_named():
    model = model_of(3)
    model.layers[0].kernel.assign(keras.ops.full((4, 2), 3e4))
    message = "first that is not finite is the output of 'dense', made by the forward pass"
    with pytest.raises(FloatingPointError, match=message):
        fit(model, targets(np.zeros(8, bool)))


def test_train_on_batch_stops():
    model = model_of(3)
    with pytest.raises(FloatingPointError, match="no other batch.*Received: 3 skipped steps"):
        for _ in range(4):
            model.train_on_batch(X[:2], targets(BAD[:1]))
    assert counters(model)[1] == 3


def loop(model, count, function):
    optimizer = gs.GradScaleOptimizer(keras.optimizers.SGD(), scales=model.scales)
    optimizer.build(model.trainable_variables)

    @function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        variables = [v.value for v in model.trainable_variables]
        optimizer.apply(tape.gradient(loss, variables), model.trainable_variables)

    y = targets()
    try:
        for i in range(count):
            step(tf.constant(X[2 * i : 2 * i + 2]), tf.constant(y[2 * i : 2 * i + 2]))
    finally:
        model.skipped = int(optimizer.skipped_steps)
    return optimizer


def test_a_loop_of_ones_own_stops():
    """At the 4th skip in a row, behind 3 others."""
    model = model_of(4)
    with pytest.raises(FloatingPointError, match="must apply one step in 4.*Received: 4 skipped"):
        loop(model, 16, lambda f: f)
    assert model.skipped == 7
    model = model_of(4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must apply one step in 4"):
        loop(model, 16, tf.function)
    assert model.skipped == 7


def test_a_loop_compiled_by_xla_is_checked_by_hand():
    optimizer = loop(model_of(4), 8, tf.function(jit_compile=True))
    optimizer.check_skips()
    optimizer = loop(model_of(4), 16, tf.function(jit_compile=True))
    with pytest.raises(FloatingPointError, match="must apply one step in 4.*Received: 11 skipped"):
        optimizer.check_skips()


def test_replicas_stop(mirrored):
    with mirrored.scope():
        model = model_of(4)
    with pytest.raises(FloatingPointError, match="is the targets.*Received: 7 skipped"):
        fit(model, targets(), epochs=2)
    assert np.all(np.isfinite(model.get_weights()[0]))


def test_an_optimizer_alone_has_the_default():
    optimizer = gs.GradScaleOptimizer(keras.optimizers.SGD())
    assert optimizer.max_skips == gs.GradScaleConfig().max_skips == 20
    optimizer.check_skips()
    weight = keras.Variable([1.0])
    with pytest.raises(FloatingPointError, match="Received: 20 skipped steps in a row"):
        for _ in range(30):
            optimizer.apply([keras.ops.array([np.inf])], [weight])
    assert int(optimizer.skipped_steps) == 20


class OwnStep(keras.Model):
    """A model with a `train_step` that needs no loss in `compile`."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def test_a_train_step_without_a_loss():
    """The error comes, though what broke cannot be told."""
    model = OwnStep()
    model(X[:2])
    model = gs.convert(model, gs.GradScaleConfig(max_skips=3))
    model.compile("sgd")
    message = "must apply one step in 3 .*cannot be told .*must have a loss.*Received: .* in a row"
    with pytest.raises(FloatingPointError, match=message):
        model.fit(np.full_like(X, np.nan), batch_size=2, verbose=0)
    with pytest.raises(ValueError, match="must have a loss to be diagnosed.*Received: a model wit"):
        gs.diagnose(model, X)
