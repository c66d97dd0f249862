// W4A16 GEMM by stream-K: every block has an equal share of the k iterations of all tiles. w4a16_gemm and moe_w4a16 use
// it.
//
// C = W x^T with swapped operands: rows of W are the tensor core's A operand, tokens its 8 columns. W is in pack.py's
// order. A shape S says N, K, GROUP_SIZE, BF16, GATE, the format of W (Weights: formats.cuh) and the tiling (tiling.py).
// A Rows is the tile scheduler: which tiles there are, the W of each, and where its rows of x and of the output are.
// With a GATE (gate.cuh) a strip of W is 16 rows of gate and 16 of up (pack.py, interleave), and activation(gate) * up is
// stored.
#pragma once
#include "common/ptx/copy.cuh"
#include "common/w4/formats.cuh"
#include "common/w4/split_k_partials.cuh"
#include "common/w4/split_k_exchange.cuh"
#include "common/w4/rows.cuh"
#include "common/w4/epilogue.cuh"
#include "common/w4/wgmma_rs.cuh"

// Splits `units` into gridDim.x shares that differ by at most one; the longer shares come first.
struct Pieces {
    int each, longer;
    DEVICE explicit Pieces(int units) : each(units / int(gridDim.x)), longer(units % int(gridDim.x)) {}
    DEVICE int begin(int b) const { return b * each + min_of(b, longer); }
    DEVICE int of(int unit) const {
        const int head = longer * (each + 1);
        return unit < head ? unit / (each + 1) : longer + (unit - head) / each;
    }
};

