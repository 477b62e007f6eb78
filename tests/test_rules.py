"""The rules for products and normalisations, layer by layer, against the layers themselves."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs
from tf_gradscale.rules import normalization, products

layers = keras.layers

# Constructor and input shape without the batch.
PRODUCTS = {
    "dense": (lambda: layers.Dense(5, activation="relu"), (4,)),
    "dense_on_a_sequence": (lambda: layers.Dense(3, use_bias=False), (6, 4)),
    "dense_on_a_map": (lambda: layers.Dense(3, activation="tanh"), (4, 3, 2)),
    "einsum": (lambda: layers.EinsumDense("ab,bc->ac", 5, bias_axes="c"), (4,)),
    "einsum_of_two_axes": (
        lambda: layers.EinsumDense("abcd,cdef->abef", (None, 2, 3), bias_axes="ef"),
        (5, 4, 2),
    ),
    "einsum_over_positions": (
        lambda: layers.EinsumDense("abc,bd->adc", (5, 3), bias_axes="d", activation="gelu"),
        (4, 3),
    ),
    "einsum_ellipsis": (lambda: layers.EinsumDense("...b,bc->...c", 5), (6, 4)),
    "einsum_transposed": (lambda: layers.EinsumDense("abc,dc->adb", (5, 6)), (6, 4)),
    "conv1d": (lambda: layers.Conv1D(5, 3, padding="same", activation="relu"), (12, 4)),
    "conv1d_causal": (lambda: layers.Conv1D(3, 3, padding="causal", dilation_rate=2), (16, 2)),
    "conv1d_stride": (lambda: layers.Conv1D(3, 2, 2, padding="valid"), (12, 2)),
    "conv2d": (lambda: layers.Conv2D(4, 3), (9, 10, 3)),
    "conv2d_1x1_stride": (lambda: layers.Conv2D(4, 1, 2, padding="same"), (8, 8, 3)),
    "conv2d_stride": (lambda: layers.Conv2D(4, (3, 2), (2, 1), padding="same"), (12, 12, 2)),
    "conv2d_dilated": (lambda: layers.Conv2D(3, 3, dilation_rate=2, padding="same"), (14, 14, 2)),
    "conv2d_groups": (lambda: layers.Conv2D(6, 3, groups=2, padding="same"), (9, 9, 4)),
    "conv2d_channels_first": (
        lambda: layers.Conv2D(4, 3, groups=2, data_format="channels_first", activation="relu"),
        (4, 10, 8),
    ),
    "conv3d": (lambda: layers.Conv3D(3, 2, padding="same"), (5, 5, 5, 2)),
    "conv1d_transpose": (lambda: layers.Conv1DTranspose(3, 3, 2, padding="same"), (8, 2)),
    "conv2d_transpose": (
        lambda: layers.Conv2DTranspose(3, 3, 2, activation="relu"),
        (6, 6, 2),
    ),
    "conv2d_transpose_output_padding": (
        lambda: layers.Conv2DTranspose(3, 3, 2, padding="same", output_padding=1),
        (6, 6, 2),
    ),
    "conv3d_transpose": (lambda: layers.Conv3DTranspose(2, 2, 2), (3, 3, 3, 2)),
    "depthwise1d": (lambda: layers.DepthwiseConv1D(3, depth_multiplier=2), (10, 3)),
    "depthwise2d": (
        lambda: layers.DepthwiseConv2D(3, 2, padding="same", activation="relu"),
        (12, 12, 3),
    ),
    "depthwise2d_dilated": (
        lambda: layers.DepthwiseConv2D(2, depth_multiplier=2, dilation_rate=2, padding="same"),
        (10, 10, 3),
    ),
    "separable1d": (lambda: layers.SeparableConv1D(5, 3, padding="same"), (10, 3)),
    "separable2d": (
        lambda: layers.SeparableConv2D(5, 3, 2, depth_multiplier=2, activation="tanh"),
        (13, 13, 3),
    ),
}
NORMALIZATIONS = {
    "batch": (lambda: layers.BatchNormalization(), (6, 5, 4)),
    "batch_of_vectors": (lambda: layers.BatchNormalization(scale=False), (4,)),
    "batch_channels_first": (lambda: layers.BatchNormalization(axis=1, center=False), (4, 5, 3)),
    "layer": (lambda: layers.LayerNormalization(), (6, 4)),
    "layer_of_two_axes": (lambda: layers.LayerNormalization(axis=(1, 2)), (6, 4)),
    "group": (lambda: layers.GroupNormalization(2), (5, 5, 4)),
    "group_channels_first": (lambda: layers.GroupNormalization(2, axis=1), (4, 5, 5)),
    "rms": (lambda: layers.RMSNormalization(), (6, 4)),
}
BATCH = 8


def normal(shape, seed):
    """Random values that float16 holds, so that both precisions start from the same."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return tf.constant(values.astype("float16").astype("float32"))


