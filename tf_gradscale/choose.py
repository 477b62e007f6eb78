"""Choosing the scales of a group of sites: from gradients to the group's part of the registry."""

import functools
import math
from typing import NamedTuple

import tensorflow as tf

from tf_gradscale.estimate import (
    CUMULATIVE_LIMIT,
    Placement,
    exp2,
    log2_all,
    max_abs,
    maximum,
    size,
    sum_squares,
)
from tf_gradscale.shared import SharedIf

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

    @staticmethod
    @functools.cache
    def of(config):
        """The chooser of a configuration, with its traces, for all models."""
        return Chooser(config)

    def _gemm(self, dy, x, kernel, log2_n, alpha, stored, frozen, dy_axis, x_axis, kind, apart):
        """β_W and β of a product: lines 4 and 5 of Algorithm 1. Sites: first, input.

        `dy_axis` and `x_axis`: the channels of ∇Y and X, or `None` to take the norm of the whole.
        `kind`: of the first site. `"variable"` is β_W. `"cast"` is the cast that a normalisation
        ends with, which leaves room for the kernel's gradient: ∇Y is near to normal and comes
        scaled, so that one set of statistics serves for both. `apart`: whether β is for ∇Y as it
        comes, or for β_W∇Y.
        """
        state = _State(stored, frozen, 2)
        squares = sum_squares(dy, dy_axis)
        total = tf.reduce_sum(squares)
        # The balanced placement takes the room of the distribution for max|∇Y|.
        measured = kind == "cast" or not self.placement.balanced
        largest = max_abs(dy) if measured else total
        logs = _Logs(dy, x, kernel, squares, total, x_axis, largest)
        beta_w = tf.constant(0.0)
        if self.placement.balanced:
            beta_w = self.placement.variable(logs.norm_dy, logs.norm_x, logs.m, logs.sigma_dy)
        if kind == "cast":
            lower, _ = self.placement.normal_bounds(logs.sigma_dy)
            upper = self.placement.log2_largest - logs.max_dy
            wanted = self.placement.place(lower, upper, state.retreat(0))
            beta_w = tf.minimum(wanted, beta_w) if self.placement.balanced else wanted
        first = self._settle([beta_w], [largest], largest, alpha, state, 0)
        shift, before = (0.0, alpha) if apart else (first.local[0], first.cumulative)
        beta = self._product(logs, log2_n, shift, state.retreat(1))
        rest = self._settle([beta], [largest * logs.total_w], largest, before, state, 1)
        return state.part([first, rest], largest)

    def _bilinear(self, dy, a, b, count, alpha, stored, frozen, weights):
        """β of both operands of a product: lines 4 and 5 of Algorithm 1. Sites: a, b.

        `count`: how many products there are in all. `weights`: for each operand, whether its
        gradient is kept within the bound of Cauchy-Schwarz.
        """
        state = _State(stored, frozen, 2)
        total, largest = sum_squares(dy), max_abs(dy)
        squares = [sum_squares(tf.cast(x, tf.float32) * 2.0**_KERNEL_SHIFT) for x in (a, b)]
        sizes = [size(x) for x in (dy, a, b)]
        logs = log2_all(total, largest, *squares, *sizes, max_abs(a), max_abs(b), count)
        total_dy, max_dy, *rest = logs
        norms, (size_dy, *sizes), maxima, log2_count = rest[:2], rest[2:5], rest[5:7], rest[7]
        norms = [0.5 * norm - _KERNEL_SHIFT for norm in norms]
        sigma_dy, wanted = 0.5 * (total_dy - size_dy), []
        for own, other in ((0, 1), (1, 0)):
            beta = self.placement.gemm(
                log2_count - sizes[own],
                sigma_dy,
                norms[other] - 0.5 * sizes[other],
                max_dy,
                maxima[other],
                state.retreat(own),
            )
            if weights[own] and self.placement.balanced:
                log2_m = log2_count - sizes[own]
                bound = self.placement.variable(0.5 * total_dy, norms[other], log2_m, sigma_dy)
                beta = tf.minimum(beta, bound)
            wanted.append(beta)
        magnitudes = [total * squares[1], total * squares[0]]
        return state.part([self._settle(wanted, magnitudes, total, alpha, state, 0)], total)

    def _product(self, logs, log2_n, shift, retreat):
        """log2 β of a product, whose ∇Y is 2^shift times the one that `logs` are of."""
        sigma_dy, max_dy = logs.sigma_dy + shift, logs.max_dy + shift
        return self.placement.gemm(log2_n, sigma_dy, logs.sigma_w, max_dy, logs.max_w, retreat)

    def _cast(self, dy, alpha, stored, frozen, model):
        """β of a cast: lines 9 to 11 of Algorithm 1."""
        state = _State(stored, frozen, 1)
        largest = max_abs(dy)
        beta = self.placement.cast(dy, largest, model, state.retreat(0))
        return state.part([self._settle([beta], [largest], largest, alpha, state, 0)], largest)

    def _measured(self, dxs, dys, dvs, alpha, stored, frozen):
        """β of an op that was tried out."""
        state = _State(stored, frozen, 1)
        square = maximum([sum_squares(g) / size(g) for g in dxs])
        largest = maximum([max_abs(g) for g in [*dxs, *dvs]])
        max_dy = maximum([max_abs(g) for g in dys])
        log2_square, log2_largest, log2_max = log2_all(square, largest, max_dy)
        beta = tf.where(
            square > 0,
            self.placement.measured(0.5 * log2_square, log2_largest, log2_max, state.retreat(0)),
            self.placement.unseen(log2_max, state.retreat(0)),
        )
        scales = self._settle([beta], [max_dy], max_dy, alpha, state, 0)
        return state.part([scales._replace(known=tf.cast([square > 0], tf.float32))], max_dy)

    def _uniform(self, dy, factor, alpha, stored, frozen):
        """β of an op that multiplies entries of ∇Y by a positive factor to make those of ∇X."""
        state = _State(stored, frozen, 1)
        square, max_dy = sum_squares(dy) / size(dy), max_abs(dy)
        log2_square, log2_max, log2_factor = log2_all(square, max_dy, factor)
        sigma, largest = 0.5 * log2_square + log2_factor, log2_max + log2_factor
        beta = self.placement.measured(sigma, largest, log2_max, state.retreat(0))
        return state.part([self._settle([beta], [square], max_dy, alpha, state, 0)], max_dy)

    def _join(self, gradients, alphas, stored, frozen, indices, places, summed):
        """The common α of several gradients: lines 15 to 18 of Algorithm 1.

        The factors are α/α_i for each of the `places` at which gradients could meet, of which
        those present are named by `indices`, and 1/α.
        """
        maxima = [max_abs(g) for g in gradients]
        largest, top = maximum(maxima), maximum(alphas)
        beta = self.placement.branch(alphas, maxima, summed)
        state = _State(stored, frozen, 1)
        scales = self._settle([beta], [largest], largest, top, state, 0)
        return state.part([scales], largest, _quotients(scales, alphas, indices, places))

    def _unmeasured_join(self, alphas, stored, frozen, indices, places):
        """The largest α_i, or the frozen multiple of it."""
        state = _State(stored, frozen, 1)
        scales = self._keep(1, maximum(alphas), state, 0)
        return state.part([scales], 1.0, _quotients(scales, alphas, indices, places))

    def _unmeasured(self, alpha, stored, frozen, sites):
        """β = 1, or the frozen one: for gradients in another dtype, or of no use."""
        state = _State(stored, frozen, sites)
        return state.part([self._keep(sites, alpha, state, 0)], 1.0)

    def _unmeasured_gemm(self, alpha, stored, frozen, apart):
        """The same for a product, whose second scale comes on top of the first or beside it."""
        state = _State(stored, frozen, 2)
        first = self._keep(1, alpha, state, 0)
        before = alpha if apart else first.cumulative
        return state.part([first, self._keep(1, before, state, 1)], 1.0)

    def _settle(self, wanted, magnitudes, given, alpha, state, first):
        """Scales from what was estimated.

        Args:
            wanted: List of log2 β.
            magnitudes: List of what is positive where there was anything to measure; else β = 1.
            given: A magnitude of ∇Y: where it is not finite, β stays as it was.
            alpha: log2 α before the sites.
            state: The `_State` of the group.
            first: Index of the first of the sites in the group.
        """
        known = tf.stack(magnitudes) > 0
        local = tf.where(known, tf.stack(wanted), 0.0)
        free = (given < math.inf) & ~state.frozen
        local = tf.where(free, local, state.local(first, len(wanted)))
        return self._bounded(local, tf.cast(known, tf.float32), alpha)

    def _keep(self, sites, alpha, state, first):
        local = tf.where(state.frozen, state.local(first, sites), 0.0)
        return self._bounded(local, tf.ones([sites]), alpha)

    def _bounded(self, local, known, alpha):
        limit = self.placement.log2_cumulative_bound
        cumulative = tf.clip_by_value(alpha + local, -CUMULATIVE_LIMIT, limit)
        return _Scales(cumulative - alpha, cumulative, known)


