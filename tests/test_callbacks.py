"""What the callbacks report is what happens, and costs nothing when they are not there."""

import csv
import doctest
import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs
from tf_gradscale import counters, theory
from tf_gradscale.callbacks import ScaleHistory, ScaleMonitor

layers = keras.layers
ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "callbacks.md").read_text("utf-8")
LAMBDA, LOST, LARGEST = 2.0**-24, 2.0**-25, 65504.0
BATCH = 16

# How a model is compiled.
WAYS = {"graph": {"jit_compile": False}, "xla": {"jit_compile": True}, "eager": {}}
WAYS["eager"]["run_eagerly"] = True


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


def linear(y_true, y_pred):
    """A loss whose gradient with regard to a prediction is the target over the batch size."""
    return tf.reduce_sum(y_true * y_pred, axis=list(range(1, len(y_pred.shape))))


def compiled(model, config=None, loss=linear, **how):
    """A converted model whose weights stay as they are."""
    model = gs.convert(model, config)
    model.compile(keras.optimizers.SGD(0.0), loss, **{"jit_compile": False, **how})
    return model


def two_layers(units=(24, 20), features=12, config=None, **how):
    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((features,))
        x = layers.Dense(units[0], use_bias=False, name="first")(inputs)
        y = layers.Dense(units[1], use_bias=False, name="second")(x)
        return compiled(keras.Model(inputs, y), config, **how)


