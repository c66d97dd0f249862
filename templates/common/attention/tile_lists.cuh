// Lists of key tiles (tile_lists.py): which block of queries a list is of, and the tiles of a list in order.
#pragma once
#include "common/attention/tile_iterator.cuh"

constexpr int LIST_QUERIES = 128, LIST_KEYS = 128;
constexpr float NOTHING = -1e30f;  // the score of a tile that no query of a block sees

// The first list of a sequence, whose query tokens begin at q_begin.
DEVICE int first_list(int q_begin, int seq) { return q_begin / LIST_QUERIES + seq; }

// The queries that share a list.
struct QueryBlock {
    int seq;
    int q_begin;         // the sequence's first query token
    int first, count;    // of its tokens
    int first_position;  // of `first`
};

// False where a list is nobody's. Each warp searches on its own, 32 sequences at a time.
DEVICE bool find_query_block(QueryBlock& found, int list, const int32_t* cu_seqlens_q, const int32_t* kv_lens, int batch) {
    const int lane = threadIdx.x % 32;
    for (int base = 0; base < batch; base += 32) {
        const int seq = base + lane;
        const int begin = seq < batch ? cu_seqlens_q[seq] : 0;
        const int tokens = seq < batch ? cu_seqlens_q[seq + 1] - begin : 0;
        const int block = list - first_list(begin, seq);
        const uint32_t here = __ballot_sync(0xffffffffu, block >= 0 && block < ceil_div(tokens, LIST_QUERIES));
        if (!here) continue;
        const int owner = __ffs(here) - 1;
        found.seq = base + owner;
        found.q_begin = __shfl_sync(0xffffffffu, begin, owner);
        found.first = __shfl_sync(0xffffffffu, block, owner) * LIST_QUERIES;
        const int all = __shfl_sync(0xffffffffu, tokens, owner);
        found.count = min(LIST_QUERIES, all - found.first);
        found.first_position = kv_lens[found.seq] - all + found.first;
        return true;
    }
    return false;
}

// A list of one block of rows, from the last tile down: entries, and how many. Entries whose keys no row of the block
// sees are left out: its rows may end before the list's queries do.
struct TileList {
    const int32_t* entries;
    int count;

    // q_begin, seq, first_row: of the block (PrefillTile). counts, lists: [lists][NUM_KV_HEADS], lists [max_tiles] wide.
    template <int GROUP, int NUM_KV_HEADS>
    static DEVICE TileList find(int q_begin, int seq, int first_row, int kv_head, KeySpan keys, const int32_t* counts,
                                const int32_t* lists, int max_tiles) {
        const int64_t own = int64_t(first_list(q_begin, seq) + first_row / (GROUP * LIST_QUERIES)) * NUM_KV_HEADS + kv_head;
        TileList list{lists + own * max_tiles, keys.first < keys.end ? counts[own] : 0};
        while (list.count > 0 && list.entries[0] * LIST_KEYS >= keys.end) ++list.entries, --list.count;
        return list;
    }
};

// The tile iterator of a list: an entry is LIST_KEYS / BLOCK_N tiles, of which the first may have no keys that are seen.
template <int BLOCK_N> struct TilesOfList {
    static constexpr int PER_ENTRY = LIST_KEYS / BLOCK_N;
    static_assert(PER_ENTRY * BLOCK_N == LIST_KEYS, "an entry has whole tiles");
    const int32_t* entries;
    int first, end;

    DEVICE TilesOfList(const TileList& list, KeySpan keys) : entries(list.entries), first(0), end(list.count * PER_ENTRY) {
        while (first < end && key_at(first) >= keys.end) ++first;
    }
    DEVICE bool has(const int& place) const { return place < end; }
    DEVICE bool has_next(const int& place) const { return place + 1 < end; }
    DEVICE int next(const int& place, int steps = 1) const { return place + steps; }
    DEVICE int key_at(const int& place) const {
        return (entries[place / PER_ENTRY] * PER_ENTRY + (PER_ENTRY - 1 - place % PER_ENTRY)) * BLOCK_N;
    }
};

// The tiles of a list in pairs, as two consumers take them: of pair i the upper tile is consumer 0's. What consumers ask
// of a tile, whether it is masked and how it came, is the same for all pairs behind the second: they are seen whole.
template <int BLOCK_N> struct PairsOfList {
    static_assert(LIST_KEYS == 2 * BLOCK_N, "an entry is a pair");
    const int32_t* entries;
    int count, upper[2];

    DEVICE explicit PairsOfList(const TileList& list) : entries(list.entries), count(list.count) {
        upper[0] = count > 0 ? 2 * entries[0] + 1 : 0;
        upper[1] = count > 1 ? 2 * entries[1] + 1 : 0;
    }
    DEVICE int tile(int pair, int consumer) const { return 2 * entries[pair] + 1 - consumer; }
    DEVICE int known_tile(int pair, int consumer) const { return pair < 2 ? upper[pair > 0] - consumer : 0; }
};
