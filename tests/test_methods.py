"""What the examples share: methods by name, what they make of a model, what is counted."""

import argparse
import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import methods  # noqa: E402

layers = keras.layers
RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 6)).astype("float32")
Y = RNG.standard_normal((8, 2)).astype("float32")
WAYS = {
    "float32": ("float32", "none"),
    "bfloat16": ("bfloat16", "none"),
    "float16": ("float16", "none"),
    "fixed": ("float16", "fixed:2^7"),
    "dynamic": ("float16", "dynamic:10"),
    "paper": ("float16", "paper:16,1024"),
    "balanced": ("float16", "balanced"),
}


def squares(y, found):
    return keras.ops.mean(keras.ops.square(found - y), axis=-1)


def network():
    inputs = keras.Input((6,))
    x = layers.Dense(8, activation="tanh", name="hidden")(inputs)
    return keras.Model(inputs, layers.Activation("linear", dtype="float32")(layers.Dense(2)(x)))


def made(way, multiplier=1.0, **kwargs):
    method = methods.parse(*WAYS[way])
    rate = 0.25 / multiplier

    def sgd(**options):
        return keras.optimizers.SGD(rate, **options)

    return method, methods.compiled(method, network, sgd, squares, multiplier, **kwargs)


def test_methods_by_name():
    assert methods.parse("float16", "fixed:2^-3").loss_scale == 2.0**-3
    assert methods.parse("float16", "dynamic").loss_scale == 1
    assert str(methods.parse("float32", "none")) == "float32"
    assert str(methods.parse("float16", "fixed:2^7")) == "float16, fixed:2^7"
    assert methods.parse("float16", "balanced").config() == gs.GradScaleConfig()
    config = methods.parse("float16", "paper:16,1024").config()
    assert config == gs.GradScaleConfig.paper(scale_bound=16.0, cumulative_bound=1024.0)
    assert methods.parse("float16", "paper").config() == gs.GradScaleConfig.paper()
    assert methods.parse("float16", "none").config() is None


@pytest.mark.parametrize(
    "scaling",
    ["fix", "fixed:7", "fixed:2^x", "dynamic:0", "dynamic:x", "paper:16", "none:1", ""]
    + ["fixed:2^200", "paper:1.2.3,4"],
)
def test_unknown_scalings(scaling):
    with pytest.raises(ValueError, match="--scaling must be one of none, .* Received: "):
        methods.parse("float16", scaling)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_scaling_is_for_float16(precision):
    with pytest.raises(ValueError, match=f"with --precision {precision} leave it at none"):
        methods.parse(precision, "balanced")


def parser(**options):
    made = argparse.ArgumentParser()
    methods.add_arguments(made, "a file", steps=20, learning_rate=0.5)
    return made


def test_options():
    args = methods.parsed(parser(), [])
    assert (args.steps, args.learning_rate, args.loss_multiplier, args.seed) == (20, 0.5, 1, 0)
    assert args.method == ("float16", "balanced")
    assert methods.parsed(parser(), ["--precision", "float32"]).method == ("float32", "none")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps must be positive. Received: 0"),
        (["--loss-multiplier", "-1"], "--loss-multiplier must be positive. Received: -1.0"),
        (["--validate", "0"], "--validate must be positive. Received: 0"),
        (["--json", "no/such/folder/x.json"], "in a folder that exists. Received: no/such/folder"),
        (["--scaling", "static"], "--scaling must be one of none, fixed:2^K"),
    ],
)
def test_bad_options(capsys, options, message):
    with pytest.raises(SystemExit):
        methods.parsed(parser(), options)
    assert message in capsys.readouterr().err


def test_methods_differ_in_policy_and_optimizer_only():
    kinds = {}
    reference = made("float32")[1].get_weights()
    for way in WAYS:
        _, model = made(way)
        kinds[way] = (
            type(model.optimizer).__name__,
            model.get_layer("hidden").compute_dtype,
            model.optimizer.loss_scale_factor,
        )
        for a, b in zip(model.get_weights(), reference, strict=True):
            np.testing.assert_array_equal(a, b)
    assert kinds == {
        "float32": ("SGD", "float32", None),
        "bfloat16": ("SGD", "bfloat16", None),
        "float16": ("SGD", "float16", None),
        "fixed": ("SGD", "float16", 2.0**7),
        "dynamic": ("LossScaleOptimizer", "float16", None),
        "paper": ("GradScaleOptimizer", "float16", None),
        "balanced": ("GradScaleOptimizer", "float16", None),
    }


@pytest.mark.parametrize("way", WAYS)
def test_every_method_takes_the_step_of_float32(way):
    """The multiplier changes the reported loss, and not the step."""
    before = made("float32")[1].get_weights()
    steps = []
    for name, multiplier in (("float32", 1.0), (way, 0.125)):
        _, model = made(name, multiplier)
        loss = model.train_on_batch(X, Y)
        steps.append([a - b for a, b in zip(model.get_weights(), before, strict=True)])
        true = float(np.mean((network_output(before) - Y) ** 2))
        np.testing.assert_allclose(loss, multiplier * true, rtol=0.02)
    for a, b in zip(*steps, strict=True):
        assert np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b)


