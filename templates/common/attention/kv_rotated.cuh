// Caches of codes of 4 or 3 bits with a scale in fp16 for each 32 values of a head (kv_formats_torch.py says what they are).
// Before that, blocks of 64 values are rotated (rotation.cuh). What is read is rotated, but by `load_values`: so queries are
// rotated too, and what was summed of V is rotated back.
//
// Of a block the first scale is that of the first four values of each eight, and the second that of the others. Eight codes
// are a word of nibbles: i and i + 4 of it are codes 2 i and 2 i + 1. Of 4 bits they are stored so. Of 3 bits a block is four
// words of lower bits, each of 16 codes, and two of upper bits, each of 32.
#pragma once
#include "common/attention/kv_int8.cuh"
#include "common/attention/rotation.cuh"

// How a block's words of nibbles are stored: a lane has eight codes, the block's `nth`.
template <int BITS> struct CodeWords;

template <> struct CodeWords<4> {
    static constexpr int BLOCK = 32;  // bytes
    // In a tile, of so many blocks of a key: an odd number of 32 bytes, so that four keys one after the other meet in no bank.
    static DEVICE constexpr int row_bytes(int blocks) { return (blocks | 1) * 32; }
    // Where eights 2 t and 2 t + 1 of a block begin, and those; likewise of one.
    static DEVICE int at_two(int t) { return t * 8; }
    static DEVICE uint2 two(const char* at, int) { return *reinterpret_cast<const uint2*>(at); }
    static DEVICE int at_one(int nth) { return nth * 4; }
    static DEVICE uint32_t one(const char* at, int) { return *reinterpret_cast<const uint32_t*>(at); }
    typedef uint32_t Stored;  // what a lane stores
    static DEVICE Stored stored(uint32_t nibbles) { return nibbles; }
    static DEVICE uint32_t nibbles(Stored x, int) { return x; }
    // Eight codes in global memory (CodePages::Chunk).
    static DEVICE uint32_t load(const int8_t* chunk) { return uint32_t(load_l2(reinterpret_cast<const int*>(chunk))); }
};

template <> struct CodeWords<3> {
    typedef uint2 Stored;  // the words of lower and of upper bits that have the lane's codes
    static constexpr uint32_t LOWER = 0x33333333u, UPPER = 0x11111111u;
    static constexpr int BLOCK = 24;  // bytes
    // An odd number of 16 bytes: of eight keys neither the four words nor the two meet in a bank.
    static DEVICE constexpr int row_bytes(int blocks) { return ((blocks * BLOCK + 15) / 16 | 1) * 16; }
    static DEVICE uint32_t nibbles(uint32_t lower, uint32_t upper, int nth) {
        return (lower >> nth % 2 * 2 & LOWER) | (upper >> nth % 4 << 2 & ~LOWER);  // their highest bits may be anything
    }
    static DEVICE uint32_t nibbles(Stored x, int nth) { return nibbles(x.x, x.y, nth); }
    static DEVICE int at_two(int t) { return t * 4; }
    static DEVICE uint2 two(const char* at, int t) {
        const uint32_t lower = *reinterpret_cast<const uint32_t*>(at);
        const uint32_t upper = *reinterpret_cast<const uint32_t*>(at + (16 + t / 2 * 4 - t * 4)) >> t % 2 * 2;
        return make_uint2(nibbles(lower, upper, 0), nibbles(lower, upper, 1));
    }
    static DEVICE int at_one(int nth) { return nth / 2 * 4; }
    static DEVICE uint32_t one(const char* at, int nth) {
        const uint32_t upper = *reinterpret_cast<const uint32_t*>(at + (16 + nth / 4 * 4 - nth / 2 * 4));
        return nibbles(*reinterpret_cast<const uint32_t*>(at), upper, nth);
    }
    // Made by the eight lanes that hold a block.
    static DEVICE Stored stored(uint32_t nibbles) {
        const int nth = threadIdx.x % 8;
        uint32_t lower = (nibbles & LOWER) << nth % 2 * 2, upper = (nibbles >> 2 & UPPER) << nth % 4;
        lower |= __shfl_xor_sync(lanes_of_block(), lower, 1);
        upper |= __shfl_xor_sync(lanes_of_block(), upper, 1);
        upper |= __shfl_xor_sync(lanes_of_block(), upper, 2);
        return make_uint2(lower, upper);
    }
    static DEVICE void put(void* block, int nth, Stored x) {
        uint32_t* const words = reinterpret_cast<uint32_t*>(block);
        if (nth % 2 == 0) words[nth / 2] = x.x;
        if (nth % 4 == 0) words[4 + nth / 4] = x.y;
    }
    static DEVICE uint32_t load(const int8_t* chunk) {
        const int nth = int(reinterpret_cast<uint64_t>(chunk) % 8);
        const int* const words = reinterpret_cast<const int*>(chunk - nth);
        return nibbles(uint32_t(load_l2(words + nth / 2)), uint32_t(load_l2(words + 4 + nth / 4)), nth);
    }
};

