"""One backward pass: what the rules see of it, and what it leaves in the registry."""

import numpy as np
import tensorflow as tf

from tf_gradscale import tensors
from tf_gradscale.estimate import exp2, log2, max_abs
from tf_gradscale.registry import variable_value
from tf_gradscale.rules.base import Scaled

# A site that was all zero is measured again in the next pass, at most so often in a row.
_PATIENCE = 64.0


class Walk:
    """A backward pass through a region.

    An *updating* pass measures gradients and chooses each site's scale from gradients that
    already carry the scales of the sites before it. Every other pass takes the scales, and the
    powers of two derived from them, from the registry. Which of the two it is, is a condition in
    the graph, one for each group of sites: statistics are not computed where they are not used.

    Args:
        registry: The `ScaleRegistry`.
        chooser: The `choose.Chooser`.
        needed: Function of a step or tensor: whether anything depends on gradients there.
        upstream: The gradients that come in, one an output, `None` for none.

    Attributes:
        shift: A power of two by which those are to be multiplied (see `_shift`).
        unshift: 1/shift.
    """

    def __init__(self, registry, chooser, needed, upstream):
        self.registry = registry
        self.chooser = chooser
        self.config = registry.config
        self.state = registry.read()
        self._needed = needed
        sizes = [group.size for group in registry.groups]
        self._frozen = self.state["frozen"] > 0
        self._peaks = tf.stack([tf.constant(0.0) if g is None else max_abs(g) for g in upstream])
        exponent = self._shift()
        self.shift, self.unshift = exp2(exponent), exp2(-exponent)
        stored = self.state["scales"]
        if sizes:
            stored = tf.where(registry.are_inverses(), stored * self.unshift, stored)
        self._parts = list(tf.split(stored, sizes)) if sizes else []
        # After k overflows a scale gives up 1 - 2^-k of its height (`Placement.place`).
        self._retreat = 1.0 - tf.pow(0.5, self.state["history"][0])
        self._measured = np.zeros(len(registry), bool)
        # (site, group): the group that measures the gradient made behind the site.
        self._followers = []
        self._gradients = {}
        self._inverses = {}

    def _shift(self):
        """log2 of what gradients are multiplied by as they come in, and divided by as they go out.

        Between updates scales are constants, but the gradients of single batches differ by more
        than any margin once a network fits most of its data. If the largest incoming gradient has
        left the margin around what it was when scales were chosen, it is brought back there. The
        backward pass is linear, so that this is exact, and good for all sites at once.
        """
        if not self.chooser.placement.balanced or self.config.unscale == "optimizer":
            return tf.constant(0.0)
        before = self.state["peaks"]
        grown = tf.reduce_max(tf.where(before > 0, log2(self._peaks) - log2(before), -1e4))
        usable = tf.reduce_all(self._peaks < np.inf) & tf.reduce_any(
            (before > 0) & (self._peaks > 0)
        )
        usable &= ~self.state["updating"] & ~self._frozen
        usable &= tf.abs(grown) > max(self.chooser.placement.margin_bits - 1.0, 0.0)
        # Within what 1/α, which it multiplies, leaves of float32's range.
        exponent = -tf.clip_by_value(tf.round(grown), -26.0, 26.0)
        return tf.stop_gradient(tf.where(usable, exponent, 0.0))

    def decide(self, group, upstream, owner, dtype, measure, keep, trial=False):
        """Chooses the scales of a group, in an updating pass, or reads them from the registry.

        Args:
            group: The `Group`.
            upstream: The `Scaled`s that arrive there, a list.
            owner: The step or tensor whose gradient is scaled.
            dtype: The dtype in which that gradient is kept.
            measure: Function of (updating, stored part, retreat, frozen) that chooses from
                measurements, if updating.
            keep: Function of (updating, stored part, frozen), where there is nothing to choose:
                gradients of another dtype are not scaled, those of no use are not measured.
            trial: Whether `measure` tries something out, which is to be done only if updating.

        Returns:
            The fields of the group's part of the registry, as scalars (see `Group`).
        """
        stored = self._parts[group.index]
        first, count = group.sites[0].index, len(group.sites)
        measures = tf.as_dtype(dtype).name == self.config.gradient_dtype and self._needed(owner)
        if measures:
            for site in group.sites:
                self._measured[site.index] = True
            for pair in upstream:
                self._followers += [(site, group) for site in pair.origin]

        updating, retreat = self.state["updating"], self._retreat[first : first + count]
        if not measures:
            part = keep(updating, stored, self._frozen)
        elif trial:
            part = tf.cond(
                updating,
                lambda: measure(tf.constant(True), stored, retreat, self._frozen),
                lambda: tf.identity(stored),
            )
        else:
            part = measure(updating, stored, retreat, self._frozen)
        part = tf.ensure_shape(tf.stop_gradient(part), [group.size])
        self._parts[group.index] = part
        return tf.unstack(part)

    def cast(self, group, pair, dtype, owner, model, kept=None):
        """f_T: scales a gradient, then casts it (lines 8 to 12 of Algorithm 1).

        `kept`: the dtype that it must fit into behind the next operation, if that is another.
        """
        alpha, dy = pair.log2_alpha, pair.gradient
        part = self.decide(
            group,
            [pair],
            owner,
            kept or dtype,
            lambda *state: self.chooser.cast(dy, alpha, *state, model=model),
            lambda *state: self.chooser.unmeasured(alpha, *state, sites=1),
        )
        _, alpha_x, _, _, beta, inverse = part
        return Scaled(alpha_x, tf.cast(dy * beta, dtype), inverse, tuple(group.sites))

    def join(self, group, indices, pairs, owner, summed):
        """Brings several gradients to one scale (lines 15 to 18 of Algorithm 1).

        Args:
            group: The branch's or split's `Group`, with a factor for each possible gradient.
            indices: Which of these each of `pairs` is.
            pairs: List of `Scaled`.
            owner: The tensor or step it belongs to.
            summed: Whether to add the gradients, in float32.

        Returns:
            A `Scaled` whose gradient is the sum, or the list of the gradients.
        """
        dtype = pairs[0].gradient.dtype
        gradients = [pair.gradient for pair in pairs]
        alphas = [pair.log2_alpha for pair in pairs]
        places = {"indices": tuple(indices), "places": group.size - 5}
        part = self.decide(
            group,
            pairs,
            owner,
            dtype,
            lambda *state: self.chooser.join(gradients, alphas, *state, **places, summed=summed),
            lambda *state: self.chooser.unmeasured_join(alphas, *state, **places),
        )
        factors = [part[4 + i] for i in indices]
        scaled = [tf.cast(g, tf.float32) * f for g, f in zip(gradients, factors, strict=True)]
        if summed:
            total = scaled[0]
            for other in scaled[1:]:
                total += other
            result = tf.cast(total, dtype)
        else:
            result = [tf.cast(s, g.dtype) for s, g in zip(scaled, gradients, strict=True)]
        return Scaled(part[1], result, part[-1], tuple(s for p in pairs for s in p.origin))

    def add(self, variable, gradient, inverse):
        """Takes a variable's scaled gradient and 1/α; divides in float32, adds to the others.

        Line 6 of Algorithm 1, less the update: ∇W / α. With `unscale="optimizer"` the division is
        left to it.
        """
        gradient = tensors.cast(gradient, tf.float32)
        if self.config.unscale == "layer":
            gradient = tensors.multiply(gradient, inverse)
        self._gradients.setdefault(id(variable), (variable, []))[1].append(gradient)
        self._inverses[id(variable)] = inverse

    def gradients(self):
        """The variables' gradients: a dictionary from `tf.Variable.ref()`."""
        return {
            variable_value(variable).ref(): tensors.add(parts)
            for variable, parts in self._gradients.values()
        }

    def finish(self):
        """Writes the registry. Returns what to depend on (nothing in eager mode)."""
        updating = self.state["updating"]
        vector = tf.concat(self._parts, 0) if self._parts else self.state["scales"]
        vector = tf.where(updating, vector, self.state["scales"])
        peaks = tf.where(updating & (self._peaks < np.inf), self._peaks, self.state["peaks"])
        history, pending = tf.cond(
            self.state["updating"],
            lambda: self._look_back(vector),
            lambda: (tf.identity(self.state["history"]), tf.constant(0, tf.int32)),
        )
        writes = self.registry.write(
            vector, history, pending, tf.stop_gradient(peaks), updating, self._inverses
        )
        return [] if tf.executing_eagerly() else [tf.group(*writes)]

    def _look_back(self, vector):
        """Back-off, and whether the next pass must measure again.

        A site backs off where ∇Y was finite and the gradient made of it is not.
        """
        backoff, zeros = tf.unstack(self.state["history"])
        groups = self.registry.groups
        known = tf.gather(vector, self.registry.positions("known")) > 0
        finite = tf.gather(vector, [group.finite for group in groups])
        owners = [self.registry.group_of(site).index for site in self.registry]
        given_finite = tf.gather(finite, owners) > 0
        follows = np.zeros((len(owners), len(groups)), "float32")
        for site, group in self._followers:
            follows[site.index, group.index] = 1.0
        made_finite = tf.linalg.matvec(follows, 1.0 - finite) == 0
        measured = tf.constant(self._measured) & ~self._frozen
        zeros = tf.where(measured & ~known, zeros + 1.0, 0.0)
        overflowed = measured & given_finite & ~made_finite
        if self.chooser.placement.balanced:
            recovered = tf.maximum(backoff - 0.125, 0.0)
            backoff = tf.where(overflowed, backoff + 1.0, recovered)
        again = measured & (overflowed | ~given_finite | (~known & (zeros < _PATIENCE)))
        return tf.stack([backoff, zeros]), tf.cast(tf.reduce_any(again), tf.int32)
