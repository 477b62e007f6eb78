"""Every operation that needs no scale of its own, or one that is measured."""

import keras
import tensorflow as tf

# keras.src: AutocastScope is not exported; tests/test_platform.py notices if it goes.
from keras.src.backend import AutocastScope

from tf_gradscale.counters import as_kept
from tf_gradscale.inner import Expression, Whole
from tf_gradscale.registry import variable_value
from tf_gradscale.rules.base import WIDE, Rule
from tf_gradscale.tensors import cast, is_dense_float, multiply, values


class Outside(Rule):
    """An operation on masks, indices and the like, to which no gradient comes."""

    def forward(self, inputs, call):
        return keras.tree.flatten(call(inputs)), None

    def backward(self, record, upstream, walk):
        return [None] * len(self.step.inputs)


class Carry(Rule):
    """Passes α through (line 20 of Algorithm 1).

    Backpropagation is linear in ∇Y, so any operation is right with ⟨α, vjp(∇Y)⟩; the gradients
    of variables are divided by α in float32. An operation with several outputs first brings
    their gradients to one scale (splitting, lines 15 to 18). The gradient of a float32 output of
    what computes in float16 will be cast inside, and is scaled before.
    """

    def __init__(self, step, registry):
        super().__init__(step, registry)
        self.casts = [None] * len(step.outputs)
        self.narrow = _computes_in(step.operation, registry.config.gradient_dtype)
        for i, tensor in enumerate(step.outputs):
            if self.narrow and tensor.dtype in WIDE:
                label = (
                    f"{step.name}/output" if len(step.outputs) == 1 else f"{step.name}/output_{i}"
                )
                self.casts[i] = registry.add_group([(label, "cast")], 2)
        self.split = None
        if len(step.outputs) > 1:
            names = [(f"{step.name}/split", "split")]
            self.split = registry.add_group(names, len(step.outputs) + 1)

    def forward(self, inputs, call):
        floats = list(filter(is_dense_float, inputs))
        with tf.GradientTape(persistent=True) as tape:
            for x in floats:
                tape.watch(x)
            outputs = keras.tree.flatten(call(inputs))
        return outputs, (inputs, tape, outputs)

    def backward(self, record, upstream, walk):
        inputs, tape, outputs = record
        upstream = [
            pair if pair is None or group is None else self._cast(group, pair, tensor.dtype, walk)
            for group, pair, tensor in zip(self.casts, upstream, self.step.outputs, strict=True)
        ]
        pair = self._join(upstream, walk)
        ys = [y for y, dy in zip(outputs, upstream, strict=True) if dy is not None]
        xs = list(filter(is_dense_float, inputs))
        variables = list(getattr(self.operation, "trainable_variables", []))
        sources = [variable_value(v) for v in variables]
        pair, dxs, dvs = self._scaled_vjp(tape, ys, xs, sources, pair, walk)
        for variable, gradient in zip(variables, dvs, strict=True):
            if gradient is not None:
                walk.add(variable, gradient, pair.inverse)
        made = iter(dxs)
        dxs = [next(made) if is_dense_float(x) else None for x in inputs]
        return [None if dx is None else pair._replace(gradient=dx) for dx in dxs]

    def _cast(self, group, pair, dtype, walk):
        """Scales a gradient so that it fits into the dtype in which the step computes."""
        config = walk.registry.config
        model, kept = config.cast_model, config.gradient_dtype
        return walk.cast(group, pair, dtype, self.step, model, kept)

    def _join(self, upstream, walk):
        """Algorithm 1's splitting: one pair whose gradient is the list of those of the outputs."""
        indices = [i for i, pair in enumerate(upstream) if pair is not None]
        present = [upstream[i] for i in indices]
        if len(present) == 1:
            return present[0]._replace(gradient=[present[0].gradient])
        return walk.join(self.split, indices, present, self.step, summed=False)

    def _scaled_vjp(self, tape, ys, xs, variables, pair, walk):
        """⟨α, vjp(∇Y)⟩: the pair, the gradients of `xs` and those of `variables`."""
        is_layer = isinstance(self.operation, keras.layers.Layer)
        # A rematerialized layer runs its `call` once more, and must find variables as before.
        with AutocastScope(self.input_dtype() if is_layer else self.step.autocast_dtype):
            gradients = tape.gradient(ys, xs + variables, output_gradients=pair.gradient)
        return pair, gradients[: len(xs)], gradients[len(xs) :]


