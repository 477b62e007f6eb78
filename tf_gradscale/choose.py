"""Choosing the scales of a group of sites: from gradients to the group's part of the registry."""

import functools
import math
from typing import NamedTuple

import tensorflow as tf

from tf_gradscale.estimate import CUMULATIVE_LIMIT, Placement, exp2, log2_all, maximum, size
from tf_gradscale.reductions import largest_magnitude, totals
from tf_gradscale.shared import Part, SharedIf
from tf_gradscale.xla import entries

# Kernels are multiplied by 2^30 before they are squared: squares of 1e-25 are zero in float32.
_KERNEL_SHIFT = 30


class Chooser:
    """Chooses scales under one `GradScaleConfig`.

    Its public methods take at their end `updating`, whether to choose at all; `stored`, the group's
    part of the registry's vector, laid out as `sites.Group` says; and `frozen`, whether to keep the
    local scales that are stored. They return the group's part. Those that they run, when scales are
    chosen, do not get `updating`.
    """

    def __init__(self, config):
        self.placement = Placement(config)
        self.gemm = _if_updating(self._gemm)
        self.bilinear = _if_updating(self._bilinear)
        self.cast = _if_updating(self._cast)
        self.measured = _if_updating(self._measured)
        self.uniform = _if_updating(self._uniform)
        self.join = _if_updating(self._join)
        self.unmeasured_join = _if_updating(self._unmeasured_join)
        self.unmeasured = _if_updating(self._unmeasured)
        self.unmeasured_gemm = _if_updating(self._unmeasured_gemm)
        self._measured_operand = SharedIf(self._square, other=-1)
        # What follows from statistics is the same for layers of all shapes.
        self._chosen_gemm = Part(self._choose_gemm)
        self._chosen_bilinear = Part(self._choose_bilinear)
        self._chosen_measured = Part(self._choose_measured)
        self._chosen_uniform = Part(self._choose_uniform)
        self._chosen_join = Part(self._choose_join)

    @staticmethod
    @functools.cache
    def of(config):
        """The chooser of a configuration, with its traces, for all models."""
        return Chooser(config)

    def operand(self, x, updating, one, axis):
        """Measures an activation, if scales are chosen.

        Args:
            x: X.
            updating: Whether scales are chosen.
            one: A scalar 1, of which XLA does not know that it is 1.
            axis: The channels of X, or `None`.

        Returns:
            The largest Σx² of a channel, and a 1 that waits for it.
        """
        both = self._measured_operand(updating, x, tf.stack([one, one]), axis=axis)
        both.set_shape([2])
        return tf.unstack(both)

    @staticmethod
    def _square(x, other, axis):
        return tf.stack([totals(x, axis, largest=False).channel, 1.0])

    def _gemm(self, dy, x, kernel, counts, alpha, stored, frozen, dy_axis, x_axis, kind, apart):
        """β_W and β of a product: lines 4 and 5 of Algorithm 1. Sites: first, input.

        `x`: X, or what `operand` has measured of it. `counts`: log2 of √N, and of the roots of how
        many channels ∇Y and how many entries W has.
        `dy_axis` and `x_axis`: the channels of ∇Y and X, or `None` to take the norm of the whole.
        `kind`: of the first site. `"variable"` is β_W. `"cast"` is the cast that a normalisation
        ends with, which leaves room for the kernel's gradient: ∇Y is near to normal and comes
        scaled, so that one set of statistics serves for both. `apart`: whether β is for ∇Y as it
        comes, or for β_W∇Y.
        """
        # The balanced placement takes the room of the distribution for max|∇Y|.
        of_dy = totals(dy, dy_axis, largest=kind == "cast" or not self.placement.balanced)
        square_x = x if x.shape.rank == 0 else totals(x, x_axis, largest=False).channel
        of_w = totals(kernel, shift=_KERNEL_SHIFT, small=True)
        roots = of_dy.channel, square_x, of_dy.squares, size(dy), of_w.squares
        statistics = tf.stack([*roots, of_w.largest, of_dy.largest])
        return self._chosen_gemm(statistics, counts, alpha, stored, frozen, kind=kind, apart=apart)

    def _choose_gemm(self, statistics, counts, alpha, stored, frozen, kind, apart):
        logs = log2_all(statistics, roots=5, others=2)
        norm_dy, norm_x, sigma_dy, root_m, sigma_w, max_w, max_dy = logs
        squares_w, largest = entries(statistics, (4, 6), 7)
        root_n, channels, size_w = tf.unstack(counts, 3)
        sigma_dy -= root_m
        sigma_w -= size_w + _KERNEL_SHIFT
        max_w -= _KERNEL_SHIFT
        # How many products are summed into an entry of ∇W: as many as ∇Y has in a channel.
        root_m -= channels

        state = _State(stored, frozen, largest, 2)
        beta_w = tf.constant(0.0)
        if self.placement.balanced:
            beta_w = self.placement.variable(norm_dy, norm_x, root_m, sigma_dy)
        if kind == "cast":
            lower, _ = self.placement.normal_bounds(sigma_dy)
            upper = self.placement.log2_largest - max_dy
            wanted = self.placement.place(lower, upper, state.retreats[0])
            beta_w = tf.minimum(wanted, beta_w) if self.placement.balanced else wanted
        first = self._settle(beta_w, largest, alpha, state, 0)
        if not apart:
            alpha = first.cumulative
            sigma_dy += first.local
            max_dy += first.local
        beta = self.placement.gemm(root_n, sigma_dy, sigma_w, max_dy, max_w, state.retreats[1])
        rest = self._settle(beta, largest * squares_w, alpha, state, 1)
        return state.part([first, rest])

    def _bilinear(self, dy, a, b, count, alpha, stored, frozen, weights):
        """β of both operands of a product: lines 4 and 5 of Algorithm 1. Sites: a, b.

        `count`: how many products there are in all. `weights`: for each operand, whether its
        gradient is kept within the bound of Cauchy-Schwarz.
        """
        of_all = totals(dy), *(totals(x, shift=_KERNEL_SHIFT) for x in (a, b))
        squares, maxima = [of.squares for of in of_all], [of.largest for of in of_all]
        sizes = [size(x) for x in (dy, a, b)]
        statistics = tf.stack([*squares, *sizes, count, *maxima])
        return self._chosen_bilinear(statistics, alpha, stored, frozen, weights=weights)

    def _choose_bilinear(self, statistics, alpha, stored, frozen, weights):
        given, *squares = entries(statistics, range(3), 10)
        logs = log2_all(statistics, roots=7, others=3)
        (norm_dy, *norms), (size_dy, *sizes), root_count = logs[:3], logs[3:6], logs[6]
        max_dy, *maxima = logs[7:]
        sigma_dy = norm_dy - size_dy
        state, settled = _State(stored, frozen, given, 2), []
        for own, other in ((0, 1), (1, 0)):
            root_n = root_count - sizes[own]
            norm, largest = norms[other] - _KERNEL_SHIFT, maxima[other] - _KERNEL_SHIFT
            sigma, retreat = norm - sizes[other], state.retreats[own]
            beta = self.placement.gemm(root_n, sigma_dy, sigma, max_dy, largest, retreat)
            if weights[own] and self.placement.balanced:
                bound = self.placement.variable(norm_dy, norm, root_n, sigma_dy)
                beta = tf.minimum(beta, bound)
            settled.append(self._settle(beta, given * squares[other], alpha, state, own))
        return state.part(settled)

    def _cast(self, dy, alpha, stored, frozen, model):
        """β of a cast: lines 9 to 11 of Algorithm 1."""
        largest = largest_magnitude(dy)
        state = _State(stored, frozen, largest, 1)
        beta = self.placement.cast(dy, largest, model, state.retreats[0])
        return state.part([self._settle(beta, largest, alpha, state, 0)])

    def _measured(self, dxs, dys, dvs, alpha, stored, frozen):
        """β of an op that was tried out."""
        of_dxs = [totals(g) for g in dxs]
        square = maximum([of.squares / size(g) for of, g in zip(of_dxs, dxs, strict=True)])
        largest = maximum([of.largest for of in of_dxs] + [largest_magnitude(g) for g in dvs])
        max_dy = maximum([largest_magnitude(g) for g in dys])
        return self._chosen_measured(tf.stack([square, largest, max_dy]), alpha, stored, frozen)

    def _choose_measured(self, statistics, alpha, stored, frozen):
        square, max_dy = entries(statistics, (0, 2), 3)
        sigma, log2_largest, log2_max = log2_all(statistics, roots=1, others=2)
        state = _State(stored, frozen, max_dy, 1)
        beta = tf.where(
            square > 0,
            self.placement.measured(sigma, log2_largest, log2_max, state.retreats[0]),
            self.placement.unseen(log2_max, state.retreats[0]),
        )
        scale = self._settle(beta, max_dy, alpha, state, 0)
        return state.part([scale._replace(magnitude=square)])

    def _uniform(self, dy, factor, alpha, stored, frozen):
        """β of an op that multiplies entries of ∇Y by a positive factor to make those of ∇X."""
        of_dy = totals(dy)
        statistics = tf.stack([of_dy.squares, size(dy), of_dy.largest, factor])
        return self._chosen_uniform(statistics, alpha, stored, frozen)

    def _choose_uniform(self, statistics, alpha, stored, frozen):
        square, largest = entries(statistics, (0, 2), 4)
        norm, root_size, max_dy, log2_factor = log2_all(statistics, roots=2, others=2)
        sigma, max_dx = norm - root_size + log2_factor, max_dy + log2_factor
        state = _State(stored, frozen, largest, 1)
        beta = self.placement.measured(sigma, max_dx, max_dy, state.retreats[0])
        return state.part([self._settle(beta, square, alpha, state, 0)])

    def _join(self, gradients, alphas, stored, frozen, indices, places, summed):
        """The common α of several gradients: lines 15 to 18 of Algorithm 1.

        The factors are α/α_i for each of the `places` at which gradients could meet, of which
        those present are named by `indices`, and 1/α.
        """
        maxima = [largest_magnitude(g) for g in gradients]
        static = {"indices": indices, "places": places, "summed": summed}
        return self._chosen_join(maxima, alphas, stored, frozen, **static)

    def _choose_join(self, maxima, alphas, stored, frozen, indices, places, summed):
        largest = maximum(maxima)
        state = _State(stored, frozen, largest, 1, places)
        beta = self.placement.branch(alphas, maxima, summed)
        scale = self._settle(beta, largest, maximum(alphas), state, 0)
        return state.part([scale], _quotients(scale, alphas, indices, places))

    def _unmeasured_join(self, alphas, stored, frozen, indices, places):
        """The largest α_i, or the frozen multiple of it."""
        state = _State(stored, frozen, 1.0, 1, places)
        scale = self._keep(maximum(alphas), state, 0)
        return state.part([scale], _quotients(scale, alphas, indices, places))

    def _unmeasured(self, alpha, stored, frozen, sites):
        """β = 1, or the frozen one: for gradients in another dtype, or of no use."""
        state = _State(stored, frozen, 1.0, sites)
        return state.part([self._keep(alpha, state, i) for i in range(sites)])

    def _unmeasured_gemm(self, alpha, stored, frozen, apart):
        """The same for a product, whose second scale comes on top of the first or beside it."""
        state = _State(stored, frozen, 1.0, 2)
        first = self._keep(alpha, state, 0)
        return state.part([first, self._keep(alpha if apart else first.cumulative, state, 1)])

    def _settle(self, wanted, magnitude, alpha, state, site):
        """A site's scale, from what was estimated.

        Args:
            wanted: log2 β.
            magnitude: Positive where there was anything to measure; else β = 1.
            alpha: log2 α before the site.
            state: The `_State` of the group.
            site: Index of the site in the group.
        """
        local = tf.where(magnitude > 0, wanted, 0.0)
        local = tf.where(state.free, local, state.locals[site])
        return self._bounded(local, magnitude, alpha)

    def _keep(self, alpha, state, site):
        local = tf.where(state.frozen, state.locals[site], 0.0)
        return self._bounded(local, tf.constant(1.0), alpha)

    def _bounded(self, local, magnitude, alpha):
        limit = self.placement.log2_cumulative_bound
        cumulative = tf.maximum(tf.minimum(alpha + local, limit), -CUMULATIVE_LIMIT)
        return _Scale(cumulative - alpha, cumulative, magnitude)


