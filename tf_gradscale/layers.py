"""A gradient-scaled layer, for use inside any Keras model."""

import functools
import types

import keras

from tf_gradscale.export import is_plain_forward, plain_forward
from tf_gradscale.graph import function_of, scope_dtype
from tf_gradscale.model import check_layers, unpacked
from tf_gradscale.policy import checked, default_config
from tf_gradscale.region import Region
from tf_gradscale.tracing import trace


@keras.saving.register_keras_serializable(package="tf_gradscale")
class GradientScaled(keras.layers.Layer):
    """A layer, or a graph of layers, whose backward pass is gradient-scaled.

    A closed region inside a model of one's own: it computes what the wrapped layer computes, and
    exchanges float32 values and gradients of true magnitude with what is around it. `gs.convert`
    does the same for a whole model and needs no change of it.

    Args:
        layer: A Keras layer that takes one tensor, or a Functional or Sequential model.
        config: A `GradScaleConfig`; by default the one of `set_global_policy`.
        **kwargs: As for `keras.layers.Layer`.

    Input shape:
        As of `layer`.

    Output shape:
        As of `layer`; float outputs are float32.

    Raises:
        TypeError: If `layer` is no Keras layer, or `config` no `GradScaleConfig`.
        ValueError: If the layer keeps its weights in 16 bits.

    Example:

    >>> with policy_scope("mixed_float16"):
    ...     layer = GradientScaled(keras.layers.Dense(64))
    >>> y = layer(np.ones((2, 8), "float32"))
    >>> y.dtype.name, [site.name for site in layer.scales]
    ('float32', ['output', 'dense/kernel', 'dense/input'])
    """

    def __init__(self, layer, config=None, **kwargs):
        if not isinstance(layer, keras.layers.Layer):
            raise TypeError(
                "`layer` must be a Keras layer, or a Functional or Sequential model. "
                f"Received: layer={layer!r}"
            )
        # What flows in and out is float32; the wrapped layer keeps its own policy.
        kwargs.setdefault("dtype", "float32")
        super().__init__(**kwargs)
        self.layer = layer
        self.config = default_config() if config is None else checked(config)
        self.supports_masking = True

    def build(self, input_shape):
        """Builds the wrapped layer and its region."""
        function = function_of(self.layer)
        if function is None:
            shapes = keras.tree.map_shape_structure(
                lambda shape: keras.Input(batch_shape=shape), input_shape
            )
            function = keras.Model(shapes, self.layer(shapes))
        check_layers(self.layer)
        # The region's scales are no weights of the layer. Neither tracked by Keras nor a container,
        # which saving would walk into.
        traced = functools.partial(trace, function, scope_dtype(self.layer), warned=set())
        region = Region(self.config)
        region.add(traced)
        state = types.SimpleNamespace(function=function, region=region)
        object.__setattr__(self, "_scaling", state)
        super().build(input_shape)

    @property
    def scales(self):
        """The `ScaleRegistry`."""
        return self._scaling.region.scales

    def call(self, inputs, training=None):
        """Runs the wrapped layer."""
        if is_plain_forward():
            # A converted model inside is not the outermost one, which has float32 outputs.
            with plain_forward():
                outputs = self._scaling.function(inputs, training=training)
            return keras.tree.map_structure(_to_float32, outputs)
        outputs = self._scaling.region(keras.tree.flatten(inputs), training)
        # As a Functional model: a single output comes without the list around it.
        return unpacked(outputs)

    def compute_output_spec(self, inputs, training=None):
        """The wrapped layer's, in float32."""
        spec = self._scaling.function.compute_output_spec(inputs)
        return keras.tree.map_structure(
            lambda kt: keras.KerasTensor(kt.shape, "float32" if "float" in kt.dtype else kt.dtype),
            spec,
        )

    def get_config(self):
        """The arguments, serialized."""
        return {
            **super().get_config(),
            "layer": keras.saving.serialize_keras_object(self.layer),
            "config": keras.saving.serialize_keras_object(self.config),
        }

    @classmethod
    def from_config(cls, config):
        """The layer that `get_config` described."""
        config = dict(config)
        config["layer"] = keras.saving.deserialize_keras_object(config["layer"])
        return cls(**config)


def _to_float32(x):
    return keras.ops.cast(x, "float32") if x.dtype.is_floating else x
