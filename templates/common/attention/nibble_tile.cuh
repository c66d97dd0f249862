// A tile of warp_tile.cuh of codes of 4 or 3 bits and, behind them, the scales of all blocks of a head, of each 16 keys
// (RotatedGroups). They are multiplied as they are, in fp16, and rotated, as queries are then; scales go to the products and to P.
// Codes of 3 bits become words of nibbles as lanes read them (CodeWords).
//
// Of a block of 64 codes lane 4 g + t has 16 codes of two keys, or 8 codes of four. Each step of 16 elements has one scale: the
// first two steps of a block have the first four values of each eight, the others the last four.
//
// A stored code n stands for n - MIDDLE, 7.5 or 3.5. With few rows its bits are multiplied as they lie in fp16, a subnormal
// number: n * 2^-24 of pairs 0 and 2 of a word, n * 2^-20 of pairs 1 and 3. That takes an AND for two codes. What MIDDLE makes
// of it is subtracted from the sums: of K those are scales times means of Q, of V scales times P, and tensor cores make both.
// In fp32 the sums of V lose little by it: a seventieth of what the codes' own rounding makes, in a simulation of 43,690 keys
// (a team's share of 262,144) with sums rounded toward zero. Elements of Q that meet pairs 1 and 3 are a sixteenth in shared
// memory, so that all products of K have one unit.
#pragma once
#include "common/attention/rotation.cuh"
#include "common/attention/warp_tile.cuh"

