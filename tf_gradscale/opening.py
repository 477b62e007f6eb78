"""Composites opened: the call of a layer built of layers and `keras.ops`, as nodes of its own."""

import collections
import contextlib
import traceback
from typing import Any, NamedTuple

import keras
import tensorflow as tf

# keras.src: not exported; tests/test_platform.py notices if they go.
from keras.src.backend.common import global_state
from keras.src.layers.layer import CallContext

from tf_gradscale import attention
from tf_gradscale.registry import autocast_off
from tf_gradscale.shapes import dynamic_shapes


class NotOpenable(Exception):
    """A composite cannot be opened; the message says what stopped it."""


class Opened(NamedTuple):
    """The inside of one call of a composite.

    `arguments`: (outer, inner) Keras tensors, what it was called on; `masks`: (outer, inner mask),
    for those of the outer tensors that have one. `nodes`: Keras nodes in the order in which the
    call made them. `outputs`: its Keras tensors, as the call returns them; `losses`: those it adds
    with `add_loss`. `graph`: the scratch graph in which it ran. `reads`: what its placeholders
    stand for, by their names: variables, and dimensions as (Keras tensor, axis). `cleared`: outer
    tensors that lost their mask. `returned`: (output or loss, tensor) for those that are tensors of
    the scratch graph.
    """

    arguments: list
    masks: list
    nodes: list
    outputs: Any
    losses: list
    reads: dict
    graph: Any
    cleared: list
    returned: list


def open_call(layer, args, kwargs, training):
    """Runs a layer's `call` on Keras tensors.

    Everything that `Layer.__call__` does around it is done: casts, masks, contexts. The layer,
    its sublayers and Keras' name counters are left as they were.

    Args:
        layer: A `keras.layers.Layer`, built.
        args: Its positional arguments; tensors are Keras tensors.
        kwargs: Its keyword arguments.
        training: What the layer's caller was told.

    Returns:
        An `Opened`.

    Raises:
        NotOpenable: If its call does more than to apply layers and `keras.ops` to its inputs.
    """
    if layer._remat_mode is not None or getattr(layer, "quantization_mode", None) is not None:
        raise NotOpenable("it is rematerialized or quantized")
    inner, args, kwargs = _fresh(args, kwargs)
    scope = _Scope()
    with _as_it_was(layer) as before, scope, dynamic_shapes(scope), call_context(training):
        outputs, histories = _call(layer, args, kwargs, scope)
        unused = [
            kt
            for one, inbound, _ in before.values()
            if one is not layer
            for node in one._inbound_nodes[inbound:]
            for kt in node.outputs
        ]
        wanted = [*flat_tensors(outputs), *unused, *scope.measured, *scope.added]
        returned = [kt for kt, _ in scope.returned]
        nodes = _nodes(wanted, histories, inner, returned)
    if scope.state_mapping:
        raise NotOpenable("it updates a variable")
    if scope.losses:
        raise NotOpenable("it adds a loss")
    return _opened(inner, nodes, outputs, scope)


def open_attention(operation, args, kwargs):
    """Takes a `keras.ops.dot_product_attention` apart; else as `open_call`."""
    inner, args, kwargs = _fresh(args, kwargs)
    given = dict(zip(("query", "key", "value", "bias", "mask", "scale"), args, strict=False))
    given.update({name: x for name, x in kwargs.items() if x is not None})
    with _as_it_was(None), _Scope() as scope:
        output = attention.decompose(operation.is_causal, **given)
        if output is None:
            raise NotOpenable("its operands are of different kinds")
        nodes = _nodes([output], {}, inner)
    return _opened(inner, nodes, output, scope)


def _fresh(args, kwargs):
    """Copies of all Keras tensors: (outer, copy, its mask) each, and the arguments with them."""
    inner: dict[int, tuple] = {}

    def fresh(x):
        # Never the tensors of the caller: MultiHeadAttention takes their masks away.
        if not isinstance(x, keras.KerasTensor):
            return x
        if id(x) not in inner:
            copy = keras.KerasTensor(x.shape, x.dtype)
            mask = getattr(x, "_keras_mask", None)
            if mask is not None:
                mask = copy._keras_mask = keras.KerasTensor(mask.shape, mask.dtype)
            inner[id(x)] = x, copy, mask
        return inner[id(x)][1]

    args, kwargs = keras.tree.map_structure(fresh, (tuple(args), dict(kwargs)))
    return list(inner.values()), args, kwargs


