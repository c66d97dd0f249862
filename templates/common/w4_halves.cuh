// Up to eight tokens times int4 weights, in fp16 on the tensor cores: for w4_stream.cuh, W's rows are the A operand, tokens
// the eight columns of B.
//
// A nibble under a mask is an fp16 number as it is: of bits 0 .. 3 the subnormal n 2^-24, of bits 4 .. 7 n 2^-20, and tensor
// cores take subnormals as they take others. So a word is operands after one shift and four masks, and by the order of
// w4_pack.py each row's nibbles lie alike: those of a lane's rows 4 g and 4 g + 2 low, those of 4 g + 1 and 4 g + 3 high,
// 16 times too large. The 8 that weights come with is taken from the sums by products with -8 in the same units.
//
// bf16 tokens: a warp scales its columns of each by a power of two, so that the largest lies below 2^16, and rounds to fp16.
// What is 2^-32 of that largest one and more keeps all bits of bf16; beneath, an error is below 2^-40 of it. fp16 tokens
// go in as they are.
#pragma once
#include "common/w4_stream_x.cuh"

// D = A B + C of m16n8k16: see mma.cuh for who has what.
DEVICE void mma_halves(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Of each four lanes, lane t's word i becomes lane i's word t. By all lanes of a warp.
DEVICE void turn_words(uint32_t (&w)[4]) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        const bool upper = threadIdx.x & bit;
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            uint32_t &low = w[bit == 1 ? 2 * pair : pair], &high = w[bit == 1 ? 2 * pair + 1 : pair + 2];
            const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? low : high, bit);
            (upper ? low : high) = other;
        }
    }
}

// MANY: the warp has so many tiles that it keeps x of them alone; else also what the sums of each step begin with, which
// saves two of a tile's six products.
template <class L> struct W4HalvesX {
    static constexpr bool KEEPS_BEGIN = !L::MANY;
    uint32_t halves[L::TILES][2][2];  // [tile][half of its columns]: the operand of lanes 4 g + t, token g
    float begin[KEEPS_BEGIN ? L::STEPS : 1][4];
    float down[2];  // of tokens 2 t and 2 t + 1: x = halves * down
    int count = 0;  // tiles that the warp has

    struct Sums {
        float acc[2][4] = {};  // [h]: rows 4 g + 2 h and the next, each of tokens 2 t and 2 t + 1
    };

    // x: the warp's first column, row_words pairs of columns a row. By all lanes of a warp.
    DEVICE void load(const uint32_t* x, int row_words, int count_, int num_tokens) {
        const int lane = threadIdx.x % 32, token = lane / 4;
        count = count_;
        const uint32_t* const row = x + token * row_words + lane % 4 * 4;
        uint32_t words[L::TILES][4], most = 0;
#pragma unroll
        for (int i = 0; i < L::TILES; i++) {
            uint4 four = make_uint4(0, 0, 0, 0);
            if (token < num_tokens && (L::EVEN || i < count)) four = *reinterpret_cast<const uint4*>(row + i * 16);
            words[i][0] = four.x, words[i][1] = four.y, words[i][2] = four.z, words[i][3] = four.w;
        }
        down[0] = down[1] = 1.0f;
        float up = 1.0f;
        if constexpr (L::BF16) {
#pragma unroll
            for (int i = 0; i < L::TILES * 4; i++) most = max_abs2<true>(most, words[i / 4][i % 4]);
            // below 2^-111 they become coarse; an infinity or a NaN makes its token NaN
            const int exponent = max(int(__float_as_uint(most_of<true, 1, 2>(most)) >> 23), 16);
            up = __uint_as_float(uint32_t(269 - exponent) << 23);
            const float own = __uint_as_float(exponent == 255 ? 0x7fc00000u : uint32_t(exponent - 15) << 23);
#pragma unroll
            for (int j = 0; j < 2; j++) down[j] = __shfl_sync(0xffffffffu, own, (lane % 4 * 2 + j) * 4);
        }
#pragma unroll
        for (int i = 0; i < L::TILES; i++) {
            if constexpr (L::BF16) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float2 pair = Half<true>::unpack(words[i][j]);
                    words[i][j] = Half<false>::pack(pair.x * up, pair.y * up);
                }
            }
            turn_words(words[i]);
#pragma unroll
            for (int j = 0; j < 4; j++) halves[i][j / 2][j % 2] = words[i][j];
        }
        if constexpr (KEEPS_BEGIN) {
#pragma unroll
            for (int i = 0; i < L::STEPS; i++) begin_of(begin[i], i * L::STEP);
        }
    }
    // -8 times the sums of x over a step's columns, in the units of each row.
    DEVICE void begin_of(float (&b)[4], int tile) const {
        const uint32_t minus_8[4] = {0x80088008u, 0x80808080u, 0x80088008u, 0x80808080u};
#pragma unroll
        for (int j = 0; j < 4; j++) b[j] = 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * L::STEP; i++) mma_halves(b, minus_8, halves[tile + i / 2][i % 2], b);
    }
    // Adds the products with tiles `tile` and on, of a step.
    DEVICE void multiply(Sums& sums, const uint8_t* slot, int in_slot, int tile) const {
        uint2 scales = L::scales(slot, in_slot);
        // beyond the warp's share x is zero, and what lies in the slot may be no number
        if (!L::EVEN && tile >= count) scales = make_uint2(0, 0);
        const float2 low = Half<L::BF16>::unpack(scales.x), high = Half<L::BF16>::unpack(scales.y);
        const float by_row[4] = {low.x, low.y, high.x, high.y};
        float d[2][4];
        if constexpr (KEEPS_BEGIN) {
#pragma unroll
            for (int j = 0; j < 8; j++) d[j / 4][j % 4] = begin[tile / L::STEP][j % 4];
        } else {
            begin_of(d[0], tile);
#pragma unroll
            for (int j = 0; j < 4; j++) d[1][j] = d[0][j];
        }
#pragma unroll
        for (int i = 0; i < L::STEP; i++) {
            const uint4 words = L::words(slot, in_slot + i);
            const uint32_t w[2][2] = {{words.x, words.y}, {words.z, words.w}};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int h = k % 2;
                const uint32_t word = w[h][k / 2], upper = word >> 8;
                const uint32_t a[4] = {word & 0x000f000fu, word & 0x00f000f0u, upper & 0x000f000fu, upper & 0x00f000f0u};
                mma_halves(d[h], a, halves[tile + i][k / 2], d[h]);
            }
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float& sum = sums.acc[j / 4][j % 4];
            sum = fmaf(d[j / 4][j % 4], by_row[j / 2], sum);
        }
    }
    // to: [num_tokens][8], of four rows each. By all lanes of a warp.
    DEVICE void put(const Sums& sums, float4* to, int num_tokens) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int token = lane % 4 * 2 + j;
            float v[4];
#pragma unroll
            for (int r = 0; r < 4; r++) v[r] = sums.acc[r / 2][r % 2 * 2 + j] * (r % 2 ? 0x1p20f : 0x1p24f) * down[j];
            if (token < num_tokens) to[token * 8 + lane / 4] = make_float4(v[0], v[1], v[2], v[3]);
        }
    }
};

template <class L> struct W4StreamX<L, 4> : W4HalvesX<L> {};
template <class L> struct W4StreamX<L, 8> : W4HalvesX<L> {};
