"""From plain Keras models to gradient-scaled ones, and back."""

import keras

# keras.src: not exported; tests/test_platform.py notices if it goes.
from keras.src.models.functional import Functional

from tf_gradscale.graph import function_of
from tf_gradscale.handwritten import convert_in_place, strip_in_place
from tf_gradscale.layers import GradientScaled
from tf_gradscale.model import GradientScaling, Model, Sequential, check_layers
from tf_gradscale.policy import checked, default_config, dtype_policy_kept


def convert(model, config=None):
    """The same model with a gradient-scaled backward pass.

    Layers, weights and names are shared with `model`, not copied, and so are `summary()`, saved
    weights and predictions. The new model is not compiled.

    A model of a class of one's own, with a `call`, `train_step` or anything else written by hand,
    is converted in place and returned: it stays an instance of that class. Its `call` is opened
    into the layers and `keras.ops` it applies when it is first called on data.

    Args:
        model: A `keras.Model`. Models and layers inside are scaled throughout.
        config: A `GradScaleConfig`; by default the one of `set_global_policy`.

    Returns:
        A `Model` or a `Sequential` of this package; or `model` itself.

    Raises:
        TypeError: If `model` is no Keras model, has no `call`, or is gradient-scaled already.
        ValueError: If a layer keeps its weights in 16 bits, or a Sequential is not built.

    Warns:
        UserWarning: If a layer inside cannot be opened; says what stopped it.

    Example:

    >>> model = convert(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))
    >>> type(model).__name__, len(model.weights)
    ('Sequential', 2)
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`convert` takes a keras.Model. For a single layer, use "
            f"tf_gradscale.layers.GradientScaled(layer). Received: {model!r}"
        )
    if isinstance(model, GradientScaling):
        raise TypeError(
            f"Model '{model.name}' is gradient-scaled already; use it as it is, or "
            "`convert(strip(model), config)` for another configuration. "
            f"Received: a {type(model).__name__}"
        )
    config = default_config() if config is None else checked(config)
    # Where the model was made: each of its replicas has scales of its own.
    with model.distribute_strategy.scope():
        return _converted(model, config)


def _converted(model, config):
    kind = type(model)
    if kind is keras.Sequential:
        # Checked first: an unbuilt Sequential has nothing to convert.
        if function_of(model) is None:
            raise ValueError(
                f"Model '{model.name}' must know its input shape: start it with a keras.Input, "
                "or call `build`, before `convert`. Received: an unbuilt Sequential"
            )
        converted = Sequential(model._layers, model.trainable, model.name, config)
    elif kind is Functional:
        # Its graph is made at once, and depends on what the model casts variables to.
        with dtype_policy_kept():
            keras.config.set_dtype_policy(model.dtype_policy)
            converted = Model(
                model._inputs_struct, model._outputs_struct, name=model.name, config=config
            )
    elif kind.call in (keras.Model.call, keras.layers.Layer.call):
        raise TypeError(
            f"Model '{model.name}' has no `call`, so that there is nothing to differentiate. "
            "Convert the models that it trains before it is made of them. "
            f"Received: a {kind.__name__}"
        )
    else:
        check_layers(model)
        return convert_in_place(model, config)
    converted.dtype_policy = model.dtype_policy
    converted.scales  # noqa: B018  (makes the region now, so that errors come now)
    return converted


def strip(model):
    """The plain Keras model: same layers, same weights, Keras' own backward pass.

    Args:
        model: A model made by `convert`, `Model` or `Sequential` of this package, or a Functional
            or Sequential one of Keras with such models or `GradientScaled` layers inside.

    Returns:
        A `keras.Model` (a `keras.Sequential` for a Sequential), not compiled, with plain models
        and layers inside as well. A model that was converted in place is given back its own class,
        and returned.

    Raises:
        TypeError: If the model is not gradient-scaled.
        ValueError: If a layer holds a scaled model where `strip` cannot take it out.

    Example:

    >>> model = convert(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))
    >>> type(strip(model)) is keras.Sequential
    True
    """
    scaled = isinstance(model, GradientScaling)
    if scaled and not isinstance(model, (Model, Sequential)):
        return strip_in_place(model)
    plain = None
    if isinstance(model, keras.Sequential):
        plain = keras.Sequential(model._layers, model.trainable, model.name)
    elif isinstance(model, Functional):
        plain = keras.Model(model._inputs_struct, model._outputs_struct, name=model.name)
    if plain is not None:
        plain.dtype_policy = model.dtype_policy
        stripped = _strip_inside(plain)
        if scaled or stripped is not plain:
            return stripped
    raise TypeError(
        "`strip` takes a model made by tf_gradscale.convert or tf_gradscale.Model. "
        f"Received: {model!r}"
    )


def _strip_inside(model):
    """The same without gradient-scaled models and layers inside; `model` itself if there are none.

    Those converted in place are let be: saved, they are of their own class.
    """

    def plain_layer(layer):
        if isinstance(layer, (Model, Sequential)):
            return strip(layer)
        if isinstance(layer, GradientScaled):
            return plain_layer(layer.layer)
        return _strip_inside(layer) if type(layer) in (Functional, keras.Sequential) else layer

    if not _scaled_inside(model):
        return model
    # The same layers, called once more.
    plain = keras.models.clone_model(model, clone_function=plain_layer)
    plain.dtype_policy = model.dtype_policy
    left = _scaled_inside(plain)
    if left:
        raise ValueError(
            "`strip` takes gradient-scaled models out of models, not out of layers that hold them, "
            "such as TimeDistributed. Give such a layer the plain model, and convert the model "
            f"around it. Received: '{left[0].name}' within another layer of '{model.name}'"
        )
    return plain


def _scaled_inside(model):
    scaled = (Model, Sequential, GradientScaled)
    inside = model._flatten_layers(include_self=False)
    return [layer for layer in inside if isinstance(layer, scaled)]
