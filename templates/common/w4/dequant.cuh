// Eight int4 weights (nibble = value + 8) of one word to four pairs of 16-bit floats, exactly value = nibble - 8.
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

// BIASED (bf16 only): gives value + 136; the caller subtracts 136 times the sum of the other operand.
constexpr uint32_t INT4_BIAS = 0xc308c308u;  // -136, twice

template <bool BF16, bool BIASED = false> DEVICE void int4_to_half(uint32_t w, uint32_t (&a)[4]) {
    static_assert(BF16 || !BIASED, "fp16 would lose too much to a bias of 1032");
    if constexpr (BF16) {
        // 128 + nibble: seven bits of mantissa leave room for one nibble at the bottom
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a[i] = and_or<0x000f000fu, 0x43004300u>(w >> (4 * i));
            if constexpr (!BIASED) a[i] = Half<true>::add2(a[i], INT4_BIAS);
        }
    } else {
        // 1024 + nibble, and 1024 + 16 nibble, which needs no shift: times 1/16, minus 72
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const uint32_t s = w >> (4 * i);
            a[i] = Half<false>::sub2(and_or<0x000f000fu, 0x64006400u>(s), 0x64086408u);
            a[i + 1] = Half<false>::fma2(and_or<0x00f000f0u, 0x64006400u>(s), 0x2c002c00u, 0xd480d480u);
        }
    }
}

// Element 0 or 1 of a register, in both halves.
template <int I> DEVICE uint32_t both_halves(uint32_t r) {
    return __byte_perm(r, r, I == 0 ? 0x1010 : 0x3232);
}
