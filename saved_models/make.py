"""Trains a small classifier of digits in float16 and exports it: `python saved_models/make.py`."""

import argparse
import shutil
from pathlib import Path

import keras
import numpy as np

import tf_gradscale as gs

# Ten digits of 7×5 pixels, row by row.
GLYPHS = """
 ###    #    ###   ###     #  #####  ###  #####  ###   ###
#   #  ##   #   # #   #   ##  #     #         # #   # #   #
#  ##   #       #     #  # #  ####  ####     #  #   # #   #
# # #   #     ##    ##  #  #      # #   #   #    ###   ####
##  #   #    #        # #####     # #   #  #    #   #     #
#   #   #   #     #   #    #  #   # #   #  #    #   #     #
 ###   ###  #####  ###     #   ###   ###   #     ###   ###
"""
ROOM = 2  # Pixels by which a digit may move to the right and down.
NOISE = 0.2  # Standard deviation that is added to pixels of 0 and 1.


def digits():
    """The ten digits without noise, in the middle: shape (10, 9, 7, 1)."""
    rows = [line.ljust(60) for line in GLYPHS.strip("\n").split("\n")]
    pixels = np.array([[pixel == "#" for pixel in row] for row in rows], "float32")
    glyphs = pixels.reshape(7, 10, 6)[:, :, :5].transpose(1, 0, 2)
    around = [(0, 0), (ROOM // 2, ROOM - ROOM // 2), (ROOM // 2, ROOM - ROOM // 2)]
    return np.pad(glyphs, around)[..., None]


def batch(rng, size):
    """Images of digits that were moved and have noise, and which digits they are."""
    labels = rng.integers(0, 10, size)
    moves = rng.integers(-(ROOM // 2), ROOM - ROOM // 2 + 1, (size, 2))
    clean = digits()
    images = [np.roll(clean[n], move, axis=(0, 1)) for n, move in zip(labels, moves, strict=True)]
    return np.stack(images) + rng.normal(0, NOISE, (size, 9, 7, 1)).astype("float32"), labels


def train(steps=300):
    """The classifier: digits of shape (n, 9, 7, 1) to logits of shape (n, 10)."""
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    with gs.policy_scope("mixed_float16"):
        model = gs.convert(
            keras.Sequential(
                [
                    keras.Input((9, 7, 1)),
                    keras.layers.Conv2D(8, 3, activation="relu"),
                    keras.layers.Flatten(),
                    keras.layers.Dense(10),
                ]
            )
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    for _ in range(steps):
        model.train_on_batch(*batch(rng, 64))
    print("accuracy on new images:", model.evaluate(*batch(rng, 1000), verbose=0)[1])
    return model


def main():
    """Trains and exports."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parent / "digits"
    parser.add_argument("--out", type=Path, default=default, help="folder, made anew")
    out = parser.parse_args().out
    model = train()
    shutil.rmtree(out, ignore_errors=True)
    model.export(out, verbose=False)


if __name__ == "__main__":
    main()
