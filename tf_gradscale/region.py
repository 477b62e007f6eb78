"""A graph run as one differentiable function, with Algorithm 1 as its backward pass."""

import inspect

import keras
import tensorflow as tf

# keras.src, tensorflow.python: not exported; tests/test_platform.py notices if one goes.
from keras.src.backend import AutocastScope
from tensorflow.python.eager import record

from tf_gradscale import heads
from tf_gradscale.graph import Tensor
from tf_gradscale.estimate import Placement, exp2
from tf_gradscale.registry import ScaleRegistry, keras_autocast_off
from tf_gradscale.rules import rule_for
from tf_gradscale.rules.base import Scaled
from tf_gradscale.walk import Walk


class Region:
    """A closed region of a model: inside, gradients are scaled; outside, none is.

    Calling it runs the graph's operations as Keras would. Its gradient is Algorithm 1: for each
    step in reverse order, the rule for its kind receives ⟨α, ∇Y⟩ and gives ⟨α', ∇X⟩ for each
    input, and the finished gradients of its variables. Float inputs and outputs are exchanged
    with the outside in float32 and at their true magnitude.

    Args:
        graph: The `graph.Graph`.
        config: The `GradScaleConfig`.
    """

    def __init__(self, graph, config):
        self.graph, self.config = graph, config
        self.placement = Placement.of(config)
        self.scales = ScaleRegistry(config)
        heads.cut(graph)
        consumers = graph.consumers()
        self._owners = {}
        # Sites are reserved in the order in which the backward pass meets them.
        self._outputs = [self._edge(f"output_{i}", t) for i, t in enumerate(graph.outputs)]
        if len(graph.outputs) == 1:
            self._outputs = [self._edge("output", graph.outputs[0])]
        self._edges, self._branches = {}, {}
        for step in reversed(graph.steps):
            for tensor in step.outputs:
                self._reserve_branch(tensor, consumers, step.name)
            first = len(self.scales)
            step.rule = rule_for(step, self.scales)
            self._owners.update(dict.fromkeys(list(self.scales)[first:], step))
            dtype = step.rule.input_dtype()
            for i, tensor in enumerate(step.inputs):
                label = f"{step.name}/cast" if len(step.inputs) == 1 else f"{step.name}/cast_{i}"
                self._edges[step, i] = self._edge(label, tensor, dtype)
        for i, tensor in enumerate(graph.inputs):
            self._reserve_branch(tensor, consumers, f"input_{i}")
        self._inputs = [self.scales.add_factor() for _ in graph.inputs]
        self.scales.build()

    def _edge(self, name, tensor, dtype="float32"):
        """A cast's site and factor, where a gradient is cast to the narrower dtype of `tensor`."""
        narrow = tensor.dtype in ("float16", "bfloat16") and dtype == "float32"
        if not narrow:
            return None
        site = self.scales.add_site(name, "cast")
        self._owners[site] = tensor
        return site, self.scales.add_factor()

    def _reserve_branch(self, tensor, consumers, name):
        users = consumers.get(id(tensor), [])
        if tensor.is_float and len(users) > 1:
            site = self.scales.add_site(f"{name}/branch", "branch")
            self._owners[site] = tensor
            self._branches[id(tensor)] = (site, [self.scales.add_factor() for _ in users])

    def __call__(self, inputs, training):
        """Runs the graph.

        Args:
            inputs: Flat list of tensors.
            training: Python bool or `None`, as in Keras.

        Returns:
            Flat list of tensors, the float ones in float32.
        """
        masks = [getattr(x, "_keras_mask", None) for x in inputs]
        made_masks = []
        watched = [x for x in inputs if x.dtype.is_floating and _is_watched(x)]
        with keras_autocast_off():

            @tf.custom_gradient
            def run(*xs):
                for x, mask in zip(xs, masks, strict=True):
                    _set_mask(x, mask)
                values, records = self._forward(xs, training)
                outputs = [values[id(t)] for t in self.graph.outputs]
                made_masks.extend(getattr(y, "_keras_mask", None) for y in outputs)
                dtypes = [y.dtype for y in outputs]

                def grad(*upstream, variables=None):
                    return self._backward(xs, records, dtypes, upstream, variables, bool(watched))

                outputs = [
                    tf.cast(y, tf.float32) if y.dtype.is_floating else y for y in outputs
                ]
                return outputs, grad

            outputs = run(*inputs)
        for y, mask in zip(outputs, made_masks, strict=True):
            _set_mask(y, mask)
        return [
            y if head is None else head(y)
            for y, head in zip(outputs, self.graph.head, strict=True)
        ]

    def _forward(self, xs, training):
        """Runs all steps. Returns the tensors by id, and each step's record."""
        values = dict(zip(map(id, self.graph.inputs), xs, strict=True))
        records = []
        for step in self.graph.steps:
            dtype = step.rule.input_dtype()
            arguments = [_cast_input(values[id(t)], dtype) for t in step.inputs]
            outputs, kept = step.rule.forward(arguments, _caller(step, training))
            for tensor, y in zip(step.outputs, outputs, strict=True):
                if y.dtype.is_floating and y.dtype.name != tensor.dtype:
                    raise TypeError(
                        f"Layer '{step.name}' must return what its `compute_output_spec` "
                        f"declares, or gradients cannot be scaled right. Declared: "
                        f"{tensor.dtype}. Received: {y.dtype.name}"
                    )
                values[id(tensor)] = y
            if step.rule.direct:
                _carry_mask(step.operation, arguments[0], outputs[0])
            records.append(kept)
        return values, records

    def _backward(self, xs, records, dtypes, upstream, variables, watched):
        """Both kinds of pass, as two programs under one condition; and the registry's write."""
        state_of, updating = self.scales.begin()
        needed = self._needed(watched)
        layout = []

        def pass_of(is_updating):
            state = state_of()
            walk = Walk(state, self.placement, self.config, is_updating, needed)
            dxs = self._algorithm_1(walk, records, dtypes, upstream, len(xs))
            found = walk.gradients()
            dvs = [found.get(v.ref()) for v in variables or []]
            vector, pending = walk.result()
            results = [*dxs, *dvs]
            layout[:] = [r is not None for r in results]
            return [r for r in results if r is not None], vector, pending

        present, vector, pending = tf.cond(updating, lambda: pass_of(True), lambda: pass_of(False))
        with tf.control_dependencies(self.scales.end(vector, pending)):
            present = iter([_identity(g) for g in present])
        results = [next(present) if there else None for there in layout]
        dxs, dvs = results[: len(xs)], results[len(xs) :]
        return dxs if variables is None else (dxs, dvs)

    def _needed(self, watched):
        """Which gradients anything depends on: a function of a site.

        Below the first trainable layer there is none, unless the inputs' own gradient is asked
        for; measuring there would keep alive what is otherwise pruned.
        """
        needed = {id(t): watched and t.is_float for t in self.graph.inputs}
        trainable = {}
        for step in self.graph.steps:
            trainable[step] = bool(getattr(step.operation, "trainable_variables", ()))
            above = trainable[step] or any(needed[id(t)] for t in step.inputs)
            needed.update({id(t): above for t in step.outputs})

        def is_needed(site, input_only=False):
            owner = self._owners[site]
            if isinstance(owner, Tensor):
                return needed[id(owner)]
            inputs = any(needed[id(t)] for t in owner.inputs)
            return inputs or (trainable[owner] and not input_only)

        return is_needed

    def _algorithm_1(self, walk, records, dtypes, upstream, inputs):
        """Algorithm 1: operators in reversed topological order, each by the rule for its kind."""
        arrived: dict[int, dict] = {}

        def deliver(tensor, user, pair, edge):
            if edge is not None:
                pair = walk.cast(*edge, pair, tensor.dtype)
            gradient = tf.cast(tf.convert_to_tensor(pair.gradient), tensor.dtype)
            arrived.setdefault(id(tensor), {})[user] = Scaled(pair.log2_alpha, gradient)

        def collect(tensor, consumers):
            pairs = arrived.get(id(tensor), {})
            if len(pairs) < 2:
                return next(iter(pairs.values()), None)
            site, factors = self._branches[id(tensor)]
            factors = [f for f, user in zip(factors, consumers[id(tensor)], strict=True) if user in pairs]
            ordered = [pairs[user] for user in consumers[id(tensor)] if user in pairs]
            return Scaled(*walk.join(site, factors, ordered, summed=True))

        consumers = self.graph.consumers()
        for i, (tensor, dy, dtype) in enumerate(
            zip(self.graph.outputs, upstream, dtypes, strict=True)
        ):
            if dtype.is_floating and dy is not None:
                deliver(tensor, i, Scaled(tf.constant(0.0), dy), self._outputs[i])
        for step, kept in zip(reversed(self.graph.steps), reversed(records), strict=True):
            pairs = [collect(tensor, consumers) for tensor in step.outputs]
            if all(pair is None for pair in pairs):
                continue
            for i, pair in enumerate(step.rule.backward(kept, pairs, walk)):
                if pair is not None and step.inputs[i].is_float:
                    deliver(step.inputs[i], (step, i), pair, self._edges[step, i])
        results = []
        for tensor, factor in zip(self.graph.inputs, self._inputs, strict=True):
            pair = collect(tensor, consumers)
            if pair is None:
                results.append(None)
                continue
            alpha, dx = pair
            inverse = walk.factor(factor, lambda alpha=alpha: exp2(-alpha))
            results.append(tf.cast(dx, tf.float32) * inverse)
        return results


