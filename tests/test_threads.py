"""Models in several threads at once share nothing, and models that are gone leave nothing."""

import gc
import sys
import threading
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs
from tf_gradscale.policy import in_float32

layers = keras.layers
DTYPES = ("float32", "mixed_float16")


@pytest.fixture
def busy():
    """Threads take turns after a few bytecodes, not after milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def at_once(*functions):
    """Runs functions in a thread each, all started at one moment; gives what they return."""
    barrier = threading.Barrier(len(functions))
    results = [None] * len(functions)
    errors = []

    def run(i):
        barrier.wait()
        try:
            results[i] = functions[i]()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    return results


def in_a_thread(function):
    """What a function returns in another thread."""
    return at_once(function)[0]


@tf.custom_gradient
def clipped(x):
    return tf.identity(x), lambda dy: tf.clip_by_value(dy, -1e-3, 1e-3)


class Clipped(layers.Layer):
    """Its gradient is not linear: it is tried out in float32 when the model is converted."""

    def call(self, x):
        return clipped(x)


class Block(layers.Layer):
    """Asks for a shape that is not known, and multiplies a variable: opened by replacing both."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = layers.Dense(8, activation="tanh")
        self.second = layers.Dense(6)

    def build(self, shape):
        self.gain = self.add_weight(shape=(6,), initializer="ones")
        self.first.build(shape)
        self.second.build((*shape[:-1], 8))
        super().build(shape)

    def call(self, x):
        y = self.second(self.first(x))
        return x + self.gain * keras.ops.reshape(y, (keras.ops.shape(x)[0], 6))


def network(policy, seed):
    with gs.policy_scope(policy):
        inputs = keras.Input((6,))
        x = Clipped()(Block()(inputs))
        model = keras.Model(inputs, layers.Dense(3, activation="softmax")(x))
    rng = np.random.default_rng(seed)
    model.set_weights([0.4 * rng.standard_normal(w.shape) for w in model.get_weights()])
    return model


def batches(seed):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((16, 6)).astype("float32"), rng.integers(3, size=16)


def trained(policy, seed, **options):
    """Weights, optimizer's state and scales after a short training."""
    model = gs.convert(network(policy, seed))
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", **options)
    x, y = batches(seed)
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return [v.numpy() for v in model.weights + model.optimizer.variables]


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


# --- Threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "run_eagerly"),
    [
        ("float32", True),
        ("mixed_float16", False),
        pytest.param("float32", False, marks=pytest.mark.slow),
        pytest.param("mixed_float16", True, marks=pytest.mark.slow),
    ],
)
def test_models_trained_at_the_same_moment(busy, policy, run_eagerly):
    seeds = range(2)
    wanted = [trained(policy, seed, run_eagerly=run_eagerly) for seed in seeds]
    found = at_once(*(lambda s=s: trained(policy, s, run_eagerly=run_eagerly) for s in seeds))
    for a, b in zip(found, wanted, strict=True):
        assert_same(a, b)
    assert not np.array_equal(wanted[0][0], wanted[1][0])


@pytest.mark.parametrize("policy", DTYPES)
def test_a_model_trained_while_others_are_converted(busy, policy):
    def sites():
        made = [gs.convert(network(policy, 9)) for _ in range(2)]
        # Names of layers are numbered.
        return [[site.kind for site in model.scales] for model in made]

    wanted = trained(policy, 0, run_eagerly=True), sites()
    found, others = at_once(lambda: trained(policy, 0, run_eagerly=True), sites)
    assert_same(found, wanted[0])
    assert others == wanted[1]
    assert {"gemm", "variable"} < set(others[0])


def test_what_opening_replaces_is_put_back(busy):
    """`keras.ops.shape` and others, and operators of variables, are Keras' own afterwards."""
    names = ("shape", "reshape", "broadcast_to")
    before = [getattr(keras.ops, name) for name in names], set(vars(keras.Variable))
    for _ in range(3):
        at_once(*(lambda s=s: gs.convert(network("mixed_float16", s)).name for s in range(4)))
    assert ([getattr(keras.ops, name) for name in names], set(vars(keras.Variable))) == before


def test_one_model_first_called_by_several_threads(busy):
    """Its graph for this value of `training` is made by one of them."""
    x = tf.constant(batches(0)[0])

    def gradients(model):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x)[:, 0])
        return [g.numpy() for g in tape.gradient(loss, model.trainable_variables)]

    wanted = gradients(gs.convert(network("float32", 0)))
    for _ in range(8):
        model = gs.convert(network("float32", 0))
        for found in at_once(*[lambda model=model: gradients(model)] * 4):
            assert_same(found, wanted)


