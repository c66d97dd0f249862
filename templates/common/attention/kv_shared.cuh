// A cache of layers whose K is V (values.py, KVFormat.is_shared): a head's page is PAGE_SIZE rows of V, then as many of the
// 128 dims of K that RoPE turns, each with 64 of either half of a head; of codes then the scales of both. The other dims of
// K are read as V's: k's weight is in q (HeadSlice::fold).
#pragma once
#include "common/attention/kv_int8.cuh"

// Codes8_: how eight values are coded, Elements16 where they are stored as they are multiplied.
template <class Codes8_, int HEAD_DIM, int PAGE_HEADS, int PAGE_SIZE> struct SharedPagesOf {
    typedef Codes8_ Codes8;
    typedef typename Codes8::Element Element;
    template <class Slice> using Stored = typename Codes8::template Stored<Slice>;
    static constexpr bool IS_BYTES = Codes8::IS_BYTES, IS_ROWS = false, IS_ROTATED = Codes8::IS_ROTATED, IS_SIGNED = Codes8::IS_SIGNED;
    static constexpr int BITS = Codes8::BITS, SCALES = Codes8::SCALES;
    static constexpr int ROTATED = 128, PART = ROTATED / 2 / 8;  // chunks of either half
    // Elements of a head's page, and where its parts begin.
    static constexpr int TURNED_AT = PAGE_SIZE * Codes8::elements(HEAD_DIM), SCALES_AT = TURNED_AT + PAGE_SIZE * Codes8::elements(ROTATED);
    static constexpr int TURNED_SCALES_AT = SCALES_AT + PAGE_SIZE * (HEAD_DIM / 64 * 2 * SCALES);
    static constexpr int HEAD_PAGE = TURNED_SCALES_AT + PAGE_SIZE * (ROTATED / 64 * 2 * SCALES);
    static_assert(HEAD_DIM == 512, "of which RoPE turns 128 dims");

    struct Place {
        int64_t page;  // where the head's page begins
        int row, chunk;
    };
    // A chunk of K or V, found where it is copied.
    struct Chunk {
        const Element* page;
        int row, chunk;
        bool is_key;
    };
    static DEVICE Place place(int64_t page, int key, int kv_head, int chunk) {
        return {(page * PAGE_HEADS + kv_head) * HEAD_PAGE, key % PAGE_SIZE, chunk};
    }
    static DEVICE Chunk at(const Element* cache, const Place& place, bool is_key) {
        return {cache + place.page, place.row, place.chunk, is_key};
    }
    static DEVICE Chunk after(const Chunk& from, int rows, int chunks) {
        return {from.page, from.row + rows, from.chunk + chunks, from.is_key};
    }

    static DEVICE bool is_turned(const Chunk& c) { return c.is_key && c.chunk % (HEAD_DIM / 16) < PART; }
    // Of a turned chunk: its place in the row of turned dims.
    static DEVICE int turned(const Chunk& c) { return c.chunk < PART ? c.chunk : c.chunk - HEAD_DIM / 16 + PART; }
    static DEVICE const Element* elements(const Chunk& c) {
        if constexpr (Codes8::BITS == 3) {
            if (is_turned(c)) return c.page + TURNED_AT + c.row * Codes8::elements(ROTATED) + Codes8::chunk_at(turned(c));
            return c.page + c.row * Codes8::elements(HEAD_DIM) + Codes8::chunk_at(c.chunk);
        } else {
            if (is_turned(c)) return c.page + TURNED_AT + c.row * Codes8::elements(ROTATED) + Codes8::elements(turned(c) * 8);
            return c.page + c.row * Codes8::elements(HEAD_DIM) + Codes8::elements(c.chunk * 8);
        }
    }
    // As Int8Groups has it, of V's rows or of those of turned dims.
    static DEVICE int row_width(int block, bool is_key) {
        return is_turned({nullptr, 0, block * 8, is_key}) ? ROTATED : HEAD_DIM;
    }
    static DEVICE int scale_of(int block, bool is_key) {
        const Chunk c{nullptr, 0, block * 8, is_key};
        return is_turned(c) ? turned(c) / 8 : block;
    }
    // The chunk as Codes8 has it.
    static DEVICE auto codes(const Chunk& c) {
        if constexpr (SCALES == 0) {
            return elements(c);
        } else {
            const uint16_t* const scales = reinterpret_cast<const uint16_t*>(c.page + (is_turned(c) ? TURNED_SCALES_AT : SCALES_AT));
            const int block = c.chunk / 8, group = c.row * (row_width(block, c.is_key) / 64) + scale_of(block, c.is_key);
            return typename Codes8::Chunk{elements(c), scales + group * SCALES};
        }
    }

    // As Int8Groups: the scales of V, then those of turned dims.
    static constexpr int GROUPS = HEAD_DIM / 64, TURNED_GROUPS = ROTATED / 64, V_PIECES = 2 * GROUPS * SCALES;
    static constexpr int SCALE_PIECES = V_PIECES + 2 * TURNED_GROUPS * SCALES;
    static DEVICE const uint16_t* scale_piece(const Chunk& first, int, int i) {
        const bool of_v = i < V_PIECES;
        const uint16_t* const all = reinterpret_cast<const uint16_t*>(first.page + (of_v ? SCALES_AT : TURNED_SCALES_AT));
        return all + first.row * ((of_v ? GROUPS : TURNED_GROUPS) * SCALES) + (of_v ? i : i - V_PIECES) * 8;
    }
    // The 64 codes of K of a turned group, of the key `row` rows after `first`.
    static DEVICE const int8_t* turned_codes(const Chunk& first, int row, int group) {
        return reinterpret_cast<const int8_t*>(first.page + TURNED_AT + (first.row + row) * Codes8::elements(ROTATED) +
                                               group / (GROUPS / TURNED_GROUPS) * Codes8::elements(64));
    }
    static DEVICE int scale_at(int key, int group, bool is_key) {
        const bool of_turned = is_key && group % (GROUPS / 2) == 0;
        return (of_turned ? 16 * GROUPS + key * TURNED_GROUPS + group / (GROUPS / 2) : key * GROUPS + group) * SCALES;
    }
    static DEVICE int key_of_scale(int n) {
        constexpr int OF_V = 16 * GROUPS * SCALES;
        return n < OF_V ? n / (GROUPS * SCALES) : (n - OF_V) / (TURNED_GROUPS * SCALES);
    }

    static DEVICE void copy(void* to, const Chunk& c) { Codes8::copy(to, codes(c)); }
    static DEVICE void copy_or_zero(void* to, const Chunk& c, bool valid) { Codes8::copy_or_zero(to, codes(c), valid); }
    static DEVICE void copy_at(uint32_t to, const Chunk& c, bool valid = true) { Codes8::copy_at(to, codes(c), valid); }
    static DEVICE uint4 load(const Chunk& c) { return Codes8::load(codes(c)); }
    static DEVICE uint4 load_values(const Chunk& c, bool valid = true) { return Codes8::load_values(codes(c), valid); }
    template <bool CONSTANT> static DEVICE uint4 load_or_zero(const Chunk& c, bool valid) {
        return Codes8::template load_or_zero<CONSTANT>(codes(c), valid);
    }

    template <class Slice> static DEVICE decltype(auto) stored(const Slice& x, const Element* = nullptr, int = 0) { return Codes8::stored(x); }
    template <class X> static DEVICE uint4 low(const X& x) { return Codes8::low(x); }
    template <class X> static DEVICE uint4 high(const X& x) { return Codes8::high(x); }
    // Of V all of a head; of K the dims that are turned, which the first lanes hold.
    template <class X> static DEVICE void store(Element* cache, int64_t row, const X& x, int lane, bool is_key) {
        if (is_key && lane >= PART) return;
        Element* const page = cache + row / PAGE_SIZE * HEAD_PAGE;
        const int of_page = int(row % PAGE_SIZE), width = is_key ? ROTATED : HEAD_DIM;
        Element* const to = page + (is_key ? TURNED_AT : 0) + of_page * Codes8::elements(width);
        uint16_t* const scales = reinterpret_cast<uint16_t*>(page + (is_key ? TURNED_SCALES_AT : SCALES_AT)) + of_page * (width / 64 * SCALES);
        Codes8::store_row(to, scales, width, x, lane);
    }
};

// Of elements of 16 bits, or of int8.
template <bool BF16, bool IS_INT8, int HEAD_DIM, int PAGE_HEADS, int PAGE_SIZE> struct SharedFormat {
    typedef SharedPagesOf<Elements16, HEAD_DIM, PAGE_HEADS, PAGE_SIZE> Pages;
};
template <bool BF16, int HEAD_DIM, int PAGE_HEADS, int PAGE_SIZE> struct SharedFormat<BF16, true, HEAD_DIM, PAGE_HEADS, PAGE_SIZE> {
    typedef SharedPagesOf<Int8Groups<BF16, HEAD_DIM, PAGE_HEADS, PAGE_SIZE>, HEAD_DIM, PAGE_HEADS, PAGE_SIZE> Pages;
};
template <bool BF16, bool IS_INT8, int HEAD_DIM, int PAGE_HEADS, int PAGE_SIZE>
using SharedPages = typename SharedFormat<BF16, IS_INT8, HEAD_DIM, PAGE_HEADS, PAGE_SIZE>::Pages;
