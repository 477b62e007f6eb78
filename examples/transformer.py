"""A causal transformer on characters, as layers of one's own made of Keras layers."""

import keras
from keras import layers, ops


class Block(layers.Layer):
    """Attention and a feed-forward part, each behind a normalisation and added to its input.

    Args:
        heads: Number of attention heads.
        dropout: Rate of dropout.
    """

    def __init__(self, heads, dropout, **kwargs):
        super().__init__(**kwargs)
        self.heads, self.dropout = heads, dropout

    def build(self, shape):
        """Makes the layers for inputs of (batch, length, width)."""
        width = shape[-1]
        self.norms = [layers.LayerNormalization(name=f"norm_{i}") for i in range(2)]
        self.attention = layers.MultiHeadAttention(
            self.heads, width // self.heads, name="attention"
        )
        self.hidden = layers.Dense(4 * width, activation="gelu", name="hidden")
        self.output_dense = layers.Dense(width, name="output")
        self.drop = layers.Dropout(self.dropout, name="drop")
        for norm in self.norms:
            norm.build(shape)
        self.attention.build(shape, shape)
        self.hidden.build(shape)
        self.output_dense.build((*shape[:-1], 4 * width))
        super().build(shape)

    def call(self, x):
        """Runs it."""
        y = self.norms[0](x)
        x = x + self.drop(self.attention(y, y, use_causal_mask=True))
        y = self.output_dense(self.hidden(self.norms[1](x)))
        return x + self.drop(y)

    def get_config(self):
        """The arguments."""
        return {**super().get_config(), "heads": self.heads, "dropout": self.dropout}


class Positions(layers.Layer):
    """Adds a learned vector to each position."""

    def build(self, shape):
        """Makes the vectors for inputs of (batch, length, width)."""
        self.table = self.add_weight(shape=shape[1:], initializer="uniform", name="table")

    def call(self, x):
        """Runs it."""
        return x + self.table


def build_model(characters, length, width=128, depth=3, heads=4, dropout=0.1):
    """Builds the network, which gives the probability of each next character.

    Args:
        characters: How many there are.
        length: Of the texts.
        width: Of the vectors.
        depth: Number of blocks.
        heads: Of attention.
        dropout: Its rate.
    """
    inputs = keras.Input((length,), dtype="int32", name="text")
    x = layers.Embedding(characters, width, name="embedding")(inputs)
    x = Positions(name="positions")(x)
    for i in range(depth):
        x = Block(heads, dropout, name=f"block_{i + 1}")(x)
    x = layers.LayerNormalization(name="norm")(x)
    x = layers.Dense(characters, name="logits")(x)
    # The softmax is in float32 under every policy.
    outputs = layers.Activation("softmax", dtype="float32", name="softmax")(x)
    return keras.Model(inputs, outputs, name="transformer")


def continued(model, start, count, seed=0):
    """Continues a text.

    Args:
        model: The trained model.
        start: Character numbers, at least as many as the model's length.
        count: How many to add.
        seed: Of the draws.

    Returns:
        The numbers of the new characters, a list.
    """
    length = model.input_shape[1]
    generator = keras.random.SeedGenerator(seed)
    text = list(start[-length:])
    for _ in range(count):
        probabilities = model(ops.array([text[-length:]]), training=False)[:, -1]
        drawn = keras.random.categorical(ops.log(probabilities), 1, seed=generator)
        text.append(int(drawn[0, 0]))
    return text[-count:]
