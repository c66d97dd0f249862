// Words that blocks of one launch hand to each other through L2 with no barrier between them: a word is zero until it is
// posted, and who needs it reads it until it no longer is. So nothing is fenced and nothing is counted, and a value is
// there after one way to L2 and one from it. A launch finds every word zero, and leaves it so.
//
// PTX ISA 8.8, "ld", "st": relaxed accesses at gpu scope are never served by L1; of a vector each word comes whole.
#pragma once
#include "common/types.cuh"

// What stands for a zero among posted words: -0, of a float or of two 16-bit ones.
DEVICE uint32_t posted_float(float v) {
    const uint32_t bits = __float_as_uint(v);
    return bits == 0 ? 0x80000000u : bits;
}
DEVICE uint32_t posted_pair(uint32_t pair) { return pair == 0 ? 0x80008000u : pair; }

DEVICE void post(uint32_t* p, uint32_t word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(word) : "memory");
}
DEVICE void post4(uint4* p, uint4 words) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(words.x), "r"(words.y),
                 "r"(words.z), "r"(words.w)
                 : "memory");
}

// Waits for four words at each address; zeros where it is null.
template <int COUNT> DEVICE void receive(uint4 (&words)[COUNT], const uint4* const (&from)[COUNT]) {
    bool missing;
    do {
        missing = false;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            asm volatile(
                "{ .reg .pred wanted; setp.ne.u64 wanted, %4, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; "
                "mov.b32 %3, 0; @wanted ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                : "=&r"(words[i].x), "=&r"(words[i].y), "=&r"(words[i].z), "=&r"(words[i].w)
                : "l"(from[i])
                : "memory");
        }
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            missing |= from[i] != nullptr &&
                       (words[i].x == 0 || words[i].y == 0 || words[i].z == 0 || words[i].w == 0);
    } while (missing);
}
