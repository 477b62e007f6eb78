"""Layers made of layers and `keras.ops`, in the ways in which people write them."""

import functools

import keras
import tensorflow as tf
from keras import ops

layers = keras.layers


class Feedforward(layers.Layer):
    """Built by its author; passes `training` on."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(12, activation="gelu")
        self.outer = layers.Dense(8)
        self.drop = layers.Dropout(0.4)

    def build(self, shape):
        self.inner.build(shape)
        self.outer.build((*shape[:-1], 12))

    def call(self, x, training=None):
        return x + self.drop(self.outer(self.inner(x)), training=training)


class OwnWeights(layers.Layer):
    """Variables as operands, cast by the layer's policy, and expressions of variables."""

    def build(self, shape):
        self.gain = self.add_weight(shape=(8,), initializer="ones", name="gain")
        self.log_gain = self.add_weight(shape=(8,), initializer="zeros", name="log_gain")
        self.kernel = self.add_weight(shape=(8, 8), name="kernel")
        self.bias = self.add_weight(shape=(8,), initializer="zeros", name="bias")

    def call(self, x):
        x = self.gain * x * ops.exp(self.log_gain)
        return ops.matmul(x, self.kernel) + ops.matmul(x, ops.transpose(self.kernel)) + self.bias


class Twice(layers.Layer):
    """Stateful layers called twice: their state depends on the order."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(8)
        self.norm = layers.BatchNormalization(momentum=0.7)
        self.drop = layers.Dropout(0.3)

    def call(self, x, training=None):
        a = self.norm(self.dense(x), training=training)
        b = self.norm(3.0 * x + 1.0, training=training)
        # Made in this order, used in the other.
        first, second = self.drop(a, training=training), self.drop(b, training=training)
        return second - 0.5 * first


class SideEffect(layers.Layer):
    """A layer inside is called only for what it keeps."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(8)
        self.seen = layers.BatchNormalization()

    def call(self, x, training=None):
        self.seen(x, training=training)
        return self.dense(x)


class Switch(layers.Layer):
    """Does other things in training; its inner layers are told nothing."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense, self.extra = layers.Dense(8), layers.Dense(8)
        self.norm = layers.BatchNormalization()

    def build(self, shape):
        for layer in (self.dense, self.extra, self.norm):
            layer.build(shape)

    def call(self, x, training=None):
        y = self.norm(self.dense(x))
        return y + self.extra(x) if training else y


class Told(layers.Layer):
    """Tells one layer something else, which Keras' call context passes on to the next."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(8)
        self.first, self.second = layers.BatchNormalization(), layers.BatchNormalization()

    def call(self, x):
        return self.second(self.first(self.dense(x), training=False))


