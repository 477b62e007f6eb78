"""f_G of two activations: a scale for the gradient of each operand."""

import math

import keras
import tensorflow as tf

from tf_gradscale.graph import Slot
from tf_gradscale.linearity import layers_of
from tf_gradscale.policy import in_float32
from tf_gradscale.rules.base import Rule


class Bilinear(Rule):
    """A product of two tensors, such as queries with keys.

    Backward: ⟨αβ_A, f_G(∇Y, β_A·B)⟩ and ⟨αβ_B, f_G(β_B·A, ∇Y)⟩, each β by Theorem 1, each
    multiplied into the other operand. N, the number of products summed into one entry of ∇A, is
    the number of all products over the number of entries of A.
    """

    sums = True

    def __init__(self, step, registry):
        super().__init__(step, registry)
        names = [(f"{step.name}/{operand}", "gemm") for operand in ("a", "b")]
        self.group = registry.add_group(names, 4)
        self.products = PRODUCTS[_name(step.operation)]
        self._layers = layers_of(step.operation)
        # A weight's gradient is a coherent sum over a batch, larger than that of random terms.
        self.weights = tuple(tensor.weight for tensor in step.inputs)

    @classmethod
    def takes(cls, step):
        """Whether a step is a product of two different tensors."""
        if _name(step.operation) not in PRODUCTS or len(step.inputs) != 2:
            return False
        # An einsum may take one of the two twice.
        arguments = keras.tree.flatten((step.args, step.kwargs))
        operands = [x for x in arguments if isinstance(x, Slot)]
        return len(operands) == 2 and all(tensor.is_float for tensor in step.inputs)

    def forward(self, inputs, call):
        def product(a, b):
            return keras.tree.flatten(call([a, b]))[0]

        with tf.GradientTape(persistent=True) as tape:
            tape.watch(inputs)
            y = product(*inputs)
        return [y], (inputs, product, y)

    def backward(self, record, upstream, walk):
        (a, b), product, y = record
        pair = upstream[0]
        alpha, dy = pair.log2_alpha, pair.gradient

        def measure(*state):
            count = walk.hidden(self.products(self.step, a, b, y))
            return walk.chooser.bilinear(dy, a, b, count, alpha, *state, weights=self.weights)

        def keep(*state):
            return walk.chooser.unmeasured(alpha, *state, sites=2)

        chosen = walk.decide(self.group, [pair], self.step, y.dtype, measure, keep)
        beta_a, beta_b = chosen.factors
        scaled = _times(a, beta_b), _times(b, beta_a)
        da, db = _vjps(product, scaled, dy)

        def made():
            exact = [tf.cast(x, tf.float32) for x in (*scaled, dy)]
            with in_float32(self._layers):
                exact = _vjps(product, exact[:2], exact[2])
            return list(zip(exact, (da, db), strict=True))

        walk.count(self.group, made)
        return [chosen.scaled(i, (da, db)[i], [site]) for i, site in enumerate(self.group.sites)]


def _vjps(product, scaled, dy):
    """∇A with β_A·B for B, and ∇B with β_B·A for A.

    One vjp for both: the gradient of an operand of a product does not depend on the operand.
    """
    with tf.GradientTape() as tape:
        tape.watch(scaled)
        y = product(*scaled)
    return tape.gradient(y, scaled, output_gradients=dy)


def _times(x, factor):
    """x times a power of two, by way of float32: the factor may be no number of the format."""
    return tf.cast(tf.cast(x, tf.float32) * factor, x.dtype)


def _name(operation):
    """Under which name the operation stands in `PRODUCTS`, if it does."""
    kind = type(operation)
    package = kind.__module__
    if package.startswith(("keras.src.ops.", "tf_gradscale.attention")):
        return kind.__name__
    # Of operands brought to length 1 it is not linear: a scale in one would be lost.
    return kind if kind is keras.layers.Dot and not operation.normalize else None


def _size(x):
    return tf.cast(tf.size(x), tf.float32)


def _matmul(step, a, b, y):
    return _size(y) * tf.cast(tf.shape(a)[-1], tf.float32)


def _einsum(step, a, b, y):
    """All products: the extents of all letters, those in both operands counted once."""
    operands, _, output = step.operation.subscripts.replace(" ", "").partition("->")
    letters_a, letters_b = operands.split(",")
    if output and "..." not in operands:
        # As many as entries of the product, times the extents that it sums over.
        extents = dict(zip(letters_a + letters_b, (*a.shape, *b.shape), strict=True))
        summed = [extents[letter] for letter in extents if letter not in output]
        if None not in summed:
            return _size(y) * float(math.prod(summed))
    shared = [letter for letter in letters_a.replace("...", "") if letter in letters_b]
    count = _size(a) * _size(b)
    shape = tf.cast(tf.shape(a), tf.float32)
    for letter in shared:
        index = letters_a.replace("...", "").index(letter)
        if "..." in letters_a and index >= letters_a.index("..."):
            index -= len(letters_a.replace("...", ""))
        count /= shape[index]
    return count


def _tensordot(step, a, b, y):
    # size(a)·size(b) counts every contraction twice: size(a)·size(b) = size(y)·K².
    return _size(y) * tf.sqrt(_size(a) * _size(b) / tf.maximum(_size(y), 1.0))


def _dot(step, a, b, y):
    axes = step.operation.axes
    axis = axes if isinstance(axes, int) else axes[0]
    return _size(y) * tf.cast(tf.shape(a)[axis], tf.float32)


# By class, or by the name of a class of keras.ops that is not exported.
PRODUCTS = {
    "Matmul": _matmul,
    "Einsum": _einsum,
    "Tensordot": _tensordot,
    "Product": _einsum,
    keras.layers.Dot: _dot,
}
