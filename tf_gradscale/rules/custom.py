"""A user's own layer whose custom gradient is not linear in ∇Y: it gets the true gradient."""

import tensorflow as tf

from tf_gradscale.linearity import layers_of
from tf_gradscale.losses import LossesOf
from tf_gradscale.policy import in_float32
from tf_gradscale.rules.base import Rule, Scaled
from tf_gradscale.rules.carry import Carry
from tf_gradscale.tensors import multiply
from tf_gradscale.xla import is_finite


class Unscaled(Carry):
    """Runs an operation in float32 and hands it ∇Y itself, at scale 1.

    What clips a gradient or compares it with a threshold means the true one, which float16 may
    not hold. A gradient that has overflowed in float16 on its way here could leave a clip as a
    finite one: it makes the results NaN instead, so that the step is skipped.
    """

    def __init__(self, step, registry):
        Rule.__init__(self, step, registry)
        # ∇Y arrives in float32 as it is.
        self.casts = [None] * len(step.outputs)
        owner = step.operation
        self._layers = layers_of(owner.step.operation if isinstance(owner, LossesOf) else owner)
        dtypes = {tensor.dtype for tensor in [*step.inputs, *step.outputs]}
        # In a float32 or bfloat16 model all stays as it is.
        self._casts = registry.config.gradient_dtype in {*dtypes, super().input_dtype()}
        if self._casts:
            step.autocast_dtype = None

    def input_dtype(self):
        return "float32" if self._casts else super().input_dtype()

    def forward(self, inputs, call):
        with self._precision():
            # The record holds the float32 outputs: ∇Y goes to these.
            outputs, record = super().forward(inputs, call)
        return list(map(_as_declared, outputs, self.step.outputs)), record

    def backward(self, record, upstream, walk):
        found = super().backward(record, upstream, walk)
        # As the gradients that come into the model.
        return [
            None
            if pair is None
            else pair._replace(gradient=multiply(pair.gradient, walk.shift), inverse=walk.unshift)
            for pair in found
        ]

    def _join(self, upstream, walk):
        """All gradients at scale 1: nothing is left to be brought to one scale."""
        present = [pair for pair in upstream if pair is not None]
        gradients = [tf.cast(pair.gradient, tf.float32) * pair.inverse for pair in present]
        origin = tuple(site for pair in present for site in pair.origin)
        return Scaled(tf.constant(0.0), gradients, tf.constant(1.0), origin)

    def _scaled_vjp(self, tape, ys, xs, variables, pair, walk):
        dys = [tf.cast(dy, y.dtype) for dy, y in zip(pair.gradient, ys, strict=True)]
        # Here as well: a rematerialized layer runs its `call` once more.
        with self._precision():
            gradients = tape.gradient(ys, xs + variables, output_gradients=dys)
        if self._casts:
            finite = tf.reduce_all([tf.reduce_all(is_finite(dy)) for dy in dys])
            one = tf.where(finite, 1.0, float("nan"))
            gradients = [None if g is None else multiply(g, one) for g in gradients]
        return pair, gradients[: len(xs)], gradients[len(xs) :]

    def _precision(self):
        return in_float32(self._layers if self._casts else [])


class UnscaledLosses(Unscaled):
    """The losses that such a layer added when it ran; as `AddedLosses`."""

    def __init__(self, step, registry):
        super().__init__(step, registry)
        if self._casts:
            for tensor in step.outputs:
                # A loss is declared as the layer made it before it ran in float32.
                tensor.dtype = "float32"

    def record_of(self, record, losses):
        """What `backward` needs: the record of the layer's step, with its losses for outputs."""
        inputs, tape, _ = record
        return inputs, tape, losses


def _as_declared(y, tensor):
    if not y.dtype.is_floating or y.dtype.name == tensor.dtype:
        return y
    mask = getattr(y, "_keras_mask", None)
    y = tf.cast(y, tensor.dtype)
    if mask is not None:
        y._keras_mask = mask
    return y
