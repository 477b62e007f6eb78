"""One backward pass: chooses scales where it updates, reads them where it does not."""

import tensorflow as tf

from tf_gradscale import estimate, registry
from tf_gradscale.rules.base import Scaled, multiply


class Walk:
    """What the rules see of a backward pass.

    There are two kinds. An *updating* pass measures gradients, chooses each site's α from those
    that already carry the scales of the sites before it, and derives from the αs the powers of
    two to multiply by. A *steady* pass reads α and these factors from the registry.

    Args:
        state: The `registry.State` of the pass.
        placement: The `estimate.Placement`.
        config: The `GradScaleConfig`.
        updating: Python bool.
        needed: Function of a site: whether anything depends on the gradient there.
    """

    def __init__(self, state, placement, config, updating, needed):
        self.state = state
        self.placement = placement
        self.config = config
        self.updating = updating
        self._needed = needed
        self._pending = []
        self._gradients = {}

    def choose(self, site, log2_alpha, measure, dtype):
        """The cumulative scale behind a site: α·β.

        Args:
            site: The `Site`.
            log2_alpha: log2 of α before it.
            measure: Function without arguments that returns the site's `Estimate` of β.
            dtype: The dtype in which the gradient is kept behind the site.

        Returns:
            log2(α·β), a scalar.
        """
        if not self.updating:
            return self.state.stored("cumulative", site)
        local = self.state.stored("local", site)
        if self._measures(site, dtype):
            estimated = measure()
            # Back-off: the height above the smallest sufficient scale is halved k times.
            retreat = 1.0 - tf.pow(0.5, self.state.stored("backoff", site))
            target = tf.round(estimated.log2_scale - estimated.height * retreat)
            target = tf.where(estimated.known, target, 0.0)
            local = self._settle(site, local, target, estimated.known, estimated.finite)
        else:
            local = tf.where(self.state.frozen, local, 0.0)
        return self._record(site, log2_alpha, local)

    def join(self, site, factors, pairs, summed):
        """Brings several gradients to one scale (lines 15 to 18 of Algorithm 1).

        Args:
            site: The branch's or split's `Site`.
            factors: A factor's index for each of `pairs`.
            pairs: List of `Scaled`.
            summed: Whether to add the gradients, in float32.

        Returns:
            log2 of the common α, and the sum or the list of gradients.
        """
        dtype = pairs[0].gradient.dtype
        alphas = [pair.log2_alpha for pair in pairs]
        if not self.updating:
            alpha = self.state.stored("cumulative", site)
        else:
            top = tf.reduce_max(tf.stack(alphas))
            local = self.state.stored("local", site)
            if self._measures(site, dtype):
                chosen, known, finite = self.placement.branch(pairs, summed)
                local = self._settle(site, local, chosen - top, known, finite)
            else:
                local = tf.where(self.state.frozen, local, 0.0)
            alpha = self._record(site, top, local)
        # The quotient of two scales may leave float32's range where one gradient is negligible.
        by = [
            self.factor(f, lambda a=a: estimate.exp2(tf.clip_by_value(alpha - a, -126.0, 126.0)))
            for f, a in zip(factors, alphas, strict=True)
        ]
        scaled = [
            tf.cast(pair.gradient, tf.float32) * factor
            for pair, factor in zip(pairs, by, strict=True)
        ]
        if summed:
            total = scaled[0]
            for other in scaled[1:]:
                total += other
            return alpha, tf.cast(total, dtype)
        return alpha, [
            tf.cast(g, pair.gradient.dtype) for g, pair in zip(scaled, pairs, strict=True)
        ]

    def cast(self, site, factor, pair, dtype):
        """f_T: scales a gradient, then casts it (lines 8 to 12 of Algorithm 1)."""
        alpha, dy = pair
        alpha_x = self.choose(site, alpha, lambda: self.placement.cast(dy), dtype)
        beta = self.factor(factor, lambda: estimate.exp2(alpha_x - alpha))
        dx = tf.cast(dy * beta, dtype)
        self.check(
            site,
            lambda: tf.math.is_finite(estimate.max_abs(dx)),
            lambda: tf.math.is_finite(estimate.max_abs(dy)),
        )
        return Scaled(alpha_x, dx)

    def factor(self, index, derive):
        """A power of two: derived from this pass's scales, or as the last update derived it."""
        if not self.updating:
            return self.state.stored_factor(index)
        value = derive()
        self.state.write_factor(index, value)
        return value

    def multiply(self, gradient, factor):
        """A gradient times a power of two."""
        return multiply(gradient, factor)

    def add(self, variable, log2_alpha, gradient, factor):
        """Takes a variable's scaled gradient, divides it in float32, and adds it to the others.

        Line 6 of Algorithm 1, less the update: ∇W / α.
        """
        inverse = self.factor(factor, lambda: estimate.exp2(-log2_alpha))
        gradient = _cast(gradient, tf.float32)
        if self.config.unscale == "layer":
            gradient = multiply(gradient, inverse)
        self._gradients.setdefault(id(variable), (variable, []))[1].append(gradient)

    def check(self, site, made_finite, given_finite, input_only=False):
        """Notes whether the op behind a site overflowed, for back-off in the next pass.

        `input_only`: the op's result is of no use but for the gradient of the step's input.
        """
        if not (self.updating and self.placement.balanced and self._needed(site, input_only)):
            return
        overflow = ~made_finite() & given_finite()
        before = self.state.stored("backoff", site)
        after = tf.where(overflow, before + 1.0, tf.maximum(before - 0.125, 0.0))
        self.state.write("backoff", site, after)
        self._pending.append(overflow)

    def gradients(self):
        """The variables' gradients: a dictionary from `tf.Variable.ref()`."""
        from tf_gradscale.rules.base import variable_value

        return {
            variable_value(variable).ref(): _sum(parts)
            for variable, parts in self._gradients.values()
        }

    def result(self):
        """The registry's new vector, and whether the next pass must update (int32)."""
        if not self._pending:
            return self.state.result(), tf.constant(0, tf.int32)
        return self.state.result(), tf.cast(tf.reduce_any(tf.stack(self._pending)), tf.int32)

    def _measures(self, site, dtype):
        beyond_paper = site.kind in ("measured", "variable")
        return (
            dtype == self.config.gradient_dtype
            and self._needed(site)
            and (self.placement.balanced or not beyond_paper)
        )

    def _settle(self, site, stored, target, known, finite):
        """β from an estimate, unless it is frozen or the gradient was not finite (keep the last)."""
        zeros = tf.where(known, 0.0, self.state.stored("zeros", site) + 1.0)
        self.state.write("zeros", site, zeros)
        measured = ~self.state.frozen
        again = ~finite | (~known & registry.patient(zeros))
        self._pending.append(measured & again)
        return tf.where(measured & finite, target, stored)

    def _record(self, site, log2_alpha, local):
        limit = estimate.CUMULATIVE_LIMIT
        most = min(limit, self.placement.log2_cumulative_bound)
        alpha = tf.clip_by_value(log2_alpha + local, -limit, most)
        self.state.write("local", site, alpha - log2_alpha)
        self.state.write("cumulative", site, alpha)
        return alpha


def _cast(gradient, dtype):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.cast(gradient.values, dtype), gradient.indices, gradient.dense_shape
        )
    return tf.cast(gradient, dtype)


def _sum(parts):
    """The sum of a variable's gradients in float32; sparse ones are joined and stay sparse."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, tf.IndexedSlices) for part in parts):
        return tf.IndexedSlices(
            tf.concat([part.values for part in parts], 0),
            tf.concat([part.indices for part in parts], 0),
            parts[0].dense_shape,
        )
    total = tf.convert_to_tensor(parts[0])
    for part in parts[1:]:
        total += tf.convert_to_tensor(part)
    return total
