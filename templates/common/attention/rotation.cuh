// Blocks of 64 values times H, the 64 x 64 Hadamard matrix over 8, which is orthogonal and its own inverse: so products of two
// rotated rows are those of the rows, and what is large in a block is spread over all of it.
//
// SIGNED: times signs before that, those of the 8 x 8 Hadamard matrix, its rows one behind the other. H makes one large value of
// a block of equal ones; of these signs it makes values that are all of one size.
#pragma once
#include "common/rows/vec.cuh"

// The eight lanes that hold a block, eight values each; others may be elsewhere.
DEVICE uint32_t lanes_of_block() { return 0xffu << (threadIdx.x % 32 / 8 * 8); }

// a + b and a - b of values that are `mask` lanes apart.
DEVICE float butterfly(uint32_t lanes, float x, int mask) {
    const float other = __shfl_xor_sync(lanes, x, mask);
    return threadIdx.x & mask ? other - x : x + other;
}

// A block in fp32, of which eight lanes have eight values each: steps 1, 2 and 4 are in a lane, then 8, 16 and 32.
DEVICE void rotate64(float (&x)[8]) {
#pragma unroll
    for (int step = 1; step < 8; step *= 2)
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (!(i & step)) {
                const float a = x[i], b = x[i + step];
                x[i] = a + b, x[i + step] = a - b;
            }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int mask = 1; mask < 8; mask *= 2) x[j] = butterfly(lanes_of_block(), x[j], mask);
        x[j] *= 0.125f;
    }
}

// Likewise of a whole warp with four values each.
DEVICE void rotate64(float4& x) {
    x = make_float4(x.x + x.y, x.x - x.y, x.z + x.w, x.z - x.w);
    x = make_float4(x.x + x.z, x.y + x.w, x.x - x.z, x.y - x.w);
#pragma unroll
    for (int mask = 1; mask < 16; mask *= 2) {
        x.x = butterfly(0xffffffffu, x.x, mask), x.y = butterfly(0xffffffffu, x.y, mask);
        x.z = butterfly(0xffffffffu, x.z, mask), x.w = butterfly(0xffffffffu, x.w, mask);
    }
    x.x *= 0.125f, x.y *= 0.125f, x.z *= 0.125f, x.w *= 0.125f;
}

// x times the sign of element `i` of a block.
DEVICE float signed_as(float x, int i) { return __uint_as_float(__float_as_uint(x) ^ uint32_t(__popc(i & i >> 3 & 7)) << 31); }

DEVICE void flip_signs(float (&x)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = signed_as(x[j], threadIdx.x % 8 * 8 + j);
}
DEVICE void flip_signs(float4& x) {
    const int i = threadIdx.x % 16 * 4;
    x = make_float4(signed_as(x.x, i), signed_as(x.y, i + 1), signed_as(x.z, i + 2), signed_as(x.w, i + 3));
}

// Eight elements of 16 bits of a query, by eight lanes with a block: rotated, and rounded once to bf16 or fp16.
template <bool FROM_BF16, bool TO_BF16, bool SIGNED = false> DEVICE uint4 rotated_query(const uint4& values) {
    float x[8];
    unpack8<FROM_BF16>(values, x);
    if constexpr (SIGNED) flip_signs(x);
    rotate64(x);
    return pack8<TO_BF16>(x);
}
