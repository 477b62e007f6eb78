"""The global dtype policy, and the configuration that goes with it."""

import contextlib
import threading

import keras

from tf_gradscale.config import GradScaleConfig


class _Default(threading.local):
    config = GradScaleConfig()


_default = _Default()

# Layers that run in float32 at the moment: how often that was asked for, and their own policy.
_held: dict[int, list] = {}


def default_config():
    """The `GradScaleConfig` that `convert` and `Model` use where none is given."""
    return _default.config


def set_global_policy(policy, config=None):
    """Sets Keras' dtype policy, and how gradients are scaled under it.

    Replaces `keras.mixed_precision.set_global_policy`.

    Args:
        policy: A name such as `"mixed_float16"`, or a `keras.dtype_policies.DTypePolicy`.
        config: A `GradScaleConfig` for models converted from now on; `None` for the defaults.

    Raises:
        ValueError: If the policy keeps weights in 16 bits, in which small updates are lost.
        TypeError: If `config` is not a `GradScaleConfig`.

    Example:

    >>> set_global_policy("mixed_float16")
    >>> keras.config.dtype_policy().compute_dtype
    'float16'
    >>> set_global_policy("float32")
    """
    policy = keras.dtype_policies.get(policy)
    if policy.variable_dtype != "float32":
        raise ValueError(
            "Weights must be float32: an update smaller than half a unit in the last place of a "
            f"16-bit weight is lost. Use the policy 'mixed_{policy.variable_dtype}' instead. "
            f"Received: policy={policy.name!r}"
        )
    _default.config = checked(config)
    keras.config.set_dtype_policy(policy)


@contextlib.contextmanager
def policy_scope(policy, config=None):
    """`set_global_policy` for the length of a `with` block.

    Args:
        policy: As in `set_global_policy`.
        config: As in `set_global_policy`.

    Example:

    >>> with policy_scope("mixed_float16"):
    ...     layer = keras.layers.Dense(2)
    >>> layer.compute_dtype, keras.config.dtype_policy().name
    ('float16', 'float32')
    """
    before = keras.config.dtype_policy(), _default.config
    set_global_policy(policy, config)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before[0])
        _default.config = before[1]


@contextlib.contextmanager
def in_float32(layers):
    """Within this scope, layers that compute in 16 bits compute in float32.

    Replicas run their layers in turns, so that one may enter while another is inside: the last
    one to leave restores the policies.

    Args:
        layers: Keras layers; those inside them are to be named too.
    """
    chosen = {id(layer): layer for layer in layers}
    for key, layer in chosen.items():
        if key in _held:
            _held[key][0] += 1
        elif layer.compute_dtype in ("float16", "bfloat16"):
            # _dtype_policy: not by the setter, which could quantize; tests/test_platform.py.
            _held[key] = [1, layer._dtype_policy]
            vars(layer)["_dtype_policy"] = keras.DTypePolicy("float32")
    held = [key for key in chosen if key in _held]
    try:
        yield
    finally:
        for key in held:
            _held[key][0] -= 1
            if not _held[key][0]:
                vars(chosen[key])["_dtype_policy"] = _held.pop(key)[1]


def checked(config):
    """`config`, from its serialized form if need be, or the defaults for `None`."""
    if isinstance(config, dict):
        config = keras.saving.deserialize_keras_object(config)
    if config is None:
        return GradScaleConfig()
    if not isinstance(config, GradScaleConfig):
        raise TypeError(f"`config` must be a GradScaleConfig or None. Received: config={config!r}")
    return config
