// Norm and RoPE of a head, which LANES lanes share: lane i holds dims 8 i .. 8 i + 7 and their RoPE partners, the eight
// from HEAD_DIM / 2 + 8 i. Every step rounds where the model rounds.
#pragma once
#include "common/rows/norm.cuh"
#include "common/rows/rope.cuh"

// Cosine and sine of a lane's eight pairs, cast to the activations' dtype before the products, as in the model.
struct RopeTerms {
    uint4 cos, sin;
};

// freqs: the lane's eight elements of inv_freq. Pairs from NUM_ROTATED on are not rotated.
template <bool BF16, int NUM_ROTATED> DEVICE RopeTerms rope_terms_at(float position, const Vec8<Dtype::fp32>& freqs, int lane) {
    float freq[8];
    freqs.unpack(freq);
    uint32_t cos2[4], sin2[4];
#pragma unroll
    for (int j = 0; j < 8; ++j) freq[j] = 8 * lane + j < NUM_ROTATED ? freq[j] : 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float s0, c0, s1, c1;
        sincos_accurate(position * freq[2 * j], s0, c0);
        sincos_accurate(position * freq[2 * j + 1], s1, c1);
        cos2[j] = Half<BF16>::pack(c0, c1);
        sin2[j] = Half<BF16>::pack(s0, s1);
    }
    return {make_uint4(cos2[0], cos2[1], cos2[2], cos2[3]), make_uint4(sin2[0], sin2[1], sin2[2], sin2[3])};
}

// What one lane holds of a head of 16-bit elements.
template <Dtype D, int HEAD_DIM> struct HeadSlice {
    static constexpr int LANES = HEAD_DIM / 16, HEAD_VECS = HEAD_DIM / 8, HALF_VECS = HEAD_DIM / 16;
    Vec8<D> low, high;

    DEVICE void zero() {
        low.zero();
        high.zero();
    }
    // Head number `head` of a tensor of heads.
    DEVICE void load(const void* base, int64_t head, int lane) {
        low.load(base, head * HEAD_VECS + lane);
        high.load(base, head * HEAD_VECS + HALF_VECS + lane);
    }
    DEVICE void load_constant(const void* base, int lane) {
        low.load_constant(base, lane);
        high.load_constant(base, HALF_VECS + lane);
    }
    DEVICE void store(void* base, int64_t head, int lane) const {
        low.store(base, head * HEAD_VECS + lane);
        high.store(base, head * HEAD_VECS + HALF_VECS + lane);
    }
    // x * (mean(x^2) + eps)^(-1/2), not rounded. Every lane of the warp must call it.
    DEVICE void norm(float eps, float (&a)[8], float (&b)[8]) const {
        low.unpack(a);
        high.unpack(b);
        const float scale = inverse_rms<HEAD_DIM>(warp_sum<LANES>(sum_of_squares8(a) + sum_of_squares8(b)), eps);
#pragma unroll
        for (int j = 0; j < 8; ++j) a[j] *= scale, b[j] *= scale;
    }
    DEVICE void pack(const float (&a)[8], const float (&b)[8]) {
        low.pack(a);
        high.pack(b);
    }
    // Multiplies by the weight what is not turned of a and b, as `norm` returned them: of lanes from NUM_ROTATED / 8 on.
    template <int NUM_ROTATED> static DEVICE void fold(float (&a)[8], float (&b)[8], const HeadSlice& weight, int lane) {
        static_assert(NUM_ROTATED % 8 == 0, "whole lanes");
        if (lane < NUM_ROTATED / 8) return;
        float w_low[8], w_high[8];
        weight.low.unpack(w_low);
        weight.high.unpack(w_high);
#pragma unroll
        for (int j = 0; j < 8; ++j) a[j] *= w_low[j], b[j] *= w_high[j];
    }
    // Multiplies a and b, as `norm` returned them, by the weight, rounds, and rotates.
    DEVICE void pack_rotated(float (&a)[8], float (&b)[8], const HeadSlice& weight, const RopeTerms& turn) {
        float w_low[8], w_high[8];
        weight.low.unpack(w_low);
        weight.high.unpack(w_high);
#pragma unroll
        for (int j = 0; j < 8; ++j) a[j] *= w_low[j], b[j] *= w_high[j];
        pack(a, b);
        constexpr bool BF16 = D == Dtype::bf16;
        uint4 &x = low.part[0], &y = high.part[0];
        rotate2<BF16>(x.x, y.x, turn.cos.x, turn.sin.x);
        rotate2<BF16>(x.y, y.y, turn.cos.y, turn.sin.y);
        rotate2<BF16>(x.z, y.z, turn.cos.z, turn.sin.z);
        rotate2<BF16>(x.w, y.w, turn.cos.w, turn.sin.w);
    }
};

template <Dtype D, int HEAD_DIM>
DEVICE HeadSlice<D, HEAD_DIM> choose(bool take_first, const HeadSlice<D, HEAD_DIM>& first,
                                     const HeadSlice<D, HEAD_DIM>& second) {
    return {choose(take_first, first.low, second.low), choose(take_first, first.high, second.high)};
}
