"""Random Keras graphs: layers, branches, splits, nested models, shared layers."""

import keras

layers = keras.layers
ACTIVATIONS = ["relu", "tanh", "sigmoid", "elu", "gelu", "silu"]
INPUT_SHAPES = [(4,), (6, 4), (5, 4, 2)]


class RandomGraph:
    """Grows a graph tensor by tensor.

    Args:
        random: Source of choices, as `random.Random`.
        inputs: The Keras tensors to begin with.
        nesting: How deep models may lie within models.
    """

    def __init__(self, random, inputs, nesting=1):
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
        return self.choice(*kinds)(x)

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
            inner = RandomGraph(self.random, [inner_input], self.nesting - 1)
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


def random_model(random, steps=6):
    """A random model of one or more inputs and outputs."""
    inputs = [keras.Input(random.choice(INPUT_SHAPES)) for _ in range(random.choice([1, 1, 2]))]
    graph = RandomGraph(random, inputs)
    outputs = graph.grow(steps)
    if random.random() < 0.3:
        # One that is used inside as well; or an input, given back as it came.
        outputs.append(random.choice(graph.pool))
    return keras.Model(inputs, outputs)
