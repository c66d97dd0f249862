// Epilogue of attention: how a block's output is stored.
#pragma once
#include "common/ptx/types.cuh"

// Stores rows row .. row + ROWS - 1 of a 16-bit tile in shared memory to the output, by one warp: 16 bytes a lane,
// whole lines. The tile's row 0 is row first_row of the output; CHUNKS chunks of 16 bytes are stored, from `chunk` on.
// offset(row, chunk): a chunk's byte offset in the tile. Rows beyond the output's end are skipped.
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
