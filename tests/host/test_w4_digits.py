"""The arithmetic of common/w4/int_limbs*.cuh, restated: fixed-point digits times integer weights."""

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


def two_digits_of(x: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """As W4QuadScaling: [2, n] int64 and the factor that gives x back; x: float32 that bf16 or fp16 holds."""
    most = np.float32(np.abs(x).max()).view(np.uint32)
    exponent = max(int(most + np.uint32(0x10000)) >> 23, 24)
    up = np.uint32((268 - exponent) << 23).view(np.float32)
    down = np.uint32((exponent - 14) << 23).view(np.float32)
    low, high = ((x * up + (UNITS + shift)).astype(np.float32).view(np.uint32) for shift in np.float32([0, 128]))
    digits = np.stack([low & 0xFF, high >> 8 & 0xFF]).astype(np.int64)
    return np.where(digits > 127, digits - 256, digits), down


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


@pytest.mark.parametrize("scale", [1e-30, 1.0, 6e4, 1e38])
def test_two_digits_give_the_token_back(scale: float) -> None:
    rng = np.random.default_rng(int(abs(np.log10(scale))))
    x = bf16((rng.standard_normal(2048) * scale).clip(-3e38, 3e38).astype(np.float32))
    digits, down = two_digits_of(x)
    back = (digits[0] + 256 * digits[1]).astype(np.float64) * down
    assert np.abs(back - x).max() <= np.abs(x).max() * 2.0**-15
    large = np.abs(x) >= np.abs(x).max() / 64
    assert np.array_equal(back[large], x[large].astype(np.float64)), "as exact as bf16 is"


@pytest.mark.parametrize("bits", [7, 10], ids=["bf16", "fp16"])
def test_two_digits_hold_every_largest_value(bits: int) -> None:
    """All mantissas of a largest element, of both signs: none leaves the bytes, and each comes back."""
    for mantissa in range(1 << bits):
        for sign in (1.0, -1.0):
            x = np.float32([sign * (1 + mantissa / (1 << bits)), 0.25])
            digits, down = two_digits_of(x)
            assert np.array_equal((digits[0] + 256 * digits[1]) * np.float64(down), x.astype(np.float64))


def test_sums_of_two_digits_are_exact_as_floats_of_units() -> None:
    """What w4_quad_product adds up of a tile: weights as they are and sixteenfold, digits of either sign."""
    for digit in (np.full(32, -128), np.full(32, 127), np.random.default_rng(4).integers(-128, 128, 32)):
        weights = np.concatenate([np.zeros((1, 32), np.int64), np.full((1, 32), 15), np.arange(32)[None] % 16])
        for by in (1, 16):
            begin = 0x4B400000 - 8 * by * int(digit.sum())
            bits = (begin + by * weights @ digit).astype(np.uint32)
            assert np.array_equal(bits.view(np.float32) - UNITS, (by * (weights - 8) @ digit).astype(np.float32))


def test_a_groups_sums_are_exact_as_floats_of_units() -> None:
    """What w4_pair_product adds up: accumulators that begin at the bits of 1.5 * 2^23 are floats of whole numbers."""
    rng = np.random.default_rng(3)
    for extreme in (None, 127, -128):
        weights = rng.integers(0, 16, (64, 32))
        digit = rng.integers(-128, 128, 32) if extreme is None else np.full(32, extreme)
        begin = 0x4B400000 - 8 * int(digit.sum())
        bits = (begin + weights @ digit).astype(np.uint32)
        assert np.array_equal(bits.view(np.float32) - UNITS, ((weights - 8) @ digit).astype(np.float32))