def build(name, policy):
    """A model of the one layer, with the same weights in every call, and a batch for it."""
    make, shape = {**PRODUCTS, **NORMALIZATIONS}[name]
    with gs.policy_scope(policy):
        inputs = keras.Input(shape)
        model = keras.Model(inputs, make()(inputs))
    for i, variable in enumerate(model.trainable_variables):
        # Those of one dimension keep the mean that the layer gives them.
        mean = variable if len(variable.shape) == 1 else 0.0
        variable.assign(mean + 0.5 * normal(variable.shape, i))
    return model, normal((BATCH, *shape), 100)


def test_every_layer_of_the_tables_is_tested():
    kinds = {type(make()) for make, _ in PRODUCTS.values()}
    assert kinds == set(products.PRODUCTS)
    assert {type(make()) for make, _ in NORMALIZATIONS.values()} >= set(normalization.LAYERS)


@pytest.mark.parametrize(
    ("name", "training"),
    [
        *[(name, None) for name in PRODUCTS],
        *[(name, training) for name in NORMALIZATIONS for training in (False, True)],
    ],
)
def test_forward_is_the_layers_own(name, training):
    model, x = build(name, "mixed_float16")
    state = [v.numpy() for v in model.non_trainable_variables]
    wanted = model(x, training=training)
    wanted_state = [v.numpy() for v in model.non_trainable_variables]
    for variable, value in zip(model.non_trainable_variables, state, strict=True):
        variable.assign(value)
    found = gs.convert(model)(x, training=training)
    assert wanted.dtype == tf.float16
    np.testing.assert_array_equal(found, tf.cast(wanted, tf.float32))
    # Moving statistics are updated alike.
    for variable, value in zip(model.non_trainable_variables, wanted_state, strict=True):
        np.testing.assert_array_equal(variable, value)


def gradients(model, x, weights):
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = tf.reduce_sum(tf.cast(model(x, training=True), tf.float32) * weights)
    return tape.gradient(value, [x, *[v.value for v in model.trainable_variables]])


