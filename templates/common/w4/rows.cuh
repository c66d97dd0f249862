// Tile schedulers of the W4A16 kernels.
#pragma once
#include "common/ptx/types.cuh"

// m0: a tile's first row; end: one past the last row of its W; n_strip: its first strip of W; matrix: which W.
struct W4Tile {
    int m0, end, n_strip, matrix;
};

// All tokens times one W.
struct AllTokens {
    static constexpr bool GATHERS = false, MAY_BE_FEW = false;
    int num_tokens;

    template <class S> DEVICE int tiles() const { return (num_tokens + S::BLOCK_M - 1) / S::BLOCK_M; }
    // Rasterisation: tiles that share rows of W follow each other, in bands of 16 token tiles, so that both operands
    // stay in L2.
    template <class S> DEVICE W4Tile at(int tile) const {
        constexpr int BAND = 16, TILES_N = ceil_div(S::N, S::BLOCK_N);
        const int band = tile / (BAND * TILES_N), in_band = tile - band * (BAND * TILES_N);
        const int rows = min_of(BAND, tiles<S>() - band * BAND);
        const int n = in_band / rows;
        return {(band * BAND + in_band - n * rows) * S::BLOCK_M, num_tokens, n * (S::BLOCK_N / 32), 0};
    }
    DEVICE int x_row(int row) const { return row; }
    DEVICE int64_t out_row(int row) const { return row; }
};
