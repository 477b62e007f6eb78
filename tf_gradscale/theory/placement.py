"""Overflow bounds on a scale, the choice at a branch, and where between its bounds a scale goes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tf_gradscale.theory._domain import Array, require
from tf_gradscale.theory.powers import ceil_power_of_two, floor_power_of_two
from tf_gradscale.theory.underflow import gemm_sigma


def gemm_overflow_scale(
    n: npt.ArrayLike, max_dy: npt.ArrayLike, max_w: npt.ArrayLike, largest: npt.ArrayLike
) -> Array:
    r"""Scale up to which a GEMM's result cannot overflow in any case (Algorithm 1, line 5).

    $$\frac{\lambda_{max}}{N \max|\nabla Y| \max|W|}$$

    The bound is the worst case: all $N$ products at their largest and of one sign.

    Args:
        n: $N$, the number of products summed into one element of $\nabla X$.
        max_dy: Largest magnitude of $\nabla Y$.
        max_w: Largest magnitude of $W$.
        largest: $\lambda_{max}$ of the format that stores the scaled $\nabla X$.

    Returns:
        The bound, not rounded to a power of two.

    Raises:
        ValueError: If an argument is not positive and finite.

    Example:

    >>> print(gemm_overflow_scale(n=256, max_dy=0.5, max_w=2.0, largest=65504.0))
    255.875
    """
    n, max_dy, max_w, largest = require(
        "positive and finite", n=n, max_dy=max_dy, max_w=max_w, largest=largest
    )
    return largest / (n * max_dy * max_w)


def gemm_room_scale(
    n: npt.ArrayLike,
    sigma_dy: npt.ArrayLike,
    sigma_w: npt.ArrayLike,
    largest: npt.ArrayLike,
    sigmas: npt.ArrayLike = 64.0,
) -> Array:
    r"""Scale that leaves room for a GEMM's distribution instead of for its worst case.

    $$\frac{\lambda_{max}}{k \sigma}, \quad \sigma = \sqrt{N} \, \sigma_{\nabla y} \, \sigma_w$$

    with $k$ = `sigmas` standard deviations of room. Not in the paper, whose bound
    (`gemm_overflow_scale`) is smaller by orders of magnitude where $N$ is large.

    Args:
        n: $N$, the number of products summed into one element of $\nabla X$.
        sigma_dy: Root mean square of $\nabla Y$, zeros included.
        sigma_w: Root mean square of $W$.
        largest: $\lambda_{max}$ of the format that stores the scaled $\nabla X$.
        sigmas: $k$.

    Returns:
        The bound, not rounded to a power of two.

    Raises:
        ValueError: If an argument is not positive and finite.

    Example:

    >>> print(gemm_room_scale(n=256, sigma_dy=0.125, sigma_w=0.5, largest=65504.0))
    1023.5
    """
    largest, sigmas = require("positive and finite", largest=largest, sigmas=sigmas)
    return largest / (sigmas * gemm_sigma(n, sigma_dy, sigma_w))


def cast_overflow_scale(max_dy: npt.ArrayLike, largest: npt.ArrayLike) -> Array:
    r"""Scale up to which a cast gradient does not overflow (Algorithm 1, line 10).

    $$\frac{\lambda_{max}}{\max|\nabla Y|}$$

    Args:
        max_dy: Largest magnitude of $\nabla Y$.
        largest: $\lambda_{max}$ of the format that the gradient is cast to.

    Returns:
        The bound, not rounded to a power of two.

    Raises:
        ValueError: If an argument is not positive and finite.

    Example:

    >>> print(cast_overflow_scale(max_dy=0.25, largest=65504.0))
    262016.0
    """
    max_dy, largest = require("positive and finite", max_dy=max_dy, largest=largest)
    return largest / max_dy


def branch_scale(scales: npt.ArrayLike, max_abs: npt.ArrayLike, largest: npt.ArrayLike) -> Array:
    r"""Scale to which the gradients of a branched tensor are brought (Algorithm 1, line 17).

    The largest $\beta$ of the $\alpha_j$ at hand with

    $$\beta \max|\nabla X_i| / \alpha_i < \lambda_{max} \quad \text{for all } i,$$

    and the smallest $\alpha_j$ where that holds for none of them: it multiplies every gradient by
    at most 1, so nothing overflows.

    Args:
        scales: $\alpha_i$, the scales that the gradients arrive with, along the last axis.
        max_abs: $\max|\nabla X_i|$, the largest magnitudes of the scaled gradients, in the same
            order; 0 for a gradient that is all zero.
        largest: $\lambda_{max}$ of the format that stores the gradients.

    Returns:
        $\beta$, with the last axis of `scales` gone.

    Raises:
        ValueError: If `scales` or `largest` is not positive and finite, if `max_abs` is negative,
            not finite or beyond `largest`, or if their last axes differ in length.

    Example:

    >>> print(branch_scale([2.0, 64.0, 1024.0], max_abs=[8.0, 16000.0, 2.0], largest=65504.0))
    64.0
    """
    alpha, limit = require("positive and finite", scales=scales, largest=largest)
    (magnitude,) = require("finite and at least 0", max_abs=max_abs)
    if alpha.ndim == 0 or magnitude.ndim == 0 or alpha.shape[-1] != magnitude.shape[-1]:
        raise ValueError(
            "`scales` and `max_abs` must have a last axis of one length. Pass one scale and one "
            f"magnitude for each gradient. Received: scales={alpha}, max_abs={magnitude}"
        )
    if (magnitude > limit[..., None]).any():
        raise ValueError(
            "`max_abs` must be at most `largest`. Leave out gradients that have overflowed. "
            f"Received: max_abs={magnitude}, largest={limit}"
        )
    unscaled = magnitude / alpha
    fits = alpha[..., :, None] * unscaled[..., None, :] < limit[..., None, None]
    least = alpha.min(axis=-1, keepdims=True)
    return np.where(fits.all(axis=-1), alpha, least).max(axis=-1)


def threshold_scale(lower: npt.ArrayLike, upper: npt.ArrayLike) -> Array:
    r"""The smallest power of two that keeps underflow below its threshold (the paper's placement).

    $$2^{\min(\lceil \log_2 l \rceil, \lfloor \log_2 u \rfloor)}$$

    Args:
        lower: $l$, the scale at which the underflow rate meets its threshold, as from `gemm_scale`
            or `lognormal_scale`.
        upper: $u$, the scale up to which nothing overflows. It prevails where the two conflict.

    Returns:
        The scale, a power of two.

    Raises:
        ValueError: If an argument is not positive and finite.

    Example:

    >>> print(threshold_scale(lower=59.45, upper=1023.5))
    64.0
    """
    lower, upper = require("positive and finite", lower=lower, upper=upper)
    return np.minimum(ceil_power_of_two(lower), floor_power_of_two(upper))


def balanced_scale(
    lower: npt.ArrayLike, upper: npt.ArrayLike, margin_bits: npt.ArrayLike = 4
) -> Array:
    r"""A power of two midway between the bounds, a margin below the upper one (our placement).

    $$2^{\lfloor \min(\frac{1}{2} (\log_2 l + \log_2 u), \, \log_2 u - m) \rfloor}$$

    As many binades stay free above the largest value as below the smallest that counts, so the
    scale stays good while gradients drift either way. The margin decides where the bounds conflict.
    Scaling by powers of two is exact and is undone before the update: a scale larger than the
    smallest sufficient one costs nothing but room.

    Args:
        lower: $l$, the scale at which the underflow rate meets its threshold, as from `gemm_scale`
            or `lognormal_scale`.
        upper: $u$, the scale up to which there is room, as from `gemm_room_scale` or
            `cast_overflow_scale`.
        margin_bits: $m$, binades kept free below `upper`.

    Returns:
        The scale, a power of two.

    Raises:
        ValueError: If `lower` or `upper` is not positive and finite, or `margin_bits` is negative
            or not finite.

    Example:

    >>> print(balanced_scale(lower=64.0, upper=2.0**20))
    8192.0
    >>> print(balanced_scale(lower=2.0**30, upper=2.0**20))
    65536.0
    """
    lower, upper = require("positive and finite", lower=lower, upper=upper)
    (margin_bits,) = require("finite and at least 0", margin_bits=margin_bits)
    # The geometric mean by exponents: a square root of the product could overflow.
    lower_mantissa, lower_exponent = np.frexp(lower)
    upper_mantissa, upper_exponent = np.frexp(upper)
    product_exponent = np.frexp(lower_mantissa * upper_mantissa)[1] - 1
    middle = np.ldexp(1.0, (lower_exponent + upper_exponent + product_exponent) // 2)
    return np.minimum(middle, floor_power_of_two(upper * np.exp2(-margin_bits)))
