"""What every backward pass begins and ends with: when scales are chosen, and when they retreat."""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_gradscale.estimate import Placement, exp2, log2
from tf_gradscale.shared import Shared
from tf_gradscale.xla import computed_once, magnitude

# Passes 0, 1, 2, 4, ... up to this one choose scales anew, whatever `update_every` is.
_LAST_EARLY_UPDATE = 64
# The early ones of these passes.
_EARLY = (0, *(2**i for i in range(_LAST_EARLY_UPDATE.bit_length())))
# A site that was all zero is measured again in the next pass, at most so often in a row.
_PATIENCE = 64.0


class Sites(NamedTuple):
    """What is to be known of sites at the end of a pass: NumPy arrays, or tensors.

    Attributes:
        measured: Whether each site was measured.
        magnitudes: Where that of each site's gradient stands in the registry's vector.
        given: Where that of the gradient that arrived there does.
        retreats: Where it stands how much of its height the site gives up.
        followers: Sites behind which other groups measure, by index, one for each such group.
        followed: Where the magnitude of what these measured stands.
    """

    measured: Any
    magnitudes: Any
    given: Any
    retreats: Any
    followers: Any
    followed: Any


class Passes:
    """The beginning and the end of the passes under one `GradScaleConfig`."""

    def __init__(self, config):
        self._every = config.update_every
        self._balanced = config.placement == "balanced"
        self._shifts = self._balanced and config.unscale == "layer"
        self._margin = max(Placement(config).margin_bits - 1.0, 0.0)
        self._shared_due = Shared(self._due)
        self._shared_begin = Shared(self._begin)
        self._shared_end = Shared(self._end)

    @staticmethod
    @functools.cache
    def of(config):
        """Those of a configuration, with their traces, for all models."""
        return Passes(config)

    def due(self, state):
        """Whether scales are chosen in the pass that is next.

        Args:
            state: The registry's, a dictionary of tensors.

        Returns:
            That, and a 1 of which XLA does not know that it is 1.
        """
        names = ("passes", "chosen", "pending", "frozen")
        return self._shared_due(*(state[name] for name in names))

    def _due(self, passes, chosen, pending, frozen):
        # Several passes of one step may have begun at once, with the same number.
        early = tf.constant([i for i in _EARLY if i <= self._every], passes.dtype)
        due = tf.reduce_any((chosen < early) & (early <= passes))
        due |= passes // self._every > chosen // self._every
        updating = (due & tf.equal(frozen, 0)) | (pending > 0)
        return updating, tf.cast(passes >= 0, tf.float32)

    def begin(self, state, updating, peaks, inverses):
        """Begins a backward pass.

        Args:
            state: The registry's.
            updating: Whether scales are chosen in this pass.
            peaks: The largest magnitude of each gradient that comes in.
            inverses: Which entries of the registry's vector are 1/α, a list of bools.

        Returns:
            Whether scales are frozen; a power of two by which the incoming gradients are to be
            multiplied, its inverse, and a 1 of which nobody knows that it is 1; the registry's
            vector, good for gradients that are.
        """
        names = ("scales", "frozen", "peaks")
        inverses = tf.constant(np.array(inverses, bool))
        return self._shared_begin(*(state[name] for name in names), updating, peaks, inverses)

    def _begin(self, scales, frozen, before, updating, peaks, inverses):
        frozen = frozen > 0
        exponent = tf.constant(0.0)
        if self._shifts:
            exponent = self._shift(before, peaks, updating | frozen)
        shift, unshift = exp2(exponent), exp2(-exponent)
        factors = tf.unstack(computed_once(tf.stack([shift, unshift, shift * unshift])), 3)
        stored = computed_once(tf.where(inverses, scales * factors[1], scales))
        return frozen, *factors, stored

    def _shift(self, before, peaks, off):
        """log2 of what gradients are multiplied by as they come in, and divided by as they go out.

        Between updates scales are constants, but the gradients of single batches differ by more
        than any margin once a network fits most of its data. If the largest incoming gradient has
        left the margin around what it was when scales were chosen, it is brought back there. The
        backward pass is linear, so that this is exact, and good for all sites at once.
        """
        grown = tf.reduce_max(tf.where(before > 0, log2(peaks) - log2(before), -1e4))
        usable = tf.reduce_all(peaks < math.inf) & tf.reduce_any((before > 0) & (peaks > 0))
        usable &= ~off & (magnitude(grown) > self._margin)
        # Within what 1/α, which it multiplies, leaves of float32's range.
        return tf.where(usable, -tf.clip_by_value(tf.round(grown), -26.0, 26.0), 0.0)

    def end(self, state, updating, vector, peaks, sites):
        """Ends a pass.

        Args:
            state: The registry's at its beginning.
            updating: Whether scales were chosen.
            vector: What the pass has made of the registry's vector.
            peaks: The largest magnitude of each gradient that came in.
            sites: The `Sites`.

        Returns:
            What the registry is to hold: vector, history, `pending`, peaks and `chosen`.
        """
        names = ("scales", "history", "passes", "chosen", "pending", "frozen", "peaks")
        before = [state[name] for name in names]
        return self._shared_end(*before, updating, vector, peaks, *map(tf.constant, sites))

    def _end(self, *given):
        scales, history, passes, chosen, pending, frozen, before, *made = given
        updating, vector, peaks, *sites = made
        return tf.cond(
            updating,
            lambda: (
                *self._look_back(vector, history, frozen > 0, Sites(*sites)),
                tf.where(peaks < math.inf, peaks, before),
                passes,
            ),
            # Something may be pending by now, if the pass began before.
            lambda: tuple(map(tf.identity, (scales, history, pending, before, chosen))),
        )

    def _look_back(self, vector, history, frozen, sites):
        """Back-off, in the vector and the history; and whether the next pass must measure again.

        A site backs off where ∇Y was finite and the gradient made of it is not.
        """
        backoff, zeros = tf.unstack(history, 2)
        known = tf.gather(vector, sites.magnitudes) > 0
        given_finite = tf.gather(vector, sites.given) < math.inf
        bad = tf.cast(~(tf.gather(vector, sites.followed) < math.inf), tf.int32)
        bad = tf.math.unsorted_segment_sum(bad, sites.followers, tf.size(sites.measured))
        made_finite = tf.equal(bad, 0)
        measured = sites.measured & ~frozen
        zeros = tf.where(measured & ~known, zeros + 1.0, 0.0)
        overflowed = measured & given_finite & ~made_finite
        if self._balanced:
            backoff = tf.where(overflowed, backoff + 1.0, tf.maximum(backoff - 0.125, 0.0))
        again = measured & (overflowed | ~given_finite | (~known & (zeros < _PATIENCE)))
        # After k overflows a scale gives up 1 - 2^-k of its height (`Placement.place`).
        retreat = 1.0 - tf.pow(0.5, backoff)
        vector = tf.tensor_scatter_nd_update(vector, sites.retreats[:, tf.newaxis], retreat)
        return vector, tf.stack([backoff, zeros]), tf.cast(tf.reduce_any(again), tf.int32)
