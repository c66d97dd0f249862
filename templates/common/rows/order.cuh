// Floats as unsigned integers in the same order, and a warp's maximum: for arg-max and top-k.
#pragma once
#include "common/ptx/types.cuh"

// order_key(a) < order_key(b) if and only if a < b as floats. NaN of either sign is the greatest, as in torch.argmax
// and torch.topk; -0 equals +0. No key is 0, which means "none".
DEVICE uint32_t order_key(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 becomes +0
    const uint32_t key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return x == x ? key : 0xffffffffu;
}

// The float that order_key came from; a NaN for NaN's key.
DEVICE float key_value(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

DEVICE uint32_t warp_max_u32(uint32_t x) {
    if constexpr (ARCH >= 80) {
        uint32_t y;
        asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
        return y;
    } else {
#pragma unroll
        for (int mask = 16; mask; mask >>= 1) {
            const uint32_t other = __shfl_xor_sync(0xffffffffu, x, mask);
            x = other > x ? other : x;
        }
        return x;
    }
}
