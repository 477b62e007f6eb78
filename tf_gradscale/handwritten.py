"""Models whose `call`, `train_step` or other methods are written by hand, converted in place."""

import functools

import keras
import numpy as np
import tensorflow as tf

# keras.src: not exported; tests/test_platform.py notices if they go.
from keras.src.models.functional import Functional
from keras.src.saving import object_registration

from tf_gradscale.model import GradientScaling, check_layers, is_plain_forward, plain_forward
from tf_gradscale.region import Region
from tf_gradscale.tracing import trace_call


class InPlace(GradientScaling):
    """Mixed in before the class of a model with methods of its own."""

    def export(self, *args, **kwargs):
        """As `keras.Model.export`: only the plain forward graph is exported."""
        with plain_forward():
            return super(GradientScaling, self).export(*args, **kwargs)

    def get_compile_config(self):
        """That of the plain model, with the plain optimizer: Keras then scales the loss."""
        config = super().get_compile_config()
        if config and self.optimizer is not None:
            inner = self.optimizer.inner_optimizer
            config["optimizer"] = keras.saving.serialize_keras_object(inner)
        return config

    def get_config(self):
        """That of the plain model: saved, it is an instance of its own class."""
        return super(GradientScaling, self).get_config()


class Handwritten(InPlace):
    """Mixed in before the class of a model whose `call` is written by hand."""

    runs_its_graph = False

    def _set_up(self, config):
        super()._set_up(config)
        self._gradscale.region = Region(config)
        self._gradscale.warned = set()

    def _has_scales(self):
        return self._gradscale.region.scales.is_built

    def _region(self):
        if not self._has_scales():
            raise ValueError(
                f"Model '{self.name}' has a `call` of its own, and must be called on a batch "
                "before its scales are known. Call it once, or train it for a step. "
                "Received: a model that was never called"
            )
        return self._gradscale.region

    def plain_call(self, *args, **kwargs):
        """What its author wrote, on arguments cast as Keras would have."""
        args, kwargs = keras.tree.map_structure(self._converted, (args, kwargs))
        return super(GradientScaling, self).call(*args, **kwargs)

    def _converted(self, x):
        y = self.dtype_policy.convert_input(x, self.autocast, self.input_dtype)
        if getattr(x, "_keras_mask", None) is not None:
            y._keras_mask = x._keras_mask
        return y

    def scaled_call(self, *args, training=None, **kwargs):
        """The same, with its gradients scaled."""
        region = self._gradscale.region
        args, kwargs = keras.tree.map_structure(_as_tensor, (args, kwargs))
        flat = [x for x in keras.tree.flatten((args, kwargs)) if tf.is_tensor(x)]
        key = repr(keras.tree.map_structure(_description, (args, kwargs)))
        if key not in region:
            self._add_call(args, kwargs, key)
        return region(flat, training, key)

    def _add_call(self, args, kwargs, key):
        """Makes the graph of a call on arguments of this kind."""
        region = self._gradscale.region
        first = not region.scales.is_built
        if first and not tf.distribute.in_cross_replica_context() and _is_distributed():
            raise RuntimeError(
                f"Model '{self.name}' has a `call` of its own. Call it on one batch within "
                "`strategy.scope()` before `strategy.run`, so that its scales can be made. "
                "Received: a first call on a replica"
            )
        check_layers(self)
        args, kwargs = keras.tree.map_structure(_as_keras_tensor, (args, kwargs))
        # Graphs of their own are made to try out layers; none may be left in the model's.
        with tf.init_scope():
            region.add(
                functools.partial(trace_call, self, args, kwargs, warned=self._gradscale.warned),
                key,
            )
        if first and self.optimizer is not None:
            self.optimizer.attach(region.scales)

    def _symbolic_build(self, iterator=None, data_batch=None):
        # Keras calls it to build a model in the scope of its strategy, before it runs on replicas.
        if data_batch is not None:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data_batch)
            self(keras.tree.map_structure(tf.convert_to_tensor, x), training=False)
        super()._symbolic_build(iterator, data_batch)


def convert_in_place(model, config):
    """Gives a model a class that is gradient-scaled, and its own class otherwise."""
    kind = type(model)
    plain = kind.call is Functional.call or kind.call is keras.Sequential.call
    mixin = InPlace if plain else Handwritten
    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if not plain:
        members["call"] = _call_of(kind)
    if not plain:
        # As in a Functional model: arguments are cast inside, where their gradients are scaled.
        model._convert_input_args = False
        model._allow_non_tensor_positional_args = True
    # object.__setattr__: not a change of state that Keras would track.
    converted = type(kind.__name__, (mixin, kind), members)
    # GLOBAL_CUSTOM_NAMES: saved, it is of its own class, under the name it is registered by.
    if kind in object_registration.GLOBAL_CUSTOM_NAMES:
        name = object_registration.GLOBAL_CUSTOM_NAMES[kind]
        object_registration.GLOBAL_CUSTOM_NAMES[converted] = name
    object.__setattr__(model, "__class__", converted)
    model._set_up(config)
    # Its optimizer was chosen for a plain model.
    model.optimizer, model.compiled = None, False
    return model


def strip_in_place(model):
    """Gives a model back the class that it had."""
    if isinstance(model, Handwritten):
        model._convert_input_args = True
        model._allow_non_tensor_positional_args = False
    object.__setattr__(model, "__class__", type(model).__bases__[1])
    object.__delattr__(model, "_gradscale")
    return model


def _call_of(kind):
    """The `call` of a converted class: Keras looks at its signature."""

    @functools.wraps(kind.call)
    def call(self, *args, **kwargs):
        symbolic = any(isinstance(x, keras.KerasTensor) for x in keras.tree.flatten((args, kwargs)))
        if is_plain_forward() or symbolic:
            return self.plain_call(*args, **kwargs)
        return self.scaled_call(*args, **kwargs)

    return call


def _as_tensor(x):
    return tf.convert_to_tensor(x) if isinstance(x, np.ndarray) else x


def _description(x):
    if not tf.is_tensor(x):
        return repr(x)
    masked = " masked" if getattr(x, "_keras_mask", None) is not None else ""
    return f"{x.dtype.name}{_shape(x)}{masked}"


def _as_keras_tensor(x):
    if not tf.is_tensor(x):
        return x
    kt = keras.KerasTensor(_shape(x), x.dtype.name)
    mask = getattr(x, "_keras_mask", None)
    if mask is not None:
        kt._keras_mask = keras.KerasTensor(_shape(mask), mask.dtype.name)
    return kt


def _shape(x):
    """The static shape, but for the size of the batch."""
    return (None, *x.shape[1:]) if len(x.shape) else ()


def _is_distributed():
    return tf.distribute.get_strategy().num_replicas_in_sync > 1
