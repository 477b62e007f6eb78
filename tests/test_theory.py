"""The paper's equations against samples, their own inverses and closed forms."""

import doctest
import re

import numpy as np
import pytest

from tf_gradscale import formats, theory
from tf_gradscale.theory import placement, powers, underflow

SAMPLES = 1_000_000
FLOAT16 = formats.get("float16")
TWELVE_DECADES = np.logspace(-6, 6, 25)


def check_rate(predicted, lost):
    """The share of lost samples is the predicted one to within 4.5 standard errors."""
    error = np.sqrt(predicted * (1 - predicted) / lost.size)
    assert abs(lost.mean() - predicted) < 4.5 * error


# --- Theorem 1 -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gemm():
    """A GEMM that meets Assumption 2: weights of one magnitude, so normal products."""
    rng = np.random.default_rng(1)
    arguments = {"n": 8, "sigma_dy": 3e-6, "sigma_w": 0.02}
    w = arguments["sigma_w"] * np.array([1, -1, -1, 1, 1, 1, -1, 1])
    dy = arguments["sigma_dy"] * rng.standard_normal((SAMPLES, arguments["n"]))
    return arguments, dy @ w


def test_gemm_sigma(gemm):
    arguments, dx = gemm
    rms = np.sqrt(np.mean(dx**2))
    assert abs(rms / theory.gemm_sigma(**arguments) - 1) < 4.5 / np.sqrt(2 * SAMPLES)


@pytest.mark.parametrize("scale", [0.25, 1.0, 32.0, 1024.0])
def test_gemm_underflow_rate(gemm, scale):
    arguments, dx = gemm
    smallest = FLOAT16.smallest_subnormal
    predicted = theory.gemm_underflow_rate(scale, **arguments, smallest=smallest)
    check_rate(predicted, scale * np.abs(dx) <= smallest)


@pytest.mark.parametrize("scale", [0.25, 1.0, 32.0, 1024.0])
def test_rounding_to_nearest_loses_up_to_half_the_smallest(gemm, scale):
    arguments, dx = gemm
    half = FLOAT16.smallest_subnormal / 2
    predicted = theory.gemm_underflow_rate(scale, **arguments, smallest=half)
    check_rate(predicted, (scale * dx).astype(np.float16) == 0)


def test_gemm_scale_inverts_the_rate():
    arguments = {"n": 576, "sigma_dy": 1e-6, "sigma_w": 0.05, "smallest": 2.0**-24}
    rates = 0.5 * np.logspace(-12, 0, 25)
    scales = theory.gemm_scale(rates, **arguments)
    np.testing.assert_allclose(theory.gemm_underflow_rate(scales, **arguments), rates, rtol=1e-13)
    assert np.all(np.diff(scales) < 0)


@pytest.mark.parametrize("name", ["n", "sigma_dy", "sigma_w", "smallest"])
def test_gemm_scale_over_twelve_decades_of(name):
    arguments = {"n": 576, "sigma_dy": 1e-6, "sigma_w": 0.05, "smallest": 2.0**-24}
    arguments[name] *= TWELVE_DECADES
    scale = theory.gemm_scale(1e-3, **arguments)
    np.testing.assert_allclose(theory.gemm_underflow_rate(scale, **arguments), 1e-3, rtol=1e-13)


def test_gemm_scale_of_the_usual_threshold():
    # erf(x) = 2x/√π to first order, so the scale is λ / (√2 σ · √π/2 · γ').
    sigma = theory.gemm_sigma(1, 1e-3, 1.0)
    scale = theory.gemm_scale(1e-3, 1, 1e-3, 1.0, smallest=2.0**-24)
    np.testing.assert_allclose(scale, 2.0**-24 * np.sqrt(2 / np.pi) / sigma / 1e-3, rtol=1e-6)


# --- Theorem 2 -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lognormal():
    rng = np.random.default_rng(2)
    mu, s = -19.0, 3.0
    signs = rng.choice([-1.0, 1.0], SAMPLES)
    return {"mu": mu, "s": s}, signs * rng.lognormal(mu, s, SAMPLES)


@pytest.mark.parametrize("scale", [0.25, 1.0, 256.0, 65536.0])
@pytest.mark.parametrize("kind", ["subnormal", "normal"])
def test_lognormal_underflow_rate(lognormal, scale, kind):
    arguments, dy = lognormal
    smallest = FLOAT16.smallest(kind)
    predicted = theory.lognormal_underflow_rate(scale, **arguments, smallest=smallest)
    check_rate(predicted, scale * np.abs(dy) <= smallest)


def test_lognormal_scale_inverts_the_rate():
    arguments = {"mu": -20.0, "s": 4.0, "smallest": 2.0**-24}
    rates = 0.999 * np.logspace(-12, 0, 25)
    scales = theory.lognormal_scale(rates, **arguments)
    found = theory.lognormal_underflow_rate(scales, **arguments)
    np.testing.assert_allclose(found, rates, rtol=1e-12)
    assert np.all(np.diff(scales) < 0)


