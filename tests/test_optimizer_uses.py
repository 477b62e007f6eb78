"""What people do with an optimizer: under GradScaleOptimizer it is as with the optimizer itself."""

import copy
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs

layers = keras.layers
optimizers = keras.optimizers
schedules = keras.optimizers.schedules
INF, NAN = float("inf"), float("nan")
RNG = np.random.default_rng(0)
LOSS = "sparse_categorical_crossentropy"
MULTI = pytest.mark.skipif(
    not hasattr(optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
)


def adamw_without_biases():
    optimizer = optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def two_optimizers():
    by_path = {".*kernel": optimizers.Adam(0.02)}
    default = optimizers.SGD(0.1, momentum=0.5)
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(default, by_path))


SETTINGS = {
    "clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5),
    "global_clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
    "clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.1),
    "weight_decay": adamw_without_biases,
    "ema": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5),
    "ema_overwrite": lambda: optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "accumulation": lambda: optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
    "accumulation_of_all": lambda: optimizers.Adam(
        schedules.CosineDecay(0.05, 4),
        gradient_accumulation_steps=2,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=2,
        global_clipnorm=0.5,
        weight_decay=0.1,
    ),
    "schedule": lambda: optimizers.SGD(schedules.CosineDecay(0.5, 4)),
    "multi": two_optimizers,
}
EACH = [pytest.param(name, marks=[MULTI] if name == "multi" else []) for name in SETTINGS]

KINDS = ["Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion"] + [
    "Muon",
    "Nadam",
    "RMSprop",
    "SGD",
    "ScheduleFreeAdamW",
]
KINDS = [name for name in KINDS if hasattr(optimizers, name)]


def inner_of(optimizer):
    """The optimizer itself, or the one that is wrapped."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def bare(optimizer):
    return optimizer


def assert_same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def applying(run, optimizer, variables):
    """A function of the variables' gradients; gives the number of steps."""

    def apply(*gradients):
        return tf.identity(optimizer.apply_gradients(zip(gradients, variables, strict=True)))

    return run(apply)


def learning_rate(optimizer):
    """That of each optimizer inside, of a MultiOptimizer."""
    inner = inner_of(optimizer)
    return [float(one.learning_rate) for one in getattr(inner, "optimizers", [inner])]


# --- Steps, given by their gradients -------------------------------------------------------------

GOOD = [
    [RNG.standard_normal(shape).astype("float32") for shape in ((4, 3), (3,))] for _ in range(5)
]


def with_bad_ones(steps):
    """Before, between and after the steps, others with one entry that is not finite."""
    mixed = []
    for i, (value, which) in enumerate([(NAN, 0), (INF, 1), (-INF, 0), (NAN, 1), (INF, 0)]):
        bad = [np.array(g) for g in steps[i]]
        bad[which].flat[-1] = value
        mixed += [bad, steps[i]] if i % 2 else [bad, bad, steps[i]]
    return [*mixed, bad]


def after(run, optimizer, steps):
    """Weights, the state of the optimizer inside and its learning rate after some steps."""
    values = np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3), np.ones(3, "float32")
    variables = [keras.Variable(values[0], name="kernel"), keras.Variable(values[1], name="bias")]
    variables[0].constraint = keras.constraints.MaxNorm(1.5)
    optimizer.build(variables)
    apply = applying(run, optimizer, variables)
    for step in steps:
        apply(*map(tf.constant, step))
    counted = [int(optimizer.iterations), *learning_rate(optimizer)]
    optimizer.finalize_variable_values(variables)
    return counted, [v.numpy() for v in variables + inner_of(optimizer).variables]


def check_steps(make, run, mode):
    counted, wanted = after(run, make(), GOOD)
    optimizer = gs.GradScaleOptimizer(make())
    found_counted, found = after(run, optimizer, with_bad_ones(GOOD))
    assert found_counted == counted
    assert (int(optimizer.applied_steps), int(optimizer.skipped_steps)) == (5, 9)
    if mode == "xla":
        # XLA rounds in another order where there is a condition around it.
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)
        wanted = after(run, gs.GradScaleOptimizer(make()), GOOD)[1]
    assert_same(found, wanted)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("mode", ["eager", "graph", pytest.param("xla", marks=pytest.mark.slow)])
