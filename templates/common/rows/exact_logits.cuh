// Rows of a head times a token, by a warp. What greedy_head chooses by is what ranks compare their choices by
// (exchange_best): one order of the sum, so that logits which are equal on one GPU are equal between GPUs.
#pragma once
#include "common/rows/dense_rows.cuh"
#include "common/rows/vec.cuh"

// A row of 16-bit floats; of a packed table it is a PackedRow (w4/packed_row.cuh).
template <Dtype DTYPE, int COLUMNS> struct DenseRow {
    typedef Vec8<DTYPE> Vec;
    static constexpr int MOST_LOADS = 12;  // in flight, that leave registers for other work
    const uint4* row;  // null: there is no such row

    static DEVICE DenseRow at(const void* table, const void*, int64_t index) {
        return {static_cast<const uint4*>(table) + index * (COLUMNS / 8)};
    }
    static DEVICE DenseRow at_if(bool exists, const void* table, const void*, int64_t index) {
        return {exists ? static_cast<const uint4*>(table) + index * (COLUMNS / 8) : nullptr};
    }
    DEVICE bool is_there() const { return row; }
    DEVICE void load(Vec& to, int v, bool valid) const { to.part[0] = load_stream_or_zero(row + v, valid); }
};

// N rows of the table times a token, rounded as a dense product is; the same bits in every lane, for every N and LOADS.
// LOADS: of eight columns that are in flight together, of all rows. Rows that there are not are not read.
template <Dtype DTYPE, int HIDDEN, int LOADS, int N, class Row>
DEVICE void exact_logits(float (&logits)[N], const Row (&rows)[N], const uint4* x) {
    constexpr int ROW_VECS = HIDDEN / 8, VECS = ceil_div(ROW_VECS, 32);
    constexpr int AHEAD = ceil_div(VECS, ceil_div(VECS, max_of(LOADS / N, 1)));
    float sums[N] = {};
#pragma unroll 1
    for (int first = 0; first < ROW_VECS; first += 32 * AHEAD) {
        typename Row::Vec row[N][AHEAD];
        Vec8<DTYPE> token[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int v = first + 32 * i + threadIdx.x % 32;
#pragma unroll
            for (int n = 0; n < N; n++) rows[n].load(row[n][i], v, rows[n].is_there() && v < ROW_VECS);
            token[i].part[0] = load_or_zero(x + v, v < ROW_VECS);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            float b[8];
            token[i].unpack(b);
#pragma unroll
            for (int n = 0; n < N; n++) {
                float a[8];
                row[n][i].unpack(a);
#pragma unroll
                for (int j = 0; j < 8; j++) sums[n] = fmaf(a[j], b[j], sums[n]);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++) logits[n] = round_to<DTYPE>(warp_sum(sums[n]));
}
