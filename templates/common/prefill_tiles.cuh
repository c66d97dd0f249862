// Prefill attention: tiles of rows between global and shared memory.
//
// A tile's row is HEAD_DIM 16-bit elements in chunks of 16 bytes; chunk c of row r lies at c ^ (r % 8), so that eight
// rows at one column (an ldmatrix, a quarter-warp's load) never meet in a bank.
#pragma once
#include "common/copy.cuh"

// Byte offset of chunk `chunk` of row `row` in a tile of rows of CHUNKS chunks (a power of two, 2 or more).
template <int CHUNKS> DEVICE int swizzled(int row, int chunk) {
    constexpr int ROWS_A_LINE = CHUNKS >= 8 ? 1 : 8 / CHUNKS;  // rows that share 128 bytes
    return (row * CHUNKS + (chunk ^ (row / ROWS_A_LINE % min_of(CHUNKS, 8)))) * 16;
}

// The keys or the values of one sequence and kv head. Only positions in [lo, hi) are ever read, and only their
// entries of the block table: others may hold anything.
template <int HEAD_DIM, int NUM_KV_HEADS, int PAGE_SIZE> struct KvRows {
    const uint16_t* base;  // dense: position 0; paged: this head's first page of the cache
    const int32_t* pages;  // this sequence's row of the block table, read where it lies
    int lo, hi;

    DEVICE bool readable(int position) const { return uint32_t(position - lo) < uint32_t(hi - lo); }

    DEVICE const uint16_t* row(int position) const {
        if constexpr (PAGE_SIZE > 0) {
            const int64_t page = pages[position / PAGE_SIZE];
            return base + (page * (NUM_KV_HEADS * PAGE_SIZE) + position % PAGE_SIZE) * HEAD_DIM;
        } else {
            return base + int64_t(position) * (NUM_KV_HEADS * HEAD_DIM);
        }
    }
};

// How THREADS threads share a tile of ROWS rows: thread t has chunk t % CHUNKS of rows t / CHUNKS + i * STEP.
template <int HEAD_DIM, int ROWS, int THREADS> struct TileCopy {
    static constexpr int CHUNKS = HEAD_DIM / 8, STEP = THREADS / CHUNKS, COUNT = ROWS / STEP;
    static_assert(THREADS % CHUNKS == 0 && ROWS % STEP == 0, "every thread copies the same number of chunks");

    // Starts copying positions first .. first + ROWS - 1; unreadable ones become zeros.
    template <class Rows> static DEVICE void start(unsigned char* tile, const Rows& rows, int first) {
        const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int r = row + i * STEP;
            const bool valid = rows.readable(first + r);
            const uint16_t* from = valid ? rows.row(first + r) + chunk * 8 : rows.base;
            copy16_or_zero(tile + swizzled<CHUNKS>(r, chunk), from, valid);
        }
    }

    // The same in two steps, for an arch without cp.async: what is under way is held in registers.
    template <class Rows> static DEVICE void fetch(uint4 (&held)[COUNT], const Rows& rows, int first) {
        const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int position = first + row + i * STEP;
            held[i] = make_uint4(0, 0, 0, 0);
            if (rows.readable(position)) held[i] = *reinterpret_cast<const uint4*>(rows.row(position) + chunk * 8);
        }
    }
    static DEVICE void store(unsigned char* tile, const uint4 (&held)[COUNT]) {
        const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            *reinterpret_cast<uint4*>(tile + swizzled<CHUNKS>(row + i * STEP, chunk)) = held[i];
    }
};

// A barrier among `threads` threads (whole warps); ids 1 to 15, 0 is __syncthreads.
DEVICE void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The packed query (or output) rows of one sequence and kv head: row = token * GROUP + head in the group.
template <int HEAD_DIM, int NUM_Q_HEADS, int GROUP> struct QueryRows {
    uint16_t* base;  // token 0 of the sequence, first head of the group
    int num_rows;

    DEVICE bool readable(int row) const { return row < num_rows; }
    DEVICE uint16_t* row(int row) const {
        return base + (int64_t(row / GROUP) * NUM_Q_HEADS + row % GROUP) * HEAD_DIM;
    }
};
