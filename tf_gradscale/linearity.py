"""Whether a step's gradient is linear in ∇Y: found out by trying, where a user wrote the code.

Backpropagation is, and then ∇Y may come scaled. The exception is a custom gradient of a user's own
that clips ∇Y, compares it with a threshold, takes its sign or adds something to it.
"""

import concurrent.futures
import contextlib
import dataclasses

import keras
import numpy as np
import tensorflow as tf

from tf_gradscale.export import plain_forward
from tf_gradscale.graph import is_users_code
from tf_gradscale.inner import Whole
from tf_gradscale.opening import call_context
from tf_gradscale.policy import in_float32
from tf_gradscale.registry import variable_value
from tf_gradscale.tensors import values

# log2 of what ∇Y is multiplied by, the ends first: there any threshold is passed.
_EXPONENTS = sorted(range(-60, 61, 4), key=abs, reverse=True)
# Of a gradient's largest entry; a power of two changes no bit of what is linear.
_TOLERANCE = 1e-3
# What dimensions are taken for that are not known. Some layers need larger ones.
_SIZES = (4, 32)
_WRITES = ("Assign", "ResourceScatter", "ResourceApply")
_KNOWN = ("keras", "tf_gradscale")


def is_linear(step):
    """Whether vjp(s·∇Y) = s·vjp(∇Y) for a step, for its inputs and its variables.

    A step whose gradient cannot be tried out counts as one for which it does not hold, and so does
    one that adds up something over replicas, as synchronized batch normalisation does: in its
    gradient the ∇Y of all of them meet, each with scales of its own. The layer, its variables and
    its losses are left as they were.

    Args:
        step: The `graph.Step`.
    """
    if any(getattr(layer, "synchronized", False) for layer in layers_of(step.operation)):
        return False
    if not _runs_code_of_users(step):
        return True
    # In a thread of its own: no graph is being made there, and no tape is stopped.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(_try_out, step).result()


def _try_out(step):
    # Whatever the layer's author wrote may fail.
    for size in _SIZES:
        with contextlib.suppress(Exception), _nothing_changes(step), _in_float32(step):
            return _Trial(step, size).is_linear()
    for size in _SIZES:
        # Written for 16 bits alone, it is linear if all gradients in it are TensorFlow's own.
        with contextlib.suppress(Exception), _nothing_changes(step):
            trial = _Trial(step, size, own_dtype=True)
            return not trial.gradients and not trial.replica.exchanges
    return False


def layers_of(operation):
    """The layers that run when an operation does, without those that a region inside runs."""
    if isinstance(operation, Whole):
        operation = operation.model
    if not isinstance(operation, keras.layers.Layer):
        return []
    inner = [] if _module(operation) == "tf_gradscale" else operation._flatten_layers(False, False)
    return [operation, *(found for layer in inner for found in layers_of(layer))]


def _runs_code_of_users(step):
    """Whether a step may run code that is not Keras' own: a `call`, or a function given to it."""
    operation = step.operation
    if isinstance(operation, Whole):
        return True
    if not isinstance(operation, keras.layers.Layer):
        arguments = keras.tree.flatten((step.args, step.kwargs))
        return _module(operation) not in _KNOWN or any(map(_is_function_of_users, arguments))
    return any(
        is_users_code(layer) or any(map(_is_function_of_users, list(vars(layer).values())))
        for layer in operation._flatten_layers()
    )


def _module(operation):
    # By its name, a class of a user's own that was converted in place is of this package.
    kind = type(operation)
    return getattr(kind, "call", kind).__module__.split(".")[0]


def _is_function_of_users(x):
    """Whether an attribute is an activation or the like that is not one of Keras'."""
    if not callable(x) or isinstance(x, (keras.Operation, type)):
        return False
    module = x.__module__ if hasattr(x, "__module__") else None
    return module is None or module.split(".")[0] not in _KNOWN


@contextlib.contextmanager
def _nothing_changes(step):
    """Updates and losses go nowhere."""
    scope = keras.StatelessScope(initialize_variables=False)
    with scope, call_context(None), plain_forward():
        yield


def _in_float32(step):
    return in_float32(layers_of(step.operation))


class _Replica(tf.distribute.ReplicaContext):
    """The only replica there is; notes whether anything is to be exchanged with others."""

    exchanges = False

    def merge_call(self, *args, **kwargs):
        self.exchanges = True
        return super().merge_call(*args, **kwargs)


