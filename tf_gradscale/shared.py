"""Functions that are traced once and shared by all layers and models."""

import tensorflow as tf

# tensorflow.python: not exported; tests/test_platform.py notices if it goes.
from tensorflow.python.eager import record

from tf_gradscale.xla import under_xla


class Shared:
    """A graph function for each combination of dtypes, ranks and Python arguments.

    Not inlined, so that it is traced and optimized once, not once a layer. What it returns is a
    constant to whoever differentiates twice: scales are undone, whatever they are.

    Args:
        function: Takes tensors, or lists of tensors, by position and Python values by keyword.
    """

    def __init__(self, function):
        self._function = function
        self._traces = {}

    def __call__(self, *args, **static):
        tensors = tf.nest.flatten(args)
        key = _key(args, tensors, static)
        if key not in self._traces:
            self._traces[key] = _traced(_flat(self._function, args, static), tensors)
        with record.stop_recording():
            return self._traces[key](*tensors)


class Part:
    """A function within shared ones, which XLA reads once for all that call it with equal shapes.

    It reads what a layer's operations are anew for each layer, at a tenth of a millisecond each,
    but for calls. Elsewhere a call would cost more than what is called, which is run in place.

    Args:
        function: As in `Shared`.
    """

    def __init__(self, function):
        self._function, self._shared = function, Shared(function)

    def __call__(self, *args, **static):
        return (self._shared if under_xla() else self._function)(*args, **static)


class SharedIf:
    """A condition, of which both branches are shared: `function`, or one of the arguments.

    One operation: `tf.cond` in a function of its own would cost two in every step, and `tf.cond`
    itself would trace its branches once a layer.

    Args:
        function: As in `Shared`. Returns a float32 tensor.
        other: Which tensor of the flattened arguments is returned otherwise, an index.
    """

    def __init__(self, function, other):
        self._function, self._other = function, other
        self._traces = {}

    def __call__(self, predicate, *args, **static):
        tensors = tf.nest.flatten(args)
        key = _key(args, tensors, static)
        if key not in self._traces:
            branches = _flat(self._function, args, static), self._identity
            self._traces[key] = [_traced(branch, tensors) for branch in branches]
        then, otherwise = self._traces[key]
        with record.stop_recording():
            # Takes concrete functions as well as what it documents (tests/test_platform.py).
            (made,) = tf.raw_ops.StatelessIf(
                cond=predicate,
                input=tensors,
                Tout=[tf.float32],
                then_branch=then,
                else_branch=otherwise,
            )
            return tf.stop_gradient(made)

    def _identity(self, *flat):
        return tf.identity(flat[self._other])


def _key(args, tensors, static):
    kinds = tuple((t.dtype, t.shape.rank) for t in tensors)
    lengths = tuple(len(a) if isinstance(a, list) else None for a in args)
    return under_xla(), lengths, kinds, tuple(sorted(static.items()))


def _flat(function, args, static):
    """The function, of a flat list of tensors."""
    # The structure alone: a tensor would keep the whole graph of its model alive.
    structure = tf.nest.map_structure(lambda _: None, args)

    def run(*flat):
        made = function(*tf.nest.pack_sequence_as(structure, flat), **static)
        # For those who differentiate the finished graph; a tape does not see the call.
        return tf.nest.map_structure(tf.stop_gradient, made)

    return run


def _traced(function, tensors):
    return tf.function(
        function,
        input_signature=[_any_size(t) for t in tensors],
        autograph=False,
        experimental_attributes={"_noinline": True},
    ).get_concrete_function()


def _any_size(tensor):
    rank = tensor.shape.rank
    return tf.TensorSpec(None if rank is None else [None] * rank, tensor.dtype)
