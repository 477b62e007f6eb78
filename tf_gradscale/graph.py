"""A Keras graph as a flat list of steps, nested models opened."""

import dataclasses
from typing import Any

import keras

# keras.src: these classes are not exported; tests/test_platform.py notices if one goes.
from keras.src.models.functional import Functional
from keras.src.ops.node import Node


@dataclasses.dataclass(eq=False)
class Tensor:
    """One tensor of the graph, as declared: a Keras tensor may stand for several, one a call."""

    shape: tuple
    dtype: str

    @property
    def is_float(self):
        """Whether a gradient can flow through it."""
        return "float" in self.dtype


@dataclasses.dataclass(eq=False)
class Step:
    """One call of an operation.

    Attributes:
        operation: The `keras.Operation`, most often a layer.
        name: The layer's path within the model, unique.
        node: The Keras node that recorded the call, with its arguments.
        inputs: The distinct tensors among the arguments, in order of appearance.
        keys: For each of `inputs`, the id of the Keras tensor that the node's arguments hold.
        outputs: The tensors it makes, in order.
        training: What an enclosing nested model was told, used where the run gives no value.
        autocast_dtype: What the enclosing model casts variables to, or `None`.
        rule: How it is differentiated (`rules`).
        linear: Whether the layer's own activation is left to the graph's `head`.
        cast: Name of a cast that its output's gradient still has to go through, or `None`: the
            rule then does both at once.
    """

    operation: Any
    name: str
    node: Node
    inputs: list
    keys: list
    outputs: list
    training: bool | None
    autocast_dtype: str | None
    rule: Any = None
    linear: bool = False
    cast: str | None = None


@dataclasses.dataclass(eq=False)
class Graph:
    """Steps in the order in which Keras runs them.

    Attributes:
        steps: A list of `Step`, topologically sorted.
        inputs: The tensors that go in, flat.
        outputs: The tensors that come out, flat.
        head: For each of `outputs`, the activation that is applied to it outside, or `None`.
    """

    steps: list
    inputs: list
    outputs: list
    head: list

    def consumers(self):
        """By a tensor's id, who uses it: (step, input index) each, or an int for an output."""
        users: dict[int, list] = {}
        for step in self.steps:
            for i, tensor in enumerate(step.inputs):
                users.setdefault(id(tensor), []).append((step, i))
        for i, tensor in enumerate(self.outputs):
            users.setdefault(id(tensor), []).append(i)
        return users


def function_of(model):
    """The Keras function that a Functional or Sequential model runs, else `None`."""
    if isinstance(model, keras.Sequential):
        # A Sequential runs a Functional of its own, once it knows its input shape.
        return model._functional
    return model if isinstance(model, Functional) else None


def trace(function, autocast_dtype=None):
    """Flattens a Keras function.

    Args:
        function: A Functional model, or any `keras.Function` made of layers and `keras.ops`.
        autocast_dtype: The dtype to which the model casts variables, or `None`.

    Returns:
        A `Graph`.
    """
    steps: list[Step] = []
    inputs = [Tensor(kt.shape, kt.dtype) for kt in function.inputs]
    outputs = _emit(function, inputs, "", None, autocast_dtype, steps)
    return Graph(steps, inputs, outputs, [None] * len(outputs))


def _emit(function, inputs, prefix, training, autocast_dtype, steps):
    """Appends the steps of `function`, called on `inputs`; returns its output tensors."""
    tensors = dict(zip(map(id, function.inputs), inputs, strict=True))
    # _nodes_by_depth: the order in which Function._run_through_graph runs the nodes.
    for depth in sorted(function._nodes_by_depth, reverse=True):
        for node in function._nodes_by_depth[depth]:
            if node.is_input:
                continue
            keras_tensors = list({id(kt): kt for kt in node.input_tensors}.values())
            arguments = [tensors[id(kt)] for kt in keras_tensors]
            name = prefix + node.operation.name
            inner = _openable(node, arguments)
            if inner is not None:
                made = _emit(
                    inner,
                    arguments,
                    f"{name}/",
                    training if training is not None else node.arguments.kwargs.get("training"),
                    scope_dtype(node.operation),
                    steps,
                )
            else:
                made = [Tensor(kt.shape, kt.dtype) for kt in node.outputs]
                keys = [id(kt) for kt in keras_tensors]
                steps.append(
                    Step(
                        node.operation,
                        name,
                        node,
                        arguments,
                        keys,
                        made,
                        training,
                        autocast_dtype,
                    )
                )
            tensors.update(zip(map(id, node.outputs), made, strict=True))
    return [tensors[id(kt)] for kt in function.outputs]


def scope_dtype(layer):
    """The dtype to which a layer casts variables that are read in its `call`, or `None`."""
    return layer.compute_dtype if layer.compute_dtype != layer.variable_dtype else None


def _openable(node, arguments):
    """The inner function of a nested model whose call is nothing but running it, else `None`."""
    model = node.operation
    inner = function_of(model) if isinstance(model, keras.Model) else None
    plain = isinstance(model, Functional) and type(model).call is Functional.call
    plain = plain or (
        isinstance(model, keras.Sequential) and type(model).call is keras.Sequential.call
    )
    plain = plain or getattr(model, "is_gradient_scaled", False)
    if inner is None or not plain or model.activity_regularizer is not None:
        return None
    # The inner function takes its inputs flat and in order, with the ranks it was built for, and
    # nothing but `training` besides; anything else is left to the model's own call.
    kwargs = node.arguments.kwargs
    given = {key for key in kwargs if any(x is not None for x in keras.tree.flatten(kwargs[key]))}
    others = given - {"training"}
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
