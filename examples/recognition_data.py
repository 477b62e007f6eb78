"""Data for the recognition example: CIFAR-10, Fashion-MNIST's layout, or drawn shapes.

Every loader returns a `Dataset` of uint8 images (count, height, width, 3) and labels (count,).
"""

import functools
import pickle
from typing import NamedTuple

import data_files
import keras
import numpy as np
from PIL import Image, ImageDraw

EXPECTED = """Expected one of
  - "cifar10": downloaded by keras.datasets.cifar10;
  - the folder cifar-10-batches-py of www.cs.toronto.edu/~kriz/cifar.html;
  - an .npz with x_train, y_train, x_val, y_val (or x_test, y_test): uint8 images (count, height,
    width, 3) and class numbers;
  - an .npz with JPEG files: train_jpeg_bytes, train_jpeg_offsets, train_y, and the same of test.
Leave out --data to train on shapes that the program draws itself."""


class Dataset(NamedTuple):
    """Images to train on and to validate, with their class numbers."""

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_val: np.ndarray
    y_val: np.ndarray

    @property
    def classes(self):
        """The number of classes."""
        return int(max(self.y_train.max(), self.y_val.max())) + 1


def load(path, seed=0):
    """Loads the data set at `path`, or draws one where `path` is None.

    Raises:
        ValueError: If `path` holds something else; the message says what was expected.
    """
    if path is None:
        return Dataset("drawn shapes", *draw(4000, 2 * seed), *draw(1000, 2 * seed + 1))
    if path == "cifar10":
        (x, y), (x_val, y_val) = keras.datasets.cifar10.load_data()
        return Dataset("CIFAR-10", x, y.ravel(), x_val, y_val.ravel())
    return data_files.load(path, _load_folder, _load_npz, _error)


def draw(count, seed):
    """Draws filled shapes of 4 kinds in two ways, so that there are 8 classes, on noise.

    Returns:
        uint8 images (count, 32, 32, 3) and class numbers (count,).
    """
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 8
    images = rng.integers(0, 160, (count, 32, 32, 3), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        canvas = Image.fromarray(image)
        pen = ImageDraw.Draw(canvas)
        colour = tuple(int(c) for c in rng.integers(40, 256, 3))
        size = int(rng.integers(8, 14))
        x, y = (int(v) for v in rng.integers(size, 32 - size, 2))
        kind, hollow = label % 4, label >= 4
        style = {"outline": colour, "width": 2} if hollow else {"fill": colour}
        if kind == 0:
            pen.ellipse((x - size, y - size, x + size, y + size), **style)
        elif kind == 1:
            pen.rectangle((x - size, y - size, x + size, y + size), **style)
        else:
            sides = 3 if kind == 2 else 5
            pen.regular_polygon((x, y, size), sides, int(rng.integers(360)), **style)
        image[:] = np.asarray(canvas)
    return images, labels


_error = functools.partial(data_files.error, expected=EXPECTED)


def _load_folder(folder):
    """Loads CIFAR-10's own files: pickled batches of flat images, channels first."""
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise _error(folder, f"it lacks {missing[0]}")
    parts = [pickle.loads((folder / name).read_bytes(), encoding="bytes") for name in names]
    x = [part[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) for part in parts]
    y = [np.array(part[b"labels"]) for part in parts]
    return Dataset("CIFAR-10", np.concatenate(x[:5]), np.concatenate(y[:5]), x[5], y[5])


def _load_npz(path):
    file = data_files.read_npz(path)
    if file is None:
        raise _error(path, "it is no .npz file")
    if "train_jpeg_bytes" in file:
        parts = []
        for split in ("train", "test"):
            parts += [_decode(file, split), np.asarray(file[f"{split}_y"])]
        return Dataset(path.stem, *parts)
    held_out = "val" if "x_val" in file else "test"
    names = ["x_train", "y_train", f"x_{held_out}", f"y_{held_out}"]
    missing = [name for name in names if name not in file]
    if missing:
        raise _error(path, f"it lacks {missing[0]}")
    x, y, x_val, y_val = (file[name] for name in names)
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[-1] != 3:
        raise _error(path, f"its images are {x.dtype} of shape {x.shape}")
    for images, labels in ((x, y), (x_val, y_val)):
        numbers = np.issubdtype(labels.dtype, np.integer)
        if labels.size != len(images) or not numbers or labels.min(initial=0) < 0:
            raise _error(
                path,
                f"of {len(images)} images its labels are {labels.dtype} of shape {labels.shape}, "
                f"from {labels.min(initial=0)} on",
            )
    return Dataset(path.stem, x, y.ravel(), x_val, y_val.ravel())


def _decode(file, split):
    data, offsets = file[f"{split}_jpeg_bytes"], file[f"{split}_jpeg_offsets"]
    files = data_files.files_in(data, offsets, range(len(offsets) - 1))
    return np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
