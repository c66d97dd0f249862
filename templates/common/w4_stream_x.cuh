// What a warp of w4_stream.cuh keeps of x in registers, and its products with a slot of weights.
#pragma once
#include "common/w4_digits.cuh"
#include "common/w4_pair_digits.cuh"

// Of a slot: TILES of 32 x 32 weights, 512 bytes each, and behind them their scales by GROUP tiles. ROUNDS slots are what
// a warp has of a part of K: `count` tiles, all of them where EVEN.
template <bool BF16_, int TILES_, int GROUP_, int ROUNDS_, bool EVEN_> struct W4Slots {
    static constexpr bool BF16 = BF16_, EVEN = EVEN_;
    static constexpr int TILES = TILES_, GROUP = GROUP_, ROUNDS = ROUNDS_, WORDS_BYTES = TILES * 512;

    static DEVICE uint4 words(const uint8_t* slot, int tile) {
        return *reinterpret_cast<const uint4*>(slot + tile * 512 + threadIdx.x % 32 * 16);
    }
    // Of rows 4 g .. 4 g + 3.
    static DEVICE uint2 scales(const uint8_t* slot, int tile) {
        return *reinterpret_cast<const uint2*>(slot + WORDS_BYTES + tile / GROUP * 64 + threadIdx.x % 32 / 4 * 8);
    }
};

// The largest |x| of a token from the lanes' own: SAME, the bits of a lane by which those of one token differ.
template <bool BF16, int... SAME> DEVICE float most_of(uint32_t most) {
    const float2 of = Half<BF16>::unpack(most);
    float m = max_nan(of.x, of.y);
    ((m = max_nan(m, __shfl_xor_sync(0xffffffffu, m, SAME))), ...);
    return m;
}

// Tokens by pairs, one tile of W a product.
template <class L, int TOKENS> struct W4StreamX {
    static constexpr int PAIRS = TOKENS / 2, ALL = L::ROUNDS * L::TILES;
    static_assert(TOKENS % 2 == 0);
    W4Digits digits[ALL][PAIRS];
    float down[PAIRS];  // of token 2 p + t / 2, in lane (g, t)
    int count = 0;      // tiles that the warp has

    struct Sums {
        float acc[PAIRS][4][2] = {};
    };

    // x: the warp's first column, row_words pairs of columns a row. By all lanes of a warp.
    DEVICE void load(const uint32_t* x, int row_words, int count_, int num_tokens) {
        const int lane = threadIdx.x % 32;
        count = count_;
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            const int token = 2 * p + lane / 16;
            const bool has_token = token < num_tokens;
            const uint32_t* const row = x + token * row_words + lane % 4;
            uint32_t words[ALL][4], most = 0;
#pragma unroll
            for (int i = 0; i < ALL; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    words[i][j] = 0;
                    if (has_token && (L::EVEN || i < count)) words[i][j] = row[i * 16 + j * 4];
                }
            }
#pragma unroll
            for (int i = 0; i < ALL; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) most = max_abs2<L::BF16>(most, words[i][j]);
            }
            const W4Scaling<L::BF16> scaling(most_of<L::BF16, 1, 2>(most), has_token);
            down[p] = __shfl_sync(0xffffffffu, scaling.down, lane % 4 / 2 * 16);
#pragma unroll
            for (int i = 0; i < ALL; i++) digits[i][p] = scaling.digits(words[i]);
        }
    }
    DEVICE void multiply(Sums& sums, const uint8_t* slot, int round) const {
#pragma unroll
        for (int i = 0; i < L::TILES; i++) {
            uint2 scales = L::scales(slot, i);
            // beyond the warp's share x is zero, and what lies in the slot may be no number
            if (!L::EVEN && round * L::TILES + i >= count) scales = make_uint2(0, 0);
            w4_digit_product<L::BF16>(sums.acc, L::words(slot, i), scales, digits[round * L::TILES + i]);
        }
    }
    // to: [8][num_tokens], of four rows each. By all lanes of a warp.
    DEVICE void put(const Sums& sums, float4* to, int num_tokens) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            float v[4];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const float(&acc)[2] = sums.acc[p][r];
                v[r] = lane % 2 ? 16384.0f * acc[0] : fmaf(128.0f, acc[1], acc[0]);
                v[r] = (v[r] + __shfl_xor_sync(0xffffffffu, v[r], 1)) * down[p];
            }
            const int token = 2 * p + lane % 4 / 2;
            if (lane % 2 == 0 && token < num_tokens) to[lane / 4 * num_tokens + token] = make_float4(v[0], v[1], v[2], v[3]);
        }
    }
};

// One token, two tiles of W a product.
template <class L> struct W4StreamX<L, 1> {
    static constexpr int STEPS = ceil_div(L::TILES, 2), ALL = L::ROUNDS * STEPS;  // STEPS: products of a slot
    W4PairDigits digits[ALL];
    float down;
    int count = 0;

    struct Sums {
        float acc[4][2] = {};
    };

    // Whether the first (second) tile of a step is the warp's.
    DEVICE bool has(int round, int step, bool second) const {
        return 2 * step + second < L::TILES && (L::EVEN || round * L::TILES + 2 * step + second < count);
    }
    DEVICE void load(const uint32_t* x, int, int count_, int) {
        count = count_;
        const bool second = W4PairDigits::digits_of_second();
        const uint32_t* const row = x + second * 16 + threadIdx.x % 4;
        uint32_t words[ALL][4], most = 0;
#pragma unroll
        for (int i = 0; i < ALL; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                words[i][j] = 0;
                if (has(i / STEPS, i % STEPS, second))
                    words[i][j] = row[(i / STEPS * L::TILES + i % STEPS * 2) * 16 + j * 4];
            }
        }
#pragma unroll
        for (int i = 0; i < ALL; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) most = max_abs2<L::BF16>(most, words[i][j]);
        }
        const W4Scaling<L::BF16> scaling(most_of<L::BF16, 1, 2, 16>(most), true);
        down = scaling.down;
#pragma unroll
        for (int i = 0; i < ALL; i++) digits[i] = W4PairDigits(scaling.digits(words[i]).b);
    }
    DEVICE void multiply(Sums& sums, const uint8_t* slot, int round) const {
        const bool second = W4PairDigits::sums_of_second();
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const int first = 2 * i, last = min(first + 1, L::TILES - 1);  // the only one again where there is no second
            const uint4 words[2] = {L::words(slot, first), L::words(slot, last)};
            uint2 scales = L::scales(slot, second ? last : first);
            if (!has(round, i, second)) scales = make_uint2(0, 0);
            w4_pair_product<L::BF16>(sums.acc, words, scales, digits[round * STEPS + i]);
        }
    }
    DEVICE void put(const Sums& sums, float4* to, int) const {
        float v[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const float(&acc)[2] = sums.acc[r];
            v[r] = threadIdx.x % 2 ? 16384.0f * acc[0] : fmaf(128.0f, acc[1], acc[0]);
            v[r] += __shfl_xor_sync(0xffffffffu, v[r], 1);
            v[r] += __shfl_xor_sync(0xffffffffu, v[r], 2);
            v[r] = (r % 2 ? v[r] / 16.0f : v[r]) * down;
        }
        if (threadIdx.x % 4 == 0) to[threadIdx.x % 32 / 4] = make_float4(v[0], v[1], v[2], v[3]);
    }
};
