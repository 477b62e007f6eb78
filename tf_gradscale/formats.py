"""Ranges of the number formats in which gradients are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Format:
    r"""Range and precision of a binary floating-point format.

    The magnitudes a format represents lie in $[\lambda_{min}, \lambda_{max}]$. With exponents
    $e_{min}$ (`min_exponent`) and $e_{max}$ (`max_exponent`) and $m$ stored mantissa bits, the
    smallest normal number is $2^{e_{min}}$, the smallest subnormal $2^{e_{min} - m}$, and the
    largest number lies in $[2^{e_{max}}, 2^{e_{max} + 1})$.

    Args:
        name: Name of the dtype, as Keras and TensorFlow spell it.
        smallest_subnormal: $\lambda_{min}$, the smallest positive magnitude.
        smallest_normal: Smallest magnitude that has all mantissa bits.
        largest: $\lambda_{max}$, the largest finite magnitude.
        mantissa_bits: Stored mantissa bits, without the leading one.
        min_exponent: Exponent of the smallest normal number.
        max_exponent: Exponent of the largest number.

    Example:

    >>> import numpy as np
    >>> Format.of(np.float16).largest
    65504.0

    Reference:
        R. Zhao, B. Vogel, T. Ahmed, W. Luk, "Reducing Underflow in Mixed Precision Training by
        Gradient Scaling", IJCAI 2020, section 3.
    """

    name: str
    smallest_subnormal: float
    smallest_normal: float
    largest: float
    mantissa_bits: int
    min_exponent: int
    max_exponent: int

    @classmethod
    def of(cls, dtype: npt.DTypeLike) -> Format:
        """Reads a format off a dtype of NumPy or ml_dtypes.

        Args:
            dtype: A floating-point dtype, such as `np.float16` or `ml_dtypes.float8_e4m3fn`.

        Returns:
            The `Format` of that dtype.

        Example:

        >>> import ml_dtypes
        >>> Format.of(ml_dtypes.float8_e4m3fn).largest
        448.0
        """
        info = ml_dtypes.finfo(dtype)
        return cls(
            name=np.dtype(dtype).name,
            smallest_subnormal=float(info.smallest_subnormal),
            smallest_normal=float(info.smallest_normal),
            largest=float(info.max),
            mantissa_bits=int(info.nmant),
            min_exponent=int(info.minexp),
            # `maxexp` is the first exponent out of range, as in C.
            max_exponent=int(info.maxexp) - 1,
        )

    def smallest(self, kind: Literal["subnormal", "normal"] = "subnormal") -> float:
        r"""Smallest magnitude that counts as represented, the $\lambda$ of Eq. 1.

        Args:
            kind: "subnormal" for the smallest positive number, as in the paper; "normal" for the
                smallest one that keeps the full precision, which also suits hardware that flushes
                subnormals to zero.

        Returns:
            The magnitude, a power of two.

        Raises:
            ValueError: If `kind` is neither of the two.

        Example:

        >>> get("float16").smallest("subnormal") == 2.0**-24
        True
        >>> get("float16").smallest("normal") == 2.0**-14
        True
        """
        if kind == "subnormal":
            return self.smallest_subnormal
        if kind == "normal":
            return self.smallest_normal
        raise ValueError(
            "`kind` must be 'subnormal' or 'normal'. Choose 'subnormal' to count only what "
            f"vanishes as underflow, as the paper does. Received: kind={kind!r}"
        )


# A format of 8 bits is one more line here: its dtype.
_FORMATS = {
    known.name: known
    for known in map(
        Format.of,
        (
            np.float16,
            ml_dtypes.bfloat16,
            np.float32,
        ),
    )
}

# The names that `get` knows.
NAMES = tuple(_FORMATS)


def get(name: str) -> Format:
    """Looks up a gradient format by name.

    Args:
        name: "float16", "bfloat16" or "float32".

    Returns:
        The `Format` of that name.

    Raises:
        ValueError: If there is no format of that name.

    Example:

    >>> get("bfloat16").mantissa_bits
    7
    """
    if isinstance(name, str) and name in _FORMATS:
        return _FORMATS[name]
    known = ", ".join(repr(format_name) for format_name in _FORMATS)
    raise ValueError(f"The gradient format must be one of {known}. Received: name={name!r}")
