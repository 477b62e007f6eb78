"""What is measured of a tensor: sums of squares and largest magnitudes, in float32."""

import functools
from typing import NamedTuple

import tensorflow as tf

# tensorflow.compiler: XLA's own operations are not exported; tests/test_platform.py notices if
# they go.
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from tf_gradscale.shared import Part
from tf_gradscale.xla import magnitude, under_xla


def _larger(a, b):
    """The larger of two, NaN if one of them is: XLA's maximum passes over NaN, on a processor."""
    return tf.where((a >= b) | tf.not_equal(a, a), a, b)


_COMBINE = {"sum": tf.add, "max": _larger}
_REDUCE = {"sum": tf.reduce_sum, "max": tf.reduce_max}


class Totals(NamedTuple):
    """Float32 scalars: the largest Σx² of a channel, Σx² of all entries, max|x|.

    If channels were not told apart, the first is the second; if it was not asked for, the last is.
    """

    channel: tf.Tensor
    squares: tf.Tensor
    largest: tf.Tensor


def totals(x, axis=None, shift=0, largest=True, small=False):
    """Measures a float tensor, within a function of `tf_gradscale.shared`.

    Args:
        x: The tensor, of any shape.
        axis: Where its channels are, 1 or -1, or `None` not to tell them apart.
        shift: log2 of what it is multiplied by before it is measured.
        largest: Whether max|x| is asked for.
        small: Whether x has few entries, as a kernel has: then all is one reduction (`_reduced`).

    Returns:
        The `Totals`.
    """
    return _totals(x, axis=axis, shift=shift, largest=largest, small=small)


@Part
def _totals(x, axis, shift, largest, small):
    x = tf.cast(x, tf.float32)
    if shift:
        x *= 2.0**shift
    rank = x.shape.rank
    if not rank:
        # Of a tensor of unknown rank, which XLA does not have, the norm of the whole is a bound.
        x, rank, axis = tf.reshape(x, [-1]), 1, None
    axes = [i for i in range(rank) if axis is None or i != axis % rank]
    if small:
        squares, most = _reduced([tf.square(x), magnitude(x)], ["sum", "max"], axes)
    else:
        squares = most = tf.reduce_sum(tf.square(x), axes)
        if largest:
            most = _largest(x, axes)
    if axis is None:
        return Totals(squares, squares, most)
    channel, total, most = _reduced([squares, squares, most], ["max", "sum", "max"], [0])
    return Totals(channel, total, most if largest else total)


def _largest(x, axes=None):
    """max|x|, over some axes or all; NaN if one is, which XLA's maximum of floats may pass over."""
    if not under_xla():
        return tf.reduce_max(tf.abs(x), axes)
    # As integers, float32's magnitudes have the same order, and NaN is above all.
    bits = tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), 0x7FFFFFFF)
    return tf.bitcast(tf.reduce_max(bits, axes), tf.float32)


def largest_magnitude(x):
    """max|x| as a float32 scalar; not positive if x is empty."""
    return _largest(tf.cast(x, tf.float32))


def _reduced(values, operations, axes):
    """Several float32 tensors of one shape, each reduced by its operation, `"sum"` or `"max"`.

    Under XLA at once. On a processor that is one kernel, with all that is element-wise before it,
    where single reductions are up to three each; but it runs on one thread.
    """
    if not (under_xla() and axes):
        return [_REDUCE[how](x, axes) for how, x in zip(operations, values, strict=True)]
    zeros = [tf.constant(0.0)] * len(values)
    return gen_xla_ops.xla_variadic_reduce_v2(
        inputs=values,
        init_values=zeros,
        dimensions_to_reduce=axes,
        reducer=_reducer(tuple(operations)),
    )


@functools.cache
def _reducer(operations):
    """One step of the reduction, of as many pairs of scalars as there are operations."""

    def step(*both):
        before, new = both[: len(operations)], both[len(operations) :]
        pairs = zip(operations, before, new, strict=True)
        return tuple(_COMBINE[how](a, b) for how, a, b in pairs)

    with tf.init_scope():
        scalars = [tf.TensorSpec([], tf.float32)] * (2 * len(operations))
        return tf.function(step, input_signature=scalars, autograph=False).get_concrete_function()
