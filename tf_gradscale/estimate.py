"""In-graph estimates of scales: float32 statistics in, integral log2 of a scale out.

The same equations as `theory`, as TensorFlow ops. Everything is kept in log2, where products of
scales are sums; powers of two are made and taken apart by their exponent bits, which is exact
where `exp2` and `floor(log2(x))` are not.
"""

import dataclasses
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


class Estimate(NamedTuple):
    """What a site's statistics say. Each field is a scalar tensor.

    `log2_scale`: integral float32, log2 of the wanted local scale β.
    `height`: float32, binades between that and the smallest sufficient scale (for back-off).
    `known`: bool, whether there was anything to measure (some entry is not zero).
    `finite`: bool, whether all that was measured is finite.
    """

    log2_scale: tf.Tensor
    height: tf.Tensor
    known: tf.Tensor
    finite: tf.Tensor


def exp2(log2_scale):
    """2^e for integral e, exact. e is float32 within [-126, 127]."""
    exponent = tf.cast(log2_scale, tf.int32) + 127
    return tf.bitcast(tf.bitwise.left_shift(exponent, 23), tf.float32)


def floor_log2(x):
    """⌊log2 x⌋ of positive float32 x, exact, as float32."""
    return tf.cast(_exponent_bits(x) - 127, tf.float32)


def _exponent_bits(x):
    bits = tf.bitcast(x, tf.int32)
    return tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, 23), 0xFF)


def log2(x):
    """log2 x to float32 rounding; x = 0 gives a large negative number, not -inf."""
    return tf.math.log(tf.maximum(x, 2.0**-126)) * (1 / math.log(2.0))


def max_abs(x):
    """max|x| as float32; 0 for an empty tensor."""
    if isinstance(x, tf.IndexedSlices):
        x = x.values
    return tf.maximum(tf.reduce_max(tf.abs(tf.cast(x, tf.float32))), 0.0)


