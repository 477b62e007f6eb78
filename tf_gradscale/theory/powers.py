"""Rounding to powers of two by exponent."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tf_gradscale.theory._domain import Array, require


def floor_power_of_two(x: npt.ArrayLike) -> Array:
    r"""The largest power of two at or below a number, $2^{\lfloor \log_2 x \rfloor}$.

    Read off the exponent bits: a rounded logarithm is wrong next to some exact powers.

    Args:
        x: Positive numbers.

    Returns:
        A power of two for each.

    Raises:
        ValueError: If `x` is not positive and finite.

    Example:

    >>> print(floor_power_of_two([0.3, 4.0, 7.9]))
    [0.25 4.   4.  ]
    """
    (x,) = require("positive and finite", x=x)
    return np.ldexp(1.0, np.frexp(x)[1] - 1)


def ceil_power_of_two(x: npt.ArrayLike) -> Array:
    r"""The smallest power of two at or above a number, $2^{\lceil \log_2 x \rceil}$.

    Args:
        x: Positive numbers.

    Returns:
        A power of two for each.

    Raises:
        ValueError: If `x` is not positive and finite.

    Example:

    >>> print(ceil_power_of_two([0.3, 4.0, 7.9]))
    [0.5 4.  8. ]
    """
    (x,) = require("positive and finite", x=x)
    mantissa, exponent = np.frexp(x)
    # frexp's mantissa lies in [½, 1): it is ½ on exact powers alone.
    return np.ldexp(1.0, exponent - (mantissa == 0.5))
