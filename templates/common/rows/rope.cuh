// Rotary embedding: accurate sine and cosine of large angles, and the rotation as Hugging Face rounds it.
#pragma once
#include "common/ptx/types.cuh"

// sin and cos of x, error below 7.1e-8 absolute and 1.7e-7 relative for |x| <= 2^19 (measured). (sincosf takes a slow path with a stack frame above
// 105615, and a position may be 262143.) x is brought to [-pi/4, pi/4] with pi/2 as a sum of three floats: n has at
// most 19 bits, so n * PIO2_A is a multiple of 2^-23 and the first step is exact; the third part keeps the relative
// error where the result is close to zero. Then the Taylor series, whose first omitted terms are below 2e-9.
DEVICE void sincos_accurate(float x, float& sin_out, float& cos_out) {
    constexpr float TWO_OVER_PI = 0.636619772f;
    constexpr float PIO2_A = 1.57079637f, PIO2_B = -4.37113883e-8f, PIO2_C = -1.71512451e-15f;
    const float n = rintf(x * TWO_OVER_PI);
    float r = fmaf(n, -PIO2_A, x);
    r = fmaf(n, -PIO2_B, r);
    r = fmaf(n, -PIO2_C, r);
    const float r2 = r * r;
    float s = fmaf(r2, 2.75573192e-6f, -1.98412698e-4f);
    s = fmaf(r2, s, 8.33333333e-3f);
    s = fmaf(r2, s, -1.66666667e-1f);
    s = fmaf(r2 * r, s, r);
    float c = fmaf(r2, -2.75573192e-7f, 2.48015873e-5f);
    c = fmaf(r2, c, -1.38888889e-3f);
    c = fmaf(r2, c, 4.16666667e-2f);
    c = fmaf(r2, c, -0.5f);
    c = fmaf(r2, c, 1.0f);
    const int quadrant = int(n);
    const float sin_abs = quadrant & 1 ? c : s, cos_abs = quadrant & 1 ? s : c;
    sin_out = quadrant & 2 ? -sin_abs : sin_abs;
    cos_out = (quadrant + 1) & 2 ? -cos_abs : cos_abs;
}

// Rotates two elements of the low half of a head against their partners in the high half. All are pairs of 16-bit
// floats, and each product and each sum is rounded: x * cos + rotate_half(x) * sin in the activations' dtype.
template <bool BF16> DEVICE void rotate2(uint32_t& low, uint32_t& high, uint32_t cos2, uint32_t sin2) {
    using H = Half<BF16>;
    const uint32_t new_low = H::sub2(H::mul2(low, cos2), H::mul2(high, sin2));
    high = H::add2(H::mul2(high, cos2), H::mul2(low, sin2));
    low = new_low;
}