class _Trial:
    """A step and its gradient in a graph of their own.

    Args:
        step: The `graph.Step`.
        size: What dimensions are taken for that are not known.
        own_dtype: Whether it is run in the dtypes in which the model runs it; else in float32.

    Attributes:
        gradients: Those of its inputs and variables; none, if all are TensorFlow's own.
    """

    def __init__(self, step, size, own_dtype=False):
        self.inputs = []
        self.replica = _Replica(tf.distribute.get_strategy(), 0)
        # Without a scope, variables are what they are stored as.
        unscoped = step if own_dtype else dataclasses.replace(step, autocast_dtype=None)
        variables = [variable_value(v) for v in getattr(step.operation, "trainable_variables", ())]

        def run():
            for tensor in step.inputs:
                shape = [size if n is None else n for n in tensor.shape]
                dtype = "float32" if tensor.is_float and not own_dtype else tensor.dtype
                self.inputs.append(tf.compat.v1.placeholder(dtype, shape))
            self.factor = tf.compat.v1.placeholder("float32", ())
            floats = [x for x in self.inputs if x.dtype.is_floating]
            with tf.GradientTape() as tape, self.replica:
                tape.watch(floats)
                ys = keras.tree.flatten(unscoped.call(self.inputs))
            if not _has_custom_gradient(tf.compat.v1.get_default_graph()):
                return []
            return self._gradients(tape, floats + variables, ys)

        self.function = tf.compat.v1.wrap_function(run, [])
        self.gradients = self.function.structured_outputs

    def _gradients(self, tape, sources, ys):
        ys = [y for y in ys if y.dtype.is_floating]
        dys = [
            tf.cast(tf.random.stateless_normal(tf.shape(y), [1, i]) * self.factor, y.dtype)
            for i, y in enumerate(ys)
        ]
        gradients = tape.gradient(ys, sources, output_gradients=dys)
        return [tf.convert_to_tensor(values(g)) for g in gradients if g is not None]

    def is_linear(self):
        """Whether multiplying ∇Y by powers of two does just that to all gradients."""
        if self.replica.exchanges:
            return False
        if not self.gradients:
            return True
        operations = self.function.graph.get_operations()
        reads = [op.outputs[0] for op in operations if op.type == "ReadVariableOp"]
        reads = [x for x in reads if x.dtype.is_floating]
        given = [x.numpy() for x in self.function.prune([], reads)()] if reads else []
        pruned = self.function.prune([*self.inputs, *reads, self.factor], self.gradients)
        if any(node.op.startswith(_WRITES) for node in _nodes(pruned.graph)):
            return False
        random = np.random.default_rng(0)
        tried = False
        for draw in (random.standard_normal, random.random):
            xs = [_drawn(draw, x) for x in self.inputs]
            # A variable that is zero at first, such as the gain of a branch, hides what is behind.
            weights = [np.where(v == 0, random.uniform(0.5, 1, v.shape), v) for v in given]
            fed = [*xs, *map(tf.constant, map(np.float32, weights))]
            base = self._run(pruned, fed, 0)
            if not all(np.all(np.isfinite(g)) for g in base):
                continue
            tried = True
            for exponent in _EXPONENTS:
                for g, wanted in zip(self._run(pruned, fed, exponent), base, strict=True):
                    bound = _TOLERANCE * np.abs(wanted).max(initial=0.0)
                    # As it is written, NaN is a difference.
                    if not np.all(np.abs(g - wanted) <= bound):
                        return False
        return tried

    def _run(self, pruned, fed, exponent):
        """The gradients with ∇Y multiplied by a power of two, divided by it."""
        gradients = pruned(*fed, tf.constant(2.0**exponent))
        return [g.numpy().astype("float64") * 2.0**-exponent for g in gradients]


def _drawn(draw, x):
    shape = tuple(x.shape)
    value = draw(shape) if x.dtype.is_floating else draw(shape) > 0.5
    return tf.cast(value, x.dtype)


def _nodes(graph):
    definition = graph.as_graph_def()
    return [*definition.node, *(n for f in definition.library.function for n in f.node_def)]


def _has_custom_gradient(graph):
    """Whether anything in a graph has a gradient that is not its operation's own."""
    # _gradient_op_type: how TensorFlow marks it; tests/test_platform.py notices if that changes.
    return any(
        "_gradient_op_type" in node.attr or node.op == "EagerPyFunc" for node in _nodes(graph)
    )
