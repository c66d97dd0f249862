// x of a warp of warp_pipeline.cuh or cta_pipeline.cuh, in registers, and its products with a stage of weights.
#pragma once
#include "common/w4/formats.cuh"
#include "common/w4/int_limbs_m1.cuh"
#include "common/w4/int_limbs_m4.cuh"

// A warp's part of a row of W is STEPS steps of STEP tiles of 32 x 32 weights, in stages of SLOT_STEPS; EVEN: it always
// has all of them. A stage holds the tiles, then their scales by GROUP tiles. MANY: see W4PairDigits. Format: of W.
template <bool BF16_, int STEPS_, int STEP_, int SLOT_STEPS_, int GROUP_, bool EVEN_, bool MANY_,
          class Format = W4Weights<BF16_, 32 * GROUP_>>
struct W4Slots {
    typedef Format W;
    static constexpr int GROUP = GROUP_, SCALES_BYTES = W::GROUP_BYTES * W::TILE_GROUPS;  // of GROUP tiles
    static constexpr bool BF16 = BF16_, EVEN = EVEN_, MANY = MANY_;
    static constexpr int STEPS = STEPS_, STEP = STEP_, SLOT_STEPS = SLOT_STEPS_, TILES = STEPS * STEP;
    static constexpr int WORDS_BYTES = SLOT_STEPS * STEP * W::TILE_BYTES;
    static constexpr int BYTES = WORDS_BYTES + SLOT_STEPS * STEP / GROUP * SCALES_BYTES;

    // Of int4 without minima.
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

// Up to eight tokens as they are, operands of mma.sync, for any format of W.
template <class L> struct W4StreamX<L, 8> {
    typedef typename L::W W;
    static constexpr int X_BYTES = 0;
    uint32_t columns[L::TILES][4];  // 2 t, 2 t + 1 of each 8 of a tile, of token lane / 4
    int count = 0;

    struct Sums {
        float acc[8] = {};
    };

    DEVICE void load(const uint32_t* x, int row_words, int count_, int num_tokens, uint8_t*) {
        count = count_;
        const int token = threadIdx.x % 32 / 4;
        const uint32_t* const row = x + token * row_words + threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < L::TILES; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                columns[i][j] = 0;
                if (token < num_tokens && (L::EVEN || i < count)) columns[i][j] = row[i * 16 + j * 4];
            }
        }
    }
    DEVICE void multiply(Sums& sums, const uint8_t* slot, int in_slot, int tile) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < L::STEP; i++) {
            const uint8_t* const scales = slot + L::WORDS_BYTES + (in_slot + i) / L::GROUP * L::SCALES_BYTES;
            uint4 chunks[W::LANE_CHUNKS];
            typename W::ScalesQuad quads[W::TILE_GROUPS];
#pragma unroll
            for (int j = 0; j < W::LANE_CHUNKS; j++)
                chunks[j] = reinterpret_cast<const uint4*>(slot + (in_slot + i) * W::TILE_BYTES)[j * 32 + lane];
#pragma unroll
            for (int j = 0; j < W::TILE_GROUPS; j++) {
                quads[j] = reinterpret_cast<const typename W::ScalesQuad*>(scales + j * W::GROUP_BYTES)[lane / 4];
                // Beyond the warp's part x is zero, and the stage may hold NaN.
                if (!L::EVEN && tile + i >= count) quads[j] = {};
            }
            uint32_t a[4][4];
            W::Products::unpack(chunks, a);
            typename W::Products::Sums of_x = {};
            W::Products::add_columns(of_x, columns[tile + i]);
            W::Products::add(sums.acc, a, quads, of_x, columns[tile + i]);
        }
    }
    // to: [num_tokens][8], of four rows each.
    DEVICE void put(const Sums& sums, float4* to, int num_tokens) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (2 * t + j < num_tokens)
                to[(2 * t + j) * 8 + g] = make_float4(sums.acc[j], sums.acc[2 + j], sums.acc[4 + j], sums.acc[6 + j]);
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
