"""Underflow rates of a scaled gradient (Theorems 1 and 2) and their inverses."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import special

from tf_gradscale.theory._domain import Array, require


def gemm_sigma(n: npt.ArrayLike, sigma_dy: npt.ArrayLike, sigma_w: npt.ArrayLike) -> Array:
    r"""Root mean square of the gradient that a GEMM produces (Lemma 1, Eq. 2).

    $$\sigma = \sqrt{N} \, \sigma_{\nabla y} \, \sigma_w$$

    Args:
        n: $N$, the number of products summed into one element of $\nabla X$.
        sigma_dy: Root mean square of $\nabla Y$, zeros included.
        sigma_w: Root mean square of $W$.

    Returns:
        $\sigma$, the standard deviation of the normal $\nabla x$.

    Raises:
        ValueError: If an argument is not positive and finite.

    Example:

    >>> print(gemm_sigma(n=256, sigma_dy=1e-3, sigma_w=0.5))
    0.008
    """
    n, sigma_dy, sigma_w = require("positive and finite", n=n, sigma_dy=sigma_dy, sigma_w=sigma_w)
    return np.sqrt(n) * sigma_dy * sigma_w


def gemm_underflow_rate(
    scale: npt.ArrayLike,
    n: npt.ArrayLike,
    sigma_dy: npt.ArrayLike,
    sigma_w: npt.ArrayLike,
    smallest: npt.ArrayLike,
) -> Array:
    r"""Underflow rate of a GEMM's result under a scale (Theorem 1, Eq. 3).

    $$\gamma(\alpha) = \mathrm{erf}\left(
        \frac{\lambda_{min}}{\sqrt{2} \, \alpha \sqrt{N} \, \sigma_{\nabla y} \, \sigma_w}\right)$$

    Args:
        scale: $\alpha$.
        n: $N$, the number of products summed into one element of $\nabla X$.
        sigma_dy: Root mean square of $\nabla Y$, zeros included.
        sigma_w: Root mean square of $W$.
        smallest: $\lambda_{min}$ of the format that stores $\alpha \nabla X$.

    Returns:
        The fraction of entries with $\alpha |\nabla x| \le \lambda_{min}$.

    Raises:
        ValueError: If an argument is not positive and finite.

    Example:

    >>> rate = gemm_underflow_rate(1.0, n=256, sigma_dy=1e-6, sigma_w=0.05, smallest=2.0**-24)
    >>> print(f"{rate:.4f}")
    0.0594
    """
    scale, smallest = require("positive and finite", scale=scale, smallest=smallest)
    return special.erf(smallest / (np.sqrt(2) * scale * gemm_sigma(n, sigma_dy, sigma_w)))


def gemm_scale(
    rate: npt.ArrayLike,
    n: npt.ArrayLike,
    sigma_dy: npt.ArrayLike,
    sigma_w: npt.ArrayLike,
    smallest: npt.ArrayLike,
) -> Array:
    r"""Smallest scale at which a GEMM's underflow rate is at most a given one (Theorem 1).

    $$\alpha = \frac{\lambda_{min}}{\sqrt{2} \, \sqrt{N} \, \sigma_{\nabla y} \, \sigma_w \,
        \mathrm{erf}^{-1}(\gamma')}$$

    the inverse of `gemm_underflow_rate`.

    Args:
        rate: $\gamma'$, the rate to stay at or below.
        n: $N$, the number of products summed into one element of $\nabla X$.
        sigma_dy: Root mean square of $\nabla Y$, zeros included.
        sigma_w: Root mean square of $W$.
        smallest: $\lambda_{min}$ of the format that stores $\alpha \nabla X$.

    Returns:
        The scale, not rounded to a power of two.

    Raises:
        ValueError: If `rate` is not between 0 and 1, or another argument is not positive and
            finite.

    Example:

    >>> scale = gemm_scale(1e-3, n=256, sigma_dy=1e-6, sigma_w=0.05, smallest=2.0**-24)
    >>> print(f"{scale:.2f}")
    59.45
    """
    (rate,) = require("between 0 and 1, both excluded", rate=rate)
    (smallest,) = require("positive and finite", smallest=smallest)
    return smallest / (np.sqrt(2) * gemm_sigma(n, sigma_dy, sigma_w) * special.erfinv(rate))


def lognormal_underflow_rate(
    scale: npt.ArrayLike, mu: npt.ArrayLike, s: npt.ArrayLike, smallest: npt.ArrayLike
) -> Array:
    r"""Underflow rate of a log-normal gradient under a scale (Theorem 2, Eq. 4).

    $$\gamma(\alpha) = \frac{1}{2} \left[1 + \mathrm{erf}\left(
        \frac{\ln \lambda_{min} - \mu - \ln \alpha}{\sqrt{2} \, s}\right)\right]$$

    Args:
        scale: $\alpha$.
        mu: Mean of $\ln |\nabla y|$ over the non-zero entries.
        s: Standard deviation of $\ln |\nabla y|$ over the non-zero entries.
        smallest: $\lambda_{min}$ of the format that stores $\alpha \nabla Y$.

    Returns:
        The fraction of non-zero entries with $\alpha |\nabla y| \le \lambda_{min}$.

    Raises:
        ValueError: If `mu` is not finite, or another argument is not positive and finite.

    Example:

    >>> rate = lognormal_underflow_rate(1.0, mu=-20.0, s=4.0, smallest=2.0**-24)
    >>> print(f"{rate:.4f}")
    0.7999
    """
    scale, s, smallest = require("positive and finite", scale=scale, s=s, smallest=smallest)
    (mu,) = require("finite", mu=mu)
    # The normal distribution function is ½[1 + erf(z/√2)] without its cancellation at small rates.
    return special.ndtr((np.log(smallest) - mu - np.log(scale)) / s)


def lognormal_scale(
    rate: npt.ArrayLike, mu: npt.ArrayLike, s: npt.ArrayLike, smallest: npt.ArrayLike
) -> Array:
    r"""Smallest scale at which a log-normal underflow rate is at most a given one (Theorem 2).

    $$\alpha = \exp\left(\ln \lambda_{min} - \mu - s \sqrt{2} \,
        \mathrm{erf}^{-1}(2\gamma' - 1)\right)$$

    the inverse of `lognormal_underflow_rate`.

    Args:
        rate: $\gamma'$, the rate to stay at or below.
        mu: Mean of $\ln |\nabla y|$ over the non-zero entries.
        s: Standard deviation of $\ln |\nabla y|$ over the non-zero entries; 0 where all magnitudes
            are equal.
        smallest: $\lambda_{min}$ of the format that stores $\alpha \nabla Y$.

    Returns:
        The scale, not rounded to a power of two.

    Raises:
        ValueError: If `rate` is not between 0 and 1, `mu` is not finite, `s` is negative or not
            finite, or `smallest` is not positive and finite.

    Example:

    >>> scale = lognormal_scale(1e-3, mu=-20.0, s=4.0, smallest=2.0**-24)
    >>> print(f"{scale:.3g}")
    6.75e+06
    """
    (rate,) = require("between 0 and 1, both excluded", rate=rate)
    (mu,) = require("finite", mu=mu)
    (s,) = require("finite and at least 0", s=s)
    (smallest,) = require("positive and finite", smallest=smallest)
    # √2·erf⁻¹(2γ' − 1) is the normal quantile of γ', which loses nothing at small rates.
    return np.exp(np.log(smallest) - mu - s * special.ndtri(rate))
