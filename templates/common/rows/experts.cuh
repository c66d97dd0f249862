// The sum of a token's experts.
#pragma once
#include "common/rows/vec.cuh"

// sum_k weights_k rows_k in fp32, in order, rounded once.
template <int TOP_K, Dtype D> DEVICE Vec8<D> expert_sum(const Vec8<D> (&rows)[TOP_K], const float (&weights)[TOP_K]) {
    float sum[8] = {};
#pragma unroll
    for (int k = 0; k < TOP_K; ++k) {
        float f[8];
        rows[k].unpack(f);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[j] = fmaf(weights[k], f[j], sum[j]);
    }
    Vec8<D> result;
    result.pack(sum);
    return result;
}
