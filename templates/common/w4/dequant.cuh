// Eight codes of int4 (of one word) or int8 (of two) to four pairs of 16-bit floats, exactly their values.
//
// OR-ing a nibble into the low mantissa bits of a power of two P gives the float P + nibble: one lop3 for two nibbles.
// Pair i is nibbles i (low half) and i + 4 (high half). Source: Kim et al., arXiv 2211.10017, section 3.3.
#pragma once
#include "common/ptx/types.cuh"

// (a & MASK) | BITS
template <uint32_t MASK, uint32_t BITS> DEVICE uint32_t and_or(uint32_t a) {
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "n"(MASK), "n"(BITS));
    return r;
}

// (a & MASK) ^ BITS
template <uint32_t MASK, uint32_t BITS> DEVICE uint32_t and_xor(uint32_t a) {
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(a), "n"(MASK), "n"(BITS));
    return r;
}

// A nibble is value + ZERO. BIASED (bf16 only): gives nibble + 128; the caller subtracts 128 + ZERO times the sum of the
// other operand.
template <int ZERO> constexpr uint32_t INT4_BIAS = 0xc300c300u + 0x10001u * ZERO;  // -128 - ZERO, twice

template <bool BF16, bool BIASED = false, int ZERO = 8> DEVICE void int4_to_half(uint32_t w, uint32_t (&a)[4]) {
    static_assert(BF16 || !BIASED, "fp16 would lose too much to a bias of 1032");
    static_assert(ZERO == 8 || ZERO == 0);
    if constexpr (BF16) {
        // 128 + nibble: seven bits of mantissa leave room for one nibble at the bottom
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a[i] = and_or<0x000f000fu, 0x43004300u>(w >> (4 * i));
            if constexpr (!BIASED) a[i] = Half<true>::add2(a[i], INT4_BIAS<ZERO>);
        }
    } else {
        // 1024 + nibble, and 1024 + 16 nibble, which needs no shift: times 1/16, minus 64 + ZERO
        constexpr uint32_t LOW = 0x64006400u + 0x10001u * ZERO, HIGH = 0xd400d400u + 0x100010u * ZERO;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const uint32_t s = w >> (4 * i);
            a[i] = Half<false>::sub2(and_or<0x000f000fu, 0x64006400u>(s), LOW);
            a[i + 1] = Half<false>::fma2(and_or<0x00f000f0u, 0x64006400u>(s), 0x2c002c00u, HIGH);
        }
    }
}

// A byte is value + 128. Bytes 0 and 2 of word i are pair 2 i, bytes 1 and 3 pair 2 i + 1.
template <bool BF16> DEVICE void int8_to_half(uint32_t w0, uint32_t w1, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t w = i / 2 ? w1 : w0;
        if constexpr (BF16) {
            // Seven bits of mantissa: 128 + the low seven bits, less 128 where the eighth is set, else 256.
            const uint32_t s = w >> (8 * (i % 2));
            a[i] = Half<true>::sub2(and_or<0x007f007fu, 0x43004300u>(s), and_xor<0x00800080u, 0x43804380u>(s));
        } else {
            a[i] = Half<false>::sub2(__byte_perm(w, 0x64646464u, i % 2 ? 0x4341 : 0x4240), 0x64806480u);
        }
    }
}

// Byte I of a word of int8 codes as value + INT8_BIAS_FP32. Times a scale of fp16 or bf16 that bias is exact in fp32.
constexpr float INT8_BIAS_FP32 = 32768.0f + 128.0f;
template <int I> DEVICE float int8_to_float_biased(uint32_t w) {
    return __uint_as_float(__byte_perm(w, 0x47000000u, 0x7404 | I << 4));
}

// Element 0 or 1 of a register, in both halves.
template <int I> DEVICE uint32_t both_halves(uint32_t r) {
    return __byte_perm(r, r, I == 0 ? 0x1010 : 0x3232);
}
