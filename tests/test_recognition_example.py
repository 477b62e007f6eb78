"""The recognition example's parts: data, network, batches, command line. Nothing is trained."""

import io
import pickle
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import recognition  # noqa: E402
import recognition_data  # noqa: E402
import resnet  # noqa: E402

RNG = np.random.default_rng(0)


def pictures(count):
    return RNG.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def test_drawn_shapes_are_the_same_for_a_seed():
    images, labels = recognition_data.draw(16, seed=3)
    again, _ = recognition_data.draw(8, seed=3)
    other, _ = recognition_data.draw(16, seed=4)
    assert images.shape == (16, 32, 32, 3) and images.dtype == np.uint8
    assert labels.tolist() == [*range(8)] * 2
    assert (images != other).any()
    assert again.shape == (8, 32, 32, 3)


def test_cifar_folder(tmp_path):
    """Its own files: flat, channels first."""
    x, y = pictures(12), list(range(10)) + [0, 1]
    for i in range(6):
        name = f"data_batch_{i + 1}" if i < 5 else "test_batch"
        part = x[2 * i : 2 * i + 2].transpose(0, 3, 1, 2).reshape(2, -1)
        content = {b"data": part, b"labels": y[2 * i : 2 * i + 2]}
        (tmp_path / name).write_bytes(pickle.dumps(content))
    data = recognition_data.load(tmp_path)
    np.testing.assert_array_equal(data.x_train, x[:10])
    np.testing.assert_array_equal(data.x_val, x[10:])
    assert data.y_train.tolist() == y[:10] and data.y_val.tolist() == y[10:]
    assert data.classes == 10
    (tmp_path / "data_batch_3").unlink()
    with pytest.raises(ValueError, match="it lacks data_batch_3. Expected one of"):
        recognition_data.load(tmp_path)


@pytest.mark.parametrize("held_out", ["val", "test"])
def test_arrays(tmp_path, held_out):
    x, y = pictures(6), np.array([[0], [1], [2], [0], [1], [2]])
    path = tmp_path / "mine.npz"
    split = {f"x_{held_out}": x[4:], f"y_{held_out}": y[4:]}
    np.savez(path, x_train=x[:4], y_train=y[:4], **split)
    data = recognition_data.load(path)
    assert (data.name, data.classes) == ("mine", 3)
    np.testing.assert_array_equal(data.x_val, x[4:])
    assert data.y_train.tolist() == [0, 1, 2, 0]


