// Tensor-core tiles, each D = A B + D with fp32 accumulators.
//
// mma_16816 (sm80 and newer; on sm75 the fp16 form is made of two m16n8k8):
//   A 16x16 row major: a0 = rows g,   cols 2t..2t+1    a1 = rows g+8, the same cols
//                      a2 = rows g,   cols 2t+8..      a3 = rows g+8, cols 2t+8..      (g = lane / 4, t = lane % 4)
//   B 16x8 col major:  b0 = rows 2t..2t+1, col g       b1 = rows 2t+8.., col g
//   C 16x8:            c0, c1 = row g, cols 2t, 2t+1   c2, c3 = row g+8
// PTX ISA 8.8, "Matrix Fragments for mma.m16n8k16 with floating point type".
//
// mma_884 (sm70): four 8x8x4 products a warp, one a quad-pair; quad-pair q is lanes 4q..4q+3 and 4q+16..4q+19.
//   A 8x4 row major: lane holds row (lane % 4) + 4 * (lane >= 16), 4 cols in two registers
//   B 4x8 col major: lane holds col (lane % 4) + 4 * (lane >= 16), 4 rows in two registers
//   C 8x8 fp32:      c[i] is row (lane & 1) + (i & 2) + 4 * (lane >= 16), col (lane & 2) + (i & 1) + (i & 4)
// PTX ISA 8.8, "Matrix Fragments for mma.m8n8k4 with .f16 floating point type".
#pragma once
#include "common/ptx/copy.cuh"

template <bool BF16> DEVICE void mma_16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (BF16) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else if constexpr (HAS_MMA16816) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(b0));
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[2]), "r"(a[3]), "r"(b1));
    }
}

// A row major, B col major ("row.col"): C[m][n] += sum_k A[m][k] B[k][n].
DEVICE void mma_884(float (&c)[8], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, "
        "{%0,%1,%2,%3,%4,%5,%6,%7};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
        : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}

// A row major, B row major ("row.row"): B 4x8, lane holds row lane % 4, cols 4 * (lane >= 16) .. + 3.
DEVICE void mma_884_row(float (&c)[8], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m8n8k4.row.row.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, "
        "{%0,%1,%2,%3,%4,%5,%6,%7};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
        : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}

// Four 8x8 tiles of 16-bit elements; lane i gives the address of row i % 8 of tile i / 8. sm75 and newer.
DEVICE void ldmatrix4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_addr(row))
                 : "memory");
}

DEVICE void ldmatrix4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_addr(row))
                 : "memory");
}
