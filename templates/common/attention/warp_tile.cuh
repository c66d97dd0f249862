// The keys of K or V that a warp multiplies by mma.sync: how it keeps KEYS of them in shared memory, DIM elements of
// each, and reads them as the operand A, 16x16 (mma.cuh). Keys are rows of A for S^T = K Q^T; for O^T = V^T P^T rows are
// elements. Which elements of a row a lane has is a tile's own choice, so it reads the operand Q^T as well, and says
// which rows of O^T a lane gets.
#pragma once
#include "common/ptx/load_l2.cuh"
#include "common/ptx/mma.cuh"

// Rows of 16-byte chunks; xor keeps the 8 rows that ldmatrix reads at once in different banks.
DEVICE int swizzle(int row, int chunk) { return chunk ^ (row & 7); }

// The new tokens' keys that some warp puts into the stages itself: those in the bit mask `made`, of which token 0 is key
// `base`. Keys are relative to the first of 16; only those in [first, end) may be read.
struct KeysToFetch {
    int first, end, base;
    uint32_t made;
    DEVICE bool whole() const { return first <= 0 && end >= 16 && (made == 0 || base >= 16); }
    DEVICE bool readable(int key) const { return key >= first && key < end; }
    DEVICE bool skipped(int key) const { return readable(key) && key >= base && made >> (key - base) & 1; }
};

// What a tile has whose products of K and V are what they stand for, and whose rows are the keys as they come.
template <int DIM> struct WholeProducts {
    static DEVICE int key(int row) { return row; }
    template <int Q_TILES> static constexpr float SCORE_UNIT = 1.0f;
    template <int Q_TILES, class Offsets, class Tile>
    static DEVICE void end_scores(float (&)[Q_TILES][4], const Offsets&, const Tile&, uint16_t*, int, int, int) {}
    template <int Q_TILES> struct ValueOffsets {
        DEVICE void add(const uint32_t (&)[Q_TILES][2], uint16_t*, int, int) {}
        DEVICE void scale(const float (&)[Q_TILES][2]) {}
        DEVICE void end(float (&)[DIM / 16][Q_TILES][4], int, int) const {}
    };
};

