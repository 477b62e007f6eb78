"""Keras models whose backward pass is gradient-scaled."""

import functools
import types

import keras
import tensorflow as tf

# keras.src: not exported; tests/test_platform.py notices if it goes.
from tf_gradscale.export import exporting, is_plain_forward, plain_forward, plainly
from tf_gradscale.graph import function_of, scope_dtype
from tf_gradscale.optimizer import GradScaleOptimizer
from tf_gradscale.policy import checked, default_config
from tf_gradscale.region import Region, making_graphs
from tf_gradscale.registry import autocast_off
from tf_gradscale.tracing import trace


class GradientScaling:
    """What makes a Functional or Sequential model gradient-scaled; mixed in before its class."""

    # Whether `call` does nothing but run the graph of a Functional or Sequential model.
    runs_its_graph = True

    def _set_up(self, config):
        # Neither tracked by Keras nor a container, which saving would walk into.
        state = types.SimpleNamespace(config=config, function=None, region=None)
        object.__setattr__(self, "_gradscale", state)

    @property
    def config(self):
        """The `GradScaleConfig`."""
        return self._gradscale.config

    @property
    def scales(self):
        """The `ScaleRegistry` of the model."""
        return self._region().scales

    def _has_scales(self):
        return True

    def _region(self):
        """The region, made anew if layers were added since."""
        function = function_of(self)
        if function is None:
            raise ValueError(
                f"Model '{self.name}' must know its input shape before its gradients can be "
                "scaled. Start it with a keras.Input, or build it. Received: an unbuilt Sequential"
            )
        if self._gradscale.function is not function:
            with making_graphs:
                self._make_region(function)
        return self._gradscale.region

    def _make_region(self, function):
        state = self._gradscale
        if state.function is not function:
            check_layers(self)
            region = Region(self.config)
            region.add(functools.partial(trace, function, scope_dtype(self), warned=set()))
            state.region, state.function = region, function

    def call(self, inputs, training=None, mask=None, **kwargs):
        if is_plain_forward():
            return plainly(super().call, inputs, training=training, mask=mask, **kwargs)
        function = function_of(self)
        if function is None:
            return super().call(inputs, training=training, mask=mask, **kwargs)
        flat = function._standardize_inputs(inputs)
        for x, one in zip(flat, keras.tree.flatten(mask) if mask is not None else [], strict=False):
            if one is not None:
                x._keras_mask = one
        return unpacked(self._region()(flat, training))

    def compile(self, optimizer="rmsprop", *args, **kwargs):
        """As `keras.Model.compile`; the optimizer is wrapped in `GradScaleOptimizer`."""
        optimizer = keras.optimizers.get(optimizer)
        if optimizer is not None and not isinstance(optimizer, GradScaleOptimizer):
            optimizer = GradScaleOptimizer(optimizer)
        if optimizer is not None and self._has_scales():
            optimizer.attach(self.scales)
        super().compile(optimizer, *args, **kwargs)

    def compile_from_config(self, config):
        """As `keras.Model`'s, which does nothing where `compile` is overridden."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built and self._has_scales():
            self.optimizer.build(self.trainable_variables)

    def load_weights(self, filepath, *args, **kwargs):
        """As `keras.Model.load_weights`, with the optimizer's state if the model is compiled."""
        if self.compiled and self.optimizer is not None and self.built:
            if not self._has_scales():
                raise ValueError(
                    f"Model '{self.name}' has a `call` of its own, and must be called on a batch "
                    "before its optimizer's state is loaded, or its weights be loaded before "
                    "`compile`. Received: a compiled model that was never called"
                )
            self.optimizer.build(self.trainable_variables)
        super().load_weights(filepath, *args, **kwargs)

    def _aggregate_additional_loss(self, loss):
        # A float16 layer's, in evaluation: Keras would add it to one of float32, and fail.
        if loss.dtype in (tf.float16, tf.bfloat16):
            loss = tf.cast(loss, tf.float32)
        return super()._aggregate_additional_loss(loss)

    def make_train_function(self, force=False):
        """As `keras.Model`'s; it stops when nothing but skipped steps happens."""
        if self.train_function is not None and not force:
            return self.train_function
        super().make_train_function(force)
        if isinstance(self.optimizer, GradScaleOptimizer):
            # guard builds on this module.
            from tf_gradscale.guard import Guard

            self.train_function = Guard(self, self.train_function)
        return self.train_function

    def test_step(self, data):
        with plain_forward():
            return super().test_step(data)

    def predict_step(self, data):
        with plain_forward():
            return super().predict_step(data)

    def export(self, *args, **kwargs):
        """As `keras.Model.export`: the plain forward graph, with float32 outputs."""
        with exporting():
            return super().export(*args, **kwargs)

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        # What `tf.saved_model.save` writes: nothing that only training needs, such as the scales.
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "savedmodel":
            children.pop("optimizer", None)
        return children

    def get_config(self):
        return {**super().get_config(), "config": keras.saving.serialize_keras_object(self.config)}


