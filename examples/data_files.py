"""What all examples do with a file or folder that is named on their command line."""

import io
from pathlib import Path
from zipfile import BadZipFile

import numpy as np


def error(path, problem, expected):
    """A `ValueError` that says what is wrong with `--data`, and what was expected."""
    return ValueError(f"--data cannot be used: {problem}. {expected}\nReceived: {path}")


def load(path, load_folder, load_npz, error, *args):
    """Has a folder or an .npz file read.

    Args:
        path: Where it is.
        load_folder: Function of its path and `args`.
        load_npz: Likewise.
        error: Function of a path and a problem, that makes the error.
        *args: What these are given besides.

    Raises:
        ValueError: What `error` makes, if there is neither.
    """
    path = Path(path)
    if path.is_dir():
        return load_folder(path, *args)
    if path.is_file():
        return load_npz(path, *args)
    raise error(path, "there is no such file or folder")


def read_npz(path):
    """The arrays of an .npz file by name; `None` if it is something else.

    Raises:
        FileNotFoundError: If there is no such file.
    """
    try:
        # Without pickles a file cannot run code.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except FileNotFoundError:
        raise
    except (AttributeError, EOFError, OSError, TypeError, ValueError, BadZipFile):
        return None


def files_in(data, offsets, indices):
    """Some of the files that stand in an array of bytes one behind the other, opened."""
    return (io.BytesIO(data[offsets[i] : offsets[i + 1]].tobytes()) for i in indices)
