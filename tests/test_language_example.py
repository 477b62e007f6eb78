"""The language example's parts: text, batches, network, command line. Little is trained."""

import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from PIL import Image

import tf_gradscale as gs

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import language  # noqa: E402
import transformer  # noqa: E402


def test_sums_are_right_and_the_same_for_a_seed():
    lines = language.write_sums(200, seed=1).splitlines()
    assert lines == language.write_sums(200, seed=1).splitlines()
    assert lines != language.write_sums(200, seed=2).splitlines()
    names = language.ONES + language.TENS
    for line in lines:
        left, _, right, _, total = line.rstrip(".").split()
        assert names.index(total) == names.index(left) + names.index(right)


def test_text(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_text("ab ba\n" * 100, encoding="utf-8")
    text = language.load(path, length=4)
    assert text.name == "poem" and text.characters == "\n ab"
    assert len(text.train) == 540 and len(text.val) == 60
    assert text.train[:6].tolist() == [2, 3, 1, 3, 2, 0]
    assert text.decoded(text.val[:6]) == "ab ba\n"


def test_texts_that_are_refused(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("abc", encoding="utf-8")
    with pytest.raises(ValueError, match="--data is too short.*Received: 3 characters"):
        language.load(path, length=4)
    path.write_bytes(b"\xff\xfe\xfa" * 100)
    with pytest.raises(ValueError, match="Expected a text file in UTF-8.*Received: .*short.txt"):
        language.load(path, length=4)
    with pytest.raises(SystemExit, match="language.py: --data cannot be used"):
        language.main(["--data", str(tmp_path / "nowhere.txt")])


def test_batches_are_texts_and_what_follows_each_character():
    text = language.Text("count", np.arange(100, dtype="int32"), np.arange(9), "")
    args = language.parse_arguments(["--batch", "5", "--length", "7"])
    x, y = next(iter(language.batches(text, args)))
    assert x.shape == y.shape == (5, 7)
    np.testing.assert_array_equal(y, x + 1)
    np.testing.assert_array_equal(x, x[:, :1].numpy() + np.arange(7))
    x, y = language.windows(np.arange(20), np.array([0, 8]), 4)
    assert x.tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert y.tolist() == [[1, 2, 3, 4], [9, 10, 11, 12]]


@pytest.fixture
def model():
    keras.utils.set_random_seed(0)
    return transformer.build_model(11, 8, width=16, depth=2, heads=2)


def test_a_character_depends_on_those_before_it_only(model):
    x = np.arange(8)[None]
    other = np.where(np.arange(8) < 5, x, 10)
    found, changed = (np.asarray(model(t)) for t in (x, other))
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(found[:, :5], changed[:, :5], rtol=1e-5)
    assert np.abs(found[:, 5:] - changed[:, 5:]).max() > 1e-4


def test_the_network_is_opened_without_a_warning(model):
    """Its blocks are layers of one's own; each product in them has a scale."""
    with gs.policy_scope("mixed_float16"):
        scaled = gs.convert(transformer.build_model(11, 8, width=16, depth=1, heads=2))
    gemms = {site.name for site in scaled.scales if site.kind == "gemm"}
    # Four projections, two products of attention with two operands each, three Dense layers.
    assert len(gemms) == 4 + 4 + 3
    again = keras.models.clone_model(model)
    assert again.count_params() == model.count_params()


def test_texts_go_on_likely(model):
    """A network that always says "the next number"."""

    class Next:
        input_shape = (None, 3)

        def __call__(self, x, training):
            return keras.ops.one_hot((x + 1) % 5, 5)

    assert transformer.continued(Next(), [2, 3, 4, 0, 1], 6) == [2, 3, 4, 0, 1, 2]
    assert len(transformer.continued(model, list(range(8)), 3, seed=1)) == 3


def test_picture(tmp_path):
    curves = {name: [1.0, 0.5] for name in ("loss", "cross_entropy", "val_cross_entropy")}
    language.draw(tmp_path / "curves.png", curves)
    with Image.open(tmp_path / "curves.png") as picture:
        assert min(picture.size) > 300


def test_weights_that_are_not_finite_write_nothing(capsys):
    size = ["--steps", "2", "--width", "16", "--depth", "1", "--length", "8", "--batch", "2"]
    language.main([*size, "--scaling", "fixed:2^40", "--verbose", "0", "--validate", "4"])
    assert capsys.readouterr().out.splitlines()[-1] == (
        "It writes nothing: its weights are not finite."
    )
