// Which keys a query sees: a type that an attention body takes, as `Mask`.
#pragma once
#include "common/ptx/types.cuh"

// Keys [first, end).
struct KeySpan {
    int first, end;

    DEVICE bool has(int key) const { return uint32_t(key - first) < uint32_t(end - first); }
    DEVICE bool has_all(int from, int count) const { return from >= first && from + count <= end; }
};

// What bodies ask of a mask. It is asked by a query's position; first_visible and visible_end never fall as that rises, so
// a block of queries reads from first_visible of its first one to visible_end of its last one.
//
// This mask: a query sees WINDOW keys at most, its own included, or all where WINDOW is 0; with CAUSAL, none after its own.
template <bool CAUSAL, int WINDOW> struct WindowMask {
    static constexpr bool HAS_FIRST = WINDOW > 0;  // else first_visible is 0 for every query
    int kv_len;                                    // of the sequence

    DEVICE int first_visible(int position) const { return WINDOW > 0 ? max(position - WINDOW + 1, 0) : 0; }
    DEVICE int visible_end(int position) const { return CAUSAL ? position + 1 : kv_len; }
    DEVICE bool visible(int position, int key) const {
        return (CAUSAL ? key <= position : key < kv_len) && (WINDOW == 0 || key > position - WINDOW);
    }
    // As `visible`, and its two halves. By reference: NVRTC orders the operands of a compare as if it stood in the caller,
    // which keeps the machine code of bodies that were measured with the compares written out.
    DEVICE bool sees(const int& position, const int& key) const {
        return (CAUSAL ? key <= position : key < kv_len) && (WINDOW == 0 || key > position - WINDOW);
    }
    DEVICE bool after_last(const int& position, const int& key) const { return key > (CAUSAL ? position : kv_len - 1); }
    DEVICE bool before_first(const int& position, const int& key) const { return WINDOW > 0 && key <= position - WINDOW; }

    // The keys that some query from first_position to last_position sees.
    DEVICE KeySpan visible_keys(int first_position, int last_position) const {
        const int end = max(visible_end(last_position), 0);
        return {first_visible(first_position), end};
    }
};
