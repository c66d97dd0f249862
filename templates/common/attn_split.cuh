// Split-KV attention: which tiles of a sequence a block visits, and how partial results are merged.
#pragma once
#include "common/copy.cuh"

// What one block reads: keys [first_key, end_key) are seen by at least one of its queries; of the tiles of BLOCK_N keys
// (aligned to BLOCK_N) that hold them, this split takes [first_tile, end_tile).
struct KvRange {
    int first_key, end_key;
    int first_tile, end_tile;
};

// The queries sit at positions first_position..last_position (negative: sees nothing). The visible tiles are dealt out
// evenly, so that a fixed grid stays balanced while the context grows.
template <int WINDOW, int BLOCK_N>
DEVICE KvRange kv_range(int first_position, int last_position, int split, int num_splits) {
    KvRange r;
    r.end_key = max(last_position + 1, 0);
    r.first_key = WINDOW > 0 ? max(first_position - WINDOW + 1, 0) : 0;
    const int first = r.first_key / BLOCK_N;
    const int count = r.end_key > r.first_key ? (r.end_key + BLOCK_N - 1) / BLOCK_N - first : 0;
    r.first_tile = first + int(int64_t(count) * split / num_splits);
    r.end_tile = first + int(int64_t(count) * (split + 1) / num_splits);
    return r;
}

DEVICE void add(float4& sum, float4 x) { sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w; }

// The teams of a block each saw other keys. From each team's maximum and sum of a row ([NUM_TEAMS, BLOCK_M], base 2):
// the block's maximum (-inf if the row saw no key) and its sum relative to that.
template <int NUM_TEAMS, int BLOCK_M>
DEVICE void merge_stats(const float* maxima, const float* sums, float* row_max, float* row_sum, int row) {
    float top = -INF, sum = 0;
#pragma unroll
    for (int i = 0; i < NUM_TEAMS; ++i) top = fmaxf(top, maxima[i * BLOCK_M + row]);
#pragma unroll
    for (int i = 0; i < NUM_TEAMS; ++i) {
        const float x = maxima[i * BLOCK_M + row];
        if (x > -INF) sum += sums[i * BLOCK_M + row] * exp2_fast(x - top);
    }
    row_max[row] = top;
    row_sum[row] = sum;
}

// What a team's accumulators, relative to its maximum, are worth relative to the block's maximum.
template <int NUM_TEAMS, int BLOCK_M> DEVICE float share_of_max(const float* maxima, int team, int row) {
    float top = -INF;
#pragma unroll
    for (int i = 0; i < NUM_TEAMS; ++i) top = fmaxf(top, maxima[i * BLOCK_M + row]);
    const float own = maxima[team * BLOCK_M + row];
    return own == -INF ? 0.0f : exp2_fast(own - top);
}

// A cluster's blocks read each other's shared memory. `at` is a place in one's own; the result the same place in rank's.
DEVICE uint32_t cluster_address(const void* at, int rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(smem_addr(at)), "r"(rank));
    return there;
}
DEVICE float cluster_load(const float* at, int rank) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(cluster_address(at, rank)) : "memory");
    return v;
}
DEVICE float4 cluster_load(const float4* at, int rank) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(cluster_address(at, rank))
                 : "memory");
    return v;
}
// All threads of all blocks of the cluster; what they wrote to shared memory before is then visible.
DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// From L2: partial results were written by other SMs.
DEVICE float load_l2(const float* p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}
DEVICE float4 load_l2(const float4* p) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

template <bool BF16> DEVICE void store_half4(uint16_t* p, float4 v) {
    *reinterpret_cast<uint2*>(p) = make_uint2(Half<BF16>::pack(v.x, v.y), Half<BF16>::pack(v.z, v.w));
}

// Partial results in the workspace: o [rows, NUM_SPLITS, HEAD_DIM], each split normalised by its own sum, then
// lse [rows, NUM_SPLITS] in base 2, -inf where the split saw nothing (its o is then not written).
// One block merges one row: out = sum_s 2^(lse_s - max) o_s / sum_s 2^(lse_s - max). THREADS is HEAD_DIM / 4 times the
// number of slices that the splits are dealt to.
template <int HEAD_DIM, int NUM_SPLITS, int THREADS, bool BF16>
DEVICE void combine_row(uint16_t* out, const float* partial_o, const float* partial_lse, int row) {
    constexpr int COLUMNS = HEAD_DIM / 4, SLICES = THREADS / COLUMNS;
    constexpr int PER_SLICE = (NUM_SPLITS + SLICES - 1) / SLICES, PER_LANE = (NUM_SPLITS + 31) / 32;
    constexpr int AHEAD = min_of(PER_SLICE, 8);  // loads a thread has under way
    static_assert(THREADS % COLUMNS == 0 && COLUMNS % 32 == 0, "a warp belongs to one slice");
    __shared__ float4 sums[THREADS];
    __shared__ float weights[NUM_SPLITS];
    const int column = threadIdx.x % COLUMNS, slice = threadIdx.x / COLUMNS, lane = threadIdx.x % 32;
    const float4* o = reinterpret_cast<const float4*>(partial_o) + int64_t(row) * NUM_SPLITS * COLUMNS + column;
    const float* lse = partial_lse + int64_t(row) * NUM_SPLITS;

    float4 v[AHEAD];
    auto load = [&](int i) {
        const int split = slice + i * SLICES;
        return split < NUM_SPLITS ? load_l2(o + split * COLUMNS) : make_float4(0, 0, 0, 0);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) v[i] = load(i);  // while the weights are made
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
            if (w > 0) add(sum, make_float4(w * v[j].x, w * v[j].y, w * v[j].z, w * v[j].w));
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
        for (int i = 1; i < SLICES; ++i) add(sum, sums[column + i * COLUMNS]);
    }
    store_half4<BF16>(out + int64_t(row) * HEAD_DIM + 4 * column, sum);
}

// 16 bytes that are read once, not kept in L1, or zeros where `valid` is false: then nothing is read.
DEVICE uint4 load_or_zero(const void* p, bool valid) {
    uint4 v;
    asm volatile(
        "{\n.reg .pred ok;\nsetp.ne.b32 ok, %5, 0;\n"
        "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
        "@ok ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(p), "r"(int(valid)));
    return v;
}