def spread(shape, seed, binades=1.0):
    """Normal numbers times a power of two, which is normal as well."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * np.exp2(rng.normal(0.0, binades, shape).round())
    return values.astype("float32")


def half(x):
    with np.errstate(over="ignore"):
        return np.asarray(x).astype("float16").astype("float64")


def rates(exact, smallest=LAMBDA):
    """Underflow, lost and overflow of a gradient that is rounded to float16."""
    magnitude = np.abs(exact[exact != 0])
    rounded = half(magnitude)
    masks = magnitude <= smallest, rounded == 0, np.isinf(rounded)
    return np.array([mask.mean() for mask in masks])


def found(logs, name, index=-1):
    """The rates of a site in the history of a training."""
    return np.array([logs[f"{rate}/{name}"][index] for rate in counters.RATES])


def train(model, x, y, *callbacks, batch=BATCH, **kwargs):
    fitted = model.fit(
        x, y, batch, verbose=0, shuffle=False, callbacks=list(callbacks), **{"epochs": 1, **kwargs}
    )
    return fitted.history


# --- Rates ---------------------------------------------------------------------------------------


def check_casts_and_products(smallest, least, way):
    """Against float64, with a known share at each site."""
    model = two_layers(config=gs.GradScaleConfig(smallest=smallest), **way)
    first, second = model.layers[-2:]
    first.set_weights([2.0**-2 * spread((12, 24), 1)])
    second.set_weights([2.0**-12 * spread((24, 20), 2)])
    x, y = 2.0**-8 * spread((BATCH, 12), 3), spread((BATCH, 20), 4, binades=4.0)
    scales = {
        "output": 2.0**-18,
        "second/kernel": 2.0**2,
        "second/input": 2.0**3,
        "first/kernel": 2.0**6,
    }
    model.scales.freeze(scales)
    logs = train(model, x, y, ScaleMonitor())

    output = y.astype("float64") / BATCH * scales["output"]
    # Next to a cast, the scale of the kernel's gradient is none of the input's.
    dz = half(output)
    hidden = first(x).numpy().astype("float64")
    kernel = half(second.get_weights()[0].astype("float64") * scales["second/input"])
    wanted = {
        "output": output,
        "second/kernel": hidden.T @ dz * scales["second/kernel"],
        "second/input": dz @ kernel.T,
        "first/kernel": half(x).T @ half(dz @ kernel.T) * scales["first/kernel"],
    }
    for name, exact in wanted.items():
        reference = rates(exact, least)
        assert reference[1] < reference[0] and 0.05 < reference[1] < 0.9, (name, reference)
        # Which side of a threshold an entry falls on may depend on the rounding of float32, and in
        # the first layer on how float16 sums.
        slack = {"output": 0.0, "first/kernel": 4.0}.get(name, 1.0) / exact.size
        assert np.all(np.abs(found(logs, name) - reference) <= slack + 1e-7), name


def test_rates_at_casts_and_products(way):
    check_casts_and_products("subnormal", 2.0**-24, way)


def test_underflow_is_what_the_configuration_calls_so():
    check_casts_and_products("normal", 2.0**-14, WAYS["graph"])


def test_underflow_of_a_product_is_what_theorem_1_says():
    model = two_layers(units=(128, 64))
    sigma_dy, sigma_w = 1e-4, 2e-4
    normal = np.random.default_rng(0).standard_normal
    model.layers[-1].set_weights([sigma_w * normal((128, 64))])
    model.scales.freeze(lambda site: 1.0)
    x, y = np.ones((512, 12), "float32"), 512 * sigma_dy * normal((512, 64)).astype("float32")
    logs = train(model, x, y, ScaleMonitor(sites="second/input"), batch=512)
    for rate, smallest in zip(found(logs, "second/input"), (LAMBDA, LOST), strict=False):
        wanted = theory.gemm_underflow_rate(1.0, 64, sigma_dy, sigma_w, smallest)
        assert 0.1 < wanted < 0.5
        # 65536 entries that share their factors.
        assert abs(rate - wanted) < 0.01


def test_overflow():
    """Where float32's entries are finite; what overflowed before is not counted again."""
    model = two_layers(units=(8, 4), features=3)
    model.layers[-1].set_weights([np.full((8, 4), 2.0**-6, "float32")])
    y = np.full((BATCH, 4), BATCH * 2.0**10, "float32")
    y[:4] = BATCH * 2.0**13
    y[:, 0] = 0.0
    model.scales.freeze({"output": 4.0, "second/input": 2.0**10})
    x = np.full((BATCH, 3), 1.0, "float32")
    logs = train(model, x, y, ScaleMonitor())
    np.testing.assert_array_equal(found(logs, "output"), [0, 0, 0])
    # 3 · 2^15 · 2^4, in a quarter of the rows, is too large, and 3 · 2^12 · 2^4 is too.
    np.testing.assert_array_equal(found(logs, "second/input"), [0, 0, 1])
    assert logs["skipped_steps"] == [1.0]

    model.scales.freeze({"output": 8.0, "second/input": 1.0})
    logs = train(model, x, y, ScaleMonitor(), epochs=2)
    np.testing.assert_array_equal(found(logs, "output"), [0, 0, 0.25])
    # The other rows: 3 · 2^13 · 2^-6.
    np.testing.assert_array_equal(found(logs, "second/input"), [0, 0, 0])
    assert logs["skipped_steps"] == [2.0, 3.0]


def test_rates_of_a_product_of_two_activations():
    with gs.policy_scope("mixed_float16"):
        a, b = keras.Input((6, 8)), keras.Input((5, 8))
        left = layers.Dense(8, use_bias=False, name="left")(a)
        right = layers.Dense(8, use_bias=False, name="right")(b)
        model = compiled(keras.Model([a, b], layers.Dot((2, 2), name="dot")([left, right])))
    for seed, layer in enumerate(model.layers[-3:-1]):
        layer.set_weights([spread((8, 8), seed)])
    x = [2.0**-4 * spread((BATCH, 6, 8), 2), 2.0**-4 * spread((BATCH, 5, 8), 3)]
    y = spread((BATCH, 6, 5), 4, binades=2.0)
    model.scales.freeze({"output": 2.0**-10, "dot/a": 2.0**-6, "dot/b": 2.0**-7})
    logs = train(model, x, y, ScaleMonitor())
    dz = half(y.astype("float64") / BATCH * 2.0**-10)
    pairs = zip(model.layers[-3:-1], x, strict=True)
    left, right = (layer(v).numpy().astype("float64") for layer, v in pairs)
    wanted = {
        "dot/a": dz @ half(right * 2.0**-6),
        "dot/b": dz.swapaxes(1, 2) @ half(left * 2.0**-7),
    }
    for name, exact in wanted.items():
        reference = rates(exact)
        assert reference[1] < reference[0] and 0.01 < reference[1] < 0.9, (name, reference)
        assert np.all(np.abs(found(logs, name) - reference) <= 1.0 / exact.size + 1e-7), name


