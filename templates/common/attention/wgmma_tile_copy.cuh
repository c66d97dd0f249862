// Copies rows of queries and keys by cp.async into tiles that wgmma reads (warp_specialized.cuh).
#pragma once
#include "common/attention/prefill_tiles.cuh"
#include "common/pipeline/warp_specialized.cuh"

// Partition of such a tile over a warpgroup or a warp: thread t has chunk t % CHUNKS of rows t / CHUNKS + i * STEP.
template <int COLUMNS, int ROWS, int THREADS = 128> struct BlockedCopy {
    static constexpr int CHUNKS = COLUMNS / 8, STEP = THREADS / CHUNKS, COUNT = ROWS / STEP;
    static_assert(THREADS % CHUNKS == 0 && ROWS % STEP == 0 && 8 % STEP == 0, "every thread copies the same number of chunks");

    // Starts copying rows first .. first + ROWS - 1, from chunk `first_chunk` of them on; unreadable ones become zeros.
    // thread: 0 to THREADS - 1.
    template <class Rows>
    static DEVICE void start(uint32_t tile, const Rows& rows, int first, int thread, int first_chunk = 0) {
        const int chunk = thread % CHUNKS, row = thread / CHUNKS;
        const uint32_t mine = tile + blocked<ROWS>(row, chunk);
        const int from_chunk = first_chunk + chunk;
        if (rows.all_readable(first, ROWS)) {  // most are
#pragma unroll 8
            for (int i = 0; i < COUNT; ++i)
                Rows::Format::copy_at(place(mine, i), rows.template at<ROWS, STEP>(first, row, i * STEP, from_chunk));
        } else {
#pragma unroll 1
            for (int i = 0; i < COUNT; ++i) {
                const bool valid = rows.readable(first + row + i * STEP);
                auto from = rows.origin();
                if (valid) from = rows.template at<ROWS, STEP>(first, row, i * STEP, from_chunk);
                Rows::Format::copy_at(place(mine, i), from, valid);
            }
        }
    }

    // Address of the chunk i * STEP rows further.
    static DEVICE uint32_t place(uint32_t mine, int i) { return (mine ^ (i * STEP % 8 * 16)) + i * STEP * 128; }
};
