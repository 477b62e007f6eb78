"""Gradients stay at float16's rounding floor, whatever the loss is multiplied by."""

import functools

import floor
import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs

SEEDS = range(4)
BOUND = 1.1
MULTIPLIERS = (1e-9, 1e-6, 1.0, 1e5)
PASSES = (2, 10, 50, 99)
slow = pytest.mark.slow

bench = functools.cache(floor.Bench)


def check(ratios):
    """Median over the seeds, which come first: of the median error and of the largest."""
    assert np.all(np.median(ratios, axis=0) <= BOUND), np.round(ratios, 3)


@pytest.mark.parametrize("net", [floor.residual, floor.vgg, floor.three_heads])
def test_a_fixed_loss_scale_fails(net):
    """So there is something to mend: one loss scale does not suit all multiples of the loss."""
    subject = bench(net)
    subject.reset(0)
    _, plain = subject.errors((), [*floor.SWEEP, 1e-9, 1e-6, 2.0**15 * 1e-9, 2.0**15 * 1e5])
    sweep, (nothing, little, low, high) = np.split(plain, [len(floor.SWEEP)])
    # The plateau: all loss scales of the sweep are equally good.
    assert np.all(sweep < 1.1 * sweep.min(axis=0)) and np.all(sweep[:, 0] < 0.1)
    # No loss scale: all is lost at 1e-9, and most at 1e-6.
    np.testing.assert_allclose(nothing, 1.0)
    assert little[0] > 0.5
    # 2^15, where Keras' dynamic scale starts: not enough at one end, and too much at the other.
    assert low[0] > 2 * np.median(sweep, axis=0)[0]
    assert not np.isfinite(high[1])


@pytest.mark.parametrize(
    ("net", "jit_compile"),
    [
        (floor.residual, False),
        (floor.vgg, False),
        (floor.three_heads, False),
        (floor.vgg, True),
        pytest.param(floor.residual, True, marks=slow),
        pytest.param(floor.three_heads, True, marks=slow),
    ],
)
def test_the_very_first_pass(net, jit_compile):
    subject, ratios = bench(net, jit_compile), []
    for seed in SEEDS:
        subject.reset(seed)
        ratios.append(subject.ratios(MULTIPLIERS))
    check(ratios)


@pytest.mark.parametrize(
    ("net", "jit_compile"),
    [
        (floor.vgg, False),
        (floor.residual_zero, False),
        pytest.param(floor.residual, False, marks=slow),
        pytest.param(floor.three_heads, False, marks=slow),
        pytest.param(floor.residual, True, marks=slow),
        pytest.param(floor.residual_zero, True, marks=slow),
        pytest.param(floor.vgg, True, marks=slow),
        pytest.param(floor.three_heads, True, marks=slow),
    ],
)
def test_in_training(net, jit_compile):
    """Scales are chosen in passes 0, 1, 2, 4, ... 64; pass 99 uses ones of 35 steps ago."""
    subject, ratios = bench(net, jit_compile), []
    for seed in SEEDS:
        subject.reset(seed)
        done, of_seed, losses = 0, [], []
        for number in PASSES:
            losses.append(subject.train(number - done))
            done = number
            of_seed.append(subject.ratios()[0])
        assert losses[-1] < 0.9 * losses[0]
        ratios.append(of_seed)
    check(ratios)


@pytest.mark.parametrize(
    "net", [floor.vgg, pytest.param(floor.residual, marks=slow), floor.three_heads]
)
def test_a_loss_that_changes_between_updates(net):
    """Pass 3 is no updating pass: its scales are those of losses of another magnitude."""
    subject, ratios = bench(net), []
    for seed in SEEDS:
        subject.reset(seed)
        subject.train(3)
        ratios.append(subject.ratios(MULTIPLIERS))
    check(ratios)


@slow
@pytest.mark.parametrize("net", [floor.residual, floor.vgg, floor.three_heads])
def test_scales_of_the_first_pass_serve_for_long(net):
    subject, ratios = bench(net), []
    for seed in SEEDS:
        subject.reset(seed)
        subject.train(1)
        subject.ours.scales.freeze()
        done, of_seed = 1, []
        for number in (*PASSES, 200):
            subject.train(number - done)
            done = number
            of_seed.append(subject.ratios()[0])
        subject.ours.scales.unfreeze()
        ratios.append(of_seed)
    check(ratios)


def test_the_smallest_sufficient_scale_is_far_above_the_floor():
    """So the bound tells good placements from bad: a mean over 336 positions takes 8 binades."""
    subject = floor.Bench(floor.three_heads, config=gs.GradScaleConfig.paper())
    ratios = []
    for seed in SEEDS:
        subject.reset(seed)
        ratios.append(subject.ratios())
    assert np.all(np.median(ratios, axis=0) > 10)


def task(multiplier, scaled):
    """A model compiled for the loss times a multiplier, and data from which it can learn."""
    keras.utils.set_random_seed(7)
    rng = np.random.default_rng(7)
    y = rng.integers(4, size=(64,))
    x = rng.normal(size=(4, 6, 6, 2))[y] + 0.3 * rng.normal(size=(64, 6, 6, 2))
    with gs.policy_scope("mixed_float16" if scaled else "float32"):
        model = keras.Sequential(
            [
                keras.Input((6, 6, 2)),
                keras.layers.Conv2D(8, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dense(4, activation="softmax"),
            ]
        )
    if scaled:
        model = gs.convert(model)
    optimizer = keras.optimizers.SGD(0.05 / multiplier)
    model.compile(optimizer, "sparse_categorical_crossentropy", loss_weights=multiplier)
    return model, x, y


@pytest.mark.parametrize("multiplier", [1e-12, 1e5])
def test_training_far_from_magnitude_one(multiplier):
    losses = []
    for scaled in (False, True):
        model, x, y = task(multiplier, scaled)
        history = model.fit(x, y, batch_size=16, epochs=10, shuffle=False, verbose=0).history
        losses.append(np.array(history["loss"]))
    expected, found = losses
    assert expected[-1] < 0.3 * expected[0]
    np.testing.assert_allclose(found, expected, rtol=0.01)
    assert (int(model.optimizer.applied_steps), int(model.optimizer.skipped_steps)) == (40, 0)


def test_the_larger_of_these_losses_has_gradients_beyond_float16():
    model, x, y = task(1e5, scaled=False)
    with tf.GradientTape() as tape:
        made = keras.losses.sparse_categorical_crossentropy(y[:16], model(x[:16]))
        loss = 1e5 * tf.reduce_mean(made)
    gradients = tape.gradient(loss, model.trainable_variables)
    assert max(np.abs(g).max() for g in gradients) > 65504