class _Scales(NamedTuple):
    """Vectors over some sites: log2 β, log2 α, and 1 where there was anything to measure."""

    local: tf.Tensor
    cumulative: tf.Tensor
    known: tf.Tensor


class _State:
    """What the registry holds for a group of some sites, taken apart and put together again."""

    def __init__(self, stored, frozen, sites):
        self._stored = stored
        self._retreats = stored[-sites:]
        self.frozen = frozen

    def local(self, first, sites):
        """log2 β of some of the group's sites."""
        return self._stored[first : first + sites]

    def retreat(self, site):
        """How much of its height one of them gives up (`Placement.place`)."""
        return self._retreats[site]

    def part(self, scales, given, exponents=None):
        """The group's part of the registry's vector, as `sites.Group` lays it out.

        Args:
            scales: List of `_Scales`.
            given: A magnitude of ∇Y, of which it is noted whether it is finite.
            exponents: log2 of the factors to multiply by, if these are not the scales.
        """
        local, cumulative, known = (tf.concat(rows, 0) for rows in zip(*scales, strict=True))
        factors = tf.stack(exponents) if exponents is not None else local
        finite = tf.cast(tf.stack([given]) < math.inf, tf.float32)
        powers = exp2(tf.concat([factors, -cumulative], 0))
        return tf.concat([local, cumulative, known, finite, powers, self._retreats], 0)


