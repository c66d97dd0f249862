// Rows of a matrix that is packed for W4A16 products (pack.py), read one by one: eight neighbouring columns at a time.
#pragma once
#include "common/rows/vec.cuh"

enum class TableFormat { int4, int4_min, int8, int8_min };

// A value is code * scale, or code * scale + minimum, rounded to DTYPE; scales and minima are fp16.
//
// A row's codes of a tile are within 64 bytes, which it shares with a row of int8, or with three of int4: as many as the
// same columns take in 16 bits. Of eight columns 8 q and on, lane t of the tile's four has two in one word.
template <Dtype DTYPE, int COLUMNS, TableFormat FORMAT, int GROUP_SIZE> struct PackedRow {
    static constexpr int BITS = FORMAT == TableFormat::int4 || FORMAT == TableFormat::int4_min ? 4 : 8;
    static constexpr bool MINIMA = FORMAT == TableFormat::int4_min || FORMAT == TableFormat::int8_min;
    static constexpr int TILE_WORDS = 32 * BITS, STRIP_WORDS = COLUMNS / 32 * TILE_WORDS;
    static constexpr int GROUP_HALVES = MINIMA ? 64 : 32, STRIP_HALVES = COLUMNS / GROUP_SIZE * GROUP_HALVES;
    static constexpr int MOST_LOADS = 6;  // as DenseRow's (exact_logits.cuh)
    static constexpr int ZERO = BITS == 8 ? 128 : MINIMA ? 0 : 8;  // of a code as it is stored
    static_assert(COLUMNS % 32 == 0 && COLUMNS % GROUP_SIZE == 0 && GROUP_SIZE % 8 == 0);

    struct Vec {
        uint32_t words[4];
        uint32_t shift;  // of the first of a word's two columns; the other's is 16 more
        uint16_t scale, minimum;

        DEVICE void unpack(float (&x)[8]) const {
            const float s = Half<false>::to_float(scale), m = MINIMA ? Half<false>::to_float(minimum) : 0.0f;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int code = words[j / 2] >> (shift + j % 2 * 16) & ((1u << BITS) - 1);
                x[j] = MINIMA ? fmaf(float(code - ZERO), s, m) : float(code - ZERO) * s;
            }
            round8<DTYPE>(x);
        }
    };

    const uint32_t* codes;  // null: there is no such row
    const uint16_t* scales;
    int odd;

    static DEVICE PackedRow at(const void* packed, const void* scales, int64_t row) {
        const int64_t strip = row / 32;
        const int r = int(row) % 32, pair = r / 2;
        const int word = BITS == 8 ? pair % 2 * 128 + r / 4 * 16 : r / 4 * 16 + pair % 2 * 2;
        const int half = MINIMA ? pair * 4 + r % 2 : r;
        return {static_cast<const uint32_t*>(packed) + strip * STRIP_WORDS + word,
                static_cast<const uint16_t*>(scales) + strip * STRIP_HALVES + half, r % 2};
    }
    static DEVICE PackedRow at_if(bool exists, const void* packed, const void* scales, int64_t row) {
        PackedRow found = at(packed, scales, row);
        if (!exists) found.codes = nullptr;
        return found;
    }
    DEVICE bool is_there() const { return codes; }
    // Columns 8 v to 8 v + 7; zeros where not `valid`. Neighbours' loads share sectors, so L1 keeps them.
    DEVICE void load(Vec& to, int v, bool valid) const {
        const int q = v % 4, at = v / 4 * TILE_WORDS + (BITS == 8 ? q : q / 2), group = 8 * v / GROUP_SIZE * GROUP_HALVES;
#pragma unroll
        for (int t = 0; t < 4; ++t) to.words[t] = valid ? codes[at + 4 * t] : 0;
        to.scale = valid ? scales[group] : 0;
        to.minimum = MINIMA && valid ? scales[group + 2] : 0;
        to.shift = BITS == 8 ? 8 * odd : 4 * (odd + q % 2 * 2);
    }
};
