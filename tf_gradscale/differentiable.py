"""A function with a gradient of its own, as `tf.custom_gradient` makes one, but leaving no trace.

What `tf.custom_gradient` registers in a graph stays alive for good, and the whole model with it;
and it reads each variable three times. Here TensorFlow keeps a weak reference only. The graph keeps
the gradient, and lets go of it when the model is gone: TensorFlow keeps some graphs for good.
"""

import itertools
import weakref

import tensorflow as tf

# tensorflow.python: what tf.custom_gradient is made of; tests/test_platform.py notices if it goes.
from tensorflow.python.eager import record
from tensorflow.python.saved_model.save_context import in_save_context

_count = itertools.count()


def differentiable(function, inputs, owner):
    """Runs a function whose gradient is given by itself.

    Args:
        function: Takes the inputs. Returns a list of output tensors, and a function from their
            gradients and a list of the `tf.Variable`s that were read, to the gradients of the
            inputs and those of the variables (two lists, `None` for none).
        inputs: List of tensors, dense or sparse.
        owner: With it goes the gradient, which must not refer to it.

    Returns:
        The output tensors.
    """
    # All tapes see what is inside: for a second derivative they need it.
    with record.VariableWatcher() as watcher:
        outputs, gradient = function(*inputs)
    variables = list({v.ref(): v for v in watcher.watched_variables()}.values())
    # A sparse tensor is three, none of which has a gradient.
    parts = [tf.nest.flatten(x, expand_composites=True) for x in inputs]
    sources = [*itertools.chain(*parts), *map(tf.convert_to_tensor, variables)]

    def backward(*upstream):
        dxs, dvs = gradient(upstream, variables)
        dxs = [
            [dx] if len(xs) == 1 else [None] * len(xs) for dx, xs in zip(dxs, parts, strict=True)
        ]
        return [*itertools.chain(*dxs), *dvs]

    with record.stop_recording():
        if tf.executing_eagerly():
            made = [tf.identity(y) for y in outputs]
        else:
            made = _overridden(outputs, sources, backward, owner)
    record.record_operation("GradientScaling", made, sources, backward)
    return made


def is_watched(tensors):
    """Whether a tape records what is made of any of some tensors."""
    # What tf.custom_gradient itself asks.
    return record.should_record_backprop(tensors)


def _overridden(outputs, sources, backward, owner):
    """The outputs, with the gradient also for those who differentiate the finished graph."""
    graph = tf.compat.v1.get_default_graph()
    name = f"GradientScaling-{next(_count)}"
    graph._gradient_scaling = {**getattr(graph, "_gradient_scaling", {}), name: backward}
    weakref.finalize(owner, _forget, weakref.ref(graph), name)
    reference, count, saved = weakref.ref(backward), len(outputs), in_save_context()

    @tf.RegisterGradient(name)
    def gradient(operation, *upstream):
        if in_save_context() and not saved:
            raise ValueError(
                "A concrete function is not traced anew for a SavedModel, and this one was made "
                "with gradient scaling in it. Pass the tf.function itself, with an "
                "`input_signature`, or have it call `tf_gradscale.strip(model)`. "
                "Received: a function that was traced before"
            )
        found = reference()
        if found is None:
            raise RuntimeError(
                "A model must be kept, and the graph in which it was run, while that graph is "
                "differentiated. Keep a reference to the model and to the function that runs it. "
                "Received: a graph of which one is gone"
            )
        return [None] * count + found(*upstream[:count])

    # The inputs pass through as well: an operation's gradients are those of its inputs.
    with graph.gradient_override_map({"IdentityN": name}):
        return tf.identity_n([*outputs, *sources])[:count]


def _forget(reference, name):
    graph = reference()
    if graph is not None:
        graph._gradient_scaling.pop(name, None)
