"""f_G: products of an activation with a kernel (lines 2 to 7 of Algorithm 1)."""

import math

import keras
import tensorflow as tf

from tf_gradscale.registry import variable_value
from tf_gradscale.rules.base import Rule, known_class
from tf_gradscale.rules.products import PRODUCTS, channel_axis
from tf_gradscale.tensors import multiply
from tf_gradscale.xla import under_xla


class Gemm(Rule):
    """A layer that is one or more products, a bias and an activation.

    Forward: Y = φ(f_G(X, W) + b). Backward, with ∇Z the gradient at the product's output:
    ∇Z' = β_W∇Z, which leaves room for the kernel's gradient; then ⟨αβ_Wβ, f_G(∇Z', βW)⟩ for the
    input, with β by Theorem 1, f_G(X, ∇Z') / (αβ_W) for the kernel and Σ∇Z / α for the bias, both
    divided in float32. Where ∇Z spans many binades, as behind a softmax, β_W must not take its
    smallest entries from the input's gradient: that is ⟨αβ, f_G(∇Z, βW)⟩.
    """

    direct = True
    sums = True

    def __init__(self, step, registry):
        super().__init__(step, registry)
        self.products = PRODUCTS[known_class(step.operation, PRODUCTS)](step.operation)
        self.activation = None if step.linear else step.operation.activation
        self.bias = step.operation.bias
        self.apart = step.wide
        self.groups = []
        for i, product in reversed(list(enumerate(self.products))):
            label = product.kernel.name
            operand = "input" if i == 0 else f"{label}_input"
            # Before the product's own β stands β_W, or the cast that leaves room for ∇W.
            first = (f"{step.name}/{label}", "variable")
            if step.cast and i == len(self.products) - 1:
                first = (step.cast, "cast")
            names = [first, (f"{step.name}/{operand}", "gemm")]
            self.groups.insert(0, registry.add_group(names, 4))

    @classmethod
    def takes(cls, operation):
        """Whether the operation is a layer of this kind, unchanged by a subclass or by LoRA."""
        known = known_class(operation, PRODUCTS)
        return (
            known is not None
            and not getattr(operation, "lora_enabled", False)
            and getattr(operation, "quantization_mode", None) is None
        )

    @classmethod
    def casts(cls, step):
        """Whether the rule of a step takes gradients that still have to be cast."""
        activation = getattr(step.operation, "activation", None)
        linear = step.linear or activation in (None, keras.activations.linear)
        return linear and cls.takes(step.operation)

    def run(self, inputs, call, ahead):
        (z,) = inputs
        dtype = z.dtype
        stages = []
        for product in self.products:
            weight = tf.convert_to_tensor(variable_value(product.kernel))
            measured, used = ahead.measured(z, weight, product.x_axis)
            stages.append((z, weight, measured))
            z = product.apply(z, tf.cast(used, dtype))
        if self.bias is not None:
            bias = tf.cast(variable_value(self.bias), dtype)
            if len(self.bias.shape) == 1 and channel_axis(self.operation) == 1:
                bias = tf.reshape(bias, [1, -1] + [1] * (z.shape.rank - 2))
            z = keras.ops.add(z, bias)
        if self._is_linear():
            return [z], (stages, None, None, None)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(z)
            y = self.activation(z)
        return [y], (stages, z, tape, y)

    def _is_linear(self):
        return self.activation in (None, keras.activations.linear)

    def backward(self, record, upstream, walk):
        stages, z, tape, y = record
        pair = upstream[0]
        if not self._is_linear():
            dz = tape.gradient(y, z, output_gradients=pair.gradient)
            pair = pair._replace(gradient=dz)
        if self.bias is not None and self.bias.trainable:
            walk.add(self.bias, self._bias_gradient(pair.gradient), pair.inverse)
        for product, group, stage in reversed(
            list(zip(self.products, self.groups, stages, strict=True))
        ):
            pair = self._product_backward(product, group, stage, pair, walk)
        return [pair]

    def _product_backward(self, product, group, stage, pair, walk):
        """Lines 3 to 7 of Algorithm 1, less the update."""
        x, weight, measured = stage
        alpha, dz = pair.log2_alpha, pair.gradient
        kind = group.sites[0].kind
        apart = self.apart and kind == "variable" and product is self.products[-1]

        def measure(*state):
            counts = product.n, _channels(dz, product.y_axis), math.prod(weight.shape)
            counts = walk.hidden(tf.constant([0.5 * math.log2(count) for count in counts]))
            axes = {"dy_axis": product.y_axis, "x_axis": product.x_axis}
            given = dz, measured, weight, counts, alpha
            return walk.chooser.gemm(*given, *state, **axes, kind=kind, apart=apart)

        def keep(*state):
            return walk.chooser.unmeasured_gemm(alpha, *state, apart=apart)

        chosen = walk.decide(group, [pair], self.step, x.dtype, measure, keep)
        beta_w, beta = chosen.factors
        if kind == "cast":
            dz_w = tf.cast(dz * beta_w, x.dtype)
        else:
            dz_w = multiply(dz, beta_w)
        # Linear in the kernel: with βW in its place the kernel's gradient is the same.
        kernel = tf.cast(weight * beta, x.dtype)
        dx, dw = product.vjp(x, kernel, dz if apart else dz_w, dz_w)

        def made():
            given, operand, scaled = (tf.cast(t, tf.float32) for t in (x, kernel, dz))
            if kind == "cast":
                scaled_w = tf.cast(dz_w, tf.float32)
                exact, _ = product.vjp(given, operand, scaled_w, scaled_w)
                return [(scaled * beta_w, dz_w), (exact, dx)]
            scaled_w = scaled * beta_w
            exact, exact_w = product.vjp(given, operand, scaled if apart else scaled_w, scaled_w)
            # The gradient of a kernel that is not trained is made for nobody.
            used = (exact_w, dw) if product.kernel.trainable else (tf.zeros([0]), tf.zeros([0]))
            return [used, (exact, dx)]

        walk.count(group, made)
        if product.kernel.trainable:
            walk.add(product.kernel, dw, chosen.inverses[0])
        return chosen.scaled(1, dx, group.sites[-1:])

    def _bias_gradient(self, dz):
        """Σ∇Z over all axes that the bias is broadcast over, in float32: no overflow."""
        dz = tf.cast(dz, tf.float32)
        shape, rank = self.bias.shape, dz.shape.rank
        # Faster than a sum over axes, but to XLA, which is long to read it (`tf_gradscale.xla`).
        if len(shape) == 1 and channel_axis(self.operation) == -1 and not under_xla():
            return tf.raw_ops.BiasAddGrad(out_backprop=dz)
        if len(shape) == 1:
            keep = [channel_axis(self.operation) % rank]
        else:
            keep = [rank - len(shape) + i for i, size in enumerate(shape) if size != 1]
        axes = [i for i in range(rank) if i not in keep]
        return tf.reshape(tf.reduce_sum(dz, axes), shape)


def _channels(dz, axis):
    """How many channels ∇Z has, if they are told apart."""
    if axis is None or dz.shape.rank is None:
        return 1
    return dz.shape[axis] or 1
