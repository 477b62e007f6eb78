"""Domains of the arguments of `tf_gradscale.theory`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_MAGNITUDE = "Measure a tensor that is finite and not all zero."
_FROM_FORMAT = "Take it from `tf_gradscale.formats.get`."
_POSITIVE_NUMBER = "Scales and bounds multiply a gradient: pass positive numbers."
_ADVICE = {
    "n": "Pass the number of products summed into one element of the gradient.",
    "rate": "Pass a fraction of the entries, such as 1e-3.",
    "mu": "Pass the mean of ln|dy| over the non-zero entries.",
    "s": "Pass the standard deviation of ln|dy| over the non-zero entries.",
    "sigmas": "Pass the number of standard deviations to leave room for, such as 64.",
    "margin_bits": "Pass the number of binades to keep free, such as 4.",
    "smallest": _FROM_FORMAT,
    "largest": _FROM_FORMAT,
    **dict.fromkeys(("sigma_dy", "sigma_w", "max_dy", "max_w", "max_abs"), _MAGNITUDE),
    **dict.fromkeys(("scale", "scales", "lower", "upper", "x"), _POSITIVE_NUMBER),
}


def require(kind: str, **arguments: npt.ArrayLike) -> list[Array]:
    """Converts arguments to float64, in order, and raises where one leaves its domain."""
    arrays = []
    for name, value in arguments.items():
        array = np.asarray(value, np.float64)
        inside = np.isfinite(array)
        if kind == "positive and finite":
            inside &= array > 0
        elif kind == "finite and at least 0":
            inside &= array >= 0
        elif kind == "between 0 and 1, both excluded":
            inside &= (array > 0) & (array < 1)
        if not inside.all():
            raise ValueError(f"`{name}` must be {kind}. {_ADVICE[name]} Received: {name}={array}")
        arrays.append(array)
    return arrays
