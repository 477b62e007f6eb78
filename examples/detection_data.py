"""Data for the detection example: shapes that the program draws, or the user's own images.

Every loader returns a `Dataset`. Images are uint8 arrays, squashed to a square of one size; boxes
are x0, y0, x1, y1 in 0..1 of width and height; labels number the classes from 0.
"""

import functools
import xml.etree.ElementTree as ElementTree
from typing import NamedTuple

import data_files
import numpy as np
from average_precision import iou
from PIL import Image

SPLITS = ("train", "val")
SHAPES = ("disc", "square", "triangle")
EXPECTED = """Expected one of
  - a folder of PASCAL VOC's development kit (VOC2007, say, or one that holds such), with
    ImageSets/Main/train.txt and val.txt, Annotations/*.xml and JPEGImages/*.jpg;
  - an .npz with JPEG files: jpeg_bytes, jpeg_offsets, split (0 train, 1 val), and for each object
    boxes (x0, y0, x1, y1 in 0..1), box_class, box_image; if you like, class_names.
Leave out --data to train on the shapes that the program draws itself."""


class Split(NamedTuple):
    """Images (count, size, size, 3), and for each its boxes (n, 4) and labels (n,)."""

    images: np.ndarray
    boxes: list
    labels: list

    def chosen(self, indices):
        """Some of the images, with what belongs to them."""
        boxes, labels = ([values[i] for i in indices] for values in (self.boxes, self.labels))
        return Split(self.images[indices], boxes, labels)


class Dataset(NamedTuple):
    """What to train on, what to validate on, and the names of the classes."""

    name: str
    train: Split
    val: Split
    classes: tuple


def load(path, size, seed=0):
    """Loads the data set at `path`, or draws one where `path` is None.

    Args:
        path: A folder, an .npz file, or None; see `EXPECTED`.
        size: Height and width to which images are squashed.
        seed: Seed of the drawn images.

    Returns:
        A `Dataset`.

    Raises:
        ValueError: If `path` holds something else; the message says what was expected.
    """
    if path is None:
        train, val = draw_shapes(320, size, 2 * seed), draw_shapes(80, size, 2 * seed + 1)
        return Dataset("drawn shapes", train, val, SHAPES)
    return data_files.load(path, _load_folder, _load_npz, _error, size)


_error = functools.partial(data_files.error, expected=EXPECTED)


def _read(path, file, size):
    """Returns an image as an array, and its width and height in the file."""
    try:
        with Image.open(file) as image:
            resized = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
            return np.asarray(resized, np.uint8), image.size
    except OSError as error:  # Pillow's own errors are among them
        raise _error(path, "an image cannot be read") from error


def _checked(path, name, train, val, classes):
    """Returns a `Dataset` whose boxes and labels can be trained on."""
    for split, part in zip(SPLITS, (train, val), strict=True):
        if not sum(map(len, part.boxes)):
            raise _error(path, f"it has no objects in {split}")
        boxes, labels = np.concatenate(part.boxes), np.concatenate(part.labels)
        # Not `(boxes < 0).any()`, which lets NaN pass.
        if not (np.all((boxes >= 0) & (boxes <= 1)) and np.all(boxes[:, :2] < boxes[:, 2:])):
            raise _error(path, f"a box in {split} is empty, or not inside 0..1")
        if labels.min() < 0 or labels.max() >= len(classes):
            raise _error(path, f"a label in {split} has none of the {len(classes)} class names")
    return Dataset(name, train, val, classes)


# PASCAL VOC's development kit.


def _load_folder(folder, size):
    """Loads one year's folder, or all those in a folder. Classes are those seen in training."""
    years = [folder] if (folder / "ImageSets").is_dir() else sorted(folder.glob("VOC*"))
    found = {}
    for split in SPLITS:
        names = [(year, name) for year in years for name in _names(folder, year, split)]
        found[split] = [_annotated(year, name, size) for year, name in names]
        if not names:
            raise _error(folder, f"it has no {split} images (ImageSets/Main/{split}.txt)")
    classes = sorted({label for _, objects in found["train"] for label, _ in objects})
    parts = []
    for split in SPLITS:
        objects = [objects for _, objects in found[split]]
        unknown = sorted({label for one in objects for label, _ in one} - set(classes))
        if unknown:
            raise _error(folder, f"{', '.join(unknown)} in {split} is not in train")
        parts.append(
            Split(
                np.stack([image for image, _ in found[split]]),
                [np.float32([box for _, box in one]).reshape(-1, 4) for one in objects],
                [np.int32([classes.index(label) for label, _ in one]) for one in objects],
            )
        )
    return _checked(folder, folder.name, *parts, tuple(classes))


def _names(folder, year, split):
    """Returns the names of a split's images."""
    listing = year / "ImageSets" / "Main" / f"{split}.txt"
    if not listing.is_file():
        raise _error(folder, f"{listing.relative_to(folder)} is missing")
    return [line.split()[0] for line in listing.read_text().splitlines() if line.strip()]