class Measured(Carry):
    """An operation that shrinks or grows gradients, by how much is measured.

    ⟨αβ, vjp(β∇Y)⟩. In an updating pass β comes from a trial with β = 1; λ_min is as far below
    the result as λ_max is above it. Not in the paper, which passes the gradient through: a mean
    over 336 positions alone takes 8 of float16's binades.
    """

    def __init__(self, step, registry):
        super().__init__(step, registry)
        self.group = registry.add_group([(f"{step.name}/input", "measured")], 2)

    def _scaled_vjp(self, tape, ys, xs, variables, pair, walk):
        if not xs or not walk.chooser.placement.balanced:
            return self._declared_vjp(tape, ys, xs, variables, pair, walk)
        dys = pair.gradient

        def vjp(pair):
            return self._declared_vjp(tape, ys, xs, variables, pair, walk)

        chosen = self._choose(xs, ys, pair, walk, vjp)
        scaled = [multiply(dy, chosen.factors[0]) for dy in dys]
        found = vjp(chosen.scaled(0, scaled, self.group.sites))

        def made():
            _, *results = found
            dxs, dvs = ([values(g) for g in gs if g is not None] for gs in results)
            kept = dxs or dvs
            return [(as_kept(kept, scaled), kept)]

        walk.count(self.group, made)
        return found

    def _choose(self, xs, ys, pair, walk, vjp):
        """What `Walk.decide` returns; `vjp`: the step's, of a pair."""
        alpha, dys = pair.log2_alpha, pair.gradient

        def measure(*state):
            _, *trial = vjp(pair)
            dxs, dvs = ([values(g) for g in gs if g is not None] for gs in trial)
            return walk.chooser.measured(dxs or dvs or dys, dys, dvs, alpha, *state)

        return self._decide(pair, walk, measure, trial=True)

    def _decide(self, pair, walk, measure, trial=False):
        def keep(*state):
            return walk.chooser.unmeasured(pair.log2_alpha, *state, sites=1)

        dtype = self.gradient_dtype(pair.gradient)
        return walk.decide(self.group, [pair], self.step, dtype, measure, keep, trial=trial)

    def gradient_dtype(self, dys):
        """The dtype in which gradients are kept where β takes effect."""
        return self.narrow or dys[0].dtype

    def _declared_vjp(self, *args):
        """The vjp in the dtypes that TensorFlow declares: XLA's bilinear resizing makes float32."""
        pair, dxs, dvs = super()._scaled_vjp(*args)
        dxs = [None if dx is None else cast(cast(dx, tf.float32), dx.dtype) for dx in dxs]
        return pair, dxs, dvs


class AddedLosses(Measured):
    """The losses that a layer added when it ran, of which its own step keeps the record."""

    def input_dtype(self):
        """None: its inputs are those of the layer's step, as they are."""
        return None

    def gradient_dtype(self, dys):
        """The layer's: a loss may be float32, what it is made of is not."""
        return self.operation.compute_dtype

    def record_of(self, record, losses):
        """What `backward` needs: the record of the layer's step, with its losses for outputs."""
        inputs, tape, _ = record
        return inputs, tape, losses


def _computes_in(operation, dtype):
    """The dtype, if an operation that is not one of `keras.ops` computes in it, else `None`."""
    if isinstance(operation, Expression):
        return dtype if dtype in operation.dtypes else None
    runs_layers = isinstance(operation, (keras.layers.Layer, Whole))
    return dtype if runs_layers and operation.compute_dtype == dtype else None


def is_neutral(step):
    """Whether an operation neither shrinks nor grows gradients much: it needs no measurement."""
    operation = step.operation
    if isinstance(operation, NEUTRAL_LAYERS):
        return not getattr(operation, "layers", None)
    if getattr(operation, "is_neutral", False):
        return True
    # A broadcast operand's gradient is a sum over all places it went to.
    same = len({tensor.shape for tensor in step.inputs if tensor.is_float}) <= 1
    name = type(operation).__name__
    return name in NEUTRAL_OPS and is_keras_op(operation) and (same or name not in ELEMENTWISE)


def is_keras_op(operation):
    """Whether an operation is one of `keras.ops`."""
    return type(operation).__module__.startswith("keras.src.ops.")


_layers = keras.layers
NEUTRAL_LAYERS = (
    _layers.Activation,
    _layers.ReLU,
    _layers.LeakyReLU,
    _layers.ELU,
    _layers.PReLU,
    _layers.Softmax,
    _layers.Dropout,
    _layers.AlphaDropout,
    _layers.GaussianDropout,
    _layers.SpatialDropout1D,
    _layers.SpatialDropout2D,
    _layers.SpatialDropout3D,
    _layers.GaussianNoise,
    _layers.Flatten,
    _layers.Reshape,
    _layers.Permute,
    _layers.RepeatVector,
    _layers.Cropping1D,
    _layers.Cropping2D,
    _layers.Cropping3D,
    _layers.ZeroPadding1D,
    _layers.ZeroPadding2D,
    _layers.ZeroPadding3D,
    _layers.MaxPooling1D,
    _layers.MaxPooling2D,
    _layers.MaxPooling3D,
    _layers.GlobalMaxPooling1D,
    _layers.GlobalMaxPooling2D,
    _layers.GlobalMaxPooling3D,
    _layers.Concatenate,
    _layers.Add,
    _layers.Subtract,
    _layers.Maximum,
    _layers.Minimum,
    _layers.Masking,
    _layers.Embedding,
    _layers.Identity,
)
# keras.ops by class name: the classes are not exported.
ELEMENTWISE = frozenset("Add Subtract Maximum Minimum Where".split())
NEUTRAL_OPS = frozenset(
    "Relu Relu6 LeakyRelu Elu Selu Gelu Silu Softplus Tanh Sigmoid Softmax LogSoftmax HardTanh "
    "HardSigmoid Add Subtract Negative Maximum Minimum Absolute Concatenate Stack Split Unstack "
    "Reshape Transpose Ravel ExpandDims Squeeze Flip Roll Pad GetItem MaxPool Identity Where "
    "StopGradient Swapaxes Moveaxis BroadcastTo".split()
)
