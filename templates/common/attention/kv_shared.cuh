// A cache of layers whose K is V (values.py, KVFormat.is_shared): a head's page is PAGE_SIZE rows of V, then as many of the
// 128 dims of K that RoPE turns, each with 64 of either half of a head; in int8 then the scales of both. The other dims of
// K are read as V's: k's weight is in q (HeadSlice::fold).
#pragma once
#include "common/attention/kv_int8.cuh"

template <bool BF16, bool IS_INT8, int HEAD_DIM, int PAGE_HEADS, int PAGE_SIZE> struct SharedPages {
    typedef Int8Groups<BF16, HEAD_DIM, PAGE_HEADS, PAGE_SIZE> Codes8;
    template <bool INT8, class = void> struct Types {
        typedef int8_t Element;
        template <class Slice> using Stored = typename Codes8::Codes;
    };
    template <class Unused> struct Types<false, Unused> {
        typedef uint16_t Element;
        template <class Slice> using Stored = Slice;
    };
    typedef typename Types<IS_INT8>::Element Element;
    template <class Slice> using Stored = typename Types<IS_INT8>::template Stored<Slice>;
    static constexpr bool IS_BYTES = !IS_INT8, IS_ROWS = false;
    static constexpr int ROTATED = 128, PART = ROTATED / 2 / 8;  // chunks of either half
    // Elements of a head's page, and where its parts begin.
    static constexpr int TURNED_AT = PAGE_SIZE * HEAD_DIM, SCALES_AT = TURNED_AT + PAGE_SIZE * ROTATED;
    static constexpr int TURNED_SCALES_AT = SCALES_AT + PAGE_SIZE * (HEAD_DIM / 64 * 2);
    static constexpr int HEAD_PAGE = IS_INT8 ? TURNED_SCALES_AT + PAGE_SIZE * (ROTATED / 64 * 2) : SCALES_AT;
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
        if (is_turned(c)) return c.page + TURNED_AT + c.row * ROTATED + turned(c) * 8;
        return c.page + c.row * HEAD_DIM + c.chunk * 8;
    }
    // As Int8Groups has it, of V's rows or of those of turned dims.
    static DEVICE int row_width(int block, bool is_key) {
        return is_turned({nullptr, 0, block * 8, is_key}) ? ROTATED : HEAD_DIM;
    }
    static DEVICE int scale_of(int block, bool is_key) {
        const Chunk c{nullptr, 0, block * 8, is_key};
        return is_turned(c) ? turned(c) / 8 : block;
    }
    static DEVICE typename Codes8::Chunk codes(const Chunk& c) {
        const uint16_t* const scales = reinterpret_cast<const uint16_t*>(c.page + (is_turned(c) ? TURNED_SCALES_AT : SCALES_AT));
        const int block = c.chunk / 8, group = c.row * (row_width(block, c.is_key) / 64) + scale_of(block, c.is_key);
        return {reinterpret_cast<const int8_t*>(elements(c)), scales + group};
    }

    // As Int8Groups: the scales of V, then those of turned dims.
    static constexpr int GROUPS = HEAD_DIM / 64, TURNED_GROUPS = ROTATED / 64, V_PIECES = 2 * GROUPS;
    static constexpr int SCALE_PIECES = V_PIECES + 2 * TURNED_GROUPS;
    static DEVICE const uint16_t* scale_piece(const Chunk& first, int, int i) {
        const bool of_v = i < V_PIECES;
        const uint16_t* const all = reinterpret_cast<const uint16_t*>(first.page + (of_v ? SCALES_AT : TURNED_SCALES_AT));
        return all + first.row * (of_v ? GROUPS : TURNED_GROUPS) + (of_v ? i : i - V_PIECES) * 8;
    }
    // The 64 codes of K of a turned group, of the key `row` rows after `first`.
    static DEVICE const int8_t* turned_codes(const Chunk& first, int row, int group) {
        return reinterpret_cast<const int8_t*>(first.page + TURNED_AT + (first.row + row) * ROTATED + group / (GROUPS / TURNED_GROUPS) * 64);
    }
    static DEVICE int scale_at(int key, int group, bool is_key) {
        return is_key && group % (GROUPS / 2) == 0 ? 16 * GROUPS + key * TURNED_GROUPS + group / (GROUPS / 2) : key * GROUPS + group;
    }
    static DEVICE int key_of_scale(int n) { return n < 16 * GROUPS ? n / GROUPS : (n - 16 * GROUPS) / TURNED_GROUPS; }

    static DEVICE void copy(void* to, const Chunk& c) {
        if constexpr (IS_INT8)
            Codes8::copy(to, codes(c));
        else
            copy16(to, elements(c));
    }
    static DEVICE void copy_or_zero(void* to, const Chunk& c, bool valid) {
        if constexpr (IS_INT8)
            Codes8::copy_or_zero(to, codes(c), valid);
        else
            copy16_or_zero(to, elements(c), valid);
    }
    static DEVICE void copy_at(uint32_t to, const Chunk& c, bool valid = true) {
        if constexpr (IS_INT8)
            Codes8::copy_at(to, codes(c), valid);
        else
            copy16_at(to, elements(c), valid);
    }
    static DEVICE uint4 load(const Chunk& c) {
        if constexpr (IS_INT8)
            return Codes8::load(codes(c));
        else
            return *reinterpret_cast<const uint4*>(elements(c));
    }
    template <bool CONSTANT> static DEVICE uint4 load_or_zero(const Chunk& c, bool valid) {
        if constexpr (IS_INT8)
            return Codes8::load(codes(c), valid);
        else
            return ::load_or_zero<CONSTANT>(elements(c), valid);
    }

    template <class Slice> static DEVICE Stored<Slice> stored(const Slice& x) {
        if constexpr (IS_INT8)
            return Codes8::stored(x);
        else
            return x;
    }
    template <class X> static DEVICE uint4 low(const X& x) {
        if constexpr (IS_INT8)
            return Codes8::low(x);
        else
            return x.low.part[0];
    }
    template <class X> static DEVICE uint4 high(const X& x) {
        if constexpr (IS_INT8)
            return Codes8::high(x);
        else
            return x.high.part[0];
    }
    // Of V all of a head; of K the dims that are turned, which the first lanes hold.
    template <class X> static DEVICE void store(Element* cache, int64_t row, const X& x, int lane, bool is_key) {
        if (is_key && lane >= PART) return;
        Element* const page = cache + row / PAGE_SIZE * HEAD_PAGE;
        const int of_page = int(row % PAGE_SIZE), width = is_key ? ROTATED : HEAD_DIM;
        Element* const to = page + (is_key ? TURNED_AT : 0) + of_page * width;
        if constexpr (IS_INT8) {
            uint16_t* const scales = reinterpret_cast<uint16_t*>(page + (is_key ? TURNED_SCALES_AT : SCALES_AT)) + of_page * (width / 64);
            reinterpret_cast<uint2*>(to)[lane] = x.low;
            reinterpret_cast<uint2*>(to)[width / 16 + lane] = x.high;
            if (lane % 8 == 0) scales[lane / 8] = x.low_scale, scales[width / 128 + lane / 8] = x.high_scale;
        } else {
            reinterpret_cast<uint4*>(to)[lane] = x.low.part[0];
            reinterpret_cast<uint4*>(to)[width / 16 + lane] = x.high.part[0];
        }
    }
};
