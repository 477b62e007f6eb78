"""Random Keras graphs: layers, branches, splits, nested models, shared layers, composites."""

import keras
from keras import ops

layers = keras.layers
ACTIVATIONS = ["relu", "tanh", "sigmoid", "elu", "gelu", "silu"]
INPUT_SHAPES = [(4,), (6, 4), (5, 4, 2)]


class Composite(layers.Layer):
    """Layers, operations, variables and shapes; does something else in training."""

    def __init__(self, units):
        super().__init__()
        self.first, self.second = layers.Dense(4, activation="tanh"), layers.Dense(units)
        self.norm = layers.BatchNormalization()

    def build(self, shape):
        self.gain = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.kernel = self.add_weight(shape=(shape[-1], 4))
        self.first.build(shape)
        for layer in (self.norm, self.second):
            layer.build((*shape[:-1], 4))

    def call(self, x, training=None):
        sizes = ops.shape(x)
        y = ops.reshape(self.gain * x, (sizes[0], -1, sizes[-1]))
        y = ops.reshape(ops.matmul(y, ops.exp(self.kernel)), (*sizes[:-1], 4))
        y = y + self.first(x) if training else y * self.first(x)
        return self.second(self.norm(y, training=training))


class Attends(layers.Layer):
    """An attention layer within a layer."""

    def __init__(self, dropout, causal):
        super().__init__()
        self.attention, self.causal = layers.MultiHeadAttention(2, 2, dropout=dropout), causal

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return x + self.attention(x, x, use_causal_mask=self.causal)