template <class Format, bool BF16, int HEAD_DIM, int DIM, int KEYS> struct NibbleTile {
    typedef typename Format::Codes8 Codes8;
    typedef typename Codes8::Words Words;
    static constexpr bool BF16_OPERANDS = false, IS_SHARED_TILE = Format::TURNED_GROUPS > 0;
    static constexpr int GROUP_STEPS = 2, BLOCKS_HERE = DIM / 64, ITEMS = IS_SHARED_TILE ? 1 : 2;
    static constexpr int TURNED_EVERY = IS_SHARED_TILE ? HEAD_DIM / 64 / Format::TURNED_GROUPS : HEAD_DIM;  // block
    static constexpr int TURNED_HERE = IS_SHARED_TILE ? max_of(BLOCKS_HERE / TURNED_EVERY, 1) : 0;          // at most
    static constexpr int BLOCK = Words::BLOCK, ROW = Words::row_bytes(BLOCKS_HERE), TURNED_ROW = Words::row_bytes(1);
    static constexpr int SCALE_BYTES = Format::SCALE_PIECES * 16, SCALES_AT = KEYS * ROW;
    static constexpr int TURNED_AT = SCALES_AT + KEYS / 16 * SCALE_BYTES, BYTES = TURNED_AT + TURNED_HERE * KEYS * TURNED_ROW;
    static constexpr bool IN_PLANES = Codes8::BITS == 3;
    static constexpr float MIDDLE = Codes8::HALF - 0.5f;
    static_assert(DIM % 64 == 0, "whole blocks");

    DEVICE NibbleTile(int) {}

    // The key that row `row` of 16 rows of S^T is: rows 0 to 3 and 4 to 7, which lanes read at once as K, are four keys one after
    // the other but for multiples of four, and so are rows 0, 2, 4 and 6, and 1, 3, 5 and 7, which they read at once as V.
    static DEVICE int key(int row) { return (row & 12) | ((row >> 1 & 1 | (row & 1) << 1) ^ row >> 1 & 2); }
    static DEVICE char* bytes(uint16_t* tile) { return reinterpret_cast<char*>(tile); }
    static DEVICE uint16_t* scales(uint16_t* tile, int at) { return tile + (SCALES_AT + at / 16 * SCALE_BYTES) / 2; }
    // Whether K of a block is in the tile's turned rows, each of 64 codes, and where those begin.
    static DEVICE bool is_turned(int block) { return IS_SHARED_TILE && block % TURNED_EVERY == 0; }
    static DEVICE constexpr int turned_rows(int block_here) { return TURNED_AT + block_here / TURNED_EVERY * KEYS * TURNED_ROW; }
    // Copies are of 16 bytes: a block of 24 that is copied alone begins 8 bytes behind the first if its number in the row is odd.
    static DEVICE int skew(int part) { return IN_PLANES && BLOCKS_HERE == 1 ? part % 2 * 8 : 0; }
    static DEVICE int turned_skew(int block) { return IN_PLANES ? block / TURNED_EVERY % 2 * 8 : 0; }

    // As CodeTile: codes of keys that may not be read can be anything, since their scales are zeros.
    static DEVICE void fetch(uint16_t* tile, int at, typename Format::Chunk src, const KeysToFetch& keys, int part, bool is_key, int lane) {
        constexpr int PIECES = (BLOCKS_HERE * BLOCK + 15) / 16;  // of 16 bytes of a key
        // Keys, a power of two: of 3 bits every fourth lane has nothing to copy.
        constexpr int AT_ONCE = !IN_PLANES ? 32 / PIECES : PIECES > 8 ? 2 : PIECES > 4 ? 4 : PIECES > 2 ? 8 : 16;
        const int first = lane / PIECES, piece = lane % PIECES, block = part * BLOCKS_HERE;
        const int step = AT_ONCE * Codes8::elements(Format::row_width(block + piece / 2, is_key));
        const int8_t* from = Format::codes(Format::after(src, first, IN_PLANES ? 0 : piece * 4)).codes;
        if constexpr (IN_PLANES) from += piece * 16 - skew(part);
        char* const to = bytes(tile) + (at + first) * ROW + piece * 16;
        auto copy = [&](int i) {
            if (AT_ONCE * PIECES == 32 || first < AT_ONCE) copy16(to + i * AT_ONCE * ROW, from + i * step);
        };
        auto copy_turned = [&](int row) {
            if constexpr (IS_SHARED_TILE)
                if (is_turned(block))  // the first one is if any is
#pragma unroll
                    for (int n = 0; n < TURNED_HERE; ++n)
                        copy16(bytes(tile) + turned_rows(n * TURNED_EVERY) + (at + row) * TURNED_ROW + lane % 2 * 16,
                               Format::turned_codes(src, row, block + n * TURNED_EVERY) + lane % 2 * 16 - turned_skew(block + n * TURNED_EVERY));
        };
        uint16_t* const scale = scales(tile, at);
        if (keys.whole()) {
            copy_turned(lane / 2);
#pragma unroll
            for (int i = 0; i < 16 / AT_ONCE; ++i) copy(i);
#pragma unroll
            for (int i = 0; i < Format::SCALE_PIECES; i += 32)
                if (i + lane < Format::SCALE_PIECES) copy16(scale + (i + lane) * 8, Format::scale_piece(src, block, i + lane));
            return;
        }
        auto is_copied = [&](int key) { return keys.readable(key) && !keys.skipped(key); };
        if (is_copied(lane / 2)) copy_turned(lane / 2);
#pragma unroll
        for (int i = 0; i < 16 / AT_ONCE; ++i)
            if (is_copied(first + i * AT_ONCE)) copy(i);
        for (int n = lane; n < Format::SCALE_PIECES * 8; n += 32)
            if (const int key = Format::key_of_scale(n); !keys.skipped(key))
                scale[n] = keys.readable(key) ? load_l2(Format::scale_piece(src, block, n / 8) + n % 8) : uint16_t(0);
    }
    template <class Stored>
    static DEVICE void put(uint16_t* tile, int row, int chunk, const Stored& x, bool high, bool is_key) {
        const int here = chunk % (DIM / 8);
        int to = row * ROW + here / 8 * BLOCK;
        if constexpr (IN_PLANES) to += skew(chunk / (DIM / 8));
        if (IS_SHARED_TILE && is_key) {
            if (!is_turned(chunk / 8)) return;
            to = turned_rows(here / 8) + row * TURNED_ROW;
            if constexpr (IN_PLANES) to += turned_skew(chunk / 8);
        }
        if constexpr (IN_PLANES)
            Words::put(bytes(tile) + to, here % 8, high ? x.high : x.low);
        else
            *reinterpret_cast<uint32_t*>(bytes(tile) + to + here % 8 * 4) = high ? x.high : x.low;
        if (chunk % 8 == 0)
            *reinterpret_cast<uint32_t*>(scales(tile, row) + Format::scale_at(row % 16, chunk / 8, is_key)) = high ? x.high_scales : x.low_scales;
    }
    // Both scales of block `block` of a key, of V; or of K, if it is turned. Those of the blocks behind it follow, and those of
    // the next key: of V after as many words as a head has blocks.
    static DEVICE const uint32_t* two_scales(uint16_t* tile, int key, int block, bool turned) {
        return reinterpret_cast<const uint32_t*>(scales(tile, 0) + Format::scale_at(key, block, turned));
    }
    static constexpr int BLOCKS = HEAD_DIM / 64, SCALE_WORDS = SCALE_BYTES / 4;
    static DEVICE uint4 query(const uint4& x) {
        const uint4 y = rotated_query<BF16, false, Format::IS_SIGNED>(x);
        return make_uint4(y.x, Half<false>::mul2(y.y, SIXTEENTH), y.z, Half<false>::mul2(y.w, SIXTEENTH));
    }
    static constexpr uint32_t SIXTEENTH = 0x2c002c00u;  // twice
    // Pair i of a word, as its bits lie; or what it stands for, 16 times as large of pairs 1 and 3.
    template <bool AS_BITS> static DEVICE uint32_t pair(uint32_t word, int i) {
        if (AS_BITS) return word >> i / 2 * 8 & (i % 2 ? Codes8::MASK : Codes8::MASK >> 4);
        if (i % 2 == 0) return Codes8::centred(word, i);
        // 1024 + 16 n, less 1144 or 1080
        return Half<false>::add2((word >> i / 2 * 8 & Codes8::MASK) | 0x64006400u, IN_PLANES ? 0xe438e438u : 0xe478e478u);
    }
    // Of a block lane t has the elements 16 t to 16 t + 15: of each eight the first four for the first two steps, the others for
    // the last two.
    static DEVICE void load_q(uint32_t (&b)[4], const uint16_t* q, int q_tile, int chunk, int lane) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const uint16_t* const of_lane = q + lane / 4 * HEAD_DIM + swizzle(lane / 4, lane % 4 * 2 + step) * 8;
            const uint2 x = *reinterpret_cast<const uint2*>(of_lane + q_tile * 8 * HEAD_DIM + chunk / 8 * 64 + chunk / 4 % 2 * 4);
            b[step * 2] = x.x, b[step * 2 + 1] = x.y;
        }
    }
    // Means of Q, of the two groups of blocks t and t + 4, of row g: as an operand B, in two summands.
    template <int Q_TILES> struct Offsets {
        static constexpr bool ARE_USED = Q_TILES <= 2;
        uint32_t means[ARE_USED ? Q_TILES : 1][2][2];
        DEVICE Offsets(const uint16_t* q, int part, int lane) {
            if constexpr (!ARE_USED) return;
#pragma unroll
            for (int qt = 0; qt < (ARE_USED ? Q_TILES : 0); ++qt)
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const int row = qt * 8 + lane / 4, block = lane % 4 + n * 4;
                    float sum[2] = {};
                    if (block / BLOCKS_HERE == part)
                        for (int chunk = block * 8; chunk < block * 8 + 8; ++chunk) {
                            float x[8];
                            unpack8<false>(*reinterpret_cast<const uint4*>(q + row * HEAD_DIM + swizzle(row, chunk) * 8), x);
#pragma unroll
                            for (int i = 0; i < 8; ++i) sum[i / 4] += x[i] * (i % 4 < 2 ? 1.0f / 32 : 16.0f / 32);
                        }
                    const uint32_t most = Half<false>::pack(sum[0], sum[1]);
                    const float2 its = Half<false>::unpack(most);
                    means[qt][0][n] = most, means[qt][1][n] = Half<false>::pack(sum[0] - its.x, sum[1] - its.y);
                }
        }
        DEVICE float of(int, int, int) const { return 0.0f; }
    };
    // Scores are times this, of so many tiles of rows.
    template <int Q_TILES> static constexpr float SCORE_UNIT = Offsets<Q_TILES>::ARE_USED ? 1.0f / (1 << 24) : 1.0f;
    struct Keys {
        uint32_t codes[2][2];  // of keys g and g + 8 as rows are
        uint32_t both[2];      // scales
        float scale[2];
        template <bool AS_BITS> DEVICE void load(uint32_t (&a)[4], const NibbleTile&, uint16_t* tile, int at, int step, int part, int lane) {
            const int block = step / 4, first = step % 4 / 2 * 2;
            if (step % 4 == 0) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const char* of_lane = bytes(tile) + key(lane / 4) * ROW + Words::at_two(lane % 4);
                    const uint32_t* its = two_scales(tile, key(lane / 4), part * BLOCKS_HERE, false);
                    of_lane += (at + h * 8) * ROW + block * BLOCK, its += at / 16 * SCALE_WORDS + h * 8 * BLOCKS + block;
                    if constexpr (IN_PLANES) of_lane += skew(part);
                    if constexpr (IS_SHARED_TILE)
                        if (is_turned(part * BLOCKS_HERE + block)) {
                            of_lane = bytes(tile) + key(lane / 4) * TURNED_ROW + Words::at_two(lane % 4) +
                                      (turned_rows(block) + (at + h * 8) * TURNED_ROW);
                            if constexpr (IN_PLANES) of_lane += turned_skew(part * BLOCKS_HERE + block);
                            its = two_scales(tile, key(lane / 4), part * BLOCKS_HERE, true) +
                                  (at / 16 * SCALE_WORDS + h * 8 * Format::TURNED_GROUPS + block / TURNED_EVERY);
                        }
                    const uint2 x = Words::two(of_lane, lane % 4);
                    codes[h][0] = x.x, codes[h][1] = x.y;
                    both[h] = *its;
                }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) scale[h] = Half<false>::to_float(uint16_t(both[h] >> first * 8));
