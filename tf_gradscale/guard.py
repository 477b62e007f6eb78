"""Stops a `fit` that does nothing but skip steps, and says which tensor broke first."""

import contextlib

import keras
import tensorflow as tf

from tf_gradscale.diagnosis import examine


class Guard:
    """A model's train function that stops when too many steps in a row were skipped.

    The optimizer's counter is looked at once in `max_skips` steps, so that a healthy training
    hardly ever waits for its device.

    Args:
        model: The gradient-scaled model, compiled.
        function: Its train function, of an iterator over batches.
    """

    def __init__(self, model, function):
        self._model, self._function, self._steps = model, function, 0
        model.optimizer.watched = True

    def __call__(self, iterator):
        """Trains for one call. Raises FloatingPointError if nothing but skips happened."""
        logs = self._function(iterator)
        optimizer = self._model.optimizer
        self._steps += self._model.steps_per_execution
        if self._steps >= optimizer.max_skips:
            self._steps = 0
            optimizer.check_skips(lambda: self._cause(iterator))
        return logs

    def _cause(self, iterator):
        batch = None
        # An epoch may end with the step that was one too many.
        with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
            batch = next(iterator)
        if batch is None:
            return "There is no other batch to see it in."
        local = self._model.distribute_strategy.experimental_local_results
        leaves = [local(x) for x in keras.tree.flatten(batch)]
        # What each replica of this process gets: any of them may be the one.
        for leaf in zip(*leaves, strict=True):
            part = keras.tree.pack_sequence_as(batch, leaf)
            try:
                fault = examine(self._model, *keras.utils.unpack_x_y_sample_weight(part)).fault
            except Exception as error:  # a `train_step` of one's own may do without a loss
                return f"Which tensor broke first cannot be told ({type(error).__name__}: {error})."
            if fault is not None:
                return f"In the next batch, the first that is not finite is {fault}."
        return "In the next batch all is finite."