class TrainedByDefault(layers.Layer):
    """`training` has a default of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense, self.norm = layers.Dense(8), layers.BatchNormalization()

    def call(self, x, training=True):
        return self.norm(self.dense(x), training=training)


class Shapes(layers.Layer):
    """Attention written by hand: computes with the sizes of the batch and the sequence."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.qkv, self.out = layers.Dense(24), layers.Dense(8)

    def call(self, x):
        batch, length, width = ops.shape(x)
        qkv = ops.reshape(self.qkv(x), (batch, length, 3, 2, width // 2))
        q, k, v = ops.unstack(ops.transpose(qkv, (2, 0, 3, 1, 4)), axis=0)
        logits = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) * 0.5
        position = ops.arange(length)
        logits = ops.where(position[:, None] >= position[None], logits, -1e4)
        y = ops.matmul(ops.softmax(logits), v)
        y = ops.reshape(ops.transpose(y, (0, 2, 1, 3)), (batch, length, width))
        return self.out(y * ops.cast(length, y.dtype) / 6.0)


class Nested(layers.Layer):
    """Composites and models within, one of them told that it is not training."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [Feedforward(), Twice()]
        self.model = keras.Sequential([layers.Dense(8), layers.BatchNormalization()])

    def call(self, x, training=None):
        for block in self.blocks:
            x = block(x, training=training)
        return self.model(x, training=False)


class Recurrent(layers.Layer):
    """Layers that are not opened, next to one that is."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(8)
        self.gru = layers.Bidirectional(layers.GRU(4, return_sequences=True))
        self.each = layers.TimeDistributed(layers.Dense(8))

    def call(self, x):
        return self.each(self.gru(self.dense(x)))


class Attentive(layers.Layer):
    """`MultiHeadAttention` with everything that masks it."""

    def __init__(self, dropout=0.0, causal=True, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, 4, dropout=dropout)
        self.causal = causal
        self.norm = layers.LayerNormalization()

    def call(self, x, training=None):
        y = self.norm(x)
        return x + self.attention(y, y, use_causal_mask=self.causal, training=training)


class Positions(layers.Layer):
    """Adds what does not depend on the values of its input: one layer returns a variable."""

    class Table(layers.Layer):
        """Positions as KerasHub has them."""

        def build(self, shape):
            self.table = self.add_weight(shape=shape[1:], name="table")

        def call(self, x):
            return ops.broadcast_to(ops.convert_to_tensor(self.table), ops.shape(x))

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table, self.dense = Positions.Table(), layers.Dense(8)

    def call(self, x):
        return self.dense(x + self.table(x))


class Counts(layers.Layer):
    """Updates a variable of its own: cannot be opened."""

    def build(self, shape):
        self.dense = layers.Dense(8)
        self.dense.build(shape)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.count.assign_add(1.0)
        return self.dense(x)


class AddsLosses(layers.Layer):
    """Adds losses of its own: of an activation, of a weight, and one in training."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(8)

    def build(self, shape):
        self.dense.build(shape)
        self.gain = self.add_weight(shape=(8,), initializer="ones", name="gain")

    def call(self, x, training=None):
        y = self.dense(x) * self.gain
        self.add_loss(ops.mean(ops.square(ops.cast(y, "float32"))))
        self.add_loss(ops.sum(ops.square(ops.cast(self.gain, "float32"))))
        if training:
            self.add_loss([ops.mean(ops.cast(y, "float32"))])
        return y


class Raw(layers.Layer):
    """Calls TensorFlow itself: cannot be opened."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(8)

    def call(self, x):
        return tf.math.sin(self.dense(x))


class RunsAFunction(layers.Layer):
    """Has an operation run a function, which uses a layer and a tensor besides its arguments."""

    def __init__(self, operation, **kwargs):
        super().__init__(**kwargs)
        self.operation = operation
        self.first, self.second = layers.Dense(8), layers.Dense(8, activation="tanh")

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)
        super().build(shape)

    def call(self, x):
        h = self.first(x)
        mean = ops.mean(h, axis=0)

        def step(carry, row):
            made = ops.tanh(self.second(carry) + row)
            return made, made

        return {
            "cond": lambda: ops.cond(ops.sum(h) > 1e4, lambda: h, lambda: self.second(h) + mean),
            "switch": lambda: ops.switch(1, [self.first, self.second], h),
            "map": lambda: ops.map(lambda row: self.second(row) * mean, h),
            "vectorized_map": lambda: ops.vectorized_map(lambda row: self.second(row) + mean, h),
            "fori_loop": lambda: ops.fori_loop(0, 3, lambda i, made: self.second(made) + mean, h),
            "scan": lambda: ops.transpose(
                ops.scan(step, h[:, 0], ops.transpose(h, (1, 0, 2)))[1], (1, 0, 2)
            ),
        }[self.operation]()


# By `keras.ops`, the name of the operation's class.
FUNCTIONS = {
    "cond": "Cond",
    "switch": "Switch",
    "map": "Map",
    "vectorized_map": "VectorizedMap",
    "fori_loop": "ForiLoop",
    "scan": "Scan",
}
OPENED = {
    "feedforward": Feedforward,
    "own_weights": OwnWeights,
    "twice": Twice,
    "side_effect": SideEffect,
    "switch": Switch,
    "told": Told,
    "trained_by_default": TrainedByDefault,
    "shapes": Shapes,
    "nested": Nested,
    "positions": Positions,
    "adds_losses": AddsLosses,
    "recurrent": Recurrent,
    "attentive": Attentive,
    "attentive_dropout": lambda: Attentive(dropout=0.2),
    "attention_not_causal": lambda: Attentive(causal=False),
}
CLOSED = {
    "counts": Counts,
    "raw": Raw,
    **{name: functools.partial(RunsAFunction, name) for name in FUNCTIONS},
}
