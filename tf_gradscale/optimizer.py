"""The optimizer wrapper: per-variable unscaling, and skipping of non-finite steps."""

import warnings

import keras
import tensorflow as tf

from tf_gradscale.config import GradScaleConfig
from tf_gradscale.optimizer_state import check_saved
from tf_gradscale.registry import ScaleRegistry
from tf_gradscale.tensors import identity, multiply, values
from tf_gradscale.xla import computed_once, is_finite


def _of_inner(name, doc):
    """A setting that the optimizer inside has, read and set there."""

    def read(self):
        return getattr(self.inner_optimizer, name)

    def write(self, value):
        # Keras' constructor sets defaults before there is an optimizer inside.
        if hasattr(self, "inner_optimizer"):
            setattr(self.inner_optimizer, name, value)

    return property(read, write, doc=doc)


@keras.saving.register_keras_serializable(package="tf_gradscale")
class GradScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Wraps an optimizer for use with gradient scaling. `Model.compile` does it by itself.

    Takes the place of Keras' `LossScaleOptimizer`, but leaves the loss alone: gradients come out
    of a converted model with their true magnitude (or, with `unscale="optimizer"`, each at its
    variable's scale, by which it is divided here). A step with a non-finite gradient is skipped on
    all replicas alike, and scales are chosen anew in the next pass.

    Args:
        inner_optimizer: The `keras.optimizers.Optimizer` to wrap.
        scales: The `ScaleRegistry` of the model, or `None`: then gradients are only checked.
        name: Name of the optimizer.

    Attributes:
        applied_steps: Variable, how many steps were applied. It and the others are there from the
            first step (or `build`) on.
        skipped_steps: Variable, how many were skipped because a gradient was not finite.
        skips_in_a_row: Variable, how many of them were the last ones.

    Raises:
        TypeError: If `inner_optimizer` is no Keras optimizer, or `scales` no `ScaleRegistry`.
        ValueError: If `inner_optimizer` scales the loss itself.

    Example:

    >>> optimizer = GradScaleOptimizer(keras.optimizers.SGD(0.5))
    >>> weight = keras.Variable([1.0, 2.0])
    >>> optimizer.apply([keras.ops.array([1.0, float("nan")])], [weight])
    >>> optimizer.apply([keras.ops.array([1.0, 1.0])], [weight])
    >>> weight.numpy().tolist(), int(optimizer.skipped_steps), int(optimizer.applied_steps)
    ([0.5, 1.5], 1, 1)
    """

    def __init__(self, inner_optimizer, scales=None, name=None):
        if not isinstance(inner_optimizer, keras.optimizers.Optimizer):
            raise TypeError(
                "`inner_optimizer` must be a keras.optimizers.Optimizer, such as "
                f"keras.optimizers.Adam(). Received: inner_optimizer={inner_optimizer!r}"
            )
        if isinstance(inner_optimizer, keras.optimizers.LossScaleOptimizer):
            raise ValueError(
                "Gradient scaling takes the place of loss scaling; one wrapper is enough. Pass "
                "the optimizer inside, `inner_optimizer.inner_optimizer`. "
                f"Received: {type(inner_optimizer).__name__}"
            )
        if inner_optimizer.loss_scale_factor is not None:
            raise ValueError(
                "Gradient scaling takes the place of loss scaling; remove `loss_scale_factor` "
                f"from the optimizer. Received: {inner_optimizer.loss_scale_factor}"
            )
        if scales is not None and not isinstance(scales, ScaleRegistry):
            raise TypeError(
                "`scales` must be the ScaleRegistry of a converted model, `model.scales`, or None. "
                f"Received: scales={type(scales).__name__}"
            )
        super().__init__(inner_optimizer, name=name)
        self._scales = scales
        # Whether somebody else looks at `skips_in_a_row`.
        self.watched = False

    weight_decay = _of_inner("weight_decay", "Share of a weight that a step takes off.")
    clipnorm = _of_inner("clipnorm", "Largest norm of a gradient; in units of the true one.")
    global_clipnorm = _of_inner("global_clipnorm", "Largest norm of all gradients together.")
    clipvalue = _of_inner("clipvalue", "Largest magnitude of a gradient's entries.")
    optimizers = _of_inner("optimizers", "Those of a `keras.optimizers.MultiOptimizer`.")

    def exclude_from_weight_decay(self, var_list=None, var_names=None):
        """Names variables that do not decay; before the first step, as in Keras."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    @property
    def scales(self):
        """The `ScaleRegistry` whose scales this optimizer works with, or `None`."""
        return self._scales

    def attach(self, scales):
        """Has the optimizer work with a model's scales, and keep them as part of its state.

        Raises:
            ValueError: If it is built already, or works with another model's scales.
        """
        if self._scales is scales:
            return
        if self._scales is not None:
            raise ValueError(
                "A GradScaleOptimizer keeps the scales of one model as part of its state. Make a "
                "new one for another model, around `optimizer.inner_optimizer` to keep its state. "
                "Received: an optimizer that has the scales of another model"
            )
        if self.built:
            raise ValueError(
                "A model's scales are part of its optimizer's state, and must be known when that "
                "is built. Call a model with a `call` of its own on a batch first, or leave it to "
                "`fit` to build the optimizer. For another model make a new one, around "
                "`optimizer.inner_optimizer` to keep its state. "
                "Received: an optimizer that was built without scales"
            )
        self._scales = scales

    def build(self, var_list):
        """Creates the counters, takes over the scale state, and builds the inner optimizer."""
        if self.built:
            return
        if self._scales is None:
            self._warn_of_plain_models(var_list)
        for variable in self._scales.variables if self._scales is not None else ():
            self._track_variable(variable)
        counter = dict(shape=(), dtype="int", initializer="zeros", aggregation="none")
        self.applied_steps = self.add_variable(name="applied_steps", **counter)
        self.skipped_steps = self.add_variable(name="skipped_steps", **counter)
        self.skips_in_a_row = self.add_variable(name="skips_in_a_row", **counter)
        # It may be in use already; not every optimizer asks itself.
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(var_list)
        keras.optimizers.Optimizer.build(self, var_list)

    def _warn_of_plain_models(self, var_list):
        """Tells of float16 training in which nothing scales gradients, such as a clone's."""
        scaled = any(getattr(v, "_is_gradient_scaled", False) for v in var_list)
        if var_list and not scaled and keras.config.dtype_policy().compute_dtype == "float16":
            warnings.warn(
                "A GradScaleOptimizer scales no loss: the model does the scaling. This one trains "
                "a plain model, whose small gradients are lost in float16. Convert the model "
                "(tf_gradscale.convert), or use keras.optimizers.LossScaleOptimizer.",
                stacklevel=2,
            )

    def set_weights(self, weights):
        """Assigns arrays to `variables`, in their order.

        Raises:
            ValueError: If it is not built, or their number or shapes are others.
        """
        own = len(self.variables) - len(self.inner_optimizer.variables)
        if self.built and len(weights) != len(self.variables):
            raise ValueError(
                "`set_weights` takes as many arrays as the optimizer has `variables`, which is "
                f"{len(self.variables)}. Received: {len(weights)} arrays"
            )
        # Keras' own: if it is not built, it says so.
        super().set_weights(weights[:own])
        self.inner_optimizer.set_weights(weights[own:])

    def load_own_variables(self, store):
        """Takes the state from a file.

        Raises:
            ValueError: If it is not that of the same optimizer with the scales of the same model.
        """
        if self.built:
            layout = None if self._scales is None else self._scales.layout
            check_saved(store, self.variables, layout)
        # If it is not, this warns that there is nothing to load into, as of a copy of an optimizer.
        super().load_own_variables(store)

    def scale_loss(self, loss):
        """The loss itself: nothing needs scaling. Leftover calls do no harm."""
        return loss

    @property
    def max_skips(self):
        """After how many skipped steps in a row training stops."""
        config = GradScaleConfig() if self._scales is None else self._scales.config
        return config.max_skips

    def check_skips(self, cause=None):
        """Stops training that skips every step.

        `fit` does it by itself, and so does a loop of one's own that is not compiled by XLA, which
        has no errors: there, call this now and then, outside the compiled function.

        Args:
            cause: Function that is called if it comes to that, and gives a sentence for the error.

        Raises:
            FloatingPointError: If the last `max_skips` steps were all skipped.
        """
        skips = int(self.skips_in_a_row.numpy()) if self.built else 0
        if skips >= self.max_skips:
            said = "" if cause is None else f" {cause()}"
            raise FloatingPointError(
                f"{self._stopped()}{said} Received: {skips} skipped steps in a row"
            )

    def _stopped(self):
        return (
            f"Training must apply one step in {self.max_skips} (`max_skips`), but gradients were "
            "not finite in any. tf_gradscale.diagnose(model, x, y) shows where they broke."
        )

    def _stateful_handle_finite_grads(self, grads, trainable_variables):
        # This is a graph of its own, to which all of them must belong: TensorFlow refuses a
        # mixture, which an optimizer makes that changes some of the gradients.
        grads = [identity(g) for g in grads]
        self.inner_optimizer.apply(grads, trainable_variables=trainable_variables)
        self.applied_steps.assign_add(1)
        self.skips_in_a_row.assign(0)

    def _stateful_handle_non_finite_grads(self):
        self.skipped_steps.assign_add(1)
        self.skips_in_a_row.assign_add(1)
        if not self.watched and not tf.executing_eagerly():
            # In a condition that is not entered while all is well. XLA leaves it out.
            goes_on = tf.convert_to_tensor(self.skips_in_a_row.value) < self.max_skips
            tf.debugging.Assert(goes_on, [self._stopped()])
        if self._scales is not None:
            self._scales.request_update()

    def stateless_apply(self, optimizer_variables, grads, trainable_variables):
        """Not for TensorFlow, as Keras says: a step changes variables."""
        return keras.optimizers.Optimizer.stateless_apply(
            self, optimizer_variables, grads, trainable_variables
        )

    def apply_gradients(self, grads_and_vars):
        """Applies (gradient, variable) pairs, unless a gradient is not finite.

        Returns:
            The number of steps of the optimizer inside; of batches, if it accumulates gradients.
        """
        super().apply_gradients(grads_and_vars)
        # `iterations` counts updates, and Keras gives batches here.
        return self.inner_optimizer._iterations

    def apply(self, grads, trainable_variables=None):
        """Applies gradients to variables, unless one is not finite.

        Args:
            grads: List of gradients, `None` for none.
            trainable_variables: The variables, in the same order; may be left out once the
                optimizer is built.

        Raises:
            ValueError: If it knows no variables, is called outside of a replica, was made outside
                of `strategy.scope()`, or gradients have lost their scales.
            FloatingPointError: If too many steps in a row were skipped (`check_skips`).
        """
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        elif grads and not self.built:
            raise ValueError(
                "Gradients without variables are taken once the optimizer is built for these: "
                "call `optimizer.build(trainable_variables)` first. "
                f"Received: a list of {len(grads)} gradients"
            )
        if not grads:
            return
        if not self.built:
            # init_scope: a merged condition (below) cannot run where its variables are made.
            with tf.init_scope(), keras.name_scope(self.name):
                self.build(trainable_variables)
            self.built = True
        if all(g is None for g in grads):
            # Keras' own message about it.
            self.inner_optimizer.apply(grads, trainable_variables=trainable_variables)
        if tf.distribute.in_cross_replica_context():
            raise ValueError(
                "`apply` must be called in a replica context, within `strategy.run`. "
                "Received: a call from the cross-replica context."
            )
        replica = tf.distribute.get_replica_context()
        replicas = replica.num_replicas_in_sync
        if replicas > 1:
            self._check_scope()
        if self._scales is not None and self._scales.config.unscale == "optimizer":
            self._check_replicas(replicas)
            variables = trainable_variables or self._trainable_variables
            grads = self._scales.unscale(grads, variables)
        bounds = grads
        if replicas > 1:
            # The sum of the gradients over all replicas must be finite, too.
            bounds = [None if g is None else multiply(g, replicas) for g in grads]
        finite = self.check_finite(bounds)
        if replicas > 1:
            # All replicas must agree before one acts: gradients are summed only afterwards, so
            # an overflow on one of them would reach all weights.
            bad = replica.all_reduce("sum", tf.cast(~finite, tf.float32))
            finite = tf.equal(bad, 0.0)

        if tf.__internal__.distribute.strategy_supports_no_merge_call():
            self._apply_if(finite, grads, trainable_variables)
        else:
            replica.merge_call(self._apply_merged, args=(finite, grads, trainable_variables))
        if tf.executing_eagerly() and not self.watched:
            self.check_skips()

    def check_finite(self, grads):
        """Whether all entries of some gradients are finite, `None` for none."""
        parts = [tf.reduce_all(is_finite(values(g))) for g in grads if g is not None]
        # All updates depend on it.
        return computed_once(tf.cast(tf.reduce_all([True, *parts]), tf.int32)) > 0

    def _check_scope(self):
        """Refuses variables of which there is one for all replicas: each would update it."""
        for variable in self.variables:
            if not isinstance(variable.value, tf.distribute.DistributedValues):
                raise ValueError(
                    "With several replicas, convert and compile the model within "
                    "`strategy.scope()`, and make and build an optimizer of your own there: what "
                    "is made outside is updated by each replica in turn, so that steps are "
                    f"counted twice. Received: variable '{variable.path}', made outside"
                )

    def _check_replicas(self, replicas):
        """Refuses to divide gradients that replicas may have summed at different scales."""
        if replicas == 1 or self._scales.frozen:
            return
        raise ValueError(
            'With unscale="optimizer" all replicas must use the same scales, but each chooses its '
            'own. Use unscale="layer", or fix them with `scales.freeze()` before training. '
            f"Received: {replicas} replicas"
        )

    def _apply_if(self, finite, grads, trainable_variables):
        keras.ops.cond(
            finite,
            lambda: self._stateful_handle_finite_grads(grads, trainable_variables),
            self._stateful_handle_non_finite_grads,
        )

    def _apply_merged(self, strategy, finite, grads, trainable_variables):
        # The condition is laid around the replicas: the update inside it merges them itself.
        keras.ops.cond(
            strategy.experimental_local_results(finite)[0],
            lambda: strategy.extended.call_for_each_replica(
                self._stateful_handle_finite_grads, args=(grads, trainable_variables)
            ),
            self._stateful_handle_non_finite_grads,
        )

    def get_config(self):
        """The arguments, less `scales`, which `Model.compile` gives anew."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"name": self.name, "inner_optimizer": inner}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Makes one of what `get_config` gave."""
        # Keras' own takes entries out.
        return super().from_config(dict(config), custom_objects)
