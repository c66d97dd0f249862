// A tile of a matrix in few bits, 16 rows by 64 columns (common/screen/screen.py), times four tokens of two signed
// 8-bit limbs an element.
#pragma once
#include "common/w4/int_limbs.cuh"

// 16 bytes of a constant that is read once; where not `valid`, no access, and `v` is unchanged.
DEVICE void load_stream_if(uint4& v, const void* p, bool valid) {
    asm volatile(
        "{ .reg .pred valid; setp.ne.b32 valid, %5, 0; "
        "@valid ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(p), "r"(int(valid)));
}

// Adjacent tiles whose bit planes are stored together: STRIDE loads of 16 bytes a lane. The first LOADS have the first
// FIRST bits of each code: all, or six of seven. A byte b of those means GAIN * b - ZERO, in half steps if a bit is
// left out: the middle between the two codes that it may be.
template <int BITS, int FIRST = BITS> struct CodeGroup {
    static_assert(BITS == 4 || BITS == 6 || BITS == 7 || BITS == 8, "planes of four, two and one bits, or whole bytes");
    static_assert(FIRST == BITS || (FIRST == 6 && BITS == 7), "all bits, or the first six of seven");
    static constexpr int TILES = BITS == 7 ? 4 : BITS == 6 ? 2 : 1, LOADS = TILES * FIRST / 4, STRIDE = TILES * BITS / 4;
    static constexpr int GAIN = FIRST == BITS ? 1 : 4, ZERO = FIRST < BITS ? 127 : BITS == 8 ? 0 : 1 << (BITS - 1);

    // The last tile that needs a load.
    static DEVICE constexpr int last_tile(int load) {
        return BITS == 8 ? 0 : load < TILES ? load : load < TILES + TILES / 2 ? 2 * (load - TILES) + 1 : TILES - 1;
    }
    // The bytes of a tile, of row g and of row g + 8.
    static DEVICE void unpack(uint4& low, uint4& high, const uint4 (&w)[LOADS], int tile) {
        if constexpr (BITS == 8) {
            low = w[0], high = w[1];
        } else {
            constexpr int UP = FIRST == 7 ? 1 : 0;  // below the nibbles is the seventh bit
            constexpr uint32_t NIBBLES = 0x0f0f0f0f << UP;
            const uint4 n = w[tile];
            low = make_uint4(n.x << UP & NIBBLES, n.y << UP & NIBBLES, n.z << UP & NIBBLES, n.w << UP & NIBBLES);
            constexpr int DOWN = 4 - UP;
            high = make_uint4(n.x >> DOWN & NIBBLES, n.y >> DOWN & NIBBLES, n.z >> DOWN & NIBBLES, n.w >> DOWN & NIBBLES);
            if constexpr (FIRST >= 6) {
                const uint4 pair = w[TILES + tile / 2];
                put<0x30303030 << UP, 4 + UP, 2>(low, tile % 2 ? pair.z : pair.x);
                put<0x30303030 << UP, 4 + UP, 2>(high, tile % 2 ? pair.w : pair.y);
            }
            if constexpr (FIRST == 7) {
                const uint4 all = w[LOADS - 1];
                const uint32_t ones = tile == 0 ? all.x : tile == 1 ? all.y : tile == 2 ? all.z : all.w;
                put<0x01010101, 0, 1>(low, ones);
                put<0x01010101, -4, 1>(high, ones);
            }
        }
    }

private:
    // Unpacks each byte of `bits`: the EACH lowest bits to bytes.x, the next to bytes.y and so on, shifted up by UP,
    // masked.
    template <uint32_t MASK, int UP, int EACH> static DEVICE void put(uint4& bytes, uint32_t bits) {
        bytes.x |= shifted<UP>(bits) & MASK, bytes.y |= shifted<UP - EACH>(bits) & MASK;
        bytes.z |= shifted<UP - 2 * EACH>(bits) & MASK, bytes.w |= shifted<UP - 3 * EACH>(bits) & MASK;
    }
    template <int UP> static DEVICE uint32_t shifted(uint32_t bits) {
        if constexpr (UP >= 0) return bits << UP;
        return bits >> (UP < 0 ? -UP : 0);
    }
};

// Lane 4 g + t holds 16 bytes of row g (`low`) and of row g + 8 (`high`), columns 16 t and on, signed or below 128. digits: of
// four tokens and those 64 columns, 16 bytes for each [column of the operand: 2 token + digit][t]; what there is no token for
// may be anything, and so are its sums. num_tokens: of the four that there are.
// finish: d[0] and d[1] are row g's sums with digits 0 and 1 of token t, d[2] and d[3] row g + 8's; by a whole warp.
template <bool TENSOR_CORE> struct TileSums;

// mma.m16n8k32 takes its columns k in any order that both operands share: of a lane's 16 columns the first four are k
// 4 t .., the next four k 16 + 4 t .., and the others the same of a second product.
template <> struct TileSums<true> {
    int d[4] = {};

    DEVICE void add(const uint4& low, const uint4& high, const uint4* digits, int) {
        const uint4 b = digits[threadIdx.x % 32];
        mma_s8s8(d, {low.x, high.x, low.y, high.y}, {b.x, b.y});
        mma_s8s8(d, {low.z, high.z, low.w, high.w}, {b.z, b.w});
    }
    DEVICE void finish(int (&sums)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i] = d[i];
    }
};

template <> struct TileSums<false> {
    int own[4][4] = {};  // of each token, over the lane's own columns

    DEVICE void add(const uint4& low, const uint4& high, const uint4* digits, int num_tokens) {
#pragma unroll
        for (int token = 0; token < 4; token++) {
            if (token >= num_tokens) break;
#pragma unroll
            for (int digit = 0; digit < 2; digit++) {
                const uint4 b = digits[(2 * token + digit) * 4 + threadIdx.x % 4];
                own[token][digit] = dot(low, b, own[token][digit]);
                own[token][2 + digit] = dot(high, b, own[token][2 + digit]);
            }
        }
    }
    DEVICE void finish(int (&sums)[4]) const {
#pragma unroll
        for (int token = 0; token < 4; token++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int sum = own[token][i];
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                if (token == 0 || threadIdx.x % 4 == token) sums[i] = sum;
            }
        }
    }

private:
    static DEVICE int dot(const uint4& a, const uint4& b, int sum) {
        sum = __dp4a(int(a.x), int(b.x), sum);
        sum = __dp4a(int(a.y), int(b.y), sum);
        sum = __dp4a(int(a.z), int(b.z), sum);
        return __dp4a(int(a.w), int(b.w), sum);
    }
};