// FEW: the most stages of weights in flight while the block waits for x, since they delay the kernel that makes x; 0:
// all. POSTS_OUT: out is written by LL for the dependent kernel, as W4Stream's (warp_pipeline.cuh).
template <class S, int FEW = 0, bool POSTS_OUT = false> struct W4Gemm {
    typedef typename S::Weights W;
    static constexpr int N = S::N, K = S::K, GROUP_SIZE = S::GROUP_SIZE;
    static constexpr bool BF16 = S::BF16, WGMMA = S::WGMMA;
    static constexpr Gate GATE = S::GATE;
    static constexpr int BLOCK_M = S::BLOCK_M, BLOCK_N = S::BLOCK_N, BLOCK_K = S::BLOCK_K;
    static constexpr int WARP_N = S::WARP_N, WARPS_M = S::WARPS_M, WARPS_K = S::WARPS_K;
    static constexpr int NUM_STAGES = S::NUM_STAGES, BLOCKS_PER_SM = S::BLOCKS_PER_SM;

    static constexpr int STRIP = 32;          // rows of W, and columns of K, in one packed tile
    static constexpr bool VOLTA = ARCH < 75;  // m8n8k4 instead of m16n8k8 and m16n8k16
    static constexpr int WARPS_N = BLOCK_N / WARP_N, THREADS = 32 * WARPS_N * WARPS_M * WARPS_K;
    static constexpr int STRIPS = WARP_N / STRIP;                // strips of W that a warp owns
    static constexpr int TOKEN_TILES = BLOCK_M / WARPS_M / 8;    // columns of 8 tokens that a warp owns
    static constexpr int BLOCK_STRIPS = BLOCK_N / STRIP, STRIP_TILES = BLOCK_K / STRIP;
    static constexpr int WARP_K_TILES = STRIP_TILES / WARPS_K;
    static constexpr int NUM_STRIPS = N / STRIP, NUM_K_TILES = K / STRIP, NUM_GROUPS = K / GROUP_SIZE;
    static constexpr int STAGE_GROUPS = BLOCK_K >= GROUP_SIZE ? BLOCK_K / GROUP_SIZE : 1;
    static constexpr int TILES_N = ceil_div(N, BLOCK_N), UNITS_PER_TILE = ceil_div(K, BLOCK_K);
    static constexpr int OUT_WIDTH = GATE == Gate::none ? N : N / 2;
    static constexpr int TILE_QUADS = BLOCK_M * BLOCK_N / 4;  // a tile's sums, 16 bytes each

    // A stage holds x [64 columns][token][64] swizzled, weights [strip][32 columns] by tiles, and scales
    // [strip][group][32 rows]. Its size keeps x of the next stage aligned as wgmma wants it.
    static constexpr int W_CHUNKS = BLOCK_STRIPS * STRIP_TILES * W::TILE_CHUNKS;  // of 16 bytes
    static constexpr int S_CHUNKS = BLOCK_STRIPS * STAGE_GROUPS * W::GROUP_CHUNKS;
    static constexpr int X_CHUNKS = BLOCK_M * BLOCK_K / 8;
    static constexpr int W_AT = X_CHUNKS, S_AT = W_AT + W_CHUNKS;
    static constexpr int STAGE_CHUNKS = ceil_div(S_AT + S_CHUNKS, WGMMA ? 64 : 1) * (WGMMA ? 64 : 1);
    // After the stages: the exchange of warps that split K.
    static constexpr int EXCHANGE_CHUNKS = (WARPS_K - 1) * TILE_QUADS;
    // Stages in flight while one is multiplied. wgmma may still read the stage before that, until its wait.
    static constexpr int AHEAD = NUM_STAGES - (WGMMA ? 2 : 1), IN_FLIGHT = FEW ? FEW : AHEAD;
    // a thread's share
    static constexpr int W_COPIES = ceil_div(W_CHUNKS, THREADS), S_COPIES = ceil_div(S_CHUNKS, THREADS);
    static constexpr int X_COPIES = ceil_div(X_CHUNKS, THREADS);

    // With few token columns products are scaled, not weights (formats.cuh).
    static constexpr bool SCALE_PRODUCTS = TOKEN_TILES == 1;
    // True if registers also buffer the token operands of the next 32 columns; wgmma reads them from shared memory.
    static constexpr bool X_HELD = !WGMMA && TOKEN_TILES <= 4;
    // True if a thread can hold its part of x of all the first stages at once.
    static constexpr bool X_IN_REGISTERS = AHEAD * X_COPIES <= 16;

    static_assert(!WGMMA || (STRIPS == 1 && WARPS_M == 1 && WARPS_K == 1 && WARPS_N % 4 == 0 && BLOCK_K % 64 == 0));
    static_assert(!VOLTA || STRIPS == 2, "a lane of m8n8k4 owns rows of one of two strips");

    typedef Half<BF16> H;
    // A tile of C = W x^T: 32 rows of W, 8 tokens, 8 fp32 a lane.
    typedef float Fragment[8];

    // Swizzle: eight tokens' chunks of a column are in different banks, for ldmatrix and as wgmma's 128-byte swizzle.
    static DEVICE int x_chunk(int token, int chunk) {
        if constexpr (BLOCK_K == 32) return token * 4 + (chunk ^ (token / 2 & 3));
        return chunk / 8 * (BLOCK_M * 8) + token * 8 + (chunk % 8 ^ (token & 7));
    }

    // Tells the compiler that it is below THREADS, so that divisions fold.
    static DEVICE int tid() { return threadIdx.x % THREADS; }

    // Chunk i * THREADS + tid() of rows of PER_ROW chunks, STRIDE apart in memory: its row, and its distance from the
    // thread's first chunk. Both fold to constants.
    template <int PER_ROW> static DEVICE int row_step(int i) {
        return PER_ROW <= THREADS ? i * (THREADS / PER_ROW) : i / (PER_ROW / THREADS);
    }
    template <int PER_ROW, int STRIDE> static DEVICE int chunk_step(int i) {
        return row_step<PER_ROW>(i) * STRIDE + (PER_ROW <= THREADS ? 0 : i % (PER_ROW / THREADS) * THREADS);
    }

    // Source addresses of this thread's chunks of a unit, which is BLOCK_K columns of a tile.
    template <class Rows> struct Loader {
        static constexpr int W_ROW = STRIP_TILES * W::TILE_CHUNKS, S_ROW = STAGE_GROUPS * W::GROUP_CHUNKS, X_ROW = BLOCK_K / 8;
        static constexpr bool EXACT = N % BLOCK_N == 0 && K % BLOCK_K == 0 && BLOCK_K >= GROUP_SIZE;
        static constexpr int W_MATRIX = NUM_STRIPS * NUM_K_TILES * W::TILE_CHUNKS;
        static constexpr int S_MATRIX = NUM_STRIPS * NUM_GROUPS * W::GROUP_CHUNKS;
        Rows rows;
        const uint4 *w, *s, *x;  // of the whole operands
        const uint4 *w_at, *s_at, *x_at;  // this thread's first chunks
        int x_rows[Rows::GATHERS ? X_COPIES : 1];  // of x, of each of the thread's chunks
        W4Tile tile;
        int ku;

        DEVICE Loader() {}
        DEVICE Loader(Rows rows, const uint4* w, const uint4* s, const uint4* x) : rows(rows), w(w), s(s), x(x) {}

        DEVICE void seek(int to_tile, int to_ku) {
            tile = rows.template at<S>(to_tile), ku = to_ku;
            w_at = w_of() +
                   (int64_t(tile.n_strip + tid() / W_ROW) * NUM_K_TILES + ku * STRIP_TILES) * W::TILE_CHUNKS + tid() % W_ROW;
            s_at = s_of() +
                   (int64_t(tile.n_strip + tid() / S_ROW) * NUM_GROUPS + ku * BLOCK_K / GROUP_SIZE) * W::GROUP_CHUNKS + tid() % S_ROW;
            x_at = x + int64_t(tile.m0 + tid() / X_ROW) * (K / 8) + ku * X_ROW + tid() % X_ROW;
            if constexpr (Rows::GATHERS) {
#pragma unroll
                for (int i = 0; i < X_COPIES; i++) {
                    const int row = tile.m0 + tid() / X_ROW + row_step<X_ROW>(i);
                    x_rows[i] = row < tile.end ? rows.x_row(row) : 0;
                }
            }
        }
        DEVICE void next() { ku++, w_at += W_ROW, s_at += S_ROW, x_at += X_ROW; }
        DEVICE const uint4* w_of() const { return w + int64_t(tile.matrix) * W_MATRIX; }
        DEVICE const uint4* s_of() const { return s + int64_t(tile.matrix) * S_MATRIX; }

        // f(which of the thread's chunks, index in the stage, source)
        template <class F> DEVICE void weights(F f) const {
#pragma unroll
            for (int i = 0; i < W_COPIES; i++) {
                const int c = i * THREADS + tid();
                if (W_CHUNKS % THREADS && c >= W_CHUNKS) continue;
                const uint4* from = w_at + chunk_step<W_ROW, NUM_K_TILES * W::TILE_CHUNKS>(i);
                if constexpr (!EXACT) {
                    // A strip or a column beyond the last reads the last one: there x is zero, or the rows are not
                    // stored.
                    const int strip = min_of(tile.n_strip + c / W_ROW, NUM_STRIPS - 1);
                    const int kt = min_of(ku * STRIP_TILES + c / W::TILE_CHUNKS % STRIP_TILES, NUM_K_TILES - 1);
                    from = w_of() + (int64_t(strip) * NUM_K_TILES + kt) * W::TILE_CHUNKS + c % W::TILE_CHUNKS;
                }
                f(i, W_AT + c, from);
            }
#pragma unroll
            for (int i = 0; i < S_COPIES; i++) {
                const int c = i * THREADS + tid();
                if (S_CHUNKS % THREADS && c >= S_CHUNKS) continue;
                const uint4* from = s_at + chunk_step<S_ROW, NUM_GROUPS * W::GROUP_CHUNKS>(i);
                if constexpr (!EXACT) {
                    const int strip = min_of(tile.n_strip + c / S_ROW, NUM_STRIPS - 1);
                    const int group = min_of(ku * BLOCK_K / GROUP_SIZE + c / W::GROUP_CHUNKS % STAGE_GROUPS, NUM_GROUPS - 1);
                    from = s_of() + (int64_t(strip) * NUM_GROUPS + group) * W::GROUP_CHUNKS + c % W::GROUP_CHUNKS;
                }
                f(W_COPIES + i, S_AT + c, from);
            }
        }

        // As `weights`, with a fourth argument: false means that nothing is read and zeros are stored.
        template <class F> DEVICE void tokens(F f) const {
#pragma unroll
            for (int i = 0; i < X_COPIES; i++) {
                const int c = i * THREADS + tid(), token = tid() / X_ROW + row_step<X_ROW>(i);
                // Rows beyond the last keep old data of the stage: their columns of the product are not stored.
                if ((X_CHUNKS % THREADS && c >= X_CHUNKS) || tile.m0 + token >= tile.end) continue;
                const bool valid = K % BLOCK_K == 0 || ku * X_ROW + c % X_ROW < K / 8;
                const uint4* from = x_at + chunk_step<X_ROW, K / 8>(i);
                if constexpr (Rows::GATHERS) from = x + int64_t(x_rows[i]) * (K / 8) + ku * X_ROW + c % X_ROW;
                f(W_COPIES + S_COPIES + i, x_chunk(token, c % X_ROW), valid ? from : x, valid);
            }
        }
    };

    // acc += W x^T over this warp's part of a stage.
    static DEVICE void multiply(Fragment (&acc)[STRIPS][TOKEN_TILES], const uint4* stage, int warp_n, int warp_m, int warp_k) {
        const int lane = threadIdx.x % 32;
        const uint4* x = stage;
        const uint4* w = stage + W_AT + warp_n * STRIPS * STRIP_TILES * W::TILE_CHUNKS;
        const char* s = reinterpret_cast<const char*>(stage + S_AT) + warp_n * STRIPS * STAGE_GROUPS * W::GROUP_BYTES;
        const int token0 = warp_m * TOKEN_TILES * 8;
        auto x_row = [&](int token, int kt) { return x + x_chunk(token + lane % 8, kt * 4 + lane / 8); };
        if constexpr (VOLTA) {
#pragma unroll
            for (int i = 0; i < WARP_K_TILES; i++) {
                const int kt = warp_k * WARP_K_TILES + i, group = kt * 32 / GROUP_SIZE % STAGE_GROUPS;
                // A lane has rows 4 g + 2 r and 4 g + 2 r + 1 of strip q / 2, and one token; mma.cuh has the fragment
                // layouts.
                const int q = lane / 4 % 4, g = q % 2 * 4 + lane % 2 + lane / 16 * 2, r = lane / 2 % 2;
                const int token = token0 + lane % 4 + lane / 16 * 4;
                typedef typename W::ScalesPair Pair;
                constexpr int GROUP = W::GROUP_BYTES;
                const Pair first = *reinterpret_cast<const Pair*>(
                    s + (q / 2 * STAGE_GROUPS + group) * GROUP + g * (GROUP / 8) + r * (GROUP / 16));
                Pair last = first;
                if constexpr (W::TILE_GROUPS == 2)
                    last = *reinterpret_cast<const Pair*>(
                        s + (q / 2 * STAGE_GROUPS + group + 1) * GROUP + g * (GROUP / 8) + r * (GROUP / 16));
                const typename W::Scaled by_k16[2] = {typename W::Scaled(first), typename W::Scaled(last)};
                uint32_t a[4][2][4];  // [columns 2 t, 2 t + 1, + 8][k16][fragment]
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    const auto half = W::load_half(w + (q / 2 * STRIP_TILES + kt) * W::TILE_CHUNKS + g * 4 + t, r);
#pragma unroll
                    for (int k16 = 0; k16 < 2; k16++) W::Scaled::unpack(half, k16, a[t][k16]);
#pragma unroll
                    for (int k16 = 0; k16 < 2; k16++) by_k16[k16].scale(half, k16, a[t][k16]);
                }
#pragma unroll
                for (int c = 0; c < TOKEN_TILES; c++) {
#pragma unroll
                    for (int k16 = 0; k16 < 2; k16++) {
                        const uint4 low = x[x_chunk(token + c * 8, kt * 4 + k16 * 2)];
                        const uint4 high = x[x_chunk(token + c * 8, kt * 4 + k16 * 2 + 1)];
                        const uint32_t b[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                        for (int t = 0; t < 4; t++) {
                            mma_884(acc[0][c], a[t][k16][0], a[t][k16][2], b[t], b[t + 4]);
                            mma_884(acc[1][c], a[t][k16][1], a[t][k16][3], b[t], b[t + 4]);
                        }
                    }
                }
            }
            return;
        }

        // Operands of 32 columns, loaded while those before them are multiplied if registers allow.
        struct Operands {
            uint4 words[STRIPS][W::LANE_CHUNKS];
            typename W::ScalesQuad scales[STRIPS][W::TILE_GROUPS];  // of rows 4 g .. 4 g + 3, lane = 4 g + t
            uint32_t x[X_HELD ? TOKEN_TILES : 1][4];
        } operands[2];
        auto load = [&](int i) {
            const int kt = warp_k * WARP_K_TILES + i, group = kt * 32 / GROUP_SIZE % STAGE_GROUPS;
            Operands& o = operands[i % 2];
#pragma unroll
            for (int strip = 0; strip < STRIPS; strip++) {
                o.words[strip][0] = w[(strip * STRIP_TILES + kt) * W::TILE_CHUNKS + lane];
                if constexpr (W::LANE_CHUNKS == 2)
                    o.words[strip][1] = w[(strip * STRIP_TILES + kt) * W::TILE_CHUNKS + 32 + lane];
                typedef typename W::ScalesQuad Quad;
                o.scales[strip][0] =
                    reinterpret_cast<const Quad*>(s + (strip * STAGE_GROUPS + group) * W::GROUP_BYTES)[lane / 4];
                if constexpr (W::TILE_GROUPS == 2)
                    o.scales[strip][1] =
                        reinterpret_cast<const Quad*>(s + (strip * STAGE_GROUPS + group + 1) * W::GROUP_BYTES)[lane / 4];
            }
            if constexpr (X_HELD) {
#pragma unroll
                for (int c = 0; c < TOKEN_TILES; c++) ldmatrix4(o.x[c], x_row(token0 + c * 8, kt));
            }
        };
        constexpr bool EARLY = WGMMA || STRIPS * TOKEN_TILES < 16;  // 128 accumulators leave no room
        if constexpr (EARLY) load(0);
        uint32_t weights[2][STRIPS][4][4];  // wgmma still reads the one while the other is made
#pragma unroll
        for (int i = 0; i < WARP_K_TILES; i++) {
            if constexpr (!EARLY) load(i);
            else if (i + 1 < WARP_K_TILES) load(i + 1);
            const int kt = warp_k * WARP_K_TILES + i;
            const Operands& o = operands[i % 2];
            uint32_t(&a)[STRIPS][4][4] = weights[WGMMA ? i % 2 : 0];  // [strip][16 rows x 2 + k16][fragment]
            // wait<1>: products of the last 32 columns may be in flight; those before have read these registers.
            if constexpr (WGMMA) wgmma_wait<1>();
#pragma unroll
            for (int strip = 0; strip < STRIPS; strip++) {
                if constexpr (SCALE_PRODUCTS) {
                    W::Products::unpack(o.words[strip], a[strip]);
                } else {
                    const auto half = [&](int i) { return W::half_of(o.words[strip], i / 2); };
#pragma unroll
                    for (int i = 0; i < 4; i++) W::Scaled::unpack(half(i), i % 2, a[strip][i]);
                    typedef typename W::Scaled Scaled;
                    const auto &first = o.scales[strip][0], &last = o.scales[strip][W::TILE_GROUPS - 1];
                    const Scaled of_first[2] = {Scaled(W::pair_of(first, 0)), Scaled(W::pair_of(first, 1))};
                    const Scaled of_last[2] = {Scaled(W::pair_of(last, 0)), Scaled(W::pair_of(last, 1))};
#pragma unroll
                    for (int i = 0; i < 4; i++) (i % 2 ? of_last : of_first)[i / 2].scale(half(i), i % 2, a[strip][i]);
                }
            }
            if constexpr (WGMMA) {
                wgmma_fence();
#pragma unroll
                for (int k16 = 0; k16 < 2; k16++) {
                    const uint64_t b = wgmma_b(x + kt / 2 * (BLOCK_M * 8), kt % 2 * 2 + k16);
                    wgmma<BF16, 0>(acc[0], a[0][k16], b);
                    wgmma<BF16, 1>(acc[0], a[0][2 + k16], b);
                }
                wgmma_commit();
            } else if constexpr (SCALE_PRODUCTS) {
                const uint32_t(&b)[4] = o.x[0];
                // In place, since as a function's it keeps the compiler from unrolling the loop over tiles.
                typename W::Products::Sums sums = {};
                W::Products::add_columns(sums, b);
#pragma unroll
                for (int strip = 0; strip < STRIPS; strip++) {
#pragma unroll
                    for (int q = 0; q < W::TILE_GROUPS; q++) {
                        const auto& quad = o.scales[strip][q];
                        const float2 low = W::scales_of(quad, 0), high = W::scales_of(quad, 1);
                        const float by_row[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            float d[4] = {};
                            if constexpr (W::HAS_BIASED) {
                                d[0] = sums[q][0], d[1] = sums[q][1], d[2] = sums[q][2], d[3] = sums[q][3];
                            }
                            if (W::TILE_GROUPS == 1 || q == 0) mma_16816<BF16>(d, a[strip][2 * h], b[0], b[1]);
                            if (W::TILE_GROUPS == 1 || q == 1) mma_16816<BF16>(d, a[strip][2 * h + 1], b[2], b[3]);
#pragma unroll
                            for (int j = 0; j < 4; j++)
                                acc[strip][0][4 * h + j] = fmaf(d[j], by_row[2 * h + j / 2], acc[strip][0][4 * h + j]);
                            if constexpr (W::HAS_MINIMA) W::Products::add_minima(acc[strip][0], h, quad, sums[q]);
                        }
                    }
                }
            } else {
#pragma unroll
                for (int c = 0; c < TOKEN_TILES; c++) {
                    uint32_t b[4];
                    if constexpr (X_HELD) {
                        for (int j = 0; j < 4; j++) b[j] = o.x[c][j];
                    } else {
                        ldmatrix4(b, x_row(token0 + c * 8, kt));
                    }
#pragma unroll
                    for (int strip = 0; strip < STRIPS; strip++) {
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            float(&d)[4] = reinterpret_cast<float(&)[4]>(acc[strip][c][4 * h]);
                            mma_16816<BF16>(d, a[strip][2 * h], b[0], b[1]);
                            mma_16816<BF16>(d, a[strip][2 * h + 1], b[2], b[3]);
                        }
                    }
                }
            }
        }
    }

    // Rounds and stores this warp's part of a finished tile: four neighbouring outputs of a token at a time.
    template <class Rows>
    static DEVICE void store(uint16_t* out, const Fragment (&acc)[STRIPS][TOKEN_TILES], const Rows& rows, W4Tile tile,
                             int warp_n, int warp_m) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++) {
#pragma unroll
            for (int c = 0; c < TOKEN_TILES; c++) {
                const int tokens0 = tile.m0 + (warp_m * TOKEN_TILES + c) * 8;
                if constexpr (VOLTA) {
                    // acc[0] and acc[1] are neighbouring rows; element i is row pair (i & 2), token (i & 1) + (i & 4).
                    // A lane's rows all lie in strip q / 2, so one of the two strips' turns does nothing.
                    const int q = lane / 4 % 4, g = q % 2 * 4 + lane % 2 + lane / 16 * 2;
                    if (strip == 0) {
                        const int n_strip = tile.n_strip + warp_n * STRIPS + q / 2;
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            const int j = i % 2 + i / 2 * 4, token = tokens0 + (lane & 2) + j;
                            if (token < tile.end && n_strip < NUM_STRIPS)
                                store4<BF16, GATE>(out, rows.out_row(token), OUT_WIDTH, n_strip, g, acc[0][c][j], acc[1][c][j],
                                                    acc[0][c][j + 2], acc[1][c][j + 2]);
                        }
                    }
                } else {
                    const int n_strip = tile.n_strip + warp_n * STRIPS + strip;
                    const float* d = acc[strip][c];
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        const int token = tokens0 + lane % 4 * 2 + j;
                        if (token < tile.end && n_strip < NUM_STRIPS) {
                            const int64_t row = rows.out_row(token);
                            if constexpr (POSTS_OUT)
                                post_outputs4<BF16>(out, row, N, n_strip, lane / 4, d[j], d[2 + j], d[4 + j], d[6 + j]);
                            else
                                store4<BF16, GATE>(out, row, OUT_WIDTH, n_strip, lane / 4, d[j], d[2 + j], d[4 + j],
                                                    d[6 + j]);
                        }
                    }
                }
            }
        }
    }

    static DEVICE void clear(Fragment (&acc)[STRIPS][TOKEN_TILES]) {
#pragma unroll
        for (int i = 0; i < STRIPS * TOKEN_TILES * 8; i++) acc[i / 8 / TOKEN_TILES][i / 8 % TOKEN_TILES][i % 8] = 0.0f;
    }

    // The accumulators, 16 bytes at a time: f(float4&) for one of them, f(float4&, index) for each.
    template <class F> static DEVICE void for_quad(Fragment (&acc)[STRIPS][TOKEN_TILES], int i, F f) {
        float* v = &acc[i / 2 / TOKEN_TILES][i / 2 % TOKEN_TILES][i % 2 * 4];
        float4 q = make_float4(v[0], v[1], v[2], v[3]);
        f(q);
        v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
    }
    template <class F> static DEVICE void for_each_quad(Fragment (&acc)[STRIPS][TOKEN_TILES], F f) {
#pragma unroll
        for (int i = 0; i < STRIPS * TOKEN_TILES * 2; i++) for_quad(acc, i, [&](float4& q) { f(q, i); });
    }

    // One 16-byte column of fragments a lane, in a tile of BLOCK_M * BLOCK_N / 4 quads.
    static DEVICE int quad_place() { return threadIdx.x / 32 % (WARPS_N * WARPS_M) * (STRIPS * TOKEN_TILES * 2 * 32) + threadIdx.x % 32; }

    // The first token, within its tile, of the lane's quad `i` (for_each_quad's). The quad is not needed if there is
    // none.
    static DEVICE int quad_token(int i, int warp_m) {
        const int lane = threadIdx.x % 32;
        return (warp_m * TOKEN_TILES + i / 2 % TOKEN_TILES) * 8 + (VOLTA ? (lane & 2) + i % 2 * 4 : lane % 4 * 2);
    }

    // Reduction over the warps that split K, into the first of them.
    static DEVICE void add_warps(Fragment (&acc)[STRIPS][TOKEN_TILES], float4* exchange, int warp_k) {
        float4* const other = exchange + quad_place();
        if (warp_k) for_each_quad(acc, [&](float4& q, int i) { other[(warp_k - 1) * TILE_QUADS + i * 32] = q; });
        __syncthreads();
        if (warp_k == 0)
            for (int k = 0; k < WARPS_K - 1; k++)
                for_each_quad(acc, [&](float4& q, int i) { add(q, other[k * TILE_QUADS + i * 32]); });
    }

    // Fix-up: acc += the partial sums that blocks `begin` to `last` wrote for the tile `at`, in their order; leaves
    // zeros.
    static DEVICE void ll_receive(Fragment (&acc)[STRIPS][TOKEN_TILES], uint4* mailbox, int begin, int last, const W4Tile& at, int warp_m) {
        constexpr int QUADS = STRIPS * TOKEN_TILES * 2;
        constexpr int FLIGHT = QUADS < 32 ? 8 : 4;  // 16-byte loads under way a thread, as registers allow
        constexpr int Q = min_of(QUADS, FLIGHT), B = FLIGHT / Q;
#pragma unroll 1
        for (int b = begin; b <= last; b += B) {
#pragma unroll
            for (int q = 0; q < QUADS; q += Q) {
                uint4 part[FLIGHT];
                auto wanted = [&](int i) { return b + i / Q <= last && at.m0 + quad_token(q + i % Q, warp_m) < at.end; };
                auto from = [&](int i) { return mailbox + (b + i / Q) * int64_t(TILE_QUADS) + quad_place() + (q + i % Q) * 32; };
                bool all;
                do {
                    all = true;
#pragma unroll
                    for (int i = 0; i < FLIGHT; i++) {
                        part[i] = make_uint4(1, 1, 1, 1);
                        ll_load4_if(wanted(i), part[i], from(i));
                    }
#pragma unroll
                    for (int i = 0; i < FLIGHT; i++) all &= ll_all_valid(part[i]);
                } while (!__all_sync(0xffffffffu, all));
#pragma unroll
                for (int i = 0; i < FLIGHT; i++) {
                    if (!wanted(i)) continue;
                    ll_store4(from(i), make_uint4(0, 0, 0, 0));  // for the next launch
                    for_quad(acc, q + i % Q, [&](float4& v) { add(v, as_sums(part[i])); });
                }
            }
        }
    }

    // Mainloop of a block over its share of all tiles. W is read before pdl_wait; x, and all that is written, after it.
    // smem: as the spec says; posts: the LL mailbox, one tile's sums a block, zero at start and end. Blocks that share
    // a tile wait for each other; with BLOCKS_PER_SM all of them are resident.
    template <class Rows>
    static DEVICE void run(const Rows& rows, uint16_t* out, const uint4* x, const uint4* w, const uint4* scales, uint4* smem,
                           uint4* mailbox) {
        float4* const exchange = reinterpret_cast<float4*>(smem + NUM_STAGES * STAGE_CHUNKS);
        const int warp = threadIdx.x / 32;
        const int warp_n = warp % WARPS_N, warp_m = warp / WARPS_N % WARPS_M, warp_k = warp / (WARPS_N * WARPS_M);
        const int tiles = rows.template tiles<S>() * TILES_N;
        const Pieces pieces(tiles * UNITS_PER_TILE);
        // There may be more blocks than tiles if each has one: the number of tiles is known on the device alone.
        const bool idle = BLOCKS_PER_SM == 0 && int(blockIdx.x) >= tiles;
        const int begin = BLOCKS_PER_SM == 0 ? blockIdx.x * UNITS_PER_TILE : pieces.begin(blockIdx.x);
        const int count = idle ? 0 : BLOCKS_PER_SM == 0 ? UNITS_PER_TILE : pieces.begin(blockIdx.x + 1) - begin;
        // The next unit to load, ahead of the one that is multiplied.
        Loader<Rows> loader(rows, w, scales, x);
        int load_tile = begin / UNITS_PER_TILE, loaded = 0;
        if (count) loader.seek(load_tile, begin % UNITS_PER_TILE);
        auto advance = [&] {
            loaded++;
            loader.next();
            if (loader.ku == UNITS_PER_TILE) {
                load_tile++;
                if (loaded < count) loader.seek(load_tile, 0);
            }
        };
        auto slot = [&](int unit) { return smem + unit % NUM_STAGES * STAGE_CHUNKS; };

        // Without cp.async, registers hold the next unit while the tensor cores work on this one.
        uint4 carried[HAS_CP_ASYNC ? 1 : W_COPIES + S_COPIES + X_COPIES];
        auto fetch = [&] {
            loader.weights([&](int i, int, const uint4* from) { carried[i] = *from; });
            loader.tokens([&](int i, int, const uint4* from, bool valid) {
                carried[i] = valid ? *from : make_uint4(0, 0, 0, 0);
            });
        };

        if constexpr (HAS_CP_ASYNC) {
            // Weights are constants: the first stages are in flight before the kernel that makes x has completed.
            Loader<Rows> at[AHEAD];
#pragma unroll
            for (int stage = 0; stage < AHEAD; stage++) {
                at[stage] = loader;
                if constexpr (IN_FLIGHT < AHEAD) copy_wait<IN_FLIGHT - 1>();
                if (stage < count) {
                    loader.weights([&](int, int to, const uint4* from) { copy16(slot(stage) + to, from); });
                    advance();
                }
                copy_commit();
            }
            pdl_wait();
            if constexpr (POSTS_OUT) pdl_launch_dependents();
            if constexpr (X_IN_REGISTERS) {
                // cp.async groups complete in order, and x must not queue behind the last stage's weights. So x comes
                // by plain loads, all of them before the first store.
                uint4 held[AHEAD][X_COPIES];
#pragma unroll
                for (int stage = 0; stage < AHEAD; stage++)
                    if (stage < count)
                        at[stage].tokens([&](int i, int, const uint4* from, bool valid) {
                            held[stage][i - W_COPIES - S_COPIES] = valid ? *from : make_uint4(0, 0, 0, 0);
                        });
#pragma unroll
                for (int stage = 0; stage < AHEAD; stage++)
                    if (stage < count)
                        at[stage].tokens([&](int i, int to, const uint4*, bool) {
                            slot(stage)[to] = held[stage][i - W_COPIES - S_COPIES];
                        });
            } else {
#pragma unroll
                for (int stage = 0; stage < AHEAD; stage++) {
                    if (stage < count)
                        at[stage].tokens([&](int, int to, const uint4* from, bool valid) {
                            copy16_or_zero(slot(stage) + to, from, valid);
                        });
                    copy_commit();
                }
            }
        } else {
            pdl_wait();
            if (count) fetch();
        }

        if constexpr (Rows::MAY_BE_FEW) {
            if (!count) return;  // fewer units than blocks
        }
        const int first_tile = begin / UNITS_PER_TILE, last_tile = (begin + count - 1) / UNITS_PER_TILE;
        auto first_block = [&](int of_tile) { return pieces.of(of_tile * UNITS_PER_TILE); };
        auto last_block = [&](int of_tile) { return pieces.of((of_tile + 1) * UNITS_PER_TILE - 1); };
        Fragment acc[STRIPS][TOKEN_TILES];
        clear(acc);
        int i = 0;  // the unit to multiply
        for (int tile = first_tile; tile <= last_tile; tile++) {
            const int ku = tile == first_tile ? begin % UNITS_PER_TILE : 0;
            const int end = min_of(count, i + UNITS_PER_TILE - ku);
            const W4Tile at = rows.template at<S>(tile);
            for (; i < end; i++) {
                if constexpr (HAS_CP_ASYNC) {
                    copy_wait<AHEAD - 1>();
                    if constexpr (WGMMA) fence_async_proxy();
                    __syncthreads();
                    if (loaded < count) {
                        uint4* const to_slot = slot(loaded);
                        loader.weights([&](int, int to, const uint4* from) { copy16(to_slot + to, from); });
                        loader.tokens([&](int, int to, const uint4* from, bool valid) {
                            if constexpr (K % BLOCK_K) copy16_or_zero(to_slot + to, from, valid);
                            else copy16(to_slot + to, from);
                        });
                        advance();
                    }
                    copy_commit();
                } else {
                    uint4* const to_slot = slot(i);
                    loader.weights([&](int j, int to, const uint4*) { to_slot[to] = carried[j]; });
                    loader.tokens([&](int j, int to, const uint4*, bool) { to_slot[to] = carried[j]; });
                    __syncthreads();
                    advance();
                    if (loaded < count) fetch();
                }
                multiply(acc, slot(i), warp_n, warp_m, warp_k);
            }
            if constexpr (WGMMA) wgmma_wait<0>();
            if constexpr (WARPS_K > 1) add_warps(acc, exchange, warp_k);
            bool whole = true;
            if constexpr (BLOCKS_PER_SM > 0) {
                // Of a tile that several blocks share, the first block adds up all parts: its own last unit and the
                // others' first ones.
                const int first = first_block(tile);
                whole = int(blockIdx.x) == first;
                if (warp_k == 0 && whole) {
                    ll_receive(acc, mailbox, first + 1, last_block(tile), at, warp_m);
                } else if (warp_k == 0) {
                    uint4* const mine = mailbox + blockIdx.x * int64_t(TILE_QUADS) + quad_place();
                    for_each_quad(acc, [&](float4& q, int j) {
                        if (quad_token(j, warp_m) + at.m0 < at.end) ll_store4(mine + j * 32, ll_encode_sums(q));
                    });
                }
            }
            if (whole && warp_k == 0) store(out, acc, rows, at, warp_n, warp_m);
            clear(acc);
        }
    }
};
