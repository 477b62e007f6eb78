"""Every error says what was expected, what to do about it, and what was received."""

import ast
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs

layers = keras.layers


def functional(**options):
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(2, **options)(inputs))


class Subclassed(keras.Model):
    def call(self, x):
        return x


class OwnStep(keras.Model):
    def train_step(self, data):
        return {}


class SaysFloat32(layers.Layer):
    """Declares a dtype other than the one it returns in the end, and hides it from a trial."""

    def call(self, x):
        return x if tf.executing_eagerly() else tf.cast(x, tf.float32)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "float32")


def wrong_dtype():
    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((4,))
        x = SaysFloat32(name="liar")(layers.Dense(2)(inputs))
        return gs.Model(inputs, x)(np.ones((1, 4), "float32"))


def unbuilt():
    return keras.Sequential([layers.Dense(2)])


def freeze(scales):
    model = gs.convert(functional())
    model.scales.freeze(scales)


ERRORS = {
    # convert, strip, Model
    "convert_no_model": (
        lambda: gs.convert(layers.Dense(2)),
        TypeError,
        "`convert` takes a keras.Model. For a single layer, use "
        "tf_gradscale.layers.GradientScaled(layer). Received: <Dense",
    ),
    "convert_twice": (
        lambda: gs.convert(gs.convert(functional())),
        TypeError,
        "Model 'functional' is gradient-scaled already; use it as it is, or "
        "`convert(strip(model), config)` for another configuration. Received: a Model",
    ),
    "convert_unbuilt": (
        lambda: gs.convert(unbuilt()),
        ValueError,
        "Model 'sequential' must know its input shape: start it with a keras.Input, or call "
        "`build`, before `convert`. Received: an unbuilt Sequential",
    ),
    "convert_without_call": (
        lambda: gs.convert(OwnStep()),
        TypeError,
        "Model 'own_step' has no `call`, so that there is nothing to differentiate. Convert the "
        "models that it trains before it is made of them. Received: a OwnStep",
    ),
    "scales_before_a_call": (
        lambda: gs.convert(Subclassed()).scales,
        ValueError,
        "Model 'subclassed' has a `call` of its own, and must be called on a batch before its "
        "scales are known. Call it once, or train it for a step. Received: a model that was never",
    ),
    "strip_plain": (
        lambda: gs.strip(functional()),
        TypeError,
        "`strip` takes a model made by tf_gradscale.convert or tf_gradscale.Model. Received: <Func",
    ),
    "model_without_graph": (
        lambda: gs.Model(),
        TypeError,
        "Model needs `inputs` and `outputs`, made with keras.Input and layers: a model whose "
        "`call` is written by hand cannot be scaled. Build it in the functional style, or wrap "
        "its parts in tf_gradscale.layers.GradientScaled. Received: inputs=None, outputs=None",
    ),
    "scales_that_are_none": (
        lambda: gs.GradScaleOptimizer(keras.optimizers.SGD(), scales=functional()),
        TypeError,
        "`scales` must be the ScaleRegistry of a converted model, `model.scales`, or None. "
        "Received: scales=Functional",
    ),
    "scales_of_unbuilt": (
        lambda: gs.Sequential([layers.Dense(2)]).scales,
        ValueError,
        "Model 'sequential' must know its input shape before its gradients can be scaled. Start "
        "it with a keras.Input, or build it. Received: an unbuilt Sequential",
    ),
    "float16_weights": (
        lambda: gs.convert(functional(dtype="float16", name="half")),
        ValueError,
        "Layer 'half' keeps its weights in float16, in which small updates are lost; weights must "
        'be float32. Give the layer dtype="mixed_float16" instead of dtype="float16". Received: '
        "variable 'half/kernel' of dtype float16",
    ),
    "bfloat16_weights": (
        lambda: gs.convert(functional(dtype="bfloat16")),
        ValueError,
        'Give the layer dtype="mixed_bfloat16" instead of dtype="bfloat16"',
    ),
    "config_is_none": (
        lambda: gs.convert(functional(), config="paper"),
        TypeError,
        "`config` must be a GradScaleConfig or None. Received: config='paper'",
    ),
    "undeclared_dtype": (
        wrong_dtype,
        TypeError,
        "Layer 'liar' must return what its `compute_output_spec` declares, or gradients cannot be "
        "scaled right. Declared: float32. Received: float16",
    ),
    "wrapped_no_layer": (
        lambda: gs.layers.GradientScaled(tf.nn.relu),
        TypeError,
        "`layer` must be a Keras layer, or a Functional or Sequential model. Received: layer=<func",
    ),
    # Policy
    "policy_float16": (
        lambda: gs.set_global_policy("float16"),
        ValueError,
        "Weights must be float32: an update smaller than half a unit in the last place of a "
        "16-bit weight is lost. Use the policy 'mixed_float16' instead. Received: policy='float16'",
    ),
    "policy_config": (
        lambda: gs.set_global_policy("mixed_float16", gs.GradScaleConfig),
        TypeError,
        "`config` must be a GradScaleConfig or None. Received: config=<class",
    ),
    # GradScaleConfig
    "config_format": (
        lambda: gs.GradScaleConfig(gradient_dtype="int8"),
        ValueError,
        "`gradient_dtype` must be one of ('float16', 'bfloat16', 'float32'). "
        "Received: gradient_dtype='int8'",
    ),
    "config_placement": (
        lambda: gs.GradScaleConfig(placement="middle"),
        ValueError,
        "`placement` must be one of ('balanced', 'threshold'). Received: placement='middle'",
    ),
    "config_smallest": (
        lambda: gs.GradScaleConfig(smallest="tiny"),
        ValueError,
        "`smallest` must be one of ('subnormal', 'normal'). Received: smallest='tiny'",
    ),
    "config_cast_model": (
        lambda: gs.GradScaleConfig(cast_model="uniform"),
        ValueError,
        "`cast_model` must be one of ('lognormal', 'normal', 'histogram')",
    ),
    "config_unscale": (
        lambda: gs.GradScaleConfig(unscale="tape"),
        ValueError,
        "`unscale` must be one of ('layer', 'optimizer'). Received: unscale='tape'",
    ),
    "config_rate": (
        lambda: gs.GradScaleConfig(underflow_threshold=1.0),
        ValueError,
        "must lie strictly between 0 and 1 (the paper uses 0.001). Received: "
        "underflow_threshold=1.0",
    ),
    "config_rate_type": (
        lambda: gs.GradScaleConfig(underflow_threshold="1e-3"),
        ValueError,
        "Received: underflow_threshold='1e-3'",
    ),
    "config_margin": (
        lambda: gs.GradScaleConfig(margin_bits=-1),
        ValueError,
        "`margin_bits` must be an integer of at least 0. Received: margin_bits=-1",
    ),
    "config_margin_bound": (
        lambda: gs.GradScaleConfig(margin_bits=11),
        ValueError,
        "more than 10 leave float16 too few for the gradient. Received: margin_bits=11",
    ),
    "config_margin_type": (
        lambda: gs.GradScaleConfig(margin_bits=1.5),
        ValueError,
        "`margin_bits` must be an integer of at least 0. Received: margin_bits=1.5",
    ),
    "config_update_every": (
        lambda: gs.GradScaleConfig(update_every=0),
        ValueError,
        "`update_every` must be an integer of at least 1. Received: update_every=0",
    ),
    "config_max_skips": (
        lambda: gs.GradScaleConfig(max_skips=0),
        ValueError,
        "`max_skips` must be an integer of at least 1. Received: max_skips=0",
    ),
    "config_update_every_type": (
        lambda: gs.GradScaleConfig(update_every=True),
        ValueError,
        "`update_every` must be an integer of at least 1. Received: update_every=True",
    ),
    "config_scale_bound": (
        lambda: gs.GradScaleConfig(scale_bound=0.0),
        ValueError,
        "`scale_bound` must be a positive number, or None for no bound. Received: scale_bound=0.0",
    ),
    "config_cumulative_bound": (
        lambda: gs.GradScaleConfig(cumulative_bound=float("inf")),
        ValueError,
        "`cumulative_bound` must be a positive number, or None for no bound. Received: "
        "cumulative_bound=inf",
    ),
    # Registry
    "site_name": (
        lambda: gs.convert(functional(name="dense")).scales["dense"],
        KeyError,
        "No site has this name. Iterate over the registry to see all. Received: name='dense'",
    ),
    "freeze_names": (
        lambda: freeze({"dense/input": 2.0, "dense/output": 2.0}),
        ValueError,
        "`freeze` takes local scales by the names of sites, of which the model has "
        "['dense/kernel', 'dense/input']. Received besides: ['dense/output']",
    ),
    "freeze_number": (
        lambda: freeze(2.0),
        TypeError,
        "`scales` must be a dictionary from the names of sites to scales, a function of a site, or "
        "None to keep those there are; the same for all is `lambda site: 1.0`. "
        "Received: scales=2.0",
    ),
    "freeze_no_power": (
        lambda: freeze({"dense/input": 3.0}),
        ValueError,
        "A scale must be a positive power of two between 2^-120 and 2^120. Received: 3.0 for site "
        "'dense/input'",
    ),
    "freeze_zero": (
        lambda: freeze(lambda site: 0.0),
        ValueError,
        "A scale must be a positive power of two",
    ),
    "freeze_negative": (
        lambda: freeze(lambda site: -2.0),
        ValueError,
        "Received: -2.0 for site 'dense/kernel'",
    ),
    "freeze_infinite": (
        lambda: freeze(lambda site: float("inf")),
        ValueError,
        "Received: inf",
    ),
    "freeze_too_large": (
        lambda: freeze(lambda site: 2.0**121),
        ValueError,
        "between 2^-120 and 2^120",
    ),
    # Rules
    "rule_for_no_class": (
        lambda: gs.rules.register(layers.Dense(2), gs.rules.Carry),
        TypeError,
        "`layer_class` must be a Keras layer class. Received: <Dense",
    ),
    "rule_no_class": (
        lambda: gs.rules.register(layers.Dense, lambda step: step),
        TypeError,
        "`rule` must be a subclass of tf_gradscale.rules.Rule, not an instance. Received: <func",
    ),
    # Optimizer (more in test_optimizer.py and test_unscale.py)
    "optimizer_name": (
        lambda: gs.GradScaleOptimizer("adam"),
        TypeError,
        "`inner_optimizer` must be a keras.optimizers.Optimizer, such as keras.optimizers.Adam(). "
        "Received: inner_optimizer='adam'",
    ),
    "optimizer_wrapped": (
        lambda: gs.GradScaleOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())),
        ValueError,
        "one wrapper is enough. Pass the optimizer inside, `inner_optimizer.inner_optimizer`. "
        "Received: LossScaleOptimizer",
    ),
    "optimizer_scales_loss": (
        lambda: gs.GradScaleOptimizer(keras.optimizers.SGD(loss_scale_factor=8.0)),
        ValueError,
        "remove `loss_scale_factor` from the optimizer. Received: 8.0",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_message(name):
    provoke, kind, message = ERRORS[name]
    with pytest.raises(kind, match=re.escape(message)):
        provoke()


def test_a_refused_freeze_changes_nothing():
    model = gs.convert(functional())
    with pytest.raises(ValueError, match="positive power of two"):
        model.scales.freeze(lambda site: 2.0 if site.name.endswith("kernel") else 3.0)
    assert not model.scales.frozen
    assert all(site.scale == 1.0 for site in model.scales)


def test_a_refused_policy_changes_nothing():
    config = gs.GradScaleConfig(margin_bits=9)
    gs.set_global_policy("mixed_float16", config)
    with pytest.raises(ValueError, match="must be float32"):
        gs.set_global_policy("bfloat16")
    with pytest.raises(TypeError, match="`config`"):
        gs.set_global_policy("float32", "paper")
    assert keras.config.dtype_policy().name == "mixed_float16"
    assert gs.convert(functional()).config == config


PACKAGE = pathlib.Path(gs.__file__).parent
RAISES = [
    (path, node)
    for path in sorted(PACKAGE.rglob("*.py"))
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Raise)
    and isinstance(node.exc, ast.Call)
    # NotOpenable becomes part of a warning.
    and ast.unparse(node.exc.func) != "NotOpenable"
]


@pytest.mark.parametrize(
    ("path", "node"), RAISES, ids=[f"{p.relative_to(PACKAGE)}:{n.lineno}" for p, n in RAISES]
)
def test_every_message_ends_with_what_was_received(path, node):
    assert re.search(r"Received( besides)?: ", ast.unparse(node))