@pytest.mark.parametrize("name", ["magnitude", "s", "smallest"])
def test_lognormal_scale_over_twelve_decades_of(name):
    arguments = {"mu": -20.0, "s": 4.0, "smallest": 2.0**-24}
    if name == "magnitude":
        arguments["mu"] += np.log(TWELVE_DECADES)
    elif name == "s":
        # From equal magnitudes to as wide as float64 can still hold.
        arguments["s"] *= TWELVE_DECADES / 1e5
    else:
        arguments["smallest"] *= TWELVE_DECADES
    scale = theory.lognormal_scale(1e-3, **arguments)
    # The rate sees ln α over s: its rounding error grows as s shrinks.
    rtol = 1e-12 / np.min(np.minimum(arguments["s"], 1.0))
    found = theory.lognormal_underflow_rate(scale, **arguments)
    np.testing.assert_allclose(found, 1e-3, rtol=rtol)


def test_lognormal_scale_at_the_median():
    scale = theory.lognormal_scale(0.5, mu=np.log(1e-6), s=3.0, smallest=1e-3)
    np.testing.assert_allclose(scale, 1e3)


def test_lognormal_scale_of_equal_magnitudes_lifts_them_to_the_smallest():
    scale = theory.lognormal_scale(1e-3, mu=np.log(2.0**-30), s=0.0, smallest=2.0**-24)
    np.testing.assert_allclose(scale, 64.0)


# --- Bounds --------------------------------------------------------------------------------------


def test_gemm_overflow_scale_is_met_by_the_worst_case():
    dy, w = np.full((3, 32), -0.75), np.full((32, 5), 6.0)
    scale = theory.gemm_overflow_scale(32, 0.75, 6.0, FLOAT16.largest)
    np.testing.assert_allclose(scale * np.abs(dy @ w), FLOAT16.largest)


@pytest.mark.parametrize("sigmas", [None, 64.0, 8.0])
def test_gemm_room_scale_leaves_so_many_sigmas(sigmas):
    given = {} if sigmas is None else {"sigmas": sigmas}
    scale = theory.gemm_room_scale(100, 0.02, 3.0, FLOAT16.largest, **given)
    np.testing.assert_allclose(scale * 0.6 * (sigmas or 64.0), FLOAT16.largest)


def test_cast_overflow_scale():
    assert theory.cast_overflow_scale(0.5, 65504.0) == 131008.0


def test_arguments_broadcast():
    n, rate = np.array([[9], [64]]), np.array([1e-4, 1e-3, 1e-2])
    scales = theory.gemm_scale(rate, n, 1e-3, 0.1, FLOAT16.smallest_subnormal)
    assert scales.shape == (2, 3)
    assert scales[1, 2] == theory.gemm_scale(1e-2, 64, 1e-3, 0.1, FLOAT16.smallest_subnormal)
    scales = theory.lognormal_scale(rate, n, 2.0, FLOAT16.smallest_subnormal)
    assert scales.shape == (2, 3)
    assert theory.balanced_scale(rate, n).shape == (2, 3)
    assert theory.threshold_scale(rate, n).shape == (2, 3)


# --- Branch --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scales", "max_abs", "expected"),
    [
        # Room for the largest.
        ([2.0, 64.0, 1024.0], [8.0, 16.0, 2.0], 1024.0),
        # 1024 · 16000 / 64 overflows; 64 · 8 / 2 does not.
        ([2.0, 64.0, 1024.0], [8.0, 16000.0, 2.0], 64.0),
        # Only the smallest is left.
        ([2.0, 64.0, 1024.0], [65000.0, 1.0, 1.0], 2.0),
        # Not even the smallest stays strictly below, but it cannot overflow.
        ([2.0, 64.0], [65504.0, 65504.0], 2.0),
        # A gradient that is all zero does not limit the others.
        ([2.0, 64.0], [0.0, 3.0], 64.0),
        # Strictly below: 16 · 32752 / 8 is λ_max itself.
        ([8.0, 16.0], [32752.0, 1.0], 8.0),
        ([8.0, 16.0], [32736.0, 1.0], 16.0),
        ([0.5], [1.0], 0.5),
    ],
)
def test_branch_scale(scales, max_abs, expected):
    assert theory.branch_scale(scales, max_abs, FLOAT16.largest) == expected


def test_branch_scale_is_the_largest_that_fits():
    rng = np.random.default_rng(3)
    scales = np.exp2(rng.integers(-12, 12, (2000, 4)))
    max_abs = np.exp2(rng.uniform(-10, 15.9, (2000, 4)))
    found = theory.branch_scale(scales, max_abs, FLOAT16.largest)
    assert found.shape == (2000,)
    for alpha, magnitude, beta in zip(scales, max_abs, found, strict=True):
        fitting = [a for a in alpha if np.all(a * magnitude / alpha < FLOAT16.largest)]
        assert beta == max(fitting)


