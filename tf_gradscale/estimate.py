"""In-graph estimates of scales: float32 statistics in, integral log2 of a scale out.

The same equations as `theory`, as TensorFlow ops. Everything is kept in log2, where products of
scales are sums; powers of two are made and taken apart by their exponent bits, which is exact
where `exp2` and `floor(log2(x))` are not.
"""

import functools
import math

import tensorflow as tf
from scipy import special

from tf_gradscale import formats
from tf_gradscale.reductions import totals
from tf_gradscale.xla import ceil, floor, is_finite, magnitude

# The cumulative scale stays within 2^±100, so that 1/α is a normal float32 number.
CUMULATIVE_LIMIT = 100.0
# How many σ of a normal distribution must stay below λ_max: instead of the worst case of a sum
# of N products, N·max·max, which is never near.
ROOM = 64.0
_TINY = 2.0**-126


def exp2(log2_scale):
    """2^e for integral e, exact. e is float32 within [-126, 127]."""
    exponent = tf.cast(log2_scale, tf.int32) + 127
    return tf.bitcast(tf.bitwise.left_shift(exponent, 23), tf.float32)


def exponent_bits(x):
    """The biased exponents of float32 x, as int32: ⌊log2 |x|⌋ + 127, and 0 for 0."""
    bits = tf.bitcast(x, tf.int32)
    return tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, 23), 0xFF)


def log2(x):
    """log2 x to float32 rounding; x = 0 gives a large negative number, not -inf."""
    return tf.math.log(tf.maximum(x, _TINY)) * (1 / math.log(2.0))


def maximum(values):
    """The largest of several scalars, which XLA works out in the operation that needs it."""
    return functools.reduce(tf.maximum, values)


def minimum(values):
    """The smallest of several scalars, likewise."""
    return functools.reduce(tf.minimum, values)


def log2_all(values, roots, others):
    """`log2` of the square roots of the first entries of a vector, and of the others: a list."""
    factors = [0.5 / math.log(2.0)] * roots + [1 / math.log(2.0)] * others
    return tf.unstack(tf.math.log(tf.maximum(values, _TINY)) * factors, roots + others)


def size(x):
    """The number of entries as float32, at least 1."""
    return tf.maximum(tf.cast(tf.size(x), tf.float32), 1.0)


