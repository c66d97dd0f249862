// Bulk copies of Hopper and newer: contiguous bytes from global to shared memory, counted by an mbarrier.
// PTX ISA 8.8, "cp.async.bulk", "mbarrier.arrive", "mbarrier.try_wait", "createpolicy".
#pragma once
#include "common/ptx/copy.cuh"

// An mbarrier whose phase completes after one arrival and the bytes that it announces. 8 bytes of shared memory.
DEVICE void barrier_init(uint64_t* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(smem_addr(barrier)) : "memory");
}
// Makes this thread's barrier_inits visible to the copies that it issues.
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(barrier)), "r"(bytes)
                 : "memory");
}
// Waits until the phase of this parity has completed (0: the first). The bytes that it counted are then visible.
DEVICE void barrier_wait(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile(
            "{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done; }"
            : "=r"(done)
            : "r"(smem_addr(barrier)), "r"(parity)
            : "memory");
    } while (!done);
}

// Proxy fence: this thread's earlier reads and writes of shared memory, copies included, come before what bulk copies and
// wgmma do there after it.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Cache policy for bytes that are read once: L2 evicts them first.
DEVICE uint64_t evict_first() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// `bytes`, dst and src: multiples of 16.
DEVICE void copy_bulk(void* dst, const void* src, uint32_t bytes, uint64_t* barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            smem_addr(dst)),
        "l"(src), "r"(bytes), "r"(smem_addr(barrier)), "l"(policy)
        : "memory");
}
