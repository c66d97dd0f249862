// Clamps as a model's bounded linears have them: to numbers that the tensor's dtype holds, so that clamping before
// rounding to it and after are the same.
#pragma once
#include "common/rows/vec.cuh"

// Clamps two 16-bit floats; NaN stays NaN.
template <bool BF16> DEVICE uint32_t clamp2(uint32_t x, uint32_t lowest, uint32_t highest) {
    using H = Half<BF16>;
    if constexpr (ARCH < 80) {
        const float2 a = H::unpack(x), low = H::unpack(lowest), high = H::unpack(highest);
        return H::pack(a.x < low.x ? low.x : a.x > high.x ? high.x : a.x,
                       a.y < low.y ? low.y : a.y > high.y ? high.y : a.y);
    } else if constexpr (BF16) {
        asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(lowest));
        asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(highest));
        return x;
    } else {
        asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(x) : "r"(lowest));
        asm("min.NaN.f16x2 %0, %0, %1;" : "+r"(x) : "r"(highest));
        return x;
    }
}

// The lowest and the highest value of a tensor of 16-bit floats, each twice.
template <Dtype D> struct Bounds {
    static constexpr bool BF16 = D == Dtype::bf16;
    uint32_t lowest, highest;

    DEVICE void set(float2 bounds) {
        lowest = Half<BF16>::pack(bounds.x, bounds.x);
        highest = Half<BF16>::pack(bounds.y, bounds.y);
    }
    DEVICE void clamp(Vec8<D>& v) const {
        const uint4 x = v.part[0];
        v.part[0] = make_uint4(clamp2<BF16>(x.x, lowest, highest), clamp2<BF16>(x.y, lowest, highest),
                               clamp2<BF16>(x.z, lowest, highest), clamp2<BF16>(x.w, lowest, highest));
    }
};
