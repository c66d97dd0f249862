// Four tokens times int4 weights, one tile of W in one MMA: two 8-bit limbs of each token are the eight columns of the
// tensor core's B operand.
//
// A warp scales its columns of a token by a power of two, so that the largest is below 2^15, and rounds: q = d0 + 2^8
// d1, both in -128 .. 127. bf16 values from a hundredth of the largest on are exact; no element is off by more than
// 2^-15 of the largest.
//
// Words of W are used as in int_limbs_m1.cuh: after a mask, or with the weights' top bits flipped.
#pragma once
#include "common/w4/int8_unpack.cuh"

// A lane's operand of a tile: limb g % 2 of token g / 2; and the start values of token t's sums, of both limbs in rows
// g and g + 8.
template <bool MANY> struct W4QuadDigits {
    uint32_t digits[2];  // [half of the tile's columns]
    int begin[MANY ? 1 : 4];

    static DEVICE float factor(int row) { return MANY || row % 2 ? 1.0f / 16.0f : 1.0f; }
};

template <bool BF16> struct W4QuadScaling {
    float up, down;  // q = x * up, x = q * down

    // most: the largest |x| of the warp's columns of the token of this lane; below 2^-103 its digits become coarse. A token
    // with an infinity or a NaN among them becomes all NaN.
    DEVICE explicit W4QuadScaling(float most) {
        const uint32_t bits = __float_as_uint(most);
        // the last 128th below a power of two counts as that power: q + 128 stays below 2^15
        const int exponent = max(int((bits + 0x10000u) >> 23), 24);
        up = __uint_as_float(uint32_t(268 - exponent) << 23);
        down = __uint_as_float(bits >= 0x7f800000u ? 0x7fc00000u : uint32_t(exponent - 14) << 23);
    }
    // x: columns 2 t, 2 t + 1 of each 8 of a tile. By all lanes of a warp.
    template <bool MANY> DEVICE void put(W4QuadDigits<MANY>& to, const uint32_t (&x)[4]) const {
        const bool upper = threadIdx.x & 4;
        const float units = UNITS_FLOAT + (upper ? 128.0f : 0.0f);
        const uint32_t pick = upper ? 0x0051 : 0x0040;  // the second bytes, or the first
        uint32_t bits[4][2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 v = Half<BF16>::unpack(x[i]);
            bits[i][0] = __float_as_uint(fmaf(v.x, up, units));
            bits[i][1] = __float_as_uint(fmaf(v.y, up, units));
        }
        // in the order of a word's nibbles 0, 2, 4, 6 (common/w4/pack.py)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t first = __byte_perm(bits[2 * i][0], bits[2 * i + 1][0], pick);
            to.digits[i] = __byte_perm(first, __byte_perm(bits[2 * i][1], bits[2 * i + 1][1], pick), 0x5410);
        }
        if constexpr (!MANY) {
            const uint32_t minus_8[4] = {0xf8f8f8f8, 0x80808080, 0xf8f8f8f8, 0x80808080};  // -8, and 16 times that
#pragma unroll
            for (int i = 0; i < 4; i++) to.begin[i] = UNITS_BITS;
            mma_s8s8(to.begin, minus_8, to.digits);
        }
    }
};

// acc[r][c] += scale_r (W q)[r][c] / factor(r). words: the lane's; scales: of rows 4 g + r; c: the digits of token t.
template <bool BF16, bool MANY>
DEVICE void w4_quad_product(float (&acc)[4][2], const uint4& words, const uint2& scales, const W4QuadDigits<MANY>& x) {
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
    const float2 low = Half<BF16>::unpack(scales.x), high = Half<BF16>::unpack(scales.y);
    const float by_row[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t u = w[2 * h], v = w[2 * h + 1];
        int d[4];
#pragma unroll
        for (int i = 0; i < 4; i++) d[i] = MANY ? UNITS_BITS : x.begin[MANY ? 0 : i];
        if constexpr (MANY)
            mma_s8s8(d, {sixteenfold(u << 4), sixteenfold(u), sixteenfold(v << 4), sixteenfold(v)}, x.digits);
        else
            mma_u8s8(d, {u & 0x0f0f0f0f, u & 0xf0f0f0f0, v & 0x0f0f0f0f, v & 0xf0f0f0f0}, x.digits);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float& sum = acc[2 * h + j / 2][j % 2];
            sum = fmaf(__int_as_float(d[j]) - UNITS_FLOAT, by_row[2 * h + j / 2], sum);
        }
    }
}
