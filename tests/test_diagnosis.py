"""`diagnose`: what it says of each tensor, what it names, and that it changes nothing."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs
from tf_gradscale.diagnosis import Fault, examine

layers = keras.layers
X = np.random.default_rng(0).normal(size=(8, 6, 6, 3)).astype("float32")
Y = np.random.default_rng(1).integers(0, 4, 8)


def network():
    """Everything that keeps a state: statistics, seeds, metrics, scales."""
    keras.utils.set_random_seed(0)
    with gs.policy_scope("mixed_float16"):
        model = keras.Sequential(
            [
                keras.Input((6, 6, 3)),
                layers.Conv2D(8, 3, use_bias=False, name="conv"),
                layers.BatchNormalization(name="norm"),
                layers.ReLU(name="relu"),
                layers.Dropout(0.5, name="dropout"),
                layers.Flatten(name="flatten"),
                layers.Dense(4, name="dense"),
            ]
        )
    model = gs.convert(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def weighted_sum(y, predicted):
    """Its gradient is `y`."""
    return keras.ops.sum(y * predicted, axis=-1)


def one_product(**scales):
    """A product whose output's gradient is what the targets are."""
    with gs.policy_scope("mixed_float16"):
        dense = layers.Dense(4, use_bias=False, name="dense", kernel_initializer="ones")
        model = gs.convert(keras.Sequential([keras.Input((2,)), dense]))
    model.compile("sgd", weighted_sum)
    model.scales.freeze(lambda site: scales.get(site.name.split("/")[-1], 1.0))
    return model


# --- What it says ---------------------------------------------------------------------------------

# Zero; lost in float16; its smallest number; a normal number.
GRADIENT = np.array([[0.0, 2.0**-30, 2.0**-24, 1.0]], "float32")


@pytest.mark.parametrize(
    ("scale", "zeros", "lost", "subnormals", "smallest"),
    [(1.0, 2 / 4, 1 / 3, 1 / 2, 2.0**-24), (2.0**8, 1 / 4, 0.0, 2 / 3, 2.0**-30)],
)
def test_what_is_said_of_a_gradient(scale, zeros, lost, subnormals, smallest):
    model = one_product(output=scale)
    (row,) = examine(model, np.ones((1, 2), "float32"), GRADIENT).tensors
    assert row.name == "dense"
    assert (row.largest, row.broken) == (2.0, 0.0)
    assert (row.zeros, row.lost, row.subnormals) == (zeros, lost, subnormals)
    assert (row.smallest, row.greatest, row.nonfinite) == (smallest, 1.0, 0.0)
    assert row.log2_scale == np.log2(scale)


def test_what_is_said_of_a_variable():
    """∇W = X ∇Y: with X = 2, twice the gradient; the scale is that of the product, β_W."""
    model = one_product(output=2.0**8, kernel=2.0**-3)
    (row,) = examine(model, np.full((1, 2), 2.0, "float32"), GRADIENT).variables
    assert row.name == "sequential/dense/kernel" or row.name.endswith("dense/kernel")
    # 2^-30 · 2^8 · 2^-3 = 2^-25, which rounds to zero before X doubles it.
    assert (row.zeros, row.lost) == (2 / 4, 1 / 3)
    assert (row.smallest, row.greatest, row.log2_scale) == (2.0**-23, 2.0, 5.0)


def test_overflow_is_counted():
    model = one_product(output=2.0**16)
    (row,) = examine(model, np.ones((1, 2), "float32"), GRADIENT).tensors
    assert row.nonfinite == 1 / 4
    assert row.greatest == 2.0**-24


