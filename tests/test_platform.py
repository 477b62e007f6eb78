"""What the package takes from TensorFlow and Keras that they do not document.

A test here fails when such a name goes or changes its meaning, and says where to look.
"""

import ast
import inspect
import pathlib
import re
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src import ops as keras_ops
from keras.src.backend import AutocastScope
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.layers.layer import CallContext
from keras.src.models.functional import Functional
from keras.src.ops.node import Node
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.eager import record
from tensorflow.python.ops import control_flow_util

import tf_gradscale as gs
from tf_gradscale.rules import carry, gemm

layers = keras.layers
PACKAGE = pathlib.Path(gs.__file__).parent
SOURCES = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}

# Every private attribute of a Keras or TensorFlow object that the package reads; each is tested
# below. Attributes of the package's own objects are not listed.
PRIVATE = {
    "_allow_non_tensor_positional_args",
    "_call_has_training_arg",
    "_compute_causal_padding",
    "_convert_input_args",
    "_dtype_policy",
    "_flatten_layers",
    "_functional",
    "_inbound_nodes",
    "_inputs_struct",
    "_iterations",
    "_kernel",
    "_keras_history",
    "_keras_mask",
    "_layers",
    "_losses",
    "_nodes_by_depth",
    "_outbound_nodes",
    "_outputs_struct",
    "_remat_mode",
    "_standardize_inputs",
    "_stateful_handle_finite_grads",
    "_stateful_handle_non_finite_grads",
    "_track_variable",
    "_trainable_variables",
}
MODULES = {
    "keras.src",
    "keras.src.backend",
    "keras.src.backend.common",
    "keras.src.backend.common.stateless_scope",
    "keras.src.backend.common.symbolic_scope",
    "keras.src.layers.layer",
    "keras.src.models.functional",
    "keras.src.saving",
    "tensorflow.compiler.tf2xla.ops",
    "tensorflow.python.eager",
    "tensorflow.python.ops",
    "tensorflow.python.saved_model.save_context",
}


def private_names():
    """Private attributes that are read in the package but set nowhere in it."""
    read, own = set(), set()
    for source in SOURCES.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
                (own if isinstance(node.ctx, ast.Store) else read).add(node.attr)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Call) and len(node.args) > 1:
                name = ast.unparse(node.args[1]).strip("'")
                kinds = {"getattr": read, "object.__setattr__": own}
                if re.fullmatch("_[a-z_]+", name) and ast.unparse(node.func) in kinds:
                    kinds[ast.unparse(node.func)].add(name)
    return read, own


def test_every_private_name_is_listed_here():
    read, own = private_names()
    # `_replace` is documented, of named tuples; `_domain` is a module of the package.
    unknown = read - own - PRIVATE - {"_replace", "_domain"}
    assert not unknown
    assert PRIVATE <= read | own


def test_every_private_module_is_listed_here():
    found = set()
    for source in SOURCES.values():
        found |= set(re.findall(r"from ((?:keras\.src|tensorflow\.\w+)[\w.]*) import", source))
    assert found == MODULES


# --- Graphs --------------------------------------------------------------------------------------


def two_inputs():
    inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((3,), name="b")}
    outputs = [layers.Add()(list(inputs.values())), layers.Dropout(0.5)(inputs["a"])]
    return keras.Model(inputs, outputs)


def test_functional_models():
    """_inputs_struct, _outputs_struct: as given; _standardize_inputs: a flat list of tensors."""
    model = two_inputs()
    assert type(model) is Functional
    assert set(model._inputs_struct) == {"a", "b"}
    assert isinstance(model._outputs_struct, list)
    assert model._outputs_struct[0] is model.outputs[0]
    x = {"b": np.full((2, 3), 2.0), "a": np.full((2, 3), 1.0)}
    flat = model._standardize_inputs(x)
    assert [tf.is_tensor(value) for value in flat] == [True, True]
    wanted = [1.0 if kt.name == "a" else 2.0 for kt in model.inputs]
    assert [float(value[0, 0]) for value in flat] == wanted
    assert all(value.dtype == tf.float32 for value in flat)


