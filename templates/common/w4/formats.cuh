// Weight formats of the W4A16 kernels: how codes and scales of W lie in memory, and how lanes make operands of them.
//
// A tile is 32 x 32 weights. Of its half h, lane 4 g + t has rows 4 g + 2 h and the next, of 32 columns: k16 j is the A
// fragment of its columns 16 j and on. A row pair's scales are side by side, and so are its minima. Layout: pack.py.
#pragma once
#include "common/ptx/mma.cuh"
#include "common/w4/dequant.cuh"

template <int BITS> struct W4Codes;  // of a half of a tile
template <> struct W4Codes<4> { typedef uint2 Half; };
template <> struct W4Codes<8> { typedef uint4 Half; };
template <bool MINIMA> struct W4Scales;  // of two rows of a group, and of four: scales, minima, scales, minima
template <> struct W4Scales<false> {
    typedef uint32_t Pair;
    typedef uint2 Quad;
};
template <> struct W4Scales<true> {
    typedef uint2 Pair;
    typedef uint4 Quad;
};

// BF16: of x, and so of operands. BITS: of a code. MINIMA: a weight is code * scale + minimum; if not, code * scale.
// SCALES_BF16: whether these are bf16; if not, fp16.
template <bool BF16, int GROUP_SIZE, int BITS = 4, bool MINIMA = false, bool SCALES_BF16 = BF16> struct W4Weights {
    typedef typename W4Codes<BITS>::Half CodesHalf;
    typedef typename W4Scales<MINIMA>::Pair ScalesPair;
    typedef typename W4Scales<MINIMA>::Quad ScalesQuad;
    static constexpr int TILE_BYTES = 128 * BITS, LANE_CHUNKS = BITS / 4;  // chunks: of 16 bytes, of a tile
    static constexpr int GROUP_BYTES = MINIMA ? 128 : 64;                   // of a group's scales and minima of 32 rows
    static constexpr int TILE_CHUNKS = TILE_BYTES / 16, GROUP_CHUNKS = GROUP_BYTES / 16;
    static constexpr int TILE_GROUPS = GROUP_SIZE < 32 ? 32 / GROUP_SIZE : 1;  // that a tile has: 1, or one a k16
    static constexpr bool HAS_BIASED = BF16 && BITS == 4;  // operands that are too large by a constant
    static constexpr bool HAS_MINIMA = MINIMA;
    static constexpr int ZERO = MINIMA ? 0 : 8;            // of a nibble
    static_assert(TILE_GROUPS <= 2);

    static DEVICE CodesHalf half_of(const uint4 (&chunks)[LANE_CHUNKS], int h) {
        if constexpr (BITS == 8) return chunks[h];
        else return h ? make_uint2(chunks[0].z, chunks[0].w) : make_uint2(chunks[0].x, chunks[0].y);
    }
    static constexpr int HALF_BYTES = BITS == 8 ? 512 : 8;  // from a lane's first bytes of a tile to its second half
    // chunk: the lane's first one of the tile.
    static DEVICE CodesHalf load_half(const uint4* chunk, int h) {
        if constexpr (BITS == 8) return chunk[h * 32];
        else return reinterpret_cast<const uint2*>(chunk)[h];
    }
    static DEVICE ScalesPair pair_of(const ScalesQuad& quad, int h) {
        if constexpr (HAS_MINIMA) return h ? make_uint2(quad.z, quad.w) : make_uint2(quad.x, quad.y);
        else return h ? quad.y : quad.x;
    }
    static DEVICE float2 scales_of(const ScalesQuad& quad, int h) {
        if constexpr (HAS_MINIMA) return Half<SCALES_BF16>::unpack(pair_of(quad, h).x);
        else return Half<SCALES_BF16>::unpack(pair_of(quad, h));
    }

    // The codes of a k16 as an operand, exactly; BIASED: too large by what BIAS has.
    template <bool BIASED> static DEVICE void codes(const CodesHalf& half, int k16, uint32_t (&a)[4]) {
        if constexpr (BITS == 8) int8_to_half<BF16>(k16 ? half.z : half.x, k16 ? half.w : half.y, a);
        else int4_to_half<BF16, BIASED, ZERO>(k16 ? half.y : half.x, a);
    }

    // A row pair's weights as operands: codes times scales, plus minima. In fp32 where the scales' type is not the
    // operands', and for int8 in bf16, which has no room for a byte's bias. Rounded once, but for minima beside such a bias,
    // which first lose up to a thousandth of the scale.
    struct Scaled {
        static constexpr bool IN_FP32 = BF16 != SCALES_BF16 || (BF16 && BITS == 8);
        static constexpr float BIAS = BITS == 8 ? INT8_BIAS_FP32 : 128.0f + ZERO;
        uint32_t by_row[2], minimum[2];  // twice, or IN_FP32 floats; minima less the bias times the scale

        DEVICE explicit Scaled(const ScalesPair& pair) {
            uint32_t scales, minima = 0;
            if constexpr (HAS_MINIMA) scales = pair.x, minima = pair.y;
            else scales = pair;
            if constexpr (IN_FP32) {
                const float2 s = Half<SCALES_BF16>::unpack(scales), m = Half<SCALES_BF16>::unpack(minima);
                by_row[0] = __float_as_uint(s.x), by_row[1] = __float_as_uint(s.y);
                minimum[0] = __float_as_uint(fmaf(-BIAS, s.x, MINIMA ? m.x : 0.0f));
                minimum[1] = __float_as_uint(fmaf(-BIAS, s.y, MINIMA ? m.y : 0.0f));
            } else {
                by_row[0] = both_halves<0>(scales), by_row[1] = both_halves<1>(scales);
                minimum[0] = both_halves<0>(minima), minimum[1] = both_halves<1>(minima);
            }
        }
        DEVICE uint32_t in_fp32(float low, float high, int row) const {
            const float s = __uint_as_float(by_row[row]), m = __uint_as_float(minimum[row]);
            return Half<BF16>::pack(fmaf(low, s, m), fmaf(high, s, m));
        }
        // A k16 in two steps: its codes, where `scale` multiplies those, and then its weights.
        static DEVICE void unpack(const CodesHalf& half, int k16, uint32_t (&a)[4]) {
            if constexpr (!IN_FP32 || BITS == 4) codes<IN_FP32>(half, k16, a);
        }
        DEVICE void scale(const CodesHalf& half, int k16, uint32_t (&a)[4]) const {
            typedef Half<BF16> H;
            if constexpr (IN_FP32 && BITS == 8) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint32_t w = i ? (k16 ? half.w : half.y) : (k16 ? half.z : half.x);
                    a[2 * i] = in_fp32(int8_to_float_biased<0>(w), int8_to_float_biased<2>(w), 0);
                    a[2 * i + 1] = in_fp32(int8_to_float_biased<1>(w), int8_to_float_biased<3>(w), 1);
                }
            } else {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if constexpr (IN_FP32) {
                        const float2 v = H::unpack(a[i]);
                        a[i] = in_fp32(v.x, v.y, i % 2);
                    } else if constexpr (HAS_MINIMA) {
                        a[i] = H::fma2(a[i], by_row[i % 2], minimum[i % 2]);
                    } else {
                        a[i] = H::mul2(a[i], by_row[i % 2]);
                    }
                }
            }
        }
    };

    // Products of a tile that are scaled in fp32, which is less work than scaling the weights where tokens are few.
    // bf16 operands of int4 keep their bias: two MMAs with a constant operand subtract it from all rows, for less than an
    // add for each pair of weights. Such MMAs also give the sums of x that minima multiply.
    struct Products {
        static constexpr bool HAS_SUMS = HAS_BIASED || MINIMA;
        static constexpr uint32_t OF_X = HAS_BIASED ? INT4_BIAS<ZERO> : BF16 ? 0x3f803f80u : 0x3c003c00u;  // if not: 1
        static constexpr float PER_SUM = HAS_BIASED ? -1.0f / (128 + ZERO) : 1.0f;
        typedef float Sums[TILE_GROUPS][4];  // of x by columns of a group, times the constant

        // b: tokens' columns 2 t, 2 t + 1 of each 8, token = lane / 4. sums: zeros before.
        static DEVICE void add_columns(Sums& sums, const uint32_t (&b)[4]) {
            if constexpr (HAS_SUMS) {
                const uint32_t constant[4] = {OF_X, OF_X, OF_X, OF_X};
                mma_16816<BF16>(sums[0], constant, b[0], b[1]);
                mma_16816<BF16>(sums[TILE_GROUPS - 1], constant, b[2], b[3]);
            }
        }
        // A tile's codes, [16 rows x 2 + k16][fragment].
        static DEVICE void unpack(const uint4 (&chunks)[LANE_CHUNKS], uint32_t (&a)[4][4]) {
            const CodesHalf first = half_of(chunks, 0), second = half_of(chunks, 1);
            codes<HAS_BIASED>(first, 0, a[0]);
            codes<HAS_BIASED>(first, 1, a[1]);
            codes<HAS_BIASED>(second, 0, a[2]);
            codes<HAS_BIASED>(second, 1, a[3]);
        }
        // acc += W x^T, `a` of `unpack`: rows 4 g .. 4 g + 3 by tokens 2 t and 2 t + 1.
        static DEVICE void add(float (&acc)[8], const uint32_t (&a)[4][4], const ScalesQuad (&quads)[TILE_GROUPS],
                               const Sums& sums, const uint32_t (&b)[4]) {
            if constexpr (TILE_GROUPS == 1) {
                add_group<0, 1>(acc, a, quads[0], sums[0], b);
            } else {
                add_group<0, 0>(acc, a, quads[0], sums[0], b);
                add_group<1, 1>(acc, a, quads[1], sums[1], b);
            }
        }

        // Of half h of a group.
        static DEVICE void add_minima(float (&acc)[8], int h, const ScalesQuad& quad, const float (&sum)[4]) {
            const float2 minima = Half<SCALES_BF16>::unpack(pair_of(quad, h).y);
#pragma unroll
            for (int j = 0; j < 4; j++)
                acc[4 * h + j] = fmaf(sum[j], PER_SUM * (j / 2 ? minima.y : minima.x), acc[4 * h + j]);
        }

      private:
        // A group that is k16s FIRST to LAST.
        template <int FIRST, int LAST>
        static DEVICE void add_group(float (&acc)[8], const uint32_t (&a)[4][4], const ScalesQuad& quad,
                                     const float (&sum)[4], const uint32_t (&b)[4]) {
            const float2 low = scales_of(quad, 0), high = scales_of(quad, 1);
            const float by_row[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float d[4] = {};
                if constexpr (HAS_BIASED) d[0] = sum[0], d[1] = sum[1], d[2] = sum[2], d[3] = sum[3];
                if constexpr (FIRST == 0) mma_16816<BF16>(d, a[2 * h], b[0], b[1]);
                if constexpr (LAST == 1) mma_16816<BF16>(d, a[2 * h + 1], b[2], b[3]);
#pragma unroll
                for (int j = 0; j < 4; j++) acc[4 * h + j] = fmaf(d[j], by_row[2 * h + j / 2], acc[4 * h + j]);
                if constexpr (HAS_MINIMA) add_minima(acc, h, quad, sum);
            }
        }
    };
};