def _annotated(year, name, size):
    """Returns an image and its objects as (class, box) pairs.

    Objects marked as difficult are left out, of training and of the truth at validation.
    """
    image, annotation = year / "JPEGImages" / f"{name}.jpg", year / "Annotations" / f"{name}.xml"
    for path in (image, annotation):
        if not path.is_file():
            raise _error(year, f"{path.relative_to(year)} is missing")
    array, (width, height) = _read(image, image, size)
    objects = []
    try:
        for item in ElementTree.parse(annotation).getroot().iter("object"):
            if item.findtext("difficult", "0").strip() == "1":
                continue
            corners = [
                float(item.findtext(f"bndbox/{k}")) for k in ("xmin", "ymin", "xmax", "ymax")
            ]
            # The first pixel is 1 and the last one belongs to the box.
            edges = np.subtract(corners, (1, 1, 0, 0)) / (width, height, width, height)
            objects.append((item.findtext("name").strip(), np.clip(edges, 0, 1)))
    except (AttributeError, TypeError, ValueError, ElementTree.ParseError) as error:
        raise _error(annotation, "an object in it lacks a name or a bndbox of numbers") from error
    return array, objects


# An archive.


def _load_npz(path, size):
    """Loads an archive of JPEG files and boxes."""
    archive = data_files.read_npz(path)
    if archive is None:
        raise _error(path, "it is not an .npz archive")
    needed = ("jpeg_bytes", "jpeg_offsets", "split", "boxes", "box_class", "box_image")
    if not set(needed) <= archive.keys():
        raise _error(path, f"it holds {sorted(archive)}")
    data, offsets, splits, boxes, labels, owners = (archive[name] for name in needed)
    if len(offsets) != len(splits) + 1 or not len(boxes) == len(labels) == len(owners):
        raise _error(path, "its arrays differ in length")
    parts = []
    for number, split in enumerate(SPLITS):
        chosen = np.flatnonzero(splits == number)
        if not len(chosen):
            raise _error(path, f"it has no {split} images")
        files = data_files.files_in(data, offsets, chosen)
        rows = [np.flatnonzero(owners == i) for i in chosen]
        parts.append(
            Split(
                np.stack([_read(path, file, size)[0] for file in files]),
                [boxes[row].astype(np.float32).reshape(-1, 4) for row in rows],
                [labels[row].astype(np.int32) for row in rows],
            )
        )
    if "class_names" in archive:
        classes = tuple(str(name) for name in archive["class_names"])
    else:
        classes = tuple(f"class {i}" for i in range(int(labels.max(initial=0)) + 1))
    return _checked(path, path.name, *parts, classes)


# Drawn images.


def draw_shapes(count, size, seed=0):
    """Draws discs, squares and triangles of any colour on cloudy, noisy ground.

    Args:
        count: Number of images.
        size: Height and width in pixels.
        seed: Seed of the random numbers. Image i of a seed is the same for every `count`.

    Returns:
        A `Split` with one to three shapes in an image.
    """
    drawn = [_draw(size, np.random.default_rng([seed, index])) for index in range(count)]
    images, boxes, labels = zip(*drawn, strict=True)
    return Split(np.stack(images), list(boxes), list(labels))


def _draw(size, rng):
    ground = rng.uniform(60, 195, 3)
    clouds = ground + rng.normal(0, 25, (6, 6, 3))
    image = Image.fromarray(np.clip(clouds, 0, 255).astype(np.uint8))
    image = np.asarray(image.resize((size, size), Image.Resampling.BICUBIC), np.float32).copy()
    y, x = (np.mgrid[:size, :size] + 0.5) / size
    boxes, labels = [], []
    for _ in range(rng.integers(1, 4)):
        extent = rng.uniform(0.15, 0.5) * rng.uniform(0.8, 1.25, 2)
        corner = rng.uniform(0, 1 - extent)
        box, label = np.concatenate([corner, corner + extent]), rng.integers(len(SHAPES))
        if boxes and iou([box], boxes).max() > 0.1:
            continue
        across, down = (x - corner[0]) / extent[0], (y - corner[1]) / extent[1]  # 0..1 in the box
        inside = {
            "disc": (across - 0.5) ** 2 + (down - 0.5) ** 2 < 0.25,
            "square": (abs(across - 0.5) < 0.5) & (abs(down - 0.5) < 0.5),
            "triangle": (abs(across - 0.5) < down / 2) & (down < 1),
        }[SHAPES[label]]
        # Far from the ground in every channel, so that no shape is hard to see.
        image[inside] = ground + rng.choice((-1, 1), 3) * rng.uniform(50, 110, 3)
        boxes.append(box)
        labels.append(label)
    noisy = np.clip(image + rng.normal(0, 12, image.shape), 0, 255).astype(np.uint8)
    return noisy, np.float32(boxes), np.int32(labels)
