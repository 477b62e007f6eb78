"""Choosing the scales of a group of sites: from gradients to the group's part of the registry.

Each function is a `tf.function`, so that layers with equal shapes share one trace. Their results
are constants to whoever differentiates twice: scales are undone exactly, whatever they are.
"""

import functools

import tensorflow as tf

from tf_gradscale.estimate import (
    CUMULATIVE_LIMIT,
    Estimate,
    Placement,
    channel_squares,
    exp2,
    max_abs,
)

_ONE = Estimate(0.0, True)


class Chooser:
    """Chooses scales under one `GradScaleConfig`.

    All methods take `stored`, the group's part of the registry's vector, `backoff`, a vector with
    an entry for each of its sites, and `frozen`, whether to keep the local scales that are stored.
    They return the group's new part: for each site log2 β, log2 α and whether there was anything
    to measure; whether ∇Y was finite; then the factors, for each site 2^β and 1/α.
    """

    def __init__(self, config):
        self.placement = Placement(config)
        traced = functools.partial(tf.function, autograph=False, reduce_retracing=True)
        self.gemm = traced(self._gemm)
        self.cast = traced(self._cast)
        self.measured = traced(self._measured)
        self.join = traced(self._join)
        self.unmeasured = traced(self._unmeasured)

    @staticmethod
    @functools.lru_cache(maxsize=None)
    def of(config):
        """The chooser of a configuration, with its traces, for all models."""
        return Chooser(config)

    def _gemm(self, dy, x, kernel, alpha, log2_n, stored, backoff, frozen, dy_axis, x_axis):
        """β_W and β of a product: lines 4 and 5 of Algorithm 1. Sites: kernel, input."""
        squares = channel_squares(dy, dy_axis)
        mean = tf.math.divide_no_nan(tf.reduce_sum(squares), tf.cast(tf.size(dy), tf.float32))
        beta_w = _ONE
        if self.placement.balanced:
            beta_w = self.placement.variable(tf.reduce_max(squares), x, x_axis)
        beta = self.placement.gemm(dy, mean, kernel, log2_n, backoff[1])
        finite = tf.math.is_finite(mean)
        return self._assemble([beta_w, beta], [alpha, alpha], finite, stored, frozen)

    def _cast(self, dy, alpha, stored, backoff, frozen, model):
        """β of a cast: lines 9 to 11 of Algorithm 1."""
        beta = self.placement.cast(dy, model, backoff[0])
        finite = tf.math.is_finite(max_abs(dy))
        return self._assemble([beta], [alpha], finite, stored, frozen)

    def _measured(self, dxs, dys, dvs, alpha, stored, backoff, frozen):
        """β of an op that was tried out."""
        beta = self.placement.measured(dxs, dys, dvs, backoff[0])
        finite = tf.math.is_finite(tf.reduce_max(tf.stack([max_abs(g) for g in dys])))
        return self._assemble([beta], [alpha], finite, stored, frozen)

    def _join(self, gradients, alphas, stored, backoff, frozen, indices, summed, measures):
        """The common α of several gradients: lines 15 to 18 of Algorithm 1.

        The factors are α/α_i for each gradient that could meet there, of which those present are
        named by `indices`, and 1/α.
        """
        del backoff  # what is added was measured in this very pass
        alphas = tf.stack(alphas)
        top, beta, finite = tf.reduce_max(alphas), _ONE, True
        if measures:
            beta = self.placement.branch(alphas, gradients, summed)
            finite = tf.math.is_finite(tf.reduce_max(tf.stack([max_abs(g) for g in gradients])))
            part = self._assemble([beta], [top], finite, stored, frozen)
        else:
            part = self._unmeasured(top, stored, frozen, 1)
        # A quotient leaves float32's range only where one gradient is negligible.
        quotients = tf.unstack(exp2(tf.clip_by_value(part[1] - alphas, -126.0, 126.0)))
        present = dict(zip(indices, quotients, strict=True))
        factors = [present.get(i, 1.0) for i in range(stored.shape[0] - 5)]
        return tf.concat([part[:4], tf.stack(factors), part[5:]], 0)

    def _unmeasured(self, alpha, stored, frozen, sites):
        """β = 1, or the frozen one: for gradients in another dtype, or of no use."""
        kept = tf.where(frozen, stored, 0.0)
        return self._assemble([_ONE] * sites, [alpha] * sites, True, kept, True)

    def _assemble(self, estimates, alphas, finite, stored, frozen):
        limit = self.placement.log2_cumulative_bound
        n = len(estimates)
        wanted = tf.stack([e.log2_scale for e in estimates])
        known = tf.stack([e.known for e in estimates])
        alphas = tf.stack(alphas)
        last = stored[0 : 3 * n : 3]
        # All zero: β = 1. Not finite: the last scale.
        local = tf.where(known, wanted, 0.0)
        local = tf.where(tf.logical_and(finite, tf.logical_not(frozen)), local, last)
        cumulative = tf.clip_by_value(alphas + local, -CUMULATIVE_LIMIT, limit)
        local = cumulative - alphas
        rows = tf.stack([local, cumulative, tf.cast(known, tf.float32)], 1)
        factors = tf.stack([exp2(local), exp2(-cumulative)], 1)
        flag = tf.reshape(tf.cast(finite, tf.float32), [1])
        return tf.concat([tf.reshape(rows, [-1]), flag, tf.reshape(factors, [-1])], 0)
