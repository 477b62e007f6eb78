"""Functions that are traced once and shared by all layers and models."""

import tensorflow as tf

# tensorflow.python: not exported; tests/test_platform.py notices if it goes.
from tensorflow.python.eager import record


class Shared:
    """A graph function for each combination of dtypes and Python arguments, whatever the ranks.

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
        dtypes = tuple(t.dtype for t in tensors)
        lengths = tuple(len(a) if isinstance(a, list) else None for a in args)
        key = (lengths, dtypes, tuple(sorted(static.items())))
        if key not in self._traces:
            # The structure alone: a tensor would keep the whole graph of its model alive.
            structure = tf.nest.map_structure(lambda _: None, args)

            def run(*flat):
                made = self._function(*tf.nest.pack_sequence_as(structure, flat), **static)
                # For those who differentiate the finished graph; a tape does not see the call.
                return tf.nest.map_structure(tf.stop_gradient, made)

            self._traces[key] = tf.function(
                run,
                input_signature=[tf.TensorSpec(None, dtype) for dtype in dtypes],
                autograph=False,
                experimental_attributes={"_noinline": True},
            ).get_concrete_function()
        with record.stop_recording():
            return self._traces[key](*tensors)