// What a lane holds of a head (HeadSlice) as it is stored. Made by all lanes that hold the head.
template <int BITS> struct RotatedCodes {
    typename CodeWords<BITS>::Stored low, high;
    uint32_t low_scales, high_scales;
};

template <int BITS_, bool BF16, int HEAD_DIM, int PAGE_HEADS, int PAGE_SIZE>
struct RotatedGroups : CodePages<RotatedGroups<BITS_, BF16, HEAD_DIM, PAGE_HEADS, PAGE_SIZE>, BITS_, 2, HEAD_DIM, PAGE_HEADS, PAGE_SIZE> {
    typedef int8_t Element;
    typedef typename CodePages<RotatedGroups, BITS_, 2, HEAD_DIM, PAGE_HEADS, PAGE_SIZE>::Chunk Chunk;
    typedef CodeWords<BITS_> Words;
    static constexpr bool IS_ROTATED = true, IS_SIGNED = BITS_ == 3;
    static constexpr int BITS = BITS_, HALF = 1 << (BITS_ - 1);  // codes are -HALF to HALF - 1, as they are stored HALF more

    // Codes 2 i and 2 i + 1 of a word in fp16, exactly: with 64 more, as upper bits of the mantissa, and less HALF - 1/2.
    static constexpr uint32_t MASK = BITS == 4 ? 0x00f000f0u : 0x00700070u;
    static constexpr uint32_t LESS = BITS == 4 ? 0xd478d478u : 0xd438d438u;  // -71.5 or -67.5, twice
    static DEVICE uint32_t more(uint32_t codes, int i) {
        return ((i == 0 ? codes << 4 : codes >> (i - 1) * 4) & MASK) | 0x54005400u;
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
            found.x = Words::load(chunk.codes);
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
        if constexpr (IS_SIGNED) flip_signs(x);
        return pack8<BF16>(x);
    }

    typedef RotatedCodes<BITS> Codes;
    // Codes of eight values, and the scales of the block of the eight lanes that hold it. A NaN makes those of both.
    static DEVICE uint32_t quantized(const uint4& values, uint32_t& scales) {
        float x[8];
        unpack8<BF16>(values, x);
        if constexpr (IS_SIGNED) flip_signs(x);
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
            const uint16_t scale = Half<false>::from_float(top * (1.0f / HALF));
            const float factor = Half<false>::to_float(scale), inverse = factor > 0.0f ? __fdiv_rn(1.0f, factor) : 0.0f;
            scales |= uint32_t(scale) << half * 16;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int code = int(fminf(fmaxf(floorf(x[half * 4 + i] * inverse), float(-HALF)), float(HALF - 1))) + HALF;
                codes |= uint32_t(code) << (half * 8 + i / 2 * 4 + i % 2 * 16);
            }
        }
        return codes;
    }
    template <class Slice> using Stored = Codes;
    template <class Slice> static DEVICE Codes stored(const Slice& x, const Element* = nullptr, int = 0) {
        Codes s;
        s.low = Words::stored(quantized(x.low.part[0], s.low_scales));
        s.high = Words::stored(quantized(x.high.part[0], s.high_scales));
        return s;
    }
    // To a row of `width` values.
    static DEVICE void store_row(Element* to, uint16_t* scales, int width, const Codes& x, int lane) {
        if constexpr (BITS == 4) {
            reinterpret_cast<uint32_t*>(to)[lane] = x.low;
            reinterpret_cast<uint32_t*>(to)[width / 16 + lane] = x.high;
        } else {
            Words::put(to + lane / 8 * (8 * BITS), lane % 8, x.low);
            Words::put(to + (width / 128 + lane / 8) * (8 * BITS), lane % 8, x.high);
        }
        if (lane % 8 == 0) {
            reinterpret_cast<uint32_t*>(scales)[lane / 8] = x.low_scales;
            reinterpret_cast<uint32_t*>(scales)[width / 128 + lane / 8] = x.high_scales;
        }
    }
    // What is read of it, as `load` would.
    static DEVICE uint4 low(const Codes& x) { return converted(Words::nibbles(x.low, threadIdx.x % 8), x.low_scales); }
    static DEVICE uint4 high(const Codes& x) { return converted(Words::nibbles(x.high, threadIdx.x % 8), x.high_scales); }
};