#pragma unroll
            for (int e = 0; e < 4; ++e) a[e] = pair<AS_BITS>(codes[e % 2][step % 2], first + e / 2);
        }
        DEVICE void add(float (&s)[4], const float (&product)[4], bool first) const {
#pragma unroll
            for (int e = 0; e < 4; ++e) s[e] = first ? product[e] * scale[e / 2] : fmaf(product[e], scale[e / 2], s[e]);
        }
    };
    // Subtracts from scores of 16 keys, from key `at` on, what MIDDLE makes.
    template <int Q_TILES>
    static DEVICE void end_scores(float (&s)[Q_TILES][4], const Offsets<Q_TILES>& offsets, const NibbleTile&, uint16_t* tile, int at, int part, int lane) {
        if constexpr (Offsets<Q_TILES>::ARE_USED) {
            const int block = lane % 4;
            const bool turned = is_turned(block);
            const uint32_t* const its = two_scales(tile, key(lane / 4), block, turned) + at / 16 * SCALE_WORDS;
            const int more_keys = turned ? 8 * Format::TURNED_GROUPS : 8 * BLOCKS, more_blocks = turned ? 1 : 4;
            uint32_t a[4];
#pragma unroll
            for (int e = 0; e < 4; ++e)
                a[e] = (block + e / 2 * 4) / BLOCKS_HERE == part ? its[(e % 2 ? more_keys : 0) + (e / 2 ? more_blocks : 0)] : 0;
#pragma unroll
            for (int qt = 0; qt < Q_TILES; ++qt) {
                float made[4] = {};
#pragma unroll
                for (int n = 0; n < 2; ++n) mma_16816<false>(made, a, offsets.means[qt][n][0], offsets.means[qt][n][1]);
#pragma unroll
                for (int e = 0; e < 4; ++e) s[qt][e] = fmaf(made[e], -MIDDLE * 32 * SCORE_UNIT<Q_TILES>, s[qt][e]);
            }
        }
    }
    template <int Q_TILES> struct Values {
        static constexpr bool AS_BITS = Offsets<Q_TILES>::ARE_USED;
        uint32_t codes[2][2];  // of the keys of rows 2t and 2t + 1, of 2t + 8 and 2t + 9: the even elements of both, the odd ones
        uint32_t both[2][2];   // of either two: the first scale of both keys, the second
        uint32_t scale[2];
        DEVICE void load(uint32_t (&a)[4], const NibbleTile&, uint16_t* tile, int at, int step, int part, int lane) {
            const int block = step / 4;
            if (step % 4 == 0) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    uint32_t x[2];
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        const char* of_lane = bytes(tile) + key(lane % 4 * 2 + n) * ROW + Words::at_one(lane / 4);
                        if constexpr (IN_PLANES) of_lane += skew(part);
                        x[n] = Words::one(of_lane + (at + h * 8) * ROW + block * BLOCK, lane / 4);
                    }
                    codes[h][0] = __byte_perm(x[0], x[1], 0x5410), codes[h][1] = __byte_perm(x[0], x[1], 0x7632);
                    load_scales(both[h], tile, at, h, part * BLOCKS_HERE, block, lane);
                }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) scale[h] = both[h][step % 4 / 2];
