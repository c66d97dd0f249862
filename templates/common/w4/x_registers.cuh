// x of a warp of warp_pipeline.cuh or cta_pipeline.cuh, in registers, and its products with a stage of weights.
#pragma once
#include "common/ptx/mma.cuh"
#include "common/w4/int_limbs_m1.cuh"
#include "common/w4/int_limbs_m4.cuh"

// A warp's part of a row of W is STEPS steps of STEP tiles of 32 x 32 weights, in stages of SLOT_STEPS; EVEN: it always
// has all of them. A stage holds the tiles, 512 bytes each, then their scales by GROUP tiles. MANY: see W4PairDigits.
template <bool BF16_, int STEPS_, int STEP_, int SLOT_STEPS_, int GROUP, bool EVEN_, bool MANY_> struct W4Slots {
    static constexpr bool BF16 = BF16_, EVEN = EVEN_, MANY = MANY_;
    static constexpr int STEPS = STEPS_, STEP = STEP_, SLOT_STEPS = SLOT_STEPS_, TILES = STEPS * STEP;
    static constexpr int WORDS_BYTES = SLOT_STEPS * STEP * 512, BYTES = WORDS_BYTES + SLOT_STEPS * STEP / GROUP * 64;

    static DEVICE uint4 words(const uint8_t* slot, int tile) {
        return *reinterpret_cast<const uint4*>(slot + tile * 512 + threadIdx.x % 32 * 16);
    }
    // Of rows 4 g .. 4 g + 3.
    static DEVICE uint2 scales(const uint8_t* slot, int tile) {
        return *reinterpret_cast<const uint2*>(slot + WORDS_BYTES + tile / GROUP * 64 + threadIdx.x % 32 / 4 * 8);
    }
};

// Maximum of |x| of a token from the lanes' own; lanes of one token differ in BITS.
template <bool BF16, int... BITS> DEVICE float most_of(uint32_t most) {
    const float2 of = Half<BF16>::unpack(most);
    float m = max_nan(of.x, of.y);
    ((m = max_nan(m, __shfl_xor_sync(0xffffffffu, m, BITS))), ...);
    return m;
}

template <class L, int TOKENS> struct W4StreamX;

// Up to four tokens, one tile of W in one MMA.
template <class L> struct W4StreamX<L, 4> {
    static constexpr bool MANY = L::MANY;
    static constexpr int X_BYTES = 1024;  // of shared memory, for each warp
    typedef W4QuadDigits<MANY> Digits;
    Digits digits[L::TILES];
    float down;     // of token t
    int count = 0;  // tiles that the warp has

    struct Sums {
        float acc[4][2] = {};
    };

    // x: the warp's first column, row_words pairs of columns a row. scratch: X_BYTES of the warp's own. Called by all
    // lanes.
    DEVICE void load(const uint32_t* x, int row_words, int count_, int num_tokens, uint8_t* scratch) {
        load(x, row_words, count_, num_tokens, scratch, [](int i, int of_pair) { return 2 * i + of_pair; });
    }
    // tile_at(i, of_pair): position in the row of the warp's tile 2 i + of_pair. All lanes load 16 bytes each of two
    // tiles of all tokens at a time, and read their operands from shared memory.
    template <class TileAt>
    DEVICE void load(const uint32_t* x, int row_words, int count_, int num_tokens, uint8_t* scratch,
                     const TileAt& tile_at) {
        constexpr int CHUNKS = ceil_div(L::TILES, 2);
        const int lane = threadIdx.x % 32, of_pair = lane / 16, token = lane / 4 % 4, eight = lane % 4;
        const auto place = [](int token, int eight) { return token * 64 + (eight ^ token / 2) * 16; };
        uint8_t* const put_at = scratch + of_pair * 256 + place(token, eight);
        const uint8_t* const taken_at = scratch + place(lane % 8 / 2, lane / 8);
        count = count_;
        const int tiles = token >= num_tokens ? 0 : L::EVEN ? L::TILES : count;
        const uint4* const row = reinterpret_cast<const uint4*>(x + token * row_words) + eight;
        uint4 chunks[CHUNKS];
        uint32_t most = 0;
        const auto read = [&](int i) {
            chunks[i] = make_uint4(0, 0, 0, 0);
            if (2 * i + of_pair < tiles) chunks[i] = row[tile_at(i, of_pair) * 4];
        };
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) read(i);
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const uint32_t words[4] = {chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w};
#pragma unroll
            for (int j = 0; j < 4; j++) most = max_abs2<L::BF16>(most, words[j]);
        }
        const float of_token = most_of<L::BF16, 1, 2, 16>(most);
        const W4QuadScaling<L::BF16> scaling(__shfl_sync(0xffffffffu, of_token, lane / 8 * 4));
        down = __shfl_sync(0xffffffffu, scaling.down, lane % 4 * 8);
        if (MANY) asm volatile("" ::: "memory");  // read again: there are no registers for all of them
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            if (MANY) read(i);
            *reinterpret_cast<uint4*>(put_at + i % 2 * 512) = chunks[i];
            __syncwarp();
