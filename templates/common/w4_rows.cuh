// What a W4A16 kernel multiplies, a tile at a time.
#pragma once

// m0: a tile's first row; end: one beyond the last row that its W has; n_strip: its first strip of W; matrix: which W.
struct W4Tile {
    int m0, end, n_strip, matrix;
};
