"""A user's own layer whose custom gradient is not linear in ∇Y: it gets the true gradient."""

import keras
import tensorflow as tf

from tf_gradscale.linearity import layers_of
from tf_gradscale.losses import LossesOf
from tf_gradscale.policy import in_float32
from tf_gradscale.rules.base import Rule, Scaled
from tf_gradscale.rules.carry import Carry
from tf_gradscale.tensors import multiply


class Unscaled(Carry):
    """Runs an operation in float32 and hands it ∇Y itself, at scale 1.

    What clips a gradient or compares it with a threshold means the true one, which float16 may
    not hold. A gradient that has overflowed in float16 on its way here could come out of a clip
    as a finite one: it makes the results NaN, so that the step is skipped.
    """

    def __init__(self, step, registry):
        Rule.__init__(self, step, registry)
        self._dtype = registry.config.gradient_dtype
        dtypes = {tensor.dtype for tensor in [*step.inputs, *step.outputs]}
        self._casts = self._dtype in {*dtypes, super().input_dtype()}
        owner = step.operation
        self._owner = owner.step.operation if isinstance(owner, LossesOf) else owner
        if self._casts:
            step.autocast_dtype = None

    def input_dtype(self):
        return "float32" if self._casts else super().input_dtype()

    def forward(self, inputs, call):
        def run(inputs):
            outputs = keras.tree.flatten(call(inputs))
            return list(map(_declared, outputs, self.step.outputs))

        with self._precision():
            return super().forward(inputs, run)

    def backward(self, record, upstream, walk):
        found = super().backward(record, upstream, walk)
        # As the gradients that come into the model.
        zero, origin = tf.constant(0.0), self._join(upstream, walk).origin
        return [
            None
            if pair is None
            else Scaled(zero, multiply(pair.gradient, walk.shift), walk.unshift, origin)
            for pair in found
        ]

    def _join(self, upstream, walk):
        """Each gradient is brought to scale 1, and need not be brought to another's."""
        present = [pair for pair in upstream if pair is not None]
        origin = tuple(site for pair in present for site in pair.origin)
        gradients = [pair.gradient for pair in present]
        gradients = [tf.cast(g, tf.float32) * p.inverse for g, p in zip(gradients, present, strict=True)]
        return Scaled(tf.constant(0.0), gradients, tf.constant(1.0), origin)

    def _scaled_vjp(self, tape, ys, xs, variables, pair, walk):
        dys = pair.gradient
        given = [tf.cast(dy, y.dtype) for dy, y in zip(dys, ys, strict=True)]
        # A layer may run its `call` once more.
        with self._precision():
            gradients = tape.gradient(ys, xs + variables, output_gradients=given)
        if self._casts:
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(dy)) for dy in dys])
            poison = tf.where(finite, 1.0, float("nan"))
            gradients = [g if g is None else multiply(g, poison) for g in gradients]
        return pair, gradients[: len(xs)], gradients[len(xs) :]

    def _precision(self):
        return in_float32(layers_of(self._owner) if self._casts else [])