#pragma unroll
            for (int j = 0; j < 2; j++) {
                if (2 * i + j == L::TILES) break;
                uint32_t words[4];
                ldmatrix4(words, taken_at + i % 2 * 512 + j * 256);
                scaling.put(digits[2 * i + j], words);
            }
        }
        __syncwarp();
    }
    // Adds the products with tiles `tile` .. of a step.
    DEVICE void multiply(Sums& sums, const uint8_t* slot, int in_slot, int tile) const {
#pragma unroll
        for (int i = 0; i < L::STEP; i++) {
            uint2 scales = L::scales(slot, in_slot + i);
            // Beyond the warp's part x is zero, and the stage may hold NaN.
            if (!L::EVEN && tile + i >= count) scales = make_uint2(0, 0);
            w4_quad_product<L::BF16, MANY>(sums.acc, L::words(slot, in_slot + i), scales, digits[tile + i]);
        }
    }
    // to: [num_tokens][8], of four rows each. Called by all lanes of a warp.
    DEVICE void put(const Sums& sums, float4* to, int num_tokens) const {
        const int token = threadIdx.x % 4;
        float v[4];
#pragma unroll
        for (int r = 0; r < 4; r++) v[r] = fmaf(256.0f, sums.acc[r][1], sums.acc[r][0]) * Digits::factor(r) * down;
        if (token < num_tokens) to[token * 8 + threadIdx.x % 32 / 4] = make_float4(v[0], v[1], v[2], v[3]);
    }
};

// One token, two tiles of W in one MMA.
template <class L> struct W4StreamX<L, 1> {
    static constexpr int PAIRS = L::TILES / 2;
    static constexpr bool MANY = L::MANY;
    static_assert(L::STEP % 2 == 0);
    typedef W4PairDigits<MANY> Digits;
    Digits digits[PAIRS];
    float down;
    int count = 0;

    static constexpr int X_BYTES = 0;

    struct Sums {
        float acc[4][2] = {};
    };

    DEVICE void load(const uint32_t* x, int, int count_, int, uint8_t*) {
        count = count_;
        const int second = Digits::digits_of_second();
        const uint32_t* const row = x + second * 16 + threadIdx.x % 4;
        uint32_t words[PAIRS][4], most = 0;
        auto read = [&](int i) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                words[i][j] = 0;
                if (L::EVEN || 2 * i + second < count) words[i][j] = row[i * 32 + j * 4];
            }
        };
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            read(i);
#pragma unroll
            for (int j = 0; j < 4; j++) most = max_abs2<L::BF16>(most, words[i][j]);
        }
        const W4Scaling<L::BF16> scaling(most_of<L::BF16, 1, 2, 16>(most));
        down = scaling.down;
        if (MANY) asm volatile("" ::: "memory");  // read again: there are no registers for all of them
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            if (MANY) read(i);
            uint32_t of_tile[2];
            scaling.put(of_tile, words[i]);
            digits[i] = Digits(of_tile);
        }
    }
    DEVICE void multiply(Sums& sums, const uint8_t* slot, int in_slot, int tile) const {
        const int second = Digits::sums_of_second() ? 1 : 0;
#pragma unroll
        for (int i = 0; i < L::STEP; i += 2) {
            uint2 scales = L::scales(slot, in_slot + i + second);
            if (!L::EVEN && tile + i + second >= count) scales = make_uint2(0, 0);
            w4_pair_product<L::BF16>(sums.acc, L::words(slot, in_slot + i), L::words(slot, in_slot + i + 1), scales,
                                     digits[(tile + i) / 2]);
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
            v[r] = v[r] * Digits::factor(r) * down;
        }
        if (threadIdx.x % 4 == 0) to[threadIdx.x % 32 / 4] = make_float4(v[0], v[1], v[2], v[3]);
    }
};
