// Keys and values in the cache and on their way to the tensor cores: types that an attention body takes.
#pragma once
#include "common/attention/mask.cuh"
#include "common/ptx/copy.cuh"

// What is asked of a format, `KvFormat` in a body. In memory a row has HEAD_DIM of its Elements; wherever keys are multiplied
// it has 16-bit ones, eight to a chunk of 16 bytes. A format converts in the copy, a chunk at a time, and in `store`.
//
// This one: elements lie in memory as they are multiplied. Rows may then be copied as bytes, by bulk copies and in boxes
// of a tensor map, too (IS_BYTES).
struct Elements16 {
    typedef uint16_t Element;
    static constexpr bool IS_BYTES = true;

    // From global to shared memory, asynchronously where there is cp.async; zeros where `valid` is false.
    static DEVICE void copy(void* to, const Element* chunk) { copy16(to, chunk); }
    static DEVICE void copy_or_zero(void* to, const Element* chunk, bool valid) { copy16_or_zero(to, chunk, valid); }
    static DEVICE void copy_at(uint32_t to, const Element* chunk, bool valid = true) { copy16_at(to, chunk, valid); }
    // To registers.
    static DEVICE uint4 load(const Element* chunk) { return *reinterpret_cast<const uint4*>(chunk); }
    template <bool CONSTANT> static DEVICE uint4 load_or_zero(const Element* chunk, bool valid) {
        return ::load_or_zero<CONSTANT>(chunk, valid);
    }
    // What a lane holds of a head (HeadSlice) to row `row` of a cache. By all lanes that hold it.
    template <class Slice> static DEVICE void store(Element* cache, int64_t row, const Slice& x, int lane) {
        x.store(cache, row, lane);
    }
};

// Rows of a cache [num_pages, num_kv_heads, page_size]: of kv_head's part of the token at position `key`, whose page is
// `page`, or of the token in `slot`.
DEVICE int64_t cache_row(int64_t page, int key, int kv_head, int num_kv_heads, int page_size) {
    return (page * num_kv_heads + kv_head) * page_size + key % page_size;
}
DEVICE int64_t cache_row(int64_t slot, int kv_head, int num_kv_heads, int page_size) {
    return (slot / page_size * num_kv_heads + kv_head) * page_size + slot % page_size;
}

// Where such a row begins in `cache`.
template <int HEAD_DIM, int NUM_KV_HEADS, int PAGE_SIZE, class Element>
DEVICE const Element* kv_row(const Element* cache, int64_t page, int key, int kv_head) {
    return cache + ((page * NUM_KV_HEADS + kv_head) * PAGE_SIZE + key % PAGE_SIZE) * HEAD_DIM;
}

// The keys or the values of one sequence and kv head. Only positions in `keys` are ever read, and only their entries of
// the block table: others may hold anything.
template <class Format_, int HEAD_DIM, int NUM_KV_HEADS, int PAGE_SIZE> struct KvRows {
    typedef Format_ Format;
    typedef typename Format::Element Element;
    const Element* base;   // dense: position 0; paged: this head's first page of the cache
    const int32_t* pages;  // this sequence's row of the block table, read where it lies
    KeySpan keys;

    DEVICE bool readable(int position) const { return keys.has(position); }
    DEVICE bool all_readable(int first, int count) const { return keys.has_all(first, count); }

    // Chunk `chunk` of the row at `first` + `mine` + `step`: `first` is the same for all threads, `mine` is below STEP,
    // `step` is a constant multiple of STEP. Where pages allow it, the page depends on `first` and `step` alone, and
    // `step` ends up in the constant part of the address.
    template <int TILE, int STEP> DEVICE const Element* at(int first, int mine, int step, int chunk) const {
        if constexpr (PAGE_SIZE == 0) {
            const Element* start = base + (int64_t(first + mine) * (NUM_KV_HEADS * HEAD_DIM) + chunk * 8);
            return start + step * (NUM_KV_HEADS * HEAD_DIM);
        } else if constexpr (PAGE_SIZE % TILE == 0) {
            const int64_t row = int64_t(pages[first / PAGE_SIZE]) * (NUM_KV_HEADS * PAGE_SIZE) + first % PAGE_SIZE;
            return base + ((row + mine) * HEAD_DIM + chunk * 8) + step * HEAD_DIM;
        } else if constexpr (TILE % PAGE_SIZE == 0 && PAGE_SIZE % STEP == 0) {
            const int64_t row = int64_t(pages[first / PAGE_SIZE + step / PAGE_SIZE]) * (NUM_KV_HEADS * PAGE_SIZE);
            return base + ((row + mine) * HEAD_DIM + chunk * 8) + step % PAGE_SIZE * HEAD_DIM;
        } else {
            const int position = first + mine + step;
            const int64_t row = int64_t(pages[position / PAGE_SIZE]) * (NUM_KV_HEADS * PAGE_SIZE);
            return base + (row + position % PAGE_SIZE) * HEAD_DIM + chunk * 8;
        }
    }
};
