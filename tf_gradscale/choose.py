"""Choosing the scales of a group of sites: from gradients to the group's part of the registry.

The functions are traced once for each combination of ranks, and shared by all layers. Their
results are constants to whoever differentiates twice: scales are undone, whatever they are.
"""

import functools

import tensorflow as tf

from tf_gradscale.estimate import (
    CUMULATIVE_LIMIT,
    Placement,
    exp2,
    log2_all,
    max_abs,
    size,
    sum_squares,
)

# Kernels are multiplied by 2^30 before they are squared: squares of 1e-25 are zero in float32.
_KERNEL_SHIFT = 30


class Chooser:
    """Chooses scales under one `GradScaleConfig`.

    All methods take `stored`, the group's part of the registry's vector, `retreat`, a vector with
    an entry for each of its sites (`Placement.place`), and `frozen`, whether to keep the local
    scales that are stored. They return the group's new part, laid out as `registry.Group` says.
    """

    def __init__(self, config):
        self.placement = Placement(config)
        self.gemm = _SharedTrace(self._gemm)
        self.cast_gemm = _SharedTrace(self._cast_gemm)
        self.cast = _SharedTrace(self._cast)
        self.measured = _SharedTrace(self._measured)
        self.join = _SharedTrace(self._join)
        self.unmeasured = _SharedTrace(self._unmeasured)
        self.unmeasured_gemm = _SharedTrace(self._unmeasured_gemm)

    @staticmethod
    @functools.lru_cache(maxsize=None)
    def of(config):
        """The chooser of a configuration, with its traces, for all models."""
        return Chooser(config)

    def _gemm(self, dy, x, kernel, log2_n, alpha, stored, retreat, frozen, dy_axis, x_axis):
        """β_W and β of a product: lines 4 and 5 of Algorithm 1. Sites: kernel, input.

        `dy_axis` and `x_axis`: the channels of ∇Y and X, or `None` to take the norm of the whole.
        """
        squares = sum_squares(dy, dy_axis)
        total = tf.reduce_sum(squares)
        total_w = sum_squares(kernel * 2.0**_KERNEL_SHIFT)
        norm_dy, norm_x, total_dy, size_dy, log2_total_w, size_w, max_w, max_dy = log2_all(
            tf.reduce_max(squares),
            tf.reduce_max(sum_squares(x, x_axis)),
            total,
            size(dy),
            total_w,
            size(kernel),
            max_abs(kernel),
            total if self.placement.balanced else max_abs(dy),
        )
        sigma_dy = 0.5 * (total_dy - size_dy)
        sigma_w = 0.5 * (log2_total_w - size_w) - _KERNEL_SHIFT
        beta = self.placement.gemm(log2_n, sigma_dy, sigma_w, max_dy, max_w, retreat[1])
        beta_w = tf.constant(0.0)
        if self.placement.balanced:
            beta_w = self.placement.variable(0.5 * norm_dy, 0.5 * norm_x)
        known = [total, total * total_w]
        return self._assemble([beta_w, beta], known, total, alpha, stored, frozen)

    def _cast_gemm(self, dy, *args, model, **axes):
        """A cast and the product behind it. Sites: cast, kernel, input."""
        x, kernel, log2_n, alpha, stored, retreat, frozen = args
        first = self._cast(dy, alpha, stored[:1], retreat[:1], frozen, model)
        # In float32, as if it were cast: 2^β of it is the fifth of the part's six fields.
        dz = dy * first[4]
        rest = stored[1:3], retreat[1:], frozen
        return _behind(first, self._gemm(dz, x, kernel, log2_n, first[1], *rest, **axes))

    def _cast(self, dy, alpha, stored, retreat, frozen, model):
        """β of a cast: lines 9 to 11 of Algorithm 1."""
        largest = max_abs(dy)
        beta = self.placement.cast(dy, largest, model, retreat[0])
        return self._assemble([beta], [largest], largest, alpha, stored, frozen)

    def _measured(self, dxs, dys, dvs, alpha, stored, retreat, frozen):
        """β of an op that was tried out."""
        square = tf.reduce_max(tf.stack([sum_squares(g) / size(g) for g in dxs]))
        largest = tf.reduce_max(tf.stack([max_abs(g) for g in [*dxs, *dvs]]))
        max_dy = tf.reduce_max(tf.stack([max_abs(g) for g in dys]))
        logs = log2_all(square, largest, max_dy)
        beta = self.placement.measured(0.5 * logs[0], *logs[1:], retreat[0])
        return self._assemble([beta], [square], max_dy, alpha, stored, frozen)

    def _join(self, gradients, alphas, stored, retreat, frozen, indices, places, summed, measures):
        """The common α of several gradients: lines 15 to 18 of Algorithm 1.

        The factors are α/α_i for each of the `places` at which gradients could meet, of which
        those present are named by `indices`, and 1/α.
        """
        del retreat  # what is added was measured in this very pass
        alphas = tf.stack(alphas)
        top = tf.reduce_max(alphas)
        if measures:
            maxima = tf.stack([max_abs(g) for g in gradients])
            largest = tf.reduce_max(maxima)
            beta = self.placement.branch(alphas, maxima, summed)
            part = self._assemble([beta], [largest], largest, top, stored, frozen)
        else:
            part = self._unmeasured(top, stored, frozen, 1)
        # A quotient leaves float32's range only where one gradient is negligible.
        quotients = tf.unstack(exp2(tf.clip_by_value(part[1] - alphas, -126.0, 126.0)))
        present = dict(zip(indices, quotients, strict=True))
        factors = [present.get(i, 1.0) for i in range(places)]
        return tf.concat([part[:4], tf.stack(factors), part[5:]], 0)

    def _unmeasured(self, alpha, stored, frozen, sites):
        """β = 1, or the frozen one: for gradients in another dtype, or of no use."""
        kept = tf.where(frozen, stored[:sites], 0.0)
        return self._finish(kept, tf.ones([sites]), tf.ones([1]), alpha)

    def _unmeasured_gemm(self, alpha, stored, frozen, casts):
        if not casts:
            return self._unmeasured(alpha, stored, frozen, 2)
        first = self._unmeasured(alpha, stored[:1], frozen, 1)
        return _behind(first, self._unmeasured(first[1], stored[1:3], frozen, 2))

    def _assemble(self, wanted, magnitudes, given, alpha, stored, frozen):
        """The part from what was estimated.

        Args:
            wanted: List of log2 β.
            magnitudes: List of what is 0 where there was nothing to measure: then β = 1.
            given: A magnitude of ∇Y: where it is not finite, β stays as it was.
        """
        known = tf.stack(magnitudes) != 0
        finite = tf.math.is_finite(given)
        local = tf.where(known, tf.stack(wanted), 0.0)
        local = tf.where(finite & ~frozen, local, stored[: len(wanted)])
        flag = tf.reshape(tf.cast(finite, tf.float32), [1])
        return self._finish(local, tf.cast(known, tf.float32), flag, alpha)

    def _finish(self, local, known, finite, alpha):
        limit = self.placement.log2_cumulative_bound
        cumulative = tf.clip_by_value(alpha + local, -CUMULATIVE_LIMIT, limit)
        local = cumulative - alpha
        factors = exp2(tf.concat([local, -cumulative], 0))
        return tf.concat([local, cumulative, known, finite, factors], 0)


def _behind(first, second):
    """The part of a group of three sites from that of the first, and that of the other two."""
    both = tf.concat([first, second], 0)
    # Each part is local, cumulative, known; finite; scale, inverse: 6 and 11 fields.
    order = [0, 6, 7, 1, 8, 9, 2, 10, 11, 3, 4, 13, 14, 5, 15, 16]
    return tf.gather(both, order)


class _SharedTrace:
    """A `tf.function` for each combination of ranks, dtypes and Python arguments.

    Not inlined, so that it is optimized once, not once a layer.
    """

    def __init__(self, function):
        self._function = function
        self._traces = {}

    def __call__(self, *args, **static):
        tensors = tf.nest.flatten(args, expand_composites=True)
        specs = [tf.TensorSpec([None] * t.shape.rank, t.dtype) for t in tensors]
        lengths = tuple(len(a) if isinstance(a, list) else None for a in args)
        key = (lengths, tuple(specs), tuple(sorted(static.items())))
        if key not in self._traces:
            self._traces[key] = tf.function(
                lambda *flat: self._function(*tf.nest.pack_sequence_as(args, flat), **static),
                input_signature=specs,
                autograph=False,
                experimental_attributes={"_noinline": True},
            )
        return self._traces[key](*tensors)