def test_sequential_models():
    """_functional: what it runs, or None; _layers: with its input layer."""
    model = keras.Sequential([layers.Dense(2)])
    assert model._functional is None
    model.build((None, 3))
    assert type(model._functional) is Functional
    assert [type(layer) for layer in model._layers] == [layers.InputLayer, layers.Dense]
    before = model._functional
    model.add(layers.Dense(1))
    # A region is made anew where this is another object.
    assert model._functional is not before


def test_nodes():
    """_nodes_by_depth: in Keras' own order of execution; arguments: filled in by tensors' ids."""
    order = []

    class Noting(layers.Layer):
        def call(self, x, training=None):
            order.append(self.name)
            return x

    inputs = keras.Input((3,))
    x, y = Noting(name="p")(inputs), Noting(name="q")(inputs)
    model = keras.Model(inputs, layers.Add()([Noting(name="r")(y), x, Noting(name="s")(x)]))
    nodes = [
        node
        for depth in sorted(model._nodes_by_depth, reverse=True)
        for node in model._nodes_by_depth[depth]
    ]
    assert all(type(node) is Node for node in nodes)
    assert [node.is_input for node in nodes].count(True) == 1
    order.clear()
    model(np.zeros((1, 3)))
    assert order == [n.operation.name for n in nodes if isinstance(n.operation, Noting)]
    last = nodes[-1]
    assert isinstance(last.operation, layers.Add)
    tensors = {id(kt): index for index, kt in enumerate(last.input_tensors)}
    args, kwargs = last.arguments.fill_in(tensors)
    assert args == ([0, 1, 2],)
    assert kwargs == {}
    assert [kt is out for kt, out in zip(last.outputs, model.outputs, strict=True)] == [True]


def test_a_nested_models_call_records_only_masks_and_training():
    inputs, inner_input = keras.Input((3,)), keras.Input((3,))
    inner = keras.Model(inner_input, layers.Dense(2)(inner_input))
    for flag in ({}, {"training": False}):
        model = keras.Model(inputs, inner(inputs, **flag))
        node = model.outputs[0]._keras_history.operation._inbound_nodes[-1]
        assert len(node.arguments.args) == 1
        given = {k: v for k, v in node.arguments.kwargs.items() if v is not None}
        assert given == flag


def test_functional_passes_training_only_to_layers_that_take_it():
    """_call_has_training_arg: whether `call` has such an argument."""
    assert layers.Dropout(0.5)._call_has_training_arg
    assert layers.BatchNormalization()._call_has_training_arg
    assert not layers.Flatten()._call_has_training_arg
    # What the run is told goes before what the node recorded.
    inputs = keras.Input((1000,))
    model = keras.Model(inputs, layers.Dropout(0.5)(inputs, training=True))
    x = np.ones((1, 1000))
    assert np.all(model(x, training=False) == x)
    assert not np.all(model(x) == x)


def test_flatten_layers_goes_from_the_outside_in():
    """_flatten_layers: the model itself first, inner layers after those around them."""
    inner = keras.Sequential([keras.Input((3,)), layers.Dense(2, name="deep")], name="inner")
    inputs = keras.Input((3,))
    model = keras.Model(inputs, inner(inputs))
    names = [layer.name for layer in model._flatten_layers()]
    assert names[0] == model.name
    assert names.index("inner") < names.index("deep")


def test_saving_asks_for_the_functional_signature():
    """Keras saves the graph of a subclass only if its constructor takes what Functional's does."""
    inputs = keras.Input((3,))
    config = gs.Model(inputs, layers.Dense(2)(inputs)).get_config()
    assert {"layers", "input_layers", "output_layers", "config"} <= set(config)


# --- Variables and dtypes ------------------------------------------------------------------------


def test_autocast_scope():
    """Casts float variables on reading; `None` gives what is stored; `maybe_cast` decides."""
    variable = keras.Variable([1.0, 2.0])
    count = keras.Variable([1], dtype="int32")
    with AutocastScope("float16"):
        assert variable.value.dtype == tf.float16
        assert count.value.dtype == tf.int32
        with AutocastScope(None):
            assert isinstance(variable.value, tf.Variable)
            assert variable.value.dtype == tf.float32
        assert variable.value.dtype == tf.float16

    class Doubling(AutocastScope):
        def maybe_cast(self, value):
            return 2 * tf.convert_to_tensor(value)

    with Doubling("float16"):
        np.testing.assert_array_equal(variable.value, [2.0, 4.0])
        np.testing.assert_array_equal(keras.ops.convert_to_tensor(variable), [2.0, 4.0])
    assert isinstance(variable.value, tf.Variable)


