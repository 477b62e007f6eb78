"""Gradients as TensorFlow has them: dense, or sparse as `tf.IndexedSlices`, which stay sparse."""

import tensorflow as tf


def is_dense_float(x):
    """Whether a tensor can have a gradient: neither an integer nor a `tf.SparseTensor`."""
    return x.dtype.is_floating and not isinstance(x, tf.SparseTensor)


def map_values(function, gradient):
    """Applies a function to the values of a gradient."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def values(gradient):
    """The values of a gradient, a dense tensor."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def multiply(gradient, factor):
    """A gradient times a power of two, in its own dtype (exact short of λ_max and subnormals)."""
    return map_values(lambda values: values * tf.cast(factor, values.dtype), gradient)


def cast(gradient, dtype):
    """A gradient in another dtype."""
    return map_values(lambda values: tf.cast(values, dtype), gradient)


def identity(gradient):
    """The gradient itself, behind the current control dependencies; `None` for none."""
    return None if gradient is None else map_values(tf.identity, gradient)


def add(parts):
    """The sum of gradients; sparse ones are joined and stay sparse."""
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
