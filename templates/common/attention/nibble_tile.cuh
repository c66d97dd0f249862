// A tile of warp_tile.cuh of 4-bit codes and, behind them, the scales of all blocks of a head, of each 16 keys (Int4Groups). They
// are multiplied as they are, in fp16, and rotated, as queries are then; scales go to the products and to P.
//
// Of a block of 64 codes, 32 bytes, lane 4 g + t has 16 codes of two keys, or 8 codes of four. Each step of 16 elements has one
// scale: the first two steps of a block have the first four values of each eight, the others the last four.
#pragma once
#include "common/attention/rotation.cuh"
#include "common/attention/warp_tile.cuh"

template <class Format, bool BF16, int HEAD_DIM, int DIM, int KEYS> struct NibbleTile {
    typedef typename Format::Codes8 Codes8;
    static constexpr bool BF16_OPERANDS = false, IS_SHARED_TILE = Format::TURNED_GROUPS > 0;
    static constexpr int GROUP_STEPS = 2, BLOCKS_HERE = DIM / 64, ITEMS = IS_SHARED_TILE ? 1 : 2;
    static constexpr int TURNED_EVERY = IS_SHARED_TILE ? HEAD_DIM / 64 / Format::TURNED_GROUPS : HEAD_DIM;  // block
    static constexpr int TURNED_HERE = IS_SHARED_TILE ? max_of(BLOCKS_HERE / TURNED_EVERY, 1) : 0;          // at most
    static constexpr int SCALE_BYTES = Format::SCALE_PIECES * 16, SCALES_AT = KEYS * DIM / 2;
    static constexpr int TURNED_AT = SCALES_AT + KEYS / 16 * SCALE_BYTES, BYTES = TURNED_AT + TURNED_HERE * KEYS * 32;
    static_assert(DIM % 64 == 0, "whole blocks");

    DEVICE NibbleTile(int) {}

    // Byte of a block of a key, in rows of ROW bytes: a line of all banks has one, two or four keys. Blocks change places in it
    // so that neither the lanes of four keys one after the other nor those of every other key meet in a bank.
    template <int ROW = DIM / 2> static DEVICE int place(int key, int block) {
        constexpr int KEYS_A_LINE = max_of(128 / ROW, 1);
        const int flip = key / 2 % 4 ^ key % 2 * 2;
        return key / KEYS_A_LINE * max_of(ROW, 128) + block / 4 * 128 + (block % 4 ^ flip) * 32;
    }
    static DEVICE char* bytes(uint16_t* tile) { return reinterpret_cast<char*>(tile); }
    static DEVICE uint16_t* scales(uint16_t* tile, int at) { return tile + (SCALES_AT + at / 16 * SCALE_BYTES) / 2; }
    // Whether K of a block is in the tile's turned rows, each of 64 codes, and where those begin.
    static DEVICE bool is_turned(int block) { return IS_SHARED_TILE && block % TURNED_EVERY == 0; }
    static DEVICE constexpr int turned_rows(int block_here) { return TURNED_AT + block_here / TURNED_EVERY * KEYS * 32; }

    // As CodeTile: codes of keys that may not be read can be anything, since their scales are zeros.
    static DEVICE void fetch(uint16_t* tile, int at, typename Format::Chunk src, const KeysToFetch& keys, int part, bool is_key, int lane) {
        constexpr int PIECES = DIM / 32, AT_ONCE = 32 / PIECES;  // pieces of 32 codes of a key; keys
        const int first = lane / PIECES, piece = lane % PIECES, block = part * BLOCKS_HERE;
        const int width = Format::row_width(block + piece / 2, is_key);
        const int8_t* const from = Format::codes(Format::after(src, first, piece * 4)).codes;
        const bool whole = keys.whole();
        auto is_copied = [&](int key) { return whole || (keys.readable(key) && !keys.skipped(key)); };
        if constexpr (IS_SHARED_TILE) {
#pragma unroll
            for (int n = 0; n < TURNED_HERE; ++n) {
                if (!is_turned(block)) break;  // the first one is if any is
                const int row = lane / 2, to = turned_rows(n * TURNED_EVERY) + place<32>(at + row, 0) + lane % 2 * 16;
                if (is_copied(row)) copy16(bytes(tile) + to, Format::turned_codes(src, row, block + n * TURNED_EVERY) + lane % 2 * 16);
            }
        }
#pragma unroll
        for (int i = 0; i < 16; i += AT_ONCE)
            if (is_copied(first + i))
                copy16(bytes(tile) + place(at + first + i, piece / 2) + piece % 2 * 16, from + i * Codes8::elements(width));
        uint16_t* const scale = scales(tile, at);
        if (whole) {
#pragma unroll
            for (int i = 0; i < Format::SCALE_PIECES; i += 32)
                if (i + lane < Format::SCALE_PIECES) copy16(scale + (i + lane) * 8, Format::scale_piece(src, block, i + lane));
            return;
        }
        for (int n = lane; n < Format::SCALE_PIECES * 8; n += 32)
            if (const int key = Format::key_of_scale(n); !keys.skipped(key))
                scale[n] = keys.readable(key) ? load_l2(Format::scale_piece(src, block, n / 8) + n % 8) : uint16_t(0);
    }
    template <class Stored>
    static DEVICE void put(uint16_t* tile, int row, int chunk, const Stored& x, bool high, bool is_key) {
        const int here = chunk % (DIM / 8);
        int to = place(row, here / 8);
        if (IS_SHARED_TILE && is_key) {
            if (!is_turned(chunk / 8)) return;
            to = turned_rows(here / 8) + place<32>(row, 0);
        }
        *reinterpret_cast<uint32_t*>(bytes(tile) + to + here % 8 * 4) = high ? x.high : x.low;
        if (chunk % 8 == 0)
            *reinterpret_cast<uint32_t*>(scales(tile, row) + Format::scale_at(row % 16, chunk / 8, is_key)) = high ? x.high_scales : x.low_scales;
    }
    // Both scales of a block of a key.
    static DEVICE uint32_t two_scales(uint16_t* tile, int at, int key, int block, bool is_key) {
        return *reinterpret_cast<const uint32_t*>(scales(tile, at) + Format::scale_at(key, block, is_key));
    }
    static DEVICE uint4 query(const uint4& x) { return rotated_query<BF16, false>(x); }
    // Of a block lane t has the elements 16 t to 16 t + 15: of each eight the first four for the first two steps, the others for
    // the last two.
    static DEVICE void load_q(uint32_t (&b)[4], const uint16_t* q, int q_tile, int chunk, int lane) {
        const int row = q_tile * 8 + lane / 4, half = chunk / 4 % 2 * 4;
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const int its = chunk / 8 * 8 + lane % 4 * 2 + step;
            const uint2 x = *reinterpret_cast<const uint2*>(q + row * HEAD_DIM + swizzle(row, its) * 8 + half);
            b[step * 2] = x.x, b[step * 2 + 1] = x.y;
        }
    }
    struct Keys {
        uint32_t codes[2][2];  // of keys g and g + 8
        uint32_t both[2];      // scales
        float scale[2];
        template <bool> DEVICE void load(uint32_t (&a)[4], const NibbleTile&, uint16_t* tile, int at, int step, int part, int lane) {
            const int block = step / 4, g = lane / 4, first = step % 4 / 2 * 2;
            if (step % 4 == 0) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    int from = place(at + g + h * 8, block);
                    if (is_turned(part * BLOCKS_HERE + block)) from = turned_rows(block) + place<32>(at + g + h * 8, 0);
                    const uint2 x = *reinterpret_cast<const uint2*>(bytes(tile) + from + lane % 4 * 8);
                    codes[h][0] = x.x, codes[h][1] = x.y;
                    both[h] = two_scales(tile, at, g + h * 8, part * BLOCKS_HERE + block, true);
                }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) scale[h] = Half<false>::to_float(uint16_t(both[h] >> first * 8));
