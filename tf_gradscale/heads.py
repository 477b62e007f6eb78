"""Trailing activations: left outside the region, in float32, with Keras' logits shortcut kept.

Keras marks the output of a softmax or sigmoid with its logits, and its losses then work on these.
The mark must not lead the loss to a tensor inside the region, so the region ends at the logits.
"""

import keras

from tf_gradscale.rules.gemm import Gemm


def cut(graph):
    """Moves trailing softmaxes and sigmoids from the graph's steps to its `head`, in place."""
    consumers = graph.consumers()
    producers = {id(t): step for step in graph.steps for t in step.outputs}
    for i, tensor in enumerate(graph.outputs[: len(graph.head)]):
        step = producers.get(id(tensor))
        if step is None or len(consumers[id(tensor)]) != 1:
            continue
        activation = _trailing_activation(step.operation)
        if activation is None:
            continue
        if Gemm.takes(step.operation):
            step.linear = True
        elif len(step.inputs) == 1:
            graph.steps.remove(step)
            graph.outputs[i] = logits = step.inputs[0]
            for other in graph.steps:
                # A mask that is set on the activation's output goes to the logits.
                other.inputs = [logits if x is tensor else x for x in other.inputs]
        else:
            continue
        graph.head[i] = activation
        consumers = graph.consumers()


def _trailing_activation(operation):
    """The function from logits to outputs that ends this operation, or `None`."""
    if isinstance(operation, keras.layers.Layer) and operation.activity_regularizer is not None:
        return None
    if type(operation) is keras.layers.Softmax:
        axis = operation.axis
        return lambda logits: keras.activations.softmax(logits, axis=axis)
    if type(operation) is keras.layers.Activation or Gemm.takes(operation):
        known = (keras.activations.softmax, keras.activations.sigmoid)
        return operation.activation if operation.activation in known else None
    if type(operation).__module__.startswith("keras.src.ops."):
        if type(operation).__name__ == "Softmax":
            axis = operation.axis
            return lambda logits: keras.activations.softmax(logits, axis=axis)
        if type(operation).__name__ == "Sigmoid":
            return keras.activations.sigmoid
    return None
