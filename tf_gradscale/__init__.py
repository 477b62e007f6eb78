"""Gradient scaling: mixed-precision training of Keras models without a loss scale to tune."""

from tf_gradscale import callbacks, formats, layers, rules, theory
from tf_gradscale.config import GradScaleConfig
from tf_gradscale.conversion import convert, strip
from tf_gradscale.diagnosis import diagnose
from tf_gradscale.model import Model, Sequential
from tf_gradscale.optimizer import GradScaleOptimizer
from tf_gradscale.policy import policy_scope, set_global_policy
from tf_gradscale.registry import ScaleRegistry

__all__ = [
    "GradScaleConfig",
    "GradScaleOptimizer",
    "Model",
    "ScaleRegistry",
    "Sequential",
    "callbacks",
    "convert",
    "diagnose",
    "formats",
    "layers",
    "policy_scope",
    "rules",
    "set_global_policy",
    "strip",
    "theory",
]

__version__ = "0.1.0"
