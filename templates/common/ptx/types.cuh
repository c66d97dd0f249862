// Numbers and registers. No CUDA headers: the whole source is in the text, and NVRTC parses in milliseconds.
#pragma once
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;

#define DEVICE __device__ __forceinline__

constexpr float LOG2E = 1.4426950408889634f;
constexpr float INF = __builtin_bit_cast(float, 0x7f800000);

DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
DEVICE constexpr int min_of(int a, int b) { return a < b ? a : b; }
DEVICE constexpr int max_of(int a, int b) { return a > b ? a : b; }

// Two 16-bit floats travel in a uint32_t, element 0 in the low half. BF16 picks the format.
template <bool BF16> struct Half;

template <> struct Half<false> {
    static DEVICE float to_float(uint16_t h) {
        float f;
        asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
        return f;
    }
    static DEVICE uint16_t from_float(float f) {
        uint16_t h;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
        return h;
    }
    static DEVICE uint32_t pack(float lo, float hi) {
        if constexpr (ARCH >= 80) {
            uint32_t r;
            asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
            return r;
        } else {
            return uint32_t(from_float(lo)) | uint32_t(from_float(hi)) << 16;
        }
    }
    static DEVICE float2 unpack(uint32_t r) {
        return make_float2(to_float(uint16_t(r)), to_float(uint16_t(r >> 16)));
    }
    static DEVICE uint32_t mul2(uint32_t a, uint32_t b) {
        uint32_t r;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
    }
    static DEVICE uint32_t add2(uint32_t a, uint32_t b) {
        uint32_t r;
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
    }
    static DEVICE uint32_t sub2(uint32_t a, uint32_t b) {
        uint32_t r;
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
    }
    static DEVICE uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
        uint32_t r;
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
        return r;
    }
};

template <> struct Half<true> {
    static DEVICE float to_float(uint16_t h) { return __uint_as_float(uint32_t(h) << 16); }
    static DEVICE uint16_t from_float(float f) {
        uint16_t h;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
        return h;
    }
    static DEVICE uint32_t pack(float lo, float hi) {
        uint32_t r;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
        return r;
    }
    static DEVICE float2 unpack(uint32_t r) {
        return make_float2(__uint_as_float(r << 16), __uint_as_float(r & 0xffff0000u));
    }
    // sm80 has only fma for bf16x2: a * 1 + b and a * b + (-0) are exact spellings of add and mul.
    static DEVICE uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
        uint32_t r;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
        return r;
    }
    static DEVICE uint32_t mul2(uint32_t a, uint32_t b) { return fma2(a, b, 0x80008000u); }
    static DEVICE uint32_t add2(uint32_t a, uint32_t b) { return fma2(a, 0x3f803f80u, b); }
    static DEVICE uint32_t sub2(uint32_t a, uint32_t b) { return fma2(b, 0xbf80bf80u, a); }
};

// 2^x. log2(e) is folded into the softmax scale, so that one instruction makes a probability.
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// tanh by exponentials: absolute error under 2e-7 where tanh.approx gives 5e-4, and the same on every arch.
DEVICE float tanh_exact(float x) {
    const float e = exp2_fast(-2.0f * LOG2E * fabsf(x));
    return copysignf((1.0f - e) / (1.0f + e), x);
}

template <int WIDTH = 32> DEVICE float warp_max(float x) {
#pragma unroll
    for (int mask = WIDTH / 2; mask; mask >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
    return x;
}

template <int WIDTH = 32> DEVICE float warp_sum(float x) {
#pragma unroll
    for (int mask = WIDTH / 2; mask; mask >>= 1) x += __shfl_xor_sync(0xffffffffu, x, mask);
    return x;
}
