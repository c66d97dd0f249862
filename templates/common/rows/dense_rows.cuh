// Sixteen rows of a dense 16-bit matrix times eight tokens, by one warp: the layout of rows, columns and tokens over
// lanes.
//
// A step is 32 columns. A sum over columns may take them in any order, so a lane's loads are fragments without a
// shuffle: 16 contiguous bytes of a row of W are the A fragments of two MMAs, and the same 16 bytes of a token's row of
// x are their B fragments. The assignment of rows gives a lane two neighbouring outputs of two neighbouring tokens. A
// token is a column of the product: its result does not depend on the other tokens.
#pragma once
#include "common/ptx/mma.cuh"

struct DenseLane {
    static constexpr bool VOLTA = ARCH < 75;           // four products of 8 x 8 x 4 a warp: two row groups, two chunks
    static constexpr int W_LOADS = 2;                  // of 16 bytes a lane and step
    static constexpr int X_LOADS = VOLTA ? 2 : 1;      // the same of x, for each eight tokens
    static constexpr int ACCUMULATORS = VOLTA ? 8 : 4;
    static constexpr int ROWS = 16, TOKENS = 8, COLUMNS = 32, CHUNKS = COLUMNS / 8;  // a chunk is 16 bytes
    int lane;

    // Of load j: the row of W among the 16, and the chunk of the step. Without VOLTA both loads are of one chunk.
    DEVICE int row(int j) const {
        if constexpr (!VOLTA) return lane / 4 * 2 + j;
        const int m = mma_row();
        return lane / 4 % 2 * 8 + (m & 4) + (m & 1) * 2 + (m >> 1 & 1);
    }
    DEVICE int chunk(int j) const { return VOLTA ? lane / 8 % 2 + 2 * j : lane % 4; }
    // The token of x among the eight that this lane loads.
    DEVICE int token() const { return VOLTA ? mma_row() : lane / 4; }

    // Of the result, as `finish` gives it: the first of two rows, the first of two tokens.
    DEVICE int out_row() const { return VOLTA ? lane / 4 % 2 * 8 + lane / 16 * 4 + (lane & 1) * 2 : lane / 4 * 2; }
    DEVICE int out_token() const { return VOLTA ? (lane & 2) + (lane / 8 % 2) * 4 : lane % 4 * 2; }

    // acc += the step's products. SUMS is ACCUMULATORS; a parameter, so that only this arch's branch must compile.
    template <bool BF16, int SUMS>
    DEVICE static void multiply(float (&acc)[SUMS], const uint4 (&w)[W_LOADS], const uint4 (&x)[X_LOADS]) {
        if constexpr (SUMS == 8) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                mma_884(acc, w[j].x, w[j].y, x[j].x, x[j].y);
                mma_884(acc, w[j].z, w[j].w, x[j].z, x[j].w);
            }
        } else {
            const uint32_t low[4] = {w[0].x, w[1].x, w[0].y, w[1].y}, high[4] = {w[0].z, w[1].z, w[0].w, w[1].w};
            mma_16816<BF16>(acc, low, x[0].x, x[0].y);
            mma_16816<BF16>(acc, high, x[0].z, x[0].w);
        }
    }

    // The lane's four sums: x and y are row out_row() of tokens out_token() and the next, z and w the row after it.
    template <int SUMS> DEVICE float4 finish(const float (&acc)[SUMS]) const {
        if constexpr (SUMS == 4) {
            return make_float4(acc[0], acc[1], acc[2], acc[3]);
        } else {
            // Lane ^ 8 summed the step's other chunks: each of the two keeps four of the eight tokens.
            const bool upper = lane & 8;
            float mine[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                mine[i] = (upper ? acc[4 + i] : acc[i]) + __shfl_xor_sync(0xffffffffu, upper ? acc[i] : acc[4 + i], 8);
            return make_float4(mine[0], mine[1], mine[2], mine[3]);
        }
    }

private:
    DEVICE int mma_row() const { return lane % 4 + lane / 16 * 4; }  // of m8n8k4: the row of A and the column of B
};

// 16 bytes of a constant that is read once; zeros and no access where not `valid`.
DEVICE uint4 load_stream_or_zero(const void* p, bool valid) {
    uint4 v;
    asm volatile(
        "{ .reg .pred valid; setp.ne.b32 valid, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0; "
        "@valid ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(p), "r"(int(valid)));
    return v;
}

// 16 bytes that an earlier kernel wrote and other warps of the SM also read; zeros and no access where not `valid`.
DEVICE uint4 load_or_zero(const void* p, bool valid) {
    uint4 v;
    asm volatile(
        "{ .reg .pred valid; setp.ne.b32 valid, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0; "
        "@valid ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(p), "r"(int(valid))
        : "memory");
    return v;
}