def test_rates_where_gradients_meet():
    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((12,))
        x = layers.Dense(24, use_bias=False, name="first")(inputs)
        model = compiled(keras.Model(inputs, [x, layers.ReLU(name="relu")(x)]), loss=[linear] * 2)
    x = spread((BATCH, 12), 1)
    y = [2.0**-4 * spread((BATCH, 24), seed, binades=3.0) for seed in (2, 3)]
    model.scales.freeze({"output_0": 2.0**-12, "output_1": 2.0**-16, "first/branch": 2.0**-1})
    logs = train(model, x, y, ScaleMonitor())
    parts = [half(y[0] / BATCH * 2.0**-12), half(y[1] / BATCH * 2.0**-16)]
    passed = model.layers[1](x).numpy() > 0
    reference = rates(0.5 * (parts[0] + 16.0 * passed * parts[1]))
    assert 0.05 < reference[1] < reference[0] < 0.9, reference
    np.testing.assert_allclose(found(logs, "first/branch"), reference, rtol=1e-6)
    assert logs["log2_cumulative_scale/first/branch"] == [-13.0]


def test_several_gradients_at_one_site():
    exact = [tf.constant([2.0**-24, 2.0**-23, 0.0]), tf.constant([2.0**-26, 1e6, np.inf])]
    kept = [tf.cast(x, tf.float16) for x in exact]
    row = counters.rates(exact, kept, LAMBDA)
    # Four entries: two at or below 2^-24, of which one rounds to zero, and one above 65504.
    np.testing.assert_array_equal(row, [1.0, 0.5, 0.25, 0.25])


def test_there_is_no_rate_of_nothing():
    for exact in ([0.0, 0.0], [np.inf, np.nan], []):
        exact = tf.constant(exact, tf.float32)
        found = counters.rates(exact, tf.cast(exact, tf.float16), LAMBDA)
        np.testing.assert_array_equal(found, [0.0] * 4)
    assert all(np.isnan(rate) for rate in counters.means(np.zeros((1, 4))).values())


def test_rates_of_an_operation_that_is_measured():
    """A mean over four positions: what it makes is counted, and what it lost is not known."""
    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((4, 6))
        x = layers.Dense(2, use_bias=False, name="first")(inputs)
        x = layers.GlobalAveragePooling1D(name="pool")(x)
        model = compiled(keras.Model(inputs, x))
    y = np.full((BATCH, 2), BATCH * 2.0**-20, "float32")
    y[:4] = BATCH * 2.0**-22
    y[:, 1] = 0.0
    model.scales.freeze({"output": 1.0, "pool/input": 1.0, "first/kernel": 2.0**6})
    logs = train(model, np.ones((BATCH, 4, 6), "float32"), y, ScaleMonitor())
    # A quarter of what is not zero becomes 2^-24.
    assert (logs["underflow/pool/input"], logs["overflow/pool/input"]) == ([0.25], [0.0])
    assert "lost/pool/input" not in logs and "lost/output" in logs


def test_overflow_of_an_operation_that_is_measured():
    kept = [tf.constant([6e4, np.inf, -np.inf, 0.0], tf.float16)]
    for upstream, row in (([1.0], [1, 0, 0, 2 / 3]), ([np.inf], [1, 0, 0, 0])):
        exact = counters.as_kept(kept, [tf.constant(upstream, tf.float16)])
        found = counters.rates(exact, kept, LAMBDA)
        np.testing.assert_allclose(found, row, rtol=1e-6)


