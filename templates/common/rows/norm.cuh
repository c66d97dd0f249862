// A row shared by ROW_THREADS threads: thread t holds vectors t, t + ROW_THREADS, ... of eight elements.
#pragma once
#include "common/rows/vec.cuh"

DEVICE constexpr int round_up_to_warps(int threads) { return (threads + 31) / 32 * 32; }

// Sum over a row's threads, the same bits in each of them. scratch: 16-byte aligned, SCRATCH_FLOATS<ROW_THREADS> for
// each row of the block, not reused before the next barrier. Every thread of the block must call it.
template <int ROW_THREADS> constexpr int SCRATCH_FLOATS = ROW_THREADS == 32 ? 0 : (ROW_THREADS / 32 + 3) / 4 * 4;

template <int ROW_THREADS> DEVICE float row_sum(float x, float* scratch) {
    static_assert(ROW_THREADS % 32 == 0, "a row takes whole warps");
    constexpr int WARPS = ROW_THREADS / 32;
    x = warp_sum(x);
    if constexpr (WARPS > 1) {
        float* row = scratch + threadIdx.x / ROW_THREADS * SCRATCH_FLOATS<ROW_THREADS>;
        if (threadIdx.x % 32 == 0) row[threadIdx.x % ROW_THREADS / 32] = x;
        __syncthreads();
        // Every thread adds the warps' sums itself: broadcast reads are faster than more shuffles.
        float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < WARPS; i += 4) {
            const float4 v = *reinterpret_cast<const float4*>(row + i);
            part[0] += v.x;
            if (i + 1 < WARPS) part[1] += v.y;
            if (i + 2 < WARPS) part[2] += v.z;
            if (i + 3 < WARPS) part[3] += v.w;
        }
        x = (part[0] + part[1]) + (part[2] + part[3]);
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
