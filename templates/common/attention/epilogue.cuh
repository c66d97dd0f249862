// What becomes of a block's output.
#pragma once
#include "common/ptx/types.cuh"

// A warp's rows of a tile of 16-bit elements in shared memory, to rows of the output: 16 bytes a lane and whole lines. Rows
// row .. row + ROWS - 1 of the tile, which begins with the output's row first_row, and CHUNKS chunks of 16 bytes from
// `chunk` on; offset(row, chunk) is where one lies, in bytes. Rows that the output does not have are left out.
template <int ROWS, int CHUNKS, class Results, class Offset>
DEVICE void store_rows(const Results& results, const unsigned char* tile, int first_row, int row, int chunk, Offset offset) {
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < ROWS * CHUNKS; i += 32) {
        const int its_row = row + i / CHUNKS, its_chunk = chunk + i % CHUNKS, at = first_row + its_row;
        if (results.readable(at))
            *reinterpret_cast<uint4*>(results.row(at) + its_chunk * 8) =
                *reinterpret_cast<const uint4*>(tile + offset(its_row, its_chunk));
    }
}
