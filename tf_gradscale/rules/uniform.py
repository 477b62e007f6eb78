"""Operations that multiply every gradient by one number, which is known."""

import math

import keras
import tensorflow as tf

from tf_gradscale.estimate import size
from tf_gradscale.graph import Slot
from tf_gradscale.rules.base import known_class
from tf_gradscale.rules.carry import Measured, is_keras_op


class Uniform(Measured):
    """An operation each entry of whose ∇X is one of ∇Y times a constant c, as of a mean.

    ⟨αβ, vjp(β∇Y)⟩ as for `Measured`; but how ∇X is distributed is known from ∇Y and c, without a
    trial.
    """

    def __init__(self, step, registry):
        super().__init__(step, registry)
        self.constant = _constant(step)

    @classmethod
    def takes(cls, step):
        """Whether a step is such an operation."""
        return _is_mean(step.operation) or _constant(step) is not None

    def _choose(self, xs, ys, pair, walk, vjp):
        # A mean over what a mask leaves of a sequence has a constant for each sequence.
        if getattr(xs[0], "_keras_mask", None) is not None or len(self.step.inputs) > 1:
            return super()._choose(xs, ys, pair, walk, vjp)
        mean = self.constant is None
        c = size(ys[0]) / size(xs[0]) if mean else tf.constant(self.constant)
        (dy,) = pair.gradient

        def measure(*state):
            return walk.chooser.uniform(dy, walk.hidden(c), pair.log2_alpha, *state)

        return self._decide(pair, walk, measure)


_MEANS = (
    keras.layers.GlobalAveragePooling1D,
    keras.layers.GlobalAveragePooling2D,
    keras.layers.GlobalAveragePooling3D,
)
# keras.ops by class name, for the classes are not exported: c of `operation(x, number)`.
_BY_A_NUMBER = {
    "Multiply": lambda number: number,
    "Divide": lambda number: 1 / number,
    "TrueDivide": lambda number: 1 / number,
}


def _is_mean(operation):
    if is_keras_op(operation):
        return type(operation).__name__ == "Mean"
    return known_class(operation, _MEANS) is not None


def _constant(step):
    """|c|, if it can be told from the step alone, else `None`."""
    operation = step.operation
    name = type(operation).__name__
    c = None
    if known_class(operation, (keras.layers.Rescaling,)):
        c = operation.scale
    elif is_keras_op(operation) and name == "Sum":
        c = 1
    elif is_keras_op(operation) and name in _BY_A_NUMBER and len(step.args) == 2:
        numbers = [x for x in step.args if isinstance(x, (int, float)) and x != 0]
        if numbers and (name == "Multiply" or isinstance(step.args[0], Slot)):
            c = _BY_A_NUMBER[name](*numbers)
    known = isinstance(c, (int, float)) and 0 < abs(c) < math.inf
    return float(abs(c)) if known else None
