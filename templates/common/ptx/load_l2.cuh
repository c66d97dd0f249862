// Loads of two and eight bytes through L2, since an SM's L1 may have the line from before it was written.
#pragma once
#include "common/ptx/types.cuh"

DEVICE uint16_t load2_l2(const void* p) {
    uint16_t v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return v;
}
DEVICE uint2 load8_l2(const void* p) {
    uint2 v;
    asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    return v;
}
