"""A graph as one differentiable function: its sites, its run, Algorithm 1 as its gradient."""

from typing import Any

import tensorflow as tf

from tf_gradscale import heads
from tf_gradscale.ahead import Ahead
from tf_gradscale.choose import Chooser
from tf_gradscale.differentiable import differentiable, is_watched
from tf_gradscale.losses import ActivityLoss, AddedLoss, LossesOf, captured
from tf_gradscale.registry import autocast_off
from tf_gradscale.rules import Gemm, rule_for
from tf_gradscale.rules.base import WIDE, Scaled
from tf_gradscale.tensors import identity, is_dense_float, multiply
from tf_gradscale.walk import Walk

_DEFERRED = object()


class Program:
    """A region's graph for one value of `training`.

    Args:
        graph: The `graph.Graph`.
        config: The `GradScaleConfig`.
        scales: The `ScaleRegistry` in which to reserve sites.
    """

    def __init__(self, graph, config, scales):
        self.graph, self.config, self.scales = graph, config, scales
        self.chooser = Chooser.of(config)
        heads.cut(graph)
        consumers = graph.consumers()
        self._producers = {id(t): step for step in graph.steps for t in step.outputs}
        self._losses = {
            id(step.operation.step): len(step.outputs)
            for step in graph.steps
            if isinstance(step.operation, LossesOf)
        }
        # Sites are reserved in the order in which the backward pass meets them.
        several = len(graph.head) > 1
        self._outputs = [
            self._edge(f"output_{i}" if several else "output", tensor, consumers)
            for i, tensor in enumerate(graph.outputs[: len(graph.head)])
        ]
        for tensor in graph.outputs[len(graph.head) :]:
            self._outputs.append(self._loss_edge(tensor, consumers))
        self._edges, self._branches = {}, {}
        wide = {
            id(tensor)
            for tensor, edge in zip(graph.outputs, self._outputs, strict=True)
            if _keeps_width(edge)
        }
        for step in reversed(graph.steps):
            for tensor in step.outputs:
                self._reserve_branch(tensor, consumers, step.name)
            step.wide = any(id(tensor) in wide for tensor in step.outputs)
            step.rule = rule_for(step, self.scales)
            dtype, model = step.rule.input_dtype(), step.rule.cast_model
            for i, tensor in enumerate(step.inputs):
                label = f"{step.name}/cast" if len(step.inputs) == 1 else f"{step.name}/cast_{i}"
                self._edges[step, i] = edge = self._edge(label, tensor, consumers, dtype, model)
                if _keeps_width(edge) or (step.wide and not step.rule.sums):
                    wide.add(id(tensor))
        for i, tensor in enumerate(graph.inputs):
            self._reserve_branch(tensor, consumers, f"input_{i}")
        if config.unscale == "optimizer":
            _check_single_path(graph, self.weights())

    def weights(self):
        """The variables of the graph's layers, each once."""
        return distinct(
            variable
            for step in self.graph.steps
            for variable in getattr(step.operation, "variables", ())
        )

    def _edge(self, name, tensor, consumers, dtype="float32", model=None):
        """How a gradient reaches `tensor`: `None`, as it is; or through a cast.

        A cast is the group of its site and the model of its gradient; or `_DEFERRED`, if the
        gradient goes nowhere but to a product, whose rule then casts it.
        """
        if tensor.dtype not in ("float16", "bfloat16") or dtype not in WIDE:
            return None
        producer = self._producers.get(id(tensor))
        alone = producer is not None and len(consumers[id(tensor)]) == 1
        # Only a normalisation's: where gradients span many binades, as behind a softmax, the
        # cast cannot leave room for a product without losing the smallest.
        if alone and model == "normal" and Gemm.casts(producer):
            producer.cast = name
            return _DEFERRED
        return self.scales.add_group([(name, "cast")], 2), model or self.config.cast_model

    def _loss_edge(self, tensor, consumers):
        """The same for a loss: what it is made of is kept in the layer's dtype."""
        step = self._producers[id(tensor)]
        operation = step.operation
        if not isinstance(operation, LossesOf):
            return self._edge(step.name, tensor, consumers)
        if operation.compute_dtype != self.config.gradient_dtype:
            return None
        return self.scales.add_group([(f"{operation.step.name}/loss", "cast")], 2), "normal"

    def _reserve_branch(self, tensor, consumers, name):
        users = consumers.get(id(tensor), [])
        if tensor.is_float and len(users) > 1:
            names = [(f"{name}/branch", "branch")]
            self._branches[id(tensor)] = self.scales.add_group(names, len(users) + 1)

    def __call__(self, inputs, owner, observer=None):
        """Runs the graph on a flat list of tensors, for the region that owns it; see there."""
        self._check_masks(inputs)
        masks = [getattr(x, "_keras_mask", None) for x in inputs]
        made_masks, owners = [], []
        watched = is_watched(list(filter(is_dense_float, inputs)))

        def run(*xs):
            for x, mask in zip(xs, masks, strict=True):
                _set_mask(x, mask)
            ahead = Ahead(self.scales, self.chooser)
            values, records, layers = self._forward(xs, ahead, observer)
            owners.extend(layers)
            outputs = [values[id(t)] for t in self.graph.outputs]
            made_masks.extend(getattr(y, "_keras_mask", None) for y in outputs)
            dtypes = [y.dtype for y in outputs]

            def gradient(upstream, variables):
                return self._backward(
                    records, ahead.updating, dtypes, upstream, variables, watched, observer
                )

            outputs = [tf.cast(y, tf.float32) if y.dtype.is_floating else y for y in outputs]
            return outputs, gradient

        with autocast_off():
            if observer is not None and observer.plain:
                outputs, _ = run(*inputs)
            else:
                outputs = differentiable(run, inputs, owner)
        count = len(self.graph.head)
        for layer, loss in zip(owners, outputs[count:], strict=True):
            layer.add_loss(loss)
        outputs = [
            y if head is None else head(y)
            for y, head in zip(outputs[:count], self.graph.head, strict=True)
        ]
        for y, mask in zip(outputs, made_masks[:count], strict=True):
            _set_mask(y, mask)
        return outputs

    def _check_masks(self, inputs):
        """Refuses a mask that composites, which were opened without it, would not see."""
        for x, tensor in zip(inputs, self.graph.inputs, strict=True):
            mask = getattr(x, "_keras_mask", None)
            if self.graph.opened and mask is not None and not tensor.masked:
                raise ValueError(
                    "A mask must come from a layer of the model (Masking, or Embedding with "
                    "mask_zero=True), or be an input of its own, to reach the layers inside. "
                    f"Received: a mask of shape {mask.shape} with an input"
                )

    def _forward(self, xs, ahead, observer):
        """Runs all steps.

        Returns the tensors by id, by the id of each step its record, and the layers that added
        losses.
        """
        values = dict(zip(map(id, self.graph.inputs), xs, strict=True))
        records: dict[int, Any] = {}
        added: dict[int, list] = {}
        owners = []
        plain = observer is not None and observer.plain
        for step in self.graph.steps:
            dtype = step.rule.input_dtype()
            arguments = [_cast_input(values[id(t)], dtype) for t in step.inputs]
            for i, mask in step.masks.items():
                _set_mask(arguments[i], values[id(mask)])
            if isinstance(step.operation, LossesOf):
                outputs = [loss for _, loss in added[id(step.operation.step)]]
                kept = step.rule.record_of(records[id(step.operation.step)], outputs)
            else:
                with captured(step.operation) as added[id(step)]:
                    call = step.call_in_float32 if plain else step.call
                    outputs, kept = step.rule.run(arguments, call, ahead)
                expected = self._losses.get(id(step), 0)
                if len(added[id(step)]) != expected:
                    raise ValueError(
                        f"Layer '{step.name}' must add the same number of losses in every call, "
                        "or their gradients cannot be scaled. "
                        f"Received: {len(added[id(step)])} losses, and {expected} in a trial"
                    )
            for tensor, y in zip(step.outputs, outputs, strict=True):
                if y.dtype.is_floating and y.dtype.name != tensor.dtype and not plain:
                    raise TypeError(
                        f"Layer '{step.name}' must return what its `compute_output_spec` "
                        f"declares, or gradients cannot be scaled right. Declared: "
                        f"{tensor.dtype}. Received: {y.dtype.name}"
                    )
                values[id(tensor)] = y
            if step.rule.direct:
                _carry_mask(step.operation, arguments[0], outputs[0])
            records[id(step)] = kept
            if observer is not None:
                observer.see_outputs(step, outputs)
            if isinstance(step.operation, (ActivityLoss, AddedLoss)):
                owners.append(step.operation.owner)
            elif isinstance(step.operation, LossesOf):
                owners += [layer for layer, _ in added[id(step.operation.step)]]
        return values, records, owners

    def _backward(self, records, updating, dtypes, upstream, variables, watched, observer):
        """Runs Algorithm 1 and writes the registry, on which all results then depend."""
        _check_loops(tf.compat.v1.get_default_graph())
        upstream = [
            tf.convert_to_tensor(dy) if dy is not None and dtype.is_floating else None
            for dy, dtype in zip(upstream, dtypes, strict=True)
        ]
        # A loss is a number that varies freely: its gradient tells nothing of the others'.
        returned = upstream[: len(self.graph.head)]
        walk = Walk(self.scales, self.chooser, self._needed(watched), returned, updating)
        if observer is not None:
            observer.see_walk(walk)
        dxs = self._algorithm_1(walk, records, upstream, observer)
        found = walk.gradients()
        dvs = [found.get(v.ref()) for v in variables]
        with tf.control_dependencies(walk.finish()):
            dxs, dvs = ([identity(g) for g in gs] for gs in (dxs, dvs))
        return dxs, dvs

    def _algorithm_1(self, walk, records, upstream, observer):
        """Algorithm 1: operators in reversed topological order, each by the rule for its kind."""
        consumers = self.graph.consumers()
        arrived: dict[int, dict] = {}

        def deliver(tensor, user, pair, edge):
            gradient = tf.convert_to_tensor(pair.gradient)
            if edge is not _DEFERRED:
                if edge is not None:
                    # A loss may be float32; what it is made of is not (`_loss_edge`).
                    kept = self.config.gradient_dtype if tensor.dtype in WIDE else None
                    pair = walk.cast(edge[0], pair, tensor.dtype, tensor, edge[1], kept)
                    gradient = pair.gradient
                gradient = tf.cast(gradient, tensor.dtype)
            arrived.setdefault(id(tensor), {})[user] = pair._replace(gradient=gradient)

        def collect(tensor):
            pairs = arrived.get(id(tensor), {})
            if len(pairs) < 2:
                return next(iter(pairs.values()), None)
            users = consumers[id(tensor)]
            indices = [i for i, user in enumerate(users) if user in pairs]
            present = [pairs[users[i]] for i in indices]
            return walk.join(self._branches[id(tensor)], indices, present, tensor, summed=True)

        for i, (tensor, dy) in enumerate(zip(self.graph.outputs, upstream, strict=True)):
            if dy is not None:
                unscaled = Scaled(tf.constant(0.0), multiply(dy, walk.shift), walk.unshift)
                deliver(tensor, i, unscaled, self._outputs[i])
        for step in reversed(self.graph.steps):
            pairs = [collect(tensor) for tensor in step.outputs]
            if all(pair is None for pair in pairs):
                continue
            if observer is not None:
                observer.see_gradients(step, pairs)
            for i, pair in enumerate(step.rule.backward(records[id(step)], pairs, walk)):
                if pair is not None and step.inputs[i].is_float:
                    deliver(step.inputs[i], (step, i), pair, self._edges[step, i])
        pairs = [collect(tensor) for tensor in self.graph.inputs]
        return [
            None if pair is None else tf.cast(pair.gradient, tf.float32) * pair.inverse
            for pair in pairs
        ]

    def _needed(self, watched):
        """Which gradients anything depends on: a function of a step or tensor.

        Below the first trainable layer there is none, unless the inputs' own gradient is asked
        for; measuring there would keep alive what is otherwise pruned.
        """
        needed = {id(t): watched and t.is_float for t in self.graph.inputs}
        for step in self.graph.steps:
            trains = bool(getattr(step.operation, "trainable_variables", ()))
            needed[id(step)] = trains or any(needed[id(t)] for t in step.inputs)
            needed.update({id(t): needed[id(step)] for t in step.outputs})
        return lambda owner: needed[id(owner)]


