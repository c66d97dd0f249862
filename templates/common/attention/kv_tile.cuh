// Keys and values: the cache's format and the loader of a tile, as types that an attention body takes.
#pragma once
#include "common/attention/mask.cuh"
#include "common/ptx/copy.cuh"

// A KvFormat is the format of a cache. The tensor cores take 16-bit elements, eight in a chunk of 16 bytes. A format
// converts a chunk at a time, in the copy and in `store`.
//
// This one stores elements as they are multiplied. IS_BYTES: rows may be copied as bytes, asynchronously, so bulk copies
// and TMA boxes work too. IS_ROTATED: blocks of 64 values are stored times a matrix (rotation.cuh), and read so; IS_SIGNED:
// times signs before that.
struct Elements16 {
    typedef uint16_t Element;
    static constexpr bool IS_BYTES = true, IS_ROTATED = false, IS_SIGNED = false;
    static constexpr int BITS = 16, SCALES = 0;  // of a value, and in memory of 64 values
    static DEVICE constexpr int elements(int values) { return values; }

    // Global to shared memory, asynchronous where the arch has cp.async; zeros where `valid` is false.
    static DEVICE void copy(void* to, const Element* chunk) { copy16(to, chunk); }
    static DEVICE void copy_or_zero(void* to, const Element* chunk, bool valid) { copy16_or_zero(to, chunk, valid); }
    static DEVICE void copy_at(uint32_t to, const Element* chunk, bool valid = true) { copy16_at(to, chunk, valid); }
    // Global memory to registers.
    static DEVICE uint4 load(const Element* chunk) { return *reinterpret_cast<const uint4*>(chunk); }
    template <bool CONSTANT> static DEVICE uint4 load_or_zero(const Element* chunk, bool valid) {
        return ::load_or_zero<CONSTANT>(chunk, valid);
    }
    // The eight values of a chunk as the model has them, not rotated, zeros where `valid` is false. Called by the eight lanes
    // that have the chunks of a block of 64 values.
    static DEVICE uint4 load_values(const Element* chunk, bool valid = true) { return ::load_or_zero<false>(chunk, valid); }
    // Stores a lane's part of a head (HeadSlice) to row `row` of a cache. Called by all lanes that hold the head.
    template <class Slice> static DEVICE void store(Element* cache, int64_t row, const Slice& x, int lane, bool is_key = false) {
        x.store(cache, row, lane);
    }
    // To a row of `width` values.
    template <class Slice> static DEVICE void store_row(Element* to, const uint16_t*, int width, const Slice& x, int lane) {
        reinterpret_cast<uint4*>(to)[lane] = x.low.part[0];
        reinterpret_cast<uint4*>(to)[width / 16 + lane] = x.high.part[0];
    }
    // What a lane holds of a head as it is stored, and its two chunks as they are read again.
    template <class Slice> using Stored = Slice;
    template <class Slice> static DEVICE const Slice& stored(const Slice& x, const Element* = nullptr, int = 0) { return x; }
    template <class Slice> static DEVICE uint4 low(const Slice& x) { return x.low.part[0]; }
    template <class Slice> static DEVICE uint4 high(const Slice& x) { return x.high.part[0]; }
};

// Row index in a cache [num_pages, page_heads, page_size] of kv_head: for the token at position `key`, on page `page`, or
// for slot `slot` of slot_mapping.
DEVICE int64_t cache_row(int64_t page, int key, int kv_head, int page_heads, int page_size) {
    return (page * page_heads + kv_head) * page_size + key % page_size;
}
DEVICE int64_t cache_row(int64_t slot, int kv_head, int page_heads, int page_size) {
    return (slot / page_size * page_heads + kv_head) * page_size + slot % page_size;
}