def test_layers_open_the_scope_in_their_call():
    class Reading(layers.Layer):
        def build(self, shape):
            self.w = self.add_weight((), dtype="float32")

        def call(self, x):
            return x + self.w.value

    layer = Reading(dtype="mixed_float16")
    assert layer(tf.zeros(1)).dtype == tf.float16
    # It is `__call__` that opens it, so `call` can be run in another one.
    with AutocastScope(None):
        assert layer.call(tf.zeros(1)).dtype == tf.float32


def test_kernels_are_stored_apart_from_what_lora_adds():
    """_kernel: the stored variable of Dense, EinsumDense and Conv."""
    for layer, shape in (
        (layers.Dense(2), (None, 3)),
        (layers.EinsumDense("ab,bc->ac", 2), (None, 3)),
        (layers.Conv1D(2, 1), (None, 4, 3)),
    ):
        layer.build(shape)
        assert isinstance(layer._kernel, keras.Variable)
        assert layer._kernel is layer.trainable_variables[0]
        assert not layer.lora_enabled
        assert layer.quantization_mode is None
        assert gemm.Gemm.takes(layer)
        layer.enable_lora(1)
        assert layer.lora_enabled
        assert not gemm.Gemm.takes(layer)


def test_causal_padding():
    """_compute_causal_padding: in front only, dilation × (kernel − 1)."""
    layer = layers.Conv1D(2, 3, padding="causal", dilation_rate=2)
    layer.build((None, 8, 1))
    assert [tuple(pair) for pair in layer._compute_causal_padding()] == [(0, 0), (4, 0), (0, 0)]


# --- Marks on tensors ----------------------------------------------------------------------------


def test_masks_are_attributes_of_tensors():
    """_keras_mask: read by the layers that follow, lost by any other operation."""
    x = layers.Embedding(4, 2, mask_zero=True)(np.array([[1, 0]]))
    np.testing.assert_array_equal(x._keras_mask, [[True, False]])
    assert not hasattr(tf.identity(x), "_keras_mask")
    y = tf.ones((1, 2, 2))
    pool = layers.GlobalAveragePooling1D()
    y._keras_mask = tf.constant([[True, False]])
    doubled = tf.constant([[[1.0, 1.0], [3.0, 3.0]]])
    doubled._keras_mask = y._keras_mask
    np.testing.assert_array_equal(pool(doubled), [[1.0, 1.0]])


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_activations_mark_their_output_with_the_logits(activation):
    """_keras_logits: set by the two activations, read by the losses made for them."""
    logits = tf.constant([[200.0, -200.0]])
    output = keras.activations.get(activation)(logits)
    assert output._keras_logits is logits
    if activation == "softmax":
        loss = keras.losses.sparse_categorical_crossentropy(np.array([1]), output)
    else:
        loss = keras.losses.binary_crossentropy(np.array([[0.0, 1.0]]), output)
    # From the probabilities alone it would be −log of the smallest one told from 0.
    assert float(loss[0]) >= 200.0


