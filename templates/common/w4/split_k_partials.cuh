// Split-K partials: fp32 sums that blocks of one launch exchange through L2, since L1 is not coherent.
#pragma once
#include "common/ptx/types.cuh"

DEVICE void put_partial(float4* p, float4 v) {
    asm volatile("st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}
// Zeros where not `wanted`. Predicated, not a branch: many are in flight at once.
DEVICE float4 get_partial(const float4* p, bool wanted) {
    float4 v;
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0; "
        "@wanted ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4]; }"
        : "=&f"(v.x), "=&f"(v.y), "=&f"(v.z), "=&f"(v.w)
        : "l"(p), "r"(int(wanted))
        : "memory");
    return v;
}

// Increments the counter and returns its old value. Acquire-release: a block that counts later and then passes a
// barrier sees what this block wrote before its barrier.
DEVICE uint32_t arrive(uint32_t* counter) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

DEVICE void add(float4& a, float4 b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; }
