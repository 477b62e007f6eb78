"""Right gradients in architectures of all kinds: as near float32's as float16 can be."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from compare import TINY, Threefold, build_all, error, linear, normal
from conftest import MODES
from keras import ops

import tf_gradscale as gs

layers = keras.layers
slow = pytest.mark.slow


# --- Recurrent -----------------------------------------------------------------------------------

SEQUENCES = normal((4, 5, 6), 1)
# Of four, two, five and one steps.
PADDED = SEQUENCES * (np.arange(5) < np.array([[4], [2], [5], [1]])).astype("float32")[..., None]


class Cell(layers.Layer):
    """A recurrent cell of one's own, with two states."""

    state_size = (4, 3)
    output_size = 3

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")
        self.out = layers.Dense(3)
        self.out.build((None, 4))

    def call(self, x, states):
        h = ops.tanh(ops.matmul(x, self.kernel) + 0.5 * states[0])
        y = self.out(h) + ops.sigmoid(states[1])
        return y, (h, y)


def of_two_cells(x):
    return layers.RNN(layers.StackedRNNCells([layers.GRUCell(4), layers.LSTMCell(3)]))(x)


def films(x):
    y = layers.ConvLSTM1D(2, 3, padding="same")(layers.Reshape((5, 6, 1))(x))
    return layers.Flatten()(y)


def from_states(x):
    """One layer begins where the other ended."""
    y, h, c = layers.LSTM(4, return_sequences=True, return_state=True)(x)
    return layers.LSTM(4, return_sequences=True)(y, initial_state=[h, c]), h


RECURRENT = {
    "SimpleRNN": lambda x: layers.SimpleRNN(4)(x),
    "LSTM": lambda x: layers.LSTM(4, return_sequences=True)(x),
    "LSTM_unrolled": lambda x: layers.LSTM(4, unroll=True)(x),
    "GRU": lambda x: layers.GRU(4)(x),
    "GRU_reset_before": lambda x: layers.GRU(4, reset_after=False, go_backwards=True)(x),
    "ConvLSTM1D": films,
    "Bidirectional": lambda x: layers.Bidirectional(layers.GRU(3, return_sequences=True))(x),
    "TimeDistributed": lambda x: layers.TimeDistributed(layers.Dense(4, activation="relu"))(x),
    "two_cells": of_two_cells,
    "own_cell": lambda x: layers.RNN(Cell(), return_sequences=True)(x),
    "LSTM_states": lambda x: layers.LSTM(4, return_sequences=True, return_state=True)(x),
    "GRU_states": lambda x: layers.GRU(4, return_state=True)(x),
    "from_states": from_states,
    "masked_LSTM": lambda x: layers.LSTM(4, return_sequences=True)(layers.Masking()(x)),
    "masked_Bidirectional": lambda x: layers.Bidirectional(layers.LSTM(3))(layers.Masking()(x)),
    "masked_states": lambda x: layers.GRU(4, return_state=True)(layers.Masking()(x)),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, "graph") for name in RECURRENT]
    + [("LSTM", "eager"), ("own_cell", "eager"), ("masked_states", "eager")]
    # XLA takes five to fifteen seconds to compile one.
    + [("GRU", "xla")]
    + [pytest.param(name, "xla", marks=slow) for name in RECURRENT if name != "GRU"],
)
def test_recurrent_layers(name, mode):
    def build():
        inputs = x = keras.Input((5, 6))
        if name.startswith("masked"):
            x = layers.Masking()(x)
        x = layers.Dense(6, activation="tanh")(x)
        *states, y = reversed(keras.tree.flatten(RECURRENT[name](x)))
        return keras.Model(inputs, [*states, layers.Dense(3)(y)])

    Threefold(build, PADDED if name.startswith("masked") else SEQUENCES).check(MODES[mode])


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("mode", ["eager", "graph", pytest.param("xla", marks=slow)])
def test_states_that_are_kept(run, unroll):
    """Each batch goes on where the last ended, in the pass that differentiates as in others."""

    def build():
        inputs = keras.Input(batch_shape=SEQUENCES.shape)
        x = layers.Dense(6, activation="tanh")(inputs)
        x = layers.GRU(4, return_sequences=True, stateful=True, unroll=unroll)(x)
        return keras.Model(inputs, layers.Dense(3)(x))

    threefold = Threefold(build, SEQUENCES)
    true, ours = threefold.true, threefold.ours
    step, true_step = threefold.gradients(ours, run), threefold.gradients(true, tf.function)
    seen = []
    for multiplier in (1.0, TINY, 1.0):
        wanted = true_step()
        ours.scales.unfreeze()
        assert max(error(step(multiplier), wanted)) < 5e-3
        state, true_state = (model.layers[2].states[0] for model in (ours, true))
        np.testing.assert_allclose(state, true_state, atol=2e-3)
        seen.append(wanted)
    # And they matter.
    assert max(error(seen[1], seen[0])) > 0.1


def operations(graph):
    """Kinds of all operations of a graph, and those within its while loops."""
    definition = graph.as_graph_def()
    functions = {f.signature.name: f.node_def for f in definition.library.function}
    kinds, in_loops = [], []

    def collect(nodes, looped):
        for node in nodes:
            (in_loops if looped else kinds).append(node.op)
            for value in node.attr.values():
                for name in [value.func.name, *(f.name for f in value.list.func)]:
                    if name:
                        inside = looped or node.op in ("While", "StatelessWhile")
                        collect(functions[name], inside)

    collect(definition.node, False)
    return kinds, in_loops


def test_nothing_is_written_within_a_loop():
    """Scales are chosen once a pass, not once for each element of a sequence."""

    def build():
        inputs = keras.Input((5, 6))
        x = layers.Bidirectional(layers.LSTM(4, return_sequences=True, dropout=0.2))(inputs)
        return keras.Model(inputs, layers.Dense(3)(layers.RNN(Cell())(x)))

    _, plain, ours = build_all(build)
    found = {}
    for model in (plain, ours):

        @tf.function
        def step(x, model=model):
            with tf.GradientTape() as tape:
                value = linear(model, x)
            return tape.gradient(value, [v.value for v in model.trainable_variables])

        found[model] = operations(step.get_concrete_function(SEQUENCES).graph)
    kinds, in_loops = found[ours]
    assert "AssignVariableOp" in kinds and "TensorListPopBack" in in_loops
    writes = [kind for kind in in_loops if kind.startswith("Assign")]
    assert writes == [kind for kind in found[plain][1] if kind.startswith("Assign")] == []
    # Nor is anything measured there: both passes run the same loops.
    loops = [kinds.count("While") + kinds.count("StatelessWhile") for kinds, _ in found.values()]
    print(loops)