def test_sites_without_a_scale_have_no_rates():
    """In a float32 model, and of gradients that nobody needs."""
    inputs = keras.Input((3,))
    model = compiled(keras.Model(inputs, layers.Dense(2)(inputs)))
    logs = train(model, np.ones((BATCH, 3)), np.ones((BATCH, 2)), ScaleMonitor())
    assert logs["log2_scale/dense/kernel"] == [0.0]
    assert np.isnan(logs["underflow/dense/kernel"][0])

    model = two_layers()
    model.layers[-2].trainable = False
    logs = train(model, np.ones((BATCH, 12)), np.ones((BATCH, 20)), ScaleMonitor())
    assert np.isnan(logs["underflow/first/kernel"][0])
    assert logs["underflow/output"] == [0.0]


# --- When ----------------------------------------------------------------------------------------


def shares(counts):
    """Targets in batches of 16 of which so many are lost at the output, whose scale is 2^-20."""
    y = np.ones((len(counts), BATCH, 1), "float32")
    for batch, count in zip(y, counts, strict=True):
        batch[:count] = 2.0**-10
    return BATCH * y.reshape(-1, 1)


def one_layer(**how):
    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((3,))
        model = compiled(keras.Model(inputs, layers.Dense(1, name="dense")(inputs)), **how)
    model.scales.freeze(lambda site: 2.0**-20 if site.name == "output" else 1.0)
    return model


