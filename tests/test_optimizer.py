"""GradScaleOptimizer with scripted gradients: exact weights, and exact counts of steps."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs

INF, NAN = float("inf"), float("nan")


def counts(optimizer):
    return int(optimizer.applied_steps.numpy()), int(optimizer.skipped_steps.numpy())


def script(run, inner, values, steps):
    """Applies scripted gradients to variables of some values.

    Returns:
        The optimizer, and after each step the variables' values, all in one list.
    """
    variables = [keras.Variable(value) for value in values]
    optimizer = gs.GradScaleOptimizer(inner)
    optimizer.build(variables)
    apply = run(lambda gradients: optimizer.apply(gradients, variables))
    history = []
    for step in steps:
        apply([tf.constant(gradient, tf.float32) for gradient in step])
        history.append([value for v in variables for value in v.numpy().ravel().tolist()])
    return optimizer, history


def test_a_step_is_applied_or_skipped_as_a_whole(run):
    steps = [
        ([1.0, -2.0], [4.0]),
        ([1.0, INF], [4.0]),
        ([1.0, 1.0], [NAN]),
        ([-INF, NAN], [INF]),
        ([0.0, 2.0], [0.0]),
    ]
    optimizer, history = script(run, keras.optimizers.SGD(0.5), [[1.0, 2.0], [3.0]], steps)
    first, last = [0.5, 3.0, 1.0], [0.5, 2.0, 1.0]
    assert history == [first, first, first, first, last]
    assert counts(optimizer) == (2, 3)
    assert int(optimizer.iterations) == 2


def test_a_skipped_step_leaves_momentum_and_iterations(run):
    inner = keras.optimizers.SGD(1.0, momentum=0.5)
    optimizer, history = script(run, inner, [0.0], [[1.0], [NAN], [1.0]])
    # v ← v/2 − g: −1, then −1.5.
    assert history == [[-1.0], [-1.0], [-2.5]]
    assert counts(optimizer) == (2, 1)


def test_gradients_near_the_ends_of_float32_are_finite(run):
    inner = keras.optimizers.SGD(2.0**-100)
    # Their sum is not, and no square of them.
    optimizer, history = script(run, inner, [[0.0, 0.0]], [[[2.0**127, 2.0**127]]])
    assert history == [[-(2.0**27), -(2.0**27)]]
    optimizer, history = script(run, keras.optimizers.SGD(2.0**100), [0.0], [[2.0**-126]])
    assert history == [[-(2.0**-26)]]
    assert counts(optimizer) == (1, 0)


def test_what_the_inner_optimizer_does_with_gradients_sees_true_ones(run):
    inner = keras.optimizers.SGD(1.0, clipvalue=2.0)
    assert script(run, inner, [0.0], [[1e30], [1.0]])[1] == [[-2.0], [-3.0]]
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer, history = script(run, inner, [0.0], [[1.0], [3.0], [5.0], [NAN], [1.0]])
    # Means of two that were finite.
    assert history == [[0.0], [-2.0], [-2.0], [-2.0], [-5.0]]
    assert counts(optimizer) == (4, 1)


def test_variables_without_a_gradient_stay(run):
    variables = [keras.Variable(1.0), keras.Variable(2.0)]
    optimizer = gs.GradScaleOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build(variables)
    apply = run(lambda gradient: optimizer.apply([gradient, None], variables))
    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        apply(tf.constant(0.5))
    apply(tf.constant(INF))
    assert [float(v) for v in variables] == [0.5, 2.0]
    assert counts(optimizer) == (1, 1)


def test_no_gradient_at_all_is_keras_error():
    optimizer = gs.GradScaleOptimizer(keras.optimizers.SGD(1.0))
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        optimizer.apply([None], [keras.Variable(1.0)])


def test_sparse_gradients(run):
    table = keras.Variable(np.zeros((4, 2)))
    optimizer = gs.GradScaleOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([table])

    def apply(values):
        gradient = tf.IndexedSlices(values, tf.constant([2, 0]), tf.constant([4, 2]))
        optimizer.apply([gradient], [table])

    apply = run(apply)
    apply(tf.constant([[1.0, 2.0], [3.0, 4.0]]))
    apply(tf.constant([[1.0, 2.0], [3.0, NAN]]))
    np.testing.assert_array_equal(table, [[-3.0, -4.0], [0, 0], [-1.0, -2.0], [0, 0]])
    assert counts(optimizer) == (1, 1)


def test_builds_itself_in_the_first_step(run):
    weight = keras.Variable(1.0)
    optimizer = gs.GradScaleOptimizer(keras.optimizers.Adam(0.5))
    run(lambda gradient: optimizer.apply([gradient], [weight]))(tf.constant(100.0))
    # Adam's first step has the length of its learning rate.
    np.testing.assert_allclose(weight, 0.5, rtol=1e-5)
    assert counts(optimizer) == (1, 0)


def test_float16_gradients(run):
    weight = keras.Variable(1.0)
    optimizer = gs.GradScaleOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([weight])
    apply = run(lambda gradient: optimizer.apply([tf.cast(gradient, tf.float16)], [weight]))
    apply(tf.constant(1e5))
    apply(tf.constant(2.0))
    assert float(weight) == -1.0
    assert counts(optimizer) == (1, 1)


# --- In place of Keras' LossScaleOptimizer -------------------------------------------------------


def test_scale_loss_is_the_identity():
    optimizer = gs.GradScaleOptimizer(keras.optimizers.SGD())
    loss = tf.constant(3.0)
    assert optimizer.scale_loss(loss) is loss
    optimizer.build([keras.Variable(1.0)])
    assert optimizer.scale_loss(loss) is loss


def test_is_not_wrapped_again():
    with gs.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = gs.GradScaleOptimizer(keras.optimizers.SGD())
    model.compile(optimizer, "mse")
    assert model.optimizer is optimizer
    model = gs.convert(model)
    model.compile("adam", "mse")
    assert type(model.optimizer) is gs.GradScaleOptimizer
    assert type(model.optimizer.inner_optimizer) is keras.optimizers.Adam
    assert model.optimizer.scales is model.scales


def test_learning_rate_and_iterations_are_the_inner_ones():
    inner = keras.optimizers.SGD(0.25)
    optimizer = gs.GradScaleOptimizer(inner)
    assert float(optimizer.learning_rate) == 0.25
    optimizer.learning_rate = 0.5
    assert float(inner.learning_rate) == 0.5
    weight = keras.Variable(1.0)
    optimizer.apply([tf.constant(1.0)], [weight])
    assert float(weight) == 0.5
    assert optimizer.iterations is inner.iterations and int(inner.iterations) == 1


def test_a_schedule_counts_applied_steps_only(run):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [4.0, 2.0, 1.0])
    optimizer, history = script(
        run, keras.optimizers.SGD(schedule), [0.0], [[1.0], [INF], [1.0], [1.0]]
    )
    assert history == [[-4.0], [-4.0], [-6.0], [-7.0]]
    assert float(optimizer.learning_rate) == 1.0


def test_averaged_weights_are_the_inner_ones():
    weight = keras.Variable(0.0)
    inner = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
    optimizer = gs.GradScaleOptimizer(inner)
    for gradient in (-1.0, NAN, -1.0):
        optimizer.apply([tf.constant(gradient)], [weight])
    assert float(weight) == 2.0
    optimizer.finalize_variable_values([weight])
    # The average starts at the first value: 1, then ½·1 + ½·2.
    assert float(weight) == 1.5


@pytest.mark.parametrize(
    "learning_rate", [0.125, keras.optimizers.schedules.CosineDecay(0.5, decay_steps=10)]
)
def test_serialization(learning_rate):
    optimizer = gs.GradScaleOptimizer(
        keras.optimizers.Adam(learning_rate, beta_1=0.5, clipnorm=3.0), name="mine"
    )
    config = keras.saving.serialize_keras_object(optimizer)
    assert config["registered_name"] == "tf_gradscale>GradScaleOptimizer"
    assert set(config["config"]) == {"name", "inner_optimizer"}
    again = keras.saving.deserialize_keras_object(config)
    assert type(again) is gs.GradScaleOptimizer and again.name == "mine"
    assert again.inner_optimizer.get_config() == optimizer.inner_optimizer.get_config()
    assert again.get_config() == optimizer.get_config()
    assert again.scales is None


def test_state_is_saved_and_restored():
    optimizer, _ = script(
        lambda f: f, keras.optimizers.SGD(1.0, momentum=0.5), [0.0], [[1.0], [NAN], [1.0]]
    )
    again, _ = script(lambda f: f, keras.optimizers.SGD(1.0, momentum=0.5), [0.0], [])
    stored = {}
    optimizer.save_own_variables(stored)
    again.load_own_variables(stored)
    assert counts(again) == (2, 1) and int(again.iterations) == 2
    np.testing.assert_array_equal(again.variables[-1], -1.5)


# --- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["sgd", None, keras.optimizers.SGD])
def test_refuses_what_is_no_optimizer(inner):
    with pytest.raises(TypeError, match="`inner_optimizer` must be a keras.optimizers.Optimizer"):
        gs.GradScaleOptimizer(inner)


@pytest.mark.parametrize("wrapper", [keras.optimizers.LossScaleOptimizer, gs.GradScaleOptimizer])
def test_refuses_a_second_wrapper(wrapper):
    wrapped = wrapper(keras.optimizers.SGD())
    message = rf"one wrapper is enough.*`inner_optimizer.inner_optimizer`.*{wrapper.__name__}"
    with pytest.raises(ValueError, match=message):
        gs.GradScaleOptimizer(wrapped)


def test_compile_refuses_keras_own_wrapper():
    model = gs.convert(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match="one wrapper is enough"):
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse")


def test_refuses_a_loss_scale():
    inner = keras.optimizers.SGD(loss_scale_factor=128.0)
    with pytest.raises(ValueError, match="remove `loss_scale_factor`.*Received: 128.0"):
        gs.GradScaleOptimizer(inner)
    # It was not switched off on the way.
    assert inner.loss_scale_factor == 128.0


def test_belongs_to_one_model():
    models = [
        gs.convert(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])) for _ in range(2)
    ]
    optimizer = gs.GradScaleOptimizer(keras.optimizers.SGD())
    models[0].compile(optimizer, "mse")
    models[0].compile(optimizer, "mse")
    with pytest.raises(ValueError, match="keeps the scales of one model.*of another model"):
        models[1].compile(optimizer, "mse")
    used = gs.GradScaleOptimizer(keras.optimizers.SGD())
    used.build([keras.Variable(1.0)])
    with pytest.raises(ValueError, match="Received: an optimizer that was built without"):
        models[1].compile(used, "mse")


# --- Scales after a skipped step -----------------------------------------------------------------


def test_scales_are_chosen_anew_after_a_skipped_step(run):
    with gs.policy_scope("mixed_float16"):
        model = gs.convert(keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)]))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    optimizer, variables = model.optimizer, model.trainable_variables
    optimizer.build(variables)
    x = tf.constant(np.random.default_rng(0).normal(size=(16, 8)), tf.float32)

    @run
    def step(multiplier, poison):
        with tf.GradientTape() as tape:
            loss = multiplier * tf.reduce_sum(model(x) ** 2)
        gradients = tape.gradient(loss, variables)
        optimizer.apply([g + poison for g in gradients], variables)

    def cast_scale(multiplier, poison=0.0):
        step(tf.constant(multiplier), tf.constant(poison))
        return model.scales["output"].scale

    before = [cast_scale(1.0) for _ in range(3)][-1]
    # Pass 3 is no updating pass. Its step is skipped; pass 4 is an updating one in any case.
    assert cast_scale(2.0**-20, NAN) == before
    assert cast_scale(1.0) == before
    # Passes 5 and 6 are none, whatever they meet; pass 7 is one since the step before was skipped.
    assert cast_scale(2.0**-20) == before
    assert cast_scale(2.0**-20, NAN) == before
    assert cast_scale(2.0**-20) == before * 2.0**20
    assert counts(optimizer) == (6, 2)


# --- Replicas ------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_step", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_replicas_skip_together(mirrored, run_step):
    with mirrored.scope():
        weight = keras.Variable([1.0, 2.0])
        optimizer = gs.GradScaleOptimizer(keras.optimizers.SGD(0.5))
        optimizer.build([weight])

    @run_step
    def step(gradients):
        mirrored.run(lambda gradient: optimizer.apply([gradient], [weight]), args=(gradients,))

    def after(*gradients):
        step(
            mirrored.experimental_distribute_values_from_function(
                lambda context: tf.constant(gradients[context.replica_id_in_sync_group])
            )
        )
        copies = [c.numpy().tolist() for c in mirrored.experimental_local_results(weight.value)]
        assert copies[0] == copies[1]
        return copies[0]

    # Gradients are summed over the replicas.
    assert after([1.0, 0.0], [3.0, 2.0]) == [-1.0, 1.0]
    for bad in (INF, -INF, NAN):
        assert after([1.0, 1.0], [1.0, bad]) == [-1.0, 1.0]
        assert after([bad, 1.0], [1.0, 1.0]) == [-1.0, 1.0]
    assert after([INF, 1.0], [-INF, 1.0]) == [-1.0, 1.0]
    assert after([0.0, 2.0], [0.0, -4.0]) == [-1.0, 2.0]
    assert counts(optimizer) == (2, 7)
    assert int(optimizer.iterations.numpy()) == 2


def test_overflow_on_the_second_replica_in_fit(mirrored):
    with mirrored.scope(), gs.policy_scope("mixed_float16"):
        model = gs.convert(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
        model.compile(keras.optimizers.SGD(0.125), "mse")
    x, y = np.ones((4, 2), "float32"), np.zeros((4, 1), "float32")
    before = [w.numpy() for w in model.weights]
    bad = x.copy()
    # A batch of four is split in two: its last example is the second replica's.
    bad[3, 0] = INF
    model.fit(bad, y, batch_size=4, verbose=0)
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weight, value)
    assert counts(model.optimizer) == (0, 1)
    # The next pass chooses scales, and the step is the one without any such history.
    model.fit(x, y, batch_size=4, verbose=0)
    assert counts(model.optimizer) == (1, 1)
    kernel, bias = before
    error = x @ kernel + bias
    # d/dw of mean (x·w + b)², in which all x are 1.
    expected = kernel - 0.125 * 2 * error.mean()
    np.testing.assert_allclose(model.weights[0], expected, rtol=2e-3)


def test_needs_a_replica_context(mirrored):
    with mirrored.scope():
        weight = keras.Variable(1.0)
        optimizer = gs.GradScaleOptimizer(keras.optimizers.SGD(0.5))
        optimizer.build([weight])
        with pytest.raises(ValueError, match="must be called in a replica context"):
            optimizer.apply([tf.constant(1.0)], [weight])
