"""What a rule is: how one kind of operation runs forward, and how it carries ⟨α, ∇Y⟩ backward."""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

# Dtypes that hold any gradient as it is.
WIDE = ("float32", "float64")


class Scaled(NamedTuple):
    """The paper's 2-tuple ⟨α, ∇X⟩ (Section 4.1): the gradient is α times the true one.

    `log2_alpha`: scalar float32, integral. `gradient`: a tensor or `tf.IndexedSlices`. `inverse`:
    1/α. `origin`: the sites behind which the gradient was last scaled, which back off if it
    turns out not to be finite.
    """

    log2_alpha: tf.Tensor
    gradient: Any
    inverse: tf.Tensor
    origin: tuple = ()


class Rule:
    """How one step of the graph is run and differentiated.

    A rule is made once, when a model is converted, and reserves its sites then. `forward` runs
    the step and returns what `backward` needs; `backward` may be called any number of times.

    Args:
        step: The `graph.Step`.
        registry: The `ScaleRegistry` in which to reserve sites and factors.
    """

    # Whether `forward` replaces the layer's `__call__`, which would have passed masks along.
    direct = False
    # How the gradient of a cast of its inputs is distributed; `None` for the configured model.
    cast_model: str | None = None
    # Whether an entry of ∇X is a sum over many of ∇Y: however these are distributed, it is near to
    # normal. Else it may span as many binades as they do.
    sums = False

    def __init__(self, step, registry):
        self.step = step
        self.operation = step.operation

    def input_dtype(self):
        """The dtype to which float inputs are cast before `forward`, or `None` to leave them.

        A layer casts its inputs to its compute dtype, and `keras.ops` to that of their result. Done
        here instead, the gradient arrives before it is cast back, so that it can be scaled first.
        """
        operation = self.operation
        if isinstance(operation, keras.layers.Layer):
            is_float = "float" in operation.compute_dtype
            return operation.compute_dtype if operation.autocast and is_float else None
        if hasattr(operation, "compute_dtype"):
            return operation.compute_dtype
        made = {tensor.dtype for tensor in self.step.outputs}
        # NumPy's numbers are float64, and with them so is what `keras.ops` make of float16.
        return made.pop() if len(made) == 1 and made <= set(WIDE) else None

    def forward(self, inputs, call):
        """Runs the step.

        Args:
            inputs: The step's input tensors.
            call: Calls the operation as Keras would, on such a list of tensors.

        Returns:
            The output tensors, flat, and a record for `backward`.
        """
        raise NotImplementedError

    def run(self, inputs, call, ahead):
        """As `forward`, for a rule that measures what `backward` would have to keep for it.

        `ahead`: the `Ahead` of this forward pass.
        """
        return self.forward(inputs, call)

    def backward(self, record, upstream, walk):
        """Carries gradients from the step's outputs to its inputs.

        Args:
            record: What `forward` returned.
            upstream: For each output a `Scaled`, or `None` where no gradient arrives.
            walk: The `Walk` of this backward pass: chooses scales, collects variable gradients.

        Returns:
            For each input a `Scaled`, or `None` where no gradient flows.
        """
        raise NotImplementedError


# What a subclass may define anew without a change of what its `call` computes.
_HARMLESS = frozenset(
    "build compute_mask compute_output_shape compute_output_spec from_config get_build_config "
    "get_config build_from_config supports_masking".split()
)


def known_class(operation, table):
    """The class in a table that an operation is, or is a subclass of, unchanged; or `None`.

    A subclass that defines anew what its class has, such as a `call`, a `kernel` or a
    `convolution_op` of its own, computes something else.
    """
    between: list[type] = []
    for known in type(operation).__mro__:
        if known in table:
            names = {name for one in between for name in vars(one) if not name.startswith("__")}
            changed = {name for name in names - _HARMLESS if hasattr(known, name)}
            # Set on the instance itself.
            changed |= {"call", "convolution_op"} & set(vars(operation))
            return None if changed else known
        between.append(known)
    return None
