"""The in-graph estimates in float32 against `theory` in float64: the same powers of two."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import special

import tf_gradscale as gs
from tf_gradscale import estimate, formats, theory

FLOAT16 = formats.get("float16")
DECADES = np.arange(-24, 7)
PLACEMENTS = ["balanced", "threshold"]
CAST_MODELS = ["lognormal", "normal", "histogram"]
# What float32's rounding of statistics and logarithms may amount to, as a factor.
ROUNDING = 1e-4


@functools.cache
def placement(**config):
    return estimate.Placement(gs.GradScaleConfig(**config))


def log2(x):
    return tf.constant(np.log2(x), tf.float32)


def check(found, kind, lower, upper, floor=0.0):
    """The estimates are the theory's powers of two, but for those that rounding decides.

    `floor`: the least that a scale may be.
    """
    choose = {"balanced": theory.balanced_scale, "threshold": theory.threshold_scale}[kind]
    found = np.exp2(np.asarray(found, np.float64))
    nudges = [1 - ROUNDING, 1.0, 1 + ROUNDING]
    chosen = [choose(lower * nudge, upper * nudge) for nudge in nudges]
    least, expected, most = np.maximum(chosen, floor)
    assert np.all((found == least) | (found == expected) | (found == most))
    assert np.mean(found == expected) >= 0.95


def split(rows, kind):
    """Rows of scale, lower and upper, as the arguments of `check`."""
    found, lower, upper = np.array(rows).T
    return found, kind, lower, upper


def gradients(count=4096, s=2.5, zeros=0.3):
    """Log-normal gradients over many decades, some entries zero: a list."""
    rng = np.random.default_rng(0)
    values = rng.choice([-1, 1], count) * rng.lognormal(0.0, s, count)
    values[rng.uniform(size=count) < zeros] = 0.0
    factors = 10.0**DECADES * rng.uniform(1, 10, DECADES.size)
    return [(values * factor).astype("float32") for factor in factors]


def test_powers_of_two():
    exponents = np.arange(-126, 128)
    exact = np.ldexp(np.float32(1.0), exponents)
    np.testing.assert_array_equal(estimate.exp2(tf.constant(exponents, tf.float32)), exact)
    np.testing.assert_array_equal(estimate.exponent_bits(tf.constant(exact)) - 127, exponents)
    below = np.nextafter(exact[1:], np.float32(0))
    np.testing.assert_array_equal(
        estimate.exponent_bits(tf.constant(-below)) - 127, exponents[1:] - 1
    )
    assert int(estimate.exponent_bits(tf.constant(0.0))) == 0


def test_logarithms():
    x = np.random.default_rng(0).lognormal(0.0, 20.0, 1000).astype("float32")
    found = estimate.log2(tf.constant(x)).numpy()
    np.testing.assert_allclose(found, np.log2(x.astype("float64")), rtol=1e-6, atol=1e-6)
    # Not -inf, and below everything else.
    assert -1000 < float(estimate.log2(tf.constant(0.0))) <= -126


@pytest.mark.parametrize("kind", PLACEMENTS)
@pytest.mark.parametrize("margin_bits", [0, 4, 10])
def test_place(kind, margin_bits):
    rng = np.random.default_rng(1)
    lower, upper = np.exp2(rng.uniform(-40, 40, (2, 2000)))
    found = placement(placement=kind, margin_bits=margin_bits).place(log2(lower), log2(upper), 0.0)
    if kind == "balanced":
        expected = np.minimum(np.log2(lower * upper) / 2, np.log2(upper) - margin_bits)
        expected = np.floor(expected)
    else:
        expected = np.minimum(np.ceil(np.log2(lower)), np.floor(np.log2(upper)))
    assert np.mean(found == expected) > 0.999
    assert np.all(np.abs(found - expected) <= 1)


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_a_scale_bound_is_met(kind):
    lower, upper = np.exp2(np.random.default_rng(1).uniform(-40, 40, (2, 2000)))
    free = placement(placement=kind).place(log2(lower), log2(upper), 0.0)
    bounded = placement(placement=kind, scale_bound=100.0).place(log2(lower), log2(upper), 0.0)
    np.testing.assert_array_equal(bounded, np.minimum(free, 6.0))


def test_retreat_gives_up_a_share_of_the_height():
    place = placement().place
    # Between 2^0 and 2^40 a scale stands at 2^20; it gives up a half, three quarters of that.
    lower, upper = tf.constant(0.0), tf.constant(40.0)
    assert [float(place(lower, upper, r)) for r in (0.0, 0.5, 0.75, 1.0)] == [20, 10, 5, 0]
    # Where it stands below the lower bound, eight binades are taken as its height.
    lower, upper = tf.constant(40.0), tf.constant(0.0)
    assert [float(place(lower, upper, r)) for r in (0.0, 0.5, 0.75, 1.0)] == [-4, -8, -10, -12]


@pytest.mark.parametrize("kind", PLACEMENTS)
@pytest.mark.parametrize("smallest", ["subnormal", "normal"])
@pytest.mark.parametrize("rate", [1e-4, 1e-3, 1e-2])
def test_gemm(kind, smallest, rate):
    """Theorem 1, over the decades of ∇Y at which β·W stays within float16."""
    rng = np.random.default_rng(2)
    n = rng.integers(1, 5000, 1000).astype("float64")
    sigma_w = rng.uniform(0.01, 1.0, n.size)
    max_w = sigma_w * rng.uniform(1.8, 5.0, n.size)
    sigma_dy = 10 ** rng.uniform(-6, 4, n.size)
    max_dy = sigma_dy * rng.uniform(3, 100, n.size)
    place = placement(placement=kind, smallest=smallest, underflow_threshold=rate)
    found = place.gemm(*map(log2, (np.sqrt(n), sigma_dy, sigma_w, max_dy, max_w)), 0.0).numpy()
    lower = theory.gemm_scale(rate, n, sigma_dy, sigma_w, FLOAT16.smallest(smallest))
    if kind == "balanced":
        upper = theory.gemm_room_scale(n, sigma_dy, sigma_w, FLOAT16.largest)
    else:
        upper = theory.gemm_overflow_scale(n, max_dy, max_w, FLOAT16.largest)
    # β·W neither overflows nor sinks into the subnormals, whatever is wanted.
    assert np.all(np.exp2(found) * max_w < FLOAT16.largest)
    assert np.all(np.exp2(found) * sigma_w >= 2.0**-10)
    within = (np.exp2(found + 2) * max_w < FLOAT16.largest) & (
        np.exp2(found - 1) * sigma_w >= 2.0**-10
    )
    assert np.sum(within) > 100
    check(found[within], kind, lower[within], upper[within])


def cast_bounds(dy, model, rate=1e-3):
    """The bounds on the scale of a cast, from the gradient in float64."""
    magnitudes = np.abs(dy.astype("float64"))
    nonzero = magnitudes[magnitudes > 0]
    smallest = FLOAT16.smallest_subnormal
    if model == "lognormal":
        logs = np.log(nonzero)
        lower = theory.lognormal_scale(rate, logs.mean(), logs.std(), smallest)
    elif model == "normal":
        lower = theory.gemm_scale(rate, 1, np.sqrt(np.mean(magnitudes**2)), 1.0, smallest)
    else:
        # The power of two at or below the γ'-quantile: a share of γ' lies below it, at most.
        exponents = np.sort(np.frexp(nonzero)[1] - 1)
        lower = smallest / 2.0 ** exponents[int(rate * nonzero.size)]
    return lower, theory.cast_overflow_scale(magnitudes.max(), FLOAT16.largest)


@pytest.mark.parametrize("kind", PLACEMENTS)
@pytest.mark.parametrize("model", CAST_MODELS)
@pytest.mark.parametrize("s", [0.5, 2.5])
def test_cast(kind, model, s):
    """Theorem 2, and the two other models, over thirty decades."""
    place = placement(placement=kind)
    dys = gradients(s=s)
    found = [place.cast(tf.constant(dy), np.abs(dy).max(), model, 0.0) for dy in dys]
    bounds = np.array([cast_bounds(dy, model) for dy in dys])
    check(found, kind, *bounds.T)
    scaled = [(np.exp2(f) * dy).astype("float16") for f, dy in zip(found, dys, strict=True)]
    for dy, y in zip(dys, scaled, strict=True):
        assert np.all(np.isfinite(y))
        if model == "histogram" and kind == "balanced":
            assert np.mean(y[dy != 0] == 0) <= 1e-3


@pytest.mark.parametrize("model", CAST_MODELS)
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_cast_of_equal_magnitudes(kind, model):
    dy = np.array([3e-9, -3e-9, 3e-9, -3e-9], "float32")
    found = placement(placement=kind).cast(tf.constant(dy), np.abs(dy).max(), model, 0.0)
    check([found], kind, *np.array([cast_bounds(dy, model)]).T)


def test_variable():
    """Between Theorem 1 for XᵀβW∇Y and the bound of Cauchy-Schwarz, but for ∇Y itself."""
    rng = np.random.default_rng(3)
    balanced = 0
    for decade in range(-12, 3):  # a float16 gradient is no larger
        x = rng.normal(size=(64, 5)) * 10.0 ** rng.integers(-3, 4, 5)
        dy = rng.lognormal(0.0, 2.0, (64, 7)) * 10.0**decade
        norm_x, norm_dy = (np.linalg.norm(a, axis=0).max() for a in (x, dy))
        sigma_dy = np.sqrt(np.mean(np.square(dy)))
        given = (log2(a) for a in (norm_dy, norm_x, 8.0, sigma_dy))
        scale = np.exp2(float(placement().variable(*given)))
        assert scale * np.abs(x.T @ dy).max() < FLOAT16.largest / 16
        assert scale * np.abs(dy).max() < FLOAT16.largest / 16
        # Its γ'-quantile is that of a normal distribution.
        quantile = np.sqrt(2) * special.erfinv(1e-3) * norm_x * norm_dy / np.sqrt(64)
        most = FLOAT16.largest / (norm_dy * max(norm_x, 1.0))
        wanted = np.sqrt(FLOAT16.smallest("subnormal") / quantile * most)
        # β_W∇Y stays 2^10 above the subnormals, if that leaves room for ∇W.
        wanted = max(wanted, 2.0**-4 / sigma_dy)
        wanted = min(wanted, most / 16)
        # It multiplies a float16 gradient, so that it is a float16 number itself.
        if 2.0**-24 < scale < 2.0**15:
            balanced += 1
            assert wanted / 2 * (1 - ROUNDING) < scale <= wanted * (1 + ROUNDING)
    assert balanced > 5


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_branch(kind, summed):
    rng = np.random.default_rng(4)
    place = placement(placement=kind)
    for _ in range(200):
        alphas = rng.integers(-100, 100, 3) // rng.choice([1, 10])
        maxima = np.exp2(rng.uniform(-10, 15, 3)) * (rng.uniform(size=3) > 0.2)
        if not np.any(maxima):
            continue
        found = place.branch(
            tf.constant(alphas, tf.float32), tf.constant(maxima, tf.float32), summed
        )
        common = np.exp2(float(found) + alphas.max())
        true = maxima / np.exp2(alphas)
        if kind == "threshold":
            assert common == theory.branch_scale(np.exp2(alphas), maxima, FLOAT16.largest)
            continue
        # The largest power of two that is at most max α_i and keeps the sum m bits below λ_max.
        peak = true.sum() if summed else true.max()
        limits = [FLOAT16.largest / 16 / peak * nudge for nudge in (1 - ROUNDING, 1 + ROUNDING)]
        least, most = (
            min(np.exp2(float(alphas.max())), theory.floor_power_of_two(limit)) for limit in limits
        )
        assert least <= common <= most


@pytest.mark.parametrize("ratio", [3.0, 100.0, 1e5])
def test_measured(ratio):
    """An op's result is put where a product's would be: same bounds, its own σ measured."""
    sigma = 10.0 ** np.arange(-3.0, 0.0, 0.1)
    # ∇Y stands so that multiplying it is no problem.
    max_dy = np.full(sigma.size, 1.0)
    found = placement().measured(*map(log2, (sigma, sigma * ratio, max_dy)), 0.0).numpy()
    smallest, largest = FLOAT16.smallest_subnormal, FLOAT16.largest
    lower = theory.gemm_scale(1e-3, 1, sigma, 1.0, smallest)
    upper = theory.gemm_room_scale(1, sigma, 1.0, largest)
    if ratio < 1e4:
        check(found, "balanced", lower, upper)
    assert np.all(np.exp2(found) * sigma * ratio <= largest / 16)
    # Wherever ∇Y stands, β∇Y neither overflows nor loses bits.
    max_dy = 10 ** np.linspace(-5, 4, sigma.size)
    found = placement().measured(*map(log2, (sigma, sigma * 3, max_dy)), 0.0).numpy()
    assert np.all(np.exp2(found) * max_dy <= largest)
    assert np.all(np.exp2(found) * max_dy >= 2.0**-5)


def test_an_op_that_grows_gradients_beyond_measure_does_not_overflow():
    """Even where β∇Y has to lose bits for it."""
    growth = 10.0 ** np.arange(3, 10)
    found = placement().measured(*map(log2, (growth, growth * 10, np.ones(growth.size))), 0.0)
    assert np.all(np.exp2(found) * growth * 10 <= FLOAT16.largest / 16)


def test_an_overflowed_trial_asks_for_less():
    arguments = tf.constant(np.inf), tf.constant(np.inf), log2(1.0)
    found = [float(placement().measured(*arguments, r)) for r in (0.0, 0.5, 0.75)]
    assert found[2] < found[1] < found[0] < 0


# --- In a model, in every mode -------------------------------------------------------------------


@pytest.mark.parametrize("kind", PLACEMENTS)
@pytest.mark.parametrize("model", CAST_MODELS)
def test_the_scales_of_a_layer(run, kind, model):
    """One layer's cast and product, from the loss to the registry, over twenty decades.

    The product is given no bias and an activation, so that its gradient is not cast in front of
    it but arrives in float16.
    """
    config = gs.GradScaleConfig(placement=kind, cast_model=model, update_every=1)
    with gs.policy_scope("mixed_float16"):
        inputs = keras.Input((32,))
        x = keras.layers.Dense(24, activation="relu", use_bias=False, name="dense")(inputs)
        converted = gs.convert(keras.Model(inputs, x), config)
    rng = np.random.default_rng(5)
    x = tf.constant(rng.normal(size=(64, 32)), tf.float32)
    values = rng.choice([-1, 1], (64, 24)) * rng.lognormal(0.0, 1.0, (64, 24))

    @run
    def step(dy):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = converted(x)
        return tape.gradient(y, [x, converted.trainable_variables[0]], output_gradients=dy)

    names = ("output", "dense/kernel", "dense/input")
    cast, variable, gemm = (converted.scales[name] for name in names)
    kernel = converted.get_weights()[0].astype("float64")
    casts, products, arrived = [], [], []
    for decade in range(-16, 5, 4):
        dy = (values * 10.0**decade).astype("float32")
        step(tf.constant(dy))
        casts.append((np.log2(cast.scale), *cast_bounds(dy, model)))
        assert cast.cumulative_scale == cast.scale
        # What reaches the product, as float16 rounds it.
        dz = (dy * cast.scale).astype("float16") * (converted(x).numpy() > 0)
        arrived.append(dz)
        # Near to normal, it is first multiplied by the kernel gradient's β_W.
        before = variable if model == "normal" else cast
        dz = (dz * (before.cumulative_scale / cast.cumulative_scale)).astype("float16")
        dz = dz.astype("float64")
        sigma_dy, sigma_w = (np.sqrt(np.mean(a**2)) for a in (dz, kernel))
        lower = theory.gemm_scale(1e-3, 24, sigma_dy, sigma_w, FLOAT16.smallest_subnormal)
        if kind == "balanced":
            upper = theory.gemm_room_scale(24, sigma_dy, sigma_w, FLOAT16.largest)
        else:
            largest = np.abs(dz).max(), np.abs(kernel).max()
            upper = theory.gemm_overflow_scale(24, *largest, FLOAT16.largest)
        products.append((np.log2(gemm.scale), lower, upper))
        assert gemm.cumulative_scale == gemm.scale * before.cumulative_scale
    check(*split(casts, kind))
    # Multiplied by it, the kernel stays well above float16's subnormals.
    check(*split(products, kind), floor=2.0 ** np.ceil(np.log2(2.0**-10 / sigma_w)))


@pytest.mark.parametrize("model", CAST_MODELS)
@pytest.mark.parametrize("multiplier", [1e-25, 1e-12, 1e8])
def test_every_cast_model_keeps_gradients(model, multiplier):
    """Close to float32 in layers before and behind, with a cast directly in front of a product."""

    def build():
        inputs = keras.Input((16,))
        x = keras.layers.Dense(32, activation="tanh")(inputs)
        return keras.Model(inputs, keras.layers.Dense(8)(x))

    true = build()
    with gs.policy_scope("mixed_float16"):
        ours = gs.convert(build(), gs.GradScaleConfig(cast_model=model))
    ours.set_weights(true.get_weights())
    rng = np.random.default_rng(6)
    x, y = (tf.constant(rng.normal(size=(32, n)), tf.float32) for n in (16, 8))
    found = []
    for subject in (true, ours):
        with tf.GradientTape() as tape:
            loss = multiplier * tf.reduce_mean((subject(x) - y) ** 2)
        found.append(tape.gradient(loss, subject.trainable_variables))
    for expected, gradient in zip(*found, strict=True):
        gradient, expected = (g.numpy().astype("float64") for g in (gradient, expected))
        assert np.linalg.norm(gradient - expected) < 3e-3 * np.linalg.norm(expected)