def embedded():
    """A network on three tokens, of which the embedding's gradient is sparse."""
    tokens = keras.Input((3,), dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(5, 4)(tokens))
    return keras.Model(tokens, keras.layers.Dense(1)(rows))


TOKENS = np.array([[0, 1, 1], [3, 0, 0]])


@pytest.mark.parametrize("way", ["fixed", "dynamic", "balanced"])
def test_embeddings_have_sparse_gradients(way):
    """Of which Keras' `loss_scale_factor` makes an error."""
    found = []
    for name in ("float32", way):
        model = methods.compiled(
            methods.parse(*WAYS[name]), embedded, keras.optimizers.SGD, squares, seed=3
        )
        before = model.get_weights()
        model.train_on_batch(TOKENS, np.ones((2, 1), "float32"))
        found.append([a - b for a, b in zip(model.get_weights(), before, strict=True)])
    for a, b in zip(*found, strict=True):
        assert np.linalg.norm(a - b) < 0.01 * np.linalg.norm(b)


@pytest.mark.parametrize("way", ["float32", "dynamic", "balanced"])
def test_adam_gets_the_sum_of_an_embedding_s_gradients(way):
    """Keras' own squares the parts of a sparse gradient, and adds these."""

    def adam(**options):
        return keras.optimizers.Adam(0.125, epsilon=1e-12, **options)

    model = methods.compiled(methods.parse(*WAYS[way]), embedded, adam, squares, seed=3)
    before = model.get_weights()[0]
    model.train_on_batch(TOKENS, np.ones((2, 1), "float32"))
    # Adam's first step is as long as its rate, whatever the gradient is.
    moved = np.abs(model.get_weights()[0] - before)
    np.testing.assert_allclose(moved[[0, 1, 3]], 0.125, rtol=1e-4)
    np.testing.assert_array_equal(moved[[2, 4]], 0)


def network_output(weights):
    return np.tanh(X @ weights[0] + weights[1]) @ weights[2] + weights[3]


@pytest.mark.parametrize("way", WAYS)
def test_lost_steps(way):
    _, model = made(way)
    variables = model.trainable_variables
    model.optimizer.build(variables)
    for value in (0.0, np.inf, 0.0, np.nan):
        model.optimizer.apply([tf.fill(v.shape, np.float32(value)) for v in variables], variables)
    # Without a wrapper they are applied, and weights are lost.
    assert methods.lost_steps(model, 4) == (2 if way in ("dynamic", "paper", "balanced") else 0)


@pytest.mark.parametrize("way", WAYS)
def test_lost_entries(way):
    """At the logits' gradient, 2 (found - y) / (2 · 8), times multiplier and loss scale."""
    multiplier = 2.0**-23
    method, model = made(way, multiplier)
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    shares = methods.lost_entries(model, method, squares, multiplier, X, Y)
    share = max(shares.values(), default=0)
    weights = model.get_weights()
    gradient = (network_output(weights) - Y) / 8 * multiplier
    scale = {"fixed": 2.0**7, "dynamic": 2.0**15}.get(way, 1.0)
    at_logits = np.mean((gradient * scale).astype(np.float16) == 0)
    if way in ("float32", "bfloat16"):
        assert not shares
    elif way == "float16":
        # Most of it; and what is lost here is lost below.
        assert 0.4 < at_logits <= share
    elif way == "balanced":
        assert share < 0.01
    else:
        assert share < 0.5
    if way in ("paper", "balanced"):
        assert model.optimizer is optimizer


@pytest.mark.parametrize(
    ("given", "expected"),
    [([], range(10)), (["--validate", "4"], [0, 2, 5, 7]), (["--validate", "99"], range(10))],
)
def test_what_is_validated_on(given, expected):
    np.testing.assert_array_equal(methods.validated(methods.parsed(parser(), given), 10), expected)


def test_report(capsys, tmp_path):
    method, model = made("balanced")
    costs = methods.Costs()
    args = methods.parsed(parser(), ["--steps", "3", "--json", str(tmp_path / "found.json")])
    history = model.fit(X, Y, epochs=3, verbose=0, callbacks=[costs]).history
    given = "squares", method, args, "noise", "loss", history, model, costs
    found = methods.report(*given, {"hidden": 0.25, "output": 0.125})
    methods.write(args.json, found)
    said = capsys.readouterr().out
    assert said.startswith("float16, balanced: loss ") and "at most 25.00% of a gradient's" in said
    methods.report(*given)
    assert "entries lost" not in capsys.readouterr().out
    read = json.loads((tmp_path / "found.json").read_text())
    assert read["final"] == history["loss"][-1] and len(read["history"]["loss"]) == 3
    assert (read["steps_lost"], read["lost_entries"]["hidden"]) == (0, 0.25)
    assert read["options"]["steps"] == 3 and "json" not in read["options"]
    assert [site[0] for site in read["scales"]] == [site.name for site in model.scales]
    last = [np.log2(site.scale) for site in model.scales]
    assert len(read["log2_scales_by_epoch"]) == 3 and read["log2_scales_by_epoch"][-1] == last
    assert read["seconds_first_step"] > read["seconds"] > 0 and read["peak_mib"] > 50
    assert read["core_seconds"] > 0 and read["machine"]
