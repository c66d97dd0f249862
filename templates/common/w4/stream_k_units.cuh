// Work units of W: a strip of 32 rows, and one of SPLIT_K parts of its columns. How warp_pipeline.cuh and
// cta_pipeline.cuh deal units to blocks (stream-K), and where the partial sums go.
#pragma once
#include "common/w4/split_k_partials.cuh"
#include "common/w4/split_k_exchange.cuh"
#include "common/w4/epilogue.cuh"

// S and POSTS_OUT: as W4Stream's.
template <class S, bool POSTS_OUT> struct W4Units {
    static constexpr int N = S::N, SPLIT_K = S::SPLIT_K, STRIP = 32;
    static constexpr int QUADS = S::BLOCK_M * STRIP / 4;  // sums of a unit, by fours: rows 4 (q % 8) and on, token q / 8
    static constexpr int NUM_STRIPS = N / STRIP, COUNT = NUM_STRIPS * SPLIT_K;

    // The first unit of a block's run.
    static DEVICE int run_begin(int block) {
        const int each = COUNT / int(gridDim.x);
        return block * each + min_of(block, COUNT - each * int(gridDim.x));
    }
    static DEVICE void store(uint16_t* out, int strip, int q, float4 v) {
        constexpr Gate GATE = S::GATE;
        if constexpr (POSTS_OUT) post_outputs4<S::BF16>(out, q / 8, N, strip, q % 8, v.x, v.y, v.z, v.w);
        else store4<S::BF16, GATE>(out, q / 8, GATE == Gate::none ? N : N / 2, strip, q % 8, v.x, v.y, v.z, v.w);
    }
    // posts: the LL mailbox, [strip][SPLIT_K][QUADS].
    static DEVICE uint4* post_of(uint4* mailbox, int strip, int part, int q) {
        return mailbox + (int64_t(strip) * SPLIT_K + part) * QUADS + q;
    }
    // Fix-up of units first .. end - 1, by all THREADS of the block. For each strip whose part strip % SPLIT_K is among
    // them, it adds to own_of(unit - first, q) what other blocks wrote for the other parts, and zeroes that.
    template <int THREADS, class OwnOf>
    static DEVICE void collect(uint16_t* out, uint4* mailbox, int first, int end, int quads, const OwnOf& own_of) {
        const int lane = threadIdx.x % 32, num_sums = (end - first) * quads;
        for (int i = threadIdx.x; i - lane < num_sums; i += THREADS) {
            const int index = i / quads, q = i - index * quads, unit = first + index;
            const int strip = unit % NUM_STRIPS, mine = strip % SPLIT_K;
            const bool adds = i < num_sums && unit / NUM_STRIPS == mine;
            const uint4* from[SPLIT_K];
            uint4 parts[SPLIT_K];
#pragma unroll
            for (int k = 0; k < SPLIT_K; k++) from[k] = adds && k != mine ? post_of(mailbox, strip, k, q) : nullptr;
            float4 own = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (adds) own = own_of(index, q);  // while the others' are on their way
            ll_receive(parts, from);
            if (!adds) continue;
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int k = 0; k < SPLIT_K; k++) {
                add(sum, k == mine ? own : as_sums(parts[k]));
                if (k != mine) ll_store4(post_of(mailbox, strip, k, q), make_uint4(0, 0, 0, 0));  // for the next launch
            }
            store(out, strip, q, sum);
        }
    }
};
