"""One backward pass: what the rules see of it, and what it leaves in the registry."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_gradscale import formats, tensors
from tf_gradscale.counters import rates
from tf_gradscale.passes import Passes, Sites
from tf_gradscale.reductions import largest_magnitude
from tf_gradscale.registry import variable_value
from tf_gradscale.rules.base import Scaled
from tf_gradscale.xla import hidden, materialized


class Chosen(NamedTuple):
    """What was chosen for a group of sites: lists of scalars.

    Attributes:
        log2_alphas: log2 α of each site.
        factors: β of each site, or what each gradient is multiplied by where several meet.
        inverses: 1/α of each site.
    """

    log2_alphas: list
    factors: list
    inverses: list

    def scaled(self, index, gradient, origin):
        """The `Scaled` of the gradient behind one of the sites; `origin`: see there."""
        return Scaled(self.log2_alphas[index], gradient, self.inverses[index], tuple(origin))


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
        updating: Whether scales are chosen, if that is known from the forward pass (`Ahead`).

    Attributes:
        shift: A power of two by which those are to be multiplied (`passes.Passes`).
        unshift: 1/shift.
    """

    def __init__(self, registry, chooser, needed, upstream, updating):
        self.registry = registry
        self.chooser = chooser
        self.config = registry.config
        self._passes = Passes.of(self.config)
        self._needed = needed
        self._state = registry.read()
        self._peaks = tf.stack(
            [tf.constant(0.0) if g is None else largest_magnitude(g) for g in upstream]
        )
        if updating is None:
            updating, _ = self._passes.due(self._state)
        if self.config.unscale == "optimizer":
            # What is added up before it is divided needs the same scales.
            updating &= tf.equal(self._state["unapplied"], 0)
        self._updating = updating
        begun = self._passes.begin(self._state, updating, self._peaks, registry.are_inverses())
        self._frozen, self.shift, self.unshift, self._one, stored = begun
        sizes = [group.size for group in registry.groups]
        self._parts = tf.split(stored, sizes) if sizes else []
        self._measured = np.zeros(len(registry), bool)
        # (site, group): the group that measures the gradient made behind the site.
        self._followers = []
        self._gradients = {}
        self._inverses = {}
        # By a site's index, what was counted there.
        self._rates = {}
        self._counters = [counters for counters in registry.counters if counters.active]

    def decide(self, group, upstream, owner, dtype, measure, keep, trial=False):
        """Chooses the scales of a group, in an updating pass, or reads them from the registry.

        Args:
            group: The `Group`.
            upstream: The `Scaled`s that arrive there, a list.
            owner: The step or tensor whose gradient is scaled.
            dtype: The dtype in which that gradient is kept.
            measure: Function of (updating, stored, frozen), as the `Chooser` takes them, that
                chooses from measurements, if updating.
            keep: The same, where there is nothing to choose: gradients of another dtype are not
                scaled, those of no use are not measured.
            trial: Whether `measure` tries something out, which is to be done only if updating.

        Returns:
            The `Chosen`.
        """
        stored = self._parts[group.index]
        measures = tf.as_dtype(dtype).name == self.config.gradient_dtype and self._needed(owner)
        if measures:
            for site in group.sites:
                self._measured[site.index] = True
            for pair in upstream:
                self._followers += [(site, group) for site in pair.origin]

        if not measures:
            part = keep(self._updating, stored, self._frozen)
        elif trial:
            part = tf.cond(
                self._updating,
                lambda: measure(tf.constant(True), stored, self._frozen),
                lambda: tf.identity(stored),
            )
            part = tf.stop_gradient(part)
        else:
            part = measure(self._updating, stored, self._frozen)
        part.set_shape([group.size])
        self._parts[group.index] = part
        n, fields = len(group.sites), tf.unstack(part)
        return Chosen(fields[2 * n : 3 * n], fields[4 * n + 1 : -n], fields[-n:])

    def cast(self, group, pair, dtype, owner, model, kept=None):
        """f_T: scales a gradient, then casts it (lines 8 to 12 of Algorithm 1).

        `kept`: the dtype that it must fit into behind the next operation, if that is another.
        """
        alpha, dy = pair.log2_alpha, tf.cast(pair.gradient, tf.float32)
        chosen = self.decide(
            group,
            [pair],
            owner,
            kept or dtype,
            lambda *state: self.chooser.cast(dy, alpha, *state, model=model),
            lambda *state: self.chooser.unmeasured(alpha, *state, sites=1),
        )
        scaled = dy * chosen.factors[0]
        self.count(group, lambda: [(scaled, tf.cast(scaled, kept or dtype))])
        return chosen.scaled(0, tf.cast(scaled, dtype), group.sites)

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
        places = {"indices": tuple(indices), "places": group.size - 6}
        chosen = self.decide(
            group,
            pairs,
            owner,
            dtype,
            lambda *state: self.chooser.join(gradients, alphas, *state, **places, summed=summed),
            lambda *state: self.chooser.unmeasured_join(alphas, *state, **places),
        )
        factors = [chosen.factors[i] for i in indices]
        scaled = [tf.cast(g, tf.float32) * f for g, f in zip(gradients, factors, strict=True)]
        if summed:
            total = scaled[0]
            for other in scaled[1:]:
                total += other
            result = materialized(tf.cast(total, dtype), self._one)
            scaled = total
        else:
            result = [tf.cast(s, g.dtype) for s, g in zip(scaled, gradients, strict=True)]
        self.count(group, lambda: [(scaled, result)])
        return chosen.scaled(0, result, [site for pair in pairs for site in pair.origin])

    def hidden(self, x):
        """A constant, of which XLA does not know that it is one (`xla.hidden`)."""
        return hidden(x, self._one)

    def count(self, group, made):
        """Counts what is lost at a group's sites, where that is asked for and scales are chosen.

        Args:
            group: The `Group`.
            made: Function that gives for each of its sites the gradient in float32 and as it is
                kept (`counters.rates`). Called only if needed.
        """
        sites = [site for site in group.sites if self._measured[site.index]]
        if any(counters.wants(site) for counters in self._counters for site in sites):
            smallest = formats.get(self.config.gradient_dtype).smallest(self.config.smallest)
            for site, (exact, kept) in zip(sites, made(), strict=True):
                self._rates[site.index] = rates(exact, kept, smallest)

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
        registry = self.registry
        parts = tf.concat(self._parts, 0) if registry.groups else self._state["scales"]
        groups = [registry.group_of(site) for site in registry]
        positions = {
            "magnitudes": registry.positions("magnitude"),
            "given": [group.given for group in groups],
            "retreats": registry.positions("retreat"),
            "followers": [site.index for site, _ in self._followers],
            "followed": [group.given for _, group in self._followers],
        }
        positions = {name: np.array(where, "int32") for name, where in positions.items()}
        sites = Sites(measured=self._measured, **positions)
        left = self._passes.end(self._state, self._updating, parts, self._peaks, sites)
        writes = registry.write(*left, self._inverses)
        writes += [counters.write(self._rates) for counters in self._counters]
        return [] if tf.executing_eagerly() else [tf.group(*writes)]
