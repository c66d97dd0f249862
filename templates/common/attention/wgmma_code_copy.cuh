// Codes of a cache (kv_int8.cuh) to elements in tiles that wgmma reads, each warp on its own. Codes come by cp.async two
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

// A line is a row of a block of 64 columns (warp_specialized.cuh): 64 codes with one scale, 128 bytes of elements. A warp takes
// CHUNK lines at a time, one behind the other in a tile: runs of 16 rows of a block of columns, two for each half of the warp.
// Four lanes copy a line, and one converts it. Its codes are 64 bytes in four pieces, piece p at p ^ (line / 2 % 4), so that
// eight lanes of either kind have no bank conflict.
template <class Rows, int PAGE_SIZE> struct CodeCopy {
    typedef typename Rows::Format Format;
    typedef typename Format::Codes8 Codes8;
    static constexpr int CHUNK = 64, RUN = 16, RUNS = CHUNK / RUN / 2;
    static constexpr int SCALES_AT = CHUNK * 64, STAGE_BYTES = SCALES_AT + CHUNK * 4, BYTES = 2 * STAGE_BYTES;
    static_assert(PAGE_SIZE % RUN == 0, "a run is on one page");
    uint32_t stages;  // BYTES of this warp, at a multiple of 64

    // Which of two runs, one behind the other, this lane has.
    static DEVICE int half() { return threadIdx.x % 32 / RUN; }
    // The page of a run, where it may be read.
    static DEVICE int page_of(const Rows& rows, int first) {
        return first + RUN > rows.keys.first && first < rows.keys.end ? rows.pages[uint32_t(first) / PAGE_SIZE] : 0;
    }
    // Starts copying run `i` of this lane: columns block * 64 on of rows `first` on, a multiple of RUN. Unreadable ones get a
    // scale of 0, and codes of 0 where one may be a NaN.
    static DEVICE void start(uint32_t stage, int i, const Rows& rows, int page, int first, int block) {
        const int mine = threadIdx.x % RUN, row = mine / 4, piece = mine % 4, line = (2 * i + half()) * RUN;
        const uint32_t to = stage + (line + row) * 64 + (piece ^ row / 2) * 16, scale_to = stage + SCALES_AT + (line + mine) * 4;
        const auto run = Format::codes(Format::at(rows.base, Format::place(page, uint32_t(first) % PAGE_SIZE, 0, block * 8), rows.is_key));
        const int width = Format::row_width(block, rows.is_key);
        const int8_t* const codes = run.codes + row * width + piece * 16;
        const uint64_t scale = reinterpret_cast<uint64_t>(run.scale + mine * (width / 64)) & ~uint64_t(3);  // 4 bytes at least
        const bool all = rows.all_readable(first, RUN);  // most are
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const bool valid = all || rows.readable(first + row + 4 * j);
            if (valid || !Codes8::ARE_INTEGERS) copy16_at((to ^ j % 2 * 32) + j * 256, codes + 4 * j * width, valid);
        }
        copy4_at(scale_to, reinterpret_cast<const void*>(scale), rows.readable(first + mine));
    }

    // Converts this lane's lines to CHUNK lines of a tile. is_odd: whether the second of the scales that came is theirs.
    static DEVICE void convert(uint32_t lines, uint32_t stage, bool is_odd) {
        const int lane = threadIdx.x % 32;
        const uint32_t from = stage + lane * 64 + lane / 2 % 4 * 16, to = lines + lane * 128 + lane % 8 * 16;
#pragma unroll
        for (int i = 0; i < RUNS; ++i) {
            const uint16_t scale = load2_shared(stage + SCALES_AT + i * 128 + lane * 4 + is_odd * 2);
            uint4 codes[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) codes[j] = load16_shared((from ^ j * 16) + i * 2048);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                store16_shared((to ^ 2 * j * 16) + i * 4096, Codes8::converted(make_uint2(codes[j].x, codes[j].y), scale));
                store16_shared((to ^ (2 * j + 1) * 16) + i * 4096, Codes8::converted(make_uint2(codes[j].z, codes[j].w), scale));
            }
        }
    }

    // Fills what `now` says, chunk by chunk. Steps: `has` one, `advance` to the next. Of a step `rows` are those of K or V,
    // `first` and `block` say where run i of this lane begins, `is_odd` as for convert. `begin` waits for the room and says
    // where it is, `full` is the barrier that has 32 arrivals of it.
    template <class Steps> DEVICE void run(Steps now) const {
        Steps ahead = now;
        int pages[RUNS];
        auto look_up = [&] {
#pragma unroll
            for (int i = 0; i < RUNS; ++i) pages[i] = ahead.has() ? page_of(ahead.rows(), ahead.first(i)) : 0;
        };
        auto start_next = [&](uint32_t stage) {
            if (ahead.has()) {
#pragma unroll
                for (int i = 0; i < RUNS; ++i) start(stage, i, ahead.rows(), pages[i], ahead.first(i), ahead.block(i));
                ahead.advance();
                look_up();
            }
            copy_commit();
        };
        look_up();
        start_next(stages);
        start_next(stages + STAGE_BYTES);
        uint32_t stage = stages, other = stages + STAGE_BYTES;
#pragma unroll 1
        while (now.has()) {
            copy_wait<1>();
            __syncwarp();  // all lanes' copies are there
            convert(now.begin(), stage, now.is_odd());
            __syncwarp();  // all have read the stage, and written what they made
            // Whoever waits for it has the proxy fence: with copies in flight it may cost this warp their time.
            if (threadIdx.x % 32 == 0) barrier_arrive_for(now.full(), 32);
            start_next(stage);
            now.advance();
            const uint32_t next = other;
            other = stage, stage = next;
        }
    }
};
