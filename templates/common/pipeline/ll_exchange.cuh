// Flag-in-data exchange between the blocks of one launch through L2, as NCCL's LL protocol: the data word is its own
// flag. A word is zero until it is written, and the reader polls it until it is not. So there is no fence, no barrier
// and no counter: the latency is one store to L2 and one load from it. Every word is zero at a launch's start and at
// its end.
//
// PTX ISA 8.8, "ld", "st": relaxed accesses at gpu scope bypass L1; each 32-bit word of a vector arrives whole.
#pragma once
#include "common/ptx/types.cuh"

// Zeros are sent as -0, of a float or of both halves of a pair of 16-bit floats.
DEVICE uint32_t ll_encode_float(float v) {
    const uint32_t bits = __float_as_uint(v);
    return bits == 0 ? 0x80000000u : bits;
}
DEVICE uint32_t ll_encode_pair(uint32_t pair) { return pair == 0 ? 0x80008000u : pair; }

DEVICE void ll_store(uint32_t* p, uint32_t word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(word) : "memory");
}
DEVICE void ll_store2(uint2* p, uint2 words) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(words.x), "r"(words.y) : "memory");
}
DEVICE void ll_store4(uint4* p, uint4 words) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(words.x), "r"(words.y),
                 "r"(words.z), "r"(words.w)
                 : "memory");
}

DEVICE uint32_t ll_load(const uint32_t* p) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
// Loads four words where `wanted`; leaves `v` unchanged elsewhere. Predicated, not a branch: many are in flight at
// once.
DEVICE void ll_load4_if(bool wanted, uint4& v, const uint4* p) {
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %5, 0; "
        "@wanted ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(p), "r"(int(wanted))
        : "memory");
}
DEVICE void ll_load2_if(bool wanted, uint2& v, const uint2* p) {
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %3, 0; @wanted ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2]; }"
        : "+r"(v.x), "+r"(v.y)
        : "l"(p), "r"(int(wanted))
        : "memory");
}
DEVICE bool ll_all_valid(const uint4& v) { return v.x != 0 && v.y != 0 && v.z != 0 && v.w != 0; }

// Polls four words at each address until all have arrived; zeros where the address is null. All lanes of a warp call it
// and return together: lanes that return alone slow down every later shuffle. Words that have arrived are not loaded
// again, since many blocks poll the same few lines.
template <int COUNT> DEVICE void ll_receive(uint4 (&words)[COUNT], const uint4* const (&from)[COUNT]) {
    bool missing[COUNT], any;
#pragma unroll
    for (int i = 0; i < COUNT; i++) words[i] = make_uint4(0, 0, 0, 0), missing[i] = from[i] != nullptr;
    do {
#pragma unroll
        for (int i = 0; i < COUNT; i++) ll_load4_if(missing[i], words[i], from[i]);
        any = false;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            missing[i] = missing[i] && !ll_all_valid(words[i]);
            any |= missing[i];
        }
    } while (__any_sync(0xffffffffu, any));
}

// Increments the counter and returns its old value. Relaxed: it orders no other access.
DEVICE uint32_t count_in(uint32_t* counter) {
    uint32_t before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}
