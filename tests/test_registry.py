"""The scale registry: its sites, its table, freezing, and when scales are chosen anew."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs

layers = keras.layers
X = np.random.default_rng(0).standard_normal((8, 4)).astype("float32")


def network(**config):
    """Two products, a branch and a cast, in mixed_float16."""
    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((4,))
        x = layers.Dense(5, activation="tanh", name="first")(inputs)
        x = layers.Add(name="join")([x, layers.ReLU(name="relu")(x)])
        outputs = layers.Dense(2, activation="tanh", name="second")(x)
        return gs.Model(inputs, outputs, config=gs.GradScaleConfig(**config))


def gradients(model, multiplier=1.0):
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = tf.reduce_sum(model(x)) * multiplier
    return tape.gradient(value, [x, *[v.value for v in model.trainable_variables]])


def scales(model):
    return {site.name: site.scale for site in model.scales}


def cumulative(model):
    return {site.name: site.cumulative_scale for site in model.scales}


NAMES = {
    "output": "cast",
    "second/kernel": "variable",
    "second/input": "gemm",
    "first/branch": "branch",
    "first/kernel": "variable",
    "first/input": "gemm",
}


def test_sites_are_in_the_order_of_backpropagation():
    registry = network().scales
    assert {site.name: site.kind for site in registry} == NAMES
    assert [site.name for site in registry] == list(NAMES)
    assert len(registry) == 6
    assert all(site.scale == site.cumulative_scale == 1.0 for site in registry)


def test_lookup_by_name():
    registry = network().scales
    assert registry["first/branch"].kind == "branch"
    with pytest.raises(KeyError, match="Iterate over the registry.*Received: name='nowhere'"):
        registry["nowhere"]


def test_table_and_representation():
    model = network()
    model.scales.freeze({"output": 2.0**-3, "second/input": 2.0**5})
    gradients(model)
    assert str(model.scales).splitlines() == [
        "site           kind       scale  cumulative",
        "output         cast        2^-3        2^-3",
        "second/kernel  variable     2^0        2^-3",
        "second/input   gemm         2^5         2^2",
        "first/branch   branch       2^0         2^2",
        "first/kernel   variable     2^0         2^2",
        "first/input    gemm         2^0         2^2",
    ]
    wanted = "<Site second/input kind=gemm scale=2^5 cumulative_scale=2^2>"
    assert repr(model.scales["second/input"]) == wanted


def test_names_are_unique():
    dense = layers.Dense(4, name="shared")
    inputs = keras.Input((4,))
    model = gs.Model(inputs, dense(dense(dense(inputs))))
    assert [site.name for site in model.scales if site.kind == "gemm"] == [
        "shared/input",
        "shared/input_1",
        "shared/input_2",
    ]


# --- Freezing ------------------------------------------------------------------------------------


def test_cumulative_scales_are_products_of_local_ones():
    model = network()
    local = dict(zip(NAMES, [2.0**6, 2.0**3, 2.0**-2, 2.0**-1, 2.0**4, 2.0**2], strict=True))
    model.scales.freeze(lambda site: local[site.name])
    gradients(model)
    assert scales(model) == local
    assert cumulative(model) == {
        "output": 2.0**6,
        "second/kernel": 2.0**9,
        "second/input": 2.0**4,
        # Both gradients of the branch arrive at 2^4, and are multiplied by its 2^-1.
        "first/branch": 2.0**3,
        "first/kernel": 2.0**7,
        # The input's gradient comes of the kernel gradient's scale; next to a cast, beside it.
        "first/input": 2.0**9,
    }


def test_a_frozen_branch_multiplies_the_largest_scale_that_arrives():
    with gs.policy_scope("mixed_float16"):
        inputs = x = keras.Input((4,))
        x = layers.Activation("tanh", name="shared")(layers.Dense(3)(x))
        model = gs.Model(inputs, [layers.Dense(2, name="a")(x), layers.Dense(2, name="b")(x)])
    local = {"a/input": 2.0**2, "b/input": 2.0**5, "shared/branch": 2.0**-1}
    model.scales.freeze(lambda site: local.get(site.name, 1.0))
    with tf.GradientTape() as tape:
        value = sum(tf.reduce_sum(y) for y in model(X))
    tape.gradient(value, model.layers[1].kernel.value)
    assert model.scales["shared/branch"].cumulative_scale == 2.0**4


def test_freezing_keeps_what_it_is_not_told_about():
    model = network()
    gradients(model, 2.0**-20)
    before = scales(model)
    assert before["output"] > 2.0**10
    model.scales.freeze({"first/kernel": 2.0})
    gradients(model, 1.0)
    assert scales(model) == {**before, "first/kernel": 2.0}
    assert model.scales.frozen


def test_frozen_scales_stay_until_they_are_unfrozen():
    model = network(update_every=1)
    gradients(model, 2.0**-20)
    model.scales.freeze()
    before = scales(model)
    for _ in range(3):
        gradients(model, 1.0)
        assert scales(model) == before
    model.scales.unfreeze()
    assert not model.scales.frozen
    gradients(model, 1.0)
    # The gradients are 2^20 times as large, and so the first scale is as much smaller.
    assert model.scales["output"].scale == before["output"] * 2.0**-20


def test_frozen_scales_do_not_change_the_gradients():
    model = network()
    wanted = gradients(model)
    model.scales.freeze(lambda site: 1.0)
    for a, b in zip(gradients(model), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3)


# --- When scales are chosen ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "wanted"), [(100, [0, 1, 2, 4, 8, 16]), (5, [0, 1, 2, 4, 5, 10])]
)
def test_scales_are_chosen_in_early_passes_and_then_regularly(every, wanted):
    model = network(update_every=every)
    step = tf.function(lambda m: gradients(model, m))
    found = []
    for i in range(wanted[-1] + 3):
        before = model.scales["output"].scale
        # Another magnitude than in any pass before it.
        step(tf.constant(2.0**-i))
        if model.scales["output"].scale != before:
            found.append(i)
    assert found == wanted


def test_an_update_can_be_requested():
    model = network()
    for _ in range(4):
        gradients(model)
    before = scales(model)["output"]
    gradients(model, 2.0**-8)  # pass 4 updates
    gradients(model, 2.0**-16)  # pass 5 does not
    assert model.scales["output"].scale == before * 2.0**8
    model.scales.request_update()
    gradients(model, 2.0**-16)
    assert model.scales["output"].scale == before * 2.0**16


def test_a_zero_gradient_is_measured_again_in_the_next_pass():
    model = network()
    for _ in range(5):
        gradients(model)
    model.scales.request_update()
    gradients(model, 0.0)
    assert all(scale == 1.0 for scale in scales(model).values())
    gradients(model)
    assert model.scales["output"].scale != 1.0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_batch_that_is_not_finite_leaves_scales_as_they_were(run, value):
    """XLA's maximum of floats passes over NaN on a processor: all of one seemed to be zero."""
    model = network(update_every=1)

    @run
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x)))
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    step(tf.constant(1e-4 * X))
    before = scales(model)
    assert len(set(before.values())) > 2
    step(tf.constant(np.full_like(X, value)))
    assert scales(model) == before
    step(tf.constant(X))
    assert scales(model) != before
