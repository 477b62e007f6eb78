"""Models whose `call`, `train_step` or other methods are written by hand, converted in place."""

import functools
import inspect

import keras
import numpy as np
import tensorflow as tf

# keras.src: not exported; tests/test_platform.py notices if they go.
from keras.src.models.functional import Functional
from keras.src.saving import object_registration

from tf_gradscale.export import is_plain_forward, plainly
from tf_gradscale.model import GradientScaling, check_layers
from tf_gradscale.policy import checked
from tf_gradscale.region import Region, making_graphs
from tf_gradscale.tracing import trace_call


@keras.saving.register_keras_serializable(package="tf_gradscale")
class InPlace(GradientScaling):
    """Mixed in before the class of a model with methods of its own."""

    def get_config(self):
        """How the plain model is made, and what it was converted with."""
        converted = type(self)
        object.__setattr__(self, "__class__", converted.__bases__[1])
        try:
            model = keras.saving.serialize_keras_object(self)
        finally:
            object.__setattr__(self, "__class__", converted)
        model.pop("compile_config", None)
        return {
            "model": model,
            "config": keras.saving.serialize_keras_object(self.config),
            "first_call": _serialized(self._gradscale.first_call),
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """The converted model that `get_config` described."""
        model = keras.saving.deserialize_keras_object(config["model"], custom_objects)
        model = convert_in_place(model, checked(config["config"]))
        model._gradscale.first_call = _deserialized(config["first_call"])
        return model

    def _set_up(self, config):
        super()._set_up(config)
        self._gradscale.first_call = None


class Handwritten(InPlace):
    """Mixed in before the class of a model whose `call` is written by hand."""

    runs_its_graph = False

    def _set_up(self, config):
        super()._set_up(config)
        self._gradscale.region = Region(config)
        self._gradscale.warned = set()
        self._gradscale.signature = None

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

    def export(
        self, filepath, format="tf_saved_model", verbose=None, input_signature=None, **kwargs
    ):
        """As `keras.Model.export`: the plain forward graph, with float32 inputs and outputs.

        By default `input_signature` is what the model was first called on, with floats in float32
        and for batches of any size.

        Raises:
            ValueError: If the model was never called, and `input_signature` is `None`.
        """
        if input_signature is None:
            input_signature = self._input_signature()
        super().export(filepath, format, verbose, input_signature, **kwargs)

    @property
    def _default_save_signature(self):
        # What `tf.saved_model.save` serves; Keras' own takes 16-bit inputs and one size of batch.
        def serving_default(inputs, *others):
            self._input_signature()
            return self(inputs, *others)

        # An error that is raised here TensorFlow swallows; one in the function it does not.
        signature = self._gradscale.signature or [tf.TensorSpec(())]
        return tf.function(serving_default, input_signature=signature, autograph=False)

    def _input_signature(self):
        if self._gradscale.signature is None:
            raise ValueError(
                f"Model '{self.name}' has a `call` of its own, and must be called on a batch "
                "before it is exported, or be given an `input_signature`. "
                "Received: a model that was never called"
            )
        return self._gradscale.signature

    def _note_signature(self, arguments):
        """Keeps what the model was first called on: a specification for each argument."""
        arguments = keras.tree.map_structure(_as_tensor, arguments)
        given = [x for x in arguments if any(map(tf.is_tensor, keras.tree.flatten(x)))]
        self._gradscale.signature = keras.tree.map_structure(_spec, given)

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
        key = _key(args, kwargs)
        with making_graphs:
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
        if first:
            self._gradscale.first_call = args, kwargs
            if self.optimizer is not None:
                self.optimizer.attach(region.scales)

    def compile_from_config(self, config):
        """As `Model`'s; the scales are made anew, so that their state can be loaded."""
        if self.built and self._gradscale.first_call is not None and not self._has_scales():
            args, kwargs = self._gradscale.first_call
            self._add_call(args, kwargs, _key(args, kwargs))
        super().compile_from_config(config)

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
    # Keras looks for the class of a file in its module: let it name this package.
    members = {"__module__": __name__, "__qualname__": kind.__qualname__}
    if not plain:
        members["call"] = _call_of(kind)
    if not plain:
        # As in a Functional model: arguments are cast inside, where their gradients are scaled.
        model._convert_input_args = False
        model._allow_non_tensor_positional_args = True
    # object.__setattr__: not a change of state that Keras would track.
    converted = type(kind.__name__, (mixin, kind), members)
    # GLOBAL_CUSTOM_NAMES: by this name Keras finds, in a file, what makes the model anew.
    object_registration.GLOBAL_CUSTOM_NAMES[converted] = keras.saving.get_registered_name(InPlace)
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
    # Its optimizer was chosen for a scaled model.
    model.optimizer, model.compiled = None, False
    object.__setattr__(model, "__class__", type(model).__bases__[1])
    object.__delattr__(model, "_gradscale")
    return model


def _call_of(kind):
    """The `call` of a converted class: Keras looks at its signature."""

    signature = inspect.signature(kind.call)
    names = list(signature.parameters)[1:]

    @functools.wraps(kind.call)
    def call(self, *args, **kwargs):
        if any(isinstance(x, keras.KerasTensor) for x in keras.tree.flatten((args, kwargs))):
            return self.plain_call(*args, **kwargs)
        if self._gradscale.signature is None:
            arguments = signature.bind(self, *args, **kwargs).arguments
            self._note_signature(list(arguments.values())[1:])
        if is_plain_forward():
            return plainly(self.plain_call, *args, **kwargs)
        if "training" in names[: len(args)]:
            # `scaled_call` takes it by name, and so what follows it.
            first = names.index("training")
            kwargs = {**dict(zip(names[first:], args[first:], strict=False)), **kwargs}
            args = args[:first]
        return self.scaled_call(*args, **kwargs)

    return call


def _as_tensor(x):
    return tf.convert_to_tensor(x) if isinstance(x, np.ndarray) else x


def _key(args, kwargs):
    """What tells kinds of calls apart: the arguments, with dtypes and shapes of tensors."""
    return repr(keras.tree.map_structure(_description, (args, kwargs)))


def _description(x):
    if not _is_tensor(x):
        return repr(x)
    masked = " masked" if getattr(x, "_keras_mask", None) is not None else ""
    return f"{keras.backend.standardize_dtype(x.dtype)}{_shape(x)}{masked}"


def _is_tensor(x):
    return tf.is_tensor(x) or isinstance(x, keras.KerasTensor)


def _serialized(call):
    """A call's arguments, and which of the tensors among them have masks."""
    if call is None:
        return None
    tensors = [x for x in keras.tree.flatten(call) if isinstance(x, keras.KerasTensor)]
    masks = [getattr(x, "_keras_mask", None) for x in tensors]
    return keras.saving.serialize_keras_object({"call": call, "masks": masks})


def _deserialized(config):
    if config is None:
        return None
    found = keras.saving.deserialize_keras_object(config)
    args, kwargs = found["call"]
    call = tuple(args), kwargs
    tensors = [x for x in keras.tree.flatten(call) if isinstance(x, keras.KerasTensor)]
    for x, mask in zip(tensors, found["masks"], strict=True):
        if mask is not None:
            x._keras_mask = mask
    return call


def _spec(x):
    """What an exported model takes in the place of a tensor."""
    if not tf.is_tensor(x):
        return x
    return tf.TensorSpec(_shape(x), tf.float32 if x.dtype.is_floating else x.dtype)


def _as_keras_tensor(x):
    if not tf.is_tensor(x) or isinstance(x, keras.KerasTensor):
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
