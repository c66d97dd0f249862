// A block's stream of weights, and of what else it needs in order: one warp fetches them in order, far ahead, into slots
// of shared memory; WARPS warps use them. Of the slots at most IN_FLIGHT are on their way at a time: bytes beyond the
// memory's rate times its latency wait in its queues, where they delay what every SM needs next, while slots that are
// full carry an SM over its waits.
#pragma once
#include "common/ptx/bulk_copy.cuh"

template <int STAGES, int SLOT_BYTES, int IN_FLIGHT, int WARPS> struct WeightRing {
    static_assert(SLOT_BYTES % 128 == 0 && IN_FLIGHT >= 1 && IN_FLIGHT <= STAGES);

    struct alignas(128) Shared {
        uint8_t slots[STAGES][SLOT_BYTES];
        uint64_t full[STAGES], empty[STAGES];

        // By one thread, before a barrier of the block.
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

    // Where a side is: the next slot, and the parity of the phase in which its barrier completes next.
    struct BlockCoord {
        int slot = 0;
        uint32_t parity = 0;
        DEVICE void next() {
            if (++slot == STAGES) slot = 0, parity ^= 1;
        }
    };

    // By all lanes of a warp; what has no lane of its own is the first one's.
    struct Producer {
        Shared& ring;
        const bool leads = threadIdx.x % 32 == 0;
        const uint64_t policy = evict_first();
        BlockCoord at, arrived;  // arrived: IN_FLIGHT slots behind `at`
        int num_claimed = 0;

        // Waits for a slot, and announces the bytes that `copy` will bring into it.
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
        // By each lane of a warp, once it has read what it needs. One arrival for all of them behind __syncwarp is no
        // faster, and compute-sanitizer's racecheck, which does not follow that order, takes the next copy for a race.
        DEVICE void release() {
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_addr(&ring.empty[at.slot]))
                         : "memory");
            at.next();
        }
    };
};
