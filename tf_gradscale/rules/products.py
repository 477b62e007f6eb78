"""The products that layers are made of, and their gradients."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf


class Product(NamedTuple):
    """One bilinear map of a layer.

    `apply`: (x, kernel) → product, as Keras computes it. `kernel`: the Keras variable. `n`: the
    accumulation length N of ∇X, how many products are summed into one of its entries. `x_axis`
    and `y_axis`: where the channels that the kernel mixes lie in input and output, or `None`.
    `contracted`: for a matrix product, how many axes x and kernel share; else `None`.
    """

    apply: Callable
    kernel: Any
    n: float
    x_axis: int | None
    y_axis: int | None
    contracted: int | None = None

    def vjp(self, x, kernel, dz, dz_w):
        """∇X, to which ∇Z leads, and ∇W, to which β_W∇Z does.

        Args:
            x: The input.
            kernel: The kernel, times β.
            dz: ∇Z.
            dz_w: β_W∇Z; the same object as `dz` where the two are one.
        """
        if self.contracted is not None:
            return self._matrix_vjp(x, kernel, dz, dz_w)
        together = dz is dz_w
        with tf.GradientTape(persistent=not together) as tape:
            tape.watch([x, kernel])
            y = self.apply(x, kernel)
        if together:
            return tape.gradient(y, [x, kernel], output_gradients=dz)
        dx = tape.gradient(y, x, output_gradients=dz)
        return dx, tape.gradient(y, kernel, output_gradients=dz_w)

    def _matrix_vjp(self, x, kernel, dz, dz_w):
        """∇X = ∇Z Wᵀ and ∇W = Xᵀ ∇Z: without the product itself, which tapes ask for."""
        k = math.prod(kernel.shape[: self.contracted])
        matrix = _reshaped(kernel, (k, -1))
        columns = matrix.shape[1]
        rows, rows_w = (_reshaped(t, (-1, columns)) for t in (dz, dz_w))
        dx = tf.matmul(rows, matrix, transpose_b=True)
        dw = tf.matmul(_reshaped(x, (-1, k)), rows_w, transpose_a=True)
        if x.shape.rank != 2:
            dx = tf.reshape(dx, tf.shape(x))
        return dx, _reshaped(dw, kernel.shape)


def _reshaped(x, shape):
    """A tensor in another shape, of which the last or first size may be open."""
    return x if x.shape.rank == len(shape) == 2 else tf.reshape(x, shape)


def channel_axis(layer):
    """The axis of a layer's channels: 1 or -1."""
    return 1 if getattr(layer, "data_format", None) == "channels_first" else -1


def _dense(layer):
    return [Product(keras.ops.matmul, layer._kernel, layer.units, -1, -1, 1)]


def _einsum_dense(layer):
    operands, output = layer.equation.split("->")
    x, kernel = operands.split(",")
    x = x.replace("...", "")
    sizes = dict(zip(kernel, layer.kernel.shape, strict=True))
    n = math.prod(size for letter, size in sizes.items() if letter not in x)
    return [
        Product(
            lambda x, kernel: keras.ops.einsum(layer.equation, x, kernel),
            layer._kernel,
            n,
            -1 if x[-1] in kernel else None,
            -1 if output.replace("...", "")[-1] in kernel else None,
            _contracted(*operands.split(","), output),
        )
    ]


def _contracted(x, kernel, output):
    """How many axes an einsum contracts, if it is a matrix product of operands reshaped, or `None`.

    As "abcd,cde->abe": the last axes of x are the first of the kernel, and the rest stays in order.
    """
    for count in range(1, len(kernel)):
        batch, new = x[:-count], kernel[count:]
        if x[-count:] == kernel[:count] and output == batch + new:
            letters = batch.replace("...", "") + kernel
            return count if len(set(letters)) == len(letters) else None
    return None


def _conv(layer):
    def apply(x, kernel):
        if layer.padding == "causal":
            x = keras.ops.pad(x, layer._compute_causal_padding())
        return keras.ops.conv(
            x,
            kernel,
            strides=list(layer.strides),
            padding="valid" if layer.padding == "causal" else layer.padding,
            dilation_rate=layer.dilation_rate,
            data_format=layer.data_format,
        )

    # On average over the entries of ∇X: a 1×1 kernel with stride 2 reaches one in four.
    area = math.prod(layer.kernel_size) / math.prod(layer.strides)
    axis = channel_axis(layer)
    return [Product(apply, layer._kernel, area * layer.filters / layer.groups, axis, axis)]


def _conv_transpose(layer):
    def apply(x, kernel):
        return keras.ops.conv_transpose(
            x,
            kernel,
            strides=list(layer.strides),
            padding=layer.padding,
            output_padding=layer.output_padding,
            dilation_rate=layer.dilation_rate,
            data_format=layer.data_format,
        )

    axis = channel_axis(layer)
    n = math.prod(layer.kernel_size) * layer.filters
    return [Product(apply, layer.kernel, n, axis, axis)]


def _depthwise(layer, kernel=None):
    def apply(x, kernel):
        return keras.ops.depthwise_conv(
            x,
            kernel,
            strides=layer.strides,
            padding=layer.padding,
            dilation_rate=layer.dilation_rate,
            data_format=layer.data_format,
        )

    area = math.prod(layer.kernel_size) / math.prod(_as_tuple(layer.strides, layer.rank))
    axis = channel_axis(layer)
    kernel = layer.kernel if kernel is None else kernel
    return [Product(apply, kernel, area * layer.depth_multiplier, axis, axis)]


def _separable(layer):
    def apply(x, kernel):
        return keras.ops.conv(x, kernel, 1, "valid", layer.data_format)

    axis = channel_axis(layer)
    pointwise = Product(apply, layer.pointwise_kernel, layer.filters, axis, axis)
    return [*_depthwise(layer, layer.depthwise_kernel), pointwise]


def _as_tuple(value, rank):
    return (value,) * rank if isinstance(value, int) else tuple(value)


_layers = keras.layers
PRODUCTS = {
    _layers.Dense: _dense,
    _layers.EinsumDense: _einsum_dense,
    **dict.fromkeys((_layers.Conv1D, _layers.Conv2D, _layers.Conv3D), _conv),
    **dict.fromkeys(
        (_layers.Conv1DTranspose, _layers.Conv2DTranspose, _layers.Conv3DTranspose),
        _conv_transpose,
    ),
    **dict.fromkeys((_layers.DepthwiseConv1D, _layers.DepthwiseConv2D), _depthwise),
    **dict.fromkeys((_layers.SeparableConv1D, _layers.SeparableConv2D), _separable),
}
