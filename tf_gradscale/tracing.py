"""From Keras models to graphs: nested models and composites are opened, one inside the other."""

import contextlib
import inspect
import warnings

import keras
import tensorflow as tf

# keras.src: this class is not exported; tests/test_platform.py notices if it goes.
from keras.src.backend import AutocastScope

from tf_gradscale.graph import Graph, Slot, Step, Tensor, is_users_code, scope_dtype
from tf_gradscale.inner import ClearMask, DimensionOf, Expression, MaskOf, Read, SetMask, Whole
from tf_gradscale.losses import ActivityLoss, AddedLoss, LossesOf, tried_out
from tf_gradscale.nesting import inner_function, is_composite, takes_position, without_tensors
from tf_gradscale.opening import (
    NotOpenable,
    flat_tensors,
    is_symbolic,
    open_attention,
    open_call,
)
from tf_gradscale.rules import is_product, replaces_call


def trace(function, autocast_dtype=None, training=None, warned=None):
    """Flattens a Keras function.

    Args:
        function: A Functional model, or any `keras.Function` made of layers and `keras.ops`.
        autocast_dtype: The dtype to which the model casts variables, or `None`.
        training: What the model is told, as in Keras.
        warned: Set of the layers of which a warning has told that they cannot be opened.

    Returns:
        A `Graph`.
    """
    tracer = _Tracer(training, warned)
    inputs = [Tensor(kt.shape, kt.dtype, sparse=kt.sparse) for kt in function.inputs]
    outputs = tracer.function(function, inputs, "", training, autocast_dtype)
    return tracer.graph(inputs, outputs, function._outputs_struct)


def trace_call(layer, args, kwargs, training, warned=None):
    """Flattens one call of a layer or model whose `call` is written by hand.

    If it cannot be opened, the graph is one step, and a warning says why.

    Args:
        layer: The layer, built.
        args: Positional arguments of the call, with Keras tensors for tensors.
        kwargs: Keyword arguments, likewise.
        training: What the layer is told, as in Keras.
        warned: As in `trace`.

    Returns:
        A `Graph`.
    """
    tracer = _Tracer(training, warned)
    given = [x for x in keras.tree.flatten((args, kwargs)) if isinstance(x, keras.KerasTensor)]
    inputs = [
        Tensor(kt.shape, kt.dtype, masked=getattr(kt, "_keras_mask", None) is not None)
        for kt in given
    ]
    tensors = dict(zip(map(id, given), inputs, strict=True))
    if training is not None and layer._call_has_training_arg:
        kwargs = {**kwargs, "training": training}
    try:
        opened = open_call(layer, args, kwargs, training)
        outputs = tracer.inside(opened, tensors, "", scope_dtype(layer), layer)
        structure = opened.outputs
    except NotOpenable as reason:
        tracer.warn(layer, layer.name, reason)
        structure = layer.compute_output_spec(*args, **kwargs)
        outputs = tracer.whole(layer, args, kwargs, tensors, flat_tensors(structure))
    return tracer.graph(inputs, outputs, structure)


