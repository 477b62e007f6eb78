"""Sums of squares and largest magnitudes, in one pass under XLA, against NumPy in float64."""

import numpy as np
import pytest
import tensorflow as tf

from tf_gradscale.reductions import largest_magnitude, totals

SHAPES = [
    ((), None),
    ((7,), None),
    ((7,), -1),
    ((5, 3), -1),
    ((40, 50), None),
    ((4, 9, 70), -1),
    ((4, 9, 6), 1),
    ((2, 3, 4, 5), -1),
    ((2, 3, 4, 5), 1),
    ((2, 3, 33, 4, 5), None),
]


def expected(x, axis):
    squares = np.square(x.astype("float64"))
    axes = None if axis is None else tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    return squares.sum(axes).max(), squares.sum(), np.abs(x).max()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_totals(run, shape, axis, dtype):
    x = np.asarray(np.random.default_rng(0).normal(size=shape) * 100).astype(dtype)
    found = run(lambda x: totals(x, axis))(tf.constant(x))
    np.testing.assert_allclose(found, expected(x, axis), rtol=1e-5)
    assert all(one.dtype == tf.float32 and one.shape == () for one in found)
    assert float(run(largest_magnitude)(tf.constant(x))) == np.abs(x).max()


def test_a_shift_multiplies_before_squares_are_taken(run):
    x = np.array([1e-25, -3e-25], "float32")
    found = run(lambda x: totals(x, shift=30))(tf.constant(x))
    np.testing.assert_allclose(found, expected(x * 2.0**30, None), rtol=1e-5)
    assert found.squares > 0


@pytest.mark.parametrize("shape", [(), (7,), (40, 50), (3, 3, 40, 5)])
def test_small_tensors_in_one_reduction(run, shape):
    x = np.asarray(np.random.default_rng(0).normal(size=shape)).astype("float32")
    found = run(lambda x: totals(x, small=True))(tf.constant(x))
    np.testing.assert_allclose(found, expected(x, None), rtol=1e-5)


def test_what_is_not_asked_for_is_not_measured(run):
    x = np.random.default_rng(0).normal(size=(4, 40)).astype("float32")
    found = run(lambda x: totals(x, -1, largest=False))(tf.constant(x))
    np.testing.assert_allclose(found[:2], expected(x, -1)[:2], rtol=1e-5)
    assert found.largest == found.squares


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("axis", [None, -1])
def test_what_is_not_finite_shows(run, value, axis, small):
    x = np.ones((4, 40), "float16")
    x[1, 2] = value
    found = run(lambda x: totals(x, axis, small=small))(tf.constant(x))
    assert not np.isfinite(found.squares)
    assert not np.isfinite(found.largest)


def test_nothing_is_not_larger_than_zero(run):
    found = run(lambda x: totals(x, -1))(tf.zeros([0, 3]))
    assert found.squares == 0.0
    assert found.largest <= 0.0


def test_of_an_unknown_rank_the_whole_is_measured():
    @tf.function(input_signature=[tf.TensorSpec(None)])
    def measure(x):
        return totals(x, -1)

    x = np.array([[1.0, 2.0], [3.0, -4.0]])
    np.testing.assert_array_equal(measure(tf.constant(x, tf.float32)), [30.0, 30.0, 4.0])


def test_sums_of_many_entries_keep_to_a_binade(run):
    """A float32 sum of ones stops at 2^24; what is made of it are powers of two."""
    x = tf.ones([2**14, 2**10], tf.float16)
    found = run(lambda x: totals(x, -1))(x)
    np.testing.assert_allclose(found, [2**14, 2**24, 1.0], rtol=1e-3)