class Batches(keras.callbacks.Callback):
    """Keeps what is in the logs of each batch."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append(dict(logs))


def test_logs_of_batches_and_epochs():
    counts = [1, 2, 4, 8, 3]
    batches = Batches()
    monitor = ScaleMonitor(frequency=2, sites="^output$")
    x, y = np.ones((5 * BATCH, 3), "float32"), shares(counts)
    logs = train(one_layer(), x, y, monitor, batches, epochs=2)
    key = "lost/output"
    # After steps 2 and 4, and 6, 8 and 10 of which the first is in the second epoch.
    seen = [16 * batch[key] if key in batch else None for batch in batches.logs]
    assert seen == [None, 1.5, None, 6.0, None, 1.0, None, 3.0, None, 5.5]
    assert logs[key] == [np.mean(counts) / 16] * 2
    rates = {f"{rate}/output" for rate in counters.RATES}
    scales = {"log2_scale/output", "log2_cumulative_scale/output"}
    assert set(logs) == {"loss", "skipped_steps", *rates, *scales}
    assert set(batches.logs[1]) == set(logs)
    assert logs["log2_scale/output"] == [-20.0] * 2
    assert all(type(value) is float for values in logs.values() for value in values)


@pytest.mark.parametrize("way", [{}, {"run_eagerly": True}])
def test_every_third_batch_is_counted(way):
    history = ScaleHistory(frequency=1, rates=3)
    x, y = np.ones((5 * BATCH, 3), "float32"), shares([1, 2, 3, 4, 5])
    train(one_layer(**way), x, y, history)
    column = history.names.index("output")
    np.testing.assert_array_equal(16 * history.lost[:, column], [1, np.nan, np.nan, 4, np.nan])


def test_several_steps_in_an_execution():
    """The last execution is of two steps only."""
    history, monitor = ScaleHistory(frequency=2), ScaleMonitor()
    x, y = np.ones((8 * BATCH, 3), "float32"), shares([1, 2, 3, 4, 5, 6, 7, 8])
    model = one_layer(steps_per_execution=3)
    logs = train(model, x, y, history, monitor)
    np.testing.assert_array_equal(history.steps, [3, 6, 8])
    column = history.names.index("output")
    np.testing.assert_allclose(16 * history.lost[:, column], [2.0, 5.0, 7.5], rtol=1e-6)
    np.testing.assert_allclose(logs["lost/output"], [4.5 / 16], rtol=1e-6)
    # Counted on in a second training.
    train(model, x, y, history)
    np.testing.assert_array_equal(history.steps, [3, 6, 8, 11, 14, 16])


def test_batches_without_number():
    """Keras learns that there are five when it asks for a sixth."""
    x, y = np.ones((5 * BATCH, 3), "float32"), shares([1, 2, 3, 4, 5])
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    history, model = ScaleHistory(frequency=2), one_layer()
    data = data.filter(lambda x, y: True)
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(data, epochs=2, verbose=0, shuffle=False, callbacks=[history])
    np.testing.assert_array_equal(history.steps, [2, 4, 6, 8, 10])
    column = history.names.index("output")
    np.testing.assert_array_equal(16 * history.lost[:, column], [1.5, 3.5, 3.0, 2.5, 4.5])


def test_replicas(mirrored):
    """Each counts its half of a batch."""
    with mirrored.scope():
        model = one_layer()
    history = ScaleHistory(frequency=1)
    y = shares([16, 0, 8, 4])
    x = np.ones((len(y), 3), "float32")
    logs = train(model, x, y, ScaleMonitor(), history, batch=2 * BATCH)
    column = history.names.index("output")
    np.testing.assert_allclose(history.lost[:, column], [0.5, 6 / 16], rtol=1e-6)
    np.testing.assert_allclose(logs["lost/output"], [7 / 16], rtol=1e-6)
    np.testing.assert_array_equal(history.scales[:, column], [2.0**-20] * 2)
    assert logs["skipped_steps"] == [0.0]


# --- Cost ----------------------------------------------------------------------------------------


class Recording(gs.Model):
    """Keeps the graphs in which its step was traced."""

    def train_step(self, data):
        logs = super().train_step(data)
        GRAPHS.append(tf.compat.v1.get_default_graph())
        return logs


GRAPHS = []


def operations(graph):
    """How many operations there are in a graph and in all functions it calls."""
    graph = graph.as_graph_def()
    functions = [len(function.node_def) for function in graph.library.function]
    return len(graph.node), sorted(functions)


def recording(through):
    """A model of a layer and what its output goes through, and a batch."""
    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((4, 6))
        model = Recording(inputs, through(layers.Dense(3)(inputs)))
    model.compile("sgd", "mse", jit_compile=False)
    return model, np.ones((64, 4, 6), "float32"), np.ones((64, *model.output_shape[1:]), "float32")


def traced(model, *batch_and_callbacks):
    """The operations of the graphs that a training traces, the last one of each kind."""
    GRAPHS.clear()
    train(model, *batch_and_callbacks)
    return list(dict.fromkeys(str(operations(graph)) for graph in GRAPHS))


def test_switched_off_it_adds_no_operation():
    def through(x):
        """A branch, a product of two activations and a mean."""
        return layers.GlobalAveragePooling1D()(layers.Dot((2, 1))([x, layers.Reshape((3, 4))(x)]))

    model, *batch = recording(through)
    *_, plain = traced(model, *batch)
    model.train_function = None
    assert traced(model, *batch, ScaleMonitor(rates=False), ScaleHistory(1, rates=False)) == [plain]
    (counting,) = traced(model, *batch, ScaleMonitor())
    assert counting != plain
    # What was traced without it, after it.
    assert traced(model, *batch) == [plain]
    # Two functions, the first of which counts; the other one is as ever.
    assert traced(model, *batch, ScaleMonitor(rates=2)) == [counting, plain]
    # Nothing is left of the first time.
    assert traced(model, *batch, ScaleMonitor()) == [counting]


def test_an_interrupted_training_does_not_go_on_counting():
    def interrupt(batch, logs):
        raise KeyboardInterrupt

    model, *batch = recording(lambda x: layers.Flatten()(x))
    *_, plain = traced(model, *batch)
    stop = keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
    monitor = ScaleMonitor()
    with pytest.raises(KeyboardInterrupt):
        train(model, *batch, monitor, stop)
    assert traced(model, *batch) == [plain]
    assert not np.isnan(train(model, *batch, monitor)["lost/output"][0])


def test_training_is_the_same_bit_for_bit():
    weights = []
    for callbacks in ([], [ScaleMonitor(1), ScaleHistory(1, rates=2)]):
        keras.utils.set_random_seed(1)
        model = two_layers()
        model.optimizer.learning_rate = 0.1
        train(model, spread((64, 12), 1), spread((64, 20), 2), *callbacks, epochs=2)
        # Counters belong neither to the model nor to its optimizer.
        state = [*model.variables, *model.optimizer.variables]
        weights.append([keras.ops.convert_to_numpy(variable) for variable in state])
    for plain, watched in zip(*weights, strict=True):
        np.testing.assert_array_equal(plain, watched)


# --- Models --------------------------------------------------------------------------------------


class Handwritten(keras.Model):
    """Whose sites are known once it was called."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(4, use_bias=False, name="first")
        self.second = layers.Dense(1, use_bias=False, name="second")

    def call(self, x):
        return self.second(keras.ops.relu(self.first(x)))


