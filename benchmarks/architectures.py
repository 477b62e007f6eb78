"""Small networks of many architectures, each with data and a loss that it can be trained by.

What keras.applications has no example of: transformers written as layers made of layers, recurrent
networks, towers that share their weights, encoder-decoders, and two models that train each other.
"""

import dataclasses
import functools
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

layers, ops = keras.layers, keras.ops
WORDS, LENGTH, WIDTH, CLASSES = 48, 12, 32, 5


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A network, or several that are trained together.

    Attributes:
        build: Function that builds it, under the global policy: a tuple of models.
        batch: Function of a random generator and a number of examples: a tuple of arrays.
        losses: Function of the models and a batch: the loss of each model, in float32.
        jit_compile: Whether plain Keras runs it in float16 under XLA.
        convolves: Whether float16 is too slow without XLA, on CPUs.
        frozen: Whether its batch normalisations use moving statistics, as in fine-tuning.
    """

    build: Callable
    batch: Callable
    losses: Callable
    jit_compile: bool = True
    convolves: bool = False
    frozen: bool = False

    def gradients(self, models, batch, multiplier=1.0):
        """Losses, and the gradients of each model's loss, times a multiplier, by its variables."""
        with tf.GradientTape(persistent=True) as tape:
            losses = self.losses(models, *batch)
            scaled = [loss * multiplier for loss in losses]
        made = []
        for loss, model in zip(scaled, models, strict=True):
            made += tape.gradient(loss, model.trainable_variables)
        return losses, [tf.convert_to_tensor(gradient) for gradient in made]


def softmax(x):
    """A softmax in float32, as mixed precision wants it."""
    return layers.Activation("softmax", dtype="float32")(x)


def cross_entropy(models, x, labels, training=True):
    """The mean cross-entropy of one model's softmax."""
    (model,) = models
    made = model(x, training=training)
    return [tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, made))]


def images(shape, classes=CLASSES, pixels=False):
    """Data: noise in the colour of its class; of a magnitude of 1, or pixels up to 255."""

    def batch(rng, size):
        colours = rng.normal(size=(classes, 1, 1, shape[-1]))
        labels = rng.integers(classes, size=(size,))
        x = rng.normal(size=(size, *shape)) + colours[labels]
        if pixels:
            x = np.clip(128 + 40 * x, 0, 255)
        return x.astype("float32"), labels

    return batch


def sentences(classes=CLASSES):
    """Data: words of different numbers, filled up with zeros, and a class."""

    def batch(rng, size):
        return _words(rng, size), rng.integers(classes, size=(size,))

    return batch


