"""A closed region of a model: its graphs, one for each value of `training`, and their scales."""

import threading

import keras
import tensorflow as tf

from tf_gradscale.opening import outside_of_calls
from tf_gradscale.program import Program, distinct
from tf_gradscale.registry import ScaleRegistry

# One thread at a time makes graphs: meanwhile some of what Keras has once for all is replaced
# (shapes.dynamic_shapes), and the layers are run in a way of their own (opening.open_call).
making_graphs = threading.RLock()


class Region:
    """A closed region of a model: inside, gradients are scaled; outside, none is.

    Calling it runs the graph's operations as Keras would. Its gradient is Algorithm 1: for each
    step in reverse order, the rule for its kind receives ⟨α, ∇Y⟩ and gives ⟨α', ∇X⟩ for each
    input, and the finished gradients of its variables. Float inputs and outputs are exchanged
    with the outside in float32 and at their true magnitude.

    Args:
        config: The `GradScaleConfig`.

    Attributes:
        observer: An `observer.Observer` that sees all tensors, or `None`.
    """

    def __init__(self, config):
        self.config = config
        self.observer = None
        self.scales = ScaleRegistry(config)
        self._traces, self._programs = {}, {}

    def add(self, trace, key=None):
        """Adds graphs for the values of `training`; all graphs of a region share its scales.

        Args:
            trace: Function of `training`, as in Keras, that gives the `graph.Graph`: what a layer
                does may depend on it.
            key: What the graphs are for, where there are several.
        """
        with making_graphs:
            self._traces[key] = trace
            program = self._program(key, True)
            if program.graph.told:
                # What it has besides must be known before the scales are made; `None` is taken
                # for `False` by all but the code that tells them apart.
                self._program(key, False)
            if not self.scales.is_built:
                made = self._programs.values()
                weights = distinct(w for program in made for w in program.weights())
                self.scales.build(weights, len(program.graph.head))
                for weight in weights:
                    # Which an optimizer that knows no model asks for.
                    weight._is_gradient_scaled = True

    def _program(self, key, training):
        if (key, training) not in self._programs:
            with making_graphs:
                self._programs[key, training] = self._made(key, training)
        return self._programs[key, training]

    def _made(self, key, training):
        if (key, training) in self._programs:
            # By another thread, meanwhile.
            return self._programs[key, training]
        # Graphs of their own are made to try out layers; none may be left in the model's.
        with tf.init_scope(), outside_of_calls():
            self.scales.begin()
            return Program(self._traces[key](training), self.config, self.scales)

    def __contains__(self, key):
        return key in self._traces

    def graph(self, training=True, key=None):
        """The `graph.Graph` that is run."""
        return self._program(key, training).graph

    def __call__(self, inputs, training, key=None):
        """Runs a graph.

        Args:
            inputs: Flat list of tensors.
            training: Python bool or `None`, as in Keras.
            key: Which of the graphs.

        Returns:
            The outputs, in the structure of the graph; float ones are float32.
        """
        program = self._program(key, None if training is None else bool(training))
        made = iter(program(inputs, self, self.observer))
        structure = program.graph.structure
        return keras.tree.map_structure(lambda kt: None if kt is None else next(made), structure)
