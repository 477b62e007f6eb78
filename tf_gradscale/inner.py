"""What an opened composite does besides calling layers and `keras.ops`, as operations."""

import keras
import tensorflow as tf

from tf_gradscale.registry import variable_value


class Read:
    """A variable that a composite uses itself, as its operations get it.

    Args:
        variable: A `keras.Variable`.
        dtype: What the composite casts it to.
    """

    is_neutral = True

    def __init__(self, variable, dtype):
        self.variables = [variable]
        self.dtype = dtype

    @property
    def trainable_variables(self):
        """The variable, unless it is frozen."""
        return [variable for variable in self.variables if variable.trainable]

    def __call__(self):
        return tf.cast(variable_value(self.variables[0]), self.dtype)


class Expression:
    """A tensor that a composite computes from variables or shapes, such as a transposed kernel.

    Args:
        tensor: The tensor, in the scratch graph in which the composite was opened.
        opened: The `opening.Opened`.

    Attributes:
        arguments: The variables that it is computed from; dimensions as (Keras tensor, axis).
        dtypes: Names of all dtypes on the way.
    """

    def __init__(self, tensor, opened):
        needed, waiting = set(), [tensor.op]
        self.dtypes = set()
        while waiting:
            made_by = waiting.pop()
            if made_by.name not in needed:
                needed.add(made_by.name)
                self.dtypes |= {x.dtype.name for x in made_by.outputs}
                waiting += [x.op for x in made_by.inputs] + list(made_by.control_inputs)
        definition = opened.graph.as_graph_def()
        kept = [node for node in definition.node if node.name in needed]
        del definition.node[:]
        definition.node.extend(kept)
        names = [node.name for node in kept if node.name in opened.reads]
        self.arguments = [opened.reads[name] for name in names]

        def evaluate(*values):
            (result,) = tf.graph_util.import_graph_def(
                definition,
                input_map={f"{name}:0": x for name, x in zip(names, values, strict=True)},
                return_elements=[tensor.name],
                name="weights",
            )
            return result

        self._evaluate = tf.function(evaluate, autograph=False)

    def __call__(self, *values):
        return self._evaluate(*values)


class DimensionOf:
    """A dimension of a tensor.

    Args:
        axis: Which one.
    """

    def __init__(self, axis):
        self._axis = axis

    def __call__(self, x):
        return tf.shape(x)[self._axis]


class Whole:
    """The call of a model that could not be opened, without what Keras does around it.

    Args:
        model: A `keras.Model`.
    """

    def __init__(self, model):
        self.model = model
        self.compute_dtype = model.compute_dtype

    @property
    def variables(self):
        """All variables of the model."""
        return self.model.variables

    @property
    def trainable_variables(self):
        """Those of them that are trained."""
        return self.model.trainable_variables

    def __call__(self, *args, **kwargs):
        outputs = keras.tree.flatten(self.model.plain_call(*args, **kwargs))
        return [y for y in outputs if y is not None]


class MaskOf:
    """The mask that goes with a tensor."""

    def __call__(self, x):
        mask = getattr(x, "_keras_mask", None)
        if mask is None:
            raise ValueError(
                "The model was made with a mask on this tensor, and must be called with one. "
                f"Received: {x} without a mask"
            )
        return mask


class SetMask:
    """Gives a tensor the mask that a composite gave its output."""

    def __call__(self, x, mask):
        x._keras_mask = mask
        return []


class ClearMask:
    """Takes away the mask that a composite took from its argument."""

    def __call__(self, x):
        x._keras_mask = None
        return []
