"""Rules by kind of operation: the cases of Algorithm 1, as an open table."""

import keras

from tf_gradscale.linearity import is_linear
from tf_gradscale.losses import LossesOf
from tf_gradscale.rules.base import Rule, Scaled
from tf_gradscale.rules.bilinear import Bilinear
from tf_gradscale.rules.carry import AddedLosses, Carry, Measured, Outside, is_neutral
from tf_gradscale.rules.custom import Unscaled, UnscaledLosses
from tf_gradscale.rules.gemm import Gemm
from tf_gradscale.rules.normalization import Normalization
from tf_gradscale.rules.uniform import Uniform

__all__ = [
    "Bilinear",
    "Carry",
    "Gemm",
    "Measured",
    "Normalization",
    "Rule",
    "Scaled",
    "Uniform",
    "Unscaled",
    "register",
    "rule_for",
]

_DIRECT = (Gemm, Normalization)
_registered: dict[type, type] = {}


def register(layer_class, rule):
    """Has layers of a class differentiated by a rule of one's own.

    Args:
        layer_class: A `keras.layers.Layer` subclass; its own subclasses follow it.
        rule: A `Rule` subclass, made with the step and the registry.

    Raises:
        TypeError: If one of the two is not such a class.

    Example:

    >>> register(keras.layers.Rescaling, Measured)
    """
    if not (isinstance(layer_class, type) and issubclass(layer_class, keras.layers.Layer)):
        raise TypeError(f"`layer_class` must be a Keras layer class. Received: {layer_class!r}")
    if not (isinstance(rule, type) and issubclass(rule, Rule)):
        raise TypeError(
            "`rule` must be a subclass of tf_gradscale.rules.Rule, not an instance. "
            f"Received: {rule!r}"
        )
    _registered[layer_class] = rule


def is_registered(operation):
    """Whether a class of the operation has a rule of its user's own."""
    return any(known in _registered for known in type(operation).__mro__)


def replaces_call(operation):
    """Whether a layer is run by its rule, without what Keras does around its `call`."""
    return not is_registered(operation) and any(rule.takes(operation) for rule in _DIRECT)


def is_product(step):
    """Whether a step is differentiated by Theorem 1."""
    registered = is_registered(step.operation)
    return registered or Gemm.takes(step.operation) or Bilinear.takes(step)


def rule_for(step, registry):
    """Makes the rule of a step: a registered one, else the first of the table that takes it."""
    for known in type(step.operation).__mro__:
        if known in _registered:
            return _registered[known](step, registry)
    if isinstance(step.operation, LossesOf):
        linear = is_linear(step.operation.step)
        return (AddedLosses if linear else UnscaledLosses)(step, registry)
    if not any(tensor.is_float for tensor in step.outputs):
        return Outside(step, registry)
    if not is_linear(step):
        return Unscaled(step, registry)
    if any(tensor.sparse for tensor in step.inputs):
        return Carry(step, registry)
    if Bilinear.takes(step):
        return Bilinear(step, registry)
    for rule in _DIRECT:
        if rule.takes(step.operation):
            return rule(step, registry)
    if is_neutral(step):
        return Carry(step, registry)
    return (Uniform if Uniform.takes(step) else Measured)(step, registry)
