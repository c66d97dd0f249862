// A cache of 8-bit codes with a scale in fp16 for each 64 values of a head (kv_formats_torch.py says what they are).
// A head's page is PAGE_SIZE rows of codes, then their scales. Codes become 16-bit elements in the copy.
//
// Codes8 is how the eight values of a chunk are coded. SCALES: those of 64 values; elements(n): Elements that n values take.
#pragma once
#include "common/attention/kv_tile.cuh"
#include "common/ptx/load_l2.cuh"

// What a lane holds of a head (HeadSlice) as it is stored.
struct CodesOfHead {
    uint2 low, high;
    uint16_t low_scale, high_scale;
};

// A NaN stays: it makes that of the scale, and so of all that is read of the group.
DEVICE float larger_or_nan(float a, float b) { return b > a || b != b ? b : a; }

// Pages of codes of BITS_ bits, with SCALES_ scales in fp16 for each 64. Codes8_: how eight codes become values and are made
// of them (Int8Groups, Fp8Groups, RotatedGroups).
template <class Codes8_, int BITS_, int SCALES_, int HEAD_DIM, int PAGE_HEADS, int PAGE_SIZE> struct CodePages {
    typedef int8_t Element;
    typedef Codes8_ Codes8;
    static constexpr bool IS_BYTES = false, IS_ROWS = false;
    static constexpr int BITS = BITS_, SCALES = SCALES_, GROUPS = HEAD_DIM / 64;
    static DEVICE constexpr int elements(int values) { return values * BITS / 8; }
    // Of three bits, where a chunk of a row is said to begin: where its block does, at a multiple of eight bytes, with the
    // chunk's number in the block for the lower bits of the address.
    static DEVICE constexpr int chunk_at(int chunk) { return chunk / 8 * 24 + chunk % 8; }
    static constexpr int ROW = elements(HEAD_DIM), SCALE_ROW = GROUPS * SCALES * 2, HEAD_PAGE = PAGE_SIZE * (ROW + SCALE_ROW);
    static_assert(HEAD_DIM % 128 == 0, "whole groups in each half of a head, which lanes hold apart");

    // Where a row of a page begins, of its codes and of its scales, in bytes.
    struct Place {
        int64_t codes, scales;
    };
    // Eight codes, and the scales of their group.
    struct Chunk {
        const int8_t* codes;
        const uint16_t* scale;
    };
    // Of the token at position `key`, on page `page`, from chunk `chunk` on.
    static DEVICE Place place(int64_t page, int key, int kv_head, int chunk) {
        return place_of(page * PAGE_HEADS + kv_head, key % PAGE_SIZE, chunk);
    }
    // Of row `row` of a head's page, counted through all pages and heads.
    static DEVICE Place place_of(int64_t head_page, int row, int chunk) {
        const int64_t page = head_page * HEAD_PAGE;
        if constexpr (BITS == 3)
            return {page + row * ROW + chunk_at(chunk), page + PAGE_SIZE * ROW + row * SCALE_ROW + chunk / 8 * (2 * SCALES)};
        else
            return {page + row * ROW + chunk * BITS, page + PAGE_SIZE * ROW + row * SCALE_ROW + chunk / 8 * (2 * SCALES)};
    }
    static DEVICE Chunk at(const Element* cache, const Place& place, bool is_key = false) {
        return {cache + place.codes, reinterpret_cast<const uint16_t*>(cache + place.scales)};
    }
    static DEVICE const Chunk& codes(const Chunk& c) { return c; }
    // Where columns `block` * 64 on lie: in rows of so many codes, and which of a row's groups is theirs.
    static DEVICE int row_width(int block, bool is_key) { return HEAD_DIM; }
    static DEVICE int scale_of(int block, bool is_key) { return block; }
    static DEVICE Chunk after(const Chunk& from, int rows, int chunks) {
        if constexpr (BITS == 3)
            return {from.codes + rows * ROW + chunk_at(chunks), from.scale + rows * (SCALE_ROW / 2) + chunks / 8 * SCALES};
        else
            return {from.codes + rows * ROW + chunks * BITS, from.scale + rows * (SCALE_ROW / 2) + chunks / 8 * SCALES};
    }

    // Codes and scales apart (CodeTile, NibbleTile). The scales of 16 keys, a multiple of 16 the first, are SCALE_PIECES of
    // 16 bytes.
    static constexpr int SCALE_PIECES = SCALE_ROW, TURNED_GROUPS = 0;
    // first: a chunk of the first key, of group `group`.
    static DEVICE const uint16_t* scale_piece(const Chunk& first, int group, int i) { return first.scale - group * SCALES + i * 8; }
    static DEVICE int scale_at(int key, int group, bool is_key) { return (key * GROUPS + group) * SCALES; }
    static DEVICE int key_of_scale(int n) { return n / (GROUPS * SCALES); }

    // Global memory to registers. Zeros and no access where `valid` is false.
    template <bool CONSTANT> static DEVICE uint4 load_or_zero(const Chunk& chunk, bool valid) { return Codes8::load(chunk, valid); }
    // Global to shared memory, at once.
    static DEVICE void copy(void* to, const Chunk& chunk) { *static_cast<uint4*>(to) = Codes8::load(chunk); }
    static DEVICE void copy_or_zero(void* to, const Chunk& chunk, bool valid) { *static_cast<uint4*>(to) = Codes8::load(chunk, valid); }
    static DEVICE void copy_at(uint32_t to, const Chunk& chunk, bool valid = true) {
        const uint4 x = Codes8::load(chunk, valid);
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
    }
    // To row `row` of a cache, counted through all pages and heads.
    template <class Codes> static DEVICE void store(Element* cache, int64_t row, const Codes& x, int lane, bool is_key) {
        const Place place = place_of(row / PAGE_SIZE, int(row % PAGE_SIZE), 0);
        Codes8::store_row(cache + place.codes, reinterpret_cast<uint16_t*>(cache + place.scales), HEAD_DIM, x, lane);
    }
};

