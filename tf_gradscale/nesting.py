"""Which operations have others inside that can be taken out."""

import inspect

import keras
import numpy as np
import tensorflow as tf

# keras.src: this class is not exported; tests/test_platform.py notices if it goes.
from keras.src.models.functional import Functional

from tf_gradscale.graph import function_of, is_users_code
from tf_gradscale.opening import NotOpenable, is_symbolic
from tf_gradscale.rules import is_registered


def takes_position(layer, args):
    """Whether `training` is among the positional arguments of a call."""
    return "training" in list(inspect.signature(layer.call).parameters)[: len(args)]


def without_tensors(x):
    """An argument that the call of a composite may be given in a graph of its own."""
    if is_symbolic(x):
        value = tf.get_static_value(x)
        if value is None:
            raise NotOpenable("it is called on a tensor made of variables")
        return np.asarray(value)
    return x


def is_composite(operation):
    """Whether a call of the operation may be a graph of others."""
    if is_registered(operation):
        return False
    if not isinstance(operation, keras.layers.Layer):
        return type(operation).__name__ == "DotProductAttention"
    if is_users_code(operation):
        return not isinstance(operation, keras.layers.RNN)
    return type(operation).call in _OPENED


_OPENED = [
    getattr(keras.layers, name).call
    for name in (
        "MultiHeadAttention",
        "GroupQueryAttention",
        "Attention",
        "AdditiveAttention",
        "ReversibleEmbedding",
    )
    # ReversibleEmbedding is newer than the oldest Keras.
    if hasattr(keras.layers, name)
]


def inner_function(node, kwargs, tensors):
    """The inner function of a nested model whose call is nothing but running it, else `None`."""
    model = node.operation
    inner = function_of(model) if isinstance(model, keras.Model) else None
    plain = type(model).call in (Functional.call, keras.Sequential.call)
    plain = plain or getattr(model, "runs_its_graph", False)
    if inner is None or not plain or model.activity_regularizer is not None:
        return None
    # The inner function takes its inputs flat and in order, with the ranks it was built for, and
    # nothing but `training` besides; anything else is left to the model's own call.
    given = {key for key in kwargs if any(x is not None for x in keras.tree.flatten(kwargs[key]))}
    others = given - {"training"}
    arguments = [tensors[id(kt)] for kt in {id(kt): kt for kt in node.input_tensors}.values()]
    same = len(arguments) == len(inner.inputs) == len(node.input_tensors)
    if others or not same or len(node.arguments.args) != 1:
        return None
    for tensor, kt in zip(arguments, inner.inputs, strict=True):
        if len(tensor.shape) != len(kt.shape):
            return None
        if tensor.dtype != kt.dtype and not _casts_anyway(inner, kt, tensor.dtype):
            return None
    return inner


def _casts_anyway(function, kt, dtype):
    """Whether all uses of an inner input cast it to `dtype`: its own is then never seen."""
    users = [
        node
        for nodes in function._nodes_by_depth.values()
        for node in nodes
        if any(kt is used for used in node.input_tensors)
    ]
    layers = all(
        isinstance(node.operation, keras.layers.Layer)
        and node.operation.autocast
        and node.operation.compute_dtype == dtype
        for node in users
    )
    return layers and not any(kt is out for out in function.outputs)