class Placement:
    """Where in the format's range gradients are put: a `GradScaleConfig` as numbers."""

    def __init__(self, config):
        fmt = formats.get(config.gradient_dtype)
        self.log2_smallest = math.log2(fmt.smallest(config.smallest))
        self.log2_normal = math.log2(fmt.smallest("normal"))
        self.log2_largest = math.log2(fmt.largest)
        self.rate = config.underflow_threshold
        self.balanced = config.placement == "balanced"
        self.margin_bits = float(config.margin_bits)
        self.cast_model = config.cast_model
        self.log2_scale_bound = None
        if config.scale_bound is not None:
            self.log2_scale_bound = float(math.floor(math.log2(config.scale_bound)))
        self.log2_cumulative_bound = CUMULATIVE_LIMIT
        if config.cumulative_bound is not None:
            bound = float(math.floor(math.log2(config.cumulative_bound)))
            self.log2_cumulative_bound = min(bound, CUMULATIVE_LIMIT)
        # erf⁻¹ in Python's float64: tf.math.erfinv in float32 returns 0 at 1e-8.
        self.log2_quantile = math.log2(math.sqrt(2.0) * float(special.erfinv(self.rate)))

    def place(self, lower, upper, retreat):
        """log2 β between the smallest sufficient scale and the largest possible (both log2).

        Threshold: β = 2^min(⌈log2 lower⌉, ⌊log2 upper⌋), the paper's choice (Section 4.2).
        Balanced: log2 β = min(½ (log2 lower + log2 upper), log2 upper − m), rounded down; after
        overflows a share of its height above `lower` is given up (8 binades at the least).

        Args:
            lower: log2 of the smallest scale whose underflow rate is at most γ'.
            upper: log2 of the scale that takes the largest value to λ_max.
            retreat: That share, 1 − 2^-k after k overflows.

        Returns:
            Integral log2 β.
        """
        if self.balanced:
            target = tf.minimum(0.5 * (lower + upper), upper - self.margin_bits)
            target = floor(target - tf.maximum(target - lower, 8.0) * retreat)
        else:
            target = tf.minimum(ceil(lower), floor(upper))
        if self.log2_scale_bound is None:
            return target
        return tf.minimum(target, self.log2_scale_bound)

    def normal_bounds(self, log2_sigma):
        """Theorem 1 solved for the scale, and the room of the distribution, both log2.

        lower = λ_min / (√2 σ erf⁻¹(γ')); upper = λ_max / (64 σ).
        """
        lower = (self.log2_smallest - self.log2_quantile) - log2_sigma
        return lower, (self.log2_largest - math.log2(ROOM)) - log2_sigma

    def place_normal(self, log2_sigma, retreat):
        """`place` between `normal_bounds`, whose ratio does not depend on σ (balanced only)."""
        lower, upper = self.normal_bounds(0.0)
        target = min(0.5 * (lower + upper), upper - self.margin_bits)
        height = max(target - lower, 8.0)
        placed = floor(target - log2_sigma - height * retreat)
        if self.log2_scale_bound is None:
            return placed
        return tf.minimum(placed, self.log2_scale_bound)

    def gemm(self, root_n, sigma_dy, sigma_w, max_dy, max_w, retreat):
        """β of ∇X = f_G(β∇Y, W) by Theorem 1: lines 4 and 5 of Algorithm 1.

        All arguments but the last are log2 of: √N, with N the number of products summed into one
        entry of ∇X; the root mean squares of ∇Y and W; max|∇Y| (not used by the balanced placement,
        which takes the room of the distribution for it) and max|W|.

        Returns:
            log2 β.
        """
        log2_sigma = root_n + sigma_dy + sigma_w
        if self.balanced:
            target = self.place_normal(log2_sigma, retreat)
        else:
            lower, _ = self.normal_bounds(log2_sigma)
            target = self.place(lower, self.log2_largest - 2.0 * root_n - max_dy - max_w, retreat)
        # β multiplies the kernel: β·W must neither overflow nor sink into the subnormals.
        most = floor(self.log2_largest - 1.0 - max_w)
        least = ceil(self.log2_normal + self.margin_bits - sigma_w)
        return tf.minimum(tf.maximum(target, least), most)

    def variable(self, norm_dy, norm_x, root_m, sigma_dy):
        """β_W of ∇W = f_G(X, β_W∇Y): balanced between Theorem 1 and what cannot overflow.

        By Cauchy-Schwarz no entry of ∇W exceeds ‖x_i‖·‖∇y_j‖, the norms of an input and of an
        output channel; as a sum of M independent products it is about √M times smaller. Between
        updates a batch may be larger than the one that was measured. Not in the paper.

        Arguments: log2 of the largest norm of each, of √M, and of the root mean square of ∇Y.

        Returns:
            log2 β_W.
        """
        lower, _ = self.normal_bounds(norm_dy + norm_x - root_m)
        # At least 1 for ‖x_i‖: then β_W·max|∇Y| stays below λ_max as well.
        upper = self.log2_largest - norm_dy - tf.maximum(norm_x, 0.0)
        # β_W multiplies ∇Y, which must not sink into the subnormals.
        least = self.log2_normal + 10.0 - sigma_dy
        target = tf.maximum(0.5 * (lower + upper), least)
        return self._factor(floor(tf.minimum(target, upper - self.margin_bits)))

    def cast(self, dy, largest, model, retreat):
        """β of ∇X = f_T(β∇Y) by Theorem 2: lines 9 to 11 of Algorithm 1.

        Args:
            dy: ∇Y in float32.
            largest: max|∇Y|.
            model: `"lognormal"`, `"normal"` or `"histogram"`.
            retreat: As in `place`.

        Returns:
            log2 β.
        """
        if model == "normal":
            lower, _ = self.normal_bounds(_log2_rms(dy, largest))
        elif model == "histogram":
            lower = self.log2_smallest - self._log2_quantile_of(magnitude(dy))
        else:
            lower = self._lognormal_lower(magnitude(dy))
        return self.place(lower, self.log2_largest - log2(largest), retreat)

    def _lognormal_lower(self, magnitude):
        """log2 of exp(ln λ_min − µ − s √2 erf⁻¹(2γ' − 1)) with µ, s measured on ln|∇y| (Eq. 4)."""
        nonzero = magnitude > 0
        count = tf.maximum(tf.reduce_sum(tf.cast(nonzero, tf.float32)), 1.0)
        logs = log2(magnitude)
        mu = tf.reduce_sum(tf.where(nonzero, logs, 0.0)) / count
        # A power: XLA takes long to read a square root (`tf_gradscale.xla`).
        s = tf.pow(tf.reduce_sum(tf.where(nonzero, tf.square(logs - mu), 0.0)) / count, 0.5)
        quantile = math.sqrt(2.0) * float(special.erfinv(2.0 * self.rate - 1.0))
        return self.log2_smallest - mu - s * quantile

    def _log2_quantile_of(self, magnitude):
        """log2 of the γ'-quantile of the non-zero entries, by exponent counts: a power of two."""
        exponents = tf.reshape(exponent_bits(magnitude), [-1])
        # Zeros have exponent 0 and are dropped; float32's denormals are flushed to zero anyway.
        # tf.math.bincount works its size out, of which XLA must know that it is a constant.
        counts = tf.raw_ops.DenseBincount(
            input=exponents, size=256, weights=tf.zeros([0], tf.float32)
        )
        below = tf.cumsum(counts[1:])
        reached = tf.cast(below <= self.rate * below[-1], tf.float32)
        return tf.reduce_sum(reached) + 1.0 - 127.0

    def measured(self, sigma_dx, largest, max_dy, retreat):
        """β of an op that shrinks or grows gradients, from a trial of its own ∇X at β = 1.

        Arguments: log2 of the root mean square of the trial's ∇X, of the largest magnitude in all
        that it made, and of max|∇Y|; `retreat` as in `place`.

        Returns:
            log2 β.
        """
        # A trial that overflowed says only that less is wanted; back-off then finds how much less.
        finite = is_finite(largest)
        room = floor(self.log2_largest - self.margin_bits - largest)
        room = tf.where(finite, room, -8.0 - 16.0 * retreat)
        target = tf.where(finite, self.place_normal(sigma_dx, retreat), room)
        # β multiplies ∇Y, which must not overflow, nor sink into the subnormals if there is room.
        most = tf.minimum(floor(self.log2_largest - 1.0 - max_dy), room)
        least = ceil(self.log2_normal + 10.0 - max_dy)
        return self._factor(tf.minimum(tf.maximum(target, least), most))

    def unseen(self, max_dy, retreat):
        """β of an op whose trial left nothing: most often because it is less than the format holds.

        Then the more ∇Y is multiplied by, the more is left. Arguments and result: as `measured`.
        """
        room = self.log2_largest - self.margin_bits - 1.0 - max_dy
        return self._factor(floor(tf.minimum(room, room * (1.0 - retreat))))

    def _factor(self, target):
        """A scale by which gradients are multiplied in their own format must be a number of it."""
        return tf.clip_by_value(target, self.log2_smallest, float(math.floor(self.log2_largest)))

    def branch(self, alphas, maxima, summed):
        """The scale at which several gradients meet: line 17 of Algorithm 1.

        Threshold: the largest of the α_j with α·max|∇X_i|/α_i < λ_max for all i. Balanced: the
        largest power of two, at most max α_i, at which the sum (or, if not `summed`, each part)
        stays m bits below λ_max.

        Args:
            alphas: List of log2 α_i.
            maxima: List of max|∇X_i|.
            summed: Whether the gradients are added, or only brought to one scale.

        Returns:
            log2 of the common α over the largest α_i.
        """
        top = maximum(alphas)
        # True magnitudes, times the smallest scale of those that are not zero: in float32, what
        # vanishes there is nothing beside the largest.
        pairs = list(zip(maxima, alphas, strict=True))
        lowest = minimum([tf.where(m > 0, a, 1e4) for m, a in pairs])
        true = [m * exp2(tf.clip_by_value(lowest - a, -126.0, 0.0)) for m, a in pairs]
        added = self.balanced and summed
        peak = log2(tf.add_n(true) if added else maximum(true)) - lowest
        if self.balanced:
            return tf.minimum(top, floor(self.log2_largest - self.margin_bits - peak)) - top
        least = minimum(alphas)
        return maximum([tf.where(peak + a < self.log2_largest, a, least) for a in alphas]) - top


def _log2_rms(x, largest):
    """log2 of the root mean square, given max|x|: squares of 1e-30 would be zero in float32."""
    exponent = tf.clip_by_value(floor(log2(largest)), -CUMULATIVE_LIMIT, CUMULATIVE_LIMIT)
    return exponent + 0.5 * log2(totals(x * exp2(-exponent)).squares / size(x))