def test_rows_are_in_the_order_of_the_forward_pass():
    diagnosis = examine(network(), X, Y)
    names = [row.name for row in diagnosis.tensors]
    assert names == ["conv", "norm", "relu", "dropout", "flatten", "dense"]
    assert [row.name.split("/")[-1] for row in diagnosis.variables] == [
        *("kernel", "gamma", "beta", "kernel", "bias")
    ]
    assert diagnosis.fault is None
    assert diagnosis.note is None
    # The scales that were chosen in this step leave nothing lost, but where float16's forward pass
    # puts a value on the other side of a ReLU.
    assert all(row.lost < 0.01 for row in [*diagnosis.tensors, *diagnosis.variables])


def test_the_table(capsys):
    diagnosis = gs.diagnose(network(), X, Y)
    printed = capsys.readouterr().out
    assert printed == f"{diagnosis}\n"
    lines = printed.splitlines()
    assert lines[1].split() == "largest broken scale zero lost subnorm broken".split() + [
        *("smallest", "greatest")
    ]
    assert [line.split()[0] for line in lines[2:8]] == [row.name for row in diagnosis.tensors]
    assert lines[-1] == "First tensor that is not finite: none."


class Own(keras.Model):
    """Written by hand, with two products of activations inside and an output for each head."""

    def __init__(self):
        super().__init__()
        self.attend = layers.MultiHeadAttention(2, 4, dropout=0.3)
        self.first, self.second = layers.Dense(2), layers.Dense(2)

    def call(self, x, training=None):
        x = self.attend(x, x, training=training)
        return self.first(x), self.second(x)


def test_a_model_written_by_hand():
    with gs.policy_scope("mixed_float16"):
        model = gs.convert(Own())
    model.compile("sgd", ["mse", "mse"])
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")
    y = [np.ones((2, 5, 2), "float32")] * 2
    diagnosis = examine(model, x, y)
    assert diagnosis.fault is None
    assert diagnosis.note is None
    assert len(diagnosis.variables) == len(model.trainable_variables)
    assert all(row.lost == 0 for row in diagnosis.variables)


# --- What it changes: nothing ---------------------------------------------------------------------


def state(model):
    variables = [*model.variables, *model.metrics_variables, *model.scales.variables]
    return [keras.ops.convert_to_numpy(v) for v in variables + model.optimizer.variables]


def test_nothing_changes():
    model = network()
    model.fit(X, Y, verbose=0)
    before, rates = state(model), model.get_layer("dropout").rate
    examine(model, X, Y)
    for old, new in zip(before, state(model), strict=True):
        np.testing.assert_array_equal(old, new)
    assert model.get_layer("dropout").rate == rates
    assert model.get_layer("conv").compute_dtype == "float16"
    model.fit(X, Y, verbose=0)


# --- What it names --------------------------------------------------------------------------------


def spoiled(x):
    x = np.array(x, "float32")
    x.flat[3] = np.nan
    return x


def test_inputs_targets_and_weights_that_are_not_finite():
    model = one_product()
    x, y = np.ones((2, 2), "float32"), np.ones((2, 4), "float32")
    assert examine(model, spoiled(x), y).fault == Fault("the inputs", "given")
    assert examine(model, x, spoiled(y)).fault == Fault("the targets", "given")
    weights = np.array([1.0, np.inf], "float32")
    fault = examine(model, x, y, weights).fault
    assert fault == Fault("the sample weights", "given")
    assert str(fault) == "the sample weights, before the step began"
    model.set_weights([spoiled(w) for w in model.get_weights()])
    assert "dense/kernel" in examine(model, x, y).fault.name


def test_the_first_layer_that_overflows():
    """60000 + 60000 is more than float16 holds; what follows is not finite either."""
    with gs.policy_scope("mixed_float16"):
        inputs = x = keras.Input((2,))
        for name in ("small", "large", "behind"):
            x = layers.Dense(2, kernel_initializer="ones", name=name)(x)
        model = gs.convert(keras.Model(inputs, x))
    model.compile("sgd", "mse")
    fault = examine(model, np.full((1, 2), 15e3, "float32"), np.zeros((1, 2))).fault
    # 15000, then 30000, then 60000, then infinite.
    assert fault == Fault("behind", "forward")
    assert str(fault) == "the output of 'behind', made by the forward pass"
    fault = examine(model, np.full((1, 2), 30e3, "float32"), np.zeros((1, 2))).fault
    assert fault == Fault("large", "forward")


