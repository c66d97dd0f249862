// Eight consecutive elements of a row, in registers as they are in memory.
#pragma once
#include "common/ptx/copy.cuh"

enum class Dtype { fp16, bf16, fp32 };

template <Dtype D> DEVICE constexpr int bytes_of() { return D == Dtype::fp32 ? 4 : 2; }

// The nearest value that D can hold.
template <Dtype D> DEVICE float round_to(float x) {
    if constexpr (D == Dtype::fp32) {
        return x;
    } else {
        using H = Half<D == Dtype::bf16>;
        return H::to_float(H::from_float(x));
    }
}

// One element of a tensor of D.
template <Dtype D> DEVICE float load_one(const void* base, int64_t index) {
    if constexpr (D == Dtype::fp32) {
        return static_cast<const float*>(base)[index];
    } else {
        return Half<D == Dtype::bf16>::to_float(static_cast<const uint16_t*>(base)[index]);
    }
}

// 16 bytes that an earlier kernel may have written. Coherent, never .nc: with programmatic dependent launch this kernel
// starts before they are written. Not cached in L1, since a row kernel reads them once.
DEVICE uint4 load16(const void* p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// 16 bytes that never change while kernels run (weights): kept in L1 for the SM's other rows.
DEVICE uint4 load16_constant(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// Eight elements of 16 bits in fp32, and eight numbers rounded to such.
template <bool BF16> DEVICE void unpack8(const uint4& v, float (&x)[8]) {
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float2 pair = Half<BF16>::unpack(w[j]);
        x[2 * j] = pair.x;
        x[2 * j + 1] = pair.y;
    }
}
template <bool BF16> DEVICE uint4 pack8(const float (&x)[8]) {
    using H = Half<BF16>;
    return make_uint4(H::pack(x[0], x[1]), H::pack(x[2], x[3]), H::pack(x[4], x[5]), H::pack(x[6], x[7]));
}

// Vector number i of a tensor is its elements 8 i to 8 i + 7: one access of 16 bytes, two for fp32.
template <Dtype D> struct Vec8 {
    static constexpr int NUM_PARTS = D == Dtype::fp32 ? 2 : 1;
    uint4 part[NUM_PARTS];

    DEVICE void load(const void* base, int64_t i) {
#pragma unroll
        for (int j = 0; j < NUM_PARTS; ++j) part[j] = load16(static_cast<const uint4*>(base) + i * NUM_PARTS + j);
    }
    DEVICE void load_constant(const void* base, int64_t i) {
#pragma unroll
        for (int j = 0; j < NUM_PARTS; ++j)
            part[j] = load16_constant(static_cast<const uint4*>(base) + i * NUM_PARTS + j);
    }
    DEVICE void store(void* base, int64_t i) const {
#pragma unroll
        for (int j = 0; j < NUM_PARTS; ++j) (static_cast<uint4*>(base) + i * NUM_PARTS)[j] = part[j];
    }
    DEVICE void zero() {
#pragma unroll
        for (int j = 0; j < NUM_PARTS; ++j) part[j] = make_uint4(0, 0, 0, 0);
    }
    DEVICE void unpack(float (&x)[8]) const {
        if constexpr (D == Dtype::fp32) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                x[4 * j] = __uint_as_float(part[j].x);
                x[4 * j + 1] = __uint_as_float(part[j].y);
                x[4 * j + 2] = __uint_as_float(part[j].z);
                x[4 * j + 3] = __uint_as_float(part[j].w);
            }
        } else {
            unpack8<D == Dtype::bf16>(part[0], x);
        }
    }
    // Rounds to D.
    DEVICE void pack(const float (&x)[8]) {
        if constexpr (D == Dtype::fp32) {
#pragma unroll
            for (int j = 0; j < 2; ++j)
                part[j] = make_uint4(__float_as_uint(x[4 * j]), __float_as_uint(x[4 * j + 1]),
                                     __float_as_uint(x[4 * j + 2]), __float_as_uint(x[4 * j + 3]));
        } else {
            part[0] = pack8<D == Dtype::bf16>(x);
        }
    }
};

// Eight values, each rounded to what D can hold: a step that the model's own arithmetic rounds.
template <Dtype D> DEVICE void round8(float (&x)[8]) {
    if constexpr (D != Dtype::fp32) {
        Vec8<D> v;
        v.pack(x);
        v.unpack(x);
    }
}

// a + b and a * factor, each rounded once to D: two 16-bit floats an instruction. (The model adds in fp32 and then rounds,
// which is the same but for ties of sums that fp32 itself cannot hold.)
template <Dtype D> DEVICE Vec8<D> add8(const Vec8<D>& a, const Vec8<D>& b) {
    using H = Half<D == Dtype::bf16>;
    Vec8<D> v;
    if constexpr (D == Dtype::fp32) {
        float x[8], y[8];
        a.unpack(x);
        b.unpack(y);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] += y[j];
        v.pack(x);
    } else {
        v.part[0] = make_uint4(H::add2(a.part[0].x, b.part[0].x), H::add2(a.part[0].y, b.part[0].y),
                               H::add2(a.part[0].z, b.part[0].z), H::add2(a.part[0].w, b.part[0].w));
    }
    return v;
}

template <Dtype D> DEVICE Vec8<D> scale8(const Vec8<D>& a, float factor) {
    using H = Half<D == Dtype::bf16>;
    Vec8<D> v;
    if constexpr (D == Dtype::fp32) {
        float x[8];
        a.unpack(x);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] *= factor;
        v.pack(x);
    } else {
        const uint32_t f = H::pack(factor, factor);
        v.part[0] = make_uint4(H::mul2(a.part[0].x, f), H::mul2(a.part[0].y, f), H::mul2(a.part[0].z, f),
                               H::mul2(a.part[0].w, f));
    }
    return v;
}

// The same values in another type; narrowing rounds.
template <Dtype TO, Dtype FROM> DEVICE Vec8<TO> convert8(const Vec8<FROM>& a) {
    if constexpr (TO == FROM) {
        return a;
    } else {
        float x[8];
        a.unpack(x);
        Vec8<TO> v;
        v.pack(x);
        return v;
    }
}

// Selects first or second word by word: selecting an address would put both in local memory.
template <Dtype D> DEVICE Vec8<D> choose(bool take_first, const Vec8<D>& first, const Vec8<D>& second) {
    Vec8<D> v;
#pragma unroll
    for (int j = 0; j < Vec8<D>::NUM_PARTS; ++j) {
        v.part[j].x = take_first ? first.part[j].x : second.part[j].x;
        v.part[j].y = take_first ? first.part[j].y : second.part[j].y;
        v.part[j].z = take_first ? first.part[j].z : second.part[j].z;
        v.part[j].w = take_first ? first.part[j].w : second.part[j].w;
    }
    return v;
}