def test_the_default_configuration_is_a_threads_own():
    """As Keras' global policy is."""
    gs.set_global_policy("mixed_float16", gs.GradScaleConfig(margin_bits=7))

    def seen():
        dense = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        return keras.config.dtype_policy().name, gs.convert(dense).config.margin_bits

    def set_anew():
        gs.set_global_policy("mixed_bfloat16", gs.GradScaleConfig(margin_bits=2))
        return seen()

    assert in_a_thread(seen) == ("float32", gs.GradScaleConfig().margin_bits)
    assert in_a_thread(set_anew) == ("mixed_bfloat16", 2)
    assert seen() == ("mixed_float16", 7)


# --- Layers that are run in float32 for a moment -------------------------------------------------


def test_a_layer_runs_in_float32_in_one_thread_only():
    layer = layers.Dense(2, dtype="mixed_float16")
    x = tf.constant([[1.0, 2.0**-11]])
    own = layer.dtype_policy
    plain = layer(x)

    def seen():
        config = layer.get_config()["dtype"]["config"]["name"]
        return layer.compute_dtype, layer.dtype_policy == own, config, layer(x)

    def entered():
        with in_float32([layer]):
            return layer.compute_dtype

    with in_float32([layer, layer]):
        assert layer.compute_dtype == layer.variable_dtype == "float32"
        assert layer(x).dtype == tf.float32
        *found, y = in_a_thread(seen)
        assert found == ["float16", True, "mixed_float16"]
        np.testing.assert_array_equal(y, plain)
        assert in_a_thread(entered) == "float32"
        with in_float32([layer]):
            pass
        # Whoever else leaves, and in whatever order.
        assert layer.compute_dtype == "float32"
    assert layer.dtype_policy is own and layer(x).dtype == tf.float16


def test_layers_under_one_policy_for_many():
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="mixed_bfloat16")
    policies["sixteen"] = keras.DTypePolicy("mixed_float16")
    policies["full"] = keras.DTypePolicy("float32")
    made = [layers.Dense(2, name=name, dtype=policies) for name in ("sixteen", "full", "other")]
    for layer in made:
        layer.build((1, 2))
    with in_float32(made):
        assert [layer.compute_dtype for layer in made] == ["float32"] * 3
        elsewhere = in_a_thread(lambda: [layer.compute_dtype for layer in made])
        assert elsewhere == ["float16", "float32", "bfloat16"]
    assert all(layer.dtype_policy is policies for layer in made)


def test_layers_run_in_float32_by_many_threads(busy):
    layer = layers.Dense(2, dtype="mixed_float16")
    own = layer.dtype_policy

    def enter():
        seen = set()
        for _ in range(200):
            with in_float32([layer]):
                seen.add(layer.compute_dtype)
            seen.add(layer.compute_dtype + " outside")
        return seen

    assert at_once(*[enter] * 4) == [{"float32", "float16 outside"}] * 4
    assert layer.dtype_policy is own


def test_a_model_predicts_while_it_is_converted():
    """Its layers are tried out in float32 meanwhile: not in the thread that predicts."""
    inside, goes_on = threading.Event(), threading.Event()

    class Waiting(Clipped):
        def call(self, x):
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                assert goes_on.wait(60)
            return super().call(x)

    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((6,))
        model = keras.Model(inputs, Waiting()(layers.Dense(4)(inputs)))
    x = tf.constant(batches(0)[0])
    wanted = model(x)
    assert wanted.dtype == tf.float16
    converting = threading.Thread(target=lambda: gs.convert(model))
    converting.start()
    assert inside.wait(60)
    found = model(x)
    goes_on.set()
    converting.join()
    assert found.dtype == tf.float16
    np.testing.assert_array_equal(found, wanted)


# --- Repeats -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "run_eagerly"),
    [(2, False), (4, True), pytest.param(100, False, marks=pytest.mark.slow)],
)
def test_nothing_is_left_of_models_that_are_gone(times, run_eagerly):
    references = []
    for seed in range(times):
        model = gs.convert(network("mixed_float16", seed))
        model.compile("adam", "sparse_categorical_crossentropy", run_eagerly=run_eagerly)
        x, y = batches(seed)
        model.train_on_batch(x, y)
        parts = [model, *model.layers, *model.weights, model.optimizer, *model.optimizer.variables]
        parts += [model.scales, model._gradscale.region]
        references.append([weakref.ref(part) for part in parts])
        del model, parts
        keras.backend.clear_session()
        gc.collect()
    # What is left is of no model: counted for each of them.
    assert [sum(r() is not None for r in found) for found in references] == [0] * times
