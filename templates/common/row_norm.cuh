// A row shared by ROW_THREADS threads: thread t holds vectors t, t + ROW_THREADS, ... of eight elements.
#pragma once
#include "common/row_vec.cuh"

DEVICE constexpr int round_up_to_warps(int threads) { return (threads + 31) / 32 * 32; }

DEVICE constexpr int power_of_two_at_least(int n) {
    int p = 1;
    while (p < n) p *= 2;
    return p;
}

// The sum over a row's threads, the same bits in each of them. scratch: one float a warp of the block, not used again
// before the next barrier. Every thread of the block must call it.
template <int ROW_THREADS> DEVICE float row_sum(float x, float* scratch) {
    static_assert(ROW_THREADS % 32 == 0, "a row takes whole warps");
    constexpr int WARPS = ROW_THREADS / 32, WIDTH = power_of_two_at_least(WARPS);
    x = warp_sum(x);
    if constexpr (WARPS > 1) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (lane == 0) scratch[warp] = x;
        __syncthreads();
        const int other = lane % WIDTH;
        x = warp_sum<WIDTH>(other < WARPS ? scratch[warp / WARPS * WARPS + other] : 0.0f);
    }
    return x;
}

// (mean of squares + eps)^(-1/2), from the sum of squares over DIM elements.
template <int DIM> DEVICE float inverse_rms(float sum_of_squares, float eps) {
    return rsqrtf(sum_of_squares * (1.0f / DIM) + eps);
}

DEVICE float sum_of_squares8(const float (&x)[8]) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = fmaf(x[j], x[j], sum);
    return sum;
}
