"""In-graph estimates of scales: float32 statistics in, integral log2 of a scale out.

The same equations as `theory`, as TensorFlow ops. Everything is kept in log2, where products of
scales are sums; powers of two are made and taken apart by their exponent bits, which is exact
where `exp2` and `floor(log2(x))` are not.
"""

import math
from typing import NamedTuple

import tensorflow as tf
from scipy import special

from tf_gradscale import formats

# The cumulative scale stays within 2^±100, so that 1/α is a normal float32 number.
CUMULATIVE_LIMIT = 100.0
# How many σ of a normal distribution must stay below λ_max: instead of the worst case of a sum
# of N products, N·max·max, which is never near.
ROOM = 64.0
# Kernels are multiplied by 2^30 before they are squared: squares of 1e-25 are zero in float32.
_KERNEL_SHIFT = 30
_TINY = 2.0**-126


class Estimate(NamedTuple):
    """What a site's statistics say. Each field is a scalar tensor.

    `log2_scale`: integral float32, log2 of the wanted local scale β. `known`: bool, whether there
    was anything to measure (some entry is not zero).
    """

    log2_scale: tf.Tensor
    known: tf.Tensor


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


def max_abs(x):
    """max|x| as float32; 0 for an empty tensor."""
    return tf.maximum(tf.reduce_max(tf.abs(tf.cast(x, tf.float32))), 0.0)


