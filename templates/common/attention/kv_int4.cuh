// A cache of 4-bit codes with a scale in fp16 for each 32 values of a head (kv_formats_torch.py says what they are). Before
// that, blocks of 64 values are rotated (rotation.cuh). What is read is rotated, but by `load_values`: so queries are rotated
// too, and what was summed of V is rotated back.
//
// Of a block the first scale is that of the first four values of each eight, and the second that of the others. Eight codes
// are a word: nibbles i and i + 4 of it are codes 2 i and 2 i + 1.
#pragma once
#include "common/attention/kv_int8.cuh"
#include "common/attention/rotation.cuh"

template <bool BF16, int HEAD_DIM, int PAGE_HEADS, int PAGE_SIZE>
struct Int4Groups : CodePages<Int4Groups<BF16, HEAD_DIM, PAGE_HEADS, PAGE_SIZE>, 4, 2, HEAD_DIM, PAGE_HEADS, PAGE_SIZE> {
    typedef int8_t Element;
    typedef typename CodePages<Int4Groups, 4, 2, HEAD_DIM, PAGE_HEADS, PAGE_SIZE>::Chunk Chunk;
    static constexpr bool IS_ROTATED = true;

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
    // The same, each rounded once.
    static DEVICE uint4 converted(uint32_t codes, uint32_t scales) {
        if constexpr (BF16) {
            float x[8];
            multiplied(codes, scales, x);
            return pack8<BF16>(x);
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
    // Eight values as they were before the rotation, each rounded once: by the eight lanes that have a block's chunks.
    static DEVICE uint4 load_values(const Chunk& chunk, bool valid = true) {
        const uint2 words_of = words(chunk, valid);
        float x[8];
        multiplied(words_of.x, words_of.y, x);
        rotate64(x);
        return pack8<BF16>(x);
    }

    // What a lane holds of a head (HeadSlice) as it is stored. Made by all lanes that hold the head.
    struct Codes {
        uint32_t low, high, low_scales, high_scales;
    };
    // Codes of eight values, and the scales of the block of the eight lanes that hold it. A NaN makes those of both.
    static DEVICE uint32_t quantized(const uint4& values, uint32_t& scales) {
        float x[8];
        unpack8<BF16>(values, x);
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
