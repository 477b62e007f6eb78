"""Losses that layers add inside a region: they leave it as outputs, and come back scaled.

Keras keeps them in lists of the layers (`add_loss`, activity regularisers). Left there, they would
be differentiated beside the region, in float16 and at scale 1, or not at all.
"""

import contextlib

import keras
import tensorflow as tf

from tf_gradscale.graph import is_users_code


class ActivityLoss:
    """What a layer's activity regulariser adds for its output, computed in float32.

    Args:
        layer: The layer, which is run without it.
    """

    compute_dtype = "float32"
    is_neutral = True

    def __init__(self, layer):
        self.owner = layer
        # Keras does the sum, and divides it by the size of the batch.
        self._carrier = keras.layers.Identity(
            activity_regularizer=layer.activity_regularizer, dtype="float32", name=layer.name
        )

    def __call__(self, y):
        with captured(self._carrier) as added:
            self._carrier(y)
        return [loss for _, loss in added]


class AddedLoss:
    """A loss that an opened composite adds itself.

    Args:
        layer: The composite.
    """

    is_neutral = True

    def __init__(self, layer):
        self.owner = layer

    def __call__(self, loss):
        return tf.identity(loss)


class LossesOf:
    """What another step's layer added when it ran.

    Args:
        step: That step.
    """

    def __init__(self, step):
        self.step = step

    @property
    def compute_dtype(self):
        """The dtype in which the layer computes."""
        return self.step.operation.compute_dtype

    @property
    def variables(self):
        """Those of the other step."""
        return self.step.operation.variables

    @property
    def trainable_variables(self):
        """Those of them that are trained."""
        return self.step.operation.trainable_variables


@contextlib.contextmanager
def captured(operation):
    """Takes the losses that are added within it out of the layers.

    Gives a list, filled at its end, of (layer, loss).
    """
    layers = _layers_of(operation)
    # _losses: the list behind `add_loss`; tests/test_platform.py notices if it goes.
    before = [len(layer._losses) for layer in layers]
    added: list[tuple] = []
    yield added
    for layer, count in zip(layers, before, strict=True):
        added += [(layer, loss) for loss in layer._losses[count:]]
        del layer._losses[count:]


def tried_out(step):
    """What a step's layer returns, and which losses it adds, when it is run.

    Args:
        step: The `graph.Step`.

    Returns:
        The dtypes of its outputs, and those of the losses. As declared, and none, where it runs no
        users' code, or cannot be run on any batch.
    """
    declared = [tensor.dtype for tensor in step.outputs]
    lambdas = isinstance(step.operation, keras.layers.Lambda)
    if not lambdas and not may_add(step.operation):
        return declared, []
    scope = keras.StatelessScope(collect_losses=True, initialize_variables=False)
    with tf.__internal__.FuncGraph("losses").as_default(), scope:
        inputs = [tf.compat.v1.placeholder(x.dtype, x.shape) for x in step.inputs]
        try:
            outputs = keras.tree.flatten(step.call(inputs))
        except Exception:  # whatever the layer's author wrote; when it is run, this is checked
            return declared, []
    return [y.dtype.name for y in outputs], [loss.dtype.name for loss in scope.losses]


def _layers_of(operation):
    # A model that could not be opened has its call run without what is around it.
    operation = getattr(operation, "model", operation)
    is_layer = isinstance(operation, keras.layers.Layer)
    return list(operation._flatten_layers()) if is_layer else []


def may_add(operation):
    """Whether an operation is a layer that may add losses: has a regulariser, or users' code."""
    return any(
        layer.activity_regularizer is not None or is_users_code(layer)
        for layer in _layers_of(operation)
    )
