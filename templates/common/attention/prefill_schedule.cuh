// Prefill attention: the queries of a block, and the keys that they see.
//
// Query heads that share a kv head are packed into rows: row = query token * GROUP + head in the group. A block of rows
// then spans few tokens: short chunks fill it, and the ragged edge of a causal or windowed mask is thin.
#pragma once
#include "common/attention/tile_iterator.cuh"

struct PrefillTile {
    int seq;        // which sequence
    int first_row;  // first packed row of the block
    int num_rows;   // packed rows of the whole sequence: seqlen_q * GROUP
    int q_begin;    // first query token of the sequence in q
};

// The `tile`-th block of BLOCK_M packed rows over all sequences; false if there are fewer. Each warp searches on its
// own, 32 sequences at a time. Within a sequence the last rows come first: under a causal mask they see the most keys.
template <int GROUP, int BLOCK_M>
DEVICE bool find_prefill_tile(PrefillTile& found, int tile, const int32_t* cu_seqlens_q, int batch) {
    const int lane = threadIdx.x % 32;
    for (int base = 0; base < batch; base += 32) {
        const int seq = base + lane;
        const int begin = seq < batch ? cu_seqlens_q[seq] : 0;
        const int rows = seq < batch ? (cu_seqlens_q[seq + 1] - begin) * GROUP : 0;
        const int tiles = ceil_div(rows, BLOCK_M);
        int upto = tiles;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int below = __shfl_up_sync(0xffffffffu, upto, step);
            if (lane >= step) upto += below;
        }
        const uint32_t beyond = __ballot_sync(0xffffffffu, upto > tile);
        if (beyond) {
            const int owner = __ffs(beyond) - 1;
            const int last = __shfl_sync(0xffffffffu, upto, owner) - 1;
            found.seq = base + owner;
            found.first_row = (last - tile) * BLOCK_M;
            found.num_rows = __shfl_sync(0xffffffffu, rows, owner);
            found.q_begin = __shfl_sync(0xffffffffu, begin, owner);
            return true;
        }
        tile -= __shfl_sync(0xffffffffu, upto, 31);
    }
    return false;
}

// Keys that a block's rows see, in positions of the sequence, and where the mask must be applied.
template <int GROUP, int BLOCK_M, class Mask> struct KeyRange {
    Mask mask;
    KeySpan keys;     // outside of it nothing may be read
    int all_hi;       // keys below it are seen by every row, as far as visible_end goes
    int all_lo;       // keys from it on are seen by every row, as far as first_visible goes
    int first_query;  // position of query token 0

    DEVICE KeyRange(const PrefillTile& tile, int kv_len) : mask{kv_len} {
        first_query = kv_len - tile.num_rows / GROUP;
        const int low = first_query + tile.first_row / GROUP;
        const int high = first_query + (min(tile.first_row + BLOCK_M, tile.num_rows) - 1) / GROUP;
        keys.end = min(kv_len, mask.visible_end(high));
        all_hi = min(kv_len, mask.visible_end(low));
        keys.first = mask.first_visible(low);
        all_lo = mask.first_visible(high);
    }

    DEVICE int position(int row) const { return first_query + row / GROUP; }

    // True if some row does not see all of keys [first, first + n): mask.needs_mask by bounds that are known already.
    DEVICE bool needs_mask(int first, int n) const { return first + n > all_hi || (Mask::HAS_FIRST && first < all_lo); }
};