class RandomGraph:
    """Grows a graph tensor by tensor.

    Args:
        random: Source of choices, as `random.Random`.
        inputs: The Keras tensors to begin with.
        nesting: How deep models may lie within models.
        composites: Whether there are attention and recurrent layers, layers made of layers, and
            such as add losses.
    """

    def __init__(self, random, inputs, nesting=1, composites=False):
        self.composites = composites
        self.random = random
        self.pool = list(inputs)
        self.used = set()
        self.nesting = nesting

    def choice(self, *options):
        return self.random.choice(options)

    def grow(self, steps):
        """Appends the results of so many operations; returns the tensors that nothing uses."""
        for _ in range(steps):
            # The latest most often, so that graphs grow deep.
            x = self.choice(*[self.pool[-1]] * 3, *self.pool)
            self.used.add(id(x))
            self.pool += self.operation(x)
        return [x for x in self.pool if id(x) not in self.used]

    def operation(self, x):
        """A random operation on `x`; returns a list of tensors."""
        kinds = [self.plain] * 5 + [self.joined] * 3 + [self.split, self.shared] + [self.nested] * 2
        if self.composites:
            kinds += [self.composite] * 8
        return self.choice(*kinds)(x)

    def composite(self, x):
        """One with layers inside, or a loss."""
        kind = self.choice("own", "own", "loss", "attention", "attention", "recurrent")
        if kind == "loss":
            return [layers.Dense(2, activation="relu", activity_regularizer="l2")(x)]
        if kind == "own" or len(x.shape) != 3:
            return [Composite(self.choice(1, 2, 4))(x)]
        if kind == "recurrent":
            cell = self.choice(layers.SimpleRNN, layers.GRU, layers.LSTM)
            layer = cell(2, return_sequences=self.choice(True, False), unroll=True)
            if self.choice(True, False):
                layer = layers.Bidirectional(layer)
            return [self.choice(layer, layers.TimeDistributed(layers.Dense(2)))(x)]
        if self.choice(True, False):
            return [Attends(0.0, self.choice(True, False))(x)]
        y = self.like(x)
        if self.choice(True, False):
            return [self.choice(layers.Attention, layers.AdditiveAttention)()([x, y])]
        heads = {"num_heads": 2, "use_bias": self.choice(True, False)}
        return [
            self.choice(
                layers.MultiHeadAttention(key_dim=2, **heads),
                layers.GroupQueryAttention(2, 2, 1, use_bias=heads["use_bias"]),
            )(x, y, use_causal_mask=self.choice(True, False))
        ]

    def like(self, x):
        """A tensor of the shape of `x`: one of the pool, `x` itself, or one made of it."""
        same = [y for y in self.pool if y.shape == x.shape]
        y = self.choice(*same, layers.Dense(x.shape[-1])(x))
        self.used.add(id(y))
        return y

    def plain(self, x):
        return [self.layer(x.shape)(x)]

    def joined(self, x):
        y = self.like(x)
        kind = self.choice("add", "three times", "concatenate", "multiply", "matmul")
        if kind == "add":
            return [layers.Add()([x, y])]
        if kind == "three times":
            return [layers.Add()([x, y, x])]
        if kind == "concatenate":
            return [layers.Concatenate()([y, x])]
        if kind == "matmul" and len(x.shape) == 3:
            return [keras.ops.matmul(x, keras.ops.transpose(y, (0, 2, 1)))]
        return [keras.ops.multiply(x, y)]

    def split(self, x):
        if x.shape[-1] % 2:
            return self.plain(x)
        return keras.ops.split(x, 2, axis=-1)

    def shared(self, x):
        """One layer called on two tensors."""
        layer = self.layer(x.shape)
        return [layer(self.like(x)), layer(x)]

    def nested(self, x):
        """A model within the model, called once or twice."""
        if self.nesting == 0:
            return self.plain(x)
        if self.random.random() < 0.5:
            inner_input = keras.Input(x.shape[1:])
            inner = RandomGraph(self.random, [inner_input], self.nesting - 1, self.composites)
            model = keras.Model(inner_input, inner.grow(3)[-1])
        else:
            model = keras.Sequential([self.layer(x.shape)])
            model.build(x.shape)
            model.add(self.layer(model.output_shape))
        if self.random.random() < 0.5:
            return [model(self.like(x)), model(x)]
        return [model(x)]

    # --- Layers ----------------------------------------------------------------------------------

    def layer(self, shape):
        """A random layer for tensors of a shape (batch, positions ..., channels)."""
        kinds = [self.dense, self.normalization, self.activation]
        if len(shape) > 2:
            kinds += [self.convolution] * 3 + [self.resizing]
        return self.choice(*kinds)(shape)

    def dense(self, shape):
        units, activation = self.choice(1, 2, 4), self.choice(None, *ACTIVATIONS)
        if self.choice("dense", "einsum") == "dense":
            return layers.Dense(units, activation=activation, use_bias=self.choice(True, False))
        letters = "xy"[: len(shape) - 2]
        return layers.EinsumDense(
            f"b{letters}c,cd->b{letters}d",
            (*shape[1:-1], units),
            bias_axes="d",
            activation=activation,
        )

    def normalization(self, shape):
        return self.choice(layers.BatchNormalization, layers.LayerNormalization)()

    def activation(self, shape):
        if shape[-1] > 1 and self.choice(True, False):
            return layers.Softmax()
        kind = self.choice(layers.ReLU, layers.PReLU, layers.Activation, layers.Activation)
        return kind(self.choice(*ACTIVATIONS)) if kind is layers.Activation else kind()

    def convolution(self, shape):
        rank, channels, units = len(shape) - 2, shape[-1], self.choice(1, 2, 4)
        kind = self.choice("Conv", "Conv", "DepthwiseConv", "SeparableConv", "Transpose")
        options = {
            "kernel_size": self.choice(1, 2, 3),
            "strides": self.choice(1, 1, 2),
            "padding": self.choice("same", "valid") if min(shape[1:-1]) > 4 else "same",
            "use_bias": self.choice(True, False),
            "activation": self.choice(None, *ACTIVATIONS),
        }
        if kind == "Transpose":
            return getattr(layers, f"Conv{rank}DTranspose")(units, **options)
        if options["strides"] == 1:
            options["dilation_rate"] = self.choice(1, 2)
        if kind == "Conv":
            if rank == 1 and self.choice(True, False):
                options["padding"] = "causal"
            if channels % 2 == 0 and units % 2 == 0:
                options["groups"] = self.choice(1, 2)
            return getattr(layers, f"Conv{rank}D")(units, **options)
        options["depth_multiplier"] = self.choice(1, 2)
        if kind == "SeparableConv":
            options["filters"] = units
        return getattr(layers, f"{kind}{rank}D")(**options)

    def resizing(self, shape):
        rank, smallest, largest = len(shape) - 2, min(shape[1:-1]), max(shape[1:-1])
        names = ["GlobalAveragePooling{}D", "GlobalMaxPooling{}D"]
        if smallest > 1:
            names += ["AveragePooling{}D", "MaxPooling{}D"]
        if largest <= 4:
            names += ["UpSampling{}D"] * 2
        name = self.choice("Flatten", *names).format(rank)
        options = {}
        if name.startswith(("Average", "Max")):
            options["pool_size"] = 2
        if name == "UpSampling2D":
            options["interpolation"] = self.choice("nearest", "bilinear")
        return getattr(layers, name)(**options)


def random_model(random, steps=6, composites=False):
    """A random model of one or more inputs and outputs."""
    inputs = [keras.Input(random.choice(INPUT_SHAPES)) for _ in range(random.choice([1, 1, 2]))]
    graph = RandomGraph(random, inputs, composites=composites)
    # An older Keras does not take an input for an output that nothing else uses.
    is_input = set(map(id, inputs))
    outputs = [layers.ReLU()(y) if id(y) in is_input else y for y in graph.grow(steps)]
    if random.random() < 0.3:
        # One that is used inside as well; or an input, given back as it came.
        outputs.append(random.choice(graph.pool))
    return keras.Model(inputs, outputs)
