// W4A16 products with up to 8 tokens whose weights come through shared memory: what w4a16_gemm is made of where `stream`
// is chosen. S as for W4Gemm.
//
// A unit is a strip of 32 rows of W and one of SPLIT_K parts of its columns; the units are dealt to the blocks in equal
// runs, and a unit's columns to the warps of its block. What a warp needs of a run lies in few contiguous pieces, which it
// fetches by bulk copies into a ring of its own: warps never wait for each other's bytes, and what the ring holds is
// there before the kernel that makes x has finished. Of each unit the warps' sums meet in shared memory, in their order.
// The parts of a strip are added in theirs by the block of one of them, to which the others post: all blocks are resident.
// A block's units of other blocks' strips come first, so that nobody waits for what was posted long ago.
#pragma once
#include "common/bulk.cuh"
#include "common/w4_partials.cuh"
#include "common/w4_posts.cuh"
#include "common/w4_store.cuh"
#include "common/w4_stream_x.cuh"

template <class S> struct W4Stream {
    static constexpr int N = S::N, K = S::K, WARPS = S::WARPS_K, SPLIT_K = S::SPLIT_K, STAGES = S::NUM_STAGES;
    static constexpr bool BF16 = S::BF16, GATED = S::GATED;
    static constexpr int THREADS = 32 * WARPS, STRIP = 32, TOKENS = S::BLOCK_M;
    static constexpr int QUADS = TOKENS * STRIP / 4;  // sums of a unit, by fours
    static constexpr int NUM_STRIPS = N / STRIP, NUM_TILES = K / STRIP, UNITS = NUM_STRIPS * SPLIT_K;
    // Columns are dealt in groups that share scales.
    static constexpr int GROUP = S::GROUP_SIZE / STRIP, NUM_GROUPS = NUM_TILES / GROUP;
    static constexpr int MOST_GROUPS = ceil_div(ceil_div(NUM_GROUPS, SPLIT_K), WARPS);  // of a warp, of a unit
    static constexpr int SLOT_GROUPS = S::BLOCK_K / S::GROUP_SIZE / WARPS, SLOT_TILES = SLOT_GROUPS * GROUP;
    static constexpr int ROUNDS = ceil_div(MOST_GROUPS, SLOT_GROUPS);  // slots that a unit takes
    static constexpr bool EVEN = NUM_GROUPS % (SPLIT_K * WARPS) == 0 && MOST_GROUPS % SLOT_GROUPS == 0;
    typedef W4Slots<BF16, SLOT_TILES, GROUP, ROUNDS, EVEN> Slots;
    static constexpr int WORDS_BYTES = Slots::WORDS_BYTES, SLOT_BYTES = WORDS_BYTES + SLOT_GROUPS * 64;
    static_assert(S::BLOCK_N == STRIP && SLOT_GROUPS > 0 && S::BLOCK_K % S::GROUP_SIZE == 0);

    struct alignas(16) Shared {
        uint8_t slots[WARPS][STAGES][SLOT_BYTES];
        uint64_t barriers[WARPS][STAGES];
        // behind it, for each unit of a block: float4 sums[WARPS][8][num_tokens], of four rows each
    };

    // Which groups of columns are a warp's in a part of K.
    struct Share {
        int first, count;
        DEVICE Share(int part, int warp) {
            const int begin = NUM_GROUPS * part / SPLIT_K, all = NUM_GROUPS * (part + 1) / SPLIT_K - begin;
            first = begin + all * warp / WARPS;
            count = begin + all * (warp + 1) / WARPS - first;
        }
    };

    // The parts of a strip are added in the block of one of them.
    static DEVICE bool adds(int unit) { return SPLIT_K == 1 || unit % NUM_STRIPS % SPLIT_K == unit / NUM_STRIPS; }

    // A warp's place in its run: a unit, a round of it, and the slot that this is in. Units come first whose sums another
    // block waits for, and those last, from the run's end on, to which the others' are added: these have come by then.
    struct Place {
        const int first, end;
        int unit, round = 0, slot = 0;
        uint32_t parity = 0;
        bool adding = false;
        DEVICE Place(int first, int end) : first(first), end(end), unit(first) { seek(); }
        DEVICE bool done() const { return unit < first; }
        DEVICE void next() {
            if (++round == ROUNDS) round = 0, unit += adding ? -1 : 1, seek();
            if (++slot == STAGES) slot = 0, parity ^= 1;
        }
        DEVICE void seek() {
            if (!adding) {
                while (unit < end && adds(unit)) unit++;
                if (unit < end) return;
                adding = true, unit = end - 1;
            }
            while (unit >= first && !adds(unit)) unit--;
        }
    };

    // Begins to fetch `at`. By one lane of the warp, once all lanes have read what the slot held.
    static DEVICE void fetch(Shared& s, const uint4* w, const uint2* scales, const Place& at, uint64_t policy) {
        const int warp = threadIdx.x / 32, strip = at.unit % NUM_STRIPS;
        const Share share(at.unit / NUM_STRIPS, warp);
        const int first = share.first + at.round * SLOT_GROUPS;
        const int count = EVEN ? SLOT_GROUPS : max(0, min(SLOT_GROUPS, share.first + share.count - first));
        uint64_t* const barrier = &s.barriers[warp][at.slot];
        uint8_t* const slot = s.slots[warp][at.slot];
        barrier_expect(barrier, count * (GROUP * 512 + 64));
        if (!EVEN && count == 0) return;
        copy_bulk(slot, w + (int64_t(strip) * NUM_TILES + first * GROUP) * 32, count * (GROUP * 512), barrier, policy);
        copy_bulk(slot + WORDS_BYTES, scales + (int64_t(strip) * NUM_GROUPS + first) * 8, count * 64, barrier, policy);
    }

    // x: [num_tokens, K / 2]. W is read before pdl_wait, x and everything that is written after it. posts: zero and left
    // so, [strip][SPLIT_K][QUADS]; null where SPLIT_K is 1.
    static DEVICE void run(Shared& s, uint16_t* out, const uint32_t* x, const uint4* w, const uint2* scales, uint4* posts,
                           int tokens_given) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int num_tokens = TOKENS == 1 ? 1 : tokens_given;
        const int quads = num_tokens * 8;  // quad q: rows 4 (q % 8) and on, token q / 8
        const int first_unit = UNITS * int(blockIdx.x) / int(gridDim.x), end = UNITS * int(blockIdx.x + 1) / int(gridDim.x);
        Place ahead(first_unit, end), at(first_unit, end);
        const uint64_t policy = evict_first();
        float4* const all_sums = reinterpret_cast<float4*>(&s + 1);
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < STAGES; i++) barrier_init(&s.barriers[warp][i]);
            barrier_init_fence();
        }
        __syncwarp();
        for (int i = 0; i < STAGES; i++, ahead.next())
            if (lane == 0 && !ahead.done()) fetch(s, w, scales, ahead, policy);
        pdl_wait();

        const int num_sums = (end - first_unit) * quads;
        auto store = [&](int strip, int q, float4 v) {
            store4<BF16, GATED>(out, q / 8, GATED ? N / 2 : N, strip, q % 8, v.x, v.y, v.z, v.w);
        };
        auto post_of = [&](int strip, int k, int q) { return posts + (int64_t(strip) * SPLIT_K + k) * QUADS + q; };
        auto sum_of = [&](int index, int q) {
            const float4* const sums = all_sums + index * WARPS * quads + q % 8 * num_tokens + q / 8;
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int k = 0; k < WARPS; k++) add(sum, sums[k * quads]);
            return sum;
        };

        W4StreamX<Slots, TOKENS> tokens;
        int part = -1;  // of K, whose columns `tokens` holds