class _Tracer:
    """Appends the steps of functions and composites, one inside the other, to one list.

    Args:
        training: What the outermost layer is told; then what Keras' call context says, as each
            layer leaves it for the next.
        warned: Set of the layers of which a warning has told that they cannot be opened.
    """

    def __init__(self, training, warned=None):
        self.steps = []
        self.opened = self._told = False
        self._training = training
        self._reads = {}
        self._warned = set() if warned is None else warned
        self._losses = []

    def warn(self, layer, name, reason):
        """Tells, once for each layer, that it cannot be opened."""
        if id(layer) not in self._warned:
            self._warned.add(id(layer))
            warnings.warn(
                f"Layer '{name}' is differentiated as one operation, with one gradient scale for "
                "all that is inside: its call is more than layers and keras.ops applied to its "
                f"inputs. What stopped it: {reason}",
                stacklevel=2,
            )

    def graph(self, inputs, outputs, structure):
        """The `Graph` of all steps."""
        head = [None] * len(outputs)
        outputs = [*outputs, *self._losses]
        return Graph(self.steps, inputs, outputs, head, self.opened, structure, self._told)

    def function(self, function, inputs, prefix, training, autocast_dtype):
        """The steps of a Keras function, called on `inputs`; returns its output tensors."""
        tensors = dict(zip(map(id, function.inputs), inputs, strict=True))
        # _nodes_by_depth: the order in which Function._run_through_graph runs the nodes.
        for depth in sorted(function._nodes_by_depth, reverse=True):
            for node in function._nodes_by_depth[depth]:
                if not node.is_input:
                    # As Functional passes `training`, the run's value before all.
                    given = {} if training is None else {"training": training}
                    self._node(node, given, tensors, prefix, autocast_dtype, None)
        return [tensors[id(kt)] for kt in function.outputs]

    def inside(self, opened, tensors, prefix, autocast_dtype, owner):
        """The steps of an opened composite; `tensors` by the ids of the outer Keras tensors."""
        self.opened = True
        if isinstance(owner, keras.layers.Layer) and is_users_code(owner):
            self._told |= owner._call_has_training_arg
        inner = {id(copy): tensors[id(outer)] for outer, copy in opened.arguments}
        for outer, mask in opened.masks:
            made = self._append(MaskOf(), f"{prefix}mask", (mask,), [tensors[id(outer)]])
            inner[id(mask)] = made[0]
        for node in opened.nodes:
            self._node(node, {}, inner, prefix, autocast_dtype, opened)
        for outer in opened.cleared:
            self._append(ClearMask(), f"{prefix}mask", (), [tensors[id(outer)]])
        for kt, tensor in opened.returned:
            inner[id(kt)] = self._expression(tensor, f"{prefix}output", inner, opened)
        outputs = flat_tensors(opened.outputs)
        for kt in outputs:
            mask = getattr(kt, "_keras_mask", None)
            if mask is not None:
                if isinstance(mask, keras.KerasTensor):
                    mask = inner[id(mask)]
                else:
                    mask = self._expression(mask, f"{prefix}mask", inner, opened)
                self._append(SetMask(), f"{prefix}mask", (), [inner[id(kt)], mask])
        for kt in opened.losses:
            loss = self._append(AddedLoss(owner), f"{prefix}loss", (kt,), [inner[id(kt)]])
            self._losses += loss
        return [inner[id(kt)] for kt in outputs]

    def whole(self, layer, args, kwargs, tensors, outputs):
        """One step for a call that cannot be opened."""
        made = [Tensor(kt.shape, kt.dtype) for kt in outputs]
        index = {key: i for i, key in enumerate(tensors)}
        args, kwargs = keras.tree.map_structure(
            lambda x: Slot(index[id(x)]) if isinstance(x, keras.KerasTensor) else x,
            (tuple(args), dict(kwargs)),
        )
        inputs = list(tensors.values())
        dtype = scope_dtype(layer)
        step = Step(Whole(layer), layer.name, args, kwargs, inputs, made, dtype)
        self.steps.append(step)
        self._added_losses(step)
        return made

    def _node(self, node, given, tensors, prefix, autocast_dtype, opened):
        """The step of a node, or those inside; puts its outputs into `tensors`."""
        operation = node.operation
        name = prefix + operation.name
        args, kwargs = node.arguments.args, node.arguments.kwargs
        is_layer = isinstance(operation, keras.layers.Layer)
        before = training = self._training
        if is_layer:
            if operation._call_has_training_arg:
                kwargs = {**kwargs, **given}
            training = self._resolve(operation, args, kwargs)
        function = inner_function(node, kwargs, tensors) if is_layer else None
        made = known = None
        if function is not None:
            inputs = [tensors[id(kt)] for kt in node.input_tensors]
            made = self.function(function, inputs, f"{name}/", training, scope_dtype(operation))
        elif is_composite(operation):
            count, losses, reads = len(self.steps), list(self._losses), dict(self._reads)
            was_opened = self.opened
            # As within the call around it: some layers of Keras do not autocast if others do.
            scope = contextlib.nullcontext()
            if autocast_dtype is not None:
                scope = AutocastScope(autocast_dtype)
            with scope:
                made, known = self._composite(
                    operation, args, kwargs, before, tensors, name, autocast_dtype, opened
                )
            if made is None:
                # As before the attempt.
                del self.steps[count:]
                self._losses, self._reads = losses, reads
                self._training, self.opened = training, was_opened
        if made is None:
            if is_layer and training is not None and not takes_position(operation, args):
                kwargs = {**kwargs, "training": training}
            made = self._leaf(node, args, kwargs, tensors, name, autocast_dtype, opened, known)
        tensors.update(zip(map(id, node.outputs), made, strict=True))

    def _composite(self, operation, args, kwargs, training, tensors, name, autocast_dtype, opened):
        """The outputs of a composite, or `None` if it cannot be opened or has no product inside.

        And for one that has none, and adds no loss, the dtypes of its outputs.
        """
        first, losses = len(self.steps), len(self._losses)
        try:
            if opened is not None:
                args, kwargs = keras.tree.map_structure(without_tensors, (args, kwargs))
            if isinstance(operation, keras.layers.Layer):
                inner = open_call(operation, args, kwargs, training)
                # As Keras: what autocasts nothing does so within others only.
                casts = operation.autocast or autocast_dtype is None
                dtype = scope_dtype(operation) if casts else None
            else:
                inner, dtype = open_attention(operation, args, kwargs), None
        except NotOpenable as reason:
            if getattr(operation, "weights", ()):
                self.warn(operation, name, reason)
            return None, None
        outputs = self.inside(inner, tensors, f"{name}/", dtype, operation)
        if isinstance(operation, keras.layers.Layer):
            self._activity_loss(operation, outputs, name)
        if not any(map(is_product, self.steps[first:])):
            known = [tensor.dtype for tensor in outputs]
            # Of a NumPy number Keras' operators make float32 or float64, TensorFlow's do not.
            own = {operation.compute_dtype if x.is_float else x.dtype for x in outputs}
            sure = len(self._losses) == losses and set(known) <= own
            return None, known if sure else None
        return outputs, None

    def _leaf(self, node, args, kwargs, tensors, name, autocast_dtype, opened, known):
        inputs, index = [], {}

        def slot(tensor):
            if id(tensor) not in index:
                index[id(tensor)] = len(inputs)
                inputs.append(tensor)
            return Slot(index[id(tensor)])

        masks = {}

        def replace(x):
            if isinstance(x, keras.KerasTensor):
                found = slot(tensors[id(x)])
                mask = tensors.get(id(getattr(x, "_keras_mask", None)))
                if opened is not None and mask is not None:
                    masks[found.index] = mask
                return found
            if isinstance(x, keras.Variable):
                return slot(self._read(x, autocast_dtype))
            if opened is not None and is_symbolic(x):
                value = tf.get_static_value(x)
                if value is None:
                    return slot(self._expression(x, name, tensors, opened))
                return value
            return x

        args, kwargs = keras.tree.map_structure(replace, (tuple(args), dict(kwargs)))
        # Keras takes a product with a number for sparse, too.
        sparse = any(tensor.sparse for tensor in inputs)
        outputs = [Tensor(kt.shape, kt.dtype, sparse=kt.sparse and sparse) for kt in node.outputs]
        operation = node.operation
        step = Step(operation, name, args, kwargs, inputs, outputs, autocast_dtype, masks)
        self.steps.append(step)
        if isinstance(operation, keras.layers.Layer):
            if replaces_call(operation):
                self._activity_loss(operation, outputs, name)
            elif known is None:
                self._added_losses(step)
            else:
                _declare(step, known)
        return outputs

    def _activity_loss(self, layer, outputs, name):
        """What a layer's activity regulariser adds, where the layer is not run by Keras."""
        if layer.activity_regularizer is not None:
            for tensor in outputs:
                like = [keras.KerasTensor((), "float32")]
                self._losses += self._append(ActivityLoss(layer), f"{name}/loss", like, [tensor])

    def _added_losses(self, step):
        """What a step's layer adds when Keras runs it."""
        returned, added = tried_out(step)
        _declare(step, returned)
        made = [Tensor((), dtype) for dtype in added]
        if made:
            operation, name = LossesOf(step), f"{step.name}/loss"
            self.steps.append(Step(operation, name, (), {}, list(step.inputs), made, None))
            self._losses += made

    def _append(self, operation, name, like, inputs, weight=False):
        """A step of an operation of this package, on `inputs` alone."""
        outputs = [Tensor(kt.shape, kt.dtype, weight) for kt in like]
        slots = tuple(map(Slot, range(len(inputs))))
        self.steps.append(Step(operation, name, slots, {}, inputs, outputs, None))
        return outputs

    def _read(self, variable, autocast_dtype):
        """The value of a variable as an operation gets it."""
        with AutocastScope(autocast_dtype):
            dtype = variable.dtype
        key = id(variable), dtype
        if key not in self._reads:
            like = [keras.KerasTensor(variable.shape, dtype)]
            read = Read(variable, dtype)
            self._reads[key] = self._append(read, variable.path, like, [], weight=True)[0]
        return self._reads[key]

    def _expression(self, tensor, name, tensors, opened):
        """A tensor that a composite's call made of its variables, or of shapes."""
        expression = Expression(tensor, opened)
        inputs = []
        for source in expression.arguments:
            if isinstance(source, keras.Variable):
                inputs.append(self._read(source, None))
            else:
                kt, axis = source
                like = [keras.KerasTensor((), "int32")]
                operation = DimensionOf(axis)
                inputs += self._append(operation, f"{name}/shape", like, [tensors[id(kt)]])
        like = [keras.KerasTensor(tensor.shape, tensor.dtype.name)]
        weight = any(x.weight for x in inputs)
        return self._append(expression, f"{name}/weights", like, inputs, weight)[0]

    def _resolve(self, layer, args, kwargs):
        """What a layer is told of `training`, which it then leaves for those that follow."""
        parameters = inspect.signature(layer.call).parameters
        names = list(parameters)
        if "training" in kwargs:
            value = kwargs["training"]
        elif "training" in names[: len(args)]:
            value = args[names.index("training")]
        elif self._training is not None:
            value = self._training
        else:
            default = parameters["training"].default if "training" in parameters else None
            value = None if default is inspect.Parameter.empty else default
        self._training = value
        return value


def _declare(step, dtypes):
    """Notes what a step returns: Keras takes a Lambda's output, among others, for the layer's."""
    for tensor, dtype in zip(step.outputs, dtypes, strict=True):
        tensor.dtype = dtype
