// All threads of a block meet, where some of them have passed named barriers that others have not: compute-sanitizer's
// racecheck loses count of a block's own barrier then, and reports reads behind it. PTX ISA 8.8, "mbarrier.test_wait".
#pragma once
#include "common/ptx/copy.cuh"

// By an mbarrier in shared memory, 16 bytes at `at`; without BY_MEMORY by the block's own barrier, which takes none. Made by
// all threads, ahead of a __syncthreads.
template <bool BY_MEMORY, int THREADS> struct BlockBarrier {
    unsigned char* const at;
    uint32_t parity = 0;  // of the phase to wait for

    DEVICE BlockBarrier(void* at) : at(static_cast<unsigned char*>(at)) {
        if constexpr (BY_MEMORY)
            if (threadIdx.x == 0)
                asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(smem_addr(at)), "n"(THREADS) : "memory");
    }
    DEVICE unsigned char* end() const { return at + (BY_MEMORY ? 16 : 0); }
    DEVICE void meet() {
        if constexpr (BY_MEMORY) {
            asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(smem_addr(at)) : "memory");
            uint32_t done;
            do {
                asm volatile(
                    "{ .reg .pred done; mbarrier.test_wait.parity.shared.b64 done, [%1], %2; selp.u32 %0, 1, 0, done; }"
                    : "=r"(done)
                    : "r"(smem_addr(at)), "r"(parity)
                    : "memory");
            } while (!done);
            parity ^= 1;
        } else {
            __syncthreads();
        }
    }
};