def test_bad_steps_leave_no_trace(run, mode, name):
    """To the last bit: weights, averages, accumulated gradients, iterations, learning rates."""
    check_steps(SETTINGS[name], run, mode)


@pytest.mark.parametrize("name", KINDS)
def test_every_optimizer_of_keras(name):
    check_steps(getattr(optimizers, name), bare, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_every_optimizer_of_keras_in_a_graph(run, mode, name):
    check_steps(getattr(optimizers, name), run, mode)


@pytest.mark.parametrize("name", [p for p in EACH if p.values[0] != "multi"])
def test_sparse_gradients(name):
    """Rows of a table, one of them twice."""
    found = []
    for wrap in (bare, gs.GradScaleOptimizer):
        table = keras.Variable(np.linspace(-1, 1, 8, dtype="float32").reshape(4, 2), name="kernel")
        optimizer = wrap(SETTINGS[name]())
        optimizer.build([table])
        for i, step in enumerate(GOOD):
            values, bad = step[0][:3, :2], np.full((3, 2), NAN if i % 2 else INF, "float32")
            for rows in [values] if wrap is bare else [bad, values]:
                slices = tf.IndexedSlices(rows, tf.constant([2, 0, 2]), tf.constant([4, 2]))
                optimizer.apply([slices], [table])
        found.append([v.numpy() for v in [table, *inner_of(optimizer).variables]])
    assert_same(*found)
    assert not np.array_equal(found[0][0], np.linspace(-1, 1, 8, dtype="float32").reshape(4, 2))


# --- Training with bad batches -------------------------------------------------------------------

X = RNG.standard_normal((8, 4, 6)).astype("float32")
Y = np.arange(32).reshape(8, 4) % 3
# One value each: NaN reaches every weight.
BAD = (0, 3, 4)
SPOILT = np.array(X)
SPOILT[BAD, 0, 0] = NAN, INF, -INF
APPLIED = [i for i in range(8) if i not in BAD]


def network(policy="float32"):
    keras.utils.set_random_seed(2)
    with gs.policy_scope(policy):
        inputs = keras.Input((6,))
        x = layers.Dense(8, activation="tanh", name="first")(inputs)
        x = layers.Dense(8, activation="tanh", name="middle")(x)
        return keras.Model(inputs, layers.Dense(3, activation="softmax", name="last")(x))


def trained(model, optimizer, batches, x=SPOILT, **options):
    model.compile(optimizer, LOSS, **options)
    dataset = tf.data.Dataset.from_tensor_slices((x[batches], Y[batches]))
    model.fit(dataset, epochs=2, shuffle=False, verbose=0)
    state = model.weights + inner_of(model.optimizer).variables
    return [v.numpy() for v in state] + learning_rate(model.optimizer)


WAYS = {"eager": {"run_eagerly": True}, "graph": {"jit_compile": False}}
WAYS.update(xla={"jit_compile": True}, several={"steps_per_execution": 4})


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("accumulation_of_all", "eager"),
        ("accumulation_of_all", "graph"),
        *[pytest.param("accumulation_of_all", w, marks=pytest.mark.slow) for w in WAYS],
        *[pytest.param(p.values[0], "graph", marks=[pytest.mark.slow, *p.marks]) for p in EACH],
    ],
)
def test_bad_batches_in_fit(name, way):
    """A float32 model: as if they had been left out, to the last bit."""
    make = SETTINGS[name]
    model = gs.convert(network())
    found = trained(model, make(), range(8), **WAYS[way])
    assert int(model.optimizer.skipped_steps) == 2 * len(BAD)
    assert_same(found, trained(gs.convert(network()), make(), APPLIED, **WAYS[way]))
    # And as plain Keras without them.
    for a, b in zip(found, trained(network(), make(), APPLIED, **WAYS[way]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("unscale", ["layer", "optimizer"])
def test_bad_batches_of_a_float16_model(unscale):
    """With scales that are fixed; else they are chosen anew after each, as they should be."""
    found = []
    for batches in (range(8), APPLIED):
        config = gs.GradScaleConfig(unscale=unscale)
        model = gs.convert(network("mixed_float16"), config)
        model.scales.freeze(lambda site: 2.0**6 if site.kind == "cast" else 1.0)
        found.append(trained(model, SETTINGS["accumulation_of_all"](), batches))
    assert_same(*found)


@pytest.mark.parametrize("name", EACH)
def test_unscaled_by_the_optimizer(name):
    """What the optimizer inside does with gradients, it does with true ones: no bit differs."""
    found = []
    for unscale in ("layer", "optimizer"):
        config = gs.GradScaleConfig(unscale=unscale)
        model = gs.convert(network("mixed_float16"), config)
        batches = range(2, 7)
        found.append(trained(model, SETTINGS[name](), batches, run_eagerly=True))
        assert int(model.optimizer.skipped_steps) == 4
    assert_same(*found)
    wanted = trained(network(), SETTINGS[name](), [2, 5, 6])
    for a, b in zip(found[0], wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0.05, atol=5e-3)


# --- 16: accumulated gradients, of which one is not finite ---------------------------------------


@pytest.mark.parametrize("unscale", ["layer", "optimizer"])
def test_accumulation_leaves_out_a_bad_batch_and_takes_the_next_instead(unscale):
    """The update is the mean over the first, third, fourth and fifth batch."""
    models = []
    config = gs.GradScaleConfig(unscale=unscale)
    for policy, x, batches in (
        ("float32", X, [0, 2, 3, 4]),
        ("float32", X, [0, 1, 2, 3, 4]),
        ("mixed_float16", X, [0, 1, 2, 3, 4]),
    ):
        model = network(policy)
        model.get_layer("middle").trainable = False
        if models:
            model, x = gs.convert(model, config), np.array(x)
            x[1, 0, 0] = INF
        optimizer = optimizers.SGD(0.5, gradient_accumulation_steps=4)
        model.compile(optimizer, LOSS, run_eagerly=True)
        before = model.get_weights()
        for i in batches:
            assert_same(model.get_weights(), before)
            model.train_on_batch(x[i], Y[i])
        assert int(model.optimizer.iterations) == 1
        models.append(model)
    true, float32, float16 = models
    for optimizer in (float32.optimizer, float16.optimizer):
        assert (int(optimizer.applied_steps), int(optimizer.skipped_steps)) == (4, 1)
    assert_same(float32.get_weights(), true.get_weights())
    for a, b, old in zip(float16.get_weights(), true.get_weights(), before, strict=True):
        assert np.linalg.norm(a - b) <= 5e-3 * np.linalg.norm(b - old)
    frozen = float16.get_layer("middle").get_weights()
    assert_same(frozen, network().get_layer("middle").get_weights())


# --- 17: one wrapper, one division ---------------------------------------------------------------


def scaled(optimizer):
    return keras.saving.serialize_keras_object(optimizers.LossScaleOptimizer(optimizer))


REFUSED = {
    "loss_scale_factor": (
        lambda: optimizers.Adam(loss_scale_factor=8.0),
        r"remove `loss_scale_factor` from the optimizer. Received: 8.0",
    ),
    "loss_scale_factor, of two": (
        lambda: optimizers.MultiOptimizer(
            optimizers.OptimizerMap(optimizers.SGD()), loss_scale_factor=4.0
        ),
        r"remove `loss_scale_factor` from the optimizer. Received: 4.0",
    ),
    "LossScaleOptimizer": (
        lambda: optimizers.LossScaleOptimizer(optimizers.Adam()),
        r"Pass the optimizer inside, `inner_optimizer.inner_optimizer`",
    ),
    "LossScaleOptimizer, of a file": (
        lambda: scaled(optimizers.Adam()),
        r"Pass the optimizer inside, `inner_optimizer.inner_optimizer`",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[MULTI] if n.endswith("two") else []) for n in REFUSED]
)
def test_compile_refuses_what_scales_the_loss(name):
    make, message = REFUSED[name]
    model = gs.convert(network("mixed_float16"))
    with pytest.raises(ValueError, match=message):
        model.compile(make(), LOSS)
    assert not model.compiled


def first_step(model, optimizer, **options):
    before = model.get_weights()
    model.compile(optimizer, LOSS, run_eagerly=True, **options)
    model.train_on_batch(X[0], Y[0])
    return [a - b for a, b in zip(model.get_weights(), before, strict=True)]


def in_keras_model(make):
    """A gradient-scaled layer in a model that is Keras' own, compiled by it or by the user."""

    def build():
        keras.utils.set_random_seed(2)
        with gs.policy_scope("mixed_float16"):
            inputs = keras.Input((6,))
            x = gs.layers.GradientScaled(layers.Dense(8, activation="tanh"))(inputs)
            x = gs.layers.GradientScaled(layers.Dense(8, activation="tanh"))(x)
            x = layers.Dense(3, activation="softmax", dtype="float32")(x)
            return keras.Model(inputs, x)

    return lambda: first_step(build(), make())


def converted(make, **options):
    return lambda: first_step(gs.convert(network("mixed_float16")), make(), **options)


SGD = optimizers.SGD
ONCE = {
    "wrapped by compile": converted(lambda: SGD(0.5)),
    "by hand": converted(lambda: gs.GradScaleOptimizer(SGD(0.5))),
    "by its configuration": converted(
        lambda: keras.saving.serialize_keras_object(gs.GradScaleOptimizer(SGD(0.5)))
    ),
    "not by Keras": converted(lambda: SGD(0.5), auto_scale_loss=False),
    "Keras model": in_keras_model(lambda: gs.GradScaleOptimizer(SGD(0.5))),
    "Keras model, wrapped by Keras": in_keras_model(lambda: SGD(0.5)),
}


@pytest.mark.parametrize("name", ONCE)
def test_gradients_are_divided_once(name):
    for a, b in zip(ONCE[name](), first_step(network(), SGD(0.5)), strict=True):
        assert np.linalg.norm(a - b) < 5e-3 * np.linalg.norm(b)


# --- 18: learning rates and what reads them ------------------------------------------------------


class Log(keras.callbacks.Callback):
    """What is read of the optimizer after each batch, and set: what callbacks of one's own do."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        self.seen.append((int(optimizer.iterations), float(optimizer.learning_rate)))

    def on_epoch_end(self, epoch, logs=None):
        # Both ways in which people set it.
        if epoch:
            self.model.optimizer.learning_rate.assign(0.25)
        else:
            self.model.optimizer.learning_rate = 0.5


def halve(epoch, rate):
    return 0.5 * rate


def plateau():
    # No loss is better by so much.
    return keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=100.0)


CALLBACKS = {
    "ReduceLROnPlateau": (lambda: SGD(0.125), plateau),
    "LearningRateScheduler": (
        lambda: SGD(0.125),
        lambda: keras.callbacks.LearningRateScheduler(halve),
    ),
    "of one's own": (lambda: SGD(0.125), Log),
    "SwapEMAWeights": (
        lambda: SGD(0.125, use_ema=True, ema_momentum=0.5),
        lambda: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
    ),
    "ReduceLROnPlateau, two": (two_optimizers, plateau),
    "LearningRateScheduler, two": (
        two_optimizers,
        lambda: keras.callbacks.LearningRateScheduler(halve),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[MULTI] if n.endswith("two") else []) for n in CALLBACKS]
)
def test_callbacks(name):
    make, callback = CALLBACKS[name]
    found = []
    for policy, convert in (("float32", bare), ("float32", gs.convert), ("float16", gs.convert)):
        model = convert(network(policy.replace("float16", "mixed_float16")))
        optimizer = make()
        for one in getattr(optimizer, "optimizers", [optimizer]):
            # Under which it is logged.
            one.name = type(one).__name__
        model.compile(optimizer, LOSS, run_eagerly=True)
        called = callback()
        history = model.fit(X[0], Y[0], epochs=4, verbose=0, callbacks=[called]).history
        rates = {key: value for key, value in history.items() if key.startswith("learning_rate")}
        seen = getattr(called, "seen", None), rates, learning_rate(model.optimizer)
        found.append((seen, history["loss"], model.get_weights()))
    (wanted, loss, weights), *others = found
    for (seen, other_loss, other_weights), tolerance in zip(others, (1e-6, 5e-3), strict=True):
        assert seen == wanted
        np.testing.assert_allclose(other_loss, loss, rtol=tolerance)
        for a, b in zip(other_weights, weights, strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    if "Plateau" in name or "Scheduler" in name:
        # The rates did fall: by half at each of the ends of epochs, or of their beginnings.
        assert all(last < first for first, *_, last in wanted[1].values())
        assert len(wanted[1]) == (2 if name.endswith("two") else 1)


def test_a_cosine_schedule_in_fit():
    """Its step is `iterations`; a skipped step does not advance it."""
    model = gs.convert(network("mixed_float16"))
    model.compile(SGD(schedules.CosineDecay(0.5, decay_steps=10)), LOSS)
    for i in range(8):
        model.train_on_batch(SPOILT[i], Y[i])
        applied = len([j for j in APPLIED if j <= i])
        assert int(model.optimizer.iterations) == applied
        wanted = 0.25 * (1 + np.cos(np.pi * applied / 10))
        np.testing.assert_allclose(float(model.optimizer.learning_rate), wanted, rtol=1e-6)
    with pytest.raises(TypeError, match="its learning rate is not settable"):
        model.optimizer.learning_rate = 0.1


def test_a_learning_rate_becomes_a_schedule(run):
    found = []
    for wrap in (bare, gs.GradScaleOptimizer):
        weight, optimizer = keras.Variable(0.0), wrap(SGD(0.5))
        optimizer.build([weight])
        one = tf.constant(1.0)
        applying(bare, optimizer, [weight])(one)
        optimizer.learning_rate = schedules.PiecewiseConstantDecay([1], [0.25, 0.125])
        step = applying(run, optimizer, [weight])
        step(one)
        step(one)
        found.append((float(weight), float(optimizer.learning_rate)))
    # 0.5 + 0.25 + 0.125
    assert found == [(-0.875, 0.125)] * 2


def test_tensorboard(tmp_path):
    """It logs the rate of the optimizer inside, at its iterations."""
    pytest.importorskip("tensorboard")
    logged = []
    for name, convert in (("plain", bare), ("ours", gs.convert)):
        model = convert(network())
        model.compile(SGD(schedules.CosineDecay(0.5, decay_steps=8)), LOSS)
        callback = keras.callbacks.TensorBoard(tmp_path / name, update_freq=1)
        model.fit(
            X[0], Y[0], batch_size=1, epochs=2, shuffle=False, verbose=0, callbacks=[callback]
        )
        found = {}
        for path in (tmp_path / name).rglob("*tfevents*"):
            for event in tf.compat.v1.train.summary_iterator(str(path)):
                for value in event.summary.value:
                    if value.tag != "keras":
                        number = tf.make_ndarray(value.tensor).item()
                        found[path.parent.name, value.tag, event.step] = number
        logged.append(found)
    plain, ours = logged
    assert ours.keys() == plain.keys()
    assert {tag for _, tag, _ in plain} >= {"epoch_learning_rate", "epoch_loss", "batch_loss"}
    for key, value in plain.items():
        if "steps_per_second" not in key[1]:
            np.testing.assert_allclose(ours[key], value, rtol=1e-5)


# --- By string, dictionary and instance ----------------------------------------------------------


@pytest.mark.parametrize("name", EACH)
def test_serialization(name):
    """Twice there and back, alone and in `compile`."""
    inner = SETTINGS[name]()
    optimizer = gs.GradScaleOptimizer(inner, name="mine")
    again = gs.GradScaleOptimizer.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config() and again.name == "mine"
    config = optimizers.serialize(optimizer)
    assert optimizers.deserialize(config).get_config() == optimizer.get_config()
    assert optimizers.get(config).inner_optimizer.get_config() == inner.get_config()
    model = gs.convert(network())
    for given in (optimizers.serialize(inner), config):
        model.compile(given, LOSS)
        assert type(model.optimizer) is gs.GradScaleOptimizer
        assert model.optimizer.scales is model.scales
        assert model.optimizer.inner_optimizer.get_config() == inner.get_config()
        other = gs.convert(network())
        other.compile_from_config(model.get_compile_config())
        assert other.optimizer.inner_optimizer.get_config() == inner.get_config()
        assert other.optimizer.built and other.optimizer.scales is other.scales


@pytest.mark.parametrize("given", ["adam", "Adam", {"class_name": "Adam", "config": {}}])
def test_compile_by_name(given):
    model = gs.convert(network())
    model.compile(given, LOSS)
    assert type(model.optimizer.inner_optimizer) is optimizers.Adam
    assert model.optimizer.get_config()["inner_optimizer"]["class_name"] == "Adam"


# --- Methods and attributes ----------------------------------------------------------------------


def one_weight(wrap, *args, **kwargs):
    weight = keras.Variable([1.0, -1.0], name="kernel")
    optimizer = wrap(SGD(*args, **kwargs))
    return weight, optimizer


BOTH = pytest.mark.parametrize("wrap", [bare, gs.GradScaleOptimizer], ids=["bare", "wrapped"])


@BOTH
def test_apply_gradients_returns_the_number_of_steps(run, wrap):
    """Of batches, where gradients are accumulated."""
    for steps in (None, 2):
        weight, optimizer = one_weight(wrap, 0.5, gradient_accumulation_steps=steps)
        optimizer.build([weight])
        step = applying(run, optimizer, [weight])
        assert [int(step(tf.constant([1.0, 1.0]))) for _ in range(3)] == [1, 2, 3]
        if wrap is not bare:
            assert int(step(tf.constant([1.0, NAN]))) == 3


@BOTH
def test_no_gradients_are_no_step(wrap):
    weight, optimizer = one_weight(wrap, 0.5)
    assert optimizer.apply([]) is None
    optimizer.build([weight])
    optimizer.apply([])
    optimizer.apply([], [])
    assert int(optimizer.iterations) == 0
    assert wrap is bare or int(optimizer.applied_steps) == 0


@BOTH
def test_gradients_alone_belong_to_the_variables_it_was_built_for(wrap):
    weight, optimizer = one_weight(wrap, 0.5)
    with pytest.raises(ValueError, match=r"built.*`?optimizer.build"):
        optimizer.apply([tf.constant([1.0, 1.0])])
    optimizer.build([weight])
    optimizer.apply([tf.constant([1.0, 1.0])])
    np.testing.assert_array_equal(weight, [0.5, -1.5])
    with pytest.raises(ValueError, match="Received a list of 2 gradients"):
        optimizer.apply([tf.constant([1.0, 1.0])] * 2)
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply([tf.constant(1.0)], [keras.Variable(1.0)])


@BOTH
def test_variables_in_turn(run, wrap):
    """Some variables now, others later, as where layers are trained by halves."""
    variables = [keras.Variable(1.0, name="kernel"), keras.Variable(2.0, name="bias")]
    optimizer = wrap(SGD(0.5, momentum=0.5))
    optimizer.build(variables)
    steps = [applying(run, optimizer, [v]) for v in variables]
    for step in (*steps, *steps):
        step(tf.constant(1.0))
    # v ← v/2 − g/2 twice: −0.5, −0.75.
    assert [float(v) for v in variables] == [-0.25, 0.75]
    assert int(optimizer.iterations) == 4


@BOTH
def test_weights_excluded_from_decay(wrap):
    variables = [keras.Variable([1.0], name=name) for name in ("kernel", "bias", "other")]
    optimizer = wrap(SGD(0.5, weight_decay=0.5))
    optimizer.exclude_from_weight_decay(var_list=variables[2:], var_names=["bias"])
    optimizer.apply([tf.constant([0.0])] * 3, variables)
    # 1 − 0.5 · 0.5
    assert [float(v[0]) for v in variables] == [0.75, 1.0, 1.0]


@BOTH
def test_hyperparameters_are_read_and_set(wrap):
    weight, optimizer = one_weight(wrap, 1.0, weight_decay=0.0, clipvalue=4.0)
    assert (optimizer.weight_decay, optimizer.clipvalue) == (0.0, 4.0)
    assert optimizer.clipnorm is None and optimizer.global_clipnorm is None
    optimizer.apply([tf.constant([8.0, 0.0])], [weight])
    np.testing.assert_array_equal(weight, [-3.0, -1.0])
    optimizer.clipvalue = 2.0
    optimizer.apply([tf.constant([8.0, 0.0])], [weight])
    np.testing.assert_array_equal(weight, [-5.0, -1.0])
    optimizer.clipvalue, optimizer.weight_decay = None, 0.5
    optimizer.apply([tf.constant([0.0, 0.0])], [weight])
    np.testing.assert_array_equal(weight, [-2.5, -0.5])


@BOTH
def test_state_as_a_list_of_arrays(wrap):
    """`variables` and `set_weights`: what code of one's own saves and restores."""
    found = []
    for state in (None, 0):
        weight, optimizer = one_weight(wrap, 0.5, momentum=0.5)
        optimizer.build([weight])
        if state is not None:
            optimizer.set_weights(found[0])
        else:
            optimizer.apply([tf.constant([1.0, 2.0])], [weight])
        found.append([v.numpy() for v in optimizer.variables])
    assert_same(*found)
    assert int(optimizer.iterations) == 1
    np.testing.assert_array_equal(optimizer.variables[-1], [-0.5, -1.0])
    with pytest.raises(ValueError, match="not yet been built"):
        one_weight(wrap, 0.5)[1].set_weights(found[0])


@BOTH
def test_a_copy_is_a_new_optimizer(wrap):
    """It has the same settings and no state, of which Keras warns."""
    weight, optimizer = one_weight(wrap, 0.5, momentum=0.5)
    optimizer.apply([tf.constant([1.0, 2.0])], [weight])
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        again = copy.deepcopy(optimizer)
    assert type(again) is type(optimizer) and again.get_config() == optimizer.get_config()
    assert int(again.iterations) == 0
    again.apply([tf.constant([1.0, 2.0])], [weight])
    np.testing.assert_array_equal(weight, [0.0, -3.0])


@BOTH
def test_stateless_apply_is_not_for_tensorflow(wrap):
    weight, optimizer = one_weight(wrap, 0.5)
    optimizer.build([weight])
    state = [v.value for v in optimizer.variables]
    with pytest.raises(ValueError, match="^stateless_apply is not supported with the TensorFlow"):
        optimizer.stateless_apply(state, [tf.constant([1.0, 1.0])], [weight.value])


@MULTI
@BOTH
def test_the_optimizers_of_two(wrap):
    optimizer = wrap(two_optimizers())
    assert [type(one) for one in optimizer.optimizers] == [optimizers.Adam, SGD]
    assert not hasattr(wrap(SGD()), "optimizers")


class Heavy(optimizers.Optimizer):
    """As Keras' documentation has it: `build` does not ask whether it was called before."""

    def build(self, variables):
        super().build(variables)
        self.slots = [self.add_variable_from_reference(v, name="slot") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        slot = self.slots[self._get_variable_index(variable)]
        self.assign_add(slot, gradient)
        self.assign_sub(variable, learning_rate * slot)


@pytest.mark.parametrize("make", [Heavy, lambda rate: SGD(rate, momentum=0.5)])
def test_an_optimizer_keeps_its_state_in_a_new_wrapper(make):
    """A model is compiled once more with the optimizer that it was given."""
    found = []
    for convert in (bare, gs.convert):
        model, optimizer = convert(network()), make(0.1)
        for _ in range(2):
            model.compile(optimizer, LOSS)
            model.train_on_batch(X[0], Y[0])
        found.append(model.get_weights() + [v.numpy() for v in optimizer.variables])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


class Centralized(SGD):
    """Takes the mean off the gradients of kernels, and leaves those of biases as they are."""

    def apply(self, grads, trainable_variables=None):
        grads = [g - tf.reduce_mean(g, 0) if g.shape.rank > 1 else g for g in grads]
        super().apply(grads, trainable_variables)


@pytest.mark.parametrize("way", ["graph", "xla"])
def test_an_optimizer_that_changes_some_of_the_gradients(way):
    found = []
    for convert in (bare, gs.convert):
        model = convert(network())
        before = model.layers[1].kernel.numpy()
        model.compile(Centralized(0.5), LOSS, **WAYS[way])
        model.train_on_batch(X[0], Y[0])
        moved = model.layers[1].kernel.numpy() - before
        np.testing.assert_allclose(moved.mean(0), 0, atol=1e-7)
        found.append(model.get_weights())
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


# --- Where nothing scales gradients ---------------------------------------------------------------


def test_a_clone_of_a_sequential_is_plain_and_says_so():
    """It is compiled with the same kind of optimizer, which has no scales."""
    gs.set_global_policy("mixed_float16")
    model = gs.convert(keras.Sequential([keras.Input((6,)), layers.Dense(3, "softmax")]))
    model.compile("sgd", LOSS)
    with pytest.warns(UserWarning, match="scales no loss: the model does the scaling.*Convert"):
        plain = keras.models.clone_model(model)
        plain.train_on_batch(X[0], Y[0])
    assert type(plain) is keras.Sequential
    assert type(plain.optimizer) is gs.GradScaleOptimizer


def test_a_clone_of_a_functional_model_is_scaled():
    gs.set_global_policy("mixed_float16")
    model = gs.convert(network("mixed_float16"))
    model.compile("sgd", LOSS)
    again = keras.models.clone_model(model)
    assert type(again) is gs.Model and again.optimizer.scales is again.scales


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_no_warning_where_there_is_nothing_to_warn_of(policy):
    gs.set_global_policy(policy)
    model = network(policy)
    if policy != "float32":
        model = gs.convert(model)
    # Without its scales, in a loop of one's own.
    gs.GradScaleOptimizer(SGD()).build(model.trainable_variables)
    inputs = keras.Input((6,))
    part = keras.Model(inputs, gs.layers.GradientScaled(layers.Dense(3))(inputs))
    gs.GradScaleOptimizer(SGD()).build(part.trainable_variables)


# --- Several optimizers --------------------------------------------------------------------------


def step_of_two(run, model, pair, groups):
    """A training step with two optimizers, each for a group of the model's variables."""

    def step(x, y, both, poison):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x))
            loss = tf.reduce_mean(losses)
        first, second = tape.gradient(loss, groups)
        if both:
            pair[0].apply([g + poison for g in first], groups[0])
        pair[1].apply(second, groups[1])

    return run(step)