def test_jpeg_files(tmp_path):
    parts = {}
    for split, count in (("train", 3), ("test", 2)):
        files = []
        for image in pictures(count):
            buffer = io.BytesIO()
            Image.fromarray(image).save(buffer, "JPEG")
            files.append(buffer.getvalue())
        parts[f"{split}_jpeg_bytes"] = np.frombuffer(b"".join(files), np.uint8)
        parts[f"{split}_jpeg_offsets"] = np.cumsum([0, *map(len, files)])
        parts[f"{split}_y"] = np.arange(count)
    np.savez(tmp_path / "jpeg.npz", **parts)
    data = recognition_data.load(tmp_path / "jpeg.npz")
    assert data.x_train.shape == (3, 32, 32, 3) and data.x_val.shape == (2, 32, 32, 3)
    last = np.asarray(Image.open(io.BytesIO(files[-1])))
    np.testing.assert_array_equal(data.x_val[-1], last)


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        ([0, 1, 1], "of 2 images its labels are int64 of shape .3,., from 0 on"),
        ([[0, 1], [1, 0]], "of 2 images its labels are int64 of shape .2, 2., from 0 on"),
        ([0, -1], "of 2 images its labels are int64 of shape .2,., from -1 on"),
        ([0.5, 1.0], "of 2 images its labels are float64 of shape .2,., from 0.0 on"),
    ],
)
def test_other_labels_are_refused(tmp_path, labels, problem):
    images = np.zeros((2, 4, 4, 3), np.uint8)
    np.savez(tmp_path / "x.npz", x_train=images, y_train=[[0], [1]], x_val=images, y_val=labels)
    with pytest.raises(ValueError, match=problem):
        recognition_data.load(tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({}, "it lacks x_train"),
        ({"x_train": np.zeros((2, 4, 4, 3)), "y_train": [0, 1]}, "it lacks x_test"),
        (
            {n: np.zeros((2, 4, 4, 3)) for n in ("x_train", "x_val", "y_train", "y_val")},
            r"its images are float64 of shape \(2, 4, 4, 3\)",
        ),
    ],
)
def test_other_arrays_are_refused(tmp_path, content, problem):
    np.savez(tmp_path / "x.npz", **content)
    with pytest.raises(ValueError, match=f"--data cannot be used: {problem}.*(?s:.*)Received: "):
        recognition_data.load(tmp_path / "x.npz")


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ValueError, match="it is no .npz file"):
        recognition_data.load(tmp_path / "text.npz")
    with pytest.raises(SystemExit, match="there is no such file or folder"):
        recognition.main(["--data", str(tmp_path / "nowhere")])


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(("depth", "products", "width"), [(18, 17, 8), (50, 49, 4)])
def test_networks(depth, products, width, residual):
    """As many convolutions as the name says, less the last layer; and shortcuts."""
    model = resnet.build_model((32, 32, 3), 10, depth, width, residual)
    convolutions = [x for x in model.layers if isinstance(x, keras.layers.Conv2D)]
    shortcuts = [x for x in convolutions if x.name.endswith("shortcut")]
    # The first stage of bottlenecks changes the width as well.
    assert len(shortcuts) == (0 if not residual else 3 if depth == 18 else 4)
    assert len(convolutions) - len(shortcuts) == products
    assert model.output_shape == (None, 10)
    maps = model.get_layer("pool").input.shape
    assert maps[1:] == (4, 4, 8 * width * (4 if depth == 50 else 1))


def test_batches_are_shifted_and_flipped_images():
    images = np.zeros((4, 8, 8, 3), np.uint8) + np.arange(4, dtype=np.uint8)[:, None, None, None]
    data = recognition_data.Dataset("flat", images, np.arange(4), images, np.arange(4))
    args = recognition.parse_arguments(["--batch", "4", "--seed", "1"])
    x, y = next(iter(recognition.batches(data, args)))
    assert x.shape == (4, 8, 8, 3)
    # Flat images stay what they are, and keep their labels.
    np.testing.assert_array_equal(x[:, 0, 0, 0], y)
    again, _ = next(iter(recognition.batches(data, args)))
    np.testing.assert_array_equal(x, again)


def test_the_optimizer_takes_the_same_step_for_any_multiplier():
    weights = []
    for multiplier in (1.0, 2.0**-10):
        args = recognition.parse_arguments(["--loss-multiplier", str(multiplier), "--steps", "4"])
        kernel, bias = keras.Variable([1.0, 2.0], name="kernel"), keras.Variable([1.0], name="bias")
        optimizer = recognition.make_optimizer(args)
        gradients = keras.ops.array([0.5, 1.0]), keras.ops.array([0.0])
        optimizer.apply([multiplier * g for g in gradients], [kernel, bias])
        weights.append([kernel.numpy(), bias.numpy()])
    np.testing.assert_allclose(weights[0][0], weights[1][0], rtol=1e-6)
    # No gradient, and no decay.
    assert weights[0][1] == weights[1][1] == 1.0
    # Nesterov: 0.1·(1 + 0.9)·g, after 0.1·5e-4 of the weight.
    wanted = np.array([1.0, 2.0]) * (1 - 0.1 * 5e-4) - 0.19 * np.array([0.5, 1.0])
    np.testing.assert_allclose(weights[0][0], wanted, rtol=1e-5)


def test_picture(tmp_path):
    curves = {n: [1.0, 0.5] for n in ("loss", "cross_entropy", "val_cross_entropy", "val_accuracy")}
    recognition.draw(tmp_path / "curves.png", curves)
    with Image.open(tmp_path / "curves.png") as picture:
        assert min(picture.size) > 300