def distinct(variables):
    """Each variable once, in the order of appearance."""
    return list({id(variable): variable for variable in variables}.values())


def _check_single_path(graph, weights):
    """Refuses what `unscale="optimizer"` cannot divide: gradients that are sums of several."""
    for weight in weights:
        uses = [
            step.name
            for step in graph.steps
            if any(weight is v for v in getattr(step.operation, "variables", ()))
        ]
        why = None
        if getattr(weight, "regularizer", None) is not None:
            why = "it has a regularizer, whose gradient is not scaled"
        elif len(uses) > 1 and weight.trainable:
            why = f"it is used {len(uses)} times ({', '.join(uses)}), each with its own scale"
        if why:
            raise ValueError(
                'With unscale="optimizer" a variable\'s gradient must come from one place. Use '
                'unscale="layer", or remove the second. '
                f"Received: variable '{weight.path}': {why}"
            )


def _check_loops(graph):
    """Refuses the gradient of a loop or condition, in which TensorFlow lets nothing be written."""
    while graph is not None:
        # What only these graphs have; tests/test_differentiable.py notices if it goes.
        if hasattr(graph, "_forward_graph"):
            raise ValueError(
                "A call of a model in a loop or condition of a `tf.function` must have its tape in "
                "there as well: scales are written as gradients are made, which TensorFlow does "
                "not allow in the gradient of a loop. Take gradients inside of it and add them "
                "up, or use a Python loop, or run eagerly. Received: a tape outside of a "
                "`tf.while_loop`, `tf.map_fn`, `tf.range` or `tf.cond` with a call in it"
            )
        graph = getattr(graph, "outer_graph", None)


def _keeps_width(edge):
    """Whether a gradient that comes through a cast may span many binades."""
    return isinstance(edge, tuple) and edge[1] != "normal"


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
