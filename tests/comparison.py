"""One model three times over: in float32, in plain mixed_float16, and gradient-scaled.

The measure is the relative L2 error of each gradient against float32's. What float16 can do at
best is the error of the plain model under a fixed loss scale that suits it.
"""

import keras
import numpy as np
import tensorflow as tf

import tf_gradscale as gs

# What a loss is multiplied by, at which plain float16 loses its gradients and ours may not.
TINY = 2.0**-22
# Two gradients of one precision differ by chance, the more the fewer entries they have.
FACTOR, SLACK = 2.0, 1e-3
# A gradient whose norm is a smaller share of the largest one is zero to float32's rounding.
ZERO = 1e-6


def eagerly(function):
    """How a function is run where it does not matter."""
    return function


def normal(shape, seed):
    """Random values that float16 holds."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return tf.constant(values.astype("float16").astype("float32"))


def linear(model, *batch):
    """A random linear function of all outputs."""
    outputs = keras.tree.flatten(model(batch[0] if len(batch) == 1 else batch, training=True))
    return sum(
        tf.reduce_sum(tf.cast(y, tf.float32) * normal(y.shape, 50 + i))
        for i, y in enumerate(outputs)
    )


def relative(found, wanted):
    """The relative L2 error."""
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def error(found, wanted):
    """The relative L2 error of each gradient; where there is none, it must be `None` or zero."""
    assert all(f is None or not np.any(f) for f, w in zip(found, wanted, strict=True) if w is None)
    pairs = [(f, w) for f, w in zip(found, wanted, strict=True) if w is not None]
    norms = [np.linalg.norm(w) for _, w in pairs]
    assert all(np.all(np.isfinite(f)) for f, _ in pairs)
    errors = []
    for (f, w), norm in zip(pairs, norms, strict=True):
        if norm < ZERO * max(norms):
            # Nothing but rounding: the bias of an attention's keys, or exactly zero.
            assert np.linalg.norm(f) <= (1e-2 * max(norms) if norm else 0.0)
        else:
            errors.append(relative(f, w))
    return np.array(errors)


def build_all(build, config=None):
    """The model in float32, in plain mixed_float16 and ours, with the same weights and seeds."""
    models = []
    for policy in ("float32", "mixed_float16", "mixed_float16"):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(7)
        with gs.policy_scope(policy):
            models.append(build())
    true, plain, ours = models
    for i, variable in enumerate(true.trainable_variables):
        variable.assign(variable + 0.2 * normal(variable.shape, i))
    for model in (plain, ours):
        model.set_weights(true.get_weights())
    return true, plain, gs.convert(ours, config)


class Threefold:
    """A model three times over, and a batch.

    Args:
        build: Function that builds the model, under the global policy.
        *batch: Arrays.
        loss: Function of a model and the batch; its gradients are about 1, and what depends on
            `training` is the same in both precisions.
        loss_scale: One that suits the plain model.
        config: A `GradScaleConfig` for ours.
    """

    def __init__(self, build, *batch, loss=linear, loss_scale=2.0**4, config=None):
        self.true, self.plain, self.ours = build_all(build, config)
        self.batch = [tf.constant(x) for x in batch]
        self.loss, self.loss_scale = loss, loss_scale

    def gradients(self, model, run):
        """A function of a multiplier: gradients of inputs and variables, divided by it again."""
        inputs = [x for x in self.batch if x.dtype.is_floating]

        @run
        def step(multiplier, *batch):
            floats = [x for x in batch if x.dtype.is_floating]
            with tf.GradientTape() as tape:
                tape.watch(floats)
                value = multiplier * self.loss(model, *batch)
            sources = floats + [v.value for v in model.trainable_variables]
            self.raw = tape.gradient(value, sources)
            return [None if g is None else tf.convert_to_tensor(g) for g in self.raw]

        def gradients(multiplier=1.0):
            before = [v.numpy() for v in model.non_trainable_variables]
            found = step(tf.constant(multiplier, tf.float32), *self.batch)
            for variable, value in zip(model.non_trainable_variables, before, strict=True):
                variable.assign(value)
            return [None if g is None else g.numpy() / np.float32(multiplier) for g in found]

        assert inputs or model.trainable_variables
        return gradients

    def check(self, run=eagerly, multipliers=(1.0, TINY), bound=None, plain_run=eagerly):
        """Ours are as near float32's as plain float16's, which with a tiny loss are not.

        `bound`: the largest error, where plain float16 is no measure. `plain_run`: how that is
        run; under XLA it may round elsewhere.
        """
        wanted = self.gradients(self.true, eagerly)()
        if bound is None:
            plain = self.gradients(self.plain, plain_run)
            floor = error(plain(self.loss_scale), wanted)
            assert np.all(floor < 0.05), floor
            lost = zip(plain(TINY), wanted, strict=True)
            assert any(w is not None and relative(f, w) > 0.1 for f, w in lost)
            bound = FACTOR * floor + SLACK
        step = self.gradients(self.ours, run)
        for multiplier in multipliers:
            self.ours.scales.unfreeze()
            # The second time with scales that are read.
            for _ in range(2):
                found = error(step(multiplier), wanted)
                assert np.all(found <= bound), (multiplier, found, bound)
