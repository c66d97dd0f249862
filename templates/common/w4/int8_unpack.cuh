// int4 weights as 8-bit integers, for integer MMAs with fixed-point tokens. A weight n - 8 becomes a byte whose upper
// half is n with its top bit flipped, 16 (n - 8); a tile's factor takes the 16 out again.
//
// mma.m16n8k32 with 8-bit integers (PTX ISA 8.8, "Matrix Fragments for mma.m16n8k32"):
//   A 16x32: a0 = row g, k 4t..4t+3   a1 = row g+8, the same k   a2 = row g, k 16+4t..   a3 = row g+8, k 16+4t..
//   B 32x8:  b0 = k 4t..4t+3, col g   b1 = k 16+4t.., col g      C 16x8: c0, c1 = row g, cols 2t, 2t+1   c2, c3 = row g+8
#pragma once
#include "common/w4/int_limbs.cuh"

// The upper halves of four bytes, n, as 16 (n - 8): one instruction.
DEVICE uint32_t sixteenfold(uint32_t word) {
    uint32_t bytes;
    asm("lop3.b32 %0, %1, 0xf0f0f0f0, %2, 0x6a;" : "=r"(bytes) : "r"(word), "r"(0x80808080u));
    return bytes;
}
