// A barrier of the whole block for kernels whose warps have passed different numbers of named barriers. There
// compute-sanitizer's racecheck miscounts __syncthreads and reports the reads after it. PTX ISA 8.8,
// "mbarrier.test_wait".
#pragma once
#include "common/ptx/copy.cuh"

// BY_MEMORY: an mbarrier in shared memory, 16 bytes at `at`. Else bar.sync 0, which needs no memory. All threads
// construct it, before a __syncthreads.
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
