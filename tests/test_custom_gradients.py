"""Layers of users' own with custom gradients: what is not linear in ∇Y gets the true gradient."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs
from tf_gradscale import linearity
from tf_gradscale.rules import Unscaled

layers = keras.layers
# Relative error of a gradient that only rounding separates from float32's.
CLOSE = 3e-3
RNG = np.random.default_rng(0)
X = RNG.choice([-1.0, -0.5, 0.5, 1.0, 2.0], size=(16, 6)).astype("float32")
# ∇Y of the layer under test, for a loss of one: between 1 and 12, so that rounding does not decide.
GRADIENT = RNG.choice([-12.0, -5.0, -1.0, 1.0, 2.0, 6.0], size=(16, 6)).astype("float32")


def custom(gradient, function=tf.identity):
    """A function of a tensor, with a gradient of one's own: a function of ∇Y."""

    @tf.custom_gradient
    def operation(x):
        return function(x), gradient

    return operation


class Custom(layers.Layer):
    """The identity, with a gradient of one's own."""

    def __init__(self, gradient, **kwargs):
        super().__init__(**kwargs)
        self.operation = custom(gradient)
        self.supports_masking = True

    def call(self, x):
        return self.operation(x)

    def compute_output_shape(self, input_shape):
        return input_shape


def clip(threshold):
    return lambda dy: tf.clip_by_value(dy, -threshold, threshold)


def np_clip(threshold):
    return lambda dy: np.clip(dy, -threshold, threshold)


# What the layer does with ∇Y, and the same in NumPy.
NONLINEAR = {
    "clip_far_below": (clip(1e-12), np_clip(1e-12)),
    "clip_at_1e-6": (clip(3e-6), np_clip(3e-6)),
    "clip_at_1": (clip(3.0), np_clip(3.0)),
    "clip_far_above": (clip(1e6), np_clip(1e6)),
    "sign": (tf.sign, np.sign),
    "threshold": (
        lambda dy: tf.where(tf.abs(dy) > 3e-6, dy, tf.zeros_like(dy)),
        lambda dy: np.where(np.abs(dy) > 3e-6, dy, 0),
    ),
    "window": (
        lambda dy: tf.where((tf.abs(dy) > 3e-6) & (tf.abs(dy) < 3.0), dy, -dy),
        lambda dy: np.where((np.abs(dy) > 3e-6) & (np.abs(dy) < 3), dy, -dy),
    ),
    "offset": (lambda dy: dy + 1e-6, lambda dy: dy + 1e-6),
    "norm": (
        lambda dy: tf.clip_by_norm(dy, 1e-6),
        lambda dy: dy * min(1, 1e-6 / np.linalg.norm(dy)),
    ),
}
LINEAR = {
    "reversal": (lambda dy: -0.3 * dy, lambda dy: -0.3 * dy),
    "doubled": (lambda dy: 2.0 * dy, lambda dy: 2 * dy),
    "rectified": (tf.nn.relu, lambda dy: np.maximum(dy, 0)),
}


def model_with(layer, policy="mixed_float16", config=None):
    """Dense, the layer, and a Dense whose kernel is 2: ∇Y of the layer is twice that of the end."""
    keras.utils.set_random_seed(3)
    with gs.policy_scope(policy):
        inputs = keras.Input((6,))
        x = layers.Dense(6, name="before")(inputs)
        x = layer()(x)
        after = layers.Dense(6, name="after")
        model = keras.Model(inputs, after(x))
    after.kernel.assign(2 * np.eye(6))
    return gs.convert(model, config)


def rules(model):
    return {step.name: step.rule for step in model._gradscale.region.graph().steps}


def gradients(run, model, weights=GRADIENT / 2, x=X):
    """A function of the loss' factor: gradients of the trainable variables, in NumPy."""

    def step(factor):
        with tf.GradientTape() as tape:
            y = tf.cast(model(tf.constant(x), training=True), tf.float32)
            loss = tf.reduce_sum(y * weights) * factor
        found = tape.gradient(loss, model.trainable_variables)
        return [tf.convert_to_tensor(g) for g in found]

    step = run(step)
    return lambda factor: [g.numpy() for g in step(tf.constant(factor))]


def assert_close(found, wanted, bound=CLOSE):
    for g, t in zip(found, wanted, strict=True):
        assert np.linalg.norm(g - t) <= bound * np.linalg.norm(t)