// Elements of 16 bits, eight in a chunk.
template <class Format, bool BF16, int HEAD_DIM, int DIM, int KEYS> struct ElementTile : WholeProducts<DIM> {
    static constexpr int BYTES = KEYS * DIM * 2;
    static constexpr bool BF16_OPERANDS = BF16;
    static constexpr int GROUP_STEPS = DIM / 16;  // of 16 elements, with the same scales
    static constexpr int ITEMS = 2;               // of a tile that are fetched apart, each into a stage of BYTES: K, then V

    DEVICE ElementTile(int) {}

    // 16 keys, from key `at` of the tile on. src: the first chunk of the first one. part: which DIM of the head they are.
    // Zeros for what may not be read.
    static DEVICE void fetch(uint16_t* tile, int at, typename Format::Chunk src, const KeysToFetch& keys, int, bool, int lane) {
        constexpr int CHUNKS = DIM / 8, KEYS_PER_COPY = CHUNKS >= 32 ? 1 : 32 / CHUNKS;
        constexpr int COPIES = 16 * DIM / 8 / 32;  // of a lane
        uint16_t* const dst = tile + at * DIM;
        const bool whole = keys.whole();
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const int key = CHUNKS >= 32 ? i / (CHUNKS / 32) : i * KEYS_PER_COPY + lane / CHUNKS;
            const int chunk = CHUNKS >= 32 ? lane + i % (CHUNKS >= 32 ? CHUNKS / 32 : 1) * 32 : lane % CHUNKS;
            uint16_t* to = dst + key * DIM + swizzle(key, chunk) * 8;
            const typename Format::Chunk from = Format::after(src, key, chunk);
            const bool seen = keys.readable(key);
            if (whole)
                Format::copy(to, from);
            else if (!keys.skipped(key))
                Format::copy_or_zero(to, from, seen);
        }
    }
    // Chunk `chunk` of a head, at key `row` of the tile of the warp that has it.
    template <class Stored> static DEVICE void put(uint16_t* tile, int row, int chunk, const Stored& x, bool high, bool) {
        *reinterpret_cast<uint4*>(tile + row * DIM + swizzle(row, chunk % (DIM / 8)) * 8) = high ? Format::high(x) : Format::low(x);
    }
    // Eight elements of Q as they are multiplied.
    static DEVICE uint4 query(const uint4& x) { return x; }
    // Two 16-wide steps of B = Q^T for one tile of 8 rows, from chunk `chunk` of the head on: b0, b1 of the first, then of
    // the second.
    static DEVICE void load_q(uint32_t (&b)[4], const uint16_t* q, int q_tile, int chunk, int lane) {
        const int row = q_tile * 8 + lane % 8;
        ldmatrix4(b, q + row * HEAD_DIM + swizzle(row, chunk + lane / 8) * 8);
    }
    // 16 keys from key `at` on, for S^T.
    struct Keys {
        template <bool> DEVICE void load(uint32_t (&a)[4], const ElementTile&, const uint16_t* tile, int at, int step, int, int lane) {
            ldmatrix4(a, tile + (at + lane % 16) * DIM + swizzle(lane, step * 2 + lane / 16) * 8);
        }
        // Adds the products of the last GROUP_STEPS steps to S^T, or begins with them.
        DEVICE void add(float (&s)[4], const float (&product)[4], bool first) const {
#pragma unroll
            for (int e = 0; e < 4; ++e) s[e] = first ? product[e] : s[e] + product[e];
        }
    };
    // What the products of so many tiles of 8 rows of Q begin with, in each group.
    template <int Q_TILES> struct Offsets {
        static constexpr bool ARE_USED = false;
        DEVICE Offsets(const uint16_t*, int, int) {}
        DEVICE float of(int, int, int) const { return 0.0f; }
    };
    // Likewise for O^T.
    template <int> struct Values {
        DEVICE void load(uint32_t (&a)[4], const ElementTile&, const uint16_t* tile, int at, int step, int, int lane) {
            ldmatrix4_trans(a, tile + (at + lane % 8 + lane / 16 * 8) * DIM + swizzle(lane, step * 2 + lane / 8 % 2) * 8);
        }
        // A register of P^T for the next GROUP_STEPS steps.
        DEVICE uint32_t weight(uint32_t p, int) const { return p; }
    };
    // The element of row g of step `step` of O^T, or of row g + 8.
    static DEVICE int element(int step, int g, int upper) { return step * 16 + g + upper * 8; }
    // Where an element of a row of O lies for the merge, so that lanes' stores are to different banks.
    static DEVICE int spread(int element) { return element; }
};

