// The memory of ranks through which they exchange rows of NUM_VECS vectors: exchange_norm's `exchange_bytes`. A rank's
// has for each of two phases a slot for each rank, of so many rows; then an epoch for each row, whose last bit is the
// phase that its next exchange takes. All rows of all ranks are exchanged equally often, whichever kernel does it.
// docs/kernels.md says why two phases are enough.
#pragma once
#include "common/pipeline/peer_exchange.cuh"
#include "common/rows/vec.cuh"

template <int RANKS, int NUM_VECS> struct RankRows {
    const uint64_t* addresses;
    uint4* own;
    int64_t slot;  // vectors of one
    int rank;

    static DEVICE RankRows of(const uint64_t* addresses, int rank, int max_rows) {
        return {addresses, reinterpret_cast<uint4*>(addresses[rank]), int64_t(max_rows) * NUM_VECS, rank};
    }
    DEVICE uint4* peer(int p) const { return reinterpret_cast<uint4*>(addresses[p]); }
    DEVICE const uint32_t* abort() const { return reinterpret_cast<const uint32_t*>(addresses[RANKS]); }
    DEVICE uint32_t* epoch(int64_t row) const { return reinterpret_cast<uint32_t*>(own + 2 * RANKS * slot) + row; }
    // Of vector v of a row, in the first slot of a phase; others are `slot` apart.
    DEVICE int64_t at(uint32_t phase, int64_t row, int v) const {
        return int(phase & 1) * RANKS * slot + row * NUM_VECS + v;
    }
    // A vector as it travels: all ranks, this one too, add the same words.
    template <Dtype D> static DEVICE Vec8<D> encoded(Vec8<D> v) {
        v.part[0] = ll_encode_pairs(v.part[0]);
        return v;
    }
    // The sums over ranks of COUNT vectors, in fp32 and in the order of the ranks, the same on each: of `mine`, and of
    // what peers post. place(i): of vector i in the first slot, null where none is summed; see peer_receive.
    template <Dtype D, int COUNT, class Place>
    DEVICE void add_up(float (&sum)[COUNT][8], const Vec8<D> (&mine)[COUNT], Place place) const {
        constexpr int SOURCES = min_of(RANKS, 4);  // slots that a thread polls at a time
#pragma unroll
        for (int first = 0; first < RANKS; first += SOURCES) {
            uint4 words[COUNT * SOURCES];
            peer_receive(words, abort(), [&](int i) -> uint4* {
                const int p = first + i % SOURCES;
                return p < RANKS && p != rank && place(i / SOURCES) ? place(i / SOURCES) + p * slot : nullptr;
            });
#pragma unroll
            for (int i = 0; i < COUNT * SOURCES; ++i) {
                const int p = first + i % SOURCES, of = i / SOURCES;
                if (p >= RANKS) continue;
                Vec8<D> theirs;
                theirs.part[0] = words[i];
                float f[8];
                choose(p == rank, encoded(mine[of]), theirs).unpack(f);
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[of][j] = p == 0 ? f[j] : sum[of][j] + f[j];
            }
        }
    }
};
