"""What happens to every tensor in one step: where numbers are lost, and where they break."""

import contextlib
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_gradscale import formats
from tf_gradscale.model import GradientScaling
from tf_gradscale.observer import Observer
from tf_gradscale.policy import in_float32
from tf_gradscale.tensors import is_dense_float


class Row(NamedTuple):
    """One tensor or variable of a training step.

    Attributes:
        name: The layer's path, with a number if it has several outputs; a variable's path.
        largest: Largest magnitude of the tensor itself, among its finite entries.
        broken: Share of its entries that are not finite.
        zeros: Share of the gradient's entries that are zero.
        lost: Share of those that are not zero in float32 which are zero here; NaN where float32's
            gradient is not known.
        subnormals: Share of the non-zero entries below the format's smallest normal number.
        nonfinite: Share of the gradient's entries that are not finite.
        smallest, greatest: Range of the true gradient's non-zero magnitudes, scale undone.
        log2_scale: log2 of the cumulative scale α that the gradient carried; dimensionless.

    Where no gradient came, its fields are NaN.
    """

    name: str
    largest: float
    broken: float
    zeros: float = np.nan
    lost: float = np.nan
    subnormals: float = np.nan
    nonfinite: float = np.nan
    smallest: float = np.nan
    greatest: float = np.nan
    log2_scale: float = np.nan


class Fault(NamedTuple):
    """The first tensor that is not finite: `name`, and what made it.

    `made_by`: `"given"` (inputs, targets, weights), `"forward"`, `"loss"` or `"backward"`.
    """

    name: str
    made_by: str

    def __str__(self):
        return {
            "given": f"{self.name}, before the step began",
            "forward": f"the output of '{self.name}', made by the forward pass",
            "loss": "the loss, though the model's outputs are finite",
            "backward": f"the gradient of '{self.name}', made by the backward pass",
        }[self.made_by]


class Diagnosis:
    """One training step, tensor by tensor; printed, it is a table.

    Attributes:
        loss: The loss, a float.
        tensors: List of `Row`, in the order in which the forward pass makes them.
        variables: List of `Row`, one for each trainable variable.
        fault: The `Fault`, or `None` if all gradients are finite.
        note: Why float32's gradients are not known, or `None`.
    """

    def __init__(self, loss, tensors, variables, fault, note=None):
        self.loss, self.tensors, self.variables = loss, tensors, variables
        self.fault, self.note = fault, note

    def __str__(self):
        rows = [*self.tensors, *self.variables]
        width = max([len(row.name) for row in rows] + [len("tensor")])
        lines = [
            f"{'tensor':<{width}} {'value':^16}   {'gradient':^52}",
            f"{'':<{width}} {'largest':>8} {'broken':>7}   {'scale':>6} {'zero':>7} {'lost':>7} "
            f"{'subnorm':>7} {'broken':>7} {'smallest':>9} {'greatest':>9}",
        ]
        lines += [_line(row, width) for row in self.tensors]
        lines.append("-" * len(lines[1]))
        lines += [_line(row, width) for row in self.variables]
        lines.append(f"Loss: {self.loss:.6g}.")
        if self.note:
            lines.append(f"Lost entries are not known: {self.note}")
        what = "none" if self.fault is None else str(self.fault)
        lines.append(f"First tensor that is not finite: {what}.")
        return "\n".join(lines)

    __repr__ = __str__


def diagnose(model, x, y=None, sample_weight=None):
    """Runs one training step and prints what happened to every tensor.

    The step is run eagerly in the scales that the model has now, and once more in float32 to
    compare with. Nothing changes: weights, scales, statistics, seeds and metrics are put back.
    Dropout and noise are left out, which would differ between the two.

    Args:
        model: A compiled, gradient-scaled model.
        x: A batch of inputs, as for `fit`.
        y: Its targets.
        sample_weight: Weights of the examples.

    Returns:
        The `Diagnosis`.

    Raises:
        TypeError: If the model is not gradient-scaled.
        ValueError: If it is not compiled, or without a loss.

    Example:

    >>> model = convert(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))
    >>> model.compile("sgd", "mse")
    >>> diagnosis = diagnose(model, np.ones((8, 4)), np.full((8, 2), np.inf))  # doctest: +ELLIPSIS
    tensor ...
    First tensor that is not finite: the loss, though the model's outputs are finite.
    """
    if not isinstance(model, GradientScaling):
        raise TypeError(
            "`diagnose` takes a model made by tf_gradscale.convert or tf_gradscale.Model. "
            f"Received: {model!r}"
        )
    if not model.compiled:
        raise ValueError(
            f"Model '{model.name}' must be compiled with the loss it is trained with, before it "
            "is diagnosed. Received: a model that is not compiled"
        )
    diagnosis = examine(model, x, y, sample_weight)
    print(diagnosis)
    return diagnosis


