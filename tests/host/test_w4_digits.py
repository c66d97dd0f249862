"""The arithmetic of common/w4_digits.cuh, restated: tokens as fixed-point digits times integer weights."""

from __future__ import annotations

import numpy as np
import pytest

UNITS = np.float32(12582912.0)


def digits_of(x: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """As W4Scaling: [3, n] int64 and the factor that gives x back; x: float32 that bf16 holds."""
    most = np.abs(x).max()
    exponent = max(int(np.float32(most).view(np.uint32)) >> 23, 24)
    up = np.uint32((274 - exponent) << 23).view(np.float32)
    down = np.uint32((exponent - 20) << 23).view(np.float32)
    bits = (x * up + UNITS).astype(np.float32).view(np.uint32).astype(np.int64)
    top = (bits >> 14) & 0xFF
    return np.stack([bits & 0x7F, (bits >> 7) & 0x7F, np.where(top > 127, top - 256, top)]), down


def bf16(x: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 6e4, 1e38])
def test_digits_fit_their_bytes_and_give_the_token_back(scale: float) -> None:
    rng = np.random.default_rng(int(abs(np.log10(scale))))
    x = bf16((rng.standard_normal(2048) * scale).clip(-3e38, 3e38).astype(np.float32))
    digits, down = digits_of(x)
    assert digits[:2].min() >= 0
    assert digits[:2].max() <= 127
    assert digits[2].min() >= -128
    assert digits[2].max() <= 127
    q = digits[0] + 128 * digits[1] + 16384 * digits[2]
    assert np.abs(q.astype(np.float64) * down - x).max() <= np.abs(x).max() * 2.0**-21


def test_the_largest_values_stay_inside() -> None:
    for mantissa in (1.0, 1.9921875, -1.9921875, -1.0):
        digits, down = digits_of(bf16(np.full(32, mantissa * 2.0**5, np.float32)))
        q = digits[0] + 128 * digits[1] + 16384 * digits[2]
        assert q[0] * float(down) == mantissa * 2.0**5


def test_a_groups_sums_are_exact_as_floats_of_units() -> None:
    """What w4_digit_product adds up: accumulators that begin at the bits of 1.5 * 2^23 are floats of whole numbers."""
    rng = np.random.default_rng(3)
    for extreme in (None, 127, -128):
        weights = rng.integers(0, 16, (64, 32))
        digit = rng.integers(-128, 128, 32) if extreme is None else np.full(32, extreme)
        begin = 0x4B400000 - 8 * int(digit.sum())
        bits = (begin + weights @ digit).astype(np.uint32)
        assert np.array_equal(bits.view(np.float32) - UNITS, ((weights - 8) @ digit).astype(np.float32))