# --- The true gradient ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NONLINEAR, *LINEAR])
def test_the_layer_gets_the_true_gradient(run, name):
    of_tensors, of_arrays = {**NONLINEAR, **LINEAR}[name]
    model = model_with(lambda: Custom(of_tensors, name="custom"))
    step = gradients(run, model)
    for factor in (1.0, 1e-6):
        dy = of_arrays(GRADIENT.astype("float64") * factor)
        model.scales.unfreeze()
        assert_close(step(factor)[:2], [X.T @ dy, dy.sum(0)])


@pytest.mark.parametrize("name", [*NONLINEAR, *LINEAR])
def test_what_is_linear_is_scaled(name):
    model = model_with(lambda: Custom({**NONLINEAR, **LINEAR}[name][0], name="custom"))
    assert isinstance(rules(model)["custom"], Unscaled) == (name in NONLINEAR)
    assert "custom/cast" in [s.name for s in model.scales] or name in LINEAR


def test_a_loss_that_changes_between_updates(run):
    config = gs.GradScaleConfig(update_every=1000)
    model = model_with(lambda: Custom(clip(3e-6), name="custom"), config=config)
    step = gradients(run, model)
    # Passes 0, 1, 2 and 4 choose scales; 3 and 5 use those for gradients of another size.
    for factor in (1e-6, 1e-6, 1e-6, 1e-10, 1e-6, 1e-2, 1e-6):
        dy = np.clip(GRADIENT.astype("float64") * factor, -3e-6, 3e-6)
        assert_close(step(factor)[:2], [X.T @ dy, dy.sum(0)])


def test_an_overflow_on_the_way_is_not_clipped_away():
    model = model_with(lambda: Custom(clip(1.0)))
    model.scales.freeze(lambda site: 2.0**30 if site.name == "after/input" else 1.0)
    found = gradients(tf.function, model)(1.0)
    assert not np.any(np.isfinite(found[0]))


@pytest.mark.parametrize("unscale", ["layer", "optimizer"])
@pytest.mark.parametrize("placement", ["balanced", "threshold"])
def test_every_configuration(unscale, placement):
    config = gs.GradScaleConfig(unscale=unscale, placement=placement)
    model = model_with(lambda: Custom(clip(3e-6)), config=config)
    model.compile(keras.optimizers.SGD(1e6))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(X) * (GRADIENT / 2)) * 1e-6
    before = model.get_weights()
    found = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))
    moved = [(b - w) / 1e6 for b, w in zip(before, model.get_weights(), strict=True)]
    dy = np.clip(GRADIENT * 1e-6, -3e-6, 3e-6)
    # The paper's scales are small ones, next to what float16 loses.
    bound = CLOSE if placement == "balanced" else 0.1
    assert_close(moved[:2], [X.T @ dy, dy.sum(0)], bound)


# --- Where such a gradient can be ----------------------------------------------------------------

CLIPPED = custom(clip(3e-6))


class Scaled(layers.Layer):
    """Variables of its own behind a clip: the gain is zero at first and hides it."""

    def build(self, shape):
        self.gain = self.add_weight((), initializer="zeros", name="gain")
        self.shift = self.add_weight(shape[-1:], initializer="ones", name="shift")

    def call(self, x):
        return x + self.shift + self.gain * CLIPPED(x * self.shift)


