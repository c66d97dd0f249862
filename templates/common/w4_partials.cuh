// fp32 partial sums that blocks of one launch hand to each other, without fences, counters or flags.
//
// A word of the workspace is 0 while nothing is there. A sum is never stored as +0 (but as -0), so a reader that sees a
// word that is not 0 has the sum; it puts the 0 back for the next launch. Each word has one writer and one reader.
#pragma once
#include "common/types.cuh"

DEVICE float never_zero(float v) { return v == 0.0f ? -0.0f : v; }

// Through L2: L1 is not coherent.
DEVICE void put_partial(float4* p, float4 v) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(never_zero(v.x)),
                 "f"(never_zero(v.y)), "f"(never_zero(v.z)), "f"(never_zero(v.w))
                 : "memory");
}
// What is there now, or -0 where `wanted` is false. No branch: many of these are on their way together.
DEVICE float4 peek_partial(const float4* p, bool wanted) {
    float4 v;
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %5, 0; mov.b32 %0, 0f80000000; mov.b32 %1, 0f80000000; "
        "mov.b32 %2, 0f80000000; mov.b32 %3, 0f80000000; @wanted ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4]; }"
        : "=&f"(v.x), "=&f"(v.y), "=&f"(v.z), "=&f"(v.w)
        : "l"(p), "r"(int(wanted))
        : "memory");
    return v;
}
DEVICE bool is_there(float4 v) {
    return __float_as_uint(v.x) && __float_as_uint(v.y) && __float_as_uint(v.z) && __float_as_uint(v.w);
}
DEVICE void take_partial(float4* p) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(p), "f"(0.0f) : "memory");
}

DEVICE void add(float4& a, float4 b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; }
