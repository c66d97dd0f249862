// Flag-in-data exchange between GPUs, as ll_exchange.cuh between the blocks of one: a rank stores words into its peers'
// memory, each polls its own. A word is zero until it is posted, and whoever reads it zeroes it again.
//
// Relaxed accesses are enough, since a word is its own flag and orders no other. PTX ISA 8.8, "ld", "st": .sys is the
// scope of several GPUs; each 32-bit word of a vector arrives whole.
#pragma once
#include "common/pipeline/ll_exchange.cuh"

constexpr uint32_t POLLS_A_LOOK = 1024;        // polls between two looks at the abort word, which lies in host memory
constexpr uint32_t ABORTED_PAIR = 0x7fff7fffu; // two NaNs, of fp16 and of bf16

DEVICE void peer_store4(uint4* p, uint4 words) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(words.x), "r"(words.y),
                 "r"(words.z), "r"(words.w)
                 : "memory");
}
// Predicated, as ll_load4_if.
DEVICE void peer_load4_if(bool wanted, uint4& v, const uint4* p) {
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %5, 0; "
        "@wanted ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(p), "r"(int(wanted))
        : "memory");
}
DEVICE uint32_t peer_load(const uint32_t* p) {
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

DEVICE uint4 ll_encode_pairs(uint4 v) {
    return make_uint4(ll_encode_pair(v.x), ll_encode_pair(v.y), ll_encode_pair(v.z), ll_encode_pair(v.w));
}

// Polls four words at each of COUNT places until all have arrived, and zeroes them there. place(i): their address, null
// where nothing is polled; it is asked again at each use, so that no registers hold it. Once *abort is not zero what is
// still missing is NaN. All lanes of a warp call it and return together.
template <int COUNT, typename Place>
DEVICE void peer_receive(uint4 (&words)[COUNT], const uint32_t* abort, Place place) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) words[i] = make_uint4(0, 0, 0, 0);
    for (uint32_t polls = 1;; polls++) {
        bool missing = false;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            peer_load4_if((place(i) != nullptr) & !ll_all_valid(words[i]), words[i], place(i));
#pragma unroll
        for (int i = 0; i < COUNT; i++) missing |= (place(i) != nullptr) & !ll_all_valid(words[i]);
        if (!__any_sync(0xffffffffu, missing)) break;
        if (polls % POLLS_A_LOOK == 0 && __any_sync(0xffffffffu, peer_load(abort) != 0)) {
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                if (!ll_all_valid(words[i])) words[i] = make_uint4(ABORTED_PAIR, ABORTED_PAIR, ABORTED_PAIR, ABORTED_PAIR);
            break;
        }
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        if (place(i) != nullptr) *place(i) = make_uint4(0, 0, 0, 0);
}