def _opened(inner, nodes, outputs, scope):
    arguments = [(outer, copy) for outer, copy, _ in inner]
    masks = [(outer, mask) for outer, _, mask in inner if mask is not None]
    cleared = [
        outer
        for outer, copy, mask in inner
        if mask is not None and getattr(copy, "_keras_mask", None) is None
    ]
    returned = scope.returned
    return Opened(
        arguments, masks, nodes, outputs, scope.added, scope.reads, scope.graph, cleared, returned
    )


class _Scope(keras.StatelessScope):
    """Variables are placeholders of a scratch graph; updates and losses are only noted."""

    def __init__(self):
        super().__init__(collect_losses=True)
        self.graph = tf.__internal__.FuncGraph("opening")
        self.reads: dict[str, Any] = {}
        # Keras tensors that were asked for their shape.
        self.measured: list = []
        # Keras tensors of the losses that the composite itself adds.
        self.added: list = []
        # Keras tensors that stand for those of the graph, made of variables and shapes alone.
        self.returned: list = []
        self._placeholders: dict[Any, tf.Tensor] = {}

    def __enter__(self):
        self._graph_scope = self.graph.as_default()
        self._graph_scope.__enter__()
        return super().__enter__()

    def __exit__(self, *exception):
        # In this order: variables of layers that were not built before are initialized outside.
        self._graph_scope.__exit__(*exception)
        super().__exit__(*exception)

    def get_current_value(self, variable):
        if id(variable) in self.state_mapping:
            return self.state_mapping[id(variable)]
        if not self.is_current():
            # Within a layer that Keras itself tries out, in a graph of its own.
            return None
        # What the variable is cast to is part of the expression it is read in.
        with autocast_off():
            return self._stand_in(id(variable), variable, variable.dtype, variable.shape)

    def is_current(self):
        """Whether the composite's own code is running, in its own thread."""
        return tf.compat.v1.get_default_graph() is self.graph

    def symbolic(self, x):
        """What a composite returns or adds to its losses, as a Keras tensor, or `None`."""
        if x is None or isinstance(x, keras.KerasTensor):
            return x
        if not tf.is_tensor(x):
            raise NotOpenable(f"it returns {x!r} for a tensor")
        kt = keras.KerasTensor(x.shape, x.dtype.name)
        self.returned.append((kt, x))
        return kt

    def dimension(self, kt, axis):
        """A dimension that is not known before the run."""
        self.measured.append(kt)
        return self._stand_in((id(kt), axis), (kt, axis), "int32", ())

    def _stand_in(self, key, source, dtype, shape):
        if key not in self._placeholders:
            placeholder = tf.compat.v1.placeholder(dtype, shape)
            self._placeholders[key] = placeholder
            self.reads[placeholder.op.name] = source
        return self._placeholders[key]


@contextlib.contextmanager
def _as_it_was(layer):
    """Restores nodes and names afterwards. Gives the number of nodes of each layer before."""
    layers = [] if layer is None else list(layer._flatten_layers())
    before = {id(one): (one, len(one._inbound_nodes), len(one._outbound_nodes)) for one in layers}
    try:
        # Names start anew, so that operations are named alike in every process.
        with _attribute("object_name_uids", collections.defaultdict(int)):
            yield before
    finally:
        for one, inbound, outbound in before.values():
            del one._inbound_nodes[inbound:]
            del one._outbound_nodes[outbound:]


def call_context(training):
    """A call context of its own, so that no layer takes itself for the outermost one."""
    context = CallContext(entry_layer=None)
    context.set_value("training", training)
    return _attribute("current_call_ctx", context)


def outside_of_calls():
    """Within it no layer's call is autocasting, as if none were running."""
    return _attribute("autocast_scope", None)


@contextlib.contextmanager
def _attribute(name, value):
    """One of Keras' global attributes, which are a thread's own, for the length of a block."""
    before = global_state.get_global_attribute(name)
    global_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        global_state.set_global_attribute(name, before)