def _caller(step, training):
    """Calls a step's operation on tensors, as the enclosing model would."""

    def call(inputs, method=None):
        operation = step.operation
        args, kwargs = step.node.arguments.fill_in(dict(zip(step.keys, inputs, strict=True)))
        # _call_has_training_arg: as Functional passes `training`, the run's value before all.
        if getattr(operation, "_call_has_training_arg", False):
            recorded = kwargs.get("training")
            recorded = step.training if step.training is not None else recorded
            kwargs["training"] = training if training is not None else recorded
        if isinstance(operation, keras.layers.Layer):
            if method is None:
                return operation(*args, **kwargs)
            mask = getattr(inputs[0], "_keras_mask", None)
            if mask is not None and "mask" in inspect.signature(method).parameters:
                kwargs.setdefault("mask", mask)
            return method(*args, **kwargs)
        with AutocastScope(step.autocast_dtype):
            return operation(*args, **kwargs)

    return call


def _cast_input(x, dtype):
    if dtype is None or not x.dtype.is_floating or x.dtype.name == dtype:
        return x
    y = tf.cast(x, dtype)
    _set_mask(y, getattr(x, "_keras_mask", None))
    return y


def _carry_mask(layer, x, y):
    """What `Layer.__call__` does with a mask, for a layer whose `call` a rule replaces."""
    mask = getattr(x, "_keras_mask", None)
    if mask is not None and layer.supports_masking:
        _set_mask(y, layer.compute_mask(x, mask))


def _set_mask(x, mask):
    if mask is not None:
        x._keras_mask = mask


def _identity(gradient):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.identity(gradient.values), gradient.indices, gradient.dense_shape
        )
    return tf.identity(gradient)


def _is_watched(x):
    # tensorflow.python: what tf.custom_gradient itself asks; tests/test_platform.py notices.
    return record.should_record_backprop([x])