// Codes of a byte each, with a scale of 64.
template <class Codes8_, int HEAD_DIM, int PAGE_HEADS, int PAGE_SIZE>
struct ByteGroups : CodePages<Codes8_, 8, 1, HEAD_DIM, PAGE_HEADS, PAGE_SIZE> {
    typedef typename CodePages<Codes8_, 8, 1, HEAD_DIM, PAGE_HEADS, PAGE_SIZE>::Chunk Chunk;
    static constexpr bool IS_ROTATED = false, IS_SIGNED = false;

    // Through L2: another block of this kernel may have written it.
    static DEVICE uint4 load(const Chunk& chunk, bool valid = true) {
        uint2 codes = make_uint2(0, 0);
        uint16_t scale = 0;
        if (valid) {
            codes = load_l2(reinterpret_cast<const uint2*>(chunk.codes));
            scale = load_l2(chunk.scale);
        }
        return Codes8_::converted(codes, scale);
    }
    static DEVICE uint4 load_values(const Chunk& chunk, bool valid = true) { return load(chunk, valid); }

    template <class Slice> using Stored = CodesOfHead;
    // What is read of it, as `load` would.
    static DEVICE uint4 low(const CodesOfHead& x) { return Codes8_::converted(x.low, x.low_scale); }
    static DEVICE uint4 high(const CodesOfHead& x) { return Codes8_::converted(x.high, x.high_scale); }
};

template <bool BF16, int HEAD_DIM, int PAGE_HEADS, int PAGE_SIZE>
struct Int8Groups : ByteGroups<Int8Groups<BF16, HEAD_DIM, PAGE_HEADS, PAGE_SIZE>, HEAD_DIM, PAGE_HEADS, PAGE_SIZE> {
    typedef int8_t Element;
    static constexpr bool ARE_INTEGERS = true;  // no code is a NaN, and `more` is one number more than `integers`

