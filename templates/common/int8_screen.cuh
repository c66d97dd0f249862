// A tile of a matrix in eight bits, 16 rows by 64 columns as common/int8_screen.py has them, times four tokens of two
// signed bytes an element.
#pragma once
#include "common/w4_digits.cuh"

// Lane 4 g + t holds 16 bytes of row g (`low`) and of row g + 8 (`high`), columns 16 t and on. digits: of four tokens and
// those 64 columns, 16 bytes for each [column of the operand: 2 token + digit][t]; what there is no token for may be
// anything, and so are its sums. num_tokens: of the four that there are.
// finish: d[0] and d[1] are row g's sums with digits 0 and 1 of token t, d[2] and d[3] row g + 8's; by a whole warp.
template <bool TENSOR_CORE> struct TileSums;

// mma.m16n8k32 takes its columns k in any order that both operands share: of a lane's 16 columns the first four are k
// 4 t .., the next four k 16 + 4 t .., and the others the same of a second product.
template <> struct TileSums<true> {
    int d[4] = {};

    DEVICE void add(const uint4& low, const uint4& high, const uint4* digits, int) {
        const uint4 b = digits[threadIdx.x % 32];
        mma_s8s8(d, {low.x, high.x, low.y, high.y}, {b.x, b.y});
        mma_s8s8(d, {low.z, high.z, low.w, high.w}, {b.z, b.w});
    }
    DEVICE void finish(int (&sums)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i] = d[i];
    }
};

template <> struct TileSums<false> {
    int own[4][4] = {};  // of each token, over the lane's own columns

    DEVICE void add(const uint4& low, const uint4& high, const uint4* digits, int num_tokens) {
#pragma unroll
        for (int token = 0; token < 4; token++) {
            if (token >= num_tokens) break;
#pragma unroll
            for (int digit = 0; digit < 2; digit++) {
                const uint4 b = digits[(2 * token + digit) * 4 + threadIdx.x % 4];
                own[token][digit] = dot(low, b, own[token][digit]);
                own[token][2 + digit] = dot(high, b, own[token][2 + digit]);
            }
        }
    }
    DEVICE void finish(int (&sums)[4]) const {
#pragma unroll
        for (int token = 0; token < 4; token++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int sum = own[token][i];
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                if (token == 0 || threadIdx.x % 4 == token) sums[i] = sum;
            }
        }
    }

private:
    static DEVICE int dot(const uint4& a, const uint4& b, int sum) {
        sum = __dp4a(int(a.x), int(b.x), sum);
        sum = __dp4a(int(a.y), int(b.y), sum);
        sum = __dp4a(int(a.z), int(b.z), sum);
        return __dp4a(int(a.w), int(b.w), sum);
    }
};
