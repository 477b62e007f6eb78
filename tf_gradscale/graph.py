"""A Keras graph as a flat list of steps: what is traced, run forward and walked backward."""

import dataclasses
import inspect
from typing import Any

import keras

# keras.src: these classes are not exported; tests/test_platform.py notices if one goes.
from keras.src.backend import AutocastScope
from keras.src.models.functional import Functional

from tf_gradscale.attention import AttentionWeights
from tf_gradscale.moving import finite_statistics


@dataclasses.dataclass(eq=False)
class Tensor:
    """One tensor of the graph, as declared: a Keras tensor may stand for several, one a call.

    Attributes:
        shape: Its static shape, a tuple.
        dtype: Its name.
        weight: Whether it is made of variables alone.
        masked: Whether it is an input that must come with a mask.
        sparse: Whether it is a `tf.SparseTensor`.
    """

    shape: tuple
    dtype: str
    weight: bool = False
    masked: bool = False
    sparse: bool = False

    @property
    def is_float(self):
        """Whether a gradient can flow through it."""
        return "float" in self.dtype and not self.sparse


@dataclasses.dataclass(frozen=True)
class Slot:
    """Stands in a step's arguments for one of its inputs."""

    index: int


@dataclasses.dataclass(eq=False)
class Step:
    """One call of an operation.

    Attributes:
        operation: The `keras.Operation`, most often a layer.
        name: The layer's path within the model, unique.
        args: Its positional arguments, with a `Slot` for each tensor.
        kwargs: Its keyword arguments, likewise.
        inputs: The distinct tensors among the arguments, in order of appearance.
        outputs: The tensors it makes, in order.
        autocast_dtype: What the enclosing model casts variables to, or `None`.
        masks: By the index of an input, the tensor that is its mask within a composite.
        rule: How it is differentiated (`rules`).
        linear: Whether the layer's own activation is left to the graph's `head`.
        cast: Name of a cast that its output's gradient still has to go through, or `None`: the
            rule then does both at once.
        wide: Whether its output's gradient may span many binades, as behind a softmax.
    """

    operation: Any
    name: str
    args: tuple
    kwargs: dict
    inputs: list
    outputs: list
    autocast_dtype: str | None
    masks: dict = dataclasses.field(default_factory=dict)
    rule: Any = None
    linear: bool = False
    cast: str | None = None
    wide: bool = False

    def call(self, inputs, method=None):
        """Calls the operation on tensors, as the enclosing model would.

        Args:
            inputs: The tensors, in the order of the step's `inputs`.
            method: A method of the layer to run, in place of its `__call__`.

        Returns:
            Its outputs, as it returns them.
        """
        args, kwargs = keras.tree.map_structure(
            lambda x: inputs[x.index] if isinstance(x, Slot) else x, (self.args, self.kwargs)
        )
        if not isinstance(self.operation, keras.layers.Layer):
            with AutocastScope(self.autocast_dtype):
                return self.operation(*args, **kwargs)
        if method is None:
            with finite_statistics(self.operation):
                return self.operation(*args, **kwargs)
        accepted = inspect.signature(method).parameters
        mask = getattr(inputs[0], "_keras_mask", None)
        if mask is not None and "mask" in accepted:
            kwargs.setdefault("mask", mask)
        with finite_statistics(self.operation):
            return method(*args, **{name: x for name, x in kwargs.items() if name in accepted})

    def call_in_float32(self, inputs, method=None):
        """As `call`, but where the dtype of the result is an argument, with float32 in its place.

        What layers compute in is up to their policies (`policy.in_float32`).
        """
        return dataclasses.replace(self, operation=_in_float32(self.operation)).call(inputs, method)


def _in_float32(operation):
    """An operation that makes 16 bits of its inputs, as one that makes float32 of them."""
    if getattr(operation, "dtype", None) in ("float16", "bfloat16"):
        if isinstance(operation, AttentionWeights):
            return AttentionWeights(operation.is_causal, "float32")
        # `keras.ops.cast` exports no class.
        if type(operation).__name__ == "Cast":
            return type(operation)("float32")
    return operation


@dataclasses.dataclass(eq=False)
class Graph:
    """Steps in the order in which Keras runs them.

    Attributes:
        steps: A list of `Step`, topologically sorted.
        inputs: The tensors that go in, flat.
        outputs: The tensors that come out, flat; behind them losses that layers add.
        head: For each output, the activation that is applied to it outside, or `None`. There is
            one for each that the model returns, and none for losses.
        opened: Whether a composite was opened, whose inside saw only the masks of its arguments.
        structure: What the outputs are packed into, with a Keras tensor for each.
        told: Whether the code of a user was told of `training`, on which its operations may depend.
    """

    steps: list
    inputs: list
    outputs: list
    head: list
    opened: bool
    structure: Any
    told: bool

    def consumers(self):
        """By a tensor's id, who uses it: (step, input index) each, or an int for an output.

        Steps without outputs (they only set masks) do not count: no gradient comes from there.
        """
        users: dict[int, list] = {}
        for step in self.steps:
            for i, tensor in enumerate(step.inputs if step.outputs else ()):
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


def is_users_code(layer):
    """Whether a layer's `call` is neither Keras' own nor this package's."""
    return type(layer).call.__module__.split(".")[0] not in ("keras", "tf_gradscale")


def scope_dtype(layer):
    """The dtype to which a layer casts variables that are read in its `call`, or `None`."""
    return layer.compute_dtype if layer.compute_dtype != layer.variable_dtype else None