def test_branch_scale_broadcasts():
    found = theory.branch_scale([1.0, 16.0], [[1.0, 1.0], [9000.0, 1.0]], [65504.0, 1e6])
    np.testing.assert_array_equal(found, [16.0, 16.0])
    found = theory.branch_scale([1.0, 16.0], [9000.0, 1.0], [65504.0, 1e6])
    np.testing.assert_array_equal(found, [1.0, 16.0])


# --- Placements ----------------------------------------------------------------------------------

EXPONENTS = np.arange(-60, 61)


def test_threshold_scale_on_powers_is_the_smaller_bound():
    lower, upper = EXPONENTS[:, None], EXPONENTS[None, :]
    found = theory.threshold_scale(np.exp2(lower), np.exp2(upper))
    np.testing.assert_array_equal(found, np.exp2(np.minimum(lower, upper)))


def test_threshold_scale_rounds_lower_up_and_upper_down():
    assert theory.threshold_scale(59.45, 1e4) == 64.0
    assert theory.threshold_scale(64.01, 1e4) == 128.0
    assert theory.threshold_scale(59.45, 63.9) == 32.0
    assert theory.threshold_scale(1e9, 0.7) == 0.5


@pytest.mark.parametrize("margin_bits", [0, 1, 4, 7])
def test_balanced_scale_on_powers(margin_bits):
    lower, upper = EXPONENTS[:, None], EXPONENTS[None, :]
    found = theory.balanced_scale(np.exp2(lower), np.exp2(upper), margin_bits)
    expected = np.exp2(np.minimum((lower + upper) // 2, upper - margin_bits))
    np.testing.assert_array_equal(found, expected)


def test_balanced_scale_matches_its_formula():
    rng = np.random.default_rng(4)
    lower, upper = np.exp2(rng.uniform(-60, 60, (2, 10_000)))
    log2_lower, log2_upper = np.log2(lower), np.log2(upper)
    found = theory.balanced_scale(lower, upper)
    expected = np.exp2(np.floor(np.minimum((log2_lower + log2_upper) / 2, log2_upper - 4)))
    np.testing.assert_array_equal(found, expected)


def test_balanced_scale_does_not_overflow_on_the_way():
    assert theory.balanced_scale(2.0**900, 2.0**1000) == 2.0**950
    assert theory.balanced_scale(2.0**-1000, 2.0**-900) == 2.0**-950


def test_balanced_scale_puts_a_float16_gradient_well_inside_the_range():
    arguments = {"n": 576, "sigma_dy": 1e-7, "sigma_w": 0.03}
    lower = theory.gemm_scale(1e-3, **arguments, smallest=FLOAT16.smallest_subnormal)
    upper = theory.gemm_room_scale(**arguments, largest=FLOAT16.largest)
    placed = theory.balanced_scale(lower, upper) * theory.gemm_sigma(**arguments)
    # √(4.8e-5 · 1023.5) = 0.22, rounded down by less than a factor of two.
    assert 0.11 < placed <= 0.222
    smallest_sufficient = theory.threshold_scale(lower, upper) * theory.gemm_sigma(**arguments)
    assert 4.7e-5 < smallest_sufficient < 9.6e-5


# --- Powers of two -------------------------------------------------------------------------------


def test_rounding_keeps_every_power_of_float32():
    exact = np.ldexp(np.float32(1.0), np.arange(-126, 128))
    assert exact.size == 254 and exact.dtype == np.float32
    np.testing.assert_array_equal(theory.floor_power_of_two(exact), exact)
    np.testing.assert_array_equal(theory.ceil_power_of_two(exact), exact)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_next_to_every_power_of_float32(dtype):
    exact = np.ldexp(dtype(1.0), np.arange(-125, 128))
    above = np.nextafter(exact, dtype(np.inf))
    below = np.nextafter(exact, dtype(0))
    np.testing.assert_array_equal(theory.floor_power_of_two(above), exact)
    np.testing.assert_array_equal(theory.ceil_power_of_two(above), 2.0 * exact.astype(np.float64))
    np.testing.assert_array_equal(theory.floor_power_of_two(below), exact / 2)
    np.testing.assert_array_equal(theory.ceil_power_of_two(below), exact)


# --- Errors --------------------------------------------------------------------------------------

VALID = {
    "gemm_sigma": {"n": 9, "sigma_dy": 1.0, "sigma_w": 1.0},
    "gemm_underflow_rate": {
        "scale": 1.0,
        "n": 9,
        "sigma_dy": 1.0,
        "sigma_w": 1.0,
        "smallest": 1e-7,
    },
    "gemm_scale": {"rate": 0.1, "n": 9, "sigma_dy": 1.0, "sigma_w": 1.0, "smallest": 1e-7},
    "lognormal_underflow_rate": {"scale": 1.0, "mu": 0.0, "s": 1.0, "smallest": 1e-7},
    "lognormal_scale": {"rate": 0.1, "mu": 0.0, "s": 1.0, "smallest": 1e-7},
    "gemm_overflow_scale": {"n": 9, "max_dy": 1.0, "max_w": 1.0, "largest": 65504.0},
    "gemm_room_scale": {
        "n": 9,
        "sigma_dy": 1.0,
        "sigma_w": 1.0,
        "largest": 65504.0,
        "sigmas": 64.0,
    },
    "cast_overflow_scale": {"max_dy": 1.0, "largest": 65504.0},
    "branch_scale": {"scales": [1.0, 2.0], "max_abs": [1.0, 1.0], "largest": 65504.0},
    "threshold_scale": {"lower": 1.0, "upper": 2.0},
    "balanced_scale": {"lower": 1.0, "upper": 2.0, "margin_bits": 4},
    "floor_power_of_two": {"x": 1.0},
    "ceil_power_of_two": {"x": 1.0},
}
MAGNITUDE = "Measure a tensor that is finite and not all zero."
POSITIVE = "Scales and bounds multiply a gradient: pass positive numbers."
FROM_FORMAT = "Take it from `tf_gradscale.formats.get`."
ADVICE = {
    "scale": POSITIVE,
    "scales": POSITIVE,
    "lower": POSITIVE,
    "upper": POSITIVE,
    "x": POSITIVE,
    "n": "Pass the number of products summed into one element of the gradient.",
    "sigma_dy": MAGNITUDE,
    "sigma_w": MAGNITUDE,
    "max_dy": MAGNITUDE,
    "max_w": MAGNITUDE,
    "max_abs": MAGNITUDE,
    "smallest": FROM_FORMAT,
    "largest": FROM_FORMAT,
    "rate": "Pass a fraction of the entries, such as 1e-3.",
    "mu": "Pass the mean of ln|dy| over the non-zero entries.",
    "s": "Pass the standard deviation of ln|dy| over the non-zero entries.",
    "sigmas": "Pass the number of standard deviations to leave room for, such as 64.",
    "margin_bits": "Pass the number of binades to keep free, such as 4.",
}
MAY_BE_ZERO = {("branch_scale", "max_abs"), ("balanced_scale", "margin_bits")} | {
    ("lognormal_scale", "s")
}


def domain(function, name):
    if name == "mu":
        return "finite", [np.nan, -np.inf]
    if name == "rate":
        return "between 0 and 1, both excluded", [0.0, 1.0, -0.1, 1.5, np.nan]
    if (function, name) in MAY_BE_ZERO:
        return "finite and at least 0", [-1.0, np.nan, np.inf]
    return "positive and finite", [0.0, -1.0, np.nan, np.inf]


@pytest.mark.parametrize(
    ("function", "name"), [(function, name) for function in VALID for name in VALID[function]]
)
def test_outside_the_domain(function, name):
    kind, values = domain(function, name)
    call = getattr(theory, function)
    call(**VALID[function])
    for value in values:
        if isinstance(VALID[function][name], list):
            value = np.array([1.0, value])
        message = f"`{name}` must be {kind}. {ADVICE[name]} Received: {name}={np.asarray(value)}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            call(**{**VALID[function], name: value})


def test_every_function_has_its_errors_tested():
    assert set(VALID) == set(theory.__all__)


def test_one_bad_element_is_enough():
    with pytest.raises(ValueError, match="`sigma_dy` must be positive and finite"):
        theory.gemm_sigma(9, np.array([1.0, 0.0]), 1.0)


@pytest.mark.parametrize(
    ("scales", "max_abs"), [([1.0, 2.0], [1.0]), (1.0, [1.0]), ([1.0], 1.0), ([[1.0]], [1.0, 2.0])]
)
def test_branch_needs_a_magnitude_for_each_scale(scales, max_abs):
    scales, max_abs = np.array(scales), np.array(max_abs)
    message = (
        "`scales` and `max_abs` must have a last axis of one length. Pass one scale and one "
        f"magnitude for each gradient. Received: scales={scales}, max_abs={max_abs}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        theory.branch_scale(scales, max_abs, 65504.0)


def test_branch_refuses_gradients_beyond_the_format():
    message = (
        "`max_abs` must be at most `largest`. Leave out gradients that have overflowed. "
        "Received: max_abs=[1.e+00 7.e+04], largest=65504.0"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        theory.branch_scale([1.0, 2.0], [1.0, 70000.0], 65504.0)


# --- Examples ------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [theory, placement, powers, underflow])
def test_docstring_examples(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
