// W4A16 products with up to eight tokens, whose weights go through one smem pipeline a warp. w4a16_gemm uses it where
// body=tma_warp (x in limbs, one token or up to four) or tma_mma (x as it is). S: as for W4Gemm, with MANY_TILES: a warp's
// part of x leaves no registers beside its limbs.
//
// A unit is a strip of 32 rows of W and one of SPLIT_K parts of its columns. Blocks have runs of units, longer runs
// first, since the last blocks start last. The warps of a block share a unit's columns, in steps. With SPLIT_K = 1 a
// block with fewer units ends sooner, which loses nothing if the next kernel's blocks wait for its room.
//
// A warp's part of a run is a few contiguous ranges. It loads them by bulk copies into stages of its own, so warps
// never wait for each other's bytes, and the stages are full before the kernel that makes x has completed. That kernel
// needs the bandwidth too: while it runs, at most IN_FLIGHT of a warp's stages are in flight, or its loads queue behind
// all of them. The warps' sums of a unit are added through shared memory, in their order. Sums of a strip that several
// blocks share go through the LL mailbox to the block that adds them up: all blocks are resident.
#pragma once
#include "common/ptx/bulk_copy.cuh"
#include "common/w4/x_registers.cuh"
#include "common/w4/stream_k_units.cuh"