@pytest.mark.parametrize("called", [False, True])
def test_a_model_with_a_call_of_its_own(called):
    with gs.policy_scope("mixed_float16"):
        model = compiled(Handwritten())
    x, y = np.ones((2 * BATCH, 3), "float32"), BATCH * np.ones((2 * BATCH, 1), "float32")
    if called:
        model(x)
    history = ScaleHistory(1)
    logs = train(model, x, y, ScaleMonitor(sites="second|output"), history)
    sites = {key.split("/", 1)[1] for key in logs if "/" in key}
    assert sites == {"output", "second/kernel", "second/input"}
    assert [logs[f"underflow/{site}"] for site in sorted(sites)] == [[0.0]] * 3
    assert history.names == [site.name for site in model.scales]
    np.testing.assert_array_equal(history.scales[-1], [site.scale for site in model.scales])
    with pytest.raises(ValueError, match="sites are .*second/kernel"):
        train(model, x, y, ScaleMonitor(sites="third"))


class Pair(keras.Model):
    """Trains two models and has no call."""

    def __init__(self, left, right):
        super().__init__()
        self.left, self.right = left, right

    def train_step(self, data):
        x, y = data
        for model in (self.left, self.right):
            with tf.GradientTape() as tape:
                value = tf.reduce_mean(linear(y, model(x)))
            weights = model.trainable_weights
            model.optimizer.apply(tape.gradient(value, weights), weights)
        return {"value": value}


def test_models_in_a_model():
    pair = Pair(one_layer(), one_layer())
    pair.left.name, pair.right.name = "left", "right"
    pair.right.scales.freeze({"output": 1.0})
    pair.compile(jit_compile=False)
    x, y = np.ones((BATCH, 3), "float32"), shares([4])
    logs = train(pair, x, y, ScaleMonitor(sites="^(left|right)/output"))
    assert (logs["lost/left/output"], logs["lost/right/output"]) == ([0.25], [0.0])
    # Whose would these be?
    assert "skipped_steps" not in logs


def test_a_scaled_layer_in_a_plain_model():
    with gs.policy_scope("mixed_float16"):
        layer = gs.layers.GradientScaled(layers.Dense(1), name="scaled")
    model = keras.Sequential([keras.Input((3,)), layer])
    model.compile(gs.GradScaleOptimizer(keras.optimizers.SGD()), linear, jit_compile=False)
    layer.scales.freeze({"output": 2.0**-20})
    x, y = np.ones((BATCH, 3), "float32"), shares([4])
    logs = train(model, x, y, ScaleMonitor(sites=lambda site: site.kind == "cast"))
    assert logs["lost/scaled/output"] == [0.25]
    assert logs["skipped_steps"] == [0.0]
    assert not any("kernel" in key for key in logs)


class Unbuilt(keras.Model):
    """Builds a layer when it is first called."""

    def __init__(self):
        super().__init__()
        self.scaled = gs.layers.GradientScaled(layers.Dense(1), name="scaled")

    def call(self, x):
        return self.scaled(x)


