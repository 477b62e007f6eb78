"""What XLA is spared: computing again and again, and reading what is long to read.

XLA fuses what is cheap into every operation that reads it, and works it out anew in each. For one
number that all variables' updates depend on, or a gradient that passes through a chain of residual
blocks, each of these operations then holds the whole history of its operands: time and compiled
code grow with the square of the depth, and operations of equal layers, of which XLA compiles one
for all, are no longer equal (`computed_once`, `materialized`).

TensorFlow hands XLA most operations in a tenth of a millisecond, and some, by way of a compiler of
their own, in six: magnitudes, rounding down or up, and the test for finite numbers among them.
Those below are made of the others, and of the same values (`magnitude`, `floor`, `ceil`,
`is_finite`).
"""

import math

import tensorflow as tf

# tensorflow.python: not exported; tests/test_platform.py notices if it goes.
from tensorflow.python.ops import control_flow_util


def computed_once(x):
    """A small tensor, behind an operation that XLA does not fuse: a cumulative sum, and a copy."""
    return tf.cumsum(tf.stack([x, tf.zeros_like(x)]))[1]


def materialized(x, one):
    """A large float tensor, of which XLA makes a buffer for all that read it.

    XLA takes a division for too expensive to be repeated.

    Args:
        x: The tensor.
        one: A scalar 1, of which XLA does not know that it is 1.

    Returns:
        x / one under XLA, else x itself.
    """
    return x / tf.cast(one, x.dtype) if under_xla() else x


def hidden(x, one):
    """A small float32 constant, of which XLA does not know that it is one.

    XLA reads a function once for all calls that are equal, for which constants must be as well.
    `one`: as for `materialized`.
    """
    return x * one if under_xla() else x


def product_operand(x):
    """A tensor as XLA's product of it with another has it: in float32 on a processor.

    There float16 products are computed in float32; as it is, the tensor would be made twice.
    """
    return x if tf.config.list_physical_devices("GPU") else tf.cast(x, tf.float32)


def magnitude(x):
    """|x|, of floats."""
    return tf.maximum(x, -x) if under_xla() else tf.abs(x)


def floor(x):
    """⌊x⌋, of floats."""
    return tf.math.floordiv(x, 1.0)


def ceil(x):
    """⌈x⌉, of floats."""
    return -floor(-x)


def is_finite(x):
    """Whether each entry of a float tensor is finite."""
    return magnitude(x) < math.inf if under_xla() else tf.math.is_finite(x)


def entries(vector, indices, size):
    """Some entries of a vector of `size` entries, as a list of scalars."""
    if under_xla():
        # To it, each of the others would be two operations more.
        return [vector[i] for i in indices]
    found = tf.unstack(vector, size)
    return [found[i] for i in indices]


def under_xla():
    """Whether what is traced now is compiled by XLA, by a `tf.function(jit_compile=True)`."""
    graph = tf.compat.v1.get_default_graph()
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(graph)
