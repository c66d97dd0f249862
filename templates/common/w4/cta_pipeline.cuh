// W4A16 products with up to four tokens by a warp-specialised CTA: one smem pipeline of weights for all warps.
// w4a16_gemm uses it with body=tma_block, w4a16_norm with `cta_pipeline`; warp_pipeline.cuh gives each warp a pipeline of
// its own.
//
// A producer warp loads the weights, one bulk copy a stage. WARPS consumer warps multiply. A reduction warp adds up the
// consumers' sums of a unit while they multiply the next one. So consumers wait for x and for nothing else. A warp that
// loads for itself reaches x late, by all loads that it still has to issue, and until then its pipeline is full and
// memory idle (docs/experiments.md, "A ring for all warps of a block"). Two units' sums take as much room as those of
// all units do there; the stages have the rest.
//
// At most IN_FLIGHT of a block's stages are in flight until the pipeline has been filled once; with
// MAX_INFLIGHT_STAGES, always. Blocks wait for each other's sums, so a block that loads more than its share of the
// bandwidth makes others late.
//
// A round of a unit is one stage: consecutive k-tiles of a strip (an n-tile of 32 rows of W), shared out to the warps.
//
// Units of several rounds with whole K are claimed dynamically from a counter, except for those that fill the pipeline
// before x is there and most of the rest. The bandwidth of SMs differs by two fifths between the fastest and the
// slowest, and the next kernel's blocks wait for the last one.
#pragma once
#include "common/w4/x_registers.cuh"
#include "common/w4/stream_k_units.cuh"
#include "common/pipeline/warp_specialized.cuh"  // for its barriers and places