class _Logs:
    """Statistics of a product's operands, as log2: all logarithms are taken at once."""

    def __init__(self, dy, x, kernel, squares, total, x_axis, largest):
        self.total_w = sum_squares(kernel * 2.0**_KERNEL_SHIFT)
        norm_dy, norm_x, total_dy, size_dy, total_w, size_w, self.max_w, self.max_dy, c = log2_all(
            tf.reduce_max(squares),
            tf.reduce_max(sum_squares(x, x_axis)),
            total,
            tf.cast(tf.size(dy), tf.float32),
            self.total_w,
            tf.cast(tf.size(kernel), tf.float32),
            max_abs(kernel),
            largest,
            tf.cast(tf.size(squares), tf.float32),
        )
        # How many products are summed into an entry of ∇W: as many as ∇Y has in a channel.
        self.m = size_dy - c
        self.norm_dy, self.norm_x = 0.5 * norm_dy, 0.5 * norm_x
        self.sigma_dy = 0.5 * (total_dy - size_dy)
        self.sigma_w = 0.5 * (total_w - size_w) - _KERNEL_SHIFT


def _quotients(scales, alphas, indices, places):
    """log2 of α/α_i at each place where gradients could meet; 0 where none is present."""
    # A quotient leaves float32's range only where one gradient is negligible.
    common = scales.cumulative[0]
    quotients = [tf.clip_by_value(common - alpha, -126.0, 126.0) for alpha in alphas]
    present = dict(zip(indices, quotients, strict=True))
    return [present.get(i, 0.0) for i in range(places)]


def _if_updating(function):
    """Shares a method of the `Chooser`, with the condition whether scales are chosen in this pass.

    XLA replaces a condition by computing both of its branches if it thinks that these are cheap,
    unless one has nothing to compute, as has the one that returns what is stored.
    """
    shared = SharedIf(function)

    def choose(*args, **static):
        *own, updating, stored, frozen = args
        return shared(updating, *own, stored, frozen, **static)

    return choose
