"""Trains a small transformer to write, in a precision and with a scaling of your choice.

    python examples/language.py
    python examples/language.py --data shakespeare.txt --precision float32
    python examples/language.py --data shakespeare.txt --scaling fixed:2^7 --loss-multiplier 1e-4

The text is read as characters. Perplexity is exp of the mean cross-entropy of the next character,
over the last tenth of the text.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import NamedTuple

# Keep TensorFlow's start-up notes off the screen; must be set before it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import curves
import keras
import methods
import numpy as np
import tensorflow as tf
import transformer

ONES = "zero one two three four five six seven eight nine".split()
TENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen".split()
EXPECTED = "Expected a text file in UTF-8 with at least 20 times as many characters as --length."


class Text(NamedTuple):
    """A text as numbers of characters, to train on and to validate; and the characters."""

    name: str
    train: np.ndarray
    val: np.ndarray
    characters: str

    def decoded(self, numbers):
        """The characters of some numbers."""
        return "".join(self.characters[i] for i in numbers)


def load(path, length, seed=0):
    """Reads a text file, or writes sums where `path` is None.

    Raises:
        ValueError: If it is no text, or too short.
    """
    if path is None:
        name, text = "sums in words", write_sums(4000, seed)
    else:
        name = Path(path).stem
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--data cannot be used. {EXPECTED} Received: {path}") from error
    if len(text) < 20 * length:
        raise ValueError(f"--data is too short. {EXPECTED} Received: {len(text)} characters")
    characters = "".join(sorted(set(text)))
    numbers = np.searchsorted(np.array(list(characters)), np.array(list(text))).astype("int32")
    end = len(numbers) * 9 // 10
    return Text(name, numbers[:end], numbers[end:], characters)


def write_sums(count, seed):
    """Lines such as "four plus nine is thirteen.", of which the last word can be known."""
    rng = np.random.default_rng(seed)
    words = ONES + TENS
    pairs = rng.integers(10, size=(count, 2))
    return "".join(f"{ONES[a]} plus {ONES[b]} is {words[a + b]}.\n" for a, b in pairs)


def windows(numbers, starts, length):
    """Texts that begin at some places, and the same one character on."""
    texts = numbers[starts[:, None] + np.arange(length + 1)]
    return texts[:, :-1], texts[:, 1:]


def batches(text, args):
    """Batches without end, each of texts that begin anywhere."""
    numbers = tf.constant(text.train)
    starts = tf.random.Generator.from_seed(args.seed)

    def drawn(_):
        last = tf.size(numbers) - args.length - 1
        start = starts.uniform((args.batch, 1), maxval=last, dtype=tf.int32)
        texts = tf.gather(numbers, start + tf.range(args.length + 1))
        return texts[:, :-1], texts[:, 1:]

    return tf.data.Dataset.counter().map(drawn).prefetch(2)


def draw(path, history):
    """Draws the curves."""
    curves.draw(path, history, {"cross-entropy per character": curves.CROSS_ENTROPY})


def parse_arguments(argv=None):
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    methods.add_arguments(parser, "a text file", steps=600, learning_rate=2e-3)
    add = parser.add_argument
    add("--length", type=int, default=64, help="characters of a text (default: %(default)s)")
    add("--width", type=int, default=128, help="of the vectors (default: %(default)s)")
    add("--depth", type=int, default=3, help="blocks (default: %(default)s)")
    add("--batch", type=int, default=32, help="texts per step (default: %(default)s)")
    return methods.parsed(parser, argv)


def main(argv=None):
    """Runs the program."""
    args = parse_arguments(argv)
    try:
        text = load(args.data, args.length, args.seed)
    except ValueError as error:
        sys.exit(f"language.py: {error}")
    epochs = methods.epochs(args)
    print(f"{text.name}: {len(text.train)} characters to train on, {len(text.characters)} kinds")
    loss = keras.losses.sparse_categorical_crossentropy
    warmup = args.steps // 10
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, args.steps - warmup, warmup_target=args.learning_rate, warmup_steps=warmup
    )
    model = methods.compiled(
        args.method,
        lambda: transformer.build_model(len(text.characters), args.length, args.width, args.depth),
        # Adam's step does not depend on the loss multiplier, if its epsilon follows it.
        lambda **options: keras.optimizers.Adam(
            rate, beta_2=0.98, epsilon=1e-7 * args.loss_multiplier, **options
        ),
        loss,
        args.loss_multiplier,
        args.seed,
        metrics=[keras.metrics.SparseCategoricalCrossentropy(name="cross_entropy")],
    )
    starts = np.arange(0, len(text.val) - args.length - 1, args.length)[:1000]
    starts = starts[methods.validated(args, len(starts))]
    costs = methods.Costs()
    history = model.fit(
        batches(text, args),
        steps_per_epoch=args.steps // epochs,
        epochs=epochs,
        validation_data=windows(text.val, starts, args.length),
        validation_batch_size=100,
        verbose=args.verbose,
        shuffle=False,  # the data set shuffles by itself
        callbacks=[costs],
    ).history
    history["val_perplexity"] = [float(np.exp(x)) for x in history["val_cross_entropy"]]
    x, y = next(iter(batches(text, args)))
    lost = methods.lost_entries(model, args.method, loss, args.loss_multiplier, x, y)
    found = methods.report(
        "language", args.method, args, text.name, "val_perplexity", history, model, costs, lost
    )
    if args.json:
        methods.write(args.json, found)
    if np.isfinite(history["val_perplexity"][-1]):
        written = transformer.continued(model, text.val[: args.length], 200, args.seed)
        print(f"It writes:\n{text.decoded(written)}")
    else:
        print("It writes nothing: its weights are not finite.")
    if args.out:
        draw(args.out, history)
        print(f"Curves: {args.out}")


if __name__ == "__main__":
    main()