// POSTS_OUT: out is written by LL for the dependent kernel, which launches when all kernels before this one have
// completed. `out` is then [tokens][N] LL-encoded pairs, zero before; the reader zeroes it again.
template <class S, bool POSTS_OUT = false> struct W4Stream {
    static constexpr int N = S::N, K = S::K, WARPS = S::WARPS_K, SPLIT_K = S::SPLIT_K, STAGES = S::NUM_STAGES;
    static constexpr int IN_FLIGHT = S::IN_FLIGHT;
    static constexpr bool BF16 = S::BF16;
    static constexpr int THREADS = 32 * WARPS, STRIP = 32, TOKENS = S::BLOCK_M;
    typedef W4Units<S, POSTS_OUT> Units;
    static constexpr int NUM_STRIPS = Units::NUM_STRIPS, NUM_TILES = K / STRIP;
    // A step: the tiles that share scales, at least two where an MMA takes two.
    typedef typename S::Weights W;
    static constexpr int GROUP = max_of(S::GROUP_SIZE / STRIP, 1), STEP = max_of(GROUP, TOKENS == 1 ? 2 : 1);
    static constexpr int NUM_STEPS = ceil_div(NUM_TILES, STEP);
    static constexpr int STEPS = ceil_div(ceil_div(NUM_STEPS, SPLIT_K), WARPS);  // of a warp, of a unit, at most
    static constexpr int SLOT_STEPS = S::BLOCK_K / STRIP / STEP / WARPS, ROUNDS = ceil_div(STEPS, SLOT_STEPS);
    static constexpr bool EVEN = NUM_TILES % (STEP * SPLIT_K * WARPS) == 0;
    typedef W4Slots<BF16, STEPS, STEP, SLOT_STEPS, GROUP, EVEN, S::MANY_TILES, W> Slots;
    typedef W4StreamX<Slots, TOKENS> X;
    static_assert(S::BLOCK_N == STRIP && SLOT_STEPS > 0 && S::BLOCK_K % (STRIP * STEP * WARPS) == 0);

    struct alignas(16) Shared {
        uint8_t slots[WARPS][STAGES][Slots::BYTES];
        uint64_t barriers[WARPS][STAGES];
        // After this struct in shared memory: uint8_t scratch[WARPS][X::X_BYTES]; and for each of the block's units
        // float4 sums[WARPS][num_tokens][8], of four rows each.
    };

    // The steps of a warp in a part of K.
    struct Share {
        int first, count;
        DEVICE Share(int part, int warp) {
            const int begin = NUM_STEPS * part / SPLIT_K, all = NUM_STEPS * (part + 1) / SPLIT_K - begin;
            first = begin + all * warp / WARPS;
            count = begin + all * (warp + 1) / WARPS - first;
        }
        DEVICE int tiles() const { return min(count * STEP, NUM_TILES - first * STEP); }
    };

    // A warp's position in its run: a unit, a round of it, and that round's stage.
    struct BlockCoord {
        int unit, round = 0, slot = 0;
        uint32_t parity = 0;
        DEVICE BlockCoord(int unit) : unit(unit) {}
        DEVICE void next() {
            if (++round == ROUNDS) round = 0, unit++;
            if (++slot == STAGES) slot = 0, parity ^= 1;
        }
    };

    // Starts loading `at`. One lane calls it, once all lanes have read what the stage held.
    static DEVICE void fetch(Shared& s, const uint4* w, const uint2* scales, const BlockCoord& at, uint64_t policy) {
        const int warp = threadIdx.x / 32, strip = at.unit % NUM_STRIPS;
        const Share share(at.unit / NUM_STRIPS, warp);
        const int first = (share.first + at.round * SLOT_STEPS) * STEP;
        const int steps = min(SLOT_STEPS, share.count - at.round * SLOT_STEPS);
        const int count = max(0, min(steps * STEP, NUM_TILES - first));  // tiles
        uint64_t* const barrier = &s.barriers[warp][at.slot];
        uint8_t* const slot = s.slots[warp][at.slot];
        barrier_expect(barrier, count / GROUP * (GROUP * W::TILE_BYTES + Slots::SCALES_BYTES));
        if (!EVEN && count == 0) return;
        copy_bulk(slot, w + (int64_t(strip) * NUM_TILES + first) * W::TILE_CHUNKS, count * W::TILE_BYTES, barrier, policy);
        constexpr int WORDS = Slots::SCALES_BYTES / 8;
        copy_bulk(slot + Slots::WORDS_BYTES, scales + (int64_t(strip) * (NUM_TILES / GROUP) + first / GROUP) * WORDS,
                  count / GROUP * Slots::SCALES_BYTES, barrier, policy);
    }

    // x: [num_tokens, K / 2]. W is read before pdl_wait; x, and all that is written, after it. posts: the LL mailbox
    // [strip][SPLIT_K][QUADS], zero at start and end; null with SPLIT_K = 1.
    static DEVICE void run(Shared& s, uint16_t* out, const uint32_t* x, const uint4* w, const uint2* scales, uint4* mailbox,
                           int tokens_given) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int num_tokens = TOKENS == 1 ? 1 : tokens_given;
        const int quads = num_tokens * 8;  // quad q: rows 4 (q % 8) and on, token q / 8
        const int first_unit = Units::run_begin(blockIdx.x), end = Units::run_begin(blockIdx.x + 1);
        BlockCoord ahead(first_unit), at(first_unit);
        const uint64_t policy = evict_first();
        uint8_t* const scratch = reinterpret_cast<uint8_t*>(&s + 1);
        float4* const all_sums = reinterpret_cast<float4*>(scratch + WARPS * X::X_BYTES);
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < STAGES; i++) barrier_init(&s.barriers[warp][i]);
            barrier_init_fence();
        }
        __syncwarp();
        for (int i = 0; i < STAGES; i++, ahead.next())
            if (lane == 0 && ahead.unit < end) {
                if (i >= IN_FLIGHT) barrier_wait(&s.barriers[warp][i - IN_FLIGHT], 0);
                fetch(s, w, scales, ahead, policy);
            }
        if constexpr (IN_FLIGHT < STAGES) __syncwarp();
        pdl_wait();
        if constexpr (POSTS_OUT) pdl_launch_dependents();

        auto sum_of = [&](int index, int q) {
            const float4* const sums = all_sums + index * WARPS * quads + q;
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int k = 0; k < WARPS; k++) add(sum, sums[k * quads]);
            return sum;
        };

        X tokens;
        int part = -1;  // part of K that `tokens` holds
        for (int unit = first_unit; unit < end; unit++) {
            if (part != unit / NUM_STRIPS) {
                part = unit / NUM_STRIPS;
                const Share share(part, warp);
                tokens.load(x + share.first * (STEP * 16), K / 2, share.tiles(), num_tokens,
                            scratch + warp * X::X_BYTES);
            }
            typename X::Sums sums;
#pragma unroll
            for (int r = 0; r < ROUNDS; r++, at.next()) {
                barrier_wait(&s.barriers[warp][at.slot], at.parity);
#pragma unroll
                for (int i = 0; i < SLOT_STEPS; i++)
                    if (r * SLOT_STEPS + i < STEPS)
                        tokens.multiply(sums, s.slots[warp][at.slot], i * STEP, (r * SLOT_STEPS + i) * STEP);
                // A load of shared memory that was issued may not be done: it queues behind other warps' loads of x, for
                // longer than a copy takes. Copies do not queue there. Without this fence some came first.
                fence_async_proxy();
                __syncwarp();
                if (lane == 0 && ahead.unit < end) fetch(s, w, scales, ahead, policy);
                ahead.next();
            }
            tokens.put(sums, all_sums + ((unit - first_unit) * WARPS + warp) * quads, num_tokens);
        }

        // One barrier for all units: its cost and the latency to memory are paid once.
        __syncthreads();
        const int num_sums = (end - first_unit) * quads;
        if constexpr (SPLIT_K == 1) {
            for (int i = threadIdx.x; i < num_sums; i += THREADS) {
                const int index = i / quads, q = i - index * quads;
                Units::store(out, first_unit + index, q, sum_of(index, q));
            }
        } else {
            for (int i = threadIdx.x; i < num_sums; i += THREADS) {
                const int index = i / quads, q = i - index * quads, unit = first_unit + index;
                const int strip = unit % NUM_STRIPS, k = unit / NUM_STRIPS;
                if (k != strip % SPLIT_K) ll_store4(Units::post_of(mailbox, strip, k, q), ll_encode_sums(sum_of(index, q)));
            }
            Units::template collect<THREADS>(out, mailbox, first_unit, end, quads, sum_of);
        }
    }
};