// S and POSTS_OUT: as W4Stream's. A stage holds BLOCK_K columns.
template <class S, bool POSTS_OUT = false> struct W4BlockStream {
    static constexpr int N = S::N, K = S::K, WARPS = S::WARPS_K, SPLIT_K = S::SPLIT_K, STAGES = S::NUM_STAGES;
    static constexpr int IN_FLIGHT = S::IN_FLIGHT;
    static constexpr bool MAX_INFLIGHT_STAGES = S::MAX_INFLIGHT_STAGES, BF16 = S::BF16;
    static constexpr int FETCHES = WARPS, ADDS = WARPS + 1;  // producer and reduction warp, after the consumers
    static constexpr int THREADS = 32 * (WARPS + 2), STRIP = 32, TOKENS = S::BLOCK_M;
    typedef W4Units<S, POSTS_OUT> Units;
    static constexpr int QUADS = Units::QUADS, NUM_STRIPS = Units::NUM_STRIPS, NUM_TILES = K / STRIP;
    static constexpr int DEPTH = 2;  // units whose sums may wait for the reduction warp
    static constexpr int NONE = -1;  // instead of a unit: no more units
    static constexpr int GROUP = S::GROUP_SIZE / STRIP, NUM_STEPS = NUM_TILES / GROUP;  // a step: tiles that share scales
    static constexpr int PART_STEPS = ceil_div(NUM_STEPS, SPLIT_K);                     // of a unit, at most
    static constexpr int SLOT_STEPS = S::BLOCK_K / STRIP / GROUP, PER_WARP = SLOT_STEPS / WARPS;
    static constexpr int ROUNDS = ceil_div(PART_STEPS, SLOT_STEPS), BEFORE_LAST = (ROUNDS - 1) * SLOT_STEPS;
    static constexpr int LAST = ceil_div(PART_STEPS - BEFORE_LAST, WARPS);  // steps of a warp in the last round, at most
    static constexpr int STEPS = (ROUNDS - 1) * PER_WARP + LAST;
    static constexpr bool EVEN = NUM_STEPS % SPLIT_K == 0 && PART_STEPS % WARPS == 0;
    typedef W4Slots<BF16, STEPS, GROUP, SLOT_STEPS, GROUP, EVEN, S::MANY_TILES> Slots;
    typedef W4StreamX<Slots, TOKENS> X;
    static constexpr bool CLAIMS = SPLIT_K == 1 && ROUNDS > 1;
    static constexpr int CLAIMED = 2;                         // units of each block, and the remainder over all blocks
    static constexpr int AT_ONCE = ceil_div(STAGES, ROUNDS);  // units that the pipeline holds
    static_assert(TOKENS == 4 && S::BLOCK_N == STRIP && PER_WARP > 0 && S::BLOCK_K % (STRIP * GROUP * WARPS) == 0);

    struct alignas(128) Shared {
        uint8_t slots[STAGES][Slots::BYTES];
        uint64_t full[STAGES], empty[STAGES], sums_full[DEPTH], sums_empty[DEPTH];
        int units[STAGES], sums_units[DEPTH];  // CLAIMS: of a unit's first slot, and of its sums
        alignas(16) float4 sums[DEPTH][WARPS][QUADS];
        // After this struct in shared memory: uint8_t scratch[WARPS][X::X_BYTES]; with SPLIT_K > 1 also the sums of
        // each of the block's units, float4 kept[][QUADS].
    };

    // The first step of a part of K.
    static DEVICE int part_begin(int part) { return NUM_STEPS * part / SPLIT_K; }

    // The producer: loads in order. One lane runs it.
    struct Fetcher {
        Shared& s;
        const uint4* w;
        const uint2* scales;
        const uint64_t policy = evict_first();
        PipelineState<STAGES> at, arrived;  // arrived: IN_FLIGHT stages behind `at`
        int number = 0;

        DEVICE void wait_for_room() {
            if (number >= STAGES) barrier_wait(&s.empty[at.stage], at.parity ^ 1);
            if (number >= IN_FLIGHT && (MAX_INFLIGHT_STAGES || number < STAGES)) {
                barrier_wait(&s.full[arrived.stage], arrived.parity);
                arrived.advance();
            }
        }
        DEVICE void fetch(int unit) {
            const int strip = unit % NUM_STRIPS, begin = part_begin(unit / NUM_STRIPS);
            const int all = part_begin(unit / NUM_STRIPS + 1) - begin;
            for (int r = 0; r < ROUNDS; r++, number++, at.advance()) {
                wait_for_room();
                const int64_t first = int64_t(strip) * NUM_STEPS + begin + r * SLOT_STEPS;
                const int count = min(SLOT_STEPS, all - r * SLOT_STEPS);
                if (CLAIMS && r == 0) s.units[at.stage] = unit;
                barrier_expect(&s.full[at.stage], count * (GROUP * 512 + 64));
                if (!EVEN && count == 0) continue;
                uint8_t* const slot = s.slots[at.stage];
                copy_bulk(slot, w + first * (GROUP * 32), count * (GROUP * 512), &s.full[at.stage], policy);
                copy_bulk(slot + Slots::WORDS_BYTES, scales + first * 8, count * 64, &s.full[at.stage], policy);
            }
        }
        DEVICE void end() {
            wait_for_room();
            s.units[at.stage] = NONE;
            barrier_expect(&s.full[at.stage], 0);
        }
        // next: a counter, zero at the start; the last block to claim resets it. Until pdl_wait an earlier launch may
        // use it.
        DEVICE void fetch_claimed(uint32_t* next) {
            const int grid = gridDim.x, each = Units::COUNT / grid, own = max_of(min_of(AT_ONCE, each), each - CLAIMED);
            for (int i = 0; i < own; i++) fetch(i * grid + blockIdx.x);
            pdl_wait();
            const int left = Units::COUNT - own * grid;  // of all blocks
            int claimed = count_in(next);
            while (claimed < left) {
                const int upcoming = count_in(next);  // in flight while this unit is loaded
                fetch(own * grid + claimed);
                claimed = upcoming;
            }
            if (claimed == left + grid - 1) ll_store(next, 0);
            end();
        }
    };

    // x: [num_tokens, K / 2]. W is read before pdl_wait; x, and all that is written, after it. posts: the LL mailbox
    // [strip][SPLIT_K][QUADS], zero at start and end; with SPLIT_K = 1, the counter of claimed units.
    static DEVICE void run(Shared& s, uint16_t* out, const uint32_t* x, const uint4* w, const uint2* scales, uint4* mailbox,
                           int num_tokens) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int quads = num_tokens * 8;  // quad q: rows 4 (q % 8) and on, token q / 8
        const int first_unit = Units::run_begin(blockIdx.x), end = Units::run_begin(blockIdx.x + 1);
        uint8_t* const scratch = reinterpret_cast<uint8_t*>(&s + 1);
        float4* const kept = reinterpret_cast<float4*>(scratch + WARPS * X::X_BYTES);
        if (warp == FETCHES && lane == 0) {
#pragma unroll
            for (int i = 0; i < STAGES; i++) barrier_init_for(&s.full[i], 1), barrier_init_for(&s.empty[i], 32 * WARPS);
#pragma unroll
            for (int i = 0; i < DEPTH; i++)
                barrier_init_for(&s.sums_full[i], 32 * WARPS), barrier_init_for(&s.sums_empty[i], 32);
            barrier_init_fence();
        }
        __syncthreads();

        if (warp == FETCHES) {
            if (lane == 0) {
                Fetcher fetcher{s, w, scales};
                if constexpr (CLAIMS) fetcher.fetch_claimed(reinterpret_cast<uint32_t*>(mailbox));
                else for (int unit = first_unit; unit < end; unit++) fetcher.fetch(unit);
            }
        } else {
            pdl_wait();
            if constexpr (POSTS_OUT) pdl_launch_dependents();
            if (warp == ADDS) {
                const int quad = min(lane, quads - 1);
                PipelineState<DEPTH> at;
                for (int unit = first_unit; CLAIMS || unit < end; unit++, at.advance()) {
                    barrier_wait(&s.sums_full[at.stage], at.parity);
                    if (CLAIMS && (unit = s.sums_units[at.stage]) == NONE) break;
                    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
                    for (int k = 0; k < WARPS; k++) add(sum, s.sums[at.stage][k][quad]);
                    barrier_arrive(&s.sums_empty[at.stage]);
                    const int strip = unit % NUM_STRIPS, k = unit / NUM_STRIPS;
                    if (lane >= quads) continue;
                    if constexpr (SPLIT_K == 1) Units::store(out, strip, lane, sum);
                    else if (k != strip % SPLIT_K) ll_store4(Units::post_of(mailbox, strip, k, lane), ll_encode_sums(sum));
                    else kept[(unit - first_unit) * QUADS + lane] = sum;
                }
            } else {
                multiply(s, x, scratch + warp * X::X_BYTES, first_unit, end, num_tokens);
            }
        }

        if constexpr (SPLIT_K > 1) {
            __syncthreads();
            Units::template collect<THREADS>(out, mailbox, first_unit, end, quads,
                                             [&](int index, int q) { return kept[index * QUADS + q]; });
        }
    }

    // A consumer warp's part of all units.
    static DEVICE void multiply(Shared& s, const uint32_t* x, uint8_t* scratch, int first_unit, int end, int num_tokens) {
        const int warp = threadIdx.x / 32;
        X tokens;
        int part = -1, last_first = 0;  // part of K that `tokens` holds; the warp's first tile in the last round
        PipelineState<STAGES> at;
        PipelineState<DEPTH> to;
        for (int unit = first_unit, number = 0; CLAIMS || unit < end; unit++, number++, to.advance()) {
            if (CLAIMS) {
                barrier_wait(&s.full[at.stage], at.parity);
                unit = s.units[at.stage];
                if (unit == NONE) {
                    if (number >= DEPTH) barrier_wait(&s.sums_empty[to.stage], to.parity ^ 1);
                    if (threadIdx.x == 0) s.sums_units[to.stage] = NONE;
                    barrier_arrive(&s.sums_full[to.stage]);
                    break;
                }
            }
            if (part != unit / NUM_STRIPS) {
                part = unit / NUM_STRIPS;
                constexpr int PER_ROUND = PER_WARP * GROUP, BEFORE = (ROUNDS - 1) * PER_ROUND;
                const int begin = part_begin(part), left = part_begin(part + 1) - begin - BEFORE_LAST;
                last_first = left * warp / WARPS * GROUP;
                const int count = BEFORE + left * (warp + 1) / WARPS * GROUP - last_first;
                const int of_last = (begin + BEFORE_LAST) * GROUP + last_first - BEFORE;
                const int of_others = begin * GROUP + warp * PER_ROUND;
                const auto tile = [&](int i) {
                    return i >= BEFORE ? of_last + i : of_others + i / PER_ROUND * (SLOT_STEPS * GROUP) + i % PER_ROUND;
                };
                tokens.load(x, K / 2, count, num_tokens, scratch,
                            [&](int i, int of_pair) { return of_pair ? tile(2 * i + 1) : tile(2 * i); });
            }
            typename X::Sums sums;
#pragma unroll
            for (int r = 0; r < ROUNDS; r++) {
                barrier_wait(&s.full[at.stage], at.parity);
                const int first = r == ROUNDS - 1 ? last_first : warp * (PER_WARP * GROUP);
#pragma unroll
                for (int i = 0; i < (r == ROUNDS - 1 ? LAST : PER_WARP); i++)
                    tokens.multiply(sums, s.slots[at.stage], first + i * GROUP, (r * PER_WARP + i) * GROUP);
                barrier_arrive(&s.empty[at.stage]);
                at.advance();
            }
            if (number >= DEPTH) barrier_wait(&s.sums_empty[to.stage], to.parity ^ 1);
            tokens.put(sums, s.sums[to.stage][warp], num_tokens);
            if (CLAIMS && threadIdx.x == 0) s.sums_units[to.stage] = unit;
            barrier_arrive(&s.sums_full[to.stage]);
        }
    }
};
