// The memory of ranks through which they exchange rows of NUM_VECS vectors: exchange_norm's `exchange_bytes`. A rank's
// has for each of two phases a slot for each rank, of so many rows; then an epoch for each row, whose last bit is the
// phase that its next exchange takes. All rows of all ranks are exchanged equally often, whichever kernel does it.
// docs/kernels.md says why two phases are enough.
#pragma once
#include "common/pipeline/peer_exchange.cuh"

template <int RANKS, int NUM_VECS> struct RankRows {
    const uint64_t* addresses;
    uint4* own;
    int64_t slot;  // vectors of one
    int rank;

    DEVICE uint4* peer(int p) const { return reinterpret_cast<uint4*>(addresses[p]); }
    DEVICE const uint32_t* abort() const { return reinterpret_cast<const uint32_t*>(addresses[RANKS]); }
    DEVICE uint32_t* epoch(int64_t row) const { return reinterpret_cast<uint32_t*>(own + 2 * RANKS * slot) + row; }
    // Of vector v of a row, in the first slot of a phase; others are `slot` apart.
    DEVICE int64_t at(uint32_t phase, int64_t row, int v) const {
        return int(phase & 1) * RANKS * slot + row * NUM_VECS + v;
    }
};