def test_a_loss_that_is_not_finite():
    model = one_product()
    model.compile("sgd", lambda y, predicted: keras.ops.log(predicted - predicted))
    fault = examine(model, np.ones((1, 2), "float32"), GRADIENT).fault
    assert fault == Fault("loss", "loss")


def test_the_first_gradient_that_overflows():
    with gs.policy_scope("mixed_float16"):
        inputs = x = keras.Input((2,))
        for name in ("first", "second", "third"):
            x = layers.Dense(2, kernel_initializer="ones", name=name)(x)
        model = gs.convert(keras.Model(inputs, x))
    model.compile("sgd", weighted_sum)
    model.scales.freeze({"third/input": 2.0**10, "second/input": 2.0**10})
    fault = examine(model, np.ones((1, 2), "float32"), np.ones((1, 2), "float32")).fault
    # ∇ = 1, then 2^11 in front of the third layer, then 2^22 in front of the second.
    assert fault == Fault("first", "backward")
    assert str(fault) == "the gradient of 'first', made by the backward pass"


# --- Errors ---------------------------------------------------------------------------------------


def test_a_plain_model_is_refused():
    with pytest.raises(TypeError, match="takes a model made by .*convert.*Received: <Sequential"):
        gs.diagnose(keras.Sequential([layers.Dense(1)]), X)


def test_a_model_that_is_not_compiled_is_refused():
    model = gs.convert(keras.Sequential([keras.Input((2,)), layers.Dense(1)]))
    with pytest.raises(ValueError, match="must be compiled with the loss.*Received: a model that"):
        gs.diagnose(model, X)


@pytest.mark.parametrize("scale, lost", [(1.0, 1.0), (2.0**64, 0.0)])
def test_attention_runs_in_float32(scale, lost):
    """A loss so small that no gradient is left in float16, unless a scale makes up for it.

    In attention are operations that no layer's policy sees: a softmax, and casts of its inputs.
    """
    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((4, 6))
        attended = layers.MultiHeadAttention(2, 3)(inputs, inputs)
        model = gs.convert(keras.Model(inputs, layers.Dense(2)(attended)))
    model.compile("sgd", lambda y, predicted: 2.0**-64 * keras.ops.mean((y - predicted) ** 2))
    sites = iter([scale])
    model(np.ones((1, 4, 6), "float32"), training=True)
    # At the first site, which is the last layer's, and from there on carried.
    model.scales.freeze(lambda site: next(sites, 1.0))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 4, 6)).astype("float32"), np.ones((2, 4, 2), "float32")
    diagnosis = examine(model, x, y)
    assert diagnosis.note is None
    names = [row.name for row in diagnosis.tensors]
    assert sum("dot_product_attention" in name or "/cast" in name for name in names) == 5
    assert [row.lost for row in diagnosis.tensors] == [lost] * len(names)


def test_a_model_that_cannot_run_in_float32():
    """A layer whose own code is of float16 alone: all but the comparison is there."""

    class Halves(layers.Layer):
        def call(self, x):
            return tf.linalg.matmul(x, tf.ones([2, 2], tf.float16))

    with gs.policy_scope("mixed_float16"):
        stack = [keras.Input((2,)), layers.Dense(2), Halves(), layers.Dense(2)]
        model = gs.convert(keras.Sequential(stack))
    model.compile("sgd", "mse")
    diagnosis = examine(model, np.ones((1, 2), "float32"), np.zeros((1, 2), "float32"))
    assert diagnosis.note.startswith("the model cannot be run in float32 (")
    assert np.isnan(diagnosis.tensors[0].lost)
    assert diagnosis.tensors[0].zeros == 0
    assert "Lost entries are not known: the model cannot" in str(diagnosis)
