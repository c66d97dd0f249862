// The activation of Gemma's MLPs.
#pragma once
#include "common/ptx/types.cuh"

// In the order of operations that torch uses: where 1 + tanh cancels, its error is part of what the model computes.
DEVICE float gelu_tanh(float x) {
    constexpr float SQRT_2_OVER_PI = 0.7978845608028654f;
    return 0.5f * x * (1.0f + tanhf(SQRT_2_OVER_PI * fmaf(0.044715f, x * x * x, x)));
}