    // Codes 2 i and 2 i + 1 of a word, which are stored with 128 more, in fp16, exactly: with 1152 more, and as they are.
    static constexpr uint32_t RAISE = 0x64646464u, LESS = 0xe480e480u;  // 1024 in the upper bytes; -1152, twice
    static DEVICE uint32_t more(uint32_t codes, int i, uint32_t raise = RAISE) { return __byte_perm(codes, raise, i ? 0x4342 : 0x4140); }
    static DEVICE uint32_t integers(uint32_t codes, int i, uint32_t raise = RAISE) {
        return Half<false>::add2(more(codes, i, raise), LESS);
    }
    // Eight codes times their scale, each rounded once.
    static DEVICE uint4 converted(uint2 codes, uint16_t scale) {
        const uint32_t c[2] = {codes.x, codes.y};
        uint32_t out[4];
        if constexpr (BF16) {
            // 2^15 + 128 + code, times the scale, less as much for 2^15 + 128; all exact: 32896 has 9 bits, a scale 11.
            const float factor = Half<false>::to_float(scale), less = -32896.0f * factor;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float a = __uint_as_float(__byte_perm(c[i / 2], 0x47000000u, i % 2 ? 0x7424 : 0x7404));
                const float b = __uint_as_float(__byte_perm(c[i / 2], 0x47000000u, i % 2 ? 0x7434 : 0x7414));
                out[i] = Half<true>::pack(fmaf(a, factor, less), fmaf(b, factor, less));
            }
        } else {
            const uint32_t factor = uint32_t(scale) * 0x10001u;
#pragma unroll
            for (int i = 0; i < 4; ++i) out[i] = Half<false>::mul2(integers(c[i / 2], i % 2), factor);
        }
        return make_uint4(out[0], out[1], out[2], out[3]);
    }

    // Codes and scale of eight values; the scale is that of the eight lanes that hold a group.
    static DEVICE uint2 quantized(const uint4& values, uint16_t& scale) {
        const uint32_t packed[4] = {values.x, values.y, values.z, values.w};
        float x[8], top = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 two = Half<BF16>::unpack(packed[i]);
            x[2 * i] = two.x, x[2 * i + 1] = two.y;
            top = larger_or_nan(larger_or_nan(top, fabsf(two.x)), fabsf(two.y));
        }
        const uint32_t lanes = 0xffu << (threadIdx.x % 32 / 8 * 8);  // others may be elsewhere
#pragma unroll
        for (int mask = 1; mask < 8; mask *= 2) top = larger_or_nan(top, __shfl_xor_sync(lanes, top, mask));
        scale = Half<false>::from_float(__fdiv_rn(top, 127.0f));
        const float factor = Half<false>::to_float(scale), inverse = factor > 0.0f ? __fdiv_rn(1.0f, factor) : 0.0f;
        uint32_t codes[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int code = __float2int_rn(fminf(fmaxf(x[i] * inverse, -127.0f), 127.0f));
            codes[i / 4] |= (uint32_t(code) & 0xffu) << (i % 4 * 8);
        }
        return make_uint2(codes[0] ^ 0x80808080u, codes[1] ^ 0x80808080u);  // 128 more, each a byte without a sign
    }

    // Made by all lanes that hold the head. Of a format whose scales are its caches': for `kv_head` of one.
    template <class Slice> static DEVICE CodesOfHead stored(const Slice& x, const Element* = nullptr, int = 0) {
        CodesOfHead s;
        s.low = quantized(x.low.part[0], s.low_scale);
        s.high = quantized(x.high.part[0], s.high_scale);
        return s;
    }
    // To a row of `width` values.
    static DEVICE void store_row(Element* to, uint16_t* scales, int width, const CodesOfHead& x, int lane) {
        reinterpret_cast<uint2*>(to)[lane] = x.low;
        reinterpret_cast<uint2*>(to)[width / 16 + lane] = x.high;
        if (lane % 8 == 0) scales[lane / 8] = x.low_scale, scales[width / 128 + lane / 8] = x.high_scale;
    }
};