def _words(rng, size):
    words = rng.integers(1, WORDS, size=(size, LENGTH)).astype("int32")
    lengths = rng.integers(LENGTH // 2, LENGTH + 1, size=(size, 1))
    return np.where(np.arange(LENGTH) < lengths, words, 0).astype("int32")


# --- transformers, in the style of KerasHub: layers made of layers --------------------------------


class ReversibleEmbedding(layers.Embedding):
    """An embedding that also gives logits: a product with its transpose, the same variable."""

    def call(self, inputs, reverse=False):
        if not reverse:
            return super().call(inputs)
        kernel = ops.transpose(ops.convert_to_tensor(self.embeddings))
        return ops.matmul(inputs, kernel)

    def compute_output_spec(self, inputs, reverse=False):
        shape = list(inputs.shape)
        shape = [*shape[:-1], self.input_dim] if reverse else [*shape, self.output_dim]
        return keras.KerasTensor(shape, dtype=self.compute_dtype)

    def compute_mask(self, inputs, mask=None, reverse=False):
        return None if reverse else super().compute_mask(inputs, mask)


class PositionEmbedding(layers.Layer):
    """A vector for each position, as many as the sequence is long."""

    def __init__(self, length, **options):
        super().__init__(**options)
        self.length = length
        self.supports_masking = True

    def build(self, shape):
        self.position_embeddings = self.add_weight(
            name="embeddings", shape=(self.length, shape[-1]), initializer="glorot_uniform"
        )
        self.built = True

    def call(self, inputs, start_index=0):
        shape = ops.shape(inputs)
        table = ops.convert_to_tensor(self.position_embeddings)
        table = ops.slice(table, (start_index, 0), (shape[-2], shape[-1]))
        return ops.broadcast_to(table, shape)

    def compute_output_shape(self, shape):
        return shape


class TokenAndPositionEmbedding(layers.Layer):
    """The sum of two embeddings; its mask is that of the tokens."""

    def __init__(self, words, length, width, **options):
        super().__init__(**options)
        self.token_embedding = ReversibleEmbedding(
            words, width, mask_zero=True, dtype=self.dtype_policy, name="token_embedding"
        )
        self.position_embedding = PositionEmbedding(
            length, dtype=self.dtype_policy, name="position_embedding"
        )
        self.supports_masking = True

    def build(self, shape):
        self.token_embedding.build(shape)
        self.position_embedding.build((*shape, self.token_embedding.output_dim))
        self.built = True

    def call(self, inputs, start_index=0):
        tokens = self.token_embedding(inputs)
        return tokens + self.position_embedding(tokens, start_index=start_index)

    def compute_mask(self, inputs, mask=None):
        return self.token_embedding.compute_mask(inputs, mask=mask)

    def compute_output_shape(self, shape):
        return (*shape, self.token_embedding.output_dim)


def merged_mask(inputs, padding_mask):
    """The mask of an attention's keys: the one that is given, or the one that came along."""
    if padding_mask is None:
        padding_mask = getattr(inputs, "_keras_mask", None)
    return None if padding_mask is None else ops.cast(ops.expand_dims(padding_mask, 1), "int32")


def causal_mask(inputs):
    """A mask under which each position sees those before it."""
    batch, length = ops.shape(inputs)[0], ops.shape(inputs)[1]
    i = ops.expand_dims(ops.arange(length, dtype="float32"), 1)
    j = ops.arange(length, dtype="float32")
    mask = ops.expand_dims(i >= j, 0)
    return ops.broadcast_to(mask, (batch, length, length))


class TransformerLayer(layers.Layer):
    """What an encoder's and a decoder's block share."""

    def __init__(self, hidden, heads, normalize_first=False, **options):
        super().__init__(**options)
        self.hidden, self.heads, self.normalize_first = hidden, heads, normalize_first
        self.supports_masking = True

    def _attention(self, shape, name):
        attention = layers.MultiHeadAttention(
            self.heads, shape[-1] // self.heads, dtype=self.dtype_policy, name=name
        )
        attention.build(shape, shape)
        norm = layers.LayerNormalization(dtype=self.dtype_policy, name=f"{name}_norm")
        norm.build(shape)
        return attention, norm

    def _feedforward(self, shape):
        self._norm = layers.LayerNormalization(dtype=self.dtype_policy, name="feedforward_norm")
        self._norm.build(shape)
        self._inner = layers.Dense(
            self.hidden, activation="gelu", dtype=self.dtype_policy, name="feedforward_inner"
        )
        self._inner.build(shape)
        self._outer = layers.Dense(shape[-1], dtype=self.dtype_policy, name="feedforward_outer")
        self._outer.build((*shape[:-1], self.hidden))

    def _residual(self, x, norm, function):
        if self.normalize_first:
            return x + function(norm(x))
        return norm(x + function(x))

    def _end(self, x):
        return self._residual(x, self._norm, lambda x: self._outer(self._inner(x)))


class TransformerEncoder(TransformerLayer):
    """Attention to all positions that are no padding, then a feed-forward network."""

    def build(self, shape):
        self._self_attention, self._attention_norm = self._attention(shape, "self_attention")
        self._feedforward(shape)
        self.built = True

    def call(self, inputs, padding_mask=None, training=None):
        mask = merged_mask(inputs, padding_mask)
        x = self._residual(
            inputs,
            self._attention_norm,
            lambda x: self._self_attention(
                query=x, value=x, attention_mask=mask, training=training
            ),
        )
        return self._end(x)

    def compute_output_shape(self, inputs_shape):
        return inputs_shape


class TransformerDecoder(TransformerLayer):
    """Attention to the positions before, to all of the encoder's, then a feed-forward network."""

    def build(self, decoder_sequence_shape, encoder_sequence_shape):
        shape = decoder_sequence_shape
        self._self_attention, self._attention_norm = self._attention(shape, "self_attention")
        self._cross_attention, self._cross_norm = self._attention(shape, "cross_attention")
        self._feedforward(shape)
        self.built = True

    def call(self, decoder_sequence, encoder_sequence, training=None):
        padding = merged_mask(decoder_sequence, None)
        mask = causal_mask(decoder_sequence)
        if padding is not None:
            mask = ops.minimum(padding, mask)
        encoder_mask = merged_mask(encoder_sequence, None)
        x = self._residual(
            decoder_sequence,
            self._attention_norm,
            lambda x: self._self_attention(
                query=x, value=x, attention_mask=mask, training=training
            ),
        )
        x = self._residual(
            x,
            self._cross_norm,
            lambda x: self._cross_attention(
                query=x, value=encoder_sequence, attention_mask=encoder_mask, training=training
            ),
        )
        return self._end(x)

    def compute_output_shape(self, decoder_sequence_shape, encoder_sequence_shape):
        return decoder_sequence_shape


def encoder(depth=3):
    """A classifier of sentences: a transformer's encoder, each layer given the padding's mask."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    mask = ops.not_equal(inputs, 0)
    x = TokenAndPositionEmbedding(WORDS, LENGTH, WIDTH)(inputs)
    for i in range(depth):
        x = TransformerEncoder(2 * WIDTH, 4, normalize_first=i % 2 == 1)(x, padding_mask=mask)
    x = layers.GlobalAveragePooling1D()(x)
    return (keras.Model(inputs, softmax(layers.Dense(CLASSES)(x))),)


def translator(depth=1):
    """An encoder and a causal decoder, whose head is the transpose of its embedding.

    Masks come along with the embedded words.
    """
    inputs = [keras.Input((LENGTH,), dtype="int32", name=name) for name in ("source", "target")]
    x = TokenAndPositionEmbedding(WORDS, LENGTH, WIDTH)(inputs[0])
    for _ in range(depth):
        x = TransformerEncoder(2 * WIDTH, 4)(x)
    embedding = TokenAndPositionEmbedding(WORDS, LENGTH, WIDTH)
    y = embedding(inputs[1])
    for _ in range(depth):
        y = TransformerDecoder(2 * WIDTH, 4)(y, x)
    y = embedding.token_embedding(y, reverse=True)
    return (keras.Model(inputs, softmax(y)),)


def _translation(rng, size):
    target = _words(rng, size)
    return (_words(rng, size), target, np.roll(target, -1, axis=1))


def _translation_loss(models, source, target, labels):
    losses = keras.losses.sparse_categorical_crossentropy(
        labels, models[0]([source, target], training=True)
    )
    weights = tf.cast(target != 0, tf.float32)
    return [tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)]


# --- recurrent networks --------------------------------------------------------------------------


def lstm():
    """A classifier of sentences: an LSTM that skips the padding."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, mask_zero=True)(inputs)
    x = layers.LSTM(WIDTH)(x)
    return (keras.Model(inputs, softmax(layers.Dense(CLASSES)(x))),)


def gru():
    """Two GRUs, one on the other, the first in both directions."""
    inputs = keras.Input((LENGTH, 8))
    x = layers.Bidirectional(layers.GRU(WIDTH // 2, return_sequences=True))(inputs)
    x = layers.GRU(WIDTH)(x)
    return (keras.Model(inputs, softmax(layers.Dense(CLASSES)(x))),)


def _sequences(rng, size):
    labels = rng.integers(CLASSES, size=(size,))
    means = rng.normal(size=(CLASSES, 1, 8))
    return (rng.normal(size=(size, LENGTH, 8)) + means[labels]).astype("float32"), labels


def conv_lstm():
    """A classifier of films: a convolutional LSTM."""
    inputs = keras.Input((4, 8, 8, 3))
    x = layers.ConvLSTM2D(8, 3, padding="same")(inputs)
    x = layers.GlobalAveragePooling2D()(x)
    return (keras.Model(inputs, softmax(layers.Dense(CLASSES)(x))),)


def _films(rng, size):
    labels = rng.integers(CLASSES, size=(size,))
    colours = rng.normal(size=(CLASSES, 1, 1, 1, 3))
    return (rng.normal(size=(size, 4, 8, 8, 3)) + colours[labels]).astype("float32"), labels


# --- shared weights ------------------------------------------------------------------------------


def two_tower():
    """Queries and items: two towers over one embedding, and the products of all with all."""
    queries = keras.Input((6,), dtype="int32", name="queries")
    items = keras.Input((3,), dtype="int32", name="items")
    embedding = layers.Embedding(WORDS, WIDTH)

    def tower(x):
        x = layers.GlobalAveragePooling1D()(embedding(x))
        x = layers.Dense(WIDTH, activation="relu")(x)
        # In float32: its epsilon is no number of float16.
        return layers.UnitNormalization(dtype="float32")(layers.Dense(WIDTH // 2)(x))

    scores = ops.matmul(tower(queries), ops.transpose(tower(items)))
    return (keras.Model([queries, items], softmax(layers.Rescaling(10.0)(scores))),)


def _pairs(rng, size):
    shapes = (size, 6), (size, 3)
    return tuple(rng.integers(WORDS, size=shape).astype("int32") for shape in shapes)


def _retrieval_loss(models, queries, items):
    made = models[0]([queries, items], training=True)
    labels = tf.range(tf.shape(queries)[0])
    return [tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, made))]


# --- encoder-decoders ----------------------------------------------------------------------------


def u_net(size=16, width=8):
    """Two levels down, and up again: once by a transposed convolution, once bilinearly."""
    inputs = x = keras.Input((size, size, 3))

    def block(x, filters):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        return layers.ReLU()(layers.BatchNormalization()(x))

    first = block(x, width)
    second = block(layers.MaxPooling2D()(first), 2 * width)
    x = block(layers.MaxPooling2D()(second), 4 * width)
    x = layers.Conv2DTranspose(2 * width, 2, 2)(x)
    x = block(layers.Concatenate()([second, x]), 2 * width)
    x = layers.UpSampling2D(interpolation="bilinear")(x)
    x = block(layers.Concatenate()([first, x]), width)
    return (keras.Model(inputs, softmax(layers.Conv2D(CLASSES, 1)(x))),)


def _maps(rng, size):
    labels = np.kron(rng.integers(CLASSES, size=(size, 4, 4)), np.ones((4, 4), "int64"))
    colours = rng.normal(size=(CLASSES, 3))
    return (rng.normal(size=(size, 16, 16, 3)) + colours[labels]).astype("float32"), labels


# --- two models that train each other ------------------------------------------------------------


def gan():
    """A generator and a discriminator of images, as in DCGAN."""
    noise = keras.Input((WIDTH,))
    x = layers.Dense(4 * 4 * 16, use_bias=False)(noise)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Reshape((4, 4, 16))(x)
    x = layers.Conv2DTranspose(8, 4, 2, padding="same", use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Conv2DTranspose(3, 4, 2, padding="same")(x)
    generator = keras.Model(noise, layers.Activation("tanh", dtype="float32")(x))
    inputs = x = keras.Input((16, 16, 3))
    for filters in (8, 16):
        x = layers.Conv2D(filters, 4, 2, padding="same")(x)
        x = layers.LeakyReLU(0.2)(x)
    x = layers.Dense(1)(layers.Flatten()(x))
    discriminator = keras.Model(inputs, layers.Activation("linear", dtype="float32")(x))
    return generator, discriminator


def _noise_and_images(rng, size):
    x = rng.normal(size=(size, 16, 16, 3)) + rng.normal(size=(3,))
    return rng.normal(size=(size, WIDTH)).astype("float32"), np.tanh(x).astype("float32")


def _gan_losses(models, noise, real):
    generator, discriminator = models
    fake = generator(noise, training=True)
    # softplus(-x) is the cross-entropy of a logit x with 1.
    of_fake, of_real = discriminator(fake, training=True), discriminator(real, training=True)
    return [
        tf.reduce_mean(tf.nn.softplus(-of_fake)),
        tf.reduce_mean(tf.nn.softplus(of_fake)) + tf.reduce_mean(tf.nn.softplus(-of_real)),
    ]


ARCHITECTURES = {
    "encoder": Architecture(encoder, sentences(), cross_entropy),
    "translator": Architecture(translator, _translation, _translation_loss),
    "lstm": Architecture(lstm, sentences(), cross_entropy),
    "gru": Architecture(gru, _sequences, cross_entropy),
    "conv_lstm": Architecture(conv_lstm, _films, cross_entropy, convolves=True),
    "two_tower": Architecture(two_tower, _pairs, _retrieval_loss),
    # Bilinear resizing in float16 does not compile under XLA.
    "u_net": Architecture(u_net, _maps, cross_entropy, jit_compile=False),
    "gan": Architecture(gan, _noise_and_images, _gan_losses, convolves=True),
}


# --- keras.applications --------------------------------------------------------------------------

# Those that scale pixels down themselves: numbers next to 0 would all be black.
PIXELS = ("MobileNetV3", "EfficientNet", "ConvNeXt")
# The smallest inputs that they take, where that is not 32.
SIZES = {
    "InceptionV3": 75,
    "InceptionResNetV2": 75,
    "Xception": 71,
    "NASNetMobile": 32,
    "NASNetLarge": 32,
}


def application(name, frozen=False):
    """A model of keras.applications, untrained, at the smallest size of input, without dropout.

    Args:
        name: The name of the function that makes it.
        frozen: Whether its batch normalisations use moving statistics: over four images, the
            batch's own make the gradients of deep networks chaotic.
    """
    size = SIZES.get(name, 32)

    def build():
        function = getattr(keras.applications, name)
        body = function(
            weights=None, input_shape=(size, size, 3), classes=10, classifier_activation=None
        )
        for layer in body._flatten_layers():
            # Masks that are drawn anew in each model would be all that differs.
            if isinstance(layer, layers.Dropout):
                layer.rate = 0.0
        return (keras.Model(body.inputs, softmax(body.output), name=body.name),)

    batch = images((size, size, 3), 10, pixels=name.startswith(PIXELS))
    losses = functools.partial(cross_entropy, training=not frozen)
    return Architecture(build, batch, losses, convolves=True, frozen=frozen)


def applications():
    """The names of all models in keras.applications."""
    return sorted(name for name in vars(keras.applications) if name[0].isupper())