class Opened(layers.Layer):
    """A composite that is opened."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(6, name="dense")
        self.inner = Custom(clip(3e-6), name="inner")

    def call(self, x):
        return self.dense(self.inner(self.dense(x)))


class NotOpened(Opened):
    """One that cannot be: it uses TensorFlow itself."""

    def call(self, x):
        return tf.tanh(super().call(x))


class Matmul(layers.Layer):
    """A product with a kernel whose gradient is written by hand."""

    def __init__(self, gradient=tf.identity, **kwargs):
        super().__init__(**kwargs)
        self.gradient = gradient

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], 6), name="kernel")

    def call(self, x):
        @tf.custom_gradient
        def product(x, kernel):
            def grad(dy):
                dy = self.gradient(dy)
                return dy @ tf.transpose(kernel), tf.transpose(x) @ dy

            return x @ kernel, grad

        return product(x, tf.convert_to_tensor(self.kernel))


class MatmulOfVariable(Matmul):
    """The same; the custom gradient is told of the kernel as a variable."""

    def call(self, x):
        @tf.custom_gradient
        def product(x):
            kernel = tf.convert_to_tensor(self.kernel)

            def grad(dy, variables):
                dy = self.gradient(dy)
                dx, dw = dy @ tf.transpose(kernel), tf.transpose(x) @ dy
                return dx, [tf.cast(dw, v.dtype) for v in variables]

            return x @ kernel, grad

        return product(x)


class Rematerialized(layers.Layer):
    def __init__(self, gradient=tf.identity, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(6)
        self.custom = custom(gradient, tf.tanh)

    def call(self, x):
        return keras.remat(lambda x: self.custom(self.inner(x)))(x)


class Cell(layers.Layer):
    state_size = 6

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], 6), name="kernel")

    def call(self, x, states):
        y = CLIPPED(keras.ops.matmul(x, self.kernel) + states[0])
        return y, [y]


def under_remat(make):
    def build():
        with keras.RematScope("full"):
            return make()

    return build


def over_time(make):
    def build():
        wrapped = make()
        return lambda x: layers.Reshape((6,))(wrapped(layers.Reshape((2, 3))(x)))

    return build


PLACES = {
    "activation_of_a_dense": lambda: layers.Dense(6, activation=CLIPPED, name="here"),
    "activation": lambda: layers.Activation(CLIPPED, name="here"),
    "lambda": lambda: layers.Lambda(CLIPPED, name="here"),
    "own_variables": lambda: Scaled(name="here"),
    "opened": lambda: Opened(name="here"),
    "not_opened": lambda: NotOpened(name="here"),
    "product": lambda: Matmul(clip(3e-6), name="here"),
    "product_of_a_variable": lambda: MatmulOfVariable(clip(3e-6), name="here"),
    "remat": lambda: Rematerialized(clip(3e-6), name="here"),
    "remat_scope": under_remat(lambda: Matmul(clip(3e-6), name="here")),
    "time_distributed": over_time(
        lambda: layers.TimeDistributed(Custom(clip(3e-6)), name="here"),
    ),
    "recurrent": over_time(lambda: layers.RNN(Cell(), return_sequences=False, name="here")),
}
LINEAR_PLACES = {
    "product": lambda: Matmul(name="here"),
    "product_of_a_variable": lambda: MatmulOfVariable(name="here"),
    "remat": lambda: Rematerialized(name="here"),
    "remat_scope": under_remat(lambda: Matmul(name="here")),
    "remat_scope_of_a_variable": under_remat(lambda: MatmulOfVariable(name="here")),
    "activation_of_a_dense": lambda: layers.Dense(
        6, activation=custom(lambda dy: -dy, tf.tanh), name="here"
    ),
    "swish_of_tensorflow": lambda: layers.Dense(6, activation=tf.nn.silu, name="here"),
}


ALL = {**PLACES, **{f"linear_{name}": make for name, make in LINEAR_PLACES.items()}}
# The others take the same way through the package.
IN_EVERY_MODE = ["activation_of_a_dense", "not_opened", "remat_scope", "linear_remat_scope"]


def check_place(place, run, factors):
    true, ours = model_with(ALL[place], "float32"), model_with(ALL[place])
    ours.set_weights(true.get_weights())
    (rule,) = [r for name, r in rules(ours).items() if name in ("here", "here/inner")]
    assert isinstance(rule, Unscaled) != place.startswith("linear")
    step, true_step = gradients(run, ours), gradients(tf.function, gs.strip(true))
    for factor in factors:
        wanted = true_step(factor)
        ours.scales.unfreeze()
        assert_close(step(factor), wanted, 1e-2)
        # The second time with scales that are read.
        assert_close(step(factor), wanted, 1e-2)


@pytest.mark.filterwarnings("ignore:Layer '.*' is differentiated as one operation")
@pytest.mark.parametrize("place", ALL)
def test_wherever_it_is(place):
    check_place(place, lambda function: function, (1.0, 1e-6))


@pytest.mark.filterwarnings("ignore:Layer '.*' is differentiated as one operation")
@pytest.mark.parametrize("place", IN_EVERY_MODE)
def test_in_every_mode(run, place):
    check_place(place, run, (1e-6,))


# --- What goes with it ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Layer '.*' is differentiated as one operation")
@pytest.mark.parametrize("place", PLACES)
def test_forward_is_the_layers_own(place):
    model = model_with(PLACES[place])
    plain, found = gs.strip(model)(X), model(X)
    assert plain.dtype == tf.float16
    np.testing.assert_allclose(found, tf.cast(plain, tf.float32), rtol=4e-3, atol=4e-3)
    # Layers are left as they were.
    assert {layer.compute_dtype for layer in model._flatten_layers()} == {"float16"}


@pytest.mark.filterwarnings("ignore:Layer '.*' is differentiated as one operation")
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("place", PLACES)
def test_other_formats_are_left_as_they_are(place, policy):
    model = model_with(PLACES[place], policy)
    plain = gs.strip(model)
    np.testing.assert_array_equal(model(X), tf.cast(plain(X), tf.float32))
    found = gradients(tf.function, model)(1e-6)
    if place == "remat_scope" and policy != "float32":
        # Keras itself reads variables uncast when it runs the layer once more.
        with pytest.raises(TypeError, match="type float32 that does not match type bfloat16"):
            gradients(tf.function, plain)(1e-6)
        return
    wanted = gradients(tf.function, plain)(1e-6)
    for g, t in zip(found, wanted, strict=True):
        if policy == "float32":
            np.testing.assert_array_equal(g, t)
        else:
            assert np.linalg.norm(g - t) <= 0.05 * np.linalg.norm(t)


def test_forced_scales_change_no_bit():
    model = model_with(lambda: Custom(clip(3e-6)), "float32")
    step = gradients(tf.function, model)
    wanted = step(1e-6)
    model.scales.freeze(lambda site: 2.0 ** (3 * site.index - 8))
    for g, t in zip(step(1e-6), wanted, strict=True):
        np.testing.assert_array_equal(g, t)


class TwoOutputs(layers.Layer):
    """Its outputs' gradients arrive at different scales; the second may have none."""

    def call(self, x):
        @tf.custom_gradient
        def operation(x):
            def grad(da, db):
                return tf.clip_by_value(da, -3e-6, 3e-6) + 1e3 * tf.clip_by_value(db, -1e-9, 1e-9)

            return (x, 2.0 * x), grad

        return operation(x)