def test_operations_are_known_by_class_name():
    """Classes of keras.ops are not exported: they are told by name and module."""
    x = keras.Input((4, 4))
    made = {
        "Softmax": keras.ops.softmax(x),
        "Sigmoid": keras.ops.sigmoid(x),
        "Cast": keras.ops.cast(x, "float16"),
        "Relu": keras.ops.relu(x),
        "Relu6": keras.ops.relu6(x),
        "LeakyRelu": keras.ops.leaky_relu(x),
        "Elu": keras.ops.elu(x),
        "Selu": keras.ops.selu(x),
        "Gelu": keras.ops.gelu(x),
        "Silu": keras.ops.silu(x),
        "Softplus": keras.ops.softplus(x),
        "Tanh": keras.ops.tanh(x),
        "LogSoftmax": keras.ops.log_softmax(x),
        "HardTanh": keras.ops.hard_tanh(x),
        "HardSigmoid": keras.ops.hard_sigmoid(x),
        "Add": x + x,
        "Subtract": x - x,
        "Negative": -x,
        "Maximum": keras.ops.maximum(x, 0.0),
        "Minimum": keras.ops.minimum(x, 0.0),
        "Absolute": keras.ops.abs(x),
        "Concatenate": keras.ops.concatenate([x, x], 1),
        "Stack": keras.ops.stack([x, x], 1),
        "Split": keras.ops.split(x, 2, 1)[0],
        "Unstack": keras.ops.unstack(x, axis=1)[0],
        "Reshape": keras.ops.reshape(x, (-1, 2, 8)),
        "Transpose": keras.ops.transpose(x, (0, 2, 1)),
        "Ravel": keras.ops.ravel(x),
        "ExpandDims": keras.ops.expand_dims(x, 1),
        "Squeeze": keras.ops.squeeze(keras.Input((1, 4)), 1),
        "Flip": keras.ops.flip(x, 1),
        "Roll": keras.ops.roll(x, 1, 1),
        "Pad": keras.ops.pad(x, ((0, 0), (1, 1), (0, 0))),
        "GetItem": x[:, 0],
        "MaxPool": keras.ops.max_pool(x, 2),
        "Identity": layers.Identity()(x),
        "Where": keras.ops.where(x > 0, x, x),
        "StopGradient": keras.ops.stop_gradient(x),
        "Swapaxes": keras.ops.swapaxes(x, 1, 2),
        "Moveaxis": keras.ops.moveaxis(x, 1, 2),
        "BroadcastTo": keras.ops.broadcast_to(keras.Input((1, 4)), (2, 4, 4)),
    }
    for name, kt in made.items():
        operation = kt._keras_history.operation
        assert type(operation).__name__ == name
        assert type(operation).__module__.startswith("keras.src.ops.") or name == "Identity"
        step = types.SimpleNamespace(operation=operation, inputs=[])
        assert carry.is_neutral(step) or name == "Cast"
    # None is listed that does not exist.
    assert set(made) | {"Cast"} >= carry.NEUTRAL_OPS


def test_hidden_causes_of_an_output_are_keras_operations():
    """KerasTensor._keras_history leads nowhere but to the node that the graph holds."""
    model = two_inputs()
    nodes = [node for nodes in model._nodes_by_depth.values() for node in nodes]
    for kt in model.outputs:
        history = kt._keras_history
        assert history.operation._inbound_nodes[history.node_index] in nodes


# --- Optimizer -----------------------------------------------------------------------------------


def test_the_loss_scale_optimizer_can_be_taken_apart(monkeypatch):
    """What GradScaleOptimizer overrides is what LossScaleOptimizer calls."""
    kind = keras.optimizers.LossScaleOptimizer
    for name in ("_stateful_handle_finite_grads", "_stateful_handle_non_finite_grads"):
        assert callable(getattr(kind, name))
    optimizer = kind(keras.optimizers.SGD(0.5), initial_scale=1.0)
    variable = keras.Variable([1.0])
    calls = []
    for name in ("_stateful_handle_finite_grads", "_stateful_handle_non_finite_grads"):
        monkeypatch.setattr(optimizer, name, lambda *a, name=name, **k: calls.append(name))
    optimizer.build([variable])
    optimizer.apply([tf.constant([1.0])], [variable])
    optimizer.apply([tf.constant([np.inf])], [variable])
    assert calls == ["_stateful_handle_finite_grads", "_stateful_handle_non_finite_grads"]
    assert bool(optimizer.check_finite([tf.constant([1.0]), None]))
    assert not optimizer.check_finite([tf.constant([np.nan])])


def test_tracked_variables_are_saved_with_the_optimizer():
    """_track_variable: a variable made elsewhere becomes part of `optimizer.variables`."""
    optimizer = keras.optimizers.SGD()
    state, weight = keras.Variable([1.0], trainable=False), keras.Variable([1.0])
    optimizer._track_variable(state)
    optimizer.build([weight])
    assert any(v is state for v in optimizer.variables)
    assert [v is weight for v in optimizer._trainable_variables] == [True]