#pragma unroll
            for (int e = 0; e < 4; ++e) a[e] = pair<AS_BITS>(codes[e / 2][e % 2], step % 4);
        }
        // Either scale of the block `more` blocks after block `first`, of the keys of rows 2t + 8 h and 2t + 1 + 8 h.
        static DEVICE void load_scales(uint32_t (&its)[2], uint16_t* tile, int at, int h, int first, int more, int lane) {
            uint32_t x[2];
#pragma unroll
            for (int n = 0; n < 2; ++n)
                x[n] = *(two_scales(tile, key(lane % 4 * 2 + n), first, false) + (at / 16 * SCALE_WORDS + h * 8 * BLOCKS + more));
            its[0] = __byte_perm(x[0], x[1], 0x5410), its[1] = __byte_perm(x[0], x[1], 0x7632);
        }
        DEVICE uint32_t weight(uint32_t p, int h) const { return Half<false>::mul2(p, scale[h]); }
    };
    // Scales times P, of the two groups of block g.
    template <int Q_TILES> struct ValueOffsets {
        static constexpr bool ARE_USED = Offsets<Q_TILES>::ARE_USED;
        float sums[ARE_USED ? Q_TILES : 1][4] = {};
        DEVICE void add(const uint32_t (&p)[Q_TILES][2], uint16_t* tile, int at, int lane) {
            if constexpr (ARE_USED) {
                uint32_t a[4] = {};
                if (lane / 4 < BLOCKS)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        uint32_t its[2];
                        Values<Q_TILES>::load_scales(its, tile, at, h, lane / 4, 0, lane);
                        a[h * 2] = its[0], a[h * 2 + 1] = its[1];
                    }
#pragma unroll
                for (int qt = 0; qt < Q_TILES; ++qt) mma_16816<false>(sums[qt], a, p[qt][0], p[qt][1]);
            }
        }
        DEVICE void scale(const float (&factor)[Q_TILES][2]) {
            if constexpr (ARE_USED)
#pragma unroll
                for (int qt = 0; qt < Q_TILES; ++qt)
#pragma unroll
                    for (int e = 0; e < 4; ++e) sums[qt][e] *= factor[qt][e % 2];
        }
        // Makes sums of products of V's bits those of what they stand for.
        DEVICE void end(float (&acc)[DIM / 16][Q_TILES][4], int part, int lane) const {
#pragma unroll
            for (int qt = 0; qt < Q_TILES; ++qt)
#pragma unroll
                for (int step = 0; step < DIM / 16; ++step) {
                    float less[2] = {};
                    if constexpr (ARE_USED)
#pragma unroll
                        for (int e = 0; e < 2; ++e)
                            less[e] = MIDDLE * __shfl_sync(0xffffffffu, sums[qt][step % 4 / 2 * 2 + e], (part * BLOCKS_HERE + step / 4) * 4 + lane % 4);
                    const float unit = (ARE_USED ? float(1 << 24) : 1.0f) / (step % 2 ? 16.0f : 1.0f);
#pragma unroll
                    for (int e = 0; e < 4; ++e) acc[step][qt][e] = fmaf(acc[step][qt][e], unit, -less[e % 2]);
                }
        }
    };
    static DEVICE int element(int step, int g, int upper) { return step / 4 * 64 + g * 8 + step % 4 * 2 + upper; }
    static DEVICE int spread(int element) { return element ^ (element >> 3 & 4); }
};

template <class Format, bool BF16, int HEAD_DIM, int DIM, int KEYS> struct WarpTileOf<Format, 4, BF16, HEAD_DIM, DIM, KEYS> {
    typedef NibbleTile<Format, BF16, HEAD_DIM, DIM, KEYS> Tile;
};
template <class Format, bool BF16, int HEAD_DIM, int DIM, int KEYS> struct WarpTileOf<Format, 3, BF16, HEAD_DIM, DIM, KEYS> {
    typedef NibbleTile<Format, BF16, HEAD_DIM, DIM, KEYS> Tile;
};