def test_models_that_cannot_be_watched():
    x, y = np.ones((4, 3)), np.ones((4, 1))
    plain = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    unbuilt = Unbuilt()
    for model, error, message in (
        (plain, TypeError, "make it with `tf_gradscale.convert`.*Received: a Sequential"),
        (unbuilt, ValueError, "call the model once before `fit`"),
    ):
        model.compile("sgd", "mse", jit_compile=False)
        for callback in (ScaleMonitor(), ScaleHistory()):
            with pytest.raises(error, match=message):
                train(model, x, y, callback)


@pytest.mark.parametrize("kind", [ScaleMonitor, ScaleHistory])
@pytest.mark.parametrize(
    "arguments",
    [{"frequency": 0}, {"frequency": "batch"}, {"frequency": True}, {"rates": -1}, {"rates": 0.5}],
)
def test_arguments_outside_their_domain(kind, arguments):
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError, match=f"Received: {name}={value!r}"):
        kind(**arguments)


# --- Other callbacks -----------------------------------------------------------------------------


def test_csv_logger_behind_the_monitor(tmp_path):
    before, behind = tmp_path / "before.csv", tmp_path / "behind.csv"
    x, y = np.ones((2 * BATCH, 3), "float32"), shares([1, 3])
    logger = keras.callbacks.CSVLogger
    callbacks = logger(before), ScaleMonitor(), logger(behind)
    logs = train(one_layer(), x, y, *callbacks, epochs=2)
    with behind.open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["lost/output"]) for row in rows] == logs["lost/output"] == [0.125] * 2
    assert "output" not in before.read_text()


def test_progress_bar_before_the_monitor(capsys):
    x, y = np.ones((BATCH, 3), "float32"), shares([1])
    for callbacks, printed in (
        ([ScaleMonitor()], True),
        ([keras.callbacks.ProgbarLogger(), ScaleMonitor()], False),
    ):
        one_layer().fit(x, y, BATCH, verbose=2, callbacks=callbacks)
        assert ("lost/output" in capsys.readouterr().out) == printed