@pytest.mark.parametrize("used", [1, 2])
def test_several_outputs(run, used):
    def build():
        pair = TwoOutputs(name="custom")

        def apply(x):
            a, b = pair(x)
            return layers.Add()([a, layers.Rescaling(1e-2)(b)]) if used == 2 else a

        return apply

    true, ours = model_with(build, "float32"), model_with(build)
    assert isinstance(rules(ours)["custom"], Unscaled)
    for factor in (1.0, 1e-6):
        wanted = gradients(tf.function, gs.strip(true))(factor)
        assert_close(gradients(run, ours)(factor)[:2], wanted[:2])


def test_masks_pass_through():
    inputs = keras.Input((5, 3))
    with gs.policy_scope("mixed_float16"):
        x = layers.Masking()(inputs)
        x = Custom(clip(1e-6), name="custom")(layers.Dense(3)(x))
        model = gs.convert(keras.Model(inputs, x))
    assert isinstance(rules(model)["custom"], Unscaled)
    x = np.ones((1, 5, 3), "float32")
    x[:, 2:] = 0
    np.testing.assert_array_equal(model(x)._keras_mask, [[True, True, False, False, False]])


class Counting(Custom):
    """Has a state, a loss, and randomness of its own."""

    def __init__(self, gradient, **kwargs):
        super().__init__(gradient, **kwargs)
        self.dropout = layers.Dropout(0.5, seed=3)
        self.normalization = layers.BatchNormalization()
        self.seeds = keras.random.SeedGenerator(1)

    def build(self, shape):
        self.count = self.add_weight((), initializer="zeros", trainable=False, name="count")
        self.raw = tf.Variable(0.0, trainable=False)
        self.normalization.build(shape)

    def call(self, x, training=None):
        self.count.assign_add(1.0)
        self.raw.assign_add(1.0)
        self.add_loss(1e-9 * tf.reduce_sum(tf.cast(x, tf.float32) ** 2))
        x = x + keras.random.normal((6,), dtype=x.dtype, seed=self.seeds)
        return super().call(self.dropout(self.normalization(x, training=training)))


@pytest.mark.filterwarnings("ignore:Layer '.*' is differentiated as one operation")
@pytest.mark.parametrize("gradient", [clip(1e-6), tf.identity])
def test_trying_out_changes_nothing(gradient):
    keras.utils.set_random_seed(1)
    with gs.policy_scope("mixed_float16"):
        layer = Counting(gradient, name="custom")
        plain = keras.Sequential([keras.Input((6,)), layers.Dense(6), layer])
    (step,) = [s for s in gs.convert(plain)._gradscale.region.graph().steps if s.name == "custom"]
    plain(X)
    variables = [*plain.variables, layer.seeds.state, layer.dropout.seed_generator.state]
    before = [v.numpy() for v in variables]
    raw, losses = float(layer.raw), [id(loss) for loss in layer.losses]
    nodes = [len(one._inbound_nodes) for one in plain._flatten_layers()]
    assert linearity.is_linear(step) == (gradient is tf.identity)
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    assert raw and losses
    assert float(layer.raw) == raw
    assert [id(loss) for loss in layer.losses] == losses
    assert [len(one._inbound_nodes) for one in plain._flatten_layers()] == nodes
    assert layers.Dense(1).name == "dense_1"
    assert layer.compute_dtype == layer.normalization.compute_dtype == "float16"


