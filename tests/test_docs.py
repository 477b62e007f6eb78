"""What the documentation says of the code holds."""

import importlib
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
