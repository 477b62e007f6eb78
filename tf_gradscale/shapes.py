"""What Keras tensors lack within the call of an opened composite.

`keras.ops.shape` of a Keras tensor gives `None` for a dimension that is not known before the run,
with which nothing can be computed. A composite's call may well do so (`batch, length, _ =
ops.shape(x)`): where it runs on tensors, it gets a number. While it is opened, it gets a stand-in
for that number. And `self.gain * x` works on Keras tensors as `x * self.gain` does.
"""

import contextlib

import keras
import tensorflow as tf

# keras.src: where Keras' own layers find the functions; tests/test_platform.py notices a change.
from keras.src import ops as keras_ops


class DynamicReshape(keras.Operation):
    """`keras.ops.reshape` to a shape of which some dimensions are tensors."""

    is_neutral = True

    def call(self, x, *shape):
        """The tensor, reshaped."""
        return tf.reshape(x, tf.stack([tf.cast(size, tf.int32) for size in shape]))

    def compute_output_spec(self, x, *shape):
        """What is known of it."""
        return keras.KerasTensor(_static(shape), x.dtype)


class DynamicBroadcast(DynamicReshape):
    """`keras.ops.broadcast_to` a shape of which some dimensions are tensors."""

    # The gradient is a sum over all places that an entry went to.
    is_neutral = False

    def call(self, x, *shape):
        """The tensor, broadcast."""
        return tf.broadcast_to(x, tf.stack([tf.cast(size, tf.int32) for size in shape]))


@contextlib.contextmanager
def dynamic_shapes(scope):
    """Within it, `keras.ops.shape` of a Keras tensor gives tensors for unknown dimensions.

    Variables take Keras tensors for operands, too.

    Args:
        scope: Tells whose calls are meant (`is_current`), and gives a `dimension` its stand-in.
    """
    originals = {name: getattr(keras.ops, name) for name in ("shape", "reshape", "broadcast_to")}

    def shape(x):
        if not (isinstance(x, keras.KerasTensor) and scope.is_current()):
            return originals["shape"](x)
        return tuple(
            scope.dimension(x, axis) if size is None else size for axis, size in enumerate(x.shape)
        )

    def reshape(x, newshape):
        return _shaped(DynamicReshape, originals["reshape"], x, newshape)

    def broadcast_to(x, shape):
        return _shaped(DynamicBroadcast, originals["broadcast_to"], x, shape)

    patched = {"shape": shape, "reshape": reshape, "broadcast_to": broadcast_to}
    modules = (keras.ops, keras_ops)
    for module in modules:
        for name, function in patched.items():
            setattr(module, name, function)
    for name, function in _OPERATORS.items():
        setattr(keras.Variable, name, _operator(name, function, scope))
    try:
        yield
    finally:
        for name in _OPERATORS:
            # What is inherited appears again.
            delattr(keras.Variable, name)
        for module in modules:
            for name, function in originals.items():
                setattr(module, name, function)


_OPERATORS = {
    "__add__": keras.ops.add,
    "__sub__": keras.ops.subtract,
    "__mul__": keras.ops.multiply,
    "__truediv__": keras.ops.true_divide,
    "__pow__": keras.ops.power,
    "__matmul__": keras.ops.matmul,
}


def _operator(name, function, scope):
    """An operator of variables that takes Keras tensors for its right operand."""
    original = getattr(keras.Variable, name)

    def operator(self, other):
        if isinstance(other, keras.KerasTensor) and scope.is_current():
            return function(self, other)
        return original(self, other)

    return operator


def _shaped(operation, original, x, shape):
    sizes = shape if isinstance(shape, (list, tuple)) else [shape]
    if isinstance(x, keras.KerasTensor) and any(tf.is_tensor(size) for size in sizes):
        return operation()(x, *sizes)
    return original(x, shape)


def _static(shape):
    sizes = [tf.get_static_value(s) if tf.is_tensor(s) else s for s in shape]
    return tuple(None if size is None or size == -1 else int(size) for size in sizes)
