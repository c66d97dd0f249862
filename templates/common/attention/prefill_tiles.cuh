// Prefill attention: copies of row tiles between global and shared memory.
//
// A tile's row is HEAD_DIM 16-bit elements in chunks of 16 bytes. Chunk c of row r is stored at c ^ (r % 8), so that
// eight rows at one column (an ldmatrix, a quarter-warp's load) have no bank conflict.
#pragma once
#include "common/attention/kv_tile.cuh"

// Byte offset of chunk `chunk` of row `row` in a tile of rows of CHUNKS chunks (a power of two, 2 or more).
template <int CHUNKS> DEVICE int swizzled(int row, int chunk) {
    constexpr int ROWS_A_LINE = CHUNKS >= 8 ? 1 : 8 / CHUNKS;  // rows that share 128 bytes
    return (row * CHUNKS + (chunk ^ (row / ROWS_A_LINE % min_of(CHUNKS, 8)))) * 16;
}

// The packed query (or output) rows of one sequence and kv head: row = token * GROUP + head in the group.
template <int HEAD_DIM, int NUM_Q_HEADS, int GROUP> struct QueryRows {
    typedef Elements16 Format;
    uint16_t* base;  // token 0 of the sequence, first head of the group
    int num_rows;

    DEVICE uint16_t* origin() const { return base; }
    DEVICE bool readable(int row) const { return row < num_rows; }
    DEVICE uint16_t* row(int row) const {
        return base + (int64_t(row / GROUP) * NUM_Q_HEADS + row % GROUP) * HEAD_DIM;
    }
    template <int TILE, int STEP> DEVICE uint16_t* at(int first, int mine, int step, int chunk) const {
        return row(first + mine + step) + chunk * 8;
    }
};

// Partition of a tile of ROWS rows over THREADS threads: thread t has chunk t % CHUNKS of rows t / CHUNKS + i * STEP.
template <int HEAD_DIM, int ROWS, int THREADS> struct TileCopy {
    static constexpr int CHUNKS = HEAD_DIM / 8, STEP = THREADS / CHUNKS, COUNT = ROWS / STEP;
    static_assert(THREADS % CHUNKS == 0 && ROWS % STEP == 0, "every thread copies the same number of chunks");
    static_assert((STEP & (STEP - 1)) == 0, "the swizzle of row + i * STEP is one xor");

    static DEVICE int my_chunk() { return threadIdx.x % CHUNKS; }
    static DEVICE int my_row() { return threadIdx.x / CHUNKS; }

    // Address of this thread's chunk of row my_row(), in the tile at shared-memory address `tile`.
    static DEVICE uint32_t my_place(uint32_t tile) { return tile + swizzled<CHUNKS>(my_row(), my_chunk()); }
    // The same, i * STEP rows on.
    static DEVICE uint32_t place(uint32_t mine, int i) {
        return (mine ^ (i * STEP % 8 * 16)) + i * STEP * CHUNKS * 16;
    }

    // Starts copying rows first .. first + ROWS - 1; unreadable ones become zeros.
    template <class Rows> static DEVICE void start_checked(uint32_t tile, const Rows& rows, int first) {
        const uint32_t mine = my_place(tile);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const bool valid = rows.readable(first + my_row() + i * STEP);
            auto from = rows.origin();
            if (valid) from = rows.template at<ROWS, STEP>(first, my_row(), i * STEP, my_chunk());
            Rows::Format::copy_at(place(mine, i), from, valid);
        }
    }

    // Likewise, without checks: most tiles are readable whole.
    template <class Rows> static DEVICE void start(uint32_t tile, const Rows& rows, int first) {
        if (rows.all_readable(first, ROWS)) {
            const uint32_t mine = my_place(tile);
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                Rows::Format::copy_at(place(mine, i), rows.template at<ROWS, STEP>(first, my_row(), i * STEP, my_chunk()));
        } else {
            start_checked(tile, rows, first);
        }
    }

    // Likewise in two steps, for an arch without cp.async: registers hold what is in flight.
    template <class Rows> static DEVICE void fetch(uint4 (&held)[COUNT], const Rows& rows, int first) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            held[i] = make_uint4(0, 0, 0, 0);
            if (rows.readable(first + my_row() + i * STEP))
                held[i] = Rows::Format::load(rows.template at<ROWS, STEP>(first, my_row(), i * STEP, my_chunk()));
        }
    }
    static DEVICE void store(uint32_t tile, const uint4 (&held)[COUNT]) {
        const uint32_t mine = my_place(tile);
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(place(mine, i)), "r"(held[i].x),
                         "r"(held[i].y), "r"(held[i].z), "r"(held[i].w)
                         : "memory");
    }
};

// As ldmatrix4 and ldmatrix4_trans, at a shared-memory address: what a swizzle's xor is applied to.
DEVICE void ldmatrix4_at(uint32_t (&r)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}
DEVICE void ldmatrix4_trans_at(uint32_t (&r)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// The address `chunk` (a constant) chunks after `at`, whose own chunk and row the swizzle has already mixed. Bits 4 to 6
// of `at` hold that mixture; the chunk that went into it has no bit in common with `chunk`.
DEVICE uint32_t chunks_after(uint32_t at, int chunk) { return (at ^ (chunk % 8 * 16)) + chunk / 8 * 128; }

// A barrier among `threads` threads (whole warps); ids 1 to 15, 0 is __syncthreads.
DEVICE void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