class _Scale(NamedTuple):
    """Scalars of a site: log2 β, log2 α, and a number that is 0 if there was nothing to measure."""

    local: tf.Tensor
    cumulative: tf.Tensor
    magnitude: tf.Tensor


class _State:
    """What the registry holds for a group of some sites, taken apart and put together again.

    Args:
        stored: The group's part of the registry's vector, as `sites.Group` lays it out.
        frozen: Whether the stored scales are kept.
        given: A magnitude of ∇Y: where it is not finite, the stored scales are kept as well.
        sites: How many sites the group has.
        places: At how many places gradients could meet, if there is a factor for each.
    """

    def __init__(self, stored, frozen, given, sites, places=None):
        factors = 2 * sites if places is None else places + 1
        fields = entries(stored, range(2 * sites), 4 * sites + 1 + factors)
        self.retreats, self.locals = fields[:sites], fields[sites:]
        self.frozen = frozen
        self.free = (given < math.inf) & ~frozen
        self._given = given

    def part(self, scales, exponents=None):
        """The group's new part of the vector.

        Args:
            scales: The `_Scale` of each site.
            exponents: log2 of the factors to multiply by, if these are not the scales.
        """
        local, cumulative, magnitudes = zip(*scales, strict=True)
        numbers = [*self.retreats, *local, *cumulative, *magnitudes, self._given]
        exponents = [*(exponents or local), *(-log2_alpha for log2_alpha in cumulative)]
        return tf.concat([tf.stack(numbers), exp2(tf.stack(exponents))], 0)


def _quotients(scale, alphas, indices, places):
    """log2 of α/α_i at each place where gradients could meet; 0 where none is present."""
    # A quotient leaves float32's range only where one gradient is negligible.
    quotients = [tf.clip_by_value(scale.cumulative - alpha, -126.0, 126.0) for alpha in alphas]
    present = dict(zip(indices, quotients, strict=True))
    return [present.get(i, 0.0) for i in range(places)]


def _if_updating(function):
    """Shares a method of the `Chooser`, with the condition whether scales are chosen in this pass.

    XLA replaces a condition by computing both of its branches if it thinks that these are cheap,
    unless one has nothing to compute, as has the one that returns what is stored.
    """
    shared = SharedIf(function, other=-2)

    def choose(*args, **static):
        *own, updating, stored, frozen = args
        return shared(updating, *own, stored, frozen, **static)

    return choose