@pytest.mark.parametrize("unscale", ["layer", "optimizer"])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_two_optimizers_for_one_model(run, unscale):
    """Each with half of the variables; one skips alone."""
    weights = []
    for policy in ("float32", "mixed_float16"):
        model = network(policy)
        pair = [optimizers.Adam(0.01), SGD(0.1, momentum=0.5)]
        if policy != "float32":
            model = gs.convert(model, gs.GradScaleConfig(unscale=unscale))
            pair = [gs.GradScaleOptimizer(one, scales=model.scales) for one in pair]
        groups = model.trainable_variables[:2], model.trainable_variables[2:]
        for one, group in zip(pair, groups, strict=True):
            one.build(group)
        step = step_of_two(run, model, pair, groups)
        for i in range(4):
            # What ours skips is left out for the float32 model.
            both, poison = (i != 2, 0.0) if policy == "float32" else (True, NAN if i == 2 else 0.0)
            step(tf.constant(X[i]), tf.constant(Y[i]), both, tf.constant(poison))
        weights.append(model.get_weights())
        assert [int(one.iterations) for one in pair] == [3, 4]
    assert [int(one.skipped_steps) for one in pair] == [1, 0]
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=0.02, atol=2e-3)


# --- The page for users --------------------------------------------------------------------------

PAGE = Path(__file__).parents[1] / "docs" / "optimizer.md"


def test_the_page_on_optimizers_runs_and_prints_what_it_says(capsys):
    names = {"__name__": "page"}
    said = []
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        exec(block, names)
        said += re.findall(r"print\(.*\)  # (.*)", block)
    assert capsys.readouterr().out.splitlines() == said
    assert said
