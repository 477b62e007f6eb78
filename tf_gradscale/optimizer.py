"""The optimizer wrapper: per-variable unscaling, and skipping of non-finite steps."""

import keras
import tensorflow as tf


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
        applied_steps: Variable, how many steps were applied.
        skipped_steps: Variable, how many were skipped because a gradient was not finite.

    Raises:
        TypeError: If `inner_optimizer` is no Keras optimizer.
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
        super().__init__(inner_optimizer, name=name)
        self._scales = scales

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
        if self.built or self._scales is not None:
            raise ValueError(
                "A GradScaleOptimizer keeps the scales of one model as part of its state. Make a "
                "new one for another model, around `optimizer.inner_optimizer` to keep its state. "
                "Received: an optimizer that is in use already"
            )
        self._scales = scales

    def build(self, var_list):
        """Creates the counters, takes over the scale state, and builds the inner optimizer."""
        if self.built:
            return
        for variable in self._scales.variables if self._scales is not None else ():
            self._track_variable(variable)
        counter = dict(shape=(), dtype="int", initializer="zeros", aggregation="none")
        self.applied_steps = self.add_variable(name="applied_steps", **counter)
        self.skipped_steps = self.add_variable(name="skipped_steps", **counter)
        self.inner_optimizer.build(var_list)
        keras.optimizers.Optimizer.build(self, var_list)

    def scale_loss(self, loss):
        """The loss itself: nothing needs scaling. Leftover calls do no harm."""
        return loss

    def _stateful_handle_finite_grads(self, grads, trainable_variables):
        self.inner_optimizer.apply(grads, trainable_variables=trainable_variables)
        self.applied_steps.assign_add(1)

    def _stateful_handle_non_finite_grads(self):
        self.skipped_steps.assign_add(1)
        if self._scales is not None:
            self._scales.request_update()

    def apply(self, grads, trainable_variables=None):
        """Applies gradients to variables, unless one is not finite.

        Args:
            grads: List of gradients, `None` for none.
            trainable_variables: The variables, in the same order.
        """
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if not self.built:
            with keras.name_scope(self.name):
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
        valid = True
        if self._scales is not None and self._scales.config.unscale == "optimizer":
            self._check_replicas()
            variables = trainable_variables or self._trainable_variables
            grads, valid = self._scales.unscale(grads, variables)
            if tf.executing_eagerly() and not valid:
                raise ValueError(
                    'With unscale="optimizer" gradients must be applied before the next pass '
                    'chooses new scales. To accumulate gradients over passes, use unscale="layer" '
                    "or `gradient_accumulation_steps` of the inner optimizer. Received: gradients "
                    "of several passes, with different scales"
                )
        finite = tf.logical_and(self.check_finite(grads), valid)
        replica = tf.distribute.get_replica_context()
        if replica.num_replicas_in_sync > 1:
            # All replicas must agree before one acts: gradients are summed only afterwards, so
            # an overflow on one of them would reach all weights.
            bad = replica.all_reduce("sum", tf.cast(~finite, tf.float32))
            finite = tf.equal(bad, 0.0)

        if tf.__internal__.distribute.strategy_supports_no_merge_call():
            self._apply_if(finite, grads, trainable_variables)
        else:
            replica.merge_call(self._apply_merged, args=(finite, grads, trainable_variables))

    def _check_replicas(self):
        """Refuses to divide gradients that replicas may have summed at different scales."""
        if self._distribution_strategy.num_replicas_in_sync == 1 or self._scales.frozen:
            return
        raise ValueError(
            'With unscale="optimizer" all replicas must use the same scales, but each chooses its '
            'own. Use unscale="layer", or fix them with `scales.freeze()` before training. '
            f"Received: {self._distribution_strategy.num_replicas_in_sync} replicas"
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
