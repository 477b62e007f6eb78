"""What XLA is kept from computing again and again.

XLA fuses what is cheap into every operation that reads it, and works it out anew in each. For one
number that all variables' updates depend on, or a gradient that passes through a chain of residual
blocks, each of these operations then holds the whole history of its operands: time and compiled
code grow with the square of the depth, and operations of equal layers, of which XLA compiles one
for all, are no longer equal.
"""

import tensorflow as tf

# tensorflow.python: not exported; tests/test_platform.py notices if it goes.
from tensorflow.python.ops import control_flow_util


def computed_once(x):
    """A small tensor of finite entries, behind an operation that XLA does not fuse: a cumulative
    sum. Costs a copy."""
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
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or not control_flow_util.GraphOrParentsInXlaContext(graph):
        return x
    return x / tf.cast(one, x.dtype)
