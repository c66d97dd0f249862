// A block's pipeline of weights and whatever else it reads in order. One producer warp fills the stages in shared
// memory far ahead; WARPS consumer warps use them. At most IN_FLIGHT stages are in flight: more bytes than bandwidth
// times latency only queue in the memory system, where they delay what every SM needs next. Stages that are already
// full carry an SM over its waits.
#pragma once
#include "common/ptx/bulk_copy.cuh"

template <int STAGES, int SLOT_BYTES, int IN_FLIGHT, int WARPS> struct WeightRing {
    static_assert(SLOT_BYTES % 128 == 0 && IN_FLIGHT >= 1 && IN_FLIGHT <= STAGES);

    struct alignas(128) Shared {
        uint8_t slots[STAGES][SLOT_BYTES];
        uint64_t full[STAGES], empty[STAGES];

        // Called by one thread, before a __syncthreads.
        DEVICE void init() {
#pragma unroll
            for (int i = 0; i < STAGES; i++) {
                barrier_init(&full[i]);
                asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(&empty[i])),
                             "n"(32 * WARPS)
                             : "memory");
            }
            barrier_init_fence();
        }
    };

    // Position of the producer or a consumer: the next stage, and the parity of its barrier's phase.
    struct BlockCoord {
        int slot = 0;
        uint32_t parity = 0;
        DEVICE void next() {
            if (++slot == STAGES) slot = 0, parity ^= 1;
        }
    };

    // Called by all lanes of a warp. What needs no lane of its own is done by the first.
    struct Producer {
        Shared& ring;
        const bool leads = threadIdx.x % 32 == 0;
        const uint64_t policy = evict_first();
        BlockCoord at, arrived;  // arrived: IN_FLIGHT stages behind `at`
        int num_claimed = 0;

        // Waits for a free stage and announces the bytes that `copy` will load into it.
        DEVICE void claim(uint32_t bytes) {
            if (num_claimed >= IN_FLIGHT) {
                barrier_wait(&ring.full[arrived.slot], arrived.parity);
                arrived.next();
            }
            if (num_claimed >= STAGES) barrier_wait(&ring.empty[at.slot], at.parity ^ 1);
            num_claimed++;
            if (leads) barrier_expect(&ring.full[at.slot], bytes);
            __syncwarp();
        }
        DEVICE void copy(int offset, const void* from, uint32_t bytes) {
            if (leads) copy_by_lane(offset, from, bytes);
        }
        DEVICE void copy_by_lane(int offset, const void* from, uint32_t bytes) {
            copy_bulk(ring.slots[at.slot] + offset, from, bytes, &ring.full[at.slot], policy);
        }
        DEVICE void next() { at.next(); }
    };

    struct Consumer {
        Shared& ring;
        BlockCoord at;

        DEVICE const uint8_t* wait() {
            barrier_wait(&ring.full[at.slot], at.parity);
            return ring.slots[at.slot];
        }
        // Each lane arrives once it has read its part. One arrival after a __syncwarp is no faster, and
        // compute-sanitizer's racecheck does not follow that order: it reports the next copy as a race.
        DEVICE void release() {
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_addr(&ring.empty[at.slot]))
                         : "memory");
            at.next();
        }
    };
};