// The same in a cache of such pages. HEAD_PAGE: Elements of a head's page. IS_ROWS: it is rows of elements and nothing
// else. Place: where a row of a page begins.
template <int HEAD_DIM, int PAGE_HEADS, int PAGE_SIZE> struct Elements16In : Elements16 {
    static constexpr bool IS_ROWS = true;
    static constexpr int HEAD_PAGE = PAGE_SIZE * HEAD_DIM;
    typedef int64_t Place;
    typedef const Element* Chunk;

    // Of the token at position `key`, on page `page`, from chunk `chunk` on.
    static DEVICE Place place(int64_t page, int key, int kv_head, int chunk) {
        return cache_row(page, key, kv_head, PAGE_HEADS, PAGE_SIZE) * HEAD_DIM + chunk * 8;
    }
    // That, of K or V.
    static DEVICE Chunk at(const Element* cache, Place place, bool is_key) { return cache + place; }
    // So many rows and chunks after `from`, on its page. From a chunk within a group of a format with scales `chunks` lead
    // to no later group than from that group's first chunk.
    static DEVICE Chunk after(Chunk from, int rows, int chunks) { return from + rows * HEAD_DIM + chunks * 8; }
};

// Keys or values of one sequence and kv head. Only positions in `keys` are read, and only their entries of the block
// table; all others may hold anything. PAGE_HEADS: heads that a page has in memory, or, dense, a position.
template <class Format_, int HEAD_DIM, int PAGE_HEADS, int PAGE_SIZE> struct KvRows {
    typedef Format_ Format;
    typedef typename Format::Element Element;
    typedef typename Format::Chunk Chunk;
    const Element* base;   // dense: position 0; paged: this head's first page of the cache
    const int32_t* pages;  // this sequence's row of the block table, read where it lies
    KeySpan keys;
    bool is_key;  // K or V

    // What may be named where nothing is read.
    DEVICE Chunk origin() const {
        if constexpr (Format::IS_ROWS)
            return base;
        else
            return Format::at(base, Format::place(0, 0, 0, 0), is_key);
    }
    DEVICE bool readable(int position) const { return keys.has(position); }
    DEVICE bool all_readable(int first, int count) const { return keys.has_all(first, count); }

    // Chunk `chunk` of the row at `first` + `mine` + `step`: `first` is the same for all threads, `mine` is below STEP,
    // `step` is a constant multiple of STEP. Where pages allow it, the page depends on `first` and `step` alone, and
    // `step` ends up in the constant part of the address.
    template <int TILE, int STEP> DEVICE Chunk at(int first, int mine, int step, int chunk) const {
        if constexpr (!Format::IS_ROWS) {
            static_assert(PAGE_SIZE > 0, "it lies in pages");
            constexpr bool ONE_PAGE = PAGE_SIZE % TILE == 0, ONE_A_STEP = TILE % PAGE_SIZE == 0 && PAGE_SIZE % STEP == 0;
            const int position = first + mine + step;
            const int64_t page = pages[(ONE_PAGE ? first : ONE_A_STEP ? first + step : position) / PAGE_SIZE];
            return Format::at(base, Format::place(page, position, 0, chunk), is_key);
        } else if constexpr (PAGE_SIZE == 0) {
            const Element* start = base + (int64_t(first + mine) * (PAGE_HEADS * HEAD_DIM) + chunk * 8);
            return start + step * (PAGE_HEADS * HEAD_DIM);
        } else if constexpr (PAGE_SIZE % TILE == 0) {
            const int64_t row = int64_t(pages[first / PAGE_SIZE]) * (PAGE_HEADS * PAGE_SIZE) + first % PAGE_SIZE;
            return base + ((row + mine) * HEAD_DIM + chunk * 8) + step * HEAD_DIM;
        } else if constexpr (TILE % PAGE_SIZE == 0 && PAGE_SIZE % STEP == 0) {
            const int64_t row = int64_t(pages[first / PAGE_SIZE + step / PAGE_SIZE]) * (PAGE_HEADS * PAGE_SIZE);
            return base + ((row + mine) * HEAD_DIM + chunk * 8) + step % PAGE_SIZE * HEAD_DIM;
        } else {
            const int position = first + mine + step;
            const int64_t row = int64_t(pages[position / PAGE_SIZE]) * (PAGE_HEADS * PAGE_SIZE);
            return base + (row + position % PAGE_SIZE) * HEAD_DIM + chunk * 8;
        }
    }
};