def test_tensorboard_behind_the_monitor(tmp_path):
    pytest.importorskip("tensorboard")
    board = keras.callbacks.TensorBoard(tmp_path, update_freq=2)
    x, y = np.ones((2 * BATCH, 3), "float32"), shares([1, 3])
    train(one_layer(), x, y, ScaleMonitor(2), board)
    found = {}
    for path in (tmp_path / "train").glob("events*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                found[value.tag] = float(tf.make_ndarray(value.tensor))
    assert found["epoch_lost/output"] == found["batch_lost/output"] == 0.125
    assert found["epoch_log2_scale/output"] == -20.0


def test_a_model_saved_while_it_is_watched(tmp_path):
    checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    model = one_layer()
    x, y = np.ones((BATCH, 3), "float32"), shares([1])
    train(model, x, y, ScaleMonitor(), checkpoint)
    loaded = keras.models.load_model(tmp_path / "1.keras", custom_objects={"linear": linear})
    assert loaded.scales["output"].scale == 2.0**-20
    assert len(loaded.variables) == len(model.variables)


# --- Arrays and figure ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def history():
    """Of a training in which a scale is changed after each epoch."""
    keras.utils.set_random_seed(1)
    history, model = ScaleHistory("epoch"), one_layer()

    def change(epoch, logs):
        model.scales.freeze({"output": 2.0 ** (epoch - 20), "dense/input": 2.0**-epoch})

    x, y = np.ones((2 * BATCH, 3), "float32"), shares([1, 3])
    changing = keras.callbacks.LambdaCallback(on_epoch_begin=change)
    train(model, x, y, changing, history, epochs=3)
    return history


def test_arrays(history):
    names = ["output", "dense/kernel", "dense/input"]
    assert (history.names, history.kinds) == (names, ["cast", "variable", "gemm"])
    np.testing.assert_array_equal(history.steps, [2, 4, 6])
    np.testing.assert_array_equal(history.skipped_steps, [0, 0, 0])
    np.testing.assert_array_equal(
        history.scales, [[2.0 ** (i - 20), 1.0, 2.0**-i] for i in range(3)]
    )
    np.testing.assert_array_equal(
        history.cumulative_scales, [[2.0 ** (i - 20), 2.0 ** (i - 20), 2.0**-20] for i in range(3)]
    )
    # 2^-10 · 2^-20 and twice and four times that.
    np.testing.assert_array_equal(history.lost[:, 0], [0.125] * 3)
    np.testing.assert_array_equal(history.underflow[:, 0], [0.125] * 3)
    np.testing.assert_array_equal(history.overflow, np.zeros((3, 3)))


def test_saved_arrays(history, tmp_path):
    history.save(tmp_path / "scales.npz")
    saved = np.load(tmp_path / "scales.npz")
    fields = {"names", "kinds", "steps", "skipped_steps", "scales", "cumulative_scales"}
    assert set(saved) == fields | set(counters.RATES)
    for field, array in saved.items():
        np.testing.assert_array_equal(array, getattr(history, field))


def test_another_model(history):
    with pytest.raises(ValueError, match="the scales of one model"):
        train(two_layers(), np.ones((BATCH, 12)), np.ones((BATCH, 20)), history)


def test_figure(history, tmp_path):
    pytest.importorskip("matplotlib")
    figure = history.plot(tmp_path / "scales.png")
    assert (tmp_path / "scales.png").read_bytes().startswith(b"\x89PNG")
    scales, means, rates = [axes for axes in figure.axes if axes.get_xlabel()]
    assert [label.get_text() for label in scales.get_yticklabels()] == history.names
    # The first site of backpropagation is on top.
    assert scales.yaxis_inverted()
    (mesh,) = scales.collections
    drawn = np.ma.getdata(mesh.get_array()).reshape(3, 3)
    np.testing.assert_array_equal(drawn, np.log2(history.scales).T)
    np.testing.assert_allclose([bar.get_width() for bar in means.patches], [-19.0, 0.0, -1.0])
    lines = {line.get_label(): line.get_xdata() for line in rates.lines}
    np.testing.assert_allclose(lines["lost"], [0.125, 0.0, 0.0])
    assert set(lines) == set(counters.RATES)


def test_figure_without_rates():
    pytest.importorskip("matplotlib")
    history = ScaleHistory(1, sites="output", rates=False)
    with pytest.raises(ValueError, match="nothing to draw"):
        history.plot()
    train(one_layer(), np.ones((BATCH, 3)), shares([1]), history)
    assert [axes.get_xlabel() for axes in history.plot().axes if axes.get_xlabel()] == [
        "training step",
        "mean of log2",
    ]
    assert np.isnan(history.lost).all()


def test_figure_without_matplotlib(history, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install tf_gradscale\[examples\]"):
        history.plot()
    extras = (ROOT / "setup.cfg").read_text("utf-8").split("[options.extras_require]")[1]
    assert "matplotlib" in extras.split("examples =")[1].split("\n\n")[0]


# --- Documentation -------------------------------------------------------------------------------


def test_the_page_on_callbacks(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    printed = capsys.readouterr().out
    assert "100% of the gradient underflow" in printed
    lines = [line for line in printed.splitlines() if "loss" in line and "ms/step" in line]
    assert lines and not any("log2_scale" in line for line in lines)
    assert "lost/logits/input" in Path("scales.csv").read_text("utf-8")
    assert np.load("scales.npz")["steps"].tolist() == names["scales"].steps.tolist()
    assert Path("scales.png").read_bytes().startswith(b"\x89PNG")


def test_examples():
    names = {"keras": keras, "np": np, "convert": gs.convert}
    result = doctest.testmod(gs.callbacks, extraglobs=names)
    assert (result.failed, result.attempted) == (0, 10)


def test_the_page_on_callbacks_names_every_key():
    logs = train(one_layer(), np.ones((BATCH, 3)), shares([1]), ScaleMonitor())
    fields = {key.split("/")[0] for key in logs} - {"loss"}
    assert all(f"`{field}/…`" in PAGE or f"`{field}`" in PAGE for field in fields)
