// What the W4A16 kernels do with a finished sum.
#pragma once
#include "common/rows/gelu.cuh"
#include "common/pipeline/ll_exchange.cuh"

// Rounds and stores outputs of rows 4 g to 4 g + 3 of a strip of W, of one row of x; `width` outputs a row. GATED: the
// first two rows are gate's, the others up's of the same two outputs.
template <bool BF16, bool GATED>
DEVICE void store4(uint16_t* out, int64_t row, int width, int n_strip, int g, float a, float b, float c, float d) {
    typedef Half<BF16> H;
    if constexpr (GATED) {
        // as the model: gate and up are tensors of 16 bits, and so is the activation before it meets up
        auto round = [](float v) { return H::to_float(H::from_float(v)); };
        const float low = round(gelu_tanh(round(a))) * round(c), high = round(gelu_tanh(round(b))) * round(d);
        *reinterpret_cast<uint32_t*>(out + row * width + n_strip * 16 + g * 2) = H::pack(low, high);
    } else {
        *reinterpret_cast<uint2*>(out + row * width + n_strip * 32 + g * 4) = make_uint2(H::pack(a, b), H::pack(c, d));
    }
}

// The same, not GATED, for a launch behind that polls for them: as posted pairs.
template <bool BF16>
DEVICE void post_outputs4(uint16_t* out, int64_t row, int width, int n_strip, int g, float a, float b, float c, float d) {
    typedef Half<BF16> H;
    ll_store2(reinterpret_cast<uint2*>(out + row * width + n_strip * 32 + g * 4),
          make_uint2(ll_encode_pair(H::pack(a, b)), ll_encode_pair(H::pack(c, d))));
}
