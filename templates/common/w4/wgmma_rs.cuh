// Hopper's warpgroup product D = A B + D with A in registers: 64 rows of A, k16, N columns, fp32 sums.
//
// Four warps issue it together. Each has the A fragment of 16 rows that mma_16816 takes, and gets the C fragments of N
// / 8 tiles of 16 x 8 in mma_16816's layout. B is in shared memory, [N][64] of 16 bits, 128 bytes a row; its 16-byte
// chunks are XOR-ed with the row index modulo 8; it is aligned to 1024 bytes.
// PTX ISA 8.8, "wgmma.mma_async", "Matrix descriptor", and "Register fragments for wgmma.mma_async.m64nNk16".
#pragma once
#include "common/ptx/bulk_copy.cuh"  // for its proxy fence

// The B operand: columns 16 j .. 16 j + 15 of the 64 begin 32 j bytes into `tile`.
DEVICE uint64_t wgmma_b(const void* tile, int j) {
    constexpr uint64_t SWIZZLE_128B = uint64_t(1) << 62, ROWS_8 = uint64_t(1024 / 16) << 32;
    return SWIZZLE_128B | ROWS_8 | ((smem_addr(tile) + 32 * j) & 0x3ffff) >> 4;
}

// wgmma fence: ordinary instructions wrote registers of A and D.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Half of eight accumulators: the C fragment of one 16-row half of a strip of 32.
#define W4_D(i) "+f"(d[i][4 * HALF]), "+f"(d[i][4 * HALF + 1]), "+f"(d[i][4 * HALF + 2]), "+f"(d[i][4 * HALF + 3])
#define W4_WGMMA(SHAPE, REGISTERS, A, B, ...)                                                                        \
    if constexpr (BF16)                                                                                              \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned." SHAPE                      \
                     ".f32.bf16.bf16 {" REGISTERS "}, {" A "}, " B ", p, 1, 1, 0; }"                                 \
                     : __VA_ARGS__                                                                                   \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                          \
    else                                                                                                             \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned." SHAPE                      \
                     ".f32.f16.f16 {" REGISTERS "}, {" A "}, " B ", p, 1, 1, 0; }"                                   \
                     : __VA_ARGS__                                                                                   \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <bool BF16, int HALF> DEVICE void wgmma(float (&d)[1][8], const uint32_t (&a)[4], uint64_t b) {
    W4_WGMMA("m64n8k16",
             "%0,%1,%2,%3",
             "%4,%5,%6,%7", "%8",
             W4_D(0));
}

template <bool BF16, int HALF> DEVICE void wgmma(float (&d)[2][8], const uint32_t (&a)[4], uint64_t b) {
    W4_WGMMA("m64n16k16",
             "%0,%1,%2,%3,%4,%5,%6,%7",
             "%8,%9,%10,%11", "%12",
             W4_D(0), W4_D(1));
}

template <bool BF16, int HALF> DEVICE void wgmma(float (&d)[4][8], const uint32_t (&a)[4], uint64_t b) {
    W4_WGMMA("m64n32k16",
             "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15",
             "%16,%17,%18,%19", "%20",
             W4_D(0), W4_D(1), W4_D(2), W4_D(3));
}

template <bool BF16, int HALF> DEVICE void wgmma(float (&d)[8][8], const uint32_t (&a)[4], uint64_t b) {
    W4_WGMMA("m64n64k16",
             "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
             "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31",
             "%32,%33,%34,%35", "%36",
             W4_D(0), W4_D(1), W4_D(2), W4_D(3), W4_D(4), W4_D(5), W4_D(6), W4_D(7));
}

template <bool BF16, int HALF> DEVICE void wgmma(float (&d)[16][8], const uint32_t (&a)[4], uint64_t b) {
    W4_WGMMA("m64n128k16",
             "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
             "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
             "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
             "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63",
             "%64,%65,%66,%67", "%68",
             W4_D(0), W4_D(1), W4_D(2), W4_D(3), W4_D(4), W4_D(5), W4_D(6), W4_D(7),
             W4_D(8), W4_D(9), W4_D(10), W4_D(11), W4_D(12), W4_D(13), W4_D(14), W4_D(15));
}

#undef W4_WGMMA
#undef W4_D
