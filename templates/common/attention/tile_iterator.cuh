// The tile iterator of an attention body: a type that says which key tiles a block visits, and in which order.
#pragma once
#include "common/attention/mask.cuh"

// A position in the order is an int: `first`, then the next, while `has` is true. Bodies use nothing else, so a list of
// tiles can replace this order, which is: all tiles with visible keys, from the last one down.
template <int BLOCK_N> struct TilesBackward {
    int first, last;  // tiles of BLOCK_N keys; none where first is below last

    DEVICE explicit TilesBackward(KeySpan keys)
        : first(keys.first < keys.end ? (keys.end - 1) / BLOCK_N : -1), last(keys.first < keys.end ? keys.first / BLOCK_N : 0) {}
    DEVICE TilesBackward(int first, int last) : first(first), last(last) {}

    DEVICE bool has(const int& place) const { return place >= last; }
    DEVICE bool has_next(const int& place) const { return place > last; }
    DEVICE int next(const int& place, int steps = 1) const { return place - steps; }
    DEVICE int key(int place) const { return place * BLOCK_N; }
};

// Key range of one block. Keys [first_key, end_key) are seen by at least one of its queries. Of the BLOCK_N-aligned
// tiles that hold them, this split has [first_tile, end_tile).
struct KvRange {
    int first_key, end_key;
    int first_tile, end_tile;
};

// Queries are at positions first_position..last_position (negative: sees nothing). Splits share the visible tiles
// evenly, so a fixed grid stays balanced as the context grows.
template <int BLOCK_N, class Mask>
DEVICE KvRange kv_range(const Mask& mask, int first_position, int last_position, int split, int num_splits) {
    const KeySpan keys = mask.visible_keys(first_position, last_position);
    KvRange r;
    r.end_key = keys.end;
    r.first_key = keys.first;
    const int first = r.first_key / BLOCK_N;
    const int count = r.end_key > r.first_key ? (r.end_key + BLOCK_N - 1) / BLOCK_N - first : 0;
    r.first_tile = first + int(int64_t(count) * split / num_splits);
    r.end_tile = first + int(int64_t(count) * (split + 1) / num_splits);
    return r;
}
