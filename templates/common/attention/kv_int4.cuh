// A cache of 4-bit codes with a scale in fp16 for each 32 values of a head (kv_formats_torch.py says what they are). Before
// that, blocks of 64 values are rotated (rotation.cuh). What is read is rotated, but by `load_values`: so queries are rotated
// too, and what was summed of V is rotated back.
//
// Of a block the first scale is that of the first four values of each eight, and the second that of the others. Eight codes
// are a word: nibbles i and i + 4 of it are codes 2 i and 2 i + 1.
#pragma once
#include "common/attention/kv_int8.cuh"
#include "common/attention/rotation.cuh"

template <bool BF16, int HEAD_DIM, int PAGE_HEADS, int PAGE_SIZE> struct Int4Groups {
    typedef int8_t Element;
    typedef Int4Groups Codes8;
    static constexpr bool IS_BYTES = false, IS_ROWS = false, IS_ROTATED = true;
    static constexpr int SCALES = 2, BLOCKS = HEAD_DIM / 64;
    static DEVICE constexpr int elements(int values) { return values / 2; }
    static constexpr int ROW = elements(HEAD_DIM), SCALE_ROW = BLOCKS * SCALES * 2, HEAD_PAGE = PAGE_SIZE * (ROW + SCALE_ROW);
    static_assert(HEAD_DIM % 128 == 0, "whole blocks in each half of a head, which lanes hold apart");

    // Where a row of a page begins, of its codes and of its scales, in bytes.
    struct Place {
        int64_t codes, scales;
    };
    // Eight codes, and the two scales of their block.
    struct Chunk {
        const int8_t* codes;
        const uint16_t* scale;
    };
    static DEVICE Place place(int64_t page, int key, int kv_head, int chunk) {
        return place_of(page * PAGE_HEADS + kv_head, key % PAGE_SIZE, chunk);
    }
    // Of row `row` of a head's page, counted through all pages and heads.
    static DEVICE Place place_of(int64_t head_page, int row, int chunk) {
        const int64_t page = head_page * HEAD_PAGE;
        return {page + row * ROW + chunk * 4, page + PAGE_SIZE * ROW + row * SCALE_ROW + chunk / 8 * 4};
    }
    static DEVICE Chunk at(const Element* cache, const Place& place, bool is_key = false) {
        return {cache + place.codes, reinterpret_cast<const uint16_t*>(cache + place.scales)};
    }
    static DEVICE const Chunk& codes(const Chunk& c) { return c; }
    static DEVICE int row_width(int block, bool is_key) { return HEAD_DIM; }
    static DEVICE Chunk after(const Chunk& from, int rows, int chunks) {
        return {from.codes + rows * ROW + chunks * 4, from.scale + rows * (SCALE_ROW / 2) + chunks / 8 * SCALES};
    }

    // Codes and scales apart (NibbleTile). The scales of 16 keys, a multiple of 16 the first, are SCALE_PIECES of 16 bytes.
    static constexpr int SCALE_PIECES = SCALE_ROW, TURNED_GROUPS = 0;
    // first: a chunk of the first key, of block `block`.
    static DEVICE const uint16_t* scale_piece(const Chunk& first, int block, int i) { return first.scale - block * SCALES + i * 8; }
    static DEVICE int scale_at(int key, int block, bool is_key) { return (key * BLOCKS + block) * SCALES; }
    static DEVICE int key_of_scale(int n) { return n / (BLOCKS * SCALES); }

    // Codes 2 i and 2 i + 1 of a word in fp16, exactly: with 64 more, as bits 4 to 7 of the mantissa, and less 7.5.
    static constexpr uint32_t LESS = 0xd478d478u;  // -71.5, twice
    static DEVICE uint32_t more(uint32_t codes, int i) {
        return ((i == 0 ? codes << 4 : codes >> (i - 1) * 4) & 0x00f000f0u) | 0x54005400u;
    }
    static DEVICE uint32_t centred(uint32_t codes, int i) { return Half<false>::add2(more(codes, i), LESS); }
    // Eight codes times their scales, in fp32: exact.
    static DEVICE void multiplied(uint32_t codes, uint32_t scales, float (&x)[8]) {
        const float2 factor = Half<false>::unpack(scales);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 two = Half<false>::unpack(centred(codes, i));
            x[2 * i] = two.x * (i < 2 ? factor.x : factor.y), x[2 * i + 1] = two.y * (i < 2 ? factor.x : factor.y);
        }
    }
    static DEVICE uint4 packed(const float (&x)[8]) {
        typedef Half<BF16> H;
        return make_uint4(H::pack(x[0], x[1]), H::pack(x[2], x[3]), H::pack(x[4], x[5]), H::pack(x[6], x[7]));
    }
    // The same, each rounded once.
    static DEVICE uint4 converted(uint32_t codes, uint32_t scales) {
        if constexpr (BF16) {
            float x[8];
            multiplied(codes, scales, x);
            return packed(x);
        } else {
            const uint32_t first = __byte_perm(scales, 0, 0x1010), second = __byte_perm(scales, 0, 0x3232);
            return make_uint4(Half<false>::mul2(centred(codes, 0), first), Half<false>::mul2(centred(codes, 1), first),
                              Half<false>::mul2(centred(codes, 2), second), Half<false>::mul2(centred(codes, 3), second));
        }
    }

    // Global memory to registers, through L2: another block of this kernel may have written it. No access where `valid` is
    // false, and scales of zero.
    static DEVICE uint2 words(const Chunk& chunk, bool valid) {
        uint2 found = make_uint2(0, 0);
        if (valid) {
            found.x = uint32_t(load_l2(reinterpret_cast<const int*>(chunk.codes)));
            found.y = uint32_t(load_l2(reinterpret_cast<const int*>(chunk.scale)));
        }
        return found;
    }
    static DEVICE uint4 load(const Chunk& chunk, bool valid = true) {
        const uint2 x = words(chunk, valid);
        return converted(x.x, x.y);
    }
    template <bool CONSTANT> static DEVICE uint4 load_or_zero(const Chunk& chunk, bool valid) { return load(chunk, valid); }
    // Eight values as they were before the rotation, each rounded once: by the eight lanes that have a block's chunks.
    static DEVICE uint4 load_values(const Chunk& chunk, bool valid = true) {
        const uint2 words_of = words(chunk, valid);
        float x[8];
        multiplied(words_of.x, words_of.y, x);
        rotate64(x);
        return packed(x);
    }

    // What a lane holds of a head (HeadSlice) as it is stored. Made by all lanes that hold the head.
    struct Codes {
        uint32_t low, high, low_scales, high_scales;
    };
    // Codes of eight values, and the scales of the block of the eight lanes that hold it. A NaN makes those of both.
    static DEVICE uint32_t quantized(const uint4& values, uint32_t& scales) {
        const uint32_t packed[4] = {values.x, values.y, values.z, values.w};
        float x[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 two = Half<BF16>::unpack(packed[i]);
            x[2 * i] = two.x, x[2 * i + 1] = two.y;
        }
        rotate64(x);
        uint32_t codes = 0;
        scales = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) top = larger_or_nan(top, fabsf(x[half * 4 + i]));
