// One token times int4 weights, two tiles of W a product: the digits of one token (w4_digits.cuh) take half of the tensor
// core's columns, so those of two tiles' columns stand side by side, each beside zeros for the other's half of K.
//
// A word of W goes in as it is, but for a mask: the rows of its upper nibbles come out 16 times too large.
#pragma once
#include "common/w4_digits.cuh"

// What a lane keeps of two tiles: digit g % 4 of the first one's columns where g < 4, else of the second one's; and what
// the sums of columns 2 t and 2 t + 1 of the operand begin with, in rows g and g + 8: the weights come with 8 added.
struct W4PairDigits {
    uint32_t b[2][2];  // [half of a tile's columns]: of the first tile, of the second
    int begin[4] = {UNITS_BITS, UNITS_BITS, UNITS_BITS, UNITS_BITS};

    // Which of the two tiles' digits are the lane's, and which of the two tiles' sums.
    static DEVICE bool digits_of_second() { return threadIdx.x & 16; }
    static DEVICE bool sums_of_second() { return threadIdx.x & 2; }

    W4PairDigits() = default;
    // digits: of the lane's tile, by W4Scaling. By all lanes of a warp.
    DEVICE W4PairDigits(const uint32_t (&digits)[2]) {
        const uint32_t minus_8[4] = {0xf8f8f8f8, 0x80808080, 0xf8f8f8f8, 0x80808080};  // -8, and 16 times that
#pragma unroll
        for (int k = 0; k < 2; k++) {
            b[k][0] = digits_of_second() ? 0 : digits[k];
            b[k][1] = digits_of_second() ? digits[k] : 0;
            mma_s8s8(begin, minus_8, b[k]);
        }
    }
};

// acc[r][c] += scale_r (W q)[r][c], for odd r 16 times that. words: the lane's of both tiles; scales: of rows 4 g + r, of
// the tile whose sums are the lane's; c: columns 2 t + c of the digits.
template <bool BF16>
DEVICE void w4_pair_product(float (&acc)[4][2], const uint4 (&words)[2], const uint2& scales, const W4PairDigits& x) {
    const uint32_t w[2][4] = {{words[0].x, words[0].y, words[0].z, words[0].w},
                              {words[1].x, words[1].y, words[1].z, words[1].w}};
    const float2 low = Half<BF16>::unpack(scales.x), high = Half<BF16>::unpack(scales.y);
    const float by_row[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int d[4] = {x.begin[0], x.begin[1], x.begin[2], x.begin[3]};
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const uint32_t first = w[0][2 * h + k], second = w[1][2 * h + k];
            const uint32_t a[4] = {first & 0x0f0f0f0f, first & 0xf0f0f0f0, second & 0x0f0f0f0f, second & 0xf0f0f0f0};
            mma_u8s8(d, a, x.b[k]);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float& sum = acc[2 * h + j / 2][j % 2];
            sum = fmaf(__int_as_float(d[j]) - UNITS_FLOAT, by_row[2 * h + j / 2], sum);
        }
    }
}