def _call(layer, args, kwargs, scope):
    """Calls the layer, with its `call` run on the Keras tensors themselves.

    Returns its outputs, and for each the history it had before it became an output.
    """
    histories: dict[int, Any] = {}
    made: list = []

    def symbolic_call(*args, **kwargs):
        outputs = keras.tree.map_structure(scope.symbolic, layer.call(*args, **kwargs))
        made.append(outputs)
        for kt in flat_tensors(outputs):
            histories[id(kt)] = getattr(kt, "_keras_history", None)
        # Keras knows no node with `None` for an output.
        flat = keras.tree.flatten(outputs)
        return outputs if all(kt is not None for kt in flat) else flat_tensors(outputs)

    def add_loss(loss):
        scope.added.extend(map(scope.symbolic, keras.tree.flatten(loss)))

    # In place of `Layer.symbolic_call`, which works the outputs' shapes out without `call`.
    vars(layer)["symbolic_call"] = symbolic_call
    # Keras' own takes no Keras tensors.
    vars(layer)["add_loss"] = add_loss
    filtering = keras.config.is_traceback_filtering_enabled()
    # The error itself is wanted, not one with the arguments of all calls around it.
    keras.config.disable_traceback_filtering()
    try:
        layer(*args, **kwargs)
        return made[0], histories
    except NotOpenable:
        raise
    except Exception as error:  # whatever the layer's author wrote
        raise NotOpenable(_stopped_by(error)) from error
    finally:
        del vars(layer)["symbolic_call"], vars(layer)["add_loss"]
        if filtering:
            keras.config.enable_traceback_filtering()


def _nodes(waiting, histories, inner, returned=()):
    """The nodes that made some Keras tensors and their masks, and all nodes before them."""
    known = {id(kt) for _, copy, mask in inner for kt in (copy, mask) if kt is not None}
    known |= set(map(id, returned))
    waiting = [*waiting, *(getattr(copy, "_keras_mask", None) for _, copy, _ in inner)]
    found: dict[int, tuple] = {}
    while waiting:
        kt = waiting.pop()
        # A mask may also be a tensor of the scratch graph.
        if not isinstance(kt, keras.KerasTensor) or id(kt) in known:
            continue
        known.add(id(kt))
        waiting.append(getattr(kt, "_keras_mask", None))
        history = histories.get(id(kt)) or getattr(kt, "_keras_history", None)
        node = None
        if history is not None and history.operation is not None:
            node = history.operation._inbound_nodes[history.node_index]
        if node is None or node.is_input:
            raise NotOpenable("it uses a Keras tensor that is not an argument of its call")
        if id(node) not in found:
            _check_arguments(node)
            found[id(node)] = _number(node), node
            waiting += node.input_tensors + node.outputs
    return [node for _, node in sorted(found.values(), key=lambda pair: pair[0])]


def _check_arguments(node):
    """Refuses operations that are more than what their arguments say.

    One that holds a tensor of the scratch graph as an attribute; one that runs a function, such as
    `keras.ops.map`: whatever variables and tensors the function uses besides are not seen.
    """
    operation = node.operation
    if isinstance(operation, keras.layers.Layer):
        return
    attributes = vars(operation)
    for name, value in attributes.items():
        if any(map(is_symbolic, keras.tree.flatten(value))):
            raise NotOpenable(f"{type(operation).__name__} gets its `{name}` from a tensor's shape")
    given = keras.tree.flatten((node.arguments.args, node.arguments.kwargs))
    given += [value for name, value in attributes.items() if not name.startswith("_")]
    if any(callable(x) and not isinstance(x, type) for x in given):
        raise NotOpenable(f"{type(operation).__name__} runs a function of its own")


def is_symbolic(x):
    """Whether something is a TensorFlow tensor of a graph, without a value."""
    return isinstance(x, tf.Tensor) and not hasattr(x, "numpy")


def flat_tensors(structure):
    """The tensors of a structure, without what is `None`."""
    return [x for x in keras.tree.flatten(structure) if x is not None]


def _number(node):
    """When the node was made: Keras numbers its tensors."""
    numbers = [kt.name.rpartition("_")[2] for kt in node.outputs if kt.name]
    if not numbers or not all(number.isdigit() for number in numbers):
        # The first ever made has no number.
        if [kt.name for kt in node.outputs] != ["keras_tensor"]:
            raise NotOpenable(f"'{node.operation.name}' names its outputs: their order is lost")
        return 0
    return min(map(int, numbers))


def _stopped_by(error):
    """Where an exception came from: the last line that is not Keras' or TensorFlow's, if any."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not any(f"/{package}/" in frame.filename for package in ("keras", "tensorflow"))
        and frame.filename != __file__
    ]
    last = (own or frames)[-1]
    text = str(error).strip().split("\n")[0].split(". ")[0]
    return f"`{last.line}` ({last.filename}:{last.lineno}): {type(error).__name__}: {text}"