#pragma unroll
            for (int mask = 1; mask < 8; mask *= 2) top = larger_or_nan(top, __shfl_xor_sync(lanes_of_block(), top, mask));
            const uint16_t scale = Half<false>::from_float(top * 0.125f);
            const float factor = Half<false>::to_float(scale), inverse = factor > 0.0f ? __fdiv_rn(1.0f, factor) : 0.0f;
            scales |= uint32_t(scale) << half * 16;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int code = int(fminf(fmaxf(floorf(x[half * 4 + i] * inverse), -8.0f), 7.0f)) + 8;
                codes |= uint32_t(code) << (half * 8 + i / 2 * 4 + i % 2 * 16);
            }
        }
        return codes;
    }
    template <class Slice> using Stored = Codes;
    template <class Slice> static DEVICE Codes stored(const Slice& x, const Element* = nullptr, int = 0) {
        Codes s;
        s.low = quantized(x.low.part[0], s.low_scales);
        s.high = quantized(x.high.part[0], s.high_scales);
        return s;
    }
    // To row `row` of a cache, counted through all pages and heads.
    static DEVICE void store(Element* cache, int64_t row, const Codes& x, int lane, bool is_key) {
        const Place place = place_of(row / PAGE_SIZE, int(row % PAGE_SIZE), 0);
        store_row(cache + place.codes, reinterpret_cast<uint16_t*>(cache + place.scales), HEAD_DIM, x, lane);
    }
    // To a row of `width` values.
    static DEVICE void store_row(Element* to, uint16_t* scales, int width, const Codes& x, int lane) {
        reinterpret_cast<uint32_t*>(to)[lane] = x.low;
        reinterpret_cast<uint32_t*>(to)[width / 16 + lane] = x.high;
        if (lane % 8 == 0) {
            reinterpret_cast<uint32_t*>(scales)[lane / 8] = x.low_scales;
            reinterpret_cast<uint32_t*>(scales)[width / 128 + lane / 8] = x.high_scales;
        }
    }
    // What is read of it, as `load` would.
    static DEVICE uint4 low(const Codes& x) { return converted(x.low, x.low_scales); }
    static DEVICE uint4 high(const Codes& x) { return converted(x.high, x.high_scales); }
};
