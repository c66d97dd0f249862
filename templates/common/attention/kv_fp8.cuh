// A cache of codes in e4m3 (8-bit floats, no infinities, 448 the largest), with the static scales of a layer's K and V
// (kv_formats_torch.py). Rows have a scale for each 64 values, as in Int8Groups, all the same: they are put there when
// the pool is made, and nobody writes them again. It is 256 times that of the checkpoint, since a code becomes a number
// of fp16 256 times too small.
#pragma once
#include "common/attention/kv_int8.cuh"

// The nearest code of x, ties to even, within +-448; of a NaN that of a NaN. The same bits on every architecture.
DEVICE uint32_t e4m3_of(float x) {
    const uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80u;
    if (x != x) return sign | 0x7fu;
    const float size = fminf(fabsf(x), 448.0f);
    if (size < 0.015625f) return sign | uint32_t(__float2int_rn(size * 512.0f));  // multiples of 2^-9 below 2^-6
    const uint32_t up = __float_as_uint(size) + 0x7ffffu + (__float_as_uint(size) >> 20 & 1u);
    return sign | ((up >> 20) - (120u << 3));  // exponents' biases are 127 and 7
}

template <bool BF16, int HEAD_DIM, int PAGE_HEADS, int PAGE_SIZE>
struct Fp8Groups : ByteGroups<Fp8Groups<BF16, HEAD_DIM, PAGE_HEADS, PAGE_SIZE>, HEAD_DIM, PAGE_HEADS, PAGE_SIZE> {
    typedef int8_t Element;
    typedef ByteGroups<Fp8Groups, HEAD_DIM, PAGE_HEADS, PAGE_SIZE> Pages;
    static constexpr bool ARE_INTEGERS = false;
    static constexpr uint32_t RAISE = 0, LESS = 0;

    // Codes 2 i and 2 i + 1 of a word in fp16, exactly, over 256: three bits of mantissa and four of exponent are where
    // fp16 has its own. A NaN's become those of a NaN.
    static DEVICE uint32_t integers(uint32_t codes, int i, uint32_t = 0) {
        const uint32_t x = __byte_perm(codes, 0, i ? 0x3424 : 0x1404), size = x & 0x7f007f00u;
        return (size | ((size + 0x01000100u) & 0x80008000u)) >> 1 | (x & 0x80008000u);
    }
    static DEVICE uint32_t more(uint32_t codes, int i, uint32_t = 0) { return integers(codes, i); }
    // Eight codes times their scale, each rounded once.
    static DEVICE uint4 converted(uint2 codes, uint16_t scale) {
        const uint32_t c[2] = {codes.x, codes.y}, factors = uint32_t(scale) * 0x10001u;
        const float factor = Half<false>::to_float(scale);
        uint32_t out[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t two = integers(c[i / 2], i % 2);
            if constexpr (BF16) {
                const float2 each = Half<false>::unpack(two);
                out[i] = Half<true>::pack(each.x * factor, each.y * factor);
            } else {
                out[i] = Half<false>::mul2(two, factors);
            }
        }
        return make_uint4(out[0], out[1], out[2], out[3]);
    }

    // x / scale. Of numbers of 11 bits it lies in the middle of two codes or 2^-17 of itself away from that, so a product
    // would do but for the middle, which the second step finds. Without it where x is infinite, or the scale is 0.
    static DEVICE float over(float x, float scale, float inverse) {
        const float near = x * inverse;
        return fabsf(near) < 1024.0f ? copysignf(fmaf(fmaf(-near, scale, x), inverse, near), x) : near;
    }
    // Codes of eight values; zeros where the scale is none.
    static DEVICE uint2 quantized(const uint4& values, float scale) {
        const uint32_t packed[4] = {values.x, values.y, values.z, values.w};
        const float inverse = scale > 0.0f ? __fdiv_rn(1.0f, scale) : 0.0f;
        uint32_t codes[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 two = Half<BF16>::unpack(packed[i]);
            codes[i / 2] |= (e4m3_of(over(two.x, scale, inverse)) | e4m3_of(over(two.y, scale, inverse)) << 8) << (i % 2 * 16);
        }
        return make_uint2(codes[0], codes[1]);
    }
    // By the scale of the cache that it goes to, which the head has in all rows: all blocks read that of the first one.
    template <class Slice> static DEVICE CodesOfHead stored(const Slice& x, const Element* cache, int kv_head) {
        const uint16_t its = load_l2(Pages::at(cache, Pages::place(0, 0, kv_head, 0)).scale);
        const float scale = Half<false>::to_float(its) * 0.00390625f;
        return {quantized(x.low.part[0], scale), quantized(x.high.part[0], scale), its, its};
    }
    // To a row of `width` values.
    static DEVICE void store_row(Element* to, uint16_t*, int width, const CodesOfHead& x, int lane) {
        reinterpret_cast<uint2*>(to)[lane] = x.low;
        reinterpret_cast<uint2*>(to)[width / 16 + lane] = x.high;
    }
};