def test_compile_does_not_wrap_a_loss_scale_optimizer():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1, dtype="mixed_float16")])
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    optimizer = gs.GradScaleOptimizer(keras.optimizers.SGD())
    model.compile(optimizer, "mse")
    assert model.optimizer is optimizer


# --- TensorFlow ----------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [None, False, True])
def test_an_if_takes_concrete_functions(jit):
    """tf.raw_ops.StatelessIf: one trace of each branch for all layers."""
    signature = [tf.TensorSpec(None, tf.float32)]
    then, other = (
        tf.function(lambda x, b=b: x * b, input_signature=signature).get_concrete_function()
        for b in (2.0, 3.0)
    )

    def choose(predicate, x):
        (y,) = tf.raw_ops.StatelessIf(
            cond=predicate, input=[x], Tout=[tf.float32], then_branch=then, else_branch=other
        )
        return y

    if jit is not None:
        choose = tf.function(choose, jit_compile=jit)
    for predicate, factor in ((True, 2.0), (False, 3.0)):
        found = choose(tf.constant(predicate), tf.constant([1.0, 4.0]))
        np.testing.assert_array_equal(found, [factor, 4.0 * factor])


def test_a_graph_knows_whether_xla_compiles_it():
    """control_flow_util: where a gradient is divided by 1, for XLA to keep it."""
    seen = []

    def look(x):
        seen.append(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))
        return x

    tf.function(look)(tf.constant(1.0))
    tf.function(look, jit_compile=True)(tf.constant(1.0))
    # A function inside of one that is compiled is part of that.
    inner = tf.function(look)
    tf.function(lambda x: inner(x) + 1.0, jit_compile=True)(tf.constant(1.0))
    assert seen == [False, True, True]


def test_xla_reduces_several_tensors_at_once():
    """gen_xla_ops.xla_variadic_reduce_v2: the sum of one, the largest of another, by column."""
    scalars = [tf.TensorSpec([], tf.float32)] * 4
    step = tf.function(lambda a, b, x, y: (a + x, tf.maximum(b, y)), input_signature=scalars)
    reducer = step.get_concrete_function()

    @tf.function(jit_compile=True)
    def reduce(x, y):
        zeros = [tf.constant(0.0)] * 2
        return gen_xla_ops.xla_variadic_reduce_v2([x, y], zeros, [0], reducer)

    found = reduce(tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([[5.0, 8.0], [7.0, 6.0]]))
    np.testing.assert_array_equal(found, [[4.0, 6.0], [7.0, 8.0]])


