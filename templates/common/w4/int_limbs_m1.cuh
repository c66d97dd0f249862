// One token times int4 weights, two k-tiles of W in one MMA. One token's limbs (int_limbs.cuh) need half of the tensor
// core's columns, so two tiles' limbs stand side by side, each beside zeros for the other's half of K.
//
// A word of W is used as it is, after a mask: rows of upper nibbles come out 16 times too large. If a lane has few
// tiles, its sums start with the correction for the weights' offset of 8 (W4PairDigits<false>). If it has many, there
// are no registers for that: then each weight's top bit is flipped and lower nibbles are shifted up (<true>), one more
// instruction a word, and all rows come out 16 times too large.
#pragma once
#include "common/w4/int8_unpack.cuh"

// A lane's operand of two tiles: limb g % 4 of the first one's columns if g < 4, else of the second one's; and the
// start values of the sums of operand columns 2 t and 2 t + 1, in rows g and g + 8.
template <bool MANY> struct W4PairDigits {
    uint32_t digits[2];  // [half of a tile's columns]
    int begin[MANY ? 1 : 4];

    // Which of the two tiles this lane's limbs belong to, and which of them its sums.
    static DEVICE bool digits_of_second() { return threadIdx.x & 16; }
    static DEVICE bool sums_of_second() { return threadIdx.x & 2; }
    static DEVICE float factor(int row) { return MANY || row % 2 ? 1.0f / 16.0f : 1.0f; }

    W4PairDigits() = default;
    // of_tile: of the lane's tile, by W4Scaling. By all lanes of a warp.
    DEVICE W4PairDigits(const uint32_t (&of_tile)[2]) : digits{of_tile[0], of_tile[1]} {
        if constexpr (!MANY) {
            const uint32_t minus_8[4] = {0xf8f8f8f8, 0x80808080, 0xf8f8f8f8, 0x80808080};  // -8, and 16 times that
#pragma unroll
            for (int i = 0; i < 4; i++) begin[i] = UNITS_BITS;
            mma_s8s8(begin, minus_8, {of_first(0), of_second(0)});
            mma_s8s8(begin, minus_8, {of_first(1), of_second(1)});
        }
    }
    DEVICE uint32_t of_first(int k) const { return digits_of_second() ? 0 : digits[k]; }
    DEVICE uint32_t of_second(int k) const { return digits_of_second() ? digits[k] : 0; }
};

// acc[r][c] += scale_r (W q)[r][c] / factor(r). words: the lane's of both tiles; scales: of rows 4 g + r, of the tile
// whose sums the lane has; c: limb columns 2 t + c.
template <bool BF16, bool MANY>
DEVICE void w4_pair_product(float (&acc)[4][2], const uint4& first, const uint4& second, const uint2& scales,
                            const W4PairDigits<MANY>& x) {
    const uint32_t w[2][4] = {{first.x, first.y, first.z, first.w}, {second.x, second.y, second.z, second.w}};
    const float2 low = Half<BF16>::unpack(scales.x), high = Half<BF16>::unpack(scales.y);
    const float by_row[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int d[4];
#pragma unroll
        for (int i = 0; i < 4; i++) d[i] = MANY ? UNITS_BITS : x.begin[MANY ? 0 : i];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const uint32_t u = w[0][2 * h + k], v = w[1][2 * h + k];
            const uint32_t b[2] = {x.of_first(k), x.of_second(k)};
            if constexpr (MANY)
                mma_s8s8(d, {sixteenfold(u << 4), sixteenfold(u), sixteenfold(v << 4), sixteenfold(v)}, b);
            else mma_u8s8(d, {u & 0x0f0f0f0f, u & 0xf0f0f0f0, v & 0x0f0f0f0f, v & 0xf0f0f0f0}, b);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float& sum = acc[2 * h + j / 2][j % 2];
            sum = fmaf(__int_as_float(d[j]) - UNITS_FLOAT, by_row[2 * h + j / 2], sum);
        }
    }
}
