// Warp specialisation on Hopper: producer and consumer warpgroups, their barriers and register budgets (setmaxnreg),
// and the shared-memory operands of wgmma.
//
// A tile is stored in blocks of 64 columns: [columns / 64][rows][64] of 16 bits. A row of a block is 128 bytes, eight
// chunks of 16; chunk c of row r is stored at c ^ (r % 8). Blocks are aligned to 1024 bytes (wgmma's 128-byte swizzle).
// PTX ISA 8.8, "wgmma.mma_async", "Matrix descriptor", "Strides", "setmaxnreg", "cp.async.mbarrier.arrive".
#pragma once
#include "common/ptx/bulk_copy.cuh"
#include "common/w4/wgmma_rs.cuh"  // for its fences, commit and wait

// Initialises an mbarrier whose phase completes after `arrivals` arrivals.
DEVICE void barrier_init_for(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(barrier)), "r"(arrivals) : "memory");
}
DEVICE void barrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_addr(barrier)) : "memory");
}
// Arrives for `count` threads, itself included.
DEVICE void barrier_arrive_for(uint64_t* barrier, uint32_t count) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(barrier)), "r"(count) : "memory");
}
// Arrives at `barrier` of block `rank` of the cluster. It signals that data was read and orders no writes: a release at
// cluster scope would wait for all stores of this thread.
DEVICE void barrier_arrive_in(uint32_t rank, uint64_t* barrier) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
        "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(smem_addr(barrier)),
        "r"(rank)
        : "memory");
}
// Barrier over all threads of the cluster.
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}
// This thread arrives once all its earlier cp.async have completed.
DEVICE void barrier_arrive_after_copies(uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_addr(barrier)) : "memory");
}

// The next of STAGES stages of a pipeline, and the parity of its mbarrier's phase.
template <int STAGES> struct PipelineState {
    int stage = 0;
    uint32_t parity = 0;

    DEVICE void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

template <int REGISTERS> DEVICE void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> DEVICE void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Named barriers of `threads` threads (whole warps), ids 1 to 15: bar.sync waits, bar.arrive does not.
DEVICE void named_barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Compiler fence around wgmma: moves no earlier write of these registers behind it, and no later read before it.
template <int N> DEVICE void pin(float (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
        asm volatile("" : "+f"(x[i][0]), "+f"(x[i][1]), "+f"(x[i][2]), "+f"(x[i][3])::"memory");
}
template <int N> DEVICE void pin(uint32_t (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
        asm volatile("" : "+r"(x[i][0]), "+r"(x[i][1]), "+r"(x[i][2]), "+r"(x[i][3])::"memory");
}

// Matrix descriptors of operands at shared-memory address `at`: a multiple of 1024, plus 32 bytes for each k16 step.
constexpr uint64_t SWIZZLE_128B = uint64_t(1) << 62;
// K-major: 16 columns (k) of some rows (m or n); groups of eight rows are 1024 bytes apart.
DEVICE uint64_t rows_operand(uint32_t at) {
    return SWIZZLE_128B | uint64_t(1024 / 16) << 32 | uint64_t(1) << 16 | (at & 0x3ffff) >> 4;
}
// MN-major: columns (n) of 16 rows (k); the next 64 columns are BLOCK_BYTES further, the next eight rows 1024.
template <int BLOCK_BYTES> DEVICE uint64_t columns_operand(uint32_t at) {
    return SWIZZLE_128B | uint64_t(1024 / 16) << 32 | uint64_t(BLOCK_BYTES / 16) << 16 | (at & 0x3ffff) >> 4;
}

// The driver's CUtensorMap, as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};
// TMA load of a box from (column, row, head, page) to shared memory; `barrier` counts its bytes. With CLUSTER > 1 it is
// a multicast: every block of the cluster receives the box at the same offset and counts it at its own barrier.
template <int CLUSTER>
DEVICE void copy_box(uint32_t to, const TensorMap& map, int column, int row, int head, int page, uint64_t* barrier) {
    if constexpr (CLUSTER == 1)
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
            "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
            "l"(&map), "r"(column), "r"(row), "r"(head), "r"(page), "r"(smem_addr(barrier))
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
            "[%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
            "l"(&map), "r"(column), "r"(row), "r"(head), "r"(page), "r"(smem_addr(barrier)),
            "h"(uint16_t((1 << CLUSTER) - 1))
            : "memory");
}

// TMA prefetch of a box into L2.
DEVICE void prefetch_box(const TensorMap& map, int column, int row, int head, int page) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(column),
                 "r"(row), "r"(head), "r"(page)
                 : "memory");
}

// Byte offset of chunk `chunk` of row `row` in a tile of ROWS rows.
template <int ROWS> DEVICE int blocked(int row, int chunk) {
    return chunk / 8 * (ROWS * 128) + row * 128 + (chunk % 8 ^ row % 8) * 16;
}
