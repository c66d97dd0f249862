// Split-KV attention: how partial results are combined.
#pragma once
#include "common/attention/tile_iterator.cuh"
#include "common/ptx/copy.cuh"
#include "common/ptx/load_l2.cuh"

DEVICE void add(float4& sum, float4 x) { sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w; }
DEVICE void add(float4& sum, float w, float4 x) { sum.x += w * x.x, sum.y += w * x.y, sum.z += w * x.z, sum.w += w * x.w; }

// Combines the teams of a block, each of which saw other keys of one row. From each team's maximum and sum (base 2,
// NUM_TEAMS of them, `pitch` apart): the factor of a team's partial result, and the row's log-sum-exp. 0 and -inf: no
// key.
template <int NUM_TEAMS> struct RowMerge {
    float weight[NUM_TEAMS], lse;
    DEVICE RowMerge(const float* maxima, const float* sums, int pitch) {
        float top = -INF, total = 0;
#pragma unroll
        for (int i = 0; i < NUM_TEAMS; ++i) top = fmaxf(top, maxima[i * pitch]);
#pragma unroll
        for (int i = 0; i < NUM_TEAMS; ++i) {
            weight[i] = top == -INF ? 0.0f : exp2_fast(maxima[i * pitch] - top);
            total += weight[i] * sums[i * pitch];
        }
        lse = total > 0 ? top + log2f(total) : -INF;
        const float scale = total > 0 ? 1.0f / total : 0.0f;
#pragma unroll
        for (int i = 0; i < NUM_TEAMS; ++i) weight[i] *= scale;
    }
};

template <bool BF16> DEVICE void store_half4(uint16_t* p, float4 v) {
    *reinterpret_cast<uint2*>(p) = make_uint2(Half<BF16>::pack(v.x, v.y), Half<BF16>::pack(v.z, v.w));
}

// Combine kernel. Partials in the workspace: o [rows, NUM_SPLITS, HEAD_DIM], each normalised by its split's own sum,
// then lse [rows, NUM_SPLITS] in base 2; -inf where a split saw no key, and its o is not written. A block of SLICES *
// COLUMNS threads combines 4 * COLUMNS elements of a row; its slices share the splits:
// out = sum_s 2^(lse_s - max) o_s / sum_s 2^(lse_s - max).
template <int HEAD_DIM, int NUM_SPLITS, int SLICES, int COLUMNS, bool BF16>
DEVICE void combine_row(uint16_t* out, const float* partial_o, const float* partial_lse, int row, int part) {
    constexpr int PER_SLICE = (NUM_SPLITS + SLICES - 1) / SLICES, PER_LANE = (NUM_SPLITS + 31) / 32;
    constexpr int AHEAD = min_of(PER_SLICE, 8);  // loads of a thread in flight
    static_assert(HEAD_DIM % (4 * COLUMNS) == 0 && COLUMNS % 32 == 0, "whole warps in a slice");
    __shared__ float4 sums[SLICES * COLUMNS];
    __shared__ float weights[NUM_SPLITS];
    const int slice = threadIdx.x / COLUMNS, lane = threadIdx.x % 32;
    const int column = part * COLUMNS + threadIdx.x % COLUMNS;
    const float4* o = reinterpret_cast<const float4*>(partial_o) + int64_t(row) * NUM_SPLITS * (HEAD_DIM / 4) + column;
    const float* lse = partial_lse + int64_t(row) * NUM_SPLITS;

    float4 v[AHEAD];
    auto load = [&](int i) {
        const int split = slice + i * SLICES;
        return split < NUM_SPLITS ? load_l2(o + split * (HEAD_DIM / 4)) : make_float4(0, 0, 0, 0);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) v[i] = load(i);  // while the weights are computed
    if (threadIdx.x < 32) {
        float x[PER_LANE], top = -INF, total = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            x[i] = lane + 32 * i < NUM_SPLITS ? load_l2(lse + lane + 32 * i) : -INF;
            top = fmaxf(top, x[i]);
        }
        top = warp_max(top);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            x[i] = x[i] == -INF ? 0.0f : exp2_fast(x[i] - top);
            total += x[i];
        }
        total = warp_sum(total);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (lane + 32 * i < NUM_SPLITS) weights[lane + 32 * i] = total > 0 ? x[i] / total : 0.0f;
    }
    __syncthreads();
    float4 sum = make_float4(0, 0, 0, 0);
    for (int i = 0; i < PER_SLICE; i += AHEAD) {
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const int split = slice + (i + j) * SLICES;
            const float w = split < NUM_SPLITS ? weights[split] : 0.0f;
            // a split without keys left garbage in its place
            if (w > 0) add(sum, w, v[j]);
        }
        if (i + AHEAD < PER_SLICE) {
#pragma unroll
            for (int j = 0; j < AHEAD; ++j) v[j] = load(i + AHEAD + j);
        }
    }
    if constexpr (SLICES > 1) {
        sums[threadIdx.x] = sum;
        __syncthreads();
        if (slice > 0) return;
#pragma unroll
        for (int i = 1; i < SLICES; ++i) add(sum, sums[threadIdx.x + i * COLUMNS]);
    }
    store_half4<BF16>(out + int64_t(row) * HEAD_DIM + 4 * column, sum);
}