def test_whether_a_tape_watches():
    """record.should_record_backprop: what custom gradients ask, within graphs too."""
    x = tf.constant(1.0)
    assert not record.should_record_backprop([x])
    with tf.GradientTape() as tape:
        assert not record.should_record_backprop([x])
        tape.watch(x)
        assert record.should_record_backprop([x])
        assert not record.should_record_backprop([tf.constant(1.0)])

    @tf.function
    def inside(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            return record.should_record_backprop([x])

    assert bool(inside(x))


def test_where_the_replicas_must_be_merged(mirrored):
    """strategy_supports_no_merge_call: whether each replica may apply gradients by itself."""
    supports = tf.__internal__.distribute.strategy_supports_no_merge_call
    assert supports()
    with mirrored.scope():
        # Over CPU devices there is no NCCL, which would allow it.
        assert not mirrored.run(supports)


def test_control_dependencies_on_returned_gradients_are_kept():
    """An assignment in a backward pass runs although nothing reads it, in a function too."""
    count = tf.Variable(0.0)

    @tf.custom_gradient
    def identity(x):
        def grad(dy):
            with tf.control_dependencies([count.assign_add(1.0)]):
                return tf.identity(dy)

        return tf.identity(x), grad

    forward = tf.function(identity)
    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = forward(x)
    tape.gradient(y, x)
    assert float(count) == 1.0


def test_variables_in_custom_gradients_come_as_themselves():
    """`variables=` names those that were read, by `ref()`, in whatever order."""
    variables = [tf.Variable(2.0), tf.Variable(3.0), tf.Variable(5.0, trainable=False)]
    seen = []

    @tf.custom_gradient
    def product(x):
        def grad(dy, variables=None):
            seen.extend(v.ref() for v in variables)
            return dy, [None if v is None else dy for v in variables]

        return x * variables[0] * variables[1] * variables[2], grad

    with tf.GradientTape() as tape:
        y = product(tf.constant(1.0))
    tape.gradient(y, variables[:2])
    assert {v.ref() for v in variables[:2]} <= set(seen)


def test_custom_gradients_are_marked():
    """_gradient_op_type: at the operations that have one, in functions inside as well."""

    @tf.custom_gradient
    def identity(x):
        return tf.identity(x), lambda dy: dy

    def marked(function):
        definition = tf.function(function).get_concrete_function(tf.constant(1.0)).graph
        definition = definition.as_graph_def()
        nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
        return any("_gradient_op_type" in node.attr for node in nodes)

    assert marked(lambda x: identity(2.0 * x))
    assert marked(lambda x: tf.while_loop(lambda x: x < 9.0, lambda x: [identity(x) + 1], [x])[0])
    assert marked(lambda x: tf.recompute_grad(tf.tanh)(x))
    assert not marked(lambda x: tf.nn.relu(2.0 * x))


def test_functions_are_cut_to_what_is_asked_for():
    """wrap_function: reads the variable itself; `prune` feeds any tensor, leaves out updates."""
    variable = tf.Variable(2.0)

    def double():
        variable.assign_add(1.0)
        return 2.0 * variable.read_value()

    function = tf.compat.v1.wrap_function(double, [])
    kinds = [op.type for op in function.graph.get_operations()]
    assert "AssignAddVariableOp" in kinds
    read = next(op for op in function.graph.get_operations() if op.type == "ReadVariableOp")
    pruned = function.prune([read.outputs[0]], function.structured_outputs)
    assert float(pruned(tf.constant(5.0))) == 10.0
    assert float(variable) == 2.0


def test_layers_compute_in_their_dtype_policy():
    """_dtype_policy: what all that depends on the dtype is read from."""
    layer = layers.Dense(2, dtype="mixed_float16")
    layer.build((None, 3))
    before = layer._dtype_policy
    assert layer.dtype_policy is before
    vars(layer)["_dtype_policy"] = keras.DTypePolicy("float32")
    assert layer.compute_dtype == layer(tf.zeros((1, 3), tf.float16)).dtype.name == "float32"
    vars(layer)["_dtype_policy"] = before
    assert layer(tf.zeros((1, 3))).dtype == tf.float16


# --- Opening composites --------------------------------------------------------------------------


def test_nodes_are_found_from_tensors_and_layers():
    """_keras_history, _inbound_nodes and _outbound_nodes: lists that each call appends to."""
    layer = layers.Dense(2)
    x = keras.Input((3,))
    first, second = layer(x), layer(x)
    assert second._keras_history.operation is layer
    assert layer._inbound_nodes[second._keras_history.node_index].outputs == [second]
    layers.ReLU()(first)
    assert [len(layer._inbound_nodes), len(layer._outbound_nodes)] == [2, 1]
    assert not layer._inbound_nodes[0].is_input


def test_keras_tensors_are_numbered():
    """In the order in which they are made: what is called first in a composite runs first."""
    names = [keras.ops.abs(keras.KerasTensor((2,))).name for _ in range(12)]
    numbers = [int(name.rpartition("_")[2]) for name in names]
    assert numbers == sorted(numbers)


def test_names_are_counted_in_one_dictionary():
    """object_name_uids: restored after a composite was opened."""
    layers.Dense(2)
    names = global_state.get_global_attribute("object_name_uids")
    before = names["dense"]
    layers.Dense(2)
    assert names["dense"] == before + 1


def test_symbolic_calls_can_be_replaced():
    """`Layer.__call__` runs `symbolic_call` of the instance where it is given Keras tensors."""
    layer = layers.Dense(2)
    layer.build((None, 3))
    given = []
    vars(layer)["symbolic_call"] = lambda x: given.append(x) or x
    x = keras.KerasTensor((None, 3))
    assert layer(x) is x and given == [x]


def test_call_context():
    """current_call_ctx: what nested calls take `training` from, where nobody says."""
    told = []

    class Told(layers.Layer):
        def call(self, x, training=None):
            told.append(training)
            return x

    context = CallContext(entry_layer=None)
    context.set_value("training", "context")
    layer = Told()
    global_state.set_global_attribute("current_call_ctx", context)
    try:
        layer(tf.zeros((1, 1)))
        layer(tf.zeros((1, 1)), training=True)
        layer(tf.zeros((1, 1)))
    finally:
        global_state.set_global_attribute("current_call_ctx", None)
    # A call leaves what it was told to those that follow.
    assert told == ["context", True, True]


def test_which_layers_autocast():
    """autocast_scope: the innermost one; a layer of integers within one does not autocast."""
    seen = []

    class Seen(layers.Layer):
        def call(self, x):
            scope = global_state.get_global_attribute("autocast_scope")
            seen.append(None if scope is None else scope.dtype)
            return x

    layer = Seen(dtype="mixed_float16", autocast=False)
    layer(tf.zeros((1, 1)))
    with AutocastScope("float16"):
        layer(tf.zeros((1, 1)))
    assert seen == ["float16", None]


def test_layers_know_whether_they_are_rematerialized():
    assert layers.Dense(2)._remat_mode is None
    with keras.RematScope("full"):
        assert layers.Dense(2)._remat_mode is not None


def test_losses_are_kept_in_a_list():
    """_losses: what `add_loss` appends to, until the outermost layer is called again."""
    layer = layers.ActivityRegularization(l1=1.0)
    # Newer Keras divides by the size of the batch.
    layer(tf.ones((1, 3)))
    assert [float(loss) for loss in layer._losses] == [3.0]
    del layer._losses[:]
    assert not layer.losses


def test_arguments_that_are_not_converted():
    """_convert_input_args: off, as in Functional models, arguments reach `call` as they are."""

    class Seen(layers.Layer):
        def call(self, x):
            self.seen = x
            return tf.convert_to_tensor(x)

    layer = Seen(dtype="float16")
    layer._convert_input_args = False
    layer._allow_non_tensor_positional_args = True
    x = np.ones((1, 2), "float32")
    layer(x)
    assert layer.seen is x


def test_keras_tries_layers_out_in_a_symbolic_scope():
    seen = []

    class Seen(layers.Layer):
        def call(self, x):
            seen.append(in_symbolic_scope())
            return x

    layer = Seen()
    layer(keras.KerasTensor((None, 2)))
    layer(tf.ones((1, 2)))
    assert seen == [True, False]


def test_stateless_scopes_note_updates():
    """in_stateless_scope: whether variables keep their values; the scope has the new ones."""
    norm = layers.BatchNormalization(momentum=0.5)
    norm.build((None, 1))
    assert not in_stateless_scope()
    with keras.StatelessScope() as scope:
        assert in_stateless_scope()
        norm(tf.constant([[1.0], [3.0]]), training=True)
    assert float(norm.moving_mean[0]) == 0.0
    assert float(scope.get_current_value(norm.moving_mean)[0]) == 1.0
    assert scope.get_current_value(norm.gamma) is None


def test_stateless_scopes_give_values():
    """Variables ask the scope's `get_current_value`; FuncGraph takes placeholders."""
    variable = keras.Variable(1.0)

    class Scope(keras.StatelessScope):
        def get_current_value(self, variable):
            return tf.constant(2.0)

    with Scope():
        assert float(variable.value) == 2.0
    assert float(variable.value) == 1.0
    graph = tf.__internal__.FuncGraph("scratch")
    with graph.as_default():
        assert tf.compat.v1.placeholder("float32", (2,)).graph is graph


def test_variables_inherit_their_operators():
    """So that those set for the time of an opening can be deleted."""
    for name in ("__add__", "__sub__", "__mul__", "__truediv__", "__pow__", "__matmul__"):
        assert name not in vars(keras.Variable)
        assert hasattr(keras.Variable, name)


def test_shape_functions_are_looked_up_in_their_modules():
    """Keras' layers call them as attributes of keras.src.ops, users as those of keras.ops."""
    assert keras_ops.shape is keras.ops.shape
    assert keras.ops.shape(keras.KerasTensor((None, 3))) == (None, 3)
    source = inspect.getsource(layers.MultiHeadAttention)
    assert "ops.shape(" in source and "from keras.src import ops" in inspect.getsource(
        inspect.getmodule(layers.MultiHeadAttention)
    )
