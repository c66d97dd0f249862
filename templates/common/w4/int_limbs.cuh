// Split activations: a 16-bit token as a fixed-point number of three 7-bit limbs. int4 weights are then multiplied as
// integers: one mask unpacks four of them, and their sums over a group of columns are exact.
//
// A warp scales its columns of a token by a power of two, so that the largest is below 2^21, and rounds: q. An element
// is exact to 2^-22 of the largest one; bf16 has 2^-8 of itself. The limbs ("digits") of a token are columns of the
// tensor core's B operand, four a token, the last one zero: q = d0 + 2^7 d1 + 2^14 d2, d0 and d1 in 0 .. 127, d2 in
// -128 .. 127.
//
// mma.m16n8k32 with 8-bit integers (PTX ISA 8.8, "Matrix Fragments for mma.m16n8k32"):
//   A 16x32: a0 = row g, k 4t..4t+3   a1 = row g+8, the same k   a2 = row g, k 16+4t..   a3 = row g+8, k 16+4t..
//   B 32x8:  b0 = k 4t..4t+3, col g   b1 = k 16+4t.., col g      C 16x8: as m16n8k16's       (g = lane / 4, t = lane % 4)
#pragma once
#include "common/ptx/types.cuh"

DEVICE void mma_u8s8(int (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE void mma_s8s8(int (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The maximum, or NaN if either is NaN: of two floats, and by halves of |b| and the maximum so far.
DEVICE float max_nan(float a, float b) {
    float m;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
    return m;
}
template <bool BF16> DEVICE uint32_t max_abs2(uint32_t a, uint32_t b) {
    uint32_t m;
    if constexpr (BF16) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b & 0x7fff7fffu));
    else asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b & 0x7fff7fffu));
    return m;
}

// Adding it turns an integer below 2^22 into the low bits of a float; subtracting it turns those back.
constexpr float UNITS_FLOAT = 12582912.0f;  // 1.5 * 2^23
constexpr int UNITS_BITS = 0x4b400000;

template <bool BF16> struct W4Scaling {
    float up = 1.0f, down = 1.0f;  // q = x * up, x = q * down
    int shift = 0;
    uint32_t mask = 0;

    // most: the largest |x| of the warp's columns of the token; below 2^-103 its digits become coarse. A token with an
    // infinity or a NaN among them becomes all NaN.
    DEVICE explicit W4Scaling(float most) {
        const int digit = threadIdx.x / 4 % 4, exponent = max(int(__float_as_uint(most) >> 23), 24);
        up = __uint_as_float(uint32_t(274 - exponent) << 23);
        down = exponent == 255 ? __uint_as_float(0x7fc00000) : __uint_as_float(uint32_t(exponent - 20) << 23);
        shift = digit % 3 * 7;
        mask = digit == 3 ? 0u : digit == 2 ? 0xffffffffu : 0x7f7f7f7fu;
    }
    // b: what a lane keeps of a tile of 32 columns, digit g % 4. x: columns 2 t, 2 t + 1 of each 8 of a tile.
    DEVICE void put(uint32_t (&b)[2], const uint32_t (&x)[4]) const {
        uint32_t bits[4][2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 v = Half<BF16>::unpack(x[i]);
            bits[i][0] = __float_as_uint(fmaf(v.x, up, UNITS_FLOAT)) >> shift;
            bits[i][1] = __float_as_uint(fmaf(v.y, up, UNITS_FLOAT)) >> shift;
        }
        // in the order of a word's nibbles 0, 2, 4, 6 (common/w4/pack.py)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t first = __byte_perm(bits[2 * i][0], bits[2 * i + 1][0], 0x0040);
            b[i] = __byte_perm(first, __byte_perm(bits[2 * i][1], bits[2 * i + 1][1], 0x0040), 0x5410) & mask;
        }
    }
};