def mean_square(x):
    """The mean of x², zeros included, in float32; 0 for an empty tensor."""
    return tf.math.divide_no_nan(
        tf.reduce_sum(tf.square(tf.cast(x, tf.float32))), tf.cast(tf.size(x), tf.float32)
    )


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
        self.log2_scale_bound = math.inf
        if config.scale_bound is not None:
            self.log2_scale_bound = float(math.floor(math.log2(config.scale_bound)))
        self.log2_cumulative_bound = CUMULATIVE_LIMIT
        if config.cumulative_bound is not None:
            bound = float(math.floor(math.log2(config.cumulative_bound)))
            self.log2_cumulative_bound = min(bound, CUMULATIVE_LIMIT)
        # erf⁻¹ in Python's float64: tf.math.erfinv in float32 returns 0 at 1e-8.
        self.log2_quantile = math.log2(math.sqrt(2.0) * float(special.erfinv(self.rate)))

    def place(self, lower, upper, backoff):
        """log2 β between the smallest sufficient scale and the largest possible (both log2).

        Threshold: β = 2^min(⌈log2 lower⌉, ⌊log2 upper⌋), the paper's choice (Section 4.2).
        Balanced: log2 β = min(½ (log2 lower + log2 upper), log2 upper − m), rounded down. After k
        overflows the height above `lower` is halved k times (at least 8 binades are taken as it).
        """
        if self.balanced:
            target = tf.minimum(0.5 * (lower + upper), upper - self.margin_bits)
            target = tf.floor(target - tf.maximum(target - lower, 8.0) * retreat(backoff))
        else:
            target = tf.minimum(tf.math.ceil(lower), tf.floor(upper))
        return tf.minimum(target, self.log2_scale_bound)

    def normal_bounds(self, log2_sigma):
        """Theorem 1 solved for the scale, and the room of the distribution, both log2.

        lower = λ_min / (√2 σ erf⁻¹(γ')); upper = λ_max / (64 σ).
        """
        lower = (self.log2_smallest - self.log2_quantile) - log2_sigma
        return lower, (self.log2_largest - math.log2(ROOM)) - log2_sigma

    def gemm(self, dy, square_dy, kernel, log2_n, backoff):
        """β of ∇X = f_G(β∇Y, W) by Theorem 1: lines 4 and 5 of Algorithm 1.

        Args:
            dy: ∇Y at the product's own output.
            square_dy: The mean of its squares.
            kernel: W in float32.
            log2_n: log2 of N, the number of products summed into one entry of ∇X.
            backoff: k, the site's back-off.

        Returns:
            An `Estimate`.
        """
        max_w = max_abs(kernel)
        shifted = mean_square(kernel * 2.0**_KERNEL_SHIFT)
        sigma_w = 0.5 * log2(shifted) - _KERNEL_SHIFT
        lower, upper = self.normal_bounds(0.5 * (log2_n + log2(square_dy)) + sigma_w)
        if not self.balanced:
            upper = self.log2_largest - log2_n - log2(max_abs(dy)) - log2(max_w)
        # β multiplies the kernel: β·W must neither overflow nor sink into the subnormals.
        most = tf.floor(self.log2_largest - 1.0 - log2(max_w))
        least = tf.math.ceil(self.log2_normal + self.margin_bits - sigma_w)
        target = tf.minimum(tf.maximum(self.place(lower, upper, backoff), least), most)
        return Estimate(target, (square_dy > 0) & (shifted > 0))

    def variable(self, norm_dy, x, x_axis):
        """β_W of ∇W = f_G(X, β_W∇Y): the largest power of two that cannot overflow, less a margin.

        By Cauchy-Schwarz no entry of ∇W exceeds ‖x_i‖·‖∇y_j‖, the norms of an input and of an
        output channel. Not in the paper.

        Args:
            norm_dy: The largest squared norm of an output channel of ∇Y.
            x: X, float.
            x_axis: The input channel's axis of X, or `None` to use the norm of the whole.

        Returns:
            An `Estimate`.
        """
        # At least 1 for ‖x_i‖: then β_W·max|∇Y| stays below λ_max as well.
        norm_x = tf.maximum(tf.reduce_max(channel_squares(x, x_axis)), 1.0)
        bound = 0.5 * (log2(norm_dy) + log2(norm_x))
        target = tf.floor(self.log2_largest - self.margin_bits - bound)
        return Estimate(target, norm_dy > 0)

    def cast(self, dy, model, backoff):
        """β of ∇X = f_T(β∇Y) by Theorem 2: lines 9 to 11 of Algorithm 1.

        Args:
            dy: ∇Y in float32.
            model: `"lognormal"`, `"normal"` or `"histogram"`.
            backoff: k, the site's back-off.

        Returns:
            An `Estimate`.
        """
        magnitude = tf.abs(dy)
        largest = max_abs(dy)
        upper = self.log2_largest - log2(largest)
        if model == "normal":
            lower, _ = self.normal_bounds(_log2_rms(dy, largest))
        elif model == "histogram":
            lower = self.log2_smallest - self._log2_quantile_of(magnitude)
        else:
            lower = self._lognormal_lower(magnitude)
        return Estimate(self.place(lower, upper, backoff), largest > 0)

    def _lognormal_lower(self, magnitude):
        """log2 of exp(ln λ_min − µ − s √2 erf⁻¹(2γ' − 1)) with µ, s measured on ln|∇y| (Eq. 4)."""
        nonzero = magnitude > 0
        count = tf.maximum(tf.reduce_sum(tf.cast(nonzero, tf.float32)), 1.0)
        logs = log2(magnitude)
        mu = tf.reduce_sum(tf.where(nonzero, logs, 0.0)) / count
        s = tf.sqrt(tf.reduce_sum(tf.where(nonzero, tf.square(logs - mu), 0.0)) / count)
        quantile = math.sqrt(2.0) * float(special.erfinv(2.0 * self.rate - 1.0))
        return self.log2_smallest - mu - s * quantile

    def _log2_quantile_of(self, magnitude):
        """log2 of the γ'-quantile of the non-zero entries, to a power of two, by exponent counts."""
        exponents = tf.reshape(exponent_bits(magnitude), [-1])
        # Zeros have exponent 0 and are dropped; float32's denormals are flushed to zero anyway.
        counts = tf.math.bincount(exponents, minlength=256, maxlength=256, dtype=tf.float32)[1:]
        below = tf.cumsum(counts)
        reached = tf.cast(below <= self.rate * below[-1], tf.float32)
        return tf.reduce_sum(reached) + 1.0 - 127.0

    def measured(self, dxs, dys, dvs, backoff):
        """β of an op that shrinks or grows gradients, from a trial of its own ∇X at β = 1.

        Args:
            dxs: The trial's input gradients, a list.
            dys: The op's output gradients, a list.
            dvs: The trial's variable gradients, a list.
            backoff: k, the site's back-off.

        Returns:
            An `Estimate`.
        """
        square = tf.reduce_max(tf.stack([mean_square(g) for g in dxs]))
        largest = tf.reduce_max(tf.stack([max_abs(g) for g in [*dxs, *dvs]]))
        top = tf.floor(self.log2_largest - self.margin_bits - log2(largest))
        target = tf.minimum(self.place(*self.normal_bounds(0.5 * log2(square)), backoff), top)
        # β multiplies ∇Y, which must neither overflow nor sink into the subnormals.
        max_dy = log2(tf.reduce_max(tf.stack([max_abs(g) for g in dys])))
        most = tf.floor(self.log2_largest - 1.0 - max_dy)
        least = tf.math.ceil(self.log2_normal + 10.0 - max_dy)
        # A trial that overflowed says only that less is wanted; back-off then finds how much less.
        target = tf.where(tf.math.is_finite(largest), target, -8.0 * (1.0 + backoff))
        return Estimate(tf.minimum(tf.maximum(target, least), most), square > 0)

    def branch(self, alphas, gradients, summed):
        """The scale at which several gradients meet: line 17 of Algorithm 1.

        Threshold: the largest of the α_j with α·max|∇X_i|/α_i < λ_max for all i. Balanced: the
        largest power of two, at most max α_i, at which the sum (or, if not `summed`, each part)
        stays m bits below λ_max.

        Args:
            alphas: Vector of log2 α_i.
            gradients: List of ∇X_i.
            summed: Whether the gradients are added, or only brought to one scale.

        Returns:
            An `Estimate` of the common α over the largest α_i.
        """
        maxima = tf.stack([max_abs(g) for g in gradients])
        top = tf.reduce_max(alphas)
        # log2 of max|∇X_i| / α_i, the true magnitude.
        true = tf.where(maxima > 0, log2(maxima) - alphas, -1e4)
        peak = tf.reduce_max(true)
        if self.balanced:
            if summed:
                peak += log2(tf.reduce_sum(tf.exp((true - peak) * math.log(2.0))))
            chosen = tf.minimum(top, tf.floor(self.log2_largest - self.margin_bits - peak))
        else:
            fitting = tf.where(peak + alphas < self.log2_largest, alphas, tf.reduce_min(alphas))
            chosen = tf.reduce_max(fitting)
        return Estimate(chosen - top, tf.reduce_any(maxima > 0))


def retreat(backoff):
    """The share of a scale's height that is given up after k overflows: 1 − 2^-k."""
    return 1.0 - tf.pow(0.5, backoff)


def channel_squares(x, axis):
    """Sums of x² over all axes but `axis` (`None`: over all), in float32."""
    squares = tf.square(tf.cast(x, tf.float32))
    rank = x.shape.rank
    return tf.reduce_sum(squares, None if axis is None else [i for i in range(rank) if i != axis % rank])


def _log2_rms(x, largest):
    """log2 of the root mean square, given max|x|: squares of 1e-30 would be zero in float32."""
    exponent = tf.clip_by_value(tf.floor(log2(largest)), -CUMULATIVE_LIMIT, CUMULATIVE_LIMIT)
    return exponent + 0.5 * log2(mean_square(x * exp2(-exponent)))
