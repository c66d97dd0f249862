// One token times int4 weights as integers: a tile's products are exact.
//
// By tiles of 32 columns the token is fixed-point: a power of two brings its largest element below 2^21, and what remains
// is rounded (bf16 has 8 bits, fp16 has 11). A number is three digits of 7, 7 and 8 bits, q = d0 + 2^7 d1 + 2^14 d2, d2
// signed, and a digit is a column of the tensor core's B operand. A weight n - 8 is a byte whose upper half is n with its
// first bit turned over, 16 (n - 8); what is 16 times too large is made up for by the tile's factor.
//
// mma.m16n8k32 with 8-bit integers (PTX ISA 8.8, "Matrix Fragments for mma.m16n8k32"):
//   A 16x32: a0 = row g, k 4t..4t+3   a1 = row g+8, the same k   a2 = row g, k 16+4t..   a3 = row g+8, k 16+4t..
//   B 32x8:  b0 = k 4t..4t+3, col g   b1 = k 16+4t.., col g      C 16x8: c0, c1 = row g, cols 2t, 2t+1   c2, c3 = row g+8
#pragma once
#include "common/w4_digits.cuh"

struct TokenTile {
    uint2 digits[3][4];  // [digit][t]: the operand of lanes 4 g + t
};

// Word `i` of a row of pairs of columns, in the order in which lanes need them: lane t of a tile has columns 2 t and 2 t + 1
// of each eight, which are words t, 4 + t, 8 + t, 12 + t; there they lie behind each other. Its own inverse.
DEVICE int turned(int i) { return i / 16 * 16 + i % 4 * 4 + i % 16 / 4; }

// Writes a tile from four lanes of a warp, of which lane t has its words (see turned). down: x (n - 8) = q * 16 (n - 8) *
// down. A tile with an infinity or a NaN becomes NaN. By all lanes of a warp; `valid` alike in each four.
template <bool BF16> DEVICE void put_turned_tile(TokenTile* tile, float* down, const uint4& words, bool valid) {
    const int t = threadIdx.x % 4;
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
    float x[4][2];
    uint32_t most = 0;  // magnitudes of floats are in the order of their bits
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = Half<BF16>::unpack(w[i]);
        x[i][0] = pair.x, x[i][1] = pair.y;
        most = max(most, max(__float_as_uint(pair.x) & 0x7fffffffu, __float_as_uint(pair.y) & 0x7fffffffu));
    }
    most = max(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = max(most, __shfl_xor_sync(0xffffffffu, most, 2));
    const int exponent = max(int(most >> 23), 32);  // below 2^-95 digits become coarse
    const float up = __uint_as_float(uint32_t(274 - exponent) << 23);
    uint32_t bits[4][2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        bits[i][0] = __float_as_uint(fmaf(x[i][0], up, UNITS_FLOAT));
        bits[i][1] = __float_as_uint(fmaf(x[i][1], up, UNITS_FLOAT));
    }
#pragma unroll
    for (int d = 0; d < 3; d++) {
        uint32_t b[2];  // bytes in the order of a word's nibbles 0, 2, 4, 6 (common/w4_pack.py)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t first = __byte_perm(bits[2 * i][0] >> 7 * d, bits[2 * i + 1][0] >> 7 * d, 0x0040);
            const uint32_t second = __byte_perm(bits[2 * i][1] >> 7 * d, bits[2 * i + 1][1] >> 7 * d, 0x0040);
            b[i] = __byte_perm(first, second, 0x5410) & (d == 2 ? 0xffffffffu : 0x7f7f7f7fu);
        }
        if (valid) tile->digits[d][t] = make_uint2(b[0], b[1]);
    }
    if (valid && t == 0) *down = __uint_as_float(exponent == 255 ? 0x7fc00000u : uint32_t(exponent - 24) << 23);
}

// The upper halves of four bytes, n, as 16 (n - 8): one instruction.
DEVICE uint32_t sixteenfold(uint32_t word) {
    uint32_t bytes;
    asm("lop3.b32 %0, %1, 0xf0f0f0f0, %2, 0x6a;" : "=r"(bytes) : "r"(word), "r"(0x80808080u));
    return bytes;
}

// Sums over tiles of rows 4 g .. 4 g + 3 times a token. A token's tile has three columns of digits where a product takes
// eight, so two tiles of W go through the tensor cores together, the first one's columns 0 .. 15 (then 16 .. 31) as its
// columns k 0 .. 15, the second one's as k 16 .. 31; digits are in columns 0 .. 2 for the first, 4 .. 6 for the second,
// with zeros for the other one's k. Lanes 4 g + t have sums of the first one where t < 2, else of the second one, and
// of digits 0 and 1, or of digit 2 where t is odd.
template <bool BF16> struct TokenSums {
    float acc[4][2] = {};

    // Which of the two tiles' digits are the lane's, and of that tile which; which of the two tiles' sums are.
    static DEVICE bool digits_of_second() { return threadIdx.x & 16; }
    static DEVICE int place() { return min(int(threadIdx.x % 32) / 4 % 4, 2) * 4 + threadIdx.x % 4; }
    static DEVICE bool sums_of_second() { return threadIdx.x & 2; }

    // words: the lane's of both tiles of W; digits, scales (of rows 4 g .. 4 g + 3) and down: of the lane's tile.
    DEVICE void add(const uint4 (&words)[2], const uint2& scales, const uint2& digits, float down) {
        const uint32_t w[2][4] = {{words[0].x, words[0].y, words[0].z, words[0].w},
                                  {words[1].x, words[1].y, words[1].z, words[1].w}};
        const uint32_t b[2] = {digits.x, digits.y};
        const bool second = digits_of_second();
        const float2 low = Half<BF16>::unpack(scales.x), high = Half<BF16>::unpack(scales.y);
        const float by_row[4] = {low.x * down, low.y * down, high.x * down, high.y * down};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int d[4] = {UNITS_BITS, UNITS_BITS, UNITS_BITS, UNITS_BITS};
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const uint32_t first = w[0][2 * h + k], other = w[1][2 * h + k];
                asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                    "{%0,%1,%2,%3};"
                    : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                    : "r"(sixteenfold(first << 4)), "r"(sixteenfold(first)), "r"(sixteenfold(other << 4)),
                      "r"(sixteenfold(other)), "r"(second ? 0 : b[k]), "r"(second ? b[k] : 0));
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float& sum = acc[2 * h + j / 2][j % 2];
                sum = fmaf(__int_as_float(d[j]) - UNITS_FLOAT, by_row[2 * h + j / 2], sum);
            }
        }
    }
    // The four rows, in every lane; and begins anew. By all lanes of a warp.
    DEVICE float4 take() {
        float v[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            v[r] = threadIdx.x % 2 ? 16384.0f * acc[r][0] : fmaf(128.0f, acc[r][1], acc[r][0]);
            v[r] += __shfl_xor_sync(0xffffffffu, v[r], 1);
            v[r] += __shfl_xor_sync(0xffffffffu, v[r], 2);
            acc[r][0] = acc[r][1] = 0.0f;
        }
        return make_float4(v[0], v[1], v[2], v[3]);
    }
};
