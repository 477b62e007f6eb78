"""Every operation that needs no scale of its own, or one that is measured."""

import keras
import tensorflow as tf

from tf_gradscale.estimate import exp2
from tf_gradscale.rules.base import Rule, Scaled, is_finite, variable_value


class Carry(Rule):
    """Passes α through (line 20 of Algorithm 1).

    Backpropagation is linear in ∇Y, so any operation is right with ⟨α, vjp(∇Y)⟩; the gradients
    of variables are divided by α in float32. An operation with several outputs first brings
    their gradients to one scale (splitting, lines 15 to 18).
    """

    def __init__(self, step, registry):
        super().__init__(step, registry)
        self.split = None
        if len(step.outputs) > 1:
            site = registry.add_site(f"{step.name}/split", "split")
            self.split = (site, [registry.add_factor() for _ in step.outputs])
        self.unscale = registry.add_factor() if _owns_variables(step.operation) else None

    def forward(self, inputs, call):
        floats = [x for x in inputs if x.dtype.is_floating]
        with tf.GradientTape(persistent=True) as tape:
            for x in floats:
                tape.watch(x)
            outputs = keras.tree.flatten(call(inputs))
        return outputs, (inputs, tape, outputs)

    def backward(self, record, upstream, walk):
        inputs, tape, outputs = record
        alpha, dys = self._join(upstream, walk)
        ys = [y for y, dy in zip(outputs, upstream, strict=True) if dy is not None]
        variables = self._trainable()
        xs = [x for x in inputs if x.dtype.is_floating]
        alpha, gradients = self._scaled_vjp(
            tape, ys, dys, alpha, xs, [variable_value(v) for v in variables], walk
        )
        for variable, gradient in zip(variables, gradients[len(xs) :], strict=True):
            if gradient is not None:
                walk.add(variable, alpha, gradient, self.unscale)
        dxs = iter(gradients[: len(xs)])
        result = [next(dxs) if x.dtype.is_floating else None for x in inputs]
        return [None if dx is None else Scaled(alpha, dx) for dx in result]

    def _join(self, upstream, walk):
        present = [pair for pair in upstream if pair is not None]
        if len(present) == 1:
            return present[0].log2_alpha, [present[0].gradient]
        site, factors = self.split
        factors = [f for f, pair in zip(factors, upstream, strict=True) if pair is not None]
        return walk.join(site, factors, present, summed=False)

    def _trainable(self):
        return list(getattr(self.operation, "trainable_variables", []))

    def _scaled_vjp(self, tape, ys, dys, alpha, xs, variables, walk):
        return alpha, tape.gradient(ys, xs + variables, output_gradients=dys)


class Measured(Carry):
    """An operation that shrinks or grows gradients, by how much is measured.

    ⟨αβ, vjp(β∇Y)⟩. In an updating pass β comes from a trial with β = 1; λ_min is as far below
    the result as λ_max is above it. Not in the paper, which passes the gradient through: a mean
    over 336 positions alone takes 8 of float16's binades.
    """

    def __init__(self, step, registry):
        super().__init__(step, registry)
        self.site = registry.add_site(f"{step.name}/input", "measured")
        self.beta = registry.add_factor()

    def _scaled_vjp(self, tape, ys, dys, alpha, xs, variables, walk):
        def measure():
            gradients = tape.gradient(ys, xs + variables, output_gradients=dys)
            dxs = [g for g in gradients[: len(xs)] if g is not None]
            dvs = [g for g in gradients[len(xs) :] if g is not None]
            return walk.placement.measured([_dense(g) for g in dxs], dys, dvs)

        if not xs:
            return super()._scaled_vjp(tape, ys, dys, alpha, xs, variables, walk)
        alpha_x = walk.choose(self.site, alpha, measure, dys[0].dtype)
        beta = walk.factor(self.beta, lambda: exp2(alpha_x - alpha))
        scaled = [walk.multiply(dy, beta) for dy in dys]
        gradients = tape.gradient(ys, xs + variables, output_gradients=scaled)
        present = [g for g in gradients if g is not None]
        walk.check(self.site, lambda: is_finite(present), lambda: is_finite(dys))
        return alpha_x, gradients


def _dense(gradient):
    return tf.convert_to_tensor(gradient)


def _owns_variables(operation):
    return isinstance(operation, keras.layers.Layer) and bool(operation.variables)


def is_neutral(operation):
    """Whether an operation neither shrinks nor grows gradients much: it needs no measurement."""
    if isinstance(operation, NEUTRAL_LAYERS):
        return not getattr(operation, "layers", None)
    return type(operation).__name__ in NEUTRAL_OPS and _is_keras_op(operation)


def _is_keras_op(operation):
    return type(operation).__module__.startswith("keras.src.ops.")


_layers = keras.layers
NEUTRAL_LAYERS = (
    _layers.Activation,
    _layers.ReLU,
    _layers.LeakyReLU,
    _layers.ELU,
    _layers.PReLU,
    _layers.Softmax,
    _layers.Dropout,
    _layers.SpatialDropout1D,
    _layers.SpatialDropout2D,
    _layers.SpatialDropout3D,
    _layers.GaussianNoise,
    _layers.Flatten,
    _layers.Reshape,
    _layers.Permute,
    _layers.RepeatVector,
    _layers.Cropping1D,
    _layers.Cropping2D,
    _layers.Cropping3D,
    _layers.ZeroPadding1D,
    _layers.ZeroPadding2D,
    _layers.ZeroPadding3D,
    _layers.MaxPooling1D,
    _layers.MaxPooling2D,
    _layers.MaxPooling3D,
    _layers.Concatenate,
    _layers.Add,
    _layers.Subtract,
    _layers.Maximum,
    _layers.Minimum,
    _layers.Masking,
    _layers.Embedding,
    _layers.Identity,
)
# keras.ops by class name: the classes are not exported.
NEUTRAL_OPS = frozenset(
    "Relu Relu6 LeakyRelu Elu Selu Gelu Silu Softplus Tanh Sigmoid Softmax LogSoftmax HardTanh "
    "HardSigmoid Add Subtract Negative Maximum Minimum Absolute Concatenate Stack Split Unstack "
    "Reshape Transpose Ravel ExpandDims Squeeze Flip Roll Pad GetItem MaxPool Identity Where "
    "StopGradient Swapaxes Moveaxis BroadcastTo".split()
)