def log2_rms(x, largest):
    """log2 of the root mean square (zeros included), given `largest` = max|x|.

    Entries are divided by a power of two near max|x| first: squares of 1e-30 are zero in float32.
    """
    exponent = tf.clip_by_value(floor_log2(largest), -CUMULATIVE_LIMIT, CUMULATIVE_LIMIT)
    scaled = tf.cast(x, tf.float32) * exp2(-exponent)
    return exponent + 0.5 * log2(tf.reduce_mean(tf.square(scaled)))


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where in the format's range a gradient is put: the constants of a `GradScaleConfig`."""

    log2_smallest: float
    log2_normal: float
    log2_largest: float
    rate: float
    balanced: bool
    margin_bits: float
    cast_model: str
    log2_scale_bound: float | None
    log2_cumulative_bound: float

    @classmethod
    def of(cls, config):
        """The placement that `config` describes."""
        fmt = formats.get(config.gradient_dtype)

        def bound(value):
            return None if value is None else float(math.floor(math.log2(value)))

        cumulative = bound(config.cumulative_bound)
        return cls(
            log2_smallest=math.log2(fmt.smallest(config.smallest)),
            log2_normal=math.log2(fmt.smallest("normal")),
            log2_largest=math.log2(fmt.largest),
            rate=config.underflow_threshold,
            balanced=config.placement == "balanced",
            margin_bits=float(config.margin_bits),
            cast_model=config.cast_model,
            log2_scale_bound=bound(config.scale_bound),
            log2_cumulative_bound=CUMULATIVE_LIMIT if cumulative is None else cumulative,
        )

    def place(self, lower, upper):
        """log2 β between the smallest sufficient scale and the largest possible (both log2).

        Threshold: β = 2^min(⌈log2 lower⌉, ⌊log2 upper⌋), the paper's choice (Section 4.2).
        Balanced: log2 β = min(½ (log2 lower + log2 upper), log2 upper − m), rounded down.
        """
        if self.balanced:
            target = tf.floor(tf.minimum(0.5 * (lower + upper), upper - self.margin_bits))
        else:
            target = tf.minimum(tf.math.ceil(lower), tf.floor(upper))
        if self.log2_scale_bound is not None:
            target = tf.minimum(target, self.log2_scale_bound)
        return target

    def _estimate(self, lower, upper, *measured):
        target = self.place(lower, upper)
        known, finite = tf.constant(True), tf.constant(True)
        for value in measured:
            known, finite = known & (value > 0), finite & tf.math.is_finite(value)
        return Estimate(target, tf.maximum(target - lower, 8.0), known, finite)

    def normal_bounds(self, log2_sigma):
        """Theorem 1 solved for the scale, and the room of the distribution, both log2.

        lower = λ_min / (√2 σ erf⁻¹(γ')); upper = λ_max / (64 σ).
        """
        # erf⁻¹ in Python's float64: tf.math.erfinv in float32 returns 0 at 1e-8.
        quantile = math.sqrt(2.0) * float(special.erfinv(self.rate))
        lower = (self.log2_smallest - math.log2(quantile)) - log2_sigma
        return lower, (self.log2_largest - math.log2(ROOM)) - log2_sigma

    def gemm(self, dy, kernel, n):
        """β of ∇X = f_G(β∇Y, W) by Theorem 1: lines 4 and 5 of Algorithm 1.

        Args:
            dy: ∇Y at the product's own output, any float dtype.
            kernel: W in float32, or the other activation operand.
            n: N, the number of products summed into one entry of ∇X.

        Returns:
            An `Estimate`.
        """
        max_dy, max_w = max_abs(dy), max_abs(kernel)
        sigma_dy, sigma_w = log2_rms(dy, max_dy), log2_rms(kernel, max_w)
        lower, upper = self.normal_bounds(0.5 * math.log2(n) + sigma_dy + sigma_w)
        if not self.balanced:
            upper = self.log2_largest - math.log2(n) - log2(max_dy) - log2(max_w)
        estimate = self._estimate(lower, upper, max_dy, max_w)
        # β multiplies the kernel: β·W must neither overflow nor sink into the subnormals.
        most = tf.floor(self.log2_largest - 1.0 - log2(max_w))
        least = tf.minimum(most, tf.math.ceil(self.log2_normal + self.margin_bits - sigma_w))
        return estimate._replace(log2_scale=tf.clip_by_value(estimate.log2_scale, least, most))

    def cast(self, dy):
        """β of ∇X = f_T(β∇Y) by Theorem 2: lines 9 to 11 of Algorithm 1.

        Args:
            dy: ∇Y in float32.

        Returns:
            An `Estimate`.
        """
        magnitude = tf.abs(tf.cast(dy, tf.float32))
        largest = max_abs(dy)
        upper = self.log2_largest - log2(largest)
        if self.cast_model == "normal":
            lower, _ = self.normal_bounds(log2_rms(dy, largest))
        elif self.cast_model == "histogram":
            lower = self.log2_smallest - self._log2_quantile(magnitude)
        else:
            lower = self._lognormal_lower(magnitude)
        return self._estimate(lower, upper, largest)

    def _lognormal_lower(self, magnitude):
        """log2 of exp(ln λ_min − µ − s √2 erf⁻¹(2γ' − 1)) with µ, s measured on ln|∇y| (Eq. 4)."""
        nonzero = magnitude > 0
        count = tf.maximum(tf.reduce_sum(tf.cast(nonzero, tf.float32)), 1.0)
        logs = tf.where(nonzero, log2(magnitude), 0.0)
        mu = tf.reduce_sum(logs) / count
        s = tf.sqrt(tf.reduce_sum(tf.where(nonzero, tf.square(logs - mu), 0.0)) / count)
        quantile = math.sqrt(2.0) * float(special.erfinv(2.0 * self.rate - 1.0))
        return self.log2_smallest - mu - s * quantile

    def _log2_quantile(self, magnitude):
        """log2 of the γ'-quantile of the non-zero entries, to a power of two, by exponent counts."""
        exponents = _exponent_bits(magnitude)
        # Zeros have exponent 0 and are dropped; float32's denormals are flushed to zero anyway.
        counts = tf.math.bincount(tf.reshape(exponents, [-1]), minlength=256, maxlength=256)[1:]
        below = tf.cumsum(tf.cast(counts, tf.float32))
        reached = tf.cast(below < self.rate * tf.maximum(below[-1], 1.0), tf.float32)
        return tf.reduce_sum(reached) + 1.0 - 127.0

    def measured(self, dx, dy, variable_gradients):
        """β of an op that shrinks or grows gradients, from a trial of its own ∇X at β = 1.

        Args:
            dx: The trial's input gradients, a list.
            dy: The op's output gradients, a list.
            variable_gradients: The trial's variable gradients, a list.

        Returns:
            An `Estimate`; not `finite` if ∇Y is finite and the trial overflowed.
        """
        dx_max = tf.stack([max_abs(g) for g in dx])
        rms = tf.reduce_max(
            tf.stack([log2_rms(g, m) for g, m in zip(dx, tf.unstack(dx_max), strict=True)])
        )
        lower, upper = self.normal_bounds(rms)
        largest = tf.reduce_max(dx_max)
        top = self.log2_largest - self.margin_bits
        target = tf.minimum(self.place(lower, upper), tf.floor(top - log2(largest)))
        if variable_gradients:
            most = tf.reduce_max(tf.stack([max_abs(g) for g in variable_gradients]))
            target = tf.minimum(target, tf.floor(top - log2(most)))
        # β multiplies ∇Y, which must neither overflow nor sink into the subnormals.
        max_dy = tf.reduce_max(tf.stack([max_abs(g) for g in dy]))
        most = tf.floor(self.log2_largest - 1.0 - log2(max_dy))
        least = tf.minimum(most, tf.math.ceil(self.log2_normal + 10.0 - log2(max_dy)))
        target = tf.clip_by_value(target, least, most)
        height = tf.maximum(target - lower, 8.0)
        return Estimate(target, height, largest > 0, tf.math.is_finite(largest))

    def variable(self, dy, x, dy_axis, x_axis):
        """β_W of ∇W = f_G(X, β_W∇Y): the largest power of two that cannot overflow, less a margin.

        By Cauchy-Schwarz no entry of ∇W exceeds ‖x_i‖·‖∇y_j‖, the norms of an input and of an
        output channel. Not in the paper.

        Args:
            dy: ∇Y, float.
            x: X, float.
            dy_axis: The output channel's axis of ∇Y, or `None` to use the norm of the whole.
            x_axis: The input channel's axis of X, or `None` to use the norm of the whole.

        Returns:
            An `Estimate`.
        """
        max_dy, max_x = max_abs(dy), max_abs(x)
        norm_x = _log2_channel_norm(x, max_x, x_axis)
        # At least 1 for ‖x_i‖: then β_W·max|∇Y| stays below λ_max as well.
        bound = _log2_channel_norm(dy, max_dy, dy_axis) + tf.maximum(norm_x, 0.0)
        target = tf.floor(self.log2_largest - self.margin_bits - bound)
        known = (max_dy > 0) & (max_x > 0)
        finite = tf.math.is_finite(max_dy) & tf.math.is_finite(max_x)
        return Estimate(target, tf.constant(8.0), known, finite)

    def branch(self, pairs, summed):
        """The scale at which several gradients meet: line 17 of Algorithm 1.

        Threshold: the largest of the α_j with α·max|∇X_i|/α_i < λ_max for all i. Balanced: the
        largest power of two, at most max α_i, at which the sum (or, if not `summed`, each part)
        stays m bits below λ_max.

        Args:
            pairs: List of (log2 α_i, ∇X_i).
            summed: Whether the gradients are added, or only brought to one scale.

        Returns:
            log2 of the common cumulative scale α, whether it is known, and whether it is finite.
        """
        alphas = tf.stack([alpha for alpha, _ in pairs])
        maxima = tf.stack([max_abs(g) for _, g in pairs])
        top = tf.reduce_max(alphas)
        known, finite = tf.reduce_any(maxima > 0), tf.reduce_all(tf.math.is_finite(maxima))
        present = maxima > 0
        # log2 of max|∇X_i| / α_i, the true magnitude.
        true = tf.where(present, log2(maxima) - alphas, -1e30)
        if not self.balanced:
            fits = tf.reduce_max(true) + alphas < self.log2_largest
            chosen = tf.reduce_max(tf.where(fits, alphas, -1e30))
            return tf.where(tf.reduce_any(fits), chosen, tf.reduce_min(alphas)), known, finite
        peak = tf.reduce_max(true)
        total = peak
        if summed:
            total += log2(tf.reduce_sum(tf.exp((true - peak) * math.log(2.0))))
        room = tf.floor(self.log2_largest - self.margin_bits - total)
        return tf.where(known, tf.minimum(top, room), top), known, finite


def _log2_channel_norm(x, largest, axis):
    """log2 of the largest 2-norm of a slice along `axis` (`None`: of the whole tensor)."""
    exponent = tf.clip_by_value(floor_log2(largest), -CUMULATIVE_LIMIT, CUMULATIVE_LIMIT)
    squares = tf.square(tf.cast(x, tf.float32) * exp2(-exponent))
    axes = None if axis is None else [i for i in range(x.shape.rank) if i != axis % x.shape.rank]
    return exponent + 0.5 * log2(tf.reduce_max(tf.reduce_sum(squares, axes)))
