// Sigmoid and SiLU in fp32: an error of a few units in the last place, for what is rounded to 16 bits.
#pragma once
#include "common/ptx/types.cuh"

DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float sigmoid(float x) { return reciprocal(1.0f + exp2_fast(-LOG2E * x)); }
DEVICE float silu_of(float x) { return x * sigmoid(x); }
