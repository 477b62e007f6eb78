"""What the documentation says of the code holds."""

import importlib
import importlib.util
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import Threefold, normal

import tf_gradscale as gs

DOCS = Path(__file__).parents[1] / "docs"
NAMES = sorted(
    set(re.findall(r"`(tf_gradscale\.[\w.]+)`", (DOCS / "algorithm1.md").read_text("utf-8")))
)


def resolve(name):
    """The object of a dotted name."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[split:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("name", NAMES)
def test_algorithm_1_is_where_its_page_says(name):
    assert resolve(name) is not None


def test_every_line_of_algorithm_1_has_a_place():
    text = (DOCS / "algorithm1.md").read_text("utf-8")
    rows = re.findall(r"^\| ([\d, ]+) \|", text, re.MULTILINE)
    lines = {int(n) for row in rows for n in row.split(",")}
    # Line 21 and 22 of the printed algorithm end the condition and the loop.
    assert lines == {*range(1, 21), 22}


def test_the_table_of_layers_is_what_the_code_does():
    """For a part of the layers here; the `slow` test looks at the whole page."""
    page = load_page()
    text = (DOCS / "what_is_scaled.md").read_text("utf-8")
    for name in ("Dense", "Conv2D", "Dot", "ReLU", "LayerNormalization", "MultiHeadAttention"):
        assert f"| `{name}` | {page.rules_of(name)} |" in text


@pytest.mark.slow
def test_the_page_of_layers_is_what_the_code_prints():
    assert load_page().page() == (DOCS / "what_is_scaled.md").read_text("utf-8")


def test_the_page_of_layers_names_every_layer():
    text = (DOCS / "what_is_scaled.md").read_text("utf-8")
    assert all(f"`{name}`" in text for name in load_page().names())


def load_page():
    spec = importlib.util.spec_from_file_location("what_is_scaled", DOCS / "what_is_scaled.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- Rules of one's own --------------------------------------------------------------------------

CODE = re.findall(r"```python\n(.*?)```", (DOCS / "rules.md").read_text("utf-8"), re.DOTALL)


@pytest.fixture
def page(monkeypatch):
    """Runs the first blocks of code of the page on rules; gives the names they define."""
    monkeypatch.setattr(gs.rules, "_registered", {})

    def run(count):
        names = {"__name__": "page"}
        for block in CODE[:count]:
            exec(block, names)
        return names

    return run


@pytest.mark.parametrize("blocks", [2, 4])
def test_the_layer_of_the_page_on_rules_has_right_gradients(page, blocks):
    """With the package's rule and with its own, and no warning."""
    names = page(blocks)

    def build():
        inputs = keras.Input((6,))
        x = keras.layers.Dense(6, activation="tanh")(inputs)
        return keras.Model(inputs, names["LowRank"](8, 2, name="low_rank")(x))

    threefold = Threefold(build, normal((8, 6), 1))
    threefold.check()
    threefold.check(tf.function)
    (rule,) = [
        type(step.rule).__name__
        for step in threefold.ours._gradscale.region.graph().steps
        if step.name == "low_rank"
    ]
    assert rule == {2: "Measured", 4: "LowRankRule"}[blocks]


def test_the_page_on_rules_prints_what_it_says(page, capsys):
    page(len(CODE))
    (says,) = re.findall(r"print\(.*\)  # (.*)", CODE[-1])
    assert capsys.readouterr().out == f"{says}\n"


def test_the_straight_through_rule(page):
    names = page(3)
    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((6,))
        model = gs.convert(keras.Model(inputs, names["Rounded"]()(inputs)))
    x, weights = normal((8, 6), 1), normal((8, 6), 2)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = model(x)
        value = 2.0**-30 * tf.reduce_sum(y * weights)
    np.testing.assert_array_equal(y, np.round(4 * x) / 4)
    np.testing.assert_array_equal(tape.gradient(value, x), 2.0**-30 * weights)
