"""Underflow and overflow of gradients, counted in the graph while a model trains.

For each site and each counted pass three rates, fractions of the entries that are neither zero nor
infinite in float32:

- `underflow`, γ of Eq. 1: α|∇x| ≤ λ_min;
- `lost`: zero once rounded to the format, as entries are up to half of its smallest subnormal (all
  subnormals, where these are flushed to zero);
- `overflow`: not finite in the format, in which a product may have summed them.

What is summed over passes are the rates: float32 stops counting entries at 2^24.
"""

import keras
import numpy as np
import tensorflow as tf

from tf_gradscale.shared import Shared
from tf_gradscale.xla import is_finite, magnitude

RATES = ("underflow", "lost", "overflow")


class Counters:
    """Rates of some sites, summed over the passes that were counted (`ScaleRegistry.count`).

    Args:
        wants: Function of a `Site`: whether it is counted.

    Attributes:
        active: Whether the passes of graphs that are traced now are counted.
    """

    def __init__(self, wants):
        self.wants = wants
        self.active = False
        self._variable = None

    def build(self, sites):
        """Creates the variable, once all sites are known: a row for each."""
        self._strategy = tf.distribute.get_strategy()
        with tf.init_scope():
            self._variable = keras.Variable(
                np.zeros((len(sites), 1 + len(RATES)), "float32"),
                dtype="float32",
                trainable=False,
                autocast=False,
                # Each replica counts its own passes.
                aggregation="sum",
                synchronization="on_read",
                name="counters",
            )

    def write(self, rows):
        """Adds what a pass has counted, a dictionary of vectors by the index of a site."""
        nothing = tf.zeros([1 + len(RATES)])
        found = [rows.get(i, nothing) for i in range(self._variable.shape[0])]
        return self._variable.value.assign_add(tf.stack(found))

    def take(self):
        """The sums since the last time, over all replicas of this process; begins anew.

        Returns:
            A float64 array with a row for each site: passes in which there was anything to count,
            and the sums of the three rates over these.
        """
        # Not the variable's own sum, for which other processes would have to ask as well.
        parts = self._strategy.experimental_local_results(self._variable.value)
        sums = sum(part.numpy().astype("float64") for part in parts)
        self._variable.assign(np.zeros_like(sums, "float32"))
        return sums


def means(sums):
    """The mean rates of what `Counters.take` gives, by name; NaN where nothing was counted."""
    with np.errstate(invalid="ignore"):
        rates = sums[:, 1:] / sums[:, :1]
    return dict(zip(RATES, rates.T, strict=True))


def rates(exact, kept, smallest):
    """1 and the three rates, a vector; zeros if there is nothing to count.

    Args:
        exact: The gradient in float32, a tensor or a list of them.
        kept: What is kept of it in its format, likewise.
        smallest: λ_min.
    """
    return _rates(tf.nest.flatten(exact), tf.nest.flatten(kept), smallest=smallest)


def as_kept(gradients, upstream):
    """Stands in for the gradients in float32, of an operation that can run in its own dtype only.

    Entries are taken to be as they were kept. Those that are not finite are taken to have been, if
    all of ∇Y was.
    """
    finite = tf.reduce_all([tf.reduce_all(is_finite(dy)) for dy in upstream])
    large = tf.where(finite, tf.float32.max, float("nan"))
    return [tf.where(is_finite(x), tf.cast(x, tf.float32), large) for x in gradients]


def _count(exact, kept, smallest):
    masks = []
    for x, y in zip(exact, kept, strict=True):
        there = (x != 0.0) & is_finite(x)
        fates = [magnitude(x) <= smallest, tf.equal(tf.cast(x, y.dtype), 0), ~is_finite(y)]
        masks.append([there, *(there & fate for fate in fates)])
    # In int64: float32 sums of ones may stop at 2^24.
    numbers = [
        tf.add_n([tf.reduce_sum(tf.cast(mask, tf.int64)) for mask in column])
        for column in zip(*masks, strict=True)
    ]
    entries = tf.cast(tf.stack(numbers), tf.float32)
    return entries / tf.maximum(entries[0], 1.0)


_rates = Shared(_count)
