// The mask of an attention body: a type that says which keys a query sees, `Mask`.
#pragma once
#include "common/ptx/types.cuh"

// Keys [first, end).
struct KeySpan {
    int first, end;

    DEVICE bool has(int key) const { return uint32_t(key - first) < uint32_t(end - first); }
    DEVICE bool has_all(int from, int count) const { return from >= first && from + count <= end; }
};

// A mask is evaluated by a query's position. first_visible and visible_end never fall as the position rises, so a block
// reads keys from first_visible of its first query to visible_end of its last one.
//
// This one is causal with a sliding window: a query sees at most WINDOW keys, its own included, or all if WINDOW is 0;
// with CAUSAL, none after its own.
template <bool CAUSAL, int WINDOW> struct WindowMask {
    static constexpr bool HAS_FIRST = WINDOW > 0;  // else first_visible is 0 for every query
    int kv_len;                                    // of the sequence

    DEVICE int first_visible(int position) const { return WINDOW > 0 ? max(position - WINDOW + 1, 0) : 0; }
    DEVICE int visible_end(int position) const { return CAUSAL ? position + 1 : kv_len; }
    DEVICE bool visible(int position, int key) const {
        return (CAUSAL ? key <= position : key < kv_len) && (WINDOW == 0 || key > position - WINDOW);
    }
    // `visible` and its two halves. Arguments are references: NVRTC then orders a compare's operands as if it were
    // inlined by hand, and bodies that were measured with inlined compares keep their machine code.
    DEVICE bool sees(const int& position, const int& key) const {
        return (CAUSAL ? key <= position : key < kv_len) && (WINDOW == 0 || key > position - WINDOW);
    }
    DEVICE bool after_last(const int& position, const int& key) const { return key > (CAUSAL ? position : kv_len - 1); }
    DEVICE bool before_first(const int& position, const int& key) const { return WINDOW > 0 && key <= position - WINDOW; }

    // Keys that any query from first_position to last_position sees.
    DEVICE KeySpan visible_keys(int first_position, int last_position) const {
        const int end = max(visible_end(last_position), 0);
        return {first_visible(first_position), end};
    }
};