def test_what_cannot_be_tried_out_gets_the_true_gradient():
    class Picky(Custom):
        def call(self, x):
            if x.shape[0] is not None and x.shape[0] != 16:
                raise ValueError("only batches of 16")
            return super().call(x)

    model = model_with(lambda: Picky(tf.identity, name="custom"))
    assert isinstance(rules(model)["custom"], Unscaled)


def test_layers_of_keras_are_not_tried_out(monkeypatch):
    def fail(*args):
        raise AssertionError

    monkeypatch.setattr(linearity, "_Trial", fail)
    monkeypatch.setattr(linearity, "_try_out", fail)
    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((8, 6))
        x = layers.Dense(6, activation="gelu", kernel_regularizer="l2")(inputs)
        x = layers.Bidirectional(layers.LSTM(3, return_sequences=True))(x)
        x = layers.TimeDistributed(layers.Dense(6, activation="silu"))(x)
        x = layers.MultiHeadAttention(2, 3)(x, x)
        x = keras.ops.silu(layers.LayerNormalization()(x))
        model = gs.convert(keras.Model(inputs, layers.Softmax()(x)))
    assert not any(isinstance(rule, Unscaled) for rule in rules(model).values())


def test_a_model_that_cannot_be_opened():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.before = layers.Dense(6)
            self.after = layers.Dense(6)

        def call(self, x, training=None):
            return self.after(CLIPPED(self.before(x)))

    models = []
    for policy in ("float32", "mixed_float16"):
        with gs.policy_scope(policy):
            model = Own()
        model(X)
        models.append(model)
    models[1].set_weights(models[0].get_weights())
    wanted = gradients(tf.function, models[0])(1e-6)
    with pytest.warns(UserWarning, match="differentiated as one operation"):
        ours = gs.convert(models[1])
        found = gradients(tf.function, ours)(1e-6)
    assert_close(found, wanted)


def test_a_scaled_layer_inside_a_scaled_model():
    model = model_with(lambda: gs.layers.GradientScaled(Custom(clip(3e-6)), name="region"))
    assert isinstance(rules(model)["region"], Unscaled)
    dy = np.clip(GRADIENT * 1e-6, -3e-6, 3e-6)
    assert_close(gradients(tf.function, model)(1e-6)[:2], [X.T @ dy, dy.sum(0)])
    passes = model.layers[2].scales.variables[2]
    assert passes.name == "passes" and int(passes) == 1


class WithLoss(Custom):
    def call(self, x):
        self.add_loss(2e-6 * tf.reduce_sum(tf.cast(x, tf.float32)))
        return super().call(x)


def test_losses_of_such_a_layer():
    def step(model):
        with tf.GradientTape() as tape:
            y = model(X, training=True)
            loss = tf.reduce_sum(tf.cast(y, tf.float32) * (GRADIENT / 2)) * 1e-6
            loss += tf.add_n(model.losses)
        return [g.numpy() for g in tape.gradient(loss, model.trainable_variables)]

    model = model_with(lambda: WithLoss(clip(3e-6), name="custom"))
    assert isinstance(rules(model)["custom"], Unscaled)
    dy = np.clip(GRADIENT * 1e-6, -3e-6, 3e-6) + 2e-6
    assert_close(step(model)[:2], [X.T @ dy, dy.sum(0)])


@pytest.mark.filterwarnings("ignore:Layer '.*' is differentiated as one operation")
def test_replicas(mirrored):
    single = model_with(lambda: Scaled(name="custom"))
    with mirrored.scope():
        model = model_with(lambda: Scaled(name="custom"))
    assert isinstance(rules(model)["custom"], Unscaled)
    for one in (single, model):
        one.layers[2].gain.assign(0.5)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(X, training=True) * (GRADIENT / 2)) * 1e-6
        return tape.gradient(loss, model.trainable_variables)

    found = mirrored.run(tf.function(step))
    wanted = gradients(tf.function, single)(1e-6)
    for g, t in zip(found, wanted, strict=True):
        for one in mirrored.experimental_local_results(g):
            assert np.linalg.norm(one - t) <= CLOSE * np.linalg.norm(t)
    assert {layer.compute_dtype for layer in model._flatten_layers()} == {"float16"}
