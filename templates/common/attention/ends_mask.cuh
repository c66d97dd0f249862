// The mask of prompts with images: a query of an image sees all of that image.
#pragma once
#include "common/attention/prefill_schedule.cuh"

// As the causal mask Causal, but a query sees keys up to an end of its own, which lies at its position or behind it.
// Ends never fall as positions rise, so those of a block's first and last query say which tiles it visits, and which
// of them need the mask.
template <class Causal> struct EndsMask {
    Causal causal;
    const int32_t* ends;  // of the sequence's query tokens: the position of the last key that each sees
    int first_query;      // position of query token 0

    // Rows behind the last query have its end: nothing is read behind the sequence.
    DEVICE int visible_end(int position) const {
        const int last = causal.kv_len - 1;
        return min(ends[min(position, last) - first_query], last) + 1;
    }
    DEVICE bool visible(int position, int key) const {
        return key < visible_end(position) && !causal.before_first(position, key);
    }
};

// KeyRange under that mask: only ends differ.
template <int GROUP, int BLOCK_M, class Causal> struct EndsRange : KeyRange<GROUP, BLOCK_M, Causal> {
    EndsMask<Causal> mask;

    DEVICE EndsRange(const PrefillTile& tile, int kv_len, const int32_t* ends)
        : KeyRange<GROUP, BLOCK_M, Causal>(tile, kv_len), mask{{kv_len}, ends + tile.q_begin, this->first_query} {
        const int last_row = min(tile.first_row + BLOCK_M, tile.num_rows) - 1;
        this->keys.end = mask.visible_end(this->position(last_row));
        this->all_hi = mask.visible_end(this->position(tile.first_row));
    }
};