#pragma unroll
            for (int e = 0; e < 4; ++e) a[e] = Codes8::centred(codes[e % 2][step % 2], first + e / 2);
        }
        DEVICE void add(float (&s)[4], const float (&product)[4], bool first) const {
#pragma unroll
            for (int e = 0; e < 4; ++e) s[e] = first ? product[e] * scale[e / 2] : fmaf(product[e], scale[e / 2], s[e]);
        }
    };
    template <int Q_TILES> struct Offsets {
        static constexpr bool ARE_USED = false;
        DEVICE Offsets(const uint16_t*, int, int) {}
        DEVICE float of(int, int, int) const { return 0.0f; }
    };
    struct Values {
        uint32_t codes[2][2];  // of keys 2t and 2t + 1, of 2t + 8 and 2t + 9: the even elements of both, the odd ones
        uint32_t both[2][2];   // of either two: the first scale of both keys, the second
        uint32_t scale[2];
        DEVICE void load(uint32_t (&a)[4], const NibbleTile&, uint16_t* tile, int at, int step, int part, int lane) {
            const int block = step / 4, first = lane % 4 * 2;
            if (step % 4 == 0) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    uint32_t x[2], its[2];
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        const int key = first + n + h * 8;
                        x[n] = *reinterpret_cast<const uint32_t*>(bytes(tile) + place(at + key, block) + lane / 4 * 4);
                        its[n] = two_scales(tile, at, key, part * BLOCKS_HERE + block, false);
                    }
                    codes[h][0] = __byte_perm(x[0], x[1], 0x5410), codes[h][1] = __byte_perm(x[0], x[1], 0x7632);
                    both[h][0] = __byte_perm(its[0], its[1], 0x5410), both[h][1] = __byte_perm(its[0], its[1], 0x7632);
                }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) scale[h] = both[h][step % 4 / 2];
#pragma unroll
            for (int e = 0; e < 4; ++e) a[e] = Codes8::centred(codes[e / 2][e % 2], step % 4);
        }
        DEVICE uint32_t weight(uint32_t p, int h) const { return Half<false>::mul2(p, scale[h]); }
    };
    static DEVICE int element(int step, int g, int upper) { return step / 4 * 64 + g * 8 + step % 4 * 2 + upper; }
    static DEVICE int spread(int element) { return element ^ (element >> 3 & 4); }
};

template <class Format, bool BF16, int HEAD_DIM, int DIM, int KEYS> struct WarpTileOf<Format, 2, BF16, HEAD_DIM, DIM, KEYS> {
    typedef NibbleTile<Format, BF16, HEAD_DIM, DIM, KEYS> Tile;
};