def examine(model, x, y=None, sample_weight=None):
    """`diagnose` without printing."""
    x, y, sample_weight = keras.tree.map_structure(
        lambda a: a if a is None or isinstance(a, tf.SparseTensor) else tf.convert_to_tensor(a),
        (x, y, sample_weight),
    )
    with _unchanged(model), _without_noise(model):
        if not model._has_scales():
            model(x, training=True)
    with _unchanged(model), _without_noise(model):
        ours = Observer(plain=False)
        loss, gradients = _step(model, x, y, sample_weight, ours)
    true, note = Observer(plain=True), None
    try:
        layers = list(model._flatten_layers())
        with _unchanged(model), _without_noise(model), in_float32(layers):
            _, truth = _step(model, x, y, sample_weight, true)
    except Exception as error:  # a model may hold code that runs in its own dtype alone
        truth, note = [None] * (len(true.outputs) + len(gradients)), f"{type(error).__name__}"
        note = f"the model cannot be run in float32 ({note})"
    by_tensor = dict(zip(true.outputs, truth, strict=False))
    tensors = [
        _row(model, name, value, ours.gradients.get(key), by_tensor.get(key))
        for key, (name, value) in ours.outputs.items()
    ]
    variables = [
        _row(model, v.path, v.value, _only(ours.variables.get(id(v))), g)
        for v, g in zip(model.trainable_variables, truth[len(true.outputs) :], strict=True)
    ]
    fault = None
    if not np.isfinite(loss) or not all(map(_is_finite, gradients)):
        given = {"the inputs": x, "the targets": y, "the sample weights": sample_weight}
        given.update({f"the variable '{v.path}'": v.value for v in model.trainable_variables})
        fault = _fault(given, tensors, ours, loss)
    return Diagnosis(loss, tensors, variables, fault, note)


def _step(model, x, y, sample_weight, observer):
    """One forward and backward pass: the loss, and gradients of all tensors and variables."""
    region = model._gradscale.region
    region.observer = observer
    try:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([a for a in keras.tree.flatten(x) if is_dense_float(a)])
            y_pred = model(x, training=True)
            loss = _loss(model, x, y, y_pred, sample_weight)
        seen = [value for _, value in observer.outputs.values()] if observer.plain else []
        variables = [v.value for v in model.trainable_variables]
        gradients = tape.gradient(loss, seen + variables)
    finally:
        region.observer = None
    return float(loss), [None if g is None else tf.convert_to_tensor(g) for g in gradients]


def _loss(model, x, y, y_pred, sample_weight):
    try:
        return model.compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
        )
    except ValueError as error:
        if "No loss to compute" not in str(error):
            raise
        raise ValueError(
            f"Model '{model.name}' must have a loss to be diagnosed: what a `train_step` of one's "
            "own computes is not known. Compile it with a loss, or give the class a "
            "`compute_loss`. Received: a model without a loss"
        ) from error


def _only(found):
    """What a variable was given, if it was given one gradient."""
    return found[0] if found is not None and len(found) == 1 else None


def _row(model, name, value, given, truth):
    value = np.abs(_numpy(value))
    finite = np.isfinite(value)
    row = Row(name, float(value[finite].max(initial=0.0)), 1.0 - _share(finite))
    if given is None:
        return row
    gradient, inverse = given
    gradient = np.abs(_numpy(tf.convert_to_tensor(gradient)))
    smallest = formats.get(model.config.gradient_dtype).smallest("normal")
    nonzero = gradient > 0
    true = nonzero & np.isfinite(gradient)
    lost = np.nan
    if truth is not None:
        there = _numpy(truth) != 0
        lost = _share(gradient[there] == 0)
    return row._replace(
        zeros=_share(gradient == 0),
        lost=lost,
        subnormals=_share(gradient[true] < smallest),
        nonfinite=_share(~np.isfinite(gradient)),
        smallest=float(gradient[true].min(initial=np.inf) * inverse) if true.any() else np.nan,
        greatest=float(gradient[true].max(initial=0.0) * inverse) if true.any() else np.nan,
        log2_scale=float(np.log2(1.0 / inverse)),
    )


def _fault(given, tensors, ours, loss):
    """The first tensor that is not finite: in the order of the forward pass, then of the other."""
    for name, structure in given.items():
        if not all(map(_is_finite, keras.tree.flatten(structure))):
            return Fault(name, "given")
    for row in tensors:
        if row.broken:
            return Fault(row.name, "forward")
    if not np.isfinite(loss):
        return Fault("loss", "loss")
    for key, (gradient, _) in ours.gradients.items():
        if not _is_finite(gradient):
            return Fault(ours.outputs[key][0], "backward")
    return Fault("variables", "backward")


def _is_finite(x):
    if isinstance(x, tf.SparseTensor):
        x = x.values
    if x is None or not x.dtype.is_floating:
        return True
    return bool(tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(x))))


def _numpy(x):
    return tf.cast(x, tf.float64).numpy()


def _share(mask):
    return float(np.mean(mask)) if mask.size else 0.0


def _line(row, width):
    def share(x):
        return "" if np.isnan(x) else "0" if x == 0 else f"{100 * x:.3g} %"

    def number(x):
        return "" if np.isnan(x) else f"{x:.2g}"

    scale = "" if np.isnan(row.log2_scale) else f"2^{row.log2_scale:.0f}"
    return (
        f"{row.name:<{width}} {number(row.largest):>8} {share(row.broken):>7}   {scale:>6} "
        f"{share(row.zeros):>7} {share(row.lost):>7} {share(row.subnormals):>7} "
        f"{share(row.nonfinite):>7} {number(row.smallest):>9} {number(row.greatest):>9}"
    ).rstrip()


@contextlib.contextmanager
def _unchanged(model):
    """Puts all variables back: statistics, seeds, metrics and scales."""
    variables = {id(v): v for v in [*model.variables, *model.metrics_variables]}
    if model._has_scales():
        variables.update({id(v): v for v in model.scales.variables})
    before = [(v, tf.identity(v.value)) for v in variables.values()]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


@contextlib.contextmanager
def _without_noise(model):
    """Sets the rates of dropout and noise to zero."""
    names = ("rate", "stddev", "dropout", "recurrent_dropout")
    found = [
        (layer, name, vars(layer)[name])
        for layer in model._flatten_layers()
        for name in names
        if isinstance(vars(layer).get(name), (int, float))
    ]
    for layer, name, _ in found:
        vars(layer)[name] = 0.0
    try:
        yield
    finally:
        for layer, name, value in found:
            vars(layer)[name] = value
