"""Moving statistics that survive a batch which is not finite."""

import contextlib

import keras
import tensorflow as tf

# keras.src: not exported; tests/test_platform.py notices if it goes.
from keras.src.backend.common.stateless_scope import in_stateless_scope

from tf_gradscale.xla import is_finite


@contextlib.contextmanager
def finite_statistics(operation):
    """Within it, a batch normalisation's moving statistics take no value that is not finite.

    A step with such gradients is skipped, but by then the forward pass has updated them, and one
    NaN would stay for good: each update is a mean of the old value and the batch's.

    Args:
        operation: The `keras.Operation` that is called within it; others are left alone.
    """
    if not _is_guarded(operation) or in_stateless_scope():
        yield
        return
    # Updates are noted, not made.
    with keras.StatelessScope() as scope:
        yield
    for variable in operation.non_trainable_variables:
        value = scope.get_current_value(variable)
        if value is not None:
            variable.assign(tf.where(is_finite(value), value, variable.value))


def _is_guarded(operation):
    # A loss that is added within the scope would be lost.
    return (
        isinstance(operation, keras.layers.BatchNormalization)
        and type(operation).call is keras.layers.BatchNormalization.call
        and operation.activity_regularizer is None
    )