def error(found, wanted):
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def gradient_error(name, converted, multiplier=1.0):
    """The largest error of a float16 gradient, where true ones are about 2^-22 × multiplier."""
    model, x = build(name, "mixed_float16")
    reference, _ = build(name, "float32")
    weights = multiplier * 2.0**-22 * normal(reference(x).shape, 101)
    found = gradients(gs.convert(model) if converted else model, x, weights)
    wanted = gradients(reference, x, weights)
    return max(error(f, w) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", [*PRODUCTS, *NORMALIZATIONS])
def test_float16_gradients_are_close_to_float32(name):
    error = gradient_error(name, converted=True)
    if not error < 5e-3 and gradient_error(name, converted=False, multiplier=2.0**14) > 0.5:
        # oneDNN's einsum of "...b,bc->...c", on processors that compute in float16.
        pytest.skip("TensorFlow's own float16 product is wrong on this processor")
    assert error < 5e-3


@pytest.mark.parametrize("name", ["dense", "conv2d", "separable2d", "layer"])
def test_without_scaling_they_are_not(name):
    assert gradient_error(name, converted=False) > 5e-2


def test_a_mean_over_a_large_map():
    """It divides gradients by 2^18, more than a float16 factor can make up for."""
    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((512, 512, 1))
        model = gs.Model(inputs, layers.GlobalAveragePooling2D()(inputs))
    x = tf.zeros((1, 512, 512, 1))
    weights = tf.constant([[0.75]])
    (found,) = gradients(model, x, weights)
    np.testing.assert_allclose(found, np.full(x.shape, 0.75 / 2**18), rtol=1e-3)


def test_small_inputs_and_gradients():
    """The kernel's gradient could take a scale beyond float16's range."""
    with gs.policy_scope("mixed_float16"):
        model = gs.Sequential([keras.Input((2,)), layers.Dense(1, use_bias=False)])
    x = tf.constant([[2.0**-20, 0.0]])
    for _ in range(2):
        _, found = gradients(model, x, tf.constant([[2.0**-30]]))
        np.testing.assert_array_equal(found, [[2.0**-50], [0.0]])


# --- Products ------------------------------------------------------------------------------------


def interior(gradient, layer):
    """Entries that no border touches, over whole periods of the strides."""
    for i in range(getattr(layer, "rank", 0)):
        axis = i + (2 if layer.data_format == "channels_first" else 1)
        strides = keras.tree.flatten(layer.strides)
        period = 1 if "Transpose" in type(layer).__name__ else strides[i % len(strides)]
        dilation = keras.tree.flatten(layer.dilation_rate)[0]
        margin = dilation * (layer.kernel_size[i] - 1)
        count = (gradient.shape[axis] - 2 * margin) // period * period
        assert count > 0
        gradient = np.take(gradient, range(margin, margin + count), axis)
    return gradient


@pytest.mark.parametrize("name", PRODUCTS)
def test_accumulation_length(name):
    """With kernels of ones, ∇X counts the products that are summed into it."""
    make, shape = PRODUCTS[name]
    layer = make()
    layer.activation = None
    x = tf.ones((2, *shape))
    layer.build(x.shape)
    for variable in layer.trainable_variables:
        variable.assign(tf.ones_like(variable.value))
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(layer(x))
    counted = interior(tape.gradient(total, x).numpy(), layer)
    made = products.PRODUCTS[type(layer)](layer)
    assert np.prod([product.n for product in made]) == pytest.approx(counted.mean())


def test_separable_convolutions_are_two_products():
    layer = layers.SeparableConv2D(7, (3, 5), strides=2, depth_multiplier=4)
    layer.build((None, 16, 16, 3))
    depthwise, pointwise = products.PRODUCTS[type(layer)](layer)
    assert depthwise.kernel is layer.depthwise_kernel
    assert pointwise.kernel is layer.pointwise_kernel
    # 3·5 kernel positions, of which a stride of 2×2 reaches a quarter; 4 channels each.
    assert (depthwise.n, pointwise.n) == (15 / 4 * 4, 7)


@pytest.mark.parametrize("name", PRODUCTS)
def test_kernel_gradients_are_bounded_by_the_channels(name):
    """max|∇W| ≤ max‖x_i‖·max‖∇y_j‖ over the channel axes that the product names (for β_W)."""
    model, x = build(name, "float32")
    layer = model.layers[-1]

    def largest_norm(tensor, axis):
        squares = np.square(tensor.numpy(), dtype="float64")
        if axis is None:
            return np.sqrt(squares.sum())
        return np.sqrt(np.moveaxis(squares, axis, 0).reshape(tensor.shape[axis], -1).sum(1).max())

    for product in products.PRODUCTS[type(layer)](layer):
        kernel = tf.convert_to_tensor(product.kernel.value)
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            y = product.apply(x, kernel)
            weights = normal(y.shape, 102)
            value = tf.reduce_sum(y * weights)
        found = np.abs(tape.gradient(value, kernel)).max()
        bound = largest_norm(x, product.x_axis) * largest_norm(weights, product.y_axis)
        assert found <= bound * (1 + 1e-5)
        x = y


@pytest.mark.parametrize("normalize", [False, True])
def test_a_dot_of_two_activations(normalize):
    """Normalized, it is no product of its operands: a scale in one would be lost."""
    a, b = keras.Input((6,)), keras.Input((6,))
    x, y = layers.Dense(8)(a), layers.Dense(8)(b)
    plain = keras.Model([a, b], layers.Dense(1)(layers.Dot(1, normalize=normalize)([x, y])))
    scaled = gs.convert(plain, gs.GradScaleConfig(gradient_dtype="float32"))
    scaled.scales.freeze(lambda site: 8.0)
    assert any(site.name.endswith("/a") for site in scaled.scales) != normalize
    assert_same_gradients(plain, scaled, [normal((4, 6), 1), normal((4, 6), 2)])


def assert_same_gradients(plain, scaled, inputs):
    """Those of a loss in float32, whatever the scales."""
    found = []
    for model in (plain, scaled):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs) - 1.0))
        found.append(tape.gradient(loss, model.trainable_variables))
    for true, ours in zip(*found, strict=True):
        np.testing.assert_allclose(ours, true, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("equation", "twice"),
    [("abc,cd,de->abe", 1), ("abc,abc,cd->abd", 0), ("abc,adc,adc->abd", 1)],
)
def test_an_einsum_of_one_operand_twice(equation, twice):
    """No product of two tensors: its gradient is not linear in each of them."""
    weights = normal((8, 8), 3)

    inputs = keras.Input((8, 8))
    x = layers.Dense(8)(inputs)
    operands = [x, layers.Dense(8)(inputs) if equation == "abc,adc,adc->abd" else weights]
    operands.insert(twice, operands[twice])
    plain = keras.Model(inputs, layers.Dense(1)(keras.ops.einsum(equation, *operands)))
    scaled = gs.convert(plain, gs.GradScaleConfig(gradient_dtype="float32"))
    scaled.scales.freeze(lambda site: 8.0)
    assert_same_gradients(plain, scaled, normal((4, 8, 8), 1))


