// Codes of a cache (kv_int8.cuh) to elements in tiles that wgmma reads, each warp on its own. Codes come by cp.async a few
// steps ahead, to stages in shared memory that no other warp reads: a warp waits for its own copies alone.
#pragma once
#include "common/pipeline/warp_specialized.cuh"

// 4 bytes by cp.async, zeros where `valid` is false. They come through L1: this kernel writes none of them.
DEVICE void copy4_at(uint32_t to, const void* from, bool valid = true) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
DEVICE uint4 load16_shared(uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
    return v;
}
DEVICE uint16_t load2_shared(uint32_t from) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from) : "memory");
    return v;
}
DEVICE void store16_shared(uint32_t to, const uint4& x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// A line is a row of a block of 64 columns (warp_specialized.cuh): 64 codes with one scale, 128 bytes of elements. A step
// is 32 of them: a run of 16 rows for each half of the warp. Four lanes copy a line, and one converts it. Its codes are 64
// bytes in four pieces, piece p at p ^ (line / 2 % 4), so that eight lanes of either kind have no bank conflict.
template <class Rows, int STAGES> struct CodeCopy {
    typedef typename Rows::Format Format;
    typedef typename Format::Codes8 Codes8;
    static constexpr int LINES = 32, RUN = LINES / 2;
    static constexpr int SCALES_AT = LINES * 64, STAGE_BYTES = SCALES_AT + LINES * 4, BYTES = STAGES * STAGE_BYTES;
    static_assert(STAGES > 2, "one is converted, one is to be there next");
    uint32_t stages;  // BYTES of this warp, at a multiple of 64

    // Starts copying a run: columns block * 64 on of rows `first` on. Unreadable ones get a scale of 0.
    static DEVICE void start(uint32_t stage, const Rows& rows, int first, int block) {
        const int lane = threadIdx.x % 32, mine = lane % RUN, row = mine / 4, piece = mine % 4;
        const uint32_t to = stage + (lane / RUN * RUN + row) * 64 + (piece ^ row / 2) * 16, scale_to = stage + SCALES_AT + lane * 4;
        if (rows.all_readable(first, RUN)) {  // most are
            const auto from = rows.template at<RUN, RUN>(first, row, 0, block * 8 + piece * 2);
            const auto scale = rows.template at<RUN, RUN>(first, mine, 0, block * 8);
#pragma unroll
            for (int i = 0; i < 4; ++i) copy16_at(place(to, i), Format::codes(Format::after(from, 4 * i, 0)).codes);
            copy4_at(scale_to, even(Format::codes(scale).scale));
        } else {
#pragma unroll 1
            for (int i = 0; i < 4; ++i)
                if (rows.readable(first + row + 4 * i)) {
                    const auto from = rows.template at<RUN, RUN>(first, row + 4 * i, 0, block * 8 + piece * 2);
                    copy16_at(place(to, i), Format::codes(from).codes);
                }
            const bool valid = rows.readable(first + mine);
            auto scale = rows.origin();
            if (valid) scale = rows.template at<RUN, RUN>(first, mine, 0, block * 8);
            copy4_at(scale_to, even(Format::codes(scale).scale), valid);
        }
    }
    // Address of the piece 4 * i rows further.
    static DEVICE uint32_t place(uint32_t mine, int i) { return (mine ^ i % 2 * 32) + i * 256; }
    // The scale, or the one before it: copies have 4 bytes at least.
    static DEVICE const void* even(const uint16_t* scale) {
        return reinterpret_cast<const void*>(reinterpret_cast<uint64_t>(scale) & ~uint64_t(3));
    }

    // Converts this lane's line to `lines`, 32 of a tile. is_odd: whether the second of the scales that came is its.
    static DEVICE void convert(uint32_t lines, uint32_t stage, bool is_odd) {
        const int lane = threadIdx.x % 32;
        const uint32_t from = stage + lane * 64 + lane / 2 % 4 * 16, to = lines + lane * 128 + lane % 8 * 16;
        const uint16_t scale = load2_shared(stage + SCALES_AT + lane * 4 + is_odd * 2);
        uint4 codes[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) codes[i] = load16_shared(from ^ i * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            store16_shared(to ^ 2 * i * 16, Codes8::converted(make_uint2(codes[i].x, codes[i].y), scale));
            store16_shared(to ^ (2 * i + 1) * 16, Codes8::converted(make_uint2(codes[i].z, codes[i].w), scale));
        }
    }

    // Takes all steps from `now` on. Steps: `has` whether there is one, `advance` to the next; `start(copy, stage)` starts
    // its runs' copies. `begin` waits until what it writes is free, and is where its lines go; `is_odd` as convert has it;
    // `end` says that it is written.
    template <class Steps> DEVICE void run(Steps now) const {
        Steps ahead = now;
        auto start_next = [&](int stage) {
            if (ahead.has()) {
                ahead.start(stages + stage * STAGE_BYTES);
                ahead.advance();
            }
            copy_commit();
        };
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; ++i) start_next(i);
        int stage = 0, converted = STAGES - 1;
#pragma unroll 1
        while (now.has()) {
            copy_wait<STAGES - 2>();
            __syncwarp();  // all lanes' copies are there, and all have read the stage before
            start_next(converted);
            convert(now.begin(), stages + stage * STAGE_BYTES, now.is_odd());
            now.end();
            now.advance();
            converted = stage;
            if (++stage == STAGES) stage = 0;
        }
    }
};

// A warp's 32 arrivals, once all its lanes have written. Whoever waits for them has the proxy fence: with copies in flight it
// may cost this warp their time.
DEVICE void arrive_after_stores(uint64_t* full) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive_for(full, 32);
}
