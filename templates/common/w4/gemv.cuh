// W4A16 GEMV with up to 8 tokens, bound by reading W, with register-direct loads. w4a16_gemm and moe_w4a16 use it where
// body=gemv. S and Rows: as for W4Gemm.
//
// A warp keeps STEPS k-tiles of its strips in registers and issues the next load into a register as soon as it is used.
// The first loads are in flight before the kernel that makes x has completed. WARPS_K warps split K; their sums are
// added through shared memory, in their order. SPLIT_K blocks split a tile likewise; the block that starts last adds
// the sums that the others wrote to the LL mailbox, in their order. By then all of them have started and none of them
// waits, so the grid may have any size.
#pragma once
#include "common/ptx/copy.cuh"
#include "common/w4/formats.cuh"
#include "common/w4/split_k_partials.cuh"
#include "common/w4/split_k_exchange.cuh"
#include "common/w4/rows.cuh"
#include "common/w4/epilogue.cuh"

// 16 or 8 bytes of W that are read once, 4 that an earlier kernel wrote; zeros, and no access, where not `valid`.
DEVICE uint4 w4_words(const uint4* p, bool valid) {
    uint4 v;
    asm volatile(
        "{ .reg .pred valid; setp.ne.b32 valid, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0; "
        "@valid ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(p), "r"(int(valid)));
    return v;
}
DEVICE uint2 w4_scales(const uint2* p, bool valid) {
    uint2 v;
    asm volatile(
        "{ .reg .pred valid; setp.ne.b32 valid, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0; "
        "@valid ld.global.nc.v2.u32 {%0, %1}, [%2]; }"
        : "=&r"(v.x), "=&r"(v.y)
        : "l"(p), "r"(int(valid)));
    return v;
}
DEVICE uint4 w4_scales(const uint4* p, bool valid) {  // and minima
    uint4 v;
    asm volatile(
        "{ .reg .pred valid; setp.ne.b32 valid, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0; "
        "@valid ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(p), "r"(int(valid)));
    return v;
}
DEVICE uint32_t w4_token(const uint32_t* p, bool valid) {
    uint32_t v;
    asm volatile("{ .reg .pred valid; setp.ne.b32 valid, %2, 0; mov.b32 %0, 0; @valid ld.global.u32 %0, [%1]; }"
                 : "=&r"(v)
                 : "l"(p), "r"(int(valid))
                 : "memory");
    return v;
}

template <class S> struct W4Gemv {
    typedef typename S::Weights W;
    static constexpr int N = S::N, K = S::K, WARPS_K = S::WARPS_K, SPLIT_K = S::SPLIT_K, DEALT = WARPS_K * SPLIT_K;
    static constexpr bool BF16 = S::BF16, PERSISTENT = S::BLOCKS_PER_SM > 0;
    static constexpr Gate GATE = S::GATE;
    static constexpr int STRIP = 32, STRIPS = S::WARP_N / STRIP, WARPS_N = S::BLOCK_N / S::WARP_N;
    static constexpr int BLOCK_STRIPS = S::BLOCK_N / STRIP, THREADS = 32 * WARPS_N * WARPS_K;
    static constexpr int NUM_STRIPS = N / STRIP, NUM_K_TILES = K / STRIP, NUM_GROUPS = K / S::GROUP_SIZE;
    static constexpr int TILES_N = ceil_div(N, S::BLOCK_N), OUT_WIDTH = GATE == Gate::none ? N : N / 2;
    // One iteration: STEPS k-tiles a warp, dealt to the warps one by one, so that together they read whole rows of
    // tiles.
    static constexpr int STEPS = S::BLOCK_K / STRIP / WARPS_K, TURNS = ceil_div(NUM_K_TILES, STEPS * DEALT);
    static constexpr int TILE_TOKENS = 8, TILE_QUADS = WARPS_N * WARPS_K * STRIPS * TILE_TOKENS * 8;
    static constexpr int EXCHANGE_CHUNKS = WARPS_K == 1 ? 0 : (PERSISTENT ? 2 : 1) * TILE_QUADS;
    static_assert(S::BLOCK_M == TILE_TOKENS && STEPS > 0 && !S::WGMMA && S::WARPS_M == 1);
    static_assert(SPLIT_K == 1 || (WARPS_K > 1 && !PERSISTENT));
    static_assert(ARCH >= 75, "m8n8k4's operands lie otherwise");

    // The operands of one iteration of a warp.
    struct Weights {
        uint4 words[STEPS][STRIPS][W::LANE_CHUNKS];
        typename W::ScalesQuad scales[STEPS][STRIPS][W::TILE_GROUPS];  // of rows 4 g .. 4 g + 3, lane = 4 g + t

        DEVICE void load(int step, const uint4* w, const uint2* s, W4Tile tile, int warp_n, int kt, bool any) {
            const int lane = threadIdx.x % 32;
#pragma unroll
            for (int i = 0; i < STRIPS; i++) {
                const int strip = tile.n_strip + warp_n * STRIPS + i;
                const bool valid = any && (N % S::BLOCK_N == 0 || strip < NUM_STRIPS) &&
                                   (NUM_K_TILES % (STEPS * DEALT) == 0 || kt < NUM_K_TILES);
                const int64_t row = int64_t(tile.matrix) * NUM_STRIPS + strip;
                typedef const typename W::ScalesQuad* Quads;
                words[step][i][0] = w4_words(w + (row * NUM_K_TILES + kt) * W::TILE_CHUNKS + lane, valid);
                if constexpr (W::LANE_CHUNKS == 2)
                    words[step][i][1] = w4_words(w + (row * NUM_K_TILES + kt) * W::TILE_CHUNKS + 32 + lane, valid);
                const Quads quads = reinterpret_cast<Quads>(s);
                scales[step][i][0] =
                    w4_scales(quads + (row * NUM_GROUPS + kt * STRIP / S::GROUP_SIZE) * 8 + lane / 4, valid);
                if constexpr (W::TILE_GROUPS == 2)
                    scales[step][i][1] =
                        w4_scales(quads + (row * NUM_GROUPS + kt * STRIP / S::GROUP_SIZE + 1) * 8 + lane / 4, valid);
            }
        }
    };

    // acc += W x^T of one column of tiles. b: tokens' columns 2 t, 2 t + 1 of each 8, token = lane / 4.
    static DEVICE void multiply(float (&acc)[STRIPS][8], const Weights& weights, int step, const uint32_t (&b)[4]) {
        typename W::Products::Sums sums = {};
        W::Products::add_columns(sums, b);
#pragma unroll
        for (int i = 0; i < STRIPS; i++) {
            uint32_t a[4][4];
            W::Products::unpack(weights.words[step][i], a);
            W::Products::add(acc[i], a, weights.scales[step][i], sums, b);
        }
    }

    // Mainloop over this block's tiles. W is read before pdl_wait; x, and all that is written, after it. exchange:
    // EXCHANGE_CHUNKS, and with SPLIT_K > 1 one more, which says whether this block started last. counters: one a tile;
    // posts: [tile][SPLIT_K][tokens][strip][8]; both zero at start and end.
    template <class Rows>
    static DEVICE void run(const Rows& rows, uint16_t* out, const uint32_t* x, const uint4* w, const uint2* scales,
                           float4* exchange, uint32_t* counters = nullptr, uint4* mailbox = nullptr) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_k = warp % WARPS_K, warp_n = warp / WARPS_K;
        const int tiles = rows.template tiles<S>() * TILES_N, split = blockIdx.x % SPLIT_K;
        int tile = blockIdx.x / SPLIT_K, buffer = 0;
        auto column = [&](int turn, int step) { return ((turn * STEPS + step) * SPLIT_K + split) * WARPS_K + warp_k; };
        Weights weights;
        W4Tile at = {};
        if (tile < tiles) {
            at = rows.template at<S>(tile);
#pragma unroll
            for (int s = 0; s < STEPS; s++) weights.load(s, w, scales, at, warp_n, column(0, s), true);
        }
        pdl_wait();
        uint32_t before = 0;
        if (SPLIT_K > 1 && threadIdx.x == 0 && tile < tiles) before = count_in(counters + tile);
        while (tile < tiles) {
            const int next_tile = PERSISTENT ? tile + int(gridDim.x) : tiles;
            const W4Tile next = next_tile < tiles ? rows.template at<S>(next_tile) : at;
            const int token = at.m0 + lane / 4;
            const bool has_token = token < at.end;
            const uint32_t* const x_row = x + int64_t(has_token ? rows.x_row(token) : 0) * (K / 2) + lane % 4;
            float acc[STRIPS][8] = {};
#pragma unroll 1
            for (int turn = 0; turn < TURNS; turn++) {
                uint32_t b[STEPS][4];
#pragma unroll
                for (int s = 0; s < STEPS; s++) {
                    const int kt = column(turn, s);
                    const bool valid = has_token && (NUM_K_TILES % (STEPS * DEALT) == 0 || kt < NUM_K_TILES);
#pragma unroll
                    for (int j = 0; j < 4; j++) b[s][j] = w4_token(x_row + kt * 16 + j * 4, valid);
                }
                const bool last = turn + 1 == TURNS;
#pragma unroll
                for (int s = 0; s < STEPS; s++) {
                    multiply(acc, weights, s, b[s]);
                    // Refill each register at once: for the next iteration, or for the first one of the next tile.
                    weights.load(s, w, scales, last ? next : at, warp_n, column(last ? 0 : turn + 1, s),
                                 !last || next_tile < tiles);
                }
            }

            auto store = [&](int strip, int row, int g, float4 v) {
                if (row < at.end && (N % S::BLOCK_N == 0 || strip < NUM_STRIPS))
                    store4<BF16, GATE>(out, rows.out_row(row), OUT_WIDTH, strip, g, v.x, v.y, v.z, v.w);
            };
            // A lane's sums are of rows 4 g .. 4 g + 3 of a strip and tokens 2 t and 2 t + 1.
            auto quad = [&](int i, int j) { return make_float4(acc[i][j], acc[i][2 + j], acc[i][4 + j], acc[i][6 + j]); };
            if constexpr (WARPS_K == 1) {
#pragma unroll
                for (int i = 0; i < STRIPS; i++) {
#pragma unroll
                    for (int j = 0; j < 2; j++)
                        store(at.n_strip + warp_n * STRIPS + i, at.m0 + lane % 4 * 2 + j, lane / 4, quad(i, j));
                }
            } else {
                float4* const sums = exchange + buffer * TILE_QUADS;
                auto place = [&](int n, int k, int i) { return sums + ((n * WARPS_K + k) * STRIPS + i) * (TILE_TOKENS * 8); };
#pragma unroll
                for (int i = 0; i < STRIPS; i++) {
#pragma unroll
                    for (int j = 0; j < 2; j++)
                        place(warp_n, warp_k, i)[lane / 4 * TILE_TOKENS + lane % 4 * 2 + j] = quad(i, j);
                }
                if (SPLIT_K > 1 && threadIdx.x == 0) *reinterpret_cast<uint32_t*>(exchange + EXCHANGE_CHUNKS) = before;
                __syncthreads();
                const int quads = min_of(at.end - at.m0, TILE_TOKENS) * BLOCK_STRIPS * 8;
                auto store_quad = [&](int q, float4 sum) {
                    store(at.n_strip + q / 8 % BLOCK_STRIPS, at.m0 + q / 8 / BLOCK_STRIPS, q % 8, sum);
                };
                auto sum_of = [&](int q) {
                    const int g = q % 8, strip = q / 8 % BLOCK_STRIPS, of = q / 8 / BLOCK_STRIPS;
                    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
                    for (int k = 0; k < WARPS_K; k++)
                        add(sum, place(strip / STRIPS, k, strip % STRIPS)[g * TILE_TOKENS + of]);
                    return sum;
                };
                if constexpr (SPLIT_K == 1) {
                    for (int q = threadIdx.x; q < quads; q += THREADS) store_quad(q, sum_of(q));
                } else {
                    auto post_of = [&](int k, int q) {
                        return mailbox + (int64_t(tile) * SPLIT_K + k) * (BLOCK_STRIPS * TILE_TOKENS * 8) + q;
                    };
                    if (*reinterpret_cast<const uint32_t*>(exchange + EXCHANGE_CHUNKS) != SPLIT_K - 1) {
                        for (int q = threadIdx.x; q < quads; q += THREADS) ll_store4(post_of(split, q), ll_encode_sums(sum_of(q)));
                        return;
                    }
                    if (threadIdx.x == 0) counters[tile] = 0;
                    for (int q = threadIdx.x; q - lane < quads; q += THREADS) {  // whole warps wait
                        const uint4* from[SPLIT_K];
                        uint4 parts[SPLIT_K];
#pragma unroll
                        for (int k = 0; k < SPLIT_K; k++) from[k] = q < quads && k != split ? post_of(k, q) : nullptr;
                        ll_receive(parts, from);
                        if (q >= quads) continue;
                        const float4 own = sum_of(q);
                        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
                        for (int k = 0; k < SPLIT_K; k++) {
                            add(sum, k == split ? own : as_sums(parts[k]));
                            if (k != split) ll_store4(post_of(k, q), make_uint4(0, 0, 0, 0));  // for the next launch
                        }
                        store_quad(q, sum);
                    }
                }
                if constexpr (PERSISTENT) buffer ^= 1;  // one barrier a tile: who is ahead writes the other half
            }
            tile = next_tile, at = next;
        }
    }
};
