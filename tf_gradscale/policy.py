"""The global dtype policy, and the configuration that goes with it."""

import collections
import contextlib
import threading

import keras

from tf_gradscale.config import GradScaleConfig


class _Default(threading.local):
    config = GradScaleConfig()


_default = _Default()
_lock = threading.Lock()


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
    before = _default.config
    try:
        with dtype_policy_kept():
            set_global_policy(policy, config)
            yield
    finally:
        _default.config = before


@contextlib.contextmanager
def dtype_policy_kept():
    """Puts back Keras' global dtype policy at its end."""
    before = keras.config.dtype_policy()
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


@contextlib.contextmanager
def in_float32(layers):
    """Within this scope, in this thread, layers that compute in 16 bits compute in float32.

    Args:
        layers: Keras layers; those inside them are to be named too.
    """
    # _dtype_policy: not by its setter, which could quantize; tests/test_platform.py.
    held = []
    try:
        for layer in {id(layer): layer for layer in layers}.values():
            with _lock:
                policy = layer._dtype_policy
                if type(policy) is not _InFloat32:
                    if layer.compute_dtype not in ("float16", "bfloat16"):
                        continue
                    policy = _InFloat32(policy, layer.path)
                    vars(layer)["_dtype_policy"] = policy
                policy.threads[threading.get_ident()] += 1
                held.append((layer, policy))
        yield
    finally:
        for layer, policy in held:
            with _lock:
                policy.threads[threading.get_ident()] -= 1
                if not policy.threads.total():
                    vars(layer)["_dtype_policy"] = policy.own


class _InFloat32(keras.DTypePolicy):
    """The policy of a layer that some threads run in float32; in all others it is its own.

    Another thread may run the same layer: replicas take turns, and a model may predict while it is
    converted, or trained.

    Args:
        own: The layer's own policy.
        path: The layer's path, by which it finds its policy if `own` holds those of many.
    """

    def __init__(self, own, path):
        self.own = own
        self.threads = collections.Counter()
        self._of_layer = own[path] if isinstance(own, keras.dtype_policies.DTypePolicyMap) else own

    def _current(self):
        return _FLOAT32 if self.threads[threading.get_ident()] else self._of_layer

    # What another thread saves meanwhile has the layer's own policy.
    __class__ = property(lambda self: type(self._current()))
    name = property(lambda self: self._current().name)
    compute_dtype = property(lambda self: self._current().compute_dtype)
    variable_dtype = property(lambda self: self._current().variable_dtype)
    quantization_mode = property(lambda self: self._current().quantization_mode)

    def get_config(self):
        """That of the policy it is in this thread."""
        return self._current().get_config()

    def __eq__(self, other):
        return self._current() == other

    def __repr__(self):
        return repr(self._current())


_FLOAT32 = keras.DTypePolicy("float32")


def checked(config):
    """`config`, from its serialized form if need be, or the defaults for `None`."""
    if isinstance(config, dict):
        config = keras.saving.deserialize_keras_object(config)
    if config is None:
        return GradScaleConfig()
    if not isinstance(config, GradScaleConfig):
        raise TypeError(f"`config` must be a GradScaleConfig or None. Received: config={config!r}")
    return config