// Codes, each a byte, and behind them the scales of all groups of a head, of each 16 keys (Int8Groups). Lane 4 g + t has
// 16 codes of two keys, or 8 codes of four. They are multiplied as they are, in fp16, which holds them, whatever the
// activations are in; scales go to the products and to P.
//
// K of a shared cache is V but for the groups that RoPE turns (SharedPages): a tile is one item then, V's codes, the
// scales of both, and K's codes of the turned groups that lie in DIM.
template <class Format, bool BF16, int HEAD_DIM, int DIM, int KEYS> struct CodeTile : WholeProducts<DIM> {
    typedef typename Format::Codes8 Codes8;
    static constexpr bool BF16_OPERANDS = false, IS_SHARED_TILE = Format::TURNED_GROUPS > 0;
    static constexpr int GROUP_STEPS = 4, GROUPS_HERE = DIM / 64, ITEMS = IS_SHARED_TILE ? 1 : 2;
    static constexpr int TURNED_EVERY = IS_SHARED_TILE ? HEAD_DIM / 64 / Format::TURNED_GROUPS : HEAD_DIM;  // group
    static constexpr int TURNED_HERE = IS_SHARED_TILE ? max_of(GROUPS_HERE / TURNED_EVERY, 1) : 0;          // at most
    static constexpr int SCALE_BYTES = Format::SCALE_PIECES * 16, SCALES_AT = KEYS * DIM;
    static constexpr int TURNED_AT = SCALES_AT + KEYS / 16 * SCALE_BYTES, BYTES = TURNED_AT + TURNED_HERE * KEYS * 64;
    static_assert(DIM % 64 == 0, "whole groups");
    const uint32_t raise;  // for Codes8::more()

    // not_negative: what the compiler does not know. With an immediate operand of PRMT it would load each selector.
    DEVICE CodeTile(int not_negative) : raise(Codes8::RAISE | uint32_t(not_negative >> 31)) {}

    // A line of all banks has two keys of 64 codes, or 128 codes of one. Units of 32 bytes change places in it so that
    // neither the eight lanes of two keys nor the sixteen of every other key meet in a bank: `flip` is that for a key, and
    // what two numbers without a common bit flip is what their sum does.
    template <int WIDTH = DIM> static DEVICE constexpr int line(int key) { return WIDTH >= 128 ? key * WIDTH : key / 2 * 128; }
    static DEVICE constexpr int flip(int key) { return key / 2 % 4 * 32 ^ key % 2 * 64; }
    // Byte of 16 codes of a key, in rows of WIDTH codes.
    template <int WIDTH = DIM> static DEVICE int place(int key, int chunk) {
        return line<WIDTH>(key) + chunk / 8 * 128 + (chunk % 8 * 16 ^ flip(key));
    }
    static DEVICE char* bytes(uint16_t* tile) { return reinterpret_cast<char*>(tile); }
    static DEVICE uint16_t* scales(uint16_t* tile, int at) { return tile + (SCALES_AT + at / 16 * SCALE_BYTES) / 2; }
    // Whether K of a group is in the tile's turned rows, each of 64 codes, and where those begin.
    static DEVICE bool is_turned(int group) { return IS_SHARED_TILE && group % TURNED_EVERY == 0; }
    static DEVICE constexpr int turned_rows(int group_here) { return TURNED_AT + group_here / TURNED_EVERY * KEYS * 64; }

    // Of keys that may not be read scales are zeros: codes can be anything then, but for one that is a NaN.
    static DEVICE void fetch(uint16_t* tile, int at, typename Format::Chunk src, const KeysToFetch& keys, int part, bool is_key, int lane) {
        constexpr int CHUNKS = DIM / 16, AT_ONCE = 32 / CHUNKS;  // keys
        const int first = lane / CHUNKS, chunk = lane % CHUNKS;
        const int group = part * GROUPS_HERE, width = Format::row_width(group + chunk / 4, is_key);
        const int8_t* const from = Format::codes(Format::after(src, first, chunk * 2)).codes;
        const int to = place(first, chunk);
        uint16_t* const scale = scales(tile, at);
        auto copy = [&](int key) { copy16(bytes(tile) + (to ^ flip(key)) + line(at + key), from + key * width); };
        const bool whole = keys.whole();
        auto is_copied = [&](int key) { return whole || (keys.readable(key) && !keys.skipped(key)); };
        if constexpr (IS_SHARED_TILE) {
#pragma unroll
            for (int n = 0; n < TURNED_HERE; ++n) {
                if (!is_turned(group)) break;  // the first one is if any is
                const int row = lane / 4, its = place<64>(row, lane % 4) + turned_rows(n * TURNED_EVERY) + line<64>(at);
                const int8_t* const turned = Format::turned_codes(src, row, group + n * TURNED_EVERY) + lane % 4 * 16;
#pragma unroll
                for (int i = 0; i < 16; i += 8)
                    if (is_copied(row + i)) copy16(bytes(tile) + its + line<64>(i), turned + i * Format::ROTATED);
            }
        }
        if (whole) {
#pragma unroll
            for (int i = 0; i < 16 / AT_ONCE; ++i) copy(i * AT_ONCE);
            if (lane < Format::SCALE_PIECES) copy16(scale + lane * 8, Format::scale_piece(src, group, lane));
            return;
        }
#pragma unroll
        for (int i = 0; i < 16 / AT_ONCE; ++i)
            if constexpr (Codes8::ARE_INTEGERS) {
                if (is_copied(first + i * AT_ONCE)) copy(i * AT_ONCE);
            } else if (const int key = i * AT_ONCE; !keys.skipped(first + key)) {
                copy16_or_zero(bytes(tile) + (to ^ flip(key)) + line(at + key), from + key * width, keys.readable(first + key));
            }
        for (int n = lane; n < Format::SCALE_PIECES * 8; n += 32)
            if (const int key = Format::key_of_scale(n); !keys.skipped(key))
                scale[n] = keys.readable(key) ? load_l2(Format::scale_piece(src, group, n / 8) + n % 8) : uint16_t(0);
    }
    template <class Stored>
    static DEVICE void put(uint16_t* tile, int row, int chunk, const Stored& x, bool high, bool is_key) {
        const int here = chunk % (DIM / 8);
        int to = place(row, here / 2);
        if (IS_SHARED_TILE && is_key) {
            if (!is_turned(chunk / 8)) return;
            to = turned_rows(here / 8) + place<64>(row, here % 8 / 2);
        }
        *reinterpret_cast<uint2*>(bytes(tile) + to + here % 2 * 8) = high ? x.high : x.low;
        if (chunk % 8 == 0)
            scales(tile, row)[Format::scale_at(row % 16, chunk / 8, is_key)] = high ? x.high_scale : x.low_scale;
    }
    static DEVICE uint4 query(const uint4& x) {
        if constexpr (!BF16) return x;
        const uint32_t in[4] = {x.x, x.y, x.z, x.w};
        uint32_t out[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 two = Half<true>::unpack(in[i]);
            out[i] = Half<false>::pack(two.x, two.y);
        }
        return make_uint4(out[0], out[1], out[2], out[3]);
    }
    // Of 64 elements lane t has 16 t and the 15 behind it, four for each step.
    static DEVICE void load_q(uint32_t (&b)[4], const uint16_t* q, int q_tile, int chunk, int lane) {
        const int row = q_tile * 8 + lane / 4, its = chunk / 8 * 8 + lane % 4 * 2 + chunk / 4 % 2;
        const uint4 x = *reinterpret_cast<const uint4*>(q + row * HEAD_DIM + swizzle(row, its) * 8);
        b[0] = x.x, b[1] = x.y, b[2] = x.z, b[3] = x.w;
    }
    struct Keys {
        uint32_t codes[2][4];  // of keys g and g + 8
        float scale[2];
        template <bool WITH_OFFSETS> DEVICE void load(uint32_t (&a)[4], const CodeTile& kv, uint16_t* tile, int at, int step, int part, int lane) {
            const int word = step % 4, group = step / 4, g = lane / 4, here = place(g, lane % 4);
            if (word == 0) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    int from = (here ^ group % 2 * 64) + group / 2 * 128 + line(at + h * 8);
                    if (is_turned(part * GROUPS_HERE + group))
                        from = turned_rows(group) + place<64>(g, lane % 4) + line<64>(at + h * 8);
                    const uint4 x = *reinterpret_cast<const uint4*>(bytes(tile) + from);
                    codes[h][0] = x.x, codes[h][1] = x.y;
                    codes[h][2] = x.z, codes[h][3] = x.w;
                    scale[h] = Half<false>::to_float(scales(tile, at)[Format::scale_at(g + h * 8, part * GROUPS_HERE + group, true)]);
                }
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const uint32_t x = codes[e % 2][word];
                a[e] = WITH_OFFSETS ? Codes8::more(x, e / 2, kv.raise) : Codes8::integers(x, e / 2, kv.raise);
            }
        }
        DEVICE void add(float (&s)[4], const float (&product)[4], bool first) const {
#pragma unroll
            for (int e = 0; e < 4; ++e) s[e] = first ? product[e] * scale[e / 2] : fmaf(product[e], scale[e / 2], s[e]);
        }
    };
    // With few rows it takes less to multiply codes of K with 1152 more, as `more` makes them, and to begin the products
    // of a group with -1152 times the sum of its elements of Q, which the same tensor cores make. (A product is up to 10^5
    // times as large as an element of Q then, and fp32 has 24 bits. What is left of a long sum of V would be lost in it.)
    template <int Q_TILES> struct Offsets {
        static constexpr bool ARE_USED = Codes8::ARE_INTEGERS && GROUPS_HERE * Q_TILES <= 4;
        float sum[ARE_USED ? GROUPS_HERE : 1][Q_TILES][2];  // of rows 2t and 2t + 1
        DEVICE Offsets(const uint16_t* q, int part, int lane) {
            if constexpr (!ARE_USED) return;
            const uint32_t a[4] = {Codes8::LESS, Codes8::LESS, Codes8::LESS, Codes8::LESS};
#pragma unroll
            for (int group = 0; group < (ARE_USED ? GROUPS_HERE : 0); ++group)
#pragma unroll
                for (int qt = 0; qt < Q_TILES; ++qt) {
                    float c[4] = {};
#pragma unroll
                    for (int k = 0; k < 2; ++k) {
                        uint32_t b[4];
                        load_q(b, q, qt, (part * GROUPS_HERE + group) * 8 + k * 4, lane);
                        mma_16816<BF16_OPERANDS>(c, a, b[0], b[1]);
                        mma_16816<BF16_OPERANDS>(c, a, b[2], b[3]);
                    }
                    sum[group][qt][0] = c[0], sum[group][qt][1] = c[1];
                }
        }
        DEVICE float of(int group, int q_tile, int e) const { return ARE_USED ? sum[group][q_tile][e % 2] : 0.0f; }
    };
    template <int> struct Values {
        uint32_t codes[2][4];  // of keys 2t and 2t + 1, of 2t + 8 and 2t + 9: two elements of both
        uint32_t scale[2];     // of either two
        DEVICE void load(uint32_t (&a)[4], const CodeTile& kv, uint16_t* tile, int at, int step, int part, int lane) {
            const int pair = step % 4, group = step / 4, first = lane % 4 * 2, here = place(first, lane / 8) + lane / 4 % 2 * 8;
            if (pair == 0) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    uint2 x[2];
                    uint16_t its[2];
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        const int key = n + h * 8;
                        const char* const from = bytes(tile) + (here ^ flip(key) ^ group % 2 * 64) + group / 2 * 128 + line(at + key);
                        x[n] = *reinterpret_cast<const uint2*>(from);
                        its[n] = scales(tile, at)[Format::scale_at(first + key, part * GROUPS_HERE + group, false)];
                    }
                    codes[h][0] = __byte_perm(x[0].x, x[1].x, 0x5140);
                    codes[h][1] = __byte_perm(x[0].x, x[1].x, 0x7362);
                    codes[h][2] = __byte_perm(x[0].y, x[1].y, 0x5140);
                    codes[h][3] = __byte_perm(x[0].y, x[1].y, 0x7362);
                    scale[h] = its[0] | uint32_t(its[1]) << 16;
                }
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) a[e] = Codes8::integers(codes[e / 2][pair], e % 2, kv.raise);
        }
        DEVICE uint32_t weight(uint32_t p, int h) const { return Half<false>::mul2(p, scale[h]); }
    };
    static DEVICE int element(int step, int g, int upper) { return step / 4 * 64 + g * 8 + step % 4 * 2 + upper; }
    static DEVICE int spread(int element) { return element ^ (element >> 3 & 4); }
};

// The tile of a format with so many bits of a value.
template <class Format, int BITS, bool BF16, int HEAD_DIM, int DIM, int KEYS> struct WarpTileOf;
template <class Format, bool BF16, int HEAD_DIM, int DIM, int KEYS> struct WarpTileOf<Format, 16, BF16, HEAD_DIM, DIM, KEYS> {
    typedef ElementTile<Format, BF16, HEAD_DIM, DIM, KEYS> Tile;
};
template <class Format, bool BF16, int HEAD_DIM, int DIM, int KEYS> struct WarpTileOf<Format, 8, BF16, HEAD_DIM, DIM, KEYS> {
    typedef CodeTile<Format, BF16, HEAD_DIM, DIM, KEYS> Tile;
};
template <class Format, bool BF16, int HEAD_DIM, int DIM, int KEYS>
using WarpTile = typename WarpTileOf<Format, Format::BITS, BF16, HEAD_DIM, DIM, KEYS>::Tile;
