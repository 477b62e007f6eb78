r"""The paper's equations in NumPy and float64: rates, scales, bounds and placements.

The notation is the paper's: $\alpha$ a scale that multiplies a gradient, $\gamma$ an underflow
rate, $\lambda_{min}$ and $\lambda_{max}$ the smallest and largest magnitude of the format that
stores the gradient, $N$ the accumulation length of a GEMM. A scale is dimensionless. A rate is a
fraction of the non-zero entries: Eq. 1 counts $\alpha |\nabla x| \le \lambda_{min}$ as underflow.
Rounding to nearest loses only what is at most half of that; pass half of $\lambda_{min}$ for that
rate.

Every argument broadcasts; scalars give a NumPy scalar, arrays an array.

Example:

>>> from tf_gradscale import formats
>>> float16 = formats.get("float16")
>>> gradient = {"n": 256, "sigma_dy": 1e-6, "sigma_w": 0.05}
>>> lower = gemm_scale(1e-3, **gradient, smallest=float16.smallest_subnormal)
>>> upper = gemm_room_scale(**gradient, largest=float16.largest)
>>> scale = balanced_scale(lower, upper)
>>> print(scale)
262144.0
>>> rate = gemm_underflow_rate(scale, **gradient, smallest=float16.smallest_subnormal)
>>> print(f"{rate:.1e}")
2.3e-07

Reference:
    R. Zhao, B. Vogel, T. Ahmed, W. Luk, "Reducing Underflow in Mixed Precision Training by Gradient
    Scaling", IJCAI 2020.
"""

from tf_gradscale.theory.placement import (
    balanced_scale,
    branch_scale,
    cast_overflow_scale,
    gemm_overflow_scale,
    gemm_room_scale,
    threshold_scale,
)
from tf_gradscale.theory.powers import ceil_power_of_two, floor_power_of_two
from tf_gradscale.theory.underflow import (
    gemm_scale,
    gemm_sigma,
    gemm_underflow_rate,
    lognormal_scale,
    lognormal_underflow_rate,
)

__all__ = [
    "balanced_scale",
    "branch_scale",
    "cast_overflow_scale",
    "ceil_power_of_two",
    "floor_power_of_two",
    "gemm_overflow_scale",
    "gemm_room_scale",
    "gemm_scale",
    "gemm_sigma",
    "gemm_underflow_rate",
    "lognormal_scale",
    "lognormal_underflow_rate",
    "threshold_scale",
]