MATRICES = {
    "ab,bc->ac": 1,
    "abc,cd->abd": 1,
    "abcd,cde->abe": 2,
    "abc,cde->abde": 1,
    "...b,bc->...c": 1,
    "a...b,bc->a...c": 1,
    # Contracted over an axis that is not the last; of another order; transposed.
    "abc,bd->adc": None,
    "abc,cd->adb": None,
    "abc,dc->adb": None,
    "abc,bcd->adb": None,
    # An axis of x that is summed over alone; one that stands in both and in the result.
    "abc,cd->bd": None,
    "abc,bcd->abd": None,
}


@pytest.mark.parametrize("equation", MATRICES)
def test_which_einsums_are_matrix_products(equation):
    operands, output = equation.split("->")
    assert products._contracted(*operands.split(","), output) == MATRICES[equation]


@pytest.mark.parametrize("name", ["dense", "dense_on_a_map", "einsum_of_two_axes"])
@pytest.mark.parametrize("together", [True, False])
def test_gradients_of_matrix_products_in_closed_form(name, together):
    """Against those of a tape, with a gradient of its own for each operand or one for both."""
    make, shape = PRODUCTS[name]
    layer = make()
    x = normal((3, *shape), 1)
    layer.build(x.shape)
    (product,) = products.PRODUCTS[type(layer)](layer)
    kernel = tf.convert_to_tensor(product.kernel.value)
    dz = normal(product.apply(x, kernel).shape, 2)
    dz_w = dz if together else 4.0 * dz
    assert product.contracted
    found = product.vjp(x, kernel, dz, dz_w)
    wanted = product._replace(contracted=None).vjp(x, kernel, dz, dz_w)
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class Standardized(layers.Conv2D):
    """As Keras' documentation of `convolution_op` has it."""

    def convolution_op(self, inputs, kernel):
        mean = keras.ops.mean(kernel, axis=(0, 1, 2), keepdims=True)
        deviation = keras.ops.std(kernel, axis=(0, 1, 2), keepdims=True)
        return super().convolution_op(inputs, (kernel - mean) / (deviation + 1e-5))


class Normalized(layers.Dense):
    """Its kernel's columns are of length 1."""

    @property
    def kernel(self):
        return keras.ops.normalize(self._kernel, axis=0)


class Centred(layers.BatchNormalization):
    """Divides by nothing."""

    def _moments(self, inputs, mask):
        mean, variance = super()._moments(inputs, mask)
        return mean, keras.ops.ones_like(variance)


class Renamed(layers.Conv2D):
    """Another initializer, and nothing else."""

    def __init__(self, filters, size, **kwargs):
        super().__init__(filters, size, kernel_initializer="he_normal", **kwargs)

    def get_config(self):
        return {"filters": self.filters, "size": self.kernel_size, "name": self.name}


def on_the_instance():
    layer = layers.Conv2D(4, 3)
    own = layer.convolution_op
    layer.convolution_op = lambda inputs, kernel: own(inputs, keras.ops.square(kernel))
    return layer


@pytest.mark.parametrize(
    "make",
    [lambda: Standardized(4, 3), lambda: Normalized(4), Centred, on_the_instance],
    ids=["convolution_op", "kernel", "moments", "on_the_instance"],
)
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_subclasses_that_compute_something_else(make, policy):
    """They are run by Keras, and differentiated as they are."""
    with gs.policy_scope(policy):
        inputs = keras.Input((6, 6, 2))
        plain = keras.Model(inputs, layers.Conv2D(3, 3)(make()(inputs)))
    scaled = gs.convert(plain)
    x = normal((4, 6, 6, 2), 1)
    found = []
    for model in (plain, scaled):
        with tf.GradientTape() as tape:
            y = tf.cast(model(x, training=True), tf.float32)
            loss = tf.reduce_mean(tf.square(y - 1.0))
        found.append([y, *tape.gradient(loss, model.trainable_variables)])
    tolerance = 2e-5 if policy == "float32" else 2e-2
    for true, ours in zip(*found, strict=True):
        assert np.linalg.norm(ours - true) <= tolerance * np.linalg.norm(true)
    np.testing.assert_array_equal(found[0][0], found[1][0])


def test_subclasses_that_compute_the_same_are_taken():
    model = gs.convert(keras.Sequential([keras.Input((6, 6, 2)), Renamed(4, 3, name="renamed")]))
    assert "renamed/input" in [site.name for site in model.scales]
