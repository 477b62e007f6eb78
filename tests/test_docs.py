"""What the documentation says of the code holds."""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

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
