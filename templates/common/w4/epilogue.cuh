// Epilogue of the W4A16 kernels.
#pragma once
#include "common/pipeline/ll_exchange.cuh"
#include "common/w4/gate.cuh"

// Rounds and stores outputs of rows 4 g to 4 g + 3 of a strip of W for one token; `width` outputs a token. With a GATE
// the first two rows are gate's, the others are up's of the same two outputs.
template <bool BF16, Gate GATE>
DEVICE void store4(uint16_t* out, int64_t row, int width, int n_strip, int g, float a, float b, float c, float d) {
    typedef Half<BF16> H;
    if constexpr (GATE != Gate::none) {
        // As the model: gate, up and the activation are 16-bit tensors, each rounded.
        auto round = [](float v) { return H::to_float(H::from_float(v)); };
        const float low = round(activation<GATE>(round(a))) * round(c), high = round(activation<GATE>(round(b))) * round(d);
        *reinterpret_cast<uint32_t*>(out + row * width + n_strip * 16 + g * 2) = H::pack(low, high);
    } else {
        *reinterpret_cast<uint2*>(out + row * width + n_strip * 32 + g * 4) = make_uint2(H::pack(a, b), H::pack(c, d));
    }
}

// Likewise, without a gate, for a dependent kernel that polls: the outputs are LL-encoded pairs.
template <bool BF16>
DEVICE void post_outputs4(uint16_t* out, int64_t row, int width, int n_strip, int g, float a, float b, float c, float d) {
    typedef Half<BF16> H;
    ll_store2(reinterpret_cast<uint2*>(out + row * width + n_strip * 32 + g * 4),
          make_uint2(ll_encode_pair(H::pack(a, b)), ll_encode_pair(H::pack(c, d))));
}