#pragma unroll 1
        for (bool adding = false;; adding = true) {
#pragma unroll 1
            while (!at.done() && at.adding == adding) {
                const int unit = at.unit;
                if (part != unit / NUM_STRIPS) {
                    part = unit / NUM_STRIPS;
                    const Share share(part, warp);
                    tokens.load(x + share.first * (GROUP * 16), K / 2, share.count * GROUP, num_tokens);
                }
                typename decltype(tokens)::Sums sums;
#pragma unroll
                for (int r = 0; r < ROUNDS; r++, at.next()) {
                    barrier_wait(&s.barriers[warp][at.slot], at.parity);
                    tokens.multiply(sums, s.slots[warp][at.slot], r);
                    __syncwarp();
                    if (lane == 0 && !ahead.done()) fetch(s, w, scales, ahead, policy);
                    ahead.next();
                }
                tokens.put(sums, all_sums + ((unit - first_unit) * WARPS + warp) * quads, num_tokens);
            }
            if (SPLIT_K == 1 && !adding) continue;
            __syncthreads();  // all warps' sums are there
            if (adding) break;
            for (int i = threadIdx.x; i < num_sums; i += THREADS) {
                const int index = i / quads, q = i - index * quads, unit = first_unit + index;
                if (!adds(unit)) post4(post_of(unit % NUM_STRIPS, unit / NUM_STRIPS, q), posted_sums(sum_of(index, q)));
            }
        }
        for (int i = threadIdx.x; i - lane < num_sums; i += THREADS) {  // whole warps wait
            const int index = i / quads, q = i - index * quads, unit = first_unit + index, strip = unit % NUM_STRIPS;
            const bool is_mine = i < num_sums && adds(unit);
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f), own = sum;
            if (is_mine) own = sum_of(index, q);
            if constexpr (SPLIT_K == 1) {
                sum = own;
            } else {
                const int mine = strip % SPLIT_K;
                const uint4* from[SPLIT_K];
                uint4 parts[SPLIT_K];
#pragma unroll
                for (int k = 0; k < SPLIT_K; k++) from[k] = is_mine && k != mine ? post_of(strip, k, q) : nullptr;
                receive(parts, from);
#pragma unroll
                for (int k = 0; k < SPLIT_K; k++) {
                    add(sum, k == mine ? own : as_sums(parts[k]));
                    if (is_mine && k != mine) post4(post_of(strip, k, q), make_uint4(0, 0, 0, 0));  // for the next launch
                }
            }
            if (is_mine) store(strip, q, sum);
        }
    }
};