@keras.saving.register_keras_serializable(package="tf_gradscale")
class Model(GradientScaling, keras.Model):
    """A functional Keras model with a gradient-scaled backward pass.

    Built like `keras.Model(inputs, outputs)`, and like it a base class for models with their own
    `train_step`. Its forward pass is Keras' own, bit for bit; when it is differentiated, whatever
    `training` is, the gradients of variables and inputs are computed in the layers' 16-bit format
    with a scale for each gradient tensor, and leave with their true magnitude in float32.

    Args:
        inputs: Input tensors from `keras.Input`, in any structure.
        outputs: Output tensors.
        name: Name of the model.
        config: A `GradScaleConfig`; by default the one of `set_global_policy`.
        **kwargs: As for `keras.Model`.

    Raises:
        TypeError: If inputs and outputs are missing (a subclassed model), or `config` is none.
        ValueError: If a layer keeps its weights in 16 bits.

    Example:

    >>> inputs = keras.Input((4,))
    >>> model = Model(inputs, keras.layers.Dense(2)(inputs))
    >>> model.compile("sgd", "mse")
    >>> _ = model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)

    Reference:
        Zhao et al., *Reducing Underflow in Mixed Precision Training by Gradient Scaling*,
        IJCAI 2020.
    """

    # Spelled so because Keras saves and revives the graph of a class of one's own only if its
    # constructor looks like that of its Functional model, which differs from version to version.
    def __init__(self, *args, config=None, **kwargs):
        given = {**dict(zip(("inputs", "outputs"), args, strict=False)), **kwargs}
        inputs, outputs = given.get("inputs"), given.get("outputs")
        if inputs is None or outputs is None:
            raise TypeError(
                f"{type(self).__name__} needs `inputs` and `outputs`, made with keras.Input and "
                "layers: a model whose `call` is written by hand cannot be scaled. Build it in "
                "the functional style, or wrap its parts in tf_gradscale.layers.GradientScaled. "
                f"Received: inputs={inputs}, outputs={outputs}"
            )
        config = default_config() if config is None else checked(config)
        super().__init__(*args, **kwargs)
        self._set_up(config)
        self._region()


@keras.saving.register_keras_serializable(package="tf_gradscale")
class Sequential(GradientScaling, keras.Sequential):
    """A `keras.Sequential` with a gradient-scaled backward pass; see `Model`.

    Args:
        layers: List of layers.
        trainable: Whether the model's variables are trainable.
        name: Name of the model.
        config: A `GradScaleConfig`; by default the one of `set_global_policy`.
    """

    def __init__(self, layers=None, trainable=True, name=None, config=None):
        self._set_up(default_config() if config is None else checked(config))
        super().__init__(layers, trainable=trainable, name=name)

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        scaling = checked(config.pop("config"))
        model = super().from_config(config, custom_objects=custom_objects)
        model._set_up(scaling)
        return model


def unpacked(outputs):
    """A single output without the list around it, as Functional models return it."""
    single = isinstance(outputs, (list, tuple)) and len(outputs) == 1
    return outputs[0] if single else outputs


def check_layers(model):
    """Refuses layers that keep weights in 16 bits: an update smaller than half a unit is lost."""
    # Inner layers first, so that the one to be changed is named and not the model around it.
    for layer in reversed(list(model._flatten_layers())):
        for variable in layer.trainable_variables:
            # `variable.dtype` would be what it is cast to, within a layer's call and in this scope.
            with autocast_off():
                dtype = variable.value.dtype.name
            if dtype in ("float16", "bfloat16"):
                raise ValueError(
                    f"Layer '{layer.name}' keeps its weights in {dtype}, in which small updates "
                    "are lost; weights must be float32. Give the layer "
                    f'dtype="mixed_{dtype}" instead of dtype="{dtype}". '
                    f"Received: variable '{variable.path}' of dtype {dtype}"
                )
