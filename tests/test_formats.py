"""The table of formats against the bit patterns of each."""

import doctest
import re

import ml_dtypes
import numpy as np
import pytest

from tf_gradscale import formats

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def from_bits(bits, dtype):
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[np.dtype(dtype).itemsize]
    return float(np.asarray(bits, unsigned).view(dtype))


@pytest.mark.parametrize(
    ("name", "mantissa_bits", "min_exponent", "max_exponent"),
    [("float16", 10, -14, 15), ("bfloat16", 7, -126, 127), ("float32", 23, -126, 127)],
)
def test_format_matches_its_bit_patterns(name, mantissa_bits, min_exponent, max_exponent):
    found = formats.get(name)
    infinity = (max_exponent - min_exponent + 2) << mantissa_bits
    assert found == formats.Format(
        name=name,
        smallest_subnormal=from_bits(1, DTYPES[name]),
        smallest_normal=from_bits(1 << mantissa_bits, DTYPES[name]),
        largest=from_bits(infinity - 1, DTYPES[name]),
        mantissa_bits=mantissa_bits,
        min_exponent=min_exponent,
        max_exponent=max_exponent,
    )


@pytest.mark.parametrize("dtype", [*DTYPES.values(), ml_dtypes.float8_e4m3fn])
def test_fields_agree_with_one_another(dtype):
    found = formats.Format.of(dtype)
    assert found.smallest_normal == 2.0**found.min_exponent
    assert found.smallest_subnormal == 2.0 ** (found.min_exponent - found.mantissa_bits)
    assert 2.0**found.max_exponent <= found.largest < 2.0 ** (found.max_exponent + 1)


def test_an_eight_bit_format_needs_only_its_dtype():
    assert formats.Format.of(ml_dtypes.float8_e4m3fn) == formats.Format(
        name="float8_e4m3fn",
        smallest_subnormal=2.0**-9,
        smallest_normal=2.0**-6,
        largest=448.0,
        mantissa_bits=3,
        min_exponent=-6,
        max_exponent=8,
    )


@pytest.mark.parametrize("name", DTYPES)
def test_smallest_by_kind(name):
    found = formats.get(name)
    assert found.smallest() == found.smallest("subnormal") == found.smallest_subnormal
    assert found.smallest("normal") == found.smallest_normal


def test_format_cannot_be_changed():
    with pytest.raises(AttributeError):
        formats.get("float16").largest = 1.0


@pytest.mark.parametrize("name", ["float8", "half", "", None, ["float16"]])
def test_unknown_name_lists_the_known_ones(name):
    message = (
        "The gradient format must be one of 'float16', 'bfloat16', 'float32'. "
        f"Received: name={name!r}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        formats.get(name)


def test_unknown_kind():
    message = (
        "`kind` must be 'subnormal' or 'normal'. Choose 'subnormal' to count only what vanishes "
        "as underflow, as the paper does. Received: kind='denormal'"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        formats.get("float16").smallest("denormal")


def test_docstring_examples():
    result = doctest.testmod(formats)
    assert result.attempted > 0
    assert result.failed == 0
